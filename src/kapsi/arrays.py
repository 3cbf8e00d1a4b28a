"""Arrays as tensors; data frames and columns of pandas, polars and pyarrow, recognized by their methods: no package is imported."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.errors import DataError

MAX_DENSE = 2**27
"""Largest number of values of a sparse frame as an array: 1 GiB."""


def as_tensor(array: npt.NDArray[Any], kind: str, where: str) -> Tensor:
    """Return a numeric array as a tensor, without a copy if possible.

    Raises:
        DataError: the array is masked or not numeric.
    """
    problem = ""
    if isinstance(array, np.ma.MaskedArray):
        problem = (
            f"the {kind} are a masked array; fill masked values with .filled(…), .filled(np.nan) for ignored targets"
        )
    elif array.dtype.kind not in "biuf":
        problem = f"expected numbers as {kind}, got an array of {array.dtype}; {_remedy(array.dtype)}"
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and len(array) and array.max() > np.iinfo(np.int64).max:
            problem = f"the {kind} have integers above {np.iinfo(np.int64).max}; use .astype(float)"
        array = array.astype(np.int64)
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if problem:
        raise DataError(f"{where}: {problem}")
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of read-only arrays: the tensor is never written
        return torch.from_numpy(array)


def _remedy(dtype: np.dtype[Any]) -> str:
    """Return how to get numbers from an array of another type."""
    if dtype.kind == "c":
        return "give real and imaginary parts as columns"
    if dtype.kind in "mM":
        start = " - x.min()" if dtype.kind == "M" else ""
        return f"use a unit, such as (x{start}) / np.timedelta64(1, 's'), after filling NaT"
    if dtype.names:
        return "use numpy.lib.recfunctions.structured_to_unstructured"
    return "use .astype(float)"


def as_dense(values: Any, kind: str, where: str) -> Tensor:
    """Return a tensor, an array, a frame or nested lists of numbers as a dense tensor, without a graph.

    Args:
        values: the numbers.
        kind: `inputs` or `targets`.
        where: prefix of error messages.

    Raises:
        DataError: no numbers, or a tensor that is sparse, nested, complex, or on the meta device.
    """
    if isinstance(values, Tensor):
        problem = "sparse" if values.layout != torch.strided else "nested" if values.is_nested else ""
        problem = (
            "complex" if values.is_complex() else "without values, on the meta device" if values.is_meta else problem
        )
        if problem:
            raise DataError(f"{where}: expected {kind} as dense real numbers, got a tensor that is {problem}")
        return values.detach()
    if hasattr(values, "tocsr"):
        raise DataError(f"{where}: expected {kind} as dense numbers, got a sparse matrix; use .toarray()")
    if is_frame(values) and not isinstance(values, np.ndarray):
        values = frame_values(values, kind, where)
    if isinstance(values, list | tuple | bool | int | float | np.generic):
        with contextlib.suppress(ValueError):  # of rows of different lengths
            values = np.asarray(values)
    if not isinstance(values, np.ndarray):
        raise DataError(f"{where}: expected numbers as {kind}, got {type(values).__name__}")
    return as_tensor(values, kind, where)


def wider_dtype(given: torch.dtype, own: torch.dtype) -> torch.dtype:
    """Return a given type if more precise than that of a model, and the model's otherwise.

    Args:
        given: type of inputs; integers of 32 and 64 bits count as float64.
        own: a floating-point type.
    """
    given = torch.float64 if given in (torch.int32, torch.int64) else given
    return given if given.is_floating_point and torch.finfo(given).eps < torch.finfo(own).eps else own


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
    if hasattr(values, "sparse") and math.prod(values.shape) > MAX_DENSE:
        raise DataError(
            f"{where}: the {kind} are a sparse frame of {math.prod(values.shape):,} values; give a SciPy matrix, "
            "frame.sparse.to_coo().tocsr()"
        )
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
    if hasattr(dtype, "categories") and " of the inputs" in name:
        raise DataError(
            f"{where}: {name} has categories, not quantities; encode it, as by pandas.get_dummies, or use `kapsi fit`"
        )
    sparse = hasattr(dtype, "fill_value")  # of pandas
    if (
        not sparse and getattr(dtype, "kind", "") in ("b", "i", "u", "f") and hasattr(dtype, "na_value")
    ):  # nullable types of pandas
        missing = bool(column.isna().any())
        options = {"dtype": np.float64, "na_value": np.nan} if missing else {"dtype": dtype.numpy_dtype}
    array = np.asarray(column if sparse else column.to_numpy(**options))
    if array.dtype == object:
        items = array.tolist()
        if all(item is None or isinstance(item, bool | int | float) for item in items):
            array = np.array([np.nan if item is None else item for item in items], dtype=np.float64)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: expected numbers in {name}, got values of type {dtype}; encode or drop them, or use `kapsi fit`"
        )
    return array
