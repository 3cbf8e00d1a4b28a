"""Kronecker products (hypercomplex multiplication) as reconciliations."""

from __future__ import annotations

from dataclasses import dataclass

from kapsi.function import Param, Params, Tensors, option
from kapsi.reconciliation.base import Reconciliation, divisor_near_root, need_divisor
from kapsi.weights import DenseWeights, KroneckerWeights, LowRankWeights, Weights

__all__ = ["DualLowRankKronecker", "Kronecker"]


def _sizes(
    function: Kronecker | DualLowRankKronecker, out_features: int, factors: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return p, q, s, t with n = p·s and D = q·t."""
    where = type(function).__name__
    columns = factors[0] * factors[1]
    p = divisor_near_root(out_features) if function.rows is None else function.rows
    q = factors[0] if function.columns is None else function.columns
    need_divisor(where, "rows", p, out_features, "outputs")
    need_divisor(where, "columns", q, columns, "columns of κ")
    return p, q, out_features // p, columns // q


@dataclass(frozen=True)
class Kronecker(Reconciliation, name="kronecker", aliases=("hm",)):
    """A Kronecker product: ψ(w) = A ⊗ B, A `(p, q)`, B `(n/p, D/q)`, l = p·q + (n/p)(D/q).

    Args:
        rows: p, a divisor of n; by default the largest that is at most √n.
        columns: q, a divisor of D; by default κ's natural grid, on which a product such as Taylor's is never multiplied out.

    Raises:
        SpecError: a size that does not divide; the message lists the divisors.

    Source: arXiv 2407.04819, "Hypercomplex Multiplication (HM) based Parameter Reconciliation".

    Example:
        >>> Kronecker(rows=2).count(out_features=4, factors=(3, 5))
        16
    """

    examples = ({}, {"rows": 1}, {"columns": 1})

    rows: int | None = option(None, minimum=1)
    columns: int | None = option(None, minimum=1)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:  # noqa: D102
        p, q, s, t = _sizes(self, out_features, factors)
        return {"left": Param((p, q), q**-0.5), "right": Param((s, t), t**-0.5)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:  # noqa: D102
        return KroneckerWeights(DenseWeights(params["left"]), DenseWeights(params["right"]))


@dataclass(frozen=True)
class DualLowRankKronecker(Reconciliation, name="dual_low_rank_kronecker", aliases=("dual_lphm",)):
    """A Kronecker product of two low-rank matrices: ψ(w) = (P Qᵀ) ⊗ (S Tᵀ), l = r(p + q + n/p + D/q).

    Args:
        rank: r, of both factors, 1 to 2⁴⁰.
        rows: p, a divisor of n; by default the largest that is at most √n.
        columns: q, a divisor of D; by default κ's natural grid.

    Raises:
        SpecError: a size that does not divide; the message lists the divisors.

    Source: arXiv 2407.04819, "Dual Low-Rank Parameterized Hypercomplex Multiplication".

    Example:
        >>> DualLowRankKronecker(rank=5).count(out_features=64, factors=(785, 784))
        7925
    """

    examples = ({}, {"rank": 1, "rows": 1}, {"rank": 3, "columns": 1})

    rank: int = option(2, minimum=1, maximum=2**40)
    rows: int | None = option(None, minimum=1)
    columns: int | None = option(None, minimum=1)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:  # noqa: D102
        p, q, s, t = _sizes(self, out_features, factors)
        r = self.rank
        return {
            "left_rows": Param((p, r), r**-0.5),
            "left_columns": Param((r, q), q**-0.5),
            "right_rows": Param((s, r), r**-0.5),
            "right_columns": Param((r, t), t**-0.5),
        }

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:  # noqa: D102
        return KroneckerWeights(
            LowRankWeights(params["left_rows"], params["left_columns"]),
            LowRankWeights(params["right_rows"], params["right_columns"]),
        )
