"""Each function against its reference, and what families promise."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from scipy.interpolate import BSpline as SciPySpline
from sklearn.preprocessing import PolynomialFeatures

import kapsi as kp
from kapsi.function import LAYER_ROLES, ROLES, catalogue, flatten, lookup
from kapsi.notation import short_form
from kapsi.process import pipeline
from kapsi.testing import inputs, instances
from references import REFERENCES
from references.compare import cases, deviation


def each(role: str) -> list[Any]:
    return [pytest.param(function, id=f"{role}-{short_form(function)}") for function in instances(role)]


def close(ours: torch.Tensor, reference: np.ndarray, tolerance: float = 1e-10) -> None:
    assert ours.dtype == torch.float64
    expected = torch.from_numpy(np.ascontiguousarray(reference, dtype=np.float64))
    torch.testing.assert_close(ours.detach(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "cls", [pytest.param(cls, id=f"{cls.role}-{cls.name}") for role in LAYER_ROLES for cls in catalogue(role)]
)
def test_every_function_has_a_reference(cls) -> None:
    assert cls.name in REFERENCES[cls.role], f"tests/references lacks the {cls.role} {cls.name!r}"
    if cls.role in ("expansion", "reconciliation"):
        assert REFERENCES[cls.role][cls.name].size is not None, "its size is missing"


@pytest.mark.parametrize("cls", [pytest.param(cls, id=f"{cls.role}-{cls.name}") for cls in catalogue()])
def test_every_function_is_documented_and_frozen(cls) -> None:
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}(")  # what dataclass writes where there is none
    assert cls.__dataclass_params__.frozen
    options = [field.name for field in dataclasses.fields(cls)]
    for name in options:
        assert any(name in (base.__doc__ or "") for base in cls.__mro__), f"the docstring does not say what {name!r} is"
    assert all(option in options for example in cls.examples for option in example)


@pytest.mark.parametrize("function", [case for role in LAYER_ROLES for case in each(role)])
def test_function_equals_its_reference(function) -> None:
    compared = list(cases(function))
    assert compared
    for case in compared:
        assert case.ours.dtype == torch.float64
        assert tuple(case.ours.shape) == case.reference.shape, case.name
        assert deviation(case) <= 1e-10, case.name


@pytest.mark.parametrize("function", each("expansion"))
def test_expansion_has_the_columns_that_the_paper_says(function) -> None:
    for m in (1, 2, 3, 7):
        assert function.out_features(m) == REFERENCES["expansion"][function.name].size(function, m)
        assert math.prod(function.factors(m)) == function.out_features(m)


@pytest.mark.parametrize("function", each("reconciliation"))
def test_reconciliation_counts_what_the_paper_says(function) -> None:
    for n, (q, t) in ((4, (3, 4)), (6, (1, 5)), (64, (785, 784)), (1, (1, 1)), (10, (6, 7)), (4, (3, 3))):
        try:
            count = function.count(n, (q, t))
        except kp.SpecError:
            assert function.name == "eye"  # other sizes divide all of these
            continue
        assert count == REFERENCES["reconciliation"][function.name].size(function, n, q, t), (n, q, t)


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "instance_norm"])
def test_affine_part_of_a_norm_scales_and_shifts(name) -> None:
    x = inputs(9, 4) * 4
    plain = pipeline([lookup("process", name)()], 4, None, torch.float64).eval()
    assert not list(plain.parameters())
    affine = pipeline([lookup("process", name)(affine=True)], 4, None, torch.float64).eval()
    assert torch.equal(affine(x), plain(x))  # one and zero at first
    with torch.no_grad():
        affine[0].weight.fill_(2.0)
        affine[0].bias.fill_(0.5)
    torch.testing.assert_close(affine(x), 2 * plain(x) + 0.5)


def test_dropout_keeps_the_mean_and_stops_in_evaluation() -> None:
    module = pipeline([kp.Dropout(0.25)], 4, None, None).train()
    torch.manual_seed(0)
    y = module(torch.ones(4000, 4))
    torch.testing.assert_close(y.unique(), torch.tensor([0, 4 / 3]))
    assert float((y == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert torch.equal(module.eval()(torch.ones(3, 4)), torch.ones(3, 4))


def test_batch_norm_learns_the_statistics_of_the_data() -> None:
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) * 3 + 5
    module = pipeline([kp.BatchNorm(momentum=1.0)], 3, None, None).train()
    torch.testing.assert_close(module(x).mean(0), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(module(x.reshape(40, 100, 3)).reshape(-1, 3), module(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(module.eval()(x).std(0), torch.ones(3), rtol=1e-3, atol=0)
    half = pipeline([kp.BatchNorm(momentum=0.5)], 3, None, None).train()
    half(x)
    torch.testing.assert_close(half[0].running_mean, x.mean(0) / 2, rtol=1e-4, atol=0)


# ------------------------------------------------------------------------------------------------ B-splines

DEGREES = sorted({f.degree for f in instances("expansion") if isinstance(f, kp.BSpline)})


def spline(kappa: kp.BSpline, x: torch.Tensor, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    """Return all functions of one input, `(rows, G)`."""
    return kappa(x.reshape(-1, 1), {"range": torch.tensor([[low], [high]], dtype=torch.float64)}).dense()


@pytest.mark.parametrize("policy", ["linear", "extended", "clamp", "zero", "error"])
@pytest.mark.parametrize("degree", DEGREES)
def test_b_splines_add_up_to_one_in_range(degree, policy) -> None:
    kappa = kp.BSpline(4, degree, extrapolation=policy)
    x = torch.linspace(-2.5, 0.5, 201, dtype=torch.float64)
    basis = spline(kappa, x, -2.5, 0.5)
    torch.testing.assert_close(basis.sum(-1), torch.ones_like(x), rtol=0, atol=1e-12)
    assert float(basis.min()) >= 0
    assert int((basis != 0).sum(-1).max()) <= degree + 1


@pytest.mark.parametrize("degree", [1, 2, 3, 5, 16])
def test_linear_b_splines_add_up_to_one_everywhere(degree) -> None:
    x = torch.linspace(-40, 40, 101, dtype=torch.float64)
    basis = spline(kp.BSpline(3, degree), x)
    torch.testing.assert_close(basis.sum(-1), torch.ones_like(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("intervals", [1, 5, 50])
@pytest.mark.parametrize("degree", [*DEGREES, 16])
def test_b_splines_equal_scipys_design_matrix(degree, intervals) -> None:
    step = 2 / intervals
    knots = -1 + step * np.arange(-degree, intervals + degree + 1)
    x = torch.linspace(-0.9993, 0.9991, 307, dtype=torch.float64)  # between knots, where steps depend on no rounding
    close(spline(kp.BSpline(intervals, degree), x), SciPySpline.design_matrix(x.numpy(), knots, degree).toarray())


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_derivatives_of_b_splines_equal_scipys(degree) -> None:
    knots = -1 + 0.5 * np.arange(-degree, 4 + degree + 1)
    x = (inputs(40) + 0.013).requires_grad_()  # away from the knots
    jacobian = torch.autograd.functional.jacobian(lambda v: spline(kp.BSpline(4, degree), v).sum(0), x).T
    expected = [SciPySpline(knots, row, degree)(x.detach().numpy(), nu=1) for row in np.eye(4 + degree)]
    close(jacobian, np.stack(expected, -1))


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_linear_policy_goes_on_with_value_and_slope(degree) -> None:
    kappa = kp.BSpline(4, degree)
    for end in (-1.0, 1.0):
        inward = -1e-7 * end
        inner, at, outer = (
            spline(kappa, torch.tensor([v], dtype=torch.float64)) for v in (end + inward, end, end - inward)
        )
        torch.testing.assert_close(inner, at, rtol=0, atol=1e-6)
        torch.testing.assert_close(outer, at, rtol=0, atol=1e-6)
        torch.testing.assert_close(at - inner, outer - at, rtol=0, atol=1e-12)  # the slopes of both sides
        far = spline(kappa, torch.tensor([end * 3], dtype=torch.float64))
        torch.testing.assert_close(far, at + (outer - at) / 1e-7 * 2, rtol=0, atol=1e-6)


def test_out_of_range_policies_keep_to_their_definitions() -> None:
    outside, ends = torch.tensor([-1.7, 1.1, 9.0]).double(), torch.tensor([-1.0, 1.0, 1.0]).double()
    for degree in (0, 1, 3):
        at = spline(kp.BSpline(4, degree), ends)
        torch.testing.assert_close(spline(kp.BSpline(4, degree, extrapolation="clamp"), outside), at)
        assert not spline(kp.BSpline(4, degree, extrapolation="zero"), outside).any()
        with pytest.raises(ValueError, match=r"3 inputs are out of range, the first is -1\.7"):
            spline(kp.BSpline(4, degree, extrapolation="error"), outside)
        torch.testing.assert_close(spline(kp.BSpline(4, degree, extrapolation="error"), ends), at)
        # On the extended knots functions live on for `degree` intervals, and no longer.
        extended = spline(kp.BSpline(4, degree, extrapolation="extended"), outside)
        assert extended[:2].any(-1).tolist() == [degree >= 2, degree >= 1]
        assert not extended[2].any()
    # Steps have no slope to go on with.
    torch.testing.assert_close(spline(kp.BSpline(4, 0), outside), spline(kp.BSpline(4, 0), ends))


@pytest.mark.parametrize("degree", [*DEGREES, 16])
def test_extended_b_splines_equal_scipys_on_and_beyond_the_range(degree) -> None:
    step = 2 / 4
    knots = -1 + step * np.arange(-degree, 4 + degree + 1)
    x = np.linspace(-1 - step * (degree + 2) + 1e-3, 1 + step * (degree + 2), 211)
    each_function = [SciPySpline.basis_element(knots[i : i + degree + 2], extrapolate=False) for i in range(4 + degree)]
    expected = np.stack([np.nan_to_num(function(x)) for function in each_function], -1)
    if degree:
        close(spline(kp.BSpline(4, degree, extrapolation="extended"), torch.from_numpy(x)), expected)
    else:
        inside = (x >= -1) & (x <= 1)
        values = spline(kp.BSpline(4, 0, extrapolation="extended"), torch.from_numpy(x))
        assert torch.equal(values.sum(-1), torch.from_numpy(inside.astype(float)))


def test_b_spline_range_is_a_buffer_of_each_input() -> None:
    kappa = kp.BSpline(2, 1)
    ranges = torch.tensor([[-1.0, 0.0], [1.0, 10.0]], dtype=torch.float64)
    basis = kappa(torch.tensor([0.0, 5.0], dtype=torch.float64), {"range": ranges}).dense()
    assert basis.tolist() == [0, 0, 1, 1, 0, 0]  # basis-major: each function of all inputs
    assert [param.trainable for _, param in flatten(kappa.params(2))] == [False]


def test_b_spline_gradient_in_half_precision_is_evaluated_in_single() -> None:
    kappa = kp.BSpline(50, 3)
    x = torch.linspace(-1, 1, 401).bfloat16()
    ranges = {"range": torch.tensor([[-1.0], [1.0]]).bfloat16()}
    exact = spline(kappa, x.double())
    error = (kappa(x.reshape(-1, 1), ranges).dense().double() - exact).abs().max()
    assert float(error) < 2e-3  # 0.25 where the cubic itself is in bfloat16


# ------------------------------------------------------------------------------------------------ Chebyshev


@pytest.mark.parametrize("degree", [1, 2, 3, 12, 20])
def test_chebyshev_equals_scipys_up_to_its_turning_point(degree) -> None:
    turn = math.cosh(math.acosh(1e30) / degree)
    x = np.concatenate(
        (np.linspace(-1, 1, 101), np.linspace(1, min(turn, 1000), 50), -np.linspace(1, min(turn, 1000), 50))
    )
    ours = kp.Chebyshev(degree)(torch.from_numpy(x).reshape(-1, 1), {}).dense()
    for k in range(1, degree + 1):
        expected = scipy.special.eval_chebyt(k, x)
        np.testing.assert_allclose(ours[:, k - 1].numpy(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("degree", [12, 20])
def test_chebyshev_goes_on_linearly_beyond_its_turning_point(degree) -> None:
    turn = math.cosh(math.acosh(1e30) / degree)
    assert turn < 1000
    for sign in (-1.0, 1.0):
        x = sign * torch.tensor([turn, turn + 10, turn + 20, turn + 1000], dtype=torch.float64)
        values = kp.Chebyshev(degree)(x.reshape(-1, 1), {}).dense().numpy()
        for k in range(1, degree + 1):
            slope = k * scipy.special.eval_chebyu(k - 1, sign * turn)
            expected = scipy.special.eval_chebyt(k, sign * turn) + slope * (x.numpy() - sign * turn)
            np.testing.assert_allclose(values[:, k - 1], expected, rtol=1e-8)


def test_chebyshev_of_low_degree_is_never_changed() -> None:
    x = np.array([-1e6, 1e6])
    ours = kp.Chebyshev(9)(torch.from_numpy(x).reshape(-1, 1), {}).dense()
    np.testing.assert_allclose(ours[:, -1].numpy(), scipy.special.eval_chebyt(9, x), rtol=1e-9)


def test_chebyshev_polynomials_are_orthogonal() -> None:
    count, degree = 64, 12
    nodes = torch.cos(math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count)
    basis = kp.Chebyshev(degree)(nodes.reshape(-1, 1), {}).dense()
    # Gauss–Chebyshev quadrature is exact up to degree 2·64 − 1.
    gram = basis.T @ basis * (math.pi / count)
    torch.testing.assert_close(gram, torch.eye(degree, dtype=torch.float64) * math.pi / 2, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------ Taylor


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_taylor_is_the_kronecker_powers(degree, m) -> None:
    for row in inputs(3, m):
        powers = [row]
        for _ in range(degree - 1):
            powers.append(torch.kron(powers[-1], row))
        torch.testing.assert_close(kp.Taylor(degree)(row, {}).dense(), torch.cat(powers), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_symmetric_taylor_is_scikit_learns_with_multiplicities(degree, m) -> None:
    x = inputs(5, m)
    features = PolynomialFeatures(degree, include_bias=False)
    monomials = features.fit_transform(x.numpy())
    # How many columns of the full form are that monomial, counted and not by a formula.
    exponents = kp.Taylor(degree)(torch.tensor([2.0, 3.0, 5.0, 7.0])[:m].double(), {}).dense()
    each_monomial = features.transform(np.array([[2.0, 3.0, 5.0, 7.0][:m]]))[0]
    orderings = np.array([np.isclose(exponents.numpy(), value, rtol=1e-12).sum() for value in each_monomial])
    assert orderings.sum() == exponents.numel()
    close(kp.Taylor(degree, symmetric=True)(x, {}).dense(), monomials * np.sqrt(orderings))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_taylor_has_the_inner_product_of_the_polynomial_kernel(degree, symmetric) -> None:
    x, y = inputs(6, 3), inputs(6, 3, seed=8)
    kappa = kp.Taylor(degree, symmetric)
    inner = kappa(x, {}).dense() @ kappa(y, {}).dense().T
    torch.testing.assert_close(inner, sum((x @ y.T) ** k for k in range(1, degree + 1)), rtol=1e-11, atol=1e-13)


def test_taylor_is_a_product_on_its_natural_grid() -> None:
    for degree in (2, 3):
        made = kp.Taylor(degree)(inputs(2, 4), {})
        assert isinstance(made, kp.features.ProductFeatures)
        assert (made.left.shape[-1], made.right.shape[-1]) == kp.Taylor(degree).factors(4)
        assert kp.Taylor(degree).factors(4)[1] == 4


# ------------------------------------------------------------------------------------------------ compositions

PARTS = (kp.Chebyshev(2), kp.Taylor(2), kp.BSpline(2, 2))


def expanded(kappa: kp.Expansion, x: torch.Tensor) -> torch.Tensor:
    return kp.Head(x.shape[-1], 1, kp.HeadSpec(expansion=kappa), dtype=torch.float64, seed=0).expand(x).dense()


def test_nested_is_the_composition_in_order() -> None:
    x = inputs(5, 2)
    for first in PARTS:
        for second in PARTS:
            torch.testing.assert_close(expanded(kp.Nested((first, second)), x), expanded(second, expanded(first, x)))
    a, b, c = PARTS
    torch.testing.assert_close(expanded(kp.Nested(PARTS), x), expanded(c, expanded(b, expanded(a, x))))
    assert not torch.allclose(expanded(kp.Nested((a, b)), x)[:, :4], expanded(kp.Nested((b, a)), x)[:, :4])


def test_nested_is_associative() -> None:
    x, (a, b, c) = inputs(5, 2), PARTS
    left, right = kp.Nested((kp.Nested((a, b)), c)), kp.Nested((a, kp.Nested((b, c))))
    torch.testing.assert_close(expanded(left, x), expanded(right, x))


def test_extended_is_the_concatenation() -> None:
    x = inputs(5, 2)
    torch.testing.assert_close(expanded(kp.Extended(PARTS), x), torch.cat([expanded(part, x) for part in PARTS], -1))
    assert kp.Extended(PARTS).factors(2) == (1, sum(part.out_features(2) for part in PARTS))


def test_a_folded_layer_norm_of_nearly_constant_rows_is_finite() -> None:
    # In float32 the difference of mean square and square mean is then rounding, as often below zero as above.
    size = torch.linspace(900, 1100, 200).reshape(-1, 1)
    made = kp.features.ProductFeatures(size * torch.ones(5), size * torch.ones(7))
    variance = made.square_norm() / 35 - (made.total() / 35).square()
    assert bool((variance < -1).any())
    assert bool(made.normalized(1e-5).dense().isfinite().all())


def test_structure_survives_composition() -> None:
    x = inputs(5, 3)
    assert isinstance(
        kp.Head(3, 1, kp.HeadSpec(kp.Nested((kp.Chebyshev(2), kp.Taylor(2))))).expand(x.float()),
        kp.features.ProductFeatures,
    )
    made = kp.Extended((kp.Taylor(2), kp.Identity(), kp.Chebyshev(2)))(x, {"0": {}, "1": {}, "2": {}})
    assert isinstance(made, kp.features.ConcatenatedFeatures)
    assert [type(part) for part in made.parts] == [
        kp.features.ProductFeatures,
        kp.features.DenseFeatures,
    ]  # neighbors are joined


def test_domains_say_where_columns_are_well_behaved() -> None:
    assert kp.Identity().domain(2) == ((2, -math.inf, math.inf),)
    assert kp.BSpline(2, 1, low=0.0, high=3.0).domain(2) == ((6, 0.0, 3.0),)
    assert kp.Extended((kp.Identity(), kp.Chebyshev(2))).domain(2) == ((2, -math.inf, math.inf), (4, -1.0, 1.0))
    assert kp.Nested((kp.Chebyshev(2), kp.Identity())).domain(2) == ((4, -1.0, 1.0),)


def test_compositions_need_a_part() -> None:
    for kind in (kp.Nested, kp.Extended):
        with pytest.raises(kp.SpecError, match="at least one expansion is needed"):
            kind(())


def test_nested_expansions_ask_for_their_sizes_once() -> None:
    calls = 0

    @dataclasses.dataclass(frozen=True)
    class Counting(kp.Identity, name="counting_identity"):
        def factors(self, in_features: int) -> tuple[int, int]:
            nonlocal calls
            calls += 1
            return super().factors(in_features)

    try:
        kappa: kp.Expansion = Counting()
    finally:
        ROLES["expansion"].pop("counting_identity")
    for _ in range(40):  # would be 2⁴⁰ calls if each level asked its part twice
        kappa = kp.Nested((kappa,))
    assert kappa.factors(3) == (1, 3)
    assert calls == 1


# ------------------------------------------------------------------------------------------------ reconciliations


def test_masks_keep_exactly_the_share() -> None:
    for ratio in (0.0, 0.3, 1.0):
        head = kp.Head(10, 4, kp.HeadSpec(reconciliation=kp.Masked(ratio), channels=2), seed=0)
        kept = round(ratio * 40)
        assert head.psi["mask"].flatten(1).sum(1).tolist() == [kept, kept]
        assert head.psi["entries"].shape == (2, kept)
        dense = head.weights().dense()
        assert torch.equal(dense != 0, head.psi["mask"])
    masks = kp.Head(10, 4, kp.HeadSpec(reconciliation=kp.Masked(), channels=2), seed=0).psi["mask"]
    assert not torch.equal(masks[0], masks[1])


def test_mask_of_ones_own_is_filled_row_by_row() -> None:
    head = kp.Head(3, 2, kp.HeadSpec(reconciliation=kp.Masked(0.5)), seed=0)
    head.assign("reconciliation", mask=[[0, 1, 0], [1, 0, 1]], entries=[1.0, 2.0, 3.0])
    assert head.weights().dense()[0].tolist() == [[0, 1, 0], [2, 0, 3]]
    with pytest.raises(kp.SpecError, match=r"Masked\(ratio=0\.5\): the mask must keep exactly 3 entries, got \[1\]"):
        head.assign("reconciliation", mask=[[0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (kp.Kronecker(rows=4), r"Kronecker\(rows=4\): rows must divide the 6 outputs; divisors are 1, 2, 3, 6"),
        (
            kp.Kronecker(columns=5),
            r"columns must divide the 12 columns of κ; divisors are 1, 2, 3, 4, 6, 12",
        ),
        (kp.DualLowRankKronecker(rows=5), r"DualLowRankKronecker\(rows=5\): rows must divide the 6 outputs"),
    ],
    ids=["rows", "columns", "dual"],
)
def test_sizes_that_do_not_divide_list_the_divisors(function, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        kp.Head(3, 6, kp.HeadSpec(kp.Taylor(2), function))


def test_rows_and_columns_of_a_kronecker_product_change_its_factors() -> None:
    shapes = {}
    for rows, columns in ((1, 4), (2, 3), (6, 12), (3, 1)):
        head = kp.Head(3, 6, kp.HeadSpec(kp.Taylor(2), kp.Kronecker(rows, columns)))
        shapes[rows, columns] = (tuple(head.psi["left"].shape), tuple(head.psi["right"].shape))
    assert shapes == {
        (1, 4): ((1, 4), (6, 3)),
        (2, 3): ((2, 3), (3, 4)),
        (6, 12): ((6, 12), (1, 1)),
        (3, 1): ((3, 1), (2, 12)),
    }


def test_constants_of_initial_values_fill_as_declared() -> None:
    assert kp.Param((2, 3), (5.0,)).draw(None, None).tolist() == [[5.0] * 3] * 2
    assert kp.Param((2, 3), (1.0, 2.0)).draw(None, None).tolist() == [[1.0] * 3, [2.0] * 3]
    assert kp.Param((2, 2), (1.0, 2.0, 3.0, 4.0)).draw(2, None).tolist() == [[[1.0, 2.0], [3.0, 4.0]]] * 2
    generator = torch.Generator().manual_seed(0)
    assert kp.Param((1000,), 3.0).draw(None, generator).std().item() == pytest.approx(3.0, rel=0.1)
    uniform = kp.Param((1000,), "uniform").draw(None, generator)
    assert -1 <= float(uniform.min()) < -0.9 < 0.9 < float(uniform.max()) < 1
    assert kp.Param((2,), "ones").draw(None, None).tolist() == [1.0, 1.0]
    assert kp.Param((2,), lambda shape, generator: torch.full(shape, 7.0)).draw(3, None).tolist() == [[7.0, 7.0]] * 3
    with pytest.raises(kp.SpecError, match=r"Param\(init='glorot'\): choose from zeros, ones, normal, uniform"):
        kp.Param((2,), "glorot").draw(None, None)


def test_spread_of_b_spline_grids_is_even() -> None:
    # The peaks of linear functions are the knots: equally far apart, the ends included.
    x = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    peaks = x[spline(kp.BSpline(5, 1), x).argmax(0)]
    torch.testing.assert_close(torch.tensor([b - a for a, b in pairwise(peaks.tolist())]), torch.full((5,), 0.4))
