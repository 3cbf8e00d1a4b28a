"""Classifiers trained in epochs: any specification, networks of equal layers, multilayer perceptrons and KANs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import DataError, SpecError
from kapsi.function import Spec, option
from kapsi.modules import Model, trained_count
from kapsi.paper.procedures.classifier_kinds import (
    ClassifierKind,
    ClassifierTask,
    FittedClassifier,
    Labels,
)
from kapsi.paper.procedures.dry_run import dry_run
from kapsi.paper.procedures.sparse_kan import SparseKAN
from kapsi.process import Process
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, passing
from kapsi.training.augmentation import augmented
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit as fit_model
from kapsi.training.engine import train
from kapsi.training.prediction import predict, predict_log_proba
from kapsi.training.resolve import resolve_loss
from kapsi.training.rows.stored import of_scipy
from kapsi.zoo import kan, mlp


@dataclass(frozen=True)
class Network(Spec):
    """A model of equal hidden layers.

    Args:
        hidden: widths of the hidden layers; a single width applies to all hidden layers if `layers` is set.
        layers: number of layers, including the last; null for the length of `hidden` plus one.
        heads: number of equal heads in each layer.
        head: head of each layer.
        first: head of the first layer, if different.
        last: head of the last layer, if different.
        output: processing after every layer but the last.
        input: processing of the inputs; dropout there acts on κ and π alike.
    """

    hidden: tuple[int, ...] = ()
    layers: int | None = option(None, minimum=1, maximum=1000)
    heads: int = option(1, minimum=1, maximum=1000)
    head: HeadSpec = HeadSpec()
    first: HeadSpec | None = None
    last: HeadSpec | None = None
    output: tuple[Process, ...] = ()
    input: tuple[Process, ...] = ()

    def check(self) -> None:
        if self.layers is not None and len(self.hidden) not in (1, self.layers - 1):
            raise SpecError(
                f"Network: {self.layers} layers have {self.layers - 1} hidden widths, or one for all; got {len(self.hidden)}"
            )

    def spec(self, in_features: int, out_features: int) -> ModelSpec:
        """Return the specification for the numbers of inputs and outputs."""
        hidden = self.hidden
        if self.layers is not None and len(hidden) != self.layers - 1:
            hidden = hidden * (self.layers - 1)
        count = len(hidden) + 1
        layers = []
        for i in range(count):
            at_end = i == count - 1
            head = (self.last if at_end else None) or (self.first if i == 0 else None) or self.head
            layers.append(LayerSpec((head,) * self.heads, output=() if at_end else self.output))
        widths = (in_features, *hidden, out_features)
        if self.input:
            layers.insert(0, passing(*self.input))
            widths = (in_features, *widths)
        return ModelSpec(widths, tuple(layers))


@dataclass(frozen=True)
class EpochKind(ClassifierKind):
    """Base of the kinds trained in epochs.

    Args:
        train: training options; the default loss is the cross-entropy.
    """

    train: TrainConfig = TrainConfig()

    in_epochs: ClassVar[bool] = True

    @property
    def passes(self) -> int | None:
        return self.train.epochs

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        """Return the specification of the model for the numbers of inputs and outputs."""
        raise NotImplementedError

    def config(self, seed: int) -> TrainConfig:
        """Return the training of a run."""
        return replace(self.train, seed=seed, loss=resolve_loss(self.train.loss, classes=True))

    def _spec(self, inputs: int, classes: int, where: str) -> ModelSpec:
        try:
            return self.spec(inputs, classes)
        except (SpecError, DataError) as error:
            raise SpecError(f"{where}.model: {error}") from None

    def dry_run(self, inputs: int, classes: int, where: str, *, sparse: bool = False) -> None:
        dry_run(self._spec(inputs, classes, where), self.config(0), where, classes=classes, sparse=sparse)

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        spec = self._spec(task.x.shape[1], task.classes, task.where)
        model = Model(spec, seed=task.seed, dtype=torch.float32)
        if getattr(self, "calibrate", False):
            calibrate(model, _inputs(task.x), torch.as_tensor(task.y))
        return _train(model, task, self.config(task.seed))


@dataclass(frozen=True)
class NetworkClassifier(EpochKind):
    """`network`: a network of equal layers.

    Args:
        train: training options.
        network: the layers.
        layers, heads: numbers of layers and heads, as axes of a grid of rows.
        calibrate: set grids and other buffers from the rows before the fit.
    """

    network: Network = Network()
    layers: int | None = option(None, minimum=1, maximum=1000)
    heads: int | None = option(None, minimum=1, maximum=1000)
    calibrate: bool = False

    def check(self) -> None:
        self._network()

    def _network(self) -> Network:
        changed = {name: value for name in ("layers", "heads") if (value := getattr(self, name)) is not None}
        return replace(self.network, **changed)

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        return self._network().spec(inputs, outputs)


@dataclass(frozen=True, kw_only=True)
class ModelClassifier(EpochKind):
    """`model`: a model by specification; widths at the ends may be null.

    Args:
        train: training options.
        model: the specification.
        calibrate: see `NetworkClassifier`.
    """

    model: ModelSpec
    calibrate: bool = False

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        return self.model.sized(inputs, outputs)


@dataclass(frozen=True)
class MLPClassifier(EpochKind):
    """`mlp`: a multilayer perceptron, `kapsi.zoo.mlp`.

    Args:
        train: training options.
        hidden: widths of the hidden layers.
        activation: name of the activation after each hidden layer.
        dropout: share of hidden values set to zero in training, 0 to 1.
    """

    hidden: tuple[int, ...] = (512, 256)
    activation: str = "relu"
    dropout: float = option(0.0, minimum=0.0, maximum=1.0)

    def check(self) -> None:
        self.spec(1, 1)

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        return mlp.spec([inputs, *self.hidden, outputs], self.activation, dropout=self.dropout)


@dataclass(frozen=True)
class KANClassifier(EpochKind):
    """`kan`: a Kolmogorov–Arnold network, `kapsi.zoo.kan`; on sparse inputs `SparseKAN`, the same function.

    Args:
        train: training options.
        hidden: widths of the hidden layers.
        intervals, degree, low, high: grid and degree of the splines.
        calibrate: set the ranges of the splines from the rows before the fit.
        centered: whether to use φ(x) − φ(0) instead of φ(x) in the first layer on sparse inputs.
    """

    hidden: tuple[int, ...] = (64,)
    intervals: int = 5
    degree: int = 3
    low: float = -1.0
    high: float = 1.0
    calibrate: bool = False
    centered: bool = False

    def check(self) -> None:
        self.spec(1, 1)

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        return kan.spec([inputs, *self.hidden, outputs], self.intervals, self.degree, low=self.low, high=self.high)

    def dry_run(self, inputs: int, classes: int, where: str, *, sparse: bool = False) -> None:
        if self.centered and not sparse:
            raise SpecError(f"{where}.centered: needs sparse inputs, leave it out")
        dry_run(self.spec(inputs, classes), self.config(0), where, classes=classes, sparse=sparse, sparse_kan=sparse)

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        if isinstance(task.x, np.ndarray):
            return super().fit(task)
        network = Model(self.spec(task.x.shape[1], task.classes), seed=task.seed, dtype=torch.float32)
        model = SparseKAN(network, centered=self.centered)
        if self.calibrate:
            model.calibrate(_inputs(task.x))
        return _train(model, task, self.config(task.seed))


def _train(model: Model | SparseKAN, task: ClassifierTask, config: TrainConfig) -> FittedClassifier:
    """Train a model to the last epoch, or with early stopping if there are validation rows."""
    data: Any = (task.x, task.y)
    if task.augment is not None:
        size = getattr(config.solver, "batch_size", None) or len(task.y)
        data = augmented((torch.as_tensor(task.x), torch.as_tensor(task.y)), size, task.augment)

    loss = resolve_loss(config.loss, classes=True)

    def predict_labels(x: Any) -> Labels:
        return np.asarray(predict(model, x, loss), dtype=np.int64)

    def scores(x: Any) -> npt.NDArray[np.float32]:
        return np.asarray(predict_log_proba(model, x, loss), dtype=np.float32)

    if task.validation is not None:
        records = fit_model(model, data, config, validation=task.validation)
    else:
        records = []
        for record in train(model, data, config):
            records.append(record)
            if task.on_epoch is not None:
                task.on_epoch(record, predict_labels)
        model.eval()
    details = {"epochs": len(records), "loss": records[-1].loss, "solver": records[-1].solver}
    if task.validation is not None:
        details["best_epoch"] = max(record.number for record in records if record.best)
    return FittedClassifier(predict_labels, trained_count(model), details=details, scores=scores)


def _inputs(x: Any) -> Tensor:
    """Return inputs as a tensor, a SciPy matrix as sparse CSR."""
    return torch.as_tensor(x) if isinstance(x, np.ndarray) else of_scipy(x, "inputs")
