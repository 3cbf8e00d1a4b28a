"""Parity table: the models of the zoo next to those of other libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from kapsi.errors import SpecError, check_integer
from kapsi.function import coerce
from kapsi.text import text_table
from kapsi.zoo.base import Case, cases

HEADER = ("model", "quantity", "data", "library", "deviation", "tolerance", "ours", "theirs", "")


class ParityRow(NamedTuple):
    """Outcome of a case.

    Attributes:
        case: the case.
        version: version of the other library; None if not installed.
        deviation: see `Comparison`; None without a result.
        ours: number of values of the kapsi model set by the conversion.
        theirs: number of values of the other model.
        problem: reason for a missing deviation: `missing` for a library not installed, else the line of the error.
    """

    case: Case
    version: str | None
    deviation: float | None = None
    ours: int | None = None
    theirs: int | None = None
    problem: str | None = None

    @property
    def within(self) -> bool:
        """Return whether the deviation is known and within the tolerance; NaN is not."""
        return self.deviation is not None and self.deviation <= self.case.tolerance

    @property
    def missing(self) -> bool:
        """Return whether the library is not installed."""
        return self.problem == "missing"

    @property
    def outcome(self) -> str:
        """Return `within`, `beyond`, `missing` or the line of the error."""
        return self.problem or ("within" if self.within else "beyond")


def run(seed: int = 0, only: str | None = None) -> list[ParityRow]:
    """Run the parity cases and return one row per case, sorted by family.

    Errors and missing libraries are reported in their rows; the other cases still run.

    Args:
        seed: seed of the random parts, at least 0.
        only: part of the model, quantity, data or library of the cases to run; case-insensitive.

    Raises:
        SpecError: no case matches.
    """
    check_integer("parity.run(seed)", seed, 0)
    part = coerce(str | None, only, "parity.run(only)") or ""
    available = cases()
    chosen = [case for case in available if part.casefold() in _text(case).casefold()]
    if not chosen:
        models = "; ".join(sorted({case.model for case in available}))
        raise SpecError(f"parity.run(only={only!r}): no matching case; available: {models}")
    return [_row(case, seed) for case in chosen]


def _text(case: Case) -> str:
    return "\n".join((case.model, case.quantity, case.data, case.package))


def _row(case: Case, seed: int) -> ParityRow:
    try:
        version = metadata.version(case.package)
    except metadata.PackageNotFoundError:
        return ParityRow(case, None, problem="missing")
    try:
        result = case.compare(seed)
        return ParityRow(case, version, float(result.deviation), int(result.ours), int(result.theirs))
    except Exception as error:  # any error of a library is a line of the table
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return ParityRow(case, version, problem=f"{type(error).__name__}: {first}" if first else type(error).__name__)


def table(rows: Sequence[ParityRow]) -> str:
    """Return rows as an aligned table with a last line `parity: k of n within tolerance`; n counts installed libraries only.

    Cases of missing libraries are counted as `m not installed`.

    Args:
        rows: result of `run`.
    """
    text = text_table([HEADER, *(_cells(row) for row in rows)], range(4, 8))
    missing = [row.case.package for row in rows if row.missing]
    if missing:
        text.append(f"not installed: {', '.join(sorted(set(missing)))}")
    within = f"{sum(row.within for row in rows)} of {len(rows) - len(missing)} within tolerance"
    text.append(f"parity: {within}" + (f", {len(missing)} not installed" if missing else ""))
    return "\n".join(text)


def _cells(row: ParityRow) -> tuple[str, ...]:
    case = row.case
    library = case.package if row.version is None else f"{case.package} {row.version}"
    deviation = "" if row.deviation is None else _figure(row.deviation)
    sizes = ("" if size is None else f"{size:,}" for size in (row.ours, row.theirs))
    return (case.model, case.quantity, case.data, library, deviation, f"{case.tolerance:.0e}", *sizes, row.outcome)


def _figure(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) and value else f"{value:g}"
