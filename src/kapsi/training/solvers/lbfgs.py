"""L-BFGS on all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from kapsi.features import Features
from kapsi.function import option
from kapsi.grids import GridUpdate
from kapsi.hooks import has_hooks, original
from kapsi.modules import Head, Layer, Model, has_own_forward
from kapsi.training.data import Batch
from kapsi.training.distributed import Group
from kapsi.training.prediction import outputs_of, widest
from kapsi.training.solvers.base import NotFinite, Report, Solver, SolverRun, State, Task, pack, seeded, unpack

MAX_KEPT = 2**26
"""Elements of the largest stored κ(x) of a full-batch fit, and of the largest chunk of a forward pass."""


@dataclass(frozen=True)
class LBFGS(Solver, name="lbfgs"):
    """L-BFGS on all rows with strong Wolfe line search; five iterations per epoch.

    Args:
        tolerance: relative change of the loss below which training ends.
        compile: whether the model is compiled with `torch.compile` first.
    """

    tolerance: float = option(1e-9, minimum=0.0, maximum=1.0)
    compile: bool = False

    follows_grids = True
    rotation_invariant: ClassVar[bool] = True

    def start(self, task: Task) -> SolverRun:
        return LBFGSRun(task, self)

    def prepare(self, model: nn.Module, group: Group) -> Callable[..., Tensor]:
        return cast("Callable[..., Tensor]", torch.compile(model)) if self.compile else model


class LBFGSRun(SolverRun):
    """A run of L-BFGS."""

    def __init__(self, task: Task, options: LBFGS) -> None:
        super().__init__(task)
        self.options = options
        self.parameters = task.parameters()
        self.devices = sorted({p.device.index for p in self.parameters if p.device.type == "cuda"})
        self.optimizer = torch.optim.LBFGS(
            self.parameters,
            lr=1.0,
            max_iter=5,
            history_size=10,
            tolerance_grad=0.0,  # absolute tolerances do not fit losses of any scale
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )
        self.chunk = max(1, MAX_KEPT // widest(task.model))
        self.stored: list[tuple[Batch, dict[int, Features] | None]] | None = None
        count = task.rows.count
        # Each process reads the whole stream.
        self.count = sum(len(batch.y) for batch in task.rows.chunks(self.chunk)) if count is None else count
        self.last = math.inf
        self.loss = math.inf
        self.ended: str | None = None

    def _chunks(self) -> Iterator[tuple[Batch, dict[int, Features] | None]]:
        rows, group = self.task.rows, self.task.group
        if self.stored is not None:
            yield from self.stored
            return
        for batch in rows.chunks(self.chunk, rank=group.rank, ranks=group.size):
            if rows.in_memory and len(batch.y) == rows.count:
                self.stored = [(batch, fixed_features(self.task.model, batch.x))]
                yield from self.stored
            else:
                yield batch, None

    def _value(self, backward: bool) -> tuple[Tensor, Tensor]:
        """Return the loss with and without penalties over all processes; add gradients for `backward`."""
        task = self.task
        total: Tensor | None = None
        for batch, features in self._chunks():
            output = (
                outputs_of(task.call, task.model, batch.x, "fit") if features is None else task.model(batch.x, features)
            )
            losses = task.loss.rows(output, batch.y)
            if batch.weight is not None:
                losses = losses * batch.weight
            part = losses.sum() / self.count
            if backward:
                part.backward()
            total = part.detach() if total is None else total + part.detach()
        if total is None:
            total = torch.zeros((), dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        if task.group.size > 1:
            total = self._shared(total, backward)
        value = total
        if task.penalties.any:
            penalty = task.penalties.value()
            if backward:
                penalty.backward()
            value = total + penalty.detach()
        return value, total

    def _shared(self, total: Tensor, backward: bool) -> Tensor:
        """Return the loss summed over processes, and set the summed gradients."""
        group = self.task.group
        if not backward:
            return group.sum(total)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = group.sum(torch.cat([total.reshape(1), *(g.reshape(-1) for g in gradients)]))
        parts = flat[1:].split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        return flat[0]

    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        if start:
            return
        task = self.task
        task.model.train()
        with torch.random.fork_rng(self.devices):

            def closure() -> Tensor:
                # A line search needs a deterministic function.
                seeded(self.devices, task.config.seed, epoch)
                self.optimizer.zero_grad()
                return self._value(backward=True)[0]

            before = [p.detach().clone() for p in self.parameters]
            first = float(cast(Tensor, self.optimizer.step(cast(Callable[[], float], closure))))
            seeded(self.devices, task.config.seed, epoch)
            with torch.no_grad():
                self.loss = float(self._value(backward=False)[1])
        if not math.isfinite(self.loss) or not math.isfinite(first):
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self.parameters), before)
            batch, _ = next(iter(self._chunks()))
            raise NotFinite("loss", batch)
        if self.last - first <= self.options.tolerance * abs(first) and math.isfinite(self.last):
            self.ended = "the loss no longer falls"
        self.last = first
        yield

    def follow_grids(self, update: GridUpdate) -> None:
        """Drop the history, of other parameters, and the stored κ(x)."""
        self.optimizer.state.clear()
        self.stored, self.last = None, math.inf

    def report(self) -> Report:
        return Report(self.loss, ended=self.ended)

    def state(self) -> State:
        tensors: dict[str, Tensor] = {}
        plain = {"optimizer": pack(self.optimizer.state_dict(), tensors, "optimizer"), "last": self.last}
        return tensors, {**plain, "loss": self.loss, "ended": self.ended}

    def restore(self, state: State) -> None:
        tensors, plain = state
        self.optimizer.load_state_dict(unpack(plain["optimizer"], tensors))
        self.last, self.loss, self.ended = plain["last"], plain["loss"], plain["ended"]


@torch.no_grad()
def fixed_features(model: nn.Module, x: Tensor) -> dict[int, Features] | None:
    """Return κ(x) of the first layer for all rows; None if trained or too large."""
    if not isinstance(model, Model) or x.layout != torch.strided:
        return None
    first = original(model.layers[0])
    if not isinstance(first, Layer) or any(has_hooks(part) or has_own_forward(part) for part in (model, first)):
        return None
    columns = sum(math.prod(head.factors) for head in first.heads if isinstance(head, Head))
    return first.fixed_features(x) if x.shape[0] * columns <= MAX_KEPT else None
