"""Checked data of support vector machines: inputs, targets, γ, and C of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, check_number
from kapsi.zoo.base import finite_tensor, row_weights, tensor_of

ClassWeight: TypeAlias = Mapping[int, float] | Sequence[float] | Literal["balanced"] | None
"""Weights of the classes, by number or in order."""

POSITIVE = math.ulp(0.0)


def targets_of(y: Any, rows: int, where: str) -> tuple[np.ndarray, int]:
    """Return the targets, and the number of classes, 0 for regression."""
    numbers = finite_tensor(y, f"{where}: y (class labels or regression targets)")
    if numbers.shape != (rows,):
        raise DataError(f"{where}: expected y of shape ({rows},), got {tuple(numbers.shape)}")
    if tensor_of(y).is_floating_point():
        return numbers.numpy(), 0
    targets = tensor_of(y).cpu().long()
    classes = torch.unique(targets).tolist()
    if len(classes) < 2 or classes != list(range(len(classes))):
        listed = ", ".join(map(str, classes[:8])) + (", …" if len(classes) > 8 else "")
        raise DataError(
            f"{where}: expected class labels 0 to n − 1, at least two classes, each with rows; got {listed}; for regression "
            "give y as floating-point"
        )
    return targets.numpy(), len(classes)


def gamma_of(gamma: Any, x: Tensor, where: str) -> float:
    """Return γ as a number, with `scale` and `auto` resolved."""
    if gamma == "scale":
        variance = float(x.var(correction=0))
        return 1 / (x.shape[1] * variance) if variance else 1.0
    if gamma == "auto":
        return 1 / x.shape[1]
    return check_number(f"{where}(gamma)", gamma, POSITIVE, wanted="scale, auto or a finite number above 0")


def costs(
    where: str, C: Any, target: np.ndarray, classes: int, class_weight: ClassWeight, sample_weight: Any
) -> np.ndarray:
    """Return C of each row."""
    cost = np.full(len(target), check_number(f"{where}(C)", C, POSITIVE, wanted="a finite number above 0"))
    if class_weight is not None:
        if not classes:
            raise SpecError(f"{where}: class_weight is for class labels, y are real values; leave it out")
        cost *= _class_weights(where, target, classes, class_weight)[target]
    cost *= row_weights(where, sample_weight, len(target)).numpy()
    unused = [f"class {label}" for label in range(classes) if not cost[target == label].any()]
    if unused:
        raise DataError(f"{where}: all rows of {unused[0]} have weight 0; increase a weight")
    return cost


def _class_weights(where: str, target: np.ndarray, classes: int, weights: Any) -> np.ndarray:
    if isinstance(weights, str) and weights == "balanced":
        return cast(np.ndarray, len(target) / (classes * np.bincount(target, minlength=classes)))
    listed: Any = weights
    if isinstance(weights, Mapping) and all(label in range(classes) for label in weights):
        listed = [weights.get(label, 1.0) for label in range(classes)]
    if isinstance(listed, str) or not isinstance(listed, Sequence | np.ndarray) or len(listed) != classes:
        raise SpecError(
            f"{where}(class_weight={weights!r}): expected balanced, or a number for each of {classes} classes, 0 to {classes - 1}"
        )
    return np.array([check_number(f"{where}(class_weight)", value, 0) for value in listed])
