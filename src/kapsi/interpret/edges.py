"""Edges of models of univariate functions: values, and attribution of the outputs.

An edge is the block of weights from input i to output o through the columns of κ that depend on input i:
y_o = Σ_i φ_oi(x_i) + b_o with φ_oi(x) = Σ_g c_oig κ_g(x).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError
from kapsi.expansion import Expansion, Extended, Processed, SelectedInputs
from kapsi.fusion import Mean, Sum
from kapsi.modules import Head, Layer, Model, checked_rows
from kapsi.process import Activation, Affine, Clamp, Process
from kapsi.remainder import ConstantRemainder, IdentityRemainder, LinearRemainder, ZeroRemainder
from kapsi.spec import STANDARDIZING

__all__ = ["Attribution", "Edges", "attribution", "edge_functions"]

MAX_VALUES = 2**27
"""Largest number of edge values of a layer: 1 GiB in float64."""


class Edges(NamedTuple):
    """Edge functions of a layer at some rows: y_o = σ(Σ_i φ_oi(x_i) + b_o), mostly without σ.

    Attributes:
        inputs: x, inputs of the layer, `(rows, m)`.
        values: φ_oi(x_i), `(rows, n, m)`.
        constant: b, `(n,)`.
        output: σ, processing of single outputs such as an activation; None for none.
    """

    inputs: Tensor
    values: Tensor
    constant: Tensor
    output: Any = None

    def sums(self) -> Tensor:
        """Return the outputs before σ, `(rows, n)`."""
        return self.values.sum(-1) + self.constant

    def outputs(self) -> Tensor:
        """Return y, `(rows, n)`."""
        return self.sums() if self.output is None else self.output(self.sums())


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
        model: a model with layers of sums of univariate functions: κ with columns that depend on one input each (splines,
            polynomials, waves, wavelets, radial functions of each input, …, also of selected inputs) without processing after
            κ and with only activations before, any ψ, π zero, constant, the identity or linear without activation after; heads
            fused by sum or mean; outputs processed by activations and limits. The affine layers of `kapsi.standardized` count:
            a first one has the edges (x_i − μ_i)/σ_i, a last one scales the edges before.
        x: inputs, `(rows, m)`.

    Raises:
        SpecError: an unsupported head or layer; more than 2²⁷ values of a layer.
        DataError: inputs of another shape or type; values that are not finite.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 3, 1], expansion=kp.Chebyshev(4), bias=True), seed=0, dtype=torch.float64)
        >>> x = torch.rand(7, 2, dtype=torch.float64)
        >>> edges = kp.interpret.edge_functions(model, x)
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


def layers_of(model: Model) -> list[Layer]:
    """Return the layers of a model, checked with the heads."""
    return model.check_layers("edges")


def edges_of(layer: Layer, x: Tensor, where: str, *, scaled: bool = True) -> Edges:
    """Return the edge functions of a layer at its inputs.

    Args:
        layer: the layer.
        x: its inputs.
        where: prefix of error messages.
        scaled: apply affine processing of the outputs to the edges; False: leave it to `Edges.output`.
    """
    output, fusion = layer.spec.output, layer.spec.fusion
    other = next((step for step in output if not _single(step)), None)
    if other is not None or not isinstance(fusion, Sum | Mean):
        reason = f"{fusion} fuses its heads" if other is None else f"{other} processes its outputs"
        raise SpecError(f"{where}: not a sum of univariate functions: {reason}")
    n, m = layer.out_features, layer.in_features
    if len(x) * n * m > MAX_VALUES:
        raise SpecError(
            f"{where}: {len(x):,} rows × {n} × {m} edge values are more than {MAX_VALUES:,}; use fewer rows"
        )
    if layer.spec == STANDARDIZING and scaled:  # without a difference of large numbers
        return Edges(x, torch.diag_embed(layer(x)), x.new_zeros(n))
    values, constant = x.new_zeros(len(x), n, m), x.new_zeros(n)
    for number, head in enumerate(layer.check_heads(where)):
        inputs = column_inputs(head, f"{where}.heads.{number}")
        weights = head.weights().dense().sum(0) if head.spec.channels > 1 else head.weights().dense().reshape(n, -1)
        columns = head.expand(x).dense()
        if torch.equal(inputs, torch.arange(len(inputs)) % m):
            values += torch.einsum("rgi,ngi->rni", columns.unflatten(-1, (-1, m)), weights.unflatten(-1, (-1, m)))
        else:
            for i in inputs.unique().tolist():
                own = (inputs == i).to(x.device)
                values[..., i] += columns[:, own] @ weights[:, own].mT
        remainder = head.spec.remainder
        matrix = linear_part(head)
        if matrix is not None:
            step = remainder.before if isinstance(remainder, LinearRemainder) else remainder.activation  # type: ignore[attr-defined]
            values += (x if step is None else step(x)).unsqueeze(1) * matrix
        constant = constant + constant_part(head)
    if isinstance(layer.spec.fusion, Mean):
        values, constant = values / len(layer.heads), constant / len(layer.heads)
    steps = list(layer.output)
    while scaled and steps and isinstance(output[-len(steps)], Affine):
        step = steps.pop(0)
        values = values * step.get_buffer("scale").unsqueeze(1)
        constant = step(constant)
    return Edges(x, values, constant, torch.nn.Sequential(*steps) if steps else None)


def linear_part(head: Head) -> Tensor | None:
    """Return W of a remainder W σ(x), `(n, m)`; None without."""
    if isinstance(head.spec.remainder, LinearRemainder):
        matrix: Tensor = head.pi["matrix"]
        return matrix
    if isinstance(head.spec.remainder, IdentityRemainder):
        like = next((t for t in (*head.parameters(), *head.buffers()) if t.is_floating_point()), torch.empty(0))
        return torch.eye(head.out_features, dtype=like.dtype, device=like.device)
    return None


def constant_part(head: Head) -> Tensor | float:
    """Return the sum of the biases of a head and of its remainder, `(n,)`."""
    remainder, total = head.spec.remainder, 0.0 if head.bias is None else head.bias
    if isinstance(remainder, LinearRemainder) and remainder.bias:
        return total + head.pi["bias"]
    return total + head.pi["value"] if isinstance(remainder, ConstantRemainder) else total


def column_inputs(head: Head, where: str) -> Tensor:
    """Return the input of each column of κ, `(D,)`.

    Raises:
        SpecError: the head is no sum of univariate functions.
    """
    spec, remainder = head.spec, head.spec.remainder
    inputs = _inputs(spec.expansion, torch.arange(head.in_features), head.store("expansion"))
    problem = None
    if inputs is None:
        problem = f"{type(spec.expansion).__name__} mixes inputs; use an element-wise expansion"
    elif spec.after:
        problem = f"{type(spec.after[0]).__name__} after κ mixes inputs; process before κ"
    elif not all(isinstance(step, Activation) for step in spec.before):
        problem = (
            f"only activations are possible before κ, got {', '.join(type(step).__name__ for step in spec.before)}"
        )
    elif not isinstance(spec.fusion, Sum):
        problem = f"{spec.fusion} fuses its channels"
    elif not isinstance(remainder, ZeroRemainder | ConstantRemainder | IdentityRemainder | LinearRemainder):
        problem = f"{type(remainder).__name__} is not zero, constant, the identity or linear; use a separate head"
    elif isinstance(remainder, LinearRemainder) and remainder.after is not None:
        problem = "the remainder has an activation after the matrix; move the activation before the matrix"
    if problem or inputs is None:
        raise SpecError(f"{where}: not a sum of univariate functions: {problem}")
    return inputs


def _inputs(expansion: Expansion, inputs: Tensor, tensors: Any) -> Tensor | None:
    """Return the input of each column of an expansion of some inputs; None if it mixes inputs."""
    if isinstance(expansion, SelectedInputs):
        return _inputs(expansion.expansion, inputs[tensors["selection"].cpu()], tensors["expansion"])
    if isinstance(expansion, Extended):
        parts = [_inputs(part, inputs, tensors[str(i)]) for i, part in enumerate(expansion.processed_parts)]
        return None if any(part is None for part in parts) else torch.cat([p for p in parts if p is not None])
    if isinstance(expansion, Processed):
        steps = (*expansion.before, *expansion.after)
        single = all(isinstance(step, Activation) for step in steps)
        return _inputs(expansion.expansion, inputs, tensors["expansion"]) if single else None
    if len(inputs) == 1:
        return inputs.repeat(expansion.out_features(1))
    return inputs.repeat(expansion.out_features(len(inputs)) // len(inputs)) if expansion.element_wise() else None


def _single(step: Process) -> bool:
    """Return whether a process acts on each output by itself."""
    return isinstance(step, Activation | Affine | Clamp)


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
        edge, node = layer.values.std(0), layer.sums().std(0).unsqueeze(-1)
        # Variation by rounding counts as zero.
        rounding = torch.finfo(edge.dtype).eps * layer.values.abs().amax(0)
        edge = torch.where(edge > 16 * rounding, edge, 0)
        share = torch.where(node > 16 * rounding.amax(1, keepdim=True), edge / node, 0)
        edges.append(share * nodes[-1].unsqueeze(-1))
        nodes.append(edges[-1].sum(0))
    return Attribution(tuple(reversed(nodes)), tuple(reversed(edges)))
