"""Checkpoints: safetensors files, written atomically with a checksum of their content.

A folder holds the last few files, `step-000000001200.safetensors`: tensors of the model and the solver, and as JSON metadata the
position in the data, the records and the description of the run. Reading a checkpoint executes no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import FileError, RunError, check_integer, check_number, refuse
from kapsi.files import atomic, check_place, clear, one_line, plain, remove, resolve, show

FORMAT = "kapsi checkpoint"
FORMAT_VERSION = 1
NAME = re.compile(r"step-([0-9]{12})\.safetensors")
FINISHED = "finished.txt"
"""Mark of finished work: a kill may come before the checkpoints are removed."""
TEMPORARY = re.compile(rf"\.({NAME.pattern}|{re.escape(FINISHED)})\.new-.*")
DELAY = 1.0
"""Seconds before the ends of short fits within a longer run are written."""


@dataclass
class Saved:
    """Content of a checkpoint.

    Args:
        step: number of steps since the beginning of the run.
        tensors: all tensors by name.
        data: plain data, convertible to JSON.
        path: path of the file, None before writing.
    """

    step: int
    tensors: dict[str, Tensor]
    data: dict[str, Any]
    path: Path | None = None


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


@dataclass
class Checkpoints:
    """Folder and frequency of checkpoints, from which an interrupted training run resumes.

    Args:
        folder: folder of the checkpoints, created by the first checkpoint.
        steps: number of steps between checkpoints, at least 1; None for no limit by steps.
        minutes: minutes between checkpoints, at least 0; None for no limit by time.
        keep: number of checkpoints kept, at least 1.
        resume: resume from the last undamaged checkpoint, if any; a finished run returns the saved records. The weights
            come from the checkpoint, whatever the initial weights of the model. Without `resume` a folder with checkpoints
            is an error.
        say: called with a message to the user, for example a warning of a damaged checkpoint.
        context: further plain data by readable names, which must be equal in a resumed run.
        least: seconds of work before an interrupt writes a checkpoint.

    Raises:
        SpecError: an option of a wrong type or out of range.

    Example:
        >>> import tempfile, torch, kapsi as kp
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> config = kp.TrainConfig(solver="adamw", epochs=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for resume in (False, True):  # the second run is finished already
        ...         model = kp.Model(kp.rpn([1, 1], expansion=kp.Chebyshev(4)), seed=0)
        ...         records = kp.fit(model, (x, x**3), config, checkpoints=kp.Checkpoints(folder, steps=1, resume=resume))
        >>> len(records)
        3
    """

    folder: str | Path
    steps: int | None = None
    minutes: float | None = 5.0
    keep: int = 3
    resume: bool = False
    say: Callable[[str], None] = _warn
    context: dict[str, Any] = field(default_factory=dict)
    least: float = 0.0
    _written: float = field(default_factory=time.monotonic, repr=False)
    _begun: float = field(default_factory=time.monotonic, repr=False)
    _pending: list[tuple[Path, Saved]] = field(default_factory=list, repr=False)
    _parent: Checkpoints | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path):
            refuse("Checkpoints(folder)", "the path of a folder, as a string or a Path", self.folder)
        if not callable(self.say):
            refuse("Checkpoints(say)", "a callable for a message, such as print", self.say)
        self.folder = Path(self.folder)
        check_integer("Checkpoints.keep", self.keep, 1)
        if self.steps is not None:
            check_integer("Checkpoints.steps", self.steps, 1)
        if self.minutes is not None:
            check_number("Checkpoints.minutes", self.minutes, 0)
        if not isinstance(self.resume, bool):
            refuse("Checkpoints.resume", "true or false", self.resume)

    def part(self, name: str) -> Checkpoints:
        """Return checkpoints of a fit among several, in a sub-folder; all fits share a clock."""
        return replace(self, folder=Path(self.folder) / name, _parent=self._parent or self)

    # -------------------------------------------------------------------------------- writing

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.minutes is not None and time.monotonic() - (self._parent or self)._written >= 60 * self.minutes

    def worth(self) -> bool:
        """Return whether an interrupt is worth a checkpoint."""
        return time.monotonic() - (self._parent or self)._begun >= self.least

    def write(self, saved: Saved) -> None:
        """Write a checkpoint atomically, and delete old ones."""
        root = self._parent or self
        for path, earlier in root._pending:
            _write(path, earlier)
        root._pending.clear()
        folder = Path(self.folder)
        _write(folder / f"step-{saved.step:012}.safetensors", saved)
        root._written = time.monotonic()
        # Files of later steps are damaged: otherwise the run would have resumed from them.
        earlier_ones = [path for step, path in self._present() if step <= saved.step]
        with plain(folder, "delete old checkpoints"):
            for path in earlier_ones[self.keep :]:
                path.unlink(missing_ok=True)

    def finish(self, saved: Saved) -> None:
        """Write the end of a fit; for many short fits, together with the next checkpoint."""
        root = self._parent
        if root is None or time.monotonic() - root._written >= DELAY:
            self.write(saved)
        else:
            copied = {name: tensor.detach().clone() for name, tensor in saved.tensors.items()}
            root._pending.append(
                (Path(self.folder) / f"step-{saved.step:012}.safetensors", Saved(saved.step, copied, saved.data))
            )

    def finish_all(self, mark: str) -> None:
        """Note beside the checkpoints, if there are any, that the work is finished, with a checksum of its result."""
        if Path(self.folder).is_dir():
            with atomic(Path(self.folder) / FINISHED) as temporary:
                temporary.write_text(mark, encoding="ascii")

    def finished(self) -> str:
        """Return the checksum of a finished result, empty for unfinished work."""
        file = Path(self.folder) / FINISHED
        return file.read_text(encoding="ascii", errors="replace")[:64] if file.is_file() else ""

    def found(self) -> list[Path]:
        """Return all checkpoints of the folder and sub-folders."""
        return sorted(
            Path(folder) / name for folder, _, names in os.walk(self.folder) for name in names if NAME.fullmatch(name)
        )

    def remove(self) -> None:
        """Delete all checkpoints and the emptied folders; other files stay."""
        for folder, folders, names in os.walk(self.folder, topdown=False):
            for name in (*folders, *names):
                if NAME.fullmatch(name) or TEMPORARY.fullmatch(name) or name == FINISHED:
                    remove(Path(folder) / name)
            with suppress(OSError):  # not empty
                os.rmdir(folder)

    # -------------------------------------------------------------------------------- reading

    def _present(self) -> list[tuple[int, Path]]:
        """Return step and path of all checkpoints, the last first, after deleting files of killed processes."""
        folder = Path(self.folder)
        if not folder.is_dir():
            return []
        present = []
        for name in os.listdir(folder):
            if match := NAME.fullmatch(name):
                present.append((int(match[1]), folder / name))
            elif match := TEMPORARY.fullmatch(name):
                clear(folder / match[1])
        return sorted(present, reverse=True)

    def _check_place(self) -> None:
        """Raise a `RunError` if the folder cannot be written: the first checkpoint may be minutes away."""
        target = resolve(self.folder)
        try:
            # A file in the future folder: the path of the folder may be a file.
            check_place(target / "checkpoint", show(self.folder), "give another folder for checkpoints")
        except FileError as error:
            raise RunError(str(error)) from None

    def latest(self) -> Saved | None:
        """Return the last undamaged checkpoint, or None without checkpoints; report damaged ones.

        Raises:
            RunError: all checkpoints are damaged, there are checkpoints without `resume`, or the folder cannot be written.
        """
        with plain(self.folder, "read the checkpoints"):
            present = self._present()
        where = show(self.folder)
        if not present:
            self._check_place()
            return None
        if not self.resume:
            raise RunError(f"{where}: has checkpoints of an earlier run; resume it, or give another folder")
        for _, path in present:
            saved, reason = _read(path)
            if saved is not None:
                return saved
            others = "the previous one is used" if path != present[-1][1] else "there is no previous one"
            self.say(f"{show(path)}: this checkpoint is damaged ({reason}); {others}")
        raise RunError(f"{where}: all checkpoints are damaged; delete the folder, or fit without resuming")


def _digest(data: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(data.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(path: Path, saved: Saved) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Copy tensors with shared memory: the file stores each separately.
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in saved.tensors.items():
        whole = tensor.detach().cpu().contiguous()
        tensors[name] = whole.clone() if whole.numel() and whole.untyped_storage().data_ptr() in seen else whole
        seen.add(whole.untyped_storage().data_ptr())
    data = json.dumps(saved.data)
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "data": data,
        "checksum": _digest(data, tensors),
    }
    with atomic(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:  # a full disk
            raise FileError(
                f"{show(path)}: cannot write the checkpoint: {one_line(error)}; make room, then resume from the previous one"
            ) from error


def _read(path: Path) -> tuple[Saved | None, str]:
    """Return a checkpoint, or None and the damage."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        return None, one_line(error)
    if metadata.get("format") != FORMAT:
        return None, "its metadata are not of a checkpoint"
    version = metadata.get("format_version", "")
    if version.isdecimal() and len(version) < 9 and int(version) > FORMAT_VERSION:
        raise RunError(
            f"{show(path)}: has format version {version}, this kapsi reads up to {FORMAT_VERSION}; upgrade kapsi"
        )
    data = metadata.get("data", "")
    if metadata.get("checksum") != _digest(data, tensors):
        return None, "its checksum does not match"
    match = NAME.fullmatch(path.name)
    return Saved(int(match[1]) if match else 0, tensors, json.loads(data), path), ""


def differences(given: dict[str, Any], saved: dict[str, Any], ignored: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names and both values of differing options."""
    for name in sorted(given.keys() | saved.keys()):
        if name not in ignored and given.get(name) != saved.get(name):
            yield f"{name} {given.get(name)!r} (in the checkpoint {saved.get(name)!r})"
