"""The cause of a non-finite loss or gradient, in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kapsi.modules import Head, Store
from kapsi.training.losses import Loss
from kapsi.training.prediction import with_columns
from kapsi.training.rows.base import Batch

MAX_ELEMENTS = 2**24
"""Largest number of elements of κ(x) to form; of larger ones only rows with non-finite outputs, as many as fit."""

MAX_NAMES = 3
"""Number of parameters whose gradients are reported in full."""

SMALLER_STEPS = "lower learning_rate, set max_grad_norm, or "
STEADIER = f"{SMALLER_STEPS}scale the inputs"
SCALED = "scale the inputs, or set the range of κ by kapsi.calibrate"
CLEANED = "remove or correct these rows"
SMALLER_AGAIN = ", with a lower learning_rate or max_grad_norm"
FRESH = f"start again from finite weights{SMALLER_AGAIN}"


class _Found(Exception):
    """Ends a forward pass at the first non-finite tensor."""

    def __init__(self, location: str, advice: str) -> None:
        super().__init__(location)
        self.location, self.advice = location, advice


def diagnose(model: nn.Module, batch: Batch, loss: Loss, statistic: str, step: int, *, mini_batch: bool = True) -> str:
    """Return the cause of a non-finite loss or gradient in one line; never raise.

    The rows go through the model once more. The report names the first non-finite tensor of the forward pass: inputs, κ(x), a
    tensor of κ, ψ or π, the output of a head, a layer or another module, the loss per row; if all are finite, the gradients of
    parameters, from the output backward. The mode of the model, buffers, gradients and random generators stay unchanged.

    Args:
        model: any module from inputs to outputs, with the weights before the step.
        batch: the rows.
        loss: the per-row loss function.
        statistic: the non-finite quantity: `loss`, `gradient` or `output`.
        step: number of the step.
        mini_batch: whether the solver has a learning rate and a largest norm of gradients.

    Example:
        >>> import kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 1]), seed=0)
        >>> batch = Batch(torch.tensor([[1.0, 2.0], [3.0, torch.nan]]), torch.zeros(2), None, 2)
        >>> diagnose(model, batch, kp.MSE(), "loss", 7)
        'step 7: the inputs are not finite (1 of 4 values is nan, the largest finite is 3); remove or correct these rows'
    """
    try:
        with _unchanged(model), torch.enable_grad():
            text = f"step {step}: {_cause(model, batch, loss, statistic)}"
    except Exception as error:
        # A failure of the model must not hide the cause from the user.
        reason = f"{type(error).__name__} in the search for the cause: {' '.join(str(error).split())[:200]}"
        text = f"step {step}: the {statistic} is not finite ({reason}); {STEADIER}"
    if not mini_batch:
        text = text.replace(SMALLER_STEPS, "").replace(SMALLER_AGAIN, "")
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return f"{text}; the model is in {dtype}, train in torch.float32" if dtype.itemsize < 4 else text


def _cause(model: nn.Module, batch: Batch, loss: Loss, statistic: str) -> str:
    """Return the sentence on the first non-finite tensor."""
    if not len(batch.y):
        return f"the {statistic} is not finite, but not because of rows of this process; {STEADIER}"
    targets = batch.y.masked_fill(batch.y.isnan(), 0) if loss.skips_missing else batch.y
    for part, tensor in (("inputs", batch.x), ("targets", targets), ("weights of the rows", batch.weight)):
        if tensor is not None and not _finite(tensor):
            return f"the {part} are not finite ({_count(tensor)}); {CLEANED}"
    hooks = [
        module.register_forward_hook(_Watch(model, name, module), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        output = with_columns(model(batch.x), len(batch.x))
    except _Found as found:
        return f"{found.location}; {_lossless(statistic)}{found.advice}"
    finally:
        for hook in hooks:
            hook.remove()
    losses = loss.rows(output, batch.y)
    if batch.weight is not None:
        losses = losses * batch.weight
    if not _finite(losses):
        most = f"outputs are up to {float(output.detach().abs().max()):.3g} in size"
        return f"the {loss.name} losses of the rows are not finite ({_count(losses)}), while {most}; {STEADIER}"
    mean = losses.sum() / len(batch.y)
    if not _finite(mean):
        largest = f"the largest per row is {float(losses.detach().max()):.3g}"
        return f"the sum of the {loss.name} losses is not finite, {largest}; {STEADIER}"
    return _of_gradients(model, mean, statistic)


def _lossless(statistic: str) -> str:
    return "" if statistic == "output" else f"so is the {statistic}; "


# ------------------------------------------------------------------------------------------------ the forward pass


class _Watch:
    """A hook that checks the output of a module, and ends the pass at the first non-finite tensor."""

    def __init__(self, model: nn.Module, name: str, module: nn.Module) -> None:
        self.model, self.name = model, name or type(module).__name__
        self.prefix = f"{name}." if name else ""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        bad = [tensor for tensor in _tensors(output) if not _finite(tensor)]
        if not bad:
            return
        # Operations between two modules are reported as the input of the second module.
        for tensor in _tensors((args, kwargs)):
            if not _finite(tensor):
                raise _Found(f"an input of {self.name} is not finite ({_count(tensor)})", STEADIER)
        if isinstance(module, Head):
            self._look_inside(module, args, bad[0])
        else:
            self._look_at_tensors(module, self.prefix)
        raise _Found(f"the output of {self.name} is not finite ({_count(bad[0])})", STEADIER)

    def _look_at_tensors(self, module: nn.Module, prefix: str, *, inside: bool = False) -> None:
        tensors = [*module.named_parameters(recurse=inside), *module.named_buffers(recurse=inside)]
        for name, tensor in tensors:
            if not _finite(tensor):
                raise _Found(f"{prefix}{name} is not finite ({_count(tensor)})", FRESH)

    def _look_inside(self, head: Head, args: tuple[Any, ...], output: Tensor) -> None:
        owner = head._owner[0] if head._owner else head
        owned = next((name for name, module in self.model.named_modules() if module is owner), self.name)
        self._look_at_tensors(owner.kappa, f"{owned}.kappa." if owned else "kappa.", inside=True)
        self._look_at_columns(head, args[0] if args else None, output)
        for name in ("psi", "pi"):
            store: Store = getattr(head, name)
            self._look_at_tensors(store, f"{self.prefix}{name}.", inside=True)
        self._look_at_tensors(head, self.prefix)

    def _look_at_columns(self, head: Head, x: Any, output: Tensor) -> None:
        """Check κ(x), if small enough to be materialized."""
        columns = head.factors[0] * head.factors[1]
        if not isinstance(x, Tensor) or columns > MAX_ELEMENTS:
            return
        with torch.no_grad():
            most = MAX_ELEMENTS // columns
            if x.numel() // max(1, x.shape[-1]) > most:
                if x.layout != torch.strided or x.dim() != 2:
                    return
                x = x[~torch.isfinite(output).all(-1)][:most]
            try:
                with _unwatched(head):
                    values = head.expand(x).dense()
            except (
                RuntimeError,
                ValueError,
            ):  # a batch norm that needs more rows, for instance; the output is reported instead
                return
        if not _finite(values):
            raise _Found(f"κ(x) of {self.name}, {head.spec.expansion}, is not finite ({_count(values)})", SCALED)


@contextmanager
def _unwatched(head: Head) -> Iterator[None]:
    """Run the modules before and after κ without their hooks: their outputs have been checked."""
    owner = head._owner[0] if head._owner else head
    modules = [*owner.before.modules(), *owner.after.modules()]
    hooks = [module._forward_hooks for module in modules]
    for module in modules:
        module._forward_hooks = type(module._forward_hooks)()
    try:
        yield
    finally:
        for module, original in zip(modules, hooks, strict=True):
            module._forward_hooks = original


# ------------------------------------------------------------------------------------------------ the backward pass


def _of_gradients(model: nn.Module, mean: Tensor, statistic: str) -> str:
    """Return the sentence on gradients: the stored ones if any, otherwise the gradients of the mean loss of the rows."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    was = f"the loss was {float(mean.detach()):.3g}"
    largest = ""
    for there in (True, False):
        if there:
            gradients = [p.grad for _, p in named]
        elif any(hasattr(p, "to_local") for _, p in named):  # all processes would have to participate
            break
        else:
            # Not by backward(), whose hooks would exchange gradients between processes.
            gradients = list(torch.autograd.grad(mean, [p for _, p in named], allow_unused=True))
        pairs = [(name, _local(g)) for (name, _), g in zip(named, gradients, strict=True) if g is not None]
        pairs = [(name, g) for name, g in pairs if g.numel()]
        bad = [(name, g) for name, g in pairs if not _finite(g)][::-1]  # from the output backward
        if bad:
            shown = "; ".join(f"the gradient of {name} is not finite ({_count(g)})" for name, g in bad[:MAX_NAMES])
            more = f"; and {len(bad) - MAX_NAMES} more" if len(bad) > MAX_NAMES else ""
            return f"{shown}{more}; {was}; {STEADIER}"
        if not pairs or statistic != "gradient":
            continue
        most, name = max((float(g.abs().max()), name) for name, g in pairs)
        largest = f"; the largest gradient is {most:.3g}, of {name}"
        if sum(float(g.double().square().sum()) for _, g in pairs) > min(torch.finfo(p.dtype).max for _, p in named):
            return f"the norm of the gradient is not finite, as its square is too large{largest}; {was}; {STEADIER}"
    others = "possible causes are a penalty, rows of another process, or 16-bit precision"
    return f"the {statistic} is not finite, but it is finite when these rows are run again: {others}; {was}{largest}; {STEADIER}"


# ------------------------------------------------------------------------------------------------ values


def _local(tensor: Tensor) -> Tensor:
    """Return the stored values of a sparse tensor, and the part of this process of a divided tensor."""
    part: Any = getattr(tensor, "to_local", None)
    tensor = (tensor if part is None else part()).detach()
    return tensor if tensor.layout == torch.strided else tensor.values()


def _finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(_local(tensor)).all())


def _count(tensor: Tensor) -> str:
    """Return a description of the counts of NaN and infinite values and the largest finite value."""
    values = _local(tensor)
    finite = torch.isfinite(values)
    nan, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    counts = [f"{n:,} {{}}{word}" for n, word in ((nan, "nan"), (infinite, "infinite")) if n]
    first = counts[0].format(f"of {values.numel():,} values {'is' if (nan or infinite) == 1 else 'are'} ")
    shown = " and ".join([first, *(text.format("") for text in counts[1:])])
    largest = (
        f"the largest finite is {float(values[finite].abs().max()):.3g}" if bool(finite.any()) else "none is finite"
    )
    return f"{shown}, {largest}"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the inputs or outputs of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random generators afterwards."""
    saved = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, values in saved:
                    buffer.copy_(values)
                    module._buffers[name] = buffer
