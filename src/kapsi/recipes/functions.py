"""The functions head: networks of splines and products for few inputs and little noise, by Levenberg–Marquardt."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import KapsiError, SpecError
from kapsi.expansion import BSpline, Extended, Taylor
from kapsi.function import option
from kapsi.hidden_layers import Layers
from kapsi.modules import Model
from kapsi.process import Clamp
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData, row_losses
from kapsi.recipes.constant import ConstantHead
from kapsi.recipes.mixture import mixture
from kapsi.remainder import LinearRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, rpn
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train
from kapsi.training.solvers import LevenbergMarquardt
from kapsi.training.threads import threads_for

__all__ = ["FunctionsHead", "residual_share"]

Kind = Literal["kan", "product"]

EPOCHS, REFIT = 60, 20
"""Epochs of a fit, and of its continuation with the validation rows."""

VALIDATION = 0.15
"""Share of the rows on which the fits of several starts are compared."""

NEAR_BEST = 3.0
"""Largest validation loss, relative to the best start, of a start that is averaged with the best."""

FAR_BEHIND = 10.0
"""Smallest ratio of the validation losses at which the worse network is dropped after the first fold."""

MAX_DRIFT = 10.0
"""Largest mean squared change of the outputs by the continuation, relative to the validation loss."""

MARGIN = 0.1
"""Part of the width of the training range by which an input may leave the range before it is clamped."""

NOISE_ROWS = 600
"""Rows of the estimate of noise."""


@dataclass(frozen=True)
class FunctionsHead(HeadRecipe, name="functions"):
    """The mean of a few networks f(x), each fitted from other initial values by Levenberg–Marquardt, in one head each.

    The network is a Kolmogorov–Arnold network [m, 5, n] with a penalty on the second differences of its splines, or three layers
    [m, 4, 3, n] of splines and products, `Extended` of B-splines and Taylor polynomials of degree 2. All starts are compared on a
    part of the training rows, and the near-best ones are continued on all; `cross_fit` drops a network that is far behind in the
    first fold. Suits smooth targets with little noise, and at most 9 inputs; inputs are clamped a tenth of their range beyond the
    training rows.

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
    least_budget: ClassVar[float] = 60.0
    separate_folds: ClassVar[bool] = True
    examples = ({}, {"networks": ("kan",), "starts": 1})

    networks: tuple[Kind, ...] = ("kan", "product")
    starts: int = option(2, minimum=1, maximum=20)
    noise: float = option(0.1, minimum=0.0, maximum=1.0)

    max_inputs: ClassVar[int] = 9
    max_rows: ClassVar[int] = 5_000
    max_outputs: ClassVar[int] = 3

    def reason_against(self, data: RecipeData) -> str | None:
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
        share = residual_share(data.x, data.y) if self.noise < 1 else 0.0
        if share > self.noise:
            return f"the targets have noise: {share:.2g} of their variance is left by neighbors, at most {self.noise:g} is allowed"
        if self.noise < 1 and _quadratic_share(data.x, data.y) <= 2 * share:
            return "a quadratic polynomial fits as well"
        return None

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        count = 5 * 13 * (inputs + outputs) + 100
        epochs = len(self.networks) * self.starts * (EPOCHS + REFIT)
        return epochs * (2e-3 + rows * outputs * (3e-8 * count + 1e-11 * count**2))

    def check(self) -> None:
        if not self.networks or len(set(self.networks)) < len(self.networks):
            raise SpecError(f"FunctionsHead(networks={list(self.networks)}): expected kan, product, or both")

    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        return self._fit(data, seed)[1]

    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        outputs = data.x.new_full((len(data.x), data.outputs), torch.nan)
        recipe = self
        for number, (rows, test) in enumerate(folds):
            losses, model = recipe._fit(data.take(rows), seed)
            if number == 0 and losses:
                best = min(losses.values())
                recipe = replace(self, networks=tuple(kind for kind in losses if losses[kind] <= FAR_BEHIND * best))
            with torch.no_grad():
                outputs[test] = model(data.x[test])
        return CrossFit(outputs, recipe, time.perf_counter() - start)

    def _fit(self, data: RecipeData, seed: int) -> tuple[dict[Kind, float], Model]:
        """Return the lowest validation loss of each network, and the model; no losses for the constant if all fits fail."""
        tried = _tried(self.networks, data, self.starts, seed)
        if not tried:
            return {}, ConstantHead().fit(data, seed)
        best = min(loss for loss, _, _ in tried)
        near = [entry for entry in tried if entry[0] <= NEAR_BEST * best]
        low, high = data.x.aminmax(dim=0)
        margin = MARGIN * (high - low)
        with threads_for(0):
            networks = [_continued(kind, network, loss, data, seed) for loss, kind, network in near]
        heads = [_one_head(network, low - margin, high + margin) for network in networks]
        losses: dict[Kind, float] = {}
        for loss, kind, _ in tried:
            losses[kind] = min(loss, losses.get(kind, math.inf))
        return losses, mixture(heads, [1 / len(heads)] * len(heads))


def residual_share(x: Tensor, y: Tensor) -> float:
    """Return the share of the variance of targets left by kernel ridge regression, leave-one-out, of at most 600 rows.

    Args:
        x: standardized inputs, `(rows, m)`.
        y: targets, `(rows, n)`.

    Example:
        >>> x = torch.linspace(-1.7, 1.7, 100, dtype=torch.float64).unsqueeze(1)
        >>> noise = torch.randn(100, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> residual_share(x, x.sin()) < 1e-6, residual_share(x, noise) > 0.7
        (True, True)
    """
    step = max(1, math.ceil(len(x) / NOISE_ROWS))
    x, y = x[::step], y[::step]
    y = y - y.mean(0)
    total = y.square().mean(0).clamp_min(1e-300)
    squares = torch.cdist(x, x).square() / x.shape[1]
    eye = torch.eye(len(x), dtype=x.dtype)
    best = 1.0
    for width in (0.05, 0.2, 0.5, 1.0, 2.0):
        kernel = (squares / (-2 * width**2)).exp()
        for penalty in (1e-8, 1e-4, 1e-2, 1e-1):
            inverse = torch.linalg.inv(kernel + penalty * eye)
            errors = (inverse @ y) / inverse.diagonal().unsqueeze(1)
            share = float((errors.square().mean(0) / total).mean())
            best = min(best, share) if math.isfinite(share) else best
    return best


def _quadratic_share(x: Tensor, y: Tensor) -> float:
    """Return the share of the variance of targets left by a quadratic polynomial, leave-one-out."""
    pairs = torch.combinations(torch.arange(x.shape[1]), with_replacement=True)
    columns = torch.cat((torch.ones_like(x[:, :1]), x, x[:, pairs[:, 0]] * x[:, pairs[:, 1]]), 1)
    basis = torch.linalg.qr(columns).Q
    errors = (y - basis @ (basis.T @ y)) / (1 - basis.square().sum(1, keepdim=True)).clamp_min(1e-9)
    return float((errors.square().mean(0) / y.var(0, correction=0).clamp_min(1e-300)).mean())


def _spec(kind: Kind, inputs: int, outputs: int) -> ModelSpec:
    if kind == "kan":
        base = LinearRemainder(before="silu")  # type: ignore[arg-type]
        return rpn((inputs, 5, outputs), BSpline(intervals=8), remainder=base)
    taylor, layers = Taylor(2, symmetric=True), []
    for spline in (BSpline(5), *[BSpline(5, knots="quantile", uniform_share=0.2)] * 2):
        layers.append(LayerSpec((HeadSpec(Extended((spline, taylor)), remainder=LinearRemainder(), init="measured"),)))
    return ModelSpec((inputs, 4, 3, outputs), tuple(layers))


def _config(kind: Kind, data: RecipeData, epochs: int, seed: int) -> TrainConfig:
    penalties = {"kan": {"smoothness": "auto"}, "product": {"smoothness": 0.0, "l2": 1e-7}}[kind]
    return TrainConfig(loss=data.loss, solver=LevenbergMarquardt(), epochs=epochs, seed=seed, **penalties)  # type: ignore[arg-type]


def _tried(kinds: Sequence[Kind], data: RecipeData, starts: int, seed: int) -> list[tuple[float, Kind, Model]]:
    """Return validation loss, kind and network of each start with a finite loss; some rows are left for validation."""
    held_out = _validation(data.x, seed)
    validation, rows = data.take(held_out.nonzero()[:, 0]), data.take((~held_out).nonzero()[:, 0])
    tried: list[tuple[float, Kind, Model]] = []
    with threads_for(0):
        for kind in kinds:
            spec = _spec(kind, data.x.shape[1], data.outputs)
            for start in range(starts):
                number = (seed * 1_000_003 + start) % 2**32
                model = calibrate(Model(spec, seed=number, dtype=torch.float64), data.x)
                loss = (
                    _loss(model, validation) if _trained(model, rows, _config(kind, data, EPOCHS, number)) else math.inf
                )
                if math.isfinite(loss):
                    tried.append((loss, kind, model))
    return tried


def _validation(x: Tensor, seed: int) -> Tensor:
    """Return which rows are left for validation, `(rows,)`: a third of them extreme in random directions, where fits fail first."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(VALIDATION * len(x)))
    held_out = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(count // 3):
        direction = torch.randn(x.shape[1], generator=generator, dtype=x.dtype)
        held_out[torch.where(held_out, -math.inf, x @ direction).argmax()] = True
    others = (~held_out).nonzero()[:, 0]
    order = torch.randperm(len(others), generator=generator)
    held_out[others[order[: count - count // 3]]] = True
    return held_out


def _continued(kind: Kind, model: Model, loss: float, data: RecipeData, seed: int) -> Model:
    """Return a network trained further on all rows; the same one if that changes its outputs between the rows too much."""
    further = copy.deepcopy(model)
    if not _trained(further, data, _config(kind, data, REFIT, seed)):
        return model
    generator = torch.Generator().manual_seed(seed)
    low, high = data.x.aminmax(dim=0)
    x = low + (high - low) * torch.rand(2_000, data.x.shape[1], generator=generator, dtype=torch.float64)
    with torch.no_grad():
        drift = float((further(x) - model(x)).square().mean())
    return further if drift <= MAX_DRIFT * loss or loss == 0 else model


def _trained(model: Model, data: RecipeData, config: TrainConfig) -> bool:
    """Train a network in place; return whether it succeeded."""
    rows = (data.x, data.y) if data.weight is None else (data.x, data.y, data.weight)
    try:
        for _ in train(model, rows, config):
            pass
    except KapsiError:
        return False
    finally:
        model.eval()
    return True


@torch.no_grad()
def _loss(model: Model, data: RecipeData) -> float:
    value = float(row_losses(model(data.x), data.y, data.loss).mean())
    return value if math.isfinite(value) else math.inf


@torch.no_grad()
def _one_head(network: Model, low: Tensor, high: Tensor) -> Model:
    """Return a network as one head, with inputs clamped to a range."""
    widths = network.spec.widths
    kappa = Layers(widths[1:], network.spec.layers)  # type: ignore[arg-type]
    head = HeadSpec(kappa, before=(Clamp(),))
    spec = ModelSpec((widths[0], widths[-1]), (LayerSpec((head,)),))
    model = Model(spec, device="meta", dtype=torch.float64).to_empty(device="cpu")
    state = {f"layers.0.heads.0.kappa.model.{name}": tensor for name, tensor in network.state_dict().items()}
    state["layers.0.heads.0.psi.matrix"] = torch.eye(network.out_features, dtype=torch.float64)
    state |= {"layers.0.heads.0.before.0.low": low, "layers.0.heads.0.before.0.high": high}
    model.load_state_dict(state)
    return model.eval()
