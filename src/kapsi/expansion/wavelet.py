"""Wavelets of each input on a grid of scales and shifts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kapsi.expansion.base import HIDDEN_MARGIN, ElementWise, Interval, KnownDerivatives
from kapsi.expansion.numerics import clamp_gaussian_input, data_range, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = [
    "BetaWavelet",
    "DerivativeOfGaussianWavelet",
    "HaarWavelet",
    "MeyerWavelet",
    "RickerWavelet",
    "ShannonWavelet",
]


@dataclass(frozen=True)
class Wavelet(ElementWise):
    """Wavelets of each input: κ(x) = [ψ₀₀(x), ψ₀₁(x), …, ψ_{S−1,T−1}(x)], basis-major, scale by scale, D = m·S·T.

    ψ_{s,t}(x) = a^{−s/2} ψ((z − τ_t) / a^s), z = (x − center) / e^{log_scale}, τ_t = t − (T − 1)/2, s = 0, …, S − 1 and t =
    0, …, T − 1. Every mother wavelet ψ is centered at 0 and has zero mean and unit norm, ∫ψ² = 1.

    The finest wavelets, s = 0, are a unit of z apart, and each scale has the same T positions (stationary or undecimated
    wavelet transform): every scale covers −T/2 ≤ z ≤ T/2, and no wavelet lies outside.

    `center` and `log_scale`, `(m,)`, are buffers, initially zero; `kapsi.calibrate` sets both so that z ranges from −T/2 to
    T/2 on the data.
    """

    hidden_margin: ClassVar[float] = HIDDEN_MARGIN

    scales: int = option(3, minimum=1, maximum=32)
    shifts: int = option(4, minimum=1, maximum=100_000)
    dilation: float = option(2.0, minimum=1.1, maximum=8.0)

    @abstractmethod
    def _mother(self, u: Tensor) -> Tensor:
        """Return ψ(u)."""

    def factors(self, in_features: int) -> tuple[int, int]:
        return self.scales * self.shifts, in_features

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return ((self.out_features(in_features), -self.shifts / 2, self.shifts / 2),)

    def covered(self, params: Tensors, in_features: int) -> tuple[Tensor, Tensor]:
        center, half = params["center"].detach(), params["log_scale"].detach().exp() * (self.shifts / 2)
        return center - half, center + half

    def params(self, in_features: int) -> Params:
        trainable = getattr(self, "learnable", False)
        return {name: Param((in_features,), "zeros", trainable=trainable) for name in ("center", "log_scale")}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return the middle and the T-th part of each input's range; a constant input gets a margin."""
        low, high = data_range(x, self.shifts)
        return {"center": low + (high - low) / 2, "log_scale": torch.log((high - low) / self.shifts)}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        center, log_scale = working_precision(params["center"]), working_precision(params["log_scale"])
        z = (working_precision(x) - center) * torch.exp(-log_scale)
        positions = torch.arange(self.shifts, dtype=z.dtype, device=z.device) - (self.shifts - 1) / 2
        exponents = -torch.arange(self.scales, dtype=z.dtype, device=z.device).reshape(-1, 1, 1)
        factor = torch.pow(self.dilation, exponents)
        values = self._mother((z.unsqueeze(-2) - positions.unsqueeze(-1)).unsqueeze(-3) * factor)
        return DenseFeatures((values * factor.sqrt()).flatten(-3).to(x.dtype))


@dataclass(frozen=True)
class SmoothWavelet(Wavelet):
    """A differentiable wavelet: position and scale are trainable."""

    learnable: bool = False


@dataclass(frozen=True)
class HaarWavelet(Wavelet, name="haar", aliases=("haar_wavelet", "harr_wavelet")):
    """Haar wavelets of each input: ψ(u) = 1 on [−½, 0), −1 on [0, ½), else 0; D = m·scales·shifts.

    On the grid ψ_{s,t}(x) = a^{−s/2} ψ((z − t + (T − 1)/2) / a^s), z = (x − center) / e^{log_scale}; the buffers `center`
    and `log_scale`, initially zero, are set by `kapsi.calibrate`. The gradient is zero almost everywhere, so use these
    wavelets in a first layer. Outside of −T/2 ≤ z ≤ T/2 all but the coarse wavelets are zero.

    Args:
        scales: S, the number of scales, 1 to 32.
        shifts: T, the number of positions, one unit of z apart, 1 to 100,000.
        dilation: a, the ratio of successive scales, 1.1 to 8.

    Source: Daubechies, Ten Lectures on Wavelets (1992), section 1.3.3.

    Example:
        >>> import torch
        >>> tensors = {"center": torch.zeros(1), "log_scale": torch.zeros(1)}
        >>> HaarWavelet(scales=1, shifts=2)(torch.tensor([0.3]), tensors).dense()
        tensor([0., 1.])
    """

    examples = ({}, {"scales": 2, "shifts": 3, "dilation": 1.5})

    def _mother(self, u: Tensor) -> Tensor:
        inside = (u >= -0.5) & (u < 0.5)
        step = torch.where(u < 0, 1.0, -1.0).to(u.dtype)
        # Zero outside, except for NaN.
        return torch.where(inside, step, torch.where(u.isnan(), u, torch.zeros_like(u)))


@dataclass(frozen=True)
class RickerWavelet(SmoothWavelet, name="ricker", aliases=("mexican_hat", "ricker_wavelet")):
    """Ricker wavelets of each input ("Mexican hats"): ψ(u) = 2/(√3 π^¼) (1 − u²) exp(−u²/2); D = m·scales·shifts.

    On the grid ψ_{s,t}(x) = a^{−s/2} ψ((z − t + (T − 1)/2) / a^s), z = (x − center) / e^{log_scale}; the buffers `center`
    and `log_scale`, initially zero, are set by `kapsi.calibrate`. Far outside of −T/2 ≤ z ≤ T/2 value and gradient vanish.

    Args:
        scales: S, the number of scales, 1 to 32.
        shifts: T, the number of positions, one unit of z apart, 1 to 100,000.
        dilation: a, the ratio of successive scales, 1.1 to 8.
        learnable: train `center` and `log_scale`.

    Source: Daubechies, Ten Lectures on Wavelets (1992), section 3.3.5.

    Example:
        >>> import torch
        >>> tensors = {"center": torch.zeros(1), "log_scale": torch.zeros(1)}
        >>> RickerWavelet(scales=2, shifts=1)(torch.tensor([0.0]), tensors).dense()
        tensor([0.8673, 0.6133])
    """

    examples = ({}, {"scales": 2, "shifts": 3, "dilation": 1.5, "learnable": True})

    def _mother(self, u: Tensor) -> Tensor:
        square = clamp_gaussian_input(u).square()
        return (1 - square) * torch.exp(square * -0.5) * (2 / (math.sqrt(3) * math.pi**0.25))


@dataclass(frozen=True)
class DerivativeOfGaussianWavelet(SmoothWavelet, name="derivative_of_gaussian", aliases=("dog", "dog_wavelet")):
    """Derivatives of a Gaussian: ψ(u) = (−1)^{n+1} Γ(n + ½)^{−½} dⁿ/duⁿ exp(−u²/2); D = m·scales·shifts.

    Equivalently −He_n(u) exp(−u²/2) / √Γ(n + ½) with Hermite polynomials He_n; order 2 is the Ricker wavelet. On the grid
    ψ_{s,t}(x) = a^{−s/2} ψ((z − t + (T − 1)/2) / a^s), z = (x − center) / e^{log_scale}; the buffers `center` and
    `log_scale`, initially zero, are set by `kapsi.calibrate`. Far outside of −T/2 ≤ z ≤ T/2 value and gradient vanish.

    Args:
        scales: S, the number of scales, 1 to 32.
        shifts: T, the number of positions, one unit of z apart, 1 to 100,000.
        dilation: a, the ratio of successive scales, 1.1 to 8.
        learnable: train `center` and `log_scale`.
        order: n, 1 to 20.

    Source: Torrence and Compo, A Practical Guide to Wavelet Analysis (1998), table 1; DLMF 18.9 for the recurrence.

    Example:
        >>> import torch
        >>> tensors = {"center": torch.zeros(1), "log_scale": torch.zeros(1)}
        >>> DerivativeOfGaussianWavelet(scales=1, shifts=1, order=1)(torch.tensor([1.0]), tensors).dense()
        tensor([-0.6443])
    """

    examples = (
        {},
        {"scales": 2, "shifts": 3, "order": 1, "learnable": True},
        {"scales": 1, "shifts": 2, "order": 2, "dilation": 3.0},
        {"scales": 2, "shifts": 1, "order": 7},
    )

    order: int = option(1, minimum=1, maximum=20)

    def _mother(self, u: Tensor) -> Tensor:
        u = clamp_gaussian_input(u)
        # He_{k+1} = u He_k − k He_{k−1}, with the Gaussian and the norm in all terms.
        previous = torch.exp(u.square() * -0.5) * (-1 / math.sqrt(math.gamma(self.order + 0.5)))
        last = u * previous
        for k in range(1, self.order):
            previous, last = last, u * last - k * previous
        return last


@dataclass(frozen=True)
class ShannonWavelet(SmoothWavelet, name="shannon", aliases=("shannon_wavelet",)):
    """Shannon wavelets of each input: ψ(u) = sin(πu/2) / (πu/2) · cos(3πu/2); D = m·scales·shifts.

    The Fourier transform is constant on frequencies from π to 2π. On the grid ψ_{s,t}(x) = a^{−s/2} ψ((z − t + (T − 1)/2) /
    a^s), z = (x − center) / e^{log_scale}; the buffers `center` and `log_scale`, initially zero, are set by
    `kapsi.calibrate`. Values fall as 1/u, so gradients exist everywhere.

    Args:
        scales: S, the number of scales, 1 to 32.
        shifts: T, the number of positions, one unit of z apart, 1 to 100,000.
        dilation: a, the ratio of successive scales, 1.1 to 8.
        learnable: train `center` and `log_scale`.

    Source: Mallat, A Wavelet Tour of Signal Processing (2009), section 7.2.2, there shifted by ½.

    Example:
        >>> import torch
        >>> tensors = {"center": torch.zeros(1), "log_scale": torch.zeros(1)}
        >>> ShannonWavelet(scales=2, shifts=1)(torch.tensor([0.0]), tensors).dense()
        tensor([1.0000, 0.7071])
    """

    examples = ({}, {"scales": 2, "shifts": 3, "dilation": 1.5, "learnable": True})

    def _mother(self, u: Tensor) -> Tensor:
        return sinc(u * (math.pi / 2)) * torch.cos(u * (1.5 * math.pi))


@dataclass(frozen=True)
class MeyerWavelet(SmoothWavelet, name="meyer", aliases=("meyer_wavelet",)):
    """Meyer wavelets of each input, with linear transitions between frequency bands (ν(x) = x); D = m·scales·shifts.

    The Fourier transform of ψ is −cos(¾ω) for `⅔π ≤ |ω| ≤ 4/3π`, `sin(⅜|ω|)` for `4/3π ≤ |ω| ≤ 8/3π`, and 0 elsewhere
    (shifted to make ψ even). Each piece has a closed inverse, and with S(y) = sin(y)/y their sum is

        ψ(u) = Σ_± ⅔ sin(2πp) S(⅔πp) − ⅓ cos(πq) S(⅓πq),  p = ⅜ ± u,  q = ¾ ± u,

    without poles, unlike the equal quotients of polynomials. On the grid ψ_{s,t}(x) = a^{−s/2} ψ((z − t + (T − 1)/2) /
    a^s), z = (x − center) / e^{log_scale}; the buffers `center` and `log_scale`, initially zero, are set by
    `kapsi.calibrate`. Values fall as 1/u².

    Args:
        scales: S, the number of scales, 1 to 32.
        shifts: T, the number of positions, one unit of z apart, 1 to 100,000.
        dilation: a, the ratio of successive scales, 1.1 to 8.
        learnable: train `center` and `log_scale`.

    Source: Daubechies, Ten Lectures on Wavelets (1992), section 4.2.1; Valenzuela and de Oliveira, Close Expressions for
        Meyer Wavelet and Scale Function (arXiv 1502.00161).

    Example:
        >>> import torch
        >>> tensors = {"center": torch.zeros(1), "log_scale": torch.zeros(1)}
        >>> MeyerWavelet(scales=2, shifts=1)(torch.tensor([0.0]), tensors).dense()
        tensor([1.2732, 0.9003])
    """

    examples = ({}, {"scales": 2, "shifts": 3, "dilation": 1.5, "learnable": True})

    def _mother(self, u: Tensor) -> Tensor:
        def half(v: Tensor) -> Tensor:
            p, q = (v + 0.375) * math.pi, (v + 0.75) * math.pi
            return torch.sin(2 * p) * sinc(p * (2 / 3)) * (2 / 3) - torch.cos(q) * sinc(q / 3) / 3

        return half(u) + half(-u)


@dataclass(frozen=True)
class BetaWavelet(SmoothWavelet, name="beta_wavelet"):
    """Beta wavelets of each input: ψ(u) = −C dP/du, P the beta density on an interval with mean 0 and variance 1.

    The interval is −√(α/β)·√(α + β + 1) ≤ u ≤ √(β/α)·√(α + β + 1); outside, ψ is zero. C normalizes to unit norm. On the
    grid ψ_{s,t}(x) = a^{−s/2} ψ((z − t + (T − 1)/2) / a^s), z = (x − center) / e^{log_scale}, D = m·scales·shifts; the
    buffers `center` and `log_scale`, initially zero, are set by `kapsi.calibrate`.

    Args:
        scales: S, the number of scales, 1 to 32.
        shifts: T, the number of positions, one unit of z apart, 1 to 100,000.
        dilation: a, the ratio of successive scales, 1.1 to 8.
        learnable: train `center` and `log_scale`.
        alpha, beta: α and β, 3 to 50; below 3 the gradient is unbounded at the ends of the interval.

    Source: de Oliveira and de Araújo, Compactly Supported One-cyclic Wavelets Derived from Beta Distributions (2005), there
        without C.

    Example:
        >>> import torch
        >>> tensors = {"center": torch.zeros(1), "log_scale": torch.zeros(1)}
        >>> BetaWavelet(scales=1, shifts=1)(torch.tensor([[-1.0], [1.0], [3.5]]), tensors).dense()
        tensor([[-0.5594],
                [ 0.5594],
                [ 0.0000]])
    """

    examples = (
        {},
        {"scales": 2, "shifts": 3, "alpha": 3.0, "beta": 5.5, "learnable": True},
        {"scales": 1, "shifts": 2, "alpha": 7.0, "beta": 3.0, "dilation": 3.0},
    )

    alpha: float = option(4.0, minimum=3.0, maximum=50.0)
    beta: float = option(4.0, minimum=3.0, maximum=50.0)

    def _mother(self, u: Tensor) -> Tensor:
        a, b = self.alpha, self.beta
        length = (a + b) * math.sqrt((a + b + 1) / (a * b))
        y = u / length + a / (a + b)  # 0 to 1 on the interval
        inside = (y > 0) & (y < 1)
        # A safe point outside: derivatives there are multiplied by zero and must be finite.
        y = torch.where(inside, y, torch.full_like(y, 0.5))
        slope = y.pow(a - 2) * (1 - y).pow(b - 2) * ((a - 1) * (1 - y) - (b - 1) * y)
        # Zero outside, except for NaN.
        outside = torch.where(u.isnan(), u, torch.zeros_like(u))
        return torch.where(inside, slope * self._constant(length), outside)

    def _constant(self, length: float) -> float:
        """Return the negative reciprocal norm of y^{α−2} (1 − y)^{β−2} ((α − 1)(1 − y) − (β − 1) y) on the interval."""
        a, b = self.alpha, self.beta

        def beta_function(p: float, q: float) -> float:
            return math.exp(math.lgamma(p) + math.lgamma(q) - math.lgamma(p + q))

        square = (
            (a - 1) ** 2 * beta_function(2 * a - 3, 2 * b - 1)
            - 2 * (a - 1) * (b - 1) * beta_function(2 * a - 2, 2 * b - 2)
            + (b - 1) ** 2 * beta_function(2 * a - 1, 2 * b - 3)
        )
        return -1 / math.sqrt(length * square)


def sinc(y: Tensor) -> Tensor:
    """Return S(y) = sin(y)/y with all derivatives, saving only y: quotients lose digits near zero."""
    if torch.compiler.is_compiling():  # cannot trace a function with a forward derivative
        return _plain_sinc(y)
    values: Tensor = KnownDerivatives.of(y, 0, _sinc_derivative)
    return values


def _sinc_derivative(y: Tensor, order: int) -> Tensor:
    """Return a derivative of sin(y)/y: by y S⁽ᵏ⁾ = sin⁽ᵏ⁾ − k S⁽ᵏ⁻¹⁾, near zero by the series."""
    if order == 0:
        return torch.where(y == 0, 1.0, torch.sin(y) / y)
    reach = 0.25 if order == 1 else float(order)
    small = y.abs() < reach
    waves = (torch.sin(y), torch.cos(y))
    quotient = waves[0] / y
    for k in range(1, order + 1):
        quotient = (waves[k % 2] * (-1) ** (k // 2) - k * quotient) / y
    # Σ_j (−1)^j y^(2j−k) (2j)! / ((2j − k)! (2j + 1)!)
    first = (order + 1) // 2
    terms = range(first, first + (6 if order == 1 else 12 + order))
    square = y.square()
    series = torch.zeros_like(y)
    for j in reversed(terms):
        series = series * square + (-1) ** j / ((2 * j + 1) * math.factorial(2 * j - order))
    return torch.where(small, series * y if order % 2 else series, quotient)


def _plain_sinc(y: Tensor) -> Tensor:
    """Return sin(y)/y by differentiable operations."""
    small = y.abs() < 0.25
    square = torch.where(small, y, torch.zeros_like(y)).square()
    series = square * (-1 / math.factorial(11))  # the next term is y¹²/13! = 1e-17
    for k in (4, 3, 2, 1):
        series = (series + (-1) ** k / math.factorial(2 * k + 1)) * square
    series = series + 1
    safe = torch.where(small, torch.ones_like(y), y)
    return torch.where(small, series, torch.sin(safe) / safe)
