"""The plan of a fit: columns, rows, heads, memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from kapsi.data.tabular import TableProblem
from kapsi.data.tabular.preprocess import KIND_OF
from kapsi.explain import explain
from kapsi.modules import Model
from kapsi.recipes import RecipePlan
from kapsi.tables.configuration import RunConfig, outputs_of
from kapsi.tables.fitting import prepared
from kapsi.tables.preparation import TrainingRows
from kapsi.tables.recipe_rows import recipe_data

__all__ = ["FitPlan", "PlannedColumn", "plan_fit"]

COPIES = 3
"""Copies of the encoded table that a fit holds at once: all rows, the rows of a fold, and the features of a head."""


class PlannedColumn(NamedTuple):
    """A column of the table.

    Attributes:
        name: name of the column.
        kind: encoding: number, category, date, …
        inputs: number of inputs of the model.
        missing: number of missing values.
    """

    name: str
    kind: str
    inputs: int
    missing: int


class FitPlan(NamedTuple):
    """The work of `fit_problem`.

    Attributes:
        columns: the columns of the model.
        notes: notes on the table.
        parts: number of fits: folds, and the saved model.
        rows: training rows of the saved model.
        inputs: number of inputs of the model.
        outputs: number of outputs of the model: classes, or targets.
        recipe: heads and seconds of one part; None for a specification.
        widths: widths of a specification.
        parameters: number of parameters of a specification.
        bytes: an estimate of the memory of the encoded table and of the largest head, or of a pass of a specification.
    """

    columns: tuple[PlannedColumn, ...]
    notes: tuple[str, ...]
    parts: int
    rows: int
    inputs: int
    outputs: int
    recipe: RecipePlan | None
    widths: tuple[int, ...]
    parameters: int
    bytes: int


def plan_fit(problem: TableProblem, config: RunConfig) -> FitPlan:
    """Return the plan of a fit, without a fit.

    Args:
        problem: result of `read_problem`.
        config: options of table, model and training.

    Raises:
        KapsiError: the table or an option does not fit.
    """
    problem, config, parts = prepared(problem, config)
    train = TrainingRows.of(problem, parts[-1][1], config.training.seed).for_loss(problem, config.training.loss)
    features, count, (rows, inputs) = problem.features.columns, outputs_of(problem), train.x.shape
    columns = tuple(
        PlannedColumn(
            e.name, KIND_OF[type(e)], len(e.names()) + getattr(e, "count", 0), int(features[e.name].missing.sum())
        )
        for e in train.preprocessing.columns
    )
    plan, parameters, memory = None, 0, COPIES * _bytes(train.x)
    widths: tuple[int, ...] = ()
    if config.recipe is not None:
        plan = config.recipe.plan(recipe_data(problem, train, config.training))
        memory += plan.bytes
    elif config.model is not None:
        model = Model(config.model.sized(inputs, count), device="meta")
        widths = tuple(width for width in model.spec.widths if width is not None)
        parameters = sum(p.numel() for p in model.parameters())
        batch = getattr(config.training.solver, "batch_size", None) or rows
        memory += sum(report.bytes for report in explain(model, min(batch, rows)))
    return FitPlan(columns, problem.notes, len(parts), rows, inputs, count, plan, widths, parameters, memory)


def _bytes(x: Any) -> int:
    """Return the bytes of encoded rows: an array, or CSR with texts."""
    parts = (x.data, x.indices, x.indptr) if hasattr(x, "indptr") else (x,)
    return sum(part.nbytes for part in parts)
