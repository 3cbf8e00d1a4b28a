"""Results as JSON lines, one file an experiment: appended whole or not at all, keyed by what they depend on.

A line has the experiment, row, method, protocol, seed, the configuration (a hash of its canonical JSON and a short text), the
versions, the machine, when it began, seconds and CPU seconds, score, validation, parameters, extra and curves. Numbers that are
not finite are the texts "nan", "inf" and "-inf", which JSON has no numbers for.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kapsi.errors import FileError
from kapsi.files import one_line, plain, show, sync
from kapsi.function import short_form
from kapsi.paper.experiment import Outcome, Run

__all__ = ["Result", "ResultStore", "canonical", "configuration_hash", "machine", "short", "versions"]

FORMAT = 1
SHORTEST = 200
# What a number may depend on; memory and the like are told and do not count.
_COUNTING = ("cpu", "cores", "accelerator", "os")


# ------------------------------------------------------------------------------------------------ what results depend on


def canonical(data: Any) -> str:
    """Return plain data as JSON with sorted keys and no spaces: equal for equal data.

    Example:
        >>> canonical({"b": 1, "a": [1.5, None]})
        '{"a":[1.5,null],"b":1}'
    """
    return json.dumps(_plain(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _hash(data: Any) -> str:
    return hashlib.sha256(canonical(data).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def configuration_hash(run: Run) -> str:
    """Return 16 letters that stand for all that a run depends on besides seed, versions and machine."""
    return _hash(run.configuration())


def short(run: Run) -> str:
    """Return the options of a run in a short readable form."""
    text = short_form(run.options)
    text = text[1:-1] if text.startswith("{") else text
    return text if len(text) <= SHORTEST else f"{text[: SHORTEST - 1]}…"


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    import numpy
    import sklearn
    import torch

    from kapsi.version import __version__

    return (
        ("kapsi", __version__),
        ("torch", torch.__version__),
        ("numpy", numpy.__version__),
        ("scikit-learn", sklearn.__version__),
        ("python", platform.python_version()),
    )


def versions() -> dict[str, str]:
    """Return the versions of kapsi and of what it computes with."""
    return dict(_versions())


@functools.cache
def _machine() -> tuple[tuple[str, Any], ...]:
    import torch

    accelerator = None
    if torch.cuda.is_available():
        accelerator = torch.cuda.get_device_name(0)
    return (
        ("cpu", _cpu()),
        ("cores", os.cpu_count() or 1),
        ("memory_gib", _memory()),
        ("accelerator", accelerator),
        ("os", f"{platform.system()} {platform.machine()}"),
    )


def machine() -> dict[str, Any]:
    """Return what this machine is: processor, cores, memory in GiB, accelerator, operating system."""
    return dict(_machine())


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "unknown"


def _memory() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return None


# ------------------------------------------------------------------------------------------------ a result


@dataclass(frozen=True)
class Result:
    """One line of a store: a run and what came of it.

    Attributes:
        experiment, row, method, protocol, seed: which run.
        configuration: `{"hash": …, "short": …, "threads": …}`.
        versions, machine: see `versions` and `machine`.
        started: date and time with zone, ISO 8601.
        seconds, cpu_seconds: of the whole run.
        score, validation, parameters, extra, curves: of the outcome; `fit_seconds` where the procedure counts its own.
    """

    experiment: str
    row: str
    method: str
    protocol: str
    seed: int
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    started: str
    seconds: float
    cpu_seconds: float
    score: float
    validation: float | None = None
    parameters: int | None = None
    fit_seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, outcome: Outcome, *, started: str, seconds: float, cpu_seconds: float) -> Result:
        """Return the result of a run on this machine."""
        return cls(
            run.experiment,
            run.row,
            run.method,
            run.protocol,
            run.seed,
            {"hash": configuration_hash(run), "short": short(run), "threads": run.threads},
            versions(),
            machine(),
            started,
            seconds,
            cpu_seconds,
            float(outcome.score),
            None if outcome.validation is None else float(outcome.validation),
            None if outcome.parameters is None else int(outcome.parameters),
            None if outcome.seconds is None else float(outcome.seconds),
            dict(outcome.extra),
            {name: [float(value) for value in values] for name, values in outcome.curves.items()},
        )

    @property
    def setting(self) -> str:
        """The versions and the machine as 16 letters: results of another setting are another matter."""
        return _setting(self.versions, self.machine)

    @property
    def key(self) -> str:
        """What makes a result the same one: configuration, seed, versions, machine."""
        return _hash([self.configuration["hash"], self.seed, self.setting])

    def data(self) -> dict[str, Any]:
        """Return the result as plain data that JSON has."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"format": FORMAT, "key": self.key, **_plain(values)}

    @classmethod
    def from_data(cls, data: Any) -> Result:
        """Return the result of plain data.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(data, dict):
            raise ValueError("expected a mapping")
        if data.get("format") != FORMAT:
            raise ValueError(f"has format {data.get('format')!r}, this version of kapsi reads {FORMAT}")
        kinds: dict[str, Any] = {
            "experiment": str,
            "row": str,
            "method": str,
            "protocol": str,
            "seed": int,
            "configuration": dict,
            "versions": dict,
            "machine": dict,
            "started": str,
            "extra": dict,
            "curves": dict,
        }
        values: dict[str, Any] = {}
        for name, kind in kinds.items():
            if not isinstance(data.get(name), kind) or isinstance(data[name], bool):
                raise ValueError(f"{name} is missing or not of its type")
            values[name] = data[name]
        if not isinstance(values["configuration"].get("hash"), str):
            raise ValueError("configuration has no hash")
        for name, needed in (
            ("seconds", True),
            ("cpu_seconds", True),
            ("score", True),
            ("validation", False),
            ("fit_seconds", False),
        ):
            values[name] = _number(data.get(name), name, needed)
        parameters = data.get("parameters")
        if parameters is not None and (isinstance(parameters, bool) or not isinstance(parameters, int)):
            raise ValueError("parameters is not a whole number")
        values["parameters"] = parameters
        values["curves"] = {
            name: [_number(value, name, True) for value in given] for name, given in values["curves"].items()
        }
        made = cls(**values)
        if data.get("key") != made.key:
            raise ValueError("its key is that of another configuration, seed, version or machine")
        return made


def _setting(of_versions: Mapping[str, Any], of_machine: Mapping[str, Any]) -> str:
    return _hash([dict(of_versions), [of_machine.get(name) for name in _COUNTING]])


def here() -> str:
    """Return the setting of this process: its versions and machine."""
    return _setting(versions(), machine())


def key_of(run: Run) -> str:
    """Return the key that the result of a run has here."""
    return _hash([configuration_hash(run), run.seed, here()])


def _number(value: Any, name: str, needed: bool) -> float | None:
    if value is None and not needed:
        return None
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    return float(value)


def _plain(data: Any) -> Any:
    """Return data as JSON has it: numbers of numpy and torch as Python's, those that are not finite as texts."""
    if data is None or isinstance(data, str | bool | int):
        return data
    if isinstance(data, float):
        return float(data) if math.isfinite(data) else ("nan" if math.isnan(data) else "inf" if data > 0 else "-inf")
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if hasattr(data, "tolist"):
        return _plain(data.tolist())
    raise FileError(f"a result has {type(data).__name__}, which JSON does not have; give plain data")


# ------------------------------------------------------------------------------------------------ the file


class ResultStore:
    """The results of one experiment in one file, which several processes may append to.

    Args:
        folder: where the file is; made when the first result is written.
        experiment: its name, which the file is called after.
    """

    def __init__(self, folder: str | Path, experiment: str) -> None:
        self.path = Path(folder) / f"{experiment}.jsonl"
        self.notes: list[str] = []
        self._claims: Any = None
        self._seen: tuple[int, int] | None = None

    def read(self) -> list[Result]:
        """Return the results in the order of the file; `notes` then says what was left out.

        Raises:
            FileError: the file cannot be read.
        """
        self.notes = []
        try:
            with open(self.path, "rb") as handle, _locked(handle, shared=True):
                self._seen = _state(handle.fileno())
                content = handle.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise FileError(f"{show(self.path)}: cannot be read: {one_line(error)}; check the path") from None
        *lines, last = content.split(b"\n")
        if last:
            self.notes.append(f"{self.path}: the last line is cut off, as a kill leaves it; it is left out")
        results = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                results.append(Result.from_data(json.loads(line)))
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                self.notes.append(f"{self.path}, line {number}: is no result ({one_line(error)[:80]}); it is left out")
        return results

    def append(self, result: Result) -> None:
        """Write a result at the end, down to the disk; what a kill left of an unfinished line is cut off first.

        Raises:
            FileError: the file cannot be written.
        """
        line = (
            json.dumps(result.data(), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        )
        with plain(self.path, "write the results"):
            new = not self.path.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Not in append mode, which some systems do not let one cut: the lock keeps others away.
            handle = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            with handle, _locked(handle):
                alone = self._seen == _state(handle.fileno())
                end = _end_of_lines(handle)
                handle.truncate(end)
                handle.seek(end)
                try:
                    view = memoryview(line)
                    while view:
                        view = view[handle.write(view) :]
                    os.fsync(handle.fileno())
                    if alone:  # what is new is our own
                        self._seen = _state(handle.fileno())
                except BaseException:  # an interrupt, a full disk
                    handle.truncate(end)
                    raise
            if new:
                sync(self.path.parent)

    # Other processes may do runs of the same experiment at the same time. A lock on one byte of a file stands for one run; it ends
    # with the process, however that ends.

    def changed(self) -> bool:
        """Return whether the file is another one than `read` saw."""
        try:
            return _state(self.path) != self._seen
        except OSError:
            return False

    def claim(self, key: str) -> bool:
        """Return whether no other process is at the run of a key; no other one can claim it then, until `release` or `close`."""
        path = self._running
        with suppress(ImportError, OSError):  # where there are no locks (Windows, some network disks) one is alone
            import fcntl

            for attempt in range(100):
                if self._claims is None:
                    self._claims = open(path, "ab")  # noqa: SIM115
                try:
                    fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:15], 16))
                except (BlockingIOError, PermissionError):
                    if attempt < 3:  # it may be one that is about to delete the file, which takes no time
                        time.sleep(0.01)
                        continue
                    return False
                if path.exists() and os.path.samestat(os.fstat(self._claims.fileno()), os.stat(path)):
                    return True
                # Another process deleted it, as it had no locks: those of a deleted file are nobody's.
                self._claims.close()
                self._claims = None
        return True

    def release(self, key: str) -> None:
        """Give a run back."""
        with suppress(ImportError, OSError):
            import fcntl

            if self._claims is not None:
                fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, int(key[:15], 16))

    def close(self) -> None:
        """Give all runs back, and delete the file of the locks, also one that a kill left, where no other process has a lock."""
        with suppress(ImportError, OSError):
            import fcntl

            if self._claims is None and self._running.exists():
                self._claims = open(self._running, "ab")  # noqa: SIM115
            if self._claims is not None:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(self._running)
        if self._claims is not None:
            self._claims.close()
            self._claims = None

    @property
    def _running(self) -> Path:
        return self.path.with_name(f".{self.path.stem}.running")


def _state(file: int | Path) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def _end_of_lines(handle: Any) -> int:
    """Return where the last whole line ends."""
    place: int = handle.seek(0, os.SEEK_END)
    while place > 0:
        start = max(0, place - 65536)
        handle.seek(start)
        block = b""
        while len(block) < place - start:
            more = handle.read(place - start - len(block))
            if not more:
                break
            block += more
        found = block.rfind(b"\n")
        if found >= 0:
            return start + found + 1
        place = start
    return 0


@contextmanager
def _locked(handle: BinaryIO | Any, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a file, which ends with the process; where there is none (Windows, some network disks) one writes alone."""
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    yield  # closing the file unlocks it
