"""The head without inputs: class frequencies, or means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kapsi.modules import Model
from kapsi.recipes.base import HeadRecipe, RecipeData
from kapsi.recipes.linear_in_parameters import assign, one_layer
from kapsi.spec import HeadSpec

__all__ = ["ConstantHead"]

LEAST_SHARE = 1e-3
"""Rows added to each class: logits of classes without rows stay finite."""


TINY = 1e-12
"""Least mean of targets of at least 0."""

STEPS = 30


@dataclass(frozen=True)
class ConstantHead(HeadRecipe, name="constant"):
    """f(x) = b: the logarithms of the class frequencies, or the constant with the least loss.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.recipes import RecipeData
        >>> x, y = torch.zeros(4, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 1])
        >>> data = RecipeData(x, y, kp.CrossEntropy(), 2, torch.ones(2, dtype=torch.bool))
        >>> [round(p, 3) for p in ConstantHead().fit(data)(x)[0].softmax(0).tolist()]
        [0.25, 0.75]
    """

    complexity: ClassVar[int] = -1
    explainable: ClassVar[bool] = True

    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        model, head = one_layer(HeadSpec(bias=True), data, seed)
        weight = torch.ones(len(data.x), dtype=torch.float64) if data.weight is None else data.weight
        if data.classes:
            counts = torch.zeros(data.classes, dtype=torch.float64).index_add_(0, data.y, weight) + LEAST_SHARE
            bias = (counts / counts.sum()).log()
        else:
            mean = weight @ data.y / weight.sum()
            bias = mean.clamp_min(TINY).log() if data.loss.log_link else mean
            if not data.loss.closed_form and data.loss.has_curvature:
                bias = _newton(bias, data, weight)
        with torch.no_grad():
            assign(model, bias.new_zeros(head.factors[0] * head.factors[1], data.outputs), bias)
        return model


def _newton(bias: Tensor, data: RecipeData, weight: Tensor) -> Tensor:
    """Return the constant outputs with the least loss; steps that do not lower it are halved."""

    def loss(value: Tensor) -> float:
        return float(weight @ data.loss.rows(value.expand(len(data.y), -1), data.y))

    best = loss(bias)
    for _ in range(STEPS):
        gradient, factor = data.loss.curvature(bias.expand(len(data.y), -1), data.y)
        curvature = torch.einsum("r,rki,rkj->ij", weight, factor, factor)
        step = torch.linalg.lstsq(curvature, (weight @ gradient)[:, None]).solution[:, 0]
        while (value := loss(bias - step)) > best and float(step.abs().max()) > TINY:
            step = step / 2
        if not best - value > TINY * abs(best):
            break
        bias, best = bias - step, value
    return bias
