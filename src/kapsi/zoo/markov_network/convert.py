"""Converter of pgmpy's Markov networks, and parity cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.zoo.base import Case, Comparison, sizes
from kapsi.zoo.graphical import (
    LOG_ZERO,
    Outside,
    check_import,
    check_pgmpy,
    compare_classifier,
    infinite_deviation,
    listed,
    log_table,
    names_of,
    queried,
    quiet,
    random_rows,
    state_names,
    values_of,
)
from kapsi.zoo.markov_network.inference import log_partition, log_posterior, normalized
from kapsi.zoo.markov_network.model import check_cliques, discrete_model, from_precision


def from_pgmpy(
    network: Any,
    *,
    columns: Sequence[Hashable] | None = None,
    states: Mapping[Any, Sequence[Any]] | None = None,
    label: Hashable | None = None,
    outside: Outside = "error",
) -> Model:
    """Return a pgmpy `DiscreteMarkovNetwork` as a model in float64: Σ_C log φ_C(x_C), for each state of a label if given.

    Inputs are state indices in the order of `network.states`; `bayesian_network.encode` converts names. Each factor is a clique
    with separate columns. With a label, `kapsi.predict_log_proba` has log p(label | all others). A potential of zero is
    exp(−10,000): outputs of impossible rows are below −9,000, −∞ in `log_marginal`, and an error in `log_posterior`. The
    partition function is not computed; see `log_partition` and `normalized`.

    Args:
        network: a `DiscreteMarkovNetwork` with `DiscreteFactor`s.
        columns: nodes in the order of the inputs, without the label; default: the order of `network.nodes`.
        states: states of nodes in the order of their indices; default: the order of the network.
        label: the predicted node.
        outside: treatment of inputs other than state indices: `error`, or the `nearest` state.

    Raises:
        SpecError: an unsupported class, no factors, a network rejected by pgmpy's `check_model`, unsupported factors, different
            state names
            in two factors, or negative potentials.
    """
    from pgmpy.factors.discrete import DiscreteFactor
    from pgmpy.models import DiscreteMarkovNetwork

    name = type(network).__name__
    if not isinstance(network, DiscreteMarkovNetwork):
        raise SpecError(
            f"from_pgmpy: expected a DiscreteMarkovNetwork with factors, got {name}; use to_markov_model() of a factor graph or "
            "junction tree, and bayesian_network.from_pgmpy for a Bayesian network"
        )
    where = f"from_pgmpy({name})"
    order = check_import(where, network, columns, states, label)
    if not network.factors:
        raise SpecError(f"{where}: the network has no factors; add factors with add_factors, or see fit")
    check_pgmpy(where, network)
    names: dict[Hashable, list[Any]] = {}
    for factor in network.factors:
        if type(factor) is not DiscreteFactor:
            raise SpecError(f"{where}: a factor is a {type(factor).__name__}; only DiscreteFactor is supported")
        for node in factor.variables:
            theirs = list(factor.state_names[node])
            if sorted(map(repr, names.setdefault(node, theirs))) != sorted(map(repr, theirs)):
                raise SpecError(
                    f"{where}: two factors name the states of {node!r} differently, {listed(names[node])} and {listed(theirs)}"
                )
    names = state_names(where, {node: network.states[node] for node in names}, states)
    number = {node: i for i, node in enumerate(order)}
    counts = [len(names[node]) for node in order]
    cliques = [tuple(number[node] for node in factor.variables) for factor in network.factors]
    check_cliques(where, cliques, len(order), counts)
    tables = [
        (clique, log_table(where, f"the factor of {listed(factor.variables)}", factor, names))
        for clique, factor in zip(cliques, network.factors, strict=True)
    ]
    return discrete_model(tables, counts, None if label is None else len(order) - 1, outside)


# ------------------------------------------------------------------------------------------------ parity


def _random_network(seed: int, nodes: int = 6, impossible: bool = True) -> Any:
    """Return a random pgmpy network: a ring with a triangle, and factors of single nodes; some potentials are zero."""
    from pgmpy.factors.discrete import DiscreteFactor
    from pgmpy.models import DiscreteMarkovNetwork

    draw = np.random.default_rng(seed)
    counts = draw.integers(2, 4, nodes)
    cliques = [(i, (i + 1) % nodes) for i in range(nodes)] + [(0, 2, 1), (3,), (4,)]
    network = DiscreteMarkovNetwork()
    network.add_nodes_from([f"n{i}" for i in range(nodes)])
    for clique in cliques:
        network.add_edges_from([(f"n{i}", f"n{j}") for i, j in itertools.combinations(clique, 2)])
        values = draw.gamma(1.0, size=counts[list(clique)].tolist())
        if impossible and clique in ((1, 2), (4, 5)):
            values.flat[0] = 0.0
        names = {f"n{i}": [f"s{k}" for k in range(counts[i])] for i in clique}
        network.add_factors(
            DiscreteFactor([f"n{i}" for i in clique], counts[list(clique)].tolist(), values, state_names=names)
        )
    return network


def _potentials(seed: int) -> Comparison:
    network = _random_network(seed)
    columns = list(network.nodes)
    model = from_pgmpy(network)
    x = random_rows(network, columns, 60, seed + 1)
    logs = []
    for row in x:
        names = names_of(network, columns, row)
        values = [factor.get_value(**{node: names[node] for node in factor.variables}) for factor in network.factors]
        logs.append(sum(math.log(value) if value > 0 else -math.inf for value in values))
    theirs = torch.tensor(logs, dtype=torch.float64)
    with torch.no_grad():
        ours = model(x)[:, 0]
    ours = torch.where(ours < 0.9 * LOG_ZERO, -math.inf, ours)
    y = theirs.clamp_min(-50).unsqueeze(-1)
    return Comparison(infinite_deviation(ours, theirs), sizes(model), values_of(network.factors), model, x, y, "mse")


def _partition(seed: int) -> Comparison:
    network = _random_network(seed)
    columns = list(network.nodes)
    model = normalized(from_pgmpy(network))
    x = random_rows(network, columns, 20, seed + 1)
    total = math.log(float(network.get_partition_function()))
    ours = torch.stack((log_partition(from_pgmpy(network))[0].detach(), log_partition(model)[0].detach() + total))
    deviation = infinite_deviation(ours, torch.full_like(ours, total))
    y = torch.zeros(len(x), 1, dtype=torch.float64)
    return Comparison(deviation, sizes(model), values_of(network.factors), model, x, y, "mse")


def _classified(seed: int) -> Comparison:
    network = _random_network(seed, impossible=False)
    return compare_classifier(network, network.factors, from_pgmpy, seed)


def _missing(seed: int) -> Comparison:
    from pgmpy.inference import BeliefPropagation

    network = _random_network(seed, impossible=False)
    columns = list(network.nodes)
    model = from_pgmpy(network)
    whole = random_rows(network, columns, 20, seed + 1)
    hidden = torch.from_numpy(np.random.default_rng(seed + 2).random(whole.shape) < 0.5)
    x = torch.where(hidden, math.nan, whole)
    x[:, 0] = math.nan
    theirs = queried(network, columns, x, columns[0], BeliefPropagation(network))
    deviation = infinite_deviation(log_posterior(model, x, [0]), theirs)
    with torch.no_grad():
        y = model(whole)
    return Comparison(deviation, sizes(model), values_of(network.factors), model, whole, y, "mse")


def _gaussian(seed: int) -> Comparison:
    from scipy.stats import multivariate_normal

    draw = np.random.default_rng(seed)
    nodes = 6
    precision = np.eye(nodes) * 2
    for i in range(nodes):
        j = (i + 1) % nodes
        precision[i, j] = precision[j, i] = draw.uniform(-0.8, 0.8)
    mean = draw.normal(size=nodes)
    model = from_precision(mean, precision)
    x = torch.from_numpy(draw.normal(size=(60, nodes)) + mean)
    theirs = torch.from_numpy(multivariate_normal.logpdf(x.numpy(), mean, np.linalg.inv(precision)))
    with torch.no_grad():
        ours = model(x)[:, 0]
    deviation = infinite_deviation(ours, theirs)
    return Comparison(deviation, sizes(model), 2 * nodes + nodes, model, x, theirs.unsqueeze(-1), "mse")


def _case(model: str, quantity: str, data: str, compare: Callable[[int], Comparison], package: str = "pgmpy") -> Case:
    return Case(f"Markov network, {model}", quantity, data, package, 1e-8, quiet(compare))


PARITY: tuple[Case, ...] = (
    _case("DiscreteMarkovNetwork imported", "log-potentials of rows", "random ring of 6 nodes, zeros", _potentials),
    _case("DiscreteMarkovNetwork imported", "log-partition function", "random ring of 6 nodes, zeros", _partition),
    _case("DiscreteMarkovNetwork imported", "log p(label | others)", "random ring of 6 nodes", _classified),
    _case(
        "DiscreteMarkovNetwork imported", "log p(node | some others)", "random ring of 6 nodes, half missing", _missing
    ),
    _case("Gaussian, precision matrix", "log-density", "random ring of 6 nodes", _gaussian, "scipy"),
)
