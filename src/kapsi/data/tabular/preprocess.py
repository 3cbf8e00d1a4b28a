"""Standardize and encode feature columns; standardize regression targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import (
    MAX_CATEGORIES,
    Column,
    Floats,
    Table,
    as_numbers,
    as_text,
    encode,
    listed,
    reject,
    short,
)
from kapsi.errors import nearest

__all__ = [
    "CategoryColumn",
    "NumberColumn",
    "Preprocessing",
    "TargetScale",
]

FARTHEST = 1e6  # standard deviations; the inputs' products of low degree stay finite in float32
MAX_FLOAT64 = float(np.finfo(np.float64).max)


def _center_and_scale(values: Floats) -> tuple[float, float]:
    """Return mean and population standard deviation (1 instead of 0) without overflow."""
    if not len(values):
        return 0.0, 1.0
    largest = float(np.abs(values).max())
    exponent = math.frexp(largest)[1] if largest else 0
    # Powers of two scale exactly; differences from the first value keep digits lost to a large offset.
    small = np.ldexp(values, -exponent)
    shifted = small - small[0]
    mean = float(shifted.mean())
    deviation = float(np.sqrt(np.mean((shifted - mean) ** 2)))
    limit = 1.0 - 2.0**-53  # rounding up to 1 would overflow at the largest exponent
    center = math.ldexp(min(max(float(small[0]) + mean, -limit), limit), exponent)
    return center, math.ldexp(min(deviation, limit), exponent) or 1.0


def _standardized(values: Floats, center: float, scale: float) -> Floats:
    # Halves keep the difference of two huge values finite; halving and doubling are exact.
    with np.errstate(over="ignore"):
        return np.asarray((values / 2 - center / 2) / scale * 2, dtype=np.float64)


@dataclass(frozen=True)
class NumberColumn:
    """Standardization of a numeric or boolean column.

    Args:
        name: name of the column.
        mean: mean of the fitted values; replaces missing values.
        scale: population standard deviation of the fitted values, 1 if they are constant.
        missing: add a 0/1 input that marks missing values.
    """

    name: str
    mean: float
    scale: float
    missing: bool

    @classmethod
    def fit(cls, name: str, column: Column) -> NumberColumn:
        """Fit mean and scale, and note missing values."""
        present = ~column.missing
        return cls(name, *_center_and_scale(column.numbers[present]), missing=not present.all())

    def names(self) -> list[str]:
        """Return the names of the inputs."""
        return [self.name, f"{self.name} is missing"] if self.missing else [self.name]

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as numbers; reject text and infinite values."""
        return Column("real" if column.kind == "text" else column.kind, as_numbers(column, self.name, where))

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        missing = np.isnan(column.numbers)
        inputs = _standardized(np.where(missing, self.mean, column.numbers), self.mean, self.scale)
        # Fitted values are within √rows; a far outlier must not make products of inputs infinite.
        inputs = np.clip(inputs, -FARTHEST, FARTHEST)
        return np.stack([inputs, missing], axis=1) if self.missing else inputs[:, np.newaxis]


@dataclass(frozen=True)
class CategoryColumn:
    """One-hot encoding of a text column.

    Args:
        name: name of the column.
        categories: the most frequent strings, sorted; other strings and missing values are all zeros.
        binary: encode two categories as one input, 1 for the second.
    """

    name: str
    categories: tuple[str, ...]
    binary: bool

    @classmethod
    def fit(cls, name: str, column: Column) -> CategoryColumn:
        """Take the most frequent strings as categories."""
        codes, words = encode(column.values)
        counts = np.bincount(codes[codes >= 0], minlength=len(words))
        most = np.sort(np.argsort(-counts, kind="stable")[:MAX_CATEGORIES])
        return cls(name, tuple(words[code] for code in most), binary=len(words) == 2 and bool((codes >= 0).all()))

    def names(self) -> list[str]:
        """Return the names of the inputs."""
        return [f"{self.name} = {category}" for category in self.categories[int(self.binary) :]]

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as text."""
        return Column("text", as_text(column, self.categories))

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        codes, words = encode(column.values)
        code_of = {category: code for code, category in enumerate(self.categories)}
        coded = np.array([*(code_of.get(word, -1) for word in words), -1], dtype=np.int64)[codes]
        inputs: Floats = (coded[:, np.newaxis] == np.arange(len(self.categories))).astype(np.float64)
        return inputs[:, int(self.binary) :]


KINDS = {"number": NumberColumn, "category": CategoryColumn}


@dataclass(frozen=True)
class Preprocessing:
    """Standardization and one-hot encoding of all feature columns.

    Args:
        columns: one entry for each feature column, in order.

    Example:
        >>> import numpy as np
        >>> table = Table("t.csv", {"age": Column("real", np.array([1.0, 3.0]))})
        >>> Preprocessing.fit(table).transform(table).tolist()
        [[-1.0], [1.0]]
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]

    @classmethod
    def fit(cls, features: Table, rows: npt.NDArray[np.integer[Any]] | None = None) -> Preprocessing:
        """Fit all columns to a selection of rows (indices into `features`), or to all rows."""
        if rows is not None:
            features = features.take(rows)
        return cls(
            tuple(
                CategoryColumn.fit(name, column)
                if column.kind == "text"
                else NumberColumn.fit(name, Column(column.kind, as_numbers(column, name, features.name)))
                for name, column in features.columns.items()
            )
        )

    def transform(self, features: Table, rows: npt.NDArray[np.integer[Any]] | None = None) -> Floats:
        """Return the inputs of a selection of rows, or of all rows: (rows, len(names())) float64, finite.

        Raises:
            TableError: see `check`.
        """
        features, _ = self.check(features if rows is None else features.take(rows))
        parts = [column.transform(features.columns[column.name]) for column in self.columns]
        return np.concatenate(parts, axis=1, dtype=np.float64)

    def names(self) -> list[str]:
        """Return the names of the inputs."""
        return [name for column in self.columns for name in column.names()]

    def check(self, table: Table) -> tuple[Table, list[str]]:
        """Return the fitted columns of a table, in order and typed as fitted, and notes on ignored columns.

        Raises:
            TableError: a column is missing, holds text instead of numbers, or is infinite.
        """
        needed = {column.name for column in self.columns}
        extra = [name for name in table.columns if name not in needed]
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            near = {name: nearest(name, extra) for name in absent}
            shown = [short(n) + (f" (nearest: {listed(near[n])})" if near[n] else "") for n in absent]
            reject(table.name, f"missing columns: {', '.join(shown)}; add them or rename the columns to match")
        columns = {column.name: column.accept(table.columns[column.name], table.name) for column in self.columns}
        notes = [f"ignored columns that the model does not use: {listed(extra)}"] if extra else []
        return Table(table.name, columns), notes

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types for `from_dict`."""
        names = {kind: name for name, kind in KINDS.items()}
        columns = [{"kind": names[type(column)], **asdict(column)} for column in self.columns]
        return {"columns": [{k: list(v) if isinstance(v, tuple) else v for k, v in c.items()} for c in columns]}

    @classmethod
    def from_dict(cls, data: object) -> Preprocessing:
        """Read the plain data of `to_dict`.

        Raises:
            TableError: the data is damaged.
        """
        where = "preprocessing"
        entries = _fields(data, where, {"columns": list})["columns"]
        columns = [_column(entry, f"{where}.columns[{i}]") for i, entry in enumerate(entries)]
        if not columns or len({column.name for column in columns}) < len(columns):
            reject(where, "columns must be at least one, with different names")
        return cls(tuple(columns))


def _column(entry: object, where: str) -> NumberColumn | CategoryColumn:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind == "number":
        values = _fields(entry, where, {"kind": str, "name": str, "mean": float, "scale": float, "missing": bool})
        return NumberColumn(values["name"], values["mean"], _positive(values["scale"], where), values["missing"])
    if kind != "category":
        value = f"kind is {short(kind)}" if isinstance(entry, dict) else f"this is {short(entry)}"
        reject(where, f"{value}; it must be an object of the kind 'number' or 'category'")
    values = _fields(entry, where, {"kind": str, "name": str, "categories": list, "binary": bool})
    words = values["categories"]
    if not all(isinstance(word, str) for word in words) or words != sorted(set(words)):
        reject(where, f"categories are {short(words)}; they must be distinct strings in sorted order")
    if len(words) > MAX_CATEGORIES or (values["binary"] and len(words) != 2):
        reject(where, f"{len(words)} categories do not fit; at most {MAX_CATEGORIES}, 2 where binary")
    return CategoryColumn(values["name"], tuple(words), values["binary"])


def _positive(scale: float, where: str) -> float:
    if scale <= 0:
        reject(where, f"scale is {scale!r}; it must be above 0")
    return scale


def _fields(data: object, where: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of a JSON object with exactly these keys and types; float accepts any finite number."""
    if not isinstance(data, dict):
        reject(where, f"this is {short(data)}; it must be an object")
    if set(data) != set(kinds):
        lost, unknown = [k for k in kinds if k not in data], [k for k in data if k not in kinds]
        parts = [f"missing keys: {listed(lost)}"] * bool(lost) + [f"unknown keys: {listed(unknown)}"] * bool(unknown)
        reject(where, f"{'; '.join(parts)}; the keys are {listed(kinds)}")
    fields: dict[str, Any] = {}
    for key, kind in kinds.items():
        value = data[key]
        if kind is float and type(value) in (int, float):
            try:
                value = float(value)
            except OverflowError:  # an integer beyond float64
                value = math.inf
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            needed = "a finite number" if kind is float else f"of the type {kind.__name__}"
            reject(where, f"{key} is {short(data[key])}; it must be {needed}")
        fields[key] = value
    return fields


@dataclass(frozen=True)
class TargetScale:
    """Standardization of a regression target.

    Args:
        center: mean of the fitted values.
        scale: population standard deviation of the fitted values, 1 if they are constant.

    Example:
        >>> import numpy as np
        >>> TargetScale.fit(np.array([1.0, 3.0])).apply(np.array([5.0])).tolist()
        [3.0]
    """

    center: float
    scale: float

    @classmethod
    def fit(cls, y: Floats) -> TargetScale:
        """Fit mean and population standard deviation of y, (rows,), finite."""
        return cls(*_center_and_scale(np.asarray(y, dtype=np.float64)))

    def apply(self, y: npt.ArrayLike) -> Floats:
        """Return y standardized, float64 of the same shape; NaN stays."""
        scaled = _standardized(np.asarray(y, dtype=np.float64), self.center, self.scale)
        return np.clip(scaled, -MAX_FLOAT64, MAX_FLOAT64)

    def invert(self, y: npt.ArrayLike) -> Floats:
        """Return standardized y in the unit of the target, float64 of the same shape; NaN stays, no value overflows."""
        with np.errstate(over="ignore"):
            values = np.asarray(y, dtype=np.float64) * self.scale + self.center
        return np.clip(values, -MAX_FLOAT64, MAX_FLOAT64)

    def to_dict(self) -> dict[str, float]:
        """Return plain JSON types for `from_dict`."""
        return {"center": self.center, "scale": self.scale}

    @classmethod
    def from_dict(cls, data: object) -> TargetScale:
        """Read the plain data of `to_dict`.

        Raises:
            TableError: the data is damaged.
        """
        values = _fields(data, "target scale", {"center": float, "scale": float})
        return cls(values["center"], _positive(values["scale"], "target scale"))
