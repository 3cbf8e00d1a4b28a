"""Kronecker products κ(x) = u ⊗ v that act factor by factor."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

from kapsi.features.base import DenseFeatures, Features, apply_matrix

__all__ = ["OuterFeatures", "ProductFeatures"]


class OuterFeatures(Features):
    """κ(x) = u ⊗ v, the Kronecker product row by row of features u `(..., q)` and v `(..., t)`; D = q·t."""

    @abstractmethod
    def factors(self) -> tuple[Features, Features]:
        """Return u and v."""

    @property
    def grid(self) -> tuple[int, int]:
        """Return (q, t), the columns of u and of v."""
        left, right = self.factors()
        return left.columns, right.columns

    @property
    def columns(self) -> int:
        q, t = self.grid
        return q * t

    def total(self) -> Tensor:
        left, right = self.factors()
        return left.total() * right.total()

    def square_norm(self) -> Tensor:
        left, right = self.factors()
        return left.square_norm() * right.square_norm()

    def moments(self) -> tuple[Tensor, Tensor]:
        # u ⊗ v − ū v̄ = (u − ū) ⊗ v + ū (v − v̄) with orthogonal terms: no difference of large numbers.
        (left, left_variance), (right, right_variance) = (factor.moments() for factor in self.factors())
        return left * right, left_variance * (right_variance + right.square()) + left.square() * right_variance


@dataclass(frozen=True)
class ProductFeatures(OuterFeatures):
    """κ(x) = u ⊗ v, the Kronecker product row by row of u `(..., q)` and v `(..., t)`; D = q·t.

    Attributes:
        left, right: u and v.
        always: whether products never materialize κ; by default sizes decide.
    """

    left: Tensor
    right: Tensor
    always: bool = False

    def factors(self) -> tuple[Features, Features]:
        return DenseFeatures(self.left), DenseFeatures(self.right)

    @property
    def grid(self) -> tuple[int, int]:
        """Return (q, t), the columns of u and of v."""
        return self.left.shape[-1], self.right.shape[-1]

    def keeps(self, rows: int) -> bool:
        """Return whether a product with `rows` weight rows uses less memory if κ(x) is not materialized."""
        return self.always or rows < max(self.grid)

    def structured(self) -> Features:
        return replace(self, always=True)

    def dense(self) -> Tensor:
        return (self.left.unsqueeze(-1) * self.right.unsqueeze(-2)).flatten(-2)

    def matmul(self, matrix: Tensor) -> Tensor:
        lead, (q, t) = matrix.shape[:-1], self.grid
        rows = lead.numel()
        if not self.keeps(rows):  # κ is the smallest array of the three
            return apply_matrix(self.dense(), matrix)
        table = matrix.flatten(0, -2).mT
        if rows > 1 and table.is_contiguous():  # stored by columns: no copy if u is contracted first
            half = (self.left @ table.view(q, t * rows)).unflatten(-1, (t, rows))
            return (self.right.unsqueeze(-2) @ half).squeeze(-2).unflatten(-1, lead)
        grid = matrix.reshape(rows, q, t)
        if q <= 2 * t:  # contract v first: no copy of the matrix, rows × q values per row of x
            half = F.linear(self.right, grid.flatten(0, 1)).unflatten(-1, (rows, q))
            return (half @ self.left.unsqueeze(-1)).squeeze(-1).unflatten(-1, lead)
        half = F.linear(self.left, grid.transpose(1, 2).flatten(0, 1)).unflatten(-1, (rows, t))
        return (half @ self.right.unsqueeze(-1)).squeeze(-1).unflatten(-1, lead)
