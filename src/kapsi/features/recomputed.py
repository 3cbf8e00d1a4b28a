"""κ(x) recomputed in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kapsi.derivatives import OwnDerivatives
from kapsi.features.base import DenseFeatures, Features, apply_matrix

__all__ = ["BLOCK", "RecomputedFeatures", "RecomputedProduct", "product_jvp"]

BLOCK = 2**20
"""Numbers of κ(x) computed at a time if κ(x) is not kept."""


@dataclass(frozen=True)
class RecomputedFeatures(Features):
    """κ(x) computed at each use and again in the backward pass; a product with ψ keeps x and ψ only.

    Attributes:
        make: κ, a function of x and the tensors.
        x: the inputs.
        tensors: further arguments of κ, without gradients.
        width: number of columns D.
    """

    make: Callable[..., Tensor]
    x: Tensor
    tensors: tuple[Tensor, ...]
    width: int

    @property
    def columns(self) -> int:
        return self.width

    def dense(self) -> Tensor:
        return self.make(self.x, *self.tensors)

    def matmul(self, matrix: Tensor) -> Tensor:
        product: Tensor = RecomputedProduct.apply(self.make, matrix, self.x, *self.tensors)
        return product

    def total(self) -> Tensor:
        return self.dense().sum(-1)

    def square_norm(self) -> Tensor:
        return self.dense().square().sum(-1)

    def moments(self) -> tuple[Tensor, Tensor]:
        return DenseFeatures(self.dense()).moments()

    def materialize(self) -> Features:
        return DenseFeatures(self.dense())


class RecomputedProduct(OwnDerivatives):
    """κ(x) Mᵀ with κ(x) computed in the forward and again in the backward pass, in blocks of rows.

    Blocks reuse the same memory: with 784 inputs, 50 intervals and 1,024 rows a training step takes 0.8 of the time with
    κ(x) kept, and 1.4 of the time in one block.
    """

    @staticmethod
    def forward(make: Callable[..., Tensor], matrix: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        blocks = _blocks(x, matrix.shape[-1])
        products = [apply_matrix(make(block, *tensors), matrix) for block in blocks]
        return products[0] if len(products) == 1 else torch.cat(products)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.make, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        matrix, x, *tensors = ctx.saved_tensors
        needs_matrix, needs_x = ctx.needs_input_grad[1:3]
        upstream = gradient.to(matrix.dtype)  # of the product's type under autocast
        upstream = upstream.flatten(-2) if matrix.dim() == 3 else upstream
        rows = matrix.flatten(0, -2)
        # One block if differentiated again.
        blocks = (x,) if torch.is_grad_enabled() else _blocks(x, matrix.shape[-1])
        grad_matrix, grad_x = None, []
        parts = upstream.split([len(block) for block in blocks]) if len(blocks) > 1 else (upstream,)
        for block, part in zip(blocks, parts, strict=True):
            if needs_x:
                result: Any = torch.func.vjp(lambda inputs: ctx.make(inputs, *tensors), block)
                values, pull = result
                grad_x += pull((part @ rows).to(values.dtype))
            else:
                values = ctx.make(block, *tensors)
            if needs_matrix:
                product = part.reshape(-1, len(rows)).mT @ values.reshape(-1, values.shape[-1]).to(part.dtype)
                grad_matrix = product if grad_matrix is None else grad_matrix.add_(product)
        return (
            None,
            None if grad_matrix is None else grad_matrix.reshape(matrix.shape),
            torch.cat(grad_x) if len(grad_x) > 1 else grad_x[0] if grad_x else None,
            *[None] * len(tensors),
        )

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        matrix, x, *tensors = values
        _, grad_matrix, grad_x, *_ = tangents
        return product_jvp(lambda inputs: ctx.make(inputs, *tensors), matrix, x, grad_matrix, grad_x)


def product_jvp(
    make: Callable[[Tensor], Tensor], matrix: Tensor, x: Tensor, grad_matrix: Tensor | None, grad_x: Tensor | None
) -> Tensor:
    """Return the derivative of make(x) Mᵀ along tangents, by two reverse passes: torch does not nest forward passes."""
    first: Any = torch.func.vjp(make, x)
    values, pull = first
    second: Any = torch.func.vjp(lambda gradient: pull(gradient)[0], torch.zeros_like(values))
    (slopes,) = second[1](torch.zeros_like(x) if grad_x is None else grad_x)
    tangent = apply_matrix(slopes, matrix)
    return tangent if grad_matrix is None else tangent + apply_matrix(values, grad_matrix)


def _blocks(x: Tensor, columns: int) -> tuple[Tensor, ...]:
    """Return inputs in blocks of rows with about `BLOCK` entries of κ(x)."""
    if x.dim() < 2 or x.shape[0] == 0:
        return (x,)
    return x.split(max(1, BLOCK // max(1, columns * x.shape[1:-1].numel())))
