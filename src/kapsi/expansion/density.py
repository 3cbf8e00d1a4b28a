"""Naive probabilistic expansions: log-densities of each input under one-dimensional distributions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from kapsi.errors import SpecError, shown
from kapsi.expansion.base import ElementWise, Interval, class_labels
from kapsi.expansion.numerics import concat_basis, evenly, log_gamma, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = [
    "NaiveCauchy",
    "NaiveChiSquared",
    "NaiveExponential",
    "NaiveGamma",
    "NaiveLaplace",
    "NaiveMixed",
    "NaiveNormal",
]

SMOOTHING = 1e-9
"""Fraction of the variance of an input added to fitted variances, as in scikit-learn's GaussianNB."""

MAX_INPUT = 1e150
"""Fits clamp inputs to this size, so that sums of squares stay finite in float64."""

MAX_SHAPE = 1e4
"""Largest fitted shape of a gamma distribution, with a standard deviation of 1% of the mean; float32 loses digits beyond."""

MAX_DEGREES = 1e6
"""Largest fitted degrees of freedom."""

ITERATIONS_CAUCHY = 60
"""Each step halves the error, or less for few or widely clustered rows; 60 usually leave 10⁻⁷ of the error."""

ITERATIONS_NEWTON = 10
"""Each step doubles the number of correct digits, starting from at least one."""

GivenParameter: TypeAlias = float | tuple[float, ...] | None
"""A given parameter: one number for all components, one number for each, or None to have it fitted."""


@dataclass(frozen=True)
class NaiveDensity(ElementWise):
    """Log-densities of each input: κ(x) = [log p(x | θ₁), …, log p(x | θ_d)], component-major, d = count, D = m·d.

    The parameters θ are tensors `(count, m)`, one value for each component and input, buffers unless learnable; positive
    parameters are stored as logarithms, so every value is valid.

    `kapsi.calibrate` fits by maximum likelihood. Without labels, the data of each input are divided by rank into `count`
    groups of equal size, and each component is fitted to a group, in ascending order. With labels, y of shape `(rows,)` or
    `(rows, 1)` of integers in any type, the components are class-major in ascending order: each class has count /
    classes components, fitted to the rank groups of its rows. Other targets (fractions, several columns) count as no labels.
    A constant group gets a standard deviation of 3·10⁻⁵ times that of the input; if the input is constant, times that of
    the widest input; and 1 if all inputs are constant.

    Parameters given as options hold for all inputs, one number for all components or one for each. Calibration keeps them and
    fits the other parameters by maximum likelihood at their current values; training changes them if learnable.
    """

    given: ClassVar[Mapping[str, str]] = {}  # tensors of parameters that are options, by option

    count: int = option(2, minimum=1, maximum=100_000)
    learnable: bool = False

    def check(self) -> None:
        for name, tensor in self.given.items():
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else () if value is None else (value,)
            where = f"{type(self).__name__}({name}={shown(value)})"
            if isinstance(value, tuple) and len(value) != self.count:
                raise SpecError(
                    f"{where}: expected one number, or {self.count} numbers, one for each component (count)"
                )
            low, high = (1e-30, 1e30) if tensor.startswith("log_") else (-1e30, 1e30)
            if not all(low <= number <= high for number in numbers):
                raise SpecError(f"{where}: {name} must be from {low:g} to {high:g}")

    def _given(self) -> dict[str, tuple[float, ...]]:
        """Return the given parameters by tensor, as stored."""
        values: dict[str, tuple[float, ...]] = {}
        for name, tensor in self.given.items():
            value = getattr(self, name)
            if value is not None:
                numbers = value if isinstance(value, tuple) else (value,)
                values[tensor] = tuple(map(math.log, numbers)) if tensor.startswith("log_") else numbers
        return values

    def factors(self, in_features: int) -> tuple[int, int]:
        return self.count, in_features

    def params(self, in_features: int) -> Params:
        shape, values = (self.count, in_features), self._defaults() | self._given()
        return {name: Param(shape, numbers, trainable=self.learnable) for name, numbers in values.items()}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return maximum likelihood estimates of the parameters not given, each component from its group of rows.

        Raises:
            SpecError: `count` is not a multiple of the number of classes in y.
            DataError: y has values that are not finite.
        """
        known = {name: params[name].double() for name in self._given()}
        if len(known) == len(self.given):
            return {}
        rows = x.double().clamp(-MAX_INPUT, MAX_INPUT)
        deviations = deviation(rows)
        widest = deviations.max()
        min_deviation = math.sqrt(SMOOTHING) * torch.where(deviations > 0, deviations, widest)
        min_deviation, widest = (torch.where(widest > 0, value, 1.0) for value in (min_deviation, widest))
        labels = class_labels(type(self).__name__, y, rows)
        classes = 1 if labels is None else len(labels.unique())
        fits = []
        for k, group in enumerate(self._groups(rows, labels)):
            # Of several components, a component with constant rows, as the zeros of a 0/1 column, gets a fraction of the
            # standard deviation of the input: near rounding errors, its column would dominate all others.
            degenerate = (deviation(group) == 0) & (deviations > 0) & (self.count > classes)
            least = torch.where(degenerate, deviations / self.count, min_deviation)
            fits.append(self._fit(group, least, widest, {name: values[k] for name, values in known.items()}))
        return {name: torch.stack([fit[name] for fit in fits]) for name in fits[0] if name not in known}

    def _groups(self, rows: Tensor, labels: Tensor | None) -> Iterator[Tensor]:
        """Yield the rows for each component, with every column sorted."""
        classes = [] if labels is None else labels.unique().tolist()
        per_class, rest = divmod(self.count, max(1, len(classes)))
        if rest:
            shown = ", ".join(str(int(label)) for label in classes[:10]) + (", …" if len(classes) > 10 else "")
            allowed = ", ".join(str(len(classes) * k) for k in (1, 2, 3))
            raise SpecError(
                f"{type(self).__name__}(count={self.count}): y has the {len(classes)} classes {shown}; "
                f"count must be a multiple of {len(classes)}: {allowed}, …; or calibrate without y"
            )
        for part in [rows] if labels is None else [rows[labels == label] for label in classes]:
            ordered, size = part.sort(0).values, len(part)
            for k in range(per_class):
                start = k * size // per_class
                yield ordered[start : max((k + 1) * size // per_class, start + 1)]

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        tensors = {name: working_precision(params[name]) for name in self._defaults()}
        return DenseFeatures(self._extended(working_precision(x).unsqueeze(-2), tensors).flatten(-2).to(x.dtype))

    def _extended(self, x: Tensor, t: Tensors) -> Tensor:
        """Return the columns for any real x: the log-density, and its continuation outside of the support."""
        return self._log_density(x, t)

    @abstractmethod
    def _defaults(self) -> dict[str, tuple[float, ...]]:
        """Return the parameters before calibration by name, a value for each component."""

    @abstractmethod
    def _log_density(self, x: Tensor, t: Tensors) -> Tensor:
        """Return log p(x | θ), `(..., count, m)` for x of shape `(..., 1, m)`."""

    @abstractmethod
    def _fit(
        self, rows: Tensor, min_deviation: Tensor, widest: Tensor, known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return maximum likelihood parameters, `(m,)` each; values of given parameters are ignored.

        Args:
            rows: `(rows, m)`, at least one, each column in ascending order.
            min_deviation: standard deviation of each input in place of zero, `(m,)`.
            widest: largest standard deviation of an input in all data, `()`.
            known: given parameters by name of the tensor, as stored, `(m,)` each.
        """


@dataclass(frozen=True)
class PositiveDensity(NaiveDensity):
    """Log-densities on x > 0.

    Below a floor ε the columns continue as log p(ε) − log(2 − x/ε): continuous, and falling ever more slowly. Fits clamp
    inputs to ε.
    """

    floor: float = option(1e-2, minimum=1e-6, maximum=1e6)

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return ((self.out_features(in_features), self.floor, math.inf),)

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return super().calibrate(x.double().clamp_min(self.floor), params, y)

    def _extended(self, x: Tensor, t: Tensors) -> Tensor:
        inside = x.clamp_min(self.floor)
        return self._log_density(inside, t) - torch.log1p((inside - x) / self.floor)


@dataclass(frozen=True)
class NaiveNormal(NaiveDensity, name="naive_normal", aliases=("normal",)):
    """Log-densities of normal distributions: log p(x | μ, σ) = −(x − μ)²/(2σ²) − log σ − ½ log 2π, D = m·count.

    Before calibration the means are evenly spaced on [−1.5, 1.5] with σ = 1. A single component is symmetric about its mean
    and cannot distinguish −2 from 2; two components of different means can. Fits use mean and variance of each group, plus a
    fraction of the largest variance of an input. With labels and one component per class, the sum of the columns of a class
    is the log-likelihood of scikit-learn's `GaussianNB`, also for inputs constant within a class, whose columns are then huge.
    Models trained on such inputs (columns of zeros and ones) need a smoothing of about 0.01. See `NaiveDensity` for the
    groups.

    Args:
        count: components of each input, 1 to 100,000; with labels a multiple of the number of classes.
        learnable: train the parameters `mean` (μ) and `log_scale` (log σ).
        smoothing: fraction of the largest variance of an input added to all fitted variances, 0 to 1.
        mean, std: given μ and σ, a number or one for each component; σ above 0. None: fitted.

    Source: arXiv 2407.04819, "Probabilistic Data Expansion"; (a) Gaussian.

    Example:
        >>> import torch
        >>> kappa = NaiveNormal(count=2)
        >>> kappa(torch.tensor([1.0]), {"mean": torch.tensor([[0.0], [1.0]]), "log_scale": torch.zeros(2, 1)}).dense()
        tensor([-1.4189, -0.9189])
    """

    examples = ({}, {"count": 1}, {"count": 3, "learnable": True, "smoothing": 0.1}, {"mean": (-1.0, 2.0), "std": 0.7})
    given: ClassVar[Mapping[str, str]] = {"mean": "mean", "std": "log_scale"}

    smoothing: float = option(SMOOTHING, minimum=0.0, maximum=1.0)
    mean: GivenParameter = None
    std: GivenParameter = None

    def check(self) -> None:
        super().check()
        if self.std is not None and self.smoothing != SMOOTHING:
            raise SpecError(f"NaiveNormal(std=…, smoothing={self.smoothing}): smoothing has no effect with a given std")

    def _defaults(self) -> dict[str, tuple[float, ...]]:
        return {"mean": evenly(-1.5, 1.5, self.count), "log_scale": (0.0,)}

    def _log_density(self, x: Tensor, t: Tensors) -> Tensor:
        z = (x - t["mean"]) * torch.exp(-t["log_scale"])
        return -0.5 * z.square() - t["log_scale"] - 0.5 * math.log(2 * math.pi)

    def _fit(
        self, rows: Tensor, min_deviation: Tensor, widest: Tensor, known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        mean = known.get("mean", rows.mean(0))
        smoothed = (rows - mean).square().mean(0) + self.smoothing * widest.square()
        variance = torch.where(deviation(rows) > 0, smoothed, torch.maximum(smoothed, min_deviation.square()))
        return {"mean": mean, "log_scale": 0.5 * variance.log()}


@dataclass(frozen=True)
class NaiveLaplace(NaiveDensity, name="naive_laplace", aliases=("laplace",)):
    """Log-densities of Laplace distributions: log p(x | μ, b) = −|x − μ|/b − log 2b, D = m·count.

    Before calibration the locations are evenly spaced on [−1.5, 1.5] with b = 1; a single location cannot distinguish −2
    from 2. Fits use the median of each group and the mean distance from the median; see `NaiveDensity` for the groups.

    Args:
        count: components of each input, 1 to 100,000; with labels a multiple of the number of classes.
        learnable: train the parameters `location` (μ) and `log_scale` (log b).
        location, scale: given μ and b, a number or one for each component; b above 0. None: fitted.

    Source: arXiv 2407.04819, "Probabilistic Data Expansion"; (c) Laplace.

    Example:
        >>> import torch
        >>> NaiveLaplace(1)(torch.tensor([1.0]), {"location": torch.zeros(1, 1), "log_scale": torch.zeros(1, 1)}).dense()
        tensor([-1.6931])
    """

    examples = ({}, {"count": 3, "learnable": True}, {"location": 0.5, "scale": (0.5, 2.0)})
    given: ClassVar[Mapping[str, str]] = {"location": "location", "scale": "log_scale"}

    location: GivenParameter = None
    scale: GivenParameter = None

    def _defaults(self) -> dict[str, tuple[float, ...]]:
        return {"location": evenly(-1.5, 1.5, self.count), "log_scale": (0.0,)}

    def _log_density(self, x: Tensor, t: Tensors) -> Tensor:
        return -(x - t["location"]).abs() * torch.exp(-t["log_scale"]) - t["log_scale"] - math.log(2)

    def _fit(
        self, rows: Tensor, min_deviation: Tensor, widest: Tensor, known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        location = known.get("location", _median(rows))
        return {"location": location, "log_scale": (rows - location).abs().mean(0).clamp_min(min_deviation).log()}


@dataclass(frozen=True)
class NaiveCauchy(NaiveDensity, name="naive_cauchy", aliases=("cauchy",)):
    """Log-densities of Cauchy distributions: log p(x | x₀, γ) = −log(1 + ((x − x₀)/γ)²) − log πγ, D = m·count.

    Before calibration the locations are evenly spaced on [−1.5, 1.5] with γ = 1; a single location cannot distinguish −2
    from 2. Fits run 60 steps of expectation maximization from the median and half of the interquartile range of each group;
    see `NaiveDensity` for the groups.

    Args:
        count: components of each input, 1 to 100,000; with labels a multiple of the number of classes.
        learnable: train the parameters `location` (x₀) and `log_scale` (log γ).
        location, scale: given x₀ and γ, a number or one for each component; γ above 0. None: fitted.

    Source: arXiv 2407.04819, "Probabilistic Data Expansion"; (d) Cauchy. The fit: Kent, Tyler and Vardi, A curious
        likelihood identity for the multivariate t-distribution (1994).

    Example:
        >>> import torch
        >>> NaiveCauchy(1)(torch.tensor([1.0]), {"location": torch.zeros(1, 1), "log_scale": torch.zeros(1, 1)}).dense()
        tensor([-1.8379])
    """

    examples = ({}, {"count": 3, "learnable": True}, {"location": (-1.0, 1.0), "scale": 0.5})
    given: ClassVar[Mapping[str, str]] = {"location": "location", "scale": "log_scale"}

    location: GivenParameter = None
    scale: GivenParameter = None

    def _defaults(self) -> dict[str, tuple[float, ...]]:
        return {"location": evenly(-1.5, 1.5, self.count), "log_scale": (0.0,)}

    def _log_density(self, x: Tensor, t: Tensors) -> Tensor:
        z = (x - t["location"]) * torch.exp(-t["log_scale"])
        return -torch.log1p(z.square()) - t["log_scale"] - math.log(math.pi)

    def _fit(
        self, rows: Tensor, min_deviation: Tensor, widest: Tensor, known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        size, log_scale = len(rows), known.get("log_scale")
        location, scale = _median(rows), ((rows[3 * size // 4] - rows[size // 4]) / 2).clamp_min(min_deviation)
        location = known.get("location", location)
        scale = scale if log_scale is None else log_scale.exp()
        for _ in range(ITERATIONS_CAUCHY):
            weights = 1 / (1 + ((rows - location) / scale).square())
            total = weights.sum(0)
            location = known.get("location", (weights * rows).sum(0) / total)
            # The weighted mean square of z is size / total − 1, which equals 1 at the maximum.
            if log_scale is None:
                scale = (scale * (size / total - 1).clamp_min(0).sqrt()).clamp_min(min_deviation)
        return {"location": location, "log_scale": scale.log()}


@dataclass(frozen=True)
class NaiveExponential(PositiveDensity, name="naive_exponential", aliases=("exponential",)):
    """Log-densities of exponential distributions: log p(x | λ) = log λ − λx for x > 0, D = m·count.

    Below the floor ε the columns continue as log p(ε) − log(2 − x/ε). For inputs of both signs give the head
    `before="softplus"`. Before calibration the rates are evenly spaced in logarithm on [½, 2]. Fits use the reciprocal of
    the mean of each group; see `NaiveDensity` for the groups.

    Args:
        count: components of each input, 1 to 100,000; with labels a multiple of the number of classes.
        learnable: train the parameter `log_rate` (log λ).
        floor: ε, start of the continuation, 10⁻⁶ to 10⁶, in units of x.
        rate: given λ, above 0, a number or one for each component. None: fitted.

    Source: arXiv 2407.04819, "Probabilistic Data Expansion"; (b) exponential.

    Example:
        >>> import torch
        >>> NaiveExponential(1)(torch.tensor([3.0]), {"log_rate": torch.zeros(1, 1)}).dense()
        tensor([-3.])
    """

    examples = ({}, {"count": 3, "learnable": True, "floor": 0.1}, {"rate": (0.5, 3.0)})
    given: ClassVar[Mapping[str, str]] = {"rate": "log_rate"}

    rate: GivenParameter = None

    def _defaults(self) -> dict[str, tuple[float, ...]]:
        return {"log_rate": evenly(math.log(0.5), math.log(2), self.count)}

    def _log_density(self, x: Tensor, t: Tensors) -> Tensor:
        return t["log_rate"] - x * torch.exp(t["log_rate"])

    def _fit(
        self, rows: Tensor, min_deviation: Tensor, widest: Tensor, known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return {"log_rate": -rows.mean(0).log()}


@dataclass(frozen=True)
class NaiveGamma(PositiveDensity, name="naive_gamma", aliases=("gamma",)):
    """Log-densities of gamma distributions: log p(x | k, θ) = (k − 1) log x − x/θ − log Γ(k) − k log θ, D = m·count.

    Below the floor ε the columns continue as log p(ε) − log(2 − x/ε). For inputs of both signs give the head
    `before="softplus"`. Before calibration the shapes are evenly spaced in logarithm on [1, 4], all with mean 1. Fits use
    Newton's method for the shape, at most 10,000; see `NaiveDensity` for the groups.

    Args:
        count: components of each input, 1 to 100,000; with labels a multiple of the number of classes.
        learnable: train the parameters `log_shape` (log k) and `log_scale` (log θ).
        floor: ε, start of the continuation, 10⁻⁶ to 10⁶, in units of x.
        shape, scale: given k and θ, above 0, a number or one for each component. None: fitted.

    Source: arXiv 2407.04819, "Probabilistic Data Expansion"; (f) gamma. The fit: Minka, Estimating a Gamma distribution
        (2002).

    Example:
        >>> import torch
        >>> kappa = NaiveGamma(1)
        >>> kappa(torch.tensor([3.0]), {"log_shape": torch.zeros(1, 1), "log_scale": torch.zeros(1, 1)}).dense()
        tensor([-3.])
    """

    examples = ({}, {"count": 1}, {"count": 3, "learnable": True, "floor": 0.1}, {"shape": (1.0, 3.0), "scale": 0.5})
    given: ClassVar[Mapping[str, str]] = {"shape": "log_shape", "scale": "log_scale"}

    shape: GivenParameter = None
    scale: GivenParameter = None

    def _defaults(self) -> dict[str, tuple[float, ...]]:
        shapes = evenly(math.log(1), math.log(4), self.count)
        return {"log_shape": shapes, "log_scale": tuple(-value for value in shapes)}

    def _log_density(self, x: Tensor, t: Tensors) -> Tensor:
        shape = t["log_shape"].exp()
        falling = x * torch.exp(-t["log_scale"])
        return (shape - 1) * x.log() - falling - log_gamma(shape) - shape * t["log_scale"]

    def _fit(
        self, rows: Tensor, min_deviation: Tensor, widest: Tensor, known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        mean, log_mean = rows.mean(0), rows.log().mean(0)
        if "log_shape" in known:
            shape = known["log_shape"].exp()
        elif "log_scale" in known:
            shape = _inverse_digamma((log_mean - known["log_scale"]).clamp_max(math.log(MAX_SHAPE)))
        else:
            # log k − ψ(k), close to 1/(2k) for large k.
            target = (mean.log() - log_mean).clamp_min(1 / (2 * MAX_SHAPE))
            shape = (3 - target + ((target - 3).square() + 24 * target).sqrt()) / (12 * target)
            for _ in range(ITERATIONS_NEWTON):
                error = shape.log() - torch.special.digamma(shape) - target
                slope = 1 / shape - torch.special.polygamma(1, shape)
                shape = 1 / (1 / shape + error / (shape.square() * slope))
        return {"log_shape": shape.log(), "log_scale": (mean / shape).log()}


@dataclass(frozen=True)
class NaiveChiSquared(PositiveDensity, name="naive_chi_squared", aliases=("naive_chi2", "chi2")):
    """Log-densities of chi-squared distributions: log p(x | k) = (k/2 − 1) log x − x/2 − log Γ(k/2) − (k/2) log 2, D =
    m·count.

    The degrees of freedom k are any positive numbers. Below the floor ε the columns continue as log p(ε) − log(2 − x/ε).
    For inputs of both signs give the head `before="softplus"`. Before calibration the degrees are evenly spaced in
    logarithm on [1, 4]. Fits use Newton's method on ψ(k/2) = mean of log(x/2), for k of at most a million; see
    `NaiveDensity` for the groups.

    Args:
        count: components of each input, 1 to 100,000; with labels a multiple of the number of classes.
        learnable: train the parameter `log_degrees` (log k).
        floor: ε, start of the continuation, 10⁻⁶ to 10⁶, in units of x.
        degrees: given k, above 0, a number or one for each component. None: fitted.

    Source: arXiv 2407.04819, "Probabilistic Data Expansion"; (e) chi-squared. The fit: Minka, Estimating a Dirichlet
        distribution (2000), appendix C.

    Example:
        >>> import torch
        >>> NaiveChiSquared(1)(torch.tensor([3.0]), {"log_degrees": torch.full((1, 1), 2.0).log()}).dense()
        tensor([-2.1931])
    """

    examples = ({}, {"count": 3, "learnable": True, "floor": 0.1}, {"degrees": (1.5, 4.0)})
    given: ClassVar[Mapping[str, str]] = {"degrees": "log_degrees"}

    degrees: GivenParameter = None

    def _defaults(self) -> dict[str, tuple[float, ...]]:
        return {"log_degrees": evenly(math.log(1), math.log(4), self.count)}

    def _log_density(self, x: Tensor, t: Tensors) -> Tensor:
        half = t["log_degrees"].exp() / 2
        return (half - 1) * x.log() - x / 2 - log_gamma(half) - half * math.log(2)

    def _fit(
        self, rows: Tensor, min_deviation: Tensor, widest: Tensor, known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        target = (rows.log().mean(0) - math.log(2)).clamp_max(math.log(MAX_DEGREES / 2))
        return {"log_degrees": (2 * _inverse_digamma(target)).log()}


Kind = Literal["normal", "cauchy", "laplace", "exponential", "gamma", "chi_squared"]

LINE: dict[str, type[NaiveDensity]] = {"normal": NaiveNormal, "cauchy": NaiveCauchy, "laplace": NaiveLaplace}
HALF_LINE: dict[str, type[PositiveDensity]] = {
    "exponential": NaiveExponential,
    "gamma": NaiveGamma,
    "chi_squared": NaiveChiSquared,
}


@dataclass(frozen=True)
class NaiveMixed(ElementWise, name="naive_mixed", aliases=("hybrid", "hybrid_probabilistic")):
    """Log-densities of several distributions: κ(x) = [log p₁(x | θ₁), log p₂(x | θ₂), …], D = m·kinds·count.

    Columns, parameters before and after calibration, and the continuation below the floor equal `NaiveNormal`,
    `NaiveCauchy` and so on, in the order of `kinds`; tensors are named by kind. For given parameters use `Extended` with
    these densities as parts.

    Args:
        kinds: the distributions, each once: `normal`, `cauchy`, `laplace`, `exponential`, `gamma`, `chi_squared`.
        count: components of each distribution and input, 1 to 100,000; with labels a multiple of the number of classes.
        learnable: train the parameters.
        floor: start of the continuation of distributions on x > 0, 10⁻⁶ to 10⁶, in units of x.

    Source: arXiv 2407.04819, "Naive Probabilistic Data Expansion", the hybrid variant.

    Example:
        >>> NaiveMixed(("normal", "gamma"), count=3).out_features(5)
        30
    """

    examples = ({}, {"kinds": ("gamma", "normal"), "count": 1, "learnable": True, "floor": 0.1})

    kinds: tuple[Kind, ...] = ("normal", "cauchy", "laplace", "exponential", "gamma", "chi_squared")
    count: int = option(2, minimum=1, maximum=100_000)
    learnable: bool = False
    floor: float = option(1e-2, minimum=1e-6, maximum=1e6)

    def check(self) -> None:
        if not self._parts or len(self._parts) < len(self.kinds):
            raise SpecError(f"NaiveMixed(kinds={self.kinds}): name at least one distribution, and each once")

    @cached_property  # cached before compilation
    def _parts(self) -> dict[str, NaiveDensity]:
        count, learnable, floor = self.count, self.learnable, self.floor
        return {
            kind: LINE[kind](count, learnable) if kind in LINE else HALF_LINE[kind](count, learnable, floor)
            for kind in self.kinds
        }

    def factors(self, in_features: int) -> tuple[int, int]:
        return len(self.kinds) * self.count, in_features

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return tuple(interval for part in self._parts.values() for interval in part.domain(in_features))

    def params(self, in_features: int) -> Params:
        return {kind: part.params(in_features) for kind, part in self._parts.items()}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {kind: part.calibrate(x, params[kind], y) for kind, part in self._parts.items()}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        return DenseFeatures(concat_basis([p(x, params[kind]).dense() for kind, p in self._parts.items()]))


# ------------------------------------------------------------------------------------------------ shared helpers


def deviation(rows: Tensor) -> Tensor:
    """Return the standard deviation of each column, `(m,)`; zero for deviations within the rounding of equal values."""
    measured = rows.var(0, correction=0).sqrt()
    return torch.where(measured > 1e-12 * rows.abs().amax(0), measured, 0.0)


def _median(rows: Tensor) -> Tensor:
    """Return the median of sorted columns; for an even number of rows the mean of the middle two."""
    size = len(rows)
    return (rows[(size - 1) // 2] + rows[size // 2]) / 2


def _inverse_digamma(target: Tensor) -> Tensor:
    """Return k with ψ(k) = target, by Newton's method."""
    euler = 0.5772156649015329
    k = torch.where(target > -2.22, target.exp() + 0.5, -1 / (target.clamp_max(-2) + euler))
    for _ in range(ITERATIONS_NEWTON):
        k = k - (torch.special.digamma(k) - target) / torch.special.polygamma(1, k)
    return k
