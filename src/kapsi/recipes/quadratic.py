"""The quadratic head: linear terms, squares and products of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kapsi.expansion import Taylor
from kapsi.function import option
from kapsi.modules import Model
from kapsi.process import Affine, Clamp
from kapsi.recipes.base import RecipeData
from kapsi.recipes.linear_in_parameters import LinearInParameters, bound, column_scale, one_layer
from kapsi.spec import HeadSpec

__all__ = ["QuadraticHead"]

MAX_INPUTS = 100
"""Inputs whose products are formed, at most: 5,150 columns."""

MAX_RATIO = 10
"""Columns for each row, at most: products of noise drown the others."""

RATIOS = (1.0, 10.0, 100.0)
"""Candidates for the penalty of products, relative to that of linear terms."""


@dataclass(frozen=True)
class QuadraticHead(LinearInParameters, name="quadratic"):
    """A quadratic function of standardized inputs, z = (x − mean)/scale: b + Σ wᵢzᵢ + Σ wᵢⱼzᵢzⱼ.

    Inputs are clamped to the range of the training rows, since squares explode on heavy tails. The penalty of a product is `ratio`
    times that of a linear term: strong penalties lead to a linear function.

    Args:
        l2: see `LinearInParameters`.
        ratio: penalty of squares and products, relative to that of linear terms; None: 1, 10 or 100, by held-out rows.
    """

    complexity: ClassVar[int] = 2
    explainable: ClassVar[bool] = True

    ratio: float | None = option(None, minimum=1e-6, maximum=1e6)

    def candidates(self, data: RecipeData) -> tuple[QuadraticHead, ...]:
        ratios = RATIOS if self.ratio is None else (self.ratio,)
        return tuple(QuadraticHead(self.l2, ratio) for ratio in ratios)

    def reason_against(self, data: RecipeData) -> str | None:
        rows, inputs = data.x.shape
        width = self.width(rows, inputs)
        if inputs > MAX_INPUTS:
            return f"{inputs:,} inputs; the products of at most {MAX_INPUTS} are formed"
        if width > MAX_RATIO * rows:
            return f"{width:,} squares and products are too many for {rows:,} rows"
        return super().reason_against(data)

    def width(self, rows: int, inputs: int) -> int:
        return inputs + inputs * (inputs + 1) // 2

    def model(self, data: RecipeData, seed: int = 0) -> Model:
        spec = HeadSpec(Taylor(2, symmetric=True), bias=True, before=(Clamp(), Affine()))
        model, head = one_layer(spec, data, seed)
        bound(head, data, *column_scale(data))
        return model

    def penalty(self, model: Model, data: RecipeData) -> Any:
        m = data.x.shape[1]
        ratio = torch.ones(self.width(0, m), dtype=torch.float64)
        ratio[m:] = self.ratio or 1.0

        def strength(deviation: Tensor) -> Tensor:
            # At least that of products of independent inputs of unit variance: rare ones are shrunk.
            least = torch.ones_like(deviation)
            least[m:] = 2**0.5
            return torch.maximum(deviation, least).square() * ratio

        return strength
