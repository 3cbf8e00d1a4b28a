"""Short formulas of a run beside the formula of its model: complexity against error."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from kapsi.data.tabular import NumberColumn, Preprocessing, Table
from kapsi.data.tabular.encoders import CategoryColumn
from kapsi.errors import DataError, FormulaError, SpecError
from kapsi.interpret.class_formulas import MAX_CLASSES, class_errors, class_formulas
from kapsi.interpret.expressions import Floats, evaluate
from kapsi.interpret.formulas import ModelFormula, class_outputs, formula, raw_inputs, valid_range
from kapsi.interpret.search import search_formula
from kapsi.interpret.search.search import MAX_INPUTS
from kapsi.interpret.simplification import simplify
from kapsi.interpret.view import of_table
from kapsi.tables.run_folder import LoadedRun

__all__ = ["FormulaRow", "FormulaTable", "short_formulas"]

LEAST_ROWS = 20
"""Least number of rows of a search."""
LARGEST = 1_000
"""Weights of a model whose formula is shown beside those of a search: it takes seconds, and nobody reads longer ones."""


@dataclass(frozen=True)
class FormulaRow:
    """A formula and its error on the rows.

    Attributes:
        complexity: number of numbers, variables and operations.
        rmse: root mean squared error on the rows, in units of the target; NaN without rows.
        r2: explained share of the variance of the target on the rows.
        formula: the formula.
        source: `search`, `simplified` for the formula of `kapsi.interpret.simplify`, or `model` for that of the fitted model.
        cost: description length of a searched formula, lower is better.
        log_loss, accuracy: of classes on the rows, NaN for regressions; `r2` and `rmse` are NaN then.
    """

    complexity: int
    rmse: float
    r2: float
    formula: ModelFormula
    source: str
    cost: float = np.inf
    log_loss: float = np.nan
    accuracy: float = np.nan


@dataclass(frozen=True)
class FormulaTable:
    """Formulas of a run, the simplest first.

    Attributes:
        rows: the formulas without a better one of the same or less complexity; the formula of the model last, if any.
        notes: valid range, missing values, and why there is no search or no formula of the model.
    """

    rows: tuple[FormulaRow, ...]
    notes: tuple[str, ...]

    def best(self, complexity: int | None = None) -> FormulaRow:
        """Return the best compromise of the search, or the most accurate formula up to a complexity.

        Raises:
            FormulaError: no formula of this complexity.
        """
        if complexity is not None:
            small = [row for row in self.rows if row.complexity <= complexity]
            if not small:
                least = min(row.complexity for row in self.rows)
                raise FormulaError(f"--complexity {complexity}: the simplest formula has complexity {least}")
            return max(
                small, key=lambda row: max((v for v in (row.r2, -row.log_loss) if np.isfinite(v)), default=-np.inf)
            )
        return min(self.rows, key=lambda row: row.cost)


def short_formulas(run: LoadedRun, rows: Any = None, y: Any = None, *, seconds: float = 60.0) -> FormulaTable:
    """Return short formulas of a run of up to 8 numbers and indicators of categories, and the formula of the fitted model.

    For regressions the formula of the target; for two classes the log-odds of the second; for up to 10 classes a logit for each,
    whose softmax gives the probabilities.

    Args:
        run: a run of `kp.load_run`.
        rows: a frame with the columns of the model; None: the rows that the run keeps.
        y: targets or labels of the rows; None without rows.
        seconds: time of the search; 0 for none.

    Raises:
        FormulaError: neither a search nor a formula of the model is possible.
    """
    model = run.model
    notes = valid_range(model)
    table, targets = _rows(run, rows, y)
    found: list[FormulaRow] = []
    reason = _no_search(run, targets) if seconds else "no search was requested"
    if not reason and table is not None:
        kept = _searched_inputs(model.preprocessing)
        known = np.isfinite(targets) & ((targets >= 0) | (model.classes is None))
        for column in model.preprocessing.columns:
            known &= ~table.columns[column.name].missing
        if known.sum() >= LEAST_ROWS:
            x = raw_inputs(model.preprocessing, table)[known][:, kept]
            start = time.monotonic()
            if model.classes is None:
                found = _searched(run, x, targets[known], kept, seconds)
            else:
                found = _of_classes(run, x, table.take(np.flatnonzero(known)), targets[known], kept, seconds)
            if time.monotonic() - start >= seconds:
                notes.append(f"the search ended after {seconds:g} seconds; --seconds gives it more")
        else:
            reason = f"a search needs {LEAST_ROWS} rows without missing values"
    if reason:
        notes.append(f"formula of the model only: {reason}")
    weights = model.parameter_count
    if found and weights > LARGEST:
        notes.append(f"the formula of the model has {weights:,} weights and is left out; --exact shows it")
        return FormulaTable(tuple(found), tuple(notes))
    try:
        own = _of_model(run, formula(run), "model", table, targets)
        found += [*_simplified(run, rows, y, own, table, targets, seconds), own]
    except FormulaError as error:
        if not found:
            more = "kapsi fit --head quadratic fits a model with a formula"
            raise FormulaError(f"{error}; {more}; {reason}") from None
        notes.append(str(error))
    return FormulaTable(tuple(found), tuple(notes))


def _rows(run: LoadedRun, rows: Any, y: Any) -> tuple[Any, Any]:
    """Return the columns of rows, typed as fitted, and their targets; None where unknown."""
    if rows is not None:
        if y is None:
            raise DataError("short_formulas: rows need their targets; give y, too")
        preprocessing = run.model.preprocessing
        table = preprocessing.check(preprocessing.table_of(rows, "short_formulas", run.model.reading))[0]
        if run.model.classes is None:
            return table, np.asarray(y, dtype=np.float64)
        codes = {label: float(code) for code, label in enumerate(run.model.classes)}
        return table, np.array([codes.get(label, -1.0) for label in np.asarray(y).tolist()])
    kept = run.rows
    return (None, None) if kept is None else (kept.table, np.asarray(kept.y, dtype=np.float64))


def _no_search(run: LoadedRun, y: Any) -> str:
    """Return why there is no search, empty if there is one."""
    preprocessing = run.model.preprocessing
    if len(run.model.targets) > 1:
        return "a search needs one target"
    if len(run.model.classes or ()) > MAX_CLASSES:
        return f"a search takes up to {MAX_CLASSES} classes, there are {len(run.model.classes or ())}"
    others = [c.name for c in preprocessing.columns if not isinstance(c, NumberColumn | CategoryColumn)]
    others += [*(text.name for text in preprocessing.texts), *(image.name for image in preprocessing.images)]
    if others:
        return f"a search takes numbers and categories, {others[0]!r} is neither; fit again with --drop {shlex.quote(others[0])}"
    inputs = len(_searched_inputs(preprocessing))
    if not 1 <= inputs <= MAX_INPUTS:
        return f"a search takes up to {MAX_INPUTS} numbers and indicators of categories, there are {inputs}; --drop columns"
    return "" if y is not None else "the run keeps no rows"


def _searched_inputs(preprocessing: Preprocessing) -> list[int]:
    """Return the inputs of a search: numbers, and the indicators of all categories of a column but the last."""
    kept: list[int] = []
    start = 0
    for column in preprocessing.columns:
        width = len(column.names())
        kept += range(start, start + (1 if isinstance(column, NumberColumn) else max(width - 1, 1)))
        start += width
    return kept


def _searched(run: LoadedRun, x: Floats, y: Floats, kept: list[int], seconds: float) -> list[FormulaRow]:
    names = run.model.preprocessing.names()
    symbols = tuple(sympy.Symbol(names[i], real=True) for i in kept)
    (target,) = run.model.targets
    with np.errstate(all="ignore"):  # candidates have poles
        results = search_formula(x, y, symbols, seconds=seconds)
    return [
        FormulaRow(
            f.complexity, float(np.sqrt(f.mse)), f.r2, ModelFormula({target: f.expression}, symbols), "search", f.cost
        )
        for f in results
    ]


def _of_classes(
    run: LoadedRun, x: Floats, table: Table, codes: Floats, kept: list[int], seconds: float
) -> list[FormulaRow]:
    """Return short formulas of the log-odds of two classes, or of the logit of each."""
    names, outputs = run.model.preprocessing.names(), class_outputs(run.model)
    symbols = tuple(sympy.Symbol(names[i], real=True) for i in kept)
    seen = of_table(run.model, table)
    found = class_formulas(x, codes, seen.function(seen.inputs), symbols, seconds)
    return [
        FormulaRow(
            f.complexity,
            np.nan,
            np.nan,
            ModelFormula(dict(zip(outputs, f.expressions, strict=True)), symbols),
            "search",
            f.cost,
            f.log_loss,
            f.accuracy,
        )
        for f in found
    ]


def _simplified(
    run: LoadedRun, rows: Any, y: Any, own: FormulaRow, table: Any, targets: Any, seconds: float
) -> list[FormulaRow]:
    """Return the simplified formula of a model of univariate functions, if it is shorter than its own."""
    if not seconds or table is None:
        return []
    try:
        short = simplify(run, None if rows is None else (rows, y), seconds=seconds / 4).formula
    except (DataError, SpecError, FormulaError):
        return []
    return [_of_model(run, short, "simplified", table, targets)] if short.complexity < own.complexity else []


def _of_model(run: LoadedRun, own: ModelFormula, source: str, table: Any, y: Any) -> FormulaRow:
    """Return the formula of the model with its error on the rows."""
    if table is None or len(run.model.targets) > 1:
        return FormulaRow(own.complexity, np.nan, np.nan, own, source)
    values = raw_inputs(run.model.preprocessing, table)
    if run.model.classes is not None:
        known = y >= 0
        columns = {symbol: values[known, i] for i, symbol in enumerate(own.symbols)}
        loss, accuracy = class_errors(tuple(own.outputs.values()), columns, y[known].astype(np.int64))
        return FormulaRow(own.complexity, np.nan, np.nan, own, source, np.inf, loss, accuracy)
    (output,) = own.outputs.values()
    predicted = np.broadcast_to(evaluate(output, {s: values[:, i] for i, s in enumerate(own.symbols)}), y.shape)
    known = np.isfinite(y)
    mse = float(np.mean((predicted - y)[known] ** 2))
    variance = float(np.var(y[known]))
    return FormulaRow(own.complexity, float(np.sqrt(mse)), 1 - mse / variance if variance else np.nan, own, source)
