"""Tables of experiments as text for a terminal, as Markdown and as HTML; and the page that sums up all of them."""

from __future__ import annotations

import base64
import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from kapsi.paper.expected import LABELS, Printed
from kapsi.paper.experiment import Method
from kapsi.paper.tables import Line, ResultTable, Statistic
from kapsi.text import text_table

__all__ = ["as_html", "as_markdown", "as_text", "duration", "overview", "readme"]

METRIC_NAMES = {"mse": "mean squared error on the test rows", "accuracy": "accuracy on the test rows"}
LONGEST_TEXT, LONGEST_MARKDOWN = 200, 200
"""A table of more rows, as a grid of functions has, is shown by its best rows."""
SHOWN_OF_LONG, SHOWN_IN_OVERVIEW = 15, 6


@dataclass(frozen=True)
class _Column:
    """A column: its heading, its cells, and how soon it is left out where there is no room (the largest first)."""

    heading: str
    below: str
    cells: tuple[str, ...]
    right: bool
    leaves: int


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

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


def _score(metric: str, value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if metric == "accuracy" else f"{value:.3g}"


def _own(metric: str, found: Statistic | None) -> str:
    if found is None:
        return ""
    text = _score(metric, found.mean)
    if found.count > 1 and math.isfinite(found.mean):
        text += f" ± {found.std:.4f}" if metric == "accuracy" else f" ± {found.std:.2g}"
    return text + found.mark


def _printed(metric: str, found: Printed, digits: int = 4) -> str:
    if found.mean is None:
        return ""
    if metric == "mse":
        return f"{found.mean:.3g}" + (f" ± {found.std:.2g}" if found.std is not None else "")
    return f"{found.mean:.{digits}f}" + (f" ± {found.std:.4f}" if found.std is not None else "")


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
        return f"{mine} {_times(factor)}"
    if factor > 0:
        return f"{theirs} {_times(1 / factor)}"
    return (
        f"{theirs} {_times(math.inf)}" if line.result and math.isfinite(line.result.mean) else f"{theirs}; not finite"
    )


def _times(factor: float) -> str:
    if not math.isfinite(factor):
        return "∞×"
    return f"{factor:.2g}×" if factor < 10 else f"{factor:,.0f}×" if factor < 1e6 else f"{factor:.1g}×"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _seeds(table: ResultTable, method: Method) -> str:
    """Return how many seeds a method has, or the smallest and the largest number where rows differ."""
    counts = {line.own[method.name].count for line in table.lines if method.name in line.own}
    low, high = min(counts), max(counts)
    return f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"


def _on_test(table: ResultTable, method: Method) -> bool:
    return (method.protocol or table.experiment.protocol) == "paper"


def _columns(table: ResultTable, lines: Sequence[Line], *, everything: bool) -> list[_Column]:
    metric = table.experiment.metric
    headlines = {line.headline.name for line in table.lines if line.headline is not None}
    columns = [_Column("", "", tuple(line.row.name for line in lines), False, 0)]
    for name in table.columns:
        compared = name in table.compared
        means = [mean for line in lines if (mean := line.paper[name].mean) is not None]
        digits = 3 if all(round(mean, 3) == mean for mean in means) else 4
        columns.append(
            _Column(
                LABELS.get(name, name),
                "paper",
                tuple(_printed(metric, line.paper[name], digits) for line in lines),
                True,
                2 if compared else 6,
            )
        )
    several = len(headlines & {method.name for method in table.methods}) > 1
    for method in table.methods:
        below = _seeds(table, method) + (", best epoch on test" if _on_test(table, method) else "")
        cells = tuple(_own(metric, line.own.get(method.name)) for line in lines)
        columns.append(_Column(method.label, below, cells, True, 0 if method.name in headlines else 5))
    if any(line.factor is not None for line in lines):
        columns.append(_Column("better", "", tuple(_better(metric, line) for line in lines), True, 1))
    if any(line.result is not None for line in lines):
        results = [line.result for line in lines]
        what = (
            ""
            if several or not table.methods
            else next(m.label for m in table.experiment.methods if m.name in headlines)
        )
        counts = tuple(_count(found.parameters) if found else "" for found in results)
        if any(counts):
            columns.append(_Column("parameters", what, counts, True, 3))
        times = tuple(duration(found.cpu_seconds) if found else "" for found in results)
        columns.append(_Column("CPU time", "a seed", times, True, 4))
    if everything:
        for name in table.columns:
            counts = tuple(_count(line.paper[name].parameters) for line in lines)
            if any(counts):
                columns.append(_Column(f"parameters of {LABELS.get(name, name)}", "paper", counts, True, 7))
        for method in table.methods:
            if method.name in headlines and not several:
                continue
            found_all = [line.own.get(method.name) for line in lines]
            counts = tuple(_count(found.parameters) if found else "" for found in found_all)
            if any(counts):
                columns.append(_Column(f"parameters of {method.label}", "", counts, True, 7))
            times = tuple(duration(found.cpu_seconds) if found else "" for found in found_all)
            columns.append(_Column(f"CPU time of {method.label}", "a seed", times, True, 7))
    return [column for column in columns if any(column.cells) or not column.heading]


def _lines(table: ResultTable, most: int) -> tuple[Sequence[Line], str]:
    """Return the rows to show, all or the best, and what to say of it."""
    if len(table.lines) <= most:
        return table.lines, ""
    sign = -1 if table.experiment.higher_is_better else 1
    known = [(line, line.result.mean) for line in table.lines if line.result is not None]
    known.sort(key=lambda pair: (not math.isfinite(pair[1]), sign * pair[1]))
    shown = [line for line, _ in known[:SHOWN_OF_LONG]]
    return shown, f"the best {len(shown)} of {len(table.lines):,} rows" if shown else ""


def _heading(table: ResultTable) -> list[str]:
    """Return what is above a table: what is measured, and how each side chose."""
    experiment = table.experiment
    said = [f"{experiment.source}", f"{METRIC_NAMES[experiment.metric]}, mean ± standard deviation over seeds"]
    if table.quick:
        said.append("QUICK: a tiny budget, to see that everything runs; no result to compare")
    ours = [method for method in table.methods if not _on_test(table, method)]
    if ours:
        said.append("here: chosen on validation rows of the training part, test rows touched once")
    if any(_on_test(table, method) for method in table.methods):
        said.append("here, columns with “best epoch on test”: the paper's protocol")
    if table.columns:
        said.append("paper: the best epoch on the test rows")
    return said


def _axis_tables(table: ResultTable) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return (axis, rows) of what the values of an axis have together."""
    metric = table.experiment.metric
    best = "best" if not table.experiment.higher_is_better else "max"
    found: dict[str, list[tuple[str, ...]]] = {}
    for entry in table.axes:
        rows = found.setdefault(entry.axis, [(entry.axis, "rows", best, "median", "mean")])
        scores = (_score(metric, score) for score in (entry.best, entry.median, entry.mean))
        rows.append((entry.value, str(entry.count), *scores))
    return list(found.items())


def _footnotes(table: ResultTable) -> list[str]:
    notes = [
        f"{setting.mark or 'measured with'} {setting.text()} ({setting.count} result{'s' if setting.count > 1 else ''})"
        for setting in table.settings
    ]
    return [*notes, *table.notes]


# ------------------------------------------------------------------------------------------------ formats


def as_text(table: ResultTable, width: int = 120) -> str:
    """Return a table for a terminal of so many letters; columns that do not fit are left out, and named."""
    lines, part = _lines(table, LONGEST_TEXT)
    columns = _columns(table, lines, everything=False)

    def wide(column: _Column) -> int:
        return max(map(len, (column.heading, column.below, *column.cells)), default=0)

    left: list[str] = []
    while len(columns) > 2 and sum(wide(column) + 2 for column in columns) - 2 > width:
        worst = max(range(len(columns)), key=lambda place: (columns[place].leaves, place))
        if columns[worst].leaves == 0:
            break
        gone = columns.pop(worst)
        left.append(f"{gone.heading}{f' ({gone.below})' if gone.below else ''}")
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
        below.append(f"{part} are shown; --format html has all")
    if left:
        below.append(f"left out for want of room: {', '.join(reversed(left))}; --format markdown has all")
    for line in [*below, *_footnotes(table)]:
        text += textwrap.wrap(line, width, subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in text).rstrip() + "\n"


def as_markdown(table: ResultTable, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """Return a table as Markdown with everything that is known of it.

    Args:
        table: what to show.
        pictures: (title, path relative to the page).
    """
    lines, part = _lines(table, LONGEST_MARKDOWN)
    columns = _columns(table, lines, everything=True)
    text = [f"# {_markdown(table.experiment.title)}", ""]
    text += [f"- {_markdown(line)}" for line in _heading(table)]
    text.append("")
    summary = table.summary()
    if summary:
        text += [*(f"- **{_markdown(line)}**" for line in summary), ""]
    if len(columns) > 1 and lines:
        headings = [
            f"{_markdown(column.heading)}{f'<br>{_markdown(column.below)}' if column.below else ''}"
            for column in columns
        ]
        text.append(f"| {' | '.join(headings)} |")
        text.append(f"|{'|'.join('---:' if column.right else '---' for column in columns)}|")
        text += [f"| {' | '.join(_markdown(column.cells[i]) for column in columns)} |" for i in range(len(lines))]
    else:
        text.append("No results yet.")
    text.append("")
    if part:
        text += [f"{part[0].upper()}{part[1:]}; the HTML page has all.", ""]
    for axis, rows in _axis_tables(table):
        text += [
            f"## By {_markdown(axis)}",
            "",
            f"| {' | '.join(map(_markdown, rows[0]))} |",
            "|---|---:|---:|---:|---:|",
        ]
        text += [*(f"| {' | '.join(map(_markdown, row))} |" for row in rows[1:]), ""]
    for title, path in pictures:
        text += [f"![{_markdown(title)}]({path})", ""]
    text += [f"- {_markdown(note)}" for note in _footnotes(table)]
    return "\n".join(text).rstrip() + "\n"


def _markdown(text: str) -> str:
    """Return text that Markdown shows as it is."""
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
    """Return a table as a page that needs nothing else: all rows, light and dark, pictures inside.

    Args:
        table: what to show.
        pictures: (title, SVG).
    """
    escape = html.escape
    columns = _columns(table, table.lines, everything=True)
    text = [f"<h1>{escape(table.experiment.title)}</h1>", "<ul>"]
    text += [f"<li>{escape(line)}</li>" for line in _heading(table)]
    text += [f"<li><strong>{escape(line)}</strong></li>" for line in table.summary()]
    text.append("</ul>")
    if len(columns) > 1:
        text.append('<div class="scroll"><table><thead><tr>')
        text += [f"<th>{escape(column.heading)}<br><small>{escape(column.below)}</small></th>" for column in columns]
        text.append("</tr></thead><tbody>")
        for i, line in enumerate(table.lines):
            cells = []
            for column in columns:
                kind = ""
                if column.heading == "better" and line.factor is not None:
                    good = line.factor >= (0 if table.experiment.higher_is_better else 1)
                    kind = f' class="{"better" if good else "worse"}"'
                cells.append(f"<td{kind}>{escape(column.cells[i])}</td>")
            text.append(f"<tr>{''.join(cells)}</tr>")
        text.append("</tbody></table></div>")
    else:
        text.append("<p>No results yet.</p>")
    for axis, rows in _axis_tables(table):
        text.append(f'<h2>By {escape(axis)}</h2><div class="scroll"><table><thead><tr>')
        text += [f"<th>{escape(cell)}</th>" for cell in rows[0]]
        text.append("</tr></thead><tbody>")
        text += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:]]
        text.append("</tbody></table></div>")
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


# ------------------------------------------------------------------------------------------------ all experiments


def overview(tables: Sequence[ResultTable], link: str | None = "") -> str:
    """Return one Markdown table over all experiments: rows, comparison with the paper, time.

    Args:
        tables: one an experiment.
        link: what comes before the name of an experiment's page, such as "results/"; None for no links.
    """
    text = ["| experiment | rows | against the paper | parameters | CPU time |", "|---|---:|---|---:|---:|"]
    for table in tables:
        name = table.experiment.name
        # An experiment that was not run has no page.
        shown = name if link is None or not table.done else f"[{name}]({quote(link)}{name}.md)"
        found = [line.result for line in table.lines if line.result is not None]
        parameters = [result.parameters for result in found if result.parameters is not None]
        low, high = min(parameters, default=0), max(parameters, default=0)
        counts = "" if not parameters else f"{low:,}" if low == high else f"{low:,} to {high:,}"
        spent = duration(table.cpu_seconds) if found else ""
        text.append(f"| {shown} | {table.done} of {table.named} | {_markdown(_against(table))} | {counts} | {spent} |")
    return "\n".join(text) + "\n"


def _against(table: ResultTable) -> str:
    """Return what the overview says of an experiment: the scores of a few rows, the best of a sweep, the counts of many."""
    if not table.done:
        return "not run"
    said = table.summary()
    if any(line.row.axes for line in table.lines):
        return said[-1]
    if table.named <= SHOWN_IN_OVERVIEW:
        metric = table.experiment.metric
        texts = []
        for line in table.lines:
            if line.result is not None:
                reference = (
                    "" if line.reference is None else f" ({line.reference_name} {_score(metric, line.reference)})"
                )
                # Its mark is explained below the table alone.
                texts.append(f"{line.row.name} {_own(metric, replace(line.result, mark=''))}{reference}")
        return ", ".join(texts)
    return next(
        (text for text in said if text.startswith("against") and " of the paper: " in text), "nothing to compare with"
    )


def readme(tables: Sequence[ResultTable], commands: Mapping[str, str]) -> str:
    """Return the page that sums up all experiments.

    Args:
        tables: one an experiment.
        commands: experiment: the command that gives its results.
    """
    text = [
        "# Results",
        "",
        "The paper's experiments (arXiv 2407.04819), written by `kapsi reproduce all --summary`; nothing here is typed by hand.",
        "",
        "The paper gives the best epoch on the test rows. Here models are chosen on validation rows of the training part, and the"
        " test rows are touched once; columns that follow the paper's protocol instead say so.",
        "",
        overview(tables),
    ]
    settings = {setting.text(): None for table in tables for setting in table.settings}
    if settings:
        text += ["## Versions and machines", "", *(f"- {_markdown(line)}" for line in settings), ""]
    text += ["## Commands", "", "```"]
    text += [commands[table.experiment.name] for table in tables if table.experiment.name in commands]
    text += ["```", ""]
    return "\n".join(text)
