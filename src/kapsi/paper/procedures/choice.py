"""The choice among the candidates of a classifier by several parts that are held out, one after another."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.paper.procedures import classifiers
from kapsi.spec import set_option

__all__ = ["Pair", "Part", "choose"]

Rows = npt.NDArray[np.int64]
Pair: TypeAlias = tuple[Any, Rows]
"""Inputs and class numbers."""
Part: TypeAlias = Callable[[], tuple[Pair, Pair]]
"""Makes rows to fit and rows to judge on."""


def choose(
    kind: str,
    rows: Pair,
    parts: Sequence[Part],
    options: Mapping[str, Any],
    seed: int,
    *,
    classes: int,
    where: str,
) -> classifiers.Fitted:
    """Choose by the mean accuracy over the parts, of equal candidates the first, and fit what was chosen to all rows.

    Args:
        kind: a key of `classifiers.KINDS`.
        rows: what the chosen one is fitted to.
        parts: of them; not used where there is no `grid`.
        options: those of `classifiers.fit`.
        seed: as there.
        classes: number of classes.
        where: begins the messages of errors.
    """
    started = time.process_time()
    found: list[tuple[Mapping[str, Any], float]] = []
    if options.get("grid"):
        judged = []
        for part in parts:
            kept, held = part()
            once = {**options, "refit": False}
            judged.append(
                classifiers.fit(kind, *kept, *held, once, seed, classes=classes, where=where).candidates
                or _single(kind, kept, held, options, seed, classes, where)
            )
        for same in zip(*judged, strict=True):
            found.append((same[0][0], float(np.mean([accuracy for _, accuracy in same]))))
    chosen: Mapping[str, Any] = {}
    validation = None
    if found:
        chosen, validation = max(found, key=lambda each: each[1])
    made = classifiers.fit(kind, *rows, options=_with(options, chosen), seed=seed, classes=classes, where=where)
    seconds = time.process_time() - started
    return replace(made, chosen=chosen, validation=validation, candidates=tuple(found), seconds=seconds)


def _with(options: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one candidate."""
    own = {name: copy.deepcopy(value) for name, value in options.items() if name not in ("grid", "tune", "tune_rows")}
    for path, value in chosen.items():
        set_option(own, path, value)
    return own


def _single(
    kind: str, kept: Pair, held: Pair, options: Mapping[str, Any], seed: int, classes: int, where: str
) -> tuple[tuple[Mapping[str, Any], float], ...]:
    """Return the only candidate of a grid and its accuracy: with a single one there is nothing to choose for `classifiers.fit`."""
    chosen = {path: values[0] for path, values in options["grid"].items()}
    made = classifiers.fit(kind, *kept, options=_with(options, chosen), seed=seed, classes=classes, where=where)
    return ((chosen, float((made.predict(held[0]) == held[1]).mean())),)
