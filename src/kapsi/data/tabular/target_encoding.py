"""Columns of many categories: the mean of the target in each category, shrunk to the mean of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.encoders import (
    Categories,
    centers_and_scales,
    clipped,
    fields,
    numbers,
    standardized,
    strings,
)
from kapsi.data.tabular.types import Column, Floats, Ints, reject

__all__ = ["TargetColumn", "shrunk_means"]


def shrunk_means(codes: Ints, y: Floats, count: int) -> tuple[Floats, Floats]:
    """Return the mean of y in each category, shrunk by the empirical Bayes estimate, and the mean of all rows.

    m = λ m_c + (1 − λ) m_all with λ = n_c v / (n_c v + v_c): n_c rows of the category with variance v_c, and v of all rows. A
    category without rows has the mean of all rows.

    Args:
        codes: category of each row, negative for none, (rows,).
        y: values, (rows, outputs).
        count: number of categories.

    Returns:
        (count, outputs) and (outputs,) float64.

    Source: D. Micci-Barreca, A preprocessing scheme for high-cardinality categorical attributes (2001); `smooth="auto"` of
    scikit-learn's `TargetEncoder`.
    """
    overall, variance = y.mean(0), y.var(0)
    known = codes >= 0
    rows = np.bincount(codes[known], minlength=count)[:, np.newaxis]
    means = np.tile(overall, (count, 1))
    for i in range(y.shape[1]):
        sums = np.bincount(codes[known], y[known, i] - overall[i], minlength=count)
        own = sums / np.maximum(rows[:, 0], 1)
        squares = np.bincount(codes[known], (y[known, i] - overall[i] - own[codes[known]]) ** 2, minlength=count)
        between = rows[:, 0] * variance[i]
        within = squares / np.maximum(rows[:, 0], 1)
        share = np.divide(between, between + within, out=np.zeros(count), where=between + within > 0)
        means[:, i] += share * own
    return means, overall


@dataclass(frozen=True)
class TargetColumn(Categories):
    """Target encoding of a text column: an input per output of the target, standardized over the fitted rows.

    Strings that were not fitted and missing values have the mean of all rows.

    Args:
        name: name of the column.
        categories: the fitted strings, sorted.
        outputs: names of the encoded outputs: classes but for the first of two, or targets.
        values: encoding of each category, one after the other for all outputs.
        default: encoding of other strings, one for each output.
        missing: add an input that marks missing values.
    """

    name: str
    categories: tuple[str, ...]
    outputs: tuple[str, ...]
    values: tuple[float, ...]
    default: tuple[float, ...]
    missing: bool = False
    wanted: ClassVar[str] = "categorical"

    @classmethod
    def fit(cls, name: str, column: Column, y: Floats, outputs: Sequence[str]) -> Self:
        """Fit the means of y, (rows, outputs), in the categories."""
        codes, words = column.coded()
        means, center, scale = _fitted(codes, y, len(words))
        values = standardized(means, center, scale)
        default = standardized(y.mean(0), center, scale)
        return cls(
            name,
            tuple(words),
            tuple(outputs),
            tuple(values.ravel().tolist()),
            tuple(default.tolist()),
            bool((codes < 0).any()),
        )

    def cross_fitted(self, column: Column, y: Floats, folds: Sequence[tuple[Ints, Ints]]) -> Floats:
        """Return the inputs of the fitted rows, each encoded by rows of other folds, so that no row sees its own target.

        Args:
            column: the fitted column.
            y: the fitted values, (rows, outputs).
            folds: rows to fit and rows to encode, a partition of all rows.
        """
        codes, words = column.coded()
        _, center, scale = _fitted(codes, y, len(words))
        inputs = self.transform(column)
        for others, rows in folds:
            means, overall = shrunk_means(codes[others], y[others], len(words))
            encoded = np.concatenate([means, overall[np.newaxis]])[codes[rows]]
            inputs[rows, : y.shape[1]] = clipped(standardized(encoded, center, scale))
        return inputs

    def names(self) -> list[str]:
        """Return the names of the inputs."""
        names = [f"{self.name}: mean of {output}" for output in self.outputs]
        return [*names, f"{self.name} is missing"] if self.missing else names

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        codes = self._codes(column)
        table = np.array([*self.values, *self.default], dtype=np.float64).reshape(-1, len(self.outputs))
        inputs = clipped(table[np.where(codes < 0, len(self.categories), codes)])
        return np.column_stack([inputs, codes == -1]) if self.missing else inputs

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return dict(vars(self))

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Return the encoder of plain data."""
        kinds = {
            "kind": str,
            "name": str,
            "categories": list,
            "outputs": list,
            "values": list,
            "default": list,
            "missing": bool,
        }
        read = fields(data, where, kinds)
        words, outputs = strings(read["categories"], where), read["outputs"]
        if not outputs or not all(isinstance(output, str) for output in outputs):
            reject(where, "outputs must be at least one string")
        values = numbers(read["values"], len(words) * len(outputs), where)
        return cls(
            read["name"], words, tuple(outputs), values, numbers(read["default"], len(outputs), where), read["missing"]
        )


def _fitted(codes: npt.NDArray[Any], y: Floats, count: int) -> tuple[Floats, Floats, Floats]:
    """Return the means of categories, and mean and scale of the encoded rows."""
    means, overall = shrunk_means(codes, y, count)
    rows = np.concatenate([means, overall[np.newaxis]])[codes]
    return means, *centers_and_scales(np.ascontiguousarray(rows.T))
