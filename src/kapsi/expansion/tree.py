"""Decision trees: indicators of leaves."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion
from kapsi.expansion.numerics import working_precision
from kapsi.features import Features, LeafFeatures
from kapsi.function import Param, Params, Tensors, option

__all__ = ["TreeLeaves"]

BLOCK = 2**15
"""Pairs of a row and a tree that descend together; they fit into the cache."""


@dataclass(frozen=True)
class TreeLeaves(Expansion, name="tree_leaves"):
    """The leaf of each tree reached by a row: κ(x)_l = Π [x_f ≤ θ or x_f > θ] over the splits on the path to leaf l, D =
    leaves.

    For each tree a single column is 1 and the others are 0; a dense ψ with the values of the leaves makes a decision tree
    or a sum of trees. All rows and trees descend a level at a time, so the cost grows with the depth, not with the number
    of splits. A product with ψ gathers the values of the leaves; κ(x) is not materialized.

    Nodes are numbered: the splits 0 to S − 1, S = leaves − trees, then the leaves from S in the order of columns. The
    buffers are `roots` `(trees,)`, the first node of each tree; `feature` and `threshold` `(S,)`, the input and θ of each
    split; `branches` `(2, S)`, the next nodes for x_f ≤ θ (first row) and x_f > θ, with larger numbers than the split
    itself; `inputs`, m; and with `missing` also `missing_left` `(S,)`, whether NaN takes the first branch.

    Before calibration the splits are at quantiles of a standard normal distribution; `kapsi.calibrate` puts each at the
    median of the rows that reach the split. The gradient is zero, so steps before κ are not trained.

    Args:
        leaves: D, of all trees together, at least as many as trees, to 10,000,000.
        trees: number of trees, 1 to 1,000,000.
        depth: maximum number of splits on a path, at least the depth of balanced trees, to 1,000.
        single: round inputs to float32 before comparisons, as scikit-learn's trees do.
        missing: treat NaN as missing and send it to a branch given by `missing_left`; False: a NaN spoils its row.

    Raises:
        SpecError: fewer leaves than trees, or a depth too small for balanced trees with this number of leaves.

    Source: Breiman, Friedman, Olshen and Stone, Classification and Regression Trees (1984), section 2.

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(2, 1, kp.HeadSpec(TreeLeaves(leaves=3, trees=1, depth=2)))
        >>> head.assign("expansion", feature=[0, 1], threshold=[0.5, 2.0], branches=[[2, 3], [1, 4]])
        >>> head.expand(torch.tensor([[0.5, 9.0], [1.0, 2.0], [1.0, 3.0]])).dense()
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """

    examples = (
        {},
        {"leaves": 3, "trees": 1, "depth": 2},
        {"leaves": 11, "trees": 3, "depth": 5, "single": False},
        {"leaves": 2, "trees": 2, "depth": 0},
    )

    leaves: int = option(16, minimum=1, maximum=10_000_000)
    trees: int = option(4, minimum=1, maximum=1_000_000)
    depth: int = option(3, minimum=0, maximum=1_000)
    single: bool = True
    missing: bool = False

    def check(self) -> None:
        if self.leaves < self.trees:
            raise SpecError(
                f"TreeLeaves(leaves={self.leaves}, trees={self.trees}): a tree has at least one leaf; give as many leaves as trees"
            )
        min_depth = math.ceil(math.log2(-(-self.leaves // self.trees)))
        if self.depth < min_depth:
            raise SpecError(
                f"TreeLeaves(leaves={self.leaves}, trees={self.trees}, depth={self.depth}): the depth must be at least {min_depth}"
            )

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, self.leaves

    def params(self, in_features: int) -> Params:
        splits = self.leaves - self.trees

        def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype | None = torch.int64) -> Param:
            init = functools.partial(_first, self.leaves, self.trees, in_features, name)
            return Param(shape, init, trainable=False, dtype=dtype)

        params = {
            "inputs": Param((1,), (float(in_features),), trainable=False, dtype=torch.int64),
            "roots": buffer("roots", (self.trees,)),
            "feature": buffer("feature", (splits,)),
            "threshold": buffer("threshold", (splits,), None),
            "branches": buffer("branches", (2, splits)),
        }
        if self.missing:
            params["missing_left"] = Param((splits,), "zeros", trainable=False, dtype=torch.bool)
        return params

    def validate(self, tensors: Tensors) -> None:
        """Raise a `SpecError` unless the nodes form trees of this depth."""
        splits, nodes = self.leaves - self.trees, 2 * self.leaves - self.trees
        roots, feature, children = (tensors[name].cpu() for name in ("roots", "feature", "branches"))
        inputs = int(tensors["inputs"])
        if bool(((feature < 0) | (feature >= inputs)).any()):
            raise SpecError(f"TreeLeaves: feature: expected indices of inputs from 0 to {inputs - 1}")
        all_nodes = torch.cat((roots, children.flatten()))
        if not torch.equal(all_nodes.sort().values, torch.arange(nodes)):
            raise SpecError(
                f"TreeLeaves: roots and branches: expected each of the nodes 0 to {nodes - 1} once, splits before leaves; "
                "assign them together"
            )
        if bool((children <= torch.arange(splits)).any()):
            raise SpecError("TreeLeaves: branches: expected larger numbers than that of the split they belong to")
        depth, level = 0, roots[roots < splits]
        while len(level):
            below = children[:, level].flatten()
            depth, level = depth + 1, below[below < splits]
        if depth > self.depth:
            raise SpecError(f"TreeLeaves(depth={self.depth}): branches: a leaf lies {depth} splits deep")

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return thresholds at the median of the rows reaching each split; splits without rows keep theirs."""
        feature, children = params["feature"].tolist(), params["branches"].T.tolist()
        threshold = params["threshold"].detach().cpu().double()
        values = x.detach().cpu()
        values = (values.float() if self.single else values).double()
        reaching = {root: torch.arange(len(values)) for root in params["roots"].tolist()}
        for node, (left, right) in enumerate(children):
            rows = reaching.pop(node)
            column = values[rows, feature[node]]
            known = column[~column.isnan()]
            if len(known):
                threshold[node] = known.median()
            below = column <= threshold[node]
            reaching[left], reaching[right] = rows[below], rows[~below]
        return {"threshold": threshold}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        threshold = working_precision(params["threshold"])
        values = working_precision(x)
        values = (values.float() if self.single else values).to(threshold.dtype)
        # Infinity must not exceed a threshold that stands for infinity.
        values = values.clamp(max=torch.finfo(values.dtype).max)
        missing = params["missing_left"] if self.missing else None
        nodes = _Nodes(params["roots"], params["feature"], threshold, params["branches"], missing)
        with torch.no_grad():
            # Blocks need values, and pay for a copy of the nodes if there are more rows than splits on a path.
            if _has_values(values) and values[..., 0].numel() * self.trees * 2 > self.leaves:
                indices = nodes.descend_in_blocks(values, self.depth)
            else:
                indices = nodes.descend(values, self.depth)
        offset = x.new_zeros(x.shape[:-1])
        if not self.missing:
            offset = offset.masked_fill(x.isnan().any(-1), torch.nan)
        return LeafFeatures(indices, offset, self.leaves)


def _has_values(x: Tensor) -> bool:
    """Return whether x is an ordinary tensor with values on the CPU."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(x) is Tensor and x.device.type == "cpu"


class _Nodes(NamedTuple):
    """The trees of `TreeLeaves`; see there. `missing_left` is None if missing values have no branch."""

    roots: Tensor
    feature: Tensor
    threshold: Tensor
    branches: Tensor
    missing_left: Tensor | None

    def descend(self, x: Tensor, depth: int) -> Tensor:
        """Return the leaf of each tree, `(..., trees)`, without control flow that depends on values."""
        splits = len(self.feature)
        node = self.roots.expand(*x.shape[:-1], len(self.roots))
        left, right = self.branches.unbind(0)
        for _ in range(depth if splits else 0):
            split = node.clamp_max(splits - 1)
            value = x.gather(-1, self.feature[split])
            first = value <= self.threshold[split]
            if self.missing_left is not None:
                first = torch.where(value.isnan(), self.missing_left[split], first)
            node = torch.where(node < splits, torch.where(first, left[split], right[split]), node)
        return node - splits

    def descend_in_blocks(self, x: Tensor, depth: int) -> Tensor:
        """Return the same as int32 by a third of the operations, in blocks of rows that fit into the cache."""
        trees, inputs = len(self.roots), x.shape[-1]
        following, feature, threshold, missing_right, leaf = self._in_pairs(x.dtype)
        rows = x.detach().reshape(-1, inputs)
        if not bool(rows.isnan().any()):
            missing_right = None
        result = torch.empty(len(rows) * trees, dtype=torch.int32)
        # Offsets of rows are of 32 bits, too.
        count = max(1, min(BLOCK // trees, 2**30 // inputs))
        for begin in range(0, len(rows), count):
            block = rows[begin : begin + count]
            number, block = len(block), block.reshape(-1)
            node = torch.arange(trees, dtype=torch.int32).repeat(number)
            offset = (torch.arange(number, dtype=torch.int32) * inputs).repeat_interleave(trees)
            for _ in range(depth):
                value = block.index_select(0, feature.index_select(0, node).add_(offset))
                second = value > threshold.index_select(0, node)
                if missing_right is not None:
                    second |= value.isnan() & missing_right.index_select(0, node)
                after = following.index_select(0, node).add_(second)
                if torch.equal(after, node):
                    break
                node = after
            torch.index_select(leaf, 0, node, out=result[begin * trees : (begin + number) * trees])
        return result.view(*x.shape[:-1], trees)

    def _in_pairs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Return the trees with nodes numbered anew: roots, then the children of each split side by side.

        Returns:
            following: the first child of a split, and a leaf itself, int32.
            feature: input, 0 for leaves, int32.
            threshold: θ, infinite for leaves.
            missing_right: whether NaN takes the second branch.
            leaf: number of the leaf, int32; negative for splits.
        """
        trees, splits = len(self.roots), len(self.feature)
        old = torch.cat((self.roots, self.branches.mT.reshape(-1)))
        split = old < splits
        number = old.clamp_max(max(splits - 1, 0)) if splits else old.new_zeros(0)
        following = torch.where(split, trees + 2 * old, torch.arange(len(old))).int()
        if not splits:
            empty = torch.zeros(trees)
            return following, empty.int(), empty.to(dtype) + torch.inf, None, (old - splits).int()
        feature = torch.where(split, self.feature[number], 0).int()
        threshold = torch.where(split, self.threshold.detach()[number], torch.inf).to(dtype)
        missing = None if self.missing_left is None else split & ~self.missing_left[number]
        return following, feature, threshold, missing, (old - splits).int()


def _first(
    leaves: int, trees: int, in_features: int, name: str, shape: tuple[int, ...], generator: Generator | None
) -> Tensor:
    """Return a buffer of balanced trees, split at quantiles of a normal distribution, cycling through the inputs."""
    splits = leaves - trees
    roots: list[int] = []
    rows: list[tuple[int, float, int, int]] = []
    counts = [leaves // trees + (tree < leaves % trees) for tree in range(trees)]
    begin, column = 0, splits
    for tree, count in enumerate(counts):
        fraction = 0.3 + 0.4 * (tree + 0.5) / trees
        roots.append(begin if count > 1 else column)
        rows += _balanced(count, begin, column, in_features, tree, fraction)
        begin, column = begin + count - 1, column + count
    if name == "roots":
        return torch.tensor(roots)
    if name == "branches":
        return torch.tensor([[row[2] for row in rows], [row[3] for row in rows]], dtype=torch.int64)
    if name == "threshold":
        return torch.tensor([row[1] for row in rows], dtype=torch.float64)
    return torch.tensor([row[0] for row in rows], dtype=torch.int64)


def _balanced(
    count: int, begin: int, column: int, inputs: int, tree: int, fraction: float
) -> Iterator[tuple[int, float, int, int]]:
    """Yield (feature, threshold, first child, second child) of the splits of a tree, parents before children."""
    if count == 1:
        return
    # For each split: number of leaves below, the first of these leaves, level, and remaining range of each input.
    Ranges = dict[int, tuple[float, float]]
    queue: list[tuple[int, int, int, Ranges]] = [(count, column, 0, {})]
    next_node = begin + 1
    while queue:
        below, leaf, level, ranges = queue.pop(0)
        feature = (tree + level) % inputs
        low, high = ranges.get(feature, (0.0, 1.0))
        middle = low + fraction * (high - low)
        children = []
        for part, start, side in (
            ((below + 1) // 2, leaf, (low, middle)),
            (below // 2, leaf + (below + 1) // 2, (middle, high)),
        ):
            if part == 1:
                children.append(start)
            else:
                children.append(next_node)
                next_node += 1
                queue.append((part, start, level + 1, {**ranges, feature: side}))
        yield feature, NormalDist().inv_cdf(min(max(middle, 1e-12), 1 - 1e-12)), children[0], children[1]
