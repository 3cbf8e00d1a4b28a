"""Detection of hooks and replaced methods, with which a module must be called."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _torch


def has_global_hooks() -> bool:
    """Return whether hooks of all modules are registered (`torch.nn.modules.module.register_module_forward_hook` and others)."""
    return bool(
        _torch._global_forward_hooks
        or _torch._global_forward_pre_hooks
        or _torch._global_backward_hooks
        or _torch._global_backward_pre_hooks
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its own."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def original(module: nn.Module) -> nn.Module:
    """Return the module that a compiled one wraps, other modules unchanged."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def must_be_called(module: nn.Module) -> bool:
    """Return whether a call of a module does more than the `forward` of its class."""
    return has_hooks(module) or "forward" in module.__dict__ or has_global_hooks()
