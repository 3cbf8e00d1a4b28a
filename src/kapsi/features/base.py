"""Expanded inputs κ(x) as small immutable structures: dense, concatenated and normalized ones.

`dense()` defines the meaning of a structure; every other method is a cheaper way to the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.derivatives import layer_norm
from kapsi.errors import SpecError

__all__ = [
    "LARGEST_FORMED",
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

LARGEST_FORMED = 2**24
"""Columns of the widest κ(x) that the package forms by itself: 16.7 million, 64 MiB a row in float32."""


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
        mean = widen(self.total()).unsqueeze(-1) / self.columns
        # The difference of two means goes below zero by rounding where κ is nearly constant.
        return mean, (widen(self.square_norm()).unsqueeze(-1) / self.columns - mean.square()).clamp_min(0)

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

    def materialize(self) -> Features:
        """Return the same for many uses: what would be made anew in each is made once."""
        return self


def widen(values: Tensor) -> Tensor:
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


def add(terms: object) -> Tensor:
    """Return the sum of tensors without the zero that `sum` begins with."""
    result: Tensor | None = None
    for term in terms:  # type: ignore[attr-defined]
        result = term if result is None else result + term
    if result is None:
        raise SpecError("nothing to add: there are no parts")
    return result


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
        mean = add(share * own for share, (own, _) in zip(shares, moments, strict=True))
        within_and_between = (variance + (own - mean).square() for own, variance in moments)
        return mean, add(share * each for share, each in zip(shares, within_and_between, strict=True))

    def materialize(self) -> Features:
        return ConcatenatedFeatures(tuple(part.materialize() for part in self.parts))


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

    def materialize(self) -> Features:
        return NormalizedFeatures(self.base.materialize(), self.shift, self.scale)
