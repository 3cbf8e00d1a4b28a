"""Fitting a table: from a file to a run folder with a model, its scores and its predictions; and back from the folder.

The command line is a thin user of this module: `fit_table`, `load_run`, `TableModel.predict`, `TableModel.scores`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from kapsi.data.tabular import (
    Label,
    Preprocessing,
    Problem,
    Table,
    TargetScale,
    folds,
    make_problem,
    read_table,
    split,
    target_of,
    write_table,
)
from kapsi.errors import KapsiError, RunError, SpecError, TableError
from kapsi.expansion import Taylor
from kapsi.files import append_line, plain, resolve, show, write_json
from kapsi.function import Spec, option, to_dict
from kapsi.model_file import load, save
from kapsi.modules import Model, calibrate
from kapsi.reconciliation import Kronecker
from kapsi.remainder import LinearRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig
from kapsi.training.distributed import Group
from kapsi.training.engine import MINI_BATCH, Watch
from kapsi.training.logs import CsvLog, Log, LogName, TensorBoard
from kapsi.training.prediction import predict
from kapsi.training.records import Epoch
from kapsi.training.run_folder import NewRun, free_path, open_run
from kapsi.training.selection import Choice, Fits, Split, fit_selected, near_zero, solver_for
from kapsi.version import __version__

__all__ = ["FitReport", "RunConfig", "Scores", "TableConfig", "TableModel", "default_spec", "fit_table", "load_run"]

Floats = npt.NDArray[np.float64]

LEAST_WORK = 10.0
"""Seconds after which an interrupted run leaves checkpoints: what takes less is done again as fast."""

LARGEST_FLOAT64 = float(np.finfo(np.float64).max)

WIDE = 100
"""Inputs up to which the default model has every product of two of them: 5,150 columns."""


@dataclass(frozen=True)
class TableConfig(Spec):
    """What is fitted in a table.

    Args:
        target: the name of the column to learn.
        task: `classification`, `regression`, or `auto`: text, booleans and at most 20 different integers are classes.
        folds: number of folds of the cross-validation, None for a single validation part.
        strict: refuse rows without a target instead of dropping them.
        drop: names of columns to leave out.
    """

    target: str
    task: Literal["auto", "classification", "regression"] = "auto"
    folds: int | None = option(None, minimum=2)
    strict: bool = False
    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunConfig(Spec):
    """A run: the model (None for the default of the table), its training, and what is fitted.

    Args:
        table: what is fitted.
        model: the specification; widths at the ends may be None.
        training: how the model is trained.
    """

    table: TableConfig
    model: ModelSpec | None = None
    training: TrainConfig = TrainConfig()


def default_spec(in_features: int) -> ModelSpec:
    """Return the model of a table for which none is given: one quadratic layer beside a linear one.

    Up to 100 inputs every product of two has a weight of its own (symmetric Taylor expansion, dense ψ). Above that, products
    are those of a few pairs of linear forms (Kronecker ψ in eight channels), with a number of parameters linear in the inputs.
    The linear part is the remainder: it is held down far less, so the model falls back to it where products do not help.
    """
    remainder = LinearRemainder()
    if in_features <= WIDE:
        head = HeadSpec(Taylor(2, symmetric=True), remainder=remainder, bias=True)
    else:
        head = HeadSpec(Taylor(2), Kronecker(), remainder, bias=True, channels=8)
    return ModelSpec((None, None), (LayerSpec((head,)),))


# ------------------------------------------------------------------------------------------------ scores


class Scores(NamedTuple):
    """Scores of one part of the rows: accuracy and log loss, or R² and root mean square error."""

    main: float
    loss: float


METRICS = {"classification": ("accuracy", "log loss"), "regression": ("r2", "rmse")}


def classification_scores(probabilities: Floats, codes: npt.NDArray[Any]) -> Scores:
    """Return accuracy and mean −log p of the true class, from probabilities `(rows, classes)`."""
    chosen = probabilities[np.arange(len(codes)), codes]
    # The smallest normal float64: a class that was thought impossible costs 708, not infinity.
    return Scores(float((probabilities.argmax(1) == codes).mean()), float(-np.log(np.maximum(chosen, 2.3e-308)).mean()))


def regression_scores(predicted: Floats, y: npt.NDArray[Any]) -> Scores:
    """Return R² and root mean square error; R² of a constant target is 1 for exact predictions, else 0."""
    residual, exponent = _distance(y, predicted)
    with np.errstate(over="ignore"):
        rmse = min(float(np.ldexp(residual, exponent)), LARGEST_FLOAT64)
        if y.min() == y.max():  # its mean may be off by the last digit
            return Scores(float(residual == 0), rmse)
        total, total_exponent = _distance(y, np.full(len(y), (y / len(y)).sum()))
        share = np.square(np.ldexp(residual / total, exponent - total_exponent))
    return Scores(max(1 - float(share), -LARGEST_FLOAT64), rmse)


def _distance(a: Floats, b: Floats) -> tuple[float, int]:
    """Return the root mean square difference as a number and an exponent of two: squares of huge and tiny values are lost."""
    exponent = math.frexp(max(float(np.abs(a).max()), float(np.abs(b).max())))[1]
    return math.sqrt(float(np.square(np.ldexp(a, -exponent) - np.ldexp(b, -exponent)).mean())), exponent


# ------------------------------------------------------------------------------------------------ a fitted table


@dataclass(frozen=True, eq=False)
class TableModel:
    """A model with what is around it: raw columns in, labels or numbers out.

    Args:
        model: from standardized inputs to logits, or to a standardized number.
        preprocessing: from columns to inputs.
        target: the target's name.
        task: `classification` or `regression`.
        classes: the original labels; None in regression.
        scale: of the target; None in classification.
    """

    model: Model
    preprocessing: Preprocessing
    target: str
    task: str
    classes: tuple[Label, ...] | None
    scale: TargetScale | None

    def outputs(self, features: Table, rows: npt.NDArray[Any] | None = None) -> Floats:
        """Return probabilities `(rows, classes)`, or numbers `(rows,)` in the target's unit."""
        dtype = next((p.dtype for p in self.model.parameters()), torch.float64)
        x = torch.from_numpy(self.preprocessing.transform(features, rows)).to(dtype)
        y = predict(self.model, x).double()
        finite = torch.isfinite(y).all(-1)
        if not bool(finite.all()):
            place = int((~finite).nonzero()[0, 0])
            row = f"row {place + 1}" if rows is None else f"row {rows[place] + 1} of those with a target"
            raise TableError(
                f"{features.name}: the prediction for {row} is not a finite number; mend values in it that are far from "
                "those that the model was fitted to, or lower the degree of the model"
            )
        if self.scale is None:
            return y.softmax(-1).numpy()
        return self.scale.invert(y.squeeze(-1).numpy())

    def predict(self, table: Table) -> tuple[dict[str, list[Any]], list[str]]:
        """Return columns of predictions for all rows of a table, and notes for the user.

        Raises:
            TableError: columns are missing or of another type than those the model was fitted to.
        """
        features, notes = self.preprocessing.check(table)
        return self.columns(self.outputs(features)), [note for note in notes if note]

    def columns(self, outputs: Floats) -> dict[str, list[Any]]:
        """Return outputs as columns: `prediction`, and `probability_LABEL` for each class."""
        if self.classes is None:
            return {"prediction": outputs.tolist()}
        columns: dict[str, list[Any]] = {"prediction": [self.classes[code] for code in outputs.argmax(1)]}
        for code, label in enumerate(self.classes):
            columns[f"probability_{label}"] = outputs[:, code].tolist()
        return columns

    def scores(self, table: Table) -> tuple[Scores, int, list[str]]:
        """Return the scores on a table that has the target, the number of rows they are of, and notes for the user."""
        y = target_of(table, self.target, self.task, self.classes)
        known = y >= 0 if self.task == "classification" else ~np.isnan(y)
        if not known.any():
            raise TableError(
                f"{table.name}: the target {self.target!r} is missing in every row; there is nothing to score"
            )
        rest = Table(table.name, {name: c for name, c in table.columns.items() if name != self.target})
        features, notes = self.preprocessing.check(rest)
        if not known.all():
            notes.append(f"left out {int((~known).sum())} of {len(y)} rows, whose target {self.target!r} is missing")
        rows = np.flatnonzero(known)
        outputs = self.outputs(features, rows)
        if self.task == "classification":
            return classification_scores(outputs, y[rows]), len(rows), notes
        return regression_scores(outputs, y[rows].astype(np.float64)), len(rows), notes

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the model as plain data."""
        return {
            "target": self.target,
            "task": self.task,
            "classes": None if self.classes is None else list(self.classes),
            "scale": None if self.scale is None else self.scale.to_dict(),
            "inputs": self.preprocessing.to_dict(),
        }


# ------------------------------------------------------------------------------------------------ fitting

Progress = Callable[[str, Epoch], None]
"""Called after each epoch with the name of the part that is fitted."""


class Fitted(NamedTuple):
    """A model fitted to some rows, and how that went."""

    model: TableModel
    epochs: list[Epoch]
    choices: list[Choice]


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
    dtype = torch.float32 if config.training.solver in MINI_BATCH else torch.float64
    x = x.to(dtype)
    y = y if scale is None else y.to(dtype)

    def make(part: torch.Tensor | slice) -> Model:
        # Class by class where there are classes, and never with a row that the choice of a penalty is to look at.
        labels = y[part] if scale is None else None
        return near_zero(calibrate(Model(spec, seed=seed, dtype=dtype), x[part], labels))

    def splits(count: int) -> Sequence[Split]:
        # Where each class has a single row, there is nothing to spread.
        classes = scale is None and len(np.unique(problem.y[rows])) < len(rows)
        if count > 1 and len(rows) >= 2 * count:
            held = folds(problem.y[rows], count, classes=classes, seed=seed)
            pairs = [(np.setdiff1d(np.arange(len(rows)), part), part) for part in held]
        else:
            pairs = [split(problem.y[rows], config.training.stopping, classes=classes, seed=seed)]
        return [(torch.from_numpy(kept), torch.from_numpy(part)) for kept, part in pairs]

    model, epochs, choices = fit_selected(make, (x, y), config.training, splits=splits, fits=fits)
    fitted = TableModel(model.requires_grad_(True), preprocessing, problem.target, problem.task, problem.classes, scale)
    return Fitted(fitted, epochs, choices)


def baselines(problem: Problem, train: npt.NDArray[np.int64], test: npt.NDArray[np.int64]) -> dict[str, Scores]:
    """Return the scores of a trivial and of a linear model on the same rows and inputs.

    The trivial model says the shares of the classes, or the mean; the linear one is scikit-learn's logistic or ridge
    regression with its default penalty.
    """
    from sklearn.linear_model import LogisticRegression, Ridge
    from threadpoolctl import threadpool_limits

    preprocessing = Preprocessing.fit(problem.features, train)
    x, x_test = preprocessing.transform(problem.features, train), preprocessing.transform(problem.features, test)
    y, y_test = problem.y[train], problem.y[test]
    if problem.classes is None:
        scale = TargetScale.fit(y.astype(np.float64))
        with threadpool_limits(1):
            linear = scale.invert(Ridge().fit(x, scale.apply(y)).predict(x_test))
        constant = np.full(len(test), scale.center)
        return {"mean": regression_scores(constant, y_test), "ridge regression": regression_scores(linear, y_test)}
    shares = np.bincount(y, minlength=len(problem.classes)) / len(y)
    prior = np.tile(shares, (len(test), 1))
    probabilities = prior.copy()
    if len(np.unique(y)) > 1:
        with warnings.catch_warnings(), threadpool_limits(1):
            warnings.simplefilter("ignore")  # of convergence, and of many classes
            logistic = LogisticRegression(max_iter=1000).fit(x, y)
        probabilities[:] = 0
        probabilities[:, logistic.classes_] = logistic.predict_proba(x_test)
    return {
        "most frequent class": classification_scores(prior, y_test),
        "logistic regression": classification_scores(probabilities, y_test),
    }


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
    progress: Progress | None = None,
    watch: Watch | None = None,
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
        progress: called after each epoch.
        watch: called after each step.
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
        parts = [split(problem.y, config.training.validation, classes=classes, seed=seed)]
    else:
        tests = folds(problem.y, choice.folds, classes=classes, seed=seed)
        parts = [(np.setdiff1d(np.arange(count), test), test) for test in tests]
    config = settle(problem, config)
    # Of several processes the first one looks: it may be making the folder while others look.
    free = str(free_path(Path("runs") / Path(path).stem)) if output is None and group.first else ""
    where = Path(group.broadcast(free)) if output is None else Path(output)

    def fits(name: str) -> Fits:
        part = None if checkpoints is None else checkpoints.part(name.replace(" ", "-"))
        return Fits(None if progress is None else _named(progress, name), watch, part, group)

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
                _log(log, name, fitted, {model: found[-1] for model, found in scores.items()}, problem.task)
        if choice.folds:
            fitted = fit_rows(problem, np.arange(count), config, fits("all rows"))
            if log is not None:
                _log(log, "all rows", fitted, None, problem.task)
        scored = np.flatnonzero(fold_of >= 0)
        if run is not None:
            _log_epochs(run.folder, logs, fitted.epochs)
            _write(run, problem, config, fitted, scores, held, fold_of, scored)
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


def _named(progress: Progress, name: str) -> Callable[[Epoch], None]:
    return lambda epoch: progress(name, epoch)


def settle(problem: Problem, config: RunConfig) -> RunConfig:
    """Return the configuration with what follows from the whole table, so that all parts of it are fitted alike.

    Widths at the ends that are None stay so: a part of the rows may have fewer categories.

    Raises:
        SpecError: a specification or a loss that does not fit the table.
    """
    width, outputs = len(Preprocessing.fit(problem.features).names()), len(problem.classes or (0,))
    model, training = config.model or default_spec(width), config.training
    allowed = ("mse", "huber") if problem.classes is None else ("cross_entropy",)
    if training.loss not in ("auto", *allowed):
        known = " or ".join(("auto", *allowed))
        raise SpecError(f"training.loss: {training.loss} does not go with {problem.task}; take {known}")
    loss = cast(Literal["mse", "huber", "cross_entropy"], allowed[0] if training.loss == "auto" else training.loss)
    sized = Model(model.sized(width, outputs), device="meta")
    solver = solver_for(sized, len(problem.y)) if training.solver == "auto" else training.solver
    table = replace(config.table, task=cast(Literal["classification", "regression"], problem.task))
    return RunConfig(table, model, replace(training, loss=loss, solver=solver))


def _log(log: Any, part: str, fitted: Fitted, scores: dict[str, Scores] | None, task: str) -> None:
    for choice in fitted.choices:
        append_line(log, {"part": part, "event": "penalty", **_finite(choice._asdict())})
    for epoch in fitted.epochs:
        record = epoch._asdict()
        del record["seconds"]  # the same run writes the same file
        append_line(log, {"part": part, "event": "epoch", **_finite(record)})
    for model, found in (scores or {}).items():
        names = dict(zip(METRICS[task], found, strict=True))
        append_line(log, {"part": part, "event": "scores", "model": model, **_finite(names)})


def _log_epochs(folder: Path, names: Sequence[LogName], epochs: Sequence[Epoch]) -> None:
    """Write the epochs of the saved model in further ways."""
    with contextlib.ExitStack() as stack:
        kinds: dict[str, Callable[[], Log]] = {
            "csv": lambda: CsvLog(folder / "epochs.csv"),
            "tensorboard": lambda: TensorBoard(folder),
        }
        logs = [stack.enter_context(kinds[name]()) for name in names]
        for number, epoch in enumerate(epochs, 1):
            for log in logs:
                log(epoch._replace(number=number))


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in which numbers that JSON does not have are null."""

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {k: _finite(v) if isinstance(v, dict) else known(v) for k, v in record.items()}


def summarize(found: Sequence[Scores]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return mean and standard deviation over the folds of both scores."""
    return tuple(_center_and_spread(np.array(values, dtype=np.float64)) for values in zip(*found, strict=True))  # type: ignore[return-value]


def _center_and_spread(values: Floats) -> tuple[float, float]:
    exponent = math.frexp(float(np.abs(values).max()))[1]  # sums of huge values overflow, and so do their squares
    scaled = np.ldexp(values, -exponent)
    with np.errstate(over="ignore"):
        center, spread = np.clip(np.ldexp([scaled.mean(), scaled.std()], exponent), -LARGEST_FLOAT64, LARGEST_FLOAT64)
    return float(center), float(spread)


def _write(
    run: NewRun,
    problem: Problem,
    config: RunConfig,
    fitted: Fitted,
    scores: dict[str, list[Scores]],
    held: Floats,
    fold_of: npt.NDArray[Any],
    scored: npt.NDArray[Any],
) -> None:
    from kapsi.spec import parse_yaml, to_yaml

    model = fitted.model
    save(model.model, run.folder / "model.safetensors")
    write_json(run.folder / "preprocessing.json", model.to_dict())
    text = to_yaml(to_dict(config), unicode=True)
    if parse_yaml(text, "config.yaml") != to_dict(config):  # a line break of Unicode in a name, which YAML folds
        text = to_yaml(to_dict(config))
    (run.folder / "config.yaml").write_text(text, encoding="utf-8")
    outputs = held[scored]
    labels = problem.classes
    truth = problem.y[scored]
    columns: dict[str, Any] = {"row": (problem.rows[scored] + 1).tolist()}
    if config.table.folds:
        columns["fold"] = fold_of[scored].tolist()
    columns["target"] = truth.tolist() if labels is None else [labels[code] for code in truth]
    columns |= model.columns(outputs[:, 0] if labels is None else outputs)
    write_table(run.folder / "predictions.csv", columns)
    first, second = METRICS[problem.task]
    run.manifest = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "table": problem.name.encode(errors="replace").decode(),  # a file name need not be text
        "rows": len(problem.y),
        "scored_rows": len(scored),
        "folds": config.table.folds,
        "seed": config.training.seed,
        "scores": {
            name: _finite({first: m[0], f"{first} std": m[1], second: loss[0], f"{second} std": loss[1]})
            for name, found in scores.items()
            for m, loss in [summarize(found)]
        },
        "notes": list(problem.notes),
        "versions": {
            "kapsi": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn", "safetensors", "pyarrow")},
        },
    }


# ------------------------------------------------------------------------------------------------ reading a run


def load_run(path: str | Path) -> tuple[TableModel, dict[str, Any]]:
    """Return the fitted model of a run folder and what its `run.json` says.

    Raises:
        RunError: not a run folder, damaged, or of a newer version.
    """
    manifest = open_run(path)
    folder = Path(path)
    for name in ("model.safetensors", "preprocessing.json", "config.yaml"):
        if name not in manifest["files"]:
            raise RunError(f"{path}: damaged run: the file {name!r} is missing; restore it from a copy, or fit again")
    try:
        model = load(folder / "model.safetensors")
        data = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
        preprocessing = Preprocessing.from_dict(data["inputs"])
        classes = None if data["classes"] is None else _classes(data["classes"])
        scale = None if data["scale"] is None else TargetScale.from_dict(data["scale"])
        fitted = TableModel(model, preprocessing, data["target"], data["task"], classes, scale)
        config = load_config(path)
        wanted = (len(preprocessing.names()), 1 if classes is None else len(classes))
        spec = None if config.model is None else config.model.sized(*wanted)
    except (KapsiError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__} {error}" if not isinstance(error, KapsiError) else error
        raise RunError(f"{path}: damaged run: {reason}") from None
    if (
        data != fitted.to_dict()
        or spec != model.spec
        or (config.table.target, config.table.task) != (fitted.target, fitted.task)
        or fitted.task != ("regression" if classes is None else "classification")
        or (scale is None) != (classes is not None)
        or fitted.target in [column.name for column in preprocessing.columns]
    ):
        raise RunError(f"{path}: damaged run: its model, preprocessing.json and config.yaml do not belong together")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values()):
        raise RunError(f"{path}: damaged run: the model has weights that are not finite numbers")
    return fitted, manifest


def _classes(labels: Any) -> tuple[Label, ...]:
    """Return the labels of a damaged or whole preprocessing.json, or refuse them."""
    kinds = {type(label) for label in labels} if isinstance(labels, list) else set()
    if len(kinds) != 1 or not kinds <= {str, int, bool} or len(set(labels)) < len(labels) or len(labels) < 2:
        raise TableError("preprocessing.json: classes must be two or more different texts, integers or booleans")
    return tuple(labels)


def load_config(path: str | Path) -> RunConfig:
    """Return the configuration of a run folder."""
    from kapsi.spec import parse_yaml, read_text

    file = Path(path) / "config.yaml"
    config: RunConfig = from_dict(parse_yaml(read_text(file, "configuration"), str(file)), RunConfig, str(file))
    return config


def default_for(path: str | Path, config: TableConfig) -> ModelSpec:
    """Return the model that a table gets where none is given."""
    problem = make_problem(read_table(path), config.target, task=config.task, strict=config.strict, drop=config.drop)
    return default_spec(len(Preprocessing.fit(problem.features).names()))
