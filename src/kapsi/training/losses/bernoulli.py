"""The Bernoulli likelihood of targets from 0 to 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import DataError
from kapsi.training.losses.targetwise import TargetwiseLoss

__all__ = ["Bernoulli"]


@dataclass(frozen=True)
class Bernoulli(TargetwiseLoss, name="bernoulli"):
    """Bernoulli likelihood: −log p(y), p = sigmoid of the outputs, summed over outputs; targets from 0 to 1.

    Args:
        output_weights, ignore_missing: see `MSE`.

    Example:
        >>> Bernoulli().rows(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))  # 2 log 2
        tensor([1.3863])
    """

    summed: ClassVar[bool] = True
    discrete: ClassVar[bool] = True
    separable: ClassVar[bool] = True
    unbounded: ClassVar[bool] = True

    def check_targets(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        values = target if target.is_floating_point() else target.to(torch.get_default_dtype())
        super().check_targets(values, outputs, where)
        values = values.masked_fill(values.isnan(), 0)
        if len(target) and (float(values.min()) < 0 or float(values.max()) > 1):
            low, high = float(values.min()), float(values.max())
            raise DataError(f"{where}: bernoulli needs targets from 0 to 1, got {low} to {high}")

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        wanted = target.reshape(output.shape).to(output.dtype)
        return F.binary_cross_entropy_with_logits(output, wanted, reduction="none")

    def decide(self, output: Tensor) -> Tensor:
        return (output[:, 0] > 0).long() if output.shape[1] == 1 else (output > 0).long()

    def log_probabilities(self, output: Tensor) -> Tensor:
        """Return log-probabilities `(rows, 2)` of 0 and 1 for one output; for several, `(rows, n)` of 1."""
        return F.logsigmoid(torch.cat([-output, output], 1) if output.shape[1] == 1 else output)

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        p = output.sigmoid()
        return p - target.reshape(output.shape).to(p.dtype), (p * (1 - p)).sqrt().diag_embed()
