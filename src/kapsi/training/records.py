"""What is known after an epoch of training."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Epoch"]


class Epoch(NamedTuple):
    """What is known after an epoch.

    Attributes:
        number: 1 for the first.
        loss: mean loss on the training rows, without penalties; the mean over the epoch for mini-batches, at its end otherwise.
        validation_loss: mean loss on the validation rows, None where there are none.
        best: whether it is the best so far, by the validation loss where there is one.
        metrics: of the validation rows where there are some, else of the training rows as far as they are known for free:
            `accuracy`, or `rmse` and `r2`.
        seconds: since training began, over all interruptions.
        learning_rate: at the end of the epoch, None where the solver has none.
        solver: the solver's name.
        reason: why it was taken.
        details: what the solver has to say beside that, such as its damping or the penalty that it chose.
        ended: why this epoch is the last one, None where it is not.
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
