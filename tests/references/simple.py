"""References of expansions that keep the number of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray
from scipy.interpolate import CubicHermiteSpline
from sklearn.preprocessing import binarize

from references.base import Reference, Table


def reciprocal(f: Any, x: ndarray, t: Any) -> ndarray:
    e = f.eps
    # Four conditions, value and slope at both ends, make the cubic.
    bridge = CubicHermiteSpline([-e, e], [-1 / e, 1 / e], [-1 / e**2, -1 / e**2])
    inside = np.abs(x) < e
    return np.where(inside, bridge(np.where(inside, x, 0)), 1 / np.where(inside, e, x))


def above(f: Any, x: ndarray, t: Any) -> ndarray:
    return binarize(x, threshold=f.threshold)


def linear(f: Any, x: ndarray, t: Any) -> ndarray:
    if f.side == "none":
        return f.scale * x
    subscripts = "ri,ij->rj" if f.side == "post" else "ji,ri->rj"
    operands = (x, t["matrix"]) if f.side == "post" else (t["matrix"], x)
    return f.scale * np.einsum(subscripts, *operands)


def scaled(f: Any, x: ndarray, t: Any) -> ndarray:
    return x @ np.diag(t["scale"])


EXPANSIONS: Table = {
    "log_count_scale": Reference("numpy.diag", scaled, lambda f, m: m),
    "binarize": Reference("sklearn.preprocessing.binarize", above, lambda f, m: m),
    "reciprocal": Reference("numpy; scipy.interpolate.CubicHermiteSpline", reciprocal, lambda f, m: m),
    "linear": Reference("numpy.einsum", linear, lambda f, m: m),
}
