"""Arrays that take long to make, kept in a folder of the user: whole, of the very source, or made anew."""

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

__all__ = ["Arrays", "cache_folder", "digest", "kept"]

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

VERSION = 1
"""Counts up when the same source is to give other arrays."""


def cache_folder() -> Path:
    """Return where arrays are kept: `KAPSI_CACHE`, else `$XDG_CACHE_HOME/kapsi`, else `~/.cache/kapsi`."""
    own, shared = os.environ.get("KAPSI_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared) if shared else Path.home() / ".cache") / "kapsi"


def digest(*parts: bytes | str) -> str:
    """Return 16 hexadecimal digits that name these parts."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def kept(name: str, source: Mapping[str, Any], make: Callable[[], Arrays]) -> tuple[Arrays, tuple[str, ...]]:
    """Return arrays from the cache, or make and keep them; and a note where they cannot be kept.

    The file holds what it was made of, as JSON, and a checksum of each array; it is used where all of that fits.

    Args:
        name: of the file in the cache folder, without suffix.
        source: what the arrays are made of, plain data.
        make: makes the arrays by name; "source" and "names" are taken.
    """
    label = json.dumps({"version": VERSION, **source}, sort_keys=True)
    try:
        path = cache_folder() / f"{name}.npz"
    except RuntimeError as error:  # there is no home folder
        return make(), (_not_kept(error),)
    found = _read(path, label)
    if found is not None:
        return found, ()
    arrays = make()
    try:
        with atomic(path) as beside, plain(path, "write the cache"):
            names = np.array(json.dumps(list(arrays)))
            np.savez(beside, source=np.array(label), names=names, **arrays)  # type: ignore[arg-type]
    except FileError as error:
        return arrays, (_not_kept(error),)
    return arrays, ()


def _not_kept(error: Exception) -> str:
    return f"not kept for the next time: {one_line(error)}; KAPSI_CACHE names another folder"


def _read(path: Path, label: str) -> Arrays | None:
    """Return the arrays of a file that is whole and of this source."""
    try:
        with open(path, "rb") as handle:  # NumPy leaves a damaged file open that it has opened itself
            file = np.load(handle, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile) or str(file["source"]) != label:
                return None
            # Names have no checksum in such a file: a damaged one is missed here.
            return {name: file[name] for name in json.loads(str(file["names"]))}
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        # A RuntimeError where a damaged bit says "encrypted" or a method that there is not.
        return None
