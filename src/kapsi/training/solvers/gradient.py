"""First-order and quasi-Newton solvers: AdamW and SGD in mini-batches, L-BFGS on all rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError
from kapsi.features import Features
from kapsi.modules import Head, Layer, Model
from kapsi.training.data import Batch
from kapsi.training.prediction import outputs_of, widest
from kapsi.training.solvers.base import NotFinite, Report, Solver, State, Task

__all__ = ["LBFGS", "SGD", "AdamW", "pack", "seeded", "unpack"]

LARGEST_KEPT = 2**26
"""Elements of the largest stored κ(x) of a full-batch fit, and of the largest chunk of a forward pass."""

WARM_UP = 10
"""The decay of averaged weights is at most (1 + t) / (10 + t) after t steps."""

LEAST_SCALE = 2.0**-14
"""Smallest scale of the float16 loss; repeated overflows below it have another cause."""


def seeded(devices: list[int], *parts: int) -> None:
    """Seed the generators of torch for one step, identified by numbers; the caller restores their state."""
    seed = 0
    for part in parts:
        seed = (seed * 0x9E3779B97F4A7C15 + part + 0x632BE59BD9B4E019) & 0x7FFFFFFFFFFFFFFF
    torch.default_generator.manual_seed(seed)
    for device in devices:
        torch.cuda.default_generators[device].manual_seed(seed)


def pack(value: Any, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """Return nested dictionaries and lists as plain data for JSON; move tensors to `tensors`, with their paths as keys."""
    if isinstance(value, Tensor):
        tensors[prefix] = value
        return {"tensor": prefix}
    if isinstance(value, dict):
        return {
            "items": [
                [key, pack(item, tensors, f"{prefix}.{key}" if prefix else str(key))] for key, item in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        return {"list": [pack(item, tensors, f"{prefix}.{i}") for i, item in enumerate(value)]}
    return value


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the inverse of `pack`; tuples become lists."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "list" in value:
        return [unpack(item, tensors) for item in value["list"]]
    return {key: unpack(item, tensors) for key, item in value["items"]}


class _MiniBatch(Solver):
    """Optimizer steps on mini-batches."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config = task.config
        self.parameters = task.parameters()
        self.devices = sorted({p.device.index for p in self.parameters if p.device.type == "cuda"})
        self.device = self.parameters[0].device.type
        self.optimizer = self.make()
        self.size = config.batch_size
        self.taken = 0  # steps since the beginning
        self.epoch = 1  # the one at hand
        length = self.length()
        self.planned = None if length is None else config.epochs * length
        if config.schedule in ("cosine", "one_cycle") and self.planned is None:
            raise SpecError(
                f"fit: the schedule {config.schedule} needs the number of steps, which a stream does not tell; "
                "take constant or exponential"
            )
        kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        self.kind = kinds.get(config.precision)
        if self.kind is not None and self.parameters[0].dtype != torch.float32:
            raise SpecError(
                f"fit: precision {config.precision} is for models in float32, this one has {self.parameters[0].dtype}; leave it out"
            )
        self.scaler = torch.amp.GradScaler(self.device) if config.precision == "float16" else None
        self.average = None if config.averaging is None else [p.detach().clone() for p in self.parameters]
        self.total = 0.0
        self.found = torch.zeros((), device=self.parameters[0].device)
        self.one = torch.ones((), device=self.parameters[0].device)
        self.rows = 0
        self.rate = config.learning_rate

    def make(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        raise NotImplementedError

    def length(self) -> int | None:
        return self.task.rows.length(self.size)

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        config, planned = self.task.config, self.planned or 1
        peak = config.learning_rate
        if config.schedule == "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * step / planned))
        if config.schedule == "one_cycle" and planned > 3:
            up = 0.3 * planned - 1
            if step < up:
                return _between(peak / 25, peak, step / up)
            return _between(peak, peak / 25e4, (step - up) / (planned - 1 - up))
        if config.schedule == "exponential":
            return peak * config.decay ** (self.epoch - 1)
        return peak

    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        task = self.task
        group, seed = task.group, task.config.seed
        task.model.train()
        self.epoch = epoch
        if start == 0:
            self.total, self.rows = 0.0, 0
        with torch.random.fork_rng(self.devices):
            # Each step has its own seed, so a resumed run draws the same numbers.
            seeded(self.devices, seed, epoch, 0, 0)
            batches = task.rows.batches(
                self.size, seed=seed, epoch=epoch, start=start, rank=group.rank, ranks=group.size
            )
            for step in range(start + 1, 2**62):
                seeded(self.devices, seed, epoch, step, group.rank)
                batch = next(batches, None)
                if batch is None:
                    return
                self._step(batch)
                yield

    def _step(self, batch: Batch) -> None:
        task, config = self.task, self.task.config
        self.rate = rate = self._rate(self.taken)
        for options in self.optimizer.param_groups:
            options["lr"] = rate
        self.optimizer.zero_grad()
        value = self._pass(batch)
        if task.penalties.any:
            self._penalize()
        self._update(batch, value)
        self.total += value * batch.count / task.group.size
        self.rows += batch.count
        self.taken += 1
        if self.average is not None:
            decay = min(cast(float, config.averaging), self.taken / (WARM_UP + self.taken - 1))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    def _pass(self, batch: Batch) -> float:
        """Set the gradients of the mean loss of a batch, and return the loss."""
        if self.task.config.accumulate == 1:
            return float(self._backward(batch))
        parts = _parts(batch, self.task.config.accumulate)
        value = 0.0
        for i, part in enumerate(parts):
            with self.task.group.accumulating(self.task.call, i < len(parts) - 1):
                value += float(self._backward(part))
        return value

    def _backward(self, part: Batch) -> Tensor:
        """Add the contribution of some rows to the gradient of the mean loss, and return their loss."""
        task = self.task
        if self.kind is None:
            output = outputs_of(task.call, task.model, part.x, "fit")
        else:
            with torch.autocast(self.device, self.kind):
                output = outputs_of(task.call, task.model, part.x, "fit").to(self.parameters[0].dtype)
        if part.weight is None and part.count == len(part.y):
            loss = task.loss.mean(output, part.y)
        else:
            losses = task.loss.rows(output, part.y)
            if part.weight is not None:
                losses = losses * part.weight
            # Gradients of several processes are averaged, hence the factor.
            loss = losses.sum() * (task.group.size / part.count)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def _penalize(self) -> None:
        penalties = self.task.penalties
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        penalties.apply_gradient()
        rest = penalties.rest_value()
        if rest is not None:
            rest.backward()

    def _update(self, batch: Batch, value: float) -> None:
        """Take the step; raise `NotFinite` for a non-finite loss or gradient."""
        clip, group = self.task.config.clip, self.task.group
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.scaler is not None:
            if not self.task.penalties.any:
                self.scaler.unscale_(self.optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(self.parameters, clip)
            self.scaler.step(self.optimizer)  # skipped after an overflow
            self.scaler.update()
            if not math.isfinite(value) or self.scaler.get_scale() < LEAST_SCALE:
                raise NotFinite("loss" if not math.isfinite(value) else "gradient", batch)
            return
        norm = None if clip is None and not group.sharded else group.norm(gradients)
        # Losses differ between processes, gradients do not.
        finite = math.isfinite(float(norm)) if norm is not None else self._are_finite(gradients)
        if not finite or (group.size == 1 and not math.isfinite(value)):
            raise NotFinite("gradient" if math.isfinite(value) else "loss", batch)
        if clip is not None and norm is not None:
            torch._foreach_mul_(gradients, (clip / (norm + 1e-12)).clamp(max=1.0))
        self.optimizer.step()

    def _are_finite(self, gradients: list[Tensor]) -> bool:
        """Return whether all gradients are finite, by the check of torch's loss scaling: 4 µs for 6 tensors, norms take 25."""
        self.found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found, self.one)
        return not float(self.found)

    def report(self) -> Report:
        group = self.task.group
        total = float(group.sum(torch.tensor(self.total, dtype=torch.float64))) if group.size > 1 else self.total
        loss = total / max(1, self.rows)
        return Report(loss, learning_rate=self.rate)

    def state(self) -> State:
        tensors: dict[str, Tensor] = {}
        whole = self.task.group.whole
        plain = {
            "optimizer": pack(self.optimizer.state_dict(), tensors, "optimizer"),
            "scaler": None if self.scaler is None else pack(self.scaler.state_dict(), tensors, "scaler"),
            "taken": self.taken,
            "rows": self.rows,
            "rate": self.rate,
            "total": self.total,
        }
        for i, tensor in enumerate(self.average or ()):
            tensors[f"average.{i}"] = tensor
        return {name: whole(tensor) for name, tensor in tensors.items()}, plain

    def restore(self, state: State) -> None:
        tensors, plain = state
        place = self.task.group.place
        saved = unpack(plain["optimizer"], tensors)
        for i, values in saved["state"].items():
            parameter = self.parameters[int(i)]
            own = self.optimizer.state[parameter]
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    own[name] = torch.zeros_like(parameter)
                    place(own[name], value)
                else:
                    own[name] = value.clone() if isinstance(value, Tensor) else value
        if self.scaler is not None:
            self.scaler.load_state_dict(unpack(plain["scaler"], tensors))
        self.taken, self.rows, self.rate = plain["taken"], plain["rows"], plain["rate"]
        self.total = plain["total"]
        for i, tensor in enumerate(self.average or ()):
            place(tensor, tensors[f"average.{i}"])

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        if self.average is None:
            yield
            return
        current = [p.detach().clone() for p in self.parameters]
        self._put(self.average)
        try:
            yield
        except GeneratorExit:  # after the last epoch the averaged weights stay
            raise
        except BaseException:
            self._put(current)
            raise
        self._put(current)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def _between(a: float, b: float, share: float) -> float:
    return a + (b - a) * 0.5 * (1 - math.cos(math.pi * min(1.0, share)))


def _parts(batch: Batch, count: int) -> list[Batch]:
    """Split a batch in at most `count` non-empty parts of nearly equal size."""
    count = max(1, min(count, len(batch.y)))
    if count == 1:
        return [batch]
    sizes = [len(part) for part in batch.y.tensor_split(count)]
    if batch.x.layout != torch.strided:
        raise SpecError("fit: accumulate needs dense inputs; take a smaller batch_size")
    weights = [None] * count if batch.weight is None else batch.weight.split(sizes)
    pairs = zip(batch.x.split(sizes), batch.y.split(sizes), weights, strict=True)
    return [Batch(x, y, weight, batch.count) for x, y, weight in pairs]


class AdamW(_MiniBatch, name="adamw"):
    """AdamW (Loshchilov, Hutter 2019), fused where available; weight decay is 0, penalties are part of the loss."""

    def make(self) -> torch.optim.Optimizer:
        fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in self.parameters)
        return torch.optim.AdamW(
            self.parameters,
            lr=self.task.config.learning_rate,
            weight_decay=0.0,
            fused=fused and not self.task.group.sharded,
        )


class SGD(_MiniBatch, name="sgd"):
    """Stochastic gradient descent with Nesterov momentum."""

    def make(self) -> torch.optim.Optimizer:
        momentum = self.task.config.momentum
        return torch.optim.SGD(
            self.parameters, lr=self.task.config.learning_rate, momentum=momentum, nesterov=momentum > 0
        )


class LBFGS(Solver, name="lbfgs"):
    """L-BFGS on all rows with strong Wolfe line search; five iterations per epoch."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
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
        self.chunk = max(1, LARGEST_KEPT // widest(task.model))
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
        if self.last - first <= task.config.tolerance * abs(first) and math.isfinite(self.last):
            self.ended = "the loss no longer falls"
        self.last = first
        yield

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
    first = cast(Layer, model.layers[0])
    columns = sum(math.prod(cast(Head, head).factors) for head in first.heads)
    return first.fixed_features(x) if x.shape[0] * columns <= LARGEST_KEPT else None
