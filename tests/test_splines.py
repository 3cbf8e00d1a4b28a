"""B-splines on knots of any kind: against SciPy, their calibration, and the finer grid."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline as SciPySpline
from scipy.interpolate import insert

import kapsi as kp
from kapsi.expansion import spline, spline_product
from references.spline import b_spline_column

POLICIES = ["linear", "extended", "clamp", "zero", "error"]
F64 = torch.float64


def on(kappa: kp.BSpline, knots: Any, x: torch.Tensor) -> torch.Tensor:
    """Return all functions of one input on given knots, `(rows, G)`."""
    knots = torch.as_tensor(knots, dtype=x.dtype).reshape(-1, 1)
    kappa.validate({"knots": knots})
    return kappa(x.reshape(-1, 1), {"knots": knots}).dense()


def random_knots(intervals: int, degree: int, seed: int = 0) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).uniform(-2, 2, intervals + 1 + 2 * degree))


def clamped(breakpoints: list[float], degree: int) -> np.ndarray:
    return np.array([breakpoints[0]] * degree + breakpoints + [breakpoints[-1]] * degree)


def close(ours: torch.Tensor, expected: Any, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(ours.detach().numpy(), np.asarray(expected), rtol=tolerance, atol=tolerance)


CASES = [(n, degree) for n in (1, 2, 7) for degree in (0, 1, 2, 3, 5)]


@pytest.mark.parametrize(("n", "degree"), CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_given_knots_equal_scipys(n, degree, policy) -> None:
    knots = random_knots(n, degree, seed=n + 10 * degree)
    kappa = kp.BSpline(n, degree, knots="quantile", extrapolation=policy)
    low, high = knots[degree], knots[degree + n]
    # At knots (SciPy and we are right-continuous), between them, and beyond.
    inner = knots[degree : degree + n + 1]
    x = np.concatenate((np.linspace(low, high, 57), inner))
    if policy != "error":
        x = np.concatenate((x, [low - 3, low - 0.1, high + 0.1, high + 50], knots[:degree], knots[degree + n + 1 :]))
    close(on(kappa, knots, torch.from_numpy(x)), b_spline_column(kappa, x, knots))


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_clamped_knots_equal_scipys(degree) -> None:
    knots = clamped([-1.0, -0.3, 0.1, 0.15, 2.0], degree)
    x = torch.linspace(-1, 2, 301, dtype=F64)
    basis = on(kp.BSpline(4, degree, knots="quantile"), knots, x)
    close(basis[:-1], SciPySpline.design_matrix(x.numpy()[:-1], knots, degree).toarray())
    close(basis[[0, -1]], np.eye(4 + degree)[[0, -1]], 1e-15)
    assert torch.equal(on(kp.BSpline(4, degree, knots="quantile", extrapolation="extended"), knots, x), basis)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_knots_repeated_inside_and_at_the_ends_of_the_range(degree, policy) -> None:
    inner = [-1.0, -1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0]
    knots = clamped(inner, degree)
    x = torch.linspace(-1, 1, 81, dtype=F64).requires_grad_()
    basis = on(kp.BSpline(7, degree, knots="quantile", extrapolation=policy), knots, x)
    exact = torch.from_numpy(
        np.stack([SciPySpline(knots, row, degree)(x.detach().numpy()) for row in np.eye(7 + degree)], -1)
    )
    close(basis[:-1], exact[:-1])
    close(basis.sum(-1), np.ones(81))
    (gradient,) = torch.autograd.grad((basis * torch.arange(7 + degree)).sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("degree", [0, 1, 3, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_functions_on_given_knots_add_up_to_one(degree, policy) -> None:
    for n in (1, 6):
        knots = random_knots(n, degree, seed=3)
        x = torch.linspace(knots[degree], knots[degree + n], 101, dtype=F64)
        basis = on(kp.BSpline(n, degree, knots="quantile", extrapolation=policy), knots, x)
        close(basis.sum(-1), np.ones(101), 1e-12)
        assert float(basis.min()) >= 0
        assert int((basis != 0).sum(-1).max()) <= degree + 1


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_lines_are_reproduced_with_the_means_of_knots(degree) -> None:
    knots = random_knots(6, degree, seed=5)
    means = [knots[i + 1 : i + degree + 1].mean() for i in range(6 + degree)]
    x = torch.linspace(-9, 9, 101, dtype=F64)  # linear policy: beyond the range too
    close(on(kp.BSpline(6, degree, knots="quantile"), knots, x) @ torch.tensor(means), x, 1e-9)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_derivatives_are_continuous_at_simple_knots_up_to_one_below_the_degree(degree) -> None:
    knots = random_knots(4, degree, seed=8)
    at = torch.from_numpy(knots[degree + 1 : degree + 4])
    kappa = kp.BSpline(4, degree, knots="quantile")

    def derivatives(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        weights = torch.linspace(-1, 2, 4 + degree, dtype=F64) ** 2
        values, found = on(kappa, knots, x) @ weights, []
        for _ in range(degree + 1):
            found.append(values)
            (values,) = torch.autograd.grad(values.sum(), x, create_graph=True)
        return found

    left, right = derivatives(at - 1e-9), derivatives(at + 1e-9)
    for order in range(degree):
        torch.testing.assert_close(left[order], right[order], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(left[degree], right[degree], rtol=1e-2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("degree", [0, 1, 3, 5])
def test_given_uniform_knots_are_the_uniform_spline(degree, policy) -> None:
    x = torch.linspace(-0.997, 0.998, 101, dtype=F64)
    if policy != "error":
        x = torch.cat((x, torch.tensor([-50.0, -1.37, 1.21, 1.83, 70.0], dtype=F64)))
    found = []
    for knots in ("uniform", (-1.0, -0.5, 0.0, 0.5, 1.0), "quantile"):
        kappa = kp.BSpline(4, degree, knots=knots, extrapolation=policy)
        store = kp.Store(kappa.params(1), dtype=F64)
        store.reset()
        points = x.clone().requires_grad_()
        basis = kappa(points.unsqueeze(-1), store).dense()
        (slope,) = torch.autograd.grad((basis * torch.arange(4 + degree)).sum(), points)
        found.append((basis, slope))
    for basis, slope in found[1:]:
        close(basis, found[0][0].detach(), 1e-12)
        close(slope, found[0][1], 1e-11)


def test_knots_of_each_input_are_its_own() -> None:
    kappa = kp.BSpline(3, 2, knots="quantile")
    knots = np.stack([random_knots(3, 2, seed) for seed in (1, 2)], -1)
    x = torch.linspace(-1, 1, 40, dtype=F64).reshape(20, 2)
    basis = kappa(x, {"knots": torch.from_numpy(knots)}).dense()
    for i in (0, 1):
        close(basis[:, i::2], b_spline_column(kappa, x[:, i].numpy(), knots[:, i]))


@pytest.mark.parametrize("rows", [(), (0,), (2, 3)])
def test_many_given_intervals_and_any_leading_shape(rows) -> None:
    kappa = kp.BSpline(1000, 3, knots="quantile")
    store = kp.Store(kappa.params(2), dtype=F64)
    store.reset()
    x = torch.rand(*rows, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    basis = kappa(x, store).dense()
    assert basis.shape == (*rows, 2006)
    close(basis.sum(-1), np.full(rows, 2.0), 1e-9)


def test_out_of_range_error_with_given_knots() -> None:
    kappa = kp.BSpline(knots=(0.0, 1.0, 3.0), extrapolation="error")
    with pytest.raises(kp.DataError, match=r"1 inputs are out of range, the first is 3\.5"):
        on(kappa, [-4.5, -3, -1.5, 0, 1, 3, 4.5, 6, 7.5], torch.tensor([0.5, 3.0, 3.5], dtype=F64))


# ------------------------------------------------------------------------------------------------ options


def test_given_breakpoints_decide_the_range_and_the_number_of_intervals() -> None:
    kappa = kp.BSpline(degree=2, knots=[0, 1, 3])
    assert (kappa.intervals, kappa.low, kappa.high, kappa.knots) == (2, 0.0, 3.0, (0.0, 1.0, 3.0))
    assert kappa.factors(4) == (4, 4)
    assert kappa.domain(2) == ((8, 0.0, 3.0),)
    assert dataclasses.replace(kappa, degree=1).intervals == 2
    assert kp.from_dict(kp.to_dict(kappa), kp.Expansion) == kappa
    head = kp.Head(2, 1, kp.HeadSpec(kappa), dtype=F64)
    # Beyond the range at the mean width of the intervals.
    assert head.kappa["knots"][:, 1].tolist() == [-3.0, -1.5, 0.0, 1.0, 3.0, 4.5, 6.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"knots": (1.0,)}, r"BSpline\(knots=…\): expected 2 to 100,001 breakpoints from low to high, got 1"),
        ({"knots": (0.0, 1.0, 1.0)}, r"must be strictly increasing; knots\[2\] = 1.0 follows 1.0"),
        ({"knots": (0.0, 1.0), "intervals": 3}, r"BSpline\(intervals=3\): the given knots make intervals 1"),
        ({"knots": (0.0, 1.0), "low": 0.5}, r"BSpline\(low=0.5\): the given knots make low 0.0"),
        ({"knots": (0.0, 1.0), "high": 2.0}, r"BSpline\(high=2.0\): the given knots make high 1.0"),
        ({"knots": "quantiles"}, "knots"),
        ({"knots": (0.0, float("nan"))}, "knots"),
        ({"uniform_share": 1.5}, "uniform_share must be at most 1.0"),
        ({"low": 1.0}, r"low must be below high"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        kp.BSpline(**options)


def test_assigned_knots_are_checked() -> None:
    head = kp.Head(1, 1, kp.HeadSpec(kp.BSpline(1, 1, knots="quantile")), dtype=F64)
    head.assign("expansion", knots=[[0.0], [0.0], [1.0], [1.0]])
    for knots, message in (
        ([0.0, 2.0, 1.0, 3.0], "must not decrease"),
        ([0.0, 1.0, 1.0, 3.0], "lower end of the range must be below the upper"),
        ([0.0, 1.0, 2.0, float("inf")], "finite"),
    ):
        with pytest.raises(kp.SpecError, match=message):
            head.assign("expansion", knots=[[knot] for knot in knots])
    with pytest.raises(kp.SpecError, match="the knots must be finite"):
        kp.BSpline(1, 1, knots="quantile").validate({"knots": torch.tensor([[0.0], [1.0], [2.0], [torch.inf]])})
    assert head.kappa["knots"].flatten().tolist() == [0.0, 0.0, 1.0, 1.0]


# ------------------------------------------------------------------------------------------------ calibration


def calibrated(kappa: kp.BSpline, x: torch.Tensor) -> torch.Tensor:
    model = kp.Model(kp.rpn([x.shape[-1], 1], expansion=kappa), dtype=x.dtype, seed=0)
    return kp.calibrate(model, x).layers[0].heads[0].kappa["knots"]


def skewed(rows: int = 501) -> torch.Tensor:
    normal = torch.randn(rows, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    return torch.stack((normal[:, 0].exp(), normal[:, 1] * 5 - 100, normal[:, 2]), -1)


def test_quantile_knots_are_numpys_quantiles() -> None:
    x = skewed()
    knots = calibrated(kp.BSpline(7, 2, knots="quantile", uniform_share=0.0), x)
    close(knots[2:-2], np.quantile(x.numpy(), np.linspace(0, 1, 8), axis=0), 1e-12)
    width = (x.amax(0) - x.amin(0)) / 7
    close(
        knots[[0, 1, -2, -1]],
        torch.stack([x.amin(0) - 2 * width, x.amin(0) - width, x.amax(0) + width, x.amax(0) + 2 * width]),
    )


def test_uniform_share_mixes_quantiles_with_uniform_knots() -> None:
    x = skewed()
    quantiles = np.quantile(x.numpy(), np.linspace(0, 1, 5), axis=0)
    even = np.linspace(x.numpy().min(0), x.numpy().max(0), 5)
    for share in (0.02, 0.5, 1.0):
        knots = calibrated(kp.BSpline(4, 1, knots="quantile", uniform_share=share), x)
        close(knots[1:-1], share * even + (1 - share) * quantiles, 1e-12)


@pytest.mark.parametrize("share", [0.0, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantile_knots_increase_whatever_the_data(share, dtype) -> None:
    ties = torch.tensor([0.0] * 90 + [1.0] * 5 + [2.0] * 5)
    columns = [ties, torch.full_like(ties, 3.0), ties * 1e-3 + 1e4, ties * 1e30, -ties, (ties > 1).float()]
    x = torch.stack(columns, -1).to(dtype)
    for rows in (x, x[:1], x[:2]):
        for n in (1, 2, 20):
            knots = calibrated(kp.BSpline(n, 3, knots="quantile", uniform_share=share), rows)
            assert knots.isfinite().all()
            inner = knots[3 : n + 4]
            assert (inner.diff(dim=0) > 0).all()
            assert (inner[0] <= rows.amin(0)).all()
            assert (inner[-1] >= rows.amax(0)).all()


def test_given_breakpoints_are_stretched_onto_the_data() -> None:
    x = skewed()
    knots = calibrated(kp.BSpline(degree=1, knots=(0.0, 1.0, 4.0)), x)
    low, high = x.amin(0), x.amax(0)
    close(knots[1:-1], torch.stack((low, low + (high - low) / 4, high)), 1e-12)


def test_calibrated_knots_in_half_precision_are_finite() -> None:
    x = torch.tensor([[-60000.0, 1.0], [60000.0, 1.001]], dtype=torch.float16)
    knots = calibrated(kp.BSpline(3, 3, knots="quantile"), x)
    assert knots.isfinite().all()
    assert (knots.diff(dim=0) >= 0).all()


# ------------------------------------------------------------------------------------------------ a finer grid


def matrix(kappa: kp.BSpline, tensors: Any, intervals: int) -> tuple[np.ndarray, Any]:
    """Return M of one input, `(q, q′)`, and the refined tensors."""
    found = kappa.refined(tensors, 1, intervals)
    return found.columns(torch.eye(kappa.intervals + kappa.degree, dtype=F64)).numpy(), found


@pytest.mark.parametrize("degree", [0, 1, 2, 3, 5])
def test_refinement_equals_scipys_insertion_of_knots(degree) -> None:
    n, parts = 3, 4
    knots = random_knots(n, degree, seed=degree)
    kappa = kp.BSpline(n, degree, knots="quantile")
    made, found = matrix(kappa, {"knots": torch.from_numpy(knots).reshape(-1, 1)}, n * parts)
    new = found.tensors["knots"].flatten().numpy()
    inserted = sorted(set(new.tolist()) - set(knots.tolist()))
    assert len(inserted) == n * (parts - 1)
    for row, coefficients in zip(made, np.eye(n + degree), strict=True):
        if degree == 0:  # which SciPy's routine does not take
            np.testing.assert_allclose(row, np.repeat(coefficients, parts))
            continue
        spline = (knots, np.concatenate((coefficients, np.zeros(degree + 1))), degree)
        for knot in inserted:
            spline = insert(knot, spline)
        np.testing.assert_allclose(spline[0], new, rtol=0, atol=1e-15)
        np.testing.assert_allclose(row, spline[1][: len(row)], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("n", "degree", "parts"), [(1, 3, 1000), (1, 16, 2), (5, 0, 3), (2, 5, 7), (4, 3, 1), (3, 1, 2), (1, 0, 9)]
)
def test_old_functions_are_sums_of_those_on_the_finer_grid(n, degree, parts) -> None:
    for kappa in (kp.BSpline(n, degree), kp.BSpline(n, degree, knots="quantile", low=-1.0, high=2.0)):
        store = kp.Store(kappa.params(1), dtype=F64)
        store.reset()
        made, found = matrix(kappa, store, n * parts)
        x = torch.linspace(-0.99917, 0.99931, 211, dtype=F64).unsqueeze(-1)
        new = found.expansion(x, found.tensors).dense().numpy()
        np.testing.assert_allclose(new @ made.T, kappa(x, store).dense().numpy(), rtol=0, atol=1e-11)
        np.testing.assert_allclose(made.sum(0), 1, atol=1e-11)  # ones stay ones
        assert made.min() > -1e-10
        assert found.expansion.intervals == n * parts


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_refinement_of_repeated_knots(degree) -> None:
    knots = clamped([-1.0, -1.0, 0.0, 0.0, 0.5, 1.0], degree)
    kappa = kp.BSpline(5, degree, knots="quantile", extrapolation="extended")
    tensors = {"knots": torch.from_numpy(knots).reshape(-1, 1)}
    made, found = matrix(kappa, tensors, 15)
    x = torch.linspace(-1.2, 1.2, 241, dtype=F64).unsqueeze(-1)
    new = found.expansion(x, found.tensors).dense().numpy()
    np.testing.assert_allclose(new @ made.T, kappa(x, tensors).dense().numpy(), rtol=0, atol=1e-12)


def test_only_inputs_with_alike_knots_have_a_grid() -> None:
    even = torch.arange(8, dtype=F64)
    kappa = kp.BSpline(3, 2, knots="quantile")
    for second, alike in ((even * 3 - 7, True), (even**2, False)):
        found = kappa.refined({"knots": torch.stack((even, second), -1)}, 2, 6)
        assert (found.grid is not None) == alike
    grid = kappa.refined({"knots": torch.stack((even, even), -1)}, 2, 6).grid(torch.eye(5, dtype=F64))
    columns = kappa.refined({"knots": torch.stack((even, even), -1)}, 2, 6).columns(torch.eye(10, dtype=F64))
    torch.testing.assert_close(torch.kron(grid, torch.eye(2, dtype=F64)), columns)


@pytest.mark.parametrize("offset", [0.0, 50.0, 1e4])
def test_calibrated_given_knots_are_alike_however_often_they_are_divided(offset) -> None:
    kappa = kp.BSpline(knots=(-1.0, -0.2, 0.1, 0.9))
    x = torch.randn(200, 3, dtype=F64, generator=torch.Generator().manual_seed(0)) + offset
    tensors = kappa.calibrate(x, {"knots": torch.empty(10, 3, dtype=F64)})
    for intervals in (6, 12, 60, 600):
        found = kappa.refined(tensors, 3, intervals)
        assert found.grid is not None
        rows = torch.randn(3 * (kappa.intervals + 3), dtype=F64, generator=torch.Generator().manual_seed(1))
        on_grid = found.grid(rows.unflatten(0, (-1, 3)).T).T.flatten()
        torch.testing.assert_close(on_grid, found.columns(rows), rtol=0, atol=1e-13 * (1 + offset) * intervals)
        kappa, tensors = found.expansion, found.tensors


def test_given_breakpoints_stay_given() -> None:
    kappa = kp.BSpline(knots=(0.0, 1.0, 3.0), degree=2)
    store = kp.Store(kappa.params(1), dtype=F64)
    store.reset()
    finer = kappa.refined(store, 1, 4).expansion
    assert finer == kp.BSpline(knots=(0.0, 0.5, 1.0, 2.0, 3.0), degree=2)


def test_wrong_numbers_of_intervals_list_those_allowed() -> None:
    kappa = kp.BSpline(5)
    for intervals in (0, 4, 12, 100_005):
        with pytest.raises(
            kp.SpecError, match=r"BSpline\(intervals=5\): .*multiple: 5, 10, 15, 20, … up to 100,000; got"
        ):
            kappa.refined({"range": torch.tensor([[-1.0], [1.0]])}, 1, intervals)


def test_extended_and_nested_refine_their_parts() -> None:
    spline, other = kp.BSpline(2), kp.Taylor(2)
    assert [f.has_grid() for f in (spline, other, kp.Extended((other, spline)), kp.Nested((other, spline)))] == [
        True,
        False,
        True,
        True,
    ]
    for kappa in (kp.Extended((other, kp.BSpline(4), spline)), kp.Nested((kp.Chebyshev(2), spline))):
        store = kp.Store(kappa.params(3), dtype=F64)
        store.reset()
        x = torch.rand(9, 3, dtype=F64, generator=torch.Generator().manual_seed(0)) - 0.5
        found = kappa.refined(store, 3, 8)
        made = found.columns(torch.eye(kappa.out_features(3), dtype=F64))
        assert made.shape[1] == found.expansion.out_features(3)
        torch.testing.assert_close(found.expansion(x, found.tensors).dense() @ made.T, kappa(x, store).dense())
    assert kp.Extended((other,)).refined(store, 3, 8) is None
    assert kp.Nested((other, other)).refined({"0": {}, "1": {}}, 3, 8) is None
    for first, second in itertools.product((spline, kp.Extended((spline, other))), (spline, other)):
        with pytest.raises(
            kp.SpecError, match=r"Nested: .* part 0, as other parts come after it; only the last part may have"
        ):
            kp.Nested((first, second)).refined({"0": {}, "1": {}}, 3, 8)


# ------------------------------------------------------------------------------------------------ the fast way on uniform knots


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("policy", ["linear", "extended", "clamp", "zero"])
def test_written_out_derivatives_equal_those_of_torch(policy, degree) -> None:
    kappa = kp.BSpline(4, degree, extrapolation=policy)
    tensors = {"range": torch.tensor([[-1.0, -0.5, 0.3], [1.0, 2.0, 0.9]], dtype=torch.float64)}
    x = torch.rand(2, 20, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 4 - 2
    x.requires_grad_()
    results = []
    for way in (kappa._on_range, kappa._on_any_knots):  # written out, and by torch
        y = way(x, tensors["range"])
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (first,) = torch.autograd.grad((weights * y).sum(), x, create_graph=True)
        second = torch.zeros_like(x)
        if first.requires_grad:  # the slope of straight pieces is constant
            (second,) = torch.autograd.grad(first.square().sum(), x, allow_unused=True, materialize_grads=True)
        results.append((y, first, second))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("intervals", [5, 7, 1000])
@pytest.mark.parametrize("policy", ["zero", "clamp", "linear"])
@pytest.mark.parametrize("way", ["_on_range", "_on_any_knots"])
def test_both_ends_belong_to_the_range_whatever_is_rounded(way, policy, intervals, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(500, generator=generator, dtype=dtype) * 3
    ends = torch.stack((low, low + 0.01 + 5 * torch.rand(500, generator=generator, dtype=dtype)))
    kappa = kp.BSpline(intervals, extrapolation=policy)
    x = ends.clone().requires_grad_()
    y = getattr(kappa, way)(x, ends).unflatten(-1, (-1, 500))
    torch.testing.assert_close(y.sum(-2), torch.ones_like(ends), rtol=1e-5, atol=1e-5)
    slope = torch.arange(intervals + 3, dtype=dtype).unsqueeze(-1)  # of a line: one in each interval
    (made,) = torch.autograd.grad((y * slope).sum(), x)
    torch.testing.assert_close(made, (intervals / (ends[1] - ends[0])).expand_as(made), rtol=1e-3, atol=0)


@pytest.mark.parametrize("policy", ["linear", "extended", "clamp", "zero"])
def test_second_derivatives_at_the_ends_are_those_of_the_last_pieces(policy) -> None:
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64, requires_grad=True)
    y = kp.BSpline(4, extrapolation=policy)(x, {"range": torch.tensor([[-1.0], [1.0]], dtype=torch.float64)}).dense()
    (first,) = torch.autograd.grad(y[:, [0, 6]].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 4.0))  # (1 - t)³ / 6 in intervals of a half


@pytest.mark.parametrize("intervals", [200, 10_000])
@pytest.mark.parametrize("policy", ["linear", "extended", "clamp", "zero"])
def test_splines_far_from_zero_are_as_exact_as_near_it(policy, intervals) -> None:
    kappa, ends = kp.BSpline(intervals, extrapolation=policy), torch.tensor([[1000.0], [1001.0]])
    x = 1000 + torch.rand(200, 1, generator=torch.Generator().manual_seed(0))
    expected = kappa(x.double(), {"range": ends.double()}).dense()
    torch.testing.assert_close(kappa(x, {"range": ends}).dense().double(), expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_jacobians_of_many_directions_at_once(checkpoint, strategy) -> None:
    head, x = spline_head(checkpoint, dtype=torch.float64, intervals=4), torch.rand(2, 64, dtype=torch.float64)
    made = torch.autograd.functional.jacobian(head, x, vectorize=True, strategy=strategy)
    torch.testing.assert_close(made, torch.autograd.functional.jacobian(head, x))


def test_a_spline_keeps_its_inputs_and_no_more() -> None:
    kept: list[int] = []
    kappa, tensors = kp.BSpline(50), {"range": torch.tensor([[-1.0], [1.0]]).expand(2, 64)}
    x = torch.rand(32, 64, requires_grad=True)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = kappa(x, tensors).dense()
    assert sum(kept) <= x.numel() + 2 * 64  # and the lower end and the rate of each input
    y.sum().backward()
    assert x.grad is not None


# ------------------------------------------------------------------------------------------------ κ(x) that is not kept


def kept_by(call) -> int:
    """Return the bytes that a call keeps for its backward pass."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(storages.values())


def spline_head(checkpoint: bool | None, *, intervals: int = 50, dtype=torch.float32, **options) -> kp.Head:
    spec = kp.HeadSpec(
        kp.BSpline(intervals, checkpoint=checkpoint, **options), kp.Dense(), kp.LinearRemainder(before="silu")
    )
    return kp.Head(64, 64, spec, seed=0, dtype=dtype)


def test_a_recomputed_layer_keeps_its_inputs_and_no_more() -> None:
    x = torch.rand(512, 64, requires_grad=True)
    parameters = sum(p.numel() * p.element_size() for p in spline_head(True).parameters())
    assert kept_by(lambda: spline_head(True)(x)) - parameters <= 2**20
    assert kept_by(lambda: spline_head(False)(x)) - parameters >= 512 * 64 * 53 * 4
    few, many = (kept_by(lambda n=n: spline_head(True, intervals=n)(x)) for n in (5, 200))
    weights = 64 * 64 * (203 - 8) * 4
    assert many - few == weights


@pytest.mark.parametrize("intervals", [5, 200])
def test_large_layers_are_recomputed_by_themselves(intervals, monkeypatch) -> None:
    monkeypatch.setattr(spline, "MAX_SAVED", 2**24)
    x = torch.rand(2048, 64, requires_grad=True)  # 26.6 million numbers of κ(x) with 200 intervals
    head = spline_head(None, intervals=intervals)
    is_small = isinstance(head.expand(x), kp.features.DenseFeatures)
    assert is_small == (intervals == 5)
    with torch.no_grad():
        torch.testing.assert_close(head(x), spline_head(False, intervals=intervals)(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extrapolation": "extended"},
        {"extrapolation": "clamp", "degree": 1},
        {"extrapolation": "zero", "degree": 2},
        {"degree": 0},
        {"knots": "quantile"},
    ],
)
@pytest.mark.parametrize(
    "reconciliation", [kp.Dense(), kp.LowRank(2), kp.Kronecker(), kp.Masked(0.5), kp.Eye(), kp.OneReconciliation()]
)
@pytest.mark.parametrize("channels", [1, 2])
def test_recomputed_heads_equal_others(options, reconciliation, channels) -> None:
    results = []
    for checkpoint in (True, False):
        kappa = kp.BSpline(5, **{"degree": 3, **options}, checkpoint=checkpoint)
        outputs = 12 * kappa.factors(1)[0] if reconciliation == kp.Eye() else 6
        spec = kp.HeadSpec(kappa, reconciliation, channels=channels, after=("layer_norm",) if channels == 2 else ())
        head = kp.Head(12, outputs, spec, seed=1, dtype=torch.float64)
        x = torch.rand(7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 - 1.5
        x.requires_grad_()
        y = head(x)
        inputs = [x, *head.parameters()]
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True, materialize_grads=True)
        total = sum((each.square().sum() for each in first), torch.zeros((), dtype=torch.float64))
        second = torch.autograd.grad(total, inputs, materialize_grads=True) if total.requires_grad else ()
        results.append([y, *first, *second])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block", [1, 7 * 8 * 5, 2**20], ids=["one input", "5 inputs", "whole"])
@pytest.mark.parametrize("shape", [(7, 12), (2, 7, 12), (12,), (0, 12)])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("options", [{}, {"extrapolation": "extended"}, {"degree": 0}, {"knots": "quantile"}])
def test_blocks_of_inputs_equal_the_whole(block, shape, channels, options, monkeypatch) -> None:
    monkeypatch.setattr(spline_product, "BLOCK", block)
    results = []
    for checkpoint in (True, False):
        kappa = kp.BSpline(5, **{"degree": 3, **options}, checkpoint=checkpoint)
        spec = kp.HeadSpec(kappa, channels=channels, after=("layer_norm",) if channels == 2 else ())
        head = kp.Head(12, 6, spec, seed=1, dtype=torch.float64)
        x = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 - 1.5
        y = head(x)  # ψ alone has a gradient
        alone = torch.autograd.grad(y.sin().sum(), list(head.parameters()))
        inputs = [x.requires_grad_(), *head.parameters()]
        both = torch.autograd.grad(head(x).sin().sum(), inputs)
        head.requires_grad_(False)
        results.append([y, *alone, *both, *torch.autograd.grad(head(x).sin().sum(), x)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("policy", ["linear", "clamp", "zero"])
def test_products_with_gradients_gather_too(policy) -> None:
    results = []
    for checkpoint in (True, False):
        kappa = kp.BSpline(100, extrapolation=policy, checkpoint=checkpoint)
        head = kp.Head(8, 5, kp.HeadSpec(kappa), seed=0)
        x = torch.rand(2, 300, 8, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2
        assert kappa.gathers(x)
        y = head(x.requires_grad_())
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *head.parameters()])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_recomputed_layer_under_autocast() -> None:
    results = []
    for checkpoint in (True, False):
        head = spline_head(checkpoint, intervals=4)
        x = (torch.arange(9 * 64).view(9, 64) / 576).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = head(x)
        results.append([y, *torch.autograd.grad(y.float().sum(), [x, *head.parameters()])])
    assert results[0][0].dtype == torch.bfloat16
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_kappa_is_saved_up_to_a_gibibyte() -> None:
    with torch.device("meta"):
        small, large, inner = torch.empty(1024, 784), torch.empty(16_384, 784), torch.empty(2**20, 64)
    few, many = kp.BSpline(20), kp.BSpline(50)
    assert not few._recomputes(small)  # 18 million entries
    assert few._recomputes(large)  # 295 million
    assert not kp.BSpline(1, degree=1)._recomputes(inner)  # 2 ** 27
    assert kp.BSpline(3, degree=2)._recomputes(inner)  # 5 · 2 ** 26
    assert not many._recomputes(small)  # 43 million
    assert many._recomputes(large)
    assert not kp.BSpline(50, checkpoint=False)._recomputes(large)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_recomputed_heads_go_through_the_transforms() -> None:
    head, other = (spline_head(checkpoint, dtype=torch.float64, intervals=4) for checkpoint in (True, False))
    x = torch.rand(3, 64, dtype=torch.float64) * 2.4 - 1.2
    weights = dict(head.named_parameters())

    def loss(parameters, row, of=head):
        return torch.func.functional_call(of, parameters, (row,)).square().sum()

    for transform in (
        lambda of: torch.func.vmap(torch.func.grad(lambda p, row: loss(p, row, of)), (None, 0))(weights, x)[
            "psi.matrix"
        ],
        lambda of: torch.func.vmap(torch.func.jacrev(of))(x),
        lambda of: torch.func.vmap(torch.func.jacfwd(of))(x),
        lambda of: torch.func.vmap(torch.func.hessian(lambda row: of(row).sum()))(x),
    ):
        torch.testing.assert_close(transform(head), transform(other), rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(head, x[:1].clone().requires_grad_())
    torch.testing.assert_close(head(x[0]), other(x[0]))  # without a batch
    assert head(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("policy", ["linear", "clamp", "zero", "extended"])
@pytest.mark.parametrize("shape", [(600, 8), (2, 300, 8)])
def test_without_gradients_many_intervals_are_gathered(policy, shape) -> None:
    head = kp.Head(8, 5, kp.HeadSpec(kp.BSpline(100, extrapolation=policy)), seed=0)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2
    expected = torch.nn.functional.linear(head.expand(x).dense(), head.weights().dense()[0])
    with torch.no_grad():
        made = head.expand(x)
        assert isinstance(made, kp.features.DenseFeatures) == (policy == "extended")
        torch.testing.assert_close(head(x), expected.detach(), rtol=1e-5, atol=1e-5)
        assert torch.isnan(head(torch.full(shape, torch.nan))).all() or policy == "zero"
        torch.testing.assert_close(made.dense(), head.expand(x.double()).dense().float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("degree", [1, 2, 3, 7])
@pytest.mark.parametrize("policy", ["linear", "clamp", "zero", "extended"])
def test_a_single_row_has_the_values_of_a_batch(policy, degree) -> None:
    kappa = kp.BSpline(4, degree, extrapolation=policy)
    ends = torch.tensor([[-1.0, -0.5, 0.3], [1.0, 2.0, 0.9]], dtype=torch.float64)
    x = torch.rand(30, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 4 - 2
    x[0] = (ends[0] + ends[1]) / 2  # all within the range
    x[1:3] = ends
    x[3] = torch.nan
    expected = kappa._on_any_knots(x, ends)
    for shape in ((1, 3), (3,), (1, 1, 3)):
        columns = torch.stack([kappa(row.view(shape), {"range": ends}).dense().view(-1) for row in x])
        torch.testing.assert_close(columns[:3], expected[:3], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(columns[4:], expected[4:], rtol=1e-12, atol=1e-12)
        assert torch.isnan(columns[3]).any()
        assert kappa(x[:1].view(shape), {"range": ends}).dense().shape == (*shape[:-1], (4 + degree) * 3)


def test_a_block_of_one_row_is_gathered(monkeypatch) -> None:
    head = kp.Head(8, 5, kp.HeadSpec(kp.BSpline(100)), seed=0)
    x = torch.rand(601, 8, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2
    expected = torch.nn.functional.linear(head.expand(x).dense(), head.weights().dense()[0])
    monkeypatch.setattr(spline_product, "BLOCK", 4 * 8 * 100)
    with torch.no_grad():
        torch.testing.assert_close(head(x), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "wrap", [lambda part: part, lambda part: kp.Extended((part,)), lambda part: kp.Nested((part,))]
)
def test_a_head_of_splines_that_refuse_begins_like_others(wrap) -> None:
    refusing, clamping = (
        kp.Head(2, 3, kp.HeadSpec(wrap(kp.BSpline(extrapolation=policy)), remainder=remainder), seed=0)
        for policy, remainder in (("error", kp.ExpansionRemainder(kp.BSpline(extrapolation="error"))), ("clamp", None))
        for remainder in (remainder or kp.ExpansionRemainder(kp.BSpline(extrapolation="clamp")),)
    )
    x = torch.rand(5, 2) * 2 - 1
    torch.testing.assert_close(refusing(x), clamping(x), rtol=0, atol=0)
    with pytest.raises(kp.DataError, match="1 inputs are out of range, the first is 3"):
        refusing(torch.tensor([0.5, 3.0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_gathered_splines_go_through_the_transforms(monkeypatch) -> None:
    head = kp.Head(8, 5, kp.HeadSpec(kp.BSpline(100)), seed=0)
    x = torch.rand(3, 600, 8, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2
    expected, slopes = torch.func.jvp(head, (x,), (x,))
    with torch.no_grad():
        assert not isinstance(head.expand(x[0]), kp.features.DenseFeatures)
        for made in (torch.func.vmap(head)(x), head(x.mT.contiguous().mT)):
            torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.func.jvp(head, (x,), (x,)), (expected, slopes), rtol=1e-5, atol=1e-5)
        weights = dict(head.named_parameters())
        _, made = torch.func.jvp(lambda w: torch.func.functional_call(head, w, (x,)), (weights,), (weights,))
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)  # linear in ψ
        with torch.autocast("cpu", torch.bfloat16):
            assert head(x).dtype == torch.bfloat16
        monkeypatch.setattr(spline_product, "BLOCK", 2**10)
        torch.testing.assert_close(head(x), expected, rtol=1e-5, atol=1e-5)


def test_gathered_splines_refuse_what_is_out_of_range() -> None:
    head = kp.Head(8, 5, kp.HeadSpec(kp.BSpline(100, extrapolation="error")), seed=0)
    with torch.no_grad(), pytest.raises(kp.DataError, match="1 inputs are out of range, the first is 1"):
        head(torch.cat((torch.zeros(599, 8), torch.eye(8)[:1] * 1.75)))


def test_rounding_steps_beyond_the_range_are_no_error() -> None:
    kappa = kp.BSpline(3, extrapolation="error")
    model = kp.Model(kp.ModelSpec((3, 5, 2), (kp.LayerSpec((kp.HeadSpec(kappa),)),) * 2), seed=0, dtype=torch.float64)
    x = torch.rand(300, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 7 + 100
    kp.calibrate(model, x)
    torch.testing.assert_close(kp.refine(model, 9)(x), model(x), rtol=1e-9, atol=1e-9)
    head = kp.Head(1, 1, kp.HeadSpec(kappa), seed=0)
    ends, beyond = torch.tensor([[-1.0], [1.0]]), torch.tensor([[-1.0000002], [1.0000002]])
    torch.testing.assert_close(head(beyond), head(ends))
    with pytest.raises(kp.DataError, match="1 inputs are out of range"):
        head(torch.tensor([[1.00001]]))


@pytest.mark.parametrize("extrapolation", ["linear", "clamp", "extended"])
def test_models_with_ranges_of_their_own_run_at_once(extrapolation) -> None:
    spec = kp.rpn([2, 3], kp.BSpline(extrapolation=extrapolation), kp.LowRank(1))
    models = [kp.Model(spec, seed=seed, dtype=torch.float64) for seed in range(3)]
    for i, model in enumerate(models):
        model.layers[0].heads[0].assign("expansion", range=[[-1.0, -0.5 * i], [1.0 + i, 2.0]])
    state = torch.func.stack_module_state(models)
    x = torch.randn(3, 20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    together = torch.func.vmap(lambda tensors, x: torch.func.functional_call(models[0], tensors, (x,)))(state, x)
    expected = torch.stack([model(part) for model, part in zip(models, x, strict=True)])
    torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)
