"""Labels of classes and of groups: NumPy arrays of one type, and a line for those that are no labels."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kapsi.errors import DataError

__all__ = ["Target", "group_codes", "labels_of", "plain"]


class Target(NamedTuple):
    """The target of training rows.

    Attributes:
        y: class codes (rows,) int64, or values (rows,) or (rows, targets) float64.
        classes: labels of the classes; None in regression.
        shape: shape of the target of a row.
    """

    y: npt.NDArray[Any]
    classes: npt.NDArray[Any] | None = None
    shape: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Number of outputs of a model."""
        return len(self.classes) if self.classes is not None else self.y[:1].size

    def take(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return labels or values of some rows, as given."""
        return self.y[rows] if self.classes is None else self.classes[self.y[rows]]


def labels_of(y: Any, where: str) -> Any:
    """Return labels as an array of their own type, after checks of missing labels and of several types.

    Nullable integers and booleans of pandas stay integers and booleans, which NumPy would turn into real numbers.

    Args:
        y: labels; an array, a list, a series or a column. Others than a single axis are returned as they are.
        where: prefix of error messages, with the name of the argument.

    Raises:
        DataError: a missing label, or labels of several types.
    """
    if hasattr(y, "iloc") and y.ndim == 2 and y.shape[1] == 1:
        return np.asarray(labels_of(y.iloc[:, 0], where))[:, np.newaxis]
    if hasattr(y, "iloc") and y.ndim == 1 and hasattr(y.dtype, "numpy_dtype") and y.dtype.kind in "biu":
        _refuse_missing(np.asarray(y.isna()), where)
        return y.to_numpy(dtype=y.dtype.numpy_dtype)
    if isinstance(y, list | tuple) and np.ndim(y) == 1:
        values = np.empty(len(y), dtype=object)
        values[:] = y
    else:
        values = np.asarray(y)
    if values.ndim != 1:
        return y
    if values.dtype != object or not len(values):
        return values
    _refuse_missing(np.array([_is_missing(value) for value in values]), where)
    kinds: dict[str, Any] = {}
    for value in values:
        kinds.setdefault(_kind(value), value)
    if len(kinds) > 1 and kinds.keys() != {"int", "float"}:
        shown = " and ".join(f"{plain(value)!r} ({kind})" for kind, value in list(kinds.items())[:2])
        raise DataError(f"{where} has values of several types, such as {shown}; give one type, for example all as text")
    return np.array(values.tolist()) if isinstance(y, list | tuple) or "str" not in kinds else values


def group_codes(groups: Any, rows: int, name: str) -> npt.NDArray[np.int64]:
    """Return the code of the group of each row, (rows,).

    Args:
        groups: labels of the groups, (rows,).
        rows: number of rows.
        name: name of the estimator, for messages.

    Raises:
        DataError: another number of labels, a missing one, or a single group.
    """
    labels = np.asarray(labels_of(groups, f"{name}: groups"))
    if labels.shape != (rows,):
        raise DataError(f"{name}: expected groups of shape ({rows},), a label for each row, got shape {labels.shape}")
    if labels.dtype.kind in "fc":
        _refuse_missing(~np.isfinite(labels), f"{name}: groups")
    known, codes = np.unique(labels, return_inverse=True)
    if len(known) < 2:
        raise DataError(f"{name}: groups has the one group {plain(known[0])!r}; give 2 groups or more, or leave it out")
    return np.asarray(codes, dtype=np.int64)


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python value, for messages.

    Example:
        >>> import numpy as np
        >>> plain(np.str_("a")), plain(np.True_)
        ('a', True)
    """
    return value.item() if isinstance(value, np.generic) else value


def _refuse_missing(missing: npt.NDArray[np.bool_], where: str) -> None:
    if missing.any():
        count, first = int(missing.sum()), int(np.argmax(missing)) + 1
        rows = f"{count} of {len(missing)} rows (first: row {first})"
        raise DataError(f"{where} has missing values (NaN or None) in {rows}; leave out these rows")


def _is_missing(value: Any) -> bool:
    """Return whether a label is None, NaN, or a missing value of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, numbers.Real) and bool(value != value)


def _kind(value: Any) -> str:
    kinds: dict[str, Any] = {"bool": (bool, np.bool_), "int": numbers.Integral, "float": numbers.Real, "str": str}
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), type(value).__name__)
