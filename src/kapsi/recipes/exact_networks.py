"""Networks of a few units that are exact for products of powers, sums of logarithms and waves, tried before larger ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kapsi.function import coerce
from kapsi.modules import Model
from kapsi.process import Process
from kapsi.recipes.function_search import TRAINING, FunctionCandidate
from kapsi.recipes.trials import Trial, TrialRows
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

__all__ = ["exact_trial"]

EXACT = 1e-16
"""Mean squared error of the held-out rows, relative to the variance of the targets, of an exact network."""

FAR = 1e-4
"""The same error of a start after which no other one of the same form is tried."""

GAPS = 0.1, 0.01, 0.5
"""Starts of the least argument of a logarithm, in ranges of its input."""

EPOCHS = 60
"""Iterations of Levenberg–Marquardt; twenty are usual for an exact network."""

WAVES = 200
"""Frequencies of the start of a wave that are compared, up to half a wave between neighboring rows."""


def exact_trial(rows: TrialRows, held_out: TrialRows) -> Trial | None:
    """Return a network whose error on held-out rows is that of rounding; None if there is none.

    Products of powers: y = a Π (cᵢ·x + dᵢ)^pᵢ + b with as many factors as inputs, as layers of logarithms and of an exponential,
    c from the unit vectors, p from 0, a of either sign; their logarithms, y = Σ pᵢ log(cᵢ·x + dᵢ) + b. Waves of one input:
    y = a sin(ωx + φ) + b, ω from the largest part of the spectrum.

    Args:
        rows: rows of the fits.
        held_out: rows of the comparison.

    Example:
        >>> x = 1 + 4 * torch.rand(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> rows = TrialRows(x, x[:, :1] / x[:, 1:].sqrt())
        >>> exact_trial(rows.subset(torch.arange(80)), rows.subset(torch.arange(80, 100))).candidate.name
        'powers'
    """
    scale, far = float(rows.y.var(0).mean()), set()
    for trial in _starts(rows):
        if trial.candidate.name in far:
            continue
        trial.train(rows, trial.candidate.config, held_out)
        if trial.error <= EXACT * scale < math.inf:
            return trial
        if trial.error > FAR * scale:
            far.add(trial.candidate.name)
    return None


def _starts(rows: TrialRows) -> Iterator[Trial]:
    """Yield networks with their first values."""
    x, y = rows.x, rows.y
    inputs, outputs = x.shape[1], y.shape[1]
    low, high = x.aminmax(dim=0)
    width = (high - low).clamp_min(1e-12)
    for number, gap in enumerate(GAPS):
        first = (1 / width).diag(), gap - low / width
        second = x.new_zeros(1, inputs), x.new_zeros(1)
        for name, sign in (("powers", 1), ("negative powers", -1)):  # no path leads from one sign of a to the other
            yield _trial(name, number, (inputs, inputs, 1, outputs), ("log", "exp"), [first, second], y, sign)
        yield _trial("logarithms", number, (inputs, inputs, outputs), ("log",), [first], y)
    if inputs == 1:
        yield _trial("wave", 0, (1, 1, outputs), ("sine",), [_wave(x[:, 0], y)], y)


def _wave(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the frequency of the sine and cosine with the least squared error, `(1, 1)`, and the phase of the first target."""
    length = max(float(x.max() - x.min()), 1e-12)
    frequencies = torch.linspace(0.5, max(1.0, len(x) / 4), WAVES, dtype=x.dtype) * (2 * math.pi / length)
    angles = frequencies[:, None] * x
    columns = torch.stack([angles.sin(), angles.cos(), torch.ones_like(angles)], 2)
    solution = torch.linalg.lstsq(columns, y.expand(WAVES, *y.shape)).solution
    best = int((columns @ solution - y).square().sum((1, 2)).argmin())
    sine, cosine = solution[best, 0, 0], solution[best, 1, 0]
    return frequencies[best].reshape(1, 1), torch.atan2(cosine, sine).reshape(1)


def _trial(
    name: str,
    number: int,
    widths: tuple[int, ...],
    processes: tuple[str, ...],
    values: list[tuple[Tensor, Tensor]],
    y: Tensor,
    sign: int = 1,
) -> Trial:
    """Return a network of linear layers, each but the last followed by a process, with values of ψ and bias."""
    layers = [LayerSpec((HeadSpec(bias=True),), output=(coerce(Process, each, name),)) for each in processes]
    spec = ModelSpec(widths, (*layers, LayerSpec((HeadSpec(bias=True),))))
    candidate = FunctionCandidate(name=name, model=spec, training=replace(TRAINING, epochs=EPOCHS))
    model = Model(spec, seed=number, dtype=torch.float64)
    last = sign * y.std(0)[:, None].expand(-1, widths[-2]), y.mean(0)
    with torch.no_grad():
        for layer, (matrix, bias) in zip(model.check_layers(name), (*values, last), strict=True):
            head = layer.check_heads(name)[0]
            head.psi["matrix"].copy_(matrix)
            head.bias.copy_(bias)
    return Trial(candidate, number, number, model)
