"""A cache of arrays on disk, in a user folder; damaged or outdated files are recomputed."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.errors import FileError
from kapsi.files import atomic, one_line, plain

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

VERSION = 1
"""Increased when the arrays of the same source change."""


def cache_folder() -> Path:
    """Return the cache folder: `KAPSI_CACHE`, else `$XDG_CACHE_HOME/kapsi`, else `~/.cache/kapsi`."""
    folder, shared = os.environ.get("KAPSI_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if folder:
        return Path(folder).expanduser()
    return (Path(shared) if shared else Path.home() / ".cache") / "kapsi"


def digest(*parts: bytes | str) -> str:
    """Return 16 hexadecimal digits, the BLAKE2b digest of the parts."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def cached(name: str, source: Mapping[str, Any], make: Callable[[], Arrays]) -> tuple[Arrays, tuple[str, ...]]:
    """Return arrays from the cache, or compute and store them; and a note if the cache cannot be written.

    A file holds its source as JSON and a checksum of each array; a mismatch counts as missing.

    Args:
        name: name of the file in the cache folder, without suffix.
        source: plain data to identify the source of the arrays.
        make: returns the arrays by name; the names "source" and "names" are reserved.
    """
    label = json.dumps({"version": VERSION, **source}, sort_keys=True)
    try:
        path = cache_folder() / f"{name}.npz"
    except RuntimeError as error:  # no home folder
        return make(), (_not_stored(error),)
    arrays = _read(path, label)
    if arrays is not None:
        return arrays, ()
    arrays = make()
    try:
        with atomic(path) as temporary, plain(path, "write the cache"):
            names = np.array(json.dumps(list(arrays)))
            np.savez(temporary, source=np.array(label), names=names, **arrays)  # type: ignore[arg-type]
    except FileError as error:
        return arrays, (_not_stored(error),)
    return arrays, ()


def _not_stored(error: Exception) -> str:
    return f"not cached: {one_line(error)}; set KAPSI_CACHE to another folder"


def _read(path: Path, label: str) -> Arrays | None:
    """Return the arrays of an intact file with the same source, else None."""
    try:
        with open(path, "rb") as handle:  # NumPy does not close a damaged file
            file = np.load(handle, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile) or str(file["source"]) != label:
                return None
            # Names have no checksum: a damaged name raises KeyError.
            return {name: file[name] for name in json.loads(str(file["names"]))}
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        # RuntimeError: a damaged bit marks the file as encrypted, or names an unknown method.
        return None
