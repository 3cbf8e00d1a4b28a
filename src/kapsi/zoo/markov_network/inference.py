"""What a Markov network says beyond the layer: its partition function, and log-probabilities with inputs missing."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import CombinatorialProduct, CombinatorialState
from kapsi.modules import Head, Model
from kapsi.zoo.base import tensor_of
from kapsi.zoo.bayesian_network.model import check_rows
from kapsi.zoo.inference import LARGEST_TABLE, LogFactor, eliminate, plan
from kapsi.zoo.markov_network.model import Table, head_of, tables_of

__all__ = ["log_marginal", "log_partition", "log_posterior", "normalized"]

ROWS = "rows"


def log_partition(model: Model, values: Sequence[float] | None = None) -> Tensor:
    """Return log Z = log Σ_x exp(output(x)) of each output, `(n,)` in float64; it can be differentiated in the parameters.

    Exact, by variable elimination, where the treewidth allows: no table has more than 2²⁴ = 16.8 million numbers. Of a network with
    a label the sum of all outputs is the partition function: `log_partition(model).logsumexp(0)`. A Gaussian network is integrated.

    Args:
        model: a Markov network, trained further or not.
        values: what each input of an exponential network can be, such as (−1, 1) of an Ising model.

    Raises:
        SpecError: another model, a larger table (the message says how large; conditional log-probabilities need no partition
            function), or an integral that is infinite.

    Example:
        >>> from kapsi.zoo.markov_network import fit_counts
        >>> model = fit_counts([[0, 0], [0, 0], [0, 1], [1, 1]], [(0, 1)], smoothing=1)
        >>> log_partition(model).exp().round(decimals=9).detach()
        tensor([8.], dtype=torch.float64)
    """
    head = head_of("log_partition", model)
    matrix = head.psi["matrix"].to("cpu", torch.float64)
    if isinstance(head.spec.expansion, CombinatorialState):
        if values is not None:
            raise SpecError("log_partition: the states of this network are known; expected no values")
        made = [_summed(tables_of(head, row)) for row in matrix]
    elif values is None:
        made = [_integrated(head, row) for row in matrix]
    else:
        made = [_summed(_tabulated(head, row, values)) for row in matrix]
    return torch.stack(made)


def normalized(model: Model, values: Sequence[float] | None = None) -> Model:
    """Return the same network with outputs log p(x), or log p(x, label): a column of ones of κ has −log Z.

    Args:
        model, values: as in `log_partition`. A network without a column of ones gets one.

    Raises:
        SpecError: as in `log_partition`; Z is zero.
    """
    head = head_of("normalized", model)
    total = torch.logsumexp(log_partition(model, values).detach(), 0)
    if not bool(total.isfinite()):
        raise SpecError("normalized: the potentials of all rows are zero, so that they do not sum to one")
    kappa = cast(CombinatorialState | CombinatorialProduct, head.spec.expansion)
    if () in (kappa.subsets or ()):
        made = copy.deepcopy(model)
        (_, target), *_ = made.heads()
        place = _column_of_ones(target)
        with torch.no_grad():
            target.psi["matrix"][:, place] -= total
        return made
    spec = model.spec
    layer = spec.layers[0]
    wider = replace(layer.heads[0], expansion=replace(kappa, subsets=(*(kappa.subsets or ()), ())))
    matrix = head.psi["matrix"].detach()
    made = Model(
        replace(spec, layers=(replace(layer, heads=(wider,)),)), seed=0, dtype=matrix.dtype, device=matrix.device
    )
    (_, target), *_ = made.heads()
    target.assign("reconciliation", matrix=torch.cat((matrix, -total.to(matrix).expand(len(matrix), 1)), 1))
    return made.train(model.training)


@torch.no_grad()
def log_marginal(model: Model, x: Any) -> Tensor:
    """Return log p of the inputs that are there, `(rows, n)` in float64; with a label log p(x, label = y) for each y.

    Args:
        model: a discrete Markov network, normalized or not.
        x: numbers of states, `(rows, m)`, NaN where a value is missing.

    Raises:
        SpecError: as in `log_partition`.
    """
    head, rows = _prepared("log_marginal", model, x)
    return _eliminated("log_marginal", head, rows, []) - torch.logsumexp(log_partition(model), 0)


@torch.no_grad()
def log_posterior(model: Model, x: Any, targets: Sequence[int]) -> Tensor:
    """Return log p(targets | other inputs that are there), `(rows, states of the first target, …)` in float64.

    The partition function is not needed: what is summed over are the inputs that are missing.

    Args:
        model: a discrete Markov network; a label is summed out.
        x: numbers of states, `(rows, m)`, NaN where a value is missing.
        targets: the numbers of inputs; their own values in x do not count.

    Raises:
        SpecError: another model, a table of more than 16.8 million numbers, or a row that is impossible.

    Example:
        >>> from kapsi.zoo.markov_network import fit_counts
        >>> model = fit_counts([[0, 0], [0, 0], [0, 1], [1, 1]], [(0, 1)], smoothing=0)
        >>> log_posterior(model, [[0.0, torch.nan]], [1]).exp()
        tensor([[0.6667, 0.3333]], dtype=torch.float64)
    """
    head, rows = _prepared("log_posterior", model, x)
    try:
        chosen = [operator.index(i) for i in targets]
    except TypeError:
        chosen = [-1]
    if not chosen or any(not 0 <= i < head.in_features for i in chosen) or len(set(chosen)) < len(chosen):
        raise SpecError(
            f"log_posterior: expected targets as numbers of inputs, 0 to {head.in_features - 1} and each once, got {targets!r:.60}"
        )
    rows = rows.clone()
    rows[:, chosen] = math.nan
    joint = torch.logsumexp(_eliminated("log_posterior", head, rows, chosen), 1)
    flat = joint.flatten(1)
    total = torch.logsumexp(flat, 1, keepdim=True)
    bad = total.squeeze(1) == -math.inf
    if bool(bad.any()):
        raise SpecError(
            f"log_posterior: what is observed in row {int(bad.nonzero()[0])} is impossible, so nothing follows from it; leave it "
            "out, or smooth the potentials"
        )
    return (flat - total).reshape(joint.shape)


def _prepared(where: str, model: Any, x: Any) -> tuple[Head, Tensor]:
    head = head_of(where, model)
    kappa = head.spec.expansion
    if not isinstance(kappa, CombinatorialState):
        raise SpecError(
            f"{where}: expected a network of tables; of a Gaussian one the outputs themselves are log-densities"
        )
    rows = check_rows(where, x, head.in_features, missing=True)
    kappa._spoiled(rows)  # which refuses what is no state
    return head, torch.where(rows.isnan(), math.nan, kappa._nearest(rows))


def _column_of_ones(head: Head) -> int:
    kappa = cast(CombinatorialState | CombinatorialProduct, head.spec.expansion)
    subsets = kappa.subsets or ()
    before = subsets[: subsets.index(())]
    if isinstance(kappa, CombinatorialProduct):
        return len(before)
    sizes = kappa.sizes(head.in_features)
    return sum(math.prod(sizes[i] for i in subset) for subset in before)


def _summed(tables: Sequence[Table]) -> Tensor:
    factors: list[LogFactor] = list(tables)
    return eliminate(factors, where="log_partition")


def _tabulated(head: Head, row: Tensor, values: Sequence[float]) -> list[Table]:
    """Return the factors of products as tables over the values that each input can have."""
    try:
        points = tensor_of(values).double()
    except (TypeError, ValueError, RuntimeError):
        points = torch.empty(0)
    if points.dim() != 1 or not len(points) or not bool(points.isfinite().all()):
        raise SpecError(f"log_partition: expected values as finite numbers that an input can be, got {values!r:.60}")
    tables: list[Table] = [((i,), torch.zeros(len(points), dtype=torch.float64)) for i in range(head.in_features)]
    for weight, subset in zip(row, cast(CombinatorialProduct, head.spec.expansion).subsets or (), strict=True):
        nodes = tuple(dict.fromkeys(subset))
        if len(points) ** len(nodes) > LARGEST_TABLE:
            raise SpecError(
                f"log_partition: the table of {nodes} would have {float(len(points)) ** len(nodes):.4g} numbers, at most "
                f"{LARGEST_TABLE:,} are made"
            )
        table = weight
        for node in nodes:
            table = table.unsqueeze(-1) * points ** subset.count(node)
        tables.append((nodes, table))
    return tables


def _integrated(head: Head, row: Tensor) -> Tensor:
    """Return the logarithm of the integral of exp(c + hᵀx − ½ xᵀΛx)."""
    subsets, m = cast(CombinatorialProduct, head.spec.expansion).subsets or (), head.in_features
    higher = [subset for subset in subsets if len(subset) > 2]
    if higher:
        raise SpecError(
            f"log_partition: the product of the inputs {higher[0]} is not quadratic, so there is no closed form; give the "
            "values that inputs can have, such as (-1, 1), or use conditional log-probabilities"
        )
    constant, slope = row.new_zeros(()), row.new_zeros(m)
    precision = row.new_zeros(m, m)
    for weight, subset in zip(row, subsets, strict=True):
        if not subset:
            constant = constant + weight
        elif len(subset) == 1:
            slope = slope.index_add(0, torch.tensor(subset), weight.unsqueeze(0))
        else:
            both = torch.tensor([subset, subset[::-1]])
            precision = precision.index_put((both[:, 0], both[:, 1]), -weight.expand(2), accumulate=True)
    root, failed = torch.linalg.cholesky_ex(precision)
    if int(failed):
        raise SpecError(
            "log_partition: the precision matrix is not positive definite, the integral is infinite; for inputs of few values give "
            "them, such as (-1, 1)"
        )
    half = torch.linalg.solve_triangular(root, slope.unsqueeze(1), upper=False)
    return constant + half.square().sum() / 2 - root.diagonal().log().sum() + m / 2 * math.log(2 * math.pi)


def _eliminated(where: str, head: Head, rows: Tensor, keep: Sequence[int]) -> Tensor:
    """Return log sums over what is missing and not kept, `(rows, n, states of those that are kept)`."""
    sizes = dict(enumerate(cast(CombinatorialState, head.spec.expansion).sizes(head.in_features)))
    outputs = [tables_of(head, row) for row in head.psi["matrix"].detach()]
    result = torch.empty(len(rows), len(outputs), *(sizes[i] for i in keep), dtype=torch.float64)
    patterns, which = rows.isnan().unique(dim=0, return_inverse=True)
    for number, pattern in enumerate(patterns.tolist()):
        places = (which == number).nonzero().squeeze(-1)
        scopes = [[i for i in nodes if pattern[i]] for nodes, _ in outputs[0]]
        found = plan(scopes, sizes, keep)
        # All rows of a chunk are one variable more.
        for chunk in places.split(max(1, LARGEST_TABLE // found.largest)):
            codes = rows[chunk].nan_to_num(0.0).long()
            many: LogFactor = ((ROWS,), torch.zeros(len(chunk), dtype=torch.float64))
            for output, tables in enumerate(outputs):
                factors = [many, *(_reduced(nodes, table, pattern, codes) for nodes, table in tables)]
                result[chunk, output] = eliminate(factors, [ROWS, *keep], order=found.order, where=where)
    return result


def _reduced(nodes: tuple[int, ...], table: Tensor, pattern: Sequence[bool], codes: Tensor) -> LogFactor:
    """Return a factor with the states of the rows put in, of the nodes that are missing."""
    seen = [axis for axis, i in enumerate(nodes) if not pattern[i]]
    free = [axis for axis, i in enumerate(nodes) if pattern[i]]
    names = tuple(nodes[axis] for axis in free)
    if not seen:
        return names, table
    return (ROWS, *names), table.permute(*seen, *free)[tuple(codes[:, nodes[axis]] for axis in seen)]
