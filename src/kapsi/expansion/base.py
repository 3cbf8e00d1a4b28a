"""The protocol of data expansions κ: Rᵐ → Rᴰ."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from kapsi.derivatives import OwnDerivatives
from kapsi.errors import DataError
from kapsi.features import Features
from kapsi.function import Function, Params, Tensors
from kapsi.process import Process

NORMAL_IQR = 1.3489795003921634
"""Interquartile range of the standard normal distribution."""

HIDDEN_MARGIN = 3.0
"""`Expansion.hidden_margin` of expansions with a grid.

Outputs of a trained layer are wider than those of an untrained one. Levenberg–Marquardt, extended B-spline and Taylor, five
seeds: with a margin of 1 the errors of C.1, C.4 and C.7 have medians of 0.7, 0.5 and 0.06; with 2, 4e-12, 3e-9 and 0.05; with 3,
5e-12, 5e-11 and 3e-9. Ranges that contain the domain, too, are no better on 17 functions (three seeds).
"""

Interval: TypeAlias = tuple[int, float, float]
"""A group of consecutive columns and their domain: (columns, low, high)."""

RowMap: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map of rows `(..., a)` to `(..., b)`."""


@dataclass(frozen=True)
class Refinement:
    """An expansion on a finer grid, with the old expansion as a linear map of the new: κ_old(x) = M κ_new(x).

    Args:
        expansion: the new expansion κ_new.
        tensors: all tensors of κ_new.
        columns: multiplies rows `(..., D)` by M, to `(..., D′)`.
        grid: multiplies rows `(..., q)` by N, to `(..., q′)`, if M = N ⊗ I acts on the first axis of κ's grid alone;
            otherwise None.
    """

    expansion: Expansion
    tensors: Tensors
    columns: RowMap
    grid: RowMap | None = None


class Expansion(Function, role="expansion"):
    """κ: a data expansion, `(..., m) → (..., D)`, row by row.

    Call an instance with inputs and the declared tensors; the result is a `Features`.

    Attributes:
        hidden_margin: width of the calibrated range of a hidden layer, relative to its inputs before training; 1 for expansions
            without a range.
    """

    hidden_margin: ClassVar[float] = 1.0
    symbol: ClassVar[str] = ""
    """Letter of the functions in names of columns; empty for the name of the expansion."""
    first_index: ClassVar[int] = 0
    """Index of the first function in names of columns."""

    @abstractmethod
    def factors(self, in_features: int) -> tuple[int, int]:
        """Return (q, t), D = q·t: the natural grid for Kronecker kinds of ψ."""

    def out_features(self, in_features: int) -> int:
        """Return D, the number of columns."""
        return math.prod(self.factors(in_features))

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        """Return the domain of well-behaved inputs, as (columns, low, high) for each group of columns in order."""
        return ((self.out_features(in_features), -math.inf, math.inf),)

    def covered(self, params: Tensors, in_features: int) -> tuple[Tensor, Tensor] | None:
        """Return the ends of the range of inputs resolved by κ with its current tensors, `(m,)`; None if unknown or unlimited."""
        low, high = common_domain(self, in_features)
        if not low < high or math.isinf(low) or math.isinf(high) or self.params(in_features):
            return None
        return torch.full((in_features,), low), torch.full((in_features,), high)

    def heavy_tailed(self) -> bool:
        """Return whether a few inputs dominate the outputs, as with polynomials of high degree, 1/x and tan.

        The scale of initial weights is then measured on inputs in the domain, by the middle half of the outputs.
        """
        return False

    def clamped(self) -> Expansion:
        """Return a variant without errors for inputs out of range, used to measure initial outputs."""
        return self

    def element_wise(self) -> bool:
        """Return whether every column depends on a single input, basis-major: column g·m + i on input i of m."""
        return False

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        """Return the names of the columns of κ(x), `(D,)`, such as `T3(age)`; other columns are numbered.

        Args:
            names: names of the inputs, `(m,)`.
            tensors: the tensors of κ.
        """
        columns, word = self.out_features(len(names)), self.symbol or self.name
        if not names or not self.element_wise() or columns % len(names):
            return [f"{word}{i}" for i in range(columns)]
        functions = self.function_names(columns // len(names))
        return [f"{function}({name})" for function in functions for name in names]

    def function_names(self, count: int) -> list[str]:
        """Return the names of the functions of each input, for element-wise expansions with `count` of them."""
        word = self.symbol or self.name
        return [word] if count == 1 and not self.symbol else [f"{word}{i + self.first_index}" for i in range(count)]

    def takes_sparse(self) -> bool:
        """Return whether `torch.sparse_csr` inputs are allowed: zeros map to zeros, and `__call__` checks the layout."""
        return False

    def params(self, in_features: int) -> Params:
        """Return the declared tensors; nested by part for composed expansions."""
        return {}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return new values for some of the tensors, estimated from data.

        Args:
            x: inputs of the expansion, `(rows, m)`.
            params: current values.
            y: class labels or targets, `(rows,)` or `(rows, n)`, for supervised expansions.
        """
        return {}

    def inner_processes(self) -> tuple[Process, ...]:
        """Return the processing inside of the expansion."""
        return ()

    def calibrate_hidden(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return new values as `calibrate`, for inputs that move during training: the outputs of an untrained layer.

        The data are stretched about their center by `hidden_margin`, and at least to the width of the domain.
        """
        return self.calibrate(_stretched(self, x) if self.hidden_margin > 1 else x, params, y)

    def has_grid(self) -> bool:
        """Return whether `kapsi.refine` can refine a grid of the expansion."""
        return False

    def refined(self, tensors: Tensors, in_features: int, intervals: int) -> Refinement | None:
        """Return the same functions on a grid of `intervals` intervals, or None without a grid.

        Args:
            tensors: current values.
            in_features: number of inputs m.
            intervals: number of intervals of the new grid.

        Raises:
            SpecError: the functions of the current grid are not representable on the new grid.
        """
        return None

    def moved(self, x: Tensor, tensors: Tensors, margin: float = 1.0) -> Refinement | None:
        """Return the same functions on a grid of equal size moved to data, or None without a grid.

        The old functions are least-squares combinations of the new ones. The new grid is that of `calibrate`; the tensors of
        the result are those that change.

        Args:
            x: inputs of the expansion, `(rows, m)`.
            tensors: current values.
            margin: width of the new range relative to the data.

        Raises:
            SpecError: a grid with functions that cannot be expressed on another grid.
        """
        return None

    def substituted(self, columns: RowMap, in_features: int) -> RowMap | None:
        """Return the map of rows r ↦ r T with κ(M u) = T κ(u); None if κ has no such T.

        Args:
            columns: rows r ↦ r M, `(..., m)` to `(..., m)`.
            in_features: number of inputs m.
        """
        return None

    def initial_rms(self) -> float:
        """Return the RMS that the rule `smooth` of initial values scales the outputs of a head to."""
        return 1.0

    def rough_products(self) -> bool:
        """Return whether independent coefficients make a rough function: products of the pieces of a grid."""
        return False

    def linear_coefficients(self, weights: Tensor) -> Tensor | None:
        """Return coefficients of linear functions: ⟨κ(x), c⟩ = ⟨w, x⟩; None (default) if κ has no such coefficients.

        The inputs of an expansion with a domain [low, high] count from its center in half its width, from −1 to 1; a grid
        of steps has the function up to half an interval.

        Args:
            weights: w, `(..., m)`.

        Returns:
            c, `(..., D)`.
        """
        return None

    @abstractmethod
    def __call__(self, x: Tensor, params: Tensors) -> Features:
        """Return κ(x) for x of shape `(..., m)`."""


class ElementWise(Expansion):
    """An expansion of each input by itself, basis-major; by default with one column per input."""

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, in_features

    def element_wise(self) -> bool:
        return True


class KnownDerivatives(OwnDerivatives):
    """An element-wise function with known derivatives of every order: evaluated in place, and only x is saved.

    Args:
        x: inputs `(..., m)`.
        order: order of the derivative, 0 for the value.
        evaluate: (x, order) → derivative at x, `(..., m)`, or `(..., G, m)` for G functions at once; need not be
            differentiable.
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
        """Return the next derivative, and whether there are several functions."""
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


def product_name(names: Sequence[str]) -> str:
    """Return the name of a product of inputs in order, with powers of repeated neighbors; 1 without any.

    Example:
        >>> product_name(["a", "a", "b"]), product_name(["a", "b", "a"])
        ('a^2*b', 'a*b*a')
    """
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    return "*".join(name if power == 1 else f"{name}^{power}" for name, power in runs) or "1"


def class_labels(where: str, y: Tensor | None, rows: Tensor) -> Tensor | None:
    """Return y as class labels `(rows,)` on the device of the rows; None for targets other than integers.

    Raises:
        DataError: a label is not finite.
    """
    if y is None or y.numel() != len(rows):
        return None
    labels = y.reshape(-1).to(rows.device)
    if not labels.is_floating_point():
        return labels
    missing = int((~labels.isfinite()).sum())
    if missing:
        raise DataError(
            f"{where}: {missing:,} of {len(labels):,} labels in y are not finite; drop these rows, or calibrate without y"
        )
    return None if bool((labels.frac() != 0).any()) else labels


def clamp_to_domain(expansion: Expansion, x: Tensor) -> Tensor:
    """Clamp inputs to the domain of a heavy-tailed expansion; other expansions leave inputs unchanged."""
    if not expansion.heavy_tailed():
        return x
    return x.clamp(*common_domain(expansion, x.shape[-1]))


def stretched(x: Tensor, factor: Tensor | float) -> Tensor:
    """Return inputs `(rows, m)` stretched about the center of their range."""
    center = x.amin(0) / 2 + x.amax(0) / 2
    return center + (x - center) * factor


def _stretched(expansion: Expansion, x: Tensor) -> Tensor:
    """Return inputs `(rows, m)` stretched about their center by the margin, and at least to the width of the domain."""
    half = x.amax(0) / 2 - x.amin(0) / 2
    domain_low, domain_high = common_domain(expansion, x.shape[-1])
    least = (domain_high - domain_low) / 2 if math.isfinite(domain_high - domain_low) else 0.0
    # Constant inputs have no width to stretch. Half precision has no 10⁶.
    most = min(1e6, torch.finfo(x.dtype).max)
    return stretched(
        x, torch.where(half > 0, (least / half).clamp(expansion.hidden_margin, most), expansion.hidden_margin)
    )


def common_domain(expansion: Expansion, in_features: int) -> tuple[float, float]:
    """Return the intersection of the domains of all columns; if empty, the lower end exceeds the upper."""
    bounds = expansion.domain(in_features)
    return max(low for _, low, _ in bounds), min(high for _, _, high in bounds)


def rms(expansion: Expansion, y: Tensor) -> float:
    """Return the RMS of outputs; for a heavy-tailed expansion the RMS of a normal distribution with equal quartiles."""
    values = y.double().flatten()
    if expansion.heavy_tailed() and values.numel() > 1:
        low, high = torch.quantile(values[: 2**20], values.new_tensor([0.25, 0.75])).tolist()
        if high > low:
            return float(high - low) / NORMAL_IQR
    return float(values.square().mean().sqrt())
