"""One column of κ(x) in each group: products with ψ gather columns of ψ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kapsi.errors import DataError
from kapsi.features.base import Features, widen

__all__ = ["LeafFeatures"]

GATHERED = 2**17
"""Numbers of ψ gathered at a time; they fit into the cache."""

SEPARATE = 16
"""Largest number of rows of ψ that are gathered separately: faster than columns of up to 16 numbers."""


@dataclass(frozen=True)
class LeafFeatures(Features):
    """κ(x) with T columns equal to 1 and the others 0: the leaves reached in T trees.

    A product with ψ sums T columns of ψ; κ(x) is not materialized. There is no gradient with respect to x.

    Attributes:
        indices: the T distinct columns of each row, `(..., T)`, int32 or int64.
        offset: 0 for each row, or NaN for a row with unknown columns, `(...)`, in the type of κ(x).
        width: number of columns D.

    Example:
        >>> features = LeafFeatures(torch.tensor([[0, 2], [1, 2]]), torch.zeros(2), 3)
        >>> features.dense()
        tensor([[1., 0., 1.],
                [0., 1., 1.]])
        >>> features.matmul(torch.tensor([[1.0, 10.0, 100.0]]))
        tensor([[101.],
                [110.]])
    """

    indices: Tensor
    offset: Tensor
    width: int

    @property
    def columns(self) -> int:
        return self.width

    def dense(self) -> Tensor:
        zeros = self.offset.new_zeros((*self.offset.shape, self.width))
        return zeros.scatter(-1, self.indices.long(), 1.0) + self.offset.unsqueeze(-1)

    def matmul(self, matrix: Tensor) -> Tensor:
        offset = self.offset
        if matrix.dtype != offset.dtype:
            if not torch.is_autocast_enabled(matrix.device.type):
                raise DataError(
                    f"the inputs are {offset.dtype} and the weights {matrix.dtype}; give the inputs as x.to({matrix.dtype})"
                )
            matrix = matrix.to(torch.promote_types(matrix.dtype, offset.dtype))
        rows, trees = self.offset.shape, self.indices.shape[-1]
        table, flat = matrix.flatten(0, -2), self.indices.reshape(-1)
        if len(table) <= SEPARATE:  # a row of ψ stays in the cache
            gathered = [row.index_select(0, flat).view(*rows, trees).sum(-1) for row in table.unbind(0)]
            product = torch.stack(gathered, -1)
        else:
            count = max(1, GATHERED // (trees * len(table)))
            blocks = (flat,) if torch.compiler.is_compiling() else flat.split(count * trees)
            by_column = table.mT.contiguous()
            sums = [by_column.index_select(0, block).view(-1, trees, len(table)).sum(1) for block in blocks]
            product = (sums[0] if len(sums) == 1 else torch.cat(sums)).view(*rows, len(table))
        product = product + offset.unsqueeze(-1)
        return product if matrix.dim() == 2 else product.unflatten(-1, matrix.shape[:-1])

    def total(self) -> Tensor:
        return self.offset + self.indices.shape[-1]

    def square_norm(self) -> Tensor:
        return self.total()

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = (widen(self.total()) / self.width).unsqueeze(-1)
        return mean, mean * (1 - mean)
