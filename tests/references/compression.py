"""References of expansions that compress."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA

from references.base import Reference, Table


def principal_components(f: Any, x: ndarray, t: Any) -> ndarray:
    fitted = PCA(whiten=False).fit(np.eye(x.shape[1]))
    fitted.mean_, fitted.components_ = t["mean"], t["components"]
    return fitted.transform(x)


def center_distances(f: Any, x: ndarray, t: Any) -> ndarray:
    return cdist(x, t["centers"], "sqeuclidean" if f.squared else "euclidean")


EXPANSIONS: Table = {
    "principal_components": Reference(
        "sklearn.decomposition.PCA", principal_components, lambda f, m: m if f.count is None else min(f.count, m)
    ),
    "center_distances": Reference("scipy.spatial.distance.cdist", center_distances, lambda f, m: f.centers),
}
