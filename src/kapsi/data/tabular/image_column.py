"""Columns of images: pixels of one size as inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.encoders import Unseen, center_and_scale, clipped, fields, positive, standardized
from kapsi.data.tabular.pictures import LARGEST_SIDE, Pixels, resized
from kapsi.data.tabular.types import Column, Floats, reject, short

__all__ = ["ImageColumn"]

COMMON = 0.5
"""Part of the images that have the most frequent size, from which this is the size of all."""


@dataclass(frozen=True)
class ImageColumn:
    """The pixels of an image column, flattened from (channels, height, width), as numbers from 0 to 255; behind all other inputs.

    All images get one size: the most frequent one if half of them have it, else the medians of height and width. They are gray if
    all fitted images are. The brightness of an image, the mean of its pixels, is an input beside the others, and so is a mark of
    missing images, whose pixels have the mean brightness.

    Args:
        name: name of the column.
        height, width: the size in pixels, 1 to 64.
        channels: 1 for gray, 3 for red, green and blue.
        rows: number of fitted images.
        other: number of them that had another size.
        mean, scale: mean and standard deviation of the brightness.
        missing: add a 0/1 input that marks missing images.

    Example:
        >>> values = np.empty(2, dtype=object)
        >>> values[:] = [np.zeros((2, 2), np.uint8), np.full((2, 2), 100, np.uint8)]
        >>> column = ImageColumn.fit("image", Column("image", values))
        >>> column.encode(Column("image", values))[1].tolist()
        [[0, 0, 0, 0], [100, 100, 100, 100]]
    """

    name: str
    height: int
    width: int
    channels: int
    rows: int
    other: int
    mean: float
    scale: float
    missing: bool
    wanted: ClassVar[str] = "image"

    @classmethod
    def fit(cls, name: str, column: Column, weight: Floats | None = None) -> Self:
        """Choose the size by the rows of a column; those of weight 0 do not count."""
        every = column.values if weight is None else column.values[weight > 0]
        images = [image for image in every if isinstance(image, np.ndarray)]
        if not images:
            return cls(name, 1, 1, 1, 0, 0, 0.0, 1.0, True)
        sizes = Counter(image.shape[:2] for image in images)
        (height, width), count = max(sizes.items(), key=lambda item: (item[1], item[0]))
        if count < COMMON * len(images):
            height, width = (int(np.median([image.shape[side] for image in images])) for side in (0, 1))
        channels = 3 if any(image.ndim == 3 for image in images) else 1
        adapted = (_adapted(image, channels, height, width) for image in images)
        mean, scale = center_and_scale(np.array([pixels.mean() for pixels in adapted]))
        other, missing = len(images) - sizes[height, width], len(images) < len(every)
        return cls(name, height, width, channels, len(images), other, mean, scale, missing)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.channels, self.height, self.width

    @property
    def count(self) -> int:
        """Number of inputs that are pixels."""
        return self.channels * self.height * self.width

    def names(self) -> list[str]:
        """Return the names of the inputs other than pixels."""
        return [f"{self.name}: brightness", *([f"{self.name} is missing"] if self.missing else [])]

    def pixels(self) -> list[str]:
        """Return the names of the pixels: color, row and column, from 1."""
        colors = ("",) if self.channels == 1 else ("red ", "green ", "blue ")
        places = [(i, k) for i in range(1, self.height + 1) for k in range(1, self.width + 1)]
        return [f"{self.name}: {color}{i},{k}" for color in colors for i, k in places]

    def accept(self, column: Column, where: str) -> Column:
        """Return a column of images; one without values has missing images."""
        if column.kind != "image" and (column.kind == "unusable" or not column.missing.all()):
            reject(
                where, f"column {short(self.name)} has {column.reason or 'other values'}, and the model needs images"
            )
        return column if column.kind == "image" else Column("image", np.full(len(column), None, dtype=object))

    def encode(self, column: Column) -> tuple[Floats, Pixels]:
        """Return the inputs other than pixels, (rows, inputs), and the pixels, (rows, count) uint8."""
        pixels = np.full((len(column), *self.shape), round(self.mean), dtype=np.uint8)
        brightness, missing = np.full(len(column), self.mean), np.ones(len(column))
        for row, image in enumerate(column.values):
            if isinstance(image, np.ndarray):
                pixels[row] = adapted = _adapted(image, *self.shape)
                brightness[row], missing[row] = adapted.mean(), 0.0
        inputs = [clipped(standardized(brightness, self.mean, self.scale))]
        inputs += [missing] if self.missing else []
        return np.stack(inputs, axis=1), pixels.reshape(len(column), -1)

    def unseen(self, column: Column) -> Unseen:
        """Return the damaged images, and the number of missing ones without an effect."""
        damaged = tuple((row, value) for row, value in enumerate(column.values, 1) if isinstance(value, str))
        empty = 0 if self.missing else int(column.missing.sum()) - len(damaged)
        return Unseen(empty=empty, damaged=damaged)

    def note(self) -> str:
        """Return a note for the user: size and number of the images."""
        kind = "gray" if self.channels == 1 else "colored"
        text = f"column {short(self.name)}: {self.rows:,} images, {kind}, {self.height} × {self.width} pixels"
        largest = f" (larger ones than {LARGEST_SIDE} pixels are reduced first)"
        more = f"; {self.other:,} of another size are resized{largest}"
        return text + (more if self.other else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {field.name: getattr(self, field.name) for field in dataclass_fields(self)}

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Return the encoder of plain data."""
        whole = dict.fromkeys(("height", "width", "channels", "rows", "other"), int)
        kinds = {"kind": str, "name": str, **whole, "mean": float, "scale": float, "missing": bool}
        read = fields(data, where, kinds)
        if not (1 <= read["height"] <= LARGEST_SIDE and 1 <= read["width"] <= LARGEST_SIDE):
            reject(where, f"height and width must be 1 to {LARGEST_SIDE}")
        if read["channels"] not in (1, 3) or not 0 <= read["other"] <= read["rows"] or not 0 <= read["mean"] <= 255:
            reject(where, "channels must be 1 or 3, other at most rows, and mean 0 to 255")
        positive(read["scale"], where)
        return cls(**{name: value for name, value in read.items() if name != "kind"})


def _adapted(image: Pixels, channels: int, height: int, width: int) -> Pixels:
    """Return an image of the size and colors of a model, `(height, width)` if it is gray, else `(channels, height, width)`."""
    image = resized(image, height, width)
    if image.ndim == 2:
        return image
    return _gray(image) if channels == 1 else image.transpose(2, 0, 1)


def _gray(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the luminance of a colored image, as Pillow does."""
    from PIL import Image

    return np.array(Image.fromarray(image).convert("L"), dtype=np.uint8)
