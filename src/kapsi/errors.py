"""The errors that kapsi raises on purpose: each is one line that says where, what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "DataError",
    "DataSetError",
    "FileError",
    "FormulaError",
    "KapsiError",
    "RunError",
    "SpecError",
    "TableError",
    "did_you_mean",
    "nearest",
]


class KapsiError(ValueError):
    """An error that the caller can mend; the command line prints it as one line and exits with code 2."""


class SpecError(KapsiError):
    """A function, a specification or a model file that does not fit."""


class DataError(KapsiError):
    """Data that do not fit: targets, values, types or shapes of arrays, tables."""


class TableError(DataError):
    """A table that cannot be read, fitted or predicted."""


class DataSetError(TableError):
    """A public data set that is missing or damaged."""


class FormulaError(KapsiError):
    """A formula that cannot be read or has no values, or a function that is not there."""


class FileError(KapsiError):
    """A file or folder that cannot be written."""


class RunError(FileError):
    """A run folder that is damaged, of a newer version, in the way, or not a run folder."""


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return the choices most like a misspelled word, the best first; letters' case does not count.

    Example:
        >>> nearest("Tailor", ["taylor", "b_spline", "identity"])
        ['taylor']
    """
    by_folded: dict[str, str] = {}
    for choice in choices:
        by_folded.setdefault(choice.casefold(), choice)
    close = difflib.get_close_matches(word.casefold(), list(by_folded), n=count, cutoff=0.6)
    return [by_folded[folded] for folded in close]


def did_you_mean(word: str, choices: Iterable[str], *, quoted: bool = True) -> str:
    """Return a question with the choice most like a misspelled word and a space after it, or nothing where none is like it.

    Example:
        >>> did_you_mean("Tailor", ["taylor", "b_spline", "identity"])
        "did you mean 'taylor'? "
        >>> did_you_mean("x", ["taylor"])
        ''
    """
    close = nearest(word, choices)
    if not close:
        return ""
    return f"did you mean {close[0]!r}? " if quoted else f"did you mean {close[0]}? "
