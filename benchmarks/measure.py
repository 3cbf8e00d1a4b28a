"""What the benchmarks share: training steps in interleaved rounds, memory, targets, tables, and files of results.

**Time.** All ways of a case run in one process, in rounds: each round runs every way for about the same short time, every
second round in reverse order, and a figure is the median over rounds of the medians of a round. A ratio is the median of the
ratios of the rounds, so that what a busy machine does to one round is done to both sides of it.

**Memory.** What torch's allocator hands out and takes back during one training step is followed by torch's profiler: the peak
is the largest sum at any time. Parameters and inputs are there before and do not count; gradients, which the step makes, do,
except in the figure that says so. Temporary arrays inside of an operation count too; buffers of the BLAS library do not.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# The profiler would write a line at every start and end.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kapsi.files import atomic, finite, write_json

MB = 10**6
SLICE = 0.02
"""Seconds that one way runs in one round, where it is quick enough to run more than once."""
MOST_REPEATS = 50
FEWEST_ROUNDS = 3


# ------------------------------------------------------------------------------------------------ options


def options(text: str, rounds: int, **further: Any) -> argparse.Namespace:
    """Return the options that all benchmarks have, and set the number of threads.

    Args:
        text: the docstring of the benchmark.
        rounds: how many rounds there are by default; with `--quick` there are 3.
        **further: arguments of `add_argument` by name, for options of one benchmark.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=_positive, help=f"interleaved rounds (default {rounds})")
    parser.add_argument("--threads", type=_positive, default=2, help="threads of torch (default 2)")
    parser.add_argument("--quick", action="store_true", help="few rounds of a part of the cases, to see that it works")
    parser.add_argument("--json", type=Path, help="write tables, figures and targets to this file")
    for name, given in further.items():
        parser.add_argument(f"--{name}", **given)
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (3 if chosen.quick else rounds)
    torch.set_num_threads(chosen.threads)
    return chosen


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def progress(text: str) -> None:
    """Show what is being measured, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ time


class Seconds(NamedTuple):
    """What one training step took.

    Attributes:
        pass_: forward and backward pass.
        step: the whole step: gradients dropped, both passes, the optimizer.
    """

    pass_: float
    step: float


class Step:
    """A training step that times itself.

    Args:
        loss: the forward pass, to a single number.
        leaves: parameters, and inputs that get a gradient.
        optimizer: what updates the parameters, if anything does.
    """

    def __init__(
        self, loss: Callable[[], Tensor], leaves: Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.loss, self.leaves, self.optimizer = loss, list(leaves), optimizer

    def forget(self) -> None:
        """Drop all gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def __call__(self) -> Seconds:
        start = time.perf_counter()
        self.forget()
        cleared = time.perf_counter()
        self.loss().backward()
        done = time.perf_counter()
        if self.optimizer is not None:
            self.optimizer.step()
        return Seconds(done - cleared, time.perf_counter() - start)


@dataclass
class Rounds:
    """Times of several ways in interleaved rounds, in seconds."""

    pass_: dict[str, list[float]]
    step: dict[str, list[float]]

    def __len__(self) -> int:
        return len(next(iter(self.pass_.values())))

    def milliseconds(self, way: str, whole: bool = False) -> float:
        """Return the median of one way, of forward and backward, or of the whole step."""
        return statistics.median((self.step if whole else self.pass_)[way]) * 1e3

    def ratio(self, slow: str, fast: str, whole: bool = False) -> float:
        """Return how many times as long `slow` takes as `fast`: the median of the ratios of the rounds."""
        times = self.step if whole else self.pass_
        return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def interleaved(
    steps: Mapping[str, Callable[[], Seconds]], rounds: int, *, seconds: float = math.inf, share: float = SLICE
) -> Rounds:
    """Run all ways in rounds and return their times.

    Args:
        steps: what to run, by name.
        rounds: how many rounds.
        seconds: no further round begins after this time, but there are at least 3, or as many as asked for.
        share: seconds that each way runs in each round, if it is quick enough to run more than once.
    """
    repeats = {}
    for name, step in steps.items():
        taken = step().step
        if taken < 1:  # the first step makes what later ones find there; a long one is not worth another
            taken = step().step
        repeats[name] = max(1, min(MOST_REPEATS, int(share / taken)))
    made = Rounds({name: [] for name in steps}, {name: [] for name in steps})
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for i in range(rounds):
            for name in list(steps)[:: -1 if i % 2 else 1]:
                taken_each = [steps[name]() for _ in range(repeats[name])]
                made.pass_[name].append(statistics.median(each.pass_ for each in taken_each))
                made.step[name].append(statistics.median(each.step for each in taken_each))
            if i + 1 >= FEWEST_ROUNDS and time.perf_counter() - start > seconds:
                break
    finally:
        if collecting:
            gc.enable()
    return made


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of growth: the slope of the line through log(value) over log(size) by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


# ------------------------------------------------------------------------------------------------ memory


class Memory(NamedTuple):
    """Bytes of one training step.

    Attributes:
        peak: most bytes at one time of all that the step makes.
        beyond: the same without the gradients that it leaves.
    """

    peak: int
    beyond: int


def memory(step: Step) -> Memory:
    """Return what one step, its forward and backward pass, takes from torch's allocator."""
    step.forget()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step.loss().backward()
    left = {leaf.grad.untyped_storage().data_ptr() for leaf in step.leaves if leaf.grad is not None}
    step.forget()
    changes = _changes(watched)
    # An address is given again and again; the gradient is what has it at the end.
    last = {address: i for i, (address, size) in enumerate(changes) if size > 0}
    gradients = {last[address] for address in left if address in last}
    return Memory(_peak(changes), _peak([change for i, change in enumerate(changes) if i not in gradients]))


def _changes(watched: profile) -> list[tuple[int, int]]:
    """Return the allocations, bytes positive, and releases, negative, as (address, bytes) in their order."""
    kinds: Any = torch._C._profiler._EventType
    waiting = list(watched.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    found = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == kinds.Allocation:
            found.append((event.start_time_ns, event.typed[1]))
    return [(each.ptr, each.alloc_size) for _, each in sorted(found, key=lambda item: item[0])]


def _peak(changes: Iterable[tuple[int, int]]) -> int:
    live: dict[int, int] = {}
    now = peak = 0
    for address, size in changes:
        if size > 0:
            live[address] = size
            now += size
            peak = max(peak, now)
        else:
            now -= live.pop(address, 0)  # what was there before is not of the step
    return peak


def saved(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Return the bytes that are kept for the backward pass: distinct storages, without those of parameters."""
    kept: list[Tensor] = []  # held, so that no address comes twice

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = loss()
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    del result
    return sum(size for address, size in sizes.items() if address not in known)


# ------------------------------------------------------------------------------------------------ results


def number(value: float) -> str:
    """Return a number with three digits or all before the point: 3,050, 12.3, 0.045."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


@dataclass(frozen=True)
class Target:
    """A bound and the figure that it is for.

    Args:
        case: what is compared.
        bound: what the figure has to reach.
        figure: what was measured.
        unit: written behind both.
        most: whether the bound is the largest allowed value instead of the smallest.
    """

    case: str
    bound: float
    figure: float
    unit: str = "×"
    most: bool = False

    @property
    def met(self) -> bool:
        """Return whether the figure, as measured and not as shown, is within the bound; what is not a number is not."""
        return self.figure <= self.bound if self.most else self.figure >= self.bound

    def row(self) -> list[str]:
        """Return the cells of the table of targets."""
        # A figure close to the bound is shown with the digits that tell them apart.
        near = self.bound and abs(self.figure / self.bound - 1) < 0.01
        figure = f"{self.figure:,.5g}" if near else number(self.figure)
        bound = f"{'≤' if self.most else '≥'} {self.bound:,g}{self.unit}"
        return [self.case, bound, figure + self.unit, "yes" if self.met else "no"]


@dataclass(frozen=True)
class Table:
    """A table with a line above it."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the title and the table as Markdown."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.header))
        return "\n".join([*([self.title, ""] if self.title else []), *lines])


@dataclass
class Report:
    """What a benchmark found.

    Args:
        name: of the benchmark.
        chosen: its options.
    """

    name: str
    chosen: argparse.Namespace
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def finish(self) -> None:
        """Print everything, and write the file if one was asked for."""
        progress("")
        print(body(self.conditions(), self.tables, self.notes))
        print()
        print(target_table(self.targets).markdown())
        if self.chosen.json:
            write(self.chosen.json, self.data())
        print(summary(self.targets))

    def conditions(self) -> str:
        """Return under what conditions the figures were taken."""
        threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
        machine = f"{os.cpu_count()} cores ({platform.machine()})"
        quick = ", a quick run of a part of the cases" if self.chosen.quick else ""
        return f"PyTorch {torch.__version__}, {threads} on {machine}, at most {self.chosen.rounds} rounds{quick}."

    def data(self) -> dict[str, Any]:
        """Return everything as JSON knows it."""
        return {
            "name": self.name,
            "quick": self.chosen.quick,
            "conditions": self.conditions(),
            "tables": [asdict(table) for table in self.tables],
            "notes": self.notes,
            "targets": [{**asdict(target), "met": target.met} for target in self.targets],
            "figures": self.figures,
        }


def body(conditions: str, tables: Iterable[Table], notes: Iterable[str]) -> str:
    """Return the results of a benchmark as Markdown, without its targets."""
    return "\n\n".join([conditions, *(table.markdown() for table in tables), *notes])


def target_table(targets: Iterable[Target]) -> Table:
    """Return the table of all targets."""
    return Table("", ["case", "target", "figure", "met"], [target.row() for target in targets])


def summary(targets: Sequence[Target]) -> str:
    """Return the last line of a benchmark."""
    return f"targets: {sum(target.met for target in targets)} of {len(targets)} met"


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write results atomically; NaN and infinities become null."""
    with atomic(path) as file:
        write_json(file, finite(data))
