"""Orthogonal polynomials of each input by three-term recurrence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kapsi.expansion.base import Expansion, Interval, columns_of_basis, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Tensors, option

__all__ = ["Chebyshev"]

LARGEST_VALUE = 1e30
"""Where a polynomial would pass this, it goes on linearly: float32 ends at 3.4e38, and slopes are larger than values."""


@dataclass(frozen=True)
class Chebyshev(Expansion, name="chebyshev"):
    """Chebyshev polynomials of the first kind: κ(x) = [T₁(x), …, T_d(x)], T_k = 2x T_{k−1} − T_{k−2}, D = m·d.

    Orthogonal and bounded by one on [−1, 1]; beyond, the polynomials grow as their formula says. Beyond
    `|x|` = cosh(arcosh(10³⁰)/d), where T_d passes 10³⁰ (16 for degree 20), all of them go on linearly. That point
    lies above 1,000 for degrees up to 9, which are never changed.

    In a hidden layer give them inputs that stay in the range: `before="tanh"`, or `output="layer_norm"` of the layer before.

    Args:
        degree: d, the highest degree, 1 to 1,000.

    Source: arXiv 2407.04819, "Chebyshev Polynomials based Data Expansion"; DLMF 18.9.

    Example:
        >>> import torch
        >>> Chebyshev(3)(torch.tensor([0.5]), {}).dense()
        tensor([ 0.5000, -0.5000, -1.0000])
    """

    examples = ({}, {"degree": 1}, {"degree": 12})

    degree: int = option(3, minimum=1, maximum=1000)

    def factors(self, in_features: int) -> tuple[int, int]:  # noqa: D102
        return self.degree, in_features

    def heavy_tailed(self) -> bool:
        """Return whether the degree is above four: T₅ is a thousand times as large at three as on the domain."""
        return self.degree > 4

    def domain(self, in_features: int) -> tuple[Interval, ...]:  # noqa: D102
        return ((self.out_features(in_features), -1.0, 1.0),)

    def __call__(self, x: Tensor, params: Tensors) -> Features:  # noqa: D102
        values = working_precision(x)
        turn = math.cosh(math.acosh(LARGEST_VALUE) / self.degree)
        if turn > 1000:
            return DenseFeatures(columns_of_basis(self._recurrence(values)).to(x.dtype))
        near = values.clamp(-turn, turn)
        basis, slopes = self._recurrence(near), self._slopes(near)
        beyond = values - near
        continued = [b + s * beyond for b, s in zip(basis, slopes, strict=True)]
        return DenseFeatures(columns_of_basis(continued).to(x.dtype))

    def _recurrence(self, x: Tensor) -> list[Tensor]:
        basis = [x]
        before: Tensor | float = 1.0
        for _ in range(self.degree - 1):
            basis.append(2 * x * basis[-1] - before)
            before = basis[-2]
        return basis

    def _slopes(self, x: Tensor) -> list[Tensor]:
        """Return T′_k(x) = k U_{k−1}(x), U the polynomials of the second kind."""
        second = [x * 0 + 1, 2 * x]
        for _ in range(self.degree - 2):
            second.append(2 * x * second[-1] - second[-2])
        return [k * second[k - 1] for k in range(1, self.degree + 1)]
