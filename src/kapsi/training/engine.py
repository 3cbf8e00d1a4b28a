"""The training engine: epochs of a solver, records, early stopping, best weights restored, checkpoints, interrupts."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn

from kapsi.errors import KapsiError, SpecError, did_you_mean
from kapsi.modules import Model, trained_count
from kapsi.spec import to_dict
from kapsi.training.checkpoint import Checkpoints, Saved, differences
from kapsi.training.config import TrainConfig
from kapsi.training.data import Rows, make_rows
from kapsi.training.diagnosis import diagnose
from kapsi.training.distributed import Group
from kapsi.training.losses import Loss, make_loss
from kapsi.training.penalties import Penalties
from kapsi.training.prediction import evaluate, evaluation, outputs_of, rows_at_a_time, widest
from kapsi.training.records import Epoch
from kapsi.training.rows.base import contents
from kapsi.training.solvers import SOLVERS, NotFinite, Solver, Task, reason_not_closed
from kapsi.version import __version__

__all__ = ["INTERRUPTED", "Watch", "choose_solver", "fit", "threads_for", "train"]

SMALL_PRODUCT = 50_000_000
"""Rows times parameters up to which all data go into every step of a quasi-Newton method: milliseconds, and it converges."""

SMALL_SYSTEM = 1_000
"""Parameters up to which a damped Gauss–Newton step, with its P × P system, is taken by itself."""

SMALL_JACOBIAN = 5_000_000
"""Rows times outputs times parameters up to which it is: 40 MB a Jacobian in float64."""

SMALL_ELEMENTS = 2**20
"""Elements of κ(x) up to which a solver on all rows runs on one thread."""

MINI_BATCH = ("adamw", "sgd")
INTERRUPTED = "interrupted"
ALL_EPOCHS = "all epochs are over"
ASK_EVERY = 64
"""Steps after which processes that share a model agree on whether it is time for a checkpoint."""

Watch = Callable[[int, int, int | None], None]
"""Called after each step with the number of the epoch, that of the step in it, and the number of steps of an epoch if known."""

FREE = ("epochs", "patience", "seconds")
"""Options that may change when a run is resumed, as long as the learning rate does not depend on them."""


def train(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    validation: Any = None,
    *,
    checkpoints: Checkpoints | None = None,
    group: Group | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> Iterator[Epoch]:
    """Train a model in place and yield a record after each epoch; the weights are those of the last epoch.

    Args:
        model: maps `(rows, m)` to `(rows, n)`: a `kapsi.Model`, or another module.
        data: inputs and targets, and weights of the rows if they have some: `(x, y)` or `(x, y, weight)` of tensors, arrays,
            sparse matrices or memory maps; a data set or a loader of torch that gives them; `kapsi.ParquetRows`. Targets are
            class numbers `(rows,)`, or numbers `(rows,)` or `(rows, k)`.
        config: how; the defaults where it is left out.
        validation: rows that are only looked at, of any of these kinds; or a share of the data to hold out, 0 < share < 1.
        checkpoints: where and how often the run is written down.
        group: the processes that train together, from `kapsi.open_group`.
        watch: called after each step.
        **options: of `TrainConfig`, instead of those in `config`: `loss="mse"`, `solver="adamw"`, `epochs=10`.

    Raises:
        SpecError: data, model and options that do not fit.
        KapsiError: a loss or a gradient is not finite; the message names the layer. The weights are those before that step.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> model = kp.Model(kp.rpn([1, 4, 1], expansion=kp.Chebyshev(3)), seed=0)
        >>> for epoch in kp.train(model, (x, x.sin()), loss="mse", solver="adamw", epochs=3):
        ...     print(epoch.number, epoch.loss < 10)
        1 True
        2 True
        3 True
    """
    run = _Run(model, data, _with_options(config, options, "train"), validation, checkpoints, group, watch)
    return run.epochs()


def fit(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    validation: Any = None,
    progress: Callable[[Epoch], None] | None = None,
    checkpoints: Checkpoints | None = None,
    group: Group | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> list[Epoch]:
    """Train a model in place, with early stopping that restores the weights of the best epoch; return the records.

    The model is in evaluation mode afterwards. An interrupt (Ctrl-C) ends training after the step; the model keeps the best
    weights so far, and the last record says `interrupted`. A second one is an exception.

    Args:
        model: maps `(rows, m)` to `(rows, n)`: a `kapsi.Model`, or another module.
        data: as for `train`.
        config: how; the defaults where it is left out.
        validation: rows to stop on, of any of the kinds of data; or a share of the data. Without them training ends with the
            last epoch.
        progress: called after each epoch with its record.
        checkpoints: where and how often the run is written down, to go on after it was killed.
        group: the processes that train together, from `kapsi.open_group`.
        watch: called after each step.
        **options: of `TrainConfig`, instead of those in `config`.

    Raises:
        SpecError: data, model and options that do not fit.
        KapsiError: a loss or a gradient is not finite; the model then has the best weights so far, those it came with if no
            epoch was better.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> model = kp.Model(kp.rpn([1, 1], expansion=kp.Chebyshev(4)), seed=0)
        >>> records = kp.fit(model, (x, x**3), kp.TrainConfig(epochs=50))
        >>> records[-1].loss < 1e-6
        True
    """
    if progress is not None and not callable(progress):
        raise SpecError(
            f"fit: expected progress that can be called with a record, such as kapsi.CsvLog(path), got {type(progress).__name__}"
        )
    run = _Run(
        model, data, _with_options(config, options, "fit"), validation, checkpoints, group, watch, keeps_best=True
    )
    with run.interruptible():
        for epoch in run.epochs():
            if progress is not None:
                progress(epoch)
    return run.records


def _with_options(config: TrainConfig | None, options: dict[str, Any], where: str) -> TrainConfig:
    config = TrainConfig() if config is None else config
    if not isinstance(config, TrainConfig):
        raise SpecError(f"{where}: expected a TrainConfig, got {type(config).__name__}")
    known = [field.name for field in fields(TrainConfig)]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise SpecError(f"{where}: there is no option {name!r}; {hint}there are {', '.join(known)}")
    return replace(config, **options) if options else config


# ------------------------------------------------------------------------------------------------ the choice of a solver


def choose_solver(model: nn.Module, rows: Rows, loss: Loss, config: TrainConfig, group: Group) -> tuple[str, str]:
    """Return the solver that `auto` stands for, and why."""
    count = trained_count(model)
    wanted = next((name for name in ("accumulate", "clip", "averaging") if _is_set(config, name)), None)
    if wanted or config.precision != "full":
        return "adamw", f"{wanted or 'precision'} is for steps in mini-batches"
    if group.sharded:
        return "adamw", "the model is divided among processes"
    if config.l1 or config.group_sparsity:
        return "adamw", "an l1 or a group penalty is not smooth"
    if is_random(model):
        return "adamw", "dropout is random"
    batch_statistics = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    number = rows.count
    plain = not config.compile
    if plain and loss.name == "mse" and config.starts == 1 and _is_closed(model, number, group):
        return "ridge", "the model is linear in its parameters: solved at once"
    if number is None or not rows.in_memory:
        return "adamw", "the rows are not in memory"
    size = f"{number:,} rows and {count:,} parameters"
    outputs = getattr(model, "out_features", 1)
    # Modules of others may have parts that cannot be differentiated row by row.
    curved = plain and isinstance(model, Model) and loss.name in ("mse", "gaussian")
    fits = count <= SMALL_SYSTEM and number * count * outputs <= SMALL_JACOBIAN
    if curved and fits and not batch_statistics and not rows.sparse:
        return "levenberg_marquardt", f"{size} are few: damped Gauss–Newton steps on all of them"
    if number * count <= SMALL_PRODUCT:
        return "lbfgs", f"{size} are few: quasi-Newton steps on all of them"
    return "adamw", f"{size} are many: steps in mini-batches"


def is_random(model: nn.Module) -> bool:
    """Return whether a model has dropout: a line search needs a function that is the same twice."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) for module in model.modules())


def _is_closed(model: nn.Module, rows: int | None, group: Group) -> bool:
    return rows is not None and reason_not_closed(model, rows, group.size) is None


def _is_set(config: TrainConfig, name: str) -> bool:
    return getattr(config, name) != getattr(TrainConfig(), name)


def _check_options(config: TrainConfig) -> None:
    """Refuse options that the solver does not have, rather than leave them without effect."""
    solver = config.solver
    if solver not in MINI_BATCH:
        for name in ("accumulate", "clip", "averaging", "precision"):
            if _is_set(config, name):
                raise SpecError(f"fit: {name} is for adamw and sgd, the solver is {solver}; leave {name} out")
    if config.compile and solver not in (*MINI_BATCH, "lbfgs"):
        raise SpecError(f"fit: compile is for adamw, sgd and lbfgs, the solver is {solver}; leave compile out")
    if config.starts > 1 and solver != "levenberg_marquardt":
        raise SpecError(f"fit: starts is for levenberg_marquardt, the solver is {solver}; leave starts out")
    if config.label_smoothing and config.loss != "cross_entropy":
        raise SpecError(
            f"fit: label_smoothing is for cross_entropy, the loss is {config.loss}; leave label_smoothing out"
        )


# ------------------------------------------------------------------------------------------------ a run


class _Run:
    """One training run: what it was given, where it stands, and what it learned."""

    @torch.inference_mode(False)
    @torch.enable_grad()
    def __init__(
        self,
        model: nn.Module,
        data: Any,
        config: TrainConfig,
        validation: Any = None,
        checkpoints: Checkpoints | None = None,
        group: Group | None = None,
        watch: Watch | None = None,
        keeps_best: bool = False,
    ) -> None:
        self.model, self.checkpoints, self.watch, self.keeps_best = model, checkpoints, watch, keeps_best
        self.group = Group() if group is None else group
        if not isinstance(model, nn.Module):
            raise SpecError(f"fit: expected a model, got {type(model).__name__}")
        if any(nn.parameter.is_lazy(p) for p in model.parameters()):
            raise SpecError("fit: the model has parameters without a size yet; run it once, with model(x[:2])")
        if any(p.is_inference() for p in model.parameters()):
            raise SpecError("fit: the model was made in torch.inference_mode and cannot be trained; make it outside")
        like = next((p for p in model.parameters() if p.requires_grad and p.numel()), None)
        if like is None:
            raise SpecError("fit: the model has no parameters that are trained")
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise SpecError("fit: the model is on the meta device and has no values")
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            raise SpecError(f"fit: expected kapsi.Checkpoints(folder) as checkpoints, got {type(checkpoints).__name__}")
        if not isinstance(self.group, Group):
            raise SpecError(f"fit: expected a group from kapsi.open_group, got {type(group).__name__}")
        if watch is not None and not callable(watch):
            raise SpecError(f"fit: expected a watch that can be called after each step, got {type(watch).__name__}")
        rows = make_rows(data)
        held: Rows | None = None
        name = config.loss if config.loss != "auto" else "cross_entropy" if rows.classes else "mse"
        loss = make_loss(name, label_smoothing=config.label_smoothing, huber_delta=config.huber_delta)
        if isinstance(validation, float | int | np.floating):
            rows, held = rows.divide(float(validation), config.seed, classes=loss.classes)
        elif validation is not None:
            held = make_rows(validation)
        device = like.device if self.group.device is None else self.group.device
        own = isinstance(model, Model)
        settings: dict[str, Any] = {
            "in_features": model.in_features if own else None,
            "outputs": model.out_features if own else self._outputs(rows, like.dtype, device),
            "dtype": like.dtype,
            "device": device,
        }
        self.rows = rows.settle(loss, **settings, class_weights=config.class_weights)
        self.held = None if held is None else held.settle(loss, **settings)
        solver: str = config.solver
        self.reason = "it was asked for"
        if solver == "auto":
            solver, self.reason = choose_solver(model, self.rows, loss, config, self.group)
        self.config = replace(config, loss=cast(Any, name), solver=cast(Any, solver))
        _check_options(self.config)
        self.loss = loss
        self.number = 0  # epochs that are over
        self.step = 0  # steps of the one that is not
        self.taken = 0  # steps since the beginning
        self.records: list[Epoch] = []
        self.lowest = math.inf
        self.since = 0  # epochs without a better loss
        self.over: str | None = None
        self.interrupted = False
        self.earlier = 0.0  # seconds before an interruption
        self.solver = self._solver(chosen=config.solver == "auto")
        self.first: dict[str, Tensor] = self._weights() if keeps_best else {}
        self.best = self.first
        # What is in memory is compared whole: reading it is quick.
        self.described = [
            None if part is None else part.described | ({"contents": contents(part)} if part.in_memory else {})
            for part in ((self.rows, self.held) if checkpoints is not None else ())
        ]
        self._resume()

    def _solver(self, chosen: bool) -> Solver:
        """Return the solver; where one that nobody asked for cannot differentiate the model as it must, the next one."""
        try:
            return self._named_solver()
        except SpecError as error:
            if not chosen or self.config.solver != "levenberg_marquardt":
                raise
            self.config = replace(self.config, solver="lbfgs")
            self.reason = f"quasi-Newton steps on all rows, since {error}"
            return self._named_solver()

    def _named_solver(self) -> Solver:
        config, model, group = self.config, self.model, self.group
        call: Callable[..., Tensor] = model
        mini_batch = config.solver in MINI_BATCH
        if group.sharded and not mini_batch:
            raise SpecError(
                f"fit: {config.solver} needs the whole model on each process; take adamw or sgd, or strategy ddp"
            )
        self._check_inputs()
        if mini_batch:
            call = group.wrap(model)
        if config.compile:
            call = cast("Callable[..., Tensor]", torch.compile(call))
        task = Task(model, self.rows, self.loss, Penalties(model, config), config, group, call)
        return SOLVERS[config.solver](task)

    def _check_inputs(self) -> None:
        if isinstance(self.model, Model) and self.rows.in_memory:
            shape = tuple(next(iter(self.rows.chunks(1))).x.shape)
            if len(shape) != 2:
                inner = ", ".join(str(size) for size in shape[1:])
                raise SpecError(f"fit: expected inputs of shape (rows, m), got (rows, {inner}); use x.flatten(0, -2)")

    def _outputs(self, rows: Rows, dtype: torch.dtype, device: torch.device | str) -> int:
        """Return the number of outputs of a module that does not tell it, and refuse one that does not map rows to rows."""
        x = next(iter(rows.chunks(2))).x.to(device, dtype)
        with evaluation(self.model):
            output = outputs_of(self.model, self.model, x, "fit")
        if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(x):
            given = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise SpecError(f"fit: the model must map ({len(x)}, m) to ({len(x)}, n), it returned {given}")
        if not output.requires_grad:
            raise SpecError(
                "fit: the outputs of the model depend on no parameter that is trained; look for detach and no_grad in it"
            )
        return output.shape[1]

    # -------------------------------------------------------------------------------- the loop

    def epochs(self) -> Iterator[Epoch]:
        """Train, and yield a record after each epoch."""
        started = time.monotonic()
        try:
            while self.over is None:
                record = self._epoch(started)
                # What is yielded has the weights that count; they stay when nobody asks for a further epoch.
                with self.solver.evaluating():
                    self._keep(record)
                    yield record
            self._finish()
        finally:
            self._leave()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _epoch(self, started: float) -> Epoch:
        config, number, length = self.config, self.number + 1, self.solver.length()
        try:
            with threads_for(self._elements()), self.group.watching():
                for _ in self.solver.steps(number, self.step):
                    self.step += 1
                    self.taken += 1
                    self.seconds = self.earlier + time.monotonic() - started
                    if self.watch is not None:
                        self.watch(number, self.step, length)
                    if self.checkpoints is not None and self._is_due():
                        self._write()
                    if self.interrupted and self.group.size == 1:
                        break
        except NotFinite as error:
            self._stop(error)
        self.seconds = self.earlier + time.monotonic() - started
        report = self.solver.report()
        if self.group.any(self.interrupted):
            self.over = INTERRUPTED
            if self.checkpoints is not None and self.checkpoints.worth():
                self._write()
        validation_loss: float | None = None
        metrics: dict[str, float] = {}
        with self.solver.evaluating(), self.group.evaluating(self.model):
            if self.held is not None:
                validation_loss, metrics = evaluate(self.model, self.held, self.loss, self.group)
        if self.held is None and self.loss.name == "mse" and report.loss >= 0:
            metrics = {"rmse": math.sqrt(report.loss)}
        measure = report.loss if validation_loss is None else validation_loss
        best = measure < self.lowest
        self.over = self.over or report.ended or self._limit(config, number, 0 if best else self.since + 1)
        ends = self.over not in (None, INTERRUPTED)
        if ends and validation_loss is not None and not (math.isfinite(measure) or math.isfinite(self.lowest)):
            self._stop_validation(validation_loss)
        return Epoch(
            number,
            report.loss,
            validation_loss,
            best,
            metrics,
            self.seconds,
            report.learning_rate,
            config.solver,
            self.reason,
            report.details or {},
            self.over,
        )

    def _limit(self, config: TrainConfig, number: int, since: int) -> str | None:
        """Return which limit of the options ends the run after so many epochs, `since` of them no better, None where none does."""
        if config.seconds is not None and self.group.any(self.seconds >= config.seconds):
            return f"{config.seconds:g} seconds are over"
        if self.keeps_best and self.held is not None and since >= config.patience:
            return f"the validation loss was no better for {config.patience} epochs"
        return ALL_EPOCHS if number >= config.epochs else None

    def _keep(self, record: Epoch) -> None:
        """Take a record into the books."""
        self.number, self.step = record.number, 0
        self.records.append(record)
        self.since = 0 if record.best else self.since + 1
        if record.best:
            measure = record.loss if record.validation_loss is None else record.validation_loss
            self.lowest = measure
            if self.keeps_best:
                self.best = self._weights()

    def _finish(self) -> None:
        """Write the end of the run, and give the model the weights that it ends with."""
        if not self.records:
            return
        if self.checkpoints is not None and self.over != INTERRUPTED:
            saved = self._saved()  # what several processes share is gathered by all of them
            if self.group.first:
                self.checkpoints.finish(saved)
        self._settle()

    def _settle(self) -> None:
        last = contextlib.ExitStack()
        last.enter_context(self.solver.evaluating())
        final = self._weights()
        last.close()
        # Without validation rows the last epoch counts, but one that was cut short.
        whole = self.held is None and self.over != INTERRUPTED
        self._place(final if whole or not self.keeps_best else self.best)

    def _leave(self) -> None:
        """Leave a usable model behind, however the run ended."""
        if self.keeps_best and self.over is None:  # an error, or a second interrupt
            self._place(self.best)
        if self.config.solver in MINI_BATCH:
            self.group.unwrap(self.model)
        if self.keeps_best:
            self.model.eval()

    def _stop(self, error: NotFinite) -> NoReturn:
        """Say what is not finite, and where."""
        where = f"training stopped in epoch {self.number + 1}"
        text = diagnose(self.model, error.batch, self.loss, error.statistic, self.taken + 1)
        if self.keeps_best and self.records:  # led astray, perhaps from the first epoch on
            self._place(self.first)
            with self.group.evaluating(self.model):
                measure, _ = evaluate(self.model, self.held or self.rows, self.loss, self.group)
            # The first epoch's mean over its steps may be this very loss, in another rounding.
            if not measure > self.lowest + 1e-6 * abs(self.lowest):
                self.best = self.first
        raise KapsiError(f"{where}: {text}") from None

    def _stop_validation(self, value: float) -> NoReturn:
        """Say that the validation loss never was finite, and where that comes from."""
        where = ""
        if self.group.size == 1:
            with self.solver.evaluating(), evaluation(self.model):
                for batch in cast(Rows, self.held).chunks(rows_at_a_time(self.model)):
                    with torch.no_grad():
                        losses = self.loss.rows(self.model(batch.x), batch.y)
                    if not bool(torch.isfinite(losses).all()):
                        where = f"; {diagnose(self.model, batch, self.loss, 'loss', self.taken)}"
                        break
        self.over = None  # the model gets back what it came with
        epochs = f"the {self.number + 1} epochs" if self.number else "the only epoch"
        raise KapsiError(f"the validation loss was {value:g} after {epochs}, and never finite{where}")

    def _elements(self) -> int:
        """Return the size of what a step works on, for a solver on all rows."""
        if self.config.solver in MINI_BATCH or self.rows.count is None:
            return SMALL_ELEMENTS + 1
        return self.rows.count * widest(self.model)

    # -------------------------------------------------------------------------------- weights

    def _weights(self) -> dict[str, Tensor]:
        return {name: self.group.whole(t.detach()).clone() for name, t in _tensors(self.model).items()}

    def _place(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in _tensors(self.model).items():
            self.group.place(tensor, weights[name])

    # -------------------------------------------------------------------------------- checkpoints

    def _is_due(self) -> bool:
        due = cast(Checkpoints, self.checkpoints).due(self.taken)
        if self.group.sharded:  # all processes have a part of it to give
            return self.taken % ASK_EVERY == 0 and self.group.any(due)
        return due and self.group.first

    def _identity(self) -> dict[str, Any]:
        """Return what has to be the same for a run to go on."""
        config = to_dict(self.config)
        for name in FREE if not self._depends_on_epochs() else FREE[1:]:
            del config[name]
        shapes = {name: [str(t.dtype), list(t.shape)] for name, t in _tensors(self.model).items()}
        return {
            "config": config,
            "limits": {name: getattr(self.config, name) for name in FREE},
            "data": self.described[0],
            "validation": self.described[1],
            "model": shapes,
            "spec": to_dict(self.model.spec) if isinstance(self.model, Model) else None,
        }

    def _depends_on_epochs(self) -> bool:
        return self.config.solver in MINI_BATCH and self.config.schedule in ("cosine", "one_cycle")

    def _machine(self) -> dict[str, Any]:
        """Return what has to be the same for it to go on to the last bit."""
        with threads_for(self._elements()):
            threads = torch.get_num_threads()
        device = next(self.model.parameters()).device.type
        return {"threads": threads, "device": device, "processes": self.group.size, "torch": torch.__version__}

    def _saved(self) -> Saved:
        tensors = {f"model.{name}": tensor for name, tensor in self._state_of(self.model).items()}
        known, plain = self.solver.state()
        tensors |= {f"solver.{name}": tensor for name, tensor in known.items()}
        if self.keeps_best:
            tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        data = {
            "kapsi": __version__,
            "python": platform.python_version(),
            "identity": self._identity(),
            "machine": self._machine(),
            "number": self.number,
            "step": self.step,
            "taken": self.taken,
            "records": [record._asdict() for record in self.records],
            "lowest": self.lowest,
            "since": self.since,
            "seconds": self.seconds,
            "over": self.over if self.over != INTERRUPTED else None,
            "keeps_best": self.keeps_best,
            "context": cast(Checkpoints, self.checkpoints).context,
            "solver": plain,
        }
        return Saved(self.taken, tensors, data)

    def _state_of(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: self.group.whole(tensor.detach()) for name, tensor in _tensors(model).items()}

    def _write(self) -> None:
        saved = self._saved()
        if self.group.first:
            cast(Checkpoints, self.checkpoints).write(saved)

    def _resume(self) -> None:
        """Go on from the last whole checkpoint, if there is one."""
        self.seconds = 0.0
        if self.checkpoints is None:
            return
        saved = self.checkpoints.latest()
        if saved is None:
            return
        where, data, identity = f"{str(saved.path)!r}", saved.data, self._identity()
        differing = list(differences(identity["config"], data["identity"]["config"]))
        for name in ("model", "spec", "data", "validation"):
            # JSON has lists for tuples.
            if json.loads(json.dumps(identity[name])) != data["identity"][name]:
                differing.append("the " + {"spec": "model", "validation": "validation rows"}.get(name, name))
        context = self.checkpoints.context
        differing += [name for name in context if context[name] != data["context"].get(name)]
        if bool(data["keeps_best"]) != self.keeps_best:
            differing.append("train instead of fit")
        if differing:
            raise SpecError(f"{where}: is of another run: {'; '.join(dict.fromkeys(differing))}; take another folder")
        other = list(differences(self._machine(), data["machine"]))
        if other:
            self.checkpoints.say(f"{where}: goes on with {'; '.join(other)}; the last digits may differ")
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "solver": {}, "best": {}}
        for name, tensor in saved.tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self._place(parts["model"])
        self.solver.restore((parts["solver"], data["solver"]))
        if self.keeps_best:
            self.best = parts["best"]
        self.number, self.step, self.taken = data["number"], data["step"], data["taken"]
        self.records = [Epoch(**record) for record in data["records"]]
        self.lowest, self.since, self.over = data["lowest"], data["since"], data["over"]
        self.earlier = self.seconds = data["seconds"]
        # Limits may be other ones now; an epoch that was begun is ended first, unless there are too many already.
        limits = {name: data["identity"]["limits"][name] for name in FREE}
        if self.over is None or self.over == self._limit(replace(self.config, **limits), self.number, self.since):
            over = self._limit(self.config, self.number, self.since)
            self.over = over if not self.step or over == ALL_EPOCHS else None
        if self.over is None and self.records:
            self.records[-1] = self.records[-1]._replace(ended=None)
        if self.over is not None:
            self._settle()

    # -------------------------------------------------------------------------------- interrupts

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first interrupt end training after the step; the second is an exception, as always."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
            yield
            return

        def interrupt(number: int, frame: types.FrameType | None) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model, but for what modules keep beside tensors."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


@contextlib.contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """Use one thread for small arrays: starting a second one costs more than it does, and far more on a busy machine.

    What is computed is then also the same on machines with another number of cores.
    """
    before = torch.get_num_threads()
    if elements <= SMALL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
