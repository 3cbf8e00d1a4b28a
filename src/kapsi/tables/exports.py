"""Write models of tables for other programs: ONNX files, programs of torch.export, folders for the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from kapsi.errors import FileError, RunError, SpecError, unknown
from kapsi.export import model_card, model_config, onnx_bytes, torch_bytes
from kapsi.files import atomic, check_place, plain, resolve, show, write_json
from kapsi.model_file import save
from kapsi.spec import parse_yaml, to_dict, to_yaml
from kapsi.tables.configuration import RunConfig, TableConfig
from kapsi.tables.intervals import FILES
from kapsi.tables.model import TableModel
from kapsi.training.run_folder import NewRun

__all__ = ["FORMATS", "export_model", "pretrained_folder", "write_model"]

MOST_INDENTED = 1_000
"""Most columns of a preprocessing.json for human readers."""

PRETRAINED = ("run.json", "config.yaml", "preprocessing.json", "model.safetensors", "estimator.json", *FILES)
"""Files of a folder that make its model; nothing else is downloaded."""


def export_model(
    model: TableModel,
    manifest: Mapping[str, Any],
    path: str | Path,
    format: str,
    *,
    overwrite: bool = False,
    estimator: Mapping[str, Any] | None = None,
) -> None:
    """Write a model of a table in another format: complete, or not at all.

    Args:
        model: the model with preprocessing.
        manifest: scores, leaderboard and notes, as in `run.json`.
        path: the file, or for `huggingface` the folder.
        format: `onnx`, `torch` or `huggingface`.
        overwrite: replace an old file, or an old run folder.
        estimator: further facts of an estimator.

    Raises:
        SpecError: an unknown format, a model without a form in the format, or a missing extra.
        FileError: the path cannot be written, or exists.
    """
    if format not in FORMATS:
        raise SpecError(unknown("export format", format, FORMATS))
    if model.classes is not None and not all(isinstance(label, str | int) for label in model.classes):
        raise SpecError(f"export: labels must be strings, integers or booleans, got {model.classes[0]!r}")
    FORMATS[format](model, manifest, path, overwrite, estimator)


Writer: TypeAlias = Callable[[TableModel, Mapping[str, Any], str | Path, bool, Mapping[str, Any] | None], None]


def writes(content: Callable[[TableModel], bytes]) -> Writer:
    """Return a writer of a single file."""

    def write(
        model: TableModel, manifest: Mapping[str, Any], path: str | Path, overwrite: bool, estimator: Any
    ) -> None:
        where = show(path)
        if not str(path).strip() or os.path.isdir(path):
            raise FileError(f"{where}: is {'a folder' if str(path).strip() else 'empty'}; give the name of a file")
        if os.path.lexists(path) and not overwrite:
            raise FileError(f"{where}: exists already; give another --output, or --overwrite")
        check_place(path, "export", "give another --output")
        data = content(model)
        with atomic(path) as temporary, plain(path, "write the file"):
            temporary.write_bytes(data)

    return write


def write_model(folder: Path, model: TableModel, config: RunConfig) -> None:
    """Write model.safetensors, preprocessing.json and config.yaml, the files that make the model of a run, and its intervals."""
    save(model.model, folder / "model.safetensors")
    many = len(model.preprocessing.columns) > MOST_INDENTED or bool(model.preprocessing.texts)
    write_json(folder / "preprocessing.json", model.to_dict(), indent=None if many else 2)
    if model.intervals is not None:
        model.intervals.write(folder)
    text = to_yaml(to_dict(config), unicode=True)
    if parse_yaml(text, "config.yaml") != to_dict(config):  # YAML folds Unicode line breaks in names
        text = to_yaml(to_dict(config))
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def _pretrained(
    model: TableModel,
    manifest: Mapping[str, Any],
    path: str | Path,
    overwrite: bool,
    estimator: Mapping[str, Any] | None,
) -> None:
    """Write a run folder with a model card and config.json, which may be edited: the checksums leave both out."""
    task: Any = model.task
    config = model.config
    if config is None:
        config = RunConfig(TableConfig(model.target, task, reading=model.reading), model.model.spec)
    with NewRun(path, overwrite=overwrite) as run:
        with plain(path, "write the folder"):
            write_model(run.folder, model, config)
            if estimator is not None:
                write_json(run.folder / "estimator.json", estimator)
        run.manifest = dict(manifest)
        card = model_card(model, manifest, resolve(path).name)

        def add(digest: str) -> None:
            (run.folder / "README.md").write_text(card, encoding="utf-8")
            write_json(run.folder / "config.json", model_config(model))

        run.on_sealed = add


FORMATS: dict[str, Writer] = {
    "onnx": writes(onnx_bytes),
    "torch": writes(torch_bytes),
    "huggingface": _pretrained,
}
"""The formats of `export_model`."""


def pretrained_folder(folder: str | Path, *, download: bool = False, revision: str | None = None) -> Path:
    """Return a local folder, or download a model from the Hugging Face Hub, without other files than those of kapsi.

    Args:
        folder: a local folder, or with `download` the name of a model on the Hub, such as `USER/NAME`.
        download: download from the Hub.
        revision: a branch, tag or commit on the Hub.

    Raises:
        RunError: no such folder, or the download fails.
        SpecError: without the extra `hub`.
    """
    if not download:
        if not os.path.isdir(folder):
            hint = "to load a model from the Hugging Face Hub, give its name and download=True"
            raise RunError(f"{show(folder)}: there is no such folder; {hint}")
        return Path(folder)
    try:
        import huggingface_hub
    except ImportError:
        raise SpecError("from_pretrained(download=True): needs huggingface_hub: pip install 'kapsi[hub]'") from None
    try:
        patterns = list(PRETRAINED)
        return Path(huggingface_hub.snapshot_download(str(folder), revision=revision, allow_patterns=patterns))
    except Exception as error:  # of the network, the Hub, and the name: many types
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{show(folder)}: cannot be downloaded from the Hub: {type(error).__name__}: {reason}") from None
