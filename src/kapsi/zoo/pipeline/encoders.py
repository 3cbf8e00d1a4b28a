"""Encoders of raw columns, as those of scikit-learn: filled values, indicators and codes of categories, bins, scales."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kapsi.errors import DataError, shown

Columns: TypeAlias = list[NDArray[Any]]
"""Columns of equal length: float64, or objects."""

MISSING = "missing"
"""Key of NaN and of the missing values of pandas among categories."""


class RawEncoder(ABC):
    """A step of the encoding: columns in, columns out."""

    @abstractmethod
    def __call__(self, columns: Columns) -> Columns:
        """Return the encoded columns."""


def numbers_of(column: NDArray[Any], where: str) -> NDArray[np.float64]:
    """Return a column as float64, missing as NaN.

    Raises:
        DataError: a value is no number.
    """
    if column.dtype == object:
        column = np.array(
            [math.nan if value is None or _key(value) is MISSING else value for value in column], dtype=object
        )
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        odd = next(value for value in column if isinstance(value, str) or not np.isscalar(value))
        raise DataError(f"{where}: expected numbers, got {shown(odd)}") from None


@dataclass(frozen=True)
class RawScaling(RawEncoder):
    """Arithmetic of a scaler, in the order of scikit-learn, so that results are bitwise identical.

    Args:
        steps: name of a ufunc, and its second argument for each column, in order.
        where: the scaler, for messages.
    """

    steps: tuple[tuple[str, NDArray[np.float64]], ...]
    where: str

    def __call__(self, columns: Columns) -> Columns:
        values = np.stack([numbers_of(column, self.where) for column in columns], 1)
        for name, numbers in self.steps:
            values = getattr(np, name)(values, numbers)
        return list(values.T)


@dataclass(frozen=True)
class RawFill(RawEncoder):
    """Values in place of missing ones, and indicators of missing values behind.

    Args:
        fill: the value for each kept column.
        kept: indices of the kept columns.
        marked: indices of the columns with an indicator.
        missing: the value that counts as missing.
    """

    fill: tuple[Any, ...]
    kept: tuple[int, ...]
    marked: tuple[int, ...]
    missing: Any

    def __call__(self, columns: Columns) -> Columns:
        masks = [self._mask(column) for column in columns]
        filled = []
        for value, i in zip(self.fill, self.kept, strict=True):
            column = columns[i].copy()
            if masks[i].any():
                column[masks[i]] = value
            filled.append(column)
        return [*filled, *(masks[i].astype(np.float64) for i in self.marked)]

    def _mask(self, column: NDArray[Any]) -> NDArray[np.bool_]:
        if column.dtype != object and _key(self.missing) is MISSING:
            return np.isnan(column)
        key = _key(self.missing)
        return np.array([_key(value) == key for value in column.tolist()], dtype=np.bool_)


@dataclass(frozen=True)
class RawCategories(RawEncoder):
    """Indicators, or codes, of the categories of each column.

    Args:
        outputs: for each column the output of each category: the index of an indicator (-1 for none), or a code.
        unknown: for each column the output of an unknown category; None to refuse it.
        widths: number of indicators of each column; None for codes.
        names: names of the columns, for messages.
        where: the encoder, for messages.
    """

    outputs: tuple[dict[Any, float], ...]
    unknown: tuple[float | None, ...]
    widths: tuple[int, ...] | None
    names: tuple[str, ...]
    where: str

    def __call__(self, columns: Columns) -> Columns:
        encoded: Columns = []
        for i, (column, outputs) in enumerate(zip(columns, self.outputs, strict=True)):
            found = [outputs.get(_key(value), self.unknown[i]) for value in column.tolist()]
            if None in found:
                odd = shown(column.tolist()[found.index(None)])
                raise DataError(
                    f"{self.where}: column {self.names[i]!r} has the category {odd}, which the fit did not see; fit the encoder "
                    "with handle_unknown to accept others"
                )
            codes = np.array(found, dtype=np.float64)
            if self.widths is None:
                encoded.append(codes)
            else:
                encoded += [(codes == k).astype(np.float64) for k in range(self.widths[i])]
        return encoded


@dataclass(frozen=True)
class RawBins(RawEncoder):
    """The bin of each number, as indicators or codes.

    Args:
        edges: inner edges of the bins of each column.
        indicators: whether bins have an indicator each.
        where: the step, for messages.
    """

    edges: tuple[NDArray[np.float64], ...]
    indicators: bool
    where: str

    def __call__(self, columns: Columns) -> Columns:
        encoded: Columns = []
        for column, edges in zip(columns, self.edges, strict=True):
            values = numbers_of(column, self.where)
            if np.isnan(values).any():
                raise DataError(f"{self.where}: has missing values; put a SimpleImputer before it")
            codes = np.searchsorted(edges, values, side="right").astype(np.float64)
            bins = range(len(edges) + 1)
            encoded += [(codes == k).astype(np.float64) for k in bins] if self.indicators else [codes]
        return encoded


@dataclass(frozen=True)
class RawBranches(RawEncoder):
    """Encodings of parts of the columns, side by side.

    Args:
        branches: indices of the columns, and the steps on these.
    """

    branches: tuple[tuple[tuple[int, ...], tuple[RawEncoder, ...]], ...]

    def __call__(self, columns: Columns) -> Columns:
        encoded: Columns = []
        for indices, steps in self.branches:
            part = [columns[i] for i in indices]
            for step in steps:
                part = step(part)
            encoded += part
        return encoded


def category_table(categories: Sequence[Any], outputs: Sequence[float]) -> dict[Any, float]:
    """Return the output of each category by its key."""
    return {_key(category): float(output) for category, output in zip(categories, outputs, strict=True)}


def _key(value: Any) -> Any:
    """Return a value as a key: all NaN are equal, numbers of NumPy equal those of Python."""
    value = value.item() if isinstance(value, np.generic) else value
    if type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    return ("text", value) if isinstance(value, str) else value
