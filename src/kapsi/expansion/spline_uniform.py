"""B-splines on uniform knots."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kapsi.derivatives import OwnDerivatives
from kapsi.expansion.numerics import working_precision


class UniformBasis(OwnDerivatives):
    """The basis on uniform knots in few passes: values in place, slopes from one gather; only x is saved for the backward
    pass.

    Args:
        x: inputs `(..., m)`.
        low: lower end of the range, `(m,)` or broadcastable to x.
        rate: intervals per unit of x, in the shape of `low`.
        intervals: number of intervals.
        degree: degree of the splines.
        outside: behavior beyond the range, `linear`, `clamp` or `zero`.
        before: number of the intervals below the lower end.

    Returns:
        The values, `(..., (intervals + degree)·m)`.
    """

    @staticmethod
    def forward(x: Tensor, low: Tensor, rate: Tensor, intervals: int, degree: int, outside: str, before: int) -> Tensor:
        rows, pieces = _pieces_by_row(x, low, rate, intervals, degree, outside, before)
        *lead, inputs = x.shape
        if pieces.dim() == 2:  # one row
            return x.new_zeros(intervals + degree, inputs).scatter_(0, rows, pieces).view(*lead, -1)
        columns = x.new_zeros(*lead, intervals + degree, inputs)
        return columns.scatter_(-2, rows, pieces).flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, low, rate, ctx.intervals, ctx.degree, *ctx.where = inputs
        ctx.save_for_backward(x, low, rate)
        ctx.save_for_forward(x, low, rate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Differentiable operations, as needed for second derivatives. Keeping the indices of the forward pass would save 3
        # to 8 % of the time of a layer, and take as much memory as several intervals.
        x, low, rate = ctx.saved_tensors
        differentiable = torch.is_grad_enabled()
        indices, slopes, rate = _uniform_slopes(
            x, low, rate, ctx.intervals, ctx.degree, *ctx.where, differentiable=differentiable
        )
        selected = gradient.gather(-1, indices).reshape(slopes.shape)
        return (selected * slopes).sum(-2) * rate, None, None, None, None, None, None

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        x, low, rate = values
        tangent: Tensor = tangents[0]
        indices, slopes, rate = _uniform_slopes(
            x, low, rate, ctx.intervals, ctx.degree, *ctx.where, differentiable=True
        )
        changes = (slopes * (rate * tangent).unsqueeze(-2)).reshape(indices.shape)
        width = (ctx.intervals + ctx.degree) * tangent.shape[-1]
        result = torch.zeros_like(changes[..., :1]).expand(*changes.shape[:-1], width)
        return result.scatter(-1, indices, changes)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, low: Tensor, rate: Tensor, *options: Any) -> tuple[Tensor, int]:
        axis_of_x, *axes = in_dims[:3]
        x = x.expand(info.batch_size, *x.shape) if axis_of_x is None else x.movedim(axis_of_x, 0)
        ends = []
        for value, axis in zip((low, rate), axes, strict=True):
            if axis is not None:
                value = value.movedim(axis, 0)
                value = value[(slice(None), *[None] * (x.dim() - value.dim()))]
            ends.append(value)
        return UniformBasis.apply(x, *ends, *options), 0


def uniform_pieces_at(
    x: Tensor, low: Tensor, rate: Tensor, intervals: int, degree: int, outside: str, before: int
) -> tuple[Tensor, Tensor]:
    """Return the non-zero functions on uniform knots: column indices and values, both `(..., (degree + 1)·m)`.

    Not differentiable: values are computed in place.
    """
    rows, pieces = _pieces_by_row(x, low, rate, intervals, degree, outside, before)
    *lead, _ = x.shape
    return _column_indices(rows).view(*lead, -1), pieces.view(*lead, -1)


def _column_indices(rows: Tensor) -> Tensor:
    """Return the column indices `(..., k·m)` of functions given by their numbers on the grid, `(..., k, m)`."""
    inputs = rows.shape[-1]
    return torch.arange(inputs, device=rows.device).add(rows, alpha=inputs).flatten(-2)


def _pieces_by_row(
    x: Tensor, low: Tensor, rate: Tensor, intervals: int, degree: int, outside: str, before: int
) -> tuple[Tensor, Tensor]:
    """Return the non-zero functions on uniform knots: their numbers and values, both `(..., degree + 1, m)`.

    One row `(1, m)` gives `(degree + 1, m)`: its time is that of the number of operations.
    """
    if low.dim() > 1:  # ranges that differ between batches of `vmap`
        x, low, rate = x.unsqueeze(-2), low.unsqueeze(-2), rate.unsqueeze(-2)
    elif x.dim() != 2 or x.shape[0] != 1:
        x = x.unsqueeze(-2)
    position, clamped, cell = _located(x, low, rate, intervals, before)
    # On a CPU a comparison is cheap, and saves the passes for inputs out of range if there are none.
    inside = type(position) is Tensor and position.is_cpu and position.equal(clamped)
    if not inside:
        cell.relu_()  # a NaN, as an integer 0 or the least one, has no interval; any will do, since the values are NaN
    table = _table(x, degree)
    t, coefficients = clamped.frac(), table.values
    pieces = torch.addcmul(coefficients[-2], coefficients[-1], t)  # Horner's rule
    for coefficient in coefficients[-3::-1]:
        torch.addcmul(coefficient, pieces, t, out=pieces)
    pieces.relu_()  # rounding may give values below 0
    if not inside:
        if outside == "linear":
            excess = position.sub_(clamped)
            lower, difference = table.end_slopes
            pieces.addcmul_(excess, lower).addcmul_(excess.relu_(), difference)
        elif outside == "zero":
            pieces.mul_(_in_range(position, intervals))
    return cell + table.rows, pieces


def _uniform_slopes(
    x: Tensor,
    low: Tensor,
    rate: Tensor,
    intervals: int,
    degree: int,
    outside: str,
    before: int,
    *,
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return column indices of the non-zero functions, their slopes `(..., degree + 1, m)`, and the rate of each input.

    Slopes are per interval, the rate is in intervals per unit of x; it is zero where the functions are constant beyond the
    range.

    Args:
        x, low, rate, intervals, degree, outside, before: see `UniformBasis`.
        differentiable: whether the results may be differentiated.
    """
    position, clamped, cell = _located(x, low, rate, intervals, before)
    position, clamped, cell = position.unsqueeze(-2), clamped.unsqueeze(-2), cell.clamp(0, intervals - 1).unsqueeze(-2)
    # Up to 1 inclusive: the upper end has a second derivative too.
    t = position.clamp(0, intervals) - cell if differentiable else clamped.frac()
    if outside != "linear":
        rate = torch.where(_in_range(position.squeeze(-2), intervals), rate, torch.zeros_like(rate))
    table = _table(x, degree)
    return _column_indices(cell + table.rows), _polynomial(table.slopes, t), rate


def uniform_range(ends: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Return lower ends and intervals per unit of x for ends `(2, m)`, in single precision at least; not for a compiler.

    Kept for ends of equal values: eight operations on few numbers take a quarter of the time of a layer for one row.
    """
    if type(ends) is not Tensor or not ends.is_cpu or torch._C._are_functorch_transforms_active():
        return _computed_range(ends, intervals)
    known = _RANGES.get((id(ends), intervals))
    # Compared by value: neither identity nor a version shows every change of a tensor.
    if known is None or known[0].dtype != ends.dtype or not ends.equal(known[0]):
        if len(_RANGES) >= MAX_RANGES:
            _RANGES.clear()
        with torch.inference_mode(False), torch.no_grad():
            known = (ends.clone(), *_computed_range(ends, intervals))
        _RANGES[id(ends), intervals] = known
    return known[1], known[2]


def _computed_range(ends: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    low, high = working_precision(ends).unbind(0)
    return low, uniform_rate(low, high, intervals)


MAX_RANGES = 256
_RANGES: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}


def uniform_rate(low: Tensor, high: Tensor, intervals: int) -> Tensor:
    """Return intervals per unit of x, rounded so that the upper end of the range stays within."""
    width = high - low
    rate = intervals / width
    return torch.where(width * rate > intervals, rate * (1 - torch.finfo(rate.dtype).eps), rate)


def _located(x: Tensor, low: Tensor, rate: Tensor, intervals: int, before: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the position in intervals from the first, the position clamped to the intervals, and the interval."""
    position = (x - low) * rate
    if before:  # added last: subtracting a lower `low` would round by more than an interval far from zero
        position = position + before
    # The upper end belongs to the last interval: moved down by a rounding step.
    clamped = position.clamp(0, intervals * (1 - torch.finfo(position.dtype).eps))
    return position, clamped, clamped.long()


def _in_range(position: Tensor, intervals: int) -> Tensor:
    return (position >= 0) & (position <= intervals)


def _polynomial(coefficients: Sequence[Tensor], t: Tensor) -> Tensor:
    """Return polynomials of t `(..., 1, m)` by Horner's rule, `(..., k, m)`, for coefficients `(k, 1)` in ascending order."""
    *lower, value = coefficients
    if not lower:
        return value + 0 * t
    for coefficient in reversed(lower):
        value = torch.addcmul(coefficient, value, t)
    return value


class _Table(NamedTuple):
    """Constants of a degree as tensors.

    Attributes:
        rows: 0, 1, …, degree, `(degree + 1, 1)`.
        values: coefficients of t⁰, t¹, … of the non-zero functions on an interval, each `(degree + 1, 1)`.
        slopes: the same of their derivatives.
        end_slopes: slopes at the lower end of an interval, and by how much those at the upper end differ, each
            `(degree + 1, 1)`.
    """

    rows: Tensor
    values: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]
    end_slopes: tuple[Tensor, Tensor]


_TABLES: dict[tuple[int, torch.dtype, torch.device], _Table] = {}


def _table(like: Tensor, degree: int) -> _Table:
    """Return the constants in the type and on the device of a tensor."""
    if type(like) is not Tensor:
        return _make_table(degree, like.dtype, like.device)
    key = (degree, like.dtype, like.device)
    table = _TABLES.get(key)
    if table is None:
        with torch.inference_mode(False):  # tensors of this mode have no derivatives outside
            table = _make_table(*key)
        if not torch._C._are_functorch_transforms_active():
            _TABLES[key] = table
    return table


def _make_table(degree: int, dtype: torch.dtype, device: torch.device) -> _Table:
    values, slopes = (
        torch.tensor(rows, dtype=dtype, device=device).unsqueeze(-1) for rows in _uniform_coefficients(degree)
    )
    rows = torch.arange(degree + 1, device=device).unsqueeze(-1)
    return _Table(rows, values.unbind(0), slopes.unbind(0), (slopes[0], slopes[1:].sum(0)))


@functools.cache
def _uniform_coefficients(degree: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the coefficients of t⁰, t¹, … of the degree + 1 functions on [0, 1] of uniform knots, and of their slopes.

    Exact up to the last rounding. The k-th is a k-th derivative over k!, at most 2ᵏ/k!: Horner's rule loses no digits.
    """
    basis = [[Fraction(1)]]
    for d in range(1, degree + 1):
        # N_{j,d} = ((t + d − j) N_{j−1,d−1} + (j + 1 − t) N_{j,d−1}) / d
        wider = [[Fraction(0)] * (d + 1) for _ in range(d + 1)]
        for j, piece in enumerate(basis):
            for k, c in enumerate(piece):
                wider[j + 1][k] += c * (d - 1 - j) / d
                wider[j + 1][k + 1] += c / d
                wider[j][k] += c * (j + 1) / d
                wider[j][k + 1] -= c / d
        basis = wider
    values = [[float(piece[k]) for piece in basis] for k in range(degree + 1)]
    return values, [[float(k * piece[k]) for piece in basis] for k in range(1, degree + 1)]


def pieces_on_uniform_knots(position: Tensor, intervals: int, degree: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `pieces_on_knots` for positions `(..., m)`, in intervals from the lower end of uniform knots."""
    clamped = position.clamp(0, intervals)
    # The upper end belongs to the last interval; for a NaN any interval will do, since the values are NaN.
    cell = clamped.detach().long().clamp(0, intervals - 1)
    pieces, lower = _uniform_pieces(clamped - cell, degree)
    return clamped, cell, pieces, lower


def _uniform_pieces(t: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Return the degree + 1 non-zero functions on an interval, and the functions of one degree less.

    Recursion of Cox and de Boor on uniform knots, all terms positive for t in [0, 1]: N_{j,d} = ((t + d − j) N_{j−1,d−1} +
    (j + 1 − t) N_{j,d−1}) / d.

    Args:
        t: position in the interval, `(..., m)`, 0 to 1.
        degree: degree of the returned functions.

    Returns:
        `(..., degree + 1, m)` and `(..., degree, m)`.
    """
    basis = [torch.ones_like(t) if degree else torch.ones_like(t) + 0 * t]  # steps are constant, except for a NaN
    lower: list[Tensor] = []
    for d in range(1, degree + 1):
        lower = basis
        first = (1 - t) / d * lower[0]
        middle = [((t + (d - j)) * lower[j - 1] + ((j + 1) - t) * lower[j]) / d for j in range(1, d)]
        basis = [first, *middle, t / d * lower[d - 1]]
    return torch.stack(basis, -2), torch.stack(lower, -2) if lower else t.unsqueeze(-2)
