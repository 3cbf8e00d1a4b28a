"""Edges of a Kolmogorov–Arnold network: values and attribution."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError
from kapsi.fusion import Mean, Sum
from kapsi.modules import Head, Layer, Model
from kapsi.process import Activation, Affine
from kapsi.remainder import ConstantRemainder, IdentityRemainder, LinearRemainder, ZeroRemainder
from kapsi.spec import STANDARDIZING

MAX_VALUES = 2**27
"""Largest number of edge values of a layer: 1 GiB in float64."""


class Edges(NamedTuple):
    """Edge functions of a layer at some rows: y_o = Σ_i φ_oi(x_i) + b_o.

    Attributes:
        inputs: x, inputs of the layer, `(rows, m)`.
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
    """Shares of nodes and edges in the variation of the outputs.

    Attributes:
        nodes: shares of the inputs and of the nodes of each layer, `(n,)` each.
        edges: shares of the edges of each layer, `(n, m)` each.
    """

    nodes: tuple[Tensor, ...]
    edges: tuple[Tensor, ...]


@torch.no_grad()
def edge_functions(model: Model, x: Tensor) -> list[Edges]:
    """Return the values of all edge functions, layer by layer, in evaluation mode.

    Args:
        model: a model with layers of sums of univariate functions: element-wise κ (splines, polynomials, …) without processing
            after κ and with only activations before, any ψ, π zero, constant, the identity or linear without activation after;
            heads fused by sum or mean, layers without output processing, but for affine layers of
            `kapsi.standardized`: a first one has the edges (x_i − μ_i)/σ_i, a last one scales the edges before.
        x: inputs, `(rows, m)`.

    Raises:
        SpecError: an unsupported head or layer; more than 2²⁷ values of a layer.
        DataError: inputs of another shape or type; values that are not finite.

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
        layers = []
        for number, layer in enumerate(layers_of(model)):
            edges = edges_of(layer, x, f"edge_functions: layers.{number}")
            if not bool(edges.values.isfinite().all() & edges.constant.isfinite().all()):
                raise DataError(f"edge_functions: layers.{number}: the values are not finite; the model has diverged")
            layers.append(edges)
            x = edges.outputs()
        return layers
    finally:
        model.train(was_training)


def checked_rows(model: Any, x: Any, where: str, least: int = 1) -> Tensor:
    """Return at least `least` input rows in the type and on the device of a model."""
    if not isinstance(model, Model):
        raise SpecError(f"{where}: expected a kapsi Model, got {type(model).__name__}")
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided:
        raise DataError(f"{where}: expected inputs as a dense floating-point tensor, got {type(x).__name__}")
    if x.dim() != 2 or x.shape[1] != model.in_features or len(x) < least:
        size = "" if least == 1 else f" with at least {least} rows"
        raise DataError(f"{where}: expected inputs of shape (rows, {model.in_features}){size}, got {tuple(x.shape)}")
    if not bool(x.isfinite().all()):
        raise DataError(f"{where}: the inputs must be finite")
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise SpecError(f"{where}: the model is on the meta device and has no values")
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), x)
    return x.to(like.device, like.dtype)


def layers_of(model: Model) -> list[Layer]:
    """Return the layers of a model, checked with the heads."""
    return model.check_layers("kan")


def heads_of(layer: Layer) -> list[Head]:
    """Return the heads of a layer."""
    return cast(list[Head], list(layer.heads))


def edges_of(layer: Layer, x: Tensor, where: str) -> Edges:
    """Return the edge functions of a layer at its inputs."""
    output, fusion = layer.spec.output, layer.spec.fusion
    other = next((step for step in output if not isinstance(step, Affine)), None)
    if other is not None or not isinstance(fusion, Sum | Mean):
        reason = f"{fusion} fuses its heads" if other is None else f"{other} processes its outputs"
        raise SpecError(f"{where}: not a sum of univariate functions: {reason}")
    n, m = layer.out_features, layer.in_features
    if len(x) * n * m > MAX_VALUES:
        raise SpecError(
            f"{where}: {len(x):,} rows × {n} × {m} edge values are more than {MAX_VALUES:,}; use fewer rows"
        )
    if layer.spec == STANDARDIZING:  # without a difference of large numbers
        return Edges(x, torch.diag_embed(layer(x)), x.new_zeros(n))
    values, constant = x.new_zeros(len(x), n, m), x.new_zeros(n)
    for number, head in enumerate(heads_of(layer)):
        _check_univariate(head, f"{where}.heads.{number}")
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
    for step in layer.output:
        values = values * step.get_buffer("scale").unsqueeze(1)
        constant = step(constant)
    return Edges(x, values, constant)


def _check_univariate(head: Head, where: str) -> None:
    """Raise a `SpecError` unless a head is a sum of univariate functions."""
    spec, remainder = head.spec, head.spec.remainder
    problem = None
    if not spec.expansion.element_wise():
        problem = f"{type(spec.expansion).__name__} mixes inputs; use an element-wise expansion"
    elif spec.after:
        problem = f"{type(spec.after[0]).__name__} after κ mixes inputs; process before κ"
    elif not all(isinstance(step, Activation) for step in spec.before):
        problem = (
            f"only activations are possible before κ, got {', '.join(type(step).__name__ for step in spec.before)}"
        )
    elif not isinstance(remainder, ZeroRemainder | ConstantRemainder | IdentityRemainder | LinearRemainder):
        problem = f"{type(remainder).__name__} is not zero, constant, the identity or linear; use a separate head"
    elif isinstance(remainder, LinearRemainder) and remainder.after is not None:
        problem = "the remainder has an activation after the matrix; move the activation before the matrix"
    if problem:
        raise SpecError(f"{where}: not a sum of univariate functions: {problem}")


# ------------------------------------------------------------------------------------------------ attribution


@torch.no_grad()
def attribution(model: Model, x: Tensor) -> Attribution:
    """Return the shares of nodes and edges in the variation of the outputs.

    Each of n outputs has the score 1/n. An edge has the score of its end node times the ratio of two standard deviations, of the
    edge's values and of the node's; a node has the sum of the scores of its outgoing edges. Scores of the edges into a node add up
    to more than the node's score if edges cancel each other.

    Args:
        model: see `edge_functions`.
        x: inputs, at least two rows.

    Source: the attribution of pykan 0.2 (arXiv 2408.10205), without its 10⁻⁴ in the denominator.
    """
    return shares_of(edge_functions(model, checked_rows(model, x, "attribution", least=2)))


def shares_of(layers: list[Edges]) -> Attribution:
    """Return the attribution of edge functions."""
    count = layers[-1].values.shape[1]
    nodes = [layers[-1].constant.new_full((count,), 1 / count)]
    edges: list[Tensor] = []
    for layer in reversed(layers):
        edge, node = layer.values.std(0), layer.outputs().std(0).unsqueeze(-1)
        # Variation by rounding counts as zero.
        rounding = torch.finfo(edge.dtype).eps * layer.values.abs().amax(0)
        edge = torch.where(edge > 16 * rounding, edge, 0)
        share = torch.where(node > 16 * rounding.amax(1, keepdim=True), edge / node, 0)
        edges.append(share * nodes[-1].unsqueeze(-1))
        nodes.append(edges[-1].sum(0))
    return Attribution(tuple(reversed(nodes)), tuple(reversed(edges)))
