"""Charts as inline SVG: colors by CSS classes, values on hover by titles, no script and no library."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence

import numpy as np

from kapsi.data.tabular.types import Floats
from kapsi.html import Markup, joined, tag
from kapsi.interpret import Effect, PairEffect
from kapsi.training.records import Epoch

WIDTH, HEIGHT = 340, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 18, 30
MOST_HOVERED, MOST_LINES, MOST_SHOWN_LEVELS, LONGEST_LABEL = 40, 6, 16, 16


def short(text: str, longest: int = LONGEST_LABEL) -> str:
    """Return a text cut to a length."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def figure(value: float) -> str:
    """Return a number with four significant digits, or as a whole number, without trailing zeros.

    Example:
        >>> figure(0.125), figure(-54321.6), figure(12345678.0), figure(float("nan"))
        ('0.125', '−54,322', '1.235e+07', '–')
    """
    if not math.isfinite(value):
        return "–"
    if 1e4 <= abs(value) < 1e6:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−") if "e" not in f"{value:.4g}" else f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers within a range.

    Example:
        >>> ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    size = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if span / (m * size) <= count + 0.5)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _day(seconds: float) -> str:
    return (datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%d")


class Axes:
    """A frame with two linear axes.

    Args:
        x: ends of the horizontal axis.
        y: ends of the vertical axis.
        x_name: name of the horizontal axis.
        show: text of a position of the horizontal axis.
        height: height in pixels.
        y_name: name of the vertical axis.
        show_y: text of a position of the vertical axis.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        x_name: str = "",
        show: Callable[[float], str] = figure,
        height: int = HEIGHT,
        y_name: str = "",
        show_y: Callable[[float], str] = figure,
    ) -> None:
        self.x, self.y, self.show, self.height = _wide(x), _wide(y), show, height
        self.x_name, self.y_name, self.show_y = x_name, y_name, show_y

    def px(self, x: float) -> float:
        """Return the pixel of a position."""
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (x - self.x[0]) / (self.x[1] - self.x[0]), 1)

    def py(self, y: float) -> float:
        """Return the pixel of a value."""
        return round(self.height - BOTTOM - (self.height - BOTTOM - TOP) * (y - self.y[0]) / (self.y[1] - self.y[0]), 1)

    def draw(self, title: str, *marks: object) -> Markup:
        """Return the chart with its marks; the title is its name for screen readers."""
        lines: list[Markup] = []
        for value in ticks(*self.y, 4):
            at = self.py(value)
            kind = "zero" if value == 0 and self.show_y is figure else "grid"
            lines.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_=kind))
            lines.append(tag("text", self.show_y(value), x=LEFT - 6, y=at + 3.5, class_="tick", text_anchor="end"))
        count = 3 if self.show is not figure else 5
        for value in ticks(*self.x, count):
            at, y = self.px(value), self.height - BOTTOM + 13
            lines.append(tag("text", self.show(value), x=at, y=y, class_="tick", text_anchor="middle"))
        for text, x, anchor, y in (
            (self.x_name, (WIDTH + LEFT) / 2, "middle", self.height - 4),
            (self.y_name, 4, "start", 9),
        ):
            if text:
                lines.append(tag("text", short(text, 46), x=x, y=y, class_="axis", text_anchor=anchor))
        return svg(title, self.height, *lines, *marks)


def svg(title: str, height: float, *marks: object, width: int = WIDTH) -> Markup:
    """Return a drawing with a name."""
    return tag("svg", *marks, viewBox=f"0 0 {width} {height:g}", role="img", aria_label=title, class_="chart")


def _wide(ends: tuple[float, float]) -> tuple[float, float]:
    """Return a range of positive length."""
    low, high = ends
    if high - low > 1e-12 * max(1.0, abs(low), abs(high)):
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _range(*arrays: Floats, least: float = 0.0) -> tuple[float, float]:
    """Return a range that contains all finite values and 0, with a margin."""
    values = np.concatenate([np.ravel(array) for array in arrays])
    values = values[np.isfinite(values)]
    low, high = min(0.0, float(values.min(initial=0.0)), -least), max(0.0, float(values.max(initial=0.0)), least)
    margin = 0.06 * (high - low)
    return low - margin, high + margin


def path(axes: Axes, x: Floats, y: Floats, **attributes: object) -> Markup:
    """Return a line through points."""
    points = " L".join(f"{axes.px(a):g},{axes.py(b):g}" for a, b in zip(x, y, strict=True))
    return tag("path", d=f"M{points}", **{"fill": "none", **attributes})


# ------------------------------------------------------------------------------------------------ effects


def effect_chart(effect: Effect, least: float = 0.0) -> Markup:
    """Return the chart of an effect: a line with band and density, or a dot for each category.

    Args:
        effect: the effect.
        least: half the least height of the vertical axis, common to the charts of a page: flat effects look flat.
    """
    return _levels_chart(effect, least) if effect.levels else _line_chart(effect, least)


def _line_chart(effect: Effect, least: float) -> Markup:
    outputs = min(len(effect.outputs), MOST_LINES)
    y = _range(effect.values[:, :outputs], effect.low[:, :outputs], effect.high[:, :outputs], least=least)
    unit = f" ({effect.unit})" if effect.unit else ""
    show = _day if effect.kind == "date" else figure
    axes = Axes((float(effect.points[0]), float(effect.points[-1])), y, f"{effect.column}{unit}", show)
    marks = [_density(axes, effect)]
    for i in range(outputs):
        curve = effect.values[:, i]
        if not effect.exact:
            ring = [
                f"{axes.px(a):g},{axes.py(b):g}"
                for a, b in (
                    *zip(effect.points, effect.low[:, i], strict=True),
                    *zip(effect.points[::-1], effect.high[::-1, i], strict=True),
                )
            ]
            marks.append(tag("polygon", points=" ".join(ring), class_=f"band c{i}"))
        marks.append(path(axes, effect.points, curve, class_=f"curve c{i}"))
    chosen = np.unique(np.linspace(0, len(effect.points) - 1, MOST_HOVERED).round().astype(int))
    for j in chosen.tolist():
        for i in range(outputs):
            name = f"{effect.outputs[i]}: " if len(effect.outputs) > 1 else ""
            text = (
                f"{effect.column} = {show(float(effect.points[j]))}{unit}\n{name}{figure(float(effect.values[j, i]))}"
            )
            where = {"cx": axes.px(float(effect.points[j])), "cy": axes.py(float(effect.values[j, i]))}
            marks.append(tag("circle", tag("title", text), r=6, class_=f"dot c{i}", **where))
    return axes.draw(f"Effect of {effect.column}", *marks)


def _density(axes: Axes, effect: Effect) -> Markup:
    """Return bars of the density at the foot of a chart."""
    largest = max(1, int(effect.counts.max(initial=1)))
    foot, bars = axes.height - BOTTOM, []
    for left, right, count in zip(effect.bins[:-1], effect.bins[1:], effect.counts, strict=True):
        tall = round(26 * count / largest, 1)
        begin, width = axes.px(float(left)), axes.px(float(right)) - axes.px(float(left))
        if count:
            text = f"{count:,} rows"
            where = {"x": begin, "y": foot - tall, "width": max(0.5, round(width - 0.6, 1)), "height": tall}
            bars.append(tag("rect", tag("title", text), class_="density", **where))
    return joined(bars)


def _levels_chart(effect: Effect, least: float) -> Markup:
    order = np.sort(np.argsort(-effect.counts, kind="stable")[:MOST_SHOWN_LEVELS])
    order = order[np.argsort(-effect.values[order, 0], kind="stable")]
    outputs = min(len(effect.outputs), MOST_LINES)
    low, high = _range(effect.values[:, :outputs], effect.low[:, :outputs], effect.high[:, :outputs], least=least)
    left, row = 118, 19
    height = TOP + row * len(order) + BOTTOM

    def px(value: float) -> float:
        return round(left + (WIDTH - left - 12) * (value - low) / (high - low), 1)

    marks = []
    for value in ticks(low, high, 4):
        kind = "zero" if value == 0 else "grid"
        marks.append(tag("line", x1=px(value), x2=px(value), y1=TOP, y2=height - BOTTOM, class_=kind))
        marks.append(
            tag("text", figure(value), x=px(value), y=height - BOTTOM + 13, class_="tick", text_anchor="middle")
        )
    for line, level in enumerate(order.tolist()):
        y = TOP + row * line + row / 2
        marks.append(tag("text", short(effect.levels[level]), x=left - 8, y=y + 4, class_="label", text_anchor="end"))
        for i in range(outputs):
            a, b = px(float(effect.low[level, i])), px(float(effect.high[level, i]))
            marks.append(tag("line", x1=a, x2=b, y1=y, y2=y, class_=f"whisker c{i}"))
            name = f"{effect.outputs[i]}: " if len(effect.outputs) > 1 else ""
            text = f"{effect.levels[level]}\n{name}{figure(float(effect.values[level, i]))}\n{int(effect.counts[level]):,} rows"
            where = {"cx": px(float(effect.values[level, i])), "cy": y}
            marks.append(tag("circle", tag("title", text), r=4.5, class_=f"point c{i}", **where))
    middle = (left + WIDTH) / 2
    marks.append(tag("text", "effect", x=middle, y=height - 4, class_="axis", text_anchor="middle"))
    return svg(f"Effect of {effect.column}", height, *marks)


def pair_chart(pair: PairEffect, output: int = 0) -> Markup:
    """Return the heat map of an interaction of two columns: one color above 0, one below."""
    values = pair.values[..., output]
    largest = float(np.abs(values).max()) or 1.0
    left, width, height = 70, WIDTH - 78, 240
    (p, q), foot = values.shape, height - BOTTOM
    wide, tall = width / p, (foot - TOP) / q
    marks = []
    names = [
        levels or tuple(_day(float(v)) if kind == "date" else f"{float(v):.2g}".replace("-", "−") for v in points)
        for points, levels, kind in zip(pair.points, pair.levels, pair.kinds, strict=True)
    ]
    for a in range(p):
        for b in range(q):
            value = float(values[a, b])
            text = f"{pair.columns[0]} = {names[0][a]}\n{pair.columns[1]} = {names[1][b]}\n{figure(value)}"
            where = {"x": round(left + a * wide, 1), "y": round(foot - (b + 1) * tall, 1)}
            size = {"width": round(wide + 0.3, 1), "height": round(tall + 0.3, 1)}
            strength = round(abs(value) / largest, 2)
            color = "high" if value > 0 else "low"
            marks.append(tag("rect", tag("title", text), class_=color, fill_opacity=strength, **where, **size))
    for a in sorted({0, p // 2, p - 1}):
        at = left + (a + 0.5) * wide
        marks.append(
            tag("text", short(names[0][a], 10), x=round(at, 1), y=foot + 13, class_="tick", text_anchor="middle")
        )
    for b in sorted({0, q // 2, q - 1}):
        at = foot - (b + 0.5) * tall + 4
        marks.append(tag("text", short(names[1][b], 10), x=left - 6, y=round(at, 1), class_="tick", text_anchor="end"))
    marks.append(
        tag("text", short(pair.columns[0], 40), x=left + width / 2, y=height - 4, class_="axis", text_anchor="middle")
    )
    marks.append(tag("text", short(pair.columns[1], 14), x=4, y=9, class_="axis"))
    return svg(f"Interaction of {pair.columns[0]} and {pair.columns[1]}", height, *marks)


# ------------------------------------------------------------------------------------------------ scores


def scatter(title: str, x: Floats, y: Floats, names: tuple[str, str], line: str, labels: Sequence[str]) -> Markup:
    """Return a scatter plot with the line y = x (`diagonal`) or y = 0 (`zero`)."""
    ends = (float(min(x.min(), y.min())), float(max(x.max(), y.max())))
    if line == "diagonal":
        axes = Axes(ends, _margin(ends), names[0], y_name=names[1])
        rule = path(axes, np.array(axes.x), np.array(axes.x), class_="zero")
    else:
        axes = Axes((float(x.min()), float(x.max())), _range(y), names[0], y_name=names[1])
        rule = Markup("")
    dots = [
        tag("circle", tag("title", text), cx=axes.px(float(a)), cy=axes.py(float(b)), r=2.6, class_="cloud")
        for a, b, text in zip(x, y, labels, strict=True)
    ]
    return axes.draw(title, rule, *dots)


def _margin(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = _wide(ends)
    return low - 0.04 * (high - low), high + 0.04 * (high - low)


def calibration_chart(predicted: Floats, observed: Floats, counts: Sequence[int], label: str) -> Markup:
    """Return the observed share of a class against its predicted probability, one dot for each bin."""
    axes = Axes((0.0, 1.0), (0.0, 1.0), f"predicted probability of {label}", y_name="observed share")
    largest = max(counts, default=1)
    marks = [path(axes, np.array([0.0, 1.0]), np.array([0.0, 1.0]), class_="zero")]
    marks.append(path(axes, predicted, observed, class_="curve c0"))
    for p, o, count in zip(predicted.tolist(), observed.tolist(), counts, strict=True):
        text = f"predicted {p:.3f}, observed {o:.3f}\n{count:,} rows"
        where = {"cx": axes.px(p), "cy": axes.py(o), "r": round(3 + 4 * math.sqrt(count / largest), 1)}
        marks.append(tag("circle", tag("title", text), class_="point c0", **where))
    return axes.draw(f"Calibration: {label}", *marks)


def threshold_chart(title: str, x: Floats, y: Floats, thresholds: Floats, names: tuple[str, str]) -> Markup:
    """Return a curve of rates over all thresholds of a probability; the thresholds appear on hover.

    Args:
        title: name of the chart for screen readers.
        x, y: rates from 0 to 1, (thresholds,).
        thresholds: probabilities, descending.
        names: names of both axes.
    """
    axes = Axes((0.0, 1.0), (0.0, 1.0), names[0], y_name=names[1])
    marks = [path(axes, x, y, class_="curve c0")]
    if names[0] != "recall":
        marks.insert(0, path(axes, np.array([0.0, 1.0]), np.array([0.0, 1.0]), class_="zero"))
    chosen = np.unique(np.linspace(0, len(x) - 1, MOST_HOVERED).round().astype(int))
    for j in chosen.tolist():
        threshold = f"{thresholds[j]:.3g}".replace("inf", "∞")
        text = f"{names[0]} {x[j]:.3f}, {names[1]} {y[j]:.3f}\nthreshold {threshold}"
        where = {"cx": axes.px(float(x[j])), "cy": axes.py(float(y[j]))}
        marks.append(tag("circle", tag("title", text), r=6, class_="dot c0", **where))
    return axes.draw(title, *marks)


def learning_chart(epochs: Sequence[Epoch]) -> Markup:
    """Return the losses of training and validation over the epochs; logarithmic if they span more than a factor of 20."""
    number = np.arange(1.0, len(epochs) + 1)
    losses = [np.array([e.loss for e in epochs]), np.array([e.validation_loss for e in epochs], dtype=np.float64)]
    known = np.concatenate(losses)
    known = known[np.isfinite(known)]
    logs = bool(known.min() > 0 and known.max() > 20 * known.min())
    shown = [np.log10(values) if logs else values for values in losses]
    ends = (float(np.nanmin(shown)), float(np.nanmax(shown)))
    axes = Axes(
        (1.0, number[-1]), _margin(ends), "epoch", y_name="loss", show_y=(lambda v: f"{10**v:.2g}") if logs else figure
    )
    marks = []
    for i, (name, values, places) in enumerate(zip(("training", "validation"), losses, shown, strict=True)):
        here = np.flatnonzero(np.isfinite(places))
        if len(here):
            marks.append(path(axes, number[here], places[here], class_=f"curve c{i}"))
        chosen = here[np.unique(np.linspace(0, len(here) - 1, MOST_HOVERED).round().astype(int))] if len(here) else here
        for j in chosen.tolist():
            text = f"epoch {j + 1}\n{name} {figure(float(values[j]))}"
            where = {"cx": axes.px(number[j]), "cy": axes.py(float(places[j]))}
            marks.append(tag("circle", tag("title", text), r=6, class_=f"dot c{i}", **where))
    return axes.draw("Loss over the epochs", *marks)


def bar(share: float) -> Markup:
    """Return a horizontal bar of a table, from 0 to 1."""
    width = round(100 * min(1.0, max(0.0, share)), 1)
    inner = tag("rect", x=0, y=0, width=width, height=8, rx=1.5, class_="bar")
    return tag("svg", inner, viewBox="0 0 100 8", class_="bars", aria_hidden="true", preserveAspectRatio="none")
