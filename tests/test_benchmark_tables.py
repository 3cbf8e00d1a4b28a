"""The benchmark of table models: data, scores, records that outlive a kill, limits, ranks."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest

pd = pytest.importorskip("pandas")


class Constant:
    """A model whose outputs are one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def outputs(self, x):
        return np.full(len(x), self.value)


def mean_of(x, y, classes, seed):
    return Constant(y.mean())


def endless(x, y, classes, seed):
    while True:
        pass


def failing(x, y, classes, seed):
    raise ValueError("too few\nrows")


def small(benchmark_module):
    y = np.arange(20.0)
    return benchmark_module("tabular.data").TableData("small", pd.DataFrame({"a": y}), y, 0)


# ------------------------------------------------------------------------------------------------ data


def test_formulas_have_the_shapes_of_their_names_and_are_reproducible(benchmark_module) -> None:
    data = benchmark_module("tabular.data")
    assert len(data.NAMES) == 30
    assert len(data.WIDE) == 12
    for name in data.FORMULAS:
        table, again = data.read(name), data.read(name)
        np.testing.assert_array_equal(table.x, again.x)
        np.testing.assert_array_equal(table.y, again.y)
    table = data.read("blocks 500 × 2,000, 3 classes")
    assert table.x.shape == (500, 2000)
    assert table.classes == 3
    assert np.bincount(table.y).min() >= 166
    x = table.x.to_numpy()
    correlation = np.corrcoef(x[:, :40].T)
    assert correlation[:20, :20][np.triu_indices(20, 1)].mean() == pytest.approx(0.8, abs=0.05)
    assert correlation[:20, 20:].mean() == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize(("signal", "used"), [("linear", 30), ("sparse", 10), ("additive", 8), ("blocks", 100)])
def test_signals_depend_on_as_many_inputs_as_stated(benchmark_module, signal: str, used: int) -> None:
    width = {"linear": 30, "blocks": 200}.get(signal, 60)
    x = np.random.default_rng(0).standard_normal((50, width))
    function = benchmark_module("tabular.data").SIGNALS[signal]
    before = function(x, np.random.default_rng(1))
    changed = 0
    for i in range(width):
        moved = x.copy()
        moved[:, i] = moved[::-1, i]
        changed += not np.allclose(function(moved, np.random.default_rng(1)), before)
    assert changed == used


def test_columns_of_text_keep_missing_values_and_numbers_are_floats(benchmark_module) -> None:
    frame = pd.DataFrame({"n": [1, 2, 3], "t": ["a", None, "b"], "b": [True, False, True]})
    table = benchmark_module("tabular.data").table_of("t", frame, ["yes", "no", "yes"], "classification")
    assert table.x["n"].dtype == np.float64
    assert table.x["t"].tolist() == ["a", None, "b"]
    assert table.x["b"].tolist() == ["True", "False", "True"]
    assert table.y.tolist() == [1, 0, 1]
    assert table.classes == 2


# ------------------------------------------------------------------------------------------------ scores and records


def test_scores_are_those_of_scikit_learn(benchmark_module) -> None:
    from sklearn.metrics import accuracy_score, log_loss, r2_score, root_mean_squared_error

    records = benchmark_module("tabular.records")
    generator = np.random.default_rng(0)
    p, y = generator.dirichlet([1, 1, 1], 50), generator.integers(0, 3, 50)
    found = records.scores(p, y, 3)
    assert found["score"] == pytest.approx(accuracy_score(y, p.argmax(1)))
    assert found["loss"] == pytest.approx(log_loss(y, p), rel=1e-6)
    assert records.scores(y, y, 3) == {"score": 1.0, "loss": None}
    values, targets = generator.standard_normal(50), generator.standard_normal(50)
    found = records.scores(values, targets, 0)
    assert found["score"] == pytest.approx(r2_score(targets, values))
    assert found["loss"] == pytest.approx(root_mean_squared_error(targets, values))


def test_pooled_scores_are_those_of_all_held_out_rows(benchmark_module) -> None:
    records, page = benchmark_module("tabular.records"), benchmark_module("tabular.page")
    table = small(benchmark_module)
    found = list(records.run(table, "mean", lambda: mean_of, 0, list(range(5)), 10))
    outputs = np.zeros(20)
    for train, test in records.folds(table, 0):
        outputs[test] = table.y[train].mean()
    squares = ((outputs - table.y) ** 2).mean()
    assert page.pooled(found) == pytest.approx((1 - squares / table.y.var(), squares**0.5))


def test_failures_and_limits_are_recorded(benchmark_module) -> None:
    records = benchmark_module("tabular.records")
    table = small(benchmark_module)
    failed = list(records.run(table, "bad", lambda: failing, 0, [0, 1], 10))
    assert [record.failure for record in failed] == ["ValueError: too few rows"] * 2
    over = list(records.run(table, "slow", lambda: endless, 0, [1, 2], 0))
    assert [record.failure for record in over] == ["over the limit of 0 s", "over the limit of 0 s, as fold 1"]
    assert [record.fold for record in over] == [1, 2]


def test_a_run_continues_after_a_line_cut_off(benchmark_module, tmp_path, monkeypatch, capsys) -> None:
    tables, records = benchmark_module("tables"), benchmark_module("tabular.records")
    calls = []
    monkeypatch.setattr(tables.data, "read", lambda name: small(benchmark_module))
    monkeypatch.setattr(tables.methods, "method", lambda name: calls.append(name) or mean_of)
    file = tmp_path / "r.jsonl"
    chosen = argparse.Namespace(
        tables=["small"], methods=["mean"], seeds=[0], results=file, again=False, limit=10, threads=1
    )
    tables.measure_all(chosen)
    whole = file.read_text()
    assert len(whole.splitlines()) == 5
    file.write_text(whole[: len(whole) - 30])
    tables.measure_all(chosen)
    assert {key[2] for key in records.load([file])} == set(range(5))
    assert sum(line.endswith("}") for line in file.read_text().splitlines()) == 5
    before = file.read_text()
    tables.measure_all(chosen)
    assert file.read_text() == before
    assert json.loads(before.splitlines()[0])["method"] == "mean"
    capsys.readouterr()


# ------------------------------------------------------------------------------------------------ page


def test_ranks_share_ties_and_put_failures_last(benchmark_module) -> None:
    page, records = benchmark_module("tabular.page"), benchmark_module("tabular.records")
    scores = {"linear": 0.9, "MLP": 0.9, "XGBoost": 0.95, "EBM": None}
    found = {}
    for method, score in scores.items():
        for fold in range(5):
            failure = "" if score is not None else "over the limit of 1 s"
            loss = None if score is None else 1 - score
            record = records.Record("iris", 0, fold, method, 30, score, loss, None, 1.0, 0.1, 1, failure)
            found[record.key] = record
    comparison = page.Comparison.of(found, ["iris", "wine"], list(scores), [0, 1])
    assert comparison.seeds == {"iris": (0,)}
    expected = {"linear": [2.5], "MLP": [2.5], "XGBoost": [1.0], "EBM": [4.0]}
    assert comparison.ranks("score") == comparison.ranks("loss") == expected
    assert comparison.behind("linear") == ["iris"]
    assert comparison.behind("XGBoost") == []
    assert math.isnan(comparison.cells["iris"]["EBM"].score)
    lines = page.comparison_lines(comparison, "XGBoost", "MLP", ["iris", "wine"])
    assert any(line.startswith("| XGBoost | 1.00 | 1.00 | 1 | 0 |") for line in lines)
    assert "- iris, EBM: over the limit of 1 s" in lines
    assert "XGBoost is more than 0.02 below the best on: no table." in lines


def test_methods_are_compared_on_the_tables_that_they_have(benchmark_module) -> None:
    page, records = benchmark_module("tabular.page"), benchmark_module("tabular.records")
    tables = {"linear": "abcdef", "MLP": "abcdef", "CatBoost": "abc", "EBM": "a", "recipe:auto": "abcd"}
    found = {}
    for number, (method, names) in enumerate(tables.items()):
        for table in names:
            for fold in range(5):
                record = records.Record(table, 0, fold, method, 9, 0.5 + number / 10, 0.5, None, 1.0, 0.1, 1)
                found[record.key] = record
    assert page.method_sets(found, "abcdef", [0]) == [["linear", "MLP"], ["linear", "MLP", "CatBoost"]]
    text = "\n".join(page.section("Letters", found, "abcdef", [0]))
    assert "not compared: SVM rbf, random forest, HistGradientBoosting, XGBoost, LightGBM, EBM." in text
    assert "### recipe:auto on 4 tables" in text
    assert "4 tables, 3 methods, 1 seed(s). Not complete yet: e, f." in text
    assert "### recipe:auto on 3 tables" in text
    assert "| **recipe:auto** | 1.00 | 2.50 | 3 | 0 |" in text
