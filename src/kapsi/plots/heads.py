"""Pictures of heads: edges, and κ(x) and rows of ψ as images."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kapsi.arrays import as_dense
from kapsi.errors import DataError, check_integer, refuse
from kapsi.interpret.edges import Edges
from kapsi.modules import Head
from kapsi.plots.arguments import check_kind
from kapsi.plots.models import ACCENT, MOST_POINTS, SOFT, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor


__all__ = ["edge", "expansion_images", "weight_images"]

A_HEAD = "a head, such as model.layers[0].heads[0]"
MAX_WEIGHTS = 2**27
"""Largest number of entries of a ψ(w) that is materialized for a picture: half a GiB."""


def edge(layer: Edges, output: int = 0, input: int = 0, ax: Axes | None = None) -> Axes:
    """Draw the function φ of one edge over its input; ticks below are the rows.

    Args:
        layer: edges of a layer, of `kapsi.interpret.edge_functions`.
        output: output of the edge, from 0.
        input: input of the edge, from 0.
        ax: axes to draw on; None for a new figure.

    Raises:
        DataError: no such output or input.

    Example:
        >>> import kapsi as kp, torch
        >>> model = kp.Model(kp.rpn([2, 3, 1], kp.Chebyshev(3)), seed=0)
        >>> first, last = kp.interpret.edge_functions(model, torch.rand(50, 2))
        >>> kp.plots.edge(first, output=2, input=1).get_ylabel()
        'φ of output 2'
    """
    check_kind("edge", layer, Edges, "edges of one layer, such as kp.interpret.edge_functions(model, x)[0]")
    _, outputs, inputs = layer.values.shape
    output = check_integer("edge(output)", output, 0, outputs - 1, error=DataError)
    input = check_integer("edge(input)", input, 0, inputs - 1, error=DataError)
    x, y = (t.double().numpy(force=True) for t in (layer.inputs[:, input], layer.values[:, output, input]))
    order = np.argsort(x, kind="stable")

    def draw(axes: Any) -> None:
        axes.plot(x[order], y[order], color=ACCENT)
        ticks = axes.get_xaxis_transform()
        axes.plot(x[:MOST_POINTS], np.full(len(x[:MOST_POINTS]), 0.02), "|", color=SOFT, transform=ticks, markersize=5)
        axes.set(xlabel=f"input {input}", ylabel=f"φ of output {output}")

    return drawn(ax, draw, (3.6, 2.6))


@torch.no_grad()
def expansion_images(
    head: Head, image: Tensor, shape: tuple[int, int], ax: Axes | None = None, *, most: int = 16
) -> Axes:
    """Draw κ(x) of an image as images, one for each block of as many columns as pixels.

    For an expansion of each input, such as Chebyshev polynomials, a block is a basis function of every pixel; for Taylor
    polynomials, the first block is the image, and each other one its product with a pixel.

    Args:
        head: a head whose inputs are pixels, such as `model.layers[0].heads[0]`.
        image: pixels, `(height × width,)`.
        shape: height and width.
        ax: axes to draw on; None for a new figure.
        most: maximum number of blocks, evenly spaced.

    Raises:
        DataError: another number of pixels, or of columns; values that are not finite.

    Example:
        >>> import kapsi as kp, torch
        >>> head = kp.Head(64, 10, kp.HeadSpec(kp.Chebyshev(3)), seed=0)
        >>> kp.plots.expansion_images(head, torch.rand(64), (8, 8)).get_title()
        'κ(x): 3 images'
    """
    check_kind("expansion_images", head, Head, A_HEAD)
    pixels = as_dense(image, "pixels", "expansion_images").reshape(1, -1)
    with evaluating(head):
        columns = head.expand(pixels).dense()[0]
    return _montage("expansion_images", "κ(x)", columns, shape, ax, most)


@torch.no_grad()
def weight_images(
    head: Head, shape: tuple[int, int], output: int = 0, ax: Axes | None = None, *, channel: int = 0, most: int = 16
) -> Axes:
    """Draw the row of ψ(w) of an output as images, one for each block of as many columns as pixels.

    Args:
        head: a head whose inputs are pixels, such as `model.layers[0].heads[0]`.
        shape: height and width.
        output: the output, from 0.
        ax: axes to draw on; None for a new figure.
        channel: the channel, from 0.
        most: maximum number of blocks, evenly spaced.

    Raises:
        DataError: another number of columns, no such output or channel, or ψ(w) of more than 2²⁷ entries.

    Example:
        >>> import kapsi as kp
        >>> head = kp.Head(64, 10, kp.HeadSpec(kp.Chebyshev(3)), seed=0)
        >>> kp.plots.weight_images(head, (8, 8), output=4).get_title()
        'ψ(w), output 4: 3 images'
    """
    check_kind("weight_images", head, Head, A_HEAD)
    output = check_integer("weight_images(output)", output, 0, head.out_features - 1, error=DataError)
    channel = check_integer("weight_images(channel)", channel, 0, head.spec.channels - 1, error=DataError)
    size = head.spec.channels * head.out_features * math.prod(head.factors)
    if size > MAX_WEIGHTS:
        raise DataError(f"weight_images: ψ(w) has {size:,} entries, at most {MAX_WEIGHTS:,} are drawn")
    with evaluating(head):
        row = head.weights().dense()[channel, output]
    return _montage("weight_images", f"ψ(w), output {output}", row, shape, ax, most)


@contextlib.contextmanager
def evaluating(head: Head) -> Iterator[None]:
    """Put a head into evaluation mode for a while: dropout would draw from the global generator."""
    modes = {module: module.training for module in head.modules()}
    head.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _montage(where: str, name: str, values: Tensor, shape: tuple[int, int], ax: Axes | None, most: int) -> Axes:
    """Draw blocks of values as images in a square, with one color scale around 0."""
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        refuse(f"{where}(shape)", "height and width, such as (28, 28)", shape, DataError)
    height, width = (check_integer(f"{where}(shape)", size, 1, error=DataError) for size in shape)
    most = check_integer(f"{where}(most)", most, 1, error=DataError)
    count, rest = divmod(len(values), height * width)
    if rest or not count:
        raise DataError(f"{where}: {name} has {len(values):,} columns, no multiple of {height} × {width} pixels")
    if values.is_meta or not bool(values.isfinite().all()):
        reason = "without values, on the meta device" if values.is_meta else "not finite"
        raise DataError(f"{where}: {name} is {reason}")
    blocks = values.double().numpy(force=True).reshape(count, height, width)
    chosen = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))
    across = math.ceil(math.sqrt(len(chosen)))
    down = math.ceil(len(chosen) / across)
    canvas = np.full((down * (height + 1) - 1, across * (width + 1) - 1), np.nan)
    for place, block in enumerate(blocks[chosen]):
        top, left = place // across * (height + 1), place % across * (width + 1)
        canvas[top : top + height, left : left + width] = block
    largest = float(np.nanmax(np.abs(canvas))) or 1.0

    def draw(axes: Any) -> None:
        axes.imshow(canvas, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
        some = f"{len(chosen)} of {count:,}" if len(chosen) < count else f"{count}"
        axes.set(xticks=[], yticks=[], xlabel=f"{height} × {width} each, ±{largest:.2g}")
        axes.set_title(f"{name}: {some} image{'s' * (count > 1)}")
        axes.spines[:].set_visible(False)

    return drawn(ax, draw, (3.6, 3.6))
