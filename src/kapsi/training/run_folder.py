"""Run folders, replaced atomically: a kill at any moment leaves either the old run or the new run, complete.

Temporary neighbours of a run ``name``: ``.name.new-PID-HOST`` (the run being written), ``.name.old`` (the run being replaced,
always complete), ``.name.gone-PID-HOST`` (a replaced run being deleted) and ``.name.lock``. `recover` cleans up after killed
processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kapsi.errors import RunError
from kapsi.files import (
    beside,
    check_place,
    claim,
    clear,
    live,
    locked,
    one_line,
    plain,
    remove,
    resolve,
    show,
    sync,
    unmake,
    write_json,
)

FORMAT_VERSION = 2
_FORMAT = "kapsi run"
_MANIFEST = "run.json"
REPORT = "report.html"
"""A page about the run, written after it: no file of the run, never copied to the run that replaces it."""


class NewRun:
    """Write a run folder: a context manager moving the folder to its path at the end, complete or not at all.

    Args:
        path: path of the run. Missing parent folders are created; a symbolic link is followed.
        overwrite: replace an existing kapsi run, never another folder. Files added by the user are kept unless the new run
            has a file of the same name.

    Attributes:
        folder: temporary folder for the files of the run, without sub-folders.
        manifest: entries of run.json in addition to the format, the version and the list of files.
        on_sealed: called with the SHA-256 of run.json before the folder is moved.

    Raises:
        RunError: the path is in use or cannot be written, at the beginning or at the end.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.manifest: dict[str, Any] = {}
        self.on_sealed: Callable[[str], None] | None = None
        self._overwrite = overwrite
        self._target = resolve(path)
        self.folder = beside(self._target, "new")
        self._parents: list[Path] = []

    def __enter__(self) -> Self:
        with plain(self.path, "begin the run"):
            here = resolve(".")
            if self._target in (here, *here.parents):
                raise RunError(f"{show(self.path)}: is the current folder or one above it; give another --output")
            recover(self._target)
            with _lock(self._target):
                self._check()
            self._parents = claim(self.path, self._target, self.folder)
            try:
                os.mkdir(self.folder)
            except BaseException:
                live.discard(self.folder)
                unmake(self._parents)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with plain(self.path, "write the run"):
                    self._seal()
                    if self.on_sealed is not None:
                        self.on_sealed(_fingerprint(self.folder / _MANIFEST)["sha256"])
                    self._swap()
        finally:
            remove(self.folder)  # missing after a successful swap
            live.discard(self.folder)
            unmake(self._parents)  # only empty folders

    def _check(self) -> str:
        """Return the state of the path; raise a `RunError` if the run cannot be written."""
        state, where, old = _state(self._target), show(self.path), beside(self._target, "old")
        if state == "other":
            kind = "a folder without a kapsi run" if self._target.is_dir() else "not a folder"
            raise RunError(f"{where}: is {kind}, never replaced, even with --overwrite; give another --output")
        if state == "run":
            problem = None
            if not self._overwrite:
                problem = "a run is already there; give --overwrite to replace it, or another --output"
            elif not os.access(self._target, os.W_OK | os.X_OK):
                problem = "the existing run is write-protected; make it writable, or give another --output"
            elif os.path.lexists(old):
                problem = f"{show(old)} is in the way of replacing the run; move or delete it"
            if problem is not None:
                raise RunError(f"{where}: {problem}")
        return state

    def _seal(self) -> None:
        files = {}
        for name in sorted(set(os.listdir(self.folder)) - {_MANIFEST}):
            file = self.folder / name
            if not _is_plain_name(name) or file.is_symlink() or not file.is_file():
                raise RunError(f"{show(self.path)}: {name!r} cannot be in a run: only files with plain names can")
            files[name] = _fingerprint(file)
        head = {"format": _FORMAT, "format_version": FORMAT_VERSION}
        write_json(self.folder / _MANIFEST, head | self.manifest | head | {"files": files})

    def _swap(self) -> None:
        old = beside(self._target, "old")
        with _lock(self._target):
            _mend(self._target)
            state = self._check()  # again: another process may have written the path meanwhile
            if state == "run":
                _carry_over(self._target, self.folder)
            if state != "free":
                shutil.copymode(self._target, self.folder)
            for folder, _, names in os.walk(self.folder):
                for path in (*(Path(folder, name) for name in names), Path(folder)):
                    if not path.is_symlink():
                        sync(path)
            try:
                if state == "run":
                    os.rename(self._target, old)
                os.rename(self.folder, self._target)
                sync(self._target.parent)
            finally:  # delete the old run, or restore it after an error between the two renames
                _mend(self._target)


def check_new(path: str | Path, *, overwrite: bool = False) -> None:
    """Check that a run can be written, before long work.

    Raises:
        RunError: see `NewRun`.
    """
    recover(path)
    with plain(path, "begin the run"), _lock(resolve(path)):
        NewRun(path, overwrite=overwrite)._check()
    check_place(resolve(path).parent / "run", show(path), "give another --output")


def recover(path: str | Path) -> str | None:
    """Clean up after killed processes; return a message if the previous run was restored.

    Raises:
        RunError: the previous run cannot be restored.
    """
    target = resolve(path)
    clear(target)
    if not any(os.path.lexists(beside(target, kind)) for kind in ("old", "lock")):
        return None
    with plain(path, "restore the run after an interrupted replacement"), _lock(target):
        restored = _mend(target)
    return f"{show(path)}: replacing this run was interrupted; the previous run is restored" if restored else None


def open_run(path: str | Path) -> dict[str, Any]:
    """Recover a run folder, verify the checksums of all files, and return the content of run.json.

    Raises:
        RunError: the run is missing, damaged (the message names the file), or written by a newer version of kapsi.
    """
    return read_run(path)[0]


def read_run(path: str | Path, names: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the content of run.json and of named files, each opened once: the verified bytes are the returned bytes.

    A run replaced meanwhile is either old or new as a whole, or refused.

    Args:
        path: the run folder, recovered first; all its files are verified.
        names: files to return; files absent from run.json are left out.

    Raises:
        RunError: see `open_run`.
    """
    recover(path)
    target = resolve(path)
    with plain(path, "read the run"), _lock(target):
        if not (target / _MANIFEST).is_file():
            missing = "no such run folder; check the path, or create the run with kapsi fit"
            other = f"is not a run folder (no {_MANIFEST}); give a folder written by kapsi fit"
            raise RunError(f"{show(path)}: {other if os.path.lexists(target) else missing}")
        contents: dict[str, bytes] = {}
        data, problem = _verify(target, names, contents)
        if problem:
            raise RunError(f"{show(path)}: {problem}")
        return data, contents


def free_path(path: str | Path) -> Path:
    """Return the path if unused, else path-2, path-3 and so on.

    Raises:
        RunError: the path is the root folder, or a run cannot be recovered.
    """
    base = Path(path) if Path(path).name not in ("", "..") else resolve(path)
    if not base.name:
        raise RunError(f"{show(path)}: is the root folder; give the path of a sub-folder")
    candidate, number = base, 1
    while _is_taken(candidate):
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


def check_deletable(path: str | Path) -> None:
    """Check that a folder is a run, holds no other files, and may be deleted.

    Raises:
        RunError: otherwise; the message names the first files of others.
    """
    recover(path)
    _check_deletable(path, resolve(path))


def _check_deletable(path: str | Path, target: Path) -> None:
    manifest = peek(target)
    if manifest is None:
        what = "is not a run folder" if os.path.lexists(target) else "there is no such run folder"
        raise RunError(f"{show(path)}: {what}; kapsi runs lists the runs of a folder")
    files = manifest.get("files")
    others = sorted(set(os.listdir(target)) - {_MANIFEST, REPORT} - set(files if isinstance(files, dict) else ()))
    if others:
        listed = ", ".join(map(repr, others[:3])) + (", …" if len(others) > 3 else "")
        raise RunError(f"{show(path)}: has files that are not of the run: {listed}; move them, or delete the folder")
    if os.path.islink(path):
        raise RunError(f"{show(path)}: is a symbolic link; give the path of the run, {show(target)}")


def delete_run(path: str | Path) -> None:
    """Delete a run: a kill at any moment leaves the run whole, or a hidden folder that `recover` removes.

    Raises:
        RunError: see `check_deletable`, or the folder is write-protected.
    """
    target = resolve(path)
    with plain(path, "delete the run"), _lock(target):
        _check_deletable(path, target)
        gone = beside(target, "gone")
        remove(gone)
        os.rename(target, gone)
        sync(target.parent)
        remove(gone)


def _is_taken(path: Path) -> bool:
    recover(path)
    target = resolve(path)
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(target.parent)
    hidden = (f".{target.name}.old", f".{target.name}.new-")
    return os.path.lexists(path) or any(name == hidden[0] or name.startswith(hidden[1]) for name in names)


def _lock(target: Path) -> AbstractContextManager[None]:
    """Return a context excluding other processes from reading or replacing the run."""
    return locked(beside(target, "lock"))


def peek(folder: Path) -> dict[str, Any] | None:
    """Return the content of run.json, unverified; an empty dictionary if damaged, None if the folder is not a kapsi run."""
    file = folder / _MANIFEST
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return None  # unreadable: possibly no run
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {} if re.match(rf'\s*\{{\s*"format"\s*:\s*"{_FORMAT}"', text) else None
    return data if isinstance(data, dict) and data.get("format") == _FORMAT else None


def _state(target: Path) -> str:
    """Return the state of the target: "free", "empty" (a folder), "run" (damaged or not), or "other"."""
    if not os.path.lexists(target):
        return "free"
    if not target.is_dir():
        return "other"
    if not os.listdir(target):
        return "empty"
    return "other" if peek(target) is None else "run"


def _mend(target: Path) -> bool:
    """Finish or undo an interrupted replacement, under the lock; return whether the old run was restored."""
    old, gone = beside(target, "old"), beside(target, "gone")
    if peek(old) is None:
        return False
    state = _state(target)
    if state in ("free", "empty"):
        os.rename(old, target)
        sync(target.parent)
        return True
    if state == "run":
        with suppress(OSError):  # the new run is complete; deleting the old one may fail
            remove(gone)
            os.rename(old, gone)  # deleted under another name: `.old` is always complete
            remove(gone)
    return False


def _carry_over(old: Path, new: Path) -> None:
    """Copy files added by the user from the old run to the new one, except names in use."""
    files = (peek(old) or {}).get("files")
    listed = set(files) if isinstance(files, dict) else set()
    for name in sorted(set(os.listdir(old)) - listed - set(os.listdir(new)) - {REPORT}):
        if (old / name).is_dir() and not (old / name).is_symlink():
            shutil.copytree(old / name, new / name, symlinks=True)
        else:
            shutil.copy2(old / name, new / name, follow_symlinks=False)


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..", _MANIFEST) and not re.search(r"[/\\:\0]", name)


def _fingerprint(file: Path, contents: dict[str, bytes] | None = None) -> dict[str, Any]:
    """Return size and checksum of a file; add the content to `contents`, if given."""
    with open(file, "rb") as handle:
        if contents is not None:
            data = contents[file.name] = handle.read()
            return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return {"bytes": os.fstat(handle.fileno()).st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def _verify(target: Path, names: Collection[str], contents: dict[str, bytes]) -> tuple[dict[str, Any], str]:
    """Return the content of run.json, and the first problem of the run or an empty string; add the named files to `contents`."""

    def damaged(problem: str) -> tuple[dict[str, Any], str]:
        return {}, f"damaged run: {problem}; restore it from a copy, or fit again with --overwrite"

    try:
        data = json.loads((target / _MANIFEST).read_bytes())
    except (ValueError, RecursionError) as error:
        return damaged(f"{_MANIFEST} is not JSON ({one_line(error)})")
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return damaged(f'{_MANIFEST} has no entry "format": "{_FORMAT}"')
    version, files = data.get("format_version"), data.get("files")
    if type(version) is not int or version < 1:
        return damaged(f"{_MANIFEST} has no format_version of 1 or more")
    if version > FORMAT_VERSION:
        newer = f"the run has format version {version}, this kapsi reads up to {FORMAT_VERSION}"
        return {}, f"{newer}; upgrade kapsi (pip install --upgrade kapsi)"
    if not isinstance(files, dict):
        return damaged(f"{_MANIFEST} has no list of files")
    for name, expected in files.items():
        if not _is_plain_name(name):
            return damaged(f"{_MANIFEST} lists {name!r}, not a plain file name")
        if not isinstance(expected, dict) or not {"bytes", "sha256"} <= expected.keys():
            return damaged(f"{_MANIFEST} does not give the bytes and sha256 of {name!r}")
        if not (target / name).is_file():
            return damaged(f"the file {name!r} is missing")
        for key, value in _fingerprint(target / name, contents if name in names else None).items():
            if value != expected[key]:
                return damaged(f"the file {name!r} has changed: {key} {value}, in {_MANIFEST} {expected[key]!r}")
    return data, ""
