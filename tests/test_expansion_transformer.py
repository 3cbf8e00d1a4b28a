"""The transformer by an expansion: values, names of columns, kinds of output."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, SplineTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import kapsi as kp
from kapsi.errors import DataError, SpecError
from kapsi.testing import examples_of, inputs

X = load_iris().data
CASES = [
    pytest.param(example, id=f"{kind.name}-{i}")
    for kind in kp.catalogue("expansion")
    if kind.__module__.startswith("kapsi.")
    for i, example in enumerate(examples_of(kind))
]


@pytest.mark.filterwarnings("ignore")  # of scikit-learn's checks
@parametrize_with_checks(
    [kp.ExpansionTransformer(kind) for kind in ("taylor", "b_spline", "nystrom", "tree_leaves", "random_fourier")]
)
def test_checks_of_scikit_learn(estimator, check) -> None:
    check(estimator)


@pytest.mark.parametrize("kappa", CASES)
def test_every_expansion_transforms_rows_to_named_columns(kappa):
    for m in (4, 3, 2):
        try:
            count = kappa.out_features(m)
            break
        except SpecError:  # an example for another number of inputs
            continue
    rows = inputs(30, m).abs().numpy()
    transformer = kp.ExpansionTransformer(kappa).fit(rows)
    columns = transformer.transform(rows)
    names = transformer.get_feature_names_out()
    assert columns.shape == (30, count)
    assert np.isfinite(columns).all()
    assert len(set(names)) == len(names) == count
    assert all(isinstance(name, str) and name for name in names)


@pytest.mark.parametrize(
    "kappa",
    [
        kp.Identity(),
        kp.Taylor(3),
        kp.Extended((kp.Trigonometric(), kp.Hyperbolic(), kp.Taylor(2))),
        kp.Nested((kp.Trigonometric(), kp.Taylor(2))),
        kp.Reciprocal(),
        kp.expansion.Binarize(0.4),
        kp.expansion.CombinatorialProduct(subsets=((), (2,), (0, 0), (1, 2), (0, 1, 2))),
        kp.Processed(kp.Taylor(2), before="tanh"),
    ],
    ids=repr,
)
def test_names_are_formulas(kappa):
    """A name, read as a formula, has the values of its column."""
    rows = np.random.default_rng(0).uniform(0.2, 1.2, (20, 3))
    values = kp.ExpansionTransformer(kappa).fit(rows)
    functions = {name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}
    found = values.transform(rows)
    for i, name in enumerate(values.get_feature_names_out(["a", "b", "c"])):
        code = name.split(" (")[0].replace("^", "**")
        expected = eval(code, {**functions, **dict(zip("abc", rows.T, strict=True))})  # noqa: S307 - a test
        np.testing.assert_allclose(found[:, i], np.broadcast_to(expected, 20), rtol=1e-9, err_msg=name)


def test_names_of_polynomials_are_those_of_scikit_learn():
    theirs = PolynomialFeatures(3, include_bias=False).fit(X)
    ours = kp.ExpansionTransformer(kp.Taylor(3, symmetric=True)).fit(X)
    expected = [name.replace(" ", "*") for name in theirs.get_feature_names_out()]
    assert ours.get_feature_names_out().tolist() == expected
    columns = ours.transform(X)
    orderings = [math.factorial(sum(p)) / math.prod(map(math.factorial, p)) for p in theirs.powers_.tolist()]
    np.testing.assert_allclose(columns, theirs.transform(X) * np.sqrt(orderings), rtol=1e-12)


def test_names_of_functions_of_one_input():
    transformer = kp.ExpansionTransformer("chebyshev").fit(X)
    assert transformer.get_feature_names_out()[[0, 11]].tolist() == ["T1(x0)", "T3(x3)"]
    frame = pd.DataFrame(X[:, :2], columns=["age", "size"])
    splines = kp.ExpansionTransformer(kp.BSpline(3)).set_output(transform="pandas").fit_transform(frame)
    assert splines.columns[:3].tolist() == ["B0(age)", "B0(size)", "B1(age)"]
    assert len(splines.columns) == 12
    states = kp.expansion.CombinatorialState(order=2)
    names = kp.ExpansionTransformer(states).fit(np.zeros((3, 2))).get_feature_names_out(["a", "b"])
    assert names.tolist() == ["a=0", "a=1", "b=0", "b=1", "a=0, b=0", "a=0, b=1", "a=1, b=0", "a=1, b=1"]
    twice = kp.ExpansionTransformer(kp.Extended((kp.Identity(), kp.Identity()))).fit(X[:, :1])
    assert twice.get_feature_names_out().tolist() == ["x0", "x0 (2)"]
    fourier = kp.ExpansionTransformer(kp.Fourier(harmonics=2)).fit(X[:, :1]).get_feature_names_out(["t"])
    assert fourier.tolist() == ["cos1(t)", "sin1(t)", "cos2(t)", "sin2(t)"]


def test_splines_are_those_of_scikit_learn_dense_and_sparse():
    theirs = SplineTransformer(n_knots=6, degree=3, extrapolation="linear").fit(X)
    ours = kp.ExpansionTransformer(kp.BSpline(5)).fit(X)
    values = theirs.transform(X).reshape(len(X), 4, 8).transpose(0, 2, 1).reshape(len(X), -1)
    np.testing.assert_allclose(ours.transform(X), values, atol=1e-9)
    sparse = clone(ours).set_params(sparse_output=True).fit(X).transform(X)
    assert scipy.sparse.issparse(sparse)
    assert sparse.nnz <= 4 * X.size
    np.testing.assert_array_equal(sparse.toarray(), ours.transform(X))
    assert ours.transform(X.astype(np.float32)).dtype == np.float32


def test_densities_by_class_are_those_of_naive_bayes():
    x, y = load_iris(return_X_y=True)
    labels = np.array(["c", "a", "b"])[y]
    bayes = GaussianNB().fit(x, labels)
    columns = kp.ExpansionTransformer(kp.expansion.NaiveNormal(3)).fit(x, labels).transform(x)
    joint = columns.reshape(len(x), 3, 4).sum(2)
    np.testing.assert_array_equal(bayes.classes_[joint.argmax(1)], bayes.predict(x))


def test_sparse_rows():
    rows = scipy.sparse.random(50, 30, 0.1, format="csr", random_state=0)
    for kappa in (kp.Taylor(2), kp.Identity(), kp.BSpline()):
        transformer = kp.ExpansionTransformer(kappa, sparse_output=True).fit(rows)
        dense = kp.ExpansionTransformer(kappa).fit_transform(rows.toarray())
        np.testing.assert_allclose(transformer.transform(rows).toarray(), dense, rtol=1e-12)


def test_rows_are_taken_in_blocks(monkeypatch):
    whole = kp.ExpansionTransformer("taylor").fit(X)
    expected = whole.transform(X)
    monkeypatch.setattr("kapsi.estimators.transformer.BLOCK", 100)
    np.testing.assert_array_equal(whole.transform(X), expected)


def test_in_a_pipeline_and_a_grid_search():
    x, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(kp.ExpansionTransformer("identity"), LinearRegression())
    grid = {"expansiontransformer__expansion": [kp.Identity(), kp.BSpline(3), "gaussian_rbf"]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(x, y)
    assert len(set(search.cv_results_["mean_test_score"])) == 3
    np.testing.assert_allclose(pipeline.fit(x, y).predict(x), LinearRegression().fit(x, y).predict(x), rtol=1e-9)


def test_a_seed_draws_the_same_functions():
    state = torch.get_rng_state()
    first, again, other = (
        kp.ExpansionTransformer("random_fourier", random_state=seed).fit_transform(X) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_errors_name_the_choice():
    with pytest.raises(SpecError, match="no expansion is called 'tailor'"):
        kp.ExpansionTransformer("tailor").fit(X)
    with pytest.raises(DataError, match="not finite"):
        kp.ExpansionTransformer(kp.expansion.NaiveNormal()).fit(X, np.full(len(X), np.nan))
