"""Fit rows of a table by a recipe."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kapsi.data.tabular import Reading, TableProblem
from kapsi.recipes.base import Recipe, RecipeData, RecipeResult
from kapsi.tables.model import TableModel
from kapsi.tables.preparation import TrainingRows
from kapsi.tables.ranges import Ranges
from kapsi.training.losses import Loss

__all__ = ["FittedRecipe", "fit_recipe", "recipe_data", "table_model"]


class FittedRecipe(NamedTuple):
    """A model fitted by a recipe.

    Attributes:
        model: the model with preprocessing.
        result: the record of the choice; its `model` is that of `model`.
    """

    model: TableModel
    result: RecipeResult


def fit_recipe(problem: TableProblem, train: TrainingRows, recipe: Recipe, loss: Loss, seed: int = 0) -> FittedRecipe:
    """Fit a model to training rows by a recipe.

    Args:
        problem: features and target.
        train: the training rows.
        recipe: the recipe.
        loss: the loss that the recipe minimizes.
        seed: seed of folds and initial values.
    """
    result = recipe.build(recipe_data(problem, train, loss, seed), seed)
    return FittedRecipe(table_model(problem, train, result.model), result)


def recipe_data(problem: TableProblem, train: TrainingRows, loss: Loss, seed: int = 0) -> RecipeData:
    """Return training rows as data of a recipe; folds respect groups and times.

    Args:
        problem, train, loss, seed: see `fit_recipe`.
    """
    ways = problem.splits(seed)
    groups, times = (None if part is None else torch.from_numpy(part[train.rows]) for part in (ways.groups, ways.times))
    x = torch.from_numpy(train.x)
    low, high = x.aminmax(dim=0)
    weight = None if train.weight is None else torch.from_numpy(train.weight / train.weight.mean())
    y = train.y if problem.classes is not None else train.y.reshape(len(train.rows), -1)
    return RecipeData(
        x=x,
        y=torch.from_numpy(y),
        loss=loss,
        classes=len(problem.classes or ()),
        numeric=~((x == low) | (x == high)).all(0),
        weight=weight,
        names=tuple(train.preprocessing.names()),
        groups=groups,
        times=times,
        seed=seed,
    )


def table_model(
    problem: TableProblem,
    train: TrainingRows,
    model: torch.nn.Module,
    reading: Reading | None = None,
    weight: str | None = None,
) -> TableModel:
    """Return a fitted model with the preprocessing and the ranges of its training rows.

    Args:
        problem: features and target.
        train: the training rows.
        model: maps inputs to logits, or to standardized targets.
        reading: how tables are read.
        weight: name of the column of weights.
    """
    known = train.preprocessing.check(problem.features.take(train.rows))[0]
    several = problem.classes is not None or problem.y.ndim > 1
    ranges = Ranges.fit(known, None if several else np.asarray(problem.y[train.rows]))
    coding = (
        problem.target,
        problem.task,
        problem.classes,
        train.scale,
        ranges,
        reading or Reading(),
        problem.decimal,
        weight,
    )
    return TableModel(model.requires_grad_(True), train.preprocessing, *coding)  # type: ignore[arg-type]
