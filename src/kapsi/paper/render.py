"""Tables of experiments as plain text, Markdown and HTML."""

from __future__ import annotations

import base64
import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from kapsi.paper.baselines import search_lines
from kapsi.paper.expected import LABELS, Printed
from kapsi.paper.experiment import Method
from kapsi.paper.tables import Line, ResultTable, Statistic
from kapsi.text import text_table

METRIC_NAMES = {"mse": "mean squared error on the test rows", "accuracy": "accuracy on the test rows"}
MAX_ROWS, BEST_ROWS = 200, 15
"""A longer table, such as a grid of functions, shows only its best rows."""


@dataclass(frozen=True)
class _TextColumn:
    """A column with a heading of two lines; columns of the highest rank are dropped first from a narrow table."""

    heading: str
    below: str
    cells: tuple[str, ...]
    right: bool
    rank: int


def duration(seconds: float) -> str:
    """Return a time in a suitable unit.

    Example:
        >>> duration(0.25), duration(75), duration(8000)
        ('0.25 s', '75 s', '2.2 h')
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ------------------------------------------------------------------------------------------------ cells


def score_text(metric: str, value: float) -> str:
    """Return a score with the digits of its metric."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if metric == "accuracy" else f"{value:.3g}"


def _cell(metric: str, statistic: Statistic | None) -> str:
    if statistic is None:
        return ""
    text = score_text(metric, statistic.mean)
    if statistic.count > 1 and math.isfinite(statistic.mean):
        text += f" ± {statistic.std:.4f}" if metric == "accuracy" else f" ± {statistic.std:.2g}"
    return text + statistic.mark


def _printed(metric: str, printed: Printed, digits: int = 4) -> str:
    if printed.mean is None:
        return ""
    if metric == "mse":
        return f"{printed.mean:.3g}" + (f" ± {printed.std:.2g}" if printed.std is not None else "")
    return f"{printed.mean:.{digits}f}" + (f" ± {printed.std:.4f}" if printed.std is not None else "")


def _better(metric: str, line: Line) -> str:
    factor = line.factor
    if factor is None:
        return ""
    mine = line.headline.label if line.headline is not None else ""
    theirs = "paper" if line.reference_name in LABELS.values() else line.reference_name
    if metric == "accuracy":
        if factor == 0:
            return "equal"
        return f"{mine} +{factor:.4f}" if factor > 0 else f"{theirs} +{-factor:.4f}"
    if factor == 1:
        return "equal"
    if factor > 1:
        return f"{mine} {times(factor)}"
    if factor > 0:
        return f"{theirs} {times(1 / factor)}"
    return f"{theirs} {times(math.inf)}" if line.result and math.isfinite(line.result.mean) else f"{theirs}; not finite"


def times(factor: float) -> str:
    """Return a factor with a sign of multiplication."""
    if not math.isfinite(factor):
        return "∞×"
    return f"{factor:.2g}×" if factor < 10 else f"{factor:,.0f}×" if factor < 1e6 else f"{factor:.1g}×"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def parameter_range(low: int | None, high: int | None) -> str:
    """Return a number of parameters, or the range over the seeds or rows."""
    return _count(high) if low == high or low is None else f"{low:,} to {high:,}"


def _seeds(table: ResultTable, method: Method) -> str:
    """Return the number of seeds of a method, or the range over the rows."""
    counts = {line.statistics[method.name].count for line in table.lines if method.name in line.statistics}
    low, high = min(counts), max(counts)
    return f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"


def _on_test(table: ResultTable, method: Method) -> bool:
    return (method.protocol or table.experiment.protocol) == "paper"


def _columns(table: ResultTable, lines: Sequence[Line], *, everything: bool) -> list[_TextColumn]:
    """Return the columns of a table, with parameters and times of all methods if `everything`."""
    metric = table.experiment.metric
    headlines = {line.headline.name for line in table.lines if line.headline is not None}
    several = len(headlines & {method.name for method in table.methods}) > 1
    columns = [_TextColumn("", "", tuple(line.row.name for line in lines), False, 0)]
    paper = _paper_columns(table, lines)
    # The printed results of a method stand beside those measured here.
    beside = {method.paper for method in table.methods}
    columns += [column for name, column in paper.items() if name not in beside]
    for method in table.methods:
        if method.paper is not None and method.paper in paper:
            columns.append(paper[method.paper])
        below = _seeds(table, method) + (", best epoch on test" if _on_test(table, method) else "")
        cells = tuple(_cell(metric, line.statistics.get(method.name)) for line in lines)
        columns.append(_TextColumn(method.label, below, cells, True, 0 if method.name in headlines else 5))
    columns.append(_TextColumn("better", "", tuple(_better(metric, line) for line in lines), True, 1))
    one_label = [m.label for m in table.experiment.methods if m.name in headlines and table.methods and not several]
    columns += _cost_columns(
        [line.result for line in lines], ("parameters", "".join(one_label[:1])), "CPU time", (3, 4)
    )
    if everything:
        for name in table.columns:
            counts = tuple(_count(line.paper[name].parameters) for line in lines)
            columns.append(_TextColumn(f"parameters of {LABELS.get(name, name)}", "paper", counts, True, 7))
        for method in table.methods:
            if several or method.name not in headlines:
                statistics = [line.statistics.get(method.name) for line in lines]
                headings = (f"parameters of {method.label}", ""), f"CPU time of {method.label}"
                columns += _cost_columns(statistics, *headings, (7, 7))
    return [column for column in columns if any(column.cells) or not column.heading]


def _paper_columns(table: ResultTable, lines: Sequence[Line]) -> dict[str, _TextColumn]:
    """Return the columns of the paper's results by prefix."""
    columns = {}
    for name in table.columns:
        means = [mean for line in lines if (mean := line.paper[name].mean) is not None]
        digits = 3 if all(round(mean, 3) == mean for mean in means) else 4
        cells = tuple(_printed(table.experiment.metric, line.paper[name], digits) for line in lines)
        rank = 2 if name in table.compared else 6
        columns[name] = _TextColumn(LABELS.get(name, name), "paper", cells, True, rank)
    return columns


def _cost_columns(
    results: Sequence[Statistic | None], parameters: tuple[str, str], time: str, ranks: tuple[int, int]
) -> list[_TextColumn]:
    """Return the columns of parameters and CPU time."""
    counts = tuple(parameter_range(result.fewest_parameters, result.parameters) if result else "" for result in results)
    times = tuple(duration(result.cpu_seconds) if result else "" for result in results)
    return [_TextColumn(*parameters, counts, True, ranks[0]), _TextColumn(time, "per seed", times, True, ranks[1])]


def _lines(table: ResultTable, most: int) -> tuple[Sequence[Line], str]:
    """Return the rows shown, all or the best, and a note."""
    if len(table.lines) <= most:
        return table.lines, ""
    sign = -1 if table.experiment.higher_is_better else 1
    known = [(line, line.result.mean) for line in table.lines if line.result is not None]
    known.sort(key=lambda pair: (not math.isfinite(pair[1]), sign * pair[1]))
    shown = [line for line, _ in known[:BEST_ROWS]]
    return shown, f"the best {len(shown)} of {len(table.lines):,} rows" if shown else ""


def _heading(table: ResultTable) -> list[str]:
    """Return the lines above a table: metric and protocols."""
    experiment = table.experiment
    lines = [f"{experiment.source}", f"{METRIC_NAMES[experiment.metric]}, mean ± standard deviation over seeds"]
    if table.quick:
        lines.append("QUICK: a tiny budget that only checks the experiment; not comparable")
    if not all(_on_test(table, method) for method in table.methods):
        how = experiment.conditions or "selected on validation rows of the training part"
        lines.append(f"here: {how}; the test rows are evaluated once")
    if any(_on_test(table, method) for method in table.methods):
        lines.append("here, columns with “best epoch on test”: the paper's protocol")
    if table.columns:
        lines.append("paper: the best epoch on the test rows")
    if len(table.methods) > 1:
        lines.append("methods measured here are compared over the seeds that both have; the columns show all seeds")
    return lines


def _axis_tables(table: ResultTable) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return (axis, rows) with the statistics of each axis."""
    metric = table.experiment.metric
    best = "best" if not table.experiment.higher_is_better else "max"
    tables: dict[str, list[tuple[str, ...]]] = {}
    for entry in table.axes:
        rows = tables.setdefault(entry.axis, [(entry.axis, "rows", best, "median", "mean")])
        scores = (score_text(metric, score) for score in (entry.best, entry.median, entry.mean))
        rows.append((entry.value, str(entry.count), *scores))
    return list(tables.items())


def _footnotes(table: ResultTable) -> list[str]:
    notes = [
        f"{used.mark or 'measured with'} {used.text()} ({used.count} result{'s' if used.count > 1 else ''})"
        for used in table.environments
    ]
    return [*notes, *search_lines(table), *table.notes]


# ------------------------------------------------------------------------------------------------ formats


def as_text(table: ResultTable, width: int = 120) -> str:
    """Return a table for a terminal; columns beyond the width in characters are dropped and named below."""
    lines, part = _lines(table, MAX_ROWS)
    columns = _columns(table, lines, everything=False)

    def wide(column: _TextColumn) -> int:
        return max(map(len, (column.heading, column.below, *column.cells)), default=0)

    dropped: list[str] = []
    while len(columns) > 2 and sum(wide(column) + 2 for column in columns) - 2 > width:
        worst = max(range(len(columns)), key=lambda i: (columns[i].rank, i))
        if columns[worst].rank == 0:
            break
        column = columns.pop(worst)
        dropped.append(f"{column.heading}{f' ({column.below})' if column.below else ''}")
    text = []
    for line in (f"{table.experiment.name}: {table.experiment.title}", *_heading(table)):
        text += textwrap.wrap(line, width, subsequent_indent="  ")
    text.append("")
    if any(len(column.cells) for column in columns) and len(columns) > 1:
        cells = list(zip(*((column.heading, column.below, *column.cells) for column in columns), strict=True))
        above, under, *rest = text_table(cells, [i for i, column in enumerate(columns) if column.right])
        text += [above, under, "─" * min(width, sum(wide(column) + 2 for column in columns) - 2), *rest]
    else:
        text.append("no results yet")
    for _, rows in _axis_tables(table):
        text += ["", *text_table(rows, range(1, len(rows[0])))]
    text.append("")
    below = table.summary()
    if part:
        below.append(f"{part}; --format html shows all")
    if dropped:
        below.append(f"dropped columns: {', '.join(reversed(dropped))}; --format markdown shows all")
    for line in [*below, *_footnotes(table)]:
        text += textwrap.wrap(line, width, subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in text).rstrip() + "\n"


def as_markdown(table: ResultTable, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """Return a table as a Markdown page with all details.

    Args:
        table: the table.
        pictures: (title, path relative to the page).
    """
    lines, part = _lines(table, MAX_ROWS)
    columns = _columns(table, lines, everything=True)
    text = [f"# {escape_markdown(table.experiment.title)}", ""]
    text += [f"- {escape_markdown(line)}" for line in _heading(table)]
    text.append("")
    summary = table.summary()
    if summary:
        text += [*(f"- **{escape_markdown(line)}**" for line in summary), ""]
    if len(columns) > 1 and lines:
        headings = [
            f"{escape_markdown(column.heading)}{f'<br>{escape_markdown(column.below)}' if column.below else ''}"
            for column in columns
        ]
        text.append(f"| {' | '.join(headings)} |")
        text.append(f"|{'|'.join('---:' if column.right else '---' for column in columns)}|")
        text += [f"| {' | '.join(escape_markdown(column.cells[i]) for column in columns)} |" for i in range(len(lines))]
    else:
        text.append("No results yet.")
    text.append("")
    if part:
        text += [f"{part[0].upper()}{part[1:]}; the HTML page shows all.", ""]
    for axis, rows in _axis_tables(table):
        text += [
            f"## By {escape_markdown(axis)}",
            "",
            f"| {' | '.join(map(escape_markdown, rows[0]))} |",
            "|---|---:|---:|---:|---:|",
        ]
        text += [*(f"| {' | '.join(map(escape_markdown, row))} |" for row in rows[1:]), ""]
    for title, path in pictures:
        text += [f"![{escape_markdown(title)}]({path})", ""]
    text += [f"- {escape_markdown(note)}" for note in _footnotes(table)]
    return "\n".join(text).rstrip() + "\n"


def escape_markdown(text: str) -> str:
    """Escape a string for Markdown."""
    for letter in "\\`*_[]|<>~&$":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; --good: #116329; --bad: #a40e26; --stripe: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --line: #30363d; --soft: #8b949e; --good: #56d364; --bad: #ff7b72; --stripe: #161b22; }
  body { background: #0d1117; color: #e6edf3; }
  img { background: #fff; }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th small, .soft { color: var(--soft); font-weight: normal; }
tbody tr:nth-child(even) { background: var(--stripe); }
.better { color: var(--good); } .worse { color: var(--bad); }
img { max-width: 100%; }
"""


def as_html(table: ResultTable, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """Return a table as a self-contained page: all rows, light and dark colors, embedded pictures.

    Args:
        table: the table.
        pictures: (title, SVG).
    """
    escape = html.escape
    columns = _columns(table, table.lines, everything=True)
    text = [f"<h1>{escape(table.experiment.title)}</h1>", "<ul>"]
    text += [f"<li>{escape(line)}</li>" for line in _heading(table)]
    text += [f"<li><strong>{escape(line)}</strong></li>" for line in table.summary()]
    text.append("</ul>")
    if len(columns) > 1:
        headings = [f"{escape(column.heading)}<br><small>{escape(column.below)}</small>" for column in columns]
        rows = [[_html_cell(table, line, column, i) for column in columns] for i, line in enumerate(table.lines)]
        text.append(_html_table(headings, rows))
    else:
        text.append("<p>No results yet.</p>")
    for axis, (names, *entries) in _axis_tables(table):
        cells = [[f"<td>{escape(cell)}</td>" for cell in entry] for entry in entries]
        text += [f"<h2>By {escape(axis)}</h2>", _html_table(list(map(escape, names)), cells)]
    for title, svg in pictures:
        data = base64.b64encode(svg.encode()).decode("ascii")
        text.append(f'<p><img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}"></p>')
    text.append('<ul class="soft">')
    text += [f"<li>{escape(note)}</li>" for note in _footnotes(table)]
    text.append("</ul>")
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(table.experiment.title)}</title><style>{_STYLE}</style></head><body>"
    )
    return "\n".join([head, *text, "</body></html>", ""])


def _html_cell(table: ResultTable, line: Line, column: _TextColumn, index: int) -> str:
    """Return a cell, colored in the column `better`."""
    kind = ""
    if column.heading == "better" and line.factor is not None:
        good = line.factor >= (0 if table.experiment.higher_is_better else 1)
        kind = f' class="{"better" if good else "worse"}"'
    return f"<td{kind}>{html.escape(column.cells[index])}</td>"


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of escaped headings and cells."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>\n{head}\n</tr></thead><tbody>\n{body}\n</tbody></table></div>'
