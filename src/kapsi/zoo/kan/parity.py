"""Parity cases of Kolmogorov–Arnold networks with pykan."""

from __future__ import annotations

import contextlib
import importlib
import random
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.zoo.base import Case, Comparison, deviation, sizes
from kapsi.zoo.kan.convert import from_pykan


@contextlib.contextmanager
def _importing_pykan() -> Iterator[Any]:
    """Import pykan; restore the global random states changed by its models."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield importlib.import_module("kan")
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _hello_world(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of f = exp(sin(πx) + y²) on [−1, 1]², pykan's first example."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 2, generator=generator, dtype=torch.float64) * 2 - 1
    return x, torch.exp(torch.sin(torch.pi * x[:, :1]) + x[:, 1:] ** 2)


@torch.no_grad()
def _compare(seed: int, *, trained: bool) -> Comparison:
    x, y = _hello_world(200, seed)
    with _importing_pykan() as kan:
        theirs = kan.KAN(width=[2, 5, 1], grid=5, k=3, seed=seed, auto_save=False).double()
        if trained:
            theirs.update_grid_from_samples(1.5 * x)  # uneven knots, different for each input
            for number in range(theirs.depth):
                theirs.node_scale[number].uniform_(0.5, 2)
                theirs.subnode_bias[number].uniform_(-0.3, 0.3)
                theirs.act_fun[number].scale_sp.mul_(3)
            theirs.act_fun[0].mask[1, 2] = 0
        inputs = torch.cat((x, 4 * x))  # also beyond the knots
        expected = theirs(inputs)
    model = from_pykan(theirs)
    names = ("grid", "coef", "scale_base", "scale_sp", "mask")
    count = sum(getattr(layer, name).numel() for layer in theirs.act_fun for name in names)
    affine = ("node_scale", "node_bias", "subnode_scale", "subnode_bias")
    count += sum(tensor.numel() for name in affine for tensor in getattr(theirs, name))
    return Comparison(deviation(model(inputs), expected), sizes(model), count, model, x, y, "mse")


PARITY: tuple[Case, ...] = tuple(
    Case(name, "outputs", "exp(sin(πx) + y²)", "pykan", 1e-9, partial(_compare, trained=trained))
    for name, trained in (("KAN [2, 5, 1]", False), ("KAN [2, 5, 1], grid updated, affine, masked", True))
)
