"""Kolmogorov–Arnold networks with the defaults of kapsi and of pykan: errors on new rows.

sin(πx) sinh(πy)/sinh(π) on [−1, 1]², and xy/z² on [1, 5]³; nodes m, 5, 1, cubic splines with 8 intervals, 400 training rows and
1,000 test rows, float32. kapsi: `kp.calibrate`, then `kp.fit` with 100 epochs of its default solver, Levenberg–Marquardt, and in
another column with `smoothness=0`. pykan: `fit` with 30 steps of its L-BFGS, grid updates included. An error is the root mean
squared error over the standard deviation of the test targets. Without pykan, only kapsi is run. A round is a seed.

Run: python benchmarks/kan_errors.py
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from measure import Report, Table, Target, number, options, progress
from torch import Tensor

import kapsi as kp

ROWS, TEST_ROWS = 400, 1_000
SEEDS = 5
NODES = 5
INTERVALS = 8
EPOCHS, STEPS = 100, 30


def sinh(x: Tensor) -> Tensor:
    """Return the product of a sine of the first input and a hyperbolic sine of the second."""
    return torch.sin(math.pi * x[:, :1]) * torch.sinh(math.pi * x[:, 1:]) / math.sinh(math.pi)


def quotient(x: Tensor) -> Tensor:
    """Return the product of two inputs over the square of the third."""
    return x[:, :1] * x[:, 1:2] / x[:, 2:].square()


FUNCTIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], int, float, float]] = {
    "sin(πx) sinh(πy)/sinh(π)": (sinh, 2, -1.0, 1.0),
    "xy/z²": (quotient, 3, 1.0, 5.0),
}
"""Functions, with the number of inputs and their range."""


def rows(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the training rows first."""
    function, inputs, low, high = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(1_000 + seed)
    x = torch.rand(ROWS + TEST_ROWS, inputs, generator=generator, dtype=torch.float64) * (high - low) + low
    return x.float(), function(x).float()


def error(outputs: Tensor, y: Tensor) -> float:
    """Return the error on the test rows over the deviation of their targets."""
    return float((outputs - y)[ROWS:].square().mean().sqrt() / y[ROWS:].std())


def train_kapsi(name: str, seed: int, epochs: int, **further: Any) -> float:
    """Train the network of README and return its error."""
    x, y = rows(name, seed)
    base = kp.LinearRemainder(before="silu")  # type: ignore[arg-type]
    spec = kp.rpn((x.shape[1], NODES, 1), kp.BSpline(intervals=INTERVALS), remainder=base)
    model = kp.calibrate(kp.Model(spec, seed=seed), x[:ROWS])
    kp.fit(model, (x[:ROWS], y[:ROWS]), epochs=epochs, **further)
    with torch.no_grad():
        return error(model(x), y)


def train_pykan(name: str, seed: int, steps: int) -> float:
    """Train pykan's network and return its error."""
    kan = importlib.import_module("kan")
    x, y = rows(name, seed)
    data = {"train_input": x[:ROWS], "train_label": y[:ROWS], "test_input": x[ROWS:], "test_label": y[ROWS:]}
    model = kan.KAN(width=[x.shape[1], NODES, 1], grid=INTERVALS, k=3, seed=seed, auto_save=False)
    model.speed()  # without symbolic edges and saved activations, as pykan has it for speed
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        warnings.simplefilter("ignore")
        model.fit(data, opt="LBFGS", steps=steps)
    with torch.no_grad():
        return error(model(x), y)


def methods(quick: bool) -> dict[str, Callable[[str, int], float]]:
    """Return the functions that train and return an error, by the name of the column."""
    epochs, steps = (5, 2) if quick else (EPOCHS, STEPS)
    trained: dict[str, Callable[[str, int], float]] = {
        "kapsi": lambda name, seed: train_kapsi(name, seed, epochs),
        "kapsi, smoothness=0": lambda name, seed: train_kapsi(name, seed, epochs, smoothness=0.0),
    }
    if importlib.util.find_spec("kan") is not None:
        trained["pykan"] = lambda name, seed: train_pykan(name, seed, steps)
    return trained


def main() -> None:
    chosen = options(__doc__ or "", rounds=SEEDS)
    report = Report("kan_errors", chosen)
    trained = methods(chosen.quick)
    header = [f"{method}, {which}" for method in trained for which in ("median", "worst")]
    table = Table(
        "Root mean squared error over the deviation of the targets; s for all seeds.",
        ["function", *header, *(f"{m}, s" for m in trained)],
    )
    for name in FUNCTIONS:
        found: dict[str, tuple[float, float]] = {}
        seconds = []
        for method, train in trained.items():
            progress(f"kan_errors: {name}, {method}")
            started = time.perf_counter()
            errors = [train(name, seed) for seed in range(chosen.rounds)]
            seconds.append(number(time.perf_counter() - started))
            found[method] = statistics.median(errors), max(errors)
            report.figures.append({"function": name, "method": method, "errors": errors})
        table.rows.append([name, *(f"{value:.1e}" for pair in found.values() for value in pair), *seconds])
        if "pykan" in found:
            for which, ours, theirs in zip(("median", "worst seed"), found["kapsi"], found["pykan"], strict=True):
                report.targets.append(Target(f"KAN, {name}, {which}: error over pykan's", 1, ours / theirs, most=True))
    report.tables.append(table)
    if "pykan" not in trained:
        report.notes.append("pykan is not installed, so nothing is compared.")
    report.finish()


if __name__ == "__main__":
    main()
