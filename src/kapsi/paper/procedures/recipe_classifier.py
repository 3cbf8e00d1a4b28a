"""Heads of `kapsi.recipes` as a kind of classifier: the same fits as those of `kapsi fit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.modules import trained_count
from kapsi.paper.procedures.classifier_kinds import ClassifierKind, ClassifierTask, FittedClassifier, Labels
from kapsi.recipes import HeadRecipe, RecipeData
from kapsi.training.losses import CrossEntropy
from kapsi.training.rows.stored import of_scipy

ROWS = 4096
"""Rows of a prediction at once."""


@dataclass(frozen=True, kw_only=True)
class RecipeClassifier(ClassifierKind):
    """`recipe`: a head of `kapsi.recipes`, such as `text_naive_bayes` or `image_products`.

    Sparse rows are terms of texts, rows in uint8 are pixels (of images, `inputs: pixels`), other rows are numbers.

    Args:
        recipe: the head.
    """

    recipe: HeadRecipe

    @property
    def passes(self) -> int | None:
        return getattr(self.recipe, "epochs", None)

    def dry_run(self, inputs: int, classes: int, where: str, *, sparse: bool = False) -> None:
        if self.recipe.reads_text != sparse:
            kind = "texts" if self.recipe.reads_text else "other rows than texts"
            raise SpecError(f"{where}.recipe: {self.recipe.label()} is for {kind}")

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        data = self._data(task)
        if reason := self.recipe.reason_against(data):
            raise SpecError(f"{task.where}.recipe: {self.recipe.label()} does not suit these rows: {reason}")
        with torch.no_grad():
            model = self.recipe.fit_to_all(data, task.seed)

        def predict(x: Any) -> Labels:
            parts = [_inputs(x[start : start + ROWS]) for start in range(0, x.shape[0], ROWS)]
            with torch.no_grad():
                labels: Labels = torch.cat([model(part).argmax(1) for part in parts]).numpy()
            return labels

        return FittedClassifier(predict, trained_count(model))

    def _data(self, task: ClassifierTask) -> RecipeData:
        """Return the rows as those of a table with one column of texts or images, or with numbers only."""
        dense = isinstance(task.x, np.ndarray)
        pixels = torch.from_numpy(task.x) if dense and task.x.dtype == np.uint8 else None
        numbers = torch.zeros(len(task.y), 0, dtype=torch.float64)
        if dense and pixels is None:
            numbers = torch.from_numpy(task.x).double()
        return RecipeData(
            numbers,
            torch.from_numpy(np.asarray(task.y)),
            CrossEntropy(),
            task.classes,
            torch.ones(numbers.shape[1], dtype=torch.bool),
            text=None if dense else task.x.astype(np.float64),
            pixels=pixels,
            shapes=() if task.shape is None or pixels is None else (task.shape,),
            seed=task.seed,
        )


def _inputs(x: Any) -> Tensor:
    """Return inputs of a model in float64."""
    return torch.from_numpy(x).double() if isinstance(x, np.ndarray) else of_scipy(x.astype(np.float64), "inputs")
