"""Pipelines of scikit-learn: encoders of raw columns, layers for scalers and expansions, and any model that the zoo converts."""

from kapsi.zoo.pipeline.convert import PARITY, from_sklearn
from kapsi.zoo.pipeline.model import PipelineModel

__all__ = ["PARITY", "PipelineModel", "from_sklearn"]
