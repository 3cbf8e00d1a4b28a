"""Weights, groups, times, given validation rows, further scores and class weights of a table."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.metrics import accuracy_score, f1_score, r2_score, roc_auc_score
from sklearn.preprocessing import StandardScaler

import kapsi as kp
from kapsi.data.tabular import make_problem, read_table
from kapsi.data.tabular.split import Splits
from kapsi.errors import SpecError, TableError
from kapsi.tables import RunConfig, TableConfig, fit_table, load_run
from kapsi.training.config import TrainConfig

QUICK = TrainConfig(l2=0.01, epochs=4)
ROWS = 60


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=ROWS), rng.integers(0, 4, ROWS)
    y = (x + 0.5 * rng.normal(size=ROWS) > 0).astype(int)
    rows = [(f"{x[i]:.3f}", f"p{i // 5}", 100 - i // 2, w[i], y[i], f"{2 * x[i] + i % 3:.3f}") for i in range(ROWS)]
    with open(tmp_path / "t.csv", "w", newline="") as handle:
        csv.writer(handle).writerows([("x", "g", "t", "w", "y", "z"), *rows])
    return tmp_path / "t.csv"


def fitted(path, target="y", training=QUICK, model=None, **options):
    fit_table(path, RunConfig(TableConfig(target, **options), model, training), path.parent / "run", overwrite=True)
    with open(path.parent / "run/predictions.csv", newline="") as handle:
        return list(csv.DictReader(handle)), json.loads((path.parent / "run/run.json").read_text())


@pytest.mark.parametrize("k", [None, 3])
def test_groups_are_not_divided(path, k):
    problem = make_problem(read_table(path), "y", group="g")
    assert "g" not in problem.features.columns
    ways = problem.splits(0)
    for train, held in [ways.split(0.2)] if k is None else ways.folds(k):
        assert not set(problem.groups[train]) & set(problem.groups[held])
        assert sorted([*train, *held]) == list(range(ROWS))
    rows, _ = fitted(path, group="g", folds=k)
    groups = {(int(row["row"]) - 1) // 5 for row in rows}
    assert len(rows) == 5 * len(groups)


def test_held_out_rows_are_later():
    times = np.array([5.0, 1, 1, 2, 2, 3, 4, 4, 9, 7])
    ways = Splits(times, False, 0, times=times)
    train, held = ways.split(0.3)
    assert sorted(times[held]) == [5, 7, 9]
    assert times[train].max() < times[held].min()
    seen = []
    for train, held in ways.folds(3):
        assert times[train].max() < times[held].min()
        seen += held.tolist()
    assert len(seen) == len(set(seen))
    assert set(times[seen]) == {3, 4, 5, 7, 9} or set(times[seen]) >= {4, 5, 7, 9}
    with pytest.raises(TableError, match="8 folds of 6 times"):
        ways.folds(8)


def test_a_run_in_time_predicts_the_latest_rows(path):
    rows, _ = fitted(path, time="t")
    assert sorted(int(row["row"]) for row in rows) == list(range(1, 13))


def test_a_weight_counts_a_row_several_times(path, tmp_path):
    linear = kp.rpn([None, None], bias=True)
    rows, manifest = fitted(path, "z", TrainConfig(l2=0.3, solver="lbfgs"), linear, weight="w", drop=["y", "g", "t"])
    table = read_table(path)
    x, w, z = (table.columns[name].numbers for name in ("x", "w", "z"))
    held = np.array([int(row["row"]) - 1 for row in rows])
    kept = np.setdiff1d(np.arange(ROWS), held)
    weight = w[kept] / w[kept].mean()
    scaled = StandardScaler().fit(x[kept, None], sample_weight=weight)
    center = np.average(z[kept], weights=weight)
    spread = np.sqrt(np.average((z[kept] - center) ** 2, weights=weight))
    standard = (z[kept] - center) / spread
    reference = Ridge(alpha=0.3 * len(kept) / 2).fit(scaled.transform(x[kept, None]), standard, weight)
    wanted = reference.predict(scaled.transform(x[held, None])) * spread + center
    found = np.array([float(row["prediction"]) for row in rows])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert manifest["scores"]["kapsi"]["r2"] == pytest.approx(r2_score(z[held], found, sample_weight=w[held]), rel=1e-9)


def test_further_scores_are_those_of_scikit_learn(path):
    rows, manifest = fitted(path, metrics=("auc", "f1"), weight="w")
    y, p = (np.array([float(row[name]) for row in rows]) for name in ("target", "probability_1"))
    w = read_table(path).columns["w"].numbers[[int(row["row"]) - 1 for row in rows]]
    scores = manifest["scores"]["kapsi"]
    assert scores["auc"] == pytest.approx(roc_auc_score(y, p, sample_weight=w), rel=1e-9)
    assert scores["f1"] == pytest.approx(f1_score(y, p > 0.5, sample_weight=w), rel=1e-9)
    assert scores["accuracy"] == pytest.approx(accuracy_score(y, p > 0.5, sample_weight=w), rel=1e-9)
    with pytest.raises(
        SpecError, match=r"metrics\[0\]: mae scores real values, and the loss cross_entropy predicts classes"
    ):
        fitted(path, metrics=("mae",))


def test_given_validation_rows_are_held_out(path, tmp_path):
    lines = path.read_text().splitlines()
    (tmp_path / "v.csv").write_text("\n".join([lines[0], *lines[41:]]) + "\n")
    path.write_text("\n".join(lines[:41]) + "\n")
    rows, manifest = fitted(path, validation=str(tmp_path / "v.csv"))
    assert [int(row["row"]) for row in rows] == list(range(1, 21))
    assert manifest["scored_rows"] == 20
    assert not any("copies" in note for note in manifest["notes"])
    (tmp_path / "v.csv").write_text("\n".join([lines[0], *lines[1:11]]) + "\n")
    assert any(
        "10 of 10 validation rows are copies" in note
        for note in fitted(path, validation=str(tmp_path / "v.csv"))[1]["notes"]
    )
    (tmp_path / "v.csv").write_text("x,y\n1,0\n2,1\n")
    with pytest.raises(TableError, match=r"v\.csv: missing columns: 'g'"):
        fitted(path, validation=str(tmp_path / "v.csv"))
    with pytest.raises(SpecError, match="leave folds or validation out"):
        TableConfig("y", folds=3, validation="v.csv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": "x"}, "the weight 'x' is -"),
        ({"weight": "y"}, "'y' is to be the weight and the target"),
        ({"weight": "w", "drop": ["w"]}, "'w' is to be the weight and dropped"),
        ({"group": "q"}, "the column of the group 'q' is not a column"),
        ({"group": "g", "time": "t"}, "different splits"),
        ({"time": "g"}, "the time 'g' is text"),
    ],
)
def test_parts_that_do_not_fit_are_refused(path, options, message):
    with pytest.raises(TableError, match=message):
        make_problem(read_table(path), "y", **options)


def test_class_weights_of_the_command_line(path):
    from kapsi.cli.fit import class_weights

    problem = make_problem(read_table(path), "y")
    assert class_weights(["1=3"], problem) == (1.0, 3.0)
    assert class_weights(["balanced"], problem) == "balanced"
    for word in ("2=3", "1=x", "1", "1=-1"):
        with pytest.raises(SpecError, match="expected balanced, or LABEL=WEIGHT with a label among 0, 1"):
            class_weights([word], problem)
    with pytest.raises(SpecError, match="the class 1 has two weights"):
        class_weights(["1=2", "1=9"], problem)
    with pytest.raises(SpecError, match="a metric is given twice"):
        TableConfig("z", metrics=("mae", "mae"))
    with pytest.raises(SpecError, match="real values"):
        class_weights(["balanced"], make_problem(read_table(path), "z"))
    heavy, _ = fitted(path, training=TrainConfig(l2=0.01, epochs=4, class_weights=(1.0, 9.0)))
    light, _ = fitted(path)
    assert sum(float(row["probability_1"]) for row in heavy) > sum(float(row["probability_1"]) for row in light)


def test_several_targets_are_several_outputs(path):
    rows, manifest = fitted(path, ("z", "x"), metrics=("mae",), drop=["y"])

    run = load_run(path.parent / "run")
    assert {"z", "x"}.isdisjoint(column.name for column in run.model.preprocessing.columns)
    pairs = [
        [np.array([float(row[f"{kind}_{name}"]) for row in rows]) for kind in ("target", "prediction")] for name in "zx"
    ]
    assert manifest["scores"]["kapsi"]["r2"] == pytest.approx(np.mean([r2_score(y, p) for y, p in pairs]), rel=1e-9)
    assert manifest["scores"]["kapsi"]["mae"] == pytest.approx(
        np.mean([np.abs(y - p).mean() for y, p in pairs]), rel=1e-9
    )
    table = read_table(path)
    held = [int(row["row"]) - 1 for row in rows]
    again = run.model.predict(table)[0]
    for (_, predicted), name in zip(pairs, "zx", strict=True):
        np.testing.assert_allclose(np.array(again[f"prediction_{name}"])[held], predicted, rtol=1e-12)
    assert run.model.scores(table)[1] == ROWS
    with pytest.raises(TableError, match="'y' has classes, and several targets need real values"):
        make_problem(table, ["z", "y"])
    with pytest.raises(TableError, match="give different columns"):
        make_problem(table, ["z", "z"])


def test_a_repeated_option_of_one_value_is_refused(path, capsys):
    from kapsi.cli import main

    assert main(["fit", str(path), "--target", "y", "--seed", "1", "--seed=2"]) == 2
    assert "--seed was given twice, as '1' and as '2'; give it once" in capsys.readouterr().err
