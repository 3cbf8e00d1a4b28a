"""Folds of a cross-validation and a single held-out set, drawn by scikit-learn."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import Ints
from kapsi.errors import TableError

__all__ = ["folds", "split"]


def folds(y: npt.NDArray[Any], k: int, *, classes: bool, seed: int) -> list[Ints]:
    """Return the test rows of k shuffled folds, as drawn by `StratifiedKFold` or `KFold`.

    Args:
        y: target, (rows,).
        k: number of folds, from 2 to the number of rows.
        classes: stratify by the class codes in y, unless every class has fewer than k rows.
        seed: `random_state` of the shuffle, 0 to 2³² − 1.

    Returns:
        k arrays of ascending row indices; sizes differ by at most one.

    Raises:
        TableError: k is out of range.

    Example:
        >>> import numpy as np
        >>> [len(fold) for fold in folds(np.array([0, 0, 0, 1, 1]), 2, classes=True, seed=0)]
        [3, 2]
    """
    from sklearn.model_selection import KFold, StratifiedKFold

    if not 2 <= k <= len(y):
        raise TableError(f"folds: {k} folds of {len(y)} rows; give 2 folds or more, at most one per row")
    stratify = classes and np.unique(y, return_counts=True)[1].max() >= k
    splitter = (StratifiedKFold if stratify else KFold)(k, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on classes with fewer rows than folds
        return [test.astype(np.int64) for _, test in splitter.split(y, y)]


def split(y: npt.NDArray[Any], fraction: float, *, classes: bool, seed: int) -> tuple[Ints, Ints]:
    """Return training rows and held-out rows, as drawn by `train_test_split`.

    Args:
        y: target, (rows,).
        fraction: fraction of held-out rows, above 0 and below 1; at least one row is held out.
        classes: stratify by the class codes in y; every class keeps a training row.
        seed: `random_state` of the draw, 0 to 2³² − 1.

    Returns:
        Two non-empty arrays of ascending row indices.

    Raises:
        TableError: the fraction is out of range, or no row can be held out.
    """
    from sklearn.model_selection import train_test_split

    if not 0.0 < fraction < 1.0:
        raise TableError(f"split: the held-out fraction is {fraction!r}; it must be above 0 and below 1")
    _, codes, sizes = np.unique(y if classes else np.zeros(len(y)), return_inverse=True, return_counts=True)
    rows = np.flatnonzero(sizes[codes] > 1)  # a class of a single row stays in training
    groups = int((sizes > 1).sum())
    count = min(max(1, round(fraction * len(y))), len(rows) - groups)
    if count < 1:
        reason = "each class keeps one training row" if classes else "one training row is needed"
        raise TableError(f"split: {len(y)} rows leave none to hold out: {reason}; give more rows")
    stratify = codes[rows] if groups <= count else None
    _, held = train_test_split(rows, test_size=count, stratify=stratify, random_state=seed)
    kept = np.ones(len(y), dtype=np.bool_)
    kept[held] = False
    for code in np.setdiff1d(codes, codes[kept]):
        kept[held[codes[held] == code][0]] = True
    return np.flatnonzero(kept).astype(np.int64), np.flatnonzero(~kept).astype(np.int64)
