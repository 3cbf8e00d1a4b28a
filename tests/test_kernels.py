"""What kernels and their approximations promise beyond their formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.kernel_approximation import Nystroem
from sklearn.metrics import pairwise_distances_argmin_min
from sklearn.metrics.pairwise import polynomial_kernel, rbf_kernel
from sklearn.svm import SVC

import kapsi as kp
from kapsi.testing import WatchSizes


def head(kappa: kp.Expansion, width: int = 3, seed: int = 0) -> kp.Head:
    return kp.Head(width, 1, kp.HeadSpec(kappa), dtype=torch.float64, seed=seed)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clusters(spread: float = 0.05, count: int = 6, rows: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows around a few middles far apart, and those."""
    middles = normal(count, 3, seed=3) * 4
    return middles[torch.arange(rows) % count] + spread * normal(rows, 3), middles


# ------------------------------------------------------------------------------------------------ kernel maps


def test_gamma_is_one_by_the_number_of_inputs_then_by_the_variance_too() -> None:
    x = normal(200, 4) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 5
    made = head(kp.KernelMap("rbf", 8), 4)
    assert float(made.kappa["log_gamma"].exp()) == pytest.approx(1 / 4)
    kp.calibrate(made, x)
    fitted = SVC(gamma="scale").fit(x.numpy(), np.arange(200) % 2)
    assert float(made.kappa["log_gamma"].exp()) == pytest.approx(fitted._gamma)
    given = kp.calibrate(head(kp.KernelMap("rbf", 8, gamma=0.3), 4), x)
    assert float(given.kappa["log_gamma"].exp()) == pytest.approx(0.3)
    constant = kp.calibrate(head(kp.KernelMap("rbf", 8), 4), torch.full((9, 4), 0.1, dtype=torch.float64))
    assert float(constant.kappa["log_gamma"].exp()) == pytest.approx(1 / 4)


def test_a_support_vector_machine_is_a_kernel_map_with_its_support_vectors() -> None:
    x = normal(120, 3)
    labels = (x.square().sum(1) > 2.5).numpy()
    for kernel, name in (("rbf", "rbf"), ("polynomial", "poly"), ("linear", "linear"), ("sigmoid", "sigmoid")):
        machine = SVC(kernel=name, gamma=0.4, degree=3, coef0=0.5).fit(x.numpy(), labels)
        vectors = machine.support_vectors_
        made = kp.Head(
            3,
            1,
            kp.HeadSpec(kp.KernelMap(kernel, len(vectors), gamma=0.4, degree=3, coef0=0.5), bias=True),
            dtype=torch.float64,
        )
        made.assign("expansion", centers=vectors)
        made.assign("reconciliation", matrix=machine.dual_coef_)
        torch.nn.init.constant_(made.bias, float(machine.intercept_[0]))
        y = made(normal(30, 3, seed=5)).detach().numpy()[:, 0]
        np.testing.assert_allclose(y, machine.decision_function(normal(30, 3, seed=5).numpy()), rtol=1e-9, atol=1e-9)


def test_derivatives_at_distance_zero() -> None:
    made = head(kp.KernelMap("rbf", 20, gamma=0.7))
    centers = made.kappa["centers"]
    for center, column in zip(centers, range(20), strict=True):

        def value(x: torch.Tensor, column: int = column) -> torch.Tensor:
            return made.expand(x).dense()[column]

        assert float(value(center)) == pytest.approx(1, abs=1e-14)
        np.testing.assert_allclose(torch.autograd.functional.jacobian(value, center), 0, atol=1e-14)
        hessian = torch.autograd.functional.hessian(value, center)
        np.testing.assert_allclose(hessian, -2 * 0.7 * np.eye(3), rtol=1e-12, atol=1e-13)


def test_distances_keep_their_digits_far_from_zero() -> None:
    x = (normal(50, 3) + 5000).float()
    made = kp.calibrate(kp.Head(3, 1, kp.HeadSpec(kp.KernelMap("rbf", 8, gamma=0.5)), seed=0), x)
    expected = rbf_kernel(x.double().numpy(), made.kappa["centers"].double().numpy(), gamma=0.5)
    np.testing.assert_allclose(made.expand(x).dense(), expected, atol=1e-5)


def test_rbf_is_at_most_one_however_far_in_single_precision() -> None:
    made = kp.Head(3, 1, kp.HeadSpec(kp.KernelMap("rbf", 8, gamma=1.0)), seed=0)
    far = torch.full((8, 3), 1e6) + normal(8, 3).float()
    made.assign("expansion", centers=torch.cat((far[:4], -far[:4])))
    values = made.expand(far).dense()
    assert bool((values <= 1).all())
    assert bool((values[:, 4:] == 0).all())


@pytest.mark.parametrize("kappa", [kp.KernelMap("rbf", 8), kp.Nystrom(8)], ids=repr)
def test_rbf_is_zero_however_far(kappa) -> None:
    made = kp.Head(3, 1, kp.HeadSpec(kappa), seed=0)
    x = torch.tensor([[1e19, -1e19, 1e19], [1e30, 0, -3e38], [torch.inf, 1, 1]]).requires_grad_()
    values = made.expand(x).dense()
    assert bool((values == 0).all())
    assert bool((torch.autograd.grad(values.sum(), x)[0] == 0).all())
    assert bool(made.expand(torch.tensor([torch.nan, 0, 0])).dense().isnan().all())


def test_no_array_of_rows_by_centers_by_inputs_is_made() -> None:
    made = head(kp.KernelMap("rbf", 40), 50)
    x = normal(60, 50).requires_grad_()
    with WatchSizes(x, *made.buffers()) as watch:
        made.expand(x).dense().sum().backward()
    assert watch.largest <= 60 * 50


@pytest.mark.parametrize("degree", [1, 3, 9, 32])
def test_a_polynomial_goes_on_linearly_where_it_would_overflow(degree) -> None:
    turn = 1e30 ** (1 / degree)
    made = head(kp.KernelMap("polynomial", 1, gamma=1.0, degree=degree), 1)
    made.assign("expansion", centers=[[1.0]])
    near = np.linspace(-1, 1, 21) * min(turn, 1e6) * 0.999 - 1
    values = made.expand(torch.from_numpy(near).reshape(-1, 1)).dense()
    np.testing.assert_allclose(
        values, polynomial_kernel(near.reshape(-1, 1), [[1.0]], degree, 1.0, 1.0), rtol=1e-10, atol=1e-10
    )
    for sign in (1, -1):
        beyond = sign * turn * np.array([1.5, 4.0])
        expected = sign**degree * 1e30 * (1 + degree * np.array([0.5, 3.0]))
        values = made.expand(torch.from_numpy(beyond - 1).reshape(-1, 1)).dense()[:, 0]
        np.testing.assert_allclose(values, expected, rtol=1e-9)


def test_calibrated_centers_are_a_k_means_of_the_data() -> None:
    x, middles = clusters()
    made = kp.calibrate(head(kp.KernelMap("rbf", 6)), x)
    _, distance = pairwise_distances_argmin_min(middles.numpy(), made.kappa["centers"].numpy())
    assert float(distance.max()) < 0.1  # one center in each cluster
    # Of data without clusters the mean square distance is near the best of ten runs of k-means.
    x = normal(500, 3)
    made = kp.calibrate(head(kp.KernelMap("rbf", 20)), x)
    _, distance = pairwise_distances_argmin_min(x.numpy(), made.kappa["centers"].numpy())
    assert float((distance**2).sum()) < 1.15 * KMeans(20, n_init=10, random_state=0).fit(x.numpy()).inertia_


def test_calibrated_centers_do_not_depend_on_the_order_of_rows() -> None:
    x = normal(200, 3)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(4))
    first, second = (kp.calibrate(head(kp.KernelMap("rbf", 9)), data).kappa["centers"] for data in (x, x[order]))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_few_distinct_rows_repeat() -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float64).repeat(50, 1)
    centers = kp.calibrate(head(kp.KernelMap("rbf", 5), 2), x).kappa["centers"]
    assert {tuple(row) for row in centers.tolist()} == {(0.0, 1.0), (2.0, 3.0)}


def test_calibration_looks_at_a_share_of_large_data(monkeypatch) -> None:
    monkeypatch.setattr("kapsi.expansion.kernel.BLOCK_DISTANCES", 2**12)
    x = normal(2000, 64)
    with WatchSizes(x) as watch:
        centers = kp.KernelMap("rbf", 10, gamma=1.0).calibrate(x, {})["centers"]
    assert watch.largest <= 2**12
    assert float(centers.var()) < 0.7  # means of several rows


def test_wrong_options_say_what_is_allowed() -> None:
    with pytest.raises(kp.SpecError, match="expected one of rbf, linear, polynomial, sigmoid"):
        kp.KernelMap("cosine")
    with pytest.raises(kp.SpecError, match="gamma must be at least 1e-12"):
        kp.KernelMap(gamma=0.0)
    with pytest.raises(kp.SpecError, match="expected one of rbf, linear, polynomial, got 'sigmoid'"):
        kp.Nystrom(5, "sigmoid")
    with pytest.raises(kp.SpecError, match="coef0 must be at least 0"):
        kp.Nystrom(5, "polynomial", coef0=-1.0)


# ------------------------------------------------------------------------------------------------ random Fourier features


@pytest.mark.parametrize("count", [64, 1024])
def test_random_fourier_features_approximate_the_kernel_at_their_rate(count) -> None:
    # Variance of one product of two features (Sutherland and Schneider 2015): 1 + k(2Δ)/2 − k(Δ)².
    x = normal(40, 3)
    kernel, double = rbf_kernel(x.numpy(), gamma=0.2), rbf_kernel(2 * x.numpy(), gamma=0.2)
    expected = np.sqrt((1 + double / 2 - kernel**2).mean() / count)
    errors = []
    for seed in range(30):
        features = head(kp.RandomFourier(count, gamma=0.2), seed=seed).expand(x).dense().numpy()
        errors.append(features @ features.T - kernel)
    assert float(np.sqrt(np.square(errors).mean())) == pytest.approx(expected, rel=0.15)
    assert float(np.abs(np.mean(errors, 0)).max()) < 6 * np.sqrt(1.5 / count / 30)  # no bias


def test_frequencies_are_drawn_once_and_calibration_sets_gamma_alone() -> None:
    first, other = (head(kp.RandomFourier(50), seed=seed) for seed in (0, 1))
    assert not torch.equal(first.kappa["frequencies"], other.kappa["frequencies"])
    assert not torch.equal(first.kappa["phases"], other.kappa["phases"])
    assert [name for name, _ in first.kappa.named_parameters()] == []
    before = {name: tensor.clone() for name, tensor in first.kappa.state_dict().items()}
    x = normal(100, 3) * 7
    kp.calibrate(first, x)
    assert torch.equal(first.kappa["frequencies"], before["frequencies"])
    assert torch.equal(first.kappa["phases"], before["phases"])
    assert float(first.kappa["log_gamma"].exp()) == pytest.approx(1 / (3 * x.numpy().var()))


def test_phases_fill_the_circle() -> None:
    phases = head(kp.RandomFourier(4000)).kappa["phases"]
    assert 0 <= float(phases.min()) < 0.01
    assert 2 * math.pi - 0.01 < float(phases.max()) <= 2 * math.pi + 1e-6
    assert float(phases.mean()) == pytest.approx(math.pi, abs=0.1)


# ------------------------------------------------------------------------------------------------ Nyström


@pytest.mark.parametrize("kernel", ["rbf", "polynomial", "linear"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_nystrom_reproduces_the_kernel_at_its_landmarks(kernel, calibrated) -> None:
    count = 3 if kernel == "linear" else 12
    made = head(kp.Nystrom(count, kernel, gamma=0.6, degree=3, coef0=0.9))
    x = normal(80, 3)
    if calibrated:
        kp.calibrate(made, x)
    landmarks = made.kappa["landmarks"]
    product = (made.expand(x).dense() @ made.expand(landmarks).dense().T).numpy()
    a, b = x.numpy(), landmarks.numpy()
    expected = {"rbf": rbf_kernel(a, b, 0.6), "polynomial": polynomial_kernel(a, b, 3, 0.6, 0.9), "linear": a @ b.T}
    # Before calibration the root is in float32 as initial values are measured there; its small directions are left out.
    np.testing.assert_allclose(product, expected[kernel], atol=1e-9 * np.abs(expected[kernel]).max())


def test_calibrated_nystrom_equals_scikit_learns_with_the_same_landmarks() -> None:
    x = normal(300, 3)
    made = kp.calibrate(head(kp.Nystrom(25)), x)
    gamma = 1 / (3 * x.numpy().var())
    fitted = Nystroem(kernel="rbf", gamma=gamma, n_components=25, random_state=0).fit(made.kappa["landmarks"].numpy())
    expected = fitted.transform(x.numpy())[:, np.argsort(fitted.component_indices_)]
    np.testing.assert_allclose(made.expand(x).dense(), expected, rtol=0, atol=1e-8)


def test_nystrom_approximates_better_with_more_landmarks_in_the_data() -> None:
    x = normal(200, 3) * 2 + 4
    kernel = rbf_kernel(x.numpy(), gamma=0.02)
    errors = []
    for count in (5, 20, 80):
        made = kp.calibrate(head(kp.Nystrom(count, gamma=0.02)), x)
        features = made.expand(x).dense().numpy()
        errors.append(float(np.abs(features @ features.T - kernel).max()))
    assert errors[0] > 3 * errors[1] > 30 * errors[2]
    plain = head(kp.Nystrom(20, gamma=0.02)).expand(x).dense().numpy()  # landmarks around zero
    assert float(np.abs(plain @ plain.T - kernel).max()) > 2 * errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_landmarks_are_left_out_of_the_root(dtype) -> None:
    x = normal(4, 3).repeat(10, 1).to(dtype)
    made = kp.calibrate(kp.Head(3, 1, kp.HeadSpec(kp.Nystrom(30, gamma=0.5)), dtype=dtype, seed=0), x)
    features = made.expand(x).dense().double().numpy()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    np.testing.assert_allclose(features @ features.T, rbf_kernel(x.double().numpy(), gamma=0.5), atol=tolerance)


def test_first_landmarks_are_the_same_for_every_seed() -> None:
    first, other = (head(kp.Nystrom(6), seed=seed) for seed in (0, 1))
    for name, tensor in first.kappa.state_dict().items():
        assert torch.equal(tensor, other.kappa[name])
