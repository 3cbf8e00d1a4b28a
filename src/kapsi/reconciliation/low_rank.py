"""Low-rank reconciliations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kapsi.function import Param, Params, Tensors, option
from kapsi.reconciliation.base import ChangeOfBasis, Reconciliation
from kapsi.weights import KhatriRaoWeights, LowRankWeights, Weights

__all__ = ["KhatriRao", "LowRank", "RandomAdaption"]


@dataclass(frozen=True)
class LowRank(Reconciliation, name="low_rank", aliases=("lorr", "lowrank")):
    """A product of two thin matrices: ψ(w) = A Bᵀ, A `(n, r)`, Bᵀ `(r, D)`, l = r(n + D).

    Args:
        rank: r, 1 to 2⁴⁰.

    Source: arXiv 2407.04819, "Low-Rank Parameter Reconciliation (LoRR)".

    Example:
        >>> LowRank(2).count(out_features=4, factors=(1, 10))
        28
    """

    examples = ({}, {"rank": 1}, {"rank": 5})
    multilinear = True
    linear_rows = "right"

    rank: int = option(2, minimum=1, maximum=2**40)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        columns = factors[0] * factors[1]
        return {
            "left": Param((out_features, self.rank), self.rank**-0.5),
            "right": Param((self.rank, columns), columns**-0.5, transposed=True),
        }

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        return LowRankWeights(params["left"], params["right"])

    def rebase(
        self, tensors: Tensors, out_features: int, factors: tuple[int, int], change: ChangeOfBasis
    ) -> tuple[Reconciliation, dict[str, Any]]:
        return self, {"left": tensors["left"], "right": change.columns(tensors["right"])}


@dataclass(frozen=True)
class KhatriRao(Reconciliation, name="khatri_rao", aliases=("cp",)):
    """A low rank with a right factor of product form on κ's grid: ψ(w) = A (C ⊙ B), l = r(n + q + t).

    Row k of C ⊙ B is c_k ⊗ b_k, so output i is Σ_k a_ik ⟨c_k, u⟩⟨b_k, v⟩ for κ = u ⊗ v: with Taylor of degree 2 a
    factorization machine, at a cost of r multiplications per input.

    Args:
        rank: r, 1 to 2⁴⁰.

    Source: Rendle, Factorization Machines (ICDM 2010), doi 10.1109/ICDM.2010.127; ⊙ is the row-wise Khatri–Rao product.

    Example:
        >>> KhatriRao(2).count(out_features=4, factors=(785, 784))
        3146
    """

    compact: ClassVar[Mapping[str, Any]] = {"rank": 64}
    examples = ({}, {"rank": 1}, {"rank": 5})
    multilinear = True

    rank: int = option(2, minimum=1, maximum=2**40)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        q, t = factors
        return {
            "left": Param((out_features, self.rank), self.rank**-0.5),
            "first": Param((self.rank, q), q**-0.5, transposed=True),
            "second": Param((self.rank, t), t**-0.5, transposed=True),
        }

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        return KhatriRaoWeights(params["left"], params["first"], params["second"])

    def rebase(
        self, tensors: Tensors, out_features: int, factors: tuple[int, int], change: ChangeOfBasis
    ) -> tuple[Reconciliation, dict[str, Any]]:
        carried = {name: tensors[name] for name in ("left", "first", "second")}
        if change.grid is not None:
            return self, {**carried, "first": change.grid(carried["first"])}
        if factors[0] == 1 and change.factors[0] == 1:
            return self, {**carried, "second": change.columns(carried["second"])}
        return super().rebase(tensors, out_features, factors, change)


@dataclass(frozen=True)
class RandomAdaption(Reconciliation, name="random_adaption", aliases=("vera", "random_matrix_adaption")):
    """Frozen random factors with trained scales: ψ(w) = diag(a) A diag(b) B, A `(n, r)` and B `(r, D)` random, l = n + r.

    A and B are buffers, saved with the model.

    Args:
        rank: r, 1 to 2⁴⁰.

    Source: Kopiczko et al., VeRA: Vector-based Random Matrix Adaptation (arXiv 2310.11454).

    Example:
        >>> RandomAdaption(8).count(out_features=4, factors=(1, 10))
        12
    """

    examples = ({}, {"rank": 1})
    multilinear = True

    rank: int = option(16, minimum=1, maximum=2**40)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        columns = factors[0] * factors[1]
        return {
            "outputs": Param((out_features,), "normal"),
            "ranks": Param((self.rank,), "normal"),
            "left": Param((out_features, self.rank), self.rank**-0.5, trainable=False),
            "right": Param((self.rank, columns), columns**-0.5, trainable=False, transposed=True),
        }

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        left = params["left"] * params["outputs"].unsqueeze(-1) * params["ranks"].unsqueeze(-2)
        return LowRankWeights(left, params["right"])

    def rebase(
        self, tensors: Tensors, out_features: int, factors: tuple[int, int], change: ChangeOfBasis
    ) -> tuple[Reconciliation, dict[str, Any]]:
        carried = {name: tensors[name] for name in ("outputs", "ranks", "left")}
        return self, {**carried, "right": change.columns(tensors["right"])}
