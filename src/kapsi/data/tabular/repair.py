"""Rows that Arrow cannot read as they are: comments, blanks, trailing separators; errors name the line."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator

from kapsi.data.tabular.dialect import Dialect, ragged
from kapsi.data.tabular.source import TextStream
from kapsi.data.tabular.types import reject, table_error


class RepairedRows(io.RawIOBase):
    """The rows of a text stream with a plain layout, as a stream."""

    def __init__(self, stream: TextStream, dialect: Dialect) -> None:
        self.rows, self.dialect, self.buffer = repaired(stream, dialect, dialect.line), dialect, b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, empty at the end."""
        while size < 0 or len(self.buffer) < size:
            part = io.StringIO(newline="")
            writer = csv.writer(part, delimiter=self.dialect.separator, lineterminator="\n")
            rows = list(itertools.islice(self.rows, 1000))
            if not rows:
                break
            writer.writerows(rows)
            self.buffer += part.getvalue().encode()
        data, self.buffer = (self.buffer, b"") if size < 0 else (self.buffer[:size], self.buffer[size:])
        return data


def repaired(stream: TextStream, dialect: Dialect, line: int) -> Iterator[list[str]]:
    """Yield the rows of a text without empty values beyond the header.

    Args:
        stream: the text, from the beginning of a line.
        dialect: its layout.
        line: number of lines before.

    Raises:
        TableError: a row has too few or too many values.
    """
    end = line

    def counted() -> Iterator[str]:
        nonlocal end
        for text in io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8", newline=""):
            end += 1
            yield text

    csv.field_size_limit(2**31 - 1)  # of the whole process: 131,072 characters by default
    try:
        for row in dialect.records(counted()):
            if len(row) > dialect.width and not any(value.strip() for value in row[dialect.width :]):
                row = row[: dialect.width]
            if len(row) != dialect.width:
                reject(stream.where, ragged(row, end - sum(value.count("\n") for value in row), dialect))
            yield row
    except csv.Error as error:
        raise table_error(stream.where, f"line {end}: not readable as CSV ({error})") from None
