"""Tables with more columns than rows: the default model, its coordinates, and scores as of scikit-learn."""

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV

import kapsi as kp
from kapsi.data.tabular import make_problem, read_table
from kapsi.tables import default_spec, fit_table, load_run, resolve_run
from kapsi.tables.row_space import RowSpace, is_linear, reduces
from test_tables import config, normal, write


def linear(inputs, outputs):
    return kp.ModelSpec((inputs, outputs), (kp.LayerSpec((kp.HeadSpec(bias=True),)),))


def chosen_penalty(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(line["l2"] for line in lines if line["event"] == "penalty" and line["chosen"])


@pytest.mark.parametrize(
    ("inputs", "rows", "expected"),
    [
        (100, 10, False),
        (101, 101, False),
        (101, 100, True),
        (1000, None, False),
        (1001, None, True),
        (1001, 10**6, True),
    ],
)
def test_the_default_model_of_many_inputs_is_linear(inputs, rows, expected):
    assert is_linear(default_spec(inputs, rows)) is expected


@pytest.mark.parametrize("scaled", [False, True])
def test_fits_in_coordinates_of_the_rows_are_fits_of_the_inputs(scaled):
    x = torch.from_numpy(normal(12, 40))
    x = torch.cat([x, x[:1]])  # a repeated row: less rank than rows
    y = torch.from_numpy(normal(13, 2, seed=1))
    space = RowSpace.of(x, scaled=scaled)
    assert space.z.shape == (13, 12)
    assert not scaled or float(space.z.square().mean()) == pytest.approx(1, rel=1e-9)
    model = kp.Model(linear(12, 2), seed=0, dtype=torch.float64)
    kp.fit(model, (space.z, y), solver="ridge", l2=0.3 / space.scale**2)
    whole = space.expand(model, linear(40, 2))
    # The mean over rows and outputs: λ/2 · ‖W‖² + ‖y − Wx − b‖²/(13 · 2).
    reference = Ridge(alpha=0.3 * 13).fit(x.numpy(), y.numpy())
    new = normal(5, 40, seed=2)
    np.testing.assert_allclose(
        whole(torch.from_numpy(new)).detach().numpy(), reference.predict(new), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("options", [{"l1": 0.1}, {"solver": "adamw"}, {"group_l1": 0.1}])
def test_fits_that_depend_on_rotations_keep_the_inputs(options):
    assert reduces(linear(9, 1), kp.TrainConfig(), 8, 9)
    assert not reduces(linear(9, 1), kp.TrainConfig(**options), 8, 9)
    assert not reduces(linear(9, 1), kp.TrainConfig(), 9, 9)
    assert not reduces(default_spec(9).sized(9, 1), kp.TrainConfig(), 8, 9)


def test_a_wide_regression_has_the_best_ridge_penalty(tmp_path):
    factors = normal(60, 6)
    x = factors @ normal(6, 150, seed=4) + normal(60, 150, seed=5)
    y = factors @ normal(6, seed=3) + normal(60, seed=1)
    path = write(tmp_path / "t.csv", **{f"g{i}": x[:, i] for i in range(150)}, y=y)
    report = fit_table(path, config(training=kp.TrainConfig()), tmp_path / "run")
    assert "the default model is linear for 150 inputs and 60 rows; --spec FILE sets another model" in report.notes
    run = load_run(tmp_path / "run")
    table = read_table(path)
    problem = make_problem(table, "y")
    held = np.loadtxt(tmp_path / "run" / "predictions.csv", delimiter=",", skiprows=1)[:, 0].astype(int) - 1
    kept = np.setdiff1d(np.arange(60), held)
    inputs = run.model.preprocessing.transform(problem.features)
    alphas = np.logspace(-4, 5, 200)
    reference = RidgeCV(alphas).fit(inputs[kept], y[kept])
    assert chosen_penalty(tmp_path / "run") * len(kept) / 2 == pytest.approx(reference.alpha_, rel=0.35)
    score = reference.score(inputs[held], y[held])
    assert report.scores["kapsi"][0].main == pytest.approx(score, abs=0.02)
    assert score > 0.3


def test_wide_classes_are_those_of_logistic_regression(tmp_path):
    x = normal(90, 120)
    labels = np.array(["a", "b", "c"])[np.argmax(x[:, :3] + 0.2 * normal(90, 3, seed=1), axis=1)]
    path = write(tmp_path / "t.csv", **{f"g{i}": x[:, i] for i in range(120)}, y=labels.tolist())
    fit_table(path, config(training=kp.TrainConfig()), tmp_path / "run")
    run = load_run(tmp_path / "run")
    problem = make_problem(read_table(path), "y")
    held = np.loadtxt(tmp_path / "run" / "predictions.csv", delimiter=",", skiprows=1, usecols=0).astype(int) - 1
    kept = np.setdiff1d(np.arange(90), held)
    inputs = run.model.preprocessing.transform(problem.features)
    penalty = chosen_penalty(tmp_path / "run")
    reference = LogisticRegression(C=1 / (penalty * len(kept)), max_iter=2000, tol=1e-8).fit(
        inputs[kept], problem.y[kept]
    )
    np.testing.assert_allclose(run.predict_proba(read_frame(path)), reference.predict_proba(inputs), atol=0.02)


def read_frame(path):
    import pandas as pd

    return pd.read_csv(path)


def test_rows_in_groups_do_not_choose_the_penalty_by_single_rows(tmp_path):
    x = normal(30, 110)
    columns = {f"g{i}": x[:, i] for i in range(110)}
    path = write(tmp_path / "t.csv", **columns, k=[i // 5 for i in range(30)], y=x[:, 0])
    table = read_table(path)
    assert resolve_run(make_problem(table, "y"), config(training=kp.TrainConfig())).training.solver == kp.Ridge()
    assert (
        resolve_run(make_problem(table, "y", group="k"), config(training=kp.TrainConfig())).training.solver
        == kp.LBFGS()
    )
