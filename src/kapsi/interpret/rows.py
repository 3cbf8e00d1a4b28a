"""Rows of a model: encoded inputs and targets on the scale of the outputs, for a `kp.Model`, a run or an estimator."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.arrays import as_dense
from kapsi.data.tabular.types import Floats, Ints
from kapsi.errors import DataError, SpecError, refuse
from kapsi.interpret.view import View, of_table, view
from kapsi.modules import Model, checked_rows
from kapsi.tables.model import TableModel
from kapsi.tables.run_folder import LoadedRun
from kapsi.text import counted


@dataclass(frozen=True, eq=False)
class ModelRows:
    """A model with encoded rows.

    Args:
        model: the model.
        x: inputs, (rows, m), in the type of the model.
        y: targets on the scale of the outputs, (rows, n), or codes of classes, (rows,); None if unknown.
        seen: the rows by columns.
        table: the model of the table, None for a `kp.Model`.
        wrapped: returns another model in the kind of the given one.
    """

    model: Model
    x: Tensor
    y: Tensor | None
    seen: View
    table: TableModel | None = None
    wrapped: Callable[[Model], Any] = field(default=lambda model: model)


def model_rows(model: Any, data: Any, where: str) -> ModelRows:
    """Return a model, a run or an estimator with rows.

    Args:
        model: a `kp.Model`, a run of `kp.load_run`, or a fitted estimator.
        data: rows x, or (x, y); None: the rows that a run keeps.
        where: prefix of error messages.

    Raises:
        DataError: no rows, or rows that do not match the model.
        SpecError: another kind of model, or a model of sparse inputs.
    """
    rows, y = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    if isinstance(model, Model):
        if rows is None:
            raise DataError(f"{where}: a model needs data, rows x or (x, y)")
        x = checked_rows(model, rows, where, least=2)
        target = None if y is None else as_dense(y, "targets", where).to(x.device)
        if target is not None and len(target) != len(x):
            raise DataError(f"{where}: {counted(len(x), 'row')} of inputs and {len(target)} of targets")
        if target is not None and target.is_floating_point():
            target = target.to(x.dtype).reshape(len(x), -1)
        elif target is not None:
            target = target.long()
        return ModelRows(model, x, target, view(model, x, most=len(x)))
    table = model.model if isinstance(model, LoadedRun) else getattr(model, "_table", None)
    if not isinstance(table, TableModel):
        refuse(where, "a kp.Model, a run of kp.load_run or a fitted estimator", model)
    seen, target = _table_rows(model, table, rows, y, where)
    if seen.rows < 2:
        raise DataError(f"{where}: expected at least 2 rows, got {seen.rows}")
    like = next(table.model.parameters(), torch.empty(0, dtype=torch.float64))
    if not isinstance(seen.inputs, np.ndarray):
        raise SpecError(f"{where}: the model has sparse inputs, as of texts; expected dense inputs")

    def wrapped(other: Model) -> Any:
        changed = dataclasses.replace(table, model=other)
        if isinstance(model, LoadedRun):
            return model._replace(model=changed)
        estimator = copy.copy(model)
        estimator._table, estimator.model_ = changed, other
        return estimator

    x = torch.from_numpy(seen.inputs).to(like)
    return ModelRows(table.model, x, None if target is None else target.to(like.device), seen, table, wrapped)


def _table_rows(model: Any, table: TableModel, rows: Any, y: Any, where: str) -> tuple[View, Tensor | None]:
    """Return the view of the rows of a table, and targets on the scale of the outputs or class codes."""
    kept = model.rows if rows is None and isinstance(model, LoadedRun) else None
    if kept is not None:
        targets = kept.y.reshape(len(kept.y), -1)
        known = np.isfinite(targets).all(1) & ((targets >= 0).all(1) if table.classes else True)
        kept = kept.take(np.flatnonzero(known))
        seen, values = of_table(table, kept.table, kept.y), np.asarray(kept.y)
    else:
        seen = view(model, rows, most=2**62)
        if y is None:
            return seen, None
        values = target_values(table, y, seen.rows, where)
    if table.classes is not None:
        return seen, torch.from_numpy(values.astype(np.int64))
    scaled = values if table.scale is None else table.scale.apply(values)
    like = next(table.model.parameters(), torch.empty(0, dtype=torch.float64))
    return seen, torch.from_numpy(np.asarray(scaled, dtype=np.float64).reshape(len(values), -1)).to(like.dtype)


def target_values(table: TableModel, y: Any, rows: int, where: str) -> Ints | Floats:
    """Return class codes (rows,), or targets as given, of the targets of rows.

    Args:
        table: the model of a table.
        y: labels or values, one for each row.
        rows: number of rows.
        where: prefix of error messages.

    Raises:
        DataError: another number of targets, or a label of no class.
    """
    if table.classes is None:
        values = as_dense(y, "targets", where).double().cpu().numpy()
    else:
        values = np.asarray(y)
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1:
            raise DataError(f"{where}: expected one label for each row, got targets of shape {values.shape}")
        codes = {label: code for code, label in enumerate(table.classes)}
        unknown = [label for label in values.tolist() if label not in codes]
        if unknown:
            raise DataError(
                f"{where}: the target {unknown[0]!r} is none of the classes {', '.join(map(str, codes))}; leave out such rows"
            )
        values = np.array([codes[label] for label in values.tolist()], dtype=np.int64)
    if len(values) != rows or not rows:
        raise DataError(f"{where}: {counted(rows, 'row')} of inputs and {len(values)} of targets")
    return values
