"""`kapsi fit` at the edges: few rows, single classes, weights of 0, huge numbers, and messages in terms of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kapsi as kp
from kapsi.data.tabular import TargetScale, write_table
from kapsi.tables.scores import Scores, better_baselines, notes_on_scores, scores_of
from kapsi.training.metrics import MAE, MAPE

X = np.random.default_rng(0).normal(size=(80, 2))
LINE = X[:, 0] + 0.5 * X[:, 1]
LETTERS = np.where(LINE > 0, "p", "q").tolist()


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(**columns) -> str:
    write_table("t.csv", {name: np.asarray(values).tolist() for name, values in columns.items()})
    return "t.csv"


def fit(kapsi, *options, head="linear"):
    """Fit t.csv with one head; return output, errors and the manifest."""
    code, out, err = kapsi("fit", "t.csv", "--target", "y", "--head", head, "--output", "run", "--overwrite", *options)
    assert code == 0, err
    return out, err, json.loads(Path("run/run.json").read_text())


def refused(kapsi, *words) -> str:
    """Return the one line of a refused command that writes nothing."""
    before = sorted(Path().rglob("*"))
    code, out, err = kapsi(*words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert sorted(Path().rglob("*")) == before
    return err


# ------------------------------------------------------------------------------------------------ notes


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Scores(0.9, 1.0), ["base has a higher accuracy than the model on the held-out rows"]),
        (Scores(0.8, 0.9), ["base has a lower log loss than the model on the held-out rows"]),
        (Scores(0.7, 0.9), ["base has a lower log loss than the model on the held-out rows"]),
        (Scores(0.9, 0.9), ["base has a higher accuracy and a lower log loss than the model on the held-out rows"]),
        (Scores(0.8, 1.0), []),
        (Scores(0.8, 1.0 - 1e-5), []),  # the printed digits are equal
        (Scores(0.8, 1.0 - 1e-3), ["base has a lower log loss than the model on the held-out rows"]),
    ],
)
def test_each_better_score_of_a_baseline_is_noted(other, said) -> None:
    assert better_baselines({"kapsi": [Scores(0.8, 1.0)], "base": [other]}, "classification") == said


def test_better_baselines_at_any_scale() -> None:
    scores = {"kapsi": [Scores(0.5, 2e300)], "ridge": [Scores(0.5, 1e300)], "mean": [Scores(0.0, 3e300)]}
    assert better_baselines(scores, "regression") == ["ridge has a lower RMSE than the model on the held-out rows"]
    scores = {"kapsi": [Scores(0.5, 2e-300)], "ridge": [Scores(0.5, 1e-300)]}
    assert better_baselines(scores, "regression") == ["ridge has a lower RMSE than the model on the held-out rows"]


def test_a_single_held_out_row_has_no_r2(kapsi) -> None:
    table(a=[1.0, 2.0, 3.0, 4.0, 5.0], y=[1.1, 2.3, 2.8, 4.4, 5.2])
    out, err, manifest = fit(kapsi)
    note = "the target is the same in all validation rows: R² has no meaning (1 for exact predictions, else 0)"
    assert f"note: {note}" in err
    assert note in manifest["notes"]
    assert out.splitlines()[-1] == "r2: 0.0000 (1 validation row)"
    write_table("one.csv", {"a": [2.0], "y": [2.0]})
    _, out, err = kapsi("evaluate", "run", "one.csv")
    assert note.replace("validation", "scored") in err
    assert out.splitlines()[-1].endswith("(1 row)")
    assert "1 prediction is written" in kapsi("predict", "run", "one.csv", "--output", "-")[2]


def test_r2_of_each_target_and_fold(kapsi) -> None:
    assert notes_on_scores(np.array([[1.0, 2.0], [1.0, 3.0]]), "rows")  # one of two targets
    assert not notes_on_scores(np.array([[1.0, 2.0], [2.0, 3.0]]), "rows")
    table(a=X[:8, 0], y=[0.5] * 7 + [1.5])
    _, err, _ = fit(kapsi, "--folds", 2)
    assert len([line for line in err.splitlines() if "R² has no meaning" in line]) == 1
    assert "held-out rows of fold " in err


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("y", [LINE, LETTERS], ids=["regression", "classification"])
@pytest.mark.parametrize("options", [("--head", "linear"), ("--set", "training.epochs=20")], ids=["recipe", "solver"])
def test_rows_of_weight_0_are_as_absent(kapsi, y, options) -> None:
    """The first half in time has the weight 0: folds in time would have no rows to learn from."""
    table(a=X[:, 0], b=X[:, 1], t=range(80), w=[0] * 40 + [1] * 40, y=y)
    words = ("--target", "y", "--weight", "w", "--time", "t", "--drop", "b", *options, "--overwrite")
    code, out, err = kapsi("fit", "t.csv", *words, "--output", "zero")
    assert code == 0, err
    assert float(out.splitlines()[-1].split()[1]) > 0.3


def test_held_out_rows_of_weight_0(kapsi) -> None:
    table(a=X[:, 0], t=range(80), w=[1] * 60 + [0] * 20, y=LINE)
    words = ("fit", "t.csv", "--target", "y", "--head", "linear", "--weight", "w", "--output", "run")
    err = refused(kapsi, *words, "--time", "t")
    assert "the weight 'w' is 0 in all 16 held-out rows of the training part; leave rows of weight 0 out" in err
    table(a=X[:, 0], t=range(80), w=[0] * 60 + [1] * 20, y=LINE)
    err = refused(kapsi, *words, "--time", "t", "--folds", 3)
    assert "the weight 'w' is 0 in all 20 training rows of the fold 1 of 3" in err


def test_scores_do_not_depend_on_rows_of_weight_0() -> None:
    y, predicted, weight = np.array([1.0, 1.0, 5.0]), np.array([1.0, 1.0, 9.0]), np.array([1.0, 1.0, 0.0])
    assert scores_of(predicted, y, weight) == Scores(1.0, 0.0)


def test_huge_weights(kapsi) -> None:
    """Only ratios of weights count."""
    found = []
    for factor in (1.0, 2.0**1000):
        table(a=X[:, 0], w=factor * np.where(np.arange(80) % 2, 1.0, 3.0), y=LINE)
        found.append(fit(kapsi, "--weight", "w")[0].splitlines()[-1])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [("--head", "linear"), ("--set", "training.epochs=20")], ids=["recipe", "solver"])
def test_a_huge_class_weight(kapsi, options) -> None:
    table(a=X[:, 0], b=X[:, 1], y=LETTERS)
    words = ("--class-weight", "p=1e308", "--output", "run", *options)
    code, _, err = kapsi("fit", "t.csv", "--target", "y", *words)
    assert code == 0, err
    assert "overflow" not in err
    assert set(kp.load_run("run").predict({"a": X[:, 0], "b": X[:, 1]})) == {"p"}


# ------------------------------------------------------------------------------------------------ huge targets


@pytest.mark.parametrize("size", [1e300, 1e39, 1e-300, 1.7e308], ids=str)
@pytest.mark.parametrize("shape", ["line", pytest.param("skewed", marks=pytest.mark.slow)])
def test_targets_of_any_size(kapsi, size, shape) -> None:
    y = LINE / np.abs(LINE).max() if shape == "line" else np.exp(LINE) / np.exp(LINE).max()
    table(a=X[:, 0], b=X[:, 1], y=size * y)
    out, err, _ = fit(kapsi)
    assert "overflow" not in err
    assert "invalid" not in err
    assert float(out.splitlines()[-1].split()[1]) > 0.999
    table(a=X[:, 0], b=X[:, 1], y=y)
    assert fit(kapsi)[0].splitlines()[-1] == out.splitlines()[-1]


@pytest.mark.parametrize("size", [1e300, 1e39, 1e-300], ids=str)
def test_estimators_of_targets_of_any_size(size) -> None:
    y = np.exp(LINE) * size
    model = kp.RPNRegressor("linear", random_state=0).fit(X, y)
    assert model.score(X, y) > 0.99 if size < 1e100 else np.corrcoef(model.predict(X) / size, y / size)[0, 1] > 0.99
    np.testing.assert_allclose(
        model.predict(X) / size, kp.RPNRegressor("linear").fit(X, y / size).predict(X), rtol=1e-6
    )


def test_the_mean_of_huge_targets() -> None:
    y = np.array([1.7e308, 1.1e308, 1.5e308])
    assert TargetScale.fit(y, None, "log_link").scale == pytest.approx(1.4333333333333333e308)


# ------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--folds", "1"), "kapsi: --folds 1: must be at least 2"),
        (("--budget", "-1"), "'--budget': -1, expected a number greater than or equal to 0.1"),
        (("--budget=-1",), "'--budget': -1, expected a number greater than or equal to 0.1"),
        (("--budget", "inf"), "kapsi: --budget inf: expected a finite number"),
        (("--seed", "-1"), "kapsi: --seed -1: must be at least 0"),
        (("--head", "linear", "--head", "foo"), "kapsi: --head foo: no recipe is called 'foo'"),
        (("--head", "auto"), "kapsi: --head auto: 'auto' is not allowed here; choose from additive, boosted_pairs, "),
        (("--head", "linear", "--head", "linear"), "kapsi: --head: a head is given twice"),
        (("--metric", "auc", "--metric", "auc"), "kapsi: --metric: a metric is given twice"),
        (("--metric", "foo"), "kapsi: --metric foo: no metric is called 'foo'"),
        (("--folds", "2", "--validation", "t.csv"), "kapsi: --folds 2: has no effect on given validation rows"),
        (("--encoding", "foo"), "kapsi: --encoding foo: 'foo' is not known"),
        (("--set", "recipe.budget=-1"), "kapsi: recipe.budget=-1.0: must be at least 0.1"),
        (("--set", "table.folds=1"), "kapsi: table.folds=1: must be at least 2"),
        (("--output", ""), "kapsi: --output: expected the name of a run folder, got ''"),
    ],
)
def test_messages_name_the_option(kapsi, options, said) -> None:
    table(a=X[:, 0], y=LETTERS)
    err = refused(kapsi, "fit", "t.csv", "--target", "y", *options)
    assert said in err
    assert "Config" not in err
    assert "Auto" not in err


def test_relative_errors_of_zeros_have_a_note() -> None:
    y = np.array([[1.0, 0.0], [2.0, 3.0]])
    assert notes_on_scores(y, "rows", [MAPE()]) == ["the target is 0 in 1 of 2 rows: mape has no meaning; use mae"]
    assert not notes_on_scores(y, "rows", [MAE()])
    assert not notes_on_scores(y + 1, "rows", [MAPE()])
