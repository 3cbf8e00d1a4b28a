"""Read CSV and Parquet files as typed tables."""

from __future__ import annotations

import csv
import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from kapsi.data.tabular.types import (
    BLANKS,
    Column,
    Kind,
    Table,
    listed,
    parse_numbers,
    reject,
    short,
    table_error,
    to_floats,
)

__all__ = ["read_table"]

CSV_DELIMITERS = {".csv": ",", ".txt": ",", ".tsv": "\t"}
PARQUET_SUFFIXES = (".parquet", ".pq")
DELIMITERS = ",;\t|"
MISSING_WORDS = ("", "NA", "N/A", "#N/A", "NaN", "nan", "null", "NULL", "None", "none", "?")
INTEGER = r"^[+-]?\d+$"


def read_table(path: str | Path) -> Table:
    """Read a CSV (.csv, .tsv, .txt) or Parquet (.parquet, .pq) file and type its columns.

    Args:
        path: the file; CSV is UTF-8 with one header line, delimited by comma, semicolon, tab or bar.

    Raises:
        TableError: the file is not a table with unique column names and at least one row.
    """
    path = Path(path)
    if path.is_dir():
        reject(str(path), "this is a folder; give a CSV or Parquet file")
    suffix = checked_suffix(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise table_error(str(path), "there is no such file; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise table_error(str(path), f"the file cannot be read ({reason})") from None
    if not data.strip(b" \t\r\n\xef\xbb\xbf"):
        reject(path.name, "the file is empty; a table has a header line and at least one row")
    names, columns = (_read_csv if suffix in CSV_DELIMITERS else _read_parquet)(data, path.name)
    names = [name or f"column {number}" for number, name in enumerate(names, start=1)]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1] if len(set(names)) < len(names) else []
    if repeated:
        reject(path.name, f"several columns have the same name: {listed(repeated)}; rename them")
    if not columns or not len(columns[0].values):
        reject(path.name, "the file has a header but no rows; add at least one row")
    return Table(path.name, dict(zip(names, columns, strict=True)), hashlib.sha256(data).hexdigest())


def checked_suffix(path: Path) -> str:
    """Return the suffix of a table file, in lower case."""
    suffix, allowed = path.suffix.lower(), (*CSV_DELIMITERS, *PARQUET_SUFFIXES)
    if suffix in allowed:
        return suffix
    raise table_error(str(path), f"the suffix {suffix!r} is not known; allowed are {', '.join(allowed)}")


# ------------------------------------------------------------------------------------------------ CSV


def _read_csv(data: bytes, where: str) -> tuple[list[str], list[Column]]:
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise table_error(where, f"line {line} is not UTF-8 text; save the file as UTF-8") from None
    delimiter, width = max(((mark, _header_width(text, mark)) for mark in DELIMITERS), key=lambda pair: pair[1])
    keys = [str(number) for number in range(width)]
    try:
        # The header is read as a row of strings: unusual names stay, and typing sees whole columns.
        raw = pa_csv.read_csv(
            pa.BufferReader(data),
            read_options=pa_csv.ReadOptions(column_names=keys, block_size=min(max(len(data) + 1, 2**16), 2**31 - 1)),
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(column_types=dict.fromkeys(keys, pa.large_string())),
        )
    except pa.ArrowException as error:
        reason = _ragged(text, delimiter, width) or f"not readable as CSV ({str(error)[:200]})"
        raise table_error(where, reason) from None
    strings = [column.combine_chunks() for column in raw.columns]
    # Arrow reads an unclosed quote to the end of the file without an error.
    last = strings[-1][-1].as_py() if len(strings[-1]) else ""
    if "\n" in last and data.count(b'"') % 2 and not data.rstrip().endswith(b'"'):
        reject(where, f"a quote is opened and never closed, before {short(last.splitlines()[0])}; close it")
    return [column[0].as_py() for column in strings], [_typed(column.slice(1)) for column in strings]


def _header_width(text: str, delimiter: str) -> int:
    """Return the number of fields in the first line that is not blank."""
    try:
        return next((len(row) for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row), 1)
    except csv.Error:
        return 1


def _ragged(text: str, delimiter: str, width: int) -> str:
    """Return a message about the first row whose number of fields differs from the header, or an empty string."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    line = 1
    try:
        for row in reader:
            if row and len(row) != width:
                return (
                    f"line {line} has {len(row)} values, the header has {width}; quote values that hold {delimiter!r}"
                )
            line = reader.line_num + 1
    except csv.Error:  # a field beyond the limit of the csv module
        return ""
    return ""


def _typed(strings: Any) -> Column:
    """Type a column of strings; each distinct string is parsed once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    encoded = strings.dictionary_encode()
    codes = encoded.indices.to_numpy()
    words = encoded.dictionary
    trimmed = pc.utf8_trim(words, characters=BLANKS)
    missing = pc.is_in(trimmed, value_set=pa.array(MISSING_WORDS, trimmed.type))
    known = trimmed.filter(pc.invert(missing))
    kind: Kind
    if len(known) and pc.all(pc.is_in(pc.utf8_lower(known), value_set=pa.array(["true", "false"], known.type))).as_py():
        kind, numbers = "boolean", pc.equal(pc.utf8_lower(known), "true").to_numpy(zero_copy_only=False)
    else:
        kind, numbers = ("integer" if len(known) and _are_integers(known) else "real"), parse_numbers(known)
        if np.isnan(numbers).any():
            strings = words.to_numpy(zero_copy_only=False).astype(object)
            strings[missing.to_numpy(zero_copy_only=False)] = None
            return Column("text", strings[codes])
    values = np.full(len(words), np.nan)
    values[~missing.to_numpy(zero_copy_only=False)] = numbers
    return Column(kind, values[codes])


def _are_integers(strings: Any) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pc.all(pc.match_substring_regex(strings, INTEGER)).as_py():
        return False
    try:
        pc.cast(pc.replace_substring_regex(strings, r"^\+", ""), pa.int64())
    except pa.ArrowInvalid:  # too large for int64
        return False
    return True


# ------------------------------------------------------------------------------------------------ Parquet


def _read_parquet(data: bytes, where: str) -> tuple[list[str], list[Column]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        raw = pq.ParquetFile(pa.BufferReader(data)).read()
        raw.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise table_error(where, f"not readable as Parquet ({error})") from None
    columns = zip(raw.column_names, raw.columns, strict=True)
    return list(raw.column_names), [_typed_arrow(column.combine_chunks(), name, where) for name, column in columns]


def _typed_arrow(column: Any, name: str, where: str) -> Column:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        return _typed_arrow(pc.cast(column, kind.value_type), name, where)
    if column.null_count == len(column):
        return Column("real", np.full(len(column), np.nan))
    if pa.types.is_boolean(kind):
        return Column("boolean", to_floats(column))
    if pa.types.is_integer(kind):
        fits = kind != pa.uint64() or pc.max(column).as_py() < 2**63
        return Column("integer" if fits else "real", to_floats(column))
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return Column("real", to_floats(column))
    if pa.types.is_date(kind):
        return _typed_arrow(pc.cast(column, pa.timestamp("s" if kind == pa.date32() else "ms")), name, where)
    if pa.types.is_timestamp(kind):
        ticks = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
        return Column("real", to_floats(pc.cast(column, pa.int64())) / ticks)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return Column("text", pc.cast(column, pa.large_string()).to_numpy(zero_copy_only=False).astype(object))
    allowed = "numbers, booleans, text, dates and timestamps"
    raise table_error(where, f"column {short(name)} has the type {kind}; allowed are {allowed}; convert or remove it")
