"""Predictions of a model: outputs, decisions, probabilities, and the loss on some rows."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kapsi.errors import DataError, KapsiError, ScaleWarning, SpecError, check_integer, refuse
from kapsi.function import coerce
from kapsi.modules import Head, Model
from kapsi.training.data import Rows
from kapsi.training.distributed import Group
from kapsi.training.losses import Loss
from kapsi.training.metrics import Metric, default_metrics
from kapsi.training.rows.base import bad_row, row_label
from kapsi.training.rows.stored import as_column

LossLike: TypeAlias = Loss | str | Mapping[str, Any]
"""A loss, a name, or options with a kind."""

MAX_ROWS = 65_536
MAX_ELEMENTS = 2**26
"""Largest number of elements of κ(x) in a forward pass: 256 MiB in float32."""


def widest(model: nn.Module) -> int:
    """Return the number of columns of the widest κ of a model, 1 for a model without any."""
    return max((math.prod(head.factors) for head in model.modules() if isinstance(head, Head)), default=1)


def rows_at_a_time(model: nn.Module) -> int:
    """Return the number of rows of a forward pass."""
    return max(1, min(MAX_ROWS, MAX_ELEMENTS // widest(model)))


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # train() may do more than change the mode
        for module, training in modes:
            module.training = training


def outputs_of(call: Callable[..., Any], model: nn.Module, x: Tensor, where: str) -> Any:
    """Return the outputs of a model, `(rows, n)`: values `(rows,)` get an axis of columns. See `call_model`."""
    return with_columns(call_model(call, model, x, where), len(x))


def with_columns(output: Any, rows: int) -> Any:
    """Return outputs `(rows,)` as `(rows, 1)`, and all others unchanged."""
    flat = isinstance(output, Tensor) and output.dim() < 2 and output.numel() == rows
    return output.reshape(rows, 1) if flat else output


def call_model(call: Callable[..., Any], model: nn.Module, x: Tensor, where: str) -> Any:
    """Return the result of a model; turn torch errors into one line.

    Args:
        call: the model, or a compiled or wrapped form.
        model: the model.
        x: inputs.
        where: prefix of error messages.

    Raises:
        SpecError: the model fails.
    """
    try:
        return call(x)
    except (KapsiError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SpecError(
            f"{where}: {type(model).__name__} cannot take inputs of shape {tuple(x.shape)} and type {x.dtype}: {reason}"
        ) from error


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: Rows, loss: Loss, group: Group | None = None, metrics: Sequence[Metric] | None = None
) -> tuple[float, dict[str, float]]:
    """Return the weighted mean loss of all rows and their metrics, in evaluation mode; each row counts once, on one process.

    Args:
        model: maps `(rows, m)` to `(rows, n)`.
        rows: rows bound to the loss.
        loss: the per-row loss function.
        group: the processes with the rows.
        metrics: default metrics of the loss if None.
    """
    group = Group() if group is None else group
    metrics = default_metrics(loss) if metrics is None else metrics
    added = [metric for metric in metrics if not metric.gathered]
    gathered = [metric for metric in metrics if metric.gathered]
    parts: list[Tensor] | None = None
    whole: list[tuple[Tensor, Tensor, Tensor]] = []
    with evaluation(model):
        for batch in rows.chunks(rows_at_a_time(model), rank=group.rank, ranks=group.size):
            output = outputs_of(model, model, batch.x, "fit")
            losses = loss.rows(output, batch.y).double()
            weight = torch.ones_like(losses) if batch.weight is None else batch.weight.double()
            observed = loss.observed(batch.y)
            mass = weight.sum() if observed is None else weight @ observed
            sums = [torch.stack([losses.sum() if batch.weight is None else losses @ weight, mass])]
            sums += [metric.sums(output, batch.y, batch.weight, loss).to(losses.device) for metric in added]
            parts = sums if parts is None else [a + b for a, b in zip(parts, sums, strict=True)]
            if gathered:
                whole.append((output, batch.y, weight))
    if group.size > 1:
        parts = _summed(parts, len(added) + 1, next(model.parameters()).device, group)
    if parts is None:
        raise DataError("evaluate: there are no rows")
    total, count = parts[0].tolist()
    values = {metric.name: metric.value(sums.tolist()) for metric, sums in zip(added, parts[1:], strict=True)}
    if gathered:
        if not whole:  # a process without rows
            batch = next(iter(rows.chunks(1)))
            output = outputs_of(model, model, batch.x, "fit")[:0]
            whole.append((output, batch.y[:0], torch.zeros(0, dtype=torch.float64, device=output.device)))
        output, target, weight = (_gathered(list(pieces), group) for pieces in zip(*whole, strict=True))
        values |= {m.name: m.value(m.sums(output, target, weight, loss).tolist()) for m in gathered}
    return total / count, {metric.name: values[metric.name] for metric in metrics}


def _summed(parts: list[Tensor] | None, count: int, device: torch.device, group: Group) -> list[Tensor]:
    """Return vectors summed over the processes; None stands for a process without rows."""
    lengths = [int(group.max(0 if parts is None else len(parts[i]))) for i in range(count)]
    zeros = torch.zeros(sum(lengths), dtype=torch.float64, device=device)
    return list(group.sum(zeros if parts is None else torch.cat(parts)).split(lengths))


def _gathered(pieces: list[Tensor], group: Group) -> Tensor:
    """Return the rows of all processes, in the order of the processes."""
    local = torch.cat(pieces)
    if group.size == 1:
        return local
    counts = torch.zeros(group.size, dtype=torch.float64, device=local.device)
    counts[group.rank] = len(local)
    begins = [0, *group.sum(counts).cumsum(0).long().tolist()]
    # float64 holds integer class labels and outputs exactly.
    rows = torch.zeros(begins[-1], *local.shape[1:], dtype=torch.float64, device=local.device)
    rows[begins[group.rank] : begins[group.rank + 1]] = local.double()
    return group.sum(rows).to(local.dtype)


@torch.no_grad()
def _outputs(model: nn.Module, x: Any, loss: Loss | None, where: str, batch_size: int | None) -> Tensor:
    if not isinstance(model, nn.Module):
        refuse(where, "a model", model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SpecError(f"{where}: the model is on the meta device and has no values")
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.empty(0))
    if batch_size is not None:
        check_integer(f"{where}(batch_size={batch_size!r})", batch_size, 1)
    rows = as_column(x, "inputs", where)
    if len(rows.shape) < 2:
        raise SpecError(
            f"{where}: expected inputs of shape (rows, m), got {tuple(rows.shape)}; of one row, use x[None]"
        )
    size = rows_at_a_time(model) if batch_size is None else batch_size
    parts: list[Tensor] = []
    with evaluation(model):
        for begin in range(0, max(1, len(rows)), size):  # one empty part if there are no rows
            part = rows.cut(begin, min(begin + size, len(rows)))
            run = call_model if loss is None else outputs_of
            dtype = model.input_dtype(part.dtype) if isinstance(model, Model) else like.dtype
            inputs = _cast_inputs(part, dtype, begin, where).to(like.device)
            output = run(model, model, inputs, where)
            if not isinstance(output, Tensor) or (loss is not None and output.dim() != 2):
                given = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
                raise SpecError(f"{where}: the model must map (rows, m) to (rows, n), it returned {given}")
            if loss is not None and not parts:
                loss.check_outputs(output.shape[1], where)
            _check_outputs(output, inputs, begin, where)
            parts.append(output)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cast_inputs(part: Tensor, dtype: torch.dtype, begin: int, where: str) -> Tensor:
    """Return inputs in the type of a model.

    Raises:
        DataError: a finite value beyond the range of the type.
    """
    inputs = part.to(dtype)
    row = bad_row(inputs) if part.dtype != dtype else None
    if row is None:
        return inputs
    dense = part.to_dense() if part.layout != torch.strided else part
    lost = (dense.isfinite() & ~dense.to(dtype).isfinite()).flatten(1).nonzero()
    if len(lost):
        row, column = lost[0].tolist()
        value = dense.flatten(1)[row, column].item()
        raise DataError(
            f"{where}: column {column} of {row_label(row + begin)} is {value:.3g}, beyond the range of {dtype}; scale the inputs, "
            "or use a model in float64"
        )
    return inputs


def _check_outputs(output: Tensor, inputs: Tensor, begin: int, where: str) -> None:
    """Warn of outputs that are not finite although the inputs are."""
    if bad_row(output) is None or output.shape[:1] != inputs.shape[:1]:
        return
    given = inputs.to_dense() if inputs.layout != torch.strided else inputs
    bad = given.flatten(1).isfinite().all(1) & ~output.flatten(1).isfinite().all(1)
    if bool(bad.any()):
        name = row_label(begin + int(bad.nonzero()[0]))
        warnings.warn(
            f"{where}: the outputs of {name} are not finite, the inputs are; scale the inputs, or use a model in float64",
            ScaleWarning,
            stacklevel=4,
        )


def predict(model: nn.Module, x: Any, loss: LossLike | None = None, *, batch_size: int | None = None) -> Tensor:
    """Return the predictions of a model, in evaluation mode and in batches.

    Args:
        model: maps `(rows, m)` to `(rows, n)`.
        x: inputs, `(rows, m)`: a tensor, an array, a data frame, a sparse matrix or a memory map.
        loss: the loss of training, by name or as an object: integer class labels `(rows,)` for `cross_entropy`, `hinge`,
            `squared_hinge` and `bernoulli` with one output (0 or 1 for each of several), means for `gaussian`. None: the
            outputs, as for `mse` and `huber`.
        batch_size: number of rows at a time, by default as many as memory allows.

    Returns:
        Predictions `(rows,)` or `(rows, n)`, in the order of the rows.

    Raises:
        SpecError: the model cannot take the inputs.
        DataError: no rows, values beyond the dtype of the model, or outputs that are NaN for a loss of classes.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 3]), seed=0)
        >>> kp.predict(model, torch.ones(4, 2)).shape, kp.predict(model, torch.ones(4, 2), "cross_entropy").shape
        (torch.Size([4, 3]), torch.Size([4]))
    """
    kind = None if loss is None else coerce(Loss, loss, "predict: loss")
    output = _outputs(model, x, kind, "predict", batch_size)
    if kind is None:
        return output
    if (kind.classes or kind.discrete) and bool(output.isnan().any()):
        name = row_label(int(output.isnan().any(1).nonzero()[0]))
        raise DataError(
            f"predict: the outputs of {name} are not numbers, so {kind.name} has no class; look for NaN in its inputs"
        )
    return kind.decide(output)


def predict_log_proba(
    model: nn.Module, x: Any, loss: LossLike = "cross_entropy", *, batch_size: int | None = None
) -> Tensor:
    """Return the log-probabilities of the classes, computed from the logits of a model.

    Args:
        model, x, batch_size: see `predict`.
        loss: `cross_entropy`, or `bernoulli`: two columns for one output; for several outputs the log-probabilities of 1.

    Returns:
        Log-probabilities `(rows, classes)`, accurate also if a probability rounds to 0 or 1.

    Raises:
        SpecError: the loss has no probabilities.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 1]), seed=0)
        >>> kp.predict_log_proba(model, torch.zeros(1, 2), "bernoulli").exp()
        tensor([[0.5000, 0.5000]])
    """
    return _log_probabilities(model, x, loss, "predict_log_proba", batch_size)


def predict_proba(
    model: nn.Module, x: Any, loss: LossLike = "cross_entropy", *, batch_size: int | None = None
) -> Tensor:
    """Return the probabilities of the classes, computed from the logits of a model.

    Args:
        model, x, batch_size: see `predict`.
        loss: see `predict_log_proba`.

    Returns:
        Probabilities `(rows, classes)`.

    Raises:
        SpecError: the loss has no probabilities.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 3]), seed=0)
        >>> kp.predict_proba(model, torch.ones(4, 2)).sum(1)
        tensor([1., 1., 1., 1.])
    """
    return _log_probabilities(model, x, loss, "predict_proba", batch_size).exp()


def _log_probabilities(model: nn.Module, x: Any, loss: LossLike, where: str, batch_size: int | None) -> Tensor:
    kind: Loss = coerce(Loss, loss, f"{where}: loss")
    kind.log_probabilities(torch.zeros(0, 2))  # raises before the forward pass if the loss has no probabilities
    return kind.log_probabilities(_outputs(model, x, kind, where, batch_size))
