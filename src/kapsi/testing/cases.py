"""Cases of the laws: instances of registered functions, small models around them, and comparisons of tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kapsi.errors import SpecError
from kapsi.expansion import Expansion, Identity, Taylor
from kapsi.features import Features
from kapsi.function import LAYER_ROLES, Function, catalogue
from kapsi.fusion import Fusion
from kapsi.modules import Head, Model
from kapsi.process import Process
from kapsi.reconciliation import Reconciliation
from kapsi.remainder import Remainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict

__all__ = [
    "LAYER_ROLES",
    "assert_close",
    "assert_equal",
    "examples_of",
    "features_of",
    "fits",
    "functional",
    "gradients_of",
    "inputs",
    "instances",
    "layer_with",
    "model_with",
    "perturbed_model",
    "require",
    "role_class",
    "seeded",
]


def role_class(cls: type[Function]) -> type[Function]:
    """Return the base class of a function's role, such as `Expansion`."""
    return next(base for base in cls.__mro__ if "role" in vars(base))


def example(cls: type[Function], options: Mapping[str, Any]) -> Function:
    """Return an instance of a class from plain options."""
    return from_dict({"kind": cls.name, **options}, role_class(cls), f"{cls.__name__}.examples")


def examples_of(cls: type[Function]) -> list[Function]:
    """Return an instance of a class for each entry of `examples`.

    Example:
        >>> import kapsi as kp
        >>> examples_of(kp.LowRank)
        [LowRank(rank=2), LowRank(rank=1), LowRank(rank=5)]
    """
    return [example(cls, options) for options in cls.examples]


def instances(role: str | None = None) -> list[Function]:
    """Return all examples of all registered functions of a role, or of all roles."""
    return [instance for cls in catalogue(role) for instance in examples_of(cls)]


def layer_with(*functions: Function) -> LayerSpec:
    """Return a small layer around functions of one role, with a head for each.

    Args:
        *functions: expansions, reconciliations or remainders, any number; or a single fusion; or processes, used before κ,
            after κ and at the output.
    """
    role, first = functions[0].role, functions[0]
    heads: list[HeadSpec]
    if role == "expansion":
        heads = [HeadSpec(expansion=f) for f in functions if isinstance(f, Expansion)]
    elif role == "reconciliation":
        heads = [HeadSpec(Taylor(2), f) for f in functions if isinstance(f, Reconciliation)]
    elif role == "remainder":
        heads = [HeadSpec(remainder=f) for f in functions if isinstance(f, Remainder)]
    elif isinstance(first, Fusion):
        return LayerSpec((HeadSpec(), HeadSpec(Taylor(2)), HeadSpec(bias=True)), first)
    else:
        steps = tuple(f for f in functions if isinstance(f, Process))
        return LayerSpec((HeadSpec(before=steps, after=steps),), output=steps)
    return LayerSpec(tuple(heads))


def model_with(*functions: Function, seed: int = 0, dtype: torch.dtype | None = torch.float64, **options: Any) -> Model:
    """Return a small model around functions of one role, in evaluation mode, with 3 inputs and 4 outputs.

    Args:
        *functions: see `layer_with`; a function with as many outputs as inputs gets 4 of both.
        seed: seed of the initial values.
        dtype: type of the tensors.
        **options: further arguments of `Model`; `device="meta"` for a model without values.
    """
    layer = layer_with(*functions)
    # Some functions need as many outputs as inputs, an eye as many outputs as columns.
    plain = LayerSpec(tuple(dataclasses.replace(head, expansion=Identity()) for head in layer.heads), layer.fusion)
    choices = [((3, 4), layer), ((4, 4), layer)] + [((4, 4), plain)] * (functions[0].role == "reconciliation")
    for widths, chosen in choices[:-1]:
        try:
            return Model(ModelSpec(widths, (chosen,)), seed=seed, dtype=dtype, **options).eval()
        except SpecError:
            continue
    widths, chosen = choices[-1]
    return Model(ModelSpec(widths, (chosen,)), seed=seed, dtype=dtype, **options).eval()


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def inputs(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return inputs in (−0.9, 0.9): within the domain of every basis and, almost surely, away from kinks."""
    return (torch.rand(shape, generator=seeded(seed), dtype=torch.float64) * 1.8 - 0.9).to(dtype)


def perturbed_model(function: Function, *more: Function, seed: int = 0) -> Model:
    """Return a small model with noise added to all parameters: initial zeros and ones would hide errors."""
    model, generator = model_with(function, *more, seed=seed), seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter.dtype))
    return model


def features_of(expansion: Function) -> Features:
    """Return κ(x) of one row of three zeros."""
    head = Head(3, 1, HeadSpec(expansion), seed=0)  # type: ignore[arg-type]
    return head.expand(torch.zeros(1, 3))


def fits(function: Reconciliation, n: int, factors: tuple[int, int]) -> bool:
    """Return whether ψ accepts n outputs and a grid of columns: an eye accepts few, others all divisible sizes."""
    try:
        function.params(n, factors)
    except SpecError:
        return False
    return True


def functional(module: nn.Module) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a module as a function of inputs and trainable tensors, and copies of these tensors."""
    names = [name for name, _ in module.named_parameters()]
    values = [value.detach().clone().requires_grad_() for value in module.parameters()]

    def call(x: Tensor, *tensors: Tensor) -> Tensor:
        result: Tensor = functional_call(module, dict(zip(names, tensors, strict=True)), (x,))
        return result

    return call, values


# ------------------------------------------------------------------------------------------------ comparisons


def assert_close(actual: Tensor, expected: Tensor, label: str, tolerance: float = 1e-10) -> None:
    """Compare in units of the largest expected value, since sums of large terms cancel."""
    require(actual.shape == expected.shape, f"{label}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    require(actual.dtype == expected.dtype, f"{label}: type {actual.dtype}, expected {expected.dtype}")
    if actual.numel() == 0:
        return
    largest = max(1.0, float(expected.detach().abs().max()))
    # Laws compare thousands of times, and `torch.testing` is slow.
    if (actual.device, actual.layout) == (expected.device, expected.layout):
        deviation = float((actual.detach() - expected.detach()).abs().max())
        if math.isfinite(deviation) and deviation <= tolerance * largest:
            return
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * largest, equal_nan=True, msg=lambda text: f"{label}: {text}"
    )


def assert_equal(actual: Tensor, expected: Tensor, label: str) -> None:
    """Compare bitwise."""
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{label} must be bitwise equal: {text}"
    )


def require(holds: bool, message: str) -> None:
    """Raise an AssertionError with a message unless a condition holds."""
    if not holds:
        raise AssertionError(message)


def gradients_of(output: Tensor, leaves: Sequence[Tensor], retain_graph: bool = False) -> list[Tensor]:
    """Return the gradients of a random linear combination of the outputs."""
    weights = torch.randn(output.shape, generator=seeded(3), dtype=torch.float64).to(output)
    if not output.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    scalar = (output * weights).sum()
    return list(
        torch.autograd.grad(scalar, leaves, retain_graph=retain_graph, allow_unused=True, materialize_grads=True)
    )
