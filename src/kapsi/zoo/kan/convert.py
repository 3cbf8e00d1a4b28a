"""Kolmogorov–Arnold networks: B-splines of each input, a dense ψ, and W·SiLU(x) as the remainder.

A layer is y_o = Σ_i φ_oi(x_i) with φ_oi(x) = Σ_g c_oig B_g(x) + w_oi SiLU(x): an edge for each input and output.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.expansion.spline import BSpline
from kapsi.function import catalogue
from kapsi.modules import Model
from kapsi.process import Activation
from kapsi.reconciliation.dense import Dense
from kapsi.remainder import LinearRemainder, Remainder, ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, rpn
from kapsi.zoo.base import Case, Comparison

__all__ = ["PARITY", "from_pykan", "spec"]


def spec(
    widths: Sequence[int | None],
    intervals: int = 5,
    degree: int = 3,
    *,
    low: float = -1.0,
    high: float = 1.0,
    knots: str | tuple[float, ...] = "uniform",
    extrapolation: str = "extended",
    base: str | None = "silu",
    bias: bool = False,
) -> ModelSpec:
    """Return the specification of a Kolmogorov–Arnold network.

    Each layer is κ = B-spline, ψ = dense, π(x) = W σ(x): y_o = Σ_i (Σ_g c_oig B_g(x_i) + w_oi σ(x_i)).

    Args:
        widths: numbers of nodes, from the inputs to the outputs.
        intervals, degree, low, high, knots, extrapolation: of the splines, as in `BSpline`. `extended` is the formula of the
            paper of these networks: the spline ends with its knots, and beyond them the base function is all there is.
        base: σ, the name of an activation; None: no remainder.
        bias: whether each node has a bias.

    Source: arXiv 2404.19756; arXiv 2407.04819, "KAN".

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.zoo import kan
        >>> model = kp.Model(kan.spec([2, 5, 1], intervals=3), seed=0)
        >>> sum(parameter.numel() for parameter in model.parameters())     # 15 edges of 6 functions and a base weight
        105
        >>> edges = kan.edge_functions(model, torch.zeros(4, 2))
        >>> [tuple(layer.values.shape) for layer in edges]
        [(4, 5, 2), (4, 1, 5)]
    """
    given: Any = {"intervals": intervals, "degree": degree, "low": low, "high": high, "knots": knots}
    splines = BSpline(extrapolation=extrapolation, **given)  # type: ignore[arg-type]
    remainder: Remainder = ZeroRemainder() if base is None else LinearRemainder(before=base)  # type: ignore[arg-type]
    return rpn(widths, splines, Dense(), remainder, bias=bias)


# ------------------------------------------------------------------------------------------------ from pykan


def from_pykan(model: Any, *, in_features: int | None = None) -> Model:
    """Return a model of pykan, `kan.KAN` or `kan.MultKAN`, as one of kapsi in float64 with equal outputs.

    The knots of each input are taken as they are, those beyond the range too. ψ has the spline's coefficients times `scale_sp`
    and `mask`, W has `scale_base` times `mask`, and both times `node_scale` and `subnode_scale`; their biases become that of the
    head. Edges that are masked are zeros; in training they are parameters as all others, unless `prune` has made them fixed.
    An input whose knots have all become one point, as those of a constant, has no spline in pykan, and zeros for it here.

    Args:
        model: an instance of `kan.MultKAN` (pykan 0.2), of any grid, degree, pruned or refined.
        in_features: number of columns of the rows that the model is called with; needed where `prune_input` left some of them,
            which are then known by their numbers. Columns that are not used have zeros.

    Raises:
        SpecError: another class; multiplication nodes; symbolic edges that are active, other than constants; a base function
            that is no activation of kapsi; knots that repeat; parameters that are not finite; `in_features` that is missing
            or does not fit.

    Source: pykan 0.2.8, `MultKAN.forward`.
    """
    layers = [_layer_of_pykan(model, number) for number in range(_depth_of_pykan(model))]
    kept = [int(i) for i in model.input_id]
    if len(kept) != len(layers[0].base):
        raise SpecError(f"from_pykan: input_id has {len(kept)} inputs, and the first layer {len(layers[0].base)}")
    width = _width_of_inputs(kept, in_features)
    layers[0] = layers[0].among(kept, width)
    biased = any(bool(layer.bias.any()) for layer in layers)
    widths = (width, *(len(layer.bias) for layer in layers))
    specs = tuple(LayerSpec((HeadSpec(layer.expansion, Dense(), layer.remainder, bias=biased),)) for layer in layers)
    made = Model(ModelSpec(widths, specs), seed=0, dtype=torch.float64)
    with torch.no_grad():
        for layer, place in zip(layers, made.layers, strict=True):
            head: Any = place.heads[0]  # type: ignore[index]
            head.assign("expansion", knots=layer.knots)
            head.assign("reconciliation", matrix=layer.coefficients.permute(1, 2, 0).flatten(1))
            if isinstance(layer.remainder, LinearRemainder):
                head.assign("remainder", matrix=layer.base.T)
            if biased:
                head.bias.copy_(layer.bias)
    return made.eval()


class _Layer:
    """A layer of pykan with everything that is affine folded in.

    Args:
        number: of the layer, for messages.
        layer: its `KANLayer`.
        scale, bias: of its outputs.
        remainder: what its base function is.
    """

    def __init__(self, number: int, layer: Any, scale: Tensor, bias: Tensor, remainder: Remainder) -> None:
        where = f"from_pykan: act_fun[{number}]"
        mask = _values(layer.mask, f"{where}.mask") * scale
        self.base = _values(layer.scale_base, f"{where}.scale_base") * mask
        self.coefficients = _values(layer.coef, f"{where}.coef") * (
            _values(layer.scale_sp, f"{where}.scale_sp") * mask
        ).unsqueeze(-1)
        grid, degree = _values(layer.grid, f"{where}.grid"), int(layer.k)
        intervals = grid.shape[1] - 1 - 2 * degree
        self.expansion = BSpline(
            intervals, degree, extrapolation="extended", knots="quantile", uniform_share=float(layer.grid_eps)
        )
        self.bias, self.remainder = bias, remainder
        # What has no width has no spline: every function is not a number there, for which pykan puts zero.
        none = grid[:, :1].eq(grid).all(1)
        self.coefficients[none] = 0
        grid = torch.where(none.unsqueeze(1), torch.arange(grid.shape[1]) + grid[:, :1], grid)
        wrong = (grid.diff(dim=1) <= 0).any(1)
        if bool(wrong.any()):
            raise SpecError(
                f"{where}.grid: the knots of input {int(wrong.nonzero()[0])} do not increase strictly, and where knots repeat "
                "pykan has zeros in place of its splines; update the grid with a positive grid_eps first"
            )
        self.knots = grid.T

    def among(self, kept: list[int], width: int) -> _Layer:
        """Return the layer with inputs that stand at places among others, which count nothing."""
        if kept == list(range(width)):
            return self
        lone = torch.linspace(-1, 1, len(self.knots), dtype=torch.float64).unsqueeze(-1)
        knots = lone.repeat(1, width)
        knots[:, kept] = self.knots
        for name in ("base", "coefficients"):
            values: Tensor = getattr(self, name)
            wider = values.new_zeros(width, *values.shape[1:])
            wider[kept] = values
            setattr(self, name, wider)
        self.knots = knots
        return self


def _depth_of_pykan(model: Any) -> int:
    """Return the number of layers, after a look at what cannot be carried over."""
    # Whoever has a model of pykan has imported it.
    module = sys.modules.get("kan.MultKAN")
    if module is None or not isinstance(model, module.MultKAN):
        raise SpecError(
            f"from_pykan: expected a model of pykan 0.2, kan.KAN or kan.MultKAN, got {type(model).__module__}."
            f"{type(model).__qualname__}"
        )
    if type(model).forward is not module.MultKAN.forward:
        raise SpecError(f"from_pykan: {type(model).__qualname__} has a forward of its own; expected that of kan.KAN")
    for number, nodes in enumerate(model.width):
        if nodes[1]:
            raise SpecError(
                f"from_pykan: width[{number}] has {nodes[1]} multiplication nodes, products of several sums, which a layer of "
                "sums is not; only addition nodes are carried over"
            )
    return int(model.depth)


def _layer_of_pykan(model: Any, number: int) -> _Layer:
    layer = model.act_fun[number]
    affine = {
        name: _values(getattr(model, name)[number], f"from_pykan: {name}[{number}]")
        for name in ("node_scale", "node_bias", "subnode_scale", "subnode_bias")
    }
    constants = _symbolic_constants(model, number)
    scale = affine["node_scale"] * affine["subnode_scale"]
    bias = scale * constants + (affine["node_scale"] * affine["subnode_bias"] + affine["node_bias"])
    return _Layer(number, layer, scale, bias, _remainder_of(model, layer, number))


def _symbolic_constants(model: Any, number: int) -> Tensor:
    """Return what symbolic edges add to each output, where they are constant; any others are refused."""
    symbolic = model.symbolic_fun[number]
    mask = _values(symbolic.mask, f"from_pykan: symbolic_fun[{number}].mask")
    if not model.symbolic_enabled:
        return torch.zeros(len(mask), dtype=torch.float64)
    for output, source in mask.nonzero().tolist():
        name = symbolic.funs_name[output][source]
        if name != "0":
            raise SpecError(
                f"from_pykan: the edge of layer {number} from node {source} to node {output} is symbolic, {name!r}; only splines "
                "and constants are carried over: model.unfix_symbolic_all() takes back what was fixed, and kapsi finds formulas "
                "by kan.formulas"
            )
    affine = _values(symbolic.affine, f"from_pykan: symbolic_fun[{number}].affine")
    return (mask * affine[..., 3]).sum(1)


def _width_of_inputs(kept: list[int], in_features: int | None) -> int:
    if in_features is None:
        if kept != list(range(len(kept))):
            raise SpecError(
                f"from_pykan: the model uses the inputs {kept} of its rows, but not how many there are; give in_features=, the "
                f"number of columns, at least {max(kept) + 1}"
            )
        return len(kept)
    if isinstance(in_features, bool) or not isinstance(in_features, int) or in_features <= max(kept):
        raise SpecError(
            f"from_pykan(in_features={in_features!r}): expected an integer of at least {max(kept) + 1}, as the model uses "
            f"input {max(kept)}"
        )
    if len(set(kept)) < len(kept):
        raise SpecError(f"from_pykan: the model uses an input twice: {kept}")
    return in_features


def _values(tensor: Tensor, where: str) -> Tensor:
    values = tensor.detach().to("cpu", torch.float64).clone()
    if not bool(values.isfinite().all()):
        raise SpecError(f"{where}: expected finite numbers; the model of pykan has diverged")
    return values


_SAME: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.elu: "elu",
    F.selu: "selu",
    torch.selu: "selu",
    F.gelu: "gelu",
    F.silu: "silu",
    F.mish: "mish",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    F.softplus: "softplus",
    F.softsign: "softsign",
    F.leaky_relu: "leaky_relu",
    torch.asinh: "asinh",
    torch.sin: "sine",
}
"""Activations of torch, as functions, by their names in kapsi."""

_MODULES: tuple[tuple[nn.Module, str], ...] = (
    (nn.ReLU(), "relu"),
    (nn.LeakyReLU(), "leaky_relu"),
    (nn.ELU(), "elu"),
    (nn.SELU(), "selu"),
    (nn.GELU(), "gelu"),
    (nn.SiLU(), "silu"),
    (nn.Mish(), "mish"),
    (nn.Sigmoid(), "sigmoid"),
    (nn.Tanh(), "tanh"),
    (nn.Softplus(), "softplus"),
    (nn.Softsign(), "softsign"),
)
"""The same as modules, with the options for which they are the same."""


def _remainder_of(model: Any, layer: Any, number: int) -> Remainder:
    base: Any = layer.base_fun
    # pykan's own function for "zero" has no name of its own; it has no other.
    if getattr(base, "__module__", "") == "kan.MultKAN" and getattr(base, "__name__", "") == "<lambda>":
        return ZeroRemainder()
    if isinstance(base, nn.Identity):
        return LinearRemainder()
    if isinstance(base, nn.Module):
        # `inplace` changes nothing of what comes out; all other options do.
        shown = repr(base).replace("inplace=True", "")
        names = [name for module, name in _MODULES if type(module) is type(base) and repr(module) == shown]
    else:
        names = [_SAME[base]] if isinstance(base, Callable) and base in _SAME else []  # type: ignore[arg-type]
    if not names:
        known = ", ".join(kind.name for kind in catalogue("process") if issubclass(kind, Activation))
        raise SpecError(
            f"from_pykan: act_fun[{number}].base_fun is {base!r}, which kapsi does not have; carried over are 'silu', 'identity', "
            f"'zero', and torch's functions and modules, with their default options, of: {known}"
        )
    return LinearRemainder(before=names[0])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ comparison


@contextlib.contextmanager
def _importing_pykan() -> Iterator[Any]:
    """Give the module of pykan, and put back the random states that its models set."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield importlib.import_module("kan")
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _hello_world(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of f = exp(sin(πx) + y²) on [−1, 1]², pykan's first example."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 2, generator=generator, dtype=torch.float64) * 2 - 1
    return x, torch.exp(torch.sin(torch.pi * x[:, :1]) + x[:, 1:] ** 2)


def _compare(seed: int, *, trained: bool) -> Comparison:
    x, y = _hello_world(200, seed)
    with _importing_pykan() as kan:
        theirs = kan.KAN(width=[2, 5, 1], grid=5, k=3, seed=seed, auto_save=False).double()
        with torch.no_grad():
            if trained:
                theirs.update_grid_from_samples(1.5 * x)  # knots of each input, unevenly far apart
                for number in range(theirs.depth):
                    theirs.node_scale[number].uniform_(0.5, 2)
                    theirs.subnode_bias[number].uniform_(-0.3, 0.3)
                    theirs.act_fun[number].scale_sp.mul_(3)
                theirs.act_fun[0].mask[1, 2] = 0
            outer = torch.cat((x, 4 * x))  # also where the knots have ended
            expected = theirs(outer)
    model = from_pykan(theirs)
    difference = (model(outer) - expected).abs() / expected.abs().clamp_min(1)
    names = ("grid", "coef", "scale_base", "scale_sp", "mask")
    count = sum(getattr(layer, name).numel() for layer in theirs.act_fun for name in names)
    affine = ("node_scale", "node_bias", "subnode_scale", "subnode_bias")
    count += sum(tensor.numel() for name in affine for tensor in getattr(theirs, name))
    return Comparison(
        deviation=float(difference.detach().max()),
        ours=sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())),
        theirs=count,
        model=model,
        x=x,
        y=y,
        loss="mse",
    )


def _compare_new(seed: int) -> Comparison:
    return _compare(seed, trained=False)


def _compare_updated(seed: int) -> Comparison:
    return _compare(seed, trained=True)


PARITY: tuple[Case, ...] = (
    Case("KAN [2, 5, 1]", "outputs", "exp(sin(πx) + y²)", "pykan", 1e-9, _compare_new),
    Case(
        "KAN [2, 5, 1], grid updated, affine, masked", "outputs", "exp(sin(πx) + y²)", "pykan", 1e-9, _compare_updated
    ),
)
