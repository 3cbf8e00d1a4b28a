"""Fixed affine layers at both ends of a model, from data: users keep their units, the layers between see numbers near one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kapsi.arrays import as_dense, wider_dtype
from kapsi.calibrate import calibrate
from kapsi.errors import DataError, ScaleWarning, SpecError, refuse
from kapsi.hooks import copied, hooked_inputs
from kapsi.modules import Head, Layer, Model
from kapsi.modules.store import Seed
from kapsi.process import Affine, pipeline
from kapsi.spec import STANDARDIZING, ModelSpec

FAR = 10.0
"""Distance from the center of the range of κ, in half widths, from which inputs count as far outside."""

NARROW = 1e-3
"""Spread of an input relative to the range of κ below which κ is nearly constant."""

LARGE = 1e4
"""Size of inputs from which, or below the inverse of which, an expansion without a range gets a warning."""

ROUNDED = 1e-3
"""Distance of neighboring numbers, relative to the spread of a column, from which a cast counts as a loss."""

SMALL_TARGETS = 1e-5
"""Standard deviation of targets below which gradient steps fail: gradients are near the ε of AdamW, 10⁻⁸."""


def standardized(
    model: Model | ModelSpec,
    x: Any,
    y: Any = None,
    *,
    seed: Seed = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """Add fixed affine layers to both ends of a model, so that its inputs and outputs have the units of the data.

    f(x) = μ_y + σ_y g((x − μ_x) / σ_x), where g is the given model, calibrated on the standardized inputs. μ and σ are the
    means and standard deviations of the columns, stored as buffers of a process `affine`: they are saved with the model and
    not trained. A constant column has σ = 1. Inputs in float64 and integers are shifted in float64, also by a float32 model, so
    that times in seconds since 1970 keep their differences. `kapsi.fit` and `kapsi.predict` pass such inputs on unchanged.

    Args:
        model: a model, not changed, or a specification; null widths are taken from the data: the numbers of columns, and for
            class labels one output per class.
        x: inputs in the units of the data, `(rows, m)`: a tensor, an array, or a data frame.
        y: real targets, `(rows,)` or `(rows, n)`; class labels (integers) or None leave the outputs as they are. Densities are
            calibrated by class if their `count` is a multiple of the number of classes.
        seed: a seed or a generator for the initial values of a specification.
        dtype: type of a model from a specification.

    Raises:
        SpecError: neither a model nor a specification, or a model standardized already.
        DataError: no rows, not finite, or numbers of columns that do not match the model.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.rand(200, 2, dtype=torch.float64) * 1e9
        >>> y = 1e-9 * x[:, :1] * x[:, 1:]
        >>> spec = kp.rpn([2, 1], kp.Taylor(2), bias=True)
        >>> model = kp.standardized(spec, x, y, seed=0, dtype=torch.float64)
        >>> records = kp.fit(model, (x, y), epochs=20)
        >>> bool(((model(x) - y).abs() < 1e-3 * y.std()).all())
        True
    """
    inputs = _columns("x", x)
    targets = None if y is None else _columns("y", y)
    if isinstance(model, ModelSpec):
        spec = model if model.widths[-1] is not None else model.sized(out_features=_outputs(targets))
        model = Model(spec.sized(in_features=inputs.shape[1]), seed=seed, dtype=dtype)
    elif isinstance(model, Model):
        model = copied(model)
    else:
        refuse("standardized", "a kapsi Model or ModelSpec", model)
    if model.standardized:
        raise SpecError("standardized: the model is standardized already; give the model without its first layer")
    if targets is not None and len(targets) != len(inputs):
        raise DataError(f"standardized: {len(inputs):,} rows of x and {len(targets):,} of y")
    units = None
    if targets is not None and targets.is_floating_point():
        moments = Moments.of([targets])
        units = moments.mean, moments.deviation
    standardize(model, Moments.of([hooked_inputs(model, inputs)]), units)
    return calibrate_by_class(model, inputs, targets if targets is None or targets.shape[1] > 1 else targets[:, 0])


def calibrate_by_class(model: Model, x: Tensor, y: Tensor | None) -> Model:
    """Calibrate a model, by class if possible: a `count` of densities need not be a multiple of the number of classes."""
    try:
        return calibrate(model, x, y)
    except SpecError:
        if y is None:
            raise
    return calibrate(model, x)


class Moments:
    """Means and standard deviations of columns, in float64.

    Args:
        mean, deviation: `(columns,)`; the deviation of a constant column is 1.
    """

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        self.mean, self.deviation = mean, deviation

    @classmethod
    def of(cls, parts: Iterable[Tensor], *, skip_missing: bool = False) -> Moments:
        """Return the moments of rows in parts `(rows, columns)`, of known values alone if missing ones (NaN) are skipped."""
        count, mean, squares, unit, eps = *(torch.zeros((), dtype=torch.float64) for _ in range(4)), 0.0
        for part in parts:
            values = part.detach().to(torch.float64)
            values = values.unsqueeze(1) if values.dim() == 1 else values.flatten(1)
            known = ~values.isnan() if skip_missing else torch.ones_like(values, dtype=torch.bool)
            values, rows = values.masked_fill(~known, 0), known.sum(0).double()
            center = values.sum(0) / rows.clamp_min(1)
            share = rows / (count + rows).clamp_min(1)
            # Squares of differences in a unit near the largest magnitude, a power of two: others underflow or overflow.
            size = values.abs().amax(0) if len(values) else torch.zeros_like(center)
            last, unit = unit, torch.maximum(unit, _power_of_two(size))
            squares = squares * (last / unit).square()
            squares = squares + (((values - center) / unit).square() * known).sum(0)
            squares = squares + ((center - mean) / unit).square() * (count * share)
            mean = mean + (center - mean) * share
            count, eps = count + rows, torch.finfo(part.dtype).eps
        if not bool((count > 0).all()):
            raise DataError("standardized: expected at least one row, with a value in every column")
        bad = ~(mean.isfinite() & squares.isfinite())
        if bool(bad.any()):
            column = int(bad.nonzero()[0])
            raise DataError(
                f"standardized: expected finite values, with sums in the range of float64; not so in column {column}"
            )
        deviation = (squares / count).sqrt() * unit
        # Rounding of a constant column is no spread.
        return cls(mean, torch.where(deviation > 4 * eps * mean.abs(), deviation, 1.0))


def _power_of_two(size: Tensor) -> Tensor:
    """Return the largest powers of two up to some sizes, at least the smallest normal number, also for 0."""
    exponent = torch.where(size > 0, torch.frexp(size)[1], -1021)
    return torch.ldexp(torch.ones_like(size), exponent.clamp(-1021, 1024) - 1)


@torch.no_grad()
def standardize(model: Model, inputs: Moments, units: tuple[Tensor, Tensor] | None) -> None:
    """Add the affine layers to a model, in place.

    Args:
        model: the model.
        inputs: moments of the inputs.
        units: offset and factor of each output, `(n,)` in float64: outputs are offset + factor · g. None: unchanged.

    Raises:
        SpecError: another module is in the place of a layer.
        DataError: numbers of columns other than those of the model, or moments beyond the range of its type.
    """
    sizes = (
        (inputs.mean, model.in_features, "inputs"),
        (None if units is None else units[0], model.out_features, "outputs"),
    )
    for values, size, name in sizes:
        if values is not None and len(values) != size:
            hint = "; with several outputs for each target use kapsi.fit(…, loss=…, standardize=True)"
            raise DataError(
                f"standardized: the model has {size} {name} and the data {len(values)} columns{hint * (name == 'outputs')}"
            )
    model.check_layers("standardized")
    like = next(t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    first = Layer(model.in_features, model.in_features, STANDARDIZING, device=like.device, dtype=like.dtype)
    _set(first.output[0], inputs.mean, 1 / inputs.deviation, "inputs")
    specs = [layer for _, _, layer in model.spec.resolved()]
    if units is not None:
        last = cast(Layer, model.layers[-1])
        last.output.extend(pipeline((Affine(),), model.out_features, like.device, like.dtype))
        _set(last.output[-1], -units[0] / units[1], units[1], "targets")
        last.spec = specs[-1] = replace(last.spec, output=(*last.spec.output, Affine()))
    model.layers.insert(0, first)
    first.train(model.training)
    model.layers.train(model.training)
    model.spec = ModelSpec((model.spec.widths[0], *model.spec.widths), (STANDARDIZING, *specs))


def _set(module: torch.nn.Module, shift: Tensor, scale: Tensor, kind: str) -> None:
    """Set the buffers of an affine step; raise a `DataError` for values beyond the range of their type."""
    dtype = module.get_buffer("shift").dtype
    limits = torch.finfo(dtype)
    bad = (shift.abs() > limits.max) | (scale.abs() > limits.max) | (scale.abs() < limits.tiny)
    if bool(bad.any()):
        column = int(bad.nonzero()[0])
        raise DataError(
            f"standardized: mean or standard deviation of column {column} of the {kind} exceed the range of {dtype}; use a "
            "model in float64, or another unit"
        )
    low = shift - shift.to(dtype).to(shift.dtype)
    for name, value in (("shift", shift), ("low", low), ("scale", scale)):
        module.get_buffer(name).copy_(value)


def _outputs(targets: Tensor | None) -> int | None:
    """Return the number of outputs for targets: of columns, or of classes."""
    if targets is None:
        raise SpecError("standardized: without y, the last width of the specification cannot be null; give a number")
    if targets.is_floating_point() or targets.shape[1] > 1 or not len(targets):
        return targets.shape[1]
    return max(2, int(targets.max()) + 1)


def _columns(name: str, values: Any) -> Tensor:
    """Return data as a tensor `(rows, columns)`, of a floating-point type except for labels."""
    tensor = as_dense(values, "inputs" if name == "x" else "targets", "standardized")
    if name == "x" and not tensor.is_floating_point():
        tensor = tensor.to(wider_dtype(tensor.dtype, torch.get_default_dtype()))
    if tensor.dim() not in ((1, 2) if name == "y" else (2,)):
        raise DataError(f"standardized: expected {name} of shape (rows, columns), got {tuple(tensor.shape)}")
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(1)


# ------------------------------------------------------------------------------------------------ a warning


@torch.no_grad()
def warn_of_scale(model: Model, parts: Sequence[Tensor], where: str) -> None:
    """Warn if inputs lie far outside the range of κ of the first layer, or vary by a tiny part of the range only.

    Args:
        model: the model.
        parts: some of the inputs, `(rows, m)`.
        where: prefix of the message.
    """
    parts = [part for part in parts if part.layout == torch.strided and len(part)]
    if not parts:
        return
    x = hooked_inputs(model, torch.cat(parts))
    layers = list(model.layers)
    if model.standardized:
        x = layers.pop(0)(x)
    x = x.to(torch.float64)
    for head in getattr(layers[0], "heads", ()):  # of another module in the place of the layer, none
        if not isinstance(head, Head) or head.spec.before:
            continue
        problem = _problem(head, x)
        if problem:
            remedy = (
                "scale the inputs"
                if model.standardized
                else "use standardize=True or kapsi.standardized, scale the inputs"
            )
            warnings.warn(
                f"{where}: {problem}; {remedy}, or call kapsi.calibrate first",
                ScaleWarning,
                stacklevel=5,
            )
            return


def warn_of_rounding(values: Tensor, dtype: torch.dtype, kind: str, remedy: str, where: str) -> None:
    """Warn of a column with differences that a cast to a narrower type rounds, such as times in seconds since 1970.

    Args:
        values: some rows in the type of the data, `(rows, …)`.
        dtype: the type of the cast.
        kind: `inputs` or `targets`.
        remedy: how to avoid the loss.
        where: prefix of the message.
    """
    if values.layout != torch.strided or not len(values) or wider_dtype(values.dtype, dtype) == dtype:
        return
    columns = values.detach().to(torch.float64).reshape(len(values), -1)
    low, high = columns.nan_to_num().aminmax(dim=0)
    spacing = torch.finfo(dtype).eps * torch.maximum(low.abs(), high.abs())
    bad = (high > low) & (spacing > max(ROUNDED, 8 * torch.finfo(dtype).eps) * (high - low))
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        warnings.warn(
            f"{where}: column {i} of the {kind} lies between {float(low[i]):.12g} and {float(high[i]):.12g}, and {dtype} rounds to "
            f"steps of {float(spacing[i]):.2g} there; {remedy}",
            ScaleWarning,
            stacklevel=5,
        )


def warn_of_targets(y: Tensor, where: str) -> None:
    """Warn of targets so small that absolute thresholds of a solver, such as ε of AdamW, end training early."""
    deviation = float(y.detach().to(torch.float64).nan_to_num().std(0).max()) if len(y) > 1 else 0.0
    if 0 < deviation < SMALL_TARGETS:
        warnings.warn(
            f"{where}: the targets have a standard deviation of {deviation:.3g}, too small for gradient steps; use solver "
            "levenberg_marquardt, or targets in a smaller unit",
            ScaleWarning,
            stacklevel=5,
        )


def _problem(head: Head, x: Tensor) -> str:
    """Return why inputs do not suit the κ of a head; empty if they do."""
    expansion = head.spec.expansion
    ends = expansion.covered(head.store("expansion"), head.in_features)
    if ends is None:
        size = float(x.abs().max())
        if head.store("expansion").names() or 1 / LARGE <= size <= LARGE or size == 0:
            return ""
        return f"the largest input is {size:.3g} in size, far from 1; {expansion.name} needs inputs of unit scale"
    low, high = (end.to(x) for end in ends)
    half, spread = (high - low) / 2, x.amax(0) - x.amin(0)
    far = ((x - (low + half)).abs().amax(0) > FAR * half) & (spread > 0)
    narrow = (spread > 0) & (spread < NARROW * 2 * half)
    if not bool((far | narrow).any()):
        return ""
    i = int((far | narrow).nonzero()[0])
    relation = "is far outside" if bool(far[i]) else "is a tiny part of"
    return (
        f"input {i} lies between {float(x[:, i].min()):.3g} and {float(x[:, i].max()):.3g}, which {relation} the range of "
        f"{expansion.name}, {float(low[i]):.3g} to {float(high[i]):.3g}"
    )
