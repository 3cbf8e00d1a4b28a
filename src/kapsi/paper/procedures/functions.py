"""Fit a function of a few variables from rows: candidates and starts are chosen on validation rows, the test rows score once.

Steps of a run under the protocol `validation`:

1. Rows are drawn by the seed, the first of them to train on, the others to test on. Inputs are moved to [−1, 1] by the range of
   the training rows, targets are standardized by them.
2. A share of the training rows is set aside for validation. Some of it are rows at the edge, the extreme ones in random
   directions, and some have the highest and lowest targets: test rows lie beyond the training rows there, and what goes wrong
   beyond them is to be seen before.
3. Every candidate is fitted to the other rows from several initial values; with `screen` for a few epochs first, after which
   the best go on. The one with the least validation error is chosen.
4. With `probes` and `consensus` the fits that went on are compared on random inputs, which need no targets: one that is far from
   all others with an error like its own has gone wrong where no row shows it, and counts as worse.
5. The chosen one goes on with all training rows. If that moves it on the random inputs by more than its validation error, the
   next one about as good that stays takes its place; where none stays, one that moves less than ten times as far does, and where
   none does that, the chosen one is left as it was. It is scored on the test rows.

Under the protocol `paper` there is one candidate, trained on all training rows. The score is that of the last epoch; the least
test error of all epochs, which is what the paper prints, is `best_epoch_on_test`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.data.problems import problem
from kapsi.errors import KapsiError, SpecError, did_you_mean
from kapsi.modules import Head, Layer, Model, trained_count
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures.grids import regrid
from kapsi.paper.procedures.rehearsal import refuse, rehearse
from kapsi.reconciliation import Dense, LowRank
from kapsi.remainder import ZeroRemainder
from kapsi.spec import ModelSpec, from_dict
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train
from kapsi.zoo import kan, mlp

__all__ = ["Candidate", "Options", "Screen", "check", "run"]

OPTIONS = (
    *("function", "rows", "train", "noise", "validation", "edge", "tails", "inputs", "targets", "calibrate"),
    *(
        "candidates",
        "tries",
        "training",
        "rounds",
        "linear_start",
        "screen",
        "gain",
        "probes",
        "consensus",
        "leash",
        "enough",
        "refit",
        "parameters",
        "curves",
    ),
)
MOST = 10_000_000
"""Rows, and random inputs, that a run may have."""
FAR = 0.1
"""Weight of the squared distance to the nearest other fit on random inputs, beside the validation error."""
PEERS = 100
"""How many times the validation error of a fit another one may have to be compared with it on random inputs.

A fit that is much better than all others is far from them because they are wrong.
"""
NEAR = 10.0
"""How many times the error of the chosen fit another one may have to take its place when it does not stay where it was."""
LONGER = 10.0
"""How many times further than the leash a fit may move when all of them move beyond it."""
TARGETS = ("standard", "scaled", "raw")
KINDS = {"model": None, "mlp": mlp.spec, "kan": kan.spec}
"""What a candidate may be: a specification, or the options of a network of the zoo."""
ENTRIES = ("tries", "training", "place", "after", "targets", "rounds", "warm", "linear_start")
"""What else may be said of a candidate."""


@dataclass(frozen=True)
class Candidate:
    """One model that is tried.

    Args:
        name: unique in the run.
        spec: with all widths.
        tries: how many models, each with initial values and a calibration of its own, are fitted.
        training: how; `starts` are further initial values, of which the least training error counts.
        place: for each hidden layer the range [low, high] that each of its outputs has over the training rows before the
            first step, or None where it stays as drawn. A basis on [−1, 1] begins on [−1, 1], a logarithm above zero. Every
            second try is placed the other way round.
        after: name of a candidate before it: the first layer begins as the best of that one has it after the first phase.
        targets: as in `Options`.
        rounds: parts in which a fit is done; between them the splines of hidden layers are moved to the data that they have got.
        warm: training before the first phase, such as a few epochs of AdamW where Gauss–Newton steps begin badly; None: none.
        linear_start: whether the last layer begins as the least-squares solution for the others as they are. Drawn values pull
            the layers before it away from where they were placed: a model with arcsin in κ, which is exact for arcsin(x + y) and
            begins near it, ended at an error of 6e-4 without, and of 1e-31 with it.
    """

    name: str
    spec: ModelSpec
    tries: int
    training: TrainConfig
    place: tuple[tuple[float, float] | None, ...] = ()
    after: str | None = None
    targets: str = "standard"
    rounds: int = 1
    warm: TrainConfig | None = None
    linear_start: bool = False


@dataclass(frozen=True)
class Screen:
    """A short first phase.

    Args:
        epochs: of each try.
        keep: how many tries go on, over all candidates.
    """

    epochs: int
    keep: int


@dataclass(frozen=True)
class Options:
    """The options of the procedure, checked.

    Args:
        function: name of the problem; by default that of the row.
        rows, train: drawn, and of these trained on; the others test.
        noise: as in `FunctionProblem.split`.
        validation: share of the training rows on which is chosen, 0.05 to 0.5.
        edge: share of the validation rows that are those at the edge, 0 to 1.
        tails: share of the validation rows that are those with the highest and the lowest targets, 0 to 1 − edge.
        inputs: `unit`: to [−1, 1] by the range of the training rows; `raw`.
        targets: `standard`: mean 0 and deviation 1 over the training rows; `scaled`: mean absolute value 1, and zero where it
            is, for models with outputs that have a sign; `raw`. Also for one candidate.
        calibrate: whether grids and other buffers are set from the training rows before a fit.
        candidates: at least one; under the protocol `paper` one.
        screen: None for no short first phase.
        gain: how many times smaller the validation error of a candidate must be than that of one above it, 1 to 1,000. Where
            targets have poles all errors are alike, and the simplest model is the safest.
        probes: number of random inputs, uniform within the range of the training rows, on which fits are compared; 0: none.
        consensus: with probes, whether fits are compared with each other before the choice.
        leash: with probes, how many times the validation error the outputs on them may move, as a mean square, when the chosen
            model goes on with all training rows, 1 to 1,000,000; for one that moves further another about as good goes on.
        enough: validation error, in parts of the variance of the targets, at which no further model is tried, 0 to 0.01.
        refit: how the chosen model goes on with all training rows; None: it does not.
        parameters: the largest number of trainable parameters that a candidate may have; None: any.
        curves: whether errors after each epoch are recorded, of test rows too: nothing is chosen by them.
    """

    function: str
    candidates: tuple[Candidate, ...]
    rows: int = 2_000
    train: int = 1_000
    noise: float = 0.0
    validation: float = 0.2
    edge: float = 0.25
    tails: float = 0.0
    inputs: str = "unit"
    targets: str = "standard"
    calibrate: bool = True
    screen: Screen | None = None
    gain: float = 1.0
    probes: int = 0
    consensus: bool = True
    leash: float = 1.0
    enough: float = 0.0
    refit: TrainConfig | None = None
    parameters: int | None = None
    curves: bool = False


@dataclass
class _Curve:
    """Mean squared errors after each epoch, in units of the function."""

    train: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)


@dataclass
class _Try:
    """A model that is being fitted."""

    candidate: Candidate
    number: int
    seed: int
    model: Model
    error: float = math.inf
    epochs: int = 0
    failed: str = ""
    apart: float = 0.0
    curve: _Curve = field(default_factory=_Curve)

    def judged(self) -> float:
        """Return what counts in the choice."""
        return self.error + FAR * self.apart


@dataclass(frozen=True)
class _Rows:
    """Inputs as the model takes them, and targets in units of the function.

    Attributes:
        x: `(rows, m)`.
        y: `(rows, 1)`.
        mean, deviation: what outputs are moved by.
    """

    x: Tensor
    y: Tensor
    mean: float
    deviation: float

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Return what a model is fitted to."""
        return self.x, (self.y - self.mean) / self.deviation

    def taken(self, which: Tensor) -> _Rows:
        """Return some of the rows."""
        return replace(self, x=self.x[which], y=self.y[which])

    @torch.no_grad()
    def error(self, model: Model) -> float:
        """Return the mean squared error in units of the function, infinite where it is not finite."""
        value = float((model(self.x) * self.deviation + self.mean - self.y).square().mean())
        return value if math.isfinite(value) else math.inf


def check(run: Run) -> None:
    """Raise a `SpecError` where the function or the options of a run do not fit."""
    _options(run)


def run(run: Run) -> Outcome:
    """Do one run: draw rows, choose, fit, score.

    Raises:
        SpecError: options that do not fit; it names them.
        KapsiError: no candidate could be fitted.
    """
    options = _options(run)
    began = time.process_time()
    training, test = _drawn(run, options)
    fit = _Fit(run, options, training, test)
    outcome = fit.as_paper() if run.protocol == "paper" else fit.chosen()
    return replace(outcome, seconds=time.process_time() - began)


# ------------------------------------------------------------------------------------------------ rows


def _drawn(run: Run, options: Options) -> tuple[_Rows, _Rows]:
    """Return training and test rows, moved by what is known of the training rows."""
    drawn = problem(options.function).split(options.rows, options.train, seed=run.seed, noise=options.noise)
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(part)) for part in drawn)
    low, high = x.amin(0), x.amax(0)
    middle, half = (low + high) / 2, ((high - low) / 2).clamp_min(torch.finfo(x.dtype).tiny)
    if options.inputs == "unit":
        x, x_test = (x - middle) / half, (x_test - middle) / half
    scale = _scale(y, options.targets)
    return _Rows(x, y.unsqueeze(1), *scale), _Rows(x_test, y_test.unsqueeze(1), *scale)


def _scale(y: Tensor, targets: str) -> tuple[float, float]:
    """Return what targets are moved and divided by."""
    mean, deviation = 0.0, 1.0
    if targets == "standard":
        mean, deviation = float(y.mean()), float(y.std())
    elif targets == "scaled":
        deviation = float(y.abs().mean())
    # The targets of a constant function are left as they are.
    return mean, deviation if deviation > 0 else 1.0


def _parts(rows: _Rows, options: Options, seed: int) -> tuple[Tensor, Tensor]:
    """Return which rows are fitted and which validate; of the latter some are extreme, each in a direction of its own."""
    x = rows.x
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(options.validation * len(x)))
    left = torch.ones(len(x), dtype=torch.bool)
    for _ in range(round(options.edge * count)):
        direction = torch.randn(x.shape[1], generator=generator, dtype=x.dtype)
        along = torch.where(left, x @ direction, -math.inf)
        left[along.argmax()] = False
    for i in range(round(options.tails * count)):
        along = torch.where(left, rows.y[:, 0] * (-1 if i % 2 else 1), -math.inf)
        left[along.argmax()] = False
    rest = left.nonzero().squeeze(1)
    more = rest[torch.randperm(len(rest), generator=generator)[: max(0, count - (len(x) - len(rest)))]]
    left[more] = False
    return left.nonzero().squeeze(1), (~left).nonzero().squeeze(1)


# ------------------------------------------------------------------------------------------------ fitting


class _Fit:
    """The fits of one run."""

    def __init__(self, run: Run, options: Options, training: _Rows, test: _Rows) -> None:
        self.run, self.options, self.training, self.test = run, options, training, test
        self.scales = {c.targets: _scale(training.y, c.targets) for c in options.candidates}

    def _for(self, rows: _Rows, candidate: Candidate) -> _Rows:
        """Return rows with the targets moved as the candidate wants them."""
        mean, deviation = self.scales[candidate.targets]
        return replace(rows, mean=mean, deviation=deviation)

    def chosen(self) -> Outcome:
        """Choose on validation rows, go on with all training rows, and score."""
        options = self.options
        fitted, held = _parts(self.training, options, self._seed(0))
        part, validation = self.training.taken(fitted), self.training.taken(held)
        enough = options.enough * float(self.training.y.var())
        tries: list[_Try] = []
        for each in self._tries(part.x, tries):
            config = each.candidate.training
            if options.screen is not None:
                config = replace(config, epochs=options.screen.epochs)
            self._advance(each, part, config, validation)
            tries.append(each)
            if each.error <= enough:
                break
        going, dropped = tries, []
        if options.screen is not None:
            tries.sort(key=lambda each: each.error)
            going, dropped = tries[: options.screen.keep], tries[options.screen.keep :]
            for each in going:
                config = each.candidate.training
                if not each.failed and config.epochs > options.screen.epochs and tries[0].error > enough:
                    config = replace(config, starts=1, epochs=config.epochs - options.screen.epochs)
                    self._advance(each, part, config, validation)
        compared = options.consensus and options.probes > 0
        if compared:
            self._compare(going)
        # Where a simple model is preferred, one that did not go on may be it.
        pool = going if compared and options.gain == 1 else [*going, *dropped]
        best = self._best(pool)
        if best.failed:
            raise KapsiError(f"{self.run.experiment}, {self.run.row}: no candidate could be fitted; {best.failed}")
        errors: dict[str, float] = {}
        for each in tries:
            errors[each.candidate.name] = min(each.error, errors.get(each.candidate.name, math.inf))
        best, kept = self._gone_on(best, pool)
        extra = {
            "candidate": best.candidate.name,
            "try": best.number,
            "refitted": kept,
            "validation_errors": errors,
            "fits": len(tries),
            "failed": sum(bool(each.failed) for each in tries),
        }
        return self._scored(best, errors[best.candidate.name], extra)

    def _best(self, tries: list[_Try]) -> _Try:
        """Return the try with the least error; a candidate further down has to be better by the gain."""
        best: _Try | None = None
        for candidate in self.options.candidates:
            own = min((each for each in tries if each.candidate is candidate), key=_Try.judged, default=None)
            if own and (best is None or best.failed or own.judged() * self.options.gain < best.judged()):
                best = own
        return cast(_Try, best)

    @torch.no_grad()
    def _on_probes(self, each: _Try) -> Tensor:
        """Return the outputs on random inputs, in units of the function."""
        x = self.training.x
        generator = torch.Generator().manual_seed(self._seed(2**20))
        share = torch.rand(self.options.probes, x.shape[1], generator=generator, dtype=x.dtype)
        mean, deviation = self.scales[each.candidate.targets]
        made: Tensor = each.model(x.amin(0) + share * (x.amax(0) - x.amin(0))) * deviation + mean
        return made.nan_to_num(nan=math.inf)

    def _compare(self, going: list[_Try]) -> None:
        """Take of each fit how far it is from the nearest other one on random inputs."""
        known = [each for each in going if not each.failed]
        if len(known) < 3:
            return
        outputs = [self._on_probes(each) for each in known]
        for each, own in zip(known, outputs, strict=True):
            apart = [
                float((own - theirs).square().mean())
                for other, theirs in zip(known, outputs, strict=True)
                if other is not each and other.error <= PEERS * each.error
            ]
            each.apart = min((value if math.isfinite(value) else math.inf for value in apart), default=0.0)

    def _gone_on(self, best: _Try, tries: list[_Try]) -> tuple[_Try, bool]:
        """Return the first fit, by its error, that all training rows leave where it was, and whether there is one.

        What moves far on random inputs was not determined there by the rows it had; another that is about as good on the
        validation rows may be. Where all of them move, the leash is made longer: a fit that has not seen the validation rows is
        worse than one that has moved somewhat because of them.
        """
        if self.options.refit is None:
            return best, False
        near = [each for each in tries if each is not best and each.judged() <= NEAR * best.judged()]
        moved: list[tuple[float, _Try]] = []
        for each in [best, *sorted(near, key=_Try.judged)]:
            apart, further = self._go_on(each, self.options.refit)
            if apart <= self.options.leash:
                return further, True
            moved.append((apart, further))
        for apart, further in moved:
            if apart <= LONGER * self.options.leash:
                return further, True
        return best, False

    def _go_on(self, each: _Try, config: TrainConfig) -> tuple[float, _Try]:
        """Train a copy of a fit on all training rows; return how far that moved it, in parts of its error, and the copy."""
        further = replace(each, model=copy.deepcopy(each.model), curve=copy.deepcopy(each.curve))
        self._advance(further, self.training, config)
        if further.failed:
            return math.inf, further
        if not self.options.probes:
            return 0.0, further
        apart = float((self._on_probes(further) - self._on_probes(each)).square().mean())
        if each.error == 0:  # which leaves no room to move
            return (0.0 if apart == 0 else math.inf), further
        return apart / each.error, further

    def as_paper(self) -> Outcome:
        """Train one model on all training rows, with the least test error of all epochs beside that of the last."""
        (only,) = self._tries(self.training.x, [])
        self._advance(only, self.training, only.candidate.training, curves=True)
        if only.failed:
            raise KapsiError(f"{self.run.experiment}, {self.run.row}: {only.failed}")
        errors = only.curve.test
        least = min(range(len(errors)), key=errors.__getitem__)
        extra = {"best_epoch_on_test": errors[least], "best_epoch": least + 1}
        return self._scored(only, None, extra)

    def _scored(self, best: _Try, validation: float | None, extra: dict[str, Any]) -> Outcome:
        options = self.options
        test = self._for(self.test, best.candidate)
        extra = {
            "function": options.function,
            **extra,
            "train": self._for(self.training, best.candidate).error(best.model),
            "epochs": best.epochs,
            "rows_outside": _outside(best.model, self.training.x, self.test.x),
        }
        curves: dict[str, list[float]] = {}
        if options.curves:
            steps = [float(i + 1) for i in range(len(best.curve.train))]
            curves = {"iteration": steps, "train": best.curve.train, "test": best.curve.test}
        return Outcome(
            test.error(best.model),
            None if validation is None or not math.isfinite(validation) else validation,
            trained_count(best.model),
            extra=extra,
            curves=curves,
        )

    def _seed(self, number: int) -> int:
        """Return the seed of one thing that is drawn, of the run's own."""
        return (self.run.seed * 1_000_003 + number) % 2**32

    def _tries(self, x: Tensor, fitted: list[_Try]) -> Iterator[_Try]:
        """Yield the models before they are fitted; those before it have been by then."""
        number = 0
        for candidate in self.options.candidates:
            for i in range(candidate.tries):
                number += 1
                seed = self._seed(number)
                model = Model(candidate.spec, seed=seed, dtype=torch.float64)
                if candidate.after is not None:
                    known = min((f for f in fitted if f.candidate.name == candidate.after), key=lambda f: f.error)
                    model.layers[0].load_state_dict(known.model.layers[0].state_dict())
                _place(model, x, candidate.place, self.options.calibrate, turned=i % 2 == 1)
                yield _Try(candidate, i, seed, model)

    def _advance(
        self, each: _Try, rows: _Rows, config: TrainConfig, validation: _Rows | None = None, *, curves: bool = False
    ) -> None:
        """Train a model further, and take its validation error; a fit that is not finite is out."""
        curves = curves or self.options.curves  # of the test rows
        rounds = min(each.candidate.rounds, config.epochs)
        rows = self._for(rows, each.candidate)
        validation = None if validation is None else self._for(validation, each.candidate)
        test = self._for(self.test, each.candidate)
        plan: list[TrainConfig] = []
        for part in range(rounds):
            epochs = (part + 1) * config.epochs // rounds - part * config.epochs // rounds
            # Further starts would be drawn anew, and would not go on.
            plan.append(replace(config, epochs=epochs, starts=1 if part else config.starts))
        if each.candidate.warm is not None and not each.epochs:
            plan.insert(0, each.candidate.warm)
        try:
            if each.candidate.linear_start and not each.epochs:
                _solve_last(each.model, rows)
            for step in plan:
                if each.epochs and each.candidate.rounds > 1:
                    regrid(each.model, rows.x)
                now = replace(step, seed=each.seed)
                for _ in train(each.model, rows.scaled(), now):
                    each.epochs += 1
                    if self.options.curves:
                        each.curve.train.append(rows.error(each.model))
                    if curves:
                        each.curve.test.append(test.error(each.model))
        except SpecError:
            raise
        except KapsiError as error:
            each.failed = str(error).splitlines()[0]
        each.model.eval()
        if validation is not None:
            each.error = math.inf if each.failed else validation.error(each.model)
            if each.error == math.inf:
                each.failed = each.failed or "its errors on the validation rows are not finite"


def _solve_last(model: Model, rows: _Rows) -> None:
    """Set the last layer to its least-squares solution, with the penalty that predicts left-out rows best."""
    last = f"layers.{len(model.layers) - 1}."
    held = [name for name, p in model.named_parameters() if p.requires_grad and not name.startswith(last)]
    model.freeze(*held)
    try:
        for _ in train(model, rows.scaled(), TrainConfig(loss="mse", solver="ridge", epochs=1)):
            pass
    finally:
        model.freeze(*held, frozen=False)


@torch.no_grad()
def _place(
    model: Model, x: Tensor, ranges: tuple[tuple[float, float] | None, ...], calibrated: bool, *, turned: bool = False
) -> None:
    """Calibrate layer by layer, and move and stretch the outputs of hidden layers to ranges, turned round or not."""
    for layer, wanted in zip(
        cast("list[Layer]", list(model.layers)), (*ranges, *[None] * len(model.layers)), strict=False
    ):
        if calibrated:
            calibrate(layer, x)
        if wanted is not None:
            _move(cast(Head, layer.heads[0]), layer(x), wanted, turned=turned)
        x = layer(x)


def _move(head: Head, made: Tensor, wanted: tuple[float, float], *, turned: bool = False) -> None:
    """Change ψ and bias so that outputs, now `made`, range from low to high."""
    low, high = made.amin(0), made.amax(0)
    if turned:
        low, high = high, low
    width = (high - low).abs().clamp_min(torch.finfo(made.dtype).tiny)
    factor = (wanted[1] - wanted[0]) / width * (-1 if turned else 1)
    name = "left" if isinstance(head.spec.reconciliation, LowRank) else "matrix"
    head.psi.get_parameter(name).mul_(factor.unsqueeze(-1))
    bias = cast(Tensor, head.bias)
    bias.copy_((bias - low) * factor + wanted[0])


@torch.no_grad()
def _outside(model: Model, x: Tensor, x_test: Tensor) -> int:
    """Return how many test rows have an input of some layer that no training row reaches."""
    out = torch.zeros(len(x_test), dtype=torch.bool)
    for layer in cast("list[Layer]", list(model.layers)):
        out |= ((x_test < x.amin(0)) | (x_test > x.amax(0))).any(1)
        x, x_test = layer(x), layer(x_test)
    return int(out.sum())


# ------------------------------------------------------------------------------------------------ options


def _options(run: Run) -> Options:
    """Return the options of a run, checked.

    Raises:
        SpecError: an option that there is not, or a value that does not fit.
    """
    run.expects("mse", "validation", "paper")
    given = dict(run.options)
    name = _text(given.get("function", run.row), _where(run, "function"))
    try:
        inputs = problem(name).inputs
    except KapsiError as error:
        raise SpecError(f"{_where(run, 'function')}: {error}") from None
    for name in given:
        if name not in OPTIONS:
            hint = did_you_mean(str(name), OPTIONS, quoted=False)
            raise SpecError(f"{_where(run, name)}: there is no such option; {hint}there are {', '.join(OPTIONS)}")
    rows = _whole(given.get("rows", 2_000), _where(run, "rows"), 10, MOST)
    part = _whole(given.get("train", rows // 2), _where(run, "train"), 5)
    if part >= rows:
        raise SpecError(f"{_where(run, 'train')}: {part} of {rows} rows leave none to test on; give less, or more rows")
    training = given.get("training", {})
    tries = _whole(given.get("tries", 1), _where(run, "tries"), 1)
    largest = given.get("parameters")
    options = Options(
        function=given.get("function", run.row),
        candidates=_candidates(run, given, inputs, tries, training),
        rows=rows,
        train=part,
        noise=_share(given.get("noise", 0.0), _where(run, "noise"), 0.0, 1e6),
        validation=_share(given.get("validation", 0.2), _where(run, "validation"), 0.05, 0.5),
        edge=_share(given.get("edge", 0.25), _where(run, "edge"), 0.0, 1.0),
        tails=_share(given.get("tails", 0.0), _where(run, "tails"), 0.0, 1.0),
        inputs=_choice(given.get("inputs", "unit"), _where(run, "inputs"), ("unit", "raw")),
        targets=_choice(given.get("targets", "standard"), _where(run, "targets"), TARGETS),
        calibrate=_choice(given.get("calibrate", True), _where(run, "calibrate"), (True, False)),
        screen=_screen(run, given.get("screen")),
        gain=_share(given.get("gain", 1.0), _where(run, "gain"), 1.0, 1e3),
        probes=_whole(given.get("probes", 0), _where(run, "probes"), 0, MOST),
        consensus=_choice(given.get("consensus", True), _where(run, "consensus"), (True, False)),
        leash=_share(given.get("leash", 1.0), _where(run, "leash"), 1.0, 1e6),
        enough=_share(given.get("enough", 0.0), _where(run, "enough"), 0.0, 0.01),
        refit=_refit(run, given.get("refit", {}), training),
        parameters=None if largest is None else _whole(largest, _where(run, "parameters"), 1),
        curves=_choice(given.get("curves", False), _where(run, "curves"), (True, False)),
    )
    if options.edge + options.tails > 1:
        raise SpecError(
            f"{_where(run, 'tails')}: edge {options.edge:g} and tails {options.tails:g} are more than all validation rows; "
            "give shares that are 1 together at most"
        )
    for candidate in options.candidates:
        own = f"{_where(run, 'candidates')}.{candidate.name}"
        if options.screen is not None and options.screen.epochs > candidate.training.epochs:
            raise SpecError(
                f"{_where(run, 'screen')}.epochs: {options.screen.epochs} are more than the {candidate.training.epochs} epochs of "
                f"the training of {candidate.name}; give fewer, or null for no short first phase"
            )
        for config in (candidate.training, candidate.warm, options.refit):
            if config is not None:
                rehearse(candidate.spec, config, f"{own}.training")
    _check_sizes(run, options)
    if run.protocol == "paper" and sum(candidate.tries for candidate in options.candidates) != 1:
        raise SpecError(f"{_where(run, 'candidates')}: the protocol paper has one candidate and one try")
    return options


def _check_sizes(run: Run, options: Options) -> None:
    for candidate in options.candidates:
        with torch.device("meta"):
            count = trained_count(Model(candidate.spec))
        if options.parameters is not None and count > options.parameters:
            raise SpecError(
                f"{_where(run, 'candidates')}.{candidate.name}: {count} parameters are more than the {options.parameters} "
                "that are allowed; make it smaller, or raise the option parameters"
            )


def _candidates(run: Run, given: dict[str, Any], inputs: int, tries: int, training: Any) -> tuple[Candidate, ...]:
    where = _where(run, "candidates")
    targets, rounds = given.get("targets", "standard"), given.get("rounds", 1)
    linear = given.get("linear_start", False)
    # None takes away a candidate that the experiment has for all rows.
    entries = {
        name: entry for name, entry in _mapping(given.get("candidates") or {}, where).items() if entry is not None
    }
    if not entries:
        raise SpecError(f"{where}: give one candidate at least, as name: {{model: …}}")
    found: list[Candidate] = []
    for name, entry in entries.items():
        own = f"{where}.{name}"
        entry = _mapping(entry, own)
        kinds = [kind for kind in KINDS if kind in entry]
        unknown = sorted(set(entry) - set(KINDS) - set(ENTRIES))
        if len(kinds) != 1 or unknown:
            raise SpecError(
                f"{own}: expected one of {', '.join(KINDS)}, and {', '.join(ENTRIES[:-1])} or {ENTRIES[-1]}; "
                f"got {', '.join(map(str, entry)) or 'nothing'}"
            )
        spec = _spec(entry[kinds[0]], kinds[0], inputs, f"{own}.{kinds[0]}")
        linear_start = _choice(entry.get("linear_start", linear), f"{own}.linear_start", (True, False))
        after = spec.resolved()[-1][2].output
        if linear_start and after:
            raise SpecError(
                f"{own}.linear_start: the last layer has {after[0]!r} after it, and is not solved by least "
                "squares; set it to false, or leave out the output of the last layer"
            )
        found.append(
            Candidate(
                str(name),
                spec,
                _whole(entry.get("tries", tries), f"{own}.tries", 1),
                _training(
                    {**_mapping(training, _where(run, "training")), **_mapping(entry.get("training", {}), own)}, own
                ),
                _ranges(entry.get("place", []), spec, f"{own}.place"),
                _earlier(entry.get("after"), spec, found, f"{own}.after"),
                _choice(entry.get("targets", targets), f"{own}.targets", TARGETS),
                _whole(entry.get("rounds", rounds), f"{own}.rounds", 1),
                None if entry.get("warm") is None else _training(entry["warm"], f"{own}.warm"),
                linear_start,
            )
        )
    return tuple(found)


def _spec(given: Any, kind: str, inputs: int, where: str) -> ModelSpec:
    make = KINDS[kind]
    if make is None:
        spec = cast(ModelSpec, from_dict(given, ModelSpec, where))
    else:
        options = _mapping(given, where)
        try:
            spec = make(**options)
        except TypeError as error:
            raise SpecError(f"{where}: {error}; see kapsi.zoo.{kind}.spec") from None
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
    try:
        return spec.sized(inputs, 1)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _ranges(given: Any, spec: ModelSpec, where: str) -> tuple[tuple[float, float] | None, ...]:
    layers = spec.resolved()[:-1]
    if not isinstance(given, list | tuple) or len(given) > len(layers):
        raise SpecError(
            f"{where}: expected a list of [low, high] or null, one for each of {len(layers)} hidden layers, got {given!r}"
        )
    found: list[tuple[float, float] | None] = []
    for (_, _, layer), wanted in zip(layers, given, strict=False):
        if wanted is None:
            found.append(None)
            continue
        if not isinstance(wanted, list | tuple) or len(wanted) != 2:
            raise SpecError(f"{where}: expected [low, high] or null, got {wanted!r}")
        low, high = (_share(end, where, -1e6, 1e6) for end in wanted)
        if not low < high:
            raise SpecError(f"{where}: expected low below high, got {wanted!r}")
        head = layer.heads[0]
        plain = len(layer.heads) == 1 and head.bias and not layer.output and head.channels == 1
        if not plain or type(head.reconciliation) not in (Dense, LowRank) or head.remainder != ZeroRemainder():
            raise SpecError(
                f"{where}: only a layer of one head with a bias, dense or low-rank ψ, no remainder and no output processing can be "
                "placed; set the others to null"
            )
        found.append((low, high))
    return tuple(found)


def _earlier(given: Any, spec: ModelSpec, before: list[Candidate], where: str) -> str | None:
    if given is None:
        return None
    known = {candidate.name: candidate.spec.resolved()[0] for candidate in before}
    if not isinstance(given, str) or given not in known or known[given] != spec.resolved()[0]:
        fitting = [name for name, first in known.items() if first == spec.resolved()[0]]
        raise SpecError(
            f"{where}: expected the name of a candidate before it that has the same first layer "
            f"({', '.join(fitting) or 'there is none'}), got {given!r}"
        )
    return str(given)


def _training(given: Any, where: str) -> TrainConfig:
    refuse(given, f"{where}.training", patience="is for early stopping, which there is none of here; leave it out")
    data = {"loss": "mse", "solver": "levenberg_marquardt", **_mapping(given, where)}
    return cast(TrainConfig, from_dict(data, TrainConfig, f"{where}.training"))


def _refit(run: Run, given: Any, training: Any) -> TrainConfig | None:
    if given is None or given is False:
        return None
    where = _where(run, "refit")
    if isinstance(given, Mapping) and "starts" in given:
        raise SpecError(f"{where}.starts: the chosen model goes on from where it is; leave it out")
    config = _training({**_mapping(training, where), **_mapping(given, where)}, where)
    # Further starts would be drawn anew, and would not be the chosen model any more.
    return replace(config, starts=1)


def _screen(run: Run, given: Any) -> Screen | None:
    if given is None or given is False:
        return None
    where = _where(run, "screen")
    data = _mapping(given, where)
    if set(data) != {"epochs", "keep"}:
        raise SpecError(f"{where}: expected epochs and keep, got {', '.join(map(str, data)) or 'nothing'}")
    return Screen(_whole(data["epochs"], f"{where}.epochs", 1), _whole(data["keep"], f"{where}.keep", 1))


def _where(run: Run, name: Any) -> str:
    return f"{run.where}: options.{name}"


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SpecError(f"{where}: expected names with values, got {given!r}")
    return dict(given)


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise SpecError(f"{where}: expected a name, got {given!r}")
    return given


def _whole(given: Any, where: str, least: int, most: int = 10**9) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise SpecError(f"{where}: expected a whole number of at least {least}, got {given!r}")
    if given > most:
        raise SpecError(f"{where}: at most {most:,} are allowed, got {str(given)[:40]}")
    return given


def _share(given: Any, where: str, least: float, most: float) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given <= most:
        raise SpecError(f"{where}: expected a number from {least:g} to {most:g}, got {given!r}")
    return float(given)


def _choice(given: Any, where: str, choices: tuple[Any, ...]) -> Any:
    if not any(given is choice or (isinstance(given, str) and given == choice) for choice in choices):
        raise SpecError(f"{where}: expected {' or '.join(str(c).lower() for c in choices)}, got {given!r}")
    return given
