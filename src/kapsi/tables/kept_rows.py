"""Rows of a table that a run keeps: the background of effects and contributions, and the rows with the largest errors."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kapsi.data.tabular import Column, Table, TableProblem, write_table
from kapsi.data.tabular.types import Floats, Ints
from kapsi.errors import RunError

if TYPE_CHECKING:
    from kapsi.tables.model import TableModel

__all__ = ["KeptRows", "keep_rows", "row_errors"]

FILE = "rows.parquet"
MOST_ROWS, MOST_LARGE, MOST_VALUES, MOST_COLUMNS = 1000, 200, 2**19, 2000
"""Maximum rows of a table, of a table of texts or images; maximum values; tables of more columns keep no rows."""
WORST = 10
"""Rows with the largest errors that are kept in addition."""


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Rows of the table of a fit, with the columns of the model.

    Args:
        table: the columns, typed as the model needs them.
        y: class codes (-1: unknown) or targets, (rows,) or (rows, targets).
        held_out: whether the saved model was not fitted to a row, (rows,).
        numbers: number of each row in the file, from 1.
    """

    table: Table
    y: Ints | Floats
    held_out: np.ndarray[Any, np.dtype[np.bool_]]
    numbers: Ints

    @classmethod
    def read(cls, data: bytes, model: TableModel) -> KeptRows:
        """Return the rows of a file of `keep_rows`.

        Raises:
            RunError: the file is damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(io.BytesIO(data))
            columns: dict[str, Column] = {}
            for encoder in model.preprocessing.columns:
                values = table[f"x:{encoder.name}"].combine_chunks()
                if encoder.wanted == "image":
                    columns[encoder.name] = Column("image", _images(values.to_pylist()))
                elif pa.types.is_string(values.type) or encoder.wanted not in ("numeric", "date"):
                    words = np.array(values.cast(pa.string()).to_pylist(), dtype=object)
                    columns[encoder.name] = Column("text", words, free=encoder.wanted == "text")
                else:
                    kind: Any = "date" if encoder.wanted == "date" else "real"
                    kind = "boolean" if pa.types.is_boolean(values.type) else kind
                    columns[encoder.name] = Column(kind, _floats(values), unit=getattr(encoder, "unit", ""))
            y = np.stack([_floats(table[f"y:{name}"].combine_chunks()) for name in model.targets], axis=1)
            held_out = np.array(table["held_out"].to_pylist(), dtype=np.bool_)
            numbers = np.array(table["row"].to_pylist(), dtype=np.int64)
        except (pa.ArrowException, KeyError, ValueError, TypeError, OSError) as error:
            raise RunError(f"{FILE}: damaged: {type(error).__name__} {error}") from None
        target = y[:, 0].astype(np.int64) if model.classes is not None else y
        return cls(Table(FILE, columns), target[:, 0] if target.shape[1:] == (1,) else target, held_out, numbers)

    def take(self, rows: Ints) -> KeptRows:
        """Return a selection of the rows."""
        return KeptRows(self.table.take(rows), self.y[rows], self.held_out[rows], self.numbers[rows])


def _images(entries: list[Any]) -> Any:
    """Return images from their shapes and bytes, None for missing ones."""
    images = np.empty(len(entries), dtype=object)
    for i, entry in enumerate(entries):
        if entry is not None:
            images[i] = np.frombuffer(entry["pixels"], np.uint8).reshape(entry["shape"])
    return images


def _floats(values: Any) -> Floats:
    import pyarrow as pa

    return np.array(values.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def keep_rows(
    folder: Path, problem: TableProblem, model: TableModel, training: Ints, outputs: Floats, fold_of: Ints, seed: int
) -> None:
    """Write a sample of the rows of a fit, and the held-out rows with the largest errors.

    Args:
        folder: the run folder.
        problem: features and target.
        model: the saved model.
        training: the rows that the saved model was fitted to.
        outputs: outputs for the held-out rows, (rows, n).
        fold_of: number of the fold of each row, -1 without prediction.
        seed: seed of the sample.
    """
    names = [encoder.name for encoder in model.preprocessing.columns]
    if not names or len(names) > MOST_COLUMNS:
        return
    count = len(problem.y)
    large = any(encoder.wanted in ("text", "image") for encoder in model.preprocessing.columns)
    most = MOST_LARGE if large else MOST_ROWS
    size = min(count, most, max(50, MOST_VALUES // len(names)))
    rows = np.random.default_rng(seed).permutation(count)[:size]
    scored = np.flatnonzero(fold_of >= 0)
    errors = row_errors(problem.y[scored], outputs[scored], classes=problem.classes is not None)
    rows = np.union1d(rows, scored[np.argsort(-errors, kind="stable")[:WORST]])
    features = model.preprocessing.check(problem.features.take(rows, names))[0]
    y = problem.y[rows].reshape(len(rows), -1).astype(np.float64)
    columns: dict[str, Any] = {"row": problem.rows[rows] + 1, "held_out": ~np.isin(rows, training)}
    columns |= {f"y:{name}": y[:, i] for i, name in enumerate(model.targets)}
    columns |= {f"x:{name}": _stored(column) for name, column in features.columns.items()}
    write_table(folder / FILE, columns)


def _stored(column: Column) -> Any:
    """Return the values of a column for a file."""
    if column.kind == "boolean":
        return [None if value != value else bool(value) for value in column.numbers.tolist()]
    if column.kind == "image":
        return [
            {"shape": list(image.shape), "pixels": image.tobytes()} if isinstance(image, np.ndarray) else None
            for image in column.values
        ]
    return column.values


def row_errors(y: Ints | Floats, outputs: Floats, *, classes: bool) -> Floats:
    """Return the error of each row: −log of the probability of its class, or the absolute error (the mean over targets)."""
    if classes:
        chosen = outputs[np.arange(len(y)), y.astype(np.int64)]
        return np.asarray(-np.log(np.maximum(chosen, 2.3e-308)))
    return np.asarray(np.abs(outputs - y.reshape(outputs.shape)).mean(1))
