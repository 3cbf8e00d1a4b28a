"""Split a table into features and target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kapsi.data.tabular.types import (
    MAX_CATEGORIES,
    Column,
    Floats,
    Ints,
    Label,
    Table,
    as_numbers,
    as_text,
    encoded,
    listed,
    no_column,
    numbers_in,
    refuse,
    short,
    truth,
)

__all__ = [
    "Problem",
    "make_problem",
    "target_of",
]

MAX_AUTO_CLASSES = 20
MAX_CLASSES = 1000
EXACT_INTEGERS = 2.0**53  # beyond it, neighboring integers share one float64


@dataclass(frozen=True, eq=False)
class Problem:
    """A table split into features and target, ready to fit.

    Args:
        name: the file's name, for messages.
        target: the target column's name.
        task: "classification" or "regression".
        features: the kept rows of the kept columns, without the target.
        y: (rows kept,) int64 class codes, or float64 values.
        classes: the original labels, sorted, so that a code is a position; None in regression.
        rows: (rows kept,) int64 row numbers in the file, 0-based, the header not counted.
        notes: what was dropped and why, one line each.
    """

    name: str
    target: str
    task: str
    features: Table
    y: Ints | Floats
    classes: tuple[Label, ...] | None
    rows: Ints
    notes: tuple[str, ...]


def make_problem(
    table: Table, target: str, *, task: str = "auto", strict: bool = False, drop: Sequence[str] = ()
) -> Problem:
    """Split a table into features and target; drop what no function can learn from.

    Args:
        table: the table.
        target: the target column's name.
        task: "classification", "regression", or "auto": text, booleans and at most 20 different integers are classes.
        strict: refuse rows with a missing target instead of dropping them.
        drop: names of columns to leave out.

    Raises:
        TableError: the target or a feature column cannot be learned from as it is.
    """
    where = table.name
    if task not in ("auto", "classification", "regression"):
        raise refuse(where, f"the task {short(task)} is not known; allowed are 'auto', 'classification', 'regression'")
    if target not in table.columns:
        raise no_column(where, "the target", target, table.columns)
    for name in drop:
        if name not in table.columns:
            raise no_column(where, "the column to drop", name, table.columns)
    if target in drop:
        raise refuse(where, f"the column {short(target)} is both the target and to be dropped; choose one")

    notes: list[str] = []
    missing = table.columns[target].missing
    rows = np.flatnonzero(~missing).astype(np.int64)
    if missing.any():
        count, first = int(missing.sum()), int(np.argmax(missing)) + 1
        if not len(rows):
            raise refuse(where, f"the target {short(target)} is missing in every row; choose another target")
        if strict:
            what = f"the target {short(target)} is missing in {count} of {table.rows} rows, first in row {first}"
            raise refuse(where, f"{what}; fill them in, or allow dropping them")
        notes.append(
            f"dropped {count} of {table.rows} rows, whose target {short(target)} is missing (first: row {first})"
        )

    column = table.columns[target]
    if column.kind != "text":
        as_numbers(column, target, where)  # refuses infinite values
    if task == "auto":
        task = _task_of(column, rows, target, notes)
    y: Ints | Floats
    classes: tuple[Label, ...] | None = None
    if task == "classification":
        y, classes = _classes_of(column, rows, target, where, notes)
    elif column.kind == "text":
        raise refuse(where, f"the target {short(target)} is text, which has no regression; use --task classification")
    else:
        y = column.numbers[rows]
        if y.min() == y.max():
            raise refuse(where, f"the target {short(target)} is {y[0]} in every row; choose a target that varies")

    names = [name for name in table.columns if name != target and name not in drop]
    features = _kept_features(table, names, rows, notes)
    return Problem(where, target, task, features, y, classes, rows, tuple(notes))


def _task_of(column: Column, rows: Ints, target: str, notes: list[str]) -> str:
    if column.kind in ("text", "boolean"):
        return "classification"
    different = np.unique(column.numbers[rows])
    few = len(different) <= MAX_AUTO_CLASSES
    if few and column.kind == "integer":
        return "classification"
    if few and np.all(different == np.floor(different)):
        what = f"the target {short(target)} has {len(different)} different whole values written as real numbers"
        notes.append(f"{what}: taken as regression; --task classification makes them classes")
    return "regression"


def _classes_of(
    column: Column, rows: Ints, target: str, where: str, notes: list[str]
) -> tuple[Ints, tuple[Label, ...]]:
    labels: list[Label]
    if column.kind == "text":
        codes, words = encoded(column.values[rows])
        labels = list(words)
    else:
        values, codes = np.unique(column.numbers[rows], return_inverse=True)
        bad = values[(values != np.floor(values)) | (np.abs(values) > EXACT_INTEGERS)]
        if len(bad):
            what = f"the target {short(target)} has the value {float(bad[0])!r}, which is no class label"
            allowed = "labels are text, booleans or whole numbers up to 2**53"
            raise refuse(where, f"{what}; {allowed}; use --task regression")
        labels = [bool(value) if column.kind == "boolean" else int(value) for value in values]
    if len(labels) == 1:
        raise refuse(where, f"the target {short(target)} has the one class {short(labels[0])}; at least 2 are needed")
    if len(labels) > MAX_CLASSES:
        what = f"the target {short(target)} has {len(labels)} classes; at most {MAX_CLASSES} are allowed"
        raise refuse(
            where, f"{what}; choose another target" + ("" if column.kind == "text" else " or --task regression")
        )
    single = [labels[code] for code in np.flatnonzero(np.bincount(codes) == 1)]
    if single:
        notes.append(f"classes of {short(target)} with a single row: {listed(single)}")
    return codes.astype(np.int64), tuple(labels)


def _kept_features(table: Table, names: list[str], rows: Ints, notes: list[str]) -> Table:
    features = table.take(rows, names)
    empty = [name for name, column in features.columns.items() if column.missing.all()]
    if empty:
        advice = f"leave them out with --drop NAME (here {' '.join(f'--drop {short(name)}' for name in empty[:10])})"
        raise refuse(table.name, f"columns with no value in any used row: {listed(empty, len(empty))}; {advice}")
    kept = []
    for name, column in features.columns.items():
        present = ~column.missing
        if column.kind == "text":
            words = encoded(column.values)[1]
            different, identifies = len(words), 2 <= len(words) == int(present.sum())
            if identifies or different > max(MAX_CATEGORIES, 0.9 * len(rows)):
                what = f"{different} different texts in {len(rows)} rows"
                notes.append(f"dropped the column {short(name)}: it identifies rows ({what})")
                continue
        else:
            numbers = as_numbers(column, name, table.name, rows)[present]
            different = 1 if numbers.min() == numbers.max() else 2
        if different == 1 and present.all():  # where values are missing, which ones are may still tell something
            notes.append(f"dropped the column {short(name)}: it is {short(column.values.tolist()[0])} in every row")
            continue
        kept.append(name)
    if not kept:
        reason = f" ({'; '.join(notes)})" if notes else ""
        raise refuse(table.name, f"no feature column is left{reason}; at least one that varies is needed")
    return Table(table.name, {name: features.columns[name] for name in kept})


def target_of(table: Table, target: str, task: str, classes: Sequence[Label] | None) -> Ints | Floats:
    """Return the target of a table as an already fitted problem codes it.

    Args:
        table: the table to evaluate on.
        target: the target column's name.
        task: "classification" or "regression".
        classes: the fitted problem's labels, in the order of their codes; unused in regression.

    Returns:
        (rows,) int64 codes with -1 for missing, or float64 values with NaN for missing.

    Raises:
        TableError: no such column, a label that is not among the classes, or a value that is no finite number.
    """
    where = table.name
    if target not in table.columns:
        raise no_column(where, "the target", target, table.columns)
    column = table.columns[target]
    if task == "regression":
        return as_numbers(column, target, where)
    known = list(classes or ())
    place: dict[object, int] = {label: code for code, label in enumerate(known)}
    labels: list[object]
    if known and all(isinstance(label, str) for label in known):
        codes, words = encoded(as_text(column, [str(label) for label in known]))
        labels = list(words)
    elif column.kind == "text":
        codes, words = encoded(column.values)
        pairs = zip(words, numbers_in(words).tolist(), strict=True)
        labels = [truth(word) if math.isnan(number) else number for word, number in pairs]
    else:
        values, found = np.unique(column.numbers, return_inverse=True)
        codes, labels = np.where(np.isnan(values)[found], -1, found), values.tolist()
    coded = np.array([*(place.get(label, -2) for label in labels), -1], dtype=np.int64)[codes]
    unknown = np.flatnonzero(coded == -2)
    if len(unknown):
        value = column.values.tolist()[int(unknown[0])]
        shown = short(int(value) if isinstance(value, float) and value.is_integer() else value)
        what = (
            f"row {unknown[0] + 1} of the target {short(target)} has the label {shown}, which the model does not know"
        )
        raise refuse(where, f"{what}; the known labels are {listed(known, 20)}")
    return coded
