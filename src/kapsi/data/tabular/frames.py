"""Data frames and dictionaries of arrays as typed tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from kapsi.data.tabular.decide import Decider
from kapsi.data.tabular.pictures import image_column
from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.types import Column, Table, reject, table_error

__all__ = ["table_of"]


def table_of(
    frame: Any,
    where: str,
    kinds: Mapping[str, str] | None = None,
    reading: Reading | None = None,
    categories: Mapping[str, Collection[str]] | None = None,
) -> Table:
    """Return a frame as a table; an index is ignored.

    Args:
        frame: a data frame of pandas, polars or pyarrow, or a mapping of names to arrays or lists of equal length.
        where: prefix of error messages.
        kinds: kind of some columns by name, as for `read_table`.
        reading: options of the fit; those of text files have no effect.
        categories: categories of a fit by column; other words for missing values are missing.

    Raises:
        TableError: not a frame, without rows, repeated names, or values of mixed types in a column.

    Example:
        >>> table = table_of({"a": [1.5, None], "b": ["u", "v"]}, "predict")
        >>> [(name, column.kind) for name, column in table.columns.items()]
        [('a', 'real'), ('b', 'text')]
    """
    decider = Decider(reading or Reading(), dict(kinds or {}), typed=True, options=False, categories=categories or {})
    frame, images = _without_images(frame)
    table = _arrow(frame, where)
    names = [str(name) for name in table.column_names]
    if not names or not table.num_rows or len(set(names)) < len(names):
        problem = "has no rows or no columns" if len(set(names)) == len(names) else "has repeated names"
        reject(where, f"the frame {problem}; give rows of the columns of the model, with different names")
    columns = zip(names, table.columns, strict=True)
    return Table(
        where,
        {
            name: images[name] if name in images else decider.column(name, column.combine_chunks())
            for name, column in columns
        },
    )


def _without_images(frame: Any) -> tuple[Any, dict[str, Column]]:
    """Return a frame of pandas, or a mapping, with row numbers in place of arrays of pixels and images of Pillow, and these."""
    if isinstance(frame, Mapping):
        parts = dict(frame)
    elif hasattr(frame, "iloc") and hasattr(frame, "columns"):
        parts = {name: frame[name] for name, dtype in frame.dtypes.items() if getattr(dtype, "kind", "") == "O"}
    else:
        return frame, {}
    found = {name: list(values) for name, values in parts.items() if _are_pictures(values)}
    images = {str(name): image_column(str(name), map(_picture, values)) for name, values in found.items()}
    if not found:
        return frame, {}
    numbers = {name: np.arange(len(values)) for name, values in found.items()}
    return ({**frame, **numbers} if isinstance(frame, Mapping) else frame.assign(**numbers)), images


def _are_pictures(values: Any) -> bool:
    """Return whether the first known value of a column is an image: an array of two dimensions and more, or one of Pillow."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        return False
    if getattr(getattr(values, "dtype", None), "kind", "O") != "O" and np.ndim(values) < 3:
        return False
    first = next((value for value in values if value is not None and not isinstance(value, float)), None)
    return hasattr(first, "getexif") or (not hasattr(first, "iloc") and getattr(first, "ndim", 0) in (2, 3))


def _picture(value: Any) -> Any:
    """Return an image as an array or image of Pillow, None if it is missing."""
    if value is None or isinstance(value, float):
        return None
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _arrow(frame: Any, where: str) -> Any:
    import pyarrow as pa

    try:
        if isinstance(frame, Mapping):
            return pa.table({str(name): _array(values) for name, values in frame.items()})
        if hasattr(frame, "column_names"):
            return frame
        if hasattr(frame, "to_arrow"):
            return frame.to_arrow()
        if hasattr(frame, "iloc") and hasattr(frame, "columns"):
            return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, ValueError, TypeError) as error:
        reason = ", ".join(map(str, error.args))
        reject(where, f"the frame cannot be read ({reason}); give columns of one type and of equal length")
    wanted = "a data frame of pandas, polars or pyarrow, or a dictionary of arrays by name of the column"
    raise table_error(where, f"expected {wanted}, got {type(frame).__name__}")


def _array(values: Any) -> Any:
    """Return values as an Arrow array, NaN and None as missing."""
    import pyarrow as pa

    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().numpy()
    return values.to_arrow() if hasattr(values, "to_arrow") else pa.array(values, from_pandas=True)
