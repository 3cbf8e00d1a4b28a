"""Effects: the prediction as a function of one column, or of two, in original units.

The effect of a number is accumulated: for neighboring values a < b of the column, the mean over the rows between them of
f(b, others) − f(a, others), summed from the left (accumulated local effects). If f is a sum of a function of the column and one of
the others, each row has the same difference, and the effect *is* this function; it is then evaluated on a fine grid. The effect
of a category is the mean of f over rows with their category replaced. Effects have mean 0 over the rows.

Source: D. Apley and J. Zhu, Visualizing the effects of predictor variables in black box supervised learning models, Journal of
the Royal Statistical Society B 82 (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kapsi.data.tabular.encoders import Categories
from kapsi.data.tabular.types import Floats, Ints
from kapsi.interpret.view import ColumnView, View, deviation, has_missing, view

__all__ = ["Effect", "effects", "effects_of"]

INTERVALS, FINE, BINS = 40, 121, 30
"""Intervals of accumulated effects, points of exact effects, bins of the density."""
LEVEL_ROWS, MOST_LEVELS = 100, 50
"""Rows whose category is replaced, and categories shown."""
REPLICATES, BAND = 100, (0.05, 0.95)
"""Bootstrap replicates, and the quantiles of the band."""
EXACT = 1e-6
"""Differences of rows, relative to the deviation of the outputs, below which an effect is exact: float32 has 1e-7."""


class Missing(NamedTuple):
    """The effect of missing values.

    Attributes:
        values: the effect, (outputs,).
        rows: number of rows without a value.
    """

    values: Floats
    rows: int


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of one column on the prediction.

    Args:
        column: name of the column.
        kind: `number`, `category` or `date`.
        unit: unit of the numbers, empty for none.
        outputs: names of the outputs: targets in their unit, log odds of the second of two classes, or centered logits.
        points: values, ascending, (points,): numbers, or seconds since 1970; positions of the levels of a category.
        levels: names of the categories, `(missing)` for missing values; empty for numbers and dates.
        values: the effect, (points, outputs), with mean 0 over the rows.
        low, high: ends of the band of 90 percent over bootstrap samples of the rows, (points, outputs).
        counts: rows in each bin of `bins`, or with each level.
        bins: ends of the bins of the density; empty for categories.
        missing: the effect of missing values of a number; None if the model does not distinguish them.
        exact: whether the prediction is a sum of this effect and a function of the other columns.
    """

    column: str
    kind: str
    unit: str
    outputs: tuple[str, ...]
    points: Floats
    levels: tuple[str, ...]
    values: Floats
    low: Floats
    high: Floats
    counts: Ints
    bins: Floats
    missing: Missing | None = None
    exact: bool = False

    def at(self, values: Any) -> Floats:
        """Return the effect at numbers, (rows, outputs), interpolated; constant beyond the ends.

        Example:
            >>> import kapsi as kp, torch
            >>> model = kp.Model(kp.rpn([2, 1], expansion=kp.Taylor(1)), seed=0)
            >>> effect = kp.interpret.effects(model, torch.rand(50, 2))["x1"]
            >>> effect.exact, effect.at([0.2, 0.4]).shape
            (True, (2, 1))
        """
        x = np.asarray(values, dtype=np.float64)
        return np.stack([np.interp(x, self.points, column) for column in self.values.T], axis=1)


def effects(model: Any, rows: Any = None, *, columns: Sequence[str] | None = None, seed: int = 0) -> dict[str, Effect]:
    """Return the effect of each column on the prediction, by name.

    For regressions in the unit of the target; for two classes on the log odds of the second; for several classes on the logits
    minus their mean. Texts and images have no effects of this kind.

    Args:
        model: a run of `kp.load_run`, a fitted estimator, or a `kp.Model`.
        rows: rows of the columns of the model, see `kapsi.interpret`; None: the rows that a run keeps.
        columns: names of columns; None for all.
        seed: seed of the samples.

    Raises:
        DataError: no rows, or an unknown column.

    Example:
        >>> import kapsi as kp, torch
        >>> model = kp.Model(kp.rpn([2, 1], expansion=kp.Taylor(2)), seed=0)
        >>> sorted(kp.interpret.effects(model, torch.rand(50, 2)))
        ['x1', 'x2']
    """
    seen = view(model, rows, seed=seed)
    return effects_of(seen, seen.chosen(columns), seed)


def effects_of(seen: View, positions: Sequence[int], seed: int = 0) -> dict[str, Effect]:
    """Return the effects of some columns of a view."""
    scale = deviation(seen.function(seen.inputs))
    found = {}
    for position in positions:
        column = seen.columns[position]
        if column.kind in ("number", "date"):
            found[column.name] = _of_numbers(seen, position, scale, np.random.default_rng([seed, position]))
        elif column.kind == "category":
            found[column.name] = _of_levels(seen, position, scale, np.random.default_rng([seed, position]))
    return found


# ------------------------------------------------------------------------------------------------ numbers and dates


def _of_numbers(seen: View, position: int, scale: Floats, rng: np.random.Generator) -> Effect:
    column = seen.columns[position]
    values = column.column.numbers
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        values, known = np.zeros(len(values)), np.arange(len(values))
    v, base = values[known], seen.inputs[known]
    points = grid(v)
    inside = np.clip(np.searchsorted(points, v), 1, max(1, len(points) - 1))
    weights = np.ones((1, len(known)))
    if len(points) < 2:
        exact, curves = True, np.zeros((1, 1, len(seen.outputs)))
    else:
        ends = (seen.replaced(base, position, column.encode(points[inside - shift])) for shift in (0, 1))
        right, left = map(seen.function, ends)
        steps = right - left
        exact = bool(
            (np.abs(steps - _means(steps, inside, len(points), weights)[0][inside - 1]) <= EXACT * scale).all()
        )
        if exact:
            points, curves = _exact_curve(seen, position, points)
        else:
            draws = rng.multinomial(len(known), np.full(len(known), 1 / len(known)), REPLICATES)
            weights = np.vstack([weights, draws])
            means = _means(steps, inside, len(points), weights)
            curves = np.concatenate([np.zeros_like(means[:, :1]), np.cumsum(means, axis=1)], axis=1)
    hat = _interpolated(points, np.eye(len(points)), v)  # values at rows from values at points
    shifts = np.einsum("wp,wpo->wo", weights @ hat / len(known), curves)
    level = None
    lost = int(np.isnan(values).sum())
    if has_missing(column):
        part = rng.permutation(len(known))[:LEVEL_ROWS]
        empty = seen.replaced(base[part], position, column.encode(np.full(len(part), np.nan)))
        level = (seen.function(empty) - seen.function(base[part])).mean(0) + (hat[part] @ curves[0]).mean(0)
        shifts = shifts + lost / len(values) * (level - shifts)
    curves = curves - shifts[:, np.newaxis]
    missing = None if level is None else Missing(level - shifts[0], lost)
    bins = np.linspace(v.min(), v.max(), BINS + 1) if v.min() < v.max() else np.array([v[0] - 0.5, v[0] + 0.5])
    counts = np.histogram(v, bins)[0]
    names = column.name, column.kind, column.unit, seen.outputs
    return Effect(*names, points, (), curves[0], *_band(curves), counts, bins, missing, exact)


def _exact_curve(seen: View, position: int, points: Floats) -> tuple[Floats, Floats]:
    """Return a fine grid and the values of an exact effect there, (1, points, outputs), up to a constant."""
    if len(points) > INTERVALS:
        points = np.union1d(np.linspace(points[0], points[-1], FINE), points)
    rows = seen.inputs[np.zeros(len(points), dtype=np.int64)]
    outputs = seen.function(seen.replaced(rows, position, seen.columns[position].encode(points)))
    return points, (outputs - outputs[:1])[np.newaxis]


def grid(values: Floats, intervals: int = INTERVALS) -> Floats:
    """Return the distinct values if they are few, else their quantiles."""
    distinct = np.unique(values)
    if len(distinct) <= intervals + 1:
        return np.asarray(distinct, dtype=np.float64)
    return np.unique(np.quantile(values, np.linspace(0, 1, intervals + 1)))


def _means(steps: Floats, inside: Ints, count: int, weights: Floats) -> Floats:
    """Return the mean step of each interval for each weighting of the rows, (weightings, intervals, outputs).

    An interval without weight has the mean of its rows; quantiles leave none without a row.
    """
    member = np.zeros((max(1, count - 1), len(steps)))
    member[inside - 1, np.arange(len(steps))] = 1
    sizes = (weights @ member.T)[..., np.newaxis]
    sums = np.stack([weights @ (member * step).T for step in steps.T], axis=-1)
    plain = (member @ steps) / np.maximum(member.sum(1, keepdims=True), 1)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), plain)


def _interpolated(points: Floats, curve: Floats, values: Floats) -> Floats:
    return np.stack([np.interp(values, points, column) for column in curve.T], axis=1)


def _band(curves: Floats) -> tuple[Floats, Floats]:
    """Return the ends of the band, which contains the effect itself."""
    if len(curves) < 2:
        return curves[0], curves[0]
    low, high = np.quantile(curves[1:], BAND, axis=0)
    return np.minimum(low, curves[0]), np.maximum(high, curves[0])


# ------------------------------------------------------------------------------------------------ categories


def levels_of(column: ColumnView) -> tuple[list[str | None], Ints]:
    """Return the categories of a column, None for missing values, and their numbers of rows; the most frequent of many."""
    codes, words = column.column.coded()
    counts = dict(zip(words, np.bincount(codes[codes >= 0], minlength=len(words)).tolist(), strict=True))
    known = list(column.encoder.categories) if isinstance(column.encoder, Categories) else list(words)
    if len(known) > MOST_LEVELS:
        most = sorted(known, key=lambda word: -counts.get(word, 0))[:MOST_LEVELS]
        known = [word for word in known if word in set(most)]
    levels: list[str | None] = list(known)
    sizes = [counts.get(word, 0) for word in known]
    if column.encoder.missing:
        levels, sizes = [*levels, None], [*sizes, int((codes < 0).sum())]
    return levels, np.array(sizes, dtype=np.int64)


def _of_levels(seen: View, position: int, scale: Floats, rng: np.random.Generator) -> Effect:
    column = seen.columns[position]
    levels, counts = levels_of(column)
    rows = rng.permutation(seen.rows)[:LEVEL_ROWS]
    base = seen.inputs[rows]
    outputs = np.stack(
        [
            seen.function(seen.replaced(base, position, column.encode(np.array([level] * len(rows), dtype=object))))
            for level in levels
        ],
        axis=1,
    )  # (rows, levels, outputs)
    outputs = outputs - outputs.mean(1, keepdims=True)
    exact = bool((np.abs(outputs - outputs[:1]) <= EXACT * scale).all())
    draws = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), REPLICATES) / len(rows)
    weights = np.vstack([np.full(len(rows), 1 / len(rows)), draws])
    curves = np.einsum("wr,rlo->wlo", weights, outputs)
    share = counts / counts.sum() if counts.sum() else np.full(len(counts), 1 / max(1, len(counts)))
    curves = curves - np.einsum("l,wlo->wo", share, curves)[:, np.newaxis]
    low, high = _band(curves)
    names = tuple("(missing)" if level is None else level for level in levels)
    points = np.arange(len(levels), dtype=np.float64)
    return Effect(
        column.name, "category", "", seen.outputs, points, names, curves[0], low, high, counts, np.empty(0), None, exact
    )
