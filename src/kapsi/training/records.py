"""Records of training, per step and per epoch."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """The record of a step, given to `on_step` of callbacks.

    Attributes:
        epoch: number of the epoch, from 1.
        step: number of the step in the epoch, from 1.
        steps: number of steps of an epoch, None for streams of unknown length.
        loss: training loss of the step, None for solvers that report only at the end of an epoch.
        seconds: time since training began, without interruptions.
    """

    epoch: int
    step: int
    steps: int | None = None
    loss: float | None = None
    seconds: float = 0.0


class Epoch(NamedTuple):
    """The record of an epoch.

    Attributes:
        number: number of the epoch, from 1.
        loss: mean loss on the training rows, without penalties; the mean over the epoch for mini-batches, at the end otherwise.
        validation_loss: mean loss on the validation rows, None without validation rows.
        best: whether this is the best epoch so far, by the monitored quantity.
        metrics: requested metrics, by default `accuracy`, or `rmse` and `r2`; of the validation rows if any, otherwise of the
            training rows: requested metrics, or `rmse` for the loss `mse`.
        seconds: time since training began, without interruptions.
        learning_rate: learning rate at the end of the epoch, None for solvers without one.
        solver: name of the solver.
        reason: why this solver was chosen.
        details: further values reported by the solver, such as the damping or the chosen L2 penalty.
        ended: why training ended, None for all but the last epoch.
    """

    number: int
    loss: float
    validation_loss: float | None = None
    best: bool = False
    metrics: dict[str, float] = {}  # noqa: RUF012 (never modified)
    seconds: float = 0.0
    learning_rate: float | None = None
    solver: str = ""
    reason: str = ""
    details: dict[str, float] = {}  # noqa: RUF012
    ended: str | None = None
