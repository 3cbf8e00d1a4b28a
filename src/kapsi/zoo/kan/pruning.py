"""Pruning of Kolmogorov–Arnold networks."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import SpecError, check_number
from kapsi.expansion.simple import Identity
from kapsi.expansion.spline import BSpline
from kapsi.function import coerce
from kapsi.fusion import Mean
from kapsi.hooks import copied
from kapsi.modules import Head, Layer, Model
from kapsi.process import Affine
from kapsi.reconciliation.dense import Dense, Masked
from kapsi.remainder import IdentityRemainder, LinearRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.zoo.base import forbid
from kapsi.zoo.kan.edges import Edges, checked_rows, edge_functions, edges_of, heads_of, layers_of, shares_of


@torch.no_grad()
def prune(model: Model, x: Tensor, *, edges: float = 0.03, nodes: float = 0.01, fixed: bool = True) -> Model:
    """Return a smaller model without unimportant hidden nodes and edges.

    Hidden nodes are removed first, then, by recomputed scores, edges, together with hidden nodes left without incoming or outgoing
    edges. The mean of each removed edge on the data is added to the bias: removing a constant edge keeps the outputs equal. Inputs
    and outputs stay, also the affine layers of `kapsi.standardized`.

    Args:
        model: a model of splines and identity expansions with a dense or masked ψ, see also `edge_functions`; not changed.
        x: inputs, at least two rows.
        edges: largest score in `attribution` of removed edges, at least 0.
        nodes: largest score of removed hidden nodes, at least 0.
        fixed: keep removed edges at zero in training; a pruned layer gets masked ψ, and its linear remainder becomes a separate
            head with κ = identity after the activation. False: dense ψ with zeros, as required by `kapsi.refine`.

    Returns:
        A new model of the same type, device and mode; frozen parameters become trainable.

    Raises:
        SpecError: no edge would be left, or an unsupported model.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.zoo import kan
        >>> model = kp.Model(kan.spec([2, 5, 1]), seed=0, dtype=torch.float64)
        >>> x = torch.rand(50, 2, dtype=torch.float64) * 2 - 1
        >>> with torch.no_grad():
        ...     for tensor in model.layers[1].heads[0].parameters():
        ...         tensor.unflatten(1, (-1, 5))[..., 2:] = 0          # three unused nodes
        >>> small = kan.prune(model, x, edges=0, nodes=0)
        >>> small.spec.widths, torch.allclose(small(x), model(x))
        ((2, 2, 1), True)
    """
    x = checked_rows(model, x, "prune", least=2)
    edges, nodes = check_number("prune(edges)", edges, 0), check_number("prune(nodes)", nodes, 0)
    fixed = coerce(bool, fixed, "prune(fixed)")
    if any(layer.output for layer in layers_of(model)):
        return _prune_between(model, x, edges, nodes, fixed)
    for name, head in model.heads():
        _check_prunable(head, f"prune: {name}")
    values = edge_functions(model, x)
    alive = [score > nodes for score in shares_of(values).nodes]
    alive[0][:], alive[-1][:] = True, True
    keep = [after.unsqueeze(-1) & before for before, after in pairwise(alive)]
    model, keep = _remove(model, values, keep, fixed=False)
    values = edge_functions(model, x)
    keep = [old & (score > edges) for old, score in zip(keep, shares_of(values).edges, strict=True)]
    return _remove(model, values, keep, fixed=fixed)[0]


def _prune_between(model: Model, x: Tensor, edges: float, nodes: float, fixed: bool) -> Model:
    """Prune the layers between the affine ones of `kapsi.standardized`."""
    inner, last = copied(model), layers_of(model)[-1]
    layers, specs = layers_of(inner), [layer for _, _, layer in model.spec.resolved()]
    affine = last.spec.output[-1:] == (Affine(),)
    if affine:
        layers[-1].output = torch.nn.Sequential(*list(layers[-1].output)[:-1])
        layers[-1].spec = specs[-1] = dataclasses.replace(last.spec, output=last.spec.output[:-1])
    first = layers.pop(0) if model.standardized else None
    widths = model.spec.widths if first is None else model.spec.widths[1:]
    specs = specs if first is None else specs[1:]
    if any(layer.output for layer in layers):
        raise SpecError("prune: output processing cannot be pruned, only the affine layers of kapsi.standardized")
    inner.layers, inner.spec = torch.nn.ModuleList(layers), ModelSpec(widths, tuple(specs))
    small = prune(inner, x if first is None else first(x), edges=edges, nodes=nodes, fixed=fixed)
    widths, specs = small.spec.widths, [layer for _, _, layer in small.spec.resolved()]
    if affine:
        end = layers_of(small)[-1]
        end.output.append(copied(last.output[-1]))
        end.spec = specs[-1] = dataclasses.replace(end.spec, output=(Affine(),))
    if first is not None:
        small.layers.insert(0, first)
        widths, specs = (widths[0], *widths), [first.spec, *specs]
    small.spec = ModelSpec(widths, tuple(specs))
    return small.train(model.training)


def _check_prunable(head: Head, where: str) -> None:
    spec = head.spec
    known = isinstance(spec.expansion, BSpline | Identity) and isinstance(spec.reconciliation, Dense | Masked)
    forbid(
        where,
        (
            not known,
            f"{type(spec.expansion).__name__} with {type(spec.reconciliation).__name__} cannot be pruned; possible are "
            "BSpline and Identity with Dense and Masked",
        ),
        (
            isinstance(spec.remainder, IdentityRemainder),
            "IdentityRemainder has no removable edges; use a LinearRemainder",
        ),
    )


def _remove(model: Model, values: list[Edges], keep: list[Tensor], *, fixed: bool) -> tuple[Model, list[Tensor]]:
    """Return a model without some edges, and the mask of the kept edges among its edges.

    Args:
        model: the model.
        values: its edge functions on data.
        keep: mask of the kept edges of each layer, `(n, m)`.
        fixed: whether removed edges have no parameters.
    """
    keep, constants = _constants(model, values, keep)
    # After `_constants` an unreached node has no outgoing edge, and a node without outgoing edge no incoming edge.
    alive = [torch.ones_like(keep[0][0])]
    alive += [after.any(0) for after in keep[1:]] + [torch.ones_like(keep[-1][:, 0])]
    nodes = [mask.nonzero().squeeze(1) for mask in alive]
    kept = [mask[after][:, before] for mask, (before, after) in zip(keep, pairwise(nodes), strict=True)]
    parts = [
        _prune_layer(layer, before, after, mask, constant[after], fixed)
        for layer, (before, after), mask, constant in zip(
            layers_of(model), pairwise(nodes), kept, constants, strict=True
        )
    ]
    widths = tuple(len(indices) for indices in nodes)
    smaller = Model(ModelSpec(widths, tuple(spec for spec, _ in parts)), seed=0, dtype=values[0].inputs.dtype)
    for layer, (_, tensors) in zip(layers_of(smaller), parts, strict=True):
        for head, roles in zip(heads_of(layer), tensors, strict=True):
            bias = roles.pop("bias", None)
            if bias is not None and head.bias is not None:
                head.bias.copy_(bias["bias"])
            for role, assigned in roles.items():
                head.assign(role, **assigned)  # type: ignore[arg-type]
    return smaller.to(values[0].inputs.device).train(model.training), kept


def _constants(model: Model, values: list[Edges], keep: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the masks without edges from or to dead nodes, and the biases with the means of the removed edges."""
    keep = [mask.clone() for mask in keep]
    for number in reversed(range(1, len(keep))):  # a node without outgoing edges needs no incoming edges
        keep[number - 1] &= keep[number].any(0).unsqueeze(-1)
    constants: list[Tensor] = []
    for number, (layer, edges) in enumerate(zip(layers_of(model), values, strict=True)):
        means = edges.values.mean(0)
        if constants:
            # Nodes without incoming edges are constant.
            reached = keep[number - 1].any(1)
            at_constant = edges_of(layer, constants[-1].unsqueeze(0), f"prune: layers.{number}").values[0]
            means = torch.where(reached, means, at_constant)
            keep[number] &= reached
        constants.append(edges.constant + torch.where(keep[number], 0, means).sum(1))
        if not bool(keep[number].any()):
            raise SpecError(
                f"prune: no edge of layers.{number} would be left; use lower thresholds, or a constant instead of the model"
            )
    return keep, constants


def _prune_layer(
    layer: Layer, before: Tensor, after: Tensor, keep: Tensor, constant: Tensor, fixed: bool
) -> tuple[LayerSpec, list[dict[str, dict[str, Any]]]]:
    """Return the specification of a layer with fewer nodes and edges, and the tensors of its heads by role."""
    masked = fixed and not bool(keep.all())
    biased = bool(constant.any()) or any(head.bias is not None for head in heads_of(layer))
    share = 1 / len(layer.heads) if isinstance(layer.spec.fusion, Mean) else 1.0
    specs: list[HeadSpec] = []
    tensors: list[dict[str, dict[str, Any]]] = []

    def add(spec: HeadSpec, kappa: dict[str, Tensor], weights: Tensor, entries: Tensor) -> None:
        """Add a head; `weights` and the mask `entries` of trainable weights are `(n, q, m)`."""
        matrix = weights.flatten(1) * share
        values: dict[str, Any] = {"matrix": matrix}
        if not bool(entries.all()) and (masked or isinstance(spec.reconciliation, Masked)):
            spec = dataclasses.replace(spec, reconciliation=Masked(int(entries.sum()) / entries.numel()))
            values = {"mask": entries.flatten(1), "entries": matrix[entries.flatten(1)]}
        else:
            spec = dataclasses.replace(spec, reconciliation=Dense())
        specs.append(spec)
        tensors.append({"expansion": dict(kappa), "reconciliation": values})

    for head in heads_of(layer):
        old, m = head.spec, layer.in_features
        weights = head.weights().dense().sum(0).unflatten(-1, (-1, m))[after][..., before]
        weights = torch.where(keep.unsqueeze(1), weights, 0)
        entries = torch.ones_like(weights, dtype=torch.bool)
        if isinstance(old.reconciliation, Masked):
            entries = head.psi["mask"].reshape(-1, layer.out_features, math.prod(head.factors)).any(0)
            entries = entries.unflatten(-1, (-1, m))[after][..., before]
        store = head.store("expansion")
        kappa = {name: store[name][..., before] for name in store.names()}
        part = HeadSpec(old.expansion, old.reconciliation, before=old.before)
        linear = old.remainder if isinstance(old.remainder, LinearRemainder) else None
        matrix = torch.where(keep, head.pi["matrix"][after][:, before], 0) if linear else None
        stays = linear is not None and not masked
        if stays and linear is not None:
            part = dataclasses.replace(part, remainder=dataclasses.replace(linear, bias=False))
        add(part, kappa, weights, entries & keep.unsqueeze(1) if masked else entries)
        if linear is not None and matrix is not None:
            if stays:
                tensors[-1]["remainder"] = {"matrix": matrix * share}
            else:
                steps = () if linear.before is None else (linear.before,)
                add(HeadSpec(Identity(), before=steps), {}, matrix.unsqueeze(1), keep.unsqueeze(1))
    if biased:
        specs[0] = dataclasses.replace(specs[0], bias=True)
        tensors[0]["bias"] = {"bias": constant}
    return LayerSpec(tuple(specs)), tensors
