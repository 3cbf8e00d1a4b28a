"""Stores: the tensors that functions declare, as parameters and buffers."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from kapsi.errors import SpecError, did_you_mean
from kapsi.function import LARGEST_TENSOR, Param, Params, flatten

__all__ = [
    "Seed",
    "Store",
    "as_generator",
    "integer",
    "memory",
]

Seed = int | Generator | None
"""Where random values come from: a seed, a generator, or None for torch's default generator."""


def as_generator(seed: Seed) -> Generator | None:
    """Return a generator of one's own for a seed, the given one, or None."""
    if seed is None or isinstance(seed, Generator):
        return seed
    try:
        return torch.Generator().manual_seed(integer("seed", seed, "an integer, a torch.Generator or None"))
    except (RuntimeError, ValueError, OverflowError):
        raise SpecError(f"seed: expected an integer of at most 64 bits, got {seed}") from None


def integer(name: str, value: Any, wanted: str) -> int:
    """Return an integer of Python or NumPy as one of Python."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise SpecError(f"{name}: expected {wanted}, got {value!r}")


@contextmanager
def memory(what: str) -> Iterator[None]:
    """Raise a `SpecError` where there is no memory for tensors."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise SpecError(f"{what} does not fit into memory") from None


class Store(nn.Module):
    """The tensors that a function declares, by name: trainable ones are parameters, the rest buffers.

    Access is plain `store["name"]`; the stores of nested functions are reached the same way. What is declared `transposed` is a
    tensor with its last axis first, `(D, rank)`, and has that shape in `parameters()` and `state_dict()`; `store["name"]` is
    its view of the declared shape, `(rank, D)`, and so are the values that are assigned to it.

    Args:
        params: the declaration.
        channels: length of the leading channel axis, None for no such axis.
        device, dtype: of the tensors.

    Raises:
        SpecError: a name that `nn.Module` uses for itself, or a tensor beyond any machine.
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
        for name, param in params.items():
            self._check_name(name)
            if not isinstance(param, Param):
                self.add_module(name, Store(param, channels, device, dtype))
                continue
            shape = param.shape if channels is None else (channels, *param.shape)
            if math.prod(shape) > LARGEST_TENSOR:
                sizes = " × ".join(f"{size:,}" for size in shape)
                raise SpecError(f"{name!r} would have {sizes} elements; at most {LARGEST_TENSOR:,} are allowed")
            kept = (shape[-1], *shape[:-1]) if param.transposed else shape
            try:
                tensor = torch.empty(kept, device=device, dtype=param.dtype or dtype)
            except (RuntimeError, MemoryError):
                sizes = " × ".join(f"{size:,}" for size in shape)
                raise SpecError(f"{name!r} of {sizes} elements does not fit into memory") from None
            if param.trainable:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def _check_name(self, name: str) -> None:
        if (
            not isinstance(name, str)
            or (not name.isidentifier() and not name.isdecimal())
            or hasattr(Store, name)
            or name in self.__dict__
            or keyword.iskeyword(name)
            or name.startswith("_")
        ):
            raise SpecError(
                f"Store: {name!r} cannot be the name of a tensor; a module uses it for itself, or it is not an identifier"
            )

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name, None)
        if name not in self._declared or value is None:
            raise KeyError(f"there is no tensor {name!r}; there are: {', '.join(self._declared) or 'none'}")
        param = self._declared[name]
        return value.movedim(0, -1) if isinstance(param, Param) and param.transposed else value

    def names(self) -> list[str]:
        """Return the names of all tensors, dotted for those of nested functions."""
        return [name for name, _ in flatten(self._declared)]

    def trainable(self) -> bool:
        """Return whether any tensor is declared trainable."""
        return any(param.trainable for _, param in flatten(self._declared))

    @torch.no_grad()
    def reset(self, generator: Generator | None = None) -> None:
        """Draw initial values anew."""
        for name, param in self._declared.items():
            if isinstance(param, Param):
                try:
                    drawn = param.draw(self._channels, generator)
                except (RuntimeError, MemoryError) as error:
                    if isinstance(error, RuntimeError) and "allocate" not in str(error):
                        raise
                    sizes = " × ".join(f"{size:,}" for size in self[name].shape)
                    raise SpecError(f"the initial values of {name!r}, {sizes}, do not fit into memory") from None
                self[name].copy_(drawn)
            else:
                self[name].reset(generator)

    def assign(self, values: Mapping[str, Any], where: str = "Store") -> None:
        """Set some tensors, in place, after a check of names and shapes; nothing is set if one does not fit.

        Args:
            values: new values by name, tensors or what `torch.as_tensor` takes; mappings for nested functions.
            where: what messages begin with.
        """
        with torch.no_grad():
            for target, value in self._fitted(values, where):
                target.copy_(value)

    def _fitted(self, values: Mapping[str, Any], where: str) -> list[tuple[Tensor, Tensor]]:
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, value in values.items():
            if name not in self._declared:
                hint = did_you_mean(str(name), self._declared)
                raise SpecError(
                    f"{where}: there is no tensor {name!r}; {hint}there are: {', '.join(self._declared) or 'none'}"
                )
            target = self[name]
            if isinstance(target, Store):
                if not isinstance(value, Mapping):
                    raise SpecError(f"{where}.{name}: expected a mapping of tensors, got {type(value).__name__}")
                pairs += target._fitted(value, f"{where}.{name}")
                continue
            try:
                # Numbers of Python have 64 bits, and so has what they become.
                wide = None if isinstance(value, Tensor) or not target.is_floating_point() else torch.float64
                tensor = torch.as_tensor(value, dtype=wide)
            except (TypeError, ValueError, RuntimeError):
                raise SpecError(
                    f"{where}.{name}: expected numbers of shape {tuple(target.shape)}, got {type(value).__name__}"
                ) from None
            # A single set of values stands for every channel.
            if self._channels is not None and tensor.shape == target.shape[1:]:
                tensor = tensor.expand(target.shape)
            if tensor.shape != target.shape:
                raise SpecError(f"{where}.{name}: expected shape {tuple(target.shape)}, got {tuple(tensor.shape)}")
            if target.dtype == torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
                raise SpecError(f"{where}.{name}: expected true and false, or ones and zeros")
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise SpecError(f"{where}.{name}: expected finite numbers")
            if tensor.is_complex():
                raise SpecError(f"{where}.{name}: expected real numbers, got {tensor.dtype}")
            if target.is_floating_point() and not bool(torch.isfinite(tensor.to(target.dtype)).all()):
                raise SpecError(f"{where}.{name}: expected numbers within the range of {target.dtype}")
            pairs.append((target, tensor))
        return pairs

    def forward(self, *args: Any) -> Any:
        raise SpecError("Store: holds tensors and is not called; call the head, the layer or the model")

    def extra_repr(self) -> str:
        own = [(name, p) for name, p in self._declared.items() if isinstance(p, Param)]
        return ", ".join(f"{name}{'' if p.trainable else ' (buffer)'}: {tuple(self[name].shape)}" for name, p in own)
