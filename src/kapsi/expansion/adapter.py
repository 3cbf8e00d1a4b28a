"""PyTorch modules as expansions."""

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

from kapsi.errors import SpecError, unknown
from kapsi.expansion.base import Expansion
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors
from kapsi.text import counted

__all__ = ["ModuleExpansion", "register_module"]

FACTORIES: dict[str, Callable[[int], nn.Module]] = {}
"""Factories of modules by name."""

TEMPLATES: dict[tuple[str, int], tuple[nn.Module, int]] = {}
"""The module on the meta device and its number of outputs, by name and number of inputs."""

MAX_TRIAL = 2**24
"""Size of the largest module run on trial rows; of larger modules only the output shapes are checked."""

NAMES_OF_A_STORE = {"assign", "names", "reset", "trainable", "training"}
"""Reserved names of a head's tensors, in addition to those of every module."""


def register_module(name: str, factory: Callable[[int], nn.Module]) -> None:
    """Register a module under a name, for use as an expansion in specifications.

    The module runs in evaluation mode and must work row by row: `(rows, m) → (rows, D)`. All its tensors must be parameters
    or buffers.

    Args:
        name: used by `ModuleExpansion(name)` and by files; register the module before reading such a file.
        factory: returns a module for m inputs, with initial values drawn by torch as usual; or a trained module, whose
            tensors are copied. Called on the meta device first.

    Raises:
        SpecError: an invalid name, or not a callable.

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
    """Return the module on the meta device, and its number of outputs."""
    if (name, in_features) not in TEMPLATES:
        where = f"ModuleExpansion({name!r})"
        if name not in FACTORIES:
            listed = unknown("registered module", name, sorted(FACTORIES))
            raise SpecError(f"ModuleExpansion: {listed}; or add a module with kapsi.register_module")
        with torch.device("meta"), torch.no_grad():
            module = _build(name, in_features)
            try:
                # A copy: the factory may return a shared module.
                module = copy.deepcopy(module).to("meta").eval()
                x = torch.empty(3, in_features)
                rows, row = module(x), module(x[:1])
            except Exception as error:
                raise SpecError(f"{where}: fails on {counted(in_features, 'input')}: {_first_line(error)}") from error
        if not all(isinstance(y, Tensor) and y.dim() == 2 for y in (rows, row)) or rows.shape != (3, row.shape[1]):
            raise SpecError(f"{where}: must work row by row, (rows, {in_features}) to (rows, D)")
        if x._version:
            raise SpecError(f"{where}: changes its inputs in place; set inplace=False")
        if not row.shape[1]:
            raise SpecError(f"{where}: has no outputs for {counted(in_features, 'input')}")
        _try_rows(module, where, in_features)
        TEMPLATES[name, in_features] = module, row.shape[1]
    return TEMPLATES[name, in_features]


def _build(name: str, in_features: int) -> nn.Module:
    """Return the module of a factory."""
    where = f"ModuleExpansion({name!r})"
    try:
        module = FACTORIES[name](in_features)
    except Exception as error:
        raise SpecError(
            f"{where}: its factory fails on {counted(in_features, 'input')}: {_first_line(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise SpecError(f"{where}: its factory must return a torch.nn.Module, returned {type(module).__name__}")
    for path, tensor in _tensors(module).items():
        if is_lazy(tensor):
            raise SpecError(f"{where}: {path} has no size yet; use modules that are not lazy")
    return module


@torch.no_grad()
def _try_rows(template: nn.Module, where: str, in_features: int) -> None:
    """Raise a `SpecError` if a module has tensors other than parameters and buffers, or mixes rows."""
    tensors = _tensors(template)
    if in_features + sum(tensor.numel() for tensor in tensors.values()) > MAX_TRIAL:
        return
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = {
            path: (torch.rand(t.shape) + 0.5).to(t.dtype if not t.is_floating_point() else torch.get_default_dtype())
            for path, t in tensors.items()
        }
        x = torch.randn(3, in_features)
        try:
            batched = functional_call(template, values, (x,))
            separate = torch.cat([functional_call(template, values, (row,)) for row in x.split(1)])
        except Exception as error:
            first = _first_line(error)
            hint = "; all its tensors must be parameters or buffers (register_buffer)" if "meta" in first else ""
            raise SpecError(f"{where}: fails on {counted(in_features, 'input')}: {first}{hint}") from error
    if not torch.allclose(batched, separate, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise SpecError(
            f"{where}: must work row by row; outputs of a row depend on other rows, on randomness, or on earlier calls"
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def _path_in_head(path: str) -> list[str]:
    """Return the path of a module's tensor in the head; reserved names get a prefix."""
    return [
        f"own_{part}"
        if part.startswith(("_", "own_"))
        or hasattr(nn.Module, part)
        or keyword.iskeyword(part)
        or part in NAMES_OF_A_STORE
        else part
        for part in path.split(".")
    ]


class _Initializer:
    """Initial values of a module, built once for all of its tensors, since some may depend on others."""

    def __init__(self, name: str, in_features: int) -> None:
        self.name, self.in_features = name, in_features
        self.pending: dict[str, Tensor] = {}

    def __call__(self, shape: tuple[int, ...], generator: Generator | None, *, path: str) -> Tensor:
        """Return one tensor; with a generator, torch's global random state is restored."""
        if path not in self.pending:
            self.pending = self._draw(generator)
        if path not in self.pending:
            raise SpecError(f"ModuleExpansion({self.name!r}): the module now registered has no {path}")
        return self.pending.pop(path).detach()

    def _draw(self, generator: Generator | None) -> dict[str, Tensor]:
        if generator is None:
            return _tensors(_build(self.name, self.in_features))
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _tensors(_build(self.name, self.in_features))


@dataclass(frozen=True)
class ModuleExpansion(Expansion, name="module"):
    """A PyTorch module as κ: κ(x) = f(x), f registered by name, D its number of outputs.

    Parameters and buffers of the module become tensors of the head; the expansion holds none, so a specification remains
    data and a file contains no code. Reserved names (`_net`, `float`) get the prefix `own_`.

    Args:
        module: a name given to `register_module`; `silu_layer`, SiLU(W x + b) with 4·m units, is built in.
        learnable: train the parameters; False keeps initial or assigned values, saved with the model.

    Raises:
        SpecError: an unknown module, a module that mixes rows or changes its inputs, or tensors other than parameters and
            buffers.

    Source: kapsi; `torch.func.functional_call`.

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
        params: dict[str, Any] = {}
        initializer = _Initializer(self.module, in_features)
        for path, tensor in _tensors(template).items():
            node = params
            *outer, last = _path_in_head(path)
            for part in outer:
                node = node.setdefault(part, {})
            node[last] = Param(
                tuple(tensor.shape),
                functools.partial(initializer, path=path),
                trainable=self.learnable and tensor.requires_grad,
                dtype=None if tensor.is_floating_point() else tensor.dtype,
            )
        return params

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        template, columns = _template(self.module, x.shape[-1])
        values = {}
        for path in _tensors(template):
            value: Any = params
            for part in _path_in_head(path):
                value = value[part]
            values[path] = value
        if x.dim() == 2:
            return DenseFeatures(functional_call(template, values, (x,)))
        rows = functional_call(template, values, (x.reshape(-1, x.shape[-1]),))
        return DenseFeatures(rows.reshape(*x.shape[:-1], columns))
