"""Several processes train like a single one: real processes on this machine, connected by Gloo.

Run as a program, this file is the script of the processes; process writes its results to a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import kapsi as kp
from kapsi.errors import KapsiError, SpecError
from kapsi.training.distributed import Group
from kapsi.training.launch import open_group

ROWS = 513
SPEC = kp.rpn(
    [6, 16, 3],
    expansion=kp.Taylor(2),
    reconciliation=kp.LowRank(2),
    remainder=kp.LinearRemainder(),
    before="batch_norm",
)


def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 6, generator=generator)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].square(), x[:, 3] - x[:, 4]], 1)


def batches():
    """Return the bounds of the batches; a single last row joins the batch before."""
    return [(0, 128), (128, 256), (256, 384), (384, 513)]


def share(group: Group, low: int, high: int) -> slice:
    """Return the contiguous part of a process; sizes differ by at most one."""
    size, rest = divmod(high - low, group.size)
    start = low + group.rank * size + min(group.rank, rest)
    return slice(start, start + size + (group.rank < rest))


def train(group: Group, model: nn.Module, bounds, *, parts: int = 1, l1: float = 0.0):
    """Train like the engine, and return the optimizer."""
    x, y = rows()
    call = group.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for low, high in bounds:
        optimizer.zero_grad()
        mine = share(group, low, high)
        own = range(mine.start, mine.stop)
        pieces = [own[len(own) * i // parts : len(own) * (i + 1) // parts] for i in range(parts)]
        for i, piece in enumerate(pieces):
            part = slice(piece.start, piece.stop)
            with group.accumulating(call, i < parts - 1), group.guard():
                loss = group.size * (call(x[part]) - y[part]).square().mean(1).sum() / (high - low)
                if l1 and i == parts - 1:
                    loss = loss + l1 * sum(group.full_tensor(p).abs().sum() for p in model.parameters())
                loss.backward()
        optimizer.step()
    return optimizer


def values(group: Group, model: nn.Module) -> list[list[float]]:
    return [group.full_tensor(p.detach()).flatten().tolist() for p in model.parameters()]


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def model_of(spec=SPEC, **options) -> kp.Model:
    return kp.Model(spec, seed=0, **options)


def plain() -> kp.ModelSpec:
    """Return a model without batch norm: accumulated gradients equal the gradient of the whole batch."""
    return kp.rpn(
        [6, 16, 3], expansion=kp.Taylor(2), reconciliation=kp.LowRank(2), remainder=kp.LinearRemainder(), bias=True
    )


def normed() -> nn.Module:
    """Return a torch model with a batch norm over the second of three axes, averaging all batches."""
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2, momentum=None), nn.Flatten(), nn.Linear(6, 3))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + i, parameter.numel()).reshape(parameter.shape))
    return model


# ------------------------------------------------------------------------------------------------ in the processes


def message(function, *arguments, **options) -> str:
    try:
        function(*arguments, **options)
    except KapsiError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def exchanges(group: Group) -> dict:
    """Return the results of exchanges, with digests of their bits."""
    sums = []
    for count in (1, 3, 1000, 100_001):
        for dtype in (torch.float32, torch.float64):
            own = torch.randn(count, generator=torch.Generator().manual_seed(group.rank), dtype=dtype)
            sums.append(digest(group.sum(own)))
    matrix = torch.arange(6.0).reshape(2, 3).T + group.rank
    kept = matrix.clone()
    return {
        "digests": sums,
        "scalar": float(group.sum(torch.tensor(1.5, dtype=torch.float64))),
        "transposed": group.sum(matrix).tolist(),
        "unchanged": torch.equal(matrix, kept),
        "integers": group.sum(torch.tensor([group.rank, 1])).tolist(),
        "largest": group.max(-float(group.rank)),
        "nan": str(group.max(float("nan") if group.rank == group.size - 1 else 7.0)),
        "any": [group.any(False), group.any(group.rank == group.size - 1), group.any(True)],
        "broadcast": group.broadcast({"rank": [group.rank, "a"]}),
        "again": open_group().size,
    }


def trained(group: Group) -> dict:
    """Return weights and buffers after several kinds of training."""
    results = {}
    model = model_of()
    train(group, model, batches())
    results["weights"] = values(group, model)
    results["running"] = [b.tolist() for n, b in model.named_buffers() if "running" in n]
    group.unwrap(model)
    results["evaluated"] = model.eval()(rows()[0][:5]).tolist()
    model = model_of(plain())
    train(group, model, batches(), parts=2)
    results["accumulated"] = values(group, model)
    model = model_of(plain())
    train(group, model, [(0, 1), (5, 6), (7, 9)], l1=0.01)  # the last process has no row of a single one
    results["empty"] = values(group, model)
    model = model_of(plain(), dtype=torch.float32)
    model.freeze("layers.0.*.psi")
    train(group, model, batches())
    results["frozen"] = values(group, model)
    model = normed()
    train(group, model, batches())
    with torch.no_grad():
        model.eval()(rows()[0])  # leaves the parameters of a model without layers whole
    group.unwrap(model)
    assert not any("forward" in vars(module) for module in model.modules())
    results["of_torch"] = [*values(group, model), *(buffer.flatten().tolist() for buffer in model.buffers())]
    return results


def resumed(group: Group) -> dict:
    """Return whether training in two parts gives bitwise identical weights."""
    bounds = [(0, 100), (100, 200), (200, 300), (300, 400), (400, 513)]
    whole = model_of()
    train(group, whole, bounds)
    model = model_of()
    optimizer = train(group, model, bounds[:2])
    x, y = rows()
    states = [
        {name: group.full_tensor(value).clone() for name, value in optimizer.state[p].items()}
        for p in model.parameters()
    ]
    weights = {name: group.full_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    again = model_of()
    call = group.wrap(again)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
    for (name, parameter), state in zip(again.named_parameters(), states, strict=True):
        group.assign(parameter, weights[name])
        optimizer.state[parameter] = {"step": state["step"]}
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[parameter][key] = torch.zeros_like(parameter)
            group.assign(optimizer.state[parameter][key], state[key])
    for name, buffer in again.named_buffers():
        group.assign(buffer, buffers[name])
    for low, high in bounds[2:]:
        part = share(group, low, high)
        optimizer.zero_grad()
        (group.size * (call(x[part]) - y[part]).square().mean(1).sum() / (high - low)).backward()
        optimizer.step()
    same = [
        torch.equal(group.full_tensor(a), group.full_tensor(b))
        for a, b in zip(whole.parameters(), again.parameters(), strict=True)
    ]
    return {"resumed": same}


def finished(group: Group) -> dict:
    """Return states of a model while wrapped and after unwrapping."""
    x, y = rows()
    model = kp.Model(plain(), seed=group.rank)  # all start with the values of the first process
    before, names = list(model.parameters()), list(model.state_dict())
    call = group.wrap(model)
    results = {
        "start": values(group, model),
        "sharded": group.sharded,
        "shapes": [list(getattr(p, "_local_tensor", p).shape) for p in model.parameters()],
    }
    part = share(group, 0, ROWS)
    with group.accumulating(call, True):
        call(x[part]).sum().backward()
    results["local"] = [None if p.grad is None else p.grad.sum().item() for p in model.parameters()]
    with group.accumulating(call, False):
        (0 * call(x[part]).sum()).backward()
    results["summed"] = float(group.norm([p.grad for p in model.parameters()]))
    for parameter in model.parameters():
        parameter.grad = None
    (group.size * (call(x[part]) - y[part]).square().mean(1).sum() / ROWS).backward()
    results["norm"] = float(group.norm([p.grad for p in model.parameters()]))
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    with torch.no_grad(), group.evaluating(model):
        results["plain"] = all(type(p) is nn.Parameter for p in model.parameters())
        outputs = [model(x[:10]) for _ in range(1 + group.rank)]  # any number of times
    results["outputs"] = outputs[0].tolist()
    (group.size * (call(x[part]) - y[part]).square().mean(1).sum() / ROWS).backward()
    trained = [group.full_tensor(p.detach()).clone() for p in model.parameters()]
    group.unwrap(model)
    results["own"] = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    results["kept"] = all(torch.equal(a, b) for a, b in zip(trained, model.parameters(), strict=True))
    results["type"] = [type(model).__name__, type(model.layers[0]).__name__]
    results["names"] = list(model.state_dict()) == names
    hooks = [
        getattr(m, name)
        for m in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks")
    ]
    results["hooks"] = sum(len(h) for h in hooks)
    results["alone"] = model(x[:10]).tolist() if group.first else None  # without exchange
    train(group, model, batches())  # wrapped again
    group.unwrap(model)
    return results


def refused(group: Group) -> dict:
    """Return messages."""
    size = group.size
    scalar = nn.Sequential(nn.Linear(2, 2))
    scalar.register_parameter("scale", nn.Parameter(torch.ones(())))
    normed = kp.Model(kp.rpn([2, 2], before="batch_norm"), seed=0)
    call = group.wrap(normed)
    return {
        "devices": message(open_group, devices=size + 3),
        "one": message(open_group, devices=1, nodes=1),
        "nodes": message(open_group, nodes=5),
        "undivided": message(group.wrap, scalar) if group.sharded else "",
        "frozen_all": message(group.wrap, nn.Linear(1, 1).requires_grad_(False)) if not group.sharded else "",
        "too_few": message(call, torch.ones(1 if group.first else 0, 2)),
    }


def main(mode: str, folder: str, strategy: str) -> None:
    torch.set_num_threads(1)
    if mode == "fails":
        with open_group(timeout=60) as group:
            group.barrier()
            if group.rank == 1:
                raise SpecError("this one is at fault")
            start = time.monotonic()
            results = message(group.barrier)
            Path(folder, "0.json").write_text(json.dumps({"message": results, "seconds": time.monotonic() - start}))
            time.sleep(60)
    if mode == "killed":
        group = open_group(timeout=60)
        model = model_of(plain())
        x, y = rows()
        call = group.wrap(model)
        loss = (call(x) - y).square().mean()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with group.guard():
            loss.backward()
        return
    if mode == "slow":
        group = open_group(timeout=5)
        if group.rank == 1:
            time.sleep(12)
            return
        Path(folder, "0.json").write_text(json.dumps({"message": message(group.barrier)}))
        return
    for name in strategy.split(","):
        with open_group(strategy=name) as group:
            results = {"rank": group.rank, "size": group.size} | exchanges(group) | trained(group)
            if mode == "all":
                results |= resumed(group) | finished(group) | refused(group)
            if mode == "resume":
                results |= resumed(group)
            Path(folder, f"{name}{group.rank}.json").write_text(json.dumps(results))


# ------------------------------------------------------------------------------------------------ tests


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    launched = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in launched}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"} | more


def start(*command: object, **more: str) -> subprocess.Popen[str]:
    line = [sys.executable, *(str(part) for part in command)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(line, env=environment(**more), text=True, start_new_session=True, **pipes)


def ended(process: subprocess.Popen[str], seconds: float = 120, text: str = "") -> tuple[int, str, str]:
    """Return the exit code and both outputs; kill the processes after a timeout."""
    try:
        out, errors = process.communicate(text, timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        raise AssertionError(f"still running after {seconds} seconds\n{errors}") from None
    return process.returncode, out, errors


def torchrun(mode: str, folder: Path, strategy: str = "ddp", processes: int = 2) -> tuple[int, str, str]:
    alone = ("--nproc-per-node", processes, "--master-addr", "127.0.0.1", "--master-port", free_port())
    return ended(start("-m", "torch.distributed.run", *alone, __file__, mode, folder, strategy))


def results_of(folder: Path, strategy: str, processes: int = 2) -> list[dict]:
    return [json.loads(Path(folder, f"{strategy}{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def alone() -> dict:
    """Results of a single process."""
    return trained(Group()) | finished(Group())


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, list[dict]]:
    """Results of two processes, for both strategies."""
    folder = tmp_path_factory.mktemp("two")
    code, out, errors = torchrun("all", folder, "ddp,fsdp")
    assert code == 0, errors
    assert (out, errors) == ("", "")
    return {strategy: results_of(folder, strategy) for strategy in ("ddp", "fsdp")}


def assert_near(given, wanted, tolerance: float = 1e-6) -> None:
    assert len(given) == len(wanted)
    for own, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(other), rtol=tolerance, atol=tolerance)


EACH = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
TRAININGS = ["weights", "running", "evaluated", "accumulated", "empty", "frozen", "of_torch"]


@EACH
@pytest.mark.parametrize("training", TRAININGS)
def test_two_processes_end_with_the_weights_of_one(two, alone, strategy, training) -> None:
    first, second = two[strategy]
    assert first[training] == second[training]
    assert_near(first[training], alone[training], 1e-5 if training == "evaluated" else 1e-6)


def test_trainings_differ(alone) -> None:
    start = values(Group(), model_of(plain()))
    for training in ("accumulated", "empty", "frozen"):
        assert alone[training] != start
    assert alone["accumulated"] != alone["frozen"]
    assert alone["running"][0] != [0.0] * 6


@EACH
def test_exchanges(two, strategy) -> None:
    first, second = two[strategy]
    assert [first["rank"], second["rank"], first["size"], second["size"]] == [0, 1, 2, 2]
    assert first["digests"] == second["digests"]
    own = [torch.randn(3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in range(2)]
    assert first["digests"][3] == digest(own[0] + own[1])
    for process in (first, second):
        assert process["scalar"] == 3.0
        assert process["transposed"] == [[1.0, 7.0], [3.0, 9.0], [5.0, 11.0]]
        assert process["unchanged"]
        assert process["integers"] == [1, 2]
        assert process["largest"] == 0.0
        assert process["nan"] == "nan"
        assert process["any"] == [False, True, True]
        assert process["broadcast"] == {"rank": [0, "a"]}
        assert process["again"] == 2


@EACH
def test_resumed_training_is_bitwise_identical(two, strategy) -> None:
    assert all(process["resumed"] == [True] * 6 for process in two[strategy])


@EACH
def test_unwrap_restores_the_model(two, alone, strategy) -> None:
    for process in two[strategy]:
        assert process["sharded"] == (strategy == "fsdp")
        assert process["plain"]
        assert process["own"]
        assert process["start"] == alone["start"]
        assert process["kept"]
        assert process["names"]
        assert process["type"] == ["Model", "Layer"]
        assert process["hooks"] == 0
        assert_near(process["outputs"], alone["outputs"], 1e-5)
        assert process["norm"] == pytest.approx(alone["norm"], rel=1e-5)
    assert_near(two[strategy][0]["alone"], alone["alone"], 1e-5)


def test_gradients_are_exchanged_at_the_end_of_a_batch(two, alone) -> None:
    first, second = (process["local"] for process in two["ddp"])
    assert first != second
    assert two["fsdp"][0]["local"] == [None] * len(first)
    for strategy in ("ddp", "fsdp"):
        for process in two[strategy]:
            assert process["summed"] == pytest.approx(alone["summed"] / 2, rel=1e-5)


def test_parameters_are_divided_evenly(two, alone) -> None:
    whole = alone["shapes"]
    assert two["ddp"][0]["shapes"] == whole
    parts = [process["shapes"] for process in two["fsdp"]]
    assert [16, 2] in whole
    for shape, first, second in zip(whole, *parts, strict=True):
        assert [first[0] + second[0], *first[1:]] == shape
        assert first[0] - second[0] in (0, 1)


@EACH
def test_errors_of_a_group(two, strategy) -> None:
    for process in two[strategy]:
        started = "the launcher was started with --nproc-per-node 2"
        assert process["devices"].startswith(f"SpecError: devices=5: {started}")
        assert process["one"].startswith(f"SpecError: devices=1: {started}")
        assert process["nodes"].startswith("SpecError: nodes=5: the launcher was started with --nnodes 1")
        assert "at least two rows, got 1" in process["too_few"]
        if strategy == "ddp":
            assert "no parameter to train" in process["frozen_all"]
        else:
            assert process["undivided"].startswith("SpecError: strategy='fsdp': scale is a single number")


@pytest.mark.slow
def test_two_nodes_of_one_process_are_one_of_two(alone, tmp_path) -> None:
    point = f"127.0.0.1:{free_port()}"
    nodes = [
        start(
            *("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--node-rank", rank),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", point, "--local-addr", "127.0.0.1"),
            *(__file__, "short", tmp_path, "ddp"),
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(2)
    ]
    results = [ended(node) for node in nodes]
    assert [code for code, _, _ in results] == [0, 0], results
    first, second = results_of(tmp_path, "ddp")
    assert {first["rank"], second["rank"]} == {0, 1}
    for training in TRAININGS:
        assert first[training] == second[training]
        assert_near(first[training], alone[training], 1e-5 if training == "evaluated" else 1e-6)


@pytest.mark.slow
@EACH
def test_three_processes(alone, tmp_path, strategy) -> None:
    code, _, errors = torchrun("resume", tmp_path, strategy, 3)
    assert code == 0, errors
    process = results_of(tmp_path, strategy, 3)
    assert process[0]["digests"] == process[1]["digests"] == process[2]["digests"]
    for one in process:
        assert one["resumed"] == [True] * 6  # also the sum of three terms has a fixed order
        for training in TRAININGS:
            assert one[training] == process[0][training]
            assert_near(one[training], alone[training], 1e-5 if training == "evaluated" else 1e-6)


FORGETFUL = """
import torch
import kapsi as kp

group = kp.open_group(strategy={strategy!r})
model = kp.Model(kp.rpn([1, 2, 1]), seed=0)
call = group.wrap(model)
call(torch.ones(3 + group.rank, 1)).sum().backward()
"""


@pytest.mark.slow
@EACH
def test_a_script_without_close_ends_with_code_0(tmp_path, strategy) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORGETFUL.format(strategy=strategy))
    address = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    assert ended(start("-m", "torch.distributed.run", "--nproc-per-node", 2, *address, script)) == (0, "", "")


SCRIPT = """
import json, sys
from pathlib import Path
from kapsi.training.launch import open_group

with open_group(devices=2) as group:
    total = float(group.sum(__import__("torch").tensor(group.rank + 1.0)))
    Path(sys.argv[1], f"{group.rank}.json").write_text(json.dumps([group.rank, group.size, total, open_group().size]))
"""


# The fast tests in `test_together` start processes by the command line.
@pytest.mark.slow
def test_a_script_starts_its_own_processes(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert ended(start(script, tmp_path)) == (0, "", "")
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [
        [0, 2, 3.0, 2],
        [1, 2, 3.0, 2],
    ]


@pytest.mark.parametrize("way", ["-c", pytest.param("-", marks=pytest.mark.slow)])
def test_no_processes_without_a_script(tmp_path, way) -> None:
    process = start(way, *([SCRIPT] if way == "-c" else []), tmp_path)
    code, _, errors = ended(process, text=SCRIPT)
    assert code == 1
    assert "devices=2: a notebook" in errors
    assert "torchrun --nproc-per-node 2" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failed_process_raises_in_the_others(tmp_path) -> None:
    code, _, errors = torchrun("fails", tmp_path)
    assert code == 1
    assert "this one is at fault" in errors
    heard = json.loads((tmp_path / "0.json").read_text())
    assert heard["message"].startswith("GroupError: process 0 of 2: another process has ended")
    assert heard["seconds"] < 30


@pytest.mark.slow
def test_a_killed_process_takes_the_others_with_it(tmp_path) -> None:
    code, _, errors = torchrun("killed", tmp_path)
    assert code == 1
    assert "SIGKILL" in errors


@pytest.mark.slow
def test_a_hanging_process_times_out(tmp_path) -> None:
    torchrun("slow", tmp_path)
    assert "has not answered for 5 seconds" in json.loads((tmp_path / "0.json").read_text())["message"]


def test_one_process_does_not_connect(monkeypatch) -> None:
    program = (
        "import sys, torch, kapsi\n"
        "from kapsi.training.launch import open_group\n"
        "for strategy in (None, 'ddp', 'fsdp'):\n"
        "    with open_group(devices=1, nodes=1, strategy=strategy) as group:\n"
        "        model = torch.nn.Linear(2, 1)\n"
        "        call = group.wrap(model)\n"
        "        with group.accumulating(call, True), group.guard():\n"
        "            call(torch.ones(3, 2)).sum().backward()\n"
        "        with group.evaluating(model):\n"
        "            group.norm([p.grad for p in model.parameters()])\n"
        "        group.unwrap(model)\n"
        "        print(group.rank, group.size, group.first, group.sharded, group.broadcast([1]), group.any(True))\n"
        "print(torch.distributed.is_initialized())\n"
    )
    code, out, errors = ended(start("-c", program))
    assert (code, errors) == (0, "")
    assert out.splitlines() == ["0 1 True False [1] True"] * 3 + ["False"]


def test_one_process_under_a_launcher(monkeypatch) -> None:
    started = {
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert open_group().size == 1
    with pytest.raises(SpecError, match=r"devices=2: the launcher was started with --nproc-per-node 1"):
        open_group(devices=2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"devices": 0}, "open_group: .*devices must be at least 1"),
        ({"devices": True}, "open_group.devices: expected"),
        ({"nodes": 1.5}, "open_group.nodes: expected"),
        ({"strategy": "fdsp"}, "open_group.strategy: .*did you mean 'fsdp'"),
        ({"accelerator": "gpu"}, "open_group.accelerator: expected one of cpu, auto"),
        ({"timeout": 0.0}, "timeout must be at least"),
        ({"nodes": 3, "devices": 2}, "nodes=3: .* torchrun --nnodes 3 --nproc-per-node 2"),
        ({"devices": 2}, "devices=2: a notebook"),
    ],
)
def test_wrong_options(monkeypatch, options, expected) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SpecError, match=expected):
        open_group(**options)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"WORLD_SIZE": "2"},
            "without RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start the processes with torchrun",
        ),
        ({"WORLD_SIZE": "two"}, "torchrun"),
        (
            {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
            "start equally many on every node",
        ),
    ],
)
def test_wrong_environments(monkeypatch, variables, expected) -> None:
    if "RANK" in variables:
        variables = variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match=expected):
        open_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
