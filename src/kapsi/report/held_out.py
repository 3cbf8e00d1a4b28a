"""The section of errors on held-out rows: residuals, or calibration, curves over thresholds and confusion matrix; worst rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from kapsi.html import Markup, data_table, joined, tag
from kapsi.plots.curves import above_thresholds, average_precision, reliability, roc_area
from kapsi.report.charts import calibration_chart, figure, scatter, short, threshold_chart
from kapsi.report.facts import MOST_WORST, Facts
from kapsi.report.sections import section, wide

MOST_POINTS, CALIBRATION_BINS, LEAST_IN_BIN, MOST_CONFUSED = 400, 10, 10, 12
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
    shown = [1] if len(facts.labels) == 2 else range(min(len(facts.labels), 4))
    for code in shown:
        parts = reliability(known.outputs[:, code], known.y == code, CALIBRATION_BINS, LEAST_IN_BIN)
        chart = calibration_chart(*parts, facts.labels[code])
        title = f"Calibration: {short(facts.labels[code], 24)}"
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
    labels = facts.labels[:MOST_CONFUSED]
    n = len(facts.labels)
    known = facts.predictions
    counts = np.zeros((n, n), dtype=np.int64)
    np.add.at(counts, (known.y, known.outputs.argmax(1)), 1)
    rows = []
    for i, label in enumerate(labels):
        total = max(1, int(counts[i].sum()))
        cells = [
            tag("span", f"{int(counts[i, j]):,}", class_="cell", style=f"--s:{counts[i, j] / total:.2f}")
            for j in range(len(labels))
        ]
        rows.append((short(label, 24), *cells, f"{100 * counts[i, i] / total:.1f} %"))
    header = ("class of the row", *(f"predicted {short(label, 18)}" for label in labels), "recall")
    table = data_table(header, rows, right=range(1, len(header)), class_="confusion")
    return joined([tag("h3", "Confusion matrix"), wide(table, "Confusion matrix")])


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
        return str(np.datetime64(int(value), "s"))
    return short(str(value), LONGEST_VALUE) if column.kind == "text" else figure(float(value))
