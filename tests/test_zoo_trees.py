"""Trees of scikit-learn as a leaf expansion and a dense ψ: equal outputs, at thresholds too, with missing values, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import ensemble, tree
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import kapsi as kp
from kapsi.testing import WatchSizes
from kapsi.zoo import trees

drawn = settings(max_examples=12, deadline=None, derandomize=True)
sizes = st.tuples(st.integers(1, 5), st.integers(20, 60), st.integers(0, 2**16))
"""Inputs, rows, and a seed."""


def rows(size: tuple[int, int, int], missing: bool = False) -> tuple[np.ndarray, np.random.Generator]:
    inputs, count, seed = size
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, inputs)) * 10.0 ** generator.integers(-3, 4, inputs)
    x[generator.uniform(size=x.shape) < 0.2] = 0.25
    if missing:
        x[generator.uniform(size=x.shape) < 0.2] = np.nan
    return x, generator


def at_thresholds(model: kp.Model, x: np.ndarray, steps: int = 60) -> np.ndarray:
    """Return rows with an input at a threshold, and a step of float64 or float32 beside it."""
    head = model.layers[0].heads[0]
    generator = np.random.default_rng(0)
    made = x[generator.integers(0, len(x), steps)].copy()
    feature, threshold = head.kappa["feature"].numpy(), head.kappa["threshold"].numpy()
    if len(feature):
        picks = generator.integers(0, len(feature), steps)
        near = np.clip(threshold[picks], -1e37, 1e37)
        single = near.astype(np.float32)
        choices = np.stack(
            (
                near,
                np.nextafter(near, np.inf),
                np.nextafter(near, -np.inf),
                np.nextafter(single, np.float32(np.inf)).astype(float),
                np.nextafter(single, np.float32(-np.inf)).astype(float),
                single * (1 + 2.0**-25),  # rounds to a neighbor or not
            )
        )
        made[np.arange(steps), feature[picks]] = choices[np.arange(steps) % len(choices), np.arange(steps)]
    return np.concatenate((x, made))


def assert_equal(estimator, method: str, x: np.ndarray) -> kp.Model:
    model = trees.from_sklearn(estimator)
    new = at_thresholds(model, x)
    with torch.no_grad():
        found = model(torch.tensor(new)).numpy()
    wanted = getattr(estimator, method)(new)
    np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=1e-9, atol=1e-9)
    return model


CLASSIFIERS = [each for each in (*trees.SINGLE, *trees.FORESTS) if each.endswith("Classifier")]
REGRESSORS = [each for each in (*trees.SINGLE, *trees.FORESTS) if each.endswith("Regressor")]


def made(name: str, **options):
    if name in trees.FORESTS:
        options["n_estimators"] = 4
    return getattr(tree if name in trees.SINGLE else ensemble, name)(random_state=0, **options)


@pytest.mark.parametrize("name", CLASSIFIERS)
@settings(drawn, max_examples=5)
@given(sizes, st.integers(2, 4), st.booleans(), st.sampled_from([None, 1, 4]))
def test_classifiers(name, size, classes, missing, depth) -> None:
    x, _ = rows(size, missing)
    y = np.arange(len(x)) % classes
    estimator = made(name, max_depth=depth).fit(x, np.array(list("cbad"))[y])
    model = assert_equal(estimator, "predict_proba", x)
    assert model.layers[0].heads[0].spec.expansion.missing
    found = estimator.classes_[model(torch.tensor(x)).argmax(-1).numpy()]
    assert (found == estimator.predict(x)).all()


@pytest.mark.parametrize("name", REGRESSORS)
@settings(drawn, max_examples=5)
@given(sizes, st.integers(1, 3), st.booleans(), st.sampled_from([None, 2, 7]))
def test_regressors(name, size, outputs, missing, leaves) -> None:
    x, generator = rows(size, missing)
    y = generator.normal(size=(len(x), outputs)).squeeze()
    assert_equal(made(name, max_leaf_nodes=leaves).fit(x, y), "predict", x)


@drawn
@given(sizes, st.integers(2, 4), st.sampled_from(["log_loss", "exponential"]), st.sampled_from([None, "zero"]))
def test_gradient_boosting_of_classes(size, classes, loss, init) -> None:
    x, _ = rows(size)
    classes = 2 if loss == "exponential" else classes
    y = np.arange(len(x)) % classes
    estimator = GradientBoostingClassifier(loss=loss, init=init, n_estimators=5, random_state=0, subsample=0.8).fit(
        x, y
    )
    model = assert_equal(estimator, "decision_function", x)
    assert model.out_features == (1 if classes == 2 else classes)
    if loss == "log_loss":
        found = kp.predict_proba(model, x, "bernoulli" if classes == 2 else "cross_entropy")
        np.testing.assert_allclose(found, estimator.predict_proba(x), rtol=0, atol=1e-12)


@drawn
@given(sizes, st.sampled_from(["squared_error", "absolute_error", "huber", "quantile"]))
def test_gradient_boosting_of_numbers(size, loss) -> None:
    x, generator = rows(size)
    y = generator.normal(size=len(x)) * 100
    estimator = GradientBoostingRegressor(loss=loss, n_estimators=5, random_state=0).fit(x, y)
    assert_equal(estimator, "predict", x)


@settings(drawn, max_examples=6)
@given(sizes, st.integers(2, 3), st.booleans(), st.booleans())
def test_histograms(size, classes, missing, of_numbers) -> None:
    x, generator = rows(size, missing)
    options = {"max_iter": 4, "min_samples_leaf": 3, "early_stopping": False}
    if of_numbers:
        estimator, method = HistGradientBoostingRegressor(**options).fit(x, generator.normal(size=len(x))), "predict"
    else:
        estimator, method = (
            HistGradientBoostingClassifier(**options).fit(x, np.arange(len(x)) % classes),
            "decision_function",
        )
    far = np.concatenate((x, np.full((1, x.shape[1]), np.inf), np.full((1, x.shape[1]), np.nan), -1e300 + 0 * x[:1]))
    model = assert_equal(estimator, method, far)
    kappa = model.layers[0].heads[0].spec.expansion
    assert not kappa.single
    assert kappa.missing


def test_a_split_between_missing_values_and_all_others() -> None:
    x = np.where(np.arange(80)[:, None] % 2 == 0, np.nan, 1.0)
    estimator = HistGradientBoostingRegressor(max_iter=2).fit(x, (np.arange(80) % 2).astype(float))
    assert np.isinf(estimator._predictors[0][0].nodes["num_threshold"]).any()
    assert_equal(estimator, "predict", np.array([[np.nan], [1.0], [1e308], [np.inf], [-np.inf]]))


def test_inputs_are_compared_in_float32() -> None:
    x = np.array([[1.0], [1.0 + 2.0**-23], [0.0], [2.0]])
    estimator = DecisionTreeClassifier(random_state=0).fit(x, [0, 1, 0, 1])
    between = np.array([[1.0 + 2.0**-26], [1.0 + 2.0**-24], [1.0 + 2.0**-24 + 2.0**-50], [1.0 + 2.0**-23]])
    model = trees.from_sklearn(estimator)
    np.testing.assert_array_equal(model(torch.tensor(between)).detach(), estimator.predict_proba(between))
    # And the same in a model of float32.
    found = model.float()(torch.tensor(between).float())
    np.testing.assert_array_equal(found.detach(), estimator.predict_proba(between))


def test_one_leaf_and_one_class() -> None:
    x = np.arange(12.0).reshape(6, 2)
    assert_equal(DecisionTreeRegressor(max_depth=None).fit(x, np.full(6, 3.0)), "predict", x)
    assert_equal(DecisionTreeClassifier().fit(x, np.zeros(6)), "predict_proba", x)
    assert_equal(ensemble.RandomForestRegressor(3).fit(x, np.ones(6)), "predict", x)


def test_what_is_refused_there_is_not_a_number_here() -> None:
    x, _ = rows((3, 40, 0))
    model = trees.from_sklearn(GradientBoostingClassifier(n_estimators=2).fit(x, np.arange(40) % 2))
    x[3, 1] = np.nan
    y = model(torch.tensor(x))
    assert bool(y[3].isnan().all())
    assert int(y.isnan().sum()) == 1


def test_leaves_train_on() -> None:
    """The values of all leaves together fit better than the averages that a forest has."""
    x, generator = rows((3, 200, 0))
    y = np.sign(x[:, 0]) * np.abs(x[:, 1]) + generator.normal(size=200)
    model = trees.from_sklearn(ensemble.RandomForestRegressor(5, max_depth=4, random_state=0).fit(x, y))
    before = float((model(torch.tensor(x)).detach()[:, 0] - torch.tensor(y)).square().mean())
    records = kp.fit(model, (x, y), solver="lbfgs", epochs=20)
    assert records[-1].loss < 0.9 * before


@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSORS, *trees.BOOSTED, *trees.HISTOGRAMS])
def test_not_fitted(name) -> None:
    with pytest.raises(kp.SpecError, match=f"from_sklearn.{name}.: the {name} is not fitted"):
        trees.from_sklearn(getattr(tree if name in trees.SINGLE else ensemble, name)())


class Derived(DecisionTreeClassifier):
    pass


def test_refused() -> None:
    x, generator = rows((2, 40, 0))
    y = np.arange(40) % 2
    positive = generator.uniform(0.1, 1, 40)
    refused = {
        "expected DecisionTreeClassifier, .*; got LinearRegression$": LinearRegression(),
        "got Derived; a derived class": Derived().fit(x, y),
        "got AdaBoostClassifier": ensemble.AdaBoostClassifier(n_estimators=2).fit(x, y),
        "2 outputs of classes are not supported": DecisionTreeClassifier().fit(x, np.stack((y, y), 1)),
        "init=LinearRegression: an initial model is not supported": GradientBoostingRegressor(
            init=LinearRegression(), n_estimators=2
        ).fit(x, positive),
        "loss='poisson' predicts exp of the scores": HistGradientBoostingRegressor(loss="poisson", max_iter=2).fit(
            x, positive
        ),
        r"inputs \[1\] are categorical": HistGradientBoostingClassifier(categorical_features=[1], max_iter=2).fit(
            np.stack((x[:, 0], y), 1), y
        ),
    }
    for message, estimator in refused.items():
        with pytest.raises(kp.SpecError, match=message):
            trees.from_sklearn(estimator)


# ------------------------------------------------------------------------------------------------ the expansion


def leaf_head(**options) -> kp.Head:
    return kp.Head(2, 1, kp.HeadSpec(kp.TreeLeaves(**options)), seed=0, dtype=torch.float64)


def test_calibrated_at_medians() -> None:
    x = torch.randn(1000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 50 + 7
    head = kp.calibrate(leaf_head(leaves=16, trees=2, depth=3), x)
    shares = head.expand(x).dense().mean(0)
    torch.testing.assert_close(shares, torch.full((16,), 1 / 8, dtype=torch.float64), rtol=0, atol=0.002)


def test_tensors_that_are_no_trees_are_refused() -> None:
    head = leaf_head(leaves=3, trees=1, depth=2)
    before = head.expand(torch.ones(1, 2)).dense()
    wrong = {
        "feature: expected indices of inputs from 0 to 1": {"feature": [0, 2]},
        "each of the nodes 0 to 4 once": {"branches": [[2, 2], [1, 4]]},
        "larger numbers than that of the split": {"branches": [[2, 1], [0, 4]], "roots": [3]},
    }
    for message, tensors in wrong.items():
        with pytest.raises(kp.SpecError, match=message):
            head.assign("expansion", **tensors)
    deep = leaf_head(leaves=4, trees=1, depth=2)
    with pytest.raises(kp.SpecError, match="a leaf lies 3 splits deep"):
        deep.assign("expansion", branches=[[3, 4, 5], [1, 2, 6]])
    assert torch.equal(head.expand(torch.ones(1, 2)).dense(), before)
    with pytest.raises(kp.SpecError, match="at least one leaf"):
        kp.TreeLeaves(leaves=2, trees=3)
    with pytest.raises(kp.SpecError, match="depth must be at least 3"):
        kp.TreeLeaves(leaves=8, trees=1, depth=2)


def test_missing_values_go_their_way() -> None:
    head = leaf_head(leaves=2, trees=1, depth=1, missing=True)
    x = torch.tensor([[torch.nan, 0.0]], dtype=torch.float64)
    for left in (False, True):
        head.assign("expansion", missing_left=[left], feature=[0])
        assert head.expand(x).dense().tolist() == ([[1.0, 0.0]] if left else [[0.0, 1.0]])


def test_spec() -> None:
    made = trees.spec(4, 3, leaves=8, trees=2, depth=2, constant=True)
    model = kp.Model(made, seed=0)
    assert model(torch.ones(5, 4)).shape == (5, 3)
    assert made.layers[0].heads[0].remainder == kp.ConstantRemainder(0.0)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_of_rows_reach_the_leaves_of_single_rows(single, missing, dtype, monkeypatch) -> None:
    """Many rows descend renumbered nodes in blocks, a few the nodes themselves."""
    kappa = kp.TreeLeaves(leaves=29, trees=3, depth=6, single=single, missing=missing)
    head = kp.Head(3, 2, kp.HeadSpec(kappa), seed=0, dtype=dtype)
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    head = kp.calibrate(head, x)
    if missing:
        head.assign("expansion", missing_left=torch.arange(26) % 2 == 0)
    x[::5, 0], x[1::7, 1], x[3::11, 2] = torch.nan, torch.inf, head.kappa["threshold"][3]
    few = torch.cat([head.expand(row[None]).dense() for row in x])
    for block in (1, 50, 2**15):
        monkeypatch.setattr("kapsi.expansion.tree.BLOCK", block)
        torch.testing.assert_close(head.expand(x).dense(), few, rtol=0, atol=0, equal_nan=True)
    assert head.expand(x).indices.dtype == torch.int32
    torch.testing.assert_close(head.expand(x.view(4, 50, 3)).dense().view(200, 29), few, equal_nan=True)


def test_no_array_of_rows_times_leaves() -> None:
    kappa = kp.TreeLeaves(leaves=2000, trees=4, depth=9)
    head = kp.Head(3, 2, kp.HeadSpec(kappa), seed=0)
    x = torch.randn(3000, 3)
    for rows in (x, x[:30]):
        with WatchSizes(rows, *head.parameters(), *head.buffers()) as watch:
            head(rows).sum().backward()
        assert watch.largest < max(len(rows) * 3 * 4, 2 * 4000)
