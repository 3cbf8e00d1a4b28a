"""Models that people know as models of kapsi: one file each, with a builder, converters, and cases that show the equality."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kapsi.zoo import bayesian_network as bayesian_network
    from kapsi.zoo import kan as kan
    from kapsi.zoo import kernel_svm as kernel_svm
    from kapsi.zoo import markov_network as markov_network
    from kapsi.zoo import mlp as mlp
    from kapsi.zoo import naive_bayes as naive_bayes
    from kapsi.zoo import parity as parity
    from kapsi.zoo import regression as regression
    from kapsi.zoo import three_models as three_models
    from kapsi.zoo import transformers as transformers
    from kapsi.zoo import trees as trees

MODELS = [
    "bayesian_network",
    "kan",
    "kernel_svm",
    "markov_network",
    "mlp",
    "naive_bayes",
    "parity",
    "regression",
    "three_models",
    "transformers",
    "trees",
]


def __getattr__(name: str) -> ModuleType:
    """Import a model when it is asked for: `kp.zoo.kan` costs nothing before."""
    if name in MODELS:
        return importlib.import_module(f"kapsi.zoo.{name}")
    raise AttributeError(f"module 'kapsi.zoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return MODELS
