"""Expansions that leave the inputs (nearly) as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kapsi.expansion.base import Expansion
from kapsi.features import DenseFeatures, Features
from kapsi.function import Tensors

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity(Expansion, name="identity"):
    """The inputs themselves: κ(x) = x, D = m.

    Source: Reconciled Polynomial Network (arXiv 2407.04819), "Identity and Reciprocal Data Expansion".

    Example:
        >>> import torch
        >>> Identity()(torch.tensor([1.0, 2.0]), {}).dense()
        tensor([1., 2.])
    """

    def factors(self, in_features: int) -> tuple[int, int]:  # noqa: D102
        return 1, in_features

    def __call__(self, x: Tensor, params: Tensors) -> Features:  # noqa: D102
        return DenseFeatures(x)
