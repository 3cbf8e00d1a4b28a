"""Detection of hooks and replaced methods: a module with hooks must be called."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch

from kapsi.errors import SpecError

M = TypeVar("M", bound=nn.Module)


def has_global_hooks() -> bool:
    """Return whether hooks of all modules are registered (`torch.nn.modules.module.register_module_forward_hook` and others)."""
    return bool(
        _torch._global_forward_hooks
        or _torch._global_forward_pre_hooks
        or _torch._global_backward_hooks
        or _torch._global_backward_pre_hooks
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, apart from submodules."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def original(module: nn.Module) -> nn.Module:
    """Return the module within a compiled module; other modules unchanged."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def must_be_called(module: nn.Module) -> bool:
    """Return whether a call of a module does more than the `forward` of its class."""
    return has_hooks(module) or "forward" in module.__dict__ or has_global_hooks()


def hooked_inputs(module: nn.Module, x: Tensor) -> Tensor:
    """Return inputs of a module after its forward pre-hooks, as `forward` gets them."""
    for hooks in (_torch._global_forward_pre_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if key in module._forward_pre_hooks_with_kwargs:
                result = hook(module, (x,), {})
                result = result if result is None else result[0]
            else:
                result = hook(module, (x,))
            if result is not None:
                x = result[0] if isinstance(result, tuple) else result
    return x


def gradient_hook(module: nn.Module) -> str:
    """Return the name of a trained parameter with hooks on its gradient, run by a backward pass only; else empty."""
    return next(
        (
            name
            for name, p in module.named_parameters()
            if p.requires_grad and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
        ),
        "",
    )


def refuse_gradient_hooks(module: nn.Module, solver: str) -> None:
    """Raise a `SpecError` for hooks on gradients: a solver without backward passes would ignore them."""
    name = gradient_hook(module)
    if name:
        raise SpecError(
            f"{solver}: hooks on the gradient of {name} have no effect; remove them, or use solver adamw or lbfgs"
        )


def copied(module: M) -> M:
    """Return a deep copy of a module; tensors computed by hooks are copied as values, and recomputed by the copy."""
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in part.__dict__.values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(module, computed)


@torch.no_grad()
def changing_buffer(module: nn.Module, x: Tensor) -> str:
    """Return the name of a buffer that a forward pass in training changes, as the power iteration of a spectral norm; else empty.

    Args:
        module: any module; not changed.
        x: some inputs.
    """
    if not any(_may_change(part) for part in module.modules()):
        return ""
    other = copied(module).train()
    for parameter in other.parameters():  # off a fixed point of an iteration
        parameter.add_(
            torch.arange(parameter.numel(), device=parameter.device).cos().view(parameter.shape).to(parameter)
        )
    before = {name: buffer.clone() for name, buffer in other.named_buffers()}
    other(x)
    return next(
        (name for name, buffer in other.named_buffers() if not torch.equal(buffer, before.get(name, buffer))), ""
    )


def _may_change(module: nn.Module) -> bool:
    """Return whether a module has hooks, or buffers and code of another package."""
    foreign = not type(module).__module__.startswith("kapsi.")
    return has_hooks(module) or (foreign and next(module.buffers(recurse=False), None) is not None)
