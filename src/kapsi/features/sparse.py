"""Sparse κ(x): products with ψ gather the columns of ψ with non-zero entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.derivatives import OwnDerivatives
from kapsi.errors import DataError, SpecError
from kapsi.features.base import ConcatenatedFeatures, DenseFeatures, Features, widen
from kapsi.features.products import OuterFeatures, ProductFeatures

__all__ = [
    "MAX_ENTRIES",
    "SparseFeatures",
    "SparseProductFeatures",
    "entries_of",
    "entry_pairs",
    "features_of",
    "side_by_side",
]

MAX_ENTRIES = 2**28
"""Entries of the largest product of sparse features multiplied out: 9 GB in float32 with intermediate tensors."""

GATHERED = 2**15
"""Numbers computed at a time if rows of a table are gathered or scattered one by one; fits into the cache."""


def _rows_of(starts: Tensor, count: int) -> Tensor:
    """Return the row of each of `count` entries."""
    numbers = torch.arange(starts.shape[0] - 1, device=starts.device)
    return numbers.repeat_interleave(starts.diff(), output_size=count)


def _blocks_of_entries(rows: Tensor, indices: Tensor, values: Tensor, width: int) -> Iterator[tuple[Tensor, ...]]:
    size = max(1, GATHERED // max(1, width))
    yield from zip(rows.split(size), indices.split(size), values.unsqueeze(-1).split(size), strict=True)


def _gather(table: Tensor, starts: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return X T, `(rows, k)`, for a sparse X and a table T `(D, k)`, contiguous by rows or by columns."""
    if table.dtype in (torch.float32, torch.float64):
        return F.embedding_bag(indices, table, starts, mode="sum", per_sample_weights=values, include_last_offset=True)
    product = table.new_zeros(starts.shape[0] - 1, table.shape[1], dtype=torch.float32)
    rows = _rows_of(starts, indices.shape[0])
    for row, index, value in _blocks_of_entries(rows, indices, values.float(), table.shape[1]):
        product.index_add_(0, row, table.index_select(0, index).float().mul_(value))
    return product.to(table.dtype)


def _scatter(gradient: Tensor, starts: Tensor, indices: Tensor, values: Tensor, columns: int) -> Tensor:
    """Return Xᵀ G, `(D, k)`, for G `(rows, k)`."""
    # A column has entries of many rows: 16 bits have too few digits for the sum.
    total = widen(gradient.new_zeros(columns, gradient.shape[1]))
    rows = _rows_of(starts, indices.shape[0])
    for row, index, value in _blocks_of_entries(rows, indices, values.to(total.dtype), gradient.shape[1]):
        total.index_add_(0, index, gradient.index_select(0, row).to(total.dtype).mul_(value))
    return total.to(gradient.dtype)


class _SparseParts(OwnDerivatives):
    """The parts of a sparse tensor within the transforms of `torch.func`, where sparse tensors cannot be read.

    The forward runs below the transforms; the tensor is hidden in a function.
    """

    @staticmethod
    def forward(tensor: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = tensor()
        return x.crow_indices().clone(), x.col_indices().clone(), x.values().clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: Callable[[], Tensor]) -> tuple[tuple[Tensor, ...], tuple[None, ...]]:
        return _SparseParts.apply(tensor), (None, None, None)


def _parts_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the starts of the rows of a `torch.sparse_csr` tensor, the columns of the entries, and the entries."""
    try:
        return x.crow_indices(), x.col_indices(), x.values()
    except RuntimeError:
        parts: tuple[Tensor, Tensor, Tensor] = _SparseParts.apply(lambda: x)
        return parts


class _SparseProduct(OwnDerivatives):
    """X T (`forwards`) or Xᵀ G for a sparse X without a gradient, each the derivative of the other.

    The forward is an embedding bag; torch's backward pass of a dense gradient takes three times as long.
    """

    @staticmethod
    def forward(
        values: Tensor, forwards: bool, starts: Tensor, indices: Tensor, entries: Tensor, columns: int
    ) -> Tensor:
        if forwards:
            return _gather(values, starts, indices, entries)
        return _scatter(values, starts, indices, entries, columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.forwards, *sparse, ctx.columns = inputs
        ctx.save_for_backward(*sparse)
        ctx.save_for_forward(*sparse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        product = _SparseProduct.apply(gradient, not ctx.forwards, *ctx.saved_tensors, ctx.columns)
        return product, None, None, None, None, None

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        product: Tensor = _SparseProduct.apply(tangents[0], ctx.forwards, *values, ctx.columns)
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, *others: Any) -> tuple[Tensor, int]:
        if any(axis is not None for axis in in_dims[1:]):
            raise SpecError("vmap: sparse inputs cannot be mapped over; map over the parameters, or over dense inputs")
        mapped = values.movedim(in_dims[0], 1)
        product = _SparseProduct.apply(mapped.flatten(1), *others)
        return product.unflatten(1, mapped.shape[1:]), 1


@dataclass(frozen=True)
class SparseFeatures(Features):
    """κ(x) `(rows, D)` with few non-zero columns per row.

    A product with ψ gathers columns of ψ, forward and backward. There is no gradient with respect to κ(x).

    Attributes:
        starts: index of the first entry of each row, and the number of entries, `(rows + 1)`, int64.
        indices: the column of each entry, `(entries)`, int64, distinct within a row.
        values: the entries, row by row, `(entries)`.
        width: number of columns D.

    Example:
        >>> x = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]).to_sparse_csr()
        >>> SparseFeatures.of(x).matmul(torch.tensor([[1.0, 10.0, 100.0]]))
        tensor([[ 20.],
                [301.]])
    """

    starts: Tensor
    indices: Tensor
    values: Tensor
    width: int

    def __post_init__(self) -> None:
        if self.values.requires_grad:
            raise DataError(
                "SparseFeatures: there is no gradient with respect to sparse inputs; use x.detach(), or x.to_dense()"
            )

    @classmethod
    def of(cls, x: Tensor) -> SparseFeatures:
        """Return a `torch.sparse_csr` tensor `(rows, D)` as features."""
        starts, indices, values = _parts_of(x)
        # A copy: compilers do not follow views of sparse tensors.
        values = values.clone(memory_format=torch.contiguous_format)
        return cls(starts.long(), indices.long(), values, x.shape[-1])

    @property
    def columns(self) -> int:
        return self.width

    @property
    def sparse(self) -> bool:
        return True

    def rows(self) -> Tensor:
        """Return the row of each entry, `(entries)`."""
        return _rows_of(self.starts, self.indices.shape[0])

    def sums(self, entries: Tensor) -> Tensor:
        """Return values of entries `(entries, ...)` summed by row, `(rows, ...)`."""
        wide = widen(entries)
        total = wide.new_zeros(self.starts.shape[0] - 1, *entries.shape[1:]).index_add(0, self.rows(), wide)
        return total.to(entries.dtype)

    def grouped(self, groups: Tensor, count: int) -> Tensor:
        """Return the entries of each row summed by group, `(rows, count)`; `groups` is the group of each entry."""
        values = widen(self.values)
        total = values.new_zeros(self.starts.shape[0] - 1, count)
        return total.index_put_((self.rows(), groups), values, accumulate=True).to(self.values.dtype)

    def dense(self) -> Tensor:
        return self.grouped(self.indices, self.width)

    def matmul(self, matrix: Tensor) -> Tensor:
        values = self.values
        if matrix.dtype != values.dtype:
            if not torch.is_autocast_enabled(matrix.device.type):
                raise DataError(
                    f"the inputs are {values.dtype} and the weights {matrix.dtype}; give the inputs as x.to({matrix.dtype})"
                )
            dtype = torch.promote_types(matrix.dtype, values.dtype)
            matrix, values = matrix.to(dtype), values.to(dtype)
        table = matrix.flatten(0, -2).mT
        product: Tensor = _SparseProduct.apply(table, True, self.starts, self.indices, values, self.width)
        return product if matrix.dim() == 2 else product.unflatten(-1, matrix.shape[:-1])

    def total(self) -> Tensor:
        return self.sums(self.values)

    def square_norm(self) -> Tensor:
        return self.sums(widen(self.values).square()).to(self.values.dtype)

    def moments(self) -> tuple[Tensor, Tensor]:
        values = widen(self.values)
        rows, missing = self.rows(), self.width - self.starts.diff()
        mean = self.sums(values) / self.width
        # Correct the rounding of a long sum: the sum of the small differences is exact.
        mean = mean + (self.sums(values - mean[rows]) - missing * mean) / self.width
        # Columns not stored are zero.
        square = self.sums((values - mean[rows]).square()) + missing * mean.square()
        return mean.unsqueeze(-1), (square / self.width).unsqueeze(-1)

    def on_grid(self, grid: tuple[int, int]) -> tuple[SparseFeatures, SparseFeatures]:
        """Return each entry as a row, an outer product of sparse u `(entries, q)` and v `(entries, t)`."""
        q, t = grid
        starts = torch.arange(self.indices.shape[0] + 1, device=self.indices.device)
        left = SparseFeatures(starts, self.indices // t, torch.ones_like(self.values), q)
        return left, SparseFeatures(starts, self.indices % t, self.values, t)


@dataclass(frozen=True)
class SparseProductFeatures(OuterFeatures):
    """κ(x) = u ⊗ v of sparse features `(rows, q)` and `(rows, t)`.

    Attributes:
        left, right: u and v.
    """

    left: SparseFeatures
    right: SparseFeatures

    def factors(self) -> tuple[Features, Features]:
        return self.left, self.right

    @property
    def sparse(self) -> bool:
        return True

    def multiplied(self) -> SparseFeatures:
        """Return the product multiplied out, entries of u times entries of v."""
        starts, first, second = entry_pairs(self.left, self.right)
        indices = self.left.indices[first]
        indices *= self.right.width
        indices += self.right.indices[second]
        return SparseFeatures(starts, indices, self.left.values[first] * self.right.values[second], self.columns)

    def dense(self) -> Tensor:
        return ProductFeatures(self.left.dense(), self.right.dense()).dense()

    def matmul(self, matrix: Tensor) -> Tensor:
        return self.multiplied().matmul(matrix)


def entry_pairs(left: SparseFeatures, right: SparseFeatures) -> tuple[Tensor, Tensor, Tensor]:
    """Return all pairs of entries of u and v in the same row: starts of rows, indices in u, indices in v.

    Raises:
        DataError: more than `MAX_ENTRIES` pairs.
    """
    rows = left.rows()
    counts = right.starts.diff()[rows]
    ends = counts.cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends))[left.starts]
    count = int(starts[-1])
    if count > MAX_ENTRIES:
        raise DataError(
            f"a product of sparse features would have {count:,} entries; at most {MAX_ENTRIES:,} are allowed; use fewer "
            "rows at a time, or a reconciliation that acts on both factors (khatri_rao, or a Kronecker kind on κ's grid)"
        )
    first = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts, output_size=count)
    second = torch.arange(count, device=counts.device)
    second += (right.starts[rows] - ends + counts)[first]  # in place: possibly many pairs
    return starts, first, second


def side_by_side(parts: Sequence[SparseFeatures]) -> SparseFeatures:
    """Return the concatenation [κ₁(x), κ₂(x), …] of sparse features."""
    counts = [part.starts.diff() for part in parts]
    starts = torch.cat((counts[0].new_zeros(1), torch.stack(counts).sum(0).cumsum(0)))
    positions, indices, offset, begin = [], [], 0, starts[:-1]
    for part, count in zip(parts, counts, strict=True):
        rows = part.rows()
        order = torch.arange(rows.shape[0], device=rows.device)
        positions.append(order + (begin - part.starts[:-1])[rows])
        begin = begin + count
        indices.append(part.indices + offset)
        offset += part.width
    position = torch.cat(positions)
    values = torch.cat([part.values for part in parts])
    return SparseFeatures(
        starts,
        torch.empty_like(position).index_copy_(0, position, torch.cat(indices)),
        torch.empty_like(values).index_copy_(0, position, values),
        offset,
    )


def entries_of(features: Features) -> SparseFeatures:
    """Return sparse features of any structure entry by entry."""
    if isinstance(features, SparseProductFeatures):
        return features.multiplied()
    if isinstance(features, ConcatenatedFeatures):
        return side_by_side([entries_of(part) for part in features.parts])
    if not isinstance(features, SparseFeatures):
        raise SpecError(f"{type(features).__name__}: expected sparse features")
    return features


def features_of(x: Tensor) -> DenseFeatures | SparseFeatures:
    """Return inputs as dense features, `torch.sparse_csr` tensors as sparse features."""
    return DenseFeatures(x) if x.layout == torch.strided else SparseFeatures.of(x)
