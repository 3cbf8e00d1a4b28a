"""Modules of torch as expansions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from kapsi.errors import SpecError, nearest
from kapsi.expansion.base import Expansion
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors

__all__ = ["ModuleExpansion", "register_module"]

FACTORIES: dict[str, Callable[[int], nn.Module]] = {}
"""Makers of modules by name."""

TEMPLATES: dict[tuple[str, int], tuple[nn.Module, int]] = {}
"""For a name and a number of inputs the module on the meta device, and its number of outputs."""


def register_module(name: str, factory: Callable[[int], nn.Module]) -> None:
    """Make a module known by name, so that a specification can use it as an expansion.

    The module is run in evaluation mode and must work row by row: `(..., m) → (..., D)`, each row by itself.

    Args:
        name: what `ModuleExpansion(name)` and files call it; a program that reads such a file registers it first.
        factory: returns a new module for m inputs, its initial values drawn by torch as usual.

    Raises:
        SpecError: no name, or no function.

    Example:
        >>> import torch, kapsi as kp
        >>> register_module("doc_gates", lambda m: torch.nn.Sequential(torch.nn.Linear(m, 2 * m), torch.nn.GLU()))
        >>> head = kp.Head(3, 1, kp.HeadSpec(kp.ModuleExpansion("doc_gates")), seed=0)
        >>> head.expand(torch.ones(5, 3)).dense().shape
        torch.Size([5, 3])
    """
    if not isinstance(name, str) or not name:
        raise SpecError(f"register_module({name!r}): expected a name")
    if not callable(factory):
        raise SpecError(f"register_module({name!r}): expected a function of the number of inputs, got {factory!r}")
    FACTORIES[name] = factory
    for key in [key for key in TEMPLATES if key[0] == name]:
        del TEMPLATES[key]


def _silu_layer(in_features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(in_features, 4 * in_features), nn.SiLU())


register_module("silu_layer", _silu_layer)


def _template(name: str, in_features: int) -> tuple[nn.Module, int]:
    """Return the module on the meta device, where nothing is allocated, and its number of outputs."""
    if (name, in_features) not in TEMPLATES:
        where = f"ModuleExpansion({name!r})"
        if name not in FACTORIES:
            close = nearest(name, FACTORIES)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SpecError(
                f"{where}: no such module is registered; {hint}there are {', '.join(sorted(FACTORIES))}; "
                "kapsi.register_module makes one known"
            )
        with torch.device("meta"):
            made = FACTORIES[name](in_features)
            if not isinstance(made, nn.Module):
                raise SpecError(f"{where}: its factory must return a torch.nn.Module, returned {type(made).__name__}")
            made = made.eval()
            try:
                row, rows = made(torch.empty(in_features)), made(torch.empty(2, 3, in_features))
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise SpecError(f"{where}: fails on {in_features} inputs: {first}") from None
        if not (isinstance(rows, Tensor) and row.dim() == 1 and rows.shape == (2, 3, *row.shape)):
            raise SpecError(
                f"{where}: must work row by row, (..., {in_features}) to (..., D), with or without other axes"
            )
        TEMPLATES[name, in_features] = made, row.shape[0]
    return TEMPLATES[name, in_features]


def _initial(shape: tuple[int, ...], generator: Generator | None, *, name: str, in_features: int, path: str) -> Tensor:
    """Return one tensor of a newly made module; torch's own random state is put back where a generator is given."""
    if generator is None:
        return _named(FACTORIES[name](in_features), path)
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _named(FACTORIES[name](in_features), path)


def _named(module: nn.Module, path: str) -> Tensor:
    tensor: Tensor = dict((*module.named_parameters(), *module.named_buffers()))[path]
    return tensor.detach().clone()


@dataclass(frozen=True)
class ModuleExpansion(Expansion, name="module"):
    """A module of torch as κ: κ(x) = f(x), f registered by name, D as many columns as it has outputs.

    Its parameters and buffers become those of the head; the module itself holds none, so that a specification stays data
    and a file holds no code.

    Args:
        module: the name given to `register_module`; `silu_layer` is there, SiLU(W x + b) of 4·m units.
        learnable: train its parameters; False keeps them as they were drawn (or set), saved with the model.

    Raises:
        SpecError: no such module, one that does not work row by row, or one without a tensor of its own type.

    Source: the library's own; `torch.func.functional_call`.

    Example:
        >>> import torch, kapsi as kp
        >>> kp.Head(3, 1, kp.HeadSpec(ModuleExpansion("silu_layer")), seed=0).expand(torch.ones(3)).columns
        12
    """

    examples = ({}, {"learnable": False})

    module: str = "silu_layer"
    learnable: bool = True

    def factors(self, in_features: int) -> tuple[int, int]:  # noqa: D102
        return 1, _template(self.module, in_features)[1]

    def params(self, in_features: int) -> Params:  # noqa: D102
        template, _ = _template(self.module, in_features)
        declared: dict[str, Any] = {}
        for path, tensor in (*template.named_parameters(), *template.named_buffers()):
            place = declared
            *outer, last = path.split(".")
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = Param(
                tuple(tensor.shape),
                functools.partial(_initial, name=self.module, in_features=in_features, path=path),
                trainable=self.learnable and tensor.requires_grad,
                dtype=None if tensor.is_floating_point() else tensor.dtype,
            )
        return declared

    def __call__(self, x: Tensor, params: Tensors) -> Features:  # noqa: D102
        template, _ = _template(self.module, x.shape[-1])
        values = {}
        for path in _paths(template):
            value: Any = params
            for part in path.split("."):
                value = value[part]
            values[path] = value
        return DenseFeatures(functional_call(template, values, (x,)))


def _paths(template: nn.Module) -> list[str]:
    return [name for name, _ in (*template.named_parameters(), *template.named_buffers())]
