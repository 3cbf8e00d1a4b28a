"""Grid updates: move the grids of splines to the data and keep the function."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import Tensor

from kapsi.errors import ScaleWarning, SpecError
from kapsi.expansion.spline import BSpline
from kapsi.modules import Head, Layer, Model
from kapsi.reconciliation.base import ChangeOfBasis
from kapsi.reconciliation.dense import Masked
from kapsi.remainder import ExpansionRemainder
from kapsi.zoo.base import forbid
from kapsi.zoo.kan.edges import checked_rows, heads_of, layers_of

POINTS = 4
"""Evenly spaced points of each new interval, per non-zero spline, fitted together with the data."""

TOLERANCE = 0.01
"""Change of the outputs reported, relative to their deviation."""

SHARE = 0.01
"""Weight of all these points relative to the data."""


@torch.no_grad()
def update_grid(model: Model, x: Tensor) -> Model:
    """Move the grid of every spline to the data and keep the function, in place, layer by layer.

    `kapsi.calibrate` sets the new range or knots. The coefficients on the new grid are a least-squares fit to the old functions,
    at the data and, with 1 % of the weight, at evenly spaced points of each new interval, so few data suffice. Functions
    representable on both grids are kept exactly. Where the new grid is coarser than the old function, the outputs move: a
    change above 1 % of the deviation of the outputs at x is reported as a warning, with the remedy, more intervals.

    Args:
        model: see `kapsi.calibrate`; only heads with a `BSpline` as κ change. ψ must be dense, of low rank, a Kronecker kind
            supported by `kapsi.refine`, or masked by whole edges.
        x: inputs, `(rows, m)`.

    Returns:
        The same model.

    Raises:
        ScaleWarning: the outputs at x moved by more than 1 % of their deviation (root mean square).
        SpecError: no spline; a spline inside another expansion or a remainder; processing after κ; an unsupported ψ. The model is
            unchanged then.

    Source: the grid update of arXiv 2404.19756; there with a fit to the data alone.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.zoo import kan
        >>> model = kp.Model(kan.spec([1, 1], intervals=20), seed=0, dtype=torch.float64)
        >>> x = torch.rand(500, 1, dtype=torch.float64) / 2
        >>> before = model(x)
        >>> head = kan.update_grid(model, x).layers[0].heads[0]
        >>> torch.equal(head.kappa["range"], torch.stack((x.amin(0), x.amax(0))))
        True
        >>> bool((model(x) - before).abs().max() < 0.01)
        True
    """
    x = checked_rows(model, x, "update_grid")
    for name, head in model.heads():
        _check_spline(head, f"update_grid: {name}")
    if not any(isinstance(head.spec.expansion, BSpline) for _, head in model.heads()):
        raise SpecError("update_grid: no head of the model has a spline; other expansions have no grid")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    was_training = model.training
    model.eval()
    try:
        y, h = model(x), x
        for number, layer in enumerate(layers_of(model)):
            _update_layer(layer, h, f"update_grid: layers.{number}")
            h = layer(h)
        _report_change(model, y, h)
    except Exception:
        model.load_state_dict(before)
        raise
    finally:
        model.train(was_training)
    return model


def _report_change(model: Model, before: Tensor, after: Tensor) -> None:
    """Warn of outputs that moved by more than the tolerance."""
    change = float((after - before).double().square().mean().sqrt())
    deviation = float((before - before.mean(0)).double().square().mean().sqrt())
    if change > TOLERANCE * deviation and change > 1e-6 * float(before.abs().max()):
        grids = [head.spec.expansion.intervals for _, head in model.heads() if isinstance(head.spec.expansion, BSpline)]
        warnings.warn(
            f"update_grid: the outputs moved by {change:.2g} (root mean square), {change / max(deviation, 1e-300):.2g} of their "
            f"deviation: the new grids are coarser than the old functions; add intervals first, as in "
            f"kp.refine(model, intervals={2 * max(grids)})",
            ScaleWarning,
            stacklevel=4,
        )


def _check_spline(head: Head, where: str) -> None:
    expansion, remainder = head.spec.expansion, head.spec.remainder
    inside = remainder.expansion if isinstance(remainder, ExpansionRemainder) else None
    if expansion.has_grid() and not isinstance(expansion, BSpline):
        inside = expansion
    nested = inside is not None and inside.has_grid()
    processed = isinstance(expansion, BSpline) and bool(head.spec.after)
    forbid(
        where,
        (nested, f"the spline is a part of {inside.name if inside else ''}; use a separate head"),
        (
            processed,
            f"{type(head.spec.after[0]).__name__ if processed else ''} after κ acts on the columns of the old grid; process before "
            "κ or after the layer",
        ),
    )


def _update_layer(layer: Layer, x: Tensor, where: str) -> None:
    heads = heads_of(layer)
    changes: dict[int, ChangeOfBasis] = {}
    for number, head in enumerate(heads):
        if not isinstance(head.spec.expansion, BSpline):
            continue
        owner = layer._owners[number]
        if owner not in changes:
            changes[owner] = _move_grid(heads[owner], x)
        try:
            tensors = _rebase(head, changes[owner])
        except SpecError as error:
            raise SpecError(f"{where}.heads.{number}: {error}") from None
        head.psi.assign(tensors, f"{where}.heads.{number}")


def _move_grid(head: Head, x: Tensor) -> ChangeOfBasis:
    """Move the grid of a head and return the change of basis from the old to the new grid."""
    expansion = cast(BSpline, head.spec.expansion)
    inputs = head.before(x)
    data = inputs.to("cpu", torch.float64)
    n, degree, m = expansion.intervals, expansion.degree, head.in_features

    def functions(points: Tensor) -> Tensor:
        """Return all splines at points of each input, `(m, points, q)`, in float64 on the CPU."""
        tensors = {name: tensor.to("cpu", torch.float64) for name, tensor in _tensors(head)}
        return expansion.clamped()(points, tensors).dense().unflatten(-1, (-1, m)).permute(2, 0, 1)

    old = {name: tensor.clone() for name, tensor in _tensors(head)}
    new = expansion.calibrate(inputs, head.kappa)
    head.kappa.assign(new, "update_grid")
    if expansion.knots == "uniform":
        low, high = head.kappa["range"].to("cpu", torch.float64).unbind(0)
        share = torch.arange(n + 1, dtype=torch.float64, device="cpu").unsqueeze(-1) / n
        ends = torch.lerp(low, high, share)
    else:
        ends = head.kappa["knots"].to("cpu", torch.float64)[degree : degree + n + 1]
    count = POINTS * (degree + 1)
    position = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    even = torch.lerp(ends[:-1].unsqueeze(1), ends[1:].unsqueeze(1), position.view(1, -1, 1)).flatten(0, 1)
    points = torch.cat((data, even))
    weight = torch.cat(
        (torch.full_like(data[:, :1], len(data) ** -0.5), torch.full_like(even[:, :1], (SHARE / len(even)) ** 0.5))
    )
    after = functions(points) * weight
    moved = {name: tensor.clone() for name, tensor in _tensors(head)}
    head.kappa.assign(old, "update_grid")
    target = functions(points) * weight
    head.kappa.assign(moved, "update_grid")
    # QR first: a small least-squares problem for any number of rows.
    q, r = torch.linalg.qr(after)
    matrix = torch.linalg.solve_triangular(r, q.mT @ target, upper=True)

    def columns(rows: Tensor) -> Tensor:
        old_rows = rows.to("cpu", torch.float64).unflatten(-1, (-1, m))
        return torch.einsum("igk,...ki->...gi", matrix, old_rows).flatten(-2).to(rows)

    shared = torch.equal(matrix, matrix[:1].expand_as(matrix))
    grid = (lambda rows: (rows.to("cpu", torch.float64) @ matrix[0].mT).to(rows)) if shared else None
    return ChangeOfBasis(head.factors, columns, grid)


def _tensors(head: Head) -> list[tuple[str, Tensor]]:
    return [(name, head.kappa[name]) for name in head.kappa.names()]


def _rebase(head: Head, change: ChangeOfBasis) -> dict[str, Any]:
    """Return the tensors of ψ in a new basis of κ of equal size."""
    psi = head.spec.reconciliation
    if not isinstance(psi, Masked):
        return psi.rebase(head.psi, head.out_features, head.factors, change)[1]
    mask = head.psi["mask"]
    edges = mask.unflatten(-1, (-1, head.in_features))
    if not torch.equal(edges, edges[..., :1, :].expand_as(edges)):
        raise SpecError("its mask keeps a part of the splines of an edge, undefined on a new grid; mask whole edges")
    weights = change.columns(head.weights().dense())
    return {"entries": weights[mask.view_as(weights)].view_as(head.psi["entries"])}
