"""A fitted model of a table: raw columns in, labels or real values out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kapsi.data.tabular import (
    Label,
    Preprocessing,
    Reading,
    Table,
    TargetScale,
    read_batches,
    read_table,
    target_of,
)
from kapsi.data.tabular.roles import weights_of
from kapsi.data.tabular.types import label_text, short
from kapsi.data.tabular.units import shared_unit
from kapsi.errors import ScaleWarning, TableError
from kapsi.modules import Model
from kapsi.recipes import LeaderboardRow
from kapsi.tables.configuration import RunConfig
from kapsi.tables.intervals import Decisions, Intervals, added
from kapsi.tables.ranges import Ranges, Tally
from kapsi.tables.scores import Floats, Scores, notes_on_scores, scores_of
from kapsi.text import condensed
from kapsi.training.prediction import predict
from kapsi.training.records import Epoch
from kapsi.training.selection import PenaltyScore

__all__ = ["FittedPart", "TableModel"]


FEW_ROWS = 16
"""Rows whose outputs are computed without batches and checks: these take 0.3 ms."""


@dataclass(frozen=True, eq=False)
class TableModel:
    """A model with preprocessing and the coding of the target.

    Args:
        model: maps inputs to logits, or to a standardized target.
        preprocessing: maps columns to inputs.
        target: name of the target, or of several targets.
        task: `classification` or `regression`.
        classes: original labels; None in regression.
        scale: standardization of the target; None in classification.
        ranges: ranges of the training rows; None in runs of 0.1.
        reading: how tables are read.
        decimal: the decimal mark of the table of the fit, for tables that do not show their own.
        weight: name of the column of weights, for scores.
        units: unit of each target, see `Column`; empty for plain numbers and classes.
        config: the configuration of the run; None for other models.
        intervals: errors of held-out rows; None in runs of 0.1.
        kept: content of the file of rows that the run keeps, empty without; see `LoadedRun.rows`.
    """

    model: Model
    preprocessing: Preprocessing
    target: str | tuple[str, ...]
    task: str
    classes: tuple[Label, ...] | None
    scale: TargetScale | None
    ranges: Ranges | None = None
    reading: Reading = Reading()
    decimal: str | None = None
    weight: str | None = None
    units: tuple[str, ...] = ()
    config: RunConfig | None = None
    kept: bytes = b""

    intervals: Intervals | None = None

    @property
    def unit(self) -> str:
        """The unit of the predictions, empty for none and for several."""
        return shared_unit(self.units)

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets."""
        return self.target if isinstance(self.target, tuple) else (self.target,)

    def read(self, path: str | Path) -> Table:
        """Read a table as the table of the training rows was read; its columns have the types of the training.

        Raises:
            TableError: the file is not a table.
        """
        kinds, categories = self.preprocessing.kinds(), dict(self.preprocessing.categories())
        if self.classes is not None:
            categories[self.targets[0]] = tuple(map(str, self.classes))
        return read_table(path, self.reading, kinds=kinds, decimal=self.decimal, categories=categories)

    def outputs(self, features: Table, rows: npt.NDArray[Any] | None = None) -> Floats:
        """Return probabilities (rows, classes), or predictions (rows,) in the unit of the target.

        Raises:
            TableError: a prediction is not finite.
        """
        x = self.preprocessing.transform(features, rows)
        return self.decoded(self.raw_outputs(x, features.name, rows))

    def raw_outputs(self, inputs: Any, where: str, rows: npt.NDArray[Any] | None = None) -> torch.Tensor:
        """Return the outputs of the model, (rows, n) float64: logits, or standardized targets.

        Args:
            inputs: (rows, m) float64, from the preprocessing, or a CSR matrix for a model of sparse rows.
            where: prefix of error messages.
            rows: numbers of the rows, for messages.

        Raises:
            TableError: an output is not finite.
        """
        dtype = next((p.dtype for p in self.model.parameters()), torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScaleWarning)  # an error below
            y = self._called(torch.from_numpy(inputs).to(dtype)) if isinstance(inputs, np.ndarray) else None
            y = (predict(self.model, inputs) if y is None else y).double().cpu()
        finite = torch.isfinite(y).all(-1)
        if not bool(finite.all()):
            position = int((~finite).nonzero()[0, 0])
            row = f"row {position + 1}" if rows is None else f"row {rows[position] + 1} of the rows with a target"
            raise TableError(
                f"{where}: the prediction for {row} is not a finite number; correct values far outside the range of "
                "the training rows, or lower the degree of the model"
            )
        return y

    def _called(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for dense inputs; a few rows of a model in evaluation mode take no detour."""
        if len(x) > FEW_ROWS or self.model.training:
            return predict(self.model, x)
        like = next(self.model.parameters(), x)
        with torch.no_grad():
            outputs: torch.Tensor = self.model(x.to(like.device))
        return outputs

    def decoded(self, outputs: torch.Tensor) -> Floats:
        """Return outputs of the model as probabilities (rows, classes), or as predictions in the unit of the target."""
        return outputs.softmax(-1).numpy() if self.scale is None else self.scale.invert(outputs.squeeze(-1).numpy())

    def predict(self, table: Table) -> tuple[dict[str, list[Any]], list[str]]:
        """Return columns of predictions for all rows of a table, and notes for the user.

        Raises:
            TableError: columns are missing or have another type than in training.
        """
        features, notes = self.preprocessing.check(table)
        tally = Tally(self.ranges, targets=self.targets)
        return self._predicted(features, tally, None, flags=False), condensed([*notes, *table.notes, *tally.notes()])

    def predict_file(
        self,
        path: str | Path,
        write: Callable[[dict[str, Any]], None],
        *,
        keep: Sequence[str] = (),
        flags: bool = False,
        decisions: Decisions | None = None,
        explain: Callable[[Table], dict[str, list[float]]] | None = None,
    ) -> tuple[int, list[str]]:
        """Predict the rows of a file in batches, in constant memory; return the number of rows and notes for the user.

        Args:
            path: the file.
            write: receives the columns of each batch.
            keep: names of columns of the file to pass on in front.
            flags: add the columns `inputs_outside` and `prediction_outside`, true where a row or its prediction is outside of
                the ranges of the training rows.
            decisions: intervals, costs and recall; None for none.
            explain: returns further columns for rows of the columns of the model; None for none.

        Raises:
            TableError: the file is not a table, columns are missing or have another type than in training, or a column to keep
                has the name of a column of predictions.
            KapsiError: decisions that do not suit the model.
        """
        if len(set(keep)) < len(keep):
            raise TableError(f"--keep: a column is named twice, {', '.join(keep)}")
        tally = Tally(self.ranges, targets=self.targets)
        notes: list[str] = []
        kinds, categories = self.preprocessing.kinds(), self.preprocessing.categories()
        for batch in read_batches(path, self.reading, kinds, keep, self.decimal, categories):
            try:
                features, notes = self.preprocessing.check(batch.table, batch.ignored)
                notes += batch.table.notes
                predicted = self._predicted(features, tally, decisions, flags=flags)
                predicted |= {} if explain is None else explain(features)
            except TableError as error:
                if not tally.rows:
                    raise
                raise TableError(f"{error} (rows are counted from row {tally.rows + 1:,} of the file)") from None
            both = sorted(batch.kept.keys() & predicted.keys())
            if both:
                raise TableError(f"--keep {both[0]!r}: is the name of a column of predictions; rename it in the table")
            write({**batch.kept, **predicted})
        return tally.rows, condensed([*notes, *tally.notes()])

    def _predicted(
        self, features: Table, tally: Tally, decisions: Decisions | None, *, flags: bool
    ) -> dict[str, list[Any]]:
        """Return the columns of predictions of some rows, and count them."""
        outputs = self.outputs(features)
        inputs, predictions = tally.add(features, outputs, self.preprocessing.unseen(features))
        marks = {"inputs_outside": inputs.tolist(), "prediction_outside": predictions.tolist()}
        columns = self.columns(outputs) | (added(self, features, outputs, decisions) if decisions else {})
        return columns | (marks if flags else {})

    def columns(self, outputs: Floats) -> dict[str, list[Any]]:
        """Return outputs as columns: `prediction`, and `probability_LABEL` per class."""
        if self.classes is None:
            if isinstance(self.target, tuple):
                return {f"prediction_{name}": outputs[:, i].tolist() for i, name in enumerate(self.target)}
            return {"prediction": outputs.tolist()}
        columns: dict[str, list[Any]] = {"prediction": [self.classes[code] for code in outputs.argmax(1)]}
        for code, label in enumerate(self.classes):
            columns[f"probability_{label_text(label)}"] = outputs[:, code].tolist()
        return columns

    def scores(self, table: Table) -> tuple[Scores, int, list[str]]:
        """Return the scores on a table with the target, the number of scored rows, and notes for the user."""
        units: list[str] = []
        y = target_of(table, self.target, self.task, self.classes, self.units, units)
        known = y >= 0 if self.task == "classification" else ~np.isnan(y.reshape(len(y), -1)).any(1)
        if not known.any():
            raise TableError(
                f"{table.name}: the target {short(self.target)} is missing in every row; no row can be scored"
            )
        others = (*self.targets, self.weight)
        rest = Table(table.name, {name: c for name, c in table.columns.items() if name not in others})
        features, notes = self.preprocessing.check(rest)
        notes += [note for column in self.preprocessing.images for note in features.columns[column.name].notes]
        if not known.all():
            notes.append(f"ignored {int((~known).sum())} of {len(y)} rows without a target {short(self.target)}")
        rows = np.flatnonzero(known)
        name = self.weight if self.weight in table.columns else None
        if self.weight is not None:
            text = "the rows count as its weights" if name else "without it, all rows count the same"
            notes.append(f"the model was fitted with the weights {self.weight!r}: {text}")
        if self.task == "regression":
            notes += notes_on_scores(y[rows], "scored rows", targets=self.targets)
        scores = scores_of(self.outputs(features, rows), y[rows], weights_of(table, name, rows))
        return scores, len(rows), condensed([*table.notes, *units, *notes])

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the model as plain data."""
        return {
            "target": list(self.target) if isinstance(self.target, tuple) else self.target,
            "task": self.task,
            "classes": None if self.classes is None else list(self.classes),
            "scale": None if self.scale is None else self.scale.to_dict(),
            "inputs": self.preprocessing.to_dict(),
            **({} if self.ranges is None else {"ranges": self.ranges.to_dict()}),
            **({} if self.decimal is None else {"decimal": self.decimal}),
            **({"units": list(self.units)} if any(self.units) else {}),
        }


class FittedPart(NamedTuple):
    """A model fitted to a part of the rows.

    Attributes:
        model: the model with preprocessing.
        epochs: records of training.
        choices: L2 penalties of the search.
        leaderboard: heads that a recipe compared.
        notes: notes of a recipe for the user.
        held_out: predictions for the training rows while they were held out, as of `TableModel.outputs`; NaN where none.
    """

    model: TableModel
    epochs: list[Epoch]
    choices: list[PenaltyScore]
    leaderboard: tuple[LeaderboardRow, ...] = ()
    notes: tuple[str, ...] = ()
    held_out: Floats | None = None
