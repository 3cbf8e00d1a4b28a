"""A metric: the share of targets below the predicted quantile."""

from dataclasses import dataclass

from kapsi import Metric


@dataclass(frozen=True)
class Coverage(Metric, name="coverage"):
    """Share of targets that are at most the prediction."""

    greater_is_better = True
    discrete = False

    def rows(self, prediction, target):
        return (target.reshape(prediction.shape) <= prediction).double().mean(1)
