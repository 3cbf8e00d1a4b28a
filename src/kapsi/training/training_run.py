"""A training run: epochs of a solver, records, early stopping, best weights restored, checkpoints, interrupts."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn

from kapsi.errors import KapsiError, SpecError, attempt
from kapsi.function import catalogue
from kapsi.modules import Model
from kapsi.training.callbacks import Callbacks
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig, is_builtin
from kapsi.training.data import Rows, make_rows
from kapsi.training.diagnosis import diagnose
from kapsi.training.distributed import Group
from kapsi.training.grid_updates import grid_mover
from kapsi.training.losses.base import CallableLoss, Loss
from kapsi.training.metrics import default_metrics
from kapsi.training.penalties import Penalties
from kapsi.training.prediction import evaluate, evaluation, outputs_of, rows_at_a_time, widest
from kapsi.training.records import Epoch, Step
from kapsi.training.resolve import REQUESTED, Resolved, check_at_once, resolve, resolve_loss
from kapsi.training.resume import Progress, Recorder, tensors_of
from kapsi.training.scaling import check_rounding, check_scale, standardize_model
from kapsi.training.solvers import NotFinite, SolverRun, Task
from kapsi.training.threads import SMALL_ELEMENTS, threads_for
from kapsi.training.training_checks import check_effects, check_metrics, check_model, count_outputs, expect

INTERRUPTED = "interrupted"
STOPPED = "stopped by a callback"
CUT_SHORT = "stopped by a callback during the epoch"
ALL_EPOCHS = "all epochs are over"

DRY_RUN_ROWS = 50
"""Rows of the first call of third-party losses and metrics."""


class TrainingRun:
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
        like = check_model(model)
        check_effects(config, validation is not None, keeps_best)
        expect(checkpoints, Checkpoints | None, "kapsi.Checkpoints(folder) as checkpoints")
        expect(self.group, Group, "a group from kapsi.open_group")
        self.callbacks = Callbacks(callbacks)
        self.rows, self.validation = self._bind(data, validation, config, like)
        if config.standardize:
            standardize_model(model, self.rows, resolve_loss(config.loss, self.rows.classes))
        self.chosen = resolve(config, model, self.rows, group=self.group)
        self.metrics = config.metrics or default_metrics(self.loss)
        self.monitored = check_metrics(self.metrics, config.monitor, self.loss, self.outputs)
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
        self.outputs: int = cast(int, model.out_features) if known else count_outputs(model, rows, like.dtype, device)
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
