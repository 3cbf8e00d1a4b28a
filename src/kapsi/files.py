"""Atomic writes: files are written aside and renamed; leftovers of killed processes are removed."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kapsi.errors import FileError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LONGEST = 60  # letters of a name within a hidden name, so that the hidden name fits wherever the name does

# Process ids are meaningless on other machines with the same disk (a cluster, a container): hence the name of the host.
_HOST = re.sub(r"[^A-Za-z0-9.-]", "", platform.node())
live: set[Path] = set()  # paths being written by this process: process ids are reused


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path of the same name in a hidden folder beside; the temporary file replaces the file at the end.

    Missing parent folders are made, permissions of a replaced file are kept, and the target of a symbolic link is
    replaced. After an exception in the ``with`` block nothing is replaced. The hidden folder, deleted as a whole, also holds
    temporary files of other libraries: safetensors writes one.

    Raises:
        FileError: the path is not a writable regular file, or cannot be replaced.
    """
    target = resolve(path)
    hidden = beside(target, "new")
    temporary = hidden / target.name
    with plain(path, "write the file"):
        if os.path.lexists(target) and not (target.is_file() and os.access(target, os.W_OK)):
            raise FileError(f"{show(path)}: is not a writable regular file; give another path")
        clear(target)
        folders = claim(path, target, hidden)
    try:
        with plain(path, "write the file"):
            os.mkdir(hidden)
        yield temporary
        with plain(path, "write the file"):
            if target.exists():
                shutil.copymode(target, temporary)
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
    finally:
        remove(hidden)
        live.discard(hidden)
        unmake(folders)  # stays if not empty


def write_json(path: str | Path, data: Any, indent: int | None = 2) -> None:
    """Write data as JSON, in order, and flush to the disk.

    Args:
        path: the file.
        data: plain data.
        indent: spaces of a level; None for one line, ten times as fast.

    Raises:
        FileError: the data are not JSON (as NaN and infinities), or the file cannot be written.
    """
    content = _dump(path, data, indent=indent).encode()
    with plain(path, "write the file"), open(path, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def append_line(handle: TextIO, record: dict[str, Any]) -> None:
    """Append a record to an open JSON-lines file and flush, for readers during a fit.

    Raises:
        FileError: the record is not JSON (as NaN and infinities).
    """
    handle.write(_dump(getattr(handle, "name", "JSON lines"), record))
    handle.flush()


def finite(data: Any) -> Any:
    """Return plain data with None instead of NaN and infinities, absent from JSON.

    Example:
        >>> finite({"a": float("nan"), "b": (1.5, "x")})
        {'a': None, 'b': [1.5, 'x']}
    """
    if isinstance(data, Mapping):
        return {str(name): finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _dump(where: Any, data: Any, indent: int | None = None) -> str:
    try:
        text = json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
        text.encode()  # a file name can have undecodable bytes
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{show(where)}: not JSON: {one_line(error)}; give plain data, finite numbers") from error
    return text


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str((isinstance(error, OSError) and error.strerror) or error).split())


def show(path: Any) -> str:
    """Return a path for a message, quoted, on one line."""
    return repr(str(path))  # a name with a line break stays on one line


@contextmanager
def plain(path: str | Path, doing: str) -> Iterator[None]:
    """Turn an `OSError` of the body into a `FileError` with the path and the action."""
    try:
        yield
    except OSError as error:
        hint = "check the path, its permissions and the free space"
        raise FileError(f"{show(path)}: cannot {doing}: {one_line(error)}; {hint}") from error


def resolve(path: str | Path) -> Path:
    """Return the absolute path with symbolic links resolved."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError, TypeError) as error:  # a NUL in the name, not text, a deleted current folder
        raise FileError(f"{show(path)}: is not a usable path: {one_line(error)}; give another path") from error


def check_place(path: str | Path, where: str, advice: str) -> None:
    """Refuse a path that cannot be written to, before the work.

    Args:
        path: a file or folder, existing or not.
        where: prefix of error messages.
        advice: end of the message.

    Raises:
        FileError: the nearest folder above is not writable or not a folder, or the path is not a valid name.
    """
    target = resolve(path)
    problem = ""
    try:
        _fits(target)
    except OSError as error:
        problem = one_line(error)
    above = next((folder for folder in (target, *target.parents) if not problem and os.path.lexists(folder)), target)
    if above == target and not above.is_dir():
        above = target.parent
    if not problem and not (above.is_dir() and _takes_files(above)):
        problem = f"{show(above)} {'cannot be written to' if above.is_dir() else 'is not a folder'}"
    if problem:
        raise FileError(f"{where}: {problem}; {advice}")


def _takes_files(folder: Path) -> bool:
    """Return whether a file can be created in a folder; permissions alone do not tell, as in /proc."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _fits(target: Path) -> None:
    """Raise an `OSError` for an impossible path, such as a name of too many letters."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(target)


def _stem(target: Path) -> str:
    """Return the part of a name in hidden names: the name, or the beginning and a hash of a long name."""
    name = target.name
    if len(os.fsencode(name)) <= LONGEST:
        return name
    return f"{name[: LONGEST // 4]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


def beside(target: Path, kind: str) -> Path:
    """Return the hidden sibling of a target for temporary files, an old version or a lock."""
    return target.parent / f".{_stem(target)}.{kind}{'' if kind in ('old', 'lock') else f'-{os.getpid()}-{_HOST}'}"


def claim(path: str | Path, target: Path, hidden: Path) -> list[Path]:
    """Make the parent folders, mark the path as being written, and return the new folders, the innermost first."""
    _fits(target)
    new = []
    for parent in target.parents:
        if os.path.lexists(parent):
            if not parent.is_dir():
                raise FileError(f"{show(path)}: {show(parent)} is not a folder; give another path")
            break
        new.append(parent)
    if hidden in live:
        raise FileError(f"{show(path)}: is being written by this process; wait, or give another path")
    try:
        os.makedirs(target.parent, exist_ok=True)
    except BaseException:
        unmake(new)
        raise
    live.add(hidden)
    return new


def unmake(folders: list[Path]) -> None:
    """Delete empty folders made for a file that was not written."""
    with suppress(OSError):
        for folder in folders:
            if os.path.lexists(folder):
                os.rmdir(folder)


def remove(path: Path) -> None:
    """Delete as far as possible; the rest is hidden, and deleted by the next command."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def clear(target: Path) -> None:
    """Remove leftovers of dead local processes next to the target; names without a host count as of this machine."""
    name, suffix, host = re.escape(_stem(target)), re.escape(target.suffix), re.escape(_HOST)
    pattern = re.compile(rf"\.{name}\.(?:new|gone)-([0-9]+)(?:-{host})?(?:{suffix})?")
    with suppress(OSError):
        for entry in os.listdir(target.parent):
            match = pattern.fullmatch(entry)
            if match and _is_dead(int(match[1]), target.parent / entry):
                remove(target.parent / entry)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder, deleted afterwards; folders that killed processes of this machine left behind are deleted, too."""
    place, pattern = Path(tempfile.gettempdir()), re.compile(rf"kapsi-([0-9]+)-{re.escape(_HOST)}-\w+")
    with suppress(OSError):
        for entry in os.listdir(place):
            match = pattern.fullmatch(entry)
            # A folder of another user, or a link, stays.
            if match and _is_dead(int(match[1]), place / entry) and not (place / entry).is_symlink():
                shutil.rmtree(place / entry, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"kapsi-{os.getpid()}-{_HOST}-"))
    live.add(folder)
    try:
        yield folder
    finally:
        live.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _is_dead(pid: int, leftover: Path) -> bool:
    if pid == os.getpid():
        return leftover not in live
    if os.name != "posix":
        return False  # elsewhere os.kill(pid, 0) kills
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # a process of another user, or no process number
        return False
    return False


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:  # unsupported for folders on some systems
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock by means of a lock file, deleted afterwards; the lock ends with the process.

    Proceed without a lock where no lock file can be created: read-only folders, some network disks.
    """
    from filelock import FileLock

    lock = FileLock(path, poll_interval=0.01)
    with suppress(OSError):
        if path.parent.is_dir():  # otherwise filelock creates it
            # filelock waits for ever where the system creates no file, as in /proc.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
            lock.acquire()
    try:
        yield
    finally:
        unlock(lock)


def unlock(lock: BaseFileLock) -> None:
    """Delete a lock file and release its lock."""
    if lock.is_locked:
        with suppress(OSError):  # Windows: deleted by the release
            os.unlink(lock.lock_file)
        lock.release()
