"""The linear head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kapsi.expansion import Identity
from kapsi.modules import Model
from kapsi.recipes.base import RecipeData
from kapsi.recipes.linear_in_parameters import LinearInParameters, column_scale, one_layer
from kapsi.spec import HeadSpec

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
    bounded: ClassVar[bool] = False

    def model(self, data: RecipeData, seed: int = 0) -> Model:
        return one_layer(HeadSpec(Identity(), bias=True), data, seed)[0]

    def penalty(self, model: Model, data: RecipeData) -> Tensor:
        return column_scale(data)[1].square()
