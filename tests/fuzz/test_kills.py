"""Kills at any moment of a command: old or new, whole, and after the next command equal to what an undisturbed run writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kapsi.cli import main
from kapsi.data.tabular import write_table

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(main.__code__.co_filename).parents[2]), "OMP_NUM_THREADS": "1"}
LONG = ("fit", "t.csv", "--target", "y", "--folds", "2", "--set", "training.solver=adamw", "--set", "training.epochs=6")
QUICK = ("fit", "t.csv", "--target", "y", "--set", "training.l2=0.01", "--overwrite")
HEADS = ("linear", "additive", "kernel")
AUTO = ("fit", "t.csv", "--target", "y", "--folds", "2", *(word for head in HEADS for word in ("--head", head)))

# A process with everything loaded forks a child per kill, so a kill lands within the work.
KILLER = """
import json, os, signal, sys, time
import torch
from kapsi.cli import main
from kapsi.tables import fitting
fitting.MIN_CHECKPOINT_SECONDS = 0.0  # however short the work
sys.stdout = open(os.devnull, "w")
sys.stderr = open("errors.txt", "w")

def run(words, output=None):
    return main([*words, *([] if output is None else ["--output", output])])

def kill(words, seconds, number):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = main(words)
        except SystemExit as error:
            code = error.code
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    os.kill(child, number)
    status = os.waitpid(child, 0)[1]
    # The work may have ended meanwhile; a request to end takes the exit code of the signal.
    allowed = {signal.SIGTERM: (0, 143), signal.SIGINT: (0, 130)}
    assert number == signal.SIGKILL or os.waitstatus_to_exitcode(status) in allowed[number], (number, status)
    return True

def timed(words, output):
    began = time.monotonic()
    assert run(words, output) == 0
    return time.monotonic() - began

words, output, first, kills, is_file, signals = json.loads(sys.argv[1])
warm, whole = (name + os.path.splitext(output)[1] for name in ("warm", "whole"))
assert run(words, warm) == 0
took = timed(words, whole)
if first:
    assert run(first, output) == 0
killed = 0
old = open(output, "rb").read() if is_file else b""
for i in range(kills):
    killed += kill([*words, "--output", output], took * (i + 0.5) / kills, signals[i % len(signals)])
    if is_file:
        assert open(output, "rb").read() in (old, open(whole, "rb").read()), i
    if os.path.exists("check.json"):
        for check in json.load(open("check.json")):
            assert main(check) == 0, (i, check)
assert main([*words, "--output", output]) == 0
print(killed, file=sys.__stdout__)
"""


def files(folder: str | Path) -> dict[str, object]:
    """Return the contents of a folder, without times."""
    contents: dict[str, object] = {}
    for path in sorted(Path(folder).rglob("*")):
        data: object = path.read_bytes() if path.is_file() else None
        if path.name == "run.json":
            data = {**json.loads(path.read_text()), "created": ""}
            data["leaderboard"] = [{**row, "seconds": 0} for row in data.get("leaderboard", [])]
        if path.suffix == ".jsonl" and b'"experiment"' in path.read_bytes():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            timed = ("started", "seconds", "cpu_seconds", "fit_seconds")
            data = [{name: value for name, value in line.items() if name not in timed} for line in lines]
        contents[str(path.relative_to(folder))] = data
    return contents


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(400, 3))
    write_table("t.csv", {**{f"x{i}": x[:, i].tolist() for i in range(3)}, "y": np.sin(x).sum(1).tolist()})


def killed(
    words: tuple[str, ...],
    output: str,
    kills: int,
    *,
    first: tuple[str, ...] = (),
    file: bool = False,
    signals: tuple[int, ...] = (signal.SIGKILL,),
) -> int:
    """Run a command undisturbed as `whole`, kill it several times with another output, let it end; return the kills that hit."""
    request = json.dumps([words, output, first, kills, file, signals])
    done = subprocess.run([sys.executable, "-c", KILLER, request], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + Path("errors.txt").read_text()
    os.unlink("errors.txt")
    return int(done.stdout)


KILLS = pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])


@KILLS
def test_fit(kills) -> None:
    """A run replaced by another: after each kill a whole run is there."""
    Path("check.json").write_text(json.dumps([["info", "run"], ["evaluate", "run", "t.csv"]]))
    hit = killed((*QUICK, "--seed", "1"), "run", kills, first=(*QUICK, "--seed", "0"))
    assert hit >= kills // 2
    assert files("run") == files("whole")
    assert sorted(os.listdir()) == ["check.json", "run", "t.csv", "warm", "whole"]


@KILLS
def test_resume(kills) -> None:
    """Killed again and again while it resumes: the run is bitwise the undisturbed run."""
    hit = killed((*LONG, "--checkpoint-steps", "1", "--resume"), "run", kills)
    assert hit >= kills // 3
    assert files("run") == files("whole")
    assert sorted(os.listdir()) == ["run", "t.csv", "warm", "whole"]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [30])
def test_resume_the_automatic_model(kills) -> None:
    """Killed, terminated and interrupted while it resumes: model, configuration and predictions of the undisturbed run."""
    hit = killed((*AUTO, "--resume"), "run", kills, signals=(signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    assert hit >= kills // 3
    assert files("run") == files("whole")
    assert sorted(os.listdir()) == ["run", "t.csv", "warm", "whole"]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [30])
def test_replace_by_the_automatic_model(kills) -> None:
    """A run replaced by another, killed, terminated and interrupted: after each a whole run is there."""
    Path("check.json").write_text(json.dumps([["info", "run"], ["evaluate", "run", "t.csv"]]))
    signals = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
    words = (*AUTO, "--resume", "--overwrite", "--seed", "1")
    hit = killed(words, "run", kills, first=(*QUICK, "--seed", "0"), signals=signals)
    assert hit >= kills // 3
    assert files("run") == files("whole")
    assert sorted(os.listdir()) == ["check.json", "run", "t.csv", "warm", "whole"]


@KILLS
def test_predict(kills) -> None:
    """An old file of predictions replaced by a new one: after each kill it is one or the other."""
    assert main([*QUICK, "--output", "run"]) == 0
    write_table("o.csv", {"prediction": [1.0] * 400, "y": [1.0] * 400})
    hit = killed(("predict", "run", "t.csv", "--overwrite"), "o.csv", kills, file=True)
    assert hit >= 1
    assert Path("o.csv").read_bytes() == Path("whole.csv").read_bytes()
    assert sorted(os.listdir()) == ["o.csv", "run", "t.csv", "warm.csv", "whole.csv"]


@pytest.mark.slow  # tests/test_reproduce.py interrupts an experiment in each run
@KILLS
def test_reproduce(kills) -> None:
    """Experiments killed and run again: the same results as of an undisturbed run."""
    words = ("reproduce", "elementary", "--quick", "--only", "E.0,E.1,E.2", "--jobs", "1")
    hit = killed(words, "results", kills)
    assert hit >= 1
    assert files("results") == files("whole")
    assert sorted(os.listdir()) == ["results", "t.csv", "warm", "whole"]
