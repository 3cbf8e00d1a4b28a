"""MNIST and CIFAR-10 as rows of pixels: decoded in threads, cached, normalized."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kapsi.data.cache import Arrays, cached, digest
from kapsi.data.hub import HubSplit, PublicData, find, known, read_split
from kapsi.data.progress import terminal_line
from kapsi.errors import DataError, DataSetError

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
# Mean and standard deviation of the training pixels per channel, on the scale 0 to 1.
MEANS = {"mnist": (0.1307,), "cifar10": (0.4914, 0.4822, 0.4465)}
DEVIATIONS = {"mnist": (0.3081,), "cifar10": (0.2470, 0.2435, 0.2616)}
DECODED_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images as rows of pixels, with their classes.

    A row is the image flattened from (channels, height, width): `x.reshape(-1, *shape)` are the images.

    Args:
        train_x: training pixels, (n, features) uint8.
        train_y: class labels from 0, (n,) int64.
        test_x: test pixels, (n, features) uint8.
        test_y: test labels, (n,) int64.
        mean: mean of each channel, on the scale 0 to 1, for `normalize`.
        std: standard deviation of each channel.
        shape: (channels, height, width).
        classes: names of the classes.
        source: folder or repository of the images.
        notes: limitations, such as missing rows.
    """

    train_x: npt.NDArray[np.uint8]
    train_y: npt.NDArray[np.int64]
    test_x: npt.NDArray[np.uint8]
    test_y: npt.NDArray[np.int64]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, int, int]
    classes: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = field(default=())

    def normalize(self, x: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return (x/255 − mean) / std, channel by channel.

        Args:
            x: pixels, (n, features) uint8, such as rows of `train_x`.

        Raises:
            DataError: x has another type or shape.
        """
        size = int(np.prod(self.shape))
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape[1:] != (size,):
            kind = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
            raise DataError(f"images: pixels to normalize must be uint8 of shape (n, {size}), not {kind}")
        levels = np.arange(256) / 255.0
        flat = x.reshape(len(x), self.shape[0], size // self.shape[0])
        out = np.empty(flat.shape, dtype=np.float32)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            # 256 levels, each computed once in float64.
            table = ((levels - mean) / std).astype(np.float32)
            out[:, channel] = table[flat[:, channel]]
        return out.reshape(len(x), size)

    def normalized(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the normalized training and test rows, (n, features) float32 each."""
        return self.normalize(self.train_x), self.normalize(self.test_x)


def load_images(
    name: str, folder: str | Path | None = None, *, watch: Callable[[int, int], None] | None = None
) -> ImageData:
    """Load MNIST ("mnist") or CIFAR-10 ("cifar10") from a folder, else from `KAPSI_DATA`, else from the hub.

    Decoded pixels are cached; loading from the cache takes less than a second.

    Args:
        name: name of the data set.
        folder: folder with NAME/train.parquet and NAME/test.parquet, or with the files of the hub.
        watch: called with the numbers of decoded and of all images; by default progress is shown on a terminal.

    Raises:
        DataSetError: the data set is unknown or damaged, or neither folder nor network is available.
    """
    data = known(name, "images")
    source = find(data, folder)

    def make() -> Arrays:
        parts = [read_split(source, test) for test in (False, True)]
        total = sum(len(part.labels) for part in parts)
        arrays: Arrays = {}
        report = watch or terminal_line(f"decoding {name}")
        before = 0
        for key, part in zip(("train", "test"), parts, strict=True):
            arrays[f"{key}_x"] = _decoded(part, data, source.where, functools.partial(_shift, report, before, total))
            arrays[f"{key}_y"] = part.labels
            before += len(part.labels)
        arrays["notes"] = np.array([note for part in parts for note in part.notes], dtype=np.str_)
        return arrays

    arrays, notes = cached(f"{name}-{digest(source.where)}", source.fingerprint, make)
    return ImageData(
        arrays["train_x"],
        arrays["train_y"],
        arrays["test_x"],
        arrays["test_y"],
        mean=MEANS[name],
        std=DEVIATIONS[name],
        shape=SHAPES[name],
        classes=data.classes,
        source=source.where,
        notes=(*arrays["notes"].tolist(), *notes),
    )


def _shift(report: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    report(before + done, total)


def _decoded(part: HubSplit, data: PublicData, where: str, report: Callable[[int], None]) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError:
        raise DataSetError(
            f'{data.name}: pillow, which decodes the images, is not installed; pip install "kapsi[data]"'
        ) from None
    channels, height, width = SHAPES[data.name]
    mode = "L" if channels == 1 else "RGB"
    Image.init()  # load all formats before the threads start
    out = np.empty((len(part.labels), channels, height, width), dtype=np.uint8)

    def block(begin: int) -> int:
        files = part.values.slice(begin, DECODED_AT_ONCE).to_pylist()
        for row, file in enumerate(files, start=begin):
            try:
                with Image.open(io.BytesIO(file), formats=("PNG", "WEBP")) as image:
                    if image.size != (width, height):
                        raise ValueError(f"{image.size[0]} × {image.size[1]} pixels instead of {width} × {height}")
                    if image.mode != mode:
                        raise ValueError(f"mode {image.mode} instead of {mode}")
                    pixels = np.asarray(image)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                reason = " ".join(str(error).split())
                raise DataSetError(
                    f"{where}: image {row + 1} cannot be read ({reason}); save the files again"
                ) from None
            out[row] = pixels if channels == 1 else pixels.transpose(2, 0, 1)
        return len(files)

    done = 0
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for count in pool.map(block, range(0, len(out), DECODED_AT_ONCE)):
            done += count
            report(done)
    return out.reshape(len(out), -1)
