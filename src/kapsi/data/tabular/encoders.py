"""Encoders of columns: standardized numbers, indicators of categories, parts of dates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.dates import calendar
from kapsi.data.tabular.types import (
    MAX_CATEGORIES,
    Column,
    Floats,
    as_numbers,
    as_text,
    listed,
    reject,
    short,
    table_error,
)
from kapsi.data.tabular.units import to_unit

__all__ = ["CategoryColumn", "DateColumn", "NumberColumn", "Unseen"]

WHOLE = re.compile(r"^(-?\d+)\.0+$")
FARTHEST = 1e6  # standard deviations; the inputs' products of low degree stay finite in float32


class Unseen(NamedTuple):
    """Values of a column without an effect of their own on a prediction.

    Attributes:
        unseen: number of categories that were not in the training rows.
        empty: number of missing values in a column that had none in the training rows.
        example: an unseen category.
        averaged: whether the mean of all rows stands for the values, as in a target encoding.
        damaged: rows of images that cannot be read, from 1, with the reasons.
    """

    unseen: int = 0
    empty: int = 0
    example: str = ""
    averaged: bool = False
    damaged: tuple[tuple[int, str], ...] = ()


def center_and_scale(values: Floats, weight: Floats | None = None) -> tuple[float, float]:
    """Return mean and population standard deviation (1 instead of 0) without overflow; weights count a value so many times."""
    if not len(values) or (weight is not None and not weight.any()):
        return 0.0, 1.0
    centers, scales = centers_and_scales(values[np.newaxis], weight)
    return float(centers[0]), float(scales[0])


def centers_and_scales(values: Floats, weight: Floats | None = None) -> tuple[Floats, Floats]:
    """Return mean and population standard deviation (1 instead of 0) of each row of a matrix, without overflow.

    Args:
        values: (rows, columns), finite.
        weight: the number of times that each column counts, (columns,); None for once.
    """
    share = None if weight is None else weight / weight.sum()
    largest = np.abs(values).max(1)
    exponent = np.where(largest > 0, np.frexp(largest)[1], 0)
    # Powers of two scale exactly; differences from the first value keep digits lost to a large offset.
    small = np.ldexp(values, -exponent[:, np.newaxis])
    first = small[:, :1].copy()
    small -= first
    mean = small.mean(1) if share is None else small @ share
    small -= mean[:, np.newaxis]
    small *= small
    deviation = np.sqrt(small.mean(1) if share is None else small @ share)
    limit = 1.0 - 2.0**-53  # rounding up to 1 would overflow at the largest exponent
    center = np.ldexp(np.clip(first[:, 0] + mean, -limit, limit), exponent)
    scale = np.ldexp(np.minimum(deviation, limit), exponent)
    return center, np.where(scale == 0, 1.0, scale)


def standardized(values: Floats, center: Any, scale: Any) -> Floats:
    """Return (values − center) / scale without overflow."""
    # Halves keep the difference of two huge values finite; halving and doubling are exact.
    with np.errstate(over="ignore"):
        return np.asarray((values / 2 - center / 2) / scale * 2, dtype=np.float64)


def clipped(inputs: Floats) -> Floats:
    """Return inputs limited to ±10⁶: fitted values are within √rows, a far outlier must not make products infinite."""
    return np.clip(inputs, -FARTHEST, FARTHEST)


@dataclass(frozen=True)
class NumberColumn:
    """Standardization of a numeric or boolean column.

    Args:
        name: name of the column.
        mean: mean of the fitted values; replaces missing values.
        scale: population standard deviation of the fitted values, 1 if they are constant.
        missing: add a 0/1 input that marks missing values.
        unit: unit of the fitted values, see `Column`.
    """

    name: str
    mean: float
    scale: float
    missing: bool
    unit: str = ""
    wanted: ClassVar[str] = "numeric"

    @classmethod
    def fit(cls, name: str, column: Column, weight: Floats | None = None) -> NumberColumn:
        """Fit mean and scale, and note missing values."""
        present = ~column.missing
        weight = None if weight is None else weight[present]
        return cls(name, *center_and_scale(column.numbers[present], weight), not present.all(), column.unit)

    def names(self) -> list[str]:
        """Return the names of the inputs."""
        return [self.name, f"{self.name} is missing"] if self.missing else [self.name]

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as numbers in the unit of the fit; reject text, infinite values and another unit."""
        kind = column.kind if column.kind in ("integer", "boolean") else "real"
        if kind == "boolean" and not self._may_be_flags() and not column.missing.all():
            problem = f"column {short(self.name)} has true and false, and the table of the fit has numbers"
            raise table_error(where, f"{problem}; write numbers")
        factor, _ = to_unit(column, self.unit, self.name, where)
        return Column(kind, as_numbers(column, self.name, where) * factor, unit=self.unit)

    def _may_be_flags(self) -> bool:
        """Return whether the fitted values may be 0 and 1 alone: mean p and variance p (1 − p), or a constant."""
        variance = self.mean * (1 - self.mean)
        return self.mean in (0, 1) or math.isclose(self.scale**2, variance, rel_tol=1e-6)

    def note(self, column: Column, where: str) -> str:
        """Return a note on the unit of a column of another table, empty without a guess."""
        return to_unit(column, self.unit, self.name, where)[1]

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        missing = np.isnan(column.numbers)
        inputs = clipped(standardized(np.where(missing, self.mean, column.numbers), self.mean, self.scale))
        return np.stack([inputs, missing], axis=1) if self.missing else inputs[:, np.newaxis]

    def unseen(self, column: Column) -> Unseen:
        """Return the number of values without an effect."""
        return Unseen(empty=0 if self.missing else int(column.missing.sum()))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        data = dict(vars(self))
        if not self.unit:
            del data["unit"]  # as in earlier files
        return data

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Return the encoder of plain data; files without `unit` have plain numbers."""
        kinds = {"kind": str, "name": str, "mean": float, "scale": float, "missing": bool, "unit": str}
        given = [data.get(key, "") for key in kinds]
        plain = [*map(type, given)] == [*kinds.values()] and len(data) == len(kinds) - ("unit" not in data)
        if plain and math.isfinite(given[2] + given[3]):  # at once: a wide table has 10^5 columns
            return cls(given[1], given[2], positive(given[3], where), *given[4:])
        values = fields({"unit": "", **data}, where, kinds)
        return cls(values["name"], values["mean"], positive(values["scale"], where), values["missing"], values["unit"])


class Categories:
    """Positions of strings among fitted categories, for the encoders of text columns."""

    categories: tuple[str, ...]
    missing: bool
    averaged: ClassVar[bool] = False

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as text."""
        return as_text(column, self.categories)

    def _codes(self, column: Column) -> npt.NDArray[np.int64]:
        """Return the category of each value, -1 for missing, -2 for unseen."""
        codes, words = column.coded()
        code_of = places(self.categories)
        # A column with a missing value may come as 1.0 for 1.
        found = [code_of.get(word, code_of.get(WHOLE.sub(r"\1", word), -2)) for word in words]
        return np.array([*found, -1], dtype=np.int64)[codes]

    def unseen(self, column: Column) -> Unseen:
        """Return the number of values without an effect."""
        codes = self._codes(column)
        unseen = np.flatnonzero(codes == -2)
        example = str(column.take(unseen[:1]).values[0]) if len(unseen) else ""
        return Unseen(len(unseen), 0 if self.missing else int((codes == -1).sum()), example, self.averaged)


@dataclass(frozen=True)
class CategoryColumn(Categories):
    """One-hot encoding of a text column.

    A string that was not fitted has zeros only, and so has a missing value unless `missing`.

    Args:
        name: name of the column.
        categories: the most frequent strings, sorted.
        binary: encode two categories as one input, 1 for the second; in earlier files only, unseen strings count as the first.
        missing: add an input that marks missing values.
    """

    name: str
    categories: tuple[str, ...]
    binary: bool = False
    missing: bool = False
    wanted: ClassVar[str] = "categorical"

    @classmethod
    def fit(cls, name: str, column: Column, weight: Floats | None = None) -> CategoryColumn:
        """Take the most frequent strings as categories."""
        codes, words = column.coded()
        known = codes >= 0
        counts = np.bincount(codes[known], None if weight is None else weight[known], minlength=len(words))
        most = np.sort(np.argsort(-counts, kind="stable")[:MAX_CATEGORIES])
        categories = tuple(words[code] for code in most if counts[code])
        return cls(name, categories, missing=bool((codes < 0).any()) and bool(categories))

    def names(self) -> list[str]:
        """Return the names of the inputs."""
        names = [f"{self.name} = {category}" for category in self.categories[int(self.binary) :]]
        return [*names, f"{self.name} is missing"] if self.missing else names

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        codes = self._codes(column)
        inputs: Floats = (codes[:, np.newaxis] == np.arange(len(self.categories))).astype(np.float64)
        if self.missing:
            inputs = np.column_stack([inputs, codes == -1])
        return inputs[:, int(self.binary) :]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        data = dict(vars(self))
        if not self.missing:
            del data["missing"]  # as in earlier files
        return data

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Return the encoder of plain data; files without `missing` have no input for missing values."""
        data = {"missing": False, "binary": False, **data}
        kinds = {"kind": str, "name": str, "categories": list, "missing": bool, "binary": bool}
        values = fields(data, where, kinds)
        words = strings(values["categories"], where)
        if len(words) > MAX_CATEGORIES or (values["binary"] and len(words) != 2):
            reject(where, f"{len(words)} categories do not fit; at most {MAX_CATEGORIES}, 2 where binary")
        return cls(values["name"], words, values["binary"], values["missing"])


@dataclass(frozen=True)
class DateColumn:
    """Year, month, day of the year, weekday and hour of a time, and the days since the first; standardized.

    Parts that are the same in all fitted rows are left out.

    Args:
        name: name of the column.
        first: the first fitted time, in seconds since 1970.
        parts: names of the parts.
        means: mean of each part in the fitted rows; replaces missing values.
        scales: population standard deviation of each part.
        missing: add a 0/1 input that marks missing values.
        unit: whether the fitted times have a zone, see `Column`; empty for days and in earlier files.
        form: how the fitted dates are written, which decides what 7/3/2024 is; empty for typed files and in earlier files.
    """

    name: str
    first: float
    parts: tuple[str, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    missing: bool
    unit: str = ""
    form: str = ""
    wanted: ClassVar[str] = "date"
    PARTS: ClassVar[tuple[str, ...]] = ("year", "month", "day of year", "weekday", "hour", "days")

    @classmethod
    def fit(cls, name: str, column: Column, weight: Floats | None = None) -> DateColumn:
        """Fit the parts that vary."""
        seconds = column.numbers
        known = seconds[~np.isnan(seconds)]
        weight = None if weight is None else weight[~np.isnan(seconds)]
        first = float(known.min()) if len(known) else 0.0
        values = {part: numbers for part, numbers in _parts(known, first).items() if len(np.unique(numbers)) > 1}
        centers = [center_and_scale(numbers, weight) for numbers in values.values()]
        means, scales = tuple(mean for mean, _ in centers), tuple(scale for _, scale in centers)
        missing, form = len(known) < len(seconds), column.form.get("the form", "").removeprefix("dates as ")
        return cls(name, first, tuple(values), means, scales, missing, column.unit, form)

    def names(self) -> list[str]:
        """Return the names of the inputs."""
        names = [f"{self.name}: {'days since the first' if part == 'days' else part}" for part in self.parts]
        return [*names, f"{self.name} is missing"] if self.missing else names

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as times; reject others, but for columns without values."""
        if column.kind != "date" and not column.missing.all():
            kind = column.reason or column.kind
            reject(where, f"column {short(self.name)} has {kind}; the model needs dates{column.problem}")
        to_unit(column, self.unit, self.name, where)
        return Column("date", column.numbers if column.kind == "date" else np.full(len(column), np.nan), unit=self.unit)

    def note(self, column: Column, where: str) -> str:
        """Return a note on days without times where the model has hours, empty for others."""
        known = column.numbers[~column.missing]
        if not len(known) or "hour" not in self.parts or (known % 86400).any():
            return ""
        return (
            f"column {short(self.name)} has days without times, which count as midnight; the table of the fit has times"
        )

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        missing = column.missing
        values = _parts(column.numbers, self.first)
        inputs = [
            clipped(standardized(np.where(missing, mean, values[part]), mean, scale))
            for part, mean, scale in zip(self.parts, self.means, self.scales, strict=True)
        ]
        inputs += [missing.astype(np.float64)] if self.missing else []
        return np.stack(inputs, axis=1) if inputs else np.empty((len(missing), 0))

    def unseen(self, column: Column) -> Unseen:
        """Return the number of values without an effect."""
        return Unseen(empty=0 if self.missing else int(column.missing.sum()))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        # Without unit and form as in earlier files.
        return {name: value for name, value in vars(self).items() if value != "" or name not in ("unit", "form")}

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Return the encoder of plain data."""
        kinds = {
            "kind": str,
            "name": str,
            "first": float,
            "parts": list,
            "means": list,
            "scales": list,
            "missing": bool,
            "unit": str,
            "form": str,
        }
        values = fields({"unit": "", "form": "", **data}, where, kinds)
        parts = values["parts"]
        if any(part not in cls.PARTS for part in parts) or len(set(map(str, parts))) < len(parts):
            reject(where, f"parts are {short(parts)}; they must be among {listed(cls.PARTS)}")
        means, scales = (numbers(values[key], len(parts), where) for key in ("means", "scales"))
        for scale in scales:
            positive(scale, where)
        return cls(
            values["name"],
            values["first"],
            tuple(parts),
            means,
            scales,
            values["missing"],
            values["unit"],
            values["form"],
        )


def _parts(seconds: Floats, first: float) -> dict[str, Floats]:
    return {**calendar(seconds), "days": (seconds - first) / 86400}


# ------------------------------------------------------------------------------------------------ plain data


def fields(data: object, where: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of a JSON object with exactly these keys and types; float accepts any finite number."""
    if not isinstance(data, Mapping):
        reject(where, f"this is {short(data)}; it must be an object")
    if set(data) != set(kinds):
        lost, unknown = [k for k in kinds if k not in data], [k for k in data if k not in kinds]
        parts = [f"missing keys: {listed(lost)}"] * bool(lost) + [f"unknown keys: {listed(unknown)}"] * bool(unknown)
        reject(where, f"{'; '.join(parts)}; the keys are {listed(kinds)}")
    values: dict[str, Any] = {}
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
        values[key] = value
    return values


def positive(scale: float, where: str) -> float:
    """Return a scale above 0."""
    if scale <= 0:
        reject(where, f"scale is {scale!r}; it must be above 0")
    return scale


def places(categories: Sequence[str]) -> dict[str, int]:
    """Return the positions of categories, also without blanks around them, and of 01000 also as 1000.

    Numbers of a data frame or of a spreadsheet have lost leading zeros.

    Example:
        >>> places(["01000", "1 "])
        {'01000': 0, '1': 1, '1 ': 1, '1000': 0}
    """
    found = {category.strip(): i for i, category in enumerate(categories)}
    found |= {category: i for i, category in enumerate(categories)}
    for category, i in list(found.items()):
        if category.isdecimal() and category.startswith("0"):
            found.setdefault(str(int(category)), i)
    return found


def strings(words: list[Any], where: str) -> tuple[str, ...]:
    """Return distinct strings in sorted order."""
    if not all(isinstance(word, str) for word in words) or words != sorted(set(words)):
        reject(where, f"categories are {short(words)}; they must be distinct strings in sorted order")
    return tuple(words)


def numbers(values: list[Any], count: int, where: str) -> tuple[float, ...]:
    """Return a list of finite numbers of a given length."""
    if len(values) != count or not all(type(v) in (int, float) and math.isfinite(v) for v in values):
        reject(where, f"{short(values)} must be {count} finite numbers")
    return tuple(map(float, values))
