"""Steps in mini-batches along the gradient, with a torch optimizer: options and loop shared by AdamW and SGD."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError, attempt
from kapsi.function import option
from kapsi.grids import GridUpdate
from kapsi.training.data import Batch
from kapsi.training.distributed import Group
from kapsi.training.prediction import outputs_of
from kapsi.training.solvers.base import NotFinite, Report, Solver, SolverRun, State, Task, pack, seeded, unpack

WARM_UP = 10
"""The decay of averaged weights is at most (1 + t) / (10 + t) after t steps."""

MIN_SCALE = 2.0**-14
"""Smallest scale of the float16 loss; repeated overflows below it have another cause."""


@dataclass(frozen=True)
class MiniBatch(Solver):
    """Base of solvers with a torch optimizer; a subclass must define `optimizer`.

    Args:
        learning_rate: maximum learning rate.
        schedule: learning rate schedule, one of `cosine` (to zero), `constant`, `exponential` and `one_cycle` (up for 30% of the
            steps, then down to nearly zero).
        gamma: factor of the learning rate per epoch, for `exponential`.
        batch_size: rows per step over all processes; None for all rows.
        gradient_accumulation: number of forward passes per batch; more use less memory.
        max_grad_norm: maximum norm of the gradient; longer gradients are scaled down. None for no limit.
        ema_decay: decay per step of an exponential moving average of the weights, used for evaluation and kept at the end;
            None for no average.
        precision: `full`, or the dtype of matrix products, `bfloat16` or `float16` (with loss scaling); weights keep their dtype.
        compile: whether the model is compiled with `torch.compile` first.
    """

    learning_rate: float = option(0.005, minimum=1e-12, maximum=1e6)
    schedule: Literal["cosine", "constant", "exponential", "one_cycle"] = "cosine"
    gamma: float = option(0.98, minimum=1e-6, maximum=1.0)
    batch_size: int | None = option(256, minimum=1, maximum=2**40)
    gradient_accumulation: int = option(1, minimum=1, maximum=2**20)
    max_grad_norm: float | None = option(None, minimum=1e-12)
    ema_decay: float | None = option(None, minimum=0.0, maximum=0.999999)
    precision: Literal["full", "bfloat16", "float16"] = "full"
    compile: bool = False

    follows_grids = True
    mini_batch: ClassVar[bool] = True
    distributed: ClassVar[bool] = True

    def check(self) -> None:
        if self.gamma != type(self).gamma and self.schedule != "exponential":
            raise SpecError(
                f"{type(self).__name__}(gamma={self.gamma}): is for schedule exponential, the schedule is {self.schedule}; "
                "leave gamma out"
            )

    @abstractmethod
    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of the parameters; its learning rate is set before each step."""

    def start(self, task: Task) -> SolverRun:
        return MiniBatchRun(task, self)

    def prepare(self, model: nn.Module, group: Group) -> Callable[..., Tensor]:
        call = group.wrap(model)
        return cast("Callable[..., Tensor]", torch.compile(call)) if self.compile else call

    def schedules_epochs(self) -> bool:
        return self.schedule in ("cosine", "one_cycle")


class MiniBatchRun(SolverRun):
    """Optimizer steps on mini-batches."""

    def __init__(self, task: Task, options: MiniBatch) -> None:
        super().__init__(task)
        self.options = options
        self.parameters = task.parameters()
        self.devices = sorted({p.device.index for p in self.parameters if p.device.type == "cuda"})
        self.device = self.parameters[0].device.type
        self.optimizer = attempt(f"{options.name}.optimizer", options.optimizer, self.parameters)
        if not isinstance(self.optimizer, torch.optim.Optimizer) or isinstance(self.optimizer, torch.optim.LBFGS):
            kind = type(self.optimizer).__name__
            raise SpecError(
                f"{options.name}.optimizer must return a torch optimizer whose steps need no closure; got {kind}"
            )
        self.size = options.batch_size
        largest = min(size for size in (self.size, task.rows.count, 2**40) if size is not None)
        if options.gradient_accumulation > largest:
            raise SpecError(
                f"fit: gradient_accumulation={options.gradient_accumulation} parts of {largest} rows; take fewer"
            )
        self.taken = 0  # steps since the beginning
        self.epoch = 1  # current epoch
        length = self.length()
        self.planned = None if length is None else task.config.epochs * length
        if options.schedule in ("cosine", "one_cycle") and self.planned is None:
            raise SpecError(
                f"fit: the schedule {options.schedule} needs the number of steps, which a stream does not tell; "
                "use constant or exponential"
            )
        kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        self.kind = kinds.get(options.precision)
        if self.kind is not None and self.parameters[0].dtype != torch.float32:
            raise SpecError(
                f"fit: precision {options.precision} is for models in float32, not {self.parameters[0].dtype}; leave it out"
            )
        self.scaler = torch.amp.GradScaler(self.device) if options.precision == "float16" else None
        self.average = None if options.ema_decay is None else [p.detach().clone() for p in self.parameters]
        self.total = 0.0
        self.value: float | None = None  # the loss of the last step
        self.found = torch.zeros((), device=self.parameters[0].device)
        self.one = torch.ones((), device=self.parameters[0].device)
        self.rows = 0
        self.rate = options.learning_rate

    def length(self) -> int | None:
        return self.task.rows.length(self.size)

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        options, planned = self.options, self.planned or 1
        peak = options.learning_rate
        if options.schedule == "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * step / planned))
        if options.schedule == "one_cycle" and planned > 3:
            up = 0.3 * planned - 1
            if step < up:
                return _between(peak / 25, peak, step / up)
            return _between(peak, peak / 25e4, (step - up) / (planned - 1 - up))
        if options.schedule == "exponential":
            return peak * options.gamma ** (self.epoch - 1)
        return peak

    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        task = self.task
        group, seed = task.group, task.config.seed
        task.model.train()
        self.epoch = epoch
        if start == 0:
            self.total, self.rows = 0.0, 0
        with torch.random.fork_rng(self.devices):
            # Each step has a separate seed, so a resumed run draws the same random numbers.
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
        task = self.task
        self.rate = rate = self._rate(self.taken)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.optimizer.zero_grad()
        value = self._pass(batch)
        if task.penalties.any:
            self._penalize()
        self._update(batch, value)
        self.value = value
        self.total += value * batch.count / task.group.size
        self.rows += batch.count
        self.taken += 1
        if self.average is not None:
            decay = min(cast(float, self.options.ema_decay), self.taken / (WARM_UP + self.taken - 1))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    def _pass(self, batch: Batch) -> float:
        """Set the gradients of the mean loss of a batch, and return the loss."""
        if self.options.gradient_accumulation == 1:
            return float(self._backward(batch))
        parts = _parts(batch, self.options.gradient_accumulation)
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
        clip, group = self.options.max_grad_norm, self.task.group
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.scaler is not None:
            if not self.task.penalties.any:
                self.scaler.unscale_(self.optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(self.parameters, clip)
            self.scaler.step(self.optimizer)  # skipped after an overflow
            self.scaler.update()
            if not math.isfinite(value) or self.scaler.get_scale() < MIN_SCALE:
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

    def step_loss(self) -> float | None:
        return self.value

    def follow_grids(self, update: GridUpdate) -> None:
        """Express the averaged weights in the new bases, and drop the moments of the moved parameters."""
        for parameter in update.parameters:
            self.optimizer.state.pop(parameter, None)
        if self.average is None:
            return
        current = [p.detach().clone() for p in self.parameters]
        self._put(self.average)
        update.express()
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.copy_(parameter.detach())
        self._put(current)

    def report(self) -> Report:
        group = self.task.group
        total = float(group.sum(torch.tensor(self.total, dtype=torch.float64))) if group.size > 1 else self.total
        loss = total / max(1, self.rows)
        return Report(loss, learning_rate=self.rate)

    def state(self) -> State:
        tensors: dict[str, Tensor] = {}
        full_tensor = self.task.group.full_tensor
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
        return {name: full_tensor(tensor) for name, tensor in tensors.items()}, plain

    def restore(self, state: State) -> None:
        tensors, plain = state
        saved = unpack(plain["optimizer"], tensors)
        for i, values in saved["state"].items():
            parameter = self.parameters[int(i)]
            restored = self.optimizer.state[parameter]
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    restored[name] = torch.zeros_like(parameter)
                    self.task.group.assign(restored[name], value)
                else:
                    restored[name] = value.clone() if isinstance(value, Tensor) else value
        if self.scaler is not None:
            self.scaler.load_state_dict(unpack(plain["scaler"], tensors))
        self.taken, self.rows, self.rate = plain["taken"], plain["rows"], plain["rate"]
        self.total = plain["total"]
        for i, tensor in enumerate(self.average or ()):
            self.task.group.assign(tensor, tensors[f"average.{i}"])

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
        raise SpecError("fit: gradient_accumulation needs dense inputs; use a smaller batch_size")
    weights = [None] * count if batch.weight is None else batch.weight.split(sizes)
    pairs = zip(batch.x.split(sizes), batch.y.split(sizes), weights, strict=True)
    return [Batch(x, y, weight, batch.count) for x, y, weight in pairs]
