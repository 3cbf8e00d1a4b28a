"""Features of the patches of images: shared filters at all positions, pooled in the cells of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion
from kapsi.expansion.numerics import working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = ["Patches"]

SAMPLED = 100_000
"""Patches that the filters are estimated from."""

WHITENING = 0.1
"""Addition to the variances of patches of unit variance before whitening."""

AT_ONCE = 2**20
"""Responses of filters in memory together, which fit into the cache: four times as fast as those of a hundred images."""

STEPS = 10
"""Steps of spherical k-means."""


@dataclass(frozen=True)
class Patches(Expansion, name="patches"):
    """Responses of shared filters: κ(x) = mean over the patches p of a cell of max(0, ±(⟨q_k, p̂⟩ − t_k) − a), D = 2·count·cells².

    x is an image, flattened from (channels, height, width), or a signal with height 1. Its patches have `size` × `size` pixels,
    fewer in an image with a smaller side; p̂ = (p − mean)/√(variance + contrast²). The columns are the positive, then the negative
    parts of the filters, each in the cells of a grid of `cells` × `cells` positions, fewer in a small image.

    `kapsi.calibrate` sets the filters q `(count, channels, rows, columns)` and offsets t `(count,)`, which are buffers, from
    patches of the data: directions of whitened patches by spherical k-means. Before, filters are random.

    Args:
        count: number of filters, 1 to 65,536.
        size: side of a patch, in pixels.
        cells: side of the grid of cells, 1 to 64.
        threshold: a, at least 0.
        contrast: standard deviation that patches are compared with, above 0, in units of the inputs: weaker ones are noise.
        channels: number of channels.
        height: number of rows of the image.

    Raises:
        SpecError: a number of inputs that is no multiple of channels times height.

    Source: Coates, Lee, Ng: An Analysis of Single-Layer Networks in Unsupervised Feature Learning (AISTATS 2011); Coates and Ng:
        The Importance of Encoding Versus Training (ICML 2011), for the thresholds.

    Example:
        >>> import torch
        >>> kappa, edge = Patches(count=1, size=2, threshold=0.0), torch.tensor([0.0, 0.0, 1.0, 1.0])
        >>> tensors = {"filters": torch.tensor([[[[-1.0, 1.0]]]]), "offsets": torch.zeros(1)}
        >>> kappa(edge, tensors).dense()
        tensor([0.6537, 0.0000])
    """

    examples = (
        {"count": 3, "size": 2},
        {"count": 2, "size": 3, "cells": 2, "threshold": 0.1},
        {"count": 1, "size": 1, "contrast": 1.0, "threshold": 0.0},
    )

    count: int = option(100, minimum=1, maximum=65_536)
    size: int = option(6, minimum=1, maximum=1024)
    cells: int = option(1, minimum=1, maximum=64)
    threshold: float = option(0.5, minimum=0.0, maximum=1e6)
    contrast: float = option(0.1, minimum=1e-6, maximum=1e6)
    channels: int = option(1, minimum=1, maximum=1024)
    height: int = option(1, minimum=1, maximum=65_536)

    def _sides(self, in_features: int) -> tuple[int, int, int, int]:
        """Return height and width of the image, and of a patch."""
        width, rest = divmod(in_features, self.channels * self.height)
        if rest or not width:
            raise SpecError(
                f"Patches(channels={self.channels}, height={self.height}): {in_features} inputs are no multiple of "
                f"{self.channels * self.height}; give channels and height of the images"
            )
        return self.height, width, min(self.size, self.height), min(self.size, width)

    def _grid(self, in_features: int) -> tuple[int, int]:
        height, width, rows, columns = self._sides(in_features)
        return min(self.cells, height - rows + 1), min(self.cells, width - columns + 1)

    def factors(self, in_features: int) -> tuple[int, int]:
        return 2 * self.count, math.prod(self._grid(in_features))

    def params(self, in_features: int) -> Params:
        _, _, rows, columns = self._sides(in_features)
        shape = (self.count, self.channels, rows, columns)
        return {
            "filters": Param(shape, math.prod(shape[1:]) ** -0.5, trainable=False),
            "offsets": Param((self.count,), "zeros", trainable=False),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        height, width, rows, columns = self._sides(x.shape[-1])
        images = x.reshape(-1, self.channels, height, width)
        generator = torch.Generator().manual_seed(0)
        count = min(SAMPLED, len(images) * (height - rows + 1) * (width - columns + 1))
        row, top, left = (
            torch.randint(most, (count, 1, 1, 1), generator=generator).to(x.device)
            for most in (len(images), height - rows + 1, width - columns + 1)
        )
        down, right = torch.arange(rows).to(x.device)[:, None], torch.arange(columns).to(x.device)
        channel = torch.arange(self.channels).to(x.device)[:, None, None]
        patches = images[row, channel, top + down, left + right].flatten(1).double()
        if patches.shape[1] > 1:
            patches = patches - patches.mean(1, keepdim=True)
        patches = patches / (patches.square().mean(1, keepdim=True) + self.contrast**2).sqrt()
        mean = patches.mean(0)
        values, vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
        whitening = (vectors / (values.clamp_min(0) + WHITENING).sqrt()) @ vectors.T
        filters = whitening @ _directions((patches - mean) @ whitening, self.count, generator).T
        return {"filters": filters.T.reshape(params["filters"].shape), "offsets": mean @ filters}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        height, width, rows, columns = self._sides(x.shape[-1])
        images = working_precision(x).reshape(-1, self.channels, height, width)
        most = max(1, AT_ONCE // (2 * self.count * (height - rows + 1) * (width - columns + 1)))
        if torch.compiler.is_compiling() or len(images) <= most:
            pooled = self._pooled(images, params, x.shape[-1])
        else:
            parts = (self._pooled(part, params, x.shape[-1]) for part in images.split(most))
            pooled = torch.cat(list(parts)) if torch.is_grad_enabled() else _stacked(parts, len(images))
        return DenseFeatures(pooled.reshape(*x.shape[:-1], self.out_features(x.shape[-1])).to(x.dtype))

    def _pooled(self, images: Tensor, params: Tensors, in_features: int) -> Tensor:
        """Return the features of images, `(b, 2·count, rows, columns)` of the grid."""
        _, _, rows, columns = self._sides(in_features)
        filters, offsets = working_precision(params["filters"]), working_precision(params["offsets"])
        responses = _correlation(images, filters)
        area = self.channels * rows * columns
        box = torch.full_like(filters[:1], 1 / area)
        mean = _correlation(images, box) if area > 1 else torch.zeros_like(images)
        second = _correlation(images.square(), box)
        deviation = ((second - mean.square()).clamp_min(0) + self.contrast**2).sqrt()
        responses = (responses - mean * filters.sum((1, 2, 3))[:, None, None]) / deviation - offsets[:, None, None]
        both = torch.cat([responses - self.threshold, -responses - self.threshold], 1).relu()
        return _pool(both, self._grid(in_features))


def _stacked(parts: Iterable[Tensor], rows: int) -> Tensor:
    """Return parts one below the other, copied one by one.

    Parts kept for `torch.cat` lie within the freed memory of their computation, which no later part fits into:
    1 MB an image of CIFAR-10.
    """
    stacked, begin = torch.empty(0), 0
    for part in parts:
        stacked = stacked if begin else part.new_empty(rows, *part.shape[1:])
        stacked[begin : begin + len(part)] = part
        begin += len(part)
    return stacked


def _correlation(images: Tensor, filters: Tensor) -> Tensor:
    """Return the responses of filters `(f, channels, rows, columns)` at all places of images."""
    if _exact(images):
        patches = images.unfold(2, filters.shape[2], 1).unfold(3, filters.shape[3], 1)
        return torch.einsum("bchwij,fcij->bfhw", patches, filters)
    return F.conv2d(images, filters)


def _pool(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the means of values `(b, f, rows, columns)` in the cells of a grid, `(b, f, *grid)`."""
    if _exact(values):
        rows, columns = (_averages(*sides).to(values) for sides in zip(values.shape[2:], grid, strict=True))
        return rows @ values @ columns.T
    return F.adaptive_avg_pool2d(values, grid)


def _averages(count: int, cells: int) -> Tensor:
    """Return the matrix that averages `count` values in cells, `(cells, count)`, as adaptive pooling does."""
    matrix = torch.zeros(cells, count, dtype=torch.float64)
    for i in range(cells):
        begin, end = i * count // cells, -(-(i + 1) * count // cells)
        matrix[i, begin:end] = 1 / (end - begin)
    return matrix


def _exact(values: Tensor) -> bool:
    """Return whether products replace convolutions: exported in float64, which onnxruntime convolves in float32 alone."""
    return values.dtype == torch.float64 and torch.compiler.is_compiling()


def _directions(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return directions `(count, m)` of unit length by spherical k-means, from some of the rows."""
    first = torch.randperm(len(rows), generator=generator)[torch.arange(count) % len(rows)].to(rows.device)
    # Equal or vanishing rows get different directions.
    noise = 1e-3 * torch.randn(count, rows.shape[1], generator=generator, dtype=rows.dtype).to(rows.device)
    directions = F.normalize(rows[first] + noise, dim=1)
    for _ in range(STEPS):
        products = rows @ directions.T
        nearest = products.abs().argmax(1, keepdim=True)
        signed = rows * products.gather(1, nearest)
        sums = torch.zeros_like(directions).index_add_(0, nearest[:, 0], signed)
        directions = F.normalize(sums + 1e-3 * directions, dim=1)
    return directions
