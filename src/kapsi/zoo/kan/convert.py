"""Converter of pykan's models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.errors import SpecError, check_integer
from kapsi.expansion.spline import BSpline
from kapsi.function import catalogue
from kapsi.modules import Model
from kapsi.process import Activation
from kapsi.reconciliation.dense import Dense
from kapsi.remainder import LinearRemainder, Remainder, ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.zoo.base import finite_tensor, forbid
from kapsi.zoo.mlp import ACTIVATIONS


def from_pykan(model: Any, *, in_features: int | None = None) -> Model:
    """Return a model of pykan, `kan.KAN` or `kan.MultKAN`, as a kapsi model in float64 with equal outputs.

    All knots are copied, also beyond the range. ψ has the spline's coefficients times `scale_sp` and `mask`, W has `scale_base`
    times `mask`, both times `node_scale` and `subnode_scale`; the biases of pykan become the bias of the head. Masked edges are
    zeros and trainable, unless fixed by `kapsi.interpret.prune`. An input with all knots at a single point, as after a grid
    update on a constant, has no spline in pykan and zeros in kapsi.

    Args:
        model: an instance of `kan.MultKAN` (pykan 0.2), of any grid and degree, pruned or refined.
        in_features: number of columns of the input rows; required if `prune_input` removed inputs (known by their indices).
            Unused columns have zeros.

    Raises:
        SpecError: an unsupported class; multiplication nodes; active symbolic edges except constants; a base function without
            counterpart in kapsi; repeated knots; `in_features` missing or too small.
        DataError: parameters that are not finite.

    Source: pykan 0.2.8, `MultKAN.forward`.
    """
    layers = [_layer_of_pykan(model, number) for number in range(_depth_of_pykan(model))]
    used = [int(i) for i in model.input_id]
    if len(used) != len(layers[0].base):
        raise SpecError(f"from_pykan: input_id has {len(used)} inputs, and the first layer {len(layers[0].base)}")
    width = _width_of_inputs(used, in_features)
    layers[0].spread_inputs(used, width)
    biased = any(bool(layer.bias.any()) for layer in layers)
    widths = (width, *(len(layer.bias) for layer in layers))
    specs = tuple(LayerSpec((HeadSpec(layer.expansion, Dense(), layer.remainder, bias=biased),)) for layer in layers)
    converted = Model(ModelSpec(widths, specs), seed=0, dtype=torch.float64)
    with torch.no_grad():
        for layer, (_, head) in zip(layers, converted.heads(), strict=True):
            head.assign("expansion", knots=layer.knots)
            head.assign("reconciliation", matrix=layer.coefficients.permute(1, 2, 0).flatten(1))
            if isinstance(layer.remainder, LinearRemainder):
                head.assign("remainder", matrix=layer.base.T)
            if head.bias is not None:
                head.bias.copy_(layer.bias)
    return converted.eval()


class _PykanLayer:
    """A layer of pykan with all affine maps folded in.

    Args:
        number: index of the layer, for messages.
        layer: its `KANLayer`.
        scale, bias: factor and offset of the outputs.
        remainder: the base function.
    """

    def __init__(self, number: int, layer: Any, scale: Tensor, bias: Tensor, remainder: Remainder) -> None:
        where = f"from_pykan: act_fun[{number}]"
        mask = finite_tensor(layer.mask, f"{where}.mask") * scale
        self.base = finite_tensor(layer.scale_base, f"{where}.scale_base") * mask
        self.coefficients = finite_tensor(layer.coef, f"{where}.coef") * (
            finite_tensor(layer.scale_sp, f"{where}.scale_sp") * mask
        ).unsqueeze(-1)
        grid, degree = finite_tensor(layer.grid, f"{where}.grid"), int(layer.k)
        intervals = grid.shape[1] - 1 - 2 * degree
        self.expansion = BSpline(
            intervals, degree, extrapolation="extended", knots="quantile", uniform_share=float(layer.grid_eps)
        )
        self.bias, self.remainder = bias, remainder
        # On a grid of zero width every spline is NaN, replaced by zero in pykan.
        empty = grid[:, :1].eq(grid).all(1)
        self.coefficients[empty] = 0
        grid = torch.where(empty.unsqueeze(1), torch.arange(grid.shape[1]) + grid[:, :1], grid)
        repeated = (grid.diff(dim=1) <= 0).any(1)
        if bool(repeated.any()):
            raise SpecError(
                f"{where}.grid: the knots of input {int(repeated.nonzero()[0])} do not increase strictly; pykan has zeros instead "
                "of splines at repeated knots; update the grid with a positive grid_eps first"
            )
        self.knots = grid.T

    def spread_inputs(self, used: list[int], width: int) -> None:
        """Move the inputs to their columns among `width`; the other columns have zeros."""
        if used == list(range(width)):
            return
        default = torch.linspace(-1, 1, len(self.knots), dtype=torch.float64).unsqueeze(-1)
        knots = default.repeat(1, width)
        knots[:, used] = self.knots
        self.knots = knots
        for name in ("base", "coefficients"):
            values: Tensor = getattr(self, name)
            wider = values.new_zeros(width, *values.shape[1:])
            wider[used] = values
            setattr(self, name, wider)


def _depth_of_pykan(model: Any) -> int:
    """Return the number of layers of a supported model."""
    module = sys.modules.get("kan.MultKAN")  # imported by the owner of the model
    kind = type(model)
    if module is None or not isinstance(model, module.MultKAN):
        raise SpecError(
            f"from_pykan: expected a pykan 0.2 model, kan.KAN or kan.MultKAN, got {kind.__module__}.{kind.__qualname__}"
        )
    products = [(number, nodes[1]) for number, nodes in enumerate(model.width) if nodes[1]]
    number, count = products[0] if products else (0, 0)
    forbid(
        "from_pykan",
        (
            kind.forward is not module.MultKAN.forward,
            f"{kind.__qualname__} overrides forward; expected kan.KAN's",
        ),
        (bool(products), f"width[{number}] has {count} multiplication nodes; only addition nodes convert"),
    )
    return int(model.depth)


def _layer_of_pykan(model: Any, number: int) -> _PykanLayer:
    layer = model.act_fun[number]
    affine = {
        name: finite_tensor(getattr(model, name)[number], f"from_pykan: {name}[{number}]")
        for name in ("node_scale", "node_bias", "subnode_scale", "subnode_bias")
    }
    constants = _symbolic_constants(model, number)
    scale = affine["node_scale"] * affine["subnode_scale"]
    bias = scale * constants + (affine["node_scale"] * affine["subnode_bias"] + affine["node_bias"])
    return _PykanLayer(number, layer, scale, bias, _remainder_of(layer, number))


def _symbolic_constants(model: Any, number: int) -> Tensor:
    """Return the sum of the constant symbolic edges of each output; forbid other symbolic edges."""
    symbolic = model.symbolic_fun[number]
    mask = finite_tensor(symbolic.mask, f"from_pykan: symbolic_fun[{number}].mask")
    if not model.symbolic_enabled:
        return torch.zeros(len(mask), dtype=torch.float64)
    for output, source in mask.nonzero().tolist():
        name = symbolic.funs_name[output][source]
        if name != "0":
            raise SpecError(
                f"from_pykan: the edge of layer {number} from node {source} to node {output} is symbolic, {name!r}; only splines "
                "and constants convert: call model.unfix_symbolic_all() first, and kp.interpret.edge_formulas for formulas in kapsi"
            )
    affine = finite_tensor(symbolic.affine, f"from_pykan: symbolic_fun[{number}].affine")
    return (mask * affine[..., 3]).sum(1)


def _width_of_inputs(used: list[int], in_features: int | None) -> int:
    least = max(used) + 1
    if in_features is None:
        if used != list(range(len(used))):
            raise SpecError(
                f"from_pykan: the model uses the inputs {used} of an unknown number; give in_features=, the number of columns, at "
                f"least {least}"
            )
        return len(used)
    forbid("from_pykan", (len(set(used)) < len(used), f"the model uses an input twice: {used}"))
    return check_integer("from_pykan(in_features)", in_features, least)


@functools.cache
def _functions() -> dict[Any, str]:
    """Return kapsi names of the torch activation functions."""
    known = {kind.function: kind.name for kind in catalogue("process") if issubclass(kind, Activation)}
    return known | {torch.relu: "relu", torch.selu: "selu", F.sigmoid: "sigmoid", F.tanh: "tanh"}


def _remainder_of(layer: Any, number: int) -> Remainder:
    base: Any = layer.base_fun
    # The base function "zero" of pykan is its only lambda.
    if getattr(base, "__module__", "") == "kan.MultKAN" and getattr(base, "__name__", "") == "<lambda>":
        return ZeroRemainder()
    if isinstance(base, nn.Identity):
        return LinearRemainder()
    name = None
    if type(base) in ACTIVATIONS:
        activation, options = ACTIVATIONS[type(base)]
        if all(getattr(base, option) == value for option, value in options.items()):
            name = activation
    elif isinstance(base, Callable):  # type: ignore[arg-type]
        name = _functions().get(base)
    if name is None:
        known = ", ".join(kind.name for kind in catalogue("process") if issubclass(kind, Activation))
        raise SpecError(
            f"from_pykan: act_fun[{number}].base_fun is {base!r}, without counterpart in kapsi; supported are 'silu', 'identity', "
            f"'zero', and torch's functions and modules, with their default options, of: {known}"
        )
    return LinearRemainder(before=name)  # type: ignore[arg-type]
