"""Memory and time of a hypernet on one wide layer: 784 -> 64, Taylor of degree 2 (D = 615,440), n x D = 39.4 million weights.

Formed, the output matrix alone has n x D x length entries. Run: python benchmarks/hypernet.py
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import torch

import kapsi as kp

TARGET_MIB = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    head = kp.Head(784, 64, kp.HeadSpec(kp.Taylor(2), kp.HyperNet(length=arguments.length)), seed=0)
    x = torch.randn(64, 784, generator=torch.Generator().manual_seed(0))
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward, backward = [], []
    for _ in range(arguments.rounds):
        head.zero_grad()
        kept.clear()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = head(x)
        middle = time.perf_counter()
        y.square().sum().backward()
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    columns = head.factors[0] * head.factors[1]
    formed = 64 * columns * arguments.length * 4 / 2**30
    result = {
        "length": arguments.length,
        "threads": arguments.threads,
        "forward_s": round(statistics.median(forward), 3),
        "backward_s": round(statistics.median(backward), 3),
        "kept_elements": sum(kept),
        "peak_growth_mib": round(grown, 1),
        "formed_matrix_gib": round(formed, 1),
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    print(f"targets: {int(grown <= TARGET_MIB)} of 1 met (peak memory grows by at most {TARGET_MIB} MiB)")


if __name__ == "__main__":
    main()
