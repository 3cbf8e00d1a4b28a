"""Pictures of the functions of the catalogue: plain arrays for display, and matplotlib figures.

matplotlib is imported on demand; install with `pip install 'kapsi[plot]'`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kapsi.errors import DataError, FileError, KapsiError, SpecError, refuse
from kapsi.expansion.base import Expansion, common_domain
from kapsi.files import atomic
from kapsi.function import Function, Params, flatten
from kapsi.fusion import Fusion
from kapsi.modules import Store
from kapsi.notation import short_form
from kapsi.plots.arguments import check_axes
from kapsi.process import Activation, Process
from kapsi.reconciliation.base import Reconciliation
from kapsi.remainder import Remainder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
MAX_COLUMNS = 2**14
"""Columns of the widest κ evaluated for a picture; a few of them are shown."""
SHOWN_CURVES, SHOWN_MAPS, LONGEST_COLUMN = 24, 6, 16
MAX_END = 10.0
"""Ends of a domain beyond this are not shown: pictures cover inputs of about unit scale."""


@dataclass(frozen=True)
class Curves:
    """Curves over one axis.

    Attributes:
        title: title of the picture.
        x: positions, ascending, `(points,)`.
        values: a row for each curve, `(curves, points)`.
        labels: a name for each curve.
        x_label, y_label: names of the axes.
        limits: lowest and highest value shown; curves may extend beyond.
        marked: the domain of the function, if it ends within the picture.
    """

    title: str
    x: Tensor
    values: Tensor
    labels: tuple[str, ...]
    x_label: str
    y_label: str
    limits: tuple[float, float]
    marked: tuple[float, float] | None = None


@dataclass(frozen=True)
class Maps:
    """Arrays as colors or shades, side by side.

    Attributes:
        title: title of the picture.
        maps: arrays, first row at the top.
        labels: a name for each array.
        extent: ends of both axes, (left, right, bottom, top), if the axes are inputs; None for rows and columns.
    """

    title: str
    maps: tuple[Tensor, ...]
    labels: tuple[str, ...]
    extent: tuple[float, float, float, float] | None = None


# ------------------------------------------------------------------------------------------------ what to draw


def drawable(instance: Function) -> bool:
    """Return whether functions of this role have pictures."""
    return isinstance(instance, Expansion | Reconciliation | Remainder | Fusion | Process)


@torch.no_grad()
def picture(instance: Function) -> Curves | Maps:
    """Return the picture of a function; initial values come from a fixed seed.

    For an element-wise expansion the basis functions of one input, for other expansions some columns over two inputs; for a
    reconciliation ψ(w) next to its trainable tensors; for a remainder or activation the outputs over one input; for a fusion
    three curves and their fusion; for a norm or dropout one row before and after.

    Raises:
        SpecError: the function is too wide, or its role has no pictures.
    """
    if isinstance(instance, Expansion):
        return _surfaces(instance) if _mixes_inputs(instance) else _basis(instance)
    if isinstance(instance, Reconciliation):
        return _weights(instance)
    if isinstance(instance, Remainder):
        return _remainder(instance)
    if isinstance(instance, Fusion):
        return _fusion(instance)
    if isinstance(instance, Process):
        return _activation(instance) if isinstance(instance, Activation) else _step(instance)
    wrong: Any = instance
    if isinstance(wrong, Function):
        raise SpecError(f"plots: functions of role {wrong.role} have no pictures, got {wrong.name}")
    called = f"; call it: {wrong.__name__}()" if isinstance(wrong, type) else ""
    raise SpecError(f"plots: expected a function of the catalogue, got {short_form(wrong)[:60]}{called}")


def _store(params: Params) -> Store:
    store = Store(params, None, torch.device("cpu"), torch.float64)
    store.reset(torch.Generator().manual_seed(0))
    return store


def _columns(expansion: Expansion, x: Tensor) -> Tensor:
    """Return κ(x), `(..., D)`."""
    width = expansion.out_features(x.shape[-1])
    if width > MAX_COLUMNS:
        raise SpecError(f"plots: {expansion.name} has {width:,} columns, at most {MAX_COLUMNS:,} are drawn; use fewer")
    return expansion(x, _store(expansion.params(x.shape[-1]))).dense()


def _range(expansion: Expansion, in_features: int) -> tuple[float, float]:
    """Return the common domain of all columns, with infinite ends beyond the size of the picture."""
    low, high = common_domain(expansion, in_features)
    if not low < high:  # without a common domain, the union
        bounds = expansion.domain(in_features)
        low, high = min(low for _, low, _ in bounds), max(high for _, _, high in bounds)
    return (low if abs(low) <= MAX_END else -math.inf), (high if abs(high) <= MAX_END else math.inf)


def _view(low: float, high: float) -> tuple[float, float]:
    """Return the range of inputs to show: the domain with a margin, or the range of inputs of unit scale."""
    if math.isfinite(low) and math.isfinite(high):
        beyond = 0.2 * (high - low)
        return low - beyond, high + beyond
    if math.isfinite(low):
        return low - 1, low + 4
    if math.isfinite(high):
        return high - 4, high + 1
    return -3.0, 3.0


def _evenly(count: int, most: int) -> list[int]:
    """Return at most `most` positions of a range, evenly spaced, including the first and the last."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _mixes_inputs(expansion: Expansion) -> bool:
    """Return whether any column depends on two inputs, tested on a grid."""
    try:
        low, high = _view(*_range(expansion, 2))
        ends = torch.linspace(low, high, 7, dtype=torch.float64)
        values = _columns(expansion, torch.stack(torch.meshgrid(ends, ends, indexing="ij"), -1))
    except (SpecError, DataError):
        return False  # the picture of one input is tried next, and raises the error if necessary
    first = (values - values[:1]).abs().amax((0, 1)) > 1e-9
    second = (values - values[:, :1]).abs().amax((0, 1)) > 1e-9
    return bool((first & second).any())


def _limits(values: Tensor, inside: Tensor) -> tuple[float, float]:
    """Return the range of values to show: all values, unless values outside of the domain or near poles dwarf the rest."""
    finite = values[:, inside].flatten()
    finite = finite[finite.isfinite()]
    if finite.numel() == 0:
        return -1.0, 1.0
    low, high = torch.quantile(finite, finite.new_tensor([0.02, 0.98])).tolist()
    allowance = max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-9)
    lowest, highest = max(float(finite.amin()), low - allowance), min(float(finite.amax()), high + allowance)
    margin = 0.06 * max(highest - lowest, 1e-3 * max(abs(lowest), abs(highest)), 1e-9)
    return lowest - margin, highest + margin


def _basis(expansion: Expansion) -> Curves:
    low, high = _range(expansion, 1)
    left, right = _view(low, high)
    x = torch.linspace(left, right, 481, dtype=torch.float64)
    values = _columns(expansion, x.unsqueeze(-1)).T
    chosen = _evenly(len(values), SHOWN_CURVES)
    many = f", {len(chosen)} of {len(values):,}" if len(chosen) < len(values) else ""
    marked = (max(low, left), min(high, right))
    return Curves(
        f"{_title(expansion)}: κ(x) of one input{many}",
        x,
        values[chosen],
        tuple(f"κ{_index(i + 1)}" for i in chosen),
        "x",
        "κ(x)",
        _limits(values[chosen], (x >= marked[0]) & (x <= marked[1])),
        None if (low, high) == (-math.inf, math.inf) else marked,
    )


def _surfaces(expansion: Expansion) -> Maps:
    low, high = _range(expansion, 2)
    # Within the domain: outside, large powers would hide the rest.
    left, right = _view(low, high)
    left, right = max(left, low), min(right, high)
    if (low, high) == (-math.inf, math.inf):
        left, right = -2.0, 2.0
    ends = torch.linspace(left, right, 61, dtype=torch.float64)
    x2, x1 = torch.meshgrid(ends.flip(0), ends, indexing="ij")
    values = _columns(expansion, torch.stack((x1, x2), -1)).movedim(-1, 0)
    chosen = _evenly(len(values), SHOWN_MAPS)
    many = f", {len(chosen)} of {len(values):,}" if len(chosen) < len(values) else ""
    labels = tuple(f"κ{_index(i + 1)}" for i in chosen)
    title = f"{_title(expansion)}: κ(x) of two inputs{many}"
    return Maps(title, tuple(values[chosen]), labels, (left, right, left, right))


def _weights(reconciliation: Reconciliation) -> Maps:
    # The first valid sizes: n and D must have divisors, or be equal.
    sizes = ((8, (4, 6)), (8, (2, 4)), (6, (6, 6)))
    for n, factors in sizes:
        try:
            params = reconciliation.params(n, factors)
            store = _store(params)
            matrix = reconciliation(store.eval(), n, factors).matrix().detach()
        except (SpecError, DataError) as error:
            failure = error
            continue
        count = reconciliation.count(n, factors)
        trained = [(name, tensor) for name, tensor in _tensors(params, store)][: SHOWN_MAPS - 1]
        title = f"{_title(reconciliation)}: ψ(w), {n} × {factors[0] * factors[1]} from {count} parameters"
        labels = [f"{name}, {' × '.join(map(str, tensor.shape)) or 1}" for name, tensor in trained]
        return Maps(title, (matrix, *(_as_matrix(tensor) for _, tensor in trained)), ("ψ(w)", *labels))
    raise failure


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return a tensor with two axes; a vector as a column, a long vector as several, padded with zeros."""
    if tensor.dim() > 1:
        return tensor.flatten(1)
    height = min(tensor.numel(), LONGEST_COLUMN)
    columns = math.ceil(tensor.numel() / height)
    return torch.cat((tensor.flatten(), tensor.new_zeros(columns * height - tensor.numel()))).reshape(columns, height).T


def _tensors(params: Params, store: Store) -> Iterator[tuple[str, Tensor]]:
    for name, param in flatten(params):
        tensor: Any = store
        for part in name.split("."):
            tensor = tensor[part]
        if param.trainable and param.numel:
            yield name, tensor.detach()


def _remainder(remainder: Remainder) -> Curves:
    x = torch.linspace(-3, 3, 481, dtype=torch.float64).unsqueeze(-1)
    n = 3
    try:
        store = _store(remainder.params(1, n))
    except (SpecError, DataError):  # the identity needs as many outputs as inputs
        n = 1
        store = _store(remainder.params(1, n))
    values = remainder(x, store, n).T
    labels = ("π(x)",) if n == 1 else tuple(f"π{_index(i + 1)}" for i in range(n))
    return _over(f"{_title(remainder)}: π(x) of one input", x.squeeze(-1), values, labels, "π(x)")


def _activation(activation: Activation) -> Curves:
    x = torch.linspace(-4, 4, 481, dtype=torch.float64)
    return _over(_title(activation), x, activation(x).unsqueeze(0), ("σ(x)",), "σ(x)")


def _fusion(fusion: Fusion) -> Curves:
    x = torch.linspace(-2, 2, 481, dtype=torch.float64)
    heads = torch.stack((x, torch.sin(3 * x), x.square() - 1))
    fused = fusion(heads.unsqueeze(-1), _store(fusion.params(len(heads), 1))).squeeze(-1)
    values = torch.cat((heads, fused.unsqueeze(0)))
    return _over(f"{_title(fusion)} of three heads", x, values, ("y₁", "y₂", "y₃", "fused"), "y")


def _step(process: Process) -> Curves:
    features = 12
    rows = torch.randn(64, features, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    # Dropout draws from torch's global generator, whose state must not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        after = process.module(features, torch.device("cpu"), torch.float64).train()(rows)
    x = torch.arange(1, features + 1, dtype=torch.float64)
    title = f"{_title(process)}: one row, in training"
    return _over(title, x, torch.stack((rows[0], after[0])), ("before", "after"), "value", "feature")


def _over(title: str, x: Tensor, values: Tensor, labels: tuple[str, ...], y_label: str, x_label: str = "x") -> Curves:
    return Curves(title, x, values, labels, x_label, y_label, _limits(values, torch.ones_like(x, dtype=torch.bool)))


def _title(instance: Function) -> str:
    text = short_form(instance)
    return text if len(text) <= 48 else f"{text[:47]}…"


def _index(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


# ------------------------------------------------------------------------------------------------ figures


STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "kapsi",  # the same file for the same figure
    "svg.fonttype": "none",
    "savefig.dpi": 150,
}
SHADE, LEGEND = "#e8eef4", 6


def function(instance: Function, ax: Axes | None = None) -> Figure:
    """Return a matplotlib figure of a function; see `picture` for the contents.

    Args:
        instance: a function of the catalogue, such as `kp.BSpline(intervals=8)`.
        ax: axes to draw on, with the first map of several; None: a new figure.

    Raises:
        KapsiError: matplotlib is not installed.
        SpecError: the function is too wide, or its role has no pictures.

    Example:
        >>> import kapsi as kp
        >>> figure = kp.plots.function(kp.Chebyshev(degree=4))
        >>> figure.axes[0].get_xlabel(), len(figure.axes[0].lines) >= 4
        ('x', True)
    """
    matplotlib = _matplotlib()
    check_axes(ax)
    shown = picture(instance)
    with matplotlib.rc_context(STYLE):
        if isinstance(shown, Curves):
            axes = _figure(matplotlib, 1, (6.0, 3.2))[0] if ax is None else ax
            _draw_curves(matplotlib, axes, shown)
        elif ax is not None:
            axes = ax
            _draw_map(axes, shown, 0)
            axes.set_title(shown.title)
        else:
            count = len(shown.maps)
            height = 2.2 if shown.extent is None else 2.0 * math.ceil(count / 3) + 0.4
            ratios = None if shown.extent is not None else [max(9, array.shape[1]) for array in shown.maps]
            panels = _figure(matplotlib, count, (7.0, height), 3 if ratios is None else count, ratios)
            for i, panel in enumerate(panels):
                _draw_map(panel, shown, i)
            axes = panels[0]
            axes.figure.suptitle(shown.title, fontsize=10)
    return cast("Figure", axes.figure)


def save(instance: Function, path: str | Path) -> None:
    """Write the picture of a function to an .svg, .png or .pdf file, atomically.

    Raises:
        FileError: an unknown suffix, a missing folder, or a file that cannot be written.
        KapsiError: matplotlib is not installed.
        SpecError: the function is too wide, or its role has no pictures.
    """
    if not isinstance(path, str | os.PathLike):
        refuse("save(path)", "a path", path)
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise FileError(f"{str(path)!r}: a picture is an {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    if not target.parent.is_dir():
        raise FileError(f"{str(path)!r}: there is no folder {str(target.parent)!r}; make it, or give another path")
    matplotlib = _matplotlib()
    figure = function(instance)
    kind = target.suffix.lower()[1:]
    dateless = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    with matplotlib.rc_context(STYLE), atomic(path) as temporary:
        figure.savefig(temporary, format=kind, metadata=dateless)


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise KapsiError("pictures need matplotlib, which is not installed; pip install 'kapsi[plot]'") from None
    return matplotlib


def _figure(
    matplotlib: Any, count: int, size: tuple[float, float], across: int = 1, ratios: list[int] | None = None
) -> list[Any]:
    """Return panels of a figure without a window, freed with the last reference."""
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    across = min(across, count)
    grid = figure.add_gridspec(math.ceil(count / across), across, width_ratios=ratios)
    return [figure.add_subplot(grid[i // across, i % across]) for i in range(count)]


def _draw_curves(matplotlib: Any, axes: Any, shown: Curves) -> None:
    count = len(shown.values)
    few = count <= LEGEND
    colors = matplotlib.colormaps["tab10" if few else "viridis"]
    if shown.marked is not None:
        axes.axvspan(*shown.marked, color=SHADE, zorder=0, linewidth=0)
    x = shown.x.numpy()
    for i, (values, label) in enumerate(zip(shown.values.numpy(), shown.labels, strict=True)):
        color = colors(i) if few else colors(0.92 * i / (count - 1))
        # Of many curves only the first and the last are labeled; colors give the order.
        named = label if few or i in (0, count - 1) else "_"
        axes.plot(x, values, color=color, label=named, marker="o" if len(x) < 50 else "", markersize=3)
    axes.set(xlim=(x[0], x[-1]), ylim=shown.limits, xlabel=shown.x_label, ylabel=shown.y_label, title=shown.title)
    finite = shown.values[shown.values.isfinite()]
    if bool(((finite < shown.limits[0]) | (finite > shown.limits[1])).any()):
        note = f"axis cut: values from {float(finite.min()):.3g} to {float(finite.max()):.3g}"
        axes.text(0.99, 0.01, note, transform=axes.transAxes, ha="right", va="bottom", fontsize="x-small", color="0.4")
    if count > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_map(axes: Any, shown: Maps, index: int) -> None:
    array = shown.maps[index].numpy()
    largest = float(abs(array).max()) or 1.0
    axes.imshow(
        array,
        cmap="RdBu_r",
        vmin=-largest,
        vmax=largest,
        aspect="equal",
        extent=shown.extent,
        interpolation="nearest",
    )
    axes.set_title(shown.labels[index].replace(", ", "\n"), fontsize=7.5)
    axes.spines[["top", "right"]].set_visible(True)
    if shown.extent is None:
        axes.set(xticks=[], yticks=[], xlabel=f"±{largest:.2g}")
    else:
        axes.set(xlabel=f"x₁  (±{largest:.2g})", ylabel="x₂")
