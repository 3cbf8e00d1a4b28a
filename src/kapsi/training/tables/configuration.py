"""The configuration of a run, and its resolution for a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from kapsi.data.tabular import (
    Preprocessing,
    make_problem,
    read_table,
)
from kapsi.data.tabular import (
    TableProblem as Problem,
)
from kapsi.errors import SpecError
from kapsi.expansion import Taylor
from kapsi.function import Spec, catalogue, option
from kapsi.modules import Model
from kapsi.reconciliation import Kronecker
from kapsi.remainder import LinearRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.losses import Loss
from kapsi.training.resolve import RowsInfo, resolve

__all__ = ["RunConfig", "TableConfig", "default_spec"]


WIDE = 100
"""Inputs up to which the default model has every product of two of them: 5,150 columns."""


@dataclass(frozen=True)
class TableConfig(Spec):
    """What is fitted in a table.

    Args:
        target: the name of the column to learn.
        task: `classification`, `regression`, or `auto`: text, booleans and at most 20 different integers are classes.
        folds: number of folds of the cross-validation, None for a single validation part.
        strict: refuse rows without a target instead of dropping them.
        drop: names of columns to leave out.
        validation_fraction: fraction of the rows held out for the scores, if there are no folds.
        early_stopping_fraction: fraction of the training rows held out for early stopping, if there is no cross-validation.
    """

    target: str
    task: Literal["auto", "classification", "regression"] = "auto"
    folds: int | None = option(None, minimum=2)
    strict: bool = False
    drop: tuple[str, ...] = ()
    validation_fraction: float = option(0.2, minimum=0.05, maximum=0.9)
    early_stopping_fraction: float = option(0.15, minimum=0.05, maximum=0.5)


@dataclass(frozen=True)
class RunConfig(Spec):
    """A run: the model (None for the default of the table), its training, and what is fitted.

    Args:
        table: what is fitted.
        model: the specification; widths at the ends may be None.
        training: how the model is trained.
    """

    table: TableConfig
    model: ModelSpec | None = None
    training: TrainConfig = TrainConfig()


def default_spec(in_features: int) -> ModelSpec:
    """Return the model of a table for which none is given: one quadratic layer beside a linear one.

    Up to 100 inputs every product of two has a weight of its own (symmetric Taylor expansion, dense ψ). Above that, products
    are those of a few pairs of linear forms (Kronecker ψ in eight channels), with a number of parameters linear in the inputs.
    The linear part is the remainder: it is held down far less, so the model falls back to it where products do not help.
    """
    remainder = LinearRemainder()
    if in_features <= WIDE:
        head = HeadSpec(Taylor(2, symmetric=True), remainder=remainder, bias=True)
    else:
        head = HeadSpec(Taylor(2), Kronecker(), remainder, bias=True, channels=8)
    return ModelSpec((None, None), (LayerSpec((head,)),))


def settle(problem: Problem, config: RunConfig) -> RunConfig:
    """Return the configuration with what follows from the whole table, so that all parts of it are fitted alike.

    Widths at the ends that are None stay so: a part of the rows may have fewer categories.

    Raises:
        SpecError: a specification or a loss that does not fit the table.
    """
    width, outputs = len(Preprocessing.fit(problem.features).names()), len(problem.classes or (0,))
    model, training = config.model or default_spec(width), config.training
    classes = problem.classes is not None
    if isinstance(training.loss, Loss) and not _suits(type(training.loss), classes):
        known = " or ".join(("auto", *(kind.name for kind in catalogue("loss") if _suits(kind, classes))))
        raise SpecError(f"training.loss: {training.loss.name} does not go with {problem.task}; take {known}")
    sized = Model(model.sized(width, outputs), device="meta")
    training = resolve(training, sized, RowsInfo(len(problem.y), classes), selecting=True).config
    table = replace(config.table, task=cast(Literal["classification", "regression"], problem.task))
    return RunConfig(table, model, training)


def _suits(kind: type[Any], classes: bool) -> bool:
    """Return whether a loss gives a table its predictions: the numbers themselves, or probabilities of classes."""
    if classes:
        return bool(kind.classes) and kind.log_probabilities is not Loss.log_probabilities
    return not kind.classes and not kind.discrete and kind.outputs_per_target == 1


def default_for(path: str | Path, config: TableConfig) -> ModelSpec:
    """Return the model that a table gets where none is given."""
    problem = make_problem(read_table(path), config.target, task=config.task, strict=config.strict, drop=config.drop)
    return default_spec(len(Preprocessing.fit(problem.features).names()))
