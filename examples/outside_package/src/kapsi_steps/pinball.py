"""A loss: quantiles instead of means."""

from dataclasses import dataclass

import torch

from kapsi import Loss, option


@dataclass(frozen=True)
class Pinball(Loss, name="pinball"):
    """Pinball loss: max(q·e, (q − 1)·e) of the error e = y − f, the mean over outputs; its minimum is the quantile q.

    Args:
        quantile: q, 0 to 1; 0.5 is the median.
    """

    quantile: float = option(0.5, minimum=0.0, maximum=1.0)

    def rows(self, output, target):
        error = target.reshape(output.shape) - output
        return torch.maximum(self.quantile * error, (self.quantile - 1) * error).mean(1)
