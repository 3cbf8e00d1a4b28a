"""Checkpoints: what resumes ends with the bits of what was never interrupted; what is damaged or does not fit is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import kapsi as kp
from training_options import nested

MLP = kp.rpn([3, 8, 1], bias=True, output="tanh")
DROPOUT = kp.rpn([3, 8, 1], before=("dropout",), bias=True, output="batch_norm")
LOW_RANK = kp.rpn([3, 1], kp.Taylor(2), kp.LowRank(2))
CLASSES = kp.rpn([3, 3], bias=True)


def numbers(rows=70, dtype=torch.float64, seed=0):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return x, x[:, :1].sin() + 0.3 * x[:, 1:2] * x[:, 2:]


def labels(rows=70):
    x, y = numbers(rows)
    return x, torch.bucketize(y[:, 0], torch.tensor([-0.3, 0.4], dtype=torch.float64))


class Stop(Exception):
    """Stands for a kill: nothing after it is done."""


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


CASES = {
    "adamw": (MLP, numbers, {"solver": "adamw", "batch_size": 16, "epochs": 4}),
    "sgd": (
        MLP,
        numbers,
        {"solver": {"kind": "sgd", "batch_size": 16, "schedule": "one_cycle", "max_grad_norm": 0.5}, "epochs": 4},
    ),
    "dropout": (
        DROPOUT,
        numbers,
        {"solver": {"kind": "adamw", "batch_size": 16, "ema_decay": 0.9}, "epochs": 4, "l2": 0.1},
    ),
    "drop_connect": (
        kp.rpn([3, 8, 1], kp.Taylor(2), kp.DropConnect(0.7)),
        numbers,
        {"solver": {"kind": "adamw", "batch_size": 16}, "epochs": 4},
    ),
    "lbfgs": (MLP, numbers, {"solver": "lbfgs", "epochs": 6}),
    "levenberg_marquardt": (MLP, numbers, {"solver": {"kind": "levenberg_marquardt", "restarts": 3}, "epochs": 12}),
    "alternating": (LOW_RANK, numbers, {"solver": "ridge", "epochs": 8}),
    "reweighted": (CLASSES, labels, {"solver": "ridge", "loss": "cross_entropy", "l2": 0.01, "epochs": 8}),
    "closed form": (kp.rpn([3, 1], kp.Taylor(2)), numbers, {"solver": "ridge"}),
}


def run(case, folder=None, *, resume=False, stop=None, validation=True, steps=1, data=None, keep=3, fit=True, **others):
    spec, make, options = CASES[case]
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    seen = []

    class Watch(kp.Callback):
        def on_step(self, record):
            seen.append((record.epoch, record.step))
            if stop is not None and len(seen) == stop:
                raise Stop

    checkpoints = None if folder is None else kp.Checkpoints(folder, steps=steps, resume=resume, keep=keep)
    held = (make(30)[0], make(30)[1]) if validation else None
    config = kp.TrainConfig(**nested(**{**options, **others}))
    try:
        if fit:
            records = kp.fit(model, data or make(), config, validation=held, checkpoints=checkpoints, callbacks=Watch())
        else:
            records = list(
                kp.train(model, data or make(), config, validation=held, checkpoints=checkpoints, callbacks=Watch())
            )
    except Stop:
        return None, None, len(seen)
    return state(model), records, len(seen)


def timeless(records):
    return [record._replace(seconds=0.0) for record in records]


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_resumed_runs_are_bitwise_identical(case, validation, tmp_path):
    whole, records, taken = run(case, validation=validation)
    for stop in sorted({2, taken // 2, taken - 1, taken}):
        if stop < 1 or (taken == 1 and stop > 1):
            continue
        folder = tmp_path / str(stop)
        assert run(case, folder, stop=stop, validation=validation)[0] is None
        again, found, left = run(case, folder, resume=True, validation=validation)
        # The step of the kill is done and was not written down.
        assert left == taken - stop + 1
        assert same(whole, again)
        assert timeless(found) == timeless(records)


@pytest.mark.parametrize("case", ["adamw", "dropout", "lbfgs"])
def test_train_resumes_as_well(case, tmp_path):
    whole, records, taken = run(case, fit=False)
    run(case, tmp_path / "a", stop=taken // 2, fit=False)
    again, found, _ = run(case, tmp_path / "a", resume=True, fit=False)
    assert same(whole, again)
    assert timeless(found) == timeless(records)[-len(found) :]


def test_a_finished_run_returns_its_records(tmp_path):
    first, records, _ = run("adamw", tmp_path / "a")
    again, found, taken = run("adamw", tmp_path / "a", resume=True)
    assert taken == 0
    assert same(first, again)
    assert found == records


def test_a_run_may_go_on_for_more_epochs(tmp_path):
    options = {"schedule": "constant"}
    whole, _, _ = run("adamw", epochs=6, **options)
    run("adamw", tmp_path / "a", **options)
    again, records, _ = run("adamw", tmp_path / "a", resume=True, epochs=6, **options)
    assert same(whole, again)
    assert [record.number for record in records] == [1, 2, 3, 4, 5, 6]


def test_without_checkpoints_there_is_nothing_to_resume(tmp_path):
    whole, _, _ = run("adamw")
    assert same(whole, run("adamw", tmp_path / "none", resume=True)[0])


def test_the_last_few_are_kept(tmp_path):
    run("adamw", tmp_path / "a", keep=2)
    assert sorted(os.listdir(tmp_path / "a")) == ["step-000000000019.safetensors", "step-000000000020.safetensors"]
    run("adamw", tmp_path / "b", steps=8)
    assert [name[-14:-12] for name in sorted(os.listdir(tmp_path / "b"))] == ["08", "16", "20"]


def test_damaged_checkpoints_of_later_steps_do_not_count_among_those_kept(tmp_path):
    folder = tmp_path / "a"
    run("adamw", folder, stop=13)
    first, *later = sorted(folder.iterdir())
    for path in later:
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="this checkpoint is damaged"):
        run("adamw", folder, resume=True, stop=2, keep=1)
    assert not first.exists()
    with pytest.warns(UserWarning, match="this checkpoint is damaged"):  # one is left to go on from
        again, _, _ = run("adamw", folder, resume=True, keep=1)
    assert same(run("adamw")[0], again)


def test_checkpoints_are_written_by_time(tmp_path):
    model = kp.Model(MLP, seed=0, dtype=torch.float64)
    checkpoints = kp.Checkpoints(tmp_path / "a", minutes=0.0, keep=1000)
    kp.fit(model, numbers(), solver=kp.AdamW(batch_size=16), epochs=2, checkpoints=checkpoints)
    assert len(os.listdir(tmp_path / "a")) == 10
    model = kp.Model(MLP, seed=0, dtype=torch.float64)
    kp.fit(
        model,
        numbers(),
        solver=kp.AdamW(batch_size=16),
        epochs=2,
        checkpoints=kp.Checkpoints(tmp_path / "b", minutes=5),
    )
    assert len(os.listdir(tmp_path / "b")) == 1  # the end


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, tmp_path):
    whole, _, _ = run("adamw")
    folder = tmp_path / "a"
    run("adamw", folder, stop=13)
    last = sorted(folder.iterdir())[-1]
    data = bytearray(last.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[-100] ^= 1
    elif damage == "empty":
        data = bytearray()
    else:
        place = data.index(b"lowest") + 12
        data[place] = ord("7") if data[place] != ord("7") else ord("8")
    last.write_bytes(data)
    with pytest.warns(UserWarning, match=rf"{last.name}': this checkpoint is damaged \(.*\); the previous one is used"):
        again, _, left = run("adamw", folder, resume=True)
    assert left == 20 - 11
    assert same(whole, again)


def test_when_all_are_damaged_nothing_is_lost_in_silence(tmp_path):
    folder = tmp_path / "a"
    run("adamw", folder, stop=13)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(kp.RunError, match="all checkpoints are damaged"):
        run("adamw", folder, resume=True)


def test_a_checkpoint_of_a_newer_version_is_refused(tmp_path):
    folder = tmp_path / "a"
    run("adamw", folder, stop=5)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes().replace(b'"format_version":"1"', b'"format_version":"9"'))
    with pytest.raises(kp.RunError, match="has format version 9, this kapsi reads up to 1; upgrade kapsi"):
        run("adamw", folder, resume=True)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"learning_rate": 0.1}, r"learning_rate 0.1 \(in the checkpoint 0.005\)"),
        ({"epochs": 9}, r"epochs 9 \(in the checkpoint 4\)"),
        ({"seed": 1}, "seed 1"),
        ({"data": numbers(71)}, "the data"),
        ({"data": (numbers()[0] + 1, numbers()[1])}, "the data"),
        ({"data": (numbers()[0], numbers()[1].index_fill(0, torch.tensor([69]), 1.5))}, "the data"),
        ({"validation": False}, "the validation rows"),
        ({"fit": False}, "train instead of fit"),
    ],
)
def test_checkpoints_of_another_run_are_refused(others, message, tmp_path):
    run("adamw", tmp_path / "a", stop=8)
    with pytest.raises(kp.SpecError, match=f"is of another run: .*{message}"):
        run("adamw", tmp_path / "a", resume=True, **others)


def test_another_model_is_refused(tmp_path):
    run("adamw", tmp_path / "a", stop=8)
    model = kp.Model(kp.rpn([3, 9, 1], bias=True, output="tanh"), seed=0, dtype=torch.float64)
    with pytest.raises(kp.SpecError, match="is of another run: the model"):
        kp.fit(
            model,
            numbers(),
            kp.TrainConfig(**nested(**CASES["adamw"][2])),
            validation=numbers(30),
            checkpoints=kp.Checkpoints(tmp_path / "a", resume=True),
        )


def test_checkpoints_are_removed_with_leftovers_of_killed_processes(tmp_path):
    for name in ("step-000000000001.safetensors", "finished.txt"):
        (folder := tmp_path / f"a/part/.{name}.new-12-host").mkdir(parents=True)
        (folder / ".tmpx3Yz").write_text("half")
    kp.Checkpoints(tmp_path / "a").remove()
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.tmpx3Yz").write_text("of others")
    kp.Checkpoints(tmp_path / "a").remove()
    assert os.listdir(tmp_path / "a") == [".tmpx3Yz"]


def test_checkpoints_are_not_overwritten_without_resume(tmp_path):
    run("adamw", tmp_path / "a", stop=8)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(kp.RunError, match="has checkpoints of an earlier run; resume it, or give another folder"):
        run("adamw", tmp_path / "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_another_number_of_threads_is_reported(tmp_path):
    run("adamw", tmp_path / "a", stop=8)
    torch.set_num_threads(2)
    try:
        with pytest.warns(
            UserWarning, match=r"continues with threads 2 \(in the checkpoint 1\); the last digits may differ"
        ):
            run("adamw", tmp_path / "a", resume=True)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "Checkpoints.steps: expected an integer of at least 1, got 0"),
        ({"steps": 1.5}, "Checkpoints.steps: expected"),
        ({"keep": 0}, "Checkpoints.keep: expected an integer of at least 1"),
        ({"minutes": -1}, "Checkpoints.minutes: expected a finite number of at least 0"),
        ({"minutes": float("nan")}, "Checkpoints.minutes: expected a finite number"),
        ({"resume": "no"}, "Checkpoints.resume: expected"),
        ({"say": None}, "say.: expected a callable"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(kp.SpecError, match=message):
        kp.Checkpoints("x", **options)


@pytest.mark.parametrize("folder", [None, 3, b"x"])
def test_a_folder_is_a_path(folder):
    with pytest.raises(kp.SpecError, match="expected the path of a folder"):
        kp.Checkpoints(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoints": "folder"}, "expected kapsi.Checkpoints"),
        ({"group": "ddp"}, "expected a group from kapsi.open_group"),
        ({"callbacks": 1}, "expected a callable such as kapsi.CsvLog"),
        ({"callbacks": "log.csv"}, "expected a callable such as kapsi.CsvLog"),
    ],
)
def test_wrong_types_of_arguments(options, message):
    with pytest.raises(kp.SpecError, match=message):
        kp.fit(kp.Model(MLP, seed=0, dtype=torch.float64), numbers(), epochs=1, **options)


@pytest.mark.parametrize("folder", ["file", "file/a"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(folder, tmp_path):
    (tmp_path / "file").write_text("")
    model = kp.Model(MLP, seed=0, dtype=torch.float64)
    with pytest.raises(kp.RunError, match="is not a folder; give another folder for checkpoints"):
        kp.fit(model, numbers(), callbacks=pytest.fail, checkpoints=kp.Checkpoints(tmp_path / folder))


def test_a_full_disk_is_one_line_and_leaves_the_checkpoints_before(tmp_path):
    resource = pytest.importorskip("resource")
    folder = tmp_path / "a"
    run("adamw", folder, stop=13)
    before = sorted(path.name for path in folder.iterdir())
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(kp.FileError, match=r"cannot write the checkpoint: .*; make room"):
            run("adamw", folder, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert same(run("adamw")[0], run("adamw", folder, resume=True)[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"patience": 1, "learning_rate": 0.3}, {"patience": 40, "learning_rate": 0.3}),
        ({"seconds": 0.001}, {"seconds": None}),
        ({"epochs": 1}, {"epochs": 12}),
    ],
)
def test_a_run_that_a_limit_has_ended_goes_on_when_the_limit_is_raised(before, after, tmp_path):
    others = {"epochs": 12, "schedule": "constant"}
    _, short, _ = run("adamw", tmp_path / "a", **others | before)
    assert len(short) < 12
    again, records, _ = run("adamw", tmp_path / "a", resume=True, **others | after)
    whole, wanted, _ = run("adamw", **others | after)
    assert same(whole, again)
    assert timeless(records) == timeless(wanted)
    assert len(records) == 12


# ------------------------------------------------------------------------------------------------ interrupts


@pytest.fixture
def listening():
    """Let interrupts in; tests that run in the background of a shell inherit that they are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_an_interrupt_ends_the_epoch_and_keeps_the_weights(tmp_path):
    model = kp.Model(MLP, seed=0, dtype=torch.float64)

    class Interrupt(kp.Callback):
        def on_step(self, record):
            if (record.epoch, record.step) == (3, 2):
                signal.raise_signal(signal.SIGINT)

    config = kp.TrainConfig(**nested(**CASES["adamw"][2]))
    before = signal.getsignal(signal.SIGINT)
    records = kp.fit(
        model,
        numbers(),
        config,
        validation=numbers(30),
        callbacks=Interrupt(),
        checkpoints=kp.Checkpoints(tmp_path / "a", minutes=None),
    )
    assert signal.getsignal(signal.SIGINT) is before
    assert [record.number for record in records] == [1, 2, 3]
    assert records[-1].ended == "interrupted"
    best = min(record.validation_loss for record in records)
    held = numbers(30)
    assert float((kp.predict(model, held[0]) - held[1]).square().mean()) == pytest.approx(best)
    assert not model.training
    whole, _, _ = run("adamw")
    again, found, _ = run("adamw", tmp_path / "a", resume=True)
    assert same(whole, again)
    assert [record.number for record in found] == [1, 2, 3, 4]


@pytest.mark.usefixtures("listening")
def test_a_second_interrupt_is_an_exception():
    model = kp.Model(MLP, seed=0, dtype=torch.float64)

    class Interrupt(kp.Callback):
        def on_step(self, record):
            if record.epoch == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        kp.fit(model, numbers(), solver=kp.AdamW(batch_size=16), epochs=4, callbacks=Interrupt())
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


# ------------------------------------------------------------------------------------------------ kills

# Each run is a process, forked from one that has loaded torch: what is killed has nothing but what is on the disk.
KILLED = """
import os, signal, sys, time, torch, kapsi as kp
torch.set_num_threads(1)
solver, place, *shares = sys.argv[1:]
generator = torch.Generator().manual_seed(0)
x = torch.randn(1000, 4, generator=generator, dtype=torch.float64)
y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
options = {
    "adamw": dict(solver=kp.AdamW(batch_size=64), epochs=12),
    "levenberg_marquardt": dict(solver=kp.LevenbergMarquardt(tolerance=0.0), epochs=60),
}

def begun(name):
    child = os.fork()
    if child == 0:
        spec = kp.rpn([4, 6, 1], kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder(), output="tanh")
        model = kp.Model(spec, seed=0, dtype=torch.float64)
        checkpoints = kp.Checkpoints(f"{place}/{name}", steps=3, resume=True)
        kp.fit(model, (x, y), validation=0.2, checkpoints=checkpoints, patience=1000, **options[solver])
        kp.save(model, f"{place}/{name}.safetensors")
        os._exit(0)
    return child

def ended(child):
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

start = time.monotonic()
ended(begun("whole"))
took = time.monotonic() - start
for share in map(float, shares):
    child = begun("kills")
    time.sleep(share * took)
    os.kill(child, signal.SIGKILL)
    ended(child)
    input()
ended(begun("kills"))
"""


@pytest.mark.slow  # tests/fuzz/test_kills.py kills and resumes in each run
@pytest.mark.parametrize("solver", ["adamw", "levenberg_marquardt"])
def test_a_run_killed_three_times_is_bitwise_identical(solver, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(kp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    shares = [str(share) for share in np.random.default_rng(0).uniform(0.1, 0.4, 3)]
    command = [sys.executable, "-c", KILLED, solver, str(tmp_path), *shares]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "0\n"
        for _ in shares:
            assert process.stdout.readline() == f"{-signal.SIGKILL}\n"
            for path in (tmp_path / "kills").glob("step-*.safetensors"):
                assert json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.stdout.readline() == "0\n"
    assert (tmp_path / "kills.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert [p.name for p in (tmp_path / "kills").iterdir() if p.name.startswith(".")] == []
