"""Records of fits: one line of JSON each, and measured fits in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tabular.data import TableData
from tabular.methods import Fit

FOLDS = 5
PROBABILITY = 1e-6
"""Smallest probability in the log loss."""
MEMORY = 8 * 2**30
"""Bytes that a process may use."""
OVER = "over the limit"
Key: TypeAlias = tuple[str, int, int, str]


@dataclass(frozen=True)
class Record:
    """A fit and its scores on held-out rows.

    Args:
        table: name of the table.
        seed: seed of the folds and of the method.
        fold: number of the fold.
        method: name of the method.
        rows: number of held-out rows.
        score: accuracy, or R² against the mean of the held-out rows; None if the method failed.
        loss: log loss, or root of the mean squared error; None without probabilities.
        spread: standard deviation of the target of the whole table; None in classification.
        fit: CPU seconds of preprocessing and fit.
        predict: CPU seconds of the prediction of the held-out rows.
        megabytes: largest resident memory of the process, which holds Python, PyTorch and the table.
        failure: reason of a failure; empty otherwise.
    """

    table: str
    seed: int
    fold: int
    method: str
    rows: int
    score: float | None = None
    loss: float | None = None
    spread: float | None = None
    fit: float | None = None
    predict: float | None = None
    megabytes: int | None = None
    failure: str = ""

    @property
    def key(self) -> Key:
        """Table, seed, fold and method."""
        return self.table, self.seed, self.fold, self.method

    def line(self) -> str:
        """Return the record as one line of JSON; None and empty texts are left out."""
        data = {name: value for name, value in asdict(self).items() if value is not None and value != ""}
        data |= {name: float(f"{value:.6g}") for name, value in data.items() if isinstance(value, float)}
        return json.dumps(data, ensure_ascii=False)


def load(paths: Iterable[Path]) -> dict[Key, Record]:
    """Return the records of files; later lines replace earlier ones, and a line cut off by a kill is ignored."""
    found: dict[Key, Record] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                record = Record(**json.loads(line))
            except json.JSONDecodeError:
                continue
            found[record.key] = record
    return found


def append(path: Path, record: Record) -> None:
    """Append a record; a line cut off before it is closed."""
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write((record.line() + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------ one fit


def folds(data: TableData, seed: int) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Return training rows and held-out rows of 5 shuffled folds, stratified by class."""
    from sklearn.model_selection import KFold, StratifiedKFold

    splitter = (StratifiedKFold if data.classes else KFold)(FOLDS, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on classes with fewer rows than folds
        return list(splitter.split(data.x, data.y))


def scores(outputs: npt.NDArray[Any], y: npt.NDArray[Any], classes: int) -> dict[str, float | None]:
    """Return score and loss of outputs."""
    if not classes:
        squares = float(np.mean((np.ravel(outputs) - y) ** 2))
        return {"score": 1 - squares / max(float(np.var(y)), 1e-300), "loss": squares**0.5}
    if outputs.ndim == 1:
        return {"score": float(np.mean(outputs == y)), "loss": None}
    clipped = np.clip(outputs, PROBABILITY, 1)
    clipped = clipped / clipped.sum(1, keepdims=True)
    return {
        "score": float(np.mean(outputs.argmax(1) == y)),
        "loss": float(-np.log(clipped[np.arange(len(y)), y]).mean()),
    }


def measure(data: TableData, method: str, fit: Fit, seed: int, fold: int) -> Record:
    """Return the record of one fit in this process."""
    train, test = folds(data, seed)[fold]
    x, held_out = data.x.iloc[train].reset_index(drop=True), data.x.iloc[test].reset_index(drop=True)
    spread = None if data.classes else float(np.std(data.y))
    common: dict[str, Any] = {
        "table": data.name,
        "seed": seed,
        "fold": fold,
        "method": method,
        "rows": len(test),
        "spread": spread,
    }
    start = time.process_time()
    try:
        model = fit(x, data.y[train], data.classes, seed)
        fitted = time.process_time()
        outputs = model.outputs(held_out)
        done = time.process_time()
        if not np.isfinite(outputs).all():
            return Record(**common, failure="outputs that are not finite")
    except Exception as error:  # of any package
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Record(**common, failure=text[:200])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    found: dict[str, Any] = scores(outputs, data.y[test], data.classes)
    return Record(**common, **found, fit=fitted - start, predict=done - fitted, megabytes=memory)


# ------------------------------------------------------------------------------------------------ processes


def _child(pipe: Connection, data: TableData, method: str, fit: Fit, seed: int, wanted: list[int], limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    # A dump of memory at the limit would take longer than the fit.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for fold in wanted:
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + limit + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        pipe.send(measure(data, method, fit, seed, fold))
    pipe.close()


def run(
    data: TableData, method: str, load_method: Callable[[], Fit], seed: int, wanted: list[int], limit: int
) -> Iterator[Record]:
    """Yield the records of folds, measured in a forked process that may use a number of CPU seconds for each.

    After a fit over the limit, the remaining folds of the table are recorded as over the limit, too, without a fit.
    """
    fit = load_method()  # imports the package before the fork, so that its time does not count
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, data, method, fit, seed, wanted, limit))
    process.start()
    sender.close()
    left = list(wanted)
    try:
        while left:
            record: Record = receiver.recv()
            left.pop(0)
            yield record
    except EOFError:
        process.join()
        reason = f"{OVER} of {limit} s" if process.exitcode == -24 else f"ended with code {process.exitcode}"
        sizes = [len(test) for _, test in folds(data, seed)]
        for number, fold in enumerate(left):
            again = reason if not number else f"{reason}, as fold {left[0]}"
            yield Record(data.name, seed, fold, method, sizes[fold], failure=again)
    finally:
        process.kill()
        process.join()


def complete(records: Mapping[Key, Record], table: str, seed: int, method: str) -> list[Record] | None:
    """Return the records of all folds, None if one is missing."""
    found = [records.get((table, seed, fold, method)) for fold in range(FOLDS)]
    return None if None in found else [record for record in found if record is not None]
