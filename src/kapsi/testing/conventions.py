"""Laws of PyTorch's conventions: hooks, replaced methods, wrappers, pruning, norms and parametrizations of every head.

The reference is a layer with a call of each head, as `nn.ModuleList` of `nn.Linear` would.
"""

# The first line of a law's docstring is the law: a statement, not a command.
# ruff: noqa: D401

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import spectral_norm

from kapsi.errors import SpecError
from kapsi.function import Function
from kapsi.modules import Layer, Model
from kapsi.spec import LayerSpec, ModelSpec
from kapsi.testing.cases import (
    assert_close,
    assert_equal,
    gradients_of,
    inputs,
    layer_with,
    perturbed_model,
    require,
    seeded,
)
from kapsi.testing.registry import law


def _model(function: Function) -> Model:
    """Return a model of a single layer with three heads, all with the function if a layer may have several."""
    single = perturbed_model(function)
    spec = layer_with(function) if function.role == "fusion" else single.spec.layers[0]
    heads = spec.heads if len(spec.heads) > 1 else spec.heads * 3
    try:
        model = Model(ModelSpec(single.spec.widths, (LayerSpec(heads, spec.fusion, spec.output),)), seed=0)
    except SpecError:
        model = single
    generator = seeded(2)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def _layer(model: Model) -> Layer:
    return cast(Layer, model.layers[0])


def _by_head(model: Model, points: Sequence[Tensor], factors: Sequence[float]) -> tuple[Tensor, list[Tensor]]:
    """Return the output of a model of a single layer with given inputs and factors of the outputs of heads, and these outputs."""
    layer = _layer(model)
    outputs = [head(x) for head, x in zip(layer.heads, points, strict=True)]
    scaled = [factor * y for factor, y in zip(factors, outputs, strict=True)]
    return layer.output(layer.spec.fusion(torch.stack(scaled), layer.fusion)), outputs


class _Wrapper(nn.Module):
    """A module in the place of a head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.inner = head

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return 2 * y


@law("function")
def hooks(function: Function) -> None:
    """Hooks of a head, or of all modules, see and replace the values of a separate call, forward and backward."""
    model = _model(function)
    count = len(_layer(model).heads)
    x = inputs(4, model.in_features)
    scales = [1.0] * (count - 1) + [0.5]
    points = [(x * scale).requires_grad_() for scale in scales]
    expected, outputs = _by_head(model, points, [2.0] + [1.0] * (count - 1))
    of_inputs = gradients_of(expected, points, retain_graph=True)
    of_output = gradients_of(expected, outputs[:1])[0] if outputs[0].requires_grad else None
    hooked = copy.deepcopy(model)
    heads = list(_layer(hooked).heads)
    seen: list[Any] = []
    heads[-1].register_forward_pre_hook(lambda _, arguments: (arguments[0] * 0.5, *arguments[1:]))
    heads[0].register_forward_hook(lambda _, arguments, output: 2 * output)
    heads[0].register_full_backward_hook(
        lambda _, before, after: seen.append((cast(Any, before)[0], cast(Any, after)[0]))
    )
    leaf = x.clone().requires_grad_()
    y = hooked(leaf)
    assert_close(y, expected, "the output with hooks")
    gradient = gradients_of(y, [leaf])[0]
    total = torch.stack([scale * value for scale, value in zip(scales, of_inputs, strict=True)]).sum(0)
    assert_close(gradient, total, "the gradient of the inputs with hooks")
    if seen and of_output is not None:
        before, after = seen[0]
        assert_close(after, of_output / 2, "the gradient of the output of a hook, in a backward hook")
        before = torch.zeros_like(x) if before is None else before
        assert_close(before, of_inputs[0], "the gradient of the input in a backward hook")
    called: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        y = model(x)
    finally:
        handle.remove()
    require(all(head in called for head in _layer(model).heads), "a hook of all modules misses a head")
    assert_close(y, model(x), "the output with a hook of all modules")


@law("function")
def replaced(function: Function) -> None:
    """A replaced `forward`, and a module in the place of a head, act as in a layer with a call of each head."""
    model = _model(function)
    x = inputs(4, model.in_features)
    count = len(_layer(model).heads)
    points = [x] * count
    expected, _ = _by_head(model, points, [2.0] + [1.0] * (count - 1))
    other = copy.deepcopy(model)
    head = cast(Any, _layer(other).heads[0])
    original = head.forward
    head.forward = lambda *arguments, **options: 2 * original(*arguments, **options)
    assert_close(other(x), expected, "the output with a replaced forward")
    other = copy.deepcopy(model)
    heads = _layer(other).heads
    heads[0] = _Wrapper(heads[0])
    assert_close(other(x), expected, "the output with a module around a head")
    require("layers.0.heads.0.inner" in other.summary(), "the summary misses a head in another module")


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield modules, and the names and values of their own non-empty parameters."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.numel():
                yield module, name, parameter


def _with_tensors(model: Model, change: Any) -> Model:
    """Return a copy with each parameter replaced by change(position, values)."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for position, (_, _, parameter) in enumerate(_parameters(result)):
            parameter.copy_(change(position, parameter))
    return result


def _same_twice(model: Model, expected: Model, label: str) -> None:
    """Compare outputs and gradients of the inputs in two passes."""
    for seed in (1, 2):
        x = inputs(4, model.in_features, seed=seed).requires_grad_()
        y, wanted = model(x), expected(x)
        assert_close(y, wanted, f"the output {label}")
        leaves = [x, *model.parameters()]
        assert_close(gradients_of(y, leaves)[0], gradients_of(wanted, [x])[0], f"the gradient {label}")


@law("function")
def pruned(function: Function) -> None:
    """Pruned parameters act as masked parameters, before `prune.remove`, and after it has restored the names."""
    model = _model(function)
    masks = [
        torch.rand(parameter.shape, generator=seeded(i)) < 0.7 for i, (_, _, parameter) in enumerate(_parameters(model))
    ]
    expected = _with_tensors(model, lambda i, values: values * masks[i])
    names = sorted(model.state_dict())
    places = [(module, name) for module, name, _ in _parameters(model)]
    for (module, name), mask in zip(places, masks, strict=True):
        prune.custom_from_mask(module, name, mask)
    _same_twice(model, expected, "of pruned parameters")
    for module, name in places:
        prune.remove(module, name)
    require(sorted(model.state_dict()) == names, "names differ after prune.remove")
    _same_twice(model, expected, "after prune.remove")
    for name, value in copy.deepcopy(model).state_dict().items():
        assert_equal(value, model.state_dict()[name], f"{name} of a copy")


@law("function")
def normalized_by_hook(function: Function) -> None:
    """The hook-based spectral norm of `torch.nn.utils` divides each parameter by the norm."""
    model = _model(function)
    source = copy.deepcopy(model)  # a module with computed tensors cannot be copied
    norms: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module, name, parameter in list(_parameters(model)):
            if parameter.dim() == 0:
                norms.append(torch.ones((), dtype=torch.float64))
                continue
            spectral_norm(module, name)
            u, v = module.get_buffer(f"{name}_u"), module.get_buffer(f"{name}_v")
            norms.append(u @ parameter.detach().reshape(len(u), -1) @ v)
    _same_twice(model, _with_tensors(source, lambda i, values: values / norms[i]), "with spectral norms")


class _Doubled(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


@law("function")
def parametrized(function: Function) -> None:
    """Every parameter can be parametrized by `torch.nn.utils.parametrize`; removal restores the model bitwise."""
    model = _model(function)
    x = inputs(4, model.in_features)
    y, names = model(x), list(model.state_dict())
    expected = _with_tensors(model, lambda _, values: 2 * values)
    places = [(module, name) for module, name, _ in _parameters(model)]
    for module, name in places:
        parametrize.register_parametrization(module, name, _Doubled())
    _same_twice(model, expected, "of parametrized tensors")
    for module, name in places:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    require(sorted(model.state_dict()) == sorted(names), "names differ after the parametrizations are removed")
    assert_equal(model(x), y, "the output after the parametrizations are removed")
