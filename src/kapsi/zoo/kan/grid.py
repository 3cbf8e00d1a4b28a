"""A grid that follows the data, for splines in any model: it moves, and the function stays."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.spline import BSpline
from kapsi.modules import Head, Layer, Model
from kapsi.reconciliation.base import ChangeOfBasis
from kapsi.reconciliation.dense import Masked
from kapsi.remainder import ExpansionRemainder
from kapsi.zoo.kan.edges import checked_rows, heads_of, layers_of

__all__ = ["update_grid"]

POINTS = 4
"""Evenly spaced points of each new interval, for each function that is not zero on it, at which a spline keeps its values."""

SHARE = 0.01
"""Weight of all those points beside that of the data."""


@torch.no_grad()
def update_grid(model: Model, x: Tensor) -> Model:
    """Move the grid of every spline to the data and keep the function, in place, layer by layer.

    The range or the knots are what `kapsi.calibrate` makes of the data. The coefficients on the new grid are those of least
    squares to the functions on the old one: at the data, and with a hundredth of their weight at evenly spaced points of every
    new interval, so that there is one answer where there are few data. What the new splines can be is kept exactly.

    Args:
        model: as for `kapsi.calibrate`; heads whose κ is a `BSpline` are changed, all others stay as they are. ψ must be dense,
            of low rank or a Kronecker kind that `kapsi.refine` takes, or masked by whole edges.
        x: inputs, `(rows, m)`.

    Returns:
        The same model.

    Raises:
        SpecError: no spline; a spline inside of another expansion or a remainder; processing after κ; ψ that cannot be carried
            over. The model is then as it was.

    Source: the grid update of arXiv 2404.19756; there the new coefficients fit the data alone.

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
    found = False
    for name, head in model.heads():
        expansion = head.spec.expansion
        remainder = head.spec.remainder
        inside = remainder.expansion if isinstance(remainder, ExpansionRemainder) else None
        if expansion.has_grid() and not isinstance(expansion, BSpline):
            inside = expansion
        if inside is not None and inside.has_grid():
            raise SpecError(
                f"update_grid: {name}: a spline is a part of {inside.name} there; make it a head of its own"
            )
        if isinstance(expansion, BSpline):
            found = True
            if head.spec.after:
                raise SpecError(
                    f"update_grid: {name}: {type(head.spec.after[0]).__name__} after κ acts on its columns, and another grid has "
                    "others; process before κ or after the layer"
                )
    if not found:
        raise SpecError("update_grid: no head of the model has a spline, and other expansions have no grid")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    was_training = model.training
    model.eval()
    try:
        for number, layer in enumerate(layers_of(model)):
            _update_layer(layer, x, f"update_grid: layers.{number}")
            x = layer(x)
    except Exception:
        model.load_state_dict(before)
        raise
    finally:
        model.train(was_training)
    return model


def _update_layer(layer: Layer, x: Tensor, where: str) -> None:
    heads = heads_of(layer)
    changes: dict[int, ChangeOfBasis] = {}
    for number, head in enumerate(heads):
        if not isinstance(head.spec.expansion, BSpline):
            continue
        owner = layer._owners[number]
        if owner not in changes:
            changes[owner] = _moved(heads[owner], x)
        try:
            tensors = _rebased(head, changes[owner])
        except SpecError as error:
            raise SpecError(f"{where}.heads.{number}: {error}") from None
        head.psi.assign(tensors, f"{where}.heads.{number}")


def _moved(head: Head, x: Tensor) -> ChangeOfBasis:
    """Move the grid of a head and return how functions on the old one are written on the new one."""
    expansion = cast(BSpline, head.spec.expansion)
    inputs = head.before(x)
    data = inputs.to("cpu", torch.float64)
    n, degree, m = expansion.intervals, expansion.degree, head.in_features

    def functions(points: Tensor) -> Tensor:
        """Return all functions at some points of each input, `(m, points, q)`, in float64, which not every device has."""
        tensors = {name: tensor.to("cpu", torch.float64) for name, tensor in _named(head)}
        return expansion.clamped()(points, tensors).dense().unflatten(-1, (-1, m)).permute(2, 0, 1)

    old = {name: tensor.clone() for name, tensor in _named(head)}
    new = expansion.calibrate(inputs, head.kappa)
    head.kappa.assign(new, "update_grid")
    if expansion.knots == "uniform":
        low, high = head.kappa["range"].to("cpu", torch.float64).unbind(0)
        share = torch.arange(n + 1, dtype=torch.float64, device="cpu").unsqueeze(-1) / n
        ends = torch.lerp(low, high, share)
    else:
        ends = head.kappa["knots"].to("cpu", torch.float64)[degree : degree + n + 1]
    count = POINTS * (degree + 1)
    place = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    even = torch.lerp(ends[:-1].unsqueeze(1), ends[1:].unsqueeze(1), place.view(1, -1, 1)).flatten(0, 1)
    points = torch.cat((data, even))
    weight = torch.cat(
        (torch.full_like(data[:, :1], len(data) ** -0.5), torch.full_like(even[:, :1], (SHARE / len(even)) ** 0.5))
    )
    after = functions(points) * weight
    kept = {name: tensor.clone() for name, tensor in _named(head)}
    head.kappa.assign(old, "update_grid")
    wanted = functions(points) * weight
    head.kappa.assign(kept, "update_grid")
    # Triangular factors first: least squares of few rows, however many there are in the data.
    q, r = torch.linalg.qr(after)
    matrix = torch.linalg.solve_triangular(r, q.mT @ wanted, upper=True)

    def columns(rows: Tensor) -> Tensor:
        old_rows = rows.to("cpu", torch.float64).unflatten(-1, (-1, m))
        return torch.einsum("igk,...ki->...gi", matrix, old_rows).flatten(-2).to(rows)

    alike = torch.equal(matrix, matrix[:1].expand_as(matrix))
    grid = (lambda rows: (rows.to("cpu", torch.float64) @ matrix[0].mT).to(rows)) if alike else None
    return ChangeOfBasis(head.factors, columns, grid)


def _named(head: Head) -> list[tuple[str, Tensor]]:
    return [(name, head.kappa[name]) for name in head.kappa.names()]


def _rebased(head: Head, change: ChangeOfBasis) -> dict[str, Any]:
    """Return the tensors of ψ in a new basis of κ with as many functions."""
    psi = head.spec.reconciliation
    if not isinstance(psi, Masked):
        return psi.rebase(head.psi, head.out_features, head.factors, change)[1]
    mask = head.psi["mask"]
    edges = mask.unflatten(-1, (-1, head.in_features))
    if not torch.equal(edges, edges[..., :1, :].expand_as(edges)):
        raise SpecError(
            "its mask keeps a part of the functions of an edge, and another grid has others; mask whole edges"
        )
    weights = change.columns(head.weights().dense())
    return {"values": weights[mask.view_as(weights)].view_as(head.psi["values"])}
