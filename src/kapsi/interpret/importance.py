"""Importances of columns: share of the variance of the predictions, and loss after a permutation; interactions of two columns.

With x′ another row, and x′ⱼ its value of the column j:

    total effect      Tⱼ = ½ E (f(x) − f(x′ⱼ, x₋ⱼ))²                                    share = Tⱼ / Σ T
    interaction       Iⱼₖ = ¼ E (f(x) − f(x′ⱼ, x₋ⱼ) − f(x′ₖ, x₋ₖ) + f(x′ⱼ, x′ₖ, x₋ⱼₖ))²

If f is a sum of functions of single columns, Tⱼ is the variance of the function of column j, and all Iⱼₖ are 0.

Source: M. Jansen, Analysis of variance designs for model output, Computer Physics Communications 117 (1999); R. Liu and A. Owen,
Estimating mean dimensionality of analysis of variance decompositions, Journal of the American Statistical Association 101 (2006);
L. Breiman, Random forests, Machine Learning 45 (2001), for permutations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kapsi.data.tabular.types import Floats, Ints
from kapsi.interpret.effect import grid, levels_of
from kapsi.interpret.view import ColumnView, View, stacked, view

__all__ = ["Importance", "PairEffect", "importances", "interactions"]

PERMUTATIONS = 3
MOST_VALUES = 2**23
"""Values of the inputs of all permutations: fewer rows are permuted in wide tables."""
CALL_ROWS = 2048
"""Rows of a call of the model: each call takes a millisecond."""
LEAST_HELD_OUT = 20
"""Held-out rows below which all rows are permuted."""
PAIR_ROWS, PAIR_COLUMNS = 120, 10
"""Rows and most important columns among which interactions are looked for."""
PAIR_GRID, PAIR_BACKGROUND = 12, 40
"""Values of each column of a pair effect, and rows whose other columns are averaged."""
NEGLIGIBLE = 1e-3
"""Share of the variance below which an interaction is left out."""


class Importance(NamedTuple):
    """The importance of a column.

    Attributes:
        column: name of the column.
        share: its part of the variance of the predictions; the shares of all columns add up to 1.
        increase: increase of the mean squared error relative to the variance of the target (the loss of R²), or of the log
            loss, if the values of the column are permuted; None without targets.
        deviation: standard deviation of the increase over permutations.
        held_out: whether the increase is one of held-out rows.
    """

    column: str
    share: float
    increase: float | None
    deviation: float | None
    held_out: bool


class PairEffect(NamedTuple):
    """The interaction of two columns: their effect beyond the sum of both.

    Attributes:
        columns: names of both columns.
        share: part of the variance of the predictions.
        points: values of each column, as of `Effect.points`.
        levels: names of the categories of each column, empty for numbers.
        values: (points of the first, points of the second, outputs).
        outputs: names of the outputs.
        kinds: kind of each column.
    """

    columns: tuple[str, str]
    share: float
    points: tuple[Floats, Floats]
    levels: tuple[tuple[str, ...], tuple[str, ...]]
    values: Floats
    outputs: tuple[str, ...]
    kinds: tuple[str, str] = ("number", "number")


def importances(model: Any, rows: Any = None, y: Any = None, *, seed: int = 0) -> list[Importance]:
    """Return the importance of each column, the largest share first.

    Args:
        model: a run of `kp.load_run`, a fitted estimator, or a `kp.Model`.
        rows: rows of the columns of the model; None: the rows that a run keeps, with their targets.
        y: targets of `rows`, for a run or an estimator; codes of the classes in their order for classifications.
        seed: seed of samples and permutations.

    Raises:
        DataError: no rows.

    Example:
        >>> import kapsi as kp, torch
        >>> model = kp.Model(kp.rpn([2, 1], expansion=kp.Taylor(1)), seed=0)
        >>> round(sum(one.share for one in kp.interpret.importances(model, torch.rand(50, 2))), 9)
        1.0
    """
    seen = view(model, rows, seed=seed)
    if y is not None and rows is not None and len(y) == seen.rows:
        from dataclasses import replace

        seen = replace(seen, y=np.asarray(y), held_out=None)
    return importances_of(seen, seed)


def importances_of(seen: View, seed: int = 0) -> list[Importance]:
    """Return the importances of the columns of a view, the largest share first."""
    rows, held_out = _scored_rows(seen)
    rng = np.random.default_rng([seed, 1])
    most = max(30, MOST_VALUES // max(1, seen.inputs.shape[1] * len(seen.columns) * PERMUTATIONS))
    rows = np.sort(rng.permutation(rows)[:most])
    inputs = seen.inputs[rows]
    outputs = seen.function(inputs)
    y = None if seen.y is None else seen.y[rows]
    before = None if y is None else _loss(seen, outputs, y)
    orders = [_derangement(len(rows), rng) for _ in range(PERMUTATIONS)]
    totals, changes = [], []
    for moved in _permuted(seen, inputs, orders):
        totals.append(float(np.mean([0.5 * np.square(outputs - new).mean(0).sum() for new in moved])))
        changes.append([] if y is None or before is None else [_loss(seen, new, y) - before for new in moved])
    whole = sum(totals) or 1.0
    found = [
        Importance(
            column.name,
            total / whole,
            float(np.mean(change)) if change else None,
            float(np.std(change)) if change else None,
            held_out,
        )
        for column, total, change in zip(seen.columns, totals, changes, strict=True)
    ]
    return sorted(found, key=lambda one: -one.share)


def _permuted(seen: View, inputs: Any, orders: list[Ints]) -> Iterator[Floats]:
    """Yield, for each column, the outputs with its values permuted, (orders, rows, outputs); several columns in one call."""
    count = inputs.shape[0]
    size = max(1, CALL_ROWS // (count * len(orders)))
    for begin in range(0, len(seen.columns), size):
        positions = range(begin, min(begin + size, len(seen.columns)))
        parts = [seen.swapped(inputs, inputs[order], position) for position in positions for order in orders]
        outputs = seen.function(stacked(parts))
        yield from outputs.reshape(len(positions), len(orders), count, -1)


def _scored_rows(seen: View) -> tuple[Ints, bool]:
    """Return the held-out rows, of a few all rows, and whether they are held out; rows without a target do not count."""
    known: Any = np.ones(seen.rows, dtype=np.bool_)
    if seen.y is not None:
        known = seen.y >= 0 if seen.classes else ~np.isnan(seen.y.reshape(seen.rows, -1)).any(1)
    held = known if seen.held_out is None else known & seen.held_out
    if seen.held_out is not None and held.sum() >= LEAST_HELD_OUT:
        return np.flatnonzero(held), True
    return np.flatnonzero(known) if known.any() else np.arange(seen.rows), False


def _derangement(count: int, rng: np.random.Generator) -> Ints:
    """Return a random cycle of the rows: no row keeps its place."""
    cycle = rng.permutation(count)
    order = np.empty(count, dtype=np.int64)
    order[cycle] = np.roll(cycle, 1)
    return order


def _loss(seen: View, outputs: Floats, y: Any) -> float:
    """Return the log loss, or the mean squared error relative to the variance of the target."""
    if seen.classes:
        logits = np.column_stack([np.zeros(len(outputs)), outputs]) if seen.classes == 2 else outputs
        largest = logits.max(1)
        total = largest + np.log(np.exp(logits - largest[:, np.newaxis]).sum(1))
        return float((total - logits[np.arange(len(y)), y.astype(np.int64)]).mean())
    target = y.reshape(outputs.shape)
    variance = target.var(0)
    return float((np.square(outputs - target).mean(0) / np.where(variance > 0, variance, 1.0)).mean())


# ------------------------------------------------------------------------------------------------ interactions


def interactions(
    model: Any, rows: Any = None, *, columns: Sequence[str] | None = None, most: int = 4, seed: int = 0
) -> list[PairEffect]:
    """Return the strongest interactions of two columns, the largest share first; empty for a sum of functions of columns.

    Args:
        model, rows: see `importances`.
        columns: names of columns whose pairs are compared; None for the 10 most important.
        most: maximum number of interactions.
        seed: seed of the samples.

    Raises:
        DataError: no rows, or an unknown column.

    Example:
        >>> import kapsi as kp, torch
        >>> model = kp.Model(kp.rpn([2, 1], expansion=kp.Taylor(2)), seed=0)
        >>> x = torch.rand(50, 2, generator=torch.Generator().manual_seed(0))
        >>> [sorted(pair.columns) for pair in kp.interpret.interactions(model, x)]
        [['x1', 'x2']]
    """
    seen = view(model, rows, seed=seed)
    if columns is None:
        names = [one.column for one in importances_of(seen, seed)]
        return interactions_of(seen, seen.chosen(names), most, seed)
    return interactions_of(seen, seen.chosen(columns), most, seed)


def interactions_of(seen: View, positions: Sequence[int], most: int = 4, seed: int = 0) -> list[PairEffect]:
    """Return the strongest interactions among the first columns of a list, without texts and images."""
    positions = [p for p in positions if seen.columns[p].kind not in ("text", "image")][:PAIR_COLUMNS]
    rng = np.random.default_rng([seed, 2])
    rows = rng.permutation(seen.rows)[:PAIR_ROWS]
    if len(rows) < 2:
        return []
    x, other = seen.inputs[rows], seen.inputs[np.roll(rows, 1)]
    outputs = seen.function(x)
    variance = float(outputs.var(0).sum()) or 1.0
    single = {p: seen.swapped(x, other, p) for p in positions}
    values = {p: seen.function(single[p]) for p in positions}
    strengths = []
    for j, k in itertools.combinations(positions, 2):
        both = seen.function(seen.swapped(single[j], other, k))
        difference = outputs - values[j] - values[k] + both
        strengths.append((float(0.25 * np.square(difference).mean(0).sum()) / variance, j, k))
    strengths = sorted((one for one in strengths if one[0] > NEGLIGIBLE), reverse=True)[:most]
    return [_pair_effect(seen, share, j, k, rng) for share, j, k in strengths]


def _axis(column: ColumnView) -> tuple[Floats, tuple[str, ...], Any, Floats]:
    """Return points, levels, values to encode, and the weight of each of them."""
    if column.kind == "category":
        levels, counts = levels_of(column)
        order = np.argsort(-counts, kind="stable")[:PAIR_GRID]
        names = tuple("(missing)" if levels[i] is None else str(levels[i]) for i in order)
        chosen = np.array([levels[i] for i in order], dtype=object)
        return np.arange(len(order), dtype=np.float64), names, chosen, np.maximum(counts[order], 1e-9)
    v = column.column.numbers
    v = v[~np.isnan(v)]
    points = grid(v if len(v) else np.zeros(1), PAIR_GRID - 1)
    middles = (points[1:] + points[:-1]) / 2
    weight: Any = np.bincount(np.searchsorted(middles, v), minlength=len(points)) + 1e-9
    return points, (), points, weight


def _pair_effect(seen: View, share: float, j: int, k: int, rng: np.random.Generator) -> PairEffect:
    """Return the mean of f over rows on a grid of both columns, without the sum of both effects."""
    first, second = seen.columns[j], seen.columns[k]
    (p, p_levels, p_values, p_weight), (q, q_levels, q_values, q_weight) = _axis(first), _axis(second)
    rows = rng.permutation(seen.rows)[:PAIR_BACKGROUND]
    base = seen.replaced(
        seen.inputs[np.repeat(rows, len(q))], k, second.encode(np.tile(q_values, len(rows)))
    )  # the grid of the second column for each row
    means = np.empty((len(p), len(q), len(seen.outputs)))
    for a in range(len(p)):
        both = seen.replaced(base, j, first.encode(np.repeat(p_values[a : a + 1], base.shape[0])))
        means[a] = seen.function(both).reshape(len(rows), len(q), -1).mean(0)
    p_weight, q_weight = p_weight / p_weight.sum(), q_weight / q_weight.sum()
    means -= np.einsum("a,abo->bo", p_weight, means)[np.newaxis]
    means -= np.einsum("b,abo->ao", q_weight, means)[:, np.newaxis]
    return PairEffect(
        (first.name, second.name), share, (p, q), (p_levels, q_levels), means, seen.outputs, (first.kind, second.kind)
    )
