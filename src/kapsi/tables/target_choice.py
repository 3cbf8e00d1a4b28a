"""Choice of the transformation of a target and of the loss, on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kapsi.data.tabular import TargetScale, Transform
from kapsi.data.tabular.types import Floats, short
from kapsi.function import catalogue
from kapsi.recipes.base import Fold, HeadRecipe, RecipeData
from kapsi.training.losses import MSE, Gamma, Loss, Poisson, Tweedie

__all__ = ["TargetChoice", "choose_target", "corrected"]

SKEWED = 1.0
"""Skewness from which transformations are tried."""

QUICK = 1
"""Largest complexity of the heads that the comparison uses, all in closed form."""

MOST_ROWS = 2_000
"""Most rows of the comparison."""

EXACT = 0.2
"""Squared error of a plain target without noise, relative to that of a change, up to which the target stays plain."""

UNLIKELY = 0.6
"""Standard errors by which a change is worse on the first fold if it is not compared on the others."""

EXACT_INTEGERS = 2.0**53
"""Float64 values beyond it are all whole."""

FACTORS = 0.5, 2.0
"""Bounds of the correction of the mean after a logarithm."""


class TargetChoice(NamedTuple):
    """A transformation with its loss.

    Attributes:
        scale: transformation and standardization.
        loss: the loss of the fit.
        note: a note for the user, empty without a transformation.
    """

    scale: TargetScale
    loss: Loss
    note: str


def choose_target(
    data: RecipeData, y: Floats, weight: Floats | None, name: str, heads: Sequence[HeadRecipe] = ()
) -> TargetChoice:
    """Return the transformation of a target, and the loss, whose models have the least squared error on held-out rows.

    Counts may take the Poisson loss, skewed positive targets a logarithm or the gamma loss, skewed targets with zeros the Tweedie
    loss, others the transformation of Yeo and Johnson. Errors are those of predictions in the unit of the target, weighted as the
    rows; a change has to be better than the plain target by more than one standard error, but for counts. A target for which a
    head, such as `functions`, estimates at most a fifth of the error of a change stays plain: it has hardly any noise.

    Args:
        data: the rows, with a plain standardized target and the loss `mse`.
        y: the targets in their unit, `(rows,)`.
        weight: weights of the rows.
        name: name of the target, for the note.
        heads: the heads of the fit.
    """
    plain = TargetChoice(TargetScale.fit(y, weight), MSE(), "")
    options = _options(y, weight)
    if not options:
        return plain
    rows = torch.arange(len(y)) if len(y) <= MOST_ROWS else data.folds(-(-len(y) // MOST_ROWS))[0][1]
    part, target = data.take(rows), y[rows.numpy()]
    weight_of_part = None if weight is None else weight[rows.numpy()]
    trials = [_Trial.of(part, target, weight_of_part, *option) for option in (("none", MSE()), *options)]
    folds = part.folds(5)
    # The first fold chooses the change to compare with the plain target, and the heads of the comparison.
    base, *changed = [trial.errors(folds[:1]) for trial in trials]
    change = min(changed, key=lambda each: each.mean)
    for other in changed:  # squares of a logarithm take a fraction of the time of a logarithmic link
        if other.trial.scale.transform == "log" and other.mean - change.mean <= _standard_error(other, change):
            change = other
    if len(folds) > 1:
        if change.mean - base.mean >= UNLIKELY * _standard_error(base, change):
            return plain
        two = list(dict.fromkeys((base.head, change.head)))
        base, change = (each.trial.errors(folds, two) for each in (base, change))
    gain = base.values - change.values
    mean = base.share @ gain
    error = _standard_error(base, change)
    transform, loss = change.trial.scale.transform, change.trial.data.loss
    if float(mean) <= (0.0 if isinstance(loss, Poisson) else error):
        return plain
    variance = _variance(np.ldexp(y, -_exponent(y)), weight)
    if any(head.residual_share(data) * variance <= EXACT * change.mean for head in heads):
        return plain
    scale = TargetScale.fit(y, weight, transform)
    if transform == "log":
        scale = replace(scale, factor=change.factor)
    how = f"the loss {loss.name} with a logarithmic link" if loss.log_link else f"a transformation ({transform})"
    less = 100 * float(mean) / base.mean
    note = (
        f"the target {short(name)} is fitted with {how}: {less:.0f} % less squared error on held-out rows than without"
    )
    return TargetChoice(scale, loss, note)


def _variance(y: Floats, weight: Floats | None) -> float:
    return float(np.average((y - np.average(y, weights=weight)) ** 2, weights=weight))


def _shares(data: RecipeData, folds: list[Fold]) -> Tensor:
    """Return the weights of the rows with sum 1, `(rows,)`; 0 for rows that no fold holds out."""
    held = torch.cat([test for _, test in folds])
    share = torch.zeros(len(data.x), dtype=torch.float64)
    share[held] = 1.0 if data.weight is None else data.weight[held]
    return share / share.sum()


def _options(y: Floats, weight: Floats | None) -> list[tuple[Transform, Loss]]:
    """Return transformations and losses to try beside the plain target."""
    least, most = float(y.min()), float(y.max())
    whole = most < EXACT_INTEGERS and bool((y == np.floor(y)).all())
    y = np.ldexp(y, -_exponent(y))  # cubes of huge values overflow
    center = np.average(y, weights=weight)
    spread = _variance(y, weight) ** 0.5 or 1.0
    skewness = float(np.average(((y - center) / spread) ** 3, weights=weight))
    options: list[tuple[Transform, Loss]] = []
    if whole and least >= 0 and most > 1:
        options.append(("log_link", Poisson()))
    if skewness > SKEWED and least > 0:
        options += [("log", MSE()), ("log_link", Gamma())]
    elif skewness > SKEWED and least == 0 and not whole:
        options.append(("log_link", Tweedie()))
    if abs(skewness) > SKEWED and least <= 0:
        options.append(("yeo_johnson", MSE()))
    return options


class _Errors(NamedTuple):
    """Squared errors of a head on held-out rows.

    Attributes:
        trial: the transformation.
        head: the head.
        values: squared errors, divided by a power of two, `(rows,)`; 0 for rows that were not held out or have no weight.
        share: weights of the rows with sum 1.
        factor: correction of the mean.
    """

    trial: _Trial
    head: HeadRecipe
    values: Tensor
    share: Tensor
    factor: float

    @property
    def mean(self) -> float:
        """Return the mean squared error."""
        return float(self.share @ self.values)


class _Trial(NamedTuple):
    """A transformation of the target with a loss.

    Attributes:
        data: the rows, with transformed targets.
        scale: the transformation.
        y: the targets in their unit.
    """

    data: RecipeData
    scale: TargetScale
    y: Floats

    @classmethod
    def of(cls, data: RecipeData, y: Floats, weight: Floats | None, transform: Transform, loss: Loss) -> _Trial:
        """Return the trial of a transformation and a loss."""
        scale = TargetScale.fit(y, weight, transform)
        return cls(replace(data, y=torch.from_numpy(scale.apply(y)).reshape(-1, 1), loss=loss), scale, y)

    def errors(self, folds: list[Fold], heads: Sequence[HeadRecipe] = ()) -> _Errors:
        """Return the errors of the best head, by default of all quick ones."""
        data, share = self.data, _shares(self.data, folds)
        known, exponent = share > 0, _exponent(self.y)
        weight, wanted = share[known].numpy(), np.ldexp(self.y[known.numpy()], -exponent)
        low, high = data.y.amin(), data.y.amax()
        if data.loss.log_link:  # outputs are logarithms of means
            low, high = data.y.mean().log() - 10, high.log() + 1
        found = []
        for head in heads or _quick_heads(data):
            outputs = head.cross_fit(data, folds).outputs
            predicted = self.scale.invert(outputs[known, 0].clamp(float(low), float(high)).numpy())
            predicted = np.ldexp(predicted, -exponent)
            ratio = _mean_correction(self.scale, predicted, wanted, weight)
            errors = torch.zeros_like(share)
            errors[known] = torch.from_numpy((ratio * predicted - wanted) ** 2)
            found.append(_Errors(self, head, errors, share, ratio))
        return min(found, key=lambda each: each.mean)


def _standard_error(one: _Errors, other: _Errors) -> float:
    """Return the standard error of the difference of mean squared errors."""
    difference = one.values - other.values
    return float((one.share.square() @ (difference - one.share @ difference).square()).sqrt())


def _quick_heads(data: RecipeData) -> Iterator[HeadRecipe]:
    """Yield the heads of the comparison."""
    for kind in catalogue("recipe"):
        for head in kind.offered() if issubclass(kind, HeadRecipe) else ():
            if head.closed_form and 0 <= head.complexity <= QUICK and head.reason_against(data) is None:
                yield head


def _mean_correction(scale: TargetScale, predicted: Floats, wanted: Floats, weight: Floats) -> float:
    """Return the factor that corrects the mean of predictions after a logarithm, 1 within its standard error."""
    error = wanted - predicted
    mean = weight @ error
    if scale.transform != "log" or abs(mean) <= np.sqrt(weight**2 @ (error - mean) ** 2):
        return 1.0
    return float(np.clip((weight @ wanted) / (weight @ predicted), *FACTORS))


def corrected(scale: TargetScale, held_out: Tensor, y: Floats, weight: Floats | None) -> TargetScale:
    """Return a scale with the correction of the mean by the held-out outputs of a model; others than logarithms as they are.

    Args:
        scale: the transformation.
        held_out: outputs of the model, `(rows, 1)`; NaN for rows that were not held out.
        y, weight: targets in their unit, and weights of the rows.
    """
    known = ~held_out[:, 0].isnan().numpy()
    if scale.transform != "log" or not known.any():
        return scale
    share = np.ones(known.sum()) if weight is None else weight[known]
    exponent, plain = _exponent(y), replace(scale, factor=1.0)
    predicted = np.ldexp(plain.invert(held_out[known, 0].numpy()), -exponent)
    wanted = np.ldexp(y[known], -exponent)
    return replace(scale, factor=_mean_correction(scale, predicted, wanted, share / share.sum()))


def _exponent(y: Floats) -> int:
    """Return the power of two above all targets; dividing by it is exact, and squares no longer overflow."""
    return int(np.frexp(np.abs(y).max())[1])
