"""The headline method against the baselines measured here: rows won and lost, and the search that each method got."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kapsi.paper.experiment import PROCEDURES, Budget, Method
from kapsi.paper.store import canonical
from kapsi.paper.tables import Line, ResultTable, paired_factors


@dataclass(frozen=True)
class BaselineComparison:
    """The headline against a baseline, on the rows and seeds with a result of both.

    Attributes:
        baseline: the baseline.
        lines: the rows.
        factors: by row the baseline's error divided by the headline's, or the headline's accuracy minus the baseline's.
        even: factor of equal scores: 1 for errors, 0 for accuracies.
    """

    baseline: Method
    lines: tuple[Line, ...]
    factors: tuple[float, ...]
    even: float

    @property
    def better(self) -> int:
        """Number of rows with a better score of the headline."""
        return sum(factor > self.even for factor in self.factors)

    @property
    def worse(self) -> int:
        """Number of rows with a worse score of the headline."""
        return sum(factor < self.even for factor in self.factors)

    @property
    def median(self) -> float:
        """Median of the factors."""
        return float(np.median(self.factors))

    @property
    def seeds(self) -> tuple[int, int]:
        """Smallest and largest number of common seeds of a row."""
        pairs = ((line.result, line.statistics[self.baseline.name]) for line in self.lines)
        return _ends([len(own.common_seeds(theirs)) for own, theirs in pairs if own is not None])


def comparisons(table: ResultTable) -> list[BaselineComparison]:
    """Return the comparisons of the headline with each baseline, in the order of the columns."""
    even = 0.0 if table.experiment.higher_is_better else 1.0
    found = []
    for baseline in (method for method in table.methods if method.baseline):
        pairs = paired_factors(table, baseline)
        if pairs:
            lines, factors = zip(*pairs, strict=True)
            found.append(BaselineComparison(baseline, lines, factors, even))
    return found


@dataclass(frozen=True)
class Search:
    """The search of a method: ranges over the rows, as (least, most).

    Attributes:
        method: the method.
        candidates, starts, epochs: see `Budget`; epochs is None for methods without epochs.
        seeds: number of seeds with a result.
    """

    method: Method
    candidates: tuple[int, int]
    starts: tuple[int, int]
    epochs: tuple[int, int] | None
    seeds: tuple[int, int]

    def cells(self) -> tuple[str, ...]:
        """Return method, candidates, starts, epochs and seeds as strings."""
        ranges = (self.candidates, self.starts, self.epochs, self.seeds)
        return (self.method.label, *("" if ends is None else range_text(ends) for ends in ranges))

    def less_than(self, other: Search) -> list[str]:
        """Return the kinds of effort smaller than those of another search, compared by the greatest of all rows."""
        names = ("candidates", "starts", "epochs", "seeds")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [name for name, mine, theirs in pairs if mine and theirs and mine[::-1] < theirs[::-1]]


def range_text(ends: tuple[int, int]) -> str:
    """Return a range of integers, a single one if its ends are equal."""
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def searches(table: ResultTable) -> list[Search]:
    """Return the searches of the headline and of the baselines, empty without a baseline or a budget."""
    compared = comparisons(table)
    headlines = dict.fromkeys(line.headline.name for line in table.lines if line.headline is not None)
    wanted = [m for m in table.methods if m.name in headlines or any(m == c.baseline for c in compared)]
    found = [_search(table, method) for method in wanted] if compared else []
    return [search for search in found if search is not None]


def _search(table: ResultTable, method: Method) -> Search | None:
    """Return the search of a method, None if a procedure has no budgets."""
    lines = [line for line in table.lines if method.name in line.statistics]
    budgets: dict[str, Budget] = {}
    for line in lines:
        run = table.experiment.run(line.row, method, 0, quick=table.quick)
        of = getattr(importlib.import_module(PROCEDURES[run.procedure]), "budget", None)
        if of is None:
            return None
        # Rows of functions have equal options, which are read once.
        key = canonical([run.procedure, run.options])
        if key not in budgets:
            budgets[key] = of(run)
    if not budgets:
        return None
    epochs = [budget.epochs for budget in budgets.values() if budget.epochs is not None]
    return Search(
        method,
        _ends([budget.candidates for budget in budgets.values()]),
        _ends([budget.starts for budget in budgets.values()]),
        _ends(epochs) if epochs else None,
        _ends([line.statistics[method.name].count for line in lines]),
    )


def _ends(numbers: Sequence[int]) -> tuple[int, int]:
    return min(numbers), max(numbers)


def search_lines(table: ResultTable) -> list[str]:
    """Return a line with the searches of the headline and of the baselines, none without baselines."""
    names = ("candidate", "start", "epoch", "seed")
    texts = []
    for search in searches(table):
        label, *cells = search.cells()
        parts = [f"{cell} {name}{'' if cell == '1' else 's'}" for cell, name in zip(cells, names, strict=True) if cell]
        texts.append(f"{label}: {', '.join(parts)}")
    return [f"search (starts are initial values; epochs of all fits together): {'; '.join(texts)}"] if texts else []


def difference(table: ResultTable) -> str:
    """Return which effort of the baselines is smaller or larger than that of the headline, empty if all is equal."""
    headlines = {line.headline.name for line in table.lines if line.headline is not None}
    found = searches(table)
    own = next((search for search in found if search.method.name in headlines), None)
    if own is None:
        return ""
    texts: dict[str, list[str]] = {}
    for search in found:
        if search.method.name not in headlines:
            fewer, more = search.less_than(own), own.less_than(search)
            parts = [f"fewer {', '.join(fewer)}" if fewer else "", f"more {', '.join(more)}" if more else ""]
            texts.setdefault(" and ".join(filter(None, parts)), []).append(search.method.label)
    return "; ".join(f"{', '.join(labels)}: {text}" for text, labels in texts.items() if text)
