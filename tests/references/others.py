"""References of processing, remainders and fusions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.special import expit, log1p
from scipy.stats import norm

from references.base import Reference, Table

FORMULAS: dict[str, Callable[..., ndarray]] = {
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
    "exp": lambda f, x: np.where(x <= 10, np.exp(np.minimum(x, 10)), math.exp(10) * (x - 9)),
    "log": lambda f, x: np.where(x >= 1e-4, np.log(np.abs(x)), 2 * np.log(1e-4) - np.log(np.abs(2e-4 - x))),
    "layer_norm": lambda f, x: (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + f.epsilon),
    "instance_norm": lambda f, x: (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + f.epsilon),
    "batch_norm": lambda f, x: x / np.sqrt(1 + f.epsilon),  # in evaluation, before it has seen a batch
    "affine": lambda f, x: x,  # before its shift and scale are set
    "clamp": lambda f, x: x,  # before its range is set
    "normal_scores": lambda f, x: np.clip(x, -3, 3),  # before its knots are set
    "dropout": lambda f, x: x,  # in evaluation
}

PROCESSES: Table = {name: Reference("numpy, scipy.special", formula) for name, formula in FORMULAS.items()}


def _activated(activation: Any, x: ndarray) -> ndarray:
    return x if activation is None else FORMULAS[activation.name](activation, x)


def expansion_remainder(f: Any, x: ndarray, w: Any, n: int) -> ndarray:
    from references import REFERENCES  # parts may be of any family

    kappa = REFERENCES["expansion"][f.expansion.name].values(f.expansion, x, w["expansion"])
    grid = f.expansion.factors(x.shape[1])
    psi = REFERENCES["reconciliation"][f.reconciliation.name].values(f.reconciliation, w["reconciliation"], n, grid)
    return kappa @ psi.T + REMAINDERS[f.remainder.name].values(f.remainder, x, w["remainder"], n)


REMAINDERS: Table = {
    "constant": Reference("numpy.tile", lambda f, x, w, n: np.tile(w["value"], (len(x), 1))),
    "expansion": Reference("the parts' references, numpy.matmul", expansion_remainder),
    "zero": Reference("numpy.zeros", lambda f, x, w, n: np.zeros((len(x), n))),
    "identity": Reference("numpy", lambda f, x, w, n: _activated(f.activation, x)),
    "linear": Reference(
        "numpy.matmul",
        lambda f, x, w, n: _activated(f.after, _activated(f.before, x) @ w["matrix"].T + (w["bias"] if f.bias else 0)),
    ),
}

FUSIONS: Table = {
    "sum": Reference("numpy.sum", lambda f, y, w: y.sum(0)),
    "mean": Reference("numpy.mean", lambda f, y, w: y.mean(0)),
    "weighted_sum": Reference("numpy.tensordot", lambda f, y, w: np.tensordot(w["weights"], y, 1)),
    "concatenation": Reference("numpy", lambda f, y, w: np.concatenate(list(y), -1) @ w["matrix"].T),
}
