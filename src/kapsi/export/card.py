"""Model cards: README.md and config.json of a folder for the Hugging Face Hub, without rows of the table."""

from __future__ import annotations

import datetime
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kapsi.data.tabular import DateColumn, NumberColumn
from kapsi.data.tabular.encoders import Categories
from kapsi.data.tabular.image_column import ImageColumn
from kapsi.data.tabular.text_column import TextColumn
from kapsi.export.interface import FittedTable, interface
from kapsi.spec import to_yaml

__all__ = ["model_card", "model_config"]

MOST_SHOWN = 50
"""Most columns and labels listed in a card."""


def model_config(model: FittedTable) -> dict[str, Any]:
    """Return the content of config.json: library, task, columns and labels."""
    facts = interface(model)
    columns = [{key: column[key] for key in ("name", "kind", "unit") if key in column} for column in facts["columns"]]
    return (
        {"library_name": "kapsi", "kapsi_version": facts["kapsi"], "architectures": ["kapsi.Model"]}
        | {name: facts[name] for name in ("task", "target", "classes")}
        | {"columns": columns}
    )


def model_card(model: FittedTable, manifest: Mapping[str, Any], title: str) -> str:
    """Return the text of README.md: metadata of the Hub, data, scores, heads, limits, and how to load the model.

    Args:
        model: the model with preprocessing.
        manifest: scores, leaderboard and notes, as in `run.json`; anything may be absent.
        title: name of the model.
    """
    targets = model.target if isinstance(model.target, tuple) else (model.target,)
    predicted = ", ".join(map(literal, targets))
    kind = "Classification" if model.classes is not None else "Regression"
    rows = manifest.get("rows")
    fitted = f" The table of the fit has {rows:,} rows with a target." if isinstance(rows, int) else ""
    sections = [
        f"---\n{to_yaml(_metadata(model, manifest, title), unicode=True)}---",
        f"# {literal(title)}",
        f"{kind}: the model predicts {predicted} from {len(model.preprocessing.columns):,} columns of a table.{fitted}",
        *_use(model),
        *_data(model, manifest),
        *_scores(manifest),
        *_limits(model, manifest),
    ]
    return "\n\n".join(sections) + "\n"


def literal(text: object) -> str:
    """Return text of a table for Markdown: one line, without markup.

    Example:
        >>> literal("a|b <script>" + chr(10) + "*c*")
        'a\\\\|b &lt;script&gt; \\\\*c\\\\*'
    """
    line = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+!|~$])", r"\\\1", line)


def _metadata(model: FittedTable, manifest: Mapping[str, Any], title: str) -> dict[str, Any]:
    task = f"tabular-{model.task}"
    data: dict[str, Any] = {"library_name": "kapsi", "pipeline_tag": task}
    data["tags"] = ["kapsi", "tabular", "reconciled-polynomial-network"]
    metrics = [{"type": name, "value": value} for name, value in _numbers(manifest, "kapsi") if "std" not in name]
    if metrics:
        table = {"name": str(manifest.get("table") or "table"), "type": "tabular"}
        results = [{"task": {"type": task}, "dataset": table, "metrics": metrics}]
        data["model-index"] = [{"name": title, "results": results}]
    return data


def _use(model: FittedTable) -> list[str]:
    columns = model.preprocessing.columns
    pairs = ", ".join(f"{column.name!r}: […]" for column in columns[:3])
    more = ", …" if len(columns) > 3 else ""
    lines = ["import kapsi as kp", "", 'run = kp.LoadedRun.from_pretrained("FOLDER")  # or "USER/NAME", download=True']
    lines.append(f"run.predict({{{pairs}{more}}})")
    text = "`FOLDER` is this folder. The files hold no code and no pickle, and the columns may come in any order."
    return ["## Use", "```\npip install kapsi\n```", "```python\n" + "\n".join(lines) + "\n```", text]


def _data(model: FittedTable, manifest: Mapping[str, Any]) -> list[str]:
    columns = model.preprocessing.columns
    ranges = getattr(getattr(model, "ranges", None), "inputs", {})
    rows = [(literal(column.name), *_summary(column, ranges.get(column.name))) for column in columns[:MOST_SHOWN]]
    text = "Statistics of the training rows; the rows themselves are not in these files."
    if len(columns) > MOST_SHOWN:
        text += f" The first {MOST_SHOWN} of {len(columns):,} columns:"
    parts = ["## Data", text, markdown_table(("column", "type", "values"), rows)]
    if model.classes is not None:
        shown = ", ".join(map(literal, model.classes[:MOST_SHOWN]))
        parts.append(f"Classes: {shown}{', …' if len(model.classes) > MOST_SHOWN else ''}")
    return parts


def _summary(column: object, interval: tuple[float, float] | None) -> tuple[str, str]:
    """Return type and values of a column."""
    if isinstance(column, Categories):
        return "categories", f"{len(column.categories):,} categories"
    if isinstance(column, DateColumn):
        ends = "" if interval is None else " to ".join(map(_date, interval))
        return "dates", ends
    if isinstance(column, NumberColumn):
        unit = f" {literal(column.unit)}" if column.unit else ""
        inside = "" if interval is None else f", {interval[0]:.4g} to {interval[1]:.4g}"
        return f"numbers{unit}", f"mean {column.mean:.4g}, standard deviation {column.scale:.4g}{inside}"
    if isinstance(column, TextColumn):
        return "text", f"{column.rows:,} texts, {len(column.counts):,} unigrams and bigrams"
    if isinstance(column, ImageColumn):
        return "images", f"{column.rows:,} images, {column.height} × {column.width} pixels"
    return "text", ""


def _date(seconds: float) -> str:
    try:
        return str((datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds)).date())
    except OverflowError:
        return f"{seconds:.4g} s"


def _numbers(manifest: Mapping[str, Any], model: str) -> list[tuple[str, float]]:
    """Return the names and values of the scores of a model."""
    scores = manifest.get("scores")
    entry = scores.get(model) if isinstance(scores, Mapping) else None
    items = entry.items() if isinstance(entry, Mapping) else ()
    return [(str(name), float(value)) for name, value in items if isinstance(value, int | float)]


def _scores(manifest: Mapping[str, Any]) -> list[str]:
    parts: list[str] = []
    scores, heads = manifest.get("scores"), manifest.get("leaderboard")
    names = [name for name, _ in _numbers(manifest, "kapsi") if "std" not in name]
    if names and isinstance(scores, Mapping):
        rows = []
        for model in scores:
            known = dict(_numbers(manifest, model))
            rows.append((literal(model), *(f"{known[name]:.4g}" if name in known else "" for name in names)))
        folds = manifest.get("folds")
        where = f"{folds}-fold cross-validation" if folds else f"{manifest.get('scored_rows') or 0:,} held-out rows"
        parts += ["## Scores", f"On {where}.", markdown_table(("model", *map(literal, names)), rows)]
    if isinstance(heads, Sequence) and all(isinstance(row, Mapping) for row in heads) and heads:
        cells = ("head", "loss", "score", "weight")
        rows = [tuple(_cell(row.get(name)) for name in cells) for row in heads]
        parts += ["## Heads", "Heads that were compared on held-out training rows.", markdown_table(cells, rows)]
    return parts


def _limits(model: FittedTable, manifest: Mapping[str, Any]) -> list[str]:
    lines = [
        "Predictions are for rows like the training rows. Outside of their ranges they are extrapolated (`kapsi predict` counts "
        "such rows).",
        "Unseen categories and missing values have no effect of their own, or that of the mean of all rows.",
        "The model describes associations; these are no effects of interventions.",
        "The files hold names of columns, categories, labels, means and ranges. Publish them only where these may be public.",
    ]
    notes = manifest.get("notes")
    known = [literal(note) for note in notes if isinstance(note, str)] if isinstance(notes, Sequence) else []
    parts = ["## Limits", bullets(lines)]
    return [*parts, "Notes of the fit:", bullets(known)] if known else parts


def bullets(lines: Iterable[str]) -> str:
    """Return a list in Markdown."""
    return "\n".join(f"- {line}" for line in lines)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; the cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else literal("" if value is None else value)
