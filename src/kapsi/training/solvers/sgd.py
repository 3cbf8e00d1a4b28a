"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kapsi.function import option
from kapsi.training.solvers.mini_batch import MiniBatch


@dataclass(frozen=True)
class SGD(MiniBatch, name="sgd"):
    """Stochastic gradient descent with Nesterov momentum, in mini-batches.

    `kapsi.training.solvers.MiniBatch` describes the learning rate, schedule, batch size and further options.

    Args:
        momentum: fraction of the last step added to the next step.
    """

    momentum: float = option(0.9, minimum=0.0, maximum=0.9999)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum, nesterov=self.momentum > 0)
