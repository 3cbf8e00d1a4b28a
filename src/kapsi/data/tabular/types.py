"""Typed columns and tables; conversions between text and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.errors import TableError, nearest

__all__ = ["Column", "Label", "Table"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Objects: TypeAlias = npt.NDArray[np.object_]
Label: TypeAlias = str | int | bool
Kind: TypeAlias = Literal["integer", "real", "boolean", "text"]
MAX_CATEGORIES = 50
BLANKS = " \t\r\n"
NUMBER = r"^[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|(?i:inf|infinity))$"


def table_error(where: str, text: str) -> TableError:
    """Return a one-line error; file names and messages of libraries may contain line breaks."""
    return TableError(" ".join(f"{where}: {text}".splitlines()))


def reject(where: str, text: str) -> NoReturn:
    """Raise a one-line `TableError`."""
    raise table_error(where, text)


def short(value: object) -> str:
    """Return the repr of a value, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


def listed(values: Iterable[object], most: int = 10) -> str:
    """Return values as a list for a message, shortened to `most`."""
    shown = [short(value) for value in values]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


@dataclass(frozen=True, eq=False)
class Column:
    """A typed column.

    Args:
        kind: "integer", "real", "boolean" or "text".
        values: (rows,) float64, missing as NaN; for text, (rows,) objects: str, missing as None.
    """

    kind: Kind
    values: Floats | Objects

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """The mask of missing values, (rows,)."""
        if self.kind == "text":
            return np.array([value is None for value in self.values], dtype=np.bool_)
        return np.isnan(self.values.astype(np.float64, copy=False))

    @property
    def numbers(self) -> Floats:
        """The values of an integer, real or boolean column, (rows,) float64."""
        if self.kind == "text":
            raise TableError("a text column has no numbers; read its values instead")
        return self.values.astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class Table:
    """Typed columns of a file, all of equal length.

    Args:
        name: name of the file, for messages.
        columns: columns by name, in the order of the file.
        digest: SHA-256 of the file; empty for a table that was not read from a file.
    """

    name: str
    columns: dict[str, Column]
    digest: str = ""

    @property
    def rows(self) -> int:
        """The number of rows, without the header."""
        return next((len(column.values) for column in self.columns.values()), 0)

    def take(self, rows: npt.NDArray[np.integer[Any]], names: Iterable[str] | None = None) -> Table:
        """Return a selection of rows and columns.

        Args:
            rows: row indices, from 0.
            names: names of the columns; None for all.
        """
        names = self.columns if names is None else names
        return Table(self.name, {n: Column(self.columns[n].kind, self.columns[n].values[rows]) for n in names})

    def require(self, name: str, role: str) -> None:
        """Reject a name without a column; the message starts with `role`."""
        if name not in self.columns:
            near = nearest(name, self.columns)
            hint = f" (nearest: {listed(near)})" if near else ""
            reject(self.name, f"{role} {short(name)} is not a column{hint}; the columns are {listed(self.columns)}")


# ------------------------------------------------------------------------------------------------ conversions


def parse_numbers(strings: Any) -> Floats:
    """Return trimmed Arrow strings as numbers, NaN where a string is not a number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return to_floats(pc.if_else(pc.match_substring_regex(strings, NUMBER), strings, pa.scalar(None, strings.type)))


def to_floats(column: Any) -> Floats:
    """Return an Arrow array as float64, missing as NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pc.fill_null(pc.cast(column, pa.float64(), safe=False), math.nan)
    return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)


def encode(values: npt.NDArray[Any]) -> tuple[Ints, list[str]]:
    """Return the code of each string (-1 for missing), and the sorted distinct strings."""
    import pyarrow as pa

    encoded = pa.array(values, pa.large_string()).dictionary_encode()
    words: list[str] = encoded.dictionary.to_pylist()
    order = sorted(range(len(words)), key=words.__getitem__)
    codes = np.empty(len(words) + 1, dtype=np.int64)
    codes[order] = np.arange(len(words))
    codes[-1] = -1
    return codes[encoded.indices.fill_null(len(words)).to_numpy()], [words[i] for i in order]


def numbers_in(words: Sequence[str]) -> Floats:
    """Return strings as numbers, NaN where a string is not a number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return parse_numbers(pc.utf8_trim(pa.array(list(words), pa.large_string()), characters=BLANKS))


def as_numbers(column: Column, name: str, where: str, rows: Ints | None = None) -> Floats:
    """Return a column as finite numbers, missing as NaN.

    Args:
        column: column of any kind.
        name: name of the column, for messages.
        where: name of the file, for messages.
        rows: row indices of the column in the file; None for all rows.

    Raises:
        TableError: a value is infinite or no number.
    """
    if column.kind == "text":
        codes, words = encode(column.values)
        numbers = np.append(numbers_in(words), np.nan)[codes]
        bad = ~np.isfinite(numbers) & (codes >= 0)
        # With true and false among the strings, the column is boolean; report the other strings.
        odd = bad & ~np.array([*(truth(word) in (True, False) for word in words), False])[codes]
        bad = odd if odd.any() else bad
    else:
        numbers = column.numbers
        bad = np.isinf(numbers)
    if bad.any():
        position = int(np.argmax(bad))
        row = int(position if rows is None else rows[position]) + 1
        value = short(column.values.tolist()[position])
        reject(
            where,
            f"column {short(name)} has {value} in row {row}; only finite numbers are allowed: correct or empty the value",
        )
    return np.asarray(numbers, dtype=np.float64)


def truth(word: str) -> object:
    """Return True or False for "true" and "false" in any case, other words unchanged."""
    return {"true": True, "false": False}.get(word.strip(BLANKS).lower(), word)


def as_text(column: Column, known: Sequence[str]) -> Objects:
    """Return a column as strings; numbers take the spelling in `known` with the same value ("1", "01", "1.0")."""
    if column.kind == "text":
        return column.values.astype(object, copy=False)
    numbers, codes = np.unique(column.numbers, return_inverse=True)
    keys: list[object]
    if column.kind == "boolean":
        spelled = ["true" if number else "false" for number in numbers]
        keys = list(spelled)
        spellings: dict[object, str] = {word.strip(BLANKS).lower(): word for word in known}
    else:
        spelled = [str(int(n)) if n.is_integer() else repr(n) for n in numbers.tolist()]
        keys = numbers.tolist()
        spellings = dict(zip(numbers_in(known).tolist(), known, strict=True))
    exact = set(known)
    words = [word if word in exact else spellings.get(key, word) for word, key in zip(spelled, keys, strict=True)]
    strings = np.array([*words, None], dtype=object)[:-1]
    strings[np.isnan(numbers)] = None
    return np.asarray(strings[codes], dtype=object)
