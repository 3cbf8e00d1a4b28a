"""An expansion: soft steps at the quantiles of the data."""

from dataclasses import dataclass

import torch

from kapsi import Expansion, Param, option
from kapsi.features import DenseFeatures


@dataclass(frozen=True)
class SoftSteps(Expansion, name="soft_steps"):
    """Soft steps of each input: κ(x) = [tanh((x − c₁)/s), …, tanh((x − c_G)/s)], D = m·G.

    Args:
        steps: G, number of steps, 1 to 1,000; `kapsi.calibrate` sets their positions c to quantiles of the data.
        width: s, width of a step in units of the inputs.

    Source: the hidden units of a perceptron with fixed weights.
    """

    examples = ({}, {"steps": 1, "width": 0.3})

    steps: int = option(4, minimum=1, maximum=1000)
    width: float = option(0.5, minimum=0.001, maximum=1000)

    def factors(self, in_features):  # (q, t), D = q·t
        return self.steps, in_features

    def params(self, in_features):
        positions = tuple((2 * k + 1) / self.steps - 1 for k in range(self.steps))
        return {"positions": Param((self.steps, in_features), positions, trainable=False)}

    def calibrate(self, x, params, y=None):
        levels = (torch.arange(self.steps, device=x.device, dtype=x.dtype) + 0.5) / self.steps
        return {"positions": torch.quantile(x, levels, dim=0)}

    def __call__(self, x, params):  # x: (..., m)
        return DenseFeatures(torch.tanh((x.unsqueeze(-2) - params["positions"]) / self.width).flatten(-2))
