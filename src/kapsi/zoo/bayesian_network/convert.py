"""Converter of pgmpy's Bayesian networks, and parity cases."""

from __future__ import annotations

import gzip
import importlib.resources
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.zoo.base import Case, Comparison, sizes
from kapsi.zoo.bayesian_network.estimation import encode, fit_discrete
from kapsi.zoo.bayesian_network.inference import log_marginal, log_posterior
from kapsi.zoo.bayesian_network.model import Factor, check_states, discrete_model, gaussian_model
from kapsi.zoo.bayesian_network.structure import hill_climb, parents_from_pgmpy, structure_score
from kapsi.zoo.graphical import (
    LOG_ZERO,
    Outside,
    check_import,
    check_pgmpy,
    compare_classifier,
    infinite_deviation,
    log_table,
    names_of,
    queried,
    quiet,
    random_rows,
    state_names,
    values_of,
)
from kapsi.zoo.inference import LogFactor, eliminate


def from_pgmpy(
    network: Any,
    *,
    columns: Sequence[Hashable] | None = None,
    states: Mapping[Any, Sequence[Any]] | None = None,
    label: Hashable | None = None,
    joint: bool = False,
    outside: Outside = "error",
) -> Model:
    """Return a pgmpy network as a model in float64: log p(x), or log p(x, label = y) for each state y of a label.

    Inputs of a discrete network are state indices in the order of `network.states`; `encode` converts names. κ has a column for
    each CPD. A probability of zero is exp(−10,000): outputs of impossible rows are below −9,000, and −∞ in `log_marginal`.

    Args:
        network: a `DiscreteBayesianNetwork` with `TabularCPD`s, or a `LinearGaussianBayesianNetwork`.
        columns: nodes in the order of the inputs, without the label; default: the order of `network.nodes`.
        states: states of discrete nodes in the order of their indices; default: the order of the network.
        label: the predicted node of a discrete network.
        joint: use joint probabilities log p(i, Γ) − log p(Γ) in κ of a discrete network wherever all joint states of the parents
            are possible, by variable elimination.
        outside: treatment of inputs other than state indices: `error`, or the `nearest` state.

    Raises:
        SpecError: an unsupported class or CPD, a network rejected by pgmpy's `check_model`, or joint probabilities with a
            table of more than 16.7 million entries.
    """
    from pgmpy.models import DiscreteBayesianNetwork, LinearGaussianBayesianNetwork

    name = type(network).__name__
    if not isinstance(network, DiscreteBayesianNetwork | LinearGaussianBayesianNetwork):
        raise SpecError(
            f"from_pgmpy: expected a DiscreteBayesianNetwork or a LinearGaussianBayesianNetwork with CPDs, got {name}; for the "
            "structure of a DAG see parents_from_pgmpy, fit_discrete and fit_gaussian"
        )
    where = f"from_pgmpy({name})"
    order = check_import(where, network, columns, states, label)
    for node in order:
        if network.get_cpds(node) is None:
            raise SpecError(f"{where}: node {node!r} has no CPD; fit the network, or add the CPD")
    check_pgmpy(where, network)
    if isinstance(network, LinearGaussianBayesianNetwork):
        if label is not None or states is not None or joint:
            raise SpecError(f"{where}: Gaussian nodes have no states; omit label, states and joint")
        return _gaussian_from(where, network, order)
    counts, factors = _tables(where, network, order, states)
    if joint:
        factors = [part for factor in factors for part in _in_joint_form(where, factor, factors)]
    return discrete_model(factors, counts, None if label is None else len(order) - 1, outside)


def _tables(
    where: str, network: Any, order: Sequence[Hashable], states: Mapping[Any, Sequence[Any]] | None
) -> tuple[tuple[int, ...], list[Factor]]:
    """Return the number of states of each node, and the logarithms of the CPDs."""
    from pgmpy.factors.discrete import TabularCPD

    number = {node: i for i, node in enumerate(order)}
    cpds = [network.get_cpds(node) for node in order]
    for node, cpd in zip(order, cpds, strict=True):
        if type(cpd) is not TabularCPD:
            raise SpecError(f"{where}: the CPD of {node!r} is a {type(cpd).__name__}; only TabularCPD is supported")
    names = state_names(where, {node: cpd.state_names[node] for node, cpd in zip(order, cpds, strict=True)}, states)
    parents = [[number[parent] for parent in cpd.variables[1:]] for cpd in cpds]
    counts = check_states(where, [len(names[node]) for node in order], parents)
    factors = []
    for cpd in cpds:
        table = log_table(where, f"the CPD of {cpd.variable!r}", cpd, names)
        factors.append(Factor(tuple(number[node] for node in cpd.variables), 1, table))
    return counts, factors


def _in_joint_form(where: str, factor: Factor, factors: Sequence[Factor]) -> list[Factor]:
    """Return log p(i | Γ) as log p(i, Γ) − log p(Γ); unchanged if Γ has an impossible state."""
    nodes, _, table = factor
    above = nodes[1:]
    if not above or table is None:
        return [factor]
    # Descendants do not affect the distribution of their ancestors.
    ancestors, waiting = set(above), list(above)
    for node in waiting:
        waiting += [parent for parent in factors[node].nodes[1:] if parent not in ancestors]
        ancestors.update(factors[node].nodes[1:])
    relevant: list[LogFactor] = [
        (factors[i].nodes, t) for i in sorted(ancestors) if (t := factors[i].table) is not None
    ]
    total = eliminate(relevant, above, where=f"{where}: the probabilities of the parents {above} of input {nodes[0]}")
    return [factor] if bool((total == -math.inf).any()) else [Factor(nodes, 1, table + total), Factor(above, -1, total)]


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
                f"{where}: the CPD of {node!r} is a {type(cpd).__name__}; only LinearGaussianCPD is supported"
            )
        above = [number[parent] for parent in cpd.evidence]
        beta = np.asarray(cpd.beta, dtype=np.float64)
        if beta.shape != (1 + len(above),) or not np.isfinite(beta).all() or not 0 < float(cpd.std) < math.inf:
            raise SpecError(
                f"{where}: the CPD of {node!r} needs an intercept, a coefficient for each of its {len(above)} parents, and a "
                f"positive standard deviation; got {beta.size} numbers and {cpd.std}"
            )
        intercepts[i], scales[i] = beta[0], float(cpd.std)
        slopes[i, above] = torch.from_numpy(beta[1:])
        parents.append(tuple(above))
    return gaussian_model(parents, intercepts, slopes, scales)


# ------------------------------------------------------------------------------------------------ parity


def _random_network(seed: int, nodes: int = 7, impossible: bool = True) -> Any:
    """Return a random pgmpy network with two or three states per node, and impossible states in some CPDs."""
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    draw = np.random.default_rng(seed)
    counts = draw.integers(2, 4, nodes)
    network = DiscreteBayesianNetwork()
    network.add_nodes_from([f"n{i}" for i in range(nodes)])
    for i in range(nodes):
        above = sorted(draw.choice(i, min(i, int(draw.integers(0, 3))), replace=False).tolist())
        values = draw.dirichlet(np.ones(counts[i]), math.prod(counts[above])).T
        if impossible and i in (0, nodes - 1):
            values[0] = 0
            values /= values.sum(0)
        network.add_edges_from([(f"n{j}", f"n{i}") for j in above])
        names = {f"n{j}": [f"s{k}" for k in range(counts[j])] for j in (i, *above)}
        evidence, cards = [f"n{j}" for j in above], [int(counts[j]) for j in above]
        network.add_cpds(
            TabularCPD(f"n{i}", int(counts[i]), values, evidence or None, cards or None, state_names=names)
        )
    return network


def _alarm() -> Any:
    """Return pgmpy's alarm network, with normalized CPDs."""
    from pgmpy.readwrite import BIFReader

    file = importlib.resources.files("pgmpy") / "utils" / "example_models" / "alarm.bif.gz"
    network = BIFReader(string=gzip.decompress(file.read_bytes()).decode()).get_model()
    for cpd in network.cpds:
        cpd.normalize()
    return network


def _logarithm(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _joint(seed: int) -> Comparison:
    network = _random_network(seed)
    columns = list(network.nodes)
    model = from_pgmpy(network, joint=True)
    x = random_rows(network, columns, 60, seed + 1)
    theirs = torch.tensor(
        [_logarithm(network.get_state_probability(names_of(network, columns, row))) for row in x], dtype=torch.float64
    )
    with torch.no_grad():
        layer = model(x)[:, 0]
    # Zero is exp(−10,000) in the layer.
    ours = torch.where(layer < 0.9 * LOG_ZERO, -math.inf, layer)
    deviation = max(infinite_deviation(ours, theirs), infinite_deviation(log_marginal(model, x)[:, 0], theirs))
    return Comparison(
        deviation, sizes(model), values_of(network.cpds), model, x, theirs.clamp_min(-50).unsqueeze(-1), "mse"
    )


def _classified(seed: int) -> Comparison:
    network = _random_network(seed, impossible=False)
    return compare_classifier(network, network.cpds, from_pgmpy, seed)


def _missing(seed: int) -> Comparison:
    from pgmpy.inference import VariableElimination

    network = _alarm()
    columns = list(network.nodes)
    model = from_pgmpy(network)
    draw = np.random.default_rng(seed)
    rows = network.simulate(n_samples=30, seed=seed, show_progress=False)
    whole = encode(rows, columns, network.states)
    x = torch.where(torch.from_numpy(draw.random(whole.shape) < 0.5), math.nan, whole)
    target = columns.index("HYPOVOLEMIA")
    x[:, target] = math.nan
    theirs = queried(network, columns, x, "HYPOVOLEMIA", VariableElimination(network))
    deviation = infinite_deviation(log_posterior(model, x, [target]), theirs)
    with torch.no_grad():
        y = model(whole)
    return Comparison(deviation, sizes(model), values_of(network.cpds), model, whole, y, "mse")


def _gaussian(seed: int) -> Comparison:
    import pandas as pd
    from pgmpy.factors.continuous import LinearGaussianCPD
    from pgmpy.models import LinearGaussianBayesianNetwork

    draw = np.random.default_rng(seed)
    nodes, network = 6, LinearGaussianBayesianNetwork()
    network.add_nodes_from([f"n{i}" for i in range(nodes)])
    for i in range(nodes):
        above = [f"n{j}" for j in sorted(draw.choice(i, min(i, 2), replace=False).tolist())]
        network.add_edges_from([(name, f"n{i}") for name in above])
        beta, deviation = draw.normal(size=1 + len(above)), float(draw.uniform(0.3, 2))
        network.add_cpds(LinearGaussianCPD(f"n{i}", beta, deviation, above))
    columns = [f"n{i}" for i in draw.permutation(nodes)]
    model = from_pgmpy(network, columns=columns)
    rows = pd.DataFrame(draw.normal(size=(200, nodes)) * 3, columns=columns)
    # From the CPDs: pgmpy's log_likelihood rounds the covariance to eight decimals.
    theirs = torch.zeros(len(rows), dtype=torch.float64)
    for cpd in network.cpds:
        mean = cpd.beta[0] + rows[cpd.evidence].to_numpy() @ cpd.beta[1:]
        z = torch.tensor((rows[cpd.variable].to_numpy() - mean) / cpd.std)
        theirs -= z.square() / 2 + math.log(cpd.std) + math.log(2 * math.pi) / 2
    x = torch.tensor(rows.to_numpy())
    with torch.no_grad():
        deviation = infinite_deviation(model(x)[:, 0], theirs)
    count = sum(cpd.beta.size + 1 for cpd in network.cpds)
    return Comparison(deviation, sizes(model), count, model, x, theirs.unsqueeze(-1), "mse")


def _fitted(seed: int) -> Comparison:
    import pandas as pd
    from pgmpy.estimators import BayesianEstimator
    from pgmpy.models import DiscreteBayesianNetwork

    network = _random_network(seed)
    columns = list(network.nodes)
    x = random_rows(network, columns, 300, seed + 1)
    parents = parents_from_pgmpy(network)
    states = [len(network.states[name]) for name in columns]
    model = fit_discrete(x, parents, states=states, equivalent_sample_size=10)
    table = pd.DataFrame({name: [names_of(network, columns, row)[name] for row in x] for name in columns})
    empty = DiscreteBayesianNetwork()
    empty.add_nodes_from(columns)
    empty.add_edges_from(network.edges)
    options = {"prior_type": "BDeu", "equivalent_sample_size": 10}
    theirs = empty.fit(table, estimator=BayesianEstimator, state_names=dict(network.states), **options)
    expected = from_pgmpy(theirs, columns=columns, states=dict(network.states))
    with torch.no_grad():
        y = expected(x)
        deviation = infinite_deviation(model(x), y)
    return Comparison(deviation, sizes(model), values_of(theirs.cpds), model, x, y, "mse")


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
    # A better structure is not a deviation; the scores of pgmpy's structure must agree.
    same = structure_score(x, parents_from_pgmpy(search.causal_graph_, columns))
    ours = structure_score(x, parents)
    deviation = max(0.0, theirs - ours, abs(same - theirs)) / max(1.0, abs(theirs))
    model = fit_discrete(x, parents)
    return Comparison(deviation, sum(map(len, parents)), len(search.causal_graph_.edges), model, x, x[:, :1], "mse")


def _case(
    quantity: str, data: str, tolerance: float, compare: Callable[[int], Comparison], gaussian: bool = False
) -> Case:
    name = "Bayesian network, linear Gaussian" if gaussian else "Bayesian network, discrete"
    return Case(name, quantity, data, "pgmpy", tolerance, quiet(compare))


PARITY: tuple[Case, ...] = (
    _case("joint log-probability", "random network", 1e-9, _joint),
    _case("log-probability of the label", "random network", 1e-9, _classified),
    _case("posterior with missing evidence", "alarm", 1e-9, _missing),
    _case("log-density", "random network", 1e-8, _gaussian, gaussian=True),
    _case("fit, BDeu prior", "random rows", 1e-9, _fitted),
    _case("BIC that hill climbing reaches", "rows of a random network", 1e-9, _searched),
)
