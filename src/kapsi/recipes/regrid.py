"""Move the splines of hidden layers to their current data during a fit, and keep their functions."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kapsi.expansion.compose import Extended
from kapsi.expansion.spline import BSpline
from kapsi.modules import Head, Layer, Model
from kapsi.reconciliation import Dense, LowRank

POINTS = 60
"""Evenly spaced points of the range at which a spline keeps its values, in addition to the data."""

SHARE = 0.1
"""Weight of these points relative to the data."""

RIDGE = 1e-7
"""Ridge penalty of coefficients without data."""


@torch.no_grad()
def regrid(model: Model, x: Tensor) -> Model:
    """Move the grids of all splines outside of the first layer to the data, in place and layer by layer.

    Range or knots come from `kapsi.calibrate`; the coefficients from least squares to the old functions. A spline may be κ or part
    of an extended κ, with a dense or low-rank ψ; other heads are unchanged.

    Args:
        model: a model in float64.
        x: inputs, `(rows, m)`.

    Source: the grid update of arXiv 2404.19756.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([1, 1, 1], kp.BSpline(20)), seed=0, dtype=torch.float64)
        >>> x = torch.linspace(-1, 1, 200, dtype=torch.float64).unsqueeze(1)
        >>> before = model(x)
        >>> after = regrid(model, x)(x)
        >>> bool((after - before).abs().max() < 0.01), model.layers[1].heads[0].kappa["range"].shape
        (True, torch.Size([2, 1]))
    """
    for number, layer in enumerate(cast("list[Layer]", list(model.layers))):
        if number:
            for head in cast("list[Head]", list(layer.heads)):
                if type(head.spec.reconciliation) in (Dense, LowRank) and not head.spec.after:
                    _move_head(head, head.before(x) if head.spec.before else x)
        x = layer(x)
    return model


def _move_head(head: Head, x: Tensor) -> None:
    expansion = head.spec.expansion
    parts = expansion.parts if isinstance(expansion, Extended) else (expansion,)
    start = 0
    for i, part in enumerate(parts):
        params: Any = head.kappa[str(i)] if isinstance(expansion, Extended) else head.kappa
        columns = part(x[:1], params).dense().shape[-1]
        if isinstance(part, BSpline):
            new = {name: torch.as_tensor(value) for name, value in part.calibrate(x, params).items()}
            weights = _columns(head)[start : start + columns]
            weights.copy_(_projected(weights, x, part, params, new))
            for name, value in new.items():
                params[name].copy_(value)
        start += columns


def _columns(head: Head) -> Tensor:
    """Return the weights of the columns of κ, `(D, …)`, as a view."""
    if isinstance(head.spec.reconciliation, LowRank):
        return head.psi.get_parameter("right")
    return head.psi.get_parameter("matrix").mT


def _projected(weights: Tensor, x: Tensor, part: BSpline, old: Any, new: Any) -> Tensor:
    low, high = x.amin(0), x.amax(0)
    grid = low + (high - low) * torch.linspace(0, 1, POINTS, dtype=x.dtype).unsqueeze(1)
    points = torch.cat((x, grid))
    weight = torch.cat((x.new_ones(len(x)), x.new_full((POINTS,), (SHARE * len(x) / POINTS) ** 0.5)))
    before, after = (
        (part(points, params).dense() * weight.unsqueeze(1)).unflatten(1, (-1, x.shape[1])) for params in (old, new)
    )
    targets = torch.einsum("bgi,gir->ibr", before, weights.unflatten(0, (-1, x.shape[1])))
    ridge = RIDGE * torch.eye(after.shape[1], dtype=x.dtype).expand(x.shape[1], -1, -1)
    rows = torch.cat((after.permute(2, 0, 1), ridge), 1)
    targets = torch.cat((targets, targets.new_zeros(x.shape[1], after.shape[1], targets.shape[2])), 1)
    solution = torch.linalg.lstsq(rows, targets).solution
    return solution.permute(1, 0, 2).flatten(0, 1)
