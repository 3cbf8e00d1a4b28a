"""A solver: an optimizer of torch in mini-batches."""

from dataclasses import dataclass

import torch

from kapsi import option
from kapsi.training.solvers import MiniBatch


@dataclass(frozen=True)
class Adagrad(MiniBatch, name="adagrad"):
    """Adagrad in mini-batches.

    Args:
        initial: first value of the accumulated squares.

    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods (2011).
    """

    initial: float = option(0.0, minimum=0.0, maximum=1e6)

    def optimizer(self, parameters):
        return torch.optim.Adagrad(parameters, lr=self.learning_rate, initial_accumulator_value=self.initial)
