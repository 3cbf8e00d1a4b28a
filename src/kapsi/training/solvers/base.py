"""What a solver is given and what it gives: the one protocol between the engine and the ways to lower a loss."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from kapsi.training.config import TrainConfig
from kapsi.training.data import Batch, Rows
from kapsi.training.distributed import Group
from kapsi.training.losses import Loss
from kapsi.training.penalties import Penalties

__all__ = ["SOLVERS", "NotFinite", "Report", "Solver", "State", "Task"]


class NotFinite(ArithmeticError):
    """A loss or a gradient that is not finite; the engine finds the layer it comes from and says so to the user.

    Args:
        statistic: `loss` or `gradient`.
        batch: the rows it was met with.
    """

    def __init__(self, statistic: str, batch: Batch) -> None:
        super().__init__(statistic)
        self.statistic, self.batch = statistic, batch


@dataclass
class Task:
    """What is to be minimized: the mean over rows of weighted losses, plus penalties.

    Args:
        model: maps `(rows, m)` to `(rows, n)`; the one whose parameters are trained, in place.
        rows: the training rows; their weights have mean one.
        loss: of a row.
        penalties: of the parameters.
        config: with no `auto` left in it.
        group: the processes that train together.
        call: what is called for the outputs: the model, or what was compiled or wrapped of it.
    """

    model: nn.Module
    rows: Rows
    loss: Loss
    penalties: Penalties
    config: TrainConfig
    group: Group
    call: Callable[..., Tensor]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]


State = tuple[dict[str, Tensor], dict[str, Any]]
"""What a solver must know to go on exactly: tensors, and plain data that JSON can hold (numbers, texts, lists)."""


@dataclass(frozen=True)
class Report:
    """What a solver says after an epoch.

    Args:
        loss: mean training loss without penalties: over the epoch for mini-batches, at the end of it for others.
        learning_rate: the last one, None where there is none.
        details: further numbers for the record: damping, the chosen penalty, the norm of the gradient.
        ended: why training is over, or None.
    """

    loss: float
    learning_rate: float | None = None
    details: dict[str, float] | None = None
    ended: str | None = None


class Solver(ABC):
    """One way to lower the loss, made anew for each training run; a subclass registers itself by its name.

    The engine calls `steps(number)` for each epoch, from 1 on, and after it `report()`. Between two steps it may take
    `state()`; after `restore(state)` in a new process, `steps(number, start)` goes on with the step after `start` that were
    taken, and everything after it is bit-equal to what it would have been.
    """

    name: ClassVar[str]
    distributed: ClassVar[bool] = True
    """Whether rows may be shared among processes."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __init_subclass__(cls, name: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if name:
            cls.name = name
            SOLVERS[name] = cls

    @abstractmethod
    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        """Take the steps of an epoch, all but the first `start`, and yield after each.

        Raises:
            NotFinite: a loss or a gradient is not finite; the weights are those before the step.
        """

    @abstractmethod
    def report(self) -> Report:
        """Return what came of the epoch."""

    @abstractmethod
    def state(self) -> State:
        """Return what is needed to go on, beside the weights of the model: not copied, to be written at once."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Go on from a state; the weights of the model are those of that moment already."""

    def length(self) -> int | None:
        """Return the number of steps of an epoch, None where it is not known."""
        return 1

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights to be judged and kept, such as averaged ones."""
        return contextlib.nullcontext()


SOLVERS: dict[str, type[Solver]] = {}
