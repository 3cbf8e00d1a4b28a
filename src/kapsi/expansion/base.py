"""The protocol of data expansions κ: Rᵐ → Rᴰ, and what element-wise families share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kapsi.derivatives import OwnDerivatives
from kapsi.features import Features
from kapsi.function import Function, Params, Tensors

__all__ = [
    "Expansion",
    "Interval",
    "KnownDerivatives",
    "Refinement",
    "clamp_to_domain",
    "common_domain",
    "rms",
]

NORMAL_IQR = 1.3489795003921634
"""The distance of the quartiles of a standard normal distribution."""

Interval: TypeAlias = tuple[int, float, float]
"""A group of consecutive columns and the range of inputs on which they are well behaved: (columns, low, high)."""


@dataclass(frozen=True)
class Refinement:
    """An expansion on a finer grid, and how the present functions are written in the new ones: κ_old(x) = M κ_new(x).

    Args:
        expansion: κ_new.
        tensors: its tensors, all of them.
        columns: multiplies rows `(..., D)` by M, to `(..., D′)`.
        grid: multiplies rows `(..., q)` by N, to `(..., q′)`, where M = N ⊗ I acts on the first axis of κ's grid alone;
            None where it does not.
    """

    expansion: Expansion
    tensors: Tensors
    columns: Callable[[Tensor], Tensor]
    grid: Callable[[Tensor], Tensor] | None = None


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

    def clamped(self) -> Expansion:
        """Return the expansion that stands for this one where initial outputs are measured: it refuses no input."""
        return self

    def element_wise(self) -> bool:
        """Return whether each column depends on one input alone, basis-major: column g·m + i on input i of m."""
        return False

    def takes_sparse(self) -> bool:
        """Return whether inputs may be a `torch.sparse_csr` tensor: zeros then make zeros, and `__call__` looks at the layout."""
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

    def has_grid(self) -> bool:
        """Return whether there is a grid in it that `kapsi.refine` makes finer."""
        return False

    def refined(self, tensors: Tensors, in_features: int, intervals: int) -> Refinement | None:
        """Return the same functions on a grid of so many intervals, or None where there is no grid.

        Args:
            tensors: the present values.
            in_features: m.
            intervals: of the new grid.

        Raises:
            SpecError: the present functions cannot be written in those of the new grid.
        """
        return None

    @abstractmethod
    def __call__(self, x: Tensor, params: Tensors) -> Features:
        """Return κ(x) for x of shape `(..., m)`."""


class KnownDerivatives(OwnDerivatives):
    """A function of each input whose derivatives of every order are known: evaluated in place, and only x is kept.

    Called with x `(..., m)`, an order, and `evaluate(x, order)`, which returns the derivative of that order at x, `(..., m)`, or
    `(..., G, m)` for G functions at once; it is called where nothing is differentiated.
    """

    @staticmethod
    def forward(x: Tensor, order: int, evaluate: Callable[[Tensor, int], Tensor]) -> Tensor:
        return evaluate(x, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.order, ctx.evaluate = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def _slopes(ctx: Any, x: Tensor) -> tuple[Tensor, bool]:
        """Return the next derivative, and whether it is one of several functions."""
        slopes: Tensor = KnownDerivatives.apply(x, ctx.order + 1, ctx.evaluate)
        return slopes, slopes.dim() > x.dim()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        slopes, several = KnownDerivatives._slopes(ctx, *ctx.saved_tensors)
        product = gradient * slopes
        return product.sum(-2) if several else product, None, None

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        slopes, several = KnownDerivatives._slopes(ctx, *values)
        tangent: Tensor = slopes * (tangents[0].unsqueeze(-2) if several else tangents[0])
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, order: int, evaluate: Any) -> tuple[Tensor, int]:
        return KnownDerivatives.apply(x.movedim(in_dims[0], 0), order, evaluate), 0


def clamp_to_domain(expansion: Expansion, x: Tensor) -> Tensor:
    """Return inputs moved into the domain of a heavy-tailed expansion; of any other as they are."""
    if not expansion.heavy_tailed():
        return x
    return x.clamp(*common_domain(expansion, x.shape[-1]))


def common_domain(expansion: Expansion, in_features: int) -> tuple[float, float]:
    """Return the range in which all columns are well behaved; the lower end is above the upper where they share none."""
    bounds = expansion.domain(in_features)
    return max(low for _, low, _ in bounds), min(high for _, _, high in bounds)


def rms(expansion: Expansion, y: Tensor) -> float:
    """Return the root mean square of outputs; of a heavy-tailed expansion that of a normal one with its middle half."""
    values = y.double().flatten()
    if expansion.heavy_tailed() and values.numel() > 1:
        low, high = torch.quantile(values[: 2**20], values.new_tensor([0.25, 0.75])).tolist()
        if high > low:
            return float(high - low) / NORMAL_IQR
    return float(values.square().mean().sqrt())
