"""Drawn files through the command line: exit code 0, or one printable line on standard error and exit code 2.

Every case runs in this process: below 30 s and 2 GB, without a traceback, a warning or a leftover file.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import drawn

from kapsi.cli import common, main
from kapsi.data.tabular import write_table

QUICK = ("--set", "training.l2=0.01", "--set", "training.epochs=2")
SECONDS, BYTES = 30, 2 * 2**30
EACH, SLOW = 25, 975


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A classification run with numbers, a category and missing values."""
    folder = tmp_path_factory.mktemp("good")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    write_table(
        folder / "t.csv",
        {
            "a": x[:, 0].tolist(),
            "b": [None if i % 7 == 0 else value for i, value in enumerate(x[:, 1].tolist())],
            "c": [["u", "v", "w"][i % 3] for i in range(40)],
            "y": np.where(x[:, 0] > 0, "yes", "no").tolist(),
        },
    )
    assert main(["fit", str(folder / "t.csv"), "--target", "y", *QUICK, "--output", str(folder / "run")]) == 0
    return folder


Check = Callable[..., int]


@pytest.fixture
def kept(tmp_path, monkeypatch, capfd) -> Check:
    """Run a command and check the contract; return the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "DELAY", math.inf)  # no first line, however slow the machine is

    def check(where: str, *words: str, new: tuple[str, ...] = ()) -> int:
        before = set(os.listdir())
        capfd.readouterr()
        began = time.process_time()  # other programs on the machine do not count
        code = main(list(words))
        seconds = time.process_time() - began
        out, err = capfd.readouterr()
        lines = [line for line in err.split("\n")[:-1] if not (code == 0 and line.startswith("note: "))]
        assert code in (0, 2), (where, code, err)
        assert len(lines) == (code == 2), (where, err)
        assert err[-1:] in ("", "\n"), (where, err)
        assert all(line.startswith("kapsi: ") and len(line) < 2100 for line in lines), (where, err)
        assert all(letter.isprintable() or letter in "\n\u00a0" for letter in out + err), (where, out, err)
        assert code == 0 or out == "", (where, out)
        assert seconds < SECONDS, (where, seconds)
        assert set(os.listdir()) - before <= (set(new) if code == 0 else set()), where
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < BYTES, where
        return code

    return check


def cases(name: str) -> pytest.MarkDecorator:
    """Draw 25 cases in every run, 975 further ones in the slow set."""
    rest = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(EACH, EACH + SLOW)]
    return pytest.mark.parametrize("seed", [*range(EACH), *rest], ids=lambda seed: f"{name}{seed}")


@cases("table")
def test_tables(seed, good, kept, tmp_path) -> None:
    rng = np.random.default_rng((1, seed))
    file = drawn.table(rng, tmp_path).name
    fitted = kept(f"fit {seed}", "fit", file, "--target", "y", *QUICK, "--output", "new", new=("new",))
    run = "new" if fitted == 0 else str(good / "run")
    kept(f"predict {seed}", "predict", run, file, "--output", "o.csv", new=("o.csv",))
    kept(f"evaluate {seed}", "evaluate", run, file)


@cases("specification")
def test_specifications(seed, good, kept, tmp_path) -> None:
    rng = np.random.default_rng((2, seed))
    file = drawn.specification(rng, tmp_path).name
    if kept(f"info {seed}", "info", file) == 0 or rng.random() < 0.3:
        fit = ("fit", str(good / "t.csv"), "--target", "y", "--spec", file, *QUICK)
        kept(f"fit {seed}", *fit, "--set", "widths.0=null", "--set", "widths.1=null", "--output", "new", new=("new",))


@cases("run")
def test_run_folders(seed, good, kept, tmp_path) -> None:
    run = drawn.run_folder(np.random.default_rng((3, seed)), good / "run", tmp_path).name
    kept(f"info {seed}", "info", run)
    kept(f"predict {seed}", "predict", run, str(good / "t.csv"), "--output", "o.csv", new=("o.csv",))
    kept(f"evaluate {seed}", "evaluate", run, str(good / "t.csv"))


@pytest.fixture(scope="module")
def automatic(good, tmp_path_factory) -> Path:
    """A run of the automatic model with heads of several kinds."""
    run = tmp_path_factory.mktemp("automatic") / "run"
    heads = ("linear", "additive", "kernel", "extra_trees")
    words = ("fit", str(good / "t.csv"), "--target", "y", *(word for head in heads for word in ("--head", head)))
    assert main([*words, "--output", str(run)]) == 0
    return run


@cases("automatic")
def test_runs_of_the_automatic_model(seed, good, automatic, kept, tmp_path) -> None:
    run = drawn.run_folder(np.random.default_rng((5, seed)), automatic, tmp_path).name
    kept(f"info {seed}", "info", run)
    kept(f"predict {seed}", "predict", run, str(good / "t.csv"), "--output", "o.csv", new=("o.csv",))
    kept(f"evaluate {seed}", "evaluate", run, str(good / "t.csv"))


@cases("model")
def test_model_files(seed, good, kept, tmp_path) -> None:
    file = drawn.model_file(np.random.default_rng((4, seed)), good / "run", tmp_path).name
    kept(f"info {seed}", "info", file)
