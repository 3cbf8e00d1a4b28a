"""Bayesian networks fitted to rows: tables by counting, linear Gaussian ones by regressions; and names of states as numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.zoo.bayesian_network.model import (
    Factor,
    Outside,
    Parents,
    check_codes,
    check_label,
    check_parents,
    check_rows,
    check_states,
    check_weight,
    discrete_model,
    gaussian_model,
)

__all__ = ["encode", "fit_discrete", "fit_gaussian"]

LEAST_SHARE = 1e-12
"""Of the variance of a node: what its parents must leave of it, or rounding would be its density."""


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
    p(i | Γ) = (count(i, Γ) + α)/(count(Γ) + αk). With α = 0 it is uniform for parents that are in no row; the conditional
    probabilities of such a node are one column of κ, since log 0 − log 0 is no number.

    Args:
        x: numbers of states, 0 to k − 1, a column for each node, the label among them.
        parents: for each node the numbers of its parents.
        states: how many states each node has; by default as many as are in x.
        smoothing: α, added to each count, at least 0: 1 is Laplace's, the prior K2 of pgmpy.
        equivalent_sample_size: α is this divided by kq, in place of `smoothing`: the prior BDeu of pgmpy.
        sample_weight: what each row counts, `(rows,)`, ones by default.
        label: the node that is predicted; see `spec`.
        conditional: whether conditional probabilities are looked up, one column of κ for each node.
        outside: as in `spec`.

    Raises:
        SpecError: x is no numbers of states, or a table would have more than 16.7 million numbers.

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
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise SpecError(f"fit_discrete({name}={value!r}): expected a finite number of at least 0")
    weight = check_weight("fit_discrete", sample_weight, len(codes))
    factors: list[Factor] = []
    for node, given in enumerate(structure):
        family = (node, *given)
        shape = [sizes[i] for i in family]
        place = torch.zeros(len(codes), dtype=torch.int64)
        for i in family:
            place = place * sizes[i] + codes[:, i]
        counts = torch.bincount(place, weight, minlength=math.prod(shape)).reshape(shape)
        counts += smoothing if equivalent_sample_size is None else equivalent_sample_size / math.prod(shape)
        above = counts.sum(0)
        if given and not conditional and bool((above > 0).all()):
            factors += [
                Factor(family, 1, (counts / counts.sum()).log()),
                Factor(given, -1, (above / counts.sum()).log()),
            ]
        else:
            shares = torch.where(above > 0, counts / torch.where(above > 0, above, 1.0), 1.0 / shape[0])
            factors.append(Factor(family, 1, shares.log()))
    return discrete_model(factors, sizes, check_label("fit_discrete", label, len(structure)), outside)


def fit_gaussian(x: Any, parents: Parents, *, sample_weight: Any = None, unbiased: bool = False) -> Model:
    """Return a linear Gaussian network, each node regressed on its parents by least squares, in float64.

    Args:
        x: rows, `(rows, nodes)`.
        parents: for each node the numbers of its parents.
        sample_weight: what each row counts, `(rows,)`, ones by default.
        unbiased: whether the sum of squares that is left is divided by the rows less the coefficients, as pgmpy does by default,
            instead of by the rows, which has the highest likelihood.

    Raises:
        SpecError: a node of which nothing is left beside its parents, or fewer rows than coefficients.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, 4.0], [3.0, 8.0]])
        >>> model = fit_gaussian(x, [(), (0,)])
        >>> model.layers[0].heads[0].kappa["mean"]
        tensor([1.5000, 4.0000], dtype=torch.float64)
    """
    structure = check_parents("fit_gaussian", parents)
    rows = check_rows("fit_gaussian", x, len(structure))
    weight = check_weight("fit_gaussian", sample_weight, len(rows))
    total = weight.sum()
    mean = weight @ rows / total
    centered = rows - mean
    spread = (weight @ centered.square() / total).sqrt()
    units = centered / torch.where(spread > 0, spread, 1.0) * weight.sqrt().unsqueeze(-1)
    slopes = torch.zeros(len(structure), len(structure), dtype=torch.float64)
    scales = torch.zeros_like(mean)
    for node, given in enumerate(structure):
        free = float(total) - (1 + len(given)) * unbiased
        if free <= 0:
            raise SpecError(
                f"fit_gaussian: node {node} has {1 + len(given)} coefficients, more than {float(total):g} rows determine"
            )
        left = units[:, node]
        if given:
            inputs = units[:, list(given)]
            found = torch.linalg.lstsq(inputs, left.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
            left = left - inputs @ found
            slopes[node, list(given)] = (
                found * spread[node] / torch.where(spread[list(given)] > 0, spread[list(given)], 1.0)
            )
        share = float(left.square().sum()) / free
        if not share > LEAST_SHARE:
            why = f"is determined by its parents {given}" if given and spread[node] > 0 else "is a constant"
            raise SpecError(f"fit_gaussian: node {node} {why} and has no density; leave it out")
        scales[node] = spread[node] * math.sqrt(share)
    return gaussian_model(structure, mean - slopes @ mean, slopes, scales)


def encode(table: Any, columns: Sequence[Hashable], states: Mapping[Any, Sequence[Any]]) -> Tensor:
    """Return the numbers of states of a table of their names, in float64, `(rows, columns)`; NaN where there is none.

    Args:
        table: columns by name (a dictionary, a DataFrame of pandas), or rows of values in the order of `columns`.
        columns: which columns, in which order.
        states: the states of each column, in the order of their numbers; `network.states` of pgmpy.

    Raises:
        SpecError: a column or a state that is not there.

    Example:
        >>> encode({"rain": ["no", "yes"], "wet": [True, None]}, ["rain", "wet"], {"rain": ["no", "yes"], "wet": [False, True]})
        tensor([[0., 1.],
                [1., nan]], dtype=torch.float64)
    """
    made = []
    by_name = hasattr(table, "keys")
    plain = table.tolist() if hasattr(table, "tolist") else table
    lists = None if by_name else [list(row) for row in plain]
    if lists is not None and any(len(row) != len(columns) for row in lists):
        raise SpecError(f"encode: expected rows of {len(columns)} values, in the order of the columns")
    for place, name in enumerate(columns):
        if name not in states or (by_name and name not in table):
            raise SpecError(
                f"encode: there is no column {name!r} in {'the states' if name not in states else 'the table'}"
            )
        numbers = {state: float(number) for number, state in enumerate(states[name])}
        values = list(table[name]) if lists is None else [row[place] for row in lists]
        codes = []
        for row, value in enumerate(values):
            try:
                codes.append(math.nan if _missing(value) else numbers[value])
            except (KeyError, TypeError):
                raise SpecError(
                    f"encode: {value!r} in row {row} is no state of {name!r}; expected one of "
                    f"{', '.join(map(repr, list(numbers)[:12]))}"
                ) from None
        made.append(torch.tensor(codes, dtype=torch.float64))
    if len({len(codes) for codes in made}) != 1:
        raise SpecError("encode: expected at least one column, and columns of one length")
    return torch.stack(made, -1)


def _missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except TypeError:  # NA of pandas, which is neither
        return True
