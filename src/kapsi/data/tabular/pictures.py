"""From encoded images to pixels: Pillow with limits, one rule for colors, transparency, rotation and size."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import Column, listed, short, table_error

__all__ = ["FORMATS", "LARGEST_SIDE", "MOST_BYTES", "MOST_PIXELS", "image_column", "is_encoded_image"]

Pixels: TypeAlias = npt.NDArray[np.uint8]
Source: TypeAlias = bytes | Path | Any
"""An encoded image, its file, an array of pixels, an image of Pillow; a string is the reason why there is none."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read; Pillow knows others, whose decoders are not needed here."""

MOST_PIXELS = 67_108_864
"""Pixels of an encoded image, checked before any is decoded: a file of some kilobytes may claim billions."""

MOST_BYTES = 268_435_456
"""Bytes of the file of an encoded image."""

LARGEST_SIDE = 64
"""Pixels of the longer side, beyond which an image is reduced when it is read."""

AT_ONCE = 256
"""Images decoded together."""

MOST_NAMED = 5
"""Damaged images named in a note."""

SIGNATURES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8")
REMEDY = 'pip install "kapsi[data]"'


def is_encoded_image(data: object) -> bool:
    """Return whether bytes begin as a PNG, JPEG, GIF or WebP file.

    Example:
        >>> is_encoded_image(b"GIF89a"), is_encoded_image(b"PK")
        (True, False)
    """
    if not isinstance(data, bytes):
        return False
    return data.startswith(SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def may_be_images(kind: Any) -> bool:
    """Return whether an Arrow type has room for encoded images: bytes, or a struct with `bytes` or `path`, or both."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        data = fields.get("bytes", pa.null())
        return bool(fields) and fields.keys() <= {"bytes", "path"} and (_binary(data) or pa.types.is_null(data))
    return _binary(kind)


def _binary(kind: Any) -> bool:
    import pyarrow as pa

    return any(check(kind) for check in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary))


def read_images(
    name: str, parts: Iterable[Any], folder: Path | None, drop: str = "", *, requested: bool = False
) -> Column | None:
    """Return Arrow arrays, one after the other, as a column of images; None if they have another kind of values.

    Args:
        name: name of the column.
        parts: its arrays, at least one, which may be read when they are needed.
        folder: the folder of paths.
        drop: see `image_column`.
        requested: take bytes as images whatever they begin with, and texts as paths.

    Raises:
        TableError: images are requested, and the column has other values; Pillow is missing.
    """
    import pyarrow as pa

    parts = iter(parts)
    first = next(parts)
    kind = first.type.value_type if pa.types.is_dictionary(first.type) else first.type
    texts = any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))
    if not may_be_images(kind) and not (requested and (texts or pa.types.is_null(kind))):
        if not requested:
            return None
        return Column(
            "unusable",
            codes=np.broadcast_to(np.int64(-1), len(first)),
            problem=f" is to have images, and has the type {kind}; give bytes, paths, or structs of bytes and path",
        )
    values = (image for part in itertools.chain([first], parts) for image in images_in(part, folder))
    seen = list(itertools.islice(values, 1))
    while seen and seen[-1] is None:
        more = list(itertools.islice(values, 1))
        if not more:
            break
        seen += more
    if not requested and not pa.types.is_struct(kind) and not is_encoded_image(seen[-1] if seen else None):
        return None
    return image_column(name, itertools.chain(seen, values), drop)


def images_in(column: Any, folder: Path | None = None) -> Iterator[Source | None]:
    """Yield the images of an Arrow column: bytes, structs of bytes and path, or texts, which are paths within a folder.

    Args:
        column: an Arrow array, binary, string or struct.
        folder: the folder of the table; None for data frames, which have none.
    """
    for start in range(0, len(column), AT_ONCE):
        for value in column.slice(start, AT_ONCE).to_pylist():
            data = value.get("bytes") if isinstance(value, dict) else value
            if data is None and isinstance(value, dict):
                data = value.get("path")
            if isinstance(data, str):
                data = _inside(folder, data)
            yield data


def _inside(folder: Path | None, name: str) -> Path | str | None:
    """Return the path of a file within a folder, None for an empty name, or the reason why there is no such path."""
    if not name.strip():
        return None
    if folder is None:
        return f"{short(name)} is a path, and a data frame has no folder; give bytes"
    try:
        top, path = folder.resolve(), (folder / name).resolve()
    except (OSError, ValueError, RuntimeError):  # a NUL in the name, a loop of links
        return f"{short(name)} is no path"
    return path if path.is_relative_to(top) else f"{short(name)} is outside of the folder of the table"


def image_column(name: str, images: Iterable[Source | None], drop: str = "") -> Column:
    """Return images as a column of kind `image`: uint8 arrays `(height, width)`, or `(height, width, 3)` if they have colors.

    The values of damaged images are the reasons, as strings; a note has their number and first rows.

    Args:
        name: name of the column, for notes.
        images: the images.
        drop: advice on how to leave the column out, for a message without Pillow.
    """
    values = list(_decoded(name, images, drop))
    array = np.empty(len(values), dtype=object)
    array[:] = values
    kept = sum(isinstance(value, np.ndarray) for value in values)
    reason = f"{kept:,} images"
    return Column("image", array, reason=reason, notes=damage_notes(name, array))


def damage_notes(name: str, values: Sequence[Any] | npt.NDArray[Any]) -> tuple[str, ...]:
    """Return a note on damaged images with their number and first rows, none without such.

    Example:
        >>> damage_notes("x", [None, "cut off"])
        ("column 'x': 1 of 2 images cannot be read and is missing: row 2 (cut off)",)
    """
    damaged = [(row, value) for row, value in enumerate(values, 1) if isinstance(value, str)]
    return (damage_of(name, damaged, len(values)),) if damaged else ()


def damage_of(name: str, damaged: Sequence[tuple[int, str]], rows: int | None = None) -> str:
    """Return a note on damaged images.

    Args:
        name: name of the column.
        damaged: the row of each, from 1, and the reason.
        rows: number of all images; None if unknown.
    """
    named = ", ".join(f"row {row:,} ({reason})" for row, reason in damaged[:MOST_NAMED])
    more = f" and {len(damaged) - MOST_NAMED:,} more" if len(damaged) > MOST_NAMED else ""
    verb = "is" if len(damaged) == 1 else "are"
    total = "" if rows is None else f" of {rows:,}"
    noun = "image" if len(damaged) == 1 and rows is None else "images"
    return f"column {short(name)}: {len(damaged):,}{total} {noun} cannot be read and {verb} missing: {named}{more}"


def _decoded(name: str, images: Iterable[Source | None], drop: str) -> Iterator[Pixels | str | None]:
    """Yield the pixels of each image; a few hundred encoded ones are in memory at a time."""
    try:
        from PIL import Image
    except ImportError:
        raise table_error(
            name, f"the column has images, and Pillow, which decodes them, is missing: {REMEDY}{drop}"
        ) from None
    Image.init()  # load all formats before the threads start
    source = iter(images)
    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")  # of Pillow, on files with odd details
        while part := list(itertools.islice(source, AT_ONCE)):
            blocks = [part[i : i + AT_ONCE // 4] for i in range(0, len(part), AT_ONCE // 4)]
            for block in pool.map(lambda block: [_pixels(image) for image in block], blocks):
                yield from block


def _pixels(source: Source | None) -> Pixels | str | None:
    """Return the pixels of an image, or the reason why it cannot be read."""
    if source is None or isinstance(source, str):
        return source
    file = f"{short(source.name)}: " if isinstance(source, Path) else ""
    try:
        if isinstance(source, Path):
            source = _content(source)
        with _opened(source) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                return f"{width:,} × {height:,} pixels, more than {MOST_PIXELS:,}"
            return _reduced(image)
    except MemoryError:
        return "too large for the memory"
    except Exception as error:  # of any kind: Pillow has no common one for damaged files
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return file + " ".join(reason.split())[:80]


def _content(path: Path) -> bytes:
    """Return the bytes of a regular file of bounded size."""
    if not path.exists():
        raise ValueError("there is no such file")
    if not path.is_file():
        raise ValueError("no regular file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes")
    return path.read_bytes()


def _opened(source: Source) -> Any:
    """Return an image of Pillow, whose pixels may not be decoded yet."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Image.Image):
        return source.copy()
    if isinstance(source, bytes):
        try:
            image = Image.open(io.BytesIO(source), formats=FORMATS)
        except UnidentifiedImageError:
            raise ValueError(f"not {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
        if image.format == "JPEG" and image.mode in ("L", "RGB"):
            image.draft(image.mode, (2 * LARGEST_SIDE, 2 * LARGEST_SIDE))
        return image
    return Image.fromarray(_levels(np.asarray(source)))


def _levels(array: npt.NDArray[Any]) -> Pixels:
    """Return an array of intensities from 0 to 255 as uint8."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    whole = array.dtype == np.bool_ or np.issubdtype(array.dtype, np.integer)
    if not shaped or not array.size or not whole or array.min() < 0 or array.max() > 255:
        raise ValueError(f"{array.dtype} {array.shape}; give whole numbers 0 to 255, (height, width, 3)")
    return array.astype(np.uint8) * np.uint8(255 if array.dtype == np.bool_ else 1)


def _reduced(image: Any) -> Pixels:
    """Return the pixels of an image: turned upright, over white if transparent, at most `LARGEST_SIDE` on a side."""
    from PIL import Image, ImageOps

    image.load()
    with contextlib.suppress(Exception):  # damaged details beside an image are no reason to lose it
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        levels = np.asarray(image).astype(np.float64)
        image = Image.fromarray((levels / (257 if levels.max(initial=0) > 255 else 1)).clip(0, 255).astype(np.uint8))
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image).convert("RGB")
    elif image.mode in ("1", "L"):
        image = image.convert("L")
    else:
        image = image.convert("RGB")
    if max(image.size) > LARGEST_SIDE:
        image.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.BILINEAR)
    pixels = np.array(image, dtype=np.uint8)
    gray = pixels.ndim == 3 and (pixels == pixels[:, :, :1]).all()
    return np.ascontiguousarray(pixels[:, :, 0]) if gray else pixels


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Return an image of another size, bilinear between the pixels; the ratio of the sides is not kept.

    Example:
        >>> resized(np.full((4, 4), 9, dtype=np.uint8), 2, 2).tolist()
        [[9, 9], [9, 9]]
    """
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return pixels
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR), dtype=np.uint8)


def refused(names: Sequence[str]) -> str:
    """Return the formats that are read, for messages.

    Example:
        >>> refused(["x.tif"])
        "'x.tif'; PNG, JPEG, WEBP, GIF and BMP are read"
    """
    return f"{listed(names, 3)}; {', '.join(FORMATS[:-1])} and {FORMATS[-1]} are read"
