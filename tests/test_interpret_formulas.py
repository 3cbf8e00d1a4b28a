"""Formulas of models and of rows."""

from __future__ import annotations

import ast
import math

import numpy as np
import pytest
import sympy
import torch

import kapsi as kp
from kapsi.clock import Stopwatch
from kapsi.data.problems import problem
from kapsi.data.tabular import write_table
from kapsi.data.tabular.dates import date_text
from kapsi.errors import FormulaError
from kapsi.interpret import formula, short_formulas
from kapsi.interpret.expressions import complexity, evaluate, slope
from kapsi.interpret.formulas import ModelFormula, _listed
from kapsi.interpret.pareto import FormulaRow, _undominated
from kapsi.interpret.search import search_formula
from kapsi.interpret.search.constants import Fit, SearchRows, description_length, fit, simple_numbers
from kapsi.interpret.search.engine import OUTER, _extended, polynomials, sums
from kapsi.interpret.search.reductions import Reduced, reduce
from kapsi.interpret.search.search import _finished, _front, _natural
from kapsi.interpret.search.surrogate import surrogate
from kapsi.interpret.search.terms import candidate_terms, monomials
from kapsi.interpret.text import as_latex, as_python, as_text

NO_CLOSED_FORM = {"combinatorial_categorical", "combinatorial_state", "joint_normal", "pair_splines"}
QUICK = ("identity", "taylor", "chebyshev", "trigonometric", "b_spline", "tree_leaves", "extended", "nested")


def deviation(expansion: kp.Expansion) -> float:
    """Return the largest difference of formula and model on new rows."""
    head = kp.HeadSpec(expansion, remainder=kp.LinearRemainder(), bias=True)
    model = kp.Model(kp.ModelSpec((3, 2), kp.LayerSpec(head)), seed=0, dtype=torch.float64).eval()
    x = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1.8 - 0.9
    y = model(x).detach().numpy()
    return float(np.abs(formula(model)(x.numpy()) - y).max() / max(1.0, np.abs(y).max()))


def first_example(cls: type) -> kp.Expansion:
    return kp.HeadSpec({"kind": cls.name, **cls.examples[0]}).expansion


CATALOGUE = [cls for cls in kp.catalogue("expansion") if cls.__module__.startswith("kapsi.expansion")]


@pytest.mark.parametrize("cls", [c for c in CATALOGUE if c.name in QUICK], ids=lambda c: c.name)
def test_formula_equals_model(cls) -> None:
    assert deviation(first_example(cls)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("cls", CATALOGUE, ids=lambda c: c.name)
def test_formula_equals_model_or_names_the_function(cls) -> None:
    if cls.name in NO_CLOSED_FORM:
        with pytest.raises(FormulaError, match=cls.__name__):
            formula(kp.Model(kp.rpn([3, 2], first_example(cls)), seed=0))
    else:
        assert deviation(first_example(cls)) < 1e-9


@pytest.mark.parametrize("extrapolation", ["linear", "clamp", "zero", "extended"])
def test_splines_beyond_their_range(extrapolation) -> None:
    spline = kp.BSpline(intervals=2, extrapolation=extrapolation)
    model = kp.Model(kp.rpn([1, 1], spline), seed=0, dtype=torch.float64)
    x = torch.linspace(-3, 3, 41, dtype=torch.float64)[:, None]
    np.testing.assert_allclose(formula(model)(x.numpy()), model(x).detach().numpy(), atol=1e-12)


def test_two_layers_and_two_heads() -> None:
    head = kp.HeadSpec(kp.Taylor(2), bias=True)
    spec = kp.ModelSpec((2, 2, 1), (kp.LayerSpec((head, kp.HeadSpec()), output=("tanh",)), kp.LayerSpec((head,))))
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    x = torch.rand(10, 2, dtype=torch.float64)
    np.testing.assert_allclose(formula(model)(x.numpy()), model(x).detach().numpy(), atol=1e-12)


def test_a_function_without_closed_form_is_named() -> None:
    with pytest.raises(FormulaError, match="pair_splines has no closed form"):
        formula(kp.Model(kp.rpn([3, 1], kp.expansion.PairSplines()), seed=0))


def test_shape_of_inputs() -> None:
    x = sympy.Symbol("x")
    with pytest.raises(FormulaError, match=r"expected inputs of the shape \(rows, 1\), got \(2, 2\)"):
        ModelFormula({"y": x}, (x,))(np.ones((2, 2)))


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formulas")
    x = np.random.default_rng(0).uniform(1, 3, (60, 2))
    table = {"mass": x[:, 0], "the <b>speed": x[:, 1], "energy": x[:, 0] * x[:, 1] ** 2 / 2}
    write_table(folder / "t.csv", {name: values.tolist() for name, values in table.items()})
    spec = kp.rpn((None, None), kp.Taylor(2), bias=True)
    config = kp.tables.RunConfig(kp.tables.TableConfig("energy"), spec, kp.TrainConfig(solver="ridge"))
    kp.tables.fit_table(folder / "t.csv", config, folder / "run")
    return kp.load_run(folder / "run"), folder / "run"


def test_formula_of_a_run_is_in_units_of_the_columns(run) -> None:
    loaded, _ = run
    x = np.array([[1.5, 2.0], [2.5, 1.25]])
    expected = loaded.predict({"mass": x[:, 0], "the <b>speed": x[:, 1]})
    result = formula(loaded)
    assert [symbol.name for symbol in result.symbols] == ["mass", "the <b>speed"]
    np.testing.assert_allclose(result(x)[:, 0], expected, rtol=1e-9)


def test_search_of_a_run(run) -> None:
    found = short_formulas(run[0])
    assert found.best().formula.text() == "energy = mass*`the <b>speed`**2/2"
    assert found.best().r2 == pytest.approx(1)
    assert found.rows[-1].source == "model"
    assert found.best(1).complexity == 1


def test_categories_take_part_in_a_search_and_a_model_may_have_no_closed_form(tmp_path) -> None:
    random = np.random.default_rng(0)
    x, color = random.uniform(1, 3, 60), np.array(["blue", "red"])[random.integers(2, size=60)]
    write_table(
        tmp_path / "t.csv", {"x": x.tolist(), "color": color.tolist(), "y": (2 * x + 3 * (color == "blue")).tolist()}
    )
    spec = kp.rpn((None, None), kp.Identity(), before="normal_scores", bias=True)
    config = kp.tables.RunConfig(kp.tables.TableConfig("y"), spec, kp.TrainConfig(solver="ridge"))
    kp.tables.fit_table(tmp_path / "t.csv", config, tmp_path / "run")
    loaded = kp.load_run(tmp_path / "run")
    found = short_formulas(loaded)
    assert found.best().formula.text() == "y = 3*`color = blue` + 2*x"
    assert {row.source for row in found.rows} == {"search"}
    assert any("normal_scores has no closed form" in note for note in found.notes)
    with pytest.raises(FormulaError, match=r"no closed form.*; no search was requested") as caught:
        short_formulas(loaded, seconds=0)
    assert "\n" not in str(caught.value)


def test_formulas_of_large_models_are_left_out_or_refused(run, monkeypatch) -> None:
    monkeypatch.setattr("kapsi.interpret.pareto.LARGEST", 3)
    found = short_formulas(run[0])
    assert {row.source for row in found.rows} == {"search"}
    assert "the formula of the model has 7 weights and is left out; --exact shows it" in found.notes
    monkeypatch.setattr("kapsi.interpret.formulas.MOST_WEIGHTS", 3)
    with pytest.raises(FormulaError, match="the model has 7 weights, a formula at most 3; fit a smaller model"):
        formula(run[0])


def test_command(run, capsys, tmp_path) -> None:
    from kapsi.cli import main

    path = str(run[1])
    assert main(["formula", path]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "energy = mass*`the <b>speed`**2/2"
    assert main(["formula", path, "--exact", "--output", str(tmp_path / "f.py")]) == 0
    tree = ast.parse((tmp_path / "f.py").read_text())
    assert [type(node).__name__ for node in tree.body] == ["Import", "FunctionDef"]
    capsys.readouterr()
    assert main(["formula", path, "--output", str(tmp_path / "f.exe")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------------------------------------ expressions and text


def test_values_of_an_expression() -> None:
    x = sympy.Symbol("x")
    steps = sympy.Piecewise((x**2, x < 1), (1 / sympy.sqrt(x), True))
    assert evaluate(steps, {x: np.array([-2.0, 4.0])}).tolist() == [4.0, 0.5]
    with pytest.raises(FormulaError, match="no values for 'x'"):
        evaluate(x, {})
    with pytest.raises(FormulaError, match="gamma has no numeric form"):
        evaluate(sympy.gamma(x), {x: 1.0})


def test_slope_of_an_absolute_value() -> None:
    x, c = sympy.symbols("x c")
    assert slope(sympy.Abs(c * x), {x: np.array([-3.0, 2.0]), c: 2.0}, c).tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("text", "size"), [("x - y", 3), ("x/y", 3), ("x/2", 3), ("pi/2", 3), ("sqrt(x)", 2), ("1/(x + y)", 5), ("x**2", 3)]
)
def test_complexity(text, size) -> None:
    assert complexity(sympy.sympify(text)) == size


def test_names_are_text_in_every_form() -> None:
    name = "a');import os #\n\\x"
    symbol = sympy.Symbol(name)
    tree = ast.parse(as_python({name: 2.5 * symbol}, [symbol]))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import) and node.names[0].name == "os"]
    assert "\n" not in as_text(symbol)
    assert ModelFormula({"a\n\x1b": symbol * 0 + 1}, (symbol,)).text() == r"a\n\x1b = 1"
    assert as_latex("50%_$", sympy.Integer(1)) == r"\text{50\%\_\$} = 1"


def test_a_simple_number_stands_before_a_free_constant_of_a_lower_error() -> None:
    x = sympy.Symbol("x", real=True)
    c = sympy.Dummy("c")
    rows = SearchRows((x,), np.linspace(0, 1, 50)[:, None], np.linspace(0, 0.5, 50), 1 / 48)
    free, simple = Fit(c * x, {c: 0.5001}, 1e-6, -300.0), Fit(x / 2, {}, 1.01e-6, -308.0)
    (found,) = _front(rows, [free, simple])
    assert found.expression == x / 2


def test_the_shortest_description_stays_even_if_it_is_complex() -> None:
    """1/√(2π) has more parts than a free constant, and a larger error."""
    x = sympy.Symbol("x", real=True)
    c = sympy.Dummy("c")
    rows = SearchRows((x,), np.linspace(0, 1, 50)[:, None], np.linspace(0, 0.4, 50), 1 / 72)
    exact = x / sympy.sqrt(2 * sympy.pi)
    assert description_length(rows, 1e-6, exact, 0) < description_length(rows, 1e-6, c * x, 1)
    free, listed = Fit(c * x, {c: 0.3989}, 1e-6, -300.0), Fit(exact, {}, 1.01e-6, -303.0)
    assert min(_front(rows, [free, listed]), key=lambda found: found.cost).expression == exact


def test_products_of_any_two_functions_are_terms() -> None:
    a, b = sympy.symbols("a b", real=True)
    x = np.random.default_rng(0).uniform(-2, 2, (50, 2))
    expressions = {term.expression() for term in candidate_terms([(a, x[:, 0]), (b, x[:, 1])])}
    assert {sympy.exp(-(a**2)) * sympy.cos(sympy.pi * b), b * sympy.Abs(a), sympy.sin(2 * b)} <= expressions


def test_only_irrational_numbers_of_the_list_are_cheap() -> None:
    x = sympy.Symbol("x", real=True)
    rows = SearchRows((x,), np.linspace(0, 1, 50)[:, None], np.linspace(0, 0.4, 50), 1 / 72)
    listed, other = x / sympy.sqrt(2 * sympy.pi), sympy.sqrt(77) * x / 22
    assert description_length(rows, 1e-6, listed, 0) < description_length(rows, 1e-6, other, 0)


def sampled(text: str, **ranges: tuple[float, float]):
    """Return inputs (expression and values) and values of a formula on 200 rows."""
    rng = np.random.default_rng(0)
    inputs = [(sympy.Symbol(name, real=True), rng.uniform(*ends, 200)) for name, ends in ranges.items()]
    return inputs, evaluate(sympy.sympify(text, {s.name: s for s, _ in inputs}), dict(inputs))


@pytest.mark.parametrize(
    ("text", "outer", "terms"), [("x", 0, ["x"]), ("cosh(x)", 0, ["cosh(x)"]), ("exp(-x)", 1, ["x"])]
)
def test_of_sums_without_error_the_simplest_is_best(text, outer, terms) -> None:
    inputs, y = sampled(text, x=(0.5, 2))
    terms_of_x = [term for term in candidate_terms(inputs) if term.cost <= 3]
    best = sums(terms_of_x, y, OUTER[outer], 2)[0]
    assert [str(term.expression()) for term in best.terms] == terms
    assert best.error < 1e-14


def test_the_extensions_of_sums_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(0)
    columns, goal = rng.standard_normal((2, 6, 30))[0], rng.standard_normal(30)
    columns /= np.linalg.norm(columns, axis=1)[:, None]
    sets, left = _extended(columns, goal, np.array([[0, 1], [1, 4]]), 4)
    assert {tuple(s) for s in sets.tolist()} == {
        tuple(sorted((*beam, i))) for beam in ((0, 1), (1, 4)) for i in range(6) if i not in beam
    }
    for chosen, error in zip(sets, left, strict=True):
        rest = goal - columns[chosen].T @ np.linalg.lstsq(columns[chosen].T, goal, rcond=None)[0]
        assert error == pytest.approx(rest @ rest)


def test_a_polynomial_has_the_monomials_that_matter() -> None:
    inputs, y = sampled("1 + x + x**2*y - y**3/2", x=(-1, 1), y=(-1, 1))
    noisy = y + 0.001 * np.random.default_rng(1).standard_normal(200)
    for target in (y, noisy):
        best = polynomials(monomials(inputs), target, OUTER[0])[0]
        assert {str(term.expression()) for term in best.terms} == {"x", "x**2*y", "y**3"}


def test_a_formula_of_whole_constants_beats_one_of_free_constants_in_noise() -> None:
    (_, x), *_ = inputs = sampled("x", x=(1, 3))[0]
    y = np.log(x**2 + np.exp(x)) + 0.01 * np.random.default_rng(2).standard_normal(200)
    rows = SearchRows((inputs[0][0],), x[:, None], y, float(y.var()))
    (reduced,) = reduce(rows.symbols, rows.x, y)
    pool = sums([t for t in candidate_terms(inputs) if t.cost <= 2], y, OUTER[6], 2)
    found = min(_natural(rows, reduced, pool), key=lambda one: one.cost)
    assert str(found.expression) == "log(x**2 + exp(x))"
    assert not found.constants


def test_a_distance_of_three_coordinates_is_one_input() -> None:
    inputs, y = sampled("log(a**2 + b**2 + c**2)", a=(1, 3), b=(1, 3), c=(1, 3))
    last = reduce(tuple(s for s, _ in inputs), np.column_stack([v for _, v in inputs]), y)[-1]
    (norm,) = last.inputs
    assert norm == sympy.sqrt(sum(s**2 for s, _ in inputs))


def test_simple_numbers() -> None:
    assert sympy.Rational(1, 3) in list(simple_numbers(0.3331))
    assert sympy.pi / 2 in list(simple_numbers(1.5706))
    assert 1 / sympy.sqrt(2 * sympy.pi) in list(simple_numbers(0.39894))


# ------------------------------------------------------------------------------------------------ search


def searched(text: str, noise: float = 0.0, rows: int = 300):
    function = problem(text)
    x, y = function.sample(rows, seed=1, noise=noise)
    symbols = [sympy.Symbol(variable.name, real=True) for variable in function.variables]
    best = min(search_formula(x, y, symbols), key=lambda found: found.cost)
    new, truth = function.sample(200, seed=2)
    return best, float(np.abs(evaluate(best.expression, {s: new[:, i] for i, s in enumerate(symbols)}) - truth).max())


@pytest.mark.parametrize(
    "name", ["E.1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("I.12.11", "I.44.4"))]
)
def test_recovery(name) -> None:
    best, error = searched(name)
    assert error < 1e-9
    assert not best.expression.atoms(sympy.Float)


@pytest.mark.parametrize(("name", "formula"), [("E.0", "x + y"), ("E.9", "acos(x + y)")])
def test_the_simplest_exact_formula_wins(name, formula) -> None:
    assert str(searched(name, rows=60)[0].expression) == formula


@pytest.mark.slow
@pytest.mark.parametrize(("name", "noise"), [("C.13", 0), ("I.18.4", 0), ("II.35.18", 0), ("E.4", 0.01), ("C.2", 0.01)])
def test_recovery_of_harder_functions(name, noise) -> None:
    assert searched(name, noise, rows=1000)[1] < 1e-9


def test_reductions_end_with_one_input() -> None:
    function = problem("I.44.4")
    x, y = function.sample(300, seed=0)
    symbols = tuple(sympy.Symbol(variable.name, real=True) for variable in function.variables)
    n, kb, t, v1, v2 = symbols
    last = reduce(symbols, x, y)[-1]
    assert last.factor == n * kb * t or set(last.factor.free_symbols) == {n, kb, t}
    assert len(last.inputs) == 1
    assert last.inputs[0].free_symbols == {v1, v2}


def test_a_constant_target_and_too_many_inputs() -> None:
    symbols = sympy.symbols("x:11")
    assert search_formula(np.ones((5, 1)), np.full(5, 2.5), symbols[:1])[0].expression == 2.5
    with pytest.raises(FormulaError, match="11 inputs"):
        search_formula(np.ones((5, 11)), np.ones(5), symbols)
    with pytest.raises(FormulaError, match="not finite"):
        search_formula(np.full((5, 1), math.nan), np.ones(5), symbols[:1])


def test_symbols_and_targets_match_the_inputs() -> None:
    x, y = np.ones((5, 2)), np.arange(5.0)
    for bad in ((x, y, (sympy.Symbol("a"),)), (x, y[:3], sympy.symbols("a b")), (x[:, 0], y, (sympy.Symbol("a"),))):
        with pytest.raises(FormulaError, match=r"search: expected inputs \(rows, m\), targets \(rows,\) and m symbols"):
            search_formula(*bad)


@pytest.mark.parametrize("text", ["(x+y)+1/(x+y)", "(x+y)**2*ln(x+y)"])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_a_sum_is_one_input_near_a_pole(text: str, seed: int) -> None:
    t = np.random.default_rng(seed).random((400, 2))
    a, b = sympy.symbols("x y", real=True)
    s = t.sum(1)
    y = s + 1 / s if "1/" in text else s * s * np.log(s)
    assert reduce((a, b), t, y)[-1].inputs == (a + b,)


def test_the_time_limit_holds_inside_of_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is over after the third look: of forty sums, at most three are fitted, none further is simplified."""
    inputs, y = sampled("a", a=(1, 3))
    rows = SearchRows((inputs[0][0],), inputs[0][1][:, None], y, float(y.var()))
    whole = Reduced((inputs[0][0],), rows.x, sympy.Integer(1), np.ones_like(y), y, surrogate(rows.x, y))
    pool = sums(candidate_terms(inputs)[:40], y, OUTER[0], 2)
    clock, looks = Stopwatch(), iter(range(100))
    monkeypatch.setattr(clock, "over", lambda: next(looks) >= 3)
    assert len(pool) > 10
    assert 1 <= len(_finished(rows, whole, pool, 8, clock)) <= 6


def test_noise_makes_formulas_short() -> None:
    x = np.linspace(-1, 1, 50)[:, None]
    y = 2 * x[:, 0] + 1 + 0.05 * np.sin(9 * x[:, 0])
    (s,) = sympy.symbols("x,", real=True)
    front = search_formula(x, y, (s,), noise=1.0)
    assert min(front, key=lambda found: found.cost).expression == 2 * s + 1


def test_an_imaginary_formula_is_no_fit() -> None:
    s = sympy.Symbol("x", real=True)
    x = np.linspace(1, 2, 20)
    assert fit(SearchRows((s,), x[:, None], x, float(x.var())), sympy.I * s, {}) is None


def test_a_formula_with_a_better_one_of_less_complexity_is_left_out() -> None:
    def row(complexity: int, rmse: float, cost: float, source: str = "search") -> FormulaRow:
        return FormulaRow(complexity, rmse, 0.0, ModelFormula({}, ()), source, cost)

    best, worse, exact, cheap = (
        row(2, 0.05, 3.0),
        row(11, 0.06, 20.0, "simplified"),
        row(20, 0.01, 40.0),
        row(3, 0.06, 2.0),
    )
    assert _undominated([best, exact, worse, cheap]) == [best, cheap, exact]


def test_ranges_of_dates_are_dates_and_long_lists_are_cut() -> None:
    assert [date_text(seconds) for seconds in (1579910400.0, 1579910460.0)] == ["2020-01-25", "2020-01-25T00:01:00"]
    assert _listed(["a"] * 13) == ", ".join("a" * 13)
    assert _listed(["a"] * 20) == f"{', '.join('a' * 12)}, and of 8 others"


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_few_rows_and_lists_have_a_formula(rows: int) -> None:
    x = [[1.0], [2.0], [4.0], [5.0], [8.0]][:rows]
    y = [2 * row[0] for row in x]
    found = min(search_formula(x, y, sympy.symbols("a,"), seconds=1), key=lambda one: one.cost)
    assert [float(found.expression.subs("a", row[0])) for row in x] == pytest.approx(y, abs=1e-6)
