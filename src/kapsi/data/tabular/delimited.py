"""Text files as Arrow columns: find the layout, then read by Arrow, or by the csv module for an irregular layout."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kapsi.data.tabular.decide import ZERO_FIRST, Decider
from kapsi.data.tabular.dialect import Dialect, find_dialect
from kapsi.data.tabular.numerals import decimal_marks, is_number
from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.repair import RepairedRows
from kapsi.data.tabular.source import (
    MAGIC,
    TEXT_SUFFIXES,
    TextStream,
    check_text,
    find_encoding,
    foreign,
    is_ebcdic,
    open_table,
    reading_file,
    sample_of,
    western,
)
from kapsi.data.tabular.types import BLANKS, Column, reject, short, table_error
from kapsi.data.tabular.wide import WideNumbers, row_blocks
from kapsi.data.tabular.words import MISSING_WORDS, WEAK_WORDS

MAX_CATEGORIES = 50
WIDE = 500
"""Number of columns from which the numbers of all columns are converted at once."""


class TextTable(NamedTuple):
    """Names and columns of a text file, the SHA-256 digest, notes, and the decimal mark (None if unknown)."""

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
    categories: Mapping[str, Collection[str]] | None = None,
) -> TextTable:
    """Read a text file and type the columns; `decimal` is the decimal mark of a file without evidence."""
    file = TextFile(path, compression, reading, TEXT_SUFFIXES[suffix])
    return file.read(file.decider(kinds, decimal, categories))


class TextFile:
    """A text file with encoding and layout.

    Args:
        path: the file.
        compression: `gzip`, `zip`, `zstd`, or None.
        reading: options of the user.
        default: separator of a file with a single column.
    """

    def __init__(self, path: Path, compression: str | None, reading: Reading, default: str) -> None:
        self.path, self.compression, self.reading, self.where = path, compression, reading, path.name
        with reading_file(path), open_table(path, compression) as raw:
            sample, complete = sample_of(raw)
        kind = foreign(sample)
        if kind is not None:
            reject(self.where, f"the content is {kind}, no table of text; save the table as CSV or Parquet")
        for mark, true in MAGIC.items():
            if sample.startswith(mark):
                remedy = "decompress it once" if compression else f"rename it to {path.stem}{true}"
                reject(
                    self.where,
                    f"the {'decompressed ' if compression else ''}content is that of a {true} file; {remedy}",
                )
        if not sample.strip(b" \t\r\n\xef\xbb\xbf"):
            reject(self.where, "the file is empty; a table has a header line and at least one row")
        if reading.encoding is None and is_ebcdic(sample):
            lines = b"\x15" not in sample  # read as U+0085, which ends no line here
            remedy = (
                "--encoding cp037 reads it, or convert it to UTF-8" if lines else "convert it to UTF-8, line ends too"
            )
            reject(self.where, f"the text is in EBCDIC, as of a mainframe; {remedy}")
        self.encoding, _, note = find_encoding(sample, complete, reading.encoding)
        self.notes = () if note is None else (note,)
        self.sample, self.complete, self.default = sample, complete, default
        self._find()

    def _find(self) -> None:
        """Find the layout in the current encoding."""
        import codecs

        try:
            text = codecs.getincrementaldecoder(self.encoding)().decode(self.sample, final=self.complete)
        except UnicodeError as error:
            start = error.start if isinstance(error, UnicodeDecodeError) else 0  # UTF-16 without a mark has no place
            line = self.sample.count(b"\n", 0, start) + 1
            raise table_error(self.where, f"line {line} is not {self.encoding} text; give another --encoding") from None
        check_text(text.encode(), self.where)
        mark = "\ufeff" * (len(text) - len(text.lstrip("\ufeff")))
        text = text[len(mark) :]
        try:
            self.dialect = find_dialect(text, self.complete, self.reading, self.where, self.default)
        except csv.Error as error:
            raise table_error(self.where, f"not readable as CSV ({error})") from None
        # Arrow drops a byte order mark before the first row; drop the mark in every way of reading.
        first = text[self.dialect.start :]
        marks = len(first) - len(first.lstrip("\ufeff"))
        self.start = len((mark + text[: self.dialect.start + marks]).encode())

    def stream(self) -> TextStream:
        """Open the rows as UTF-8."""
        raw = open_table(self.path, self.compression)
        return TextStream(raw, self.where, self.encoding, self.start, self.dialect.separator)

    def decider(
        self,
        kinds: Mapping[str, str],
        decimal: str | None = None,
        categories: Mapping[str, Collection[str]] | None = None,
    ) -> Decider:
        """Return the decisions for the columns; `decimal` is the decimal mark of a file without evidence."""
        mark, grouped = self.dialect.decimal or decimal, self.dialect.separator == ";"
        known = categories or {}
        return Decider(self.reading, kinds, mark, grouped=grouped, categories=known, folder=self.path.parent)

    def with_mark(self, decider: Decider) -> Decider:
        """Return the decider with the decimal mark of all rows."""
        numbers = WideNumbers(decider, self.dialect.width, keep=False)
        with self.stream() as stream:
            for values in row_blocks(stream, self.dialect):
                numbers.add(values)
        return numbers.decided()

    def read(self, decider: Decider) -> TextTable:
        """Read and type all columns."""
        import pyarrow as pa

        names = [name or f"column {i}" for i, name in enumerate(self.dialect.names, 1)]
        with reading_file(self.path):
            try:
                columns, digest, decider = self._columns(names, decider)
            except UnicodeError:
                columns, digest, decider = self._again(names, decider)
            except pa.ArrowInvalid as error:
                if "invalid UTF8" not in str(error):
                    raise table_error(self.where, f"not readable as CSV ({str(error)[:200]})") from None
                columns, digest, decider = self._again(names, decider)
        self._check_rows_in_quotes(names, columns)
        return TextTable(names, columns, digest, (*self.notes, *self.dialect.notes), decider.decimal)

    def _check_rows_in_quotes(self, names: Sequence[str], columns: Sequence[Column]) -> None:
        """Refuse texts whose lines are rows: a quote was opened in one row and closed in a later one."""
        numbers = [i for i, column in enumerate(columns) if column.kind in ("integer", "real")]
        for i, column in enumerate(columns):
            if column.kind != "text":
                continue
            codes, words = column.coded()
            for code, word in enumerate(words):
                if "\n" not in word:
                    continue
                first, *lines = (line.split(self.dialect.separator) for line in word.split("\n")[:-1])
                whole = [[""] * i + first, *lines]
                told = numbers if lines else [place for place in numbers if place > i]
                if told and all(_is_row(line, len(columns), numbers, i * (not k)) for k, line in enumerate(whole)):
                    row = codes.tolist().index(code) + 1
                    text = f"column {short(names[i])}: {short(word)} (row {row}) has rows in quotes"
                    reject(self.where, f"{text}; remove or close the quote")

    def reject_encoding(self) -> NoReturn:
        """Refuse bytes that are no text in the encoding behind the first lines.

        Raises:
            TableError: always.
        """
        remedy = "save the table as UTF-8" if self.reading.encoding is None else "give another --encoding"
        name = "UTF-8" if self.encoding == "utf-8" else self.encoding
        reject(self.where, f"a row behind the first ones is not {name} text; {remedy}")

    def _again(self, names: list[str], decider: Decider) -> tuple[list[Column], str, Decider]:
        """Read a text with bytes outside of UTF-8 behind the first lines, unless the user has given the encoding."""
        if self.reading.encoding is not None:
            self.reject_encoding()
        with open_table(self.path, self.compression) as raw:
            self.encoding, _, note = western(raw.read())
        self.notes = (*self.notes, note)
        self._find()
        return self._columns(names, decider)

    def _columns(self, names: list[str], decider: Decider) -> tuple[list[Column], str, Decider]:

        if len(names) < WIDE:
            return self._by_arrow(names, decider, range(len(names)))
        numbers = WideNumbers(decider, len(names))
        with self.stream() as stream:
            for values in row_blocks(stream, self.dialect):
                numbers.add(values)
        if not numbers.rows:
            reject(self.where, "the file has a header but no rows; add at least one row")
        decider = numbers.decided()
        columns = numbers.columns(names, range(len(names)), decider)
        rest = [i for i in range(len(names)) if i not in columns]
        if rest:
            words = {i for i in rest if decider.grouped and numbers.marked[i]}
            found, _, _ = self._by_arrow([names[i] for i in rest], decider, rest, words)
            columns |= dict(zip(rest, found, strict=True))
        return [columns[i] for i in range(len(names))], stream.digest.hexdigest(), decider

    def _by_arrow(
        self, names: list[str], decider: Decider, which: Sequence[int], words: Collection[int] | None = None
    ) -> tuple[list[Column], str, Decider]:
        """Return some columns as inferred by Arrow; `words` lists columns of strings, and makes the decimal mark final."""
        import pyarrow as pa

        strings = {
            i
            for i, name in zip(which, names, strict=True)
            if decider.kinds.get(name) in ("categorical", "text", "image")
        }
        strings |= set(words or ())
        # Arrow takes points for decimal points.
        comma = decider.decimal == "," and (self.dialect.decimal is None or self.dialect.separator == ",")
        if self.reading.decimal == "," or self.reading.thousands or comma:
            strings = set(which)
        table, stream = self._arrow_or_repaired(which, strings)
        if any(map(_is_binary, table.columns)):
            raise pa.ArrowInvalid("invalid UTF8")
        self._check_quotes(table, stream)
        if decider.decimal is None and words is None:
            table, decider = self._marked(table, decider, which, plus=stream.plus)
        columns = list(table.columns)
        if stream.zeros or stream.plus or any(map(_has_huge, columns)):
            columns = self._with_codes(columns, which)
        if any(map(_is_time, columns)):
            columns = self._with_times(columns, which)
        typed = [decider.column(name, column) for name, column in zip(names, columns, strict=True)]
        return typed, stream.digest.hexdigest(), decider

    def _marked(self, table: Any, decider: Decider, which: Sequence[int], *, plus: bool) -> tuple[Any, Decider]:
        """Return the table and the decimal mark of all rows, if the first rows show none; numbers in doubt become strings."""
        import pyarrow as pa

        real = any(pa.types.is_floating(column.type) for column in table.columns)
        if real and decider.grouped:
            table, _ = self._arrow_or_repaired(which, which)
        if plus:  # Arrow reads +5 as a real number
            return table, self.with_mark(decider)
        marks = {"."} if real and not decider.grouped else set()
        for column in table.columns:
            if pa.types.is_dictionary(column.type) or pa.types.is_string(column.type):
                for chunk in column.chunks:
                    marks |= decimal_marks(chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk)
        return table, replace(decider, decimal=marks.pop() if len(marks) == 1 else None)

    def _arrow_or_repaired(self, which: Sequence[int], strings: Collection[int]) -> tuple[Any, TextStream]:
        """Return columns as `_arrow`, by way of the csv module for an irregular layout."""
        import pyarrow as pa

        try:
            return self._arrow(which, strings, self.dialect)
        except (pa.ArrowInvalid, pa.ArrowCapacityError):
            # Trailing separators, comments between the rows, blank lines; the csv module also reports the line of an error.
            return self._arrow(which, strings, self.dialect, plain=False)

    def _arrow(
        self, which: Sequence[int], strings: Collection[int], dialect: Dialect, *, plain: bool = True
    ) -> tuple[Any, TextStream]:
        """Return columns as an Arrow table with inferred types, and the stream at the end of the file."""
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
                include_columns=[str(i) for i in which],
                column_types={str(i): pa.dictionary(pa.int32(), pa.string()) for i in strings},
                null_values=words,
                true_values=["true", "True", "TRUE"],
                false_values=["false", "False", "FALSE"],
                decimal_point="," if dialect.decimal == "," and dialect.separator != "," else ".",
                auto_dict_encode=True,
                auto_dict_max_cardinality=MAX_CATEGORIES,
            ),
        }
        size = 2**20 if dialect.width < WIDE else 2**25
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
        """Refuse an unclosed quote: Arrow reads the rest of the file as a single value, without an error."""
        if not table.num_rows:
            reject(self.where, "the file has a header but no rows; add at least one row")
        last = str(table.columns[-1][-1].as_py())
        if "\n" in last and stream.quotes % 2 and not stream.tail.rstrip().endswith(b'"'):
            reject(self.where, f"a quote is opened and never closed, before {short(last.splitlines()[0])}; close it")

    def _with_codes(self, columns: list[Any], which: Sequence[int]) -> list[Any]:
        """Return the columns; whole numbers with leading zeros or plus signs become strings."""
        import pyarrow as pa
        import pyarrow.compute as pc

        def whole(column: Any) -> bool:
            if pa.types.is_integer(column.type):
                return True
            return bool(column.type == pa.float64() and pc.all(pc.equal(column, pc.trunc(column))).as_py())

        integers = [i for i, column in enumerate(columns) if whole(column)]
        if integers:
            again = [which[i] for i in integers]
            table, _ = self._arrow_or_repaired(again, again)
            for i, strings in zip(integers, table.columns, strict=True):
                words = pa.chunked_array([chunk.dictionary for chunk in strings.chunks])
                if pc.any(
                    pc.match_substring_regex(
                        pc.utf8_trim(words, characters=BLANKS), rf"{ZERO_FIRST}|^[+]|^-?0[xX]|^-?\d{{16}}"
                    )
                ).as_py():
                    columns[i] = strings
        return columns

    def _with_times(self, columns: list[Any], which: Sequence[int]) -> list[Any]:
        """Return the columns; times become strings, since Arrow reads 19:30 beside 01:20:30 without a doubt."""
        times = [i for i, column in enumerate(columns) if _is_time(column)]
        again = [which[i] for i in times]
        table, _ = self._arrow_or_repaired(again, again)
        found = dict(zip(times, table.columns, strict=True))
        return [found.get(i, column) for i, column in enumerate(columns)]


def _is_row(line: Sequence[str], width: int, numbers: Sequence[int], start: int) -> bool:
    """Return whether the parts of a line, those from `start`, are a row with numbers at the given places."""
    return len(line) == width and all(is_number(line[i].strip()) for i in numbers if i >= start)


def _is_time(column: Any) -> bool:
    """Return whether Arrow found times of the day in a column."""
    import pyarrow as pa

    return bool(pa.types.is_time(column.type))


def _is_binary(column: Any) -> bool:
    """Return whether Arrow found no text in a column."""
    import pyarrow as pa

    return bool(pa.types.is_binary(column.type.value_type if pa.types.is_dictionary(column.type) else column.type))


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
