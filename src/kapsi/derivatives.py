"""Functions of torch with derivatives of their own, as the transforms of `torch.func` need them in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

__all__ = ["OwnDerivatives", "differentiated_forward", "layer_norm"]


def differentiated_forward() -> bool:
    """Return whether forward derivatives are being taken, through `torch.func` or dual numbers."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def layer_norm(x: Tensor, epsilon: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return (x − mean) / √(variance + ε) over the last axis, times a weight and plus a bias where there are any.

    The second derivatives of torch's own function are wrong where one of them is a forward one, and with a weight where
    both are those of `torch.func`.
    """
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if not transformed and not differentiated_forward():
        return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)
    centered = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = centered - centered.mean(-1, keepdim=True)
    made = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        made = made * weight
    return (made if bias is None else made + bias).to(x.dtype)


class OwnDerivatives(torch.autograd.Function):
    """A function with derivatives of its own: the forward one is `jvp_rule`, which may be differentiated forward again.

    Torch calls a `jvp` with forward derivatives off, those of an outer level as well: what it makes would count as constant
    there, and second derivatives would silently be wrong. Here they are on, and the tensors that are given to `jvp_rule` have
    lost their tangents of the own level, which would otherwise be counted twice. The rule that torch generates for `vmap`
    would call it where it cannot take those tangents away, so there is one here.

    Arguments that are no tensors come first. `setup_context` saves tensors for both directions, and looks at no output.
    """

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Any:
        """Return the derivative along tangents.

        Args:
            ctx: what `setup_context` made, except for the tensors.
            values: the tensors that it saved.
            tangents: one for each argument, None where there is none.
        """
        raise NotImplementedError

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            return cls.jvp_rule(ctx, [forward_ad.unpack_dual(value).primal for value in ctx.saved_tensors], *tangents)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        return _Mapped.apply(cls, in_dims, *arguments), 0


class _Context:
    """What stands for the context of a function within a map."""

    saved_tensors: tuple[Tensor, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward


class _Mapped(OwnDerivatives):
    """A function and its derivatives over an axis of its tensors: each is mapped by itself, and keeps what it keeps without.

    Called with the function, the axis of each argument or None, and the arguments. The new axis of the result is the first.
    """

    @staticmethod
    def forward(function: type[OwnDerivatives], places: tuple[Any, ...], *arguments: Any) -> Any:
        return torch.func.vmap(function.forward, places)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function, places, *arguments = inputs
        ctx.options = [value for value in arguments if not isinstance(value, Tensor)]
        ctx.places = tuple(places[len(ctx.options) :])
        tensors = arguments[len(ctx.options) :]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def _one(ctx: Any, tensors: Sequence[Tensor]) -> _Context:
        """Return the context of the function for one of what is mapped over."""
        one = _Context()
        ctx.function.setup_context(one, (*ctx.options, *tensors), None)
        one.needs_input_grad = ctx.needs_input_grad[2:]
        return one

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        there: list[bool] = []

        def each(part: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            made = ctx.function.backward(_Mapped._one(ctx, tensors), part)[len(ctx.options) :]
            there[:] = [value is not None for value in made]
            return tuple(part.new_zeros(()) if value is None else value for value in made)

        made = torch.func.vmap(each, (0, *ctx.places))(gradient, *ctx.saved_tensors)
        every = (
            None if not known else value.sum(0) if place is None else value.movedim(0, place)
            for value, place, known in zip(made, ctx.places, there, strict=True)
        )
        return (None, None, *[None] * len(ctx.options), *every)

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Any:
        none = [None] * len(ctx.options)
        of_tensors = tangents[2 + len(ctx.options) :]
        places = tuple(
            None if tangent is None else place for tangent, place in zip(of_tensors, ctx.places, strict=True)
        )

        def each(tensors: tuple[Tensor, ...], along: tuple[Tensor | None, ...]) -> Any:
            one = _Mapped._one(ctx, tensors)
            return ctx.function.jvp_rule(one, one.saved_tensors, *none, *along)

        return torch.func.vmap(each, (ctx.places, places))(tuple(values), tuple(of_tensors))
