"""Removal of edges and nodes of models of univariate functions; the means of removed edges are added to the biases."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.simple import Identity
from kapsi.fusion import Mean
from kapsi.hooks import copied
from kapsi.interpret.edges import Edges, column_inputs, edges_of, layers_of, linear_part, shares_of
from kapsi.modules import Head, Layer, Model
from kapsi.reconciliation.dense import Dense, Masked
from kapsi.remainder import LinearRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

MAX_MATRIX = 2**24
"""Largest number of weights of a head whose edges are removed one by one."""


@torch.no_grad()
def without_edges(
    model: Model,
    x: Tensor,
    edges: float | None,
    nodes: float | None,
    *,
    fixed: bool = True,
    inputs: Tensor | None = None,
) -> tuple[Model, tuple[str, ...], tuple[str, ...]]:
    """Return a model without nodes and edges of a score up to a limit, and names of removed nodes and edges.

    Hidden nodes are removed first, then, by recomputed scores, edges, together with hidden nodes left without incoming or outgoing
    edges. Inputs and outputs stay, also the affine layers of `kapsi.standardized`.

    Args:
        model: a model of univariate functions, see `edge_functions`; not changed.
        x: inputs, at least two rows.
        edges, nodes: largest score in `attribution` of removed edges and nodes; None: none are removed for their score.
        fixed: whether removed edges have no parameters.
        inputs: indices of inputs all of whose edges are removed.

    Raises:
        SpecError: no edge would be left, or an unsupported model.
    """
    was_training, prefix = model.training, 1 if model.standardized else 0
    model = copied(model).eval()
    first, layers = layers_of(model)[:prefix], layers_of(model)[prefix:]
    for number, layer in enumerate(layers, prefix):
        for i, head in enumerate(layer.check_heads("prune")):
            _check(head, f"prune: layers.{number}.heads.{i}")
    for layer in first:
        x = layer(x)
    values = _edges(layers, x, prefix)
    scores = shares_of(values)
    alive = [torch.ones_like(score, dtype=torch.bool) for score in scores.nodes]
    if nodes is not None:
        alive[1:-1] = [score > nodes for score in scores.nodes[1:-1]]
    keep = [after.unsqueeze(-1) & before for before, after in pairwise(alive)]
    if inputs is not None:
        keep[0][:, inputs] = False
    smaller, indices, keep = _removed(layers, values, keep, fixed=fixed and edges is None)
    if edges is not None:
        values = _edges(smaller, x, prefix)
        keep = [old & (score > edges) for old, score in zip(keep, shares_of(values).edges, strict=True)]
        smaller, chosen, keep = _removed(smaller, values, keep, fixed=fixed)
        indices = [old[new] for old, new in zip(indices, chosen, strict=True)]
    if first:
        model.layers = torch.nn.ModuleList([*first, *smaller])
    else:
        model.layers = torch.nn.ModuleList(smaller)
    widths = (*(layer.in_features for layer in first), *(len(nodes) for nodes in indices))
    model.spec = ModelSpec(widths, tuple(layer.spec for layer in [*first, *smaller]))
    return model.train(was_training), *_names(layers, indices, keep, prefix)


def _names(
    layers: list[Layer], indices: list[Tensor], keep: list[Tensor], prefix: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names of removed hidden nodes, and of removed edges between other nodes."""
    nodes, edges = [], []
    for number, (layer, left, (before, after)) in enumerate(zip(layers, keep, pairwise(indices), strict=True), prefix):
        gone = sorted({*range(layer.out_features)} - {*after.tolist()})
        nodes += [f"layers.{number}: node {node}" for node in gone]
        pairs = (~left).nonzero().tolist()
        edges += [f"layers.{number}: {int(before[i])} → {int(after[o])}" for o, i in pairs]
    return tuple(nodes), tuple(edges)


def _edges(layers: list[Layer], x: Tensor, prefix: int) -> list[Edges]:
    """Return the edge functions of layers before processing of the outputs."""
    found = []
    for number, layer in enumerate(layers, prefix):
        found.append(edges_of(layer, x, f"prune: layers.{number}", scaled=False))
        x = found[-1].outputs()
    return found


def _check(head: Head, where: str) -> None:
    """Raise a `SpecError` if the edges of a head cannot be removed one by one."""
    size = head.out_features * math.prod(head.factors)
    if size > MAX_MATRIX:
        raise SpecError(
            f"{where}: ψ(w) has {size:,} entries, at most {MAX_MATRIX:,} are pruned by edges; prune heads or inputs"
        )
    column_inputs(head, where)


def _removed(
    layers: list[Layer], values: list[Edges], keep: list[Tensor], *, fixed: bool
) -> tuple[list[Layer], list[Tensor], list[Tensor]]:
    """Return layers without some edges, the indices of the nodes left, and the mask of the kept edges among their edges.

    Args:
        layers: the layers.
        values: their edge functions on data.
        keep: mask of the kept edges of each layer, `(n, m)`.
        fixed: whether removed edges have no parameters.
    """
    keep, constants = _constants(layers, values, keep)
    # After `_constants` an unreached node has no outgoing edge, and a node without outgoing edge no incoming edge.
    alive = [torch.ones_like(keep[0][0])]
    for layer, after in zip(layers[1:], keep[1:], strict=True):
        alive.append(after.any(0) if _restrictable(layer) else torch.ones_like(after[0]))
    alive += [torch.ones_like(keep[-1][:, 0])]
    indices = [mask.nonzero().squeeze(1) for mask in alive]
    kept = [mask[after][:, before] for mask, (before, after) in zip(keep, pairwise(indices), strict=True)]
    smaller = []
    for layer, edges, (before, after), mask, constant in zip(
        layers, values, pairwise(indices), kept, constants, strict=True
    ):
        whole = len(before) == layer.in_features and len(after) == layer.out_features and bool(mask.all())
        part = layer if whole else _smaller_layer(layer, edges.inputs, before, after, mask, constant[after], fixed)
        smaller.append(part)
    return smaller, indices, kept


def _restrictable(layer: Layer) -> bool:
    """Return whether κ of all heads is the same function of fewer inputs."""
    return all(head.spec.expansion.element_wise() for head in layer.check_heads("prune"))


def _constants(layers: list[Layer], values: list[Edges], keep: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the masks without edges from or to dead nodes, and the biases with the means of the removed edges."""
    keep = [mask.clone() for mask in keep]
    for number in reversed(range(1, len(keep))):  # a node without outgoing edges needs no incoming edges
        keep[number - 1] &= keep[number].any(0).unsqueeze(-1)
    constants: list[Tensor] = []
    for number, (layer, edges) in enumerate(zip(layers, values, strict=True)):
        means = edges.values.mean(0)
        if constants:
            # Nodes without incoming edges are constant.
            reached = keep[number - 1].any(1)
            at_constant = layers[number - 1].output(constants[-1].unsqueeze(0))
            means = torch.where(reached, means, edges_of(layer, at_constant, "prune", scaled=False).values[0])
            keep[number] &= reached
        constants.append(edges.constant + torch.where(keep[number], 0, means).sum(1))
        if not bool(keep[number].any()):
            raise SpecError(
                f"prune: no edge of layers.{number} would be left; use lower thresholds, or a constant instead of the model"
            )
    return keep, constants


def _smaller_layer(
    layer: Layer, x: Tensor, before: Tensor, after: Tensor, keep: Tensor, constant: Tensor, fixed: bool
) -> Layer:
    """Return a layer with fewer nodes and edges.

    Args:
        layer: the layer.
        x: its inputs on data.
        before, after: indices of its inputs and outputs that stay.
        keep: mask of the edges that stay, among those of `before` and `after`.
        constant: the bias of each output that stays.
        fixed: whether removed edges have no parameters.
    """
    masked = fixed and not bool(keep.all())
    heads = layer.check_heads("prune")
    share = 1 / len(heads) if isinstance(layer.spec.fusion, Mean) else 1.0
    parts: list[_SmallerHead] = []
    for head in heads:
        parts += _parts(head, before, after, keep, share, masked=masked)
    if bool(constant.any()) or any(head.bias is not None for head in heads):
        parts[0] = parts[0]._replace(spec=dataclasses.replace(parts[0].spec, bias=True))
    spec = LayerSpec(tuple(part.spec for part in parts), output=layer.spec.output)
    smaller = Layer(len(before), len(after), spec, seed=0, device=x.device, dtype=x.dtype)
    for part, head in zip(parts, smaller.check_heads("prune"), strict=True):
        if part.source is not None:
            _restrict(part.source, head, x[:8], before, part.columns)
        head.assign("reconciliation", **part.weights)
        if part.remainder is not None:
            head.assign("remainder", matrix=part.remainder)
    bias = smaller.check_heads("prune")[0].bias
    if bias is not None:
        bias.copy_(constant)
    for old, new in zip(layer.output, smaller.output, strict=True):
        for name, tensor in new.state_dict().items():
            tensor.copy_(old.state_dict()[name][after])
    return smaller


class _SmallerHead(NamedTuple):
    """A head of a smaller layer.

    Attributes:
        spec: its specification.
        source: the head with the tensors of κ; None for a head without.
        columns: mask of the columns of κ that stay.
        weights, remainder: tensors of ψ, and the matrix of π.
    """

    spec: HeadSpec
    source: Head | None
    columns: Tensor
    weights: dict[str, Any]
    remainder: Tensor | None = None


def _parts(
    head: Head, before: Tensor, after: Tensor, keep: Tensor, share: float, *, masked: bool
) -> list[_SmallerHead]:
    """Return a head without some nodes and edges; a masked one with its linear remainder as a second head."""
    old, inputs = head.spec, column_inputs(head, "prune")
    columns = torch.isin(inputs, before.cpu())
    position = torch.zeros(head.in_features, dtype=torch.long)
    position[before.cpu()] = torch.arange(len(before))
    own = keep[:, position[inputs[columns]].to(keep.device)]
    weights = head.weights().dense().sum(0)[after][:, columns.to(after.device)] * share
    entries = torch.ones_like(own)
    if isinstance(old.reconciliation, Masked):
        entries = (
            head.psi["mask"].reshape(-1, head.out_features, len(inputs)).any(0)[after][:, columns.to(after.device)]
        )
    part = HeadSpec(old.expansion, before=old.before)
    matrix, step = linear_part(head), None
    if matrix is not None:
        matrix = torch.where(keep, matrix[after][:, before], 0) * share
        step = old.remainder.before if isinstance(old.remainder, LinearRemainder) else old.remainder.activation  # type: ignore[attr-defined]
        if not masked:
            part = dataclasses.replace(part, remainder=LinearRemainder(before=step))
    entries = entries & own if masked else entries
    spec, tensors = _weighted(part, torch.where(own, weights, 0), entries)
    parts = [_SmallerHead(spec, head, columns, tensors, None if masked else matrix)]
    if masked and matrix is not None:
        spec, tensors = _weighted(HeadSpec(Identity(), before=() if step is None else (step,)), matrix, keep)
        parts.append(_SmallerHead(spec, None, columns, tensors))
    return parts


def _weighted(spec: HeadSpec, matrix: Tensor, entries: Tensor) -> tuple[HeadSpec, dict[str, Any]]:
    """Return a specification with dense or masked ψ, and the tensors of ψ."""
    if bool(entries.all()):
        return dataclasses.replace(spec, reconciliation=Dense()), {"matrix": matrix}
    masked = Masked(int(entries.sum()) / entries.numel())
    return dataclasses.replace(spec, reconciliation=masked), {"mask": entries, "entries": matrix[entries]}


def _restrict(source: Head, target: Head, x: Tensor, before: Tensor, columns: Tensor) -> None:
    """Copy the tensors of κ of fewer inputs: every axis that is shorter has the inputs last, function by function."""
    owner = source._owner[0] if source._owner else source
    old = owner.kappa.state_dict()
    for name, tensor in target.kappa.state_dict().items():
        value = old[name]
        for axis, (size, wanted) in enumerate(zip(value.shape, tensor.shape, strict=True)):
            if size != wanted:
                value = value.unflatten(axis, (-1, source.in_features)).index_select(axis + 1, before)
                value = value.flatten(axis, axis + 1)
        tensor.copy_(value)
    same = source.expand(x).dense()[:, columns.to(x.device)], target.expand(x[:, before]).dense()
    if same[0].shape != same[1].shape or not torch.allclose(*same, rtol=1e-5, atol=1e-8, equal_nan=True):
        raise SpecError(
            f"prune: {type(source.spec.expansion).__name__} is another function of fewer inputs; prune edges, not nodes"
        )
