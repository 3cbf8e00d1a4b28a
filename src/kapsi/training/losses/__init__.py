"""Losses: one file a family. A new loss is one file, imported and listed here."""

from kapsi.training.losses.base import CallableLoss as CallableLoss
from kapsi.training.losses.base import Loss
from kapsi.training.losses.bernoulli import Bernoulli
from kapsi.training.losses.cross_entropy import CrossEntropy
from kapsi.training.losses.deviance import Gamma, Poisson, Tweedie
from kapsi.training.losses.gaussian import Gaussian
from kapsi.training.losses.hinge import Hinge, SquaredHinge
from kapsi.training.losses.quantile import Quantile
from kapsi.training.losses.squares import MSE, Huber
from kapsi.training.losses.targetwise import TargetwiseLoss as TargetwiseLoss

__all__ = [
    "MSE",
    "Bernoulli",
    "CrossEntropy",
    "Gamma",
    "Gaussian",
    "Hinge",
    "Huber",
    "Loss",
    "Poisson",
    "Quantile",
    "SquaredHinge",
    "Tweedie",
]
