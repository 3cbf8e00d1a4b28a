"""Sums over discrete variables of a product of factors, in logarithms: variables are eliminated one after another."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kapsi.errors import SpecError

__all__ = ["LARGEST_TABLE", "LogFactor", "Plan", "eliminate", "log_sum", "plan"]

LARGEST_TABLE = 2**24
"""Entries of the largest table that is made: 128 MiB in float64."""

LogFactor: TypeAlias = tuple[Sequence[Hashable], Tensor]
"""The names of some variables, and the logarithms of a factor of them: a tensor with an axis for each, −∞ where it is zero."""


class Plan(NamedTuple):
    """In which order variables are eliminated.

    Attributes:
        order: the variables.
        largest: entries of the largest table that is made on the way, the result among them.
    """

    order: tuple[Hashable, ...]
    largest: int


def plan(scopes: Iterable[Sequence[Hashable]], sizes: Mapping[Any, int], keep: Sequence[Hashable] = ()) -> Plan:
    """Return a good order in which all variables but some are summed out.

    Of two greedy orders the one with the smaller largest table: next is the variable whose table is the smallest, or the one whose
    elimination connects the fewest pairs that were not connected, weighted by their sizes. The best order is a hard problem.

    Args:
        scopes: the variables of each factor.
        sizes: the number of states of each variable.
        keep: what is not summed out.

    Example:
        >>> plan([("a", "b"), ("b", "c"), ("c", "d")], {"a": 2, "b": 10, "c": 3, "d": 5}, keep=("d",))
        Plan(order=('a', 'b', 'c'), largest=30)
    """
    names = [tuple(scope) for scope in scopes]
    return min((_greedy(names, sizes, keep, fill) for fill in (False, True)), key=lambda found: found.largest)


def _greedy(
    scopes: Sequence[tuple[Hashable, ...]], sizes: Mapping[Any, int], keep: Sequence[Hashable], fill: bool
) -> Plan:
    near: dict[Hashable, dict[Hashable, None]] = {}  # of dictionaries, whose order is that of the factors
    for scope in scopes:
        for variable in scope:
            near.setdefault(variable, {}).update(dict.fromkeys(other for other in scope if other != variable))
    kept = set(keep)

    def table(variable: Hashable) -> int:
        return sizes[variable] * math.prod(sizes[other] for other in near[variable])

    def cost(variable: Hashable) -> tuple[int, int]:
        if not fill:
            return table(variable), 0
        others = list(near[variable])
        new = sum(sizes[a] * sizes[b] for i, a in enumerate(others) for b in others[:i] if b not in near[a])
        return new, table(variable)

    costs = {variable: cost(variable) for variable in near if variable not in kept}
    order, largest = [], math.prod(sizes[variable] for variable in keep)
    while costs:
        chosen = min(costs, key=costs.__getitem__)
        del costs[chosen]
        order.append(chosen)
        largest = max(largest, table(chosen))
        others = near.pop(chosen)
        for other in others:
            del near[other][chosen]
            near[other].update(dict.fromkeys(third for third in others if third != other))
        touched = dict(others)
        if fill:  # pairs that are connected now are counted by whoever is near both
            for other in others:
                touched.update(near[other])
        costs.update({variable: cost(variable) for variable in touched if variable in costs})
    return Plan(tuple(order), largest)


def eliminate(
    factors: Sequence[LogFactor],
    keep: Sequence[Hashable] = (),
    *,
    order: Sequence[Hashable] | None = None,
    largest: int = LARGEST_TABLE,
    what: str = "eliminate",
) -> Tensor:
    """Return the logarithm of the sum, over all variables but some, of a product of factors.

    log Σ exp(Σ_f log f): of a Bayesian or Markov network that is the unnormalized marginal distribution of the variables that are
    kept, and with none kept the logarithm of the partition function. It can be differentiated; where all of a sum is zero the
    result is −∞ and the gradient zero.

    Args:
        factors: at least one; variables are called by any names, and have as many states as the axes of their tables are long.
        keep: the variables of the result, each once, in the order of its axes.
        order: in which the others are eliminated; that of `plan` by default.
        largest: entries that a table may have at most.
        what: what messages begin with.

    Raises:
        SpecError: tables that do not fit each other, or one that would be larger; the message says how large.

    Example:
        >>> rain = (("rain",), torch.tensor([0.8, 0.2]).log())
        >>> wet = (("rain", "wet"), torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log())
        >>> eliminate([rain, wet], keep=("wet",)).exp()
        tensor([0.7600, 0.2400])
    """
    sizes = _sizes(factors, what)
    keep = tuple(keep)
    unknown = [variable for variable in keep if variable not in sizes]
    if unknown or len(set(keep)) < len(keep):
        raise SpecError(
            f"{what}: expected to keep variables of the factors, each once, got {keep}; there are {', '.join(map(str, sizes))}"
        )
    # Variables of one state are no axes: a table has 64 at most.
    free = [variable for variable in keep if sizes[variable] > 1]
    pending = [
        (tuple(v for v in scope if sizes[v] > 1), table.reshape([size for size in table.shape if size != 1]))
        for scope, table in factors
    ]
    if order is None:
        order, most = plan([scope for scope, _ in pending], sizes, free)
    else:
        most = _checked(order, [scope for scope, _ in pending], sizes, free, what)
    if most > largest:
        raise SpecError(
            f"{what}: the largest table would have {float(most):.4g} entries, {8e-9 * most:,.3g} GB, at most {largest:,} are made; "
            "observe more variables, or keep fewer"
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
    """Return log Σ exp over the last axis; −∞ with a gradient of zero where all of it is −∞.

    Example:
        >>> log_sum(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]))
        tensor([0.6931,   -inf])
    """
    top = table.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    total = (table - top).exp().sum(-1)
    nothing = total == 0
    return torch.where(nothing, -math.inf, torch.where(nothing, 1.0, total).log() + top.squeeze(-1))


def _product(factors: Sequence[tuple[tuple[Hashable, ...], Tensor]], scope: Sequence[Hashable]) -> Tensor:
    """Return the sum of logarithms of factors with an axis for each variable of the scope, of length 1 where none has it."""
    place = {variable: i for i, variable in enumerate(scope)}
    total: Tensor | None = None
    for names, table in factors:
        places = [place[variable] for variable in names]
        shape = [1] * len(scope)
        for axis, length in zip(places, table.shape, strict=True):
            shape[axis] = length
        turned = table.permute(sorted(range(len(places)), key=places.__getitem__)).reshape(shape)
        total = turned if total is None else total + turned
    if total is None:
        raise SpecError("eliminate: expected at least one factor")
    return total


def _sizes(factors: Sequence[LogFactor], what: str) -> dict[Hashable, int]:
    """Return the number of states of each variable, after a check of the tables."""
    if not factors:
        raise SpecError(f"{what}: expected at least one factor")
    sizes: dict[Hashable, int] = {}
    for i, (scope, table) in enumerate(factors):
        if not isinstance(table, Tensor) or table.dim() != len(scope) or len(set(scope)) < len(scope):
            shown = tuple(table.shape) if isinstance(table, Tensor) else type(table).__name__
            raise SpecError(f"{what}: factor {i} names {len(scope)} variables, each once, for a table of shape {shown}")
        for variable, size in zip(scope, table.shape, strict=True):
            if sizes.setdefault(variable, size) != size or not size:
                raise SpecError(f"{what}: factor {i} has {size} states of {variable!r}, another one {sizes[variable]}")
    return sizes


def _checked(
    order: Sequence[Hashable],
    scopes: Sequence[tuple[Hashable, ...]],
    sizes: Mapping[Any, int],
    keep: Sequence[Hashable],
    what: str,
) -> int:
    """Return the entries of the largest table of a given order."""
    wanted = {variable for scope in scopes for variable in scope} - set(keep)
    given = [variable for variable in order if sizes.get(variable, 0) != 1]
    if set(given) != wanted or len(given) > len(wanted):
        raise SpecError(f"{what}: the order must name every variable that is not kept once, got {tuple(order)}")
    pending, most = [set(scope) for scope in scopes], math.prod(sizes[variable] for variable in keep)
    for variable in given:
        joined = set().union(*(scope for scope in pending if variable in scope))
        most = max(most, math.prod(sizes[v] for v in joined))
        pending = [scope for scope in pending if variable not in scope] + [joined - {variable}]
    return most
