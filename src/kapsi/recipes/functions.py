"""The functions head: networks of splines and products for few inputs and little noise, by Levenberg–Marquardt."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError
from kapsi.function import option
from kapsi.modules import Model
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData
from kapsi.recipes.constant import ConstantHead
from kapsi.recipes.exact_networks import exact_trial
from kapsi.recipes.function_search import KAN, MARGIN, PRODUCT, FunctionCandidate, network_head, seconds_of_epoch
from kapsi.recipes.mixture import mixture
from kapsi.recipes.trials import Trial, TrialRows, hold_out, random_inputs
from kapsi.training.threads import threads_for

__all__ = ["FunctionsHead", "residual_share"]

Kind = Literal["kan", "product"]
NETWORKS: dict[Kind, FunctionCandidate] = {"kan": KAN, "product": PRODUCT}

REFIT = 20
"""Epochs of the continuation with the validation rows."""

VALIDATION = 0.15
"""Share of the rows on which the fits of several starts are compared."""

NEAR_BEST = 3.0
"""Largest validation loss, relative to the best start, of a start that is averaged with the best."""

FAR_BEHIND = 10.0
"""Smallest ratio of the validation losses at which the worse network is dropped after the first fold."""

MAX_DRIFT = 10.0
"""Largest mean squared change of the outputs by the continuation, relative to the validation loss."""

REFERENCE_INPUTS = 2_000
"""Random inputs at which this change is measured."""

NOISE_ROWS = 600
"""Rows of the estimate of noise; twice as many where these leave too much."""

WIDTHS, RIDGES = (0.05, 0.2, 0.5, 1.0, 2.0), (1e-8, 1e-4, 1e-2, 1e-1)
"""Widths of the kernels of this estimate, relative to the root of the number of inputs, and their penalties."""

FINER = 3
"""Number of pairs of width and penalty that are tried with twice the rows."""


@dataclass(frozen=True)
class FunctionsHead(HeadRecipe, name="functions"):
    """The mean of a few networks f(x), each fitted from other initial values by Levenberg–Marquardt, in one head each.

    The network is a Kolmogorov–Arnold network [m, 5, n] with a penalty on the second differences of its splines, or three layers
    [m, 4, 3, n] of splines and products, `Extended` of B-splines and Taylor polynomials of degree 2. All starts are compared on a
    part of the training rows, and the near-best ones are continued on all; `cross_fit` drops a network that is far behind in the
    first fold. Products of powers of the inputs, and waves of one input, are tried first, and end the search if they are exact.
    Suits smooth targets with little noise, and at most 9 inputs; inputs are clamped a tenth of their range beyond the training
    rows.

    Args:
        networks: `kan`, `product`, or both.
        starts: number of initial values of each network.
        noise: largest share of the variance of the targets that may be noise, by the leave-one-out error of kernel ridge
            regression; 1 for no limit.

    Source: arXiv 2404.19756 for `kan`; arXiv 2407.04819, the networks of Feynman functions, for `product`.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.recipes import RecipeData
        >>> x = torch.linspace(-1.7, 1.7, 80, dtype=torch.float64).unsqueeze(1)
        >>> data = RecipeData(x, (3 * x).sin(), kp.MSE(), 0, torch.ones(1, dtype=torch.bool))
        >>> model = FunctionsHead(networks=("kan",), starts=1).fit(data)
        >>> len(model.layers), bool((model(x) - data.y).square().mean() < 1e-6)
        (1, True)
    """

    complexity: ClassVar[int] = 7
    examples = ({}, {"networks": ("kan",), "starts": 1})

    networks: tuple[Kind, ...] = ("kan", "product")
    starts: int = option(2, minimum=1, maximum=20)
    noise: float = option(0.1, minimum=0.0, maximum=1.0)

    max_inputs: ClassVar[int] = 9
    max_rows: ClassVar[int] = 5_000
    max_outputs: ClassVar[int] = 3

    def least_budget(self, data: RecipeData) -> float:
        return 60.0

    def reason_against(self, data: RecipeData) -> str | None:
        return self._reason_of_size(data) or self._reason_of_noise(data, self._share(data))

    def residual_share(self, data: RecipeData) -> float:
        if self._reason_of_size(data) is not None:
            return math.inf
        share = self._share(data)
        return share if self._reason_of_noise(data, share) is None else math.inf

    def _share(self, data: RecipeData) -> float:
        return residual_share(data.x, data.y, self.noise) if self.noise < 1 else 0.0

    def _reason_of_size(self, data: RecipeData) -> str | None:
        rows, inputs = data.x.shape
        if not data.loss.closed_form:
            return f"functions fits squared errors, not {data.loss.name}"
        for count, most, what in (
            (inputs, self.max_inputs, "inputs"),
            (rows, self.max_rows, "rows"),
            (data.outputs, self.max_outputs, "targets"),
        ):
            if count > most:
                return f"functions is for at most {most:,} {what}, not {count:,}"
        if rows < 30 * inputs:
            return f"functions needs 30 rows for each input, not {rows} for {inputs}"
        return None

    def _reason_of_noise(self, data: RecipeData, share: float) -> str | None:
        if share > self.noise:
            return f"the targets have noise: {share:.2g} of their variance is left by neighbors, at most {self.noise:g} is allowed"
        if self.noise < 1 and _quadratic_share(data.x, data.y) <= 2 * share:
            return "a quadratic polynomial fits as well"
        return None

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        epochs = sum(NETWORKS[kind].config.epochs + REFIT for kind in self.networks) * self.starts
        return epochs * seconds_of_epoch(5 * 13 * (inputs + outputs) + 100, rows, outputs)

    def narrowed(self, trial: FunctionsHead) -> FunctionsHead:
        return replace(self, networks=trial.networks)

    def check(self) -> None:
        if not self.networks or len(set(self.networks)) < len(self.networks):
            raise SpecError(f"FunctionsHead(networks={list(self.networks)}): expected kan, product, or both")

    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        return self._fit(data, seed)[1]

    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        outputs = data.x.new_full((len(data.x), data.outputs), torch.nan)
        recipe, exact = self, True
        for number, (rows, test) in enumerate(folds):
            losses, model = recipe._fit(data.take(rows), seed, exact)
            if number == 0 and losses:
                exact = False
                best = min(losses.values())
                recipe = replace(self, networks=tuple(kind for kind in losses if losses[kind] <= FAR_BEHIND * best))
            with torch.no_grad():
                outputs[test] = model(data.x[test])
        return CrossFit(outputs, recipe, time.perf_counter() - start)

    def _fit(self, data: RecipeData, seed: int, exact: bool = True) -> tuple[dict[Kind, float], Model]:
        """Return the lowest validation loss of each network, and the model.

        There are no losses for an exact network, which is tried if `exact`, and for the constant if all fits fail.
        """
        rows = TrialRows(data.x, data.y, weight=data.weight)
        with threads_for(0):
            trials = [trial for trial in _trials(self, data, rows, seed, exact) if not trial.failed]
            if not trials:
                return {}, ConstantHead().fit(data, seed)
            best = min(trial.error for trial in trials)
            near = [trial for trial in trials if trial.error <= NEAR_BEST * best]
            reference = random_inputs(data.x, REFERENCE_INPUTS, seed)
            networks = [_continued(trial, rows, reference) for trial in near]
        low, high = data.x.aminmax(dim=0)
        margin = MARGIN * (high - low)
        heads = [network_head(network, low - margin, high + margin) for network in networks]
        errors = {kind: [t.error for t in trials if t.candidate.name == kind] for kind in self.networks}
        return {kind: min(found) for kind, found in errors.items() if found}, mixture(
            heads, [1 / len(heads)] * len(heads)
        )


def _trials(recipe: FunctionsHead, data: RecipeData, rows: TrialRows, seed: int, exact: bool) -> Iterator[Trial]:
    """Yield all starts of all networks, fitted without the validation rows; an exact one alone if there is one."""
    count = max(1, round(VALIDATION * len(data.x)))
    fitted, held_out = hold_out(data.x, data.y, count, count // 3, 0, seed)
    found = exact_trial(rows.subset(fitted), rows.subset(held_out)) if exact else None
    if found is not None:
        yield found
        return
    for kind in recipe.networks:
        candidate = NETWORKS[kind].sized(data.x.shape[1], data.outputs)
        candidate = replace(candidate, training=replace(candidate.config, loss=data.loss))
        for start in range(recipe.starts):
            number = (seed * 1_000_003 + start) % 2**32
            trial = Trial(candidate, start, number, Model(candidate.spec, seed=number, dtype=torch.float64))
            calibrate(trial.model, data.x)
            trial.train(rows.subset(fitted), candidate.config, rows.subset(held_out))
            yield trial


def _continued(trial: Trial, rows: TrialRows, reference: Tensor) -> Model:
    """Return a network trained further on all rows; the same one if that changes its outputs between the rows too much."""
    drift, refitted = trial.refit(rows, replace(trial.candidate.config, epochs=REFIT), reference)
    return refitted.model if drift <= MAX_DRIFT else trial.model


def residual_share(x: Tensor, y: Tensor, limit: float = 1.0) -> float:
    """Return the share of the variance of targets left by kernel ridge regression, leave-one-out, of at most 600 rows.

    Few rows of a rough function leave as much as noise. Noise stays with twice the rows, though: where the share is above the
    limit and halves with them, the smaller one is returned.

    Args:
        x: standardized inputs, `(rows, m)`.
        y: targets, `(rows, n)`.
        limit: share that is low enough.

    Example:
        >>> x = torch.linspace(-1.7, 1.7, 100, dtype=torch.float64).unsqueeze(1)
        >>> noise = torch.randn(100, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> residual_share(x, x.sin()) < 1e-6, residual_share(x, noise) > 0.7
        (True, True)
    """
    shares = _kernel_shares(x, y, NOISE_ROWS, [(width, ridge) for width in WIDTHS for ridge in RIDGES])
    share = min(shares.values())
    if share <= limit or len(x) <= NOISE_ROWS:
        return share
    finer = min(_kernel_shares(x, y, 2 * NOISE_ROWS, sorted(shares, key=shares.__getitem__)[:FINER]).values())
    return finer if finer <= share / 2 else share


def _kernel_shares(
    x: Tensor, y: Tensor, most: int, options: Sequence[tuple[float, float]]
) -> dict[tuple[float, float], float]:
    """Return the share left for each width of the kernel and penalty, 1 at most; of at most so many rows."""
    step = max(1, math.ceil(len(x) / most))
    x, y = x[::step], y[::step]
    y = y - y.mean(0)
    total = y.square().mean(0).clamp_min(1e-300)
    squares = torch.cdist(x, x).square() / x.shape[1]
    shares = {}
    for width, ridge in options:
        kernel = (squares / (-2 * width**2)).exp()
        kernel.diagonal().add_(ridge)
        lower, failed = torch.linalg.cholesky_ex(kernel)
        inverse = torch.cholesky_inverse(lower)
        share = (
            1.0
            if int(failed)
            else float((((inverse @ y) / inverse.diagonal()[:, None]).square().mean(0) / total).mean())
        )
        shares[width, ridge] = min(1.0, share) if math.isfinite(share) else 1.0
    return shares


def _quadratic_share(x: Tensor, y: Tensor) -> float:
    """Return the share of the variance of targets left by a quadratic polynomial, leave-one-out."""
    pairs = torch.combinations(torch.arange(x.shape[1]), with_replacement=True)
    columns = torch.cat((torch.ones_like(x[:, :1]), x, x[:, pairs[:, 0]] * x[:, pairs[:, 1]]), 1)
    basis = torch.linalg.qr(columns).Q
    errors = (y - basis @ (basis.T @ y)) / (1 - basis.square().sum(1, keepdim=True)).clamp_min(1e-9)
    return float((errors.square().mean(0) / y.var(0, correction=0).clamp_min(1e-300)).mean())
