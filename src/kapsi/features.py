"""What κ returns: expanded inputs as small immutable structures. `dense()` is their meaning, the rest a cheaper way to act."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.derivatives import OwnDerivatives, layer_norm
from kapsi.errors import SpecError

__all__ = [
    "ConcatenatedFeatures",
    "DenseFeatures",
    "Features",
    "NormalizedFeatures",
    "OuterFeatures",
    "PairFeatures",
    "ProductFeatures",
    "RecomputedFeatures",
    "SparseFeatures",
    "SparseProductFeatures",
    "formed",
]

LARGEST_FORMED = 2**24
"""Columns of the widest κ(x) that the package forms by itself: 16.7 million, 64 MiB a row in float32."""

LARGEST_ENTRIES = 2**28
"""Entries of the largest product of sparse features that is multiplied out: 9 GB with all that is made on the way, in float32."""


class Features(ABC):
    """κ(x) of shape `(..., D)`."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Return D."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return κ(x) itself, `(..., D)`."""

    @abstractmethod
    def matmul(self, matrix: Tensor) -> Tensor:
        """Return κ(x) Mᵀ: `(..., k)` for a matrix `(k, D)`, `(..., c, k)` for matrices `(c, k, D)`."""

    @abstractmethod
    def total(self) -> Tensor:
        """Return the sum over the columns, `(...)`."""

    @abstractmethod
    def square_norm(self) -> Tensor:
        """Return the sum of squares over the columns, `(...)`."""

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance over the columns, `(..., 1)`, in float32 at least."""
        # With a trailing axis, also where x has no other: the derivatives of 0-dimensional tensors lose their type.
        mean = _wide(self.total()).unsqueeze(-1) / self.columns
        # The difference of two means goes below zero by rounding where κ is nearly constant.
        return mean, (_wide(self.square_norm()).unsqueeze(-1) / self.columns - mean.square()).clamp_min(0)

    def structured(self) -> Features:
        """Return the same κ(x), whose structure is used also where its size would prefer κ(x) formed."""
        return self

    @property
    def sparse(self) -> bool:
        """Return whether only some columns of each row are there: such a κ(x) is not formed by itself."""
        return False

    def normalized(self, epsilon: float) -> Features:
        """Return the layer norm of κ(x) without affine part: (κ − mean) / √(variance + ε), over the columns."""
        mean, variance = self.moments()
        return NormalizedFeatures(self, -mean, torch.rsqrt(variance + epsilon))

    def kept(self) -> Features:
        """Return the same for many uses: what would be made anew in each is made once."""
        return self


def _wide(values: Tensor) -> Tensor:
    """Return 16-bit values as float32: their means and variances, and what cancels in a layer norm, need the digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def formed(features: Features, why: str) -> Tensor:
    """Return κ(x) itself where no structure helps, after a check of the size that is made.

    Raises:
        SpecError: κ has more than `LARGEST_FORMED` columns, or is sparse.
    """
    if features.sparse:
        raise SpecError(
            f"{why} needs κ(x) itself, which is not formed for sparse inputs; give x.to_dense(), or choose a reconciliation that "
            "gathers columns (low_rank, khatri_rao, random_adaption, dense, and the Kronecker kinds)"
        )
    check_formed(features.columns, why)
    return features.dense()


def check_formed(columns: int, why: str) -> None:
    """Raise a `SpecError` if κ(x) of so many columns is not formed by itself."""
    if columns > LARGEST_FORMED:
        raise SpecError(
            f"{why} needs κ(x) itself, {columns:,} columns a row, and at most {LARGEST_FORMED:,} are formed; "
            "choose a reconciliation that keeps κ's structure (low_rank, kronecker on the natural grid) or a smaller expansion"
        )


def apply_matrix(values: Tensor, matrix: Tensor) -> Tensor:
    """Return values Mᵀ, `(..., k)` or `(..., c, k)`, for one matrix `(k, D)` or one a channel `(c, k, D)`."""
    if matrix.dim() == 2:
        return F.linear(values, matrix)
    return F.linear(values, matrix.flatten(0, 1)).unflatten(-1, matrix.shape[:2])


@dataclass(frozen=True)
class DenseFeatures(Features):
    """κ(x) as it is."""

    values: Tensor

    @property
    def columns(self) -> int:
        return self.values.shape[-1]

    def dense(self) -> Tensor:
        return self.values

    def matmul(self, matrix: Tensor) -> Tensor:
        return apply_matrix(self.values, matrix)

    def total(self) -> Tensor:
        return self.values.sum(-1)

    def square_norm(self) -> Tensor:
        return self.values.square().sum(-1)

    def moments(self) -> tuple[Tensor, Tensor]:
        values = _wide(self.values)
        mean = values.mean(-1, keepdim=True)
        return mean, (values - mean).square().mean(-1, keepdim=True)

    def normalized(self, epsilon: float) -> Features:
        return DenseFeatures(layer_norm(self.values, epsilon))


class OuterFeatures(Features):
    """κ(x) = u ⊗ v, the Kronecker product row by row of features u `(..., q)` and v `(..., t)`; D = q·t."""

    @abstractmethod
    def halves(self) -> tuple[Features, Features]:
        """Return u and v."""

    @property
    def grid(self) -> tuple[int, int]:
        """Return (q, t), the columns of u and of v."""
        left, right = self.halves()
        return left.columns, right.columns

    @property
    def columns(self) -> int:
        q, t = self.grid
        return q * t

    def total(self) -> Tensor:
        left, right = self.halves()
        return left.total() * right.total()

    def square_norm(self) -> Tensor:
        left, right = self.halves()
        return left.square_norm() * right.square_norm()

    def moments(self) -> tuple[Tensor, Tensor]:
        # u ⊗ v − ū v̄ = (u − ū) ⊗ v + ū (v − v̄), whose two parts are orthogonal: no difference of large numbers.
        (left, left_variance), (right, right_variance) = (half.moments() for half in self.halves())
        return left * right, left_variance * (right_variance + right.square()) + left.square() * right_variance


@dataclass(frozen=True)
class ProductFeatures(OuterFeatures):
    """κ(x) = u ⊗ v, the Kronecker product row by row of u `(..., q)` and v `(..., t)`; D = q·t.

    Attributes:
        left, right: u and v.
        always: whether the product is left apart whatever is multiplied by it; by default sizes decide.
    """

    left: Tensor
    right: Tensor
    always: bool = False

    def halves(self) -> tuple[Features, Features]:
        return DenseFeatures(self.left), DenseFeatures(self.right)

    @property
    def grid(self) -> tuple[int, int]:
        """Return (q, t), the columns of u and of v."""
        return self.left.shape[-1], self.right.shape[-1]

    def keeps(self, rows: int) -> bool:
        """Return whether a product with a matrix of so many rows leaves κ apart: it then makes less than κ itself."""
        return self.always or rows < max(self.grid)

    def structured(self) -> Features:
        return replace(self, always=True)

    def dense(self) -> Tensor:
        return (self.left.unsqueeze(-1) * self.right.unsqueeze(-2)).flatten(-2)

    def matmul(self, matrix: Tensor) -> Tensor:
        lead, (q, t) = matrix.shape[:-1], self.grid
        rows = lead.numel()
        if not self.keeps(rows):  # κ is then the smallest array of the three
            return apply_matrix(self.dense(), matrix)
        table = matrix.flatten(0, -2).mT
        if (
            rows > 1 and table.is_contiguous()
        ):  # kept column by column: a grid without a copy only with u contracted first
            half = (self.left @ table.view(q, t * rows)).unflatten(-1, (t, rows))
            return (self.right.unsqueeze(-2) @ half).squeeze(-2).unflatten(-1, lead)
        grid = matrix.reshape(rows, q, t)
        if q <= 2 * t:  # contract v first: no copy of the matrix, rows × q values a row of x are kept
            half = F.linear(self.right, grid.flatten(0, 1)).unflatten(-1, (rows, q))
            return (half @ self.left.unsqueeze(-1)).squeeze(-1).unflatten(-1, lead)
        half = F.linear(self.left, grid.transpose(1, 2).flatten(0, 1)).unflatten(-1, (rows, t))
        return (half @ self.right.unsqueeze(-1)).squeeze(-1).unflatten(-1, lead)


@dataclass(frozen=True)
class RecomputedFeatures(Features):
    """κ(x) that is made when it is used, and made anew for the backward pass: of a product with ψ only x and ψ are kept.

    Attributes:
        make: κ, a function of x and the tensors.
        x: the inputs.
        tensors: what else κ is made of; no gradient is passed on to them.
        width: D.
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
        made: Tensor = RecomputedProduct.apply(self.make, matrix, self.x, *self.tensors)
        return made

    def total(self) -> Tensor:
        return self.dense().sum(-1)

    def square_norm(self) -> Tensor:
        return self.dense().square().sum(-1)

    def moments(self) -> tuple[Tensor, Tensor]:
        return DenseFeatures(self.dense()).moments()

    def kept(self) -> Features:
        return DenseFeatures(self.dense())


class RecomputedProduct(OwnDerivatives):
    """κ(x) Mᵀ, for which κ(x) is made in the forward and again in the backward pass, some rows at a time.

    Blocks of rows take the same memory again and again, which a new array of all of κ(x) has to be given by the system: of
    784 inputs, 50 intervals and 1,024 rows a training step takes 0.8 of the time that it takes with κ(x) kept, in one block 1.4.
    """

    @staticmethod
    def forward(make: Callable[..., Tensor], matrix: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        blocks = _blocks(x, matrix.shape[-1])
        made = [apply_matrix(make(block, *tensors), matrix) for block in blocks]
        return made[0] if len(made) == 1 else torch.cat(made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.make, *kept = inputs
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        matrix, x, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:3]
        each = gradient.to(matrix.dtype)  # under autocast products are of another type than both
        each = each.flatten(-2) if matrix.dim() == 3 else each
        rows = matrix.flatten(0, -2)
        # What is differentiated again is made at once.
        blocks = (x,) if torch.is_grad_enabled() else _blocks(x, matrix.shape[-1])
        of_matrix, of_x = None, []
        parts = each.split([len(block) for block in blocks]) if len(blocks) > 1 else (each,)
        for block, part in zip(blocks, parts, strict=True):
            if wanted[1]:
                made: Any = torch.func.vjp(lambda inputs: ctx.make(inputs, *tensors), block)
                values, pull = made
                of_x += pull((part @ rows).to(values.dtype))
            else:
                values = ctx.make(block, *tensors)
            if wanted[0]:
                product = part.reshape(-1, len(rows)).mT @ values.reshape(-1, values.shape[-1]).to(part.dtype)
                of_matrix = product if of_matrix is None else of_matrix.add_(product)
        return (
            None,
            None if of_matrix is None else of_matrix.reshape(matrix.shape),
            torch.cat(of_x) if len(of_x) > 1 else of_x[0] if of_x else None,
            *[None] * len(tensors),
        )

    @staticmethod
    def moved(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        matrix, x, *tensors = values
        _, of_matrix, of_x, *_ = tangents
        return _moved_product(lambda inputs: ctx.make(inputs, *tensors), matrix, x, of_matrix, of_x)


def _moved_product(
    make: Callable[[Tensor], Tensor], matrix: Tensor, x: Tensor, of_matrix: Tensor | None, of_x: Tensor | None
) -> Tensor:
    """Return the derivative of make(x) Mᵀ along tangents of both, by two reverse passes: torch does not nest forward ones."""
    first: Any = torch.func.vjp(make, x)
    values, pull = first
    second: Any = torch.func.vjp(lambda gradient: pull(gradient)[0], torch.zeros_like(values))
    (slopes,) = second[1](torch.zeros_like(x) if of_x is None else of_x)
    made = apply_matrix(slopes, matrix)
    return made if of_matrix is None else made + apply_matrix(values, of_matrix)


BLOCK = 2**20
"""Numbers of κ(x) that are made at a time where it is not kept."""


def _blocks(x: Tensor, columns: int) -> tuple[Tensor, ...]:
    """Return inputs in blocks of rows of which κ(x) has about `BLOCK` numbers."""
    if x.dim() < 2 or x.shape[0] == 0:
        return (x,)
    return x.split(max(1, BLOCK // max(1, columns * x.shape[1:-1].numel())))


@dataclass(frozen=True)
class PairFeatures(Features):
    """κ(x) = [x, all x_i x_j with i ≤ j], those of two inputs times √2: made some columns at a time, and not kept.

    As `[x₁x₁, x₁x₂, …, x₁x_m, x₂x₂, x₂x₃, …]`, so that the products with one input are consecutive.
    """

    x: Tensor

    @property
    def columns(self) -> int:
        m = self.x.shape[-1]
        return m + m * (m + 1) // 2

    def dense(self) -> Tensor:
        return with_pairs(self.x)

    def matmul(self, matrix: Tensor) -> Tensor:
        made: Tensor = _PairProduct.apply(matrix, self.x)
        return made

    def total(self) -> Tensor:
        # Σ_i x_i + Σ_i x_i² + √2 Σ_{i<j} x_i x_j
        x = _wide(self.x)
        total, square = x.sum(-1), x.square().sum(-1)
        return (total + square + (total.square() - square) * math.sqrt(0.5)).to(self.x.dtype)

    def square_norm(self) -> Tensor:
        # Σ_i x_i² + (Σ_i x_i²)²: the weights of the products make them as long as all m² of them.
        square = _wide(self.x).square().sum(-1)
        return (square + square.square()).to(self.x.dtype)

    def moments(self) -> tuple[Tensor, Tensor]:
        # The sums over all columns are beyond float16 where their means are not.
        return Features.moments(replace(self, x=_wide(self.x)))

    def kept(self) -> Features:
        return DenseFeatures(self.dense())


def with_pairs(x: Tensor) -> Tensor:
    """Return [x, all x_i x_j with i ≤ j], those of two inputs times √2, by operations that torch differentiates."""
    m = x.shape[-1]
    rows, columns = torch.triu_indices(m, m, device=x.device).unbind(0)
    # In the type of x: two Python numbers would make it float32.
    scale = torch.where(rows == columns, x.new_ones(()), x.new_full((), math.sqrt(2)))
    return torch.cat((x, x[..., rows] * x[..., columns] * scale), -1)


def _formed_pair_product(matrix: Tensor, x: Tensor) -> Tensor:
    return apply_matrix(with_pairs(x), matrix)


class _PairProduct(OwnDerivatives):
    """κ(x) Mᵀ for `PairFeatures`, of which a block of columns exists at a time, in the forward and again in the backward pass.

    For 784 inputs, 64 outputs and 64 rows a training step takes a quarter of the time that it takes with κ(x) formed.
    """

    @staticmethod
    def forward(matrix: Tensor, x: Tensor) -> Tensor:
        inputs, rows = x.reshape(-1, x.shape[-1]).mT.contiguous(), matrix.flatten(0, -2)
        product = rows[:, : x.shape[-1]] @ inputs  # of another type than both under autocast
        made = _wide(product)
        for _, columns, _, block in _pair_blocks(inputs):
            if made.dtype == inputs.dtype == product.dtype:
                made.addmm_(rows[:, columns], block)
            else:
                made += rows[:, columns] @ block
        # Contiguous, as the forward derivative is.
        return made.mT.reshape(*x.shape[:-1], *matrix.shape[:-1]).to(product.dtype).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        matrix, x = ctx.saved_tensors
        if torch.is_grad_enabled():  # what is differentiated again is made at once
            made: Any = torch.func.vjp(_formed_pair_product, matrix, x)
            of_both: tuple[Tensor, Tensor] = made[1](gradient.to(made[0].dtype))
            return of_both
        m = x.shape[-1]
        inputs, rows = x.reshape(-1, m).mT.contiguous(), matrix.flatten(0, -2)
        each = gradient.to(matrix.dtype).reshape(-1, len(rows)).mT.contiguous()
        of_matrix = of_x = None
        if ctx.needs_input_grad[0]:
            of_matrix = torch.empty_like(rows)
            torch.mm(each, inputs.mT, out=of_matrix[:, :m])
        if ctx.needs_input_grad[1]:
            of_x = _wide(rows[:, :m].mT @ each)
            doubled = inputs * math.sqrt(2)
        for first, columns, squares, block in _pair_blocks(inputs):
            if of_matrix is not None:
                torch.mm(each, block.mT, out=of_matrix[:, columns])
            if of_x is not None:
                of_block = rows[:, columns].mT @ each
                own = slice(first, first + len(squares))
                of_x[own].addcmul_(of_block[squares], inputs[own], value=2)
                of_block[squares] = 0
                for two, rest, part in _products(first, of_block, m):
                    of_x[two] += (part * doubled[rest]).sum(1)
                    of_x[rest] += (part * doubled[two, None]).sum(0)
        return (
            None if of_matrix is None else of_matrix.reshape(matrix.shape),
            None if of_x is None else of_x.mT.reshape(x.shape).to(x.dtype),
        )

    @staticmethod
    def moved(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        return _moved_product(with_pairs, *values, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, matrix: Tensor, x: Tensor) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            return _PairProduct.apply(matrix, x.movedim(in_dims[1], 0)), 0
        made: Tensor = torch.func.vmap(_formed_pair_product, in_dims)(matrix, x)
        return made, 0


def _pair_blocks(x: Tensor) -> Iterator[tuple[int, slice, list[int], Tensor]]:
    """Yield blocks of products `(width, B)` of inputs `(m, B)`.

    Each is the input that it begins with, its columns in κ, the places of squares in it, and the block.
    All blocks are made in the same memory. A row of it is a column of κ: so it is written, and multiplied, without gaps.
    """
    m, count = x.shape
    # Products with few columns of ψ at a time cost more than the memory of four blocks saves.
    at_once = max(2, 4 * BLOCK // max(1, count * m) // 2 * 2)
    memory = x.new_empty(min(at_once * m, m * (m + 1) // 2), count)
    doubled = x * math.sqrt(2)
    begin = m
    for first in range(0, m, at_once):
        last = min(m, first + at_once)
        # The products with one input begin with its square, and are one fewer than those with the input before.
        squares = list(itertools.accumulate(range(m - first, m - last, -1), initial=0))
        width = squares.pop()
        block = memory[:width]
        for two, rest, part in _products(first, block, m):
            torch.mul(doubled[rest], x[two, None], out=part)
        block[squares] = x[first:last].square()
        yield first, slice(begin, begin + width), squares, block
        begin += width


def _products(first: int, block: Tensor, m: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the products of two inputs each in a block, `(2, r, B)`: those two, the r inputs after the first of them, a view.

    Of the products of inputs i and i + 1 those with inputs after i are consecutive: x_i x_{i+1}, …, x_i x_m, x_{i+1}², …,
    x_{i+1} x_m. One of them is a square.
    """
    start, i = 0, first
    while start < len(block) and i + 1 < m:
        length = m - i - 1
        yield slice(i, i + 2), slice(i + 1, m), block[start + 1 : start + 1 + 2 * length].unflatten(0, (2, length))
        start, i = start + 1 + 2 * length, i + 2


@dataclass(frozen=True)
class ConcatenatedFeatures(Features):
    """κ(x) = [κ₁(x), κ₂(x), …]."""

    parts: tuple[Features, ...]

    @property
    def sizes(self) -> list[int]:
        """Return the number of columns of each part."""
        return [part.columns for part in self.parts]

    @property
    def columns(self) -> int:
        return sum(self.sizes)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], -1)

    def structured(self) -> Features:
        return ConcatenatedFeatures(tuple(part.structured() for part in self.parts))

    @property
    def sparse(self) -> bool:
        return any(part.sparse for part in self.parts)

    def matmul(self, matrix: Tensor) -> Tensor:
        return add(part.matmul(piece) for part, piece in zip(self.parts, matrix.split(self.sizes, -1), strict=True))

    def total(self) -> Tensor:
        return add(part.total() for part in self.parts)

    def square_norm(self) -> Tensor:
        return add(part.square_norm() for part in self.parts)

    def moments(self) -> tuple[Tensor, Tensor]:
        shares = [size / self.columns for size in self.sizes]
        moments = [part.moments() for part in self.parts]
        mean = add(share * own for share, (own, _) in zip(shares, moments, strict=True))
        within_and_between = (variance + (own - mean).square() for own, variance in moments)
        return mean, add(share * each for share, each in zip(shares, within_and_between, strict=True))

    def kept(self) -> Features:
        return ConcatenatedFeatures(tuple(part.kept() for part in self.parts))


@dataclass(frozen=True)
class NormalizedFeatures(Features):
    """(κ(x) + shift) · scale, one shift and scale a row, `(..., 1)`: a layer norm that leaves the structure of κ alone."""

    base: Features
    shift: Tensor
    scale: Tensor

    @property
    def columns(self) -> int:
        return self.base.columns

    def dense(self) -> Tensor:
        values = self.base.dense()
        return ((values + self.shift) * self.scale).to(values.dtype)

    def structured(self) -> Features:
        return replace(self, base=self.base.structured())

    @property
    def sparse(self) -> bool:
        return self.base.sparse

    def matmul(self, matrix: Tensor) -> Tensor:
        return self.adjust(self.base.matmul(matrix), matrix.sum(-1))

    def adjust(self, product: Tensor, row_sums: Tensor) -> Tensor:
        """Return what a product with `base` becomes: (product + shift · row sums of the weights) · scale."""
        shift, scale = self.shift, self.scale
        if row_sums.dim() > 1:
            shift, scale = shift.unsqueeze(-1), scale.unsqueeze(-1)
        return ((product + shift * row_sums) * scale).to(product.dtype)

    def total(self) -> Tensor:
        total = self.base.total()
        return ((total + self.shift.squeeze(-1) * self.columns) * self.scale.squeeze(-1)).to(total.dtype)

    def square_norm(self) -> Tensor:
        shift, scale = self.shift.squeeze(-1), self.scale.squeeze(-1)
        norm = self.base.square_norm()
        square = norm + 2 * shift * self.base.total() + self.columns * shift.square()
        return (square * scale.square()).to(norm.dtype)

    def moments(self) -> tuple[Tensor, Tensor]:
        mean, variance = self.base.moments()
        return (mean + self.shift) * self.scale, variance * self.scale.square()

    def kept(self) -> Features:
        return NormalizedFeatures(self.base.kept(), self.shift, self.scale)


# ------------------------------------------------------------------------------------------------ sparse inputs

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
    made = _wide(gradient.new_zeros(columns, gradient.shape[1]))
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
    def moved(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> tuple[None, None, None]:
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
    def moved(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        moved: Tensor = _SparseProduct.apply(tangents[0], ctx.forwards, *values, ctx.columns)
        return moved

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
        wide = _wide(entries)
        made = wide.new_zeros(self.starts.shape[0] - 1, *entries.shape[1:]).index_add(0, self.rows(), wide)
        return made.to(entries.dtype)

    def grouped(self, groups: Tensor, count: int) -> Tensor:
        """Return the sums of the entries of each of so many groups, `(rows, count)`, for the group of each entry."""
        values = _wide(self.values)
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
        return self.sums(_wide(self.values).square()).to(self.values.dtype)

    def moments(self) -> tuple[Tensor, Tensor]:
        values = _wide(self.values)
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

    def halves(self) -> tuple[Features, Features]:
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


def add(terms: object) -> Tensor:
    """Return the sum of tensors without the zero that `sum` begins with."""
    result: Tensor | None = None
    for term in terms:  # type: ignore[attr-defined]
        result = term if result is None else result + term
    if result is None:
        raise SpecError("nothing to add: there are no parts")
    return result
