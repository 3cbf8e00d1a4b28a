"""Pictures of models: effects of columns, errors on held-out rows, training. Each function returns the axes it drew on."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kapsi.errors import DataError, check_integer, refuse
from kapsi.interpret.effect import Effect
from kapsi.interpret.importance import Importance, PairEffect
from kapsi.plots.arguments import (
    check_axes,
    check_kind,
    check_kinds,
    check_labels,
    check_names,
    check_pair,
    check_positive,
)
from kapsi.plots.catalogue import STYLE, _figure, _matplotlib
from kapsi.plots.curves import above_thresholds, average_precision, reliability, roc_area
from kapsi.training.logs import read_epochs
from kapsi.training.records import Epoch
from kapsi.training.run_folder import read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kapsi.modules import Model

__all__ = [
    "calibration",
    "confusion_matrix",
    "effect",
    "importances",
    "learning_curves",
    "network",
    "pair_effect",
    "precision_recall",
    "residuals",
    "roc",
]

ACCENT, SOFT = "#2b5fc7", "#9aa5b1"
MOST_LINES, MOST_LEVELS, MOST_POINTS = 6, 20, 2000
MOST_NODES = 40
"""Largest number of nodes of a layer of a drawn network."""


def drawn(ax: Axes | None, draw: Callable[[Any], None], size: tuple[float, float] = (5.0, 3.2)) -> Axes:
    """Draw on given or new axes, in the style of kapsi."""
    matplotlib = _matplotlib()
    check_axes(ax)
    with matplotlib.rc_context(STYLE):
        axes = _figure(matplotlib, 1, size)[0] if ax is None else ax
        draw(axes)
    return axes


def _plain(name: object) -> str:
    """Return a name as text of matplotlib: a dollar sign starts no formula."""
    return str(name).replace("$", r"\$")


def effect(shown: Effect, ax: Axes | None = None) -> Axes:
    """Draw the effect of a column: a line with band and density, or a dot for each category.

    Args:
        shown: an effect of `kp.interpret.effects`.
        ax: axes to draw on; None for a new figure.

    Example:
        >>> import kapsi as kp, torch
        >>> model = kp.Model(kp.rpn([2, 1], expansion=kp.Taylor(2)), seed=0)
        >>> effects = kp.interpret.effects(model, torch.rand(50, 2))
        >>> kp.plots.effect(effects["x1"]).get_xlabel()
        'x1'
    """
    check_kind("effect", shown, Effect, "an effect of a column, such as kp.interpret.effects(model, x)['x1']")
    return drawn(ax, lambda axes: _levels(axes, shown) if shown.levels else _curve(axes, shown))


def _curve(axes: Any, shown: Effect) -> None:
    x: Any = shown.points
    bins: Any = shown.bins
    if shown.kind == "date":
        x, bins = ([_day(value) for value in part] for part in (shown.points, shown.bins))
    for i, name in enumerate(shown.outputs[:MOST_LINES]):
        color = ACCENT if len(shown.outputs) == 1 else f"C{i}"
        axes.plot(x, shown.values[:, i], color=color, label=_plain(name))
        axes.fill_between(x, shown.low[:, i], shown.high[:, i], color=color, alpha=0.15, linewidth=0)
    density = axes.inset_axes([0, 0, 1, 0.12], sharex=axes)
    density.stairs(shown.counts, bins, fill=True, color=SOFT, alpha=0.5)
    density.axis("off")
    axes.axhline(0, color=SOFT, linewidth=0.6, zorder=0)
    unit = f" ({shown.unit})" if shown.unit else ""
    axes.set(
        xlabel=_plain(f"{shown.column}{unit}"), ylabel=_plain(shown.outputs[0]) if len(shown.outputs) == 1 else "effect"
    )
    if len(shown.outputs) > 1:
        axes.legend()


def _day(seconds: float) -> datetime.datetime:
    return datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=float(seconds))


def _levels(axes: Any, shown: Effect) -> None:
    order = np.argsort(-shown.counts, kind="stable")[:MOST_LEVELS]
    order = order[np.argsort(shown.values[order, 0], kind="stable")]
    place = np.arange(len(order))
    for i, name in enumerate(shown.outputs[:MOST_LINES]):
        color = ACCENT if len(shown.outputs) == 1 else f"C{i}"
        axes.hlines(place, shown.low[order, i], shown.high[order, i], color=color, alpha=0.4)
        axes.plot(shown.values[order, i], place, "o", color=color, label=_plain(name))
    axes.axvline(0, color=SOFT, linewidth=0.6, zorder=0)
    axes.set_yticks(place, [_plain(shown.levels[i]) for i in order])
    axes.set(xlabel=_plain(shown.outputs[0]) if len(shown.outputs) == 1 else "effect", ylabel=_plain(shown.column))
    if len(shown.outputs) > 1:
        axes.legend()


def pair_effect(shown: PairEffect, ax: Axes | None = None, *, output: int = 0) -> Axes:
    """Draw the interaction of two columns as colors.

    Args:
        shown: an interaction of `kp.interpret.interactions`.
        ax: axes to draw on; None for a new figure.
        output: position of the output.
    """
    check_kind("pair_effect", shown, PairEffect, "an interaction, such as kp.interpret.interactions(model, x)[0]")
    output = check_integer("pair_effect(output)", output, 0, len(shown.outputs) - 1, error=DataError)

    def draw(axes: Any) -> None:
        values = shown.values[..., output].T
        largest = float(np.abs(values).max()) or 1.0
        mesh = axes.imshow(values, origin="lower", aspect="auto", cmap="RdBu", vmin=-largest, vmax=largest)
        for axis, points, levels in zip((axes.xaxis, axes.yaxis), shown.points, shown.levels, strict=True):
            marks = np.unique(np.linspace(0, len(points) - 1, min(5, len(points))).round().astype(int))
            axis.set_ticks(marks, [_plain(levels[i]) if levels else _within(points, i) for i in marks])
        axes.figure.colorbar(mesh, ax=axes, label=_plain(shown.outputs[output]))
        axes.set(xlabel=_plain(shown.columns[0]), ylabel=_plain(shown.columns[1]))

    return drawn(ax, draw)


def _within(points: Any, i: int) -> str:
    """Return a point as text, with about two digits of the range of all points.

    Example:
        >>> _within(np.array([0.0003, 0.26, 1.0]), 0), _within(np.array([1900.0, 2024.0]), 0)
        ('0', '1900')
    """
    span = float(points[-1] - points[0]) or abs(float(points[0])) or 1.0
    digits = max(0, 1 - int(np.floor(np.log10(span))))
    return f"{round(float(points[i]), digits) + 0.0:.4g}"


def importances(shown: Sequence[Importance], ax: Axes | None = None, *, most: int = 20) -> Axes:
    """Draw the share of each column in the variance of the predictions as bars, the largest at the top.

    Args:
        shown: importances of `kp.interpret.importances`.
        ax: axes to draw on; None for a new figure.
        most: maximum number of columns.

    Raises:
        DataError: no importances, or values of another kind.
    """
    most = check_integer("importances(most)", most, 1, error=DataError)
    wanted = "importances of columns, such as kp.interpret.importances(model, x)"
    bars = check_kinds("importances", shown, Importance, wanted)[:most][::-1]
    if not bars:
        refuse("importances", wanted, shown, DataError)

    def draw(axes: Any) -> None:
        axes.barh([_plain(one.column) for one in bars], [one.share for one in bars], color=ACCENT, height=0.6)
        axes.set(xlabel="share of the variance of the predictions")

    return drawn(ax, draw, (5.0, 0.8 + 0.28 * len(bars)))


def network(model: Model, x: Any, ax: Axes | None = None, *, names: Sequence[str] | None = None) -> Axes:
    """Draw the nodes and edges of a model of univariate functions; the width of an edge is its importance.

    Args:
        model: see `kapsi.interpret.edge_functions`.
        x: inputs whose `kapsi.interpret.attribution` is drawn, a tensor, array or frame of at least two rows.
        ax: axes to draw on; None for a new figure.
        names: names of the inputs; None for x1, x2, ….

    Raises:
        DataError: a layer of more than 40 nodes, or another number of names.
        SpecError: a model that mixes inputs.

    Example:
        >>> import kapsi as kp, torch
        >>> model = kp.Model(kp.rpn([2, 3, 1], kp.Chebyshev(3)), seed=0)
        >>> len(kp.plots.network(model, torch.rand(50, 2)).lines)
        9
    """
    from kapsi.interpret.edges import attribution

    shares = [edges.double().numpy(force=True) for edges in attribution(model, x).edges][
        1 if model.standardized else 0 :
    ]
    counts = [shares[0].shape[1], *(edges.shape[0] for edges in shares)]
    shown = list(map(_plain, check_names("network", names, counts[0])))
    if max(counts) > MOST_NODES:
        raise DataError(
            f"network: a layer has {max(counts)} nodes, at most {MOST_NODES} are drawn; prune the model first"
        )
    place = [(np.arange(count) + 0.5) / count for count in counts]

    def draw(axes: Any) -> None:
        for level, edges in enumerate(shares):
            largest = float(edges.max()) or 1.0
            for (o, i), share in np.ndenumerate(edges):
                if share > 0:
                    ends = (place[level][i], place[level + 1][o])
                    width = 4 * np.sqrt(share / largest)
                    axes.plot(ends, (level, level + 1), color=ACCENT, linewidth=width, alpha=0.7, zorder=1)
        for level, positions in enumerate(place):
            axes.scatter(positions, np.full(len(positions), level), s=40, color="white", edgecolors="black", zorder=2)
        for position, name in zip(place[0], shown, strict=True):
            axes.annotate(name, (position, 0), (0, -8), textcoords="offset points", ha="center", va="top")
        axes.set(xlim=(0, 1), ylim=(-0.3, len(shares) + 0.2))
        axes.axis("off")

    return drawn(ax, draw, (max(3.0, 0.5 * max(counts)), 1.0 + 1.2 * len(shares)))


# ------------------------------------------------------------------------------------------------ errors


def residuals(y: npt.ArrayLike, predicted: npt.ArrayLike, ax: Axes | None = None) -> Axes:
    """Draw target minus prediction against the prediction.

    Args:
        y: targets, (rows,).
        predicted: predictions, (rows,).
        ax: axes to draw on; None for a new figure.

    Raises:
        DataError: different numbers of rows.
    """
    target, p = check_pair("residuals", y, predicted)

    def draw(axes: Any) -> None:
        axes.scatter(p[:MOST_POINTS], (target - p)[:MOST_POINTS], s=8, color=ACCENT, alpha=0.5, linewidths=0)
        axes.axhline(0, color=SOFT, linewidth=0.8)
        axes.set(xlabel="prediction", ylabel="target − prediction")

    return drawn(ax, draw)


def calibration(
    y: npt.ArrayLike, probability: npt.ArrayLike, ax: Axes | None = None, *, positive: Any = None, bins: int = 10
) -> Axes:
    """Draw the observed share of a class against its predicted probability, in bins of equal width.

    Args:
        y: labels of two classes, (rows,): 0 and 1, −1 and 1, booleans or strings.
        probability: predicted probability of the positive class, (rows,).
        ax: axes to draw on; None for a new figure.
        positive: label of the positive class; None: the larger of the two.
        bins: number of bins.

    Raises:
        DataError: different numbers of rows, more labels, or probabilities outside of 0 to 1.
    """
    hit, p = check_positive("calibration", y, probability, positive)
    if p.min() < 0 or p.max() > 1:
        raise DataError(f"calibration: expected probabilities from 0 to 1, got {p.min():g} to {p.max():g}")
    bins = check_integer("calibration(bins)", bins, 1, MOST_POINTS, error=DataError)
    predicted, observed, _ = reliability(p, hit, bins)

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=0.8, linestyle="--")
        axes.plot(predicted, observed, "o-", color=ACCENT)
        axes.set(xlabel="predicted probability", ylabel="observed share", xlim=(0, 1), ylim=(0, 1))

    return drawn(ax, draw, (3.6, 3.4))


def confusion_matrix(y: Sequence[Any], predicted: Sequence[Any], ax: Axes | None = None) -> Axes:
    """Draw the number of rows of each class, by predicted class; shades are shares of the class.

    Args:
        y: labels, (rows,).
        predicted: predicted labels, (rows,).
        ax: axes to draw on; None for a new figure.

    Raises:
        DataError: different numbers of rows, or labels of several types.
    """
    given = {"y": y, "predicted": predicted}
    true, chosen = (check_labels("confusion_matrix", name, values).tolist() for name, values in given.items())
    if len(true) != len(chosen):
        raise DataError(f"confusion_matrix: expected equally many labels, got {len(true)} and {len(chosen)}")
    labels, codes = np.unique(
        check_labels("confusion_matrix", "y with predicted", [*true, *chosen]), return_inverse=True
    )
    counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(counts, (codes[: len(true)], codes[len(true) :]), 1)

    def draw(axes: Any) -> None:
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for (i, j), count in np.ndenumerate(counts):
            axes.text(j, i, f"{count:,}", ha="center", va="center", color="white" if shares[i, j] > 0.6 else "black")
        axes.set_xticks(range(len(labels)), list(map(_plain, labels)))
        axes.set_yticks(range(len(labels)), list(map(_plain, labels)))
        axes.set(xlabel="predicted class", ylabel="class")

    side = 1.8 + 0.5 * len(labels)
    return drawn(ax, draw, (side, side))


def roc(y: npt.ArrayLike, scores: npt.ArrayLike, ax: Axes | None = None, *, positive: Any = None) -> Axes:
    """Draw the true positive rate against the false positive rate over all thresholds; the title has the area.

    Args:
        y: labels of two classes, (rows,): 0 and 1, −1 and 1, booleans or strings.
        scores: numbers that grow with the probability of the positive class, (rows,).
        ax: axes to draw on; None for a new figure.
        positive: label of the positive class against all others; None: the larger of two, as in scikit-learn.

    Raises:
        DataError: different numbers of rows, more labels, or rows of a single class.

    Example:
        >>> import kapsi as kp
        >>> kp.plots.roc(["no", "yes", "yes"], [0.1, 0.3, 0.8]).get_title()
        'AUC 1.0000'
    """
    true, false = _counts("roc", y, scores, positive)

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=0.8, linestyle="--")
        axes.plot(false / false[-1], true / true[-1], color=ACCENT)
        title = f"AUC {roc_area(true, false):.4f}"
        axes.set(xlabel="false positive rate", ylabel="true positive rate", title=title)

    return drawn(ax, draw, (3.6, 3.4))


def precision_recall(y: npt.ArrayLike, scores: npt.ArrayLike, ax: Axes | None = None, *, positive: Any = None) -> Axes:
    """Draw precision against recall over all thresholds; the title has the average precision.

    Args:
        y, scores, ax, positive: see `roc`.

    Raises:
        DataError: different numbers of rows, more labels, or rows of a single class.
    """
    true, false = _counts("precision_recall", y, scores, positive)
    precision, recall = true[1:] / (true[1:] + false[1:]), true[1:] / true[-1]

    def draw(axes: Any) -> None:
        axes.step(recall, precision, where="pre", color=ACCENT)
        axes.axhline(true[-1] / (true[-1] + false[-1]), color=SOFT, linewidth=0.8, linestyle="--")
        title = f"average precision {average_precision(true, false):.4f}"
        axes.set(xlabel="recall", ylabel="precision", ylim=(0, 1.02), title=title)

    return drawn(ax, draw, (3.6, 3.4))


def _counts(where: str, y: Any, scores: Any, positive: Any) -> tuple[Any, Any]:
    """Return numbers of rows of the class and of other rows with at least each score, from none to all."""
    hit, score = check_positive(where, y, scores, positive)
    if hit.min() == hit.max():
        raise DataError(f"{where}: all rows are of one class; give rows of the class and others")
    return above_thresholds(hit, score)[:2]


# ------------------------------------------------------------------------------------------------ training


def learning_curves(epochs: str | Path | Iterable[Epoch], ax: Axes | None = None) -> Axes:
    """Draw the losses of training and validation over the epochs.

    Args:
        epochs: records of a fit, such as `kp.fit(…)` returns; or a run folder, whose last part is drawn.
        ax: axes to draw on; None for a new figure.

    Raises:
        DataError: no epochs, as in a run of the automatic model.
    """
    if isinstance(epochs, str | Path):
        records = read_epochs(read_run(epochs, ("metrics.jsonl",))[1].get("metrics.jsonl", b""))
    else:
        wanted = "records of epochs, such as kp.fit(…) returns, or a run folder"
        records = check_kinds("learning_curves", epochs, Epoch, wanted)
    losses, validation = [one.loss for one in records], [one.validation_loss for one in records]
    if not losses:
        raise DataError(
            "learning_curves: there are no epochs; a model in closed form, or the automatic model, has none"
        )

    def draw(axes: Any) -> None:
        x = np.arange(1, len(losses) + 1)
        axes.plot(x, losses, color=ACCENT, label="training")
        if any(value is not None for value in validation):
            axes.plot(x, [np.nan if v is None else v for v in validation], color="#d9730d", label="validation")
            axes.legend()
        if min(losses) > 0:
            axes.set_yscale("log")
        axes.set(xlabel="epoch", ylabel="loss")

    return drawn(ax, draw)
