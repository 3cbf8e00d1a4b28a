"""The processes that train together: one, several that each keep the whole model, or several that divide it among them."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import multiprocessing
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kapsi.errors import KapsiError, SpecError, did_you_mean
from kapsi.modules import Layer

__all__ = ["Group", "GroupError", "open_group"]

STRATEGIES = ("ddp", "fsdp")

Plain = TypeVar("Plain")


class GroupError(KapsiError):
    """Another process of a group has ended, or does not answer."""


class Group:
    """One process by itself; the base of several.

    What it has and does for several processes, all of them together and in the same order: every method but `wrap`,
    `accumulating`, `place` and `close` waits for the others, and has to be called by all.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        sharded: whether `wrap` divides parameters among processes: they are then `DTensor`s, of which each process holds a part.
        device: where the model is trained and its rows have to be; None for where the model is.
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False
    device: torch.device | None = None

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    # ------------------------------------------------------------------------------------------- the model

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        """Prepare a model for training, in place, and return what is called for its outputs.

        All processes begin with the values of the first. It comes before the optimizer, or anything else that keeps
        `model.parameters()`: these may be new tensors then. On
        each process the loss of its own rows is `size` times its share of the loss: the gradients that all have after `backward`
        are the mean over the processes, which is then the gradient of the whole loss. A process without rows calls it with none.

        A batch norm takes its statistics over the rows of all processes, as in one process; one of torch only does on CUDA.

        Raises:
            SpecError: the model cannot be divided.
        """
        return cast("Callable[..., Tensor]", model if self.device is None else model.to(self.device))

    def unwrap(self, model: nn.Module) -> None:
        """Make a model again what it was before `wrap`: its own parameters, whole, with the values that they have now."""

    def accumulating(self, call: Callable[..., Tensor], on: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for forward and backward passes; with `on` gradients are added up without exchange.

        The passes of the last part of a batch, with `on=False`, exchange the sum.
        """
        return contextlib.nullcontext()

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has all of its parameters, plain and whole, and is called without exchange.

        Processes may call it as often as they have rows. Parameters are not to be changed there.
        """
        return contextlib.nullcontext()

    # ------------------------------------------------------------------------------------------- tensors

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all of a tensor that may be divided, differentiable: its gradient has to be the same on each process."""
        return tensor

    def place(self, target: Tensor, whole: Tensor) -> None:
        """Copy a whole tensor into one that may be divided, such as a parameter or what an optimizer keeps for it."""
        with torch.no_grad():
            target.copy_(whole)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the Euclidean norm of all numbers of some gradients, which may be divided; the same bits on each process."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors)))) if tensors else torch.zeros(())

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, the same bits on each; the tensor stays as it is."""
        return tensor

    # ------------------------------------------------------------------------------------------- plain values

    def largest(self, number: float) -> float:
        """Return the largest of a number over all processes; NaN where any is NaN."""
        return number

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any process: an interrupt, an error."""
        return flag

    def broadcast(self, value: Plain) -> Plain:
        """Return the value of the first process: numbers, texts, lists and the like."""
        return value

    def barrier(self) -> None:
        """Wait for the others."""

    # ------------------------------------------------------------------------------------------- the end

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that turns what torch raises for a lost process, as in a backward pass, into a `GroupError`."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Unwrap nothing and wait for nobody: let go of what was wrapped, so that a failed process can end."""

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.barrier()
        finally:
            self.close()


class _Several(Group):
    """Several processes, each with the whole model, that average their gradients (DistributedDataParallel)."""

    def __init__(self, fabric: Any, timeout: float) -> None:
        super().__init__(fabric.device)
        self.fabric, self.timeout = fabric, timeout
        self.rank, self.size = fabric.global_rank, fabric.world_size
        self._undo: list[tuple[nn.Module, Callable[[], None]]] = []

    # ------------------------------------------------------------------------------------------- the model

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SpecError("strategy='ddp': the model has no parameter to train")
        self._prepare(model)
        with self.watching():
            wrapped = self.fabric.strategy.setup_module(model)
        order = {p: i for i, p in enumerate(p for p in model.parameters() if p.requires_grad)}
        wrapped.register_comm_hook(order, lambda order, bucket: self._average(order, bucket))
        return cast("Callable[..., Tensor]", wrapped)

    def _average(self, order: dict[Tensor, int], bucket: Any) -> Any:
        """Average the gradients of a bucket.

        Buckets are filled in another order after the first step. Where a number stands in what is exchanged decides how three
        and more terms are added up, so a run that is resumed would differ from one that is not. So all gradients are
        exchanged in the order of the parameters, or one by one where there are several buckets.
        """
        buffer = bucket.buffer().div_(self.size)
        parameters, gradients = bucket.parameters(), bucket.gradients()
        joined = self.size > 2 and len(parameters) == len(order)
        parts = [buffer] if self.size == 2 else gradients
        if joined:
            gradients = [g for _, g in sorted(zip(parameters, gradients, strict=True), key=lambda pair: order[pair[0]])]
            parts = [torch.cat([gradient.flatten() for gradient in gradients])]
        done = [torch.distributed.all_reduce(part, async_op=True).get_future() for part in parts]

        def finish(_: Any) -> Tensor:
            if joined:
                for gradient, part in zip(gradients, parts[0].split([g.numel() for g in gradients]), strict=True):
                    gradient.copy_(part.view_as(gradient))
            return cast(Tensor, buffer)

        return torch.futures.collect_all(done).then(finish)

    def unwrap(self, model: nn.Module) -> None:
        rest = []
        for wrapped, undo in self._undo:
            if wrapped is model:
                undo()
            else:
                rest.append((wrapped, undo))
        self._undo = rest

    def accumulating(self, call: Callable[..., Tensor], on: bool) -> contextlib.AbstractContextManager[None]:
        return cast(Any, call).no_sync() if on else contextlib.nullcontext()

    def _prepare(self, model: nn.Module) -> None:
        """Move a model to the device, give it the values of the first process, and have it share the statistics of its norms."""
        self.unwrap(model)
        model.to(self.device)
        with torch.no_grad(), self.watching():
            for tensor in (*model.parameters(), *model.buffers()):
                value = tensor.detach().contiguous()
                torch.distributed.broadcast(value, 0)
                tensor.copy_(value)
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for norm in norms:
            # On the module itself, before what its class has.
            vars(norm)["forward"] = types.MethodType(_shared_norm(self, norm.forward), norm)

        def undo() -> None:
            for norm in norms:
                vars(norm).pop("forward", None)

        self._undo.append((model, undo))

    # ------------------------------------------------------------------------------------------- exchange

    def sum(self, tensor: Tensor) -> Tensor:
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self.watching():
            torch.distributed.all_reduce(result)
        return result

    def largest(self, number: float) -> float:
        # A maximum need not see NaN, so that goes beside it.
        pair = torch.tensor(
            [-float("inf") if number != number else number, float(number != number)], dtype=torch.float64
        )
        with self.watching():
            torch.distributed.all_reduce(pair, torch.distributed.ReduceOp.MAX)
        value, missing = pair.tolist()
        return float("nan") if missing else value

    def any(self, flag: bool) -> bool:
        return self.largest(float(flag)) > 0

    def broadcast(self, value: Plain) -> Plain:
        with self.watching():
            return cast("Plain", self.fabric.broadcast(value))

    def barrier(self) -> None:
        self.largest(0.0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _is_lost(error):
                raise
            raise GroupError(
                f"process {self.rank} of {self.size}: another process has ended, or has not answered for {self.timeout:g} "
                "seconds; if it ended with an error, its own message says which"
            ) from error

    def close(self) -> None:
        self._undo.clear()
        self.fabric = None


class _Sharded(_Several):
    """Several processes that divide parameters, gradients and what the optimizer keeps, layer by layer (FSDP2)."""

    sharded = True

    # Lightning's ModelParallelStrategy takes processors too, but adds nothing to the two calls of `fully_shard` below, is marked as
    # experimental, and leaves the exchange of gradients off after `no_backward_sync(enabled=False)`.
    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise SpecError(
                    f"strategy='fsdp': {name} is a single number without an axis to divide; use strategy='ddp'"
                )
            if not parameter.is_contiguous():
                raise SpecError(f"strategy='fsdp': {name} is not contiguous; use strategy='ddp', or a contiguous copy")
        self._prepare(model)
        before = _Whole(model)
        with self.watching():
            mesh = init_device_mesh(cast("torch.device", self.device).type, (self.size,))
            layers = [module for module in model.modules() if isinstance(module, Layer) and module is not model]
            for module in (*layers, model):
                fully_shard(module, mesh=mesh, shard_placement_fn=self._placement)
        before.release()
        self._undo.append((model, lambda: before.restore(self)))
        return cast("Callable[..., Tensor]", model)

    def _placement(self, parameter: nn.Parameter) -> Any:
        """Return the axis to divide: the first one if it is long enough, else the longest that can be divided evenly."""
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
        with self.watching():
            for part in parts:
                part.set_reshard_after_forward(False, recurse=False)
                part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.reshard()
                # As `fully_shard` has it: the parameters of the model itself are needed again at once.
                part.set_reshard_after_forward(part is not model, recurse=False)

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return tensor
        with self.watching():
            return tensor.full_tensor()

    def place(self, target: Tensor, whole: Tensor) -> None:
        from torch.distributed.tensor import DTensor, Shard

        with torch.no_grad():
            if not isinstance(target, DTensor):
                target.copy_(whole)
                return
            part = whole
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


class _Whole:
    """What a model was before it was divided, so that it can be that again: classes, hooks, its own parameters."""

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
        """Return copies of the tables of hooks."""
        return {
            name: table.copy() for name, table in vars(module).items() if name.endswith("_hooks") and table is not None
        }

    def release(self) -> None:
        """Note what was added to the modules, and let the memory of the whole parameters go."""
        self.added = [(module, set(vars(module)) - names) for module, _, names, _ in self.modules]
        for _, _, parameter in self.parameters:
            parameter.data, parameter.grad = parameter.data.new_empty(0), None

    def restore(self, group: Group) -> None:
        """Give the model its parameters back, with the values that the divided ones have."""
        from torch.distributed import _composable_state
        from torch.distributed.fsdp import FSDPModule

        for module, *_ in self.modules:
            if isinstance(module, FSDPModule):
                module.reshard()  # what a forward pass without a backward one has left whole
        for module, name, parameter in self.parameters:
            divided = cast(Tensor, module._parameters[name])
            if divided is not parameter:
                parameter.data = group.whole(divided.detach())
                parameter.requires_grad_(divided.requires_grad)
                module._parameters[name] = parameter
        # By this table torch refuses to divide a module twice; it has no call that takes a module from it.
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
    """Σ over the processes, differentiable: the gradient with respect to each term is the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradients[0]), None


def _shared_norm(group: Group, alone: Callable[[Tensor], Tensor]) -> Callable[[_BatchNorm, Tensor], Tensor]:
    """Return the forward pass of a batch norm over the rows of all processes; torch's own has one for CUDA only."""

    def forward(self: _BatchNorm, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return alone(x)
        # Those of torch have the features on the second axis, kapsi's on the last.
        last = not type(self).__module__.startswith("torch.")
        rows = (x if last else x.movedim(1, -1)).reshape(-1, self.num_features)
        precise = rows.to(torch.promote_types(rows.dtype, torch.float32))
        count = float(group.sum(torch.tensor(float(len(rows)), dtype=torch.float64)))
        if count < 2:
            raise SpecError(
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


# ------------------------------------------------------------------------------------------------ how they are started


@dataclass(frozen=True)
class _Launch:
    """Where a process stands among those that were started together."""

    devices: int
    """Processes on this node."""
    nodes: int
    started: bool
    """Whether there is a launcher that has started them."""


def open_group(
    *,
    devices: int | None = None,
    nodes: int | None = None,
    strategy: str | None = None,
    accelerator: Literal["cpu", "auto"] = "cpu",
    timeout: float = 600.0,
) -> Group:
    """Return the group of this process, and join it: one process by itself unless more were started or are asked for.

    Under `torchrun` the sizes are those that it was given. Without it, several devices of one node start the command line again
    for each further one; so it is the first thing that a program does, and nothing that is done before may have lasting effects.
    The connection stays for further groups until the process ends.

    A process that ends takes the others with it: their next exchange is a `GroupError`, and `torchrun` (or the first process,
    where that started the others) ends what is left. One that stands still, or goes another way, is given up after `timeout`.

    Args:
        devices: processes on each node, each with a device of its own; None for those that the launcher started, or one.
        nodes: machines; None for those of the launcher, or one.
        strategy: `ddp`, where each process has the whole model, or `fsdp`, where they divide it; None is `ddp`. For one process
            there is no difference.
        accelerator: `cpu`, or `auto` for CUDA devices where there are any.
        timeout: seconds to wait for the other processes, from the start on.

    Raises:
        SpecError: sizes that are not those of the launcher, or processes that cannot be started from here.

    Example:
        >>> with open_group() as group:
        ...     group.rank, group.size, float(group.sum(torch.tensor(2.0)))
        (0, 1, 2.0)
    """
    for name, value in (("devices", devices), ("nodes", nodes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SpecError(f"{name}={value!r}: expected a whole number of at least 1, or None")
    if strategy is not None and strategy not in STRATEGIES:
        hint = did_you_mean(str(strategy), STRATEGIES)
        raise SpecError(f"strategy={strategy!r}: {hint}there are {', '.join(STRATEGIES)}")
    if accelerator not in ("cpu", "auto"):
        raise SpecError(f"accelerator={accelerator!r}: expected cpu or auto")
    if not timeout > 0:
        raise SpecError(f"timeout={timeout!r}: expected seconds above 0")
    launch = _launched(devices, nodes)
    cuda = accelerator == "auto" and torch.cuda.is_available()
    if launch.devices * launch.nodes == 1:
        return Group(torch.device("cuda") if cuda else None)
    if cuda and torch.cuda.device_count() < launch.devices:
        count = torch.cuda.device_count()
        raise SpecError(
            f"devices={launch.devices}: this node has {count} CUDA devices; use fewer, or accelerator='cpu'"
        )
    if not launch.started:
        _check_restartable(launch.devices)
    return (_Sharded if strategy == "fsdp" else _Several)(_join(launch, cuda, timeout), timeout)


def _launched(devices: int | None, nodes: int | None) -> _Launch:
    """Return the sizes: those of the launcher, which those that are given must not contradict."""
    world = os.environ.get("WORLD_SIZE")
    if world is None:
        if (nodes or 1) > 1:
            raise SpecError(
                f"nodes={nodes}: processes on several machines are started by torchrun, on each of them: torchrun --nnodes {nodes} "
                f"--nproc-per-node {devices or 1} --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m kapsi …"
            )
        return _Launch(devices or 1, 1, started=False)
    if "LT_CLI_USED" in os.environ:
        raise SpecError("open_group: `fabric run` is not supported as a launcher; use torchrun")
    local = os.environ.get("LOCAL_WORLD_SIZE")
    needed = ["LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] + ["RANK"] * (local != world)
    missing = [name for name in needed if name not in os.environ]
    if world == "1" and missing:
        local = "1"
    elif missing:
        raise SpecError(
            f"open_group: WORLD_SIZE={world} is set but not {', '.join(missing)}; start the processes with torchrun, or unset it"
        )
    try:
        total, own = int(world), int(local or "")
    except ValueError:
        total, own = 0, 0
    if own < 1 or total < own or total % own:
        raise SpecError(
            f"open_group: the launcher started {world} processes, {local} of them on this node; every node must have as many"
        )
    for name, given, started, what, option in (
        ("devices", devices, own, "processes on this node", "--nproc-per-node"),
        ("nodes", nodes, total // own, "nodes", "--nnodes"),
    ):
        if given is not None and given != started:
            what = what if started > 1 else what.replace("processes", "process").replace("nodes", "node")
            raise SpecError(
                f"{name}={given}: the launcher started {started} {what}; leave {name} out, or start it with {option} {given}"
            )
    return _Launch(own, total // own, started=True)


def _check_restartable(devices: int) -> None:
    """Raise a `SpecError` where the command line cannot be run again for the other processes."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    nested = multiprocessing.parent_process() is not None or multiprocessing.current_process().daemon
    tested = "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ
    if interactive or nested or tested or file is None or not os.path.isfile(file):
        raise SpecError(
            f"devices={devices}: from a notebook, a prompt, a test or a worker no further processes are started; write a script "
            f"and run torchrun --nproc-per-node {devices} SCRIPT, or kapsi fit … --devices {devices}"
        )


def _join(launch: _Launch, cuda: bool, timeout: float) -> Any:
    """Return Lightning's Fabric after it has connected the processes, and started them where nobody has."""
    if not launch.started:
        # Those that Fabric starts inherit it: by this they know that they were started, and how many they are.
        os.environ["LOCAL_WORLD_SIZE"] = str(launch.devices)
    with _quiet():
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments.lightning import LightningEnvironment
        from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
        from lightning.fabric.strategies.ddp import DDPStrategy

        # Named, since Fabric would take the variables of a cluster's queue for a launcher.
        environment = TorchElasticEnvironment() if "RANK" in os.environ else LightningEnvironment()
        # Buffers are equal: what training changes in them is computed from the rows of all.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        without = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {
            without: False,
            # Named, as the first bucket would be of one megabyte otherwise.
            "bucket_cap_mb": 25,
            # Statistics on the CPU are exchanged beside gradients on CUDA.
            "process_group_backend": "cpu:gloo,cuda:nccl" if cuda else "gloo",
            "timeout": timedelta(seconds=timeout),
        }
        fabric = Fabric(
            accelerator="cuda" if cuda else "cpu",
            devices=launch.devices,
            num_nodes=launch.nodes,
            strategy=DDPStrategy(**options),
            plugins=[environment],
        )
        connected = torch.distributed.is_initialized()
        try:
            fabric.launch()
        except RuntimeError as error:
            if not _is_lost(error):
                raise
            raise GroupError(
                f"open_group: not all of the {launch.devices * launch.nodes} processes have met within {timeout:g} seconds"
            ) from error
    if torch.distributed.get_world_size() != launch.devices * launch.nodes:
        connected_to = torch.distributed.get_world_size()
        raise SpecError(
            f"open_group: torch.distributed was initialized for {connected_to} processes, the launcher started "
            f"{launch.devices * launch.nodes}"
        )
    if not connected:
        atexit.register(_disconnect)
    return fabric


def _disconnect() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _is_lost(error: RuntimeError) -> bool:
    """Return whether an error of torch is about a process that is gone; Gloo has no class of its own for it."""
    known = isinstance(error, torch.distributed.DistError)
    return known or any(
        word in str(error).lower() for word in ("gloo", "connection closed", "connection reset", "nccl")
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep from the user what Lightning says and warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.fabric  # noqa: F401  which sets the levels of its loggers

        loggers = [logging.getLogger(name) for name in ("lightning", "lightning.fabric", "lightning.pytorch")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
