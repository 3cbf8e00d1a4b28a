"""Support vector machines of kapsi beside those of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.modules import Model
from kapsi.zoo.base import Case, Comparison
from kapsi.zoo.kernel_svm.dual import DualProgress
from kapsi.zoo.kernel_svm.machine import fit_dual, from_sklearn, one_vs_rest, vote

__all__ = ["PARITY"]


def _scaled(loader: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn import datasets

    x, y = getattr(datasets, loader)(return_X_y=True)
    return (x - x.mean(0)) / x.std(0), y


def _numbers(model: Model) -> int:
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def _deviation(made: np.ndarray, expected: np.ndarray) -> float:
    return float((np.abs(made - expected) / np.maximum(1.0, np.abs(expected))).max())


def _imported(
    estimator: str, loader: str, options: dict[str, Any], explicit: bool = False
) -> Callable[[int], Comparison]:
    def compare(seed: int) -> Comparison:
        from sklearn import svm

        x, y = _scaled(loader)
        rows = np.random.default_rng(seed).permutation(len(x))
        train, test = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        theirs = getattr(svm, estimator)(**options).fit(x[train], y[train])
        model = from_sklearn(theirs, explicit=explicit)
        inputs = torch.from_numpy(x[test])
        values = model(inputs).detach()
        many = values.shape[1] > 1 and estimator in ("SVC", "NuSVC")
        made = one_vs_rest(values) if many and theirs.decision_function_shape == "ovr" else values
        classifier = hasattr(theirs, "classes_")
        expected = theirs.decision_function(x[test]) if classifier else theirs.predict(x[test])
        deviation = _deviation(made.numpy(), expected.reshape(made.shape))
        if classifier:  # a class that differs is a deviation of one
            decided = vote(values) if estimator in ("SVC", "NuSVC") else _of_linear(values)
            deviation = max(deviation, float((theirs.classes_[decided.numpy()] != theirs.predict(x[test])).any()))
        held = (theirs.coef_, theirs.intercept_) if estimator.startswith("Linear") else _held(theirs)
        theirs_size = sum(int(np.size(part)) for part in held)
        if not classifier:
            target, loss = torch.from_numpy(y[test]).double(), "mse"
        elif values.shape[1] == 1:
            target, loss = torch.from_numpy(y[test]).long(), "hinge"
        else:
            target, loss = values, "mse"
        return Comparison(deviation, _numbers(model), theirs_size, model, inputs, target, loss)

    return compare


def _of_linear(values: Tensor) -> Tensor:
    return (values[:, 0] > 0).long() if values.shape[1] == 1 else values.argmax(1)


def _held(machine: Any) -> tuple[Any, ...]:
    return machine.support_vectors_, machine.dual_coef_, machine.intercept_, machine._gamma


def _objective(kernel: str, vectors: np.ndarray, gamma: float, coefficients: np.ndarray, linear: float) -> float:
    from sklearn.metrics.pairwise import pairwise_kernels

    options = {} if kernel == "linear" else {"gamma": gamma}
    return float(0.5 * coefficients @ pairwise_kernels(vectors, metric=kernel, **options) @ coefficients - linear)


def _solved(estimator: str, loader: str, options: dict[str, Any]) -> Callable[[int], Comparison]:
    def compare(seed: int) -> Comparison:
        from sklearn import svm

        x, y = _scaled(loader)
        rows = np.random.default_rng(seed).permutation(len(x))[:300]
        x, y = x[rows], y[rows]
        y = y if estimator == "SVC" else (y - y.mean()) / y.std()
        theirs = getattr(svm, estimator)(tol=1e-6, **options).fit(x, y)
        last: list[DualProgress] = []
        model = fit_dual(x, y, tolerance=1e-6, progress=last.append, **options)
        beta = theirs.dual_coef_.ravel()
        # Σ f β: of classification it is Σ|β|, of regression Σ yβ − ε Σ|β|.
        size = float(np.abs(beta).sum())
        linear = size if estimator == "SVC" else float(y[theirs.support_] @ beta - options["epsilon"] * size)
        expected = _objective(options["kernel"], theirs.support_vectors_, theirs._gamma, beta, linear)
        inputs = torch.from_numpy(x)
        target = torch.from_numpy(y).long() if estimator == "SVC" else torch.from_numpy(y)
        return Comparison(
            abs(last[-1].objective - expected) / abs(expected),
            _numbers(model),
            sum(int(np.size(part)) for part in _held(theirs)),
            model,
            inputs,
            target,
            "hinge" if estimator == "SVC" else "mse",
        )

    return compare


def _case(model: str, data: str, tolerance: float, quantity: str, compare: Callable[[int], Comparison]) -> Case:
    return Case(model, quantity, data, "scikit-learn", tolerance, compare)


_OVO = {"decision_function_shape": "ovo"}
_VALUES, _BOTH = "predict", "decision_function, predict"
PARITY: tuple[Case, ...] = (
    _case("SVC, RBF kernel, pairs", "iris", 1e-9, _BOTH, _imported("SVC", "load_iris", _OVO)),
    _case("SVC, RBF kernel, one vs rest", "wine", 1e-9, _BOTH, _imported("SVC", "load_wine", {"C": 10.0})),
    _case(
        "SVC, linear kernel", "breast cancer", 1e-9, _BOTH, _imported("SVC", "load_breast_cancer", {"kernel": "linear"})
    ),
    _case(
        "SVC, polynomial kernel, monomials",
        "breast cancer",
        1e-9,
        _BOTH,
        _imported("SVC", "load_breast_cancer", {"kernel": "poly", "degree": 2, "coef0": 1.0}, explicit=True),
    ),
    _case(
        "NuSVC, sigmoid kernel, pairs",
        "iris",
        1e-9,
        _BOTH,
        _imported("NuSVC", "load_iris", {"kernel": "sigmoid", "nu": 0.2, "coef0": 0.1, **_OVO}),
    ),
    _case("LinearSVC", "iris", 1e-9, _BOTH, _imported("LinearSVC", "load_iris", {"random_state": 0})),
    _case("SVR, RBF kernel", "diabetes", 1e-9, _VALUES, _imported("SVR", "load_diabetes", {"C": 100.0})),
    _case(
        "NuSVR, polynomial kernel", "diabetes", 1e-9, _VALUES, _imported("NuSVR", "load_diabetes", {"kernel": "poly"})
    ),
    _case(
        "SVC solved by kapsi, RBF kernel",
        "breast cancer",
        1e-4,
        "dual objective, relative",
        _solved("SVC", "load_breast_cancer", {"kernel": "rbf", "C": 10.0, "class_weight": {0: 3.0, 1: 0.5}}),
    ),
    _case(
        "SVR solved by kapsi, RBF kernel",
        "diabetes",
        1e-4,
        "dual objective, relative",
        _solved("SVR", "load_diabetes", {"kernel": "rbf", "C": 2.0, "epsilon": 0.1}),
    ),
)
