"""What the models of the zoo share: cases that compare an imported model with the one of the library that it comes from."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kapsi.modules import Model

__all__ = ["Case", "Comparison", "cases", "tensor_of"]


def tensor_of(values: Any) -> Tensor:
    """Return numbers as a tensor of their own type and device, without a gradient.

    Arrays that torch refuses or warns of are copied: reversed ones, those of another byte order, and those that cannot be written.

    Raises:
        TypeError, ValueError: no numbers, or complex ones.
    """
    if isinstance(values, Tensor):
        made = values.detach()
    else:
        array = np.asarray(values)
        if min(array.strides, default=0) < 0 or not array.dtype.isnative or not array.flags.writeable:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        made = torch.as_tensor(array)
    if made.is_complex():
        raise TypeError("complex numbers")
    return made


class Comparison(NamedTuple):
    """What came of a comparison.

    Attributes:
        deviation: largest absolute difference of what is compared, relative where values are larger than one.
        ours: number of values in the model of kapsi that the mapping fills, parameters and buffers.
        theirs: number of values in the other model.
        model: the model of kapsi, to be saved, exported and trained further.
        x: inputs for it, some rows.
        y: targets that it can be trained on, with the loss `loss`.
        loss: the name of a loss of `kapsi.fit`.
    """

    deviation: float
    ours: int
    theirs: int
    model: Model
    x: Tensor
    y: Tensor
    loss: str


@dataclass(frozen=True)
class Case:
    """A comparison with another library.

    Args:
        model: what is compared, as people call it: `SVC, RBF kernel`.
        quantity: what is compared of it: `decision_function`.
        data: the data set, for people.
        package: the name of the other library's distribution: `scikit-learn`.
        tolerance: the largest deviation that is allowed.
        compare: makes both models and compares them; it imports the other library itself. The argument is a seed, 0 in tables.
    """

    model: str
    quantity: str
    data: str
    package: str
    tolerance: float
    compare: Callable[[int], Comparison]


def cases() -> list[Case]:
    """Return the cases of all models of the zoo: the tuples `PARITY` of its files."""
    import kapsi.zoo as zoo

    found: list[Case] = []
    for module in sorted(pkgutil.iter_modules(zoo.__path__), key=lambda each: each.name):
        found += getattr(importlib.import_module(f"kapsi.zoo.{module.name}"), "PARITY", ())
    return found
