"""Expanded inputs κ(x) as small immutable structures: dense, concatenated and normalized ones.

`dense()` defines the meaning of a structure; every other method is a cheaper way to the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.derivatives import layer_norm
from kapsi.errors import DataError, SpecError

__all__ = [
    "MAX_MATERIALIZED",
    "ConcatenatedFeatures",
    "DenseFeatures",
    "Features",
    "NormalizedFeatures",
    "add",
    "apply_matrix",
    "check_formed",
    "formed",
    "widen",
]

MAX_MATERIALIZED = 2**24
"""Columns of the widest κ(x) materialized automatically: 16.7 million, 64 MiB per row in float32."""


class Features(ABC):
    """κ(x) of shape `(..., D)`."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Return D."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return κ(x) materialized, `(..., D)`."""

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
        # Always with a trailing axis: the derivatives of 0-dimensional tensors lose their type.
        mean = widen(self.total()).unsqueeze(-1) / self.columns
        # Rounding can make the difference negative if κ is nearly constant.
        return mean, (widen(self.square_norm()).unsqueeze(-1) / self.columns - mean.square()).clamp_min(0)

    def structured(self) -> Features:
        """Return the same κ(x), used by structure whatever the sizes."""
        return self

    @property
    def sparse(self) -> bool:
        """Return whether most columns of a row are zero and not stored; a sparse κ(x) is not materialized automatically."""
        return False

    def normalized(self, epsilon: float) -> Features:
        """Return the layer norm of κ(x) without affine part: (κ − mean) / √(variance + ε), over the columns."""
        mean, variance = self.moments()
        return NormalizedFeatures(self, -mean, torch.rsqrt(variance + epsilon))

    def materialize(self) -> Features:
        """Return the same κ(x) for many uses, with recomputed parts computed once."""
        return self


def widen(values: Tensor) -> Tensor:
    """Return 16-bit values as float32, for the digits of means, variances and layer norms."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def formed(features: Features, why: str) -> Tensor:
    """Return κ(x) materialized, for operations without a structured form.

    Raises:
        SpecError: κ has more than `MAX_MATERIALIZED` columns.
        DataError: κ is sparse.
    """
    if features.sparse:
        raise DataError(
            f"{why} needs κ(x) materialized, and sparse inputs are not; use x.to_dense(), or a reconciliation that gathers columns "
            "(low_rank, khatri_rao, random_adaption, dense, and the Kronecker kinds)"
        )
    check_formed(features.columns, why)
    return features.dense()


def check_formed(columns: int, why: str) -> None:
    """Raise a `SpecError` if κ(x) has too many columns to be materialized automatically."""
    if columns > MAX_MATERIALIZED:
        raise SpecError(
            f"{why} needs κ(x) materialized, {columns:,} columns per row; at most {MAX_MATERIALIZED:,} are allowed; "
            "choose a reconciliation with the structure of κ (low_rank, kronecker on the natural grid) or a smaller expansion"
        )


def apply_matrix(values: Tensor, matrix: Tensor) -> Tensor:
    """Return values Mᵀ, `(..., k)` or `(..., c, k)`, for a matrix `(k, D)`, or matrices by channel `(c, k, D)`."""
    if matrix.dim() == 2:
        return F.linear(values, matrix)
    return F.linear(values, matrix.flatten(0, 1)).unflatten(-1, matrix.shape[:2])


def add(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor, without the initial zero of `sum`."""
    total: Tensor | None = None
    for term in terms:
        total = term if total is None else total + term
    return cast(Tensor, total)


@dataclass(frozen=True)
class DenseFeatures(Features):
    """κ(x) materialized."""

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
        values = widen(self.values)
        mean = values.mean(-1, keepdim=True)
        return mean, (values - mean).square().mean(-1, keepdim=True)

    def normalized(self, epsilon: float) -> Features:
        return DenseFeatures(layer_norm(self.values, epsilon))


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
        mean = add(share * part_mean for share, (part_mean, _) in zip(shares, moments, strict=True))
        within_and_between = (variance + (part_mean - mean).square() for part_mean, variance in moments)
        return mean, add(share * part for share, part in zip(shares, within_and_between, strict=True))

    def materialize(self) -> Features:
        return ConcatenatedFeatures(tuple(part.materialize() for part in self.parts))


@dataclass(frozen=True)
class NormalizedFeatures(Features):
    """(κ(x) + shift) · scale with a shift and a scale per row, `(..., 1)`: a layer norm that keeps the structure of κ."""

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
        """Return the product with weights from the product with `base`: (product + shift · row sums) · scale."""
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

    def materialize(self) -> Features:
        return NormalizedFeatures(self.base.materialize(), self.shift, self.scale)
