"""References of kernels and their approximations."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
from numpy import ndarray
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.metrics.pairwise import linear_kernel, polynomial_kernel, rbf_kernel, sigmoid_kernel

from references.base import Reference, Table


def kernel_map(f: Any, x: ndarray, t: Any) -> ndarray:
    centers = t["centers"]
    if f.kernel == "linear":
        return linear_kernel(x, centers)
    gamma = float(np.exp(t["log_gamma"][0]))
    if f.kernel == "rbf":
        return rbf_kernel(x, centers, gamma=gamma)
    if f.kernel == "sigmoid":
        return sigmoid_kernel(x, centers, gamma=gamma, coef0=f.coef0)
    return polynomial_kernel(x, centers, degree=f.degree, gamma=gamma, coef0=f.coef0)


def random_fourier(f: Any, x: ndarray, t: Any) -> ndarray:
    sampler = RBFSampler(n_components=f.count).fit(x)
    sampler.random_weights_ = np.sqrt(2 * np.exp(t["log_gamma"])) * t["frequencies"].T
    sampler.random_offset_ = t["phases"]
    return sampler.transform(x)


def nystrom(f: Any, x: ndarray, t: Any) -> ndarray:
    landmarks = t["landmarks"]
    options = {"gamma": float(np.exp(t["log_gamma"][0])), "degree": f.degree, "coef0": f.coef0}
    if f.kernel == "rbf":
        options = {"gamma": options["gamma"]}
    elif f.kernel == "linear":
        options = {}
    # Fitted on the landmarks it has no others to choose from, but it shuffles them: columns in order of the landmarks.
    fitted = Nystroem(kernel=f.kernel, n_components=f.count, random_state=0, **options).fit(landmarks)
    order = np.argsort(fitted.component_indices_)
    return fitted.transform(x)[:, order]


def polynomial_map(f: Any, x: ndarray, t: Any) -> ndarray:
    """Return √(multinomial coefficient · γᵏ · c₀^(d−k)) times each monomial of [x, 1], from the multinomial theorem."""
    gamma, m = float(np.exp(t["log_gamma"][0])), x.shape[1]
    inputs = range(m + (f.coef0 > 0))  # the last one stands for √c₀
    words = itertools.combinations_with_replacement if f.symmetric else lambda i, d: itertools.product(i, repeat=d)
    columns = []
    for word in words(inputs, f.degree):
        counts = Counter(word)
        orderings = math.factorial(f.degree) / math.prod(math.factorial(n) for n in counts.values())
        weight = math.prod((f.coef0 if i == m else gamma) ** n for i, n in counts.items())
        values = math.prod(x[:, i] ** n for i, n in counts.items() if i < m) * np.ones(len(x))
        columns.append(np.sqrt(weight * (orderings if f.symmetric else 1)) * values)
    return np.stack(columns, 1)


def polynomial_size(f: Any, m: int) -> int:
    width = m + (f.coef0 > 0)
    return math.comb(width + f.degree - 1, f.degree) if f.symmetric else width**f.degree


EXPANSIONS: Table = {
    "kernel_map": Reference("sklearn.metrics.pairwise", kernel_map, lambda f, m: f.centers),
    "polynomial_map": Reference("the multinomial theorem", polynomial_map, polynomial_size),
    "random_fourier": Reference("sklearn.kernel_approximation.RBFSampler", random_fourier, lambda f, m: f.count),
    "nystrom": Reference("sklearn.kernel_approximation.Nystroem", nystrom, lambda f, m: f.count),
}
