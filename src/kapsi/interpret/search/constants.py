"""Constants of a formula: least squares by Levenberg–Marquardt, then simple numbers where the error allows them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

from kapsi.clock import Stopwatch
from kapsi.interpret.expressions import Floats, complexity, evaluate, slope

STEPS = 60
"""Largest number of steps of Levenberg–Marquardt."""
EXACT = 1e-20
"""Share of the target's variance that counts as no error."""
NODE = 1.6
"""Cost of a number, variable or operation, in units of log-likelihood."""
LISTED = 6.5
"""Largest cost of a factor from the list of simple numbers: the logarithm of the length of the list."""
MAX_DENOMINATOR = 12


@dataclass(frozen=True)
class SearchRows:
    """Rows of a search.

    Attributes:
        symbols: the symbols of the columns.
        x: values, (rows, columns).
        y: target, (rows,).
        variance: mean squared deviation of the target, above 0.
        noise: variance of noise that the target does not show, as that of classes in the logits of a model; a smaller misfit
            is not worth a longer formula.
    """

    symbols: tuple[sympy.Symbol, ...]
    x: Floats
    y: Floats
    variance: float
    noise: float = 0.0

    def values(self) -> dict[sympy.Symbol, Floats]:
        """Return the column of each symbol."""
        return {symbol: self.x[:, i] for i, symbol in enumerate(self.symbols)}


@dataclass(frozen=True)
class Fit:
    """An expression with free constants and their best values.

    Attributes:
        expression: the expression with symbols in place of free constants.
        constants: value of each free constant.
        mse: mean squared error on the rows.
        cost: description length, lower is better.
    """

    expression: sympy.Expr
    constants: Mapping[sympy.Symbol, float]
    mse: float
    cost: float

    def filled(self) -> sympy.Expr:
        """Return the expression with the values of its constants."""
        return self.expression.xreplace({symbol: sympy.Float(value) for symbol, value in self.constants.items()})


def description_length(rows: SearchRows, mse: float, expression: sympy.Expr, free: int) -> float:
    """Return n/2 log(error) plus the costs of the expression and of its free constants."""
    return encoded(rows, mse, cost_of_structure(expression), free)


def encoded(rows: SearchRows, mse: float, structure: float, free: int) -> float:
    """Return n/2 log(error) plus the cost of an expression, see `cost_of_structure`, and of its free constants."""
    share = max((mse + rows.noise) / rows.variance, EXACT)
    return 0.5 * len(rows.y) * math.log(share) + structure + free * cost_of_constant(share, len(rows.y))


def cost_of_structure(expression: sympy.Expr) -> float:
    """Return the cost of the numbers, variables and operations of an expression."""
    return NODE * complexity(expression) + _cost_of_numbers(expression) - _savings(expression)


def _savings(expression: sympy.Expr) -> float:
    """Return by how much irrational factors such as 1/√(2π) cost more than their place in the list of simple numbers."""
    saved = 0.0
    for product in expression.atoms(sympy.Mul):
        number = sympy.Mul(*[part for part in product.args if not part.free_symbols])
        factor, unit = number.as_coeff_Mul()
        listed = max(abs(factor.p), factor.q) <= 16 if factor.is_Rational else False
        if listed and unit != 1 and all(abs(n) <= 2 for n in unit.atoms(sympy.Integer)):
            saved += max(0.0, NODE * complexity(number) + _cost_of_numbers(number) - LISTED)
    return saved


def cost_of_constant(share: float, rows: int) -> float:
    """Return the cost of a constant to the precision of its estimate, error/√rows, beyond that of a simple number."""
    return max(0.5 * math.log(rows / max(share, EXACT)), 4.0) + NODE


def _cost_of_numbers(expression: sympy.Expr) -> float:
    """Return the further cost of integers above 3, of rational numbers and of powers of π."""
    cost = 0.0
    for number in expression.atoms(sympy.Rational):
        cost += 0.5 * math.log2(max(1, abs(number.p) // 3)) + (1.0 * math.log2(number.q) if number.q > 2 else 0.0)
    return cost + (1.0 if expression.has(sympy.pi) else 0.0)


def leave_one_out(matrix: Floats, goal: Floats) -> tuple[float, Floats]:
    """Return the squared error of least squares and its increase without each column; infinite for dependent columns.

    Example:
        >>> leave_one_out(np.eye(3)[:, :2], np.array([3.0, 4.0, 5.0]))
        (25.0, array([ 9., 16.]))
    """
    if len(matrix) < matrix.shape[1]:
        return math.inf, np.zeros(matrix.shape[1])
    sizes = np.linalg.norm(matrix, axis=0)
    basis, triangle = np.linalg.qr(matrix / np.where(sizes > 0, sizes, 1.0))
    if np.abs(np.diag(triangle)).min() < 1e-12:
        return math.inf, np.zeros(matrix.shape[1])
    inverse, explained = np.linalg.inv(triangle), basis.T @ goal
    rest = goal - basis @ explained
    return float(rest @ rest), (inverse @ explained) ** 2 / (inverse**2).sum(1)


def fit(rows: SearchRows, expression: sympy.Expr, start: Mapping[sympy.Symbol, float]) -> Fit | None:
    """Return an expression with the constants of least squares near a start, None without finite real values.

    Args:
        rows: the rows.
        expression: over the symbols of the rows and of the constants.
        start: start of each constant.
    """
    if expression.has(sympy.I):
        return None
    free = [symbol for symbol in start if expression.has(symbol)]
    values = np.array([start[symbol] for symbol in free], dtype=np.float64)
    known = rows.values()

    def residuals(at: Floats) -> Floats:
        return evaluate(expression, {**known, **dict(zip(free, at, strict=True))}) - rows.y

    with np.errstate(all="ignore"):
        error = np.broadcast_to(residuals(values), rows.y.shape)
        best = float(error @ error)
    if not math.isfinite(best):
        return None
    damping = 1e-4
    for _ in range(STEPS if free else 0):
        at = {**known, **dict(zip(free, values, strict=True))}
        matrix = np.stack([np.broadcast_to(slope(expression, at, symbol), rows.y.shape) for symbol in free], 1)
        if not np.isfinite(matrix).all():
            break
        scale = np.sqrt((matrix * matrix).sum(0))
        scale[scale == 0] = 1.0
        step, improved = None, False
        for _ in range(8):
            system = np.vstack([matrix / scale, math.sqrt(damping) * np.eye(len(free))])
            step = np.linalg.lstsq(system, np.concatenate([-error, np.zeros(len(free))]), rcond=1e-15)[0] / scale
            with np.errstate(all="ignore"):
                new = np.broadcast_to(residuals(values + step), rows.y.shape)
                total = float(new @ new)
            if total < best:
                improved = True
                break
            damping *= 10
        if not improved or step is None:
            break
        ratio, values, error, best = total / best, values + step, new, total
        damping = max(damping / 10, 1e-15)
        if ratio > 1 - 1e-6 or best <= EXACT * 1e-6 * rows.variance * len(error):
            break
    mse = best / len(rows.y)
    constants = {symbol: float(value) for symbol, value in zip(free, values, strict=True)}
    return Fit(expression, constants, mse, description_length(rows, mse, expression, len(free)))


def simple_numbers(value: float) -> Iterator[sympy.Expr]:
    """Yield simple numbers near a value, the simplest first: 0, integers, fractions, multiples of π, square roots.

    Example:
        >>> list(simple_numbers(0.3334))[:2], next(simple_numbers(6.28))
        ([0, 1/3], 0)
    """
    size = abs(value)
    seen: set[sympy.Expr] = set()
    candidates: list[sympy.Expr] = [sympy.Integer(0)]
    for denominator in range(1, MAX_DENOMINATOR + 1):
        numerator = round(value * denominator)
        if numerator and abs(numerator) <= 100:
            candidates.append(sympy.Rational(numerator, denominator))
    root2 = sympy.sqrt(2)
    for unit in (
        sympy.pi,
        1 / sympy.pi,
        root2,
        sympy.sqrt(sympy.pi),
        1 / sympy.sqrt(2 * sympy.pi),
        sympy.pi**2,
        1 / sympy.pi**2,
    ):
        nearby = Fraction(value / float(unit)).limit_denominator(8)
        if nearby and abs(nearby.numerator) <= 16:
            candidates.append(sympy.Rational(nearby.numerator, nearby.denominator) * unit)
    for number in candidates:
        near = number == 0 or abs(float(number) - value) <= 0.1 * size
        if near and number not in seen:
            seen.add(number)
            yield number


def simplify_constants(rows: SearchRows, best: Fit, clock: Stopwatch | None = None) -> Fit:
    """Return the fit with free constants replaced by simple numbers, one by one, where the description gets shorter.

    Args:
        rows: the rows.
        best: the fit.
        clock: at whose limit the replacements end; None for no limit.
    """
    changed = True
    while changed:
        changed = False
        constants = best.constants
        for symbol in sorted(constants, key=lambda c: _roundness(constants[c])):
            if clock is not None and clock.over():
                break
            for number in _nearby(constants[symbol]):
                trial = _replaced(rows, best, symbol, number)
                if trial is not None and trial.cost < best.cost:
                    best, changed = trial, True
                    break
            if changed:
                break
    return best


def _nearby(value: float) -> list[sympy.Expr]:
    """Return zero and the simplest and the nearest simple numbers."""
    zero, *others = simple_numbers(value)
    nearest = sorted(others, key=lambda n: abs(float(n) - value))[:2]
    return [zero, *others[:2], *(n for n in nearest if n not in others[:2])]


def _roundness(value: float) -> float:
    """Return the relative distance from an integer."""
    return abs(value - round(value)) / max(abs(value), 1e-300) if round(value) else abs(value)


def _replaced(rows: SearchRows, best: Fit, symbol: sympy.Symbol, number: sympy.Expr) -> Fit | None:
    """Return the fit of the other constants with a number in place of one."""
    expression: Any = best.expression.xreplace({symbol: number})
    if expression.has(sympy.nan, sympy.zoo, sympy.oo) or (number == 0 and not expression.free_symbols):
        return None
    start = {other: value for other, value in best.constants.items() if other != symbol}
    return fit(rows, expression, start)


def with_constants(expression: sympy.Expr, prefix: str = "c") -> tuple[sympy.Expr, dict[sympy.Symbol, float]]:
    """Return an expression with a symbol in place of each floating-point number, and their values."""
    numbers: Sequence[Any] = sorted(expression.atoms(sympy.Float), key=float)
    symbols = {number: sympy.Dummy(f"{prefix}{i}") for i, number in enumerate(numbers)}
    return expression.xreplace(symbols), {symbol: float(number) for number, symbol in symbols.items()}
