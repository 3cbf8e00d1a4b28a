"""Write a run folder, and read it."""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from kapsi.data.tabular import (
    Label,
    Preprocessing,
    TargetScale,
    write_table,
)
from kapsi.data.tabular import (
    TableProblem as Problem,
)
from kapsi.errors import KapsiError, RunError, TableError
from kapsi.files import append_line, finite, write_json
from kapsi.model_file import load, save
from kapsi.spec import from_dict, to_dict
from kapsi.training.logs import CsvLog, Log, LogName, TensorBoard
from kapsi.training.records import Epoch
from kapsi.training.run_folder import NewRun, open_run
from kapsi.training.tables.configuration import RunConfig
from kapsi.training.tables.model import Fitted, TableModel
from kapsi.training.tables.scores import METRICS, Floats, Scores, summarize
from kapsi.version import __version__

__all__ = ["load_run"]


def log_part(log: Any, part: str, fitted: Fitted, scores: dict[str, Scores] | None, task: str) -> None:
    for choice in fitted.choices:
        append_line(log, {"part": part, "event": "penalty", **finite(choice._asdict())})
    for epoch in fitted.epochs:
        record = epoch._asdict()
        del record["seconds"]  # the same run writes the same file
        append_line(log, {"part": part, "event": "epoch", **finite(record)})
    for model, found in (scores or {}).items():
        names = dict(zip(METRICS[task], found, strict=True))
        append_line(log, {"part": part, "event": "scores", "model": model, **finite(names)})


def log_epochs(folder: Path, names: Sequence[LogName], epochs: Sequence[Epoch]) -> None:
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


def write_run(
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
            name: finite({first: m[0], f"{first} std": m[1], second: loss[0], f"{second} std": loss[1]})
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
