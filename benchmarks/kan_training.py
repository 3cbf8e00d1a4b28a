"""A small Kolmogorov–Arnold network trained by kapsi and by pykan: the first example of pykan's documentation.

f = exp(sin(πx) + y²) on [−1, 1]², 1,000 training and 1,000 test rows drawn by the seed, nodes 2, 5, 1, 5 intervals, cubic splines;
no penalty on either side. pykan: 50 steps of its L-BFGS with its grid updates, in float32, its default. kapsi: Levenberg–Marquardt
in float64, grids calibrated at the start, 50 steps; the time until its training loss is that of pykan counts, and the whole. Where
pykan is not installed only kapsi is run. A round is a seed.

Run: python benchmarks/kan_training.py
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
from typing import Any, NamedTuple

import torch
from measure import Report, Table, Target, number, options, progress
from torch import Tensor

import kapsi as kp
from kapsi.zoo import kan as kapsi_kan

ROWS = 1_000
SEEDS = 5
STEPS = 50
WIDTHS = (2, 5, 1)
INTERVALS = 5


class Run(NamedTuple):
    """A model trained: root mean squared errors, and seconds.

    Attributes:
        training, test: errors at the end.
        seconds: of all steps.
        reached: until the training error was that of the other one, infinite if it never was.
    """

    training: float
    test: float
    seconds: float
    reached: float


def rows(seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the training rows first."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2 * ROWS, 2, generator=generator, dtype=torch.float64) * 2 - 1
    return x, torch.exp(torch.sin(math.pi * x[:, :1]) + x[:, 1:] ** 2)


def error(prediction: Tensor, y: Tensor) -> float:
    """Return the root mean squared error."""
    return float((prediction - y).square().mean().sqrt())


def train_pykan(seed: int, steps: int) -> Run:
    """Train pykan's model."""
    kan = importlib.import_module("kan")
    x, y = (values.float() for values in rows(seed))
    data = {"train_input": x[:ROWS], "train_label": y[:ROWS], "test_input": x[ROWS:], "test_label": y[ROWS:]}
    model = kan.KAN(width=list(WIDTHS), grid=INTERVALS, k=3, seed=seed, auto_save=False)
    model.speed()  # without symbolic edges and saved activations, as pykan has it for speed
    started = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model.fit(data, opt="LBFGS", steps=steps)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        made = model(x)
    return Run(error(made[:ROWS], y[:ROWS]), error(made[ROWS:], y[ROWS:]), seconds, math.inf)


def train_kapsi(seed: int, steps: int, goal: float) -> Run:
    """Train kapsi's model, and see when its training error is below a goal."""
    x, y = rows(seed)
    started = time.perf_counter()
    model = kp.Model(kapsi_kan.spec(WIDTHS, INTERVALS), seed=seed, dtype=torch.float64)
    kp.calibrate(model, x[:ROWS])
    before = time.perf_counter() - started
    config = kp.TrainConfig(loss=kp.MSE(), solver=kp.LevenbergMarquardt(), epochs=steps, smoothness=0.0)
    records = kp.fit(model, (x[:ROWS], y[:ROWS]), config)
    seconds = time.perf_counter() - started
    reached = next((before + each.seconds for each in records if each.loss <= goal**2), math.inf)
    with torch.no_grad():
        made = model(x)
    return Run(error(made[:ROWS], y[:ROWS]), error(made[ROWS:], y[ROWS:]), seconds, reached)


def main() -> None:
    chosen = options(__doc__ or "", rounds=SEEDS)
    report = Report("kan_training", chosen)
    steps = 5 if chosen.quick else STEPS
    has_pykan = importlib.util.find_spec("kan") is not None
    columns = ["training", "test", "s"]
    header = ["seed", *(f"kapsi, {name}" for name in columns), "kapsi, s to pykan's training error"]
    table = Table(
        f"Root mean squared errors after {steps} steps, and seconds.",
        [*header, *(f"pykan, {name}" for name in columns)] if has_pykan else header[:-1],
    )
    runs: list[tuple[Run, Run]] = []
    for seed in range(chosen.rounds):
        progress(f"kan_training: seed {seed}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pykan's
            other = train_pykan(seed, steps) if has_pykan else Run(math.nan, math.nan, math.nan, math.nan)
        ours = train_kapsi(seed, steps, other.training)
        runs.append((ours, other))
        cells = [f"{ours.training:.2e}", f"{ours.test:.2e}", number(ours.seconds)]
        if has_pykan:
            cells += [number(ours.reached), f"{other.training:.2e}", f"{other.test:.2e}", number(other.seconds)]
        table.rows.append([str(seed), *cells])
        figures: dict[str, Any] = {"seed": seed, "kapsi": ours._asdict()}
        report.figures.append({**figures, "pykan": other._asdict()} if has_pykan else figures)
    report.tables.append(table)
    if has_pykan:
        losses = statistics.median(other.training / ours.training for ours, other in runs)
        times = statistics.median(other.seconds / ours.reached for ours, other in runs)
        whole = statistics.median(other.seconds / ours.seconds for ours, other in runs)
        case = f"KAN 2, 5, 1, {steps} steps, against pykan"
        report.targets.append(Target(f"{case}: training error", 1, losses))
        report.targets.append(Target(f"{case}: time to its training error", 1, times))
        report.targets.append(Target(f"{case}: time of all steps", 1, whole))
    else:
        report.notes.append("pykan is not installed, so nothing is compared.")
    report.finish()


if __name__ == "__main__":
    main()
