"""Stores: the tensors declared by functions, as parameters and buffers."""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from kapsi.errors import SpecError, check_integer, unknown
from kapsi.function import MAX_TENSOR, Initializer, Param, Params, Submodule, flatten
from kapsi.migrate import migrate_tensor

__all__ = ["Seed", "Store", "allocate", "as_generator", "memory"]

Seed = int | Generator | None
"""Source of random values: a seed, a generator, or None for torch's default generator."""


def as_generator(seed: Seed) -> Generator | None:
    """Return a new generator for a seed; generators and None are returned unchanged."""
    if seed is None or isinstance(seed, Generator):
        return seed
    number = check_integer("seed", seed, wanted="an integer, a torch.Generator or None")
    try:
        return torch.Generator().manual_seed(number)
    except (RuntimeError, ValueError, OverflowError):
        raise SpecError(f"seed: expected an integer of at most 64 bits, got {seed}") from None


def allocate(module: nn.Module, device: torch.device | str | None) -> None:
    """Allocate the tensors of a module, as on the meta device, without values.

    `nn.Module.to_empty` would import PyTorch's symbolic shapes and SymPy, which takes a second.
    """
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


@contextmanager
def memory(what: str) -> Iterator[None]:
    """Raise a `SpecError` if tensors do not fit into memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise SpecError(f"{what} does not fit into memory") from None


class Store(nn.Module):
    """The tensors of a function by name: trainable tensors are parameters, the others buffers.

    `store["name"]` is a tensor, or the store of a nested function. A function reads its tensors from `store.ready()`, which
    runs the forward hooks of the store first: pruning and hook-based norms of `torch.nn.utils` recompute tensors there.

    A tensor declared `transposed` is stored with its last axis first, `(D, rank)`, also in `parameters()` and
    `state_dict()`; `store["name"]` is a view of the declared shape, `(rank, D)`, as are assigned values.

    Args:
        params: the declaration.
        channels: length of the leading channel axis, None without channel axis.
        device, dtype: where and in which type to create the tensors.

    Raises:
        SpecError: a name reserved by `nn.Module`, or a tensor too large for any machine.
    """

    def __init__(
        self,
        params: Params,
        channels: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._declared = dict(params)
        self._channels = channels
        self._transposed = {name for name, param in params.items() if isinstance(param, Param) and param.transposed}
        for name, param in params.items():
            self._check_name(name)
            if isinstance(param, Submodule):
                self.add_module(name, param.build(device, dtype))
                continue
            if not isinstance(param, Param):
                self.add_module(name, Store(param, channels, device, dtype))
                continue
            shape = param.shape if channels is None else (channels, *param.shape)
            sizes = " × ".join(f"{size:,}" for size in shape)
            if math.prod(shape) > MAX_TENSOR:
                raise SpecError(f"{name!r} would have {sizes} elements; at most {MAX_TENSOR:,} are allowed")
            stored = (shape[-1], *shape[:-1]) if param.transposed else shape
            with memory(f"{name!r} of {sizes} elements"):
                tensor = torch.empty(stored, device=device, dtype=param.dtype or dtype)
            if param.trainable:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def _check_name(self, name: str) -> None:
        if (
            not isinstance(name, str)
            or (not name.isidentifier() and not name.isdecimal())
            or hasattr(Store, name)
            or hasattr(nn.ModuleDict, name)  # torch keeps parametrizations by name in a ModuleDict
            or name in self.__dict__
            or keyword.iskeyword(name)
            or name.startswith("_")
        ):
            raise SpecError(
                f"Store: {name!r} cannot be the name of a tensor: reserved by nn.Module, or not an identifier"
            )

    def __getitem__(self, name: str) -> Any:
        value: Any = self._parameters.get(name)
        if value is None:
            value = self._buffers.get(name)
            if value is None:
                # Also tensors of parametrizations and hooks.
                value = getattr(self, name, None) if name in self._declared else None
                if value is None:
                    raise KeyError(unknown("tensor", name, self._declared))
                if isinstance(value, Store):
                    return value.ready()
        return value.movedim(0, -1) if name in self._transposed else value

    def ready(self) -> Store:
        """Return the store after the forward hooks, which may recompute tensors."""
        return self() if self._forward_pre_hooks or self._forward_hooks else self

    def as_declared(self) -> bool:
        """Return whether the tensors are the declared parameters and buffers, not computed by hooks or parametrizations."""
        return (
            type(self) is Store
            and not (self._forward_pre_hooks or self._forward_hooks)
            and all(self._holds(name) for name in self._declared)
        )

    def _holds(self, name: str) -> bool:
        """Return whether an entry is a parameter, a buffer or a module, not computed."""
        module = self._modules.get(name)
        if isinstance(module, Store):
            return module.as_declared()
        return module is not None or name in self._parameters or name in self._buffers

    def check_as_declared(self, where: str) -> None:
        """Raise a `SpecError` if a tensor is computed by a hook or a parametrization, and cannot be set."""
        for name, store in self.named_modules():
            if isinstance(store, Store) and not store.as_declared():
                known = store._parameters.keys() | store._buffers.keys() | store._modules.keys()
                computed = ", ".join(
                    f"{name}.{tensor}".lstrip(".") for tensor in store._declared if tensor not in known
                )
                problem = f"{computed} is computed by" if computed else "the store has"
                raise SpecError(
                    f"{where}: {problem} a hook or a parametrization; remove it first (torch.nn.utils.prune.remove, "
                    "remove_spectral_norm, parametrize.remove_parametrizations)"
                )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        expected = {prefix + name for name in (*self._parameters, *self._buffers)}
        for name in [name for name in state_dict if name.startswith(prefix)]:
            renamed = migrate_tensor(name, expected)
            if renamed not in state_dict:
                state_dict[renamed] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    @contextmanager
    def evaluating(self) -> Iterator[Store]:
        """Return the store for a context with modules in evaluation mode, without random numbers."""
        training = [module for module in self.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield self
        finally:
            for module in training:
                module.training = True

    def __getstate__(self) -> dict[str, Any]:
        # Copies of tensors computed by a hook; a copy of the store recomputes them.
        computed = {name: value.detach() for name, value in self.__dict__.items() if isinstance(value, Tensor)}
        return {**self.__dict__, **computed}

    def names(self) -> list[str]:
        """Return the names of all tensors, with dots for nested functions."""
        return [name for name, _ in flatten(self._declared)]

    def trainable(self) -> bool:
        """Return whether any tensor, also of submodules, is declared trainable."""
        return next(self.parameters(), None) is not None

    @torch.no_grad()
    def reset(self, generator: Generator | None = None, rule: Initializer | None = None) -> None:
        """Draw new initial values; a given rule applies to random parameters."""
        self.check_as_declared("reset_parameters")
        for name, param in self._declared.items():
            if isinstance(param, Param):
                sizes = " × ".join(f"{size:,}" for size in self[name].shape)
                with memory(f"initial values of {name!r}, {sizes} elements,"):
                    drawn = param.draw(self._channels, generator, rule)
                self[name].copy_(drawn)
            elif isinstance(param, Submodule):
                param.reset(self[name], generator)
            else:
                self[name].reset(generator, rule)

    def assign(self, values: Mapping[str, Any], where: str = "Store") -> None:
        """Set some tensors in place; an invalid name or shape leaves all unchanged.

        Args:
            values: new values by name, tensors or arguments of `torch.as_tensor`; mappings for nested functions.
            where: prefix of error messages.
        """
        with torch.no_grad():
            for target, value in self.matched(values, where):
                target.copy_(value)

    def matched(self, values: Mapping[str, Any], where: str) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a tensor of the store and new values, after a check; arguments as in `assign`."""
        pairs: list[tuple[Tensor, Tensor]] = []
        self.check_as_declared(where)
        for name, value in values.items():
            if name not in self._declared:
                raise SpecError(f"{where}: {unknown('tensor', name, self._declared)}")
            target, path = self[name], f"{where}.{name}"
            if isinstance(target, Store) and isinstance(value, Mapping):
                pairs += target.matched(value, path)
                continue
            if isinstance(target, nn.Module) and isinstance(value, Mapping):
                pairs += self._matched_module(target, value, path)
                continue
            tensor, problem = None, f"expected a mapping of tensors, got {type(value).__name__}"
            if isinstance(target, Tensor):
                tensor, problem = self._as_tensor(target, value)
            if tensor is None or problem:
                raise SpecError(f"{path}: {problem}")
            pairs.append((target, tensor))
        return pairs

    def _matched_module(self, module: nn.Module, values: Mapping[str, Any], where: str) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a tensor of a submodule and new values, by name in its `state_dict`, after a check."""
        pairs = []
        targets = module.state_dict(keep_vars=True)
        for name, value in values.items():
            if name not in targets:
                raise SpecError(f"{where}: {unknown('tensor', name, targets)}")
            tensor, problem = self._as_tensor(targets[name], value)
            if tensor is None or problem:
                raise SpecError(f"{where}.{name}: {problem}")
            pairs.append((targets[name], tensor))
        return pairs

    def _as_tensor(self, target: Tensor, value: Any) -> tuple[Tensor | None, str]:
        """Return new values in the shape of a tensor, and the problem of invalid values."""
        shape = tuple(target.shape)
        try:
            # Python numbers have 64 bits; keep all of them.
            wide = None if isinstance(value, Tensor) or not target.is_floating_point() else torch.float64
            tensor = torch.as_tensor(value, dtype=wide)
        except (TypeError, ValueError, RuntimeError):
            return None, f"expected numbers of shape {shape}, got {type(value).__name__}"
        # A single set of values stands for every channel.
        if self._channels is not None and tensor.shape == shape[1:]:
            tensor = tensor.expand(shape)
        problem = ""
        if tensor.shape != shape:
            problem = f"expected shape {shape}, got {tuple(tensor.shape)}"
        elif target.dtype == torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
            problem = "expected true and false, or ones and zeros"
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problem = "expected finite numbers"
        elif tensor.is_complex():
            problem = f"expected real numbers, got {tensor.dtype}"
        elif target.is_floating_point() and not bool(torch.isfinite(tensor.to(target.dtype)).all()):
            problem = f"expected numbers within the range of {target.dtype}"
        return tensor, problem

    def forward(self, *args: Any) -> Store:
        """Return the store; called by `ready` for the hooks."""
        if args:
            raise SpecError("Store: holds tensors and is not called; call the head, the layer or the model")
        return self

    def extra_repr(self) -> str:
        params = [(name, p) for name, p in self._declared.items() if isinstance(p, Param)]
        return ", ".join(f"{name}{'' if p.trainable else ' (buffer)'}: {tuple(self[name].shape)}" for name, p in params)
