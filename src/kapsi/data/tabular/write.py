"""Write columns as CSV or Parquet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.read import CSV_DELIMITERS, PARQUET_SUFFIXES, checked_suffix
from kapsi.data.tabular.types import refuse, short
from kapsi.files import atomic, plain

__all__ = [
    "csv_text",
    "write_table",
]

# Any delimiter is quoted, since the reader tells the delimiter from the header; a leading U+FEFF would be a BOM.
NEEDS_QUOTES = re.compile('[,;\t|"\r\n\ufeff]')


def write_table(path: str | Path, columns: Mapping[str, list[Any] | npt.NDArray[Any]]) -> None:
    """Write a CSV or Parquet file, by suffix; an interrupted write leaves the old file as it was.

    Args:
        path: the file to write; its folder exists.
        columns: values by column name, all of the same length; None and NaN are missing.

    Raises:
        TableError: the folder, the suffix or the columns do not fit.
        FileError: the file cannot be written.
    """
    path = Path(path)
    suffix = checked_suffix(path)
    if not path.parent.is_dir():
        there = path.parent.exists()
        what = "is not a folder; give another path" if there else "does not exist; create it first"
        raise refuse(str(path), f"{'' if there else 'the folder '}{short(str(path.parent))} {what}")
    lists = _lists(columns, path)
    data = (
        _parquet_bytes(lists, path) if suffix in PARQUET_SUFFIXES else _csv_bytes(lists, path, CSV_DELIMITERS[suffix])
    )
    with atomic(path) as beside, plain(path, "write the file"):
        beside.write_bytes(data)


def csv_text(columns: Mapping[str, list[Any] | npt.NDArray[Any]]) -> str:
    """Return what `write_table` writes to a CSV file, as text.

    Args:
        columns: values by column name, all of the same length; None and NaN are missing.

    Raises:
        TableError: the columns do not fit.
    """
    where = Path("CSV")
    return _csv_bytes(_lists(columns, where), where, ",").decode("utf-8")


def _lists(columns: Mapping[str, list[Any] | npt.NDArray[Any]], path: Path) -> dict[str, list[Any]]:
    lists = {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in columns.items()}
    if len({len(values) for values in lists.values()}) != 1:
        raise refuse(str(path), "there must be at least one column, and all columns must be of the same length")
    return lists


def _csv_bytes(columns: dict[str, list[Any]], path: Path, delimiter: str) -> bytes:
    cells = [[_cell(name), *map(_cell, values)] for name, values in columns.items()]
    # A blank line is no row, so in a single column a missing value is an empty quoted one.
    lines = [line or '""' for line in map(delimiter.join, zip(*cells, strict=True))]
    try:
        return "".join(f"{line}\n" for line in lines).encode("utf-8")
    except UnicodeEncodeError as error:
        raise refuse(str(path), f"a text cannot be written as UTF-8 ({error.reason})") from None


def _cell(value: object) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, float | int):
        return repr(value)  # the shortest spelling that reads back exactly
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if NEEDS_QUOTES.search(text) else text


def _parquet_bytes(columns: dict[str, list[Any]], path: Path) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.table([pa.array(values) for values in columns.values()], names=list(columns)), sink)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise refuse(str(path), f"the columns cannot be written as Parquet ({error})") from None
    return bytes(sink.getvalue().to_pybytes())
