"""Tables and pictures of results: the arithmetic against numpy, and what each format shows."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import reproduce_procedure
from kapsi.cli import main
from kapsi.errors import SpecError
from kapsi.paper import expected as printed
from kapsi.paper import experiment as experiments
from kapsi.paper.baselines import comparisons, difference
from kapsi.paper.expected import Expected, Printed, load_expected
from kapsi.paper.experiment import Budget, Experiment, Outcome, PaperComparison, load
from kapsi.paper.overview import against_baselines, overview, readme, short_overview
from kapsi.paper.pictures import pictures
from kapsi.paper.render import as_html, as_markdown, as_text
from kapsi.paper.store import Result, ResultStore
from kapsi.paper.tables import ResultTable, build

TEXT = """
name: tiny
title: A <b>tiny</b> table & more
source: nowhere
metric: METRIC
procedure: fake
rows: ROWS
seeds: 3
methods:
  kapsi: {label: kapsi, headline: true}
  mlp: {label: MLP <1>, options: {scale: 2}}
  recipe: {label: recipe, protocol: paper, options: {scale: 3}}
"""
COLUMNS = ("mlp", "rpn_ext", "rpn_nstd")
EXPECTED = Expected(
    COLUMNS,
    {
        "a": {"mlp": Printed(0.5, 0.1, 51), "rpn_ext": Printed(1e-2, 1e-3, 47), "rpn_nstd": Printed(2e-2, 1e-3, 547)},
        "b": {"mlp": Printed(0.5, 0.1, 51), "rpn_ext": Printed(1e-2, 1e-3, 47), "rpn_nstd": Printed(5e-3, 1e-3, 547)},
        "c": {"mlp": Printed(0.5), "rpn_ext": Printed(1e-2), "rpn_nstd": Printed()},
    },
)


@pytest.fixture(autouse=True)
def _procedure(monkeypatch) -> None:
    monkeypatch.setitem(experiments.PROCEDURES, "fake", "reproduce_procedure")


def tiny(folder: Path, metric: str = "mse", rows: str = "[a, b, c]", more: str = "") -> Experiment:
    path = folder / "tiny.yaml"
    path.write_text(TEXT.replace("METRIC", metric).replace("ROWS", rows) + more, encoding="utf-8")
    return load(path)


def made(experiment: Experiment, scores: dict[tuple[str, str], list[float]], **more) -> list[Result]:
    """Return results with given scores, one a seed."""
    found = []
    for (row, method), values in scores.items():
        for seed, score in enumerate(values):
            run = experiment.run(experiment.row(row), experiment.method(method), seed)
            outcome = Outcome(score, score * 2, 60 + seed, extra={"best_epoch_on_test": score / 2})
            started = "2026-01-01T00:00:00+00:00"
            found.append(replace(Result.of(run, outcome, started=started, seconds=2.0, cpu_seconds=3.0), **more))
    return found


SCORES = {
    ("a", "kapsi"): [1e-5, 2e-5, 4e-5],
    ("b", "kapsi"): [1e-3, 1e-3, 2e-3],
    ("c", "kapsi"): [0.1, 0.1, 0.4],
    ("a", "mlp"): [1e-6, 1e-6, 1e-6],
    ("b", "mlp"): [1.0, 1.0, math.inf],
    ("a", "recipe"): [0.3, 0.3, 0.3],
}


def test_means_deviations_and_factors_are_those_of_numpy(tmp_path) -> None:
    experiment = tiny(tmp_path)
    table = build(experiment, EXPECTED, made(experiment, SCORES))
    for line in table.lines:
        for method in ("kapsi", "mlp"):
            scores = SCORES.get((line.row.name, method))
            if scores is None:
                assert method not in line.statistics
            elif np.isfinite(scores).all():
                assert line.statistics[method].mean == pytest.approx(np.mean(scores), rel=1e-15)
                assert line.statistics[method].std == pytest.approx(np.std(scores), rel=1e-12)
            assert (scores is None) or line.statistics[method].count == 3
    a, b, c = table.lines
    # The better of the two columns of the paper's own method.
    assert (a.reference, b.reference, c.reference) == (1e-2, 5e-3, 1e-2)
    assert (a.reference_name, b.reference_name) == ("RPN extended", "RPN nested")
    assert a.factor == pytest.approx(1e-2 / np.mean(SCORES["a", "kapsi"]))
    assert c.factor == pytest.approx(1e-2 / 0.2)
    assert (table.done, table.named) == (3, 3)
    assert table.cpu_seconds == 18 * 3.0
    found = a.statistics["kapsi"]
    assert (found.parameters, found.seconds, found.cpu_seconds, found.total) == (62, 2.0, 3.0, 9.0)
    assert found.validation == pytest.approx(2 * found.mean)
    assert found.best_epoch == pytest.approx(found.mean / 2)


def test_the_summary_counts_and_shows_losses(tmp_path) -> None:
    experiment = tiny(tmp_path)
    paper, mlp, recipe = build(experiment, EXPECTED, made(experiment, SCORES)).summary()
    assert paper == (
        "compared with the paper (the better of RPN extended, RPN nested): MSE ≥ 100× lower in 1 of 3 rows, ≥ 10× lower in 1,"
        " not higher in 2; worse: c (20× higher)"
    )
    # 1e-6 against a mean of 2.33e-5; an infinite error is above every other.
    assert mlp == (
        "compared with MLP <1> here: MSE ≥ 100× lower in 1 of 2 rows, ≥ 10× lower in 1, not higher in 1;"
        " worse: a (23.3× higher)"
    )
    assert recipe.startswith("compared with recipe here (best epoch on test): MSE ≥ 100× lower in ")
    assert recipe.endswith("of 1 row, ≥ 10× lower in 1, not higher in 1")


def test_an_error_that_is_not_finite_is_worse_than_all(tmp_path) -> None:
    experiment = tiny(tmp_path)
    for bad in (math.inf, math.nan):
        table = build(experiment, EXPECTED, made(experiment, {("a", "kapsi"): [1e-9, bad, 1e-9]}))
        assert table.lines[0].factor == 0
        assert "worse: a (not finite)" in table.summary()[0]
        for text in (as_text(table), as_markdown(table), as_html(table)):
            assert "not finite" in text


def test_what_is_not_finite_or_zero_on_the_other_side(tmp_path) -> None:
    experiment = tiny(tmp_path, more="compare: {instead: {a: mlp, b: mlp}}\n")
    scores = {("a", "kapsi"): [0.5], ("a", "mlp"): [math.nan], ("b", "kapsi"): [0.5], ("b", "mlp"): [0.0]}
    table = build(experiment, EXPECTED, made(experiment, scores))
    assert [line.factor for line in table.lines[:2]] == [math.inf, 0.0]
    assert "worse: b (above 0)" in table.summary()[0]
    assert "MLP <1> ∞×" in as_text(table, 400)
    experiment = tiny(tmp_path, "accuracy", more="compare: {instead: {a: mlp}}\n")
    table = build(experiment, Expected(), made(experiment, {("a", "kapsi"): [0.5], ("a", "mlp"): [math.nan]}))
    assert table.lines[0].factor == math.inf
    assert table.summary()[0].endswith("accuracy not lower in 1 of 1 row")


def test_results_from_elsewhere_do_not_move_the_cursor(tmp_path) -> None:
    experiment = tiny(tmp_path)
    machine = {"cpu": "a \x1b[2J\nprocessor", "cores": 1, "os": "x"}
    for text in (as_text, as_markdown, as_html):
        shown = text(build(experiment, EXPECTED, made(experiment, {("a", "kapsi"): [1.0]}, machine=machine)))
        assert "\x1b" not in shown
        assert "a ?" in shown


def test_curves_of_a_method_with_seeds_of_its_own_are_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    experiment = tiny(tmp_path, more="pictures: [learning-curves]\n")
    methods = tuple(replace(method, seeds=(7,)) for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    results = [replace(one, seed=7) for one in made(experiment, {("a", "kapsi"): [1.0]}, curves={"test": [1.0, 0.5]})]
    assert len(pictures(build(experiment, EXPECTED, results), results)) == 1


def test_a_picture_names_the_rows_that_are_not_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    experiment = tiny(tmp_path, more="pictures: [functions]\n")
    for scores, name in (([1.0, 0.0, 2.0], "b"), ([math.inf, 1.0, 1.0], "a"), ([1.0, 1.0, 1.0], "")):
        results = made(experiment, {(row, "kapsi"): [score] for row, score in zip("abc", scores, strict=True)})
        (picture,) = pictures(build(experiment, EXPECTED, results), results)
        assert ("not drawn" in picture.svg) is bool(name)
        assert not name or re.search(f"not drawn, zero or not finite: {name}\\b(?!,)", picture.svg)


def test_the_graph_of_a_row_stays_in_the_folder(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    experiment = tiny(tmp_path, rows='["../x (1)", b]', more="pictures: [dependency]\n")
    extra = {"arrows": [[0, 1]], "lines": []}
    results = made(experiment, {("../x (1)", "kapsi"): [1.0]}, extra=extra)
    assert [picture.file for picture in pictures(build(experiment, EXPECTED, results), results)] == ["tiny-..-x-1-.svg"]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("functions", '["$\\\\foo$", b]'),
        ("learning-curves", '["$\\\\foo$", b]'),
        ("rank-sweep", '{grid: {n: ["$\\\\foo$", b]}}'),
        ("rank-sweep", "{grid: {n: [1, b]}}"),
        ("ablation", '{grid: {n: ["$\\\\foo$", b], m: [1, 2]}}'),
    ],
)
def test_dollars_are_no_formulas_and_names_may_be_an_axis(tmp_path, monkeypatch, kind, rows) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys.modules[__name__], "TEXT", TEXT.replace("A <b>tiny</b>", "A $\\foo$ of $"))
    experiment = tiny(tmp_path, "mse", rows, f"pictures: [{kind}]\n")
    results = made(experiment, {(row.name, "kapsi"): [0.1] for row in experiment.rows}, curves={"test": [1.0, 0.5]})
    assert pictures(build(experiment, EXPECTED, results), results)


def test_accuracies_are_compared_by_difference(tmp_path) -> None:
    expected = Expected(("rpn",), {name: {"rpn": Printed(0.9, 0.01)} for name in "abc"})
    experiment = tiny(tmp_path, "accuracy")
    scores = {("a", "kapsi"): [0.92, 0.92, 0.92], ("b", "kapsi"): [0.9, 0.9, 0.9], ("c", "kapsi"): [0.85, 0.85, 0.85]}
    table = build(experiment, expected, made(experiment, scores))
    assert [line.factor for line in table.lines] == pytest.approx([0.02, 0.0, -0.05])
    assert table.summary() == ["compared with the paper (RPN): accuracy not lower in 2 of 3 rows; worse: c (-0.0500)"]
    text = as_text(table)
    assert "kapsi +0.0200" in text
    assert "paper +0.0500" in text
    assert "equal" in text


def test_rows_with_a_pole_are_compared_on_the_same_rows(tmp_path) -> None:
    experiment = tiny(tmp_path, more="compare: {paper: [rpn_ext], instead: {a: recipe}, reason: a pole}\n")
    table = build(experiment, EXPECTED, made(experiment, SCORES))
    assert table.lines[0].reference == pytest.approx(0.3)
    assert table.lines[0].reference_name == "recipe"
    first, second, *_ = table.summary()
    assert first.startswith("compared with the paper (RPN extended): MSE ≥ 100× lower in ")
    assert second.startswith("compared with recipe on the same rows (a pole): MSE ")
    without = build(experiment, EXPECTED, made(experiment, {("a", "kapsi"): [1.0, 1.0, 1.0]}))
    assert without.lines[0].factor is None


def test_other_configurations_seeds_and_environments_are_told_apart(tmp_path) -> None:
    experiment = tiny(tmp_path)
    changed = tiny(tmp_path, more="options: {iterations: 9}\n")
    own = made(experiment, {("a", "kapsi"): [1.0, 1.0, 1.0]})
    stale = made(changed, {("a", "kapsi"): [5.0, 5.0]})
    further = [replace(own[0], seed=100, score=7.0)]
    elsewhere = {**own[0].machine, "cpu": "another <processor>"}
    other = made(experiment, {("a", "kapsi"): [9.0] * 3, ("b", "kapsi"): [4.0] * 3}, machine=elsewhere)
    table = build(experiment, EXPECTED, [*stale, *other, *further, *own])
    assert table.lines[0].statistics["kapsi"].mean == 1.0
    assert table.lines[1].statistics["kapsi"].mean == 4.0
    assert (table.lines[0].statistics["kapsi"].mark, table.lines[1].statistics["kapsi"].mark) == ("", "ᵃ")
    assert [environment.count for environment in table.environments] == [3, 3]
    assert "2 results of other configurations in the store are not shown" in table.notes
    assert "1 results of other seeds in the store are not shown" in table.notes
    assert "3 results of other versions or machines in the store are not shown" in table.notes
    assert "ᵃ kapsi" in as_text(table)
    assert build(experiment, EXPECTED, [*own, *further], seeds=[100]).lines[0].statistics["kapsi"].mean == 7.0


def test_parameters_are_a_range_where_seeds_select_models_of_different_sizes(tmp_path) -> None:
    experiment = tiny(tmp_path)
    results = made(experiment, {("a", "kapsi"): [1.0] * 3, ("b", "kapsi"): [1.0] * 3})
    sizes = [20652, 660994, 53932, 1725954, 1725954, 1725954]
    results = [replace(result, parameters=size) for result, size in zip(results, sizes, strict=True)]
    table = build(experiment, EXPECTED, results)
    assert "| 20,652 to 1,725,954 |" in overview([table])
    assert "| 20,652 to 660,994 |" in as_markdown(table)
    assert "| 1,725,954 |" in as_markdown(table)


def test_the_overview_names_the_headline_of_a_row_with_another_one(tmp_path) -> None:
    first, *others = tiny(tmp_path).methods
    first, own = replace(first, rows=("a", "b")), replace(first, name="own", label="an MLP", rows=("c",))
    experiment = replace(tiny(tmp_path), methods=(first, own, *others), compare=PaperComparison())
    results = made(experiment, {("a", "kapsi"): [1.0], ("b", "kapsi"): [2.0], ("c", "own"): [3.0]})
    shown = overview([build(experiment, Expected(), results)])
    assert "a 1, b 2, c 3 (an MLP)" in shown


def test_marks_go_by_the_number_of_results(tmp_path) -> None:
    experiment = tiny(tmp_path)
    own = made(experiment, {("a", "kapsi"): [1.0, 1.0, 1.0]})
    elsewhere = {**own[0].machine, "cpu": "another <processor>"}
    other = made(experiment, {("b", "kapsi"): [4.0] * 3, ("c", "kapsi"): [4.0] * 3}, machine=elsewhere)
    table = build(experiment, EXPECTED, [*own, *other])
    assert [line.statistics["kapsi"].mark for line in table.lines] == ["ᵃ", "", ""]
    assert [environment.count for environment in table.environments] == [6, 3]
    assert "ᵃ" in as_text(table)
    assert "ᵃ" not in overview([table])


def test_the_best_of_a_sweep_is_told(tmp_path) -> None:
    experiment = tiny(tmp_path, rows="{grid: {rank: 1..3}}")
    scores = {("rank 1", "kapsi"): [1e-3], ("rank 2", "kapsi"): [1e-8], ("rank 3", "kapsi"): [math.nan]}
    expected = Expected(("rpn",), {"rank 1": {"rpn": Printed(7.81e-6)}, "rank 3": {"rpn": Printed()}})
    table = build(experiment, expected, made(experiment, scores))
    best = "best here: rank 2, 1e-08, 60 parameters; in the paper: rank 1, 7.81e-06"
    assert table.summary()[-1] == best
    assert "best 1e-08 (7.81e-06)" in overview([table])


def test_of_equal_results_the_last_counts(tmp_path) -> None:
    experiment = tiny(tmp_path)
    twice = made(experiment, {("a", "kapsi"): [1.0]}) + made(experiment, {("a", "kapsi"): [2.0]})
    table = build(experiment, EXPECTED, twice)
    assert (table.lines[0].statistics["kapsi"].mean, table.lines[0].statistics["kapsi"].count) == (2.0, 1)


def test_what_is_left_out_is_named_with_its_reason(tmp_path) -> None:
    experiment = tiny(
        tmp_path, more="exclude: [{rows: [b], reason: too wide}, {method: mlp, rows: [a], reason: slow}]\n"
    )
    table = build(experiment, EXPECTED, made(experiment, {("a", "kapsi"): [1.0]}))
    assert [line.row.name for line in table.lines] == ["a", "c"]
    assert "left out: b: too wide" in table.notes
    assert "left out: a with MLP <1>: slow" in table.notes


def full(tmp_path: Path) -> ResultTable:
    experiment = tiny(tmp_path)
    return build(experiment, EXPECTED, made(experiment, SCORES))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_terminal_has_no_longer_lines_in_the_table(tmp_path, width) -> None:
    text = as_text(full(tmp_path), width)
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("──"))
    assert all(len(line) <= width for line in lines)
    assert rule
    assert "kapsi 429×" in text
    assert ("dropped columns" in text) == (width < 160)
    assert "left out" not in as_text(full(tmp_path), 400)


def test_columns_are_aligned(tmp_path) -> None:
    lines = as_text(full(tmp_path), 400).splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("──"))
    end = lines[rule - 2].index("MLP <1>") + len("MLP <1>")
    assert lines[rule + 1][:end].endswith("1e-06 ± 0")
    assert lines[rule + 2][:end].endswith("not finite")


def test_html_is_escaped_and_needs_nothing_else(tmp_path) -> None:
    page = as_html(full(tmp_path), [("a <picture>", "<svg/>")])
    assert "A &lt;b&gt;tiny&lt;/b&gt; table &amp; more" in page
    assert "<b>" not in page
    assert "MLP &lt;1&gt;" in page
    assert "<picture>" not in page
    assert "prefers-color-scheme: dark" in page
    for address in ("http:", "https:", "<script", "<link"):
        assert address not in page
    assert page.count("<tr>") == page.count("</tr>") == 4


def test_markdown_is_escaped_and_has_equal_columns(tmp_path) -> None:
    text = as_markdown(full(tmp_path))
    assert "\\<b\\>tiny" in text
    assert "table \\& more" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 5
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "parameters of RPN nested" in rows[0]


def test_a_table_without_results(tmp_path) -> None:
    experiment = tiny(tmp_path)
    table = build(experiment, Expected(), [])
    assert (table.done, table.named, table.summary()) == (0, 3, [])
    assert "no results yet" in as_text(table)
    assert "No results yet." in as_markdown(table)
    assert "No results yet." in as_html(table)
    assert pictures(replace(table, experiment=replace(experiment, pictures=("functions",)))) == []
    # What the paper prints is shown all the same.
    assert "RPN nested" in as_text(build(experiment, EXPECTED, []))


GRID = "{grid: {expansion: [taylor, fourier], psi: [lorr, dense], pi: [zero, linear]}}"


def test_a_grid_has_best_median_and_mean_by_value(tmp_path) -> None:
    experiment = tiny(tmp_path, "accuracy", GRID)
    numbers = [0.1, 0.5, 0.3, 0.9, 0.2, 0.6, 0.7, 0.8]
    scores = {(row.name, "kapsi"): [number] for row, number in zip(experiment.rows, numbers, strict=True)}
    table = build(experiment, Expected(), made(experiment, scores))
    found = {(entry.axis, entry.value): entry for entry in table.axes}
    assert len(found) == 6
    taylor, zero = found["expansion", "taylor"], found["pi", "zero"]
    assert (taylor.best, taylor.median, taylor.mean, taylor.count) == pytest.approx((0.9, 0.4, 0.45, 4))
    assert (zero.best, zero.median, zero.mean) == pytest.approx((0.7, 0.25, np.mean([0.1, 0.3, 0.2, 0.7])))
    assert [entry.value for entry in table.axes[:2]] == ["taylor", "fourier"]  # the best first
    assert "median" in as_text(table)
    assert "## By psi" in as_markdown(table)
    assert "<h2>By psi</h2>" in as_html(table)


# ------------------------------------------------------------------------------------------------ the paper's results


def test_the_numbers_of_the_paper_are_as_printed() -> None:
    found = load_expected(_named("elementary.csv"))
    assert found.get("E.12", "rpn_nstd") == Printed(4.47e-08, 3.42e-08, 547)
    assert load_expected(_named("feynman.csv")).get("I.18.4", "rpn_ext") == Printed(0.000992, 0.000482)
    assert load_expected(_named("feynman.csv")).get("F.7", "rpn_ext") == Printed(0.000992, 0.000482)
    assert load_expected(_named("feynman.csv")).get("D.I.18.4", "kan").mean == 0.02
    assert load_expected(_named("rank-sweep.csv")).get("rank 6", "rpn") == Printed(7.81e-06)
    assert load_expected(_named("tabular.csv")).get("pima", "rpn_combinatorial_normal") == Printed(0.78, 0.0336)
    assert load_expected(_named("discrete.csv")).get("sst2", "svm_linear") == Printed(0.801)


@pytest.mark.parametrize("path", sorted(printed.FOLDER.glob("*.csv")), ids=lambda path: path.stem)
def test_every_file_of_numbers_can_be_read(path) -> None:
    found = load_expected(_named(path.name))
    assert found.rows
    assert set(found.columns) <= set(printed.LABELS)
    for row in found.rows.values():
        for value in row.values():
            assert value.std is None or (value.mean is not None and value.std >= 0)
            assert value.mean is None or value.mean > 0


def _named(file: str) -> Experiment:
    return Experiment("x", "x", "x", "mse", "functions", ["a"], {"kapsi": {}}, expected=file)


def test_a_column_that_is_not_there(tmp_path) -> None:
    experiment = replace(tiny(tmp_path, more="compare: {paper: [rpn_x]}\n"), expected="elementary.csv")
    with pytest.raises(
        SpecError, match=r"compare\.paper: elementary\.csv: there is no 'rpn_x'; did you mean rpn_ext\?"
    ):
        load_expected(experiment)
    with pytest.raises(SpecError, match=r"expected: there is no 'nowhere.csv'; there are composite-variants.csv"):
        load_expected(replace(experiment, expected="nowhere.csv"))
    without = r"compare\.paper: 'rpn_x' is a column of the paper's results; give expected"
    with pytest.raises(SpecError, match=without):
        load_expected(replace(experiment, expected=None))


# ------------------------------------------------------------------------------------------------ pictures and pages


@pytest.mark.parametrize(
    ("kind", "rows", "files"),
    [
        ("functions", "[a, b, c]", ["tiny.svg"]),
        ("rank-sweep", "{grid: {rank: 1..3}}", ["tiny.svg"]),
        ("depth-heads", "{grid: [{layers: 1..2}, {heads: 1..2}]}", ["tiny.svg"]),
        ("learning-curves", "[a, b]", ["tiny.svg"]),
        ("ablation", GRID, ["tiny-bars.svg", "tiny-maps.svg"]),
        ("pairs", "[a]", ["tiny-pairs.svg"]),
    ],
)
@pytest.mark.parametrize("metric", ["mse", pytest.param("accuracy", marks=pytest.mark.slow)])
def test_pictures_are_drawn_and_the_same_every_time(tmp_path, kind, rows, files, metric) -> None:
    pytest.importorskip("matplotlib")
    experiment = tiny(tmp_path, metric, rows, f"pictures: [{kind}]\n")
    scores = {(row.name, "kapsi"): [0.1, 0.2 + place] for place, row in enumerate(experiment.rows)}
    scores[experiment.rows[0].name, "kapsi"] = [0.1, math.nan]
    results = made(experiment, scores, curves={"iteration": [0, 10], "train": [1.0, 0.1], "test": [2.0, 0.5]})
    table = build(experiment, EXPECTED, results)
    drawn = pictures(table, results)
    assert [picture.file for picture in drawn] == files
    assert drawn == pictures(table, results)
    for picture in drawn:
        assert "<svg" in picture.svg
        assert "<dc:date>" not in picture.svg
        assert picture.svg.count("</svg>") == 1
    if kind == "learning-curves":
        assert pictures(build(experiment, EXPECTED, made(experiment, scores)), made(experiment, scores)) == []


def test_the_summary_of_all_experiments(tmp_path) -> None:
    table = full(tmp_path)
    few = "a 2.33e-05 (0.01), b 0.00133 (0.005), c 0.2 (0.01)"
    assert (
        overview([table]).splitlines()[2]
        == f"| [tiny](tiny.md) | 3 of 3 | 1 of 3 | 2 of 3 | {few} |  | 60 to 62 | 54 s |"
    )
    experiment = tiny(tmp_path, rows="[a, b, c, d, e, f, g]")
    many = build(experiment, EXPECTED, made(experiment, SCORES))
    line = overview([many], None).splitlines()[2]
    assert line.startswith("| tiny | 3 of 7 | 1 of 3 | 2 of 3 |")
    assert (
        overview([build(experiment, EXPECTED, [])], "x/").splitlines()[2]
        == "| tiny | 0 of 7 |  |  | not run |  |  |  |"
    )
    page = readme([table], {"tiny": "kapsi reproduce tiny"})
    assert "kapsi reproduce tiny\n" in page
    assert table.environments[0].versions["torch"] in page.replace("\\", "")


def test_pages_are_written_from_the_store_alone(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    experiment = tiny(tmp_path, more="pictures: [functions]\n")
    store = ResultStore("results", "tiny")
    for one in made(experiment, SCORES):
        store.append(one)
    page = tmp_path / "PAGE.md"
    page.write_text(
        "before\n<!-- results of kapsi reproduce -->\nold\n<!-- end of results -->\nafter\n", encoding="utf-8"
    )
    monkeypatch.setattr("kapsi.paper.runner.run_experiments", None)  # would be a TypeError
    assert main(["reproduce", "tiny.yaml", "--summary", "--into", "PAGE.md"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.splitlines()[-1].startswith("rows: 3 of ")
    names = {entry.name for entry in Path("results").iterdir()}
    assert names == {"tiny.jsonl", "tiny.md", "tiny.html", "tiny.svg", "README.md"}
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- results of kapsi reproduce -->\n| experiment |")
    assert "old" not in text
    assert "| [tiny](results/tiny.md) | 3 of 3 |" in text
    assert text.endswith("<!-- end of results -->\nafter\n")
    written = {entry.name: entry.read_bytes() for entry in Path("results").iterdir()}
    assert main(["reproduce", "tiny.yaml", "--summary"]) == 0
    assert written == {entry.name: entry.read_bytes() for entry in Path("results").iterdir()}
    page.write_text("no marks", encoding="utf-8")
    assert main(["reproduce", "tiny.yaml", "--summary", "--into", "PAGE.md"]) == 2
    assert "put them where the overview belongs" in capsys.readouterr().err


def test_the_overview_counts_rows_won_and_lost_against_baselines(tmp_path) -> None:
    experiment = tiny(tmp_path)
    methods = tuple(replace(method, baseline=method.name == "mlp") for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    table = build(experiment, EXPECTED, made(experiment, SCORES))
    # Rows a and b have both: 2.33e-5 against 1e-6, and 1.33e-3 against infinity.
    assert against_baselines(table) == "MLP <1> a 23× worse, b ∞× better"
    scores = SCORES | {("b", "mlp"): [0.01] * 3, ("c", "mlp"): [0.1] * 3}
    (found,) = comparisons(build(experiment, EXPECTED, made(experiment, scores)))
    own = [np.mean(SCORES[row, "kapsi"]) for row in "abc"]
    assert found.factors == pytest.approx([1e-6 / own[0], 0.01 / own[1], 0.1 / own[2]])
    assert (found.better, found.worse, found.median) == (1, 2, pytest.approx(0.5))
    table = build(experiment, EXPECTED, made(experiment, scores))
    assert "MLP \\<1\\> 1 : 2 (2× worse)" in overview([table])
    assert against_baselines(build(tiny(tmp_path), EXPECTED, made(experiment, scores))) == ""


def test_accuracies_against_baselines_are_differences(tmp_path) -> None:
    experiment = tiny(tmp_path, "accuracy")
    methods = tuple(replace(method, baseline=method.name == "mlp") for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    scores = {(row, "kapsi"): [0.9] for row in "abc"} | {("a", "mlp"): [0.8], ("b", "mlp"): [0.9], ("c", "mlp"): [0.95]}
    assert against_baselines(build(experiment, EXPECTED, made(experiment, scores))) == "MLP <1> 1 : 1 (+0.0000; 1 seed)"


def test_the_search_of_each_method_is_counted_and_differences_are_told(tmp_path, monkeypatch) -> None:
    budgets = {"kapsi": Budget(3, 24, 900), "mlp": Budget(3, 24, 900)}
    monkeypatch.setattr(reproduce_procedure, "budget", lambda run: budgets[run.method], raising=False)
    experiment = tiny(tmp_path)
    methods = tuple(replace(method, baseline=method.name == "mlp") for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    table = build(experiment, EXPECTED, made(experiment, SCORES))
    assert difference(table) == ""
    assert "equal numbers of candidates, starts, epochs and seeds in tiny" in overview([table])
    budgets["mlp"] = Budget(1, 96, 900)
    assert difference(table) == "MLP <1>: fewer candidates and more starts"
    assert "- tiny: MLP \\<1\\>: fewer candidates and more starts" in overview([table])
    shown = "kapsi: 3 candidates, 24 starts, 900 epochs, 3 seeds; MLP <1>: 1 candidate, 96 starts, 900 epochs, 3 seeds"
    assert shown in as_text(table, 400)
    budgets["mlp"] = Budget(3, 24)
    assert difference(table) == ""
    assert "MLP <1>: 3 candidates, 24 starts, 3 seeds" in as_text(table, 400)


def test_seeds_of_several_machines_complete_each_other(tmp_path) -> None:
    experiment = tiny(tmp_path)
    one, two, three = made(experiment, {("a", "kapsi"): [1.0, 2.0, 3.0]})
    elsewhere = {**one.machine, "cpu": "another"}
    moved = [replace(one, machine=elsewhere, score=9.0), replace(two, machine=elsewhere)]
    (line, *_) = build(experiment, EXPECTED, [one, *moved, three]).lines
    assert (line.statistics["kapsi"].count, line.statistics["kapsi"].mean) == (3, 2.0)
    assert line.statistics["kapsi"].mark == "ᵃ"
    newer = [replace(one, versions={**one.versions, "kapsi": "9"}) for one in moved]
    (line, *_) = build(experiment, EXPECTED, [one, *newer, three]).lines
    assert (line.statistics["kapsi"].count, line.statistics["kapsi"].mean) == (2, 2.0)


def test_medians_tell_single_seeds_from_most(tmp_path) -> None:
    experiment = tiny(tmp_path, rows="[a, b, c, d, e, f, g]")
    own = {"kapsi": "rpn_ext", "recipe": "rpn_nstd"}
    methods = tuple(replace(method, paper=own.get(method.name)) for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    scores = {(row, "kapsi"): [1e-3] * 3 for row in "bcdefg"}
    scores |= {("a", "kapsi"): [1e-3, 2e-3, 3.0], ("a", "recipe"): [2.0, 1.0, 0.5]}
    table = build(experiment, EXPECTED, made(experiment, scores))
    assert table.lines[0].statistics["kapsi"].median == 2e-3
    ext, nested = (line for line in table.summary() if "own column" in line)
    assert "not higher in 2; worse: a" in ext
    assert ext.endswith("; medians over seeds not higher in 3 of 3")
    assert nested.endswith("; medians over seeds not higher in 0 of 1")
    # Row a of the first model is compared with the second on the same rows.
    methods = tuple(replace(m, instead={"a": "recipe"} if m.name == "kapsi" else {}) for m in methods)
    table = build(replace(experiment, methods=methods), EXPECTED, made(experiment, scores))
    (_, pairs), _ = table.own_columns()
    assert pairs[0][1] == pytest.approx(3.5 / 3.003)
    ext, _ = (line for line in table.summary() if "own column" in line)
    assert ext.startswith("compared with its own column in the paper: kapsi (a: recipe, on the same rows): MSE")
    assert "not higher in 3" in ext
    assert "kapsi (a: recipe, on the same rows): 0 of 3" in overview([table])
    assert table.lines[0].own_reference(methods[0]) == pytest.approx(3.5 / 3)
    assert table.lines[0].own_reference(methods[0], median=True) == 1.0


def test_models_with_their_own_columns_are_compared_with_these(tmp_path) -> None:
    experiment = tiny(tmp_path, rows="[a, b, c, d, e, f, g]")
    own = {"kapsi": "rpn_ext", "recipe": "rpn_nstd"}
    methods = tuple(replace(method, paper=own.get(method.name)) for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    scores = {(row, "kapsi"): [1e-3] for row in "abcdefg"} | {("a", "recipe"): [1.0], ("b", "recipe"): [1e-3]}
    table = build(experiment, EXPECTED, made(experiment, scores))
    ((first, ext), (second, nested)) = table.own_columns()
    assert (first.name, [factor for _, factor in ext]) == ("kapsi", pytest.approx([10, 10, 10]))
    assert (second.name, [factor for _, factor in nested]) == ("recipe", pytest.approx([0.02, 5]))
    assert "rows worse than the same model in the paper: kapsi: 0 of 3; recipe: 1 of 2" in overview([table])
    assert "compared with its own column in the paper: recipe: " in "\n".join(table.summary())
    assert "worse: a (50× higher)" in "\n".join(table.summary())
    assert "medians" not in "\n".join(table.summary())
    # Each printed column stands before the column of its method.
    headings = [cell.split("<br>")[0].strip() for cell in as_markdown(table).split("\n|")[1].split("|")]
    assert [headings.index(name) for name in ("RPN extended", "kapsi", "RPN nested", "recipe")] == [2, 3, 4, 5]
    assert "Preliminary, as rows have fewer than three seeds:\n\n- tiny: kapsi; recipe\n" in overview([table])
    assert "fewer than three seeds, hence preliminary results, in tiny. [Details](r/README.md)" in overview(
        [table], "r/", "r/README.md"
    )
    assert "reliminary" not in overview([full(tmp_path)])


def test_methods_measured_here_are_compared_over_their_common_seeds(tmp_path) -> None:
    experiment = tiny(tmp_path, more="compare: {instead: {b: recipe}}\n")
    methods = tuple(replace(method, baseline=method.name == "mlp") for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    results = made(experiment, SCORES | {("a", "mlp"): [4e-6], ("b", "recipe"): [2.0, 6.0], ("c", "mlp"): [0.1]})
    # Row c: the seeds of the baseline are not those of the headline.
    results = [
        result for result in results if not (result.row == "c" and result.method == "kapsi" and result.seed == 0)
    ]
    table = build(experiment, EXPECTED, results)
    (found,) = comparisons(table)
    assert [line.row.name for line in found.lines] == ["a", "b"]
    assert found.factors[0] == pytest.approx(4e-6 / 1e-5)  # of seed 0 alone; the mean over all seeds is 2.33e-5
    a, b, _ = table.lines
    assert b.factor == pytest.approx(4.0 / 1e-3)
    assert a.statistics["kapsi"].paired(a.statistics["recipe"]) == pytest.approx((np.mean(SCORES["a", "kapsi"]), 0.3))
    assert any("MLP <1> here: MSE ≥ 100× lower in 1 of 2 rows" in line for line in table.summary())
    assert "compared over the seeds that both have" in as_text(table, 400)


def test_conditions_replace_the_statement_on_selection(tmp_path) -> None:
    experiment = tiny(tmp_path, more="conditions: 100 rows, no model selection\n")
    table = build(experiment, EXPECTED, made(experiment, SCORES))
    assert "here: 100 rows, no model selection; the test rows are evaluated once" in as_text(table, 400)
    assert "; 100 rows, no model selection |" in overview([table])


def test_the_short_overview_has_the_errors_and_accuracies_of_the_main_experiments(tmp_path) -> None:
    table = build(tiny(tmp_path), EXPECTED, made(tiny(tmp_path), SCORES))
    assert "tiny" not in short_overview([table])  # only the paper's main experiments
    experiment = replace(table.experiment, name="elementary")
    methods = tuple(replace(method, baseline=method.name == "mlp") for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    table = build(experiment, EXPECTED, made(experiment, SCORES))
    assert short_overview([table], "r/").splitlines()[-1] == (
        "| [elementary](r/elementary.md), 3 functions | median MSE 0.00133 | kapsi has the lower MSE on 2 of 3 "
        r"| kapsi has a lower MSE than MLP \<1\> on 1 of 2 |"
    )
    accuracies = {("a", "kapsi"): [0.5, 0.7], ("a", "mlp"): [0.25], ("a", "recipe"): [0.5]}
    experiment = replace(tiny(tmp_path, metric="accuracy", rows="[a]"), name="discrete")
    methods = tuple(replace(method, baseline=method.name != "kapsi") for method in experiment.methods)
    experiment = replace(experiment, methods=methods)
    table = build(experiment, EXPECTED, made(experiment, accuracies))
    (line,) = short_overview([table], None).splitlines()[2:]
    assert line.startswith("| discrete: a | 0.6000 | ")
    assert line.endswith(f" | 0.5000 ({experiment.method('recipe').label}) |")
