"""Elimination of variables from products of factors, against sums over all joint states."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kapsi as kp
from kapsi.zoo.inference import eliminate, log_sum, plan

DRAWN = settings(deadline=None, derandomize=True, max_examples=25)


def brute_force(factors, keep, sizes) -> torch.Tensor:
    """Sum over all joint states one by one."""
    names = list(sizes)
    result = torch.zeros([sizes[v] for v in keep], dtype=torch.float64)
    for states in itertools.product(*(range(sizes[v]) for v in names)):
        at = dict(zip(names, states, strict=True))
        value = math.prod(float(table.exp()[tuple(at[v] for v in scope)]) for scope, table in factors)
        result[tuple(at[v] for v in keep)] += value
    return result.log()


def random_factors(draw_seed: int, sizes: dict[str, int], count: int, zeros: bool = False):
    generator = torch.Generator().manual_seed(draw_seed)
    names = list(sizes)
    factors = [((v,), torch.zeros(sizes[v], dtype=torch.float64)) for v in names]
    for _ in range(count):
        width = int(torch.randint(0, min(3, len(names)) + 1, (), generator=generator))
        scope = tuple(names[i] for i in torch.randperm(len(names), generator=generator)[:width])
        table = torch.randn([sizes[v] for v in scope], generator=generator, dtype=torch.float64)
        if zeros:
            table = torch.where(torch.rand(table.shape, generator=generator) < 0.3, -math.inf, table)
        factors.append((scope, table))
    return factors


@DRAWN
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(0, 6), st.integers(0, 99), st.booleans(), st.data()
)
def test_equals_the_sum_over_all_joint_states(lengths, count, seed, zeros, data) -> None:
    sizes = {f"v{i}": length for i, length in enumerate(lengths)}
    keep = data.draw(st.permutations(list(sizes)))[: data.draw(st.integers(0, len(sizes)))]
    factors = random_factors(seed, sizes, count, zeros)
    found = eliminate(factors, keep)
    torch.testing.assert_close(found, brute_force(factors, keep, sizes), rtol=1e-12, atol=1e-12)
    others = data.draw(st.permutations([v for v in sizes if v not in keep]))
    torch.testing.assert_close(eliminate(factors, keep, order=others), found, rtol=1e-12, atol=1e-12)


def test_gradients_agree_with_differences_and_are_zero_where_all_is_impossible() -> None:
    sizes = {"a": 2, "b": 3, "c": 2}
    factors = random_factors(3, sizes, 4)
    scopes = [scope for scope, _ in factors]

    def total(*tables: torch.Tensor) -> torch.Tensor:
        return eliminate(list(zip(scopes, tables, strict=True)), ("b",))

    assert torch.autograd.gradcheck(total, [table.clone().requires_grad_() for _, table in factors])
    nothing = torch.full((2, 3), -math.inf, dtype=torch.float64).requires_grad_()
    result = log_sum(nothing)
    assert result.tolist() == [-math.inf] * 2
    assert torch.autograd.grad(result.sum(), nothing)[0].eq(0).all()


def test_what_is_no_number_stays_none() -> None:
    assert log_sum(torch.tensor([math.nan, 0.0])).isnan()


def test_a_chain_of_a_thousand_variables_takes_small_tables() -> None:
    table = torch.full((3, 3), 1 / 3, dtype=torch.float64).log()
    factors = [((i, i + 1), table) for i in range(1000)]
    assert plan([scope for scope, _ in factors], dict.fromkeys(range(1001), 3)).largest == 9
    assert abs(float(eliminate(factors)) - math.log(3)) < 1e-9


def test_of_two_orders_the_one_with_the_smaller_table_is_taken() -> None:
    # A hub of many states beside leaves: the leaves go first.
    scopes = [("hub", f"leaf{i}") for i in range(8)]
    found = plan(scopes, {"hub": 50, **{f"leaf{i}": 2 for i in range(8)}})
    assert found.largest == 100
    assert found.order[-1] == "hub" or found.order.index("hub") >= 7


def test_a_table_above_the_bound_is_refused_with_its_size() -> None:
    side = 30
    pairs = [((i, j), (i, j + 1)) for i in range(side) for j in range(side - 1)]
    pairs += [((j, i), (j + 1, i)) for i in range(side) for j in range(side - 1)]
    factors = [(pair, torch.zeros(2, 2)) for pair in pairs]
    with pytest.raises(
        kp.SpecError, match=r"largest table would have \d\.\d+e\+\d+ entries, .* GB; at most 16,777,216"
    ):
        eliminate(factors)
    with pytest.raises(kp.SpecError, match="would have 4 entries"):
        eliminate(factors[:1], largest=3)


@pytest.mark.parametrize(
    ("factors", "options", "message"),
    [
        ([], {}, "at least one factor"),
        ([(("a",), torch.zeros(2, 2))], {}, "expected 1 variables, each once"),
        ([(("a", "a"), torch.zeros(2, 2))], {}, "each once"),
        ([(("a",), torch.zeros(2)), (("a", "b"), torch.zeros(3, 2))], {}, "3 states of 'a', another factor 2"),
        ([(("a",), torch.zeros(2))], {"keep": ("b",)}, "variables: a"),
        ([(("a",), torch.zeros(2))], {"keep": ("a", "a")}, "each once"),
        ([(("a", "b"), torch.zeros(2, 2))], {"order": ("a",)}, "each variable except kept ones once"),
        ([(("a",), [0.0, 0.0])], {}, "shape list"),
    ],
)
def test_what_does_not_fit_is_refused(factors, options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        eliminate(factors, **options)
