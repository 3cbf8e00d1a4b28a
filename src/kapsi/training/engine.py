"""The training engine: `fit` and `train`, the entrances of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn

from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig, configured
from kapsi.training.distributed import Group
from kapsi.training.records import Epoch
from kapsi.training.solvers import Solver
from kapsi.training.training_run import TrainingRun

SolverLike: TypeAlias = Solver | str | Mapping[str, Any]
LossLike: TypeAlias = Any
"""A loss, a name, options with a kind, or a callable."""
MetricsLike: TypeAlias = Any
"""A metric or a sequence of metrics: objects, names, options with a kind, or callables."""


def train(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    solver: SolverLike | None = None,
    loss: LossLike | None = None,
    epochs: int | None = None,
    validation: Any = None,
    metrics: MetricsLike | None = None,
    callbacks: Any = (),
    checkpoints: Checkpoints | None = None,
    group: Group | None = None,
    **options: Any,
) -> Iterator[Epoch]:
    """Train a model in place and yield a record after each epoch; keep the weights of the last epoch.

    Args:
        model, data, config, solver, loss, epochs, metrics, callbacks, checkpoints, group, options: see `fit`.
        validation: rows to evaluate after each epoch, or a share of the data, 0 < share < 1.

    Raises:
        SpecError: an unsuitable model, or invalid options.
        DataError: data that do not match the model or the loss.
        KapsiError: a loss or a gradient is not finite; the message names the layer. The model keeps the weights before the step.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> model = kp.Model(kp.rpn([1, 4, 1], expansion=kp.Chebyshev(3)), seed=0)
        >>> for epoch in kp.train(model, (x, x.sin()), loss="mse", solver="adamw", epochs=3):
        ...     print(epoch.number, epoch.loss < 10)
        1 True
        2 True
        3 True
    """
    arguments = {"solver": solver, "loss": loss, "epochs": epochs, "metrics": metrics}
    config = configured(config, arguments, options, "train")
    return TrainingRun(model, data, config, validation, callbacks, checkpoints, group, keeps_best=False).epochs()


def fit(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    solver: SolverLike | None = None,
    loss: LossLike | None = None,
    epochs: int | None = None,
    validation: Any = None,
    metrics: MetricsLike | None = None,
    callbacks: Any = (),
    checkpoints: Checkpoints | None = None,
    group: Group | None = None,
    **options: Any,
) -> list[Epoch]:
    """Train a model in place, with early stopping and the weights of the best epoch; return the records.

    The model is in evaluation mode afterwards. An interrupt (Ctrl-C) ends training after the step; the model keeps the best
    weights so far, and the last record ends with `interrupted`. A second interrupt raises an exception.

    Args:
        model: maps `(rows, m)` to `(rows, n)`, or to `(rows,)` for one output: a `kapsi.Model`, or another module.
        data: inputs and targets, and weights of the rows if any: `(x, y)` or `(x, y, weight)` of tensors, arrays, data
            frames, sparse matrices or memory maps; a torch data set or loader; `kapsi.ParquetRows`. Targets are integer
            or boolean class labels `(rows,)`, or real values `(rows,)` or `(rows, k)`. Values of any type are cast to the
            type of the model.
        config: all options as an object; the arguments below replace its fields.
        solver: a solver such as `kp.AdamW(learning_rate=0.01)`, a name, or a mapping of options.
        loss: a loss, a name or options, or a callable (output, target) returning a value per row or a mean.
        epochs: maximum number of epochs.
        validation: rows for early stopping, of any kind of data; or a share of the data. Without validation training
            ends with the last epoch.
        metrics: metrics to record instead of the default metrics of the loss.
        callbacks: objects with `on_step`, `on_epoch` or `on_end`, or callables for each `Epoch`; see `Callback`.
        checkpoints: folder and frequency of checkpoints, to resume after a kill.
        group: the processes in the training, from `kapsi.open_group`.
        **options: further fields of `TrainConfig`: `patience`, `l2`, `seed`, ….

    Raises:
        SpecError: an unsuitable model, or invalid options.
        DataError: data that do not match the model or the loss.
        KapsiError: a loss or a gradient is not finite; the model then has the best weights so far, the initial ones if no
            epoch was better.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> model = kp.Model(kp.rpn([1, 1], expansion=kp.Chebyshev(4)), seed=0)
        >>> records = kp.fit(model, (x, x**3), kp.TrainConfig(epochs=50))
        >>> records[-1].loss < 1e-6
        True
    """
    arguments = {"solver": solver, "loss": loss, "epochs": epochs, "metrics": metrics}
    config = configured(config, arguments, options, "fit")
    run = TrainingRun(model, data, config, validation, callbacks, checkpoints, group, keeps_best=True)
    with run.interruptible():
        for _ in run.epochs():
            pass
    return run.progress.records
