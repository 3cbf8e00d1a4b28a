"""Estimators for other programs and as folders: export, save_pretrained, from_pretrained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from kapsi.data.tabular.encoders import fields
from kapsi.errors import KapsiError, RunError, SpecError
from kapsi.estimators.options import spec_of
from kapsi.files import finite, show
from kapsi.spec import to_dict
from kapsi.tables.exports import export_model, pretrained_folder
from kapsi.tables.run_folder import load_run
from kapsi.training.run_folder import read_run
from kapsi.version import __version__

__all__ = ["ExportMixin"]

FACTS = "estimator.json"
"""File of a folder with the facts of an estimator that a run does not have."""
KINDS = {"class": str, "named": bool, "columns": int, "names": list, "shape": list, "options": dict}
LOCAL = ("device", "class_weight")
"""Options that are not written: of a machine, and with labels as keys."""


class ExportMixin:
    """Export of a fitted estimator, and folders that hold one."""

    def export(self, path: str | Path, format: str = "onnx", *, overwrite: bool = False) -> None:
        """Write the fitted estimator for other programs: predictions without kapsi, or a folder for the Hugging Face Hub.

        Args:
            path: the file, or for `huggingface` the folder.
            format: `onnx` (an ONNX file), `torch` (a program of `torch.export`, .pt2) or `huggingface`.
            overwrite: replace an old file, or an old run folder.

        Raises:
            SpecError: an unknown format, a model without a form in the format, or a missing extra.
            FileError: the path cannot be written, or exists.
        """
        check_is_fitted(self)
        fitted: Any = self
        if fitted._sparse is not None:
            raise SpecError(
                f"{type(self).__name__}: fitted to sparse rows, which no format has; fit to an array or a frame"
            )
        packages = ("torch", "numpy", "scikit-learn", "safetensors", "pyarrow")
        manifest = {
            "notes": list(fitted.notes_),
            "leaderboard": [finite(row._asdict()) for row in fitted.leaderboard_],
            "versions": {"kapsi": __version__, **{name: metadata.version(name) for name in packages}},
        }
        table = fitted._table
        if table.classes is not None:  # 1.0 of scikit-learn's rows is the label 1 of files
            whole = [int(c) if isinstance(c, float) and c.is_integer() else c for c in table.classes]
            table = replace(table, classes=tuple(whole))
        export_model(table, manifest, path, format, overwrite=overwrite, estimator=self._facts())

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder as the Hugging Face Hub expects it: weights, configuration and a model card; see `export`."""
        self.export(folder, "huggingface", overwrite=overwrite)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, download: bool = False, revision: str | None = None) -> Self:
        """Return the fitted estimator of a folder of `save_pretrained`, or of a run folder of `kapsi fit`.

        Safe for untrusted folders. Options that are no plain data, class weights and the device have their defaults.

        Args:
            folder: the folder; with `download` the name of a model on the Hugging Face Hub, such as `USER/NAME`.
            download: download from the Hub, which needs huggingface_hub. Only files of kapsi are downloaded.
            revision: a branch, tag or commit on the Hub.

        Raises:
            RunError: no such folder, damaged, of the other task, or the download fails.
        """
        path = pretrained_folder(folder, download=download, revision=revision)
        model = load_run(path).model
        estimator: Any = cls()
        if (model.classes is not None) != estimator.classifies:
            other = "RPNClassifier" if model.classes is not None else "RPNRegressor"
            raise RunError(f"{show(folder)}: the model is for {model.task}; use kp.{other}.from_pretrained")
        names = [column.name for column in model.preprocessing.columns]
        shape = [len(model.targets)] if len(model.targets) > 1 else []
        default = {"class": cls.__name__, "named": True, "columns": len(names), "names": names, "shape": shape}
        try:
            content = read_run(path, (FACTS,))[1].get(FACTS)
            facts = fields(default | {"options": {}} if content is None else json.loads(content), FACTS, KINDS)
            estimator._restore(model, facts)
        except (KapsiError, ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{show(folder)}: damaged run: {error}") from None
        return estimator

    def _facts(self) -> dict[str, Any]:
        """Return what a run folder does not have, as plain data."""
        fitted: Any = self
        options = {}
        for name, value in fitted.get_params(deep=False).items():
            plain = plain_data(value)
            if name not in LOCAL and (plain is not None or value is None):
                options[name] = plain
        return {
            "class": type(self).__name__,
            "named": fitted._named,
            "columns": fitted.n_features_in_,
            "names": list(getattr(self, "feature_names_in_", ())),
            "shape": list(getattr(self, "_target_shape", ())),
            "options": options,
        }

    def _restore(self, model: Any, facts: Mapping[str, Any]) -> None:
        """Set options and fitted attributes."""
        fitted: Any = self
        names, shape = facts["names"], facts["shape"]
        if names and (len(names) != facts["columns"] or not all(isinstance(name, str) for name in names)):
            raise SpecError(f"{FACTS}: names must be {facts['columns']} strings")
        if shape not in ([], [1], [len(model.targets)]) or (shape == [1] and len(model.targets) > 1):
            raise SpecError(f"{FACTS}: the shape {shape} does not fit {len(model.targets)} targets")
        fitted.set_params(**{name: value for name, value in facts["options"].items() if name not in LOCAL})
        fitted.n_features_in_ = facts["columns"]
        if names:
            fitted.feature_names_in_ = np.array(names, dtype=object)
        fitted.recipe_, fitted.leaderboard_, fitted.notes_ = None, (), []
        fitted._spec, fitted._l2 = None if fitted.spec is None else spec_of(fitted.spec), None
        fitted._table, fitted._sparse, fitted._named = model, None, facts["named"]
        fitted.model_ = model.model.double().eval()
        if model.classes is None:
            fitted._target_shape = tuple(shape)
        else:
            fitted.classes_ = np.array(model.classes)


def plain_data(value: Any) -> Any:
    """Return a value as plain data of JSON, None for one without.

    Example:
        >>> plain_data((1, "a")), plain_data({2: 0.5}), plain_data(print)
        ([1, 'a'], None, None)
    """
    try:
        plain = to_dict(value)
        return plain if json.loads(json.dumps(plain, allow_nan=False)) == plain else None
    except (KapsiError, TypeError, ValueError, RecursionError):
        return None
