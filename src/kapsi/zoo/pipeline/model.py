"""A converted pipeline: raw rows in, predictions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kapsi.errors import DataError, SpecError
from kapsi.modules import Model
from kapsi.zoo.pipeline.encoders import Columns, RawEncoder, numbers_of

OutputKind: TypeAlias = Literal["values", "scores", "logits", "probabilities", "joint", "pairs"]
"""Outputs of the last step: `predict` of a regression or `transform`; `decision_function`; logits; `predict_proba`; joint
log-likelihoods; decisions between pairs of classes."""

PROBABLE = ("logits", "probabilities", "joint")


@dataclass(frozen=True, eq=False)
class PipelineModel:
    """A pipeline of scikit-learn as an encoding of raw columns and a model, without scikit-learn.

    `encode` turns rows (a frame, an array) into the inputs of `model`, `(rows, m)` float64: filled numbers, indicators, codes.
    Everything behind is in `model`, an ordinary `kapsi.Model`: it can be explained, exported, pruned and trained further, for
    example by `kapsi.fit(converted.model, (converted.encode(frame), y))`.

    Args:
        model: the model of the encoded rows.
        encoders: steps of the encoding.
        names: names of the raw columns, None for a pipeline fitted to an array.
        columns: number of raw columns.
        outputs: meaning of the outputs of the model.
        classes: labels of the classes, None without classes.
        flat: whether a single output has one axis.
        factor: factor of logits in probabilities.
        one_vs_rest: whether decisions between pairs of classes become one score per class.
        allows_missing: whether the model accepts NaN.
    """

    model: Model
    encoders: tuple[RawEncoder, ...]
    names: tuple[str, ...] | None
    columns: int
    outputs: OutputKind
    classes: NDArray[Any] | None = None
    flat: bool = True
    factor: float = 1.0
    one_vs_rest: bool = False
    allows_missing: bool = False

    def encode(self, X: Any) -> Tensor:
        """Return the inputs of the model, `(rows, m)` float64 on the CPU.

        Args:
            X: a frame of pandas or polars with the columns of the fit, in any order; or an array, `(rows, columns)`.

        Raises:
            DataError: missing columns, text in place of numbers, an unknown category or a missing value that the pipeline refuses.
        """
        columns = self._raw(X)
        for step in self.encoders:
            columns = step(columns)
        rows = np.stack([numbers_of(column, "the encoded rows") for column in columns], 1)
        if not self.allows_missing and not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0]
            raise DataError(
                f"PipelineModel: row {row + 1} has {rows[row, column]} in the encoded column {column}, and the model needs finite "
                "numbers; fill missing values by a SimpleImputer in the pipeline"
            )
        return torch.from_numpy(np.ascontiguousarray(rows))

    def _raw(self, X: Any) -> Columns:
        if hasattr(X, "columns") and hasattr(X, "shape"):
            given = {str(name): i for i, name in enumerate(X.columns)}
            absent = [name for name in self.names or () if name not in given]
            if absent:
                raise DataError(f"PipelineModel: missing columns: {', '.join(map(repr, absent[:10]))}")
            places = range(X.shape[1]) if self.names is None else [given[name] for name in self.names]
            columns = [_column(X.iloc[:, i] if hasattr(X, "iloc") else X.to_series(i)) for i in places]
        else:
            rows = np.asarray(X.toarray() if hasattr(X, "toarray") else X)
            columns = list(rows.T) if rows.ndim == 2 else []
        if len(columns) != self.columns or not len(columns[0]):
            raise DataError(f"PipelineModel: expected rows of {self.columns} columns, got shape {np.shape(X)}")
        return [c if c.dtype == object else c.astype(np.float64 if c.dtype.kind in "biuf" else object) for c in columns]

    def __call__(self, X: Any) -> Tensor:
        """Return the outputs of the model for raw rows, `(rows, n)` float64 on the CPU, without gradients."""
        like = next(iter((*self.model.parameters(), *self.model.buffers())))
        with torch.no_grad():
            outputs: Tensor = self.model(
                self.encode(X).to(like.device, like.dtype if like.is_floating_point() else None)
            )
        return outputs.double().cpu()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return labels, `(rows,)`, or values, as `predict` of the pipeline; of a transformer, as `transform`."""
        outputs = self(X)
        if self.classes is None:
            values = outputs.numpy()
            return values[:, 0] if self.flat and values.shape[1] == 1 else values
        if self.outputs == "pairs" and len(self.classes) > 2:
            from kapsi.zoo.kernel_svm import vote

            return self.classes[vote(outputs).numpy()]
        if outputs.shape[1] == 1 and len(self.classes) == 2:
            return self.classes[(outputs[:, 0] > 0).numpy().astype(int)]
        return self.classes[outputs.argmax(1).numpy()]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return probabilities, `(rows, classes)`, in the order of `classes`.

        Raises:
            SpecError: the last step has no probabilities.
        """
        if self.outputs not in PROBABLE:
            raise SpecError(f"PipelineModel: predict_proba: the last step has {self.outputs}, no probabilities")
        outputs = self(X)
        if self.outputs == "probabilities":
            return outputs.numpy()
        if outputs.shape[1] == 1:
            second = (self.factor * outputs[:, 0]).sigmoid()
            first = (-self.factor * outputs[:, 0]).sigmoid()
            return torch.stack((first, second), 1).numpy()
        return outputs.softmax(1).numpy()

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return scores, `(rows,)` for two classes, otherwise one for each class or each pair of classes.

        Raises:
            SpecError: the last step has no scores.
        """
        if self.outputs not in ("scores", "logits", "pairs"):
            raise SpecError(f"PipelineModel: decision_function: the last step has {self.outputs}, no scores")
        outputs = self(X)
        if self.outputs == "pairs" and outputs.shape[1] > 1 and self.one_vs_rest:
            from kapsi.zoo.kernel_svm import one_vs_rest

            outputs = one_vs_rest(outputs)
        return outputs[:, 0].numpy() if outputs.shape[1] == 1 else outputs.numpy()


def _column(series: Any) -> NDArray[Any]:
    """Return a column of pandas or polars as float64 or objects, missing numbers as NaN."""
    dtype = series.dtype
    if hasattr(series, "iloc") and not isinstance(dtype, np.dtype) and getattr(dtype, "kind", "O") in "biuf":
        return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    return np.asarray(series)
