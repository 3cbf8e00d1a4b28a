"""What κ returns: expanded inputs as small immutable structures. `dense()` is their meaning, the rest a cheaper way to act."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError

__all__ = ["ConcatenatedFeatures", "DenseFeatures", "Features", "NormalizedFeatures", "ProductFeatures", "formed"]

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
        mean = _wide(self.total()).unsqueeze(-1) / self.columns
        # The difference of two means goes below zero by rounding where κ is nearly constant.
        return mean, (_wide(self.square_norm()).unsqueeze(-1) / self.columns - mean.square()).clamp_min(0)

    def normalized(self, epsilon: float) -> Features:
        """Return the layer norm of κ(x) without affine part: (κ − mean) / √(variance + ε), over the columns."""
        mean, variance = self.moments()
        return NormalizedFeatures(self, -mean, torch.rsqrt(variance + epsilon))


def _wide(values: Tensor) -> Tensor:
    """Return 16-bit values as float32: their means and variances, and what cancels in a layer norm, need the digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def formed(features: Features, why: str) -> Tensor:
    """Return κ(x) itself where no structure helps, after a check of the size that is made.

    Raises:
        SpecError: κ has more than `LARGEST_FORMED` columns.
    """
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
    def columns(self) -> int:  # noqa: D102
        return self.values.shape[-1]

    def dense(self) -> Tensor:  # noqa: D102
        return self.values

    def matmul(self, matrix: Tensor) -> Tensor:  # noqa: D102
        return apply_matrix(self.values, matrix)

    def total(self) -> Tensor:  # noqa: D102
        return self.values.sum(-1)

    def square_norm(self) -> Tensor:  # noqa: D102
        return self.values.square().sum(-1)

    def moments(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        values = _wide(self.values)
        mean = values.mean(-1, keepdim=True)
        return mean, (values - mean).square().mean(-1, keepdim=True)

    def normalized(self, epsilon: float) -> Features:  # noqa: D102
        return DenseFeatures(F.layer_norm(self.values, self.values.shape[-1:], eps=epsilon))


@dataclass(frozen=True)
class ProductFeatures(Features):
    """κ(x) = u ⊗ v, the Kronecker product row by row of u `(..., q)` and v `(..., t)`; D = q·t."""

    left: Tensor
    right: Tensor

    @property
    def grid(self) -> tuple[int, int]:
        """Return (q, t), the columns of u and of v."""
        return self.left.shape[-1], self.right.shape[-1]

    def keeps(self, rows: int) -> bool:
        """Return whether a product with a matrix of so many rows makes less than κ itself."""
        return rows < max(self.grid)

    @property
    def columns(self) -> int:  # noqa: D102
        return self.left.shape[-1] * self.right.shape[-1]

    def dense(self) -> Tensor:  # noqa: D102
        return (self.left.unsqueeze(-1) * self.right.unsqueeze(-2)).flatten(-2)

    def matmul(self, matrix: Tensor) -> Tensor:  # noqa: D102
        lead, (q, t) = matrix.shape[:-1], self.grid
        rows = lead.numel()
        if not self.keeps(rows):  # κ is then the smallest array of the three
            return apply_matrix(self.dense(), matrix)
        grid = matrix.reshape(rows, q, t)
        if q <= 2 * t:  # contract v first: no copy of the matrix, rows × q values a row of x are kept
            half = F.linear(self.right, grid.flatten(0, 1)).unflatten(-1, (rows, q))
            return (half @ self.left.unsqueeze(-1)).squeeze(-1).unflatten(-1, lead)
        half = F.linear(self.left, grid.transpose(1, 2).flatten(0, 1)).unflatten(-1, (rows, t))
        return (half @ self.right.unsqueeze(-1)).squeeze(-1).unflatten(-1, lead)

    def total(self) -> Tensor:  # noqa: D102
        return self.left.sum(-1) * self.right.sum(-1)

    def square_norm(self) -> Tensor:  # noqa: D102
        return self.left.square().sum(-1) * self.right.square().sum(-1)

    def moments(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        # u ⊗ v − ū v̄ = (u − ū) ⊗ v + ū (v − v̄), whose two parts are orthogonal: no difference of large numbers.
        (left, left_variance), (right, right_variance) = (DenseFeatures(f).moments() for f in (self.left, self.right))
        return left * right, left_variance * (right_variance + right.square()) + left.square() * right_variance


@dataclass(frozen=True)
class ConcatenatedFeatures(Features):
    """κ(x) = [κ₁(x), κ₂(x), …]."""

    parts: tuple[Features, ...]

    @property
    def sizes(self) -> list[int]:
        """Return the number of columns of each part."""
        return [part.columns for part in self.parts]

    @property
    def columns(self) -> int:  # noqa: D102
        return sum(self.sizes)

    def dense(self) -> Tensor:  # noqa: D102
        return torch.cat([part.dense() for part in self.parts], -1)

    def matmul(self, matrix: Tensor) -> Tensor:  # noqa: D102
        return add(part.matmul(piece) for part, piece in zip(self.parts, matrix.split(self.sizes, -1), strict=True))

    def total(self) -> Tensor:  # noqa: D102
        return add(part.total() for part in self.parts)

    def square_norm(self) -> Tensor:  # noqa: D102
        return add(part.square_norm() for part in self.parts)

    def moments(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        shares = [size / self.columns for size in self.sizes]
        moments = [part.moments() for part in self.parts]
        mean = add(share * own for share, (own, _) in zip(shares, moments, strict=True))
        within_and_between = (variance + (own - mean).square() for own, variance in moments)
        return mean, add(share * each for share, each in zip(shares, within_and_between, strict=True))


@dataclass(frozen=True)
class NormalizedFeatures(Features):
    """(κ(x) + shift) · scale, one shift and scale a row, `(..., 1)`: a layer norm that leaves the structure of κ alone."""

    base: Features
    shift: Tensor
    scale: Tensor

    @property
    def columns(self) -> int:  # noqa: D102
        return self.base.columns

    def dense(self) -> Tensor:  # noqa: D102
        values = self.base.dense()
        return ((values + self.shift) * self.scale).to(values.dtype)

    def matmul(self, matrix: Tensor) -> Tensor:  # noqa: D102
        return self.adjust(self.base.matmul(matrix), matrix.sum(-1))

    def adjust(self, product: Tensor, row_sums: Tensor) -> Tensor:
        """Return what a product with `base` becomes: (product + shift · row sums of the weights) · scale."""
        shift, scale = self.shift, self.scale
        if row_sums.dim() > 1:
            shift, scale = shift.unsqueeze(-1), scale.unsqueeze(-1)
        return ((product + shift * row_sums) * scale).to(product.dtype)

    def total(self) -> Tensor:  # noqa: D102
        total = self.base.total()
        return ((total + self.shift.squeeze(-1) * self.columns) * self.scale.squeeze(-1)).to(total.dtype)

    def square_norm(self) -> Tensor:  # noqa: D102
        shift, scale = self.shift.squeeze(-1), self.scale.squeeze(-1)
        norm = self.base.square_norm()
        square = norm + 2 * shift * self.base.total() + self.columns * shift.square()
        return (square * scale.square()).to(norm.dtype)

    def moments(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        mean, variance = self.base.moments()
        return (mean + self.shift) * self.scale, variance * self.scale.square()


def add(terms: object) -> Tensor:
    """Return the sum of tensors without the zero that `sum` begins with."""
    result: Tensor | None = None
    for term in terms:  # type: ignore[attr-defined]
        result = term if result is None else result + term
    if result is None:
        raise SpecError("nothing to add: there are no parts")
    return result
