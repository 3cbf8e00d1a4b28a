"""Converter of scikit-learn's support vector machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import Expansion, Identity, KernelMap, PolynomialMap
from kapsi.features import check_formed
from kapsi.modules import Model
from kapsi.zoo.base import check_estimator, float64, forbid, model_of
from kapsi.zoo.kernel_svm.model import machine_spec, pairs_of, used_options

MAX_SUPPORT = 2**29
"""Largest number of values in densified support vectors: 4 GiB."""

COLUMNS_AT_ONCE = 2**22
"""Largest number of values of κ of support vectors at a time, 32 MiB in float64."""


class KernelOptions(NamedTuple):
    """A kernel with its options: γ, d and c₀."""

    kernel: str
    gamma: float
    degree: int
    coef0: float


def from_sklearn(other: Any, *, explicit: bool = False) -> Model:
    """Return a fitted scikit-learn support vector machine as a model in float64.

    Outputs equal `decision_function` of a classifier (for more than two classes with `decision_function_shape="ovo"`;
    `one_vs_rest` converts to `ovr`, `vote` decides) and `predict` of a regression. Classes are indices of `classes_`. LinearSVC has
    one output per class, decided by `kapsi.predict(model, x, "hinge")`.

    κ of a linear kernel is x; κ of other kernels is the kernel at the support vectors of all outputs.

    Args:
        other: a fitted SVC, NuSVC, SVR, NuSVR, LinearSVC or LinearSVR; fits on sparse inputs are supported.
        explicit: for the polynomial kernel, use monomials with binomial weights instead of support vectors.

    Raises:
        SpecError: an unsupported or unfitted estimator, a callable or precomputed kernel, `probability=True`.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.svm import SVC
        >>> from kapsi.zoo.kernel_svm import vote
        >>> x, y = load_iris(return_X_y=True)
        >>> theirs = SVC(decision_function_shape="ovo").fit(x, y)
        >>> ours = from_sklearn(theirs)
        >>> difference = ours(torch.tensor(x)).detach().numpy() - theirs.decision_function(x)
        >>> bool(abs(difference).max() < 1e-9), bool((vote(ours(torch.tensor(x))).numpy() == theirs.predict(x)).all())
        (True, True)
    """
    from sklearn import svm

    kinds = (svm.SVC, svm.NuSVC, svm.SVR, svm.NuSVR, svm.LinearSVC, svm.LinearSVR)
    hint = "for a pipeline pass the last step; the model takes the inputs of that step"
    where = check_estimator(other, kinds, "kernel_svm.from_sklearn", hint)
    linear = isinstance(other, svm.LinearSVC | svm.LinearSVR)
    name = "linear" if linear else "a function" if callable(other.kernel) else str(other.kernel)
    kernel = {"poly": "polynomial"}.get(name, name)
    forbid(
        where,
        (
            name in ("a function", "precomputed"),
            f"the kernel is {name}; supported are linear, poly, rbf and sigmoid",
        ),
        (
            getattr(other, "probability", False) is True,
            "probability=True adds a calibration without counterpart; fit with probability=False, with equal decision values",
        ),
        (explicit and kernel != "polynomial", f"explicit is for the polynomial kernel, this is {kernel}; leave it out"),
    )
    if linear:
        matrix = np.atleast_2d(float64(other.coef_).numpy())
        return _model(Identity(), matrix.shape[1], matrix, other.intercept_)
    vectors, coefficients = other.support_vectors_, other.dual_coef_
    if math.prod(vectors.shape) > MAX_SUPPORT:
        raise SpecError(
            f"{where}: {vectors.shape[0]:,} support vectors of {vectors.shape[1]:,} inputs exceed {MAX_SUPPORT:,} dense "
            "values; a linear kernel by LinearSVC has no support vectors"
        )
    vectors, coefficients = float64(vectors).numpy(), float64(coefficients).numpy()
    if len(getattr(other, "classes_", ())) > 2:
        coefficients = _of_pairs(coefficients, other.n_support_)
    options = KernelOptions(kernel, float(other._gamma), int(other.degree), float(other.coef0))
    return machine(options, vectors, coefficients, other.intercept_, explicit=explicit, where=where)


def _of_pairs(coefficients: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the coefficients of each pair, `(pairs, vectors)`, from libsvm's table `(classes − 1, vectors)`.

    The coefficient of a vector of class i against class j is in row j − 1 for j > i, and in row j for j < i.
    """
    ends = np.cumsum([0, *counts])
    pairs = pairs_of(len(counts))
    table = np.zeros((len(pairs), coefficients.shape[1]))
    for row, (i, j) in enumerate(pairs):
        table[row, ends[i] : ends[i + 1]] = coefficients[j - 1, ends[i] : ends[i + 1]]
        table[row, ends[j] : ends[j + 1]] = coefficients[i, ends[j] : ends[j + 1]]
    return table


def machine(
    options: KernelOptions,
    vectors: np.ndarray,
    coefficients: np.ndarray,
    bias: Any,
    *,
    explicit: bool,
    where: str,
) -> Model:
    """Return the model of Σ coefficients k(x, vector) + bias; linear kernels, and `explicit`, have explicit features."""
    kernel, gamma, degree, coef0 = options
    if kernel == "linear":
        return _model(Identity(), vectors.shape[1], coefficients @ vectors, bias)
    if not (gamma > 0 and math.isfinite(gamma)):
        raise SpecError(f"{where}: gamma is {gamma:g}, expected a finite number above 0")
    if not len(vectors):  # a regression with all rows inside the tube: a center without weight
        vectors, coefficients = np.zeros((1, vectors.shape[1])), np.zeros((coefficients.shape[0], 1))
    # Out of the range of the option γ is in the buffer alone.
    in_range = gamma if 1e-12 <= gamma <= 1e6 else None
    used = used_options(kernel, gamma=in_range, degree=degree, coef0=coef0)
    log_gamma = torch.tensor([math.log(gamma)], dtype=torch.float64)
    try:
        if not explicit:
            kappa = KernelMap(kernel=cast(Any, kernel), centers=len(vectors), **used)
            return _model(kappa, vectors.shape[1], coefficients, bias, centers=vectors, log_gamma=log_gamma)
        monomials = PolynomialMap(**used)
        columns = monomials.out_features(vectors.shape[1])
        check_formed(columns, "explicit=True")
        matrix = np.zeros((len(coefficients), columns))
        tensors: dict[str, Tensor] = {"log_gamma": log_gamma}
        for begin in range(0, len(vectors), step := max(1, COLUMNS_AT_ONCE // columns)):
            block = slice(begin, begin + step)
            matrix += coefficients[:, block] @ monomials(torch.from_numpy(vectors[block]), tensors).dense().numpy()
        return _model(monomials, vectors.shape[1], matrix, bias, log_gamma=log_gamma)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _model(kappa: Expansion, in_features: int, matrix: np.ndarray, bias: Any, **tensors: Any) -> Model:
    values = torch.tensor(np.broadcast_to(bias, len(matrix)).copy(), dtype=torch.float64)
    spec = machine_spec(kappa, in_features, len(matrix))
    weights = torch.as_tensor(matrix, dtype=torch.float64)
    return model_of(spec, values, expansion=tensors, reconciliation={"matrix": weights})
