"""Data frames and columns of pandas, polars and pyarrow as arrays, recognized by their methods: no package is imported."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.errors import DataError


def is_frame(values: object) -> bool:
    """Return whether an object is a data frame or a column of pandas, polars or pyarrow."""
    return hasattr(values, "to_numpy") or (hasattr(values, "column_names") and hasattr(values, "columns"))


def frame_values(values: Any, kind: str, where: str) -> npt.NDArray[Any]:
    """Return the numbers of a frame `(rows, m)`, or of a column `(rows,)`; missing entries are NaN. An index is ignored.

    Args:
        values: the frame or the column.
        kind: `inputs`, `targets` or `weights`.
        where: prefix of error messages.

    Raises:
        DataError: a column without numbers, or no columns.

    Example:
        >>> import pyarrow
        >>> frame_values(pyarrow.table({"a": [1, 2], "b": [0.5, None]}), "inputs", "fit")
        array([[1. , 0.5],
               [2. , nan]])
    """
    columns = _columns(values)
    if columns is None:
        return _numbers(values, f"the {kind}", where)
    if not columns:
        raise DataError(f"{where}: the {kind} are a {type(values).__name__} without columns; expected at least one")
    return np.column_stack(
        [_numbers(column, f"column {str(name)[:60]!r} of the {kind}", where) for name, column in columns]
    )


def _columns(values: Any) -> list[tuple[Any, Any]] | None:
    """Return names and columns of a frame, None for a column."""
    if hasattr(values, "column_names"):  # pyarrow
        return list(zip(values.column_names, values.columns, strict=True))
    if hasattr(values, "iter_columns"):  # polars
        return [(column.name, column) for column in values.iter_columns()]
    return list(values.items()) if hasattr(values, "dtypes") and hasattr(values, "columns") else None  # pandas


def _numbers(column: Any, name: str, where: str) -> npt.NDArray[Any]:
    dtype: Any = getattr(column, "dtype", getattr(column, "type", None))
    options: dict[str, Any] = (
        {"zero_copy_only": False} if hasattr(column, "null_count") and hasattr(column, "type") else {}
    )
    if getattr(dtype, "kind", "") in ("b", "i", "u", "f") and hasattr(dtype, "na_value"):  # nullable types of pandas
        missing = bool(column.isna().any())
        options = {"dtype": np.float64, "na_value": np.nan} if missing else {"dtype": dtype.numpy_dtype}
    array = np.asarray(column.to_numpy(**options))
    if array.dtype == object:
        items = array.tolist()
        if all(item is None or isinstance(item, bool | int | float) for item in items):
            array = np.array([np.nan if item is None else item for item in items], dtype=np.float64)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: expected numbers in {name}, got values of type {dtype}; encode or drop them, or use `kapsi fit`"
        )
    return array
