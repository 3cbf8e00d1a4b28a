"""Scores of predictions, and scores of baseline models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular import TableProblem
from kapsi.training.tables.preparation import TrainingRows

__all__ = ["Scores", "baselines", "scores_of", "summarize"]

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_FLOAT64 = float(np.finfo(np.float64).max)
METRICS = {"classification": ("accuracy", "log loss"), "regression": ("r2", "rmse")}


class Scores(NamedTuple):
    """Scores of a set of rows.

    Attributes:
        main: accuracy, or R².
        loss: log loss, or RMSE.
    """

    main: float
    loss: float


def scores_of(outputs: Floats, y: npt.NDArray[Any]) -> Scores:
    """Return the scores of probabilities (rows, classes) on class codes, or of predictions (rows,) on real targets."""
    return classification_scores(outputs, y) if outputs.ndim == 2 else regression_scores(outputs, y)


def classification_scores(probabilities: Floats, codes: npt.NDArray[Any]) -> Scores:
    """Return accuracy and log loss of probabilities, (rows, classes); a probability of 0 costs 708, not infinity."""
    chosen = probabilities[np.arange(len(codes)), codes]
    return Scores(float((probabilities.argmax(1) == codes).mean()), float(-np.log(np.maximum(chosen, 2.3e-308)).mean()))


def regression_scores(predicted: Floats, y: npt.NDArray[Any]) -> Scores:
    """Return R² and RMSE; R² of a constant target is 1 for exact predictions, else 0."""
    # Scaled to at most 1: squares of huge values overflow, and those of tiny values vanish.
    size = float(np.abs(y).max())
    largest = max(size, float(np.abs(predicted).max())) or 1.0
    error = math.sqrt(float(np.square(y / largest - predicted / largest).mean()))
    rmse = min(error * largest, MAX_FLOAT64)
    if y.min() == y.max():
        return Scores(float(error == 0), rmse)
    ratio = error / float((y / size).std()) * (largest / size)
    return Scores(max(1 - ratio * ratio, -MAX_FLOAT64), rmse)


def baselines(problem: TableProblem, train: TrainingRows, test: npt.NDArray[np.int64]) -> dict[str, Scores]:
    """Return the scores of a constant and of a linear model on test rows.

    The constant is the class frequencies or the mean; the linear model is scikit-learn's logistic or ridge regression with
    the default penalty.
    """
    from sklearn.linear_model import LogisticRegression, Ridge
    from threadpoolctl import threadpool_limits

    x_test, y_test = train.preprocessing.transform(problem.features, test), problem.y[test]
    if train.scale is not None:
        scale = train.scale
        with threadpool_limits(1):
            linear = scale.invert(Ridge().fit(train.x, train.y).predict(x_test))
        constant = np.full(len(test), scale.center)
        return {"mean": regression_scores(constant, y_test), "ridge regression": regression_scores(linear, y_test)}
    frequencies = np.bincount(train.y, minlength=len(problem.classes or ())) / len(train.y)
    prior = np.tile(frequencies, (len(test), 1))
    probabilities = prior.copy()
    if len(np.unique(train.y)) > 1:
        with warnings.catch_warnings(), threadpool_limits(1):
            warnings.simplefilter("ignore")  # on convergence and many classes
            logistic = LogisticRegression(max_iter=1000).fit(train.x, train.y)
        probabilities[:] = 0
        probabilities[:, logistic.classes_] = logistic.predict_proba(x_test)
    return {
        "most frequent class": classification_scores(prior, y_test),
        "logistic regression": classification_scores(probabilities, y_test),
    }


def summarize(scores: Sequence[Scores]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return mean and standard deviation over the folds of both scores."""
    values = np.array(scores, dtype=np.float64)
    largest = np.abs(values).max(0)
    largest[largest == 0] = 1.0
    scaled = values / largest  # sums and squares of huge values overflow
    with np.errstate(over="ignore"):
        center = np.clip(scaled.mean(0) * largest, -MAX_FLOAT64, MAX_FLOAT64)
        spread = np.clip(scaled.std(0) * largest, 0, MAX_FLOAT64)
    return (float(center[0]), float(spread[0])), (float(center[1]), float(spread[1]))
