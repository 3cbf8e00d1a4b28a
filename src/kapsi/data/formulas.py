"""Formulas as text, such as `exp(x)*sin(y/2)`: a closed grammar with its own parser, never run as Python.

    sum     = product {("+" | "-") product}
    product = signed {("*" | "/") signed}
    signed  = ("-" | "~" | "+") signed | power
    power   = atom [("**" | "^") signed]
    atom    = number | pi | variable | function "(" sum ")" | "(" sum ")"

As in Python, `-x**2` is -(x²), `2**3**2` is 2^9, and `a/b/c` is (a/b)/c. `~` is the minus sign of the AI Feynman tables.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.errors import FormulaError, nearest

if TYPE_CHECKING:
    import sympy
    import torch

__all__ = ["FUNCTIONS", "Formula", "Step", "parse"]

Floats: TypeAlias = npt.NDArray[np.float64]
Kind: TypeAlias = Literal["number", "constant", "variable", "operator", "function"]

MAX_LENGTH = 4096  # characters
MAX_DEPTH = 40  # nested signs, powers and parentheses; sympy's printer recurses, too
MAX_EXACT_BITS = 14_000  # of numbers computed by sympy; the longest that Python prints

# Name in formulas: (name in numpy and torch, name in sympy).
FUNCTIONS: Mapping[str, tuple[str, str]] = {
    "exp": ("exp", "exp"),
    "ln": ("log", "log"),
    "log": ("log", "log"),
    "sqrt": ("sqrt", "sqrt"),
    "sin": ("sin", "sin"),
    "cos": ("cos", "cos"),
    "tan": ("tan", "tan"),
    "arcsin": ("arcsin", "asin"),
    "arccos": ("arccos", "acos"),
    "arctan": ("arctan", "atan"),
    "sinh": ("sinh", "sinh"),
    "cosh": ("cosh", "cosh"),
    "tanh": ("tanh", "tanh"),
    "arcsinh": ("arcsinh", "asinh"),
    "arccosh": ("arccosh", "acosh"),
    "arctanh": ("arctanh", "atanh"),
    "abs": ("abs", "Abs"),
}
CONSTANTS: Mapping[str, float] = {"pi": math.pi}
NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
TOKEN = re.compile(rf"\s*(?:(?P<number>{NUMBER})|(?P<name>[^\W\d]\w*)|(?P<mark>\*\*|[-+*/^~()]))")
NAME = re.compile(r"[^\W\d]\w*")
END = "the end"
OPERAND = "a number, a variable, a function or '('"


@dataclass(frozen=True)
class Step:
    """A step of a formula in postfix order: pop the operands from a stack, push the result.

    Args:
        kind: "number", "constant", "variable", "operator" or "function".
        text: the number as written, the name, or one of `+ - * / **` and `neg`.
        operands: number of operands.
        constant: the value of a part without variables, else None.
    """

    kind: Kind
    text: str
    operands: int
    constant: float | None


@dataclass(frozen=True)
class Formula:
    """A parsed formula.

    Args:
        text: the formula as given.
        variables: declared names, in the order of the columns in `evaluate`.
        steps: steps in postfix order.

    Example:
        >>> formula = parse("-x**2 + 2*y", ["x", "y"])
        >>> formula.evaluate([[3.0, 1.0], [1.0, 4.0]])
        array([-7.,  7.])
        >>> formula.expression
        -x**2 + 2*y
        >>> formula.latex
        '- x^{2} + 2 y'
    """

    text: str
    variables: tuple[str, ...]
    steps: tuple[Step, ...] = field(repr=False)

    def evaluate(self, x: npt.ArrayLike) -> Floats:
        """Return the values of the formula; NaN or infinite outside its domain.

        Args:
            x: (..., variables) numbers.

        Returns:
            (...) float64.

        Raises:
            FormulaError: x does not have one column per variable.
        """
        try:
            array = np.asarray(x)
            # NumPy would convert dates and texts, and drop imaginary parts.
            columns = array.astype(np.float64) if array.dtype.kind in "biufO" else None
        except (TypeError, ValueError, OverflowError):
            columns = None
        if columns is None:
            raise FormulaError(f"formula {quoted(self.text)}: the values are not a rectangle of real float64 numbers")
        self._check_columns(columns.shape)
        with np.errstate(all="ignore"):
            value = self._run({name: columns[..., i] for i, name in enumerate(self.variables)}, np)
        return np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), columns.shape[:-1]))

    def evaluate_torch(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the formula as a differentiable tensor of x's dtype and device.

        Args:
            x: (..., variables), floating-point.

        Returns:
            (...).

        Raises:
            FormulaError: x is no floating-point tensor, or does not have one column per variable.
        """
        import torch

        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise FormulaError(
                f"formula {quoted(self.text)}: the values are of the type {kind}; give a floating-point tensor"
            )
        self._check_columns(tuple(x.shape))
        value = self._run({name: x[..., i] for i, name in enumerate(self.variables)}, torch)
        return value if isinstance(value, torch.Tensor) else x.new_full(x.shape[:-1], value)

    @functools.cached_property
    def expression(self) -> sympy.Expr:
        """The sympy expression over real symbols, with exact integers.

        Sympy simplifies the expression automatically, unless the result could have numbers of thousands of digits, as
        for (7*x)**10**9: such a formula stays as written, with floating-point numbers.
        """
        import sympy

        exact = _is_tame(self.steps)
        stack: list[Any] = []
        for step in self.steps:
            stack.append(_symbolic(step, _pop(stack, step.operands), exact, sympy))
        result: sympy.Expr = stack[0]
        return result

    @property
    def latex(self) -> str:
        """The formula as LaTeX, without dollar signs."""
        import sympy

        return str(sympy.latex(self.expression, ln_notation=True))

    def _check_columns(self, shape: tuple[int, ...]) -> None:
        if not shape or shape[-1] != len(self.variables):
            raise FormulaError(
                f"formula {quoted(self.text)}: values of shape {tuple(shape)} do not fit; the last size must be "
                f"{len(self.variables)}, one column for each of {', '.join(self.variables) or 'no variables'}"
            )

    def _run(self, values: Mapping[str, Any], library: Any) -> Any:
        """Evaluate the steps with numpy or torch; parts without a variable are plain floats."""
        stack: list[Any] = []
        for step in self.steps:
            operands = _pop(stack, step.operands)
            if step.constant is not None:
                stack.append(step.constant)
            elif step.kind == "variable":
                stack.append(values[step.text])
            elif step.kind == "function":
                stack.append(getattr(library, FUNCTIONS[step.text][0])(*operands))
            else:
                stack.append(OPERATORS[step.text](*operands))
        return stack[0]


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "**": lambda a, b: a**b,
    "neg": lambda a: -a,
}


def parse(text: str, variables: Iterable[str]) -> Formula:
    """Parse a formula.

    Args:
        text: formula of `+ - * / ** ^ ( )`, numbers, pi, the functions exp, ln and log (both natural), sqrt, sin, cos, tan,
            arcsin, arccos, arctan, sinh, cosh, tanh, arcsinh, arccosh, arctanh, abs, and the variables.
        variables: allowed names; a variable may be named pi, but not like a function.

    Raises:
        FormulaError: the text or a name does not fit; the message names the column.

    Example:
        >>> parse("2*E_n/I", ["E_n", "I"]).evaluate([[3.0, 2.0]])
        array([3.])
        >>> parse("2*(x+", ["x"])
        Traceback (most recent call last):
            ...
        kapsi.errors.FormulaError: formula '2*(x+', column 6: found the end, expected a number, a variable, a function or '('
    """
    if not isinstance(text, str):
        raise FormulaError(f"a formula is text, not {type(text).__name__}")
    names = check_names(variables)
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"formula {quoted(text)}: {len(text):,} characters; there may be {MAX_LENGTH:,}")
    return Formula(text, names, tuple(_Parser(text, names).read()))


def check_names(variables: Iterable[str]) -> tuple[str, ...]:
    """Return the names of variables as a tuple.

    Raises:
        FormulaError: a name is no identifier, the name of a function, or repeated.
    """
    names = tuple(variables) if isinstance(variables, Iterable) else (variables,)
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise FormulaError(f"variable {quoted(str(name))}: a name has letters, digits and _, a letter or _ first")
        if name in FUNCTIONS:
            raise FormulaError(f"variable {name}: this is the name of a function; choose another name")
        if names.count(name) > 1:
            raise FormulaError(f"variable {name}: declared twice; declare each name once")
    return names


def quoted(text: str) -> str:
    """Return the repr of a text, at most 80 characters."""
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:60]}...{shown[-10:]}"


def _pop(stack: list[Any], count: int) -> list[Any]:
    popped = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return popped


# ---------------------------------------------------------------- parsing


@dataclass(frozen=True)
class _Token:
    kind: str  # number, name, mark or end
    text: str
    column: int  # from 1


class _Parser:
    """Recursive descent; emits the steps in postfix order, so that evaluation needs no recursion."""

    def __init__(self, text: str, variables: Sequence[str]) -> None:
        self.text = text
        self.variables = frozenset(variables)
        self.order = tuple(variables)
        self.tokens = self._tokens()
        self.at = 0
        self.depth = 0
        self.steps: list[Step] = []
        self.constants: list[float | None] = []  # stack of the values of parts without a variable

    def read(self) -> list[Step]:
        self._sum()
        if self.token.kind != "end":
            self._unexpected("an operator or the end" if self.token.text != ")" else "the end, since no '(' is open")
        return self.steps

    # tokens

    def _tokens(self) -> list[_Token]:
        tokens, position = [], 0
        while self.text[position:].strip():
            match = TOKEN.match(self.text, position)
            if match is None:
                position += len(self.text[position:]) - len(self.text[position:].lstrip())
                raise self._error(
                    position + 1,
                    f"found {self.text[position]!r}; allowed are numbers, names and + - * / ** ^ ( )",
                )
            kind = match.lastgroup or "mark"
            text = match[kind]
            tokens.append(_Token(kind, "**" if text == "^" else text, match.start(kind) + 1))
            position = match.end()
        return [*tokens, _Token("end", END, len(self.text.rstrip()) + 1)]

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def _next(self) -> _Token:
        token = self.token
        self.at += 1
        return token

    def _is(self, *marks: str) -> bool:
        return self.token.kind == "mark" and self.token.text in marks

    # errors

    def _error(self, column: int, text: str) -> FormulaError:
        return FormulaError(f"formula {quoted(self.text)}, column {column}: {text}")

    def _unexpected(self, expected: str) -> None:
        token = self.token
        found = END if token.kind == "end" else repr(token.text)
        before = self.tokens[self.at - 1] if self.at else None
        # 2x, x y and x(y+1) mean products to a reader.
        product = token.kind in ("name", "number") or token.text == "("
        hint = ""
        if before is not None and before.text in FUNCTIONS:
            product = False
        if product and before is not None and (before.kind in ("name", "number") or before.text == ")"):
            hint = f"; for a product write {before.text if before.text != ')' else '(…)'}*{token.text}"
        raise self._error(token.column, f"found {found}, expected {expected}{hint}")

    def _unknown(self, token: _Token) -> FormulaError:
        known = [*self.order, *CONSTANTS, *FUNCTIONS]
        arc = f"arc{token.text[1:]}"  # asin, acosh
        close = [arc] if token.text[0] == "a" and arc in FUNCTIONS else nearest(token.text, known)
        hint = f"did you mean {close[0]}? " if close else ""
        if token.text == "e":
            hint = "Euler's number is exp(1); "
        variables = f"the variables are {', '.join(self.order)}" if self.order else "no variables are declared"
        return self._error(
            token.column,
            f"there is no {quoted(token.text)}; {hint}{variables}; there are also pi, {', '.join(FUNCTIONS)}",
        )

    # grammar

    def _sum(self) -> None:
        self._product()
        while self._is("+", "-"):
            operator = self._next()
            self._product()
            self._emit("operator", operator, 2)

    def _product(self) -> None:
        self._signed()
        while self._is("*", "/"):
            operator = self._next()
            self._signed()
            self._emit("operator", operator, 2)

    def _signed(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(
                self.token.column,
                f"more than {MAX_DEPTH} nested signs, powers and parentheses; write the formula flatter",
            )
        if self._is("-", "~", "+"):
            sign = self._next()
            self._signed()
            if sign.text != "+":
                self._emit("operator", _Token("mark", "neg", sign.column), 1)
        else:
            self._power()
        self.depth -= 1

    def _power(self) -> None:
        self._atom()
        if self._is("**"):
            operator = self._next()
            self._signed()
            self._emit("operator", operator, 2)

    def _atom(self) -> None:
        if self._is("("):
            self._parentheses(self._next())
            return
        token = self.token
        if token.kind == "number":
            self._emit("number", self._next(), 0)
        elif token.kind == "name":
            self._name(self._next())
        else:
            self._unexpected(OPERAND)

    def _name(self, token: _Token) -> None:
        if token.text in self.variables:
            self._emit("variable", token, 0)
        elif token.text in CONSTANTS:
            self._emit("constant", token, 0)
        elif token.text in FUNCTIONS:
            if not self._is("("):
                self._unexpected(f"'(' after {token.text}")
            self._parentheses(self._next())
            self._emit("function", token, 1)
        else:
            raise self._unknown(token)

    def _parentheses(self, opened: _Token) -> None:
        self._sum()
        if not self._is(")"):
            self._unexpected(f"an operator or the ')' of the '(' in column {opened.column}")
        self._next()

    # steps

    def _emit(self, kind: Kind, token: _Token, operands: int) -> None:
        constants = _pop(self.constants, operands)
        value: float | None = None
        if kind == "number":
            value = float(token.text)
        elif kind == "constant":
            value = CONSTANTS[token.text]
        elif kind != "variable" and None not in constants:
            with np.errstate(all="ignore"):
                numbers = [np.float64(number) for number in constants if number is not None]
                apply = OPERATORS[token.text] if kind == "operator" else getattr(np, FUNCTIONS[token.text][0])
                value = float(apply(*numbers))
        if value is not None and not math.isfinite(value):
            reason = "the number is too large" if kind == "number" else f"{token.text} of constants gives {value}"
            raise self._error(token.column, f"{reason}; constants must be finite in float64")
        self.constants.append(value)
        self.steps.append(Step(kind, token.text, operands, value))


# ---------------------------------------------------------------- sympy


def _is_tame(steps: Sequence[Step]) -> bool:
    """Return whether the numbers in all intermediate results of sympy have at most MAX_EXACT_BITS bits.

    Each part has a bound on the bits of its numbers. Powers, and exponentials of logarithms, raise the bound to the
    exponent.
    """
    stack: list[float] = []
    for step in steps:
        bits = _pop(stack, step.operands)
        if step.kind == "number":
            # The same for 0.001 and 1000: a power may invert the number.
            stack.append(max(1.0, abs(math.log2(abs(step.constant or 1.0)))))
        elif step.kind in ("constant", "variable"):
            stack.append(0)
        elif step.text in ("+", "-"):
            stack.append(max(bits) + 1 if max(bits) else 0)
        elif step.text in ("*", "/"):
            stack.append(sum(bits))
        elif step.text == "**":
            stack.append(_raised(*bits))
        elif step.text == "exp":
            stack.append(_raised(bits[0], bits[0]))
        else:
            stack.append(bits[0])
        if stack[-1] > MAX_EXACT_BITS:
            return False
    return True


def _raised(base: float, exponent: float) -> float:
    """Return a bound on the bits of base^exponent."""
    # Nested exponents multiply: (x**1000)**1000 is x**1000000.
    return max(base * 2.0 ** min(exponent, 64.0), base + exponent)


def _symbolic(step: Step, operands: list[Any], exact: bool, sympy: Any) -> Any:
    """Return the expression of a step; `exact` lets sympy simplify."""
    if not exact and step.constant is not None:
        # The printer simplifies even unevaluated expressions.
        return sympy.Float(step.constant, 17)
    if step.kind == "number":
        return sympy.Integer(int(step.text)) if step.text.isdigit() else sympy.Float(step.text, 17)
    if step.kind == "constant":
        return sympy.pi
    if step.kind == "variable":
        return sympy.Symbol(step.text, real=True)
    if step.kind == "function":
        return getattr(sympy, FUNCTIONS[step.text][1])(*operands, evaluate=exact)
    if exact:
        return OPERATORS[step.text](*operands)
    first, second = operands[0], operands[-1]
    match step.text:
        case "+":
            return sympy.Add(first, second, evaluate=False)
        case "-":
            return sympy.Add(first, sympy.Mul(-1, second, evaluate=False), evaluate=False)
        case "*":
            return sympy.Mul(first, second, evaluate=False)
        case "/":
            return sympy.Mul(first, sympy.Pow(second, -1, evaluate=False), evaluate=False)
        case "**":
            return sympy.Pow(first, second, evaluate=False)
    return sympy.Mul(-1, first, evaluate=False)
