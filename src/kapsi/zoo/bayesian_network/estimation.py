"""Bayesian networks fitted to rows: tables by counting, linear Gaussian networks by regressions; state names as indices."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import DataError, check_number
from kapsi.modules import Model
from kapsi.zoo.base import row_weights
from kapsi.zoo.bayesian_network.model import (
    Factor,
    Parents,
    check_parents,
    check_states,
    discrete_model,
    gaussian_model,
)
from kapsi.zoo.graphical import Outside, check_codes, check_label, check_rows, counts_of

MIN_SHARE = 1e-12
"""Smallest residual share of the variance of a node given its parents; smaller shares are rounding errors."""


def fit_discrete(
    x: Any,
    parents: Parents,
    *,
    states: Sequence[int] | None = None,
    smoothing: float = 1.0,
    equivalent_sample_size: float | None = None,
    sample_weight: Any = None,
    label: int | None = None,
    conditional: bool = False,
    outside: Outside = "error",
) -> Model:
    """Return a discrete Bayesian network with tables of smoothed relative frequencies, in float64.

    p(i, Γ) = (count(i, Γ) + α)/(N + αkq) and p(Γ) = Σ_i p(i, Γ), k states of node i and q of its parents Γ, so that
    p(i | Γ) = (count(i, Γ) + α)/(count(Γ) + αk). With α = 0 and joint states of the parents absent from x, the distribution is
    uniform, and κ has a single column of conditional probabilities for the node, as log 0 − log 0 is undefined.

    Args:
        x: state indices, 0 to k − 1, one column for each node including the label.
        parents: indices of the parents of each node.
        states: number of states of each node; default: the largest state index in x plus 1.
        smoothing: pseudo-count α, at least 0; 1 is Laplace smoothing, pgmpy's K2 prior.
        equivalent_sample_size: sets α = equivalent_sample_size/(kq) in place of `smoothing`: pgmpy's BDeu prior.
        sample_weight: weights of the rows, `(rows,)`; default: ones.
        label: the predicted node; see `spec`.
        conditional: use tables of conditional probabilities, a column of κ for each node.
        outside: see `spec`.

    Raises:
        DataError: x has values other than state indices.
        SpecError: a table would have more than 16.7 million entries.

    Example:
        >>> x = torch.tensor([[0, 0], [0, 1], [1, 1], [1, 1]])
        >>> model = fit_discrete(x, [(), (0,)], smoothing=0.5)
        >>> model(torch.tensor([[1.0, 1.0]]).double()).exp()      # 2.5/5 · 2.5/3
        tensor([[0.4167]], dtype=torch.float64, grad_fn=<ExpBackward0>)
    """
    structure = check_parents("fit_discrete", parents)
    if states is not None:
        states = check_states("fit_discrete", states, structure)
    codes, sizes = check_codes("fit_discrete", x, states, len(structure))
    check_states("fit_discrete", sizes, structure)
    for name, value in (("smoothing", smoothing), ("equivalent_sample_size", equivalent_sample_size)):
        if value is not None:
            check_number(f"fit_discrete: {name}", value, 0)
    weight = row_weights("fit_discrete", sample_weight, len(codes))
    factors: list[Factor] = []
    for node, above in enumerate(structure):
        family = (node, *above)
        counts = counts_of(codes, family, sizes, weight)
        counts += smoothing if equivalent_sample_size is None else equivalent_sample_size / counts.numel()
        totals = counts.sum(0)
        if above and not conditional and bool((totals > 0).all()):
            factors += [
                Factor(family, 1, (counts / counts.sum()).log()),
                Factor(above, -1, (totals / counts.sum()).log()),
            ]
        else:
            shares = torch.where(totals > 0, counts / torch.where(totals > 0, totals, 1.0), 1.0 / sizes[node])
            factors.append(Factor(family, 1, shares.log()))
    return discrete_model(factors, sizes, check_label("fit_discrete", label, len(structure)), outside)


def fit_gaussian(x: Any, parents: Parents, *, sample_weight: Any = None, unbiased: bool = False) -> Model:
    """Return a linear Gaussian network, each node regressed on its parents by least squares, in float64.

    Args:
        x: rows, `(rows, nodes)`.
        parents: indices of the parents of each node.
        sample_weight: weights of the rows, `(rows,)`; default: ones.
        unbiased: divide residual sums of squares by rows − coefficients, pgmpy's default, instead of by rows, the maximum
            likelihood.

    Raises:
        DataError: a node determined by its parents, or fewer rows than coefficients.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, 4.0], [3.0, 8.0]])
        >>> model = fit_gaussian(x, [(), (0,)])
        >>> model.layers[0].heads[0].kappa["mean"]
        tensor([1.5000, 4.0000], dtype=torch.float64)
    """
    structure = check_parents("fit_gaussian", parents)
    rows = check_rows("fit_gaussian", x, len(structure))
    weight = row_weights("fit_gaussian", sample_weight, len(rows))
    total = weight.sum()
    mean = weight @ rows / total
    centered = rows - mean
    scale = (weight @ centered.square() / total).sqrt()
    units = centered / torch.where(scale > 0, scale, 1.0) * weight.sqrt().unsqueeze(-1)
    slopes = torch.zeros(len(structure), len(structure), dtype=torch.float64)
    scales = torch.zeros_like(mean)
    for node, above in enumerate(structure):
        free = float(total) - (1 + len(above)) * unbiased
        if free <= 0:
            raise DataError(
                f"fit_gaussian: node {node} has {1 + len(above)} coefficients, too many for {float(total):g} rows"
            )
        residual, columns = units[:, node], list(above)
        if above:
            inputs = units[:, columns]
            coefficients = torch.linalg.lstsq(inputs, residual.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
            residual = residual - inputs @ coefficients
            slopes[node, columns] = coefficients * scale[node] / torch.where(scale[columns] > 0, scale[columns], 1.0)
        share = float(residual.square().sum()) / free
        if not share > MIN_SHARE:
            reason = f"is determined by its parents {above}" if above and scale[node] > 0 else "is constant"
            raise DataError(f"fit_gaussian: node {node} {reason} and has no density; remove the node")
        scales[node] = scale[node] * math.sqrt(share)
    return gaussian_model(structure, mean - slopes @ mean, slopes, scales)


def encode(table: Any, columns: Sequence[Hashable], states: Mapping[Any, Sequence[Any]]) -> Tensor:
    """Return the state indices for a table of state names, in float64, `(rows, columns)`; NaN for missing values.

    Args:
        table: columns by name (a dictionary, a DataFrame of pandas), or rows of values in the order of `columns`.
        columns: names of the columns of the result.
        states: states of each column in the order of their indices; pgmpy's `network.states`.

    Raises:
        DataError: an unknown column or state.

    Example:
        >>> encode({"rain": ["no", "yes"], "wet": [True, None]}, ["rain", "wet"], {"rain": ["no", "yes"], "wet": [False, True]})
        tensor([[0., 1.],
                [1., nan]], dtype=torch.float64)
    """
    encoded = []
    by_name = hasattr(table, "keys")
    plain = table.tolist() if hasattr(table, "tolist") else table
    lists = None if by_name else [list(row) for row in plain]
    if lists is not None and any(len(row) != len(columns) for row in lists):
        raise DataError(f"encode: expected rows of {len(columns)} values, in the order of the columns")
    for column, name in enumerate(columns):
        if name not in states or (by_name and name not in table):
            raise DataError(
                f"encode: there is no column {name!r} in {'the states' if name not in states else 'the table'}"
            )
        numbers = {state: float(number) for number, state in enumerate(states[name])}
        values = list(table[name]) if lists is None else [row[column] for row in lists]
        codes = []
        for row, value in enumerate(values):
            try:
                codes.append(math.nan if _missing(value) else numbers[value])
            except (KeyError, TypeError):
                raise DataError(
                    f"encode: {value!r} in row {row} is not a state of {name!r}; expected one of "
                    f"{', '.join(map(repr, list(numbers)[:12]))}"
                ) from None
        encoded.append(torch.tensor(codes, dtype=torch.float64))
    if len({len(codes) for codes in encoded}) != 1:
        raise DataError("encode: expected at least one column, and columns of one length")
    return torch.stack(encoded, -1)


def _missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except TypeError:  # NA of pandas
        return True
