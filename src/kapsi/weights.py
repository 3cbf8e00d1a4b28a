"""What ψ returns: weights as small immutable structures. `dense()` is their meaning, `(channels, n, D)`.

Tensors carry a leading channel axis only where a head has several channels; one channel has none to index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ConstantWeights", "DenseWeights", "KroneckerWeights", "LowRankWeights", "Weights"]


class Weights(ABC):
    """ψ(w) of shape `(n, D)`, or `(channels, n, D)`."""

    @property
    @abstractmethod
    def channels(self) -> int | None:
        """Return the number of channels, None where there is no channel axis."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Return D."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Return ψ(w) itself, `(n, D)` or `(channels, n, D)`."""

    @abstractmethod
    def row_sums(self) -> Tensor:
        """Return the sums over the columns, `(n)` or `(channels, n)`."""

    def dense(self) -> Tensor:
        """Return ψ(w) itself, `(channels, n, D)`."""
        matrix = self.matrix()
        return matrix.unsqueeze(0) if self.channels is None else matrix

    def merged(self) -> Weights:
        """Return weights that act as the sum of the channels, with fewer or no channels where that is cheap."""
        return self

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:
        """Return the weights of consecutive blocks of columns, or None where they have no structure of their own."""
        return None


@dataclass(frozen=True)
class DenseWeights(Weights):
    """ψ(w) = W."""

    values: Tensor

    @property
    def channels(self) -> int | None:  # noqa: D102
        return None if self.values.dim() == 2 else self.values.shape[0]

    @property
    def columns(self) -> int:  # noqa: D102
        return self.values.shape[-1]

    def matrix(self) -> Tensor:  # noqa: D102
        return self.values

    def row_sums(self) -> Tensor:  # noqa: D102
        return self.values.sum(-1)

    def merged(self) -> Weights:  # noqa: D102
        return self if self.channels is None else DenseWeights(self.values.sum(0))

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:  # noqa: D102
        return [DenseWeights(piece) for piece in self.values.split(list(sizes), -1)]


@dataclass(frozen=True)
class LowRankWeights(Weights):
    """ψ(w) = A Bᵀ with `left` A `(n, r)` and `right` Bᵀ `(r, D)`."""

    left: Tensor
    right: Tensor

    @property
    def channels(self) -> int | None:  # noqa: D102
        return None if self.left.dim() == 2 else self.left.shape[0]

    @property
    def columns(self) -> int:  # noqa: D102
        return self.right.shape[-1]

    def matrix(self) -> Tensor:  # noqa: D102
        return self.left @ self.right

    def row_sums(self) -> Tensor:  # noqa: D102
        return (self.left @ self.right.sum(-1, keepdim=True)).squeeze(-1)

    def merged(self) -> Weights:  # noqa: D102
        if self.channels is None:
            return self
        # Σ_c A_c B_cᵀ = [A₁ A₂ …] [B₁ B₂ …]ᵀ: one factor of rank channels · r.
        return LowRankWeights(self.left.transpose(0, 1).flatten(1), self.right.flatten(0, 1))

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:  # noqa: D102
        return [LowRankWeights(self.left, piece) for piece in self.right.split(list(sizes), -1)]


@dataclass(frozen=True)
class KroneckerWeights(Weights):
    """ψ(w) = A ⊗ B with A `(p, q)` and B `(s, t)`, each dense or of low rank; n = p·s, D = q·t."""

    left: DenseWeights | LowRankWeights
    right: DenseWeights | LowRankWeights

    @property
    def channels(self) -> int | None:  # noqa: D102
        return self.left.channels

    @property
    def columns(self) -> int:  # noqa: D102
        return self.left.columns * self.right.columns

    @property
    def grid(self) -> tuple[int, int]:
        """Return (q, t), the columns of A and of B."""
        return self.left.columns, self.right.columns

    def matrix(self) -> Tensor:  # noqa: D102
        product = torch.einsum("...pq,...st->...psqt", self.left.matrix(), self.right.matrix())
        return product.flatten(-2).flatten(-3, -2)

    def row_sums(self) -> Tensor:  # noqa: D102
        return (self.left.row_sums().unsqueeze(-1) * self.right.row_sums().unsqueeze(-2)).flatten(-2)

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:  # noqa: D102
        if self.left.columns != 1:
            return None
        pieces = self.right.split(sizes) or []
        return [
            KroneckerWeights(self.left, piece) for piece in pieces if isinstance(piece, DenseWeights | LowRankWeights)
        ]


@dataclass(frozen=True)
class ConstantWeights(Weights):
    """ψ(w) = c · 1: every entry is the same `value`, `()` or `(channels,)`."""

    value: Tensor
    rows: int
    width: int

    @property
    def channels(self) -> int | None:  # noqa: D102
        return None if self.value.dim() == 0 else self.value.shape[0]

    @property
    def columns(self) -> int:  # noqa: D102
        return self.width

    def matrix(self) -> Tensor:  # noqa: D102
        return self.value[..., None, None].expand(*self.value.shape, self.rows, self.width)

    def row_sums(self) -> Tensor:  # noqa: D102
        return (self.value * self.width).unsqueeze(-1).expand(*self.value.shape, self.rows)

    def merged(self) -> Weights:  # noqa: D102
        return self if self.channels is None else ConstantWeights(self.value.sum(0), self.rows, self.width)

    def split(self, sizes: Sequence[int]) -> list[Weights] | None:  # noqa: D102
        return [ConstantWeights(self.value, self.rows, size) for size in sizes]
