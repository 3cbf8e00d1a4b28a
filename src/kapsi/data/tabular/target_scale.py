"""Transform and standardize regression targets, and outputs of models back to the unit of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.encoders import (
    center_and_scale,
    centers_and_scales,
    fields,
    numbers,
    positive,
    standardized,
)
from kapsi.data.tabular.types import Floats, reject, short

__all__ = ["TargetScale", "Transform"]

MAX_FLOAT64 = float(np.finfo(np.float64).max)
WHERE = "target scale"
POWERS = 20  # steps per unit in the search of a power

Transform = Literal["none", "log", "yeo_johnson", "log_link"]


@dataclass(frozen=True)
class TargetScale:
    """Transformation and standardization of a regression target.

    | transform | targets of the fit | predictions from outputs f |
    |---|---|---|
    | `none` | (y − c)/s | c + s f |
    | `log` | (log y − c)/s | a exp(c + s f) |
    | `yeo_johnson` | (T(y/u) − c)/s | u T⁻¹(c + s f) |
    | `log_link` | y/s | s exp(f) |

    Args:
        center: c, the mean of the fitted values; one for each of several targets, without a transform.
        scale: s, the population standard deviation of the fitted values, 1 if they are constant; for `log_link` their mean.
        transform: the transformation.
        power: exponent of Yeo and Johnson, 0 to 2; without effect otherwise.
        factor: a, a correction of the mean, and u, the unit.

    Source: Yeo and Johnson, A new family of power transformations, Biometrika 87 (2000); Duan, Smearing estimate, Journal of
    the American Statistical Association 78 (1983), for the factor of `log`.

    Example:
        >>> import numpy as np
        >>> TargetScale.fit(np.array([1.0, 3.0])).apply(np.array([5.0])).tolist()
        [3.0]
    """

    center: float | tuple[float, ...]
    scale: float | tuple[float, ...]
    transform: Transform = "none"
    power: float = 1.0
    factor: float = 1.0

    @classmethod
    def fit(cls, y: Floats, weight: Floats | None = None, transform: Transform = "none") -> TargetScale:
        """Fit mean and population standard deviation of y, (rows,) or (rows, targets), finite; of weighted rows, (rows,).

        Args:
            y: the targets; positive for `log`, of at least 0 and not all 0 for `log_link`.
            weight: weights of the rows.
            transform: the transformation, of a single target.
        """
        if y.ndim == 2:
            centers, scales = centers_and_scales(np.ascontiguousarray(y.T), weight)
            return cls(tuple(centers.tolist()), tuple(scales.tolist()))
        y = np.asarray(y, dtype=np.float64)
        if transform == "log_link":
            exponent = np.frexp(y.max())[1]  # powers of two scale exactly; sums of huge values overflow
            mean = np.average(np.ldexp(y, -exponent), weights=weight)
            return cls(0.0, float(np.ldexp(mean, exponent)), transform)
        if transform == "yeo_johnson":
            unit = center_and_scale(y, weight)[1]
            power = _likely_power(y / unit)
            return cls(*center_and_scale(_yeo_johnson(y / unit, power), weight), transform, power, unit)
        return cls(*center_and_scale(np.log(y) if transform == "log" else y, weight), transform)

    def apply(self, y: npt.ArrayLike) -> Floats:
        """Return targets of a fit, float64 of the same shape; NaN stays."""
        values = np.asarray(y, dtype=np.float64)
        if self.transform == "log":
            values = np.log(values)
        elif self.transform == "yeo_johnson":
            values = _yeo_johnson(values / self.factor, self.power)
        scaled = standardized(values, np.asarray(self.center), np.asarray(self.scale))
        return np.clip(scaled, -MAX_FLOAT64, MAX_FLOAT64)

    def invert(self, y: npt.ArrayLike) -> Floats:
        """Return outputs of a model in the unit of the target, float64 of the same shape; NaN stays, no value overflows."""
        with np.errstate(over="ignore"):
            values = np.asarray(y, dtype=np.float64)
            if self.transform == "log_link":
                values = np.exp(values) * self.scale
            else:
                values = values * np.asarray(self.scale) + np.asarray(self.center)
            if self.transform == "log":
                values = np.exp(values) * self.factor
            elif self.transform == "yeo_johnson":
                values = _yeo_johnson_inverse(values, self.power) * self.factor
        return np.clip(values, -MAX_FLOAT64, MAX_FLOAT64)

    def values(self, outputs: npt.ArrayLike) -> Floats:
        """Return outputs of a model as values of the targets of the fit, those of `apply`."""
        with np.errstate(over="ignore"):
            values = np.asarray(outputs, dtype=np.float64)
            return np.minimum(np.exp(values), MAX_FLOAT64) if self.transform == "log_link" else values

    def restore(self, values: npt.ArrayLike) -> Floats:
        """Return values of the targets of the fit in the unit of the target, the inverse of `apply`: bounds, and no means."""
        if self.transform == "log_link":
            return np.clip(np.asarray(values, dtype=np.float64) * self.scale, -MAX_FLOAT64, MAX_FLOAT64)
        restored = self.invert(values)
        return restored / self.factor if self.transform == "log" else restored

    def predicted(self, predictions: npt.ArrayLike) -> Floats:
        """Return predictions in the unit of the target as values of the targets of the fit."""
        factor = self.factor if self.transform == "log" else 1.0
        return self.apply(np.asarray(predictions, dtype=np.float64) / factor)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types for `from_dict`."""
        data: dict[str, Any] = {"center": self.center, "scale": self.scale}
        if self.transform != "none":
            data |= {"transform": self.transform, "power": self.power, "factor": self.factor}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}

    @classmethod
    def from_dict(cls, data: object) -> TargetScale:
        """Read the plain data of `to_dict`.

        Raises:
            TableError: the data is damaged.
        """
        if isinstance(data, Mapping) and isinstance(data.get("center"), list):
            several = fields(data, WHERE, {"center": list, "scale": list})
            count = len(several["center"])
            centers, scales = (numbers(several[name], count, WHERE) for name in ("center", "scale"))
            return cls(centers, tuple(positive(scale, WHERE) for scale in scales))
        if not isinstance(data, Mapping) or "transform" not in data:
            values = fields(data, WHERE, {"center": float, "scale": float})
            return cls(values["center"], positive(values["scale"], WHERE))
        kinds = {"center": float, "scale": float, "transform": str, "power": float, "factor": float}
        values = fields(data, WHERE, kinds)
        if values["transform"] not in get_args(Transform)[1:] or not 0 <= values["power"] <= 2:
            reject(WHERE, f"transform {short(values['transform'])} with the power {values['power']} is not known")
        scale, factor = positive(values["scale"], WHERE), positive(values["factor"], WHERE)
        return cls(values["center"], scale, values["transform"], values["power"], factor)


def _yeo_johnson(y: Floats, power: float) -> Floats:
    """Return T(y): ((y + 1)^p − 1)/p for y ≥ 0, −((1 − y)^(2 − p) − 1)/(2 − p) below, logarithms in the limits."""
    high, low = np.log1p(np.maximum(y, 0)), np.log1p(np.maximum(-y, 0))
    above = high if power == 0 else np.expm1(power * high) / power
    below = low if power == 2 else np.expm1((2 - power) * low) / (2 - power)
    return np.where(np.isnan(y), np.nan, np.where(y >= 0, above, -below))


def _yeo_johnson_inverse(t: Floats, power: float) -> Floats:
    """Return T⁻¹(t), defined everywhere for powers of 0 to 2."""
    high, low = np.maximum(t, 0), np.maximum(-t, 0)
    above = high if power == 0 else np.log1p(power * high) / power
    below = low if power == 2 else np.log1p((2 - power) * low) / (2 - power)
    return np.where(np.isnan(t), np.nan, np.where(t >= 0, np.expm1(above), -np.expm1(below)))


def _likely_power(y: Floats) -> float:
    """Return the power of 0 to 2 with the largest likelihood of a normal distribution, in steps."""
    logarithms = float((np.sign(y) * np.log1p(np.abs(y))).sum())

    def cost(power: float) -> float:
        spread = float(_yeo_johnson(y, power).var())
        return 0.5 * len(y) * float(np.log(max(spread, 1e-300))) - (power - 1) * logarithms

    return min((i / POWERS for i in range(2 * POWERS + 1)), key=cost)
