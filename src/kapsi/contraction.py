"""The bilinear product ⟨κ(x), ψ(w)⟩ as a table of identities on the structures of κ and ψ.

κ(x), B × D, and ψ(w), n × D, are materialized only without a cheaper rule. The first fitting rule applies; shapes decide, never
values: a route is the same for every batch of a model and compiles to one graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError, refuse
from kapsi.features import (
    ConcatenatedFeatures,
    DenseFeatures,
    Features,
    LeafFeatures,
    NormalizedFeatures,
    OuterFeatures,
    ProductFeatures,
    SparseProductFeatures,
    add,
    apply_matrix,
    check_formed,
    entries_of,
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

Route = Literal["dense", "structured"] | None
"""Multiply κ(x) and ψ(w) in materialized (dense) or structured form; None: sizes decide."""

MAX_MATERIALIZED_WEIGHTS = 2**30
"""Entries of the largest ψ(w) materialized by the dense route, channels included: 4 GiB in float32."""


@dataclass(frozen=True)
class Rule:
    """One identity: a condition, the product `(..., n)` or `(..., channels, n)`, and a human-readable description."""

    fits: Callable[[Any, Any], bool]
    apply: Callable[[Any, Any], Tensor]
    describe: Callable[[Any, Any], str]


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def _normalized(features: NormalizedFeatures, weights: Weights) -> Tensor:
    # ⟨(κ + s·1)·c, W⟩ = (⟨κ, W⟩ + s · W·1) · c
    return features.adjust(_product(features.base, weights), weights.row_sums())


def _concatenated(features: ConcatenatedFeatures, weights: Weights) -> Tensor:
    pieces = weights.split(features.sizes) or []
    return add(_product(part, piece) for part, piece in zip(features.parts, pieces, strict=True))


def _mixed_product(features: OuterFeatures, weights: KroneckerWeights) -> Tensor:
    # (A ⊗ B)(u ⊗ v) = (A u) ⊗ (B v)
    left, right = features.factors()
    return _outer(_product(left, weights.left), _product(right, weights.right))


def _adds_blocks(features: Features, weights: Weights) -> bool:
    return (
        (isinstance(features, ProductFeatures | ConcatenatedFeatures) or features.sparse)
        and isinstance(weights, KroneckerWeights)
        and isinstance(weights.left, EyeWeights)
        and isinstance(weights.right, ConstantWeights)
        and weights.right.rows == 1
    )


def _added_blocks(features: Features, weights: KroneckerWeights) -> Tensor:
    # (c·I ⊗ 1ᵀ) κ: sums of consecutive columns
    sums = _block_sums(features, 0, weights.right.columns, weights.left.columns)
    value: Tensor = weights.left.value * weights.right.value  # type: ignore[attr-defined]
    return sums * value if weights.channels is None else sums.unsqueeze(-2) * value.unsqueeze(-1)


def _block_sums(features: Features, start: int, width: int, count: int) -> Tensor:
    """Return the sums of blocks of `width` columns, `(..., count)`; the first column of the features has index `start`."""
    if features.sparse:
        entries = entries_of(features)
        return entries.grouped((entries.indices + start) // width, count)
    if isinstance(features, ConcatenatedFeatures):
        starts = itertools.accumulate(features.sizes, initial=start)
        return add(_block_sums(part, first, width, count) for part, first in zip(features.parts, starts, strict=False))
    if not isinstance(features, ProductFeatures):
        values = formed(features, "blocks of columns")
        block = torch.arange(start, start + features.columns, device=values.device) // width
        return values.new_zeros(*values.shape[:-1], count).index_add(-1, block, values)
    # A block of u ⊗ v: the end of a row of the grid, whole rows, and the beginning of a row.
    u, v, (q, t) = features.left, features.right, features.grid
    ends = (torch.arange(count + 1, device=u.device) * width - start).clamp(0, q * t).unsqueeze(-1)
    (top, left), (bottom, right) = ((end // t, end % t) for end in (ends[:-1], ends[1:]))
    row, column = torch.arange(q, device=u.device), torch.arange(t, device=u.device)
    first = (column >= left) & ((column < right) | (top < bottom))
    last = (column < right) & (top < bottom)
    whole = F.linear(u, ((row > top) & (row < bottom)).to(u.dtype)) * v.sum(-1, keepdim=True)
    parts = (
        u[..., line.squeeze(-1).clamp(max=q - 1)] * F.linear(v, mask.to(v.dtype))
        for line, mask in ((top, first), (bottom, last))
    )
    return add((whole, *parts))


def _single_column(features: Features, weights: KroneckerWeights) -> Tensor:
    # A has one column a: (a ⊗ B) κ = a ⊗ (B κ)
    return _outer(weights.left.matrix().squeeze(-1), _product(features, weights.right))


def _kronecker_entries(features: Features, weights: KroneckerWeights) -> Tensor:
    # Entry by entry: Σ κ_ij (A e_i) ⊗ (B e_j)
    entries = entries_of(features)
    _check_entries(entries.indices.shape[0] * weights.outputs, features, weights)
    left, right = entries.on_grid(weights.grid)
    return entries.sums(_outer(_product(left, weights.left), _product(right, weights.right)))


def _kronecker_view(features: Features, weights: KroneckerWeights) -> Tensor:
    # κ seen as a q × t grid K: (A ⊗ B) κ = A K Bᵀ, two small products and never n × D.
    grid = formed(features, "Kronecker weights on a grid other than κ's").unflatten(-1, weights.grid)
    half = _product(DenseFeatures(grid), weights.right)
    if weights.channels is None:
        return _product(DenseFeatures(half.transpose(-1, -2)), weights.left).transpose(-1, -2).flatten(-2)
    # half is (..., q, channels, s), A is (channels, p, q)
    return weights.left.matmul(half.movedim(-2, -3)).flatten(-2)


def _rows(left: Tensor, half: Tensor) -> Tensor:
    """Return A h for h `(..., r)` and A `(n, r)`, or `(..., channels, r)` and `(channels, n, r)`."""
    if left.dim() == 2:
        return F.linear(half, left)
    # A matrix-matrix product per channel: 2 to 5 times as fast as matrix-vector products per channel and row of x.
    by_channel = half.reshape(-1, *half.shape[-2:]).transpose(0, 1) @ left.mT
    return by_channel.transpose(0, 1).reshape(*half.shape[:-1], left.shape[-2])


def _low_rank(features: Features, weights: LowRankWeights) -> Tensor:
    return _rows(weights.left, features.matmul(weights.right))


def _check_entries(count: int, features: Features, weights: KroneckerWeights) -> None:
    """Raise a `SpecError` if weights on a grid other than κ's have too many entries for sparse inputs."""
    if count > MAX_MATERIALIZED_WEIGHTS:
        natural = f", here {features.grid[0]:,} × {features.grid[1]:,}" if isinstance(features, OuterFeatures) else ""
        raise SpecError(
            f"Kronecker weights on the grid {weights.grid[0]:,} × {weights.grid[1]:,} would have {count:,} entries for these "
            f"sparse inputs; at most {MAX_MATERIALIZED_WEIGHTS:,} are allowed; leave `columns` out to use κ's own grid{natural}, "
            "or use fewer rows at a time"
        )


def _product_of_factors(features: OuterFeatures, weights: KhatriRaoWeights) -> Tensor:
    # (c ⊗ b)(u ⊗ v) = (c u) (b v) for every row of C and B
    left, right = features.factors()
    return _rows(weights.left, left.matmul(weights.first) * right.matmul(weights.second))


def _khatri_rao_entries(features: Features, weights: KhatriRaoWeights) -> Tensor:
    entries = entries_of(features)
    left, right = entries.on_grid(weights.grid)
    return _rows(weights.left, entries.sums(left.matmul(weights.first) * right.matmul(weights.second)))


def _khatri_rao(features: Features, weights: KhatriRaoWeights) -> Tensor:
    if weights.grid[0] == 1:  # a vector: no grid
        return _rows(weights.left, features.matmul(weights.second) * weights.first.squeeze(-1))
    # κ seen as a q × t grid K: Σ over q of C ⊙ K Bᵀ
    grid = formed(features, "Khatri–Rao weights on features without a product").unflatten(-1, weights.grid)
    half = apply_matrix(grid, weights.second)  # (..., q, r), or (..., q, channels, r)
    return _rows(weights.left, (half * weights.first.movedim(-1, 0)).sum(-half.dim() + grid.dim() - 2))


def _eye(features: Features, weights: EyeWeights) -> Tensor:
    check_formed(features.columns, "an eye")
    values = features.dense()  # the output, also of sparse inputs
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


SPARSE = "sparse: columns of ψ gathered, neither κ nor x materialized"


def _describe_low_rank(features: Features, right: Tensor) -> str:
    if features.sparse:
        return f"low rank (κ B) Aᵀ; {_describe_gathering(features)}"
    separate = isinstance(features, ProductFeatures) and features.keeps(right.shape[:-1].numel())
    return "low rank (κ B) Aᵀ, " + ("neither κ nor ψ materialized" if separate else "ψ not materialized")


def _describe_gathering(features: Features) -> str:
    if isinstance(features, SparseProductFeatures):
        return "sparse: products of entries multiplied out, columns of ψ gathered, neither κ nor x materialized"
    return SPARSE


def _describe_mixed(how: str) -> Callable[[Any, Any], str]:
    return lambda features, weights: f"{how}{f'; {SPARSE}' if features.sparse else ', neither κ nor ψ materialized'}"


def _describe_dense(features: Features, weights: Weights) -> str:
    if isinstance(features, LeafFeatures):
        return "leaves: one column of ψ gathered for each tree, κ not materialized"
    if not isinstance(weights, DenseWeights):
        return f"{type(features).__name__} times materialized {type(weights).__name__}"
    if features.sparse:
        return _describe_gathering(features)
    if isinstance(features, ProductFeatures):
        small = features.keeps(weights.matrix().shape[:-1].numel())
        return "dense ψ, " + ("one factor of κ at a time (κ not materialized)" if small else "κ materialized")
    return "dense: one matrix product"


RULES: tuple[Rule, ...] = (
    Rule(
        _is(NormalizedFeatures, Weights),
        _normalized,
        lambda f, w: f"layer norm folded into: {describe(f.base, w)}",
    ),
    Rule(
        _is(Features, SumWeights),
        _sum,
        lambda f, w: f"{len(w.parts)} terms, each: {describe(f, w.parts[0])}",
    ),
    Rule(
        lambda f, w: isinstance(f, ConcatenatedFeatures) and w.columns == f.columns and w.split(f.sizes) is not None,
        _concatenated,
        lambda f, w: (
            "split by columns: "
            + " + ".join(describe(part, piece) for part, piece in zip(f.parts, w.split(f.sizes) or [], strict=True))
        ),
    ),
    Rule(
        lambda f, w: isinstance(f, OuterFeatures) and isinstance(w, KroneckerWeights) and f.grid == w.grid,
        _mixed_product,
        _describe_mixed("mixed product (A u) ⊗ (B v)"),
    ),
    Rule(_adds_blocks, _added_blocks, _label("sums of blocks of columns, neither κ nor ψ materialized")),
    Rule(
        lambda f, w: isinstance(w, KroneckerWeights) and w.left.columns == 1,
        _single_column,
        lambda f, w: f"a ⊗ (B κ), ψ not materialized: {describe(f, w.right)}",
    ),
    Rule(
        lambda f, w: f.sparse and isinstance(w, KroneckerWeights),
        _kronecker_entries,
        _label("(A e) ⊗ (B e) for each entry of sparse κ, neither κ nor ψ materialized"),
    ),
    Rule(_is(Features, KroneckerWeights), _kronecker_view, _label("A K Bᵀ on κ seen as a grid, ψ not materialized")),
    Rule(
        _is(Features, LowRankWeights),
        _low_rank,
        lambda f, w: _describe_low_rank(f, w.right),
    ),
    Rule(
        lambda f, w: isinstance(f, OuterFeatures) and isinstance(w, KhatriRaoWeights) and f.grid == w.grid,
        _product_of_factors,
        _describe_mixed("product of factors (C u)(B v)"),
    ),
    Rule(
        lambda f, w: f.sparse and isinstance(w, KhatriRaoWeights) and w.grid[0] > 1,
        _khatri_rao_entries,
        _label("factor by factor on each entry of sparse κ, ψ not materialized"),
    ),
    Rule(
        _is(Features, KhatriRaoWeights),
        _khatri_rao,
        lambda f, w: (
            _describe_low_rank(f, w.second) if w.grid[0] == 1 else "factor by factor on a grid of κ, ψ not materialized"
        ),
    ),
    Rule(
        _is(Features, ActingWeights),
        lambda f, w: w.act(f),
        lambda f, w: w.describe(f),
    ),
    Rule(_is(Features, EyeWeights), _eye, _label("κ itself, ψ not materialized")),
    Rule(_is(Features, ConstantWeights), _constant, _label("constant: the sum of κ's columns, ψ not materialized")),
    # The dense meaning of ψ; also of third-party structures.
    Rule(_is(Features, Weights), lambda f, w: f.matmul(w.matrix()), _describe_dense),
)


def _rule(features: Features, weights: Weights) -> Rule:
    return next(rule for rule in RULES if rule.fits(features, weights))


def _product(features: Features, weights: Weights) -> Tensor:
    return _rule(features, weights).apply(features, weights)


def contract(features: Features, weights: Weights, *, route: Route = None) -> Tensor:
    """Compute ⟨κ(x), ψ(w_c)⟩ for every channel c.

    The result equals `torch.einsum("...d,cnd->...cn", features.dense(), weights.dense())`.

    Args:
        features: κ(x), `(..., D)`.
        weights: ψ(w), `(channels, n, D)`.
        route: `"dense"` multiplies materialized κ(x) and ψ(w); `"structured"` keeps κ(x) structured; by default sizes decide.
            The result is the same.

    Returns:
        A tensor `(..., channels, n)`.

    Raises:
        SpecError: different numbers of columns, κ or ψ too large to be materialized, or an unknown route.

    Example:
        >>> import torch
        >>> x = torch.randn(5, 3)
        >>> contract(DenseFeatures(x), DenseWeights(torch.randn(2, 4, 3))).shape
        torch.Size([5, 2, 4])
    """
    if features.columns != weights.columns:
        raise SpecError(
            f"contract: κ(x) has {features.columns:,} columns and ψ(w) has {weights.columns:,}; they must agree"
        )
    features, weights = _routed("contract", features, weights, route)
    product = _product(features, weights)
    return product.unsqueeze(-2) if weights.channels is None else product


def contract_sum(features: Features, weights: Weights, bias: Tensor | None = None, *, route: Route = None) -> Tensor:
    """Return Σ_c ⟨κ(x), ψ(w_c)⟩ + bias, `(..., n)`, as in a head; channels are merged if cheaper."""
    if route is not None:
        features, weights = _routed("contract_sum", features, weights, route)
    if isinstance(features, DenseFeatures) and isinstance(weights, DenseWeights) and weights.values.dim() == 2:
        return F.linear(features.values, weights.values, bias)  # exactly nn.Linear
    # Sparse inputs gather fewer columns of dense channels than their sum has.
    merged = weights if features.sparse and isinstance(weights, DenseWeights) else weights.merged()
    product = _product(features, merged)
    if merged.channels is not None:
        product = product.sum(-2)
    return product if bias is None else product + bias


def describe(features: Features, weights: Weights, route: Route = None) -> str:
    """Return a human-readable description of the product of a pair."""
    if route == "dense":
        return "dense: κ and ψ materialized, one matrix product"
    if route == "structured":
        features = features.structured()
    return _rule(features, weights).describe(features, weights)


def check_route(where: str, route: Any) -> None:
    """Raise a `SpecError` for an unknown route."""
    if not (route is None or (isinstance(route, str) and route in ("dense", "structured"))):
        refuse(f"{where}(route={route!r})", "'dense' (materialize κ and ψ), 'structured' or None (sizes decide)", route)


def _routed(where: str, features: Features, weights: Weights, route: Route) -> tuple[Features, Weights]:
    """Return κ(x) and ψ(w) in the form of a route, for "dense" after a check of sizes."""
    if route is None:
        return features, weights
    check_route(where, route)
    if route == "structured":
        return features.structured(), weights
    if not isinstance(features, DenseFeatures):
        check_formed(features.columns, 'route="dense"')
        features = DenseFeatures(features.dense())
    if not isinstance(weights, DenseWeights):
        count = (weights.channels or 1) * weights.outputs * weights.columns
        if count > MAX_MATERIALIZED_WEIGHTS:
            raise SpecError(
                f'route="dense" materializes ψ(w), {count:,} entries; at most {MAX_MATERIALIZED_WEIGHTS:,} are allowed; '
                "leave the route out, or use a smaller layer"
            )
        weights = DenseWeights(weights.matrix())
    return features, weights
