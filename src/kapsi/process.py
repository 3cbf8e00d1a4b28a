"""Processing steps before κ, after κ and after a layer: activations, norms and dropout.

A `Process` is an option of a specification. The head or layer registers its module, so training, saving, `train()` and
`eval()` include the step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.derivatives import layer_norm
from kapsi.errors import DataError
from kapsi.function import Function, option

__all__ = ["Activation", "BatchNorm", "Dropout", "InstanceNorm", "LayerNorm", "Process", "pipeline"]


class Process(Function, role="process"):
    """A step on values of shape `(..., features)`; the shape stays the same.

    Attributes:
        random: whether training draws random numbers.
        fixed: whether the step is a constant function of each row: nothing random, trained or stored.
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


@dataclass(frozen=True)
class ReLU(Activation, name="relu"):
    """max(0, x)."""

    function = staticmethod(F.relu)


@dataclass(frozen=True)
class LeakyReLU(Activation, name="leaky_relu"):
    """max(0, x) + 0.01 min(0, x)."""

    function = staticmethod(F.leaky_relu)


@dataclass(frozen=True)
class ELU(Activation, name="elu"):
    """x for x > 0, else eˣ − 1."""

    function = staticmethod(F.elu)


@dataclass(frozen=True)
class SELU(Activation, name="selu"):
    """The scaled exponential linear unit, 1.0507 (x for x > 0, else 1.6733 (eˣ − 1))."""

    function = staticmethod(F.selu)


@dataclass(frozen=True)
class GELU(Activation, name="gelu"):
    """x Φ(x), Φ the normal distribution function."""

    function = staticmethod(F.gelu)


@dataclass(frozen=True)
class SiLU(Activation, name="silu", aliases=("swish",)):
    """x / (1 + e⁻ˣ)."""

    function = staticmethod(F.silu)


@dataclass(frozen=True)
class Mish(Activation, name="mish"):
    """x tanh(softplus(x))."""

    function = staticmethod(F.mish)


@dataclass(frozen=True)
class Sigmoid(Activation, name="sigmoid"):
    """1 / (1 + e⁻ˣ)."""

    function = staticmethod(torch.sigmoid)


@dataclass(frozen=True)
class Tanh(Activation, name="tanh"):
    """The hyperbolic tangent."""

    function = staticmethod(torch.tanh)


@dataclass(frozen=True)
class Softplus(Activation, name="softplus"):
    """log(1 + eˣ)."""

    function = staticmethod(F.softplus)


@dataclass(frozen=True)
class Softsign(Activation, name="softsign"):
    """x divided by one plus its absolute value."""

    function = staticmethod(F.softsign)


@dataclass(frozen=True)
class Asinh(Activation, name="asinh"):
    """The inverse hyperbolic sine: x near zero, the sign and logarithm of twice x far from it."""

    function = staticmethod(torch.asinh)


@dataclass(frozen=True)
class Sine(Activation, name="sine", aliases=("sin",)):
    """sin(x)."""

    function = staticmethod(torch.sin)


EXP_CUTOFF = 10.0
"""Largest exact input of the exponential, which continues as its tangent to keep values moderate."""


def _exponential(x: Tensor) -> Tensor:
    inside = x.clamp_max(EXP_CUTOFF)
    return inside.exp() * (1 + (x - inside))


@dataclass(frozen=True)
class Exp(Activation, name="exp"):
    """eˣ for x ≤ 10, its tangent beyond.

    Turns the sums of a layer into products.
    """

    function = staticmethod(_exponential)


# ------------------------------------------------------------------------------------------------ norms and dropout


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.eps, self.weight, self.bias)


@dataclass(frozen=True)
class LayerNorm(Process, name="layer_norm"):
    """(x − mean) / √(variance + ε) over the features of each row.

    After κ and without affine part, the norm folds into the contraction, and κ(x) need not be formed.

    Args:
        affine: add a trainable scale and shift for each feature.
        epsilon: ε, added to the variance, at least 0.
    """

    examples = ({}, {"affine": True})

    affine: bool = False
    epsilon: float = option(1e-5, minimum=0.0)

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
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
    """(x − mean) / √(variance + ε) of each row, as an instance with one channel of m positions.

    Without affine part equal to the layer norm; the affine part is a single scale and shift for all positions.

    Args:
        affine: add a trainable scale and shift.
        epsilon: ε, added to the variance, at least 0.
    """

    examples = ({}, {"affine": True})

    affine: bool = False
    epsilon: float = option(1e-5, minimum=0.0)

    def module(self, features: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return _InstanceNorm(self.epsilon, self.affine, device=device, dtype=dtype)


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
