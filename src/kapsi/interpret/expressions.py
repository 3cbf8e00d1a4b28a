"""Values, sizes and text of sympy expressions, without `lambdify`, which compiles Python text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy

from kapsi.errors import FormulaError

STEP = 1e-100
"""Imaginary step; no difference is formed, so that it may be tiny."""

Floats = npt.NDArray[np.float64]

_ELEMENTWISE: dict[Any, Callable[..., Any]] = {
    sympy.exp: np.exp,
    sympy.log: np.log,
    sympy.sin: np.sin,
    sympy.cos: np.cos,
    sympy.tan: np.tan,
    sympy.cot: lambda x: 1 / np.tan(x),
    sympy.sec: lambda x: 1 / np.cos(x),
    sympy.csc: lambda x: 1 / np.sin(x),
    sympy.coth: lambda x: 1 / np.tanh(x),
    sympy.sech: lambda x: 1 / np.cosh(x),
    sympy.csch: lambda x: 1 / np.sinh(x),
    sympy.asin: np.arcsin,
    sympy.acos: np.arccos,
    sympy.atan: np.arctan,
    sympy.sinh: np.sinh,
    sympy.cosh: np.cosh,
    sympy.tanh: np.tanh,
    sympy.asinh: np.arcsinh,
    sympy.acosh: np.arccosh,
    sympy.atanh: np.arctanh,
    sympy.Abs: lambda x: np.where(np.real(x) < 0, -x, x),
    sympy.sign: np.sign,
    sympy.floor: np.floor,
    sympy.erf: lambda x: _special("erf", x),
    sympy.LessThan: np.less_equal,
    sympy.GreaterThan: np.greater_equal,
    sympy.StrictLessThan: np.less,
    sympy.StrictGreaterThan: np.greater,
    sympy.Equality: np.equal,
    sympy.Unequality: np.not_equal,
    sympy.And: lambda *parts: np.logical_and.reduce(np.broadcast_arrays(*parts)),
    sympy.Or: lambda *parts: np.logical_or.reduce(np.broadcast_arrays(*parts)),
    sympy.Not: np.logical_not,
    sympy.Max: lambda *parts: np.maximum.reduce(np.broadcast_arrays(*parts)),
    sympy.Min: lambda *parts: np.minimum.reduce(np.broadcast_arrays(*parts)),
}


def _special(name: str, x: Any) -> Any:
    import scipy.special

    return getattr(scipy.special, name)(x)


def evaluate(expression: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> Floats:
    """Return the values of an expression in float64; NaN or infinite outside its domain.

    Args:
        expression: of sums, products, powers, elementary functions, `Piecewise`, comparisons, minimum and maximum.
        values: an array or number for each symbol; all shapes must broadcast.

    Raises:
        FormulaError: a symbol without values, or another function.

    Example:
        >>> x = sympy.Symbol("x")
        >>> evaluate(sympy.sqrt(x) + 1, {x: np.array([4.0, 9.0])})
        array([3., 4.])
    """
    known: dict[Any, Any] = {symbol: np.asarray(value, dtype=np.float64) for symbol, value in values.items()}
    with np.errstate(all="ignore"):
        return np.asarray(_value(expression, known), dtype=np.float64)


def slope(expression: sympy.Basic, values: Mapping[sympy.Symbol, Any], symbol: sympy.Symbol) -> Floats:
    """Return the derivative by a symbol with a number, by a complex step: exact to rounding, without symbolic work.

    Args:
        expression: as for `evaluate`, without comparisons of the symbol.
        values: as for `evaluate`.
        symbol: a symbol with a single number as value.

    Example:
        >>> x, c = sympy.symbols("x c")
        >>> slope(sympy.exp(c * x), {x: np.array([0.0, 1.0]), c: 0.0}, c)
        array([0., 1.])
    """
    known: dict[Any, Any] = {**values, symbol: np.complex128(complex(float(values[symbol]), STEP))}
    with np.errstate(all="ignore"):
        return np.asarray(np.imag(_value(expression, known)) / STEP, dtype=np.float64)


def _value(node: Any, known: dict[Any, Any]) -> Any:
    if node in known:
        return known[node]
    if node.is_Number or node.is_NumberSymbol:
        return float(node)
    if node is sympy.true or node is sympy.false:
        return node is sympy.true
    if node.is_Add:
        value = 0.0
        for part in node.args:
            value = value + _value(part, known)
    elif node.is_Mul:
        value = 1.0
        for part in node.args:
            value = value * _value(part, known)
    elif node.is_Pow:
        value = _power(_value(node.base, known), node.exp, known)
    elif isinstance(node, sympy.Piecewise):
        value = _piecewise(node, known)
    elif node.func in _ELEMENTWISE:
        value = _ELEMENTWISE[node.func](*[_value(part, known) for part in node.args])
    elif node.is_Symbol:
        raise FormulaError(f"formula: no values for {node.name!r}; give a value for each of its columns")
    else:
        raise FormulaError(f"formula: {node.func.__name__} has no numeric form; expected elementary functions")
    known[node] = value
    return value


def _power(base: Any, exponent: Any, known: dict[Any, Any]) -> Any:
    if exponent == sympy.Rational(1, 2):
        return np.sqrt(base)
    if exponent == sympy.Rational(-1, 2):
        return 1.0 / np.sqrt(base)
    if exponent.is_Integer and abs(int(exponent)) < 100:
        return 1.0 / np.power(base, -int(exponent)) if exponent < 0 else np.power(base, int(exponent))
    return np.power(base, _value(exponent, known))


def _piecewise(node: Any, known: dict[Any, Any]) -> Any:
    """Return the first branch with a true condition, NaN without one."""
    result: Any = np.nan
    for branch, condition in reversed(node.args):
        result = np.where(_value(condition, known), _value(branch, known), result)
    return result


def complexity(expression: sympy.Basic) -> int:
    """Return the number of numbers, variables and operations of an expression; a quotient or difference is one operation.

    Example:
        >>> x = sympy.Symbol("x")
        >>> complexity(x), complexity(2 * x + 1), complexity(1 / x), complexity(sympy.exp(-x))
        (1, 5, 3, 3)
    """
    if not expression.args:
        return 1
    if expression.is_Rational and not expression.is_Integer:
        return 3
    if expression.is_Add:
        return sum(complexity(-part if part.could_extract_minus_sign() else part) + 1 for part in expression.args) - 1
    if expression.is_Mul:
        first = expression.args[0]
        if first.is_Rational and not first.is_Integer:
            # A quotient by q, and a factor p.
            rest = sympy.Mul(*expression.args[1:])
            return complexity(rest) + 2 + (2 if abs(first.p) > 1 else 0) + (1 if first.p == -1 else 0)
        parts = [part for part in expression.args if part != -1]
        inverse = [1 for part in parts if part.is_Pow and part.exp == -1]
        # The 1 of 1/x is a number; the quotient x/y has none.
        size = sum(complexity(part) - (2 if part.is_Pow and part.exp == -1 else 0) for part in parts) + len(parts) - 1
        return size + (len(parts) < len(expression.args)) + (2 if len(inverse) == len(parts) else 0)
    if expression.is_Pow:
        if expression.exp == sympy.Rational(1, 2):
            return complexity(expression.base) + 1
        if expression.exp == sympy.Rational(-1, 2):
            return complexity(expression.base) + 3
        return complexity(expression.base) + 2 if expression.exp == -1 else sum(map(complexity, expression.args)) + 1
    return 1 + sum(map(complexity, expression.args))
