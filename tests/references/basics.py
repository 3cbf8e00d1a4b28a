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


def _all() -> Table:
    from references import REFERENCES  # parts may be of any family

    return REFERENCES["expansion"]


def nested(f: Any, x: ndarray, t: Any) -> ndarray:
    for i, part in enumerate(f.parts):
        x = _all()[part.name].values(part, x, t[str(i)])
    return x


def extended(f: Any, x: ndarray, t: Any) -> ndarray:
    return np.concatenate([_all()[p.name].values(p, x, t[str(i)]) for i, p in enumerate(f.parts)], 1)


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
    "nested": Reference(
        "composition of the parts' references",
        nested,
        lambda f, m: reduce(lambda width, p: _all()[p.name].size(p, width), f.parts, m),
    ),
}
