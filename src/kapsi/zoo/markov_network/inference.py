"""Partition functions of Markov networks, and log-probabilities with missing inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kapsi.errors import SpecError, refuse
from kapsi.expansion import CombinatorialProduct, CombinatorialState
from kapsi.modules import Head, Model
from kapsi.zoo.base import tensor_of
from kapsi.zoo.graphical import check_numbers, check_rows, check_states, check_table, log_sums, posterior
from kapsi.zoo.inference import LogFactor, eliminate
from kapsi.zoo.markov_network.model import Table, head_of, tables_of


def log_partition(model: Model, values: Sequence[float] | None = None) -> Tensor:
    """Return log Z = log Σ_x exp(output(x)) of each output, `(n,)` in float64; differentiable in the parameters.

    Exact, by variable elimination with tables of at most 2²⁴ = 16.8 million entries; a Gaussian network is integrated. For a
    network with a label, the log-partition function is `log_partition(model).logsumexp(0)`.

    Args:
        model: a Markov network, optionally trained further.
        values: possible values of each input of an exponential network, such as (−1, 1) for an Ising model.

    Raises:
        SpecError: an unsupported model, a larger table (conditional log-probabilities need no partition function), or an infinite
            integral.

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
            raise SpecError("log_partition: values are for exponential networks; expected no values")
        totals = [_summed(tables_of(head, row)) for row in matrix]
    elif values is None:
        totals = [_integrate(head, row) for row in matrix]
    else:
        totals = [_summed(_tabulate(head, row, values)) for row in matrix]
    return torch.stack(totals)


def normalized(model: Model, values: Sequence[float] | None = None) -> Model:
    """Return the network with outputs log p(x), or log p(x, label): a column of ones of κ has the weight −log Z.

    Args:
        model, values: see `log_partition`; a column of ones is added if necessary.

    Raises:
        SpecError: as in `log_partition`; Z is zero.
    """
    head = head_of("normalized", model)
    total = torch.logsumexp(log_partition(model, values).detach(), 0)
    if not bool(total.isfinite()):
        raise SpecError("normalized: the potentials of all rows are zero, so the network cannot be normalized")
    kappa = cast(CombinatorialState | CombinatorialProduct, head.spec.expansion)
    if () in (kappa.subsets or ()):
        result = copy.deepcopy(model)
        ((_, target),) = result.heads()
        with torch.no_grad():
            target.psi["matrix"][:, _column_of_ones(target)] -= total
        return result
    spec = model.spec
    layer = spec.layers[0]
    wider = replace(layer.heads[0], expansion=replace(kappa, subsets=(*(kappa.subsets or ()), ())))
    matrix = head.psi["matrix"].detach()
    wide = replace(spec, layers=(replace(layer, heads=(wider,)),))
    result = Model(wide, seed=0, dtype=matrix.dtype, device=matrix.device)
    ((_, target),) = result.heads()
    target.assign("reconciliation", matrix=torch.cat((matrix, -total.to(matrix).expand(len(matrix), 1)), 1))
    return result.train(model.training)


@torch.no_grad()
def log_marginal(model: Model, x: Any) -> Tensor:
    """Return log p of the observed inputs, `(rows, n)` in float64; log p(x, label = y) for each state y of a label.

    Args:
        model: a discrete Markov network, normalized or not.
        x: state indices, `(rows, m)`, NaN for missing values.

    Raises:
        SpecError: as in `log_partition`.
    """
    head, rows = _prepare("log_marginal", model, x)
    return _sum_out("log_marginal", head, rows) - torch.logsumexp(log_partition(model), 0)


@torch.no_grad()
def log_posterior(model: Model, x: Any, targets: Sequence[int]) -> Tensor:
    """Return log p(targets | all other observed inputs), `(rows, states of the first target, …)` in float64.

    The sums are over missing inputs only, without a partition function.

    Args:
        model: a discrete Markov network; a label is summed out.
        x: state indices, `(rows, m)`, NaN for missing values.
        targets: indices of inputs; their values in x are ignored.

    Raises:
        SpecError: an unsupported model, or a table of more than 16.8 million entries.
        DataError: a row with observations of probability zero.

    Example:
        >>> from kapsi.zoo.markov_network import fit_counts
        >>> model = fit_counts([[0, 0], [0, 0], [0, 1], [1, 1]], [(0, 1)], smoothing=0)
        >>> log_posterior(model, [[0.0, torch.nan]], [1]).exp()
        tensor([[0.6667, 0.3333]], dtype=torch.float64)
    """
    head, rows = _prepare("log_posterior", model, x)
    chosen = check_numbers("log_posterior", "targets as indices of inputs", targets, head.in_features)
    rows = rows.clone()
    rows[:, chosen] = math.nan
    return posterior("log_posterior", _sum_out("log_posterior", head, rows, chosen))


def _prepare(where: str, model: Any, x: Any) -> tuple[Head, Tensor]:
    """Return the head of a discrete network, and checked rows."""
    head = head_of(where, model)
    if not isinstance(head.spec.expansion, CombinatorialState):
        raise SpecError(
            f"{where}: expected a network of tables; outputs of a Gaussian network are log-densities already"
        )
    return head, check_states(head, check_rows(where, x, head.in_features, missing=True))


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


def _tabulate(head: Head, row: Tensor, values: Sequence[float]) -> list[Table]:
    """Return the factors of products as tables over the possible values of the inputs."""
    try:
        points = tensor_of(values).double()
    except (TypeError, ValueError, RuntimeError):
        points = torch.empty(0)
    if points.dim() != 1 or not len(points) or not bool(points.isfinite().all()):
        refuse("log_partition", "values as finite numbers, the possible values of an input", values)
    tables: list[Table] = [((i,), torch.zeros(len(points), dtype=torch.float64)) for i in range(head.in_features)]
    for weight, subset in zip(row, cast(CombinatorialProduct, head.spec.expansion).subsets or (), strict=True):
        nodes = tuple(dict.fromkeys(subset))
        check_table("log_partition", f"the clique {nodes}", [len(points)] * len(nodes), "use fewer values")
        table = weight
        for node in nodes:
            table = table.unsqueeze(-1) * points ** subset.count(node)
        tables.append((nodes, table))
    return tables


def _integrate(head: Head, row: Tensor) -> Tensor:
    """Return the log-integral of exp(c + hᵀx − ½ xᵀΛx)."""
    subsets, m = cast(CombinatorialProduct, head.spec.expansion).subsets or (), head.in_features
    higher = [subset for subset in subsets if len(subset) > 2]
    if higher:
        raise SpecError(
            f"log_partition: the product of the inputs {higher[0]} is not quadratic, so there is no closed form; set values to "
            "the possible values of inputs, such as (-1, 1), or use conditional log-probabilities"
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
            "log_partition: the precision matrix is not positive definite, the integral is infinite; for discrete "
            "inputs set values, such as (-1, 1)"
        )
    half = torch.linalg.solve_triangular(root, slope.unsqueeze(1), upper=False)
    return constant + half.square().sum() / 2 - root.diagonal().log().sum() + m / 2 * math.log(2 * math.pi)


def _sum_out(where: str, head: Head, rows: Tensor, keep: Sequence[int] = ()) -> Tensor:
    """Return the log-sums over missing inputs except some, `(rows, n, states of kept inputs)`."""
    sizes = dict(enumerate(cast(CombinatorialState, head.spec.expansion).sizes(head.in_features)))
    outputs = [tables_of(head, row) for row in head.psi["matrix"].detach()]
    return log_sums(where, outputs, [nodes for nodes, _ in outputs[0]], sizes, rows, keep)
