"""Curves of predicted probabilities against observed classes: calibration, and counts above each threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import Floats, Ints

__all__ = ["above_thresholds", "average_precision", "reliability", "roc_area"]


def reliability(
    probability: Floats, hit: npt.NDArray[Any], bins: int = 10, least: int = 1
) -> tuple[Floats, Floats, list[int]]:
    """Return mean probability, observed share and number of rows in bins of equal width; bins of few rows are merged.

    Args:
        probability: predicted probability of a class, (rows,).
        hit: whether a row is of the class, (rows,).
        bins: number of bins before bins are merged.
        least: number of rows of a bin of its own.
    """
    places = np.minimum((probability * bins).astype(int), bins - 1)
    parts = [np.bincount(places, values, bins) for values in (probability, hit, np.ones(len(places)))]
    merged: list[Floats] = []
    for one in np.stack(parts, axis=1):
        if merged and merged[-1][2] < least:
            merged[-1] = merged[-1] + one
        elif one[2]:
            merged.append(one)
    if len(merged) > 1 and merged[-1][2] < least:
        last = merged.pop()
        merged[-1] = merged[-1] + last
    sums = np.array(merged).reshape(-1, 3)
    return sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2], sums[:, 2].astype(int).tolist()


def above_thresholds(hit: npt.NDArray[Any], probability: Floats) -> tuple[Ints, Ints, Floats]:
    """Return numbers of rows of the class and of other rows with at least each probability, and the probabilities.

    The first entry has no rows, and the threshold ∞; the last entry has all rows.

    Args:
        hit: whether a row is of the class, (rows,).
        probability: predicted probability of the class, (rows,).
    """
    order = np.argsort(-probability, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(probability[order])), len(probability) - 1)
    true = np.cumsum(hit[order] > 0)[ends]
    return np.append(0, true), np.append(0, ends + 1 - true), np.append(np.inf, probability[order][ends])


def roc_area(true: Ints, false: Ints) -> float:
    """Return the area below the true positive rate over the false positive rate; the counts are of `above_thresholds`."""
    return float(np.trapezoid(true / true[-1], false / false[-1]))


def average_precision(true: Ints, false: Ints) -> float:
    """Return the mean precision, weighted by the steps of the recall; the counts are of `above_thresholds`."""
    precision = true[1:] / (true[1:] + false[1:])
    return float(np.sum(np.diff(true) / true[-1] * precision))
