"""How time and memory grow: with inputs, intervals of a spline, channels and heads; forward + backward.

- Taylor of degree 2 with a dual low-rank Kronecker ψ of rank 5, batch 64, 64 outputs, in the number of inputs m: the columns of
  κ grow as m², what is computed as m. The exponent is the slope of log(time) over log(m).
- A cubic spline layer 64 -> 64, batch 256, in the number of intervals.
- The Taylor layer with 784 inputs in the number of channels, and in that of heads.

With matplotlib installed, `--picture FILE` draws the curves. Run: python benchmarks/growth.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from measure import MB, Report, Step, Table, Target, interleaved, memory, number, options, progress, slope
from torch import nn

import kapsi as kp

INPUTS = (100, 300, 1_000, 3_000, 10_000, 27_000)
TOP = 1_000
"""The range of m in which the work outweighs what every operation costs by itself begins here."""
INTERVALS = (5, 10, 20, 50, 100, 200)
COUNTS = (1, 2, 4, 8, 16)
PSI = kp.DualLowRankKronecker(rank=5)


def step(module: nn.Module, rows: int, inputs: int, needs_gradient: bool = False) -> Step:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)).requires_grad_(needs_gradient)
    leaves = [*module.parameters(), *([x] if needs_gradient else [])]
    return Step(lambda: module(x).square().mean(), leaves)


def taylor(inputs: int, channels: int = 1, heads: int = 1) -> kp.Layer:
    spec = kp.HeadSpec(kp.Taylor(2), PSI, channels=channels)
    return kp.Layer(inputs, 64, kp.LayerSpec((spec,) * heads), seed=0)


def spline(intervals: int) -> kp.Layer:
    return kp.Layer(64, 64, kp.LayerSpec((kp.HeadSpec(kp.BSpline(intervals)),)), seed=0)


def measured(report: Report, what: str, column: str, steps: dict[int, Step], rounds: int) -> list[dict[str, Any]]:
    """Measure one series, add its table, and return its figures."""
    peaks = {size: memory(each) for size, each in steps.items()}
    times = interleaved({str(size): each for size, each in steps.items()}, rounds)
    rows: list[dict[str, Any]] = [
        {
            "series": what,
            "size": size,
            "parameters": sum(leaf.numel() for leaf in each.leaves if isinstance(leaf, nn.Parameter)),
            "ms": times.milliseconds(str(size)),
            "MB": peaks[size].peak / MB,
        }
        for size, each in steps.items()
    ]
    table = Table(f"{what}: forward + backward in ms, peak of a step in MB.", [column, "parameters", "ms", "MB"])
    for row in rows:
        table.rows.append([f"{row['size']:,}", f"{row['parameters']:,}", number(row["ms"]), number(row["MB"])])
    report.tables.append(table)
    report.figures += rows
    return rows


def draw(path: Path, figures: list[dict[str, Any]]) -> str:
    """Draw all series, and return a note on it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return 'The picture needs matplotlib: pip install "kapsi[plot]".'
    series = list(dict.fromkeys(row["series"] for row in figures))
    drawing = Figure(figsize=(4 * len(series), 3.2), layout="constrained")
    for name, axis in zip(series, drawing.subplots(1, len(series)), strict=True):
        rows = [row for row in figures if row["series"] == name]
        for unit, marker in (("ms", "o"), ("MB", "s")):
            axis.loglog([row["size"] for row in rows], [row[unit] for row in rows], marker=marker, label=unit)
        axis.set_title(name.replace(", ", "\n", 1), fontsize=8)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)
    return f"The curves are drawn in {path.name}."


def main() -> None:
    picture = {"type": Path, "help": "draw the curves to this file (png, svg or pdf)"}
    chosen = options(__doc__ or "", rounds=25, picture=picture)
    report = Report("growth", chosen)
    every = 2 if chosen.quick else 1
    progress("growth: inputs")
    rows = measured(
        report,
        "Taylor 2 × dual low-rank Kronecker 5 in m, 64 outputs, batch 64",
        "m",
        {m: step(taylor(m), 64, m) for m in INPUTS[::every]},
        chosen.rounds,
    )
    for words, least in (("all m", 0), (f"m ≥ {TOP:,}", TOP)):
        part = [row for row in rows if row["size"] >= least]
        exponent = slope([row["size"] for row in part], [row["ms"] for row in part])
        case = f"growth of Taylor 2 × dual low-rank Kronecker 5 in m, exponent of time, {words}"
        report.targets.append(Target(case, 1.1, exponent, "", most=True))
    exponent = slope([row["size"] for row in rows], [row["MB"] for row in rows])
    report.notes.append(f"Peak memory grows with the power {number(exponent)} of m.")
    progress("growth: intervals")
    splines = {n: step(spline(n), 256, 64, needs_gradient=True) for n in INTERVALS[::every]}
    measured(report, "Cubic spline 64 → 64 in intervals, batch 256", "intervals", splines, chosen.rounds)
    for kind in ("channels", "heads"):
        progress(f"growth: {kind}")
        layers = {count: step(taylor(784, **{kind: count}), 64, 784) for count in COUNTS[::every]}
        words = f"Taylor 2 × dual low-rank Kronecker 5, 784 → 64, in {kind}, batch 64"
        measured(report, words, kind, layers, chosen.rounds)
    if chosen.picture:
        report.notes.append(draw(chosen.picture, report.figures))
    report.finish()


if __name__ == "__main__":
    main()
