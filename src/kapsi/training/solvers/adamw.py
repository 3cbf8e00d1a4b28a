"""AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kapsi.function import option
from kapsi.training.solvers.mini_batch import MiniBatch


@dataclass(frozen=True)
class AdamW(MiniBatch, name="adamw"):
    """Adam with decoupled weight decay in mini-batches, with fused kernels where torch has them.

    Args:
        weight_decay: factor of all parameters, times the learning rate, subtracted in each step; not part of the loss,
            unlike the L2 penalty `l2`.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101).
    """

    weight_decay: float = option(0.0, minimum=0.0, maximum=1e6)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # A parameter divided among processes is not a plain tensor, and has no fused step.
        plain = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
        fused = plain and not any(hasattr(p, "full_tensor") for p in parameters)
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay, fused=fused)
