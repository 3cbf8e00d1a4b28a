"""Weights ψ(w) as small immutable structures; `dense()` defines the meaning, `(channels, n, D)`.

Tensors have a leading channel axis in heads with several channels only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kapsi.features import Features, add


class Weights(ABC):
    """ψ(w) of shape `(n, D)`, or `(channels, n, D)`."""

    @property
    @abstractmethod
    def channels(self) -> int | None:
        """Return the number of channels, None without a channel axis."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Return D."""

    @property
    def outputs(self) -> int:
        """Return n."""
        return self.row_sums().shape[-1]

    @abstractmethod
    def matrix(self) -> Tensor:
        """Return ψ(w) materialized, `(n, D)` or `(channels, n, D)`."""

    @abstractmethod
    def row_sums(self) -> Tensor:
        """Return the sums over the columns, `(n)` or `(channels, n)`."""

    def dense(self) -> Tensor:
        """Return ψ(w) materialized, `(channels, n, D)`."""
        matrix = self.matrix()
        return matrix.unsqueeze(0) if self.channels is None else matrix

    def merged(self) -> Weights:
        """Return weights equal to the sum of the channels, with fewer or no channels if cheap."""
        return self

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:
        """Return the weights of consecutive blocks of columns, None if the blocks have no structure."""
        return None

    def matmul(self, values: Tensor) -> Tensor:
        """Return ψ(w) V for columns V `(..., D, s)`, or `(..., channels, D, s)` with a channel axis."""
        return self.matrix() @ values

    @property
    def can_stack(self) -> bool:
        """Return whether the stacked tensors of equal heads are the channels of one head, that is, only tensors differ.

        False by default: weights of third parties may differ by channel in more than tensors, as a hypernet's do.
        """
        return False


@dataclass(frozen=True)
class DenseWeights(Weights):
    """ψ(w) = W."""

    values: Tensor

    can_stack = True

    @property
    def channels(self) -> int | None:
        return None if self.values.dim() == 2 else self.values.shape[0]

    @property
    def columns(self) -> int:
        return self.values.shape[-1]

    @property
    def outputs(self) -> int:
        return self.values.shape[-2]

    def matrix(self) -> Tensor:
        return self.values

    def row_sums(self) -> Tensor:
        return self.values.sum(-1)

    def merged(self) -> Weights:
        return self if self.channels is None else DenseWeights(self.values.sum(0))

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:
        return [DenseWeights(piece) for piece in self.values.split(list(sizes), -1)]


@dataclass(frozen=True)
class LowRankWeights(Weights):
    """ψ(w) = A Bᵀ with `left` A `(n, r)` and `right` Bᵀ `(r, D)`."""

    left: Tensor
    right: Tensor

    can_stack = True

    @property
    def channels(self) -> int | None:
        return None if self.left.dim() == 2 else self.left.shape[0]

    @property
    def columns(self) -> int:
        return self.right.shape[-1]

    @property
    def outputs(self) -> int:
        return self.left.shape[-2]

    def matrix(self) -> Tensor:
        return self.left @ self.right

    def row_sums(self) -> Tensor:
        return (self.left @ self.right.sum(-1, keepdim=True)).squeeze(-1)

    def matmul(self, values: Tensor) -> Tensor:
        return self.left @ (self.right @ values)

    def merged(self) -> Weights:
        if self.channels is None:
            return self
        # Σ_c A_c B_cᵀ = [A₁ A₂ …] [B₁ B₂ …]ᵀ: one factor of rank channels · r.
        return LowRankWeights(self.left.transpose(0, 1).flatten(1), self.right.flatten(0, 1))

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:
        return [LowRankWeights(self.left, piece) for piece in self.right.split(list(sizes), -1)]


@dataclass(frozen=True)
class KhatriRaoWeights(Weights):
    """ψ(w) = A (C ⊙ B), row r of C ⊙ B being c_r ⊗ b_r: A `(n, r)`, C `(r, q)`, B `(r, t)`; D = q·t."""

    left: Tensor
    first: Tensor
    second: Tensor

    can_stack = True

    @property
    def channels(self) -> int | None:
        return None if self.left.dim() == 2 else self.left.shape[0]

    @property
    def columns(self) -> int:
        return self.first.shape[-1] * self.second.shape[-1]

    @property
    def outputs(self) -> int:
        return self.left.shape[-2]

    @property
    def grid(self) -> tuple[int, int]:
        """Return (q, t)."""
        return self.first.shape[-1], self.second.shape[-1]

    def matrix(self) -> Tensor:
        return self.left @ (self.first.unsqueeze(-1) * self.second.unsqueeze(-2)).flatten(-2)

    def row_sums(self) -> Tensor:
        sums = self.first.sum(-1, keepdim=True) * self.second.sum(-1, keepdim=True)
        return (self.left @ sums).squeeze(-1)

    def merged(self) -> Weights:
        if self.channels is None:
            return self
        left = self.left.transpose(0, 1).flatten(1)
        return KhatriRaoWeights(left, self.first.flatten(0, 1), self.second.flatten(0, 1))

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:
        if self.first.shape[-1] != 1:
            return None
        return [KhatriRaoWeights(self.left, self.first, piece) for piece in self.second.split(list(sizes), -1)]


@dataclass(frozen=True)
class KroneckerWeights(Weights):
    """ψ(w) = A ⊗ B with weights A `(p, q)` and B `(s, t)`; n = p·s, D = q·t."""

    left: Weights
    right: Weights

    @property
    def channels(self) -> int | None:
        return self.left.channels

    @property
    def columns(self) -> int:
        return self.left.columns * self.right.columns

    @property
    def outputs(self) -> int:
        return self.left.outputs * self.right.outputs

    @property
    def grid(self) -> tuple[int, int]:
        """Return (q, t), the columns of A and of B."""
        return self.left.columns, self.right.columns

    def matrix(self) -> Tensor:
        product = torch.einsum("...pq,...st->...psqt", self.left.matrix(), self.right.matrix())
        return product.flatten(-2).flatten(-3, -2)

    def row_sums(self) -> Tensor:
        return (self.left.row_sums().unsqueeze(-1) * self.right.row_sums().unsqueeze(-2)).flatten(-2)

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:
        pieces = self.right.split(sizes) if self.left.columns == 1 else None
        return None if pieces is None else [KroneckerWeights(self.left, piece) for piece in pieces]

    @property
    def can_stack(self) -> bool:
        return self.left.can_stack and self.right.can_stack


@dataclass(frozen=True)
class SumWeights(Weights):
    """ψ(w) = ψ₁(w) + ψ₂(w) + …, weights of equal shape."""

    parts: tuple[Weights, ...]

    @property
    def channels(self) -> int | None:
        return self.parts[0].channels

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    @property
    def outputs(self) -> int:
        return self.parts[0].outputs

    def matrix(self) -> Tensor:
        return add(part.matrix() for part in self.parts)

    def row_sums(self) -> Tensor:
        return add(part.row_sums() for part in self.parts)

    def matmul(self, values: Tensor) -> Tensor:
        return add(part.matmul(values) for part in self.parts)

    def merged(self) -> Weights:
        return SumWeights(tuple(part.merged() for part in self.parts))

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:
        pieces = [part.split(sizes) for part in self.parts]
        if any(piece is None for piece in pieces):
            return None
        return [SumWeights(column) for column in zip(*(piece or [] for piece in pieces), strict=True)]

    @property
    def can_stack(self) -> bool:
        return all(part.can_stack for part in self.parts)


@dataclass(frozen=True)
class EyeWeights(Weights):
    """ψ(w) = c·I, `value` c `()` or `(channels,)`; n = D."""

    value: Tensor
    size: int

    can_stack = True

    @property
    def channels(self) -> int | None:
        return None if self.value.dim() == 0 else self.value.shape[0]

    @property
    def columns(self) -> int:
        return self.size

    @property
    def outputs(self) -> int:
        return self.size

    def matrix(self) -> Tensor:
        eye = torch.eye(self.size, dtype=self.value.dtype, device=self.value.device)
        return self.value[..., None, None] * eye

    def row_sums(self) -> Tensor:
        return self.value.unsqueeze(-1).expand(*self.value.shape, self.size)

    def matmul(self, values: Tensor) -> Tensor:
        return self.value[..., None, None] * values

    def merged(self) -> Weights:
        return self if self.channels is None else EyeWeights(self.value.sum(0), self.size)


@dataclass(frozen=True)
class ConstantWeights(Weights):
    """ψ(w) = c · 1: all entries equal `value`, `()` or `(channels,)`."""

    value: Tensor
    rows: int
    width: int

    can_stack = True

    @property
    def channels(self) -> int | None:
        return None if self.value.dim() == 0 else self.value.shape[0]

    @property
    def columns(self) -> int:
        return self.width

    @property
    def outputs(self) -> int:
        return self.rows

    def matrix(self) -> Tensor:
        return self.value[..., None, None].expand(*self.value.shape, self.rows, self.width)

    def row_sums(self) -> Tensor:
        return (self.value * self.width).unsqueeze(-1).expand(*self.value.shape, self.rows)

    def merged(self) -> Weights:
        return self if self.channels is None else ConstantWeights(self.value.sum(0), self.rows, self.width)

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:
        return [ConstantWeights(self.value, self.rows, size) for size in sizes]

    def matmul(self, values: Tensor) -> Tensor:
        total = self.value[..., None, None] * values.sum(-2, keepdim=True)
        return total.expand(*total.shape[:-2], self.rows, total.shape[-1])


class ActingWeights(Weights):
    """Weights that define their product with κ(x), for reconciliations without a rule in `contract`."""

    @abstractmethod
    def act(self, features: Features) -> Tensor:
        """Return ⟨κ(x), ψ(w)⟩, `(..., n)`, or `(..., channels, n)` with a channel axis."""

    def passes(self, features: Features) -> float:
        """Return the work of `act` over its work on the meta device, if one pass there stands for many alike."""
        return 1.0

    @abstractmethod
    def describe(self, features: Features) -> str:
        """Return a human-readable description of the action."""
