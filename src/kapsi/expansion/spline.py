"""B-splines on uniform knots, evaluated on the degree + 1 functions that are not zero at a point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion, Interval, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = ["BSpline"]


@dataclass(frozen=True)
class BSpline(Expansion, name="b_spline", aliases=("bspline",)):
    """B-splines of each input: κ(x) = [B₁(x), …, B_G(x)], basis-major, G = intervals + degree, D = m·G.

    The range [low, high] of each input is cut into equal intervals, and the knots go on with the same spacing beyond it
    (they are not clamped), so the functions add up to one on the range. The range is a buffer `(2, m)`; `kapsi.calibrate`
    sets it from data.

    Args:
        intervals: number of intervals of the range, 1 to 100,000.
        degree: degree of the pieces, 0 (steps) to 16; 3 is the cubic spline.
        low, high: the range before calibration, in units of the inputs.
        out_of_range: what happens outside of the range. `linear`: every function goes on as its tangent at the end;
            `extended`: the formula on the extended knots, zero beyond those; `clamp`: the value at the end; `zero`: zero;
            `error`: a ValueError (eager mode only, it looks at values).

    Source: arXiv 2407.04819, "B-Splines based Data Expansion"; de Boor, A Practical Guide to Splines (2001), chapter X.

    Example:
        >>> import torch
        >>> kappa = BSpline(intervals=2, degree=1)
        >>> kappa(torch.tensor([0.5]), {"range": torch.tensor([[-1.0], [1.0]])}).dense()
        tensor([0.0000, 0.5000, 0.5000])
    """

    examples = (
        {},
        {"intervals": 3, "degree": 0},
        {"intervals": 4, "degree": 1, "out_of_range": "extended"},
        {"intervals": 1, "degree": 2, "out_of_range": "clamp"},
        {"intervals": 4, "degree": 5, "out_of_range": "zero", "low": -2.0, "high": 3.0},
        {"intervals": 6, "degree": 3, "out_of_range": "extended"},
    )

    intervals: int = option(5, minimum=1, maximum=100_000)
    degree: int = option(3, minimum=0, maximum=16)
    low: float = -1.0
    high: float = 1.0
    out_of_range: Literal["linear", "extended", "clamp", "zero", "error"] = "linear"

    def check(self) -> None:  # noqa: D102
        if not self.low < self.high:
            raise SpecError(f"BSpline(low={self.low}, high={self.high}): low must be below high")

    def factors(self, in_features: int) -> tuple[int, int]:  # noqa: D102
        return self.intervals + self.degree, in_features

    def domain(self, in_features: int) -> tuple[Interval, ...]:  # noqa: D102
        return ((self.out_features(in_features), self.low, self.high),)

    def params(self, in_features: int) -> Params:  # noqa: D102
        return {"range": Param((2, in_features), (self.low, self.high), trainable=False)}

    def validate(self, tensors: Tensors) -> None:  # noqa: D102
        low, high = tensors["range"].unbind(0)
        if not bool((low < high).all()):
            raise SpecError("BSpline: each lower end of the range must be below the upper one")

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return the range of each input in the data; a constant input gets some room around it."""
        x = working_precision(x)
        info = torch.finfo(x.dtype)
        low, high = x.amin(0).clamp(-info.max / 8, info.max / 8), x.amax(0).clamp(-info.max / 8, info.max / 8)
        # At a width of few rounding steps the intervals would vanish.
        least = torch.maximum(low.abs(), high.abs()) * (64 * self.intervals * info.eps)
        least = least.clamp_min(info.tiny * 64 * self.intervals)
        margin = torch.where(high - low > least, torch.zeros_like(low), torch.clamp_min(least, 0.5))
        return {"range": torch.stack((low - margin, high + margin))}

    def __call__(self, x: Tensor, params: Tensors) -> Features:  # noqa: D102
        low, high = working_precision(params["range"]).unbind(0)
        values = working_precision(x)
        if self.out_of_range == "error":
            self._refuse_outside(values, low, high)
        position = (values - low) * (self.intervals / (high - low))  # in intervals from the lower end
        return DenseFeatures(self._basis(position).flatten(-2).to(x.dtype))

    def _refuse_outside(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        if x.is_meta:
            return
        outside = (x < low) | (x > high)
        if bool(outside.any()):
            first = x[outside][0].item()
            raise SpecError(
                f"BSpline(out_of_range='error'): {int(outside.sum()):,} inputs are out of range, the first is {first:.6g}"
            )

    def _basis(self, position: Tensor) -> Tensor:
        """Return all functions `(..., G, m)` at positions `(..., m)` in intervals."""
        n, degree = self.intervals, self.degree
        inside = position.clamp(0, n)
        if self.out_of_range == "extended":
            cell = position.floor().clamp(-degree - 1, n + degree)
        else:
            cell = inside.floor().clamp(max=n - 1)  # the upper end belongs to the last interval
        # Not a number has no interval: any will do, the values carry it on.
        index = cell.nan_to_num().long()
        if self.out_of_range == "linear":
            local = inside - cell
            pieces, lower = _local_basis(local, degree)
            excess = (position - inside).unsqueeze(-2)
            pieces = pieces + excess * (F.pad(lower, (0, 0, 1, 0)) - F.pad(lower, (0, 0, 0, 1))) if degree else pieces
        elif self.out_of_range == "extended":
            # Where a piece lies beyond all knots it is multiplied by zero; its local position must stay finite for that.
            pieces, _ = _local_basis((position - cell).clamp(0, 1), degree)
            pieces = pieces * ((position >= -degree) & (position < n + degree) | position.isnan()).unsqueeze(-2)
            if degree == 0:  # as in the other policies the upper end belongs to the last interval
                index = torch.where(position == n, n - 1, index)
                pieces = torch.where((position == n).unsqueeze(-2), torch.ones_like(pieces), pieces)
        else:
            pieces, _ = _local_basis(inside - cell, degree)
            if self.out_of_range == "zero":
                pieces = pieces * ((position >= 0) & (position <= n) | position.isnan()).unsqueeze(-2)
        rows = index.unsqueeze(-2) + torch.arange(degree + 1, device=position.device).unsqueeze(-1)
        if self.out_of_range != "extended":
            empty = (
                torch.zeros_like(position).unsqueeze(-2).expand(*position.shape[:-1], n + degree, position.shape[-1])
            )
            return empty.scatter(-2, rows, pieces)
        # Pieces of functions that are not there (begun before the first, after the last) land in rows that are cut off.
        pad = degree + 1
        height = n + degree + 2 * pad
        empty = torch.zeros_like(position).unsqueeze(-2).expand(*position.shape[:-1], height, position.shape[-1])
        return empty.scatter(-2, rows + pad, pieces).narrow(-2, pad, n + degree)


def _local_basis(t: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Return the degree + 1 functions that are not zero on an interval, and those of one degree less.

    The recursion of Cox and de Boor on uniform knots, all terms positive for t in [0, 1]:
    N_{j,d} = ((t + d − j) N_{j−1,d−1} + (j + 1 − t) N_{j,d−1}) / d.

    Args:
        t: position in the interval, `(..., m)`, 0 to 1.
        degree: of the result.

    Returns:
        `(..., degree + 1, m)` and `(..., degree, m)`.
    """
    basis = [torch.ones_like(t) if degree else torch.ones_like(t) + 0 * t]  # steps are constant but for a NaN
    lower: list[Tensor] = []
    for d in range(1, degree + 1):
        lower = basis
        first = (1 - t) / d * lower[0]
        middle = [((t + (d - j)) * lower[j - 1] + ((j + 1) - t) * lower[j]) / d for j in range(1, d)]
        basis = [first, *middle, t / d * lower[d - 1]]
    return torch.stack(basis, -2), torch.stack(lower, -2) if lower else t.unsqueeze(-2)
