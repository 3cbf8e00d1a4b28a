"""Text of formulas: plain, LaTeX and Python source. Names of columns are data: quoted or escaped as each form needs."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sympy
from sympy.printing.latex import LatexPrinter
from sympy.printing.mathml import MathMLPresentationPrinter
from sympy.printing.str import StrPrinter

from kapsi.errors import FormulaError, printable

NAME = re.compile(r"[^\W\d]\w*")
LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def rounded(expression: Any, digits: int) -> Any:
    """Return an expression with rounded floating-point numbers, whole numbers as integers."""
    numbers = {}
    for number in expression.atoms(sympy.Float):
        value = float(f"{float(number):.{digits}g}")
        numbers[number] = (
            sympy.Integer(int(value)) if value.is_integer() and abs(value) < 10**digits else sympy.Float(value, digits)
        )
    return expression.xreplace(numbers)


class _Text(StrPrinter):  # type: ignore[misc]
    def _print_Symbol(self, expr: Any) -> str:
        return shown_name(expr.name)


def shown_name(name: str) -> str:
    """Return a name as it is if it is an identifier, else in backquotes, as a line of printable text."""
    return name if NAME.fullmatch(name) else f"`{printable(name.replace('`', chr(39)))}`"


def as_text(expression: Any, digits: int = 4) -> str:
    """Return an expression as text.

    Example:
        >>> as_text(sympy.Symbol("petal width") * 0.123456 + 1)
        '0.1235*`petal width` + 1'
    """
    return str(_Text({"full_prec": False}).doprint(rounded(expression, digits)))


class _Latex(LatexPrinter):  # type: ignore[misc]
    def _print_Symbol(self, expr: Any, style: str = "plain") -> str:
        return latex_name(expr.name)


def latex_name(name: str) -> str:
    """Return a name as upright text of LaTeX, escaped; letters with a number as variables with an index."""
    variable = re.fullmatch(r"([A-Za-z])(\d*)", name, re.ASCII)
    if variable:
        return variable[1] + (f"_{{{variable[2]}}}" if variable[2] else "")
    return r"\text{" + "".join(LATEX.get(letter, letter) for letter in printable(name)) + "}"


def as_latex(name: str, expression: Any, digits: int = 4) -> str:
    """Return `name = expression` as LaTeX, without dollar signs."""
    body = _Latex({"ln_notation": True, "full_prec": False}).doprint(rounded(expression, digits))
    return f"{latex_name(name)} = {body}"


class _MathML(MathMLPresentationPrinter):  # type: ignore[misc]
    """Presentation MathML; names are marks, replaced by escaped text after printing."""

    def __init__(self) -> None:
        super().__init__({"mul_symbol": "dot"})
        self.names: list[str] = []

    def element(self, name: str, *children: Any) -> Any:
        """Return an element with children."""
        made = self.dom.createElement(name)
        for child in children:
            made.appendChild(child)
        return made

    def word(self, name: str, text: str) -> Any:
        """Return an element with text, escaped at the end of printing."""
        self.names.append(text)
        return self.element(name, self.dom.createTextNode(f"name-{len(self.names) - 1}-"))

    def _print_Symbol(self, sym: Any, style: str = "plain") -> Any:
        variable = re.fullmatch(r"([A-Za-z])(\d*)", sym.name, re.ASCII)
        if variable is None:
            name = printable(sym.name)
            return self.word("mtext", name if NAME.fullmatch(name) else f"[{name}]")
        letter = self.word("mi", variable[1])
        return self.element("msub", letter, self.word("mn", variable[2])) if variable[2] else letter

    def _print_Piecewise(self, expr: Any) -> Any:
        rows = []
        for value, condition in expr.args:
            other = condition == sympy.true
            words = self.word("mtext", "otherwise" if other else "if\u00a0")
            last = self.element("mrow", words, *([] if other else [self._print(condition)]))
            rows.append(self.element("mtr", self.element("mtd", self._print(value)), self.element("mtd", last)))
        brace = self.word("mo", "{")
        return self.element("mrow", brace, self.element("mtable", *rows))

    def markup(self, *parts: Any) -> str:
        """Return elements within `math`."""
        text = self.element("math", *parts).toxml()
        return re.sub(r"name-(\d+)-", lambda found: html.escape(self.names[int(found[1])]), text)


def as_mathml(name: str, expression: Any, digits: int = 4) -> list[str]:
    """Return `name = expression` as MathML, an element `math` for each term of the sum, so that browsers break lines.

    Example:
        >>> as_mathml("y", 2 * sympy.Symbol("a<b") - 1)[1]
        '<math><mo form="infix">−</mo><mn>1</mn></math>'
    """
    printer = _MathML()
    expression = rounded(expression, digits)
    terms = expression.as_ordered_terms() if expression.is_Add else [expression]
    marks = []
    for i, term in enumerate(terms):
        negative = term.could_extract_minus_sign()
        sign = printer.word("mo", "−" if negative else "+")
        sign.setAttribute("form", "infix" if i else "prefix")
        first = [printer.word("mtext", printable(name)), printer.word("mo", "=")]
        body = printer._print(-term if negative else term)
        before = [*(first if i == 0 else []), *([sign] if i or negative else [])]
        marks.append(printer.markup(*before, body))
    return marks


class _Python(StrPrinter):  # type: ignore[misc]
    """Source with NumPy functions; parts are printed from a closed list."""

    FUNCTIONS: ClassVar[dict[str, str]] = {
        "exp": "exp", "log": "log", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "arcsin", "acos": "arccos",
        "atan": "arctan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "arcsinh", "acosh": "arccosh",
        "atanh": "arctanh", "Abs": "abs", "sign": "sign", "floor": "floor",
    }  # fmt: skip

    def __init__(self, names: Mapping[Any, str]) -> None:
        super().__init__({"full_prec": False})
        self.names = names

    def _print_Symbol(self, expr: Any) -> str:
        return self.names[expr]

    def _print_Float(self, expr: Any) -> str:
        return repr(float(expr))

    def _print_Rational(self, expr: Any) -> str:
        return f"({expr.p}/{expr.q})"

    def _print_Pi(self, expr: Any) -> str:
        return "np.pi"

    def _print_Pow(self, expr: Any, rational: bool = False) -> str:
        if expr.exp == sympy.Rational(1, 2):
            return f"np.sqrt({self._print(expr.base)})"
        if expr.exp == sympy.Rational(-1, 2):
            return f"(1/np.sqrt({self._print(expr.base)}))"
        if expr.exp == -1:
            return f"(1/({self._print(expr.base)}))"
        return f"({self._print(expr.base)})**({self._print(expr.exp)})"

    def _print_Function(self, expr: Any) -> str:
        name = self.FUNCTIONS.get(expr.func.__name__)
        if name is None:
            raise FormulaError(f"formula: {expr.func.__name__} has no form in Python source")
        return f"np.{name}({', '.join(self._print(a) for a in expr.args)})"

    def _print_Max(self, expr: Any) -> str:
        return self._nested("np.maximum", expr.args)

    def _print_Min(self, expr: Any) -> str:
        return self._nested("np.minimum", expr.args)

    def _nested(self, name: str, args: Sequence[Any]) -> str:
        text = self._print(args[0])
        for part in args[1:]:
            text = f"{name}({text}, {self._print(part)})"
        return str(text)

    def _print_Piecewise(self, expr: Any) -> str:
        text = "np.nan"
        for value, condition in reversed(expr.args):
            text = (
                self._print(value)
                if condition == sympy.true
                else f"np.where({self._print(condition)}, {self._print(value)}, {text})"
            )
        return str(text)


def as_python(outputs: Mapping[str, Any], symbols: Sequence[Any]) -> str:
    """Return the source of a function `formula(x0, x1, …)` of NumPy arrays.

    Names that are no identifiers appear in the docstring only, escaped; no name of data becomes code.

    Example:
        >>> print(as_python({"y": sympy.Symbol("a b") + 1.5}, [sympy.Symbol("a b")]))
        import numpy as np
        <BLANKLINE>
        <BLANKLINE>
        def formula(x0):
            # x0: 'a b'
            return (
                x0 + 1.5,  # 'y'
            )
        <BLANKLINE>
    """
    names = {symbol: f"x{i}" for i, symbol in enumerate(symbols)}
    printer = _Python(names)
    lines = ["import numpy as np", "", "", f"def formula({', '.join(names.values())}):"]
    lines += [f"    # {short}: {symbol.name!a}" for symbol, short in names.items()]
    lines += ["    return ("]
    lines += [f"        {printer.doprint(expression)},  # {name!a}" for name, expression in outputs.items()]
    return "\n".join([*lines, "    )", ""])
