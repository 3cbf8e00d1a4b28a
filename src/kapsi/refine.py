"""A finer grid for a trained model: the same function with more parameters."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError, refuse
from kapsi.expansion.base import Expansion
from kapsi.function import Params, coerce, flatten, options_of
from kapsi.modules import Head, Model, Store, has_own_forward
from kapsi.reconciliation.base import ChangeOfBasis
from kapsi.spec import HeadSpec


@torch.no_grad()
def refine(model: Model, intervals: int) -> Model:
    """Return a new model that computes the same function on finer spline grids.

    Each interval of every spline is divided into equal parts (knot insertion), and ψ is carried over exactly. Heads without
    a spline, types, devices, frozen parameters, hooks, and training or evaluation mode are copied.

    The function is the same on the range of every spline, and outside for every `extrapolation` except `extended` with
    uniform knots: knots outside of the range depend on the width of the intervals.

    Args:
        model: a model with at least one spline; not changed.
        intervals: number of intervals of the new grids, a multiple of the present number of each spline.

    Raises:
        SpecError: a model without a spline; not a multiple; a head without an exact refinement: constant, masked or generated ψ,
            a Kronecker kind off κ's natural grid, a spline with values used by other parts of a `Nested`, processing after
            κ, a spline in a remainder; pruned or parametrized tensors, replaced methods, other modules in the place of a layer
            or a head. The message names the head.

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
        refuse("refine", "a kapsi Model", model)
    intervals = coerce(int, intervals, "refine(intervals)")
    problem = ""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        problem = "the model is on the meta device and has no values"
    elif not any(head.spec.expansion.has_grid() or _in_remainder(head) for _, head in model.heads()):
        problem = "no head of the model has a spline, and other expansions have no grid"
    if problem:
        raise SpecError(f"refine: {problem}")
    layers = model.check_layers("refine")
    _check_formula(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    specs = {name: _carry_over(state, name, head, intervals) for name, head in model.heads()}
    finer_layers = tuple(
        dataclasses.replace(layer.spec, heads=tuple(specs[f"layers.{i}.heads.{k}"] for k in range(len(layer.heads))))
        for i, layer in enumerate(layers)
    )
    if len(model.spec.layers) == 1 and len(set(finer_layers)) == 1:
        finer_layers = finer_layers[:1]
    finer = Model(dataclasses.replace(model.spec, layers=finer_layers), seed=0, device="meta")
    _share(state, dict(finer.heads()))
    if other := sorted(finer.state_dict().keys() ^ state.keys()):
        raise SpecError(
            f"refine: the model differs from its specification, see {', '.join(other[:3])}; remove added parts first"
        )
    finer.load_state_dict(state, assign=True)
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    for name, parameter in finer.named_parameters():
        parameter.requires_grad_(parameters[name].requires_grad)
    for name, module in finer.named_modules():
        module.training = modules[name].training if name in modules else model.training
        if name in modules:
            hooks = {key: value for key, value in modules[name].__dict__.items() if "hook" in key}
            module.__dict__.update({key: copy.copy(value) for key, value in hooks.items()})
    return finer


def _check_formula(model: Model) -> None:
    """Raise a `SpecError` if part of a model computes more than its specification states, hooks of modules excepted."""
    for name, module in model.named_modules():
        where = f"refine: {name or 'the model'}"
        if has_own_forward(module):
            raise SpecError(
                f"{where} has a forward method of its own, which the refined model would not have; refine without it"
            )
        if isinstance(module, Store):
            module.check_as_declared(where)


def _carry_over(state: dict[str, Tensor], name: str, head: Head, intervals: int) -> HeadSpec:
    """Return the specification of a head on the finer grid, and set the tensors of the head in a state."""
    try:
        return _refined(state, name, head, intervals)
    except SpecError as error:
        raise SpecError(f"refine: {name}: {error}") from None


def _refined(state: dict[str, Tensor], name: str, head: Head, intervals: int) -> HeadSpec:
    spec = head.spec
    inside = _in_remainder(head)
    if inside is not None:
        raise SpecError(
            f"{type(spec.remainder).__name__} has a grid, {inside}, and is not refined; use a head with this expansion"
        )
    finer = spec.expansion.refined(head.store("expansion"), head.in_features, intervals)
    if finer is None:
        return spec
    if spec.after:
        steps = ", ".join(type(step).__name__ for step in spec.after)
        raise SpecError(
            f"{steps} after κ acts on its columns, and a finer grid has other columns, so the function cannot be kept; "
            "process before κ or after the layer"
        )
    change = ChangeOfBasis(finer.expansion.factors(head.in_features), finer.columns, finer.grid)
    try:
        psi, tensors = spec.reconciliation.rebase(head.psi, head.out_features, head.factors, change)
    except SpecError as error:
        hint = "" if finer.grid else "; this κ has no such grid: inputs or parts differ in knots"
        raise SpecError(f"{error}{hint}") from None
    old = {key: state.pop(key) for key in list(state) if key.startswith((f"{name}.psi.", f"{name}.kappa."))}
    if not head._owner:
        # Processing inside of κ, such as a batch norm, keeps its tensors.
        modules = [key for key, module in head.kappa.named_modules() if isinstance(module, nn.Sequential)]
        kept = tuple(f"{name}.kappa.{key}." for key in modules)
        state |= {key: value for key, value in old.items() if kept and key.startswith(kept)}
        state |= _named(f"{name}.kappa.", finer.expansion.params(head.in_features), finer.tensors)
    for key, value in _named(f"{name}.psi.", psi.params(head.out_features, change.factors), tensors):
        state[key] = value.to(old[key])
    return dataclasses.replace(spec, expansion=finer.expansion, reconciliation=psi)


def _named(prefix: str, params: Params, tensors: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names in a state and copies of the declared tensors."""
    for name, param in flatten(params):
        value: Tensor = functools.reduce(lambda tensors, part: tensors[part], name.split("."), tensors)
        stored = value.movedim(-1, 0) if param.transposed else value
        yield prefix + name, stored.detach().clone(memory_format=torch.contiguous_format)


def _in_remainder(head: Head) -> Expansion | None:
    """Return an expansion with a grid among the options of a remainder."""
    remainder = head.spec.remainder
    options = [getattr(remainder, field.name) for field in options_of(type(remainder))]
    return next((option for option in options if isinstance(option, Expansion) and option.has_grid()), None)


def _share(state: dict[str, Tensor], heads: dict[str, Head]) -> None:
    """Drop the κ of heads with expansions now equal to another head's: 5 and 10 intervals refined to 20."""
    names = {head: name for name, head in heads.items()}
    for name, head in heads.items():
        for key in [key for key in state if head._owner and key.startswith((f"{name}.kappa.", f"{name}.before."))]:
            owner = names[head._owner[0]]
            if not torch.equal(state.pop(key), state[owner + key.removeprefix(name)]):
                raise SpecError(
                    f"refine: {name} and {owner} have equal expansions of {head.spec.expansion.name} on the new grid, but not "
                    "the same knots; heads of one layer with equal expansions share knots"
                )
