"""The benchmark of functions: their values, what is compared, records that are not measured again."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

pytest.importorskip("pandas")


@pytest.fixture
def functions(benchmark_module):
    return benchmark_module("functions")


def test_functions_have_the_rows_and_values_of_their_names(functions) -> None:
    from scipy.stats import norm

    assert len(functions.SIX) == 6
    assert len(functions.FEYNMAN) == 27
    assert functions.Rows("I.6.2", 0).x.shape == (1000, 2)
    rows = functions.Rows("Black–Scholes", 0)
    assert rows.x.shape == (400, 5)
    assert len(rows.y_test) == 1000
    s, k, t, r, v = rows.x.T
    d = (np.log(s / k) + (r + v**2 / 2) * t) / (v * np.sqrt(t))
    expected = s * norm.cdf(d) - k * np.exp(-r * t) * norm.cdf(d - v * np.sqrt(t))
    np.testing.assert_allclose(rows.y, expected, atol=0.05)
    rows = functions.Rows("abs x and steps", 0)
    x = rows.x[:, 0]
    np.testing.assert_allclose(rows.y, abs(x) + 0.25 * np.sign(x - 0.3) - 0.25 * np.sign(x + 0.5), atol=1e-9)


def test_a_run_continues_and_the_page_compares_with_the_best_other(functions, tmp_path, monkeypatch, capsys) -> None:
    error = {"kapsi fit": 0.1, "CatBoost": 0.2, "gplearn": 0.08}

    def of(method):
        return lambda rows, seed: rows.y_test + error[method] * rows.y_test.std()

    monkeypatch.setattr(functions, "METHODS", {method: (of(method), "numpy") for method in error})
    file, page = tmp_path / "r.jsonl", tmp_path / "p.md"
    names = ["sin 20x", "xy/z²", "I.6.2"]
    chosen = argparse.Namespace(functions=names, methods=list(error), seeds=[0], results=file, again=False, page=None)
    monkeypatch.setattr(functions, "parse", lambda: chosen)
    assert functions.main() == 0
    whole = file.read_text(encoding="utf-8")
    assert len(whole.splitlines()) == 7  # one of I.6.2
    assert functions.main() == 0
    assert file.read_text(encoding="utf-8") == whole
    chosen.page = page
    functions.main()
    text = page.read_text(encoding="utf-8")
    assert "| sin 20x | 0.1 | 0.2 | **0.08** | 1.25 |" in text
    assert "At most 1.2 times the best other: 0 of 2 functions." in text
    assert "1 of 27 functions." in text
    capsys.readouterr()


def test_a_failure_is_recorded(functions, monkeypatch) -> None:
    monkeypatch.setattr(functions, "METHODS", {"bad": (lambda rows, seed: 1 / 0, "numpy")})
    record = functions.measure("sin 20x", "bad", 0)
    assert record.failure == "ZeroDivisionError: division by zero"
