"""References of wavelets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.polynomial.legendre import leggauss
from scipy.integrate import quad
from scipy.special import eval_hermitenorm, gamma
from scipy.stats import beta

from references.base import Reference, Table

Mother = Callable[[Any, ndarray], ndarray]


def meyer(f: Any, u: ndarray) -> ndarray:
    """Integrate its Fourier transform, band by band, with 64 nodes a period and more."""
    bands = [
        (2 / 3, 4 / 3, lambda w: np.sin(np.pi / 2 * (3 * w / (2 * np.pi) - 1))),
        (4 / 3, 8 / 3, lambda w: np.cos(np.pi / 2 * (3 * w / (4 * np.pi) - 1))),
    ]
    nodes, weights = leggauss(64)
    total = np.zeros_like(u)
    for low, high, spectrum in bands:
        w = np.pi * ((high + low) / 2 + (high - low) / 2 * nodes)
        total = total + np.cos(u[..., None] * w) @ (weights * spectrum(w)) * np.pi * (high - low) / 2
    return total / np.pi


@cache
def beta_norm(a: float, b: float) -> float:
    return quad(lambda v: float(beta_slope(a, b, np.array(v))) ** 2, *standard_beta(a, b).support(), epsabs=1e-14)[0]


def standard_beta(a: float, b: float) -> Any:
    """Return the beta distribution on the interval where it has mean 0 and variance 1."""
    deviation = beta(a, b).std()
    return beta(a, b, loc=-beta(a, b).mean() / deviation, scale=1 / deviation)


def beta_slope(a: float, b: float, u: ndarray) -> ndarray:
    """Return the derivative of the density: d/dy pdf(y; a, b) = (a + b − 1)(pdf(y; a − 1, b) − pdf(y; a, b − 1))."""
    low, high = standard_beta(a, b).support()
    y = (u - low) / (high - low)
    return (a + b - 1) * (beta.pdf(y, a - 1, b) - beta.pdf(y, a, b - 1)) / (high - low) ** 2


MOTHERS: dict[str, Mother] = {
    "haar": lambda f, u: ((u >= -0.5) & (u < 0)) * 1.0 - ((u >= 0) & (u < 0.5)) * 1.0,
    "ricker": lambda f, u: -eval_hermitenorm(2, u) * np.exp(-(u**2) / 2) / np.sqrt(gamma(2.5)),
    "derivative_of_gaussian": lambda f, u: (
        -eval_hermitenorm(f.order, u) * np.exp(-(u**2) / 2) / np.sqrt(gamma(f.order + 0.5))
    ),
    "shannon": lambda f, u: 2 * np.sinc(2 * u) - np.sinc(u),
    "meyer": meyer,
    "beta_wavelet": lambda f, u: -beta_slope(f.alpha, f.beta, u) / np.sqrt(beta_norm(f.alpha, f.beta)),
}


def on_grid(mother: Mother) -> Callable[[Any, ndarray, Any], ndarray]:
    def values(f: Any, x: ndarray, t: Any) -> ndarray:
        z = (x - t["center"]) / np.exp(t["log_scale"])
        made = []
        for s in range(f.scales):
            for place in np.arange(f.shifts) - (f.shifts - 1) / 2:
                made.append(f.dilation ** (-s / 2) * mother(f, (z - place) / f.dilation**s))
        return np.concatenate(made, 1)

    return values


SOURCES = {
    "haar": "numpy comparisons",
    "ricker": "scipy.special.eval_hermitenorm",
    "derivative_of_gaussian": "scipy.special.eval_hermitenorm",
    "shannon": "numpy.sinc",
    "meyer": "numpy.polynomial.legendre.leggauss on its Fourier transform",
    "beta_wavelet": "scipy.stats.beta.pdf",
}

EXPANSIONS: Table = {
    name: Reference(source, on_grid(MOTHERS[name]), lambda f, m: m * f.scales * f.shifts)
    for name, source in SOURCES.items()
}
