"""Independent references: what each function says, from NumPy, SciPy and scikit-learn alone.

Every entry stands under the registered name. A registered function without one fails a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import scipy.special
from numpy import ndarray
from scipy.interpolate import BSpline
from scipy.special import expit, log1p
from scipy.stats import norm
from sklearn.preprocessing import PolynomialFeatures

# ------------------------------------------------------------------------------------------------ expansions
# (options, x of shape (rows, m), tensors) -> (rows, D)


def symmetric_taylor(f: Any, x: ndarray) -> ndarray:
    powers = PolynomialFeatures(f.degree, include_bias=False).fit(x).powers_
    orderings = [math.factorial(sum(p)) / math.prod(map(math.factorial, p)) for p in powers.tolist()]
    return PolynomialFeatures(f.degree, include_bias=False).fit_transform(x) * np.sqrt(orderings)


def full_taylor(f: Any, x: ndarray) -> ndarray:
    def one(row: ndarray) -> ndarray:
        powers = [row]
        for _ in range(f.degree - 1):
            powers.append(np.kron(powers[-1], row))
        return np.concatenate(powers)

    return np.stack([one(row) for row in x])


def b_spline_column(f: Any, x: ndarray, low: float, high: float) -> ndarray:
    """Return all basis functions of one input, `(rows, G)`."""
    step = (high - low) / f.intervals
    knots = low + step * np.arange(-f.degree, f.intervals + f.degree + 1)
    count = f.intervals + f.degree
    basis = [BSpline(knots, np.eye(count)[i], f.degree) for i in range(count)]
    if f.out_of_range == "extended":
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
    if f.out_of_range == "linear" and f.degree:
        slopes = np.stack([b(near, nu=1) for b in basis], -1)
        return values + slopes * (x - near)[:, None]
    if f.out_of_range == "zero":
        return values * (near == x)[:, None]
    return values


def b_spline(f: Any, x: ndarray, t: Any) -> ndarray:
    each = [b_spline_column(f, x[:, i], t["range"][0, i], t["range"][1, i]) for i in range(x.shape[1])]
    return np.stack(each, -1).reshape(len(x), -1)


def nested(f: Any, x: ndarray, t: Any) -> ndarray:
    for i, part in enumerate(f.parts):
        x = EXPANSIONS[part.name](part, x, t[str(i)])
    return x


EXPANSIONS: dict[str, Callable[..., ndarray]] = {
    "identity": lambda f, x, t: x,
    "taylor": lambda f, x, t: symmetric_taylor(f, x) if f.symmetric else full_taylor(f, x),
    "chebyshev": lambda f, x, t: np.concatenate([scipy.special.eval_chebyt(k, x) for k in range(1, f.degree + 1)], -1),
    "b_spline": b_spline,
    "extended": lambda f, x, t: np.concatenate([EXPANSIONS[p.name](p, x, t[str(i)]) for i, p in enumerate(f.parts)], 1),
    "nested": nested,
}

DIMENSIONS: dict[str, Callable[..., int]] = {
    "identity": lambda f, m: m,
    "taylor": lambda f, m: sum(math.comb(m + k - 1, k) if f.symmetric else m**k for k in range(1, f.degree + 1)),
    "chebyshev": lambda f, m: m * f.degree,
    "b_spline": lambda f, m: m * (f.intervals + f.degree),
    "extended": lambda f, m: sum(DIMENSIONS[p.name](p, m) for p in f.parts),
    "nested": lambda f, m: reduce(lambda width, p: DIMENSIONS[p.name](p, width), f.parts, m),
}
"""D by the formulas of the paper: (options, m) -> D."""


# ------------------------------------------------------------------------------------------------ reconciliations
# (options, tensors of one channel, n, (q, t)) -> (n, D)


def masked(f: Any, w: Any, n: int, grid: tuple[int, int]) -> ndarray:
    matrix = np.zeros((n, math.prod(grid)))
    matrix[w["mask"]] = w["values"]
    return matrix


RECONCILIATIONS: dict[str, Callable[..., ndarray]] = {
    "dense": lambda f, w, n, grid: w["matrix"],
    "masked": masked,
    "constant": lambda f, w, n, grid: np.full((n, math.prod(grid)), f.value),
    "low_rank": lambda f, w, n, grid: w["left"] @ w["right"],
    "kronecker": lambda f, w, n, grid: np.kron(w["left"], w["right"]),
    "dual_low_rank_kronecker": lambda f, w, n, grid: np.kron(
        w["left_rows"] @ w["left_columns"], w["right_rows"] @ w["right_columns"]
    ),
}


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


COUNTS: dict[str, Callable[..., int]] = {
    "dense": lambda f, n, q, t: n * q * t,
    "masked": lambda f, n, q, t: round(f.ratio * n * q * t),
    "constant": lambda f, n, q, t: 0,
    "low_rank": lambda f, n, q, t: f.rank * (n + q * t),
    "kronecker": _kronecker,
    "dual_low_rank_kronecker": _dual,
}
"""l by the formulas of the paper: (options, n, q, t) -> l."""


# ------------------------------------------------------------------------------------------------ the others

PROCESSES: dict[str, Callable[..., ndarray]] = {
    "relu": lambda f, x: np.maximum(x, 0),
    "leaky_relu": lambda f, x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda f, x: np.where(x > 0, x, np.expm1(x)),
    "selu": lambda f, x: 1.0507009873554804934 * np.where(x > 0, x, 1.6732632423543772848 * np.expm1(x)),
    "gelu": lambda f, x: x * norm.cdf(x),
    "silu": lambda f, x: x * expit(x),
    "mish": lambda f, x: x * np.tanh(log1p(np.exp(x))),
    "sigmoid": lambda f, x: expit(x),
    "tanh": lambda f, x: np.tanh(x),
    "softplus": lambda f, x: log1p(np.exp(x)),
    "softsign": lambda f, x: x / (1 + np.abs(x)),
    "asinh": lambda f, x: np.arcsinh(x),
    "sine": lambda f, x: np.sin(x),
    "layer_norm": lambda f, x: (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + f.epsilon),
    "instance_norm": lambda f, x: (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + f.epsilon),
    "batch_norm": lambda f, x: x / np.sqrt(1 + f.epsilon),  # in evaluation, before it has seen a batch
    "dropout": lambda f, x: x,  # in evaluation
}


def _activated(activation: Any, x: ndarray) -> ndarray:
    return x if activation is None else PROCESSES[activation.name](activation, x)


REMAINDERS: dict[str, Callable[..., ndarray]] = {
    "zero": lambda f, x, w, n: np.zeros((len(x), n)),
    "identity": lambda f, x, w, n: _activated(f.activation, x),
    "linear": lambda f, x, w, n: _activated(
        f.after, _activated(f.before, x) @ w["matrix"].T + (w["bias"] if f.bias else 0)
    ),
}

FUSIONS: dict[str, Callable[..., ndarray]] = {
    "sum": lambda f, y, w: y.sum(0),
    "mean": lambda f, y, w: y.mean(0),
    "weighted_sum": lambda f, y, w: np.tensordot(w["weights"], y, 1),
    "concatenation": lambda f, y, w: np.concatenate(list(y), -1) @ w["matrix"].T,
}
