"""Converter of pgmpy's Markov networks, and parity cases."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.training.prediction import predict_log_proba
from kapsi.zoo.base import Case, Comparison
from kapsi.zoo.bayesian_network.model import LOG_ZERO, Outside, check_given, inputs_of, listed
from kapsi.zoo.markov_network.inference import log_partition, log_posterior, normalized
from kapsi.zoo.markov_network.model import Table, check_cliques, discrete_model, from_precision

__all__ = ["PARITY", "from_pgmpy"]


def from_pgmpy(
    network: Any,
    *,
    columns: Sequence[Hashable] | None = None,
    states: Mapping[Any, Sequence[Any]] | None = None,
    label: Hashable | None = None,
    outside: Outside = "error",
) -> Model:
    """Return a `DiscreteMarkovNetwork` of pgmpy as a model in float64: Σ_C log φ_C(x_C), or that for each state of a label.

    Inputs are numbers of states, in the order of `network.states`; `bayesian_network.encode` makes them of names. Each factor is a
    clique with its own columns. With a label, `kapsi.predict_log_proba` has log p(label | all others). A potential of zero is
    exp(−10,000): outputs of impossible rows are below −9,000, `log_marginal` has −∞ for them, and `log_posterior` refuses what is
    observed if it is impossible. The partition function is not computed; see `log_partition` and `normalized`.

    Args:
        network: a `DiscreteMarkovNetwork` with `DiscreteFactor`s.
        columns: the nodes in the order of the inputs, without the label; by default that of `network.nodes`.
        states: the states of nodes in the order of their numbers, where it is not that of the network.
        label: the node that is predicted.
        outside: what an input is that is not the number of a state: an `error`, or the `nearest` one.

    Raises:
        SpecError: another class, no factors, a network that `check_model` of pgmpy refuses, factors of another kind or whose states
            have other names than those of another factor, or negative potentials.
    """
    from pgmpy.factors.discrete import DiscreteFactor
    from pgmpy.models import DiscreteMarkovNetwork

    name = type(network).__name__
    if not isinstance(network, DiscreteMarkovNetwork):
        raise SpecError(
            f"from_pgmpy: expected a DiscreteMarkovNetwork with factors, got {name}; a factor graph or a junction tree has "
            "to_markov_model(), a Bayesian network is for bayesian_network.from_pgmpy"
        )
    where = f"from_pgmpy({name})"
    nodes = list(network.nodes)
    check_given(where, nodes, columns, states)
    if not network.factors:
        raise SpecError(f"{where}: there are no factors; add them with add_factors, or see fit")
    inputs = inputs_of(where, nodes, columns, label)
    order = inputs if label is None else [*inputs, label]
    try:
        network.check_model()
    except ValueError as error:
        raise SpecError(f"{where}: pgmpy refuses the network: {str(error).splitlines()[0]}") from None
    named: dict[Hashable, list[Any]] = {}
    for factor in network.factors:
        if type(factor) is not DiscreteFactor:
            raise SpecError(f"{where}: a factor is a {type(factor).__name__}; only DiscreteFactor is carried over")
        for node in factor.variables:
            theirs = list(factor.state_names[node])
            if sorted(map(repr, named.setdefault(node, theirs))) != sorted(map(repr, theirs)):
                raise SpecError(
                    f"{where}: two factors call the states of {node!r} differently, {listed(named[node])} and {listed(theirs)}"
                )
    named.update({node: list(network.states[node]) for node in named})
    for node, given in (states or {}).items():
        if node not in named or sorted(map(repr, given)) != sorted(map(repr, named[node])):
            raise SpecError(
                f"{where}: expected states of {node!r} to be those of the network in another order, "
                f"{listed(named.get(node, []))}; got {listed(given)}"
            )
        named[node] = list(given)
    number = {node: i for i, node in enumerate(order)}
    sizes = [len(named[node]) for node in order]
    cliques = [tuple(number[node] for node in factor.variables) for factor in network.factors]
    check_cliques(where, cliques, len(order), sizes)
    tables: list[Table] = []
    for clique, factor in zip(cliques, network.factors, strict=True):
        values = torch.as_tensor(factor.values).detach().to("cpu", torch.float64)
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise SpecError(
                f"{where}: the factor of {listed(factor.variables)} has values that are no potentials, 0 or more"
            )
        for axis, node in enumerate(factor.variables):
            theirs = list(factor.state_names[node])
            values = values.index_select(axis, torch.tensor([theirs.index(state) for state in named[node]]))
        tables.append((clique, values.log()))
    return discrete_model(tables, sizes, None if label is None else len(inputs), outside)


# ------------------------------------------------------------------------------------------------ comparisons


def _random_network(seed: int, nodes: int = 6, impossible: bool = True) -> Any:
    """Return a random network of pgmpy: a ring, a triangle in it, and factors of single nodes; some potentials are zero."""
    from pgmpy.factors.discrete import DiscreteFactor
    from pgmpy.models import DiscreteMarkovNetwork

    draw = np.random.default_rng(seed)
    sizes = draw.integers(2, 4, nodes)
    cliques = [(i, (i + 1) % nodes) for i in range(nodes)] + [(0, 2, 1), (3,), (4,)]
    network = DiscreteMarkovNetwork()
    network.add_nodes_from([f"n{i}" for i in range(nodes)])
    for clique in cliques:
        network.add_edges_from([(f"n{i}", f"n{j}") for i, j in itertools.combinations(clique, 2)])
        values = draw.gamma(1.0, size=sizes[list(clique)].tolist())
        if impossible and clique in ((1, 2), (4, 5)):
            values.flat[0] = 0.0
        names = {f"n{i}": [f"s{k}" for k in range(sizes[i])] for i in clique}
        network.add_factors(
            DiscreteFactor([f"n{i}" for i in clique], sizes[list(clique)].tolist(), values, state_names=names)
        )
    return network


def _random_rows(network: Any, columns: Sequence[Hashable], rows: int, seed: int) -> Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(
        np.stack([draw.integers(0, len(network.states[name]), rows) for name in columns], 1)
    ).double()


def _names(network: Any, columns: Sequence[Hashable], row: Tensor) -> dict[Hashable, Any]:
    """Return what is there of a row of numbers by the names of nodes and states."""
    return {
        name: network.states[name][int(code)] for name, code in zip(columns, row.tolist(), strict=True) if code == code
    }


def _their_values(network: Any) -> int:
    return sum(int(np.size(factor.values)) for factor in network.factors)


def _our_values(model: Model) -> int:
    return sum(tensor.numel() for tensor in model.state_dict().values())


def _deviation(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, of values above one relative; equal infinite values are equal."""
    apart = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / theirs.abs().clamp_min(1.0))
    return float(apart.nan_to_num(math.inf).max())


def _potentials(seed: int) -> Comparison:
    network = _random_network(seed)
    columns = list(network.nodes)
    model = from_pgmpy(network)
    x = _random_rows(network, columns, 60, seed + 1)
    found = []
    for row in x:
        names = _names(network, columns, row)
        values = [factor.get_value(**{node: names[node] for node in factor.variables}) for factor in network.factors]
        found.append(sum(math.log(value) if value > 0 else -math.inf for value in values))
    theirs = torch.tensor(found, dtype=torch.float64)
    with torch.no_grad():
        ours = model(x)[:, 0]
    ours = torch.where(ours < 0.9 * LOG_ZERO, -math.inf, ours)
    y = theirs.clamp_min(-50).unsqueeze(-1)
    return Comparison(_deviation(ours, theirs), _our_values(model), _their_values(network), model, x, y, "mse")


def _partition(seed: int) -> Comparison:
    network = _random_network(seed)
    columns = list(network.nodes)
    model = normalized(from_pgmpy(network))
    x = _random_rows(network, columns, 20, seed + 1)
    total = math.log(float(network.get_partition_function()))
    ours = torch.stack((log_partition(from_pgmpy(network))[0].detach(), log_partition(model)[0].detach() + total))
    deviation = _deviation(ours, torch.full_like(ours, total))
    y = torch.zeros(len(x), 1, dtype=torch.float64)
    return Comparison(deviation, _our_values(model), _their_values(network), model, x, y, "mse")


def _queried(network: Any, columns: Sequence[Hashable], x: Tensor, label: str, inference: Any) -> Tensor:
    found = [
        inference.query([label], evidence=_names(network, columns, row), show_progress=False).values.tolist()
        for row in x
    ]
    # Variable elimination of pgmpy 1.1 leaves factors of the evidence in where nothing is summed over.
    return torch.tensor(found, dtype=torch.float64).log().log_softmax(-1)


def _classified(seed: int) -> Comparison:
    from pgmpy.inference import VariableElimination

    network = _random_network(seed, impossible=False)
    columns = [name for name in network.nodes if name != "n1"]
    model = from_pgmpy(network, label="n1")
    x = _random_rows(network, columns, 40, seed + 1)
    theirs = _queried(network, columns, x, "n1", VariableElimination(network))
    ours = torch.as_tensor(predict_log_proba(model, x), dtype=torch.float64)
    y = torch.from_numpy(np.random.default_rng(seed).integers(0, theirs.shape[1], len(x)))
    return Comparison(
        _deviation(ours, theirs), _our_values(model), _their_values(network), model, x, y, "cross_entropy"
    )


def _missing(seed: int) -> Comparison:
    from pgmpy.inference import BeliefPropagation

    network = _random_network(seed, impossible=False)
    columns = list(network.nodes)
    model = from_pgmpy(network)
    whole = _random_rows(network, columns, 20, seed + 1)
    hidden = torch.from_numpy(np.random.default_rng(seed + 2).random(whole.shape) < 0.5)
    x = torch.where(hidden, math.nan, whole)
    x[:, 0] = math.nan
    theirs = _queried(network, columns, x, str(columns[0]), BeliefPropagation(network))
    deviation = _deviation(log_posterior(model, x, [0]), theirs)
    with torch.no_grad():
        y = model(whole)
    return Comparison(deviation, _our_values(model), _their_values(network), model, whole, y, "mse")


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
    deviation = _deviation(ours, theirs)
    return Comparison(deviation, _our_values(model), 2 * nodes + nodes, model, x, theirs.unsqueeze(-1), "mse")


def _quietly(compare: Callable[[int], Comparison], seed: int) -> Comparison:
    """Compare without what pgmpy warns of itself when it is imported: modules that it is about to move."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*pgmpy")
        return compare(seed)


def _case(model: str, quantity: str, data: str, compare: Callable[[int], Comparison], package: str = "pgmpy") -> Case:
    return Case(f"Markov network, {model}", quantity, data, package, 1e-8, partial(_quietly, compare))


PARITY: tuple[Case, ...] = (
    _case("DiscreteMarkovNetwork imported", "log-potentials of rows", "random ring of 6 nodes, zeros", _potentials),
    _case("DiscreteMarkovNetwork imported", "log-partition function", "random ring of 6 nodes, zeros", _partition),
    _case("DiscreteMarkovNetwork imported", "log p(label | others)", "random ring of 6 nodes", _classified),
    _case(
        "DiscreteMarkovNetwork imported", "log p(node | some others)", "random ring of 6 nodes, half missing", _missing
    ),
    _case("Gaussian, precision matrix", "log-density", "random ring of 6 nodes", _gaussian, "scipy"),
)
