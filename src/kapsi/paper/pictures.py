"""Pictures of results as SVG: errors against the paper, rank sweep, learning curves, ablation, iris, expanded digits.

matplotlib is imported for the first picture only; equal results give equal files.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kapsi.data.images import DEVIATIONS, MEANS
from kapsi.errors import DataError
from kapsi.paper.expected import LABELS
from kapsi.paper.procedures.ablation import GRAYS, POOLED, SIDE, copies, unpacked
from kapsi.paper.store import Result
from kapsi.paper.tables import Line, ResultTable, shown_results
from kapsi.plots.catalogue import STYLE, _matplotlib

OURS, THEIRS, SECOND = "#1f77b4", "#7f7f7f", "#d62728"
SHADES = ("#1f77b4", "#7fb2d9", "#c3dcef")
MARKERS = "osD^v<>P"
METRIC_NAMES = {"mse": "mean squared error, test", "accuracy": "accuracy, test"}
MAX_PANELS, MAX_NAMES = 12, 60


@dataclass(frozen=True)
class Picture:
    """A picture: title, name of the file, and SVG."""

    title: str
    file: str
    svg: str


def pictures(table: ResultTable, results: Iterable[Result] = ()) -> list[Picture]:
    """Return the pictures listed in the experiment of a table; pictures without results are skipped.

    Args:
        table: the table.
        results: stored results, for learning curves.

    Raises:
        KapsiError: matplotlib is not installed.
    """
    experiment = table.experiment
    drawn = []
    curves = shown_results(experiment, results, seeds=table.seeds or None, quick=table.quick)
    makers: Mapping[str, Callable[[Any, ResultTable], list[tuple[str, str, Any]]]] = {
        "functions": _functions,
        "rank-sweep": _sweep,
        "depth-heads": _sweep,
        "learning-curves": lambda matplotlib, shown: _learning(matplotlib, shown, curves),
        "ablation": _ablation,
        "dependency": lambda matplotlib, shown: _dependency(shown, curves),
        "pairs": lambda matplotlib, shown: _pairs(matplotlib, shown),
        "digits": lambda matplotlib, shown: _digits(matplotlib, shown, curves),
    }
    for kind in experiment.pictures:
        if not table.done:
            continue
        matplotlib = _matplotlib()
        with matplotlib.rc_context(STYLE):
            for title, suffix, figure in makers[kind](matplotlib, table):
                drawn.append(Picture(title, f"{experiment.name}{suffix}.svg", _svg(figure)))
    return drawn


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    # The matplotlib version is left out, so that files do not change with every release.
    lines = buffer.getvalue().splitlines()
    return (
        "\n".join(line.rstrip() for line in lines if "Matplotlib v" not in line and "matplotlib.org" not in line) + "\n"
    )


def _figure(matplotlib: Any, width: float, height: float) -> Any:
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def _scale(table: ResultTable) -> str:
    return "linear" if table.experiment.higher_is_better else "log"


def _literal(text: Any) -> str:
    """Escape dollars, the start of a formula."""
    return str(text).replace("$", r"\$")


def _known(values: Sequence[float | None], log: bool) -> list[float]:
    """Replace undrawable values by NaN."""
    return [
        math.nan if value is None or not math.isfinite(value) or (log and value <= 0) else value for value in values
    ]


def _scores_with_errors(lines: Sequence[Line], log: bool) -> tuple[list[float], list[list[float]]]:
    """Return means of the headline, and lower and upper error bars."""
    scores = _known([line.result.mean if line.result else None for line in lines], log)
    upper = [line.result.std if line.result and math.isfinite(line.result.std) else 0.0 for line in lines]
    # Lower error bars must stay above zero on a log axis.
    lower = [min(s, 0.9 * value) if log and value == value else s for value, s in zip(scores, upper, strict=True)]
    return scores, [lower, upper]


# ------------------------------------------------------------------------------------------------ kinds


def _functions(matplotlib: Any, table: ResultTable) -> list[tuple[str, str, Any]]:
    """Draw the compared columns of the paper, and the headline with standard deviation, for every row."""
    lines = table.lines
    log = not table.experiment.higher_is_better
    figure = _figure(matplotlib, max(6.0, 0.24 * len(lines) + 2.5), 3.6)
    axes = figure.add_subplot()
    positions = np.arange(len(lines))
    for number, column in enumerate(table.compared):
        values = _known([line.paper[column].mean if column in line.paper else None for line in lines], log)
        label = f"{LABELS.get(column, column)} (paper)"
        axes.plot(positions, values, MARKERS[(number + 1) % len(MARKERS)], color=THEIRS, mfc="none", ms=5, label=label)
    scores, errors = _scores_with_errors(lines, log)
    label = next((_literal(line.headline.label) for line in lines if line.headline is not None), "kapsi")
    axes.errorbar(positions, scores, yerr=errors, fmt="o", color=OURS, ms=5, lw=1, label=label)
    axes.set_yscale(_scale(table))
    axes.set_xticks(positions, [_literal(line.row.name) for line in lines], rotation=90)
    axes.set(ylabel=METRIC_NAMES[table.experiment.metric], xlim=(-0.7, len(lines) - 0.3))
    cut = [line.row.name for line, score in zip(lines, scores, strict=True) if line.result and math.isnan(score)]
    if cut:
        axes.set_xlabel(_literal(f"not drawn, zero or not finite: {', '.join(cut)}"))
    axes.set_title(_literal(table.experiment.title))
    axes.grid(axis="x", lw=0.3, alpha=0.6)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return [(table.experiment.title, "", figure)]


def _sweep(matplotlib: Any, table: ResultTable) -> list[tuple[str, str, Any]]:
    """Draw score and parameters over each axis of the rows."""
    names = list(dict.fromkeys(axis for line in table.lines for axis in line.row.axes))
    if not names:
        return []
    log = not table.experiment.higher_is_better
    figure = _figure(matplotlib, 4.2 * len(names) + 1.0, 3.6)
    handles: dict[str, Any] = {}
    for i, axis in enumerate(names):
        lines = [line for line in table.lines if axis in line.row.axes and len(line.row.axes) == 1]
        axes = figure.add_subplot(1, len(names), i + 1)
        x = [line.row.axes[axis] for line in lines]
        numbers = all(isinstance(value, int | float) for value in x)
        if not numbers:
            x, texts = list(range(len(x))), [_literal(value) for value in x]
        scores, errors = _scores_with_errors(lines, log)
        axes.errorbar(x, scores, yerr=errors, fmt="o-", color=OURS, ms=4, label="kapsi")
        for number, column in enumerate(table.compared):
            values = _known([line.paper[column].mean if column in line.paper else None for line in lines], log)
            marker = MARKERS[(number + 1) % len(MARKERS)]
            axes.plot(
                x, values, f"{marker}:", color=THEIRS, mfc="none", ms=5, label=f"{LABELS.get(column, column)} (paper)"
            )
        axes.set_yscale(_scale(table))
        axes.set(xlabel=axis, ylabel=METRIC_NAMES[table.experiment.metric])
        if numbers:
            axes.locator_params(axis="x", integer=True)
        else:
            axes.set_xticks(x, texts, rotation=90)
        counts = _known([line.result.parameters if line.result else None for line in lines], True)
        printed = _known([_parameters(line, table.compared) for line in lines], True)
        handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if any(count == count for count in [*counts, *printed]):
            second = axes.twinx()
            second.spines["right"].set_visible(True)
            second.plot(x, counts, "--", color=SECOND, lw=1, label="parameters")
            if any(count == count for count in printed):
                second.plot(x, printed, "x", color=SECOND, ms=4, label="parameters (paper)")
            known = [count for count in [*counts, *printed] if count == count]
            if max(known) > 20 * min(known):
                second.set_yscale("log")
            else:
                second.set_ylim(bottom=0)
            second.set_ylabel("parameters", color=SECOND)
            handles.update(zip(*reversed(second.get_legend_handles_labels()), strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    figure.suptitle(_literal(table.experiment.title), fontsize=10)
    return [(table.experiment.title, "", figure)]


def _parameters(line: Line, columns: Sequence[str]) -> int | None:
    """Return the paper's number of parameters for a row, from the first compared column with a number."""
    counts = [line.paper[column].parameters for column in columns if column in line.paper]
    return next((count for count in counts if count is not None), None)


def _learning(
    matplotlib: Any, table: ResultTable, results: Mapping[tuple[str, str], Sequence[Result]]
) -> list[tuple[str, str, Any]]:
    """Draw the error on training and test rows by iteration, the median over seeds."""
    lines = [
        line
        for line in table.lines
        if any(result.curves for method in table.methods for result in results.get((line.row.name, method.name), ()))
    ][:MAX_PANELS]
    if not lines:
        return []
    across = min(3, len(lines))
    down = math.ceil(len(lines) / across)
    figure = _figure(matplotlib, 3.4 * across + 1.2, 2.6 * down + 0.5)
    colors = matplotlib.colormaps["tab10"]
    log = not table.experiment.higher_is_better
    handles: dict[str, Any] = {}
    for i, line in enumerate(lines):
        axes = figure.add_subplot(down, across, i + 1)
        for number, method in enumerate(table.methods):
            with_curves = [result for result in results.get((line.row.name, method.name), ()) if result.curves]
            for name, style in (("train", ":"), ("test", "-")):
                curves = [result.curves[name] for result in with_curves if name in result.curves]
                if not curves:
                    continue
                length = min(map(len, curves))
                first = with_curves[0].curves.get("iteration", ())
                x = list(first[:length]) if len(first) >= length else list(range(1, length + 1))
                y = np.median(np.array([curve[:length] for curve in curves]), axis=0)
                (drawn,) = axes.plot(x, _known(y.tolist(), log), style, color=colors(number % 10), lw=1.2)
                handles.setdefault(f"{_literal(method.label)}, {name}", drawn)
        axes.set_yscale(_scale(table))
        axes.set_title(_literal(line.row.name))
        if i >= len(lines) - across:
            axes.set_xlabel("iteration")
        if i % across == 0:
            axes.set_ylabel("mean squared error" if log else "accuracy")
    figure.legend(list(handles.values()), list(handles), loc="outside right upper")
    figure.suptitle(_literal(table.experiment.title), fontsize=10)
    return [(table.experiment.title, "", figure)]


def _dependency(table: ResultTable, results: Mapping[tuple[str, str], Sequence[Result]]) -> list[tuple[str, str, Any]]:
    """Draw the graph of each method for the first seed."""
    from kapsi.zoo.three_models import Graph, draw

    made = []
    for line in table.lines:
        graphs = []
        for method in table.methods:
            extra = next((result.extra for result in results.get((line.row.name, method.name), ())), {})
            if "arrows" in extra and "lines" in extra:
                pairs = (tuple((a, b) for a, b in extra[key]) for key in ("arrows", "lines"))
                graphs.append(Graph(_literal(method.label), *pairs))
        if graphs:
            # Names may contain characters unsuitable for links.
            file = re.sub(r"[^A-Za-z0-9_.-]+", "-", line.row.name)
            made.append((f"{table.experiment.title}: {line.row.name}", f"-{file}", draw(graphs)))
    return made


def _pairs(matplotlib: Any, table: ResultTable) -> list[tuple[str, str, Any]]:
    """Draw iris: every pair of columns below the diagonal, the values of each column on it, by species."""
    from sklearn.datasets import load_iris

    data = load_iris()
    x, y = np.asarray(data.data), np.asarray(data.target)
    names = [name.removesuffix(" (cm)") for name in data.feature_names]
    figure = _figure(matplotlib, 7.0, 6.4)
    colors = matplotlib.colormaps["tab10"]
    count = len(names)
    handles = {}
    for i in range(count):
        for j in range(i + 1):
            axes = figure.add_subplot(count, count, i * count + j + 1)
            for number, species in enumerate(map(str, data.target_names)):
                rows = x[y == number]
                if i == j:
                    bins = np.linspace(x[:, i].min(), x[:, i].max(), 16)
                    axes.hist(rows[:, i], bins, color=colors(number), alpha=0.6)
                else:
                    style = {"ls": "", "marker": ".", "ms": 3.5, "mew": 0, "color": colors(number), "alpha": 0.7}
                    (handles[species],) = axes.plot(rows[:, j], rows[:, i], **style)
            if i == count - 1:
                axes.set_xlabel(f"{names[j]} / cm")
            if j == 0:
                axes.set_ylabel("flowers" if i == 0 else f"{names[i]} / cm")
    figure.legend(list(handles.values()), list(handles), loc="upper right", bbox_to_anchor=(0.98, 0.98), markerscale=3)
    return [(f"{table.experiment.title}: pairs of columns", "-pairs", figure)]


def _digits(
    matplotlib: Any, table: ResultTable, results: Mapping[tuple[str, str], Sequence[Result]]
) -> list[tuple[str, str, Any]]:
    """Draw for each class a test image, κ(x) and ψ, for pixels and for products of two pixels."""
    recorded = [result.extra["digits"] for group in results.values() for result in group if "digits" in result.extra]
    if not recorded:
        return []
    try:
        digits = [(digit["class"], *_expanded(digit)) for digit in recorded[0]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{table.experiment.name}.jsonl: extra.digits is not as recorded ({error}); run it again"
        ) from None
    figure = _figure(matplotlib, 6.6, 1.55 * len(digits) + 0.5)
    headings = ("κ(x), order 1", "κ(x), order 2", "ψ, order 1", "ψ, order 2")
    for row, (name, *panels) in enumerate(digits):
        for column, panel in enumerate(panels):
            axes = figure.add_subplot(len(digits), 4, 4 * row + column + 1)
            largest = float(np.abs(panel).max()) or 1.0
            # Few levels of gray: the SVG holds the panel as PNG, which is a quarter of the size of all levels.
            levels = np.rint(panel / largest * GRAYS) / GRAYS
            axes.imshow(levels, cmap="gray", vmin=-1, vmax=1, interpolation="none")
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(headings[column])
            if column == 0:
                axes.set_ylabel(str(name), rotation=0, labelpad=8)
    return [(table.experiment.title, "", figure)]


def _expanded(digit: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the panels of a recorded digit: κ(x) and ψ, each for pixels and for products of two pixels."""
    side = SIDE * SIDE // POOLED
    image = unpacked(digit["image"], SIDE**2) / 255.0
    x = (image - MEANS["mnist"][0]) / DEVIATIONS["mnist"][0]
    pixels = unpacked(digit["pixels"], SIDE**2) / GRAYS - 1.0
    products = unpacked(digit["products"], side**2) / GRAYS - 1.0
    return x.reshape(SIDE, SIDE), copies(np.outer(x, x)), pixels.reshape(SIDE, SIDE), products.reshape(side, side)


def _ablation(matplotlib: Any, table: ResultTable) -> list[tuple[str, str, Any]]:
    """Draw best, median and mean by function for each axis, and a map of the first two axes for each value of the third."""
    if not table.axes:
        return []
    return [*_bars(matplotlib, table), *_maps(matplotlib, table)]


def _bars(matplotlib: Any, table: ResultTable) -> list[tuple[str, str, Any]]:
    names = list(dict.fromkeys(entry.axis for entry in table.axes))
    groups = [[entry for entry in table.axes if entry.axis == axis][:MAX_NAMES] for axis in names]
    heights = [0.3 * len(group) + 0.8 for group in groups]
    figure = _figure(matplotlib, 7.0, sum(heights))
    grid = figure.add_gridspec(len(names), 1, height_ratios=heights)
    for i, (axis, group) in enumerate(zip(names, groups, strict=True)):
        axes = figure.add_subplot(grid[i])
        y = np.arange(len(group))[::-1]
        for number, part in enumerate(("best", "median", "mean")):
            label = "max" if part == "best" and table.experiment.higher_is_better else part
            values = _known([getattr(entry, part) for entry in group], not table.experiment.higher_is_better)
            axes.barh(y + 0.27 * (1 - number), values, 0.25, color=SHADES[number], label=label)
        axes.set_yticks(y, [f"{_literal(entry.value)} ({entry.count})" for entry in group])
        axes.set_xscale(_scale(table))
        axes.set_title(f"by {axis}")
        axes.set_ylim(-0.7, len(group) - 0.3)
        if i == 0:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xlabel(METRIC_NAMES[table.experiment.metric])
    return [(f"{table.experiment.title}: max, median and mean by function", "-bars", figure)]


def _maps(matplotlib: Any, table: ResultTable) -> list[tuple[str, str, Any]]:
    names = list(dict.fromkeys(axis for line in table.lines for axis in line.row.axes))
    down, across = names[0], names[1]
    rest: dict[str, list[Line]] = {}
    for line in table.lines:
        panel = " · ".join(str(value) for axis, value in line.row.axes.items() if axis not in (down, across))
        rest.setdefault(panel, []).append(line)
    panels = list(rest.items())[:MAX_PANELS]
    y_names = list(dict.fromkeys(str(line.row.axes[down]) for line in table.lines if down in line.row.axes))
    x_names = list(dict.fromkeys(str(line.row.axes[across]) for line in table.lines if across in line.row.axes))
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (columns * (0.2 * len(x_names) + 0.6) + 2.6, rows * (0.17 * len(y_names) + 1.6) + 0.4)
    figure = _figure(matplotlib, *size)
    log = not table.experiment.higher_is_better
    scores = [line.result.mean for line in table.lines if line.result is not None and math.isfinite(line.result.mean)]
    scores = [math.log10(score) for score in scores if score > 0] if log else scores
    low, high = (min(scores), max(scores)) if scores else (0.0, 1.0)
    shades = matplotlib.colormaps["viridis_r" if log else "viridis"].with_extremes(bad="#dddddd")
    drawn, panels_drawn = None, []
    for i, (panel, lines) in enumerate(panels):
        array = np.full((len(y_names), len(x_names)), np.nan)
        for line in lines:
            if line.result is None or down not in line.row.axes or across not in line.row.axes:
                continue
            (value,) = _known([line.result.mean], log)
            at = y_names.index(str(line.row.axes[down])), x_names.index(str(line.row.axes[across]))
            array[at] = math.log10(value) if log and value == value else value
        axes = figure.add_subplot(rows, columns, i + 1)
        drawn = axes.imshow(array, cmap=shades, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        axes.set_title(_literal(panel))
        axes.set_xticks(range(len(x_names)), list(map(_literal, x_names)), rotation=90, fontsize=6)
        axes.set_yticks(
            range(len(y_names)),
            list(map(_literal, y_names)) if i % columns == 0 else [""] * len(y_names),
            fontsize=6,
        )
        panels_drawn.append(axes)
    if drawn is not None:
        name = METRIC_NAMES[table.experiment.metric]
        figure.colorbar(drawn, ax=panels_drawn, label=f"log₁₀ of {name}" if log else name, shrink=0.6)
    figure.suptitle(_literal(f"{table.experiment.title}: {down} × {across}"), fontsize=10)
    return [(f"{table.experiment.title}: {down} × {across}", "-maps", figure)]
