"""Bayesian networks: against pgmpy, SciPy, and sums over all joint states."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, norm

import kapsi as kp
from kapsi.errors import DataError, KapsiError
from kapsi.zoo import bayesian_network as bn
from kapsi.zoo.bayesian_network.model import Factor, discrete_model, order_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pgmpy and what it imports about themselves, when they are loaded
    pytest.importorskip("pgmpy")
    import networkx as nx
    import pandas as pd
    from pgmpy.base import DAG
    from pgmpy.causal_discovery import HillClimbSearch
    from pgmpy.estimators import BayesianEstimator, MaximumLikelihoodEstimator
    from pgmpy.factors.continuous import LinearGaussianCPD
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.inference import VariableElimination
    from pgmpy.models import DiscreteBayesianNetwork, DiscreteMarkovNetwork, LinearGaussianBayesianNetwork
    from pgmpy.structure_score import BIC, BICGauss

DRAWN = settings(deadline=None, derandomize=True, max_examples=15)
SEEDS = st.integers(0, 999)


def random_structure(draw: np.random.Generator, nodes: int, most: int = 2) -> list[tuple[int, ...]]:
    """Return parents in a random order of the nodes."""
    order = draw.permutation(nodes)
    parents: list[tuple[int, ...]] = [()] * nodes
    for place, node in enumerate(order):
        count = min(place, int(draw.integers(0, most + 1)))
        parents[node] = tuple(map(int, draw.choice(order[:place], count, replace=False)))
    return parents


def random_network(seed: int, nodes: int = 5, zeros: bool = True) -> DiscreteBayesianNetwork:
    """Return a network with one to three states a node; with zeros every third number of its CPDs is one."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 4, nodes)
    parents = random_structure(draw, nodes)
    network = DiscreteBayesianNetwork()
    network.add_nodes_from([f"n{i}" for i in draw.permutation(nodes)])
    network.add_edges_from([(f"n{j}", f"n{i}") for i in range(nodes) for j in parents[i]])
    for i, above in enumerate(parents):
        values = draw.dirichlet(np.ones(sizes[i]), int(np.prod(sizes[list(above)]))).T
        if zeros:
            values = values * (draw.random(values.shape) > 0.3)
            values[0] += values.sum(0) == 0
            values = values / values.sum(0)
        names = {f"n{j}": [f"s{k}" for k in range(sizes[j])] for j in (i, *above)}
        given = ([f"n{j}" for j in above], [int(sizes[j]) for j in above]) if above else (None, None)
        network.add_cpds(TabularCPD(f"n{i}", int(sizes[i]), values, *given, state_names=names))
    return network


def joint_states(network, columns) -> tuple[torch.Tensor, np.ndarray]:
    """Return all joint states, and their probabilities by pgmpy."""
    states = list(itertools.product(*(range(len(network.states[c])) for c in columns)))
    named = [{c: network.states[c][k] for c, k in zip(columns, row, strict=True)} for row in states]
    return torch.tensor(states).double(), np.array([network.get_state_probability(row) for row in named])


def log(values) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(values, dtype=np.float64))


# ------------------------------------------------------------------------------------------------ the layer


@DRAWN
@given(SEEDS, st.integers(1, 5), st.booleans(), st.booleans())
def test_joint_log_probabilities_of_all_states(seed, nodes, zeros, joint) -> None:
    network = random_network(seed, nodes, zeros)
    columns = list(network.nodes)
    model = bn.from_pgmpy(network, joint=joint)
    x, probability = joint_states(network, columns)
    outputs = model(x)[:, 0].detach().numpy()
    assert np.isfinite(outputs).all()
    possible = probability > 0
    np.testing.assert_allclose(outputs[possible], log(probability[possible]), rtol=1e-12, atol=1e-12)
    assert (outputs[~possible] < 0.9 * bn.LOG_ZERO).all()
    np.testing.assert_allclose(bn.log_marginal(model, x)[:, 0], log(probability), rtol=1e-12, atol=1e-12)


def test_psi_adds_families_and_subtracts_parents() -> None:
    network = random_network(3, 5, zeros=False)
    number = {name: i for i, name in enumerate(network.nodes)}
    model = bn.from_pgmpy(network, joint=True)
    (_, head), *_ = model.heads()
    expected = []
    for name in network.nodes:
        above = [number[p] for p in network.get_cpds(name).variables[1:]]
        expected.append(((number[name], *above), 1.0))
        expected += [(tuple(above), -1.0)] if above else []
    assert list(zip(head.spec.expansion.subsets, head.psi["matrix"][0].tolist(), strict=True)) == expected
    # Joint and marginal probabilities, as pgmpy has them.
    inference = VariableElimination(network)
    names = list(network.nodes)
    sizes = [len(network.states[name]) for name in names]
    places = np.cumsum([0] + [math.prod(sizes[i] for i in s) for s in head.spec.expansion.subsets])
    for subset, begin in zip(head.spec.expansion.subsets, places, strict=False):
        shape = [sizes[i] for i in subset]
        table = head.kappa["tables"][begin : begin + math.prod(shape)].exp().reshape(shape)
        theirs = inference.query([names[i] for i in subset], joint=True, show_progress=False)
        turned = np.transpose(theirs.values, [theirs.variables.index(names[i]) for i in subset])
        np.testing.assert_allclose(table, turned, atol=1e-12)


def test_impossible_parents_have_a_column_of_conditional_probabilities() -> None:
    network = DiscreteBayesianNetwork([("a", "b")])
    network.add_cpds(TabularCPD("a", 2, [[0.0], [1.0]]), TabularCPD("b", 2, [[0.5, 0.1], [0.5, 0.9]], ["a"], [2]))
    model = bn.from_pgmpy(network, joint=True)
    (_, head), *_ = model.heads()
    assert head.spec.expansion.subsets == ((0,), (1, 0))
    outputs = model(torch.tensor([[0.0, 1.0], [1.0, 1.0]]).double())[:, 0].detach()
    assert outputs[0] == bn.LOG_ZERO + math.log(0.5)
    assert abs(float(outputs[1]) - math.log(0.9)) < 1e-15


@DRAWN
@given(SEEDS, st.integers(2, 5), st.booleans())
def test_one_output_a_state_of_the_label(seed, nodes, joint) -> None:
    network = random_network(seed, nodes, zeros=seed % 2 == 0)
    label = f"n{seed % nodes}"
    columns = [name for name in network.nodes if name != label]
    model = bn.from_pgmpy(network, label=label, joint=joint)
    whole, probability = joint_states(network, [*columns, label])
    states = len(network.states[label])
    x, joint_probability = whole[::states, :-1], probability.reshape(-1, states)
    np.testing.assert_allclose(bn.log_marginal(model, x), log(joint_probability), rtol=1e-12, atol=1e-12)
    possible = joint_probability.sum(1) > 0
    ours = model(x[possible]).log_softmax(-1).exp().detach()  # predict_log_proba, but for a label of one state
    theirs = joint_probability[possible]
    np.testing.assert_allclose(ours, theirs / theirs.sum(1, keepdims=True), atol=1e-12)
    assert model(x).isfinite().all()


def test_classification_is_that_of_variable_elimination() -> None:
    comparison = bn.PARITY[1].compare(5)
    assert comparison.deviation < 1e-9
    assert comparison.model.out_features > 1


def test_states_and_columns_in_another_order() -> None:
    network = random_network(8, 4, zeros=False)
    columns = sorted(network.nodes, reverse=True)
    states = {name: list(reversed(network.states[name])) for name in columns[:2]}
    model = bn.from_pgmpy(network, columns=columns, states=states)
    rows = [{"n0": "s0", "n1": "s0", "n2": "s0", "n3": "s0"}, {name: network.states[name][-1] for name in columns}]
    x = bn.encode(pd.DataFrame(rows), columns, {**network.states, **states})
    expected = [math.log(network.get_state_probability(row)) for row in rows]
    np.testing.assert_allclose(model(x)[:, 0].detach(), expected, atol=1e-12)
    assert torch.equal(x, bn.encode([[row[c] for c in columns] for row in rows], columns, {**network.states, **states}))


def test_tables_of_names_may_lack_values() -> None:
    table = pd.DataFrame({"a": pd.array([1, None, 2], dtype="Int64"), "b": ["x", float("nan"), None]})
    codes = bn.encode(table, ["b", "a"], {"a": [1, 2], "b": ["x"]})
    assert codes[~codes.isnan()].tolist() == [0, 0, 1]
    assert codes.isnan().tolist() == [[False, False], [True, True], [True, False]]
    assert bn.encode(torch.tensor([[1, 3]]), ["a", "b"], {"a": [0, 1], "b": [3]}).tolist() == [[1, 0]]


def test_values_that_are_no_states_are_refused_or_the_nearest() -> None:
    network = random_network(0, 3, zeros=False)
    x = torch.full((1, 3), 7.0).double()
    with pytest.raises(DataError, match="is 7 of input 0, which has the states"):
        bn.from_pgmpy(network)(x)
    last = torch.tensor([[float(len(network.states[name]) - 1) for name in network.nodes]]).double()
    model = bn.from_pgmpy(network, outside="nearest")
    assert torch.equal(model(x), model(last))


# ------------------------------------------------------------------------------------------------ missing evidence


@DRAWN
@given(SEEDS, st.integers(2, 5), st.booleans(), st.booleans())
def test_missing_values_are_summed_out(seed, nodes, joint, labeled) -> None:
    network = random_network(seed, nodes)
    label = f"n{seed % nodes}" if labeled else None
    columns = [name for name in network.nodes if name != label]
    model = bn.from_pgmpy(network, label=label, joint=joint)
    whole, probability = joint_states(network, columns + [label] * labeled)
    draw = np.random.default_rng(seed)
    x = whole[draw.integers(0, len(whole), 12)][:, : len(columns)]
    x = torch.where(torch.from_numpy(draw.random(x.shape) < 0.5), math.nan, x)
    outputs = len(network.states[label]) if labeled else 1
    expected = np.zeros((len(x), outputs))
    for row, at in enumerate(x):
        fits = (at.isnan() | (whole[:, : len(columns)] == at)).all(1).numpy()
        for y in range(outputs):
            expected[row, y] = probability[fits & (whole[:, -1].numpy() == y if labeled else True)].sum()
    np.testing.assert_allclose(bn.log_marginal(model, x), log(expected), rtol=1e-11, atol=1e-11)
    below = torch.where(torch.arange(len(columns)) == 0, x, math.nan)
    total = bn.log_marginal(model, below).logsumexp(-1, keepdim=True)
    rows = (total > -math.inf).squeeze(1)
    if rows.any():
        found = bn.log_conditional(model, x[rows], [0])
        np.testing.assert_allclose(found, bn.log_marginal(model, x[rows]) - total[rows], rtol=1e-12, atol=1e-12)


@DRAWN
@given(SEEDS)
def test_posteriors_are_those_of_variable_elimination(seed) -> None:
    network = random_network(seed, 5, zeros=False)
    columns = list(network.nodes)
    inference = VariableElimination(network)
    whole, _ = joint_states(network, columns)
    x = whole[np.random.default_rng(seed).integers(0, len(whole), 3)]
    x[0, 2], x[1, 3] = math.nan, math.nan
    found = bn.log_posterior(bn.from_pgmpy(network), x, [1, 0])
    for row, ours in zip(x.tolist(), found, strict=True):
        evidence = {c: network.states[c][int(k)] for c, k in zip(columns[2:], row[2:], strict=True) if k == k}
        theirs = inference.query([columns[1], columns[0]], evidence=evidence, show_progress=False)
        turned = np.transpose(theirs.values, [theirs.variables.index(columns[i]) for i in (1, 0)])
        np.testing.assert_allclose(ours.exp(), turned, atol=1e-12)


def test_a_trained_psi_is_summed_as_it_is() -> None:
    network = random_network(4, 4, zeros=False)
    model = bn.from_pgmpy(network, joint=True)
    (_, head), *_ = model.heads()
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(head.psi["matrix"].shape, generator=draw, dtype=torch.float64)
    matrix[0, 1] = 0
    head.assign("reconciliation", matrix=matrix)
    whole, _ = joint_states(network, list(network.nodes))
    values = model(whole)[:, 0].detach()
    x = torch.full((1, 4), math.nan).double()
    np.testing.assert_allclose(bn.log_marginal(model, x)[0, 0], values.logsumexp(0), rtol=1e-12)
    x[0, 2] = 0
    np.testing.assert_allclose(bn.log_marginal(model, x)[0, 0], values[whole[:, 2] == 0].logsumexp(0), rtol=1e-12)
    # An input that no column has any more counts as often as it has states.
    head.assign("reconciliation", matrix=torch.zeros_like(matrix))
    np.testing.assert_allclose(bn.log_marginal(model, torch.full((1, 4), math.nan))[0, 0], math.log(len(whole)))


def test_impossible_evidence_is_refused_where_something_would_follow_from_it() -> None:
    model = bn.fit_discrete([[0, 0], [0, 0]], [(), (0,)], states=(2, 2), smoothing=0)
    assert bn.log_marginal(model, [[1.0, 0.0]]).tolist() == [[-math.inf]]
    for ask in (
        lambda: bn.log_conditional(model, [[0.0, 0.0], [1.0, 0.0]], [0]),
        lambda: bn.log_posterior(model, [[1.0, 0]] * 2, [1]),
    ):
        with pytest.raises(DataError, match=r"observations in row . have probability zero"):
            ask()


def test_wide_networks_are_refused_with_the_size() -> None:
    side, nodes = 26, 26 * 26
    parents = [tuple(p for p in (i - 1 if i % side else -1, i - side) if p >= 0) for i in range(nodes)]
    model = bn.fit_discrete(torch.zeros(1, nodes), parents, states=[2] * nodes)
    whole = torch.zeros(1, nodes)
    assert bn.log_marginal(model, whole).shape == (1, 1)  # nothing is missing
    with pytest.raises(kp.SpecError, match=r"largest table would have .* entries, .* GB; at most 16,777,216"):
        bn.log_marginal(model, torch.full((1, nodes), math.nan))
    with pytest.raises(kp.SpecError, match=r"node 30 and its 30 parents would have 2.147e\+09 entries, 17.2 GB"):
        bn.spec([()] * 30 + [tuple(range(30))], [2] * 31)


# ------------------------------------------------------------------------------------------------ linear Gaussian


def gaussian_network(seed: int, nodes: int, steps: float | None = None) -> LinearGaussianBayesianNetwork:
    """Return a random network; with steps all its numbers are multiples of those."""
    draw = np.random.default_rng(seed)
    network = LinearGaussianBayesianNetwork()
    network.add_nodes_from([f"n{i}" for i in draw.permutation(nodes)])
    parents = random_structure(draw, nodes)
    network.add_edges_from([(f"n{j}", f"n{i}") for i in range(nodes) for j in parents[i]])
    for i, above in enumerate(parents):
        beta, std = draw.normal(size=1 + len(above)), draw.uniform(0.3, 2)
        if steps:
            beta, std = np.round(beta / steps) * steps, max(steps, round(std / steps) * steps)
        network.add_cpds(LinearGaussianCPD(f"n{i}", beta, float(std), [f"n{j}" for j in above]))
    return network


def log_density(network, table) -> np.ndarray:
    return sum(
        norm.logpdf(table[c.variable], c.beta[0] + table[c.evidence].to_numpy() @ c.beta[1:], c.std)
        for c in network.cpds
    )


@DRAWN
@given(SEEDS, st.integers(1, 7))
def test_log_density_of_linear_gaussian_networks(seed, nodes) -> None:
    network = gaussian_network(seed, nodes)
    draw = np.random.default_rng(seed)
    columns = [f"n{i}" for i in draw.permutation(nodes)]
    table = pd.DataFrame(draw.normal(size=(20, nodes)) * 3, columns=columns)
    model = bn.from_pgmpy(network, columns=columns)
    ours = model(torch.tensor(table.to_numpy()))[:, 0].detach().numpy()
    np.testing.assert_allclose(ours, log_density(network, table), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_log_likelihood_of_pgmpy(seed) -> None:
    # Halves: pgmpy rounds covariances to eight decimals.
    network = gaussian_network(seed, 4, steps=0.5)
    columns = list(network.nodes)
    table = pd.DataFrame(np.random.default_rng(seed).normal(size=(20, 4)), columns=columns)
    total = float(bn.from_pgmpy(network)(torch.tensor(table.to_numpy())).detach().sum())
    assert abs(total - network.log_likelihood(table)) < 1e-8 * max(1, abs(total))


@pytest.mark.parametrize("seed", range(3))
def test_missing_gaussian_values_are_integrated_out(seed) -> None:
    network = gaussian_network(seed, 5, steps=0.5)
    order = list(network.nodes)
    mean, covariance = network.to_joint_gaussian()
    theirs = list(nx.topological_sort(network))
    turn = [theirs.index(name) for name in order]
    mean, covariance = mean[turn], covariance[np.ix_(turn, turn)]
    model = bn.from_pgmpy(network)
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(15, 5))
    x[draw.random(x.shape) < 0.4] = np.nan
    x[0], x[1, 0] = np.nan, 1.0
    found = bn.log_marginal(model, x)[:, 0].numpy()
    for row, value in zip(x, found, strict=True):
        seen = ~np.isnan(row)
        expected = (
            multivariate_normal.logpdf(row[seen], mean[seen], covariance[np.ix_(seen, seen)]) if seen.any() else 0.0
        )
        assert abs(value - expected) < 1e-8
    given_first = np.where(np.arange(5) == 0, x, np.nan)
    expected = found - bn.log_marginal(model, given_first)[:, 0].numpy()
    np.testing.assert_allclose(bn.log_conditional(model, x, [0])[:, 0], expected, atol=1e-12)


def test_an_infinite_integral_is_refused() -> None:
    model = bn.from_pgmpy(gaussian_network(1, 3))
    (_, head), *_ = model.heads()
    head.assign("reconciliation", matrix=-head.psi["matrix"].detach())
    with pytest.raises(kp.SpecError, match="the integral over the missing inputs"):
        bn.log_marginal(model, [[math.nan, 0.0, 0.0]])


# ------------------------------------------------------------------------------------------------ fits


def discrete_rows(
    seed: int, rows: int = 120, nodes: int = 4
) -> tuple[torch.Tensor, list[tuple[int, ...]], pd.DataFrame]:
    draw = np.random.default_rng(seed)
    x = np.stack([draw.integers(0, 2 + i % 2, rows) for i in range(nodes)], 1)
    x[:, 1] = np.where(draw.random(rows) < 0.6, x[:, 0], x[:, 1])
    return torch.from_numpy(x), random_structure(draw, nodes), pd.DataFrame(x, columns=list("abcdefgh")[:nodes])


def unfitted(parents, table) -> DiscreteBayesianNetwork:
    network = DiscreteBayesianNetwork()
    network.add_nodes_from(table.columns)
    network.add_edges_from([(table.columns[j], table.columns[i]) for i, above in enumerate(parents) for j in above])
    return network


@DRAWN
@given(SEEDS, st.sampled_from(["K2", "BDeu", "dirichlet", "weighted", "likelihood"]), st.booleans())
def test_tables_are_those_of_pgmpys_estimators(seed, prior, conditional) -> None:
    x, parents, table = discrete_rows(seed)
    network = unfitted(parents, table)
    theirs_options = {
        "K2": {"prior_type": "K2"},
        "BDeu": {"prior_type": "BDeu", "equivalent_sample_size": 10},
        "dirichlet": {"prior_type": "dirichlet", "pseudo_counts": 0.5},
        "weighted": {"prior_type": "K2", "weighted": True},
        "likelihood": {},
    }[prior]
    ours_options = {
        "K2": {},
        "BDeu": {"equivalent_sample_size": 10},
        "dirichlet": {"smoothing": 0.5},
        "weighted": {"sample_weight": np.arange(len(x)) / 7},
        "likelihood": {"smoothing": 0},
    }[prior]
    if prior == "weighted":
        table = table.assign(_weight=ours_options["sample_weight"])
    estimator = MaximumLikelihoodEstimator if prior == "likelihood" else BayesianEstimator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pandas and joblib, inside of pgmpy
        network.fit(table, estimator=estimator, **theirs_options)
    expected = bn.from_pgmpy(network)
    model = bn.fit_discrete(x, parents, conditional=conditional, **ours_options)
    np.testing.assert_allclose(model(x.double()).detach(), expected(x.double()).detach(), rtol=1e-10, atol=1e-10)


def test_regressions_of_columns_of_very_different_sizes() -> None:
    draw = np.random.default_rng(0)
    sizes = np.array([1e-6, 1e6, 1.0])
    z = draw.normal(size=(50, 3)) + np.array([3.0, -2.0, 1.0])
    z[:, 2] += z[:, 0] - 0.5 * z[:, 1]
    parents = [(), (0,), (0, 1)]
    plain, scaled = bn.fit_gaussian(z, parents), bn.fit_gaussian(z * sizes, parents)
    theirs = plain(torch.from_numpy(z)) - np.log(sizes).sum()
    np.testing.assert_allclose(scaled(torch.from_numpy(z * sizes)).detach(), theirs.detach(), rtol=1e-9)


def test_unseen_parents_without_smoothing_are_uniform() -> None:
    model = bn.fit_discrete([[0, 0], [0, 1], [0, 1]], [(), (0,)], states=(2, 2), smoothing=0)
    (_, head), *_ = model.heads()
    assert head.spec.expansion.subsets == ((0,), (1, 0))
    np.testing.assert_allclose(head.kappa["tables"][2:].exp(), [1 / 3, 1 / 2, 2 / 3, 1 / 2])


def test_weights_count_as_repeated_rows() -> None:
    x, parents, _ = discrete_rows(3)
    weight = torch.arange(len(x)) % 3
    repeated = x.repeat_interleave(weight, 0)
    states = (2, 3, 2, 3)
    a, b = (
        bn.fit_discrete(x, parents, states=states, sample_weight=weight),
        bn.fit_discrete(repeated, parents, states=states),
    )
    np.testing.assert_allclose(a(x.double()).detach(), b(x.double()).detach(), rtol=1e-12)
    z = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    weight = torch.arange(30) % 3
    for unbiased in (False, True):
        a = bn.fit_gaussian(z, parents, sample_weight=weight, unbiased=unbiased)
        b = bn.fit_gaussian(z.repeat_interleave(weight, 0), parents, unbiased=unbiased)
        np.testing.assert_allclose(a(z).detach(), b(z).detach(), rtol=1e-9)


@DRAWN
@given(SEEDS, st.booleans())
def test_regressions_are_those_of_pgmpy(seed, unbiased) -> None:
    # Of columns that differ by six orders of magnitude scikit-learn, which pgmpy asks, neglects the small ones.
    draw = np.random.default_rng(seed)
    parents = random_structure(draw, 5)
    x = draw.normal(size=(60, 5)) @ draw.normal(size=(5, 5)) * np.logspace(-1, 1, 5) + 5
    table = pd.DataFrame(x, columns=list("abcde"))
    network = LinearGaussianBayesianNetwork()
    network.add_nodes_from(table.columns)
    network.add_edges_from([("abcde"[j], "abcde"[i]) for i, above in enumerate(parents) for j in above])
    network.fit(table, std_estimator="unbiased" if unbiased else "mle")
    ours = bn.fit_gaussian(x, parents, unbiased=unbiased)(torch.tensor(x))[:, 0].detach()
    np.testing.assert_allclose(ours, log_density(network, table), rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------------ structure


@DRAWN
@given(SEEDS)
def test_scores_are_those_of_pgmpy(seed) -> None:
    x, parents, table = discrete_rows(seed)
    graph = unfitted(parents, table)
    assert abs(bn.structure_score(x, parents) - BIC(table.astype(str)).score(graph)) < 1e-8
    z = np.random.default_rng(seed).normal(size=(50, 4)) * [1, 100, 0.01, 1] + 3
    ours = bn.structure_score(z, parents, kind="gaussian")
    assert abs(ours - BICGauss(pd.DataFrame(z, columns=list("abcd"))).score(graph)) < 1e-7
    back = bn.parents_from_pgmpy(graph, list("abcd"))
    assert list(map(sorted, back)) == list(map(sorted, parents))


@pytest.mark.parametrize("seed", range(6))
def test_hill_climbing_reaches_the_score_of_pgmpy(seed) -> None:
    comparison = bn.PARITY[5].compare(seed)
    assert comparison.deviation < 1e-9


@pytest.mark.parametrize("seed", range(2))
def test_gaussian_hill_climbing_reaches_the_score_of_pgmpy(seed) -> None:
    draw = np.random.default_rng(seed)
    slopes = np.triu(draw.normal(size=(5, 5)) * (draw.random((5, 5)) < 0.6), 1)
    x = draw.normal(size=(200, 5)) @ np.linalg.inv(np.eye(5) - slopes)
    table = pd.DataFrame(x, columns=list("abcde"))
    search = HillClimbSearch(scoring_method="bic-g", return_type="dag", show_progress=False).fit(table)
    theirs = bn.structure_score(x, bn.parents_from_pgmpy(search.causal_graph_, list("abcde")), kind="gaussian")
    assert bn.structure_score(x, bn.hill_climb(x, kind="gaussian"), kind="gaussian") > theirs - 1e-8


def changed(parents):
    """Yield all structures that one edge more, less or turned makes."""
    nodes = range(len(parents))
    for a, b in itertools.permutations(nodes, 2):
        for turn in (False, True):
            new = [set(above) for above in parents]
            new[b] ^= {a}
            if turn:
                if a not in parents[b] or b in parents[a]:
                    continue
                new[a] |= {b}
            structure = [tuple(sorted(above)) for above in new]
            if len(order_of(structure)) == len(structure):
                yield structure


@pytest.mark.parametrize("criterion", ["bic", "aic"])
@pytest.mark.parametrize("restarts", [0, 3])
def test_no_change_of_one_edge_makes_it_better(criterion, restarts) -> None:
    for seed in range(4):
        x, _, _ = discrete_rows(seed, 200)
        x[:, 3] = (x[:, 0] + x[:, 2]) % 3
        found = bn.hill_climb(x, criterion=criterion, restarts=restarts)
        assert found == bn.hill_climb(x, criterion=criterion, restarts=restarts)
        best = bn.structure_score(x, found, criterion=criterion)
        assert all(bn.structure_score(x, other, criterion=criterion) < best + 1e-3 for other in changed(found))
        assert best > bn.structure_score(x, [()] * 4, criterion=criterion)


def test_edges_that_are_required_forbidden_or_too_many() -> None:
    x, _, _ = discrete_rows(1, 200)
    x[:, 2] = x[:, 0] ^ (x[:, 1] == 1)
    free = bn.hill_climb(x)
    assert any(free)
    required = bn.hill_climb(x, required=[(3, 0)], max_parents=1)
    assert 3 in required[0]
    assert max(map(len, required)) == 1
    everything = list(itertools.permutations(range(4), 2))
    assert bn.hill_climb(x, forbidden=everything) == ((), (), (), ())
    assert bn.hill_climb(x, start=[(), (), (), (0,)], forbidden=[(0, 3)]) == bn.hill_climb(x, forbidden=[(0, 3)])
    for parents in (bn.hill_climb(x, forbidden=[(0, 1), (1, 0)], seed=seed) for seed in range(3)):
        assert 0 not in parents[1]
        assert 1 not in parents[0]


def test_joint_states_beyond_an_array_are_counted() -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 40, (300, 5))
    score = bn.structure_score(x, [(1, 2, 3, 4), (), (), (), ()], states=[40] * 5)
    table = pd.DataFrame(x, columns=list("abcde"))
    graph = unfitted([(1, 2, 3, 4), (), (), (), ()], table)
    names = {name: list(range(40)) for name in "abcde"}
    assert abs(score / BIC(table, state_names=names).score(graph) - 1) < 1e-12


# ------------------------------------------------------------------------------------------------ training


def test_a_trained_psi_has_a_lower_validation_loss() -> None:
    from sklearn.datasets import load_breast_cancer

    x, y = map(torch.from_numpy, load_breast_cancer(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held = order[:380], order[380:]
    edges = torch.quantile(x[train], torch.tensor([0.25, 0.5, 0.75]).double(), dim=0)
    codes = (x.unsqueeze(0) > edges.unsqueeze(1)).sum(0)
    rows = torch.cat((codes, y.unsqueeze(1)), 1)
    parents = bn.hill_climb(rows[train, :], states=[4] * 30 + [2], max_parents=2, restarts=0)
    model = bn.fit_discrete(rows[train], parents, states=[4] * 30 + [2], label=30)

    def loss() -> float:
        log_probability = torch.as_tensor(kp.predict_log_proba(model, codes[held].double()))
        return -float(log_probability.gather(1, y[held].unsqueeze(1)).mean())

    before = loss()
    data = (codes.double()[train], y[train])
    kp.fit(model, data, validation=(codes.double()[held], y[held]), loss="cross_entropy", solver="lbfgs", l2=1e-2)
    assert loss() < 0.95 * before


def test_a_fitted_network_is_a_model_like_any_other(tmp_path) -> None:
    x, parents, _ = discrete_rows(0)
    for model in (bn.fit_discrete(x, parents, label=2), bn.fit_gaussian(x.double(), [(), (), (), ()])):
        rows = x[:, [0, 1, 3]].double() if model.in_features == 3 else x.double()
        kp.save(model, tmp_path / "model.safetensors")
        assert torch.equal(kp.load(tmp_path / "model.safetensors")(rows), model(rows))
        program = torch.export.export(model, (rows,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
        torch.testing.assert_close(program(rows[:7]), model(rows[:7]), rtol=0, atol=1e-12)
        assert kp.explain(model)[0].columns == len(model.layers[0].heads[0].spec.expansion.subsets)
        assert kp.from_dict(kp.to_dict(model.spec), kp.ModelSpec) == model.spec


# ------------------------------------------------------------------------------------------------ what is refused


def one_node() -> DiscreteBayesianNetwork:
    network = DiscreteBayesianNetwork()
    network.add_node("a")
    return network


def with_cpd(cpd) -> DiscreteBayesianNetwork:
    network = one_node()
    network.cpds.append(cpd)
    return network


def degenerate() -> LinearGaussianBayesianNetwork:
    network = LinearGaussianBayesianNetwork()
    network.add_node("a")
    network.add_cpds(LinearGaussianCPD("a", [0.0], 0.0))
    return network


REFUSED = [
    (lambda: bn.from_pgmpy(DAG([("a", "b")])), "expected a DiscreteBayesianNetwork or a Linear.* got DAG"),
    (lambda: bn.from_pgmpy(DiscreteMarkovNetwork()), "got DiscreteMarkovNetwork"),
    (lambda: bn.from_pgmpy(one_node()), "node 'a' has no CPD"),
    (lambda: bn.from_pgmpy(with_cpd(TabularCPD("a", 2, [[0.5], [0.9]]))), "pgmpy rejects the network"),
    (lambda: bn.from_pgmpy(with_cpd(TabularCPD("a", 2, [[-0.5], [1.5]]))), "the CPD of 'a' has values below 0"),
    (lambda: bn.from_pgmpy(with_cpd(LinearGaussianCPD("a", [0.0], 1.0))), "only TabularCPD is supported"),
    (lambda: bn.from_pgmpy(degenerate()), "positive standard deviation; got 1 numbers and 0.0"),
    (lambda: bn.from_pgmpy(gaussian_network(0, 2), label="n0"), "Gaussian nodes have no states"),
    (lambda: bn.from_pgmpy(random_network(0, 2), label="z"), "no node 'z' as label; nodes: 'n"),
    (lambda: bn.from_pgmpy(random_network(0, 2), columns=["n0"]), "columns to name each node once"),
    (lambda: bn.from_pgmpy(random_network(0, 2), states={"n0": ["x"]}), "states of 'n0' to be a permutation"),
    (lambda: bn.from_pgmpy(with_cpd(TabularCPD("a", 2, [[0.5], [0.5]])), label="a"), "a node other than the label"),
    (lambda: bn.spec([(1,), (0,)]), "the edges form a cycle: 0 ← 1 ← 0"),
    (lambda: bn.spec([(0,)]), "parents of node 0 must be other nodes"),
    (lambda: bn.spec([(), (0, 0)]), "each once"),
    (lambda: bn.spec([(), 0]), "the indices of the parents of each node"),
    (lambda: bn.spec([]), "at least one node"),
    (lambda: bn.spec([()], (2, 2)), "number of states of each of the 1 nodes"),
    (lambda: bn.spec([(), ()], (2, 2), label=2), "the label as the number of a node, 0 to 1"),
    (lambda: bn.spec([(), ()], label=1), "a linear Gaussian network has no states"),
    (lambda: bn.spec([(), ()], (2, 2), conditional=[7]), "expected conditional as"),
    (lambda: bn.fit_discrete([[0.5]], [()]), "expected state indices, 0, 1, …, got 0.5 in row 0, column 0"),
    (lambda: bn.fit_discrete([[3]], [()], states=(2,)), "0 to 1, got 3 in row 0"),
    (lambda: bn.fit_discrete([["a"]], [()]), "see encode for names"),
    (lambda: bn.fit_discrete([[math.nan]], [()]), "expected finite numbers, got nan in row 0, column 0"),
    (lambda: bn.fit_discrete([[0, 1]], [()]), r"expected x of shape \(rows, 1\), got \(1, 2\)"),
    (lambda: bn.fit_discrete([[0]], [()], smoothing=-1), "smoothing: expected a finite number of at least 0, got -1"),
    (lambda: bn.fit_discrete([[0]], [()], sample_weight=[-1.0]), "not negative and not all zero"),
    (lambda: bn.fit_gaussian([[1.0], [1.0]], [()]), "node 0 is constant"),
    (lambda: bn.fit_gaussian([[1.0, 2.0], [2.0, 4.0], [4.0, 8.0]], [(), (0,)]), "node 1 is determined by its parents"),
    (
        lambda: bn.fit_gaussian([[1.0, 2.0], [2.0, 4.0]], [(), (0,)], unbiased=True),
        "node 1 has 2 coefficients, too many for 2 rows",
    ),
    (lambda: bn.hill_climb([[0, 1]], kind="normal"), "kind: expected one of discrete, gaussian"),
    (lambda: bn.hill_climb([[0, 1]], criterion="k2"), "criterion: expected one of bic, aic"),
    (lambda: bn.hill_climb([[0, 1]], required=[(0, 2)]), r"pairs \(parent, child\)"),
    (lambda: bn.hill_climb([[0, 1]], required=[(0, 1), (1, 0)]), "a cycle"),
    (lambda: bn.hill_climb([[0, 1]], required=[(0, 1)], max_parents=0), "more parents than max_parents"),
    (lambda: bn.hill_climb([[0, 1]], epsilon=0), "a positive number"),
    (lambda: bn.hill_climb([[0, 1]], restarts=-1), "restarts: expected an integer of at least 0, got -1"),
    (lambda: bn.hill_climb([], states=(2,)), "expected x of shape"),
    (lambda: bn.hill_climb([[0, 1]], max_parents=1.5), "max_parents: expected an integer of at least 0, got 1.5"),
    (
        lambda: bn.hill_climb([[1.0, 2.0], [2.0, 4.0], [4.0, 8.0]], kind="gaussian"),
        "hill_climb: node .* is determined by",
    ),
    (lambda: bn.structure_score([[1.0], [1.0]], [()], kind="gaussian"), "structure_score: node 0 is constant"),
    (lambda: bn.structure_score([[1, 0]], [()]), "1 nodes in parents, 2 columns in x"),
    (lambda: bn.parents_from_pgmpy("a"), "expected a pgmpy DAG or network"),
    (lambda: bn.parents_from_pgmpy(DAG([("a", "b")]), ["a"]), "name each of the 2 nodes once"),
    (lambda: bn.encode({"a": ["x"]}, ["a"], {"a": ["y"]}), "'x' in row 0 is not a state of 'a'; expected one of 'y'"),
    (lambda: bn.encode({"a": ["x"]}, ["b"], {"b": ["y"]}), "no column 'b' in the table"),
    (lambda: bn.encode([["x", "y"]], ["a"], {"a": ["x"]}), "rows of 1 values"),
    (lambda: bn.log_marginal(kp.Model(kp.rpn([2, 1]), seed=0), [[0.0, 0.0]]), "expected a model of from_pgmpy"),
    (lambda: bn.log_marginal(bn.fit_gaussian([[1.0], [2.0]], [()]), [[math.inf]]), "expected finite numbers"),
    (lambda: bn.log_conditional(bn.fit_discrete([[0], [1]], [()]), [[0.0]], [1]), "given as indices of inputs, 0 to 0"),
    (lambda: bn.log_posterior(bn.fit_gaussian([[1.0], [2.0]], [()]), [[1.0]], [0]), "a Gaussian network has no states"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_does_not_fit_is_refused(make, message) -> None:
    with pytest.raises(KapsiError, match=message):
        make()


def test_a_model_of_all_its_tables() -> None:
    table = torch.tensor([[0.1, 0.9], [0.6, 0.4]]).double().log()
    model = discrete_model([Factor((0, 1), 1, table)], (2, 2), None)
    assert model(torch.tensor([[1.0, 0.0]]).double()).item() == float(table[1, 0])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_columns_and_states_of_other_types() -> None:
    pytest.importorskip("pgmpy")
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    network = DiscreteBayesianNetwork([("a", "b")])
    network.add_cpds(TabularCPD("a", 2, [[0.3], [0.7]]), TabularCPD("b", 2, [[0.1, 0.4], [0.9, 0.6]], ["a"], [2]))
    model = bn.from_pgmpy(network, columns=np.array(["b", "a"]), states={"a": (1, 0)})
    found = float(model(torch.tensor([[0.0, 0.0]], dtype=torch.float64)).detach())
    assert found == pytest.approx(math.log(0.7 * 0.4), abs=1e-12)
    for wrong in ({"columns": 3}, {"states": [1]}):
        with pytest.raises(kp.SpecError, match="expected columns as a list of nodes, and states as lists by node"):
            bn.from_pgmpy(network, **wrong)
    with pytest.raises(kp.SpecError, match="expected states of 'a' as a list, got 5"):
        bn.from_pgmpy(network, states={"a": 5})
    with pytest.raises(kp.SpecError, match="the network has no nodes"):
        bn.from_pgmpy(DiscreteBayesianNetwork())


def test_reversed_rows_are_rows() -> None:
    x = np.random.default_rng(0).integers(0, 2, (30, 2))
    rows = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert torch.equal(bn.fit_discrete(x[::-1], [(), (0,)])(rows), bn.fit_discrete(x[::-1].copy(), [(), (0,)])(rows))
