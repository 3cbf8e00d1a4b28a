"""Fits of an estimator's own model, outside of the selection of penalties: on all rows, from given weights, on sparse rows."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kapsi.calibrate import calibrate
from kapsi.data.tabular.types import Ints
from kapsi.errors import ScaleWarning, SpecError
from kapsi.modules import Model, scale_last_layer
from kapsi.spec import ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit
from kapsi.training.resolve import RowsInfo, resolve, resolve_loss
from kapsi.training.selection import LARGE_MODEL_PENALTY
from kapsi.training.solvers import AdamW, Solver

__all__ = ["check_warm_start", "fit_model", "in_batches", "takes_sparse"]


def takes_sparse(spec: ModelSpec) -> bool:
    """Return whether all heads of the first layer take sparse rows."""
    heads = spec.layers[0].heads
    return all(
        head.expansion.takes_sparse() and head.remainder.takes_sparse() and not head.before and not head.after
        for head in heads
    )


def in_batches(config: TrainConfig) -> TrainConfig:
    """Return options for one pass in mini-batches.

    Raises:
        SpecError: the solver takes steps on all rows.
    """
    solver = AdamW(schedule="constant") if config.solver == "auto" else config.solver
    if not isinstance(solver, Solver) or not solver.mini_batch:
        raise SpecError(f"the solver {solver.name} takes steps on all rows; use solver='adamw' or 'sgd'")
    return replace(config, solver=solver, epochs=1)


def check_warm_start(spec: ModelSpec, config: TrainConfig, rows: RowsInfo, where: str) -> None:
    """Raise a `SpecError` for a warm start of a solver that solves the model at once.

    Args:
        spec: the specification with all widths.
        config: training options.
        rows: properties of the training rows.
        where: prefix of the message.
    """
    sized = Model(spec, device="meta")
    resolved = resolve(config, sized, rows)
    # A solver that chooses the penalty by the leave-one-out error has the solution in closed form.
    if resolved.solver.chooses_l2(sized, resolved.loss):
        name = resolved.solver.name
        raise SpecError(
            f"{where}: warm_start=True has no effect with solver={name!r}, which solves this model at once from any weights; "
            "leave warm_start out, or use solver='lbfgs' or 'adamw'"
        )


def fit_model(
    start: ModelSpec | Model,
    x: Any,
    y: Any,
    weight: Any,
    config: TrainConfig,
    *,
    held: tuple[Ints, Ints] | None = None,
    device: torch.device | None = None,
) -> Model:
    """Return a model fitted to all rows by `kapsi.fit`.

    Args:
        start: a specification with all widths, or a model whose weights are the initial values; it is not changed.
        x: inputs, an array (rows, m) or a CSR matrix.
        y: class codes (rows,), or targets.
        weight: weights of the rows, or None.
        config: training options.
        held: indices of the training rows, and of the rows held out for early stopping; None for a fit on all rows.
        device: the device.
    """
    classes, sparse = y.dtype.kind == "i", not isinstance(x, np.ndarray)
    spec = start.spec if isinstance(start, Model) else start
    loss = resolve_loss(config.loss, classes)
    info, sized = RowsInfo(x.shape[0], classes, sparse=sparse), Model(spec, device="meta")
    solver = resolve(replace(config, loss=loss), sized, info).solver
    if config.l2 is None and not solver.chooses_l2(sized, loss):
        config = replace(config, l2=LARGE_MODEL_PENALTY)
    dtype = torch.float32 if solver.mini_batch else torch.float64
    given = (x, y) if weight is None else (x, y, weight)
    kept, others = (slice(None), None) if held is None else held
    data = tuple(_rows(values, kept, sparse) for values in given)
    validation = None if others is None else tuple(_rows(values, others, sparse) for values in given)
    with warnings.catch_warnings():
        # Columns and targets are standardized; a constant target leaves rounding errors.
        warnings.simplefilter("ignore", ScaleWarning)
        if isinstance(start, Model):
            model = copy.deepcopy(start).to(device, dtype)
        else:
            model = Model(spec, seed=config.seed, dtype=dtype, device=device)
            if not sparse:
                model = calibrate(model, data[0], data[1] if classes else None)
            model = scale_last_layer(model)
        fit(model, data, config, validation=validation)
    return model


def _rows(values: Any, rows: Any, sparse: bool) -> Any:
    """Return some rows of an array as a tensor, of sparse rows and their targets as they are."""
    return values[rows] if sparse else torch.from_numpy(np.ascontiguousarray(values[rows]))
