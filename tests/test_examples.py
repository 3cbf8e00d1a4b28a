"""The example package: its own tests, its size, and training with its functions once it is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import kapsi
from forked import each

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "outside_package"


def environment(*paths) -> dict[str, str]:
    source = Path(kapsi.__file__).parents[1]
    path = os.pathsep.join(map(str, (*paths, source)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "KAPSI_PLUGINS": "kapsi-steps, all"}


def run(*command, paths=()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment(*paths), capture_output=True, text=True, check=False
    )


def installed(folder: Path, name: str, module: str) -> Path:
    """Make what installing a package leaves for others to find it: its name and its entry point."""
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[kapsi.functions]\n{name} = {module}\n")
    return folder


@pytest.mark.slow  # as the laws of kapsi, in a process of its own
def test_its_own_tests_pass() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", EXAMPLE, paths=[EXAMPLE / "src"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout


def test_each_function_is_one_short_file() -> None:
    files = sorted((EXAMPLE / "src").rglob("*.py"))
    assert {path.stem for path in files} == {"__init__", "adagrad", "coverage", "outer", "pinball", "soft_steps"}
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 55


def test_its_entry_point_is_the_one_that_kapsi_reads() -> None:
    import tomllib

    from kapsi.installed import GROUP

    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][GROUP] == {"kapsi-steps": "kapsi_steps"}


@pytest.mark.slow  # the command line finds it in every run
def test_an_installed_package_is_found_by_name(tmp_path) -> None:
    paths = [installed(tmp_path, "kapsi-steps", "kapsi_steps"), EXAMPLE / "src"]
    code = """
import sys, kapsi as kp
kp.from_dict({"widths": [2, 1]})
assert "kapsi_steps" not in sys.modules, "a package that nobody asks for is loaded"
spec = kp.from_dict({"widths": [2, 1], "layers": [{"heads": [{"expansion": {"kind": "soft_steps", "steps": 3}}]}]})
kp.save(kp.Model(spec, seed=0), sys.argv[1])
"""
    done = run("-c", code, tmp_path / "m.safetensors", paths=paths)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # A new process knows the name of the file's function too.
    info, functions = each(
        tmp_path / "said",
        f"main('info', {str(tmp_path / 'm.safetensors')!r})",
        "main('functions', 'soft_steps', '--set', 'steps=3')",
        env=environment(*paths),
    )
    assert (info.returncode, functions.returncode) == (0, 0), info.stderr + functions.stderr
    assert "SoftSteps" in info.stdout or "soft_steps" in info.stdout
    assert "D = m·G; 12 for m = 4" in functions.stdout
    assert "kapsi_steps.SoftSteps" in functions.stdout or "kapsi_steps.soft_steps.SoftSteps" in functions.stdout


def test_an_installed_package_is_imported_with_consent_only(tmp_path) -> None:
    paths = [installed(tmp_path, "kapsi-steps", "kapsi_steps"), EXAMPLE / "src"]
    (tmp_path / "spec.yaml").write_text("widths: [2, 1]\nlayers: {heads: {expansion: soft_steps}}\n")
    code = """
import sys, kapsi as kp
try:
    kp.load_spec(sys.argv[1])
except kp.SpecError as error:
    assert "no expansion is called 'soft_steps'" in str(error)
    assert "not imported without consent: set the environment variable KAPSI_PLUGINS=kapsi-steps" in str(error)
    assert "kapsi_steps" not in sys.modules
import kapsi_steps  # the other consent
assert kp.load_spec(sys.argv[1]).layers[0].heads[0].expansion == kapsi_steps.SoftSteps()
"""
    environ = {**environment(*paths), "KAPSI_PLUGINS": "another"}
    command = [sys.executable, "-c", code, str(tmp_path / "spec.yaml")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_not_installed_is_not_known() -> None:
    done = run("-m", "kapsi", "functions", "soft_steps", paths=[EXAMPLE / "src"])
    assert done.returncode == 2
    assert "no function is called 'soft_steps'" in done.stderr


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(
            "import a_package_that_is_not_there",
            "ModuleNotFoundError: No module named 'a_package_that_is_not_there'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "from kapsi import *\nraise ValueError('two\\nlines')", "ValueError: two lines", marks=pytest.mark.slow
        ),
        pytest.param(None, "ModuleNotFoundError: No module named 'kapsi_broken'", marks=pytest.mark.slow),
    ],
)
def test_a_package_that_fails_is_named_and_stops_nothing_else(tmp_path, source, reason) -> None:
    paths = [installed(tmp_path, "kapsi-broken", "kapsi_broken"), tmp_path]
    if source is not None:
        (tmp_path / "kapsi_broken.py").write_text(source)
    told = f"the functions of package 'kapsi-broken' cannot be loaded: {reason}"
    every, one, python = each(
        tmp_path / "said",
        "main('functions')",
        "main('functions', 'tailor')",
        "kp.from_dict({'kind': 'tailor'}, kp.Expansion)",
        env=environment(*paths),
    )
    assert every.returncode == 0
    assert every.stderr == f"note: {told}\n"
    assert "taylor" in every.stdout
    assert one.returncode == 2
    assert one.stderr.count("\n") == 1
    assert told in one.stderr
    assert (
        "kapsi.errors.UnknownFunction: Expansion: no expansion is called 'tailor'; did you mean 'taylor'? "
        in python.stderr
    )
    assert told in python.stderr


def test_a_name_that_is_taken_is_an_error_of_the_later_package(tmp_path) -> None:
    paths = [installed(tmp_path, "kapsi-twice", "kapsi_twice"), tmp_path]
    source = (EXAMPLE / "src" / "kapsi_steps" / "soft_steps.py").read_text(encoding="utf-8")
    (tmp_path / "kapsi_twice.py").write_text(source.replace('name="soft_steps"', 'name="taylor"'), encoding="utf-8")
    done = run("-m", "kapsi", "functions", "remainder", paths=paths)
    assert done.returncode == 0
    assert (
        "package 'kapsi-twice' cannot be loaded: SpecError: SoftSteps: the expansion name 'taylor' is taken"
        in done.stderr
    )


def test_an_installed_package_trains_from_the_command_line(tmp_path) -> None:
    paths = [installed(tmp_path / "site", "kapsi-steps", "kapsi_steps"), EXAMPLE / "src"]
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (80, 2))
    y = np.tanh(2 * x[:, 0]) + x[:, 1] + 0.1 * generator.normal(size=80)
    rows = "\n".join(",".join(f"{value:.6f}" for value in row) for row in np.column_stack([x, y]))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{rows}\n", encoding="utf-8")
    table, run_folder = str(tmp_path / "t.csv"), str(tmp_path / "run")
    head = "layers.0.heads.0"
    sets = [
        *("widths=[null,null]", f"{head}.expansion=soft_steps", f"{head}.reconciliation=outer", f"{head}.bias=true"),
        *("training.loss=pinball", "training.loss.quantile=0.8", "training.metrics=[coverage]", "training.epochs=5"),
    ]
    arguments = [part for edit in (*sets, "training.solver.kind=adagrad") for part in ("--set", edit)]
    fit, predict, losses, ridge = each(
        tmp_path / "said",
        f"main('fit', {table!r}, '--target', 'y', '--output', {run_folder!r}, *{arguments!r})",
        f"main('predict', {run_folder!r}, {table!r}, '--output', {str(tmp_path / 'p.csv')!r})",
        "main('functions', 'loss')",
        f"main('fit', {table!r}, '--target', 'y', '--output', {run_folder + '2'!r}, '--set', 'training.solver=ridge', "
        f"'--set', '{head}.expansion=soft_steps', '--set', '{head}.reconciliation=outer', '--set', 'training.l2=1e-6')",
        env=environment(*paths),
    )
    assert (fit.returncode, predict.returncode, losses.returncode) == (0, 0, 0), fit.stderr + predict.stderr
    assert ridge.returncode == 0, ridge.stderr
    assert re.search(r"^  pinball +Pinball loss", losses.stdout, re.MULTILINE)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert config["training"]["loss"] == {"kind": "pinball", "quantile": 0.8}
    assert config["training"]["solver"]["kind"] == "adagrad"
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["event"] == "epoch"]
    assert {record["solver"] for record in epochs} == {"adagrad"}
    assert all(set(record["metrics"]) == {"coverage"} for record in epochs)
