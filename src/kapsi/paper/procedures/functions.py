"""Fit a function of a few variables: selection on validation rows, a single evaluation of the test rows.

Steps of a run under the protocol `validation`:

1. Draw rows by the seed; the first ones are training rows, the others test rows. Inputs are scaled to [−1, 1] by the range of the
   training rows, targets are standardized likewise.
2. Set aside a share of the training rows for validation. Part of these rows are extreme in random directions, part have the
   highest and lowest targets, because test rows lie beyond the training rows there.
3. Fit every candidate to the other training rows from several initial values, with `successive_halving` for a few epochs first.
   The lowest validation error is selected.
4. With `reference_inputs` and `consensus`, compare the fits on random inputs, without targets. A fit far from all
   others of similar error counts as worse.
5. Refit the selected model on all training rows. The refit is rejected if the predictions drift on the random inputs by more than
   the validation error; the next model of similar error replaces the model, then a refit with at most ten times the drift, then the
   selected model without a refit. Score the model on the test rows.

Under the protocol `paper`, the only candidate is trained on all training rows. The score belongs to the last epoch; the lowest test
error of all epochs, as printed in the paper, is `best_epoch_on_test`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch

from kapsi.data.problems import problem
from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.function import Spec, coerce, option
from kapsi.modules import Model, trained_count
from kapsi.paper.experiment import Budget, Outcome, Run
from kapsi.paper.procedures.dry_run import dry_run, refuse
from kapsi.paper.procedures.function_fits import FunctionFits, draw
from kapsi.paper.short_forms import merged, read_named
from kapsi.reconciliation import Dense, LowRank
from kapsi.remainder import ZeroRemainder
from kapsi.spec import LayerSpec, ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.losses import MSE
from kapsi.training.solvers import LevenbergMarquardt
from kapsi.zoo import kan, mlp

MAX_ROWS = 10_000_000
Targets = Literal["standard", "scaled", "raw"]
NETWORKS: Mapping[str, Callable[..., ModelSpec]] = {"mlp": mlp.spec, "kan": kan.spec}
SHARED = ("trials", "targets", "rounds", "least_squares_init")
"""Options of all candidates, unless a candidate overrides them."""
DEFAULT_TRAINING = {"loss": "mse", "smoothness": 0.0, "solver": {"kind": "levenberg_marquardt"}}


@dataclass(frozen=True, kw_only=True)
class FunctionCandidate(Spec):
    """A model, given by `model`, `mlp` or `kan`, and the training.

    Args:
        name: name, unique in the run.
        model: specification; widths at the ends may be null.
        mlp: arguments of `kapsi.zoo.mlp.spec`.
        kan: arguments of `kapsi.zoo.kan.spec`.
        trials: number of models fitted, each with different initial values and calibration.
        training: further restarts within a trial are compared by the training error.
        place: for each hidden layer the range [low, high] of the outputs over the training rows before the first step, or null for
            the drawn values. A basis on [−1, 1] starts on [−1, 1], a logarithm above zero. Every second trial is mirrored.
        after: name of an earlier candidate; the first layer starts as in the best fit after the first phase.
        targets: see `FunctionOptions`.
        rounds: parts of a fit; splines of hidden layers are moved to their current data in between.
        warm: training before the first phase, for example a few epochs of AdamW before Gauss–Newton steps; null for none.
        least_squares_init: start the last layer as the least-squares solution for the other layers. Drawn values pull the layers
            below with ranges placed elsewhere: a model with arcsin in κ, exact for arcsin(x + y) and close at the start, ended
            at an error of 6e-4 without and of 1e-31 with this option.
    """

    name: str
    model: ModelSpec | None = None
    mlp: Mapping[str, Any] | None = None
    kan: Mapping[str, Any] | None = None
    trials: int = option(1, minimum=1)
    training: TrainConfig = TrainConfig(loss=MSE(), solver=LevenbergMarquardt())
    place: tuple[tuple[float, float] | None, ...] = ()
    after: str | None = None
    targets: Targets = "standard"
    rounds: int = option(1, minimum=1)
    warm: TrainConfig | None = None
    least_squares_init: bool = False

    def check(self) -> None:
        kinds = ("model", "mlp", "kan")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            raise SpecError(f"expected one of {', '.join(kinds)}, got {', '.join(given) or 'none'}")
        for ends in self.place:
            if ends is not None and not -1e6 <= ends[0] < ends[1] <= 1e6:
                raise SpecError(f"place: expected low below high, from -1e6 to 1e6, got {list(ends)}")

    @property
    def spec(self) -> ModelSpec:
        """Specification of the model; with all widths after `sized`."""
        return cast(ModelSpec, self.model)

    def sized(self, inputs: int) -> FunctionCandidate:
        """Return the candidate with its specification for `inputs` inputs, checked against the other options."""
        kind = next(kind for kind in ("model", "mlp", "kan") if getattr(self, kind) is not None)
        options = getattr(self, kind)
        try:
            spec = options if kind == "model" else NETWORKS[kind](**options)
            candidate = replace(self, model=spec.sized(inputs, 1), mlp=None, kan=None)
        except TypeError as error:
            raise SpecError(f"{kind}: {error}; see kapsi.zoo.{kind}.spec") from None
        except (SpecError, DataError) as error:
            raise SpecError(f"{kind}: {error}") from None
        *hidden, last = (layer for _, _, layer in candidate.spec.resolved())
        if self.least_squares_init and last.output:
            raise SpecError(
                f"least_squares_init: the last layer is followed by {last.output[0]!r}, which least squares cannot invert; "
                "set it to false, or leave out the output of the last layer"
            )
        if len(self.place) > len(hidden):
            raise SpecError(
                f"place: expected [low, high] or null for each of {len(hidden)} hidden layers, got {len(self.place)}"
            )
        if not all(ends is None or _can_be_placed(layer) for layer, ends in zip(hidden, self.place, strict=False)):
            raise SpecError(
                "place: only a layer of one head with a bias, dense or low-rank ψ, no remainder and no output processing can be "
                "placed; set the others to null"
            )
        return candidate


def _can_be_placed(layer: LayerSpec) -> bool:
    head = layer.heads[0]
    plain = len(layer.heads) == 1 and head.bias and not layer.output and head.channels == 1
    return plain and type(head.reconciliation) in (Dense, LowRank) and head.remainder == ZeroRemainder()


@dataclass(frozen=True)
class SuccessiveHalving(Spec):
    """A short first phase.

    Args:
        epochs: number of epochs of each trial.
        keep: number of trials continued, over all candidates.
    """

    epochs: int = option(minimum=1)
    keep: int = option(minimum=1)


@dataclass(frozen=True, kw_only=True)
class FunctionOptions(Spec):
    """Options of the procedure `functions`.

    Args:
        function: name of the problem, by default the name of the row.
        rows: number of rows drawn.
        train: number of training rows, by default half of the rows.
        noise: see `FunctionProblem.split`.
        validation: share of the training rows used for validation, 0.05 to 0.5.
        edge: share of the validation rows at the extreme of a random direction, 0 to 1.
        tails: share of the validation rows with the highest and the lowest targets, 0 to 1 − edge.
        inputs: `unit` scales to [−1, 1] by the range of the training rows; `raw` does not.
        targets: `standard`: mean 0 and variance 1 over the training rows; `scaled`: mean absolute value 1, with zero fixed, for
            outputs of constant sign; `raw`.
        calibrate: whether to set grids and other buffers from the training rows before a fit.
        candidates: {name: candidate}, not empty, under the protocol `paper` a single candidate; null removes a candidate.
        trials, rounds, least_squares_init: defaults of the candidates, as in `FunctionCandidate`.
        training: default of the candidates; `smoothness` is 0 if not given.
        successive_halving: a short first phase; null for none.
        min_improvement: factor by which a candidate must lower the validation error of the candidates above, 1 to 1,000. Close to
            poles all errors are alike, and the simplest model is the safest.
        reference_inputs: number of random inputs, uniform in the range of the training rows, for the comparison of fits; 0: none.
        consensus: compare fits with each other before selection (true); needs reference_inputs.
        max_drift: largest mean squared change of the outputs on the reference inputs in a refit, in validation errors, 1 to 1e6
            (1); needs reference_inputs.
        target_error: validation error, as a share of the variance of the targets, that ends the search, 0 to 0.01.
        refit: changes of the training for the refit on all training rows; null for no refit.
        parameters: maximum number of trainable parameters of a candidate; null for any.
        curves: whether to record errors after each epoch, also on test rows; the selection is not affected.
    """

    function: str
    rows: int = option(2_000, minimum=10, maximum=MAX_ROWS)
    train: int | None = option(None, minimum=5)
    noise: float = option(0.0, minimum=0.0, maximum=1e6)
    validation: float = option(0.2, minimum=0.05, maximum=0.5)
    edge: float = option(0.25, minimum=0.0, maximum=1.0)
    tails: float = option(0.0, minimum=0.0, maximum=1.0)
    inputs: Literal["unit", "raw"] = "unit"
    targets: Targets = "standard"
    calibrate: bool = True
    candidates: tuple[FunctionCandidate, ...] = option(read=read_named(FunctionCandidate))
    trials: int = option(1, minimum=1)
    rounds: int = option(1, minimum=1)
    least_squares_init: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)
    successive_halving: SuccessiveHalving | None = None
    min_improvement: float = option(1.0, minimum=1.0, maximum=1e3)
    reference_inputs: int = option(0, minimum=0, maximum=MAX_ROWS)
    consensus: bool | None = None
    max_drift: float | None = option(None, minimum=1.0, maximum=1e6)
    target_error: float = option(0.0, minimum=0.0, maximum=0.01)
    refit: TrainConfig | None = None
    parameters: int | None = option(None, minimum=1)
    curves: bool = False

    def check(self) -> None:
        if self.train is not None and self.train >= self.rows:
            raise SpecError(f"train: {self.train} of {self.rows} rows leave no test rows; give less, or more rows")
        if self.edge + self.tails > 1:
            raise SpecError(
                f"tails: edge {self.edge:g} and tails {self.tails:g} are shares that are 1 together at most"
            )
        for name in ("consensus", "max_drift"):
            if getattr(self, name) is not None and not self.reference_inputs:
                raise SpecError(f"{name}: needs reference_inputs; set both, or leave it out")
        if not self.candidates:
            raise SpecError("candidates: give one candidate at least, as name: {model: …}")
        try:
            inputs = problem(self.function).inputs
        except KapsiError as error:
            raise SpecError(f"function: {error}") from None
        sized: list[FunctionCandidate] = []
        for candidate in self.candidates:
            try:
                sized.append(candidate.sized(inputs))
                self._check_candidate(sized)
            except (SpecError, DataError) as error:
                raise SpecError(f"candidates.{candidate.name}.{error}") from None
        object.__setattr__(self, "candidates", tuple(sized))
        object.__setattr__(self, "train", self.train or self.rows // 2)

    def _check_candidate(self, sized: list[FunctionCandidate]) -> None:
        """Check the last candidate against the others and the options."""
        *earlier, last = sized
        first = last.spec.resolved()[0]
        same_first = [candidate.name for candidate in earlier if candidate.spec.resolved()[0] == first]
        if last.after is not None and last.after not in same_first:
            raise SpecError(
                f"after: expected the name of a candidate before it with the same first layer "
                f"({', '.join(same_first) or 'there is none'}), got {last.after!r}"
            )
        if self.successive_halving is not None and self.successive_halving.epochs > last.training.epochs:
            raise SpecError(
                f"training.epochs: the {self.successive_halving.epochs} epochs of successive_halving are more than the "
                f"{last.training.epochs} epochs of the training; give fewer, or null for no successive halving"
            )
        with torch.device("meta"):
            count = trained_count(Model(last.spec))
        if self.parameters is not None and count > self.parameters:
            raise SpecError(
                f"model: {count} parameters are more than the {self.parameters} of the option parameters; "
                "make it smaller, or raise the option"
            )


# ------------------------------------------------------------------------------------------------ options


def read_options(run: Run) -> FunctionOptions:
    """Return the options of a run.

    Raises:
        SpecError: unknown option, or invalid value.
    """
    run.expects("mse", "validation", "paper")
    where = f"{run.where}: options"
    options: FunctionOptions = coerce(FunctionOptions, _expanded(run.options, run.row, where), where)
    for candidate in options.candidates:
        for config in (candidate.training, candidate.warm, options.refit):
            if config is not None:
                dry_run(candidate.spec, config, f"{where}.candidates.{candidate.name}.training")
    if run.protocol == "paper" and sum(candidate.trials for candidate in options.candidates) != 1:
        raise SpecError(f"{where}.candidates: the protocol paper allows one candidate and one trial")
    return options


def _expanded(options: Mapping[str, Any], row: str, where: str) -> dict[str, Any]:
    """Return options with the shared training and defaults in every candidate; null candidates are removed."""
    training = merged(DEFAULT_TRAINING, _checked(options.get("training"), f"{where}.training"))
    shared = {name: options[name] for name in SHARED if name in options}
    candidates = {}
    for name, entry in _checked(options.get("candidates"), f"{where}.candidates").items():
        if entry is None:
            continue
        here = f"{where}.candidates.{name}"
        entry = {**shared, **_checked(entry, here)}
        entry["training"] = merged(training, _checked(entry.get("training"), f"{here}.training"))
        if entry.get("warm") is not None:
            entry["warm"] = merged(DEFAULT_TRAINING, _checked(entry["warm"], f"{here}.warm"))
        candidates[name] = entry
    expanded = {"function": row, **options, "candidates": candidates}
    if options.get("refit", {}) is not None:
        changes = _checked(options.get("refit"), f"{where}.refit")
        solver = changes.get("solver")
        if isinstance(solver, Mapping) and "restarts" in solver:
            raise SpecError(f"{where}.refit.solver.restarts: the refit continues from the selected model; leave it out")
        expanded["refit"] = merged(training, changes)
    return expanded


def _checked(options: Any, where: str) -> Mapping[str, Any]:
    """Return a mapping of plain options, empty for null, without ineffective training options."""
    options = coerce(Mapping[str, Any], {} if options is None else options, where)
    if where.rpartition(".")[2] in ("training", "refit", "warm"):
        refuse(options, where, patience="is for early stopping, which this procedure does not use; leave it out")
    return options


def budget(run: Run) -> Budget:
    """Return the search of a run."""
    options = read_options(run)
    halving, fits = options.successive_halving, []
    starts = epochs = 0
    for candidate in options.candidates:
        config = candidate.training
        restarts = config.solver.restarts if isinstance(config.solver, LevenbergMarquardt) else 1
        first = config.epochs if halving is None else halving.epochs
        starts += candidate.trials * restarts
        epochs += candidate.trials * (restarts * first + (candidate.warm.epochs if candidate.warm else 0))
        fits += [config.epochs - first] * candidate.trials
    if halving is not None:
        epochs += sum(sorted(fits, reverse=True)[: halving.keep])
    return Budget(len(options.candidates), starts, epochs + (options.refit.epochs if options.refit else 0))


def run(run: Run) -> Outcome:
    """Draw rows, select, fit and score.

    Raises:
        SpecError: invalid options.
        KapsiError: every fit failed.
    """
    options = read_options(run)
    started = time.process_time()
    fits = FunctionFits(run, options, *draw(options, run.seed))
    outcome = fits.as_paper() if run.protocol == "paper" else fits.select()
    return replace(outcome, seconds=time.process_time() - started)
