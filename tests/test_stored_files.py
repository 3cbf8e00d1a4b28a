"""Runs and a model file of format 2, stored with their predictions: later versions read them and predict the same."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kapsi as kp
from kapsi.data.tabular import read_table
from kapsi.tables import load_run

FILES = Path(__file__).parent / "files_of_format_2"


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_runs_of_the_automatic_model_predict_the_same(name, tmp_path):
    shutil.copytree(FILES / name, tmp_path / name)  # reading a run may lock its folder
    model, manifest = load_run(tmp_path / name)
    assert manifest["format_version"] == 2
    assert len({row["head"] for row in manifest["leaderboard"] if row["weight"]}) > 1
    columns, _ = model.predict(model.read(FILES / "t.csv"))
    with open(FILES / f"{name}.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(columns) == list(rows[0])
    for key, values in columns.items():
        found = [row[key] for row in rows]
        assert values == found if isinstance(values[0], str) else values == pytest.approx(list(map(float, found)), 1e-6)


def test_a_run_reads_its_table_as_its_version_did(tmp_path):
    shutil.copytree(FILES / "regression", tmp_path / "regression")
    model = load_run(tmp_path / "regression").model
    scores, rows, _ = model.scores(model.read(FILES / "t.csv"))
    assert rows == 80
    assert scores.main > 0.8
    assert model.unit == "%"
    assert read_table(FILES / "t.csv").columns["price"].unit == "$"


def test_a_model_file_with_trees_kernels_and_pairs_predicts_the_same(tmp_path):
    model = kp.load(FILES / "heads.safetensors")
    values = load_file(FILES / "heads_values.safetensors")
    torch.testing.assert_close(model(values["x"]).detach(), values["y"], rtol=1e-9, atol=1e-9)
    assert [head.expansion.name for head in model.spec.layers[0].heads] == [
        "tree_leaves",
        "kernel_map",
        "extended",
        "selected_inputs",
    ]
    kp.save(model, tmp_path / "again.safetensors")
    assert torch.equal(kp.load(tmp_path / "again.safetensors")(values["x"]), model(values["x"]))
