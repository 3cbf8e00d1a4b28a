"""Processing steps before κ, after κ and after a layer: activations, norms and dropout.

A `Process` is an option of a specification. The head or layer registers its module, so training, saving, `train()` and
`eval()` include the step.
"""

from __future__ import annotations

import math
import types
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.derivatives import layer_norm
from kapsi.errors import DataError, SpecError
from kapsi.features import DenseFeatures, Features, formed
from kapsi.function import Function, Submodule, option
from kapsi.hooks import must_be_called


class Process(Function, role="process"):
    """A step on values of shape `(..., features)`; the shape stays the same.

    Attributes:
        random: whether training draws random numbers.
        fixed: whether the step is a fixed function of each row, without random, trained or stored values.
    """

    random: ClassVar[bool] = False
    fixed: ClassVar[bool] = False

    @abstractmethod
    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        """Return the module of the step."""


def pipeline(
    steps: Sequence[Process], features: int, device: torch.device | None, dtype: torch.dtype | None
) -> nn.Sequential:
    """Return the modules of several steps in order."""
    return nn.Sequential(*[step.module(features, device, dtype) for step in steps])


@dataclass(frozen=True)
class Steps(Submodule):
    """Several steps in order, as a module declared by a function.

    Args:
        steps: the steps.
        features: number of features.
    """

    steps: tuple[Process, ...]
    features: int

    def build(self, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return pipeline(self.steps, self.features, device, dtype)


def folds(steps: Sequence[Process]) -> bool:
    """Return whether the first step is a layer norm without affine part, which keeps the structure of features."""
    return bool(steps) and isinstance(steps[0], LayerNorm) and not steps[0].affine


def processed(features: Features, steps: Sequence[Process], modules: nn.Sequential, where: str) -> Features:
    """Return features after some steps, at least one; a first layer norm without affine part is folded in.

    Args:
        features: κ(x).
        steps: the steps.
        modules: their modules in order.
        where: prefix of the message on features too wide to be materialized.
    """
    first: Any = modules[0]
    if not folds(steps) or type(first) is not _LayerNorm or must_be_called(first) or must_be_called(modules):
        return DenseFeatures(modules(formed(features, where)))
    features = features.normalized(first.eps)
    return features if len(modules) == 1 else DenseFeatures(modules[1:](formed(features, where)))


# ------------------------------------------------------------------------------------------------ activations


class Activation(Process):
    """An element-wise function without tensors."""

    fixed = True
    function: ClassVar[Callable[..., Tensor]]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the function to each value."""
        return type(self).function(x)

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return Elementwise(self)


class Elementwise(nn.Module):
    """The module of an activation."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)

    def extra_repr(self) -> str:
        return self.activation.name


EXP_CUTOFF = 10.0
"""Largest exact input of the exponential, which continues as its tangent to keep values moderate."""


def _exponential(x: Tensor) -> Tensor:
    inside = x.clamp_max(EXP_CUTOFF)
    return inside.exp() * (1 + (x - inside))


LOG_CUTOFF = 1e-4
"""Smallest exact input c of the logarithm; below, its mirror image log c² − log(2c − x): defined everywhere, never steep."""


def _logarithm(x: Tensor) -> Tensor:
    mirrored = (2 * LOG_CUTOFF - x).clamp_min(LOG_CUTOFF)
    return x.clamp_min(LOG_CUTOFF).log() - mirrored.log() + math.log(LOG_CUTOFF)


def _activation(
    title: str, name: str, function: Callable[..., Tensor], formula: str, *aliases: str
) -> type[Activation]:
    """Return the class of an activation; `formula` is the docstring."""
    members = {"__doc__": formula, "__module__": __name__, "function": staticmethod(function)}
    options = {"name": name, "aliases": aliases}
    return dataclass(frozen=True)(types.new_class(title, (Activation,), options, lambda body: body.update(members)))


ReLU = _activation("ReLU", "relu", F.relu, "max(0, x).")
LeakyReLU = _activation("LeakyReLU", "leaky_relu", F.leaky_relu, "max(0, x) + 0.01 min(0, x).")
ELU = _activation("ELU", "elu", F.elu, "x for x > 0, else eˣ − 1.", "celu")
SELU = _activation("SELU", "selu", F.selu, "The scaled ELU, 1.0507 (x for x > 0, else 1.6733 (eˣ − 1)).")
GELU = _activation("GELU", "gelu", F.gelu, "x Φ(x), Φ the normal distribution function.")
SiLU = _activation("SiLU", "silu", F.silu, "x / (1 + e⁻ˣ).", "swish")
Mish = _activation("Mish", "mish", F.mish, "x tanh(softplus(x)).")
Sigmoid = _activation("Sigmoid", "sigmoid", torch.sigmoid, "1 / (1 + e⁻ˣ).")
Tanh = _activation("Tanh", "tanh", torch.tanh, "The hyperbolic tangent.")
Softplus = _activation("Softplus", "softplus", F.softplus, "log(1 + eˣ).")
Softsign = _activation("Softsign", "softsign", F.softsign, "x divided by one plus its absolute value.")
Asinh = _activation("Asinh", "asinh", torch.asinh, "The inverse hyperbolic sine: logarithmic for large x.")
Sine = _activation("Sine", "sine", torch.sin, "sin(x).", "sin")
Exp = _activation("Exp", "exp", _exponential, "eˣ for x ≤ 10, its tangent beyond: products from the sums of a layer.")
Log = _activation(
    "Log", "log", _logarithm, "log x for x ≥ 10⁻⁴, its mirror image below: with `exp`, powers and products of inputs."
)


# ------------------------------------------------------------------------------------------------ norms and dropout


def _check_several(process: Process, features: int) -> None:
    """Raise a `SpecError` for a norm over the features of a row with a single feature."""
    if features == 1:
        raise SpecError(
            f"{process.name}: a norm over the features of a row is constant for one feature, whatever the inputs; use "
            "batch_norm, or leave the norm out"
        )


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.eps, self.weight, self.bias)


@dataclass(frozen=True)
class LayerNorm(Process, name="layer_norm"):
    """(x − mean) / √(variance + ε) over the features of each row, at least two.

    After κ and without affine part, the norm folds into the contraction, and κ(x) need not be materialized.

    Args:
        affine: add a trainable scale and shift for each feature.
        epsilon: ε, added to the variance, at least 0.
    """

    examples = ({}, {"affine": True})

    affine: bool = False
    epsilon: float = option(1e-5, minimum=0.0)

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        _check_several(self, features)
        return _LayerNorm(features, eps=self.epsilon, elementwise_affine=self.affine, device=device, dtype=dtype)


class _BatchNorm(nn.BatchNorm1d):
    """Batch norm over all leading axes."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.training and rows.shape[0] < 2:
            if rows.shape[0] == 0:
                return x
            raise DataError("batch_norm: training needs at least two rows, got 1; use a larger batch, or model.eval()")
        normalized: Tensor = super().forward(rows)
        return normalized.reshape(x.shape)


@dataclass(frozen=True)
class BatchNorm(Process, name="batch_norm"):
    """(x − mean) / √(variance + ε) of each feature over the batch; in evaluation with running statistics.

    Args:
        affine: add a trainable scale and shift for each feature.
        momentum: weight of a new batch in the running statistics, 0 to 1.
        epsilon: ε, added to the variance, above 0.
    """

    examples = ({}, {"affine": True, "momentum": 0.3})

    affine: bool = False
    momentum: float = option(0.1, minimum=0.0, maximum=1.0)
    epsilon: float = option(1e-5, minimum=1e-30)

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return _BatchNorm(features, self.epsilon, self.momentum, self.affine, device=device, dtype=dtype)


class _InstanceNorm(nn.Module):
    def __init__(self, epsilon: float, affine: bool, **factory: Any) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones((), **factory)) if affine else None
        self.bias = nn.Parameter(torch.zeros((), **factory)) if affine else None

    def reset_parameters(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        normalized = layer_norm(x, self.epsilon)
        return normalized if self.weight is None or self.bias is None else normalized * self.weight + self.bias

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon}, affine={self.weight is not None}"


@dataclass(frozen=True)
class InstanceNorm(Process, name="instance_norm"):
    """(x − mean) / √(variance + ε) of each row, as an instance with one channel of m positions, at least two.

    Without affine part equal to the layer norm; the affine part is a single scale and shift for all positions.

    Args:
        affine: add a trainable scale and shift.
        epsilon: ε, added to the variance, at least 0.
    """

    examples = ({}, {"affine": True})

    affine: bool = False
    epsilon: float = option(1e-5, minimum=0.0)

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        _check_several(self, features)
        return _InstanceNorm(self.epsilon, self.affine, device=device, dtype=dtype)


class _Affine(nn.Module):
    shift: Tensor
    low: Tensor
    scale: Tensor

    def __init__(self, features: int, **factory: Any) -> None:
        super().__init__()
        for name in ("shift", "low", "scale"):
            self.register_buffer(name, torch.empty(features, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.shift.zero_()
        self.low.zero_()
        self.scale.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.shift - self.low) * self.scale).to(self.scale.dtype)


@dataclass(frozen=True)
class Affine(Process, name="affine"):
    """(x − shift − low) · scale of each feature, with fixed numbers.

    Buffers, saved with the model, initially 0, 0 and 1; `kapsi.standardized` sets them from data. `low` is the rounding error of
    the shift. Inputs of a wider type are shifted in their type, and the result is cast to that of the buffers.
    """

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return _Affine(features, device=device, dtype=dtype)


class _Clamp(nn.Module):
    low: Tensor
    high: Tensor

    def __init__(self, features: int, **factory: Any) -> None:
        super().__init__()
        self.register_buffer("low", torch.empty(features, **factory))
        self.register_buffer("high", torch.empty(features, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        largest = torch.finfo(self.low.dtype).max
        self.low.fill_(-largest)
        self.high.fill_(largest)

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, self.low), self.high)


@dataclass(frozen=True)
class Clamp(Process, name="clamp"):
    """min(max(x, low), high) of each feature: an expansion sees no values beyond the range of the training rows.

    Buffers `low` and `high`, saved with the model; initially the range of all numbers of the type.
    """

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return _Clamp(features, device=device, dtype=dtype)


class _NormalScores(nn.Module):
    knots: Tensor
    scores: Tensor

    def __init__(self, features: int, count: int, **factory: Any) -> None:
        super().__init__()
        self.register_buffer("knots", torch.empty(features, count, **factory))
        self.register_buffer("scores", torch.empty(features, count, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.knots.is_meta:  # PyTorch would import SymPy
            return
        count = self.knots.shape[1]
        values = torch.linspace(-3, 3, count, dtype=torch.float64, device=self.knots.device)
        self.knots.copy_(values.expand_as(self.knots))
        self.scores.copy_(values.expand_as(self.scores))

    def forward(self, x: Tensor) -> Tensor:
        features, count = self.knots.shape
        inside = torch.minimum(torch.maximum(x, self.knots[:, 0]), self.knots[:, -1])
        # Features first: the knots of a feature stay in the cache.
        inside = inside.reshape(-1, features).T
        # A binary search for the last knot at or below x, in operations that every exporter knows.
        index = torch.zeros_like(inside, dtype=torch.int64)
        for bit in reversed(range((count - 1).bit_length())):
            candidate = (index + 2**bit).clamp_max(count - 2)
            index = torch.where(self.knots.gather(1, candidate) <= inside, candidate, index)
        left, low = self.knots.gather(1, index), self.scores.gather(1, index)
        width = self.knots.gather(1, index + 1) - left
        slope = (self.scores.gather(1, index + 1) - low) / torch.where(width > 0, width, torch.inf)
        return (low + (inside - left) * slope).T.contiguous().reshape(x.shape)

    def extra_repr(self) -> str:
        return f"knots={self.knots.shape[1]}"


NUMBERS_AT_ONCE = 2**22
"""Numbers of columns whose ranks are computed together."""


@dataclass(frozen=True)
class NormalScores(Process, name="normal_scores"):
    """A piecewise linear function of each feature through knots and scores, constant beyond the ends.

    With quantiles of the training rows as knots and normal quantiles as scores (`normal_scores`), outputs are nearly standard
    normal, whatever the distribution. Buffers `knots`, ascending, and `scores`, both `(features, knots)`, saved with the model;
    initially the identity on [−3, 3].

    Args:
        knots: number of knots, 2 to 10,000.
    """

    examples = ({"knots": 5}, {})

    knots: int = option(200, minimum=2, maximum=10_000)

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return _NormalScores(features, self.knots, device=device, dtype=dtype)


def normal_scores(x: Tensor, knots: int) -> tuple[Tensor, Tensor]:
    """Return knots and scores for `NormalScores`, `(m, knots)`, from rows `(rows, m)`.

    The score of a value is Φ⁻¹((r − ½)/rows) for its mean rank r; a column with one value has score 0.
    """
    wide = max(1, NUMBERS_AT_ONCE // max(len(x), 1))
    pairs = [_normal_scores(columns, knots) for columns in x.T.split(wide)]
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def _normal_scores(columns: Tensor, knots: int) -> tuple[Tensor, Tensor]:
    """Return knots and scores of columns `(m, rows)`."""
    rows, dtype, device = columns.shape[1], columns.dtype, columns.device
    ordered = columns.sort(1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = first.cumsum(1) - 1
    last = group[:, -1:]
    # Distinct values of each column and their mean ranks; unused places at the end have infinite ranks.
    values = torch.zeros_like(ordered).scatter_(1, group, ordered)
    counts = torch.zeros_like(group).scatter_add_(1, group, torch.ones_like(group))
    ranks = counts.cumsum(1) - counts.to(dtype) / 2
    ranks.masked_fill_(counts == 0, torch.inf)
    index = torch.arange(knots, device=device).minimum(last)
    if rows > knots:
        # Half of the knots are evenly spaced in ranks, half in scores, for the tails.
        even = torch.linspace(-1, 1, knots - knots // 2, dtype=dtype, device=device)
        tails = torch.special.ndtr(-torch.special.ndtri(ranks[:, :1] / rows) * even)
        middle = torch.linspace(0, 1, knots // 2, dtype=dtype, device=device).expand(len(columns), -1)
        wanted = torch.cat([middle, tails], 1).sort(1).values * rows
        kept = torch.searchsorted(ranks, wanted).minimum(last)
        kept[:, 0], kept[:, -1:] = 0, last
        index = torch.where(last < knots, index, kept)
    return values.gather(1, index), torch.special.ndtri(ranks.gather(1, index) / rows)


@dataclass(frozen=True)
class Dropout(Process, name="dropout"):
    """In training, values are set to zero with probability p and otherwise divided by 1 − p; identity in evaluation.

    Args:
        p: probability, 0 to 1.
    """

    random = True
    examples = ({}, {"p": 0.1})

    p: float = option(0.5, minimum=0.0, maximum=1.0)

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return nn.Dropout(self.p)
