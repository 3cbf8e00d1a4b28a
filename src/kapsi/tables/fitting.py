"""Fit a table: preprocess, fit and score each part of the rows, and write the run folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from kapsi.calibrate import calibrate
from kapsi.data.tabular import TableProblem, unseen_notes
from kapsi.errors import RunError, ScaleWarning, SpecError, TableError, shown
from kapsi.files import plain, resolve, show
from kapsi.modules import Model, scale_last_layer
from kapsi.recipes import LeaderboardRow, Recipe
from kapsi.spec import ModelSpec
from kapsi.tables.configuration import (
    SINGLE_MODELS,
    RunConfig,
    notes_on_model,
    outputs_of,
    read_problem,
    resolve_run,
)
from kapsi.tables.intervals import check_groups, fit_intervals
from kapsi.tables.kept_rows import keep_rows
from kapsi.tables.model import FittedPart, TableModel
from kapsi.tables.preparation import TrainingRows
from kapsi.tables.recipe_rows import fit_recipe, table_model
from kapsi.tables.recipe_watch import RunWatch
from kapsi.tables.row_space import RowSpace, reduces
from kapsi.tables.run_folder import complete_run, log_epochs, log_part, write_run
from kapsi.tables.scores import (
    MoreScores,
    Scores,
    baselines,
    better_baselines,
    copies,
    more_scores,
    notes_on_scores,
    scores_of,
)
from kapsi.text import condensed, counted
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig
from kapsi.training.distributed import Group
from kapsi.training.logs import LogName
from kapsi.training.losses import Loss
from kapsi.training.metrics import Metric
from kapsi.training.run_folder import NewRun, free_path, peek
from kapsi.training.selection import Fits, Split, fit_selected
from kapsi.training.solvers import Solver

__all__ = ["FitReport", "find_complete", "fit_problem", "fit_table"]

Ints: TypeAlias = npt.NDArray[np.int64]
_Rows: TypeAlias = tuple[str, Ints, Ints]
"""Name, training rows and held-out rows of a part."""

MIN_CHECKPOINT_SECONDS = 10.0
"""Seconds of training before an interrupted run leaves checkpoints; shorter work is repeated as fast."""


def fit_rows(
    problem: TableProblem,
    train: TrainingRows,
    config: RunConfig,
    fits: Fits | None = None,
    device: torch.device | None = None,
) -> FittedPart:
    """Fit a model to training rows, with a configuration from `resolve_run`.

    Calibration, selection of the penalty and early stopping use the training rows only.
    """
    if config.recipe is not None:
        return fit_by_recipe(problem, train, config, fits)
    if config.model is None or not isinstance(config.training.solver, Solver):
        raise SpecError("fit_rows: the configuration has no model or solver; use the result of resolve_run")
    train = train.for_loss(problem, config.training.loss)
    whole = spec = config.model.sized(train.x.shape[1], outputs_of(problem))
    seed, count = config.training.seed, len(train.rows)
    # Small problems in float64: solvers on all rows converge to the last digits, and results repeat.
    dtype = torch.float32 if config.training.solver.mini_batch else torch.float64
    x = torch.from_numpy(train.x).to(device, dtype)
    space = _row_space(spec, config.training, x)
    if space is not None:
        x, spec = space.z, config.model.sized(space.z.shape[1], outputs_of(problem))
    y = torch.from_numpy(train.y).to(device=device, dtype=None if train.scale is None else dtype)
    data = (x, y) if train.weight is None else (x, y, torch.from_numpy(train.weight).to(device, dtype))
    ways = problem.splits(seed).take(train.rows)

    def make(part: torch.Tensor | slice) -> Model:
        labels = y[part] if train.scale is None else None
        return scale_last_layer(calibrate(Model(spec, seed=seed, dtype=dtype, device=device), x[part], labels))

    def splits(k: int) -> Sequence[Split]:
        if k > 1 and count >= 2 * k and ways.most >= k:
            pairs = ways.folds(k)
        else:
            pairs = [ways.split(config.table.early_stopping_fraction)]
        return [(torch.from_numpy(kept), torch.from_numpy(part)) for kept, part in pairs]

    with warnings.catch_warnings():
        # Columns and targets are standardized; a constant target leaves rounding errors.
        warnings.simplefilter("ignore", ScaleWarning)
        model, epochs, choices = fit_selected(make, data, config.training, splits=splits, fits=fits)
    if space is not None:
        model = space.expand(model, whole)
        choices = [choice._replace(l2=choice.l2 * space.scale**2) for choice in choices]
    return FittedPart(table_model(problem, train, model, config.table.reading, config.table.weight), epochs, choices)


def fit_by_recipe(
    problem: TableProblem, train: TrainingRows, config: RunConfig, fits: Fits | None = None
) -> FittedPart:
    """Fit a model to training rows by the recipe of a configuration."""
    if fits is not None and fits.group is not None and fits.group.size > 1:
        raise SpecError(f"a group of {fits.group.size} processes: {SINGLE_MODELS}")
    recipe = cast(Recipe, config.recipe)
    watch = None if fits is None else RunWatch(fits.callbacks, fits.checkpoints, recipe, config.training)
    fitted = fit_recipe(problem, train, recipe, config.training, watch)
    model = replace(fitted.model, reading=config.table.reading, weight=config.table.weight)
    result = fitted.result
    return FittedPart(model, [], [], result.leaderboard, result.notes, model.decoded(result.held_out))


def _row_space(spec: ModelSpec, config: TrainConfig, x: torch.Tensor) -> RowSpace | None:
    """Return the coordinates for a linear model of more inputs than rows, otherwise None."""
    if not reduces(spec, config, *x.shape):
        return None
    solver, loss = config.solver, config.loss
    relative = (
        isinstance(solver, Solver) and isinstance(loss, Loss) and solver.chooses_l2(Model(spec, device="meta"), loss)
    )
    return RowSpace.of(x, scaled=config.l2 is None and not relative)


class FitReport(NamedTuple):
    """The result of `fit_table`.

    Attributes:
        path: run folder.
        task: `classification` or `regression`.
        scores: scores of each fold (of one part without folds) by name of the model: `kapsi` and the baselines.
        rows: number of used rows of the table.
        scored_rows: number of scored rows.
        parameters: number of parameters of the saved model.
        notes: notes for the user.
        metrics: further scores by model and name of the metric, one for each fold.
        leaderboard: heads that the recipe of the saved model compared; empty without a recipe.
        unit: unit of the predictions and the RMSE, empty for none.
    """

    path: Path
    task: str
    scores: dict[str, list[Scores]]
    rows: int
    scored_rows: int
    parameters: int
    notes: list[str]
    metrics: MoreScores
    leaderboard: tuple[LeaderboardRow, ...] = ()
    unit: str = ""


def fit_table(path: str | Path, config: RunConfig, output: str | Path | None = None, **options: Any) -> FitReport:
    """Fit a model to a table and write the run folder.

    With folds, each row is predicted by the model fitted without its fold, and the saved model is fitted to all rows. Without
    folds, the saved model is fitted to the training rows and scored on the validation rows. Scaling, penalty and number of
    epochs depend on training rows only.

    Args:
        path: CSV or Parquet file.
        config: target, model and training.
        output: run folder, by default `runs/` and the name of the table, numbered if it exists.
        options: further options of `fit_problem`.

    Raises:
        KapsiError: the table or an option does not fit; nothing is written.
    """
    return fit_problem(read_problem(path, config.table), config, output, **options)


def fit_problem(
    problem: TableProblem,
    config: RunConfig,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    callbacks: Any = (),
    checkpoints: Checkpoints | None = None,
    logs: Sequence[LogName] = (),
    group: Group | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> FitReport:
    """Fit a model to the features and target of a table and write the run folder, as `fit_table`.

    Args:
        problem: result of `read_problem`.
        config: options of table, model and training.
        output: run folder, by default `runs/` and the name of the table, numbered if it exists and `overwrite` is false.
        overwrite: replace an old run.
        callbacks: see `kapsi.fit`; a method `on_part`, if any, receives the name of each part before its fits.
        checkpoints: interval of the checkpoints, and whether to resume; the folder is next to the run and deleted at the end.
        logs: further logs of the epochs in the run folder, in addition to `metrics.jsonl`.
        group: the processes in the training; the first one writes.
        manifest: further entries of `run.json`.

    Raises:
        KapsiError: the table or an option does not fit; nothing is written.
    """
    group = Group() if group is None else group
    problem, config, parts = prepared(problem, config)
    where = _run_folder(problem, output, overwrite, group, checkpoints is not None and checkpoints.resume)
    replaced = _notes_on_replaced(where, problem) if overwrite and group.first else []
    outputs = np.zeros((len(problem.y), outputs_of(problem)))
    fold_of = np.full(len(problem.y), -1)
    scores: dict[str, list[Scores]] = {}
    metrics: MoreScores = {}
    with contextlib.ExitStack() as stack:
        run = log = None
        if group.first:
            again = checkpoints is not None and _is_finished(where, checkpoints)
            run = stack.enter_context(NewRun(where, overwrite=overwrite or again))
            stack.enter_context(plain(where, "write the run"))
            log = stack.enter_context(open(run.folder / "metrics.jsonl", "w", encoding="utf-8"))
        if checkpoints is not None:
            checkpoints = _checkpoints_for_run(where, checkpoints, problem.digest, overwrite)
        fits = functools.partial(_fits, callbacks, checkpoints, group)
        for number, (name, rows, test) in enumerate(parts, 1):
            train = TrainingRows.of(problem, rows, config.training.seed)
            fitted = fit_rows(problem, train, config, fits(name))
            if len(test):
                predicted = fitted.model.outputs(problem.features, test)
                outputs[test], fold_of[test] = predicted.reshape(len(test), -1), number
                predictions = {"kapsi": predicted, **baselines(problem, train, test)}
                part_scores = _add_scores(problem, config, test, predictions, scores, metrics)
            if log is not None:
                log_part(log, name, fitted, part_scores if len(test) else {}, problem.task)
        fitted = fitted._replace(
            notes=(*fitted.notes, *condensed(_notes_on_scores(problem, config.table.metrics, parts, fitted, scores)))
        )
        if run is not None:
            fitted = fitted._replace(model=_with_intervals(problem, config, fitted, train, outputs, fold_of))
            log_epochs(run.folder, logs, fitted.epochs)
            keep_rows(run.folder, problem, fitted.model, train.rows, outputs, fold_of, config.training.seed)
            write_run(run, problem, config, fitted, scores, outputs, fold_of, metrics)
            run.manifest |= manifest or {}
            run.on_sealed = None if checkpoints is None else checkpoints.finish_all
    if checkpoints is not None and group.first:
        checkpoints.remove()
    group.barrier()
    parameters = fitted.model.parameter_count
    notes = [*problem.notes, *fitted.notes, *replaced]
    if output is None and where.name != _default_folder(problem).name:
        notes.append(f"{_default_folder(problem)} is an earlier run; this run is {where}")
    scored = int((fold_of >= 0).sum())
    return FitReport(
        where,
        problem.task,
        scores,
        len(problem.y),
        scored,
        parameters,
        notes,
        metrics,
        fitted.leaderboard,
        fitted.model.unit,
    )


def prepared(problem: TableProblem, config: RunConfig) -> tuple[TableProblem, RunConfig, list[_Rows]]:
    """Return the problem with all notes, the resolved configuration, and the rows of each fit, for a fit or its plan."""
    problem = problem if config.recipe is not None else problem.without_texts()
    check_groups(problem, config.table.interval_by)
    parts = _check_weights(problem, config, _parts(problem, config))
    added = (*notes_on_model(problem, config), *copies(problem, parts))
    return replace(problem, notes=(*problem.notes, *added)), resolve_run(problem, config), parts


def _add_scores(
    problem: TableProblem,
    config: RunConfig,
    test: Ints,
    predictions: Mapping[str, npt.NDArray[np.float64]],
    scores: dict[str, list[Scores]],
    metrics: MoreScores,
) -> dict[str, Scores]:
    """Return the scores of each model on test rows, and append them, and the further scores, to those of other parts."""
    y, weight = problem.y[test], None if problem.weight is None else problem.weight[test]
    part = {model: scores_of(predicted, y, weight) for model, predicted in predictions.items()}
    for model, score in part.items():
        scores.setdefault(model, []).append(score)
        for metric, value in more_scores(config.table.metrics, predictions[model], y, weight).items():
            metrics.setdefault(model, {}).setdefault(metric, []).append(value)
    return part


def _with_intervals(
    problem: TableProblem,
    config: RunConfig,
    fitted: FittedPart,
    train: TrainingRows,
    outputs: npt.NDArray[np.float64],
    fold_of: Ints,
) -> TableModel:
    """Return the saved model with the errors of held-out rows: those of its recipe, and the scored rows it was not fitted to."""
    scored = np.flatnonzero(fold_of >= 0)
    predicted = outputs[scored] if problem.classes is not None or problem.y.ndim > 1 else outputs[scored, 0]
    if fitted.held_out is not None:
        known = ~np.isnan(fitted.held_out.reshape(len(train.rows), -1)).any(1)
        other = ~np.isin(scored, train.rows)
        scored = np.concatenate([train.rows[known], scored[other]])
        predicted = np.concatenate([fitted.held_out[known], predicted[other]])
    if not len(scored):
        return fitted.model
    intervals = fit_intervals(problem, fitted.model, scored, predicted, config.table.interval_by, config.training.seed)
    return replace(fitted.model, intervals=intervals)


def find_complete(
    problem: TableProblem, config: RunConfig, output: str | Path | None
) -> tuple[Path, dict[str, Any]] | None:
    """Return path and manifest of a complete run of the same work without checkpoints, None without one.

    A kill may come between the last step of a fit and the end of its process; to resume is no error then.
    """
    where = _default_folder(problem) if output is None else Path(output)
    left = Checkpoints(_checkpoint_folder(where))
    if left.found() or left.finished():
        return None
    manifest = complete_run(where, problem, resolve_run(problem, config))
    if manifest is None:
        return None
    left.remove()  # a kill may come before the emptied folders are removed
    return where, manifest


def _parts(problem: TableProblem, config: RunConfig) -> list[_Rows]:
    """Return name, training rows and test rows of each fit; the last fit is the saved one."""
    count, k, seed = len(problem.y), config.table.folds, config.training.seed
    classes = problem.classes is not None
    if k is not None and k > (count if classes else count // 2):
        least = "one row" if classes else "two rows (R² needs them)"
        raise TableError(
            f"{problem.name}: {k} folds of {counted(count, 'row')}; each fold needs at least {least}, give fewer"
        )
    if count < 4:
        raise TableError(f"{problem.name}: {counted(count, 'row')} with a target; at least 4 are needed")
    if problem.held is not None:
        parts = np.flatnonzero(~problem.held), np.flatnonzero(problem.held)
        if min(map(len, parts)) < 2:
            raise TableError(
                f"{problem.name}: {counted(len(parts[0]), 'training row')} and {counted(len(parts[1]), 'validation row')}; "
                "at least two of each are needed"
            )
        return [("training part", *parts)]
    ways = problem.splits(seed)
    if k is None:
        return [("training part", *ways.split(config.table.validation_fraction))]
    rows = np.arange(count)
    folds = [(f"fold {i} of {k}", train, test) for i, (train, test) in enumerate(ways.folds(k), 1)]
    return [*folds, ("all rows", rows, rows[:0])]


def _check_weights(problem: TableProblem, config: RunConfig, parts: list[_Rows]) -> list[_Rows]:
    """Return the parts; refuse one whose training rows, or held-out rows, all have the weight 0."""
    if problem.weight is None:
        return parts
    for part, train, test in parts:
        for kind, rows in (("training", train), ("held-out", test)):
            if len(rows) and not problem.weight[rows].any():
                raise TableError(
                    f"{problem.name}: the weight {shown(config.table.weight)} is 0 in all {counted(len(rows), f'{kind} row')} of "
                    f"the {part}; leave rows of weight 0 out of the table, or change --folds, --time or --group"
                )
    return parts


def _notes_on_scores(
    problem: TableProblem,
    metrics: Sequence[Metric],
    parts: list[_Rows],
    fitted: FittedPart,
    scores: dict[str, list[Scores]],
) -> list[str]:
    """Return notes on better baselines, and on held-out rows without R², out of range, or with unseen values."""
    notes = better_baselines(scores, problem.task)
    targets = problem.target if isinstance(problem.target, tuple) else (problem.target,)
    for name, _, test in parts if problem.task == "regression" else ():
        if len(test):
            where = f"held-out rows of {name}" if len(parts) > 1 else "validation rows"
            notes += notes_on_scores(problem.y[test], where, metrics, targets)
    if len(parts) == 1 and fitted.model.ranges is not None:
        notes += fitted.model.ranges.shifted(problem.features, parts[0][2])
    if problem.held is None:
        return notes
    notes += unseen_notes(fitted.model.preprocessing.unseen(problem.features.take(np.flatnonzero(problem.held))))
    if problem.classes is not None:
        new = np.setdiff1d(problem.y[problem.held], problem.y[~problem.held])
        if len(new):
            labels = ", ".join(repr(problem.classes[code]) for code in new[:10])
            notes.append(f"classes of {shown(problem.target)} without a training row: {labels}; no model predicts them")
    return notes


def _default_folder(problem: TableProblem) -> Path:
    return Path("runs") / (Path(problem.name).stem.strip(".") or "table")  # of a table ..csv, too


def _run_folder(problem: TableProblem, output: str | Path | None, overwrite: bool, group: Group, resume: bool) -> Path:
    """Return the run folder, chosen by the first process, which may create the folder before others look."""
    if output is not None:
        if not str(output).strip():
            raise RunError(f"--output: expected the name of a run folder, got {str(output)!r}")
        return Path(output)
    where = ""
    if group.first:
        base = _default_folder(problem)
        where = str((_interrupted_run(base) if resume else None) or (base if overwrite else free_path(base)))
    return Path(group.broadcast(where))


def _notes_on_replaced(where: Path, problem: TableProblem) -> list[str]:
    """Return a note if a run to be replaced has another table or target: tables in two folders may have the same name."""
    old = peek(resolve(where)) or {}
    of = f"{old.get('table')}, {old.get('rows')} rows, target {shown(old.get('target'))}, {old.get('created')}"
    target = list(problem.target) if isinstance(problem.target, tuple) else problem.target
    same = old.get("table_sha256") == problem.digest
    if not old or (same and old.get("target") == target):
        return []
    other = "target" if same else "table, or of other rows of this one"
    return [f"{show(where)}: the replaced run was of another {other} ({of})"]


def _interrupted_run(base: Path) -> Path | None:
    """Return the last of the paths base, base-2, … with checkpoints, None without any."""
    found, candidate, number = None, base, 1
    while os.path.lexists(candidate) or os.path.lexists(_checkpoint_folder(candidate)):
        found = candidate if os.path.lexists(_checkpoint_folder(candidate)) else found
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return found


def _fits(callbacks: Any, checkpoints: Checkpoints | None, group: Group, name: str) -> Fits:
    """Announce a part and return its fits."""
    for callback in callbacks if isinstance(callbacks, list | tuple) else (callbacks,):
        if hasattr(callback, "on_part"):
            callback.on_part(name)
    return Fits(callbacks, None if checkpoints is None else checkpoints.part(name.replace(" ", "-")), group)


def _checkpoint_folder(where: Path) -> Path:
    target = resolve(where)
    return target.parent / f"{target.name}.checkpoints"  # also of the root folder, refused later


def _is_finished(where: Path, checkpoints: Checkpoints) -> bool:
    """Return whether to replace a run by itself: a kill came between its last rename and the removal of its checkpoints.

    Without `resume` the checkpoints are removed.
    """
    left = replace(checkpoints, folder=_checkpoint_folder(where))
    with contextlib.suppress(OSError):
        finished = left.finished() == hashlib.sha256((resolve(where) / "run.json").read_bytes()).hexdigest()
        if finished and not checkpoints.resume:
            left.remove()
        return finished and checkpoints.resume
    return False


def _checkpoints_for_run(where: Path, checkpoints: Checkpoints, digest: str, overwrite: bool) -> Checkpoints:
    """Return the checkpoints in a folder next to the run.

    Raises:
        RunError: the folder is in use, or has checkpoints of another run.
    """
    folder = _checkpoint_folder(where)
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
        raise RunError(f"{show(folder)}: is in the way of the checkpoints; move or delete it, or give another --output")
    earlier = replace(checkpoints, folder=folder)
    if not checkpoints.resume and earlier.found():
        if not overwrite:
            raise RunError(
                f"{show(folder)}: has checkpoints of an interrupted run; give --resume to continue, or --overwrite to start again"
            )
        earlier.remove()
    return replace(checkpoints, folder=folder, context={"the table": digest}, least=MIN_CHECKPOINT_SECONDS)
