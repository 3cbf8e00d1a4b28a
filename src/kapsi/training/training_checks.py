"""Checks of models, options and metrics before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError, refuse
from kapsi.training.config import TrainConfig
from kapsi.training.data import Rows
from kapsi.training.losses import Loss
from kapsi.training.metrics import CallableMetric, Metric
from kapsi.training.prediction import evaluation, outputs_of


def expect(value: Any, kind: Any, wanted: str) -> None:
    """Raise a `SpecError` unless a value has a type."""
    if not isinstance(value, kind):
        refuse("fit", wanted, value)


def check_model(model: nn.Module) -> Tensor:
    """Return a trained parameter of a model.

    Raises:
        SpecError: a model without values or trained parameters.
    """
    expect(model, nn.Module, "a model")
    reason = None
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise SpecError("fit: the model has uninitialized parameters; run it once, with model(x[:2])")
    like = next((p for p in model.parameters() if p.requires_grad and p.numel()), None)
    if any(p.is_inference() for p in model.parameters()):
        reason = "was made in torch.inference_mode and cannot be trained; make it outside"
    elif any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        reason = "is on the meta device and has no values"
    if like is None or reason is not None:
        raise SpecError(f"fit: the model {reason or 'has no trained parameters'}")
    return like


def check_effects(config: TrainConfig, has_validation: bool, keeps_best: bool) -> None:
    """Raise a `SpecError` for options that have no effect."""
    where = "fit" if keeps_best else "train"
    if config.patience != TrainConfig.patience and not (has_validation and keeps_best):
        reason = "has no effect without validation rows; give validation=…" if keeps_best else "is for kapsi.fit"
        raise SpecError(f"{where}: patience {reason}, or leave patience out")
    if config.monitor != "loss" and not has_validation:
        raise SpecError(
            f"{where}: monitor has no effect without validation rows; give validation=…, or leave monitor out"
        )


def check_metrics(metrics: Sequence[Metric], monitor: str, loss: Loss, outputs: int) -> Metric | None:
    """Return the monitored metric, None for the loss.

    Raises:
        SpecError: an unsuitable metric, or an unknown metric to monitor.
    """
    for metric in metrics:
        metric.check_loss(loss, outputs)
    if monitor == "loss":
        return None
    found = next((metric for metric in metrics if metric.name == monitor), None)
    if found is None:
        known = ", ".join(("loss", *(metric.name for metric in metrics)))
        raise SpecError(f"fit: monitor {monitor!r} is not a metric of this run; use {known}, or add it to metrics")
    if isinstance(found, CallableMetric) and not hasattr(found.function, "greater_is_better"):
        raise SpecError(
            f"fit: monitor {monitor!r} is a plain callable; set its attribute greater_is_better to True or False"
        )
    return found


def count_outputs(model: nn.Module, rows: Rows, dtype: torch.dtype, device: torch.device | str) -> int:
    """Return the number of outputs of a third-party module; refuse outputs other than `(rows, n)`."""
    x = next(iter(rows.chunks(2))).x.to(device, dtype)
    with evaluation(model):
        output = outputs_of(model, model, x, "fit")
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(x):
        shape = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise SpecError(f"fit: the model must map ({len(x)}, m) to ({len(x)}, n), it returned {shape}")
    if not output.requires_grad:
        raise SpecError(
            "fit: the outputs of the model depend on no trained parameter; look for detach and no_grad in it"
        )
    return output.shape[1]
