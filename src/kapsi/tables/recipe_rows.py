"""Fit rows of a table by a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from kapsi.data.tabular import Reading, TableProblem
from kapsi.errors import DataError, SpecError
from kapsi.recipes.base import Recipe, RecipeData, RecipeResult, Watch
from kapsi.tables.configuration import check_loss
from kapsi.tables.model import TableModel
from kapsi.tables.preparation import TrainingRows
from kapsi.tables.ranges import Ranges
from kapsi.tables.target_choice import choose_target, corrected
from kapsi.training.config import TrainConfig
from kapsi.training.resolve import resolve_loss
from kapsi.training.threads import threads_for

__all__ = ["FittedRecipe", "fit_recipe", "recipe_data", "table_model"]

COLUMNS = 400
"""Columns of the widest κ of most tables, those of the head `kernel`."""


class FittedRecipe(NamedTuple):
    """A model fitted by a recipe.

    Attributes:
        model: the model with preprocessing.
        result: the record of the choice; its `model` is that of `model`.
    """

    model: TableModel
    result: RecipeResult


def fit_recipe(
    problem: TableProblem,
    train: TrainingRows,
    recipe: Recipe,
    training: TrainConfig,
    watch: Watch | None = None,
) -> FittedRecipe:
    """Fit a model to training rows by a recipe.

    Args:
        problem: features and target.
        train: the training rows.
        recipe: the recipe.
        training: loss, class weights and seed.
        watch: see `Recipe.build`.
    """
    check_loss(problem, training.loss)
    train = train.for_loss(problem, training.loss)
    data = recipe_data(problem, train, training)
    if data.weight is not None and not bool(data.weight.all()):  # rows of weight 0 would fill folds
        rows = data.weight.nonzero()[:, 0]
        data, train = data.take(rows), train.take(rows.numpy())
    note = ""
    with threads_for(len(data.x) * max(data.inputs, COLUMNS)):
        if training.loss == "auto" and problem.classes is None and problem.y.ndim == 1:
            y = problem.y[train.rows].astype(np.float64)
            choice = choose_target(data, y, train.weight, str(problem.target), recipe.possible_heads())
            train = replace(train, y=choice.scale.apply(y), scale=choice.scale)
            data, note = replace(data, y=torch.from_numpy(train.y).reshape(-1, 1), loss=choice.loss), choice.note
        result = recipe.build(data, training.seed, watch)
    if note:  # the correction after a logarithm is that of the model, not of the heads that the choice was made with
        train = replace(train, scale=corrected(choice.scale, result.held_out, y, train.weight))
    texts = [text.note() for text in train.preprocessing.texts]
    texts += [image.note() for image in train.preprocessing.images]
    result = result._replace(notes=(*texts, *filter(None, [note]), *result.notes))
    return FittedRecipe(table_model(problem, train, result.model), result)


def recipe_data(problem: TableProblem, train: TrainingRows, training: TrainConfig) -> RecipeData:
    """Return training rows as data of a recipe; folds respect groups and times.

    Args:
        problem, train, training: see `fit_recipe`.
    """
    classes = len(problem.classes or ())
    ways = problem.splits(training.seed)
    groups, times = (None if part is None else torch.from_numpy(part[train.rows]) for part in (ways.groups, ways.times))
    names, images = tuple(train.preprocessing.dense_names()), train.preprocessing.images
    inputs, text, pixels = _parts(train, len(names))
    x, y = torch.from_numpy(inputs), torch.from_numpy(train.y)
    low, high = x.aminmax(dim=0)
    weight = None if train.weight is None else torch.from_numpy(train.weight)
    return RecipeData(
        x=x,
        y=y if classes else y.reshape(len(y), -1),
        loss=resolve_loss(training.loss, bool(classes)),
        classes=classes,
        numeric=~((x == low) | (x == high)).all(0),
        weight=_row_weights(weight, y, training, classes),
        names=names,
        groups=groups,
        times=times,
        seed=training.seed,
        text=text,
        pixels=pixels,
        shapes=tuple(column.shape for column in images),
        others=len(train.preprocessing.texts) + len(images) < len(train.preprocessing.columns),
    )


def _parts(train: TrainingRows, dense: int) -> tuple[Any, Any, torch.Tensor | None]:
    """Return dense inputs in float64, terms of texts, and pixels of images as uint8."""
    if not train.preprocessing.texts and not train.preprocessing.images:
        return train.x, None, None
    end = train.x.shape[1] - sum(column.count for column in train.preprocessing.images)
    inputs, terms, pixels = train.x[:, :dense], train.x[:, dense:end], train.x[:, end:]
    if train.preprocessing.texts:
        inputs, pixels = inputs.toarray(), pixels.toarray()
    whole = torch.from_numpy(pixels).to(torch.uint8) if train.preprocessing.images else None
    return inputs.astype(np.float64), terms if train.preprocessing.texts else None, whole


def _row_weights(
    weight: torch.Tensor | None, y: torch.Tensor, training: TrainConfig, classes: int
) -> torch.Tensor | None:
    """Return the weights of rows times those of their classes, with mean 1; None for equal weights."""
    of_classes = training.class_weights
    if of_classes is not None:
        if not classes:
            raise SpecError("training.class_weights: the target has real values, no classes; leave them out")
        if of_classes == "balanced":
            counts = torch.bincount(y, weight, minlength=classes).double()
            factors = torch.where(counts > 0, counts.sum() / counts.clamp_min(1e-300), 0.0)
        else:
            factors = torch.tensor(of_classes, dtype=torch.float64)
            if len(factors) != classes:
                raise SpecError(
                    f"training.class_weights: {len(factors)} weights for {classes} classes; give one for each"
                )
        weight = factors[y] if weight is None else weight * factors[y]
    if weight is None:
        return None
    if not bool(weight.any()):
        raise DataError(
            "training.class_weights: all training rows have the weight 0; give a class with rows a weight above 0"
        )
    weight = weight / weight.max()  # sums of huge weights overflow
    return weight / weight.mean()


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
    known = train.preprocessing.check(problem.features)[0]
    ranges = Ranges.fit(known, None if problem.classes is not None else np.asarray(problem.y[train.rows]), train.rows)
    coding = (
        problem.target,
        problem.task,
        problem.classes,
        train.scale,
        ranges,
        reading or Reading(),
        problem.decimal,
        weight,
        problem.units if any(problem.units) else (),
    )
    return TableModel(model.requires_grad_(True), train.preprocessing, *coding)  # type: ignore[arg-type]
