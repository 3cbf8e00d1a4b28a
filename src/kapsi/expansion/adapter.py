"""Modules of torch as expansions."""

from __future__ import annotations

import copy
import functools
import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from kapsi.errors import SpecError, did_you_mean
from kapsi.expansion.base import Expansion
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors

__all__ = ["ModuleExpansion", "register_module"]

FACTORIES: dict[str, Callable[[int], nn.Module]] = {}
"""Makers of modules by name."""

TEMPLATES: dict[tuple[str, int], tuple[nn.Module, int]] = {}
"""For a name and a number of inputs the module on the meta device, and its number of outputs."""

LARGEST_TRIED = 2**24
"""Numbers in the largest module that is tried on rows; of larger ones only the shapes of their outputs are known."""

NAMES_OF_A_STORE = {"assign", "names", "reset", "trainable", "training"}
"""Names that tensors of a head cannot have, beside those of every module."""


def register_module(name: str, factory: Callable[[int], nn.Module]) -> None:
    """Make a module known by name, so that a specification can use it as an expansion.

    The module is run in evaluation mode and must work row by row: `(rows, m) → (rows, D)`, each row by itself. All its
    tensors must be parameters or buffers.

    Args:
        name: what `ModuleExpansion(name)` and files call it; a program that reads such a file registers it first.
        factory: returns a module for m inputs, its initial values drawn by torch as usual, or one that is trained already,
            of which the tensors are copied. It is called on the meta device first.

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
            hint = did_you_mean(name, FACTORIES)
            raise SpecError(
                f"{where}: no such module is registered; {hint}there are {', '.join(sorted(FACTORIES))}; "
                "kapsi.register_module makes one known"
            )
        with torch.device("meta"), torch.no_grad():
            made = _made(name, in_features)
            try:
                # A copy: a factory may return a module that others use.
                made = copy.deepcopy(made).to("meta").eval()
                x = torch.empty(3, in_features)
                rows, row = made(x), made(x[:1])
            except Exception as error:
                raise SpecError(f"{where}: fails on {in_features} inputs: {_first_line(error)}") from error
        if not all(isinstance(y, Tensor) and y.dim() == 2 for y in (rows, row)) or rows.shape != (3, row.shape[1]):
            raise SpecError(f"{where}: must work row by row, (rows, {in_features}) to (rows, D)")
        if x._version:
            raise SpecError(f"{where}: changes its inputs in place; use operations that do not (inplace=False)")
        if not row.shape[1]:
            raise SpecError(f"{where}: has no outputs for {in_features} inputs")
        _try_rows(made, where, in_features)
        TEMPLATES[name, in_features] = made, row.shape[1]
    return TEMPLATES[name, in_features]


def _made(name: str, in_features: int) -> nn.Module:
    """Return what the factory returns."""
    where = f"ModuleExpansion({name!r})"
    try:
        made = FACTORIES[name](in_features)
    except Exception as error:
        raise SpecError(f"{where}: its factory fails on {in_features} inputs: {_first_line(error)}") from error
    if not isinstance(made, nn.Module):
        raise SpecError(f"{where}: its factory must return a torch.nn.Module, returned {type(made).__name__}")
    for path, tensor in _tensors(made).items():
        if is_lazy(tensor):
            raise SpecError(f"{where}: {path} has no size yet; use modules that are not lazy")
    return made


@torch.no_grad()
def _try_rows(template: nn.Module, where: str, in_features: int) -> None:
    """Raise a `SpecError` where a module has other tensors than its parameters and buffers, or mixes rows."""
    tensors = _tensors(template)
    if in_features + sum(tensor.numel() for tensor in tensors.values()) > LARGEST_TRIED:
        return
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = {
            path: (torch.rand(t.shape) + 0.5).to(t.dtype if not t.is_floating_point() else torch.get_default_dtype())
            for path, t in tensors.items()
        }
        x = torch.randn(3, in_features)
        try:
            together = functional_call(template, values, (x,))
            alone = torch.cat([functional_call(template, values, (row,)) for row in x.split(1)])
        except Exception as error:
            first = _first_line(error)
            hint = "; all its tensors must be parameters or buffers (register_buffer)" if "meta" in first else ""
            raise SpecError(f"{where}: fails on {in_features} inputs: {first}{hint}") from error
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise SpecError(
            f"{where}: must work row by row; its outputs of a row depend on other rows, on chance, or on earlier calls"
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def _place(path: str) -> list[str]:
    """Return where the tensor of a module is among those of the head: names that cannot be there get a prefix."""
    return [
        f"own_{part}"
        if part.startswith(("_", "own_"))
        or hasattr(nn.Module, part)
        or keyword.iskeyword(part)
        or part in NAMES_OF_A_STORE
        else part
        for part in path.split(".")
    ]


class _Making:
    """Initial values of a module, which is made once for all of its tensors: some may depend on others."""

    def __init__(self, name: str, in_features: int) -> None:
        self.name, self.in_features = name, in_features
        self.left: dict[str, Tensor] = {}

    def __call__(self, shape: tuple[int, ...], generator: Generator | None, *, path: str) -> Tensor:
        """Return one tensor; torch's own random state is put back where a generator is given."""
        if path not in self.left:
            self.left = self._drawn(generator)
        if path not in self.left:
            raise SpecError(f"ModuleExpansion({self.name!r}): the module that is registered now has no {path}")
        return self.left.pop(path).detach()

    def _drawn(self, generator: Generator | None) -> dict[str, Tensor]:
        if generator is None:
            return _tensors(_made(self.name, self.in_features))
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _tensors(_made(self.name, self.in_features))


@dataclass(frozen=True)
class ModuleExpansion(Expansion, name="module"):
    """A module of torch as κ: κ(x) = f(x), f registered by name, D as many columns as it has outputs.

    Its parameters and buffers become those of the head; the module itself holds none, so that a specification stays data
    and a file holds no code. Names that the head cannot have (`_net`, `float`) get the prefix `own_`.

    Args:
        module: the name given to `register_module`; `silu_layer` is there, SiLU(W x + b) of 4·m units.
        learnable: train its parameters; False keeps them as they were drawn (or set), saved with the model.

    Raises:
        SpecError: no such module, one that does not work row by row or changes its inputs, or one with tensors that are
            neither parameters nor buffers.

    Source: the library's own; `torch.func.functional_call`.

    Example:
        >>> import torch, kapsi as kp
        >>> kp.Head(3, 1, kp.HeadSpec(ModuleExpansion("silu_layer")), seed=0).expand(torch.ones(3)).columns
        12
    """

    examples = ({}, {"learnable": False})

    module: str = "silu_layer"
    learnable: bool = True

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, _template(self.module, in_features)[1]

    def params(self, in_features: int) -> Params:
        template, _ = _template(self.module, in_features)
        declared: dict[str, Any] = {}
        making = _Making(self.module, in_features)
        for path, tensor in _tensors(template).items():
            place = declared
            *outer, last = _place(path)
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = Param(
                tuple(tensor.shape),
                functools.partial(making, path=path),
                trainable=self.learnable and tensor.requires_grad,
                dtype=None if tensor.is_floating_point() else tensor.dtype,
            )
        return declared

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        template, columns = _template(self.module, x.shape[-1])
        values = {}
        for path in _tensors(template):
            value: Any = params
            for part in _place(path):
                value = value[part]
            values[path] = value
        if x.dim() == 2:
            return DenseFeatures(functional_call(template, values, (x,)))
        rows = functional_call(template, values, (x.reshape(-1, x.shape[-1]),))
        return DenseFeatures(rows.reshape(*x.shape[:-1], columns))
