"""Losses of real targets that depend on the error of each: mean squared error, Huber's loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.function import option
from kapsi.training.losses.targetwise import TargetwiseLoss

__all__ = ["MSE", "Huber"]


@dataclass(frozen=True)
class MSE(TargetwiseLoss, name="mse"):
    """Mean squared error: (y − f)², averaged over outputs.

    Args:
        output_weights: weight of each target column, divided by the mean of all; None for equal weights.
        ignore_missing: whether NaN targets are ignored; the loss is then the mean over the observed targets.

    Example:
        >>> import torch
        >>> y = torch.tensor([[1.0, 5.0], [2.0, float("nan")]])
        >>> MSE(output_weights=(3, 1), ignore_missing=True).rows(torch.zeros(2, 2), y)
        tensor([7., 3.])
    """

    separable: ClassVar[bool] = True
    gauss_newton: ClassVar[bool] = True
    squares: ClassVar[bool] = True

    @property
    def closed_form(self) -> bool:  # type: ignore[override]
        """Whether all outputs share the least-squares problem."""
        return self.plain

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target.reshape(output.shape)).square()

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.reshape(output.shape)) if self.plain else super().mean(output, target)

    def training_metrics(self, mean: float) -> dict[str, float]:
        return {"rmse": math.sqrt(mean)} if mean >= 0 and self.output_weights is None else {}

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        n = output.shape[1]
        gradient = (2 / n) * (output - target.reshape(output.shape))
        eye = torch.eye(n, dtype=output.dtype, device=output.device) * math.sqrt(2 / n)
        return gradient, eye.expand(len(output), n, n)


@dataclass(frozen=True)
class Huber(TargetwiseLoss, name="huber"):
    """Huber loss: e²/2 for errors e up to δ, linear with slope δ beyond, averaged over outputs.

    Args:
        delta: δ > 0, in the unit of the target.
        output_weights, ignore_missing: see `MSE`.

    Example:
        >>> Huber(delta=0.5).rows(torch.tensor([[0.4], [2.0]]), torch.zeros(2, 1))
        tensor([0.0800, 0.8750])
    """

    delta: float = option(1.0, minimum=1e-12)
    separable: ClassVar[bool] = True

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(output, target.reshape(output.shape), reduction="none", delta=self.delta)

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        error = output - target.reshape(output.shape)
        # The slope over the error, as in iteratively reweighted least squares: zero curvature would stop a step for nothing.
        curvature = (self.delta / error.abs().clamp_min(self.delta)) / output.shape[1]
        return curvature * error, curvature.sqrt().diag_embed()
