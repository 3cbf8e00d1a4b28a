"""Runs experiments: skips what is done, in one process or several, and ends cleanly when it is interrupted."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, cast

from kapsi.data.hub import OFFLINE
from kapsi.errors import DataSetError, FileError, KapsiError, SpecError
from kapsi.files import plain, resolve, show
from kapsi.paper.experiment import PROCEDURES, Experiment, Outcome, Run
from kapsi.paper.store import Result, ResultStore, key_of

__all__ = ["Failure", "Progress", "RunReport", "offline", "run_experiments"]


@dataclass(frozen=True)
class Failure:
    """A run that gave no result.

    Attributes:
        run: which one.
        message: one line.
        missing: whether data are not there or not as they should be, which is no fault of the run.
    """

    run: Run
    message: str
    missing: bool = False


@dataclass
class RunReport:
    """What became of the runs.

    Attributes:
        done: results of this call.
        skipped: number of runs that the store had.
        elsewhere: runs that another process was at.
        failures: runs that gave no result.
        notes: about the store.
    """

    done: list[Result] = field(default_factory=list)
    skipped: int = 0
    elsewhere: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


Progress = Callable[[Run | None, int, int], None]
"""Called with the run that begins or ended (None before the first), how many are done, and of how many."""


def run_experiments(
    plans: Sequence[tuple[Experiment, Sequence[Run]]],
    output: str | Path,
    *,
    jobs: int = 1,
    again: bool = False,
    progress: Progress | None = None,
) -> RunReport:
    """Do the runs of experiments that the store in a folder has not, and write each result as soon as it is there.

    Several processes may do so in one folder at the same time: none does a run that another one is at or has done meanwhile.

    Args:
        plans: experiments with their runs.
        output: the folder of the results.
        jobs: number of processes, at least 1. Each run has the threads of its configuration, whatever the number of processes.
        again: compute also what the store has.
        progress: told before and after each run.

    Raises:
        SpecError: a row or an option of a run does not fit, or `jobs`; nothing is run then.
        FileError: the store cannot be read or written.
    """
    check_jobs(jobs)
    resolve(output)  # whether it is a path at all
    if not str(output).strip():
        raise SpecError(f"run_experiments(output={output!r}): expected the name of a folder")
    report = RunReport()
    todo: list[Run] = []
    stores: dict[str, ResultStore] = {}
    keys: dict[str, set[str]] = {}
    planned: set[str] = set()
    for experiment, runs in plans:
        store = stores.setdefault(experiment.name, ResultStore(output, experiment.name))
        have = keys[experiment.name] = {result.key for result in store.read()}
        report.notes += store.notes
        for run in runs:
            if run.experiment != experiment.name:
                raise SpecError(
                    f"run_experiments: a run of {run.experiment!r} stands among those of {experiment.name!r}"
                )
            key = key_of(run)
            if key in planned or (key in have and not again):
                report.skipped += 1
            else:
                planned.add(key)
                todo.append(run)
    total = len(todo)
    _check(todo)
    if todo:
        _writable(output)
    if progress is not None:
        progress(None, 0, total)

    def told(run: Run, finished: int) -> None:
        if progress is not None:
            progress(run, finished, total)

    # Where a row's data are missing, its other runs would only say so again.
    missing: dict[tuple[str, str], str] = {}

    def begin(run: Run) -> bool:
        message = missing.get((run.experiment, run.row))
        if message is not None:
            report.failures.append(Failure(run, message, True))
            return False
        store, key = stores[run.experiment], key_of(run)
        if not store.claim(key):
            report.elsewhere.append(run)
            return False
        if not again and store.changed():
            keys[run.experiment] = {result.key for result in store.read()}
        if not again and key in keys[run.experiment]:  # done by another process meanwhile
            store.release(key)
            report.skipped += 1
            return False
        return True

    def end(run: Run, got: Result | Failure) -> None:
        if isinstance(got, Failure):
            report.failures.append(got)
            if got.missing:
                missing[run.experiment, run.row] = got.message
        else:
            stores[run.experiment].append(got)
            report.done.append(got)
        stores[run.experiment].release(key_of(run))

    try:
        if jobs == 1 or total <= 1:
            for place, run in enumerate(todo):
                told(run, place)
                if begin(run):
                    end(run, _do(run, PROCEDURES[run.procedure]))
                told(run, place + 1)
        else:
            _Pool(min(jobs, total)).work(todo, begin, end, told)
        for name in {run.experiment for run in report.elsewhere}:
            keys[name] = {result.key for result in stores[name].read()}
        done = [run for run in report.elsewhere if not again and key_of(run) in keys[run.experiment]]
        report.skipped += len(done)
        report.elsewhere = [run for run in report.elsewhere if run not in done]
    finally:
        for store in stores.values():
            store.close()
    if jobs > 1:
        # Processes end in any order; what is told afterwards has the order of the runs.
        places = {_place(run): place for place, run in enumerate(todo)}
        report.done.sort(key=lambda done: places[done.experiment, done.row, done.method, done.seed])
        report.failures.sort(key=lambda failure: places[_place(failure.run)])
    return report


def _check(todo: Sequence[Run]) -> None:
    """Raise a `SpecError` for the first run whose row or options do not fit; seeds have the same ones."""
    seen: set[tuple[str, str, str]] = set()
    with _threads(1):
        for run in todo:
            place = (run.experiment, run.row, run.method)
            if place not in seen:
                seen.add(place)
                importlib.import_module(PROCEDURES[run.procedure]).check(run)


def _writable(folder: str | Path) -> None:
    """Make the folder of the results, and refuse one that could not be written after the first run."""
    with plain(folder, "write the results"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{show(folder)}: cannot write the results: the folder may only be read; give another --output")


def _place(run: Run) -> tuple[str, str, str, int]:
    return run.experiment, run.row, run.method, run.seed


def _do(run: Run, module: str) -> Result | Failure:
    """Return what comes of one run, an error as data; an interruption goes on."""
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    wall, cpu = time.perf_counter(), _cpu_seconds()
    try:
        with _threads(run.threads):
            outcome = importlib.import_module(module).run(run)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{module}.run returned {type(outcome).__name__}, expected Outcome")
        seconds, cpu_seconds = time.perf_counter() - wall, _cpu_seconds() - cpu
        result = Result.of(run, outcome, started=started, seconds=seconds, cpu_seconds=cpu_seconds)
        result.data()  # what JSON does not have is a mistake of this run, and stops no other
        return result
    except KapsiError as error:
        return Failure(run, " ".join(str(error).split()), isinstance(error, DataSetError))
    except MemoryError:
        return Failure(run, "there is not enough memory")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        return Failure(run, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}")


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started and that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Give torch and the libraries of linear algebra so many threads, and put back what they had."""
    import threadpoolctl
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpoolctl.threadpool_limits(limits=count):
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def offline(folder: str | None) -> Iterator[None]:
    """Keep data sets from being asked for over the network while there is no folder of them."""
    values = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", OFFLINE: "with --quick"}
    if folder or os.environ.get("KAPSI_DATA"):
        yield
        return
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)  # which processes that are begun have, too
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ------------------------------------------------------------------------------------------------ processes


class _Pool:
    """Processes that do runs: each is begun anew (spawn), ends with this one however it ends, and may die without harm."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.context = get_context("spawn")

    def work(
        self,
        todo: Sequence[Run],
        begin: Callable[[Run], bool],
        end: Callable[[Run, Result | Failure], None],
        told: Callable[[Run, int], None],
    ) -> None:
        waiting = list(reversed(todo))
        busy: dict[Any, tuple[Any, Run]] = {}
        finished = 0
        idle: list[tuple[Any, Any]] = []
        alive: list[Any] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self.count:
                    run = waiting.pop()
                    told(run, finished)
                    if not begin(run):
                        finished += 1
                        told(run, finished)
                        continue
                    process, pipe = idle.pop() if idle else self.start()
                    if process not in alive:
                        alive.append(process)
                    with contextlib.suppress(
                        BrokenPipeError, ConnectionError
                    ):  # one that died meanwhile is found below
                        pipe.send((run, PROCEDURES[run.procedure]))
                    busy[pipe] = (process, run)
                if not busy:  # every run that was left is done or at another process: there is nothing to wait for
                    continue
                for pipe in cast("list[Any]", connection.wait(list(busy))):
                    process, run = busy.pop(pipe)
                    got: Result | Failure
                    try:
                        got = pipe.recv()
                        idle.append((process, pipe))
                    except (EOFError, OSError):
                        process.join(5)
                        got = Failure(run, f"its process ended with {_ending(process.exitcode)}")
                    end(run, got)
                    finished += 1
                    told(run, finished)
        finally:
            for process in alive:
                process.terminate()
            for process in alive:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()

    def start(self) -> tuple[Any, Any]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs,), daemon=False)
        with _no_interrupt():
            process.start()
        theirs.close()
        return process, ours


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Keep an interrupt at the terminal from the imports of a process that begins, which takes the blocked signals over."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it lets the signals through again when it begins
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"{name}, perhaps for want of memory" if name == "SIGKILL" else name
    return f"code {code}"


def _serve(pipe: Any) -> None:
    """Do runs as they come, until the other end is closed."""
    # An interrupt at the terminal reaches all processes: the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            run, module = pipe.recv()
        except (EOFError, OSError):
            return
        got = _do(run, module)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a closed one
            sys.stdout.flush()
        try:
            pipe.send(got)
        except (BrokenPipeError, ConnectionError):
            return


def _end_with_parent() -> None:
    """End this process when the one that began it is gone, however that ended."""
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def check_jobs(jobs: int, where: str = "jobs") -> None:
    """Refuse a number of processes.

    Raises:
        SpecError: no whole number, less than 1 or more than 1024.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= 1024:
        raise SpecError(f"{where} {jobs}: expected 1 to 1024 processes")
