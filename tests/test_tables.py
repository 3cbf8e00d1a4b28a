"""Fitting a table: scores, leaks, baselines, what is kept in the run folder, and reading it back."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, r2_score
from sklearn.preprocessing import StandardScaler

import kapsi as kp
from kapsi.data.tabular import Preprocessing, Reading, folds, make_problem, read_table, split, write_table
from kapsi.errors import KapsiError, RunError, SpecError, TableError
from kapsi.spec import to_dict
from kapsi.tables import RunConfig, Scores, TableConfig, default_spec, fit_table, load_run
from kapsi.tables.configuration import resolve_run
from kapsi.tables.fitting import fit_rows
from kapsi.tables.preparation import TrainingRows
from kapsi.tables.run_folder import load_config
from kapsi.tables.scores import classification_scores, regression_scores, summarize
from kapsi.training import resolve
from kapsi.training.config import TrainConfig
from training_options import nested

QUICK = TrainConfig(l2=0.01, epochs=4)
"""Without the search for a penalty: a fit takes some hundredths of a second."""


def write(path, **columns):
    write_table(path, {name: list(values) for name, values in columns.items()})
    return path


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def config(target="y", training=QUICK, model=None, **options):
    return RunConfig(TableConfig(target, **options), model, training)


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def column(rows, name, kind=float):
    return np.array([kind(row[name]) for row in rows])


@pytest.fixture
def classes(tmp_path):
    x = normal(60, 2)
    names = np.array(["no", "yes, sir", 'may"be'])[np.digitize(x[:, 0] + 0.5 * normal(60, seed=1), [-0.5, 0.6])]
    return write(tmp_path / "classes.csv", a=x[:, 0], b=x[:, 1], k=["u", "v", None] * 20, y=names.tolist())


@pytest.fixture
def numbers(tmp_path):
    x = normal(60, 2)
    y = 100 + 7 * x[:, 0] * x[:, 1] + x[:, 0] + 0.1 * normal(60, seed=1)
    return write(tmp_path / "numbers.csv", a=x[:, 0], b=x[:, 1], k=["u", "v", None] * 20, y=y)


# ------------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_scikit_learn(seed):
    random = np.random.default_rng(seed)
    probabilities, codes = random.dirichlet([0.3] * 4, 50), random.integers(0, 4, 50)
    found = classification_scores(probabilities, codes)
    assert found.main == accuracy_score(codes, probabilities.argmax(1))
    assert found.loss == pytest.approx(log_loss(codes, np.clip(probabilities, 2.3e-308, 1), labels=range(4)))
    y, predicted = random.normal(5, 3, 50), random.normal(5, 3, 50)
    found = regression_scores(predicted, y)
    assert found.main == pytest.approx(r2_score(y, predicted), rel=1e-12)
    assert found.loss == pytest.approx(math.sqrt(mean_squared_error(y, predicted)), rel=1e-12)


def test_an_impossible_class_costs_a_finite_loss():
    assert classification_scores(np.array([[1.0, 0.0]]), np.array([1])).loss == pytest.approx(708.36, abs=0.1)


@pytest.mark.parametrize("unit", [1e300, 1e-300, 1.0])
def test_scores_at_any_scale(unit):
    y, predicted = np.array([1.0, 2.0, 4.0]) * unit, np.array([1.0, 2.5, 4.5]) * unit
    found = regression_scores(predicted, y)
    assert found.main == pytest.approx(r2_score([1, 2, 4], [1, 2.5, 4.5]), rel=1e-9)
    assert found.loss == pytest.approx(math.sqrt(1 / 6) * unit, rel=1e-9)


def test_extreme_predictions_have_finite_scores():
    largest = np.finfo(np.float64).max
    for predicted, y in (
        ([1e300, 0.0], [0.0, 1.0]),
        ([largest, -largest], [-largest, largest]),
        ([1.0, 2.0], [0.0, 5e-324]),
    ):
        found = regression_scores(np.array(predicted), np.array(y))
        assert all(map(math.isfinite, found))
        assert found.main < -1


@pytest.mark.parametrize("value", [0.0, 0.1, 1e300, -7.3])
def test_r2_of_a_constant_target(value):
    y = np.full(3, value)
    assert regression_scores(y, y) == Scores(1.0, 0.0)
    found = regression_scores(y + 1e284 + np.arange(3), y)
    assert found.main == 0.0
    assert found.loss > 0


def test_summaries_are_means_and_deviations_at_any_scale():
    found = [Scores(1.0, 3e307), Scores(1.0, 1.7e308), Scores(0.5, 1.7e308)]
    (mean, std), (loss, loss_std) = summarize(found)
    assert (mean, std) == (np.mean([1, 1, 0.5]), np.std([1, 1, 0.5]))
    assert loss == pytest.approx(np.mean([0.3, 1.7, 1.7]) * 1e308)
    assert loss_std == pytest.approx(np.std([0.3, 1.7, 1.7]) * 1e308)
    assert summarize([Scores(0.1, 0.1)] * 10) == ((0.1, 0.0), (0.1, 0.0))
    assert summarize([Scores(0.0, 5e-324)]) == ((0.0, 0.0), (5e-324, 0.0))


@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_kept_predictions_give_the_scores(request, tmp_path, task, k):
    path = request.getfixturevalue("classes" if task == "classification" else "numbers")
    report = fit_table(path, config(folds=k), tmp_path / "run")
    manifest = json.loads((tmp_path / "run/run.json").read_text())
    rows = rows_of(tmp_path / "run/predictions.csv")
    assert report.scored_rows == manifest["scored_rows"] == len(rows) == (60 if k else 12)
    parts = [[row for row in rows if row["fold"] == str(i + 1)] for i in range(k)] if k else [rows]
    assert sum(map(len, parts)) == len(rows)
    found = []
    for part in parts:
        if task == "classification":
            labels = [name.removeprefix("probability_") for name in part[0] if name.startswith("probability_")]
            assert labels == sorted(labels)
            y, chances = (
                column(part, "target", str),
                np.array([column(part, f"probability_{label}") for label in labels]).T,
            )
            np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-12)
            assert column(part, "prediction", str).tolist() == [labels[i] for i in chances.argmax(1)]
            present = [labels.index(label) for label in y]
            found.append(
                (accuracy_score(y, column(part, "prediction", str)), log_loss(present, chances, labels=[0, 1, 2]))
            )
        else:
            y, predicted = column(part, "target"), column(part, "prediction")
            found.append((r2_score(y, predicted), math.sqrt(mean_squared_error(y, predicted))))
    names = ("accuracy", "log loss") if task == "classification" else ("r2", "rmse")
    for i, name in enumerate(names):
        values = [pair[i] for pair in found]
        assert manifest["scores"]["kapsi"][name] == pytest.approx(np.mean(values), rel=1e-9)
        assert manifest["scores"]["kapsi"][f"{name} std"] == pytest.approx(np.std(values), rel=1e-7, abs=1e-12)
        assert [scores[i] for scores in report.scores["kapsi"]] == pytest.approx(values, rel=1e-9)
    # Rows are those of the file, and the targets are its own.
    original = rows_of(path)
    assert [original[int(row["row"]) - 1]["y"] for row in rows] == [row["target"] for row in rows]
    assert [int(row["row"]) for row in rows] == sorted({int(row["row"]) for row in rows})


@pytest.mark.parametrize("k", [None, 3])
def test_baselines_are_those_of_scikit_learn_on_the_same_rows(tmp_path, k):
    x = normal(60, 2)
    numeric = write(tmp_path / "n.csv", a=x[:, 0], b=10 * x[:, 1], y=x[:, 0] + 0.5 * normal(60, seed=1))
    labeled = write(tmp_path / "c.csv", a=x[:, 0], b=10 * x[:, 1], y=(x[:, 0] + normal(60, seed=1) > 0).astype(int))
    for path, is_class in ((numeric, False), (labeled, True)):
        report = fit_table(path, config(folds=k), tmp_path / f"run{is_class}")
        problem = make_problem(read_table(path), "y")
        if k:
            held = folds(problem.y, k, classes=is_class, seed=0)
        else:
            held = [split(problem.y, 0.2, classes=is_class, seed=0)[1]]
        raw = np.c_[x[:, 0], 10 * x[:, 1]]
        for i, test in enumerate(held):
            train = np.setdiff1d(np.arange(60), test)
            scaler = StandardScaler().fit(raw[train])
            y, y_test = problem.y[train], problem.y[test]
            if is_class:
                model = LogisticRegression(max_iter=1000).fit(scaler.transform(raw[train]), y)
                chances = model.predict_proba(scaler.transform(raw[test]))
                shares = np.tile(np.bincount(y) / len(y), (len(test), 1))
                wanted = {
                    "logistic regression": (accuracy_score(y_test, chances.argmax(1)), log_loss(y_test, chances)),
                    "most frequent class": (np.mean(y_test == shares[0].argmax()), log_loss(y_test, shares)),
                }
            else:
                deviation = y.std()
                model = Ridge().fit(scaler.transform(raw[train]), (y - y.mean()) / deviation)
                predicted = model.predict(scaler.transform(raw[test])) * deviation + y.mean()
                wanted = {
                    "ridge regression": (r2_score(y_test, predicted), math.sqrt(mean_squared_error(y_test, predicted))),
                    "mean": (r2_score(y_test, [y.mean()] * len(test)), math.sqrt(np.mean((y_test - y.mean()) ** 2))),
                }
            assert report.scores.keys() == {"kapsi", *wanted}
            for name, scores in wanted.items():
                assert report.scores[name][i] == pytest.approx(scores, rel=1e-6, abs=1e-9)


# ------------------------------------------------------------------------------------------------ nothing leaks


@pytest.mark.parametrize("solver", ["lbfgs", "adamw"])
def test_noise_is_not_predicted_above_chance(tmp_path, solver):
    y = np.random.default_rng(3).integers(0, 2, 120)
    columns = {f"x{i}": values for i, values in enumerate(normal(9, 120))}
    path = write(tmp_path / "t.csv", id=np.arange(120), **columns, y=y)
    # Hardly held down, 66 columns for 80 rows: such a model knows the rows that it saw by heart.
    training = TrainConfig(**nested(solver=solver, l2=1e-6, epochs=40, learning_rate=0.05, patience=40))
    scores = fit_table(path, config(training=training, folds=3), tmp_path / "run").scores["kapsi"]
    # Three standard deviations of a fair coin.
    assert np.mean([score.main for score in scores]) < 0.5 + 3 * 0.5 / math.sqrt(120)
    in_sample, _, _ = load_run(tmp_path / "run")[0].scores(read_table(path))
    # With adamw the early stop keeps it from that.
    assert in_sample.main > (0.8 if solver == "lbfgs" else 0.5)


@pytest.mark.parametrize("solver", ["lbfgs", "adamw"])
def test_a_row_does_not_reach_its_own_prediction(tmp_path, numbers, solver):
    training = TrainConfig(solver=solver, epochs=3, l2=0.1)
    fit_table(numbers, config(training=training, folds=3), tmp_path / "before")
    before = rows_of(tmp_path / "before/predictions.csv")
    # Regression folds do not depend on the target: spoil the targets of fold 1, and an input of one of its rows.
    spoiled = {int(row["row"]) for row in before if row["fold"] == "1"}
    first = min(spoiled)
    rows = rows_of(numbers)
    for i, row in enumerate(rows, 1):
        if i in spoiled:
            row["y"] = str(-50.0 * float(row["y"]) + i)
        if i == first:
            row["a"], row["k"] = "12345.6", "w"
    other = write(tmp_path / "other.csv", **{name: [row[name] or None for row in rows] for name in rows[0]})
    fit_table(other, config(training=training, folds=3), tmp_path / "after")
    after = rows_of(tmp_path / "after/predictions.csv")
    for old, new in zip(before, after, strict=True):
        assert (old["row"], old["fold"]) == (new["row"], new["fold"])
        unchanged = old["fold"] == "1" and int(old["row"]) != first
        assert (old["prediction"] == new["prediction"]) == unchanged


def test_the_saved_model_is_fitted_to_all_rows_with_folds_and_to_one_part_without(tmp_path, numbers):
    fit_table(numbers, config(folds=3), tmp_path / "folds")
    fit_table(numbers, config(), tmp_path / "part")
    table = read_table(numbers)
    whole, part = (load_run(tmp_path / name)[0] for name in ("folds", "part"))
    values = table.columns["a"].values
    assert whole.preprocessing.columns[0].mean == pytest.approx(values.mean(), rel=1e-12)
    kept, held = split(table.columns["y"].values, 0.2, classes=False, seed=0)
    assert part.preprocessing.columns[0].mean == pytest.approx(values[kept].mean(), rel=1e-12)
    rows = rows_of(tmp_path / "part/predictions.csv")
    assert [int(row["row"]) - 1 for row in rows] == held.tolist()
    predicted = np.array(part.predict(table)[0]["prediction"])
    assert predicted[held].tolist() == column(rows, "prediction").tolist()
    out_of_fold = column(rows_of(tmp_path / "folds/predictions.csv"), "prediction")
    in_sample = np.array(whole.predict(table)[0]["prediction"])
    y = table.columns["y"].values
    assert np.square(in_sample - y).sum() < np.square(out_of_fold - y).sum()
    assert not np.isclose(in_sample, out_of_fold, rtol=1e-9).any()


# ------------------------------------------------------------------------------------------------ a fit as a whole


def test_a_linear_specification_is_ridge_regression(tmp_path):
    x = normal(60, 2)
    path = write(tmp_path / "t.csv", a=x[:, 0], b=x[:, 1], y=3 * x[:, 0] - x[:, 1] + normal(60, seed=1))
    training = TrainConfig(l2=0.3, solver="lbfgs")
    fit_table(path, config(training=training, model=kp.rpn([None, None], bias=True)), tmp_path / "run")
    y = read_table(path).columns["y"].values
    kept, held = split(y, 0.2, classes=False, seed=0)
    scaler = StandardScaler().fit(x[kept])
    standard = (y[kept] - y[kept].mean()) / y[kept].std()
    reference = Ridge(alpha=0.3 * len(kept) / 2).fit(scaler.transform(x[kept]), standard)
    wanted = reference.predict(scaler.transform(x[held])) * y[kept].std() + y[kept].mean()
    found = column(rows_of(tmp_path / "run/predictions.csv"), "prediction")
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [None, 3])
def test_equal_seeds_give_equal_files_and_nothing_global_is_drawn(tmp_path, classes, k):
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(ord(name))
        state = torch.get_rng_state()
        fit_table(classes, config(training=replace(QUICK, seed=seed), folds=k), tmp_path / name)
        assert torch.equal(state, torch.get_rng_state())
    assert np.random.get_state()[1].tolist() == before[1]
    files = {p.name for p in (tmp_path / "a").iterdir()}
    assert files == {
        "config.yaml",
        "intervals.json",
        "metrics.jsonl",
        "model.safetensors",
        "predictions.csv",
        "preprocessing.json",
        "rows.parquet",
        "run.json",
    }
    for name in files - {"run.json"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for name in ("model.safetensors", "predictions.csv"):
        assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()


def test_the_configuration_of_a_run_reproduces_it(tmp_path, monkeypatch):
    # Categories and missing values that some parts do not have: the width differs from fold to fold.
    x = normal(40, 2)
    rare = ["u", "v", "w", "z"] + ["u", "v"] * 18
    path = write(tmp_path / "t.csv", a=[None, *x[1:, 0]], b=x[:, 1], k=rare, y=x[:, 0] + x[:, 1])
    # All rows are just too many for the quasi-Newton method, the parts are not.
    width = len(kp.Model(default_spec(7).sized(7, 1), device="meta").layers)
    assert width == 1
    problem = make_problem(read_table(path), "y")
    settled = resolve_run(problem, config())
    inputs = len(Preprocessing.fit(problem.features).names())
    count = sum(p.numel() for p in kp.Model(settled.model.sized(inputs, 1), device="meta").parameters())
    monkeypatch.setattr(resolve, "SMALL_PRODUCT", 40 * count - 1)
    fit_table(path, config(folds=5), tmp_path / "a")
    again = load_config(tmp_path / "a")
    assert again.training.solver == kp.AdamW()
    assert again.training.loss == kp.MSE()
    assert again.table.task == "regression"
    assert again.model == default_spec(inputs)
    monkeypatch.undo()
    fit_table(path, replace(again, table=replace(again.table, task="auto")), tmp_path / "b")
    for name in ("config.yaml", "metrics.jsonl", "model.safetensors", "predictions.csv", "preprocessing.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    widths = {
        fold: len(Preprocessing.fit(problem.features, np.setdiff1d(np.arange(40), test)).names())
        for fold, test in enumerate(folds(problem.y, 5, classes=False, seed=0))
    }
    assert len(set(widths.values())) > 1


def test_a_target_with_any_name_survives_the_configuration(tmp_path):
    name = "a: 'b'\n\"c\", é\x85\u2028😀 #d"
    path = write(tmp_path / "t.csv", **{"x: [1": normal(20), name: normal(20, seed=1)})
    fit_table(path, config(target=name), tmp_path / "run")
    assert load_config(tmp_path / "run").table.target == name
    assert load_run(tmp_path / "run")[0].target == name


def test_the_run_folder_holds_everything(tmp_path, classes):
    fit_table(classes, config(folds=3, training=TrainConfig(epochs=2, seed=7)), tmp_path / "run")
    manifest = json.loads((tmp_path / "run/run.json").read_text())
    assert {"kapsi", "torch", "numpy", "python"} <= manifest["versions"].keys()
    assert (manifest["seed"], manifest["folds"], manifest["rows"], manifest["table"]) == (7, 3, 60, "classes.csv")
    assert set(manifest["scores"]) == {"kapsi", "most frequent class", "logistic regression"}
    resolved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert resolved["table"] == {
        "target": "y",
        "task": "classification",
        "folds": 3,
        "strict": False,
        "drop": [],
        "validation_fraction": 0.2,
        "early_stopping_fraction": 0.15,
        "reading": to_dict(Reading()),
        **dict.fromkeys(("weight", "group", "time", "validation", "interval_by")),
        "metrics": [],
    }
    assert resolved["training"]["solver"]["kind"] == "lbfgs"
    assert resolved["training"]["loss"]["kind"] == "cross_entropy"
    assert resolved["model"]["layers"][0]["heads"][0]["expansion"]["kind"] == "taylor"
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {r["part"] for r in records} == {"fold 1 of 3", "fold 2 of 3", "fold 3 of 3", "all rows"}
    assert {r["event"] for r in records} == {"penalty", "epoch", "scores"}
    for part in {r["part"] for r in records}:
        mine = [r for r in records if r["part"] == part]
        numbers = [r["number"] for r in mine if r["event"] == "epoch"]
        assert numbers == list(range(1, len(numbers) + 1))
        assert sum(r["chosen"] for r in mine if r["event"] == "penalty") == 1
        assert sum(r["event"] == "scores" for r in mine) == (0 if part == "all rows" else 3)
    preprocessing = json.loads((tmp_path / "run/preprocessing.json").read_text())
    assert [c["name"] for c in preprocessing["inputs"]["columns"]] == ["a", "b", "k"]
    assert preprocessing["classes"] == ['may"be', "no", "yes, sir"]


def test_progress_names_the_parts(tmp_path, numbers):
    seen = []

    class Parts(kp.Callback):
        def on_part(self, name):
            seen.append(name)

        def on_epoch(self, record):
            seen.append(record.number)

    fit_table(numbers, config(folds=2), tmp_path / "run", callbacks=Parts())
    assert [part for part in seen if isinstance(part, str)] == ["fold 1 of 2", "fold 2 of 2", "all rows"]
    assert seen[1] == 1


def test_the_folder_is_named_after_the_table_and_numbered(tmp_path, numbers, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [str(fit_table(numbers, config()).path) for _ in range(2)]
    assert found == ["runs/numbers", "runs/numbers-2"]


SPECS = {
    "kan": kp.rpn([None, 4, None], kp.BSpline(intervals=4), remainder=kp.LinearRemainder(before="silu"), bias=True),
    "mlp": kp.rpn([None, 8, 5, None], bias=True, output=("tanh",)),
    "dropout": kp.rpn([None, 8, None], bias=True, output=("relu", kp.Dropout(0.1))),
    "norms": kp.rpn([None, 6, None], before="batch_norm", bias=True, output=("layer_norm", "gelu")),
    "heads": kp.rpn(
        [None, 4, None],
        kp.Taylor(2),
        kp.LowRank(2),
        heads=2,
        channels=2,
        fusion="weighted_sum",
        bias=True,
        before="tanh",  # a polynomial of the fourth degree has its luck with outliers
    ),
    "nested": kp.rpn([None, None], kp.Nested((kp.Chebyshev(2), kp.Taylor(2, symmetric=True))), bias=True),
    "mixed": kp.ModelSpec(
        (None, 4, None),
        (
            kp.LayerSpec(
                (kp.HeadSpec(kp.Extended((kp.Identity(), kp.BSpline()))), kp.HeadSpec(kp.Taylor(2), kp.Kronecker())),
                kp.Concatenation(),
            ),
            kp.LayerSpec((kp.HeadSpec(kp.Chebyshev(2), kp.Masked(0.5), kp.LinearRemainder(), bias=True),)),
        ),
    ),
}


@pytest.mark.parametrize(
    ("task", "solver"),
    [
        ("classification", "lbfgs"),
        ("regression", "lbfgs"),
        pytest.param("classification", "adamw", marks=pytest.mark.slow),
        pytest.param("regression", "adamw", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", SPECS)
def test_all_kinds_of_models_learn(tmp_path, name, task, solver):
    x = normal(120, 2)
    signal = x[:, 0] + 0.8 * x[:, 1]
    path = write(
        tmp_path / "t.csv", a=x[:, 0], b=x[:, 1], y=np.where(signal > 0, "p", "n") if task[0] == "c" else signal
    )
    training = TrainConfig(**nested(solver=solver, l2=1e-3, epochs=15, learning_rate=0.05, batch_size=16))
    report = fit_table(path, config(training=training, model=SPECS[name]), tmp_path / "run")
    assert report.scores["kapsi"][0].main > 0.75
    assert report.scores["kapsi"][0].main > report.scores["most frequent class" if task[0] == "c" else "mean"][0].main
    model, _ = load_run(tmp_path / "run")
    assert model.model.spec == SPECS[name].sized(2, 2 if task[0] == "c" else 1)
    assert load_config(tmp_path / "run").model == SPECS[name]


def test_the_default_model_learns_products_and_falls_back_to_the_linear_part(tmp_path):
    x = normal(150, 3)
    product = write(
        tmp_path / "p.csv", a=x[:, 0], b=x[:, 1], c=x[:, 2], y=x[:, 0] * x[:, 1] + 0.1 * normal(150, seed=1)
    )
    linear = write(tmp_path / "l.csv", a=x[:, 0], b=x[:, 1], c=x[:, 2], y=x[:, 0] + 0.7 * normal(150, seed=1))
    found = fit_table(product, config(training=TrainConfig()), tmp_path / "p").scores
    assert found["kapsi"][0].main > 0.95 > 0.2 > found["ridge regression"][0].main
    found = fit_table(linear, config(training=TrainConfig()), tmp_path / "l").scores
    assert abs(found["kapsi"][0].main - found["ridge regression"][0].main) < 0.05


@pytest.mark.parametrize(
    ("option", "a", "b", "others"),
    [
        ("validation_fraction", 0.2, 0.3, {}),
        ("seed", 0, 1, {}),
        ("early_stopping_fraction", 0.1, 0.4, {"solver": "adamw"}),
        ("l2", 0.01, 1.0, {}),
        ("l2", None, 1.0, {}),
        ("solver", "lbfgs", "adamw", {}),
        ("epochs", 1, 2, {}),
        ("patience", 1, 9, {"solver": "adamw", "learning_rate": 1.0, "epochs": 60}),
        ("batch_size", 8, 16, {"solver": "adamw"}),
        ("learning_rate", 0.01, 0.02, {"solver": "adamw"}),
    ],
)
def test_each_option_of_the_training_changes_the_run(tmp_path, numbers, option, a, b, others):
    found = []
    for i, value in enumerate((a, b)):
        options = {"l2": 0.01, "epochs": 3, **others, option: value}
        fractions = {name: options.pop(name) for name in list(options) if name.endswith("_fraction")}
        fit_table(numbers, config(training=TrainConfig(**nested(**options)), **fractions), tmp_path / str(i))
        found.append((tmp_path / str(i) / "predictions.csv").read_bytes())
    assert found[0] != found[1]


# ------------------------------------------------------------------------------------------------ tables of all kinds


def of_kind(kind):
    x, n = normal(40, 2), np.arange(40)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    return {
        "huge": {"a": x[:, 0] * 1e300, "b": x[:, 1] * 1e-300, "y": x[:, 0] * 1e300},
        "tiny": {"a": x[:, 0] * 1e-320, "b": x[:, 1], "y": x[:, 0] * 1e-300},
        "far input": {"a": np.where(n == 7, 1e300, x[:, 0]), "b": x[:, 1], "y": x[:, 1]},
        "far target": {"a": x[:, 0], "b": x[:, 1], "y": np.where(n == 7, 1.7e308, x[:, 0])},
        "constant": {"a": x[:, 0], "b": [3.0] * 40, "c": ["k"] * 40, "y": y},
        "nearly constant": {"a": [0.0] * 39 + [1.0], "b": ["u"] * 39 + ["v"], "y": x[:, 0]},
        "constant target in a fold": {"a": x[:, 0], "b": x[:, 1], "y": [0.1] * 38 + [1.3, 2.7]},
        "class of two": {"a": x[:, 0], "y": [0, 0] + [1] * 38},
        "class of one": {"a": x[:, 0], "y": ["only"] + ["many"] * 39},
        "twenty classes": {"a": x[:, 0], "b": x[:, 1], "y": n % 20},
        "class in each row": {"a": x[:, 0], "y": [f"c{i}" for i in n]},
        "booleans": {"a": x[:, 0], "b": [bool(v) for v in y], "y": [bool(v) for v in n % 2]},
        "many categories": {"a": [f"c{i % 36}" for i in n], "b": x[:, 0], "y": y},
        "duplicates": {"a": np.repeat(x[:4, 0], 10), "b": np.repeat(x[:4, 1], 10), "y": np.repeat([0, 1, 0, 1], 10)},
        "holes": {
            "a": [None if i % 3 else v for i, v in enumerate(x[:, 0])],
            "b": [None, *["u", "v", None] * 13],
            "y": y,
        },
        "names": {
            "": x[:, 0],
            'a\nb, "c"': x[:, 1],
            "😀": [["a,b", 'q"u', "new\nline", "ünï"][i % 4] for i in n],
            "y": y,
        },
        "wide": {**{f"x{i}": v for i, v in enumerate(normal(150, 40))}, "y": y},
    }[kind]


KINDS = [
    "huge", "tiny", "far input", "far target", "constant", "nearly constant", "constant target in a fold", "class of two",
    "class of one", "twenty classes", "class in each row", "booleans", "many categories", "duplicates", "holes", "names", "wide",
]  # fmt: skip


# What the second solver could make of a table by itself are numbers; all else is done with the table before.
NUMBERS = ("huge", "tiny", "far input", "far target", "nearly constant", "constant target in a fold")


@pytest.mark.parametrize(
    ("kind", "solver"),
    [(kind, "lbfgs") for kind in KINDS]
    + [pytest.param(kind, "adamw", marks=() if kind in NUMBERS else pytest.mark.slow) for kind in KINDS],
)
def test_odd_tables_are_fitted_or_refused_whole(tmp_path, kind, solver):
    path = write(tmp_path / "t.csv", **of_kind(kind))
    training = TrainConfig(l2=0.1, epochs=2, solver=solver)
    for k in (None, 3):
        where = tmp_path / f"run{k}"
        if kind == "class in each row":
            with pytest.raises(TableError, match=r"single row"):
                fit_table(path, config(training=training, folds=k), where)
            assert not where.exists()
            continue
        report = fit_table(path, config(training=training, folds=k), where)
        assert all(math.isfinite(value) for found in report.scores.values() for scores in found for value in scores)
        model, manifest = load_run(where)
        assert all(math.isfinite(v) for scores in manifest["scores"].values() for v in scores.values())
        columns, _ = model.predict(read_table(path))
        assert len(columns["prediction"]) == 40
        if model.classes is None:
            assert np.isfinite(columns["prediction"]).all()
        else:
            assert set(columns["prediction"]) <= set(model.classes)
            names = [str(label).lower() if isinstance(label, bool) else label for label in model.classes]
            chances = np.array([columns[f"probability_{name}"] for name in names])
            assert ((chances >= 0) & (chances <= 1)).all()


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("rows", [3, 4, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (5, 6, 7))])
def test_the_smallest_tables(tmp_path, rows, task):
    x = normal(rows, 2)
    path = write(
        tmp_path / "t.csv",
        a=x[:, 0],
        b=x[:, 1],
        y=["p", "q"] * (rows // 2) + ["p"] * (rows % 2) if task[0] == "c" else x[:, 0] + 1,
    )
    for k in (None, 2):
        if rows < 4:
            with pytest.raises(TableError, match=r"3 rows with a target; at least 4 are needed|give fewer"):
                fit_table(path, config(folds=k), tmp_path / f"run{k}")
            continue
        report = fit_table(path, config(training=TrainConfig(epochs=3), folds=k), tmp_path / f"run{k}")
        assert report.scored_rows == (rows if k else 1)
    assert (tmp_path / "run2").exists() == (rows >= 4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parquet(tmp_path, dtype):
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = normal(60, 2).astype(dtype)
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "y": x[:, 0] * x[:, 1]}), tmp_path / "t.parquet")
    report = fit_table(tmp_path / "t.parquet", config(training=TrainConfig(l2=1e-6)), tmp_path / "run")
    assert report.scores["kapsi"][0].main > 0.999
    columns, _ = load_run(tmp_path / "run")[0].predict(read_table(tmp_path / "t.parquet"))
    write_table(tmp_path / "o.parquet", columns)
    assert pq.read_table(tmp_path / "o.parquet").column("prediction").to_pylist() == columns["prediction"]


# ------------------------------------------------------------------------------------------------ what is refused


def test_what_does_not_fit_is_refused_before_the_work_and_leaves_nothing(tmp_path, classes, numbers):
    cases = [
        (
            classes,
            config(training=TrainConfig(loss="mse")),
            "mse does not fit classification, which needs class probabilities",
        ),
        (numbers, config(training=TrainConfig(loss="cross_entropy")), "cross_entropy does not fit regression"),
        (classes, config(folds=61), "61 folds of 60 rows"),
        (numbers, config(folds=31), "31 folds of 60 rows; each fold needs at least two rows"),
        (numbers, config(model=kp.rpn([9, None])), "the model has 9 inputs and the data 5; set this width to null"),
        (classes, config(model=kp.rpn([None, 2])), "the model has 2 outputs and the data 3"),
        (numbers, config(model=kp.rpn([None, 2**40, None])), "at most 68,719,476,736"),
        (
            numbers,
            config(model=kp.rpn([None, None], reconciliation=kp.ConstantReconciliation())),
            "no trained parameters",
        ),
        (numbers, config(target="z"), "the target 'z' is not a column"),
        (tmp_path / "no.csv", config(), "there is no such file"),
    ]
    for path, bad, message in cases:
        with pytest.raises(KapsiError, match=message) as caught:
            fit_table(path, bad, tmp_path / "some/where/run")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "some").exists()


def test_a_part_without_inputs_is_refused_and_leaves_nothing(tmp_path):
    # The only column has one value, which the part without its row never sees.
    path = write(tmp_path / "t.csv", k=["u"] + [None] * 19, y=normal(20))
    with pytest.raises(TableError, match=r"no inputs are left in a part of \d+ rows; give more rows or fewer folds"):
        fit_table(path, config(folds=10, training=QUICK), tmp_path / "some/run")
    assert not (tmp_path / "some").exists()


def test_a_training_that_goes_wrong_leaves_nothing(tmp_path, numbers):
    astray = config(
        training=TrainConfig(solver=kp.AdamW(learning_rate=1e6), epochs=50), model=kp.rpn([None, 8, None], kp.Taylor(2))
    )
    with pytest.raises(KapsiError, match="training stopped in epoch"):
        fit_table(numbers, astray, tmp_path / "some/run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["numbers.csv"]
    fit_table(numbers, config(), tmp_path / "run")
    kept = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(KapsiError, match="training stopped in epoch"):
        fit_table(numbers, astray, tmp_path / "run", overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == kept


def test_a_prediction_that_is_not_finite_is_an_error_with_its_row(tmp_path, numbers):
    fit_table(
        numbers,
        config(model=kp.rpn([None, None], kp.Taylor(7, symmetric=True)), training=replace(QUICK, solver="adamw")),
        tmp_path / "run",
    )
    model, _ = load_run(tmp_path / "run")
    far = write(tmp_path / "far.csv", a=[0.1, 1e200], b=[0.1, 1e200], k=["u", "u"], y=[1.0, 2.0])
    with pytest.raises(TableError, match=r"far\.csv: the prediction for row 2 is not a finite number"):
        model.predict(read_table(far))


# ------------------------------------------------------------------------------------------------ reading a run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    x = normal(40, 2)
    for name, y in (("classes", ["no", "yes"] * 20), ("numbers", x[:, 0])):
        write(folder / f"{name}.csv", a=x[:, 0], k=["u", "v"] * 20, y=y)
        fit_table(folder / f"{name}.csv", config(), folder / name)
    return folder


def sealed(run):
    """Let run.json agree with what the files are now."""
    manifest = json.loads((run / "run.json").read_text())
    for name in manifest["files"]:
        data = (run / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (run / "run.json").write_text(json.dumps(manifest))


def edit(**changes):
    return lambda data: {**data, **changes}


def edit_column(**changes):
    def change(data):
        first, *rest = data["inputs"]["columns"]
        return {**data, "inputs": {"columns": [{**first, **changes}, *rest]}}

    return change


SENSELESS = {
    "list": lambda data: [],
    "text": lambda data: "x",
    "number": lambda data: 5,
    "no classes": lambda data: {k: v for k, v in data.items() if k != "classes"},
    "extra key": edit(more=1),
    "classes are a text": edit(classes="no"),
    "classes are lists": edit(classes=[[1], [2]]),
    "classes are equal": edit(classes=["a", "a"]),
    "classes are mixed": edit(classes=["a", 1]),
    "classes are reals": edit(classes=[1.5, 2.5]),
    "classes are a mapping": edit(classes={"a": 1, "b": 2}),
    "one class": edit(classes=["a"]),
    "a third class": edit(classes=["a", "b", "c"]),
    "no class": edit(classes=None),
    "a scale of classes": edit(scale={"center": 0.0, "scale": 1.0}),
    "another target": edit(target="z"),
    "a target that is no text": edit(target=["y"]),
    "a target among the inputs": edit(target="a"),
    "another task": edit(task="regression"),
    "no task": edit(task=None),
    "no inputs": edit(inputs={"columns": []}),
    "inputs are a list": edit(inputs=[]),
    "an infinite mean": edit_column(mean=math.inf),
    "a scale of zero": edit_column(scale=0.0),
    "one input more": edit_column(missing=True),
    "a name that is no text": edit_column(name=3),
}


@pytest.mark.parametrize("change", SENSELESS.values(), ids=SENSELESS)
def test_a_senseless_preprocessing_with_the_right_checksum_is_damage(tmp_path, runs, change):
    run = tmp_path / "run"
    shutil.copytree(runs / "classes", run)
    file = run / "preprocessing.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    sealed(run)
    with pytest.raises(RunError, match="damaged run") as caught:
        load_run(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "[]", "[" * 5000, "table: {target: y}", "\0", "a: &b 1"])
def test_a_senseless_configuration_is_damage(tmp_path, runs, text):
    run = tmp_path / "run"
    shutil.copytree(runs / "classes", run)
    (run / "config.yaml").write_text(text)
    sealed(run)
    with pytest.raises(RunError, match="damaged run") as caught:
        load_run(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "preprocessing.json", "config.yaml"])
def test_files_of_another_run_are_damage(tmp_path, runs, name):
    run = tmp_path / "run"
    shutil.copytree(runs / "classes", run)
    shutil.copy(runs / "numbers" / name, run)
    sealed(run)
    with pytest.raises(RunError, match="damaged run"):
        load_run(run)
    manifest = json.loads((runs / "classes/run.json").read_text())
    del manifest["files"][name]
    (run / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=f"damaged run: the file '{name}' is missing"):  # unlisted is as good as none
        load_run(run)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_damage(tmp_path, runs, value):
    run = tmp_path / "run"
    shutil.copytree(runs / "numbers", run)
    model = kp.load(run / "model.safetensors")
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = value
    kp.save(model, run / "model.safetensors")
    sealed(run)
    with pytest.raises(RunError, match="not finite"):
        load_run(run)


def test_evaluation_agrees_with_scikit_learn_and_leaves_out_missing_targets(tmp_path, runs):
    model, _ = load_run(runs / "numbers")
    table = write(
        tmp_path / "t.csv", k=["u", "w", None, "v"], y=[1.0, None, 2.0, 0.5], extra=[1, 2, 3, 4], a=[0.1, 2, 3, None]
    )
    scores, rows, notes = model.scores(read_table(table))
    predicted = np.array(model.predict(read_table(table))[0]["prediction"])[[0, 2, 3]]
    assert rows == 3
    assert scores.main == pytest.approx(r2_score([1, 2, 0.5], predicted))
    assert notes == [
        "ignored columns that the model does not use: 'extra'",
        "ignored 1 of 4 rows without a target 'y'",
    ]
    with pytest.raises(TableError, match="missing in every row"):
        model.scores(read_table(write(tmp_path / "m.csv", a=[1.0], k=["u"], y=[None])))


def test_fit_rows_needs_a_resolved_configuration(numbers):
    problem = make_problem(read_table(numbers), "y")
    with pytest.raises(SpecError, match="use the result of resolve_run"):
        fit_rows(problem, TrainingRows.of(problem, np.arange(60)), config())


@pytest.mark.parametrize(("name", "table"), [("classification", "c.csv"), ("regression", "t.csv"), ("kan", "t.csv")])
def test_run_folders_of_0_1_load_and_predict_the_same(tmp_path, name, table):
    files = Path(__file__).parent / "files_of_0_1"
    shutil.copytree(files / name, tmp_path / name)  # reading a run may lock its folder
    model, manifest = load_run(tmp_path / name)
    assert manifest["format_version"] == 1
    columns, _ = model.predict(read_table(files / table))
    wanted = rows_of(files / f"{name}.csv")
    for key, values in columns.items():
        found = [row[key] for row in wanted]
        assert values == found if isinstance(values[0], str) else values == pytest.approx([float(v) for v in found])
    config = load_config(tmp_path / name, 1)
    assert isinstance(config.training.solver, kp.Solver)
    fractions = (0.3, 0.2) if name == "regression" else (0.2, 0.15)
    assert (config.table.validation_fraction, config.table.early_stopping_fraction) == fractions
