"""Standardization of a model by its training rows, and warnings of their scale."""

from __future__ import annotations

import torch
from torch import nn

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.standardize import Moments, is_standardized, standardize, warn_of_scale, warn_of_targets
from kapsi.training.losses import Loss
from kapsi.training.prediction import rows_at_a_time
from kapsi.training.resolve import Resolved
from kapsi.training.rows.base import Rows

CALIBRATION_ROWS = 2**16
"""Largest number of rows that set the grids."""

SCALE_ROWS = 1_000
"""Rows compared with the range of κ."""


def standardize_model(model: nn.Module, rows: Rows, loss: Loss) -> None:
    """Add affine layers to a model by its training rows and calibrate it, in place; a standardized model stays as it is.

    Outputs are scaled for losses that compare real targets with the outputs.

    Raises:
        SpecError: not a kapsi model, or sparse inputs.
    """
    if not isinstance(model, Model) or rows.sparse:
        problem = "sparse inputs are not shifted" if isinstance(model, Model) else "the model is no kapsi.Model"
        raise SpecError(f"fit(standardize=True): {problem}; scale the inputs, and leave standardize out")
    if is_standardized(model):
        return
    size = rows_at_a_time(model)
    real = not loss.classes and not loss.discrete and loss.outputs_per_target == 1
    targets = None
    if real:
        targets = Moments.of((batch.y for batch in rows.chunks(size)), skip_missing=loss.skips_missing)
    standardize(model, Moments.of(batch.x for batch in rows.chunks(size)), targets)
    first = next(iter(rows.chunks(CALIBRATION_ROWS)))
    with torch.no_grad():
        calibrate(model, first.x, first.y)


def check_scale(model: Model, rows: Rows, chosen: Resolved, where: str) -> None:
    """Warn of inputs and targets on an unsuitable scale; rows that are not in memory are not read."""
    if not rows.in_memory:
        return
    batch = next(iter(rows.chunks(SCALE_ROWS)))
    warn_of_scale(model, [batch.x], where)
    if not chosen.loss.classes and not chosen.solver.scale_invariant:
        warn_of_targets(batch.y, where)
