"""Layers of a network as an expansion, so that a whole network is one head of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError
from kapsi.expansion import Expansion
from kapsi.features import DenseFeatures, Features, check_formed
from kapsi.function import Function, Params, Spec, Submodule, Tensors, option
from kapsi.modules import MAX_TRAINED, Head, Model
from kapsi.process import Process
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

__all__ = ["Layers", "one_layer"]

MAX_DEPTH = 8
"""Levels of `Layers` within `Layers`: each takes about a hundred calls to build."""


@dataclass(frozen=True)
class Layers(Expansion, name="layers"):
    """Layers of a network: κ(x) = f_k(… f₂(f₁(x))), with trained weights in κ, D = the last of `widths`.

    A network of several layers is then one head, y = ⟨κ(x), ψ(w)⟩ + b, and can be summed with other heads. The tensors are a
    `Model` named `model`.

    Args:
        widths: number of outputs of each layer, at least one.
        layers: the layers f₁, f₂, …; one for each width, or a single layer for all.

    Raises:
        SpecError: too few layers, or levels of `Layers` in `Layers` beyond 8.

    Source: none needed, the composition of layers; a multilayer perceptron in the example.

    Example:
        >>> import torch, kapsi as kp
        >>> hidden = kp.LayerSpec(kp.HeadSpec(bias=True), output="silu")
        >>> spec = kp.rpn([4, 1], kp.Layers((16, 8), (hidden,)), bias=True)
        >>> kp.Model(spec, seed=0)(torch.ones(5, 4)).shape
        torch.Size([5, 1])
    """

    examples = (
        {"widths": (5,), "layers": ({"heads": {"bias": True}, "output": "tanh"},)},
        {
            "widths": (4, 3),
            "layers": (
                {"heads": ({"expansion": "b_spline", "remainder": "linear"}, {"bias": True}), "output": "sigmoid"},
                {"heads": {"expansion": "taylor", "reconciliation": "low_rank"}},
            ),
        },
        {
            "widths": (3,),
            "layers": ({"heads": {"expansion": {"kind": "layers", "widths": (4,)}, "bias": True}, "output": "silu"},),
        },
    )

    widths: tuple[int, ...] = option((16,), minimum=1)
    layers: tuple[LayerSpec, ...] = (LayerSpec((HeadSpec(bias=True),), output=("silu",)),)  # type: ignore[arg-type]

    def check(self) -> None:
        if not self.widths:
            raise SpecError("Layers(widths=()): at least one width is needed")
        ModelSpec((None, *self.widths), self.layers)
        if self.depth > MAX_DEPTH:
            raise SpecError(f"Layers: {self.depth} levels of Layers in Layers, at most {MAX_DEPTH} are allowed")

    @cached_property
    def depth(self) -> int:
        """Levels of `Layers`, this one included."""
        return 1 + _depth(self.layers)

    def inner_processes(self) -> tuple[Process, ...]:
        heads = (step for layer in self.layers for head in layer.heads for step in head.steps())
        return (*heads, *(step for layer in self.layers for step in layer.output))

    def factors(self, in_features: int) -> tuple[int, int]:
        check_formed(self.widths[-1], "Layers")
        return 1, self.widths[-1]

    def heavy_tailed(self) -> bool:
        return any(head.expansion.heavy_tailed() for layer in self.layers for head in layer.heads)

    def params(self, in_features: int) -> Params:
        return {"model": _Network(ModelSpec((in_features, *self.widths), self.layers))}

    def validate(self, tensors: Tensors) -> None:
        for _, head in cast(Model, tensors["model"]).heads():
            head.validate()

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return new values of the tensors of all layers, each calibrated on the outputs of the layers before."""
        model = Model(params["model"].spec, device="meta", dtype=x.dtype).to_empty(device=x.device)
        model.load_state_dict(params["model"].state_dict())
        return {"model": calibrate(model, x, y).state_dict()}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        return DenseFeatures(params["model"](x))


def _depth(value: Any) -> int:
    """Return the levels of `Layers` in a function, a specification, or a tuple of them."""
    if isinstance(value, Layers):
        return value.depth
    parts: Iterator[Any] = iter(value if isinstance(value, tuple) else ())
    if isinstance(value, Function | Spec):
        parts = (getattr(value, field.name) for field in dataclasses.fields(cast(Any, value)))
    return max(map(_depth, parts), default=0)


@dataclass(frozen=True)
class _Network(Submodule):
    """A model among the tensors of an expansion.

    Args:
        spec: specification of the model, with all widths.
    """

    spec: ModelSpec

    def build(self, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        blank = Model(self.spec, device="meta", dtype=dtype)
        count = sum(tensor.numel() for tensor in (*blank.parameters(), *blank.buffers()))
        if count > MAX_TRAINED:
            raise SpecError(f"Layers has {count:,} values in its layers, at most {MAX_TRAINED:,} are allowed")
        # Without initial values: the head draws them with its own seed.
        return blank.to_empty(device=device or torch.get_default_device())

    def reset(self, module: nn.Module, generator: Generator | None) -> None:
        cast(Model, module).reset_parameters(generator)


@torch.no_grad()
def one_layer(model: Model) -> Model:
    """Return a network of several layers as a model of one layer with one head, which computes the same function.

    κ(x) is the whole network, and ψ is the identity matrix; with a single layer the model itself is returned.

    Args:
        model: a model, whose type and device are kept; tensors are copied.

    Example:
        >>> import torch, kapsi as kp
        >>> network = kp.Model(kp.rpn([2, 5, 5, 3], kp.BSpline()), seed=0)
        >>> x = torch.rand(4, 2)
        >>> torch.equal(one_layer(network)(x), network(x)), len(one_layer(network).layers)
        (True, 1)
    """
    layers = model.check_layers("one_layer")
    if len(layers) == 1:
        return model
    n = model.out_features
    kappa = Layers(cast("tuple[int, ...]", model.spec.widths[1:]), model.spec.layers)
    tensor = next(iter((*model.parameters(), *model.buffers())))
    spec = ModelSpec((model.in_features, n), (LayerSpec((HeadSpec(kappa),)),))
    result = Model(spec, device="meta", dtype=tensor.dtype).to_empty(device=tensor.device)
    head = cast(Head, result.check_layers("one_layer")[0].heads[0])
    head.kappa["model"].load_state_dict(model.state_dict())
    head.psi["matrix"].copy_(torch.eye(n, dtype=tensor.dtype))
    return result.train(model.training)
