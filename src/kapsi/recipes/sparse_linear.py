"""A linear head of few inputs, for wide tables where most columns are noise."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.expansion import Identity, SelectedInputs
from kapsi.function import option
from kapsi.modules import Model
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData, row_losses
from kapsi.recipes.linear import LinearHead
from kapsi.recipes.linear_in_parameters import LinearProblem, assign, columns_of, one_layer, sample
from kapsi.spec import HeadSpec
from kapsi.text import counted

__all__ = ["SparseLinearHead"]

COUNTS = (1, 2, 3, 5, 8, 12, 20, 32, 50, 80)
"""Candidates for the number of inputs."""

FEW_INPUTS = 30
"""Number of inputs up to which a linear head with all inputs is as good."""

DEPTH = 0.02
"""Weakest penalty of the lasso path, relative to the weakest penalty that excludes all inputs."""

SCREENED = 10_000
"""Maximum number of inputs on the path: the largest correlations with the target."""

MANY_CLASSES = 10
"""Number of classes above which inputs are ordered by correlation alone."""


@dataclass(frozen=True)
class SparseLinearHead(HeadRecipe, name="sparse_linear"):
    """A linear function of few inputs: the first ones of the lasso's path, with the coefficients of a linear head.

    The lasso only orders the inputs, by squares (of classes: of zeros and ones for each class), so the coefficients are not
    shrunk twice. Of more than 10,000 inputs it takes those with the largest correlations with the target. Held-out rows choose
    the number of inputs and the penalty.

    Args:
        inputs: number of inputs; None: 1 to 80, chosen by held-out rows.
        l2: see `LinearHead`; None: chosen by held-out rows.
    """

    complexity: ClassVar[int] = 1
    explainable: ClassVar[bool] = True
    closed_form: ClassVar[bool] = True

    inputs: int | None = option(None, minimum=1, maximum=10_000)
    l2: float | None = option(None, minimum=1e-12, maximum=1e12)

    def reason_against(self, data: RecipeData) -> str | None:
        if data.x.shape[1] <= FEW_INPUTS:
            return f"{counted(data.x.shape[1], 'input')}; sparse_linear chooses among more than {FEW_INPUTS}"
        return LinearHead().reason_against(data)

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        return 0.05 + 5e-7 * min(rows, 4_000) * inputs * min(outputs, MANY_CLASSES) + 1e-7 * rows * outputs

    @torch.no_grad()
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        recipe = self
        if self.inputs is None or self.l2 is None:
            recipe = self.cross_fit(data, data.folds(5, 0), seed).recipe  # type: ignore[assignment]
        chosen = ordered_inputs(data)[: recipe.inputs]
        problem = LinearProblem(LinearHead(), _narrow(data, chosen), seed)
        matrix, bias = problem.solution(recipe.l2 or 1e-12)
        head = HeadSpec(SelectedInputs(Identity(), count=len(chosen)), bias=True)
        model, built = one_layer(head, data, seed)
        built.assign("expansion", selection=chosen)
        assign(model, matrix, bias)
        return model

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        head = LinearHead(l2=self.l2)
        orders = [ordered_inputs(data.take(train)) for train, _ in folds]
        most = min(data.x.shape[1], min(len(train) for train, _ in folds))
        counts = (self.inputs,) if self.inputs else tuple(count for count in COUNTS if count <= most)
        best: tuple[float, SparseLinearHead, Tensor] = (math.inf, self, data.x)
        for count in counts:
            losses: list[dict[float, float]] = []
            outputs: list[dict[float, Tensor]] = []
            for (train, test), order in zip(folds, orders, strict=True):
                narrow = _narrow(data, order[:count])
                problem = LinearProblem(head, narrow.take(train), seed)
                (phi,) = [torch.cat(list(columns_of(problem.model, narrow.x[test])()))]
                weight = torch.ones(len(test), dtype=phi.dtype) if data.weight is None else data.weight[test]
                penalties = head.path(problem)
                fits = dict(zip(penalties, problem.path(penalties, 1e-4), strict=True))
                outputs.append({penalty: phi @ matrix + bias for penalty, (matrix, bias) in fits.items()})
                losses.append(
                    {p: float(weight @ row_losses(o, data.y[test], data.loss)) for p, o in outputs[-1].items()}
                )
            for penalty in set.intersection(*map(set, losses)):
                total = sum(loss[penalty] for loss in losses)
                if total < best[0]:
                    held_out = data.x.new_full((len(data.x), data.outputs), torch.nan)
                    for (_, test), values in zip(folds, outputs, strict=True):
                        held_out[test] = values[penalty]
                    best = total, replace(self, inputs=count, l2=penalty), held_out
        return CrossFit(best[2], best[1], time.perf_counter() - start)


def _narrow(data: RecipeData, chosen: Tensor) -> RecipeData:
    """Return the rows with some of the inputs."""
    names = tuple(data.names[i] for i in chosen.tolist()) if data.names else ()
    return replace(data, x=data.x[:, chosen], numeric=data.numeric[chosen], names=names)


def ordered_inputs(data: RecipeData) -> Tensor:
    """Return the inputs in order of entry to the lasso path, at most 200, `(k,)`."""
    from sklearn.linear_model import lasso_path

    data = sample(data)
    weight = torch.ones(len(data.x), dtype=torch.float64) if data.weight is None else data.weight
    root = (weight / weight.sum()).sqrt()[:, None]
    y = F.one_hot(data.y, data.classes).double()[:, int(data.classes == 2) :] if data.classes else data.y
    # Noise correlates with rare classes, too: classes are weighted by standard deviation.
    importance = ((root.T.square() @ (y - root.T.square() @ y).square()).sqrt() if data.classes else y[:1] * 0 + 1)[0]
    x, y = (_unit(values, root) for values in (data.x, y))
    correlations = ((x.T @ y).abs() * importance).amax(1)
    entry = 1e-3 * correlations  # behind all that the path reaches
    screened = torch.arange(len(entry))
    if len(entry) > SCREENED:
        screened = correlations.topk(SCREENED).indices.sort().values
        x = x[:, screened]
    for i in range(y.shape[1] if y.shape[1] <= MANY_CLASSES else 0):
        largest = float((x.T @ y[:, i]).abs().max())
        if largest > 1e-9:
            alphas = largest / len(x) * torch.logspace(0, math.log10(DEPTH), 25, dtype=torch.float64).numpy()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the order needs no exact minimum
                _, path, _ = lasso_path(x.numpy(), y[:, i].numpy(), alphas=alphas, tol=1e-2)
            active = torch.from_numpy(path != 0)
            alpha = largest * DEPTH ** (active.double().argmax(1) / (active.shape[1] - 1))
            entry[screened] = torch.maximum(entry[screened], importance[i] * alpha * active.any(1))
    return entry.argsort(descending=True, stable=True)[: min(200, int((entry > 0).sum()) or 1)]


def _unit(values: Tensor, root: Tensor) -> Tensor:
    """Return centered columns of length 1, times the roots of the row weights; constant columns are 0."""
    centered = (values - root.T.square() @ values) * root
    length = centered.norm(dim=0)
    return centered / torch.where(length > 1e-7 * values.abs().amax(0), length, torch.inf)
