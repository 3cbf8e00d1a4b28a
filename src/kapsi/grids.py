"""Grid updates: move the grids of splines to their inputs and keep the function of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Refinement
from kapsi.hooks import hooked_inputs
from kapsi.modules import Head, Layer, Model
from kapsi.reconciliation import Masked
from kapsi.reconciliation.base import ChangeOfBasis
from kapsi.remainder import ExpansionRemainder

TOLERANCE = 0.01
"""Smallest reported RMS change of the outputs, relative to their standard deviation."""

ROUNDED = 1e-4
"""Largest change counted as rounding, relative to the largest output, but two roundings in half precision."""


@dataclass
class GridUpdate:
    """A grid update of a model.

    Attributes:
        change: RMS change of the outputs at the inputs, relative to their standard deviation, or to their size if constant.
        bases: heads on new grids, and the change of basis of ψ.
    """

    change: float = 0.0
    bases: list[tuple[Head, ChangeOfBasis]] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters with another meaning on the new grids."""
        return [p for head, _ in self.bases for p in head.psi.parameters() if p.requires_grad]

    @torch.no_grad()
    def express(self) -> None:
        """Express ψ, given in the old bases, in the new ones, in place."""
        for head, change in self.bases:
            head.psi.assign(_expressed(head, change), "update_grid")


@torch.no_grad()
def update_grids(model: Model, x: Tensor, where: str, margin: float = 1.0) -> GridUpdate:
    """Move the grids of all heads to their inputs and keep the function, in place, layer by layer.

    A model that cannot be changed, or an exception, leaves the model unchanged.

    Args:
        model: the model.
        x: inputs, `(rows, m)`.
        where: prefix of error messages.
        margin: width of the new range of hidden layers relative to their inputs.

    Raises:
        SpecError: no grid; a grid in a remainder, or before parts of a `Nested` other than polynomials; processing after κ; a ψ
            that cannot be expressed in another basis; other modules in the place of heads.
    """
    _check(model, where)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    was_training = model.training
    model.eval()
    update = GridUpdate()
    try:
        y, hidden = model(x), hooked_inputs(model, x)
        moves = False  # whether training changes the inputs of the layer
        for number, layer in enumerate(model.check_layers(where)):
            update.bases += _update_layer(layer, hidden, f"{where}: layers.{number}", margin if moves else 1.0)
            hidden = layer(hidden)
            moves = moves or any(parameter.requires_grad for parameter in layer.parameters())
        update.change = _relative_change(y, model(x))
        return update
    except Exception:
        model.load_state_dict(before)
        raise
    finally:
        model.train(was_training)


def check_grids(model: Model, x: Tensor, where: str) -> None:
    """Check that the grids of a model can be moved with the function kept; arguments and exceptions as `update_grids`."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    update_grids(model, x, where)
    model.load_state_dict(before)


def _check(model: Model, where: str) -> None:
    found = False
    for number, layer in enumerate(model.check_layers(where)):
        for k, head in enumerate(cast(list[Head], list(layer.heads))):
            remainder, after = head.spec.remainder, head.spec.after
            problem = ""
            if isinstance(remainder, ExpansionRemainder) and remainder.expansion.has_grid():
                problem = f"the spline is a part of {remainder.expansion.name}; use a separate head"
            elif head.spec.expansion.has_grid() and after:
                names = ", ".join(type(step).__name__ for step in after)
                problem = f"{names} after κ acts on the columns of the old grid; process before κ or after the layer"
            if problem:
                raise SpecError(f"{where}: layers.{number}.heads.{k}: {problem}")
            found |= head.spec.expansion.has_grid()
    if not found:
        raise SpecError(f"{where}: no head of the model has a spline; other expansions have no grid")


def _update_layer(layer: Layer, x: Tensor, where: str, margin: float) -> list[tuple[Head, ChangeOfBasis]]:
    heads, x = layer.check_heads(where), hooked_inputs(layer, x)
    moved: dict[int, Refinement | None] = {}
    bases = []
    for number, head in enumerate(heads):
        owner = layer._owners[number]
        try:
            if owner not in moved:
                inputs = heads[owner].before(hooked_inputs(heads[owner], x))
                moved[owner] = heads[owner].spec.expansion.moved(inputs, heads[owner].kappa, margin)
            new = moved[owner]
            if new is None:
                continue
            change = ChangeOfBasis(head.factors, new.columns, new.grid)
            tensors = _expressed(head, change)
        except SpecError as error:
            raise SpecError(f"{where}.heads.{number}: {error}") from None
        head.psi.assign(tensors, f"{where}.heads.{number}")
        bases.append((head, change))
    for owner, new in moved.items():
        if new is not None:
            heads[owner].kappa.assign(cast(Any, new.tensors), f"{where}.heads.{owner}")
    return bases


def _expressed(head: Head, change: ChangeOfBasis) -> dict[str, Any]:
    """Return the tensors of ψ in a new basis of κ of equal size."""
    psi = head.spec.reconciliation
    if not isinstance(psi, Masked):
        return psi.rebase(head.psi, head.out_features, head.factors, change)[1]
    mask = head.psi["mask"]
    edges = mask.unflatten(-1, (-1, head.in_features))
    if not head.spec.expansion.element_wise() or not torch.equal(edges, edges[..., :1, :].expand_as(edges)):
        raise SpecError("its mask keeps a part of the splines of an edge, undefined on a new grid; mask whole edges")
    weights = change.columns(head.weights().dense())
    return {"entries": weights[mask.view_as(weights)].view_as(head.psi["entries"])}


def _relative_change(before: Tensor, after: Tensor) -> float:
    """Return the RMS change of outputs relative to their standard deviation, 0 for changes by rounding."""
    eps, before, after = torch.finfo(before.dtype).eps, before.double(), after.double()
    change = float((after - before).square().mean().sqrt())
    deviation = float((before - before.mean(0)).square().mean().sqrt())
    size = float(before.abs().max())
    # Several layers round more than once, but 64 roundings in half precision are a visible change. Outputs that differ by
    # rounding only are constant: their changes are relative to their size.
    rounding = max(min(64 * eps, ROUNDED), 2 * eps) * size
    scale = deviation if deviation > rounding else size
    return 0.0 if change <= rounding else change / scale if scale > 0 else math.inf
