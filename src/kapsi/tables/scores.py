"""Scores of predictions, and scores of baseline models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kapsi.data.tabular import TableProblem, TargetScale
from kapsi.data.tabular.types import short
from kapsi.tables.preparation import TrainingRows
from kapsi.text import counted
from kapsi.training.losses import MSE, CrossEntropy
from kapsi.training.metrics import MAPE, Metric

__all__ = ["MoreScores", "Scores", "baselines", "better_baselines", "notes_on_scores", "scores_of", "summarize"]

Floats: TypeAlias = npt.NDArray[np.float64]

MOST_COMPARED = 2**24  # values
IMAGE_ROWS = 5_000
"""Most rows of the linear baseline of images."""

MAX_FLOAT64 = float(np.finfo(np.float64).max)
METRICS = {"classification": ("accuracy", "log loss"), "regression": ("r2", "rmse")}
SHOWN = {"accuracy": "accuracy", "log loss": "log loss", "r2": "R²", "rmse": "RMSE"}
"""Names of the metrics for readers."""

VISIBLE = 5e-5
"""Least difference of two scores that shows in four digits, relative to the second if that is larger than 1."""


class Scores(NamedTuple):
    """Scores of a set of rows.

    Attributes:
        main: accuracy, or R².
        loss: log loss, or RMSE.
    """

    main: float
    loss: float


MoreScores: TypeAlias = dict[str, dict[str, list[float]]]
"""Further scores by model and name of the metric, one for each fold."""


def scores_of(outputs: Floats, y: npt.NDArray[Any], weight: Floats | None = None) -> Scores:
    """Return the scores of probabilities (rows, classes) on class codes, or of predictions (rows,) on real targets.

    Weights (rows,), if any, count a row that many times.
    """
    if weight is not None and not weight.all():  # rows of weight 0 do not count, whatever their values
        counted_rows = weight > 0
        outputs, y, weight = outputs[counted_rows], y[counted_rows], weight[counted_rows]
    if y.ndim == 2:  # the mean over the targets
        targets = [regression_scores(outputs[:, i], y[:, i], weight) for i in range(y.shape[1])]
        return Scores(*(float(np.mean(values)) for values in zip(*targets, strict=True)))
    return classification_scores(outputs, y, weight) if outputs.ndim == 2 else regression_scores(outputs, y, weight)


def more_scores(
    metrics: Sequence[Metric], outputs: Floats, y: npt.NDArray[Any], weight: Floats | None = None
) -> dict[str, float]:
    """Return further scores by the name of the metric; arguments as in `scores_of`."""
    classes = outputs.ndim == 2 and y.ndim == 1
    with np.errstate(divide="ignore"):
        logits = np.log(outputs) if classes else outputs.reshape(len(y), -1)
    output, target = torch.from_numpy(logits).clamp_min(-709 if classes else -math.inf), torch.from_numpy(y)
    loss = CrossEntropy() if classes else MSE()
    w = None if weight is None else torch.from_numpy(weight)
    return {metric.name: metric.value(metric.sums(output, target, w, loss).tolist()) for metric in metrics}


def classification_scores(probabilities: Floats, codes: npt.NDArray[Any], weight: Floats | None = None) -> Scores:
    """Return accuracy and log loss of probabilities, (rows, classes); a probability of 0 costs 708, not infinity."""
    chosen = probabilities[np.arange(len(codes)), codes]
    correct, losses = probabilities.argmax(1) == codes, -np.log(np.maximum(chosen, 2.3e-308))
    return Scores(float(np.average(correct, weights=weight)), float(np.average(losses, weights=weight)))


def regression_scores(predicted: Floats, y: npt.NDArray[Any], weight: Floats | None = None) -> Scores:
    """Return R² and RMSE; R² of a constant target is 1 for exact predictions, else 0."""
    # Scaled to at most 1: squares of huge values overflow, and those of tiny values vanish.
    size = float(np.abs(y).max())
    largest = max(size, float(np.abs(predicted).max())) or 1.0
    error = math.sqrt(float(np.average(np.square(y / largest - predicted / largest), weights=weight)))
    rmse = min(error * largest, MAX_FLOAT64)
    if y.min() == y.max():
        return Scores(float(error == 0), rmse)
    center = np.average(y / size, weights=weight)
    deviation = math.sqrt(float(np.average(np.square(y / size - center), weights=weight)))
    ratio = error / deviation * (largest / size) if deviation else math.inf
    return Scores(max(1 - ratio * ratio, -MAX_FLOAT64), rmse)


def baselines(problem: TableProblem, train: TrainingRows, test: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """Return the predictions of a constant and of a linear model for test rows, as `scores_of` takes them.

    The constant is the class frequencies or the mean; the linear model is scikit-learn's logistic or ridge regression with
    the default penalty, of images with intensities from 0 to 1 and at most 5,000 rows.
    """
    from sklearn.linear_model import LogisticRegression, Ridge
    from threadpoolctl import threadpool_limits

    part, x_test, more = _of_linear(train, train.preprocessing.transform(problem.features, test))
    if train.scale is not None:
        scale = TargetScale.fit(problem.y[train.rows].astype(np.float64), train.weight)
        y = scale.apply(problem.y[part.rows].astype(np.float64))
        with threadpool_limits(1):
            linear = scale.invert(Ridge().fit(part.x, y, part.weight).predict(x_test))
        constant = np.full((len(test), *y.shape[1:]), scale.center)
        return {"mean": constant, f"ridge regression{more}": linear}
    counts = np.bincount(train.y, train.weight, minlength=len(problem.classes or ()))
    frequencies = counts / counts.sum()
    prior = np.tile(frequencies, (len(test), 1))
    probabilities = prior.copy()
    if len(np.unique(part.y)) > 1:
        with warnings.catch_warnings(), threadpool_limits(1):
            warnings.simplefilter("ignore")  # on convergence and many classes
            logistic = LogisticRegression(max_iter=100 if more else 1000).fit(part.x, part.y, part.weight)
        probabilities[:] = 0
        probabilities[:, logistic.classes_] = logistic.predict_proba(x_test)
    return {"most frequent class": prior, f"logistic regression{more}": probabilities}


def _of_linear(train: TrainingRows, x_test: Any) -> tuple[TrainingRows, Any, str]:
    """Return the rows of the linear model, inputs of test rows, and a note for its name."""
    if not (images := train.preprocessing.images):
        return train, x_test, ""
    whole = np.arange(train.x.shape[1]) >= train.x.shape[1] - sum(column.count for column in images)
    factors = np.where(whole, 1 / 255, 1).astype(np.float32)
    rows = np.linspace(0, len(train.y) - 1, min(len(train.y), IMAGE_ROWS)).astype(np.int64)
    part = train.take(rows)
    more = f" of {len(rows):,} rows" if len(rows) < len(train.y) else ""
    return replace(part, x=_times(part.x, factors)), _times(x_test, factors), more


def _times(x: Any, factors: npt.NDArray[np.float32]) -> Any:
    """Return rows, an array or CSR, with columns times factors."""
    return x * factors if isinstance(x, np.ndarray) else x.multiply(factors).tocsr()


def better_baselines(scores: Mapping[str, Sequence[Scores]], task: str) -> list[str]:
    """Return a note for each baseline with a higher accuracy or R², or a lower log loss or RMSE, than kapsi.

    Example:
        >>> scores = {"kapsi": [Scores(0.8, 1.0)], "mean": [Scores(0.0, 2.0)], "ridge": [Scores(0.9, 0.7)]}
        >>> better_baselines(scores, "regression")
        ['ridge has a higher R² and a lower RMSE than the model on the held-out rows']
    """
    if "kapsi" not in scores:
        return []
    main, loss = (mean for mean, _ in summarize(scores["kapsi"]))
    higher, lower = (SHOWN[name] for name in METRICS[task])
    notes = []
    for name, values in scores.items():
        other, other_loss = (mean for mean, _ in summarize(values))
        better = [f"a higher {higher}"] * (other - main > VISIBLE * max(1.0, abs(main)))
        better += [f"a lower {lower}"] * (loss - other_loss > VISIBLE * loss)
        if name != "kapsi" and better:
            notes.append(f"{name} has {' and '.join(better)} than the model on the held-out rows")
    return notes


def notes_on_scores(
    y: npt.NDArray[Any], rows: str, metrics: Sequence[Metric] = (), targets: Sequence[str] = ()
) -> list[str]:
    """Return notes on scores without meaning: R² if a target is the same in all scored rows, MAPE if a target is 0.

    Args:
        y: the targets of the scored rows, (rows,) or (rows, targets).
        rows: name of these rows.
        metrics: the further metrics.
        targets: names of the targets; one of several is named in a note.

    Example:
        >>> notes_on_scores(np.array([2.0, 2.0]), "scored rows")
        ['the target is the same in all scored rows: R² has no meaning (1 for exact predictions, else 0)']
        >>> notes_on_scores(np.array([2.0, 0.0]), "validation rows", [MAPE()])
        ['the target is 0 in 1 of 2 validation rows: mape has no meaning; use mae']
    """
    notes, columns = [], y.reshape(len(y), -1)
    names = [f"the target {short(name)}" for name in targets] if len(targets) > 1 else ["the target"] * columns.shape[1]
    for name in dict.fromkeys(np.array(names)[(columns == columns[:1]).all(0)].tolist()):
        notes.append(f"{name} is the same in all {rows}: R² has no meaning (1 for exact predictions, else 0)")
    zero = columns == 0
    if zero.any() and any(isinstance(metric, MAPE) for metric in metrics):
        name, zeros = names[int(zero.sum(0).argmax())], int(zero.sum(0).max())
        notes.append(f"{name} is 0 in {zeros} of {len(y)} {rows}: mape has no meaning; use mae")
    return notes


def copies(
    problem: TableProblem, parts: Sequence[tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64]]]
) -> list[str]:
    """Return a note if held-out rows are copies of training rows, with the same target."""
    if not parts or problem.features.rows * len(problem.features.columns) > MOST_COMPARED:
        return []
    columns = [values.T for _, values in problem.features.blocks()]
    columns += [
        (c.numbers if c.kind == "date" else c.coded()[0])[:, np.newaxis]
        for c in problem.features.columns.values()
        if c.kind in ("text", "date", "image")
    ]
    rows = np.column_stack([*columns, problem.y]).astype(np.float64)
    rows = np.ascontiguousarray(np.nan_to_num(rows, copy=False, nan=-1e308))
    keys = rows.view(np.dtype((np.void, rows.shape[1] * 8))).ravel()
    _, codes = np.unique(keys, return_inverse=True)
    count = sum(int(np.isin(codes[test], codes[train]).sum()) for _, train, test in parts if len(test))
    total = sum(len(test) for _, _, test in parts)
    if not count:
        return []
    copies = "is a copy of a training row" if count == 1 else "are copies of training rows"
    return [f"{count:,} of {counted(total, 'validation row')} {copies}, so the scores may be too good"]


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
