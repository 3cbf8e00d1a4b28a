"""References of Fourier series, trigonometric and hyperbolic functions, with what happens beyond their domains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from references.base import Reference, Table


def fourier(f: Any, x: ndarray, t: Any) -> ndarray:
    # One complex exponential and its powers.
    wave = np.exp(2j * np.pi * x / f.period)
    powers = [wave**k for k in range(1, f.harmonics + 1)]
    return np.concatenate([part for power in powers for part in (power.real, power.imag)], -1)


def line_beyond(function: Callable[[ndarray], ndarray], x: ndarray, end: float, slope: float, upper: bool) -> ndarray:
    """Return the function, and a line of the given slope above (or below) one end."""
    outside = x > end if upper else x < end
    line = function(np.float64(end)) + slope * (x - end)
    return np.where(outside, line, function(np.where(outside, end, x)))


def line_beyond_both(function: Callable[[ndarray], ndarray], x: ndarray, end: float, slope: float) -> ndarray:
    """Return the function between ±end, and lines of the same slope beyond both."""
    lower = line_beyond(function, np.minimum(x, 0), -end, slope, upper=False)
    return np.where(x < 0, lower, line_beyond(function, np.maximum(x, 0), end, slope, upper=True))


def trigonometric(f: Any, x: ndarray, t: Any) -> ndarray:
    cotangent = 1 / np.tan(np.where(x == 0, 1, x))
    inside = (np.abs(cotangent) < f.eps) & (x != 0)
    # The odd cubic that meets 1/c in value and slope at c = ε, solved for: p ε + q ε³ = 1/ε, p + 3q ε² = −1/ε².
    e = f.eps
    p, q = np.linalg.solve([[e, e**3], [1, 3 * e**2]], [1 / e, -1 / e**2])
    tangent = np.where(inside, p * cotangent + q * cotangent**3, np.tan(x))
    return np.concatenate([np.cos(x), np.sin(x), tangent], -1)


def hyperbolic(f: Any, x: ndarray, t: Any) -> ndarray:
    cutoff = f.cutoff
    cosine = line_beyond(np.cosh, np.abs(x), cutoff, np.sinh(cutoff), upper=True)  # even
    sine = line_beyond_both(np.sinh, x, cutoff, np.cosh(cutoff))
    return np.concatenate([cosine, sine, np.tanh(x)], -1)


def inverse_trigonometric(f: Any, x: ndarray, t: Any) -> ndarray:
    end = 1 - f.margin
    slope = 1 / np.cos(np.arcsin(end))  # of the inverse: one over the slope of the sine there
    return np.concatenate(
        [
            line_beyond_both(np.arccos, x, end, -slope),
            line_beyond_both(np.arcsin, x, end, slope),
            np.arctan(x),
        ],
        -1,
    )


def inverse_hyperbolic(f: Any, x: ndarray, t: Any) -> ndarray:
    above, inside = 1 + f.margin, 1 - f.margin
    cosine = line_beyond(np.arccosh, x, above, 1 / np.sinh(np.arccosh(above)), upper=False)
    tangent = line_beyond_both(np.arctanh, x, inside, np.cosh(np.arctanh(inside)) ** 2)
    return np.concatenate([cosine, np.arcsinh(x), tangent], -1)


EXPANSIONS: Table = {
    "fourier": Reference("powers of numpy's complex exponential", fourier, lambda f, m: 2 * m * f.harmonics),
    "trigonometric": Reference("numpy; the bridge by numpy.linalg.solve", trigonometric, lambda f, m: 3 * m),
    "hyperbolic": Reference("numpy", hyperbolic, lambda f, m: 3 * m),
    "inverse_trigonometric": Reference("numpy", inverse_trigonometric, lambda f, m: 3 * m),
    "inverse_hyperbolic": Reference("numpy", inverse_hyperbolic, lambda f, m: 3 * m),
}
