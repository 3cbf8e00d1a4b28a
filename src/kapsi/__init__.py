"""kapsi: deep function learning with Reconciled Polynomial Networks, y = ⟨κ(x), ψ(w)⟩ + π(x)."""

from kapsi.contraction import contract
from kapsi.errors import FileError, KapsiError, RunError, SpecError, TableError
from kapsi.expansion import BSpline, Chebyshev, Expansion, Extended, Identity, Nested, Taylor
from kapsi.explain import explain
from kapsi.features import ConcatenatedFeatures, DenseFeatures, Features, NormalizedFeatures, ProductFeatures
from kapsi.function import Function, Param, catalogue, option, to_dict
from kapsi.fusion import Concatenation, Fusion, Mean, Sum, WeightedSum
from kapsi.model_file import load, save
from kapsi.modules import Head, Layer, Model, Store, calibrate
from kapsi.process import Activation, BatchNorm, Dropout, InstanceNorm, LayerNorm, Process
from kapsi.reconciliation import (
    ConstantReconciliation,
    Dense,
    DualLowRankKronecker,
    Kronecker,
    LowRank,
    Masked,
    Reconciliation,
)
from kapsi.remainder import IdentityRemainder, LinearRemainder, Remainder, ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict, load_spec, rpn, save_spec
from kapsi.training.engine import Epoch, TrainConfig, fit, train
from kapsi.version import __version__
from kapsi.weights import ConstantWeights, DenseWeights, KroneckerWeights, LowRankWeights, Weights

__all__ = [
    "Activation",
    "BSpline",
    "BatchNorm",
    "Chebyshev",
    "ConcatenatedFeatures",
    "Concatenation",
    "ConstantReconciliation",
    "ConstantWeights",
    "Dense",
    "DenseFeatures",
    "DenseWeights",
    "Dropout",
    "DualLowRankKronecker",
    "Epoch",
    "Expansion",
    "Extended",
    "Features",
    "FileError",
    "Function",
    "Fusion",
    "Head",
    "HeadSpec",
    "Identity",
    "IdentityRemainder",
    "InstanceNorm",
    "KapsiError",
    "Kronecker",
    "KroneckerWeights",
    "Layer",
    "LayerNorm",
    "LayerSpec",
    "LinearRemainder",
    "LowRank",
    "LowRankWeights",
    "Masked",
    "Mean",
    "Model",
    "ModelSpec",
    "Nested",
    "NormalizedFeatures",
    "Param",
    "Process",
    "ProductFeatures",
    "Reconciliation",
    "Remainder",
    "RunError",
    "SpecError",
    "Store",
    "Sum",
    "TableError",
    "Taylor",
    "TrainConfig",
    "WeightedSum",
    "Weights",
    "ZeroRemainder",
    "__version__",
    "calibrate",
    "catalogue",
    "contract",
    "explain",
    "fit",
    "from_dict",
    "load",
    "load_spec",
    "option",
    "rpn",
    "save",
    "save_spec",
    "to_dict",
    "train",
]
