"""One-layer models of the first inputs as models of more inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from kapsi.errors import SpecError
from kapsi.expansion import Processed, SelectedInputs
from kapsi.modules import Model
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec, ModelSpec

__all__ = ["widened"]


@torch.no_grad()
def widened(model: Model, inputs: int) -> Model:
    """Return f(x₁, …, x_k) as a function of x₁, …, x_m in one layer; inputs may be sparse then.

    Args:
        model: a model of one layer and k inputs, in float64, whose heads have no remainder.
        inputs: m, at least k.

    Raises:
        SpecError: another model.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 1], kp.Taylor(2), bias=True), seed=0, dtype=torch.float64)
        >>> x = torch.rand(4, 5, dtype=torch.float64)
        >>> torch.allclose(widened(model, 5)(x), model(x[:, :2]))
        True
    """
    layers = model.check_layers("widened")
    count, outputs = model.in_features, model.out_features
    if len(layers) != 1 or any(not isinstance(head.remainder, ZeroRemainder) for head in layers[0].spec.heads):
        raise SpecError(f"widened: expected one layer without remainders, got {model.spec}")
    layer = replace(layers[0].spec, heads=tuple(_of_first(head, count) for head in layers[0].spec.heads))
    result = Model(ModelSpec((inputs, outputs), (layer,)), device="meta", dtype=torch.float64).to_empty(device="cpu")
    state = result.state_dict()
    given = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".", 4)
        if parts[2] == "heads":
            wraps = bool(layers[0].spec.heads[int(parts[3])].before or layers[0].spec.heads[int(parts[3])].after)
            parts[4] = _inside(parts[4], wraps)
        given[".".join(parts)] = tensor
    for name, tensor in state.items():
        if name in given:
            tensor.copy_(given[name])
        elif name.endswith("kappa.inputs"):
            tensor.fill_(inputs)
        else:
            tensor.copy_(torch.arange(count))
    return result.eval()


def _of_first(head: HeadSpec, count: int) -> HeadSpec:
    """Return the specification of a head of the first inputs."""
    kappa = Processed(head.expansion, head.before, head.after) if head.before or head.after else head.expansion
    return replace(head, expansion=SelectedInputs(kappa, count), before=(), after=())


def _inside(name: str, wraps: bool) -> str:
    """Return the name of a tensor of a head of the first inputs."""
    if name.startswith("kappa."):
        return name.replace("kappa.", "kappa.expansion.expansion." if wraps else "kappa.expansion.", 1)
    return f"kappa.expansion.{name}" if name.startswith(("before.", "after.")) else name
