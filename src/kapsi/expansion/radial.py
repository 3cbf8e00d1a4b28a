"""Radial basis functions of each input."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion, Interval
from kapsi.expansion.numerics import data_range, exp_neg, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = ["GaussianRBF", "InverseQuadraticRBF"]


@dataclass(frozen=True)
class RadialBasis(Expansion):
    """Bumps around centers: κ(x) = [φ(ε₁(x − c₁)), …, φ(ε_G(x − c_G))], basis-major, D = m·G.

    Each center of each input has a width of its own, 1/ε. Centers `(G, m)` and the logarithms of the widths
    `log_width = −log ε`, `(G, m)`, are buffers: evenly spaced on [low, high] at first, set from data by `kapsi.calibrate`, or
    given with `head.assign("expansion", centers=…, log_width=…)`.

    Args:
        centers: G, their number for each input, 1 to 100,000.
        low, high: the first and the last center before calibration, in units of the inputs, up to 10¹⁵ in size. The defaults
            put centers at −2, −1, …, 2 with ε = 1, and hold 95% of inputs of unit scale.
        overlap: 1/ε in units of the distance between neighboring centers, 0.01 to 100. At 1 the sum of many bumps
            is constant between the centers to within a percent; less separates them, more smooths.
        placement: how `kapsi.calibrate` places centers: `uniform`, evenly over the range of the data; `quantile`, with an
            equal share of the data around each, and widths by the distances to its neighbors.
        extrapolation: what happens farther than one width beyond all centers. `formula`: the bumps decay as they say, a
            Gaussian until it is zero and has no gradient; `linear`: every bump goes on as its tangent there.
        learnable: whether centers and widths are trained.
    """

    centers: int = option(5, minimum=1, maximum=100_000)
    low: float = option(-2.0, minimum=-1e15, maximum=1e15)
    high: float = option(2.0, minimum=-1e15, maximum=1e15)
    overlap: float = option(1.0, minimum=0.01, maximum=100.0)
    placement: Literal["uniform", "quantile"] = "uniform"
    extrapolation: Literal["formula", "linear"] = "formula"
    learnable: bool = False

    examples = (
        {},
        {"centers": 3, "learnable": True, "overlap": 0.7},
        {"centers": 2, "extrapolation": "linear", "low": -0.5, "high": 0.4, "overlap": 0.8, "learnable": True},
        {"centers": 1, "extrapolation": "linear", "placement": "quantile"},
        {"centers": 4, "placement": "quantile", "low": -1.0, "high": 1.5},
    )

    @abstractmethod
    def _profile(self, u: Tensor) -> Tensor:
        """Return φ(u)."""

    @abstractmethod
    def _slope(self, u: Tensor, profile: Tensor) -> Tensor:
        """Return φ′(u), from u and φ(u)."""

    def check(self) -> None:
        if not self.low < self.high:
            raise SpecError(f"{type(self).__name__}(low={self.low}, high={self.high}): low must be below high")

    def factors(self, in_features: int) -> tuple[int, int]:
        return self.centers, in_features

    def element_wise(self) -> bool:
        return True

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return ((self.out_features(in_features), self.low, self.high),)

    def params(self, in_features: int) -> Params:
        count, length = self.centers, self.high - self.low
        if count == 1:
            places: tuple[float, ...] = ((self.low + self.high) / 2,)
        else:
            places = tuple(self.low + length * i / (count - 1) for i in range(count))
        width = self.overlap * length / max(1, count - 1)
        return {
            "centers": Param((count, in_features), places, trainable=self.learnable),
            "log_width": Param((count, in_features), (math.log(width),), trainable=self.learnable),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return centers in the data, and widths by the distances between them.

        A distance counts as at least a tenth of the mean one: quantiles coincide where values repeat.
        """
        low, high = data_range(x, self.centers)
        if self.placement == "uniform":
            share = torch.linspace(0, 1, self.centers, dtype=low.dtype, device=low.device).unsqueeze(-1)
            places = low + (high - low) * (share if self.centers > 1 else share + 0.5)
        else:
            places = torch.minimum(torch.maximum(_quantiles(working_precision(x), self.centers), low), high)
        return {"centers": places, "log_width": torch.log(self.overlap * _spacing(places, high - low))}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        values, centers = working_precision(x).unsqueeze(-2), working_precision(params["centers"])
        log_width = working_precision(params["log_width"])
        epsilon = torch.exp(-log_width)
        if self.extrapolation == "formula":
            # The difference first: it is exact near a center, however far both are from zero.
            bumps = self._profile((values - centers) * epsilon)
        else:
            width = torch.exp(log_width)
            low = (centers - width).amin(-2, keepdim=True)
            high = (centers + width).amax(-2, keepdim=True)
            near = torch.minimum(torch.maximum(values, low), high)
            u = (near - centers) * epsilon
            at = self._profile(u)
            bumps = at + self._slope(u, at) * epsilon * (values - near)
        return DenseFeatures(bumps.flatten(-2).to(x.dtype))


@dataclass(frozen=True)
class GaussianRBF(RadialBasis, name="gaussian_rbf"):
    """Gaussian bumps around centers: κ(x) = [φ₁(x), …, φ_G(x)], φ_g(x) = exp(−(ε_g(x − c_g))²), basis-major, D = m·G.

    Centers and widths are buffers `centers` and `log_width` = −log ε, `(G, m)`; `kapsi.calibrate` sets them from data. Far
    from all centers value and gradient vanish, as the formula says: in float32 from ten widths on. Calibrate, or choose
    `extrapolation="linear"`, where inputs may lie there.

    Args:
        centers: G, their number for each input, 1 to 100,000.
        low, high: the first and the last center before calibration, in units of the inputs, up to 10¹⁵ in size.
        overlap: the width 1/ε in units of the distance between neighboring centers, 0.01 to 100.
        placement: how `kapsi.calibrate` places centers, `uniform` over the range of the data or by `quantile`.
        extrapolation: farther than one width beyond all centers, `formula`: as everywhere; `linear`: every bump goes on as its
            tangent there.
        learnable: whether centers and widths are trained.

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
    from all centers the bumps fall as 1/x² and still have a gradient.

    Args:
        centers: G, their number for each input, 1 to 100,000.
        low, high: the first and the last center before calibration, in units of the inputs, up to 10¹⁵ in size.
        overlap: the width 1/ε in units of the distance between neighboring centers, 0.01 to 100.
        placement: how `kapsi.calibrate` places centers, `uniform` over the range of the data or by `quantile`.
        extrapolation: farther than one width beyond all centers, `formula`: as everywhere; `linear`: every bump goes on as its
            tangent there.
        learnable: whether centers and widths are trained.

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
    """Return the quantiles ½/count, 1½/count, …, `(count, m)`: the middles of equal shares of the data."""
    ordered = x.sort(0).values
    share = (torch.arange(count, dtype=torch.float64, device=x.device) + 0.5) / count
    place = share * (len(x) - 1)
    below = place.floor().long()
    above = (below + 1).clamp_max(len(x) - 1)
    return torch.lerp(ordered[below], ordered[above], (place - below).to(x.dtype).unsqueeze(-1))


def _spacing(places: Tensor, length: Tensor) -> Tensor:
    """Return the mean distance of each place `(G, m)` to its neighbors; `length` `(m,)` where there is none."""
    count = len(places)
    if count == 1:
        return length.unsqueeze(0)
    gaps = places.diff(dim=0)
    each = (torch.cat((gaps[:1], gaps)) + torch.cat((gaps, gaps[-1:]))) / 2
    mean = (places[-1] - places[0]) / (count - 1)
    return torch.maximum(each, torch.where(mean > 0, mean / 10, length / count))
