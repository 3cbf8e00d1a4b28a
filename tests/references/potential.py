"""References of factor potentials."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy import ndarray

from references.base import Reference, Table


def subsets(f: Any, m: int) -> list[tuple[int, ...]]:
    if f.subsets is not None:
        return list(f.subsets)
    return [c for size in range(1, f.order + 1) for c in itertools.combinations(range(m), size)]


def state_counts(f: Any, m: int) -> list[int]:
    return list(f.states) if isinstance(f.states, tuple) else [f.states] * m


def states(f: Any, x: ndarray, t: Any) -> ndarray:
    sizes = state_counts(f, x.shape[1])
    rows = []
    for row in x.tolist():
        codes = [min(max(round(value), 0), k - 1) for value, k in zip(row, sizes, strict=True)]
        rows.append(
            [
                float(all(codes[i] == state for i, state in zip(s, joint, strict=True)))
                for s in subsets(f, x.shape[1])
                for joint in itertools.product(*(range(sizes[i]) for i in s))
            ]
        )
    return np.array(rows)


def products(f: Any, x: ndarray, t: Any) -> ndarray:
    return np.array([[math.prod(row[i] for i in s) for s in subsets(f, x.shape[1])] for row in x.tolist()])


EXPANSIONS: Table = {
    "combinatorial_state": Reference(
        "itertools.product of states",
        states,
        lambda f, m: sum(math.prod(state_counts(f, m)[i] for i in s) for s in subsets(f, m)),
    ),
    "combinatorial_product": Reference("math.prod", products, lambda f, m: len(subsets(f, m))),
}
