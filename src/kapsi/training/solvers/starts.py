"""Several starts of Levenberg–Marquardt: their state, and initial values of further starts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError
from kapsi.hooks import copied
from kapsi.modules import Head, Layer, Model
from kapsi.training.solvers.base import Task
from kapsi.training.solvers.jacobian import parameter_vector

FIRST_DAMPING, MIN_DAMPING, MAX_DAMPING = 1e-2, 1e-16, 1e16

START_SEEDS = 0x6B61707369
"""Prefix of the seeds of further starts, unlikely as a seed of a model."""

RUNNING, DROPPED = "", "it is not finite"


@dataclass
class Starts:
    """State of s starts.

    Attributes:
        theta: parameters, `(s, P)`.
        damping, growth: μ and the factor of its next increase, `(s,)`.
        scale: the diagonal of D, `(s, P)`, or one number per start for conjugate gradients, `(s, 1)`.
        data, objective: losses without and with penalties, `(s,)`.
        initial, reference: the first objective, and the last with a change above the tolerance, `(s,)`.
        idle: iterations since the reference, `(s,)`.
        norm: largest entry of the gradient, `(s,)`.
        smoothness: the chosen factors of the smoothness of h heads, `(s, h)`.
        reasons: why each start ended; empty for running starts.
    """

    theta: Tensor
    damping: Tensor
    growth: Tensor
    scale: Tensor
    data: Tensor
    objective: Tensor
    initial: Tensor
    reference: Tensor
    idle: Tensor
    norm: Tensor
    smoothness: Tensor
    reasons: list[str]

    def active(self) -> list[int]:
        """Return the indices of running starts."""
        return [i for i, reason in enumerate(self.reasons) if reason == RUNNING]

    def record(self, index: list[int], data: Tensor, total: Tensor) -> None:
        """Set the losses of some starts, and their initial and reference values on the first call."""
        self.data[index], self.objective[index] = data, total
        for values in (self.initial, self.reference):
            values[index] = torch.where(values[index].isnan(), total, values[index])

    def adapt_damping(self, index: Tensor, accepted: Tensor, ratio: Tensor) -> None:
        """Update μ by the ratio of actual and predicted decrease: at most a third down, or up by growing factors."""
        damping, growth = self.damping[index], self.growth[index]
        reduced = damping * (1 - (2 * ratio.clamp(-10, 10) - 1) ** 3).clamp_min(1 / 3)
        self.damping[index] = torch.where(accepted, reduced, damping * growth).clamp(MIN_DAMPING, MAX_DAMPING)
        self.growth[index] = torch.where(accepted, 2.0, growth * 2)


TENSORS = tuple(field.name for field in fields(Starts) if field.name != "reasons")
"""The fields with tensors."""


def initial_values(task: Task, start: int) -> Tensor:
    """Return new initial values of ψ, π and biases for a further start, seeded by its number; κ keeps its values."""
    device = task.parameters()[0].device
    model = copied(task.model)
    fixed = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
    for head in model.modules():
        if isinstance(head, Head):
            fixed += head.kappa.parameters()
    values = [tensor.detach().clone() for tensor in fixed]
    seed = ((START_SEEDS << 20) + task.config.seed * 4096 + start) % 2**63
    # Torch modules draw from the global generator; its state is restored.
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        if not _reset(model, torch.Generator().manual_seed(seed)):
            raise SpecError(
                "levenberg_marquardt: several starts need new initial values, and no module of the model has "
                "reset_parameters; use restarts=1"
            )
        for tensor, value in zip(fixed, values, strict=True):
            tensor.copy_(value)
    return parameter_vector(model).to(device)


def _reset(module: nn.Module, generator: torch.Generator) -> bool:
    """Draw new initial values of a module and its children, and return whether there are any."""
    if isinstance(module, Model | Layer | Head):
        module.reset_parameters(generator)
        return True
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
        return True
    return sum(_reset(child, generator) for child in module.children()) > 0
