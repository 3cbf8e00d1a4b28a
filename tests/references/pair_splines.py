"""References of splines of pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from references.base import Reference, Table
from references.spline import b_spline_column


def pair_splines(f: Any, x: ndarray, t: Any) -> ndarray:
    columns = []
    for p, (i, j) in enumerate(t["pairs"].T):
        left, right = (
            b_spline_column(spline, x[:, column], t[name][:, p])
            for spline, column, name in zip(f.splines(), (i, j), ("first", "second"), strict=True)
        )
        columns.append(np.stack([np.kron(a, b) for a, b in zip(left, right, strict=True)]))
    return np.concatenate(columns, 1)


EXPANSIONS: Table = {
    "pair_splines": Reference(
        "numpy.kron of scipy.interpolate.BSpline",
        pair_splines,
        lambda f, m: f.pairs * (f.intervals[0] + f.degree) * (f.intervals[1] + f.degree),
    ),
}
