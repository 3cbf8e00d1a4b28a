"""A spline layer with its base branch (a KAN layer), forward + backward, beside other ways to compute it.

- efficient: all functions by the recursion of Cox and de Boor on all knots, then two products (the method of efficient-kan).
- fast: a layer norm and Gaussian bumps in place of splines, then two products (the method of fast-kan; another function).
- inkan, inkan compiled: the package inkan in its local mode, where it is installed (`make bench` does), without and with its
  compiler, where there is one.
- floor: one product on features that are there already, with their gradient: what no way of computing them can beat.

Run: python benchmarks/kan_layers.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import MB, Report, Step, Table, Target, interleaved, memory, number, options, progress, saved
from torch import Tensor, nn
from torch.nn import functional as F

import kapsi as kp

SIZES = ((64, 64), (256, 256), (784, 64))
INTERVALS = (5, 20, 50)
BATCHES = (256, 1024)
DEGREE = 3
SAVED = (512, 64, 64, 50)
"""Batch, inputs, outputs and intervals of the comparison of memory."""


class Efficient(nn.Module):
    """Cubic splines on extended uniform knots by the recursion over all of them."""

    def __init__(self, inputs: int, outputs: int, intervals: int) -> None:
        super().__init__()
        knots = torch.arange(-DEGREE, intervals + DEGREE + 1) * (2 / intervals) - 1
        self.register_buffer("knots", knots.expand(inputs, -1).contiguous())
        self.base = nn.Parameter(torch.randn(outputs, inputs) * 0.1)
        self.spline = nn.Parameter(torch.randn(outputs, inputs * (intervals + DEGREE)) * 0.1)

    def functions(self, x: Tensor) -> Tensor:
        """Return all functions of each input, `(batch, inputs, intervals + degree)`."""
        t: Tensor = self.get_buffer("knots")
        v = x.unsqueeze(-1)
        basis = ((v >= t[:, :-1]) & (v < t[:, 1:])).to(x.dtype)
        for k in range(1, DEGREE + 1):
            left = (v - t[:, : -(k + 1)]) / (t[:, k:-1] - t[:, : -(k + 1)]) * basis[:, :, :-1]
            basis = left + (t[:, k + 1 :] - v) / (t[:, k + 1 :] - t[:, 1:-k]) * basis[:, :, 1:]
        return basis

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(x), self.base) + F.linear(self.functions(x).flatten(1), self.spline)


class Fast(nn.Module):
    """Gaussian bumps, as many as splines, of the normalized inputs."""

    def __init__(self, inputs: int, outputs: int, intervals: int) -> None:
        super().__init__()
        count = intervals + DEGREE
        self.norm = nn.LayerNorm(inputs)
        self.register_buffer("centers", torch.linspace(-2, 2, count))
        self.width = 4 / (count - 1)
        self.base = nn.Linear(inputs, outputs)
        self.bumps = nn.Linear(inputs * count, outputs, bias=False)

    def functions(self, x: Tensor) -> Tensor:
        """Return all bumps of each input, `(batch, inputs, intervals + degree)`."""
        z = (self.norm(x).unsqueeze(-1) - self.get_buffer("centers")) / self.width
        bumps: Tensor = torch.exp(-(z**2))
        return bumps

    def forward(self, x: Tensor) -> Tensor:
        return self.bumps(self.functions(x).flatten(1)) + self.base(F.silu(x))


class Floor(nn.Module):
    """One product on ready features."""

    def __init__(self, batch: int, inputs: int, outputs: int, intervals: int) -> None:
        super().__init__()
        columns = inputs * (intervals + DEGREE + 1)
        self.features = nn.Parameter(torch.randn(batch, columns))
        self.weights = nn.Parameter(torch.randn(outputs, columns) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.features, self.weights)


def kapsi_layer(inputs: int, outputs: int, expansion: kp.BSpline) -> kp.Head:
    base = kp.LinearRemainder(before="silu")  # type: ignore[arg-type]
    return kp.Head(inputs, outputs, kp.HeadSpec(expansion, kp.Dense(), base), seed=0)


def inkan_layer(inputs: int, outputs: int, intervals: int, compiled: bool) -> nn.Module | None:
    """Return the layer of inkan, or None where it is not installed."""
    try:
        from inkan import KANLayer  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return None
    layer: nn.Module = KANLayer(inputs, outputs, grid_size=intervals, compile_basis=compiled)
    return layer


def compiler() -> str:
    """Return why torch cannot compile, nothing if it can."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
    except Exception as error:  # whatever the compiler lacks
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return ""


def ways(batch: int, inputs: int, outputs: int, intervals: int, compiles: bool) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made: dict[str, nn.Module | None] = {
        "kapsi": kapsi_layer(inputs, outputs, kp.BSpline(intervals, DEGREE)),
        "efficient": Efficient(inputs, outputs, intervals),
        "fast": Fast(inputs, outputs, intervals),
        "inkan": inkan_layer(inputs, outputs, intervals, False),
        "inkan compiled": inkan_layer(inputs, outputs, intervals, True) if compiles else None,
        "floor": Floor(batch, inputs, outputs, intervals),
    }
    return {name: module for name, module in made.items() if module is not None}


def inputs_of(batch: int, inputs: int) -> Tensor:
    return (torch.rand(batch, inputs, generator=torch.Generator().manual_seed(0)) * 2 - 1).requires_grad_()


def step(module: Callable[[Tensor], Tensor], x: Tensor, leaves: list[Tensor]) -> Step:
    return Step(lambda: module(x).sum(), [*leaves, x])


def measure(batch: int, inputs: int, outputs: int, intervals: int, rounds: int, compiles: bool) -> dict[str, Any]:
    if compiles:
        torch._dynamo.reset()  # each size is compiled for itself, which is the quickest that inkan can be
    x = inputs_of(batch, inputs)
    modules = ways(batch, inputs, outputs, intervals, compiles)
    times = interleaved(
        {name: step(module, x, list(module.parameters())) for name, module in modules.items()}, rounds, seconds=8
    )
    return {
        "layer": f"{inputs} → {outputs}",
        "intervals": intervals,
        "batch": batch,
        "rounds": len(times),
        "ms": {name: times.milliseconds(name) for name in modules},
        # As long as kapsi, for the floor; as quick as kapsi, for the others.
        "times": {name: times.ratio(name, "kapsi") for name in modules if name not in ("kapsi", "floor")},
        "floor": times.ratio("kapsi", "floor"),
    }


def targets_of(row: dict[str, Any]) -> list[Target]:
    """Return the targets of one case."""
    case = f"spline layer {row['layer']}, {row['intervals']} intervals, batch {row['batch']:,}, against"
    bounds = {"efficient": 3.0, "inkan": 1.0, "inkan compiled": 1.0}
    if row["layer"] == "64 → 64":
        bounds |= {"inkan": 1.3, "inkan compiled": 1.3}
    found = [
        Target(f"{case} {name}", bound, row["times"][name]) for name, bound in bounds.items() if name in row["times"]
    ]
    if row["layer"] == "256 → 256":
        found.append(Target(f"{case} the floor", 1.5, row["floor"], most=True))
    return found


def saved_memory(report: Report) -> None:
    """Compare what is kept for the backward pass."""
    progress("kan_layers: memory")
    batch, inputs, outputs, intervals = SAVED
    x = inputs_of(batch, inputs)
    modules: dict[str, nn.Module | None] = {"kapsi": kapsi_layer(inputs, outputs, kp.BSpline(intervals, DEGREE))}
    try:
        again = kp.BSpline(intervals, DEGREE, checkpoint=True)
        modules["kapsi, checkpoint"] = kapsi_layer(inputs, outputs, again)
    except TypeError:
        report.notes.append("This kapsi has no `BSpline(checkpoint=True)`.")
    modules |= {
        "efficient": Efficient(inputs, outputs, intervals),
        "fast": Fast(inputs, outputs, intervals),
        "inkan": inkan_layer(inputs, outputs, intervals, False),
    }
    there = {name: module for name, module in modules.items() if module is not None}
    steps = {name: step(module, x, list(module.parameters())) for name, module in there.items()}
    times = interleaved(steps, report.chosen.rounds, seconds=8)
    table = Table(
        f"Kept for the backward pass without parameters, and the peak of a step, in MB: {inputs} → {outputs}, "
        f"{intervals} intervals, batch {batch}; ms of forward + backward.",
        ["layer", "kept", "peak", "ms"],
    )
    for name, each in steps.items():
        kept = saved(each.loss, there[name].parameters()) / MB
        row: dict[str, Any] = {
            "way": name,
            "kept MB": kept,
            "peak MB": memory(each).peak / MB,
            "ms": times.milliseconds(name),
        }
        report.figures.append(row)
        table.rows.append([name, *(number(value) for value in row.values() if isinstance(value, float))])
        if name == "kapsi, checkpoint":
            case = (
                f"kept by the spline layer with checkpoint, {intervals} intervals, {inputs} → {outputs}, batch {batch}"
            )
            report.targets.append(Target(case, 1, kept, " MB", most=True))
    report.tables.append(table)


def main() -> None:
    chosen = options(__doc__ or "", rounds=9)
    report = Report("kan_layers", chosen)
    compiles = False
    if inkan_layer(1, 1, 5, False) is None:
        report.notes.append("inkan is not installed (`make bench` installs it) and was left out.")
    else:
        reason = compiler()
        compiles = not reason
        if reason:
            report.notes.append(f"inkan was not compiled: torch finds no compiler here ({reason}).")
    rows = []
    for inputs, outputs in SIZES[: 2 if chosen.quick else None]:
        for intervals in INTERVALS[:: 2 if chosen.quick else 1]:
            for batch in BATCHES[: 1 if chosen.quick else None]:
                progress(f"kan_layers: {inputs} to {outputs}, {intervals} intervals, batch {batch}")
                rows.append(measure(batch, inputs, outputs, intervals, chosen.rounds, compiles))
    names = list(rows[0]["ms"])
    table = Table("Forward + backward in ms.", ["layer", "intervals", "batch", *names, "met"])
    for row in rows:
        targets = targets_of(row)
        met = f"{sum(target.met for target in targets)} of {len(targets)}"
        cells = [number(row["ms"][name]) for name in names]
        table.rows.append([row["layer"], str(row["intervals"]), f"{row['batch']:,}", *cells, met])
        report.targets += targets
    report.figures += rows
    report.tables.append(table)
    saved_memory(report)
    report.finish()


if __name__ == "__main__":
    main()
