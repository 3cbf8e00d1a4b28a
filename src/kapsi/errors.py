"""Errors with short messages (argument, given value, allowed values, remedy), and validators of arguments."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

LONGEST_MESSAGE = 2000  # characters; the list of all expansions fits


def printable(text: str) -> str:
    """Return text with all control characters escaped, also line breaks: safe for terminals and logs.

    Escaped are controls (ESC begins terminal commands), invisible and direction-changing format characters, line and
    paragraph separators and lone surrogates; the joiners of scripts and emoji stay.

    Example:
        >>> print(printable("a" + chr(27) + "[2J, b" + chr(0x202E)))
        a\\x1b[2J, b\\u202e
    """
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    if unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or letter in "\u200c\u200d":
        return letter
    return letter.encode("unicode_escape").decode("ascii")


def line_of(text: str) -> str:
    """Return a message as a printable line of at most `LONGEST_MESSAGE` characters; long messages keep beginning and end.

    Example:
        >>> print(line_of("first" + chr(10) + "  second" + chr(27) + "[2J"))
        first second\\x1b[2J
    """
    line = printable(re.sub(r"\s*[\r\n]\s*", " ", text.strip()))
    if len(line) <= LONGEST_MESSAGE:
        return line
    return f"{line[: LONGEST_MESSAGE * 3 // 4]} … {line[-LONGEST_MESSAGE // 5 :]}"


class KapsiError(ValueError):
    """An error for the caller to correct; the command line prints a line and exits with code 2.

    The message is a printable line: names, labels and paths of untrusted files send no command to a terminal.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(line_of(message))


class SpecError(KapsiError):
    """An invalid function, specification, option or call."""


class UnknownFunction(SpecError):
    """A name without a registered function: a typo, or a function of a missing package."""


class DataError(KapsiError):
    """Invalid data: targets, values, types or shapes of arrays, tables."""


class TableError(DataError):
    """An error in reading, fitting or predicting a table."""


class DataSetError(TableError):
    """A missing or damaged public data set."""


class FormulaError(KapsiError):
    """An unreadable formula, a formula without values, or an unknown function in a formula."""


class FileError(KapsiError):
    """A failure to write a file or folder."""


class RunError(FileError):
    """A damaged run folder, a run folder of a newer version or in use, or no run folder."""


class ScaleWarning(UserWarning):
    """Inputs far outside the domain of κ, or a grid update with changed outputs."""


# ------------------------------------------------------------------------------------------------ messages


def shown(value: Any) -> str:
    """Return a value for a message, at most 60 characters without line breaks; other objects than plain data by type."""
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to print 4,300 digits
        return "an integer beyond float64"
    plain = value is None or type(value).__module__ == "builtins" or dataclasses.is_dataclass(value)
    text = " ".join(repr(value).split()) if plain else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return the choices most similar to a misspelled word, best first, or with the letters of the word as initials; ignore case.

    Example:
        >>> nearest("Tailor", ["taylor", "b_spline", "identity"])
        ['taylor']
    """
    by_folded: dict[str, str] = {}
    choices = list(choices)
    for choice in choices:
        by_folded.setdefault(choice.casefold(), choice)
    close = difflib.get_close_matches(word.casefold(), list(by_folded), n=count, cutoff=0.6)
    initials = [choice for choice in choices if "".join(part[:1] for part in choice.split("_")) == word]
    return [by_folded[folded] for folded in close] or initials


def did_you_mean(word: str, choices: Iterable[str], *, quoted: bool = True) -> str:
    """Return "did you mean …? " with the choice most similar to a misspelled word, empty if none is similar.

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


def unknown(what: str, name: Any, choices: Iterable[str]) -> str:
    """Return the message about an unknown name, with a suggestion for a typo and all choices.

    Example:
        >>> unknown("role", "expansio", ["expansion", "fusion"])
        "there is no role 'expansio'; did you mean 'expansion'? choose from expansion, fusion"
    """
    choices = list(choices)
    listed = f"choose from {', '.join(choices)}" if choices else "there are none"
    return f"there is no {what} {shown(name)}; {did_you_mean(str(name), choices)}{listed}"


# ------------------------------------------------------------------------------------------------ validators of arguments


def attempt(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user function; exceptions become a `SpecError` with the name of the function."""
    try:
        return function(*arguments)
    except KapsiError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise SpecError(f"{where} failed: {type(error).__name__}: {reason}") from error


def refuse(where: str, wanted: str, value: Any, error: type[KapsiError] = SpecError) -> NoReturn:
    """Raise an error of the form "WHERE: expected WANTED, got VALUE"."""
    raise error(f"{where}: expected {wanted}, got {shown(value)}")


def check_integer(
    where: str,
    value: Any,
    minimum: int | None = None,
    maximum: int | None = None,
    *,
    wanted: str = "",
    error: type[KapsiError] = SpecError,
) -> int:
    """Return a Python or NumPy integer as a Python int, within an inclusive range.

    Args:
        where: prefix of error messages, for example `rpn(heads=0)`.
        value: the argument.
        minimum, maximum: the range; None for no bound.
        wanted: the allowed values in the message, by default an integer and the range.
        error: class of the error.

    Example:
        >>> check_integer("explain(batch)", 5, 0)
        5
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not _within(number, minimum, maximum):
        refuse(where, wanted or _range("an integer", minimum, maximum), value, error)
    return number


def check_number(
    where: str,
    value: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    wanted: str = "",
    error: type[KapsiError] = SpecError,
) -> float:
    """Return a finite number as a float, within an inclusive range; arguments as in `check_integer`."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not _within(value, minimum, maximum):
        refuse(where, wanted or _range("a finite number", minimum, maximum), value, error)
    return float(value)


def check_choice(where: str, value: Any, choices: Iterable[str], *, error: type[KapsiError] = SpecError) -> str:
    """Return a string from the choices.

    Example:
        >>> check_choice("fit(log)", "csv", ["csv", "jsonl"])
        'csv'
    """
    choices = list(choices)
    if isinstance(value, str) and value in choices:
        return value
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    raise error(f"{where}: expected one of {', '.join(choices)}, got {shown(value)}{f'; {hint}'.rstrip('; ')}")


def _within(number: float, minimum: float | None, maximum: float | None) -> bool:
    return (minimum is None or number >= minimum) and (maximum is None or number <= maximum)


def _range(kind: str, minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f"{kind} from {minimum:,} to {maximum:,}"
    return (
        kind
        if minimum is maximum
        else f"{kind} of at {f'least {minimum:,}' if maximum is None else f'most {maximum:,}'}"
    )
