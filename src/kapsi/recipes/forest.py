"""The head of a forest."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.function import option
from kapsi.modules import Model
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData
from kapsi.recipes.grown import (
    GrownTree,
    constant_outputs,
    grow,
    growing,
    inputs_of,
    model_of,
    random_state,
    total_loss,
    weight_of,
)

__all__ = ["ForestHead"]

MOST_ROWS = 20_000
"""Most rows that a tree is grown from."""

SCALES = tuple(2 ** (i / 4) for i in range(-8, 17))
"""Candidates for the scale of logits."""

SMOOTHING = (0.3, 1.0, 4.0)
"""Candidates for the smoothing of class shares."""


@dataclass(frozen=True)
class ForestHead(HeadRecipe, name="extra_trees"):
    """Extra trees: f(x) = b + a · mean over trees of v_t[leaf of x in tree t].

    For real targets v is the mean of the targets in the leaf, and a = 1. For classes v is the logarithm of the class shares
    in the leaf, relative to those of all rows and smoothed by α rows of these; the mean of logarithms has no 0 and needs a
    scale a, chosen by the loss of held-out rows.

    Args:
        trees: number of trees.
        min_leaf: minimum number of rows in a leaf.
        max_features: fraction of the inputs that a split is chosen from; None: all for real targets, otherwise the root of
            their number.
        smoothing: α, in rows; None: chosen by the loss of held-out rows.
        scale: a; None: chosen by the loss of held-out rows.

    Source: Geurts, Ernst and Wehenkel, Extremely randomized trees (2006).
    """

    complexity: ClassVar[int] = 6

    searched = (("min_leaf", (2, 1, 5, 20)), ("max_features", (None, 0.2, 0.5, 1.0)))

    trees: int = option(100, minimum=1, maximum=10_000)
    min_leaf: int = option(2, minimum=1, maximum=1_000_000)
    max_features: float | None = option(None, minimum=0.001, maximum=1.0)
    smoothing: float | None = option(None, minimum=1e-6, maximum=1e6)
    scale: float | None = option(None, minimum=1e-6, maximum=1e6)

    def reason_against(self, data: RecipeData) -> str | None:
        if not (data.loss.closed_form or data.loss.shift_invariant):
            return f"{type(self).name} averages targets or class shares, which does not minimize {data.loss.name}"
        return None

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        count = min(rows, MOST_ROWS)
        share = self.max_features or (1.0 if outputs == 1 else inputs**-0.5)
        features = share * inputs
        splits = count / (2 * self.min_leaf) * 2e-7 * features  # a threshold of each input is drawn for each split
        sorting = 2e-8 * count * math.log2(count + 2) * (features + outputs)
        return self.trees * (6e-4 + sorting + splits + 2e-7 * rows)

    @torch.no_grad()
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        if data.classes and (self.scale is None or self.smoothing is None):
            return self.cross_fit(data, data.folds(5), seed).recipe.fit(data, seed)
        forest = _Forest(self, data, seed)
        factor = (self.scale or 1.0) / self.trees if data.classes else 1 / self.trees
        trees = [
            GrownTree(tree, factor * forest.values(i, self.smoothing or 1.0)) for i, tree in enumerate(forest.trees)
        ]
        return model_of(trees, forest.constant, data.x.shape[1])

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        smoothing = SMOOTHING if self.smoothing is None else (self.smoothing,)
        smoothing = smoothing if data.classes else (1.0,)
        scales = SCALES if self.scale is None else (self.scale,)
        scales = scales if data.classes else (1.0,)
        raw = data.x.new_full((len(smoothing), len(data.x), data.outputs), torch.nan)
        constants = torch.full_like(raw[0], torch.nan)
        for train, test in folds:
            forest = _Forest(self, data.take(train), seed)
            constants[test] = forest.constant
            raw[:, test] = forest(data.x[test], smoothing)
        known = torch.cat([test for _, test in folds])
        rows = data.take(known)
        _, chosen, scale = min(
            (total_loss(constants[known] + a * raw[i, known], rows), i, a)
            for i in range(len(smoothing))
            for a in scales
        )
        recipe = replace(self, scale=scale, smoothing=smoothing[chosen]) if data.classes else self
        return CrossFit(constants + scale * raw[chosen], recipe, time.perf_counter() - start)


class _Forest:
    """Trees with the sums of the targets of the rows in each node.

    Args:
        recipe: the options.
        data: the rows.
        seed: the seed.
    """

    def __init__(self, recipe: ForestHead, data: RecipeData, seed: int) -> None:
        random, self.classes = random_state(seed), data.classes
        x, weight, self.constant = inputs_of(data.x), weight_of(data)[:, None], constant_outputs(data)
        y = F.one_hot(data.y, data.classes).double() if data.classes else data.y - self.constant
        share = recipe.max_features or (data.x.shape[1] ** -0.5 if data.classes else 1.0)
        self.trees: list[Any] = []
        self.sums: list[tuple[Tensor, Tensor]] = []
        with growing():
            for _ in range(recipe.trees):
                rows = random.permutation(len(x))[:MOST_ROWS] if len(x) > MOST_ROWS else np.arange(len(x))
                tree = grow(
                    x[rows],
                    y[rows].numpy(),
                    None if data.weight is None else data.weight[rows].numpy(),
                    random,
                    random_splits=True,
                    min_samples_leaf=recipe.min_leaf,
                    max_features=share,
                )
                leaf = torch.from_numpy(tree.apply(x))
                count = torch.zeros(tree.node_count, 1, dtype=torch.float64).index_add(0, leaf, weight)
                sums = torch.zeros(tree.node_count, y.shape[1], dtype=torch.float64).index_add(0, leaf, weight * y)
                self.trees.append(tree)
                self.sums.append((sums, count))

    def values(self, number: int, smoothing: float) -> Tensor:
        """Return the values of the nodes of a tree, relative to the constant, `(nodes, n)`."""
        sums, count = self.sums[number]
        if not self.classes:
            return sums / count.clamp_min(1e-300)
        prior = self.constant.softmax(0)
        return ((sums + smoothing * prior) / (count + smoothing)).log() - prior.log()

    def __call__(self, x: Tensor, smoothing: Sequence[float]) -> Tensor:
        """Return the mean over trees for rows and each smoothing, `(smoothing, rows, n)`."""
        rows = inputs_of(x)
        total = x.new_zeros(len(smoothing), len(x), len(self.constant))
        for number, tree in enumerate(self.trees):
            leaf = torch.from_numpy(tree.apply(rows))
            for result, alpha in zip(total, smoothing, strict=True):
                result += self.values(number, alpha)[leaf]
        return total / len(self.trees)
