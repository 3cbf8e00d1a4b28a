"""Regressions of one layer against scikit-learn, imported and fitted, and the factorization machine against a loop."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import linear_model
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    PolynomialFeatures,
    QuantileTransformer,
    RobustScaler,
    SplineTransformer,
    StandardScaler,
)

import kapsi as kp
from kapsi.errors import DataError
from kapsi.zoo import regression

drawn = settings(max_examples=12, deadline=None, derandomize=True)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**16))
"""Inputs, outputs, and a seed."""


def data(size: tuple[int, int, int], rows: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs, outputs, seed = size
    generator = np.random.default_rng(seed)
    x = generator.uniform(-2, 2, (rows, inputs)) + 0.3
    y = (x @ generator.normal(size=(inputs, outputs)) + generator.normal(size=(rows, outputs))).squeeze()
    return x, y, generator.uniform(0.1, 3, rows)


def assert_predicts(model: kp.Model, estimator, x: np.ndarray, tolerance: float = 1e-9) -> None:
    found = model(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(found, estimator.predict(x).reshape(found.shape), rtol=tolerance, atol=tolerance)


def blank(*arguments, **options) -> kp.Model:
    return kp.Model(regression.spec(*arguments, **options), seed=0, dtype=torch.float64)


@drawn
@given(sizes, st.sampled_from([0.0, 0.5, 20.0]), st.booleans())
def test_linear_imported_and_fitted(size, alpha, weighted) -> None:
    x, y, weight = data(size)
    weight = weight if weighted else None
    estimator = (Ridge(alpha) if alpha else LinearRegression()).fit(x, y, weight)
    new = np.concatenate((x, 10 * x))
    assert_predicts(regression.from_sklearn(estimator), estimator, new)
    model = regression.fit_linear(blank(*size[:2]), x, y, alpha=alpha, sample_weight=weight)
    assert_predicts(model, estimator, new)


def test_fewer_rows_than_inputs_take_the_smallest_weights() -> None:
    x, y, _ = data((4, 2, 0), rows=3)
    estimator = LinearRegression().fit(x, y)
    model = regression.fit_linear(blank(4, 2), x, y)
    np.testing.assert_allclose(model.layers[0].heads[0].psi["matrix"].detach(), estimator.coef_, rtol=0, atol=1e-12)
    constant = np.concatenate((x, np.ones((3, 1))), 1)
    fitted = regression.fit_linear(blank(5, 2), constant, y)
    np.testing.assert_allclose(fitted.layers[0].heads[0].psi["matrix"][:, 4].detach(), 0, atol=1e-12)


@pytest.mark.parametrize("name", ["RidgeCV", "Lasso", "LassoCV", "ElasticNet", "ElasticNetCV"])
@pytest.mark.parametrize("intercept", [True, False])
def test_other_linear_models(name, intercept) -> None:
    x, y, _ = data((3, 1, 0))
    estimator = getattr(linear_model, name)(fit_intercept=intercept).fit(x, y)
    assert_predicts(regression.from_sklearn(estimator), estimator, x)


@drawn
@given(sizes, st.integers(2, 4), st.sampled_from([0.05, 1.0, 30.0]), st.booleans())
def test_logistic_imported_and_fitted(size, classes, c, intercept) -> None:
    x, _, _ = data((size[0], 1, size[2]))
    y = np.argsort(np.argsort(x[:, 0] + np.random.default_rng(size[2]).normal(size=60))) * classes // 60
    estimator = LogisticRegression(C=c, solver="newton-cholesky", tol=1e-12, max_iter=1000, fit_intercept=intercept)
    estimator.fit(x, np.array(list("bacd"))[y])
    names = list(estimator.classes_)
    model = regression.from_sklearn(estimator)
    loss = "bernoulli" if classes == 2 else "cross_entropy"
    np.testing.assert_allclose(kp.predict_proba(model, x, loss), estimator.predict_proba(x), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        model(torch.tensor(x)).detach().squeeze(), estimator.decision_function(x), rtol=1e-9, atol=1e-9
    )
    if intercept:
        numbers = np.array([names.index(name) for name in np.array(list("bacd"))[y]])
        fitted = regression.fit_logistic(blank(size[0], 1 if classes == 2 else classes), x, numbers, c=c)
        np.testing.assert_allclose(kp.predict_proba(fitted, x, loss), estimator.predict_proba(x), rtol=0, atol=1e-6)


def test_ridge_classifier() -> None:
    x, _, _ = data((3, 1, 0))
    for classes in (2, 3):
        estimator = linear_model.RidgeClassifier().fit(x, np.arange(60) % classes)
        found = regression.from_sklearn(estimator)(torch.tensor(x)).detach()
        np.testing.assert_allclose(found.squeeze(), estimator.decision_function(x), rtol=0, atol=1e-12)


@drawn
@given(sizes, st.integers(1, 4), st.booleans(), st.booleans())
def test_polynomial(size, degree, bias, interactions) -> None:
    x, y, _ = data(size, rows=150)
    steps = PolynomialFeatures(degree, interaction_only=interactions, include_bias=bias)
    estimator = make_pipeline(steps, LinearRegression()).fit(x, y)
    new = np.concatenate((x, 1.5 * x))
    model = regression.from_sklearn(estimator)
    assert_predicts(model, estimator, new)
    assert model.layers[0].heads[0].spec.expansion.symmetric
    if not interactions:
        assert_predicts(
            regression.fit_linear(blank(*size[:2], "polynomial", degree=degree), x, y), estimator, new, 1e-7
        )


def test_polynomial_of_high_degrees_alone() -> None:
    x, y, _ = data((2, 1, 0), rows=80)
    estimator = make_pipeline(PolynomialFeatures((2, 3)), LinearRegression()).fit(x, y)
    assert_predicts(regression.from_sklearn(estimator), estimator, x)


def test_a_monomial_has_the_root_of_its_orderings() -> None:
    x = np.random.default_rng(0).normal(size=(50, 3))
    estimator = make_pipeline(PolynomialFeatures(3, include_bias=False), LinearRegression()).fit(
        x, x[:, 0] * x[:, 1] ** 2
    )
    head = regression.from_sklearn(estimator).layers[0].heads[0]
    matrix = head.psi["matrix"][0].detach()
    column = int(matrix.abs().argmax())
    assert float(matrix[column]) == pytest.approx(3**-0.5, abs=1e-12)
    assert int((matrix.abs() > 1e-9).sum()) == 1


@drawn
@given(
    sizes,
    st.integers(2, 6),
    st.integers(1, 4),
    st.sampled_from(["uniform", "quantile"]),
    st.sampled_from(["constant", "linear"]),
    st.booleans(),
)
def test_additive(size, knots, degree, kind, outside, bias) -> None:
    size = (1, *size[1:]) if degree == 1 and outside == "linear" else size
    x, y, _ = data(size, rows=80)
    steps = SplineTransformer(knots, degree, knots=kind, extrapolation=outside, include_bias=bias)
    estimator = make_pipeline(steps, Ridge(1e-3)).fit(x, y)
    ends = np.stack((x.min(0), x.max(0), x.min(0) - 3, x.max(0) + 3))
    model = regression.from_sklearn(estimator)
    assert_predicts(model, estimator, np.concatenate((x, ends)))
    assert model.layers[0].heads[0].spec.expansion.element_wise()


def test_additive_of_steps() -> None:
    x, y, _ = data((2, 1, 0), rows=80)
    estimator = make_pipeline(SplineTransformer(5, degree=0), LinearRegression()).fit(x, y)
    assert_predicts(regression.from_sklearn(estimator), estimator, x)  # which fails there outside of the range


def test_additive_that_goes_on_from_within_the_range_is_refused() -> None:
    """Of degree 1 scikit-learn begins to go on one interval too early, but for the first input."""
    x, y, _ = data((2, 1, 0), rows=80)
    estimator = make_pipeline(SplineTransformer(5, degree=1, extrapolation="linear"), LinearRegression()).fit(x, y)
    with pytest.raises(kp.SpecError, match="degree=1 and 2 inputs differs"):
        regression.from_sklearn(estimator)


def test_additive_with_knots_of_each_input() -> None:
    x, y, _ = data((2, 1, 0), rows=80)
    given_knots = np.array([[-2.0, -3.0], [-0.5, 0.0], [0.1, 2.0], [2.5, 2.4]])
    estimator = make_pipeline(SplineTransformer(knots=given_knots, extrapolation="error"), LinearRegression())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.fit(x, y)
    model = regression.from_sklearn(estimator)
    assert_predicts(model, estimator, x, 1e-8)
    with pytest.raises(ValueError, match="range"):
        model(torch.tensor(x + 10))


def test_additive_fitted() -> None:
    x, y, _ = data((2, 1, 0), rows=200)
    transformer = SplineTransformer(5, extrapolation="constant")
    estimator = make_pipeline(transformer, Ridge(0.3)).fit(x, y)
    model = kp.calibrate(blank(2, 1, "additive", intervals=4, extrapolation="clamp"), torch.tensor(x))
    assert_predicts(regression.fit_linear(model, x, y, alpha=0.3), estimator, x)


# ------------------------------------------------------------------------------------------------ factorization machines


@drawn
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**16))
def test_factorization_machine(inputs, rank, seed) -> None:
    generator = np.random.default_rng(seed)
    b, w, v = generator.normal(), generator.normal(size=inputs), generator.normal(size=(inputs, rank))
    x = generator.normal(size=(10, inputs)) * 3
    expected = np.zeros(10)
    for r in range(10):
        expected[r] = b + w @ x[r]
        for i in range(inputs):
            for j in range(i + 1, inputs):
                expected[r] += (v[i] @ v[j]) * x[r, i] * x[r, j]
    model = regression.factorization_machine(b, w, v)
    found = model(torch.tensor(x)).detach()[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    dense = model(torch.tensor(x), route="dense").detach()[:, 0]
    np.testing.assert_allclose(dense, expected, rtol=1e-9, atol=1e-9)


def test_factorization_machine_is_never_multiplied_out_and_trains() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 5))
    y = x[:, 0] * x[:, 1] - 2 * x[:, 3]
    model = regression.factorization_machine(0.0, np.zeros(5), generator.normal(size=(5, 2)) * 0.1)
    assert "neither" in kp.explain(model, batch=8)[0].route or "Khatri" in kp.explain(model, batch=8)[0].route
    records = kp.fit(model, (x, y), solver="levenberg_marquardt", epochs=60)
    assert records[-1].loss < 1e-8


def test_factorization_machine_refused() -> None:
    for arguments in (
        (0.0, [1.0], [[1.0], [2.0]]),
        ([0.0], [1.0], [[1.0]]),
        (0.0, [1.0], [1.0]),
        (0.0, [], np.ones((0, 1))),
    ):
        with pytest.raises(DataError, match="expected a number, linear weights"):
            regression.factorization_machine(*arguments)
    with pytest.raises(DataError, match="expected numbers"):
        regression.factorization_machine("a", [1.0], [[1.0]])
    with pytest.raises(DataError, match="finite"):
        regression.factorization_machine(np.nan, [1.0], [[1.0]])


# ------------------------------------------------------------------------------------------------ refused


def test_refused_estimators() -> None:
    x, y, _ = data((2, 1, 0))
    fitted = LinearRegression().fit(x, y)
    refused = {
        "LinearRegression is not fitted": LinearRegression(),
        "expected LinearRegression, .*got ndarray": x,
        "got SGDRegressor": linear_model.SGDRegressor().fit(x, y),
        "expected PolynomialFeatures, SplineTransformer; got QuantileTransformer": make_pipeline(
            QuantileTransformer(n_quantiles=9), fitted
        ).fit(x, y),
        "got QuantileTransformer, PolynomialFeatures, LinearRegression": make_pipeline(
            QuantileTransformer(n_quantiles=9), PolynomialFeatures(), fitted
        ),
        "extrapolation='continue' is not supported": make_pipeline(
            SplineTransformer(extrapolation="continue"), fitted
        ).fit(x, y),
        "extrapolation='periodic'": make_pipeline(SplineTransformer(extrapolation="periodic"), fitted).fit(x, y),
        "degree 0": make_pipeline(PolynomialFeatures(0), LinearRegression()).fit(x, y),
        "PolynomialFeatures is not fitted": make_pipeline(PolynomialFeatures(), LinearRegression().fit(x, y)),
    }
    for message, estimator in refused.items():
        with pytest.raises(kp.SpecError, match=message):
            regression.from_sklearn(estimator)


def test_refused_fits_and_specifications() -> None:
    x, y, _ = data((2, 1, 0))
    with pytest.raises(DataError, match=r"expected x of shape \(rows, 3\)"):
        regression.fit_linear(blank(3), x, y)
    with pytest.raises(DataError, match=r"expected y of shape \(60, 2\)"):
        regression.fit_linear(blank(2, 2), x, y)
    with pytest.raises(DataError, match="x: expected finite numbers"):
        regression.fit_linear(blank(2), x * np.nan, y)
    with pytest.raises(DataError, match="not negative and not all zero"):
        regression.fit_linear(blank(2), x, y, sample_weight=-np.ones(60))
    with pytest.raises(kp.SpecError, match=r"alpha.*got -1"):
        regression.fit_linear(blank(2), x, y, alpha=-1)
    with pytest.raises(kp.SpecError, match=r"c.*got 0"):
        regression.fit_logistic(blank(2), x, y > 0, c=0)
    for model in (blank(2, 1, "factorization_machine"), kp.Model(kp.rpn([2, 1])), None):
        with pytest.raises(kp.SpecError, match="expected a model of one layer and head"):
            regression.fit_linear(model, x, y)
    with pytest.raises(kp.SpecError, match="expected one of linear, polynomial"):
        regression.spec(2, 1, "quadratic")
    with pytest.raises(kp.SpecError, match="there is no option 'degree'; there are none"):
        regression.spec(2, 1, degree=2)


def test_reversed_rows_are_rows() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(40, 3)), draw.integers(0, 3, 40)
    inputs = torch.tensor(x)

    def linear(x, y):
        return regression.fit_linear(
            kp.Model(regression.spec(3), seed=0, dtype=torch.float64), x, y, sample_weight=y + 1
        )

    def logistic(x, y):
        return regression.fit_logistic(kp.Model(regression.spec(3, 3), seed=0, dtype=torch.float64), x, y)

    for fitted in (linear, logistic):
        assert torch.equal(fitted(x[::-1], y[::-1])(inputs), fitted(x[::-1].copy(), y[::-1].copy())(inputs))
    wanted = LinearRegression().fit(x, y, y + 1).predict(x)
    found = linear(torch.tensor(x, requires_grad=True), torch.tensor(y))(inputs).detach()[:, 0]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=1e-9)


@pytest.mark.parametrize("wrong", [["a", "b"] * 10, np.full(20, 0.5), np.full(20, np.nan), None])
def test_classes_that_are_no_numbers(wrong) -> None:
    model = kp.Model(regression.spec(2, 2), seed=0, dtype=torch.float64)
    with pytest.raises(DataError, match="class labels 0, 1"):
        regression.fit_logistic(model, np.zeros((20, 2)), wrong)


def test_splines_of_a_constant_are_refused() -> None:
    x = np.random.default_rng(0).normal(size=(20, 2))
    x[:, 1] = 3.0
    estimator = make_pipeline(SplineTransformer(), Ridge()).fit(x, x[:, 0])
    with pytest.raises(kp.SpecError, match="input 1 was constant when SplineTransformer was fitted; drop it"):
        regression.from_sklearn(estimator)


def test_kinds_that_are_no_names() -> None:
    with pytest.raises(kp.SpecError, match="expected one of linear, polynomial"):
        regression.spec(3, 1, [])


@pytest.mark.parametrize("more", [[], [PolynomialFeatures(2)], [SplineTransformer(n_knots=4)]])
def test_pipelines_begin_with_scalers(more) -> None:
    x, y, _ = data((3, 2, 5))
    for scalers in (
        [StandardScaler()],
        [StandardScaler(with_mean=False)],
        [StandardScaler(with_std=False), MaxAbsScaler()],
        [RobustScaler(), MinMaxScaler((-1, 3))],
    ):
        theirs = make_pipeline(*scalers, *more, Ridge()).fit(x, y)
        assert_predicts(regression.from_sklearn(theirs), theirs, x)
    with pytest.raises(kp.SpecError, match="clip=True"):
        regression.from_sklearn(make_pipeline(MinMaxScaler(clip=True), *more, Ridge()).fit(x, y))
