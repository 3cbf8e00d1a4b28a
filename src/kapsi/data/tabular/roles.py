"""The role of each column: index columns, weights, groups and times; notes on doubtful inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import (
    Column,
    Floats,
    Ints,
    Table,
    as_numbers,
    as_text,
    as_words,
    listed,
    reject,
    short,
)
from kapsi.data.tabular.units import to_unit
from kapsi.data.tabular.words import SUMMARIES, summary

INDEX = re.compile(r"__index_level_\d+__")
SENTINELS = (-9999, -99999, -999, -99, 9999, 99999, 999)
NEVER = 221845392000.0
"""Seconds from 1970 to the year 9000."""
FAR = 5.0
LEAST_ROWS = 10
EDGE = 8
"""Rows at each end of a table among which named summaries are looked for: pandas' `describe` has eight."""
NEAR = 1e-3
"""Allowed relative deviation of a named summary, for rounded numbers."""
LARGE_WEIGHT = 1e100


def index_columns(table: Table) -> dict[str, str]:
    """Return the columns with numbers of rows, and the reason: unnamed first columns, and pandas' `__index_level_0__`."""
    found = {name: "it is the index of pandas" for name in table.columns if INDEX.fullmatch(name)}
    for number, (name, column) in enumerate(table.columns.items(), 1):
        if name == f"column {number}" and not column.problem and column.missing.all():
            found[name] = "it has no name and no values"
    without_header = all(name == f"column {number}" for number, name in enumerate(table.columns, 1))
    for number, (name, column) in enumerate(table.columns.items(), 1):
        unnamed = name == f"column {number}" or re.fullmatch(r"Unnamed: \d+(\.\d+)*", name)
        if not unnamed or column.kind != "integer" or number == len(table.columns):
            break
        if column.numbers[0] in (0, 1) and bool((np.diff(column.numbers) == 1).all()):
            found[name] = "it has no name and numbers the rows"
        elif not without_header and len(np.unique(column.numbers)) == table.rows >= LEAST_ROWS:
            found[name] = "it has no name and a different whole number in each row"
        else:
            break
    return found


def check_totals(table: Table, numeric: Collection[str] = ()) -> list[str]:
    """Refuse rows that summarize the other rows; return notes on rows that may.

    These are rows at the beginning or the end with a name such as Total or Mean and this statistic of the other rows, and the
    first row and the last three rows with the sums of the rows below or above, in at least half of the columns of numbers with
    a value there. For sums without a name, columns of mostly zeros do not count, nor doubling ones, such as 1, 1, 2, 4, 8.

    Args:
        table: the table.
        numeric: columns whose values are all numbers, as stated by the user: one of them with a summary keeps the row.

    Example:
        >>> rows = np.array([*range(1, 11), 55.0])
        >>> check_totals(Table("t.csv", {"a": Column("real", rows)}), numeric=["a"])
        []
        >>> check_totals(Table("t.csv", {"a": Column("real", rows)}))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        kapsi.errors.TableError: t.csv: row 11 has the sums of the rows above it ('a'); remove the row, or --numeric 'a' keeps it
    """
    named = _named_summaries(table)
    others = np.setdiff1d(np.arange(table.rows), list(named))
    for row, word in named.items() if len(others) > 2 else ():
        statistic = SUMMARIES[summary(word)]
        if statistic is not None:
            _refuse_summary(
                table,
                row,
                f"({short(word)}) summarizes the other rows",
                _matches(table, row, others, statistic),
                numeric,
            )
    for row in (*range(table.rows - 1, table.rows - 4, -1), 0) if table.rows >= LEAST_ROWS else ():
        _refuse_summary(
            table, row, f"has the sums of the rows {'above' if row else 'below'} it", _sums(table, row), numeric
        )
    leading = [row for row, word in named.items() if SUMMARIES[summary(word)] is not None]
    return [f"row {row + 1:,} is called {short(named[row])}; remove it if it summarizes other rows" for row in leading]


def _refuse_summary(table: Table, row: int, text: str, found: tuple[list[str], int], numeric: Collection[str]) -> None:
    """Refuse a row with summaries in some columns, at least half of those that count."""
    names, known = found
    if names and 2 * len(names) >= known and not set(numeric) & set(names):
        remedy = f"remove the row, or --numeric {short(names[0])} keeps it"
        reject(table.name, f"row {row + 1:,} {text} ({listed(names, 3)}); {remedy}")


def _named_summaries(table: Table) -> dict[int, str]:
    """Return the rows at both ends with the name of a summary that no other row of the column has, and these names."""
    ends = sorted({*range(min(EDGE, table.rows)), *range(max(0, table.rows - EDGE), table.rows)})
    found: dict[int, str] = {}
    for column in table.columns.values():
        if column.kind not in ("text", "unusable"):
            continue
        codes, words = column.coded()
        for row in ends:
            if codes[row] >= 0 and summary(words[codes[row]]) and np.count_nonzero(codes == codes[row]) == 1:
                found.setdefault(row, words[codes[row]])
    # Between other rows, Average may be a grade.
    first = next((row for row in range(table.rows) if row not in found), table.rows)
    last = next((row for row in reversed(range(table.rows)) if row not in found), -1)
    return {row: word for row, word in sorted(found.items()) if row < first or row > last}


def _matches(table: Table, row: int, others: Ints, statistic: Callable[..., Any]) -> tuple[list[str], int]:
    """Return the columns with a statistic of other rows in a row, up to rounding, and the number of columns with a value there."""
    names, known = [], 0
    for part, values in table.blocks():
        rest, value = values[:, others], values[:, row]
        use = np.flatnonzero(
            np.isfinite(value) & (np.nanmax(np.nan_to_num(np.abs(rest)), axis=1) > 0) & ~np.isnan(rest).all(1)
        )
        with np.errstate(over="ignore", invalid="ignore"):
            expected, spread = statistic(rest[use], axis=1), np.nanstd(rest[use], axis=1)
            near = np.isfinite(expected) & (np.abs(value[use] - expected) <= NEAR * np.abs(expected))
        names += [part[i] for i in use[near & (spread > 0)]]
        known += len(use)
    return names, known


def _sums(table: Table, row: int) -> tuple[list[str], int]:
    """Return the columns with the sum of the rows above in a row (below the first row), and the number of columns with a value."""
    names, known = [], 0
    for part, values in table.blocks():
        value, others = values[:, row], values[:, 1:] if row == 0 else values[:, :row]
        with np.errstate(over="ignore", invalid="ignore"):
            near = np.abs(value - np.nansum(others, axis=1)) <= 1e-9 * np.abs(value)
        for i in np.flatnonzero(near & np.isfinite(value)):
            rest = np.nan_to_num(others[i])
            if abs(value[i]) / 2 > np.abs(rest).max() and 2 * np.count_nonzero(rest) >= len(rest):
                names.append(part[i])
        known += int((~np.isnan(value)).sum())
    return names, known


def sentinels(features: Table) -> list[str]:
    """Return notes on repeated values far from all others, for example −9999, and on dates such as 9999-12-31."""
    notes = []
    for names, values in features.blocks():
        for sentinel in SENTINELS:
            hits = values == sentinel
            counts = hits.sum(1)
            for i in np.flatnonzero(counts >= 2):
                rest = values[i][~hits[i] & ~np.isnan(values[i])]
                if len(rest) > 1 and _far(sentinel, rest):
                    count = f"{counts[i]} of {values.shape[1]} rows"
                    notes.append(
                        f"column {short(names[i])} is {sentinel} in {count}, far from all other values; "
                        f"--missing {sentinel} treats them as missing"
                    )
    for name, column in features.columns.items():
        last = np.nanmax(column.numbers) if column.kind == "date" and not column.missing.all() else 0.0
        if last >= NEVER:
            notes.append(
                f"column {short(name)} has the date {np.datetime64(int(last), 's').astype('datetime64[D]')}, as for no end; "
                "--missing DATE, as it is written, treats it as missing"
            )
    return notes


def _far(value: float, rest: Floats) -> bool:
    """Return whether a value is outside of other values by several times their range."""
    low, high = float(rest.min()), float(rest.max())
    width = max(high - low, 1e-300)
    return value < low - width or value > high + FAR * width or (value < 0 <= low)


def order_notes(features: Table, y: npt.NDArray[np.generic], classes: bool) -> list[str]:
    """Return notes on inputs in the order of the target, and on columns of distinct whole numbers."""
    notes, distinct = [], []
    if len(y) < LEAST_ROWS or y.ndim > 1:
        return []
    count = len(np.unique(y))
    for names, values in features.blocks():
        order = np.argsort(values, axis=1, kind="stable")
        ordered = np.take_along_axis(values, order, axis=1)
        steps = ordered[:, 1:] > ordered[:, :-1]  # differences of huge values overflow
        if count < len(y):
            equal = np.flatnonzero((steps.sum(1) == count - 1) & ~np.isnan(ordered[:, -1]))
            notes += [_given(names[i]) for i in equal if _same_steps(y[order[i]], steps[i], classes)]
        rising = np.flatnonzero(steps.all(1))
        follows = _runs(y[order[rising]]) if classes else _monotone(y[order[rising]])
        for i, same in zip(rising, follows, strict=True):
            if same and len(features.columns) > 1:
                notes.append(
                    f"column {short(names[i])} orders the rows as the target does; if it comes from the target, "
                    f"--drop {short(names[i])} leaves it out"
                )
            elif features.columns[names[i]].kind == "integer":
                distinct.append(names[i])
    for name, column in features.columns.items():
        if classes and column.kind == "text" and len(column.coded()[1]) == count:
            codes = column.coded()[0]
            pairs = np.unique(np.stack([codes, y]), axis=1)
            notes += [_given(name)] * (pairs.shape[1] == count and bool((codes >= 0).all()))
    if distinct:
        notes.append(
            f"whole numbers that are all distinct, as of identifiers: {listed(distinct)}; --drop leaves them out"
        )
    return notes


def _given(name: str) -> str:
    """Return a note on a column with the same equal rows as the target."""
    return (
        f"column {short(name)} has one value for each value of the target; if it comes from the target, --drop {short(name)} "
        "leaves it out"
    )


def _same_steps(y: npt.NDArray[np.generic], steps: npt.NDArray[np.bool_], classes: bool) -> bool:
    """Return whether the target, in the order of a column, changes with the column only, in one direction unless classes."""
    values = y.astype(np.float64)
    before, after = values[:-1], values[1:]
    one_way = classes or bool((after >= before).all() or (after <= before).all())
    return one_way and np.array_equal(after != before, steps)


def _monotone(y: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Return whether the values of each row of y, (orders, rows), rise or fall all the way."""
    before, after = y[:, :-1].astype(np.float64), y[:, 1:].astype(np.float64)
    return np.asarray((after > before).all(1) | (after < before).all(1))


def _runs(codes: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Return whether, in each row of codes, (orders, rows), the codes of a class follow each other."""
    return np.asarray((codes[:, 1:] != codes[:, :-1]).sum(1) == len(np.unique(codes)) - 1)


# ------------------------------------------------------------------------------------------------ rows


def check_roles(table: Table, targets: Sequence[str], drop: Sequence[str], roles: Mapping[str, str | None]) -> None:
    """Refuse missing columns, and columns with two roles."""
    for target in targets:
        if target in drop:
            reject(table.name, f"the column {short(target)} is both the target and to be dropped; choose one")
    taken = dict.fromkeys(targets, "the target")
    for role, name in roles.items():
        if name is None:
            continue
        table.require(name, f"the column of the {role}")
        if name in taken or name in drop:
            other = taken.get(name, "dropped")
            reject(table.name, f"the column {short(name)} is to be the {role} and {other}; choose one")
        taken[name] = f"the {role}"
    if roles["group"] is not None and roles["time"] is not None:
        reject(table.name, "--group and --time give different splits; leave one out")


def check_validation(validation: Table, targets: Sequence[str], roles: Mapping[str, str | None], where: str) -> None:
    """Refuse validation rows without a target, or together with other splits."""
    for target in targets:
        validation.require(target, "the target")
    for role in ("group", "time"):
        if roles[role] is not None:
            reject(where, f"--{role} has no effect on given validation rows; leave it out")


def stacked(table: Table, validation: Table) -> Table:
    """Return the rows of two tables, the second in the types of the first.

    Raises:
        TableError: the second lacks a column.
    """
    columns, units = {}, []
    for name, first in table.columns.items():
        if name not in validation.columns:
            reject(validation.name, f"missing columns: {short(name)}; the columns are {listed(validation.columns)}")
        columns[name], note = _joined(name, first, validation)
        units += [f"{note} ({validation.name})"] if note else []
    notes = (*table.notes, *validation.notes, *units)
    return Table(table.name, columns, table.digest + validation.digest, notes, table.decimal)


def _joined(name: str, first: Column, validation: Table) -> tuple[Column, str]:
    """Return a column of both tables, and a note on the unit of the second."""
    second, note = validation.columns[name], ""
    if first.problem or second.problem:
        problem = first.problem or f" of {validation.name}{second.problem}"
        return Column("unusable", codes=np.full(len(first) + len(second), -1), problem=problem), ""
    if "image" in (first.kind, second.kind):
        if first.kind != second.kind:
            reject(validation.name, f"column {short(name)} has images in one of the tables only; give images in both")
        values = np.concatenate([first.values, second.values])
    elif first.kind == "text":
        values = np.concatenate([first.values, as_text(second, first.coded()[1]).values])
    else:
        factor, note = to_unit(second, first.unit, name, validation.name)
        values = np.concatenate([first.numbers, as_numbers(second, name, validation.name) * factor])
    kind = "real" if {first.kind, second.kind} == {"integer", "real"} else first.kind
    column = Column(kind, values, reason=first.reason, notes=first.notes, free=first.free, unit=first.unit)
    return column, note


def kinds_of(table: Table) -> dict[str, str]:
    """Return the kind of each column of text, images, numbers and dates, for `read_table` of another file."""
    kinds = {"text": "categorical", "image": "image", "integer": "numeric", "real": "numeric", "date": "date"}
    return {name: kinds[column.kind] for name, column in table.columns.items() if column.kind in kinds}


def weights_of(table: Table, name: str | None, rows: Ints) -> Floats | None:
    """Return the weights of rows: at least 0, and above 0 in some row."""
    if name is None:
        return None
    weights = as_numbers(table.columns[name], name, table.name)[rows]
    bad = np.flatnonzero(~(weights >= 0))
    if len(bad):
        reject(
            table.name,
            f"the weight {short(name)} is {weights[bad[0]]} in row {rows[bad[0]] + 1}; give numbers of at least 0",
        )
    if not weights.any():
        reject(table.name, f"the weight {short(name)} is 0 in every row; give a row with more")
    # Only ratios count, and sums of huge weights overflow.
    return weights / weights.max() if weights.max() > LARGE_WEIGHT else weights


def groups_of(table: Table, name: str | None, rows: Ints) -> Ints | None:
    """Return the codes of the groups of rows; a row without a group is a group alone."""
    if name is None:
        return None
    if table.columns[name].missing.all():
        reject(table.name, f"the group {short(name)} has no values; choose another column")
    column = table.columns[name]
    codes, words = column.coded() if column.kind == "image" else as_words(column, ())
    codes = np.asarray(codes[rows], dtype=np.int64)
    return np.where(codes < 0, len(words) + np.arange(len(codes)), codes)


def times_of(table: Table, name: str | None, rows: Ints) -> Floats | None:
    """Return the times of rows, dates or numbers."""
    if name is None:
        return None
    if table.columns[name].kind in ("text", "image"):
        reject(table.name, f"the time {short(name)} is {table.columns[name].kind}; give a column of dates or numbers")
    times = as_numbers(table.columns[name], name, table.name)[rows]
    if np.isnan(times).any():
        reject(
            table.name, f"the time {short(name)} is missing in row {rows[np.argmax(np.isnan(times))] + 1}; fill it in"
        )
    return times
