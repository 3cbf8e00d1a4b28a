"""Candidate terms of a formula: elementary functions of inputs, of their sums, differences, products and quotients, and products
of these.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from kapsi.interpret.expressions import Floats

MAX_TERMS = 12000
"""Largest number of candidate terms."""
MAX_MONOMIALS = 40
"""Largest number of monomials of a polynomial."""
HALF = sympy.Rational(1, 2)

Unary = tuple[str, float, Callable[[Any], Any], Callable[[Any], Any]]
"""Name, cost, NumPy function and sympy function."""

_POWERS: tuple[Unary, ...] = (
    ("x", 1, lambda v: v, lambda v: v),
    ("1/x", 2, lambda v: 1 / v, lambda v: 1 / v),
    ("x^2", 2, lambda v: v**2, lambda v: v**2),
    ("sqrt", 2, np.sqrt, sympy.sqrt),
    ("1/x^2", 3, lambda v: v**-2.0, lambda v: v**-2),
    ("x^3", 3, lambda v: v**3, lambda v: v**3),
    ("1/sqrt", 3, lambda v: 1 / np.sqrt(v), lambda v: 1 / sympy.sqrt(v)),
    ("x^4", 4, lambda v: v**4, lambda v: v**4),
    ("1/x^3", 4, lambda v: v**-3.0, lambda v: v**-3),
    ("x^1.5", 4, lambda v: v**1.5, lambda v: v ** sympy.Rational(3, 2)),
)
_WAVES: tuple[Unary, ...] = (
    ("sin", 2, np.sin, sympy.sin),
    ("cos", 2, np.cos, sympy.cos),
    ("exp", 2, np.exp, sympy.exp),
    ("log", 2, np.log, sympy.log),
    ("exp-", 3, lambda v: np.exp(-v), lambda v: sympy.exp(-v)),
)
_FURTHER: tuple[Unary, ...] = (
    ("tanh", 2, np.tanh, sympy.tanh),
    ("sinh", 2, np.sinh, sympy.sinh),
    ("cosh", 2, np.cosh, sympy.cosh),
    ("tan", 2, np.tan, sympy.tan),
    ("asin", 2, np.arcsin, sympy.asin),
    ("acos", 2, np.arccos, sympy.acos),
    ("atan", 2, np.arctan, sympy.atan),
    ("asinh", 2, np.arcsinh, sympy.asinh),
    ("acosh", 2, np.arccosh, sympy.acosh),
    ("atanh", 2, np.arctanh, sympy.atanh),
    ("abs", 2, np.abs, sympy.Abs),
    ("gauss", 4, lambda v: np.exp(-(v**2)), lambda v: sympy.exp(-(v**2))),
    ("sin^2", 4, lambda v: np.sin(v) ** 2, lambda v: sympy.sin(v) ** 2),
    ("cos^2", 4, lambda v: np.cos(v) ** 2, lambda v: sympy.cos(v) ** 2),
    ("1+x", 5, lambda v: 1 / (1 + v), lambda v: 1 / (1 + v)),
    ("1-x", 5, lambda v: 1 / (1 - v), lambda v: 1 / (1 - v)),
    ("1+x2", 5, lambda v: 1 / (1 + v**2), lambda v: 1 / (1 + v**2)),
    ("1-x2", 5, lambda v: 1 / (1 - v**2), lambda v: 1 / (1 - v**2)),
    ("r1-x2", 5, lambda v: np.sqrt(1 - v**2), lambda v: sympy.sqrt(1 - v**2)),
    ("r1+x2", 5, lambda v: np.sqrt(1 + v**2), lambda v: sympy.sqrt(1 + v**2)),
    ("1/r1-x2", 6, lambda v: 1 / np.sqrt(1 - v**2), lambda v: 1 / sympy.sqrt(1 - v**2)),
    ("1/r1+x2", 6, lambda v: 1 / np.sqrt(1 + v**2), lambda v: 1 / sympy.sqrt(1 + v**2)),
    ("1/expm1", 5, lambda v: 1 / np.expm1(v), lambda v: 1 / (sympy.exp(v) - 1)),
    ("1/exp1", 5, lambda v: 1 / (np.exp(v) + 1), lambda v: 1 / (sympy.exp(v) + 1)),
    ("exp1/x", 4, lambda v: np.exp(-1 / v), lambda v: sympy.exp(-1 / v)),
)
_PLAIN = ("x", "1/x", "x^2", "1/x^2", "x^3", "sin", "cos")
SCALES: tuple[sympy.Expr, ...] = (HALF, *map(sympy.Integer, (2, 3, 4, 5, 6, 8)), sympy.pi, 2 * sympy.pi)
"""Factors of the arguments of waves and exponentials of one input."""


@dataclass(frozen=True)
class Term:
    """A candidate term with its values on the rows; plain for integer powers, waves, and products."""

    cost: float
    values: Floats
    expression: Callable[[], sympy.Expr]
    plain: bool = False
    wave: bool = False


def _usable(values: Floats) -> bool:
    """Return whether values are finite, moderate and not constant."""
    size = np.abs(values)
    low, high = values.min(), values.max()
    return bool(np.isfinite(values).all()) and float(size.max()) < 1e8 and float(high - low) > 1e-9 * float(size.max())


def unaries(expression: sympy.Expr, values: Floats, cost: float, kinds: Sequence[Unary]) -> Iterator[Term]:
    """Yield elementary functions of an expression."""
    # Powers of sums are no new terms of a quotient.
    plain = _PLAIN[5:] if expression.is_Add else _PLAIN
    with np.errstate(all="ignore"):
        for name, more, function, symbolic in kinds:
            result = function(values)
            if _usable(result):
                yield Term(
                    cost + more - 1, result, functools.partial(symbolic, expression), name in plain, name in _PLAIN[5:]
                )


def _product(terms: Sequence[Term]) -> Term | None:
    values = np.prod([term.values for term in terms], axis=0)
    if not _usable(values):
        return None
    return Term(
        sum(term.cost for term in terms) + len(terms) - 1,
        values,
        lambda: sympy.Mul(*[term.expression() for term in terms]),
        all(term.plain for term in terms),
        any(term.wave for term in terms),
    )


def _scaled(expression: sympy.Expr, values: Floats) -> Iterator[Term]:
    """Yield waves and exponentials of multiples of an expression."""
    for scale in SCALES:
        kinds = _WAVES[:2] if scale.has(sympy.pi) else (*_WAVES[:3], _WAVES[4])
        yield from unaries(scale * expression, float(scale) * values, 3, kinds)


def _pairs(inputs: Sequence[tuple[sympy.Expr, Floats]]) -> Iterator[tuple[sympy.Expr, Floats, float]]:
    """Yield sums, differences, products and quotients of two inputs."""
    with np.errstate(all="ignore"):
        for (a, u), (b, v) in itertools.combinations(inputs, 2):
            for expression, values in ((a * b, u * v), (a / b, u / v), (b / a, v / u), (a - b, u - v), (a + b, u + v)):
                if _usable(values):
                    yield expression, values, 3.0


def candidate_terms(inputs: Sequence[tuple[sympy.Expr, Floats]]) -> list[Term]:
    """Return terms of some inputs, the cheapest first, without repeated values.

    Args:
        inputs: expression and values of each input.
    """
    count = len(inputs)
    every = (*_POWERS, *_WAVES, *_FURTHER)
    terms: list[Term] = []
    if count == 1:
        terms += _of_one(*inputs[0])
    else:
        kinds = (
            (*_POWERS[:7], *_WAVES)
            if count <= 3
            else (*_POWERS[:5], *_WAVES[:4])
            if count == 4
            else (*_POWERS[:4], *_WAVES[:2])
        )
        kinds = kinds if count <= 5 else _POWERS[: 3 if count == 6 else 2]
        single = [list(unaries(expression, values, 1, kinds)) for expression, values in inputs]
        wide: list[list[Term]] = []
        for expression, values in inputs:
            wide.append(list(unaries(expression, values, 1, every)))
            if count <= 4:
                wide[-1] += [*_scaled(expression, values), *unaries(expression**2, values**2, 2, _WAVES[:2])]
            terms += wide[-1]
        if count <= 3:
            terms += _wide_products(wide, single)
        pairs = [list(unaries(e, v, c, every if count <= 4 else (*_POWERS[:4], *_WAVES))) for e, v, c in _pairs(inputs)]
        terms += itertools.chain(*pairs)
        terms += _products(single)
        if count <= 5:
            powers = {2: (*_POWERS[:4], _POWERS[5])}.get(count, _POWERS[: 3 if count == 3 else 1])
            plain = [t for (e, v) in inputs for t in unaries(e, v, 1, powers)]
            if count >= 3:
                plain += [p for p in map(_product, itertools.combinations(plain, 2)) if p is not None and p.cost <= 3]
            for term in itertools.chain(*pairs):
                if term.cost <= 8 and len(terms) < 4 * MAX_TERMS:
                    terms += [p for p in (_product((term, other)) for other in plain) if p is not None]
    return _distinct(sorted(terms, key=lambda term: term.cost))[:MAX_TERMS]


def monomials(inputs: Sequence[tuple[sympy.Expr, Floats]]) -> list[list[Term]]:
    """Return the monomials up to each degree from 2 to 6, at most 40."""
    found: list[list[Term]] = []
    for degree in range(2, 7):
        if math.comb(len(inputs) + degree, degree) > MAX_MONOMIALS:
            break
        powers = [p for p in itertools.product(range(degree + 1), repeat=len(inputs)) if 1 <= sum(p) <= degree]
        found.append([_monomial(inputs, p) for p in powers])
    return found


def _monomial(inputs: Sequence[tuple[sympy.Expr, Floats]], powers: Sequence[int]) -> Term:
    factors = [(e, v, p) for (e, v), p in zip(inputs, powers, strict=True) if p]
    return Term(
        sum(p for _, _, p in factors) + len(factors) - 1,
        np.prod([v**p for _, v, p in factors], axis=0),
        lambda: sympy.Mul(*[e**p for e, _, p in factors]),
        True,
    )


def _of_one(expression: sympy.Expr, values: Floats) -> list[Term]:
    """Return functions of one input, their compositions and products of two."""
    every = (*_POWERS, *_WAVES, *_FURTHER)
    base = list(unaries(expression, values, 1, every))
    squared = list(unaries(expression**2, values**2, 2, _WAVES[:2]))
    scaled = list(_scaled(expression, values))
    nested = [
        nest
        for term in [*base[:12], *base[10:20]]
        for nest in unaries(term.expression(), term.values, term.cost, (*_POWERS[:4], *_WAVES, *_FURTHER[:10]))
    ]
    products = [p for p in map(_product, itertools.combinations([*base, *squared, *scaled], 2)) if p is not None]
    return [*base, *scaled, *nested, *products]


def _wide_products(wide: Sequence[Sequence[Term]], single: Sequence[Sequence[Term]]) -> Iterator[Term]:
    """Yield products of any function of one input, and a function of another input: any one for two inputs, else a simple one."""
    for i, j in itertools.permutations(range(len(wide)), 2):
        if len(wide) == 2 and i > j:
            return
        others = wide[j] if len(wide) == 2 else [term for term in single[j] if term.cost <= 2]
        for pair in itertools.product(wide[i], others):
            if pair[0].cost + pair[1].cost <= 8:
                product = _product(pair)
                if product is not None:
                    yield product


def _products(single: Sequence[Sequence[Term]]) -> Iterator[Term]:
    """Yield products of one term each of two or more inputs, at most 20,000."""
    left = 20_000
    for size in range(2, len(single) + 1):
        for chosen in itertools.combinations(single, size):
            for terms in itertools.product(*chosen):
                # Several waves in a product of many inputs are rare.
                if size > 2 and sum(term.cost for term in terms) > 2 * size + 1:
                    continue
                product = _product(terms)
                left -= 1
                if left < 0:
                    return
                if product is not None:
                    yield product


def _distinct(terms: Sequence[Term]) -> list[Term]:
    """Return the terms without multiples of earlier terms."""
    seen: set[bytes] = set()
    kept: list[Term] = []
    for term in terms:
        centered = term.values - term.values.mean()
        largest = int(np.abs(centered).argmax())
        key = np.round(centered[:12] / centered[largest], 7).astype(np.float32).tobytes()
        if key not in seen:
            seen.add(key)
            kept.append(term)
    return kept
