"""A polynomial of all inputs: a smooth model of few rows for the tests of structure."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from kapsi.interpret.expressions import Floats

MAX_COLUMNS = 300
"""Largest number of products of powers."""
MAX_DEGREE = 40
"""Largest degree of a polynomial of a single input."""


@dataclass(frozen=True)
class Surrogate:
    """A polynomial of total degree d in scaled inputs, with the error on held-out rows.

    Attributes:
        gradients: slope of each input at each row, (rows, inputs).
        values: value at each row.
        error: mean squared error of leave-one-out as a share of the target's variance.
    """

    gradients: Floats
    values: Floats
    error: float


def surrogate(x: Floats, y: Floats) -> Surrogate:
    """Return the polynomial, of inputs or of their logarithms, with the least error on held-out rows.

    Args:
        x: (rows, inputs).
        y: (rows,).
    """
    best: Surrogate | None = None
    for logarithm in (False, True) if (x > 0).all() else (False,):
        inputs = np.log(x) if logarithm else x
        rising = 0
        top = math.inf
        for degree in range(1, 15 if x.shape[1] > 1 else MAX_DEGREE + 1):
            exponents = _exponents(x.shape[1], degree)
            if len(exponents) > min(MAX_COLUMNS, len(y) // 3):
                break
            fit = _fitted(inputs, y, exponents)
            rising = 0 if fit.error < top else rising + 1
            top = min(top, fit.error)
            if math.isinf(fit.error):
                break
            if best is None or fit.error < best.error:
                best = Surrogate(fit.gradients / x, fit.values, fit.error) if logarithm else fit
            if rising == (2 if x.shape[1] > 1 else 4) or fit.error < 1e-18:
                break
    return best or Surrogate(np.zeros_like(x), np.full(len(y), y.mean()), 1.0)


def _exponents(inputs: int, degree: int) -> list[tuple[int, ...]]:
    """Return exponents of all products of total degree up to `degree`; too many give a list that is long enough to see it."""
    if math.comb(inputs + degree, degree) > MAX_COLUMNS:
        return [()] * (MAX_COLUMNS + 1)
    return [e for e in itertools.product(range(degree + 1), repeat=inputs) if sum(e) <= degree]


def _fitted(x: Floats, y: Floats, exponents: list[tuple[int, ...]]) -> Surrogate:
    """Return least squares of Chebyshev products, with the error of leave-one-out."""
    low, high = x.min(0), x.max(0)
    scale = np.where(high > low, 2 / np.where(high > low, high - low, 1), 0)
    z = np.clip((x - low) * scale - 1, -1, 1)
    degree = max(map(max, exponents))
    angles = np.arccos(z)
    orders = np.arange(degree + 1)
    cosines = np.cos(angles[..., None] * orders)
    slopes = _slopes(z, cosines)
    powers = np.array(exponents)
    factors = [cosines[:, i, powers[:, i]] for i in range(x.shape[1])]
    matrix = np.prod(factors, axis=0)
    center = y.mean()
    basis, triangle = np.linalg.qr(matrix)
    sizes = np.abs(np.diag(triangle))
    if sizes.min() <= 1e-11 * sizes.max():
        return Surrogate(np.zeros_like(x), np.full(len(y), center), math.inf)
    inner = basis.T @ (y - center)
    weights = np.linalg.solve(triangle, inner)
    # Each row by the polynomial of all others.
    left = (y - center - basis @ inner) / np.maximum(1 - (basis * basis).sum(1), 1e-3)
    error = float(np.mean(left**2) / max(float(y.var()), 1e-300))
    gradients = np.empty_like(x)
    for i in range(x.shape[1]):
        others = [slopes[:, i, powers[:, i]] if j == i else factor for j, factor in enumerate(factors)]
        gradients[:, i] = (np.prod(others, axis=0) @ weights) * scale[i]
    return Surrogate(gradients, matrix @ weights + center, error)


def _slopes(z: Floats, cosines: Floats) -> Floats:
    """Return the derivatives of Chebyshev polynomials, T'ₙ = n Uₙ₋₁, by their recurrence."""
    slopes = np.zeros_like(cosines)
    if cosines.shape[-1] > 1:
        slopes[..., 1] = 1
    for n in range(2, cosines.shape[-1]):
        slopes[..., n] = 2 * cosines[..., n - 1] + 2 * z * slopes[..., n - 1] - slopes[..., n - 2]
    return slopes
