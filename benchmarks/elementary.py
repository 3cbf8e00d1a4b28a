"""Elementary functions of two variables: how far down Levenberg–Marquardt takes the model of 47 parameters of the paper.

1,000 training and 1,000 test rows uniform in the range, drawn by the seed; widths 2, 2, 1, B-splines and Taylor, low rank 1, zero
remainder. One recipe for all functions. What counts is the test error at the last iterate, the median over seeds; nothing is chosen
by the test rows. A round is a seed.

Run: python benchmarks/elementary.py
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from measure import Report, Table, Target, options, progress
from torch import Tensor

import kapsi as kp
from kapsi.data.problems import FunctionProblem, problems
from kapsi.paper.expected import load_expected
from kapsi.paper.experiment import load_shipped

ROWS = 1_000
SEEDS = 5
FIRST_SEED = 100
"""Those below were looked at when the recipe was made."""
RECIPE = kp.TrainConfig(loss=kp.MSE(), solver=kp.LevenbergMarquardt(restarts=8, tolerance=0.01), epochs=100)
FACTOR = 100.0
"""How many times below the figure of the paper the error has to be."""


class Case(NamedTuple):
    """A function of x + y, and the mean test MSE of the paper's RPN with extended expansions."""

    problem: FunctionProblem
    paper: float


def _cases() -> dict[str, Case]:
    printed = load_expected(load_shipped("elementary"))
    found = {}
    for problem in problems("elementary"):
        paper = printed.rows[problem.name]["rpn_ext"].mean
        if paper is None:
            raise RuntimeError(f"{problem.name}: the paper's figure is missing")
        found[problem.name] = Case(problem, paper)
    return found


CASES = _cases()


def rows(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the training rows first."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    share = torch.rand(2 * ROWS, 2, generator=generator, dtype=torch.float64)
    low, high = (
        torch.tensor([getattr(v, end) for v in case.problem.variables], dtype=torch.float64) for end in ("low", "high")
    )
    x = low + (high - low) * share
    return x, torch.from_numpy(case.problem.values(x.numpy())).unsqueeze(1)


def build(x: Tensor, seed: int) -> kp.Model:
    """Return the model of the paper, its first layer's range that of the training inputs."""
    expansion = kp.Extended((kp.BSpline(intervals=5, degree=3), kp.Taylor(2)))
    spec = kp.rpn([2, 2, 1], expansion=expansion, reconciliation=kp.LowRank(1), remainder=kp.ZeroRemainder())
    model = kp.Model(spec, seed=seed, dtype=torch.float64)
    if sum(p.numel() for p in model.parameters()) != 47:
        raise RuntimeError("the model must have the 47 parameters of the paper")
    return kp.calibrate(model, x)


def errors(case: Case, seed: int) -> tuple[float, float, int]:
    """Return mean squared errors on training and test rows, in the unit of the function, and the number of iterations."""
    x, y = rows(case, seed)
    mean, deviation = y[:ROWS].mean(), y[:ROWS].std()
    model = build(x[:ROWS], seed)
    records = kp.fit(model, (x[:ROWS], (y[:ROWS] - mean) / deviation), RECIPE, seed=seed)
    with torch.no_grad():
        squares = (model(x) * deviation + mean - y).square()
    return float(squares[:ROWS].mean()), float(squares[ROWS:].mean()), len(records)


def main() -> None:
    chosen = options(__doc__ or "", rounds=SEEDS)
    report = Report("elementary", chosen)
    table = Table(
        f"Mean squared errors, medians of {chosen.rounds} seeds at the last iterate; the range of the test error over seeds; "
        "seconds of all seeds.",
        ["", "function", "range", "paper", "training", "test", "lowest", "highest", "paper / test", "iterations", "s"],
    )
    reached = 0
    seeds = range(FIRST_SEED, FIRST_SEED + chosen.rounds)
    cases = dict(list(CASES.items())[3:6]) if chosen.quick else CASES
    slowest = 0.0
    for name, case in cases.items():
        progress(f"elementary: {name}")
        started = time.perf_counter()
        training, test, iterations = zip(*(errors(case, seed) for seed in seeds), strict=True)
        seconds = time.perf_counter() - started
        slowest = max(slowest, seconds)
        median = statistics.median(test)
        reached += median * FACTOR <= case.paper
        figures = [case.paper, statistics.median(training), median, min(test), max(test)]
        table.rows.append(
            [
                name,
                case.problem.formula,
                f"[{case.problem.variables[0].low:g}, {case.problem.variables[0].high:g}]",
                *(f"{figure:.2e}" for figure in figures),
                f"{case.paper / median:,.0f}",
                f"{statistics.median(iterations):g}",
                f"{seconds:.1f}",
            ]
        )
        report.figures.append(
            {"case": name, "paper": case.paper, "training": training, "test": test, "seconds": seconds}
        )
    wanted = 3 if chosen.quick else 14
    report.targets.append(
        Target(f"functions at least {FACTOR:g} times below the paper, of {len(cases)}", wanted, float(reached), "")
    )
    report.targets.append(Target(f"{chosen.rounds} seeds of a function, the slowest", 15, slowest, " s", most=True))
    report.tables.append(table)
    report.notes.append(
        "1/(x + y) on [0, 1]² has a squared error without expectation: its test error is that of the few rows nearest to the pole, "
        "nearer than any training row. The paper gives the best epoch by the test rows; here it is the last one."
    )
    report.finish()


if __name__ == "__main__":
    main()
