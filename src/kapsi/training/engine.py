"""The training engine: epochs of a solver, records, early stopping, best weights restored, checkpoints, interrupts."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from kapsi.errors import KapsiError, SpecError, attempt, refuse
from kapsi.function import catalogue
from kapsi.modules import Model
from kapsi.training.callbacks import Callbacks
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig, configured, is_builtin
from kapsi.training.data import Rows, make_rows
from kapsi.training.diagnosis import diagnose
from kapsi.training.distributed import Group
from kapsi.training.grid_updates import grid_mover
from kapsi.training.losses import CallableLoss, Loss
from kapsi.training.metrics import CallableMetric, Metric, default_metrics
from kapsi.training.penalties import Penalties
from kapsi.training.prediction import evaluate, evaluation, outputs_of, rows_at_a_time, widest
from kapsi.training.records import Epoch, Step
from kapsi.training.resolve import REQUESTED, Resolved, check_at_once, resolve, resolve_loss
from kapsi.training.resume import Progress, Recorder, tensors_of
from kapsi.training.scaling import check_rounding, check_scale, standardize_model
from kapsi.training.solvers import NotFinite, Solver, SolverRun, Task
from kapsi.training.threads import SMALL_ELEMENTS, threads_for

INTERRUPTED = "interrupted"
STOPPED = "stopped by a callback"
CUT_SHORT = "stopped by a callback during the epoch"
ALL_EPOCHS = "all epochs are over"

DRY_RUN_ROWS = 50
"""Rows of the first call of third-party losses and metrics."""

SolverLike: TypeAlias = Solver | str | Mapping[str, Any]
LossLike: TypeAlias = Any
"""A loss, a name, options with a kind, or a callable."""
MetricsLike: TypeAlias = Any
"""A metric or a sequence of metrics: objects, names, options with a kind, or callables."""


def train(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    solver: SolverLike | None = None,
    loss: LossLike | None = None,
    epochs: int | None = None,
    validation: Any = None,
    metrics: MetricsLike | None = None,
    callbacks: Any = (),
    checkpoints: Checkpoints | None = None,
    group: Group | None = None,
    **options: Any,
) -> Iterator[Epoch]:
    """Train a model in place and yield a record after each epoch; keep the weights of the last epoch.

    Args:
        model, data, config, solver, loss, epochs, metrics, callbacks, checkpoints, group, options: see `fit`.
        validation: rows to evaluate after each epoch, or a share of the data, 0 < share < 1.

    Raises:
        SpecError: an unsuitable model, or invalid options.
        DataError: data that do not match the model or the loss.
        KapsiError: a loss or a gradient is not finite; the message names the layer. The model keeps the weights before the step.

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
    arguments = {"solver": solver, "loss": loss, "epochs": epochs, "metrics": metrics}
    config = configured(config, arguments, options, "train")
    return _TrainingRun(model, data, config, validation, callbacks, checkpoints, group, keeps_best=False).epochs()


def fit(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    solver: SolverLike | None = None,
    loss: LossLike | None = None,
    epochs: int | None = None,
    validation: Any = None,
    metrics: MetricsLike | None = None,
    callbacks: Any = (),
    checkpoints: Checkpoints | None = None,
    group: Group | None = None,
    **options: Any,
) -> list[Epoch]:
    """Train a model in place, with early stopping and the weights of the best epoch; return the records.

    The model is in evaluation mode afterwards. An interrupt (Ctrl-C) ends training after the step; the model keeps the best
    weights so far, and the last record ends with `interrupted`. A second interrupt raises an exception.

    Args:
        model: maps `(rows, m)` to `(rows, n)`, or to `(rows,)` for one output: a `kapsi.Model`, or another module.
        data: inputs and targets, and weights of the rows if any: `(x, y)` or `(x, y, weight)` of tensors, arrays, data
            frames, sparse matrices or memory maps; a torch data set or loader; `kapsi.ParquetRows`. Targets are integer
            or boolean class labels `(rows,)`, or real values `(rows,)` or `(rows, k)`. Values of any type are cast to the
            type of the model.
        config: all options as an object; the arguments below replace its fields.
        solver: a solver such as `kp.AdamW(learning_rate=0.01)`, a name, or a mapping of options.
        loss: a loss, a name or options, or a callable (output, target) returning a value per row or a mean.
        epochs: maximum number of epochs.
        validation: rows for early stopping, of any kind of data; or a share of the data. Without validation training
            ends with the last epoch.
        metrics: metrics to record instead of the default metrics of the loss.
        callbacks: objects with `on_step`, `on_epoch` or `on_end`, or callables for each `Epoch`; see `Callback`.
        checkpoints: folder and frequency of checkpoints, to resume after a kill.
        group: the processes in the training, from `kapsi.open_group`.
        **options: further fields of `TrainConfig`: `patience`, `l2`, `seed`, ….

    Raises:
        SpecError: an unsuitable model, or invalid options.
        DataError: data that do not match the model or the loss.
        KapsiError: a loss or a gradient is not finite; the model then has the best weights so far, the initial ones if no
            epoch was better.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> model = kp.Model(kp.rpn([1, 1], expansion=kp.Chebyshev(4)), seed=0)
        >>> records = kp.fit(model, (x, x**3), kp.TrainConfig(epochs=50))
        >>> records[-1].loss < 1e-6
        True
    """
    arguments = {"solver": solver, "loss": loss, "epochs": epochs, "metrics": metrics}
    config = configured(config, arguments, options, "fit")
    run = _TrainingRun(model, data, config, validation, callbacks, checkpoints, group, keeps_best=True)
    with run.interruptible():
        for _ in run.epochs():
            pass
    return run.progress.records


# ------------------------------------------------------------------------------------------------ checks


def _expect(value: Any, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        refuse("fit", wanted, value)


def _check_model(model: nn.Module) -> Tensor:
    """Return a trained parameter of a model.

    Raises:
        SpecError: a model without values or trained parameters.
    """
    _expect(model, nn.Module, "a model")
    reason = None
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise SpecError("fit: the model has uninitialized parameters; run it once, with model(x[:2])")
    like = next((p for p in model.parameters() if p.requires_grad and p.numel()), None)
    if any(p.is_inference() for p in model.parameters()):
        reason = "was made in torch.inference_mode and cannot be trained; make it outside"
    elif any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        reason = "is on the meta device and has no values"
    if like is None or reason is not None:
        raise SpecError(f"fit: the model {reason or 'has no trained parameters'}")
    return like


def _check_effects(config: TrainConfig, has_validation: bool, keeps_best: bool) -> None:
    """Raise a `SpecError` for options that have no effect."""
    where = "fit" if keeps_best else "train"
    if config.patience != TrainConfig.patience and not (has_validation and keeps_best):
        reason = "has no effect without validation rows; give validation=…" if keeps_best else "is for kapsi.fit"
        raise SpecError(f"{where}: patience {reason}, or leave patience out")
    if config.monitor != "loss" and not has_validation:
        raise SpecError(
            f"{where}: monitor has no effect without validation rows; give validation=…, or leave monitor out"
        )


def _check_metrics(metrics: Sequence[Metric], monitor: str, loss: Loss, outputs: int) -> Metric | None:
    """Return the monitored metric, None for the loss.

    Raises:
        SpecError: an unsuitable metric, or an unknown metric to monitor.
    """
    for metric in metrics:
        metric.check_loss(loss, outputs)
    if monitor == "loss":
        return None
    found = next((metric for metric in metrics if metric.name == monitor), None)
    if found is None:
        known = ", ".join(("loss", *(metric.name for metric in metrics)))
        raise SpecError(f"fit: monitor {monitor!r} is not a metric of this run; use {known}, or add it to metrics")
    if isinstance(found, CallableMetric) and not hasattr(found.function, "greater_is_better"):
        raise SpecError(
            f"fit: monitor {monitor!r} is a plain callable; set its attribute greater_is_better to True or False"
        )
    return found


def _count_outputs(model: nn.Module, rows: Rows, dtype: torch.dtype, device: torch.device | str) -> int:
    """Return the number of outputs of a third-party module; refuse outputs other than `(rows, n)`."""
    x = next(iter(rows.chunks(2))).x.to(device, dtype)
    with evaluation(model):
        output = outputs_of(model, model, x, "fit")
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(x):
        shape = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise SpecError(f"fit: the model must map ({len(x)}, m) to ({len(x)}, n), it returned {shape}")
    if not output.requires_grad:
        raise SpecError(
            "fit: the outputs of the model depend on no trained parameter; look for detach and no_grad in it"
        )
    return output.shape[1]


# ------------------------------------------------------------------------------------------------ a run


class _TrainingRun:
    """A training run: parts, position, and best weights."""

    @torch.inference_mode(False)
    @torch.enable_grad()
    def __init__(
        self,
        model: nn.Module,
        data: Any,
        config: TrainConfig,
        validation: Any,
        callbacks: Any,
        checkpoints: Checkpoints | None,
        group: Group | None,
        keeps_best: bool,
    ) -> None:
        self.model, self.keeps_best = model, keeps_best
        self.group = Group() if group is None else group
        like = _check_model(model)
        _check_effects(config, validation is not None, keeps_best)
        _expect(checkpoints, Checkpoints | None, "kapsi.Checkpoints(folder) as checkpoints")
        _expect(self.group, Group, "a group from kapsi.open_group")
        self.callbacks = Callbacks(callbacks)
        self.rows, self.validation = self._bind(data, validation, config, like)
        if config.standardize:
            standardize_model(model, self.rows, resolve_loss(config.loss, self.rows.classes))
        self.chosen = resolve(config, model, self.rows, group=self.group)
        self.metrics = config.metrics or default_metrics(self.loss)
        self.monitored = _check_metrics(self.metrics, config.monitor, self.loss, self.outputs)
        self._dry_run()
        self.solver = self._start()
        self.mover = grid_mover(model, self.rows, self.chosen, self.group)
        if isinstance(model, Model) and not self.solver.at_once:
            check_scale(model, self.rows, self.chosen, "fit" if keeps_best else "train")
        self.progress = Progress()
        self.interrupted = self.cut_short = self.resumed_finished = False
        self.first: dict[str, Tensor] = self._weights() if keeps_best else {}
        self.best = self.first
        self.recorder: Recorder | None = None
        if checkpoints is not None:
            with threads_for(self._elements()):
                threads = torch.get_num_threads()
            both = self.rows, self.validation
            config, options = self.chosen.config, self.chosen.solver
            self.recorder = Recorder(checkpoints, model, config, options, both, self.group, keeps_best, threads)
            self._resume(self.recorder)

    @property
    def loss(self) -> Loss:
        """The loss."""
        return self.chosen.loss

    def _bind(self, data: Any, validation: Any, config: TrainConfig, like: Tensor) -> tuple[Rows, Rows | None]:
        """Return training and validation rows in the types of the model, checked against the loss."""
        rows = make_rows(data)
        held: Rows | None = None
        loss = resolve_loss(config.loss, rows.classes)
        if isinstance(validation, float | int | np.floating):
            rows, held = rows.divide(float(validation), config.seed, classes=loss.classes)
        elif validation is not None:
            held = make_rows(validation)
        model = self.model
        device = like.device if self.group.device is None else self.group.device
        known = isinstance(model, Model)
        if known and len(rows.row_shape) > 1:
            inner = ", ".join(str(size) for size in rows.row_shape)
            raise SpecError(f"fit: expected inputs of shape (rows, m), got (rows, {inner}); use x.flatten(0, -2)")
        self.outputs: int = cast(int, model.out_features) if known else _count_outputs(model, rows, like.dtype, device)
        settings: dict[str, Any] = {
            "in_features": model.in_features if known else None,
            "outputs": self.outputs,
            "dtype": like.dtype,
            "device": device,
        }
        shifted = config.standardize or (known and cast(Model, model).standardized)
        settings["wide_inputs"] = known and shifted
        check_rounding(rows, like.dtype, shifted=shifted, classes=loss.classes)
        rows = rows.bind(loss, **settings, class_weights=config.class_weights)
        return rows, None if held is None else held.bind(loss, **settings)

    def _dry_run(self) -> None:
        """Call third-party losses and metrics on a few rows, to refuse unsuitable results before the first step."""
        loss, metrics = self.loss, [m for m in self.metrics if not (m.gathered or is_builtin(type(m)))]
        custom = isinstance(loss, CallableLoss) or not is_builtin(type(loss))
        if not custom and not metrics:
            return
        for rows in (self.rows, *([] if self.validation is None else [self.validation])):
            batch = next(iter(rows.chunks(min(DRY_RUN_ROWS, rows_at_a_time(self.model)))))
            with evaluation(self.model):
                output = outputs_of(self.model, self.model, batch.x, "fit")
            if custom:
                loss.dry_run(output, batch.y, batch.weight is not None)
            for metric in metrics:
                metric.dry_run(output.detach(), batch.y, batch.weight, loss)

    def _start(self) -> SolverRun:
        """Return the running solver; the fallback of `auto` if the first choice refuses the model."""
        try:
            return self._start_solver(self.chosen)
        except KapsiError as error:
            fallback = self.chosen.fallback
            if fallback is None:
                raise
            reason = f"quasi-Newton steps on all rows, since {error}"
            config = replace(self.chosen.config, solver=fallback, smoothness=self.chosen.config.fixed_smoothness)
            self.chosen = Resolved(config, self.loss, fallback, reason)
            return self._start_solver(self.chosen)

    def _start_solver(self, chosen: Resolved) -> SolverRun:
        model, group, solver = self.model, self.group, chosen.solver
        if group.sharded and not solver.distributed:
            able = " or ".join(kind.name for kind in catalogue("solver") if cast(Any, kind).distributed)
            raise SpecError(f"fit: {solver.name} needs the whole model on each process; use {able}, or strategy ddp")
        call = solver.prepare(model, group)
        task = Task(model, self.rows, self.loss, Penalties(model, chosen.config), chosen.config, group, call)
        run = solver.start(task) if is_builtin(type(solver)) else attempt(f"{solver.name}.start", solver.start, task)
        if not isinstance(run, SolverRun):
            raise SpecError(f"{solver.name}.start must return a SolverRun, got {type(run).__name__}")
        if run.at_once and chosen.reason == REQUESTED:
            check_at_once(chosen.config)
        return run

    # -------------------------------------------------------------------------------- the loop

    def epochs(self) -> Iterator[Epoch]:
        """Train, and yield a record after each epoch."""
        started = time.monotonic() - self.progress.seconds
        try:
            while self.progress.stop_reason is None:
                record = self._epoch(started)
                # The yielded model has the evaluated weights, and keeps them if no further epoch is requested.
                with self.solver.evaluating():
                    yield self._keep(record)
            self._finish()
        finally:
            self._cleanup()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _epoch(self, started: float) -> Epoch:
        progress, config, number = self.progress, self.chosen.config, self.progress.number + 1
        try:
            with threads_for(self._elements()), self.group.guard():
                if self.mover is not None:
                    self.mover.begin_epoch(progress, self.solver)
                self._steps(number, started)
        except NotFinite as error:
            self._raise(error)
        progress.seconds = time.monotonic() - started
        report = self.solver.report()
        if self.group.any(self.interrupted):
            progress.stop_reason = INTERRUPTED
            if self.recorder is not None:
                self.recorder.write_interrupt(self.solver, progress, self.best)
        elif self.group.any(self.cut_short):  # callbacks may differ between processes
            progress.stop_reason = CUT_SHORT
        validation_loss, metrics = self._evaluate(report.loss)
        measure = self._measure(report.loss if validation_loss is None else validation_loss, metrics)
        best = measure < progress.lowest
        stale = 0 if best else progress.stale_epochs + 1
        progress.stop_reason = progress.stop_reason or report.ended or self._limit(config, number, stale)
        never_finite = not (math.isfinite(measure) or math.isfinite(progress.lowest))
        if progress.stop_reason not in (None, INTERRUPTED) and validation_loss is not None and never_finite:
            self._raise_validation(measure)
        return Epoch(
            number,
            report.loss,
            validation_loss,
            best,
            metrics,
            progress.seconds,
            report.learning_rate,
            self.chosen.solver.name,
            self.chosen.reason,
            (report.details or {}) | progress.details,
            progress.stop_reason,
        )

    def _steps(self, number: int, started: float) -> None:
        """Take the steps of an epoch, up to an interrupt."""
        progress, length = self.progress, self.solver.length()
        for _ in self.solver.steps(number, progress.step):
            progress.step += 1
            progress.steps_taken += 1
            progress.seconds = time.monotonic() - started
            if self.callbacks.of_steps:
                record = Step(number, progress.step, length, self.solver.step_loss(), progress.seconds)
                self.cut_short |= self.callbacks.on_step(record)
            if self.recorder is not None and self.recorder.is_due(progress.steps_taken):
                self.recorder.write(self.solver, progress, self.best)
            if (self.interrupted or self.cut_short) and self.group.size == 1:
                break

    def _evaluate(self, loss: float) -> tuple[float | None, dict[str, float]]:
        """Return the validation loss and the metrics after an epoch; without validation rows, metrics of the training rows."""
        with self.solver.evaluating(), self.group.evaluating(self.model):
            if self.validation is not None:
                return evaluate(self.model, self.validation, self.loss, self.group, self.metrics)
            if self.chosen.config.metrics:
                return None, evaluate(self.model, self.rows, self.loss, self.group, self.metrics)[1]
        return None, self.loss.training_metrics(loss)

    def _measure(self, loss: float, metrics: dict[str, float]) -> float:
        """Return the monitored quantity, with lower values for better models."""
        if self.monitored is None:
            return loss
        value = metrics[self.monitored.name]
        return -value if self.monitored.greater_is_better else value

    def _limit(self, config: TrainConfig, number: int, stale: int) -> str | None:
        """Return the limit reached after `number` epochs, the last `stale` without improvement, or None."""
        if config.seconds is not None and self.group.any(self.progress.seconds >= config.seconds):
            return f"{config.seconds:g} seconds are over"
        if self.keeps_best and self.validation is not None and stale >= config.patience:
            return f"the validation {config.monitor} was no better for {config.patience} epochs"
        return ALL_EPOCHS if number >= config.epochs else None

    def _keep(self, record: Epoch) -> Epoch:
        """Record an epoch, and call the callbacks."""
        progress = self.progress
        progress.number, progress.step = record.number, 0
        progress.records.append(record)
        progress.stale_epochs = 0 if record.best else progress.stale_epochs + 1
        if record.best:
            loss = record.loss if record.validation_loss is None else record.validation_loss
            progress.lowest = self._measure(loss, record.metrics)
            if self.keeps_best:
                self.best = self._weights()
        if self.group.any(self.callbacks.on_epoch(record)) and progress.stop_reason is None:
            progress.stop_reason = STOPPED
            record = progress.records[-1] = record._replace(ended=STOPPED)
        return record

    # -------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Write the end of the run, and give the model its final weights."""
        if not self.progress.records:
            return
        if self.recorder is not None and self.progress.stop_reason != INTERRUPTED:
            self.recorder.finish(self.solver, self.progress, self.best)
        self._load_final_weights()
        if not self.resumed_finished:
            self.callbacks.on_end(self.progress.records)

    def _load_final_weights(self) -> None:
        with self.solver.evaluating():
            final = self._weights()
        # Without validation rows a complete last epoch counts.
        whole = self.validation is None and self.progress.stop_reason not in (INTERRUPTED, CUT_SHORT)
        self._load_weights(final if whole or not self.keeps_best else self.best)

    def _cleanup(self) -> None:
        """Leave a usable model behind, however the run ended."""
        if self.keeps_best and self.progress.stop_reason is None:  # an error, or a second interrupt
            self._load_weights(self.best)
        if self.chosen.solver.mini_batch:
            self.group.unwrap(self.model)
        if self.keeps_best:
            self.model.eval()

    def _raise(self, error: NotFinite) -> NoReturn:
        """Raise an error with the cause of a non-finite loss or gradient."""
        progress = self.progress
        text = self._diagnose(error.batch, error.statistic, progress.steps_taken + 1)
        if self.keeps_best and progress.records:  # diverged, perhaps from the first epoch on
            self._load_weights(self.first)
            with self.group.evaluating(self.model):
                rows = self.validation or self.rows
                measure = self._measure(*evaluate(self.model, rows, self.loss, self.group, self.metrics))
            # The mean over the steps of the first epoch may be the same loss, in another rounding.
            if not measure > progress.lowest + 1e-6 * abs(progress.lowest):
                self.best = self.first
        raise KapsiError(f"training stopped in epoch {progress.number + 1}: {text}") from None

    def _diagnose(self, batch: Any, statistic: str, step: int) -> str:
        return diagnose(self.model, batch, self.loss, statistic, step, mini_batch=self.chosen.solver.mini_batch)

    def _raise_validation(self, value: float) -> NoReturn:
        """Raise an error with the cause of a never finite validation loss, or monitored metric."""
        where, monitored = "", "validation loss"
        if self.monitored is not None:
            monitored = f"metric {self.monitored.name} of the validation rows"
            where = "; monitor the loss or another metric, or give other validation rows"
        elif self.group.size == 1:
            with self.solver.evaluating(), evaluation(self.model):
                for batch in cast(Rows, self.validation).chunks(rows_at_a_time(self.model)):
                    with torch.no_grad():
                        losses = self.loss.rows(outputs_of(self.model, self.model, batch.x, "fit"), batch.y)
                    if not bool(torch.isfinite(losses).all()):
                        where = f"; {self._diagnose(batch, 'loss', self.progress.steps_taken)}"
                        break
        self.progress.stop_reason = None  # the model gets back its initial weights
        number = self.progress.number + 1
        epochs = f"the {number} epochs" if number > 1 else "the only epoch"
        raise KapsiError(f"the {monitored} was {value:g} after {epochs}, and never finite{where}")

    def _elements(self) -> int:
        """Return the size of the arrays of a step, for a solver on all rows."""
        if self.chosen.solver.mini_batch or self.rows.count is None:
            return SMALL_ELEMENTS + 1
        return self.rows.count * widest(self.model)

    # -------------------------------------------------------------------------------- weights and checkpoints

    def _weights(self) -> dict[str, Tensor]:
        return {name: self.group.full_tensor(t.detach()).clone() for name, t in tensors_of(self.model).items()}

    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in tensors_of(self.model).items():
            self.group.assign(tensor, weights[name])

    def _resume(self, recorder: Recorder) -> None:
        """Continue from the last whole checkpoint, if there is one."""
        saved = recorder.latest()
        if saved is None:
            return
        parts = recorder.parts(saved)
        self._load_weights(parts["model"])
        self.solver.restore((parts["solver"], saved.data["solver"]))
        if self.keeps_best:
            self.best = parts["best"]
        self.progress, limits = recorder.position(saved)
        progress, config = self.progress, self.chosen.config
        number, stale = progress.number, progress.stale_epochs
        before, stopped = replace(config, **limits), progress.stop_reason in (STOPPED, CUT_SHORT)
        if stopped and self.callbacks.any and config == before:
            recorder.checkpoints.say(
                f"the run ended in epoch {number}: {progress.stop_reason}; to continue, leave callbacks out or raise epochs"
            )
        elif stopped:
            progress.stop_reason = None
        # Limits may have changed; an unfinished epoch is completed first, unless there are too many already.
        if progress.stop_reason is None or progress.stop_reason == self._limit(before, number, stale):
            limit = self._limit(config, number, stale)
            progress.stop_reason = limit if not progress.step or limit == ALL_EPOCHS else None
        if progress.stop_reason is None and progress.records:
            progress.records[-1] = progress.records[-1]._replace(ended=None)
        if progress.stop_reason is not None:
            self._load_final_weights()
            self.resumed_finished = True

    # -------------------------------------------------------------------------------- interrupts

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first interrupt end training after the step; the second raises an exception, as always."""
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
