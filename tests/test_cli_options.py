"""Options from files and environment variables, JSON, dry runs, examples in the help, completion, and `kapsi runs`."""

from __future__ import annotations

import importlib
import json
import keyword
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kapsi.cli import app as application
from kapsi.cli import common, main
from kapsi.cli.app import COMMANDS
from kapsi.cli.common import run_data
from kapsi.data.tabular import write_table

QUICK = ("--head", "linear", "--folds", "2")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "DELAY", float("inf"))
    x = np.random.default_rng(0).normal(size=(40, 2))
    write_table("n.csv", {"a": x[:, 0].tolist(), "b": x[:, 1].tolist(), "y": (3 * x[:, 0] + x[:, 1]).tolist()})
    labels = np.where(x[:, 0] > 0, "yes", "no").tolist()
    write_table("t.csv", {"a": x[:, 0].tolist(), "k": ["u", None] * 20, "y": labels})


@pytest.fixture
def good(kapsi):
    def run(*words):
        code, out, err = kapsi(*words)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def bad(kapsi):
    def run(*words):
        code, out, err = kapsi(*words)
        assert (code, out) == (2, ""), err
        assert err.startswith("kapsi: ")
        assert err.count("\n") == 1
        return err

    return run


# ------------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_that_the_command_accepts(command, good) -> None:
    module = command + "_" * keyword.iskeyword(command)
    examples = importlib.import_module(f"kapsi.cli.{module}").EXAMPLES.splitlines()
    shown = good(command, "--help")
    assert "Examples:" in shown
    for line in examples:
        words = shlex.split(line.split("|")[-1].split(" > ")[0])
        assert words[:2] == ["kapsi", command]
        group = application.typer.main.get_command(application.app)
        group.commands[command].make_context(command, words[2:])  # parses, with the values of all options


def test_options_of_fit_are_in_groups(good) -> None:
    shown = good("fit", "--help")
    titles = [line.split(" ─")[0].removeprefix("╭─ ") for line in shown.splitlines() if line.startswith("╭─ ")]
    assert titles == ["Arguments", "Options", "Data", "Output", "Model", "Training", "Cluster", "Reading the table"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_a_shell(shell) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(common.__file__).parents[2]),
        "_KAPSI_COMPLETE": f"source_{shell}",
    }
    code = "from kapsi.cli import run; run()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "_KAPSI_COMPLETE" in done.stdout


@pytest.mark.parametrize(("words", "expected"), [("kapsi ev", ["evaluate"]), ("kapsi fit --class", ["--class-weight"])])
def test_bash_completes_commands_and_options(words, expected) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(common.__file__).parents[2]),
        "_KAPSI_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "from kapsi.cli import run; run()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected, done.stderr


IN_SHELLS = {
    "bash": 'source script; COMP_WORDS=({}); COMP_CWORD={}; _kapsi_completion kapsi; echo "${{COMPREPLY[@]}}"',
    "zsh": 'compdef() {{ }}; _arguments() {{ print -r -- "$@" }}; source script; words=({}); '
    "CURRENT=$(({} + 1)); _kapsi_completion",
    "fish": "source script; complete -C'{}'",
}
"""Commands that print completions of some words, and of the index of the last one."""


@pytest.mark.parametrize("shell", IN_SHELLS)
def test_a_shell_completes_choices(tmp_path, shell) -> None:
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    environment = {**os.environ, "PYTHONPATH": str(Path(common.__file__).parents[2])}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    code = "from kapsi.cli import run; run()"
    (tmp_path / "kapsi").write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c '{code}' \"$@\"\n")
    (tmp_path / "kapsi").chmod(0o755)

    def output(words: list[str], **more: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env={**environment, **more}, capture_output=True, text=True)
        assert not done.stderr
        return done.stdout

    (tmp_path / "script").write_text(output(["./kapsi"], _KAPSI_COMPLETE=f"source_{shell}"))
    plain = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    line = "kapsi fit t.csv --prefer ex"
    shown = output([shell, *plain, "-c", IN_SHELLS[shell].format(line, len(line.split()) - 1)])
    assert "explainable" in shown
    assert "accuracy" not in shown


# ------------------------------------------------------------------------------------------------ files and environment


def test_options_come_from_a_file_and_the_command_line_comes_first(good) -> None:
    Path("c.yaml").write_text(
        "table: n.csv\ntarget: y\nhead: [linear, quadratic]\nfolds: 2\noutput: r\nset:\n  training.seed: 3\n"
    )
    good("fit", "--config", "c.yaml", "--folds", "3")
    manifest = json.loads(Path("r/run.json").read_text())
    assert (manifest["folds"], manifest["seed"], manifest["table"]) == (3, 3, "n.csv")
    assert {row["head"] for row in manifest["leaderboard"]} == {"sum", "constant", "linear", "quadratic"}


def test_the_configuration_of_a_run_repeats_it(good) -> None:
    good("fit", "t.csv", "--target", "y", *QUICK, "--missing", "none", "--drop", "k", "--output", "r")
    good("fit", "t.csv", "--config", "r/config.yaml", "--output", "s")
    assert Path("r/config.yaml").read_text() == Path("s/config.yaml").read_text()
    assert Path("r/predictions.csv").read_bytes() == Path("s/predictions.csv").read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tagret: y",
            "kapsi: c.yaml: kapsi fit has no option 'tagret'; did you mean 'target'? there are table, target",
        ),
        ("", "kapsi: c.yaml: is empty, expected a configuration, such as target: price"),
        ("- y", "kapsi: c.yaml: expected options by name, such as target: price; got list"),
        ("unit: {a: {b: 1}}", "kapsi: c.yaml: unit.a: expected text, a number, true or false; got a mapping"),
        ("target: {a: b}", "kapsi: c.yaml: target: expected text, a number, true or false; got a mapping"),
        ("folds: [1, 2]", "kapsi: c.yaml: folds: expected one value, got 2"),
        ("target:", "kapsi: c.yaml: target: expected text, a number, true or false; got no value"),
        ("target: y\nfolds: many", "kapsi: Invalid value for '--folds' in c.yaml: many, expected a valid integer"),
        ("target: y\nfolds: 2.5", "kapsi: Invalid value for '--folds' in c.yaml: 2.5, expected a valid integer"),
        ("target: !!python/object:os.system y", "kapsi: c.yaml, line 1: not YAML: tags (!name) are not allowed"),
    ],
)
def test_a_wrong_file_of_options_is_refused(bad, text, message) -> None:
    Path("c.yaml").write_text(text)
    assert bad("fit", "n.csv", "--config", "c.yaml").startswith(message)


def test_a_missing_file_of_options_is_refused(bad) -> None:
    assert "none.yaml" in bad("fit", "n.csv", "--config", "none.yaml")


def test_options_come_from_the_environment(good, bad, monkeypatch) -> None:
    monkeypatch.setenv("KAPSI_FIT_TARGET", "y")
    monkeypatch.setenv("KAPSI_FIT_HEAD", "linear quadratic")
    monkeypatch.setenv("KAPSI_FIT_SET", "training.seed=5")
    good("fit", "n.csv", "--output", "r")
    manifest = json.loads(Path("r/run.json").read_text())
    assert manifest["seed"] == 5
    assert {row["head"] for row in manifest["leaderboard"]} == {"sum", "constant", "linear", "quadratic"}
    monkeypatch.setenv("KAPSI_FIT_FOLD", "3")
    assert bad("fit", "n.csv").startswith(
        "kapsi: KAPSI_FIT_FOLD: kapsi fit has no such option; did you mean KAPSI_FIT_FOLDS?"
    )
    monkeypatch.delenv("KAPSI_FIT_FOLD")
    monkeypatch.setenv("KAPSI_FIT_FOLDS", "few")
    assert bad("fit", "n.csv").startswith("kapsi: Invalid value for KAPSI_FIT_FOLDS: few, expected a valid integer")
    assert bad("fit", "n.csv", "--folds", "x").startswith("kapsi: Invalid value for '--folds': x, expected")


# ------------------------------------------------------------------------------------------------ JSON


def test_each_command_with_json_writes_one_object(good) -> None:
    fitted = json.loads(good("fit", "t.csv", "--target", "y", *QUICK, "--output", "r", "--json"))
    manifest = json.loads(Path("r/run.json").read_text())
    assert (fitted["run"], fitted["target"], fitted["task"], fitted["rows"]) == ("r", "y", "classification", 40)
    assert fitted["scores"] == manifest["scores"]
    assert fitted["leaderboard"] == manifest["leaderboard"]
    evaluated = json.loads(good("evaluate", "r", "t.csv", "--json"))
    assert evaluated["rows"] == 40
    assert set(evaluated["scores"]) == {"accuracy", "log loss"}
    predicted = json.loads(good("predict", "r", "t.csv", "--output", "p.csv", "--json"))
    assert (predicted["output"], predicted["rows"]) == ("p.csv", 40)
    info = json.loads(good("info", "r", "--json"))
    assert info["parameters"] == fitted["parameters"] == sum(head["parameters"] for head in info["heads"])
    listed = json.loads(good("functions", "solver", "--json"))["functions"]
    assert {entry["role"] for entry in listed} == {"solver"}
    spline = json.loads(good("functions", "b_spline", "--set", "intervals=7", "--json"))["functions"][0]
    assert {option["name"]: option["default"] for option in spline["options"]}["degree"] == "3"
    cases = json.loads(good("parity", "--only", "GaussianNB", "--json"))["cases"]
    assert cases
    assert all(case["within"] for case in cases)
    runs = json.loads(good("runs", "list", ".", "--json"))["runs"]
    assert [run["run"] for run in runs] == ["r"]


def test_a_single_split_has_no_deviation_in_json() -> None:
    scores = {"kapsi": {"r2": 0.5, "r2 std": 0.0}}
    assert run_data("r", {"scores": scores, "folds": None})["scores"] == {"kapsi": {"r2": 0.5}}
    assert run_data("r", {"scores": scores, "folds": 2})["scores"] == scores


def test_json_and_predictions_do_not_share_the_output(good, bad) -> None:
    good("fit", "t.csv", "--target", "y", *QUICK, "--output", "r")
    assert "--json: standard output has the predictions" in bad("predict", "r", "t.csv", "--output", "-", "--json")


# ------------------------------------------------------------------------------------------------ dry run


def test_a_dry_run_writes_nothing_and_shows_columns_heads_and_time(good) -> None:
    before = sorted(os.listdir())
    out = good("fit", "t.csv", "--target", "y", "--dry-run", "--folds", "3")
    assert sorted(os.listdir()) == before
    rows = [line.split() for line in out.splitlines()]
    assert ["k", "category", "2", "20"] in rows
    assert ["a", "number", "1", "0"] in rows
    assert any(row[:1] == ["linear"] for row in rows)
    assert "classification of 'y': 40 rows, 3 inputs, 2 outputs" in out
    assert out.splitlines()[-1].endswith("s on an idle core (4 fits)")


def test_a_dry_run_of_a_specification_counts_its_parameters(good) -> None:
    Path("m.yaml").write_text("widths: [null, 5, null]\nlayers: [{heads: [{expansion: identity}]}]\n")
    plan = json.loads(good("fit", "n.csv", "--target", "y", "--spec", "m.yaml", "--dry-run", "--json"))
    good("fit", "n.csv", "--target", "y", "--spec", "m.yaml", "--set", "training.epochs=1", "--output", "r")
    assert plan["widths"] == [2, 5, 1]
    assert plan["parameters"] == json.loads(Path("r/run.json").read_text())["parameters"]


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture
def fitted(good):
    good("fit", "n.csv", "--target", "y", *QUICK, "--output", "runs/a")
    good("fit", "n.csv", "--target", "y", "--head", "constant", "--folds", "2", "--output", "runs/b")


def test_runs_are_listed_also_damaged_ones(good, fitted) -> None:
    Path("runs/c").mkdir()
    Path("runs/c/run.json").write_text('{"format": "kapsi run", ')
    Path("runs/other").mkdir()
    lines = good("runs").splitlines()
    assert [line.split()[0] for line in lines[:-2]] == ["run", "c", "a", "b"]
    assert lines[1].endswith("damaged")
    assert lines[2].split()[1:5] == ["y", "40", "2", "r2"]
    assert lines[-1] == "runs: 3 runs"


def test_an_empty_place_has_no_runs(good, bad) -> None:
    assert good("runs") == "runs: 0 runs; kapsi fit writes one\n"
    assert "is not a folder" in bad("runs", "list", "nowhere")
    assert "did you mean 'list'" in bad("runs", "lst")


def test_runs_are_compared_by_scores_and_options(kapsi, fitted) -> None:
    code, out, err = kapsi("runs", "compare", "runs/a", "runs/b")
    assert (code, err) == (0, "")
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()[1:]}
    assert rows["parameters"][1:] == ["3", "3"]
    assert "recipe.heads.0.kind" in rows
    assert "training.seed" not in rows
    main(["fit", "t.csv", "--target", "y", *QUICK, "--output", "runs/c"])
    _, _, err = kapsi("runs", "compare", "runs/a", "runs/c")
    assert "runs/a and runs/c have tables with different content: compare" in err


@pytest.mark.parametrize("words", [("runs/a",), ("runs/a", "runs/a"), ("runs/a", "runs/none")])
def test_runs_that_cannot_be_compared_are_refused(bad, fitted, words) -> None:
    bad("runs", "compare", *words)


def test_a_run_is_deleted_with_yes_and_nothing_else_is(good, bad, fitted) -> None:
    assert "give --yes" in bad("runs", "delete", "runs/a")
    Path("runs/a/notes.txt").write_text("mine")
    assert "has files that are not of the run: 'notes.txt'" in bad("runs", "delete", "runs/a", "--yes")
    assert "is not a run folder" in bad("runs", "delete", "runs", "--yes")
    assert "no such run folder" in bad("runs", "delete", "runs/b", "runs/none", "--yes")
    assert "given twice" in bad("runs", "delete", "runs/b", "runs/b/", "--yes")
    assert "kapsi runs list runs lists the runs of a folder" in bad("runs", "runs")
    assert Path("runs/b").is_dir()
    assert good("runs", "delete", "runs/b", "--yes") == "deleted: runs/b\n"
    assert sorted(os.listdir("runs")) == ["a"]


def test_a_symbolic_link_to_a_run_is_not_deleted(bad, fitted) -> None:
    os.symlink("a", "runs/link")
    assert "symbolic link" in bad("runs", "delete", "runs/link", "--yes")
    assert Path("runs/a").is_dir()


def test_deleting_on_a_terminal_asks(kapsi, fitted, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert kapsi("runs", "delete", "runs/a")[0] == 1
    assert Path("runs/a").is_dir()
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert kapsi("runs", "delete", "runs/a")[0] == 0
    assert not Path("runs/a").exists()
    shutil.rmtree("runs")
