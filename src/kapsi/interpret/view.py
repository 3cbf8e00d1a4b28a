"""A fitted model seen from the columns of its table: encoded rows, and outputs on the scale that is explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from kapsi.data.tabular import Column, Table, TableProblem
from kapsi.data.tabular.encoders import NumberColumn
from kapsi.data.tabular.image_column import ImageColumn
from kapsi.data.tabular.text_column import TextColumn
from kapsi.data.tabular.types import Floats, Ints, label_text
from kapsi.data.tabular.units import label
from kapsi.errors import DataError, check_integer
from kapsi.modules import Model
from kapsi.tables.model import TableModel
from kapsi.tables.run_folder import LoadedRun
from kapsi.training.prediction import predict

Kind: TypeAlias = Literal["number", "category", "date", "text", "image"]
MOST_ROWS = 1000
"""Rows of a background; more are sampled."""


@dataclass(frozen=True, eq=False)
class ColumnView:
    """One column of the rows.

    Args:
        name: name of the column.
        kind: `number`, `category` (also booleans), `date`, `text` or `image`.
        inputs: positions among the inputs of the model.
        column: the values of the rows.
        encoder: maps values to inputs; None for an input of a model without a table.
        unit: unit of the numbers, empty for none.
    """

    name: str
    kind: Kind
    inputs: Ints
    column: Column
    encoder: Any = None
    unit: str = ""

    def encode(self, values: Any) -> Floats:
        """Return the inputs of values: float64 with NaN as missing, or strings with None as missing, (rows, inputs)."""
        if self.encoder is None:
            return np.asarray(values, dtype=np.float64)[:, np.newaxis]
        encoded: Floats = self.encoder.transform(self.column.with_values(np.asarray(values)))
        return encoded


@dataclass(frozen=True, eq=False)
class View:
    """A model with rows, as functions of its columns.

    Args:
        columns: the columns.
        inputs: encoded rows, (rows, m) float64, or CSR for models of texts.
        function: maps inputs to outputs, (rows, n) float64.
        outputs: a name for each output.
        y: targets or class codes of the rows, None if unknown.
        held_out: whether the model was not fitted to a row, (rows,); None if unknown.
        classes: number of classes, 0 for regressions and models without a table.
        where: prefix of error messages.
    """

    columns: tuple[ColumnView, ...]
    inputs: Any
    function: Callable[[Any], Floats]
    outputs: tuple[str, ...]
    y: Ints | Floats | None = None
    held_out: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    classes: int = 0
    where: str = "interpret"

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.inputs.shape[0])

    def chosen(self, names: Sequence[str] | None) -> list[int]:
        """Return the positions of named columns, of all for None.

        Raises:
            DataError: an unknown name.
        """
        known = [column.name for column in self.columns]
        for name in names or ():
            if name not in known:
                raise DataError(f"{self.where}: the model has no column {name!r}; it has {', '.join(known[:20])}")
        return list(range(len(known))) if names is None else [known.index(name) for name in names]

    def replaced(self, inputs: Any, position: int, encoded: Floats) -> Any:
        """Return inputs with other values of one column."""
        indices = self.columns[position].inputs
        if isinstance(inputs, np.ndarray):
            changed = inputs.copy()
            changed[:, indices] = encoded
            return changed
        from scipy.sparse import csr_matrix

        count = inputs.shape[0]
        part = csr_matrix(
            (encoded.ravel(), (np.repeat(np.arange(count), len(indices)), np.tile(indices, count))), shape=inputs.shape
        )
        return kept_columns(inputs, np.isin(np.arange(inputs.shape[1]), indices, invert=True)) + part

    def swapped(self, inputs: Any, others: Any, position: int) -> Any:
        """Return inputs with the values that other rows have in one column."""
        indices = self.columns[position].inputs
        if isinstance(inputs, np.ndarray):
            return self.replaced(inputs, position, others[:, indices])
        return mixed(others, inputs, np.isin(np.arange(inputs.shape[1]), indices))


def kept_columns(inputs: Any, mask: Any) -> Any:
    """Return a sparse matrix with zeros outside of a mask of columns."""
    from scipy.sparse import diags

    return inputs @ diags(mask.astype(np.float64), format="csr")


def stacked(parts: Sequence[Any]) -> Any:
    """Return the rows of several arrays or sparse matrices of inputs, one after the other."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    from scipy.sparse import vstack

    return vstack(parts, format="csr")


def mixed(first: Any, second: Any, mask: Any) -> Any:
    """Return the inputs of the first rows where a mask of columns is true, else those of the second rows."""
    if isinstance(first, np.ndarray):
        return np.where(mask, first, second)
    return kept_columns(first, mask) + kept_columns(second, ~mask)


def view(model: Any, rows: Any = None, *, seed: int = 0, most: int = MOST_ROWS) -> View:
    """Return the view of a fitted model.

    Args:
        model: a run of `kp.load_run`, a fitted `RPNClassifier` or `RPNRegressor`, or a `kp.Model`.
        rows: rows of the columns of the model: a frame for a run; a frame or an array for an estimator; a tensor or an array
            `(rows, m)` of inputs for a model. None: the rows that the run keeps.
        seed: seed of the sample.
        most: maximum number of rows; more are sampled.

    Raises:
        DataError: no rows, or a model of another kind.
    """
    check_integer("interpret: seed", seed, 0)
    if isinstance(model, LoadedRun):
        kept = model.rows if rows is None else None
        if kept is not None:
            kept = kept.take(_sample(kept.table.rows, most, seed))
            return of_table(model.model, kept.table, kept.y, kept.held_out)
        if rows is None:
            raise DataError("interpret: the run keeps no rows; give rows=, a frame with the columns of its table")
        table = rows if isinstance(rows, Table) else _table(rows, model.model)
        return of_table(model.model, _checked(table, model.model, most, seed))
    if hasattr(model, "_table") and isinstance(model._table, TableModel):
        return _of_estimator(model, rows, most, seed)
    if isinstance(model, torch.nn.Module):
        return _of_module(model, rows, most, seed)
    raise DataError(
        f"interpret: expected a run of kp.load_run, a fitted estimator or a kp.Model, got {type(model).__name__}"
    )


def of_problem(model: TableModel, problem: TableProblem, *, seed: int = 0, most: int = MOST_ROWS) -> View:
    """Return the view of a model with rows of the problem that it was fitted to."""
    rows = _sample(len(problem.y), most, seed)
    table = model.preprocessing.check(problem.features.take(rows))[0]
    return of_table(model, table, problem.y[rows])


def of_table(
    model: TableModel,
    table: Table,
    y: Ints | Floats | None = None,
    held_out: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
) -> View:
    """Return the view of a model of a table with rows of its columns, typed as fitted."""
    inputs = model.preprocessing.transform(table)
    columns, end = [], 0
    terms = len(model.preprocessing.dense_names())
    pixels = terms + sum(len(text.counts) for text in model.preprocessing.texts)
    for encoder in model.preprocessing.columns:
        width, column = len(encoder.names()), table.columns[encoder.name]
        indices = np.arange(end, end + width)
        end += width
        kind: Kind = "number"
        if isinstance(encoder, TextColumn):
            count = len(encoder.counts)
            indices, terms = np.append(indices, np.arange(terms, terms + count)), terms + count
            kind = "text"
        elif isinstance(encoder, ImageColumn):
            indices, pixels = np.append(indices, np.arange(pixels, pixels + encoder.count)), pixels + encoder.count
            kind = "image"
        elif encoder.wanted != "numeric":
            kind = "date" if encoder.wanted == "date" else "category"
        columns.append(ColumnView(encoder.name, kind, indices, column, encoder, label(getattr(encoder, "unit", ""))))

    def function(x: Any) -> Floats:
        raw = model.raw_outputs(x, "interpret")
        if model.classes is None:
            return model.decoded(raw).reshape(len(raw), -1)
        logits = raw.numpy()
        return logits[:, 1:] - logits[:, :1] if logits.shape[1] == 2 else logits - logits.mean(1, keepdims=True)

    names = model.targets
    if model.classes is not None:
        names = tuple(map(label_text, model.classes))
        names = (f"log odds of {names[1]}",) if len(names) == 2 else names
    return View(tuple(columns), inputs, function, names, y, held_out, len(model.classes or ()))


def _of_estimator(estimator: Any, rows: Any, most: int, seed: int) -> View:
    """Return the view of a fitted estimator; rows are a frame or an array, as for `fit`."""
    if rows is None:
        raise DataError("interpret: an estimator keeps no rows; give rows=, such as the rows of its fit")
    model: TableModel = estimator._table
    if not model.preprocessing.columns:
        raise DataError("interpret: the estimator was fitted to sparse rows, which have no named columns")
    names = [column.name for column in model.preprocessing.columns]
    if not estimator._named:
        values = np.asarray(rows, dtype=np.float64)
        if values.ndim != 2 or values.shape[1] != len(names):
            raise DataError(f"interpret: expected rows of {len(names)} columns, got the shape {values.shape}")
        table = Table("rows", {name: Column("real", column) for name, column in zip(names, values.T, strict=True)})
    else:
        table = _table(rows, model)
    return of_table(model, _checked(table, model, most, seed))


def _of_module(module: torch.nn.Module, rows: Any, most: int, seed: int) -> View:
    """Return the view of a torch module of inputs (rows, m): each input is a column."""
    if rows is None:
        raise DataError("interpret: a model without a table needs rows=, inputs of the shape (rows, m)")
    like = next((p for p in module.parameters()), torch.empty(0, dtype=torch.float64))
    values = np.asarray(rows.detach().double().cpu() if isinstance(rows, torch.Tensor) else rows, dtype=np.float64)
    if values.ndim != 2 or not len(values):
        raise DataError(f"interpret: expected inputs of the shape (rows, m), got {values.shape}")
    values = values[_sample(len(values), most, seed)]

    def function(x: Floats) -> Floats:
        inputs = torch.from_numpy(x).to(like)
        with torch.no_grad():
            outputs = predict(module, inputs) if isinstance(module, Model) else module(inputs)
        return np.asarray(outputs.double().cpu().numpy().reshape(len(x), -1))

    columns = tuple(
        ColumnView(f"x{i + 1}", "number", np.array([i]), Column("real", column)) for i, column in enumerate(values.T)
    )
    count = function(values[:1]).shape[1]
    return View(columns, values, function, tuple(f"y{i + 1}" for i in range(count)) if count > 1 else ("y",))


def _table(rows: Any, model: TableModel) -> Table:
    return model.preprocessing.table_of(rows, "interpret", model.reading)


def _checked(table: Table, model: TableModel, most: int, seed: int) -> Table:
    """Return at most so many rows, with the columns typed as fitted."""
    table = model.preprocessing.check(table)[0]
    return table.take(_sample(table.rows, most, seed))


def _sample(count: int, most: int, seed: int) -> Ints:
    """Return sorted indices of at most so many rows."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


def has_missing(column: ColumnView) -> bool:
    """Return whether the model distinguishes missing values of a column."""
    return isinstance(column.encoder, NumberColumn) and column.encoder.missing


def deviation(outputs: Floats) -> Floats:
    """Return the standard deviation of each output, 1 where it vanishes."""
    found = outputs.std(0)
    return np.where(found > 1e-12 * np.maximum(1.0, np.abs(outputs).max(0)), found, 1.0)
