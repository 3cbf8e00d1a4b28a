"""Fit a model to a table: folds, scores and the run folder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from kapsi.calibrate import calibrate
from kapsi.data.tabular import (
    Preprocessing,
    TargetScale,
    folds,
    make_problem,
    read_table,
    split,
)
from kapsi.data.tabular import (
    TableProblem as Problem,
)
from kapsi.errors import RunError, SpecError, TableError
from kapsi.files import plain, resolve, show
from kapsi.modules import Model, scale_last_layer
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.distributed import Group
from kapsi.training.logs import LogName
from kapsi.training.run_folder import NewRun, free_path
from kapsi.training.selection import Fits, Split, fit_selected
from kapsi.training.solvers import Solver
from kapsi.training.tables.configuration import RunConfig, settle
from kapsi.training.tables.model import Fitted, TableModel
from kapsi.training.tables.run_folder import log_epochs, log_part, write_run
from kapsi.training.tables.scores import Scores, baselines, classification_scores, regression_scores

__all__ = ["FitReport", "fit_table"]


LEAST_WORK = 10.0
"""Seconds after which an interrupted run leaves checkpoints: what takes less is done again as fast."""


def fit_rows(problem: Problem, rows: npt.NDArray[np.int64], config: RunConfig, fits: Fits | None = None) -> Fitted:
    """Fit preprocessing and model to some rows of a problem, with a configuration from `settle`; the others are not looked at."""
    if config.model is None:
        raise SpecError("fit_rows: the configuration has no model; take the one of settle")
    preprocessing = Preprocessing.fit(problem.features, rows)
    inputs = preprocessing.transform(problem.features, rows)
    if inputs.shape[1] == 0:
        raise TableError(
            f"{problem.name}: no inputs are left in a part of {len(rows)} rows; give more rows or fewer folds"
        )
    scale = None if problem.classes is not None else TargetScale.fit(problem.y[rows].astype(np.float64))
    outputs = 1 if problem.classes is None else len(problem.classes)
    spec = config.model.sized(inputs.shape[1], outputs)
    seed = config.training.seed
    x = torch.from_numpy(inputs)
    y = torch.from_numpy(problem.y[rows]) if scale is None else torch.from_numpy(scale.apply(problem.y[rows]))
    # Small problems in float64, where solvers on all rows converge to the last digits and results repeat.
    dtype = torch.float32 if cast(Solver, config.training.solver).mini_batch else torch.float64
    x = x.to(dtype)
    y = y if scale is None else y.to(dtype)

    def make(part: torch.Tensor | slice) -> Model:
        # Class by class where there are classes, and never with a row that the choice of a penalty is to look at.
        labels = y[part] if scale is None else None
        return scale_last_layer(calibrate(Model(spec, seed=seed, dtype=dtype), x[part], labels))

    def splits(count: int) -> Sequence[Split]:
        # Where each class has a single row, there is nothing to spread.
        classes = scale is None and len(np.unique(problem.y[rows])) < len(rows)
        if count > 1 and len(rows) >= 2 * count:
            held = folds(problem.y[rows], count, classes=classes, seed=seed)
            pairs = [(np.setdiff1d(np.arange(len(rows)), part), part) for part in held]
        else:
            pairs = [split(problem.y[rows], config.table.early_stopping_fraction, classes=classes, seed=seed)]
        return [(torch.from_numpy(kept), torch.from_numpy(part)) for kept, part in pairs]

    model, epochs, choices = fit_selected(make, (x, y), config.training, splits=splits, fits=fits)
    fitted = TableModel(model.requires_grad_(True), preprocessing, problem.target, problem.task, problem.classes, scale)
    return Fitted(fitted, epochs, choices)


class FitReport(NamedTuple):
    """What `fit_table` found.

    Attributes:
        path: the run folder.
        task: `classification` or `regression`.
        scores: for each model by name, the scores of each fold (one where there are no folds); kapsi's own is `kapsi`.
        rows: number of rows of the table that were used.
        scored_rows: number of rows that the scores are of.
        parameters: number of parameters of the saved model.
        notes: for the user.
    """

    path: Path
    task: str
    scores: dict[str, list[Scores]]
    rows: int
    scored_rows: int
    parameters: int
    notes: list[str]


def fit_table(
    path: str | Path,
    config: RunConfig,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    callbacks: Any = (),
    checkpoints: Checkpoints | None = None,
    logs: Sequence[LogName] = (),
    group: Group | None = None,
) -> FitReport:
    """Fit a model to a table and write the run folder.

    With `folds`, every row is predicted by the model of the fold that did not see it, and the saved model is fitted to all
    rows. Without, the model is fitted to one part of the rows and scored on the rest, and that model is saved. Scaling,
    penalty and number of epochs are found inside of each training part.

    Args:
        path: a CSV or Parquet file.
        config: what, and how.
        output: the run folder; by default `runs/` and the table's name, with a number where that is taken.
        overwrite: replace an old run.
        callbacks: as for `kapsi.fit`; their method `on_part`, if any, gets the name of each part of the rows before its fits.
        checkpoints: how often the run is written down, and whether it is to go on; the folder is beside that of the run, and
            deleted when the run is there.
        logs: further logs of the epochs in the run folder, beside its `metrics.jsonl`.
        group: the processes that train together; the first one writes.

    Raises:
        KapsiError: anything that does not fit; nothing is written then.
    """
    group = Group() if group is None else group
    table = read_table(path)
    choice = config.table
    problem = make_problem(table, choice.target, task=choice.task, strict=choice.strict, drop=choice.drop)
    count = len(problem.y)
    classes = problem.classes is not None
    if choice.folds is not None and choice.folds > (count if classes else count // 2):
        least = "one row" if classes else "two rows (R² needs them)"
        raise TableError(
            f"{problem.name}: {choice.folds} folds of {count} rows; each fold needs at least {least}, give fewer"
        )
    if count < 4:
        raise TableError(f"{problem.name}: {count} rows with a target are too few; at least 4 are needed")
    seed = config.training.seed
    if choice.folds is None:
        parts = [split(problem.y, choice.validation_fraction, classes=classes, seed=seed)]
    else:
        tests = folds(problem.y, choice.folds, classes=classes, seed=seed)
        parts = [(np.setdiff1d(np.arange(count), test), test) for test in tests]
    config = settle(problem, config)
    # Of several processes the first one looks: it may be making the folder while others look.
    free = str(free_path(Path("runs") / Path(path).stem)) if output is None and group.first else ""
    where = Path(group.broadcast(free)) if output is None else Path(output)

    def fits(name: str) -> Fits:
        part = None if checkpoints is None else checkpoints.part(name.replace(" ", "-"))
        for callback in callbacks if isinstance(callbacks, list | tuple) else (callbacks,):
            if hasattr(callback, "on_part"):
                callback.on_part(name)
        return Fits(callbacks, part, group)

    with contextlib.ExitStack() as stack:
        run = log = None
        if group.first:
            run = stack.enter_context(NewRun(where, overwrite=overwrite))
            stack.enter_context(plain(where, "write the run"))
            log = stack.enter_context(open(run.folder / "metrics.jsonl", "w", encoding="utf-8"))
        if checkpoints is not None:
            checkpoints = _beside(where, checkpoints, path, overwrite)
        scores: dict[str, list[Scores]] = {}
        held = np.zeros((count, len(problem.classes) if problem.classes else 1))
        fold_of = np.full(count, -1)
        for number, (train, test) in enumerate(parts, 1):
            name = f"fold {number} of {len(parts)}" if choice.folds else "training part"
            fitted = fit_rows(problem, train, config, fits(name))
            outputs = fitted.model.outputs(problem.features, test)
            own = (classification_scores if classes else regression_scores)(outputs, problem.y[test])
            for model, found in {"kapsi": own, **baselines(problem, train, test)}.items():
                scores.setdefault(model, []).append(found)
            held[test], fold_of[test] = outputs.reshape(len(test), -1), number
            if log is not None:
                log_part(log, name, fitted, {model: found[-1] for model, found in scores.items()}, problem.task)
        if choice.folds:
            fitted = fit_rows(problem, np.arange(count), config, fits("all rows"))
            if log is not None:
                log_part(log, "all rows", fitted, None, problem.task)
        scored = np.flatnonzero(fold_of >= 0)
        if run is not None:
            log_epochs(run.folder, logs, fitted.epochs)
            write_run(run, problem, config, fitted, scores, held, fold_of, scored)
    if checkpoints is not None and group.first:
        checkpoints.remove()
    group.barrier()
    parameters = sum(p.numel() for p in fitted.model.model.parameters())
    return FitReport(where, problem.task, scores, count, len(scored), parameters, list(problem.notes))


def _beside(where: Path, checkpoints: Checkpoints, table: str | Path, overwrite: bool) -> Checkpoints:
    """Return the checkpoints of a run in a folder beside it.

    Raises:
        RunError: there are some of an earlier run, which neither goes on nor is to be replaced.
    """
    target = resolve(where)
    folder = target.with_name(f"{target.name}.checkpoints")
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise RunError(f"{show(folder)}: is in the way of the checkpoints; move or delete it, or give another --output")
    earlier = replace(checkpoints, folder=folder)
    if not checkpoints.resume and earlier.found():
        if not overwrite:
            raise RunError(
                f"{show(folder)}: are checkpoints of a run that was interrupted; give --resume to go on with it, or --overwrite to "
                "begin anew"
            )
        earlier.remove()
    with open(table, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return replace(checkpoints, folder=folder, context={"the table": digest}, least=LEAST_WORK)
