"""The layers of an MNIST model, 784 → 64 → 64 → 10 with Taylor of degree 2, batch 64: structured against dense.

For every reconciliation with trainable parameters, *structured* is the default of a head; *dense* materializes κ(x) and ψ(w) and
multiplies both. Parameters and outputs are equal. The whole step includes fused AdamW.

Run: python benchmarks/layers.py
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from measure import MB, Report, Step, Table, Target, interleaved, memory, number, options, progress
from torch import Tensor
from torch.nn import functional as F

import kapsi as kp

BATCH = 64
WIDTHS = (784, 64, 64, 10)
# Where the usual options are not those of the target.
CHOSEN: dict[str, kp.Reconciliation] = {"dual_low_rank_kronecker": kp.DualLowRankKronecker(rank=5)}
TIMES = {"dual_low_rank_kronecker": ("dual low-rank Kronecker 5", 1000), "low_rank": ("low rank 2", 25)}
"""Target of the first layer: name in the table, and speed-up over the dense computation."""


def trainable(inputs: int, outputs: int) -> tuple[dict[str, kp.Reconciliation], dict[str, str]]:
    """Return the reconciliations with trainable parameters in a layer, and the reasons to leave out the others."""
    chosen: dict[str, kp.Reconciliation] = {}
    reasons = {}
    for kind in kp.catalogue("reconciliation"):
        function = CHOSEN.get(kind.name, kind())
        if not isinstance(function, kp.Reconciliation):
            continue
        try:
            head = kp.Head(inputs, outputs, kp.HeadSpec(kp.Taylor(2), function), device="meta")
        except kp.SpecError as error:
            reasons[kind.name] = str(error).split(": ", 2)[-1]
            continue
        if any(True for _ in head.parameters()):
            chosen[kind.name] = function
        else:
            reasons[kind.name] = "has no trainable parameters"
    return chosen, reasons


def dense(head: kp.Head, x: Tensor) -> Tensor:
    """Return the output of a head with materialized κ(x) and ψ(w)."""
    return F.linear(head.expand(x).dense(), head.weights().dense().sum(0))


def step(head: kp.Head, x: Tensor, materialized: bool) -> Step:
    leaves = [*head.parameters(), *([x] if x.requires_grad else [])]

    def loss() -> Tensor:
        return (dense(head, x) if materialized else head(x)).square().mean()

    return Step(loss, leaves, torch.optim.AdamW(head.parameters(), lr=1e-5, fused=True))


def inputs_of(width: int, needs_gradient: bool) -> Tensor:
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(0))
    return x.requires_grad_(needs_gradient)


def main() -> None:
    chosen = options(__doc__ or "", rounds=7)
    report = Report("layers", chosen)
    table = Table(
        "Forward + backward, and the whole step with AdamW, in ms; peak memory of a step in MB; dense / structured as a ratio.",
        [
            "layer",
            "ψ",
            "parameters",
            "structured",
            "dense",
            "ratio",
            "step",
            "dense",
            "ratio",
            "MB",
            "dense",
            "ratio",
        ],
    )
    report.tables.append(table)
    left_out: dict[str, str] = {}
    for i, (inputs, outputs) in enumerate(pairwise(WIDTHS)):
        functions, reasons = trainable(inputs, outputs)
        left_out |= {name: reason for name, reason in reasons.items() if name not in left_out}
        if chosen.quick:
            functions = {name: f for name, f in functions.items() if name in TIMES}
        for name, function in functions.items():
            progress(f"layers: {inputs} to {outputs}, {name}")
            head = kp.Head(inputs, outputs, kp.HeadSpec(kp.Taylor(2), function), seed=0)
            x = inputs_of(inputs, i > 0)
            with torch.no_grad():
                torch.testing.assert_close(head(x), dense(head, x), rtol=1e-3, atol=1e-3)
            steps = {"structured": step(head, x, False), "dense": step(head, x, True)}
            peaks = {way: memory(each).peak for way, each in steps.items()}
            times = interleaved(steps, chosen.rounds, seconds=8)
            row: dict[str, Any] = {
                "layer": f"{inputs} → {outputs}",
                "reconciliation": str(function),
                "parameters": sum(p.numel() for p in head.parameters()),
                "rounds": len(times),
                **{f"{way} ms": times.milliseconds(way) for way in steps},
                "times": times.ratio("dense", "structured"),
                **{f"{way} step ms": times.milliseconds(way, whole=True) for way in steps},
                "step times": times.ratio("dense", "structured", whole=True),
                **{f"{way} MB": peak / MB for way, peak in peaks.items()},
                "memory times": peaks["dense"] / peaks["structured"],
            }
            report.figures.append(row)
            figures = [number(value) for value in row.values() if isinstance(value, float)]
            table.rows.append([row["layer"], f"`{name}`", f"{row['parameters']:,}", *figures])
            if i == 0 and name in TIMES:
                words, bound = TIMES[name]
                case = f"Taylor 2 × {words}, {inputs} → {outputs}, against dense"
                report.targets.append(Target(case, bound, row["times"]))
                if name == "dual_low_rank_kronecker":
                    share = peaks["structured"] / peaks["dense"]
                    report.targets.append(Target(f"{case}: peak memory", 1 / 50, share, most=True))
    report.notes.append("Left out: " + "; ".join(f"`{name}` {reason}" for name, reason in left_out.items()) + ".")
    symmetric(report)
    report.finish()


def symmetric(report: Report) -> None:
    """Compare the symmetric half of Taylor's columns with all of them, both with dense ψ, in the first layer."""
    progress("layers: symmetric")
    inputs, outputs = WIDTHS[:2]
    x = inputs_of(inputs, False)
    half, full = (kp.Head(inputs, outputs, kp.HeadSpec(kp.Taylor(2, symmetric=each)), seed=0) for each in (True, False))
    steps = {"symmetric": step(half, x, False), "full": step(full, x, False), "full, dense": step(full, x, True)}
    times = interleaved(steps, report.chosen.rounds, seconds=15)
    # Of the two ways to compute all columns, the one that is quicker here.
    rival = min(("full", "full, dense"), key=lambda way: times.milliseconds(way, whole=True))
    table = Table(
        f"Symmetric columns with dense ψ, {inputs} → {outputs}: ms, and MB at the peak.",
        ["columns", "D", "forward + backward", "whole step", "MB"],
    )
    for way, each in steps.items():
        columns = (half if way == "symmetric" else full).factors
        row: dict[str, Any] = {
            "columns": way,
            "D": columns[0] * columns[1],
            "ms": times.milliseconds(way),
            "step ms": times.milliseconds(way, whole=True),
            "MB": memory(each).peak / MB,
        }
        report.figures.append(row)
        table.rows.append([way, f"{row['D']:,}", number(row["ms"]), number(row["step ms"]), number(row["MB"])])
    report.tables.append(table)
    ratio = times.ratio(rival, "symmetric", whole=True)
    report.targets.append(Target("Taylor 2 symmetric × dense against full dense, whole step", 1.7, ratio))


if __name__ == "__main__":
    main()
