"""References of naive probabilistic expansions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.stats
from numpy import ndarray

from references.base import Reference, Table


def positive(density: Callable[..., ndarray]) -> Callable[..., ndarray]:
    """Go on below the floor as the docstring says: log p(ε) − log(2 − x/ε)."""

    def extended(f: Any, x: ndarray, t: Any) -> ndarray:
        below = np.minimum(x, f.floor)
        return density(np.maximum(x, f.floor), t) - np.log(2 - below / f.floor)

    return extended


FORMULAS: dict[str, Callable[..., ndarray]] = {
    "normal": lambda f, x, t: scipy.stats.norm.logpdf(x, t["mean"], np.exp(t["log_scale"])),
    "cauchy": lambda f, x, t: scipy.stats.cauchy.logpdf(x, t["location"], np.exp(t["log_scale"])),
    "laplace": lambda f, x, t: scipy.stats.laplace.logpdf(x, t["location"], np.exp(t["log_scale"])),
    "exponential": positive(lambda x, t: scipy.stats.expon.logpdf(x, scale=np.exp(-t["log_rate"]))),
    "gamma": positive(lambda x, t: scipy.stats.gamma.logpdf(x, np.exp(t["log_shape"]), scale=np.exp(t["log_scale"]))),
    "chi_squared": positive(lambda x, t: scipy.stats.chi2.logpdf(x, np.exp(t["log_degrees"]))),
}


def columns(formula: Callable[..., ndarray]) -> Callable[..., ndarray]:
    """Setting after setting, the inputs of each side by side."""
    return lambda f, x, t: formula(f, x[:, None, :], t).reshape(len(x), -1)


def mixed(f: Any, x: ndarray, t: Any) -> ndarray:
    return np.concatenate([columns(FORMULAS[kind])(f, x, t[kind]) for kind in f.kinds], 1)


EXPANSIONS: Table = {
    **{
        f"naive_{kind}": Reference("scipy.stats, logpdf", columns(formula), lambda f, m: m * f.count)
        for kind, formula in FORMULAS.items()
    },
    "naive_mixed": Reference("scipy.stats, logpdf", mixed, lambda f, m: m * f.count * len(f.kinds)),
}
