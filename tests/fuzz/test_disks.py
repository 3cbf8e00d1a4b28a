"""Fits at once on one name, full disks and mixed run folders: one line and exit code 2, or a whole run; nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kapsi.cli import main
from kapsi.data.tabular import write_table

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(main.__code__.co_filename).parents[2]), "OMP_NUM_THREADS": "1"}
HEADS = ("--head", "linear", "--head", "additive")
FIT = ("fit", "t.csv", "--target", "y", *HEADS, "--output", "run")

# A process with everything loaded forks a child per command, so the commands overlap.
AT_ONCE = """
import json, os, sys
import torch
from kapsi.cli import main
from kapsi.tables import fitting
fitting.MIN_CHECKPOINT_SECONDS = 0.0
children = []
for number, words in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        sys.stderr = open(f"errors-{number}.txt", "w")
        code = 1
        try:
            code = main(words)
        finally:
            sys.stderr.flush()
            os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(json.dumps(codes))
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(120, 3))
    write_table("t.csv", {**{f"x{i}": x[:, i].tolist() for i in range(3)}, "y": np.sin(x).sum(1).tolist()})


def at_once(*commands: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Run commands at once; return their codes and their errors without notes."""
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, json.dumps(commands)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    errors = []
    for number in range(len(commands)):
        path = Path(f"errors-{number}.txt")
        errors.append("".join(line for line in path.read_text().splitlines(True) if not line.startswith("note: ")))
        path.unlink()
    return json.loads(done.stdout), errors


def test_fits_at_once_on_one_name() -> None:
    """One run is written; the others end with one line."""
    codes, errors = at_once(*((*FIT, "--seed", str(seed)) for seed in range(3)))
    assert sorted(codes) == [0, 2, 2]
    for code, error in zip(codes, errors, strict=True):
        assert len(error.splitlines()) == (code == 2), error
    assert sorted(os.listdir()) == ["run", "t.csv"]
    assert main(["evaluate", "run", "t.csv"]) == 0


@pytest.mark.slow
def test_replacements_at_once() -> None:
    """Fits of different seeds that replace one run: each ends well or with one line, and a whole run stays."""
    assert main([*FIT]) == 0
    codes, errors = at_once(*((*FIT, "--overwrite", "--seed", str(seed)) for seed in range(3)))
    assert 0 in codes
    for code, error in zip(codes, errors, strict=True):
        assert (code, len(error.splitlines())) in ((0, 0), (2, 1)), (code, error)
    assert sorted(os.listdir()) == ["run", "t.csv"]
    assert main(["evaluate", "run", "t.csv"]) == 0
    seeds = [0, 1, 2]
    for seed in seeds:
        assert main([*FIT[:-1], f"alone-{seed}", "--seed", str(seed)]) == 0
    model = Path("run/model.safetensors").read_bytes()
    assert model in [Path(f"alone-{seed}/model.safetensors").read_bytes() for seed in seeds]


# ------------------------------------------------------------------------------------------------ full disks


@pytest.fixture
def small(tmp_path) -> Iterator[Path]:
    """A disk of 64 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def line_of(capsys, *words: str) -> str:
    """Return the one line of a command that ends with exit code 2."""
    capsys.readouterr()
    code = main(list(words))
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert (code, len(err)) == (2, 1), (code, err)
    return err[0]


@pytest.mark.parametrize("room", [0, 8, 24, *(pytest.param(room, marks=pytest.mark.slow) for room in (4, 16, 32, 40))])
def test_a_full_disk_during_a_fit(small, capsys, room) -> None:
    """With some kilobytes left: the old run, or a new one, whole."""
    write_table("big.csv", {f"x{i}": np.random.default_rng(i).normal(size=60).tolist() for i in range(40)})
    (small / "fill").write_bytes(b"0" * (64 - room) * 1024)
    target = str(small / "run")
    words = ["fit", "big.csv", "--target", "x0", "--head", "linear", "--output", target]
    code = main(words)
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert (code, len(err)) in ((0, 0), (2, 1)), (code, err)
    assert sorted(os.listdir(small)) == (["fill", "run"] if code == 0 else ["fill"])
    if code == 0:
        assert main(["info", target]) == 0
    else:
        assert "No space left" in err[0] or "cannot write" in err[0], err


def test_a_full_disk_keeps_the_old_run_and_the_old_predictions(small, capsys) -> None:
    target, output = str(small / "run"), str(small / "o.csv")
    assert main([*FIT[:-1], target]) == 0
    assert main(["predict", target, "t.csv", "--output", output]) == 0
    before = {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}
    used = os.statvfs(small)
    (small / "fill").write_bytes(b"0" * used.f_bavail * used.f_frsize)
    assert "space" in line_of(capsys, *FIT[:-1], target, "--overwrite", "--seed", "1")
    assert "space" in line_of(capsys, "predict", target, "t.csv", "--output", output, "--overwrite")
    assert "space" in line_of(capsys, "predict", target, "t.csv", "--output", str(small / "new.csv"))
    assert "space" in line_of(capsys, "predict", target, "t.csv", "--output", str(small / "new.parquet"))
    (small / "fill").unlink()
    assert {path: path.read_bytes() for path in small.rglob("*") if path.is_file()} == before
    assert main(["evaluate", target, "t.csv"]) == 0


# ------------------------------------------------------------------------------------------------ mixed folders


def test_files_of_another_run(capsys) -> None:
    """Each file of one run in another, with and without its checksum: one line, or a model that fits."""
    assert main([*FIT]) == 0
    write_table("u.csv", {"a": list(range(60)), "c": ["u", "v", "w"] * 20, "y": ["p", "q", "q", "p"] * 15})
    assert main(["fit", "u.csv", "--target", "y", *HEADS, "--output", "other"]) == 0
    for name in ("model.safetensors", "preprocessing.json", "config.yaml", "run.json"):
        for sealed in (False, True):
            shutil.rmtree("mixed", ignore_errors=True)
            shutil.copytree("run", "mixed")
            shutil.copy(f"other/{name}", f"mixed/{name}")
            if sealed and name != "run.json":
                manifest = json.loads(Path("mixed/run.json").read_text())
                manifest["files"][name] = json.loads(Path("other/run.json").read_text())["files"][name]
                Path("mixed/run.json").write_text(json.dumps(manifest))
            for words in (
                ("info", "mixed"),
                ("evaluate", "mixed", "t.csv"),
                ("predict", "mixed", "t.csv", "--output", "-"),
            ):
                assert "damaged run" in line_of(capsys, *words), (name, sealed, words)


@pytest.mark.parametrize(
    "board",
    [
        [{"head": "sum", "loss": "x", "score": None, "seconds": [], "weight": {}}],
        None,
        *(pytest.param(board, marks=pytest.mark.slow) for board in ([], {}, "x", [1], [{"head": 1}])),
    ],
    ids=str,
)
def test_an_edited_leaderboard(capsys, board) -> None:
    """Predictions, scores and the page of a run do not depend on its leaderboard."""
    assert main([*FIT]) == 0
    manifest = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps({**manifest, "leaderboard": board}))
    for words in (("info", "run"), ("evaluate", "run", "t.csv"), ("predict", "run", "t.csv", "--output", "-")):
        capsys.readouterr()
        code = main(list(words))
        err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
        assert (code, err) == (0, []), (words, err)


@pytest.mark.parametrize("name", ["model.safetensors", "preprocessing.json", "config.yaml", "run.json"])
@pytest.mark.parametrize(
    "damage", ["half", "missing", *(pytest.param(word, marks=pytest.mark.slow) for word in ("empty", "folder"))]
)
def test_a_damaged_file(capsys, name, damage) -> None:
    assert main([*FIT]) == 0
    path = Path("run", name)
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(data[: len(data) // 2] if damage == "half" else b"")
    for words in (("info", "run"), ("evaluate", "run", "t.csv"), ("predict", "run", "t.csv", "--output", "o.csv")):
        line = line_of(capsys, *words)
        assert "damaged run" in line or "not a run folder" in line, (words, line)
    assert not Path("o.csv").exists()
