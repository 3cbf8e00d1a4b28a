"""One call at batch 1: layers 64 → 64 against `nn.Linear`, most of whose time is Python and the start of operations.

All have a bias. Inputs are standard normal, a third beyond the range of the splines. *With gradients* is the forward pass of
training.

Run: python benchmarks/latency.py
"""

from __future__ import annotations

import time
from typing import Any

import torch
from measure import Report, Seconds, Table, Target, interleaved, number, options, progress
from torch import Tensor, nn

import kapsi as kp

WIDTH = 64
LAYERS: dict[str, kp.HeadSpec] = {
    "identity": kp.HeadSpec(bias=True),
    "B-spline, 5 intervals": kp.HeadSpec(kp.BSpline(), bias=True),
    "B-spline, 20 intervals": kp.HeadSpec(kp.BSpline(20), bias=True),
    "Chebyshev 3": kp.HeadSpec(kp.Chebyshev(3), bias=True),
    "Taylor 2 × dual low-rank Kronecker 5": kp.HeadSpec(kp.Taylor(2), kp.DualLowRankKronecker(rank=5), bias=True),
}
BOUNDS = {"identity": 1.4, "B-spline, 5 intervals": 7.8}
"""Times of `nn.Linear` that a call may take."""


class Call:
    """One forward pass that times itself.

    Args:
        module: the module called.
        x: its inputs.
        gradients: whether the graph of gradients is built.
    """

    def __init__(self, module: nn.Module, x: Tensor, gradients: bool) -> None:
        self.module, self.x, self.gradients = module, x, gradients

    def __call__(self) -> Seconds:
        with torch.set_grad_enabled(self.gradients):
            start = time.perf_counter()
            self.module(self.x)
            taken = time.perf_counter() - start
        return Seconds(taken, taken)


def main() -> None:
    chosen = options(__doc__ or "", rounds=101)
    report = Report("latency", chosen)
    table = Table(
        "One call at batch 1, 64 → 64, in µs, and in times of `nn.Linear`.",
        ["layer", "without gradients", "times", "with gradients", "times"],
    )
    specs = {name: spec for name, spec in LAYERS.items() if name in BOUNDS} if chosen.quick else LAYERS
    modules: dict[str, nn.Module] = {"`nn.Linear`": nn.Linear(WIDTH, WIDTH)}
    modules |= {name: kp.Layer(WIDTH, WIDTH, kp.LayerSpec((spec,)), seed=0) for name, spec in specs.items()}
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    rows: dict[str, dict[str, Any]] = {name: {"layer": name} for name in modules}
    for mode, gradients in (("without", False), ("with", True)):
        progress(f"latency: {mode} gradients")
        calls = {name: Call(module, x, gradients) for name, module in modules.items()}
        times = interleaved(calls, chosen.rounds, share=0.005)
        for name, row in rows.items():
            ratio = times.ratio(name, "`nn.Linear`")
            row |= {f"{mode} µs": times.milliseconds(name) * 1e3, f"{mode} times": ratio, "rounds": len(times)}
            if name in BOUNDS:
                case = f"{name} 64 → 64, batch 1, {mode} gradients, against nn.Linear"
                report.targets.append(Target(case, BOUNDS[name], ratio, most=True))
    report.figures += rows.values()
    for name, row in rows.items():
        table.rows.append([name, *(number(value) for value in row.values() if isinstance(value, float))])
    report.tables.append(table)
    report.finish()


if __name__ == "__main__":
    main()
