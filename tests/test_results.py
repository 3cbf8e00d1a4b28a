"""The stored results: all belong to current configurations, and every row has one."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
from pathlib import Path

import pytest

from kapsi.paper.expected import load_expected
from kapsi.paper.experiment import load_shipped, shipped
from kapsi.paper.store import ResultStore, configuration_hash
from kapsi.paper.tables import build

RESULTS = Path(__file__).parents[1] / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="source distributions have no results")
STORED = {
    "elementary": 192,
    "composite": 142,
    "feynman": 324,
    "feynman-rest": 95,
    "discrete": 94,
    "text-bigrams": 60,
    "kan-text": 9,
    "tabular": 300,
    "elementary-variants": 68,
    "composite-variants": 68,
    "feynman-variants": 216,
    "rank-sweep": 28,
    "depth-width": 40,
    "mnist-ablation": 726,
    "mnist-processing": 204,
    "mnist-rank": 15,
    "mnist-digits": 2,
    "learning-curves": 30,
    "dependency": 40,
}
"""Numbers of stored results, at least."""


@pytest.mark.parametrize("name", shipped())
def test_stored_results_are_of_current_configurations(name: str) -> None:
    experiment = load_shipped(name)
    store = ResultStore(RESULTS, name)
    results = store.read()
    assert store.notes == []
    runs = [experiment.run(row, method, 0) for row in experiment.rows for method in experiment.methods_of(row)]
    hashes = {(run.row, run.method): configuration_hash(run) for run in runs}
    current = [r for r in results if hashes.get((r.row, r.method)) == r.configuration["hash"]]
    assert len(current) == len(results) >= STORED[name]
    table = build(experiment, load_expected(experiment), results)
    assert table.done == table.named == len(experiment.active_rows())


def test_every_row_has_a_result() -> None:
    assert sum(len(load_shipped(name).active_rows()) for name in shipped()) == 1072


def test_converted_results_are_left_alone(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    assert runpy.run_path(str(RESULTS / "convert_0_1.py"))["convert"](tmp_path) == 0
    assert all((tmp_path / path.name).read_bytes() == path.read_bytes() for path in RESULTS.glob("*.jsonl"))


@pytest.mark.slow
def test_results_of_measured_initial_values_are_converted_by_their_hash_alone(tmp_path: Path) -> None:
    script = runpy.run_path(str(RESULTS / "convert_measured.py"))
    names = ("elementary-variants", "composite-variants", "feynman-variants")
    for name in names:
        experiment, lines = load_shipped(name), []
        for text in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            run = experiment.run(experiment.row(line["row"]), experiment.method(line["method"]), 0)
            before = dataclasses.replace(run, options=script["_without_measured"](run.options))
            # As stored before the option: the same options without the rule; other keys are restored by the conversion.
            line["configuration"]["hash"] = configuration_hash(before)
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    assert script["convert"](tmp_path) > 0
    for name in names:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (RESULTS / f"{name}.jsonl").read_bytes()
    assert script["convert"](tmp_path) == 0
