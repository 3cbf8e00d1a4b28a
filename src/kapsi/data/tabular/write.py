"""Write columns as CSV or Parquet."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from kapsi.data.tabular.source import TEXT_SUFFIXES, table_suffix
from kapsi.data.tabular.types import reject, short, table_error
from kapsi.files import atomic, plain

__all__ = ["csv_text", "csv_writer", "table_writer", "write_table"]

Columns: TypeAlias = Mapping[str, Any]


def write_table(path: str | Path, columns: Columns) -> None:
    """Write a CSV or Parquet file, by suffix; an interrupted write leaves the old file unchanged.

    Args:
        path: file to write, in an existing folder.
        columns: values by column name, all of equal length; None and NaN are missing.

    Raises:
        TableError: folder, suffix or columns are invalid.
        FileError: the file cannot be written.
    """
    with table_writer(path) as write:
        write(columns)


@contextmanager
def table_writer(path: str | Path) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that appends rows to a new CSV or Parquet file; the file is there at the end, or not at all.

    Args:
        path: file to write, in an existing folder; by suffix, compressed with .gz or .zst.

    Raises:
        TableError: folder, suffix or columns are invalid.
        FileError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "t.csv")
        ...     with table_writer(path) as write:
        ...         write({"a": [1, 2]})
        ...         write({"a": [3]})
        ...     path.read_text()
        '"a"\\n1\\n2\\n3\\n'
    """
    path = Path(path)
    suffix, compression = table_suffix(path)
    if compression is not None and (compression == "zip" or suffix not in TEXT_SUFFIXES):
        reject(str(path), "this cannot be written; give .csv, .csv.gz, .csv.zst or .parquet")
    if not path.parent.is_dir():
        exists = path.parent.exists()
        problem = "is not a folder; give another path" if exists else "does not exist; create it first"
        reject(str(path), f"{'' if exists else 'the folder '}{short(str(path.parent))} {problem}")
    with atomic(path) as temporary, plain(path, "write the file"), open(temporary, "wb") as file:
        if suffix not in TEXT_SUFFIXES:
            with _parquet_writer(file, str(path)) as write:
                yield write
            return
        with _compressed(file, compression) as sink:
            yield csv_writer(lambda text: _ignore(sink.write(text.encode())), str(path), TEXT_SUFFIXES[suffix])


def csv_writer(show: Callable[[str], None], where: str = "CSV", delimiter: str = ",") -> Callable[[Columns], None]:
    """Return a function that passes rows on as CSV text, the header once."""
    header: list[str] = []

    def write(columns: Columns) -> None:
        text = _encode(columns, where, delimiter).decode()
        if header:
            text = text.removeprefix(header[0])
        else:
            header.append(_encode({name: [] for name in columns}, where, delimiter).decode())
        show(text)

    return write


def _ignore(result: object) -> None:
    """Discard the result of a call."""


@contextmanager
def _parquet_writer(file: BinaryIO, where: str) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that appends rows to a Parquet file; the first rows state the types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writers: list[Any] = []

    def write(columns: Columns) -> None:
        try:
            table = _arrow(columns, where)
            if not writers:
                writers.append(pq.ParquetWriter(file, table.schema))
            writers[0].write_table(table.cast(writers[0].schema))
        except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
            raise table_error(where, f"the columns cannot be written as Parquet ({error})") from None

    yield write
    for writer in writers:
        writer.close()


@contextmanager
def _compressed(file: BinaryIO, compression: str | None) -> Iterator[Any]:
    """Yield a file for bytes to compress, the same for the same bytes."""
    if compression == "gzip":
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as sink:
            yield sink
    elif compression == "zstd":
        import pyarrow as pa

        with pa.CompressedOutputStream(file, "zstd") as sink:
            yield sink
    else:
        yield file


def csv_text(columns: Columns) -> str:
    """Return the text of the CSV file that `write_table` writes.

    Args:
        columns: values by column name, all of equal length; None and NaN are missing.

    Raises:
        TableError: the columns are invalid.
    """
    return _encode(columns, "CSV", ",").decode("utf-8")


def _arrow(columns: Columns, where: str) -> Any:
    """Return columns as an Arrow table; NaN becomes null."""
    import pyarrow as pa

    if len({len(values) for values in columns.values()}) != 1:
        reject(where, "there must be at least one column, and all columns must be of the same length")
    arrow = (pa.Array, pa.ChunkedArray)
    arrays = [
        values if isinstance(values, arrow) else pa.array(values, from_pandas=True) for values in columns.values()
    ]
    return pa.table(arrays, names=list(columns))


def _encode(columns: Columns, where: str, delimiter: str) -> bytes:
    """Return the content of a CSV file."""
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    sink = pa.BufferOutputStream()
    try:
        table = _arrow(columns, where)
        # Arrow ignores blank lines, hence a word for missing values of a single column.
        options = pa_csv.WriteOptions(delimiter=delimiter, null_string="NA" if len(columns) == 1 else "")
        pa_csv.write_csv(pa.table([_with_points(a) for a in table.columns], names=list(columns)), sink, options)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise table_error(
            where, f"the columns cannot be written as CSV ({error}); write Parquet, or leave them out"
        ) from None
    return bytes(sink.getvalue().to_pybytes())


def _with_points(column: Any) -> Any:
    """Return floats without fractional part as text, since Arrow writes 2.0 as 2, an integer."""
    import pyarrow as pa

    if not pa.types.is_floating(column.type):
        return column
    numbers = column.drop_null().to_numpy(zero_copy_only=False)
    if not np.all(numbers == np.trunc(numbers)):
        return column
    return pa.array([None if number is None else repr(number) for number in column.to_pylist()], pa.string())
