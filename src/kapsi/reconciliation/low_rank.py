"""Low-rank reconciliations."""

from __future__ import annotations

from dataclasses import dataclass

from kapsi.function import Param, Params, Tensors, option
from kapsi.reconciliation.base import Reconciliation
from kapsi.weights import LowRankWeights, Weights

__all__ = ["LowRank"]


@dataclass(frozen=True)
class LowRank(Reconciliation, name="low_rank", aliases=("lorr",)):
    """A product of two thin matrices: ψ(w) = A Bᵀ, A `(n, r)`, Bᵀ `(r, D)`, l = r(n + D).

    Args:
        rank: r, 1 to 2⁴⁰.

    Source: arXiv 2407.04819, "Low-Rank Parameter Reconciliation (LoRR)".

    Example:
        >>> LowRank(2).count(out_features=4, factors=(1, 10))
        28
    """

    examples = ({}, {"rank": 1}, {"rank": 5})

    rank: int = option(2, minimum=1, maximum=2**40)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:  # noqa: D102
        columns = factors[0] * factors[1]
        return {
            "left": Param((out_features, self.rank), self.rank**-0.5),
            "right": Param((self.rank, columns), columns**-0.5),
        }

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:  # noqa: D102
        return LowRankWeights(params["left"], params["right"])
