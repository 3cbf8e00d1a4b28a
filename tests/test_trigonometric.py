"""What trigonometric and hyperbolic functions, Fourier series, reciprocals and linear maps promise."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import kapsi as kp


def columns(kappa: kp.Expansion, x: torch.Tensor) -> torch.Tensor:
    """Return the functions of one input, `(points, functions)`."""
    return kappa(x.reshape(-1, 1), {}).dense()


def values(kappa: kp.Expansion, *x: float) -> np.ndarray:
    return columns(kappa, torch.tensor(x, dtype=torch.float64)).numpy()


def slopes(kappa: kp.Expansion, *x: float) -> np.ndarray:
    points = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    each = columns(kappa, points).unbind(-1)
    return torch.stack([torch.autograd.grad(c.sum(), points, retain_graph=True)[0] for c in each], -1).numpy()


def smooth_at(kappa: kp.Expansion, point: float, tolerance: float) -> None:
    """Fail unless values and slopes are the same on both sides of a point."""
    step = 1e-9 * max(1.0, abs(point))
    for of in (values, slopes):
        left, right = of(kappa, point - step, point + step)
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------ Fourier


@pytest.mark.parametrize("period", [0.7, 2.0, 2 * math.pi, 24.0, 1000 / 3])
def test_fourier_series_repeat_with_their_period(period) -> None:
    x = np.linspace(-1, 1, 9) * period
    kappa = kp.Fourier(period, 7)
    np.testing.assert_allclose(values(kappa, *(x + 3 * period)), values(kappa, *x), rtol=0, atol=1e-12)
    half = values(kappa, *(x + period / 2))
    odd = np.repeat([(-1.0) ** k for k in range(1, 8)], 2)
    np.testing.assert_allclose(half, odd * values(kappa, *x), rtol=0, atol=1e-12)


def test_fourier_series_are_orthogonal_and_have_zero_mean() -> None:
    points = 5.0 * np.arange(32) / 32
    waves = values(kp.Fourier(5.0, 6), *points)
    np.testing.assert_allclose(waves.mean(0), np.zeros(12), atol=1e-14)
    np.testing.assert_allclose(waves.T @ waves, 16 * np.eye(12), atol=1e-12)


def test_fourier_columns_are_cosine_and_sine_of_each_harmonic() -> None:
    # At an eighth of the period: 45, 90, 135 degrees.
    root = math.sqrt(0.5)
    np.testing.assert_allclose(values(kp.Fourier(8.0, 3), 1.0)[0], [root, root, 0, 1, -root, root], atol=1e-15)


@pytest.mark.parametrize("period", [0.37, 2.0, 2 * math.pi, 10.0, 24.0])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 32 * 2**-23), (torch.float64, 1e-10)])
def test_fourier_series_are_accurate_far_from_zero(dtype, limit, period) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(300, generator=generator, dtype=torch.float64) * 2000 - 1000).to(dtype)
    ours = columns(kp.Fourier(period, 20), x).double().numpy()
    # Turns as exact fractions, of which whole ones are taken off without an error.
    exact_period = Fraction(period)
    turns = [Fraction(value) / exact_period for value in x.tolist()]
    for k in (1, 2, 7, 20):
        angle = 2 * math.pi * np.array([float(k * t - round(k * t)) for t in turns])
        np.testing.assert_allclose(ours[:, 2 * k - 2], np.cos(angle), rtol=0, atol=limit)
        np.testing.assert_allclose(ours[:, 2 * k - 1], np.sin(angle), rtol=0, atol=limit)


def test_calibration_leaves_the_period_alone() -> None:
    model = kp.Model(kp.rpn([2, 1], expansion=kp.Fourier(24.0, 2)), seed=0)
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    before = model(x)
    kp.calibrate(model, x * 100)
    assert torch.equal(model(x), before)


# ------------------------------------------------------------------------------------------------ identities


def test_functions_keep_their_identities() -> None:
    x = np.linspace(-0.9, 0.9, 37)
    cosine, sine, tangent = values(kp.Trigonometric(), *x).T
    np.testing.assert_allclose(cosine**2 + sine**2, 1, rtol=1e-14)
    np.testing.assert_allclose(tangent, sine / cosine, rtol=1e-13)
    cosine, sine, tangent = values(kp.Hyperbolic(), *x).T
    np.testing.assert_allclose(cosine**2 - sine**2, 1, rtol=1e-13)
    np.testing.assert_allclose(tangent, sine / cosine, rtol=1e-13)
    inverse = values(kp.InverseTrigonometric(), *x)
    np.testing.assert_allclose(inverse[:, 0] + inverse[:, 1], math.pi / 2, rtol=1e-14)
    for column, function in enumerate((np.cos, np.sin, np.tan)):
        np.testing.assert_allclose(function(inverse[:, column]), x, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.tanh(values(kp.InverseHyperbolic(), *x)[:, 2]), x, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.sinh(values(kp.InverseHyperbolic(), *x)[:, 1]), x, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.cosh(values(kp.InverseHyperbolic(), *(2 + x))[:, 0]), 2 + x, rtol=1e-14)


# ------------------------------------------------------------------------------------------------ beyond the domains


@pytest.mark.parametrize("eps", [0.01, 0.3])
def test_tangent_is_bridged_across_its_poles(eps) -> None:
    kappa = kp.Trigonometric(eps)
    seam = math.atan(1 / eps)
    for turns in (-1, 0, 3):
        shift = turns * math.pi
        smooth_at(kappa, seam + shift, 1e-4)
        smooth_at(kappa, math.pi - seam + shift, 1e-4)
        np.testing.assert_allclose(values(kappa, seam - 1e-6 + shift)[0, 2], math.tan(seam - 1e-6), rtol=1e-9)
        assert abs(values(kappa, math.pi / 2 + shift)[0, 2]) < 1e-9 / eps**2
    # It repeats, and is bounded: the cubic has its peak √(32/27)/ε at c = √(2/3) ε.
    x = np.linspace(-math.pi, math.pi, 20001)
    largest = np.abs(values(kappa, *x)[:, 2]).max()
    assert 1 / eps < largest <= math.sqrt(32 / 27) / eps * (1 + 1e-12)
    assert np.isfinite(slopes(kappa, *x)).all()


@pytest.mark.parametrize("eps", [0.01, 0.3])
def test_reciprocal_is_bridged_across_zero(eps) -> None:
    kappa = kp.Reciprocal(eps)
    smooth_at(kappa, eps, 1e-4)
    smooth_at(kappa, -eps, 1e-4)
    assert values(kappa, 0.0).item() == 0
    assert slopes(kappa, 0.0).item() == pytest.approx(2 / eps**2)
    x = np.linspace(-3, 3, 6001)
    ours = values(kappa, *x)[:, 0]
    exact = np.abs(x) >= eps
    np.testing.assert_allclose(ours[exact], 1 / x[exact], rtol=1e-14)
    np.testing.assert_allclose(ours, -ours[::-1], rtol=0, atol=1e-12 / eps)
    assert np.abs(ours).max() <= math.sqrt(32 / 27) / eps


@pytest.mark.parametrize("cutoff", [0.1, 2.0, 16.0, 30.0])
def test_hyperbolic_functions_go_on_linearly(cutoff) -> None:
    kappa = kp.Hyperbolic(cutoff)
    for end in (-cutoff, cutoff):
        smooth_at(kappa, end, 1e-7)
        far = values(kappa, end, end * 1.5, end * 2)
        np.testing.assert_allclose(np.diff(far[:, :2], 2, axis=0) / far[2, :2], 0, atol=1e-14)
    assert slopes(kappa, 3 * cutoff)[0, :2] == pytest.approx([math.sinh(cutoff), math.cosh(cutoff)])
    assert slopes(kappa, -3 * cutoff)[0, :2] == pytest.approx([-math.sinh(cutoff), math.cosh(cutoff)])
    far = columns(kappa, torch.tensor([-1000.0, 1000.0]))
    assert bool(far.square().isfinite().all())


@pytest.mark.parametrize("margin", [1e-6, 0.01, 0.3])
def test_inverse_functions_go_on_as_tangents(margin) -> None:
    inverse, hyperbolic = kp.InverseTrigonometric(margin), kp.InverseHyperbolic(margin)
    end = 1 - margin
    slope = 1 / math.sqrt(1 - end**2)
    for side in (-1, 1):
        np.testing.assert_allclose(slopes(inverse, side * end, side * 1.0, side * 9.0)[:, 0], -slope, rtol=1e-9)
        np.testing.assert_allclose(slopes(inverse, side * end, side * 1.0, side * 9.0)[:, 1], slope, rtol=1e-9)
        np.testing.assert_allclose(slopes(hyperbolic, side * end, side * 9.0)[:, 2], slope**2, rtol=1e-9)
        # Unchanged just inside.
        near = side * (1 - 1.01 * margin)
        exact = [math.acos(near), math.asin(near), math.atan(near)]
        np.testing.assert_allclose(values(inverse, near)[0], exact, rtol=1e-13)
        np.testing.assert_allclose(values(hyperbolic, near)[0, 1:], [math.asinh(near), math.atanh(near)], rtol=1e-9)
    above = 1 + margin
    slope = 1 / math.sqrt(above**2 - 1)
    np.testing.assert_allclose(slopes(hyperbolic, above, 1.0, 0.0, -9.0)[:, 0], slope, rtol=1e-9)
    start = math.acosh(above)
    np.testing.assert_allclose(values(hyperbolic, above, -9.0)[:, 0], [start, start - slope * (above + 9)], rtol=1e-9)
    np.testing.assert_allclose(values(hyperbolic, 1 + 1.01 * margin)[0, 0], math.acosh(1 + 1.01 * margin), rtol=1e-9)


@pytest.mark.parametrize(
    "kappa",
    [
        kp.InverseTrigonometric(1e-6),
        kp.InverseHyperbolic(1e-6),
        kp.InverseHyperbolic(0.01),
        kp.Hyperbolic(0.1),
        kp.Hyperbolic(30.0),
    ],
    ids=repr,
)
def test_tangents_keep_their_digits_in_single_precision(kappa) -> None:
    # An end is rounded there: the slope of arccosh at 1 + 10⁻⁶, of 707, would be off by 17 from the rounded one.
    x = torch.tensor([-9.0, -2.0, 2.0, 9.0, 100.0, 1000.0])
    np.testing.assert_allclose(columns(kappa, x).numpy(), columns(kappa, x.double()).numpy(), rtol=1e-5)


def test_domains_are_those_of_each_function() -> None:
    everywhere = (-math.inf, math.inf)
    assert kp.InverseTrigonometric().domain(2) == ((4, -1.0, 1.0), (2, *everywhere))
    assert kp.InverseHyperbolic().domain(2) == ((2, 1.0, math.inf), (2, *everywhere), (2, -1.0, 1.0))
    assert kp.Hyperbolic().domain(2) == ((6, *everywhere),)
    heavy = [kp.Trigonometric, kp.Reciprocal]
    light = [kp.Hyperbolic, kp.InverseTrigonometric, kp.InverseHyperbolic, kp.Fourier, kp.LinearExpansion]
    assert [kind().heavy_tailed() for kind in heavy + light] == [True] * 2 + [False] * 5


# ------------------------------------------------------------------------------------------------ linear maps

MATRIX = ((1.0, 2.0, 0.0), (0.0, 1.0, -3.0), (0.5, 0.0, 0.1))


@pytest.mark.parametrize("side", ["post", "pre"])
def test_linear_expansion_multiplies_on_its_side(side) -> None:
    x = np.array([[1.0, 10.0, 100.0], [0.0, -1.0, 2.0]])
    by_hand = {
        "post": [[51.0, 12.0, -20.0], [1.0, -1.0, 3.2]],  # 1·1 + 10·0 + 100·0.5, …
        "pre": [[21.0, -290.0, 10.5], [-2.0, -7.0, 0.2]],  # 1·1 + 2·10, …
    }
    given = kp.Head(3, 1, kp.HeadSpec(kp.LinearExpansion(2.0, side, MATRIX)), dtype=torch.float64, seed=0)
    assigned = kp.Head(3, 1, kp.HeadSpec(kp.LinearExpansion(2.0, side)), dtype=torch.float64, seed=0)
    np.testing.assert_array_equal(assigned.expand(torch.from_numpy(x)).dense().numpy(), 2 * x)
    assigned.assign("expansion", matrix=torch.tensor(MATRIX, dtype=torch.float64))
    for head in (given, assigned):
        made = head.expand(torch.from_numpy(x)).dense().numpy()
        np.testing.assert_allclose(made, 2 * np.array(by_hand[side]), rtol=1e-14)
        assert not any(name.startswith("kappa") for name, _ in head.named_parameters())


def test_the_matrix_is_saved_with_the_model(tmp_path) -> None:
    spec = kp.rpn([3, 2], expansion=kp.LinearExpansion(side="post"))
    model = kp.Model(spec, seed=0)
    model.layers[0].heads[0].assign("expansion", matrix=MATRIX)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    kp.save(model, tmp_path / "model.safetensors")
    again = kp.load(tmp_path / "model.safetensors")
    assert torch.equal(again(x), model(x))
    assert not torch.equal(kp.Model(spec, seed=0)(x), model(x))


def test_a_matrix_in_a_specification_is_plain_data() -> None:
    kappa = kp.LinearExpansion(side="pre", matrix=MATRIX)
    data = kp.to_dict(kappa)
    assert data == {"kind": "linear", "scale": 1.0, "side": "pre", "matrix": [list(row) for row in MATRIX]}
    assert kp.from_dict(data, kp.Expansion) == kappa


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kp.LinearExpansion(0.0), "and not zero"),
        (lambda: kp.LinearExpansion(1e300), r"scale must be 1e-15 to 1e\+15 in size"),
        (lambda: kp.LinearExpansion(matrix=MATRIX), "choose side='post' or side='pre'"),
        (lambda: kp.LinearExpansion(side="left"), "expected one of none, post, pre"),
        (lambda: kp.LinearExpansion(side="pre", matrix=((1.0, 2.0),)), "a square matrix, got rows of 2"),
        (lambda: kp.LinearExpansion(side="pre", matrix=((1.0, 2.0), (1.0,))), "a square matrix, got rows of 2, 1"),
        (lambda: kp.LinearExpansion(side="pre", matrix=()), "a square matrix, got rows of nothing"),
        (
            lambda: kp.Head(4, 1, kp.HeadSpec(kp.LinearExpansion(side="pre", matrix=MATRIX))),
            "expected a matrix 4×4 for 4 inputs, got 3×3",
        ),
        (lambda: kp.Fourier(0.0), "period must be at least 1e-06"),
        (lambda: kp.Fourier(1e300), "period must be at most 1000000000000000"),
        (lambda: kp.Fourier(harmonics=0), "harmonics must be at least 1"),
        (lambda: kp.Reciprocal(0.0), "eps must be at least 1e-06"),
        (lambda: kp.Trigonometric(2.0), "eps must be at most 1.0"),
        (lambda: kp.Hyperbolic(88.0), "cutoff must be at most 30.0"),
        (lambda: kp.InverseHyperbolic(0.0), "margin must be at least 1e-06"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options_say_what_is_allowed(make, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        make()
