"""Elementary and composite functions with and without `kapsi.calibrate`, and with grids that move during training.

Models, rows and AdamW are those of `initial_values.py`. Levenberg–Marquardt: extended models of the composite functions, zero
remainder, 60 iterations, float64; an error is the test MSE at the end, in units of the function. Errors below 1e-9
count as 1e-9 in its ratios: whether a solved function ends at 1e-10 or at 1e-13 is chance. A round is a seed.

Run: python benchmarks/calibration.py [--store FILE]
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from initial_values import (
    CASES,
    EPOCHS,
    EXPANSIONS,
    QUICK_EPOCHS,
    SEEDS,
    WIDTHS,
    Builder,
    Case,
    Figures,
    Rows,
    by_rule,
    rows,
)
from measure import Report, Table, Target, number, options

import kapsi as kp
from kapsi.data.problems import FunctionProblem, problems

ITERATIONS = 60
QUICK_ITERATIONS = 3
SOLVED = 1e-9
"""Smallest error that counts in the ratios of Levenberg–Marquardt."""
MOST = 10.0
"""Ratio of the errors above which a function counts as worse."""
MOST_WORSE = 1
"""Number of such functions that is allowed."""
UPDATES = {"every": 10, "until": 40}
WAYS: Mapping[str, dict[str, Any]] = {
    "uncalibrated": {},
    "calibrated": {},
    "calibrated, grids move": {"grid_updates": UPDATES},
    "uncalibrated, grids move": {"grid_updates": UPDATES},
}
"""Options of Levenberg–Marquardt by way."""
LEVENBERG_MARQUARDT_CASES = [Case("extended", "zero")]
"""Nested models have four times as many columns and take four times as long."""


def calibrated(case: Case, widths: list[int], data: Rows, seed: int) -> kp.Model:
    """Return a model calibrated on its training rows."""
    return kp.calibrate(by_rule("smooth")(case, widths, data, seed), data.x)


BUILDERS: Mapping[str, Builder] = {"smooth": by_rule("smooth"), "calibrated": calibrated}


def errors_of_levenberg_marquardt(
    case: Case, way: str, runs: Sequence[tuple[FunctionProblem, int]], iterations: int
) -> list[float]:
    """Return the test errors of models of several functions and seeds."""
    errors = []
    for function, seed in runs:
        data = Rows(*(part.double() for part in rows(function, seed)))
        spec = kp.rpn(WIDTHS["composite"], EXPANSIONS[case.kind], kp.LowRank(1), case.remainder)
        model = kp.Model(spec, seed=seed, dtype=torch.float64)
        if way.startswith("calibrated"):
            kp.calibrate(model, data.x)
        # Few iterations have no update.
        further = WAYS[way] if iterations > UPDATES["every"] else {}
        kp.fit(model, data[:2], solver="levenberg_marquardt", epochs=iterations, **further)
        with torch.no_grad():
            errors.append(float((model(data.x_test) - data.y_test).square().mean()))
    return errors


def adamw_table(figures: Figures, report: Report, functions: Mapping[str, list[FunctionProblem]]) -> None:
    """Add the table of AdamW and the targets."""
    table = Table(
        f"AdamW: best test error of calibrated models, medians of {figures.seeds} seeds, and its ratio to that without "
        "calibration.",
        ["", "function", *(name for case in CASES for name in (str(case), "ratio"))],
    )
    ratios: dict[Case, list[float]] = {case: [] for case in CASES}
    for group, chosen in functions.items():
        for function in chosen:
            cells = [function.name, function.formula]
            for case in CASES:
                median = {
                    name: statistics.median(figures.of(case, name, group, chosen)[function.name]) for name in BUILDERS
                }
                ratio = median["calibrated"] / median["smooth"]
                ratios[case].append(ratio)
                cells += [f"{median['calibrated']:.1e}", number(ratio)]
                report.figures.append(
                    {"function": function.name, "case": str(case), "solver": "adamw", "errors": median}
                )
            table.rows.append(cells)
    report.tables.append(table)
    summary = Table(
        "AdamW: ratios to models without calibration over all functions.", ["models", "median", "largest", "above 10"]
    )
    for case, values in ratios.items():
        summary.rows.append([str(case), number(statistics.median(values)), number(max(values)), str(worse(values))])
    report.tables.append(summary)
    add_targets(report, "AdamW", [ratio for values in ratios.values() for ratio in values])


def levenberg_marquardt_table(
    figures: Figures, report: Report, chosen: Sequence[FunctionProblem], iterations: int
) -> None:
    """Add the tables of Levenberg–Marquardt and the targets."""
    table = Table(
        f"Levenberg–Marquardt, {iterations} iterations: test error, median and worst of {figures.seeds} seeds.",
        ["models", "", *WAYS],
    )
    summary = Table(
        "Levenberg–Marquardt: medians over the functions of the ratios to models without calibration, of the median seed and of "
        "the worst seed; number of functions above 10 times the error.",
        ["models", *(name for way in list(WAYS)[1:] for name in (way, "worst seed", "above 10"))],
    )
    ratios: list[float] = []
    for case in LEVENBERG_MARQUARDT_CASES:
        runs = [(function, seed) for function in chosen for seed in range(figures.seeds)]
        errors: dict[str, dict[str, list[float]]] = {}
        for way in WAYS:
            key = f"{case}, levenberg_marquardt, {way}, {iterations} iterations, {figures.seeds} seeds, {len(chosen)} functions"
            train = functools.partial(errors_of_levenberg_marquardt, case, way, runs, iterations)
            errors[way] = figures.kept(key, runs, train)
        for function in chosen:
            found = {way: errors[way][function.name] for way in WAYS}
            cells = (f"{statistics.median(values):.0e} · {max(values):.0e}" for values in found.values())
            table.rows.append([str(case), function.name, *cells])
            report.figures.append(
                {"function": function.name, "case": str(case), "solver": "levenberg_marquardt", "errors": found}
            )
        row = [str(case)]
        for way in list(WAYS)[1:]:
            of_median = [_ratio(errors, way, function.name, statistics.median) for function in chosen]
            of_worst = [_ratio(errors, way, function.name, max) for function in chosen]
            row += [number(statistics.median(of_median)), number(statistics.median(of_worst)), str(worse(of_median))]
            ratios += of_median if way == "calibrated" else []
        summary.rows.append(row)
    report.tables += [table, summary]
    add_targets(report, "Levenberg–Marquardt", ratios)


def _ratio(errors: Mapping[str, dict[str, list[float]]], way: str, name: str, of: Any) -> float:
    return float(max(of(errors[way][name]), SOLVED) / max(of(errors["uncalibrated"][name]), SOLVED))


def worse(ratios: Sequence[float]) -> int:
    """Return the number of functions with a much larger error."""
    return sum(ratio > MOST for ratio in ratios)


def add_targets(report: Report, solver: str, ratios: Sequence[float]) -> None:
    """Add the targets of a solver."""
    case = f"calibrated / uncalibrated, {solver}"
    report.targets.append(Target(f"{case}: median of the errors", 1, statistics.median(ratios), "×", most=True))
    report.targets.append(Target(f"{case}: functions above 10×", MOST_WORSE, worse(ratios), "", most=True))


def main() -> None:
    store = {"type": Path, "help": "JSON lines of errors, read and extended: a run goes on where another one ended"}
    chosen = options(__doc__ or "", rounds=SEEDS, store=store)
    report = Report("calibration", chosen)
    functions = {group: list(problems(group)) for group in WIDTHS}
    if chosen.quick:
        functions = {group: found[1:3] for group, found in functions.items()}
    figures = Figures(chosen.store, QUICK_EPOCHS if chosen.quick else EPOCHS, chosen.rounds, BUILDERS)
    adamw_table(figures, report, functions)
    levenberg_marquardt_table(figures, report, functions["composite"], QUICK_ITERATIONS if chosen.quick else ITERATIONS)
    report.finish()


if __name__ == "__main__":
    main()
