"""Classifier and regressor: rows of all kinds, options, and scikit-learn's tools around them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import ClassVar

import joblib
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.datasets import load_diabetes, load_iris
from sklearn.ensemble import BaggingClassifier, StackingClassifier
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import kapsi as kp
from kapsi.errors import DataError, SpecError
from kapsi.recipes import HeadRecipe, RecipeData

IRIS, DIABETES = load_iris(return_X_y=True), load_diabetes(return_X_y=True)
FIXED = {"l2": 1e-3, "early_stopping": False}


def classifier(**options) -> kp.RPNClassifier:
    return kp.RPNClassifier(**{"spec": kp.Taylor(2), "solver": "lbfgs", "max_epochs": 20, **FIXED, **options})


def regressor(**options) -> kp.RPNRegressor:
    return kp.RPNRegressor(**{"spec": "identity", **FIXED, **options})


@dataclass(frozen=True)
class MeanHead(HeadRecipe, name="mean_of_tests"):
    """The mean, plus a number."""

    more: float = 0.0
    complexity: ClassVar[int] = 0

    def fit(self, data: RecipeData, seed: int = 0) -> kp.Model:
        model = kp.Model(kp.rpn([data.x.shape[1], data.outputs], bias=True), seed=seed, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            model.layers[0].heads[0].bias.add_(self.more)
        return model


# ------------------------------------------------------------------------------------------------ equality with references


def test_ridge_is_that_of_scikit_learn():
    x, y = DIABETES
    z, target = StandardScaler().fit_transform(x), (y - y.mean()) / y.std()
    theirs = Ridge(alpha=1e-3 * len(x) / 2).fit(z, target).predict(z) * y.std() + y.mean()
    np.testing.assert_allclose(regressor().fit(x, y).predict(x), theirs, rtol=1e-9)


def test_logistic_regression_is_that_of_scikit_learn():
    x, y = IRIS
    z = StandardScaler().fit_transform(x)
    theirs = LogisticRegression(C=1 / (1e-2 * len(x)), tol=1e-10, max_iter=10_000).fit(z, y)
    ours = classifier(spec="identity", solver="ridge", l2=1e-2, max_epochs=100).fit(x, y)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(z), atol=1e-6)
    np.testing.assert_allclose(np.exp(ours.predict_log_proba(x)), ours.predict_proba(x), rtol=1e-12)
    assert ours.score(x, y) == theirs.score(z, y)


def test_the_model_is_a_module_of_the_inputs():
    x, y = IRIS
    ours = classifier().fit(x, y)
    z = torch.from_numpy((x - x.mean(0)) / x.std(0))
    np.testing.assert_allclose(ours.model_(z).softmax(1).detach(), ours.predict_proba(x), rtol=1e-9)


def test_two_classes_have_one_decision():
    x, y = IRIS[0][:100], np.array(["b", "a"])[IRIS[1][:100]]
    ours = classifier().fit(x, y)
    assert ours.classes_.tolist() == ["a", "b"]
    assert ours.decision_function(x).shape == (100,)
    np.testing.assert_array_equal(ours.predict(x), ours.classes_[(ours.decision_function(x) > 0).astype(int)])


# ------------------------------------------------------------------------------------------------ recipes


def test_a_recipe_is_a_name_a_mapping_or_an_object():
    x, y = DIABETES
    for recipe in ("mean_of_tests", {"kind": "mean_of_tests", "more": 2.0}, MeanHead(2.0)):
        fitted = kp.RPNRegressor(recipe, loss="mse").fit(x, y)
        more = 0.0 if recipe == "mean_of_tests" else 2.0
        np.testing.assert_allclose(fitted.predict(x), y.mean() + more * y.std())
        assert fitted.recipe_ == MeanHead(more)
        assert fitted.leaderboard_[0].head.startswith("mean_of_tests")


def test_the_linear_recipe_predicts():
    assert kp.RPNRegressor("linear").fit(*DIABETES).score(*DIABETES) > 0.5
    assert kp.RPNClassifier("linear").fit(*IRIS).score(*IRIS) > 0.95


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"solver": "adamw"}, "solver='adamw' has an effect only with spec="),
        ({"l2": 0.1}, "l2=0.1 has an effect only with spec="),
        ({"spec": "identity", "prefer": "small"}, "prefer='small' has an effect only with a recipe"),
        ({"spec": "identity", "recipe": "linear"}, "recipe and spec are both given"),
        (
            {"spec": "identity", "early_stopping": False, "validation_fraction": 0.2},
            "validation_fraction has no effect",
        ),
        ({"spec": "identity", "training": {"seed": 3}}, "training.seed: use random_state"),
        (
            {"spec": "identity", "training": {"l2": 0.1}, "l2": 0.2},
            "training.l2: the option l2 of the estimator is given",
        ),
        ({"spec": "identity", "training": {"learning_rate": 0.1}}, "learning_rate is an option of the solver"),
        ({"spec": "identity", "loss": "poison"}, "no loss is called 'poison'"),
        ({"spec": 3}, "spec: expected a ModelSpec"),
        ({"recipe": "linear", "prefer": "small"}, "the recipe linear has no option prefer"),
        ({"recipe": "none"}, "no recipe is called 'none'"),
        ({"spec": "identity", "device": "nowhere"}, "device: 'nowhere' is not available"),
        ({"spec": "identity", "random_state": -1}, "random_state: expected an integer"),
    ],
)
def test_options_without_effect_are_errors(options, words):
    with pytest.raises(SpecError) as error:
        kp.RPNRegressor(**options).fit(*DIABETES)
    assert words in str(error.value)


def test_class_weights_are_row_weights():
    x, y = IRIS[0][30:], IRIS[1][30:]
    balanced = classifier(class_weight="balanced").fit(x, y).predict_proba(x)
    counts = np.bincount(y)
    given = {label: len(y) / (3 * count) for label, count in enumerate(counts)}
    np.testing.assert_allclose(classifier(class_weight=given).fit(x, y).predict_proba(x), balanced, rtol=1e-6)
    rows = np.array([given[label] for label in y])
    np.testing.assert_allclose(classifier().fit(x, y, rows).predict_proba(x), balanced, rtol=1e-6)
    assert not np.allclose(classifier().fit(x, y).predict_proba(x), balanced, rtol=1e-3)


def test_rows_without_weight_do_not_count():
    x, y = DIABETES
    weight = (np.arange(len(x)) % 3 > 0).astype(float)
    ours = kp.RPNRegressor("linear").fit(x, y, weight).predict(x)
    np.testing.assert_allclose(ours, kp.RPNRegressor("linear").fit(x[weight > 0], y[weight > 0]).predict(x), rtol=1e-9)
    with pytest.raises(ValueError, match=r"non-zero|weights are 0"):
        regressor().fit(x, y, 0 * weight)


def test_a_mini_batch_solver_stops_early():
    solver = kp.AdamW(learning_rate=0.05, batch_size=32)
    fitted = kp.RPNClassifier(spec=kp.Taylor(2), solver=solver, max_epochs=30, validation_fraction=0.3).fit(*IRIS)
    assert fitted.score(*IRIS) > 0.95


def test_partial_fit_continues():
    x, y = IRIS
    order = np.random.default_rng(0).permutation(len(x))
    model = kp.RPNClassifier(spec="identity", solver=kp.AdamW(learning_rate=0.05, batch_size=16, schedule="constant"))
    with pytest.raises(DataError, match="needs classes"):
        model.partial_fit(x, y)
    scores = []
    for _ in range(6):
        for part in np.array_split(order, 3):
            model.partial_fit(x[part], y[part], classes=[0, 1, 2])
        scores.append(model.score(x, y))
    assert scores[-1] > 0.9
    assert scores[-1] > scores[0]
    assert not hasattr(kp.RPNClassifier(), "partial_fit")
    assert not hasattr(kp.RPNClassifier(spec="identity", solver="lbfgs"), "partial_fit")


def test_warm_start_continues():
    x, y = DIABETES
    cold = regressor(solver="lbfgs", max_epochs=1, spec=kp.Taylor(2))
    warm = clone(cold).set_params(warm_start=True)
    for _ in range(4):
        warm.fit(x, y)
        cold.fit(x, y)
    assert warm.score(x, y) > cold.score(x, y) + 0.01


def test_a_seed_gives_the_same_bits_and_leaves_global_states_alone():
    x, y = IRIS
    before, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    threads = torch.get_num_threads()
    first, second, other = (
        kp.RPNClassifier(spec=kp.Taylor(2), solver="adamw", max_epochs=3, random_state=seed).fit(x, y).predict_proba(x)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    kp.RPNClassifier("linear", random_state=None).fit(x, y)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert torch.get_num_threads() == threads


# ------------------------------------------------------------------------------------------------ kinds of rows


def frame() -> tuple[pd.DataFrame, np.ndarray]:
    random = np.random.default_rng(0)
    data = pd.DataFrame(
        {
            "age": np.where(random.random(120) < 0.1, np.nan, random.normal(40, 9, 120)),
            "color": pd.Categorical(random.choice(["red", "green", "blue"], 120)),
            "kind": random.choice(["a", "b"], 120),
            "flag": random.random(120) < 0.5,
            "when": pd.Timestamp("2024-01-01") + pd.to_timedelta(random.integers(0, 900, 120), "D"),
            "same": 1.0,
        }
    )
    y = data["age"].fillna(30) / 10 + 2 * (data["color"] == "red") + data["flag"]
    return data, y.to_numpy(dtype=np.float64)


def test_frames_are_read_by_the_rules_of_the_command_line():
    data, y = frame()
    ours = kp.RPNRegressor("linear").fit(data, y)
    assert ours.score(data, y) > 0.95
    assert ours.notes_ == ["dropped the column 'same': it is 1 in every row"]
    assert ours.n_features_in_ == 6
    assert list(ours.feature_names_in_) == list(data.columns)
    for other in (pa.Table.from_pandas(data), data.astype({"color": str})):
        np.testing.assert_array_equal(ours.predict(other), ours.predict(data))
    one = data.iloc[:1].assign(color="violet", kind=None)
    assert np.isfinite(ours.predict(one)).all()
    with pytest.raises(ValueError, match="feature names should match"):
        ours.predict(data[data.columns[::-1]])


def test_polars_frames_are_read():
    polars = pytest.importorskip("polars")
    data, y = frame()
    ours = kp.RPNRegressor("linear").fit(polars.from_pandas(data), polars.Series(y))
    np.testing.assert_allclose(
        ours.predict(polars.from_pandas(data)), kp.RPNRegressor("linear").fit(data, y).predict(data)
    )


def test_one_row_has_the_prediction_of_the_batch():
    x, y = DIABETES
    named = pd.DataFrame(x, columns=[f"c{i}" for i in range(10)]).assign(same=1, flag=x[:, 0] > 0)
    named.iloc[::7, 3] = np.nan
    fitted = regressor().fit(named, y)
    # Columns of Arrow take the way of all other frames.
    batch = fitted.predict(named.convert_dtypes(dtype_backend="pyarrow"))
    np.testing.assert_allclose([fitted.predict(named.iloc[[i]])[0] for i in range(20)], batch[:20], rtol=1e-12)
    np.testing.assert_allclose(fitted.predict(named), batch, rtol=1e-12)
    with pytest.raises(DataError, match="inf"):
        fitted.predict(named.iloc[:1].assign(c2=np.inf))
    fitted.model_.train()
    np.testing.assert_allclose(fitted.predict(named.iloc[:1]), batch[:1], rtol=1e-12)
    assert fitted.model_.training


def test_missing_numbers_are_marked():
    x, y = DIABETES
    holes = np.where(np.random.default_rng(0).random(x.shape) < 0.1, np.nan, x)
    marked = np.column_stack([np.where(np.isnan(holes), np.nanmean(holes, 0), holes), np.isnan(holes)])
    ours = regressor().fit(holes, y)
    assert ours.model_.in_features == 20
    named = pd.DataFrame(holes, columns=[f"x{i}" for i in range(10)])
    np.testing.assert_allclose(regressor().fit(named, y).predict(named), ours.predict(holes), rtol=1e-9)
    assert ours.score(holes, y) > 0.9 * regressor().fit(marked, y).score(marked, y)


def test_sparse_rows_are_dense_rows_unless_they_are_too_many(monkeypatch):
    x, y = DIABETES
    rows = scipy.sparse.csr_matrix(np.where(np.abs(x) < 0.03, 0, x))
    dense = kp.RPNRegressor("linear").fit(rows.toarray(), y).predict(rows.toarray())
    np.testing.assert_allclose(kp.RPNRegressor("linear").fit(rows, y).predict(rows), dense, rtol=1e-9)
    monkeypatch.setattr("kapsi.estimators.rows.WIDEST_DENSE", 1000)
    large = kp.RPNRegressor("linear").fit(rows, y)
    assert "linear model" in large.notes_[0]
    assert large.score(rows, y) > 0.35
    with pytest.raises(DataError, match="442 × 10 values, more than 1,000"):
        kp.RPNRegressor("mean_of_tests").fit(rows, y)
    with pytest.raises(DataError, match="442 × 10 values, more than 1,000"):
        kp.RPNRegressor(spec="b_spline").fit(rows, y)


def test_a_linear_model_keeps_sparse_rows():
    random = np.random.default_rng(0)
    rows = scipy.sparse.random(300, 2000, 0.01, format="csr", random_state=0)
    y = (rows @ random.normal(size=2000) > 0).astype(int)
    ours = kp.RPNClassifier(spec="identity", l2=1e-4, early_stopping=False).fit(rows, y)
    assert ours.score(rows, y) > 0.95
    np.testing.assert_allclose(ours.predict_proba(rows[:5].toarray()), ours.predict_proba(rows[:5]), rtol=1e-9)


def test_several_targets():
    x, y = DIABETES
    both = np.column_stack([y, 3 * y + x[:, 0]])
    ours = regressor().fit(x, both)
    assert ours.predict(x).shape == both.shape
    np.testing.assert_allclose(ours.predict(x)[:, 0], regressor(l2=2e-3).fit(x, y).predict(x), rtol=1e-9)
    assert regressor().fit(x, y[:, None]).predict(x).shape == (len(x), 1)


# ------------------------------------------------------------------------------------------------ tools of scikit-learn


def test_pickle_joblib_and_clone(tmp_path):
    data, y = frame()
    ours = kp.RPNRegressor("linear").fit(data, y)
    joblib.dump(ours, tmp_path / "model.joblib")
    for again in (pickle.loads(pickle.dumps(ours)), joblib.load(tmp_path / "model.joblib")):  # noqa: S301
        np.testing.assert_array_equal(again.predict(data), ours.predict(data))
    blank = clone(classifier(spec=kp.rpn([None, None], kp.BSpline(4), bias=True)))
    assert blank.spec == kp.rpn([None, None], kp.BSpline(4), bias=True)
    assert not hasattr(blank, "model_")


def test_grid_search_over_functions():
    x, y = IRIS
    grid = {"spec": [kp.Identity(), kp.Taylor(2)], "loss": [kp.CrossEntropy(), "cross_entropy"]}
    search = GridSearchCV(classifier(), grid, cv=3).fit(x, y)
    assert len(search.cv_results_["params"]) == 4
    assert search.best_score_ > 0.93
    assert search.best_estimator_.spec in grid["spec"]


def test_pipelines_and_other_estimators_around():
    x, y = IRIS
    pipeline = make_pipeline(StandardScaler(), classifier()).fit(x, y)
    np.testing.assert_allclose(pipeline.predict_proba(x), classifier().fit(x, y).predict_proba(x), rtol=1e-5)
    assert BaggingClassifier(classifier(), 3, max_features=3, random_state=0).fit(x, y).score(x, y) > 0.9
    calibrated = CalibratedClassifierCV(classifier(), cv=3).fit(x, y)
    assert calibrated.predict_proba(x).shape == (150, 3)
    assert calibrated.score(x, y) > 0.9
    importance = permutation_importance(classifier().fit(x, y), x, y, n_repeats=2, random_state=0)
    assert importance.importances_mean.argmax() in (2, 3)
    html = pipeline._repr_html_()
    assert "RPNClassifier" in html


def test_transformed_targets():
    x, y = DIABETES
    both = TransformedTargetRegressor(regressor(), func=np.log, inverse_func=np.exp).fit(x, y)
    np.testing.assert_allclose(both.predict(x), np.exp(regressor().fit(x, np.log(y)).predict(x)), rtol=1e-9)


@pytest.mark.slow  # two processes import torch
def test_scores_in_processes():
    x, y = IRIS
    one, two = (cross_val_score(classifier(), x, y, cv=3, n_jobs=jobs) for jobs in (1, 2))
    np.testing.assert_array_equal(one, two)


def test_stacks_and_predictions_of_folds():
    x, y = IRIS
    stack = StackingClassifier([("own", classifier()), ("line", LogisticRegression(max_iter=1000))], cv=3).fit(x, y)
    assert stack.score(x, y) > 0.93
    assert stack.named_estimators_["own"].model_.out_features == 3
    found = cross_val_predict(classifier(), x, np.array(["a", "b", "c"])[y], cv=3, method="predict_proba")
    assert np.mean(found.argmax(1) == y) > 0.93


def test_frames_of_scalers_reach_the_estimators():
    x, y = IRIS
    frame = pd.DataFrame(x, columns=list("abcd")).assign(word=np.array(["u", "v"])[(x[:, 0] > 5.8).astype(int)])
    columns = make_column_transformer(
        (StandardScaler(), list("abcd")), remainder="passthrough", verbose_feature_names_out=False
    ).set_output(transform="pandas")
    pipeline = make_pipeline(columns, classifier()).fit(frame, y)
    assert list(pipeline[-1].feature_names_in_) == [*"abcd", "word"]
    assert pipeline[-1].model_.in_features == 6
    np.testing.assert_allclose(
        pipeline.predict_proba(frame), classifier().fit(frame, y).predict_proba(frame), rtol=1e-5, atol=1e-9
    )


def test_the_memory_of_an_array_does_not_matter(tmp_path):
    x, y = DIABETES
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    target = y.copy()
    target.setflags(write=False)
    plain = regressor().fit(x, y).predict(x)
    for rows in (mapped, np.asfortranarray(x), np.repeat(x, 2, 1)[:, ::2], scipy.sparse.csc_array(x)):
        np.testing.assert_allclose(regressor().fit(rows, target).predict(rows), plain, rtol=1e-12)
    single = x.astype(np.float32)
    np.testing.assert_allclose(regressor().fit(single, y).predict(single), plain, rtol=1e-4)
    assert regressor(device="cpu").fit(x[:, :1], y).predict(x[:1, :1]).shape == (1,)


def test_several_columns_of_classes_are_refused_with_a_remedy() -> None:
    x = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(ValueError, match=r"got an array of shape \(20, 2\); fit a classifier for each column"):
        kp.RPNClassifier().fit(x, (x > 0).astype(int))
