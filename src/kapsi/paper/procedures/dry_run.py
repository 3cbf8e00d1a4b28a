"""Errors of the engine about a model and a training, found with made-up rows before data are loaded."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kapsi.errors import DataError, SpecError
from kapsi.modules import Model
from kapsi.paper.procedures.sparse_kan import SparseKAN
from kapsi.spec import ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train

ROWS = 12


def dry_run(
    spec: ModelSpec,
    config: TrainConfig,
    where: str,
    *,
    classes: int | None = None,
    sparse: bool = False,
    sparse_kan: bool = False,
) -> None:
    """Raise a `SpecError` if a model cannot be trained with a configuration.

    Args:
        spec: model specification without null widths.
        config: training options.
        where: prefix of the message.
        classes: number of classes of the targets, None for regression.
        sparse: use sparse inputs.
        sparse_kan: wrap the model in `SparseKAN`.
    """
    problem = _problem(spec, replace(config, epochs=1), classes, sparse, sparse_kan)
    if problem is not None:
        raise SpecError(f"{where}: {problem}")


@functools.lru_cache(maxsize=4096)
def _problem(spec: ModelSpec, config: TrainConfig, classes: int | None, sparse: bool, sparse_kan: bool) -> str | None:
    """Return the error message, None without an error."""
    dtype = torch.float32 if classes else torch.float64
    try:
        model: nn.Module = Model(spec, seed=0, dtype=dtype)
        if sparse_kan:
            model = SparseKAN(model)  # type: ignore[arg-type]
        x = torch.rand(ROWS, spec.resolved()[0][0], generator=torch.Generator().manual_seed(0), dtype=dtype)
        if sparse:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # sparse CSR tensors are in beta
                x = (x * (x > 0.5)).to_sparse_csr()
        numbers = torch.arange(ROWS)
        y = numbers % classes if classes and spec.widths[-1] != 1 else numbers.to(x.dtype).unsqueeze(1)
        steps = train(model, (x, y), config)
        if sparse:  # some functions and solvers refuse sparse inputs only in the first step
            next(steps)
    except (SpecError, DataError) as error:
        return str(error)
    return None


NO_EFFECT = {"seed": "is the seed of the run; set the seeds of the experiment instead"}
"""Training options set elsewhere in an experiment."""


def refuse(options: Any, where: str, **others: str) -> None:
    """Refuse training options that have no effect.

    Args:
        options: plain data.
        where: prefix of the message.
        others: further names with the reason.

    Raises:
        SpecError: an option that has no effect is set.
    """
    for name, reason in {**NO_EFFECT, **others}.items():
        if isinstance(options, Mapping) and name in options:
            raise SpecError(f"{where}.{name}: {reason}")
