"""The section of errors on held-out rows: residuals, or calibration, curves over thresholds and confusion matrix; worst rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kapsi.data.tabular.dates import date_text
from kapsi.data.tabular.types import Ints
from kapsi.html import Markup, data_table, joined, tag
from kapsi.plots.curves import above_thresholds, average_precision, reliability, roc_area
from kapsi.report.charts import calibration_chart, figure, scatter, short, threshold_chart
from kapsi.report.facts import MOST_WORST, Facts
from kapsi.report.sections import section, wide
from kapsi.text import counted

MOST_POINTS, CALIBRATION_BINS, LEAST_IN_BIN = 400, 10, 10
MOST_CALIBRATED, MOST_CONFUSED = 4, 8
"""Largest number of classes with a calibration chart each, and with a matrix as wide as a printed page."""
SHOWN_CLASSES, MOST_CLASSES = 10, 500
"""Numbers of classes in the tables of many classes."""
LONGEST_VALUE = 40


def error_section(facts: Facts) -> Markup:
    """Return residuals, or calibration and confusion matrix, and the rows with the largest errors."""
    if not len(facts.predictions.rows):
        return Markup("")
    charts = _class_charts(facts) if facts.labels else _residual_charts(facts)
    confusion = _confusion(facts) if facts.labels else ""
    return section(
        "Errors on held-out rows", tag("div", *charts, class_="grid"), confusion, _worst(facts), name="errors"
    )


def _residual_charts(facts: Facts) -> list[Markup]:
    known, name = facts.predictions, facts.model.targets[0]
    chosen = np.random.default_rng(0).permutation(len(known.rows))[:MOST_POINTS]
    y, predicted = known.y[chosen, 0], known.outputs[chosen, 0]
    labels = [
        f"row {row}\npredicted {figure(float(p))}, {name} {figure(float(t))}"
        for row, p, t in zip(known.rows[chosen], predicted, y, strict=True)
    ]
    title = f"{name} against its prediction"
    return [
        tag(
            "figure",
            tag("figcaption", tag("strong", title)),
            scatter(title, predicted, y, (f"prediction{facts.unit}", name), "diagonal", labels),
        ),
        tag(
            "figure",
            tag("figcaption", tag("strong", "Residuals")),
            scatter(
                "Residuals",
                predicted,
                y - predicted,
                (f"prediction{facts.unit}", f"{name} − prediction"),
                "zero",
                labels,
            ),
        ),
    ]


def _class_charts(facts: Facts) -> list[Markup]:
    known, charts = facts.predictions, []
    chosen = known.outputs.argmax(1)
    each = [(label, known.outputs[:, code], known.y == code) for code, label in enumerate(facts.labels)]
    if len(each) == 2:
        each = each[1:]
    elif len(each) > MOST_CALIBRATED:
        each = [("the predicted class", known.outputs.max(1), known.y == chosen)]
    for label, probability, hit in each:
        chart = calibration_chart(*reliability(probability, hit, CALIBRATION_BINS, LEAST_IN_BIN), label)
        title = f"Calibration: {short(label, 24)}"
        charts.append(tag("figure", tag("figcaption", tag("strong", title)), chart))
    return charts + (_threshold_charts(facts) if len(facts.labels) == 2 else [])


def _threshold_charts(facts: Facts) -> list[Markup]:
    """Return ROC and precision–recall of the second of two classes; nothing if all rows are of one class."""
    hit = facts.predictions.y == 1
    if hit.all() or not hit.any():
        return []
    true, false, thresholds = above_thresholds(hit, facts.predictions.outputs[:, 1])
    label = short(facts.labels[1], 24)
    rates, precision = (false / false[-1], true / true[-1]), true[1:] / (true[1:] + false[1:])
    roc = threshold_chart(
        f"ROC of the class {label}", *rates, thresholds, ("false positive rate", "true positive rate")
    )
    curve = threshold_chart(
        f"Precision and recall of the class {label}", rates[1][1:], precision, thresholds[1:], ("recall", "precision")
    )
    captions = (
        ("ROC", f"AUC {roc_area(true, false):.4f}", roc),
        ("Precision and recall", f"average precision {average_precision(true, false):.4f}", curve),
    )
    return [
        tag("figure", tag("figcaption", tag("strong", f"{name}: {label}"), tag("span", value)), chart)
        for name, value, chart in captions
    ]


def _confusion(facts: Facts) -> Markup:
    """Return the confusion matrix, or a table of classes where the matrix is wider than a page."""
    n, known = len(facts.labels), facts.predictions
    counts = np.zeros((n, n), dtype=np.int64)
    np.add.at(counts, (known.y, known.outputs.argmax(1)), 1)
    if n > MOST_CONFUSED:
        return class_tables(facts.labels, counts)
    rows: list[tuple[object, ...]] = []
    for label, line in zip(facts.labels, counts.tolist(), strict=True):
        total = max(1, sum(line))
        cells = [tag("span", f"{count:,}", class_="cell", style=f"--s:{count / total:.2f}") for count in line]
        rows.append((short(label, 24), *cells, _percent(line[len(rows)], sum(line))))
    header = ("class of the row", *(f"predicted {short(label, 18)}" for label in facts.labels), "recall")
    table = data_table(header, rows, right=range(1, len(header)), class_="confusion")
    return joined([tag("h3", "Confusion matrix"), wide(table, "Confusion matrix")])


def class_tables(labels: Sequence[str], counts: Ints) -> Markup:
    """Return recall and precision of each class and its most frequent error, the lowest recall first."""
    rows_of, predicted, right = counts.sum(1), counts.sum(0), counts.diagonal()
    wrong = counts - np.diag(right)
    recall = np.where(rows_of > 0, right / np.maximum(rows_of, 1), 2.0)
    order = np.lexsort((-rows_of, recall))[:MOST_CLASSES].tolist()
    lines = []
    for i in order:
        other = int(wrong[i].argmax())
        error = f"{short(labels[other], 24)} ({counted(int(wrong[i, other]), 'row')})" if wrong[i, other] else "–"
        shares = (_percent(right[i], rows_of[i]), _percent(right[i], predicted[i]))
        lines.append((short(labels[i], 24), f"{rows_of[i]:,}", *shares, error))
    header = ("class", "rows", "recall", "precision", "most often taken for")

    def table(part: Sequence[Sequence[str]], label: str) -> Markup:
        return wide(data_table(header, part, right=(1, 2, 3), class_="sortable"), label)

    more = ""
    if len(lines) > SHOWN_CLASSES:
        summary = (
            f"all {len(labels):,} classes"
            if len(lines) == len(labels)
            else f"{len(lines):,} of {len(labels):,} classes"
        )
        more = tag("details", tag("summary", summary), table(lines, "Recall of the classes"))
    first = table(lines[:SHOWN_CLASSES], "Classes of the lowest recall")
    return joined([tag("h3", "Classes of the lowest recall"), first, more])


def _percent(part: int, whole: int) -> str:
    """Return a share in percent, a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _worst(facts: Facts) -> Markup:
    known = facts.predictions
    order = np.argsort(-known.errors, kind="stable")[:MOST_WORST]
    kept = {} if facts.kept is None else {int(n): i for i, n in enumerate(facts.kept.numbers)}
    names = [one.column for one in facts.importances[:6]]
    rows = []
    for i in order.tolist():
        if facts.labels:
            best = int(known.outputs[i].argmax())
            cells = [facts.labels[known.y[i]], facts.labels[best], f"{known.outputs[i, known.y[i]]:.3f}"]
        else:
            cells = [figure(float(known.y[i, 0])), figure(float(known.outputs[i, 0])), figure(float(known.errors[i]))]
        place = kept.get(int(known.rows[i]))
        values = [
            "–" if facts.kept is None or place is None else _value(facts.kept.table.columns[n], place) for n in names
        ]
        rows.append((f"{int(known.rows[i]):,}", *cells, *values))
    last = "probability of its class" if facts.labels else "absolute error"
    header = ("row", short(facts.model.targets[0], 24), "predicted", last, *(short(n, 24) for n in names))
    right = (3,) if facts.labels else range(1, 4)
    table = wide(data_table(header, rows, right=right, class_="sortable"), "Rows with the largest errors")
    return joined([tag("h3", "Rows with the largest errors"), table])


def _value(column: Any, place: int) -> str:
    value = column.values[place]
    if column.missing[place]:
        return "(missing)"
    if column.kind == "image":
        return "(image)"
    if column.kind == "date":
        return date_text(float(value))
    return short(str(value), LONGEST_VALUE) if column.kind == "text" else figure(float(value))
