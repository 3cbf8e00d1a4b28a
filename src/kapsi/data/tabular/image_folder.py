"""A folder of images as a table: the class of an image is the name of its folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kapsi.data.tabular.pictures import image_column, refused
from kapsi.data.tabular.source import reading_file
from kapsi.data.tabular.types import Column, Table, reject, short

__all__ = ["folder_batches", "image_files", "read_folder"]

IMAGE, LABEL, FILE = "image", "label", "file"
"""Columns: the image, the name of its folder, and the path of its file for `--keep`."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
MOST_FILES = 10_000_000
ROWS = 1_024
"""Images of a batch."""


def image_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the image files of a folder by their paths within it, sorted, and the first files of other kinds.

    They are right in the folder, or in its folders, one for each class; names that begin with a point are ignored.

    Raises:
        TableError: the folder has no images, images on both levels, or folders within those of the classes.
    """
    with reading_file(folder):
        top = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
        classes = [name for name in top if (folder / name).is_dir()]
        names = [name for name in top if name not in classes]
        inside = [
            os.path.join(name, entry.name)
            for name in classes
            for entry in sorted(os.scandir(folder / name), key=lambda entry: entry.name)
            if not entry.name.startswith(".")
        ]
    deeper = [name for name in inside if (folder / name).is_dir()]
    if deeper:
        reject(
            str(folder),
            f"{short(deeper[0])} is a folder in the folder of a class; put its images into that of the class",
        )
    images = [name for name in names if name.lower().endswith(SUFFIXES)]
    of_classes = [name for name in inside if name.lower().endswith(SUFFIXES)]
    if images and of_classes:
        both = f"{short(images[0])} and {short(of_classes[0])}"
        reject(str(folder), f"has images with and without a class, {both}; move them into folders, one for each class")
    if not images and not of_classes:
        seen = f" ({refused([*names, *inside])})" if names or inside else ""
        reject(str(folder), f"this is a folder without images{seen}; give a CSV or Parquet file, or a folder of images")
    kept = images or of_classes
    if len(kept) > MOST_FILES:
        reject(str(folder), f"has {len(kept):,} images; at most {MOST_FILES:,} are read")
    others = [name for name in (*names, *inside) if not name.lower().endswith(SUFFIXES)]
    return [Path(name) for name in kept], others


def read_folder(folder: Path) -> Table:
    """Return a folder of images as a table with the columns `image` and, with class folders, `label`.

    Raises:
        TableError: see `image_files`.
    """
    files, others = image_files(folder)
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(file) + b"\0" + str(os.stat(folder / file).st_size).encode() + b"\0")
    notes = (f"ignored files that are no images: {refused(others)}",) if others else ()
    columns = {IMAGE: _images(folder, files)}
    codes, digests = columns[IMAGE].coded()
    digest.update(np.ascontiguousarray(codes).tobytes() + "".join(digests).encode())
    return Table(_name(folder), columns | _labels(files), digest.hexdigest(), notes)


def folder_batches(folder: Path) -> Iterator[tuple[Table, list[str]]]:
    """Yield the rows of a folder of images in batches, and the paths of their files.

    Raises:
        TableError: see `image_files`.
    """
    files, _ = image_files(folder)
    for start in range(0, len(files), ROWS):
        part = files[start : start + ROWS]
        yield Table(_name(folder), {IMAGE: _images(folder, part)} | _labels(part)), [file.as_posix() for file in part]


def _images(folder: Path, files: Sequence[Path]) -> Column:
    top = folder.resolve()
    return image_column(IMAGE, (_regular(top, file) for file in files))


def _regular(top: Path, file: Path) -> Path | str:
    """Return the path of a file; a link that leaves the folder is none."""
    path = (top / file).resolve()
    return path if path.is_relative_to(top) else f"{short(file.name)} is a link to a file outside of the folder"


def _labels(files: Sequence[Path]) -> dict[str, Column]:
    """Return the column of classes, empty without class folders."""
    names = [file.parent.name for file in files]
    if not any(names):
        return {}
    return {LABEL: Column("text", np.array(names, dtype=object), reason="names of folders")}


def _name(folder: Path) -> str:
    return folder.resolve().name or str(folder)
