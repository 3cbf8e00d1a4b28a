"""Kronecker products as reconciliations: repeated blocks, and three kinds of hypercomplex multiplication."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
    """Return p, q, s, t with n = p·s and D = q·t; None for p or q selects the default."""
    width = factors[0] * factors[1]
    p = divisor_near_root(out_features) if rows is None else rows
    q = factors[0] if columns is None else columns
    need_divisor(where, "rows", p, out_features, "outputs")
    need_divisor(where, "columns", q, width, "columns of κ")
    return p, q, out_features // p, width // q


class _OnGrid(Reconciliation):
    """A reconciliation with factors on a grid (p, q) of options `rows` and `columns`."""

    # Fields of the subclasses, declared there to keep the order of positional arguments.
    rows: int | None
    columns: int | None

    def on_own_grid(self, factors: tuple[int, int]) -> Reconciliation | None:
        this: Any = self
        return None if self.columns in (None, factors[0]) else replace(this, columns=factors[0])


class _Hypercomplex(_OnGrid):
    """ψ(w) = Σ_k A_k ⊗ B_k with A_k `(p, q)` and B_k `(n/p, D/q)`; subclasses differ in the tensors of A_k and B_k.

    With several terms every tensor has a leading axis of terms, after the channel axis.
    """

    multilinear = True

    terms: int

    def _sizes(self, out_features: int, factors: tuple[int, int]) -> tuple[int, int, int, int]:
        return _sizes(type(self).__name__, self.rows, self.columns, out_features, factors)

    @abstractmethod
    def _term(self, p: int, q: int, s: int, t: int) -> dict[str, Param]:
        """Return the tensors of one term; rows of A and B have an expected square norm of one."""

    @abstractmethod
    def _product(self, tensors: dict[str, Tensor]) -> Weights:
        """Return A ⊗ B of one term."""

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        term, terms = self._term(*self._sizes(out_features, factors)), self.terms
        if terms == 1:
            return term
        # The first tensor of each term is scaled down, so that rows of the sum have norm one.
        first = next(iter(term))
        stacked = {name: replace(param, shape=(terms, *param.shape)) for name, param in term.items()}
        deviation: Any = term[first].init
        return {**stacked, first: replace(stacked[first], init=deviation * terms**-0.5)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        names = self._term(1, 1, 1, 1)
        if self.terms == 1:
            return self._product({name: params[name] for name in names})
        slices = zip(*(params[name].unbind(-3) for name in names), strict=True)
        return SumWeights(tuple(self._product(dict(zip(names, tensors, strict=True))) for tensors in slices))

    def rebase(
        self, tensors: Tensors, out_features: int, factors: tuple[int, int], change: ChangeOfBasis
    ) -> tuple[Reconciliation, dict[str, Any]]:
        """Transfer A, or B if A has one column, to the finer basis."""
        names = list(self._term(1, 1, 1, 1))
        carried = {name: tensors[name] for name in names}
        q = self._sizes(out_features, factors)[1]
        left = "left" if "left" in carried else "left_columns"
        right = "right" if "right" in carried else "right_columns"
        this: Any = self
        if q == 1:
            carried[right] = change.columns(carried[right])
            return replace(this, columns=1), carried
        if q == factors[0] and change.grid is not None:
            carried[left] = change.grid(carried[left])
            return replace(this, columns=None if self.columns is None else change.factors[0]), carried
        return super().rebase(tensors, out_features, factors, change)


@dataclass(frozen=True)
class Kronecker(_Hypercomplex, name="kronecker", aliases=("hm", "hypercomplex_multiplication")):
    """A sum of Kronecker products: ψ(w) = Σ_k A_k ⊗ B_k, A `(p, q)`, B `(n/p, D/q)`, l = terms·(p·q + (n/p)(D/q)).

    Args:
        rows: p, a divisor of n; None: the largest up to √n.
        columns: q, a divisor of D; None: κ's natural grid, which never multiplies out a product such as Taylor's.
        terms: number of products in the sum, 1 to 4,096; 1 in the paper.

    Raises:
        SpecError: a size that is not a divisor; the message lists the divisors.

    Source: arXiv 2407.04819, "Hypercomplex Multiplication (HM) based Parameter Reconciliation"; several terms: arXiv
        2102.08597.

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
class _LowRankTerms(_Hypercomplex):
    """Options of both low-rank kinds."""

    examples = ({}, {"rank": 1, "rows": 1}, {"rank": 3, "columns": 1}, {"rank": 1, "terms": 2})

    rank: int = option(2, minimum=1, maximum=2**40)
    rows: int | None = option(None, minimum=1)
    columns: int | None = option(None, minimum=1)
    terms: int = option(1, minimum=1, maximum=4096)


@dataclass(frozen=True)
class LowRankKronecker(_LowRankTerms, name="low_rank_kronecker", aliases=("lphm",)):
    """A sum of Kronecker products with low-rank B: ψ(w) = Σ_k A_k ⊗ (S_k T_kᵀ), l = terms·(p·q + r(n/p + D/q)).

    Args:
        rank: r, of B, 1 to 2⁴⁰.
        rows: p, a divisor of n; None: the largest up to √n.
        columns: q, a divisor of D; None: κ's natural grid.
        terms: number of products in the sum, 1 to 4,096; 1 in the paper.

    Raises:
        SpecError: a size that is not a divisor; the message lists the divisors.

    Source: arXiv 2407.04819, "Low-Rank Parameterized Hypercomplex Multiplication (LPHM)", with a misprint in l (D/p for
        D/q).

    Example:
        >>> LowRankKronecker(rank=2, rows=2).count(out_features=4, factors=(3, 5))
        20
    """

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
class DualLowRankKronecker(_LowRankTerms, name="dual_low_rank_kronecker", aliases=("dual_lphm",)):
    """A sum of Kronecker products of low-rank matrices: ψ(w) = Σ_k (P_k Q_kᵀ) ⊗ (S_k T_kᵀ), l = terms·r(p + q + n/p + D/q).

    Args:
        rank: r, of both factors, 1 to 2⁴⁰.
        rows: p, a divisor of n; None: the largest up to √n.
        columns: q, a divisor of D; None: κ's natural grid.
        terms: number of products in the sum, 1 to 4,096; 1 in the paper.

    Raises:
        SpecError: a size that is not a divisor; the message lists the divisors.

    Source: arXiv 2407.04819, "Dual Low-Rank Parameterized Hypercomplex Multiplication".

    Example:
        >>> DualLowRankKronecker(rank=5).count(out_features=64, factors=(785, 784))
        7925
    """

    compact: ClassVar[Mapping[str, Any]] = {"rank": 5}

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
class Duplicated(_OnGrid, name="duplicated", aliases=("duplicated_padding",)):
    """One block, repeated: ψ(w) = C ⊗ W, C `(p, q)` of ones (or of zeros and ones), W `(n/p, D/q)`, l = n·D/(p·q).

    With ratio below one, C keeps a random fraction of the copies; C is then a buffer, saved with the model. Set a custom
    pattern with `head.assign("reconciliation", pattern=…)`.

    Args:
        rows: p, vertical copies, a divisor of n; None: the largest up to √n.
        columns: q, horizontal copies, a divisor of D; None: κ's natural grid.
        ratio: fraction of copies kept, above 0 to 1; at least one copy is kept.

    Raises:
        SpecError: a size that is not a divisor; the message lists the divisors.

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
        # Every row of ψ has the fraction of q·t entries kept by the pattern.
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
