"""Head → Layer → Model, and the stores with their tensors: the only stateful part.

y = contract(self.expand(x), self.weights()).sum(channels) + self.remainder(x)
"""

from kapsi.modules.head import LARGEST_TRAINED, Head, check_layout
from kapsi.modules.layer import Layer
from kapsi.modules.model import ExpansionModule, Model, scale_last_layer, trained_count
from kapsi.modules.store import Seed, Store, as_generator

__all__ = [
    "LARGEST_TRAINED",
    "ExpansionModule",
    "Head",
    "Layer",
    "Model",
    "Seed",
    "Store",
    "as_generator",
    "check_layout",
    "scale_last_layer",
    "trained_count",
]
