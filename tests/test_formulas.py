"""Formulas: what they compute, how they are read, and what is refused."""

from __future__ import annotations

import ast
import math
import subprocess
import sys

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kapsi.data.formulas import FUNCTIONS, MAX_DEPTH, MAX_LENGTH, parse
from kapsi.errors import FormulaError

X = np.array([[0.3, 1.7], [0.9, 0.4], [0.55, 1.05]])

# ---------------------------------------------------------------- against Python's own grammar

BINARY = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Pow: np.power,
}
UNARY = {ast.USub: np.negative, ast.Invert: np.negative, ast.UAdd: np.positive}
CALLS = {name: getattr(np, {"ln": "log"}.get(name, name)) for name in FUNCTIONS}


def python_values(text, names):
    """Return the values of all parts, that of the whole formula last, by the tree that Python's parser makes of the text."""
    parts = []

    def value(node):
        if isinstance(node, ast.BinOp):
            return BINARY[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp):
            return UNARY[type(node.op)](walk(node.operand))
        if isinstance(node, ast.Call):
            return CALLS[node.func.id](walk(node.args[0]))
        if isinstance(node, ast.Name):
            return np.float64(math.pi) if node.id == "pi" else names[node.id]
        assert isinstance(node, ast.Constant)
        return np.float64(node.value)

    def walk(node):
        parts.append(value(node))
        return parts[-1]

    with np.errstate(all="ignore"):
        walk(ast.parse(text.replace("^", "**"), mode="eval").body)
    return parts


numbers = st.sampled_from(["0", "1", "2", "3", "10", "0.5", ".25", "2.", "1e-1", "1.5E1", "12e+0"])
operands = st.one_of(numbers, st.sampled_from(["x", "y", "x", "y", "pi"]))
blanks = st.sampled_from(["", "", " ", "  "])


@st.composite
def texts(draw, depth=3):
    """Text of the grammar without needless parentheses, so that precedence decides what it means."""
    parts = []
    for place in range(draw(st.integers(1, 4))):
        if place:
            parts.append(draw(st.sampled_from(["+", "-", "*", "/", "**", "^"])))
        parts += draw(st.lists(st.sampled_from(["-", "~", "+"]), max_size=2))
        kind = draw(st.integers(0, 3)) if depth else 0
        if kind == 2:
            parts += ["(", draw(texts(depth=depth - 1)), ")"]
        elif kind == 3:
            parts += [draw(st.sampled_from(sorted(FUNCTIONS))), "(", draw(texts(depth=depth - 1)), ")"]
        else:
            parts.append(draw(operands))
    return "".join(part + draw(blanks) for part in parts)


@settings(max_examples=150, deadline=None)
@given(texts())
def test_text_means_what_python_reads_in_it(text) -> None:
    expected = python_values(text, {"x": X[:, 0], "y": X[:, 1]})[-1]
    try:
        found = parse(text, ["x", "y"]).evaluate(X)
    except FormulaError as error:
        # The one thing that Python takes and a formula does not: constants without a finite value.
        assert "constants must be finite" in str(error)  # noqa: PT017
        return
    np.testing.assert_allclose(found, np.broadcast_to(expected, 3), rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(texts(depth=2))
def test_the_sympy_expression_has_the_same_values(text) -> None:
    try:
        formula = parse(text, ["x", "y"])
    except FormulaError:
        return
    found = formula.evaluate(X[0])
    # Sympy has no largest number: what overflows here goes on there, for hours where exponents have millions of digits.
    parts = python_values(text, dict(zip("xy", X[0], strict=True)))
    if not all(np.isfinite(part) and abs(part) < 1e10 for part in parts) or (found and abs(found) < 1e-10):
        return
    symbols = {sympy.Symbol(name, real=True): value for name, value in zip("xy", X[0], strict=True)}
    value = complex(formula.expression.evalf(subs=symbols))
    # What cancels exactly for sympy leaves a rounding error here, which a further division may make large.
    if abs(value - found) > 1e-6 * max(1.0, abs(found)):
        moved = [formula.evaluate(X[0] * (1 + shift)) for shift in (1e-12, -1e-12)]
        assert not np.allclose(moved, found, rtol=1e-7, atol=0.0), (text, value, found)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-x**2", -9.0),
        ("2**-1", 0.5),
        ("2**3**2", 512.0),
        ("2^3^2", 512.0),
        ("24/x/2", 4.0),
        ("24/x*2", 16.0),
        ("10-x-2", 5.0),
        ("10-(x-2)", 9.0),
        ("~x**2", -9.0),
        ("~32/5*x", -19.2),
        ("--x", 3.0),
        ("2--x", 5.0),
        ("2*-x", -6.0),
        ("-2**-x", -0.125),
        ("+x", 3.0),
        ("(-x)**2", 9.0),
        ("(-8)**(1/x)", math.nan),
        ("2.e1*x", 60.0),
        (".5E-1*x", 0.15),
        ("007*x", 21.0),
        ("ln(exp(x))", 3.0),
        ("log(exp(x))", 3.0),
        ("abs(-x)", 3.0),
        ("sin(pi/6)*x", 1.5),
        ("x\n + \t1", 4.0),
        ("x/0", math.inf),
        ("arcsin(x)", math.nan),
        ("7", 7.0),
    ],
)
def test_values(text, value) -> None:
    np.testing.assert_allclose(parse(text, ["x"]).evaluate([[3.0]]), [value], rtol=1e-15)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_each_function(name) -> None:
    import mpmath

    spelled = {"ln": "log", "abs": "fabs"}.get(name, name.replace("arc", "a"))
    at = 1.25 if name == "arccosh" else 0.625
    expected = float(getattr(mpmath, spelled)(mpmath.mpf(at)))
    formula = parse(f"{name}(x)", ["x"])
    np.testing.assert_allclose(formula.evaluate([[at]]), [expected], rtol=1e-15)
    np.testing.assert_allclose(
        formula.evaluate_torch(torch.tensor([[at]], dtype=torch.float64)), [expected], rtol=1e-14
    )
    assert float(formula.expression.evalf(subs={sympy.Symbol("x", real=True): at})) == pytest.approx(
        expected, rel=1e-14
    )


@pytest.mark.parametrize(
    "name", ["I", "E", "gamma", "beta", "zeta", "S", "N", "Q", "O", "C", "e", "pi", "lambda", "g_", "I_0", "E_n", "λ"]
)
def test_a_declared_name_is_the_variable_whatever_sympy_or_python_call_so(name) -> None:
    formula = parse(f"2*{name}+x", [name, "x"])
    assert formula.evaluate([[10.0, 1.0]]).tolist() == [21.0]
    assert {str(symbol) for symbol in formula.expression.free_symbols} == {name, "x"}


def test_shapes_and_constants() -> None:
    formula = parse("x*y+1", ["x", "y"])
    assert formula.evaluate(np.ones((4, 3, 2))).shape == (4, 3)
    assert formula.evaluate([2.0, 3.0]) == 7.0
    assert formula.evaluate(np.ones((0, 2))).shape == (0,)
    assert parse("2*pi", ["x"]).evaluate(np.ones((3, 1))).tolist() == [2 * math.pi] * 3
    assert parse("1+1", []).evaluate(np.ones((3, 0))).tolist() == [2.0] * 3
    with pytest.raises(FormulaError, match=r"shape \(3, 1\).*must be 2, one column for each of x, y"):
        formula.evaluate(np.ones((3, 1)))


@pytest.mark.parametrize(
    "values",
    [
        [["a"]],
        [["1"]],
        [[1.0], [1.0, 2.0]],
        np.array([[1 + 2j]]),
        np.array([["2020-01-01"]], dtype="datetime64[D]"),
        [[10**400]],
        [[{}]],
    ],
    ids=str,
)
def test_values_are_real_numbers(values) -> None:
    with pytest.raises(FormulaError, match="formula 'x': the values are not a rectangle of real float64 numbers"):
        parse("x", ["x"]).evaluate(values)


def test_values_are_a_copy() -> None:
    x = np.ones((3, 1))
    y = parse("x", ["x"]).evaluate(x)
    y[0] = 5.0
    assert x[0, 0] == 1.0


def test_torch_gives_values_type_and_derivatives() -> None:
    formula = parse("-x**2*sin(y)/sqrt(2*pi) + 3", ["x", "y"])
    x = torch.tensor(X, requires_grad=True)
    y = formula.evaluate_torch(x)
    np.testing.assert_allclose(y.detach().numpy(), formula.evaluate(X), rtol=1e-14)
    y.sum().backward()
    partial = parse("-2*x*sin(y)/sqrt(2*pi)", ["x", "y"]).evaluate(X)
    np.testing.assert_allclose(x.grad[:, 0].numpy(), partial, rtol=1e-14)
    assert formula.evaluate_torch(x.float()).dtype == torch.float32
    constant = parse("2", ["x", "y"]).evaluate_torch(x.float())
    assert constant.tolist() == [2.0] * 3
    assert constant.dtype == torch.float32
    with pytest.raises(FormulaError, match="must be 2"):
        formula.evaluate_torch(x[:, :1])
    # A constant would be rounded to a whole number.
    with pytest.raises(FormulaError, match=r"of the type torch\.int64; give a floating-point tensor"):
        formula.evaluate_torch(x.long())
    with pytest.raises(FormulaError, match="of the type ndarray; give a floating-point tensor"):
        formula.evaluate_torch(X)


def test_sympy_and_latex() -> None:
    formula = parse("exp(-(theta/sigma)**2/2)/(sqrt(2*pi)*sigma)", ["sigma", "theta"])
    theta, sigma = sympy.Symbol("theta", real=True), sympy.Symbol("sigma", real=True)
    density = sympy.exp(-((theta / sigma) ** 2) / 2) / (sympy.sqrt(2 * sympy.pi) * sigma)
    assert sympy.simplify(formula.expression - density) == 0
    assert parse("1/2*m*ln(v)", ["m", "v"]).latex == r"\frac{m \ln{\left(v \right)}}{2}"


def test_sympy_is_loaded_only_for_expressions() -> None:
    code = (
        "import sys; from kapsi.data.problems import problem; before = 'sympy' in sys.modules;"
        "problem('I.9.18').sample(10, seed=0); print(before, 'sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: found the end, expected a number, a variable, a function or '('"),
        ("  ", "found the end, expected a number"),
        ("x+", "column 3: found the end, expected a number"),
        ("x+*3", "column 3: found '*', expected a number"),
        ("x//2", "column 3: found '/', expected"),
        ("(x", "column 3: found the end, expected an operator or the ')' of the '(' in column 1"),
        ("x)", "column 2: found ')', expected the end, since no '(' is open"),
        ("()", "column 2: found ')', expected a number"),
        ("2x", "column 2: found 'x', expected an operator or the end; for a product write 2*x"),
        ("x y", "column 3: found 'y', expected an operator or the end; for a product write x*y"),
        ("x(y)", "for a product write x*("),
        ("(x)(y)", "for a product write (…)*("),
        ("sin x", "column 5: found 'x', expected '(' after sin"),
        ("sin", "column 4: found the end, expected '(' after sin"),
        ("sin(x, y)", "column 6: found ','"),
        ("x$3", "column 2: found '$'; allowed are numbers, names and + - * / ** ^ ( )"),
        ("x.real", "column 2: found '.'"),
        ("x==1", "column 2: found '='"),
        ("x%2", "column 2: found '%'"),
        ("x if x else y", "column 3: found 'if', expected an operator"),
        ("__import__('os')", 'column 12: found "\'"'),
        ("__import__(x)", "column 1: there is no '__import__'"),
        ("x+sinn(y)", "column 3: there is no 'sinn'; did you mean sin? the variables are x, y; there are also pi, exp"),
        ("asin(x)", "did you mean arcsin?"),
        ("e*x", "there is no 'e'; Euler's number is exp(1)"),
        ("x²", "there is no 'x²'; did you mean x?"),
        ("٣*x", "found '٣'"),
        ("1_000", "found '_000', expected an operator"),
        ("0x10", "found 'x10', expected an operator"),
        ("1e400*x", "column 1: the number is too large; constants must be finite in float64"),
        ("x+1/0", "column 4: / of constants gives inf"),
        ("ln(0)", "column 1: ln of constants gives -inf"),
        ("x*sqrt(-1)", "column 3: sqrt of constants gives nan"),
        ("9**9**9**9", "column 5: ** of constants gives inf"),
        ("arcsin(2)", "arcsin of constants gives nan"),
    ],
)
def test_an_error_names_the_column_and_what_is_allowed(text, message) -> None:
    with pytest.raises(FormulaError) as error:
        parse(text, ["x", "y"])
    assert message in str(error.value)
    assert str(error.value).startswith("formula ")
    assert "\n" not in str(error.value)


@settings(max_examples=120, deadline=None)
@given(st.text(alphabet="xy0123456789.eE+-*/^~() \nsincoplgt_²λ,$'\\", max_size=30) | st.text(max_size=20))
def test_any_text_is_a_formula_or_refused_in_one_line(text) -> None:
    try:
        parse(text, ["x", "y"]).evaluate(X)
    except FormulaError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("text", [42, None, b"x", ["x"]])
def test_a_formula_is_text(text) -> None:
    with pytest.raises(FormulaError, match="a formula is text, not"):
        parse(text, ["x"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x", "x"], "variable x: declared twice"),
        (["sin"], "variable sin: this is the name of a function"),
        (["2x"], "variable '2x': a name has letters"),
        ([""], "variable ''"),
        (["x y"], "variable 'x y'"),
        (["x\n"], "variable 'x"),
        ([3], "variable '3'"),
    ],
)
def test_names_of_variables(names, message) -> None:
    with pytest.raises(FormulaError, match=message.replace("(", r"\(")):
        parse("1", names)


@pytest.mark.parametrize("opening", ["(", "-", "x**", "sin(", "sin(-(x**", "2*("])
def test_depth_has_a_limit(opening) -> None:
    text = opening * 2000 + "x" + ")" * 2000 * opening.count("(")
    with pytest.raises(FormulaError, match=r"nested|characters"):
        parse(text[:MAX_LENGTH], ["x"])


@pytest.mark.parametrize("opening", ["(", "-", "x**", "sin(", "exp(", "sqrt(", "ln(1+"])
def test_as_deep_as_allowed_is_evaluated_and_printed(opening) -> None:
    depth = MAX_DEPTH - 1
    formula = parse(opening * depth + "x" + ")" * depth * opening.count("("), ["x"])
    assert formula.evaluate([[0.5]]).shape == (1,)
    assert "x" in formula.latex


def test_length_has_a_limit_and_long_sums_work() -> None:
    terms = MAX_LENGTH // 2
    formula = parse("+".join(["x"] * terms), ["x"])
    assert formula.evaluate([[0.5]]) == terms / 2
    assert formula.latex == f"{terms} x"
    with pytest.raises(FormulaError, match="4,097 characters; there may be 4,096"):
        parse(" " * 4096 + "x", ["x"])


MONSTERS = [
    "x**9**9",
    "(7*x)**10**9",
    "(((7*x)**1000)**1000)**1000",
    "1/(((7*x)**1000)**1000)**1000",
    "((x/7)**1000)**1000",
    "exp(-10**12*ln(2))*x",
    "exp(10**9*(ln(7)+x))",
    "1/exp(x+999*999*999*999*ln(2))",
    "(1+1/10**9)**10**9*x",
    "7**(7**(7**(7**(7**(x/x)))))",
    "exp(exp(exp(exp(x/x*9.5))))",
    "exp(exp(exp(exp(x/x/0.05))))",
    "(10**300*x)**1000",
]


def test_numbers_of_millions_of_digits_are_not_computed() -> None:
    # In a process of its own, since a test that hangs says nothing; one for all, since each would load torch.
    code = (
        "from kapsi.data.formulas import parse\n"
        f"for text in {MONSTERS!r}:\n"
        "    f = parse(text, ['x']); f.evaluate([[0.5]]); print(f.expression, f.latex, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    lines = done.stdout.splitlines()
    assert len(lines) == len(MONSTERS)
    assert all("x" in line and len(line) < 2000 for line in lines)


def test_common_formulas_are_simplified() -> None:
    assert parse("exp(-1000*x)/x*x**3", ["x"]).latex == "x^{2} e^{- 1000 x}"
    assert str(parse("(2*x)**100", ["x"]).expression) == f"{2**100}*x**100"
