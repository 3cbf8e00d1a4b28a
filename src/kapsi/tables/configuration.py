"""The configuration of a run, and its resolution for a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

from kapsi.data.tabular import Reading, TableProblem, make_problem, read_table
from kapsi.data.tabular.roles import kinds_of
from kapsi.errors import SpecError, TableError
from kapsi.expansion import Taylor
from kapsi.function import Spec, catalogue, option, options_of
from kapsi.modules import Model
from kapsi.recipes import Recipe
from kapsi.reconciliation import Kronecker
from kapsi.remainder import LinearRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.tables.row_space import is_linear, reduces
from kapsi.training.config import TrainConfig
from kapsi.training.losses import MSE, CrossEntropy, Loss
from kapsi.training.metrics import Metric
from kapsi.training.resolve import RowsInfo, resolve, resolve_loss
from kapsi.training.solvers import Ridge, reason_not_closed

__all__ = ["RunConfig", "TableConfig", "default_spec", "read_problem", "resolve_run"]

WIDE = 100
"""Largest number of inputs for a default model with all products of two inputs: 5,150 columns."""

WIDEST = 1_000
"""Largest number of inputs for a default model with products: beyond, as with more inputs than rows, it is linear."""


@dataclass(frozen=True)
class TableConfig(Spec):
    """Target, task and validation for a table.

    Args:
        target: name of the target column, or of several columns of numbers.
        task: `classification`, `regression`, or `auto`: strings, booleans and at most 20 distinct integers are classes.
        folds: number of folds of the cross-validation; None for a single validation set.
        strict: reject rows without a target instead of dropping them.
        drop: names of columns to leave out.
        validation_fraction: fraction of rows in the validation set, without folds.
        early_stopping_fraction: fraction of training rows held out for early stopping and for the choice of the L2 penalty,
            unless these use cross-validation.
        reading: how the file is read, also for predictions.
        weight: column of the weights of the rows.
        group: column of groups whose rows stay together in splits.
        time: column that orders the rows: held-out rows are later than training rows.
        validation: file of the held-out rows, instead of a part of the table.
        metrics: further scores.
        interval_by: a column of categories: intervals and sets of predictions cover the share that is requested in each of them.
    """

    target: str | tuple[str, ...]
    task: Literal["auto", "classification", "regression"] = "auto"
    folds: int | None = option(None, minimum=2)
    strict: bool = False
    drop: tuple[str, ...] = ()
    validation_fraction: float = option(0.2, minimum=0.05, maximum=0.9)
    early_stopping_fraction: float = option(0.15, minimum=0.05, maximum=0.5)
    reading: Reading = Reading()
    weight: str | None = None
    group: str | None = None
    time: str | None = None
    validation: str | None = None
    metrics: tuple[Metric, ...] = ()
    interval_by: str | None = None

    def check(self) -> None:
        if isinstance(self.target, tuple) and len(self.target) == 1:
            object.__setattr__(self, "target", self.target[0])
        if len(set(self.metrics)) < len(self.metrics):
            raise SpecError("TableConfig(metrics=…): a metric is given twice; leave one out")
        if self.validation is not None and self.folds is not None:
            raise SpecError(
                f"TableConfig(folds={self.folds}): has no effect on given validation rows; leave folds or validation out"
            )


@dataclass(frozen=True)
class RunConfig(Spec):
    """Table, model and training of a run.

    Args:
        table: target, task and validation.
        model: specification; widths at the ends may be None. None: `default_spec` for the table.
        training: loss, solver and their options.
        recipe: a recipe that chooses and fits the model, such as `auto`, in place of a specification and a solver. It takes loss,
            class weights and seed from `training`. None: the specification is trained by the solver.
    """

    table: TableConfig
    model: ModelSpec | None = None
    training: TrainConfig = TrainConfig()
    recipe: Recipe | None = None

    def check(self) -> None:
        if self.recipe is None:
            return
        if self.model is not None:
            raise SpecError("RunConfig: a recipe chooses the model; leave model or recipe out")
        given = [name for name in trained_options(self.training) if name not in RECIPE_OPTIONS]
        if given:
            raise SpecError(f"RunConfig: training.{given[0]} has no effect with a recipe; leave it or the recipe out")


RECIPE_OPTIONS = ("loss", "class_weights", "seed")
"""Options of training that recipes use."""
SINGLE_MODELS = (
    "needs a single model, and the automatic model, like other recipes, fits several in one process; give --spec FILE, "
    "or --set with an option of a model or its training, such as --set training.solver=adamw"
)
"""Reason to refuse several processes, and logs and checkpoints of single steps, with a recipe."""


def trained_options(training: TrainConfig) -> list[str]:
    """Return the names of the options of training that differ from the defaults."""
    return [f.name for f in options_of(TrainConfig) if getattr(training, f.name) != f.default]


def read_problem(path: str | Path, config: TableConfig) -> TableProblem:
    """Read a table and split it into features and target.

    Args:
        path: CSV or Parquet file.
        config: target, task and columns to leave out.

    Raises:
        TableError: the file is not a table, or the target or a feature column does not fit.
    """
    table = read_table(path, config.reading)
    validation = None
    if config.validation is not None:
        try:
            validation = read_table(config.validation, config.reading, kinds=kinds_of(table), decimal=table.decimal)
        except TableError as error:
            both = " (options of reading hold for both tables)" if "--" in str(error) else ""
            raise TableError(f"{error}{both}") from None
    return make_problem(
        table,
        config.target,
        task=config.task,
        strict=config.strict,
        drop=config.drop,
        weight=config.weight,
        group=config.group,
        time=config.time,
        validation=validation,
        required=[name for name, _ in config.reading.kinds()],
    )


def default_spec(in_features: int, rows: int | None = None) -> ModelSpec:
    """Return the default model of a table: one quadratic layer with a linear remainder, or a linear layer for many inputs.

    Up to 100 inputs, each product of two inputs has a separate weight (symmetric Taylor expansion, dense ψ). Above, the layer
    has products of linear forms (Kronecker ψ, eight channels), with a number of parameters linear in the inputs. The L2 penalty
    of the remainder is a hundredth of the penalty of ψ, so the model falls back to a linear one where products do not help.
    Above 1,000 inputs, or above 100 and more inputs than rows, the model is linear.

    Args:
        in_features: number of inputs.
        rows: number of rows; None if unknown.
    """
    if in_features > WIDEST or (rows is not None and in_features > max(rows, WIDE)):
        return ModelSpec((None, None), (LayerSpec((HeadSpec(bias=True),)),))
    remainder = LinearRemainder()
    if in_features <= WIDE:
        head = HeadSpec(Taylor(2, symmetric=True), remainder=remainder, bias=True)
    else:
        head = HeadSpec(Taylor(2), Kronecker(), remainder, bias=True, channels=8)
    return ModelSpec((None, None), (LayerSpec((head,)),))


def resolve_run(problem: TableProblem, config: RunConfig) -> RunConfig:
    """Return the configuration with model, task, loss and solver resolved for the whole table, the same for all parts.

    Widths at the ends may stay None: a part of the rows may have fewer categories.

    Raises:
        SpecError: the model or the loss does not fit the table.
    """
    outputs, rows = outputs_of(problem), len(problem.y)
    table = replace(config.table, task=cast(Literal["classification", "regression"], problem.task))
    training = config.training
    classes = problem.classes is not None
    check_loss(problem, training.loss)
    for i, metric in enumerate(config.table.metrics):
        try:
            metric.check_loss(CrossEntropy() if classes else MSE(), outputs)
        except SpecError as error:
            raise SpecError(f"TableConfig.metrics[{i}]: {str(error).removeprefix('metrics: ')}") from None
    if config.recipe is not None:
        return RunConfig(table, None, training, config.recipe)
    width = len(problem.preprocessing.names())
    model = config.model or default_spec(width, rows)
    if training.standardize:
        raise SpecError("training.standardize: has no effect, tables are standardized already; leave standardize out")
    coordinates = rows if reduces(model, training, rows, width) else width
    sized = Model(model.sized(coordinates, outputs), device="meta")
    if width > WIDE and _leaves_one_out(problem, model, training) and reason_not_closed(sized, rows) is None:
        training = replace(training, solver=Ridge())
    training = resolve(training, sized, RowsInfo(rows, classes), selecting=True).config
    return RunConfig(table, model, training)


def check_loss(problem: TableProblem, loss: Loss | str) -> None:
    """Raise a `SpecError` if the outputs of a loss are no predictions for a problem, a `DataError` if its targets do not fit.

    Args:
        problem: features and target.
        loss: the loss, or `auto`.
    """
    if not isinstance(loss, Loss):
        return
    classes, outputs = problem.classes is not None, outputs_of(problem)
    if not _suits(type(loss), classes):
        known = " or ".join(("auto", *(kind.name for kind in catalogue("loss") if _suits(kind, classes))))
        needs = "class probabilities, from an output per class" if classes else "one number, from one output"
        raise SpecError(f"training.loss: {loss.name} does not fit {problem.task}, which needs {needs}; choose {known}")
    if loss.log_link:
        if outputs > 1:
            raise SpecError(f"training.loss: {loss.name} needs a single target, got {outputs}")
        loss.check_targets(torch.from_numpy(problem.y.astype(np.float64)), outputs, "training.loss")


def notes_on_model(problem: TableProblem, config: RunConfig) -> list[str]:
    """Return a note if the default model is linear because of the number of inputs."""
    if config.model is not None or config.recipe is not None:
        return []
    width, rows = len(problem.preprocessing.names()), len(problem.y)
    if not is_linear(default_spec(width, rows)):
        return []
    reason = f"{width:,} inputs, more than {WIDEST:,}" if width > WIDEST else f"{width:,} inputs and {rows:,} rows"
    return [f"the default model is linear for {reason}; --spec FILE sets another model"]


def _leaves_one_out(problem: TableProblem, model: ModelSpec, training: TrainConfig) -> bool:
    """Return whether the penalty of a linear model may minimize the leave-one-out error: rows are independent."""
    defaults = all(
        getattr(training, name) == getattr(TrainConfig, name)
        for name in ("solver", "l2", "l1", "group_l1", "patience", "monitor")
    )
    loss = resolve_loss(training.loss, problem.classes is not None)
    return defaults and loss.closed_form and is_linear(model) and problem.groups is None and problem.times is None


def outputs_of(problem: TableProblem) -> int:
    """Return the number of outputs: classes, or targets."""
    return len(problem.classes) if problem.classes is not None else problem.y[:1].size


def _suits(kind: type[Any], classes: bool) -> bool:
    """Return whether the model output of a loss gives predictions of a table: real values, or class probabilities."""
    if classes:
        return bool(kind.classes) and kind.log_probabilities is not Loss.log_probabilities
    return not kind.classes and not kind.discrete and kind.outputs_per_target == 1
