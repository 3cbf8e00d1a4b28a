"""What the trainers of support vector machines are given, checked: inputs, targets, γ, and C of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.zoo.base import tensor_of

__all__ = ["ClassWeight", "costs", "dense_inputs", "finite_number", "gamma_of", "targets_of"]

ClassWeight: TypeAlias = Mapping[int, float] | Sequence[float] | Literal["balanced"] | None
"""Weights of the classes, by number or in order."""


def finite_number(where: str, name: str, value: Any, least: float, open_end: bool = False) -> float:
    """Return a number of Python or NumPy that is finite and large enough."""
    number = math.nan
    if not isinstance(value, bool | str):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = math.nan
    if not math.isfinite(number) or number < least or (open_end and number == least):
        bound = "" if math.isinf(least) else f" {'above' if open_end else 'of at least'} {least:g}"
        raise SpecError(f"{where}({name}={value!r}): expected a finite number{bound}")
    return number


def dense_inputs(x: Any, where: str) -> Tensor:
    """Return inputs as `(rows, m)` in float64 on the CPU."""
    if hasattr(x, "toarray") or (isinstance(x, Tensor) and x.layout != torch.strided):
        dense = "x.to_dense()" if isinstance(x, Tensor) else "x.toarray()"
        raise SpecError(f"{where}: expected dense inputs; use {dense}")
    try:
        made = tensor_of(x).to("cpu", torch.float64).contiguous()
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{where}: expected inputs as numbers of shape (rows, m), got {type(x).__name__}") from None
    if made.dim() != 2 or not made.numel():
        raise SpecError(f"{where}: expected inputs of shape (rows, m) with at least one row, got {tuple(made.shape)}")
    if not bool(torch.isfinite(made).all()):
        raise SpecError(f"{where}: the inputs must be finite")
    return made


def targets_of(y: Any, rows: int, where: str) -> tuple[np.ndarray, int]:
    """Return the targets, and the number of classes, 0 for numbers."""
    try:
        made = tensor_of(y).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{where}: expected y as class numbers or numbers, one a row, got {type(y).__name__}") from None
    if made.shape != (rows,) or made.is_complex():
        raise SpecError(f"{where}: expected y of shape ({rows},), got {made.dtype} of shape {tuple(made.shape)}")
    if made.is_floating_point():
        if not bool(torch.isfinite(made).all()):
            raise SpecError(f"{where}: y must be finite")
        return made.double().numpy(), 0
    found = torch.unique(made).long().tolist()
    if len(found) < 2 or found != list(range(len(found))):
        shown = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
        raise SpecError(
            f"{where}: expected class numbers 0 to n − 1, at least two classes, each with rows; got {shown}; for regression "
            "give y as floating-point"
        )
    return made.long().numpy(), len(found)


def gamma_of(gamma: Any, x: Tensor, where: str) -> float:
    """Return γ as a number: what was given, or what `scale` and `auto` stand for."""
    if isinstance(gamma, str):
        if gamma not in ("scale", "auto"):
            raise SpecError(f"{where}(gamma={gamma!r}): expected scale, auto or a number above 0")
        variance = float(x.var(correction=0)) if gamma == "scale" else 1.0
        return 1 / (x.shape[1] * variance) if variance else 1.0
    return finite_number(where, "gamma", gamma, 0.0, open_end=True)


def costs(
    where: str, C: Any, target: np.ndarray, classes: int, class_weight: ClassWeight, sample_weight: Any
) -> np.ndarray:
    """Return C of each row."""
    cost = np.full(len(target), finite_number(where, "C", C, 0.0, open_end=True))
    if class_weight is not None:
        if not classes:
            raise SpecError(f"{where}: class_weight is for class numbers, y are numbers; leave it out")
        cost *= _class_weights(where, target, classes, class_weight)[target]
    if sample_weight is not None:
        try:
            weight = tensor_of(sample_weight).cpu().double().numpy()
        except (TypeError, ValueError, RuntimeError):
            weight = np.empty(0)
        if weight.shape != target.shape or not np.isfinite(weight).all() or weight.min() < 0:
            raise SpecError(f"{where}: expected sample_weight as {len(target)} finite numbers of at least 0, one a row")
        cost *= weight
    for label in range(classes):
        if not cost[target == label].any():
            raise SpecError(
                f"{where}: all rows of class {label} have weight 0; give one of them more, or leave the class out"
            )
    if not cost.any():
        raise SpecError(f"{where}: all rows have weight 0")
    return cost


def _class_weights(where: str, target: np.ndarray, classes: int, given: Any) -> np.ndarray:
    counts = np.bincount(target, minlength=classes)
    if isinstance(given, str):
        if given != "balanced":
            raise SpecError(f"{where}(class_weight={given!r}): expected balanced, or a number for each class")
        return cast(np.ndarray, len(target) / (classes * counts))
    if isinstance(given, Mapping):
        if any(label not in range(classes) for label in given):
            raise SpecError(f"{where}(class_weight={dict(given)!r}): the classes are 0 to {classes - 1}")
        given = [given.get(label, 1.0) for label in range(classes)]
    if not isinstance(given, Sequence | np.ndarray) or len(given) != classes:
        raise SpecError(
            f"{where}(class_weight={given!r}): expected balanced, or a number for each of {classes} classes"
        )
    return np.array([finite_number(where, "class_weight", value, 0.0) for value in given])
