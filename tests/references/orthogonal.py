"""References of polynomials by three-term recurrence: SciPy's, or the coefficients in closed form."""

from __future__ import annotations

from collections.abc import Callable
from math import comb, factorial
from typing import Any

import numpy as np
import scipy.special
from numpy import ndarray
from numpy.polynomial import polynomial

from references.base import Reference, Table


def jacobi(f: Any, k: int, x: ndarray) -> ndarray:
    return scipy.special.eval_jacobi(k, f.alpha, f.beta, x)


def hermite(f: Any, k: int, x: ndarray) -> ndarray:
    return (scipy.special.eval_hermite if f.convention == "physicist" else scipy.special.eval_hermitenorm)(k, x)


def fibonacci(f: Any, k: int, x: ndarray) -> ndarray:
    return sum(comb(k - j, j) * x ** (k - 2 * j) for j in range(k // 2 + 1))


def lucas(f: Any, k: int, x: ndarray) -> ndarray:
    return sum(k * comb(k - j, j) // (k - j) * x ** (k - 2 * j) for j in range(k // 2 + 1))


def bessel_coefficients(k: int) -> list[int]:
    """Return the integer coefficients of the Bessel polynomial, the constant one first."""
    return [factorial(k + j) // (factorial(k - j) * factorial(j) * 2**j) for j in range(k + 1)]


POLYNOMIALS: dict[str, tuple[str, Callable[[Any, int, ndarray], ndarray]]] = {
    "chebyshev": ("scipy.special.eval_chebyt", lambda f, k, x: scipy.special.eval_chebyt(k, x)),
    "chebyshev_second": ("scipy.special.eval_chebyu", lambda f, k, x: scipy.special.eval_chebyu(k, x)),
    "jacobi": ("scipy.special.eval_jacobi", jacobi),
    "legendre": ("scipy.special.eval_legendre", lambda f, k, x: scipy.special.eval_legendre(k, x)),
    "gegenbauer": ("scipy.special.eval_gegenbauer", lambda f, k, x: scipy.special.eval_gegenbauer(k, f.alpha, x)),
    "hermite": ("scipy.special.eval_hermitenorm, eval_hermite", hermite),
    "laguerre": ("scipy.special.eval_genlaguerre", lambda f, k, x: scipy.special.eval_genlaguerre(k, f.alpha, x)),
    "fibonacci": ("binomial coefficients, Koshy (2001), chapter 37", fibonacci),
    "lucas": ("binomial coefficients, Koshy (2001), chapter 37", lucas),
    "bessel": (
        "coefficients (k + j)! / ((k − j)! j! 2ʲ), DLMF 18.34.1",
        lambda f, k, x: polynomial.polyval(x, bessel_coefficients(k)),
    ),
    "reverse_bessel": (
        "coefficients (k + j)! / ((k − j)! j! 2ʲ) in opposite order, DLMF 18.34.1",
        lambda f, k, x: polynomial.polyval(x, bessel_coefficients(k)[::-1]),
    ),
}


def columns(polynomial: Callable[[Any, int, ndarray], ndarray]) -> Callable[[Any, ndarray, Any], ndarray]:
    return lambda f, x, t: np.concatenate([polynomial(f, k, x) for k in range(1, f.degree + 1)], -1)


EXPANSIONS: Table = {
    name: Reference(source, columns(polynomial), lambda f, m: m * f.degree)
    for name, (source, polynomial) in POLYNOMIALS.items()
}
