"""Runs of experiments in a single process or several; stored runs are skipped, and interrupts end cleanly."""

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
from kapsi.errors import DataSetError, FileError, KapsiError, SpecError, check_integer
from kapsi.files import plain, resolve, show
from kapsi.paper.experiment import PROCEDURES, Experiment, Outcome, Run
from kapsi.paper.store import Result, ResultStore, key_of


@dataclass(frozen=True)
class Failure:
    """A run without a result.

    Attributes:
        run: the run.
        message: the reason, in a single line.
        missing: whether the data of the run are missing or damaged.
    """

    run: Run
    message: str
    missing: bool = False


@dataclass
class RunReport:
    """Outcome of several runs.

    Attributes:
        done: new results.
        skipped: number of runs with a stored result.
        elsewhere: runs claimed by another process.
        failures: runs without a result.
        notes: notes on the store.
    """

    done: list[Result] = field(default_factory=list)
    skipped: int = 0
    elsewhere: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


ProgressCallback = Callable[[Run | None, int, int], None]
"""Called at the start and the end of a run (first with None), with the number of finished runs and their total."""


def run_experiments(
    plans: Sequence[tuple[Experiment, Sequence[Run]]],
    output: str | Path,
    *,
    jobs: int = 1,
    again: bool = False,
    progress: ProgressCallback | None = None,
) -> RunReport:
    """Run all runs without a stored result, and store each result at once.

    Several processes may share a folder: a run claimed or finished by another process is skipped.

    Args:
        plans: experiments with their runs.
        output: folder of the results.
        jobs: number of processes, at least 1. Each run has the configured threads for any number of processes.
        again: repeat stored runs.
        progress: called at the start and the end of each run.

    Raises:
        SpecError: invalid row or option of a run, or invalid `jobs`, before the first run.
        FileError: the store cannot be read or written.
    """
    check_jobs(jobs)
    resolve(output)  # refuse values other than paths
    if not str(output).strip():
        raise SpecError(f"run_experiments(output={output!r}): expected the name of a folder")
    session = _Session(output, again, progress)
    for experiment, runs in plans:
        session.add(experiment, runs)
    _check(session.todo)
    if session.todo:
        _require_writable(output)
    session.show(None, 0)
    try:
        if jobs == 1 or len(session.todo) <= 1:
            for done, run in enumerate(session.todo):
                session.show(run, done)
                if session.begin(run):
                    session.end(run, _do(run, PROCEDURES[run.procedure]))
                session.show(run, done + 1)
        else:
            _Pool(min(jobs, len(session.todo))).work(session)
        session.recheck_elsewhere()
    finally:
        for store in session.stores.values():
            store.close()
    report = session.report
    # Processes end in any order; the report follows the order of the runs.
    order = {_key(run): i for i, run in enumerate(session.todo)}
    report.done.sort(key=lambda result: order[_key(result)])
    report.failures.sort(key=lambda failure: order[_key(failure.run)])
    return report


class _Session:
    """Runs to do, their stores and the report."""

    def __init__(self, output: str | Path, again: bool, progress: ProgressCallback | None) -> None:
        self.output, self.again, self.progress = output, again, progress
        self.report = RunReport()
        self.todo: list[Run] = []
        self.stores: dict[str, ResultStore] = {}
        self.keys: dict[str, set[str]] = {}
        self.planned: set[str] = set()
        # Messages by row: with missing data, further runs of the row would repeat the failure.
        self.missing: dict[tuple[str, str], str] = {}

    def add(self, experiment: Experiment, runs: Sequence[Run]) -> None:
        """Add the runs without a stored result."""
        name = experiment.name
        store = self.stores.setdefault(name, ResultStore(self.output, name))
        self._read_keys(name)
        self.report.notes += store.notes
        for run in runs:
            if run.experiment != name:
                raise SpecError(f"run_experiments: a run of {run.experiment!r} is among the runs of {name!r}")
            key = key_of(run)
            if key in self.planned or (key in self.keys[name] and not self.again):
                self.report.skipped += 1
            else:
                self.planned.add(key)
                self.todo.append(run)

    def _read_keys(self, name: str) -> None:
        self.keys[name] = {result.key for result in self.stores[name].read()}

    def show(self, run: Run | None, finished: int) -> None:
        """Report the progress."""
        if self.progress is not None:
            self.progress(run, finished, len(self.todo))

    def begin(self, run: Run) -> bool:
        """Claim a run; return False to skip the run."""
        message = self.missing.get((run.experiment, run.row))
        if message is not None:
            self.report.failures.append(Failure(run, message, True))
            return False
        store, key = self.stores[run.experiment], key_of(run)
        if not store.claim(key):
            self.report.elsewhere.append(run)
            return False
        if not self.again and store.changed():
            self._read_keys(run.experiment)
        if not self.again and key in self.keys[run.experiment]:  # finished by another process
            store.release(key)
            self.report.skipped += 1
            return False
        return True

    def end(self, run: Run, outcome: Result | Failure) -> None:
        """Store and report a result, or report a failure."""
        if isinstance(outcome, Failure):
            self.report.failures.append(outcome)
            if outcome.missing:
                self.missing[run.experiment, run.row] = outcome.message
        else:
            self.stores[run.experiment].append(outcome)
            self.report.done.append(outcome)
        self.stores[run.experiment].release(key_of(run))

    def recheck_elsewhere(self) -> None:
        """Count runs finished by other processes in the meantime as skipped."""
        for name in {run.experiment for run in self.report.elsewhere}:
            self._read_keys(name)
        still = [run for run in self.report.elsewhere if self.again or key_of(run) not in self.keys[run.experiment]]
        self.report.skipped += len(self.report.elsewhere) - len(still)
        self.report.elsewhere = still


def _check(todo: Sequence[Run]) -> None:
    """Raise a `SpecError` for the first run with an invalid row or option, once for all seeds."""
    seen: set[tuple[str, str, str]] = set()
    with _threads(1):
        for run in todo:
            key = (run.experiment, run.row, run.method)
            if key not in seen:
                seen.add(key)
                importlib.import_module(PROCEDURES[run.procedure]).read_options(run)


def _require_writable(folder: str | Path) -> None:
    """Create the folder of the results; refuse a read-only folder before the first run."""
    with plain(folder, "write the results"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{show(folder)}: cannot write the results: the folder is read-only; use another --output")


def _key(run: Run | Result) -> tuple[str, str, str, int]:
    return run.experiment, run.row, run.method, run.seed


def _do(run: Run, module: str) -> Result | Failure:
    """Return the result of a run, or the error as data; interrupts propagate."""
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    wall, cpu = time.perf_counter(), _cpu_seconds()
    try:
        with _threads(run.threads):
            outcome = importlib.import_module(module).run(run)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{module}.run returned {type(outcome).__name__}, expected Outcome")
        seconds, cpu_seconds = time.perf_counter() - wall, _cpu_seconds() - cpu
        result = Result.of(run, outcome, started=started, seconds=seconds, cpu_seconds=cpu_seconds)
        result.data()  # values unknown to JSON are a failure of this run only
        return result
    except KapsiError as error:
        return Failure(run, " ".join(str(error).split()), isinstance(error, DataSetError))
    except MemoryError:
        return Failure(run, "out of memory")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        location = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        return Failure(run, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{location}")


def _cpu_seconds() -> float:
    """Return the CPU time of this process and finished children."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of threads used by torch and the linear algebra libraries, and restore it afterwards."""
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
    """Keep data sets off the network if there is no folder of data sets."""
    values = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", OFFLINE: "with --quick"}
    if folder or os.environ.get("KAPSI_DATA"):
        yield
        return
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)  # inherited by child processes
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
    """Spawned processes for runs; all end with this process; a dead process fails only the current run."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.context = get_context("spawn")

    def work(self, session: _Session) -> None:
        """Do all runs of a session."""
        waiting = list(reversed(session.todo))
        busy: dict[Any, tuple[Any, Run]] = {}
        finished = 0
        idle: list[tuple[Any, Any]] = []
        alive: list[Any] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self.count:
                    run = waiting.pop()
                    session.show(run, finished)
                    if not session.begin(run):
                        finished += 1
                        session.show(run, finished)
                        continue
                    process, pipe = idle.pop() if idle else self.start()
                    if process not in alive:
                        alive.append(process)
                    with contextlib.suppress(BrokenPipeError, ConnectionError):  # a dead process is found below
                        pipe.send((run, PROCEDURES[run.procedure]))
                    busy[pipe] = (process, run)
                if not busy:  # all remaining runs are done or elsewhere
                    continue
                for pipe in cast("list[Any]", connection.wait(list(busy))):
                    process, run = busy.pop(pipe)
                    outcome: Result | Failure
                    try:
                        outcome = pipe.recv()
                        idle.append((process, pipe))
                    except (EOFError, OSError):
                        process.join(5)
                        outcome = Failure(run, f"its process ended with {_ending(process.exitcode)}")
                    session.end(run, outcome)
                    finished += 1
                    session.show(run, finished)
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
    """Block interrupts during the imports of a new process; children inherit blocked signals."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting the tracker unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"{name}, perhaps out of memory" if name == "SIGKILL" else name
    return f"code {code}"


def _serve(pipe: Any) -> None:
    """Do runs from a pipe until the other end is closed."""
    # An interrupt at the terminal reaches all processes; the parent ends all children.
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
        outcome = _do(run, module)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed
            sys.stdout.flush()
        try:
            pipe.send(outcome)
        except (BrokenPipeError, ConnectionError):
            return


def _end_with_parent() -> None:
    """End this process after the parent."""
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def check_jobs(jobs: int, where: str = "jobs") -> None:
    """Check a number of processes.

    Raises:
        SpecError: not an integer from 1 to 1024.
    """
    check_integer(where, jobs, 1, 1024, wanted="1 to 1024 processes")
