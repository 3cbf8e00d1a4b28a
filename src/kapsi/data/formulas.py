"""Formulas as text, such as `exp(x)*sin(y/2)`: a closed grammar with its own parser, never run as Python.

    formula = operand {("+" | "-" | "*" | "/" | "**" | "^") operand}
    operand = {"-" | "~" | "+"} (number | pi | variable | [function] "(" formula ")")

As in Python, `-x**2` is -(x²), `2**3**2` is 2^9, and `a/b/c` is (a/b)/c. `~` is the minus sign of the AI Feynman tables.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kapsi.errors import FormulaError, nearest

if TYPE_CHECKING:
    import sympy
    import torch

Floats: TypeAlias = npt.NDArray[np.float64]
Kind: TypeAlias = Literal["number", "constant", "variable", "operator", "function"]
T = TypeVar("T")

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
class FormulaStep:
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
    steps: tuple[FormulaStep, ...] = field(repr=False)

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
            # NumPy would convert dates and strings, and drop imaginary parts.
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
            FormulaError: x is not a floating-point tensor, or does not have one column per variable.
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

        exact = _fold(self.steps, _bits) <= MAX_EXACT_BITS

        def apply(step: FormulaStep, operands: list[Any]) -> Any:
            if not exact and step.constant is not None:
                # The printer simplifies even unevaluated expressions.
                return sympy.Float(step.constant, 17)
            match step.kind:
                case "number":
                    return sympy.Integer(int(step.text)) if step.text.isdigit() else sympy.Float(step.text, 17)
                case "constant":
                    return sympy.pi
                case "variable":
                    return sympy.Symbol(step.text, real=True)
                case "function":
                    return getattr(sympy, FUNCTIONS[step.text][1])(*operands)
            return OPERATORS[step.text](*operands)

        with sympy.evaluate(exact):
            result: sympy.Expr = _fold(self.steps, apply)
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

        def apply(step: FormulaStep, operands: list[Any]) -> Any:
            if step.constant is not None:
                return step.constant
            if step.kind == "variable":
                return values[step.text]
            if step.kind == "function":
                return getattr(library, FUNCTIONS[step.text][0])(*operands)
            return OPERATORS[step.text](*operands)

        return _fold(self.steps, apply)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "**": lambda a, b: a**b,
    "neg": lambda a: -a,
}
SIGNS: Mapping[str, str] = {"-": "neg", "~": "neg", "+": "pos"}
PRECEDENCE: Mapping[str, int] = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3, "pos": 3, "**": 4}
NESTED = ("(", "neg", "pos", "**")


def parse(text: str, variables: Iterable[str]) -> Formula:
    """Parse a formula.

    Args:
        text: formula of `+ - * / ** ^ ( )`, numbers, pi, the functions exp, ln and log (both natural), sqrt, sin, cos, tan,
            arcsin, arccos, arctan, sinh, cosh, tanh, arcsinh, arccosh, arctanh, abs, and the variables.
        variables: allowed names; a variable may be named pi, but not like a function.

    Raises:
        FormulaError: the formula or a name is invalid; the message names the column.

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
        FormulaError: a name is not an identifier, is the name of a function, or repeated.
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
    """Return the repr of a string, at most 80 characters."""
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:60]}...{shown[-10:]}"


def _fold(steps: Iterable[FormulaStep], apply: Callable[[FormulaStep, list[T]], T]) -> T:
    """Return the value of steps in postfix order, from the values of the operands of each step."""
    stack: list[T] = []
    for step in steps:
        start = len(stack) - step.operands
        stack[start:] = [apply(step, stack[start:])]
    return stack[0]


def _bits(step: FormulaStep, bits: list[float]) -> float:
    """Return a bound on the bits of the numbers in sympy's result of a step, from the bounds of the operands."""
    if step.kind == "number":
        # The same for 0.001 and 1000: a power may invert the number.
        return max(1.0, abs(math.log2(abs(step.constant or 1.0))))
    if step.kind in ("constant", "variable"):
        return 0.0
    if step.text in ("+", "-"):
        return max(bits) + 1 if max(bits) else 0.0
    if step.text in ("*", "/"):
        return sum(bits)
    if step.text in ("**", "exp"):
        # Exponentials of logarithms are powers. Nested exponents multiply: (x**1000)**1000 is x**1000000.
        base, exponent = bits[0], bits[-1]
        return max(base * 2.0 ** min(exponent, 64.0), base + exponent)
    return bits[0]


# ---------------------------------------------------------------- parsing


class _Token(NamedTuple):
    kind: str  # number, constant, variable, function, operator, name, mark or end
    text: str
    column: int  # from 1


class _Parser:
    """Operator-precedence parser with a stack; emits the steps in postfix order, so that nothing recurses."""

    def __init__(self, text: str, variables: Sequence[str]) -> None:
        self.text = text
        self.variables = tuple(variables)
        self.tokens = self._tokens()
        self.at = 0
        self.pending: list[_Token] = []  # stack of operators, functions and parentheses without their last operand
        self.steps: list[FormulaStep] = []
        self.constants: list[float | None] = []  # stack of the values of parts without a variable

    def read(self) -> list[FormulaStep]:
        operand = True
        for at, token in enumerate(self.tokens):
            self.at = at
            operand = self._operand(token) if operand else self._operator(token)
        return self.steps

    # tokens

    def _tokens(self) -> list[_Token]:
        tokens, position, end = [], 0, len(self.text.rstrip())
        while position < end:
            match = TOKEN.match(self.text, position)
            if match is None:
                position = end - len(self.text[position:end].lstrip())
                raise self._error(
                    position + 1,
                    f"found {self.text[position]!r}; allowed are numbers, names and + - * / ** ^ ( )",
                )
            kind = match.lastgroup or "mark"
            text = match[kind]
            tokens.append(_Token(self._kind(kind, text), "**" if text == "^" else text, match.start(kind) + 1))
            position = match.end()
        return [*tokens, _Token("end", END, end + 1)]

    def _kind(self, kind: str, text: str) -> str:
        if kind == "name":
            known = {"variable": self.variables, "constant": CONSTANTS, "function": FUNCTIONS}
            return next((name for name, words in known.items() if text in words), kind)
        return "operator" if text == "^" or text in OPERATORS else kind

    # errors

    def _error(self, column: int, text: str) -> FormulaError:
        return FormulaError(f"formula {quoted(self.text)}, column {column}: {text}")

    def _unexpected(self, expected: str) -> FormulaError:
        token = self.tokens[self.at]
        found = END if token.kind == "end" else repr(token.text)
        hint = ""
        # 2x, x y and x(y+1) mean products to a reader.
        if self.at and (token.text == "(" or token.kind not in ("operator", "mark", "end")):
            before = self.tokens[self.at - 1]
            if before.text == ")" or before.kind not in ("operator", "mark", "function"):
                hint = f"; for a product write {before.text if before.text != ')' else '(…)'}*{token.text}"
        return self._error(token.column, f"found {found}, expected {expected}{hint}")

    def _unknown(self, token: _Token) -> FormulaError:
        known = [*self.variables, *CONSTANTS, *FUNCTIONS]
        arc = f"arc{token.text[1:]}"  # asin, acosh
        close = [arc] if token.text[0] == "a" and arc in FUNCTIONS else nearest(token.text, known)
        hint = f"did you mean {close[0]}? " if close else ""
        if token.text == "e":
            hint = "Euler's number is exp(1); "
        variables = f"the variables are {', '.join(self.variables)}" if self.variables else "no variables are declared"
        return self._error(
            token.column,
            f"there is no {quoted(token.text)}; {hint}{variables}; there are also pi, {', '.join(FUNCTIONS)}",
        )

    # grammar

    def _operand(self, token: _Token) -> bool:
        """Read a token at the position of an operand; return whether an operand must follow."""
        if self.pending and self.pending[-1].kind == "function" and token.text != "(":
            raise self._unexpected(f"'(' after {self.pending[-1].text}")
        if token.kind in ("number", "constant", "variable"):
            self._emit(token, 0)
            return False
        if token.kind == "name":
            raise self._unknown(token)
        if token.kind == "function":
            self.pending.append(token)
        elif token.text == "(" or token.text in SIGNS:
            self._push(token._replace(text=SIGNS.get(token.text, "(")))
        else:
            raise self._unexpected(OPERAND)
        return True

    def _operator(self, token: _Token) -> bool:
        """Read a token after an operand; return whether an operand must follow."""
        opened = next((pending for pending in reversed(self.pending) if pending.text == "("), None)
        if token.kind == "operator":
            self._apply(PRECEDENCE[token.text] + (token.text == "**"))  # powers group from the right
            self._push(token)
            return True
        if token.text == ")" and opened:
            self._apply(0)
            self.pending.pop()
            if self.pending and self.pending[-1].kind == "function":
                self._emit(self.pending.pop(), 1)
        elif token.kind == "end" and not opened:
            self._apply(0)
        elif opened:
            raise self._unexpected(f"an operator or the ')' of the '(' in column {opened.column}")
        else:
            raise self._unexpected("the end, since no '(' is open" if token.text == ")" else "an operator or the end")
        return False

    def _push(self, token: _Token) -> None:
        self.pending.append(token)
        if sum(pending.text in NESTED for pending in self.pending) >= MAX_DEPTH:
            raise self._error(
                token.column,
                f"more than {MAX_DEPTH} nested signs, powers and parentheses; write the formula flatter",
            )

    def _apply(self, precedence: int) -> None:
        """Emit the pending operators of at least some precedence, back to the last open parenthesis."""
        while self.pending and PRECEDENCE.get(self.pending[-1].text, -1) >= precedence:
            token = self.pending.pop()
            if token.text != "pos":
                self._emit(token._replace(kind="operator"), 1 if token.text == "neg" else 2)

    def _emit(self, token: _Token, operands: int) -> None:
        start = len(self.constants) - operands
        constants = self.constants[start:]
        value: float | None = None
        if token.kind == "number":
            value = float(token.text)
        elif token.kind == "constant":
            value = CONSTANTS[token.text]
        elif token.kind != "variable" and None not in constants:
            with np.errstate(all="ignore"):
                apply = OPERATORS[token.text] if token.kind == "operator" else getattr(np, FUNCTIONS[token.text][0])
                value = float(apply(*map(np.float64, constants)))
        if value is not None and not math.isfinite(value):
            reason = "the number is too large" if token.kind == "number" else f"{token.text} of constants gives {value}"
            raise self._error(token.column, f"{reason}; constants must be finite in float64")
        self.constants[start:] = [value]
        self.steps.append(FormulaStep(cast("Kind", token.kind), token.text, operands, value))
