"""Files that are whole or not there: written beside and renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kapsi.errors import KapsiError

__all__ = ["atomic"]


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Give a path beside `path` to write to; on success it is synced and renamed, else removed."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        with open(beside, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise KapsiError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
