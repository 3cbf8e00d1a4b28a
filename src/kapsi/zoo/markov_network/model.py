"""Markov networks as layers: which columns κ has for the cliques, and how factors stand in ψ."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import CombinatorialProduct, CombinatorialState
from kapsi.modules import Head, Model
from kapsi.reconciliation import Dense
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.zoo.base import tensor_of
from kapsi.zoo.bayesian_network.model import LOG_ZERO, Outside, check_label
from kapsi.zoo.inference import LARGEST_TABLE

__all__ = ["LOG_ZERO", "Cliques", "from_precision", "spec"]

Cliques: TypeAlias = Sequence[Sequence[int]]
"""Sets of nodes, by number, that have a factor each."""

Kind: TypeAlias = Literal["counts", "exponential", "gaussian"]

Table: TypeAlias = tuple[tuple[int, ...], Tensor]
"""The nodes of a clique, and the logarithms of its factor with an axis for each, −∞ for zero."""


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

    κ makes combinations and the features of their factors in one, ψ is dense, π zero:

    - `counts`: φ_C is a table. κ is `CombinatorialState`, the indicators of the joint states of each clique, and ψ has the
      logarithms of the tables.
    - `exponential`: φ_C = exp(w_C Π_{i ∈ C} xᵢ). κ is `CombinatorialProduct`, a column for each clique.
    - `gaussian`: log φ_C is quadratic in x_C. κ is `CombinatorialProduct`, the nodes, their squares and the products of two nodes
      of a clique, each once; ψ has Λμ, −Λᵢᵢ/2 and −Λᵢⱼ of the precision matrix Λ.

    With a label there is an output for each of its states, and no input: a clique with the label has the indicators of its other
    nodes, and ψ a row of its table for each state.

    Args:
        cliques: sets of nodes; every node is in one, so that all nodes make the network.
        states: how many states each node has, for `counts`.
        kind: what factors are.
        nodes: how many there are, for `exponential` and `gaussian`.
        label: the node that is predicted, for `counts`; the inputs are the others in their order.
        constant: whether κ has a column of ones at the end, whose entry of ψ can be −log Z.
        outside: what an input is that is not the number of a state, as in `CombinatorialState`.

    Raises:
        SpecError: numbers that do not fit, a node in no clique, or tables of more than 16.7 million numbers.

    Example:
        >>> triangle = spec([(0, 1), (1, 2), (0, 2)], states=(2, 2, 3))
        >>> triangle.layers[0].heads[0].expansion.out_features(3)
        16
        >>> spec([(0, 1), (1, 2)], states=(2, 2, 3), label=2).widths
        (2, 3)
        >>> spec([(0, 1)], nodes=2, kind="gaussian").layers[0].heads[0].expansion.subsets
        ((0,), (1,), (0, 0), (0, 1), (1, 1))
    """
    if kind not in ("counts", "exponential", "gaussian"):
        raise SpecError(f"spec(kind={kind!r}): choose from counts, exponential, gaussian")
    if kind == "counts":
        if states is None or nodes is not None:
            raise SpecError(
                "spec: a network of tables needs the number of states of each node, and nothing else of them"
            )
        sizes = check_sizes("spec", states)
        given = check_cliques("spec", cliques, len(sizes), sizes)
        return _discrete(given, sizes, check_label("spec", label, len(sizes)), constant, outside)
    if states is not None or label is not None:
        raise SpecError(f"spec(kind={kind!r}): inputs are numbers; expected no states and no label, but nodes")
    try:
        number = operator.index(cast(Any, nodes))
    except TypeError:
        number = 0
    if number < 1:
        raise SpecError(f"spec(kind={kind!r}): expected nodes as the number of nodes, at least 1, got {nodes!r}")
    given = check_cliques("spec", cliques, number)
    subsets = given if kind == "exponential" else quadratic(given)
    kappa = CombinatorialProduct(subsets=(*subsets, ()) if constant else tuple(subsets))
    return _layer(kappa, number, 1)


def quadratic(cliques: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the nodes, and the pairs of nodes of a clique, squares among them, each once and in order."""
    single = sorted({(i,) for clique in cliques for i in clique})
    pairs = sorted({(min(i, j), max(i, j)) for clique in cliques for i in clique for j in clique})
    return (*single, *pairs)


def from_precision(mean: Any, precision: Any, cliques: Cliques | None = None) -> Model:
    """Return the Gaussian Markov network of a mean and a precision matrix Λ = Σ⁻¹, in float64: log N(x | μ, Λ⁻¹).

    Outputs are ½ log det Λ − (m/2) log 2π − ½ μᵀΛμ + (Λμ)ᵀx − ½ xᵀΛx: where the mean is many standard deviations from zero, digits
    cancel.

    Args:
        mean: μ, `(m,)`.
        precision: Λ, `(m, m)`, symmetric and positive definite.
        cliques: sets of nodes whose pairs have columns; by default those of Λ that are not zero.

    Raises:
        SpecError: matrices of other shapes, not symmetric or not positive definite, or an entry outside of the cliques.

    Example:
        >>> model = from_precision([0.0, 1.0], [[2.0, 0.0], [0.0, 2.0]])
        >>> model(torch.tensor([[0.0, 1.0]], dtype=torch.float64)).exp().detach()      # 2/(2π)
        tensor([[0.3183]], dtype=torch.float64)
    """
    try:
        mu, matrix = (tensor_of(each).to("cpu", torch.float64) for each in (mean, precision))
    except (TypeError, ValueError, RuntimeError):
        raise SpecError("from_precision: expected a mean (m,) and a precision matrix (m, m) of numbers") from None
    m = len(mu) if mu.dim() == 1 else 0
    if not m or matrix.shape != (m, m) or not bool(torch.isfinite(matrix).all() & torch.isfinite(mu).all()):
        raise SpecError(
            "from_precision: expected a finite mean (m,) and precision matrix (m, m), got "
            f"{tuple(mu.shape)} and {tuple(matrix.shape)}"
        )
    if not torch.allclose(matrix, matrix.T, rtol=1e-9, atol=1e-12 * float(matrix.abs().max())):
        raise SpecError("from_precision: expected a symmetric precision matrix; use (Λ + Λᵀ)/2")
    root, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise SpecError(
            "from_precision: the precision matrix is not positive definite, so that nothing can be normalized"
        )
    if cliques is None:
        edges = [(i, j) for i in range(m) for j in range(i) if float(matrix[i, j])]
        alone = set(range(m)) - {i for edge in edges for i in edge}
        cliques = [*edges, *((i,) for i in sorted(alone))]
    given = check_cliques("from_precision", cliques, m)
    subsets = quadratic(given)
    there = torch.zeros(m, m, dtype=torch.bool)
    for pair in subsets[m:]:
        there[pair] = there[pair[::-1]] = True
    if bool((matrix[~there] != 0).any()):
        i, j = (~there & (matrix != 0)).nonzero()[0].tolist()
        raise SpecError(
            f"from_precision: entry ({i}, {j}) of the precision matrix is not zero, but in no clique; add ({i}, {j})"
        )
    model = Model(spec(given, kind="gaussian", nodes=m, constant=True), seed=0, dtype=torch.float64).eval()
    (_, head), *_ = model.heads()
    slope = matrix @ mu
    weights = [slope[i] for (i,) in subsets[:m]]
    weights += [-matrix[i, j] / (2 if i == j else 1) for i, j in subsets[m:]]
    weights.append(root.diagonal().log().sum() - m / 2 * math.log(2 * math.pi) - mu @ slope / 2)
    head.assign("reconciliation", matrix=torch.stack(weights).unsqueeze(0))
    return model


def discrete_model(
    tables: Sequence[Table],
    states: Sequence[int],
    label: int | None = None,
    outside: Outside = "error",
    constant: float | None = None,
) -> Model:
    """Return the model of a discrete network from the tables of its cliques, in float64; a constant is added if it is given."""
    made = _discrete([nodes for nodes, _ in tables], states, label, constant is not None, outside)
    model = Model(made, seed=0, dtype=torch.float64).eval()
    (_, head), *_ = model.heads()
    outputs = head.out_features
    columns = []
    for nodes, table in tables:
        turned = table.movedim(nodes.index(label), 0) if label in nodes else table.expand(outputs, *table.shape)
        columns.append(turned.reshape(outputs, -1).clamp_min(LOG_ZERO))
    if constant is not None:
        columns.append(torch.full((outputs, 1), constant, dtype=torch.float64))
    head.assign("reconciliation", matrix=torch.cat(columns, 1))
    return model


def _discrete(
    cliques: Sequence[tuple[int, ...]], states: Sequence[int], label: int | None, constant: bool, outside: Outside
) -> ModelSpec:
    subsets = [tuple(i - (label is not None and i > label) for i in clique if i != label) for clique in cliques]
    sizes = tuple(size for node, size in enumerate(states) if node != label)
    if not sizes:
        raise SpecError("spec: expected a node beside the label; there would be no input")
    kappa = CombinatorialState(subsets=(*subsets, ()) if constant else tuple(subsets), states=sizes, outside=outside)
    return _layer(kappa, len(sizes), 1 if label is None else states[label])


def _layer(expansion: CombinatorialState | CombinatorialProduct, inputs: int, outputs: int) -> ModelSpec:
    return ModelSpec((inputs, outputs), (LayerSpec((HeadSpec(expansion, Dense(), ZeroRemainder()),)),))


def head_of(where: str, model: Any) -> Head:
    """Return the head of a model that is a Markov network."""
    heads = [head for _, head in model.heads()] if isinstance(model, Model) else []
    head = heads[0] if len(heads) == 1 else None
    if (
        head is None
        or not isinstance(head.spec.expansion, CombinatorialState | CombinatorialProduct)
        or head.spec.expansion.subsets is None
        or not isinstance(head.spec.reconciliation, Dense)
        or not isinstance(head.spec.remainder, ZeroRemainder)
        or head.spec.channels != 1
        or head.spec.before
        or head.spec.after
        or head.spec.bias
        or model.spec.resolved()[0][2].output
    ):
        raise SpecError(
            f"{where}: expected the model of a Markov network, as spec makes it: one layer of one head, with indicators or "
            f"products of given cliques, a dense ψ, and nothing else; got {type(model).__name__}"
        )
    return head


def tables_of(head: Head, row: Tensor) -> list[Table]:
    """Return the factors of an output of a discrete network, from its row of ψ; what stands for zero is zero."""
    kappa = cast(CombinatorialState, head.spec.expansion)
    sizes, subsets = kappa.sizes(head.in_features), kappa.subsets or ()
    shapes = [[sizes[i] for i in subset] for subset in subsets]
    parts = row.to("cpu", torch.float64).split([math.prod(shape) for shape in shapes])
    tables: list[Table] = [
        (subset, torch.where(part <= LOG_ZERO / 2, -math.inf, part).reshape(shape) if subset else part.reshape(()))
        for subset, shape, part in zip(subsets, shapes, parts, strict=True)
    ]
    # An input in no factor has every state alike.
    absent = sorted(set(range(head.in_features)).difference(*subsets))
    return tables + [((i,), torch.zeros(sizes[i], dtype=torch.float64)) for i in absent]


# ------------------------------------------------------------------------------------------------ what is given


def check_sizes(where: str, states: Any) -> tuple[int, ...]:
    """Return the numbers of states as a tuple, after a check."""
    try:
        sizes = tuple(operator.index(size) for size in states)
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise SpecError(
            f"{where}: expected states as the number of states of each node, at least 1, got {states!r:.60}"
        )
    return sizes


def check_cliques(
    where: str, cliques: Any, nodes: int, states: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the cliques as tuples, after a check of them and of the sizes of their tables."""
    try:
        given = tuple(tuple(operator.index(i) for i in clique) for clique in cliques)
    except TypeError:
        raise SpecError(
            f"{where}: expected cliques as sets of numbers of nodes, such as [(0, 1), (1, 2)], got {cliques!r:.60}"
        ) from None
    for clique in given:
        if not clique or not 0 <= min(clique) <= max(clique) < nodes or len(set(clique)) < len(clique):
            raise SpecError(
                f"{where}: the nodes of a clique are numbers from 0 to {nodes - 1}, each once and at least one, got {clique}"
            )
        entries = math.prod(states[i] for i in clique) if states is not None else 1
        if entries > LARGEST_TABLE:
            raise SpecError(
                f"{where}: the table of the clique {clique} would have {float(entries):.4g} numbers, {8e-9 * entries:,.3g} GB, at "
                f"most {LARGEST_TABLE:,} are made; choose smaller cliques"
            )
    absent = sorted(set(range(nodes)).difference(*given))
    if absent:
        raise SpecError(f"{where}: node {absent[0]} is in no clique; add ({absent[0]},) for a factor of it alone")
    return given
