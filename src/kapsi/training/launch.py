"""Joining a group of processes: sizes from the launcher, start of further processes, connection."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch

from kapsi.errors import SpecError
from kapsi.function import Spec, coerce, option
from kapsi.training.distributed import Group, GroupError, Replicated, Sharded, is_lost


@dataclass(frozen=True)
class GroupOptions(Spec):
    """Arguments of `open_group`, checked."""

    devices: int | None = option(None, minimum=1)
    nodes: int | None = option(None, minimum=1)
    strategy: Literal["ddp", "fsdp"] | None = None
    accelerator: Literal["cpu", "auto"] = "cpu"
    timeout: float = option(600.0, minimum=1e-3)


def open_group(
    *,
    devices: int | None = None,
    nodes: int | None = None,
    strategy: Literal["ddp", "fsdp"] | None = None,
    accelerator: Literal["cpu", "auto"] = "cpu",
    timeout: float = 600.0,
) -> Group:
    """Join the group of this process: the processes started by `torchrun`, or a single process.

    Without a launcher, `devices` above 1 runs the command line again, once for each further process. Therefore open the group
    first in a program, before lasting effects. The connection stays open for further groups until the process ends.

    When a process ends, the next exchange of every other process raises a `GroupError`. Waiting for a hanging process ends after
    `timeout` seconds.

    Args:
        devices: processes per node, one per device; None for the launcher's number, or 1.
        nodes: number of machines; None for the launcher's number, or 1.
        strategy: `ddp` (every process holds the whole model) or `fsdp` (the processes shard the model); None for `ddp`. It has no
            effect for a single process.
        accelerator: `cpu`, or `auto` for CUDA devices if there are any.
        timeout: seconds to wait for other processes, also at the start.

    Raises:
        SpecError: sizes contradict the launcher, or further processes cannot be started from here.
        GroupError: processes are missing at the start.

    Example:
        >>> with open_group() as group:
        ...     group.rank, group.size, float(group.sum(torch.tensor(2.0)))
        (0, 1, 2.0)
    """
    values = {
        "devices": devices,
        "nodes": nodes,
        "strategy": strategy,
        "accelerator": accelerator,
        "timeout": timeout,
    }
    options: GroupOptions = coerce(GroupOptions, values, "open_group")
    launched = "WORLD_SIZE" in os.environ
    devices, nodes = _launched_sizes(options) if launched else (options.devices or 1, options.nodes or 1)
    cuda = accelerator == "auto" and torch.cuda.is_available()
    if devices * nodes == 1:
        return Group(torch.device("cuda") if cuda else None)
    if nodes > 1 and not launched:
        raise SpecError(
            f"nodes={nodes}: start processes on several machines with torchrun, on each machine: torchrun --nnodes {nodes} "
            f"--nproc-per-node {devices} --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m kapsi …"
        )
    if cuda and torch.cuda.device_count() < devices:
        count = torch.cuda.device_count()
        raise SpecError(f"devices={devices}: this node has {count} CUDA devices; use fewer, or accelerator='cpu'")
    if not launched:
        _start_others(devices, timeout)
    if not torch.distributed.is_initialized():
        _connect(devices * nodes, cuda, timeout)
    connected = torch.distributed.get_world_size()
    if connected != devices * nodes:
        raise SpecError(
            f"open_group: torch.distributed was initialized for {connected} processes, the launcher started {devices * nodes}"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    return (Sharded if strategy == "fsdp" else Replicated)(device, timeout)


def _launched_sizes(options: GroupOptions) -> tuple[int, int]:
    """Return processes per node and nodes from the launcher's environment; options must not contradict them.

    Options alone would be wrong: `torchrun … --devices 1` would train independent copies.
    """
    total = os.environ["WORLD_SIZE"]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing and total != "1":
        raise SpecError(
            f"open_group: WORLD_SIZE={total} is set without {', '.join(missing)}; start the processes with torchrun, or unset it"
        )
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not (total.isdecimal() and local.isdecimal() and int(local) and int(total) and int(total) % int(local) == 0):
        raise SpecError(
            f"open_group: the launcher started {total} processes, {local} of them on this node; start equally many on every node"
        )
    devices, nodes = int(local), int(total) // int(local)
    for name, value, started, flag in (
        ("devices", options.devices, devices, "--nproc-per-node"),
        ("nodes", options.nodes, nodes, "--nnodes"),
    ):
        if value not in (None, started):
            raise SpecError(
                f"{name}={value}: the launcher was started with {flag} {started}; leave {name} out, or give it {flag} {value}"
            )
    return devices, nodes


def _start_others(devices: int, timeout: float) -> None:
    """Run the command line again for each further process, and make this process the first one."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    nested = multiprocessing.parent_process() is not None or multiprocessing.current_process().daemon
    tested = "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ
    if interactive or nested or tested or file is None or not os.path.isfile(file):
        raise SpecError(
            f"devices={devices}: a notebook, a prompt, a test or a worker cannot start further processes; write a script and run "
            f"torchrun --nproc-per-node {devices} SCRIPT, or kapsi fit … --devices {devices}"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sizes = {"WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // devices)
        torch.set_num_threads(threads)
        sizes["OMP_NUM_THREADS"] = threads
    os.environ.update({name: str(value) for name, value in sizes.items()}, RANK="0", LOCAL_RANK="0")
    children = [
        subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env={**os.environ, "RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(1, devices))
    ]
    for child in children:
        threading.Thread(target=_watch, args=(child,), daemon=True).start()
    atexit.register(_end, children, timeout)


def _watch(child: subprocess.Popen[bytes]) -> None:
    """End this process if another one fails before the connection: waiting for the connection cannot be interrupted."""
    code = child.wait()
    if code and not torch.distributed.is_initialized():
        sys.stderr.write(f"open_group: a process of the group has ended with exit code {code}\n")
        sys.stderr.flush()
        os._exit(1)


def _end(children: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait for the other processes; after an error, processes end at the next exchange."""
    for child in children:
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            child.kill()


def _connect(size: int, cuda: bool, timeout: float) -> None:
    """Initialize `torch.distributed` until the process ends."""
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Statistics are exchanged on the CPU, in addition to gradients on CUDA.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    try:
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise GroupError(f"open_group: only some of the {size} processes met within {timeout:g} seconds") from error
    atexit.register(_disconnect)


def _disconnect() -> None:
    """Destroy the process group, and let Gloo's threads release the tensors of the last exchange.

    The release takes the interpreter's lock. A thread reaching it after the interpreter's shutdown aborts the process, and
    destroying the group does not join the threads: torch keeps references to a group used by DDP or FSDP.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    idle, end = 0, time.monotonic() + 2
    while idle < 5 and time.monotonic() < end:
        time.sleep(0.01)
        idle = 0 if _has_running_thread() else idle + 1


def _has_running_thread() -> bool:
    """Return whether another thread of this process is running or runnable; False without Linux's `/proc`."""
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread has ended
            if task.parent.name != own and task.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
