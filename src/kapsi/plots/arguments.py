"""Checks of the arguments of pictures: one for each kind of argument, with an error that names the call that makes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kapsi.arrays import as_dense
from kapsi.errors import DataError, refuse

__all__ = ["check_axes", "check_kind", "check_kinds", "check_labels", "check_names", "check_pair", "check_positive"]

Kind = TypeVar("Kind")


def check_axes(ax: Any) -> None:
    """Raise a `DataError` unless `ax` is axes of matplotlib or None."""
    from matplotlib.axes import Axes

    if ax is not None and not isinstance(ax, Axes):
        refuse("plots(ax)", "axes of matplotlib, such as plt.subplots()[1], or None for a new figure", ax, DataError)


def check_kind(where: str, value: Any, kind: type[Kind], wanted: str) -> Kind:
    """Return a value of a class, or refuse it.

    Args:
        where: prefix of the error message.
        value: the argument.
        kind: the class.
        wanted: the argument in the message, with the call that makes it.
    """
    if not isinstance(value, kind):
        refuse(where, wanted, value, DataError)
    return value


def check_kinds(where: str, values: Any, kind: type[Kind], wanted: str) -> list[Kind]:
    """Return values of a class as a list; arguments as in `check_kind`."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        refuse(where, wanted, values, DataError)
    return [check_kind(where, value, kind, wanted) for value in values]


def check_names(where: str, names: Any, count: int) -> list[str]:
    """Return names of the inputs, x1, x2, … for None."""
    if names is None:
        return [f"x{i + 1}" for i in range(count)]
    found = check_kinds(f"{where}(names)", names, object, f"a list of {count} names of the inputs, or None")
    if len(found) != count:
        raise DataError(f"{where}: expected {count} names, got {len(found)}")
    return list(map(str, found))


def check_labels(where: str, name: str, values: Any) -> npt.NDArray[Any]:
    """Return labels of rows, (rows,), in their own type: numbers, booleans or strings."""
    from kapsi.estimators.labels import labels_of  # which loads scikit-learn

    if isinstance(values, Tensor):
        values = values.numpy(force=True)
    labels = np.asarray(labels_of(values, f"{where}: {name}"))
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1 or not len(labels):
        shape = "nothing" if values is None else f"the shape {labels.shape}"
        raise DataError(f"{where}: expected {name} as a label for each row, (rows,), got {shape}")
    try:
        np.less(labels[:1], labels[:1])
    except TypeError:
        refuse(f"{where}: {name}", "numbers, booleans, strings or dates", labels[0], DataError)
    if labels.dtype.kind in "fc" and not np.isfinite(labels).all():
        raise DataError(f"{where}: {name} must be finite; drop the rows with NaN")
    return labels


def check_pair(where: str, y: Any, other: Any) -> tuple[Any, Any]:
    """Return two arrays of finite numbers of one length, (rows,)."""
    first, second = _numbers(where, y), _numbers(where, other)
    _check_lengths(where, first, second)
    return first, second


def check_positive(where: str, y: Any, scores: Any, positive: Any) -> tuple[Any, Any]:
    """Return whether each row is of the positive class, and its score.

    Args:
        where: prefix of error messages.
        y: labels of two classes, (rows,).
        scores: numbers that grow with the probability of the positive class, (rows,).
        positive: the positive label; None: the larger of the two, as in scikit-learn.
    """
    from kapsi.estimators.labels import plain

    labels, score = check_labels(where, "y", y), _numbers(where, scores)
    _check_lengths(where, labels, score)
    known: list[Any] = [plain(label) for label in np.unique(labels)]
    if positive is None:
        if len(known) > 2:
            shown = ", ".join(map(repr, known[:3]))
            raise DataError(f"{where}: expected y of two labels, got {len(known)}: {shown}, …; name one with positive=")
        if len(known) == 1 and known[0] not in (-1, 0, 1):
            raise DataError(f"{where}: all rows have the label {known[0]!r}; give rows of both, or positive=")
        positive = known[1] if len(known) == 2 else 1
    elif plain(positive) not in known:
        raise DataError(
            f"{where}(positive): expected one of the labels {', '.join(map(repr, known))}, got {positive!r}"
        )
    return labels == positive, score


def _numbers(where: str, values: Any) -> Any:
    """Return finite numbers in float64, (rows,)."""
    numbers = as_dense(values, "values", where).double().cpu().numpy().ravel()
    if not np.isfinite(numbers).all():
        raise DataError(f"{where}: the values must be finite; drop the rows with NaN")
    return numbers


def _check_lengths(where: str, first: npt.NDArray[Any], second: npt.NDArray[Any]) -> None:
    if len(first) != len(second) or not len(first):
        raise DataError(f"{where}: expected two arrays of equal length, got {len(first)} and {len(second)} values")
