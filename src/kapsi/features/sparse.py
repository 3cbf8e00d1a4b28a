"""Sparse κ(x): products with ψ gather the columns of ψ with non-zero entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.derivatives import OwnDerivatives
from kapsi.errors import SpecError
from kapsi.features.base import ConcatenatedFeatures, DenseFeatures, Features, widen
from kapsi.features.products import OuterFeatures, ProductFeatures

__all__ = [
    "LARGEST_ENTRIES",
    "SparseFeatures",
    "SparseProductFeatures",
    "entries_of",
    "entry_pairs",
    "features_of",
    "side_by_side",
]

LARGEST_ENTRIES = 2**28
"""Entries of the largest product of sparse features that is multiplied out: 9 GB with all that is made on the way, in float32."""

GATHERED = 2**15
"""Numbers that are made at a time where rows of a table are gathered or added to one by one: they stay in the cache."""


def _rows_of(starts: Tensor, count: int) -> Tensor:
    """Return the row of each of `count` entries."""
    numbers = torch.arange(starts.shape[0] - 1, device=starts.device)
    return numbers.repeat_interleave(starts.diff(), output_size=count)


def _blocks_of_entries(rows: Tensor, indices: Tensor, values: Tensor, width: int) -> Iterator[tuple[Tensor, ...]]:
    size = max(1, GATHERED // max(1, width))
    yield from zip(rows.split(size), indices.split(size), values.unsqueeze(-1).split(size), strict=True)


def _gather(table: Tensor, starts: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return X T, `(rows, k)`, for the sparse X and a table T `(D, k)`, which may lie in memory by rows or by columns."""
    if table.dtype in (torch.float32, torch.float64):
        return F.embedding_bag(indices, table, starts, mode="sum", per_sample_weights=values, include_last_offset=True)
    made = table.new_zeros(starts.shape[0] - 1, table.shape[1], dtype=torch.float32)
    rows = _rows_of(starts, indices.shape[0])
    for row, index, value in _blocks_of_entries(rows, indices, values.float(), table.shape[1]):
        made.index_add_(0, row, table.index_select(0, index).float().mul_(value))
    return made.to(table.dtype)


def _scatter(gradient: Tensor, starts: Tensor, indices: Tensor, values: Tensor, columns: int) -> Tensor:
    """Return Xᵀ G, `(D, k)`, for G `(rows, k)`."""
    # Entries of one column come from many rows: 16 bits have too few digits for the sum.
    made = widen(gradient.new_zeros(columns, gradient.shape[1]))
    rows = _rows_of(starts, indices.shape[0])
    for row, index, value in _blocks_of_entries(rows, indices, values.to(made.dtype), gradient.shape[1]):
        made.index_add_(0, index, gradient.index_select(0, row).to(made.dtype).mul_(value))
    return made.to(gradient.dtype)


class _Parts(OwnDerivatives):
    """What a sparse tensor is made of, within the transforms of `torch.func`: they let no sparse tensor be read.

    A forward is computed below them. The tensor comes in a function, which they do not look into.
    """

    @staticmethod
    def forward(held: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = held()
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
    def vmap(info: Any, in_dims: Any, held: Callable[[], Tensor]) -> tuple[tuple[Tensor, ...], tuple[None, ...]]:
        return _Parts.apply(held), (None, None, None)


def _parts_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the rows of a `torch.sparse_csr` tensor begin, the columns of its entries, and the entries."""
    try:
        return x.crow_indices(), x.col_indices(), x.values()
    except RuntimeError:
        parts: tuple[Tensor, Tensor, Tensor] = _Parts.apply(lambda: x)
        return parts


class _SparseProduct(OwnDerivatives):
    """X T (`forwards`) or Xᵀ G for a sparse X without a gradient; each is the derivative of the other.

    The forward is the one of an embedding, whose own backward pass for a dense gradient takes three times as long.
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
        made = _SparseProduct.apply(gradient, not ctx.forwards, *ctx.saved_tensors, ctx.columns)
        return made, None, None, None, None, None

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        product: Tensor = _SparseProduct.apply(tangents[0], ctx.forwards, *values, ctx.columns)
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, *others: Any) -> tuple[Tensor, int]:
        if any(place is not None for place in in_dims[1:]):
            raise SpecError("vmap: sparse inputs are no batch; map over the parameters, or over dense inputs")
        several = values.movedim(in_dims[0], 1)
        made = _SparseProduct.apply(several.flatten(1), *others)
        return made.unflatten(1, several.shape[1:]), 1


@dataclass(frozen=True)
class SparseFeatures(Features):
    """κ(x) `(rows, D)` of which only some columns of each row are there; the others are zero.

    A product with ψ gathers the columns of ψ that are there, forward and backward. There is no gradient with respect to κ(x).

    Attributes:
        starts: where each row begins among the entries, and the end, `(rows + 1)`, int64.
        indices: the column of each entry, `(entries)`, int64; each at most once in a row.
        values: the entries, row by row, `(entries)`.
        width: D.

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
            raise SpecError(
                "SparseFeatures: there is no gradient with respect to sparse inputs; use x.detach(), or x.to_dense()"
            )

    @classmethod
    def of(cls, x: Tensor) -> SparseFeatures:
        """Return a `torch.sparse_csr` tensor `(rows, D)` as features."""
        starts, indices, values = _parts_of(x)
        # A copy: a compiler follows no view of a sparse tensor.
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
        """Return what is given for each entry, `(entries, ...)`, added up for each row, `(rows, ...)`."""
        wide = widen(entries)
        made = wide.new_zeros(self.starts.shape[0] - 1, *entries.shape[1:]).index_add(0, self.rows(), wide)
        return made.to(entries.dtype)

    def grouped(self, groups: Tensor, count: int) -> Tensor:
        """Return the sums of the entries of each of so many groups, `(rows, count)`, for the group of each entry."""
        values = widen(self.values)
        made = values.new_zeros(self.starts.shape[0] - 1, count)
        return made.index_put_((self.rows(), groups), values, accumulate=True).to(self.values.dtype)

    def dense(self) -> Tensor:
        return self.grouped(self.indices, self.width)

    def matmul(self, matrix: Tensor) -> Tensor:
        values = self.values
        if matrix.dtype != values.dtype:
            if not torch.is_autocast_enabled(matrix.device.type):
                raise SpecError(
                    f"the inputs are {values.dtype} and the weights {matrix.dtype}; give the inputs as x.to({matrix.dtype})"
                )
            wanted = torch.promote_types(matrix.dtype, values.dtype)
            matrix, values = matrix.to(wanted), values.to(wanted)
        table = matrix.flatten(0, -2).mT
        made: Tensor = _SparseProduct.apply(table, True, self.starts, self.indices, values, self.width)
        return made if matrix.dim() == 2 else made.unflatten(-1, matrix.shape[:-1])

    def total(self) -> Tensor:
        return self.sums(self.values)

    def square_norm(self) -> Tensor:
        return self.sums(widen(self.values).square()).to(self.values.dtype)

    def moments(self) -> tuple[Tensor, Tensor]:
        values = widen(self.values)
        rows, missing = self.rows(), self.width - self.starts.diff()
        mean = self.sums(values) / self.width
        # A sum of many numbers one by one is not exact; what the mean is off by is small, and its sum is.
        mean = mean + (self.sums(values - mean[rows]) - missing * mean) / self.width
        # The columns that are not there are all as far from the mean as zero is.
        square = self.sums((values - mean[rows]).square()) + missing * mean.square()
        return mean.unsqueeze(-1), (square / self.width).unsqueeze(-1)

    def on_grid(self, grid: tuple[int, int]) -> tuple[SparseFeatures, SparseFeatures]:
        """Return each entry as a row of its own, an outer product e ⊗ v of sparse u `(entries, q)` and v `(entries, t)`."""
        q, t = grid
        starts = torch.arange(self.indices.shape[0] + 1, device=self.indices.device)
        left = SparseFeatures(starts, self.indices // t, torch.ones_like(self.values), q)
        return left, SparseFeatures(starts, self.indices % t, self.values, t)


@dataclass(frozen=True)
class SparseProductFeatures(OuterFeatures):
    """κ(x) = u ⊗ v of sparse features `(rows, q)` and `(rows, t)`: as sparse as the product of their numbers of entries.

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
    """Return all pairs of an entry of u and an entry of v of the same row: where each row begins, and both of each pair.

    Raises:
        SpecError: they are more than `LARGEST_ENTRIES`.
    """
    rows = left.rows()
    each = right.starts.diff()[rows]
    ends = each.cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends))[left.starts]
    count = int(starts[-1])
    if count > LARGEST_ENTRIES:
        raise SpecError(
            f"a product of sparse features would have {count:,} entries, and at most {LARGEST_ENTRIES:,} are made; "
            "take fewer rows at a time, or a reconciliation that leaves it apart (khatri_rao, or a Kronecker kind on κ's grid)"
        )
    first = torch.arange(each.shape[0], device=each.device).repeat_interleave(each, output_size=count)
    second = torch.arange(count, device=each.device)
    second += (right.starts[rows] - ends + each)[first]  # in place: there may be very many
    return starts, first, second


def side_by_side(parts: Sequence[SparseFeatures]) -> SparseFeatures:
    """Return [κ₁(x), κ₂(x), …] of sparse features as one."""
    counts = [part.starts.diff() for part in parts]
    starts = torch.cat((counts[0].new_zeros(1), torch.stack(counts).sum(0).cumsum(0)))
    places, indices, offset, begin = [], [], 0, starts[:-1]
    for part, count in zip(parts, counts, strict=True):
        rows = part.rows()
        order = torch.arange(rows.shape[0], device=rows.device)
        places.append(order + (begin - part.starts[:-1])[rows])
        begin = begin + count
        indices.append(part.indices + offset)
        offset += part.width
    place = torch.cat(places)
    values = torch.cat([part.values for part in parts])
    return SparseFeatures(
        starts,
        torch.empty_like(place).index_copy_(0, place, torch.cat(indices)),
        torch.empty_like(values).index_copy_(0, place, values),
        offset,
    )


def entries_of(features: Features) -> SparseFeatures:
    """Return sparse features as they are, entry by entry."""
    if isinstance(features, SparseProductFeatures):
        return features.multiplied()
    if isinstance(features, ConcatenatedFeatures):
        return side_by_side([entries_of(part) for part in features.parts])
    if isinstance(features, SparseFeatures):
        return features
    raise SpecError(f"{type(features).__name__}: features that are all sparse are needed here")


def features_of(x: Tensor) -> DenseFeatures | SparseFeatures:
    """Return inputs as features, `torch.sparse_csr` ones as sparse."""
    return DenseFeatures(x) if x.layout == torch.strided else SparseFeatures.of(x)
