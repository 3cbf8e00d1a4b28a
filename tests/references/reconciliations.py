"""References of parameter reconciliations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import ndarray

from references.base import Reference, Table


def masked(f: Any, w: Any, n: int, grid: tuple[int, int]) -> ndarray:
    matrix = np.zeros((n, math.prod(grid)))
    matrix[w["mask"]] = w["values"]
    return matrix


def _near_root(n: int) -> int:
    return max(i for i in range(1, n + 1) if n % i == 0 and i * i <= n)


def _sizes(f: Any, n: int, q: int, t: int) -> tuple[int, int, int, int]:
    p, width = f.rows or _near_root(n), f.columns or q
    return p, width, n // p, q * t // width


def _dual(f: Any, n: int, q: int, t: int) -> int:
    return f.rank * sum(_sizes(f, n, q, t))


def _kronecker(f: Any, n: int, q: int, t: int) -> int:
    p, width, s, other = _sizes(f, n, q, t)
    return p * width + s * other


RECONCILIATIONS: Table = {
    "dense": Reference("the matrix", lambda f, w, n, grid: w["matrix"], lambda f, n, q, t: n * q * t),
    "masked": Reference("numpy boolean indexing", masked, lambda f, n, q, t: round(f.ratio * n * q * t)),
    "constant": Reference(
        "numpy.full", lambda f, w, n, grid: np.full((n, math.prod(grid)), f.value), lambda f, n, q, t: 0
    ),
    "low_rank": Reference(
        "numpy.matmul", lambda f, w, n, grid: w["left"] @ w["right"], lambda f, n, q, t: f.rank * (n + q * t)
    ),
    "kronecker": Reference("numpy.kron", lambda f, w, n, grid: np.kron(w["left"], w["right"]), _kronecker),
    "dual_low_rank_kronecker": Reference(
        "numpy.kron",
        lambda f, w, n, grid: np.kron(w["left_rows"] @ w["left_columns"], w["right_rows"] @ w["right_columns"]),
        _dual,
    ),
}
