"""Fit a function of a few variables by the recipe `function_search`, and score it once on test rows.

Under the protocol `validation`, the seed draws rows; the first ones are training rows for `kapsi.recipes.FunctionSearch`, the
others test rows. Inputs are scaled to [−1, 1] by the range of the training rows.

Under the protocol `paper`, the only candidate is trained on all training rows. The score belongs to the last epoch; the lowest test
error of all epochs, as printed in the paper, is `best_epoch_on_test`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.data.problems import problem
from kapsi.errors import KapsiError, SpecError
from kapsi.function import Spec, coerce, option
from kapsi.modules import Layer, Model, trained_count
from kapsi.paper.experiment import Budget, Outcome, Run
from kapsi.paper.procedures.dry_run import dry_run, refuse
from kapsi.paper.short_forms import merged, read_named, require_known
from kapsi.recipes.function_search import DEFAULT_TRAINING, FunctionCandidate, FunctionSearch, unit_scale
from kapsi.recipes.trials import Trial, TrialRows, TrialSearch
from kapsi.training.solvers import LevenbergMarquardt

MAX_ROWS = 10_000_000
SHARED = ("trials", "targets", "rounds", "least_squares_init")
"""Options of all candidates, unless a candidate overrides them."""


@dataclass(frozen=True, kw_only=True)
class FunctionOptions(Spec):
    """Options of the procedure `functions`, in addition to the options of `kapsi.recipes.FunctionSearch`.

    `candidates` is {name: candidate}, under the protocol `paper` a single candidate; null removes a candidate. `trials`, `targets`,
    `rounds`, `least_squares_init` and `training` next to `candidates` are defaults of the candidates. `refit` has changes of
    the training for the refit.

    Args:
        search: the recipe.
        function: name of the problem, by default the name of the row.
        rows: number of rows drawn.
        train: number of training rows, by default half of the rows.
        noise: see `FunctionProblem.split`.
        curves: whether to record errors after each epoch, also on test rows; the selection is not affected.
    """

    search: FunctionSearch
    function: str
    rows: int = option(2_000, minimum=10, maximum=MAX_ROWS)
    train: int | None = option(None, minimum=5)
    noise: float = option(0.0, minimum=0.0, maximum=1e6)
    curves: bool = False

    def check(self) -> None:
        if self.train is not None and self.train >= self.rows:
            raise SpecError(f"train: {self.train} of {self.rows} rows leave no test rows; give less, or more rows")
        try:
            inputs = problem(self.function).inputs
        except KapsiError as error:
            raise SpecError(f"function: {error}") from None
        object.__setattr__(self, "search", self.search.sized(inputs))
        object.__setattr__(self, "train", self.train or self.rows // 2)


# ------------------------------------------------------------------------------------------------ options


def read_options(run: Run) -> FunctionOptions:
    """Return the options of a run.

    Raises:
        SpecError: unknown option, or invalid value.
    """
    run.expects("mse", "validation", "paper")
    where = f"{run.where}: options"
    own, general = ([f.name for f in fields(cls)] for cls in (FunctionOptions, FunctionSearch))
    require_known(run.options, [*own[1:], *general, *SHARED], where)
    expanded = _expanded(run.options, where)
    search = coerce(
        FunctionSearch, {"kind": FunctionSearch.name, **{k: v for k, v in expanded.items() if k in general}}, where
    )
    known = {name: value for name, value in expanded.items() if name in own}
    options: FunctionOptions = coerce(FunctionOptions, {"function": run.row, **known, "search": search}, where)
    for candidate in options.search.candidates:
        for config in (candidate.config, candidate.warm, options.search.refit):
            if config is not None:
                dry_run(candidate.spec, config, f"{where}.candidates.{candidate.name}.training")
    if run.protocol == "paper" and sum(candidate.trials for candidate in options.search.candidates) != 1:
        raise SpecError(f"{where}.candidates: the protocol paper allows one candidate and one trial")
    return options


def _expanded(options: Mapping[str, Any], where: str) -> dict[str, Any]:
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
    expanded = {**options, "candidates": read_named(FunctionCandidate)(candidates, f"{where}.candidates")}
    expanded.pop("training", None)
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
    options = read_options(run).search
    halving, fits = options.successive_halving, []
    starts = epochs = 0
    for candidate in options.candidates:
        config = candidate.config
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
    training, test = draw(options, run.seed)
    as_paper = run.protocol == "paper"

    def errors(trial: Trial, rows: TrialRows) -> tuple[float, float]:
        scaled = replace(rows, x=test.x, y=test.y)
        return rows.error(trial.model) if options.curves else math.nan, scaled.error(trial.model)

    search = TrialSearch(options.search, training, run.seed, errors if as_paper or options.curves else None)
    validation = None
    if as_paper:
        (best,) = search.trials(training.x, [])
        search.train(best, training, best.candidate.config)
        if best.failed:
            raise KapsiError(best.failed)
        on_test = [error for _, error in best.records]
        best_epoch = min(range(len(on_test)), key=on_test.__getitem__)
        extra: dict[str, Any] = {"best_epoch_on_test": on_test[best_epoch], "best_epoch": best_epoch + 1}
    else:
        best, refitted, lowest, trials = search.select()
        validation = lowest[best.candidate.name]
        extra = {
            "candidate": best.candidate.name,
            "trial": best.number,
            "refitted": refitted,
            "validation_errors": lowest,
            "fits": len(trials),
            "failed": sum(bool(trial.failed) for trial in trials),
        }
    extra = {
        "function": options.function,
        **extra,
        "train": search.rows_for(best.candidate).error(best.model),
        "epochs": best.epochs,
        "rows_outside": _rows_outside(best.model, training.x, test.x),
    }
    curves: dict[str, list[float]] = {}
    if options.curves:
        steps = [float(i + 1) for i in range(len(best.records))]
        curves = {
            "iteration": steps,
            **{name: [r[i] for r in best.records] for i, name in enumerate(("train", "test"))},
        }
    return Outcome(
        search.rows_for(best.candidate, test).error(best.model),
        None if validation is None or not math.isfinite(validation) else validation,
        trained_count(best.model),
        time.process_time() - started,
        extra,
        curves,
    )


def draw(options: FunctionOptions, seed: int) -> tuple[TrialRows, TrialRows]:
    """Return training and test rows, with inputs scaled by the training rows."""
    arrays = problem(options.function).split(options.rows, cast(int, options.train), seed=seed, noise=options.noise)
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
    if options.search.inputs == "unit":
        center, half_width = unit_scale(x)
        x, x_test = (x - center) / half_width, (x_test - center) / half_width
    return TrialRows(x, y.unsqueeze(1)), TrialRows(x_test, y_test.unsqueeze(1))


@torch.no_grad()
def _rows_outside(model: Model, x: Tensor, x_test: Tensor) -> int:
    """Return the number of test rows outside the range of the training rows at the input of any layer."""
    outside = torch.zeros(len(x_test), dtype=torch.bool)
    for layer in cast("list[Layer]", list(model.layers)):
        outside |= ((x_test < x.amin(0)) | (x_test > x.amax(0))).any(1)
        x, x_test = layer(x), layer(x_test)
    return int(outside.sum())
