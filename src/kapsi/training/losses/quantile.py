"""The loss of conditional quantiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kapsi.function import option
from kapsi.training.losses.targetwise import TargetwiseLoss

__all__ = ["Quantile"]

LEAST_ERROR = 1e-6
"""Smallest error in the curvature, in the unit of the target."""


@dataclass(frozen=True)
class Quantile(TargetwiseLoss, name="quantile"):
    """Quantile loss: q e for errors e = y − f above 0, (q − 1) e below, averaged over outputs; f is the q-quantile of y.

    Its curvature is that of the quadratic function above it that touches it at the current error.

    Args:
        level: q, above 0 and below 1; 0.5 is half the absolute error, the median.
        output_weights, ignore_missing: see `MSE`.

    Source: Koenker and Bassett, Regression quantiles, Econometrica 46 (1978); Hunter and Lange, Quantile regression via an
    MM algorithm, Journal of Computational and Graphical Statistics 9 (2000).

    Example:
        >>> Quantile(level=0.9).rows(torch.zeros(2, 1), torch.tensor([[1.0], [-1.0]]))
        tensor([0.9000, 0.1000])
    """

    level: float = option(0.5, minimum=1e-6, maximum=1 - 1e-6)
    separable: ClassVar[bool] = True

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        error = target.reshape(output.shape) - output
        return torch.maximum(self.level * error, (self.level - 1) * error)

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        error, n = target.reshape(output.shape) - output, output.shape[1]
        gradient = torch.where(error > 0, -self.level, 1 - self.level).to(output.dtype)
        return gradient / n, (0.5 / (n * error.abs().clamp_min(LEAST_ERROR))).sqrt().diag_embed()
