"""The state of a training run in a checkpoint: identity and position."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.spec import from_dict, to_dict
from kapsi.training.checkpoint import Checkpoints, Saved, differences
from kapsi.training.config import TrainConfig
from kapsi.training.distributed import Group
from kapsi.training.losses.base import CallableLoss, name_of
from kapsi.training.metrics import CallableMetric
from kapsi.training.records import Epoch
from kapsi.training.rows.base import Rows, contents
from kapsi.training.solvers import Solver, SolverRun
from kapsi.version import __version__

ASK_EVERY = 64
"""Steps between agreements of processes with a shared model on whether a checkpoint is due."""

FREE = ("epochs", "patience", "seconds")
"""Options that may change in a resumed run, unless the learning rate depends on the number of epochs."""


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        number: number of completed epochs.
        step: number of steps in the current epoch.
        steps_taken: number of steps since the start of training.
        records: records of the completed epochs.
        lowest: best value of the monitored quantity, negated if greater is better.
        stale_epochs: number of epochs since the best epoch.
        seconds: training time so far, without interruptions.
        stop_reason: why training ended, None before.
        details: values for the record of the current epoch.
    """

    number: int = 0
    step: int = 0
    steps_taken: int = 0
    records: list[Epoch] = field(default_factory=list)
    lowest: float = math.inf
    stale_epochs: int = 0
    seconds: float = 0.0
    stop_reason: str | None = None
    details: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Writes checkpoints of a run, and restores the run from the last checkpoint.

    Args:
        checkpoints: folder and frequency of checkpoints.
        model: the model.
        config: training options, with every `auto` resolved.
        solver: the solver of the configuration.
        rows: training and validation rows.
        group: the processes in the training.
        keeps_best: whether the weights of the best epoch are part of the state.
        threads: number of threads per step.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        model: nn.Module,
        config: TrainConfig,
        solver: Solver,
        rows: tuple[Rows, Rows | None],
        group: Group,
        keeps_best: bool,
        threads: int,
    ) -> None:
        self.checkpoints, self.model, self.config, self.solver = checkpoints, model, config, solver
        self.group, self.keeps_best, self.threads = group, keeps_best, threads
        self.plain = _plain(config)  # before plain callables change their attributes
        # Rows in memory are compared completely, at little cost.
        self.described = [
            None if part is None else part.described | ({"contents": contents(part)} if part.in_memory else {})
            for part in rows
        ]
        for name in _callables(config):
            checkpoints.say(
                f"checkpoints: {name} is a plain callable; a resumed run compares its code and options only"
            )

    def is_due(self, taken: int) -> bool:
        """Return whether a checkpoint is to be written after a number of steps."""
        due = self.checkpoints.due(taken)
        if self.group.sharded:  # all processes have a part to contribute
            return taken % ASK_EVERY == 0 and self.group.any(due)
        return due and self.group.first

    def write(self, run: SolverRun, progress: Progress, best: dict[str, Tensor]) -> None:
        """Write a checkpoint."""
        saved = self._saved(run, progress, best, None)
        if self.group.first:
            self.checkpoints.write(saved)

    def write_interrupt(self, run: SolverRun, progress: Progress, best: dict[str, Tensor]) -> None:
        """Write a checkpoint of an interrupted run, if there is enough work to save."""
        if self.checkpoints.worth():
            self.write(run, progress, best)

    def finish(self, run: SolverRun, progress: Progress, best: dict[str, Tensor]) -> None:
        """Write the end of the run."""
        saved = self._saved(run, progress, best, progress.stop_reason)  # all processes gather a shared model
        if self.group.first:
            self.checkpoints.finish(saved)

    def _saved(self, run: SolverRun, progress: Progress, best: dict[str, Tensor], reason: str | None) -> Saved:
        whole = {name: self.group.full_tensor(tensor.detach()) for name, tensor in tensors_of(self.model).items()}
        tensors = {f"model.{name}": tensor for name, tensor in whole.items()}
        state, plain = run.state()
        tensors |= {f"solver.{name}": tensor for name, tensor in state.items()}
        if self.keeps_best:
            tensors |= {f"best.{name}": tensor for name, tensor in best.items()}
        data = {
            "kapsi": __version__,
            "python": platform.python_version(),
            "identity": self._identity(),
            "machine": self._machine(),
            "number": progress.number,
            "step": progress.step,
            "taken": progress.steps_taken,
            "records": [record._asdict() for record in progress.records],
            "lowest": progress.lowest,
            "since": progress.stale_epochs,
            "seconds": progress.seconds,
            "over": reason,
            "keeps_best": self.keeps_best,
            "details": progress.details,
            "context": self.checkpoints.context,
            "solver": plain,
        }
        return Saved(progress.steps_taken, tensors, data)

    # -------------------------------------------------------------------------------- the identity of a run

    def _identity(self) -> dict[str, Any]:
        """Return the properties required to be the same in a resumed run."""
        config = dict(self.plain)
        for name in FREE if not self.solver.schedules_epochs() else FREE[1:]:
            del config[name]
        shapes = {name: [str(t.dtype), list(t.shape)] for name, t in tensors_of(self.model).items()}
        return {
            "config": config,
            "limits": {name: getattr(self.config, name) for name in FREE},
            "data": self.described[0],
            "validation": self.described[1],
            "model": shapes,
            "spec": to_dict(self.model.spec) if isinstance(self.model, Model) else None,
        }

    def _machine(self) -> dict[str, Any]:
        """Return the conditions of bitwise equal results."""
        device = next(self.model.parameters()).device.type
        return {"threads": self.threads, "device": device, "processes": self.group.size, "torch": torch.__version__}

    # -------------------------------------------------------------------------------- resuming

    def latest(self) -> Saved | None:
        """Return the last whole checkpoint, None without any.

        Raises:
            SpecError: a checkpoint of another run.
        """
        saved = self.checkpoints.latest()
        if saved is None:
            return None
        where, data, identity = f"{str(saved.path)!r}", saved.data, self._identity()
        differing = list(differences(dict(_flat(identity["config"])), dict(_flat(data["identity"]["config"]))))
        for name in ("model", "spec", "data", "validation"):
            # JSON has lists for tuples.
            saved_part = _with_defaults(data["identity"][name]) if name == "spec" else data["identity"][name]
            if json.loads(json.dumps(identity[name])) != saved_part:
                differing.append("the " + {"spec": "model", "validation": "validation rows"}.get(name, name))
        context = self.checkpoints.context
        differing += [name for name in context if context[name] != data["context"].get(name)]
        if bool(data["keeps_best"]) != self.keeps_best:
            differing.append("train instead of fit")
        if differing:
            raise SpecError(f"{where}: is of another run: {'; '.join(dict.fromkeys(differing))}; use another folder")
        other = list(differences(self._machine(), data["machine"]))
        if other:
            self.checkpoints.say(f"{where}: continues with {'; '.join(other)}; the last digits may differ")
        return saved

    @staticmethod
    def position(saved: Saved) -> tuple[Progress, dict[str, Any]]:
        """Return the position of a checkpoint, and the limits of the run at that time."""
        data = saved.data
        keys = ("number", "step", "taken", "lowest", "since", "seconds", "over")
        number, step, taken, lowest, since, seconds, over = (data[key] for key in keys)
        records = [Epoch(**record) for record in data["records"]]
        limits = {name: data["identity"]["limits"][name] for name in FREE}
        details = data.get("details", {})  # absent in earlier versions
        return Progress(number, step, taken, records, lowest, since, seconds, over, details), limits

    @staticmethod
    def parts(saved: Saved) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint for the model, the solver and the best weights."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "solver": {}, "best": {}}
        for name, tensor in saved.tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        return parts


def _with_defaults(spec: Any) -> Any:
    """Return a specification of an earlier version with the options that have come since."""
    return spec if spec is None else json.loads(json.dumps(to_dict(from_dict(spec))))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model, without plain values of modules."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def _callables(config: TrainConfig) -> list[str]:
    loss = [f"the loss {name_of(config.loss.function)}"] if isinstance(config.loss, CallableLoss) else []
    return loss + [f"the metric {metric.name}" for metric in config.metrics if isinstance(metric, CallableMetric)]


def _plain(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as plain data; plain callables by their names."""

    def named(function: Any) -> Any:
        if isinstance(function, CallableLoss | CallableMetric):
            name = f"{getattr(function.function, '__module__', '')}.{name_of(function.function)}"
            code = hashlib.sha256(repr(_comparable(function.function)).encode()).hexdigest()[:16]
            return {"callable": name, "code": code}
        return to_dict(function)

    plain = {name: to_dict(value) for name, value in vars(config).items() if name not in ("loss", "metrics")}
    return plain | {"loss": named(config.loss), "metrics": [named(metric) for metric in config.metrics]}


def _comparable(value: Any) -> Any:
    """Return code, constants, defaults, closure, arguments of a partial and plain attributes of a plain callable, nested."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_names, _comparable(value.co_consts)]
    if isinstance(value, functools.partial):
        return [_comparable(value.func), _comparable(value.args), _comparable(list(value.keywords.items()))]
    if isinstance(value, types.MethodType):
        return [_comparable(value.__func__), _comparable(value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        plain = [type(cell).__name__ if callable(cell) else _comparable(cell) for cell in cells]
        return [_comparable(value.__code__), _comparable(value.__defaults__), plain]
    attributes = sorted(getattr(value, "__dict__", {}).items())
    return [type(value).__qualname__, [pair for pair in attributes if isinstance(pair[1], bool | int | float | str)]]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested plain data by dotted names."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value
