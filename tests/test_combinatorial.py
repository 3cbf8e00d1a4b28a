"""Combinations of inputs: their order, their number before anything is made, and the joint normal density."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.covariance import EmpiricalCovariance

import kapsi as kp
from kapsi.testing import LAWS, WatchSizes, check
from references import REFERENCES

BOTH = [kp.Combinatorial, kp.CombinatorialNormal]
SUBSETS = ((2, 0), (1,), (2, 1, 0), (0, 1))


def values(head: kp.Head) -> dict[str, np.ndarray]:
    return {name: head.kappa[name].detach().numpy() for name in head.kappa.names()}


def spread_factor(m: int, seed: int = 0) -> torch.Tensor:
    return 0.5 * torch.randn(m, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("m", [1, 2, 4, 6])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_columns_come_by_size_and_in_lexicographic_order(order, m) -> None:
    x = torch.arange(m, dtype=torch.float64)
    expected = [n for size in range(1, order + 1) for c in itertools.combinations(range(m), size) for n in c]
    assert kp.Combinatorial(order)(x, {}).dense().tolist() == expected


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_joint_density_of_all_combinations(order) -> None:
    kappa = kp.CombinatorialNormal(order)
    head = kp.Head(5, 1, kp.HeadSpec(kappa), dtype=torch.float64)
    head.assign("expansion", mean=torch.arange(5) - 2.0, factor=spread_factor(5))
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = REFERENCES["expansion"]["combinatorial_normal"].values(kappa, x.numpy(), values(head))
    np.testing.assert_allclose(head.expand(x).dense().numpy(), expected, rtol=1e-11, atol=1e-11)


def test_chosen_combinations_keep_the_order_given() -> None:
    wide = (*SUBSETS, (8, 3, 5, 0, 7, 1), (4,))
    x = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.cat([x[..., list(s)] for s in wide], -1)
    assert torch.equal(kp.Combinatorial(subsets=wide)(x, {}).dense(), expected)
    head = kp.Head(9, 1, kp.HeadSpec(kp.CombinatorialNormal(subsets=wide)), dtype=torch.float64)
    head.assign("expansion", mean=torch.arange(9) / 4, factor=spread_factor(9))
    t = values(head)
    lower = np.tril(t["factor"], -1) + np.diag(np.exp(np.diag(t["factor"])))
    densities = [
        multivariate_normal.logpdf(x.numpy()[..., s], t["mean"][s], (lower @ lower.T)[np.ix_(s, s)])
        for s in map(list, wide)
    ]
    np.testing.assert_allclose(head.expand(x).dense().numpy(), np.stack(densities, -1), rtol=1e-11, atol=1e-11)


CHOSEN = [kp.Combinatorial(subsets=SUBSETS), kp.CombinatorialNormal(subsets=SUBSETS)]


@pytest.mark.parametrize("kappa", CHOSEN)
def test_chosen_combinations_keep_the_laws(kappa) -> None:
    # Of the laws all but the one that takes fewer inputs than these need.
    check(kappa, laws=[law.name for law in LAWS.values() if law.over == "function" and law.name != "columns"])


@pytest.mark.parametrize("kappa", [CHOSEN[0], pytest.param(CHOSEN[1], marks=pytest.mark.slow)])
def test_chosen_combinations_compile_and_export(kappa) -> None:
    check(kappa, laws=[law.name for law in LAWS.values() if law.over == "class"])


def test_differences_of_columns_are_conditional_densities() -> None:
    head = kp.Head(2, 1, kp.HeadSpec(kp.CombinatorialNormal(subsets=((0, 1), (0,)))), dtype=torch.float64)
    factor = torch.tensor([[0.3, 0.0], [0.8, -0.5]], dtype=torch.float64)
    head.assign("expansion", factor=factor)
    joint, first = head.expand(torch.tensor([1.5, -0.2], dtype=torch.float64)).dense().tolist()
    # x₂ given x₁ has mean L₂₁ x₁ / L₁₁ and deviation L₂₂.
    conditional = multivariate_normal.logpdf(-0.2, 0.8 * 1.5 / np.exp(0.3), np.exp(-1.0))
    assert joint - first == pytest.approx(conditional, rel=1e-12)


# ------------------------------------------------------------------------------------------------ calibration


def test_calibrated_mean_and_covariance_are_those_of_the_data() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 4)) @ generator.normal(size=(4, 4)) * [1, 1e-3, 1e3, 1] + [0, 1, 2, -500]
    head = kp.Head(4, 1, kp.HeadSpec(kp.CombinatorialNormal()), dtype=torch.float64)
    t = values(kp.calibrate(head, torch.from_numpy(x)))
    lower = np.tril(t["factor"], -1) + np.diag(np.exp(np.diag(t["factor"])))
    reference = EmpiricalCovariance().fit(x)
    np.testing.assert_allclose(t["mean"], reference.location_, rtol=1e-12)
    scale = x.std(0)
    np.testing.assert_allclose(
        lower @ lower.T / np.outer(scale, scale), reference.covariance_ / np.outer(scale, scale), rtol=0, atol=2e-9
    )
    assert (np.triu(t["factor"], 1) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poor_data_give_finite_columns(dtype) -> None:
    ramp = torch.arange(8, dtype=dtype)
    collinear = torch.stack((ramp, 2 * ramp - 1, -ramp, torch.full_like(ramp, 0.1)), 1)
    for x in (collinear, collinear[:1], collinear[:2], torch.full((5, 4), 5000.1, dtype=dtype)):
        head = kp.calibrate(kp.Head(4, 1, kp.HeadSpec(kp.CombinatorialNormal(4)), dtype=dtype), x)
        probe = torch.cat((x, x * 0 + 1e3, x * 0)).requires_grad_()
        columns = head.expand(probe).dense()
        (gradient,) = torch.autograd.grad(columns.sum(), probe)
        assert bool(columns.isfinite().all())
        assert bool(gradient.isfinite().all())
    constant = values(kp.calibrate(head, collinear))["factor"]
    assert constant[3].tolist() == [0, 0, 0, 0]  # of variance one, and apart from the others


def test_float32_keeps_digits_where_inputs_are_nearly_collinear() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(500, 1, generator=generator)
    x = torch.cat((base, base + 1e-3 * torch.randn(500, 1, generator=generator)), 1)
    head = kp.calibrate(kp.Head(2, 1, kp.HeadSpec(kp.CombinatorialNormal())), x)
    columns = head.expand(x).dense()
    exact = REFERENCES["expansion"]["combinatorial_normal"].values(
        head.spec.expansion, x.double().numpy(), values(head.double())
    )
    np.testing.assert_allclose(columns.numpy(), exact, rtol=0, atol=3e-3)


def test_extreme_trained_values_stay_finite() -> None:
    head = kp.Head(4, 1, kp.HeadSpec(kp.CombinatorialNormal(4, learnable=True)))
    factor = torch.zeros(4, 4)
    factor[1:, 0] = 1e9  # correlations of one but for 10⁻¹⁸: rounding even in float64
    head.assign("expansion", factor=factor)
    columns = head.expand(torch.linspace(-1, 1, 4)).dense()
    gradients = torch.autograd.grad(columns.sum(), list(head.kappa.parameters()))
    assert bool(columns.isfinite().all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


# ------------------------------------------------------------------------------------------------ sizes and refusals


@pytest.mark.parametrize("cls", BOTH)
def test_columns_are_counted_before_anything_is_made(cls) -> None:
    number = "62,726,874,112" if cls is kp.Combinatorial else "15,701,874,580"
    kappa = cls(4)
    said = rf"{cls.__name__}\(order=4\): 784 inputs make {number} columns, at most 16,777,216 are materialized; choose a lower"
    x = torch.zeros(1, 784)
    with WatchSizes(x) as watch:
        for call in (kappa.factors, kappa.out_features, kappa.domain, lambda m: kp.Head(m, 2, kp.HeadSpec(kappa))):
            with pytest.raises(kp.SpecError, match=said):
                call(784)
        with pytest.raises(kp.SpecError, match=said):
            kappa(x, {})
    assert watch.largest == 0


@pytest.mark.parametrize("cls", BOTH)
def test_pairs_of_an_image_fit(cls) -> None:
    kappa = cls(2)
    store = kp.Store(kappa.params(784))
    store.reset()
    x = torch.randn(4, 784, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), WatchSizes(x) as watch:
        made = kappa(x, store)
    assert made.columns == (614_656 if cls is kp.Combinatorial else 307_720)
    # No more than two numbers a row and combination at once, and the covariances of each.
    assert watch.largest <= 4 * 614_656


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(
    ("subsets", "said"),
    [
        ((), "at least one combination is needed; None stands for all of up to 2"),
        (((0,), ()), r"expected indices of inputs, from 0 on and each once, got \(\)"),
        (((0, -1),), r"got \(0, -1\)"),
        (((0, 1, 0),), r"got \(0, 1, 0\)"),
    ],
)
def test_subsets_that_are_none(cls, subsets, said) -> None:
    with pytest.raises(kp.SpecError, match=said):
        cls(subsets=subsets)


@pytest.mark.parametrize("cls", BOTH)
def test_subsets_of_inputs_that_are_not_there(cls) -> None:
    said = r"\(subsets=…\): \(0, 3\) names input 3 of 3 inputs, numbered from 0 to 2"
    for call in (lambda: cls(subsets=((0, 3),)).factors(3), lambda: cls(subsets=((0, 3),))(torch.zeros(3), {})):
        with pytest.raises(kp.SpecError, match=said):
            call()


# ------------------------------------------------------------------------------------------------ tables of states


def test_tables_are_looked_up_in_the_order_of_the_subset() -> None:
    states, chosen = (2, 3, 1, 4), ((3, 0), (), (1,), (0, 1, 2, 3), (0, 3))
    kappa = kp.CombinatorialCategorical(subsets=chosen, states=states, outside="error")
    head = kp.Head(4, 1, kp.HeadSpec(kappa), dtype=torch.float64)
    shapes = [[states[i] for i in s] for s in chosen]
    tables = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).double() for i, shape in enumerate(shapes)]
    head.assign("expansion", tables=torch.cat([table.flatten() for table in tables]))
    for joint in itertools.product(*map(range, states)):
        expected = [float(table[tuple(joint[i] for i in s)]) for table, s in zip(tables, chosen, strict=True)]
        assert head.expand(torch.tensor(joint).double()).dense().tolist() == expected


def test_calibrated_tables_are_smoothed_frequencies() -> None:
    x = torch.tensor([[0, 1], [0, 1], [1, 2], [0, 0]]).double()
    head = kp.Head(2, 1, kp.HeadSpec(kp.CombinatorialCategorical(states=(2, 3))), dtype=torch.float64)
    kp.calibrate(head, x)
    first, second, pair = head.kappa["tables"].exp().split([2, 3, 6])
    np.testing.assert_allclose(first, [4 / 6, 2 / 6])
    np.testing.assert_allclose(second, [2 / 7, 3 / 7, 2 / 7])
    np.testing.assert_allclose(pair, np.array([2, 3, 1, 1, 1, 2]) / 10)


def test_before_calibration_inputs_are_independent() -> None:
    head = kp.Head(2, 1, kp.HeadSpec(kp.CombinatorialCategorical(states=3)), dtype=torch.float64)
    x = torch.tensor(list(itertools.product(range(3), repeat=2))).double()
    made = head.expand(x).dense()
    np.testing.assert_allclose(made[:, 2], made[:, 0] + made[:, 1])
    np.testing.assert_allclose(made[::3, 0].exp().sum(), 1)
    np.testing.assert_allclose(made[3, 0] - made[0, 0], -2)


def test_what_is_no_state_is_the_nearest_or_refused() -> None:
    tables = {"tables": torch.tensor([10.0, 20.0, 30.0])}
    nearest = kp.CombinatorialCategorical(subsets=((0,),), states=3)
    x = torch.tensor([[-7.0], [0.4], [1.6], [torch.inf], [torch.nan]])
    assert nearest(x, tables).dense().flatten().tolist()[:4] == [10, 10, 30, 30]
    assert nearest(x, tables).dense()[4].isnan()
    strict = dataclasses.replace(nearest, outside="error")
    assert strict(torch.tensor([[2.0]]), tables).dense().tolist() == [[30]]
    with pytest.raises(
        kp.DataError, match=r"2 inputs are not the number of a state, the first is 0.5 of input 0, .* 0 to 2"
    ):
        strict(torch.tensor([[1.0], [0.5], [3.0]]), tables)
    # A program cannot look at values: what is no state is no number.
    model = kp.Model(kp.ModelSpec((1, 1), (kp.LayerSpec((kp.HeadSpec(strict),)),)), seed=0)
    program = torch.export.export(model, (torch.zeros(2, 1),)).module()
    assert program(torch.tensor([[1.0], [0.5]])).isnan().flatten().tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        ({"states": (2, 3)}, 3, "2 numbers of states for 3 inputs"),
        ({"states": (2, 0)}, 2, "each must be from 1 to 100,000"),
        ({"states": ()}, 2, "each must be from 1 to 100,000"),
        ({"states": 0}, 2, "states must be at least 1"),
        ({"states": 100}, 300, "would have 4.485e.08 entries, at most 16,777,216"),
        ({"subsets": (tuple(range(30)),)}, 30, "would have 1.074e.09 entries"),
        ({"subsets": ((0, 0),)}, 2, "each once"),
        ({"subsets": ((2,),)}, 2, "names input 2"),
    ],
)
def test_tables_that_cannot_be_are_refused(options, inputs, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        kp.Head(inputs, 1, kp.HeadSpec(kp.CombinatorialCategorical(**options)))


def test_combinations_with_replacement_are_those_of_itertools() -> None:
    x = torch.arange(1.0, 5.0)
    for m, order in ((4, 3), (1, 4), (2, 4)):
        rows = [c for size in range(1, order + 1) for c in itertools.combinations_with_replacement(range(m), size)]
        columns = kp.expansion.Combinatorial(order, replacement=True)(x[:m], {}).dense()
        assert columns.tolist() == [float(x[i]) for row in rows for i in row]
    with pytest.raises(kp.SpecError, match="replacement has no effect with given subsets"):
        kp.expansion.Combinatorial(subsets=((0,),), replacement=True)
