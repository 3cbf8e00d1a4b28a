"""Selection of the L2 penalty and the number of epochs on validation rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kapsi.modules import Model
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig
from kapsi.training.distributed import Group
from kapsi.training.engine import fit
from kapsi.training.prediction import predict, widest
from kapsi.training.records import Epoch
from kapsi.training.resolve import Resolved, RowsInfo, check_at_once, resolve
from kapsi.training.threads import threads_for
from kapsi.training.training_run import INTERRUPTED

Data: TypeAlias = tuple[Tensor, ...]
"""Inputs, targets, and weights of the rows if any."""

Make: TypeAlias = Callable[[Tensor | slice], Model]
"""Returns a new model for training on some rows."""

PENALTIES = (10.0, 3.0, 1.0, 0.3, 0.1, 0.01, 1e-3, 1e-5)
LARGE_MODEL_PENALTY = 1e-4
"""Penalty of models too large for the search; with many rows the choice hardly matters."""

CROSS_VALIDATED_ROWS = 5_000
"""Largest number of rows with cross-validation: a single validation part of a small table is too noisy."""

INNER_FOLDS = 3
MIN_EPOCHS = 6


class PenaltyScore(NamedTuple):
    """The score of a penalty.

    Attributes:
        l2: the penalty λ.
        loss: mean loss on the validation rows.
        epochs: number of epochs to the best loss, the median over the folds.
        chosen: whether this penalty is selected.
    """

    l2: float
    loss: float
    epochs: int
    chosen: bool


Split: TypeAlias = tuple[Tensor, Tensor]
"""Row indices of training rows and of validation rows."""


class Fits:
    """Successive fits with shared callbacks, checkpoints and processes.

    Args:
        callbacks: see `kapsi.fit`.
        checkpoints: checkpoints of all fits, in a numbered folder per fit.
        group: the processes in the training.
    """

    def __init__(self, callbacks: Any = (), checkpoints: Checkpoints | None = None, group: Group | None = None) -> None:
        self.callbacks, self.checkpoints, self.group = callbacks, checkpoints, group
        self.count = 0

    def __call__(
        self, model: nn.Module, data: Data | DataLoader[Any], config: TrainConfig, validation: Data | None = None
    ) -> list[Epoch]:
        """Fit a model; raise an interrupt again as `KeyboardInterrupt` after the end of the fit."""
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
) -> list[PenaltyScore]:
    """Fit with penalties from strong to weak, and choose the strongest within one standard error of the best.

    The mean loss on validation rows may exceed the lowest mean by at most one standard error of the difference, taken row by
    row (the one-standard-error rule of Breiman et al. 1984, paired). The search ends after three consecutive penalties above
    this limit.

    A model of one layer continues from the weights of the previous penalty. With more layers each fit starts from the initial
    weights, because strong penalties lead into poor local minima.

    Args:
        make: returns a new model with the same initial values each time, calibrated on the given training rows.
        data: inputs and targets.
        splits: training rows and validation rows, one pair or several.
        config: training options; `l2` is ignored.
        penalties: L2 penalties in descending order.
        fits: runs the fits.

    Returns:
        The scores of all penalties, in order.
    """
    x, y = data[:2]
    fits = Fits() if fits is None else fits
    scored: list[tuple[float, Tensor, int]] = []
    worse = 0
    models = [make(rows) for rows, _ in splits]
    config, loss, _, _, _ = _resolve(models[0], data, config)
    for penalty in penalties:
        losses, epochs = [], []
        for i, (rows, held) in enumerate(splits):
            model = models[i] = models[i] if _continues(models[i]) else make(rows)
            resolved = replace(config, l2=penalty)
            records = fits(model, part_of(data, rows), resolved, validation=part_of(data, held))
            validation = loss.rows(predict(model, x[held]), y[held]).double()
            for weight in data[2:]:
                validation = validation * (weight[held] / weight[held].double().mean().clamp_min(1e-300))
            losses.append(validation.nan_to_num(nan=math.inf, posinf=math.inf))
            epochs.append(max((r.number for r in records if r.best), default=1))
        scored.append((penalty, torch.cat(losses), sorted(epochs)[len(epochs) // 2]))
        lowest = min((validation for _, validation, _ in scored), key=lambda t: float(t.mean()))
        worse = worse + 1 if clearly_worse(scored[-1][1], lowest) else 0
        if worse == 3 and len(scored) > 4:
            break
    chosen = next(penalty for penalty, validation, _ in scored if not clearly_worse(validation, lowest))
    return [PenaltyScore(p, float(validation.mean()), count, p == chosen) for p, validation, count in scored]


def _resolve(model: nn.Module, data: Data, config: TrainConfig) -> Resolved:
    x, y = data[:2]
    return resolve(config, model, RowsInfo(x.shape[0], not y.is_floating_point()), selecting=True)


def part_of(data: Data, rows: Tensor) -> Data:
    """Return a selection of rows."""
    return tuple(tensor[rows] for tensor in data)


def _continues(model: Model) -> bool:
    return len(model.layers) == 1


def clearly_worse(losses: Tensor, lowest: Tensor) -> bool:
    """Return whether the mean of losses exceeds the lowest mean by more than one standard error of the row-wise difference."""
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
) -> tuple[Model, list[Epoch], list[PenaltyScore]]:
    """Fit a model with the L2 penalty and the number of epochs chosen on validation rows.

    A solver on all rows uses cross-validation (one validation part above 5,000 rows), followed by a fit to all rows with the
    chosen penalty and number of epochs; `ridge` chooses the penalty by the leave-one-out error. A mini-batch solver stops early
    on a validation part, and the model has the weights of the best epoch.

    Args:
        make: returns a new model with the same initial values each time, calibrated on the given training rows.
        data: inputs and targets.
        config: training options.
        splits: called with a number of folds, returns the rows of each; with 1, a single pair for early stopping.
        fits: runs the fits.

    Returns:
        The model, the records of its training, and the scores of the penalties (none if `l2` is set).
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
) -> tuple[Model, list[Epoch], list[PenaltyScore]]:
    x = data[0]
    resolved, loss, solver, _, _ = _resolve(model, data, config)
    penalties = PENALTIES if config.l2 is None else (config.l2,)
    if solver.mini_batch:
        penalty = LARGE_MODEL_PENALTY if config.l2 is None else config.l2
        ((rows, held),) = splits(1)
        model = make(rows)
        resolved = replace(resolved, l2=penalty)
        return model, fits(model, part_of(data, rows), resolved, validation=part_of(data, held)), []
    if config.l2 is None and solver.chooses_l2(model, loss):
        check_at_once(config)
        records = fits(model, data, resolved)
        details = records[-1].details
        return model, records, [PenaltyScore(details["l2"], details["leave_one_out"], 1, True)]
    parts = splits(INNER_FOLDS if x.shape[0] <= CROSS_VALIDATED_ROWS else 1)
    choices = choose_penalty(make, data, parts, resolved, penalties=penalties, fits=fits)
    records = []
    last = next(i for i, choice in enumerate(choices) if choice.chosen)
    for choice in choices[: last + 1] if _continues(model) else choices[last : last + 1]:
        epochs = min(config.epochs, max(choice.epochs, MIN_EPOCHS))
        again = fits(model, data, replace(resolved, l2=choice.l2, epochs=epochs))
        records += [epoch._replace(number=len(records) + i) for i, epoch in enumerate(again, 1)]
    return model, records, choices if config.l2 is None else []
