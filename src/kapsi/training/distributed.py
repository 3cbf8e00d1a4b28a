"""Groups of processes: a single process, several with a copy of the model each, or several with a shard of the model each."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.modules import Layer

Plain = TypeVar("Plain")


class GroupError(KapsiError):
    """Another process of the group has ended or does not answer."""


def is_lost(error: RuntimeError) -> bool:
    """Return whether a torch error reports a lost process; Gloo has no separate class for it."""
    known = isinstance(error, torch.distributed.DistError)
    return known or any(
        word in str(error).lower() for word in ("gloo", "connection closed", "connection reset", "nccl")
    )


class Group:
    """A single process, and the interface of groups of processes.

    All processes call the methods in the same order. Every method except `wrap`, `accumulating`, `assign` and `close` waits for
    the other processes.

    Attributes:
        rank: index of this process, from 0.
        size: number of processes.
        sharded: whether `wrap` shards the parameters; each process then holds a part of every parameter, a `DTensor`.
        device: device of the model and its batches; None for the device of the model.
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False
    device: torch.device | None = None

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    # ------------------------------------------------------------------------------------------- the model

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        """Prepare a model for training in place, and return the callable for its forward pass.

        All processes start with the parameters and buffers of the first process. Call it before creating an optimizer: the
        parameters may be new tensors. Gradients after `backward` are means over the processes, so each process scales the
        loss of its rows by `size`. Processes without rows call the model with an empty batch.

        Batch norms use the statistics of all processes, as a single process would; torch offers this for CUDA only.

        Raises:
            SpecError: the model cannot be replicated or sharded.
        """
        return cast("Callable[..., Tensor]", model if self.device is None else model.to(self.device))

    def unwrap(self, model: nn.Module) -> None:
        """Undo `wrap`: restore the model's original, whole parameters with their current values."""

    def accumulating(self, call: Callable[..., Tensor], on: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for forward and backward passes; with `on=True` gradients add up locally without communication.

        The passes of the last part of a batch use `on=False` and exchange the sum.
        """
        return contextlib.nullcontext()

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context with whole parameters, for any number of forward passes without communication.

        Parameters must not change inside the context.
        """
        return contextlib.nullcontext()

    # ------------------------------------------------------------------------------------------- tensors

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor, sharded or not, differentiable; the gradient must be equal on all processes."""
        return tensor

    def assign(self, target: Tensor, value: Tensor) -> None:
        """Copy a whole tensor into a parameter or an optimizer state, sharded or not."""
        with torch.no_grad():
            target.copy_(value)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the Euclidean norm of gradients, sharded or not; bitwise identical on all processes."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors)))) if tensors else torch.zeros(())

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, bitwise identical on each; the input is unchanged."""
        return tensor

    # ------------------------------------------------------------------------------------------- plain values

    def max(self, number: float) -> float:
        """Return the maximum of a number over all processes; NaN if any number is NaN."""
        return number

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any process, such as an interrupt."""
        return flag

    def broadcast(self, value: Plain) -> Plain:
        """Return the value of the first process, made of numbers, strings, lists and dictionaries."""
        return value

    def barrier(self) -> None:
        """Wait for all processes."""

    # ------------------------------------------------------------------------------------------- the end

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Return a context converting torch's errors about a lost process, as in a backward pass, into a `GroupError`."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Release wrapped models without waiting for other processes, so that a failed process can end."""

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.barrier()
        finally:
            self.close()


class Replicated(Group):
    """Processes with a copy of the model each, averaging their gradients (DistributedDataParallel)."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        super().__init__(device)
        self.timeout = timeout
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._undo: list[tuple[nn.Module, Callable[[], None]]] = []

    # ------------------------------------------------------------------------------------------- the model

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SpecError("strategy='ddp': the model has no parameter to train")
        self._prepare(model)
        # Buffers are equal: their updates in training depend on the rows of all processes.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        # Without a stated size the first bucket would be of one megabyte.
        options: dict[str, Any] = {buffers: False, "bucket_cap_mb": 25}
        with self.guard():
            wrapped = nn.parallel.DistributedDataParallel(model, **options)
        order = {p: i for i, p in enumerate(p for p in model.parameters() if p.requires_grad)}
        wrapped.register_comm_hook(order, lambda order, bucket: self._average(order, bucket))
        return cast("Callable[..., Tensor]", wrapped)

    def _average(self, order: dict[Tensor, int], bucket: Any) -> Any:
        """Average the gradients of a bucket, in the order of the parameters or one by one if there are several buckets.

        DDP fills buckets in another order after the first step, and with three or more processes the position of a number in
        the exchanged tensor decides the order of its summation: a resumed run would differ from an uninterrupted one.
        """
        buffer = bucket.buffer().div_(self.size)
        parameters, gradients = bucket.parameters(), bucket.gradients()
        fused = self.size > 2 and len(parameters) == len(order)
        parts = [buffer] if self.size == 2 else gradients
        if fused:
            gradients = [g for _, g in sorted(zip(parameters, gradients, strict=True), key=lambda pair: order[pair[0]])]
            parts = [torch.cat([gradient.flatten() for gradient in gradients])]
        futures = [torch.distributed.all_reduce(part, async_op=True).get_future() for part in parts]

        def copy_back(_: Any) -> Tensor:
            if fused:
                for gradient, part in zip(gradients, parts[0].split([g.numel() for g in gradients]), strict=True):
                    gradient.copy_(part.view_as(gradient))
            return cast(Tensor, buffer)

        return torch.futures.collect_all(futures).then(copy_back)

    def unwrap(self, model: nn.Module) -> None:
        for wrapped, undo in self._undo:
            if wrapped is model:
                undo()
        self._undo = [(wrapped, undo) for wrapped, undo in self._undo if wrapped is not model]

    def accumulating(self, call: Callable[..., Tensor], on: bool) -> contextlib.AbstractContextManager[None]:
        return cast(Any, call).no_sync() if on else contextlib.nullcontext()

    def _prepare(self, model: nn.Module) -> None:
        """Move a model to the device, broadcast the values of the first process, and synchronize its batch norms."""
        self.unwrap(model)
        model.to(self.device)
        with torch.no_grad(), self.guard():
            for tensor in (*model.parameters(), *model.buffers()):
                value = tensor.detach().contiguous()
                torch.distributed.broadcast(value, 0)
                tensor.copy_(value)
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for norm in norms:
            # On the instance, hiding the method of the class.
            vars(norm)["forward"] = types.MethodType(_synchronized_norm(self, norm.forward), norm)

        def undo() -> None:
            for norm in norms:
                vars(norm).pop("forward", None)

        self._undo.append((model, undo))

    # ------------------------------------------------------------------------------------------- exchange

    def sum(self, tensor: Tensor) -> Tensor:
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self.guard():
            torch.distributed.all_reduce(result)
        return result

    def max(self, number: float) -> float:
        # A maximum may ignore NaN: exchange a flag, too.
        pair = torch.tensor(
            [-float("inf") if number != number else number, float(number != number)], dtype=torch.float64
        )
        with self.guard():
            torch.distributed.all_reduce(pair, torch.distributed.ReduceOp.MAX)
        value, missing = pair.tolist()
        return float("nan") if missing else value

    def any(self, flag: bool) -> bool:
        return self.max(float(flag)) > 0

    def broadcast(self, value: Plain) -> Plain:
        values = [value]
        with self.guard():
            torch.distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def barrier(self) -> None:
        self.max(0.0)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise GroupError(
                f"process {self.rank} of {self.size}: another process has ended, or has not answered for {self.timeout:g} "
                "seconds; if it ended with an error, its own message gives the reason"
            ) from error

    def close(self) -> None:
        self._undo.clear()


class Sharded(Replicated):
    """Processes that shard parameters, gradients and optimizer states layer by layer (FSDP2)."""

    sharded = True

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for name, parameter in model.named_parameters():
            if parameter.dim() == 0 or not parameter.is_contiguous():
                problem = "a single number without an axis to shard" if parameter.dim() == 0 else "not contiguous"
                raise SpecError(f"strategy='fsdp': {name} is {problem}; use strategy='ddp'")
        self._prepare(model)
        before = _Snapshot(model)
        with self.guard():
            mesh = init_device_mesh(cast("torch.device", self.device).type, (self.size,))
            layers = [module for module in model.modules() if isinstance(module, Layer) and module is not model]
            for module in (*layers, model):
                fully_shard(module, mesh=mesh, shard_placement_fn=self._placement)
        before.release()
        self._undo.append((model, lambda: before.restore(self)))
        return cast("Callable[..., Tensor]", model)

    def _placement(self, parameter: nn.Parameter) -> Any:
        """Return the axis to shard: the first one if it is long enough, else the longest axis with an even division."""
        from torch.distributed.tensor import Shard

        shape = parameter.shape
        even = [axis for axis, length in enumerate(shape) if length and length % self.size == 0]
        if shape[0] >= self.size or not even:
            return Shard(0)
        return Shard(max(even, key=lambda axis: shape[axis]))

    @contextlib.contextmanager
    def accumulating(self, call: Callable[..., Tensor], on: bool) -> Iterator[None]:
        model = cast(Any, call)
        model.set_requires_gradient_sync(not on)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        from torch.distributed.fsdp import FSDPModule

        parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        with self.guard():
            for part in parts:
                part.set_reshard_after_forward(False, recurse=False)
                part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.reshard()
                # As set by `fully_shard`: the backward pass needs the root's own parameters at once.
                part.set_reshard_after_forward(part is not model, recurse=False)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return tensor
        with self.guard():
            return tensor.full_tensor()

    def assign(self, target: Tensor, value: Tensor) -> None:
        from torch.distributed.tensor import DTensor, Shard

        with torch.no_grad():
            if not isinstance(target, DTensor):
                target.copy_(value)
                return
            part = value
            for placement in target.placements:
                if isinstance(placement, Shard):
                    parts = part.chunk(self.size, placement.dim)
                    empty = part.narrow(placement.dim, 0, 0)
                    part = parts[self.rank] if self.rank < len(parts) else empty
            target.to_local().copy_(part)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        from torch.distributed.tensor import DTensor

        if not tensors:
            return torch.zeros(())
        parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return self.sum(torch.stack(torch._foreach_norm(parts)).double().square().sum()).sqrt().to(parts[0].dtype)


class _Snapshot:
    """Classes, attributes, hooks and parameters of a model before sharding: torch has no call to undo `fully_shard`."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(module, type(module), set(vars(module)), self._hooks(module)) for module in model.modules()]
        self.parameters = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.added: list[tuple[nn.Module, set[str]]] = []

    @staticmethod
    def _hooks(module: nn.Module) -> dict[str, Any]:
        """Return copies of the hook dictionaries of a module."""
        return {
            name: table.copy() for name, table in vars(module).items() if name.endswith("_hooks") and table is not None
        }

    def release(self) -> None:
        """Record the attributes added by sharding, and free the memory of the whole parameters."""
        self.added = [(module, set(vars(module)) - names) for module, _, names, _ in self.modules]
        for _, _, parameter in self.parameters:
            parameter.data, parameter.grad = parameter.data.new_empty(0), None

    def restore(self, group: Group) -> None:
        """Restore the model, with the current values of the sharded parameters."""
        from torch.distributed import _composable_state
        from torch.distributed.fsdp import FSDPModule

        for module, *_ in self.modules:
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without a backward pass leaves parameters whole
        for module, name, parameter in self.parameters:
            sharded = cast(Tensor, module._parameters[name])
            if sharded is not parameter:
                parameter.data = group.full_tensor(sharded.detach())
                parameter.requires_grad_(sharded.requires_grad)
                module._parameters[name] = parameter
        # A module in this torch table cannot be sharded again.
        known = getattr(_composable_state, "_module_state_mapping", {})
        for module, kind, _, hooks in self.modules:
            known.pop(module, None)
            module.__class__ = kind
            vars(module).update(hooks)
        for module, names in self.added:
            for name in names & set(vars(module)):
                delattr(module, name)


# ------------------------------------------------------------------------------------------------ batch norm


class _Sum(torch.autograd.Function):
    """Sum over the processes; the gradient of each term is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradients[0]), None


def _synchronized_norm(group: Group, local: Callable[[Tensor], Tensor]) -> Callable[[_BatchNorm, Tensor], Tensor]:
    """Return the forward pass of a batch norm over the rows of all processes; `nn.SyncBatchNorm` needs CUDA."""

    def forward(self: _BatchNorm, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return local(x)
        # torch has the features on the second axis, kapsi on the last one.
        last = not type(self).__module__.startswith("torch.")
        rows = (x if last else x.movedim(1, -1)).reshape(-1, self.num_features)
        precise = rows.to(torch.promote_types(rows.dtype, torch.float32))
        count = float(group.sum(torch.tensor(float(len(rows)), dtype=torch.float64)))
        if count < 2:
            raise DataError(
                f"batch_norm: training needs at least two rows, got {count:.0f}; use a larger batch, or model.eval()"
            )
        mean = cast(Tensor, _Sum.apply(precise.sum(0), group)) / count
        centered = precise - mean
        variance = cast(Tensor, _Sum.apply(centered.square().sum(0), group)) / count
        y = centered * torch.rsqrt(variance + self.eps)
        if self.affine:
            y = y * self.weight + self.bias
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), share)
        y = y.to(x.dtype)
        return y.reshape(x.shape) if last else y.reshape(x.movedim(1, -1).shape).movedim(-1, 1)

    return forward
