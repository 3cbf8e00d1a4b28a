"""Principal components and k-means as expansions: equal to scikit-learn's transform, imported and fitted."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.exceptions import ConvergenceWarning

import kapsi as kp
from kapsi.errors import DataError
from kapsi.zoo import transformers

drawn = settings(max_examples=15, deadline=None, derandomize=True)
sizes = st.tuples(st.integers(1, 6), st.integers(8, 40), st.integers(0, 2**16))
"""Inputs, rows, and a seed."""


def data(size: tuple[int, int, int]) -> np.ndarray:
    inputs, rows, seed = size
    generator = np.random.default_rng(seed)
    return (
        generator.normal(size=(rows, inputs)) @ generator.normal(size=(inputs, inputs))
        + generator.normal(size=inputs) * 5
    )


def output(model: kp.Model, x: np.ndarray) -> np.ndarray:
    return model(torch.tensor(x)).detach().numpy()


@drawn
@given(sizes, st.integers(1, 6), st.booleans(), st.booleans())
def test_components_imported_and_fitted(size, count, whiten, learnable) -> None:
    x, count = data(size), min(count, size[0])
    estimator = PCA(count, whiten=whiten, svd_solver="full").fit(x)
    new = np.concatenate((x, 3 * x + 1))
    model = transformers.from_sklearn(estimator, learnable=learnable)
    np.testing.assert_allclose(output(model, new), estimator.transform(new), rtol=1e-9, atol=1e-9)
    assert any(p.requires_grad for p in model.parameters()) == learnable
    fitted = transformers.fit_components(x, count, whiten=whiten)
    np.testing.assert_allclose(output(fitted, new), estimator.transform(new), rtol=1e-8, atol=1e-8)


def test_truncated_svd_and_a_share_of_the_variance() -> None:
    x = data((5, 40, 0))
    for estimator in (TruncatedSVD(3, random_state=0).fit(x), PCA(0.9).fit(x), PCA().fit(x.astype(np.float32))):
        found = output(transformers.from_sklearn(estimator), x)
        np.testing.assert_allclose(found, estimator.transform(x), rtol=1e-6, atol=1e-6)
        if not isinstance(estimator.components_[0, 0], np.float32):
            np.testing.assert_allclose(found, estimator.transform(x), rtol=1e-9, atol=1e-9)


def test_whitened_columns_have_unit_variance_and_no_correlation() -> None:
    x = data((4, 200, 1))
    made = output(transformers.fit_components(x, 4, whiten=True), x)
    np.testing.assert_allclose(np.cov(made.T), np.eye(4), rtol=0, atol=1e-9)


def test_a_direction_without_variance_is_zero_when_whitened() -> None:
    x = data((3, 30, 0))
    x = np.concatenate((x, x[:, :1] + x[:, 1:2], np.full((30, 1), 7.0)), 1)
    made = output(transformers.fit_components(x, 5, whiten=True), x)
    np.testing.assert_allclose(made[:, 3:], 0, atol=1e-12)
    np.testing.assert_allclose(made[:, :3].var(0, ddof=1), 1, rtol=1e-9)


def test_components_of_fewer_rows_than_inputs() -> None:
    x = data((6, 4, 0))
    estimator = PCA(3, svd_solver="full").fit(x)
    fitted = transformers.fit_components(x, 3)
    np.testing.assert_allclose(output(fitted, x), estimator.transform(x), rtol=0, atol=1e-9)
    head = kp.calibrate(kp.Head(6, 1, kp.HeadSpec(kp.PrincipalComponents()), dtype=torch.float64), torch.tensor(x))
    directions = head.kappa["components"]
    torch.testing.assert_close(directions @ directions.T, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-12)


@drawn
@given(sizes, st.integers(1, 6), st.booleans())
def test_means(size, count, batches) -> None:
    x = data(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=ConvergenceWarning)
        estimator = (MiniBatchKMeans if batches else KMeans)(count, n_init=1, random_state=0).fit(x)
    model = transformers.from_sklearn(estimator)
    new = 2 * x + 0.01  # a row that is a center has a distance of rounding in both
    wanted = estimator.transform(new)
    np.testing.assert_allclose(output(model, new), wanted, rtol=1e-9, atol=1e-9)
    top = np.sort(wanted, 1)
    clear = np.ones(len(new), bool) if count == 1 else top[:, 1] - top[:, 0] > 1e-8
    found = transformers.clusters(model(torch.tensor(new))).numpy()
    assert (found == estimator.predict(new))[clear].all()


def test_distance_at_a_center_has_a_gradient_of_zero() -> None:
    head = kp.Head(2, 3, kp.HeadSpec(kp.CenterDistances(3, learnable=True)), seed=0, dtype=torch.float64)
    x = head.kappa["centers"][:1].detach().clone().requires_grad_()
    made = head.expand(x).dense()
    assert abs(float(made[0, 0].detach())) < 1e-7
    gradient = torch.autograd.grad(made.sum(), [x, head.kappa["centers"]], create_graph=True)
    assert all(bool(g.isfinite().all()) for g in gradient)
    second = torch.autograd.grad(gradient[0].square().sum(), x)[0]
    assert bool(second.isfinite().all())


def test_trains_on_to_better_centers() -> None:
    """From centers of few steps, the mean square of the distances in a soft assignment goes down."""
    x = torch.tensor(data((2, 40, 3)))
    estimator = KMeans(3, n_init=1, max_iter=300, random_state=0).fit(x.numpy())
    model = transformers.from_sklearn(estimator)
    centers = model.layers[0].heads[0].kappa["centers"]
    loss = model(x).amin(-1).square().mean()
    assert float(loss.detach()) == pytest.approx(estimator.inertia_ / len(x), rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, centers)
    # The centers of a converged k-means are stationary points.
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)


def test_before_other_layers() -> None:
    """κ of a first layer, calibrated, and a layer behind it."""
    x = torch.tensor(data((4, 50, 0)))
    spec = kp.ModelSpec((4, 3), kp.LayerSpec(kp.HeadSpec(kp.PrincipalComponents(2, whiten=True), bias=True)))
    model = kp.calibrate(kp.Model(spec, seed=0, dtype=torch.float64), x)
    assert model.layers[0].heads[0].psi["matrix"].shape == (3, 2)
    features = model.layers[0].heads[0].expand(x).dense()
    torch.testing.assert_close(features.T @ features / 49, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-9)


def test_refused() -> None:
    x = data((3, 20, 0))
    with pytest.raises(kp.SpecError, match="not fitted"):
        transformers.from_sklearn(PCA())
    with pytest.raises(kp.SpecError, match=r"expected PCA, .*got list"):
        transformers.from_sklearn([])
    with pytest.raises(kp.SpecError, match="3 inputs have at most 3 components, not 4"):
        transformers.spec(3, 4)
    with pytest.raises(kp.SpecError, match="expected one of principal_components, center_distances"):
        transformers.spec(3, 2, "pca")
    with pytest.raises(kp.SpecError, match="whiten is for principal_components"):
        transformers.spec(3, 2, "center_distances", whiten=True)
    for count in (0, 4, 2.0, True):
        with pytest.raises(kp.SpecError, match="expected an integer"):
            transformers.fit_components(x, count)
    with pytest.raises(DataError, match="at least 2 rows"):
        transformers.fit_components(x[:1], 1)
    with pytest.raises(DataError, match="finite"):
        transformers.fit_components(x * np.nan, 1)
    with pytest.raises(DataError, match="expected numbers"):
        transformers.fit_components([["a"]], 1)


@pytest.mark.parametrize("estimator", [PCA(2, svd_solver="arpack"), TruncatedSVD(2, algorithm="arpack")])
def test_components_that_lie_backward_in_memory(estimator) -> None:
    x = data((5, 30, 0))
    estimator.fit(x)
    found = transformers.from_sklearn(estimator)(torch.tensor(x)).detach()
    torch.testing.assert_close(found, torch.tensor(estimator.transform(x)), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning:sklearn")
def test_whitened_constants_in_the_type_of_the_fit() -> None:
    """A deviation of zero counts as the rounding unit of the type that the estimator was fitted in."""
    for kind in (np.float32, np.float64):
        estimator = PCA(2, whiten=True).fit(np.ones((9, 2), kind))
        x = np.ones((1, 2)) + 2.0**-10
        found = transformers.from_sklearn(estimator)(torch.tensor(x)).detach()
        torch.testing.assert_close(found, torch.tensor(estimator.transform(x)).double(), rtol=1e-6, atol=0)


def test_reversed_rows_are_rows() -> None:
    x = data((3, 20, 0))
    first = transformers.fit_components(x[::-1], 2)
    second = transformers.fit_components(x[::-1].copy(), 2)
    assert torch.equal(first(torch.tensor(x)), second(torch.tensor(x)))


def test_sizes_that_are_no_integers() -> None:
    with pytest.raises(kp.SpecError, match=r"outputs: expected an integer of at least 1, got 'a'"):
        transformers.spec(4, "a")
    with pytest.raises(kp.SpecError, match=r"inputs: expected an integer of at least 1, got 2.0"):
        transformers.spec(2.0, 1)
