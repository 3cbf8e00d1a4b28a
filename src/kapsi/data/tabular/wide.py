"""Rows of a text file with hundreds of columns, block by block: numbers of all columns are converted at once.

Arrow takes 0.2 ms per column, and as much again for each block of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.decide import DATES, INTEGER, ZERO_FIRST, Decider, number_form
from kapsi.data.tabular.dialect import Dialect, ragged
from kapsi.data.tabular.numerals import decimal_marks
from kapsi.data.tabular.repair import repaired
from kapsi.data.tabular.source import CHUNK, TextStream
from kapsi.data.tabular.types import BLANKS, Column, Floats, Kind, reject, short
from kapsi.data.tabular.words import MISSING_WORDS, WEAK_WORDS

CELLS = 2**20
"""Values that are converted at once."""
PLAIN = r"^[+-]?(0|[1-9]\d*|\d+\.\d*|\d+\.?\d*[eE][+-]?\d+|\.\d+([eE][+-]?\d+)?|(?i:inf|infinity))$"
"""A number with a decimal point, other than a code with leading zeros."""
_KINDS: tuple[tuple[Kind, str], ...] = (("integer", "whole numbers"), ("real", ""))


def row_blocks(stream: TextStream, dialect: Dialect) -> Iterator[Any]:
    """Yield the values of a text, row by row, as Arrow strings: whole rows of about `CELLS` values.

    Raises:
        TableError: a row has too few or too many values, or a quote is never closed.
    """
    rows, last = max(1, CELLS // dialect.width), ""
    for values in _values(stream, dialect, rows):
        last = values[-1].as_py()
        yield values
    if "\n" in last and stream.quotes % 2 and not stream.tail.rstrip().endswith(b'"'):
        reject(stream.where, f"a quote is opened and never closed, before {short(last.splitlines()[0])}; close it")


def _values(stream: TextStream, dialect: Dialect, rows: int) -> Iterator[Any]:
    """Yield the values of some rows at once; rows from the first quote on are split by the csv module."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def split(lines: list[str]) -> Any:
        text = pa.array([dialect.separator.join(lines)], pa.large_string())
        return pc.split_pattern(text, dialect.separator).flatten()

    number, rest = dialect.line, b""
    ready: list[str] = []
    while dialect.plain:
        part = stream.read(CHUNK)
        rest += part
        if stream.quotes:
            break
        end = rest.rfind(b"\n") + 1 if part else len(rest)
        lines = rest[:end].decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
        rest = rest[end:]
        ready += _checked(lines, number, dialect, stream.where)
        number += len(lines) - 1
        while len(ready) >= rows:
            yield split(ready[:rows])
            del ready[:rows]
        if not part:
            break
    if ready:
        yield split(ready)
    stream.buffer = rest + stream.buffer
    found = repaired(stream, dialect, number)
    while several := list(itertools.islice(found, rows)):
        yield pa.array(itertools.chain.from_iterable(several), pa.large_string())


def _checked(lines: Iterable[str], number: int, dialect: Dialect, where: str) -> Iterator[str]:
    """Yield the lines with a row, without empty values beyond the header; reject others."""
    width, separator = dialect.width, dialect.separator
    for line in lines:
        number += 1
        count = line.count(separator) + 1
        if count > width and not line.replace(separator, "")[width:].strip():
            yield separator.join(line.split(separator)[:width])
        elif count == width and (line or width > 1):
            yield line
        elif line.strip() or count > 1:
            reject(where, ragged(line.split(separator), number, dialect))


class WideNumbers:
    """The numbers in all columns of a text file, block by block.

    Args:
        decider: decisions of the file; without a decimal mark, evidence for one is collected.
        width: number of columns.
        keep: whether to keep the numbers; otherwise the evidence alone.
    """

    def __init__(self, decider: Decider, width: int, *, keep: bool = True) -> None:
        self.decider, self.width, self.keep = decider, width, keep
        self.blocks: list[Floats] = []
        self.rows, self.marks = 0, set[str]()
        # Columns with numbers; with codes such as 007; with other words; with numbers that are not whole; with decimal marks;
        # from 2**53; with numbers or codes from 2**63.
        self.known, self.coded, self.other, self.real, self.marked, self.huge, self.vast = np.zeros(
            (7, width), dtype=np.bool_
        )

    def add(self, values: Any) -> None:
        """Take the values of some rows, one row after another."""
        import pyarrow as pa
        import pyarrow.compute as pc

        values = pc.utf8_trim(values, characters=BLANKS)
        mark, text = self.decider.settled or ".", values
        if mark == ",":
            text = pc.replace_substring(pc.replace_substring(values, ".", "!"), ",", ".")
        number = _mask(pc.match_substring_regex(text, PLAIN))
        missing = self._missing(values, number)
        number &= ~missing
        if pc.any(pc.match_substring(text, "+")).as_py():
            text = pc.replace_substring_regex(text, r"^\+", "")
        code = _mask(pc.match_substring_regex(text, ZERO_FIRST)) & ~missing
        floats = pc.cast(pc.if_else(pa.array(number | code), text, pa.scalar(None, text.type)), pa.float64())
        matrix = self._rows(np.array(pc.fill_null(floats, np.nan).to_numpy(zero_copy_only=False)))
        whole = self._rows(_mask(pc.match_substring_regex(text, INTEGER)))
        number, missing, code = self._rows(number), self._rows(missing), self._rows(code)
        size = np.abs(np.nan_to_num(matrix))
        matrix[code] = np.nan
        self.known |= number.any(0)
        self.coded |= code.any(0)
        self.other |= ~(number | missing | code).all(0)
        self.real |= (number & ~whole).any(0)
        self.huge |= (number & (size >= 2.0**53)).any(0)
        self.vast |= (size >= 2.0**63).any(0)
        self.marked |= (self._rows(_mask(pc.match_substring(text, "."))) & number).any(0)
        if self.decider.settled is None:
            self.marks |= decimal_marks(values)
        self.rows += len(matrix)
        if self.keep:
            self.blocks.append(np.ascontiguousarray(matrix.T))

    def _missing(self, values: Any, number: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return the mask of missing values; numbers are missing if the user has declared them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        missing = np.zeros(len(values), dtype=np.bool_)
        odd = np.flatnonzero(~number)
        words = pa.array((*MISSING_WORDS, *WEAK_WORDS), values.type)
        missing[odd] = _mask(pc.is_in(pc.utf8_lower(values.take(pa.array(odd))), value_set=words))
        if self.decider.reading.missing:
            declared = [word.strip(BLANKS) for word in self.decider.reading.missing]
            missing |= _mask(pc.is_in(values, value_set=pa.array(declared, values.type)))
        return missing

    def _rows(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return flat.reshape(-1, self.width)

    def decided(self) -> Decider:
        """Return the decider with the decimal mark of all rows, if the first ones do not show it."""
        if self.decider.settled is not None:
            return self.decider
        # Without points between thousands, a column of real numbers shows a decimal point.
        points = not self.decider.grouped and (~self.other & (self.real | self.vast)).any()
        marks = self.marks | ({"."} if points else set())
        return replace(self.decider, decimal=marks.pop() if len(marks) == 1 else None)

    def columns(self, names: Sequence[str], which: Sequence[int], decider: Decider) -> dict[int, Column]:
        """Return, of some columns, those of plain numbers by index; all others are left to the decisions on strings."""
        plain = self.known & ~self.coded & ~self.other & ~(self.huge & ~self.real)
        if self.decider.settled is None and decider.grouped and decider.decimal != ".":
            plain &= ~self.marked
        matrix = np.concatenate(self.blocks, axis=1) if len(self.blocks) > 1 else self.blocks[0]
        sentinels = decider.sentinels
        if len(sentinels):
            matrix = np.where(np.isin(matrix, sentinels), np.nan, matrix)
        # Dates such as 20241231 among the whole numbers have a note.
        dated = ~self.real & ((matrix >= DATES[0]) & (matrix <= DATES[1]) | np.isnan(matrix)).all(1)
        flags = ((matrix == 0) | (matrix == 1) | np.isnan(matrix)).all(1) & ~self.marked
        forms = (number_form(), number_form(decider.settled or "."), number_form(flags=True))
        found: dict[int, Column] = {}
        stated, numbers = bool(decider.reading.unit), decider.numbers
        written = np.where(flags, 2, self.marked)
        for i, real, form in zip(which, self.real[which].tolist(), written[which].tolist(), strict=True):
            wanted = decider.kinds.get(names[i])
            if plain[i] and (wanted == "numeric" or (wanted is None and not dated[i])):
                kind, reason = _KINDS[real]
                column = Column(kind, matrix[i], reason=reason or numbers, form=forms[form])
                found[i] = decider.stated(names[i], column) if stated else column
        return found


def _mask(flat: Any) -> npt.NDArray[np.bool_]:
    """Return Arrow booleans as a NumPy array that can be changed."""
    return np.array(flat.to_numpy(zero_copy_only=False), dtype=np.bool_)
