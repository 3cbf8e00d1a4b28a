"""Sparse sums of candidate terms under an outer function, y = g(c₀ + Σ cₖ tₖ(x)), and quotients of such sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from kapsi.interpret.expressions import Floats
from kapsi.interpret.search.constants import EXACT, NODE, cost_of_constant
from kapsi.interpret.search.terms import Term

FIRST = 250
PAIRS, TRIPLES = 240_000, 72_000
"""Number of single terms that are extended by a further term; number of pairs and of triples times the number of terms."""
MAX_COST_BELOW, MOST_BELOW = 7, 300
MAX_COST_ABOVE, MOST_ABOVE = 7, 150
"""Largest cost and number of the terms of a quotient."""
MOST_PER_SIZE = 12
"""Number of sums of each size kept for an outer function."""


@dataclass(frozen=True)
class Outer:
    """An outer function g with its inverse and the slope of the inverse."""

    name: str
    cost: float
    symbolic: Callable[[Any], Any]
    inverse: Callable[[Floats], Floats]
    slope: Callable[[Floats], Floats]
    low: float = -math.inf
    high: float = math.inf


OUTER: tuple[Outer, ...] = (
    Outer("y", 0, lambda t: t, lambda y: y, np.ones_like),
    Outer("log", 1, sympy.exp, np.log, lambda y: 1 / y, 0),
    Outer("1/y", 2, lambda t: 1 / t, lambda y: 1 / y, lambda y: y**-2.0),
    Outer("y^2", 1, sympy.sqrt, lambda y: y * y, lambda y: 2 * y, 0),
    Outer("sqrt", 2, lambda t: t**2, np.sqrt, lambda y: 0.5 / np.sqrt(y), 0),
    Outer("1/y^2", 3, lambda t: 1 / sympy.sqrt(t), lambda y: y**-2.0, lambda y: 2 * np.abs(y) ** -3.0, 0),
    Outer("exp", 1, sympy.log, np.exp, np.exp, -50, 50),
    Outer("sin", 1, sympy.asin, np.sin, np.cos, -math.pi / 2, math.pi / 2),
    Outer("cos", 1, sympy.acos, np.cos, np.sin, 0, math.pi),
    Outer("tan", 1, sympy.atan, np.tan, lambda y: np.cos(y) ** -2.0, -math.pi / 2, math.pi / 2),
    Outer("atan", 1, sympy.tan, np.arctan, lambda y: 1 / (1 + y * y)),
    Outer("asin", 1, sympy.sin, np.arcsin, lambda y: 1 / np.sqrt(1 - y * y), -1, 1),
    Outer("acos", 1, sympy.cos, np.arccos, lambda y: 1 / np.sqrt(1 - y * y), -1, 1),
    Outer("atanh", 1, sympy.tanh, np.arctanh, lambda y: 1 / (1 - y * y), -1, 1),
    Outer("tanh", 1, sympy.atanh, np.tanh, lambda y: np.cosh(y) ** -2.0, -5, 5),
    Outer("asinh", 1, sympy.sinh, np.arcsinh, lambda y: 1 / np.sqrt(1 + y * y)),
    Outer("sinh", 1, sympy.asinh, np.sinh, np.cosh, -50, 50),
    Outer("acosh", 1, sympy.cosh, np.arccosh, lambda y: 1 / np.sqrt(y * y - 1), 1),
    Outer("cosh", 1, sympy.acosh, np.cosh, np.sinh, 0, 50),
    Outer(
        "1/acosh",
        3,
        lambda t: 1 / sympy.cosh(t),
        lambda y: np.arccosh(1 / y),
        lambda y: 1 / (y * np.sqrt(1 - y * y)),
        0,
        1,
    ),
)
LEAST_INSIDE, NEAR = 0.5, 0.05
"""Least share of rows in the image of g, and the distance from it, in deviations of the target, that may be noise."""
LEAST_SLOPE = 1e-3
"""Rows with a slope of g below this share of the largest carry no weight."""


@dataclass(frozen=True)
class TermSum:
    """A sum of terms under an outer function.

    Attributes:
        cost: approximate description length.
        error: squared error in units of the target, as a share of its variance.
        outer: the outer function.
        terms: the terms.
        denominator: the terms multiplied by the target, in a quotient.
    """

    cost: float
    error: float
    outer: Outer
    terms: tuple[Term, ...]
    denominator: tuple[Term, ...] = ()


def sums(terms: Sequence[Term], y: Floats, rows: int, outer: Outer, most: int) -> list[TermSum]:
    """Return the best sums of up to `most` terms under an outer function; empty where g has no inverse at the targets.

    Args:
        terms: candidate terms.
        y: targets of the rows of the terms.
        rows: number of rows of the whole search, for the description length.
        outer: the outer function.
        most: largest number of terms, 1 to 4.
    """
    with np.errstate(all="ignore"):
        # A little noise may lead out of the image of g, of many rows if their targets are near its end.
        inside = (y > outer.low) & (y < outer.high)
        beyond = float(np.maximum(outer.low - y, y - outer.high).max())
        if inside.mean() < LEAST_INSIDE or (inside.mean() < 0.95 and beyond > NEAR * y.std()):
            return []
        target, slope = outer.inverse(np.where(inside, y, np.median(y))), outer.slope(np.where(inside, y, np.median(y)))
        weight = np.where(inside, 1 / np.abs(slope), 0.0)
    known = np.isfinite(weight) & np.isfinite(target)
    weight, target = np.where(known, weight, 0.0), np.where(known, target, 0.0)
    matrix = np.stack([term.values for term in terms])
    costs = np.array([term.cost for term in terms])
    variance = float(np.var(y)) * len(y)
    found = []
    for chosen, error in _selected(matrix, target, weight, costs, rows, variance, most):
        cost = _cost(error, rows, outer.cost, costs[list(chosen)])
        found.append(TermSum(cost, error, outer, tuple(terms[i] for i in chosen)))
    return sorted(found, key=lambda s: s.cost)


def quotients(terms: Sequence[Term], y: Floats, rows: int) -> list[TermSum]:
    """Return the best quotients y = (c₀ + Σ cₖ tₖ)/(1 + c t) with up to three terms above the line.

    The relation y = c₀ + Σ cₖ tₖ − c y t is linear; for each t, terms are selected after y t.
    """
    below = sorted((t for t in terms if t.plain and t.cost <= MAX_COST_BELOW), key=lambda t: t.cost + 3 * t.wave)[
        :MOST_BELOW
    ]
    above = sorted((t for t in terms if t.plain and t.cost <= MAX_COST_ABOVE), key=lambda t: t.cost + 2 * t.wave)[
        :MOST_ABOVE
    ]
    if not (below and above):
        return []
    values = np.stack([term.values for term in above])
    costs = np.array([term.cost for term in above])
    variance = float(np.var(y)) * len(y)
    found = []
    columns, goal = _centered(values, y)
    for term in below:
        product, _ = _centered((y * term.values)[None], y)
        inside = columns @ product[0]
        norms = np.sqrt(np.maximum(1 - inside**2, 0))
        rest = (columns - np.outer(inside, product[0])) / np.where(norms > 1e-4, norms, np.inf)[:, None]
        left = goal - (goal @ product[0]) * product[0]
        for numerator in _numerators(rest, left / np.linalg.norm(left)):
            error = _quotient_error(values[list(numerator)], term.values[None], y) / variance
            if error < 1:
                cost = _cost(error, rows, 3.0, np.append(costs[list(numerator)], term.cost))
                found.append(TermSum(cost, error, OUTER[0], tuple(above[i] for i in numerator), (term,)))
    return sorted(found, key=lambda s: s.cost)


def _numerators(columns: Floats, goal: Floats) -> list[tuple[int, ...]]:
    """Return the best single terms, the best of all pairs, and the best triples that extend a pair."""
    slope = columns @ goal
    single = [(int(i),) for i in np.argsort(-(slope**2))[:2]]
    gram = columns @ columns.T
    norm = 1 - gram * gram
    first = slope[:, None]
    gain = np.triu(first * first + (slope - gram * first) ** 2 / np.where(norm > 1e-8, norm, np.inf), 1)
    order = np.argpartition(-gain.ravel(), 4)[:4]
    pairs = [(int(k // len(slope)), int(k % len(slope))) for k in order[np.argsort(-gain.ravel()[order])]]
    triples = [(*pair, i) for pair in pairs[:3] for i, _ in _extended(columns, goal, pair, 1)]
    return [*single, *pairs[:3], *triples]


def _centered(columns: Floats, goal: Floats) -> tuple[Floats, Floats]:
    """Return centered columns of unit norm, zero for constants, and the centered goal of unit norm."""
    columns = columns - columns.mean(1, keepdims=True)
    norms = np.linalg.norm(columns, axis=1)
    goal = goal - goal.mean()
    return columns / np.where(norms > 0, norms, np.inf)[:, None], goal / np.linalg.norm(goal)


def _quotient_error(above: Floats, below: Floats, y: Floats) -> float:
    """Return the squared error of P/Q; infinite for a denominator that almost vanishes."""
    matrix = np.concatenate([np.ones((1, len(y))), above, -y * below]).T
    solution = np.linalg.lstsq(matrix, y, rcond=1e-13)[0]
    parts = solution[1 + len(above) :, None] * below
    denominator = 1 + parts.sum(0)
    # Identities such as sin² + cos² = 1 solve the linear relation, too.
    if np.abs(denominator).min() < 1e-3 * np.abs(parts).max():
        return math.inf
    numerator = matrix[:, : 1 + len(above)] @ solution[: 1 + len(above)]
    return float(((numerator / denominator - y) ** 2).sum())


def _cost(error: float, rows: int, outer: float, costs: Floats) -> float:
    # A factor for each term, perhaps 1, and a constant.
    nodes = outer + float(costs.sum()) + 1.5 * len(costs)
    return 0.5 * rows * math.log(max(error, EXACT)) + NODE * nodes + 0.3 * cost_of_constant(error, rows) * len(costs)


def _selected(
    matrix: Floats, target: Floats, weight: Floats, costs: Floats, rows: int, variance: float, most: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield indices and error of sums of terms with an intercept: every size by extending the best of the size below."""
    unit = weight / np.linalg.norm(weight)
    columns = matrix * weight
    sizes = np.linalg.norm(columns, axis=1)
    columns -= np.outer(columns @ unit, unit)
    norms = np.linalg.norm(columns, axis=1)
    columns /= np.where(norms > 1e-9 * sizes, norms, np.inf)[:, None]
    goal = target * weight
    goal = goal - (goal @ unit) * unit
    total = float(goal @ goal)
    if not total > 0 or not math.isfinite(total):
        return
    goal = goal / math.sqrt(total)
    share = total / variance
    beams: list[tuple[int, ...]] = [()]
    pairs, triples = max(40, min(PAIRS // len(columns), 500)), max(12, min(TRIPLES // len(columns), 150))
    for size, width in enumerate((1, FIRST, pairs, triples)[:most], 1):
        best: dict[tuple[int, ...], float] = {}
        if size == 2:
            best = _best_pairs(columns, goal, [first for (first,) in beams[:width]])
        for chosen in beams[:width] if size != 2 else ():
            for i, left in _extended(columns, goal, chosen, 8 if size > 1 else FIRST):
                best[tuple(sorted((*chosen, i)))] = max(left, 0.0)
        # Cheap terms first among equally good ones.
        order = sorted(best, key=lambda c: _cost(best[c] * share, rows, 0.0, costs[list(c)]))
        for chosen in order[:MOST_PER_SIZE]:
            yield chosen, best[chosen] * share
        beams = order


def _best_pairs(columns: Floats, goal: Floats, firsts: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Return pairs of a first and a further term, and the share of the goal left unexplained."""
    gram = columns[firsts] @ columns.T
    slope = columns @ goal
    first = slope[firsts][:, None]
    norm = 1 - gram * gram
    left = 1 - first * first - (slope - gram * first) ** 2 / np.where(norm > 1e-8, norm, np.inf)
    count = min(8, left.shape[1])
    top = np.argpartition(left, count - 1, axis=1)[:, :count]
    found = ((firsts[j], int(i), float(left[j, i])) for j in range(len(firsts)) for i in top[j])
    return {tuple(sorted((f, i))): max(error, 0.0) for f, i, error in found if f != i and math.isfinite(error)}


def _extended(columns: Floats, goal: Floats, chosen: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    """Return the best further terms of a sum and the share of the goal left unexplained."""
    if not chosen:
        left = 1 - (columns @ goal) ** 2
    else:
        basis = np.linalg.qr(columns[list(chosen)].T)[0]
        rest = goal - basis @ (basis.T @ goal)
        inside = columns @ basis
        norm = 1 - (inside * inside).sum(1)
        gain = (columns @ rest) ** 2 / np.where(norm > 1e-10, norm, np.inf)
        left = float(rest @ rest) - gain
        left[list(chosen)] = np.inf
    count = min(count, len(left))
    top = np.argpartition(left, count - 1)[:count]
    return [(int(i), float(left[i])) for i in top if math.isfinite(left[i])]
