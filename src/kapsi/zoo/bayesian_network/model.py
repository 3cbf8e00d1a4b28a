"""Bayesian networks as layers: the columns of κ, and their signs in ψ."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kapsi.errors import SpecError, refuse
from kapsi.expansion import CombinatorialCategorical, CombinatorialNormal
from kapsi.modules import Model
from kapsi.reconciliation import Dense
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec, ModelSpec
from kapsi.zoo.base import model_of, one_head
from kapsi.zoo.graphical import LOG_ZERO, Outside, check_label, check_numbers, check_sizes, check_table

Parents: TypeAlias = Sequence[Sequence[int]]
"""The structure of a network: the indices of the parents of each node."""


class Factor(NamedTuple):
    """A term of the log-probability.

    Attributes:
        nodes: nodes of the table, an axis each.
        sign: 1 or −1.
        table: logarithms, `(states of the first node, …)`, −∞ for zero; None in a specification.
    """

    nodes: tuple[int, ...]
    sign: int
    table: Tensor | None = None


def spec(
    parents: Parents,
    states: Sequence[int] | None = None,
    *,
    label: int | None = None,
    conditional: bool | Sequence[int] = False,
    outside: Outside = "error",
) -> ModelSpec:
    """Return a Bayesian network as one layer, log p(x) = Σ_i log p(xᵢ, x_Γ(i)) − log p(x_Γ(i)), Γ(i) the parents of i.

    κ is `CombinatorialCategorical`, or `CombinatorialNormal`, on the families {i} ∪ Γ(i) and nonempty parent sets Γ(i), node by
    node; ψ is dense with +1 for families and −1 for parent sets, π zero. A table of conditional probabilities log p(xᵢ | x_Γ(i))
    is a single column with +1. `from_pgmpy`, `fit_discrete` and `fit_gaussian` set tables, mean, covariance and ψ.

    With a label, the label is not an input, and the outputs are log p(x, label = y) for each state y: class scores for
    training with `cross_entropy`. Sets with the label have a column per state.

    Args:
        parents: indices of the parents of each node; acyclic.
        states: number of states of each node; None for a linear Gaussian network.
        label: the predicted node; the inputs are all other nodes in order.
        conditional: nodes with tables of conditional probabilities, or True for all nodes.
        outside: treatment of inputs other than state indices, see `CombinatorialCategorical`.

    Raises:
        SpecError: a cycle, invalid numbers, or a table of more than 16.7 million entries.

    Example:
        >>> chain = spec([(), (0,), (1,)], states=(2, 2, 3))
        >>> chain.layers[0].heads[0].expansion.subsets
        ((0,), (1, 0), (0,), (2, 1), (1,))
        >>> spec([(), (0,), (1,)], states=(2, 2, 3), label=2).widths
        (2, 3)
    """
    structure = check_parents("spec", parents)
    if states is None:
        if label is not None or conditional:
            raise SpecError("spec: a linear Gaussian network has no states; omit label and conditional")
        subsets = tuple(factor.nodes for factor in _factors(structure, frozenset()))
        return one_head(_head(CombinatorialNormal(subsets=subsets)), len(structure), 1)
    sizes = check_states("spec", states, structure)
    nodes = _conditional_nodes(conditional, len(structure))
    return _discrete(_factors(structure, nodes), sizes, check_label("spec", label, len(structure)), outside)[0]


def discrete_model(
    factors: Sequence[Factor], states: Sequence[int], label: int | None, outside: Outside = "error"
) -> Model:
    """Return the model of a discrete network in float64 from all tables."""
    architecture, signs, tables = _discrete(factors, states, label, outside)
    flat = torch.cat([table.reshape(-1) for table in tables]).clamp_min(LOG_ZERO)
    return model_of(architecture, expansion={"tables": flat}, reconciliation={"matrix": signs})


def gaussian_model(parents: Parents, intercepts: Tensor, slopes: Tensor, scales: Tensor) -> Model:
    """Return the model of a linear Gaussian network, xᵢ = bᵢ + Σ_j B_ij x_j + σᵢ zᵢ, in float64.

    Args:
        parents: the structure.
        intercepts: b, `(m,)`.
        slopes: B, `(m, m)`, nonzero for parents j of i only.
        scales: σ, `(m,)`.
    """
    system = torch.eye(len(scales), dtype=torch.float64) - slopes
    # x = (I − B)⁻¹(b + σz); QR gives the factor of the covariance without squaring the condition number.
    root = torch.linalg.solve(system, scales.diag())
    lower = torch.linalg.qr(root.T, mode="r").R.T
    lower = lower * lower.diagonal().sign()
    mean = torch.linalg.solve(system, intercepts.unsqueeze(-1)).squeeze(-1)
    kappa = {"mean": mean, "factor": lower.tril(-1) + lower.diagonal().log().diag()}
    signs = torch.tensor([[float(factor.sign) for factor in _factors(parents, frozenset())]])
    return model_of(spec(parents), expansion=kappa, reconciliation={"matrix": signs})


def _factors(parents: Parents, conditional: frozenset[int]) -> list[Factor]:
    """Return the terms of the log-probability without tables: for each node the family, then the parents."""
    factors = []
    for node, above in enumerate(parents):
        factors.append(Factor((node, *above), 1))
        if above and node not in conditional:
            factors.append(Factor(tuple(above), -1))
    return factors


def _discrete(
    factors: Sequence[Factor], states: Sequence[int], label: int | None, outside: Outside
) -> tuple[ModelSpec, Tensor, list[Tensor]]:
    """Return the layer of some terms, ψ `(n, D)`, and the tables of the columns."""
    outputs = 1 if label is None else states[label]
    subsets: list[tuple[int, ...]] = []
    signs: list[list[float]] = []
    tables: list[Tensor] = []
    for nodes, sign, table in factors:
        inputs = tuple(node - (label is not None and node > label) for node in nodes if node != label)
        if label not in nodes:
            subsets.append(inputs)
            signs.append([float(sign)] * outputs)
            tables += [] if table is None else [table]
            continue
        for state in range(outputs):
            subsets.append(inputs)
            signs.append([float(sign) * (other == state) for other in range(outputs)])
            tables += [] if table is None else [table.select(nodes.index(label), state)]
    sizes = tuple(size for node, size in enumerate(states) if node != label)
    if not sizes:
        raise SpecError("spec: expected a node other than the label, as an input")
    kappa = CombinatorialCategorical(subsets=tuple(subsets), states=sizes, outside=outside)
    return one_head(_head(kappa), len(sizes), outputs), torch.tensor(signs, dtype=torch.float64).T, tables


def _head(expansion: CombinatorialCategorical | CombinatorialNormal) -> HeadSpec:
    return HeadSpec(expansion, Dense(), ZeroRemainder())


# ------------------------------------------------------------------------------------------------ checks


def check_parents(where: str, parents: Parents) -> tuple[tuple[int, ...], ...]:
    """Return an acyclic structure as tuples."""
    try:
        structure = tuple(tuple(operator.index(parent) for parent in above) for above in parents)
    except TypeError:
        refuse(where, "parents as the indices of the parents of each node, such as [(), (0,), (0, 1)]", parents)
    nodes = len(structure)
    if not nodes:
        raise SpecError(f"{where}: expected at least one node")
    for node, above in enumerate(structure):
        if any(not 0 <= parent < nodes or parent == node for parent in above) or len(set(above)) < len(above):
            raise SpecError(
                f"{where}: the parents of node {node} must be other nodes, 0 to {nodes - 1}, each once, got {above}"
            )
    if len(order_of(structure)) < nodes:
        raise SpecError(f"{where}: the edges form a cycle: {_cycle(structure)}")
    return structure


def order_of(parents: Parents) -> list[int]:
    """Return the nodes in topological order, without nodes on or behind a cycle.

    Example:
        >>> order_of([(2,), (), (1,)])
        [1, 2, 0]
    """
    waiting = [len(above) for above in parents]
    children: list[list[int]] = [[] for _ in parents]
    for node, above in enumerate(parents):
        for parent in above:
            children[parent].append(node)
    order = [node for node, count in enumerate(waiting) if not count]
    for node in order:  # grows in the loop
        for child in children[node]:
            waiting[child] -= 1
            if not waiting[child]:
                order.append(child)
    return order


def _cycle(parents: Parents) -> str:
    """Return the nodes of a cycle as text."""
    bad = set(range(len(parents))) - set(order_of(parents))
    path = [min(bad)]
    while True:
        following = next(parent for parent in parents[path[-1]] if parent in bad)
        if following in path:
            return " ← ".join(map(str, [*path[path.index(following) :], following]))
        path.append(following)


def check_states(where: str, states: Any, parents: Parents) -> tuple[int, ...]:
    """Return the numbers of states; check the sizes of all tables."""
    sizes = check_sizes(where, states, len(parents))
    for node, above in enumerate(parents):
        name = f"node {node} and its {len(above)} parents"
        check_table(where, name, (sizes[i] for i in (node, *above)), "remove some parents")
    return sizes


def _conditional_nodes(conditional: bool | Sequence[int], nodes: int) -> frozenset[int]:
    if isinstance(conditional, bool):
        return frozenset(range(nodes)) if conditional else frozenset()
    return frozenset(check_numbers("spec", "conditional as true, false or indices of nodes", conditional, nodes))
