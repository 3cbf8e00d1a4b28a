"""Recipes: from rows of numbers to a fitted model of one layer."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kapsi.data.tabular.split import Splits
from kapsi.errors import SpecError, TableError
from kapsi.function import Function
from kapsi.modules import Model
from kapsi.notation import short_form
from kapsi.recipes.widened import widened
from kapsi.text import counted
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.losses import Loss

__all__ = [
    "CrossFit",
    "Fold",
    "HeadRecipe",
    "LeaderboardRow",
    "Recipe",
    "RecipeData",
    "RecipePlan",
    "RecipeResult",
    "Watch",
]

Searched: TypeAlias = tuple[tuple[str, tuple[Any, ...]], ...]
"""Names of options, and values to try."""

Fold: TypeAlias = tuple[Tensor, Tensor]
"""Indices of the training rows and of the held-out rows, int64."""


@dataclass(frozen=True, eq=False)
class RecipeData:
    """The encoded training rows of a table.

    Args:
        x: inputs, `(rows, m)` float64, finite: standardized numbers and indicators.
        y: class codes `(rows,)` int64, or targets `(rows, n)` float64, in the unit that the loss requires (standardized for
            `mse`; counts for `poisson`).
        loss: the loss that selection minimizes; its outputs are logits of the classes, or (transformed) targets.
        classes: number of classes; 0 in regression.
        numeric: `(m,)` bool, true for inputs that are numbers, false for indicators (0 and 1, or shifted and scaled ones).
        weight: weights of the rows, `(rows,)` float64 with mean 1; None for equal weights.
        names: name of each input, for messages and formulas.
        groups: groups of rows that a fold does not divide, `(rows,)` int64.
        times: times of the rows, `(rows,)`: held-out rows are later than training rows.
        seed: seed of the folds.
        text: TF-IDF of the terms of texts, inputs behind those of `x`, (rows, t) SciPy CSR in float64; None without texts.
        pixels: pixels of images, inputs behind all others, `(rows, p)` uint8; None without images.
        shapes: (channels, height, width) of the images of a row, in order.
        others: whether `x` has more than the lengths of texts and the brightness of images.

    Example:
        >>> import torch, kapsi as kp
        >>> x, y = torch.rand(6, 2, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> data = RecipeData(x, y, kp.CrossEntropy(), classes=2, numeric=torch.ones(2, dtype=torch.bool))
        >>> [len(held_out) for _, held_out in data.folds(3)]
        [2, 2, 2]
    """

    x: Tensor
    y: Tensor
    loss: Loss
    classes: int
    numeric: Tensor
    weight: Tensor | None = None
    names: tuple[str, ...] = ()
    groups: Tensor | None = None
    times: Tensor | None = None
    seed: int = 0
    text: Any = None
    pixels: Tensor | None = None
    shapes: tuple[tuple[int, int, int], ...] = ()
    others: bool = True

    @property
    def inputs(self) -> int:
        """Number of inputs m of a model: those of `x`, terms, and pixels."""
        return self.x.shape[1] + sum(part.shape[1] for part in (self.text, self.pixels) if part is not None)

    def images(self) -> Tensor:
        """Return the pixels of images, `(rows, p)`; without columns if there are none."""
        return self.x.new_empty(len(self.x), 0, dtype=torch.uint8) if self.pixels is None else self.pixels

    def rows(self) -> Any:
        """Return all inputs but pixels, (rows, m) SciPy CSR."""
        from scipy.sparse import csr_matrix, hstack

        dense = csr_matrix(self.x.numpy())
        return dense if self.text is None else hstack([dense, self.text], format="csr")

    @property
    def outputs(self) -> int:
        """Number of outputs n of a model: classes, or targets."""
        return self.classes or self.y.shape[1]

    def take(self, rows: Tensor) -> Self:
        """Return a selection of the rows."""
        parts = {name: getattr(self, name) for name in ("weight", "groups", "times", "pixels")}
        taken: dict[str, Any] = {name: None if part is None else part[rows] for name, part in parts.items()}
        text = None if self.text is None else self.text[rows.numpy()]
        return replace(self, x=self.x[rows], y=self.y[rows], text=text, **taken)

    def folds(self, k: int, repetition: int = 0) -> list[Fold]:
        """Return folds with disjoint held-out rows, at most k, fewer for few groups or times; folds in time skip the first rows.

        Args:
            k: number of folds, at least 2.
            repetition: another number gives another partition, except in time.
        """
        groups, times = (None if part is None else part.numpy() for part in (self.groups, self.times))
        seed = (self.seed + repetition) % 2**32
        splits = Splits(self.y.numpy(), bool(self.classes), seed, groups, times).take(np.arange(len(self.y)))
        if splits.most < 2:
            raise TableError(f"folds: {counted(len(self.x), 'row')} cannot be divided into two folds; give more rows")
        pairs = splits.folds(min(k, splits.most))
        return [(torch.from_numpy(train), torch.from_numpy(test)) for train, test in pairs]


class CrossFit(NamedTuple):
    """Outputs of models for rows that were held out of their fit.

    Attributes:
        outputs: `(rows, n)` float64; NaN for rows in no held-out part.
        recipe: the recipe with all options chosen, to fit on all rows.
        seconds: wall-clock seconds.
    """

    outputs: Tensor
    recipe: HeadRecipe
    seconds: float


class LeaderboardRow(NamedTuple):
    """A line of the leaderboard.

    Attributes:
        head: name of the head.
        loss: loss on held-out rows; NaN if the head was skipped.
        score: accuracy or R² on held-out rows.
        seconds: wall-clock seconds of the cross-fit and the fit.
        weight: weight in the sum of heads, 0 if not selected.
        note: reason of a head left out, or a subsample; may be empty.
    """

    head: str
    loss: float
    score: float
    seconds: float
    weight: float
    note: str = ""


class RecipeResult(NamedTuple):
    """A fitted model with the record of its choice.

    Attributes:
        model: one layer, float64, outputs as the loss requires.
        leaderboard: the heads, best first.
        notes: notes for the user.
        held_out: outputs of the selected sum for held-out rows, `(rows, n)`; NaN for rows that no fold held out.
    """

    model: Model
    leaderboard: tuple[LeaderboardRow, ...]
    notes: tuple[str, ...]
    held_out: Tensor


class RecipePlan(NamedTuple):
    """What a recipe will do, estimated before any fit.

    Attributes:
        heads: seconds of comparison and fit of each head.
        skipped: reasons of the heads left out.
        rows: number of rows of the comparison.
        seconds: an estimate of all, at most the budget.
        bytes: an estimate of the memory of the largest head, besides the rows.
    """

    heads: dict[str, float]
    skipped: dict[str, str]
    rows: int
    seconds: float
    bytes: int


class Watch:
    """Receive the progress of a recipe, and keep comparisons and long fits for a resumed run; this base does neither."""

    def on_head(self, name: str) -> None:
        """Take note of the head fitted next."""

    def keep(self, name: str, crossed: CrossFit) -> None:
        """Store the comparison of a head."""

    def kept(self, name: str) -> CrossFit | None:
        """Return the comparison of a head stored by an interrupted run of the same data, recipe and seed; None without."""
        return None

    def checkpoints(self, head: HeadRecipe) -> Checkpoints | None:
        """Return the checkpoints of the fit of a chosen head; None to keep nothing."""
        return None


class Recipe(Function, role="recipe"):
    """A way to a fitted model: data in, a model of one layer out."""

    @abstractmethod
    def build(self, data: RecipeData, seed: int = 0, watch: Watch | None = None) -> RecipeResult:
        """Return the model fitted to all rows.

        Args:
            data: the rows.
            seed: seed of initial values and splits.
            watch: is told of each head before its fits, to show progress, and keeps comparisons to resume from.
        """

    @abstractmethod
    def plan(self, data: RecipeData) -> RecipePlan:
        """Return the heads, and an estimate of the seconds on an idle core."""

    def possible_heads(self) -> list[HeadRecipe]:
        """Return the heads that the model may have; none if the recipe does not state them."""
        return []


class HeadRecipe(Recipe):
    """A recipe for one head, or a few, of a layer; a subclass defines `fit`.

    Attributes:
        complexity: order of simplicity, 0 for linear; ties of selection go to smaller numbers.
        explainable: whether the head is a sum of functions of one or two inputs.
        closed_form: whether a fit is a solution of linear equations, or a few Newton steps.
        superseded: whether a more general head is offered, too: the recipe competes only where its form matters.
        reads_text: whether the head takes `x` and the terms of texts, which it needs; others take `x`.
        reads_images: whether the head takes all inputs, and needs images.
        searched: names of options with the values that `kapsi tune` tries, the default first.
    """

    complexity: ClassVar[int] = 9
    explainable: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    superseded: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False
    reads_images: ClassVar[bool] = False
    searched: ClassVar[Searched] = ()

    @classmethod
    def offered(cls) -> tuple[HeadRecipe, ...]:
        """Return the variants that `auto` compares; none for a recipe by request only."""
        return (cls(),)

    def label(self) -> str:
        """Return the name in the leaderboard, with the options that differ from the defaults."""
        return short_form(self)

    def reason_against(self, data: RecipeData) -> str | None:
        """Return why the recipe does not suit these rows, such as a loss it has no solver for; None if it does."""
        return None

    def possible_heads(self) -> list[HeadRecipe]:
        return [self]

    def residual_share(self, data: RecipeData) -> float:
        """Return an estimate of the squared error relative to the variance of the targets, without a fit; infinity without one."""
        return math.inf

    def narrowed(self, trial: Self) -> Self:
        """Return the recipe with the options of a trial on one fold that need no further trials."""
        return self

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        """Return an estimate of the CPU seconds of one fit."""
        return 0.0

    def cost(self, data: RecipeData, rows: int) -> float:
        """Return an estimate of the CPU seconds of one fit to some of the rows."""
        return self.seconds(rows, data.x.shape[1], data.outputs)

    def memory(self, data: RecipeData, rows: int) -> int:
        """Return an estimate of the bytes that a fit to some of the rows needs, besides the rows."""
        return 0

    def least_budget(self, data: RecipeData) -> float:
        """Return the seconds that the default budget has at least if the recipe suits the rows."""
        return 0.0

    def competes(self, data: RecipeData) -> bool:
        """Return whether `auto` compares the head on these rows without a request."""
        return True

    def fit_cost(self, data: RecipeData, rows: int) -> float:
        """Return an estimate of the CPU seconds of the fit of the chosen head, which may take longer than one of a comparison."""
        return self.cost(data, rows)

    def within(self, data: RecipeData, seconds: float) -> Self:
        """Return the recipe with a fit that takes some seconds at most, if an option can bring that about."""
        return self

    def fit_to_all(self, data: RecipeData, seed: int = 0, checkpoints: Checkpoints | None = None) -> Model:
        """Return `fit` as a model of all inputs, also of terms and pixels that the head does not read."""
        model = self.resumed(data if self.reads_images else replace(data, pixels=None, shapes=()), seed, checkpoints)
        return model if model.in_features == data.inputs else widened(model, data.inputs)

    @abstractmethod
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        """Return a model of one layer in float64, fitted to all rows; outputs are logits, or values as `data.y`.

        The layer has no processing of its output, and the fusion is the sum, so that models add up; see `mixture`.
        """

    def resumed(self, data: RecipeData, seed: int, checkpoints: Checkpoints | None) -> Model:
        """Return `fit`; a recipe whose fit takes minutes overrides this method, and resumes from the checkpoints."""
        return self.fit(data, seed)

    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        """Return outputs for held-out rows, and the recipe with options chosen by these.

        The default fits a model for each fold. A recipe with a path of penalties overrides it: it computes outputs for the
        whole path in each fold, and chooses by the loss of all held-out rows.
        """
        start = time.perf_counter()
        outputs = data.x.new_full((len(data.x), data.outputs), torch.nan)
        for train, test in folds:
            with torch.no_grad():
                outputs[test] = self.fit(data.take(train), seed)(data.x[test])
        return CrossFit(outputs, self, time.perf_counter() - start)

    def plan(self, data: RecipeData) -> RecipePlan:
        if reason := self.reason_against(data):
            return RecipePlan({}, {self.label(): reason}, len(data.x), 0.0, 0)
        rows = len(data.x)
        seconds = 6 * self.cost(data, rows)
        return RecipePlan({self.label(): seconds}, {}, rows, seconds, self.memory(data, rows))

    def build(self, data: RecipeData, seed: int = 0, watch: Watch | None = None) -> RecipeResult:
        if reason := self.reason_against(data):
            raise SpecError(f"recipe {self.label()}: does not suit these rows: {reason}")
        start = time.perf_counter()
        crossed = self.cross_fit(data, data.folds(5), seed)
        checkpoints = None if watch is None else watch.checkpoints(crossed.recipe)
        model = crossed.recipe.fit_to_all(data, seed, checkpoints)
        loss, score = held_out_scores(crossed.outputs, data)
        row = LeaderboardRow(type(self).name, loss, score, time.perf_counter() - start, 1.0)
        return RecipeResult(model, (row,), (), crossed.outputs)


def held_out_scores(outputs: Tensor, data: RecipeData) -> tuple[float, float]:
    """Return loss, and accuracy or R², of the rows with outputs."""
    known = ~outputs.isnan().any(1)
    out, y = outputs[known], data.y[known]
    weight = torch.ones(len(out), dtype=out.dtype) if data.weight is None else data.weight[known]
    weight = weight / weight.sum()
    loss = float(weight @ row_losses(out, y, data.loss))
    if data.classes:
        return loss, float(weight @ (out.argmax(1) == y).to(out.dtype))
    values = data.loss.decide(out).reshape(len(y), -1)
    spread = weight @ (y - weight @ y).square()
    return loss, float((1 - weight @ (values - y).square() / spread.clamp_min(1e-300)).mean())


def row_losses(outputs: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Return the loss of each row, `(rows,)`."""
    values = loss.rows(outputs, y)
    return values if values.dim() == 1 else values.mean(1)
