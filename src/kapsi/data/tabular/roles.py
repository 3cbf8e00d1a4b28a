"""The part that each column plays: index columns, and notes on inputs that look like none."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import Floats, Table, listed, numeric_blocks, short

SENTINELS = (-9999, -99999, -999, -99, 9999, 99999, 999)
FAR = 5.0
LEAST_ROWS = 10


def index_columns(table: Table) -> dict[str, str]:
    """Return the columns that number the rows, with the reason: an unnamed first column, and pandas' `__index_level_0__`."""
    found = {name: "it is the index of pandas" for name in table.columns if re.fullmatch(r"__index_level_\d+__", name)}
    first = next(iter(table.columns), "")
    if first in ("column 1", "Unnamed: 0") and len(table.columns) > 1:
        column = table.columns[first]
        if column.kind == "integer":
            steps = np.diff(column.numbers)
            if column.numbers[0] in (0, 1) and bool((steps == 1).all()):
                found[first] = "it has no name and numbers the rows"
    return found


def sentinels(features: Table) -> list[str]:
    """Return notes on values such as −9999 that are repeated and far from all others."""
    notes = []
    for names, values in numeric_blocks(features.columns):
        for sentinel in SENTINELS:
            hits = values == sentinel
            counts = hits.sum(1)
            for i in np.flatnonzero(counts >= 2):
                rest = values[i][~hits[i] & ~np.isnan(values[i])]
                if len(rest) > 1 and _far(sentinel, rest):
                    count = f"{counts[i]} of {values.shape[1]} rows"
                    notes.append(
                        f"column {short(names[i])} is {sentinel} in {count}, far from all other values; "
                        f"--missing {sentinel} treats them as missing"
                    )
    return notes


def _far(value: float, rest: Floats) -> bool:
    """Return whether a value is outside of other values by several times their range."""
    low, high = float(rest.min()), float(rest.max())
    width = max(high - low, 1e-300)
    return value < low - width or value > high + FAR * width or (value < 0 <= low)


def order_notes(features: Table, y: npt.NDArray[np.generic], classes: bool) -> list[str]:
    """Return notes on inputs that order the rows as the target does, and on whole numbers that are all distinct."""
    notes, distinct = [], []
    if len(y) < LEAST_ROWS or y.ndim > 1:
        return []
    for names, values in numeric_blocks({n: c for n, c in features.columns.items() if c.kind != "boolean"}):
        order = np.argsort(values, axis=1, kind="stable")
        ordered = np.take_along_axis(values, order, axis=1)
        for i in np.flatnonzero((np.diff(ordered, axis=1) > 0).all(1)):
            same = _runs(y[order[i]]) if classes else _monotone(y[order[i]])
            if same and len(features.columns) > 1:
                notes.append(
                    f"column {short(names[i])} orders the rows as the target does; if it comes from the target, "
                    f"--drop {short(names[i])} leaves it out"
                )
            elif features.columns[names[i]].kind == "integer":
                distinct.append(names[i])
    if distinct:
        notes.append(
            f"whole numbers that are all distinct, as of identifiers: {listed(distinct)}; --drop leaves them out"
        )
    return notes


def _monotone(y: npt.NDArray[np.generic]) -> bool:
    steps = np.diff(y.astype(np.float64))
    return bool((steps > 0).all() or (steps < 0).all())


def _runs(codes: npt.NDArray[np.generic]) -> bool:
    """Return whether the rows of each class follow each other."""
    return int((codes[1:] != codes[:-1]).sum()) == len(np.unique(codes)) - 1
