"""Polynomials of each input by three-term recurrence: orthogonal and related families, defined by coefficients."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import ElementWise, Interval, KnownDerivatives
from kapsi.expansion.numerics import concat_basis, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Tensors, option

__all__ = [
    "Bessel",
    "Chebyshev",
    "ChebyshevSecond",
    "Fibonacci",
    "Gegenbauer",
    "Hermite",
    "Jacobi",
    "Laguerre",
    "Legendre",
    "Lucas",
    "ReverseBessel",
]

MAX_VALUE = 1e30
"""Limit of the values; polynomials continue linearly from there, as float32 ends at 3.4e38 and slopes exceed values."""

FINITE_UP_TO = 1e3
"""Values and slopes are finite in float32 up to this |x|; polynomials within the limit up to here are never changed."""

Number = TypeVar("Number", float, Tensor)


class _Ends(NamedTuple):
    """Cutoffs on both sides, and the slopes of all polynomials there."""

    low: float
    high: float
    slopes_low: tuple[float, ...]
    slopes_high: tuple[float, ...]


@dataclass(frozen=True)
class ThreeTerm(ElementWise):
    """Polynomials by three-term recurrence: κ(x) = [P₁(x), …, P_d(x)], P_k = (a_k x + b_k) P_{k−1} − c_k P_{k−2}, D = m·d.

    P₀ = 1 is left out, since a constant is a bias. Each side of the real line has a cutoff, the `|x|` at which a first
    polynomial exceeds 10³⁰: beyond, all continue as their tangents. A side without such a point up to 1,000 has no cutoff.
    Within the cutoffs the polynomials follow the formula, inside and outside of the domain.

    Args:
        degree: d, the highest degree.

    Raises:
        SpecError: a polynomial exceeds 10³⁰ for an `|x|` ≤ 1.
    """

    first_index = 1
    squared: ClassVar[bool] = False
    """Whether the last term is c_k x² P_{k−2} instead."""

    degree: int = option(3, minimum=1, maximum=1000)

    @abstractmethod
    def coefficients(self, k: int) -> tuple[float, float, float]:
        """Return a_k, b_k, c_k for k ≥ 1; c₁ is ignored."""

    def check(self) -> None:
        if self._exceeds(1.0) or self._exceeds(-1.0):
            raise SpecError(
                f"{self!r}: a polynomial passes {MAX_VALUE:.0e} within |x| <= 1; "
                "choose a lower degree or smaller parameters"
            )
        self._ends  # noqa: B018 - computed now, since the first call may be traced

    def factors(self, in_features: int) -> tuple[int, int]:
        return self.degree, in_features

    def heavy_tailed(self) -> bool:
        """Return whether the degree exceeds four: T₅(3) is a thousand times the largest value on the domain."""
        return self.degree > 4

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        # The compiler cannot trace a function with a forward derivative, and fuses plain operations itself.
        evaluate = self._differentiable if torch.compiler.is_compiling() else self._in_place
        return DenseFeatures(evaluate(working_precision(x)).to(x.dtype))

    def _in_place(self, x: Tensor) -> Tensor:
        """Return all columns `(..., D)`, computed in place, with derivatives by the differentiated recurrence."""
        values: Tensor = KnownDerivatives.of(x, 0, self._derivative)
        return values.flatten(-2)

    def _derivative(self, x: Tensor, order: int) -> Tensor:
        """Return a derivative of P₁(x), …, P_d(x), `(..., d, m)`.

        P_k^(j) = (a_k x + b_k) P_{k−1}^(j) + j a_k P_{k−1}^(j−1) − c_k P_{k−2}^(j) for order j, with c_k x² in place of c_k
        by the product rule.
        """
        ends = self._ends
        clamped = x.clamp(ends.low, ends.high)
        shape = (*x.shape[:-1], self.degree, x.shape[-1])
        # With all lower orders: derivatives[j][..., k − 1, :] is P_k^(j).
        derivatives = [x.new_empty(shape) for _ in range(order + 1)]
        zero, one = torch.zeros_like(clamped), torch.ones_like(clamped)
        for k in range(1, self.degree + 1):
            a, b, c = self.coefficients(k)
            factor = torch.add(clamped * a, b) if b else clamped * a
            for j, derivative in enumerate(derivatives):
                row = derivative.select(-2, k - 1)
                one_less = derivative.select(-2, k - 2) if k > 1 else (zero if j else one)
                torch.mul(factor, one_less, out=row)
                if j and k > 1:
                    row.add_(derivatives[j - 1].select(-2, k - 2), alpha=j * a)
                elif j == 1:
                    row.add_(a)
                if k == 1 or not c:
                    continue
                previous = [
                    (m.select(-2, k - 3) if k > 2 else (zero if i else one)) for i, m in enumerate(derivatives[: j + 1])
                ]
                if not self.squared:
                    row.sub_(previous[j], alpha=c)
                    continue
                row.addcmul_(clamped.square(), previous[j], value=-c)
                if j > 0:
                    row.addcmul_(clamped, previous[j - 1], value=-2 * j * c)
                if j > 1:
                    row.sub_(previous[j - 2], alpha=j * (j - 1) * c)
        # Linear beyond the cutoffs. NaN stays NaN.
        if order == 0:
            below, above = (x - ends.low).clamp_max(0), (x - ends.high).clamp_min(0)
            for slopes, beyond in ((ends.slopes_low, below), (ends.slopes_high, above)):
                if slopes:
                    derivatives[0].addcmul_(beyond.unsqueeze(-2), x.new_tensor(slopes).unsqueeze(-1))
        elif order > 1 and (ends.slopes_low or ends.slopes_high):
            derivatives[order].masked_fill_(((x < ends.low) | (x > ends.high)).unsqueeze(-2), 0.0)
        return derivatives[order]

    def _differentiable(self, values: Tensor) -> Tensor:
        """Return all columns `(..., D)` by differentiable operations."""
        ends = self._ends
        basis = list(self._recurrence(values.clamp(ends.low, ends.high)))
        # Select the excess with `where`, not as values less clamped values: gradients of 10³⁰ would cancel for all inputs.
        if ends.slopes_low:
            below = torch.where(values < ends.low, values - ends.low, 0.0)
            basis = [p + slope * below for p, slope in zip(basis, ends.slopes_low, strict=True)]
        if ends.slopes_high:
            above = torch.where(values > ends.high, values - ends.high, 0.0)
            basis = [p + slope * above for p, slope in zip(basis, ends.slopes_high, strict=True)]
        return concat_basis(basis)

    def _recurrence(self, x: Number) -> Iterator[Number]:
        """Yield P₁(x), …, P_d(x)."""
        a, b, _ = self.coefficients(1)
        last: Number = a * x + b
        previous: Number | float = 1.0
        yield last
        for k in range(2, self.degree + 1):
            a, b, c = self.coefficients(k)
            factor = a * x + b if b else a * x
            subtracted = c * x * x * previous if self.squared else c * previous
            last, previous = factor * last - subtracted, last
            yield last

    def _slopes(self, x: float) -> Iterator[float]:
        """Yield P′₁(x), …, P′_d(x) by the differentiated recurrence."""
        last, previous, slope, previous_slope = 1.0, 0.0, 0.0, 0.0
        for k in range(1, self.degree + 1):
            a, b, c = self.coefficients(k)
            last_term, last_slope = (c * x * x, 2 * c * x) if self.squared else (c, 0.0)
            new = a * last + (a * x + b) * slope - last_slope * previous - last_term * previous_slope
            last, previous = (a * x + b) * last - last_term * previous, last
            slope, previous_slope = new, slope
            yield slope

    def _exceeds(self, x: float) -> bool:
        return any(abs(p) > MAX_VALUE for p in self._recurrence(x))

    @functools.cached_property
    def _ends(self) -> _Ends:
        low, high = -self._cutoff(-1.0), self._cutoff(1.0)
        return _Ends(low, high, *(tuple(self._slopes(x)) if math.isfinite(x) else () for x in (low, high)))

    def _cutoff(self, sign: float) -> float:
        """Return the cutoff of one side by bisection; infinity without a cutoff."""
        if not self._exceeds(sign * FINITE_UP_TO):
            return math.inf
        below, above = 1.0, FINITE_UP_TO
        while True:
            middle = (below + above) / 2
            if middle in (below, above):
                return below
            below, above = (below, middle) if self._exceeds(sign * middle) else (middle, above)


class OnUnitInterval(ThreeTerm):
    """Polynomials with the domain [−1, 1]: orthogonal there, or with small values."""

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return ((self.out_features(in_features), -1.0, 1.0),)


@dataclass(frozen=True)
class Chebyshev(OnUnitInterval, name="chebyshev", aliases=("chebyshev_polynomial",)):
    """Chebyshev polynomials of the first kind: κ(x) = [T₁(x), …, T_d(x)], T_k = 2x T_{k−1} − T_{k−2}, D = m·d.

    Orthogonal under 1/√(1 − x²) and bounded by one on [−1, 1]; beyond, the polynomials grow by the formula. From `|x|` =
    cosh(arcosh(10³⁰)/d), where T_d exceeds 10³⁰ (16 for degree 20), all continue linearly. For degrees up to 9 this point
    lies above 1,000, and the polynomials are never changed.

    In a hidden layer keep the inputs in range: `before="tanh"`, or `output="layer_norm"` of the layer before.

    Args:
        degree: d, the highest degree, 1 to 1,000.

    Source: arXiv 2407.04819, "Chebyshev Polynomials based Data Expansion"; DLMF 18.9.

    Example:
        >>> import torch
        >>> Chebyshev(3)(torch.tensor([0.5]), {}).dense()
        tensor([ 0.5000, -0.5000, -1.0000])
    """

    symbol = "T"
    examples = ({}, {"degree": 1}, {"degree": 12})

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return (1, 0, 0) if k == 1 else (2, 0, 1)


@dataclass(frozen=True)
class ChebyshevSecond(OnUnitInterval, name="chebyshev_second"):
    """Chebyshev polynomials of the second kind: κ(x) = [U₁(x), …, U_d(x)], U_k = 2x U_{k−1} − U_{k−2}, D = m·d.

    Orthogonal under √(1 − x²) on [−1, 1], with values up to k + 1 there.

    Args:
        degree: d, the highest degree, 1 to 1,000.

    Source: DLMF 18.9; named in arXiv 2407.04819, "Chebyshev Polynomials based Data Expansion".

    Example:
        >>> import torch
        >>> ChebyshevSecond(3)(torch.tensor([0.5]), {}).dense()
        tensor([ 1.,  0., -1.])
    """

    symbol = "U"
    examples = ({}, {"degree": 12})

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return 2, 0, 1


@dataclass(frozen=True)
class Jacobi(OnUnitInterval, name="jacobi", aliases=("jacobi_polynomial",)):
    """Jacobi polynomials of each input: κ(x) = [P₁(x), …, P_d(x)], P_k = P_k^(α,β), D = m·d.

    Orthogonal under (1 − x)^α (1 + x)^β on [−1, 1]: `Legendre` polynomials for α = β = 0, multiples of `Gegenbauer`
    polynomials for α = β.

    Args:
        degree: d, the highest degree, 1 to 1,000.
        alpha: α, exponent of the weight at 1, above −1 and up to 100; P_k(1) = C(k + α, k).
        beta: β, exponent of the weight at −1, above −1 and up to 100.

    Source: arXiv 2407.04819, "Jacobi Polynomials based Data Expansion"; DLMF 18.9.2.

    Example:
        >>> import torch
        >>> Jacobi(2, alpha=1.0, beta=0.0)(torch.tensor([1.0]), {}).dense()
        tensor([2., 3.])
    """

    symbol = "P"
    examples = (
        {},
        {"degree": 5, "alpha": 0.5, "beta": -0.5},
        {"degree": 4, "alpha": -0.25, "beta": -0.75},
        {"degree": 12, "alpha": 0.0, "beta": 2.5},
    )

    alpha: float = option(1.0, minimum=-1, maximum=100)
    beta: float = option(1.0, minimum=-1, maximum=100)

    def check(self) -> None:
        if min(self.alpha, self.beta) <= -1:
            raise SpecError(f"{self!r}: alpha and beta must be above -1")
        super().check()

    def coefficients(self, k: int) -> tuple[float, float, float]:
        alpha, beta = self.alpha, self.beta
        if k == 1:  # the formula below divides by α + β, which may be zero
            return (alpha + beta + 2) / 2, (alpha - beta) / 2, 0
        n = k + alpha + beta
        s = n + k
        b = (s - 1) * (alpha - beta) * (alpha + beta) / (2 * k * n * (s - 2))
        c = (k + alpha - 1) * (k + beta - 1) * s / (k * n * (s - 2))
        return (s - 1) * s / (2 * k * n), b, c


@dataclass(frozen=True)
class Legendre(OnUnitInterval, name="legendre", aliases=("legendre_polynomial",)):
    """Legendre polynomials: κ(x) = [P₁(x), …, P_d(x)], k P_k = (2k − 1) x P_{k−1} − (k − 1) P_{k−2}, D = m·d.

    Orthogonal under the constant weight and bounded by one on [−1, 1].

    Args:
        degree: d, the highest degree, 1 to 1,000.

    Source: DLMF 18.9; a "classic orthogonal polynomial" of arXiv 2407.04819, "Jacobi Polynomials based Data Expansion".

    Example:
        >>> import torch
        >>> Legendre(3)(torch.tensor([0.5]), {}).dense()
        tensor([ 0.5000, -0.1250, -0.4375])
    """

    symbol = "P"
    examples = ({}, {"degree": 12})

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return (2 * k - 1) / k, 0, (k - 1) / k


@dataclass(frozen=True)
class Gegenbauer(OnUnitInterval, name="gegenbauer", aliases=("gegenbauer_polynomial",)):
    """Gegenbauer (ultraspherical) polynomials: κ(x) = [C₁(x), …, C_d(x)], C_k = C_k^(α), D = m·d.

    k C_k = 2(k + α − 1) x C_{k−1} − (k + 2α − 2) C_{k−2}, orthogonal under (1 − x²)^(α − ½) on [−1, 1]: `Legendre`
    polynomials for α = ½, `ChebyshevSecond` for α = 1.

    Args:
        degree: d, the highest degree, 1 to 1,000.
        alpha: α, above −½ and up to 100, at least 0.1 from zero, where all polynomials vanish.

    Source: DLMF 18.9; named in arXiv 2407.04819, "Jacobi Polynomials based Data Expansion".

    Example:
        >>> import torch
        >>> Gegenbauer(2, alpha=2.0)(torch.tensor([0.5]), {}).dense()
        tensor([2., 1.])
    """

    symbol = "C"
    examples = ({}, {"degree": 12, "alpha": -0.25}, {"degree": 4, "alpha": 3.0})

    alpha: float = option(1.5, minimum=-0.5, maximum=100)

    def check(self) -> None:
        # Nearer to zero, weights of size 1/α times values of 10³⁰ would exceed float32.
        if self.alpha == -0.5 or abs(self.alpha) < 0.1:
            raise SpecError(
                f"{self!r}: alpha must be above -0.5 and at least 0.1 from zero; "
                "for zero itself, up to a factor, take Chebyshev"
            )
        super().check()

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return 2 * (k + self.alpha - 1) / k, 0, (k + 2 * self.alpha - 2) / k


@dataclass(frozen=True)
class Hermite(ThreeTerm, name="hermite", aliases=("hermite_polynomial",)):
    """Hermite polynomials: κ(x) = [He₁(x), …, He_d(x)], He_k = x He_{k−1} − (k − 1) He_{k−2}, D = m·d.

    Orthogonal under the standard normal density exp(−x²/2), so columns of standard normal inputs are uncorrelated before
    training. The physicist's H_k = 2x H_{k−1} − 2(k − 1) H_{k−2} is 2^(k/2) He_k(√2 x), orthogonal under exp(−x²).

    Args:
        degree: d, the highest degree, 1 to 27; values grow as √d!, and up to here none exceeds 10³⁰ between the outermost
            zeros.
        convention: `probabilist` for He, `physicist` for H.

    Source: DLMF 18.9; a "classic orthogonal polynomial" of arXiv 2407.04819, "Jacobi Polynomials based Data Expansion".

    Example:
        >>> import torch
        >>> Hermite(3)(torch.tensor([2.0]), {}).dense()
        tensor([2., 3., 2.])
        >>> Hermite(3, convention="physicist")(torch.tensor([2.0]), {}).dense()
        tensor([ 4., 14., 40.])
    """

    symbol = "H"
    examples = ({}, {"degree": 4, "convention": "physicist"}, {"degree": 9})

    degree: int = option(3, minimum=1, maximum=27)
    convention: Literal["probabilist", "physicist"] = "probabilist"

    def coefficients(self, k: int) -> tuple[float, float, float]:
        scale = 2 if self.convention == "physicist" else 1
        return scale, 0, scale * (k - 1)


@dataclass(frozen=True)
class Laguerre(ThreeTerm, name="laguerre", aliases=("laguerre_polynomial",)):
    """Laguerre polynomials of each input: κ(x) = [L₁(x), …, L_d(x)], L_k = L_k^(α), D = m·d.

    k L_k = (2k − 1 + α − x) L_{k−1} − (k − 1 + α) L_{k−2}, orthogonal under x^α exp(−x) on [0, ∞). Negative inputs follow
    the same formula.

    Args:
        degree: d, the highest degree, 1 to 1,000.
        alpha: α, exponent of the weight at zero, above −1 and up to 100; L_k(0) = C(k + α, k).

    Source: DLMF 18.9; a "classic orthogonal polynomial" of arXiv 2407.04819, "Jacobi Polynomials based Data Expansion".

    Example:
        >>> import torch
        >>> Laguerre(2)(torch.tensor([2.0]), {}).dense()
        tensor([-1., -1.])
    """

    symbol = "L"
    examples = ({}, {"degree": 4, "alpha": -0.5}, {"degree": 9, "alpha": 2.0})

    alpha: float = option(0.0, minimum=-1, maximum=100)

    def check(self) -> None:
        if self.alpha <= -1:
            raise SpecError(f"{self!r}: alpha must be above -1")
        super().check()

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return ((self.out_features(in_features), 0.0, math.inf),)

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return -1 / k, (2 * k - 1 + self.alpha) / k, (k - 1 + self.alpha) / k


@dataclass(frozen=True)
class Fibonacci(OnUnitInterval, name="fibonacci", aliases=("fibonacci_polynomial",)):
    """Fibonacci polynomials: κ(x) = [F₂(x), …, F_{d+1}(x)], F_k = x F_{k−1} + F_{k−2}, F₁ = 1, F₂ = x, D = m·d.

    Values at 1 are the Fibonacci numbers. F_{k+1} has degree k; the constant F₁ is left out.

    Args:
        degree: d, the highest degree, 1 to 100.

    Source: Koshy, Fibonacci and Lucas Numbers with Applications (2001), chapter 37.

    Example:
        >>> import torch
        >>> Fibonacci(5)(torch.tensor([1.0]), {}).dense()
        tensor([1., 2., 3., 5., 8.])
    """

    symbol = "F"
    examples = ({}, {"degree": 9})

    degree: int = option(3, minimum=1, maximum=100)

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return 1, 0, -1


@dataclass(frozen=True)
class Lucas(OnUnitInterval, name="lucas", aliases=("lucas_polynomial",)):
    """Lucas polynomials: κ(x) = [L₁(x), …, L_d(x)], L_k = x L_{k−1} + L_{k−2}, L₀ = 2, L₁ = x, D = m·d.

    Values at 1 are the Lucas numbers.

    Args:
        degree: d, the highest degree, 1 to 100.

    Source: Koshy, Fibonacci and Lucas Numbers with Applications (2001), chapter 37.

    Example:
        >>> import torch
        >>> Lucas(5)(torch.tensor([1.0]), {}).dense()
        tensor([ 1.,  3.,  4.,  7., 11.])
    """

    symbol = "L"
    examples = ({}, {"degree": 9})

    degree: int = option(3, minimum=1, maximum=100)

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return 1, 0, -2 if k == 2 else -1  # L₀ is twice P₀


@dataclass(frozen=True)
class Bessel(OnUnitInterval, name="bessel", aliases=("bessel_polynomial",)):
    """Bessel polynomials: κ(x) = [y₁(x), …, y_d(x)], y_k = (2k − 1) x y_{k−1} + y_{k−2}, y₁ = x + 1, D = m·d.

    Orthogonal on the unit circle of the complex plane, not on a real interval. The leading coefficient of y_k is
    1·3·5⋯(2k − 1), so keep the degree small.

    Args:
        degree: d, the highest degree, 1 to 20, where values reach 10²⁴ at x = 1.

    Source: Krall and Frink, A new class of orthogonal polynomials: the Bessel polynomials (1949); DLMF 18.34.

    Example:
        >>> import torch
        >>> Bessel(3)(torch.tensor([1.0]), {}).dense()
        tensor([ 2.,  7., 37.])
    """

    symbol = "y"
    examples = ({}, {"degree": 6})

    degree: int = option(3, minimum=1, maximum=20)

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return 2 * k - 1, k == 1, -1


@dataclass(frozen=True)
class ReverseBessel(OnUnitInterval, name="reverse_bessel", aliases=("reverse_bessel_polynomial",)):
    """Reverse Bessel polynomials: κ(x) = [θ₁(x), …, θ_d(x)], θ_k = (2k − 1) θ_{k−1} + x² θ_{k−2}, θ₁ = x + 1, D = m·d.

    θ_k(x) = x^k y_k(1/x): the coefficients of `Bessel` in the opposite order. The leading one is 1, the constant one
    1·3·5⋯(2k − 1), so keep the degree small.

    Args:
        degree: d, the highest degree, 1 to 20, where values reach 10²³ at x = 0.

    Source: Krall and Frink, A new class of orthogonal polynomials: the Bessel polynomials (1949); DLMF 18.34.

    Example:
        >>> import torch
        >>> ReverseBessel(3)(torch.tensor([1.0, 0.0]), {}).dense()
        tensor([ 2.,  1.,  7.,  3., 37., 15.])
    """

    squared = True
    symbol = "theta"
    examples = ({}, {"degree": 6})

    degree: int = option(3, minimum=1, maximum=20)

    def coefficients(self, k: int) -> tuple[float, float, float]:
        return (1, 1, 0) if k == 1 else (0, 2 * k - 1, -1)
