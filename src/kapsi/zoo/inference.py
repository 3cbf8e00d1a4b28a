"""Variable elimination: sums of products of factors over discrete variables, in logarithms."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.features import add

MAX_TABLE = 2**24
"""Entries of the largest table: 128 MiB in float64."""

LogFactor: TypeAlias = tuple[Sequence[Hashable], Tensor]
"""Variables of a factor, and the table of the logarithms of the factor, an axis per variable; −∞ for zero."""


class EliminationPlan(NamedTuple):
    """An order of elimination.

    Attributes:
        order: the variables to eliminate.
        largest: entries of the largest table, including the result.
    """

    order: tuple[Hashable, ...]
    largest: int


def plan(
    scopes: Iterable[Sequence[Hashable]], sizes: Mapping[Any, int], keep: Sequence[Hashable] = ()
) -> EliminationPlan:
    """Return a good order of elimination: the better of two greedy heuristics, as the optimum is NP-hard.

    The first heuristic eliminates the variable with the smallest table next, the second with the smallest fill-in: new pairs of
    neighbors, weighted by sizes.

    Args:
        scopes: variables of each factor.
        sizes: number of states of each variable.
        keep: variables of the result.

    Example:
        >>> plan([("a", "b"), ("b", "c"), ("c", "d")], {"a": 2, "b": 10, "c": 3, "d": 5}, keep=("d",))
        EliminationPlan(order=('a', 'b', 'c'), largest=30)
    """
    names = [tuple(scope) for scope in scopes]
    return min((_greedy(names, sizes, keep, fill) for fill in (False, True)), key=lambda candidate: candidate.largest)


def _greedy(
    scopes: Sequence[tuple[Hashable, ...]], sizes: Mapping[Any, int], keep: Sequence[Hashable], fill: bool
) -> EliminationPlan:
    neighbors: dict[Hashable, dict[Hashable, None]] = {}  # dictionaries as ordered sets
    for scope in scopes:
        for variable in scope:
            neighbors.setdefault(variable, {}).update(dict.fromkeys(other for other in scope if other != variable))
    kept = set(keep)

    def table(variable: Hashable) -> int:
        return sizes[variable] * math.prod(sizes[other] for other in neighbors[variable])

    def cost(variable: Hashable) -> tuple[int, int]:
        if not fill:
            return table(variable), 0
        others = list(neighbors[variable])
        new = sum(sizes[a] * sizes[b] for i, a in enumerate(others) for b in others[:i] if b not in neighbors[a])
        return new, table(variable)

    costs = {variable: cost(variable) for variable in neighbors if variable not in kept}
    order, largest = [], math.prod(sizes[variable] for variable in keep)
    while costs:
        chosen = min(costs, key=costs.__getitem__)
        del costs[chosen]
        order.append(chosen)
        largest = max(largest, table(chosen))
        others = neighbors.pop(chosen)
        for other in others:
            del neighbors[other][chosen]
            neighbors[other].update(dict.fromkeys(third for third in others if third != other))
        touched = dict(others)
        if fill:  # new edges change the fill-in of all common neighbors
            for other in others:
                touched.update(neighbors[other])
        costs.update({variable: cost(variable) for variable in touched if variable in costs})
    return EliminationPlan(tuple(order), largest)


def eliminate(
    factors: Sequence[LogFactor],
    keep: Sequence[Hashable] = (),
    *,
    order: Sequence[Hashable] | None = None,
    largest: int = MAX_TABLE,
    where: str = "eliminate",
) -> Tensor:
    """Return log Σ exp(Σ_f log f), the sum of a product of factors over all variables except some.

    For a Bayesian or Markov network this is the unnormalized marginal distribution of the kept variables; without kept variables it
    is the log-partition function. Differentiable; a sum of zeros gives −∞ with gradient zero.

    Args:
        factors: at least one factor; the axes of the tables give the number of states of the variables.
        keep: variables of the result, each once, in the order of the axes.
        order: order of elimination of all other variables; default: `plan`.
        largest: most entries of a table.
        where: prefix of error messages.

    Raises:
        SpecError: inconsistent tables, or a table with more than `largest` entries.

    Example:
        >>> rain = (("rain",), torch.tensor([0.8, 0.2]).log())
        >>> wet = (("rain", "wet"), torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log())
        >>> eliminate([rain, wet], keep=("wet",)).exp()
        tensor([0.7600, 0.2400])
    """
    sizes = _sizes(factors, where)
    keep = tuple(keep)
    unknown = [variable for variable in keep if variable not in sizes]
    if unknown or len(set(keep)) < len(keep):
        raise SpecError(
            f"{where}: expected keep as variables of the factors, each once, got {keep}; variables: {', '.join(map(str, sizes))}"
        )
    # Variables with a single state need no axis: torch supports at most 64.
    free = [variable for variable in keep if sizes[variable] > 1]
    pending = [
        (tuple(v for v in scope if sizes[v] > 1), table.reshape([size for size in table.shape if size != 1]))
        for scope, table in factors
    ]
    if order is None:
        order, most = plan([scope for scope, _ in pending], sizes, free)
    else:
        most = _largest_table(order, [scope for scope, _ in pending], sizes, free, where)
    if most > largest:
        raise SpecError(
            f"{where}: the largest table would have {float(most):.4g} entries, {8e-9 * most:,.3g} GB; at most {largest:,} are "
            "supported; observe more variables, or keep fewer"
        )
    for variable in order:
        if sizes[variable] == 1:
            continue
        touching = [factor for factor in pending if variable in factor[0]]
        pending = [factor for factor in pending if variable not in factor[0]]
        scope = [v for v in dict.fromkeys(v for names, _ in touching for v in names) if v != variable]
        pending.append((tuple(scope), log_sum(_product(touching, [*scope, variable]))))
    return _product(pending, free).expand([sizes[v] for v in free]).reshape([sizes[v] for v in keep])


def log_sum(table: Tensor) -> Tensor:
    """Return log Σ exp over the last axis; −∞ with gradient zero if all entries are −∞.

    Example:
        >>> log_sum(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]))
        tensor([0.6931,   -inf])
    """
    top = table.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    total = (table - top).exp().sum(-1)
    empty = total == 0
    return torch.where(empty, -math.inf, torch.where(empty, 1.0, total).log() + top.squeeze(-1))


def _product(factors: Sequence[tuple[tuple[Hashable, ...], Tensor]], scope: Sequence[Hashable]) -> Tensor:
    """Return the sum of log-factors with an axis for each variable of the scope, of length 1 for absent variables."""
    position = {variable: i for i, variable in enumerate(scope)}
    tables = []
    for names, table in factors:
        axes = [position[variable] for variable in names]
        shape = [1] * len(scope)
        for axis, length in zip(axes, table.shape, strict=True):
            shape[axis] = length
        tables.append(table.permute(sorted(range(len(axes)), key=axes.__getitem__)).reshape(shape))
    return add(tables)


def _sizes(factors: Sequence[LogFactor], where: str) -> dict[Hashable, int]:
    """Return the number of states of each variable from consistent tables."""
    if not factors:
        raise SpecError(f"{where}: expected at least one factor")
    sizes: dict[Hashable, int] = {}
    for i, (scope, table) in enumerate(factors):
        if not isinstance(table, Tensor) or table.dim() != len(scope) or len(set(scope)) < len(scope):
            got = tuple(table.shape) if isinstance(table, Tensor) else type(table).__name__
            raise SpecError(
                f"{where}: factor {i}: expected {len(scope)} variables, each once, for a table of shape {got}"
            )
        for variable, size in zip(scope, table.shape, strict=True):
            if sizes.setdefault(variable, size) != size or not size:
                raise SpecError(
                    f"{where}: factor {i} has {size} states of {variable!r}, another factor {sizes[variable]}"
                )
    return sizes


def _largest_table(
    order: Sequence[Hashable],
    scopes: Sequence[tuple[Hashable, ...]],
    sizes: Mapping[Any, int],
    keep: Sequence[Hashable],
    where: str,
) -> int:
    """Return the entries of the largest table for a given order."""
    eliminated = {variable for scope in scopes for variable in scope} - set(keep)
    listed = [variable for variable in order if sizes.get(variable, 0) != 1]
    if set(listed) != eliminated or len(listed) > len(eliminated):
        raise SpecError(f"{where}: the order must name each variable except kept ones once, got {tuple(order)}")
    pending, most = [set(scope) for scope in scopes], math.prod(sizes[variable] for variable in keep)
    for variable in listed:
        union = set().union(*(scope for scope in pending if variable in scope))
        most = max(most, math.prod(sizes[v] for v in union))
        pending = [scope for scope in pending if variable not in scope] + [union - {variable}]
    return most
