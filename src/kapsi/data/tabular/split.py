"""Folds of a cross-validation and a single held-out set, drawn by scikit-learn."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import Ints
from kapsi.errors import TableError
from kapsi.text import counted

__all__ = ["Splits", "folds", "split"]


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
        raise TableError(f"folds: {k} folds of {counted(len(y), 'row')}; give 2 folds or more, at most one per row")
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
        raise TableError(f"split: none of {counted(len(y), 'row')} can be held out: {reason}; give more rows")
    stratify = codes[rows] if groups <= count else None
    _, held = train_test_split(rows, test_size=count, stratify=stratify, random_state=seed)
    kept = np.ones(len(y), dtype=np.bool_)
    kept[held] = False
    for code in np.setdiff1d(codes, codes[kept]):
        kept[held[codes[held] == code][0]] = True
    return np.flatnonzero(kept).astype(np.int64), np.flatnonzero(~kept).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Splits:
    """Held-out rows of a table: at random, by whole groups, or the latest.

    Args:
        y: target, (rows,) or (rows, targets).
        classes: whether y has class codes, for stratified splits.
        seed: `random_state` of the draws, 0 to 2³² − 1.
        groups: codes of the groups, (rows,); the rows of a group stay together.
        times: (rows,) finite; held-out rows are later than all training rows.
    """

    y: npt.NDArray[Any]
    classes: bool
    seed: int
    groups: npt.NDArray[Any] | None = None
    times: npt.NDArray[Any] | None = None

    def take(self, rows: Ints) -> Splits:
        """Return the splits of a selection of rows, at random for rows of one group or time."""
        groups, times = (
            None if key is None or len(np.unique(key[rows])) < 2 else key[rows] for key in (self.groups, self.times)
        )
        classes = self.classes and len(np.unique(self.y[rows])) < len(
            rows
        )  # rows of one class each cannot be stratified
        return Splits(self.y[rows], classes, self.seed, groups, times)

    @property
    def most(self) -> int:
        """The largest number of folds."""
        key = self.groups if self.groups is not None else self.times
        return len(self.y) if key is None else len(np.unique(key)) - (self.times is not None)

    def folds(self, k: int) -> list[tuple[Ints, Ints]]:
        """Return training rows and held-out rows of each of k folds.

        Folds in time hold out k consecutive parts of equally many rows behind the first; training rows are those before.

        Raises:
            TableError: there are fewer groups or times than folds.

        Example:
            >>> times = np.array([3.0, 1.0, 2.0, 2.0])
            >>> [(train.tolist(), held.tolist()) for train, held in Splits(times, False, 0, times=times).folds(2)]
            [([1], [2, 3]), ([1, 2, 3], [0])]
        """
        if k > self.most:
            kind = "group" if self.groups is not None else "time" if self.times is not None else "row"
            raise TableError(f"folds: {counted(k, 'fold')} of {counted(self.most, kind)}; give fewer folds")
        if self.times is not None:
            limits = _limits(self.times, k)
            return [
                (np.flatnonzero(self.times < a), np.flatnonzero((self.times >= a) & (self.times < b)))
                for a, b in limits
            ]
        if self.groups is None:
            tests = folds(self.y if self.y.ndim == 1 else self.y[:, 0], k, classes=self.classes, seed=self.seed)
        else:
            from sklearn.model_selection import GroupKFold

            splitter = GroupKFold(k, shuffle=True, random_state=self.seed)
            tests = [test.astype(np.int64) for _, test in splitter.split(self.groups, groups=self.groups)]
        return [(np.setdiff1d(np.arange(len(self.y)), test), test) for test in tests]

    def split(self, fraction: float) -> tuple[Ints, Ints]:
        """Return training rows and held-out rows: a fraction of the rows, of the groups, or the latest rows.

        Raises:
            TableError: no row can be held out.
        """
        if self.times is not None:
            values, counts = np.unique(self.times, return_counts=True)
            if len(values) < 2:
                raise TableError("split: all rows have the same time; leave --time out")
            later = np.cumsum(counts[::-1])[::-1]
            position = int(np.argmin(np.abs(later[1:] - fraction * len(self.y)))) + 1
            return np.flatnonzero(self.times < values[position]), np.flatnonzero(self.times >= values[position])
        if self.groups is not None:
            names = np.unique(self.groups)
            if len(names) < 2:
                raise TableError("split: all rows are of one group; leave --group out")
            _, held = split(names, fraction, classes=False, seed=self.seed)
            mask = np.isin(self.groups, names[held])
            return np.flatnonzero(~mask), np.flatnonzero(mask)
        return split(self.y if self.y.ndim == 1 else self.y[:, 0], fraction, classes=self.classes, seed=self.seed)


def _limits(times: npt.NDArray[Any], k: int) -> list[tuple[float, float]]:
    """Return first time and end of each of k folds in time; equal times stay together."""
    values, counts = np.unique(times, return_counts=True)
    starts = np.searchsorted(np.cumsum(counts), len(times) * np.arange(1, k + 1) / (k + 1)) + 1
    for i in range(k):  # at least one time in each part
        starts[i] = min(max(starts[i], starts[i - 1] + 1 if i else 1), len(values) - k + i)
    return list(itertools.pairwise([*values[starts].tolist(), np.inf]))
