"""The meaning of `auto`: the choice of loss and solver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from torch import nn

from kapsi.errors import SpecError
from kapsi.hooks import gradient_hook
from kapsi.modules import Model, Store, trained_count
from kapsi.training.config import TrainConfig
from kapsi.training.distributed import Group
from kapsi.training.losses import MSE, CrossEntropy, Loss
from kapsi.training.losses.base import CallableLoss
from kapsi.training.solvers import LBFGS, AdamW, LevenbergMarquardt, Ridge, Solver, reason_not_closed

REQUESTED = "requested"

SMALL_PRODUCT = 50_000_000
"""Maximum rows × parameters for quasi-Newton steps on all rows: a step takes milliseconds, and training converges."""

SMALL_SYSTEM = 1_000
"""Largest number of parameters P for damped Gauss–Newton steps, with P × P systems."""

SMALL_JACOBIAN = 5_000_000
"""Largest rows × outputs × parameters for damped Gauss–Newton steps: 40 MB for a Jacobian in float64."""


class Described(Protocol):
    """Properties of rows relevant for the choice; see `kapsi.training.data.Rows`."""

    @property
    def count(self) -> int | None:
        """Number of rows, None if unknown."""

    @property
    def classes(self) -> bool:
        """Whether targets are integer class labels by their type."""

    @property
    def in_memory(self) -> bool:
        """Whether all rows are tensors."""

    @property
    def sparse(self) -> bool:
        """Whether inputs are sparse."""


@dataclass(frozen=True)
class RowsInfo:
    """Properties of rows in memory, for tables before conversion to tensors."""

    count: int
    classes: bool
    in_memory: bool = True
    sparse: bool = False


class Resolved(NamedTuple):
    """A configuration with every `auto` resolved.

    Attributes:
        config: training options with loss and solver resolved.
        loss, solver: the loss and the solver in `config`.
        reason: why this solver was chosen.
        fallback: solver if the chosen solver refuses the model; None for a requested solver.
    """

    config: TrainConfig
    loss: Loss
    solver: Solver
    reason: str
    fallback: Solver | None = None


def resolve_loss(loss: Loss | Literal["auto"], classes: bool) -> Loss:
    """Return the loss, with `auto` resolved.

    Args:
        loss: the configured loss.
        classes: whether the targets are integer class labels by their type.
    """
    if isinstance(loss, CallableLoss):
        return replace(loss, of_classes=classes)
    if isinstance(loss, Loss):
        return loss
    return CrossEntropy() if classes else MSE()


def check_at_once(config: TrainConfig) -> None:
    """Raise a `SpecError` for options without effect on a model solved at once."""
    for name in ("patience", "monitor"):
        if getattr(config, name) != getattr(TrainConfig, name):
            raise SpecError(f"training.{name}: has no effect, the solver solves this model at once; leave {name} out")


def resolve(
    config: TrainConfig,
    model: nn.Module,
    rows: Described,
    *,
    group: Group | None = None,
    selecting: bool = False,
) -> Resolved:
    """Return a configuration with every `auto` resolved, for one model and its training rows.

    A single fit uses `ridge` for linear models, otherwise `levenberg_marquardt`, `lbfgs` or `adamw`, by size. The search for a
    penalty and a number of epochs (`selecting`) needs many comparable fits in small steps with early stopping: `lbfgs`, or
    `adamw` above the same size.

    Args:
        config: the configuration; requested losses and solvers stay.
        model: the model, possibly on the meta device.
        rows: properties of the training rows.
        group: the processes in the training.
        selecting: whether penalty and number of epochs are chosen on validation rows.
    """
    loss = resolve_loss(config.loss, rows.classes)
    if isinstance(config.solver, Solver):
        solver, reason = config.solver, REQUESTED
    else:
        choose = _choose_selecting if selecting else _choose
        solver, reason = choose(config, model, rows, loss, Group() if group is None else group)
    chosen = config.solver == "auto" and isinstance(solver, LevenbergMarquardt)
    if config.smoothness == "auto" and not solver.chooses_smoothness(model, loss):
        config = replace(config, smoothness=0.0)
    return Resolved(replace(config, loss=loss, solver=solver), loss, solver, reason, LBFGS() if chosen else None)


def _choose(config: TrainConfig, model: nn.Module, rows: Described, loss: Loss, group: Group) -> tuple[Solver, str]:
    count, number = trained_count(model), rows.count
    if group.sharded:
        return AdamW(), "the model is divided among processes"
    if config.l1 or config.group_l1:
        return AdamW(), "an l1 or a group penalty is not smooth"
    if is_random(model):
        return AdamW(), "dropout is random"
    if any(isinstance(module, Store) and not module.as_declared() for module in model.modules()):
        return AdamW(), "hooks or parametrizations compute tensors, some with a state of their own"
    if gradient_hook(model):
        return AdamW(), "hooks change gradients"
    closed = loss.closed_form and config.grid_updates is None  # no solution on grids that move
    if closed and number is not None and reason_not_closed(model, number, group.size) is None:
        return Ridge(), "the model is linear in its parameters: solved at once"
    if number is None or not rows.in_memory:
        return AdamW(), "the rows are not in memory"
    size = f"{number:,} rows and {count:,} parameters"
    outputs = getattr(model, "out_features", 1)
    # Third-party modules need not be differentiable row by row.
    suited = isinstance(model, Model) and loss.gauss_newton and not rows.sparse and not _has_batch_statistics(model)
    if suited and count <= SMALL_SYSTEM and number * count * outputs <= SMALL_JACOBIAN:
        return LevenbergMarquardt(), f"{size} are few: damped Gauss–Newton steps on all of them"
    if number * count <= SMALL_PRODUCT:
        return LBFGS(), f"{size} are few: quasi-Newton steps on all of them"
    return AdamW(), f"{size} are many: steps in mini-batches"


def _choose_selecting(
    config: TrainConfig, model: nn.Module, rows: Described, loss: Loss, group: Group
) -> tuple[Solver, str]:
    small = rows.count is not None and rows.count * trained_count(model) <= SMALL_PRODUCT
    return (LBFGS() if small and not is_random(model) else AdamW()), "the penalty is chosen on validation rows"


def is_random(model: nn.Module) -> bool:
    """Return whether a model has dropout: a line search needs a deterministic function."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) for module in model.modules())


def _has_batch_statistics(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
