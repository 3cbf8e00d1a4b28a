"""Tuning: trials on inner folds, resumed and pruned, and the best as a run."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kapsi as kp
from kapsi.cli import common
from kapsi.data.tabular import write_table
from kapsi.function import options_of
from kapsi.recipes import Auto, auto
from kapsi.tables import RunConfig, TableConfig, TuneConfig, read_problem, tune_problem, tuning

ROWS = 60
CONFIG = RunConfig(TableConfig("y"), recipe=Auto())


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A table, and a small search space."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "DELAY", float("inf"))
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    write_table("t.csv", {"a": x[:, 0].tolist(), "b": x[:, 1].tolist(), "y": (x[:, 0] * x[:, 1] + x[:, 0]).tolist()})
    kinds = [kind for kind in auto.offered_kinds() if kind.name in ("constant", "linear")]
    monkeypatch.setattr(auto, "offered_kinds", lambda: kinds)
    small = {name: tuning.EXPANSIONS[name] for name in ("identity", "taylor 2")}
    for name, values in (("EXPANSIONS", small), ("WIDTHS", {"none": ()}), ("SOLVERS", {"auto": "auto"})):
        monkeypatch.setattr(tuning, name, values)


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna")


def rows_of(problem, trials: int, storage: str | None = None) -> list[tuple]:
    seen = []
    report = tune_problem(
        problem, CONFIG, TuneConfig(trials, storage=storage), refit=False, on_trial=lambda *t: seen.append(t)
    )
    return [(count, row and row._replace(seconds=0)) for row, count in seen], report


def test_the_run_is_the_best_trial(optuna, kapsi) -> None:
    code, out, _ = kapsi("tune", "t.csv", "--target", "y", "--trials", 7, "--output", "run", "--json")
    data = json.loads(out)
    assert (code, sorted(os.listdir())) == (0, ["run", "t.csv"])
    assert sum(data["trials"].values()) == 7
    losses = [row["loss"] for row in data["front"]]
    assert losses == sorted(losses)
    best = data["front"][0]
    assert best["number"] == data["tuning"]["best"] > 0
    assert "taylor" in best["model"]  # the products, which linear and additive heads do not have
    assert best["score"] > 0.99
    assert data["scores"]["kapsi"]["r2"] > 0.99
    assert data["report"] == "run/report.html"
    assert "taylor" in Path("run/report.html").read_text()
    run = json.loads(Path("run/run.json").read_text())
    assert run["tuning"]["front"][0]["options"] == best["options"]
    assert "taylor" in Path("run/config.yaml").read_text()
    again = kapsi("fit", "t.csv", "--target", "y", "--spec", "run/config.yaml", "--output", "again")
    assert again[0] == 0
    assert Path("again/predictions.csv").read_bytes() == Path("run/predictions.csv").read_bytes()


def test_the_first_trial_is_the_default_of_fit_and_the_best_is_no_worse(optuna) -> None:
    trials, report = rows_of(read_problem("t.csv", CONFIG.table), 4)
    first = trials[0][1]
    assert (first.number, first.model) == (0, "auto")
    assert report.best.loss <= first.loss
    assert report.front[0].loss == report.best.loss


def test_the_tables_on_standard_output(optuna, kapsi) -> None:
    code, out, err = kapsi("tune", "t.csv", "--target", "y", "--trials", 1, "--no-report")
    assert code == 0
    assert not Path("runs/t/report.html").exists()
    assert out.startswith("Trials on inner folds of the training rows (1 complete, 0 pruned, 0 failed)")
    assert out.splitlines()[1].split() == ["trial", "RMSE", "R²", "parameters", "seconds", "model"]
    assert "run folder: runs/t (" in out
    assert err.startswith("note: 1 trial on 60 rows of t.csv; progress is shown on a terminal only\n")
    assert os.listdir("runs") == ["t"]


def test_a_resumed_study_is_an_uninterrupted_one(optuna, caplog, monkeypatch) -> None:
    problem = read_problem("t.csv", CONFIG.table)
    whole, _ = rows_of(problem, 7)
    first, _ = rows_of(problem, 3, "study.log")
    rest, report = rows_of(problem, 7, "study.log")
    assert first + rest == whole
    monkeypatch.setattr(logging.getLogger("optuna"), "propagate", True)
    assert rows_of(problem, 7, "study.log")[0] == []
    assert not caplog.records  # of Optuna
    assert sum(report.counts.values()) == 7
    other = replace(CONFIG, training=replace(CONFIG.training, seed=1))
    assert tune_problem(problem, other, TuneConfig(1, storage="study.log"), refit=False).counts["complete"] == 1


def test_held_out_rows_of_the_run_take_no_part(optuna, monkeypatch) -> None:
    used, fit_rows = set(), tuning.fit_rows

    def watched(problem, train, config):
        used.update((train.rows + 1).tolist())
        return fit_rows(problem, train, config)

    monkeypatch.setattr(tuning, "fit_rows", watched)
    kp.tune("t.csv", "y", "run", trials=2)
    held_out = {int(line.split(",")[0]) for line in Path("run/predictions.csv").read_text().splitlines()[1:]}
    assert len(used) == ROWS - len(held_out) == 48
    assert not used & held_out


def test_bad_trials_are_given_up_after_a_fold(optuna, monkeypatch) -> None:
    calls, scores_of = [], tuning.scores_of

    def worse(*arguments):
        calls.append(arguments)
        return scores_of(*arguments)._replace(loss=float(len(calls)))

    monkeypatch.setattr(tuning, "scores_of", worse)
    _, report = rows_of(read_problem("t.csv", CONFIG.table), 6)
    assert report.counts == {"complete": 3, "pruned": 3, "failed": 0}
    assert len(calls) == 3 * 3 + 3


def test_an_interrupt_keeps_the_trials(optuna, kapsi, monkeypatch) -> None:
    calls, fit_rows = [], tuning.fit_rows

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return fit_rows(*arguments)

    monkeypatch.setattr(tuning, "fit_rows", interrupted)
    words = ("tune", "t.csv", "--target", "y", "--trials", 3)
    code, out, err = kapsi(*words)
    assert (code, out) == (130, "")
    assert err.endswith("note: interrupted: 1 trial kept in runs/t.trials.log; the same command resumes\n")
    assert os.listdir("runs") == ["t.trials.log"]
    code, out, _ = kapsi(*words)
    assert code == 0
    assert os.listdir("runs") == ["t"]
    assert sum(json.loads(Path("runs/t/run.json").read_text())["tuning"]["trials"].values()) == 3


def test_an_interrupt_before_the_first_trial_leaves_nothing(optuna, kapsi, monkeypatch) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "fit_rows", interrupted)
    assert kapsi("tune", "t.csv", "--target", "y")[0] == 130
    assert os.listdir() == ["t.csv"]


def test_failed_trials_have_reasons(optuna, monkeypatch) -> None:
    def fail(problem, train, config):
        raise RuntimeError("no solution\nat line 3")

    monkeypatch.setattr(tuning, "fit_rows", fail)
    with pytest.raises(kp.SpecError, match="no trial of 2 trials is complete: no solution at line 3"):
        kp.tune("t.csv", "y", "run", trials=2)
    assert os.listdir() == ["t.csv"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--trials", "0"), "kapsi: --trials 0: must be at least 1\n"),
        (("--timeout", "-1"), "kapsi: --timeout -1.0: must be at least 0.0\n"),
        (("--inner-folds", "1"), "kapsi: --inner-folds 1: must be at least 2\n"),
        (("--storage", "none://x"), "kapsi: --storage none://x: cannot be opened: "),
        (("--storage", "none://user:secret@x"), "kapsi: --storage none://user:***@x: cannot be opened: "),
        (("--only-trials",), "kapsi: --only-trials: needs --storage, where another process finds the trials"),
        (
            ("--storage", "t.csv"),
            "kapsi: --storage t.csv: cannot be opened: the file is not one of trials; give a file",
        ),
        (("--storage", "/dev/full"), "kapsi: --storage /dev/full: cannot be opened: is not a regular file"),
        (("--output", "t.csv"), "not a folder, never replaced"),
        (("--target", "z"), "kapsi: t.csv: "),
    ],
)
def test_refused(optuna, kapsi, options, said) -> None:
    code, out, err = kapsi("tune", "t.csv", *(() if "--target" in options else ("--target", "y")), *options)
    assert (code, out) == (2, "")
    assert said in err.splitlines(keepends=True)[-1]
    assert len([line for line in err.splitlines() if not line.startswith("note: ") or " trial" in line]) == 1
    assert os.listdir() == ["t.csv"]


def test_without_optuna_the_extra_is_named(kapsi, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = kapsi("tune", "t.csv", "--target", "y")
    assert (code, err.splitlines()[-1]) == (2, "kapsi: tune: needs the package optuna; pip install 'kapsi[tune]'")
    assert os.listdir() == ["t.csv"]


def test_folds_have_no_effect() -> None:
    with pytest.raises(kp.SpecError, match=r"folds=2\): has no effect beside trials"):
        kp.tune("t.csv", "y", folds=2)


@pytest.mark.all_heads
def test_searched_options_begin_with_the_default(monkeypatch) -> None:
    monkeypatch.undo()
    found = 0
    for kind in auto.offered_kinds():
        defaults = {field.name: field.default for field in options_of(kind)}
        for name, values in kind.searched:
            assert values[0] == defaults[name], (kind.name, name)
            assert len({replace(kind(), **{name: value}) for value in values}) == len(values)
            found += 1
    assert found >= 8


def test_every_function_of_the_space_makes_a_model(monkeypatch) -> None:
    monkeypatch.undo()
    for kappa in tuning.EXPANSIONS.values():
        for psi in tuning.RECONCILIATIONS.values():
            for pi in tuning.REMAINDERS.values():
                spec = kp.rpn([3, 4, 2], kappa, psi, pi, bias=True, output="silu")
                assert sum(p.numel() for p in kp.Model(spec, device="meta").parameters()) > 10
    assert all(kp.TrainConfig(solver=solver) for solver in tuning.SOLVERS.values())


@pytest.mark.slow
def test_two_processes_share_a_study(optuna) -> None:
    words = ("tune", "t.csv", "--target", "y", "--trials", "6", "--storage", "sqlite:///study.db", "--head", "linear")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "kapsi", *words]
    workers = [
        subprocess.Popen([*start, *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for more in (("--only-trials",), ("--output", "run"))
    ]
    for worker in workers:
        _, err = worker.communicate(timeout=300)
        assert worker.returncode == 0, err
    study = optuna.load_study(storage="sqlite:///study.db", study_name=None)
    finished = [trial for trial in study.trials if trial.state.is_finished()]
    assert 6 <= len(finished) <= 7  # one may begin while the last one runs
    assert len({trial.number for trial in finished}) == len(finished)
    assert Path("run/run.json").is_file()
