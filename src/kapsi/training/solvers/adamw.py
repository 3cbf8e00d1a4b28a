"""AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kapsi.function import option
from kapsi.training.solvers.mini_batch import MiniBatch


@dataclass(frozen=True)
class AdamW(MiniBatch, name="adamw"):
    """Adam with decoupled weight decay in mini-batches, with fused kernels if torch has them.

    `kapsi.training.solvers.MiniBatch` describes the learning rate, schedule, batch size and further options.

    Args:
        weight_decay: factor of the decay; each step subtracts learning rate · weight decay · w from every parameter w. It is not
            part of the loss, unlike the penalty `l2`.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101).

    Example:
        >>> import kapsi as kp
        >>> kp.TrainConfig(solver=kp.AdamW(learning_rate=0.01, schedule="constant")).solver.batch_size
        256
    """

    weight_decay: float = option(0.0, minimum=0.0, maximum=1e6)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # A parameter divided among processes is not a plain tensor, and has no fused step.
        plain = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
        fused = plain and not any(hasattr(p, "full_tensor") for p in parameters)
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay, fused=fused)
