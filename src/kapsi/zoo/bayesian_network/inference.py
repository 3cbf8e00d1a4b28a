"""Marginal, conditional and posterior log-probabilities of a Bayesian network with missing inputs.

A layer needs all inputs. Here missing inputs, NaN, are summed or integrated out of the log-linear model exp(Σ_d ψ_d κ_d(x)) of the
layer, with its current tables and ψ, trained or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import CombinatorialCategorical, CombinatorialNormal
from kapsi.modules import Head, Model
from kapsi.zoo.graphical import (
    LOG_ZERO,
    check_numbers,
    check_possible,
    check_rows,
    check_states,
    log_sums,
    network_head,
    patterns,
    posterior,
    split_tables,
)


@torch.no_grad()
def log_marginal(model: Model, x: Any) -> Tensor:
    """Return log p of the observed inputs, `(rows, n)` in float64; −∞ for zero.

    For a network with a label, column y is log p(x, label = y), and `log_softmax(-1)` of the result has the log-probabilities of
    the label. Missing discrete inputs are summed out by variable elimination, with tables of at most 2²⁴ = 16.8 million entries;
    missing Gaussian inputs are integrated out.

    Args:
        model: a model from `from_pgmpy`, `fit_discrete` or `fit_gaussian`, optionally trained further.
        x: `(rows, m)`, NaN for missing values.

    Raises:
        SpecError: an unsupported model, a larger table, or an infinite integral for a trained ψ.

    Example:
        >>> from kapsi.zoo.bayesian_network import fit_discrete
        >>> model = fit_discrete([[0, 0], [0, 1], [1, 1], [1, 1]], [(), (0,)], smoothing=0)
        >>> log_marginal(model, [[torch.nan, 1.0], [1.0, 0.0]]).exp()
        tensor([[0.7500],
                [0.0000]], dtype=torch.float64)
    """
    head, rows = _prepare("log_marginal", model, x)
    return _marginal("log_marginal", head, rows)


@torch.no_grad()
def log_conditional(model: Model, x: Any, given: Sequence[int]) -> Tensor:
    """Return log p(observed inputs | inputs `given`), `(rows, n)` in float64.

    For a network with a label, column y is log p(x, label = y | given); with all observed inputs given, the log-probability of the
    label.

    Args:
        model, x: see `log_marginal`.
        given: indices of the inputs of the condition, at their observed values.

    Raises:
        SpecError: as in `log_marginal`.
        DataError: the condition has probability zero.
    """
    head, rows = _prepare("log_conditional", model, x)
    chosen = check_numbers("log_conditional", "given as indices of inputs", given, head.in_features)
    condition = torch.full_like(rows, math.nan)
    condition[:, chosen] = rows[:, chosen]
    below = torch.logsumexp(_marginal("log_conditional", head, condition), -1, keepdim=True)
    check_possible("log_conditional", below.squeeze(-1))
    return _marginal("log_conditional", head, rows) - below


@torch.no_grad()
def log_posterior(model: Model, x: Any, targets: Sequence[int]) -> Tensor:
    """Return log p(targets | all other observed inputs) of a discrete network, `(rows, states of the first target, …)`.

    Args:
        model, x: see `log_marginal`; a label is summed out.
        targets: indices of inputs; their values in x are ignored.

    Raises:
        SpecError: as in `log_marginal`.
        DataError: the observations have probability zero.

    Example:
        >>> from kapsi.zoo.bayesian_network import fit_discrete
        >>> model = fit_discrete([[0, 0], [0, 1], [1, 1], [1, 1]], [(), (0,)], smoothing=0)
        >>> log_posterior(model, [[torch.nan, 1.0]], [0]).exp()
        tensor([[0.3333, 0.6667]], dtype=torch.float64)
    """
    head, rows = _prepare("log_posterior", model, x)
    if not isinstance(head.spec.expansion, CombinatorialCategorical):
        raise SpecError("log_posterior: a Gaussian network has no states; use differences of log_marginal")
    chosen = check_numbers("log_posterior", "targets as indices of inputs", targets, head.in_features)
    rows = rows.clone()
    rows[:, chosen] = math.nan
    return posterior("log_posterior", _sum_out("log_posterior", head, rows, chosen))


# ------------------------------------------------------------------------------------------------ the layer


def _prepare(where: str, model: Any, x: Any) -> tuple[Head, Tensor]:
    """Return the head of a network, and checked rows."""
    wanted = (
        "a model of from_pgmpy, fit_discrete or fit_gaussian: a combinatorial expansion on given subsets, and a dense ψ"
    )
    head = network_head(where, model, (CombinatorialCategorical, CombinatorialNormal), wanted)
    rows = check_rows(where, x, head.in_features, missing=True)
    return head, check_states(head, rows) if isinstance(head.spec.expansion, CombinatorialCategorical) else rows


def _marginal(where: str, head: Head, rows: Tensor) -> Tensor:
    if isinstance(head.spec.expansion, CombinatorialNormal):
        return _integrate(where, head, rows)
    return _sum_out(where, head, rows)


# ------------------------------------------------------------------------------------------------ discrete


def _sum_out(where: str, head: Head, rows: Tensor, keep: Sequence[int] = ()) -> Tensor:
    """Return the log-sums over missing inputs except some, `(rows, n, states of kept inputs)`."""
    kappa = cast(CombinatorialCategorical, head.spec.expansion)
    subsets, sizes = kappa.subsets or (), kappa.sizes(head.in_features)
    tables = split_tables(head.kappa["tables"].detach(), subsets, sizes)
    outputs = (
        [
            (subset, _scaled(table, weight))
            for subset, table, weight in zip(subsets, tables, row.tolist(), strict=True)
            if weight
        ]
        for row in head.psi["matrix"].detach().to("cpu", torch.float64)
    )
    return log_sums(where, outputs, subsets, dict(enumerate(sizes)), rows, keep)


def _scaled(table: Tensor, weight: float) -> Tensor:
    """Return the logarithm of a power of a factor; zeros stay zeros."""
    return torch.where((table <= LOG_ZERO) & (weight > 0), -math.inf, weight * table)


# ------------------------------------------------------------------------------------------------ Gaussian


def _integrate(where: str, head: Head, rows: Tensor) -> Tensor:
    """Return the log-integrals over missing inputs, `(rows, n)`: all terms are quadratic about the same mean."""
    kappa = cast(CombinatorialNormal, head.spec.expansion)
    factor = head.kappa["factor"].detach().to("cpu", torch.float64)
    lower = factor.tril(-1) + factor.diagonal().exp().diag()
    covariance = lower @ lower.T
    centered = rows - head.kappa["mean"].detach().to("cpu", torch.float64)
    result = torch.empty(len(rows), head.out_features, dtype=torch.float64)
    parts = []
    for subset in kappa.subsets or ():
        index = torch.tensor(sorted(subset))
        root = torch.linalg.cholesky(covariance[index[:, None], index])
        constant = -root.diagonal().log().sum() - len(subset) / 2 * math.log(2 * math.pi)
        parts.append((index, torch.cholesky_inverse(root), constant))
    for output, row in enumerate(head.psi["matrix"].detach().to("cpu", torch.float64)):
        precision, constant = torch.zeros_like(covariance), torch.zeros((), dtype=torch.float64)
        for (index, inverse, term), sign in zip(parts, row, strict=True):
            precision[index[:, None], index] += sign * inverse
            constant = constant + sign * term
        for pattern, chosen in patterns(rows):
            absent = torch.tensor(pattern)
            seen, hidden = (~absent).nonzero().squeeze(-1), absent.nonzero().squeeze(-1)
            z = centered[chosen][:, seen]
            quadratic, total = precision[seen[:, None], seen], constant
            if len(hidden):
                root, failed = torch.linalg.cholesky_ex(precision[hidden[:, None], hidden])
                if int(failed):
                    raise SpecError(
                        f"{where}: the integral over the missing inputs {hidden.tolist()} is infinite for the weights of ψ; use "
                        "the network before training, or complete rows"
                    )
                across = precision[hidden[:, None], seen]
                quadratic = quadratic - across.T @ torch.cholesky_solve(across, root)
                total = total - root.diagonal().log().sum() + len(hidden) / 2 * math.log(2 * math.pi)
            result[chosen, output] = total - ((z @ quadratic) * z).sum(-1) / 2
    return result
