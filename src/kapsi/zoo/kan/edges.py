"""The edges of a Kolmogorov–Arnold network: their values, how much they count, and pruning."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.simple import Identity
from kapsi.expansion.spline import BSpline
from kapsi.function import coerce
from kapsi.fusion import Mean, Sum
from kapsi.modules import Head, Layer, Model
from kapsi.process import Activation
from kapsi.reconciliation.dense import Dense, Masked
from kapsi.remainder import ConstantRemainder, IdentityRemainder, LinearRemainder, ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

__all__ = ["Attribution", "Edges", "attribution", "checked_rows", "edge_functions", "heads_of", "layers_of", "prune"]

LARGEST_VALUES = 2**27
"""Values of edge functions of one layer that are made: 1 GiB in float64."""


class Edges(NamedTuple):
    """The edge functions of a layer at some rows: y_o = Σ_i φ_oi(x_i) + b_o.

    Attributes:
        inputs: x, what the layer has as inputs, `(rows, m)`.
        values: φ_oi(x_i), `(rows, n, m)`.
        constant: b, `(n,)`.
    """

    inputs: Tensor
    values: Tensor
    constant: Tensor

    def outputs(self) -> Tensor:
        """Return y, `(rows, n)`."""
        return self.values.sum(-1) + self.constant


class Attribution(NamedTuple):
    """How much of the variation of the outputs goes through each node and each edge.

    Attributes:
        nodes: for the inputs and each layer, the share of each node, `(n,)`.
        edges: for each layer, the share of each edge, `(n, m)`.
    """

    nodes: tuple[Tensor, ...]
    edges: tuple[Tensor, ...]


@torch.no_grad()
def edge_functions(model: Model, x: Tensor) -> list[Edges]:
    """Return the values of every edge function, layer by layer, in evaluation mode.

    Args:
        model: layers of sums of functions of one input each: κ is element-wise (splines, polynomials, …; nothing after it and
            only activations before it), ψ any, π zero, constant, the identity or linear without activation after it; heads are
            added up, and nothing comes after a layer.
        x: inputs, `(rows, m)`.

    Raises:
        SpecError: a head that is no sum of such functions; inputs that do not fit; values that are not finite; more than 2²⁷
            values of one layer.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.zoo import kan
        >>> model = kp.Model(kp.rpn([2, 3, 1], expansion=kp.Chebyshev(4), bias=True), seed=0, dtype=torch.float64)
        >>> x = torch.rand(7, 2, dtype=torch.float64)
        >>> edges = kan.edge_functions(model, x)
        >>> torch.allclose(edges[-1].outputs(), model(x))
        True
    """
    x = checked_rows(model, x, "edge_functions")
    was_training = model.training
    model.eval()
    try:
        found = []
        for number, layer in enumerate(layers_of(model)):
            edges = _edges_of(layer, x, f"edge_functions: layers.{number}")
            if not bool(edges.values.isfinite().all() & edges.constant.isfinite().all()):
                raise SpecError(f"edge_functions: layers.{number}: its values are not finite; the model has diverged")
            found.append(edges)
            x = edges.outputs()
        return found
    finally:
        model.train(was_training)


def checked_rows(model: Any, x: Any, where: str) -> Tensor:
    """Return rows of inputs in the type and on the device of a model."""
    if not isinstance(model, Model):
        raise SpecError(f"{where}: expected a kapsi Model, got {type(model).__name__}")
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided:
        raise SpecError(f"{where}: expected inputs as a dense floating-point tensor, got {type(x).__name__}")
    if x.dim() != 2 or x.shape[1] != model.in_features or not len(x):
        raise SpecError(f"{where}: expected inputs of shape (rows, {model.in_features}), got {tuple(x.shape)}")
    if not bool(x.isfinite().all()):
        raise SpecError(f"{where}: the inputs must be finite")
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise SpecError(f"{where}: the model is on the meta device and has no values")
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), x)
    return x.to(like.device, like.dtype)


def layers_of(model: Model) -> list[Layer]:
    """Return the layers of a model."""
    return cast(list[Layer], list(model.layers))


def heads_of(layer: Layer) -> list[Head]:
    """Return the heads of a layer."""
    return cast(list[Head], list(layer.heads))


def _edges_of(layer: Layer, x: Tensor, where: str) -> Edges:
    if layer.spec.output or not isinstance(layer.spec.fusion, Sum | Mean):
        what = f"{layer.spec.output[0]} comes after it" if layer.spec.output else f"{layer.spec.fusion} fuses its heads"
        raise SpecError(f"{where}: is no sum of functions of one input each: {what}")
    n, m = layer.out_features, layer.in_features
    if len(x) * n * m > LARGEST_VALUES:
        raise SpecError(
            f"{where}: {len(x):,} rows × {n} × {m} values of edges are more than {LARGEST_VALUES:,}; take fewer rows"
        )
    values, constant = x.new_zeros(len(x), n, m), x.new_zeros(n)
    for number, head in enumerate(heads_of(layer)):
        _need_edges(head, f"{where}.heads.{number}")
        weights = head.weights().dense().sum(0).unflatten(-1, (-1, m))
        columns = head.expand(x).dense().unflatten(-1, (-1, m))
        values += torch.einsum("rgi,ngi->rni", columns, weights)
        remainder = head.spec.remainder
        if isinstance(remainder, LinearRemainder):
            inputs = x if remainder.before is None else remainder.before(x)
            values += inputs.unsqueeze(1) * head.pi["matrix"]
            if remainder.bias:
                constant += head.pi["bias"]
        elif isinstance(remainder, IdentityRemainder):
            values += torch.diag_embed(x if remainder.activation is None else remainder.activation(x))
        elif isinstance(remainder, ConstantRemainder):
            constant += head.pi["value"]
        if head.bias is not None:
            constant += head.bias
    if isinstance(layer.spec.fusion, Mean):
        values, constant = values / len(layer.heads), constant / len(layer.heads)
    return Edges(x, values, constant)


def _need_edges(head: Head, where: str) -> None:
    """Raise a `SpecError` where a head is no sum of functions of one input each."""
    spec, remainder = head.spec, head.spec.remainder
    problem = None
    if not spec.expansion.element_wise():
        problem = f"{type(spec.expansion).__name__} mixes inputs; take an expansion of each input by itself"
    elif spec.after:
        problem = f"{type(spec.after[0]).__name__} after κ mixes them; process before κ"
    elif not all(isinstance(step, Activation) for step in spec.before):
        problem = f"only activations may come before κ, got {', '.join(type(step).__name__ for step in spec.before)}"
    elif not isinstance(remainder, ZeroRemainder | ConstantRemainder | IdentityRemainder | LinearRemainder):
        problem = f"{type(remainder).__name__} is not zero, constant, the identity or linear; make it a head of its own"
    elif isinstance(remainder, LinearRemainder) and remainder.after is not None:
        problem = "its remainder has an activation after the matrix; take one before it"
    if problem:
        raise SpecError(f"{where}: is no sum of functions of one input each: {problem}")


# ------------------------------------------------------------------------------------------------ attribution


@torch.no_grad()
def attribution(model: Model, x: Tensor) -> Attribution:
    """Return how much of the variation of the outputs goes through each node and each edge.

    The score of an output is 1 over their number. That of an edge is the score of the node that it leads to, times the ratio of
    the standard deviations of the edge's values and of the node's; that of a node is the sum over the edges that leave it.
    Scores of edges into one node may add up to more than its own, where edges cancel each other.

    Args:
        model: as in `edge_functions`.
        x: inputs, at least two rows.

    Source: the attribution of pykan 0.2 (arXiv 2408.10205), without its 10⁻⁴ in the denominator.
    """
    return _attribution(edge_functions(model, _several(x, "attribution")))


def _several(x: Tensor, where: str) -> Tensor:
    if isinstance(x, Tensor) and x.dim() == 2 and len(x) < 2:
        raise SpecError(f"{where}: expected at least two rows, as scores are standard deviations; got {len(x)}")
    return x


def _attribution(layers: list[Edges]) -> Attribution:
    count = layers[-1].values.shape[1]
    nodes = [layers[-1].constant.new_full((count,), 1 / count)]
    edges: list[Tensor] = []
    for layer in reversed(layers):
        each, whole = layer.values.std(0), layer.outputs().std(0).unsqueeze(-1)
        # What varies by rounding only does not vary.
        size = torch.finfo(each.dtype).eps * layer.values.abs().amax(0)
        each = torch.where(each > 16 * size, each, 0)
        share = torch.where(whole > 16 * size.amax(1, keepdim=True), each / whole, 0)
        edges.append(share * nodes[-1].unsqueeze(-1))
        nodes.append(edges[-1].sum(0))
    return Attribution(tuple(reversed(nodes)), tuple(reversed(edges)))


# ------------------------------------------------------------------------------------------------ pruning


@torch.no_grad()
def prune(model: Model, x: Tensor, *, edges: float = 0.03, nodes: float = 0.01, fixed: bool = True) -> Model:
    """Return a smaller model without the hidden nodes and the edges that count little.

    First hidden nodes go, then, scored anew, edges, and with them hidden nodes that no edge leads to or from. What goes is
    replaced by its mean on the data, which is added to the bias: the outputs are equal where it was constant, zero for instance.
    Inputs and outputs stay.

    Args:
        model: splines and identity expansions with a dense or masked ψ, as `edge_functions` says beside that; not changed.
        x: inputs, at least two rows.
        edges: edges of this score of `attribution` or less go, at least 0.
        nodes: hidden nodes of this score or less go, at least 0.
        fixed: whether edges that went stay away in training. A layer that has lost some then has masked ψ, and its linear
            remainder becomes a head of its own, κ being the identity after the activation. False: dense ψ with zeros, which
            `kapsi.refine` takes.

    Returns:
        A new model with the type, the device and the mode of the given one; what was frozen is trained again.

    Raises:
        SpecError: nothing would be left; a model that is none of this kind.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.zoo import kan
        >>> model = kp.Model(kan.spec([2, 5, 1]), seed=0, dtype=torch.float64)
        >>> x = torch.rand(50, 2, dtype=torch.float64) * 2 - 1
        >>> with torch.no_grad():
        ...     for tensor in model.layers[1].heads[0].parameters():
        ...         tensor.unflatten(1, (-1, 5))[..., 2:] = 0          # three nodes that nothing comes of
        >>> small = kan.prune(model, x, edges=0, nodes=0)
        >>> small.spec.widths, torch.allclose(small(x), model(x))
        ((2, 2, 1), True)
    """
    x = _several(checked_rows(model, x, "prune"), "prune")
    edges, nodes = _threshold("edges", edges), _threshold("nodes", nodes)
    fixed = coerce(bool, fixed, "prune(fixed)")
    for name, head in model.heads():
        _need_prunable(head, f"prune: {name}")
    found = edge_functions(model, x)
    alive = [score > nodes for score in _attribution(found).nodes]
    alive[0][:], alive[-1][:] = True, True
    keep = [after.unsqueeze(-1) & before for before, after in pairwise(alive)]
    model, keep = _without(model, found, keep, fixed=False)
    found = edge_functions(model, x)
    keep = [old & (score > edges) for old, score in zip(keep, _attribution(found).edges, strict=True)]
    return _without(model, found, keep, fixed=fixed)[0]


def _threshold(name: str, value: Any) -> float:
    number: float = coerce(float, value, f"prune({name})")
    if not number >= 0:
        raise SpecError(f"prune({name}={value!r}): expected a number of at least 0")
    return number


def _need_prunable(head: Head, where: str) -> None:
    spec = head.spec
    if not isinstance(spec.expansion, BSpline | Identity) or not isinstance(spec.reconciliation, Dense | Masked):
        raise SpecError(
            f"{where}: {type(spec.expansion).__name__} with {type(spec.reconciliation).__name__} cannot be pruned; possible are "
            "BSpline and Identity with Dense and Masked"
        )
    if isinstance(spec.remainder, IdentityRemainder):
        raise SpecError(f"{where}: IdentityRemainder has no edges that can go; take a LinearRemainder")


def _without(model: Model, found: list[Edges], keep: list[Tensor], *, fixed: bool) -> tuple[Model, list[Tensor]]:
    """Return a model without some edges, and of those that it has which are kept.

    Args:
        model: the model.
        found: its edge functions on data.
        keep: for each layer which edges are kept, `(n, m)`.
        fixed: whether those that are not kept have no parameters.
    """
    keep = [each.clone() for each in keep]
    for number in reversed(range(1, len(keep))):  # what no edge leaves needs none that leads to it
        keep[number - 1] &= keep[number].any(0).unsqueeze(-1)
    constants = []
    level: Tensor | None = None  # the values of hidden nodes that no edge leads to
    for number, (layer, edges) in enumerate(zip(layers_of(model), found, strict=True)):
        means = edges.values.mean(0)
        if level is not None:
            reached = keep[number - 1].any(1)
            at_level = _edges_of(layer, level.unsqueeze(0), f"prune: layers.{number}").values[0]
            means = torch.where(reached, means, at_level)
            keep[number] &= reached
        level = edges.constant + torch.where(keep[number], 0, means).sum(1)
        constants.append(level)
        if not bool(keep[number].any()):
            raise SpecError(
                f"prune: no edge of layers.{number} would be left; take lower thresholds, or a constant in place of the model"
            )
    # A node that nothing leads to has no edges that leave it by now; those that nothing leaves have been found above.
    alive = [torch.ones_like(keep[0][0])]
    alive += [after.any(0) for after in keep[1:]] + [torch.ones_like(keep[-1][:, 0])]
    places = [each.nonzero().squeeze(1) for each in alive]
    kept = [each[after][:, before] for each, before, after in zip(keep, places, places[1:], strict=False)]
    biases = [constant[after] for constant, after in zip(constants, places[1:], strict=True)]
    layers = layers_of(model)
    made = [
        _layer_without(layer, before, after, each, bias, fixed)
        for layer, before, after, each, bias in zip(layers, places, places[1:], kept, biases, strict=False)
    ]
    widths = tuple(len(each) for each in places)
    smaller = Model(ModelSpec(widths, tuple(spec for spec, _ in made)), seed=0, dtype=found[0].inputs.dtype)
    for layer, (_, tensors) in zip(layers_of(smaller), made, strict=True):
        for head, values in zip(heads_of(layer), tensors, strict=True):
            bias = values.pop("bias", None)
            if bias is not None and head.bias is not None:
                head.bias.copy_(bias["bias"])
            for role, each in values.items():
                head.assign(role, **each)  # type: ignore[arg-type]
    return smaller.to(found[0].inputs.device).train(model.training), kept


def _layer_without(
    layer: Layer, before: Tensor, after: Tensor, keep: Tensor, constant: Tensor, fixed: bool
) -> tuple[LayerSpec, list[dict[str, dict[str, Any]]]]:
    """Return the specification of a layer of some nodes and edges, and the tensors of its heads by role."""
    masked = fixed and not bool(keep.all())
    biased = bool(constant.any()) or any(head.bias is not None for head in heads_of(layer))
    share = 1 / len(layer.heads) if isinstance(layer.spec.fusion, Mean) else 1.0
    specs: list[HeadSpec] = []
    tensors: list[dict[str, dict[str, Any]]] = []

    def add(spec: HeadSpec, kappa: dict[str, Tensor], weights: Tensor, entries: Tensor) -> None:
        """Add a head; weights and which of them have parameters are `(n, q, m)`."""
        matrix = weights.flatten(1) * share
        values: dict[str, Any] = {"matrix": matrix}
        if not bool(entries.all()) and (masked or isinstance(spec.reconciliation, Masked)):
            spec = dataclasses.replace(spec, reconciliation=Masked(int(entries.sum()) / entries.numel()))
            values = {"mask": entries.flatten(1), "values": matrix[entries.flatten(1)]}
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
