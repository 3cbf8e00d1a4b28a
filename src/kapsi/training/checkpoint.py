"""Checkpoints: one safetensors file each, written beside and renamed, with a checksum of everything in it.

A folder has the last few, `step-000000001200.safetensors`; the weights of the model, what the solver knows, and as JSON in the
metadata the position in the data, the records so far and what the run is. Nothing in them is executed when they are read.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import FileError, RunError, SpecError
from kapsi.files import atomic, check_place, clear, plain, resolve, show

__all__ = ["Checkpoints", "Saved"]

FORMAT = "kapsi checkpoint"
FORMAT_VERSION = 1
NAME = re.compile(r"step-([0-9]{12})\.safetensors")
LEFT = re.compile(r"\.(step-[0-9]{12}\.safetensors)\.new-.*")
SOON = 1.0
"""Seconds of work of short fits that are done but not yet written, within a longer run."""


@dataclass
class Saved:
    """What a checkpoint holds.

    Args:
        step: number of steps since the beginning of the run.
        tensors: all tensors by name.
        data: plain data that JSON can hold.
        path: the file, None for one that is not written yet.
    """

    step: int
    tensors: dict[str, Tensor]
    data: dict[str, Any]
    path: Path | None = None


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


@dataclass
class Checkpoints:
    """Where and how often a training run is written down, so that it can go on after it was killed.

    Args:
        folder: where the checkpoints are; it is made when the first one is written.
        steps: one every so many steps; None: not by steps.
        minutes: one after so many minutes at the latest; None: not by time.
        keep: so many of the last ones are kept.
        resume: go on from the last whole one, if there is any; a run that is over returns what it was. Without it a folder that
            has checkpoints is refused.
        say: called with a line for the user: a checkpoint that is damaged, a machine that computes otherwise.
        context: further plain data that has to be the same for the run to go on, by names for people.
        least: seconds of work below which an interrupt is not written down.

    Raises:
        SpecError: an option out of range.

    Example:
        >>> import tempfile, torch, kapsi as kp
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> config = kp.TrainConfig(solver="adamw", epochs=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for resume in (False, True):  # the second run finds that there is nothing left to do
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
            raise SpecError(f"Checkpoints({self.folder!r}): expected the path of a folder, as text or a Path")
        self.folder = Path(self.folder)
        if not isinstance(self.resume, bool):
            raise SpecError(f"Checkpoints(resume={self.resume!r}): resume must be True or False")
        if not callable(self.say):
            raise SpecError(f"Checkpoints(say={self.say!r}): say must be callable with a line of text, such as print")
        for name, value, least in (("steps", self.steps, 1), ("keep", self.keep, 1), ("minutes", self.minutes, 0)):
            wanted = int if name != "minutes" else (int, float)
            if value is None and name != "keep":
                continue
            if isinstance(value, bool) or not isinstance(value, wanted) or not value >= least:
                raise SpecError(f"Checkpoints({name}={value!r}): {name} must be at least {least}")

    def part(self, name: str) -> Checkpoints:
        """Return the checkpoints of one fit of several, in a folder within this one; its time counts with that of the others."""
        root = self._parent or self
        return Checkpoints(
            Path(self.folder) / name,
            self.steps,
            self.minutes,
            self.keep,
            self.resume,
            self.say,
            self.context,
            self.least,
            _parent=root,
        )

    # -------------------------------------------------------------------------------- writing

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is to be written after so many steps."""
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.minutes is not None and time.monotonic() - (self._parent or self)._written >= 60 * self.minutes

    def worth(self) -> bool:
        """Return whether there is enough work done to write down an interrupt."""
        return time.monotonic() - (self._parent or self)._begun >= self.least

    def write(self, saved: Saved) -> None:
        """Write a checkpoint, beside and renamed, and delete those that are too old."""
        root = self._parent or self
        for path, earlier in root._pending:
            _write(path, earlier)
        root._pending.clear()
        folder = Path(self.folder)
        _write(folder / f"step-{saved.step:012}.safetensors", saved)
        root._written = time.monotonic()
        # Those of later steps are damaged, or the run would have gone on from them: they do not count.
        earlier_ones = [path for step, path in self._present() if step <= saved.step]
        with plain(folder, "delete old checkpoints"):
            for path in earlier_ones[self.keep :]:
                path.unlink(missing_ok=True)

    def finish(self, saved: Saved) -> None:
        """Write the end of a fit; where it is one of many short ones, with the next that is written."""
        root = self._parent
        if root is None or time.monotonic() - root._written >= SOON:
            self.write(saved)
        else:
            copied = {name: tensor.detach().clone() for name, tensor in saved.tensors.items()}
            root._pending.append(
                (Path(self.folder) / f"step-{saved.step:012}.safetensors", Saved(saved.step, copied, saved.data))
            )

    def found(self) -> list[Path]:
        """Return all checkpoints of the folder and of its parts."""
        found = []
        for folder, _, names in os.walk(self.folder):
            found += [Path(folder) / name for name in names if NAME.fullmatch(name)]
        return sorted(found)

    def remove(self) -> None:
        """Delete all checkpoints, when what they led to is safe, and the folders that are empty then; other files stay."""
        for folder, _, names in os.walk(self.folder, topdown=False):
            for name in names:
                if NAME.fullmatch(name) or LEFT.fullmatch(name):
                    with suppress(OSError):
                        (Path(folder) / name).unlink()
            with suppress(OSError):  # what somebody else put there
                os.rmdir(folder)

    # -------------------------------------------------------------------------------- reading

    def _present(self) -> list[tuple[int, Path]]:
        """Return the files that are there, the last first, without what killed processes left."""
        folder = Path(self.folder)
        if not folder.is_dir():
            return []
        found = []
        for name in os.listdir(folder):
            match = NAME.fullmatch(name)
            left = LEFT.fullmatch(name)
            if match:
                found.append((int(match[1]), folder / name))
            elif left:
                clear(folder / left[1])
        return sorted(found, reverse=True)

    def _check_place(self) -> None:
        """Raise a `RunError` where no folder can be made or written to: the first checkpoint may be minutes away."""
        target = resolve(self.folder)
        try:
            # A file of the folder that is to be: the folder itself may be what is in the way.
            check_place(target / "checkpoint", show(self.folder), "give another folder for checkpoints")
        except FileError as error:
            raise RunError(str(error)) from None

    def latest(self) -> Saved | None:
        """Return the last whole checkpoint, None where there is none; a damaged one is named and the one before it taken.

        Raises:
            RunError: there are checkpoints, but none is whole, or `resume` was not given; or none can be written here.
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
            others = "the one before it is used" if path != present[-1][1] else "it is the last one there is"
            self.say(f"{show(path)}: this checkpoint is damaged ({reason}); {others}")
        raise RunError(f"{where}: no checkpoint in it is whole; delete the folder, or fit without resuming")


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

    # A copy where memory is shared or not in one piece: the file has each tensor by itself.
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in saved.tensors.items():
        own = tensor.detach().cpu().contiguous()
        tensors[name] = own.clone() if own.numel() and own.untyped_storage().data_ptr() in seen else own
        seen.add(own.untyped_storage().data_ptr())
    data = json.dumps(saved.data)
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "data": data,
        "checksum": _digest(data, tensors),
    }
    with atomic(path) as beside:
        try:
            save_file(tensors, beside, metadata)
        except SafetensorError as error:  # what the disk says: it is full, or does not answer
            reason = " ".join(str(error).split())
            raise FileError(
                f"{show(path)}: cannot write the checkpoint: {reason}; make room, then go on from the one before it"
            ) from error


def _read(path: Path) -> tuple[Saved | None, str]:
    """Return a checkpoint, or None and what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        return None, " ".join(str(error).split())
    if metadata.get("format") != FORMAT:
        return None, "its metadata does not say that it is one"
    version = metadata.get("format_version", "")
    if version.isdecimal() and len(version) < 9 and int(version) > FORMAT_VERSION:
        raise RunError(
            f"{show(path)}: has format version {version}, this kapsi reads up to {FORMAT_VERSION}; upgrade kapsi"
        )
    data = metadata.get("data", "")
    if metadata.get("checksum") != _digest(data, tensors):
        return None, "its checksum is another one"
    match = NAME.fullmatch(path.name)
    return Saved(int(match[1]) if match else 0, tensors, json.loads(data), path), ""


def differences(given: dict[str, Any], saved: dict[str, Any], ignored: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of options that differ, with both values."""
    for name in sorted(given.keys() | saved.keys()):
        if name not in ignored and given.get(name) != saved.get(name):
            yield f"{name} {given.get(name)!r} (in the checkpoint {saved.get(name)!r})"
