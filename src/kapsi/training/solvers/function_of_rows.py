"""Check that a model is a function of its parameters that maps each row independently."""

from __future__ import annotations

import torch
from torch import nn

from kapsi.errors import DataError, SpecError
from kapsi.hooks import changing_buffer, original, refuse_gradient_hooks
from kapsi.training.solvers.base import Task


def check_function_of_rows(task: Task) -> None:
    """Raise a `SpecError` unless Levenberg–Marquardt is defined: independent rows, second derivatives, nothing random."""
    model, config = task.model, task.config
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm):
            problem = f"{name} ({kind}) has batch statistics"
        elif isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            problem = f"{name} ({kind}) is random"
        else:
            continue
        raise SpecError(
            f"levenberg_marquardt: the model must map each row independently; {problem}; remove it, or use solver adamw"
        )
    for name in ("l1", "group_l1"):
        if getattr(config, name):
            raise SpecError(
                f"levenberg_marquardt: TrainConfig({name}={getattr(config, name)}) has no second derivative; use solver "
                f"adamw, sgd or lbfgs, or {name}=0"
            )
    if not task.parameters():
        raise SpecError("levenberg_marquardt: the model has no trainable parameters")
    refuse_gradient_hooks(model, "levenberg_marquardt")
    _check_parameters(task)
    try:
        # A loss without curvature raises an error with alternatives.
        task.loss.curvature(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    except (SpecError, DataError) as error:
        raise SpecError(f"levenberg_marquardt: {error}; or use solver adamw or lbfgs") from None
    except (RuntimeError, IndexError):
        pass  # shapes differ from those of the model


def _check_parameters(task: Task) -> None:
    """Raise a `SpecError` if the outputs are no function of the parameters of a copy of the model."""
    model, group = task.model, task.group
    problem = ""
    replaced = next((name for name, m in model.named_modules() if "forward" in m.__dict__ and original(m) is m), None)
    if replaced is not None:
        problem = (
            f"{replaced or 'it'} has a replaced forward method, which belongs to the original; define it in a class"
        )
    else:
        batch = next(iter(task.rows.chunks(2, rank=group.rank, ranks=group.size)), None)
        changing = "" if batch is None else changing_buffer(model, batch.x)
        if changing:
            problem = (
                f"{changing} changes in each training pass (spectral norm?); remove it first (remove_spectral_norm, "
            )
            problem += "parametrize.remove_parametrizations)"
    if problem:
        raise SpecError(
            f"levenberg_marquardt: the model must be a function of its parameters; {problem}, or use solver adamw or lbfgs"
        )
