"""What radial basis functions promise beyond their formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.preprocessing import KBinsDiscretizer

import kapsi as kp

KINDS = (kp.GaussianRBF, kp.InverseQuadraticRBF)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def head(kappa: kp.Expansion, width: int = 1) -> kp.Head:
    return kp.Head(width, 1, kp.HeadSpec(kappa), dtype=torch.float64, seed=0)


def expand(kappa: kp.Expansion, x: torch.Tensor, **tensors: object) -> torch.Tensor:
    """Return all functions of one input, `(rows, G)`."""
    made = head(kappa)
    if tensors:
        made.assign("expansion", **tensors)
    return made.expand(x.reshape(-1, 1)).dense().detach()


def skewed(rows: int = 999) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64).exp() * torch.tensor([1.0, 50.0]) + 7


@each_kind
def test_first_centers_are_evenly_spaced_and_the_peaks(kind) -> None:
    x = torch.linspace(-3, 5, 8001, dtype=torch.float64)
    basis = expand(kind(5, low=-1.0, high=3.0), x)
    torch.testing.assert_close(x[basis.argmax(0)], torch.arange(-1, 4, dtype=torch.float64))
    torch.testing.assert_close(basis.amax(0), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(x[expand(kind(1, low=-1.0, high=3.0), x).argmax(0)], torch.ones(1).double())


@pytest.mark.parametrize(
    ("kind", "area", "tolerance"), [(kp.GaussianRBF, math.sqrt(math.pi), 2e-4), (kp.InverseQuadraticRBF, math.pi, 0.01)]
)
def test_bumps_add_up_to_a_constant_between_the_centers(kind, area, tolerance) -> None:
    # The area of a bump in units of the spacing, by Poisson's summation formula; of many centers the ends are far.
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    total = expand(kind(4001, low=-2000.0, high=2000.0), x).sum(-1)
    np.testing.assert_allclose(total, area, rtol=tolerance)
    assert float(expand(kind(4001, low=-2000.0, high=2000.0, overlap=0.2), x).sum(-1).std()) > 0.1


@pytest.mark.parametrize(("kind", "at_width"), [(kp.GaussianRBF, math.exp(-1)), (kp.InverseQuadraticRBF, 0.5)])
@pytest.mark.parametrize("overlap", [0.5, 1.0, 3.0])
def test_overlap_is_the_width_by_the_spacing(kind, at_width, overlap) -> None:
    basis = expand(kind(3, low=-4.0, high=4.0, overlap=overlap), torch.tensor([0.0 + 4 * overlap, -4 * overlap]))
    np.testing.assert_allclose(basis[:, 1], at_width)


@each_kind
def test_given_centers_and_widths_are_used(kind) -> None:
    kappa = kind(2)
    made = head(kappa, 2)
    made.assign("expansion", centers=[[0.0, 10.0], [1.0, 20.0]], log_width=[[0.0, math.log(5.0)], [math.log(2.0), 0.0]])
    u = torch.tensor([0.5 - 0.0, (13.0 - 10) / 5, (0.5 - 1) / 2, 13.0 - 20], dtype=torch.float64)
    expected = torch.exp(-u.square()) if kind is kp.GaussianRBF else 1 / (1 + u.square())
    torch.testing.assert_close(made.expand(torch.tensor([0.5, 13.0]).double()).dense(), expected)


@each_kind
def test_uniform_calibration_spans_the_range_of_the_data(kind) -> None:
    x = skewed()
    made = kp.calibrate(head(kind(6, overlap=0.5), 2), x)
    edges = KBinsDiscretizer(5, strategy="uniform", encode="ordinal").fit(x.numpy()).bin_edges_
    np.testing.assert_allclose(made.kappa["centers"].T, np.stack(edges))
    np.testing.assert_allclose(made.kappa["log_width"].exp(), 0.5 * np.ptp(x.numpy(), axis=0) / 5 * np.ones((6, 1)))
    one = kp.calibrate(head(kind(1), 2), x)
    np.testing.assert_allclose(one.kappa["centers"][0], (x.amin(0) + x.amax(0)) / 2)
    np.testing.assert_allclose(one.kappa["log_width"][0].exp(), np.ptp(x.numpy(), axis=0))


@each_kind
def test_quantile_calibration_gives_each_center_an_equal_share(kind) -> None:
    x = skewed()
    made = kp.calibrate(head(kind(9, placement="quantile"), 2), x)
    centers = made.kappa["centers"].numpy()
    np.testing.assert_allclose(centers, np.quantile(x.numpy(), (np.arange(9) + 0.5) / 9, axis=0))
    inner = (centers[2:] - centers[:-2]) / 2
    assert float(inner.min()) > np.ptp(centers, axis=0).min() / 8 / 10  # no width is at its floor here
    np.testing.assert_allclose(made.kappa["log_width"].exp()[1:-1, 0], inner[:, 0])


def test_quantiles_of_repeated_values_keep_a_width() -> None:
    x = torch.zeros(100, 1, dtype=torch.float64)
    x[90:] = torch.linspace(1, 5, 10).reshape(-1, 1)
    made = kp.calibrate(head(kp.GaussianRBF(5, placement="quantile")), x)
    centers, width = made.kappa["centers"][:, 0], made.kappa["log_width"].exp()[:, 0]
    assert centers[:4].tolist() == [0.0] * 4
    assert float(width.min()) == pytest.approx(float(centers[-1] - centers[0]) / 4 / 10)


@each_kind
@pytest.mark.parametrize("placement", ["uniform", "quantile"])
def test_a_constant_input_is_told_from_others(kind, placement) -> None:
    x = torch.full((10, 1), 3.0, dtype=torch.float64)
    made = kp.calibrate(head(kind(5, placement=placement)), x)
    at, beside = made.expand(x[:1]).dense(), made.expand(x[:1] + 0.05).dense()
    assert float(at.max()) == pytest.approx(1)
    assert 1e-4 < float((at - beside).abs().max()) < 1


@each_kind
def test_linear_policy_goes_on_with_value_and_slope(kind) -> None:
    # Centers at −1, 0, 1 with widths of 1: the formula holds up to ±2.
    formula, linear = kind(3, low=-1.0, high=1.0), kind(3, low=-1.0, high=1.0, extrapolation="linear")
    inside = torch.linspace(-2, 2, 41, dtype=torch.float64)
    torch.testing.assert_close(expand(linear, inside), expand(formula, inside))
    for end in (-2.0, 2.0):
        x = torch.tensor([end - 1e-6, end + 1e-6], dtype=torch.float64)
        low, high = expand(formula, x)
        slope = (high - low) / 2e-6
        beyond = torch.tensor([end * 2, end * 500], dtype=torch.float64)
        expected = (low + high) / 2 + slope * (beyond - end).unsqueeze(-1)
        torch.testing.assert_close(expand(linear, beyond), expected, rtol=1e-7, atol=1e-8)


def test_far_from_all_centers_only_the_gaussian_vanishes() -> None:
    slopes = {}
    for name, kappa in {
        "gaussian": kp.GaussianRBF(),
        "linear": kp.GaussianRBF(extrapolation="linear"),
        "quadratic": kp.InverseQuadraticRBF(),
    }.items():
        x = torch.tensor([[30.0]], requires_grad=True)
        kp.Head(1, 1, kp.HeadSpec(kappa)).expand(x).dense().sum().backward()
        slopes[name] = abs(float(x.grad))
    assert slopes["gaussian"] == 0
    assert slopes["linear"] > 1e-3
    assert slopes["quadratic"] > 1e-4


def test_digits_are_kept_far_from_zero() -> None:
    # The difference to a center is exact in float32; differences of products would have an error of 0.03 here.
    kappa = kp.GaussianRBF(3, low=99_999.0, high=100_001.0)
    made = kp.Head(1, 1, kp.HeadSpec(kappa))
    offsets = torch.tensor([-1.0, -0.25, 0.0, 0.5])
    expected = torch.exp(-(offsets.unsqueeze(-1) - torch.tensor([-1.0, 0.0, 1.0])).square())
    torch.testing.assert_close(made.expand(100_000 + offsets.unsqueeze(-1)).dense(), expected)


@each_kind
def test_wrong_options_say_what_is_allowed(kind) -> None:
    with pytest.raises(kp.SpecError, match=rf"{kind.__name__}\(low=1\.0, high=1\.0\): low must be below high"):
        kind(low=1.0, high=1.0)
    with pytest.raises(kp.SpecError, match="high must be at most 1000000000000000"):
        kind(high=1e300)
    with pytest.raises(kp.SpecError, match="centers must be at least 1"):
        kind(0)
    with pytest.raises(kp.SpecError, match="expected one of uniform, quantile"):
        kind(placement="random")


@pytest.mark.parametrize(
    "kappa",
    [
        kp.GaussianRBF(50),
        kp.RickerWavelet(shifts=40),
        kp.DerivativeOfGaussianWavelet(shifts=40, order=20),
        kp.KernelMap("rbf", 20),
    ],
    ids=lambda kappa: kappa.name,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_a_denormal_number(kappa, dtype) -> None:
    made = kp.Head(3, 1, kp.HeadSpec(kappa), dtype=dtype, seed=0)
    values = made.expand(torch.linspace(-60, 60, 3003, dtype=dtype).reshape(-1, 3)).dense().detach().abs()
    assert bool(((values == 0) | (values >= torch.finfo(dtype).tiny)).all())
    assert 0 < float(values[values > 0].min()) < 1e-9  # near to where they begin


@each_kind
def test_given_centers_and_widths_of_a_specification(kind, tmp_path) -> None:
    kappa = kind((0.0, 1.0, 5.0), width=(1.0, 2.0, 0.5))
    spec = kp.rpn([2, 1], expansion=kappa)
    kp.save_spec(spec, tmp_path / "spec.yaml")
    assert kp.load_spec(tmp_path / "spec.yaml") == spec
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    kp.save(kp.calibrate(model, skewed()), tmp_path / "model.safetensors")
    loaded = next(kp.load(tmp_path / "model.safetensors").heads())[1]
    x = skewed(50) / 10
    u = (x.unsqueeze(1) - torch.tensor([0.0, 1.0, 5.0])[:, None]) / torch.tensor([1.0, 2.0, 0.5])[:, None]
    expected = torch.exp(-u.square()) if kind is kp.GaussianRBF else 1 / (1 + u.square())
    torch.testing.assert_close(loaded.expand(x).dense(), expected.flatten(1).double())
    assert kappa.domain(2) == ((6, 0.0, 5.0),)


@each_kind
def test_calibration_places_centers_and_keeps_a_given_width(kind) -> None:
    x = skewed()
    made = kp.calibrate(head(kind(4, width=0.3), 2), x)
    np.testing.assert_allclose(made.kappa["log_width"].exp(), 0.3)
    np.testing.assert_allclose(made.kappa["centers"], kp.calibrate(head(kind(4), 2), x).kappa["centers"])


@each_kind
def test_given_centers_take_their_widths_from_their_distances(kind) -> None:
    made = head(kind((0.0, 1.0, 4.0), overlap=0.5))
    np.testing.assert_allclose(made.kappa["log_width"].exp()[:, 0], [0.5, 1.0, 1.5])
    for single in (head(kind((2.0,))), head(kind(1))):
        np.testing.assert_allclose(single.kappa["log_width"].exp(), 4.0)
    assert kind((2.0,), width=0.5).domain(1) == ((1, 1.5, 2.5),)


@each_kind
def test_options_without_effect_beside_given_ones_are_refused(kind) -> None:
    for options, name in (
        ({"centers": (0.0, 1.0), "low": 0.0}, "low"),
        ({"centers": (0.0, 1.0), "placement": "quantile"}, "placement"),
        ({"width": 1.0, "overlap": 2.0}, "overlap"),
    ):
        with pytest.raises(kp.SpecError, match=rf"{name} has no effect with given"):
            kind(**options)
    with pytest.raises(kp.SpecError, match="expected ascending numbers"):
        kind((1.0, 0.0))
    with pytest.raises(kp.SpecError, match="or 5 of them, one for each center"):
        kind(width=(1.0, 2.0))
    with pytest.raises(kp.SpecError, match="from 1e-30"):
        kind(width=0.0)
