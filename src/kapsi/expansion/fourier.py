"""Fourier series."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kapsi.expansion.base import ElementWise
from kapsi.expansion.numerics import concat_basis, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Tensors, option

__all__ = ["Fourier"]


@dataclass(frozen=True)
class Fourier(ElementWise, name="fourier", aliases=("fourier_series",)):
    """Cosines and sines of a period: κ(x) = [cos(2πx/P), sin(2πx/P), …, cos(2πNx/P), sin(2πNx/P)], D = 2·m·N.

    The period is prior knowledge about the inputs, such as 24 for an hour of the day, and stays fixed in calibration: a
    period equal to the range of the data would force equal values at both ends. For aperiodic inputs choose it larger than
    the range; the default is the period of cos x and suits standardized inputs. In float32 all columns are accurate to a
    few rounding steps for N·`|x|`/P below 65,536.

    Args:
        period: P, 10⁻⁶ to 10¹⁵, in units of the inputs.
        harmonics: N, 1 to 1,000.

    Source: arXiv 2407.04819, "Fourier Series based Data Expansions"; reduction to one period after Cody and Waite, Software
        Manual for the Elementary Functions (1980).

    Example:
        >>> import torch
        >>> Fourier(period=24.0, harmonics=2)(torch.tensor([2.0]), {}).dense()
        tensor([0.8660, 0.5000, 0.5000, 0.8660])
    """

    examples = ({}, {"period": 0.75, "harmonics": 1}, {"period": 10.0, "harmonics": 12})

    period: float = option(2 * math.pi, minimum=1e-6, maximum=1e15)
    harmonics: int = option(3, minimum=1, maximum=1000)

    def factors(self, in_features: int) -> tuple[int, int]:
        return 2 * self.harmonics, in_features

    def function_names(self, count: int) -> list[str]:
        return [f"{wave}{k}" for k in range(1, self.harmonics + 1) for wave in ("cos", "sin")]

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        values = working_precision(x)
        waves = []
        for k in range(1, self.harmonics + 1):
            period = self.period / k
            angle = _within_half_a_period(values, period) * (2 * math.pi / period)
            waves += [torch.cos(angle), torch.sin(angle)]
        return DenseFeatures(concat_basis(waves).to(x.dtype))


def _within_half_a_period(x: Tensor, period: float) -> Tensor:
    """Return x less the nearest multiple of the period, accurate to a rounding step up to 2¹⁶ periods.

    The quotient x / P has few digits behind the point left: three at 1,000 periods in float32. So the multiple is
    subtracted from x itself, in pieces of the period with exact multiples.
    """
    multiple = (x / period).detach().round()
    for piece in _pieces(period):
        x = x - multiple * piece
    return x


def _pieces(value: float) -> list[float]:
    """Return a number as a sum of three numbers of 8 binary digits and a rest."""
    pieces = []
    for _ in range(3):
        mantissa, exponent = math.frexp(value)
        pieces.append(math.ldexp(math.floor(mantissa * 256), exponent - 8))
        value -= pieces[-1]
    return [piece for piece in (*pieces, value) if piece]
