"""The engine in several processes: weights, records and checkpoints are those of one process at the same global batch.

Run as a program, this file is what the processes do.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kapsi as kp
from kapsi.cli import main as main_of_kapsi
from kapsi.training.distributed import Group
from kapsi.training.launch import open_group
from test_distributed import ended, environment, free_port, start

ROWS = 513
DEEP = kp.rpn([4, 8, 2], kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder(), bias=True)
ADAMW = kp.TrainConfig(solver=kp.AdamW(batch_size=128, learning_rate=0.01), loss="mse", epochs=4)
CASES: dict[str, tuple[kp.ModelSpec, kp.TrainConfig, torch.dtype]] = {
    "adamw": (DEEP, ADAMW, torch.float32),
    "options": (
        DEEP,
        replace(
            ADAMW,
            l2=0.1,
            l1=0.001,
            solver=kp.AdamW(
                learning_rate=0.01,
                batch_size=128,
                ema_decay=0.9,
                max_grad_norm=0.05,
                gradient_accumulation=2,
                schedule="one_cycle",
            ),
        ),
        torch.float32,
    ),
    "small batches": (DEEP, replace(ADAMW, solver=kp.AdamW(learning_rate=0.01, batch_size=2), epochs=1), torch.float32),
    "sgd": (DEEP, replace(ADAMW, solver=kp.SGD(learning_rate=0.0005, batch_size=128)), torch.float32),
}
WHOLE = {
    "lbfgs": (DEEP, kp.TrainConfig(solver="lbfgs", loss="mse", epochs=3, l2=0.01), torch.float64),
    "levenberg_marquardt": (
        DEEP,
        kp.TrainConfig(solver="levenberg_marquardt", loss="mse", epochs=5, l2=0.01),
        torch.float64,
    ),
    "ridge": (kp.rpn([4, 2], kp.Taylor(2), bias=True), kp.TrainConfig(solver="ridge"), torch.float64),
    "alternating": (
        kp.rpn([4, 2], kp.Taylor(2), kp.LowRank(2)),
        kp.TrainConfig(solver="ridge", epochs=4),
        torch.float64,
    ),
}


def rows(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1) + 0.1 * torch.randn(ROWS, 2, generator=generator).to(dtype)
    weight = torch.rand(ROWS, generator=generator).to(dtype)
    return x, y, weight


def fitted(group: Group, case: str) -> dict:
    spec, config, dtype = (CASES | WHOLE)[case]
    model = kp.Model(spec, seed=0, dtype=dtype)
    data = rows(dtype)
    records = kp.fit(model, data, config, validation=data, group=group)
    return {
        "weights": [p.double().flatten().tolist() for p in model.parameters()],
        "losses": [[r.loss, r.validation_loss] for r in records],
        "metrics": [r.metrics for r in records],
    }


def resumed(group: Group, folder: str) -> bool:
    """Return whether a training that was stopped in the middle ends with the same bits."""
    spec, config, dtype = CASES["options"]
    whole = kp.Model(spec, seed=0, dtype=dtype)
    kp.fit(whole, rows(dtype), config, group=group)

    class Stop(Exception):
        pass

    class Kill(kp.Callback):
        def on_step(self, record):
            if (record.epoch, record.step) == (3, 2):
                raise Stop

    for resume, callbacks in ((False, Kill()), (True, ())):
        model = kp.Model(spec, seed=0, dtype=dtype)
        checkpoints = kp.Checkpoints(Path(folder, f"checkpoints-{group.sharded}"), steps=1, resume=resume)
        try:
            kp.fit(model, rows(dtype), config, group=group, checkpoints=checkpoints, callbacks=callbacks)
        except Stop:
            group.barrier()
    return all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))


def main(folder: str, strategies: str) -> None:
    torch.set_num_threads(1)
    for strategy in strategies.split(","):
        with open_group(strategy=strategy) as group:
            cases = CASES if group.sharded else CASES | WHOLE
            found = {case: fitted(group, case) for case in cases}
            found["resumed"] = resumed(group, folder)
            if group.sharded:
                try:
                    fitted(group, "ridge")
                except kp.SpecError as error:
                    found["refused"] = str(error)
            Path(folder, f"{strategy}{group.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def alone() -> dict:
    return {case: fitted(Group(), case) for case in CASES | WHOLE}


def launched(folder: Path, strategies: str, *options: object) -> list[subprocess.Popen[str]]:
    return [start("-m", "torch.distributed.run", *options, __file__, folder, strategies)]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Callable[[str], list[dict]]:
    """Return what each of two processes on one node finds with a strategy; they are started once."""

    @functools.cache
    def found(strategy: str) -> list[dict]:
        folder = tmp_path_factory.mktemp(strategy)
        options = ("--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", free_port())
        code, _, errors = ended(start("-m", "torch.distributed.run", *options, __file__, folder, strategy), 300)
        assert code == 0, errors
        return [json.loads((folder / f"{strategy}{rank}.json").read_text()) for rank in (0, 1)]

    return found


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> dict:
    """What each of two nodes of one process finds: two launchers, on loopback."""
    folder = tmp_path_factory.mktemp("nodes")
    where = f"127.0.0.1:{free_port()}"
    common = (
        "--nnodes",
        2,
        "--nproc-per-node",
        1,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        where,
        "--local-addr",
        "127.0.0.1",
    )
    launchers = [
        start("-m", "torch.distributed.run", *common, __file__, folder, "ddp", GLOO_SOCKET_IFNAME="lo") for _ in (0, 1)
    ]
    for launcher in launchers:
        code, _, errors = ended(launcher, 300)
        assert code == 0, errors
    return {("ddp", rank): json.loads((folder / f"ddp{rank}.json").read_text()) for rank in (0, 1)}


# `test_distributed` divides a model in every run.
EACH = pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])


def near(found: dict, wanted: dict, tolerance: float) -> None:
    for own, other in zip(found["weights"], wanted["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(other), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(wanted["losses"]), rtol=1e-5, atol=1e-7)


@EACH
@pytest.mark.parametrize("case", CASES)
def test_mini_batches_end_with_the_weights_of_one_process(two, alone, case, strategy):
    assert two(strategy)[0][case] == two(strategy)[1][case]
    near(two(strategy)[0][case], alone[case], 1e-6)


@pytest.mark.parametrize("case", WHOLE)
def test_solvers_on_all_rows_end_with_the_weights_of_one_process(two, alone, case):
    assert two("ddp")[0][case] == two("ddp")[1][case]
    near(two("ddp")[0][case], alone[case], 1e-9 if case == "ridge" else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "ridge"])
def test_two_nodes_are_two_processes(nodes, two, alone, case):
    assert nodes["ddp", 0][case] == nodes["ddp", 1][case]
    near(nodes["ddp", 0][case], alone[case], 1e-9 if case == "ridge" else 1e-6)


@EACH
def test_each_row_is_evaluated_once(two, alone, strategy):
    # 513 rows with weights: a row that was counted twice would change the mean.
    for own, other in zip(two(strategy)[0]["adamw"]["metrics"], alone["adamw"]["metrics"], strict=True):
        assert own == pytest.approx(other, rel=1e-6)


@EACH
def test_a_resumed_training_has_the_same_bits(two, strategy):
    assert two(strategy)[0]["resumed"]
    assert two(strategy)[1]["resumed"]


@pytest.mark.slow
def test_a_divided_model_is_for_mini_batches(two):
    assert "ridge needs the whole model on each process; use adamw or sgd, or strategy ddp" in two("fsdp")[0]["refused"]


@pytest.mark.parametrize("way", ["devices", pytest.param("launcher", marks=pytest.mark.slow)])
def test_the_command_line_in_two_processes(tmp_path, monkeypatch, capsys, way):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator)
    with open(tmp_path / "t.csv", "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["a", "b", "c", "y"])
        writer.writerows([[*row, row[0] * row[1] + row[2]] for row in x.tolist()])
    fit = [
        "fit",
        "t.csv",
        "--target",
        "y",
        "--set",
        "training.solver=adamw",
        "--set",
        "training.epochs=5",
    ]
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 300}
    options["stdin"] = subprocess.DEVNULL
    monkeypatch.chdir(tmp_path)
    assert main_of_kapsi([*fit, "--output", "one"]) == 0
    assert capsys.readouterr().out.count("r2:") == 1
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    begin = [sys.executable, *(launcher if way == "launcher" else []), "-m", "kapsi", *fit]
    more = ["--devices", "2"] if way == "devices" else []
    both = subprocess.run([*begin, "--output", "both", *more], **options)
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("r2:") == 1
    assert sorted(os.listdir(tmp_path / "both")) == sorted(os.listdir(tmp_path / "one"))
    models = [kp.load(tmp_path / name / "model.safetensors") for name in ("one", "both")]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if way == "launcher":
        wrong = subprocess.run([*begin, "--output", "wrong", "--devices", "3"], **options)
        assert wrong.returncode != 0
        assert not (tmp_path / "wrong").exists()


if __name__ == "__main__":
    main(*sys.argv[1:])
