"""Logs of epochs: JSON lines, CSV, TensorBoard. Each record is flushed before the next epoch."""

from __future__ import annotations

import csv
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TextIO

from kapsi.errors import FileError, SpecError
from kapsi.files import append_line, finite, plain, resolve, show
from kapsi.training.records import Epoch

LogName = Literal["csv", "tensorboard"]
"""Names of the logs in a run folder other than `metrics.jsonl`."""


class Log(ABC):
    """A callback for the record of each epoch, and a context manager closing the log.

    The first record replaces the records from its epoch on: a resumed run continues an existing log, a new run starts over.
    """

    @abstractmethod
    def __call__(self, epoch: Epoch) -> None:
        """Write a record and flush it."""

    @abstractmethod
    def close(self) -> None:
        """Close the log; do nothing if it is closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(Log):
    """A log with one JSON object per line, holding all fields of a record; NaN and infinities are null.

    The first record removes incomplete lines (left by a killed process), and records from its epoch on.

    Args:
        target: path of the file, with missing folders created, or an open text file, which `close` leaves open.

    Raises:
        FileError: the file cannot be read or written.
        SpecError: a wrong type of `target`.

    Example:
        >>> import io
        >>> handle = io.StringIO()
        >>> JsonLines(handle)(Epoch(1, float("nan"), metrics={"rmse": 0.5}))
        >>> handle.getvalue()[:44]
        '{"number": 1, "loss": null, "validation_loss'
    """

    def __init__(self, target: str | Path | TextIO) -> None:
        self._owned = isinstance(target, str | Path)
        if not self._owned and not callable(getattr(target, "write", None)):
            raise SpecError(f"JsonLines({target!r}): expected a path, or a text file open for writing")
        self._where = str(target) if self._owned else str(getattr(target, "name", "JSON lines"))
        self._fresh = self._owned
        self._handle: TextIO | None = _opened(target) if isinstance(target, str | Path) else target

    def __call__(self, epoch: Epoch) -> None:
        handle = _still_open(self._handle, self._where)
        if self._fresh:
            _cut(handle, self._where, lambda lines: [line for line in lines if _number(line) < epoch.number])
            self._fresh = False
        with plain(self._where, "write the log"):
            append_line(handle, finite(epoch._asdict()))

    def close(self) -> None:
        if self._handle is not None and self._owned:
            self._handle.close()
        self._handle = None


def read_epochs(data: bytes) -> list[Epoch]:
    """Return the epochs of the last fit in the JSON lines of a run; a loss of null is NaN.

    Example:
        >>> line = b'{"part": "%s", "event": "epoch", "number": 1, "loss": %s}\\n'
        >>> [epoch.loss for epoch in read_epochs(line % (b"fold 1 of 2", b"0.5") + line % (b"all rows", b"0.25"))]
        [0.25]
    """
    lines = [json.loads(line) for line in data.decode(errors="replace").splitlines()]
    entries = [line for line in lines if line.get("event") == "epoch"]
    records = []
    for entry in entries:
        if entry["part"] == entries[-1]["part"]:
            known = {name: entry[name] for name in Epoch._fields if name in entry}
            records.append(Epoch(**{**known, "loss": math.nan if entry["loss"] is None else entry["loss"]}))
    return records


class CsvLog(Log):
    """A CSV log with one row per epoch.

    The first record fixes the columns: number, loss, validation_loss, best, metrics, seconds, learning_rate, details of the
    solver (prefixed with `details.` if the name is taken). Missing values are empty, further values of later records ignored.

    Args:
        path: path of the file; missing folders are created.

    Raises:
        FileError: the file cannot be read or written.
    """

    def __init__(self, path: str | Path) -> None:
        self._handle: TextIO | None = _opened(path)
        self._where = str(path)
        self._columns: list[str] = []
        self._writer = csv.writer(self._handle, lineterminator="\n")
        self._fresh = True

    def _kept(self, lines: list[bytes], number: int) -> list[bytes]:
        """Return the header and the rows before an epoch, and set the columns from the header."""
        rows = [_fields(line) for line in lines]
        if not rows or rows[0][:2] != ["number", "loss"]:
            return []
        count = len(rows[0])
        # A last line without a line break may end within a number.
        good = [
            line
            for line, row in zip(lines[1:], rows[1:], strict=True)
            if line.endswith(b"\n") and len(row) == count and row[0].isdecimal() and int(row[0]) < number
        ]
        if not good:
            return []
        self._columns = rows[0]
        return [lines[0], *good]

    def __call__(self, epoch: Epoch) -> None:
        handle, values = _still_open(self._handle, self._where), _flat(epoch)
        if self._fresh:
            _cut(handle, self._where, lambda lines: self._kept(lines, epoch.number))
            self._fresh = False
        with plain(self._where, "write the log"):
            if not self._columns:
                self._columns = list(values)
                self._writer.writerow(self._columns)
            self._writer.writerow([values.get(name) for name in self._columns])
            handle.flush()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
        self._handle = None


class TensorBoard(Log):
    """TensorBoard curves over epochs: losses, metrics, learning rate, details of the solver; only finite values have points.

    Args:
        folder: folder of the event files.

    Raises:
        SpecError: the package `tensorboard` is not installed.
        FileError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        self._where = str(folder)
        with warnings.catch_warnings():  # from imports of tensorboard
            warnings.simplefilter("ignore")
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise SpecError(
                    "TensorBoard needs the package tensorboard; install it with: pip install kapsi[tensorboard]"
                ) from error
            with plain(folder, "write the log"):
                path = resolve(folder)
                path.mkdir(parents=True, exist_ok=True)
        self._writer: Any = None
        # Hides the points of existing files from a step on.
        self._start: Any = lambda number: SummaryWriter(str(path), purge_step=number)

    def __call__(self, epoch: Epoch) -> None:
        start = _still_open(self._start, self._where)
        points: dict[str, float | None] = {"loss/training": epoch.loss, "loss/validation": epoch.validation_loss}
        points |= {f"metrics/{name}": value for name, value in epoch.metrics.items()}
        points |= {"solver/learning_rate": epoch.learning_rate, "time/seconds": epoch.seconds}
        points |= {f"solver/{name}": value for name, value in epoch.details.items()}
        with plain(self._where, "write the log"):
            self._writer = self._writer or start(epoch.number)
            for tag, value in points.items():
                if value is not None and math.isfinite(value):
                    self._writer.add_scalar(tag, value, epoch.number)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._start = None


# ------------------------------------------------------------------------------------------------ files and lines


def _opened(path: str | Path) -> TextIO:
    """Open a file for appending and reading."""
    target = resolve(path)
    with plain(path, "write the log"):
        target.parent.mkdir(parents=True, exist_ok=True)
        return open(target, "a+", encoding="utf-8", newline="")


def _cut(handle: TextIO, where: str, kept: Callable[[list[bytes]], list[bytes]]) -> None:
    """Replace the lines of a file by `kept(lines)`, a part of the lines in order."""
    with plain(where, "write the log"):
        handle.seek(0)
        content = handle.buffer.read()
        stay = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in kept(content.splitlines(True)))
        if content.startswith(stay):
            handle.truncate(len(stay))
        else:
            handle.truncate(0)
            handle.buffer.write(stay)


def _number(line: bytes) -> float:
    """Return the epoch number of a JSON line; infinity for an incomplete line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return math.inf
    number = record.get("number") if isinstance(record, dict) else None
    return number if isinstance(number, int) else math.inf


def _fields(line: bytes) -> list[str]:
    """Return the fields of a CSV line; an empty list if the line is not valid text."""
    try:
        return next(csv.reader([line.decode()]), [])
    except (UnicodeDecodeError, csv.Error):
        return []


def _still_open(handle: Any, where: str) -> Any:
    if handle is None:
        raise FileError(f"{show(where)}: the log is closed; open a new log")
    return handle


def _flat(epoch: Epoch) -> dict[str, Any]:
    """Return the values of a record by column name."""
    fixed = {"number", "loss", "validation_loss", "best", "seconds", "learning_rate"}

    def named(prefix: str, values: Mapping[str, float], taken: set[str]) -> Iterator[tuple[str, float]]:
        for name, value in values.items():
            yield (f"{prefix}.{name}" if name in taken else name), value

    flat: dict[str, Any] = {name: getattr(epoch, name) for name in ("number", "loss", "validation_loss", "best")}
    flat |= named("metrics", epoch.metrics, fixed)
    flat |= {"seconds": epoch.seconds, "learning_rate": epoch.learning_rate}
    flat |= named("details", epoch.details, fixed | set(flat))
    return flat
