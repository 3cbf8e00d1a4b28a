"""Sparse sums of candidate terms under an outer function, y = g(c₀ + Σ cₖ tₖ(x)), and quotients of such sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy

from kapsi.interpret.expressions import Floats
from kapsi.interpret.search.constants import NODE, leave_one_out
from kapsi.interpret.search.terms import Term

FIRST = 250
PAIRS, TRIPLES = 240_000, 72_000
"""Number of single terms that are extended by a further term; number of pairs and of triples times the number of terms."""
MAX_COST_BELOW, MOST_BELOW = 7, 300
MAX_COST_ABOVE, MOST_ABOVE = 7, 150
"""Largest cost and number of the terms of a quotient."""
ENOUGH, MOST_MONOMIALS = 1.1, 12
"""Error of a polynomial of a sufficient degree in those of the best degree, and the largest number of its monomials."""
MOST_PER_SIZE = 12
"""Number of sums of each size kept for an outer function."""
ROUNDING = 1e-14
"""Squared error of a selection, as a share of the target's variance, that may be rounding: the simplest sum below it is best."""


Indices = npt.NDArray[np.int64]


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


def sums(terms: Sequence[Term], y: Floats, outer: Outer, most: int, noise: float = 0.0) -> list[TermSum]:
    """Return the best sums of up to `most` terms under an outer function; empty where g has no inverse at the targets.

    Args:
        terms: candidate terms.
        y: targets of the rows of the terms.
        outer: the outer function.
        most: largest number of terms, 1 to 4.
        noise: noise that the targets do not show, as a share of their variance.
    """
    known = inverted(y, outer)
    if known is None:
        return []
    target, weight = known
    matrix = np.stack([term.values for term in terms])
    costs = np.array([term.cost for term in terms])
    variance = float(np.var(y)) * len(y)
    found = []
    for chosen, error in _selected(matrix, target, weight, costs, variance, most, noise):
        cost = _cost(error + noise, len(y), outer.cost, costs[list(chosen)])
        found.append(TermSum(cost, error, outer, tuple(terms[i] for i in chosen)))
    return sorted(found, key=lambda s: s.cost)


def inverted(y: Floats, outer: Outer) -> tuple[Floats, Floats] | None:
    """Return g⁻¹(y) and the weight of each row; None where g has no inverse at the targets."""
    with np.errstate(all="ignore"):
        # A little noise may lead out of the image of g, of many rows if their targets are near its end.
        inside = (y > outer.low) & (y < outer.high)
        beyond = float(np.maximum(outer.low - y, y - outer.high).max())
        if inside.mean() < LEAST_INSIDE or (inside.mean() < 0.95 and beyond > NEAR * y.std()):
            return None
        target, slope = outer.inverse(np.where(inside, y, np.median(y))), outer.slope(np.where(inside, y, np.median(y)))
        weight = np.where(inside, 1 / np.abs(slope), 0.0)
    known = np.isfinite(weight) & np.isfinite(target)
    return np.where(known, target, 0.0), np.where(known, weight, 0.0)


def polynomials(degrees: Sequence[Sequence[Term]], y: Floats, outer: Outer, noise: float = 0.0) -> list[TermSum]:
    """Return a polynomial under an outer function: of the least sufficient degree, without the monomials that save nothing.

    Args:
        degrees: the monomials up to each degree.
        y: targets of the rows of the monomials.
        outer: the outer function.
        noise: see `sums`.
    """
    known = inverted(y, outer)
    if known is None:
        return []
    target, weight = known
    goal, total = target * weight, float(np.var(y)) * len(y)

    def squared_error(kept: Sequence[Term]) -> tuple[float, Floats]:
        """Return the squared error of least squares and its increase without each monomial."""
        matrix = np.stack([np.ones_like(y), *(t.values for t in kept)], 1) * weight[:, None]
        error, gains = leave_one_out(matrix, goal)
        return error / total, gains[1:] / total

    fits = [(squared_error(kept)[0] / max(1 - (len(kept) + 1) / len(y), 0.1), kept) for kept in degrees]
    least = min((error for error, _ in fits), default=math.inf)
    best: list[Term] = next((list(k) for e, k in fits if e <= max(ENOUGH * least, ROUNDING)), []) if least < 1 else []
    found: list[TermSum] = []
    while best:
        error, gains = squared_error(best)
        cost = _cost(error + noise, len(y), outer.cost, np.array([t.cost for t in best]))
        if len(best) <= MOST_MONOMIALS:
            found.append(TermSum(float(cost), error, outer, tuple(best)))
        best.pop(int(gains.argmin()))
    return sorted(found, key=lambda s: s.cost)[:2]


def quotients(terms: Sequence[Term], y: Floats, noise: float = 0.0) -> list[TermSum]:
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
                cost = _cost(error + noise, len(y), 3.0, np.append(costs[list(numerator)], term.cost))
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
    triples = [tuple(map(int, chosen)) for chosen in _extended(columns, goal, np.array(pairs[:3]), 1)[0]]
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


def _cost(error: Any, rows: int, outer: float, costs: Floats) -> Any:
    """Return the approximate description length of sums; costs are those of their terms, along the last axis."""
    # A factor for each term, perhaps 1, and a constant.
    error, count = np.maximum(error, ROUNDING), costs.shape[-1]
    nodes = outer + costs.sum(-1) + 1.5 * count
    constants = np.maximum(0.5 * np.log(rows / error), 4.0) * count
    return 0.5 * rows * np.log(error) + NODE * nodes + 0.3 * constants


def _selected(
    matrix: Floats, target: Floats, weight: Floats, costs: Floats, variance: float, most: int, noise: float
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
    beams: Indices = np.empty((1, 0), dtype=np.int64)
    pairs, triples = max(40, min(PAIRS // len(columns), 500)), max(12, min(TRIPLES // len(columns), 150))
    for size, width in enumerate((1, FIRST, pairs, triples)[: min(most, len(target) - 1)], 1):
        sets, left = _extended(columns, goal, beams[:width], FIRST if size == 1 else 8)
        error = np.maximum(left, 0.0) * share
        # Cheap terms first among equally good ones.
        order = np.argsort(_cost(error + noise, len(target), 0.0, costs[sets]), kind="stable")
        beams = sets[order]
        for k in order[:MOST_PER_SIZE]:
            yield tuple(map(int, sets[k])), float(error[k])


def _extended(columns: Floats, goal: Floats, beams: Indices, count: int) -> tuple[Indices, Floats]:
    """Return sums that are a beam and one of its best further terms, and the share of the goal left unexplained.

    Args:
        columns: (terms, rows), orthogonal to the intercept, of unit norm.
        goal: (rows,), likewise.
        beams: indices of the terms of each sum, (sums, size).
        count: number of further terms of each sum.
    """
    number, size = beams.shape
    basis = np.linalg.qr(columns[beams].transpose(0, 2, 1))[0]
    rest = goal - (basis @ (goal @ basis)[..., None])[..., 0] if size else goal[None]
    norm = np.ones((number, len(columns)))
    for k in range(size):
        norm -= (basis[..., k] @ columns.T) ** 2
    left = (rest * rest).sum(1)[:, None] - (rest @ columns.T) ** 2 / np.where(norm > 1e-10, norm, np.inf)
    left[np.arange(number)[:, None], beams] = np.inf
    count = min(count, len(columns))
    top = np.argpartition(left, count - 1, axis=1)[:, :count]
    errors = np.take_along_axis(left, top, 1).ravel()
    sets = np.sort(np.concatenate([np.repeat(beams, count, 0), top.reshape(-1, 1)], 1), axis=1)
    keys = sets @ len(columns) ** np.arange(size + 1)
    first = np.unique(keys, return_index=True)[1]
    first = first[np.isfinite(errors[first])]
    return sets[first], errors[first]
