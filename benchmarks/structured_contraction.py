"""Time and memory of one layer, structured against formed: 784 -> 64, Taylor of degree 2, dual low-rank Kronecker of rank 5.

Both ways compute the same function with the same parameters, in one process, interleaved; medians of forward + backward.
Forming kappa(x) and psi(w) is what a library without structure does. Run: python benchmarks/structured_contraction.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kapsi as kp

TARGET_RATIO = 500
TARGET_ELEMENTS = 10**6


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def structured(head: kp.Head, x: torch.Tensor) -> torch.Tensor:
    return head(x)


def formed(head: kp.Head, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(head.expand(x).dense(), head.weights().dense().sum(0))


def step(way: Any, head: kp.Head, x: torch.Tensor) -> float:
    head.zero_grad()
    start = time.perf_counter()
    way(head, x).square().sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    # One thread: a second one makes small operations wait for each other, on a busy machine for a long time.
    parser.add_argument("--threads", type=int, default=1)
    rounds, threads = parser.parse_args().rounds, parser.parse_args().threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    head = kp.Head(784, 64, kp.HeadSpec(kp.Taylor(2), kp.DualLowRankKronecker(rank=5)), seed=0)
    x = torch.randn(64, 784)
    torch.testing.assert_close(structured(head, x), formed(head, x), rtol=1e-3, atol=1e-3)
    largest = {}
    for name, way in (("structured", structured), ("formed", formed)):
        with LargestTensor() as watch:
            way(head, x).square().sum().backward()
        largest[name] = watch.elements
    times: dict[str, list[float]] = {"structured": [], "formed": []}
    for _ in range(rounds):
        times["formed"].append(step(formed, head, x))
        times["structured"].append(statistics.median(step(structured, head, x) for _ in range(50)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["formed"] / medians["structured"]
    print("| way | forward + backward | largest tensor |")
    print("|---|---|---|")
    for name in ("formed", "structured"):
        print(f"| {name} | {medians[name] * 1e3:.2f} ms | {largest[name]:,} elements |")
    print(f"ratio {ratio:.0f} (target {TARGET_RATIO}), {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(json.dumps({"ratio": ratio, "median_seconds": medians, "largest_elements": largest, "rounds": rounds}))
    met = (ratio >= TARGET_RATIO) + (largest["structured"] <= TARGET_ELEMENTS)
    print(f"targets: {met} of 2 met")


if __name__ == "__main__":
    main()
