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

MOST_COLUMNS, MOST_FEATURES = 30, 5000
"""Largest number of columns of the table, and of columns of κ, for a graph."""
MOST_CLASSES = 20

Point = tuple[float, float]


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
    if len(model.targets) > 1:
        raise DataError(
            f"graphs: the run has {len(model.targets)} targets, a graph has one; fit again with one --target"
        )
    if kept is None:
        raise DataError("graphs: the run keeps no rows; fit again with this version")
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


PANEL, RADIUS, LONGEST = 380, 128, 16
"""Width of a graph and radius of its columns, in pixels; longest shown name."""
ABREAST, ON_CIRCLE, BETWEEN = 3, 8, 27
"""Largest number of graphs in a row, and of columns on a circle; distance of the columns on an arc, in pixels."""


def as_svg(found: Sequence[DependencyGraph]) -> str:
    """Return graphs as SVG, up to three in a row: columns on a circle, many on two arcs, the target in the middle."""
    across = 2 if len(found) == 4 else min(len(found), ABREAST)
    largest = max(abs(y) for graph in found for _, y in _positions(len(graph.nodes) - 1))
    high = round(2 * largest) + 110
    width, height = PANEL * across, high * math.ceil(len(found) / across)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" role="img" aria-label="Dependency graph">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#1f77b4"/></marker></defs>',
    ]
    for i, graph in enumerate(found):
        row, column = divmod(i, across)
        lines += _panel(graph, PANEL * (column + 0.5), high * row, high)
    return "\n".join([*lines, "</svg>", ""])


def _positions(count: int) -> list[Point]:
    """Return the positions of columns around the target, clockwise: on a circle, or at equal heights to its right and left."""
    if count <= ON_CIRCLE:
        angles = [2 * math.pi * k / count for k in range(count)]
        return [(RADIUS * math.sin(a), -RADIUS * math.cos(a)) for a in angles]
    right = (count + 1) // 2
    high = max(RADIUS, BETWEEN * right / 2)

    def arc(rows: int) -> list[Point]:
        heights = [(2 * k + 1) / rows - 1 for k in range(rows)]
        return [(RADIUS * math.sqrt(1 - t**4), high * t) for t in heights]

    return [*arc(right), *((-x, -y) for x, y in arc(count - right))]


def _panel(graph: DependencyGraph, x: float, top: float, high: float) -> list[str]:
    *columns, target = graph.nodes
    y = top + high / 2 + 10
    place = {name: (x + dx, y + dy) for name, (dx, dy) in zip(columns, _positions(len(columns)), strict=True)}
    place[target] = (x, y)
    lines = [f'<text x="{x:.1f}" y="{top + 16:.1f}" text-anchor="middle" font-size="13">{_xml(graph.model)}</text>']
    for pairs, style in (
        (graph.lines, 'stroke="#999"'),
        (graph.arrows, 'stroke="#1f77b4" stroke-width="1.4" marker-end="url(#tip)"'),
    ):
        for a, b in pairs:
            (ax, ay), (bx, by) = place[a], place[b]
            first, last = _inside(a, bx - ax, by - ay), 1 - _inside(b, bx - ax, by - ay)
            start, end = ((ax + share * (bx - ax), ay + share * (by - ay)) for share in (first, last))
            bend = None if target in (a, b) else _bend(start, end, (x, y), _half_width(target))
            kind, points = ("L", (start, end)) if bend is None else ("Q", (start, bend, end))
            first_point, *further = [f"{px:.1f} {py:.1f}" for px, py in points]
            path = f"M{first_point} {kind}{' '.join(further)}"
            lines.append(f'<path d="{path}" fill="none" {style}/>')
    for name, (px, py) in place.items():
        shown, half = _shown(name), _half_width(name)
        fill = "#ffe4b5" if name == target else "#fff"
        lines += [
            f"<g><title>{_xml(name)}</title>",
            f'<rect x="{px - half:.1f}" y="{py - 10:.1f}" width="{2 * half:.1f}" height="20" rx="4" fill="{fill}" stroke="#555"/>',
            f'<text x="{px:.1f}" y="{py + 4:.1f}" text-anchor="middle" fill="#000">{_xml(shown)}</text></g>',
        ]
    return lines


def _bend(start: Point, end: Point, center: Point, half: float) -> Point | None:
    """Return the control point of a curve around the box of the target; None if the line does not meet the box."""
    (ax, ay), (bx, by) = start, end
    length = math.hypot(bx - ax, by - ay)
    nx, ny = (ay - by) / length, (bx - ax) / length
    offset = (center[0] - ax) * nx + (center[1] - ay) * ny
    size = abs(nx) * half + abs(ny) * 10 + 5
    if abs(offset) >= size:
        return None
    # The middle of the curve is half as far from the line as the control point.
    far = 2 * (offset - size if offset > 0 else offset + size)
    return (ax + bx) / 2 + far * nx, (ay + by) / 2 + far * ny


def _shown(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _half_width(name: str) -> float:
    return 4 + 3.3 * len(_shown(name))


def _inside(name: str, dx: float, dy: float) -> float:
    """Return the share of a line from the center of a node inside of the box of the node, with a margin."""
    sides = ((_half_width(name) + 3) / abs(dx) if dx else 1.0, 13 / abs(dy) if dy else 1.0)
    return min(*sides, 0.45)
