"""Files that are whole or not there: written beside and renamed; leftovers of killed processes are found and removed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from kapsi.errors import FileError

__all__ = ["append_line", "atomic", "check_place", "write_json"]

LONGEST = 60  # letters of a name that hidden names take over: together they are to fit where the name alone does

# A process number says nothing on another machine that shares the disk (a cluster, a container): hence the host's name.
_HOST = re.sub(r"[^A-Za-z0-9.-]", "", platform.node())
live: set[Path] = set()  # what this very process is writing: a process number comes round again, a set does not


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a path beside, with the same suffix, to write one file to; it replaces the file at the end, or not at all.

    Missing parent folders are made, a replaced file's permissions are kept, and of a symbolic link the target is
    replaced. What the ``with`` block raises goes on unchanged.

    Raises:
        FileError: There is something else than a writable regular file at the path, or it cannot be replaced.
    """
    target = resolve(path)
    temporary = beside(target, "new", target.suffix)
    with plain(path, "write the file"):
        if os.path.lexists(target) and not (target.is_file() and os.access(target, os.W_OK)):
            raise FileError(f"{show(path)}: is not a regular file that may be written; give another path")
        clear(target)
        made = claim(path, target, temporary)
    try:
        yield temporary
        with plain(path, "write the file"):
            if target.exists():
                shutil.copymode(target, temporary)
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
    finally:
        remove(temporary)
        live.discard(temporary)
        unmake(made)  # the folder of a file that is there now is not empty and stays


def write_json(path: str | Path, data: Any) -> None:
    """Write data as indented JSON, in its own order, down to the disk.

    Raises:
        FileError: The data are not JSON (NaN and infinities are not), or the file cannot be written.
    """
    content = _dump(path, data, indent=2).encode()
    with plain(path, "write the file"), open(path, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def append_line(handle: TextIO, record: dict[str, Any]) -> None:
    """Append a record to an open JSON-lines file and flush it, so that a fit can be watched.

    Raises:
        FileError: The record is not JSON (NaN and infinities are not).
    """
    handle.write(_dump(getattr(handle, "name", "JSON lines"), record))
    handle.flush()


def _dump(where: Any, data: Any, indent: int | None = None) -> str:
    try:
        text = json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
        text.encode()  # a file name with undecodable bytes is no text
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{show(where)}: not JSON: {one_line(error)}; give plain data, finite numbers") from error
    return text


def one_line(error: BaseException) -> str:
    return " ".join(str((isinstance(error, OSError) and error.strerror) or error).split())


def show(path: Any) -> str:
    return repr(str(path))  # a name with a line break stays on one line


@contextmanager
def plain(path: str | Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "check the path, its permissions and the free space"
        raise FileError(f"{show(path)}: cannot {doing}: {one_line(error)}; {hint}") from error


def resolve(path: str | Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (
        OSError,
        ValueError,
        TypeError,
    ) as error:  # a NUL in the name, no text at all, a current folder that was deleted
        raise FileError(f"{show(path)}: is not a usable path: {one_line(error)}; give another path") from error


def check_place(path: str | Path, where: str, advice: str) -> None:
    """Refuse a path below which nothing could be written, before the work whose results are to go there.

    Args:
        path: of a file or a folder that need not be there.
        where: begins the message.
        advice: ends it.

    Raises:
        FileError: the nearest folder above is none or may not be written to, or the path can be no name.
    """
    target = resolve(path)
    try:
        _fits(target)
    except OSError as error:
        raise FileError(f"{where}: {one_line(error)}; {advice}") from None
    above = next((folder for folder in (target, *target.parents) if os.path.lexists(folder)), target)
    if above == target and not above.is_dir():
        above = target.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "cannot be written to" if above.is_dir() else "is not a folder"
        raise FileError(f"{where}: {show(above)} {what}; {advice}")


def _fits(target: Path) -> None:
    """Raise an `OSError` where a path can be no name, as when it is too long."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(target)


def _stem(target: Path) -> str:
    """Return what hidden names have of a name: the name, or where it is long its beginning and some letters that stand for it."""
    name = target.name
    if len(os.fsencode(name)) <= LONGEST:
        return name
    return f"{name[: LONGEST // 4]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


def beside(target: Path, kind: str, suffix: str = "") -> Path:
    return target.parent / f".{_stem(target)}.{kind}{'' if kind == 'old' else f'-{os.getpid()}-{_HOST}'}{suffix}"


def claim(path: str | Path, target: Path, hidden: Path) -> list[Path]:
    """Make the parent folders, note that this process writes here, and return the folders made, the innermost first."""
    _fits(target)
    made = []
    for parent in target.parents:
        if os.path.lexists(parent):
            if not parent.is_dir():
                raise FileError(f"{show(path)}: {show(parent)} is not a folder; give another path")
            break
        made.append(parent)
    if hidden in live:
        raise FileError(f"{show(path)}: this process is writing there already; let it finish, or give another path")
    try:
        os.makedirs(target.parent, exist_ok=True)
    except BaseException:
        unmake(made)
        raise
    live.add(hidden)
    return made


def unmake(folders: list[Path]) -> None:
    """Delete folders that were made for a file that is not there after all, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            if os.path.lexists(folder):
                os.rmdir(folder)


def remove(path: Path) -> None:
    """Delete as far as possible: what stays is hidden, and the next command tries again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def clear(target: Path) -> None:
    """Remove what dead processes of this machine left beside the target; a name without a host counts as ours."""
    name, suffix, host = re.escape(_stem(target)), re.escape(target.suffix), re.escape(_HOST)
    pattern = re.compile(rf"\.{name}\.(?:new|gone)-([0-9]+)(?:-{host})?(?:{suffix})?")
    with suppress(OSError):
        for entry in os.listdir(target.parent):
            match = pattern.fullmatch(entry)
            if match and _is_dead(int(match[1]), target.parent / entry):
                remove(target.parent / entry)


def _is_dead(pid: int, leftover: Path) -> bool:
    if pid == os.getpid():
        return leftover not in live
    if os.name != "posix":
        return False  # there, os.kill(pid, 0) does not ask, it acts
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's process; or no process number, so nothing that we wrote
        return False
    return False


def sync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:  # some systems cannot do it for folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise
