"""The formula of a fitted model, in the units and names of its columns."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from kapsi.data.tabular import DateColumn, NumberColumn, Preprocessing, TargetScale
from kapsi.data.tabular.dates import date_text
from kapsi.data.tabular.types import label_text
from kapsi.errors import FormulaError, printable, shown
from kapsi.interpret.closed_forms import model_expressions
from kapsi.interpret.expressions import Floats, complexity, evaluate
from kapsi.interpret.text import as_latex, as_mathml, as_python, as_text
from kapsi.modules import Model
from kapsi.tables.model import TableModel
from kapsi.tables.run_folder import LoadedRun

__all__ = ["ModelFormula", "formula"]

MOST_NAMED = 12
"""Columns whose range is stated."""
MOST_WEIGHTS = 20_000
"""Weights of a model with a formula: half a minute, and a megabyte of text."""


@dataclass(frozen=True)
class ModelFormula:
    """Formulas of the outputs of a model.

    Attributes:
        outputs: expression of each output: targets, `log-odds(LABEL)` of the second of two classes, or
            `logit(LABEL)` for each class.
        symbols: a symbol for each input: columns in their units, indicators of categories and of missing values, 0 or 1.
        notes: what the formula leaves out, and where it is valid.
    """

    outputs: Mapping[str, sympy.Expr]
    symbols: tuple[sympy.Symbol, ...]
    notes: tuple[str, ...] = ()

    def __call__(self, inputs: Any) -> Floats:
        """Return the outputs, (rows, n) float64.

        Args:
            inputs: (rows, m): values of the symbols, in order.
        """
        x = np.asarray(inputs, dtype=np.float64)
        if x.ndim != 2 or x.shape[1] != len(self.symbols):
            raise FormulaError(f"formula: expected inputs of the shape (rows, {len(self.symbols)}), got {x.shape}")
        values = {symbol: x[:, i] for i, symbol in enumerate(self.symbols)}
        columns = [np.broadcast_to(evaluate(output, values), (len(x),)) for output in self.outputs.values()]
        return np.stack(columns, axis=1)

    @property
    def complexity(self) -> int:
        """The number of numbers, variables and operations."""
        return sum(complexity(output) for output in self.outputs.values())

    def text(self, digits: int = 4) -> str:
        """Return a line `output = expression` for each output, with rounded numbers."""
        return "\n".join(f"{printable(name)} = {as_text(e, digits)}" for name, e in self.outputs.items())

    def latex(self, digits: int = 4) -> str:
        """Return a line of LaTeX for each output, without dollar signs; names are escaped."""
        return "\n".join(as_latex(name, e, digits) for name, e in self.outputs.items())

    def mathml(self, digits: int = 4) -> list[list[str]]:
        """Return the terms of each output as MathML, the first with `output =`; names are escaped."""
        return [as_mathml(name, e, digits) for name, e in self.outputs.items()]

    def python(self) -> str:
        """Return the source of a Python function of NumPy arrays, with all digits; parameters are x0, x1, …."""
        return as_python(self.outputs, self.symbols)


def formula(model: Any) -> ModelFormula:
    """Return the formula of a model with a closed form.

    Imputation and standardization are part of the formula: numbers are in the units of their columns, a missing number
    counts as the mean of the column, and indicators of categories and missing values are inputs of 0 or 1. Values beyond
    10⁶ standard deviations, which the model limits, are not limited.

    Args:
        model: a run of `kp.load_run`, a fitted estimator, or a `kp.Model`.

    Raises:
        FormulaError: a function without a closed form, named in the message.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 1], kp.Taylor(2)), seed=0, dtype=torch.float64)
        >>> model.layers[0].heads[0].assign("reconciliation", matrix=[[3.0, 0.0, 0.0, 1.0, 1.0, -0.5]])
        >>> print(formula(model).text())
        y = 2*x1*x2 + 3*x1 - 0.5*x2**2
    """
    table = model.model if isinstance(model, LoadedRun) else getattr(model, "_table", None)
    if isinstance(table, TableModel):
        return _of_table(table)
    if isinstance(model, Model):
        names = [f"x{i + 1}" for i in range(model.in_features)]
        symbols = tuple(sympy.Symbol(name, real=True) for name in names)
        outputs = model_expressions(model, np.array(symbols, dtype=object))
        keys = ["y"] if len(outputs) == 1 else [f"y{i + 1}" for i in range(len(outputs))]
        return ModelFormula(dict(zip(keys, outputs.tolist(), strict=True)), symbols)
    raise FormulaError(
        f"formula: expected a run of kp.load_run, a fitted estimator or a kp.Model, got {type(model).__name__}"
    )


def _of_table(table: TableModel) -> ModelFormula:
    weights = table.parameter_count
    if weights > MOST_WEIGHTS:
        raise FormulaError(
            f"formula: the model has {weights:,} weights, a formula at most {MOST_WEIGHTS:,}; fit a smaller model (--prefer small)"
        )
    check_columns(table.preprocessing)
    scales = input_scales(table.preprocessing)
    symbols = tuple(sympy.Symbol(name, real=True) for name in table.preprocessing.names())
    pairs = zip(symbols, scales, strict=True)
    inputs = [s if scale is None else (s - sympy.Float(scale[0])) / sympy.Float(scale[1]) for s, scale in pairs]
    outputs = model_expressions(table.model, np.array(inputs, dtype=object))
    if table.classes is not None:
        names = list(class_outputs(table))
        outputs = outputs[1:] - outputs[:1] if len(table.classes) == 2 else outputs
    else:
        names = list(table.targets)
        outputs = np.array([unscaled(y, table.scale, i) for i, y in enumerate(outputs)], dtype=object)
    return ModelFormula(dict(zip(names, outputs.tolist(), strict=True)), symbols, tuple(valid_range(table)))


def check_columns(preprocessing: Preprocessing) -> None:
    """Raise `FormulaError` if a column holds texts or images."""
    for kind, columns in (("texts", preprocessing.texts), ("images", preprocessing.images)):
        for column in columns:
            raise FormulaError(
                f"formula: the column {shown(column.name)} holds {kind}, which have no closed form; "
                f"fit again with --drop {shlex.quote(column.name)}"
            )


def input_scales(preprocessing: Preprocessing) -> list[tuple[float, float] | None]:
    """Return center and scale of each input of a model, None for indicators and target encodings."""
    scales: list[tuple[float, float] | None] = []
    for column in preprocessing.columns:
        known: list[tuple[float, float]] = []
        if isinstance(column, NumberColumn):
            known = [(column.mean, column.scale)]
        elif isinstance(column, DateColumn):
            known = list(zip(column.means, column.scales, strict=True))
        scales += [*known, *[None] * (len(column.names()) - len(known))]
    return scales


def raw_inputs(preprocessing: Preprocessing, features: Any) -> Floats:
    """Return the values of the symbols of a formula for the rows of a table, (rows, m); missing numbers are means."""
    inputs: Floats = np.array(preprocessing.transform(features), dtype=np.float64)
    for i, scale in enumerate(input_scales(preprocessing)):
        if scale is not None:
            inputs[:, i] = inputs[:, i] * scale[1] + scale[0]
    return inputs


def unscaled(y: sympy.Expr, scale: TargetScale | None, index: int) -> sympy.Expr:
    """Return an output in the unit of the target."""
    if scale is None:
        return y
    center, width = (v[index] if isinstance(v, tuple) else v for v in (scale.center, scale.scale))
    if scale.transform == "log_link":
        return sympy.Float(width) * sympy.exp(y)
    y = sympy.Float(width) * y + sympy.Float(center)
    if scale.transform == "none":
        return sympy.expand_mul(y) if y.is_Add else y
    if scale.transform == "log":
        return sympy.Float(scale.factor) * sympy.exp(y)
    p = sympy.Float(scale.power)
    above = sympy.exp(y) - 1 if scale.power == 0 else (p * y + 1) ** (1 / p) - 1
    below = 1 - sympy.exp(-y) if scale.power == 2 else 1 - ((p - 2) * y + 1) ** (1 / (2 - p))
    return sympy.Float(scale.factor) * sympy.Piecewise((above, y >= 0), (below, True))


def class_outputs(table: TableModel) -> tuple[str, ...]:
    """Return the names of the formulas of classes: the log-odds of the second of two, else the logit of each."""
    labels = [label_text(label) for label in table.classes or ()]
    return (f"log-odds({labels[1]})",) if len(labels) == 2 else tuple(f"logit({label})" for label in labels)


def valid_range(table: TableModel) -> list[str]:
    """Return notes on the range of the training rows and on missing values."""
    notes = []
    if table.ranges is not None:
        dates = {column.name for column in table.preprocessing.columns if isinstance(column, DateColumn)}
        known = []
        for name, ends in table.ranges.inputs.items():
            low, high = (date_text(end) if name in dates else f"{end:g}" for end in ends)
            known.append(f"{name} {low} to {high}")
        if known:
            notes.append(f"valid in the range of the training rows: {_listed(known)}")
    means = [f"{c.name} {c.mean:.6g}" for c in table.preprocessing.columns if isinstance(c, NumberColumn)]
    if means:
        notes.append(f"a missing number counts as the mean of its column: {_listed(means)}")
    return notes


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - MOST_NAMED
    return ", ".join(parts) if more <= 1 else f"{', '.join(parts[:MOST_NAMED])}, and of {more} others"
