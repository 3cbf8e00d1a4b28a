"""The public names of `kapsi`, and with them the whole catalogue of functions."""

import importlib
from typing import TYPE_CHECKING, Any

from kapsi import expansion, features, hidden_layers, interpret, plots, recipes, reconciliation, remainder, weights, zoo
from kapsi.calibrate import calibrate
from kapsi.contraction import contract
from kapsi.errors import DataError, FileError, KapsiError, RunError, ScaleWarning, SpecError, TableError
from kapsi.expansion import Expansion as Expansion
from kapsi.expansion.adapter import *
from kapsi.expansion.combinatorial import *
from kapsi.expansion.compose import *
from kapsi.expansion.compression import *
from kapsi.expansion.density import *
from kapsi.expansion.evidence import *
from kapsi.expansion.fourier import *
from kapsi.expansion.joint import *
from kapsi.expansion.kernel import *
from kapsi.expansion.orthogonal import *
from kapsi.expansion.pair_splines import *
from kapsi.expansion.patches import *
from kapsi.expansion.potential import *
from kapsi.expansion.radial import *
from kapsi.expansion.selected import *
from kapsi.expansion.simple import *
from kapsi.expansion.spline import *
from kapsi.expansion.taylor import *
from kapsi.expansion.tree import *
from kapsi.expansion.trigonometric import *
from kapsi.expansion.wavelet import *
from kapsi.explain import explain
from kapsi.function import Function, Param, catalogue, option
from kapsi.fusion import Concatenation, Fusion, Mean, Sum, WeightedSum
from kapsi.hidden_layers import *
from kapsi.listing import functions
from kapsi.model_file import load, save
from kapsi.modules import ExpansionModule, Head, Layer, Model, Store
from kapsi.process import (
    Activation,
    Affine,
    BatchNorm,
    Clamp,
    Dropout,
    InstanceNorm,
    LayerNorm,
    NormalScores,
    Process,
)
from kapsi.reconciliation import Reconciliation as Reconciliation
from kapsi.reconciliation.dense import *
from kapsi.reconciliation.hypernet import *
from kapsi.reconciliation.kronecker import *
from kapsi.reconciliation.low_rank import *
from kapsi.refine import refine
from kapsi.remainder import *
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict, load_spec, rpn, save_spec, to_dict
from kapsi.standardize import standardized
from kapsi.tables.run_folder import LoadedRun, load_run
from kapsi.tables.tuning import TrialRow, TuneConfig, TuneReport, tune
from kapsi.training import losses
from kapsi.training.callbacks import Callback
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig
from kapsi.training.data import ParquetRows
from kapsi.training.engine import fit, train
from kapsi.training.grid_updates import GridUpdates
from kapsi.training.launch import open_group
from kapsi.training.logs import CsvLog, JsonLines, TensorBoard
from kapsi.training.losses import *
from kapsi.training.metrics import (
    AUC,
    F1,
    MAE,
    MAPE,
    R2,
    RMSE,
    Accuracy,
    BalancedAccuracy,
    ExplainedVariance,
    LogLoss,
    Matthews,
    MeanSquaredError,
    MedianAbsoluteError,
    Metric,
    Precision,
    Recall,
)
from kapsi.training.prediction import predict, predict_log_proba, predict_proba
from kapsi.training.records import Epoch, Step
from kapsi.training.solvers import LBFGS, SGD, AdamW, LevenbergMarquardt, Ridge, Solver
from kapsi.version import __version__

if TYPE_CHECKING:
    from kapsi.estimators import ExpansionTransformer, RPNClassifier, RPNRegressor

ESTIMATORS = ("ExpansionTransformer", "RPNClassifier", "RPNRegressor")
"""Names loaded at first use: scikit-learn takes a second."""


def __getattr__(name: str) -> Any:
    if name in ESTIMATORS:
        return getattr(importlib.import_module("kapsi.estimators"), name)
    raise AttributeError(f"module 'kapsi.public' has no attribute {name!r}")


# Names that users type. The lists of the families make a new function public in one place; families used mostly through the zoo,
# recipes or a specification (combinatorial, compression, density, evidence, joint, pair_splines, patches, potential, selected,
# tree, wavelet) are only in `kapsi.expansion`.
__all__ = [
    "AUC",
    "F1",
    "LBFGS",
    "MAE",
    "MAPE",
    "R2",
    "RMSE",
    "SGD",
    "Accuracy",
    "Activation",
    "AdamW",
    "Affine",
    "BalancedAccuracy",
    "BatchNorm",
    "Callback",
    "Checkpoints",
    "Clamp",
    "Concatenation",
    "CsvLog",
    "DataError",
    "Dropout",
    "Epoch",
    "Expansion",
    "ExpansionModule",
    "ExpansionTransformer",
    "ExplainedVariance",
    "Function",
    "Fusion",
    "GridUpdates",
    "Head",
    "HeadSpec",
    "InstanceNorm",
    "JsonLines",
    "KapsiError",
    "Layer",
    "LayerNorm",
    "LayerSpec",
    "LevenbergMarquardt",
    "LoadedRun",
    "LogLoss",
    "Matthews",
    "Mean",
    "MeanSquaredError",
    "MedianAbsoluteError",
    "Metric",
    "Model",
    "ModelSpec",
    "NormalScores",
    "Param",
    "ParquetRows",
    "Precision",
    "Process",
    "RPNClassifier",
    "RPNRegressor",
    "Recall",
    "Ridge",
    "ScaleWarning",
    "Solver",
    "SpecError",
    "Step",
    "Sum",
    "TensorBoard",
    "TrainConfig",
    "TrialRow",
    "TuneConfig",
    "TuneReport",
    "WeightedSum",
    "__version__",
    "calibrate",
    "catalogue",
    "contract",
    "explain",
    "features",
    "fit",
    "from_dict",
    "functions",
    "interpret",
    "load",
    "load_run",
    "load_spec",
    "open_group",
    "option",
    "plots",
    "predict",
    "predict_log_proba",
    "predict_proba",
    "recipes",
    "refine",
    "rpn",
    "save",
    "save_spec",
    "standardized",
    "to_dict",
    "train",
    "tune",
    "weights",
    "zoo",
]
__all__ += expansion.adapter.__all__
__all__ += expansion.compose.__all__
__all__ += expansion.fourier.__all__
__all__ += expansion.kernel.__all__
__all__ += expansion.orthogonal.__all__
__all__ += expansion.radial.__all__
__all__ += expansion.simple.__all__
__all__ += expansion.spline.__all__
__all__ += expansion.taylor.__all__
__all__ += expansion.trigonometric.__all__
__all__ += hidden_layers.__all__
__all__ += reconciliation.__all__
__all__ += remainder.__all__
__all__ += losses.__all__
