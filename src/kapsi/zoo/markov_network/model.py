"""Markov networks as layers: the columns of κ for the cliques, and the factors in ψ."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, check_choice, check_integer, refuse
from kapsi.expansion import CombinatorialProduct, CombinatorialState
from kapsi.modules import Head, Model
from kapsi.reconciliation import Dense
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec, ModelSpec
from kapsi.zoo.base import finite_tensor, forbid, model_of, one_head
from kapsi.zoo.graphical import LOG_ZERO, Outside, check_label, check_sizes, check_table, network_head, split_tables

Cliques: TypeAlias = Sequence[Sequence[int]]
"""Sets of node indices, with a factor each."""

Kind: TypeAlias = Literal["counts", "exponential", "gaussian"]

Table: TypeAlias = tuple[tuple[int, ...], Tensor]
"""The nodes of a clique, and the logarithms of the factor, an axis per node; −∞ for zero."""


def spec(
    cliques: Cliques,
    states: Sequence[int] | None = None,
    *,
    kind: Kind = "counts",
    nodes: int | None = None,
    label: int | None = None,
    constant: bool = False,
    outside: Outside = "error",
) -> ModelSpec:
    """Return a Markov network as one layer, log p(x) + log Z = Σ_C log φ_C(x_C) over the cliques C.

    κ has the features of all factors, ψ is dense, π zero:

    - `counts`: φ_C is a table. κ is `CombinatorialState`, the indicators of the joint states of each clique, and ψ has the
      logarithms of the tables.
    - `exponential`: φ_C = exp(w_C Π_{i ∈ C} xᵢ). κ is `CombinatorialProduct`, a column for each clique.
    - `gaussian`: log φ_C is quadratic in x_C. κ is `CombinatorialProduct`: the nodes, their squares and the products of two nodes
      of a clique, each once; ψ has Λμ, −Λᵢᵢ/2 and −Λᵢⱼ of the precision matrix Λ.

    With a label, the label is not an input, and each of its states has an output: a clique with the label has indicators of
    the other nodes, and ψ has a row of the table per state.

    Args:
        cliques: sets of nodes, covering all nodes.
        states: number of states of each node, for `counts`.
        kind: kind of factors.
        nodes: number of nodes, for `exponential` and `gaussian`.
        label: the predicted node, for `counts`; the inputs are all other nodes in order.
        constant: add a column of ones to κ, with −log Z as a possible entry of ψ.
        outside: treatment of inputs other than state indices, see `CombinatorialState`.

    Raises:
        SpecError: invalid numbers, a node in no clique, or tables of more than 16.7 million entries.

    Example:
        >>> triangle = spec([(0, 1), (1, 2), (0, 2)], states=(2, 2, 3))
        >>> triangle.layers[0].heads[0].expansion.out_features(3)
        16
        >>> spec([(0, 1), (1, 2)], states=(2, 2, 3), label=2).widths
        (2, 3)
        >>> spec([(0, 1)], nodes=2, kind="gaussian").layers[0].heads[0].expansion.subsets
        ((0,), (1,), (0, 0), (0, 1), (1, 1))
    """
    check_choice("spec: kind", kind, ("counts", "exponential", "gaussian"))
    if kind == "counts":
        if states is None or nodes is not None:
            raise SpecError("spec: kind counts needs states, the number of states of each node; omit nodes")
        sizes = check_sizes("spec", states)
        sets = check_cliques("spec", cliques, len(sizes), sizes)
        return _discrete(sets, sizes, check_label("spec", label, len(sizes)), constant, outside)
    if states is not None or label is not None:
        raise SpecError(f"spec(kind={kind!r}): the inputs are continuous; omit states and label, and set nodes")
    number = check_integer(f"spec(kind={kind!r}): nodes", nodes, 1)
    sets = check_cliques("spec", cliques, number)
    subsets = sets if kind == "exponential" else quadratic(sets)
    kappa = CombinatorialProduct(subsets=(*subsets, ()) if constant else tuple(subsets))
    return one_head(HeadSpec(kappa, Dense(), ZeroRemainder()), number, 1)


def quadratic(cliques: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the nodes, and the pairs of nodes of a clique including squares, each once and in order."""
    single = sorted({(i,) for clique in cliques for i in clique})
    pairs = sorted({(min(i, j), max(i, j)) for clique in cliques for i in clique for j in clique})
    return (*single, *pairs)


def from_precision(mean: Any, precision: Any, cliques: Cliques | None = None) -> Model:
    """Return the Gaussian Markov network of a mean and a precision matrix Λ = Σ⁻¹, in float64: log N(x | μ, Λ⁻¹).

    Outputs are ½ log det Λ − (m/2) log 2π − ½ μᵀΛμ + (Λμ)ᵀx − ½ xᵀΛx; digits cancel for means many standard
    deviations from zero.

    Args:
        mean: μ, `(m,)`.
        precision: Λ, `(m, m)`, symmetric and positive definite.
        cliques: sets of nodes whose pairs have columns; default: the nonzero entries of Λ.

    Raises:
        DataError: matrices of other shapes, not symmetric or not positive definite, or an entry outside of the cliques.

    Example:
        >>> model = from_precision([0.0, 1.0], [[2.0, 0.0], [0.0, 2.0]])
        >>> model(torch.tensor([[0.0, 1.0]], dtype=torch.float64)).exp().detach()      # 2/(2π)
        tensor([[0.3183]], dtype=torch.float64)
    """
    mu, matrix = finite_tensor(mean, "from_precision: mean"), finite_tensor(precision, "from_precision: precision")
    m = len(mu) if mu.dim() == 1 else 0
    if not m or matrix.shape != (m, m):
        raise DataError(
            "from_precision: expected a mean (m,) and a precision matrix (m, m), got "
            f"{tuple(mu.shape)} and {tuple(matrix.shape)}"
        )
    root, failed = torch.linalg.cholesky_ex(matrix)
    symmetric = torch.allclose(matrix, matrix.T, rtol=1e-9, atol=1e-12 * float(matrix.abs().max()))
    forbid(
        "from_precision",
        (not symmetric, "expected a symmetric precision matrix; use (Λ + Λᵀ)/2"),
        (bool(failed), "the precision matrix is not positive definite, so the density cannot be normalized"),
        error=DataError,
    )
    if cliques is None:
        edges = [(i, j) for i in range(m) for j in range(i) if float(matrix[i, j])]
        alone = set(range(m)) - {i for edge in edges for i in edge}
        cliques = [*edges, *((i,) for i in sorted(alone))]
    sets = check_cliques("from_precision", cliques, m)
    subsets = quadratic(sets)
    covered = torch.zeros(m, m, dtype=torch.bool)
    for pair in subsets[m:]:
        covered[pair] = covered[pair[::-1]] = True
    if bool((matrix[~covered] != 0).any()):
        i, j = (~covered & (matrix != 0)).nonzero()[0].tolist()
        raise DataError(
            f"from_precision: entry ({i}, {j}) of the precision matrix is nonzero, but in no clique; add ({i}, {j})"
        )
    slope = matrix @ mu
    weights = [slope[i] for (i,) in subsets[:m]]
    weights += [-matrix[i, j] / (2 if i == j else 1) for i, j in subsets[m:]]
    weights.append(root.diagonal().log().sum() - m / 2 * math.log(2 * math.pi) - mu @ slope / 2)
    architecture = spec(sets, kind="gaussian", nodes=m, constant=True)
    return model_of(architecture, reconciliation={"matrix": torch.stack(weights).unsqueeze(0)})


def discrete_model(
    tables: Sequence[Table],
    states: Sequence[int],
    label: int | None = None,
    outside: Outside = "error",
    constant: float | None = None,
) -> Model:
    """Return the model of a discrete network in float64 from the tables of the cliques, and an optional constant term."""
    architecture = _discrete([nodes for nodes, _ in tables], states, label, constant is not None, outside)
    outputs = 1 if label is None else states[label]
    columns = []
    for nodes, table in tables:
        rows = table.movedim(nodes.index(label), 0) if label in nodes else table.expand(outputs, *table.shape)
        columns.append(rows.reshape(outputs, -1).clamp_min(LOG_ZERO))
    if constant is not None:
        columns.append(torch.full((outputs, 1), constant, dtype=torch.float64))
    return model_of(architecture, reconciliation={"matrix": torch.cat(columns, 1)})


def _discrete(
    cliques: Sequence[tuple[int, ...]], states: Sequence[int], label: int | None, constant: bool, outside: Outside
) -> ModelSpec:
    subsets = [tuple(i - (label is not None and i > label) for i in clique if i != label) for clique in cliques]
    sizes = tuple(size for node, size in enumerate(states) if node != label)
    if not sizes:
        raise SpecError("spec: expected a node other than the label, as an input")
    kappa = CombinatorialState(subsets=(*subsets, ()) if constant else tuple(subsets), states=sizes, outside=outside)
    return one_head(HeadSpec(kappa, Dense(), ZeroRemainder()), len(sizes), 1 if label is None else states[label])


def head_of(where: str, model: Any) -> Head:
    """Return the head of a Markov network."""
    wanted = "the model of a Markov network, as from spec: indicators or products of given cliques, and a dense ψ"
    return network_head(where, model, (CombinatorialState, CombinatorialProduct), wanted)


def tables_of(head: Head, row: Tensor) -> list[Table]:
    """Return the factors of an output of a discrete network from a row of ψ; −∞ for zero potentials."""
    kappa = cast(CombinatorialState, head.spec.expansion)
    sizes, subsets = kappa.sizes(head.in_features), kappa.subsets or ()
    tables: list[Table] = [
        (subset, torch.where(table <= LOG_ZERO / 2, -math.inf, table) if subset else table)
        for subset, table in zip(subsets, split_tables(row, subsets, sizes), strict=True)
    ]
    # An input without factors is uniform.
    absent = sorted(set(range(head.in_features)).difference(*subsets))
    return tables + [((i,), torch.zeros(sizes[i], dtype=torch.float64)) for i in absent]


# ------------------------------------------------------------------------------------------------ checks


def check_cliques(
    where: str, cliques: Any, nodes: int, states: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the cliques as tuples; check nodes and table sizes."""
    try:
        sets = tuple(tuple(operator.index(i) for i in clique) for clique in cliques)
    except TypeError:
        refuse(where, "cliques as sets of indices of nodes, such as [(0, 1), (1, 2)]", cliques)
    for clique in sets:
        if not clique or not 0 <= min(clique) <= max(clique) < nodes or len(set(clique)) < len(clique):
            raise SpecError(
                f"{where}: a clique has at least one node, numbers from 0 to {nodes - 1}, each once, got {clique}"
            )
        if states is not None:
            check_table(where, f"the clique {clique}", (states[i] for i in clique), "use smaller cliques")
    absent = sorted(set(range(nodes)).difference(*sets))
    if absent:
        raise SpecError(f"{where}: node {absent[0]} is in no clique; add ({absent[0]},) for a factor of this node")
    return sets
