"""Solvers: options, and the protocol between the engine and a running solver."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError
from kapsi.function import Function
from kapsi.grids import GridUpdate
from kapsi.training.data import Batch, Rows
from kapsi.training.distributed import Group
from kapsi.training.losses import Loss
from kapsi.training.penalties import Penalties

if TYPE_CHECKING:
    from kapsi.training.config import TrainConfig


class NotFinite(ArithmeticError):
    """A non-finite loss or gradient; the engine finds the layer that caused it.

    Args:
        statistic: `loss` or `gradient`.
        batch: the rows of the step.
    """

    def __init__(self, statistic: str, batch: Batch) -> None:
        super().__init__(statistic)
        self.statistic, self.batch = statistic, batch


@dataclass
class Task:
    """The objective: the mean over rows of weighted losses, plus penalties.

    Args:
        model: maps `(rows, m)` to `(rows, n)`; the trained parameters change in place.
        rows: the training rows; their weights have mean one.
        loss: the per-row loss function.
        penalties: penalties on the parameters.
        config: training options, with every `auto` resolved.
        group: the processes in the training.
        call: computes the outputs; the model, or a compiled or wrapped form.
    """

    model: nn.Module
    rows: Rows
    loss: Loss
    penalties: Penalties
    config: TrainConfig
    group: Group
    call: Callable[..., Tensor]

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]


State = tuple[dict[str, Tensor], dict[str, Any]]
"""The state of a solver, sufficient to resume exactly: tensors, and plain data for JSON (numbers, strings, lists)."""


@dataclass(frozen=True)
class Report:
    """The report of a solver on an epoch.

    Args:
        loss: mean training loss without penalties: over the epoch for mini-batches, at the end for others.
        learning_rate: last learning rate, None for solvers without one.
        details: further values for the record: damping, the chosen penalty, the norm of the gradient.
        ended: why training ended, or None.
    """

    loss: float
    learning_rate: float | None = None
    details: dict[str, float] | None = None
    ended: str | None = None


class Solver(Function, role="solver"):
    """A training method and its options; a subclass must define `start`.

    `kapsi.training.solvers.MiniBatch` is a base for solvers with a torch optimizer; subclasses define only `optimizer`.
    """

    default_kind: ClassVar[str | None] = "adamw"
    mini_batch: ClassVar[bool] = False
    """Steps on some of the rows: models stay in float32, a share of the rows is held out to choose the number of epochs."""
    distributed: ClassVar[bool] = False
    """Parameters may be divided among processes."""
    scale_invariant: ClassVar[bool] = False
    """Steps do not depend on the unit of the loss."""
    rotation_invariant: ClassVar[bool] = False
    """Fits of a linear model with an L2 penalty do not depend on rotations of its inputs, but for the initial values."""

    @property
    def follows_grids(self) -> bool:
        """Whether `SolverRun.follow_grids` continues on moved grids of splines."""
        return False

    @abstractmethod
    def start(self, task: Task) -> SolverRun:
        """Return the running solver of a task.

        Raises:
            SpecError: an unsupported model, loss, penalty or kind of rows.
        """

    def prepare(self, model: nn.Module, group: Group) -> Callable[..., Tensor]:
        """Return the callable for the outputs of a model, wrapped or compiled if needed."""
        return model

    def schedules_epochs(self) -> bool:
        """Return whether steps depend on the planned number of epochs, fixed for resumed runs."""
        return False

    def chooses_l2(self, model: nn.Module, loss: Loss) -> bool:
        """Return whether the solver chooses the L2 penalty of a model if none is set."""
        return False

    def chooses_smoothness(self, model: nn.Module, loss: Loss) -> bool:
        """Return whether the solver chooses the smoothness of a model's splines for `smoothness: auto`, otherwise 0."""
        return False


class SolverRun(ABC):
    """A running solver, new for each training run.

    The engine calls `steps(number)` for each epoch, from 1 on, and then `report()`. Between two steps it may call
    `state()`; after `restore(state)` in a new process, `steps(number, start)` continues with the step after the first
    `start`, and the rest of the run is bitwise identical to an uninterrupted one.
    """

    at_once = False
    """Whether a single step solves the task."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        """Take the steps of an epoch, all but the first `start`, and yield after each.

        Raises:
            NotFinite: a loss or a gradient is not finite; the model has the weights before the step.
        """

    @abstractmethod
    def report(self) -> Report:
        """Return the report on the epoch."""

    @abstractmethod
    def state(self) -> State:
        """Return the state other than the model's weights, not copied, to be written immediately."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Continue from a state; the weights of the model have been restored before."""

    def follow_grids(self, update: GridUpdate) -> None:
        """Continue with the next epoch after grids and parameters of the model have changed; see `Solver.follows_grids`."""
        raise SpecError(f"{type(self).__name__}: follow_grids must be defined, since Solver.follows_grids is true")

    def length(self) -> int | None:
        """Return the number of steps of an epoch, None if unknown."""
        return 1

    def step_loss(self) -> float | None:
        """Return the loss of the last step, None if known only at the end of the epoch."""
        return None

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with the model's weights for evaluation, averaged weights for instance."""
        return contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------ shared by solvers


def seeded(devices: list[int], *parts: int) -> None:
    """Seed the torch generators for one step, identified by integers; the caller restores their state."""
    seed = 0
    for part in parts:
        seed = (seed * 0x9E3779B97F4A7C15 + part + 0x632BE59BD9B4E019) & 0x7FFFFFFFFFFFFFFF
    torch.default_generator.manual_seed(seed)
    for device in devices:
        torch.cuda.default_generators[device].manual_seed(seed)


def pack(value: Any, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """Return nested dictionaries and lists as plain data for JSON; move tensors to `tensors`, with their paths as keys."""
    if isinstance(value, Tensor):
        tensors[prefix] = value
        return {"tensor": prefix}
    if isinstance(value, dict):
        return {
            "items": [
                [key, pack(item, tensors, f"{prefix}.{key}" if prefix else str(key))] for key, item in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        return {"list": [pack(item, tensors, f"{prefix}.{i}") for i, item in enumerate(value)]}
    return value


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the inverse of `pack`; tuples become lists."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "list" in value:
        return [unpack(item, tensors) for item in value["list"]]
    return {key: unpack(item, tensors) for key, item in value["items"]}
