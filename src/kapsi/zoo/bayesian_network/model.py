"""Bayesian networks as layers: which columns κ has, and which of them ψ adds and subtracts."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import CombinatorialCategorical, CombinatorialNormal
from kapsi.modules import Model
from kapsi.reconciliation import Dense
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.zoo.base import tensor_of
from kapsi.zoo.inference import LARGEST_TABLE

__all__ = ["LOG_ZERO", "Parents", "spec"]

LOG_ZERO = -10_000.0
"""The logarithm of a probability of zero in a table: its exponential is zero in every type, and zero times it is zero."""

Parents: TypeAlias = Sequence[Sequence[int]]
"""The structure of a network: for each node, by number, the numbers of its parents."""

Outside: TypeAlias = Literal["error", "nearest"]


def listed(names: Sequence[Any]) -> str:
    """Return names for a message, at most twelve of them."""
    shown = list(map(repr, names))
    return ", ".join(shown[:12]) + (f", … ({len(shown)})" if len(shown) > 12 else "")


def check_given(where: str, nodes: Sequence[Any], columns: Any, states: Any) -> None:
    """Raise a `SpecError` where an imported network is empty, or what was given for it is not of the right types."""
    if not nodes:
        raise SpecError(f"{where}: the network has no nodes")
    if not isinstance(columns, Iterable | None) or not isinstance(states, Mapping | None):
        raise SpecError(
            f"{where}: expected columns as a list of nodes, and states as lists by node, {{node: [state, …]}}"
        )
    for node, given in (states or {}).items():
        if not isinstance(given, Iterable):
            raise SpecError(f"{where}: expected states of {node!r} as a list, got {given!r}")


def inputs_of(where: str, nodes: Sequence[Any], columns: Iterable[Any] | None, label: Any) -> list[Any]:
    """Return the nodes that are inputs, in the order of the columns: all but the label."""
    if label is not None and label not in nodes:
        raise SpecError(f"{where}: there is no node {label!r} to be the label; there are {listed(nodes)}")
    inputs = [node for node in nodes if node != label] if columns is None else list(columns)
    order = inputs if label is None else [*inputs, label]
    if len(set(order)) < len(order) or set(order) != set(nodes):
        raise SpecError(
            f"{where}: expected columns to name each node once, without the label, {listed(nodes)}; got {listed(inputs)}"
        )
    return inputs


class Factor(NamedTuple):
    """A table of logarithms that the log-probability has as a term.

    Attributes:
        nodes: the axes of its table.
        sign: 1 or −1.
        table: the logarithms, `(states of the first node, …)`, −∞ for zero; None while there are none.
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

    κ is `CombinatorialCategorical` on the families {i} ∪ Γ(i) and the parent sets Γ(i) that are not empty, node by node, or
    `CombinatorialNormal` on them; ψ is dense with +1 for families and −1 for parent sets, π zero. A family of which conditional
    probabilities are looked up, log p(xᵢ | x_Γ(i)), is one column with +1. Tables, mean and covariance and the entries of ψ are
    set by `from_pgmpy`, `fit_discrete` and `fit_gaussian`.

    With a label there is an output for each of its states, log p(x, label = y), and no input: its states are substituted, which
    makes a column of each state where the label is in the set, and the outputs those of a classifier trained with `cross_entropy`.

    Args:
        parents: for each node the numbers of its parents; without a cycle.
        states: how many states each node has; None for a linear Gaussian network.
        label: the node that is predicted; the inputs are the others in their order.
        conditional: the nodes whose conditional probabilities are looked up, or True for all of them.
        outside: what an input is that is not the number of a state, as in `CombinatorialCategorical`.

    Raises:
        SpecError: a cycle, numbers that do not fit, or a table of more than 16.7 million numbers.

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
            raise SpecError(
                "spec: a linear Gaussian network has no states; expected no label and no conditional tables"
            )
        subsets = tuple(factor.nodes for factor in _factors(structure, frozenset()))
        return _layer(CombinatorialNormal(subsets=subsets), len(structure), 1)
    sizes = check_states("spec", states, structure)
    chosen = _chosen(conditional, len(structure))
    return _discrete(_factors(structure, chosen), sizes, check_label("spec", label, len(structure)), outside)[0]


def discrete_model(
    factors: Sequence[Factor], states: Sequence[int], label: int | None, outside: Outside = "error"
) -> Model:
    """Return the model of a discrete network, in float64, from all its tables."""
    made, signs, tables = _discrete(factors, states, label, outside)
    model = Model(made, seed=0, dtype=torch.float64).eval()
    (_, head), *_ = model.heads()
    flat = torch.cat([table.reshape(-1) for table in tables]).clamp_min(LOG_ZERO)
    head.assign("expansion", tables=flat)
    head.assign("reconciliation", matrix=signs)
    return model


def gaussian_model(parents: Parents, intercepts: Tensor, slopes: Tensor, scales: Tensor) -> Model:
    """Return the model of a linear Gaussian network, xᵢ = bᵢ + Σ_j B_ij x_j + σᵢ zᵢ, in float64.

    Args:
        parents: the structure.
        intercepts: b, `(m,)`.
        slopes: B, `(m, m)`, zero but for parents j of i.
        scales: σ, `(m,)`.
    """
    model = Model(spec(parents), seed=0, dtype=torch.float64).eval()
    (_, head), *_ = model.heads()
    ahead = torch.eye(len(scales), dtype=torch.float64) - slopes
    # x = (I − B)⁻¹(b + σz): the factor of its covariance by a QR decomposition, which does not square it.
    spread = torch.linalg.solve(ahead, scales.diag())
    lower = torch.linalg.qr(spread.T, mode="r").R.T
    lower = lower * lower.diagonal().sign()
    head.assign(
        "expansion",
        mean=torch.linalg.solve(ahead, intercepts.unsqueeze(-1)).squeeze(-1),
        factor=lower.tril(-1) + lower.diagonal().log().diag(),
    )
    head.assign("reconciliation", matrix=torch.tensor([[float(f.sign) for f in _factors(parents, frozenset())]]))
    return model


def _factors(parents: Parents, conditional: frozenset[int]) -> list[Factor]:
    """Return the terms of the log-probability, without their tables: of each node its family, then its parents."""
    found = []
    for node, given in enumerate(parents):
        found.append(Factor((node, *given), 1))
        if given and node not in conditional:
            found.append(Factor(tuple(given), -1))
    return found


def _discrete(
    factors: Sequence[Factor], states: Sequence[int], label: int | None, outside: Outside
) -> tuple[ModelSpec, Tensor, list[Tensor]]:
    """Return the layer of some terms, its ψ `(n, D)`, and the tables of its columns."""
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
        raise SpecError("spec: expected a node beside the label; there would be no input")
    kappa = CombinatorialCategorical(subsets=tuple(subsets), states=sizes, outside=outside)
    return _layer(kappa, len(sizes), outputs), torch.tensor(signs, dtype=torch.float64).T, tables


def _layer(expansion: CombinatorialCategorical | CombinatorialNormal, inputs: int, outputs: int) -> ModelSpec:
    return ModelSpec((inputs, outputs), (LayerSpec((HeadSpec(expansion, Dense(), ZeroRemainder()),)),))


# ------------------------------------------------------------------------------------------------ what is given


def check_parents(where: str, parents: Parents) -> tuple[tuple[int, ...], ...]:
    """Return the structure as tuples, after a check."""
    try:
        structure = tuple(tuple(operator.index(parent) for parent in given) for given in parents)
    except TypeError:
        raise SpecError(
            f"{where}: expected for each node the numbers of its parents, such as [(), (0,), (0, 1)], got {parents!r:.60}"
        ) from None
    nodes = len(structure)
    if not nodes:
        raise SpecError(f"{where}: expected at least one node")
    for node, given in enumerate(structure):
        if any(not 0 <= parent < nodes or parent == node for parent in given) or len(set(given)) < len(given):
            raise SpecError(
                f"{where}: the parents of node {node} must be other nodes, 0 to {nodes - 1} and each once, got {given}"
            )
    if len(order_of(structure)) < nodes:
        raise SpecError(f"{where}: the edges must not form a cycle; there is one among the nodes {_cycle(structure)}")
    return structure


def order_of(parents: Parents) -> list[int]:
    """Return the nodes, each after its parents; those on and behind a cycle are left out.

    Example:
        >>> order_of([(2,), (), (1,)])
        [1, 2, 0]
    """
    waiting = [len(given) for given in parents]
    children: list[list[int]] = [[] for _ in parents]
    for node, given in enumerate(parents):
        for parent in given:
            children[parent].append(node)
    order = [node for node, count in enumerate(waiting) if not count]
    for node in order:  # which grows meanwhile
        for child in children[node]:
            waiting[child] -= 1
            if not waiting[child]:
                order.append(child)
    return order


def _cycle(parents: Parents) -> str:
    """Return the nodes of one cycle as text."""
    bad = set(range(len(parents))) - set(order_of(parents))
    path = [min(bad)]
    while True:
        following = next(parent for parent in parents[path[-1]] if parent in bad)
        if following in path:
            return " ← ".join(map(str, [*path[path.index(following) :], following]))
        path.append(following)


def check_states(where: str, states: Any, parents: Parents) -> tuple[int, ...]:
    """Return the numbers of states as a tuple, after a check of them and of the sizes of all tables."""
    try:
        sizes = tuple(operator.index(size) for size in states)
    except TypeError:
        raise SpecError(f"{where}: expected states as the number of states of each node, got {states!r:.60}") from None
    if len(sizes) != len(parents) or min(sizes) < 1:
        raise SpecError(
            f"{where}: expected the number of states of each of the {len(parents)} nodes, at least 1, got {sizes}"
        )
    for node, given in enumerate(parents):
        entries = math.prod(sizes[i] for i in (node, *given))
        if entries > LARGEST_TABLE:
            raise SpecError(
                f"{where}: the table of node {node} and its {len(given)} parents would have {float(entries):.4g} numbers, "
                f"{8e-9 * entries:,.3g} GB, at most {LARGEST_TABLE:,} are made; give it fewer parents"
            )
    return sizes


def check_label(where: str, label: Any, nodes: int) -> int | None:
    """Return the number of the label, after a check."""
    if label is None:
        return None
    try:
        number = operator.index(label)
    except TypeError:
        number = -1
    if not 0 <= number < nodes:
        raise SpecError(f"{where}: expected the label as the number of a node, 0 to {nodes - 1}, got {label!r}")
    return number


def check_rows(where: str, x: Any, nodes: int | None = None, *, missing: bool = False) -> Tensor:
    """Return rows of numbers in float64, `(rows, nodes)`; NaN where a value is missing, if that is allowed."""
    try:
        rows = tensor_of(x).to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{where}: expected rows of numbers, got {type(x).__name__}; see encode for names") from None
    if rows.dim() != 2 or not rows.numel() or (nodes is not None and rows.shape[1] != nodes):
        shape = f"(rows, {nodes})" if nodes else "(rows, nodes)"
        raise SpecError(f"{where}: expected x of shape {shape}, got {tuple(rows.shape)}")
    bad = rows.isinf() if missing else ~rows.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise SpecError(
            f"{where}: expected finite numbers, got {rows[row, column].item()} in row {row}, column {column}"
        )
    return rows


def check_codes(
    where: str, x: Any, states: Sequence[int] | None, nodes: int | None = None
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the numbers of states of rows, `(rows, nodes)`, and how many states there are: one more than the largest number."""
    rows = check_rows(where, x, nodes)
    bad = (rows < 0) | (rows != rows.round())
    if states is not None and len(states) == rows.shape[1]:
        bad |= rows >= torch.tensor([float(size) for size in states])
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        allowed = "0, 1, …" if states is None else f"0 to {states[column] - 1}"
        raise SpecError(
            f"{where}: expected the numbers of states, {allowed}, got {rows[row, column].item():g} in row {row}, column {column}; "
            "cut numbers into bins first, and see encode for names"
        )
    codes = rows.long()
    return codes, tuple(int(last) + 1 for last in codes.amax(0)) if states is None else tuple(states)


def check_weight(where: str, weight: Any, rows: int) -> Tensor:
    """Return the weights of rows in float64, ones by default."""
    if weight is None:
        return torch.ones(rows, dtype=torch.float64)
    try:
        given = tensor_of(weight).to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{where}: expected sample_weight as numbers, got {type(weight).__name__}") from None
    if given.shape != (rows,) or not bool((given.isfinite() & (given >= 0)).all()) or not float(given.sum()) > 0:
        raise SpecError(
            f"{where}: expected sample_weight of shape ({rows},), finite, not negative and not all zero, got {tuple(given.shape)}"
        )
    return given


def _chosen(conditional: Any, nodes: int) -> frozenset[int]:
    if isinstance(conditional, bool):
        return frozenset(range(nodes)) if conditional else frozenset()
    try:
        chosen = frozenset(operator.index(node) for node in conditional)
    except TypeError:
        chosen = frozenset({-1})
    if chosen and not 0 <= min(chosen) <= max(chosen) < nodes:
        raise SpecError(
            f"spec: expected conditional as true, false or numbers of nodes, 0 to {nodes - 1}, got {conditional!r:.60}"
        )
    return chosen
