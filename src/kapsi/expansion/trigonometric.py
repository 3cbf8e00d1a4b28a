"""Trigonometric and hyperbolic functions, and their inverses."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kapsi.expansion.base import ElementWise, Interval
from kapsi.expansion.numerics import bounded_ratio, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Tensors, option

__all__ = ["Hyperbolic", "InverseHyperbolic", "InverseTrigonometric", "Trigonometric"]


class _Three(ElementWise):
    """Three functions of each input: κ(x) = [f₁(x), f₂(x), f₃(x)], D = 3m."""

    names: ClassVar[tuple[str, str, str]]

    def factors(self, in_features: int) -> tuple[int, int]:
        return 3, in_features

    def function_names(self, count: int) -> list[str]:
        return list(self.names)

    @abstractmethod
    def functions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three functions of x, in float32 or float64."""

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        return DenseFeatures(torch.cat(self.functions(working_precision(x)), -1).to(x.dtype))


@dataclass(frozen=True)
class Trigonometric(_Three, name="trigonometric"):
    """Cosine, sine and tangent: κ(x) = [cos x, sin x, tan x], D = 3m.

    The tangent is exact up to 1/ε. Near a pole, for c = cot x within ±ε, it is bridged by 2c/ε² − c³/ε⁴, equal to 1/c at ±ε
    in value and slope: values stay within 1.1/ε, and the pole maps to zero.

    Args:
        eps: ε, about the distance from a pole at which the bridge begins, 10⁻⁶ to 1, in radians.

    Source: arXiv 2407.04819, "Hyperbolic Function and Trigonometric Function based Data Expansions".

    Example:
        >>> import torch
        >>> Trigonometric()(torch.tensor([1.0]), {}).dense()
        tensor([0.5403, 0.8415, 1.5574])
    """

    names = ("cos", "sin", "tan")
    examples = ({}, {"eps": 0.5})

    eps: float = option(0.01, minimum=1e-6, maximum=1.0)

    def heavy_tailed(self) -> bool:
        """Return True: the tangent has a pole in every period."""
        return True

    def functions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cosine, sine = torch.cos(x), torch.sin(x)
        return cosine, sine, bounded_ratio(sine, cosine, self.eps)


@dataclass(frozen=True)
class Hyperbolic(_Three, name="hyperbolic"):
    """Hyperbolic cosine, sine and tangent: κ(x) = [cosh x, sinh x, tanh x], D = 3m.

    Beyond `|x|` = p, cosh and sinh continue as their tangents at ±p. At the largest p values and squares stay within
    float32 for `|x|` up to 1,000; in float16, with a maximum of 65,504, choose p of at most 4 for such inputs.

    Args:
        cutoff: p, largest `|x|` with exact cosh and sinh, 0.1 to 30.

    Source: arXiv 2407.04819, "Hyperbolic Function and Trigonometric Function based Data Expansions".

    Example:
        >>> import torch
        >>> Hyperbolic()(torch.tensor([1.0]), {}).dense()
        tensor([1.5431, 1.1752, 0.7616])
    """

    names = ("cosh", "sinh", "tanh")
    examples = ({}, {"cutoff": 1.5})

    cutoff: float = option(16.0, minimum=0.1, maximum=30.0)

    def functions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ends, high, low = (-self.cutoff, self.cutoff), math.cosh(self.cutoff), math.sinh(self.cutoff)
        cosine = _tangent_beyond(x, torch.cosh, ends, (-low, low))
        return cosine, _tangent_beyond(x, torch.sinh, ends, (high, high)), torch.tanh(x)


@dataclass(frozen=True)
class InverseTrigonometric(_Three, name="inverse_trigonometric", aliases=("arc_trigonometric",)):
    """Inverse cosine, sine and tangent: κ(x) = [arccos x, arcsin x, arctan x], D = 3m.

    arccos and arcsin are exact for `|x|` ≤ 1 − δ and continue as tangents: slopes, infinite at ±1, stay within 1/√(2δ −
    δ²), which is 7.1 at the default, and inputs outside of [−1, 1] remain distinguishable.

    Args:
        margin: δ, distance from ±1 at which the tangents begin, 10⁻⁶ to 0.5.

    Source: arXiv 2407.04819, "Hyperbolic Function and Trigonometric Function based Data Expansions".

    Example:
        >>> import torch
        >>> InverseTrigonometric()(torch.tensor([0.5]), {}).dense()
        tensor([1.0472, 0.5236, 0.4636])
    """

    names = ("arccos", "arcsin", "arctan")
    examples = ({}, {"margin": 0.3})

    margin: float = option(0.01, minimum=1e-6, maximum=0.5)

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return ((2 * in_features, -1.0, 1.0), (in_features, -math.inf, math.inf))

    def functions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ends, slope = (self.margin - 1, 1 - self.margin), 1 / math.sqrt(self.margin * (2 - self.margin))
        cosine = _tangent_beyond(x, torch.acos, ends, (-slope, -slope))
        return cosine, _tangent_beyond(x, torch.asin, ends, (slope, slope)), torch.atan(x)


@dataclass(frozen=True)
class InverseHyperbolic(_Three, name="inverse_hyperbolic", aliases=("arc_hyperbolic",)):
    """Inverse hyperbolic cosine, sine and tangent: κ(x) = [arccosh x, arcsinh x, arctanh x], D = 3m.

    arccosh has the domain [1, ∞), arctanh (−1, 1). arccosh is exact for x ≥ 1 + δ, arctanh for `|x|` ≤ 1 − δ; both continue
    as tangents, with slopes of 1/√(2δ + δ²) and 1/(2δ − δ²), 7.1 and 50 at the default.

    Args:
        margin: δ, distance from ±1 at which the tangents begin, 10⁻⁶ to 0.5.

    Source: arXiv 2407.04819, "Hyperbolic Function and Trigonometric Function based Data Expansions", as in the paper's
        overview of functions; the formula in the text has sinh and tanh in place of the inverses.

    Example:
        >>> import torch
        >>> InverseHyperbolic()(torch.tensor([2.0, 0.5]), {}).dense()[[0, 3, 5]]
        tensor([1.3170, 0.4812, 0.5493])
    """

    names = ("arccosh", "arcsinh", "arctanh")
    examples = ({}, {"margin": 0.3})

    margin: float = option(0.01, minimum=1e-6, maximum=0.5)

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return (
            (in_features, 1.0, math.inf),
            (in_features, -math.inf, math.inf),
            (in_features, -1.0, 1.0),
        )

    def functions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        margin = self.margin
        slope, steep = 1 / math.sqrt(margin * (2 + margin)), 1 / (margin * (2 - margin))
        cosine = _tangent_beyond(x, torch.acosh, (1 + margin, math.inf), (slope, 0.0))
        tangent = _tangent_beyond(x, torch.atanh, (margin - 1, 1 - margin), (steep, steep))
        return cosine, torch.asinh(x), tangent


def _tangent_beyond(
    x: Tensor, function: Callable[[Tensor], Tensor], ends: tuple[float, float], slopes: tuple[float, float]
) -> Tensor:
    """Return a function between two ends, and its tangents beyond; an infinite end has no tangent.

    Slopes are arguments, because an end rounded to float32 would lose the digits of a small margin.
    """
    low, high = ends
    y = function(x.clamp(low, high)) + slopes[0] * torch.where(x < low, x - low, 0.0)
    return y if math.isinf(high) else y + slopes[1] * torch.where(x > high, x - high, 0.0)
