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
    "bounded_ratio",
    "columns_of_basis",
    "common_range",
    "data_range",
    "decay",
    "spread",
    "within_domain",
    "within_reach",
    "working_precision",
]

QUARTILES = 1.3489795003921634
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

    def forgiving(self) -> Expansion:
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
    def moved(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        slopes, several = KnownDerivatives._slopes(ctx, *values)
        moved: Tensor = slopes * (tangents[0].unsqueeze(-2) if several else tangents[0])
        return moved

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, order: int, evaluate: Any) -> tuple[Tensor, int]:
        return KnownDerivatives.apply(x.movedim(in_dims[0], 0), order, evaluate), 0


def within_domain(expansion: Expansion, x: Tensor) -> Tensor:
    """Return inputs moved into the domain of a heavy-tailed expansion; of any other as they are."""
    if not expansion.heavy_tailed():
        return x
    return x.clamp(*common_range(expansion, x.shape[-1]))


def common_range(expansion: Expansion, in_features: int) -> tuple[float, float]:
    """Return the range in which all columns are well behaved; the lower end is above the upper where they share none."""
    bounds = expansion.domain(in_features)
    return max(low for _, low, _ in bounds), min(high for _, _, high in bounds)


def spread(expansion: Expansion, y: Tensor) -> float:
    """Return the root mean square of outputs; of a heavy-tailed expansion that of a normal one with its middle half."""
    values = y.double().flatten()
    if expansion.heavy_tailed() and values.numel() > 1:
        low, high = torch.quantile(values[: 2**20], values.new_tensor([0.25, 0.75])).tolist()
        if high > low:
            return float(high - low) / QUARTILES
    return float(values.square().mean().sqrt())


def data_range(x: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Return the lower and upper ends of each input in data `(rows, m)`, with room around a constant input.

    Args:
        x: the data.
        cells: into how many parts the range will be cut; each must be wider than rounding.
    """
    most, coarse = torch.finfo(x.dtype).max, torch.finfo(x.dtype).eps
    x = working_precision(x)
    info = torch.finfo(x.dtype)
    low, high = x.amin(0).clamp(-info.max / 8, info.max / 8), x.amax(0).clamp(-info.max / 8, info.max / 8)
    # At a width of few rounding steps the parts would vanish, or both ends become one in the type that they are kept in.
    largest = torch.maximum(low.abs(), high.abs())
    least = (largest * max(64 * cells * info.eps, 4 * coarse)).clamp_min(info.tiny * 64 * cells)
    margin = torch.where(high - low > least, torch.zeros_like(low), least.clamp_min(0.5))
    return (low - margin).clamp_min(-most), (high + margin).clamp_max(most)


def working_precision(x: Tensor) -> Tensor:
    """Return x in float32 if it comes in a 16-bit type: bases lose all their digits there (a cubic has an error of 0.25)."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def columns_of_basis(values: list[Tensor]) -> Tensor:
    """Return [φ₁(x), φ₂(x), …], basis-major, from a list of `(..., m)`."""
    return torch.cat(values, -1) if len(values) > 1 else values[0]


def decay(z: Tensor) -> Tensor:
    """Return exp(−z), zero from where it would be a denormal number: those make a product take 30 times as long."""
    return torch.exp(-torch.where(z > _reach(z), math.inf, z))


def within_reach(u: Tensor) -> Tensor:
    """Return u moved to where exp(−u²/2) is a normal number."""
    most = math.sqrt(2 * _reach(u))
    return u.clamp(-most, most)


def _reach(like: Tensor) -> float:
    return -0.9 * math.log(torch.finfo(like.dtype).tiny)


def bounded_ratio(top: Tensor, bottom: Tensor, nearest: float) -> Tensor:
    """Return top / bottom where that is at most 1/ε, ε = `nearest`, and a smooth bridge across the pole.

    With c = bottom / top the ratio is 1/c for |c| ≥ ε and the odd 2c/ε² − c³/ε⁴ for |c| < ε: equal in value and slope at
    the seams, zero at the pole. Top and bottom must not both be zero.
    """
    inside = bottom.abs() < nearest * top.abs()
    one = torch.ones_like(top)
    # Each branch with arguments that are safe for it: a NaN in the branch that is not taken would spoil the gradient.
    outer = top / torch.where(inside, one, bottom)
    c = torch.where(inside, bottom, 0 * one) / torch.where(inside, top, one) / nearest
    return torch.where(inside, (2 - c.square()) * c / nearest, outer)
