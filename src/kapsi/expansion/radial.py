"""Radial basis functions of each input."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kapsi.errors import SpecError, shown
from kapsi.expansion.base import HIDDEN_MARGIN, ElementWise, Interval
from kapsi.expansion.numerics import data_range, evenly, exp_neg, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option, options_of

__all__ = ["GaussianRBF", "InverseQuadraticRBF"]


@dataclass(frozen=True)
class RadialBasis(ElementWise):
    """Bumps around centers: κ(x) = [φ(ε₁(x − c₁)), …, φ(ε_G(x − c_G))], basis-major, D = m·G.

    Each center of each input has its own width 1/ε. Centers `(G, m)` and the logarithms of the widths `log_width` = −log ε
    `(G, m)` are buffers: initially evenly spaced on [low, high], then set by `kapsi.calibrate` or by
    `head.assign("expansion", centers=…, log_width=…)`.

    The default centers −2, −1, …, 2 with ε = 1 cover 95% of standard normal inputs. With `overlap` 1 the sum of many bumps
    is constant between the centers to within a percent; less separates them, more smooths.

    Centers and widths given as options hold for all inputs. Calibration keeps them and sets the others; training changes
    them if learnable.
    """

    centers: int | tuple[float, ...] = option(5, minimum=1, maximum=100_000)
    low: float = option(-2.0, minimum=-1e15, maximum=1e15)
    high: float = option(2.0, minimum=-1e15, maximum=1e15)
    overlap: float = option(1.0, minimum=0.01, maximum=100.0)
    placement: Literal["uniform", "quantile"] = "uniform"
    extrapolation: Literal["formula", "linear"] = "formula"
    learnable: bool = False
    width: float | tuple[float, ...] | None = None

    examples = (
        {},
        {"centers": 3, "learnable": True, "overlap": 0.7},
        {"centers": 2, "extrapolation": "linear", "low": -0.5, "high": 0.4, "overlap": 0.8, "learnable": True},
        {"centers": 1, "extrapolation": "linear", "placement": "quantile"},
        {"centers": 4, "placement": "quantile", "low": -1.0, "high": 1.5},
        {"centers": (-1.0, 0.2, 0.9), "width": (0.5, 1.0, 2.0)},
        {"centers": 3, "width": 0.8},
    )

    hidden_margin: ClassVar[float] = HIDDEN_MARGIN

    @abstractmethod
    def _profile(self, u: Tensor) -> Tensor:
        """Return φ(u)."""

    @abstractmethod
    def _slope(self, u: Tensor, profile: Tensor) -> Tensor:
        """Return φ′(u), from u and φ(u)."""

    def check(self) -> None:
        name, centers, width = type(self).__name__, self.centers, self.width
        if not self.low < self.high:
            raise SpecError(f"{name}(low={self.low}, high={self.high}): low must be below high")
        if isinstance(centers, tuple):
            if not centers or not all(a < b for a, b in pairwise(centers)) or max(map(abs, centers)) > 1e15:
                raise SpecError(f"{name}(centers={shown(centers)}): expected ascending numbers from -1e15 to 1e15")
            self._refuse_changed("centers", ("low", "high", "placement"))
        if width is not None:
            widths = width if isinstance(width, tuple) else (width,)
            if len(widths) not in (1, self.count) or not all(1e-30 <= number <= 1e30 for number in widths):
                wanted = f"a number from 1e-30 to 1e30, or {self.count} of them, one for each center"
                raise SpecError(f"{name}(width={shown(width)}): expected {wanted}")
            self._refuse_changed("width", ("overlap",))

    def _refuse_changed(self, given: str, names: tuple[str, ...]) -> None:
        """Raise a `SpecError` for options without effect beside a given one."""
        for field in options_of(type(self)):
            if field.name in names and getattr(self, field.name) != field.default:
                where = f"{type(self).__name__}({given}=…, {field.name}={getattr(self, field.name)})"
                raise SpecError(f"{where}: {field.name} has no effect with given {given}; leave it out")

    @property
    def count(self) -> int:
        """Return the number of centers."""
        return len(self.centers) if isinstance(self.centers, tuple) else self.centers

    def factors(self, in_features: int) -> tuple[int, int]:
        return self.count, in_features

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        low, high = self.low, self.high
        if isinstance(self.centers, tuple):
            reach = (self._widths()[0], self._widths()[-1]) if self.count == 1 else (0.0, 0.0)
            low, high = self.centers[0] - reach[0], self.centers[-1] + reach[1]
        return ((self.out_features(in_features), low, high),)

    def covered(self, params: Tensors, in_features: int) -> tuple[Tensor, Tensor]:
        centers, widths = params["centers"].detach(), params["log_width"].detach().exp()
        return (centers - widths).amin(0), (centers + widths).amax(0)

    def _positions(self) -> tuple[float, ...]:
        """Return the centers before calibration."""
        if isinstance(self.centers, tuple):
            return self.centers
        return evenly(self.low, self.high, self.centers)

    def _widths(self) -> tuple[float, ...]:
        """Return the widths before calibration, one for each center or one for all."""
        if self.width is not None:
            return self.width if isinstance(self.width, tuple) else (self.width,)
        if isinstance(self.centers, tuple):
            length = (self.centers[-1] - self.centers[0]) or self.high - self.low
            positions = torch.tensor(self.centers, dtype=torch.float64, device="cpu").unsqueeze(-1)
            spacing = _spacing(positions, torch.tensor([length], dtype=torch.float64, device="cpu"))
            return tuple((self.overlap * spacing).flatten().tolist())
        return (self.overlap * (self.high - self.low) / max(1, self.centers - 1),)

    def params(self, in_features: int) -> Params:
        shape = (self.count, in_features)
        return {
            "centers": Param(shape, self._positions(), trainable=self.learnable),
            "log_width": Param(shape, tuple(map(math.log, self._widths())), trainable=self.learnable),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return centers in the data, and widths from the distances between them; given ones are kept.

        Distances count as at least a tenth of the mean: quantiles coincide for repeated values.
        """
        if isinstance(self.centers, tuple):
            return {}
        low, high = data_range(x, self.centers)
        if self.placement == "uniform":
            fraction = torch.linspace(0, 1, self.centers, dtype=low.dtype, device=low.device).unsqueeze(-1)
            positions = low + (high - low) * (fraction if self.centers > 1 else fraction + 0.5)
        else:
            positions = torch.minimum(torch.maximum(_quantiles(working_precision(x), self.centers), low), high)
        if self.width is not None:
            return {"centers": positions}
        return {"centers": positions, "log_width": torch.log(self.overlap * _spacing(positions, high - low))}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        values, centers = working_precision(x).unsqueeze(-2), working_precision(params["centers"])
        log_width = working_precision(params["log_width"])
        epsilon = torch.exp(-log_width)
        if self.extrapolation == "formula":
            # The difference is exact near a center, however far both are from zero.
            bumps = self._profile((values - centers) * epsilon)
        else:
            width = torch.exp(log_width)
            low = (centers - width).amin(-2, keepdim=True)
            high = (centers + width).amax(-2, keepdim=True)
            clamped = torch.minimum(torch.maximum(values, low), high)
            u = (clamped - centers) * epsilon
            value = self._profile(u)
            bumps = value + self._slope(u, value) * epsilon * (values - clamped)
        return DenseFeatures(bumps.flatten(-2).to(x.dtype))


@dataclass(frozen=True)
class GaussianRBF(RadialBasis, name="gaussian_rbf"):
    """Gaussian bumps around centers: κ(x) = [φ₁(x), …, φ_G(x)], φ_g(x) = exp(−(ε_g(x − c_g))²), basis-major, D = m·G.

    Centers and widths are buffers `centers` and `log_width` = −log ε, `(G, m)`; `kapsi.calibrate` sets them from data. Ten
    widths away from all centers value and gradient vanish in float32. Calibrate, or choose `extrapolation="linear"`, for
    such inputs.

    Args:
        centers: G, their number for each input, 1 to 100,000, or the centers of every input as ascending numbers.
        low, high: first and last center before calibration, in units of the inputs, up to 10¹⁵ in size.
        overlap: width 1/ε in units of the distance between neighboring centers, 0.01 to 100.
        placement: how calibration places centers. `uniform`: evenly over the range of the data; `quantile`: with equal fractions
            of the data around each, and widths from the distances to neighbors.
        extrapolation: values farther than a width beyond all centers. `formula`: unchanged; `linear`: tangents of the bumps.
        learnable: train centers and widths.
        width: given 1/ε, in units of the inputs, a number or one for each center. None: from the distances of the centers.

    Source: arXiv 2407.04819, "Radial Basis Functions based Data Expansion".

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(1, 1, kp.HeadSpec(GaussianRBF(centers=3, low=-1.0, high=1.0)))
        >>> head.expand(torch.tensor([0.0])).dense()
        tensor([0.3679, 1.0000, 0.3679])
    """

    def _profile(self, u: Tensor) -> Tensor:
        return exp_neg(u.square())

    def _slope(self, u: Tensor, profile: Tensor) -> Tensor:
        return -2 * u * profile


@dataclass(frozen=True)
class InverseQuadraticRBF(RadialBasis, name="inverse_quadratic_rbf"):
    """Inverse quadratic bumps around centers: φ_g(x) = 1 / (1 + (ε_g(x − c_g))²), basis-major, D = m·G.

    Centers and widths are buffers `centers` and `log_width` = −log ε, `(G, m)`; `kapsi.calibrate` sets them from data. Far
    from all centers the bumps fall as 1/x² and keep a gradient.

    Args:
        centers: G, their number for each input, 1 to 100,000, or the centers of every input as ascending numbers.
        low, high: first and last center before calibration, in units of the inputs, up to 10¹⁵ in size.
        overlap: width 1/ε in units of the distance between neighboring centers, 0.01 to 100.
        placement: how calibration places centers. `uniform`: evenly over the range of the data; `quantile`: with equal fractions
            of the data around each, and widths from the distances to neighbors.
        extrapolation: values farther than a width beyond all centers. `formula`: unchanged; `linear`: tangents of the bumps.
        learnable: train centers and widths.
        width: given 1/ε, in units of the inputs, a number or one for each center. None: from the distances of the centers.

    Source: arXiv 2407.04819, "Radial Basis Functions based Data Expansion".

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(1, 1, kp.HeadSpec(InverseQuadraticRBF(centers=3, low=-1.0, high=1.0)))
        >>> head.expand(torch.tensor([0.0])).dense()
        tensor([0.5000, 1.0000, 0.5000])
    """

    def _profile(self, u: Tensor) -> Tensor:
        return torch.reciprocal(1 + u.square())

    def _slope(self, u: Tensor, profile: Tensor) -> Tensor:
        return -2 * u * profile.square()


def _quantiles(x: Tensor, count: int) -> Tensor:
    """Return the quantiles ½/count, 1½/count, …, `(count, m)`: the middles of equal fractions of the data."""
    ordered = x.sort(0).values
    fraction = (torch.arange(count, dtype=torch.float64, device=x.device) + 0.5) / count
    position = fraction * (len(x) - 1)
    below = position.floor().long()
    above = (below + 1).clamp_max(len(x) - 1)
    return torch.lerp(ordered[below], ordered[above], (position - below).to(x.dtype).unsqueeze(-1))


def _spacing(positions: Tensor, length: Tensor) -> Tensor:
    """Return the mean distance of each position `(G, m)` to its neighbors, or `length` `(m,)` for a single position."""
    count = len(positions)
    if count == 1:
        return length.unsqueeze(0)
    gaps = positions.diff(dim=0)
    distances = (torch.cat((gaps[:1], gaps)) + torch.cat((gaps, gaps[-1:]))) / 2
    mean = (positions[-1] - positions[0]) / (count - 1)
    return torch.maximum(distances, torch.where(mean > 0, mean / 10, length / count))
