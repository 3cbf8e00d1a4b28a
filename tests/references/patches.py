"""References of patches of images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from references.base import Reference, Table


def patches(f: Any, x: ndarray, t: Any) -> ndarray:
    filters, offsets = t["filters"], t["offsets"]
    images = x.reshape(len(x), f.channels, f.height, -1)
    rows, columns = filters.shape[2:]
    high, wide = images.shape[2] - rows + 1, images.shape[3] - columns + 1
    responses = np.empty((len(x), 2 * len(filters), high, wide))
    for i in range(high):
        for k in range(wide):
            patch = images[:, :, i : i + rows, k : k + columns].reshape(len(x), -1)
            patch = patch - patch.mean(1, keepdims=True) * (patch.shape[1] > 1)
            patch = patch / np.sqrt((patch**2).mean(1, keepdims=True) + f.contrast**2)
            r = patch @ filters.reshape(len(filters), -1).T - offsets
            responses[:, :, i, k] = np.maximum(0, np.concatenate([r, -r], 1) - f.threshold)
    cells = [[_cell(i, min(f.cells, n), n) for i in range(min(f.cells, n))] for n in (high, wide)]
    pooled = [responses[:, :, a][:, :, :, b].mean((2, 3)) for a in cells[0] for b in cells[1]]
    return np.stack(pooled, 2).reshape(len(x), -1)


def _cell(i: int, cells: int, length: int) -> slice:
    return slice(i * length // cells, -(-(i + 1) * length // cells))


def _columns(f: Any, m: int) -> int:
    height, width = f.height, m // f.channels // f.height
    high, wide = height - min(f.size, height) + 1, width - min(f.size, width) + 1
    return 2 * f.count * min(f.cells, high) * min(f.cells, wide)


EXPANSIONS: Table = {"patches": Reference("numpy, patch by patch", patches, _columns)}
