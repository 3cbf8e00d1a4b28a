"""Kronecker products as reconciliations: repeated blocks, and hypercomplex multiplication in three kinds."""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.function import Param, Params, Tensors, option
from kapsi.reconciliation.base import (
    ChangeOfBasis,
    Reconciliation,
    divisor_near_root,
    need_divisor,
    random_mask,
    require_kept,
)
from kapsi.weights import ConstantWeights, DenseWeights, KroneckerWeights, LowRankWeights, SumWeights, Weights

__all__ = ["DualLowRankKronecker", "Duplicated", "Kronecker", "LowRankKronecker"]


def _sizes(
    where: str, rows: int | None, columns: int | None, out_features: int, factors: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return p, q, s, t with n = p·s and D = q·t, from what is given of p and q."""
    width = factors[0] * factors[1]
    p = divisor_near_root(out_features) if rows is None else rows
    q = factors[0] if columns is None else columns
    need_divisor(where, "rows", p, out_features, "outputs")
    need_divisor(where, "columns", q, width, "columns of κ")
    return p, q, out_features // p, width // q


@dataclass(frozen=True)
class _Hypercomplex(Reconciliation):
    """ψ(w) = Σ_k A_k ⊗ B_k with A_k `(p, q)` and B_k `(n/p, D/q)`; what A_k and B_k are made of differs.

    With several terms every tensor has a leading axis for them, after that of the channels.
    """

    multilinear = True

    def _options(self) -> tuple[int | None, int | None, int]:
        """Return p and q as given, and the number of terms."""
        own: Any = self
        return own.rows, own.columns, own.terms

    def _sizes(self, out_features: int, factors: tuple[int, int]) -> tuple[int, int, int, int]:
        rows, columns, _ = self._options()
        return _sizes(type(self).__name__, rows, columns, out_features, factors)

    @abstractmethod
    def _term(self, p: int, q: int, s: int, t: int) -> dict[str, Param]:
        """Return the tensors of one term, rows of A and B of expected square norm one."""

    @abstractmethod
    def _product(self, tensors: dict[str, Tensor]) -> Weights:
        """Return A ⊗ B of one term."""

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        """Return the tensors of all terms."""
        one, terms = self._term(*self._sizes(out_features, factors)), self._options()[2]
        if terms == 1:
            return one
        # The first tensor of a term is made smaller, so that the sum of terms has rows of norm one.
        first = next(iter(one))
        stacked = {name: replace(param, shape=(terms, *param.shape)) for name, param in one.items()}
        deviation: Any = one[first].init
        return {**stacked, first: replace(stacked[first], init=deviation * terms**-0.5)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        """Return the sum of the terms."""
        names = self._term(1, 1, 1, 1)
        if self._options()[2] == 1:
            return self._product({name: params[name] for name in names})
        slices = zip(*(params[name].unbind(-3) for name in names), strict=True)
        return SumWeights(tuple(self._product(dict(zip(names, tensors, strict=True))) for tensors in slices))

    def rebase(
        self, tensors: Tensors, out_features: int, factors: tuple[int, int], change: ChangeOfBasis
    ) -> tuple[Reconciliation, dict[str, Any]]:
        """Carry A (or B, where A has one column) over to the finer basis."""
        names = list(self._term(1, 1, 1, 1))
        carried = {name: tensors[name] for name in names}
        q = self._sizes(out_features, factors)[1]
        left = "left" if "left" in carried else "left_columns"
        right = "right" if "right" in carried else "right_columns"
        own: Any = self
        if q == 1:
            carried[right] = change.columns(carried[right])
            return replace(own, columns=1), carried
        if q == factors[0] and change.grid is not None:
            carried[left] = change.grid(carried[left])
            return replace(own, columns=None if own.columns is None else change.factors[0]), carried
        return super().rebase(tensors, out_features, factors, change)


@dataclass(frozen=True)
class Kronecker(_Hypercomplex, name="kronecker", aliases=("hm",)):
    """A sum of Kronecker products: ψ(w) = Σ_k A_k ⊗ B_k, A `(p, q)`, B `(n/p, D/q)`, l = terms·(p·q + (n/p)(D/q)).

    Args:
        rows: p, a divisor of n; by default the largest that is at most √n.
        columns: q, a divisor of D; by default κ's natural grid, on which a product such as Taylor's is never multiplied out.
        terms: number of products that are added, 1 to 4,096; one is the paper's.

    Raises:
        SpecError: a size that does not divide; the message lists the divisors.

    Source: arXiv 2407.04819, "Hypercomplex Multiplication (HM) based Parameter Reconciliation"; several terms:
        arXiv 2102.08597.

    Example:
        >>> Kronecker(rows=2).count(out_features=4, factors=(3, 5))
        16
    """

    examples = ({}, {"rows": 1}, {"columns": 1}, {"terms": 3})

    rows: int | None = option(None, minimum=1)
    columns: int | None = option(None, minimum=1)
    terms: int = option(1, minimum=1, maximum=4096)

    def _term(self, p: int, q: int, s: int, t: int) -> dict[str, Param]:
        return {"left": Param((p, q), q**-0.5), "right": Param((s, t), t**-0.5)}

    def _product(self, tensors: dict[str, Tensor]) -> Weights:
        return KroneckerWeights(DenseWeights(tensors["left"]), DenseWeights(tensors["right"]))


@dataclass(frozen=True)
class LowRankKronecker(_Hypercomplex, name="low_rank_kronecker", aliases=("lphm",)):
    """A sum of Kronecker products with low-rank B: ψ(w) = Σ_k A_k ⊗ (S_k T_kᵀ), l = terms·(p·q + r(n/p + D/q)).

    Args:
        rank: r, of B, 1 to 2⁴⁰.
        rows: p, a divisor of n; by default the largest that is at most √n.
        columns: q, a divisor of D; by default κ's natural grid.
        terms: number of products that are added, 1 to 4,096; one is the paper's.

    Raises:
        SpecError: a size that does not divide; the message lists the divisors.

    Source: arXiv 2407.04819, "Low-Rank Parameterized Hypercomplex Multiplication (LPHM)", whose l has a slip (D/p for D/q).

    Example:
        >>> LowRankKronecker(rank=2, rows=2).count(out_features=4, factors=(3, 5))
        20
    """

    examples = ({}, {"rank": 1, "rows": 1}, {"rank": 3, "columns": 1}, {"rank": 1, "terms": 2})

    rank: int = option(2, minimum=1, maximum=2**40)
    rows: int | None = option(None, minimum=1)
    columns: int | None = option(None, minimum=1)
    terms: int = option(1, minimum=1, maximum=4096)

    def _term(self, p: int, q: int, s: int, t: int) -> dict[str, Param]:
        r = self.rank
        return {
            "left": Param((p, q), q**-0.5),
            "right_rows": Param((s, r), r**-0.5),
            "right_columns": Param((r, t), t**-0.5),
        }

    def _product(self, tensors: dict[str, Tensor]) -> Weights:
        right = LowRankWeights(tensors["right_rows"], tensors["right_columns"])
        return KroneckerWeights(DenseWeights(tensors["left"]), right)


@dataclass(frozen=True)
class DualLowRankKronecker(_Hypercomplex, name="dual_low_rank_kronecker", aliases=("dual_lphm",)):
    """A sum of Kronecker products of low-rank matrices: ψ(w) = Σ_k (P_k Q_kᵀ) ⊗ (S_k T_kᵀ), l = terms·r(p + q + n/p + D/q).

    Args:
        rank: r, of both factors, 1 to 2⁴⁰.
        rows: p, a divisor of n; by default the largest that is at most √n.
        columns: q, a divisor of D; by default κ's natural grid.
        terms: number of products that are added, 1 to 4,096; one is the paper's.

    Raises:
        SpecError: a size that does not divide; the message lists the divisors.

    Source: arXiv 2407.04819, "Dual Low-Rank Parameterized Hypercomplex Multiplication".

    Example:
        >>> DualLowRankKronecker(rank=5).count(out_features=64, factors=(785, 784))
        7925
    """

    examples = ({}, {"rank": 1, "rows": 1}, {"rank": 3, "columns": 1}, {"rank": 1, "terms": 2})

    rank: int = option(2, minimum=1, maximum=2**40)
    rows: int | None = option(None, minimum=1)
    columns: int | None = option(None, minimum=1)
    terms: int = option(1, minimum=1, maximum=4096)

    def _term(self, p: int, q: int, s: int, t: int) -> dict[str, Param]:
        r = self.rank
        return {
            "left_rows": Param((p, r), r**-0.5),
            "left_columns": Param((r, q), q**-0.5),
            "right_rows": Param((s, r), r**-0.5),
            "right_columns": Param((r, t), t**-0.5),
        }

    def _product(self, tensors: dict[str, Tensor]) -> Weights:
        return KroneckerWeights(
            LowRankWeights(tensors["left_rows"], tensors["left_columns"]),
            LowRankWeights(tensors["right_rows"], tensors["right_columns"]),
        )


@dataclass(frozen=True)
class Duplicated(Reconciliation, name="duplicated", aliases=("duplicated_padding",)):
    """One block, repeated: ψ(w) = C ⊗ W, C `(p, q)` of ones (or of zeros and ones), W `(n/p, D/q)`, l = n·D/(p·q).

    With ratio below one, C keeps that share of the copies, chosen at random; it is a buffer that is saved with the model.
    A pattern of one's own is set with `head.assign("reconciliation", pattern=…)`.

    Args:
        rows: p, copies below each other, a divisor of n; by default the largest that is at most √n.
        columns: q, copies beside each other, a divisor of D; by default κ's natural grid.
        ratio: share of the copies that are there, above 0 to 1; at least one is.

    Raises:
        SpecError: a size that does not divide; the message lists the divisors.

    Source: arXiv 2407.04819, "Duplicated Padding based Parameter Reconciliation".

    Example:
        >>> Duplicated(rows=2, columns=5).count(out_features=4, factors=(1, 10))
        4
    """

    examples = ({}, {"rows": 1, "columns": 1}, {"ratio": 0.5})
    multilinear = True

    rows: int | None = option(None, minimum=1)
    columns: int | None = option(None, minimum=1)
    ratio: float = option(1.0, minimum=0.0, maximum=1.0)

    def check(self) -> None:
        if self.ratio == 0:
            raise SpecError("Duplicated(ratio=0): ratio must be above 0; ZeroReconciliation() is all zeros")

    def _sizes(self, out_features: int, factors: tuple[int, int]) -> tuple[int, int, int, int]:
        return _sizes("Duplicated", self.rows, self.columns, out_features, factors)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        p, q, s, t = self._sizes(out_features, factors)
        # Every row of ψ has the share of its q·t entries that the pattern keeps.
        block = {"block": Param((s, t), (self.ratio * q * t) ** -0.5)}
        if self.ratio == 1:
            return {**block, "value": Param((), (1.0,), trainable=False)}
        pattern = functools.partial(random_mask, kept=self._kept(p, q))
        return {**block, "pattern": Param((p, q), pattern, trainable=False, dtype=torch.bool)}

    def _kept(self, p: int, q: int) -> int:
        return max(1, round(self.ratio * p * q))

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        block = params["block"]
        if self.ratio != 1:
            return KroneckerWeights(DenseWeights(params["pattern"].to(block.dtype)), DenseWeights(block))
        p, q, _, _ = self._sizes(out_features, factors)
        return KroneckerWeights(ConstantWeights(params["value"], p, q), DenseWeights(block))

    def validate(self, tensors: Tensors) -> None:
        if self.ratio != 1:
            p, q = tensors["pattern"].shape[-2:]
            require_kept(f"Duplicated(ratio={self.ratio})", "pattern", tensors["pattern"], self._kept(p, q))
