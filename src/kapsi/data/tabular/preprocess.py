"""Standardize columns to inputs, and regression targets."""

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
    encoded,
    listed,
    refuse,
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
LARGEST_FLOAT64 = float(np.finfo(np.float64).max)


def _center_and_scale(values: Floats) -> tuple[float, float]:
    """Return the mean and the population standard deviation (1 where it is 0), safe from overflow at any size."""
    if not len(values):
        return 0.0, 1.0
    largest = float(np.abs(values).max())
    exponent = math.frexp(largest)[1] if largest else 0
    # Powers of two scale exactly, and differences from one value keep the digits that a large offset would take.
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
    """How one column of numbers or booleans becomes an input.

    Args:
        name: the column's name.
        mean: the mean of the fitted values; it also stands in for a missing value.
        scale: their population standard deviation, 1 where that is 0.
        missing: whether a further 0/1 input tells which values are missing.
    """

    name: str
    mean: float
    scale: float
    missing: bool

    @classmethod
    def fit(cls, name: str, column: Column) -> NumberColumn:
        """Take the mean, the scale and whether values are missing from the column."""
        present = ~column.missing
        return cls(name, *_center_and_scale(column.numbers[present]), missing=not present.all())

    def names(self) -> list[str]:
        """Return one name for each input that the column becomes."""
        return [self.name, f"{self.name} is missing"] if self.missing else [self.name]

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as numbers; refuse text and infinite values."""
        return Column("real" if column.kind == "text" else column.kind, as_numbers(column, self.name, where))

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        missing = np.isnan(column.numbers)
        inputs = _standardized(np.where(missing, self.mean, column.numbers), self.mean, self.scale)
        # Fitted values are within √rows; one far outside must not make a product of inputs infinite.
        inputs = np.clip(inputs, -FARTHEST, FARTHEST)
        return np.stack([inputs, missing], axis=1) if self.missing else inputs[:, np.newaxis]


@dataclass(frozen=True)
class CategoryColumn:
    """How one column of text becomes 0/1 inputs, one for each category.

    Args:
        name: the column's name.
        categories: the categories that are told apart, sorted; any other text and missing values give only zeros.
        binary: whether the second of two categories alone is an input.
    """

    name: str
    categories: tuple[str, ...]
    binary: bool

    @classmethod
    def fit(cls, name: str, column: Column) -> CategoryColumn:
        """Take the most frequent categories from the column."""
        codes, words = encoded(column.values)
        counts = np.bincount(codes[codes >= 0], minlength=len(words))
        most = np.sort(np.argsort(-counts, kind="stable")[:MAX_CATEGORIES])
        return cls(name, tuple(words[code] for code in most), binary=len(words) == 2 and bool((codes >= 0).all()))

    def names(self) -> list[str]:
        """Return one name for each input that the column becomes."""
        return [f"{self.name} = {category}" for category in self.categories[int(self.binary) :]]

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as text."""
        return Column("text", as_text(column, self.categories))

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        codes, words = encoded(column.values)
        place = {category: code for code, category in enumerate(self.categories)}
        coded = np.array([*(place.get(word, -1) for word in words), -1], dtype=np.int64)[codes]
        inputs: Floats = (coded[:, np.newaxis] == np.arange(len(self.categories))).astype(np.float64)
        return inputs[:, int(self.binary) :]


@dataclass(frozen=True)
class Preprocessing:
    """How raw columns become standardized inputs, as plain data.

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
        """Take the statistics of these rows (0-based numbers within features), of all rows where None."""
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
        """Return the inputs of these rows, of all rows where None: (rows, len(names())) float64, finite.

        Raises:
            TableError: as in check.
        """
        features, _ = self.check(features if rows is None else features.take(rows))
        parts = [spec.transform(features.columns[spec.name]) for spec in self.columns]
        return np.concatenate(parts, axis=1, dtype=np.float64)

    def names(self) -> list[str]:
        """Return one name for each input."""
        return [name for spec in self.columns for name in spec.names()]

    def check(self, table: Table) -> tuple[Table, list[str]]:
        """Return the columns that are needed, in order and typed as fitted, and notes on what was ignored.

        Raises:
            TableError: a column is absent, has text where numbers are expected, or is infinite somewhere.
        """
        needed = {spec.name for spec in self.columns}
        extra = [name for name in table.columns if name not in needed]
        absent = [spec.name for spec in self.columns if spec.name not in table.columns]
        if absent:
            near = {name: nearest(name, extra) for name in absent}
            shown = [short(n) + (f" (nearest: {listed(near[n])})" if near[n] else "") for n in absent]
            raise refuse(table.name, f"missing columns: {', '.join(shown)}; add them or rename the columns to match")
        columns = {spec.name: spec.accept(table.columns[spec.name], table.name) for spec in self.columns}
        notes = [f"ignored columns that the model does not use: {listed(extra)}"] if extra else []
        return Table(table.name, columns), notes

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types that from_dict reads."""
        kinds = {NumberColumn: "number", CategoryColumn: "category"}
        columns: list[dict[str, Any]] = [{"kind": kinds[type(spec)], **asdict(spec)} for spec in self.columns]
        for column in columns:
            if column["kind"] == "category":
                column["categories"] = list(column["categories"])
        return {"columns": columns}

    @classmethod
    def from_dict(cls, data: object) -> Preprocessing:
        """Read what to_dict returned.

        Raises:
            TableError: the data is damaged.
        """
        where = "preprocessing"
        columns: list[NumberColumn | CategoryColumn] = []
        for position, entry in enumerate(_fields(data, where, {"columns": list})["columns"]):
            here = f"{where}.columns[{position}]"
            kind = entry.get("kind") if isinstance(entry, dict) else None
            if kind == "number":
                found = _fields(entry, here, {"kind": str, "name": str, "mean": float, "scale": float, "missing": bool})
                if found["scale"] <= 0:
                    raise refuse(here, f"scale is {found['scale']!r}; it must be above 0")
                columns.append(NumberColumn(found["name"], found["mean"], found["scale"], found["missing"]))
            elif kind == "category":
                found = _fields(entry, here, {"kind": str, "name": str, "categories": list, "binary": bool})
                words = found["categories"]
                if not all(isinstance(word, str) for word in words) or words != sorted(set(words)):
                    raise refuse(here, f"categories are {short(words)}; they must be different texts in order")
                if len(words) > MAX_CATEGORIES or (found["binary"] and len(words) != 2):
                    raise refuse(here, f"{len(words)} categories do not fit; at most {MAX_CATEGORIES}, 2 where binary")
                columns.append(CategoryColumn(found["name"], tuple(words), found["binary"]))
            else:
                what = f"kind is {short(kind)}" if isinstance(entry, dict) else f"this is {short(entry)}"
                raise refuse(here, f"{what}; it must be an object of the kind 'number' or 'category'")
        if not columns or len({spec.name for spec in columns}) < len(columns):
            raise refuse(where, "columns must be at least one, with different names")
        return cls(tuple(columns))


def _fields(data: object, where: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of a JSON object that has just these, of these types; float takes any finite number."""
    if not isinstance(data, dict):
        raise refuse(where, f"this is {short(data)}; it must be an object")
    if set(data) != set(kinds):
        lost, unknown = [k for k in kinds if k not in data], [k for k in data if k not in kinds]
        what = [f"missing keys: {listed(lost)}"] * bool(lost) + [f"unknown keys: {listed(unknown)}"] * bool(unknown)
        raise refuse(where, f"{'; '.join(what)}; the keys are {listed(kinds)}")
    found: dict[str, Any] = {}
    for key, kind in kinds.items():
        value = data[key]
        if kind is float and type(value) in (int, float):
            try:
                value = float(value)
            except OverflowError:  # an integer beyond float64
                value = math.inf
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            needed = "a finite number" if kind is float else f"of the type {kind.__name__}"
            raise refuse(where, f"{key} is {short(data[key])}; it must be {needed}")
        found[key] = value
    return found


@dataclass(frozen=True)
class TargetScale:
    """How a regression target is standardized, and predictions are brought back.

    Args:
        center: the mean of the fitted values.
        scale: their population standard deviation, 1 where that is 0.

    Example:
        >>> import numpy as np
        >>> TargetScale.fit(np.array([1.0, 3.0])).apply(np.array([5.0])).tolist()
        [3.0]
    """

    center: float
    scale: float

    @classmethod
    def fit(cls, y: Floats) -> TargetScale:
        """Take the mean and the population standard deviation of y, (rows,) float64, finite."""
        return cls(*_center_and_scale(np.asarray(y, dtype=np.float64)))

    def apply(self, y: npt.ArrayLike) -> Floats:
        """Return y, in the target's unit, standardized: the same shape, float64; NaN stays."""
        scaled = _standardized(np.asarray(y, dtype=np.float64), self.center, self.scale)
        return np.clip(scaled, -LARGEST_FLOAT64, LARGEST_FLOAT64)

    def invert(self, y: npt.ArrayLike) -> Floats:
        """Return y, standardized, in the target's unit: the same shape, float64; NaN stays, no value overflows."""
        with np.errstate(over="ignore"):
            values = np.asarray(y, dtype=np.float64) * self.scale + self.center
        return np.clip(values, -LARGEST_FLOAT64, LARGEST_FLOAT64)

    def to_dict(self) -> dict[str, float]:
        """Return plain JSON types that from_dict reads."""
        return {"center": self.center, "scale": self.scale}

    @classmethod
    def from_dict(cls, data: object) -> TargetScale:
        """Read what to_dict returned.

        Raises:
            TableError: the data is damaged.
        """
        found = _fields(data, "target scale", {"center": float, "scale": float})
        if found["scale"] <= 0:
            raise refuse("target scale", f"scale is {found['scale']!r}; it must be above 0")
        return cls(found["center"], found["scale"])
