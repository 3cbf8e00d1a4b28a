"""Transformations of a regression target, and the choice among them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.preprocessing import PowerTransformer

import kapsi as kp
from kapsi.data.tabular import TargetScale
from kapsi.recipes import FunctionsHead, RecipeData
from kapsi.tables import target_choice
from kapsi.tables.target_choice import choose_target, corrected

SKEWED = np.random.default_rng(0).lognormal(1.0, 1.0, size=400)


@pytest.mark.parametrize("transform", ["none", "log", "yeo_johnson"])
def test_targets_come_back(transform) -> None:
    scale = TargetScale.fit(SKEWED, None, transform)
    np.testing.assert_allclose(scale.invert(scale.apply(SKEWED)), SKEWED, rtol=1e-10)
    assert abs(scale.apply(SKEWED).mean()) < 1e-10
    assert scale.apply(SKEWED).std() == pytest.approx(1)
    again = TargetScale.from_dict(json.loads(json.dumps(scale.to_dict())))
    assert again == scale


@pytest.mark.parametrize("sign", [1, -1])
def test_yeo_johnson_is_that_of_scikit_learn_in_the_unit_of_the_spread(sign) -> None:
    y = sign * (SKEWED - 2)
    scale = TargetScale.fit(y, None, "yeo_johnson")
    theirs = PowerTransformer().fit((y / scale.factor)[:, None])
    assert scale.power == pytest.approx(float(np.clip(theirs.lambdas_[0], 0, 2)), abs=0.026)
    theirs.lambdas_[0] = scale.power
    expected = theirs.transform((y / scale.factor)[:, None])[:, 0]
    expected = (expected - expected.mean()) / expected.std()
    np.testing.assert_allclose(scale.apply(y), expected, atol=1e-9)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_inverse_is_finite_for_all_outputs(power) -> None:
    scale = TargetScale(0.0, 1.0, "yeo_johnson", power, 3.0)
    outputs = np.array([-1e9, -1.0, 0.0, 1.0, 1e9, np.nan])
    assert np.isfinite(scale.invert(outputs)[:-1]).all()
    assert np.isnan(scale.invert(outputs)[-1])
    np.testing.assert_allclose(scale.apply(scale.invert(outputs[1:4])), outputs[1:4], atol=1e-12)


def test_a_logarithmic_link_keeps_the_unit() -> None:
    scale = TargetScale.fit(SKEWED, None, "log_link")
    assert scale.apply(SKEWED).mean() == pytest.approx(1)
    np.testing.assert_allclose(scale.invert(np.log(scale.apply(SKEWED))), SKEWED)


@pytest.mark.parametrize(
    "change", [{"transform": "none"}, {"transform": "sqrt"}, {"power": 3.0}, {"factor": 0.0}, {"scale": -1.0}]
)
def test_damaged_scales_are_refused(change) -> None:
    with pytest.raises(kp.TableError, match="target scale"):
        TargetScale.from_dict(TargetScale.fit(SKEWED, None, "log").to_dict() | change)


def data_of(x: np.ndarray, y: np.ndarray) -> RecipeData:
    values = torch.from_numpy(TargetScale.fit(y).apply(y)).reshape(-1, 1)
    return RecipeData(torch.from_numpy(x), values, kp.MSE(), 0, torch.ones(x.shape[1], dtype=torch.bool))


X = np.random.default_rng(1).normal(size=(400, 2))
SIGNAL = X @ [1.0, 0.5]


@pytest.mark.parametrize(
    ("y", "transforms"),
    [
        (SIGNAL + np.random.default_rng(2).normal(size=400), {"none"}),
        (np.exp(SIGNAL + 0.1 * np.random.default_rng(2).normal(size=400)), {"log", "log_link"}),
        (np.random.default_rng(2).poisson(np.exp(SIGNAL)).astype(float), {"log_link"}),
        (
            np.random.default_rng(2).poisson(np.exp(SIGNAL)) * np.random.default_rng(3).gamma(2.0, size=400),
            {"log_link"},
        ),
    ],
    ids=["normal", "lognormal", "counts", "zeros"],
)
def test_the_transformation_that_made_the_target_is_found(y, transforms) -> None:
    choice = choose_target(data_of(X, y), y, None, "y")
    assert choice.scale.transform in transforms
    assert bool(choice.note) == (choice.scale.transform != "none")


def test_a_skewed_target_that_is_linear_stays_plain() -> None:
    x = np.exp(X)
    y = x @ [1.0, 2.0] + np.random.default_rng(2).normal(size=400)
    assert choose_target(data_of(x, y), y, None, "y").scale.transform == "none"


def test_a_change_without_a_gain_on_the_first_fold_is_not_compared_on_the_others(monkeypatch) -> None:
    x, sizes = np.exp(X[:60]), []
    y = x @ [1.0, 2.0]
    real = target_choice._Trial.errors
    monkeypatch.setattr(
        target_choice._Trial, "errors", lambda self, folds, *a: sizes.append(len(folds)) or real(self, folds, *a)
    )
    assert choose_target(data_of(x, y), y, None, "y").scale.transform == "none"
    assert sizes == [1, 1, 1]


def test_a_skewed_target_without_noise_stays_plain_for_the_functions_head() -> None:
    x = np.random.default_rng(0).uniform(size=(90, 2))
    y = x[:, 0] * x[:, 1] / (1 - x[:, 0] * x[:, 1] / 1.2) + 0.01
    data = data_of((x - x.mean(0)) / x.std(0), y)
    assert choose_target(data, y, None, "y").scale.transform == "log"
    assert choose_target(data, y, None, "y", [FunctionsHead()]).scale.transform == "none"
    y = y * np.exp(0.3 * np.random.default_rng(1).normal(size=90))
    assert choose_target(data_of(data.x.numpy(), y), y, None, "y", [FunctionsHead()]).scale.transform != "none"


def test_rows_of_little_weight_have_little_say_in_the_choice() -> None:
    x, random = X[:100], np.random.default_rng(2)
    y = np.concatenate([np.exp(x @ [1.0, 0.5] + 0.1 * random.normal(size=100)), np.exp(x) @ [1.0, 2.0]])
    weight = np.repeat([2.0, 1e-9], 100)
    data = replace(data_of(np.concatenate([x, x]), y), weight=torch.from_numpy(weight))
    assert choose_target(data, y, weight, "y").scale.transform in {"log", "log_link"}


def test_the_mean_after_a_logarithm_is_corrected_beyond_its_standard_error() -> None:
    scale = TargetScale.fit(SKEWED, None, "log")
    exact = torch.from_numpy(scale.apply(SKEWED))[:, None]
    exact[:5] = torch.nan
    assert corrected(scale, exact, SKEWED, None).factor == 1
    low = exact - np.log(1.25) / scale.scale
    assert corrected(scale, low, SKEWED, None).factor == pytest.approx(1.25)
    weight = np.where(np.arange(400) < 200, 2.0, 0.0)
    assert corrected(scale, torch.where(torch.arange(400)[:, None] < 200, low, exact), SKEWED, weight).factor == (
        pytest.approx(1.25)
    )
    plain = TargetScale.fit(SKEWED)
    assert corrected(plain, low, SKEWED, None) is plain
