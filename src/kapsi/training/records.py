"""Records of training: one for each step, one for each epoch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Epoch", "Step"]


class Step(NamedTuple):
    """The record of a step, given to `on_step` of callbacks.

    Attributes:
        epoch: number of the epoch, from 1.
        step: number of the step in the epoch, from 1.
        steps: number of steps of an epoch, None for streams of unknown length.
        loss: training loss of the step, None for solvers that report it at the end of an epoch only.
        seconds: since training began, over all interruptions.
    """

    epoch: int
    step: int
    steps: int | None = None
    loss: float | None = None
    seconds: float = 0.0


class Epoch(NamedTuple):
    """The record of an epoch.

    Attributes:
        number: 1 for the first.
        loss: mean loss on the training rows, without penalties; the mean over the epoch for mini-batches, at its end otherwise.
        validation_loss: mean loss on the validation rows, None without them.
        best: whether it is the best so far, by the monitored quantity.
        metrics: of the validation rows if there are some; else of the training rows, if they were requested or follow from the
            loss: `accuracy`, or `rmse` and `r2`, unless others were requested.
        seconds: since training began, over all interruptions.
        learning_rate: at the end of the epoch, None for solvers without one.
        solver: name of the solver.
        reason: reason for the choice of the solver.
        details: further numbers of the solver, such as its damping or the L2 penalty that it chose.
        ended: reason for the end of training, None for all but the last epoch.
    """

    number: int
    loss: float
    validation_loss: float | None = None
    best: bool = False
    metrics: dict[str, float] = {}  # noqa: RUF012 (nobody writes to it)
    seconds: float = 0.0
    learning_rate: float | None = None
    solver: str = ""
    reason: str = ""
    details: dict[str, float] = {}  # noqa: RUF012
    ended: str | None = None
