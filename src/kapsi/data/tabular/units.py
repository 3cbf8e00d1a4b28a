"""Units of numbers and zones of times: units stated by the user, and comparison of a column with the unit of the fit."""

from __future__ import annotations

from collections.abc import Sequence

from kapsi.data.tabular.numerals import MULTIPLES, SUFFIXED, is_plural
from kapsi.data.tabular.types import Column, short, table_error

SECONDS = "s"
TIME_OF_DAY = "time of the day"
CLOCK = "hours, minutes and seconds"
"""The unit of times such as 1:20:30, of the day or durations, in seconds."""
DURATION = "duration"
"""The unit of durations such as 36:10:05 or P1DT2H, in seconds."""
PAIRS = "hours and minutes"
"""The unit of times such as 19:30, in seconds; they may be minutes and seconds, the model is the same."""
TIMES = {
    TIME_OF_DAY: "times of the day",
    CLOCK: "times with seconds",
    PAIRS: "times without seconds",
    DURATION: "durations",
}
ZONED, UNZONED = "time zone", "no time zone"
"""The units of dates with times, see `zone_of`."""
ZONES = {ZONED: "times with a time zone", UNZONED: "times without a time zone"}
NONE = "1"
"""The stated unit of numbers without a unit, such as fractions beside percentages."""
FACTORS = {
    ("%", NONE): 100.0,
    (NONE, "%"): 0.01,
    ("‰", NONE): 1000.0,
    (NONE, "‰"): 0.001,
    ("%", "‰"): 0.1,
    ("‰", "%"): 10.0,
    ("days", DURATION): 1 / 86_400,  # a fit on many whole days has days
    **{(SUFFIXED, letter): size for letter, size in MULTIPLES.items()},
}
"""Factor from a unit (second) to the unit of the fit (first)."""
EQUAL = (
    *({TIME_OF_DAY, CLOCK, SECONDS}, {DURATION, CLOCK, SECONDS}, {TIME_OF_DAY, PAIRS}),
    *({"", NONE}, {SUFFIXED, "", NONE}, {ZONED, ""}, {UNZONED, ""}),
)
"""Units of equal numbers: K, M and B are multiplied on reading, times with a zone are converted to UTC."""
REMEDIES = {
    "%": "--unit {name}=% takes 12 as 12%, --unit {name}=1 takes 0.12 as 12%",
    "‰": "--unit {name}=‰ takes 12 as 12‰, --unit {name}=1 takes 0.012 as 12‰",
    TIME_OF_DAY: "write times as hours:minutes, or --unit {name}=s takes the numbers as seconds",
    CLOCK: "write times as hours:minutes:seconds, or --unit {name}=s takes the numbers as seconds",
    PAIRS: "write times as hours:minutes",
    **{letter: f"--unit {{name}}={letter} takes 12 as 12{letter}" for letter in MULTIPLES},
}
"""Units that plain numbers do not have without a statement: numbers may differ by a factor."""


def to_unit(column: Column, unit: str, name: str, where: str) -> tuple[float, str]:
    """Return the factor from the numbers of a column to the unit of the fit, and a note on a guess (empty without one).

    Args:
        column: the numbers.
        unit: the unit of the fit, see `Column`.
        name: name of the column, for messages.
        where: name of the file, for messages.

    Raises:
        TableError: the column has another unit, or plain numbers that may differ from the fit by a factor.

    Example:
        >>> import numpy as np
        >>> to_unit(Column("real", np.ones(1)), "$", "price", "t.csv")
        (1.0, "column 'price' has numbers without a unit; read in '$', the unit of the table of the fit")
        >>> to_unit(Column("real", np.ones(1), unit="1"), "%", "rate", "t.csv")
        (100.0, '')
    """
    given = column.unit
    if (
        given == unit
        or is_plural(given, unit)
        or any({given, unit} <= units for units in EQUAL)
        or column.missing.all()
    ):
        return 1.0, ""
    if (unit, given) in FACTORS:
        return FACTORS[unit, given], ""
    has, needs = (described(text) for text in (given, unit))
    has += f" such as {column.example}" if column.example else ""
    if given in ("", NONE) and unit not in REMEDIES:
        why = f"read in {short(label(unit))}, the unit of the table of the fit"
        return 1.0, f"column {short(name)} has numbers without a unit; {why}"
    remedy = (
        "write the times of both tables in one way" if {given, unit} <= {*TIMES, SECONDS} else "convert the numbers"
    )
    remedy = "write the times of both tables with a zone, or both without" if unit in ZONES else remedy
    remedy = REMEDIES[unit].format(name=short(name)) if given in ("", NONE) else remedy
    raise table_error(where, f"column {short(name)} has {has}, and the table of the fit has {needs}; {remedy}")


def zone_of(*, zoned: bool, unzoned: bool) -> str:
    """Return the unit of dates; empty for days alone, and for times in UTC beside times without a zone: these are in UTC, too.

    Args:
        zoned: whether some times have a time zone.
        unzoned: whether some times have none.
    """
    return "" if zoned == unzoned else ZONED if zoned else UNZONED


def described(unit: str) -> str:
    """Return a unit in words, for messages.

    Example:
        >>> described("$"), described(""), described(TIME_OF_DAY)
        ("numbers with the unit '$'", 'numbers without a unit', 'times of the day')
    """
    if unit in (known := TIMES | ZONES):
        return known[unit]
    return "numbers without a unit" if unit in ("", NONE) else f"numbers with the unit {short(unit)}"


def label(unit: str) -> str:
    """Return a unit behind a number, empty for none.

    Example:
        >>> label("$"), label(TIME_OF_DAY), label("1")
        ('$', 's', '')
    """
    return SECONDS if unit in TIMES else "" if unit in (SUFFIXED, NONE, *ZONES) else unit


def shared_unit(units: Sequence[str]) -> str:
    """Return the label of the unit of all targets, empty if they differ.

    Example:
        >>> shared_unit(["$", "$"]), shared_unit(["$", "%"]), shared_unit([])
        ('$', '', '')
    """
    labels = {label(unit) for unit in units}
    return labels.pop() if len(labels) == 1 else ""


def problem_of_stated(column: Column, unit: str) -> str:
    """Return why numbers cannot have a unit stated by the user, empty if possible."""
    if column.problem or column.missing.all():
        return ""
    if column.kind not in ("integer", "real"):
        return f" has {column.reason or column.kind}, and --unit needs numbers; leave --unit out"
    if column.unit not in ("", unit) and not any({column.unit, unit} <= units for units in EQUAL):
        return f" has the unit {short(column.unit)}, and --unit states {short(unit)}; leave --unit out"
    return ""
