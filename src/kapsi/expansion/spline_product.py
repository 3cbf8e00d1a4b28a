"""Products of splines with ψ without κ(x) in memory: in blocks of inputs, or as sums of the rows of Mᵀ with non-zero weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.expansion.spline_uniform import uniform_pieces_at
from kapsi.features import BLOCK, RecomputedProduct, apply_matrix

if TYPE_CHECKING:
    from kapsi.expansion.spline import BSpline


class SplineProduct(RecomputedProduct):
    """κ(x) Mᵀ, with κ(x) computed in the forward and again in the backward pass, some inputs at a time.

    A block has all rows and some inputs, whose columns of M are read once in each pass; blocks of rows would read M, and add
    to its gradient, once per block. The arrays of a block are reused from the cache: no array of the size of κ(x) is
    written or read, neither its values nor its gradient. With many intervals the forward pass gathers.
    """

    @staticmethod
    def forward(spline: BSpline, matrix: Tensor, x: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        if matrix.dim() == 2 and spline.gathers(x):
            return _gathered(spline, matrix, x, ends)
        if matrix.dtype != x.dtype or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
            return RecomputedProduct.forward(spline._columns, matrix, x, ends)
        rows, flat = matrix.flatten(0, -2), x.reshape(-1, x.shape[-1])
        result = flat.new_zeros(len(flat), len(rows))
        for part in _blocks(spline, flat):
            result.addmm_(spline._columns(flat[:, part], ends[:, part]), _cut(rows, flat, part).mT)
        return result.view(*x.shape[:-1], *matrix.shape[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.spline, *tensors = inputs
        RecomputedProduct.setup_context(ctx, (ctx.spline._columns, *tensors), output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # differentiated again
            return RecomputedProduct.backward(ctx, gradient)
        matrix, x, ends = ctx.saved_tensors
        spline: BSpline = ctx.spline
        needs_matrix, needs_x = ctx.needs_input_grad[1:3]
        rows, flat = matrix.flatten(0, -2), x.reshape(-1, x.shape[-1])
        upstream = gradient.to(matrix.dtype).reshape(-1, len(rows))
        # Lists, since nothing can be written in place if the gradient is mapped over.
        grad_matrix: list[Tensor] = []
        grad_x: list[Tensor] = []
        for part in _blocks(spline, flat):
            block, knots = flat[:, part], ends[:, part]
            if needs_x:
                result: Any = torch.func.vjp(lambda inputs, knots=knots: spline._columns(inputs, knots), block)
                values, pull = result
                grad_x += pull((upstream @ _cut(rows, flat, part)).to(values.dtype))
            else:
                values = spline._columns(block, knots)
            if needs_matrix:
                product = upstream.mT @ values.to(upstream.dtype)
                grad_matrix.append(product.view(len(rows), -1, block.shape[1]))
        return (
            None,
            torch.cat(grad_matrix, -1).view(matrix.shape) if needs_matrix else None,
            torch.cat(grad_x, -1).view(x.shape) if needs_x else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, spline: BSpline, *tensors: Tensor) -> tuple[Tensor, int]:
        def product(matrix: Tensor, x: Tensor, ends: Tensor) -> Tensor:
            return apply_matrix(spline._columns(x, ends), matrix)

        result: Tensor = torch.func.vmap(product, in_dims[1:])(*tensors)
        return result, 0


def _blocks(spline: BSpline, x: Tensor) -> Iterator[slice]:
    """Yield blocks of inputs with about `BLOCK` entries of κ(x)."""
    size = max(1, BLOCK // max(1, (spline.intervals + spline.degree) * len(x)))
    for begin in range(0, x.shape[1], size):
        yield slice(begin, begin + size)


def _cut(rows: Tensor, x: Tensor, part: slice) -> Tensor:
    """Return the columns of M `(n, G·m)`, basis-major, that belong to some inputs."""
    return rows.view(len(rows), -1, x.shape[1])[..., part].reshape(len(rows), -1)


def _gathered(spline: BSpline, matrix: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return κ(x) Mᵀ as sums of the rows of Mᵀ with non-zero weights, in blocks of rows of x."""
    low, rate, outside = spline.prepared(x, ends)
    table = matrix.mT.contiguous()
    result = x.new_empty(x.shape[:-1].numel(), len(matrix))
    rows = max(1, BLOCK // ((spline.degree + 1) * x.shape[-1]))
    for block, sums in zip(x.reshape(-1, x.shape[-1]).split(rows), result.split(rows), strict=True):
        indices, pieces = uniform_pieces_at(block, low, rate, spline.intervals, spline.degree, outside, 0)
        sums.copy_(F.embedding_bag(indices, table, per_sample_weights=pieces, mode="sum"))
    return result.view(*x.shape[:-1], len(matrix))
