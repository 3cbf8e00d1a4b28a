"""Markov networks fitted to rows: by likelihood, pseudo-likelihood, the likelihood of a label, counts, and Gaussian ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.training.engine import fit as train
from kapsi.zoo.bayesian_network.model import Outside, check_codes, check_label, check_rows, check_weight
from kapsi.zoo.inference import LARGEST_TABLE, LogFactor, eliminate, plan
from kapsi.zoo.markov_network.model import Cliques, Table, check_cliques, check_sizes, discrete_model, from_precision

__all__ = ["fit", "fit_counts", "fit_gaussian"]

Method = Literal["likelihood", "pseudo", "conditional"]

FLAT = 1e-6
"""The largest entry of a gradient at which an optimum is taken as reached."""


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
    """Return a discrete Markov network whose log-potentials have the largest mean log-likelihood, less λ‖ψ‖²/2, in float64.

    - `likelihood`: Σ_C log φ_C − log Z, with the exact partition function Z by variable elimination. Outputs are log p(x).
    - `pseudo`: Σ_i log p(xᵢ | all others), for which no partition function is needed. Outputs are not normalized.
    - `conditional`: log p(label | all others), which is `kapsi.fit` with `cross_entropy`; only cliques with the label are kept, as
      the others say nothing of it.

    All three are concave. Without a penalty a joint state that is in no row has a log-potential that goes to −∞; it ends where the
    gradient is flat.

    Args:
        x: numbers of states, 0 to k − 1, a column for each node, the label among them.
        cliques: sets of nodes with a factor each; every node is in one.
        method: what is made large.
        states: how many states each node has; by default as many as are in x.
        label: the node that is predicted; see `spec`.
        penalty: λ, at least 0.
        sample_weight: what each row counts, `(rows,)`, ones by default.
        steps: of L-BFGS, at most.
        outside: as in `spec`.

    Raises:
        SpecError: x is no numbers of states, or the partition function needs a table of more than 16.8 million numbers.

    Warns:
        UserWarning: the steps are too few.

    Example:
        >>> x = [[0, 0], [0, 0], [0, 1], [1, 1]]
        >>> model = fit(x, [(0, 1)], penalty=0)
        >>> model(torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()).exp().detach()
        tensor([[0.5000],
                [0.2500]], dtype=torch.float64)
    """
    if method not in ("likelihood", "pseudo", "conditional"):
        raise SpecError(f"fit(method={method!r}): choose from likelihood, pseudo, conditional")
    if not (isinstance(penalty, int | float) and math.isfinite(penalty) and penalty >= 0):
        raise SpecError(f"fit(penalty={penalty!r}): expected a finite number of at least 0")
    if not (isinstance(steps, int) and steps >= 1):
        raise SpecError(f"fit(steps={steps!r}): expected a number of at least 1")
    codes, sizes, given, weight = _prepared("fit", x, cliques, states, sample_weight)
    target = check_label("fit", label, len(sizes))
    if method == "conditional":
        if target is None:
            raise SpecError("fit(method='conditional'): expected a label, the number of the node that is predicted")
        return _conditional(codes, sizes, given, target, weight, float(penalty), steps, outside)
    share = weight / weight.sum()
    order: tuple[Hashable, ...] = ()
    if method == "likelihood":
        order, most = plan(given, dict(enumerate(sizes)))
        if most > LARGEST_TABLE:
            raise SpecError(
                f"fit: the partition function needs a table of {float(most):.4g} numbers, {8e-9 * most:,.3g} GB, at most "
                f"{LARGEST_TABLE:,} are made; use method='pseudo', or method='conditional' with a label, which do without it"
            )
        loss = _likelihood(codes, given, sizes, share, order)
    else:
        loss = _pseudo(codes, given, sizes, share)
    tables = _maximized(loss, [[sizes[i] for i in clique] for clique in given], float(penalty), steps)
    pairs: list[Table] = list(zip(given, tables, strict=True))
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

    That is the appearance count of the paper: of one clique it is the largest likelihood, of several that share nodes it is none,
    see `fit`. Outputs are not normalized. A potential of zero, with α = 0, is exp(−10,000).

    Args:
        x, cliques, states, label, sample_weight, outside: as in `fit`.
        smoothing: α, at least 0.

    Raises:
        SpecError: x is no numbers of states.

    Example:
        >>> model = fit_counts([[0, 0], [0, 0], [0, 1], [1, 1]], [(0, 1)], smoothing=0)
        >>> model(torch.tensor([[0.0, 0.0], [1.0, 0.0]]).double()).exp().detach()
        tensor([[2.],
                [0.]], dtype=torch.float64)
    """
    if not (isinstance(smoothing, int | float) and math.isfinite(smoothing) and smoothing >= 0):
        raise SpecError(f"fit_counts(smoothing={smoothing!r}): expected a finite number of at least 0")
    codes, sizes, given, weight = _prepared("fit_counts", x, cliques, states, sample_weight)
    tables = [(clique, (_counted(codes, clique, sizes, weight) + smoothing).log()) for clique in given]
    return discrete_model(tables, sizes, check_label("fit_counts", label, len(sizes)), outside)


def fit_gaussian(
    x: Any, cliques: Cliques, *, sample_weight: Any = None, tolerance: float = 1e-10, steps: int = 10_000
) -> Model:
    """Return the Gaussian Markov network of the largest likelihood whose precision matrix is zero outside of the cliques.

    By iterative proportional scaling: the covariance of each clique in turn is made that of the rows. Outputs are log p(x), in
    float64.

    Args:
        x: rows, `(rows, nodes)`.
        cliques: sets of nodes; every node is in one.
        sample_weight: what each row counts, `(rows,)`, ones by default.
        tolerance: the largest difference of correlations in a clique at which the fit is done.
        steps: rounds over all cliques, at most.

    Raises:
        SpecError: a clique whose nodes are collinear, or as many as there are rows.

    Warns:
        UserWarning: the steps are too few.

    Example:
        >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> fit_gaussian(x, [(0, 1), (1, 2)])(x[:2]).shape
        torch.Size([2, 1])
    """
    rows = check_rows("fit_gaussian", x)
    m = rows.shape[1]
    given = check_cliques("fit_gaussian", cliques, m)
    weight = check_weight("fit_gaussian", sample_weight, len(rows))
    share = weight / weight.sum()
    mean = share @ rows
    centered = rows - mean
    scale = (share @ centered.square()).sqrt()
    if bool((scale == 0).any()):
        raise SpecError(
            f"fit_gaussian: input {int((scale == 0).nonzero()[0])} is constant, it has no density; leave it out"
        )
    units = centered / scale
    wanted = units.T @ (share.unsqueeze(1) * units)
    # Only the largest: the others are in them.
    largest = [set(clique) for clique in given]
    largest = [a for n, a in enumerate(largest) if not any(a < b or (a == b and n > k) for k, b in enumerate(largest))]
    parts = []
    for clique in largest:
        index = torch.tensor(sorted(clique))
        places = (index.unsqueeze(1), index)
        root, failed = torch.linalg.cholesky_ex(wanted[places])
        if int(failed) or float(root.diagonal().min()) < 1e-6:
            raise SpecError(
                f"fit_gaussian: the nodes {tuple(sorted(clique))} of a clique are collinear in {len(rows)} rows; leave one out, or "
                "choose smaller cliques"
            )
        parts.append((places, torch.cholesky_inverse(root)))
    precision = torch.eye(m, dtype=torch.float64)
    apart = math.inf
    for _ in range(steps):
        apart = 0.0
        for places, inverse in parts:
            present = torch.linalg.inv(precision)[places]
            apart = max(apart, float((present - wanted[places]).abs().max()))
            precision[places] += inverse - torch.linalg.inv(present)
        if apart <= tolerance:
            break
    else:
        warnings.warn(
            f"fit_gaussian: after {steps:,} rounds correlations are off by {apart:.1e}; give more steps", stacklevel=2
        )
    precision = (precision + precision.T) / 2 / (scale.unsqueeze(1) * scale)
    return from_precision(mean, precision, given)


def _prepared(
    where: str, x: Any, cliques: Cliques, states: Sequence[int] | None, sample_weight: Any
) -> tuple[Tensor, tuple[int, ...], tuple[tuple[int, ...], ...], Tensor]:
    sizes = None if states is None else check_sizes(where, states)
    codes, found = check_codes(where, x, sizes, None if sizes is None else len(sizes))
    return (
        codes,
        found,
        check_cliques(where, cliques, len(found), found),
        check_weight(where, sample_weight, len(codes)),
    )


def _place(codes: Tensor, nodes: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the number of the joint state of some nodes, the last runs fastest."""
    place = torch.zeros(len(codes), dtype=torch.int64)
    for i in nodes:
        place = place * sizes[i] + codes[:, i]
    return place


def _counted(codes: Tensor, nodes: Sequence[int], sizes: Sequence[int], weight: Tensor) -> Tensor:
    shape = [sizes[i] for i in nodes]
    return torch.bincount(_place(codes, nodes, sizes), weight, minlength=math.prod(shape)).reshape(shape)


def _likelihood(
    codes: Tensor,
    cliques: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    share: Tensor,
    order: Sequence[Hashable],
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return the mean of −log p(x) as a function of the tables: log Z less the part that is linear in them."""
    observed = [_counted(codes, clique, sizes, share) for clique in cliques]

    def loss(tables: Sequence[Tensor]) -> Tensor:
        inner = torch.stack([(table * part).sum() for table, part in zip(tables, observed, strict=True)]).sum()
        factors: list[LogFactor] = list(zip(cliques, tables, strict=True))
        return eliminate(factors, order=order, where="fit: the partition function") - inner

    return loss


def _pseudo(
    codes: Tensor, cliques: Sequence[tuple[int, ...]], sizes: Sequence[int], share: Tensor
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return the mean of −Σ_i log p(xᵢ | all others) as a function of the tables."""
    rows, which = codes.unique(dim=0, return_inverse=True)
    weight = torch.zeros(len(rows), dtype=torch.float64).index_add(0, which, share)
    terms: list[list[tuple[int, int, Tensor]]] = [[] for _ in sizes]
    for number, clique in enumerate(cliques):
        for axis, node in enumerate(clique):
            terms[node].append((number, axis, _place(rows, [i for i in clique if i != node], sizes)))

    def loss(tables: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for node, found in enumerate(terms):
            logits = torch.zeros(len(rows), sizes[node], dtype=torch.float64)
            for number, axis, place in found:
                logits = logits + tables[number].movedim(axis, -1).reshape(-1, sizes[node]).index_select(0, place)
            chosen = logits.log_softmax(-1).gather(-1, rows[:, node : node + 1]).squeeze(-1)
            total = total - weight @ chosen
        return total

    return loss


def _maximized(
    loss: Callable[[Sequence[Tensor]], Tensor], shapes: Sequence[Sequence[int]], penalty: float, steps: int
) -> list[Tensor]:
    """Return the tables at which a loss and the penalty are smallest; they begin at zero."""
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
            f"fit: after {steps:,} steps an entry of the gradient is {steepest:.1e}, above {FLAT:.0e}; give more steps, or a "
            "penalty",
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
    """Return the model of the cliques with the label, trained on it."""
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
