"""The automatic model: heads fitted by their own solvers, weighted on held-out rows, summed to one layer."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kapsi.clock import Stopwatch
from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.function import catalogue, option
from kapsi.modules import Model
from kapsi.recipes.base import (
    CrossFit,
    Fold,
    HeadRecipe,
    LeaderboardRow,
    Recipe,
    RecipeData,
    RecipePlan,
    RecipeResult,
    Watch,
    held_out_scores,
    row_losses,
)
from kapsi.recipes.constant import ConstantHead
from kapsi.recipes.mixture import mixture
from kapsi.recipes.selection import Selected, select_heads

__all__ = ["Auto"]

FEW_ROWS = 300
"""Rows below which the folds are repeated: selection on one partition is noisy."""

MANY_ROWS = 5_000
"""Rows above which three folds are enough."""

ESTIMATED = 0.5
"""Measured seconds of comparisons over the estimates of the heads, which are those of a busy machine."""

SECONDS = 12.0, 60.0
"""Least and most of the default budget up to 5 million numbers of inputs: a second for each hundred rows and output."""

TRIED = 0.7
"""Part of the time of a comparison of all heads on all folds; some heads are left out after the first one."""

COMPARISON = 0.7
"""Part of the budget for the comparison; the rest is for the fits of the chosen heads."""

PER_MILLION, MOST_SECONDS = 12.0, 300.0
"""Seconds of the default budget for each million numbers of inputs beyond, and their maximum."""

LEAST_ROWS = 2_000
"""Rows down to which the rows of the comparison are halved to keep the budget."""

TIES = {"accuracy": 0.1, "explainable": 0.1, "small": 1.0, "fast": 0.5}
"""Standard errors of the paired difference of losses up to which fewer heads win."""

AVERAGED = {"accuracy": 0.5, "explainable": 0.5, "small": 0.0, "fast": 0.0}
"""Part of the weights that is equal for the heads close to the best, see `select_heads`."""

SMALL = 3
"""Largest complexity of a head with `prefer="small"`: no trees, centers or networks."""


RACED = 4
"""Number of heads above which some are left out after the first fold."""

CONTENDERS, CLOSE = 7, 2.0
"""Most heads close to the best on the first held-out rows that stay, next to those with weights there, and the difference that is
close, in standard errors."""

REPEATED = 3, 0.5
"""The same where these are all rows: the other heads keep their outputs for them."""

MARGIN, MARGIN_ROWS = 0.1, 10.0
"""Part of the range of the targets by which predictions may leave it, and its addition times the number of rows: few rows do not
show the range."""


@dataclass(frozen=True)
class Auto(Recipe, name="auto"):
    """Choose and weight heads: f(x) = Σ_h a_h f_h(x), a_h ≥ 0, one layer.

    All heads are fitted on the same inner folds; weights come from greedy selection on the outputs for held-out rows (see
    `select_heads`); the chosen heads are fitted again on all rows. The constant is always a candidate.

    Args:
        prefer: `accuracy`: all heads; `explainable`: sums of functions of one or two inputs; `small`: few parameters, and
            the fewest heads within one standard error; `fast`: heads in closed form, three folds.
        budget: seconds for comparison and fit, an estimate; costlier heads are compared on fewer rows, or left out, and the
            leaderboard says so. None: 12 to 60 seconds by the numbers of rows and outputs, up to 300 for large tables.
        heads: the heads to choose from, by name or as recipes; empty: all that suit the rows. Without `budget`, all of them
            are compared.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.recipes import RecipeData
        >>> x = torch.rand(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> data = RecipeData(x, x @ x.new_tensor([[1.0], [2.0], [0.0]]), kp.MSE(), 0, torch.ones(3, dtype=torch.bool))
        >>> result = Auto(heads=("linear",)).build(data)
        >>> result.leaderboard[0].score > 0.99, len(result.model.layers)
        (True, 1)
    """

    prefer: Literal["accuracy", "explainable", "small", "fast"] = "accuracy"
    budget: float | None = option(None, minimum=0.1)
    heads: tuple[HeadRecipe, ...] = ()

    def check(self) -> None:
        if len(set(self.heads)) < len(self.heads):
            raise SpecError("Auto(heads=…): a head is given twice; leave one out")

    def build(self, data: RecipeData, seed: int = 0, watch: Watch | None = None) -> RecipeResult:
        return _AutoSearch(self, data, seed, watch or Watch()).result()

    def plan(self, data: RecipeData) -> RecipePlan:
        return _AutoSearch(self, data, 0, Watch()).plan()

    def possible_heads(self) -> list[HeadRecipe]:
        """Return the heads to compare, the simplest first; always with the constant."""
        heads = list(self.heads) or [h for kind in offered_kinds() for h in kind.offered()]
        if not self.heads:
            heads = [head for head in heads if self._prefers(head)]
        others = [head for head in heads if not isinstance(head, ConstantHead)]
        return [ConstantHead(), *sorted(others, key=lambda head: head.complexity)]

    def _prefers(self, head: HeadRecipe) -> bool:
        return {
            "accuracy": not head.superseded,
            "explainable": head.explainable,
            "small": head.complexity <= SMALL,
            "fast": head.closed_form,
        }[self.prefer]


def offered_kinds() -> list[type[HeadRecipe]]:
    """Return the kinds of heads that the automatic model chooses from."""
    return [kind for kind in catalogue("recipe") if issubclass(kind, HeadRecipe)]


class _Compared(NamedTuple):
    """A head in the comparison.

    Attributes:
        name: name in the leaderboard.
        recipe: the recipe with options chosen on held-out rows.
        outputs: outputs for held-out rows, of all repetitions one after the other.
        seconds: wall-clock seconds.
    """

    name: str
    recipe: HeadRecipe
    outputs: Tensor
    seconds: float


@dataclass
class _AutoSearch:
    """One run of the recipe `auto`."""

    auto: Auto
    data: RecipeData
    seed: int
    watch: Watch
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    fitted_on: dict[str, str] = field(default_factory=dict)
    least_budget: float = 0.0
    resumed: float = 0.0

    def result(self) -> RecipeResult:
        start, clock = time.perf_counter(), Stopwatch()
        heads = self._suited()
        self.least_budget = self._least_budget(heads)
        compared = self._compared(heads)
        rows = self.data if compared is None else self.data.take(compared)
        plan = self._folds(rows)
        y, weight, known = _stacked(rows, plan)
        entries = self._entries(heads, rows, plan, known, clock)
        outputs = [_bounded(entry.outputs, rows) for entry in entries]
        complexity = [entry.recipe.complexity for entry in entries]
        select = partial(
            select_heads,
            loss=rows.loss,
            complexity=complexity,
            tie=TIES[self.auto.prefer],
            average=AVERAGED[self.auto.prefer],
        )
        chosen = select(outputs, y, weight)
        model, seconds = self._fitted(entries, chosen.weights)
        stacked = replace(rows, x=rows.x[:0], y=y, weight=weight)
        board = []
        for entry, out, share, more in zip(entries, outputs, chosen.weights, seconds, strict=True):
            loss, score = held_out_scores(out, stacked)
            note = self.fitted_on.get(entry.name, "")
            board.append(LeaderboardRow(entry.name, loss, score, entry.seconds + more, share, note))
        total = _crossed(outputs, y, weight, known % len(rows.x), plan, select)
        loss, score = held_out_scores(total, stacked)
        whole = LeaderboardRow("sum", loss, score, time.perf_counter() - start, 1.0)
        left_out = [LeaderboardRow(name, math.nan, math.nan, 0.0, 0.0, why) for name, why in self.skipped.items()]
        board = [whole, *sorted(board, key=lambda row: row.loss), *left_out]
        held_out = self._held_out(total, plan, compared)
        return RecipeResult(model, tuple(board), tuple(self.notes), held_out)

    def plan(self) -> RecipePlan:
        """Return the heads of the comparison and the estimated seconds, without a fit."""
        heads = self._suited()
        self.least_budget = self._least_budget(heads)
        compared = self._compared(heads)
        rows = len(self.data.x) if compared is None else len(compared)
        share = (1 - COMPARISON) * self.budget
        fitted = {name: self._rows_of_fit(head, share) for name, head in heads.items()}
        fits = {name: self._fit_seconds(head, fitted[name]) for name, head in heads.items()}
        seconds = {name: self._cost({name: head}, rows) + fits[name] for name, head in heads.items()}
        memory = max(head.memory(self.data, fitted[name]) for name, head in heads.items())
        return RecipePlan(seconds, self.skipped, rows, min(sum(seconds.values()), self.budget), memory)

    @property
    def budget(self) -> float:
        """Seconds."""
        if self.auto.budget is not None:
            return self.auto.budget
        rows, millions = len(self.data.x), self.data.x.numel() / 1e6
        by_rows = max(SECONDS[0], min(SECONDS[1], rows * self.data.outputs / 100))
        millions += 0 if self.data.text is None else self.data.text.nnz / 1e6 * max(1, self.data.outputs - 1)
        return max(min(MOST_SECONDS, max(by_rows, PER_MILLION * millions)), self.least_budget)

    @property
    def limited(self) -> bool:
        """Whether the budget leaves out heads: not those that were named without a budget."""
        return not self.auto.heads or self.auto.budget is not None

    def _least_budget(self, heads: dict[str, HeadRecipe]) -> float:
        """Return the least seconds of the default budget, enough to compare named heads on some rows."""
        least = max(head.least_budget(self.data) for head in heads.values())
        if self.limited:
            return least
        return max(least, self._cost(heads, min(len(self.data.x), LEAST_ROWS)) / COMPARISON)

    def _suited(self) -> dict[str, HeadRecipe]:
        """Return the heads that suit the rows, by name in the leaderboard."""
        heads: dict[str, HeadRecipe] = {}
        for head in self.auto.possible_heads():
            name = head.label()
            if not self.auto.heads and not (self._reads(head) and head.competes(self.data)):
                continue
            reason = head.reason_against(self.data)
            if reason is None:
                heads[name] = head
            elif self.auto.heads:
                raise SpecError(f"Auto(heads=…): {name} does not suit these rows: {reason}")
            else:
                self.skipped[name] = reason
        return heads

    def _reads(self, head: HeadRecipe) -> bool:
        """Return whether there are inputs that a head is for: texts, images, or others."""
        if head.reads_text:
            return self.data.text is not None
        if head.reads_images:
            return self.data.pixels is not None
        return self.data.others or isinstance(head, ConstantHead)

    def _compared(self, heads: dict[str, HeadRecipe]) -> Tensor | None:
        """Return the rows of the comparison, None for all; leave out the costliest heads if few rows are too many."""
        count, rows, share = len(self.data.x), len(self.data.x), COMPARISON * self.budget
        while self._cost(heads, rows) > share and rows > LEAST_ROWS:
            rows = max(LEAST_ROWS, rows // 2)
        while self.limited and self._cost(heads, rows) > share and len(heads) > 2:
            name = max(heads, key=lambda name: self._cost({name: heads[name]}, rows))
            cost = self._cost({name: heads.pop(name)}, rows)
            self.skipped[name] = f"left out: {cost:,.0f} s of {share:,.3g} s for comparisons"
        while rows < count and self._cost(heads, min(count, 2 * rows)) <= share:
            rows = min(count, 2 * rows)
        if rows >= count:
            return None
        self.notes.append(
            f"heads were compared on {rows:,} of {count:,} rows, to keep the budget of {self.budget:,.3g} s"
        )
        return self._sample(rows)

    def _sample(self, rows: int) -> Tensor:
        """Return the positions of some rows: a held-out part of a fold if it is large enough, so groups stay whole."""
        count = len(self.data.x)
        if self.data.groups is not None or self.data.classes:
            held = self.data.folds(max(2, count // rows))[0][1]
            if len(held) >= rows // 2:
                return held
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(count, generator=generator)[:rows].sort().values

    def _cost(self, heads: dict[str, HeadRecipe], rows: int) -> float:
        """Return the estimated seconds of the comparison."""
        folds, repeats = self._counts(rows)
        inner = int(rows * (folds - 1) / folds)
        stages = repeats * folds if self.auto.heads else TRIED * repeats * folds
        return ESTIMATED * stages * sum(head.cost(self.data, inner) for head in heads.values())

    def _rows_of_fit(self, head: HeadRecipe, seconds: float) -> int:
        """Return the number of rows of a fit that takes some seconds at most."""
        rows = len(self.data.x)
        while rows > LEAST_ROWS and self._fit_seconds(head, rows) > seconds:
            rows = max(LEAST_ROWS, rows // 2)
        return rows

    def _fit_seconds(self, head: HeadRecipe, rows: int) -> float:
        """Return the estimated seconds of the fit of a chosen head; estimates of images are measured ones."""
        return head.fit_cost(self.data, rows) * (1.0 if head.reads_images else ESTIMATED)

    def _counts(self, rows: int) -> tuple[int, int]:
        """Return numbers of folds and of repetitions."""
        few = self.auto.prefer == "fast" or rows > MANY_ROWS
        return 3 if few else 5, 2 if rows < FEW_ROWS and not few else 1

    def _folds(self, rows: RecipeData) -> list[Sequence[Fold]]:
        """Return the folds of each stage: repetitions, or the first fold and the others."""
        folds, repeats = self._counts(len(rows.x))
        stages: list[Sequence[Fold]] = [
            rows.folds(min(folds, len(rows.x)), repetition) for repetition in range(repeats)
        ]
        return stages if repeats > 1 or len(stages[0]) < 3 else [stages[0][:1], stages[0][1:]]

    def _entries(
        self,
        heads: Mapping[str, HeadRecipe],
        rows: RecipeData,
        plan: Sequence[Sequence[Fold]],
        known: Tensor,
        clock: Stopwatch,
    ) -> list[_Compared]:
        """Return the heads with their outputs for all held-out rows; heads that do not contribute to the first ones are left out.

        Args:
            heads: the heads by name.
            rows: the rows of the comparison.
            plan: the folds of each stage.
            known: positions of the held-out rows in the outputs of all stages.
            clock: of the whole search.
        """
        chosen = dict(heads)
        parts: dict[str, list[CrossFit]] = {name: [] for name in heads}
        once: dict[str, HeadRecipe] = {}
        for number, folds in enumerate(plan):
            for count, name in enumerate(list(chosen)):
                late = self.limited and count > 1 and clock.seconds() + self.resumed > self.budget
                part = self._part(name, chosen[name], rows, folds, number, late)
                if part is None:
                    del chosen[name]
                    continue
                parts[name].append(part)
                # The choice of a single fold is a noisy one.
                chosen[name] = part.recipe if len(folds) > 1 else chosen[name].narrowed(part.recipe)
            if number < len(plan) - 1:
                contenders = self._contenders({name: parts[name][0].outputs for name in chosen}, chosen, rows, folds)
                others = {name: head for name, head in chosen.items() if name not in contenders}
                if len(folds) > 1:  # their outputs for these rows stand for those of the other repetitions
                    once |= others
                else:
                    self.skipped |= dict.fromkeys(others, "left out: no gain on the first fold")
                chosen = {name: chosen[name] for name in contenders}
        entries = []
        for name, recipe in (chosen | once).items():
            repeated = parts[name] + parts[name][-1:] * (len(plan) - len(parts[name]))
            outputs = torch.cat([part.outputs for part in repeated])[known]
            entries.append(_Compared(name, recipe, outputs, sum(part.seconds for part in parts[name])))
        return entries

    def _part(
        self, name: str, head: HeadRecipe, rows: RecipeData, folds: Sequence[Fold], number: int, late: bool
    ) -> CrossFit | None:
        """Return a head with its outputs for the held-out rows of a stage; None, with a note, if it fails or comes too late.

        A resumed run has the comparisons of the interrupted one and their seconds, so that the budget leaves out the same heads.
        """
        key = f"{name}, stage {number}"
        crossed = self.watch.kept(key)
        if crossed is not None:
            self.resumed += crossed.seconds
        elif late:
            self.skipped[name] = f"left out: the budget of {self.budget:.3g} s is spent"
            return None
        else:
            self.watch.on_head(name)
            try:
                with _named(name):
                    crossed = head.cross_fit(rows, folds, self.seed)
                    held_out = torch.cat([test for _, test in folds])
                    if not bool(crossed.outputs[held_out].isfinite().all()):
                        raise DataError("outputs are not finite")
            except HeadError as error:
                if len(self.auto.heads) == 1:
                    raise
                self.skipped[name] = f"failed: {error.reason}"
                return None
            self.watch.keep(key, crossed)
        return crossed

    def _contenders(
        self, outputs: Mapping[str, Tensor], heads: Mapping[str, HeadRecipe], rows: RecipeData, folds: Sequence[Fold]
    ) -> list[str]:
        """Return the names of heads with a weight in a sum for some held-out rows, of the best alone, and of the simplest."""
        names = list(outputs)
        if self.auto.heads or self.auto.prefer == "small" or len(names) <= RACED:
            return names
        test = torch.cat([test for _, test in folds])
        y, weight = rows.y[test], None if rows.weight is None else rows.weight[test]
        values = [_bounded(outputs[name][test], rows) for name in names]
        complexity = [heads[name].complexity for name in names]
        selected = select_heads(values, y, weight, rows.loss, complexity)
        share = torch.ones(len(y), dtype=values[0].dtype) if weight is None else weight
        share = share / share.sum()
        losses = [row_losses(value, y, rows.loss) for value in values]
        order = sorted(range(len(names)), key=lambda i: float(share @ losses[i]))

        most, slack = (CONTENDERS, CLOSE) if len(folds) == 1 else REPEATED

        def close(i: int) -> bool:
            worse = losses[i] - losses[order[0]]
            mean = share @ worse
            return float(mean) <= slack * float((share.square() @ (worse - mean).square()).sqrt())

        best = [i for i in order[:most] if close(i)]
        simple = [i for i, rank in enumerate(complexity) if rank <= 0]
        return [name for i, name in enumerate(names) if selected.weights[i] > 0 or i in best or i in simple]

    def _fitted(self, entries: Sequence[_Compared], weights: Sequence[float]) -> tuple[Model, list[float]]:
        """Return the sum of the chosen heads, fitted to all rows, and the seconds of each fit."""
        models, seconds = [], []
        chosen = [entry.recipe for entry, weight in zip(entries, weights, strict=True) if weight > 0]
        shares = iter(self._shares(chosen))
        for entry, weight in zip(entries, weights, strict=True):
            start = time.perf_counter()
            if weight:
                self.watch.on_head(entry.name)
                recipe = entry.recipe.within(self.data, share := next(shares))
                rows = self._rows_of_fit(recipe, share)
                data = self.data if rows == len(self.data.x) else self.data.take(self._sample(rows))
                if data is not self.data:
                    self.fitted_on[entry.name] = f"fitted on {len(data.x):,} rows"
                with _named(entry.name):
                    models.append((recipe.fit_to_all(data, self.seed, self.watch.checkpoints(recipe)), weight))
            seconds.append(time.perf_counter() - start)
        bounds = None if self.data.classes else bounds_of(self.data)
        return mixture([model for model, _ in models], [weight for _, weight in models], bounds), seconds

    def _shares(self, heads: Sequence[HeadRecipe]) -> list[float]:
        """Return the seconds for the fit of each of some heads: an equal part of what cheaper ones leave; images come last."""
        costs = [self._fit_seconds(head, len(self.data.x)) for head in heads]
        left, shares = (1 - COMPARISON) * self.budget, [0.0] * len(heads)
        order = sorted(range(len(heads)), key=lambda i: (heads[i].reads_images, costs[i]))
        for place, i in enumerate(order):
            shares[i] = left / (len(heads) - place)
            left -= min(shares[i], costs[i])
        return shares

    def _held_out(self, total: Tensor, plan: Sequence[Sequence[Fold]], compared: Tensor | None) -> Tensor:
        """Return the output of the sum for each row, NaN where no fold held the row out.

        Of repetitions the first counts: means over repetitions have smaller errors than the single fit to all rows.
        """
        rows = len(self.data.x) if compared is None else len(compared)
        found, at = torch.full((rows, total.shape[1]), torch.nan, dtype=total.dtype), 0
        for folds in plan:
            held = torch.cat([test for _, test in folds]).sort().values
            first = found[held].isnan()
            found[held] = torch.where(first, total[at : at + len(held)], found[held])
            at += len(held)
        if compared is None:
            return found
        everything = torch.full((len(self.data.x), total.shape[1]), torch.nan, dtype=total.dtype)
        everything[compared] = found
        return everything


def _crossed(
    outputs: Sequence[Tensor],
    y: Tensor,
    weight: Tensor | None,
    row: Tensor,
    plan: Sequence[Sequence[Fold]],
    select: Callable[..., Selected],
) -> Tensor:
    """Return the weighted sum of the heads for held-out rows, of each fold with weights chosen on the other rows."""
    total, left = torch.empty_like(outputs[0]), torch.ones(len(y), dtype=torch.bool)
    for _, test in (fold for folds in plan for fold in folds):
        inside = torch.isin(row, test)
        here, other = left & inside, ~inside
        if not bool(here.any()):  # in an earlier repetition
            continue
        left &= ~here
        if not bool(other.any()):
            other = ~other
        known = None if weight is None else weight[other]
        weights = select([out[other] for out in outputs], y[other], known).weights
        total[here] = sum(share * out[here] for share, out in zip(weights, outputs, strict=True))
    return total


def _stacked(rows: RecipeData, plan: Sequence[Sequence[Fold]]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return targets and weights of the held-out rows of all repetitions, and the positions of these rows."""
    known = []
    for number, folds in enumerate(plan):
        held = torch.cat([test for _, test in folds]).sort().values
        known.append(number * len(rows.x) + held)
    positions = torch.cat(known)
    index = positions % len(rows.x)
    return rows.y[index], None if rows.weight is None else rows.weight[index], positions


def _bounded(outputs: Tensor, rows: RecipeData) -> Tensor:
    """Return outputs within the bounds of the final model."""
    if rows.classes:
        return outputs
    low, high = bounds_of(rows)
    return outputs.clamp(low, high)


def bounds_of(data: RecipeData) -> tuple[Tensor, Tensor]:
    """Return the bounds of outputs, `(n,)` each: the range of the targets and a part of it on both sides, more for few rows.

    Of outputs that are logarithms of means: from a tenth of the least positive target to the same bound above.
    """
    low, high = data.y.amin(0), data.y.amax(0)
    margin = MARGIN + MARGIN_ROWS / len(data.y)
    if data.loss.log_link:
        least = torch.where(data.y > 0, data.y, torch.inf).amin(0)
        return (0.1 * least).log(), ((1 + margin) * high).log()
    return low - margin * (high - low), high + margin * (high - low)


class HeadError(DataError):
    """A fit of a head failed.

    Args:
        name: name of the head in the leaderboard.
        reason: the reason, in one line.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the head {name} does not fit these rows: {reason}; leave it out")
        self.reason = reason


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise failures of a fit as a `HeadError`; suppress its warnings: held-out rows judge it."""
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (KapsiError, RuntimeError, ValueError) as error:
        raise HeadError(name, (str(error).splitlines() or [type(error).__name__])[0]) from error
