"""Intervals, sets and thresholds of a model of a table, and their files in a run folder."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from kapsi.data.tabular import Column, Table, TableProblem
from kapsi.data.tabular.types import Floats, label_text, listed, short
from kapsi.errors import RunError, SpecError, TableError, nearest
from kapsi.files import write_json
from kapsi.model_file import load_bytes, save
from kapsi.recipes import Conformal, Quantiles, RecipeData
from kapsi.training.losses import MSE, CrossEntropy

if TYPE_CHECKING:
    from kapsi.tables.model import TableModel

__all__ = ["Decisions", "Intervals", "fit_intervals"]

MOST_ROWS = 50_000
"""Maximum number of held-out rows for the quantiles; more are sampled."""

LEAST_GROUP = 20
"""Rows of a group of intervals, on average."""

FILES = ("intervals.json", "spread.safetensors")
"""Files of a run; the second one only if the width of intervals depends on the inputs."""


@dataclass(frozen=True)
class Decisions:
    """Options of predictions: coverage of intervals, and rules for labels.

    Args:
        interval: share of new rows whose target is inside the interval, or the set of classes, above 0 and below 1; None for
            neither.
        costs: cost of missing a row of a class, by label, above 0; 1 for other labels. The label with the largest p · cost is
            predicted.
        recall: a label and the share of its rows to be found, above 0 and below 1; the label is predicted if its probability
            reaches a threshold set on held-out rows.
    """

    interval: float | None = None
    costs: tuple[tuple[str, float], ...] = ()
    recall: tuple[str, float] | None = None

    @classmethod
    def of(cls, costs: Mapping[Any, float] | None, recall: tuple[Any, float] | None) -> Decisions:
        """Return decisions on labels of any type, such as True or 3.

        Raises:
            SpecError: a recall that is no pair, or a cost or share that is no number.

        Example:
            >>> Decisions.of({True: 5}, None)
            Decisions(interval=None, costs=(('true', 5.0),), recall=None)
        """
        if recall is not None and (not isinstance(recall, tuple) or len(recall) != 2):
            raise SpecError(f"recall={recall!r}: expected a label and a share, such as ('yes', 0.95)")
        if costs is not None and not isinstance(costs, Mapping):
            raise SpecError(f"costs={costs!r}: expected costs by label, such as {{'yes': 5}}")
        return cls(None, tuple(_number(*item) for item in (costs or {}).items()), recall and _number(*recall))

    def __bool__(self) -> bool:
        return self.interval is not None or bool(self.costs) or self.recall is not None


def _number(label: Any, number: object) -> tuple[str, float]:
    """Return a label as text and its cost or share."""
    if isinstance(number, bool) or not isinstance(number, int | float) or abs(number) > sys.float_info.max:
        raise SpecError(f"label {label!r}: expected a number, got {number!r}")
    return label_text(label.item() if isinstance(label, np.generic) else label), float(number)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Errors of a model on held-out rows, for prediction intervals and sets.

    Args:
        conformal: quantiles of the errors.
        by: name of the column of groups, for coverage within each group; None for all rows together.
    """

    conformal: Conformal
    by: str | None = None

    def groups(self, features: Table) -> list[str] | None:
        """Return the name of the group of each row, None without groups."""
        return None if self.by is None else group_names(features.columns[self.by])

    def write(self, folder: Path) -> None:
        """Write the files of a run."""
        tables = {name: [list(table) for table in tables] for name, tables in self.conformal.tables.items()}
        classes = [list(table) for table in self.conformal.classes]
        write_json(folder / FILES[0], {"by": self.by, "tables": tables, "classes": classes}, indent=None)
        if self.conformal.spread is not None:
            save(self.conformal.spread, folder / FILES[1])

    @classmethod
    def read(cls, contents: Mapping[str, bytes], outputs: int, columns: Sequence[str]) -> Intervals | None:
        """Return the intervals of a run from its files, None if it has none.

        Args:
            contents: content of the files by name.
            outputs: number of targets, 1 for classes.
            columns: names of the columns of the model.

        Raises:
            RunError: a damaged file.
        """
        if FILES[0] not in contents:
            return None
        try:
            data = json.loads(contents[FILES[0]])
            tables = {str(name): tuple(_table(part) for part in parts) for name, parts in data["tables"].items()}
            classes, by = tuple(_table(part) for part in data["classes"]), data["by"]
            spread = load_bytes(contents[FILES[1]], FILES[1]) if FILES[1] in contents else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{FILES[0]}: damaged: {type(error).__name__} {error}") from None
        good = "" in tables and all(len(parts) == outputs for parts in tables.values())
        if not good or not (by is None or by in columns) or (spread is not None and spread.spec.widths[-1] != outputs):
            raise RunError(f"{FILES[0]}: damaged: it does not belong to the model")
        return cls(Conformal(tables, spread, classes), by)


def _table(data: Any) -> Quantiles:
    levels, scores = (tuple(map(float, part)) for part in data)
    ordered = all(a <= b for part in (levels, scores) for a, b in itertools.pairwise(part))
    finite = all(np.isfinite(part).all() for part in (levels, scores))
    if len(levels) != len(scores) or not ordered or not finite or (levels and not 0 < levels[0] <= levels[-1] < 1):
        raise ValueError("levels and scores have to increase")
    return Quantiles(levels, scores)


def group_names(column: Column) -> list[str]:
    """Return the group of each row as a string, empty if the value is missing."""
    if column.kind == "text":
        codes, words = column.coded()
        return ["" if code < 0 else words[code] for code in codes.tolist()]
    numbers = column.numbers.tolist()
    return ["" if number != number else f"{number:.15g}" for number in numbers]


def check_groups(problem: TableProblem, by: str | None) -> None:
    """Refuse a column of groups of intervals, before a fit.

    Raises:
        TableError: the column is no input, has no categories, or has too many.
    """
    if by is None:
        return
    columns = problem.features.columns
    if by not in columns:
        near = nearest(by, columns)
        hint = f" (nearest: {listed(near)})" if near else ""
        _refuse_groups(by, f"is no input of the model{hint}; give one of {listed(columns)}")
    column = columns[by]
    if column.kind in ("image", "date") or column.free:
        kind = "texts" if column.free else f"{column.kind}s"
        _refuse_groups(by, f"has {kind}; give a column of categories, such as a class, a region or a device")
    _check_number(by, group_names(column))


def _check_number(by: str, names: list[str]) -> None:
    """Refuse groups of too few rows."""
    count = len(set(names))
    if count > max(2, len(names) // LEAST_GROUP):
        rows = f"{count:,} groups of {len(names):,} rows"
        _refuse_groups(by, f"{rows}; give a column of fewer groups, with {LEAST_GROUP} rows each on average")


def _refuse_groups(by: str, text: str) -> NoReturn:
    raise TableError(f"intervals by {short(by)}: {text}")


def fit_intervals(
    problem: TableProblem,
    model: TableModel,
    rows: npt.NDArray[np.int64],
    predicted: Floats,
    by: str | None = None,
    seed: int = 0,
) -> Intervals:
    """Return the intervals of a model from predictions for held-out rows.

    Args:
        problem: features and target.
        model: the fitted model.
        rows: the held-out rows.
        predicted: probabilities `(rows, classes)`, or predictions `(rows,)` or `(rows, targets)` in the unit of the target.
        by: name of a column of categories, for coverage within each category.
        seed: seed of the spread.

    Raises:
        TableError: `by` is no column of the model, or has too many groups.
    """
    if len(rows) > MOST_ROWS:
        some = np.sort(np.random.default_rng(seed).choice(len(rows), MOST_ROWS, replace=False))
        rows, predicted = rows[some], predicted[some]
    names = None
    if by is not None:
        check_groups(problem, by)
        names = group_names(problem.features.columns[by].take(rows))
        _check_number(by, names)
    weight = None if problem.weight is None else torch.from_numpy(problem.weight[rows])
    if problem.classes is not None:
        y = torch.from_numpy(problem.y[rows].astype(np.int64))
        values = torch.from_numpy(np.ascontiguousarray(predicted))
        x = values
    else:
        if model.scale is None:
            raise SpecError("fit_intervals: the model of a regression has no scale")
        y = torch.from_numpy(model.scale.apply(problem.y[rows].astype(np.float64))).reshape(len(rows), -1)
        values = torch.from_numpy(model.scale.predicted(predicted)).reshape(y.shape)
        x = _dense(model.preprocessing.transform(problem.features, rows))
    low, high = x.aminmax(dim=0)
    data = RecipeData(
        x=x,
        y=y,
        loss=MSE() if problem.classes is None else CrossEntropy(),
        classes=len(problem.classes or ()),
        numeric=~((x == low) | (x == high)).all(0),
        weight=None if weight is None else weight / weight.mean(),
        seed=seed,
    )
    return Intervals(Conformal.of(data, values, names, seed), by)


def added(model: TableModel, features: Table, outputs: Floats, decisions: Decisions) -> dict[str, list[Any]]:
    """Return the columns of predictions that decisions add or replace.

    Args:
        model: the fitted model.
        features: rows, checked.
        outputs: probabilities of the rows, or predictions in the unit of the target.
        decisions: the options.

    Raises:
        SpecError: an option that does not suit the model.
        DataError: too few rows were held out.
    """
    if model.classes is None and (decisions.costs or decisions.recall):
        raise SpecError("costs and recall are for a classification, and the run is a regression; leave them out")
    columns: dict[str, list[Any]] = {}
    if model.classes is not None and (decisions.costs or decisions.recall):
        labels = list(map(label_text, model.classes))
        codes = decided(labels, outputs, decisions, lambda: known_intervals(model))
        columns["prediction"] = [model.classes[code] for code in codes.tolist()]
    if decisions.interval is None:
        return columns
    if model.classes is None:
        x = model.preprocessing.transform(features)
        bounds = bounds_of_rows(model, x, outputs, decisions.interval, known_intervals(model).groups(features))
        names = [f"prediction_{name}" for name in model.targets] if isinstance(model.target, tuple) else ["prediction"]
        for i, name in enumerate(names):
            columns |= {f"{name}_lower": bounds[:, i, 0].tolist(), f"{name}_upper": bounds[:, i, 1].tolist()}
        return columns
    known = known_intervals(model)
    inside = known.conformal.sets(torch.from_numpy(outputs), decisions.interval, known.groups(features)).numpy()
    labels = list(map(label_text, model.classes))
    columns["prediction_set"] = ["|".join(labels[code] for code in np.flatnonzero(row)) for row in inside]
    return columns


def bounds_of_rows(
    model: TableModel, x: Any, outputs: Floats, level: float, groups: Sequence[str] | None = None
) -> Floats:
    """Return lower and upper bounds in the unit of the target, `(rows, targets, 2)`; not negative if no training target was.

    Args:
        model: the fitted model.
        x: inputs, `(rows, m)`, or CSR.
        outputs: predictions in the unit of the target, `(rows,)` or `(rows, targets)`.
        level: see `Conformal.intervals`.
        groups: name of the group of each row.
    """
    known, scale = known_intervals(model), model.scale
    if scale is None:
        raise SpecError("predict_interval: the run is a classification and has no real values; use predict_set")
    values = torch.from_numpy(scale.predicted(outputs)).reshape(len(outputs), -1)
    pairs = known.conformal.intervals(_dense(x), values, level, groups).numpy()
    restored = [scale.restore(pairs[..., side].reshape(np.shape(outputs))) for side in range(2)]
    bounds = np.stack([part.reshape(len(outputs), -1) for part in restored], -1)
    if model.ranges is not None and len(model.ranges.targets):
        positive = model.ranges.targets[:, 0] >= 0
        bounds[:, positive] = np.maximum(bounds[:, positive], 0.0)
    return bounds


def _dense(x: Any) -> torch.Tensor:
    """Return the inputs as a tensor; without columns for sparse rows and for pixels, which are float32.

    The spread depends on the prediction alone then.
    """
    dense = isinstance(x, np.ndarray) and x.dtype == np.float64
    return torch.from_numpy(x) if dense else torch.zeros(x.shape[0], 0, dtype=torch.float64)


def known_intervals(model: TableModel) -> Intervals:
    """Return the intervals of a model.

    Raises:
        RunError: it has none.
    """
    if model.intervals is None:
        raise RunError(
            "the run has no held-out errors, which intervals need: it was written by 0.1, or is damaged; fit again"
        )
    return model.intervals


def decided(
    labels: Sequence[str], outputs: Floats, decisions: Decisions, known: Callable[[], Intervals]
) -> npt.NDArray[np.int64]:
    """Return the code of the class of each row.

    Args:
        labels: the labels, as `label_text`.
        outputs: probabilities, `(rows, classes)`.
        decisions: costs and recall.
        known: returns the errors of held-out rows, which a recall needs.

    Raises:
        SpecError: an unknown label, or a cost or recall out of range.
        DataError: too few rows of the class were held out.

    Example:
        >>> outputs = np.array([[0.7, 0.3], [0.9, 0.1]])
        >>> decided(["no", "yes"], outputs, Decisions(costs=(("yes", 3.0),)), known_intervals).tolist()
        [1, 0]
    """

    def code(label: str, option: str) -> int:
        if label not in labels and label.lower() in labels and {*labels} == {"false", "true"}:
            label = label.lower()  # True in Python, TRUE in a table
        if label not in labels:
            raise SpecError(f"{option} {label!r}: there is no such class; there are {', '.join(labels[:10])}")
        return labels.index(label)

    costs = np.ones(len(labels))
    for label, cost in decisions.costs:
        if not 0 < cost < np.inf:
            raise SpecError(f"cost {label}={cost:g}: expected a number above 0")
        costs[code(label, "cost")] = cost
    chosen = (outputs * costs).argmax(1)
    if decisions.recall is not None:
        label, share = decisions.recall
        if not 0 < share < 1:
            raise SpecError(f"recall {label}={share:g}: expected a share above 0 and below 1")
        place = code(label, "recall")
        if costs[place] != 1 or (len(labels) == 2 and (costs != 1).any()):
            raise SpecError(
                f"recall {label}={share:g}: its threshold decides on {label!r}, where a cost has no effect; "
                "leave the cost or the recall out"
            )
        threshold = known().conformal.threshold(place, share)
        others = np.where(np.arange(len(labels)) == place, -1.0, outputs * costs).argmax(1)
        chosen = np.where(outputs[:, place] >= threshold - 1e-12, place, others)
    return chosen
