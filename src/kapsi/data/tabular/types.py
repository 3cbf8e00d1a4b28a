"""Typed columns and tables; conversions between text and numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.errors import TableError, nearest

__all__ = ["Column", "Label", "Table"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Objects: TypeAlias = npt.NDArray[np.object_]
Label: TypeAlias = str | int | bool
Kind: TypeAlias = Literal["integer", "real", "boolean", "date", "text", "image", "unusable"]
MAX_CATEGORIES = 50
REQUESTED = "as requested"
"""Reason of a column of a kind that an option gives."""
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


def label_text(label: Label) -> str:
    """Return a label of a class as it is written in CSV files: `true` and `false` for booleans."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def listed(values: Iterable[object], most: int = 10) -> str:
    """Return values as a list for a message, shortened to `most`."""
    shown = [short(value) for value in values]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


class Column:
    """A typed column with the reason for its type.

    Args:
        kind: "integer", "real", "boolean", "date" (seconds since 1970, UTC), "text", "image", or "unusable".
        values: (rows,) float64, missing as NaN; for text, (rows,) objects: str, missing as None; for images, see
            `pictures.image_column`.
        codes: for text, instead of values: index of each value in `words`, -1 for missing, (rows,).
        words: distinct strings, sorted.
        reason: why the column has this type, in a few words.
        notes: notes for the user, one line each, if the column is used.
        problem: why the column cannot be used; empty if it can.
        free: whether a text is read word by word; otherwise it is a category.
        doubt: why a text cannot be a target: nearly all of its values are numbers.
        unit: currency, percent sign or other unit of all numbers, `time of the day`, `duration`, `K, M, B` for suffixes; empty for
            plain numbers; for dates one of `units.ZONES`, empty for days without times.
        form: how the strings of the column are written, for a comparison with further rows.
        example: a string of a column of times as it is written, for messages.
    """

    __slots__ = (
        "_codes",
        "_values",
        "_words",
        "doubt",
        "example",
        "form",
        "free",
        "kind",
        "notes",
        "problem",
        "reason",
        "unit",
    )

    def __init__(
        self,
        kind: Kind,
        values: Floats | Objects | None = None,
        *,
        codes: npt.NDArray[Any] | None = None,
        words: Sequence[str] = (),
        reason: str = "",
        notes: tuple[str, ...] = (),
        problem: str = "",
        free: bool = False,
        doubt: str = "",
        unit: str = "",
        form: Mapping[str, str] | None = None,
        example: str = "",
    ) -> None:
        self.kind, self.reason, self.notes, self.problem, self.free = kind, reason, notes, problem, free
        self.doubt, self.unit, self.form = doubt, unit, form or {}
        self._values, self._codes, self._words, self.example = values, codes, words, example

    def __len__(self) -> int:
        return len(self._values if self._codes is None else self._codes)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"Column({self.kind!r}, {len(self)} rows)"

    @property
    def values(self) -> Floats | Objects:
        """The values, (rows,): float64, or objects for text."""
        if self._values is None:
            self._values = np.array([*self._words, None], dtype=object)[self._codes]
        return self._values

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """The mask of missing values, (rows,)."""
        if self.kind == "image":
            return np.array([not isinstance(value, np.ndarray) for value in self.values], dtype=np.bool_)
        if self.kind in ("text", "unusable"):
            return np.asarray(self.coded()[0] < 0)
        return np.isnan(self.numbers)

    @property
    def numbers(self) -> Floats:
        """The values of a column that is no text, (rows,) float64."""
        if self.kind in ("text", "image", "unusable"):
            raise TableError(f"a column of kind {self.kind} has no numbers; read its values instead")
        return self.values.astype(np.float64, copy=False)

    def coded(self) -> tuple[npt.NDArray[Any], Sequence[str]]:
        """Return the code of each string of a text column (-1 for missing), and the sorted distinct strings.

        Images have the digests of their pixels as strings.
        """
        if self._codes is None and self.kind == "image":
            return encode(np.array([_digest(value) for value in self.values], dtype=object))
        if self._codes is None:
            self._codes, self._words = encode(self.values)
        return self._codes, self._words

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> Column:
        """Return a selection of rows."""
        if self._codes is None:
            return self.with_values(self.values[rows])
        codes = self._codes[rows]
        used = np.zeros(len(self._words) + 1, dtype=np.bool_)
        used[codes] = True
        if used[:-1].all():
            return self._copy(codes=codes, words=self._words)
        position = np.append(np.cumsum(used[:-1]) - 1, -1)
        return self._copy(codes=position[codes], words=[self._words[i] for i in np.flatnonzero(used[:-1]).tolist()])

    def with_values(self, values: Floats | Objects) -> Column:
        """Return a column of the same kind with other values."""
        return self._copy(values=values)

    def as_free(self) -> Column:
        """Return a text that is read word by word."""
        codes, words = self.coded()
        column = self._copy(codes=codes, words=words)
        column.free = True
        return column

    def _copy(self, **data: Any) -> Column:
        data |= {
            "reason": self.reason,
            "notes": self.notes,
            "problem": self.problem,
            "free": self.free,
            "doubt": self.doubt,
            "unit": self.unit,
            "form": self.form,
            "example": self.example,
        }
        return Column(self.kind, **data)

    def line(self, name: str) -> str:
        """Return name, type and reason on one line."""
        text = f": {self.kind} ({self.reason})" if self.reason else f": {self.kind}"
        return f"column {short(name)}{self.problem or text}"


@dataclass(frozen=True, eq=False)
class Table:
    """Typed columns of a file, all of equal length.

    Args:
        name: name of the file, for messages.
        columns: columns by name, in the order of the file.
        digest: SHA-256 of the file; empty for a table that was not read from a file.
        notes: notes on the file for the user, one line each.
        decimal: the decimal mark of a text file, None if unknown.

    Attributes:
        derived: results computed from the columns, kept for the next use; not copied by `replace`.
    """

    name: str
    columns: dict[str, Column]
    digest: str = ""
    notes: tuple[str, ...] = ()
    decimal: str | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def rows(self) -> int:
        """The number of rows, without the header."""
        return next((len(column) for column in self.columns.values()), 0)

    def take(self, rows: npt.NDArray[np.integer[Any]], names: Iterable[str] | None = None) -> Table:
        """Return a selection of rows and columns.

        Args:
            rows: row indices, from 0.
            names: names of the columns; None for all.
        """
        names = self.columns if names is None else names
        if len(rows) == self.rows and np.array_equal(rows, np.arange(self.rows)):
            return Table(self.name, {n: self.columns[n] for n in names})
        return Table(self.name, {n: self.columns[n].take(rows) for n in names})

    def blocks(self, rows: npt.NDArray[np.integer[Any]] | None = None) -> Iterator[tuple[list[str], Floats]]:
        """Yield names and values, (columns, rows), of the numeric and boolean columns, many small ones at once.

        Args:
            rows: row indices, from 0; None for all.
        """
        names = [name for name, column in self.columns.items() if column.kind in ("integer", "real", "boolean")]
        if len(names) * self.rows <= BLOCK:
            parts = iter([(names, self._block(names))] if names else [])
        else:
            parts = numeric_blocks({name: self.columns[name] for name in names})
        for part, values in parts:
            yield part, values if rows is None else np.take(values, rows, axis=1)

    def _block(self, names: list[str]) -> Floats:
        """Return the values of all numeric columns of a small table, computed once."""
        found: Floats | None = self.derived.get("values")
        if found is None:
            found = np.stack([self.columns[name].numbers for name in names])
            found.flags.writeable = False
            self.derived["values"] = found
        return found

    def use(self, names: Iterable[str]) -> list[str]:
        """Return the notes on columns that are used; reject a column that cannot be.

        Raises:
            TableError: the problem of the first such column.
        """
        notes: list[str] = []
        names = list(names)
        for name in names:
            column = self.columns[name]
            if column.problem:
                others = [n for n in names if self.columns[n].problem and n != name]
                more = f" (further columns with problems: {listed(others)})" if others else ""
                reject(self.name, f"column {short(name)}{column.problem}{more}")
            notes += column.notes
        return notes

    def require(self, name: str, role: str) -> None:
        """Reject a name without a column; the message starts with `role`."""
        if name not in self.columns:
            near = nearest(name, self.columns)
            hint = f" (nearest: {listed(near)})" if near else ""
            reject(self.name, f"{role} {short(name)} is not a column{hint}; the columns are {listed(self.columns)}")


BLOCK = 2**22  # values


def numeric_blocks(columns: Mapping[str, Column]) -> Iterator[tuple[list[str], Floats]]:
    """Yield names and values, (columns, rows), of the numeric and boolean columns, many small ones at once."""
    names = [name for name, column in columns.items() if column.kind in ("integer", "real", "boolean")]
    size = max(1, BLOCK // max(1, len(columns[names[0]]))) if names else 1
    for begin in range(0, len(names), size):
        part = names[begin : begin + size]
        yield part, np.stack([columns[name].numbers for name in part])


def _digest(image: object) -> str | None:
    """Return a digest of the pixels of an image, None for a missing one."""
    if not isinstance(image, np.ndarray):
        return None
    return hashlib.blake2b(repr(image.shape).encode() + image.tobytes(), digest_size=16).hexdigest()


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
    if column.kind in ("text", "unusable"):
        codes, words = column.coded()
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


def is_truth(word: str) -> bool:
    """Return whether a word is true or false, in any case."""
    return isinstance(truth(word), bool)


def truth(word: str) -> object:
    """Return True or False for "true" and "false" in any case, other words unchanged."""
    return {"true": True, "false": False}.get(word.strip(BLANKS).lower(), word)


def as_words(column: Column, known: Sequence[str]) -> tuple[npt.NDArray[Any], Sequence[str]]:
    """Return a column as codes and distinct strings; numbers are spelled as in `known` ("1", "01", "1.0")."""
    if column.kind in ("text", "unusable"):
        return column.coded()
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
    codes = np.where(np.isnan(numbers)[codes], -1, codes)
    return codes, words[: len(numbers) - int(np.isnan(numbers).any())]


def as_text(column: Column, known: Sequence[str]) -> Column:
    """Return a column as text, with the strings of `as_words`."""
    if column.kind == "text":
        return column
    codes, words = as_words(column, known)
    return Column("text", np.array([*words, None], dtype=object)[codes])
