"""Records of training, for each step and for each epoch."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """The record of a step, given to `on_step` of callbacks.

    Attributes:
        epoch: number of the epoch, from 1.
        step: number of the step in the epoch, from 1.
        steps: number of steps of an epoch, None for streams of unknown length.
        loss: training loss of the step, None for solvers with a report at the end of an epoch only.
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
        loss: mean loss on the training rows, without penalties; the mean over the epoch for mini-batches, at the end otherwise.
        validation_loss: mean loss on the validation rows, None without validation rows.
        best: whether this is the best epoch so far, by the monitored quantity.
        metrics: requested metrics, by default `accuracy`, or `rmse` and `r2`; of the validation rows if any, otherwise of the
            training rows: requested metrics, or `rmse` for the loss `mse`.
        seconds: since training began, over all interruptions.
        learning_rate: at the end of the epoch, None for solvers without one.
        solver: name of the solver.
        reason: reason for the choice of the solver.
        details: further numbers of the solver, for instance the damping or the chosen L2 penalty.
        ended: reason for the end of training, None for all but the last epoch.
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
