"""Markov networks: brute force over all joint states, pgmpy, and what a maximum of a likelihood is known by."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

import kapsi as kp
from kapsi.errors import DataError, KapsiError
from kapsi.zoo import markov_network as zoo
from kapsi.zoo.markov_network.model import discrete_model

drawn = settings(max_examples=15, deadline=None, derandomize=True)


@st.composite
def networks(draw, zeros: bool = True) -> tuple[list[tuple[int, ...]], list[int], list[torch.Tensor]]:
    """Draw cliques of 2 to 5 nodes, their numbers of states, and tables of log-potentials."""
    nodes = draw(st.integers(2, 5))
    sizes = draw(st.lists(st.integers(1, 3), min_size=nodes, max_size=nodes))
    cliques = [
        tuple(draw(st.permutations(range(nodes)))[: draw(st.integers(1, 3))]) for _ in range(draw(st.integers(1, 4)))
    ]
    cliques += [(i,) for i in range(nodes) if not any(i in clique for clique in cliques)]
    values = np.random.default_rng(draw(st.integers(0, 99)))
    tables = []
    for clique in cliques:
        table = values.gamma(1.0, size=[sizes[i] for i in clique])
        if zeros and table.size > 2 and draw(st.booleans()):
            table.flat[0] = 0
        tables.append(torch.from_numpy(table).log())
    return cliques, sizes, tables


def every(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(list(itertools.product(*map(range, sizes))), dtype=torch.float64)


def brute(cliques: Any, sizes: Any, tables: Any) -> torch.Tensor:
    """Return the log-potential of every joint state, in the order of `every`."""
    found = []
    for state in itertools.product(*map(range, sizes)):
        found.append(sum(float(t[tuple(state[i] for i in c)]) for c, t in zip(cliques, tables, strict=True)))
    return torch.tensor(found, dtype=torch.float64)


def unnormalized(model: kp.Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = model(x)
    assert bool(y.isfinite().all())
    return torch.where(y < 0.9 * zoo.LOG_ZERO, -math.inf, y)


def classified(model: kp.Model, x: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of a label, also of one state."""
    with torch.no_grad():
        return model(x).log_softmax(-1)


def rows(sizes: tuple[int, ...], count: int, seed: int = 0) -> torch.Tensor:
    """Return rows of states that depend on each other."""
    draw = np.random.default_rng(seed)
    x = np.zeros((count, len(sizes)), dtype=int)
    for i, size in enumerate(sizes):
        x[:, i] = (draw.integers(0, size, count) * draw.integers(0, 2, count) + (x[:, i - 1] if i else 0)) % size
    return torch.from_numpy(x).double()


def marginal(log_p: torch.Tensor, sizes: tuple[int, ...], clique: tuple[int, ...]) -> torch.Tensor:
    """Return the marginal of a clique from the log-probability of every joint state."""
    joint = log_p.exp().reshape(sizes)
    others = [i for i in range(len(sizes)) if i not in clique]
    small = joint.sum(others) if others else joint
    return small.permute([sorted(clique).index(i) for i in clique])


def shares(x: torch.Tensor, sizes: tuple[int, ...], clique: tuple[int, ...]) -> torch.Tensor:
    table = torch.zeros([sizes[i] for i in clique], dtype=torch.float64)
    for row in x.long():
        table[tuple(row[list(clique)])] += 1 / len(x)
    return table


# ------------------------------------------------------------------------------------------------ the layer


@drawn
@given(networks())
def test_outputs_and_partition_function_are_those_of_brute_force(network) -> None:
    cliques, sizes, tables = network
    model = discrete_model(cliques_with(cliques, tables), sizes)
    expected = brute(cliques, sizes, tables)
    torch.testing.assert_close(unnormalized(model, every(sizes))[:, 0], expected, rtol=1e-10, atol=1e-10)
    total = expected.logsumexp(0)
    if total == -math.inf:
        assert zoo.log_partition(model)[0] == -math.inf
        return
    torch.testing.assert_close(zoo.log_partition(model)[0].detach(), total, rtol=1e-10, atol=1e-10)
    log_p = zoo.log_marginal(model, every(sizes))[:, 0]
    torch.testing.assert_close(log_p, expected - total, rtol=1e-10, atol=1e-10)
    scaled = zoo.normalized(model)
    torch.testing.assert_close(unnormalized(scaled, every(sizes))[:, 0], expected - total, rtol=1e-10, atol=1e-10)
    assert abs(zoo.log_partition(zoo.normalized(scaled)).item()) < 1e-10


def cliques_with(cliques: Any, tables: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    return list(zip(cliques, tables, strict=True))


@drawn
@given(networks(zeros=False), st.data())
def test_label_and_missing_inputs_are_those_of_brute_force(network, data) -> None:
    cliques, sizes, tables = network
    nodes = len(sizes)
    label = data.draw(st.integers(0, nodes - 1))
    joint = brute(cliques, sizes, tables).reshape(sizes)
    conditional = joint.movedim(label, -1).reshape(-1, sizes[label]).log_softmax(-1)
    others = [size for i, size in enumerate(sizes) if i != label]
    model = discrete_model(cliques_with(cliques, tables), sizes, label)
    torch.testing.assert_close(classified(model, every(others)), conditional, rtol=1e-10, atol=1e-10)
    assert model.spec.widths == (nodes - 1, sizes[label])
    torch.testing.assert_close(
        zoo.log_partition(model).logsumexp(0).detach(), joint.logsumexp(list(range(nodes))), rtol=1e-10, atol=1e-10
    )
    # Some of the others are not seen.
    hidden = data.draw(st.lists(st.integers(0, nodes - 1), unique=True, max_size=nodes))
    x = every(sizes)
    x[:, hidden] = math.nan
    full = discrete_model(cliques_with(cliques, tables), sizes)
    summed = joint.logsumexp([*set(hidden) - {label}], keepdim=True) if set(hidden) - {label} else joint
    wanted = summed.expand(sizes).movedim(label, -1).log_softmax(-1)
    wanted = wanted.unsqueeze(label).expand(*sizes, sizes[label]).reshape(-1, sizes[label])
    torch.testing.assert_close(zoo.log_posterior(full, x, [label]), wanted, rtol=1e-10, atol=1e-10)
    wanted = (joint - joint.logsumexp(list(range(nodes)))).logsumexp(hidden, keepdim=True) if hidden else None
    if wanted is not None:
        found = zoo.log_marginal(full, x)[:, 0]
        torch.testing.assert_close(found, wanted.expand(sizes).reshape(-1), rtol=1e-10, atol=1e-10)


def test_posterior_of_several_targets() -> None:
    x = rows((2, 3, 2), 50)
    model = zoo.fit_counts(x, [(0, 1), (1, 2)], states=(2, 3, 2))
    found = zoo.log_posterior(model, [[math.nan, 1.0, 0.0]], [2, 0])
    joint = unnormalized(model, every([2, 3, 2])).reshape(2, 3, 2)[:, 1, :].T
    torch.testing.assert_close(found[0], joint - joint.logsumexp((0, 1)), rtol=1e-12, atol=1e-12)
    assert found.shape == (1, 2, 2)


def test_potentials_of_zero_spoil_nothing() -> None:
    table = torch.tensor([[0.0, 1.0], [2.0, 0.0]], dtype=torch.float64).log()
    ones = torch.zeros(2, dtype=torch.float64)
    model = discrete_model([((0, 1), table), ((1, 2), table), ((2,), ones)], (2, 2, 2))
    x = every([2, 2, 2])
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), list(model.parameters()))
    assert bool(y.isfinite().all())
    assert bool(gradient.isfinite().all())
    log_p = zoo.log_marginal(model, x)[:, 0].exp()
    assert log_p.tolist() == pytest.approx([0, 0, 0.5, 0, 0, 0.5, 0, 0])
    with pytest.raises(DataError, match="observations in row 1 have probability zero"):
        zoo.log_posterior(model, [[0.0, 1.0, math.nan], [0.0, 0.0, math.nan]], [2])
    labelled = discrete_model([((0, 1), table), ((1, 2), table)], (2, 2, 2), label=1)
    assert kp.predict_log_proba(labelled, torch.tensor([[0.0, 0.0]]).double()).exp().tolist() == [[0.0, 1.0]]


def test_gradient_of_the_partition_function_is_the_marginals() -> None:
    x = rows((2, 3, 2), 40)
    model = zoo.fit_counts(x, [(0, 1), (1, 2), (0, 2)])
    (gradient,) = torch.autograd.grad(zoo.log_partition(model)[0], list(model.parameters()))
    log_p = zoo.log_marginal(model, every([2, 3, 2]))[:, 0]
    expected = torch.cat([marginal(log_p, (2, 3, 2), c).flatten() for c in [(0, 1), (1, 2), (0, 2)]])
    torch.testing.assert_close(gradient[0], expected, rtol=1e-10, atol=1e-12)


def test_ising_model_by_products() -> None:
    cliques = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]
    model = kp.Model(zoo.spec(cliques, kind="exponential", nodes=3), seed=0, dtype=torch.float64)
    spins = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=torch.float64)
    total = model(spins).logsumexp(0)
    torch.testing.assert_close(zoo.log_partition(model, values=(-1, 1)), total, rtol=1e-12, atol=1e-12)
    (weight,) = (head.psi["matrix"] for _, head in model.heads())
    expected = sum(w * spins[:, list(c)].prod(1) for w, c in zip(weight[0], cliques, strict=True))
    torch.testing.assert_close(model(spins)[:, 0], expected, rtol=1e-12, atol=1e-12)
    scaled = zoo.normalized(model, values=(-1, 1))
    torch.testing.assert_close(scaled(spins), model(spins) - total, rtol=1e-12, atol=1e-12)
    with pytest.raises(kp.SpecError, match="is not quadratic"):
        zoo.log_partition(model)
    with pytest.raises(kp.SpecError, match="expected values as finite numbers"):
        zoo.log_partition(model, values=())


# ------------------------------------------------------------------------------------------------ Gaussian


@drawn
@given(st.integers(1, 6), st.integers(0, 99))
def test_gaussian_is_the_density_of_scipy(nodes, seed) -> None:
    draw = np.random.default_rng(seed)
    root = np.tril(draw.normal(size=(nodes, nodes)) * (draw.random((nodes, nodes)) < 0.5), -1) + np.eye(nodes)
    precision, mean = root @ root.T, draw.normal(size=nodes)
    model = zoo.from_precision(mean, precision)
    x = draw.normal(size=(20, nodes))
    expected = np.atleast_1d(multivariate_normal.logpdf(x, mean, np.linalg.inv(precision)))
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.from_numpy(x))[:, 0].numpy(), expected, rtol=1e-8, atol=1e-8)
    assert abs(zoo.log_partition(model).item()) < 1e-8


def test_fitted_gaussian_has_the_covariances_of_its_cliques_and_zeros_elsewhere() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 5)) @ draw.normal(size=(5, 5)) * [1, 10, 0.1, 1, 5] + [0, 3, 1, -2, 7]
    ring = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1,)]
    model = zoo.fit_gaussian(x, ring)
    (head,) = (head for _, head in model.heads())
    pairs = head.spec.expansion.subsets
    precision = np.zeros((5, 5))
    for weight, pair in zip(head.psi["matrix"][0].tolist(), pairs, strict=True):
        if len(pair) == 2:
            precision[pair] = precision[pair[::-1]] = -weight * (2 if pair[0] == pair[1] else 1)
    covariance, wanted = np.linalg.inv(precision), np.cov(x.T, bias=True)
    unit = np.sqrt(np.diag(wanted))
    for i, j in [*ring[:-1], *((i, i) for i in range(5))]:
        assert abs(covariance[i, j] - wanted[i, j]) < 1e-8 * unit[i] * unit[j]
    assert (0, 2) not in pairs
    with torch.no_grad():
        expected = multivariate_normal.logpdf(x, x.mean(0), covariance)
        np.testing.assert_allclose(model(torch.from_numpy(x))[:, 0].numpy(), expected, rtol=1e-8)


def test_weights_of_rows_count_them() -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(30, 3)) @ draw.normal(size=(3, 3))
    times = draw.integers(1, 4, 30)
    for model, expected in (
        (
            zoo.fit_gaussian(x, [(0, 1), (1, 2)], sample_weight=times),
            zoo.fit_gaussian(x.repeat(times, 0), [(0, 1), (1, 2)]),
        ),
    ):
        torch.testing.assert_close(model(torch.from_numpy(x)), expected(torch.from_numpy(x)), rtol=1e-8, atol=1e-8)
    states = rows((2, 3, 2), 30)
    again = states.repeat_interleave(torch.from_numpy(times), 0)
    cliques = [(0, 1), (1, 2), (0, 2)]
    for method in ("likelihood", "pseudo", "conditional"):
        options: dict[str, Any] = {"method": method, "label": 1, "penalty": 0.01}
        model, expected = zoo.fit(states, cliques, sample_weight=times, **options), zoo.fit(again, cliques, **options)
        inputs = states[:, [0, 2]]
        torch.testing.assert_close(model(inputs), expected(inputs), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ likelihoods


def test_likelihood_of_a_chain_is_its_closed_form() -> None:
    sizes = (2, 3, 2)
    x = torch.cat((rows(sizes, 200), every(list(sizes))))
    model = zoo.fit(x, [(0, 1), (1, 2)], penalty=0)
    a, b, s = shares(x, sizes, (0, 1)), shares(x, sizes, (1, 2)), shares(x, sizes, (1,))
    expected = (a.unsqueeze(2) * b.unsqueeze(0) / s.reshape(1, 3, 1)).log().reshape(-1)
    torch.testing.assert_close(unnormalized(model, every(list(sizes)))[:, 0], expected, rtol=1e-6, atol=1e-6)


@drawn
@given(st.lists(st.integers(2, 3), min_size=4, max_size=4), st.integers(0, 99), st.sampled_from([0.01, 0.3]))
def test_likelihood_of_a_ring_matches_moments(sizes, seed, penalty) -> None:
    x = rows(tuple(sizes), 60, seed)
    cliques = [(0, 1), (2, 1), (2, 3), (3, 0)]
    model = zoo.fit(x, cliques, penalty=penalty, states=sizes)
    log_p = unnormalized(model, every(sizes))[:, 0]
    assert abs(float(log_p.logsumexp(0))) < 1e-10
    (head,) = (head for _, head in model.heads())
    parts = head.psi["matrix"][0].detach().split([*(sizes[a] * sizes[b] for a, b in cliques), 1])
    for clique, table in zip(cliques, parts, strict=False):
        apart = shares(x, tuple(sizes), clique) - marginal(log_p, tuple(sizes), clique)
        torch.testing.assert_close(apart.flatten(), penalty * table, rtol=0, atol=1e-7)


def test_pseudo_likelihood_is_at_its_maximum() -> None:
    sizes, cliques, penalty = (2, 3, 2, 2), [(0, 1), (1, 2, 3), (3, 0)], 0.05
    x = rows(sizes, 80)
    model = zoo.fit(x, cliques, method="pseudo", penalty=penalty)
    flat = next(model.parameters()).detach()[0].requires_grad_()
    parts = flat.split([math.prod(sizes[i] for i in c) for c in cliques])
    total = torch.zeros((), dtype=torch.float64)
    for row in x.long().tolist():
        for i, size in enumerate(sizes):
            scores = []
            for state in range(size):
                put = [*row[:i], state, *row[i + 1 :]]
                places = [sum_place(put, clique, sizes) for clique in cliques]
                scores.append(sum(part[place] for part, place in zip(parts, places, strict=True)))
            total = total + torch.stack(scores).log_softmax(0)[row[i]]
    objective = total / len(x) - penalty / 2 * flat.square().sum()
    (gradient,) = torch.autograd.grad(objective, flat)
    assert float(gradient.abs().max()) < 1e-7


def sum_place(row: list[int], clique: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    place = 0
    for i in clique:
        place = place * sizes[i] + row[i]
    return place


def test_pseudo_likelihood_of_one_clique_is_the_likelihood() -> None:
    x = torch.cat((rows((2, 3), 100), every([2, 3])))
    model = zoo.fit(x, [(0, 1)], method="pseudo", penalty=0)
    found = zoo.normalized(model)(every([2, 3])).exp().reshape(2, 3).detach()
    torch.testing.assert_close(found, shares(x, (2, 3), (0, 1)), rtol=1e-6, atol=1e-8)


def test_conditional_likelihood_is_at_its_maximum_and_above_the_joint_one() -> None:
    sizes, cliques, penalty = (2, 3, 2, 3), [(0, 3), (1, 2, 3), (0, 1)], 0.01
    x = rows(sizes, 150)
    model = zoo.fit(x, cliques, method="conditional", label=3, penalty=penalty)
    kappa = model.layers[0].heads[0].expand(x[:, :3]).dense()
    assert kappa.shape[1] == 2 + 6
    log_p = kp.predict_log_proba(model, x[:, :3])
    y = torch.nn.functional.one_hot(x[:, 3].long(), 3).double()
    apart = (y - log_p.exp()).T @ kappa / len(x) - penalty * next(model.parameters())
    assert apart.abs().max().item() < 1e-4
    joint = zoo.fit(x, cliques, label=3, penalty=1e-6)
    found = kp.predict_log_proba(joint, x[:, :3])
    best = zoo.fit(x, cliques, method="conditional", label=3, penalty=1e-6)
    nll = torch.nn.functional.nll_loss
    labels = x[:, 3].long()
    assert float(nll(kp.predict_log_proba(best, x[:, :3]), labels)) <= float(nll(found, labels)) + 1e-6


def test_counts_of_one_clique_are_the_likelihood() -> None:
    x = torch.cat((rows((2, 3), 100), every([2, 3])))
    counted = zoo.fit_counts(x, [(1, 0)], smoothing=0)
    assert zoo.log_partition(counted).exp().item() == pytest.approx(len(x))
    fitted = zoo.fit(x, [(1, 0)], penalty=0)
    torch.testing.assert_close(zoo.normalized(counted)(x), fitted(x), rtol=1e-6, atol=1e-6)


def test_too_wide_a_network_is_refused_with_the_number_and_conditionals_go_on() -> None:
    side, states = 9, 10
    node = {(r, c): side * r + c for r in range(side) for c in range(side)}
    cliques = [(node[r, c], node[r, c + 1]) for r in range(side) for c in range(side - 1)]
    cliques += [(node[r, c], node[r + 1, c]) for r in range(side - 1) for c in range(side)]
    sizes = [states] * side**2
    x = rows(tuple(sizes), 5)
    with pytest.raises(kp.SpecError, match=r"needs a table of 1e\+\d+ entries.*method='pseudo'"):
        zoo.fit(x, cliques, states=sizes)
    model = zoo.fit(x, cliques, states=sizes, method="pseudo", penalty=0.1)
    with pytest.raises(kp.SpecError, match=r"log_partition: the largest table would have 1e\+\d+ entries"):
        zoo.log_partition(model)
    assert zoo.log_posterior(model, x, [40]).exp().sum(1).tolist() == pytest.approx([1.0] * 5)


def test_few_steps_are_told() -> None:
    with pytest.warns(UserWarning, match="after 1 steps an entry of the gradient is"):
        zoo.fit(rows((2, 3, 2), 40), [(0, 1), (1, 2), (0, 2)], steps=1)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 4)) @ draw.normal(size=(4, 4))
    with pytest.warns(UserWarning, match="after 1 rounds correlations differ"):
        zoo.fit_gaussian(x, [(0, 1), (1, 2), (2, 3), (3, 0)], steps=1)


# ------------------------------------------------------------------------------------------------ pgmpy


@pytest.fixture(scope="module")
def pgmpy_models() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("pgmpy")
        from pgmpy.factors.discrete import DiscreteFactor
        from pgmpy.inference import VariableElimination
        from pgmpy.models import DiscreteMarkovNetwork
    return DiscreteFactor, VariableElimination, DiscreteMarkovNetwork


@drawn
@given(network=networks(), data=st.data())
def test_imported_network_equals_pgmpy(pgmpy_models, network, data) -> None:
    discrete, inference, markov = pgmpy_models
    cliques, sizes, tables = network
    nodes = len(sizes)
    graph = markov()
    graph.add_nodes_from(range(nodes))
    for clique, table in zip(cliques, tables, strict=True):
        graph.add_edges_from(itertools.combinations(clique, 2))
        names = {i: [f"s{k}" for k in range(sizes[i])] for i in clique}
        graph.add_factors(discrete(list(clique), [sizes[i] for i in clique], table.exp().numpy(), state_names=names))
    order = data.draw(st.permutations(range(nodes)))
    turned = {order[0]: [f"s{k}" for k in reversed(range(sizes[order[0]]))]}
    model = zoo.from_pgmpy(graph, columns=order, states=turned)
    x = every([sizes[i] for i in order])
    original = x.clone()
    original[:, 0] = sizes[order[0]] - 1 - x[:, 0]
    back = original[:, [order.index(i) for i in range(nodes)]].long()
    expected = brute(cliques, sizes, tables).reshape(sizes)[tuple(back.T)]
    torch.testing.assert_close(unnormalized(model, x)[:, 0], expected, rtol=1e-8, atol=1e-8)
    total = graph.get_partition_function()
    if total > 0:
        assert zoo.log_partition(model).item() == pytest.approx(math.log(total), abs=1e-8)
    label = data.draw(st.integers(0, nodes - 1))
    names = [i for i in range(nodes) if i != label]
    classifier = zoo.from_pgmpy(graph, columns=names, label=label)
    row = [data.draw(st.integers(0, sizes[i] - 1)) for i in names]
    found = classified(classifier, torch.tensor([row], dtype=torch.float64))[0].exp()
    evidence = {i: f"s{state}" for i, state in zip(names, row, strict=True)}
    values = torch.tensor(inference(graph).query([label], evidence=evidence, show_progress=False).values)
    # Where nothing is summed over, pgmpy leaves factors of the evidence in.
    if float(values.sum()) > 0:
        torch.testing.assert_close(found, values / values.sum(), rtol=1e-8, atol=1e-8)


def test_what_is_not_carried_over_is_refused(pgmpy_models) -> None:
    discrete, _, markov = pgmpy_models
    graph = markov([("a", "b")])
    with pytest.raises(kp.SpecError, match="the network has no factors"):
        zoo.from_pgmpy(graph)
    with pytest.raises(kp.SpecError, match="expected a DiscreteMarkovNetwork with factors, got dict"):
        zoo.from_pgmpy({})
    graph.add_factors(discrete(["a"], [2], [1, 2]))
    with pytest.raises(kp.SpecError, match="pgmpy rejects the network"):
        zoo.from_pgmpy(graph)
    graph.add_factors(discrete(["a", "b"], [2, 2], [1, 2, 3, 4]))
    assert zoo.from_pgmpy(graph)(torch.tensor([[1.0, 0.0]]).double()).item() == pytest.approx(math.log(6))
    for options, message in (
        ({"label": "c"}, "there is no node 'c' as label"),
        ({"columns": ["a"]}, "expected columns to name each node once"),
        ({"columns": ["a", "b"], "label": "b"}, "expected columns to name each node once"),
        ({"states": {"a": ["x", "y"]}}, "expected states of 'a'"),
    ):
        with pytest.raises(kp.SpecError, match=message):
            zoo.from_pgmpy(graph, **options)
    graph.add_factors(discrete(["b"], [2], [1, 1], state_names={"b": ["no", "yes"]}))
    with pytest.raises(kp.SpecError, match="two factors name the states of 'b' differently"):
        zoo.from_pgmpy(graph)
    negative = markov([("a", "b")])
    negative.add_factors(discrete(["a", "b"], [2, 2], [1, -2, 3, 4]))
    with pytest.raises(kp.SpecError, match="has values below 0"):
        zoo.from_pgmpy(negative)


# ------------------------------------------------------------------------------------------------ what is given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cliques": [(0, 1)], "states": (2, 2), "kind": "other"},
            "kind: expected one of counts, exponential, gaussian",
        ),
        ({"cliques": [(0, 1)]}, "needs states, the number of states"),
        ({"cliques": [(0, 1)], "states": (2, 0)}, "at least 1"),
        ({"cliques": [(0,)], "states": (2, 2)}, "node 1 is in no clique"),
        ({"cliques": [(0, 2)], "states": (2, 2)}, "numbers from 0 to 1, each once"),
        ({"cliques": [(0, 0)], "states": (2, 2)}, "each once"),
        ({"cliques": 3, "states": (2, 2)}, "expected cliques as sets"),
        ({"cliques": [(0, 1)], "states": (5000, 5000)}, r"2.5e\+07 entries, 0.2 GB"),
        ({"cliques": [(0, 1)], "states": (2, 2), "label": 2}, "label"),
        ({"cliques": [(0,)], "states": (2,), "label": 0}, "a node other than the label"),
        ({"cliques": [(0, 1)], "kind": "gaussian"}, "nodes: expected an integer of at least 1, got None"),
        ({"cliques": [(0, 1)], "kind": "gaussian", "states": (2, 2)}, "the inputs are continuous"),
    ],
)
def test_wrong_specifications_are_refused(options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        zoo.spec(**options)


def test_wrong_fits_are_refused() -> None:
    x = rows((2, 2), 20)
    for options, message in (
        ({"method": "other"}, "expected one of likelihood"),
        ({"penalty": -1}, "penalty"),
        ({"steps": 0}, "steps"),
        ({"method": "conditional"}, "expected a label"),
        ({"states": (1, 2)}, "0 to 0"),
        ({"sample_weight": [1.0]}, "sample_weight"),
    ):
        with pytest.raises(KapsiError, match=message):
            zoo.fit(x, [(0, 1)], **options)
    with pytest.raises(DataError, match="expected state indices"):
        zoo.fit(x + 0.5, [(0, 1)])
    with pytest.raises(kp.SpecError, match="smoothing"):
        zoo.fit_counts(x, [(0, 1)], smoothing=math.nan)
    draw = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(DataError, match="collinear"):
        zoo.fit_gaussian(np.concatenate((draw, draw[:, :1] * 2), 1), [(0, 1, 2)])
    with pytest.raises(DataError, match="input 1 is constant"):
        zoo.fit_gaussian(draw * [1, 0], [(0, 1)])
    with pytest.raises(DataError, match="not positive definite"):
        zoo.from_precision([0, 0], [[1.0, 2.0], [2.0, 1.0]])
    with pytest.raises(DataError, match="symmetric"):
        zoo.from_precision([0, 0], [[1.0, 0.5], [0.0, 1.0]])
    with pytest.raises(DataError, match="in no clique"):
        zoo.from_precision([0, 0], [[1.0, 0.5], [0.5, 1.0]], [(0,), (1,)])
    with pytest.raises(DataError, match="mean"):
        zoo.from_precision([0, 0], [[1.0]])


def test_other_models_are_refused() -> None:
    other = kp.Model(kp.rpn([2, 1]), seed=0)
    for call in (zoo.log_partition, zoo.normalized):
        with pytest.raises(kp.SpecError, match="expected the model of a Markov network"):
            call(other)
    gaussian = zoo.from_precision([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(kp.SpecError, match="expected a network of tables"):
        zoo.log_marginal(gaussian, [[0.0, 1.0]])
    model = zoo.fit_counts(rows((2, 2), 20), [(0, 1)])
    with pytest.raises(kp.SpecError, match="expected targets"):
        zoo.log_posterior(model, [[0.0, 1.0]], [2])
    with pytest.raises(kp.DataError, match="are not the number of a state"):
        zoo.log_posterior(model, [[0.0, 5.0]], [0])
    with pytest.raises(kp.DataError, match="are not the number of a state"):
        model(torch.tensor([[0.0, 5.0]]).double())
    with pytest.raises(kp.SpecError, match="expected no values"):
        zoo.log_partition(model, values=(0, 1))
    infinite = kp.Model(zoo.spec([(0, 1)], kind="gaussian", nodes=2), seed=0, dtype=torch.float64)
    infinite.layers[0].heads[0].assign("reconciliation", matrix=torch.ones(1, 5))
    with pytest.raises(kp.SpecError, match="not positive definite"):
        zoo.log_partition(infinite)


def test_inputs_in_no_factor_are_uniform() -> None:
    spec = zoo.spec([(0, 1)], states=(2, 3))
    head = spec.layers[0].heads[0]
    narrow = replace(head, expansion=replace(head.expansion, subsets=((0,),)))
    model = kp.Model(replace(spec, layers=(replace(spec.layers[0], heads=(narrow,)),)), seed=0, dtype=torch.float64)
    torch.testing.assert_close(zoo.log_partition(model)[0], model(every([2, 3])).logsumexp(0)[0])


def test_what_is_always_zero_is_not_normalized() -> None:
    model = discrete_model([((0, 1), torch.full((2, 2), -math.inf, dtype=torch.float64))], [2, 2], None)
    assert zoo.log_partition(model).tolist() == [-math.inf]
    with pytest.raises(kp.SpecError, match="normalized: the potentials of all rows are zero"):
        zoo.normalized(model)
