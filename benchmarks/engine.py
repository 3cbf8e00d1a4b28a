"""What the training engine costs over a loop written by hand: seconds a step of AdamW at batch 256, 64-wide models.

The loop draws a permutation, takes rows, and does zero_grad, forward, loss, backward, step, and adds up the loss; the engine does
that and looks whether loss and gradient are finite, counts, and sets the learning rate. Both train the same model on the same
rows in one process, an epoch of each in turn; the ratio is the median over epochs.

Run: python benchmarks/engine.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from measure import Report, Table, Target, number, options, progress
from torch import Tensor
from torch.nn import functional as F

import kapsi as kp

WIDTH = 64
BATCH = 256
ROWS = 25_600
CLASSES = 10

MODELS = {
    "MLP, 64 → 64 → 64 → 10": kp.rpn([WIDTH, 64, 64, CLASSES], bias=True, output="relu"),
    "Taylor 2 × dual low-rank Kronecker 5": kp.rpn([WIDTH, 64, CLASSES], kp.Taylor(2), kp.DualLowRankKronecker(rank=5)),
    "B-spline × dense": kp.rpn([WIDTH, 64, CLASSES], kp.BSpline(5)),
}


def by_hand(model: kp.Model, x: Tensor, y: Tensor) -> Iterator[float]:
    """Train by hand, and yield the mean loss of each epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    model.train()
    while True:
        total = 0.0
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        yield total / len(x)


def main() -> None:
    chosen = options(__doc__ or "", rounds=15)
    report = Report("engine", chosen)
    table = Table("A step in ms, the median over epochs of 100 steps.", ["model", "by hand", "kp.train", "times"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    config = kp.TrainConfig(
        loss=kp.CrossEntropy(),
        solver=kp.AdamW(learning_rate=0.001, schedule="constant", batch_size=BATCH),
        epochs=10**6,
    )
    for name, spec in MODELS.items():
        progress(f"engine: {name}")
        records = kp.train(kp.Model(spec, seed=0), (x, y), config)
        loops: dict[str, Callable[[], object]] = {
            "by hand": by_hand(kp.Model(spec, seed=0), x, y).__next__,
            "kp.train": records.__next__,
        }
        times: dict[str, list[float]] = {way: [] for way in loops}
        for i in range(chosen.rounds + 1):
            for way in list(loops)[:: -1 if i % 2 else 1]:
                begun = time.perf_counter()
                loops[way]()
                times[way].append(time.perf_counter() - begun)
        steps = ROWS // BATCH
        # The first epoch finds caches empty.
        hand, engine = (times[way][1:] for way in loops)
        ratio = statistics.median(a / b for a, b in zip(engine, hand, strict=True))
        row = {
            "model": name,
            "by hand ms": statistics.median(hand) / steps * 1e3,
            "kp.train ms": statistics.median(engine) / steps * 1e3,
            "times": ratio,
        }
        report.figures.append(row)
        table.rows.append([name, *(number(value) for value in row.values() if isinstance(value, float))])
        report.targets.append(Target(f"kp.train against a loop by hand, {name}, batch {BATCH}", 1.05, ratio, most=True))
    report.tables.append(table)
    report.finish()


if __name__ == "__main__":
    main()
