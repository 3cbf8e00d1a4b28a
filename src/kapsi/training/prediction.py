"""What a trained model says: outputs, decisions and probabilities of rows, and its loss on them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kapsi.errors import KapsiError, SpecError
from kapsi.modules import Head
from kapsi.training.data import Rows
from kapsi.training.distributed import Group
from kapsi.training.losses import Loss, make_loss
from kapsi.training.rows.stored import column_of

__all__ = ["evaluate", "evaluation", "outputs_of", "predict", "predict_log_proba", "predict_proba", "rows_at_a_time"]

MOST_ROWS = 65_536
MOST_ELEMENTS = 2**26
"""Elements of κ(x) of the rows that go through a model at a time: 256 MiB in float32."""


def widest(model: nn.Module) -> int:
    """Return the number of columns of the widest κ of a model, 1 for a model without any."""
    return max((math.prod(head.factors) for head in model.modules() if isinstance(head, Head)), default=1)


def rows_at_a_time(model: nn.Module) -> int:
    """Return how many rows go through a model at a time."""
    return max(1, min(MOST_ROWS, MOST_ELEMENTS // widest(model)))


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode, and each of its modules in its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # a module may do more than change its mode
        for module, training in modes:
            module.training = training


def outputs_of(call: Callable[..., Any], model: nn.Module, x: Tensor, where: str) -> Any:
    """Return what a model makes of some rows; what torch says of rows that it cannot take becomes one line.

    Args:
        call: the model, or what was compiled or wrapped of it.
        model: the model.
        x: inputs.
        where: begins the message.

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
def evaluate(model: nn.Module, rows: Rows, loss: Loss, group: Group | None = None) -> tuple[float, dict[str, float]]:
    """Return the weighted mean loss of all rows and their metrics, in evaluation mode; each row counts once, on one process."""
    group = Group() if group is None else group
    sums: Tensor | None = None
    with evaluation(model):
        for batch in rows.chunks(rows_at_a_time(model), rank=group.rank, ranks=group.size):
            output = outputs_of(model, model, batch.x, "fit")
            losses = loss.rows(output, batch.y).double()
            total = losses.sum() if batch.weight is None else losses @ batch.weight.double()
            part = torch.cat([total.reshape(1), loss.tally(output, batch.y, batch.weight)])
            sums = part if sums is None else sums + part
    if group.size > 1:
        # A process without rows does not know how many sums there are.
        length = int(group.largest(0 if sums is None else len(sums)))
        like = next(model.parameters())
        sums = group.sum(torch.zeros(length, dtype=torch.float64, device=like.device) if sums is None else sums)
    if sums is None:
        raise SpecError("evaluate: there are no rows")
    return float(sums[0] / sums[1]), loss.metrics(sums[1:])


@torch.no_grad()
def _outputs(model: nn.Module, x: Any, loss: Loss | None, where: str, batch_size: int | None) -> Tensor:
    if not isinstance(model, nn.Module):
        raise SpecError(f"{where}: expected a model, got {type(model).__name__}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SpecError(f"{where}: the model is on the meta device and has no values")
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.empty(0))
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise SpecError(f"{where}(batch_size={batch_size!r}): expected an integer of at least 1")
    rows = column_of(x, "inputs", where)
    if len(rows.shape) < 2:
        raise SpecError(
            f"{where}: expected inputs of shape (rows, m), got {tuple(rows.shape)}; of one row, use x[None]"
        )
    size = rows_at_a_time(model) if batch_size is None else batch_size
    parts: list[Tensor] = []
    with evaluation(model):
        for begin in range(0, max(1, len(rows)), size):  # no rows are one empty part
            part = rows.cut(begin, min(begin + size, len(rows)))
            if isinstance(x, Tensor) and part.dtype != like.dtype:
                raise SpecError(f"{where}: the inputs are {part.dtype} and the model {like.dtype}; they must agree")
            output = outputs_of(model, model, part.to(like.device, like.dtype), where)
            if not isinstance(output, Tensor) or (loss is not None and output.dim() != 2):
                given = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
                raise SpecError(f"{where}: the model must map (rows, m) to (rows, n), it returned {given}")
            if loss is not None and not parts:
                loss.check_outputs(output.shape[1], where)
            parts.append(output)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def predict(model: nn.Module, x: Any, loss: str | None = None, *, batch_size: int | None = None) -> Tensor:
    """Return what a model predicts for some rows, in evaluation mode and in batches.

    Args:
        model: maps `(rows, m)` to `(rows, n)`.
        x: inputs, `(rows, m)`: a tensor, an array, a sparse matrix or a memory map.
        loss: the name of the loss that it was trained with: class numbers `(rows,)` for `cross_entropy`, `hinge`,
            `squared_hinge` and `bernoulli` with one output (0 and 1 for each of several), means for `gaussian`. None: outputs
            as they are, as for `mse` and `huber`.
        batch_size: rows at a time; as memory allows by default.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 3]), seed=0)
        >>> kp.predict(model, torch.ones(4, 2)).shape, kp.predict(model, torch.ones(4, 2), "cross_entropy").shape
        (torch.Size([4, 3]), torch.Size([4]))
    """
    kind = None if loss is None else make_loss(loss)
    output = _outputs(model, x, kind, "predict", batch_size)
    return output if kind is None else kind.decide(output)


def predict_log_proba(
    model: nn.Module, x: Any, loss: str = "cross_entropy", *, batch_size: int | None = None
) -> Tensor:
    """Return the log-probabilities of the classes, `(rows, classes)`, from a model's logits.

    Args:
        model, x, batch_size: as for `predict`.
        loss: `cross_entropy`, or `bernoulli`: two columns for one output; for several outputs a column each, of a one.

    Raises:
        SpecError: the loss has no probabilities.
    """
    return _log_probabilities(model, x, loss, "predict_log_proba", batch_size)


def predict_proba(model: nn.Module, x: Any, loss: str = "cross_entropy", *, batch_size: int | None = None) -> Tensor:
    """Return the probabilities of the classes, `(rows, classes)`, from a model's logits; as `predict_log_proba`.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 3]), seed=0)
        >>> kp.predict_proba(model, torch.ones(4, 2)).sum(1)
        tensor([1., 1., 1., 1.])
    """
    return _log_probabilities(model, x, loss, "predict_proba", batch_size).exp()


def _log_probabilities(model: nn.Module, x: Any, loss: str, where: str, batch_size: int | None) -> Tensor:
    kind = make_loss(loss)
    kind.log_probabilities(torch.zeros(0, 2))  # a loss that has none says so before all rows go through the model
    return kind.log_probabilities(_outputs(model, x, kind, where, batch_size))
