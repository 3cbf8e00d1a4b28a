"""Ranges of the training rows: which rows and predictions lie outside of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular import Table, Unseen, unseen_notes
from kapsi.data.tabular.types import short
from kapsi.errors import TableError, shown
from kapsi.text import counted

__all__ = ["Ranges", "Tally"]

Interval = tuple[float, float]
Mask = npt.NDArray[np.bool_]
MOST_NAMED = 5  # columns in a note


@dataclass(frozen=True)
class Ranges:
    """Smallest and largest value of the number and date columns, and of real targets, in the training rows.

    Args:
        inputs: interval by name of the column.
        target: interval of the target, or of each of several targets; None for classes.
    """

    inputs: Mapping[str, Interval]
    target: Interval | tuple[Interval, ...] | None = None

    @property
    def targets(self) -> npt.NDArray[np.float64]:
        """The intervals of the targets, (targets, 2); without rows for classes."""
        return np.array([] if self.target is None else self.target, dtype=np.float64).reshape(-1, 2)

    @classmethod
    def fit(
        cls, features: Table, target: npt.NDArray[Any] | None, rows: npt.NDArray[np.integer[Any]] | None = None
    ) -> Ranges:
        """Return the ranges of training rows; a column without values has no range.

        Args:
            features: the columns of a table.
            target: (training rows,) or (training rows, targets) real values, None for classes.
            rows: the training rows; None for all.
        """
        found: dict[str, Interval] = {}
        for names, values in features.blocks(rows):
            lowest = np.where(np.isfinite(values), values, np.inf).min(1, initial=np.inf).tolist()
            highest = np.where(np.isfinite(values), values, -np.inf).max(1, initial=-np.inf).tolist()
            found |= dict(zip(names, zip(lowest, highest, strict=True), strict=True))
        for name, column in features.columns.items():
            if column.kind == "date":
                numbers = column.numbers if rows is None else column.numbers[rows]
                numbers = numbers[np.isfinite(numbers)]
                found[name] = (float(numbers.min(initial=np.inf)), float(numbers.max(initial=-np.inf)))
        inputs = {name: found[name] for name in features.columns if name in found and found[name][0] <= found[name][1]}
        if target is None:
            return cls(inputs)
        limits = [(float(column.min()), float(column.max())) for column in target.reshape(len(target), -1).T]
        return cls(inputs, limits[0] if target.ndim == 1 else tuple(limits))

    def inputs_outside(self, features: Table, rows: npt.NDArray[np.integer[Any]] | None = None) -> dict[str, Mask]:
        """Return the mask of rows outside of the range, (rows,), for each column with such rows; missing values are inside.

        Args:
            features: the columns of a table.
            rows: the rows to check; None for all.
        """
        masks: dict[str, Mask] = {}
        unknown = (-np.inf, np.inf)
        for names, values in features.blocks(rows):
            ends = np.array([self.inputs.get(name, unknown) for name in names])
            outside = (values < ends[:, :1]) | (values > ends[:, 1:])
            masks |= {names[i]: outside[i] for i in np.flatnonzero(outside.any(1))}
        for name, column in features.columns.items():
            if column.kind == "date" and name in self.inputs:
                numbers = column.numbers if rows is None else column.numbers[rows]
                outside = (numbers < self.inputs[name][0]) | (numbers > self.inputs[name][1])
                masks |= {name: outside} if outside.any() else {}
        return {name: masks[name] for name in self.inputs if name in masks} if masks else {}

    def shifted(self, features: Table, rows: npt.NDArray[np.integer[Any]]) -> list[str]:
        """Return a note if many of some rows are outside of the range of a column, as after a change over time.

        Args:
            features: the columns of a table.
            rows: held-out rows; a few of them are outside by chance, so 3 rows and a tenth of the rows are allowed.
        """
        masks = self.inputs_outside(features, rows)
        counts = {name: int(mask.sum()) for name, mask in masks.items() if mask.sum() > 3 + 0.1 * len(rows)}
        if not counts:
            return []
        named = ", ".join(f"column {short(name)}: {counts[name]:,}" for name in list(counts)[:MOST_NAMED])
        more = f", and {len(counts) - MOST_NAMED} more columns" if len(counts) > MOST_NAMED else ""
        return [f"held-out rows are outside of the range of the training rows ({named}{more} of {len(rows):,} rows)"]

    def predictions_outside(self, outputs: npt.NDArray[np.float64]) -> Mask:
        """Return the mask of rows with a prediction outside of the training targets, (rows,)."""
        if self.target is None:
            return np.zeros(len(outputs), dtype=np.bool_)
        low, high = self.targets.T
        values = outputs.reshape(len(outputs), -1)
        return np.asarray(((values < low) | (values > high)).any(1))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types for `from_dict`."""
        inputs = {name: list(interval) for name, interval in self.inputs.items()}
        targets = self.targets.tolist()
        several = self.target is not None and isinstance(self.target[0], tuple)
        return {"inputs": inputs, "target": targets if several else targets[0] if targets else None}

    @classmethod
    def from_dict(cls, data: Any) -> Ranges:
        """Read the plain data of `to_dict`.

        Raises:
            TableError: the data is damaged.
        """
        if not isinstance(data, dict) or set(data) != {"inputs", "target"} or not isinstance(data["inputs"], dict):
            raise TableError(f"ranges: expected inputs and target, got {shown(data)}")
        inputs = {name: _interval(value) for name, value in data["inputs"].items()}
        target = data["target"]
        if isinstance(target, list) and target and all(isinstance(part, list) for part in target):
            return cls(inputs, tuple(map(_interval, target)))
        return cls(inputs, None if target is None else _interval(target))


def _interval(value: Any) -> Interval:
    numbers = value if isinstance(value, list) and all(type(end) in (int, float) for end in value) else []
    if len(numbers) != 2 or not -np.inf < numbers[0] <= numbers[1] < np.inf:
        raise TableError(f"ranges: expected two finite numbers, the lower first, got {shown(value)}")
    return float(numbers[0]), float(numbers[1])


@dataclass
class Tally:
    """Numbers of rows and predictions outside of the training ranges and of values without an effect, over batches of rows.

    Args:
        ranges: ranges of the training rows; None for a run of 0.1, without notes.
        targets: names of the targets, for the notes.
    """

    ranges: Ranges | None
    rows: int = 0
    inputs: int = 0
    predictions: int = 0
    columns: dict[str, int] = field(default_factory=dict)
    unseen: dict[str, Unseen] = field(default_factory=dict)
    targets: Sequence[str] = ()

    def add(
        self, features: Table, outputs: npt.NDArray[np.float64], unseen: Mapping[str, Unseen] | None = None
    ) -> tuple[Mask, Mask]:
        """Count a batch; return the masks of rows with inputs outside, and of predictions outside, (rows,)."""
        for name, count in (unseen or {}).items():
            before = self.unseen.get(name, Unseen())
            example = before.example or count.example
            damaged = tuple((self.rows + row, reason) for row, reason in count.damaged)
            self.unseen[name] = Unseen(
                before.unseen + count.unseen,
                before.empty + count.empty,
                example,
                count.averaged,
                before.damaged + damaged,
            )
        inside = np.zeros(len(outputs), dtype=np.bool_)
        self.rows += len(outputs)
        if self.ranges is None:
            return inside, inside
        masks = self.ranges.inputs_outside(features)
        inputs = np.logical_or.reduce([inside, *masks.values()])
        predictions = self.ranges.predictions_outside(outputs)
        for name, mask in masks.items():
            self.columns[name] = self.columns.get(name, 0) + int(mask.sum())
        self.inputs += int(inputs.sum())
        self.predictions += int(predictions.sum())
        return inputs, predictions

    def notes(self) -> list[str]:
        """Return notes for the user, empty if everything is inside and seen.

        Example:
            >>> counts = Tally(Ranges({"a": (0.0, 1.0)}, (5.0, 9.5)), 50, 3, 2, {"a": 3})
            >>> for note in counts.notes():
            ...     print(note)
            3 of 50 rows are outside of the range of the training rows (column 'a': 3); predictions there are extrapolated
            2 of 50 predictions are outside of the range of the training targets, 5 to 9.5
        """
        notes = unseen_notes(self.unseen)
        if self.inputs:
            most = sorted(self.columns, key=lambda name: -self.columns[name])
            named = ", ".join(f"column {short(name)}: {self.columns[name]:,}" for name in most[:MOST_NAMED])
            more = f", and {len(most) - MOST_NAMED} more columns" if len(most) > MOST_NAMED else ""
            verb = "is" if self.inputs == 1 else "are"
            where = f"{self.inputs:,} of {counted(self.rows, 'row')} {verb} outside of the range of the training rows"
            notes.append(f"{where} ({named}{more}); predictions there are extrapolated")
        if self.predictions and self.ranges is not None and self.ranges.target is not None:
            names = [f"{short(name)}: " for name in self.targets] if len(self.targets) > 1 else [""]
            intervals = zip(names, self.ranges.targets.tolist(), strict=False)
            limits = [f"{name}{low:.6g} to {high:.6g}" for name, (low, high) in intervals][:MOST_NAMED]
            verb = "is" if self.predictions == 1 else "are"
            count = f"{self.predictions:,} of {counted(self.rows, 'prediction')}"
            where = f"{count} {verb} outside of the range of the training targets"
            notes.append(f"{where}, {', '.join(limits)}{', …' if len(self.ranges.targets) > MOST_NAMED else ''}")
        return notes
