"""Short formulas of a run beside the formula of its model: complexity against error."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy

from kapsi.clock import Stopwatch
from kapsi.data.tabular import NumberColumn, Preprocessing, Table
from kapsi.data.tabular.encoders import CategoryColumn
from kapsi.errors import DataError, FormulaError, SpecError, check_choice
from kapsi.interpret.class_formulas import MAX_CLASSES, ClassFormula, class_formulas, measured
from kapsi.interpret.expressions import Floats, evaluate
from kapsi.interpret.formulas import ModelFormula, class_outputs, formula, raw_inputs, valid_range
from kapsi.interpret.rows import target_values
from kapsi.interpret.search import search_formula
from kapsi.interpret.search.constants import SearchRows, description_length, with_constants
from kapsi.interpret.search.search import FITTED, MAX_INPUTS
from kapsi.interpret.simplification import simplify
from kapsi.interpret.view import of_table
from kapsi.tables.model import TableModel
from kapsi.tables.run_folder import LoadedRun

__all__ = ["FormulaRow", "FormulaTable", "short_formulas"]

SOURCES = ("search", "simplified", "model")
LEAST_ROWS = 20
"""Least number of rows of a search."""
LARGEST = 300
"""Weights of a model whose formula is shown beside shorter ones: it takes ten seconds, and nobody reads longer ones."""


@dataclass(frozen=True)
class FormulaRow:
    """A formula and its error on the rows.

    Attributes:
        complexity: number of numbers, variables and operations.
        rmse: root mean squared error on the rows, in units of the target, mean over several targets; NaN without rows.
        r2: explained share of the variance of the target on the rows, mean over several targets.
        formula: the formula.
        source: `search`, `simplified` for the formula of `kapsi.interpret.simplify`, or `model` for that of the fitted model.
        cost: description length, lower is better; infinite without rows.
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
        """Return the best compromise, of the lowest cost, or the most accurate formula up to a complexity.

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


def short_formulas(
    run: LoadedRun,
    rows: Any = None,
    y: Any = None,
    *,
    seconds: float = 60.0,
    sources: Collection[str] = SOURCES,
) -> FormulaTable:
    """Return short formulas of a run of up to 10 numbers and indicators of categories, and the formulas of the fitted model.

    For regressions the formula of the target; for two classes the log-odds of the second; for up to 10 classes a logit for each,
    whose softmax gives the probabilities. All formulas are scored on the same rows, and have a cost by the same rule.

    Args:
        run: a run of `kp.load_run`.
        rows: a frame with the columns of the model; None: the rows that the run keeps.
        y: targets or labels of the rows; None without rows.
        seconds: time of the search, and a quarter of it for the simplification, or of the simplification alone; 0 for neither.
        sources: of `search`, `simplified` and `model`, see `FormulaRow`.

    Raises:
        FormulaError: no formula of these sources.
        DataError: rows without targets, or an unknown label.
        SpecError: only the simplified formula is requested, and the model mixes inputs.
    """
    wanted = {check_choice("short_formulas(sources)", source, SOURCES) for source in sources}
    wanted -= set() if seconds else {"search", "simplified"}
    if not wanted:
        raise FormulaError(f"short_formulas: no formula in {seconds:g} seconds; give it more, or the source 'model'")
    model = run.model
    notes = valid_range(model)
    known = _known_rows(run, rows, y)
    found: list[FormulaRow] = []
    reason = "no search was requested"
    if "search" in wanted:
        complete = None if known is None else known.without_missing(model)
        reason = _no_search(run, complete)
        if not reason and complete is not None:
            known = complete
            clock = Stopwatch(seconds)
            found = (_searched if model.classes is None else _of_classes)(run, known, seconds)
            if clock.over():
                notes.append(f"the search ended after {seconds:g} seconds; --seconds gives it more")
        else:
            notes.append(f"formula of the model only: {reason}")
    if "simplified" in wanted:
        share = seconds if wanted == {"simplified"} else seconds / 4
        clock = Stopwatch(share)
        try:
            short = simplify(run, None if rows is None else (rows, y), seconds=share).formula
            found.append(_scored(short, "simplified", known))
            if clock.over():
                notes.append(f"the simplification ended after {share:g} seconds; --seconds gives it more")
        except (DataError, SpecError, FormulaError):
            if wanted == {"simplified"}:
                raise
    found = _undominated(found)
    if "model" in wanted:
        found = _with_model(run, found, known, notes, reason)
    return FormulaTable(tuple(found), tuple(notes))


def _undominated(found: list[FormulaRow]) -> list[FormulaRow]:
    """Return the formulas without one of the same or less complexity, error and cost, the simplest first."""

    def error(row: FormulaRow) -> float:
        return row.rmse if np.isnan(row.log_loss) else row.log_loss

    kept: list[FormulaRow] = []
    for row in sorted(found, key=lambda row: (row.complexity, row.cost)):
        if all(error(row) < error(o) * (1 - 1e-9) or row.cost < o.cost - 1e-9 for o in kept):
            kept.append(row)
    return kept


def _with_model(
    run: LoadedRun, found: list[FormulaRow], known: KnownRows | None, notes: list[str], reason: str
) -> list[FormulaRow]:
    """Return the formulas and that of the model, without a simplified one that is no shorter."""
    weights = run.model.parameter_count
    if found and weights > LARGEST:
        notes.append(f"the formula of the model has {weights:,} weights and is left out; --exact shows it")
        return found
    try:
        own = _scored(formula(run), "model", known)
    except FormulaError as error:
        if not found and (run.model.preprocessing.texts or run.model.preprocessing.images):
            raise
        if not found:
            more = "kapsi fit --head quadratic fits a model with a formula"
            raise FormulaError(f"{error}; {more}; {reason}") from None
        notes.append(str(error))
        return found
    return [row for row in found if row.source != "simplified" or row.complexity < own.complexity] + [own]


@dataclass(frozen=True, eq=False)
class KnownRows:
    """Rows whose target is known.

    Attributes:
        table: the columns, typed as fitted.
        x: value of each symbol of a formula, (rows, m); missing numbers are means.
        y: class codes (rows,), or targets (rows, targets).
        classes: whether the targets are classes.
    """

    table: Table
    x: Floats
    y: npt.NDArray[Any]
    classes: bool

    def take(self, rows: npt.NDArray[Any]) -> KnownRows:
        """Return a selection of the rows."""
        return KnownRows(self.table.take(rows), self.x[rows], self.y[rows], self.classes)

    def without_missing(self, model: TableModel) -> KnownRows:
        """Return the rows of a search: without missing values."""
        complete = np.ones(len(self.x), dtype=np.bool_)
        for column in model.preprocessing.columns:
            complete &= ~self.table.columns[column.name].missing
        return self.take(np.flatnonzero(complete))


def _known_rows(run: LoadedRun, rows: Any, y: Any) -> KnownRows | None:
    """Return the rows with a known target, None without rows."""
    model = run.model
    classes = model.classes is not None
    if rows is not None and y is None:
        raise DataError("short_formulas: rows need their targets; give y, too")
    if model.preprocessing.texts or model.preprocessing.images:  # which have no formula
        return None
    if rows is not None:
        table = model.preprocessing.check(model.preprocessing.table_of(rows, "short_formulas", model.reading))[0]
        targets = target_values(model, y, table.rows, "short_formulas")
    else:
        kept = run.rows
        if kept is None:
            return None
        table, targets = kept.table, kept.y
    targets = targets if classes else np.asarray(targets, dtype=np.float64).reshape(table.rows, -1)
    known = np.flatnonzero(targets >= 0 if classes else np.isfinite(targets).all(1))
    return KnownRows(table, raw_inputs(model.preprocessing, table), targets, classes).take(known)


def _no_search(run: LoadedRun, rows: KnownRows | None) -> str:
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
    if rows is None:
        return "the run keeps no rows"
    return "" if len(rows.x) >= LEAST_ROWS else f"a search needs {LEAST_ROWS} rows without missing values"


def _searched_inputs(preprocessing: Preprocessing) -> list[int]:
    """Return the inputs of a search: numbers, and the indicators of all categories of a column but the last."""
    kept: list[int] = []
    start = 0
    for column in preprocessing.columns:
        width = len(column.names())
        kept += range(start, start + (1 if isinstance(column, NumberColumn) else max(width - 1, 1)))
        start += width
    return kept


def _searched(run: LoadedRun, rows: KnownRows, seconds: float) -> list[FormulaRow]:
    symbols, x = _inputs(run, rows)
    (target,) = run.model.targets
    with np.errstate(all="ignore"):  # candidates have poles
        results = search_formula(x, rows.y[:, 0], symbols, seconds=seconds)
    return [
        FormulaRow(
            f.complexity, float(np.sqrt(f.mse)), f.r2, ModelFormula({target: f.expression}, symbols), "search", f.cost
        )
        for f in results
    ]


def _of_classes(run: LoadedRun, rows: KnownRows, seconds: float) -> list[FormulaRow]:
    """Return short formulas of the log-odds of two classes, or of the logit of each."""
    symbols, x = _inputs(run, rows)
    seen = of_table(run.model, rows.table)
    found = class_formulas(x, rows.y, seen.function(seen.inputs), symbols, seconds)
    outputs = class_outputs(run.model)
    return [
        _of_class_formula(f, ModelFormula(dict(zip(outputs, f.expressions, strict=True)), symbols), "search")
        for f in found
    ]


def _inputs(run: LoadedRun, rows: KnownRows) -> tuple[tuple[sympy.Symbol, ...], Floats]:
    """Return the symbols of a search and their values."""
    names, kept = run.model.preprocessing.names(), _searched_inputs(run.model.preprocessing)
    return tuple(sympy.Symbol(names[i], real=True) for i in kept), rows.x[:, kept]


def _of_class_formula(found: ClassFormula, shown: ModelFormula, source: str) -> FormulaRow:
    return FormulaRow(found.complexity, np.nan, np.nan, shown, source, found.cost, found.log_loss, found.accuracy)


def _scored(own: ModelFormula, source: str, rows: KnownRows | None) -> FormulaRow:
    """Return a formula with its errors and its cost on the rows of a search, by the rules of searched formulas."""
    if rows is None or not len(rows.x):
        return FormulaRow(own.complexity, np.nan, np.nan, own, source)
    values = {symbol: rows.x[:, i] for i, symbol in enumerate(own.symbols)}
    if rows.classes:
        return _of_class_formula(measured(tuple(own.outputs.values()), values, rows.y), own, source)
    values = {symbol: column[:FITTED] for symbol, column in values.items()}
    errors, r2, cost = [], [], 0.0
    for expression, y in zip(own.outputs.values(), rows.y[:FITTED].T, strict=True):
        mse, variance = float(np.mean((evaluate(expression, values) - y) ** 2)), float(np.var(y))
        errors.append(np.sqrt(mse))
        r2.append(1 - mse / variance if variance else np.nan)
        known = SearchRows(tuple(values), rows.x[:FITTED], y, variance)
        free = len(with_constants(expression)[1])
        cost += description_length(known, mse, expression, free) if variance and np.isfinite(mse) else np.inf
    return FormulaRow(own.complexity, float(np.mean(errors)), float(np.mean(r2)), own, source, cost)
