"""Text files as Arrow columns: the layout, then Arrow's reader, or the csv module where the layout needs it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kapsi.data.tabular.decide import INTEGER, MISSING_WORDS, WEAK_WORDS, ZERO_FIRST, Decider
from kapsi.data.tabular.dialect import Dialect, find_dialect, ragged
from kapsi.data.tabular.numerals import decimal_mark
from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.source import (
    MAGIC,
    TEXT_SUFFIXES,
    TextStream,
    check_text,
    find_encoding,
    open_table,
    reading_file,
    sample_of,
    western,
)
from kapsi.data.tabular.types import BLANKS, NUMBER, Column, reject, short, table_error

MAX_CATEGORIES = 50
WIDE = 500
"""Number of columns from which all values are converted at once: Arrow takes 0.1 ms per column."""


class TextTable(NamedTuple):
    """Names and columns of a text file, the digest of its bytes, notes, and the decimal mark, None if unknown."""

    names: list[str]
    columns: list[Column]
    digest: str
    notes: tuple[str, ...]
    decimal: str | None


def read_text(
    path: Path,
    suffix: str,
    compression: str | None,
    reading: Reading,
    kinds: Mapping[str, str],
    decimal: str | None = None,
) -> TextTable:
    """Read a text file and decide the types of its columns; the decimal mark is for a file that does not show its own."""
    return TextFile(path, compression, reading, TEXT_SUFFIXES[suffix]).read(kinds, decimal)


class TextFile:
    """A text file with its encoding and layout.

    Args:
        path: the file.
        compression: of the file, None for none.
        reading: options of the user.
        default: separator of a file with one column.
    """

    def __init__(self, path: Path, compression: str | None, reading: Reading, default: str) -> None:
        self.path, self.compression, self.reading, self.where = path, compression, reading, path.name
        with reading_file(path), open_table(path, compression) as raw:
            sample, complete = sample_of(raw)
        for mark, true in MAGIC.items():
            if sample.startswith(mark):
                reject(self.where, f"the content is that of a {true} file; rename it to {path.stem}{true}")
        if not sample.strip(b" \t\r\n\xef\xbb\xbf"):
            reject(self.where, "the file is empty; a table has a header line and at least one row")
        self.encoding, _, note = find_encoding(sample, complete, reading.encoding)
        self.notes = () if note is None else (note,)
        self.sample, self.complete, self.default = sample, complete, default
        self._find()

    def _find(self) -> None:
        """Find the layout, in the present encoding."""
        import codecs

        try:
            text = codecs.getincrementaldecoder(self.encoding)().decode(self.sample, final=self.complete)
        except UnicodeDecodeError as error:
            line = self.sample.count(b"\n", 0, error.start) + 1
            raise table_error(self.where, f"line {line} is not {self.encoding} text; give another --encoding") from None
        check_text(text.encode(), self.where)
        mark = "\ufeff" * text.startswith("\ufeff")
        text = text[len(mark) :]
        try:
            self.dialect = find_dialect(text, self.complete, self.reading, self.where, self.default)
        except csv.Error as error:
            raise table_error(self.where, f"not readable as CSV ({error})") from None
        self.start = len((mark + text[: self.dialect.start]).encode())

    def stream(self) -> TextStream:
        """Open the rows as UTF-8."""
        raw = open_table(self.path, self.compression)
        return TextStream(raw, self.where, self.encoding, self.start, self.dialect.separator)

    def decider(self, kinds: Mapping[str, str], decimal: str | None = None) -> Decider:
        """Return the decisions for the columns; the decimal mark is for a file that does not show its own."""
        return Decider(self.reading, kinds, self.dialect.decimal or decimal, grouped=self.dialect.separator == ";")

    def read(self, kinds: Mapping[str, str], decimal: str | None = None) -> TextTable:
        """Read and type all columns; the decimal mark is for a file that does not show its own."""
        import pyarrow as pa

        decider = self.decider(kinds, decimal)
        names = [name or f"column {i}" for i, name in enumerate(self.dialect.names, 1)]
        with reading_file(self.path):
            try:
                columns, digest, decider = self._columns(names, decider)
            except UnicodeDecodeError:
                columns, digest, decider = self._again(names, decider)
            except pa.ArrowInvalid as error:
                if "invalid UTF8" not in str(error) or self.reading.encoding is not None:
                    raise table_error(self.where, f"not readable as CSV ({str(error)[:200]})") from None
                columns, digest, decider = self._again(names, decider)
        return TextTable(names, columns, digest, (*self.notes, *self.dialect.notes), decider.decimal)

    def _again(self, names: list[str], decider: Decider) -> tuple[list[Column], str, Decider]:
        """Read a text that is not UTF-8 behind the first lines."""
        with open_table(self.path, self.compression) as raw:
            self.encoding, _, note = western(raw.read())
        self.notes = (*self.notes, note)
        self._find()
        return self._columns(names, decider)

    def _columns(self, names: list[str], decider: Decider) -> tuple[list[Column], str, Decider]:
        import pyarrow as pa

        if len(names) >= WIDE and self.dialect.plain and not self.reading.thousands:
            with self.stream() as stream:
                data = stream.read()
            if not stream.quotes:
                columns = read_wide(data, self.dialect, names, decider, self.where)
                return columns, stream.digest.hexdigest(), decider
        strings = {i for i, name in enumerate(names) if decider.kinds.get(name) in ("categorical", "text")}
        # Arrow takes points for decimal points.
        comma = decider.decimal == "," and (self.dialect.decimal is None or self.dialect.separator == ",")
        if self.reading.decimal == "," or self.reading.thousands or comma:
            strings = set(range(len(names)))
        try:
            table, stream = self._arrow(strings, self.dialect)
        except (pa.ArrowInvalid, pa.ArrowCapacityError):
            # Trailing separators, comments between the rows, blank lines; the csv module also names the line of an error.
            table, stream = self._arrow(strings, self.dialect, plain=False)
        self._check_quotes(table, stream)
        if decider.decimal is None:
            table, decider = self._with_mark(table, decider)
        columns = list(table.columns)
        if stream.zeros or stream.plus or any(map(_has_huge, columns)):
            columns = self._with_codes(columns)
        typed = [decider.column(name, column) for name, column in zip(names, columns, strict=True)]
        return typed, stream.digest.hexdigest(), decider

    def _with_mark(self, table: Any, decider: Decider) -> tuple[Any, Decider]:
        """Return the table with the decimal mark by all rows, if the first ones do not show it; numbers in doubt as strings."""
        import pyarrow as pa

        real = any(pa.types.is_floating(column.type) for column in table.columns)
        if real and decider.grouped:
            table, _ = self._arrow(range(table.num_columns), self.dialect, plain=self.dialect.plain)
        words = [
            word
            for column in table.columns
            for chunk in column.chunks
            if pa.types.is_dictionary(chunk.type)
            for word in chunk.dictionary.to_pylist()
        ]
        mark = decimal_mark([*words, "0.5"] if real and not decider.grouped else words)
        return table, replace(decider, decimal=mark)

    def _arrow(self, strings: Iterable[int], dialect: Dialect, *, plain: bool = True) -> tuple[Any, TextStream]:
        """Return the rows as an Arrow table with inferred types, and the stream at its end."""
        import pyarrow as pa
        import pyarrow.csv as pa_csv

        keys = [str(i) for i in range(dialect.width)]
        words = [
            *self.reading.missing,
            *dict.fromkeys(form(w) for w in (*MISSING_WORDS, *WEAK_WORDS) for form in (str, str.upper, str.title)),
        ]
        words += ["NaN", "NaT", "<NA>", "-NaN", "#N/A"]
        options = {
            "parse_options": pa_csv.ParseOptions(delimiter=dialect.separator, newlines_in_values=True),
            "convert_options": pa_csv.ConvertOptions(
                column_types={str(i): pa.dictionary(pa.int32(), pa.string()) for i in strings},
                null_values=words,
                true_values=["true", "True", "TRUE"],
                false_values=["false", "False", "FALSE"],
                decimal_point="," if dialect.decimal == "," and dialect.separator != "," else ".",
                auto_dict_encode=True,
                auto_dict_max_cardinality=MAX_CATEGORIES,
            ),
        }
        size = 2**20
        while True:
            read = pa_csv.ReadOptions(column_names=keys, block_size=size)
            with self.stream() as stream:
                source = stream if plain and dialect.plain else RepairedRows(stream, dialect)
                try:
                    return pa_csv.read_csv(pa.PythonFile(source, mode="r"), read_options=read, **options), stream
                except pa.ArrowInvalid as error:
                    if "straddling object" not in str(error) or size >= 2**30:
                        raise _empty(error, self.where) from None
                    size *= 32  # a row is longer than a block

    def _check_quotes(self, table: Any, stream: TextStream) -> None:
        """Refuse a quote that is never closed: Arrow reads it to the end of the file without an error."""
        if not table.num_rows:
            reject(self.where, "the file has a header but no rows; add at least one row")
        last = str(table.columns[-1][-1].as_py())
        if "\n" in last and stream.quotes % 2 and not stream.tail.rstrip().endswith(b'"'):
            reject(self.where, f"a quote is opened and never closed, before {short(last.splitlines()[0])}; close it")

    def _with_codes(self, columns: list[Any]) -> list[Any]:
        """Return the columns, those of whole numbers with leading zeros or plus signs as strings."""
        import pyarrow as pa
        import pyarrow.compute as pc

        def whole(column: Any) -> bool:
            if pa.types.is_integer(column.type):
                return True
            return bool(column.type == pa.float64() and pc.all(pc.equal(column, pc.trunc(column))).as_py())

        integers = [i for i, column in enumerate(columns) if whole(column)]
        if integers:
            table, _ = self._arrow(integers, self.dialect, plain=self.dialect.plain)
            for i in integers:
                strings = table.columns[i]
                words = pa.chunked_array([chunk.dictionary for chunk in strings.chunks])
                if pc.any(
                    pc.match_substring_regex(
                        pc.utf8_trim(words, characters=BLANKS), rf"{ZERO_FIRST}|^[+]|^-?0[xX]|^-?\d{{16}}"
                    )
                ).as_py():
                    columns[i] = strings
        return columns


def _has_huge(column: Any) -> bool:
    """Return whether a column has numbers with more digits than float64."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_integer(column.type) and column.type != pa.float64():
        return False
    limits = pc.min_max(column).as_py()
    return limits["min"] is not None and not -(2**53) <= limits["min"] <= limits["max"] <= 2**53


def _empty(error: Exception, where: str) -> Exception:
    """Return a plain message for a file without rows, other errors unchanged."""
    if "Empty CSV file" in str(error):
        return table_error(where, "the file has a header but no rows; add at least one row")
    return error


class RepairedRows(io.RawIOBase):
    """The rows of a text stream with a plain layout, as a stream."""

    def __init__(self, stream: TextStream, dialect: Dialect) -> None:
        self.rows, self.dialect, self.buffer = self._repaired(stream, dialect), dialect, b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, empty at the end."""
        while size < 0 or len(self.buffer) < size:
            part = io.StringIO(newline="")
            writer = csv.writer(part, delimiter=self.dialect.separator, lineterminator="\n")
            rows = [row for row, _ in zip(self.rows, range(1000), strict=False)]
            if not rows:
                break
            writer.writerows(rows)
            self.buffer += part.getvalue().encode()
        data, self.buffer = (self.buffer, b"") if size < 0 else (self.buffer[:size], self.buffer[size:])
        return data

    @staticmethod
    def _repaired(stream: TextStream, dialect: Dialect) -> Iterator[list[str]]:
        """Yield the rows without empty values beyond the header."""
        end = dialect.line

        def counted() -> Iterator[str]:
            nonlocal end
            for text in io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8", newline=""):
                end += 1
                yield text

        try:
            for row in dialect.records(counted()):
                if len(row) > dialect.width and not any(value.strip() for value in row[dialect.width :]):
                    row = row[: dialect.width]
                if len(row) != dialect.width:
                    reject(stream.where, ragged(row, end - sum(value.count("\n") for value in row), dialect))
                yield row
        except csv.Error as error:
            raise table_error(stream.where, f"line {end}: not readable as CSV ({error})") from None


def read_wide(data: bytes, dialect: Dialect, names: list[str], decider: Decider, where: str) -> list[Column]:
    """Return the columns of rows without quotes; columns of numbers are converted all at once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lines = [line for line in data.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()]
    del data
    if not lines:
        reject(where, "the file has a header but no rows; add at least one row")
    width, rows = dialect.width, len(lines)
    for number, line in enumerate(lines, dialect.line + 1):
        count = line.count(dialect.separator) + 1
        if count > width and not line.replace(dialect.separator, "")[width:].strip():
            lines[number - dialect.line - 1] = dialect.separator.join(line.split(dialect.separator)[:width])
        elif count != width:
            reject(where, ragged(line.split(dialect.separator), number, dialect))
    # One after another in the order of the columns.
    flat = pc.split_pattern(
        pa.array(["\n".join(lines).replace("\n", dialect.separator)], pa.large_string()), dialect.separator
    )
    values = pc.utf8_trim(flat.flatten(), characters=BLANKS)
    del lines
    text = values
    if dialect.decimal == ",":
        text = pc.replace_substring(pc.replace_substring(text, ".", "!"), ",", ".")
    words = pa.array((*MISSING_WORDS, *WEAK_WORDS), values.type)
    missing = pc.or_(
        pc.is_in(pc.utf8_lower(values), value_set=words),
        pc.is_in(values, value_set=pa.array(decider.reading.missing, values.type)),
    )
    number = pc.and_(pc.match_substring_regex(text, NUMBER), pc.invert(pc.match_substring_regex(text, ZERO_FIRST)))
    is_number, is_missing = (_matrix(mask, rows) for mask in (number, missing))
    numeric = (is_number | is_missing).all(0) & is_number.any(0)
    whole = _matrix(pc.match_substring_regex(text, INTEGER), rows)
    floats = pc.cast(
        pc.if_else(
            pc.and_(number, pc.invert(missing)),
            pc.replace_substring_regex(text, r"^\+", ""),
            pa.scalar(None, text.type),
        ),
        pa.float64(),
    )
    matrix = np.ascontiguousarray(_matrix(pc.fill_null(floats, np.nan), rows).T)
    integer = (whole | is_missing).all(0) & (np.nan_to_num(np.abs(matrix)).max(1) < 2.0**63)
    columns: list[Column] = []
    positions = np.arange(rows) * width
    for i, name in enumerate(names):
        if numeric[i] and name not in decider.kinds and not decider.reading.missing:
            columns.append(Column("integer" if integer[i] else "real", matrix[i], reason="numbers"))
        else:
            column = (
                Column("real", matrix[i])
                if numeric[i] and decider.kinds.get(name) == "numeric"
                else decider.column(name, values.take(pa.array(positions + i)))
            )
            columns.append(column)
    return columns


def _matrix(flat: Any, rows: int) -> Any:
    """Return Arrow values row by row as a NumPy matrix."""
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(rows, -1)
