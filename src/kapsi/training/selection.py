"""A penalty and a number of epochs chosen on rows that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kapsi.modules import Model
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig
from kapsi.training.distributed import Group
from kapsi.training.engine import INTERRUPTED, fit
from kapsi.training.prediction import predict, widest
from kapsi.training.records import Epoch
from kapsi.training.resolve import Resolved, RowsInfo, resolve
from kapsi.training.threads import threads_for

__all__ = ["Choice", "Fits", "choose_penalty", "fit_selected"]

Data: TypeAlias = tuple[Tensor, Tensor]

Make: TypeAlias = Callable[[Tensor | slice], Model]
"""Makes a model for training on some rows."""

PENALTIES = (10.0, 3.0, 1.0, 0.3, 0.1, 0.01, 1e-3, 1e-5)
LARGE_PENALTY = 1e-4
"""What a model has that is too large for the search: with many rows there is little to hold down."""

CROSS_VALIDATED_ROWS = 5_000
"""Up to so many rows the penalty is chosen by cross-validation: a single part of a small table is too noisy for it."""

INNER_FOLDS = 3
LEAST_EPOCHS = 6


class Choice(NamedTuple):
    """A penalty that was tried.

    Attributes:
        l2: λ.
        loss: mean loss on the rows that were not trained on.
        epochs: number of epochs to the best loss, the median over the parts.
        chosen: whether it was chosen.
    """

    l2: float
    loss: float
    epochs: int
    chosen: bool


Split: TypeAlias = tuple[Tensor, Tensor]
"""Row numbers to train on, and to hold out."""


class Fits:
    """Fits one after another, with shared callbacks, checkpoints and processes.

    Args:
        callbacks: as for `kapsi.fit`.
        checkpoints: of all of them; each has its own folder in it, by its number.
        group: the processes that train together.
    """

    def __init__(self, callbacks: Any = (), checkpoints: Checkpoints | None = None, group: Group | None = None) -> None:
        self.callbacks, self.checkpoints, self.group = callbacks, checkpoints, group
        self.count = 0

    def __call__(
        self, model: nn.Module, data: Data, config: TrainConfig, validation: Data | None = None
    ) -> list[Epoch]:
        """Fit a model; an interrupt is raised again as `KeyboardInterrupt` once the fit has ended."""
        self.count += 1
        part = None if self.checkpoints is None else self.checkpoints.part(f"fit-{self.count:06}")
        if validation is None:  # nothing to stop on
            config = replace(config, patience=TrainConfig.patience, monitor="loss")
        records = fit(
            model, data, config, validation=validation, callbacks=self.callbacks, checkpoints=part, group=self.group
        )
        if records and records[-1].ended == INTERRUPTED:
            raise KeyboardInterrupt
        return records


def choose_penalty(
    make: Make,
    data: Data,
    splits: Sequence[Split],
    config: TrainConfig,
    *,
    penalties: Sequence[float] = PENALTIES,
    fits: Fits | None = None,
) -> list[Choice]:
    """Fit with penalties from strong to weak and choose the strongest that is not surely worse than the best.

    "Not surely worse" is: its mean loss on the held-out rows is above the lowest one by at most one standard error of the
    difference, taken row by row (the one-standard-error rule of Breiman et al. 1984, paired). The search ends when three
    penalties in a row are surely worse than the best so far.

    A model of one layer goes on from the weights of the penalty before; with more layers, where strong penalties lead into
    corners, each fit begins anew.

    Args:
        make: returns a new model with the same initial values each time, calibrated on some rows: those it is trained on.
        data: inputs and targets.
        splits: rows to train on and rows to stop and choose on, one pair or several.
        config: how; its penalty is not used.
        penalties: in descending order.
        fits: how each is fitted.

    Returns:
        What was tried, in order.
    """
    x, y = data
    fits = Fits() if fits is None else fits
    tried: list[tuple[float, Tensor, int]] = []
    worse = 0
    models = [make(kept) for kept, _ in splits]
    config, loss, _, _, _ = _resolve(models[0], data, config)
    for penalty in penalties:
        losses, epochs = [], []
        for i, (kept, held) in enumerate(splits):
            model = models[i] = models[i] if _continues(models[i]) else make(kept)
            settled = replace(config, l2=penalty)
            records = fits(model, (x[kept], y[kept]), settled, validation=(x[held], y[held]))
            held_out = loss.rows(predict(model, x[held]), y[held]).double()
            losses.append(held_out.nan_to_num(nan=math.inf, posinf=math.inf))
            epochs.append(max((r.number for r in records if r.best), default=1))
        tried.append((penalty, torch.cat(losses), sorted(epochs)[len(epochs) // 2]))
        lowest = min((held_out for _, held_out, _ in tried), key=lambda t: float(t.mean()))
        worse = worse + 1 if _surely_worse(tried[-1][1], lowest) else 0
        if worse == 3 and len(tried) > 4:
            break
    chosen = next(penalty for penalty, held_out, _ in tried if not _surely_worse(held_out, lowest))
    return [Choice(p, float(held_out.mean()), count, p == chosen) for p, held_out, count in tried]


def _resolve(model: nn.Module, data: Data, config: TrainConfig) -> Resolved:
    x, y = data
    return resolve(config, model, RowsInfo(x.shape[0], not y.is_floating_point()), selecting=True)


def _continues(model: Model) -> bool:
    return len(model.layers) == 1


def _surely_worse(losses: Tensor, lowest: Tensor) -> bool:
    if not bool(torch.isfinite(losses).all()):
        return bool(torch.isfinite(lowest).all())
    difference = losses - lowest
    error = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return float(difference.mean()) > error


def fit_selected(
    make: Make,
    data: Data,
    config: TrainConfig,
    *,
    splits: Callable[[int], Sequence[Split]],
    fits: Fits | None = None,
) -> tuple[Model, list[Epoch], list[Choice]]:
    """Fit a model with the penalty and the number of epochs chosen on rows that are not trained on.

    For a solver on all rows the choice is made by cross-validation (on one part above 5,000 rows), and the model is then fitted
    to all rows in the same way, with the chosen penalty and number of epochs; `ridge` chooses the penalty of squares by
    itself, on each row left out. With mini-batches a part of the rows is kept to stop early, and the model is the one with
    the best weights there.

    Args:
        make: returns a new model with the same initial values each time, calibrated on some rows: those it is trained on.
        data: inputs and targets.
        config: how.
        splits: called with a number of folds, returns the rows of each; with 1, one pair with the share `config.stopping`.
        fits: how each is fitted.

    Returns:
        The model, the records of its training, and the penalties that were tried (none where it was given).
    """
    model = make(slice(None))
    with threads_for(data[0].shape[0] * widest(model)):
        return _fit_selected(model, make, data, config, splits, Fits() if fits is None else fits)


def _fit_selected(
    model: Model,
    make: Make,
    data: Data,
    config: TrainConfig,
    splits: Callable[[int], Sequence[Split]],
    fits: Fits,
) -> tuple[Model, list[Epoch], list[Choice]]:
    x, y = data
    settled, loss, solver, _, _ = _resolve(model, data, config)
    penalties = PENALTIES if config.l2 is None else (config.l2,)
    if solver.mini_batch:
        penalty = LARGE_PENALTY if config.l2 is None else config.l2
        ((kept, held),) = splits(1)
        model = make(kept)
        settled = replace(settled, l2=penalty)
        return model, fits(model, (x[kept], y[kept]), settled, validation=(x[held], y[held])), []
    if config.l2 is None and solver.chooses_l2(model, loss):
        records = fits(model, data, settled)
        found = records[-1].details
        return model, records, [Choice(found["l2"], found["leave_one_out"], 1, True)]
    parts = splits(INNER_FOLDS if x.shape[0] <= CROSS_VALIDATED_ROWS else 1)
    choices = choose_penalty(make, data, parts, settled, penalties=penalties, fits=fits)
    records = []
    last = next(i for i, choice in enumerate(choices) if choice.chosen)
    for choice in choices[: last + 1] if _continues(model) else choices[last : last + 1]:
        epochs = min(config.epochs, max(choice.epochs, LEAST_EPOCHS))
        again = fits(model, data, replace(settled, l2=choice.l2, epochs=epochs))
        records += [epoch._replace(number=len(records) + i) for i, epoch in enumerate(again, 1)]
    return model, records, choices if config.l2 is None else []
