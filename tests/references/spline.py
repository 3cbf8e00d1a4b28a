"""References of splines."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray
from scipy.interpolate import BSpline

from references.base import Reference, Table


def b_spline_column(f: Any, x: ndarray, knots: ndarray) -> ndarray:
    """Return all basis functions of one input, `(rows, G)`, on all its knots."""
    count = f.intervals + f.degree
    low, high = knots[f.degree], knots[count]
    basis = [BSpline(knots, np.eye(count)[i], f.degree) for i in range(count)]
    if f.extrapolation == "extended":
        # Each function lives on its own degree + 2 knots and is zero beyond; the last step takes its upper end.
        own = [BSpline.basis_element(knots[i : i + f.degree + 2], extrapolate=False) for i in range(count)]
        values = np.stack([np.nan_to_num(b(x)) for b in own], -1)
        if f.degree == 0:
            values = np.stack([(knots[i] <= x) & (x < knots[i + 1]) for i in range(count)], -1).astype(float)
            values[x == high, -1] = 1.0
        return values
    # SciPy is right-continuous: just inside of the upper end the last interval's functions are the ones.
    near = np.clip(x, low, high)
    values = np.stack([b(np.minimum(near, high - 1e-14 * (f.degree == 0))) for b in basis], -1)
    if f.extrapolation == "linear" and f.degree:
        slopes = np.stack([b(near, nu=1) for b in basis], -1)
        return values + slopes * (x - near)[:, None]
    if f.extrapolation == "zero":
        return values * (near == x)[:, None]
    return values


def b_spline(f: Any, x: ndarray, t: Any) -> ndarray:
    if f.knots == "uniform":
        step = (t["range"][1] - t["range"][0]) / f.intervals
        knots = t["range"][0] + step * np.arange(-f.degree, f.intervals + f.degree + 1)[:, None]
    else:
        knots = t["knots"]
    each = [b_spline_column(f, x[:, i], knots[:, i]) for i in range(x.shape[1])]
    return np.stack(each, -1).reshape(len(x), -1)


EXPANSIONS: Table = {
    "b_spline": Reference("scipy.interpolate.BSpline", b_spline, lambda f, m: m * (f.intervals + f.degree)),
}
