"""The comparisons of all models of the zoo with the libraries that people use for them, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from kapsi.errors import SpecError
from kapsi.zoo.base import Case, cases

__all__ = ["Row", "run", "table"]

HEADER = ("model", "quantity", "data", "library", "deviation", "tolerance", "ours", "theirs", "")


class Row(NamedTuple):
    """What came of a case.

    Attributes:
        case: what was compared.
        version: of the other library; None where it is not installed.
        deviation: the largest, as in `Comparison`; None where nothing came of it.
        ours: number of values in the model of kapsi, parameters and buffers that the mapping fills.
        theirs: number of values in the other model.
        problem: why there is no deviation: `missing` where the library is not installed, else the line of the error.
    """

    case: Case
    version: str | None
    deviation: float | None = None
    ours: int | None = None
    theirs: int | None = None
    problem: str | None = None

    @property
    def within(self) -> bool:
        """Return whether the deviation is there and within the tolerance; what is not a number is not."""
        return self.deviation is not None and self.deviation <= self.case.tolerance

    @property
    def outcome(self) -> str:
        """Return `within`, `beyond`, `missing` or the line of the error."""
        return self.problem or ("within" if self.within else "beyond")


def run(seed: int = 0, only: str | None = None) -> list[Row]:
    """Make all comparisons and return a row for each, in the order of the models' names.

    Nothing stops the others: a library that is not installed is `missing`, and an error is a line in its row.

    Args:
        seed: of what is random in the comparisons.
        only: what the model, the quantity, the data or the library must contain; capital letters do not count.

    Raises:
        SpecError: no case contains it.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SpecError(f"parity.run(seed={seed!r}): expected an integer of at least 0")
    found = every = cases()
    if only is not None:
        if not isinstance(only, str):
            raise SpecError(f"parity.run(only={only!r}): expected a part of a name")
        found = [case for case in every if only.casefold() in _text(case).casefold()]
        if not found:
            models = "; ".join(sorted({case.model for case in every}))
            raise SpecError(f"parity.run(only={only!r}): no comparison is called so; there are {models}")
    return [_row(case, seed) for case in found]


def _text(case: Case) -> str:
    return "\n".join((case.model, case.quantity, case.data, case.package))


def _row(case: Case, seed: int) -> Row:
    try:
        version = metadata.version(case.package)
    except metadata.PackageNotFoundError:
        return Row(case, None, problem="missing")
    try:
        made = case.compare(seed)
        return Row(case, version, float(made.deviation), int(made.ours), int(made.theirs))
    except Exception as error:  # whatever a library raises is what there is to say of it
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return Row(case, version, problem=f"{type(error).__name__}: {first}" if first else type(error).__name__)


def table(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Return rows as an aligned table for people; the last line is `parity: k of n within tolerance`.

    A library that is missing counts against k, since nothing was compared.

    Args:
        rows: what `run` returned.
        markdown: a table of Markdown, which is as well aligned; the last line stands below it.
    """
    lines = [HEADER, *(_cells(row) for row in rows)]
    if markdown:
        lines = [tuple(cell.replace("|", "\\|") for cell in line) for line in lines]
    widths = [max(3 if markdown else 0, *(len(line[i]) for line in lines)) for i in range(len(HEADER))]
    right = range(4, 8)
    padded = [
        [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    if markdown:
        rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
        text = [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])]
        text.append("")
    else:
        text = ["  ".join(line).rstrip() for line in padded]
    missing = sorted({row.case.package for row in rows if row.problem == "missing"})
    if missing:
        text.append(f"not installed: {', '.join(missing)}")
        text += [""] if markdown else []
    text.append(f"parity: {sum(row.within for row in rows)} of {len(rows)} within tolerance")
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    case = row.case
    library = case.package if row.version is None else f"{case.package} {row.version}"
    deviation = "" if row.deviation is None else _figure(row.deviation)
    sizes = ("" if size is None else f"{size:,}" for size in (row.ours, row.theirs))
    return (case.model, case.quantity, case.data, library, deviation, f"{case.tolerance:.0e}", *sizes, row.outcome)


def _figure(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) and value else f"{value:g}"
