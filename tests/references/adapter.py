"""References of modules as expansions."""

from __future__ import annotations

from typing import Any

from numpy import ndarray
from scipy.special import expit

from references.base import Reference, Table


def silu_layer(f: Any, x: ndarray, t: Any) -> ndarray:
    z = x @ t["0"]["weight"].T + t["0"]["bias"]
    return z * expit(z)


EXPANSIONS: Table = {"module": Reference("numpy.matmul, scipy.special.expit", silu_layer, lambda f, m: 4 * m)}
