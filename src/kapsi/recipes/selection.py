"""Weights of heads from their outputs for held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kapsi.recipes.base import row_losses
from kapsi.training.losses import Loss

__all__ = ["Selected", "select_heads"]

STEPS = 30
"""Maximum number of greedy steps; weights are multiples of 1 / steps."""

NEAR_BEST = 3
"""Maximum number of heads in the initial average."""

SIMILAR, MOST_SIMILAR = 2.0, 5
"""Standard errors within which heads count as equal to the best head, and the maximum number of these heads."""

LEAST_GAIN = 1e-4
"""Minimum relative decrease of the loss for another step."""

SMOOTH = 3.0
"""Pseudo-rows in favor of a scale of 1, in the choice of the scale of logits."""

UNKNOWN = 1.0
"""Pseudo-rows of unknown class in the same choice: a few rows without error do not prove a probability of 1."""

SURE_ROWS, SURE_LOSS = 200.0, 5.0
"""Number of rows, and summed loss in nats, from which classes count as noisy: many rows without loss are free of noise."""

TOGETHER = 2**18
"""Outputs whose losses are computed at once."""

SCALES = tuple(2 ** (i / 10) for i in range(-50, 11))
"""Scales of logits."""


class Selected(NamedTuple):
    """The weights of the heads.

    Attributes:
        weights: weight of each head, at least 0; the sum is the scale of the logits, and to 1 for real targets.
        loss: loss of the weighted sum on held-out rows.
    """

    weights: tuple[float, ...]
    loss: float


class _Losses:
    """Losses of weighted sums of the heads on held-out rows.

    Args:
        outputs: outputs of the heads, `(heads, rows, n)`.
        y, weight: targets and weights of the rows.
        loss: the loss.

    Attributes:
        rows: effective number of rows.
    """

    def __init__(self, outputs: Tensor, y: Tensor, weight: Tensor, loss: Loss) -> None:
        self.outputs, self.y, self.loss = outputs, y, loss
        self.weight = weight / weight.sum()
        self.rows = float(1 / self.weight.square().sum())

    def of(self, weights: Sequence[float]) -> Tensor:
        """Return the loss of each row for weights of the heads, `(rows,)`."""
        used = [(w, out) for w, out in zip(weights, self.outputs, strict=True) if w]
        total = used[0][0] * used[0][1]
        for w, out in used[1:]:
            total = total.add(out, alpha=w)
        return row_losses(total, self.y, self.loss)

    def mean(self, rows: Tensor) -> float:
        """Return the mean of losses of the rows; infinity if not finite."""
        value = float(self.weight @ rows)
        return value if math.isfinite(value) else math.inf

    def means(self, outputs: Callable[[slice], Tensor], count: int) -> list[float]:
        """Return the mean loss of several outputs `(count, rows, n)`, a few of which are computed at a time."""
        size, found = max(1, TOGETHER // max(1, self.outputs[0].numel())), []
        for first in range(0, count, size):
            part = outputs(slice(first, first + size))
            y = self.y.repeat(len(part), *[1] * (self.y.dim() - 1))
            rows = row_losses(part.flatten(0, 1), y, self.loss).view(len(part), -1)
            found += (rows @ self.weight).tolist()
        return [value if math.isfinite(value) else math.inf for value in found]

    def error(self, difference: Tensor) -> float:
        """Return the standard error of a mean difference of the losses of the rows."""
        center = self.weight @ difference
        return math.sqrt(float(self.weight.square() @ (difference - center).square()))


def select_heads(
    outputs: Sequence[Tensor],
    y: Tensor,
    weight: Tensor | None,
    loss: Loss,
    complexity: Sequence[int],
    tie: float = 0.0,
    average: float = 0.0,
) -> Selected:
    """Return weights of heads whose sum has a low loss on held-out rows.

    Greedy selection with replacement, starting from the average of up to three heads within one standard error of the best;
    then heads are left out, the most complex first, while the loss rises by no more than `tie` standard errors of the paired
    difference. A part of the weights is shared equally by similar heads: few rows favor heads by chance, for example heads
    with extreme probabilities on easy rows. Logits get a common scale, drawn toward 1. Both matter less for many rows with
    hardly any loss.

    Args:
        outputs: outputs of each head for the same rows, `(rows, n)`.
        y: targets, as `RecipeData.y`.
        weight: weights of the rows, `(rows,)`, or None.
        loss: the loss.
        complexity: order of simplicity of each head.
        tie: number of standard errors that count as a tie.
        average: the part of the weights, 0 to 1, shared equally by at most five heads within two standard errors, and twice the
            loss, of the best head.

    Source: Caruana, Niculescu-Mizil, Crew and Ksikes, Ensemble selection from libraries of models (2004).

    Example:
        >>> from kapsi.training.losses import MSE
        >>> y = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
        >>> noise = torch.tensor([[0.5], [-0.5], [0.5], [-0.5]], dtype=torch.float64)
        >>> select_heads([y + noise, y - noise, y * 0], y, None, MSE(), [0, 1, 2]).weights
        (0.5, 0.5, 0.0)
    """
    ones = torch.ones(len(y), dtype=outputs[0].dtype)
    losses = _Losses(torch.stack(list(outputs)), y, ones if weight is None else weight, loss)
    counts = _start(losses, complexity)
    best, chosen = losses.mean(losses.of(_shares(counts))), counts
    total = cast(Tensor, sum(c * out for c, out in zip(counts, losses.outputs, strict=True) if c))
    for steps in range(sum(counts), STEPS):
        values = losses.means(lambda part: (total + losses.outputs[part]) / (steps + 1), len(counts))  # noqa: B023
        first = min(range(len(values)), key=values.__getitem__)
        counts = [c + (i == first) for i, c in enumerate(counts)]
        total = total + losses.outputs[first]
        if values[first] < best - LEAST_GAIN * abs(best):
            best, chosen = values[first], counts
    weights = _fewer(losses, _shares(chosen), complexity, tie)
    noise = _noise(losses, weights) if loss.classes else 1.0
    average *= noise
    if average:
        equal = _shares(_near_best(losses, complexity, SIMILAR, MOST_SIMILAR)[0])
        weights = [(1 - average) * w + average * e for w, e in zip(weights, equal, strict=True)]
    scale = _scale(losses, weights, UNKNOWN * noise) if loss.classes else 1.0
    weights = [scale * w for w in weights]
    return Selected(tuple(weights), losses.mean(losses.of(weights)))


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts]


def _near_best(losses: _Losses, complexity: Sequence[int], errors: float, most: int) -> tuple[list[int], int]:
    """Return a count of 1 for heads within some standard errors, and twice the loss, of the best head; and its position."""
    heads = len(losses.outputs)
    rows = [losses.of([float(i == j) for j in range(heads)]) for i in range(heads)]
    means = [losses.mean(values) for values in rows]
    order = sorted(range(heads), key=lambda i: (means[i], complexity[i]))
    best = order[0]
    # A nearly exact head errs in few rows, so standard errors are relatively large.
    near = [i for i in order if means[i] - means[best] <= abs(means[best])]
    near = [i for i in near if means[i] - means[best] <= errors * losses.error(rows[i] - rows[best])]
    chosen = near[:most] or [best]
    return [int(i in chosen) for i in range(heads)], best


def _start(losses: _Losses, complexity: Sequence[int]) -> list[int]:
    """Return a count of 1 for the best heads: at most three, within a standard error of the best."""
    average, first = _near_best(losses, complexity, 1.0, NEAR_BEST)
    best = [int(i == first) for i in range(len(average))]
    return average if losses.mean(losses.of(_shares(average))) <= losses.mean(losses.of(_shares(best))) else best


def _fewer(losses: _Losses, weights: list[float], complexity: Sequence[int], tie: float) -> list[float]:
    """Return the weights without heads that change the loss by no more than the tie."""
    full = losses.of(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-complexity[i], weights[i])):
        others = [0.0 if i == j else w for j, w in enumerate(weights)]
        total = sum(others)
        if not weights[i] or not total:
            continue
        trial = [w / total for w in others]
        rows = losses.of(trial)
        if losses.mean(rows - full) <= tie * losses.error(rows - full):
            weights = trial
    return weights


def _noise(losses: _Losses, weights: list[float]) -> float:
    """Return how much noise in the classes the rows leave possible, 0 to 1."""
    rows = losses.rows
    return min(1.0, SURE_ROWS / rows + rows * losses.mean(losses.of(weights)) / SURE_LOSS)


def _scale(losses: _Losses, weights: list[float], guard: float) -> float:
    """Return the scale of the logits with the least loss, with some rows for the scale 1 and some of unknown class (`guard`)."""
    total = cast(Tensor, sum(w * out for w, out in zip(weights, losses.outputs, strict=True) if w))
    scales = total.new_tensor(SCALES)
    means = losses.means(lambda part: scales[part, None, None] * total, len(SCALES))
    unknown = [losses.mean(-(scale * total).log_softmax(1).mean(1)) for scale in SCALES]
    doubts = [SMOOTH * math.log(scale) ** 2 + guard * other for scale, other in zip(SCALES, unknown, strict=True)]
    values = [loss + doubt / losses.rows for loss, doubt in zip(means, doubts, strict=True)]
    best = min(range(len(values)), key=values.__getitem__)
    return SCALES[best] if values[best] < math.inf else 1.0
