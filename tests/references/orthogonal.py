"""References of polynomials by three-term recurrence."""

from __future__ import annotations

import numpy as np
import scipy.special

from references.base import Reference, Table

EXPANSIONS: Table = {
    "chebyshev": Reference(
        "scipy.special.eval_chebyt",
        lambda f, x, t: np.concatenate([scipy.special.eval_chebyt(k, x) for k in range(1, f.degree + 1)], -1),
        lambda f, m: m * f.degree,
    ),
}
