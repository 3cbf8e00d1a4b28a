"""The overview of all experiments: comparisons with the paper and with the baselines measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from urllib.parse import quote

from kapsi.paper.baselines import BaselineComparison, comparisons, difference, range_text, searches
from kapsi.paper.render import duration, escape_markdown, parameter_range, score_text, times
from kapsi.paper.tables import ResultTable, count, printed_factors, replaced_references

MAX_SCORES = 6
"""Rows of an experiment with all scores in the overview."""
FEW_SEEDS = 3
"""Results of fewer seeds are preliminary."""
MAX_NAMED = 2
"""Rows of a comparison with a baseline that are named instead of counted."""


MAIN = ("elementary", "composite", "feynman", "discrete", "tabular")
"""Experiments of the short overview."""

HEADINGS = (
    *("experiment", "rows", "MSE ≥ 100× lower than the paper", "MSE not higher", "score here (paper)"),
    *("baselines measured here, same seeds: rows better : worse (median)", "parameters", "CPU time"),
)


def overview(tables: Sequence[ResultTable], link: str | None = "", details: str = "") -> str:
    """Return a Markdown table of all experiments: comparisons with the paper and with the baselines, cost.

    Args:
        tables: the tables of all experiments.
        link: prefix of the links to the pages, as in "results/"; None for no links.
        details: page with the differences of searches and seeds, named instead of listing them; empty to list them.
    """
    text = [f"| {' | '.join(HEADINGS)} |", "|---|---:|---:|---:|---|---|---:|---:|"]
    for table in tables:
        name = table.experiment.name
        # An experiment without results has no page.
        shown = name if link is None or not table.done else f"[{name}]({quote(link)}{name}.md)"
        results = [line.result for line in table.lines if line.result is not None]
        sizes = [n for result in results for n in (result.fewest_parameters, result.parameters) if n is not None]
        size = parameter_range(min(sizes, default=None), max(sizes, default=None))
        spent = duration(table.cpu_seconds) if results else ""
        texts = (escape_markdown(_scores(table)), escape_markdown(against_baselines(table)))
        cells = [shown, f"{table.done} of {table.named}", *_against(table), *texts, size, spent]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join([*text, "", *(_fairness_in_short(tables, details) if details else _fairness(tables))]) + "\n"


def short_overview(tables: Sequence[ResultTable], link: str | None = "") -> str:
    """Return a Markdown table of the main experiments: a line for each set of functions, data set or table.

    Args:
        tables: the tables of all experiments.
        link: prefix of the links to the pages, as in "results/"; None for no links.
    """
    text = ["| | kapsi | RPN of the paper | baselines measured here |", "|---|---|---|---|"]
    for table in (table for table in tables if table.experiment.name in MAIN and table.done):
        name = table.experiment.name
        page = name if link is None else f"[{name}]({quote(link)}{name}.md)"
        rows = _accuracy_rows(table) if table.experiment.higher_is_better else [_error_row(table)]
        text += [f"| {page}{label}{' | '.join(['', *map(escape_markdown, cells)])} |" for label, cells in rows]
    return "\n".join(text) + "\n"


def _error_row(table: ResultTable) -> tuple[str, list[str]]:
    """Return the median error over the functions, and the numbers of functions with a lower error than others."""
    errors = [line.result.mean for line in table.lines if line.result is not None]
    pairs = printed_factors(table)
    paper = f"kapsi has the lower MSE on {sum(factor > 1 for _, factor in pairs)} of {len(pairs)}"
    others = [f"{c.baseline.label} on {c.better} of {len(c.lines)}" for c in comparisons(table)]
    middle = f"median MSE {score_text('mse', median(errors))}"
    return f", {table.named} functions", [middle, paper, f"kapsi has a lower MSE than {', '.join(others)}"]


def _accuracy_rows(table: ResultTable) -> list[tuple[str, list[str]]]:
    """Return a row for each data set: the accuracies of kapsi, the paper, and the best baseline."""
    rows = []
    for line in table.lines:
        if line.result is None:
            continue
        scores = {
            method.label: line.statistics[method.name].mean
            for method in table.methods
            if method.baseline and method.name in line.statistics
        }
        best = max(scores, key=lambda label: scores[label]) if scores else ""
        cells = [score_text("accuracy", value) for value in (line.result.mean, line.reference) if value is not None]
        cells += [""] * (2 - len(cells))
        rows.append(
            (f": {line.row.name}", [*cells, f"{score_text('accuracy', scores[best])} ({best})" if best else ""])
        )
    return rows


def against_baselines(table: ResultTable) -> str:
    """Return the rows better and worse than each baseline, with the median ratio of errors or difference of accuracies."""
    return "; ".join(f"{c.baseline.label} {_rows_and_median(c)}" for c in comparisons(table))


def _rows_and_median(comparison: BaselineComparison) -> str:
    if len(comparison.lines) <= MAX_NAMED:
        pairs = zip(comparison.lines, comparison.factors, strict=True)
        return ", ".join(f"{line.row.name} {_gain(factor, comparison.even)}" for line, factor in pairs)
    few = comparison.seeds[0] < FEW_SEEDS
    seeds = f"; {range_text(comparison.seeds)} seed{'s' * (comparison.seeds[1] > 1)}" if few else ""
    return f"{comparison.better} : {comparison.worse} ({_gain(comparison.median, comparison.even)}{seeds})"


def _gain(factor: float, even: float) -> str:
    """Return a ratio of errors or a difference of accuracies as text."""
    if even == 0:
        return f"{factor:+.4f}"
    if factor == 1:
        return "equal"
    return f"{times(factor)} better" if factor > 1 else f"{times(1 / factor if factor else math.inf)} worse"


def _few_seeds(tables: Sequence[ResultTable]) -> dict[str, list[str]]:
    """Return the methods with rows of fewer than three seeds by experiment."""
    labels = {
        table.experiment.name: [
            method.label
            for method in table.methods
            if any(
                line.statistics[method.name].count < FEW_SEEDS for line in table.lines if method.name in line.statistics
            )
        ]
        for table in tables
    }
    return {name: methods for name, methods in labels.items() if methods}


def _fairness_in_short(tables: Sequence[ResultTable], details: str) -> list[str]:
    """Return the experiments with different searches and with few seeds, and a link to the page with the methods."""
    different = [table.experiment.name for table in tables if difference(table)]
    texts = []
    if different:
        texts.append(
            f"Searches (candidates, starts, epochs) or seeds of the baselines differ in {', '.join(different)}."
        )
    if few := _few_seeds(tables):
        texts.append(f"Some methods have fewer than three seeds, hence preliminary results, in {', '.join(few)}.")
    return [escape_markdown(" ".join(texts)) + f" [Details]({quote(details)})."] if texts else []


def _fairness(tables: Sequence[ResultTable]) -> list[str]:
    """Return the experiments in which baselines and headline get the same search, the differences elsewhere, and few seeds."""
    same = [table.experiment.name for table in tables if searches(table) and not difference(table)]
    others = [(table.experiment.name, text) for table in tables if (text := difference(table))]
    lines = []
    if same:
        lines.append(
            f"Baselines and kapsi have equal numbers of candidates, starts, epochs and seeds in {', '.join(same)}."
        )
    if others:
        lines.append("The searches of the baselines differ from that of kapsi (each page has the numbers):")
        lines += ["", *(f"- {escape_markdown(name)}: {escape_markdown(text)}" for name, text in others)]
    if few := _few_seeds(tables):
        named = (escape_markdown(f"{name}: {'; '.join(methods)}") for name, methods in few.items())
        lines += ["", "Preliminary, as rows have fewer than three seeds:", "", *(f"- {text}" for text in named)]
    return lines


def _against(table: ResultTable) -> tuple[str, str]:
    """Return the number of rows with an MSE at least 100 times lower than the paper, and not higher."""
    pairs = printed_factors(table)
    if table.experiment.metric != "mse" or not pairs or _is_sweep(table):
        return "", ""
    return f"{count(pairs, 100)} of {len(pairs)}", f"{count(pairs, 1)} of {len(pairs)}"


def _is_sweep(table: ResultTable) -> bool:
    return any(line.row.axes for line in table.lines)


def _scores(table: ResultTable) -> str:
    """Return the best score of a sweep, or the scores of a few rows.

    The paper's score is in parentheses, and so is the label of a headline that differs from that of most rows.
    """
    metric = table.experiment.metric
    best = max if table.experiment.higher_is_better else min
    lines = [line for line in table.lines if line.result is not None]
    if not lines:
        return "not run"
    if _is_sweep(table):
        printed = [mean for line in lines for column in table.compared if (mean := line.paper[column].mean) is not None]
        paper = f" ({score_text(metric, best(printed))})" if printed else ""
        scores = [line.result.mean for line in lines if line.result and math.isfinite(line.result.mean)]
        conditions = f"; {table.experiment.conditions}" if table.experiment.conditions else ""
        return f"best {score_text(metric, best(scores))}{paper}{conditions}" if scores else ""
    if len(lines) > MAX_SCORES:
        return _own_columns(table)
    labels = [line.headline.label for line in lines if line.headline is not None]
    usual = max(labels, key=labels.count)
    texts = []
    for line in lines:
        reference = "" if line.reference is None else score_text(metric, line.reference)
        own = line.headline.label if line.headline is not None and line.headline.label != usual else ""
        inside = "; ".join(part for part in (reference, own) if part)
        paper = f" ({inside})" if inside else ""
        texts.append(f"{line.row.name} {score_text(metric, line.result.mean) if line.result else ''}{paper}")
    return ", ".join(texts) + (f"; {table.experiment.conditions}" if table.experiment.conditions else "")


def _own_columns(table: ResultTable) -> str:
    """Return the number of rows in which each model is worse than its own column in the paper, empty for a single model."""
    even = 0 if table.experiment.higher_is_better else 1
    counts = [
        (f"{m.label}{replaced_references(table, m)}", sum(factor < even for _, factor in pairs), len(pairs))
        for m, pairs in table.own_columns()
    ]
    texts = (f"{label}: {worse} of {rows}" for label, worse, rows in counts)
    return f"rows worse than the same model in the paper: {'; '.join(texts)}" if counts else ""


def readme(tables: Sequence[ResultTable], commands: Mapping[str, str]) -> str:
    """Return the overview page of all experiments.

    Args:
        tables: the tables of all experiments.
        commands: the command of each experiment.
    """
    text = [
        "# Results",
        "",
        "The paper's experiments (arXiv 2407.04819), written by `kapsi reproduce all --summary`.",
        "",
        "The paper reports the best epoch on the test rows. Here, models are selected on validation rows of the training part, and"
        " the test rows are evaluated once; columns under the paper's protocol are marked.",
        "",
        overview(tables),
    ]
    environments = {environment.text(): None for table in tables for environment in table.environments}
    if environments:
        text += ["## Versions and machines", "", *(f"- {escape_markdown(line)}" for line in environments), ""]
    text += ["## Commands", "", "```"]
    text += [commands[table.experiment.name] for table in tables if table.experiment.name in commands]
    text += ["```", ""]
    return "\n".join(text)
