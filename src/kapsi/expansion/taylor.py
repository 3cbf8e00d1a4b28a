"""Taylor polynomials: all products of up to `degree` inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion, RowMap, product_name
from kapsi.features import (
    DenseFeatures,
    Features,
    PairFeatures,
    ProductFeatures,
    SparseFeatures,
    SparseProductFeatures,
    entry_pairs,
    features_of,
    side_by_side,
)
from kapsi.function import MAX_EXPANSION, Tensors, option

__all__ = ["Taylor"]

MAX_PLAIN = 2**21
"""Largest size of κ(x) with products of two inputs computed by two gathers, up to here faster than m small products."""


@dataclass(frozen=True)
class Taylor(Expansion, name="taylor"):
    """All monomials of degree 1 to d: κ(x) = [P₁(x), …, P_d(x)], P_k = P_{k−1} ⊗ x, D = Σ mᵏ.

    The full form contains every ordering of a product (x₁x₂ and x₂x₁), as in the paper, and equals [1, P₁, …, P_{d−1}] ⊗ x,
    a product never multiplied out if the weights allow. The symmetric form contains every monomial once, D = Σ C(m + k − 1,
    k), times the square root of the number of orderings, so both forms have equal norms of κ(x) and equal regularized fits.

    Args:
        degree: d, highest total degree, 1 to 64; degree 1 is the identity. Values are finite in float32 for `|x|` ≤
            10^(38/d), which is 1,000 for degree 12.
        symmetric: each monomial once instead of every ordering.

    Raises:
        SpecError: D is beyond 2⁵³ columns.

    Source: arXiv 2407.04819, "Taylor's Polynomials based Data Expansions"; the symmetric basis belongs to the polynomial
        kernel (x·y)ᵏ.

    Example:
        >>> import torch
        >>> Taylor(2)(torch.tensor([2.0, 3.0]), {}).dense()
        tensor([2., 3., 4., 6., 6., 9.])
        >>> Taylor(2, symmetric=True)(torch.tensor([2.0, 3.0]), {}).dense()
        tensor([2.0000, 3.0000, 4.0000, 8.4853, 9.0000])
    """

    examples = ({}, {"degree": 1}, {"degree": 3}, {"symmetric": True}, {"degree": 4, "symmetric": True})

    degree: int = option(2, minimum=1, maximum=64)
    symmetric: bool = False

    def factors(self, in_features: int) -> tuple[int, int]:
        m = in_features
        if self.symmetric:
            q, t = 1, math.comb(m + self.degree, self.degree) - 1
        else:
            q, t = sum(m**k for k in range(self.degree)), m
        if q * t > MAX_EXPANSION:
            raise SpecError(
                f"Taylor(degree={self.degree}): {m:,} inputs make 10^{math.log10(q * t):.1f} columns, at most 10^15.9 are allowed"
            )
        return q, t

    def element_wise(self) -> bool:
        return self.degree == 1

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        """Return the monomials, without the factors of the symmetric form."""
        chosen: list[str] = []
        for degree in range(1, self.degree + 1):
            ways: Any = itertools.combinations_with_replacement(names, degree)
            ways = ways if self.symmetric else itertools.product(names, repeat=degree)
            chosen += map(product_name, ways)
        return chosen

    def takes_sparse(self) -> bool:
        return True

    def linear_coefficients(self, weights: Tensor) -> Tensor:
        """Return w for the inputs themselves, which come first, and 0 for all products."""
        return F.pad(weights, (0, self.out_features(weights.shape[-1]) - weights.shape[-1]))

    def substituted(self, columns: RowMap, in_features: int) -> RowMap | None:
        """Return the map of each degree, M ⊗ … ⊗ M; None for the symmetric form."""
        if self.symmetric and self.degree > 1:
            return None
        m = in_features

        def mapped(rows: Tensor) -> Tensor:
            pieces = []
            for k, piece in enumerate(rows.split([m ** (k + 1) for k in range(self.degree)], -1), 1):
                power = piece.unflatten(-1, (m,) * k)
                for axis in range(-k, 0):
                    power = columns(power.movedim(axis, -1)).movedim(-1, axis)
                pieces.append(power.flatten(-k))
            return torch.cat(pieces, -1)

        return mapped

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        inputs = features_of(x)
        if self.degree == 1:
            return inputs
        if isinstance(inputs, SparseFeatures):
            return _sparse_monomials(inputs, self.degree) if self.symmetric else _sparse_products(inputs, self.degree)
        if self.symmetric:
            if self.degree == 2:  # a compiler fuses plain operations
                pairs = PairFeatures(x)
                # Checked first: in a compiler the comparison would fix the batch size.
                many = not torch.compiler.is_compiling() and math.prod(x.shape[:-1]) * pairs.columns > MAX_PLAIN
                return pairs if many else pairs.materialize()
            return DenseFeatures(torch.cat(monomials(x, self.degree), -1))
        power = x
        lower = [torch.ones_like(x[..., :1]), x]
        for _ in range(self.degree - 2):
            power = (power.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
            lower.append(power)
        return ProductFeatures(torch.cat(lower, -1), x)


def monomials(x: Tensor, degree: int) -> list[Tensor]:
    """Return [S₁(x), …, S_d(x)]: the monomials of each degree in lexicographic order, times √(number of orderings).

    S_k begins with x₁ times all of S_{k−1}, then x₂ times the part of S_{k−1} without x₁, and so on: the part without the
    first i inputs is a suffix. Multiplying a monomial of S_{k−1} by x_i, with x_i then appearing α times, multiplies its
    number of orderings k!/Πα! by k/α.
    """
    m = x.shape[-1]
    powers, scaled = [x], [x]
    multiplicity = orderings = x.new_ones(m)  # of each monomial in S_{k−1}: α of the first input, k!/Πα!
    for k in range(2, degree + 1):
        # Numbers of monomials in S_{k−1} that begin with input i, and without any input before i.
        begin = [math.comb(m - i + k - 3, k - 2) for i in range(m)]
        suffix = [math.comb(m - i + k - 2, k - 1) for i in range(m)]
        total, values, repeats, counts = suffix[0], [], [], []
        for i in range(m):
            start = total - suffix[i]
            repeated = multiplicity[start : start + begin[i]] + 1
            repeats.append(torch.cat((repeated, repeated.new_ones(suffix[i] - begin[i]))))
            counts.append(orderings[start:] * k / repeats[-1])
            values.append(powers[-1][..., start:] * x[..., i : i + 1])
        multiplicity, orderings = torch.cat(repeats), torch.cat(counts)
        powers.append(torch.cat(values, -1))
        scaled.append(powers[-1] * orderings.sqrt())
    return scaled


def _sparse_products(x: SparseFeatures, degree: int) -> SparseProductFeatures:
    """Return [1, P₁, …, P_{d−1}] ⊗ x."""
    count = x.starts.shape[0]
    starts = torch.arange(count, device=x.starts.device)
    ones = SparseFeatures(starts, starts.new_zeros(count - 1), x.values.new_ones(count - 1), 1)
    lower = [ones, x]
    for _ in range(degree - 2):
        lower.append(SparseProductFeatures(lower[-1], x).multiplied())
    return SparseProductFeatures(side_by_side(lower), x)


def _sparse_monomials(x: SparseFeatures, degree: int) -> SparseFeatures:
    """Return [S₁(x), …, S_d(x)] as `monomials`, for monomials of stored inputs only."""
    m = x.width
    powers, scaled = x, [x]
    first = x.indices  # of each monomial: first input, its multiplicity, number of orderings
    multiplicity = orderings = torch.ones_like(x.indices, dtype=torch.float64)
    for k in range(2, degree + 1):
        starts, heads, rests = entry_pairs(x, powers)
        ordered = x.indices[heads] <= first[rests]
        heads, rests = heads[ordered], rests[ordered]
        starts = torch.cat((starts.new_zeros(1), ordered.cumsum(0)))[starts]
        begin = x.indices[heads]
        repeated = torch.where(begin == first[rests], multiplicity[rests] + 1, 1.0)
        orderings = orderings[rests] * k / repeated
        # Number of monomials in S_k, and in S_{k−1}, with an earlier first input.
        earlier = math.comb(m + k - 1, k) - _combinations(m - begin + k - 1, k)
        skipped = math.comb(m + k - 2, k - 1) - _combinations(m - begin + k - 2, k - 1)
        indices = earlier + powers.indices[rests] - skipped
        powers = SparseFeatures(starts, indices, x.values[heads] * powers.values[rests], math.comb(m + k - 1, k))
        first, multiplicity = begin, repeated
        scaled.append(replace(powers, values=powers.values * orderings.sqrt().to(x.values.dtype)))
    return side_by_side(scaled)


def _combinations(n: Tensor, k: int) -> Tensor:
    """Return the binomial coefficients C(n, k) of integers; all are at most D ≤ 2⁵³."""
    result = torch.ones_like(n)
    for i in range(1, k + 1):
        result = result * (n - k + i) // i
    return result
