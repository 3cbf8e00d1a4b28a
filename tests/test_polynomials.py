"""What polynomials by three-term recurrence promise: orthogonality, identities, special cases, and their ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import scipy.special as special
import torch

import kapsi as kp
from kapsi.expansion.orthogonal import ThreeTerm


def values(kappa: kp.Expansion, x: np.ndarray) -> np.ndarray:
    """Return all polynomials of one input, `(points, d)`."""
    return kappa(torch.from_numpy(np.asarray(x, dtype=np.float64)).reshape(-1, 1), {}).dense().numpy()


def slopes(kappa: kp.Expansion, x: np.ndarray) -> np.ndarray:
    """Return the derivatives of all polynomials of one input, by automatic differentiation."""
    points = torch.from_numpy(np.asarray(x, dtype=np.float64)).requires_grad_()
    columns = kappa(points.unsqueeze(-1), {}).dense().unbind(-1)
    each = [torch.autograd.grad(column.sum(), points, retain_graph=True)[0] for column in columns]
    return torch.stack(each, -1).numpy()


# ------------------------------------------------------------------------------------------------ orthogonality

# Gauss quadrature of SciPy under each weight, and the norm of P_k under it as DLMF 18.3 has it.
ORTHOGONAL: list[tuple[kp.Expansion, Callable[[int], tuple[np.ndarray, np.ndarray]], Callable[[int], float]]] = [
    (kp.Chebyshev(10), special.roots_chebyt, lambda k: math.pi / 2),
    (kp.ChebyshevSecond(10), special.roots_chebyu, lambda k: math.pi / 2),
    (kp.Legendre(10), special.roots_legendre, lambda k: 2 / (2 * k + 1)),
    (
        kp.Jacobi(10, 0.5, -0.75),
        lambda n: special.roots_jacobi(n, 0.5, -0.75),
        lambda k: (
            2**0.75
            / (2 * k + 0.75)
            * math.exp(math.lgamma(k + 1.5) + math.lgamma(k + 0.25) - math.lgamma(k + 0.75) - math.lgamma(k + 1))
        ),
    ),
    (
        kp.Gegenbauer(10, 2.5),
        lambda n: special.roots_gegenbauer(n, 2.5),
        lambda k: 2**-4 * math.pi * math.gamma(k + 5) / ((k + 2.5) * math.gamma(2.5) ** 2 * math.factorial(k)),
    ),
    (kp.Hermite(10), special.roots_hermitenorm, lambda k: math.sqrt(2 * math.pi) * math.factorial(k)),
    (
        kp.Hermite(10, "physicist"),
        special.roots_hermite,
        lambda k: math.sqrt(math.pi) * 2**k * math.factorial(k),
    ),
    (kp.Laguerre(10), special.roots_laguerre, lambda k: 1.0),
    (
        kp.Laguerre(10, 1.5),
        lambda n: special.roots_genlaguerre(n, 1.5),
        lambda k: math.gamma(k + 2.5) / math.factorial(k),
    ),
]


@pytest.mark.parametrize(("kappa", "roots", "norm"), ORTHOGONAL, ids=[repr(case[0]) for case in ORTHOGONAL])
def test_polynomials_are_orthogonal_under_their_weight(kappa, roots, norm) -> None:
    nodes, weights = roots(16)
    # Each divided by its norm, and the constant that is left out in front.
    basis = values(kappa, nodes) / np.sqrt([norm(k) for k in range(1, kappa.degree + 1)])
    basis = np.column_stack((np.full(16, 1 / math.sqrt(weights.sum())), basis))
    np.testing.assert_allclose(basis.T @ (weights[:, None] * basis), np.eye(11), rtol=0, atol=1e-11)


# ------------------------------------------------------------------------------------------------ identities

SPECIAL_CASES = [
    (kp.Jacobi(9, 0.0, 0.0), kp.Legendre(9), lambda k: 1.0),
    (kp.Gegenbauer(9, 0.5), kp.Legendre(9), lambda k: 1.0),
    (kp.Gegenbauer(9, 1.0), kp.ChebyshevSecond(9), lambda k: 1.0),
    # DLMF 18.7.3 to 18.7.5, and 18.7.1.
    (kp.Jacobi(9, -0.5, -0.5), kp.Chebyshev(9), lambda k: special.eval_jacobi(k, -0.5, -0.5, 1.0)),
    (kp.Jacobi(9, 0.5, 0.5), kp.ChebyshevSecond(9), lambda k: special.eval_jacobi(k, 0.5, 0.5, 1.0) / (k + 1)),
    (kp.Jacobi(9, 1.3, 1.3), kp.Gegenbauer(9, 1.8), lambda k: special.poch(2.3, k) / special.poch(3.6, k)),
]


@pytest.mark.parametrize(("one", "other", "ratio"), SPECIAL_CASES, ids=[repr(case[0]) for case in SPECIAL_CASES])
def test_special_cases_are_the_other_family(one, other, ratio) -> None:
    x = np.linspace(-1.5, 1.5, 31)
    ratios = np.array([ratio(k) for k in range(1, 10)])
    np.testing.assert_allclose(values(one, x), ratios * values(other, x), rtol=1e-11, atol=1e-11)


DERIVATIVES = [
    (kp.Chebyshev(8), kp.ChebyshevSecond(8), lambda k: k),
    (kp.Gegenbauer(8, 0.7), kp.Gegenbauer(8, 1.7), lambda k: 1.4),
    (kp.Jacobi(8, 0.3, 1.2), kp.Jacobi(8, 1.3, 2.2), lambda k: (k + 2.5) / 2),
    (kp.Hermite(8), kp.Hermite(8), lambda k: k),
    (kp.Hermite(8, "physicist"), kp.Hermite(8, "physicist"), lambda k: 2 * k),
    (kp.Laguerre(8, 0.5), kp.Laguerre(8, 1.5), lambda k: -1),
]


@pytest.mark.parametrize(("kappa", "other", "factor"), DERIVATIVES, ids=[repr(case[0]) for case in DERIVATIVES])
def test_derivatives_are_the_next_family_one_degree_lower(kappa, other, factor) -> None:
    x = np.linspace(-1.4, 2.1, 29)
    lower = np.column_stack((np.ones(29), values(other, x)[:, :-1]))
    factors = np.array([factor(k) for k in range(1, 9)])
    np.testing.assert_allclose(slopes(kappa, x), factors * lower, rtol=1e-11, atol=1e-11)


def test_laguerre_has_the_signs_of_its_explicit_forms() -> None:
    x = np.array([-2.0, 0.0, 1.0, 3.0, 7.0])
    expected = np.column_stack((1 - x, (x**2 - 4 * x + 2) / 2, (-(x**3) + 9 * x**2 - 18 * x + 6) / 6))
    np.testing.assert_allclose(values(kp.Laguerre(3), x), expected, rtol=1e-13, atol=1e-13)


def test_conventions_of_hermite_are_scaled_copies() -> None:
    x = np.linspace(-3, 3, 13)
    scale = 2.0 ** (np.arange(1, 7) / 2)
    expected = scale * values(kp.Hermite(6), math.sqrt(2) * x)
    np.testing.assert_allclose(values(kp.Hermite(6, "physicist"), x), expected, rtol=1e-12, atol=1e-12)


def test_fibonacci_and_lucas_polynomials_are_the_numbers_at_one_and_agree() -> None:
    assert values(kp.Fibonacci(8), [1.0])[0].tolist() == [1, 2, 3, 5, 8, 13, 21, 34]
    assert values(kp.Lucas(8), [1.0])[0].tolist() == [1, 3, 4, 7, 11, 18, 29, 47]
    # Binet: the powers of the two roots of t² = x t + 1.
    x = np.linspace(-2, 2, 9)[:, None]
    k = np.arange(1, 9)
    up, down = (x + np.sqrt(x**2 + 4)) / 2, (x - np.sqrt(x**2 + 4)) / 2
    np.testing.assert_allclose(values(kp.Lucas(8), x), up**k + down**k, rtol=1e-11, atol=1e-11)
    fibonacci = (up ** (k + 1) - down ** (k + 1)) / (up - down)
    np.testing.assert_allclose(values(kp.Fibonacci(8), x), fibonacci, rtol=1e-11, atol=1e-11)


def test_bessel_polynomials_are_those_of_the_modified_bessel_function() -> None:
    # DLMF 10.49.12 and 18.34: θ_k(x) = √(2/π) e^x x^(k + ½) K_{k+½}(x), and y_k(x) = x^k θ_k(1/x).
    x, k = np.linspace(0.3, 3, 10)[:, None], np.arange(1, 7)
    reverse = np.sqrt(2 / math.pi) * x ** (k + 0.5) * special.kve(k + 0.5, x)
    np.testing.assert_allclose(values(kp.ReverseBessel(6), x), reverse, rtol=1e-11)
    np.testing.assert_allclose(values(kp.Bessel(6), 1 / x), reverse / x**k, rtol=1e-11)


# ------------------------------------------------------------------------------------------------ high degrees


@pytest.mark.parametrize(
    ("kappa", "exact"),
    [
        (kp.Legendre(200), mpmath.legendre),
        (kp.Chebyshev(200), mpmath.chebyt),
        (kp.ChebyshevSecond(200), mpmath.chebyu),
        (kp.Jacobi(200, -0.9, 0.4), lambda k, x: mpmath.jacobi(k, -0.9, 0.4, x)),
        (kp.Jacobi(200, -0.5, -0.5), lambda k, x: mpmath.jacobi(k, -0.5, -0.5, x)),
        (kp.Gegenbauer(200, 0.25), lambda k, x: mpmath.gegenbauer(k, 0.25, x)),
        (kp.Laguerre(200), lambda k, x: mpmath.laguerre(k, 0, x)),
    ],
    ids=lambda value: repr(value) if isinstance(value, kp.Expansion) else "",
)
def test_high_degrees_are_accurate(kappa, exact) -> None:
    x = np.array([0.01, 0.123, 0.51, 0.97, 1.0])  # mpmath's series has trouble with exact zeros
    ours = values(kappa, x)
    with mpmath.workdps(120):
        for k in (50, 131, 200):
            expected = [float(exact(k, mpmath.mpf(float(point)))) for point in x]
            np.testing.assert_allclose(ours[:, k - 1], expected, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------------ turning points

LARGEST = [
    kp.Chebyshev(1000),
    kp.ChebyshevSecond(1000),
    kp.Legendre(1000),
    kp.Jacobi(1000),
    kp.Jacobi(30, 9.0, -0.9),
    kp.Gegenbauer(1000),
    kp.Gegenbauer(10, 100.0),
    kp.Hermite(27),
    kp.Hermite(27, "physicist"),
    kp.Laguerre(1000),
    kp.Laguerre(30, 5.0),
    kp.Fibonacci(100),
    kp.Lucas(100),
    kp.Bessel(20),
    kp.ReverseBessel(20),
]


@pytest.mark.parametrize("kappa", LARGEST, ids=repr)
def test_the_highest_degrees_are_finite_in_single_precision(kappa) -> None:
    x = torch.cat((torch.linspace(-1000, 1000, 401), torch.linspace(-3, 3, 401))).requires_grad_()
    basis = kappa(x.reshape(-1, 1), {}).dense()
    assert bool(basis.isfinite().all())
    assert bool(torch.autograd.grad(basis.sum(), x)[0].isfinite().all())


SCIPYS = [
    (kp.Legendre(14), special.eval_legendre),
    (kp.Jacobi(14, 2.0, -0.5), lambda k, x: special.eval_jacobi(k, 2.0, -0.5, x)),
    (kp.Hermite(14), special.eval_hermitenorm),
    (kp.Laguerre(40), special.eval_laguerre),
]


@pytest.mark.parametrize(("kappa", "polynomial"), SCIPYS, ids=[repr(case[0]) for case in SCIPYS])
@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_polynomials_turn_where_the_first_passes_the_largest_value(kappa, polynomial, side) -> None:
    def largest(r: float) -> float:
        return max(abs(polynomial(k, side * r)) for k in range(1, kappa.degree + 1))

    low, high = 1.0, 1000.0
    assert largest(low) < 1e30 < largest(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if largest(middle) < 1e30 else (low, middle)
    turn = side * low
    # Unchanged up to there.
    inside = turn * np.linspace(0, 1 - 1e-9, 50)
    ours = values(kappa, inside)
    for k in range(1, kappa.degree + 1):
        expected = polynomial(k, inside)
        np.testing.assert_allclose(ours[:, k - 1], expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    # The tangent beyond, all on one line from just inside.
    far = turn + side * np.array([0.0, 1.0, 10.0, 500.0])
    beyond, start, slope = values(kappa, far), values(kappa, [turn])[0], slopes(kappa, [turn * (1 - 1e-10)])[0]
    np.testing.assert_allclose(beyond, start + slope * (far - turn)[:, None], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(slopes(kappa, far[1:]), np.tile(slope, (3, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("kappa", "polynomial"),
    [
        (kp.Legendre(9), special.eval_legendre),
        (kp.Hermite(9), special.eval_hermitenorm),
        (kp.Laguerre(11), special.eval_laguerre),
    ],
    ids=["legendre", "hermite", "laguerre"],
)
def test_low_degrees_have_no_turning_point(kappa, polynomial) -> None:
    x = np.array([-1e5, -1000.0, 1000.0, 1e5])
    expected = np.column_stack([polynomial(k, x) for k in range(1, kappa.degree + 1)])
    np.testing.assert_allclose(values(kappa, x), expected, rtol=1e-9)


def test_sides_turn_on_their_own() -> None:
    # All coefficients of θ₂₀ are positive: on the left terms cancel, and it passes 10³⁰ farther out.
    kappa = kp.ReverseBessel(20)
    edge = slopes(kappa, [-30.0, -35.0, 25.0, 30.0])[:, -1]
    assert edge[0] != edge[1]  # a polynomial still on the left
    assert edge[2] == edge[3]  # a line already on the right


# ------------------------------------------------------------------------------------------------ options


def test_domains_are_those_of_the_weights() -> None:
    assert kp.Jacobi(2).domain(3) == ((6, -1.0, 1.0),)
    assert kp.Laguerre(2).domain(3) == ((6, 0.0, math.inf),)
    assert kp.Hermite(2).domain(3) == ((6, -math.inf, math.inf),)


@pytest.mark.parametrize("degree", [4, 5])
def test_degrees_above_four_are_heavy_tailed(degree) -> None:
    for kind in (kp.Chebyshev, kp.Hermite, kp.Laguerre, kp.Bessel):
        assert kind(degree).heavy_tailed() == (degree > 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: kp.Jacobi(3, -1.0, 0.0),
            r"Jacobi\(degree=3, alpha=-1\.0, beta=0\.0\): alpha and beta must be above -1",
        ),
        (lambda: kp.Jacobi(3, 0.0, -1.0), "alpha and beta must be above -1"),
        (lambda: kp.Gegenbauer(3, 0.0), "alpha must be above -0.5 and at least 0.1 from zero"),
        (lambda: kp.Gegenbauer(3, -1e-9), "alpha must be above -0.5 and at least 0.1 from zero"),
        (lambda: kp.Gegenbauer(3, -0.5), "alpha must be above -0.5 and at least 0.1 from zero"),
        (lambda: kp.Laguerre(3, -1.0), "alpha must be above -1"),
        (lambda: kp.Hermite(28), "degree must be at most 27"),
        (lambda: kp.Hermite(3, "chemist"), "expected one of probabilist, physicist"),
        (
            lambda: kp.Jacobi(1000, 50.0, 0.0),
            r"a polynomial passes 1e\+30 within \|x\| <= 1; choose a lower degree or smaller parameters",
        ),
    ],
    ids=[
        "jacobi-alpha",
        "jacobi-beta",
        "gegenbauer-zero",
        "gegenbauer-near-zero",
        "gegenbauer-half",
        "laguerre",
        "degree",
        "name",
        "size",
    ],
)
def test_wrong_options_say_what_is_allowed(make, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        make()


# ------------------------------------------------------------------------------------------------ written-out derivatives

FAMILY = [
    cls(**options)
    for cls in vars(kp).values()
    if isinstance(cls, type) and issubclass(cls, ThreeTerm) and cls.name
    for options in cls.examples
]


@pytest.mark.parametrize("kappa", FAMILY, ids=repr)
def test_derivatives_equal_those_of_torch(kappa) -> None:
    low, high = (max(-1000.0, kappa._ends.low), min(1000.0, kappa._ends.high))
    places = torch.tensor(
        [low - 3.0, 0.9 * low, -1.0, -0.3, 0.0, 0.45, 1.0, 0.9 * high, high + 3.0], dtype=torch.float64
    )
    x = torch.stack((places, places.flip(0)), -1).requires_grad_()
    results = []
    for way in (kappa._in_place, kappa._differentiable):
        y = way(x)
        scale = y.detach().abs().amax(0).clamp_min(1)  # of each polynomial: T₁₂ and T₁ have little in common
        made = [y / scale]
        for _ in range(3):
            made.append(torch.autograd.grad(made[-1].sum(), x, create_graph=True, materialize_grads=True)[0])
            if not made[-1].requires_grad:
                break
        results.append([each.detach() for each in made])
    for ours, theirs in zip(*results, strict=False):
        size = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10 * max(1.0, size))


def test_polynomials_keep_their_inputs_and_no_more() -> None:
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.rand(32, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kp.Chebyshev(20)(x, {}).dense()
    assert kept == [x.numel()]


@pytest.mark.parametrize("degree", [3, 20])
def test_not_a_number_stays_one_in_every_derivative(degree) -> None:
    x = torch.tensor([torch.nan, 0.5], requires_grad=True)
    made = kp.Chebyshev(degree)(x, {}).dense()
    for _ in range(4):
        assert made.unflatten(-1, (-1, 2)).isnan().any(-2).tolist() == [True, False]
        (made,) = torch.autograd.grad(made.sum(), x, create_graph=True)
