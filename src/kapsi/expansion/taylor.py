"""Taylor polynomials: all products of up to `degree` inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion
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
from kapsi.function import LARGEST_EXPANSION, Tensors, option

__all__ = ["Taylor"]

LARGEST_PLAIN = 2**21
"""Numbers of κ(x) up to which products of two inputs are formed: two gathers are quicker than m small products there."""


@dataclass(frozen=True)
class Taylor(Expansion, name="taylor"):
    """All monomials of degree 1 to d: κ(x) = [P₁(x), …, P_d(x)], P_k = P_{k−1} ⊗ x, D = Σ mᵏ.

    The full form keeps every ordering of a product (x₁x₂ and x₂x₁), as the paper does, and is exactly
    [1, P₁, …, P_{d−1}] ⊗ x: a product that is never multiplied out where the weights allow. The symmetric form has every
    monomial once, D = Σ C(m + k − 1, k), times the square root of its number of orderings, so that the norm of κ(x), and
    with it a penalized fit, is the same in both forms.

    Args:
        degree: d, the highest total degree, 1 to 64; degree 1 is the identity. Values stay finite in float32 for
            `|x|` ≤ 10^(38/d), which is 1,000 for degree 12.
        symmetric: each monomial once instead of every ordering.

    Raises:
        SpecError: D is beyond 2⁵³ columns.

    Source: arXiv 2407.04819, "Taylor's Polynomials based Data Expansions"; the symmetric basis is the one of the
        polynomial kernel (x·y)ᵏ.

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
        if q * t > LARGEST_EXPANSION:
            raise SpecError(
                f"Taylor(degree={self.degree}): {m:,} inputs make 10^{math.log10(q * t):.1f} columns, at most 10^15.9 are allowed"
            )
        return q, t

    def element_wise(self) -> bool:
        return self.degree == 1

    def takes_sparse(self) -> bool:
        return True

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        inputs = features_of(x)
        if self.degree == 1:
            return inputs
        if isinstance(inputs, SparseFeatures):
            return _sparse_monomials(inputs, self.degree) if self.symmetric else _sparse_products(inputs, self.degree)
        if self.symmetric:
            if self.degree == 2:  # a compiler fuses the plain operations
                pairs = PairFeatures(x)
                # The compiler is asked first: a comparison would bind its program to a size of the batch.
                many = not torch.compiler.is_compiling() and math.prod(x.shape[:-1]) * pairs.columns > LARGEST_PLAIN
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
    first i inputs is a suffix. A monomial with k!/Πα! orderings whose first input appears α times has k/α times as many as
    the rest of it.
    """
    m = x.shape[-1]
    powers, scaled = [x], [x]
    multiplicity = orderings = x.new_ones(m)  # of each monomial in S_{k−1}: α of its first input, k!/Πα!
    for k in range(2, degree + 1):
        # Of S_{k−1}: how many monomials begin with input i, and how many use none before i.
        begin = [math.comb(m - i + k - 3, k - 2) for i in range(m)]
        suffix = [math.comb(m - i + k - 2, k - 1) for i in range(m)]
        total, values, repeats, counts = suffix[0], [], [], []
        for i in range(m):
            start = total - suffix[i]
            again = multiplicity[start : start + begin[i]] + 1
            repeats.append(torch.cat((again, again.new_ones(suffix[i] - begin[i]))))
            counts.append(orderings[start:] * k / repeats[-1])
            values.append(powers[-1][..., start:] * x[..., i : i + 1])
        multiplicity, orderings = torch.cat(repeats), torch.cat(counts)
        powers.append(torch.cat(values, -1))
        scaled.append(powers[-1] * orderings.sqrt())
    return scaled


def _sparse_products(x: SparseFeatures, degree: int) -> SparseProductFeatures:
    """Return [1, P₁, …, P_{d−1}] ⊗ x."""
    count = x.starts.shape[0]
    begin = torch.arange(count, device=x.starts.device)
    one = SparseFeatures(begin, begin.new_zeros(count - 1), x.values.new_ones(count - 1), 1)
    lower = [one, x]
    for _ in range(degree - 2):
        lower.append(SparseProductFeatures(lower[-1], x).multiplied())
    return SparseProductFeatures(side_by_side(lower), x)


def _sparse_monomials(x: SparseFeatures, degree: int) -> SparseFeatures:
    """Return [S₁(x), …, S_d(x)] as `monomials` does, of the monomials whose inputs are there."""
    m = x.width
    powers, scaled = x, [x]
    first = x.indices  # of each monomial: its first input, how often that appears, and its number of orderings
    multiplicity = orderings = torch.ones_like(x.indices, dtype=torch.float64)
    for k in range(2, degree + 1):
        starts, ones, rests = entry_pairs(x, powers)
        ordered = x.indices[ones] <= first[rests]
        ones, rests = ones[ordered], rests[ordered]
        starts = torch.cat((starts.new_zeros(1), ordered.cumsum(0)))[starts]
        begin = x.indices[ones]
        again = torch.where(begin == first[rests], multiplicity[rests] + 1, 1.0)
        orderings = orderings[rests] * k / again
        # As many of S_k begin with an earlier input, and of S_{k−1} use an earlier one.
        earlier = math.comb(m + k - 1, k) - _combinations(m - begin + k - 1, k)
        skipped = math.comb(m + k - 2, k - 1) - _combinations(m - begin + k - 2, k - 1)
        indices = earlier + powers.indices[rests] - skipped
        powers = SparseFeatures(starts, indices, x.values[ones] * powers.values[rests], math.comb(m + k - 1, k))
        first, multiplicity = begin, again
        scaled.append(replace(powers, values=powers.values * orderings.sqrt().to(x.values.dtype)))
    return side_by_side(scaled)


def _combinations(n: Tensor, k: int) -> Tensor:
    """Return the binomial coefficients C(n, k) of integers; none is larger than D, at most 2⁵³."""
    made = torch.ones_like(n)
    for i in range(1, k + 1):
        made = made * (n - k + i) // i
    return made
