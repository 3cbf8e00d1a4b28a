"""Results as JSON lines, a file for each experiment, with atomic appends.

A line holds experiment, row, method, protocol, seed, the configuration (a hash of its canonical JSON and a short form), versions,
machine, start, seconds and CPU seconds, score, validation, parameters, extra and curves. Non-finite numbers, unknown to JSON, are
the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import mmap
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from kapsi.errors import FileError
from kapsi.files import locked, one_line, plain, show, sync, unlock
from kapsi.notation import short_form
from kapsi.paper.experiment import Outcome, Run

FORMAT = 2
"""2 since the option names of 0.2; `results/convert_0_1.py` converts format 1."""
MAX_SHORT = 200
# Parts of the machine with a possible effect on results; memory is only recorded.
_DECISIVE = ("cpu", "cores", "accelerator", "os")


# ------------------------------------------------------------------------------------------------ keys


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
    """Return a hash of 16 hexadecimal digits of all properties of a run, except for seed, versions and machine."""
    return _hash(run.configuration())


def short(run: Run) -> str:
    """Return the options of a run in short notation."""
    text = short_form(run.options)
    text = text[1:-1] if text.startswith("{") else text
    return text if len(text) <= MAX_SHORT else f"{text[: MAX_SHORT - 1]}…"


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of kapsi, numerical packages and Python."""
    import numpy
    import sklearn
    import torch

    from kapsi.version import __version__

    packages = {"torch": torch, "numpy": numpy, "scikit-learn": sklearn}
    found = {name: str(package.__version__) for name, package in packages.items()}
    return MappingProxyType({"kapsi": __version__, **found, "python": platform.python_version()})


@functools.cache
def machine() -> Mapping[str, Any]:
    """Return processor, cores, memory in GiB, accelerator and operating system."""
    import torch

    return MappingProxyType(
        {
            "cpu": _cpu(),
            "cores": os.cpu_count() or 1,
            "memory_gib": _memory(),
            "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
            "os": f"{platform.system()} {platform.machine()}",
        }
    )


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "unknown"


def _memory() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):  # unknown on this system
        return None


# ------------------------------------------------------------------------------------------------ a result


@dataclass(frozen=True)
class Result:
    """A line of a store: a run and the outcome.

    Attributes:
        experiment, row, method, protocol, seed: what was run.
        configuration: `{"hash": …, "short": …, "threads": …}`.
        versions, machine: see `versions` and `machine`.
        started: date and time with zone, ISO 8601.
        seconds, cpu_seconds: wall-clock and CPU time of the whole run.
        score, validation, parameters, extra, curves: fields of the outcome.
        fit_seconds: CPU seconds counted by the procedure, None if not counted.
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
            dict(versions()),
            dict(machine()),
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
    def environment(self) -> str:
        """Hash of versions and machine; results of different environments are not mixed."""
        return _environment(self.versions, self.machine)

    @property
    def key(self) -> str:
        """Hash of configuration, seed, versions and machine."""
        return result_key(self.configuration.get("hash"), self.seed, self.versions, self.machine)

    def data(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"format": FORMAT, "key": self.key, **_plain(values)}

    @classmethod
    def from_data(cls, data: Any) -> Result:
        """Return the result of plain data.

        Raises:
            ValueError: invalid data.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"expected a mapping of format {FORMAT}")
        kinds: dict[str, type] = dict.fromkeys(("experiment", "row", "method", "protocol", "started"), str)
        kinds |= dict.fromkeys(("configuration", "versions", "machine", "extra", "curves"), dict)
        values: dict[str, Any] = {"seed": data.get("seed")}
        for name, kind in {**kinds, "seed": int}.items():
            values[name] = data.get(name)
            if not isinstance(values[name], kind) or isinstance(values[name], bool):
                raise ValueError(f"{name} is missing or of another type")
        for name in ("seconds", "cpu_seconds", "score"):
            values[name] = _number(data.get(name), name)
        for name in ("validation", "fit_seconds", "parameters"):
            values[name] = None if data.get(name) is None else _number(data[name], name)
        if values["parameters"] is not None:
            values["parameters"] = int(values["parameters"])
        values["curves"] = {name: [_number(v, name) for v in curve] for name, curve in values["curves"].items()}
        result = cls(**values)
        if data.get("key") != result.key:
            raise ValueError("its key belongs to another configuration, seed, version or machine")
        return result


def _environment(versions: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    return _hash([dict(versions), [machine.get(name) for name in _DECISIVE]])


def here() -> str:
    """Return the environment of this process."""
    return _environment(versions(), machine())


def result_key(configuration: str | None, seed: int, versions: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """Return the key of a result from the hash of its configuration, the seed, versions and machine."""
    return _hash([configuration, seed, _environment(versions, machine)])


def key_of(run: Run) -> str:
    """Return the key of a run's result in this process."""
    return result_key(configuration_hash(run), run.seed, versions(), machine())


def _number(value: Any, name: str) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    return float(value)


def _plain(data: Any) -> Any:
    """Convert data for JSON: NumPy and torch scalars become Python scalars, non-finite values strings."""
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
    raise FileError(f"a result contains {type(data).__name__}, unknown to JSON; give plain data")


# ------------------------------------------------------------------------------------------------ the file


class ResultStore:
    """The results of an experiment in a file, shared by several processes.

    Args:
        folder: folder of the file; created with the first result.
        experiment: name of the experiment and of the file.
    """

    def __init__(self, folder: str | Path, experiment: str) -> None:
        self.path = Path(folder) / f"{experiment}.jsonl"
        self.notes: list[str] = []
        self._claims: dict[str, FileLock] = {}
        self._seen: tuple[int, int] | None = None

    def read(self) -> list[Result]:
        """Return the results in the order of the file; `notes` lists skipped lines.

        Raises:
            FileError: unreadable file.
        """
        self.notes = []
        try:
            with open(self.path, "rb") as handle, locked(self._lock_path()):
                self._seen = _state(handle.fileno())
                content = handle.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise FileError(f"{show(self.path)}: cannot be read: {one_line(error)}; check the path") from None
        *lines, last = content.split(b"\n")
        if last:
            self.notes.append(f"{self.path}: the last line is cut off, probably by a kill; skipped")
        results = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                results.append(Result.from_data(json.loads(line)))
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                self.notes.append(f"{self.path}, line {number}: is not a result ({one_line(error)[:80]}); skipped")
        return results

    def append(self, result: Result) -> None:
        """Append a result and flush the file to the disk; an unfinished line of a killed process is removed first.

        Raises:
            FileError: the write fails.
        """
        line = (
            json.dumps(result.data(), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        )
        with plain(self.path, "write the results"):
            new = not self.path.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Some systems refuse to truncate in append mode; the lock keeps other processes away.
            handle = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            with handle, locked(self._lock_path()):
                alone = self._seen == _state(handle.fileno())
                end = _end_of_lines(handle)
                handle.truncate(end)
                handle.seek(end)
                try:
                    view = memoryview(line)
                    while view:
                        view = view[handle.write(view) :]
                    os.fsync(handle.fileno())
                    if alone:  # the new line is from this process
                        self._seen = _state(handle.fileno())
                except BaseException:  # an interrupt, a full disk
                    handle.truncate(end)
                    raise
            if new:
                sync(self.path.parent)

    def changed(self) -> bool:
        """Return whether the file has changed since `read`."""
        try:
            return _state(self.path) != self._seen
        except OSError:
            return False

    def claim(self, key: str) -> bool:
        """Claim the run of a key until `release`, `close` or the end of the process; return False if another process has it."""
        lock = FileLock(self._lock_path(key), blocking=False)
        try:
            lock.acquire()
        except Timeout:
            return False
        except OSError:  # no lock file can be created: assume that nobody else writes here
            return True
        self._claims[key] = lock
        return True

    def release(self, key: str) -> None:
        """Release the run of a key."""
        if key in self._claims:
            unlock(self._claims.pop(key))

    def close(self) -> None:
        """Release all runs, and delete the lock files of killed processes."""
        for key in list(self._claims):
            self.release(key)
        for path in self.path.parent.glob(self._lock_path("*").name):
            if self.claim(key := path.name.split(".")[-2]):
                self.release(key)

    def _lock_path(self, key: str = "file") -> Path:
        return self.path.with_name(f".{self.path.stem}.{key}.lock")


def _state(file: int | Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _end_of_lines(handle: Any) -> int:
    """Return the position after the last whole line."""
    size = os.fstat(handle.fileno()).st_size
    if not size:
        return 0
    with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1
