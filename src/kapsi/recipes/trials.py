"""Trials: candidates fitted from several initial values, selected on held-out rows, and refitted to all rows.

Steps of `TrialSearch.select`:

1. Hold out a share of the rows. Part of these rows are extreme in random directions, part have the highest and lowest targets,
   because later rows lie beyond the training rows there.
2. Fit every candidate to the other rows from several initial values, with `successive_halving` for a few epochs first. The lowest
   error on the held-out rows is selected.
3. With `reference_inputs` and `consensus`, compare the fits on random inputs, without targets. A fit far from all others of
   similar error counts as worse.
4. Refit the selected model on all rows. The refit is rejected if the predictions drift on the random inputs by more than the
   validation error; the next model of similar error replaces the model, then a refit with at most ten times the drift, then the
   selected model without a refit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.modules import Head, Layer, Model
from kapsi.recipes.regrid import regrid
from kapsi.reconciliation import LowRank
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train
from kapsi.training.losses import MSE
from kapsi.training.solvers import LevenbergMarquardt, Ridge

if TYPE_CHECKING:
    from kapsi.recipes.function_search import FunctionCandidate, FunctionSearch

__all__ = ["Selection", "Trial", "TrialRows", "TrialSearch", "hold_out", "random_inputs", "target_scale"]

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

OnEpoch: TypeAlias = "Callable[[Trial, TrialRows], Any]"
"""Called after each epoch with the trial and its training rows; the results are the records of the trial."""


@dataclass(frozen=True, eq=False)
class TrialRows:
    """Inputs of the model, and targets in their unit.

    Attributes:
        x: `(rows, m)`.
        y: `(rows, n)`.
        mean, deviation: shift and scale of the targets for the model, `(n,)`, or numbers.
        weight: weights of the rows in training, `(rows,)`; None for equal weights.
    """

    x: Tensor
    y: Tensor
    mean: Tensor | float = 0.0
    deviation: Tensor | float = 1.0
    weight: Tensor | None = None

    def scaled(self) -> tuple[Tensor, ...]:
        """Return inputs, scaled targets, and weights if any."""
        rows = self.x, (self.y - self.mean) / self.deviation
        return rows if self.weight is None else (*rows, self.weight)

    def subset(self, indices: Tensor) -> TrialRows:
        """Return some of the rows."""
        weight = None if self.weight is None else self.weight[indices]
        return replace(self, x=self.x[indices], y=self.y[indices], weight=weight)

    @torch.no_grad()
    def predict(self, model: Model, x: Tensor) -> Tensor:
        """Return outputs of a model in the unit of the targets."""
        return cast(Tensor, model(x) * self.deviation + self.mean)

    def error(self, model: Model) -> float:
        """Return the mean squared error in the unit of the targets, infinite instead of NaN."""
        value = float((self.predict(model, self.x) - self.y).square().mean())
        return value if math.isfinite(value) else math.inf


def target_scale(y: Tensor, targets: str) -> tuple[Tensor, Tensor]:
    """Return shift and scale of targets `(rows, n)`, `(n,)` each: `standard`, `scaled` or `raw`, see `FunctionCandidate`."""
    mean, deviation = y.new_zeros(y.shape[1]), y.new_ones(y.shape[1])
    for i, column in enumerate(y.T):
        if targets == "standard":
            mean[i], deviation[i] = column.mean(), column.std()
        elif targets == "scaled":
            deviation[i] = column.abs().mean()
    # Constant targets are not scaled.
    return mean, torch.where(deviation > 0, deviation, 1.0)


def hold_out(x: Tensor, y: Tensor, count: int, edge: int, tails: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of fitted and of held-out rows.

    Args:
        x: inputs, `(rows, m)`.
        y: targets, `(rows, n)`; the first column has the tails.
        count: number of held-out rows.
        edge: number of held-out rows that are extreme in random directions: fits fail first there.
        tails: number of held-out rows with the highest and the lowest targets; `edge + tails` is at most `count`.
        seed: seed of the directions and of the other rows.

    Example:
        >>> x = torch.linspace(-1, 1, 9).unsqueeze(1)
        >>> hold_out(x, x, count=2, edge=0, tails=2, seed=0)[1].tolist()
        [0, 8]
    """
    generator = torch.Generator().manual_seed(seed)
    fitted = torch.ones(len(x), dtype=torch.bool)
    for _ in range(edge):
        direction = torch.randn(x.shape[1], generator=generator, dtype=x.dtype)
        fitted[torch.where(fitted, x @ direction, -math.inf).argmax()] = False
    for i in range(tails):
        fitted[torch.where(fitted, y[:, 0] * (-1 if i % 2 else 1), -math.inf).argmax()] = False
    rest = fitted.nonzero().squeeze(1)
    order = torch.randperm(len(rest), generator=generator)
    fitted[rest[order[: max(0, count - (len(x) - len(rest)))]]] = False
    return fitted.nonzero().squeeze(1), (~fitted).nonzero().squeeze(1)


def random_inputs(x: Tensor, count: int, seed: int) -> Tensor:
    """Return random inputs `(count, m)`, uniform in the range of the rows."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(count, x.shape[1], generator=generator, dtype=x.dtype)
    low, high = x.amin(0), x.amax(0)
    return low + share * (high - low)


# ------------------------------------------------------------------------------------------------ a trial


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
        records: results of `on_epoch`.
    """

    candidate: FunctionCandidate
    number: int
    seed: int
    model: Model
    error: float = math.inf
    epochs: int = 0
    failed: str = ""
    distance: float = 0.0
    records: list[Any] = field(default_factory=list)

    def loss(self) -> float:
        """Return the criterion of the selection."""
        return self.error + DISTANCE_WEIGHT * self.distance

    def train(
        self,
        rows: TrialRows,
        config: TrainConfig,
        validation: TrialRows | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> None:
        """Continue the training and set the validation error; a fit without finite errors has failed."""
        try:
            if self.candidate.least_squares_init and not self.epochs:
                solve_last_layer(self.model, rows)
            for stage in self._stages(config):
                if self.epochs and self.candidate.rounds > 1:
                    regrid(self.model, rows.x)
                for _ in train(self.model, rows.scaled(), replace(stage, seed=self.seed)):
                    self.epochs += 1
                    if on_epoch is not None:
                        self.records.append(on_epoch(self, rows))
        except (SpecError, DataError):
            raise
        except KapsiError as error:
            self.failed = str(error).splitlines()[0]
        self.model.eval()
        if validation is not None:
            self.error = math.inf if self.failed else validation.error(self.model)
            if self.error == math.inf:
                self.failed = self.failed or "its errors on the validation rows are not finite"

    def _stages(self, config: TrainConfig) -> list[TrainConfig]:
        """Return the training in rounds, after the warm-up of a new trial."""
        rounds = min(self.candidate.rounds, config.epochs)
        ends = [i * config.epochs // rounds for i in range(rounds + 1)]
        configs = [config, *[without_restarts(config)] * (rounds - 1)]
        stages = [replace(c, epochs=end - start) for c, start, end in zip(configs, ends[:-1], ends[1:], strict=True)]
        warm = self.candidate.warm
        return [warm, *stages] if warm is not None and not self.epochs else stages

    def refit(
        self, rows: TrialRows, config: TrainConfig, reference: Tensor | None, on_epoch: OnEpoch | None = None
    ) -> tuple[float, Trial]:
        """Train a copy on all rows; return the drift relative to the validation error, and the copy.

        Args:
            rows: all rows.
            config: the training.
            reference: inputs for the drift, the mean squared change of the outputs; None for no drift.
            on_epoch: see `TrialSearch`.
        """
        refitted = replace(self, model=copy.deepcopy(self.model), records=list(self.records))
        refitted.train(rows, without_restarts(config), on_epoch=on_epoch)
        if refitted.failed:
            return math.inf, refitted
        if reference is None:
            return 0.0, refitted
        before, after = (rows.predict(trial.model, reference).nan_to_num(nan=math.inf) for trial in (self, refitted))
        drift = float((after - before).square().mean())
        if self.error == 0:  # any change is a drift
            return (0.0 if drift == 0 else math.inf), refitted
        return drift / self.error, refitted


def without_restarts(config: TrainConfig) -> TrainConfig:
    """Return a configuration for continuing from the current weights: restarts would draw new weights."""
    solver = config.solver
    return replace(config, solver=replace(solver, restarts=1)) if isinstance(solver, LevenbergMarquardt) else config


def solve_last_layer(model: Model, rows: TrialRows) -> None:
    """Set the last layer to the least-squares solution, with the L2 penalty of the lowest leave-one-out error."""
    last = f"layers.{len(model.layers) - 1}."
    others = [name for name, p in model.named_parameters() if p.requires_grad and not name.startswith(last)]
    model.freeze(*others)
    try:
        for _ in train(model, rows.scaled(), TrainConfig(loss=MSE(), solver=Ridge(), epochs=1)):
            pass
    finally:
        model.freeze(*others, frozen=False)


# ------------------------------------------------------------------------------------------------ the search


class Selection(NamedTuple):
    """The selected trial.

    Attributes:
        best: the trial, refitted if the refit was accepted.
        refitted: whether a refit was accepted.
        errors: lowest validation error of each candidate tried, by name.
        trials: all trials.
    """

    best: Trial
    refitted: bool
    errors: dict[str, float]
    trials: list[Trial]


class TrialSearch:
    """A search over candidates.

    Args:
        options: candidates and options, with all widths (`FunctionSearch.sized`).
        training: the rows.
        seed: seed of held-out rows and initial values.
        on_epoch: called after each epoch; without effect on the search.
    """

    def __init__(
        self, options: FunctionSearch, training: TrialRows, seed: int, on_epoch: OnEpoch | None = None
    ) -> None:
        self.options, self.training, self.run_seed, self.on_epoch = options, training, seed, on_epoch
        self.scales = {c.targets: target_scale(training.y, c.targets) for c in options.candidates}
        count = options.reference_inputs
        self.reference = random_inputs(training.x, count, self.seed(2**20)) if count else None

    def seed(self, number: int) -> int:
        """Return the seed of a random draw."""
        return (self.run_seed * 1_000_003 + number) % 2**32

    def rows_for(self, candidate: FunctionCandidate, rows: TrialRows | None = None) -> TrialRows:
        """Return rows, by default all, with the target scale of a candidate."""
        mean, deviation = self.scales[candidate.targets]
        return replace(self.training if rows is None else rows, mean=mean, deviation=deviation)

    def select(self) -> Selection:
        """Select on held-out rows, and refit on all rows.

        Raises:
            KapsiError: every fit failed.
        """
        options, x = self.options, self.training.x
        count = max(1, round(options.validation * len(x)))
        edge, tails = round(options.edge * count), round(options.tails * count)
        fitted, held_out = hold_out(x, self.training.y, count, edge, tails, self.seed(0))
        trials, continued = self._fit_all(self.training.subset(fitted), self.training.subset(held_out))
        compare = options.consensus is not False and options.reference_inputs > 0
        if compare:
            self.compare(continued)
        # A simple model preferred by min_improvement may be among the trials not continued.
        pool = continued if compare and options.min_improvement == 1 else trials
        best = self.best(pool)
        if best.failed:
            raise KapsiError(f"no candidate could be fitted; {best.failed}")
        errors: dict[str, float] = {}
        for trial in trials:
            errors[trial.candidate.name] = min(trial.error, errors.get(trial.candidate.name, math.inf))
        best, refitted = self.refit_best(best, pool)
        return Selection(best, refitted, errors, trials)

    def trials(self, x: Tensor, fitted: list[Trial]) -> Iterator[Trial]:
        """Yield initialized trials; `fitted` grows with the trials fitted in the meantime."""
        number = 0
        for candidate in self.options.candidates:
            for i in range(candidate.trials):
                number += 1
                seed = self.seed(number)
                model = Model(candidate.spec, seed=seed, dtype=torch.float64)
                if candidate.after is not None:
                    source = min((t for t in fitted if t.candidate.name == candidate.after), key=lambda t: t.error)
                    model.layers[0].load_state_dict(source.model.layers[0].state_dict())
                _place_outputs(model, x, candidate.place, self.options.calibrate, mirrored=i % 2 == 1)
                yield Trial(candidate, i, seed, model)

    def train(self, trial: Trial, rows: TrialRows, config: TrainConfig, validation: TrialRows | None = None) -> None:
        """Continue the training of a trial, with the target scale of the candidate; see `Trial.train`."""
        rows = self.rows_for(trial.candidate, rows)
        validation = None if validation is None else self.rows_for(trial.candidate, validation)
        trial.train(rows, config, validation, self.on_epoch)

    def _fit_all(self, rows: TrialRows, validation: TrialRows) -> tuple[list[Trial], list[Trial]]:
        """Fit all trials, with successive halving if requested; return all trials and the continued ones."""
        halving = self.options.successive_halving
        variances = torch.stack([column.var() for column in self.training.y.T])
        target_error = self.options.target_error * float(variances.mean())
        trials: list[Trial] = []
        for trial in self.trials(rows.x, trials):
            config = trial.candidate.config
            self.train(trial, rows, config if halving is None else replace(config, epochs=halving.epochs), validation)
            trials.append(trial)
            if trial.error <= target_error:
                break
        if halving is None:
            return trials, trials
        trials.sort(key=lambda trial: trial.error)
        continued = trials[: halving.keep]
        for trial in continued:
            config = trial.candidate.config
            if not trial.failed and config.epochs > halving.epochs and trials[0].error > target_error:
                rest = replace(without_restarts(config), epochs=config.epochs - halving.epochs)
                self.train(trial, rows, rest, validation)
        return trials, continued

    def best(self, trials: list[Trial]) -> Trial:
        """Return the trial with the lowest criterion; later candidates must improve by a factor `min_improvement`."""
        best: Trial | None = None
        for candidate in self.options.candidates:
            lowest = min((trial for trial in trials if trial.candidate is candidate), key=Trial.loss, default=None)
            if lowest and (best is None or best.failed or lowest.loss() * self.options.min_improvement < best.loss()):
                best = lowest
        return cast(Trial, best)

    def reference_outputs(self, trial: Trial) -> Tensor:
        """Return the outputs on the reference inputs, in the unit of the targets."""
        outputs = self.rows_for(trial.candidate).predict(trial.model, cast(Tensor, self.reference))
        return outputs.nan_to_num(nan=math.inf)

    def compare(self, trials: list[Trial]) -> None:
        """Set the distance of each trial to the nearest other trial on the reference inputs."""
        known = [trial for trial in trials if not trial.failed]
        if len(known) < 3:
            return
        outputs = [self.reference_outputs(trial) for trial in known]
        for trial, output in zip(known, outputs, strict=True):
            distances = [
                float((output - theirs).square().mean())
                for other, theirs in zip(known, outputs, strict=True)
                if other is not trial and other.error <= MAX_PEER_ERROR * trial.error
            ]
            trial.distance = min((value if math.isfinite(value) else math.inf for value in distances), default=0.0)

    def refit_best(self, best: Trial, trials: list[Trial]) -> tuple[Trial, bool]:
        """Refit the best trial on all rows; return the refit and whether a refit was accepted.

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
            rows = self.rows_for(trial.candidate)
            drift, refitted = trial.refit(rows, self.options.refit, self.reference, self.on_epoch)
            if drift <= max_drift:
                return refitted, True
            rejected.append((drift, refitted))
        for drift, refitted in rejected:
            if drift <= EXTENDED_DRIFT * max_drift:
                return refitted, True
        return best, False


# ------------------------------------------------------------------------------------------------ initial values


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
