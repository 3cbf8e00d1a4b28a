"""References of decision trees."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from references.base import Reference, Table


def tree_leaves(f: Any, x: ndarray, t: Any) -> ndarray:
    """Return the products of the conditions on the path to each leaf, from the leaf up."""
    x = x.astype(np.float32).astype(np.float64) if f.single else x
    splits = f.leaves - f.trees
    parents = {}
    for side in (0, 1):
        parents |= {int(child): (node, side) for node, child in enumerate(t["branches"][side])}
    columns = []
    for leaf in range(splits, splits + f.leaves):
        reached, node = np.ones(len(x)), leaf
        while node in parents:
            node, side = parents[node]
            below = x[:, t["feature"][node]] <= t["threshold"][node]
            reached = reached * (below if side == 0 else ~below)
        assert node in t["roots"]
        columns.append(reached)
    return np.stack(columns, 1)


EXPANSIONS: Table = {"tree_leaves": Reference("the conditions on each path", tree_leaves, lambda f, m: f.leaves)}
