"""Scores of predictions, and of the baseline models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular import (
    Preprocessing,
    TargetScale,
)
from kapsi.data.tabular import (
    TableProblem as Problem,
)

__all__ = ["Scores"]


Floats = npt.NDArray[np.float64]


LARGEST_FLOAT64 = float(np.finfo(np.float64).max)


class Scores(NamedTuple):
    """Scores of one part of the rows: accuracy and log loss, or R² and root mean square error."""

    main: float
    loss: float


METRICS = {"classification": ("accuracy", "log loss"), "regression": ("r2", "rmse")}


def classification_scores(probabilities: Floats, codes: npt.NDArray[Any]) -> Scores:
    """Return accuracy and mean −log p of the true class, from probabilities `(rows, classes)`."""
    chosen = probabilities[np.arange(len(codes)), codes]
    # The smallest normal float64: a class that was thought impossible costs 708, not infinity.
    return Scores(float((probabilities.argmax(1) == codes).mean()), float(-np.log(np.maximum(chosen, 2.3e-308)).mean()))


def regression_scores(predicted: Floats, y: npt.NDArray[Any]) -> Scores:
    """Return R² and RMSE; R² of a constant target is 1 for exact predictions, else 0."""
    # Scaled to at most 1: squares of huge numbers overflow, those of tiny numbers vanish.
    size = float(np.abs(y).max())
    largest = max(size, float(np.abs(predicted).max())) or 1.0
    error = math.sqrt(float(np.square(y / largest - predicted / largest).mean()))
    rmse = min(error * largest, LARGEST_FLOAT64)
    if y.min() == y.max():
        return Scores(float(error == 0), rmse)
    ratio = error / float((y / size).std()) * (largest / size)
    return Scores(max(1 - ratio * ratio, -LARGEST_FLOAT64), rmse)


def baselines(problem: Problem, train: npt.NDArray[np.int64], test: npt.NDArray[np.int64]) -> dict[str, Scores]:
    """Return the scores of a trivial and of a linear model on the same rows and inputs.

    The trivial model says the shares of the classes, or the mean; the linear one is scikit-learn's logistic or ridge
    regression with its default penalty.
    """
    from sklearn.linear_model import LogisticRegression, Ridge
    from threadpoolctl import threadpool_limits

    preprocessing = Preprocessing.fit(problem.features, train)
    x, x_test = preprocessing.transform(problem.features, train), preprocessing.transform(problem.features, test)
    y, y_test = problem.y[train], problem.y[test]
    if problem.classes is None:
        scale = TargetScale.fit(y.astype(np.float64))
        with threadpool_limits(1):
            linear = scale.invert(Ridge().fit(x, scale.apply(y)).predict(x_test))
        constant = np.full(len(test), scale.center)
        return {"mean": regression_scores(constant, y_test), "ridge regression": regression_scores(linear, y_test)}
    shares = np.bincount(y, minlength=len(problem.classes)) / len(y)
    prior = np.tile(shares, (len(test), 1))
    probabilities = prior.copy()
    if len(np.unique(y)) > 1:
        with warnings.catch_warnings(), threadpool_limits(1):
            warnings.simplefilter("ignore")  # of convergence, and of many classes
            logistic = LogisticRegression(max_iter=1000).fit(x, y)
        probabilities[:] = 0
        probabilities[:, logistic.classes_] = logistic.predict_proba(x_test)
    return {
        "most frequent class": classification_scores(prior, y_test),
        "logistic regression": classification_scores(probabilities, y_test),
    }


def summarize(found: Sequence[Scores]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return mean and standard deviation over the folds of both scores."""
    values = np.array(found, dtype=np.float64)
    largest = np.abs(values).max(0)
    largest[largest == 0] = 1.0
    scaled = values / largest  # sums and squares of huge values overflow
    with np.errstate(over="ignore"):
        center = np.clip(scaled.mean(0) * largest, -LARGEST_FLOAT64, LARGEST_FLOAT64)
        spread = np.clip(scaled.std(0) * largest, 0, LARGEST_FLOAT64)
    return (float(center[0]), float(spread[0])), (float(center[1]), float(spread[1]))
