"""References of kernels and their approximations."""

from __future__ import annotations

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


EXPANSIONS: Table = {
    "kernel_map": Reference("sklearn.metrics.pairwise", kernel_map, lambda f, m: f.centers),
    "random_fourier": Reference("sklearn.kernel_approximation.RBFSampler", random_fourier, lambda f, m: f.count),
    "nystrom": Reference("sklearn.kernel_approximation.Nystroem", nystrom, lambda f, m: f.count),
}
