"""References of the expansions that are not element-wise bases, and of expansions made of others."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np
from numpy import ndarray
from sklearn.preprocessing import PolynomialFeatures

from references.base import Reference, Table


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


def _all(role: str = "expansion") -> Table:
    from references import REFERENCES  # parts may be of any family

    return REFERENCES[role]


def stepped(steps: Any, x: ndarray) -> ndarray:
    """Apply steps in evaluation, with their first scales and shifts."""
    return reduce(lambda values, step: _all("process")[step.name].values(step, values), steps, x)


def processed(f: Any, x: ndarray, t: Any) -> ndarray:
    inner = _all()[f.expansion.name].values(f.expansion, stepped(f.before, x), t["expansion"])
    return stepped(f.after, inner)


def part_values(f: Any, i: int, x: ndarray, t: Any, *, steps: bool) -> ndarray:
    """Return the columns of a part; with steps its tensors are one level down."""
    part, tensors = f.parts[i], t[str(i)]["expansion"] if steps else t[str(i)]
    values = _all()[part.name].values(part, x, tensors)
    return stepped(f.between, values) if steps else values


def nested(f: Any, x: ndarray, t: Any) -> ndarray:
    for i in range(len(f.parts)):
        x = part_values(f, i, x, t, steps=bool(f.between) and i + 1 < len(f.parts))
    return x


def extended(f: Any, x: ndarray, t: Any) -> ndarray:
    return np.concatenate([part_values(f, i, x, t, steps=bool(f.between)) for i in range(len(f.parts))], 1)


EXPANSIONS: Table = {
    "identity": Reference("the input", lambda f, x, t: x, lambda f, m: m),
    "taylor": Reference(
        "numpy.kron; sklearn PolynomialFeatures",
        lambda f, x, t: symmetric_taylor(f, x) if f.symmetric else full_taylor(f, x),
        lambda f, m: sum(math.comb(m + k - 1, k) if f.symmetric else m**k for k in range(1, f.degree + 1)),
    ),
    "extended": Reference(
        "numpy.concatenate of the parts' references",
        extended,
        lambda f, m: sum(_all()[p.name].size(p, m) for p in f.parts),
    ),
    "processed": Reference(
        "the expansion's and the steps' references",
        processed,
        lambda f, m: _all()[f.expansion.name].size(f.expansion, m),
    ),
    "selected_inputs": Reference(
        "the expansion's reference",
        lambda f, x, t: _all()[f.expansion.name].values(f.expansion, x[:, t["selection"]], t["expansion"]),
        lambda f, m: _all()[f.expansion.name].size(f.expansion, f.count),
    ),
    "nested": Reference(
        "composition of the parts' references",
        nested,
        lambda f, m: reduce(lambda width, p: _all()[p.name].size(p, width), f.parts, m),
    ),
}
