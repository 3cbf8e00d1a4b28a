"""Reports of runs, and contributions beside predictions."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import kapsi as kp
import kapsi.report
from kapsi.cli import common, main
from kapsi.data.tabular import write_table
from kapsi.html import Markup, data_table, tag
from kapsi.plots.curves import reliability
from kapsi.recipes import Auto
from kapsi.report import charts
from kapsi.report.facts import facts_of
from kapsi.report.held_out import class_tables, error_section
from kapsi.report.sections import care, formula_section, graph_section, training_section
from kapsi.tables import RunConfig, TableConfig, fit_table, load_config
from kapsi.training.records import Epoch

EVIL = "<script>alert(1)</script>"
FIT = ("fit", "t.csv", "--target", "y", "--head", "linear", "--output", "run")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "DELAY", float("inf"))
    monkeypatch.delenv("KAPSI_FIT_NO_REPORT")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs: a classification with hostile names, and a regression with all kinds of columns."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    x = rng.normal(size=80)
    label = np.where(x > 0, EVIL, "a & b")
    odd = np.where(rng.random(80) > 0.5, "</style>" + EVIL, "</title>'\"")
    write_table(folder / f"{'x<img onerror=1>'}.csv", {f'"{EVIL}': x, "k": odd, EVIL: label})
    config = RunConfig(TableConfig(EVIL, folds=2), recipe=Auto(heads=("linear",)))
    fit_table(folder / "x<img onerror=1>.csv", config, folder / "classes")
    day = [f"2024-{1 + i % 12:02d}-01" for i in range(80)]
    number = np.where(rng.random(80) < 0.2, np.nan, x)
    write_table(folder / "t.csv", {"n": number, "k": odd, "day": day, "y": 3 * x + (odd == odd[0])})
    fit_table(folder / "t.csv", RunConfig(TableConfig("y"), recipe=Auto(heads=("linear",))), folder / "numbers")
    return folder


class Outline(HTMLParser):
    """Checks that elements are closed in order, and collects them."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links, self.names = [], [], [], []

    def handle_starttag(self, name, attributes):
        self.seen.append(name)
        given = dict(attributes)
        self.links += [given[key] for key in ("src", "href") if key in given]
        self.names += [given["id"]] if "id" in given else []
        assert not any(key.startswith("on") for key in given)
        if name != "meta":
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.seen.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name


def outline(page):
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("name", ["classes", "numbers"])
def test_a_report_is_one_page_without_requests_and_names_stay_text(folder, name) -> None:
    page = kapsi.report.report_html(folder / name)
    found = outline(page)
    assert page.count("<script") == 1
    assert found.seen.count("img") == 0
    assert all(link.startswith("#") for link in found.links)
    assert {link[1:] for link in found.links} <= set(found.names)
    assert len(found.names) == len(set(found.names))
    assert "url(" not in page
    assert "http:" not in page
    assert "https:" not in page
    assert found.seen.count("h1") == found.seen.count("main") == found.seen.count("nav") == 1
    assert len(page.encode()) < 3e6
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page == kapsi.report.report_html(folder / name)


def test_the_graph_joins_columns_with_interactions_and_names_stay_text(folder) -> None:
    facts = facts_of(folder / "classes")
    pair = SimpleNamespace(columns=tuple(one.column for one in facts.importances[:2]))
    drawn = graph_section(replace(facts, pairs=[pair]))
    found = outline(drawn)
    assert found.seen.count("path") == 1 + 2 + 1  # the tip of arrows; two columns act on the target, and together
    assert "script" not in found.seen
    assert "http:" not in drawn
    assert graph_section(replace(facts, pairs=[])) == ""


def test_a_report_of_a_regression_has_its_scores_effects_and_rows(folder) -> None:
    page = kapsi.report.report_html(folder / "numbers")
    manifest = json.loads((folder / "numbers/run.json").read_text())
    assert f"{manifest['scores']['kapsi']['r2']:.4f}" in page
    assert f"{manifest['scores']['ridge regression']['r2']:.4f}".replace("-", "−") in page
    for text in (
        "Effect of n",
        "Effect of day",
        "Effect of k",
        "Residuals",
        "y = ",
        "Rows with the largest errors",
        "config.yaml",
    ):
        assert text in page
    assert "only 16 rows" in page  # a warning on few held-out rows
    assert "2024-01-01 to 2024-12-01" in page
    assert "T00:00" not in page


def test_a_report_of_classes_has_calibration_and_confusion(folder) -> None:
    page = kapsi.report.report_html(folder / "classes")
    for text in ("Confusion matrix", "Calibration: ", "accuracy of each fold", "log odds of"):
        assert text in page


def test_many_classes_are_a_table_the_hardest_first() -> None:
    """A matrix of 50 classes is wider than a screen or a printed page."""
    counts = np.diag(np.full(50, 10))
    counts[7, 3], counts[9, 9] = 30, 0
    cells = re.findall(r">([^<>]+)</t[dh]>", class_tables([f"<{i}>" for i in range(50)], counts))
    assert cells[5:10] == ["&lt;7&gt;", "40", "25.0 %", "100.0 %", "&lt;3&gt; (30 rows)"]
    assert cells[10:15] == ["&lt;0&gt;", "10", "100.0 %", "100.0 %", "–"]
    assert cells[-5:] == ["&lt;9&gt;", "0", "–", "–", "–"]
    assert len(cells) == 5 * (1 + 10 + 1 + 50)


def test_formulas_are_mathml_of_every_term_and_names_stay_text(folder) -> None:
    facts = facts_of(folder / "classes")
    drawn = formula_section(facts)
    assert outline(drawn).seen.count("math") == 4  # the column, two indicators, and the constant of the log odds
    assert "<mtext>log-odds(a &amp; b)</mtext><mo>=</mo>" in drawn
    assert formula_section(replace(facts, formula=None)) == ""


def test_curves_over_thresholds_need_rows_of_both_classes(folder) -> None:
    facts = facts_of(folder / "classes")
    known = facts.predictions
    assert f"AUC {roc_auc_score(known.y == 1, known.outputs[:, 1]):.4f}" in error_section(facts)
    one = replace(facts.predictions, y=np.zeros_like(facts.predictions.y))
    assert "AUC" not in error_section(replace(facts, predictions=one))


def test_notes_and_rare_classes_are_warnings(folder) -> None:
    facts = facts_of(folder / "classes")
    rare = np.zeros_like(facts.predictions.y)
    rare[0] = 1
    manifest = {**facts.manifest, "notes": ["dropped the ID-like column '<i>'"]}
    shown = care(replace(facts, manifest=manifest, predictions=replace(facts.predictions, y=rare)))
    assert "Only 1.2 % of the held-out rows are of the class a &amp; b" in shown
    assert "<li>dropped the ID-like column &#x27;&lt;i&gt;&#x27;</li>" in shown


def test_a_trained_model_has_learning_curves(folder) -> None:
    facts = facts_of(folder / "numbers")
    assert training_section(facts) == ""  # a model in closed form
    epochs = [Epoch(i, 10.0**-i, 2 * 10.0**-i if i > 1 else None, solver="adam") for i in range(1, 4)]
    drawn = training_section(replace(facts, epochs=[*epochs, Epoch(4, float("nan"))]))
    assert outline(drawn).seen.count("circle") == 3 + 2
    assert "epoch 3\nvalidation 0.002" in drawn


def test_the_lines_of_a_report_repeat_the_run(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    shown = re.findall(r"<pre[^>]*><code>(.*?)</code>", kapsi.report.report_html("numbers"), re.DOTALL)
    command, python = (unescape(text) for text in shown if "again" in text)
    assert main(shlex.split(command)[1:]) == 0
    first, second = (json.loads(Path(name, "run.json").read_text()) for name in ("numbers", "numbers-again"))
    assert first["scores"] == second["scores"]
    lines = python.splitlines()
    assert lines[3].startswith("fit_table('t.csv', load_config('numbers'), 'numbers-again')")
    shutil.rmtree("numbers-again")
    assert fit_table("t.csv", load_config("numbers"), "numbers-again").scores.keys() == first["scores"].keys()
    names = re.findall(r"kp\.([a-z_.]+)\(|run\.([a-z]+)\(", python)
    assert names == [("load_run", ""), ("", "predict"), ("interpret.effects", "")]


def test_held_out_rows_beyond_the_training_rows_are_noted() -> None:
    write_table("t.csv", {"when": range(80), "a": [i % 7 for i in range(80)], "y": np.arange(80.0) ** 2})
    config = RunConfig(TableConfig("y", time="when"), recipe=Auto(heads=("linear",)))
    (note,) = [n for n in fit_table("t.csv", config, "run").notes if "range" in n]
    assert note == "held-out rows are outside of the range of the training rows (column 'when': 16 of 16 rows)"


def test_runs_are_compared(folder) -> None:
    page = kapsi.report.comparison_html([folder / "classes", folder / "numbers"])
    outline(page)
    assert "2 runs compared" in page
    assert "The tables of the runs differ" in page
    head, *rows = [re.findall(r">([^<>]+)<", row) for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL)[:3]]
    assert head[2:6] == ["accuracy", "log loss", "R²", "RMSE"]
    assert [[cell == "–" for cell in row[2:6]] for row in rows] == [
        [False, False, True, True],
        [True, True, False, False],
    ]


def test_reliability_is_the_observed_share_in_bins() -> None:
    predicted, observed, counts = reliability(np.array([0.05, 0.07, 0.95, 1.0]), np.array([0, 1, 1, 1]))
    assert predicted == pytest.approx([0.06, 0.975])
    assert observed == pytest.approx([0.5, 1.0])
    assert counts == [2, 2]
    predicted, observed, counts = reliability(np.array([0.05, 0.3, 0.95]), np.array([0, 1, 1]), least=2)
    assert (predicted, observed, counts) == (pytest.approx([1.3 / 3]), pytest.approx([2 / 3]), [3])


def test_html_escapes_all_but_markup() -> None:
    assert tag("p", "<b>", tag("i", "&")) == "<p>&lt;b&gt;<i>&amp;</i></p>"
    assert tag("a", title='"\x00') == '<a title="&quot;�"></a>'
    assert tag("p", Markup("<b/>")) == "<p><b/></p>"
    table = data_table(("a", "b"), [("<", 1)], right=(1,))
    assert '<th scope="row">&lt;</th><td class="n">1</td>' in table


@pytest.mark.parametrize("ends", [(0.0, 1.0), (-3.0, 1e6), (1e-9, 2e-9), (5.0, 5.0)])
def test_ticks_are_round_and_inside(ends) -> None:
    found = charts.ticks(*ends)
    assert 1 <= len(found) <= 6
    assert all(ends[0] - 1e-9 <= value <= ends[1] * (1 + 1e-9) + 1e-12 for value in found)


def test_notebooks_show_models_and_runs_with_names_as_text(folder) -> None:
    run = kp.load_run(folder / "classes")
    for shown in (run._repr_html_(), run.model.model._repr_html_()):
        outline(shown)
        assert "<table>" in shown
        assert "<script" not in shown
    assert "&lt;script&gt;" in run._repr_html_()
    assert "layers.0.heads.0" in run.model.model._repr_html_()


# ------------------------------------------------------------------------------------------------ command line


def small(name="t.csv"):
    x = np.random.default_rng(0).normal(size=(40, 2))
    write_table(name, {"a": x[:, 0], "b": x[:, 1], "y": 3 * x[:, 0] + x[:, 1]})


def test_a_fit_writes_its_report_unless_told_otherwise(capsys) -> None:
    small()
    assert main([*FIT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "report: run/report.html"
    assert lines[-1].startswith("r2: ")
    assert Path("run/report.html").read_text().startswith("<!doctype html>")
    assert main([*FIT, "--overwrite", "--no-report"]) == 0
    assert not Path("run/report.html").exists()
    capsys.readouterr()
    assert main(["report", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": ["run"], "report": "run/report.html"}
    assert Path("run/report.html").exists()
    assert kp.load_run("run").manifest["rows"] == 40  # the page is no file of the run
    assert main(["runs", "delete", "run", "--yes"]) == 0
    assert not Path("run").exists()


def test_a_failing_report_is_a_note(capsys, monkeypatch) -> None:
    small()

    def fail(path):
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(kapsi.report, "write_report", fail)
    assert main([*FIT]) == 0
    error = capsys.readouterr().err
    assert "its report could not be written (ZeroDivisionError: by design); kapsi report run tries again" in error


def test_open_opens_the_page(capsys, monkeypatch) -> None:
    small()
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or False)
    assert main([*FIT, "--open"]) == 0
    assert opened == [Path("run/report.html").resolve().as_uri()]
    assert "no browser was found" in capsys.readouterr().err
    assert main([*FIT, "--overwrite", "--open", "--no-report"]) == 2
    assert "--open: needs the report; leave --no-report out" in capsys.readouterr().err


def test_several_runs_make_a_comparison(folder, capsys, monkeypatch) -> None:
    shutil.copytree(folder / "numbers", "first")
    shutil.copytree(folder / "classes", "second")
    assert main(["report", "first", "second"]) == 0
    assert capsys.readouterr().out == "report: comparison.html\n"
    assert main(["report", "first", "second"]) == 2
    assert "comparison.html: exists already" in capsys.readouterr().err
    assert main(["report", "first", "first"]) == 2
    assert "a run is given twice" in capsys.readouterr().err
    Path("empty").mkdir()
    monkeypatch.setattr(kapsi.report, "facts_of", lambda *_: pytest.fail("read before all runs are checked"))
    assert main(["report", "first", "empty", "--output", "other.html"]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["report", "first", "second", "--output", "first/model.safetensors", "--overwrite"]) == 2
    assert "is a file of the run itself" in capsys.readouterr().err


def test_a_run_without_rows_has_a_report_without_effects(folder) -> None:
    shutil.copytree(folder / "numbers", "old")
    manifest = json.loads(Path("old/run.json").read_text())
    del manifest["files"]["rows.parquet"]
    Path("old/run.json").write_text(json.dumps(manifest))
    page = kapsi.report.report_html("old")
    assert "keeps no rows" in page
    assert "Effect of" not in page


def columns_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_are_explained(folder, capsys) -> None:
    arguments = ["predict", str(folder / "numbers"), str(folder / "t.csv"), "--output"]
    assert main([*arguments, "a.csv", "--explain", "--keep", "n"]) == 0
    for row in columns_of("a.csv"):
        parts = [float(value) for name, value in row.items() if name.startswith("contribution_")]
        assert float(row["base"]) + sum(parts) == pytest.approx(float(row["prediction"]), abs=1e-9)
    names = list(columns_of("a.csv")[0])
    assert names == ["n", "prediction", "base", "contribution_n", "contribution_k", "contribution_day"]
    arguments = ["predict", str(folder / "classes"), str(folder / "x<img onerror=1>.csv"), "--output"]
    assert main([*arguments, "b.csv", "--explain"]) == 0
    assert "base and contributions add up to the log odds of a & b, log(p/(1 − p))" in capsys.readouterr().err
    for row in columns_of("b.csv"):
        parts = [float(value) for name, value in row.items() if name.startswith("contribution_")]
        chances = [float(value) for name, value in row.items() if name.startswith("probability_")]
        odds = np.log(chances[1] / chances[0])
        assert float(row["base"]) + sum(parts) == pytest.approx(odds, abs=1e-6)
