"""Factor potentials: indicators of joint states and products, counted before anything is made."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import kapsi as kp

X = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 3.0]], dtype=torch.float64)


def test_each_combination_has_one_state() -> None:
    kappa = kp.CombinatorialState(subsets=((2, 0), (), (1,)), states=(2, 3, 4))
    made = kappa(X, {}).dense()
    assert made.shape == (2, 8 + 1 + 3)
    for row, x in zip(made.tolist(), X.long().tolist(), strict=True):
        joint = [1.0 if (c, a) == (x[2], x[0]) else 0.0 for c, a in itertools.product(range(4), range(2))]
        assert row == [*joint, 1.0, *(float(b == x[1]) for b in range(3))]


def test_all_combinations_are_indicators_of_those_of_tables() -> None:
    kappa = kp.CombinatorialState(order=3, states=(2, 3, 4))
    tables = kp.CombinatorialCategorical(order=3, states=(2, 3, 4))
    entries = kappa.out_features(3)
    assert entries == 2 + 3 + 4 + 6 + 8 + 12 + 24
    values = torch.randn(entries, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = tables(X, {"tables": values}).dense().sum(-1)
    torch.testing.assert_close(kappa(X, {}).dense() @ values, expected, rtol=1e-14, atol=1e-14)


def test_what_is_no_state_is_the_nearest_or_refused() -> None:
    x = torch.tensor([[0.4, -3.0, 9.0]], dtype=torch.float64)
    nearest = kp.CombinatorialState(order=1, states=2)
    assert nearest(x, {}).dense().tolist() == [[1, 0, 1, 0, 0, 1]]
    strict = kp.CombinatorialState(order=1, states=2, outside="error")
    with pytest.raises(
        kp.DataError, match=r"CombinatorialState\(outside='error'\): 3 inputs are not the number of a state"
    ):
        strict(x, {})
    assert strict.clamped() == nearest
    missing = torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 1.0]])
    made = strict(missing, {}).dense()
    assert bool(made[0].isnan().all())
    assert made[1].tolist() == [1, 0, 0, 1, 0, 1]


def test_products_have_powers_and_a_constant() -> None:
    kappa = kp.CombinatorialProduct(subsets=((1, 1, 0), (), (2,), (0, 0, 0)))
    assert kappa(X, {}).dense().tolist() == [[0, 1, 1, 0], [0, 1, 3, 1]]
    assert kp.CombinatorialProduct(subsets=((), ()))(X, {}).dense().tolist() == [[1, 1], [1, 1]]
    assert bool(kp.CombinatorialProduct(subsets=((), (0,)))(torch.tensor([[1.0, math.nan]]), {}).dense().isnan().all())


def test_large_products_are_heavy_tailed() -> None:
    assert not kp.CombinatorialProduct(4).heavy_tailed()
    wide = kp.CombinatorialProduct(subsets=((0, 1, 2, 0, 1),))
    assert wide.heavy_tailed()
    assert wide.domain(3) == ((1, -1.0, 1.0),)


def test_columns_are_counted_before_they_are_made() -> None:
    with pytest.raises(kp.SpecError, match=r"CombinatorialState: the tables would have 1e\+10 entries"):
        kp.CombinatorialState(subsets=((0, 1),), states=100_000).factors(2)
    with pytest.raises(kp.SpecError, match="15,701,874,580 columns"):
        kp.CombinatorialProduct(4).factors(784)
    with pytest.raises(kp.SpecError, match="names input 3"):
        kp.CombinatorialProduct(subsets=((0, 3),)).factors(2)
    with pytest.raises(kp.SpecError, match="from 0 on and each once"):
        kp.CombinatorialState(subsets=((0, 0),))
    with pytest.raises(kp.SpecError, match="from 0 on, got"):
        kp.CombinatorialProduct(subsets=((0, -1),))
    with pytest.raises(kp.SpecError, match="3 numbers of states for 2 inputs"):
        kp.CombinatorialState(states=(2, 2, 2)).factors(2)
