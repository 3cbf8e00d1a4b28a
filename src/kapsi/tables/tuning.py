"""Tune a table: trials of configurations on inner folds of the training rows; the best configuration is fitted as a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from kapsi.data.tabular import TableProblem
from kapsi.errors import KapsiError, SpecError
from kapsi.files import finite, one_line
from kapsi.function import Function, Spec, option
from kapsi.modules import Model
from kapsi.notation import short_form
from kapsi.recipes import Auto, HeadRecipe
from kapsi.spec import ModelSpec, rpn, to_dict
from kapsi.tables.configuration import RunConfig, TableConfig, outputs_of, read_problem, resolve_run
from kapsi.tables.fitting import FitReport, fit_problem, fit_rows, prepared
from kapsi.tables.preparation import TrainingRows
from kapsi.tables.recipe_rows import recipe_data
from kapsi.tables.scores import scores_of
from kapsi.text import counted
from kapsi.training.config import TrainConfig
from kapsi.training.run_folder import check_new
from kapsi.training.solvers import LBFGS, AdamW, LevenbergMarquardt
from kapsi.version import __version__

__all__ = ["TrialRow", "TuneConfig", "TuneReport", "tune", "tune_problem"]

STARTING = 8
"""Trials with random options before the sampler learns from them."""

PARAMETERS = 1_000_000
"""Maximum number of parameters of a specification."""

ATTEMPTS = 0.2, 0.5, 1.0
"""Seconds before a database is opened again."""

EXPANSIONS: dict[str, Any] = {
    "identity": "identity",
    "taylor 2": {"kind": "taylor", "degree": 2, "symmetric": True},
    "chebyshev 3": {"kind": "chebyshev", "degree": 3},
    "b-spline": "b_spline",
    "fourier": "fourier",
    "gaussian": "gaussian_rbf",
}
RECONCILIATIONS: dict[str, Any] = {"dense": "dense", "low rank 2": {"kind": "low_rank", "rank": 2}}
REMAINDERS = {"linear": "linear", "zero": "zero"}
WIDTHS = {"none": (), "4": (4,), "8": (8,), "16": (16,), "32": (32,), "8, 8": (8, 8), "16, 16": (16, 16)}
ACTIVATIONS = {"silu": ("silu",), "tanh": ("tanh",), "none": ()}
SOLVERS: dict[str, Any] = {
    "auto": "auto",
    "adamw": AdamW(),
    "lbfgs": LBFGS(),
    "levenberg_marquardt": LevenbergMarquardt(),
}


@dataclass(frozen=True)
class TuneConfig(Spec):
    """Number of trials, time and place of a study.

    Args:
        trials: number of trials of the study, including trials of other processes and before an interruption.
        timeout: seconds after which no trial begins; None for no limit. A running trial ends after its fold.
        inner_folds: number of folds of the training rows, to score trials.
        storage: a file, or the URL of a database such as `sqlite:///study.db`, of the trials: to resume, and for several
            processes; None keeps them in memory.
    """

    trials: int = option(50, minimum=1)
    timeout: float | None = option(None, minimum=0.0)
    inner_folds: int = option(3, minimum=2, maximum=20)
    storage: str | None = None


class TrialRow(NamedTuple):
    """A finished trial.

    Attributes:
        number: number of the trial, from 0.
        model: the configuration in short.
        loss: mean of log loss, or RMSE in the unit of the target, over the inner folds.
        score: mean of accuracy, or R², over the inner folds.
        parameters: number of parameters of the model.
        seconds: wall-clock seconds.
        options: the options of the trial by name.
    """

    number: int
    model: str
    loss: float
    score: float
    parameters: int
    seconds: float
    options: dict[str, Any]


class TuneReport(NamedTuple):
    """The result of `tune`.

    Attributes:
        report: the fit of the best configuration; None if only trials were requested.
        best: the best trial.
        front: Pareto front of loss, parameters and seconds, the best first.
        counts: number of trials by state: complete, pruned, failed.
        failures: reasons of failed trials, by number.
    """

    report: FitReport | None
    best: TrialRow
    front: tuple[TrialRow, ...]
    counts: dict[str, int]
    failures: dict[int, str]


def tune(
    table: str | Path,
    target: str | Sequence[str],
    output: str | Path | None = None,
    *,
    trials: int = 50,
    timeout: float | None = None,
    storage: str | None = None,
    inner_folds: int = 3,
    seed: int = 0,
    overwrite: bool = False,
    recipe: Auto | None = None,
    **options: Any,
) -> TuneReport:
    """Tune a model of a table, fit the best configuration as a run, and return the trials.

    The first trial is the automatic model, as in `kapsi fit`. Others are sums of some heads with other options, and
    specifications κ × ψ × π with widths, penalties and solvers. A trial is scored on inner folds of the training rows, and
    given up after a fold worse than the median. The held-out rows of the run do not take part.

    Args:
        table: CSV or Parquet file.
        target: name of the target column, or of several columns of numbers.
        output: run folder, by default `runs/` and the name of the table, numbered if it exists.
        trials, timeout, storage, inner_folds: see `TuneConfig`.
        seed: seed of splits, initial values and trials.
        overwrite: replace an old run.
        recipe: the first trial, whose heads are tried; None for all heads.
        options: further options of `TableConfig`.

    Raises:
        KapsiError: the table or an option does not fit, or all trials fail; nothing is written.
    """
    names = target if isinstance(target, str) else tuple(target)
    config = RunConfig(TableConfig(names, **options), None, TrainConfig(seed=seed), recipe or Auto())
    study = TuneConfig(trials, timeout, inner_folds, storage)
    return tune_problem(read_problem(table, config.table), config, study, output, overwrite=overwrite)


def tune_problem(
    problem: TableProblem,
    config: RunConfig,
    study: TuneConfig,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    refit: bool = True,
    on_begin: Callable[[], None] = lambda: None,
    on_trial: Callable[[TrialRow | None, int], None] | None = None,
) -> TuneReport:
    """Tune a model of the features and target of a table, as `tune`.

    Args:
        problem: result of `read_problem`.
        config: options of the table, loss and seed, and the recipe of the first trial.
        study: trials, time and place.
        output, overwrite: see `tune`.
        refit: fit the best configuration; False runs trials only, for a study completed by another process.
        on_begin: called before the first trial, after all checks.
        on_trial: called after each trial with its row, None for a trial given up, and the number of finished trials.

    Raises:
        KapsiError: the table or an option does not fit, or all trials fail.
    """
    if config.table.folds is not None:
        raise SpecError(f"TableConfig(folds={config.table.folds}): has no effect beside trials; leave folds out")
    if refit and output is not None:
        check_new(output, overwrite=overwrite)
    tuner = _Tuner(problem, config, study)
    on_begin()
    tuner.run(on_trial)
    best, front = tuner.best(), tuner.front()
    summary = {"trials": tuner.counts(), "best": best.number, "front": [finite(row._asdict()) for row in front]}
    report = None
    if refit:
        chosen = tuner.configuration(best.options)
        report = fit_problem(problem, chosen, output, overwrite=overwrite, manifest={"tuning": summary})
    return TuneReport(report, best, front, tuner.counts(), tuner.failures())


class _Options:
    """Choices of a trial by name: drawn by Optuna, or given.

    Args:
        trial: a trial of Optuna, or a mapping.
    """

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def choose(self, name: str, values: Mapping[str, Any]) -> Any:
        """Return a choice among values; the first is the default."""
        if isinstance(self.trial, Mapping):
            return values[self.trial[name]]
        return values[self.trial.suggest_categorical(name, list(values))]

    def number(self, name: str, low: float, high: float) -> float:
        """Return a number between bounds, uniform in the logarithm."""
        if isinstance(self.trial, Mapping):
            return float(self.trial[name])
        return float(self.trial.suggest_float(name, low, high, log=True))


class _Defaults(_Options):
    """The first trial: the first value of each choice."""

    def __init__(self) -> None:
        super().__init__({})
        self.chosen: dict[str, Any] = {}

    def choose(self, name: str, values: Mapping[str, Any]) -> Any:
        self.chosen[name] = next(iter(values))
        return values[self.chosen[name]]


class _Tuner:
    """The trials of a study."""

    def __init__(self, problem: TableProblem, config: RunConfig, study: TuneConfig) -> None:
        self.problem, self.config, self.limits = problem, config, study
        self.seed = config.training.seed
        _, _, parts = prepared(problem, config)
        self.rows = parts[-1][1]
        ways = problem.splits(self.seed).take(self.rows)
        count = min(study.inner_folds, ways.most)
        self.folds = ways.folds(count)
        data = recipe_data(problem, TrainingRows.of(problem, self.rows[self.folds[0][0]], self.seed), config.training)
        suited = cast(Auto, config.recipe).plan(data).heads
        candidates = [head for head in cast(Auto, config.recipe).possible_heads() if head.label() in suited]
        self.kinds: dict[str, list[HeadRecipe]] = {}
        for head in candidates:
            if head.complexity >= 0:
                self.kinds.setdefault(type(head).name, []).append(head)
        columns = problem.features.columns.values()
        self.approaches = {"sum of heads": True}
        if not any(column.free or column.kind == "image" for column in columns):
            self.approaches["specification"] = False
        self.study = _study(self._name(), study)
        first = _Defaults()
        self._configuration(first)
        with _quiet():
            self.study.enqueue_trial(first.chosen, skip_if_exists=True)

    def _name(self) -> str:
        """Return the name of the study: trials of another table, configuration or version are others."""
        facts = [self.problem.digest, to_dict(self.config), sorted(self.kinds), self.limits.inner_folds, __version__]
        return f"kapsi-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"

    # -------------------------------------------------------------------------------- trials

    def run(self, on_trial: Callable[[TrialRow | None, int], None] | None) -> None:
        """Run trials until there are enough, or until the time is over."""
        deadline = math.inf if self.limits.timeout is None else time.monotonic() + self.limits.timeout
        while (count := sum(self.counts().values())) < self.limits.trials:
            if time.monotonic() > deadline and self.counts()["complete"]:
                break
            row = self._trial(deadline)
            if on_trial is not None:
                on_trial(row, count + 1)

    def _trial(self, deadline: float) -> TrialRow | None:
        """Run a trial; return None if it is given up or fails."""
        import optuna
        from optuna.trial import TrialState

        trial = self.study.ask()
        # Seeded by the number of the trial: a resumed study draws as an uninterrupted study, and processes differ.
        seed = int(np.random.SeedSequence([self.seed, trial.number]).generate_state(1)[0])
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTING)
        try:
            loss = self._scored(trial, deadline)
        except optuna.TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
            return None
        except (KapsiError, RuntimeError, ValueError) as error:
            trial.set_user_attr("reason", one_line(error) or type(error).__name__)
            self.study.tell(trial, state=TrialState.FAIL)
            return None
        except BaseException:
            trial.set_user_attr("interrupted", True)
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        return _row(self.study.tell(trial, loss))

    def _scored(self, trial: Any, deadline: float) -> float:
        """Return the mean loss over the inner folds; report it after each fold."""
        import optuna

        start, losses, scores, parameters = time.perf_counter(), [], [], 0
        config = self._configuration(_Options(trial))
        trial.set_user_attr("model", self._short(config))
        config = self._checked(config)
        for step, (train, test) in enumerate(self.folds):
            rows = TrainingRows.of(self.problem, self.rows[train], self.seed)
            model = fit_rows(self.problem, rows, config).model
            held_out = self.rows[test]
            weight = None if self.problem.weight is None else self.problem.weight[held_out]
            outputs = model.outputs(self.problem.features, held_out)
            score, loss = scores_of(outputs, self.problem.y[held_out], weight)
            losses.append(loss)
            scores.append(score)
            parameters = max(parameters, model.parameter_count)
            mean = float(np.mean(losses))
            if not math.isfinite(mean):
                raise ValueError("the loss on held-out rows is not finite")
            trial.report(mean, step)
            late = time.monotonic() > deadline and step < len(self.folds) - 1 and self.counts()["complete"] > 0
            if late or (trial.number > 0 and step < len(self.folds) - 1 and trial.should_prune()):
                raise optuna.TrialPruned
        facts = {"score": float(np.mean(scores)), "parameters": parameters, "seconds": time.perf_counter() - start}
        for name, value in facts.items():
            trial.set_user_attr(name, value)
        return mean

    def _checked(self, config: RunConfig) -> RunConfig:
        """Return the resolved configuration; refuse specifications of too many parameters."""
        config = resolve_run(self.problem, config)
        if config.model is not None:
            widths = len(self.problem.preprocessing.names()), outputs_of(self.problem)
            size = sum(p.numel() for p in Model(config.model.sized(*widths), device="meta").parameters())
            if size > PARAMETERS:
                raise SpecError(f"{size:,} parameters, more than {PARAMETERS:,}")
        return config

    # -------------------------------------------------------------------------------- search space

    def configuration(self, chosen: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of the options of a trial."""
        try:
            return self._configuration(_Options(chosen))
        except KeyError as error:
            raise SpecError(f"the best trial has no option {error}; give another storage") from None

    def _configuration(self, options: _Options) -> RunConfig:
        if options.choose("approach", self.approaches):
            return replace(self.config, recipe=self._heads(options))
        return self._specification(options)

    def _heads(self, options: _Options) -> Auto:
        """Return the automatic model of some heads; all heads with default options give the model of `kapsi fit`."""
        recipe, heads, plain = cast(Auto, self.config.recipe), [], True
        for name, offered in self.kinds.items():
            if not options.choose(name, {"yes": True, "no": False}):
                plain = False
                continue
            changed = {}
            for field, values in type(offered[0]).searched:
                value = options.choose(f"{name}.{field}", {_label(value): value for value in values})
                if value != values[0]:
                    changed[field] = value
            plain = plain and not changed
            heads += [replace(cast(Any, head), **changed) for head in offered]
        if plain:
            return recipe
        heads = heads or next(iter(self.kinds.values()))  # the simplest one
        return replace(recipe, heads=tuple(dict.fromkeys(heads)))

    def _specification(self, options: _Options) -> RunConfig:
        """Return a specification κ × ψ × π with widths, a penalty and a solver."""
        kappa = options.choose("expansion", EXPANSIONS)
        psi = options.choose("reconciliation", RECONCILIATIONS)
        pi = options.choose("remainder", REMAINDERS)
        hidden = options.choose("widths", WIDTHS)
        output = options.choose("activation", ACTIVATIONS) if hidden else ()
        model = rpn([None, *hidden, None], kappa, psi, pi, bias=True, output=output)
        training = self.config.training
        if options.choose("penalty", {"chosen": False, "given": True}):
            training = replace(training, l2=options.number("l2", 1e-8, 1.0))
        solver = options.choose("solver", SOLVERS)
        if getattr(solver, "mini_batch", False):
            solver = replace(solver, learning_rate=options.number("learning_rate", 1e-3, 0.1))
        return replace(self.config, model=model, training=replace(training, solver=solver), recipe=None)

    def _short(self, config: RunConfig) -> str:
        """Return a configuration in short, for a table."""
        if config.recipe is not None:
            heads = cast(Auto, config.recipe).heads
            return " + ".join(head.label() for head in heads) or "auto"
        spec = cast(ModelSpec, config.model)
        head = spec.layers[0].heads[0]
        functions: list[Function] = [head.expansion, head.reconciliation, head.remainder]
        widths = [str(width) for width in spec.widths if width is not None]
        solver = config.training.solver
        parts = [" × ".join(short_form(f) for f in functions), *([f"widths {', '.join(widths)}"] if widths else [])]
        parts += [solver if isinstance(solver, str) else short_form(solver)]
        return "; ".join(parts if config.training.l2 is None else [*parts, f"l2 {config.training.l2:.2g}"])

    # -------------------------------------------------------------------------------- results

    def _finished(self) -> list[Any]:
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state.is_finished() and not trial.user_attrs.get("interrupted")]

    def counts(self) -> dict[str, int]:
        """Return the number of finished trials by state."""
        names = [trial.state.name for trial in self._finished()]
        return {
            word: names.count(name)
            for word, name in (("complete", "COMPLETE"), ("pruned", "PRUNED"), ("failed", "FAIL"))
        }

    def failures(self) -> dict[int, str]:
        """Return the reasons of failed trials by number."""
        return {t.number: t.user_attrs["reason"] for t in self._finished() if "reason" in t.user_attrs}

    def rows_of_trials(self) -> list[TrialRow]:
        """Return the complete trials, the best first."""
        complete = [_row(trial) for trial in self._finished() if trial.state.name == "COMPLETE"]
        return sorted(complete, key=lambda row: (row.loss, row.number))

    def best(self) -> TrialRow:
        """Return the best trial.

        Raises:
            SpecError: no trial is complete.
        """
        rows = self.rows_of_trials()
        if not rows:
            reason = next(iter(self.failures().values()), "none was run")
            raise SpecError(f"no trial of {counted(self.limits.trials, 'trial')} is complete: {reason}")
        return rows[0]

    def front(self) -> tuple[TrialRow, ...]:
        """Return the Pareto front of loss, parameters and seconds."""
        rows = self.rows_of_trials()
        costs = [(row.loss, row.parameters, row.seconds) for row in rows]

        def surpassed(cost: tuple[float, ...]) -> bool:
            return any(other != cost and all(a <= b for a, b in zip(other, cost, strict=True)) for other in costs)

        return tuple(row for row, cost in zip(rows, costs, strict=True) if not surpassed(cost))


def _label(value: Any) -> str:
    """Return the name of a value: databases keep names."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "auto" if value is None else str(value)


def _row(trial: Any) -> TrialRow:
    facts = trial.user_attrs
    return TrialRow(
        trial.number,
        facts["model"],
        trial.value,
        facts["score"],
        facts["parameters"],
        facts["seconds"],
        dict(trial.params),
    )


def _study(name: str, config: TuneConfig) -> Any:
    """Return the study of a name in a storage, new or begun.

    Raises:
        SpecError: Optuna is missing, or the storage cannot be opened.
    """
    try:
        import optuna
    except ImportError:
        raise SpecError("tune: needs the package optuna; pip install 'kapsi[tune]'") from None
    with _quiet():
        try:
            storage = _storage(config.storage)
            pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
            return optuna.create_study(storage=storage, study_name=name, pruner=pruner, load_if_exists=True)
        except Exception as error:  # of many drivers
            reason = one_line(error).partition(" (Background")[0]
            if isinstance(error, ValueError | KeyError) and "://" not in str(config.storage):
                reason = "the file is not one of trials"
            example = "give a file, or a URL such as sqlite:///study.db"
            raise SpecError(f"TuneConfig(storage=…): cannot be opened: {reason}; {example}") from error


def _storage(place: str | None) -> Any:
    from optuna import storages

    if place is None:
        return None
    if "://" not in place:
        from optuna.storages.journal import JournalFileBackend

        if os.path.exists(place) and not os.path.isfile(place):  # a device may have no end
            raise OSError("is not a regular file")
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        return storages.JournalStorage(JournalFileBackend(place))
    from sqlalchemy.exc import DatabaseError

    # Several processes wait for each other; while one makes the tables, another one fails and tries again.
    wait = {"connect_args": {"timeout": 60}} if place.startswith("sqlite") else {}
    for seconds in ATTEMPTS:
        with contextlib.suppress(DatabaseError):
            return storages.RDBStorage(place, engine_kwargs=wait)
        time.sleep(seconds)
    return storages.RDBStorage(place, engine_kwargs=wait)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress messages of Optuna."""
    from optuna import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)
