"""B-splines of each input.

Evaluation takes one of three paths, chosen in `BSpline.__call__` and `BSpline._columns`:

- uniform knots, eager mode: `UniformBasis` (`spline_uniform`), an autograd function with values in place;
- any knots, degree 0, or inside a compiler: `BSpline._on_any_knots`, plain differentiable operations (`spline_knots`);
- products without κ(x) in memory (`spline_product`): without gradients, for many intervals and rows on a CPU; with gradients, for
  large κ(x) or `checkpoint`, where κ(x) is recomputed in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import DataError, SpecError
from kapsi.expansion.base import HIDDEN_MARGIN, ElementWise, Interval, Refinement, stretched
from kapsi.expansion.numerics import data_range, working_precision
from kapsi.expansion.spline_knots import express_in, insertion, pieces_on_knots, subdivide, with_outer_knots
from kapsi.expansion.spline_move import on_new_grid
from kapsi.expansion.spline_product import SplineProduct
from kapsi.expansion.spline_uniform import UniformBasis, pieces_on_uniform_knots, uniform_range, uniform_rate
from kapsi.features import DenseFeatures, Features, RecomputedFeatures
from kapsi.function import Param, Params, Tensors, option

__all__ = ["BSpline"]

MAX_INTERVALS = 100_000

MAX_SAVED = 2**28
"""Largest number of entries of κ(x) saved for the backward pass, 1 GiB in float32; larger κ(x) is recomputed."""

MIN_WIDTH = 1e-3
"""Width of the narrowest interval between quantiles, in mean widths: equal values would give intervals of zero width."""


@dataclass(frozen=True)
class BSpline(ElementWise, name="b_spline", aliases=("bspline",)):
    """B-splines of each input: κ(x) = [B₁(x), …, B_G(x)], basis-major, G = intervals + degree, D = m·G.

    The range [low, high] of each input is divided into intervals at breakpoints. Further knots lie beyond it at the mean
    width of the intervals (the spline is not clamped), so the functions add up to one on the range.

    Uniform knots are stored as the ends, a buffer `range` `(2, m)`. Other knots are a buffer `knots` `(intervals + 1 +
    2·degree, m)`: all knots of each input in ascending order, `degree` of them on either side of the range. Set custom
    knots with `head.assign("expansion", knots=…)`; repeated knots are allowed, and ends repeated `degree` times make a
    clamped spline.

    `kapsi.calibrate` sets the range of each input to the range of the data and stretches given breakpoints to fit.
    `kapsi.refine` divides the intervals.

    Args:
        intervals: number of intervals of the range, 1 to 100,000; with given knots their number less one.
        degree: degree of the pieces, 0 (steps) to 16; 3 is the cubic spline.
        low, high: range before calibration, in units of the inputs, −10³⁰ to 10³⁰; with given knots the
            first and the last.
        extrapolation: behavior out of range. `linear`: tangents at the ends; `extended`: the formula on the outer
            knots, then zero; `clamp`: the value at the end; `zero`; `error`: a ValueError (eager mode only), except for a
            few rounding steps, which are clamped.
        knots: positions of the breakpoints. `uniform`: equally spaced; `quantile`: uniform until calibrated, then
            quantiles of each input, so that all intervals hold equally many rows; or the breakpoints in ascending order, at
            least two, the same for every input until calibrated.
        uniform_share: weight of uniform breakpoints mixed into quantiles, 0 to 1; avoids very narrow
            intervals for inputs with many equal values.
        checkpoint: whether κ(x) is recomputed in the backward pass: memory is independent of the number of intervals, and
            κ(x) is evaluated twice. None: above 2²⁸ entries in κ(x), 1 GiB in float32. A compiled model leaves the
            choice to the compiler.

    Raises:
        SpecError: low is not below high; knots do not increase, or contradict intervals, low or high.

    Source: arXiv 2407.04819, "B-Splines based Data Expansion"; de Boor, A Practical Guide to Splines (2001), chapters IX to
        XI; quantiles mixed with uniform knots as in the grid of Kolmogorov–Arnold networks (arXiv 2404.19756).

    Example:
        >>> import torch
        >>> kappa = BSpline(intervals=2, degree=1)
        >>> kappa(torch.tensor([0.5]), {"range": torch.tensor([[-1.0], [1.0]])}).dense()
        tensor([0.0000, 0.5000, 0.5000])
        >>> BSpline(degree=1, knots=(-1.0, 0.0, 0.2, 3.0)).intervals
        3
    """

    symbol = "B"
    examples = (
        {},
        {"intervals": 3, "degree": 0},
        {"intervals": 4, "degree": 1, "extrapolation": "extended"},
        {"intervals": 1, "degree": 2, "extrapolation": "clamp"},
        {"intervals": 4, "degree": 5, "extrapolation": "zero", "low": -2.0, "high": 3.0},
        {"intervals": 6, "degree": 3, "extrapolation": "extended"},
        {"knots": (-1.0, -0.4, 0.3, 1.2), "degree": 2},
        {"knots": (-1.5, 0.2, 0.7), "degree": 0, "extrapolation": "extended"},
        {"knots": "quantile", "intervals": 4, "extrapolation": "extended"},
        {"knots": "quantile", "intervals": 3, "degree": 1, "extrapolation": "zero", "uniform_share": 0.0},
        {"intervals": 4, "checkpoint": True},
        {"knots": (-1.0, 0.1, 1.0), "checkpoint": True},
    )

    hidden_margin: ClassVar[float] = HIDDEN_MARGIN

    intervals: int = option(5, minimum=1, maximum=MAX_INTERVALS)
    degree: int = option(3, minimum=0, maximum=16)
    low: float = option(-1.0, minimum=-1e30, maximum=1e30)
    high: float = option(1.0, minimum=-1e30, maximum=1e30)
    extrapolation: Literal["linear", "extended", "clamp", "zero", "error"] = "linear"
    knots: Literal["uniform", "quantile"] | tuple[float, ...] = "uniform"
    uniform_share: float = option(0.02, minimum=0.0, maximum=1.0)
    checkpoint: bool | None = None

    def check(self) -> None:
        if isinstance(self.knots, tuple):
            self._take(self.knots)
        if not self.low < self.high:
            raise SpecError(f"BSpline(low={self.low}, high={self.high}): low must be below high")

    def _take(self, breakpoints: tuple[float, ...]) -> None:
        """Set the options implied by given breakpoints.

        Raises:
            SpecError: the breakpoints do not increase, or contradict another option.
        """
        if not 2 <= len(breakpoints) <= MAX_INTERVALS + 1:
            raise SpecError(
                f"BSpline(knots=…): expected 2 to {MAX_INTERVALS + 1:,} breakpoints from low to high, got {len(breakpoints):,}"
            )
        for i, (here, after) in enumerate(pairwise(breakpoints)):
            if not here < after:
                raise SpecError(
                    f"BSpline(knots=…): the breakpoints must be strictly increasing; knots[{i + 1}] = {after} follows {here}"
                )
        implied = {"intervals": len(breakpoints) - 1, "low": breakpoints[0], "high": breakpoints[-1]}
        for name, value in implied.items():
            option = getattr(self, name)
            if option not in (value, getattr(BSpline, name)):
                raise SpecError(
                    f"BSpline({name}={option}): the given knots make {name} {value}; leave {name} out, or give other knots"
                )
            object.__setattr__(self, name, value)

    def factors(self, in_features: int) -> tuple[int, int]:
        return self.intervals + self.degree, in_features

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return ((self.out_features(in_features), self.low, self.high),)

    def params(self, in_features: int) -> Params:
        if self.knots == "uniform":
            return {"range": Param((2, in_features), (self.low, self.high), trainable=False)}
        n, width = self.intervals, self.high - self.low
        breakpoints = self.knots if isinstance(self.knots, tuple) else [self.low + width * i / n for i in range(n + 1)]
        values = with_outer_knots(
            torch.tensor(breakpoints, dtype=torch.float64, device="cpu").unsqueeze(-1), self.degree
        )
        return {"knots": Param((len(values), in_features), tuple(values.flatten().tolist()), trainable=False)}

    def covered(self, params: Tensors, in_features: int) -> tuple[Tensor, Tensor]:
        if self.knots == "uniform":
            return params["range"][0], params["range"][1]
        return params["knots"][self.degree], params["knots"][self.degree + self.intervals]

    def validate(self, tensors: Tensors) -> None:
        low, high = self.covered(tensors, 0)
        if self.knots != "uniform":
            knots = tensors["knots"]
            if not bool(knots.isfinite().all()):
                raise SpecError("BSpline: the knots must be finite")
            if not bool((knots.diff(dim=0) >= 0).all()):
                raise SpecError("BSpline: the knots of each input must not decrease")
        if not bool((low < high).all()):
            raise SpecError("BSpline: each lower end of the range must be below the upper one")

    def clamped(self) -> BSpline:
        return replace(self, extrapolation="clamp") if self.extrapolation == "error" else self

    def linear_coefficients(self, weights: Tensor) -> Tensor:
        """Return the means of the inner knots of each function (Greville's points) times the weights."""
        points = self._greville().to(weights)
        return (points.unsqueeze(-1) * weights.unsqueeze(-2)).flatten(-2)

    def _greville(self) -> Tensor:
        """Return Greville's point of each function, `(intervals + degree,)`, −1 and 1 at the ends of the range."""
        count, degree = self.intervals, self.degree
        if not isinstance(self.knots, tuple):
            number = torch.arange(count + degree, dtype=torch.float64, device="cpu")
            return (2 * number - degree + 1) / count - 1
        breakpoints = torch.tensor(self.knots, dtype=torch.float64, device="cpu").unsqueeze(-1)
        knots = with_outer_knots((breakpoints - self.low) / (self.high - self.low) * 2 - 1, degree).squeeze(-1)
        return knots[1:-1].unfold(0, degree, 1).mean(-1) if degree else (knots[1:] + knots[:-1]) / 2

    # -------------------------------------------------------------------------------- calibration

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return the range of each input in the data, or the knots within it; a constant input gets a margin.

        Given breakpoints are stretched so that the first and the last are the ends of the data of each input.
        """
        low, high = data_range(x, self.intervals)
        x = working_precision(x)
        if self.knots == "uniform":
            return {"range": torch.stack((low, high))}
        if isinstance(self.knots, tuple):
            positions = [(point - self.low) / (self.high - self.low) for point in self.knots]
            breakpoints = torch.lerp(low, high, torch.tensor(positions, dtype=x.dtype, device=x.device).unsqueeze(-1))
        else:
            breakpoints = self._quantiles(x, low, high)
        largest = torch.finfo(params["knots"].dtype).max
        return {"knots": with_outer_knots(breakpoints, self.degree).clamp(-largest, largest)}

    def _quantiles(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return strictly increasing breakpoints `(intervals + 1, m)`: quantiles mixed with uniform breakpoints."""
        n = self.intervals
        number = torch.arange(n + 1, device=x.device)
        even = torch.lerp(low, high, number.to(x.dtype).unsqueeze(-1) / n)
        ordered = x.sort(0).values.clamp(low, high)
        position = number * (len(x) - 1)  # in integers: float32 cannot count the rows of a large table
        below = position // n
        fraction = (position % n).to(x.dtype).unsqueeze(-1) / n
        points = torch.lerp(ordered[below], ordered[(below + 1).clamp_max(len(x) - 1)], fraction)
        points = torch.where(ordered[0] > low, even, points)  # quantiles of a constant input coincide
        points = torch.lerp(points, even, self.uniform_share)
        # Narrow intervals are widened at the cost of all others.
        min_width = (high - low) * (MIN_WIDTH / n)
        min_width = torch.maximum(min_width, torch.maximum(low.abs(), high.abs()) * (4 * torch.finfo(x.dtype).eps))
        widths = points.diff(dim=0)
        wider = widths.clamp_min(min_width)
        wider = low + wider[:-1].cumsum(0) * ((high - low) / wider.sum(0))
        inner = torch.where((widths < min_width).any(0), wider, points[1:-1])
        return torch.cat((low.unsqueeze(0), inner, high.unsqueeze(0)))

    # -------------------------------------------------------------------------------- evaluation

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        ends = params["range" if self.knots == "uniform" else "knots"]
        if torch.compiler.is_compiling():  # which decides on recomputation itself
            return DenseFeatures(self._columns(x, ends))
        if self._recomputes(x) if torch.is_grad_enabled() else self.gathers(x):
            return _SplineFeatures(self._columns, x, (ends,), self.out_features(x.shape[-1]), self)
        return DenseFeatures(self._columns(x, ends))

    def _columns(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return all columns `(..., D)`."""
        values = working_precision(x)
        # The compiler cannot trace a function with a forward derivative, and fuses plain operations itself.
        if self.knots == "uniform" and self.degree and not torch.compiler.is_compiling():
            basis = self._on_range(values, ends)
        else:
            basis = self._on_any_knots(values, ends)
        return basis if values is x else basis.to(x.dtype)

    def _recomputes(self, x: Tensor) -> bool:
        """Return whether κ(x) is recomputed in the backward pass."""
        if self.checkpoint is not None:
            return self.checkpoint
        return x.numel() * (self.intervals + self.degree) > MAX_SAVED

    def gathers(self, x: Tensor) -> bool:
        """Return whether a product sums the rows of ψ for non-zero functions instead of materializing κ(x).

        Measured for 64 → 64, 256 → 256 and 784 → 64 with 20 to 1,000 intervals and 1 to 1,024 rows, two threads: a product
        takes 0.015 ns per entry of κ and output, a gather 0.08 ns per non-zero entry and output, and the transposed copy of
        ψ 1.1 to 2.6 ns per weight. 784 → 64, 50 intervals, 1,024 rows: 23 ms instead of 100.
        """
        number = self.intervals + self.degree
        rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
        return (
            rows * (number - 6 * (self.degree + 1)) >= 160 * number
            and type(x) is Tensor
            and x.device.type == "cpu"
            and x.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and self.knots == "uniform"
            and self.degree > 0
            and self.extrapolation != "extended"
        )

    def _on_range(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return all columns `(..., D)` on uniform knots."""
        n, degree = self.intervals, self.degree
        low, rate, outside = self.prepared(x, ends)
        if outside != "extended":
            columns: Tensor = UniformBasis.of(x, low, rate, n, degree, outside, 0)
            return columns
        # The outer knots make a wider range; functions that vanish on the original range are cut off.
        inputs = x.shape[-1]
        basis: Tensor = UniformBasis.of(x, low, rate, n + 2 * degree, degree, "zero", degree)
        return basis.narrow(-1, degree * inputs, (n + degree) * inputs)

    def prepared(self, x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, str]:
        """Return lower ends, intervals per unit of each input, and the behavior beyond; refuse x there if it is `error`."""
        low, rate = uniform_range(ends, self.intervals)
        if self.extrapolation != "error":
            return low, rate, self.extrapolation
        self._refuse_outside(x, *working_precision(ends).unbind(0))
        return low, rate, "clamp"

    def _on_any_knots(self, values: Tensor, ends: Tensor) -> Tensor:
        """Return all columns `(..., D)` by differentiable operations."""
        degree = self.degree
        # The outer knots make a wider range; functions that vanish on the original range are cut off.
        wider = degree if self.extrapolation == "extended" else 0
        if self.knots == "uniform":
            low, high = working_precision(ends).unbind(0)
            position = (values - low) * uniform_rate(low, high, self.intervals)  # in intervals
            if wider:
                position = position + wider
            clamped, cell, pieces, lower = pieces_on_uniform_knots(position, self.intervals + 2 * wider, degree)
        else:
            knots = working_precision(ends)
            low, high = knots[degree], knots[degree + self.intervals]
            if wider:
                knots = torch.cat((knots[:1].expand(wider, -1), knots, knots[-1:].expand(wider, -1)))
            position = values
            clamped, cell, pieces, lower = pieces_on_knots(position, knots, degree)
        if self.extrapolation == "error":
            self._refuse_outside(values, low, high)
        if self.extrapolation == "linear" and degree:
            slopes = F.pad(lower, (0, 0, 1, 0)) - F.pad(lower, (0, 0, 0, 1))
            pieces = pieces + (position - clamped).unsqueeze(-2) * slopes
        elif self.extrapolation in ("zero", "extended"):
            pieces = pieces * (position == clamped).unsqueeze(-2)
        rows = cell.unsqueeze(-2) + torch.arange(degree + 1, device=values.device).unsqueeze(-1)
        height = self.intervals + degree + 2 * wider
        basis = torch.zeros_like(pieces[..., :1, :]).expand(*values.shape[:-1], height, values.shape[-1])
        basis = basis.scatter(-2, rows, pieces)
        if wider:
            basis = basis.narrow(-2, wider, self.intervals + degree)
        return basis.flatten(-2)

    def _refuse_outside(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        if x.is_meta:
            return
        # A few rounding steps are accepted and clamped: hidden layers reproduce the same data only up to rounding.
        slack = 8 * torch.finfo(x.dtype).eps * torch.maximum(low.abs(), high.abs())
        outside = (x < low - slack) | (x > high + slack)
        if bool(outside.any()):
            first = x[outside][0].item()
            raise DataError(
                f"BSpline(extrapolation='error'): {int(outside.sum()):,} inputs are out of range, the first is {first:.6g}"
            )

    # -------------------------------------------------------------------------------- a finer grid

    def has_grid(self) -> bool:
        return True

    def refined(self, tensors: Tensors, in_features: int, intervals: int) -> Refinement:
        """Return the spline with each interval divided into equal parts, and the old functions as sums of new ones.

        Uniform knots beyond the range move with the interval width: functions are unchanged on the range, and beyond it for
        every extrapolation except `extended`. Other outer knots stay, so functions are unchanged everywhere.
        """
        n, degree = self.intervals, self.degree
        if intervals % n or not n <= intervals <= MAX_INTERVALS:
            allowed = ", ".join(f"{n * i:,}" for i in range(1, 5) if n * i <= MAX_INTERVALS)
            raise SpecError(
                f"BSpline(intervals={n:,}): each interval is divided into equal parts, so the new number must be a multiple: "
                f"{allowed}, … up to {MAX_INTERVALS:,}; got {intervals:,}"
            )
        parts = intervals // n
        finer = replace(self, intervals=intervals, knots="uniform")
        values: Mapping[str, Tensor]
        if self.knots == "uniform":
            values = {"range": tensors["range"]}
            dtype = torch.float64
            old, new = (
                torch.arange(-degree, count + degree + 1, dtype=torch.float64, device="cpu").unsqueeze(-1) * (n / count)
                for count in (n, intervals)
            )
        else:
            if isinstance(self.knots, tuple):
                points = subdivide(torch.tensor(self.knots, dtype=torch.float64, device="cpu").unsqueeze(-1), parts)
                finer = replace(finer, knots=tuple(points.flatten().tolist()))
            else:
                finer = replace(finer, knots="quantile")
            dtype = tensors["knots"].dtype
            old = tensors["knots"].detach().to("cpu", torch.float64)
            inner = subdivide(old[degree : degree + n + 1], parts)
            # In the stored precision: rounded knots define other functions.
            new = torch.cat((old[:degree], inner, old[degree + n + 1 :])).to(dtype)
            values = {"knots": new.to(tensors["knots"])}
            new = new.double()
        first, weights = insertion(old, new, degree, parts)
        columns = functools.partial(express_in, first=first, weights=weights, inputs=in_features)
        ends = old[[degree, degree + n]].abs().amax(0) / (old[degree + n] - old[degree])
        # Knots are rounded, by a larger part of the width on a finer grid.
        rounding = 8 * torch.finfo(dtype).eps * max(1.0, intervals * float(ends.max()))
        alike = bool((first == first[:, :1]).all()) and float((weights - weights[..., :1]).abs().max()) <= rounding
        grid = functools.partial(express_in, first=first[:, :1], weights=weights[..., :1], inputs=1) if alike else None
        return Refinement(finer, values, columns, grid)

    def moved(self, x: Tensor, tensors: Tensors, margin: float = 1.0) -> Refinement:
        return on_new_grid(self, x, tensors, self.calibrate(x if margin == 1 else stretched(x, margin), tensors))


@dataclass(frozen=True)
class _SplineFeatures(RecomputedFeatures):
    """Splines recomputed for each use, in products block by block."""

    spline: BSpline

    def matmul(self, matrix: Tensor) -> Tensor:
        product: Tensor = SplineProduct.apply(self.spline, matrix, self.x, *self.tensors)
        return product
