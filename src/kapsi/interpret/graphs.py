"""Dependency graphs of a table: naive Bayes, Bayesian network, Markov network, RPN, and the fitted model, as in the paper."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kapsi.data.tabular import NumberColumn
from kapsi.errors import DataError, check_integer, printable
from kapsi.modules import Head
from kapsi.tables.run_folder import LoadedRun
from kapsi.text import counted
from kapsi.zoo.three_models import dependencies

__all__ = ["DependencyGraph", "as_dot", "as_graphml", "as_svg", "graphs"]

MOST_COLUMNS, MOST_FEATURES = 16, 5000
"""Largest number of columns of the table, and of columns of κ, for a graph."""
MOST_CLASSES = 20


@dataclass(frozen=True)
class DependencyGraph:
    """A graph of columns of a table.

    Attributes:
        model: name of the model.
        nodes: names of the columns, the target last.
        arrows: directed pairs of names (from, to).
        lines: undirected pairs of names.
    """

    model: str
    nodes: tuple[str, ...]
    arrows: tuple[tuple[str, str], ...]
    lines: tuple[tuple[str, str], ...] = ()

    def to_networkx(self) -> Any:
        """Return a `networkx.MultiDiGraph`; lines are edges with `directed=False`."""
        import networkx

        graph = networkx.MultiDiGraph(model=self.model)
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from(self.arrows, directed=True)
        graph.add_edges_from(self.lines, directed=False)
        return graph


def graphs(run: LoadedRun, *, strongest: int = 2) -> tuple[DependencyGraph, ...]:
    """Return the dependency graphs of the rows of a run.

    Naive Bayes and the Markov network have the specified structure; hill climbing finds the structure of the Bayesian
    network, on three bins of each column; the RPN shows the combinations of columns with the largest positive and negative
    coefficients of joint normal densities. The last graph has the coefficients of the fitted model: arrows from columns to
    the target, and lines between columns with a joint effect. Missing numbers are means; columns of other kinds are left out.

    Args:
        run: a run of `kp.load_run`.
        strongest: number of the largest positive coefficients, and of the largest negative ones.

    Raises:
        DataError: no kept rows, several targets, or too few or too many columns of numbers.
    """
    strongest = check_integer("graphs(strongest)", strongest, 1)
    kept, model = run.rows, run.model
    if kept is None or len(model.targets) > 1:
        raise DataError("graphs: a graph needs a run of one target that keeps its rows; fit again with this version")
    columns = [c for c in model.preprocessing.columns if isinstance(c, NumberColumn)]
    if not 2 <= len(columns) <= MOST_COLUMNS:
        remedy = "fit a table with more" if len(columns) < 2 else "leave some out with --drop"
        raise DataError(
            f"graphs: the model has {counted(len(columns), 'column')} of numbers, expected 2 to {MOST_COLUMNS}; {remedy}"
        )
    values = [np.where(np.isnan(v := kept.table.columns[c.name].numbers), c.mean, v) for c in columns]
    y = np.asarray(kept.y, dtype=np.float64)
    known = np.isfinite(y) & (y >= 0 if model.classes is not None else True)
    x, y = np.stack(values, axis=1)[known], y[known]
    if model.classes is None:
        y = np.searchsorted(np.quantile(y, (1 / 3, 2 / 3)), y).astype(np.float64)
    elif len(model.classes) > MOST_CLASSES:
        raise DataError(f"graphs: {len(model.classes)} classes, at most {MOST_CLASSES} make a graph")
    nodes = (*(column.name for column in columns), model.targets[0])
    found = dependencies(torch.from_numpy(x), torch.from_numpy(y).long(), strongest)
    named = [
        DependencyGraph(g.model, nodes, tuple(_named(g.arrows, nodes)), tuple(_named(g.lines, nodes))) for g in found
    ]
    own = _of_model(run, strongest)
    return (*named, *([own] if own else []))


def _named(pairs: Sequence[tuple[int, int]], nodes: Sequence[str]) -> list[tuple[str, str]]:
    return [(nodes[a], nodes[b]) for a, b in pairs]


def _of_model(run: LoadedRun, strongest: int) -> DependencyGraph | None:
    """Return the graph of the coefficients of all heads of a model of one layer; None for other models and for trees."""
    model, kept = run.model.model, run.rows
    if len(model.layers) != 1 or kept is None or run.model.preprocessing.texts:
        return None
    like = next(model.parameters(), torch.empty(0, dtype=torch.float64))
    x = torch.from_numpy(run.model.preprocessing.transform(kept.table)).to(like)
    column_of = [c.name for c in run.model.preprocessing.columns for _ in c.names()]
    ranked: list[tuple[float, tuple[str, ...]]] = []
    for _, head in model.heads():
        ranked += _ranked(head, x, column_of)
    if not ranked:
        return None
    ranked.sort(key=lambda entry: entry[0])
    chosen = {names for strength, names in (*ranked[:strongest], *ranked[-strongest:]) if strength and names}
    target = run.model.targets[0]
    used = sorted({name for names in chosen for name in names}, key=column_of.index)
    pairs = {pair for names in chosen for pair in itertools.combinations(names, 2)}
    nodes = (*dict.fromkeys(column_of), target)
    return DependencyGraph("fitted model", nodes, tuple((name, target) for name in used), tuple(sorted(pairs)))


def _ranked(head: Head, x: torch.Tensor, column_of: Sequence[str]) -> list[tuple[float, tuple[str, ...]]]:
    """Return the coefficient of each column of κ, in deviations of the column, with the columns of the table."""
    count = head.factors[0] * head.factors[1]
    if count > MOST_FEATURES:
        return []
    with torch.no_grad():
        deviation = head.expand(x).dense().double().std(0)
        matrix = head.weights().dense().double().reshape(-1, head.out_features, count).sum(0)
    some = x[:: max(1, len(x) // 3)][:3]
    depends = torch.zeros(count, x.shape[1], dtype=torch.bool)
    for row in some:
        depends |= torch.autograd.functional.jacobian(lambda r: head.expand(r[None]).dense()[0], row) != 0
    strength = matrix * deviation
    largest = strength.gather(0, strength.abs().argmax(0, keepdim=True))[0]
    names = [tuple(dict.fromkeys(column_of[i] for i in row.nonzero().flatten().tolist())) for row in depends]
    return [(value, chosen) for value, chosen in zip(largest.tolist(), names, strict=True) if chosen]


# ------------------------------------------------------------------------------------------------ files


def as_dot(found: Sequence[DependencyGraph]) -> str:
    """Return graphs in the language of Graphviz, a cluster each; names are quoted strings."""
    lines = ["digraph dependencies {", "  node [shape=box];"]
    for i, graph in enumerate(found):
        number = {name: f"g{i}n{k}" for k, name in enumerate(graph.nodes)}
        lines += [f"  subgraph cluster_{i} {{", f"    label={_quoted(graph.model)};"]
        lines += [f"    {number[name]} [label={_quoted(name)}];" for name in graph.nodes]
        lines += [f"    {number[a]} -> {number[b]};" for a, b in graph.arrows]
        lines += [f"    {number[a]} -> {number[b]} [dir=none];" for a, b in graph.lines]
        lines += ["  }"]
    return "\n".join([*lines, "}", ""])


def _quoted(name: str) -> str:
    lines = [printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in name.replace("\r", "").split("\n")]
    escaped = "\\n".join(lines)
    return f'"{escaped}"'


def as_graphml(found: Sequence[DependencyGraph]) -> str:
    """Return graphs as one GraphML graph; nodes and edges have the attribute `model`,
    edges `arrow`, false for lines.
    """
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
        '  <key id="name" for="node" attr.name="name" attr.type="string"/>',
        '  <key id="model" for="all" attr.name="model" attr.type="string"/>',
        '  <key id="arrow" for="edge" attr.name="arrow" attr.type="boolean"/>',
        '  <graph edgedefault="directed">',
    ]
    for i, graph in enumerate(found):
        number = {name: f"g{i}n{k}" for k, name in enumerate(graph.nodes)}
        model = f'<data key="model">{_xml(graph.model)}</data>'
        for name in graph.nodes:
            lines.append(f'    <node id="{number[name]}"><data key="name">{_xml(name)}</data>{model}</node>')
        for pairs, arrow in ((graph.arrows, "true"), (graph.lines, "false")):
            data = f'<data key="arrow">{arrow}</data>{model}'
            lines += [f'    <edge source="{number[a]}" target="{number[b]}">{data}</edge>' for a, b in pairs]
    return "\n".join([*lines, "  </graph>", "</graphml>", ""])


def _xml(text: str) -> str:
    """Return text for XML: escaped, without control characters, invalid in XML."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in text))


PANEL, RADIUS, LONGEST = 380, 135, 16
"""Width of a graph and radius of the circle of its columns, in pixels; longest shown name."""


def as_svg(found: Sequence[DependencyGraph]) -> str:
    """Return graphs side by side as SVG: columns on a circle, the target in the middle."""
    width = PANEL * len(found)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {PANEL + 30}" width="{width}" height="{PANEL + 30}" '
        'font-family="sans-serif" font-size="11" role="img" aria-label="Dependency graph">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#1f77b4"/></marker></defs>',
    ]
    for i, graph in enumerate(found):
        lines += _panel(graph, PANEL * i + PANEL / 2, PANEL / 2 + 25)
    return "\n".join([*lines, "</svg>", ""])


def _panel(graph: DependencyGraph, x: float, y: float) -> list[str]:
    *columns, target = graph.nodes
    angles = [2 * math.pi * k / len(columns) - math.pi / 2 for k in range(len(columns))]
    place = {
        name: (x + 1.05 * RADIUS * math.cos(a), y + RADIUS * math.sin(a))
        for name, a in zip(columns, angles, strict=True)
    }
    place[target] = (x, y)
    lines = [f'<text x="{x:.1f}" y="16" text-anchor="middle" font-size="13">{_xml(graph.model)}</text>']
    for pairs, style in (
        (graph.lines, 'stroke="#999"'),
        (graph.arrows, 'stroke="#1f77b4" stroke-width="1.4" marker-end="url(#tip)"'),
    ):
        for a, b in pairs:
            (ax, ay), (bx, by) = place[a], place[b]
            first, last = _inside(a, bx - ax, by - ay), 1 - _inside(b, bx - ax, by - ay)
            ends = ax + first * (bx - ax), ay + first * (by - ay), ax + last * (bx - ax), ay + last * (by - ay)
            x1, y1, x2, y2 = (f"{end:.1f}" for end in ends)
            lines.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>')
    for name, (px, py) in place.items():
        shown, half = _shown(name), _half_width(name)
        fill = "#ffe4b5" if name == target else "#fff"
        lines += [
            f"<g><title>{_xml(name)}</title>",
            f'<rect x="{px - half:.1f}" y="{py - 10:.1f}" width="{2 * half:.1f}" height="20" rx="4" fill="{fill}" stroke="#555"/>',
            f'<text x="{px:.1f}" y="{py + 4:.1f}" text-anchor="middle" fill="#000">{_xml(shown)}</text></g>',
        ]
    return lines


def _shown(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _half_width(name: str) -> float:
    return 4 + 3.3 * len(_shown(name))


def _inside(name: str, dx: float, dy: float) -> float:
    """Return the share of a line from the center of a node inside of the box of the node, with a margin."""
    sides = ((_half_width(name) + 3) / abs(dx) if dx else 1.0, 13 / abs(dy) if dy else 1.0)
    return min(*sides, 0.45)
