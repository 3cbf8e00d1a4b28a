"""The benchmark of formula recovery: verdicts and counts."""

from __future__ import annotations

import pytest
import sympy

from kapsi.data.problems import problem


@pytest.fixture
def formulas(benchmark_module):
    return benchmark_module("formulas")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("sin(x + y)", "equal"), ("1.001*sin(x + y)", "close"), ("x + y", "miss"), ("log(x - 9)", "miss")],
)
def test_a_formula_is_equal_by_its_values(formulas, text, verdict) -> None:
    symbols = list(sympy.symbols("x y", real=True))
    expression = sympy.sympify(text, {s.name: s for s in symbols})
    assert formulas.verdict({"deviation": formulas.deviation(problem("E.5"), expression, symbols)}) == verdict


def test_counts_are_of_whole_seeds(formulas) -> None:
    """Seed 0 has all, seed 1 misses E.2, seed 2 has one function only and is left out."""
    record = {"method": "kapsi", "noise": 0.0, "seconds": 2.0, "deviation": 0.0}
    records = [{**record, "name": f"E.{i}", "seed": seed} for seed in (0, 1) for i in range(17)]
    records[19]["deviation"] = None
    rows = formulas.counts([*records, {**record, "name": "E.0", "seed": 2}])
    assert rows[2] == "| elementary | 0 | kapsi | 2 | 16.5 | 16 | 0 | 17 | 14 | 2.0 | 2.0 |"
    assert rows[3] == "| elementary | 0 | gplearn | not measured | | | | 17 | 14 | | |"
