"""An expansion for kapsi: soft steps at the quantiles of the data."""

from dataclasses import dataclass

import torch

from kapsi import DenseFeatures, Expansion, Param, option


@dataclass(frozen=True)
class SoftSteps(Expansion, name="soft_steps"):
    """Soft steps of each input: κ(x) = [tanh((x − c₁)/s), …, tanh((x − c_G)/s)], D = m·G.

    Args:
        steps: G, 1 to 1,000; the places c of the steps are the quantiles of the data after `kapsi.calibrate`.
        width: s, the width of a step, in units of the inputs.

    Source: the hidden units of a perceptron with fixed weights.
    """

    examples = ({}, {"steps": 1, "width": 0.3})

    steps: int = option(4, minimum=1, maximum=1000)
    width: float = option(0.5, minimum=0.001, maximum=1000)

    def factors(self, in_features):  # (q, t), D = q·t
        return self.steps, in_features

    def params(self, in_features):
        places = tuple((2 * k + 1) / self.steps - 1 for k in range(self.steps))
        return {"places": Param((self.steps, in_features), places, trainable=False)}

    def calibrate(self, x, params, y=None):
        levels = (torch.arange(self.steps, device=x.device, dtype=x.dtype) + 0.5) / self.steps
        return {"places": torch.quantile(x, levels, dim=0)}

    def __call__(self, x, params):  # x: (..., m)
        steps = torch.tanh((x.unsqueeze(-2) - params["places"]) / self.width)
        return DenseFeatures(steps.flatten(-2))
