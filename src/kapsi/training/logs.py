"""Where the records of epochs go: JSON lines, CSV, TensorBoard. Each record is on its way to the disk before the next epoch."""

from __future__ import annotations

import csv
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self, TextIO, get_args

from kapsi.errors import FileError, SpecError, did_you_mean
from kapsi.files import append_line, atomic, plain, resolve, show
from kapsi.training.records import Epoch

__all__ = ["CsvLog", "JsonLines", "Log", "LogName", "Logs", "TensorBoard", "open_logs"]

LogName = Literal["jsonl", "csv", "tensorboard"]


class Log(ABC):
    """Called with the record of each epoch; a context manager that closes itself."""

    @abstractmethod
    def __call__(self, epoch: Epoch) -> None:
        """Write a record and flush it."""

    @abstractmethod
    def close(self) -> None:
        """Close what was opened; nothing the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(Log):
    """One JSON object a line for each epoch, with all that a record has; numbers that JSON lacks (NaN, infinities) are null.

    A line that was cut off, as when a process is killed while it writes, and what is beyond the epoch that a run goes on from
    are taken out when a file is opened.

    Args:
        target: a path, whose missing folders are made, or an open text file, which is left open.
        keep: number of the last epoch whose record stays in the file; 0 begins anew.

    Raises:
        FileError: the file cannot be read or written.

    Example:
        >>> import io
        >>> handle = io.StringIO()
        >>> JsonLines(handle)(Epoch(1, float("nan"), metrics={"rmse": 0.5}))
        >>> handle.getvalue()[:44]
        '{"number": 1, "loss": null, "validation_loss'
    """

    def __init__(self, target: str | Path | TextIO, *, keep: int = 0) -> None:
        self._owned = isinstance(target, str | Path)
        if not self._owned and not callable(getattr(target, "write", None)):
            raise SpecError(f"JsonLines({target!r}): expected a path, or a text file that is open for writing")
        self._where = str(target) if self._owned else str(getattr(target, "name", "JSON lines"))
        self._handle: TextIO | None
        if isinstance(target, str | Path):
            self._handle = _opened(target, keep, lambda lines: [line for line in lines if _number(line) <= keep])
        else:
            self._handle = target

    def __call__(self, epoch: Epoch) -> None:
        """Write a line."""
        handle = _still_open(self._handle, self._where)
        with plain(self._where, "write the log"):
            append_line(handle, _jsonable(epoch._asdict()))

    def close(self) -> None:
        """Close the file, unless it was opened by somebody else."""
        if self._handle is not None and self._owned:
            self._handle.close()
        self._handle = None


class CsvLog(Log):
    """One row of numbers for each epoch.

    The first record decides on the columns: number, loss, validation_loss, best, one for each metric, seconds, learning_rate, one
    for each detail of the solver (whose name begins with `details.` where another column has it). What later records have
    beside those is left out; what is not known is empty.

    Args:
        path: the file; missing folders are made.
        keep: number of the last epoch whose row stays in the file; 0 begins anew.

    Raises:
        FileError: the file cannot be read or written.
    """

    def __init__(self, path: str | Path, *, keep: int = 0) -> None:
        self._where = str(path)
        self._columns: list[str] = []
        self._handle: TextIO | None = _opened(path, keep, lambda lines: self._kept(lines, keep))
        self._writer = csv.writer(self._handle, lineterminator="\n")

    def _kept(self, lines: list[bytes], keep: int) -> list[bytes]:
        """Return the header and the rows up to an epoch; learn the columns."""
        rows = [_fields(line) for line in lines]
        if not rows or rows[0][:2] != ["number", "loss"]:
            return []
        count = len(rows[0])
        # A last line without an end may be cut off in the middle of a number.
        good = [
            line
            for line, row in zip(lines[1:], rows[1:], strict=True)
            if line.endswith(b"\n") and len(row) == count and row[0].isdecimal() and int(row[0]) <= keep
        ]
        if not good:
            return []
        self._columns = rows[0]
        return [lines[0], *good]

    def __call__(self, epoch: Epoch) -> None:
        """Write a row."""
        handle, values = _still_open(self._handle, self._where), _flat(epoch)
        with plain(self._where, "write the log"):
            if not self._columns:
                self._columns = list(values)
                self._writer.writerow(self._columns)
            self._writer.writerow([values.get(name) for name in self._columns])
            handle.flush()

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()
        self._handle = None


class TensorBoard(Log):
    """Curves for TensorBoard over the number of the epoch: losses, metrics, learning rate, details of the solver.

    Numbers that are not finite have no point.

    Args:
        folder: where event files go.
        keep: number of the last epoch whose points are shown of what is there already; 0 shows new ones only.

    Raises:
        SpecError: the package `tensorboard` is not installed.
        FileError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, *, keep: int = 0) -> None:
        self._where = str(folder)
        with warnings.catch_warnings():  # of what it imports, which are no business of a user
            warnings.simplefilter("ignore")
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise SpecError(
                    "logs: tensorboard needs the package of that name; install it with: pip install kapsi[tensorboard]"
                ) from error
            _check_keep(keep)
            with plain(folder, "write the log"):
                path = resolve(folder)
                path.mkdir(parents=True, exist_ok=True)
                # Points of earlier files from this step on are not shown.
                self._writer: Any = SummaryWriter(str(path), purge_step=keep + 1)

    def __call__(self, epoch: Epoch) -> None:
        """Write the points of an epoch."""
        writer = _still_open(self._writer, self._where)
        points: dict[str, float | None] = {"loss/training": epoch.loss, "loss/validation": epoch.validation_loss}
        points |= {f"metrics/{name}": value for name, value in epoch.metrics.items()}
        points |= {"solver/learning_rate": epoch.learning_rate, "time/seconds": epoch.seconds}
        points |= {f"solver/{name}": value for name, value in epoch.details.items()}
        with plain(self._where, "write the log"):
            for tag, value in points.items():
                if value is not None and math.isfinite(value):
                    writer.add_scalar(tag, value, epoch.number)
            writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class Logs(Log):
    """Several logs as one.

    Args:
        logs: what every record goes to, in order.
    """

    def __init__(self, logs: Sequence[Log]) -> None:
        self.logs = tuple(logs)

    def __call__(self, epoch: Epoch) -> None:
        """Write a record to all of them."""
        for log in self.logs:
            log(epoch)

    def close(self) -> None:
        """Close all of them, also where one fails."""
        with ExitStack() as stack:
            for log in self.logs:
                stack.callback(log.close)


def open_logs(folder: str | Path, names: Sequence[LogName], *, keep: int = 0) -> Logs:
    """Open logs in a folder: `epochs.jsonl`, `epochs.csv`, and the folder `tensorboard`.

    Args:
        folder: made where it is missing.
        names: of `jsonl`, `csv` and `tensorboard`; none is fine.
        keep: number of the epoch that a run goes on from; what a log says of later ones is taken out. 0 begins anew.

    Raises:
        SpecError: there is no such log, or its package is missing.
        FileError: a file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open_logs(folder, ["csv"]) as log:
        ...         log(Epoch(1, 0.5))
        ...     print((Path(folder) / "epochs.csv").read_text())
        number,loss,validation_loss,best,seconds,learning_rate
        1,0.5,,False,0.0,
    """
    known: tuple[str, ...] = get_args(LogName)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise SpecError(f"logs: expected a list of {', '.join(known)}, got {names!r}")
    for name in names:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise SpecError(f"logs: there is no {name!r}; {hint}there are {', '.join(known)}")
    place = Path(folder)
    made: dict[str, Callable[[], Log]] = {
        "jsonl": lambda: JsonLines(place / "epochs.jsonl", keep=keep),
        "csv": lambda: CsvLog(place / "epochs.csv", keep=keep),
        "tensorboard": lambda: TensorBoard(place / "tensorboard", keep=keep),
    }
    with ExitStack() as stack:
        logs = [stack.enter_context(made[name]()) for name in dict.fromkeys(names)]
        stack.pop_all()
    return Logs(logs)


# ------------------------------------------------------------------------------------------------ what they share


def _opened(path: str | Path, keep: int, kept: Callable[[list[bytes]], list[bytes]]) -> TextIO:
    """Return a file to append to, with those of its lines that are kept; a kill in between leaves it as it was."""
    target = resolve(path)
    _check_keep(keep)
    with plain(path, "write the log"):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            content = target.read_bytes() if keep else b""
            stay = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in kept(content.splitlines(True)))
            if not keep or stay != content:
                with atomic(target) as temporary:
                    temporary.write_bytes(stay)
        return open(target, "a", encoding="utf-8", newline="")


def _check_keep(keep: int) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise SpecError(f"logs: keep={keep!r}: expected the number of an epoch, at least 0")


def _number(line: bytes) -> float:
    """Return the number of the epoch that a line is of; infinity where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return math.inf
    number = record.get("number") if isinstance(record, dict) else None
    return number if isinstance(number, int) else math.inf


def _fields(line: bytes) -> list[str]:
    """Return the fields of a line of CSV; none where it is not text."""
    try:
        return next(csv.reader([line.decode()]), [])
    except (UnicodeDecodeError, csv.Error):
        return []


def _still_open(handle: Any, where: str) -> Any:
    if handle is None:
        raise FileError(f"{show(where)}: the log is closed; open another one")
    return handle


def _jsonable(value: Any) -> Any:
    """Return data with None in place of numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _flat(epoch: Epoch) -> dict[str, Any]:
    """Return the numbers of a record by the names of columns."""
    fixed = {"number", "loss", "validation_loss", "best", "seconds", "learning_rate"}

    def named(prefix: str, values: Mapping[str, float], taken: set[str]) -> Iterator[tuple[str, float]]:
        for name, value in values.items():
            yield (f"{prefix}.{name}" if name in taken else name), value

    flat: dict[str, Any] = {name: getattr(epoch, name) for name in ("number", "loss", "validation_loss", "best")}
    flat |= named("metrics", epoch.metrics, fixed)
    flat |= {"seconds": epoch.seconds, "learning_rate": epoch.learning_rate}
    flat |= named("details", epoch.details, fixed | set(flat))
    return flat
