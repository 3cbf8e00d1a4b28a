"""What the engine says of a model and its training before the first step, asked before there are data."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.spec import ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train

__all__ = ["refuse", "rehearse"]

ROWS = 12


def rehearse(
    spec: ModelSpec,
    config: TrainConfig,
    where: str,
    *,
    classes: int | None = None,
    sparse: bool = False,
    sparse_kan: bool = False,
) -> None:
    """Raise a `SpecError` where a model could not be trained so: a few rows are made up for it.

    Args:
        spec: with all widths.
        config: of the training.
        where: begins the message.
        classes: number of classes of the targets, None for numbers.
        sparse: whether inputs are sparse.
        sparse_kan: whether the model is put into `SparseKAN`.
    """
    message = _refusal(spec, replace(config, epochs=1), classes, sparse, sparse_kan)
    if message is not None:
        raise SpecError(f"{where}: {message}")


@functools.lru_cache(maxsize=4096)
def _refusal(spec: ModelSpec, config: TrainConfig, classes: int | None, sparse: bool, sparse_kan: bool) -> str | None:
    try:
        made: nn.Module = Model(spec, seed=0, dtype=torch.float32 if classes else torch.float64)
        if sparse_kan:
            from kapsi.paper.procedures.sparse_kan import SparseKAN

            made = SparseKAN(made)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float32 if classes else torch.float64
        x = torch.rand(ROWS, spec.resolved()[0][0], generator=generator, dtype=dtype)
        if sparse:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that sparse CSR is a beta, said once
                x = (x * (x > 0.5)).to_sparse_csr()
        numbers = torch.arange(ROWS)
        y = numbers % classes if classes and spec.widths[-1] != 1 else numbers.to(x.dtype).unsqueeze(1)
        run = train(made, (x, y), config)
        if sparse:  # which some functions and solvers tell when they get them
            next(run)
    except SpecError as error:
        return str(error)
    return None


NO_EFFECT = {
    "seed": "is that of the run; set the seeds of the experiment instead",
    "stopping": "is for kapsi fit; rows to stop on are those that the procedure holds out",
    "validation": "is for kapsi fit; rows to choose on are those that the procedure holds out",
}
"""Options of a training that a procedure has in another place, and where."""


def refuse(given: Any, where: str, **others: str) -> None:
    """Refuse options of a training that would have no effect.

    Args:
        given: options as they are written.
        where: begins the message.
        others: further names, and what is said of them.

    Raises:
        SpecError: there is one.
    """
    for name, reason in {**NO_EFFECT, **others}.items():
        if isinstance(given, Mapping) and name in given:
            raise SpecError(f"{where}.{name}: {reason}")
