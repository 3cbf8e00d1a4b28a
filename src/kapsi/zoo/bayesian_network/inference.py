"""What a Bayesian network says of some of its inputs: marginal, conditional and posterior log-probabilities.

The layer needs all inputs. Here what is missing, NaN, is summed or integrated out of the log-linear model that the layer is,
exp(Σ_d ψ_d κ_d(x)), with the tables and the ψ that it has, trained or not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import CombinatorialCategorical, CombinatorialNormal
from kapsi.modules import Head, Model
from kapsi.reconciliation import Dense
from kapsi.remainder import ZeroRemainder
from kapsi.zoo.bayesian_network.model import LOG_ZERO, check_rows
from kapsi.zoo.inference import LARGEST_TABLE, LogFactor, eliminate, plan

__all__ = ["log_conditional", "log_marginal", "log_posterior"]

ROWS = "rows"


@torch.no_grad()
def log_marginal(model: Model, x: Any) -> Tensor:
    """Return log p of the inputs that are there, `(rows, n)` in float64, −∞ where it is zero.

    Of a network with a label column y is log p(x, label = y), so that `log_softmax(-1)` of it are the log-probabilities of the
    label. States of discrete inputs that are missing are summed out by variable elimination, with no table of more than
    2²⁴ = 16.8 million numbers; Gaussian ones are integrated out.

    Args:
        model: of `from_pgmpy`, `fit_discrete` or `fit_gaussian`, trained further or not.
        x: `(rows, m)`, NaN where a value is missing.

    Raises:
        SpecError: another model, a larger table, or a trained ψ whose integral is infinite.

    Example:
        >>> from kapsi.zoo.bayesian_network import fit_discrete
        >>> model = fit_discrete([[0, 0], [0, 1], [1, 1], [1, 1]], [(), (0,)], smoothing=0)
        >>> log_marginal(model, [[torch.nan, 1.0], [1.0, 0.0]]).exp()
        tensor([[0.7500],
                [0.0000]], dtype=torch.float64)
    """
    head, rows = _prepared("log_marginal", model, x)
    return _marginal("log_marginal", head, rows)


@torch.no_grad()
def log_conditional(model: Model, x: Any, given: Sequence[int]) -> Tensor:
    """Return log p(inputs that are there | inputs `given`), `(rows, n)` in float64.

    Of a network with a label column y is log p(x, label = y | given): with all inputs given that are there, the log-probability
    of the label.

    Args:
        model, x: as in `log_marginal`.
        given: the numbers of the inputs that are conditioned on; missing values among them are missing there, too.

    Raises:
        SpecError: as in `log_marginal`, or what is given has probability zero.
    """
    head, rows = _prepared("log_conditional", model, x)
    chosen = _inputs("log_conditional", "given", given, head.in_features)
    condition = torch.full_like(rows, math.nan)
    condition[:, chosen] = rows[:, chosen]
    below = torch.logsumexp(_marginal("log_conditional", head, condition), -1, keepdim=True)
    _possible("log_conditional", below)
    return _marginal("log_conditional", head, rows) - below


@torch.no_grad()
def log_posterior(model: Model, x: Any, targets: Sequence[int]) -> Tensor:
    """Return log p(targets | all other inputs that are there) of a discrete network, `(rows, states of the first target, …)`.

    Args:
        model, x: as in `log_marginal`; a label is summed out.
        targets: the numbers of inputs; their own values in x do not count.

    Raises:
        SpecError: as in `log_marginal`, or what is there has probability zero.

    Example:
        >>> from kapsi.zoo.bayesian_network import fit_discrete
        >>> model = fit_discrete([[0, 0], [0, 1], [1, 1], [1, 1]], [(), (0,)], smoothing=0)
        >>> log_posterior(model, [[torch.nan, 1.0]], [0]).exp()
        tensor([[0.3333, 0.6667]], dtype=torch.float64)
    """
    head, rows = _prepared("log_posterior", model, x)
    if not isinstance(head.spec.expansion, CombinatorialCategorical):
        raise SpecError("log_posterior: a Gaussian network has no table of states; take differences of log_marginal")
    chosen = _inputs("log_posterior", "targets", targets, head.in_features)
    rows = rows.clone()
    rows[:, chosen] = math.nan
    kept = [head.spec.expansion.sizes(head.in_features)[i] for i in chosen]
    joint = _eliminated("log_posterior", head, rows, chosen)
    joint = torch.logsumexp(joint, 1)
    total = torch.logsumexp(joint.flatten(1), 1)
    _possible("log_posterior", total.unsqueeze(-1))
    return joint - total.reshape(-1, *[1] * len(kept))


# ------------------------------------------------------------------------------------------------ the layer


def _prepared(where: str, model: Any, x: Any) -> tuple[Head, Tensor]:
    """Return the one head of a network, and rows for it."""
    heads = [head for _, head in model.heads()] if isinstance(model, Model) else []
    head = heads[0] if len(heads) == 1 else None
    spec = None if head is None else head.spec
    if (
        head is None
        or spec is None
        or not isinstance(spec.expansion, CombinatorialCategorical | CombinatorialNormal)
        or spec.expansion.subsets is None
        or not isinstance(spec.reconciliation, Dense)
        or not isinstance(spec.remainder, ZeroRemainder)
        or spec.channels != 1
        or spec.before
        or spec.after
        or spec.bias
        or cast(Model, model).spec.resolved()[0][2].output
    ):
        raise SpecError(
            f"{where}: expected a model of from_pgmpy, fit_discrete or fit_gaussian: one layer of one head, with a combinatorial "
            f"expansion on given subsets and a dense ψ, and nothing else; got {type(model).__name__}"
        )
    rows = check_rows(where, x, head.in_features, missing=True)
    if isinstance(spec.expansion, CombinatorialCategorical):
        spec.expansion._spoiled(rows)  # which refuses what is no state
        rows = torch.where(rows.isnan(), math.nan, spec.expansion._nearest(rows))
    return head, rows


def _inputs(where: str, name: str, given: Any, inputs: int) -> list[int]:
    try:
        chosen = [operator.index(i) for i in given]
    except TypeError:
        chosen = [-1]
    if any(not 0 <= i < inputs for i in chosen) or len(set(chosen)) < len(chosen):
        raise SpecError(
            f"{where}: expected {name} as numbers of inputs, 0 to {inputs - 1} and each once, got {given!r:.60}"
        )
    return chosen


def _possible(where: str, total: Tensor) -> None:
    bad = (total == -math.inf).any(-1)
    if bool(bad.any()):
        raise SpecError(
            f"{where}: what is observed in row {int(bad.nonzero()[0])} has probability zero, so nothing follows from it; smooth "
            "the tables (smoothing=1), or leave it out"
        )


def _marginal(where: str, head: Head, rows: Tensor) -> Tensor:
    if isinstance(head.spec.expansion, CombinatorialNormal):
        return _integrated(where, head, rows)
    return _eliminated(where, head, rows, [])


def _patterns(rows: Tensor) -> Iterator[tuple[list[bool], Tensor]]:
    """Yield which inputs are missing, and the rows where it is those."""
    found, which = rows.isnan().unique(dim=0, return_inverse=True)
    for number, pattern in enumerate(found.tolist()):
        yield pattern, (which == number).nonzero().squeeze(-1)


# ------------------------------------------------------------------------------------------------ discrete


def _eliminated(where: str, head: Head, rows: Tensor, keep: list[int]) -> Tensor:
    """Return the logarithms of sums over what is missing and not kept, `(rows, n, states of those that are kept)`."""
    kappa = cast(CombinatorialCategorical, head.spec.expansion)
    subsets, sizes = kappa.subsets or (), kappa.sizes(head.in_features)
    shapes = [[sizes[i] for i in subset] for subset in subsets]
    flat = head.kappa["tables"].detach().to("cpu", torch.float64)
    tables = [
        table.reshape(shape)
        for table, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)
    ]
    signs = head.psi["matrix"].detach().to("cpu", torch.float64)
    result = torch.empty(len(rows), head.out_features, *(sizes[i] for i in keep), dtype=torch.float64)
    # Every variable is somewhere, and the result has an axis for the rows.
    ones: list[LogFactor] = [((i,), torch.zeros(size, dtype=torch.float64)) for i, size in enumerate(sizes)]
    for pattern, places in _patterns(rows):
        missing = [i for i, absent in enumerate(pattern) if absent]
        base = [factor for factor in ones if factor[0][0] in keep]
        scopes = [tuple(i for i in subset if pattern[i]) for subset in subsets] + [tuple(scope) for scope, _ in base]
        free = [i for i in missing if i not in keep]
        found = plan(scopes, dict(enumerate(sizes)), keep)
        order = [i for i in found.order if i in free]
        # One that is in no table counts as often as it has states.
        count = math.log(math.prod(sizes[i] for i in free if i not in order))
        for chunk in places.split(max(1, LARGEST_TABLE // found.largest)):
            codes = rows[chunk].nan_to_num(0.0).long()
            many = ((ROWS,), torch.zeros(len(chunk), dtype=torch.float64))
            for output, row in enumerate(signs):
                factors: list[LogFactor] = [many, *base]
                for subset, table, sign in zip(subsets, tables, row.tolist(), strict=True):
                    if sign:
                        factors.append(_reduced(subset, _signed(table, sign), pattern, codes))
                total = eliminate(factors, [ROWS, *keep], order=_within(order, factors), where=where)
                # Of another ψ some may be in no factor that is left.
                absent = [i for i in order if not any(i in scope for scope, _ in factors)]
                result[chunk, output] = total + count + math.log(math.prod(sizes[i] for i in absent))
    return result


def _within(order: Sequence[int], factors: Sequence[LogFactor]) -> list[int]:
    there = {variable for scope, _ in factors for variable in scope}
    return [i for i in order if i in there]


def _signed(table: Tensor, sign: float) -> Tensor:
    """Return the logarithm of a power of a factor; what stands for zero is zero."""
    return torch.where((table <= LOG_ZERO) & (sign > 0), -math.inf, sign * table)


def _reduced(subset: tuple[int, ...], table: Tensor, pattern: list[bool], codes: Tensor) -> LogFactor:
    """Return a factor with the states that are there put in: of the rows and of what is missing."""
    seen = [axis for axis, i in enumerate(subset) if not pattern[i]]
    free = [axis for axis, i in enumerate(subset) if pattern[i]]
    names = tuple(subset[axis] for axis in free)
    if not seen:
        return names, table
    turned = table.permute(*seen, *free)
    return (ROWS, *names), turned[tuple(codes[:, subset[axis]] for axis in seen)]


# ------------------------------------------------------------------------------------------------ Gaussian


def _integrated(where: str, head: Head, rows: Tensor) -> Tensor:
    """Return the logarithms of integrals over what is missing, `(rows, n)`: all terms are quadratic about one mean."""
    kappa = cast(CombinatorialNormal, head.spec.expansion)
    factor = head.kappa["factor"].detach().to("cpu", torch.float64)
    lower = factor.tril(-1) + factor.diagonal().exp().diag()
    covariance = lower @ lower.T
    centered = rows - head.kappa["mean"].detach().to("cpu", torch.float64)
    result = torch.empty(len(rows), head.out_features, dtype=torch.float64)
    parts = []
    for subset in kappa.subsets or ():
        places = torch.tensor(sorted(subset))
        root = torch.linalg.cholesky(covariance[places[:, None], places])
        constant = -root.diagonal().log().sum() - len(subset) / 2 * math.log(2 * math.pi)
        parts.append((places, torch.cholesky_inverse(root), constant))
    for output, row in enumerate(head.psi["matrix"].detach().to("cpu", torch.float64)):
        precision, constant = torch.zeros_like(covariance), torch.zeros((), dtype=torch.float64)
        for (places, inverse, share), sign in zip(parts, row, strict=True):
            precision[places[:, None], places] += sign * inverse
            constant = constant + sign * share
        for pattern, chosen in _patterns(rows):
            absent = torch.tensor(pattern)
            seen, hidden = (~absent).nonzero().squeeze(-1), absent.nonzero().squeeze(-1)
            z = centered[chosen][:, seen]
            quadratic, total = precision[seen[:, None], seen], constant
            if len(hidden):
                root, failed = torch.linalg.cholesky_ex(precision[hidden[:, None], hidden])
                if int(failed):
                    raise SpecError(
                        f"{where}: with the weights that ψ has, the integral over the missing inputs {hidden.tolist()} is "
                        "infinite; use the network as it was fitted, or rows that are whole"
                    )
                across = precision[hidden[:, None], seen]
                quadratic = quadratic - across.T @ torch.cholesky_solve(across, root)
                total = total - root.diagonal().log().sum() + len(hidden) / 2 * math.log(2 * math.pi)
            result[chosen, output] = total - ((z @ quadratic) * z).sum(-1) / 2
    return result
