"""Sections of a report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kapsi.data.tabular.dates import date_text
from kapsi.html import Markup, data_table, tag
from kapsi.interpret.graphs import DependencyGraph, as_svg
from kapsi.report.charts import (
    MOST_LINES,
    bar,
    effect_chart,
    figure,
    learning_chart,
    pair_chart,
    short,
)
from kapsi.report.facts import Facts
from kapsi.tables.scores import METRICS, SHOWN
from kapsi.text import counted

LONGEST_FORMULA = 2000
MOST_NODES = 12
"""Maximum number of columns of the graph without an interaction."""
VISIBLE = 2e-3
"""Share of the variance of a column whose chart is shown at once."""


def section(title: str, *content: object, name: str, lead: object = "") -> Markup:
    """Return a section with a heading; empty without content."""
    kept = [part for part in content if part]
    if not kept:
        return Markup("")
    first = [tag("p", lead, class_="lead")] if lead else []
    return tag("section", tag("h2", title, id=name), *first, *kept, aria_labelledby=name)


def wide(table: Markup, label: str) -> Markup:
    """Return a table that scrolls within its frame on narrow screens."""
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex=0)


def score(value: Any, std: Any = None) -> str:
    """Return a score with four decimals, from 10 with four digits, and its standard deviation over folds."""
    if not isinstance(value, int | float):
        return "–"
    text = f"{value:.4f}".replace("-", "−") if abs(value) < 10 else figure(value)
    text = "0.0000" if text == "−0.0000" else text
    if not isinstance(std, int | float):
        return text
    return f"{text} ± {figure(std) if std >= 100 else f'{std if std > 1e-12 else 0:.2g}'}"


# ------------------------------------------------------------------------------------------------ first glance


def glance(facts: Facts) -> Markup:
    """Return the answer of a first glance: scores, baselines, and the most important columns."""
    main, loss = METRICS[facts.model.task]
    scores = _scores(facts.manifest)
    own, several = scores.get("kapsi", {}), bool(facts.manifest.get("folds"))
    others = {name: values for name, values in scores.items() if name != "kapsi"}
    compared = [
        tag("li", tag("span", name), tag("span", score(values.get(main)), class_="n"))
        for name, values in others.items()
    ]
    rows = facts.manifest.get("scored_rows", 0)
    where = f"{facts.manifest['folds']} folds, {rows:,} rows" if several else f"{counted(rows, 'held-out row')}"
    cards = [
        tag(
            "div",
            tag("h3", SHOWN[main]),
            tag("p", score(own.get(main)), class_="big"),
            tag("p", f"on {where}", class_="note"),
            tag("ul", *compared, class_="pairs"),
            class_="card",
        ),
        tag(
            "div",
            tag("h3", SHOWN[loss] + (facts.unit if loss == "rmse" else "")),
            tag("p", _plain(own.get(loss)), class_="big"),
            tag(
                "p",
                f"± {figure(own[f'{loss} std'])} over folds" if several and f"{loss} std" in own else f"on {where}",
                class_="note",
            ),
            tag(
                "ul",
                *(tag("li", tag("span", n), tag("span", _plain(v.get(loss)), class_="n")) for n, v in others.items()),
                class_="pairs",
            ),
            class_="card",
        ),
    ]
    if facts.importances:
        top = [
            tag(
                "li",
                tag("span", short(one.column, 26)),
                bar(one.share),
                tag("span", f"{100 * one.share:.0f} %", class_="n"),
            )
            for one in facts.importances[:5]
        ]
        cards.append(
            tag("div", tag("h3", "Most important columns"), tag("ul", *top, class_="pairs bars3"), class_="card")
        )
    return section("At a glance", tag("div", *cards, class_="cards"), name="glance")


def _plain(value: Any) -> str:
    return figure(float(value)) if isinstance(value, int | float) else "–"


def _scores(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = manifest.get("scores")
    return {str(k): v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def care(facts: Facts) -> Markup:
    """Return notes on data and fit, and warnings on small numbers of rows."""
    notes = [str(note) for note in facts.manifest.get("notes", ())] + facts.notes
    scored = facts.manifest.get("scored_rows", 0)
    if 0 < scored < 100:
        notes.append(f"The scores are from only {scored} rows, and will differ on other rows.")
    if facts.labels:
        counts = np.bincount(facts.predictions.y, minlength=len(facts.labels))
        rare = int(counts.argmin())
        if counts.sum() and counts[rare] < 0.1 * counts.sum() / len(counts) * 2:
            share = 100 * counts[rare] / counts.sum()
            label = facts.labels[rare]
            notes.append(f"Only {share:.1f} % of the held-out rows are of the class {label}: look at its recall below.")
    content = (
        tag("ul", *(tag("li", note) for note in notes), class_="notes")
        if notes
        else tag("p", "No warnings.", class_="note")
    )
    return section("To be careful about", content, name="care")


def score_table(facts: Facts) -> Markup:
    """Return the scores of the model beside the baselines, and the scores of each fold."""
    scores = _scores(facts.manifest)
    names = [name for name in scores.get("kapsi", {}) if not name.endswith(" std")]
    several = bool(facts.manifest.get("folds"))
    rows = [
        (name, *(score(values.get(key), values.get(f"{key} std") if several else None) for key in names))
        for name, values in scores.items()
    ]
    header = ("model", *(SHOWN.get(name, name) + (facts.unit if name == "rmse" else "") for name in names))
    parts = [wide(data_table(header, rows, right=range(1, len(header)), class_="sortable"), "Scores beside baselines")]
    if len(facts.folds) > 1:
        models = list(scores)
        main = METRICS[facts.model.task][0]
        lines = [(part, *(score(by.get(m, {}).get(main)) for m in models)) for part, by in facts.folds.items()]
        table = data_table(("part", *models), lines, right=range(1, len(models) + 1), class_="sortable")
        parts.append(tag("details", tag("summary", f"{SHOWN[main]} of each fold"), wide(table, "Scores of each fold")))
    lead = "All scores are on held-out rows."
    return section("Scores", *parts, name="scores", lead=lead)


# ------------------------------------------------------------------------------------------------ columns


def effect_section(facts: Facts) -> Markup:
    """Return importances and the charts of effects."""
    if not facts.importances:
        return Markup("")
    measured = facts.importances[0].increase is not None
    held = "held-out rows" if facts.importances[0].held_out else "rows of the fit"
    loss = "rise of the log loss" if facts.labels else "loss of R²"
    rows = [
        (
            one.column,
            bar(one.share),
            f"{100 * one.share:.1f} %",
            *([score(one.increase)] if measured else []),
        )
        for one in facts.importances[:100]
    ]
    header = (
        "column",
        tag("span", "bar of the share", class_="hidden"),
        "share of the variance",
        *([f"{loss} if permuted ({held})"] if measured else []),
    )
    table = wide(
        data_table(header, rows, right=range(2, len(header)), class_="sortable importances"), "Importance of columns"
    )
    outputs = next(iter(facts.effects.values())).outputs if facts.effects else ()
    charts, flat = _effect_charts(facts)
    unit = (
        "log odds"
        if len(facts.labels) == 2
        else "logits"
        if facts.labels
        else facts.model.unit or "the unit of the target"
    )
    names = f" of the class {facts.labels[1]}" if len(facts.labels) == 2 else ""
    lead = (
        f"How the prediction changes with each column, in {unit}{names}, with mean 0. "
        "Bars show the density of the rows, bands the uncertainty by the choice of the rows (bootstrap, 90 %). "
        "“exact”: the model is the sum of this curve and a function of the other columns. “on average”: the effect of the "
        "column depends on other columns."
    )
    several = _legend(outputs) if len(outputs) > 1 else Markup("")
    few = counted(len(flat), "column")
    hidden = (
        tag("details", tag("summary", f"{few} of nearly no effect"), tag("div", *flat, class_="grid")) if flat else ""
    )
    more = len(facts.importances) - len(facts.effects)
    note = tag("p", f"{counted(more, 'further column')} without a chart.", class_="note") if more > 0 else ""
    return section(
        "Columns and their effects",
        several,
        tag("div", *charts, class_="grid"),
        hidden,
        note,
        tag("h3", "Importance"),
        table,
        name="effects",
        lead=lead,
    )


def _effect_charts(facts: Facts) -> tuple[list[Markup], list[Markup]]:
    """Return the charts of columns with a visible effect, and the others."""
    largest = max((float(np.abs(e.values).max()) for e in facts.effects.values()), default=0.0)
    shares = {one.column: one.share for one in facts.importances}
    charts: list[Markup] = []
    flat: list[Markup] = []
    for name, effect in facts.effects.items():
        how = tag("span", "exact" if effect.exact else "on average")
        caption = tag("figcaption", tag("strong", short(name, 40)), how)
        chart = tag("figure", caption, effect_chart(effect, 0.15 * largest))
        (charts if shares[name] >= VISIBLE or len(charts) < 2 else flat).append(chart)
    return charts, flat


def _legend(outputs: Sequence[str]) -> Markup:
    shown = outputs[:MOST_LINES]
    items = [tag("li", tag("span", "", class_=f"key c{i}"), short(name, 30)) for i, name in enumerate(shown)]
    more = [tag("li", f"and {len(outputs) - len(shown)} more")] if len(outputs) > len(shown) else []
    return tag("ul", *items, *more, class_="legend")


def pair_section(facts: Facts) -> Markup:
    """Return the strongest interactions of two columns."""
    charts = [
        tag(
            "figure",
            tag(
                "figcaption",
                tag("strong", f"{short(pair.columns[0], 20)} × {short(pair.columns[1], 20)}"),
                tag("span", f"{100 * pair.share:.1f} % of the variance"),
            ),
            pair_chart(pair),
        )
        for pair in facts.pairs
    ]
    lead = (
        "The joint effect of two columns beyond the sum of both effects: blue raises the prediction, orange lowers it."
    )
    return section("Interactions", tag("div", *charts, class_="grid") if charts else "", name="pairs", lead=lead)


def graph_section(facts: Facts) -> Markup:
    """Return the graph of the columns that act, alone and together."""
    pairs = [pair.columns for pair in facts.pairs]
    used = {name for pair in pairs for name in pair}
    used |= {one.column for one in facts.importances[:MOST_NODES] if one.share >= VISIBLE}
    columns = [one.column for one in facts.importances if one.column in used]
    target = ", ".join(facts.model.targets)
    if not pairs or target in columns:
        return Markup("")
    graph = DependencyGraph("", (*columns, target), tuple((name, target) for name in columns), tuple(pairs))
    lead = "Arrows: columns with an effect on the target. Lines: interactions."
    drawn = tag(
        "div", Markup(as_svg([graph]).replace(' xmlns="http://www.w3.org/2000/svg"', "").strip()), class_="drawing"
    )
    more = tag(
        "p",
        "Graphs of other models of the rows: ",
        tag("code", f"kapsi graph {shlex.quote(str(facts.path))}"),
        class_="note",
    )
    return section("Graph", drawn, more, name="graph", lead=lead)


def formula_section(facts: Facts) -> Markup:
    """Return the formula of a small model."""
    text = facts.formula.text(4) if facts.formula else ""
    if facts.formula is None or len(text) > LONGEST_FORMULA:
        return Markup("")
    lead = "The whole model, in the units of the columns; a missing number counts as the mean of its column."
    more = tag("p", "Shorter formulas: ", tag("code", f"kapsi formula {shlex.quote(str(facts.path))}"), class_="note")
    drawn = [
        tag("div", *map(Markup, line), class_="formula", role="region", aria_label=f"Formula of {name}", tabindex=0)
        for name, line in zip(facts.formula.outputs, facts.formula.mathml(4), strict=True)
    ]
    plain = tag("details", tag("summary", "As text"), tag("pre", tag("code", text), tabindex=0, class_="formula"))
    return section("Formula", *drawn, plain, more, name="formula", lead=lead)


def column_section(facts: Facts) -> Markup:
    """Return the columns of the model."""
    kinds = {"numeric": "number", "categorical": "category"}
    rows = []
    for encoder in facts.model.preprocessing.columns[:200]:
        column = facts.kept.table.columns[encoder.name] if facts.kept is not None else None
        values, lost = "", ""
        if column is not None:
            lost = f"{100 * float(column.missing.mean()):.1f} %"
            if column.kind == "image":
                values = "images"
            elif column.kind == "text":
                values = f"{len(column.coded()[1]):,} distinct"
            elif not column.missing.all():
                shown = date_text if column.kind == "date" else figure
                values = " to ".join(shown(float(end(column.numbers))) for end in (np.nanmin, np.nanmax))
        unit = getattr(encoder, "unit", "")
        rows.append((encoder.name, kinds.get(encoder.wanted, encoder.wanted), unit, values, lost))
    header = ("column", "kind", "unit", "values of kept rows", "missing")
    table = wide(data_table(header, rows, right=(4,), class_="sortable"), "Columns of the model")
    count = len(facts.model.preprocessing.columns)
    return tag("details", tag("summary", counted(count, "column")), table)


# ------------------------------------------------------------------------------------------------ the fit


def head_section(facts: Facts) -> Markup:
    """Return the heads of the recipe."""
    board = facts.manifest.get("leaderboard")
    if not isinstance(board, list) or not board:
        return Markup("")
    rows, left = [], []
    for entry in board:
        if entry.get("loss") is None:
            left.append(tag("li", tag("strong", entry.get("head")), f" – {entry.get('note') or 'left out'}"))
            continue
        weight = entry.get("weight")
        rows.append(
            (
                entry.get("head"),
                score(entry.get("score")),
                _plain(entry.get("loss")),
                f"{entry['seconds']:.2f}" if isinstance(entry.get("seconds"), int | float) else "–",
                f"{weight:.2f}" if weight else "–",
            )
        )
    header = ("head", SHOWN[METRICS[facts.model.task][0]], "loss", "seconds", "weight in the model")
    table = wide(data_table(header, rows, right=range(1, 5), class_="sortable"), "Heads that were compared")
    more = tag("details", tag("summary", f"{counted(len(left), 'head')} left out"), tag("ul", *left)) if left else ""
    lead = "Kinds of models, compared on held-out rows; the saved model is the weighted sum."
    return section("Leaderboard", table, more, name="heads", lead=lead)


def training_section(facts: Facts) -> Markup:
    """Return the losses over the epochs of a trained model."""
    epochs = [epoch for epoch in facts.epochs if np.isfinite(epoch.loss)]
    if len(epochs) < 2:
        return Markup("")
    ended = next((epoch.ended for epoch in reversed(epochs) if epoch.ended), None)
    caption = tag("figcaption", tag("strong", "Loss over the epochs"), tag("span", epochs[-1].solver))
    chart = tag("figure", caption, learning_chart(epochs))
    names = ["training", *(["validation"] if any(epoch.validation_loss is not None for epoch in epochs) else [])]
    note = tag("p", f"Training ended: {ended}.", class_="note") if ended else ""
    return section("Training", _legend(names), tag("div", chart, class_="grid"), note, name="training")


def repeat_section(facts: Facts) -> Markup:
    """Return columns and configuration, and the command and the Python lines to repeat the run."""
    table, folder = str(facts.manifest.get("table", "table.csv")), str(facts.path)
    config = f"{folder}/config.yaml"
    command = f"kapsi fit {shlex.quote(table)} --config {shlex.quote(config)} --output {shlex.quote(folder + '-again')}"
    python = (
        "import kapsi as kp\n"
        "from kapsi.tables import fit_table, load_config\n\n"
        f"fit_table({table!r}, load_config({folder!r}), {folder + '-again'!r})  # the same fit\n"
        f"run = kp.load_run({folder!r})\n"
        "run.predict(frame)                 # predictions for a data frame\n"
        "kp.interpret.effects(run)          # the curves of this page"
    )
    versions = facts.manifest.get("versions")
    known = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""
    return section(
        "Columns, configuration, and the same run again",
        tag("h3", "Command"),
        tag("pre", tag("code", command), tabindex=0),
        tag("h3", "Python"),
        tag("pre", tag("code", python), tabindex=0),
        column_section(facts),
        tag(
            "details", tag("summary", "Configuration (config.yaml)"), tag("pre", tag("code", facts.config), tabindex=0)
        ),
        tag("p", known, class_="note"),
        name="repeat",
    )
