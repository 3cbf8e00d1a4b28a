"""The bilinear product ⟨κ(x), ψ(w)⟩ and the table of identities that neither half can see alone.

κ(x), B × D, and ψ(w), n × D, are formed only where nothing cheaper is known. The first rule that fits is taken; shapes
decide, never values, so a route is the same for every batch of a model and compiles to one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.features import (
    ConcatenatedFeatures,
    DenseFeatures,
    Features,
    NormalizedFeatures,
    ProductFeatures,
    add,
    apply_matrix,
    formed,
)
from kapsi.weights import (
    ActingWeights,
    ConstantWeights,
    DenseWeights,
    EyeWeights,
    KhatriRaoWeights,
    KroneckerWeights,
    LowRankWeights,
    SumWeights,
    Weights,
)

__all__ = ["contract", "contract_sum", "route"]


@dataclass(frozen=True)
class Rule:
    """One identity: where it holds, what it computes, and its description for people.

    `apply` returns `(..., n)`, or `(..., channels, n)` where the weights have a channel axis.
    """

    fits: Callable[[Any, Any], bool]
    apply: Callable[[Any, Any], Tensor]
    describe: Callable[[Any, Any], str]


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def _normalized(features: NormalizedFeatures, weights: Weights) -> Tensor:
    # ⟨(κ + s·1)·c, W⟩ = (⟨κ, W⟩ + s · W·1) · c
    return features.adjust(_product(features.base, weights), weights.row_sums())


def _concatenated(features: ConcatenatedFeatures, weights: Weights) -> Tensor:
    pieces = weights.split(features.sizes)
    if pieces is None:
        raise SpecError("these weights cannot be split by columns")
    return add(_product(part, piece) for part, piece in zip(features.parts, pieces, strict=True))


def _mixed_product(features: ProductFeatures, weights: KroneckerWeights) -> Tensor:
    # (A ⊗ B)(u ⊗ v) = (A u) ⊗ (B v)
    left = _product(DenseFeatures(features.left), weights.left)
    return _outer(left, _product(DenseFeatures(features.right), weights.right))


def _single_column(features: Features, weights: KroneckerWeights) -> Tensor:
    # A has one column a: (a ⊗ B) κ = a ⊗ (B κ)
    return _outer(weights.left.matrix().squeeze(-1), _product(features, weights.right))


def _kronecker_view(features: Features, weights: KroneckerWeights) -> Tensor:
    # κ seen as a q × t grid K: (A ⊗ B) κ = A K Bᵀ, two small products and never n × D.
    grid = formed(features, "Kronecker weights on a grid that is not κ's own").unflatten(-1, weights.grid)
    half = _product(DenseFeatures(grid), weights.right)
    if weights.channels is None:
        return _product(DenseFeatures(half.transpose(-1, -2)), weights.left).transpose(-1, -2).flatten(-2)
    # half is (..., q, channels, s), A is (channels, p, q)
    return weights.left.times(half.movedim(-2, -3)).flatten(-2)


def _rows(left: Tensor, half: Tensor) -> Tensor:
    """Return A h for h `(..., r)` and A `(n, r)`, or `(..., channels, r)` and `(channels, n, r)`."""
    return F.linear(half, left) if left.dim() == 2 else (left @ half.unsqueeze(-1)).squeeze(-1)


def _low_rank(features: Features, weights: LowRankWeights) -> Tensor:
    return _rows(weights.left, features.matmul(weights.right))


def _product_of_factors(features: ProductFeatures, weights: KhatriRaoWeights) -> Tensor:
    # (c ⊗ b)(u ⊗ v) = (c u) (b v), for every row of C and B
    first, second = apply_matrix(features.left, weights.first), apply_matrix(features.right, weights.second)
    return _rows(weights.left, first * second)


def _khatri_rao(features: Features, weights: KhatriRaoWeights) -> Tensor:
    if weights.grid[0] == 1:  # a vector: nothing to be laid out as a grid
        return _rows(weights.left, features.matmul(weights.second) * weights.first.squeeze(-1))
    # κ seen as a q × t grid K: Σ over q of C ⊙ K Bᵀ
    grid = formed(features, "Khatri–Rao weights on features without a product").unflatten(-1, weights.grid)
    half = apply_matrix(grid, weights.second)  # (..., q, r), or (..., q, channels, r)
    return _rows(weights.left, (half * weights.first.movedim(-1, 0)).sum(-half.dim() + grid.dim() - 2))


def _eye(features: Features, weights: EyeWeights) -> Tensor:
    values = formed(features, "an eye")
    return values * weights.value if weights.channels is None else values.unsqueeze(-2) * weights.value.unsqueeze(-1)


def _sum(features: Features, weights: SumWeights) -> Tensor:
    return add(_product(features, part) for part in weights.parts)


def _constant(features: Features, weights: ConstantWeights) -> Tensor:
    total = features.total()[(...,) + (None,) * weights.value.dim()] * weights.value
    return total.unsqueeze(-1).expand(*total.shape, weights.rows)


def _label(text: str) -> Callable[[Any, Any], str]:
    return lambda features, weights: text


def _is(kind: type | tuple[type, ...], weight_kind: type | tuple[type, ...]) -> Callable[[Any, Any], bool]:
    return lambda features, weights: isinstance(features, kind) and isinstance(weights, weight_kind)


def _describe_low_rank(features: Features, right: Tensor) -> str:
    kept = isinstance(features, ProductFeatures) and features.keeps(right.shape[:-1].numel())
    return "low rank (κ B) Aᵀ, " + ("neither κ nor ψ formed" if kept else "ψ not formed")


def _describe_dense(features: Features, weights: Weights) -> str:
    if isinstance(features, ProductFeatures):
        small = features.keeps(weights.matrix().shape[:-1].numel())
        return "dense ψ, one factor of κ at a time (κ not formed)" if small else "dense ψ on the formed product κ"
    return "dense: one matrix product"


RULES: tuple[Rule, ...] = (
    Rule(_is(DenseFeatures, DenseWeights), lambda f, w: f.matmul(w.values), _describe_dense),
    Rule(
        _is(NormalizedFeatures, Weights),
        _normalized,
        lambda f, w: f"layer norm folded into: {route(f.base, w)}",
    ),
    Rule(
        _is(Features, SumWeights),
        _sum,
        lambda f, w: f"{len(w.parts)} terms, each: {route(f, w.parts[0])}",
    ),
    Rule(
        lambda f, w: isinstance(f, ConcatenatedFeatures) and w.columns == f.columns and w.split(f.sizes) is not None,
        _concatenated,
        lambda f, w: (
            "split by columns: "
            + " + ".join(route(part, piece) for part, piece in zip(f.parts, w.split(f.sizes) or [], strict=True))
        ),
    ),
    Rule(
        lambda f, w: isinstance(f, ProductFeatures) and isinstance(w, KroneckerWeights) and f.grid == w.grid,
        _mixed_product,
        _label("mixed product (A u) ⊗ (B v), neither κ nor ψ formed"),
    ),
    Rule(
        lambda f, w: isinstance(w, KroneckerWeights) and w.left.columns == 1,
        _single_column,
        lambda f, w: f"a ⊗ (B κ), ψ not formed: {route(f, w.right)}",
    ),
    Rule(_is(Features, KroneckerWeights), _kronecker_view, _label("A K Bᵀ on κ seen as a grid, ψ not formed")),
    Rule(
        _is(Features, LowRankWeights),
        _low_rank,
        lambda f, w: _describe_low_rank(f, w.right),
    ),
    Rule(
        lambda f, w: isinstance(f, ProductFeatures) and isinstance(w, KhatriRaoWeights) and f.grid == w.grid,
        _product_of_factors,
        _label("product of factors (C u)(B v), neither κ nor ψ formed"),
    ),
    Rule(
        _is(Features, KhatriRaoWeights),
        _khatri_rao,
        lambda f, w: (
            _describe_low_rank(f, w.second) if w.grid[0] == 1 else "factor by factor on κ seen as a grid, ψ not formed"
        ),
    ),
    Rule(
        _is(Features, ActingWeights),
        lambda f, w: w.act(f),
        lambda f, w: w.describe(f),
    ),
    Rule(_is(Features, EyeWeights), _eye, _label("κ itself, ψ not formed")),
    Rule(_is(Features, ConstantWeights), _constant, _label("constant: the sum of κ's columns, ψ not formed")),
    Rule(_is(Features, DenseWeights), lambda f, w: f.matmul(w.values), _describe_dense),
)


def _rule(features: Features, weights: Weights) -> Rule:
    for rule in RULES:
        if rule.fits(features, weights):
            return rule
    # A structure from outside the package that no rule knows has its dense meaning at least.
    return Rule(
        lambda f, w: True,
        lambda f, w: f.matmul(w.matrix()),
        _label(f"{type(features).__name__} times formed {type(weights).__name__}"),
    )


def _product(features: Features, weights: Weights) -> Tensor:
    return _rule(features, weights).apply(features, weights)


def contract(features: Features, weights: Weights) -> Tensor:
    """Return ⟨κ(x), ψ(w_c)⟩ for every channel c, `(..., channels, n)`.

    Equal to `torch.einsum("...d,cnd->...cn", features.dense(), weights.dense())`.

    Args:
        features: κ(x), `(..., D)`.
        weights: ψ(w), `(channels, n, D)`.

    Raises:
        SpecError: the columns differ in number, or κ would have to be formed and is too wide for that.

    Example:
        >>> import torch
        >>> x = torch.randn(5, 3)
        >>> contract(DenseFeatures(x), DenseWeights(torch.randn(2, 4, 3))).shape
        torch.Size([5, 2, 4])
    """
    _check(features, weights)
    product = _product(features, weights)
    return product.unsqueeze(-2) if weights.channels is None else product


def contract_sum(features: Features, weights: Weights, bias: Tensor | None = None) -> Tensor:
    """Return Σ_c ⟨κ(x), ψ(w_c)⟩ + bias, `(..., n)`: what a head computes, channels merged where that is cheaper."""
    if isinstance(features, DenseFeatures) and isinstance(weights, DenseWeights) and weights.values.dim() == 2:
        return F.linear(features.values, weights.values, bias)  # what nn.Linear does, and nothing more
    merged = weights.merged()
    product = _product(features, merged)
    if merged.channels is not None:
        product = product.sum(-2)
    return product if bias is None else product + bias


def route(features: Features, weights: Weights) -> str:
    """Return how a pair is contracted, in words."""
    return _rule(features, weights).describe(features, weights)


def _check(features: Features, weights: Weights) -> None:
    if features.columns != weights.columns:
        raise SpecError(
            f"contract: κ(x) has {features.columns:,} columns and ψ(w) has {weights.columns:,}; they must agree"
        )
