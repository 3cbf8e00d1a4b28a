"""Split a table into features and target."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.preprocess import Preprocessing
from kapsi.data.tabular.roles import (
    check_roles,
    check_totals,
    check_validation,
    groups_of,
    index_columns,
    order_notes,
    sentinels,
    stacked,
    times_of,
    weights_of,
)
from kapsi.data.tabular.split import Splits
from kapsi.data.tabular.target_encoding import Outputs
from kapsi.data.tabular.text_column import reads_as_text
from kapsi.data.tabular.types import (
    MAX_CATEGORIES,
    REQUESTED,
    Column,
    Floats,
    Ints,
    Label,
    Table,
    as_numbers,
    as_words,
    listed,
    numbers_in,
    reject,
    short,
    truth,
)
from kapsi.data.tabular.units import to_unit
from kapsi.text import ALIKE, condensed

__all__ = ["TableProblem", "make_problem", "target_of"]

TASKS = ("auto", "classification", "regression")
MAX_AUTO_CLASSES = 20
MAX_CLASSES = 1000
NUMBER_LIKE = re.compile(
    r"[^\w\s]?\s?\d+([^\w\s]\d+)+ ?[A-Za-z]{0,2}$|\W{1,3}\d|\d+ ?[A-Za-z]{1,2}$|\d+\W|\d+[hx]\d|0[bx][\dA-Fa-f]+$|[\[({].*\d"
)
"""1/5/2.4, €5, 3.5KB, 2 days 1h, [1.5 2], '5.5', 5,-, 1h20, 0x5F: neither words nor codes."""
BAND = re.compile(r"[<>≤≥=~]|\d\s?[-–]\s?\d+$|\d\+$|\d+(\.\d+){2,}$|\d(st|nd|rd|th|[A-Za-z])$|\dx\d|0[bx]")
"""18-25, >5, 65+, 1.2.3, 2nd, 3a: often names of categories, if there are few."""
WITH_UNIT = re.compile(r"[+-]?\d[\d.,]*\s?(?!st$|nd$|rd$|th$)([A-Za-zµ°%/²³]{1,8})")
MOSTLY_LIKE = 0.9
"""Share of such strings among the categories, above which a note names them."""
LEAST_LEVELS = 3
"""Least categories for this note: the model of two categories is that of two numbers."""
MAX_SINGLE = 9
"""Number of classes with a single row up to which a target may have mostly such classes."""
EXACT_INTEGERS = 2.0**53  # beyond it, neighboring integers share one float64


@dataclass(frozen=True, eq=False)
class TableProblem:
    """Features and target of a table.

    Args:
        name: name of the file, for messages.
        target: name of the target column, or names of several targets with real values.
        task: "classification" or "regression".
        features: feature columns of the kept rows.
        y: class codes (int64) or values (float64), (kept rows,); (kept rows, targets) for several.
        classes: original labels, sorted; a code is a position. None in regression.
        rows: indices of the kept rows in the file, from 0, without the header; int64.
        notes: dropped rows and columns with reasons, one line each.
        digest: SHA-256 of the file.
        weight: weights of the rows, (kept rows,); None for equal weights.
        groups: codes of the groups of rows that are not to be divided, (kept rows,).
        times: times that order the rows, (kept rows,).
        held: mask of the rows of a file of validation rows, (kept rows,).
        decimal: the decimal mark of the file, None if unknown.
        units: unit of each target, see `Column`; empty texts for plain numbers and classes.
    """

    name: str
    target: str | tuple[str, ...]
    task: str
    features: Table
    y: Ints | Floats
    classes: tuple[Label, ...] | None
    rows: Ints
    notes: tuple[str, ...]
    digest: str = ""
    weight: Floats | None = None
    groups: Ints | None = None
    times: Floats | None = None
    held: npt.NDArray[np.bool_] | None = None
    decimal: str | None = None
    units: tuple[str, ...] = ()

    def without_texts(self) -> Self:
        """Return the problem without texts that are read word by word, and without images, with a note.

        Raises:
            TableError: no other column is left.
        """
        every = self.features.columns.items()
        texts = [name for name, column in every if column.free or column.kind == "image"]
        if not texts:
            return self
        images = self.features.columns[texts[0]].kind == "image"
        what = "images" if images else "texts"
        advice = f"--categorical {short(texts[0])} takes whole values as categories"
        advice = "leave --spec, --set and the options of training out" if images else advice
        columns = {name: column for name, column in self.features.columns.items() if name not in texts}
        if not columns:
            reject(self.name, f"only the automatic model reads {what}, and all columns are: {listed(texts)}; {advice}")
        note = f"left out the {what} {listed(texts)}: only the automatic model reads them; {advice}"
        return replace(self, features=Table(self.features.name, columns), notes=(*self.notes, note))

    def splits(self, seed: int) -> Splits:
        """Return the splits of the rows for a seed."""
        return Splits(self.y, self.classes is not None, seed, self.groups, self.times)

    @functools.cached_property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing fitted to all rows."""
        return Preprocessing.fit(self.features, target=self.outputs(), weight=self.weight)

    def outputs(self, rows: Ints | None = None) -> Outputs:
        """Return the outputs of a selection of rows, or of all rows, for target encodings."""
        y = self.y if rows is None else self.y[rows]
        weight = self.weight if self.weight is None or rows is None else self.weight[rows]
        if self.classes is None:
            names = self.target if isinstance(self.target, tuple) else (self.target,)
            return Outputs(y.reshape(len(y), -1).astype(np.float64), names, weight)
        first = int(len(self.classes) == 2)
        codes = np.arange(first, len(self.classes))
        names = tuple(str(self.classes[code]) for code in codes)
        return Outputs((y[:, np.newaxis] == codes).astype(np.float64), names, weight)


def make_problem(
    table: Table,
    target: str | Sequence[str],
    *,
    task: str = "auto",
    strict: bool = False,
    drop: Sequence[str] = (),
    weight: str | None = None,
    group: str | None = None,
    time: str | None = None,
    validation: Table | None = None,
    required: Collection[str] = (),
) -> TableProblem:
    """Split a table into features and target; drop rows without a target and columns without information.

    Args:
        table: the table.
        target: name of the target column, or of several columns of numbers.
        task: "classification", "regression", or "auto": strings, booleans and at most 20 distinct integers are classes.
        strict: reject rows without a target instead of dropping them.
        drop: names of columns to leave out.
        weight: column of the weights of the rows; no input.
        group: column of groups that a split does not divide; no input.
        time: column that orders the rows: held-out rows are later. It stays an input.
        validation: rows to hold out, with the columns of the table.
        required: names of columns that must have a value.

    Raises:
        TableError: the target or a feature column is invalid.
    """
    where = table.name
    if task not in TASKS:
        reject(where, f"the task {short(task)} is not known; allowed are {listed(TASKS)}")
    targets = _targets(table, target)
    for name in drop:
        table.require(name, "the column to drop")
    roles = {"weight": weight, "group": group, "time": time}
    check_roles(table, targets, drop, roles)
    doubtful = check_totals(table, required)
    if validation is not None:
        check_validation(validation, targets, roles, where)
        doubtful += check_totals(validation, required)
        count, table = table.rows, stacked(table, validation)

    index = {name: why for name, why in index_columns(table).items() if name not in (*targets, *drop)}
    names = [name for name in table.columns if name not in (*targets, *drop, *index, weight, group)]
    notes = [*table.notes, *doubtful, *table.use([*targets, *names, *filter(None, (weight, group))])]
    notes += [f"left out the column {short(name)}: {why}" for name, why in index.items()]
    rows = _rows_with_targets(table, targets, strict, notes)
    if len(targets) > 1:
        _check_several(table, targets, rows, task)
    values = [_target(table, name, rows, task if len(targets) == 1 else "regression", notes) for name in targets]
    task, y, classes = values[0]
    if len(targets) > 1:
        y = np.stack([numbers.astype(np.float64) for _, numbers, _ in values], axis=1)
    features = informative(table, names, rows, notes, required)
    numbers = (
        features if classes is not None else Table(where, {**features.columns, **table.take(rows, targets).columns})
    )
    notes += [*sentinels(numbers), *order_notes(features, y, classes is not None)]
    held = None if validation is None else rows >= count
    return TableProblem(
        where,
        targets if len(targets) > 1 else targets[0],
        task,
        features,
        y,
        classes,
        rows if held is None else np.where(held, rows - count, rows),
        tuple(condensed(notes)),
        table.digest,
        weight=weights_of(table, weight, rows),
        groups=groups_of(table, group, rows),
        times=times_of(table, time, rows),
        held=held,
        decimal=table.decimal,
        units=tuple("" if classes else table.columns[name].unit for name in targets),
    )


def _targets(table: Table, target: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the targets."""
    targets = (target,) if isinstance(target, str) else tuple(target)
    for name in targets:
        table.require(name, "the target")
    if not targets or len(set(targets)) < len(targets):
        reject(table.name, f"the targets are {listed(targets) or 'none'}; give different columns")
    return targets


def _target(
    table: Table, name: str, rows: Ints, task: str, notes: list[str]
) -> tuple[str, Ints | Floats, tuple[Label, ...] | None]:
    """Return task, values and classes of a target."""
    where, column = table.name, table.columns[name]
    if column.kind == "image":
        reject(where, f"the target {short(name)} has images; give numbers or classes")
    if column.kind == "date":
        reject(where, f"the target {short(name)} has dates; give numbers or classes, such as days since a date")
    if column.kind != "text":
        as_numbers(column, name, where)  # rejects infinite values
    if task == "auto":
        task = _task_of(column, rows, name, notes)
    if task == "classification":
        return task, *_classes_of(column, rows, name, where, notes)
    if column.kind == "text":
        reject(where, f"the target {short(name)} is text, which has no regression; use --task classification")
    y = column.numbers[rows]
    if y.min() == y.max():
        reject(where, f"the target {short(name)} is {y[0]} in every row; choose a target that varies")
    return task, y, None


def _check_several(table: Table, targets: Sequence[str], rows: Ints, task: str) -> None:
    """Refuse classes among several targets."""
    columns = {name: table.columns[name] for name in targets}
    words = [name for name, column in columns.items() if column.kind == "text"]
    numbers = [name for name, column in columns.items() if column.kind not in ("text", "date")]
    if task == "auto":
        numbers = [name for name in numbers if _task_of(columns[name], rows, name, []) == "classification"]
    classes = [*words, *(numbers if task != "regression" else [])]
    if not classes:
        return
    runs = [" ".join([f"--target {short(a)}", *(f"--drop {short(b)}" for b in targets if b != a)]) for a in targets]
    advice = f"fit a run for each: {'; '.join(runs[:3])}{'; …' if len(runs) > 3 else ''}"
    if not words and task == "auto":
        advice += "; or take their numbers as real values with --task regression"
    verb = "have" if len(classes) > 1 else "has"
    reject(table.name, f"{listed(classes)} {verb} classes, and several targets need real values; {advice}")


def _rows_with_targets(table: Table, targets: Sequence[str], strict: bool, notes: list[str]) -> Ints:
    missing = np.logical_or.reduce([table.columns[name].missing for name in targets])
    target = listed(targets)
    if missing.any():
        count, first = int(missing.sum()), int(np.argmax(missing)) + 1
        if count == table.rows:
            reject(table.name, f"the target {target} is missing in every row; choose another target")
        if strict:
            rows = f"{count} of {table.rows} rows, first in row {first}"
            reject(table.name, f"the target {target} is missing in {rows}; fill them in, or allow dropping them")
        notes.append(f"dropped {count} of {table.rows} rows without a target {target} (first: row {first})")
    if table.rows - missing.sum() == 1:
        reject(table.name, f"1 row with a target {target}; one row is too few, at least 4 are needed")
    return np.flatnonzero(~missing).astype(np.int64)


def _task_of(column: Column, rows: Ints, target: str, notes: list[str]) -> str:
    if column.kind in ("text", "boolean"):
        return "classification"
    distinct = np.unique(column.numbers[rows])
    few = len(distinct) <= MAX_AUTO_CLASSES
    if few and column.kind == "integer":
        return "classification"
    if column.kind == "integer" and distinct[0] >= 0 and len(distinct) <= MAX_CLASSES:
        values = f"{len(distinct)} distinct whole numbers from {distinct[0]:.15g} to {distinct[-1]:.15g}"
        notes.append(f"the target {short(target)} has {values}: regression; use --task classification for classes")
    if few and np.all(distinct == np.floor(distinct)):
        values = f"{len(distinct)} distinct whole values written as real numbers"
        notes.append(f"the target {short(target)} has {values}: regression; use --task classification for classes")
    return "regression"


def _classes_of(
    column: Column, rows: Ints, target: str, where: str, notes: list[str]
) -> tuple[Ints, tuple[Label, ...]]:
    labels: list[Label]
    if column.kind == "text":
        if column.doubt:
            reject(
                where, f"the target {short(target)}{column.doubt}; --categorical {short(target)} takes all as classes"
            )
        codes, words = column.take(rows).coded()
        labels = list(words)
        like, reason = ([], "") if column.reason == REQUESTED else _quantities(words, target, few=True)
        if len(like) > MOSTLY_LIKE * len(words):
            notes.append(f"the target {short(target)} has {len(words)} classes{reason}")
    else:
        values, codes = np.unique(column.numbers[rows], return_inverse=True)
        bad = values[(values != np.floor(values)) | (np.abs(values) > EXACT_INTEGERS)]
        if len(bad):
            value = f"the target {short(target)} has the value {float(bad[0])!r}, which is not a class label"
            reject(where, f"{value}; labels are text, booleans or whole numbers up to 2**53; use --task regression")
        labels = [bool(value) if column.kind == "boolean" else int(value) for value in values]
    if len(labels) == 1:
        lost = len(column) - len(rows)
        missing = f" ({lost} of {len(column)} rows have no value; words such as NA and None count as missing)" * (
            lost > 0
        )
        reject(
            where, f"the target {short(target)} has the one class {short(labels[0])}{missing}; at least 2 are needed"
        )
    if len(labels) > MAX_CLASSES:
        advice = "choose another target" + ("" if column.kind == "text" else " or --task regression")
        reject(
            where, f"the target {short(target)} has {len(labels)} classes; at most {MAX_CLASSES} are allowed; {advice}"
        )
    single = [labels[code] for code in np.flatnonzero(np.bincount(codes) == 1)]
    if len(single) == len(labels) or len(single) > max(MAX_SINGLE, 0.8 * len(labels)):
        advice = "choose another target" + (
            "; --numeric reads numbers" if column.kind == "text" else " or --task regression"
        )
        count = f"{len(labels)} classes in {len(rows)} rows, and {len(single)} of them have a single row"
        reject(
            where, f"the target {short(target)} has {count} ({listed(single, 3)}), so nothing can be learned; {advice}"
        )
    if single:
        notes.append(f"classes of {short(target)} with a single row: {listed(single)}")
    return codes.astype(np.int64), tuple(labels)


def informative(table: Table, names: list[str], rows: Ints, notes: list[str], required: Collection[str] = ()) -> Table:
    """Return the feature columns except empty, constant and ID-like ones, texts marked as free, with a note on each dropped column.

    Args:
        table: the table.
        names: names of the feature columns.
        rows: the used rows.
        notes: receives the notes.
        required: names of columns that must have a value.

    Raises:
        TableError: a required column is empty, or no column is left.
    """
    features = table.take(rows, names)
    empty = _empty(features)
    for name in names:
        if name in empty and name in required:
            reject(table.name, f"the column {short(name)} has no value in any used row; leave its option out")
    dropped = {name: "it has no values" for name in names if name in empty}
    texts: dict[str, Column] = {}
    constant = _constant(features, rows)
    kept: list[str] = []
    for name, column in features.columns.items():
        if name in empty:
            continue
        if column.kind == "text" and not column.free:
            codes, words = column.coded()
            known, distinct = int((codes >= 0).sum()), len(words)
            unique = 2 <= distinct == known or distinct > max(MAX_CATEGORIES, 0.9 * len(rows))
            if (unique or distinct > MAX_CATEGORIES) and column.reason != REQUESTED and reads_as_text(codes, words):
                texts[name] = column.as_free()
                kept.append(name)
                continue
            few = not unique and distinct <= MAX_AUTO_CLASSES
            like, reason = ([], "") if column.reason == REQUESTED else _quantities(words, name, few=few)
            if unique:
                notes.append(
                    f"dropped the ID-like column {short(name)}: {distinct} distinct values in {len(rows)} rows{reason}"
                )
                continue
            if distinct > MAX_CATEGORIES:
                share = f"{distinct:,} categories, more than {MAX_CATEGORIES}; its input is the mean of the target in each of them"
                notes.append(f"column {short(name)} has {share}{reason if 2 * len(like) > distinct else ''}")
            elif len(like) > MOSTLY_LIKE * distinct:
                notes.append(f"column {short(name)} has {distinct} categories{reason}")
            constant |= {name} if distinct == 1 and known == len(rows) else set()
        if name in constant:
            (value,) = column.values[:1].tolist()
            dropped[name] = f"it is {f'{value:.15g}' if isinstance(value, float) else short(value)} in every row"
            continue
        kept.append(name)
    if len(dropped) <= ALIKE:
        notes += [f"dropped the column {short(name)}: {dropped[name]}" for name in features.columns if name in dropped]
    else:
        notes.append(f"dropped {len(dropped):,} columns that are empty or the same in every row: {listed(dropped)}")
    if not kept:
        reason = f" ({'; '.join(notes)})" if notes else ""
        reject(table.name, f"no feature column is left{reason}; at least one that varies is needed")
    return Table(table.name, {name: texts.get(name, features.columns[name]) for name in kept})


def _quantities(words: Sequence[str], name: str, *, few: bool) -> tuple[list[str], str]:
    """Return the categories that look like numbers, and the end of a note on them, empty without any.

    Args:
        words: the categories.
        name: name of the column.
        few: whether they are so few that bands, such as 18-25, are likely.
    """
    units = {found[1] if (found := WITH_UNIT.fullmatch(word)) else "" for word in words} if few else {""}
    if few and len(words) < LEAST_LEVELS:
        return [], ""
    if len(units) == 1 and units != {""}:
        return list(words), f"; --numeric {short(name)} reads values such as {short(words[0])} as numbers"
    like = [word for word in words if NUMBER_LIKE.match(word) and not (few and BAND.search(word))]
    return like, f"; values such as {short(like[0])} are not read as numbers or dates" if like else ""


def _empty(features: Table) -> set[str]:
    """Return the names of the columns without any value."""
    columns = features.columns
    empty = {
        name for name, column in columns.items() if column.kind in ("text", "date", "image") and column.missing.all()
    }
    for names, values in features.blocks():
        empty |= {names[i] for i in np.flatnonzero(np.isnan(values).all(1))}
    return empty


def _constant(features: Table, rows: Ints) -> set[str]:
    """Return the columns of numbers that are the same in every row; reject infinite values. Missingness is information."""
    constant: set[str] = set()
    for names, values in features.blocks():
        for i in np.flatnonzero(np.isinf(values).any(1)):
            as_numbers(features.columns[names[i]], names[i], features.name, rows)
        constant |= {name for name, same in zip(names, (values == values[:, :1]).all(1), strict=True) if same}
    dates = {name: column.numbers for name, column in features.columns.items() if column.kind == "date"}
    return constant | {name for name, values in dates.items() if (values == values[0]).all()}


def target_of(
    table: Table,
    target: str | tuple[str, ...],
    task: str,
    classes: Sequence[Label] | None,
    units: Sequence[str] = (),
    notes: list[str] | None = None,
) -> Ints | Floats:
    """Return the target of a new table in the coding of a fitted problem; (rows, targets) for several.

    Args:
        table: the table to evaluate.
        target: name of the target column.
        task: "classification" or "regression".
        classes: labels of the fitted problem, in the order of their codes; unused in regression.
        units: unit of each target in the fitted problem; empty for plain numbers.
        notes: receives a note for each target whose unit is a guess.

    Returns:
        (rows,) int64 codes with -1 for missing, or float64 values with NaN for missing.

    Raises:
        TableError: the column is missing, a label is unknown, or a value is not a finite number.
    """
    if isinstance(target, tuple):
        each = itertools.zip_longest(target, units, fillvalue="")
        several = [target_of(table, name, task, classes, [unit], notes).astype(np.float64) for name, unit in each]
        return np.stack(several, axis=1)
    table.require(target, "the target")
    column = table.columns[target]
    if task == "regression":
        factor, note = to_unit(column, units[0] if units else "", target, table.name)
        if note and notes is not None:
            notes.append(note)
        return as_numbers(column, target, table.name) * factor
    known = list(classes or ())
    labels: list[object]
    if known and all(isinstance(label, str) for label in known):
        codes, words = as_words(column, [str(label) for label in known])
        full = {str(label).strip(): label for label in known}
        labels = [word if word in known else full.get(word.strip(), word) for word in words]
    elif column.kind in ("text", "unusable"):
        codes, words = column.coded()
        pairs = zip(words, numbers_in(words).tolist(), strict=True)
        labels = [truth(word) if math.isnan(number) else number for word, number in pairs]
    else:
        values, inverse = np.unique(column.numbers, return_inverse=True)
        codes, labels = np.where(np.isnan(values)[inverse], -1, inverse), values.tolist()
    code_of: dict[object, int] = {label: code for code, label in enumerate(known)}
    coded = np.array([*(code_of.get(label, -2) for label in labels), -1], dtype=np.int64)[codes]
    unknown = np.flatnonzero(coded == -2)
    if len(unknown):
        value = column.values.tolist()[int(unknown[0])]
        label = short(int(value) if isinstance(value, float) and value.is_integer() else value)
        row = f"row {unknown[0] + 1} of the target {short(target)}"
        reject(
            table.name,
            f"{row} has the label {label}, which the model does not know; the known labels are {listed(known, 20)}",
        )
    return coded
