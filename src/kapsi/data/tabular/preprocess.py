"""Encode the feature columns of a table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.encoders import (
    Categories,
    CategoryColumn,
    DateColumn,
    NumberColumn,
    Unseen,
    centers_and_scales,
    clipped,
    fields,
    standardized,
)
from kapsi.data.tabular.frames import table_of
from kapsi.data.tabular.image_column import ImageColumn
from kapsi.data.tabular.pictures import damage_of
from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.target_encoding import Outputs, TargetColumn
from kapsi.data.tabular.text_column import TextColumn
from kapsi.data.tabular.types import (
    MAX_CATEGORIES,
    Column,
    Floats,
    Table,
    as_numbers,
    listed,
    reject,
    short,
)
from kapsi.errors import nearest

__all__ = ["Preprocessing", "unseen_notes"]

Encoder: TypeAlias = NumberColumn | CategoryColumn | DateColumn | TargetColumn | TextColumn | ImageColumn
ENCODERS: dict[str, type[Encoder]] = {
    "number": NumberColumn,
    "category": CategoryColumn,
    "date": DateColumn,
    "target": TargetColumn,
    "text": TextColumn,
    "image": ImageColumn,
}
KIND_OF = {encoder: kind for kind, encoder in ENCODERS.items()}


Folds: TypeAlias = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


@dataclass(frozen=True)
class Preprocessing:
    """Encoders of all feature columns: standardized numbers, one-hot categories, parts of dates, TF-IDF of texts, pixels.

    The inputs of terms of texts are sparse, and behind those of other columns; the pixels of images are last.

    Args:
        columns: one entry for each feature column, in order.

    Example:
        >>> import numpy as np
        >>> table = Table("t.csv", {"age": Column("real", np.array([1.0, 3.0]))})
        >>> Preprocessing.fit(table).transform(table).tolist()
        [[-1.0], [1.0]]
    """

    columns: tuple[Encoder, ...]

    @classmethod
    def fit(
        cls,
        features: Table,
        rows: npt.NDArray[np.integer[Any]] | None = None,
        target: Outputs | None = None,
        weight: Floats | None = None,
    ) -> Preprocessing:
        """Fit all columns to a selection of rows (indices into `features`), or to all rows.

        Args:
            features: the feature columns.
            rows: indices of the rows to fit; None for all.
            target: values of these rows that encode columns of more than 50 categories; None for indicators of the 50 most
                frequent.
            weight: weights of these rows, the number of times that each counts; None for once.
        """
        fitted: dict[str, Encoder] = {}
        for names, values in features.blocks(rows):
            whole = np.isfinite(values).all(1)
            centers, scales = centers_and_scales(values[whole] if not whole.all() else values, weight)
            for i, center, scale in zip(np.flatnonzero(whole).tolist(), centers.tolist(), scales.tolist(), strict=True):
                unit = features.columns[names[i]].unit
                fitted[names[i]] = NumberColumn(names[i], center, scale, missing=False, unit=unit)
        for name, column in features.columns.items():
            if name not in fitted:
                part = column if rows is None else column.take(rows)
                fitted[name] = cls._encoder(name, part, features.name, target, weight)
        return cls(tuple(fitted[name] for name in features.columns))

    @staticmethod
    def _encoder(name: str, column: Column, where: str, target: Outputs | None, weight: Floats | None) -> Encoder:
        if column.kind == "image":
            return ImageColumn.fit(name, column, weight)
        if column.kind == "text" and column.free:
            return TextColumn.fit(name, column, 2 if target is None else len(target.names), weight)
        if column.kind == "text" and target is not None and len(column.coded()[1]) > MAX_CATEGORIES:
            return TargetColumn.fit(name, column, target)
        if column.kind == "text":
            return CategoryColumn.fit(name, column, weight)
        if column.kind == "date":
            return DateColumn.fit(name, column, weight)
        return NumberColumn.fit(name, Column(column.kind, as_numbers(column, name, where), unit=column.unit), weight)

    @property
    def texts(self) -> tuple[TextColumn, ...]:
        """The encoders of texts."""
        return tuple(column for column in self.columns if isinstance(column, TextColumn))

    @property
    def images(self) -> tuple[ImageColumn, ...]:
        """The encoders of images."""
        return tuple(column for column in self.columns if isinstance(column, ImageColumn))

    def transform(self, features: Table, rows: npt.NDArray[np.integer[Any]] | None = None) -> Any:
        """Return the inputs of a selection of rows, or of all rows: (rows, len(names())) float64, finite; CSR with texts.

        With images they are float32, whose pixels take half of the memory.

        Raises:
            TableError: see `check`.
        """
        return _joined(*self._encoded(features, rows))

    def _encoded(self, features: Table, rows: npt.NDArray[np.integer[Any]] | None) -> tuple[Floats, list[Any]]:
        """Return the inputs without those of terms and pixels, and those: of each text CSR, then of each image uint8."""
        features, _ = self.check(features)
        if self._numbers is not None and not len(self._numbers[2]):
            return self._plain_numbers(features, rows), []
        widths, ends, plain = self._layout
        inputs = np.empty((features.rows if rows is None else len(rows), int(ends[-1])), dtype=np.float64)
        for names, values in features.blocks(rows):
            known = [i for i, name in enumerate(names) if name in plain]
            fitted: list[Any] = [self.columns[plain[names[i]]] for i in known]
            means, scales = (
                np.array([getattr(column, key) for column in fitted])[:, np.newaxis] for key in ("mean", "scale")
            )
            values = values if len(known) == len(names) else values[known]
            filled = np.where(np.isnan(values), means, values)
            inputs[:, [ends[plain[names[i]]] - 1 for i in known]] = clipped(standardized(filled, means, scales)).T
        terms: list[Any] = []
        pixels: list[Any] = []
        if len(plain) == len(self.columns):
            return inputs, terms
        for column, end, width in zip(self.columns, ends, widths, strict=True):
            if column.name in plain:
                continue
            part = features.columns[column.name]
            part = part if rows is None else part.take(rows)
            if isinstance(column, TextColumn | ImageColumn):
                inputs[:, end - width : end], others = column.encode(part)
                (terms if isinstance(column, TextColumn) else pixels).append(others)
            else:
                inputs[:, end - width : end] = column.transform(part)
        return inputs, [*terms, *pixels]

    def _plain_numbers(self, features: Table, rows: npt.NDArray[np.integer[Any]] | None) -> Floats:
        """Return the inputs of columns that are all numbers without marks of missing ones."""
        means, scales, _ = cast(Any, self._numbers)
        inputs = np.empty((features.rows if rows is None else len(rows), len(means)), dtype=np.float64)
        end = 0
        for names, values in features.blocks(rows):
            begin, end = end, end + len(names)
            mean, scale = means[begin:end, np.newaxis], scales[begin:end, np.newaxis]
            inputs[:, begin:end] = clipped(standardized(np.where(np.isnan(values), mean, values), mean, scale)).T
        return inputs

    @functools.cached_property
    def _layout(self) -> tuple[list[int], list[int], dict[str, int]]:
        """Number of inputs of each column, their ends, and the index of each column of numbers without missing values."""
        widths = [len(column.names()) for column in self.columns]
        numbers = [(i, c) for i, c in enumerate(self.columns) if isinstance(c, NumberColumn) and not c.missing]
        return widths, np.cumsum(widths).tolist(), {column.name: i for i, column in numbers}

    @functools.cached_property
    def _numbers(self) -> tuple[Floats, Floats, npt.NDArray[np.int64]] | None:
        """Mean and scale of each column, and the columns whose missing values are marked; None unless all are numbers."""
        columns = [column for column in self.columns if isinstance(column, NumberColumn)]
        if len(columns) < len(self.columns):
            return None
        means, scales = (np.array([getattr(column, key) for column in columns]) for key in ("mean", "scale"))
        return means, scales, np.flatnonzero([column.missing for column in columns])

    @property
    def all_numbers(self) -> bool:
        """Whether all columns are numbers."""
        return self._numbers is not None

    def transform_numbers(self, values: Floats) -> Floats:
        """Return the inputs of rows of numbers, as `transform` for columns that are all numbers.

        Args:
            values: (rows, columns) float64, missing as NaN, in the order of the columns; none is infinite.

        Example:
            >>> table = Table("t.csv", {"age": Column("real", np.array([1.0, 3.0, np.nan]))})
            >>> Preprocessing.fit(table).transform_numbers(np.array([[5.0], [np.nan]])).tolist()
            [[3.0, 0.0], [0.0, 1.0]]
        """
        if self._numbers is None:
            named = Table("rows", {c.name: Column("real", v) for c, v in zip(self.columns, values.T, strict=True)})
            return np.asarray(self.transform(named))
        means, scales, marked = self._numbers
        missing = np.isnan(values)
        inputs = clipped(standardized(np.where(missing, means, values), means, scales))
        return np.insert(inputs, marked + 1, missing[:, marked], axis=1) if len(marked) else inputs

    def cross_fitted(self, features: Table, rows: npt.NDArray[Any], target: Outputs, folds: Callable[[], Folds]) -> Any:
        """Return the inputs of the fitted rows as `transform`, target encodings by rows of other folds.

        Args:
            features: the feature columns.
            rows: the fitted rows.
            target: values of these rows.
            folds: returns the folds of these rows, a partition.
        """
        inputs, terms = self._encoded(features, rows)
        end, parts = 0, None
        for column in self.columns:
            end += (width := len(column.names()))
            if isinstance(column, TargetColumn):
                parts = folds() if parts is None else parts
                text = column.accept(features.columns[column.name].take(rows), features.name)
                inputs[:, end - width : end] = column.cross_fitted(text, target, parts)
        return _joined(inputs, terms)

    def unseen(self, features: Table) -> dict[str, Unseen]:
        """Return, by column, the values of a table that have no effect of their own: unseen categories, unexpected gaps.

        Args:
            features: the columns of `check`.

        Example:
            >>> train = Table("t.csv", {"c": Column("text", np.array(["a", "b"], dtype=object))})
            >>> new = Table("n.csv", {"c": Column("text", np.array(["a", "z", None], dtype=object))})
            >>> Preprocessing.fit(train).unseen(new)
            {'c': Unseen(unseen=1, empty=1, example='z', averaged=False, damaged=())}
        """
        gaps = set(features.columns)
        for names, values in features.blocks():
            gaps -= {names[i] for i in np.flatnonzero(~np.isnan(values).any(1))}
        counts = {c.name: c.unseen(features.columns[c.name]) for c in self.columns if c.name in gaps}
        return {name: count for name, count in counts.items() if count.unseen or count.empty or count.damaged}

    def kinds(self) -> dict[str, str]:
        """Return the kind of each column for `read_table`, that of dates with their form."""
        forms = {
            column.name: f" {column.form}" for column in self.columns if isinstance(column, DateColumn) and column.form
        }
        return {column.name: column.wanted + forms.get(column.name, "") for column in self.columns}

    def categories(self) -> dict[str, tuple[str, ...]]:
        """Return the categories of each column of text for `read_table`."""
        return {column.name: column.categories for column in self.columns if isinstance(column, Categories)}

    def table_of(self, frame: Any, where: str, reading: Reading | None = None) -> Table:
        """Return a frame as a table with the kinds of columns of the fit, see `table_of`."""
        return table_of(frame, where, self.kinds(), reading, self.categories())

    def names(self) -> list[str]:
        """Return the names of the inputs, those of terms and pixels last."""
        terms = (term for column in self.texts for term in column.terms())
        return [*self.dense_names(), *terms, *(pixel for column in self.images for pixel in column.pixels())]

    def described(self) -> list[str]:
        """Return the names of the inputs, and the numbers of terms of each text and of pixels of each image."""
        counts = [f"{len(column.counts):,} unigrams and bigrams of {column.name}" for column in self.texts]
        counts += [f"{column.count:,} pixels of {column.name}" for column in self.images]
        return [*self.dense_names(), *counts]

    def dense_names(self) -> list[str]:
        """Return the names of the inputs without those of terms and pixels."""
        return [name for column in self.columns for name in column.names()]

    def check(self, table: Table, others: Sequence[str] = ()) -> tuple[Table, list[str]]:
        """Return the fitted columns of a table, in order and typed as fitted, and notes on ignored columns.

        Args:
            table: the table.
            others: names of further columns of its file.

        Raises:
            TableError: a column is missing, holds text instead of numbers, or is infinite.
        """
        needed = {column.name for column in self.columns}
        extra = [name for name in (*table.columns, *others) if name not in needed]
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            near = {name: nearest(name, extra) for name in absent}
            shown = [short(n) + (f" (nearest: {listed(near[n])})" if near[n] else "") for n in absent]
            reject(table.name, f"missing columns: {', '.join(shown)}; add them or rename the columns to match")
        columns = self._accepted(table)
        notes = [f"ignored columns that the model does not use: {listed(extra)}"] if extra else []
        same = len(columns) == len(table.columns)
        if same and all(a is b for a, b in zip(columns.values(), table.columns.values(), strict=True)):
            return table, notes
        measured = [c for c in self.columns if isinstance(c, NumberColumn | DateColumn)]
        units = [c for c in measured if c.unit != table.columns[c.name].unit]
        notes += filter(None, (c.note(table.columns[c.name], table.name) for c in units))
        return Table(table.name, columns), notes

    def _accepted(self, table: Table) -> dict[str, Column]:
        """Return the columns typed as fitted; finite numbers stay as they are. The table keeps them."""
        last = table.derived.get("accepted")
        if last is not None and last[0] is self:
            return cast(dict[str, Column], last[1])
        columns: dict[str, Column] = {}
        fitted = {c.name: c.unit for c in self.columns if isinstance(c, NumberColumn)}
        for names, values in table.blocks():
            infinite = set(np.flatnonzero(np.isinf(values).any(1)).tolist())
            for i, name in enumerate(names):
                column = table.columns[name]
                if i not in infinite and fitted.get(name) == column.unit and column.kind != "boolean":
                    columns[name] = column
        for encoder in self.columns:
            if encoder.name not in columns:
                given = table.columns[encoder.name]
                if given.problem and not (isinstance(encoder, CategoryColumn) and given.coded()[1]):
                    table.use([encoder.name])
                columns[encoder.name] = encoder.accept(given, table.name)
        columns = {column.name: columns[column.name] for column in self.columns}
        table.derived["accepted"] = self, columns
        return columns

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types for `from_dict`."""
        columns = [{"kind": KIND_OF[type(column)], **column.to_dict()} for column in self.columns]
        for column in columns:
            if column["kind"] != "number":  # numbers have no tuples, and a wide table has 10^5 columns of them
                column |= {k: list(v) for k, v in column.items() if isinstance(v, tuple)}
        return {"columns": columns}

    @classmethod
    def from_dict(cls, data: object) -> Preprocessing:
        """Read the plain data of `to_dict`.

        Raises:
            TableError: the data is damaged.
        """
        where = "preprocessing"
        entries = fields(data, where, {"columns": list})["columns"]
        columns = [_column(entry, f"{where}.columns[{i}]") for i, entry in enumerate(entries)]
        if not columns or len({column.name for column in columns}) < len(columns):
            reject(where, "columns must be at least one, with different names")
        return cls(tuple(columns))


def _joined(inputs: Floats, others: Sequence[Any]) -> Any:
    """Return inputs beside those of texts and images: CSR with texts, float32 with images alone."""
    if not others:
        return inputs
    if all(isinstance(part, np.ndarray) for part in others):
        return np.concatenate([inputs, *others], axis=1, dtype=np.float32, casting="same_kind")
    from scipy.sparse import csr_matrix, hstack

    return hstack([csr_matrix(part) for part in (inputs, *others)], format="csr", dtype=np.float64)


def _column(entry: object, where: str) -> Encoder:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in ENCODERS:
        value = f"kind is {short(kind)}" if isinstance(entry, dict) else f"this is {short(entry)}"
        reject(where, f"{value}; it must be an object of a kind among {listed(ENCODERS)}")
    return ENCODERS[kind].read(entry, where)  # type: ignore[arg-type]


def unseen_notes(counts: Mapping[str, Unseen]) -> list[str]:
    """Return notes on values without an effect of their own, one per column.

    Example:
        >>> unseen_notes({"sex": Unseen(2, 1, "diverse")})
        ["column 'sex': 2 values were not in the training rows (such as 'diverse') and 1 is empty; they have no effect"]
    """
    notes = []
    for name, count in counts.items():
        parts = []
        if count.unseen:
            verb = "values were" if count.unseen > 1 else "value was"
            parts.append(f"{count.unseen:,} {verb} not in the training rows (such as {short(count.example)})")
        if count.empty:
            parts.append(f"{count.empty:,} {'are' if count.empty > 1 else 'is'} empty")
        if count.damaged:
            notes.append(damage_of(name, count.damaged))
        if not parts:
            continue
        one = count.unseen + count.empty == 1
        effect = f"{'it has' if one else 'they have'} no effect"
        effect = f"the mean of all rows stands for {'it' if one else 'them'}" if count.averaged else effect
        notes.append(f"column {short(name)}: {' and '.join(parts)}; {effect}")
    return notes
