"""The functions to learn, the rows drawn from them, and `kapsi data`."""

from __future__ import annotations

import ast
import csv
import io
import math
import random
import re

import mpmath
import numpy as np
import pytest
import sympy
import torch
from sympy.parsing.sympy_parser import parse_expr

from kapsi.data.problems import (
    ALIASES,
    GROUPS,
    FunctionProblem,
    Variable,
    problem,
    problem_from,
    problems,
    read_variable,
)
from kapsi.data.tabular import read_table
from kapsi.errors import FormulaError

EVERY = [problem for group in GROUPS for problem in problems(group)]
EACH = pytest.mark.parametrize("problem", EVERY, ids=[problem.name for problem in EVERY])

# ---------------------------------------------------------------- the functions

MP_BINARY = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}


def exactly(text, names):
    """Evaluate with 40 digits, over the tree that Python's parser makes of the text."""

    def walk(node):
        if isinstance(node, ast.BinOp):
            return MP_BINARY[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp):
            assert isinstance(node.op, ast.USub | ast.Invert)
            return -walk(node.operand)
        if isinstance(node, ast.Call):
            name = {"ln": "log"}.get(node.func.id, re.sub("^arc", "a", node.func.id))
            return getattr(mpmath, name)(walk(node.args[0]))
        if isinstance(node, ast.Name):
            return mpmath.pi if node.id == "pi" else names[node.id]
        return mpmath.mpf(node.value)

    with mpmath.workdps(40):
        return walk(ast.parse(text, mode="eval").body)


@EACH
def test_values_against_40_digits(problem) -> None:
    x, y = problem.sample(5, seed=11)
    for row, value in zip(x, y, strict=True):
        names = {variable.name: mpmath.mpf(number) for variable, number in zip(problem.variables, row, strict=True)}
        # The rows are not chosen: where a difference cancels, digits are lost.
        assert value == pytest.approx(float(exactly(problem.formula, names)), rel=1e-10)


@EACH
def test_expressions_against_sympys_own_reading(problem) -> None:
    x, y = problem.sample(1, seed=12)
    names = [variable.name for variable in problem.variables]
    text = re.sub(r"\barc(?=sin|cos|tan)", "a", problem.formula.replace("~", "-"))
    reference = parse_expr(text, local_dict={name: sympy.Symbol(name, real=True) for name in names})
    at = {sympy.Symbol(name, real=True): value for name, value in zip(names, x[0], strict=True)}
    assert float(reference.evalf(subs=at)) == pytest.approx(y[0], rel=1e-9)
    assert float(problem.parsed.expression.evalf(subs=at)) == pytest.approx(y[0], rel=1e-9)
    assert problem.parsed.latex


@EACH
def test_rows_are_finite_and_inside_the_ranges(problem) -> None:
    drawn = problem.draw(1000, seed=0)
    assert drawn.x.shape == (1000, problem.inputs)
    assert drawn.y.shape == (1000,)
    assert drawn.x.dtype == drawn.y.dtype == np.float64
    assert np.isfinite(drawn.y).all()
    assert drawn.redrawn == 0
    low = np.array([variable.low for variable in problem.variables])
    high = np.array([variable.high for variable in problem.variables])
    assert (drawn.x >= low).all()
    assert (drawn.x <= high).all()
    # Uniform: over the whole range, each tenth of it with about a tenth of the rows.
    shares = (drawn.x - low) / (high - low)
    counts = np.stack([np.histogram(column, bins=10, range=(0, 1))[0] for column in shares.T])
    assert counts.min() > 55
    assert counts.max() < 145


@EACH
def test_every_variable_is_in_the_formula(problem) -> None:
    used = {step.text for step in problem.parsed.steps if step.kind == "variable"}
    assert used == {variable.name for variable in problem.variables}


def test_how_many_there_are() -> None:
    assert [len(problems(group)) for group in GROUPS] == [17, 17, 100, 20, 27]
    names = [problem.name for problem in EVERY]
    assert len(set(names)) == len(names) == 181
    assert names[:17] == [f"E.{number}" for number in range(17)]
    assert names[17:34] == [f"C.{number}" for number in range(17)]
    assert [problem.name for problem in problems("feynman_bonus")] == [f"test_{number}" for number in range(1, 21)]
    assert all(problem.title for problem in problems("feynman_bonus"))


def test_the_papers_numbers() -> None:
    assert list(ALIASES) == [f"F.{number}" for number in range(27)]
    assert problem("F.0").name == "I.6.2"
    assert problem("F.12").name == "I.30.5"
    assert problem("F.26") is problem("III.17.37")
    # The same 27, in the same order, without dimensions.
    assert [f"D.{name}" for name in ALIASES.values()] == [p.name for p in problems("feynman_dimensionless")]


@pytest.mark.parametrize(
    ("name", "ranges"),
    [
        ("F.0", "sigma, theta in [1, 3]"),
        ("F.2", "m1, m2, G, x2, y2, z2 in [1, 2]; x1, y1, z1 in [3, 4]"),
        ("F.5", "x in [5, 10]; u, t in [1, 2]; c in [3, 20]"),
        ("F.8", "n in [0, 1]; theta2 in [1, 5]"),
        ("F.12", "lambd in [1, 2]; d in [2, 5]; n in [1, 5]"),
        ("F.20", "n, alpha in [0, 1]; epsilon, Ef in [1, 2]"),
        ("F.24", "p_d, Ef, t, h in [1, 3]; omega, omega_0 in [1, 5]"),
        ("E.7", "x, y in [0, 0.5]"),
        ("E.15", "x, y in [0.5, 1]"),
        ("test_13", "q, epsilon in [1, 5]; r in [1, 3]; d in [4, 6]; alpha in [0, 6]"),
    ],
)
def test_ranges(name, ranges) -> None:
    assert problem(name).ranges == ranges


def test_the_data_of_the_paper_rather_than_its_table() -> None:
    assert problem("C.12").formula == "exp((x+y)+exp(x+y))"
    assert problem("test_9").values([[1.0, 1.0, 1.0, 1.0, 1.0]])[0] == pytest.approx(-64 / 5)


def test_unknown_names() -> None:
    with pytest.raises(
        FormulaError, match=r"no group of functions 'feynmann'; did you mean 'feynman'\? choose from elem"
    ):
        problems("feynmann")
    with pytest.raises(FormulaError, match=r"no function 'I\.9\.19'; did you mean I\.9\.18"):
        problem("I.9.19")
    with pytest.raises(FormulaError, match=r"no function 'qqqq'; there are E\.0 to E\.16"):
        problem("qqqq")


# ---------------------------------------------------------------- drawing


def test_a_seed_gives_the_same_rows_everywhere() -> None:
    x, y = problem("I.9.18").sample(2, seed=0)
    assert x[0].tolist() == [
        1.6369616873214543,
        1.2697867137638703,
        1.0409735239361946,
        3.0165276355285293,
        1.8132702392002724,
        3.912755577277722,
        1.6066357757671799,
        3.7294965609839985,
        1.543624991465423,
    ]
    again = problem("F.2").sample(2, seed=0)
    assert np.array_equal(again[0], x)
    assert np.array_equal(again[1], y)
    assert not np.array_equal(problem("I.9.18").sample(2, seed=1)[0], x)


def test_functions_of_equally_many_variables_get_the_same_uniform_numbers() -> None:
    first, _ = problem("E.0").sample(50, seed=3)
    second, _ = problem("E.8").sample(50, seed=3)
    np.testing.assert_allclose(second, first / 2, rtol=1e-15)


def test_the_global_random_states_are_not_touched() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    problem("E.3").split(seed=5, noise=0.1)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_split_is_the_sample_cut_in_two() -> None:
    task = problem("E.3")
    x, y = task.sample(2000, seed=4)
    parts = task.split(seed=4)
    assert [part.shape for part in parts] == [(1000, 2), (1000,), (1000, 2), (1000,)]
    assert np.array_equal(np.vstack([parts[0], parts[2]]), x)
    assert np.array_equal(np.concatenate([parts[1], parts[3]]), y)
    assert [len(part) for part in task.split(50, 40, seed=4)] == [40, 40, 10, 10]


def test_noise_is_a_share_of_how_the_target_varies_and_leaves_x_alone() -> None:
    task = problem("II.38.3")
    x, y = task.sample(20_000, seed=6)
    noisy_x, noisy = task.sample(20_000, seed=6, noise=0.25)
    assert np.array_equal(x, noisy_x)
    error = (noisy - y) / y.std()
    assert error.std() == pytest.approx(0.25, rel=0.03)
    assert abs(error.mean()) < 0.01
    assert abs(np.corrcoef(error, y)[0, 1]) < 0.03


def test_rows_without_a_value_are_drawn_again_and_counted() -> None:
    problem = problem_from("sqrt(x)+y", ["x:-1:3", "y:0:1"])
    drawn = problem.draw(4000, seed=0)
    assert np.isfinite(drawn.y).all()
    assert drawn.x[:, 0].min() >= 0
    # A quarter at first, a quarter of these again, and so on: a third.
    assert drawn.redrawn == pytest.approx(4000 / 3, rel=0.1)
    assert abs(drawn.x[:, 0].mean() - 1.5) < 0.05
    kept = problem.values(problem._uniform(np.random.default_rng(0), 4000))
    assert np.array_equal(drawn.y[np.isfinite(kept)], kept[np.isfinite(kept)])


@pytest.mark.parametrize(
    ("formula", "variables"), [("ln(x)", ["x:-3:1"]), ("x/0", ["x:0:1"]), ("exp(1000*x)", ["x:1:2"])]
)
def test_a_function_without_values_on_most_of_its_range_is_refused(formula, variables) -> None:
    with pytest.raises(FormulaError, match=r"is not finite on \d+ of 1000 rows drawn with x in .*; give ranges inside"):
        problem_from(formula, variables).sample(100, seed=0)
    with pytest.raises(FormulaError, match=r"is not finite on \d+ of 2000 rows"):
        problem_from(formula, variables).sample(2000, seed=0)


def test_few_rows_are_judged_by_more() -> None:
    # A quarter has no value, so of single rows every fourth is drawn again, and none is refused.
    problem = problem_from("sqrt(x)", ["x:-1:3"])
    drawn = [problem.draw(1, seed=seed) for seed in range(40)]
    assert all(np.isfinite(one.y).all() for one in drawn)
    assert 4 <= sum(one.redrawn > 0 for one in drawn) <= 18
    # Where three quarters have none, single rows are refused unless they happen to fit.
    problem = problem_from("sqrt(x)", ["x:-3:1"])
    for seed in range(20):
        first = np.random.Generator(np.random.PCG64(seed)).random() * 4 - 3
        if first >= 0:
            assert problem.sample(1, seed=seed)[0] == first
        else:
            with pytest.raises(FormulaError, match="of 1000 rows"):
                problem.sample(1, seed=seed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows: expected an integer from 1 to 1,000,000,000, got 0"),
        ({"rows": 10**10}, "rows: expected .*, got 10000000000"),
        ({"rows": 2.5}, "rows: expected .*, got 2.5"),
        ({"rows": True}, "rows: expected .*, got True"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"seed": None}, "seed: expected .*, got None"),
        ({"noise": -0.1}, "noise -0.1: expected a fraction"),
        ({"noise": math.nan}, "noise nan"),
        ({"noise": math.inf}, "noise inf"),
        ({"noise": 1e308}, "noise 1e\\+308 makes targets too large"),
        ({"noise": "much"}, "noise 'much'"),
        ({"noise": 10**5000}, "noise beyond float64: expected a fraction"),
        ({"rows": 10**5000}, "rows: expected .*, got an integer beyond float64"),
        ({"rows": 1, "noise": 0.1}, "the target does not vary over 1 row,"),
    ],
)
def test_arguments_out_of_range(arguments, message) -> None:
    with pytest.raises(FormulaError, match=message):
        problem("test_9").sample(**({"rows": 10, "seed": 0} | arguments))


@pytest.mark.parametrize(("rows", "train"), [(1, 1), (10, 0), (10, 10), (10, 11)])
def test_a_split_has_rows_in_both_parts(rows, train) -> None:
    with pytest.raises(FormulaError, match=r"rows: |train: "):
        problem("E.3").split(rows, train, seed=0)


def test_noise_of_a_very_small_or_large_target() -> None:
    for scale in ("1e-200", "1e200"):
        problem = problem_from(f"{scale}*x", ["x:0:1"])
        _, y = problem.sample(2000, seed=0)
        _, noisy = problem.sample(2000, seed=0, noise=0.5)
        assert np.std((noisy - y) / float(scale)) == pytest.approx(0.5 / math.sqrt(12), rel=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "x:0",
        "x:0:1:2",
        "x:a:1",
        "x:0:",
        ":0:1",
        "",
        "x:1:0",
        "x:1:1",
        "x:0:inf",
        "x:nan:1",
        "x:1_0:2_0",
        "x:٣:٤",
        "x:0:1e999",
        "x:0x0:1",
    ],
)
def test_variables_that_do_not_fit(text) -> None:
    with pytest.raises(FormulaError, match="variable"):
        problem_from("1+x", [text])


def test_problems_that_do_not_fit() -> None:
    with pytest.raises(FormulaError, match="expected one or more Variable"):
        FunctionProblem("f", "1", ())
    with pytest.raises(FormulaError, match="declared twice"):
        problem_from("x", ["x:0:1", "x:0:2"])
    with pytest.raises(FormulaError, match="there is no 'y'"):
        problem_from("x+y", ["x:0:1"])
    with pytest.raises(FormulaError, match="too wide for float64"):
        Variable("x", -1.7e308, 1.7e308)
    with pytest.raises(FormulaError, match="'0' is not a number"):
        Variable("x", "0", 1.0)
    with pytest.raises(FormulaError, match="beyond float64 is not a number"):
        Variable("x", 0, 10**5000)
    with pytest.raises(FormulaError, match="variable '3': a name has letters"):
        Variable(3, 0, 1)
    for variables in (3, "x", ("x",), ("x:0:1",)):
        with pytest.raises(FormulaError, match=r"expected one or more Variable\(name, low, high\)"):
            FunctionProblem("f", "x", variables)
    one_by_one = (Variable(name, 0, 1) for name in "xy")
    assert FunctionProblem("f", "x+y", one_by_one).variables == (Variable("x", 0, 1), Variable("y", 0, 1))
    with pytest.raises(FormulaError, match="there is no function"):
        problem(["E.3"])
    assert read_variable("x:-1e-3:.5") == Variable("x", -0.001, 0.5)
    assert read_variable(" x : 0 : +1 ") == Variable("x", 0, 1)


def test_numbers_of_numpy_are_numbers() -> None:
    variable = Variable("x", np.float32(0.5), np.int64(2))
    assert variable == Variable("x", 0.5, 2.0)
    assert type(variable.low) is type(variable.high) is float
    noisy = problem("E.3").sample(5, seed=0, noise=np.float32(0.5))[1]
    assert np.array_equal(noisy, problem("E.3").sample(5, seed=0, noise=0.5)[1])


# ---------------------------------------------------------------- the command line


@pytest.fixture
def kapsi(kapsi, tmp_path, monkeypatch):
    """Run the command line in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return kapsi


@pytest.mark.parametrize(
    "words", [("feynman", "I.9.18"), ("feynman", "F.2"), ("I.9.18",), ("F.2",)], ids=lambda words: " ".join(words)
)
def test_rows_on_the_terminal_are_csv(kapsi, words) -> None:
    code, out, err = kapsi("data", *words, "--rows", 20, "--seed", 3)
    assert (code, err) == (0, "")
    header, *rows = csv.reader(io.StringIO(out))
    assert header == ["m1", "m2", "G", "x1", "x2", "y1", "y2", "z1", "z2", "target"]
    x, y = problem("I.9.18").sample(20, seed=3)
    assert np.array_equal(np.array(rows, dtype=float), np.column_stack([x, y]))


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.parquet"])
def test_rows_in_a_file(kapsi, name) -> None:
    code, out, err = kapsi("data", "elementary", "E.3", "--noise", "0.1", "--output", name, "--target", "z")
    assert (code, err) == (0, "")
    assert out == f"data: {name} (2,000 rows, target column z: E.3 = exp(x+y))\n"
    table = read_table(name)
    x, y = problem("E.3").sample(2000, seed=0, noise=0.1)
    assert list(table.columns) == ["x", "y", "z"]
    assert np.array_equal(np.column_stack([table.columns[n].numbers for n in "xyz"]), np.column_stack([x, y]))


def test_a_file_goes_straight_into_a_fit(kapsi, tmp_path) -> None:
    assert kapsi("data", "feynman", "I.12.1", "--rows", 200, "--output", "rows.csv", "--target", "y")[0] == 0
    quick = ("--set", "training.l2=0.01", "--set", "training.epochs=3")
    code, out, err = kapsi("fit", "rows.csv", "--target", "y", "--output", "run", *quick)
    assert code == 0, err
    assert out.splitlines()[-1].startswith("r2: ")


def test_an_old_file_stays_unless_told_otherwise(kapsi, tmp_path) -> None:
    (tmp_path / "rows.csv").write_text("mine")
    code, out, err = kapsi("data", "E.3", "--output", "rows.csv")
    assert (code, out) == (2, "")
    assert err == "kapsi: rows.csv: exists already; give another --output, or --overwrite\n"
    assert (tmp_path / "rows.csv").read_text() == "mine"
    assert kapsi("data", "E.3", "--output", "rows.csv", "--overwrite", "--rows", 5)[0] == 0
    assert read_table("rows.csv").rows == 5


def test_names_that_no_file_can_have(kapsi, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for name, words in {
        "": "kapsi: --output: expected the name of a file, got ''",
        "folder": "kapsi: --output: expected the name of a file, got 'folder' (a folder)",
        "folder/": "kapsi: --output: expected the name of a file, got 'folder/' (a folder)",
        "file/x.csv": "kapsi: file/x.csv: 'file' is not a folder; give another path",
        "no/x.csv": "kapsi: no/x.csv: the folder 'no' does not exist; create it first",
        "x" * 300 + ".csv": f"kapsi: '{'x' * 300}.csv': cannot write the file: File name too long; "
        "check the path, its permissions and the free space",
    }.items():
        for data in ("E.3", "iris"):
            assert kapsi("data", data, "--output", name, "--overwrite") == (2, "", f"{words}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    longest = "x" * 251 + ".csv"
    assert kapsi("data", "E.3", "--output", longest)[0] == 0
    assert read_table(longest).rows == 2000


def test_an_own_formula(kapsi) -> None:
    code, out, err = kapsi(
        "data", "formula", "sqrt(x)+y", "--variable", "x:-1:3", "--variable", "y:-1:1", "--rows", 100
    )
    assert code == 0
    rows = np.array(list(csv.reader(io.StringIO(out)))[1:], dtype=float)
    np.testing.assert_array_equal(rows[:, 2], np.sqrt(rows[:, 0]) + rows[:, 1])
    assert re.fullmatch(r"note: \d+ rows redrawn: f has no finite value there\n", err)


@pytest.mark.parametrize(
    "words",
    [
        ("-x**2", "--variable", "x:-2:1", "--rows", 3),
        ("--variable", "x:-2:1", "-x**2", "--rows=3"),
        ("--rows", 3, "--variable=x:-2:1", "--", "-x**2"),
        ("--rows", 3, "--variable=x:-2:1", "--", "--(-x**2)"),
    ],
)
def test_a_formula_may_begin_with_a_minus_sign(kapsi, words) -> None:
    code, out, err = kapsi("data", "formula", *words)
    assert (code, err) == (0, "")
    rows = np.array(list(csv.reader(io.StringIO(out)))[1:], dtype=float)
    assert rows.shape == (3, 2)
    np.testing.assert_array_equal(rows[:, 1], -(rows[:, 0] ** 2))


def test_many_rows_on_the_terminal_are_those_of_a_file(kapsi, tmp_path, monkeypatch) -> None:
    import kapsi.cli.data as module

    monkeypatch.setattr(module, "WRITTEN_AT_ONCE", 7)
    code, out, _ = kapsi("data", "E.3", "--rows", 25, "--target", 'a,"b')
    assert code == 0
    assert kapsi("data", "E.3", "--rows", 25, "--target", 'a,"b', "--output", "rows.csv")[0] == 0
    assert out == (tmp_path / "rows.csv").read_text()


def test_lists(kapsi) -> None:
    code, out, err = kapsi("data")
    assert (code, err) == (0, "")
    assert kapsi("data", "list") == (0, out, "")
    for group in GROUPS:
        assert re.search(rf"^{group} +{len(problems(group))}  ", out, re.MULTILINE)
        code, listed, _ = kapsi("data", group)
        assert kapsi("data", "list", group) == (0, listed, "")
        lines = listed.splitlines()
        assert len(lines) == 1 + len(problems(group))
        for line, task in zip(lines[1:], problems(group), strict=True):
            assert line.split()[0] == task.name
            assert task.formula in line
            assert line.endswith(task.ranges)
    assert re.search(r"^I\.9\.18 +F\.2 ", kapsi("data", "feynman")[1], re.MULTILINE)
    assert "Rutherford scattering" in kapsi("data", "feynman_bonus")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("feynmann",), "there is no 'feynmann'; did you mean feynman? there are list, formula, elementary"),
        (("feynman", "I.9.19"), "there is no function 'I.9.19'; did you mean I.9.18"),
        (("feynman", "E.3"), "E.3 is not in feynman; write kapsi data elementary E.3"),
        (("list", "foo"), "there is no group of functions 'foo'"),
        (("elementary", "E.3", "E.4"), "unexpected extra argument 'E.4'"),
        (("E.3", "E.4"), "there is no 'E.3'"),
        (("elementary", "--rows", "3"), "--rows is about one function; name it"),
        (("--output", "x.csv"), "--output is about one function"),
        (("E.3", "--rows", "0"), "rows: expected an integer from 1 to 1,000,000,000, got 0"),
        (("E.3", "--seed", "-1"), "seed: expected an integer of at least 0, got -1"),
        (("E.3", "--noise", "-1"), "noise -1.0: expected a fraction of the target's standard deviation"),
        (("E.3", "--target", "x"), "--target 'x' is a variable of the function"),
        (("E.3", "--target", " "), "--target ' ' is not a valid name"),
        (("E.3", "--target", " x"), "--target ' x' is a variable of the function"),
        (("E.3", "--target", "a\nb"), r"--target 'a\nb' is not a valid name"),
        (("E.3", "--overwrite"), "--overwrite is about a file to write; name it"),
        (("list", "--overwrite"), "--overwrite is about a file to write; name it"),
        (("e.3",), "there is no 'e.3'; did you mean E.3?"),
        (("formula", "-x", "-y", "--variable", "x:0:1"), "2 formulas were given; give one, in quotes"),
        (("formula", "-rows", "3"), "there is no option -rows; did you mean --rows?"),
        (("-x",), "there is no option -x"),
        (("E.3", "--variable", "x:0:1"), "--variable is for a formula"),
        (("E.3", "--output", "x.xlsx"), "the suffix '.xlsx' is not known"),
        (("E.3", "--output", "no/x.csv"), "the folder 'no' does not exist"),
        (("formula",), "0 formulas were given; give one, in quotes"),
        (("formula", "x", "+", "y"), "3 formulas were given; give one, in quotes"),
        (("formula", "x"), "there are no variables; declare each as --variable NAME:LOW:HIGH"),
        (("formula", "x+z", "--variable", "x:0:1"), "formula 'x+z', column 3: there is no 'z'"),
        (("formula", "x", "--variable", "x=0:1"), "variable 'x=0:1': expected name:low:high"),
        (("formula", "ln(x)", "--variable", "x:-3:1"), "function f: 'ln(x)' is not finite on"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_line(kapsi, tmp_path, arguments, message) -> None:
    code, out, err = kapsi("data", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kapsi: ")
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


def test_help_shows_defaults_and_example(kapsi) -> None:
    code, out, _ = kapsi("data", "--help")
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert code == 0
    assert "[default: 2000]" in text
    assert "--variable y:0:2" in text
