"""Run folders, written beside and renamed: a kill at any moment leaves the old run whole or the new run whole.

Beside a run ``name`` there may be, for a while: ``.name.new-PID-HOST``, the run being written; ``.name.old``, the run
being replaced, always whole; ``.name.gone-PID-HOST``, a replaced run being deleted. `recover` puts right what a killed
process left of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kapsi.errors import RunError
from kapsi.files import (
    beside,
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

__all__ = ["FORMAT_VERSION", "NewRun", "free_path", "open_run", "recover"]

FORMAT_VERSION = 1
_FORMAT = "kapsi run"
_MANIFEST = "run.json"


class NewRun:
    """Write a run folder; it takes its place at the end of the ``with`` block, whole, or not at all.

    Args:
        path: Where the run goes. Missing parent folders are made; of a symbolic link the target is replaced.
        overwrite: Replace a kapsi run that is already there. What is not a kapsi run is never replaced; files that the
            user added to the replaced run are kept, save where the new run has a file of that name.

    Attributes:
        folder: Where to write the files, by plain names.
        manifest: What run.json is to hold besides the format, its version and the list of files.

    Raises:
        RunError: The path is taken or cannot be written, at the beginning or, if that changed meanwhile, at the end.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.manifest: dict[str, Any] = {}
        self._overwrite = overwrite
        self._target = resolve(path)
        self.folder = beside(self._target, "new")
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        with plain(self.path, "begin the run"):
            here = resolve(".")
            if self._target in (here, *here.parents):
                raise RunError(f"{show(self.path)}: is the current folder or one above it; give another --output")
            recover(self._target)
            with _lock(self._target):
                self._check()
            self._made = claim(self.path, self._target, self.folder)
            try:
                os.mkdir(self.folder)
            except BaseException:
                live.discard(self.folder)
                unmake(self._made)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with plain(self.path, "write the run"):
                    self._seal()
                    self._swap()
        finally:
            remove(self.folder)  # a swap that succeeded has left nothing under this name
            live.discard(self.folder)
            unmake(self._made)  # the folder of a run that is there now is not empty and stays

    def _check(self) -> str:
        """Return what is at the path now, or refuse to write there."""
        state, where, old = _state(self._target), show(self.path), beside(self._target, "old")
        if state == "other":
            what = "a folder without a kapsi run" if self._target.is_dir() else "not a folder"
            raise RunError(f"{where}: is {what}, never replaced, even with --overwrite; give another --output")
        if state == "run" and not self._overwrite:
            raise RunError(f"{where}: a run is already there; give --overwrite to replace it, or another --output")
        if state == "run" and not os.access(self._target, os.W_OK | os.X_OK):
            raise RunError(f"{where}: the run there is write-protected; make it writable, or give another --output")
        if state == "run" and os.path.lexists(old):
            raise RunError(f"{where}: {show(old)} is in the way of replacing the run; move or delete it")
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
            state = self._check()  # again: another process may have been here since the beginning
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
            finally:  # deletes the old run, or puts it back when an error or an interrupt came between the two renames
                _mend(self._target)


def recover(path: str | Path) -> str | None:
    """Put right what killed processes left beside a run, and return a line for the user if the run itself was touched.

    Raises:
        RunError: The run from before is there, but cannot be put back.
    """
    target = resolve(path)
    clear(target)
    if not any(os.path.lexists(beside(target, kind)) for kind in ("old", "lock")):
        return None
    with plain(path, "put back the run from before an interrupted replacement"), _lock(target):
        is_back = _mend(target)
    return f"{show(path)}: replacing this run was interrupted; the run from before is back" if is_back else None


def open_run(path: str | Path) -> dict[str, Any]:
    """Recover and verify a run folder, down to each file's checksum, and return what its run.json holds.

    Raises:
        RunError: There is no run, it is damaged (the line says which file), or a newer kapsi wrote it.
    """
    recover(path)
    target = resolve(path)
    with plain(path, "read the run"), _lock(target):
        try:
            target.lstat()
        except (FileNotFoundError, NotADirectoryError) as error:
            hint = "check the path, or make the run with kapsi fit"
            raise RunError(f"{show(path)}: no such run folder; {hint}") from error
        if not (target / _MANIFEST).is_file():
            raise RunError(f"{show(path)}: is not a run folder (no {_MANIFEST}); give a folder that kapsi fit made")
        return _verify(path, target)


def free_path(path: str | Path) -> Path:
    """Return the path if nothing is there or being written there, else path-2, path-3 and so on.

    Raises:
        RunError: The path is the root folder, or a run cannot be recovered.
    """
    base = Path(path) if Path(path).name not in ("", "..") else resolve(path)
    if not base.name:
        raise RunError(f"{show(path)}: is the root folder; give the path of a folder in it")
    candidate, number = base, 1
    while _is_taken(candidate):
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


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


def _peek(folder: Path) -> dict[str, Any] | None:
    """Return a run's run.json, an empty dictionary if it is damaged, None if the folder is no kapsi run."""
    file = folder / _MANIFEST
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return None  # what cannot be read is not known to be ours
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {} if re.match(rf'\s*\{{\s*"format"\s*:\s*"{_FORMAT}"', text) else None
    return data if isinstance(data, dict) and data.get("format") == _FORMAT else None


def _state(target: Path) -> str:
    """Return what is at the target: "free", "empty" (a folder), "run" (damaged or not), or "other"."""
    if not os.path.lexists(target):
        return "free"
    if not target.is_dir():
        return "other"
    if not os.listdir(target):
        return "empty"
    return "other" if _peek(target) is None else "run"


def _mend(target: Path) -> bool:
    """Finish or undo an interrupted replacement, under the lock; return whether the old run was put back."""
    old, gone = beside(target, "old"), beside(target, "gone")
    if _peek(old) is None:
        return False  # nothing, or somebody else's
    state = _state(target)
    if state in ("free", "empty"):
        os.rename(old, target)
        sync(target.parent)
        return True
    if state == "run":
        with suppress(OSError):  # the new run is whole; that the old one cannot be deleted now is no reason to fail
            remove(gone)
            os.rename(old, gone)  # deleted under another name, so that what is named `.old` is always whole
            remove(gone)
    return False


def _carry_over(old: Path, new: Path) -> None:
    """Copy what the user put into the old run to the new one, where a name that is in use stays as it is."""
    files = (_peek(old) or {}).get("files")
    listed = set(files) if isinstance(files, dict) else set()
    for name in sorted(set(os.listdir(old)) - listed - set(os.listdir(new))):
        if (old / name).is_dir() and not (old / name).is_symlink():
            shutil.copytree(old / name, new / name, symlinks=True)
        else:
            shutil.copy2(old / name, new / name, follow_symlinks=False)


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..", _MANIFEST) and not re.search(r"[/\\:\0]", name)


def _fingerprint(file: Path) -> dict[str, Any]:
    with open(file, "rb") as handle:
        return {"bytes": os.fstat(handle.fileno()).st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def _verify(path: str | Path, target: Path) -> dict[str, Any]:
    def damaged(what: str) -> RunError:
        return RunError(f"{show(path)}: damaged run: {what}; restore it from a copy, or fit again with --overwrite")

    try:
        data = json.loads((target / _MANIFEST).read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(f"{_MANIFEST} is not JSON ({one_line(error)})") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise damaged(f'{_MANIFEST} does not say "format": "{_FORMAT}"')
    version, files = data.get("format_version"), data.get("files")
    if type(version) is not int or version < 1:
        raise damaged(f"{_MANIFEST} has no format_version of 1 or more")
    if version > FORMAT_VERSION:
        newer = f"the run has format version {version}, this kapsi reads up to {FORMAT_VERSION}"
        raise RunError(f"{show(path)}: {newer}; upgrade kapsi (pip install --upgrade kapsi)")
    if not isinstance(files, dict):
        raise damaged(f"{_MANIFEST} has no list of files")
    for name, expected in files.items():
        if not _is_plain_name(name):
            raise damaged(f"{_MANIFEST} lists {name!r}, which is not a plain file name")
        if not isinstance(expected, dict) or not {"bytes", "sha256"} <= expected.keys():
            raise damaged(f"{_MANIFEST} does not give the bytes and sha256 of {name!r}")
        if not (target / name).is_file():
            raise damaged(f"the file {name!r} is missing")
        for key, value in _fingerprint(target / name).items():
            if value != expected[key]:
                raise damaged(f"the file {name!r} has changed: {key} {value}, in {_MANIFEST} {expected[key]!r}")
    return data
