"""Memory and time of a hypernet on one wide layer: 784 -> 64, Taylor of degree 2 (D = 615,440), n × D = 39.4 million weights.

Formed, the output matrix alone has n × D × length entries; it is made block by block, in the forward and again in the backward
pass. Peak memory is the larger of what torch's allocator hands out and of what the process grows by, as the system counts it.

Run: python benchmarks/hypernet.py
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
from measure import Report, Step, Table, Target, interleaved, memory, number, options, progress, saved

import kapsi as kp

MIB = 2**20
BATCH = 64
TARGET_MIB = 1024


def most_memory() -> float:
    """Return the most memory that this process had so far, in MiB."""
    # Kilobytes, on a Mac bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / MIB


def main() -> None:
    length = {"type": int, "default": 16, "help": "parameters of the hypernet (default 16)"}
    chosen = options(__doc__ or "", rounds=3, length=length)
    report = Report("hypernet", chosen)
    progress("hypernet")
    head = kp.Head(784, 64, kp.HeadSpec(kp.Taylor(2), kp.HyperNet(length=chosen.length)), seed=0)
    x = torch.randn(BATCH, 784, generator=torch.Generator().manual_seed(0))
    step = Step(lambda: head(x).square().mean(), head.parameters())
    before = most_memory()
    times = interleaved({"hypernet": step}, chosen.rounds)
    # The process has its peak behind it where making the layer took more than a step does.
    peak = max(most_memory() - before, memory(step).peak / MIB)
    dense = 64 * head.factors[0] * head.factors[1] * chosen.length * 4 / MIB
    row: dict[str, Any] = {
        "length": chosen.length,
        "ms": times.milliseconds("hypernet"),
        "kept MiB": saved(step.loss, head.parameters()) / MIB,
        "peak MiB": peak,
        "dense MiB": dense,
    }
    report.figures.append(row)
    header = ["parameters", "ms", "kept for the backward pass", "peak of a step", "output matrix, dense"]
    cells = [str(chosen.length), *(number(value) for value in row.values() if isinstance(value, float))]
    report.tables.append(Table("Forward + backward in ms; MiB.", header, [cells]))
    case = f"hypernet of {chosen.length} parameters, 784 → 64: peak memory"
    report.targets.append(Target(case, TARGET_MIB, peak, " MiB", most=True))
    report.finish()


if __name__ == "__main__":
    main()
