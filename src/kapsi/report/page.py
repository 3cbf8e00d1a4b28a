"""The page of a report: one file without requests, light and dark, for narrow screens, paper and screen readers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kapsi.html import Markup, data_table, joined, tag
from kapsi.report.charts import bar
from kapsi.report.facts import Facts
from kapsi.report.held_out import error_section
from kapsi.report.sections import (
    care,
    effect_section,
    formula_section,
    glance,
    graph_section,
    head_section,
    pair_section,
    repeat_section,
    score,
    score_table,
    section,
    training_section,
    wide,
)
from kapsi.tables.scores import METRICS, SHOWN
from kapsi.text import counted
from kapsi.version import __version__

FOLDER = Path(__file__).parent


def page(title: str, subtitle: str, sections: Sequence[Markup], links: Sequence[tuple[str, str]]) -> str:
    """Return a whole page.

    Args:
        title: heading and title of the page.
        subtitle: the line below.
        sections: the content.
        links: target and text of the navigation; targets that no section has are left out.
    """
    body = joined(sections)
    items = [tag("li", tag("a", text, href=f"#{name}")) for name, text in links if f'id="{name}"' in body]
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "sort.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only this script runs, and nothing is loaded, whatever names and labels contain.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = joined(
        [
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="generator", content=f"kapsi {__version__}"),
            tag("title", title),
            tag("style", Markup(style)),
        ]
    )
    content = joined(
        [
            tag("a", "Skip to the content", class_="skip", href="#content"),
            tag(
                "header",
                tag("h1", title),
                tag("p", subtitle, class_="sub"),
                tag("nav", tag("ul", *items), aria_label="Sections"),
            ),
            tag("main", body, id="content"),
            tag("footer", f"Written by kapsi {__version__}. This page is one file and loads nothing."),
            tag("script", Markup(script)),
        ]
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', content), lang='en')}\n"


LINKS = (
    ("glance", "At a glance"),
    ("care", "Careful"),
    ("scores", "Scores"),
    ("effects", "Effects"),
    ("pairs", "Interactions"),
    ("graph", "Graph"),
    ("formula", "Formula"),
    ("errors", "Errors"),
    ("heads", "Leaderboard"),
    ("training", "Training"),
    ("repeat", "Run again"),
)


def run_page(facts: Facts) -> str:
    """Return the page of one run."""
    manifest = facts.manifest
    targets = ", ".join(facts.model.targets)
    created = str(manifest.get("created", ""))[:16].replace("T", " ")
    count = len(facts.model.preprocessing.columns)
    kind = f"{len(facts.labels)} classes" if facts.labels else "regression"
    subtitle = (
        f"{kind} · {counted(manifest.get('rows', 0), 'row')} · {counted(count, 'column')} · "
        f"{counted(manifest.get('parameters', 0), 'parameter')} · {created}"
    )
    sections = [
        glance(facts),
        care(facts),
        score_table(facts),
        effect_section(facts),
        pair_section(facts),
        graph_section(facts),
        formula_section(facts),
        error_section(facts),
        head_section(facts),
        training_section(facts),
        repeat_section(facts),
    ]
    return page(f"{targets} from {manifest.get('table', 'a table')}", subtitle, sections, LINKS)


def comparison_page(runs: Sequence[Facts]) -> str:
    """Return a page that compares runs: scores, importances, and a link to none of them."""
    names = [str(facts.path) for facts in runs]
    metrics = list(dict.fromkeys(key for facts in runs for key in METRICS[facts.model.task]))
    rows: list[tuple[Any, ...]] = []
    for facts in runs:
        m = facts.manifest
        own, several = m["scores"]["kapsi"], bool(m.get("folds"))
        cells = [
            score(own.get(key), own.get(f"{key} std") if several else None) if key in METRICS[facts.model.task] else "–"
            for key in metrics
        ]
        rows.append(
            (
                str(facts.path),
                ", ".join(facts.model.targets),
                *cells,
                f"{m.get('rows', 0):,}",
                f"{m.get('parameters', 0):,}",
            )
        )
    header = ("run", "target", *(SHOWN[key] for key in metrics), "rows", "parameters")
    table = wide(data_table(header, rows, right=range(2, len(header)), class_="sortable"), "Scores of the runs")
    columns = list(dict.fromkeys(one.column for facts in runs for one in facts.importances))[:50]
    shares = [{one.column: one.share for one in facts.importances} for facts in runs]
    lines = [
        (
            column,
            *(
                joined([bar(part[column]), f" {100 * part[column]:.1f} %"]) if column in part else "–"
                for part in shares
            ),
        )
        for column in columns
    ]
    folders = [facts.path.resolve().name for facts in runs]
    heads = folders if len(set(folders)) == len(folders) else names
    importance = data_table(("column", *heads), lines, class_="sortable")
    tables = {facts.manifest.get("table_sha256") for facts in runs}
    warning = "The tables of the runs differ: compare the scores with care." if len(tables) > 1 else ""
    sections = [
        section("Scores", table, tag("p", warning, class_="note") if warning else "", name="scores"),
        section("Importance of columns", wide(importance, "Shares of the columns") if lines else "", name="effects"),
    ]
    return page(f"{len(runs)} runs compared", "Scores are of held-out rows.", sections, LINKS)
