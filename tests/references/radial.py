"""References of radial basis functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.interpolate import RBFInterpolator
from sklearn.metrics.pairwise import rbf_kernel

from references.base import Reference, Table

Bump = Callable[[ndarray, float, float], ndarray]


def gaussian(x: ndarray, center: float, epsilon: float) -> ndarray:
    return rbf_kernel(x.reshape(-1, 1), [[center]], gamma=epsilon**2)[:, 0]


def inverse_quadratic(x: ndarray, center: float, epsilon: float) -> ndarray:
    # An interpolant through one point of height one is the basis function itself.
    options = {"kernel": "inverse_quadratic", "epsilon": epsilon, "degree": -1}
    return RBFInterpolator([[center]], [1.0], **options)(x.reshape(-1, 1))


SLOPES: dict[str, Bump] = {
    "gaussian": lambda x, c, e: -2 * e**2 * (x - c) * np.exp(-((e * (x - c)) ** 2)),
    "inverse_quadratic": lambda x, c, e: -2 * e**2 * (x - c) / (1 + (e * (x - c)) ** 2) ** 2,
}


def columns(bump: Bump, slope: Bump) -> Callable[[Any, ndarray, Any], ndarray]:
    def values(f: Any, x: ndarray, t: Any) -> ndarray:
        width = np.exp(t["log_width"])
        near = x
        if f.extrapolation == "linear":
            near = np.clip(x, (t["centers"] - width).min(0), (t["centers"] + width).max(0))
        made = []
        for g in range(len(t["centers"])):
            for i in range(x.shape[1]):
                at = near[:, i], t["centers"][g, i], 1 / width[g, i]
                made.append(bump(*at) + slope(*at) * (x - near)[:, i])
        return np.stack(made, -1)

    return values


def number(f: Any) -> int:
    return len(f.centers) if isinstance(f.centers, tuple) else f.centers


EXPANSIONS: Table = {
    "gaussian_rbf": Reference(
        "sklearn.metrics.pairwise.rbf_kernel", columns(gaussian, SLOPES["gaussian"]), lambda f, m: m * number(f)
    ),
    "inverse_quadratic_rbf": Reference(
        "scipy.interpolate.RBFInterpolator",
        columns(inverse_quadratic, SLOPES["inverse_quadratic"]),
        lambda f, m: m * number(f),
    ),
}
