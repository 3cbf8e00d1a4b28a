"""Parity cases of support vector machines with scikit-learn."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from kapsi.zoo.base import Case, Comparison, deviation, sizes, sklearn_rows
from kapsi.zoo.kernel_svm.convert import from_sklearn
from kapsi.zoo.kernel_svm.dual import DualProgress
from kapsi.zoo.kernel_svm.model import one_vs_rest, vote
from kapsi.zoo.kernel_svm.training import fit_dual


def _values(estimator: Any) -> int:
    """Return the number of values of a fitted machine."""
    if hasattr(estimator, "coef_") and not hasattr(estimator, "support_vectors_"):
        return int(np.size(estimator.coef_) + np.size(estimator.intercept_))
    parts = (estimator.support_vectors_, estimator.dual_coef_, estimator.intercept_, estimator._gamma)
    return sum(int(np.size(part)) for part in parts)


def _imported(seed: int, *, estimator: str, data: str, options: dict[str, Any], explicit: bool = False) -> Comparison:
    from sklearn import svm

    x, y = sklearn_rows(data, seed, scaled=True)
    half = len(x) // 2
    theirs = getattr(svm, estimator)(**options).fit(x[:half], y[:half])
    x, y = x[half:], y[half:]
    model = from_sklearn(theirs, explicit=explicit)
    inputs = torch.from_numpy(x)
    values = model(inputs).detach()
    single, pairs, target, loss = values.shape[1] == 1, estimator in ("SVC", "NuSVC"), values, "mse"
    if not hasattr(theirs, "classes_"):
        difference, target = deviation(values, theirs.predict(x)), torch.from_numpy(y).double()
    else:
        rest = pairs and not single and theirs.decision_function_shape == "ovr"
        difference = deviation(one_vs_rest(values) if rest else values, theirs.decision_function(x))
        # A different class is a deviation of 1.
        decided = vote(values) if pairs else (values[:, 0] > 0).long() if single else values.argmax(1)
        difference = max(difference, float((theirs.classes_[decided.numpy()] != theirs.predict(x)).any()))
        if single:
            target, loss = torch.from_numpy(y).long(), "hinge"
    return Comparison(difference, sizes(model), _values(theirs), model, inputs, target, loss)


def _solved(seed: int, *, estimator: str, data: str, options: dict[str, Any]) -> Comparison:
    from sklearn import svm
    from sklearn.metrics.pairwise import rbf_kernel

    x, y = sklearn_rows(data, seed, 300, scaled=True)
    classes = estimator == "SVC"
    y = y if classes else (y - y.mean()) / y.std()
    theirs = getattr(svm, estimator)(tol=1e-6, kernel="rbf", **options).fit(x, y)
    progress: list[DualProgress] = []
    model = fit_dual(x, y, tolerance=1e-6, on_step=progress.append, **options)
    beta, vectors = theirs.dual_coef_.ravel(), theirs.support_vectors_
    # Σ f β is Σ|β| for classification, Σ yβ − ε Σ|β| for regression.
    size = float(np.abs(beta).sum())
    linear = size if classes else float(y[theirs.support_] @ beta - options["epsilon"] * size)
    expected = float(0.5 * beta @ rbf_kernel(vectors, gamma=theirs._gamma) @ beta - linear)
    difference = abs(progress[-1].objective - expected) / abs(expected)
    target = torch.from_numpy(y).long() if classes else torch.from_numpy(y)
    loss = "hinge" if classes else "mse"
    return Comparison(difference, sizes(model), _values(theirs), model, torch.from_numpy(x), target, loss)


def _case(model: str, data: str, estimator: str, explicit: bool = False, **options: Any) -> Case:
    quantity = "predict" if estimator.endswith("SVR") else "decision_function, predict"
    compare = partial(_imported, estimator=estimator, data=data.replace(" ", "_"), options=options, explicit=explicit)
    return Case(model, quantity, data, "scikit-learn", 1e-9, compare)


def _solved_case(estimator: str, data: str, **options: Any) -> Case:
    compare = partial(_solved, estimator=estimator, data=data.replace(" ", "_"), options=options)
    model = f"{estimator} solved by kapsi, RBF kernel"
    return Case(model, "dual objective, relative", data, "scikit-learn", 1e-4, compare)


PARITY: tuple[Case, ...] = (
    _case("SVC, RBF kernel, pairs", "iris", "SVC", decision_function_shape="ovo"),
    _case("SVC, RBF kernel, one vs rest", "wine", "SVC", C=10.0),
    _case("SVC, linear kernel", "breast cancer", "SVC", kernel="linear"),
    _case(
        "SVC, polynomial kernel, monomials", "breast cancer", "SVC", explicit=True, kernel="poly", degree=2, coef0=1.0
    ),
    _case(
        "NuSVC, sigmoid kernel, pairs",
        "iris",
        "NuSVC",
        kernel="sigmoid",
        nu=0.2,
        coef0=0.1,
        decision_function_shape="ovo",
    ),
    _case("LinearSVC", "iris", "LinearSVC", random_state=0),
    _case("SVR, RBF kernel", "diabetes", "SVR", C=100.0),
    _case("NuSVR, polynomial kernel", "diabetes", "NuSVR", kernel="poly"),
    _solved_case("SVC", "breast cancer", C=10.0, class_weight={0: 3.0, 1: 0.5}),
    _solved_case("SVR", "diabetes", C=2.0, epsilon=0.1),
)
