"""Options of reading a table: a specification for Python, YAML and the command line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kapsi.errors import SpecError
from kapsi.function import Spec, option

__all__ = ["Reading"]

KIND_OPTIONS = ("numeric", "categorical", "text", "image", "date")


@dataclass(frozen=True)
class Reading(Spec):
    r"""How a table is read; None and () stand for a guess from the file.

    Args:
        missing: words for missing values, in addition to the known spellings.
        decimal: the decimal mark of all numbers, `.` or `,`.
        thousands: the thousands separator of all numbers: `,`, `.`, `'`, `_` or a space.
        separator: the character between values, or `whitespace`.
        skip: number of lines before the header (before the first row without a header).
        comment: beginning of ignored lines.
        encoding: a text encoding known to Python, for example `latin-1`.
        header: whether the first line has names; False names the columns `column 1`, `column 2`, …
        numeric: columns of numbers; another value is an error.
        categorical: columns of categories, also if all values are numbers.
        text: columns of text to read word by word.
        image: columns of images: bytes, or paths within the folder of the table.
        date: columns of dates and times.
        unit: `COLUMN=UNIT`, the unit of the numbers of a column without signs: `rate=%`, `price=$`; `rate=1` for fractions.

    Example:
        >>> Reading(decimal=",", missing=("unknown",)).missing
        ('unknown',)
        >>> Reading(decimal=",", thousands=",")
        Traceback (most recent call last):
            ...
        kapsi.errors.SpecError: Reading: decimal and thousands are both ','; give different characters
    """

    missing: tuple[str, ...] = ()
    decimal: Literal[".", ","] | None = None
    thousands: Literal[",", ".", "'", " ", "_"] | None = None
    separator: str | None = None
    skip: int = option(0, minimum=0)
    comment: str | None = None
    encoding: str | None = None
    header: bool | None = None
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    date: tuple[str, ...] = ()
    unit: tuple[str, ...] = ()

    def check(self) -> None:
        if self.decimal is not None and self.decimal == self.thousands:
            raise SpecError(f"Reading: decimal and thousands are both {self.decimal!r}; give different characters")
        separator = self.separator
        if separator is not None and separator != "whitespace" and (len(separator) != 1 or separator in '"\r\n'):
            raise SpecError(f"Reading.separator: expected one character or whitespace, got {separator!r}")
        if self.comment is not None and not self.comment.strip():
            raise SpecError(f"Reading.comment: expected the beginning of a line, such as #, got {self.comment!r}")
        if self.encoding is not None:
            _check_encoding(self.encoding)
        if not all(name and unit for name, unit in self.units().items()) or len(self.units()) < len(self.unit):
            raise SpecError(f"Reading.unit: expected COLUMN=UNIT, once for a column, got {', '.join(self.unit)}")
        kinds = dict(self.kinds())
        for name in kinds:
            several = [kind for kind in KIND_OPTIONS if name in getattr(self, kind)]
            if len(several) > 1:
                raise SpecError(f"Reading: the column {name!r} is given as {' and '.join(several)}; choose one")

    def units(self) -> dict[str, str]:
        """Return the stated units by column.

        Example:
            >>> Reading(unit=("rate=%",)).units()
            {'rate': '%'}
        """
        parts = (text.rpartition("=") for text in self.unit)
        return {name.strip(): unit.strip() for name, _, unit in parts}

    def kinds(self) -> Iterator[tuple[str, str]]:
        """Yield name and kind of each column with a given kind."""
        for kind in KIND_OPTIONS:
            for name in getattr(self, kind):
                yield name, kind


def _check_encoding(name: str) -> None:
    """Refuse an encoding unknown to Python, or of bytes."""
    try:
        known = codecs.lookup(name)._is_text_encoding
    except (LookupError, ValueError):
        known = False
    if not known:
        raise SpecError(f"Reading.encoding: {name!r} is not known; examples are utf-8, latin-1, cp1252, utf-16")
