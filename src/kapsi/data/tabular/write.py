"""Write columns as CSV or Parquet."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.source import TEXT_SUFFIXES, table_suffix
from kapsi.data.tabular.types import reject, short, table_error
from kapsi.files import atomic, plain

__all__ = ["csv_text", "write_table"]

Columns: TypeAlias = Mapping[str, list[Any] | npt.NDArray[Any]]


def write_table(path: str | Path, columns: Columns) -> None:
    """Write a CSV or Parquet file, by suffix; an interrupted write leaves the old file unchanged.

    Args:
        path: file to write, in an existing folder.
        columns: values by column name, all of equal length; None and NaN are missing.

    Raises:
        TableError: folder, suffix or columns are invalid.
        FileError: the file cannot be written.
    """
    path = Path(path)
    suffix, compression = table_suffix(path)
    if compression is not None and (compression == "zip" or suffix not in TEXT_SUFFIXES):
        reject(str(path), "this cannot be written; give .csv, .csv.gz, .csv.zst or .parquet")
    if not path.parent.is_dir():
        exists = path.parent.exists()
        problem = "is not a folder; give another path" if exists else "does not exist; create it first"
        reject(str(path), f"{'' if exists else 'the folder '}{short(str(path.parent))} {problem}")
    data = _encode(columns, str(path), TEXT_SUFFIXES.get(suffix))
    data = _compressed(data, compression)
    with atomic(path) as temporary, plain(path, "write the file"):
        temporary.write_bytes(data)


def csv_text(columns: Columns) -> str:
    """Return the text of the CSV file that `write_table` writes.

    Args:
        columns: values by column name, all of equal length; None and NaN are missing.

    Raises:
        TableError: the columns are invalid.
    """
    return _encode(columns, "CSV", ",").decode("utf-8")


def _encode(columns: Columns, where: str, delimiter: str | None) -> bytes:
    """Return the content of a CSV file, or of a Parquet file if the delimiter is None."""
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq

    if len({len(values) for values in columns.values()}) != 1:
        reject(where, "there must be at least one column, and all columns must be of the same length")
    sink = pa.BufferOutputStream()
    try:
        arrays = [pa.array(values, from_pandas=True) for values in columns.values()]  # NaN becomes null
        if delimiter is None:
            pq.write_table(pa.table(arrays, names=list(columns)), sink)
        else:
            # Arrow ignores blank lines, hence a word for missing values of a single column.
            options = pa_csv.WriteOptions(delimiter=delimiter, null_string="NA" if len(arrays) == 1 else "")
            pa_csv.write_csv(pa.table([_with_points(a) for a in arrays], names=list(columns)), sink, options)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise table_error(
            where, f"the columns cannot be written as {'Parquet' if delimiter is None else 'CSV'} ({error})"
        ) from None
    return bytes(sink.getvalue().to_pybytes())


def _compressed(data: bytes, compression: str | None) -> bytes:
    """Return compressed bytes, the same for the same bytes."""
    if compression == "gzip":
        return gzip.compress(data, mtime=0)
    if compression == "zstd":
        import pyarrow as pa

        return bytes(pa.compress(data, codec="zstd", asbytes=True))
    return data


def _with_points(column: Any) -> Any:
    """Return floats without fractional part as text, since Arrow writes 2.0 as 2, an integer."""
    import pyarrow as pa

    if not pa.types.is_floating(column.type):
        return column
    numbers = column.drop_null().to_numpy(zero_copy_only=False)
    if not np.all(numbers == np.trunc(numbers)):
        return column
    return pa.array([None if number is None else repr(number) for number in column.to_pylist()], pa.string())
