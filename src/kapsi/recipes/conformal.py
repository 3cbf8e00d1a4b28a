"""Conformal prediction intervals and sets from the outputs for held-out rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.modules import Model
from kapsi.recipes.additive import AdditiveHead
from kapsi.recipes.base import CrossFit, RecipeData
from kapsi.training.losses import MSE

__all__ = ["Conformal", "Quantiles"]

MOST_LEVELS = 1_000
"""Maximum number of quantiles in a table."""

SPREAD_ROWS = 20_000
"""Maximum number of rows for the fit of the spread."""

SPREAD_INPUTS = 60
"""Inputs up to which the spread depends on them; with more inputs, on the prediction alone."""

LEAST_ROWS = 60
"""Minimum number of held-out rows for a fit of the spread; with fewer, it is constant."""

LEAST_GAIN = 0.98
"""Largest squared error of the fitted spread on held-out rows, relative to that of a constant."""

FLOOR = 0.1
"""Share of the median error, added to each error before the logarithm."""

BOUND = 3.0
"""Largest absolute logarithm of the spread, relative to its mean."""


class Quantiles(NamedTuple):
    """Quantiles of scores: a share `levels[i]` of new rows has a score of at most `scores[i]`.

    Attributes:
        levels: increasing, below 1.
        scores: increasing, at least 0.
    """

    levels: tuple[float, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(cls, scores: Tensor, weight: Tensor | None = None) -> Quantiles:
        """Return the quantiles of the scores of held-out rows, `(rows,)`: the k-th of n scores has the level k/(n + 1).

        Args:
            scores: the scores.
            weight: weights of the rows, with mean 1; a new row has the mean weight.
        """
        if not len(scores):
            return cls((), ())
        ordered, order = scores.double().sort()
        weight = torch.ones_like(ordered) if weight is None else weight.double()[order]
        levels = weight.cumsum(0) / (weight.sum() + weight.mean())
        if len(ordered) > MOST_LEVELS:
            at = torch.linspace(0, len(ordered) - 1, MOST_LEVELS, dtype=torch.float64).round().long()
            # Between two of these levels, `at` returns the higher quantile, so the coverage is never too low.
            levels, ordered = levels[at], ordered[at]
        return cls(_short(levels), _short(ordered))

    def at(self, level: float) -> float:
        """Return the smallest known quantile of at least a level; infinity if there are too few rows for the level."""
        for known, score in zip(self.levels, self.scores, strict=True):
            if known >= level - 1e-9:
                return score
        return math.inf


def _short(values: Tensor) -> tuple[float, ...]:
    """Return numbers with seven digits."""
    return tuple(float(f"{value:.7g}") for value in values.tolist())


@dataclass(frozen=True, eq=False)
class Conformal:
    """Compute prediction intervals and sets with a given coverage, from the outputs for held-out rows.

    Real targets: the score of a row is |y − f(x)|/s(x), and the interval f(x) ± q s(x), q the quantile of the scores. The
    spread s is an additive function of inputs and prediction, fitted to log |y − f(x)|, or a constant if the function is no
    better on held-out rows. Classes: the score of a row is 1 − p_y(x), and the set has the classes with p ≥ 1 − q, at least
    the most probable class.

    The coverage holds on average over rows exchangeable with the rows of the fit, not for each row.

    Args:
        tables: quantiles of each output, by name of the group; "" for all rows.
        spread: model of log s(x), from inputs and prediction, or prediction alone; None for a constant.
        classes: quantiles by true class, for thresholds; empty for real targets.

    Source: Lei et al., Distribution-free predictive inference for regression, JASA 113 (2018); Sadinle, Lei and Wasserman, Least
    ambiguous set-valued classifiers with bounded error levels, JASA 114 (2019).

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.recipes import RecipeData
        >>> x = torch.linspace(0, 1, 99, dtype=torch.float64)[:, None]
        >>> data = RecipeData(x, x, kp.MSE(), 0, torch.ones(1, dtype=torch.bool))
        >>> conformal = Conformal.of(data, x + 0.1 * torch.where(x > 0.5, 1.0, -1.0))
        >>> conformal.intervals(x[:1], x[:1], 0.9).round(decimals=3).tolist()
        [[[-0.1, 0.1]]]
    """

    tables: Mapping[str, tuple[Quantiles, ...]]
    spread: Model | None = None
    classes: tuple[Quantiles, ...] = field(default=())

    @classmethod
    def of(cls, data: RecipeData, predicted: Tensor, groups: Sequence[str] | None = None, seed: int = 0) -> Conformal:
        """Return the intervals or sets of a model from its outputs for held-out rows.

        Args:
            data: the rows.
            predicted: probabilities of the classes, or predictions of `data.y`, `(rows, n)`, by models fitted without the row;
                NaN for rows that were never held out.
            groups: name of the group of each row, for coverage within each group.
            seed: seed of the spread.

        Raises:
            DataError: no row was held out.
        """
        known = (~predicted.isnan().any(1)).nonzero()[:, 0]
        if not len(known):
            raise DataError("intervals: no row was held out of the fit; give more rows")
        rows, out = data.take(known), predicted[known]
        names = None if groups is None else [groups[i] for i in known.tolist()]
        if rows.classes:
            scores = 1 - out.gather(1, rows.y[:, None])
            of_class = [rows.y == label for label in range(rows.classes)]
            classes = tuple(_table(scores[of], rows.weight, of)[0] for of in of_class)
            return cls(_by_group(scores, rows.weight, names), None, classes)
        errors = (rows.y - out).abs()
        spread, sizes = _spread(rows, out, errors, seed)
        return cls(_by_group(errors / sizes, rows.weight, names), spread)

    def sizes(self, x: Tensor, values: Tensor) -> Tensor:
        """Return s(x), `(rows, n)`.

        Args:
            x: inputs, `(rows, m)`.
            values: predictions in the unit of the target of the model, `(rows, n)`.
        """
        if self.spread is None:
            return torch.ones_like(values)
        with torch.no_grad():
            width = int(self.spread.spec.widths[0] or 0)
            inputs = torch.cat([x, values], 1) if width > values.shape[1] else values
            return self.spread(inputs).clamp(-BOUND, BOUND).exp()

    def intervals(self, x: Tensor, values: Tensor, level: float, groups: Sequence[str] | None = None) -> Tensor:
        """Return lower and upper bounds, `(rows, n, 2)`, in the unit of the target of the model.

        Args:
            x, values: see `sizes`.
            level: share of new rows whose target is inside, above 0 and below 1.
            groups: name of the group of each row; unknown groups have the quantiles of all rows.

        Raises:
            DataError: too few rows were held out for the level.
        """
        half = self._quantiles(level, groups, len(values)) * self.sizes(x, values)
        return torch.stack([values - half, values + half], -1)

    def sets(self, probabilities: Tensor, level: float, groups: Sequence[str] | None = None) -> Tensor:
        """Return which classes are in the set of each row, `(rows, classes)` bool.

        Args:
            probabilities: `(rows, classes)`.
            level, groups: see `intervals`.

        Raises:
            DataError: too few rows were held out for the level.
        """
        inside = probabilities >= 1 - self._quantiles(level, groups, len(probabilities)) - 1e-12
        return inside | (probabilities == probabilities.amax(1, keepdim=True))

    def threshold(self, label: int, recall: float) -> float:
        """Return the lowest probability of a class for which the class is predicted, for a given recall.

        Args:
            label: code of the class.
            recall: share of the rows of the class to be found, above 0 and below 1.

        Raises:
            DataError: too few rows of the class were held out for the share.
        """
        return 1 - _score(self.classes[label], recall, "recall")

    def _quantiles(self, level: float, groups: Sequence[str] | None, rows: int) -> Tensor:
        """Return the quantile q for each row and output, `(rows, n)`, or `(1, n)` without groups."""
        check_level(level)

        def row(tables: tuple[Quantiles, ...]) -> list[float]:
            return [_score(table, level, "level") for table in tables]

        if groups is None or set(self.tables) == {""}:
            return torch.tensor([row(self.tables[""])], dtype=torch.float64)
        known = {name: row(self.tables.get(name, self.tables[""])) for name in set(groups)}
        return torch.tensor([known[name] for name in groups], dtype=torch.float64).reshape(rows, -1)


def check_level(level: float) -> None:
    """Raise a `SpecError` for a level outside (0, 1)."""
    if not isinstance(level, int | float) or not 0 < level < 1:
        raise SpecError(f"level={level!r}: expected a number above 0 and below 1, such as 0.9")


def _score(table: Quantiles, level: float, what: str) -> float:
    score = table.at(level)
    if math.isinf(score):
        most = table.levels[-1] if table.levels else 0.0
        raise DataError(
            f"{what} {level:g}: so few held-out rows allow at most {most:.3f}; give a smaller one, or more rows"
        )
    return score


def _table(scores: Tensor, weight: Tensor | None, of: Tensor | slice = slice(None)) -> tuple[Quantiles, ...]:
    weights = None if weight is None else weight[of]
    return tuple(Quantiles.of(column, weights) for column in scores.unbind(1))


def _by_group(scores: Tensor, weight: Tensor | None, names: Sequence[str] | None) -> dict[str, tuple[Quantiles, ...]]:
    tables = {"": _table(scores, weight)}
    for name in sorted(set(names or ())):
        of = torch.tensor([other == name for other in names or ()])
        if name:
            tables[name] = _table(scores[of], weight, of)
    return tables


def _spread(rows: RecipeData, values: Tensor, errors: Tensor, seed: int) -> tuple[Model | None, Tensor]:
    """Return the model of log s(x), None for a constant, and s(x) of each row by a model fitted without the row."""
    constant = None, torch.ones_like(errors)
    if len(errors) < LEAST_ROWS:
        return constant
    floor = FLOOR * errors.median(0).values
    logs = (errors + torch.where(floor > 0, floor, errors.mean(0).clamp_min(1e-300))).log()
    logs = logs - logs.mean(0)
    narrow = rows.x.shape[1] <= SPREAD_INPUTS
    x = torch.cat([rows.x, values], 1) if narrow else values
    numeric = torch.cat([rows.numeric, torch.ones(values.shape[1], dtype=torch.bool)]) if narrow else None
    numeric = torch.ones(values.shape[1], dtype=torch.bool) if numeric is None else numeric
    data = replace(rows, x=x, y=logs, loss=MSE(), classes=0, numeric=numeric, names=())
    if len(x) > SPREAD_ROWS:
        generator = torch.Generator().manual_seed(seed)
        some = torch.randperm(len(x), generator=generator)[:SPREAD_ROWS].sort().values
    else:
        some = torch.arange(len(x))
    part = data.take(some)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            crossed: CrossFit = AdditiveHead().cross_fit(part, part.folds(5), seed)
            model = crossed.recipe.fit(part, seed)
            sizes = model(x).detach()
    except (KapsiError, RuntimeError):
        return constant
    known = ~crossed.outputs.isnan().any(1)
    sizes[some[known]] = crossed.outputs[known]
    error, whole = (part.y[known] - crossed.outputs[known]).square().mean(), part.y[known].square().mean()
    if not bool(error < LEAST_GAIN * whole) or not bool(sizes.isfinite().all()):
        return constant
    return model, sizes.clamp(-BOUND, BOUND).exp()
