"""The head of boosted trees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kapsi.function import option
from kapsi.modules import Model
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData, Searched
from kapsi.recipes.grown import (
    GrownTree,
    constant_outputs,
    derivatives,
    grow,
    growing,
    inputs_of,
    model_of,
    random_state,
    total_loss,
    weight_of,
)

__all__ = ["BoostedPairsHead", "BoostedTreesHead"]

MOST_ROWS = 20_000
"""Most rows that the splits of a tree are chosen from; the values of its leaves are those of all rows."""


@dataclass(frozen=True)
class BoostedTreesHead(HeadRecipe, name="boosted_trees"):
    """Boosted trees: f(x) = b + Σ_t v_t[leaf of x in tree t], each tree a step of gradient descent on the loss.

    The splits of tree t are those of least squares for the gradients of a random part of the rows; its leaves have values
    for all outputs, the damped Newton step v = −η Σg / (Σh + λh̄) with the sums of gradient g and curvature h of the rows in the
    leaf, and the mean curvature h̄ of the constant b. Any loss with curvature can be minimized.

    Args:
        trees: number of trees, to 10,000; None: the number with the least loss of held-out rows, up to `most_trees`.
        most_trees: the largest number that is tried.
        patience: further trees without a better loss after which no more are tried.
        learning_rate: step size η of a tree.
        depth: maximum number of splits on a path.
        min_leaf: minimum number of rows in a leaf.
        l2: penalty λ of the value of a leaf, in rows.
        subsample: fraction of the rows that the splits of a tree are chosen from.
        max_features: fraction of the inputs that each split is chosen from.
        random_trees: fraction of trees that choose each split from one random threshold of each of these inputs, as extra trees
            do; 0.5 for every second one.

    Source: Friedman, Greedy function approximation: a gradient boosting machine (2001), and Stochastic gradient boosting
        (2002); Newton steps: Chen and Guestrin, XGBoost (2016).
    """

    complexity: ClassVar[int] = 6

    searched: ClassVar[Searched] = (
        ("depth", (5, 3, 8, 12)),
        ("learning_rate", (0.1, 0.05, 0.2)),
        ("min_leaf", (2, 5, 20)),
    )

    trees: int | None = option(None, minimum=1, maximum=10_000)
    most_trees: int = option(300, minimum=1, maximum=10_000)
    patience: int = option(30, minimum=1, maximum=10_000)
    learning_rate: float = option(0.1, minimum=1e-4, maximum=1.0)
    depth: int = option(5, minimum=1, maximum=30)
    min_leaf: int = option(2, minimum=1, maximum=1_000_000)
    l2: float = option(1.0, minimum=0.0, maximum=1e6)
    subsample: float = option(0.7, minimum=0.01, maximum=1.0)
    max_features: float = option(0.5, minimum=0.001, maximum=1.0)
    random_trees: float = option(0.5, minimum=0.0, maximum=1.0)

    @classmethod
    def offered(cls) -> tuple[HeadRecipe, ...]:
        if cls is not BoostedTreesHead:
            return (cls(),)
        # Interactions without a first gain, as on a checkerboard, need deep trees with all inputs for each split.
        deep = cls(depth=12, min_leaf=5, max_features=1.0, random_trees=0.0)
        return cls(), replace(deep, learning_rate=0.3, most_trees=60, patience=10)

    def label(self) -> str:
        return f"{self.name} (depth {self.depth})" if self != type(self)() else self.name

    def reason_against(self, data: RecipeData) -> str | None:
        if not data.loss.has_curvature:
            return f"{type(self).name} needs a loss with curvature, and {data.loss.name} has none"
        return None

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        count, tried = min(rows, MOST_ROWS), self.trees or self.most_trees
        each = 4e-4 + 4e-8 * count * max(1, inputs * self.max_features) * self.depth * (1 - 0.75 * self.random_trees)
        return tried * (each + 1e-7 * rows * (self.depth + outputs))

    @torch.no_grad()
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        if self.trees is None:
            chosen = self.cross_fit(data, data.folds(5), seed).recipe
            return chosen.fit(data, seed)
        booster = _Booster(self, data, seed)
        with growing():
            for _ in range(self.trees):
                booster.step()
        return model_of(booster.trees, booster.constant, data.x.shape[1])

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        boosters = [_Booster(self, data.take(train), seed, data.take(test)) for train, test in folds]
        best, count, tried = np.inf, 0, 0
        # All folds take a step in turn, so that the number of trees is chosen by all held-out rows.
        with growing():
            while tried < (self.trees or self.most_trees) and (self.trees or tried - count < self.patience):
                loss, tried = sum(booster.step() for booster in boosters), tried + 1
                if loss < best or self.trees is not None:
                    best, count = loss, tried
        outputs = data.x.new_full((len(data.x), data.outputs), torch.nan)
        count = max(count, 1)
        for (_, test), booster in zip(folds, boosters, strict=True):
            outputs[test] = booster.held_out_outputs(count)
        return CrossFit(outputs, replace(self, trees=count), time.perf_counter() - start)


class _Booster:
    """Trees added one by one.

    Args:
        recipe: the options.
        data: the training rows.
        seed: the seed.
        held_out: rows whose loss is followed; None for none.
    """

    def __init__(
        self, recipe: BoostedTreesHead, data: RecipeData, seed: int, held_out: RecipeData | None = None
    ) -> None:
        self.recipe, self.data, self.held_out = recipe, data, held_out
        self.random = random_state(seed)
        self.x, self.weight = inputs_of(data.x), weight_of(data)
        self.constant = constant_outputs(data)
        self.outputs = self.constant.repeat(len(self.x), 1)
        self.damping = recipe.l2 * float((self.weight @ derivatives(self.outputs, data)[1]).mean() / len(self.x))
        self.trees: list[GrownTree] = []
        if held_out is not None:
            self.x_held_out = inputs_of(held_out.x)
            self.followed = self.constant.repeat(len(self.x_held_out), 1)

    def step(self) -> float:
        """Add a tree; return the summed loss of the held-out rows, or 0 without."""
        recipe, count, number = self.recipe, len(self.x), len(self.trees)
        gradient, curvature = derivatives(self.outputs, self.data)
        rows = self.random.permutation(count)[: max(1, min(MOST_ROWS, int(recipe.subsample * count)))]
        # Two classes have opposite gradients.
        targets = gradient[:, :1] if self.data.classes == 2 and self.data.loss.shift_invariant else gradient
        tree = grow(
            self.x[rows],
            -targets[rows].numpy(),
            None if self.data.weight is None else self.data.weight[rows].numpy(),
            self.random,
            random_splits=int((number + 1) * recipe.random_trees) > int(number * recipe.random_trees),
            max_depth=recipe.depth,
            min_samples_leaf=recipe.min_leaf,
            max_features=recipe.max_features,
        )
        leaf = torch.from_numpy(tree.apply(self.x))
        zeros = torch.zeros(tree.node_count, gradient.shape[1], dtype=torch.float64)
        weight = self.weight[:, None]
        top = zeros.index_add(0, leaf, weight * gradient)
        bottom = zeros.index_add(0, leaf, weight * curvature)
        added = GrownTree(tree, top * (-recipe.learning_rate) / (bottom + self.damping).clamp_min(1e-12))
        self.trees.append(added)
        self.outputs += added.values[leaf]
        if self.held_out is None:
            return 0.0
        self.followed += added(self.x_held_out)
        return total_loss(self.followed, self.held_out)

    def held_out_outputs(self, count: int) -> Tensor:
        """Return the outputs of the first trees for the held-out rows."""
        outputs = self.constant.repeat(len(self.x_held_out), 1)
        for tree in self.trees[:count]:
            outputs += tree(self.x_held_out)
        return outputs


@dataclass(frozen=True)
class BoostedPairsHead(BoostedTreesHead, name="boosted_pairs"):
    """Boosted trees of at most two splits on a path: a sum of functions of one or two inputs; see `BoostedTreesHead`."""

    complexity: ClassVar[int] = 5
    superseded: ClassVar[bool] = True
    explainable: ClassVar[bool] = True

    searched = ()

    depth: int = option(2, minimum=1, maximum=2)
    learning_rate: float = option(0.15, minimum=1e-4, maximum=1.0)
