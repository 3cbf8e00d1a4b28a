"""References of combinations of inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.stats import multivariate_normal

from references.base import Reference, Table


def subsets(f: Any, m: int) -> list[list[int]]:
    if f.subsets is not None:
        return [list(subset) for subset in f.subsets]
    choose = itertools.combinations_with_replacement if getattr(f, "replacement", False) else itertools.combinations
    return [list(c) for size in range(1, f.order + 1) for c in choose(range(m), size)]


def combinatorial_size(f: Any, m: int) -> int:
    if f.subsets:
        return sum(map(len, f.subsets))
    more = 1 if f.replacement else 0
    return sum(i * math.comb(m + more * (i - 1), i) for i in range(1, f.order + 1))


def joint_normal(f: Any, x: ndarray, t: Any) -> ndarray:
    columns = []
    for mean, factor in zip(t["mean"], t["factor"], strict=True):
        inverse = np.linalg.inv(np.tril(factor, -1) + np.diag(np.exp(np.diag(factor))))
        columns.append(np.atleast_1d(multivariate_normal.logpdf(x, mean, inverse @ inverse.T)))
    return np.stack(columns, 1)


def normal(f: Any, x: ndarray, t: Any) -> ndarray:
    lower = np.tril(t["factor"], -1) + np.diag(np.exp(np.diag(t["factor"])))
    covariance = lower @ lower.T
    densities = [
        multivariate_normal.logpdf(x[:, s], t["mean"][s], covariance[np.ix_(s, s)]) for s in subsets(f, x.shape[1])
    ]
    return np.stack(np.broadcast_arrays(*densities), 1)


def categorical(f: Any, x: ndarray, t: Any) -> ndarray:
    m = x.shape[1]
    states = f.states if isinstance(f.states, tuple) else (f.states,) * m
    codes = [[min(max(round(v), 0), k - 1) for v, k in zip(row, states, strict=True)] for row in x.tolist()]
    columns, begin = [], 0
    for s in subsets(f, m):
        shape = [states[i] for i in s]
        table = t["tables"][begin : begin + math.prod(shape)].reshape(shape)
        begin += table.size
        columns.append([table[tuple(row[i] for i in s)] for row in codes])
    assert begin == t["tables"].size
    return np.array(columns).T


EXPANSIONS: Table = {
    "combinatorial": Reference(
        "itertools.combinations, combinations_with_replacement",
        lambda f, x, t: np.concatenate([x[:, s] for s in subsets(f, x.shape[1])], 1),
        combinatorial_size,
    ),
    "joint_normal": Reference("scipy.stats.multivariate_normal", joint_normal, lambda f, m: f.count),
    "combinatorial_categorical": Reference(
        "numpy indexing of tables",
        categorical,
        lambda f, m: len(f.subsets) if f.subsets else sum(math.comb(m, i) for i in range(1, f.order + 1)),
    ),
    "combinatorial_normal": Reference(
        "scipy.stats.multivariate_normal.logpdf",
        normal,
        lambda f, m: len(f.subsets) if f.subsets else sum(math.comb(m, i) for i in range(1, f.order + 1)),
    ),
}
