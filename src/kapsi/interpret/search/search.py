"""The search: reductions, sums and quotients of terms under outer functions, constants, and the Pareto front."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import sympy

from kapsi.clock import Stopwatch
from kapsi.errors import FormulaError, check_number
from kapsi.interpret.expressions import Floats, complexity, evaluate
from kapsi.interpret.search.constants import (
    EXACT,
    NODE,
    Fit,
    SearchRows,
    cost_of_constant,
    fit,
    simplify_constants,
    with_constants,
)
from kapsi.interpret.search.engine import OUTER, ROUNDING, TermSum, inverted, polynomials, quotients, sums
from kapsi.interpret.search.reductions import Reduced, reduce
from kapsi.interpret.search.terms import Term, candidate_terms, monomials

MAX_INPUTS = 10
SCREENED = 200
"""Rows that sums of terms are compared on."""
FITTED = 1000
"""Rows that constants are fitted to."""
TRIED, SINGLE, POLYNOMIALS, SIMPLIFIED = 16, 6, 2, 8
"""Sums whose constants are fitted, single terms and polynomials beyond, and the best, whose constants are simplified."""
NATURAL = 300
"""Sums whose constants may be integers and halves."""
MOST_TERMS = 4
SIMPLE_COST, MOST_SIMPLE = 5, 400
"""Largest cost and number of the terms that are tried first."""
NEGLIGIBLE = 2 * NODE
"""Misfit below the noise that ends the search, in units of log-likelihood: the cost of an operation and its operand."""
LEAST_NOISE = 1e-7
"""Share of the target's variance from which the error of a polynomial counts as noise."""
SAME_NOISE = 0.75
"""Least correlation of the errors of a formula and of the polynomial for noise."""
WORSE = 10.0
"""Largest relative increase of the error by simple numbers in place of free constants, times the number of rows."""
NOISY = 1.02
"""Largest error of a formula that ends the search, in errors of the polynomial on held-out rows."""


@dataclass(frozen=True)
class Found:
    """A formula of the Pareto front.

    Attributes:
        complexity: number of numbers, variables and operations.
        mse: mean squared error on the rows.
        r2: explained share of the target's variance.
        cost: description length, lowest for the best compromise.
        expression: the formula.
    """

    complexity: int
    mse: float
    r2: float
    cost: float
    expression: sympy.Expr


def search_formula(
    x: Floats, y: Floats, symbols: Sequence[sympy.Symbol], *, seconds: float = 60.0, noise: float = 0.0
) -> tuple[Found, ...]:
    """Return short formulas y = f(x): the Pareto front of complexity and error, the simplest first.

    Inputs that act only through products, quotients, sums or as a factor are replaced first; sums and quotients of elementary
    functions of the remaining inputs follow, under an outer function; constants are fitted by Levenberg–Marquardt and replaced
    by simple numbers where the description gets shorter.

    Args:
        x: (rows, inputs), 1 to 10 inputs.
        y: (rows,).
        symbols: a symbol for each input.
        seconds: time after which nothing further is tried.
        noise: variance of noise that the targets do not show: values of a model have the noise of its estimate.

    Raises:
        FormulaError: too many inputs, or values that are not finite.

    Source: S. Udrescu and M. Tegmark, AI Feynman, arXiv 1905.11481, for the tests of structure.

    Example:
        >>> a, b = sympy.symbols("a b", real=True)
        >>> x = np.random.default_rng(0).uniform(1, 2, (100, 2))
        >>> search_formula(x, x[:, 0] / x[:, 1], (a, b))[-1].expression
        a/b
    """
    seconds = check_number("search_formula(seconds)", seconds, 0, math.inf)
    noise = check_number("search_formula(noise)", noise, 0, math.inf)
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.ndim != 2 or y.shape != (len(x),) or len(symbols) != x.shape[1]:
        raise FormulaError(
            f"search: expected inputs (rows, m), targets (rows,) and m symbols; "
            f"got {x.shape}, {y.shape} and {len(symbols)} symbols"
        )
    if not 1 <= x.shape[1] <= MAX_INPUTS:
        raise FormulaError(
            f"search: {x.shape[1]} inputs; a search takes 1 to {MAX_INPUTS}, choose columns or a smaller model"
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise FormulaError("search: values that are not finite; leave out rows with missing values")
    clock = Stopwatch(seconds)
    x, y = x[:FITTED], y[:FITTED]
    variance = float(y.var())
    if not variance > 0:
        return (Found(1, 0.0, 1.0, 0.0, sympy.Float(float(y[0]))),)
    rows = SearchRows(tuple(symbols), x, y, variance, noise)
    fits: list[Fit] = [_constant(rows)]
    for reduced in reversed(reduce(rows.symbols, x, y, clock)):  # the fewest inputs first
        fits += _searched(rows, reduced, clock)
        if _solved(rows, reduced, fits) or clock.over():
            break
    return _front(rows, fits)


def _constant(rows: SearchRows) -> Fit:
    symbol = sympy.Dummy("c")
    result = fit(rows, symbol, {symbol: float(rows.y.mean())})
    if result is None:
        raise FormulaError("search: the target is not finite")
    return simplify_constants(rows, result)


def _searched(rows: SearchRows, reduced: Reduced, clock: Stopwatch) -> list[Fit]:
    """Return fitted formulas of the inputs of a reduction: of simple terms, then of all."""
    inputs = [(e, reduced.x[_screened(rows), i]) for i, e in enumerate(reduced.inputs)]
    terms = candidate_terms(inputs)
    simple = [term for term in terms if term.cost <= SIMPLE_COST][:MOST_SIMPLE]
    fits = _of_terms(rows, reduced, simple, monomials(inputs), clock)
    if len(simple) < len(terms) and not clock.over() and not _solved(rows, reduced, fits):
        fits += _of_terms(rows, reduced, terms, [], clock)
    return fits


def _of_terms(
    rows: SearchRows, reduced: Reduced, terms: Sequence[Term], degrees: Sequence[Sequence[Term]], clock: Stopwatch
) -> list[Fit]:
    """Return fitted sums and quotients of terms, and polynomials of monomials up to some degrees."""
    z = reduced.z[_screened(rows)]
    noise = rows.noise / float(np.mean(reduced.scale**2) * z.var())
    pool: list[TermSum] = []
    powers: list[TermSum] = []
    fits: list[Fit] = []
    tried: set[int] = set()
    solved, least = False, math.inf
    for outer in OUTER:
        # More rows than the sums are selected on would reward chance.
        found = sums(terms, z, outer, 1 if solved else MOST_TERMS, noise)
        smooth = [] if solved else polynomials(degrees, z, outer, noise)
        pool, powers = [*pool, *found], [*powers, *smooth]
        best = sorted([*found[:2], *smooth], key=lambda candidate: candidate.cost)
        exact = [candidate for candidate in best if candidate.error < ROUNDING and candidate.cost <= least][:2]
        tried |= {id(candidate) for candidate in exact}
        fits += _finished(rows, reduced, exact, 1, clock)
        if any(one.mse <= 10 * EXACT * rows.variance for one in fits):
            # Another outer function may give a simpler formula, of a single term.
            solved, least = True, min([least, *(candidate.cost + NODE for candidate in exact)])
        if clock.over():
            break
    if solved:
        return fits
    pool += [] if clock.over() else quotients(terms, z, noise)
    pool.sort(key=lambda s: s.cost)
    left = [s for s in pool if id(s) not in tried]
    single = [s for s in left[TRIED:] if len(s.terms) == 1 and not s.denominator][:SINGLE]
    powers = sorted((s for s in powers if id(s) not in tried), key=lambda s: s.cost)
    fits += _natural(rows, reduced, itertools.takewhile(lambda _: not clock.over(), [*left[:NATURAL], *powers]))
    return fits + _finished(rows, reduced, [*left[:TRIED], *single, *powers[:POLYNOMIALS]], SIMPLIFIED, clock)


def _screened(rows: SearchRows) -> npt.NDArray[np.int64]:
    return np.linspace(0, len(rows.y) - 1, min(SCREENED, len(rows.y))).astype(np.int64)


def _solved(rows: SearchRows, reduced: Reduced, fits: Sequence[Fit]) -> bool:
    """Return whether the best formula is exact or within the noise, or as good as a polynomial while rows have noise."""
    best = min(fits, key=lambda one: one.cost, default=None)
    if best is None:
        return False
    if best.mse <= max(10 * EXACT * rows.variance, rows.noise * 2 * NEGLIGIBLE / len(rows.y)):
        return True
    if reduced.model.error < LEAST_NOISE or best.mse > NOISY * reduced.error:
        return False
    # Noise is the same for a formula and a polynomial; misfits differ.
    own = rows.y - evaluate(best.filled(), rows.values())
    other = rows.y - reduced.scale * reduced.model.values
    return float(np.corrcoef(own, other)[0, 1]) > SAME_NOISE


def _finished(rows: SearchRows, reduced: Reduced, pool: Sequence[TermSum], count: int, clock: Stopwatch) -> list[Fit]:
    """Return the fits of sums until the time is over, the best with simple constants."""
    timely = itertools.takewhile(lambda _: not clock.over(), pool)
    fits = [one for one in (_fit_sum(rows, reduced, candidate) for candidate in timely) if one is not None]
    fits.sort(key=lambda one: one.cost)
    simplified: list[Fit] = []
    least = math.inf
    for one in fits[:count]:
        # A simple number in place of a constant saves a little; the others cannot win.
        saving = 3 * NODE + cost_of_constant((one.mse + rows.noise) / rows.variance, len(rows.y))
        if one.cost - saving * (len(one.constants) + 1) < least:
            simplified.append(simplify_constants(rows, one, clock))
            least = min(least, simplified[-1].cost)
    return [*simplified, *fits]


def _system(rows: SearchRows, reduced: Reduced, candidate: TermSum) -> tuple[Floats, Floats]:
    """Return matrix and target of the linear least squares of a sum's constants, on the rows of the selection."""
    z = reduced.z[_screened(rows)]
    target, weight = inverted(z, candidate.outer) or (z, np.zeros_like(z))
    columns = [np.ones_like(z), *(t.values for t in candidate.terms), *(-z * t.values for t in candidate.denominator)]
    return np.stack(columns, 1) * weight[:, None], target * weight


def _total(candidate: TermSum, constants: Sequence[sympy.Expr]) -> sympy.Expr:
    """Return a sum, or quotient of sums, with its constants: intercept, terms, terms of the denominator."""
    above = len(candidate.terms) + 1
    terms = [sympy.Integer(1), *(t.expression() for t in (*candidate.terms, *candidate.denominator))]
    products = [c * t for c, t in zip(constants, terms, strict=True)]
    return sympy.Add(*products[:above]) / (1 + sympy.Add(*products[above:]))


def _fit_sum(rows: SearchRows, reduced: Reduced, candidate: TermSum) -> Fit | None:
    """Return a sum with constants by least squares, in all rows."""
    matrix, target = _system(rows, reduced, candidate)
    start = np.linalg.lstsq(matrix, target, rcond=1e-15)[0]
    constants = [sympy.Dummy(f"c{i}") for i in range(len(start))]
    total = _total(candidate, constants)
    inside = candidate.outer.symbolic(total)
    if candidate.outer.name == "log" and not candidate.denominator and abs(start[0]) < 100:
        # A factor before the exponential may be a simple number, where its logarithm is none.
        start[0] = np.exp(start[0])
        inside = constants[0] * candidate.outer.symbolic(total - constants[0])
    expression = reduced.factor * inside
    expression, more = with_constants(expression)
    return fit(rows, expression, {**dict(zip(constants, map(float, start), strict=True)), **more})


def _natural(rows: SearchRows, reduced: Reduced, pool: Iterable[TermSum]) -> Iterator[Fit]:
    """Yield sums whose constants are integers or halves within the error of their estimates.

    With noise many sums have the same error; those without free constants are the shortest.
    """
    for candidate in pool:
        matrix, target = _system(rows, reduced, candidate)
        best = np.linalg.lstsq(matrix, target, rcond=1e-15)[0]
        halves = np.rint(2 * best)
        if not halves[1:].all() or np.abs(halves).max() > 20 or (candidate.outer.name == "log" and halves[0]):
            continue
        least, error = (float(((target - matrix @ c) ** 2).sum()) for c in (best, halves / 2))
        count = len(best)
        if error <= least * (1 + (count + 4 * math.sqrt(2 * count)) / len(target)):
            total = _total(candidate, [sympy.Rational(int(half), 2) for half in halves])
            expression, more = with_constants(reduced.factor * candidate.outer.symbolic(total))
            one = fit(rows, expression, more)
            if one is not None:
                yield one


def _front(rows: SearchRows, fits: Sequence[Fit]) -> tuple[Found, ...]:
    """Return the formulas that are more accurate, or of a shorter description, than all simpler ones."""
    found = []
    for one in fits:
        expression = one.filled()
        found.append(Found(complexity(expression), one.mse, 1 - one.mse / rows.variance, one.cost, expression))
    front: list[Found] = []
    least = math.inf
    # Of the formulas of one complexity the shortest description: free constants always have a lower error than simple numbers.
    for entry in sorted(found, key=lambda f: (f.complexity, f.cost)):
        larger = not front or entry.complexity > front[-1].complexity
        # Exact constants such as 1/√(2π) are complex, and never more accurate than a free one.
        shorter = all(entry.cost < other.cost - 1e-9 for other in front)
        better = entry.mse < least * (1 - 1e-9) or (shorter and entry.mse <= least * (1 + WORSE / len(rows.y)))
        if larger and better:
            front.append(entry)
            least = min(least, entry.mse)
    return tuple(front)
