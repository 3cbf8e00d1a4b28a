"""Columns of many categories: the mean of the target in each category, shrunk to the mean of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

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

__all__ = ["Outputs", "TargetColumn", "shrunk_means"]


class Outputs(NamedTuple):
    """Values that a target encoding averages.

    Attributes:
        values: (rows, outputs) float64: indicators of classes (of the second of two), or targets.
        names: name of each output.
        weight: weights of the rows, (rows,); None for equal weights.
    """

    values: Floats
    names: tuple[str, ...]
    weight: Floats | None = None

    def take(self, rows: Ints) -> Outputs:
        """Return a selection of rows."""
        return Outputs(self.values[rows], self.names, None if self.weight is None else self.weight[rows])


def shrunk_means(codes: Ints, y: Floats, count: int, weight: Floats | None = None) -> tuple[Floats, Floats]:
    """Return the mean of y in each category, shrunk by the empirical Bayes estimate, and the mean of all rows.

    m = λ m_c + (1 − λ) m_all with λ = n_c v / (n_c v + v_c): n_c rows of the category with variance v_c, and v of all rows. A
    category without rows has the mean of all rows. Means and variances are weighted; n_c is the sum of
    the weights, scaled to a mean of one over the rows with a weight above zero.

    Args:
        codes: category of each row, negative for none, (rows,).
        y: values, (rows, outputs).
        count: number of categories.
        weight: weights of the rows, (rows,), at least 0, with a positive sum; None for equal weights.

    Returns:
        (count, outputs) and (outputs,) float64.

    Source: D. Micci-Barreca, A preprocessing scheme for high-cardinality categorical attributes (2001); `smooth="auto"` of
    scikit-learn's `TargetEncoder`.
    """
    w = np.ones(len(y)) if weight is None else weight / weight[weight > 0].mean()
    overall = (w @ y) / w.sum()
    variance = (w @ (y - overall) ** 2) / w.sum()
    known = codes >= 0
    codes, w, y = codes[known], w[known], y[known]
    size = np.bincount(codes, w, minlength=count)
    divisor = np.where(size > 0, size, 1.0)
    means = np.tile(overall, (count, 1))
    for i in range(y.shape[1]):
        own = np.bincount(codes, w * (y[:, i] - overall[i]), minlength=count) / divisor
        within = np.bincount(codes, w * (y[:, i] - overall[i] - own[codes]) ** 2, minlength=count) / divisor
        between = size * variance[i]
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
    averaged: ClassVar[bool] = True

    @classmethod
    def fit(cls, name: str, column: Column, target: Outputs) -> Self:
        """Fit the means of the target in the categories."""
        codes, words = column.coded()
        means, overall, center, scale = _fitted(codes, target, len(words))
        values = standardized(means, center, scale)
        default = standardized(overall, center, scale)
        return cls(
            name,
            tuple(words),
            target.names,
            tuple(values.ravel().tolist()),
            tuple(default.tolist()),
            bool((codes < 0).any()),
        )

    def cross_fitted(self, column: Column, target: Outputs, folds: Sequence[tuple[Ints, Ints]]) -> Floats:
        """Return the inputs of the fitted rows, each encoded by rows of other folds, so that no row sees its own target.

        Args:
            column: the fitted column.
            target: the fitted values.
            folds: rows to fit and rows to encode, a partition of all rows.
        """
        codes, words = column.coded()
        _, _, center, scale = _fitted(codes, target, len(words))
        inputs = self.transform(column)
        for others, rows in folds:
            part = target.take(others)
            if part.weight is not None and not part.weight.any():
                part = part._replace(weight=None)
            means, overall = shrunk_means(codes[others], part.values, len(words), part.weight)
            encoded = np.concatenate([means, overall[np.newaxis]])[codes[rows]]
            inputs[rows, : len(target.names)] = clipped(standardized(encoded, center, scale))
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


def _fitted(codes: npt.NDArray[Any], target: Outputs, count: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the means of categories and of all rows, and mean and scale of the encoded rows."""
    means, overall = shrunk_means(codes, target.values, count, target.weight)
    rows = np.concatenate([means, overall[np.newaxis]])[codes]
    return means, overall, *centers_and_scales(np.ascontiguousarray(rows.T), target.weight)
