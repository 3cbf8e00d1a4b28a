"""The Gaussian likelihood of real targets, with mean and variance as outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kapsi.errors import DataError
from kapsi.training.losses.base import columns_of
from kapsi.training.losses.targetwise import TargetwiseLoss

__all__ = ["Gaussian"]


MIN_LOG_VARIANCE, MAX_LOG_VARIANCE = -30.0, 80.0
"""Range of log-variances: e³⁰ times a squared error is finite in float32, and e⁻⁸⁰ above its smallest number."""

LOG_VARIANCE_MARGIN = 6.0
"""Distance of the log-variance of the targets from the ends of this range, a factor of 20 in the standard deviation."""


@dataclass(frozen=True)
class Gaussian(TargetwiseLoss, name="gaussian"):
    """Gaussian likelihood: −log N(y; μ, σ²), summed over targets; the outputs are all μ, then all log σ².

    Args:
        output_weights, ignore_missing: see `MSE`.

    Example:
        >>> Gaussian().rows(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0]]))  # log √(2π) + 2²/2
        tensor([2.9189])
    """

    summed: ClassVar[bool] = True
    gauss_newton: ClassVar[bool] = True
    outputs_per_target: ClassVar[int] = 2

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        mean, log_variance = output.chunk(2, 1)
        log_variance = log_variance.clamp(MIN_LOG_VARIANCE, MAX_LOG_VARIANCE)
        squares = (columns_of(target) - mean).square() * torch.exp(-log_variance)
        return 0.5 * (squares + log_variance + math.log(2 * math.pi))

    def decide(self, output: Tensor) -> Tensor:
        return output.chunk(2, 1)[0]

    def output_units(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        shift = 2 * deviation.log()  # of the log-variance
        low, high = MIN_LOG_VARIANCE + LOG_VARIANCE_MARGIN, MAX_LOG_VARIANCE - LOG_VARIANCE_MARGIN
        if not bool(((low <= shift) & (shift <= high)).all()):
            given = f"from {float(deviation.min()):.3g} to {float(deviation.max()):.3g}"
            raise DataError(
                f"fit(standardize=True): gaussian has log-variances from {MIN_LOG_VARIANCE:g} to {MAX_LOG_VARIANCE:g}, the targets "
                f"standard deviations {given}; use another unit"
            )
        return torch.cat([mean, shift]), torch.cat([deviation, torch.ones_like(deviation)])

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = output.chunk(2, 1)
        clamped = log_variance.clamp(MIN_LOG_VARIANCE, MAX_LOG_VARIANCE)
        inside, precision = log_variance == clamped, torch.exp(-clamped)
        error = mean - columns_of(target)
        gradient = torch.cat([precision * error, 0.5 * (1 - precision * error.square()) * inside], 1)
        # Fisher's information: 1/σ² for the mean, 1/2 for the log-variance.
        return gradient, torch.cat([precision.sqrt(), math.sqrt(0.5) * inside.to(precision.dtype)], 1).diag_embed()
