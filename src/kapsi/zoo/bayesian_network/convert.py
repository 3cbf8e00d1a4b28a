"""Converter of pgmpy's Bayesian networks, and parity cases."""

from __future__ import annotations

import gzip
import importlib.resources
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
from kapsi.zoo.base import Case, Comparison
from kapsi.zoo.bayesian_network.estimation import encode, fit_discrete
from kapsi.zoo.bayesian_network.inference import log_marginal, log_posterior
from kapsi.zoo.bayesian_network.model import (
    LOG_ZERO,
    Factor,
    Outside,
    check_given,
    check_states,
    discrete_model,
    gaussian_model,
    inputs_of,
    listed,
)
from kapsi.zoo.bayesian_network.structure import hill_climb, parents_from_pgmpy, structure_score
from kapsi.zoo.inference import LogFactor, eliminate

__all__ = ["PARITY", "from_pgmpy"]


def from_pgmpy(
    network: Any,
    *,
    columns: Sequence[Hashable] | None = None,
    states: Mapping[Any, Sequence[Any]] | None = None,
    label: Hashable | None = None,
    joint: bool = False,
    outside: Outside = "error",
) -> Model:
    """Return a network of pgmpy as a model in float64, log p(x), or log p(x, label = y) for each state y of a label.

    Inputs of a discrete network are numbers of states, in the order of `network.states`; `encode` makes them of names. Its CPDs are
    looked up as they are, a column of κ for each. A probability of zero is exp(−10,000): outputs of impossible rows are below
    −9,000, and `log_marginal` has −∞ for them.

    Args:
        network: a `DiscreteBayesianNetwork` with `TabularCPD`s, or a `LinearGaussianBayesianNetwork`.
        columns: the nodes in the order of the inputs, without the label; by default that of `network.nodes`.
        states: the states of discrete nodes in the order of their numbers, where it is not that of the network.
        label: the node that is predicted, of a discrete network.
        joint: whether κ of a discrete network has joint probabilities of families and parent sets, log p(i, Γ) − log p(Γ), where
            every joint state of the parents is possible; they are found by variable elimination.
        outside: what an input is that is not the number of a state: an `error`, or the `nearest` one.

    Raises:
        SpecError: another class, a network that `check_model` of pgmpy refuses, a CPD of another kind, or joint probabilities that
            need a table of more than 16.7 million numbers.
    """
    from pgmpy.models import DiscreteBayesianNetwork, LinearGaussianBayesianNetwork

    name = type(network).__name__
    if not isinstance(network, DiscreteBayesianNetwork | LinearGaussianBayesianNetwork):
        raise SpecError(
            f"from_pgmpy: expected a DiscreteBayesianNetwork or a LinearGaussianBayesianNetwork with CPDs, got {name}; a DAG has "
            "only a structure: see parents_from_pgmpy, fit_discrete and fit_gaussian"
        )
    where = f"from_pgmpy({name})"
    nodes = list(network.nodes)
    check_given(where, nodes, columns, states)
    inputs = inputs_of(where, nodes, columns, label)
    order = inputs if label is None else [*inputs, label]
    for node in order:
        if network.get_cpds(node) is None:
            raise SpecError(f"{where}: node {node!r} has no CPD; fit the network, or add one")
    try:
        network.check_model()
    except ValueError as error:
        raise SpecError(f"{where}: pgmpy refuses the network: {str(error).splitlines()[0]}") from None
    if isinstance(network, LinearGaussianBayesianNetwork):
        if label is not None or states is not None or joint:
            raise SpecError(f"{where}: Gaussian nodes have no states; expected no label, no states and no joint tables")
        return _gaussian_from(where, network, order)
    sizes, factors = _tables(where, network, order, states)
    if joint:
        factors = [part for factor in factors for part in _in_joint_form(where, factor, factors)]
    return discrete_model(factors, sizes, None if label is None else len(inputs), outside)


def _tables(
    where: str, network: Any, order: Sequence[Hashable], states: Mapping[Any, Sequence[Any]] | None
) -> tuple[tuple[int, ...], list[Factor]]:
    """Return how many states each node has, and the logarithms of the CPDs."""
    from pgmpy.factors.discrete import TabularCPD

    number = {node: i for i, node in enumerate(order)}
    cpds = [network.get_cpds(node) for node in order]
    for node, cpd in zip(order, cpds, strict=True):
        if type(cpd) is not TabularCPD:
            raise SpecError(f"{where}: the CPD of {node!r} is a {type(cpd).__name__}; only TabularCPD is carried over")
    named = {node: list(cpd.state_names[node]) for node, cpd in zip(order, cpds, strict=True)}
    for node, given in (states or {}).items():
        if node not in named or sorted(map(repr, given)) != sorted(map(repr, named[node])):
            raise SpecError(
                f"{where}: expected states of {node!r} to be those of the network in another order, "
                f"{listed(named.get(node, []))}; got {listed(given)}"
            )
        named[node] = list(given)
    sizes = check_states(
        where, [len(named[node]) for node in order], [[number[p] for p in cpd.variables[1:]] for cpd in cpds]
    )
    factors = []
    for cpd in cpds:
        values = torch.as_tensor(cpd.values).detach().to("cpu", torch.float64)
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise SpecError(f"{where}: the CPD of {cpd.variable!r} has values that are no probabilities")
        for axis, node in enumerate(cpd.variables):
            theirs = list(cpd.state_names[node])
            values = values.index_select(axis, torch.tensor([theirs.index(state) for state in named[node]]))
        factors.append(Factor(tuple(number[node] for node in cpd.variables), 1, values.log()))
    return sizes, factors


def _in_joint_form(where: str, factor: Factor, factors: Sequence[Factor]) -> list[Factor]:
    """Return log p(i | Γ) as log p(i, Γ) and log p(Γ), or as it is where Γ has an impossible state."""
    nodes, _, table = factor
    given = nodes[1:]
    if not given or table is None:
        return [factor]
    # Nodes below say nothing of those above.
    above, waiting = set(given), list(given)
    for node in waiting:
        waiting += [parent for parent in factors[node].nodes[1:] if parent not in above]
        above.update(factors[node].nodes[1:])
    relevant: list[LogFactor] = [(factors[i].nodes, t) for i in sorted(above) if (t := factors[i].table) is not None]
    total = eliminate(relevant, given, where=f"{where}: the probabilities of the parents {given} of input {nodes[0]}")
    return [factor] if bool((total == -math.inf).any()) else [Factor(nodes, 1, table + total), Factor(given, -1, total)]


def _gaussian_from(where: str, network: Any, order: Sequence[Hashable]) -> Model:
    from pgmpy.factors.continuous import LinearGaussianCPD

    number = {node: i for i, node in enumerate(order)}
    intercepts, scales = (torch.zeros(len(order), dtype=torch.float64) for _ in range(2))
    slopes = torch.zeros(len(order), len(order), dtype=torch.float64)
    parents = []
    for i, node in enumerate(order):
        cpd = network.get_cpds(node)
        if type(cpd) is not LinearGaussianCPD:
            raise SpecError(
                f"{where}: the CPD of {node!r} is a {type(cpd).__name__}; only LinearGaussianCPD is carried over"
            )
        given = [number[parent] for parent in cpd.evidence]
        beta = np.asarray(cpd.beta, dtype=np.float64)
        if beta.shape != (1 + len(given),) or not np.isfinite(beta).all() or not 0 < float(cpd.std) < math.inf:
            raise SpecError(
                f"{where}: the CPD of {node!r} needs an intercept, a coefficient for each of its {len(given)} parents, and a "
                f"positive standard deviation; got {beta.size} numbers and {cpd.std}"
            )
        intercepts[i], scales[i] = beta[0], float(cpd.std)
        slopes[i, given] = torch.from_numpy(beta[1:])
        parents.append(tuple(given))
    return gaussian_model(parents, intercepts, slopes, scales)


# ------------------------------------------------------------------------------------------------ comparisons


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _random_network(seed: int, nodes: int = 7, impossible: bool = True) -> Any:
    """Return a random network of pgmpy of two or three states a node, in some of whose CPDs a state is impossible."""
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    draw = _generator(seed)
    sizes = draw.integers(2, 4, nodes)
    network = DiscreteBayesianNetwork()
    network.add_nodes_from([f"n{i}" for i in range(nodes)])
    for i in range(nodes):
        given = sorted(draw.choice(i, min(i, int(draw.integers(0, 3))), replace=False).tolist())
        values = draw.dirichlet(np.ones(sizes[i]), math.prod(sizes[given])).T
        if impossible and i in (0, nodes - 1):
            values[0] = 0
            values /= values.sum(0)
        network.add_edges_from([(f"n{j}", f"n{i}") for j in given])
        names = {f"n{j}": [f"s{k}" for k in range(sizes[j])] for j in (i, *given)}
        evidence, above = [f"n{j}" for j in given], [int(sizes[j]) for j in given]
        network.add_cpds(TabularCPD(f"n{i}", int(sizes[i]), values, evidence or None, above or None, state_names=names))
    return network


def _alarm() -> Any:
    """Return the network of the alarm system that pgmpy brings along, its CPDs with sums of exactly one."""
    from pgmpy.readwrite import BIFReader

    file = importlib.resources.files("pgmpy") / "utils" / "example_models" / "alarm.bif.gz"
    network = BIFReader(string=gzip.decompress(file.read_bytes()).decode()).get_model()
    for cpd in network.cpds:
        cpd.normalize()
    return network


def _quiet(compare: Callable[[int], Comparison], seed: int) -> Comparison:
    """Compare without what pgmpy warns of itself: modules that it is about to move."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*pgmpy")
        warnings.filterwarnings("ignore", category=FutureWarning, module="pgmpy")
        return compare(seed)


def _random_rows(network: Any, columns: Sequence[Hashable], rows: int, seed: int) -> Tensor:
    draw = _generator(seed)
    return torch.from_numpy(
        np.stack([draw.integers(0, len(network.states[name]), rows) for name in columns], 1)
    ).double()


def _names(network: Any, columns: Sequence[Hashable], row: Tensor) -> dict[Hashable, Any]:
    """Return what is there of a row of numbers by the names of nodes and states."""
    return {
        name: network.states[name][int(code)] for name, code in zip(columns, row.tolist(), strict=True) if code == code
    }


def _values(model: Model) -> int:
    return sum(tensor.numel() for tensor in model.state_dict().values())


def _their_values(network: Any) -> int:
    return sum(int(np.size(cpd.values)) for cpd in network.cpds)


def _logarithm(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _deviation(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, of values above one relative; equal infinite values are equal."""
    apart = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / theirs.abs().clamp_min(1.0))
    return float(apart.nan_to_num(math.inf).max())


def _joint(seed: int) -> Comparison:
    network = _random_network(seed)
    columns = list(network.nodes)
    model = from_pgmpy(network, joint=True)
    x = _random_rows(network, columns, 60, seed + 1)
    theirs = torch.tensor(
        [_logarithm(network.get_state_probability(_names(network, columns, row))) for row in x], dtype=torch.float64
    )
    with torch.no_grad():
        layer = model(x)[:, 0]
    # The layer has exp(−10,000) for zero.
    ours = torch.where(layer < 0.9 * LOG_ZERO, -math.inf, layer)
    deviation = max(_deviation(ours, theirs), _deviation(log_marginal(model, x)[:, 0], theirs))
    return Comparison(
        deviation, _values(model), _their_values(network), model, x, theirs.clamp_min(-50).unsqueeze(-1), "mse"
    )


def _classified(seed: int) -> Comparison:
    from pgmpy.inference import VariableElimination

    from kapsi.training.prediction import predict_log_proba

    network = _random_network(seed, impossible=False)
    columns, label = [name for name in network.nodes if name != "n1"], "n1"
    model = from_pgmpy(network, label=label)
    x = _random_rows(network, columns, 40, seed + 1)
    inference = VariableElimination(network)
    theirs = torch.tensor(
        [
            inference.query([label], evidence=_names(network, columns, row), show_progress=False).values.tolist()
            for row in x
        ],
        dtype=torch.float64,
    ).log()
    ours = torch.as_tensor(predict_log_proba(model, x), dtype=torch.float64)
    y = torch.from_numpy(_generator(seed).integers(0, theirs.shape[1], len(x)))
    return Comparison(_deviation(ours, theirs), _values(model), _their_values(network), model, x, y, "cross_entropy")


def _missing(seed: int) -> Comparison:
    from pgmpy.inference import VariableElimination

    network = _alarm()
    columns = list(network.nodes)
    model = from_pgmpy(network)
    draw = _generator(seed)
    rows = network.simulate(n_samples=30, seed=seed, show_progress=False)
    whole = encode(rows, columns, network.states)
    x = torch.where(torch.from_numpy(draw.random(whole.shape) < 0.5), math.nan, whole)
    target = columns.index("HYPOVOLEMIA")
    x[:, target] = math.nan
    inference = VariableElimination(network)
    theirs = torch.tensor(
        [
            inference.query(
                ["HYPOVOLEMIA"], evidence=_names(network, columns, row), show_progress=False
            ).values.tolist()
            for row in x
        ],
        dtype=torch.float64,
    ).log()
    deviation = _deviation(log_posterior(model, x, [target]), theirs)
    with torch.no_grad():
        y = model(whole)
    return Comparison(deviation, _values(model), _their_values(network), model, whole, y, "mse")


def _gaussian(seed: int) -> Comparison:
    import pandas as pd
    from pgmpy.factors.continuous import LinearGaussianCPD
    from pgmpy.models import LinearGaussianBayesianNetwork

    draw = _generator(seed)
    nodes, network = 6, LinearGaussianBayesianNetwork()
    network.add_nodes_from([f"n{i}" for i in range(nodes)])
    for i in range(nodes):
        given = [f"n{j}" for j in sorted(draw.choice(i, min(i, 2), replace=False).tolist())]
        network.add_edges_from([(name, f"n{i}") for name in given])
        network.add_cpds(
            LinearGaussianCPD(f"n{i}", draw.normal(size=1 + len(given)), float(draw.uniform(0.3, 2)), given)
        )
    columns = [f"n{i}" for i in draw.permutation(nodes)]
    model = from_pgmpy(network, columns=columns)
    rows = pd.DataFrame(draw.normal(size=(200, nodes)) * 3, columns=columns)
    # Of the CPDs themselves: log_likelihood of pgmpy rounds the covariance to eight decimals.
    theirs = torch.zeros(len(rows), dtype=torch.float64)
    for cpd in network.cpds:
        mean = cpd.beta[0] + rows[cpd.evidence].to_numpy() @ cpd.beta[1:]
        z = torch.tensor((rows[cpd.variable].to_numpy() - mean) / cpd.std)
        theirs -= z.square() / 2 + math.log(cpd.std) + math.log(2 * math.pi) / 2
    x = torch.tensor(rows.to_numpy())
    with torch.no_grad():
        deviation = _deviation(model(x)[:, 0], theirs)
    count = sum(cpd.beta.size + 1 for cpd in network.cpds)
    return Comparison(deviation, _values(model), count, model, x, theirs.unsqueeze(-1), "mse")


def _fitted(seed: int) -> Comparison:
    import pandas as pd
    from pgmpy.estimators import BayesianEstimator
    from pgmpy.models import DiscreteBayesianNetwork

    network = _random_network(seed)
    columns = list(network.nodes)
    x = _random_rows(network, columns, 300, seed + 1)
    parents = parents_from_pgmpy(network)
    states = [len(network.states[name]) for name in columns]
    model = fit_discrete(x, parents, states=states, equivalent_sample_size=10)
    table = pd.DataFrame({name: [_names(network, columns, row)[name] for row in x] for name in columns})
    empty = DiscreteBayesianNetwork()
    empty.add_nodes_from(columns)
    empty.add_edges_from(network.edges)
    options = {"prior_type": "BDeu", "equivalent_sample_size": 10}
    theirs = empty.fit(table, estimator=BayesianEstimator, state_names=dict(network.states), **options)
    expected = from_pgmpy(theirs, columns=columns, states=dict(network.states))
    with torch.no_grad():
        y = expected(x)
        deviation = _deviation(model(x), y)
    return Comparison(deviation, _values(model), _their_values(theirs), model, x, y, "mse")


def _searched(seed: int) -> Comparison:
    import pandas as pd
    from pgmpy.causal_discovery import HillClimbSearch
    from pgmpy.structure_score import BIC

    network = _random_network(seed, impossible=False)
    columns = list(network.nodes)
    table = network.simulate(n_samples=500, seed=seed, show_progress=False)[columns]
    table = table[sorted(columns)].astype(str)
    columns = list(table.columns)
    states = {name: sorted(table[name].unique()) for name in columns}
    x = encode(table, columns, states)
    search = HillClimbSearch(scoring_method="bic-d", return_type="dag", show_progress=False).fit(pd.DataFrame(table))
    parents = hill_climb(x)
    theirs = float(BIC(table).score(search.causal_graph_))
    # A better structure is no deviation; and both must agree about the score of theirs.
    found = structure_score(x, parents_from_pgmpy(search.causal_graph_, columns))
    ours = structure_score(x, parents)
    deviation = max(0.0, theirs - ours, abs(found - theirs)) / max(1.0, abs(theirs))
    model = fit_discrete(x, parents)
    return Comparison(deviation, sum(map(len, parents)), len(search.causal_graph_.edges), model, x, x[:, :1], "mse")


def _case(
    quantity: str, data: str, tolerance: float, compare: Callable[[int], Comparison], gaussian: bool = False
) -> Case:
    name = "Bayesian network, linear Gaussian" if gaussian else "Bayesian network, discrete"
    return Case(name, quantity, data, "pgmpy", tolerance, partial(_quiet, compare))


PARITY: tuple[Case, ...] = (
    _case("joint log-probability", "random network", 1e-9, _joint),
    _case("log-probability of the label", "random network", 1e-9, _classified),
    _case("posterior with missing evidence", "alarm", 1e-9, _missing),
    _case("log-density", "random network", 1e-8, _gaussian, gaussian=True),
    _case("fit, BDeu prior", "random rows", 1e-9, _fitted),
    _case("BIC that hill climbing reaches", "rows of a random network", 1e-9, _searched),
)
