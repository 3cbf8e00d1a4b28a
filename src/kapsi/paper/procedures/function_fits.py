"""Rows, trials and fits of the procedure `functions`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.data.problems import problem
from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.modules import Head, Layer, Model, trained_count
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures.grids import regrid
from kapsi.reconciliation import LowRank
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train
from kapsi.training.losses import MSE
from kapsi.training.solvers import LevenbergMarquardt, Ridge

if TYPE_CHECKING:
    from kapsi.paper.procedures.functions import FunctionCandidate, FunctionOptions

DISTANCE_WEIGHT = 0.1
"""Weight of the squared distance to the nearest other fit on the reference inputs, relative to the validation error."""
MAX_PEER_ERROR = 100
"""Largest validation error, relative to a fit's error, of other fits compared with it on the reference inputs.

A fit much better than all others is far from them because they are wrong.
"""
MAX_SUBSTITUTE_ERROR = 10.0
"""Largest error, relative to the selected fit, of a fit that may replace it if its refit drifts."""
EXTENDED_DRIFT = 10.0
"""Factor on `max_drift` if the refits of all fits exceed it."""


@dataclass
class _Curve:
    """Mean squared errors after each epoch, in units of the function."""

    train: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)


@dataclass
class Trial:
    """A model during a fit.

    Attributes:
        candidate: specification and training.
        number: index of the trial within the candidate.
        seed: seed of initial values and restarts.
        model: the model.
        error: validation error.
        epochs: number of epochs so far.
        failed: reason of a failed fit, or empty.
        distance: squared distance to the nearest other fit on the reference inputs.
        curve: errors after each epoch.
    """

    candidate: FunctionCandidate
    number: int
    seed: int
    model: Model
    error: float = math.inf
    epochs: int = 0
    failed: str = ""
    distance: float = 0.0
    curve: _Curve = field(default_factory=_Curve)

    def loss(self) -> float:
        """Return the criterion of the selection."""
        return self.error + DISTANCE_WEIGHT * self.distance


@dataclass(frozen=True)
class FunctionRows:
    """Inputs of the model, and targets in units of the function.

    Attributes:
        x: `(rows, m)`.
        y: `(rows, 1)`.
        mean, deviation: shift and scale of the targets.
    """

    x: Tensor
    y: Tensor
    mean: float
    deviation: float

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Return inputs and scaled targets."""
        return self.x, (self.y - self.mean) / self.deviation

    def subset(self, indices: Tensor) -> FunctionRows:
        """Return some of the rows."""
        return replace(self, x=self.x[indices], y=self.y[indices])

    @torch.no_grad()
    def error(self, model: Model) -> float:
        """Return the mean squared error in units of the function, infinite instead of NaN."""
        value = float((model(self.x) * self.deviation + self.mean - self.y).square().mean())
        return value if math.isfinite(value) else math.inf


def draw(options: FunctionOptions, seed: int) -> tuple[FunctionRows, FunctionRows]:
    """Return training and test rows, scaled by the training rows."""
    arrays = problem(options.function).split(options.rows, cast(int, options.train), seed=seed, noise=options.noise)
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
    low, high = x.amin(0), x.amax(0)
    center, half_width = (low + high) / 2, ((high - low) / 2).clamp_min(torch.finfo(x.dtype).tiny)
    if options.inputs == "unit":
        x, x_test = (x - center) / half_width, (x_test - center) / half_width
    scale = _target_scale(y, options.targets)
    return FunctionRows(x, y.unsqueeze(1), *scale), FunctionRows(x_test, y_test.unsqueeze(1), *scale)


def _target_scale(y: Tensor, targets: str) -> tuple[float, float]:
    """Return shift and scale of the targets."""
    mean, deviation = 0.0, 1.0
    if targets == "standard":
        mean, deviation = float(y.mean()), float(y.std())
    elif targets == "scaled":
        deviation = float(y.abs().mean())
    # Constant targets are not scaled.
    return mean, deviation if deviation > 0 else 1.0


def hold_out(rows: FunctionRows, options: FunctionOptions, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of fitted rows and of validation rows, some of the latter extreme in random directions."""
    x = rows.x
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(options.validation * len(x)))
    fitted = torch.ones(len(x), dtype=torch.bool)
    for _ in range(round(options.edge * count)):
        direction = torch.randn(x.shape[1], generator=generator, dtype=x.dtype)
        fitted[torch.where(fitted, x @ direction, -math.inf).argmax()] = False
    for i in range(round(options.tails * count)):
        fitted[torch.where(fitted, rows.y[:, 0] * (-1 if i % 2 else 1), -math.inf).argmax()] = False
    rest = fitted.nonzero().squeeze(1)
    order = torch.randperm(len(rest), generator=generator)
    fitted[rest[order[: max(0, count - (len(x) - len(rest)))]]] = False
    return fitted.nonzero().squeeze(1), (~fitted).nonzero().squeeze(1)


# ------------------------------------------------------------------------------------------------ fits


class FunctionFits:
    """The fits of a run.

    Args:
        run: experiment, row and seed.
        options: options of the procedure.
        training, test: rows from `draw`.
    """

    def __init__(self, run: Run, options: FunctionOptions, training: FunctionRows, test: FunctionRows) -> None:
        self.run, self.options, self.training, self.test = run, options, training, test
        self.scales = {c.targets: _target_scale(training.y, c.targets) for c in options.candidates}

    def _scaled_for(self, rows: FunctionRows, candidate: FunctionCandidate) -> FunctionRows:
        """Return rows with the target scale of a candidate."""
        mean, deviation = self.scales[candidate.targets]
        return replace(rows, mean=mean, deviation=deviation)

    def select(self) -> Outcome:
        """Select on validation rows, refit on all training rows, and score."""
        options = self.options
        fitted, held_out = hold_out(self.training, options, self._seed(0))
        trials, continued = self._fit_all(self.training.subset(fitted), self.training.subset(held_out))
        compare = options.consensus is not False and options.reference_inputs > 0
        if compare:
            self._compare(continued)
        # A simple model preferred by min_improvement may be among the trials not continued.
        pool = continued if compare and options.min_improvement == 1 else trials
        best = self._best(pool)
        if best.failed:
            raise KapsiError(f"{self.run.experiment}, {self.run.row}: no candidate could be fitted; {best.failed}")
        errors: dict[str, float] = {}
        for trial in trials:
            errors[trial.candidate.name] = min(trial.error, errors.get(trial.candidate.name, math.inf))
        best, refitted = self._refit_best(best, pool)
        extra = {
            "candidate": best.candidate.name,
            "trial": best.number,
            "refitted": refitted,
            "validation_errors": errors,
            "fits": len(trials),
            "failed": sum(bool(trial.failed) for trial in trials),
        }
        return self._score(best, errors[best.candidate.name], extra)

    def _fit_all(self, rows: FunctionRows, validation: FunctionRows) -> tuple[list[Trial], list[Trial]]:
        """Fit all trials, with successive halving if requested; return all trials and the continued ones."""
        halving = self.options.successive_halving
        target_error = self.options.target_error * float(self.training.y.var())
        trials: list[Trial] = []
        for trial in self._trials(rows.x, trials):
            config = trial.candidate.training
            self._train(trial, rows, config if halving is None else replace(config, epochs=halving.epochs), validation)
            trials.append(trial)
            if trial.error <= target_error:
                break
        if halving is None:
            return trials, trials
        trials.sort(key=lambda trial: trial.error)
        continued = trials[: halving.keep]
        for trial in continued:
            config = trial.candidate.training
            if not trial.failed and config.epochs > halving.epochs and trials[0].error > target_error:
                rest = replace(_without_restarts(config), epochs=config.epochs - halving.epochs)
                self._train(trial, rows, rest, validation)
        return trials, continued

    def _best(self, trials: list[Trial]) -> Trial:
        """Return the trial with the lowest criterion; later candidates must improve by a factor `min_improvement`."""
        best: Trial | None = None
        for candidate in self.options.candidates:
            lowest = min((trial for trial in trials if trial.candidate is candidate), key=Trial.loss, default=None)
            if lowest and (best is None or best.failed or lowest.loss() * self.options.min_improvement < best.loss()):
                best = lowest
        return cast(Trial, best)

    @torch.no_grad()
    def _reference_outputs(self, trial: Trial) -> Tensor:
        """Return the outputs on the reference inputs, in units of the function."""
        x = self.training.x
        generator = torch.Generator().manual_seed(self._seed(2**20))
        share = torch.rand(self.options.reference_inputs, x.shape[1], generator=generator, dtype=x.dtype)
        mean, deviation = self.scales[trial.candidate.targets]
        outputs: Tensor = trial.model(x.amin(0) + share * (x.amax(0) - x.amin(0))) * deviation + mean
        return outputs.nan_to_num(nan=math.inf)

    def _compare(self, trials: list[Trial]) -> None:
        """Set the distance of each trial to the nearest other trial on the reference inputs."""
        known = [trial for trial in trials if not trial.failed]
        if len(known) < 3:
            return
        outputs = [self._reference_outputs(trial) for trial in known]
        for trial, output in zip(known, outputs, strict=True):
            distances = [
                float((output - theirs).square().mean())
                for other, theirs in zip(known, outputs, strict=True)
                if other is not trial and other.error <= MAX_PEER_ERROR * trial.error
            ]
            trial.distance = min((value if math.isfinite(value) else math.inf for value in distances), default=0.0)

    def _refit_best(self, best: Trial, trials: list[Trial]) -> tuple[Trial, bool]:
        """Refit the best trial on all training rows; return the refit and whether a refit was accepted.

        Drifting predictions on the reference inputs were not determined there by the fitted rows; another trial of similar
        validation error may be. If all trials drift, `max_drift` is extended: a fit without the validation rows is worse than a fit
        changed by these rows.
        """
        if self.options.refit is None:
            return best, False
        similar = [t for t in trials if t is not best and t.loss() <= MAX_SUBSTITUTE_ERROR * best.loss()]
        max_drift = self.options.max_drift or 1.0
        rejected: list[tuple[float, Trial]] = []
        for trial in [best, *sorted(similar, key=Trial.loss)]:
            drift, refitted = self._refit(trial, self.options.refit)
            if drift <= max_drift:
                return refitted, True
            rejected.append((drift, refitted))
        for drift, refitted in rejected:
            if drift <= EXTENDED_DRIFT * max_drift:
                return refitted, True
        return best, False

    def _refit(self, trial: Trial, config: TrainConfig) -> tuple[float, Trial]:
        """Train a copy of a trial on all training rows; return the drift relative to the validation error, and the copy."""
        refitted = replace(trial, model=copy.deepcopy(trial.model), curve=copy.deepcopy(trial.curve))
        self._train(refitted, self.training, _without_restarts(config))
        if refitted.failed:
            return math.inf, refitted
        if not self.options.reference_inputs:
            return 0.0, refitted
        drift = float((self._reference_outputs(refitted) - self._reference_outputs(trial)).square().mean())
        if trial.error == 0:  # any change is a drift
            return (0.0 if drift == 0 else math.inf), refitted
        return drift / trial.error, refitted

    def as_paper(self) -> Outcome:
        """Train a model on all training rows; record the lowest test error of all epochs before the last."""
        (trial,) = self._trials(self.training.x, [])
        self._train(trial, self.training, trial.candidate.training, curves=True)
        if trial.failed:
            raise KapsiError(f"{self.run.experiment}, {self.run.row}: {trial.failed}")
        errors = trial.curve.test
        best_epoch = min(range(len(errors)), key=errors.__getitem__)
        extra = {"best_epoch_on_test": errors[best_epoch], "best_epoch": best_epoch + 1}
        return self._score(trial, None, extra)

    def _score(self, best: Trial, validation: float | None, extra: dict[str, Any]) -> Outcome:
        """Return the outcome of the selected trial."""
        extra = {
            "function": self.options.function,
            **extra,
            "train": self._scaled_for(self.training, best.candidate).error(best.model),
            "epochs": best.epochs,
            "rows_outside": _rows_outside(best.model, self.training.x, self.test.x),
        }
        curves: dict[str, list[float]] = {}
        if self.options.curves:
            steps = [float(i + 1) for i in range(len(best.curve.train))]
            curves = {"iteration": steps, "train": best.curve.train, "test": best.curve.test}
        return Outcome(
            self._scaled_for(self.test, best.candidate).error(best.model),
            None if validation is None or not math.isfinite(validation) else validation,
            trained_count(best.model),
            extra=extra,
            curves=curves,
        )

    def _seed(self, number: int) -> int:
        """Return the seed of a random draw."""
        return (self.run.seed * 1_000_003 + number) % 2**32

    def _trials(self, x: Tensor, fitted: list[Trial]) -> Iterator[Trial]:
        """Yield initialized trials; `fitted` grows with the trials fitted in the meantime."""
        number = 0
        for candidate in self.options.candidates:
            for i in range(candidate.trials):
                number += 1
                seed = self._seed(number)
                model = Model(candidate.spec, seed=seed, dtype=torch.float64)
                if candidate.after is not None:
                    source = min((t for t in fitted if t.candidate.name == candidate.after), key=lambda t: t.error)
                    model.layers[0].load_state_dict(source.model.layers[0].state_dict())
                _place_outputs(model, x, candidate.place, self.options.calibrate, mirrored=i % 2 == 1)
                yield Trial(candidate, i, seed, model)

    def _train(
        self,
        trial: Trial,
        rows: FunctionRows,
        config: TrainConfig,
        validation: FunctionRows | None = None,
        *,
        curves: bool = False,
    ) -> None:
        """Continue the training of a trial and set the validation error; a fit without finite errors has failed."""
        rows, test = (self._scaled_for(part, trial.candidate) for part in (rows, self.test))
        try:
            if trial.candidate.least_squares_init and not trial.epochs:
                _solve_last_layer(trial.model, rows)
            for stage in _stages(trial, config):
                if trial.epochs and trial.candidate.rounds > 1:
                    regrid(trial.model, rows.x)
                for _ in train(trial.model, rows.scaled(), replace(stage, seed=trial.seed)):
                    trial.epochs += 1
                    if self.options.curves:
                        trial.curve.train.append(rows.error(trial.model))
                    if curves or self.options.curves:
                        trial.curve.test.append(test.error(trial.model))
        except (SpecError, DataError):
            raise
        except KapsiError as error:
            trial.failed = str(error).splitlines()[0]
        trial.model.eval()
        if validation is not None:
            validation = self._scaled_for(validation, trial.candidate)
            trial.error = math.inf if trial.failed else validation.error(trial.model)
            if trial.error == math.inf:
                trial.failed = trial.failed or "its errors on the validation rows are not finite"


def _stages(trial: Trial, config: TrainConfig) -> list[TrainConfig]:
    """Return the training in rounds, after the warm-up of a new trial."""
    rounds = min(trial.candidate.rounds, config.epochs)
    ends = [i * config.epochs // rounds for i in range(rounds + 1)]
    configs = [config, *[_without_restarts(config)] * (rounds - 1)]
    stages = [replace(c, epochs=end - start) for c, start, end in zip(configs, ends[:-1], ends[1:], strict=True)]
    warm = trial.candidate.warm
    return [warm, *stages] if warm is not None and not trial.epochs else stages


def _without_restarts(config: TrainConfig) -> TrainConfig:
    """Return a configuration for continuing from the current weights: restarts would draw new weights."""
    solver = config.solver
    return replace(config, solver=replace(solver, restarts=1)) if isinstance(solver, LevenbergMarquardt) else config


def _solve_last_layer(model: Model, rows: FunctionRows) -> None:
    """Set the last layer to the least-squares solution, with the L2 penalty of the lowest leave-one-out error."""
    last = f"layers.{len(model.layers) - 1}."
    others = [name for name, p in model.named_parameters() if p.requires_grad and not name.startswith(last)]
    model.freeze(*others)
    try:
        for _ in train(model, rows.scaled(), TrainConfig(loss=MSE(), solver=Ridge(), epochs=1)):
            pass
    finally:
        model.freeze(*others, frozen=False)


@torch.no_grad()
def _place_outputs(
    model: Model, x: Tensor, ranges: tuple[tuple[float, float] | None, ...], calibrated: bool, *, mirrored: bool = False
) -> None:
    """Calibrate layer by layer, and map the outputs of hidden layers to ranges, mirrored or not."""
    layers = cast("list[Layer]", list(model.layers))
    for layer, ends in zip(layers, (*ranges, *[None] * len(layers)), strict=False):
        if calibrated:
            calibrate(layer, x)
        if ends is not None:
            _map_outputs(cast(Head, layer.heads[0]), layer(x), ends, mirrored=mirrored)
        x = layer(x)


def _map_outputs(head: Head, outputs: Tensor, ends: tuple[float, float], *, mirrored: bool = False) -> None:
    """Change ψ and bias: the outputs then range from low to high."""
    low, high = outputs.amin(0), outputs.amax(0)
    if mirrored:
        low, high = high, low
    width = (high - low).abs().clamp_min(torch.finfo(outputs.dtype).tiny)
    factor = (ends[1] - ends[0]) / width * (-1 if mirrored else 1)
    name = "left" if isinstance(head.spec.reconciliation, LowRank) else "matrix"
    head.psi.get_parameter(name).mul_(factor.unsqueeze(-1))
    bias = cast(Tensor, head.bias)
    bias.copy_((bias - low) * factor + ends[0])


@torch.no_grad()
def _rows_outside(model: Model, x: Tensor, x_test: Tensor) -> int:
    """Return the number of test rows outside the range of the training rows at the input of any layer."""
    outside = torch.zeros(len(x_test), dtype=torch.bool)
    for layer in cast("list[Layer]", list(model.layers)):
        outside |= ((x_test < x.amin(0)) | (x_test > x.amax(0))).any(1)
        x, x_test = layer(x), layer(x_test)
    return int(outside.sum())
