"""Numerical helpers of the expansions: precision, ranges of data, and functions without overflow, underflow or poles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "bounded_ratio",
    "clamp_gaussian_input",
    "concat_basis",
    "data_range",
    "exp_neg",
    "working_precision",
]


def data_range(x: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Return the lower and upper ends of each input in data `(rows, m)`, with room around a constant input.

    Args:
        x: the data.
        cells: into how many parts the range will be cut; each must be wider than rounding.
    """
    most, coarse = torch.finfo(x.dtype).max, torch.finfo(x.dtype).eps
    x = working_precision(x)
    info = torch.finfo(x.dtype)
    low, high = x.amin(0).clamp(-info.max / 8, info.max / 8), x.amax(0).clamp(-info.max / 8, info.max / 8)
    # At a width of few rounding steps the parts would vanish, or both ends become one in the type that they are kept in.
    largest = torch.maximum(low.abs(), high.abs())
    least = (largest * max(64 * cells * info.eps, 4 * coarse)).clamp_min(info.tiny * 64 * cells)
    margin = torch.where(high - low > least, torch.zeros_like(low), least.clamp_min(0.5))
    return (low - margin).clamp_min(-most), (high + margin).clamp_max(most)


def working_precision(x: Tensor) -> Tensor:
    """Return x in float32 if it comes in a 16-bit type: bases lose all their digits there (a cubic has an error of 0.25)."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def concat_basis(values: list[Tensor]) -> Tensor:
    """Return [φ₁(x), φ₂(x), …], basis-major, from a list of `(..., m)`."""
    return torch.cat(values, -1) if len(values) > 1 else values[0]


def exp_neg(z: Tensor) -> Tensor:
    """Return exp(−z), zero from where it would be a denormal number: those make a product take 30 times as long."""
    return torch.exp(-torch.where(z > _largest_exponent(z), math.inf, z))


def clamp_gaussian_input(u: Tensor) -> Tensor:
    """Return u moved to where exp(−u²/2) is a normal number."""
    most = math.sqrt(2 * _largest_exponent(u))
    return u.clamp(-most, most)


def _largest_exponent(like: Tensor) -> float:
    return -0.9 * math.log(torch.finfo(like.dtype).tiny)


def bounded_ratio(top: Tensor, bottom: Tensor, eps: float) -> Tensor:
    """Return top / bottom where that is at most 1/ε, ε = `eps`, and a smooth bridge across the pole.

    With c = bottom / top the ratio is 1/c for |c| ≥ ε and the odd 2c/ε² − c³/ε⁴ for |c| < ε: equal in value and slope at
    the seams, zero at the pole. Top and bottom must not both be zero.
    """
    inside = bottom.abs() < eps * top.abs()
    one = torch.ones_like(top)
    # Each branch with arguments that are safe for it: a NaN in the branch that is not taken would spoil the gradient.
    outer = top / torch.where(inside, one, bottom)
    c = torch.where(inside, bottom, 0 * one) / torch.where(inside, top, one) / eps
    return torch.where(inside, (2 - c.square()) * c / eps, outer)
