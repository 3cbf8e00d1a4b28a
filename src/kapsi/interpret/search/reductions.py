"""Tests of structure: a factor that is a power of an input, and inputs that act only through a sum, product or quotient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from kapsi.clock import Stopwatch
from kapsi.interpret.expressions import Floats
from kapsi.interpret.search.surrogate import Surrogate, surrogate

LOOSE = 0.3
"""Largest relative misfit of a test of slopes; the errors of polynomials decide."""
WORSE = 1.5
"""Factor by which the error of a polynomial of fewer inputs may exceed that of the polynomial before."""
SMALL = 1e-7
"""Error of a polynomial that is small enough in any case."""
EXPONENTS = (1, -1, 2, -2, 0.5, -0.5, 3, -3, 1.5, -1.5, 4, -4)
MAX_STEPS = 10
FEW = 3
"""Number of inputs up to which all guesses are tried."""
POOR, BETTER = 1e-3, 0.7
"""Error of a polynomial from which slopes mean little, and the factor by which a guessed reduction must lower the error."""

RIDGES: dict[str, tuple[Callable[[Any], Any], Callable[[Floats], Floats], Callable[[Any], Any]]] = {
    "product": (np.log, lambda x: 1 / x, sympy.log),
    "sum": (lambda x: x, np.ones_like, lambda x: x),
    "squares": (lambda x: x * x, lambda x: 2 * x, lambda x: x**2),
    "reciprocals": (lambda x: 1 / x, lambda x: -1 / (x * x), lambda x: 1 / x),
}
"""Functions h of inputs that act through h(xᵢ) + c h(xⱼ): values, slope, symbol."""


@dataclass(frozen=True)
class Reduced:
    """The same function of fewer inputs: y = factor · z(inputs).

    Attributes:
        inputs: expressions of the inputs.
        x: their values, (rows, inputs).
        factor: the factor.
        scale: its values, (rows,).
        z: y divided by the factor.
        model: a polynomial for z.
    """

    inputs: tuple[sympy.Expr, ...]
    x: Floats
    factor: sympy.Expr
    scale: Floats
    z: Floats
    model: Surrogate

    @property
    def error(self) -> float:
        """Mean squared error of the polynomial in units of y."""
        return float(self.model.error * self.z.var() * np.mean(self.scale**2))


def reduce(symbols: tuple[sympy.Symbol, ...], x: Floats, y: Floats, clock: Stopwatch | None = None) -> list[Reduced]:
    """Return the function itself and its reductions, each with one input less than the one before.

    Args:
        symbols: the inputs.
        x: (rows, inputs).
        y: (rows,).
        clock: at whose limit no further reduction is tried; None for no limit.
    """
    best = Reduced(tuple(symbols), x, sympy.Integer(1), np.ones(len(y)), y, surrogate(x, y))
    chain = [best]
    for _ in range(MAX_STEPS):
        if clock is not None and clock.over():
            break
        few, poor = len(best.inputs) <= FEW, best.model.error > POOR
        accepted = (None if poor else _tested(best)) or (_guessed(best) if poor or few else None)
        if accepted is None:
            break
        chain.append(accepted)
        best = accepted
    return chain


def _tested(now: Reduced) -> Reduced | None:
    """Return the reduction with the clearest slopes whose polynomial is as good as before."""
    for _, build in sorted(_proposals(now), key=lambda proposal: proposal[0])[:12]:
        trial = build()
        if trial is not None and trial.model.error <= max(WORSE * now.model.error, SMALL):
            return trial
    return None


def _guessed(now: Reduced) -> Reduced | None:
    """Return the reduction with the best polynomial, if it is clearly better than before."""
    proposed = [build for _, build in sorted(_proposals(now), key=lambda proposal: proposal[0])[:12]]
    trials = [trial for trial in (build() for build in (*_guesses(now), *proposed)) if trial is not None]
    best = min(trials, key=lambda trial: trial.model.error, default=None)
    return None if best is None or best.model.error > BETTER * now.model.error else best


def _proposals(now: Reduced) -> Iterator[tuple[float, Callable[[], Reduced | None]]]:
    """Yield misfit and construction of possible reductions."""
    slopes, values = now.model.gradients, now.model.values
    count = len(now.inputs)
    size = float(np.sqrt(np.mean(values**2)))
    for i in range(count):
        if count == 1 or not size:
            break
        elasticity = now.x[:, i] * slopes[:, i]
        for p in EXPONENTS:
            misfit = float(np.sqrt(np.mean((elasticity - p * values) ** 2))) / (abs(p) * size)
            if misfit < LOOSE:
                # Powers before ridges: they leave the fewest inputs.
                yield 0.5 * misfit, functools.partial(_factored, now, i, p)
    for (i, j), (name, (_, slope, _)) in itertools.product(itertools.combinations(range(count), 2), RIDGES.items()):
        if name in ("product", "reciprocals") and not (now.x[:, [i, j]] != 0).all():
            continue
        u, v = slopes[:, i] / slope(now.x[:, i]), slopes[:, j] / slope(now.x[:, j])
        ratio = _ratio(u, v)
        if ratio is None:
            continue
        misfit, c = ratio
        if misfit < LOOSE:
            yield misfit, functools.partial(_joined, now, i, j, c, name)


def _guesses(now: Reduced) -> Iterator[Callable[[], Reduced | None]]:
    """Yield factors and pairs of inputs without a test of slopes."""
    count = len(now.inputs)
    for i in range(count if count > 1 else 0):
        if (now.x[:, i] != 0).all():
            yield from (functools.partial(_factored, now, i, p) for p in (1, -1))
    for i, j in itertools.combinations(range(count), 2):
        yield from (functools.partial(_joined, now, i, j, c, "sum") for c in (1.0, -1.0))
        if (now.x[:, [i, j]] != 0).all():
            yield from (functools.partial(_joined, now, i, j, c, "product") for c in (1.0, -1.0))


def _ratio(u: Floats, v: Floats) -> tuple[float, float] | None:
    """Return misfit and c of v = c u, c from the principal direction."""
    matrix = np.stack([u, v])
    scale = np.sqrt((matrix**2).mean(1))
    if not np.isfinite(scale).all() or not (scale > 0).all():
        return None
    values, vectors = np.linalg.eigh(matrix @ matrix.T / len(u) / np.outer(scale, scale))
    direction = vectors[:, 1] * scale
    return float(np.sqrt(max(values[0], 0) / values[1])), float(direction[1] / direction[0])


def _factored(now: Reduced, i: int, p: float) -> Reduced | None:
    """Return z divided by a power of input i."""
    if p % 1 and (now.x[:, i] <= 0).any():
        return None
    with np.errstate(all="ignore"):
        power = now.x[:, i] ** float(p)
        z = now.z / power
    if not np.isfinite(z).all():
        return None
    rest = [k for k in range(len(now.inputs)) if k != i]
    factor = now.factor * now.inputs[i] ** sympy.nsimplify(p)
    x = now.x[:, rest]
    return Reduced(tuple(now.inputs[k] for k in rest), x, factor, now.scale * power, z, surrogate(x, z))


def _joined(now: Reduced, i: int, j: int, c: float, name: str) -> Reduced | None:
    """Return the function with h(xᵢ) + c h(xⱼ) in place of inputs i and j."""
    function, _, symbol = RIDGES[name]
    ratio = _simple_ratio(c)
    a, b = now.inputs[i], now.inputs[j]
    with np.errstate(all="ignore"):
        if name == "product":
            if ratio is None:
                return None
            p, q = (1 / ratio, sympy.Integer(1)) if abs(ratio) < 1 else (sympy.Integer(1), ratio)
            expression = a**p * b**q
            values = now.x[:, i] ** float(p) * now.x[:, j] ** float(q)
        else:
            weight = sympy.Float(c) if ratio is None else ratio
            expression = symbol(a) + weight * symbol(b)
            values = function(now.x[:, i]) + float(weight) * function(now.x[:, j])
            if name == "squares" and weight > 0:
                # A norm, so that a third square may join.
                expression, values = sympy.sqrt(expression), np.sqrt(values)
    if not np.isfinite(values).all() or values.std() < 1e-9 * np.abs(values).max():
        return None
    rest = [k for k in range(len(now.inputs)) if k not in (i, j)]
    x = np.column_stack([now.x[:, rest], values])
    inputs = (*(now.inputs[k] for k in rest), expression)
    return Reduced(inputs, x, now.factor, now.scale, now.z, surrogate(x, now.z))


def _simple_ratio(c: float) -> sympy.Rational | None:
    """Return a simple rational near c, None without one."""
    for number in map(
        sympy.Rational, (1, -1, 2, -2, "1/2", "-1/2", 3, -3, "1/3", "-1/3", "3/2", "-3/2", "2/3", "-2/3")
    ):
        if abs(float(number) - c) <= 0.06 * abs(float(number)):
            return number
    return None
