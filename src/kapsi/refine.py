"""A finer grid for a trained model: the same function, with more parameters to train on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion
from kapsi.function import Params, coerce, flatten, options_of
from kapsi.modules import Head, Layer, Model
from kapsi.reconciliation.base import ChangeOfBasis
from kapsi.spec import HeadSpec

__all__ = ["refine"]


@torch.no_grad()
def refine(model: Model, intervals: int) -> Model:
    """Return a new model with a finer grid that is the same function.

    Each interval of every spline is divided into equal parts (knot insertion), and ψ is carried over exactly. Heads without
    a spline are copied as they are; so are types, devices, what is frozen, and training or evaluation mode.

    The function is the same on the range of every spline, and beyond it by every `extrapolation` policy but one: with uniform
    knots and `extended` the knots beyond the range move with the width of the intervals, and with them what lies there.

    Args:
        model: a model with at least one spline; it is not changed.
        intervals: of the new grids, a multiple of those of each spline.

    Raises:
        SpecError: a model without a spline; a number that is no multiple; a head whose function cannot be kept: ψ that is
            constant, masked or generated, or a Kronecker kind off κ's natural grid; a spline whose values other parts of a
            `Nested` use; processing after κ; a spline in a remainder. The message names the head.

    Source: grid extension of Kolmogorov–Arnold networks (arXiv 2404.19756), here exact; knot insertion: de Boor, A Practical
        Guide to Splines (2001), chapter XI.

    Example:
        >>> import torch, kapsi as kp
        >>> coarse = kp.Model(kp.rpn([2, 3, 1], expansion=kp.BSpline(intervals=5)), seed=0, dtype=torch.float64)
        >>> fine, x = kp.refine(coarse, intervals=20), torch.rand(9, 2, dtype=torch.float64)
        >>> torch.allclose(fine(x), coarse(x), rtol=0, atol=1e-12)
        True
        >>> coarse.layers[0].heads[0].factors, fine.layers[0].heads[0].factors
        ((8, 2), (23, 2))
    """
    if not isinstance(model, Model):
        raise SpecError(f"refine: expected a kapsi Model, got {type(model).__name__}")
    intervals = coerce(int, intervals, "refine(intervals)")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SpecError("refine: the model is on the meta device and has no values")
    if not any(head.spec.expansion.has_grid() or _in_remainder(head) for _, head in model.heads()):
        raise SpecError("refine: no head of the model has a spline, and other expansions have no grid")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    specs = {name: _carry_over(state, name, head, intervals) for name, head in model.heads()}
    layers = tuple(
        dataclasses.replace(layer.spec, heads=tuple(specs[f"layers.{i}.heads.{k}"] for k in range(len(layer.heads))))
        for i, layer in enumerate(model.layers)
        if isinstance(layer, Layer)
    )
    if len(model.spec.layers) == 1 and len(set(layers)) == 1:
        layers = layers[:1]
    finer = Model(dataclasses.replace(model.spec, layers=layers), seed=0, device="meta")
    _share(state, dict(finer.heads()))
    finer.load_state_dict(state, assign=True)
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    for name, parameter in finer.named_parameters():
        parameter.requires_grad_(parameters[name].requires_grad)
    for name, module in finer.named_modules():
        module.training = modules[name].training if name in modules else model.training
    return finer


def _carry_over(state: dict[str, Tensor], name: str, head: Head, intervals: int) -> HeadSpec:
    """Return the specification of a head on the finer grid, and set its tensors in a state."""
    spec, where = head.spec, f"refine: {name}"
    inside = _in_remainder(head)
    if inside is not None:
        raise SpecError(
            f"{where}: {type(spec.remainder).__name__} has a grid, {inside}, which is not refined; "
            "make that expansion a head of its own"
        )
    try:
        found = spec.expansion.refined(head.store("expansion"), head.in_features, intervals)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    if found is None:
        return spec
    if spec.after:
        steps = ", ".join(type(step).__name__ for step in spec.after)
        raise SpecError(
            f"{where}: {steps} after κ acts on its columns, and a finer grid has others, so the function cannot be kept; "
            "process before κ or after the layer"
        )
    change = ChangeOfBasis(found.expansion.factors(head.in_features), found.columns, found.grid)
    try:
        psi, tensors = spec.reconciliation.rebase(head.psi, head.out_features, head.factors, change)
    except SpecError as error:
        hint = "" if found.grid else "; this κ has no such grid, its inputs or parts have knots of their own"
        raise SpecError(f"{where}: {error}{hint}") from None
    old = {key: state.pop(key) for key in list(state) if key.startswith((f"{name}.psi.", f"{name}.kappa."))}
    if not head._owner:
        state |= _named(f"{name}.kappa.", found.expansion.params(head.in_features), found.tensors)
    for key, value in _named(f"{name}.psi.", psi.params(head.out_features, change.factors), tensors):
        state[key] = value.to(old[key])
    return dataclasses.replace(spec, expansion=found.expansion, reconciliation=psi)


def _named(prefix: str, params: Params, tensors: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the declared tensors by their names in a state."""
    for name, param in flatten(params):
        value: Tensor = functools.reduce(lambda place, part: place[part], name.split("."), tensors)
        kept = value.movedim(-1, 0) if param.transposed else value
        yield prefix + name, kept.detach().clone(memory_format=torch.contiguous_format)


def _in_remainder(head: Head) -> Expansion | None:
    """Return an expansion with a grid that a remainder is made of."""
    remainder = head.spec.remainder
    options = [getattr(remainder, field.name) for field in options_of(type(remainder))]
    return next((option for option in options if isinstance(option, Expansion) and option.has_grid()), None)


def _share(state: dict[str, Tensor], heads: dict[str, Head]) -> None:
    """Drop the κ of heads that became equal to another of their layer, 5 and 10 intervals both refined to 20."""
    names = {head: name for name, head in heads.items()}
    for name, head in heads.items():
        for key in [key for key in state if head._owner and key.startswith((f"{name}.kappa.", f"{name}.before."))]:
            owner = names[head._owner[0]]
            if not torch.equal(state.pop(key), state[owner + key.removeprefix(name)]):
                raise SpecError(
                    f"refine: {name} and {owner} have equal expansions of {head.spec.expansion.name} on the new grid, but not "
                    "the same knots; heads of one layer with equal expansions share them"
                )
