"""Losses of the margin of a class: hinge and squared hinge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from kapsi.training.losses.base import Loss

__all__ = ["Hinge", "SquaredHinge"]


@dataclass(frozen=True)
class Hinge(Loss, name="hinge"):
    """Hinge loss: max(0, 1 − margin).

    One output: margin (2·class − 1)·f. Several: f of the class minus the largest other output (Crammer, Singer).

    Example:
        >>> import torch
        >>> Hinge().rows(torch.tensor([[0.25], [3.0]]), torch.tensor([1, 1]))
        tensor([0.7500, 0.0000])
    """

    classes: ClassVar[bool] = True

    def class_count(self, outputs: int, where: str = "fit") -> int:
        return max(2, outputs)

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        if output.shape[1] == 1:
            return F.relu(1 - (2 * target.to(output.dtype) - 1) * output[:, 0])
        index = target.long()[:, None]
        others = output.scatter(1, index, float("-inf")).amax(1)
        return F.relu(1 - output.gather(1, index)[:, 0] + others)

    def decide(self, output: Tensor) -> Tensor:
        return (output[:, 0] > 0).long() if output.shape[1] == 1 else output.argmax(1)


@dataclass(frozen=True)
class SquaredHinge(Hinge, name="squared_hinge"):
    """Squared hinge loss: max(0, 1 − margin)², with the margins of the hinge loss."""

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return super().rows(output, target).square()
