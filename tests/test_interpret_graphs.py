"""Dependency graphs of runs and their files."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib.resources import as_file, files
from types import SimpleNamespace
from xml.etree import ElementTree

import networkx
import pytest

import kapsi as kp
from kapsi.errors import DataError
from kapsi.interpret.graphs import DependencyGraph, as_dot, as_graphml, as_svg, graphs
from kapsi.zoo import three_models

SVG = "{http://www.w3.org/2000/svg}"
ODD = '<script>"a\\b"\n&'
GRAPH = DependencyGraph("RPN", ("x", ODD, "y"), (("x", "y"),), (("x", ODD),))


@pytest.fixture(scope="module")
def iris(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs") / "run"
    config = kp.tables.RunConfig(kp.tables.TableConfig("species"), kp.rpn((None, None), bias=True))
    with as_file(files("kapsi.data") / "iris.csv") as path:
        kp.tables.fit_table(path, config, folder)
    return kp.load_run(folder), folder


def test_the_four_graphs_of_the_paper(iris) -> None:
    found = graphs(iris[0])
    expected = three_models.graphs()
    assert [graph.model for graph in found] == [*(graph.model for graph in expected), "fitted model"]
    number = {name: i for i, name in enumerate(found[0].nodes)}
    for graph, reference in zip(found, expected, strict=False):
        assert {(number[a], number[b]) for a, b in graph.arrows} == set(reference.arrows)
        assert {(number[a], number[b]) for a, b in graph.lines} == set(reference.lines)
    assert not found[-1].lines  # of a linear model
    assert {b for _, b in found[-1].arrows} == {"species"}


def test_rows_are_needed(iris) -> None:
    run = kp.tables.run_folder.LoadedRun(replace(iris[0].model, kept=b""), iris[0].manifest)
    with pytest.raises(DataError, match="keeps no rows"):
        graphs(run)


def test_command(iris, capsys, tmp_path) -> None:
    from kapsi.cli import main

    target = tmp_path / "graphs.svg"
    assert main(["graph", str(iris[1]), "--output", str(target)]) == 0
    assert "species       →  petal_width" in capsys.readouterr().out
    assert ElementTree.parse(target).getroot().tag.endswith("svg")
    assert main(["graph", str(iris[1]), "--output", str(tmp_path / "graphs.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_svg_escapes_names() -> None:
    text = as_svg([GRAPH, GRAPH])
    titles = [node.text for node in ElementTree.fromstring(text).iter(f"{SVG}title")]
    assert len(titles) == 6
    assert "<script" not in text


def test_graphml_is_read_by_networkx(tmp_path) -> None:
    (tmp_path / "g.graphml").write_text(as_graphml([GRAPH]), encoding="utf-8")
    graph = networkx.read_graphml(tmp_path / "g.graphml")
    assert [data["arrow"] for _, _, data in graph.edges(data=True)] == [True, False]
    assert graph.nodes["g0n0"]["name"] == "x"


def test_dot_quotes_names() -> None:
    lines = as_dot([GRAPH]).splitlines()
    assert '    g0n1 [label="<script>\\"a\\\\b\\"\\n&"];' in lines
    assert "    g0n0 -> g0n1 [dir=none];" in lines
    escape = DependencyGraph("RPN", ("\x1b[2J", "y"), (), ())
    assert '    g0n0 [label="\\\\x1b[2J"];' in as_dot([escape]).splitlines()


def test_networkx_graph() -> None:
    graph = GRAPH.to_networkx()
    assert graph.number_of_edges() == 2
    assert graph.edges["x", "y", 0]["directed"]


def test_a_graph_needs_two_columns() -> None:
    preprocessing = SimpleNamespace(columns=[])
    run = SimpleNamespace(rows=object(), model=SimpleNamespace(targets=("y",), preprocessing=preprocessing))
    with pytest.raises(DataError, match=r"0 columns of numbers, expected 2 to .*; fit a table with more$"):
        graphs(run)


@pytest.mark.parametrize(("graph_count", "across"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3)])
def test_graphs_wrap_into_rows(graph_count: int, across: int) -> None:
    root = ElementTree.fromstring(as_svg([GRAPH] * graph_count))
    heads = [node for node in root.iter(f"{SVG}text") if node.get("font-size") == "13"]
    assert len({node.get("x") for node in heads}) == across
    assert len(heads) == graph_count


@pytest.mark.parametrize("count", [1, 2, 8, 9, 30])
def test_no_two_boxes_of_long_names_overlap(count: int) -> None:
    columns = tuple(f"{i}, a long name of a column" for i in range(count))
    root = ElementTree.fromstring(as_svg([DependencyGraph("RPN", (*columns, "y"), ())]))
    size = tuple(float(root.get(name)) for name in ("width", "height"))
    boxes = [[float(box.get(name)) for name in ("x", "y", "width", "height")] for box in root.iter(f"{SVG}rect")]
    assert len(boxes) == count + 1
    assert all(x >= 0 and x + w <= size[0] and y >= 20 and y + h <= size[1] for x, y, w, h in boxes)
    for (x, y, w, h), (u, v, a, b) in itertools.combinations(boxes, 2):
        assert x + w <= u or u + a <= x or y + h <= v or v + b <= y


def test_a_line_between_opposite_columns_goes_around_the_target() -> None:
    graph = DependencyGraph("RPN", ("a", "b", "c", "d", "y"), (), (("a", "c"), ("a", "b"), ("a", "y")))
    paths = [
        node.get("d")
        for node in ElementTree.fromstring(as_svg([graph])).iter(f"{SVG}path")
        if node.get("fill") == "none"
    ]
    assert ["Q" in path for path in paths] == [True, False, False]
