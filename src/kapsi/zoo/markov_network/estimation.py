"""Markov networks fitted to rows: by likelihood, pseudo-likelihood, conditional likelihood or counts; Gaussian networks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, check_choice, check_integer, check_number
from kapsi.modules import Model
from kapsi.training.engine import fit as train
from kapsi.zoo.base import row_weights
from kapsi.zoo.graphical import (
    Outside,
    check_codes,
    check_label,
    check_rows,
    check_sizes,
    counts_of,
    joint_states,
)
from kapsi.zoo.inference import MAX_TABLE, LogFactor, eliminate, plan
from kapsi.zoo.markov_network.model import Cliques, Table, check_cliques, discrete_model, from_precision

Method = Literal["likelihood", "pseudo", "conditional"]

FLAT = 1e-6
"""Largest entry of a gradient counted as zero at an optimum."""


def fit(
    x: Any,
    cliques: Cliques,
    *,
    method: Method = "likelihood",
    states: Sequence[int] | None = None,
    label: int | None = None,
    penalty: float = 1e-3,
    sample_weight: Any = None,
    steps: int = 1000,
    outside: Outside = "error",
) -> Model:
    """Return a discrete Markov network in float64 fitted by L2-penalized maximum likelihood (mean log-likelihood minus λ‖ψ‖²/2).

    - `likelihood`: Σ_C log φ_C − log Z, with the exact partition function Z by variable elimination. Outputs are log p(x).
    - `pseudo`: Σ_i log p(xᵢ | all others), without a partition function. Outputs are not normalized.
    - `conditional`: log p(label | all others), by `kapsi.fit` with `cross_entropy`; cliques without the label are dropped.

    All three objectives are concave. Without a penalty the log-potential of a joint state absent from x tends to −∞; the fit ends
    at a gradient near zero.

    Args:
        x: state indices, 0 to k − 1, one column for each node including the label.
        cliques: sets of nodes with a factor each, covering all nodes.
        method: the objective.
        states: number of states of each node; default: the largest state index in x plus 1.
        label: the predicted node; see `spec`.
        penalty: L2 penalty λ, at least 0.
        sample_weight: weights of the rows, `(rows,)`; default: ones.
        steps: maximum number of L-BFGS iterations.
        outside: see `spec`.

    Raises:
        DataError: x has values other than state indices.
        SpecError: the partition function needs a table of more than 16.8 million entries.

    Warns:
        UserWarning: no convergence within `steps`.

    Example:
        >>> x = [[0, 0], [0, 0], [0, 1], [1, 1]]
        >>> model = fit(x, [(0, 1)], penalty=0)
        >>> model(torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()).exp().detach()
        tensor([[0.5000],
                [0.2500]], dtype=torch.float64)
    """
    check_choice("fit: method", method, ("likelihood", "pseudo", "conditional"))
    check_number("fit: penalty", penalty, 0)
    check_integer("fit: steps", steps, 1)
    codes, sizes, sets, weight = _prepare("fit", x, cliques, states, sample_weight)
    target = check_label("fit", label, len(sizes))
    if method == "conditional":
        if target is None:
            raise SpecError("fit(method='conditional'): expected a label, the number of the predicted node")
        return _conditional(codes, sizes, sets, target, weight, float(penalty), steps, outside)
    share = weight / weight.sum()
    order: tuple[Hashable, ...] = ()
    if method == "likelihood":
        order, most = plan(sets, dict(enumerate(sizes)))
        if most > MAX_TABLE:
            raise SpecError(
                f"fit: the partition function needs a table of {float(most):.4g} entries, {8e-9 * most:,.3g} GB; at most "
                f"{MAX_TABLE:,} are supported; use method='pseudo', or method='conditional' with a label"
            )
        loss = _likelihood(codes, sets, sizes, share, order)
    else:
        loss = _pseudo(codes, sets, sizes, share)
    tables = _minimize(loss, [[sizes[i] for i in clique] for clique in sets], float(penalty), steps)
    pairs: list[Table] = list(zip(sets, tables, strict=True))
    constant = -float(eliminate(pairs, order=order)) if method == "likelihood" else None
    return discrete_model(pairs, sizes, target, outside, constant)


def fit_counts(
    x: Any,
    cliques: Cliques,
    *,
    states: Sequence[int] | None = None,
    label: int | None = None,
    smoothing: float = 1.0,
    sample_weight: Any = None,
    outside: Outside = "error",
) -> Model:
    """Return a discrete Markov network with the potentials φ_C(s) = count of s in the rows + α, in float64.

    These are the appearance counts of the paper: the maximum likelihood for a single clique, but not for cliques with common nodes;
    see `fit`. Outputs are not normalized. A potential of zero, with α = 0, is exp(−10,000).

    Args:
        x, cliques, states, label, sample_weight, outside: see `fit`.
        smoothing: pseudo-count α, at least 0.

    Raises:
        DataError: x has values other than state indices.

    Example:
        >>> model = fit_counts([[0, 0], [0, 0], [0, 1], [1, 1]], [(0, 1)], smoothing=0)
        >>> model(torch.tensor([[0.0, 0.0], [1.0, 0.0]]).double()).exp().detach()
        tensor([[2.],
                [0.]], dtype=torch.float64)
    """
    check_number("fit_counts: smoothing", smoothing, 0)
    codes, sizes, sets, weight = _prepare("fit_counts", x, cliques, states, sample_weight)
    tables = [(clique, (counts_of(codes, clique, sizes, weight) + smoothing).log()) for clique in sets]
    return discrete_model(tables, sizes, check_label("fit_counts", label, len(sizes)), outside)


def fit_gaussian(
    x: Any, cliques: Cliques, *, sample_weight: Any = None, tolerance: float = 1e-10, steps: int = 10_000
) -> Model:
    """Return the Gaussian Markov network of maximum likelihood with a precision matrix of zero outside of the cliques.

    Iterative proportional scaling sets the covariance of each clique in turn to that of the rows. Outputs are log p(x), in float64.

    Args:
        x: rows, `(rows, nodes)`.
        cliques: sets of nodes, covering all nodes.
        sample_weight: weights of the rows, `(rows,)`; default: ones.
        tolerance: largest difference of correlations in a clique at convergence.
        steps: maximum number of rounds over all cliques.

    Raises:
        DataError: a constant input, or a clique of collinear nodes, for instance with as many nodes as rows.

    Warns:
        UserWarning: no convergence within `steps`.

    Example:
        >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> fit_gaussian(x, [(0, 1), (1, 2)])(x[:2]).shape
        torch.Size([2, 1])
    """
    rows = check_rows("fit_gaussian", x)
    m = rows.shape[1]
    sets = check_cliques("fit_gaussian", cliques, m)
    weight = row_weights("fit_gaussian", sample_weight, len(rows))
    share = weight / weight.sum()
    mean = share @ rows
    centered = rows - mean
    scale = (share @ centered.square()).sqrt()
    if bool((scale == 0).any()):
        raise DataError(
            f"fit_gaussian: input {int((scale == 0).nonzero()[0])} is constant and has no density; remove the input"
        )
    units = centered / scale
    target = units.T @ (share.unsqueeze(1) * units)
    # Maximal cliques only.
    largest = [set(clique) for clique in sets]
    largest = [a for n, a in enumerate(largest) if not any(a < b or (a == b and n > k) for k, b in enumerate(largest))]
    parts = []
    for clique in largest:
        nodes = torch.tensor(sorted(clique))
        block = (nodes.unsqueeze(1), nodes)
        root, failed = torch.linalg.cholesky_ex(target[block])
        if int(failed) or float(root.diagonal().min()) < 1e-6:
            raise DataError(
                f"fit_gaussian: the nodes {tuple(sorted(clique))} of a clique are collinear in {len(rows)} rows; remove "
                "a node, or use smaller cliques"
            )
        parts.append((block, torch.cholesky_inverse(root)))
    precision = torch.eye(m, dtype=torch.float64)
    difference = math.inf
    for _ in range(steps):
        difference = 0.0
        for block, inverse in parts:
            current = torch.linalg.inv(precision)[block]
            difference = max(difference, float((current - target[block]).abs().max()))
            precision[block] += inverse - torch.linalg.inv(current)
        if difference <= tolerance:
            break
    else:
        warnings.warn(
            f"fit_gaussian: after {steps:,} rounds correlations differ by {difference:.1e}; use more steps",
            stacklevel=2,
        )
    precision = (precision + precision.T) / 2 / (scale.unsqueeze(1) * scale)
    return from_precision(mean, precision, sets)


def _prepare(
    where: str, x: Any, cliques: Cliques, states: Sequence[int] | None, sample_weight: Any
) -> tuple[Tensor, tuple[int, ...], tuple[tuple[int, ...], ...], Tensor]:
    sizes = None if states is None else check_sizes(where, states)
    codes, sizes = check_codes(where, x, sizes, None if sizes is None else len(sizes))
    sets = check_cliques(where, cliques, len(sizes), sizes)
    return codes, sizes, sets, row_weights(where, sample_weight, len(codes))


def _likelihood(
    codes: Tensor,
    cliques: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    share: Tensor,
    order: Sequence[Hashable],
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return the mean of −log p(x) as a function of the tables: log Z minus a linear part."""
    observed = [counts_of(codes, clique, sizes, share) for clique in cliques]

    def loss(tables: Sequence[Tensor]) -> Tensor:
        inner = torch.stack([(table * part).sum() for table, part in zip(tables, observed, strict=True)]).sum()
        factors: list[LogFactor] = list(zip(cliques, tables, strict=True))
        return eliminate(factors, order=order, where="fit: the partition function") - inner

    return loss


def _pseudo(
    codes: Tensor, cliques: Sequence[tuple[int, ...]], sizes: Sequence[int], share: Tensor
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return the mean of −Σ_i log p(xᵢ | all others) as a function of the tables."""
    rows, number_of = codes.unique(dim=0, return_inverse=True)
    weight = torch.zeros(len(rows), dtype=torch.float64).index_add(0, number_of, share)
    terms: list[list[tuple[int, int, Tensor]]] = [[] for _ in sizes]
    for number, clique in enumerate(cliques):
        for axis, node in enumerate(clique):
            terms[node].append((number, axis, joint_states(rows, [i for i in clique if i != node], sizes)))

    def loss(tables: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for node, members in enumerate(terms):
            logits = torch.zeros(len(rows), sizes[node], dtype=torch.float64)
            for number, axis, others in members:
                logits = logits + tables[number].movedim(axis, -1).reshape(-1, sizes[node]).index_select(0, others)
            chosen = logits.log_softmax(-1).gather(-1, rows[:, node : node + 1]).squeeze(-1)
            total = total - weight @ chosen
        return total

    return loss


def _minimize(
    loss: Callable[[Sequence[Tensor]], Tensor], shapes: Sequence[Sequence[int]], penalty: float, steps: int
) -> list[Tensor]:
    """Return the tables of the smallest penalized loss, from initial values of zero."""
    entries = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(entries), dtype=torch.float64, requires_grad=True)

    def tables() -> list[Tensor]:
        return [part.reshape(shape) for part, shape in zip(flat.split(entries), shapes, strict=True)]

    solver = torch.optim.LBFGS(
        [flat], max_iter=steps, max_eval=4 * steps, history_size=30, line_search_fn="strong_wolfe",
        tolerance_grad=1e-9, tolerance_change=0.0,
    )  # fmt: skip

    def closure() -> Tensor:
        solver.zero_grad()
        value = loss(tables()) + penalty / 2 * flat.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(closure)
        closure()
    steepest = float(flat.grad.abs().max()) if flat.grad is not None else math.inf
    if not steepest <= FLAT:
        warnings.warn(
            f"fit: after {steps:,} steps an entry of the gradient is {steepest:.1e}, above {FLAT:.0e}; use more steps, "
            "or a penalty",
            stacklevel=3,
        )
    return [table.detach().clone() for table in tables()]


def _conditional(
    codes: Tensor,
    sizes: tuple[int, ...],
    cliques: Sequence[tuple[int, ...]],
    label: int,
    weight: Tensor,
    penalty: float,
    steps: int,
    outside: Outside,
) -> Model:
    """Return the model of the cliques with the label, trained to predict the label."""
    tables = [
        (clique, torch.zeros([sizes[i] for i in clique], dtype=torch.float64)) for clique in cliques if label in clique
    ]
    model = discrete_model(tables, sizes, label, outside)
    inputs = torch.cat((codes[:, :label], codes[:, label + 1 :]), 1).double()
    train(
        model, (inputs, codes[:, label], weight), loss="cross_entropy", solver="lbfgs", l2=penalty, epochs=steps,
        validation=None,
    )  # fmt: skip
    return model.eval()
