"""Numerical helpers of the expansions: precision, ranges of data, and functions without overflow, underflow or poles."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def data_range(x: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    """Return the ends of each input in data `(rows, m)`, with a margin around a constant input.

    Args:
        x: the data.
        intervals: number of parts of the range; each part must be wider than rounding.
    """
    largest_value, eps = torch.finfo(x.dtype).max, torch.finfo(x.dtype).eps
    x = working_precision(x)
    info = torch.finfo(x.dtype)
    low, high = x.amin(0).clamp(-info.max / 8, info.max / 8), x.amax(0).clamp(-info.max / 8, info.max / 8)
    # With a width of a few rounding steps, parts would vanish, or both ends would round to the same stored value.
    magnitude = torch.maximum(low.abs(), high.abs())
    min_width = (magnitude * max(64 * intervals * info.eps, 4 * eps)).clamp_min(info.tiny * 64 * intervals)
    margin = torch.where(high - low > min_width, torch.zeros_like(low), min_width.clamp_min(0.5))
    return (low - margin).clamp_min(-largest_value), (high + margin).clamp_max(largest_value)


def evenly(low: float, high: float, count: int) -> tuple[float, ...]:
    """Return evenly spaced numbers from low to high; for a single number the middle."""
    return tuple(low + (high - low) * i / (count - 1) for i in range(count)) if count > 1 else ((low + high) / 2,)


def working_precision(x: Tensor) -> Tensor:
    """Return x, 16-bit types in float32: in 16 bits a cubic basis has an error of 0.25."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def concat_basis(values: list[Tensor]) -> Tensor:
    """Return [φ₁(x), φ₂(x), …], basis-major, from a list of `(..., m)`."""
    return torch.cat(values, -1) if len(values) > 1 else values[0]


def exp_neg(z: Tensor) -> Tensor:
    """Return exp(−z), with denormal results flushed to zero: products with denormal numbers are 30 times slower."""
    return torch.exp(-torch.where(z > _largest_exponent(z), math.inf, z))


def log_gamma(z: Tensor) -> Tensor:
    """Return log Γ(z) for z > 0.

    ONNX has no such operation. Exported are Stirling's series at z or z + 8, at least 8, and log Γ(z + 8) − log Γ(z) = log z(z +
    1)…(z + 7), in float64; seven terms of the series have an error of 10⁻¹⁵.
    """
    if not getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)():  # the former as of PyTorch 2.7
        return torch.lgamma(z)
    precise = z.double()
    below = precise < 8
    large = torch.where(below, precise + 8, precise)
    inverse = large.reciprocal()
    series = torch.zeros_like(inverse)
    for coefficient in reversed(STIRLING):
        series = series * inverse.square() + coefficient
    value = (large - 0.5) * large.log() - large + 0.5 * math.log(2 * math.pi) + series * inverse
    factors = torch.stack([precise.clamp_max(8) + i for i in range(8)])
    return torch.where(below, value - factors.log().sum(0), value).to(z.dtype)


STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""B₂ₖ / (2k(2k − 1)) for k = 1, 2, …, with the Bernoulli numbers B₂ₖ."""


def clamp_gaussian_input(u: Tensor) -> Tensor:
    """Return u clamped to the range in which exp(−u²/2) is a normal number."""
    most = math.sqrt(2 * _largest_exponent(u))
    return u.clamp(-most, most)


def _largest_exponent(like: Tensor) -> float:
    return -0.9 * math.log(torch.finfo(like.dtype).tiny)


def bounded_ratio(top: Tensor, bottom: Tensor, eps: float) -> Tensor:
    """Return top / bottom up to 1/ε, ε = `eps`, with a smooth bridge across the pole.

    With c = bottom / top the ratio is 1/c for |c| ≥ ε and 2c/ε² − c³/ε⁴ for |c| < ε: equal in value and slope at ±ε, zero
    at the pole. Top and bottom must not both be zero.
    """
    inside = bottom.abs() < eps * top.abs()
    one = torch.ones_like(top)
    # Safe arguments for both branches: a NaN in the branch not taken would spoil the gradient.
    outer = top / torch.where(inside, one, bottom)
    c = torch.where(inside, bottom, 0 * one) / torch.where(inside, top, one) / eps
    return torch.where(inside, (2 - c.square()) * c / eps, outer)
