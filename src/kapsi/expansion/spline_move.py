"""B-splines on a grid moved to data: the same functions as a least-squares fit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kapsi.expansion.base import Refinement
from kapsi.function import Tensors

if TYPE_CHECKING:
    from kapsi.expansion.spline import BSpline

POINTS = 4
"""Evenly spaced points of each new interval, per non-zero spline, fitted together with the data."""

SHARE = 0.01
"""Weight of all these points relative to the data."""


def on_new_grid(spline: BSpline, x: Tensor, tensors: Tensors, new: Mapping[str, Tensor]) -> Refinement:
    """Return splines on another grid of equal size, and the old functions as least-squares combinations of the new ones.

    The fit is at the data and, with 1 % of the weight, at evenly spaced points of each new interval, so few data suffice.
    Functions representable on both grids are kept exactly.

    Args:
        spline: the expansion.
        x: the data, `(rows, m)`.
        tensors: the old range or knots.
        new: the new ones.
    """
    # In the stored precision: rounded knots define other functions.
    new = {name: tensor.to(tensors[name]) for name, tensor in new.items()}
    if all(torch.equal(tensor, tensors[name]) for name, tensor in new.items()):
        return Refinement(spline, new, _same, _same)
    data = x.to("cpu", torch.float64)
    even = _even_points(spline, new)
    points = torch.cat((data, even))
    weight = torch.cat(
        (torch.full_like(data[:, :1], len(data) ** -0.5), torch.full_like(even[:, :1], (SHARE / len(even)) ** 0.5))
    )
    after, target = (_functions(spline, points, grid, x.shape[1]) * weight for grid in (new, tensors))
    # QR first: a small least-squares problem for any number of rows.
    q, r = torch.linalg.qr(after)
    matrix = torch.linalg.solve_triangular(r, q.mT @ target, upper=True)
    shared = torch.equal(matrix, matrix[:1].expand_as(matrix))
    grid = functools.partial(_express_grid, matrix=matrix[0]) if shared else None
    return Refinement(spline, new, functools.partial(_express, matrix=matrix), grid)


def _even_points(spline: BSpline, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return evenly spaced points of each interval, `(points, m)`, in float64 on the CPU."""
    n, degree = spline.intervals, spline.degree
    if spline.knots == "uniform":
        low, high = tensors["range"].to("cpu", torch.float64).unbind(0)
        share = torch.arange(n + 1, dtype=torch.float64, device="cpu").unsqueeze(-1) / n
        ends = torch.lerp(low, high, share)
    else:
        ends = tensors["knots"].to("cpu", torch.float64)[degree : degree + n + 1]
    count = POINTS * (degree + 1)
    position = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    return torch.lerp(ends[:-1].unsqueeze(1), ends[1:].unsqueeze(1), position.view(1, -1, 1)).flatten(0, 1)


def _functions(spline: BSpline, points: Tensor, tensors: Tensors, inputs: int) -> Tensor:
    """Return all splines at points of each input, `(m, points, q)`, in float64 on the CPU."""
    name = "range" if spline.knots == "uniform" else "knots"
    values = spline.clamped()(points, {name: tensors[name].to("cpu", torch.float64)})
    return values.dense().unflatten(-1, (-1, inputs)).permute(2, 0, 1)


def _same(rows: Tensor) -> Tensor:
    return rows


def _express(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows `(..., q·m)` of coefficients in the new splines."""
    old = rows.to("cpu", torch.float64).unflatten(-1, (-1, len(matrix)))
    return torch.einsum("igk,...ki->...gi", matrix, old).flatten(-2).to(rows)


def _express_grid(rows: Tensor, matrix: Tensor) -> Tensor:
    return (rows.to("cpu", torch.float64) @ matrix.mT).to(rows)
