"""What wavelets promise beyond their formula."""

from __future__ import annotations

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch
from scipy.differentiate import derivative
from scipy.integrate import quad, simpson
from scipy.stats import beta, norm

import kapsi as kp
from kapsi.expansion.wavelet import sinc

WAVELETS: dict[str, tuple[type[kp.Expansion], dict[str, float]]] = {
    "haar": (kp.HaarWavelet, {}),
    "ricker": (kp.RickerWavelet, {}),
    "dog1": (kp.DerivativeOfGaussianWavelet, {"order": 1}),
    "dog2": (kp.DerivativeOfGaussianWavelet, {"order": 2}),
    "dog5": (kp.DerivativeOfGaussianWavelet, {"order": 5}),
    "dog20": (kp.DerivativeOfGaussianWavelet, {"order": 20}),
    "shannon": (kp.ShannonWavelet, {}),
    "meyer": (kp.MeyerWavelet, {}),
    "beta": (kp.BetaWavelet, {}),
    "beta_skewed": (kp.BetaWavelet, {"alpha": 3.0, "beta": 8.0}),
    "beta_steep": (kp.BetaWavelet, {"alpha": 50.0, "beta": 40.0}),
}
LOCAL = [name for name in WAVELETS if name not in ("shannon", "meyer")]
SMOOTH = [name for name in WAVELETS if name != "haar"]


def values(name: str, x: torch.Tensor | np.ndarray, scales: int = 1, shifts: int = 1, **options: float) -> torch.Tensor:
    """Return all functions of one input, `(rows, scales·shifts)`; the mother wavelet alone by default."""
    kind, own = WAVELETS[name]
    zero = torch.zeros(1, dtype=torch.float64)
    x = torch.as_tensor(x, dtype=torch.float64).reshape(-1, 1)
    return kind(scales=scales, shifts=shifts, **own, **options)(x, {"center": zero, "log_scale": zero}).dense()


def mother(name: str, x: torch.Tensor | np.ndarray) -> np.ndarray:
    return values(name, x)[:, 0].numpy()


def at(name: str, x: float) -> float:
    return float(mother(name, np.array([x]))[0])


@pytest.mark.parametrize("name", LOCAL)
def test_mean_is_zero_and_norm_is_one(name) -> None:
    breaks = [-0.5, 0.0, 0.5] if name == "haar" else np.linspace(-12, 12, 9).tolist()
    mean = sum(quad(lambda x: at(name, x), *ends)[0] for ends in pairwise(breaks))
    square = sum(quad(lambda x: at(name, x) ** 2, *ends)[0] for ends in pairwise(breaks))
    assert mean == pytest.approx(0, abs=1e-9)
    assert square == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("name", "tolerance"), [("shannon", 1e-3), ("meyer", 1e-8)])
def test_mean_and_norm_of_wavelets_with_tails(name, tolerance) -> None:
    # Tails fall as 1/u and 1/u², so the range is long: what is left out of the norm is their square.
    end = 1000
    x = np.linspace(-end, end, 2 * end * 64 + 1)
    psi = mother(name, x)
    assert simpson(psi**2, x=x) == pytest.approx(1, abs=tolerance)
    assert simpson(psi, x=x) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(("name", "tolerance"), [("haar", 1e-10), ("shannon", 1e-3), ("meyer", 1e-8)])
def test_wavelets_one_unit_apart_are_orthonormal(name, tolerance) -> None:
    if name == "haar":
        x = np.arange(-2, 2, 1 / 64) + 1 / 128  # cell by cell, exact for steps
        step = 1 / 64
    else:
        x = np.linspace(-1000, 1000, 2 * 1000 * 32 + 1)
        step = 1 / 32
    psi = values(name, x, shifts=4).numpy()
    np.testing.assert_allclose(psi.T @ psi * step, np.eye(4), atol=tolerance)


@pytest.mark.parametrize("name", ["haar", "shannon", "meyer"])
def test_coarser_wavelets_are_orthogonal_to_finer_ones_on_the_dyadic_grid(name) -> None:
    # ψ(x) and ψ((x − ½)/2)/√2: where both begin at an integer multiple of their scale, in the centered form.
    x = np.arange(-1000, 1000, 1 / 32) + 1 / 64
    fine, coarse = mother(name, x), mother(name, (x - 0.5) / 2) / math.sqrt(2)
    assert float(fine @ coarse) / 32 == pytest.approx(0, abs=1e-3 if name == "shannon" else 1e-6)


def test_haar_is_two_steps() -> None:
    x = [-0.51, -0.5, -0.01, 0.0, 0.49, 0.5, 1e3]
    assert mother("haar", np.array(x)).tolist() == [0, 1, 1, -1, -1, 0, 0]


def test_ricker_is_minus_the_second_derivative_of_a_gaussian() -> None:
    x = np.linspace(-4, 4, 33)
    slope = derivative(lambda v: -v * norm.pdf(v), x, initial_step=0.1)  # of the first derivative
    expected = -slope.df / math.sqrt(quad(lambda v: ((v**2 - 1) * norm.pdf(v)) ** 2, -12, 12, epsabs=1e-14)[0])
    np.testing.assert_allclose(mother("ricker", x), expected, atol=1e-9)
    np.testing.assert_allclose(mother("dog2", x), expected, atol=1e-9)


@pytest.mark.parametrize("name", ["dog1", "dog5", "dog20"])
def test_derivatives_of_a_gaussian_have_as_many_vanishing_moments_as_their_order(name) -> None:
    order = int(WAVELETS[name][1]["order"])
    x = np.linspace(-14, 14, 2801)
    psi = mother(name, x)
    for k in range(order):
        size = simpson(np.abs(x**k * psi), x=x)
        assert abs(simpson(x**k * psi, x=x)) < 1e-9 * size
    assert abs(simpson(x**order * psi, x=x)) > 1e-9 * simpson(np.abs(x**order * psi), x=x)
    assert int((np.diff(np.sign(psi[(x > -9) & (x < 9)])) != 0).sum()) >= order


def test_beta_wavelet_is_minus_the_slope_of_the_standard_density() -> None:
    for name in ("beta", "beta_skewed", "beta_steep"):
        options = {"alpha": 4.0, "beta": 4.0, **WAVELETS[name][1]}
        a, b = options["alpha"], options["beta"]
        deviation = beta(a, b).std()
        density = beta(a, b, loc=-beta(a, b).mean() / deviation, scale=1 / deviation)
        low, high = density.support()
        x = np.linspace(low + 0.1, high - 0.1, 41)
        slope = -derivative(density.pdf, x, initial_step=0.02).df
        psi = mother(name, x)
        largest = np.abs(slope).argmax()
        np.testing.assert_allclose(psi / psi[largest], slope / slope[largest], atol=1e-8)
        assert psi[largest] * slope[largest] > 0
        assert mother(name, np.array([low - 1e-9, high + 1e-9, -1e3, 1e3])).tolist() == [0.0] * 4


def meyer_by_quadrature(u: float) -> float:
    """Return ψ(u) from its Fourier transform, with the transition ν(x) = x."""
    low = quad(
        lambda w: math.sin(math.pi / 2 * (3 * w / (2 * math.pi) - 1)) * math.cos(w * u),
        2 * math.pi / 3,
        4 * math.pi / 3,
        epsabs=1e-13,
        limit=500,
    )
    high = quad(
        lambda w: math.cos(math.pi / 2 * (3 * w / (4 * math.pi) - 1)) * math.cos(w * u),
        4 * math.pi / 3,
        8 * math.pi / 3,
        epsabs=1e-13,
        limit=500,
    )
    return (low[0] + high[0]) / math.pi


def test_meyer_equals_its_fourier_integral_at_and_near_the_poles_of_the_quotients() -> None:
    points = [p * sign for p in (0.0, 0.375, 0.75) for sign in (1, -1)]
    x = [p + d for p in points for d in (0.0, 1e-12, 1e-8, -1e-5, 1e-3, 0.1)] + [5.3, -31.7, 200.123]
    expected = [meyer_by_quadrature(u) for u in x]
    np.testing.assert_allclose(mother("meyer", np.array(x)), expected, rtol=0, atol=1e-12)


def test_meyer_equals_the_quotients_of_valenzuela_and_de_oliveira() -> None:
    x = np.concatenate((np.linspace(-1000, 1000, 4001) + 0.0123, np.linspace(-3, 3, 301) + 0.00321))
    pi = math.pi
    first = 4 / (3 * pi) * x * np.cos(2 * pi / 3 * x) - np.sin(4 * pi / 3 * x) / pi
    second = 8 / (3 * pi) * x * np.cos(8 * pi / 3 * x) + np.sin(4 * pi / 3 * x) / pi
    expected = first / (x - 16 / 9 * x**3) + second / (x - 64 / 9 * x**3)
    np.testing.assert_allclose(mother("meyer", x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["shannon", "meyer"])
@pytest.mark.parametrize("point", [0.0, 1e-9, 0.375, 0.75, 0.375 + 1e-9, 0.75 - 1e-7, 1 / math.pi])
def test_derivatives_hold_at_removable_poles(name, point) -> None:
    x = torch.tensor(point, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(values(name, x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    if name == "shannon":  # ψ(u) = (1/π) ∫ cos(ωu) dω from π to 2π

        def spectrum(w: float) -> float:
            return 1.0

        bands = [(math.pi, 2 * math.pi)]
    else:

        def spectrum(w: float) -> float:
            return -math.cos(0.75 * w) if w < 4 * math.pi / 3 else math.sin(0.375 * w)

        bands = [(2 * math.pi / 3, 4 * math.pi / 3), (4 * math.pi / 3, 8 * math.pi / 3)]
    for ours, integrand in (
        (first, lambda w: -w * math.sin(w * point)),
        (second, lambda w: -(w**2) * math.cos(w * point)),
    ):
        expected = sum(quad(lambda w, f=integrand: spectrum(w) * f(w), *band, epsabs=1e-13)[0] for band in bands)
        assert float(ours.detach()) == pytest.approx(expected / math.pi, abs=1e-10)


@pytest.mark.parametrize("name", SMOOTH)
def test_value_and_gradients_are_finite_however_far(name) -> None:
    kind, own = WAVELETS[name]
    x = torch.tensor([0.0, 3.0, -3.0, 1e3, -1e3, 1e10, 1e30]).reshape(-1, 1).requires_grad_()
    tensors = {"center": torch.zeros(1), "log_scale": torch.zeros(1)}
    made = kind(scales=2, shifts=3, **own)(x, tensors).dense()
    (first,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    for tensor in (made, first, second):
        assert bool(tensor.isfinite().all())


def test_second_derivative_of_a_beta_wavelet_is_finite_at_the_ends_of_its_interval() -> None:
    options = {"alpha": 3.5, "beta": 3.0}
    deviation = beta(*options.values()).std()
    ends = [-beta(*options.values()).mean() / deviation, (1 - beta(*options.values()).mean()) / deviation]
    x = torch.tensor(ends, dtype=torch.float64).reshape(-1, 1).requires_grad_()
    zero = torch.zeros(1, dtype=torch.float64)
    made = kp.BetaWavelet(scales=1, shifts=1, **options)(x, {"center": zero, "log_scale": zero}).dense()
    (first,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    np.testing.assert_allclose(made.detach().numpy(), 0, atol=1e-12)
    assert bool(second.isfinite().all())


@pytest.mark.parametrize("name", WAVELETS)
def test_scales_and_shifts_are_those_of_the_mother_wavelet(name) -> None:
    x = np.linspace(-6, 6, 97) + 0.013
    made = values(name, x, scales=3, shifts=4, dilation=1.5).numpy()
    column = 0
    for scale in (1.0, 1.5, 2.25):
        for place in (-1.5, -0.5, 0.5, 1.5):
            expected = mother(name, (x - place) / scale) / math.sqrt(scale)
            np.testing.assert_allclose(made[:, column], expected, atol=1e-12)
            column += 1
    assert column == made.shape[1]


@pytest.mark.parametrize("name", ["haar", "meyer"])
def test_calibration_moves_the_grid_onto_the_data(name) -> None:
    kind, own = WAVELETS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(500, 2, generator=generator, dtype=torch.float64) * torch.tensor([1e-3, 200.0]) + 40
    kappa = kind(scales=2, shifts=5, **own)
    head = kp.calibrate(kp.Head(2, 1, kp.HeadSpec(kappa), dtype=torch.float64), x)
    low, high = x.numpy().min(0), x.numpy().max(0)
    np.testing.assert_allclose(head.kappa["center"], (low + high) / 2)
    np.testing.assert_allclose(head.kappa["log_scale"].exp(), (high - low) / 5)
    # On the range of the data, now five units around zero, all are at work; steps are not compared at the very ends.
    x = x[((x > torch.from_numpy(low)) & (x < torch.from_numpy(high))).all(1)]
    z = (x - torch.from_numpy(high + low) / 2) / torch.from_numpy((high - low) / 5)
    same = torch.cat([values(name, z[:, i], scales=2, shifts=5) for i in range(2)], 1)
    made = head.expand(x).dense().unflatten(1, (10, 2)).transpose(1, 2).flatten(1)
    torch.testing.assert_close(made, same, rtol=0, atol=1e-9)
    assert bool((made.abs().amax(0) > 0.1).all())


def test_wrong_options_say_what_is_allowed() -> None:
    with pytest.raises(kp.SpecError, match=r"BetaWavelet\(alpha=2\.5\): alpha must be at least 3"):
        kp.BetaWavelet(alpha=2.5)
    with pytest.raises(kp.SpecError, match=r"order must be at most 20"):
        kp.DerivativeOfGaussianWavelet(order=21)
    with pytest.raises(kp.SpecError, match=r"dilation must be at least 1\.1"):
        kp.HaarWavelet(dilation=1.0)


@pytest.mark.parametrize("order", range(5))
def test_derivatives_of_the_quotient_near_its_pole_and_far(order) -> None:
    places = np.concatenate([[0.0], np.geomspace(1e-9, 60, 200)])
    places = np.concatenate([places, -places])
    y = torch.tensor(places).requires_grad_()
    made = sinc(y)
    for _ in range(order):
        (made,) = torch.autograd.grad(made.sum(), y, create_graph=True)
    with mpmath.workdps(30):
        # S⁽ᵏ⁾(y) = ∫ tᵏ cos(ty + kπ/2) over 0 ≤ t ≤ 1
        expected = [
            float(
                mpmath.quad(
                    lambda t, at=at: t**order * mpmath.cos(t * at + order * mpmath.pi / 2), mpmath.linspace(0, 1, 9)
                )
            )
            for at in places[::20]
        ]
    np.testing.assert_allclose(made.detach().numpy()[::20], expected, rtol=0, atol=1e-12)
