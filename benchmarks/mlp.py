"""An RPN that is an MLP beside the same `nn.Sequential`: a whole step of SGD, eager, batch 256.

Identity, dense ψ with a bias, ReLU after every layer but the last; three layers of equal width. Same values, same outputs.

Run: python benchmarks/mlp.py
"""

from __future__ import annotations

import torch
from measure import MB, Report, Step, Table, Target, interleaved, memory, number, options, progress
from torch import Tensor, nn
from torch.nn import functional as F

import kapsi as kp

WIDTHS = (64, 256, 512)
BATCH = 256
LAYERS = 3


def pair(width: int) -> tuple[kp.Model, nn.Sequential]:
    """Return the same network twice, with the same values."""
    model = kp.Model(kp.rpn([width] * (LAYERS + 1), bias=True, output="relu"), seed=0)
    modules: list[nn.Module] = []
    for i, layer in enumerate(model.layers):
        linear = nn.Linear(width, width)
        (head,) = layer.get_submodule("heads").children()
        with torch.no_grad():
            linear.weight.copy_(head.get_parameter("psi.matrix"))
            linear.bias.copy_(head.get_parameter("bias"))
        modules += [linear, nn.ReLU()] if i + 1 < LAYERS else [linear]
    return model, nn.Sequential(*modules)


def step(module: nn.Module, x: Tensor, labels: Tensor) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    return Step(lambda: F.cross_entropy(module(x), labels), module.parameters(), optimizer)


def main() -> None:
    chosen = options(__doc__ or "", rounds=150)
    report = Report("mlp", chosen)
    table = Table(
        "A whole step in ms, forward + backward in ms, and the peak of a step in MB; kapsi / torch in times.",
        ["width", "kapsi", "torch", "times", "passes", "torch", "times", "MB", "torch"],
    )
    for width in WIDTHS:
        progress(f"mlp: {width}")
        model, sequential = pair(width)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(BATCH, width, generator=generator)
        labels = torch.randint(width, (BATCH,), generator=generator)
        torch.testing.assert_close(model(x), sequential(x))
        steps = {"kapsi": step(model, x, labels), "torch": step(sequential, x, labels)}
        peaks = {way: memory(each).peak / MB for way, each in steps.items()}
        # Little in a round and many rounds: the two differ by less than a busy machine changes in a second.
        times = interleaved(steps, chosen.rounds, share=0.01)
        row = {
            "width": width,
            "rounds": len(times),
            **{f"{way} step ms": times.milliseconds(way, whole=True) for way in steps},
            "step times": times.ratio("kapsi", "torch", whole=True),
            **{f"{way} ms": times.milliseconds(way) for way in steps},
            "times": times.ratio("kapsi", "torch"),
            **{f"{way} MB": peak for way, peak in peaks.items()},
        }
        report.figures.append(row)
        table.rows.append([str(width), *(number(value) for value in row.values() if isinstance(value, float))])
        bound = 1.05 if width >= 256 else 1.3
        case = f"RPN as MLP against nn.Sequential, width {width}, batch {BATCH}"
        report.targets.append(Target(case, bound, row["step times"], most=True))
    report.tables.append(table)
    report.finish()


if __name__ == "__main__":
    main()
