"""Half deviances of positive targets with a logarithmic link, f = log μ: Poisson, gamma, Tweedie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError
from kapsi.function import option
from kapsi.training.losses.targetwise import TargetwiseLoss

__all__ = ["Gamma", "Poisson", "Tweedie"]


class LogLinkLoss(TargetwiseLoss):
    """Base of losses whose outputs are logarithms of means; predictions are exp(f).

    Attributes:
        zeros: whether targets may be 0.
    """

    separable: ClassVar[bool] = True
    log_link: ClassVar[bool] = True
    zeros: ClassVar[bool] = True

    def decide(self, output: Tensor) -> Tensor:
        return output.exp()

    def output_units(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        raise SpecError(
            f"fit(standardize=True): {self.name} needs positive targets in their unit; standardize the inputs with "
            "kapsi.standardized(model, x), and leave standardize out"
        )

    def check_targets(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        super().check_targets(target, outputs, where)
        values = target[~target.isnan()]
        if values.numel() and (float(values.min()) < 0 or (not self.zeros and float(values.min()) == 0)):
            least = "at least" if self.zeros else "above"
            raise DataError(f"{where}: {self.name} needs targets {least} 0, got {float(values.min())}")


@dataclass(frozen=True)
class Poisson(LogLinkLoss, name="poisson"):
    """Half the Poisson deviance of counts: y log(y/μ) − y + μ with μ = exp(f), averaged over outputs; y ≥ 0.

    Args:
        output_weights, ignore_missing: see `MSE`.

    Source: McCullagh and Nelder, Generalized Linear Models (1989), section 2.3.

    Example:
        >>> Poisson().rows(torch.zeros(2, 1), torch.tensor([[1.0], [0.0]]))
        tensor([0., 1.])
    """

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        y = target.reshape(output.shape).to(output.dtype)
        return torch.xlogy(y, y) - y - y * output + output.exp()

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        n, mean = output.shape[1], output.exp()
        return (mean - target.reshape(output.shape)) / n, (mean / n).sqrt().diag_embed()


@dataclass(frozen=True)
class Gamma(LogLinkLoss, name="gamma"):
    """Half the gamma deviance of positive targets: log(μ/y) + y/μ − 1 with μ = exp(f), averaged over outputs; y > 0.

    Args:
        output_weights, ignore_missing: see `MSE`.

    Source: McCullagh and Nelder, Generalized Linear Models (1989), section 8.3.

    Example:
        >>> Gamma().rows(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]))
        tensor([0.0000, 0.3069])
    """

    zeros: ClassVar[bool] = False

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        y = target.reshape(output.shape).to(output.dtype)
        known = y > 0  # 0 stands for a missing target, with a weight of 0
        ratio = y * (-output).exp()
        return torch.where(known, ratio - torch.where(known, y, 1.0).log() + output - 1, 0.0)

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        n, ratio = output.shape[1], target.reshape(output.shape).to(output.dtype) * (-output).exp()
        return (1 - ratio) / n, (ratio / n).sqrt().diag_embed()


@dataclass(frozen=True)
class Tweedie(LogLinkLoss, name="tweedie"):
    """Half the Tweedie deviance of targets with zeros, such as claims or rain; μ = exp(f), averaged over outputs; y ≥ 0.

    y^(2−p) / ((1−p)(2−p)) − y μ^(1−p) / (1−p) + μ^(2−p) / (2−p)

    Args:
        power: p, the variance is proportional to μ^p; above 1 (Poisson) and below 2 (gamma).
        output_weights, ignore_missing: see `MSE`.

    Source: Jørgensen, Exponential dispersion models, Journal of the Royal Statistical Society B 49 (1987).

    Example:
        >>> Tweedie(power=1.5).rows(torch.zeros(2, 1), torch.tensor([[1.0], [0.0]]))
        tensor([0., 2.])
    """

    power: float = option(1.5, minimum=1.01, maximum=1.99)

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        y, p = target.reshape(output.shape).to(output.dtype), self.power
        constant = y ** (2 - p) / ((1 - p) * (2 - p))
        return constant - y * ((1 - p) * output).exp() / (1 - p) + ((2 - p) * output).exp() / (2 - p)

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y, p, n = target.reshape(output.shape).to(output.dtype), self.power, output.shape[1]
        first, second = y * ((1 - p) * output).exp(), ((2 - p) * output).exp()
        return (second - first) / n, (((p - 1) * first + (2 - p) * second) / n).sqrt().diag_embed()
