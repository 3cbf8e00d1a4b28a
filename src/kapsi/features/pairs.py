"""Products of all pairs of inputs, computed some columns at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from kapsi.derivatives import OwnDerivatives
from kapsi.features.base import DenseFeatures, Features, apply_matrix, widen
from kapsi.features.recomputed import BLOCK, product_jvp

__all__ = ["PairFeatures", "with_pairs"]


@dataclass(frozen=True)
class PairFeatures(Features):
    """κ(x) = [x, all x_i x_j with i ≤ j], products of two inputs times √2; computed in blocks of columns and not kept.

    In the order `[x₁x₁, x₁x₂, …, x₁x_m, x₂x₂, x₂x₃, …]`: the products with one input are consecutive.
    """

    x: Tensor

    @property
    def columns(self) -> int:
        m = self.x.shape[-1]
        return m + m * (m + 1) // 2

    def dense(self) -> Tensor:
        return with_pairs(self.x)

    def matmul(self, matrix: Tensor) -> Tensor:
        product: Tensor = _PairProduct.apply(matrix, self.x)
        return product

    def total(self) -> Tensor:
        # Σ_i x_i + Σ_i x_i² + √2 Σ_{i<j} x_i x_j
        x = widen(self.x)
        total, square = x.sum(-1), x.square().sum(-1)
        return (total + square + (total.square() - square) * math.sqrt(0.5)).to(self.x.dtype)

    def square_norm(self) -> Tensor:
        # Σ_i x_i² + (Σ_i x_i²)²: with weights √2 the products have the norm of all m² products.
        square = widen(self.x).square().sum(-1)
        return (square + square.square()).to(self.x.dtype)

    def moments(self) -> tuple[Tensor, Tensor]:
        # Sums over all columns overflow float16 earlier than means.
        return Features.moments(replace(self, x=widen(self.x)))

    def materialize(self) -> Features:
        return DenseFeatures(self.dense())


def with_pairs(x: Tensor) -> Tensor:
    """Return [x, all x_i x_j with i ≤ j], products of two inputs times √2, by differentiable operations."""
    m = x.shape[-1]
    rows, columns = torch.triu_indices(m, m, device=x.device).unbind(0)
    # In the type of x: Python numbers would become float32.
    scale = torch.where(rows == columns, x.new_ones(()), x.new_full((), math.sqrt(2)))
    return torch.cat((x, x[..., rows] * x[..., columns] * scale), -1)


def _formed_pair_product(matrix: Tensor, x: Tensor) -> Tensor:
    return apply_matrix(with_pairs(x), matrix)


class _PairProduct(OwnDerivatives):
    """κ(x) Mᵀ for `PairFeatures` in blocks of columns, computed in the forward and again in the backward pass.

    With 784 inputs, 64 outputs and 64 rows a training step takes a quarter of the time with κ(x) materialized.
    """

    @staticmethod
    def forward(matrix: Tensor, x: Tensor) -> Tensor:
        inputs, rows = x.reshape(-1, x.shape[-1]).mT.contiguous(), matrix.flatten(0, -2)
        product = rows[:, : x.shape[-1]] @ inputs  # of another type under autocast
        total = widen(product)
        for _, columns, _, block in _pair_blocks(inputs):
            if total.dtype == inputs.dtype == product.dtype:
                total.addmm_(rows[:, columns], block)
            else:
                total += rows[:, columns] @ block
        # Contiguous like the forward derivative.
        return total.mT.reshape(*x.shape[:-1], *matrix.shape[:-1]).to(product.dtype).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        matrix, x = ctx.saved_tensors
        if torch.is_grad_enabled():  # materialized if differentiated again
            values, pull = cast(Any, torch.func.vjp(_formed_pair_product, matrix, x))
            both: tuple[Tensor, Tensor] = pull(gradient.to(values.dtype))
            return both
        m = x.shape[-1]
        inputs, rows = x.reshape(-1, m).mT.contiguous(), matrix.flatten(0, -2)
        upstream = gradient.to(matrix.dtype).reshape(-1, len(rows)).mT.contiguous()
        grad_matrix = grad_x = None
        if ctx.needs_input_grad[0]:
            grad_matrix = torch.empty_like(rows)
            torch.mm(upstream, inputs.mT, out=grad_matrix[:, :m])
        if ctx.needs_input_grad[1]:
            grad_x = widen(rows[:, :m].mT @ upstream)
            doubled = inputs * math.sqrt(2)
        for first, columns, squares, block in _pair_blocks(inputs):
            if grad_matrix is not None:
                torch.mm(upstream, block.mT, out=grad_matrix[:, columns])
            if grad_x is not None:
                grad_block = rows[:, columns].mT @ upstream
                block_rows = slice(first, first + len(squares))
                grad_x[block_rows].addcmul_(grad_block[squares], inputs[block_rows], value=2)
                grad_block[squares] = 0
                for two, rest, part in _products(first, grad_block, m):
                    grad_x[two] += (part * doubled[rest]).sum(1)
                    grad_x[rest] += (part * doubled[two, None]).sum(0)
        return (
            None if grad_matrix is None else grad_matrix.reshape(matrix.shape),
            None if grad_x is None else grad_x.mT.reshape(x.shape).to(x.dtype),
        )

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        return product_jvp(with_pairs, *values, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, matrix: Tensor, x: Tensor) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            return _PairProduct.apply(matrix, x.movedim(in_dims[1], 0)), 0
        product: Tensor = torch.func.vmap(_formed_pair_product, in_dims)(matrix, x)
        return product, 0


def _pair_blocks(x: Tensor) -> Iterator[tuple[int, slice, list[int], Tensor]]:
    """Yield blocks of products `(width, B)` of inputs `(m, B)`.

    Yields the first input of the block, the columns of the block in κ, the indices of squares in the block, and the block.
    All blocks share memory. A row of the memory is a column of κ: blocks are written and multiplied without gaps.
    """
    m, count = x.shape
    # Smaller blocks are slower: products with few columns of ψ.
    at_once = max(2, 4 * BLOCK // max(1, count * m) // 2 * 2)
    memory = x.new_empty(min(at_once * m, m * (m + 1) // 2), count)
    doubled = x * math.sqrt(2)
    begin = m
    for first in range(0, m, at_once):
        last = min(m, first + at_once)
        # The products with an input begin with its square, one product fewer than with the previous input.
        squares = list(itertools.accumulate(range(m - first, m - last, -1), initial=0))
        width = squares.pop()
        block = memory[:width]
        for two, rest, part in _products(first, block, m):
            torch.mul(doubled[rest], x[two, None], out=part)
        block[squares] = x[first:last].square()
        yield first, slice(begin, begin + width), squares, block
        begin += width


def _products(first: int, block: Tensor, m: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the products of two consecutive inputs in a block: the two inputs, the r inputs after the first, a view `(2, r, B)`.

    The products of inputs i and i + 1 with inputs after i are consecutive: x_i x_{i+1}, …, x_i x_m, x_{i+1}², …,
    x_{i+1} x_m, including a square.
    """
    start, i = 0, first
    while start < len(block) and i + 1 < m:
        length = m - i - 1
        yield slice(i, i + 2), slice(i + 1, m), block[start + 1 : start + 1 + 2 * length].unflatten(0, (2, length))
        start, i = start + 1 + 2 * length, i + 2
