"""A spline layer with its base branch (a KAN layer), forward + backward, beside other ways to compute it.

- efficient: all functions by the recursion of Cox and de Boor on all knots, then two products (the method of efficient-kan).
- fast: a layer norm and Gaussian bumps in place of splines, then two products (the method of fast-kan; another function).
- inkan: the package inkan, with its local evaluation, where it is installed (pip install inkan).
- floor: one product on features that are there already, with their gradient: what no way of computing them can beat.

All in one process, interleaved, medians over rounds. Run: python benchmarks/kan_layers.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kapsi as kp

SIZES = ((64, 64), (256, 256), (784, 64))
INTERVALS = (5, 20, 50)
BATCHES = (256, 1024)
DEGREE = 3


class Efficient(nn.Module):
    """Cubic splines on extended uniform knots by the recursion over all of them."""

    def __init__(self, inputs: int, outputs: int, intervals: int) -> None:
        super().__init__()
        knots = torch.arange(-DEGREE, intervals + DEGREE + 1) * (2 / intervals) - 1
        self.register_buffer("knots", knots.expand(inputs, -1).contiguous())
        self.base = nn.Parameter(torch.randn(outputs, inputs) * 0.1)
        self.spline = nn.Parameter(torch.randn(outputs, inputs * (intervals + DEGREE)) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        t, v = self.knots, x.unsqueeze(-1)
        basis = ((v >= t[:, :-1]) & (v < t[:, 1:])).to(x.dtype)
        for k in range(1, DEGREE + 1):
            left = (v - t[:, : -(k + 1)]) / (t[:, k:-1] - t[:, : -(k + 1)]) * basis[:, :, :-1]
            basis = left + (t[:, k + 1 :] - v) / (t[:, k + 1 :] - t[:, 1:-k]) * basis[:, :, 1:]
        return F.linear(F.silu(x), self.base) + F.linear(basis.flatten(1), self.spline)


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

    def forward(self, x: Tensor) -> Tensor:
        z = (self.norm(x).unsqueeze(-1) - self.centers) / self.width
        return self.bumps(torch.exp(-(z**2)).flatten(1)) + self.base(F.silu(x))


class Floor(nn.Module):
    """One product on ready features."""

    def __init__(self, batch: int, inputs: int, outputs: int, intervals: int) -> None:
        super().__init__()
        columns = inputs * (intervals + DEGREE + 1)
        self.features = nn.Parameter(torch.randn(batch, columns))
        self.weights = nn.Parameter(torch.randn(outputs, columns) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.features, self.weights)


def ways(batch: int, inputs: int, outputs: int, intervals: int) -> dict[str, nn.Module]:
    spec = kp.HeadSpec(kp.BSpline(intervals, DEGREE), kp.Dense(), kp.LinearRemainder(before="silu"))
    made: dict[str, nn.Module] = {
        "kapsi": kp.Head(inputs, outputs, spec, seed=0),
        "efficient": Efficient(inputs, outputs, intervals),
        "fast": Fast(inputs, outputs, intervals),
        "floor": Floor(batch, inputs, outputs, intervals),
    }
    try:
        from inkan import KANLayer
    except ImportError:
        return made
    return {**made, "inkan": KANLayer(inputs, outputs, grid_size=intervals, compile_basis=False)}


def step(module: nn.Module, x: Tensor) -> Callable[[], float]:
    def run() -> float:
        module.zero_grad()
        x.grad = None
        start = time.perf_counter()
        module(x).sum().backward()
        return time.perf_counter() - start

    return run


def measure(batch: int, inputs: int, outputs: int, intervals: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(batch, inputs, generator=generator) * 2 - 1).requires_grad_()
    steps = {name: step(module, x) for name, module in ways(batch, inputs, outputs, intervals).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(2):
        for run in steps.values():
            run()
    for _ in range(rounds):
        for name, run in steps.items():
            times[name].append(run())
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return {"layer": f"{inputs} to {outputs}", "intervals": intervals, "batch": batch, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [
        measure(batch, inputs, outputs, intervals, arguments.rounds)
        for inputs, outputs in SIZES
        for intervals in INTERVALS
        for batch in BATCHES
    ]
    names = [name for name in rows[0] if name not in ("layer", "intervals", "batch")]
    print("| layer | intervals | batch | " + " | ".join(f"{name} ms" for name in names) + " | met |")
    print("|" + "---|" * (len(names) + 4))
    met = total = 0
    for row in rows:
        kapsi = row["kapsi"]
        targets = [row["efficient"] / kapsi >= 3]
        if "inkan" in row:
            targets.append(row["inkan"] / kapsi >= (1.3 if row["layer"] == "64 to 64" else 1.0))
        if row["layer"] == "256 to 256":
            targets.append(kapsi / row["floor"] <= 1.5)
        met, total = met + sum(targets), total + len(targets)
        cells = [row["layer"], str(row["intervals"]), str(row["batch"]), *(f"{row[name]:.2f}" for name in names)]
        print("| " + " | ".join(cells) + f" | {sum(targets)} of {len(targets)} |")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"threads": arguments.threads, "torch": torch.__version__, "rows": rows}, file, indent=1)
    print(f"targets: {met} of {total} met")


if __name__ == "__main__":
    main()
