"""The linear head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kapsi.expansion import Identity
from kapsi.modules import Model
from kapsi.recipes.base import RecipeData
from kapsi.recipes.linear_in_parameters import LinearInParameters
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

__all__ = ["LinearHead"]


@dataclass(frozen=True)
class LinearHead(LinearInParameters, name="linear"):
    """A linear function: ⟨x, w⟩ + b; ridge regression, or logistic regression for classes.

    The penalty of a number is its variance, that of an indicator a quarter of its squared range, the variance of a balanced
    one: rare categories are shrunk more.

    Args:
        l2: see `LinearInParameters`.
    """

    complexity: ClassVar[int] = 0
    explainable: ClassVar[bool] = True

    def model(self, data: RecipeData, seed: int = 0) -> Model:
        head = HeadSpec(Identity(), bias=True)
        return Model(ModelSpec((data.x.shape[1], data.outputs), (LayerSpec((head,)),)), seed=seed, dtype=torch.float64)

    def penalty(self, model: Model, data: RecipeData) -> Callable[[Tensor], Tensor]:
        return lambda deviation: column_scale(data, deviation).square()


def column_scale(data: RecipeData, deviation: Tensor) -> Tensor:
    """Return the standard deviation of numbers, and half the range of indicators, `(m,)`."""
    low, high = data.x.aminmax(dim=0)
    return torch.where(data.numeric, deviation, (high - low) / 2)
