"""Experiments as data, the store of results, and the runner."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import reproduce_procedure
from kapsi.cli import main
from kapsi.errors import FileError, KapsiError, SpecError
from kapsi.paper import experiment as experiments
from kapsi.paper import store as stores
from kapsi.paper.expected import load_expected
from kapsi.paper.experiment import Outcome, Run, load, load_shipped, shipped
from kapsi.paper.runner import offline, run_experiments
from kapsi.paper.short_forms import merged, read_seeds
from kapsi.paper.store import Result, ResultStore, canonical, configuration_hash, key_of

BASE = """
name: tiny
title: A tiny table
source: nowhere
metric: mse
procedure: fake
rows: [a, b, c]
seeds: 2
options: {iterations: 3, model: {kind: taylor, degree: 2}}
methods:
  kapsi: {label: kapsi, headline: true, options: {model: {degree: 3}}}
  other: {label: other, protocol: paper, options: {scale: 2.0, model: {kind: identity}}}
"""


@pytest.fixture(autouse=True)
def _procedure(monkeypatch) -> None:
    monkeypatch.setitem(experiments.PROCEDURES, "fake", "reproduce_procedure")


def write(folder: Path, more: str = "", text: str = BASE) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(text + more, encoding="utf-8")
    return path


def tiny(folder: Path, more: str = "", text: str = BASE) -> experiments.Experiment:
    return load(write(folder, more, text))


def do(experiment, output, **more):
    return run_experiments([(experiment, experiment.plan().runs)], output, **more)


# ------------------------------------------------------------------------------------------------ reading


def test_an_experiment_is_expanded_into_rows_by_methods_by_seeds(tmp_path) -> None:
    found = tiny(tmp_path)
    runs = found.plan().runs
    assert [(run.seed, run.row, run.method) for run in runs] == [
        (seed, row, method) for seed in (0, 1) for row in "abc" for method in ("kapsi", "other")
    ]
    assert runs[0].options == {"iterations": 3, "model": {"kind": "taylor", "degree": 3}}
    assert runs[1].options == {"iterations": 3, "scale": 2.0, "model": {"kind": "identity"}}
    assert [run.protocol for run in runs[:2]] == ["validation", "paper"]
    assert {run.threads for run in runs} == {1}


def test_later_options_count(tmp_path) -> None:
    text = BASE.replace(
        "rows: [a, b, c]", "rows: {a: {options: {x: 1, y: 1}, methods: {kapsi: {options: {y: 3}}}}, b: {}}"
    )
    found = tiny(tmp_path, "quick: {options: {x: 9}, seeds: [7], methods: {kapsi: {options: {z: 1}}}}\n", text)
    (first, other), _ = found.plan(seeds=[0]).runs[:2], None
    assert (first.options["x"], first.options["y"]) == (1, 3)
    assert other.options["y"] == 1
    quick = found.plan(quick=True).runs
    assert [(run.row, run.method, run.seed) for run in quick] == [("a", "kapsi", 7), ("b", "kapsi", 7)]
    assert (quick[0].options["x"], quick[0].options["y"], quick[0].options["z"]) == (9, 3, 1)


def test_merging_leaves_what_it_is_given_alone() -> None:
    base, over = {"a": {"b": [1]}, "c": 1}, {"a": {"d": 2}}
    result = merged(base, over)
    result["a"]["b"].append(2)
    assert (base, over) == ({"a": {"b": [1]}, "c": 1}, {"a": {"d": 2}})


def test_grids_and_exclusions(tmp_path) -> None:
    text = BASE.replace(
        "rows: [a, b, c]",
        "rows: {grid: {expansion: {taylor: {expansion: {kind: taylor}}, none: {expansion: null}}, psi: [x, y], n: 1..2}}",
    )
    exclude = (
        "exclude: [{where: {expansion: none, psi: [x]}, reason: they do not fit}, {method: other, reason: slow}]\n"
    )
    found = tiny(tmp_path, exclude, text)
    assert len(found.rows) == 8
    assert found.rows[0].name == "taylor · x · 1"
    assert found.rows[0].options == {"expansion": {"kind": "taylor"}, "psi": "x", "n": 1}
    assert len(found.active_rows()) == 6
    assert {run.row for run in found.plan().runs} == {row.name for row in found.active_rows()}
    assert {run.method for run in found.plan().runs} == {"kapsi"}
    assert len(found.excluded()) == 8 + 2
    assert ("none · x · 1", "kapsi", "they do not fit") in found.excluded()


def test_grids_one_after_the_other(tmp_path) -> None:
    text = BASE.replace("rows: [a, b, c]", "rows: {grid: [{layers: 1..10}, {heads: [1, 4]}]}")
    found = tiny(tmp_path, "", text)
    assert [row.name for row in found.rows][-3:] == ["layers 10", "heads 1", "heads 4"]
    assert [run.row for run in found.plan(seeds=[0], only="layers 1").runs] == ["layers 1", "layers 1"]
    assert {run.row for run in found.plan(seeds=[0], only="heads").runs} == {"heads 1", "heads 4"}


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ("net", {"one:net", "two:net"}),
        ("Net", {"one:net", "one:net_small", "two:net", "two:net_small"}),
        ("net_small", {"one:net_small", "two:net_small"}),
        ("small, two:net", {"one:net_small", "two:net_small", "two:net"}),
        ("tw:_s", {"two:net_small"}),
        ("one", {"one:net", "one:net_small"}),
        ("two,one:net_small", {"two:net", "two:net_small", "one:net_small"}),
    ],
)
def test_only_some_runs(tmp_path, only: str, wanted: set[str]) -> None:
    text = BASE.replace("rows: [a, b, c]", "rows: [one, two]")
    head, _, _ = text.partition("methods:")
    path = tmp_path / "tiny.yaml"
    path.write_text(head + "methods: {net: {label: net, headline: true}, net_small: {label: small}}\n")
    runs = load(path).plan(seeds=[0], only=only).runs
    assert {f"{run.row}:{run.method}" for run in runs} == wanted


def test_rows_by_group_of_functions(tmp_path) -> None:
    from kapsi.data.problems import problems

    text = BASE.replace("rows: [a, b, c]", "rows: {functions: elementary, except: [E.1]}")
    names = [problem.name for problem in problems("elementary")]
    assert [row.name for row in tiny(tmp_path, "", text).rows] == [name for name in names if name != "E.1"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seeds: 2", "sedes: 2", ["no option 'sedes'", "did you mean 'seeds'?"]),
        ("procedure: fake", "procedure: functoins", ["procedure", "did you mean functions?"]),
        ("metric: mse", "metric: rmse", ["metric", "mse, accuracy"]),
        ("rows: [a, b, c]", "rows: [a, a]", ["rows", "'a' is there twice"]),
        ("rows: [a, b, c]", "rows: []", ["rows", "there are none"]),
        (
            "rows: [a, b, c]",
            "rows: {a: {option: {}}}",
            ["rows.a: TableRow has no option 'option'", "did you mean 'options'?"],
        ),
        ("rows: [a, b, c]", "rows: {a: {methods: {kapis: {options: {}}}}}", ["rows.a.methods", "did you mean kapsi?"]),
        ("rows: [a, b, c]", "rows: {functions: elementry}", ["rows.functions", "did you mean 'elementary'?"]),
        ("rows: [a, b, c]", "rows: {grid: {n: 4..2}}", ["rows.grid.n", "1..10"]),
        ("seeds: 2", "seeds: 0", ["seeds", "expected a count"]),
        ("seeds: 2", "seeds: [1, 1]", ["seeds", "different whole numbers"]),
        ("seeds: 2", "protocol: papper", ["protocol", "did you mean 'paper'?"]),
        ("seeds: 2", "threads: 0", ["threads", "at least 1"]),
        ("seeds: 2", "threads: true", ["threads", "got True"]),
        ("seeds: 2", "exclude: [{method: svm, reason: r}]", ["exclude[0].method", "kapsi, other"]),
        ("seeds: 2", "exclude: [{reason: r}]", ["exclude[0]", "everything"]),
        ("seeds: 2", "quick: {methods: [kapsy]}", ["quick.methods", "did you mean kapsi?"]),
        ("seeds: 2", "compare: {instead: {z: kapsi}}", ["compare.instead", "a, b, c"]),
        ("seeds: 2", "compare: {factors: [0.5]}", ["compare", "factors", "above 1"]),
        ("seeds: 2", "pictures: [bars]", ["pictures[0]", "rank-sweep"]),
        ("headline: true", "headline: yes please", ["methods.kapsi.headline", "true or false"]),
        ("label: other", "label: [x]", ["methods.other.label", "expected a string"]),
        ("label: other", "headline: true", ["methods", "2 headlines"]),
        ("name: tiny", "name: other", ["name", "expected 'tiny'"]),
        ("title: A tiny table\n", "", ["needs 'title'"]),
        ("{iterations: 3", "{iterations: .nan", ["options.iterations", "finite"]),
        ("{iterations: 3", "{1: 3", ["options.1", "text as a key"]),
        ("seeds: 2", "expected: ../x.csv", ["expected", "elementary.csv"]),
        ("title: A tiny table", 'title: "A \\e[2J table"', ["title", "printable"]),
        ("title: A tiny table", 'title: "A \\ud800 table"', ["title", "printable"]),
        ("rows: [a, b, c]", 'rows: ["a\\e[2J"]', ["rows[0]", "one line"]),
        ("rows: [a, b, c]", 'rows: ["a\\0"]', ["rows[0]", "one line"]),
        ("rows: [a, b, c]", 'rows: {grid: {n: ["x\\ny"]}}', ["rows.grid.n[0]", "one line"]),
        ("rows: [a, b, c]", "rows: {grid: {n: ['']}}", ["rows.grid.n[0]", "one line"]),
        ("rows: [a, b, c]", "rows: {grid: {n: [.nan]}}", ["rows.grid.n[0]", "finite"]),
        ("rows: [a, b, c]", "rows: {grid: {n: 1..999999}}", ["rows.grid.n", "100,000 values"]),
        ("rows: [a, b, c]", "rows: {grid: {n: 1..400, m: 1..400}}", ["rows.grid", "100,000 rows"]),
        ("rows: [a, b, c]", "rows: {grid: [{n: 1..60000}, {m: 1..60000}]}", ["rows.grid[1]", "100,000 rows"]),
        (
            "rows: [a, b, c]",
            "rows: {functions: elementary, except: E.1}",
            ["rows.except", "no group of functions 'E.1'", "brackets"],
        ),
        (
            "rows: [a, b, c]",
            "rows: {grid: {n: 1..2}}\nexclude: [{where: {n: [[1]]}, reason: r}]",
            ["where.n", "no row has [1]"],
        ),
        (
            "rows: [a, b, c]",
            "rows: {grid: {n: 1..2}}\nexclude: [{where: {n: {a: 1}}, reason: r}]",
            ["where.n", "{'a': 1}"],
        ),
        ("rows: [a, b, c]", "rows: {grid: {n: 1..2}}\nexclude: [{where: {n: true}, reason: r}]", ["where.n", "True"]),
        ("rows: [a, b, c]", "rows: {grid: {n: 1..2}}\nexclude: [{where: {n: []}, reason: r}]", ["where.n", "got none"]),
        ("rows: [a, b, c]", "rows: {grid: {n: 1..2}}\nexclude: [{where: {}, reason: r}]", ["exclude[0]", "everything"]),
        ("seeds: 2", "compare: {factors: [.inf]}", ["compare.factors", "finite"]),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_place(tmp_path, old, new, words) -> None:
    assert old in BASE
    with pytest.raises(SpecError) as caught:
        tiny(tmp_path, "", BASE.replace(old, new, 1))
    message = str(caught.value)
    assert message.startswith("tiny.yaml: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "4-2", "1,1", "a", "", "1,,2", "99999999", "0-99999999"])
def test_seeds_that_are_none(text) -> None:
    with pytest.raises(SpecError, match="--seeds: expected a count"):
        read_seeds(text, "--seeds")


def reached(found: experiments.Experiment) -> set[str]:
    """Return the names by which the rows of an experiment are looked up in the paper's results."""
    also = load_expected(found).also
    return {name for row in found.rows for name in (row.name, also.get(row.name, ""), row.name.removeprefix("D."))}


def test_every_printed_number_belongs_to_a_row() -> None:
    """A misspelled row would only look as if the paper had nothing."""
    found = [load_shipped(name) for name in shipped()]
    for file in {one.expected for one in found if one.expected is not None}:
        users = [one for one in found if one.expected == file]
        rows = load_expected(users[0]).rows
        printed = {row for row in rows if any(value.mean is not None for value in rows[row].values())}
        assert printed <= set().union(*map(reached, users)), file


@pytest.mark.parametrize("name", shipped())
def test_every_experiment_of_the_package_fits(name) -> None:
    found = load_shipped(name)
    expected = load_expected(found)
    assert found.plan().runs
    assert found.plan(quick=True).runs
    for row in found.active_rows():
        assert found.headline(row) is not None
    assert expected.rows.keys() & reached(found) or found.expected is None
    for run in found.plan(quick=True).runs:
        canonical(run.configuration())


def test_rows_named_by_numbers_are_compared_on_the_same_rows(tmp_path) -> None:
    text = BASE.replace("rows: [a, b, c]", "rows: [1, 2]\ncompare: {instead: {1: other}}")
    assert tiny(tmp_path, "", text).compare.instead == {"1": "other"}


def test_more_runs_than_a_machine_holds_are_refused(tmp_path) -> None:
    found = tiny(tmp_path, "", BASE.replace("rows: [a, b, c]", "rows: {grid: {n: 1..60000}}"))
    with pytest.raises(SpecError, match="tiny: has 240,000 runs, at most 200,000 are allowed"):
        found.plan()
    assert len(found.plan(seeds=[0], only="n 7").runs) == 2


@pytest.mark.parametrize("name", shipped())
def test_quick_counts_every_row_that_it_runs(name) -> None:
    found = load_shipped(name)
    runs = found.plan(quick=True).runs
    headlines = {(row.name, method.name) for row in found.active_rows() if (method := found.headline(row)) is not None}
    rows = {run.row for run in runs}
    assert rows == set(found.quick.rows or [row.name for row in found.active_rows()])
    assert rows == {run.row for run in runs if (run.row, run.method) in headlines}
    assert {run.threads for run in runs} == {1}


def test_an_unknown_experiment() -> None:
    with pytest.raises(SpecError, match=r"experiments: there is no 'discreet'; did you mean discrete\?"):
        load_shipped("discreet")


# ------------------------------------------------------------------------------------------------ the store


def result(seed: int = 0, score: float = 1.0, **options) -> Result:
    run = Run("tiny", "a", "kapsi", seed, options=options)
    return Result.of(run, Outcome(score), started="2026-01-01T00:00:00+00:00", seconds=1.0, cpu_seconds=1.0)


def test_the_key_changes_with_all_that_a_number_depends_on() -> None:
    run = Run("tiny", "a", "kapsi", 0, options={"x": 1, "y": [1.0, None]})
    assert key_of(run) == key_of(replace(run, options={"y": [1.0, None], "x": 1}, folder="/elsewhere"))
    others = [
        replace(run, seed=1),
        replace(run, row="b"),
        replace(run, method="mlp"),
        replace(run, protocol="paper"),
        replace(run, threads=2),
        replace(run, procedure="images"),
        replace(run, options={"x": 2, "y": [1.0, None]}),
    ]
    assert len({key_of(other) for other in [run, *others]}) == 1 + len(others)
    first = result()
    elsewhere = [
        replace(first, machine={**first.machine, "cpu": "another"}),
        replace(first, machine={**first.machine, "cores": 1000}),
        replace(first, machine={**first.machine, "accelerator": "a card"}),
        *(replace(first, versions={**first.versions, name: "0"}) for name in first.versions),
    ]
    assert len({other.key for other in [first, *elsewhere]}) == 1 + len(elsewhere)
    assert replace(first, machine={**first.machine, "memory_gib": 1}).key == first.key
    assert first.key == key_of(Run("tiny", "a", "kapsi", 0))


def test_results_come_back_as_they_were(tmp_path) -> None:
    store = ResultStore(tmp_path / "new" / "folder", "tiny")
    written = [
        replace(result(0, math.nan), validation=-math.inf, parameters=3, fit_seconds=0.5),
        replace(result(1, 0.1 + 0.2), extra={"chosen": {"rank": 1}}, curves={"test": [1.0, math.inf]}),
    ]
    for one in written:
        store.append(one)
    read = store.read()
    assert store.notes == []
    assert read[1] == written[1]
    assert math.isnan(read[0].score)
    assert replace(read[0], score=0.0) == replace(written[0], score=0.0)
    for line in store.path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_torn_line_is_dropped_and_said_and_whole_lines_stay(tmp_path, cut) -> None:
    store = ResultStore(tmp_path, "tiny")
    for seed in range(3):
        store.append(result(seed))
    with open(store.path, "r+b") as handle:
        handle.truncate(store.path.stat().st_size - cut)
    assert [one.seed for one in store.read()] == [0, 1]
    assert len(store.notes) == 1
    assert "cut off" in store.notes[0]
    store.append(result(9))
    assert [one.seed for one in store.read()] == [0, 1, 9]
    assert store.notes == []


def test_a_file_that_is_one_torn_line_longer_than_a_block(tmp_path) -> None:
    store = ResultStore(tmp_path, "tiny")
    store.path.write_bytes(b"x" * 200_000)
    store.append(result(1))
    assert [one.seed for one in store.read()] == [1]
    store.path.write_bytes(store.path.read_bytes() + b"y" * 200_000)
    store.append(result(2))
    assert [one.seed for one in store.read()] == [1, 2]


def test_lines_that_are_no_results_are_said_and_kept(tmp_path) -> None:
    store = ResultStore(tmp_path, "tiny")
    store.append(result(0))
    good = store.path.read_bytes()
    strange = [
        b"[]",
        b"{",
        b"\xff",
        good.strip().replace(b'"score": 1.0', b'"score": "x"'),
        good.strip().replace(b'"format": 2', b'"format": 1'),
        good.strip().replace(b'"seconds": 1.0', b'"seconds": 1' + b"0" * 400),
        good.strip().replace(b'"seed": 0', b'"seed": true'),
    ]
    store.path.write_bytes(good + b"\n".join(strange) + b"\n")
    store.append(result(1))
    assert [one.seed for one in store.read()] == [0, 1]
    assert len(store.notes) == len(strange)
    assert all(line in store.path.read_bytes() for line in strange)


def test_an_interrupt_while_writing_leaves_no_half_line(tmp_path, monkeypatch) -> None:
    store = ResultStore(tmp_path, "tiny")
    store.append(result(0))
    before = store.path.read_bytes()

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stores.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.append(result(1))
    assert store.path.read_bytes() == before


def test_what_json_has_not_is_an_error(tmp_path) -> None:
    with pytest.raises(FileError, match="plain data"):
        ResultStore(tmp_path, "tiny").append(replace(result(), extra={"x": object()}))
    assert not (tmp_path / "tiny.jsonl").exists()


def _append(folder: str, first: int) -> None:
    store = ResultStore(folder, "tiny")
    for seed in range(first, first + 40):
        store.append(replace(result(seed), extra={"filler": "é" * (seed * 50)}))


def test_two_processes_append_without_losing_a_line(tmp_path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=_append, args=(str(tmp_path), 0))
    other.start()
    store = ResultStore(tmp_path, "tiny")
    while other.is_alive() and not store.path.exists():  # it imports for seconds
        time.sleep(0.001)
    _append(str(tmp_path), 40)
    other.join()
    assert other.exitcode == 0
    assert sorted(one.seed for one in store.read()) == list(range(80))
    assert store.notes == []


# ------------------------------------------------------------------------------------------------ running


def test_what_is_done_is_skipped(tmp_path) -> None:
    log = tmp_path / "log"
    found = tiny(tmp_path, "", BASE.replace("{iterations: 3", f"{{log: '{log}', iterations: 3"))
    runs = found.plan().runs
    assert len(run_experiments([(found, runs[:5])], tmp_path).done) == 5
    second = run_experiments([(found, runs)], tmp_path)
    assert (len(second.done), second.skipped) == (7, 5)
    assert len(log.read_text().splitlines()) == 12
    assert len(set(log.read_text().splitlines())) == 12
    again = run_experiments([(found, runs[:1])], tmp_path, again=True)
    assert (len(again.done), again.skipped) == (1, 0)
    assert len(ResultStore(tmp_path, "tiny").read()) == 13


def test_results_of_another_machine_are_kept_and_do_not_count(tmp_path, monkeypatch) -> None:
    found = tiny(tmp_path)
    do(found, tmp_path)
    monkeypatch.setattr(stores, "machine", lambda: {"cpu": "another", "cores": 1, "accelerator": None, "os": "x"})
    assert len(do(found, tmp_path).done) == 12
    assert len(ResultStore(tmp_path, "tiny").read()) == 24


@pytest.mark.slow
def test_one_process_and_several_give_the_same_bits(tmp_path) -> None:
    found = tiny(tmp_path, "threads: 1\n")
    told: list[tuple[int, int]] = []
    do(found, tmp_path / "one")
    do(found, tmp_path / "two", jobs=2, progress=lambda run, done, total: told.append((done, total)))
    one, two = (ResultStore(tmp_path / name, "tiny").read() for name in ("one", "two"))
    scores = [
        {(one.row, one.method, one.seed): (one.score, one.extra["threads"]) for one in found} for found in (one, two)
    ]
    assert len(scores[0]) == 12
    assert scores[0] == scores[1]
    assert told[0] == (0, 12)
    assert told[-1] == (12, 12)


def test_a_run_has_the_threads_that_the_experiment_says(tmp_path) -> None:
    before = torch.get_num_threads()
    found = tiny(tmp_path, "threads: 2\n")
    report = run_experiments([(found, found.plan().runs[:1])], tmp_path)
    assert report.done[0].extra["threads"] == 2
    assert report.done[0].configuration["threads"] == 2
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_fails_is_told_and_stops_nothing(tmp_path, jobs) -> None:
    text = BASE.replace("rows: [a, b, c]", "rows: [m, w, b, i, z]").replace(
        "{iterations: 3", "{missing: [m], wrong: [w], broken: [b], infinite: [i], iterations: 3"
    )
    found = tiny(tmp_path, "", text)
    report = do(found, tmp_path, jobs=jobs)
    assert {one.row for one in report.done} == {"i", "z"}
    failures = {failure.run.row: failure for failure in report.failures}
    assert len(report.failures) == 12
    assert {row: failure.missing for row, failure in failures.items()} == {"m": True, "w": False, "b": False}
    assert failures["b"].message.startswith("RuntimeError: a mistake (reproduce_procedure.py, line ")
    assert {one.row for one in ResultStore(tmp_path, "tiny").read()} == {"i", "z"}
    assert all(one.score == math.inf for one in report.done if one.row == "i")


def test_a_row_without_its_data_is_asked_for_once(tmp_path) -> None:
    log = tmp_path / "log"
    found = tiny(tmp_path, "", BASE.replace("{iterations: 3", f"{{log: '{log}', missing: [a, b, c], iterations: 3"))
    assert len(do(found, tmp_path).failures) == 12
    assert len(log.read_text().splitlines()) == 3


def test_a_process_that_dies_costs_its_run_alone(tmp_path) -> None:
    text = BASE.replace("{iterations: 3", "{killed: [b], iterations: 3").replace("seeds: 2", "seeds: 1")
    report = do(tiny(tmp_path, "", text), tmp_path, jobs=2)
    assert {one.row for one in report.done} == {"a", "c"}
    assert len(report.done) == 4
    assert len(report.failures) == 2
    assert {failure.message for failure in report.failures} == {"its process ended with SIGKILL, perhaps out of memory"}


def test_a_procedure_that_returns_something_else(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reproduce_procedure, "run", lambda run: 1.0)
    (failure, *_) = do(tiny(tmp_path), tmp_path).failures
    assert "returned float, expected Outcome" in failure.message


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_json_has_not_stops_no_other_run(tmp_path, jobs) -> None:
    report = do(tiny(tmp_path, "", BASE.replace("{iterations: 3", "{strange: [b], iterations: 3")), tmp_path, jobs=jobs)
    assert {one.row for one in report.done} == {"a", "c"}
    assert {failure.message for failure in report.failures} == {
        "a result contains function, unknown to JSON; give plain data"
    }


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_interrupt_at_the_terminal_while_processes_begin_shows_nothing(tmp_path, times) -> None:
    path = write(tmp_path)
    for _ in range(times):
        process = begin(tmp_path, str(path), "--output", str(tmp_path / "out"), "--jobs", "2", "--again")
        for _ in range(2000):  # until the first child is there, which then imports for seconds
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            if not children.exists() or process.poll() is not None:
                process.kill()
                process.communicate()
                pytest.skip("this system does not show the children of a process in time")
            if len(children.read_text().split()) >= 2:  # the first one counts resources
                break
            time.sleep(0.005)
        time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "")


def test_without_a_folder_nothing_is_asked_for_over_the_network(monkeypatch) -> None:
    monkeypatch.delenv("KAPSI_DATA", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with offline(None):
        assert (os.environ["HF_HUB_OFFLINE"], os.environ["HF_DATASETS_OFFLINE"]) == ("1", "1")
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert "HF_DATASETS_OFFLINE" not in os.environ
    with offline("somewhere"):
        assert os.environ["HF_HUB_OFFLINE"] == "0"


# ------------------------------------------------------------------------------------------------ interruptions

CHILD = """
import sys
sys.path.insert(0, {tests!r})
from kapsi.paper import experiment
experiment.PROCEDURES["fake"] = "reproduce_procedure"
from kapsi.cli import run
if __name__ == "__main__":
    run()
"""


def begin(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(tests=str(Path(__file__).parent)), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, str(script), "reproduce", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where the tests run in the background of a shell, a child would inherit not to be interrupted.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    pytest.fail("nothing began")


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path, capsys) -> None:
    begun, out = tmp_path / "begun", tmp_path / "out"
    text = BASE.replace("{iterations: 3", f"{{slow: [b], begun: '{begun}', iterations: 3").replace(
        "seeds: 2", "seeds: 1"
    )
    path = write(tmp_path, "", text)
    process = begin(tmp_path, str(path), "--output", str(out))
    found = load(path)
    runs = found.plan(only="b:kapsi,c").runs
    try:
        wait_for(begun, process)
        report = run_experiments([(found, runs)], out)
        assert [(run.row, run.method) for run in report.elsewhere] == [("b", "kapsi")]
        assert [(one.row, one.method) for one in report.done] == [("c", "kapsi"), ("c", "other")]
        assert main(["reproduce", str(path), "--output", str(out), "--only", "b:kapsi"]) == 0
        assert "note: another process runs tiny b kapsi; the same command shows" in capsys.readouterr().err
        assert len(list(out.glob(".tiny.*.lock"))) == 1
    finally:
        process.kill()
        process.communicate()
    # Its claim ended with it, and so does the file once nobody needs it.
    again = load(write(tmp_path, "", BASE.replace("seeds: 2", "seeds: 1")))
    report = run_experiments([(again, again.plan(only="b:kapsi").runs)], out)
    assert (len(report.done), report.elsewhere) == (1, [])
    assert {entry.name for entry in out.iterdir()} == {"tiny.jsonl"}


@pytest.mark.slow
def test_processes_do_not_wait_for_runs_that_are_elsewhere(tmp_path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from kapsi.paper import experiment\n"
        "from kapsi.paper.store import ResultStore, key_of\n"
        "experiment.PROCEDURES['fake'] = 'reproduce_procedure'\n"
        f"store = ResultStore({str(tmp_path)!r}, 'tiny')\n"
        f"runs = experiment.load({str(tmp_path / 'tiny.yaml')!r}).plan().runs\n"
        "assert all(store.claim(key_of(run)) for run in runs)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    found = tiny(tmp_path)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            report = do(found, tmp_path, jobs=2)
            assert (len(report.done), len(report.elsewhere)) == (0, 12)
        finally:
            process.kill()
    assert len(do(found, tmp_path, jobs=2).done) == 12


def test_what_another_process_did_meanwhile_is_not_done_again(tmp_path) -> None:
    found = tiny(tmp_path, "", BASE.replace("seeds: 2", "seeds: 1"))
    runs = found.plan().runs
    log = []

    def told(run: Run | None, done: int, total: int) -> None:
        log.append(done)
        if run is not None and done == 1 and log.count(1) == 1:  # as another process would
            for other in runs[2:]:
                ResultStore(tmp_path, "tiny").append(
                    Result.of(other, Outcome(1.0), started="2026-01-01T00:00:00+00:00", seconds=1.0, cpu_seconds=1.0)
                )

    report = run_experiments([(found, runs)], tmp_path, progress=told)
    assert (len(report.done), report.skipped) == (2, 4)
    assert len(ResultStore(tmp_path, "tiny").read()) == len(runs)


@pytest.mark.parametrize(
    ("number", "code", "jobs"),
    [
        (signal.SIGKILL, -9, "1"),
        pytest.param(signal.SIGTERM, 143, "1", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "2", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, "2", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "2", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "1", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_interrupted_leaves_whole_results_and_resumes(tmp_path, jobs, number, code) -> None:
    begun = tmp_path / "begun"
    slow = BASE.replace("{iterations: 3", f"{{slow: [c], begun: '{begun}', iterations: 3").replace(
        "seeds: 2", "seeds: 1"
    )
    path = write(tmp_path, "", slow)
    process = begin(tmp_path, str(path), "--output", str(tmp_path / "out"), "--jobs", jobs)
    wait_for(begun, process)
    # The other process may have begun later, and be about to write.
    first = {("a", "kapsi"), ("a", "other"), ("b", "kapsi")}
    for _ in range(600):
        if first <= {(one.row, one.method) for one in ResultStore(tmp_path / "out", "tiny").read()}:
            break
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    store = ResultStore(tmp_path / "out", "tiny")
    done = {(one.row, one.method) for one in store.read()}
    assert store.notes == []
    assert first <= done
    assert not any(row == "c" for row, _ in done)
    found = load(path)
    rest = [run for run in found.plan().runs if run.row != "c"]
    report = run_experiments([(found, rest)], tmp_path / "out")
    assert (len(report.done), report.skipped) == (4 - len(done), len(done))


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_runs_shows_and_resumes(tmp_path, capsys) -> None:
    path, out = str(write(tmp_path)), str(tmp_path / "out")
    report = tmp_path / "report.html"
    assert main(["reproduce", path, "--output", out, "--seeds", "1", "--only", "b", "--report", str(report)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0] == "tiny: A tiny table"
    assert lines[-1] == "rows: 1 of 1"
    assert "best epoch on test" in shown.out
    assert report.read_text().startswith("<!doctype html>")
    assert main(["reproduce", path, "--output", out]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "rows: 3 of 3"
    assert len(ResultStore(out, "tiny").read()) == 12


def test_quick_writes_nothing_that_stays(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "", BASE.replace("{iterations: 3", "{missing: [a, b], iterations: 3"))
    assert main(["reproduce", path.name, "--quick"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "rows: 1 of 3"
    assert "QUICK" in shown.out
    assert shown.err == "note: skipped tiny a, tiny b: data set 'nowhere' is not there; give --folder\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_run_that_should_not_have_failed_is_an_exit_code(tmp_path, capsys) -> None:
    path = write(tmp_path, "", BASE.replace("{iterations: 3", "{broken: [a], iterations: 3"))
    assert main(["reproduce", str(path), "--output", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "note: failed: tiny: a kapsi seed 0, a other seed 0" in shown.err
    assert shown.out.splitlines()[-1] == "rows: 2 of 3"


def test_what_does_not_fit_is_told_before_the_first_run(tmp_path, capsys) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    path = write(tmp_path, "", BASE.replace("{iterations: 3", f"{{log: '{log}', unfit: [c], iterations: 3"))
    assert main(["reproduce", str(path), "--output", str(out)]) == 2
    assert capsys.readouterr().err == "kapsi: tiny, c, kapsi: options.width: expected a number\n"
    assert not log.exists()
    assert not out.exists()
    assert main(["reproduce", str(path), "--output", str(out), "--only", "a,b"]) == 0


@pytest.mark.parametrize(
    ("procedure", "row", "options", "words"),
    [
        ("functions", "E.99", "{candidates: {a: {mlp: {widths: [null, 1]}}}}", "there is no function 'E.99'"),
        ("functions", "E.3", "{}", "candidates: give one candidate at least"),
        ("functions", "E.3", "{candidates: {a: {mlp: {widths: [null, 1]}}}, trials: 0}", "trials must be at least 1"),
        ("images", "mnist", "{classifier: svm_linear, C: x}", "expected a number, got 'x'"),
        ("images", "svhn", "{classifier: svm_linear}", "expected one of mnist, cifar10, got 'svhn'"),
        ("text", "imdb", "{classifier: svm_linear, gird: {C: [1.0]}}", "did you mean grid"),
        ("tabular", "iris", "{classifier: markov_network, bins: 3}", "bins: expected a list"),
        ("tabular", "wine", "{classifier: svm_rbf}", "got 'wine'"),
        ("dependency", "iris", "{folds: 1}", "folds must be at least 2"),
        ("dependency", "pima", "{model: rpn}", "expected one of iris, got 'pima'"),
        ("tabular", "iris", "{classifier: svm_rbf, folds: 151}", "151 folds are more than the 150 rows"),
        ("tabular", "iris", "{classifier: svm_rbf, grid: {C: [1.0]}, refit: false}", "are not for tables"),
        ("tabular", "iris", "{classifier: bayesian_network, penalties: [0.1]}", "is not for a bayesian network"),
        (
            "functions",
            "E.3",
            "{candidates: {a: {mlp: {widths: [null, 1]}}}, edge: 0.8, tails: 0.8}",
            "1 together at most",
        ),
        ("functions", "E.3", "{candidates: {a: {mlp: {widths: [null, 1]}}}, training: {loss: hinge}}", "hinge"),
        (
            "functions",
            "E.3",
            "{candidates: {a: {mlp: {widths: [null, 1]}}}, training: {solver: {kind: adamw, restarts: 2}}}",
            "restarts",
        ),
        (
            "functions",
            "E.3",
            "{candidates: {a: {mlp: {widths: [null, 1]}}}, training: {seed: 2}}",
            "seed: is the seed of the run",
        ),
        (
            "functions",
            "E.3",
            "{candidates: {a: {mlp: {widths: [3, 1]}}}}",
            "candidates.a.model: ModelSpec.widths: the model has 3 inputs and the data 2",
        ),
        (
            "functions",
            "E.3",
            "{candidates: {a: {kan: {widths: [null, 1], intervals: x}}}}",
            "candidates.a: kan: BSpline",
        ),
        (
            "functions",
            "E.3",
            "{candidates: {a: {mlp: {widths: [null, 1]}}}, reference_inputs: 100000000000}",
            "reference_inputs must be at most 10000000",
        ),
        (
            "functions",
            "E.3",
            "{candidates: {a: {mlp: {widths: [null, 1]}}}, training: {epochs: 3}, successive_halving: {epochs: 9, keep: 1}}",
            "are more than the 3 epochs",
        ),
        ("ablation", "mnist", "{expansion: tailor}", "did you mean 'taylor'"),
        ("ablation", "mnist", "{remainder: identity}", "head: "),
        ("ablation", "mnist", "{reconciliation: zero}", "no trainable parameters"),
        (
            "images",
            "mnist",
            "{network: {hidden: [3]}, flip_test: true, train: {loss: hinge}}",
            "flip_test: needs the loss",
        ),
        (
            "images",
            "mnist",
            "{classifier: svm_linear, held_out: 60000, grid: {C: [1.0]}}",
            "60,000 of 60,000 training rows",
        ),
        ("images", "mnist", "{classifier: svm_linear, refit: false}", "refit: no rows are held out"),
        ("text", "imdb", "{classifier: mlp, grid: {train: [{seed: 4}]}}", "seed: is the seed of the run"),
        (
            "text",
            "imdb",
            "{classifier: mlp, grid: {train.epochs: [1]}, tune: {train: {l1: 1.0}}}",
            "set the same option",
        ),
        (
            "tabular",
            "iris",
            "{candidates: [{model: {widths: [null, null], layers: [{heads: [{reconciliation: zero}]}]}}]}",
            "no trained parameters",
        ),
        (
            "functions",
            "E.3",
            "{candidates: {a: {mlp: {widths: [null, 1]}, after: b}}}",
            "expected the name of a candidate",
        ),
    ],
)
def test_options_of_every_procedure_are_checked_without_data(tmp_path, capsys, procedure, row, options, words) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"{{name: mine, title: t, source: s, metric: {'mse' if procedure == 'functions' else 'accuracy'},\n"
        f"procedure: {procedure}, seeds: 1, rows: [{row}],\n"
        f"methods: {{rpn: {{options: {options}}}}}}}",
        encoding="utf-8",
    )
    assert main(["reproduce", str(path), "--output", str(tmp_path / "out"), "--folder", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"kapsi: mine, {row}, rpn")
    assert shown.err.count("\n") == 1
    assert words in shown.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize("seeds", [0, True, [], [-1], [1.5], [True], "x", ["1"], [1, 1], [2**31], {0: 1}, b"ab", 1.5])
def test_seeds_that_are_none_in_python(tmp_path, seeds) -> None:
    with pytest.raises(SpecError, match=r"seeds: expected a count such as 5"):
        tiny(tmp_path).plan(seeds=seeds)


def test_seeds_of_numpy_are_numbers(tmp_path) -> None:
    runs = tiny(tmp_path).plan(seeds=np.arange(3, 5)).runs
    assert {run.seed for run in runs} == {3, 4}
    assert all(type(run.seed) is int for run in runs)


def test_wrong_arguments_in_python(tmp_path) -> None:
    found = tiny(tmp_path)
    with pytest.raises(SpecError, match=r"--only .*: expected parts of names"):
        found.plan(only=["a"])
    for jobs in (0, 1.5, True, 2000):
        with pytest.raises(SpecError, match="jobs: expected 1 to 1024 processes"):
            do(found, tmp_path, jobs=jobs)
    with pytest.raises(FileError, match="not a usable path"):
        do(found, None)
    with pytest.raises(SpecError, match="expected the name of a folder"):
        do(found, "")
    for given in (None, 5, ""):
        with pytest.raises(SpecError, match=r"load\(.*\): expected the name of a YAML file"):
            load(given)
    with pytest.raises(SpecError, match="rows: there is no 'nope'; there are a, b, c"):
        found.row("nope")
    for wrong in ("protocol", "metric", "procedure"):
        with pytest.raises(SpecError, match=rf"Run\.{wrong}: .*'nope'"):
            Run("e", "r", "m", 0, **{wrong: "nope"})
    with pytest.raises(SpecError, match="at most 10,000 seeds"):
        found.plan(seeds=range(10**12))
    with pytest.raises(SpecError, match="experiments: there is no None"):
        load_shipped(None)
    assert found.plan(only="b, nope,a:other").unused == ("nope",)


def test_a_page_of_results_that_are_gone_is_told(tmp_path, capsys) -> None:
    path, out = write(tmp_path), tmp_path / "out"
    assert main(["reproduce", str(path), "--output", str(out)]) == 0
    assert main(["reproduce", str(path), "--output", str(out), "--summary"]) == 0
    (out / "tiny.jsonl").unlink()
    capsys.readouterr()
    assert main(["reproduce", str(path), "--output", str(out), "--summary"]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "delete it" in line] == [
        f"note: {out / name} shows results that no longer exist, or results of other versions; delete it"
        for name in ("tiny.md", "tiny.html")
    ]


def test_an_option_that_a_data_set_does_not_bear_is_no_missing_data_set(tmp_path, capsys) -> None:
    path = write(tmp_path, "", BASE.replace("{iterations: 3", "{unreadable: [a], iterations: 3"))
    assert main(["reproduce", str(path), "--output", str(tmp_path / "out")]) == 1
    assert "note: failed: tiny: a kapsi seed 0, a other seed 0" in capsys.readouterr().err


def test_a_name_that_comes_with_kapsi_is_taken(tmp_path, capsys) -> None:
    path = tmp_path / "elementary.yaml"
    path.write_text(BASE.replace("name: tiny", "name: elementary"), encoding="utf-8")
    assert main(["reproduce", str(path), "--output", str(tmp_path / "out")]) == 2
    assert "another experiment is called 'elementary'" in capsys.readouterr().err


def test_the_overview_goes_into_no_page_of_the_summary(tmp_path, capsys) -> None:
    path, out = write(tmp_path), tmp_path / "out"
    assert main(["reproduce", str(path), "--output", str(out)]) == 0
    marks = "before\r\n<!-- results of kapsi reproduce -->\r\n<!-- end of results -->\r\nafter\r\n"
    for name in ("README.md", "tiny.md"):
        (out / name).write_bytes(marks.encode())
        capsys.readouterr()
        assert main(["reproduce", str(path), "--output", str(out), "--summary", "--into", str(out / name)]) == 2
        assert "is rewritten by --summary; give another Markdown file" in capsys.readouterr().err
        assert (out / name).read_bytes() == marks.encode()
    other = tmp_path / "page.md"
    other.write_bytes(marks.encode())
    assert main(["reproduce", str(path), "--output", str(out), "--summary", "--into", str(other)]) == 0
    text = other.read_bytes()
    assert text.startswith(b"before\r\n<!--")
    assert text.count(b"\n") == text.count(b"\r\n") > 6


def test_runs_that_are_given_twice_are_done_once(tmp_path) -> None:
    found = tiny(tmp_path)
    runs = found.plan(only="a").runs
    report = run_experiments([(found, [*runs, *runs]), (found, iter(runs))], tmp_path)
    assert (len(report.done), report.skipped) == (len(runs), 2 * len(runs))
    with pytest.raises(SpecError, match="a run of 'tiny' is among the runs of 'other'"):
        run_experiments([(replace(found, name="other"), runs)], tmp_path)


def test_a_line_whose_key_is_that_of_another_run_does_not_count(tmp_path) -> None:
    found = tiny(tmp_path)
    do(found, tmp_path)
    lines = (tmp_path / "tiny.jsonl").read_text(encoding="utf-8").splitlines()
    first = {**json.loads(lines[0]), "seed": 7}
    (tmp_path / "tiny.jsonl").write_text("\n".join([json.dumps(first), *lines[1:], ""]), encoding="utf-8")
    store = ResultStore(tmp_path, "tiny")
    assert len(store.read()) == len(lines) - 1
    assert "line 1: is not a result (its key belongs to another" in store.notes[0]


def test_lock_files_that_cannot_be_created_do_not_block(tmp_path, monkeypatch) -> None:
    for run in tiny(tmp_path).plan().runs:
        (tmp_path / f".tiny.{key_of(run)}.lock").mkdir()
    report = do(tiny(tmp_path), tmp_path)
    assert (len(report.done), report.elsewhere) == (12, [])


def test_locks_exclude_other_stores_and_leave_no_files(tmp_path) -> None:
    first, second = ResultStore(tmp_path, "tiny"), ResultStore(tmp_path, "tiny")
    assert first.claim("a" * 16)
    assert not second.claim("a" * 16)
    assert second.claim("b" * 16)
    first.release("a" * 16)
    assert second.claim("a" * 16)
    (tmp_path / f".tiny.{'c' * 16}.lock").touch()  # left by a killed process
    first.close()
    assert not first.claim("b" * 16)
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_the_list_of_experiments(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    names = [line.split()[0] for line in shown.out.splitlines()[1 : 1 + len(shipped())]]
    assert names == shipped()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["elementry-x"], "experiments: there is no 'elementry-x'"),
        (["nowhere.yaml"], "there is no such experiment"),
        (["{path}", "--seeds", "x"], "--seeds: expected a count such as 5"),
        (["{path}", "--jobs", "0"], "--jobs: expected 1 to 1024 processes, got 0"),
        (["{path}", "--only", "zzz"], "--only zzz"),
        (["{path}", "--only", ""], "--only '': expected parts of names"),
        (["{path}", "--only", "a,"], "--only 'a,': expected parts of names"),
        (["{path}", "--only", ":"], "--only ':': expected parts of names"),
        (["{path}", "--only", "a:"], "--only 'a:': expected parts of names"),
        (["{path}", "--seeds", "5-3"], "--seeds: expected a count"),
        (["{path}", "--seeds", "0-99999"], "at most 10,000 seeds"),
        (["{path}", "--report", "x" * 300 + ".md"], "File name too long"),
        (["{path}", "--folder", "nowhere"], "--folder nowhere"),
        (["{path}", "--report", "x.pdf"], "--report x.pdf"),
        (["{path}", "--report", "folder.md"], "folder.md: is a folder"),
        (["{path}", "--format", "htm"], "htm"),
        (["{path}", "--summary", "--output", "nowhere"], "nowhere: no results folder"),
        (["{path}", "--into", "README.md"], "--into needs --summary"),
        (["--summary"], "--summary needs experiment names"),
        (["--only", "a"], "--only needs experiment names"),
        (["--seeds", "3"], "--seeds needs experiment names"),
        (["--quick"], "--quick needs experiment names"),
        (["--output", "tiny.yaml"], "tiny.yaml: is a file, expected a folder of results"),
        (["{path}", "--summary", "--only", "a"], "--only cannot be combined with --summary"),
        (["{path}", "--summary", "--report", "x.md"], "--report cannot be combined with --summary"),
        (["{path}", "--summary", "--again"], "--again cannot be combined with --summary"),
        (["{path}", "--summary", "--jobs", "7"], "--jobs cannot be combined with --summary"),
        (["{path}", "--summary", "--folder", "."], "--folder cannot be combined with --summary"),
        (["{path}", "--summary", "--format", "markdown"], "--format cannot be combined with --summary"),
        (["{path}", "--summary", "--into", ""], "--into: expected the name of a Markdown file"),
        (["--jobs", "3"], "--jobs needs experiment names"),
        (["--folder", "."], "--folder needs experiment names"),
        (["--format", "html"], "--format needs experiment names"),
        (["{path}", "--output", ""], "--output"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, arguments, words) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    Path("folder.md").mkdir()
    assert main(["reproduce", *(word.replace("{path}", "tiny.yaml") for word in arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert words in shown.err
    assert {entry.name for entry in tmp_path.iterdir()} == {"tiny.yaml", "folder.md"}


def test_every_error_of_kapsi_is_a_kapsi_error(tmp_path) -> None:
    blocked = tmp_path / "out"
    blocked.write_text("a file", encoding="utf-8")
    with pytest.raises(KapsiError):
        do(tiny(tmp_path), blocked)


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_run(tmp_path, monkeypatch) -> None:
    log = tmp_path / "log"
    found = tiny(tmp_path, "", BASE.replace("{iterations: 3", f"{{log: '{log}', iterations: 3"))
    monkeypatch.setattr("kapsi.paper.runner.os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(FileError, match="is read-only"):
        do(found, tmp_path / "out")
    assert not log.exists()


def test_the_configuration_is_told_in_short(tmp_path) -> None:
    run = tiny(tmp_path).plan().runs[0]
    assert stores.short(run) == "iterations: 3, model: taylor(degree=3)"
    assert len(configuration_hash(run)) == 16


def test_a_misspelled_part_of_only_among_others(tmp_path, capsys) -> None:
    path, out = str(write(tmp_path)), tmp_path / "out"
    assert main(["reproduce", path, "--output", str(out), "--only", "b, nope"]) == 2
    assert (
        capsys.readouterr().err == "kapsi: --only nope: no row and no method of tiny that is run has this in its name\n"
    )
    assert not out.exists()


def test_a_report_below_a_file_is_refused_before_anything_runs(tmp_path, capsys) -> None:
    path, out = str(write(tmp_path)), tmp_path / "out"
    assert main(["reproduce", path, "--output", str(out), "--report", f"{path}/more/x.md"]) == 2
    error = capsys.readouterr().err
    assert error == f"kapsi: --report {path}/more/x.md: {path!r} is not a folder; give another path\n"
    assert not out.exists()


def test_the_example_of_the_page_runs(tmp_path, capsys) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    text = page.partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["reproduce", str(path), "--output", str(tmp_path / "out"), "--seeds", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.splitlines()[-1] == "rows: 2 of 2"
