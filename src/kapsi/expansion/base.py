"""The protocol of data expansions κ: Rᵐ → Rᴰ, and what element-wise families share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kapsi.features import Features
from kapsi.function import Function, Params, Tensors

__all__ = ["Expansion", "Interval", "columns_of_basis", "spread", "within_domain", "working_precision"]

QUARTILES = 1.3489795003921634
"""The distance of the quartiles of a standard normal distribution."""

Interval: TypeAlias = tuple[int, float, float]
"""A group of consecutive columns and the range of inputs on which they are well behaved: (columns, low, high)."""


class Expansion(Function, role="expansion"):
    """κ: a data expansion, `(..., m) → (..., D)`, row by row.

    An instance is called with inputs and the tensors it declared, and returns `Features`.
    """

    @abstractmethod
    def factors(self, in_features: int) -> tuple[int, int]:
        """Return (q, t), D = q·t: the grid on which Kronecker kinds of ψ fit κ naturally."""

    def out_features(self, in_features: int) -> int:
        """Return D, the number of columns."""
        return math.prod(self.factors(in_features))

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        """Return where the columns are well behaved, as (columns, low, high) for each group of columns in order."""
        return ((self.out_features(in_features), -math.inf, math.inf),)

    def heavy_tailed(self) -> bool:
        """Return whether a few inputs outweigh all others, as with polynomials of high degree, 1/x and tan.

        Initial weights are then scaled for inputs in the domain, and by the middle half of what they make of those.
        """
        return False

    def params(self, in_features: int) -> Params:
        """Return the tensors that the expansion needs; nested by part for expansions made of others."""
        return {}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return new values for some of the tensors, estimated from data.

        Args:
            x: inputs of the expansion, `(rows, m)`.
            params: the present values.
            y: class labels or targets, `(rows,)` or `(rows, n)`, for the expansions that use them.
        """
        return {}

    @abstractmethod
    def __call__(self, x: Tensor, params: Tensors) -> Features:
        """Return κ(x) for x of shape `(..., m)`."""


def within_domain(expansion: Expansion, x: Tensor) -> Tensor:
    """Return inputs moved into the domain of a heavy-tailed expansion; of any other as they are."""
    if not expansion.heavy_tailed():
        return x
    bounds = expansion.domain(x.shape[-1])
    return x.clamp(max(low for _, low, _ in bounds), min(high for _, _, high in bounds))


def spread(expansion: Expansion, y: Tensor) -> float:
    """Return the standard deviation of outputs; of a heavy-tailed expansion that of a normal one with its middle half."""
    values = y.double().flatten()
    if expansion.heavy_tailed() and values.numel() > 1:
        low, high = torch.quantile(values[: 2**20], values.new_tensor([0.25, 0.75])).tolist()
        if high > low:
            return float(high - low) / QUARTILES
    return float(values.square().mean().sqrt())


def working_precision(x: Tensor) -> Tensor:
    """Return x in float32 if it comes in a 16-bit type: bases lose all their digits there (a cubic has an error of 0.25)."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def columns_of_basis(values: list[Tensor]) -> Tensor:
    """Return [φ₁(x), φ₂(x), …], basis-major, from a list of `(..., m)`."""
    return torch.cat(values, -1) if len(values) > 1 else values[0]
