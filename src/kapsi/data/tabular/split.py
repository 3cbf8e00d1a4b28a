"""Folds of the cross-validation, and a single held-out part."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import Ints
from kapsi.errors import TableError

__all__ = [
    "folds",
    "split",
]


def folds(y: npt.NDArray[Any], k: int, *, classes: bool, seed: int) -> list[Ints]:
    """Return the test rows of k folds: shuffled, their sizes differing by at most one.

    Args:
        y: (rows,) the target.
        k: the number of folds, 2 to the number of rows.
        classes: whether y holds class codes; each class is then spread over the folds as evenly as possible.
        seed: the shuffle's seed.

    Raises:
        TableError: k is out of range.

    Example:
        >>> import numpy as np
        >>> [len(fold) for fold in folds(np.array([0, 0, 0, 1, 1]), 2, classes=True, seed=0)]
        [3, 2]
    """
    if not 2 <= k <= len(y):
        raise TableError(f"folds: {k} folds of {len(y)} rows; give 2 folds or more, and no more than there are rows")
    order = np.random.default_rng(seed).permutation(len(y))
    if classes:
        order = order[np.argsort(y[order], kind="stable")]
    fold_of = np.empty(len(y), dtype=np.int64)
    fold_of[order] = np.arange(len(y)) % k
    return [np.flatnonzero(fold_of == fold).astype(np.int64) for fold in range(k)]


def split(y: npt.NDArray[Any], share: float, *, classes: bool, seed: int) -> tuple[Ints, Ints]:
    """Return the rows to train on and the rows held out, each in ascending order and not empty.

    Args:
        y: (rows,) the target.
        share: the share of rows to hold out, above 0 and below 1; at least one row is held out.
        classes: whether y holds class codes; each class then gives its share, and keeps a row to train on.
        seed: the shuffle's seed.

    Raises:
        TableError: the share is out of range, or too few rows are there.
    """
    if not 0.0 < share < 1.0:
        raise TableError(f"split: the share held out is {share!r}; it must be above 0 and below 1")
    order = np.random.default_rng(seed).permutation(len(y))
    codes = np.unique(y, return_inverse=True)[1] if classes else np.zeros(len(y), dtype=np.int64)
    sizes = np.bincount(codes, minlength=1)
    most = np.maximum(sizes - 1, 0)
    total = min(max(1, round(share * len(y))), int(most.sum()))
    if total < 1:
        kept = "each class keeps one row to train on" if classes else "one row is needed to train on"
        raise TableError(f"split: {len(y)} rows leave none to hold out, since {kept}; give more rows")
    quota = np.minimum(np.floor(share * sizes).astype(np.int64), most)
    # Largest remainders first; shuffled before, so that ties do not favor the first classes.
    ranked = np.random.default_rng(seed).permutation(len(sizes))
    ranked = ranked[np.argsort(-(share * sizes - quota)[ranked], kind="stable")]
    while (lacking := total - int(quota.sum())) > 0:
        quota[ranked[quota[ranked] < most[ranked]][:lacking]] += 1
    held = np.zeros(len(y), dtype=np.bool_)
    for code, count in enumerate(quota):
        held[order[codes[order] == code][:count]] = True
    return np.flatnonzero(~held).astype(np.int64), np.flatnonzero(held).astype(np.int64)
