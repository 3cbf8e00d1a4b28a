"""Standardization of a model by its training rows, and warnings of their scale."""

from __future__ import annotations

import torch
from torch import nn

from kapsi.errors import SpecError
from kapsi.hooks import hooked_inputs
from kapsi.modules import Model
from kapsi.standardize import (
    Moments,
    calibrate_by_class,
    standardize,
    warn_of_rounding,
    warn_of_scale,
    warn_of_targets,
)
from kapsi.training.losses import Loss
from kapsi.training.prediction import rows_at_a_time
from kapsi.training.resolve import Resolved
from kapsi.training.rows.base import Rows
from kapsi.training.rows.stored import StoredRows

CALIBRATION_ROWS = 2**16
"""Largest number of rows that set the grids."""

SCALE_ROWS = 1_000
"""Rows compared with the range of κ."""


def standardize_model(model: nn.Module, rows: Rows, loss: Loss) -> None:
    """Add affine layers to a model by its training rows and calibrate it, in place; a standardized model stays as it is.

    Outputs are scaled as the loss states (`Loss.output_units`).

    Raises:
        SpecError: not a kapsi model, or sparse inputs.
    """
    if not isinstance(model, Model) or rows.sparse:
        problem = "sparse inputs are not shifted" if isinstance(model, Model) else "the model is no kapsi.Model"
        raise SpecError(f"fit(standardize=True): {problem}; scale the inputs, and leave standardize out")
    if model.standardized:
        return
    size = rows_at_a_time(model)
    units = None
    if not loss.classes and not loss.discrete:
        targets = Moments.of((batch.y for batch in rows.chunks(size)), skip_missing=loss.skips_missing)
        units = loss.output_units(targets.mean, targets.deviation)
    standardize(model, Moments.of(hooked_inputs(model, batch.x) for batch in rows.chunks(size)), units)
    first = next(iter(rows.chunks(CALIBRATION_ROWS)))
    with torch.no_grad():
        calibrate_by_class(model, first.x, first.y)


def check_rounding(rows: Rows, dtype: torch.dtype, *, shifted: bool, classes: bool) -> None:
    """Warn of inputs and targets that the type of the model rounds; of rows that can be read in any order, before `bind`.

    Args:
        rows: the rows.
        dtype: type of the model.
        shifted: whether the model shifts inputs in their own type.
        classes: whether targets are class labels.
    """
    if not isinstance(rows, StoredRows):
        return
    x, y = rows.spaced(SCALE_ROWS)
    double = "use a model in float64 (dtype=torch.float64)"
    if not shifted:
        warn_of_rounding(x, dtype, "inputs", f"use standardize=True, which shifts in float64, or {double}", "fit")
    if not classes:
        warn_of_rounding(y, dtype, "targets", f"{double}, or subtract an offset", "fit")


def check_scale(model: Model, rows: Rows, chosen: Resolved, where: str) -> None:
    """Warn of inputs and targets on an unsuitable scale; rows that are not in memory are not read."""
    if not rows.in_memory:
        return
    batch = next(iter(rows.chunks(SCALE_ROWS)))
    warn_of_scale(model, [batch.x], where)
    if not chosen.loss.classes and not chosen.solver.scale_invariant:
        warn_of_targets(batch.y, where)
