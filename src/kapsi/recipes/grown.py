"""Trees grown by scikit-learn for recipes: structure from scikit-learn, values of the leaves from the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kapsi.modules import Model
from kapsi.recipes.base import RecipeData, row_losses
from kapsi.zoo.trees import joined_trees, model_of_trees

__all__ = [
    "GrownTree",
    "constant_outputs",
    "derivatives",
    "grow",
    "growing",
    "inputs_of",
    "model_of",
    "random_state",
    "total_loss",
]

CHUNK = 2**22
"""Numbers of a curvature that are computed at a time."""


class GrownTree(NamedTuple):
    """A tree with values of its nodes.

    Attributes:
        tree: scikit-learn's tree.
        values: values of the nodes, `(nodes, n)`; those of splits have no meaning.
    """

    tree: Any
    values: Tensor

    def __call__(self, x: NDArray[np.float32]) -> Tensor:
        """Return the values of the leaves of rows `(rows, m)`, `(rows, n)`."""
        return self.values[torch.from_numpy(self.tree.apply(x))]


@contextmanager
def growing() -> Iterator[None]:
    """Grow trees on one thread without checks of options and inputs, a third of the time on a few rows."""
    import sklearn
    import threadpoolctl

    # The user's threads are left alone; those of others would make sums depend on their number.
    with threadpoolctl.threadpool_limits(1), sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        yield


def random_state(seed: int) -> np.random.RandomState:
    """Return a source of random numbers for all trees: scikit-learn would make one for each tree from a number."""
    return np.random.RandomState(seed % 2**32)


def inputs_of(x: Tensor) -> NDArray[np.float32]:
    """Return rows in the type that scikit-learn's trees compare in."""
    limit = float(torch.finfo(torch.float32).max)
    return np.ascontiguousarray(x.clamp(-limit, limit).float().numpy())


def grow(
    x: NDArray[np.float32],
    targets: NDArray[np.float64],
    weight: NDArray[np.float64] | None,
    random_state: np.random.RandomState,
    *,
    random_splits: bool,
    **options: Any,
) -> Any:
    """Return a tree of least squares for targets `(rows, k)`."""
    from sklearn.tree import DecisionTreeRegressor, ExtraTreeRegressor

    kind = ExtraTreeRegressor if random_splits else DecisionTreeRegressor
    return kind(random_state=random_state, **options).fit(x, targets, weight, check_input=False).tree_


def model_of(trees: Sequence[GrownTree], constant: Tensor, inputs: int) -> Model:
    """Return the model f(x) = c + Σ over trees of the value of the leaf of x."""
    values = torch.cat([tree.values for tree in trees]).numpy()
    return model_of_trees(joined_trees([tree.tree for tree in trees], values), inputs, constant.numpy())


def derivatives(outputs: Tensor, data: RecipeData) -> tuple[Tensor, Tensor]:
    """Return the gradient and the diagonal of the curvature of the loss of each row in its outputs, `(rows, n)` each.

    Outputs of classes are defined up to a constant: the curvature of n of them counts n / (n − 1) times.
    """
    size = max(1, CHUNK // outputs.shape[1] ** 2)
    pairs = [data.loss.diagonal_curvature(*each) for each in zip(outputs.split(size), data.y.split(size), strict=True)]
    gradient, curvature = pairs[0] if len(pairs) == 1 else map(torch.cat, zip(*pairs, strict=True))
    n = outputs.shape[1]
    return gradient, curvature * (n / (n - 1)) if data.loss.shift_invariant and n > 1 else curvature


def constant_outputs(data: RecipeData) -> Tensor:
    """Return the constant with the least loss, `(n,)`; a class without rows gets a very low logit."""
    weight = weight_of(data)
    if data.classes:
        counts = torch.zeros(data.classes, dtype=torch.float64).index_add_(0, data.y, weight) + LEAST_SHARE
        return (counts / counts.sum()).log()
    constant = torch.zeros(data.outputs, dtype=torch.float64)
    for _ in range(1 if data.loss.closed_form else 100):
        gradient, curvature = derivatives(constant.expand(len(data.x), -1), data)
        step = (weight @ gradient) / (weight @ curvature).clamp_min(1e-12)
        constant = constant - (step if data.loss.closed_form else step.clamp(-1, 1))
        if float(step.abs().max()) < 1e-10:
            break
    return constant


LEAST_SHARE = 1e-3
"""Rows added to each class."""


def weight_of(data: RecipeData) -> Tensor:
    """Return the weights of the rows, `(rows,)`."""
    return torch.ones(len(data.x), dtype=torch.float64) if data.weight is None else data.weight


def total_loss(outputs: Tensor, data: RecipeData) -> float:
    """Return the weighted sum of the losses of rows; infinity if not finite."""
    value = float(weight_of(data) @ row_losses(outputs, data.y, data.loss))
    return value if np.isfinite(value) else float("inf")
