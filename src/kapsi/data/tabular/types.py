"""Typed columns and tables, and conversions between text and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.errors import TableError, nearest

__all__ = [
    "Column",
    "Table",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Objects: TypeAlias = npt.NDArray[np.object_]
Label: TypeAlias = str | int | bool
Kind: TypeAlias = Literal["integer", "real", "boolean", "text"]
BLANKS = " \t\r\n"
NUMBER = r"^[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|(?i:inf|infinity))$"
MAX_CATEGORIES = 50


def refuse(where: str, text: str) -> TableError:
    # File names and library messages may hold line breaks; an error stays one line.
    return TableError(" ".join(f"{where}: {text}".splitlines()))


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


def listed(values: Iterable[object], most: int = 10) -> str:
    shown = [short(value) for value in values]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def no_column(where: str, what: str, name: str, columns: Iterable[str]) -> TableError:
    columns = list(columns)
    near = nearest(name, columns)
    hint = f" (nearest: {listed(near)})" if near else ""
    return refuse(where, f"{what} {short(name)} is not a column{hint}; the columns are {listed(columns)}")


@dataclass(frozen=True, eq=False)
class Column:
    """One typed column.

    Args:
        kind: "integer", "real", "boolean" or "text".
        values: (rows,) float64 with NaN for missing; for text, (rows,) objects: str, or None for missing.
    """

    kind: Kind
    values: Floats | Objects

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """Return (rows,) booleans: where the value is missing."""
        if self.kind == "text":
            return np.array([value is None for value in self.values], dtype=np.bool_)
        return np.isnan(self.values.astype(np.float64, copy=False))

    @property
    def numbers(self) -> Floats:
        """Return the values of a column that is not text, as (rows,) float64."""
        if self.kind == "text":
            raise TableError("a text column has no numbers; read its values instead")
        return self.values.astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class Table:
    """Typed columns of one file, all of the same length.

    Args:
        name: the file's name, for messages.
        columns: the columns by name, in the file's order.
    """

    name: str
    columns: dict[str, Column]

    @property
    def rows(self) -> int:
        """Return the number of data rows."""
        return next((len(column.values) for column in self.columns.values()), 0)

    def take(self, rows: npt.NDArray[np.integer[Any]], names: Iterable[str] | None = None) -> Table:
        """Return these rows (0-based numbers) of these columns, all columns where names is None."""
        chosen = self.columns if names is None else names
        return Table(self.name, {n: Column(self.columns[n].kind, self.columns[n].values[rows]) for n in chosen})


def parse_numbers(strings: Any) -> Floats:
    """Return the numbers that these trimmed strings spell, NaN for a string that spells none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    spelled = pc.if_else(pc.match_substring_regex(strings, NUMBER), strings, pa.scalar(None, strings.type))
    return to_floats(spelled)


def to_floats(column: Any) -> Floats:
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pc.fill_null(pc.cast(column, pa.float64(), safe=False), math.nan)
    return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)


def encoded(values: npt.NDArray[Any]) -> tuple[Ints, list[str]]:
    """Return each text's position in the list of different texts (-1 for missing), and that list, sorted."""
    import pyarrow as pa

    encoded = pa.array(values, pa.large_string()).dictionary_encode()
    words: list[str] = encoded.dictionary.to_pylist()
    order = sorted(range(len(words)), key=words.__getitem__)
    place = np.empty(len(words) + 1, dtype=np.int64)
    place[order] = np.arange(len(words))
    place[-1] = -1
    return place[encoded.indices.fill_null(len(words)).to_numpy()], [words[position] for position in order]


def numbers_in(words: Sequence[str]) -> Floats:
    """Return the numbers that these texts spell, NaN for a text that spells none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return parse_numbers(pc.utf8_trim(pa.array(list(words), pa.large_string()), characters=BLANKS))


def as_numbers(column: Column, name: str, where: str, rows: Ints | None = None) -> Floats:
    """Return a column's numbers; refuse infinite ones, and text that is not numbers throughout.

    Rows are the column's row numbers in the file, where the column is not all of it.
    """
    if column.kind == "text":
        codes, words = encoded(column.values)
        numbers = np.append(numbers_in(words), np.nan)[codes]
        bad = ~np.isfinite(numbers) & (codes >= 0)
        # True and false among other text mean a boolean column: the other text is what is in the way.
        odd = bad & ~np.array([*(truth(word) in (True, False) for word in words), False])[codes]
        bad = odd if odd.any() else bad
    else:
        numbers = column.numbers
        bad = np.isinf(numbers)
    if bad.any():
        place = int(np.argmax(bad))
        row = int(place if rows is None else rows[place]) + 1
        what = f"column {short(name)} has {short(column.values.tolist()[place])} in row {row}"
        raise refuse(where, f"{what}, where only finite numbers are allowed; mend or empty that value")
    return np.asarray(numbers, dtype=np.float64)


def truth(word: str) -> object:
    return {"true": True, "false": False}.get(word.strip(BLANKS).lower(), word)


def as_text(column: Column, known: Sequence[str]) -> Objects:
    """Return a column's texts; numbers become the known text that spells them ("1", "01", "1.0"), or a plain one."""
    if column.kind == "text":
        return column.values.astype(object, copy=False)
    numbers, codes = np.unique(column.numbers, return_inverse=True)
    spelled: dict[object, str] = {}
    if column.kind == "boolean":
        plain = ["true" if number else "false" for number in numbers]
        keys: list[object] = list(plain)
        spelled.update((word.strip(BLANKS).lower(), word) for word in known)
    else:
        # The file's own spelling is gone once a column is all numbers, so the known texts are matched by value.
        plain = [str(int(n)) if n.is_integer() else repr(n) for n in numbers.tolist()]
        keys = numbers.tolist()
        spelled.update(zip(numbers_in(known).tolist(), known, strict=True))
    exact = set(known)
    words = [p if p in exact else spelled.get(key, p) for p, key in zip(plain, keys, strict=True)]
    texts = np.array([*words, None], dtype=object)[:-1]
    texts[np.isnan(numbers)] = None
    return np.asarray(texts[codes], dtype=object)
