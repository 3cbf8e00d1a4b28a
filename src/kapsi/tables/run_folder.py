"""Write and read run folders of tables."""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt
import torch

from kapsi.data.tabular import Label, Preprocessing, Table, TableProblem, TargetScale, write_table
from kapsi.data.tabular.types import label_text
from kapsi.errors import KapsiError, RunError, TableError, UnknownFunction, shown
from kapsi.files import append_line, finite
from kapsi.html import data_table, joined, tag
from kapsi.migrate import migrate_run
from kapsi.model_file import load_bytes
from kapsi.spec import from_dict, parse_yaml, read_text
from kapsi.tables.configuration import RunConfig
from kapsi.tables.exports import export_model, pretrained_folder, write_model
from kapsi.tables.intervals import FILES, Decisions, Intervals, bounds_of_rows, decided, known_intervals
from kapsi.tables.kept_rows import FILE as KEPT
from kapsi.tables.kept_rows import KeptRows
from kapsi.tables.model import FittedPart, TableModel
from kapsi.tables.ranges import Ranges
from kapsi.tables.scores import METRICS, Floats, MoreScores, Scores, summarize
from kapsi.training.logs import CsvLog, Log, LogName, TensorBoard
from kapsi.training.records import Epoch
from kapsi.training.run_folder import FORMAT_VERSION, NewRun, read_run
from kapsi.version import __version__

__all__ = ["LoadedRun", "complete_run", "load_config", "load_run"]


def log_part(log: TextIO, part: str, fitted: FittedPart, scores: dict[str, Scores], task: str) -> None:
    """Append penalties, epochs and scores of a part to `metrics.jsonl`."""
    for choice in fitted.choices:
        append_line(log, {"part": part, "event": "penalty", **finite(choice._asdict())})
    for row in fitted.leaderboard:
        entry = row._asdict()
        del entry["seconds"]
        append_line(log, {"part": part, "event": "head", **finite(entry)})
    for epoch in fitted.epochs:
        record = epoch._asdict()
        del record["seconds"]  # repeated runs write identical files
        append_line(log, {"part": part, "event": "epoch", **finite(record)})
    for model, score in scores.items():
        names = dict(zip(METRICS[task], score, strict=True))
        append_line(log, {"part": part, "event": "scores", "model": model, **finite(names)})


def log_epochs(folder: Path, names: Sequence[LogName], epochs: Sequence[Epoch]) -> None:
    """Write the epochs of the saved model to further logs."""
    kinds: dict[str, Callable[[], Log]] = {
        "csv": lambda: CsvLog(folder / "epochs.csv"),
        "tensorboard": lambda: TensorBoard(folder),
    }
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(kinds[name]()) for name in names]
        for number, epoch in enumerate(epochs, 1):
            for log in logs:
                log(epoch._replace(number=number))


def write_run(
    run: NewRun,
    problem: TableProblem,
    config: RunConfig,
    fitted: FittedPart,
    scores: dict[str, list[Scores]],
    outputs: Floats,
    fold_of: npt.NDArray[Any],
    metrics: MoreScores,
) -> None:
    """Write model, preprocessing, configuration, predictions and manifest.

    Args:
        run: new run folder.
        problem: features and target.
        config: resolved configuration.
        fitted: saved model.
        scores: scores of each part by name of the model.
        outputs: outputs for the test rows, (rows, classes) or (rows, 1).
        fold_of: number of the fold of each row, -1 without prediction.
        metrics: further scores.
    """
    model = fitted.model
    write_model(run.folder, model, config)
    rows, labels = np.flatnonzero(fold_of >= 0), problem.classes
    columns: dict[str, Any] = {"row": problem.rows[rows] + 1}
    if config.table.folds:
        columns["fold"] = fold_of[rows]
    if isinstance(problem.target, tuple):
        columns |= {f"target_{name}": problem.y[rows, i] for i, name in enumerate(problem.target)}
    else:
        columns["target"] = problem.y[rows] if labels is None else [labels[code] for code in problem.y[rows]]
    columns |= model.columns(outputs[rows, 0] if labels is None and problem.y.ndim == 1 else outputs[rows])
    write_table(run.folder / "predictions.csv", columns)
    run.manifest = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "table": problem.name.encode(errors="replace").decode(),  # a file name may not be valid Unicode
        "table_sha256": problem.digest,
        "target": problem.target,
        "task": problem.task,
        "parameters": model.parameter_count,
        "rows": len(problem.y),
        "scored_rows": len(rows),
        "folds": config.table.folds,
        "seed": config.training.seed,
        "scores": {name: _summary(part, problem.task, metrics.get(name, {})) for name, part in scores.items()},
        "notes": [*problem.notes, *fitted.notes],
        **({"leaderboard": [finite(row._asdict()) for row in fitted.leaderboard]} if fitted.leaderboard else {}),
        "versions": {
            "kapsi": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn", "safetensors", "pyarrow")},
        },
    }


def _summary(scores: list[Scores], task: str, more: dict[str, list[float]]) -> Any:
    (main, main_std), (loss, loss_std) = summarize(scores)
    first, second = METRICS[task]
    known = {first: main, f"{first} std": main_std, second: loss, f"{second} std": loss_std}
    for name, values in more.items():
        known |= {name: float(np.mean(values)), f"{name} std": float(np.std(values))}
    return finite(known)


# ------------------------------------------------------------------------------------------------ reading

PARTS = ("model.safetensors", "preprocessing.json", "config.yaml")
"""Files of a run that make its model."""


class LoadedRun(NamedTuple):
    """The model of a run folder and the facts of its fit.

    Attributes:
        model: the fitted model with its preprocessing.
        manifest: the content of `run.json`: scores, versions, number of rows.
    """

    model: TableModel
    manifest: dict[str, Any]

    @property
    def rows(self) -> KeptRows | None:
        """At most 1,010 rows of the table of the fit, the background of `kapsi.interpret`; None for runs without.

        Raises:
            RunError: the file is damaged.
        """
        return KeptRows.read(self.model.kept, self.model) if self.model.kept else None

    def _repr_html_(self) -> str:
        """Return the scores beside those of the baselines for notebooks."""
        facts = self.manifest
        scores = {name: part for name, part in facts.get("scores", {}).items() if isinstance(part, dict)}
        names = [name for name in scores.get("kapsi", {}) if not name.endswith(" std")]
        rows = [
            (model, *("–" if part.get(name) is None else f"{part[name]:.4g}" for name in names))
            for model, part in scores.items()
        ]
        title = (
            f"{', '.join(self.model.targets)} from {facts.get('table')}: {self.model.task}, {facts.get('rows')} rows"
        )
        return joined(
            [
                tag("p", tag("strong", title)),
                data_table(("", *names), rows, right=range(1, len(names) + 1)),
                tag("p", "kapsi report writes a page with effects and errors; kp.interpret has them in Python."),
            ]
        )

    def predict(self, frame: Any) -> npt.NDArray[Any]:
        """Return the predictions for the rows of a frame, (rows,): labels, or real values in the unit of the target.

        Args:
            frame: a data frame of pandas, polars or pyarrow, or a mapping of names to arrays, with the columns of the table of
                the fit; further columns are ignored, None and NaN are missing.

        Raises:
            TableError: columns are missing or have another type than in training.
        """
        outputs = self.model.outputs(self._features(frame, "predict"))
        return outputs if self.model.classes is None else np.array(self.model.classes)[outputs.argmax(1)]

    def predict_proba(self, frame: Any) -> npt.NDArray[np.float64]:
        """Return the probability of each class for the rows of a frame, (rows, classes), in the order of `model.classes`.

        Raises:
            TableError: as `predict`, or a regression.
        """
        return self._probabilities(frame, "predict_proba", "predict")

    def _probabilities(self, frame: Any, where: str, instead: str) -> npt.NDArray[np.float64]:
        if self.model.classes is None:
            raise TableError(f"{where}: the run is a regression and has no classes; use {instead}")
        return self.model.outputs(self._features(frame, where))

    def export(self, path: str | Path, format: str = "onnx", *, overwrite: bool = False) -> None:
        """Write the run for other programs: predictions without kapsi, or a folder for the Hugging Face Hub.

        Args:
            path: the file, or for `huggingface` the folder.
            format: `onnx` (an ONNX file), `torch` (a program of `torch.export`, .pt2) or `huggingface`.
            overwrite: replace an old file, or an old run folder.

        Raises:
            SpecError: an unknown format, a model without a form in the format, or a missing extra.
            FileError: the path cannot be written, or exists.
        """
        export_model(self.model, self.manifest, path, format, overwrite=overwrite)

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder as the Hugging Face Hub expects it: weights, configuration and a model card; see `export`."""
        self.export(folder, "huggingface", overwrite=overwrite)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, download: bool = False, revision: str | None = None) -> LoadedRun:
        """Return the run of a folder of `save_pretrained`, or of a model on the Hugging Face Hub.

        Args:
            folder: the folder; with `download` the name of a model on the Hub, such as `USER/NAME`.
            download: download from the Hub, which needs huggingface_hub. Only files of kapsi are downloaded.
            revision: a branch, tag or commit on the Hub.

        Raises:
            RunError: no such folder, damaged, or the download fails.
        """
        return load_run(pretrained_folder(folder, download=download, revision=revision))

    def predict_interval(self, frame: Any, level: float = 0.9) -> npt.NDArray[np.float64]:
        """Return lower and upper bounds of the target, (rows, 2), or (rows, targets, 2) for several targets.

        Args:
            frame: see `predict`.
            level: share of new rows whose target is inside, above 0 and below 1.

        Raises:
            KapsiError: a classification, or too few held-out rows for the level.
        """
        features = self._features(frame, "predict_interval")
        x, groups = self.model.preprocessing.transform(features), known_intervals(self.model).groups(features)
        bounds = bounds_of_rows(self.model, x, self.model.outputs(features), level, groups)
        return bounds if isinstance(self.model.target, tuple) else bounds[:, 0]

    def predict_set(self, frame: Any, level: float = 0.9) -> npt.NDArray[np.bool_]:
        """Return which classes are in the set of each row, (rows, classes), in the order of `model.classes`.

        Args:
            frame: see `predict`.
            level: share of new rows whose class is in the set, above 0 and below 1.

        Raises:
            KapsiError: a regression, or too few held-out rows for the level.
        """
        probabilities = self._probabilities(frame, "predict_set", "predict_interval")
        known = known_intervals(self.model)
        groups = None if known.by is None else known.groups(self._features(frame, "predict_set"))
        inside: npt.NDArray[np.bool_] = known.conformal.sets(torch.from_numpy(probabilities), level, groups).numpy()
        return inside

    def decide(
        self, frame: Any, *, costs: Mapping[Any, float] | None = None, recall: tuple[Any, float] | None = None
    ) -> npt.NDArray[Any]:
        """Return the label of each row by costs, or for a share of the rows of a class to be found, `(rows,)`.

        Args:
            frame: see `predict`.
            costs: cost of missing a row of a class, by label, above 0; 1 for other labels. The label with the largest
                probability × cost is chosen.
            recall: a label and the share of its rows to be found, above 0 and below 1; the label is chosen if its probability
                reaches a threshold set on held-out rows.

        Raises:
            KapsiError: a regression, an unknown label, or too few held-out rows for the share.
        """
        probabilities, classes = self._probabilities(frame, "decide", "predict"), self.model.classes or ()
        decisions = Decisions.of(costs, recall)
        codes = decided(list(map(label_text, classes)), probabilities, decisions, lambda: known_intervals(self.model))
        labels: npt.NDArray[Any] = np.array(classes)[codes]
        return labels

    def _features(self, frame: Any, where: str) -> Table:
        preprocessing = self.model.preprocessing
        return preprocessing.check(preprocessing.table_of(frame, where, self.model.reading))[0]


def load_run(path: str | Path) -> LoadedRun:
    """Return the fitted model and the manifest (`run.json`) of a run folder.

    Safe for untrusted folders, as `kapsi.load`; each file is opened once, so that no two runs are mixed.

    Raises:
        RunError: the folder is not a run, is damaged, or was written by a newer version.

    Example:
        >>> import tempfile, kapsi as kp
        >>> from kapsi.data.tabular import write_table
        >>> from kapsi.tables import RunConfig, TableConfig, fit_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_table(f"{folder}/t.csv", {"x": [0, 1, 2, 3, 4, 5], "y": [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]})
        ...     _ = fit_table(f"{folder}/t.csv", RunConfig(TableConfig("y")), f"{folder}/run")
        ...     run = kp.load_run(f"{folder}/run")
        >>> run.predict({"x": [1.5, 2.5]}).round(1)
        array([4., 6.])
    """
    manifest, contents = read_run(path, (*PARTS, *FILES, KEPT))
    for name in PARTS:
        if name not in contents:
            raise RunError(f"{path}: damaged run: the file {name!r} is missing; restore it from a copy, or fit again")
    try:
        model = load_bytes(contents["model.safetensors"], "model.safetensors")
        data = json.loads(contents["preprocessing.json"])
        preprocessing = Preprocessing.from_dict(data["inputs"])
        classes = None if data["classes"] is None else _classes(data["classes"])
        scale = None if data["scale"] is None else TargetScale.from_dict(data["scale"])
        target = tuple(data["target"]) if isinstance(data["target"], list) else data["target"]
        ranges = Ranges.from_dict(data["ranges"]) if "ranges" in data else None
        config = _config(contents["config.yaml"].decode(), "config.yaml", manifest["format_version"])
        reading = config.table.reading
        decimal = data["decimal"] if data.get("decimal") in (".", ",") else None
        fitted = TableModel(model, preprocessing, target, data["task"], classes, scale, ranges, reading, decimal)
        units = tuple(data.get("units", ()))
        if units and (len(units) != len(fitted.targets) or not all(isinstance(unit, str) for unit in units)):
            raise TableError(f"preprocessing.json: expected a unit for each target, got {shown(data['units'])}")
        names = [column.name for column in preprocessing.columns]
        intervals = Intervals.read(contents, 1 if classes else len(fitted.targets), names)
        fitted = replace(
            fitted,
            weight=config.table.weight,
            units=units,
            config=config,
            intervals=intervals,
            kept=contents.get(KEPT, b""),
        )
        sizes = (len(preprocessing.names()), len(classes or fitted.targets))
        spec = model.spec if config.model is None else config.model.sized(*sizes)
        ends = model.spec.widths[0], model.spec.widths[-1]
    except (KapsiError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__} {error}" if not isinstance(error, KapsiError) else error
        damaged = "" if isinstance(error, UnknownFunction) else "damaged run: "
        raise RunError(f"{path}: {damaged}{reason}") from None
    if (
        data != fitted.to_dict()
        or spec != model.spec
        or ends != sizes
        or (config.model is None) == (config.recipe is None)
        or (config.table.target, config.table.task) != (fitted.target, fitted.task)
        or fitted.task != ("regression" if classes is None else "classification")
        or (scale is None) != (classes is not None)
        or (ranges is not None and not ranges.inputs.keys() <= {column.name for column in preprocessing.columns})
        or (ranges is not None and ranges.target is not None and len(ranges.targets) != len(fitted.targets))
        or {*fitted.targets} & {column.name for column in preprocessing.columns}
    ):
        raise RunError(f"{path}: damaged run: its model, preprocessing.json and config.yaml do not belong together")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values()):
        raise RunError(f"{path}: damaged run: the model has weights that are not finite")
    return LoadedRun(fitted, manifest)


def _classes(labels: Any) -> tuple[Label, ...]:
    """Return the labels of preprocessing.json; reject damaged ones."""
    kinds = {type(label) for label in labels} if isinstance(labels, list) else set()
    if len(kinds) != 1 or not kinds <= {str, int, bool} or len(set(labels)) < len(labels) or len(labels) < 2:
        raise TableError("preprocessing.json: classes must be two or more different strings, integers or booleans")
    return tuple(labels)


def complete_run(path: str | Path, problem: TableProblem, config: RunConfig) -> dict[str, Any] | None:
    """Return the manifest of a run of the same table and configuration, None without one.

    Args:
        path: the run folder.
        problem: features and target.
        config: resolved configuration.
    """
    try:
        manifest, contents = read_run(path, PARTS)
        same = _config(contents["config.yaml"].decode(), "config.yaml", manifest["format_version"]) == config
        numbers = [manifest["rows"], manifest["scored_rows"], *manifest["scores"]["kapsi"].values()]
        same = same and all(type(number) in (int, float) for number in numbers)
    except (KapsiError, KeyError, ValueError, TypeError, AttributeError):
        return None
    return manifest if same and manifest.get("table_sha256") == problem.digest else None


def load_config(path: str | Path, version: int = FORMAT_VERSION) -> RunConfig:
    """Return the configuration of a run folder, written in a version of the format."""
    file = Path(path) / "config.yaml"
    return _config(read_text(file, "configuration"), str(file), version)


def _config(text: str, where: str, version: int) -> RunConfig:
    data = parse_yaml(text, where)
    config: RunConfig = from_dict(migrate_run(data) if version == 1 else data, RunConfig, where)
    return config
