"""Combinations of inputs: themselves side by side, and their joint log-density."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion, columns_of_basis, working_precision
from kapsi.expansion.density import LARGEST_INPUT, SMOOTHING, deviation
from kapsi.features import LARGEST_FORMED, DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = ["Combinatorial", "CombinatorialNormal"]


@dataclass(frozen=True)
class Combinations(Expansion):
    """Columns for every combination of 1 to `order` inputs, or for chosen ones.

    Combinations come by size, those of a size in lexicographic order; chosen ones as they are given. Columns are counted
    before anything is made.
    """

    order: int = option(2, minimum=1, maximum=4)
    subsets: tuple[tuple[int, ...], ...] | None = None

    def check(self) -> None:
        if self.subsets is None:
            return
        where = f"{type(self).__name__}(subsets=…)"
        if not self.subsets:
            raise SpecError(f"{where}: at least one combination is needed; None stands for all of up to {self.order}")
        for subset in self.subsets:
            if not subset or min(subset) < 0 or len(set(subset)) < len(subset):
                raise SpecError(f"{where}: expected numbers of inputs, from 0 on and each once, got {subset}")

    def factors(self, in_features: int) -> tuple[int, int]:
        name = type(self).__name__
        if self.subsets is None:
            columns = sum(self._columns(i) * math.comb(in_features, i) for i in range(1, self.order + 1))
            if columns > LARGEST_FORMED:
                raise SpecError(
                    f"{name}(order={self.order}): {in_features:,} inputs make {columns:,} columns, at most "
                    f"{LARGEST_FORMED:,} are formed; choose a lower order, or name combinations in subsets"
                )
            return 1, columns
        for subset in self.subsets:
            if max(subset) >= in_features:
                raise SpecError(
                    f"{name}(subsets=…): {subset} names input {max(subset)}; there are {in_features:,} inputs, "
                    f"numbered from 0 to {in_features - 1}"
                )
        columns = sum(self._columns(len(subset)) for subset in self.subsets)
        if columns > LARGEST_FORMED:
            raise SpecError(f"{name}(subsets=…): {columns:,} columns, at most {LARGEST_FORMED:,} are formed")
        return 1, columns

    @abstractmethod
    def _columns(self, size: int) -> int:
        """Return how many columns a combination of so many inputs has."""


@dataclass(frozen=True)
class Combinatorial(Combinations, name="combinatorial"):
    """The inputs of every combination side by side: κ(x) = [(x choose 1), …, (x choose d)], d = order, D = Σ i·C(m, i).

    Combinations come by size, those of a size in lexicographic order, the inputs of each in ascending order:
    x₁, x₂, x₃, x₁x₂, x₁x₃, x₂x₃ for three inputs and order 2, where x₁x₂ are two columns.

    Args:
        order: d, the largest combination, 1 to 4; above m there are no more.
        subsets: combinations instead of all, as tuples of the numbers of inputs, from 0 on, of any sizes and in any order;
            D is then the sum of their sizes, and the order is not used.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an input that is not there.

    Source: arXiv 2407.04819, "Combinatorial Data Expansion".

    Example:
        >>> import torch
        >>> Combinatorial()(torch.tensor([1.0, 2.0, 3.0]), {}).dense()
        tensor([1., 2., 3., 1., 2., 1., 3., 2., 3.])
        >>> Combinatorial(subsets=((2, 0), (1,)))(torch.tensor([1.0, 2.0, 3.0]), {}).dense()
        tensor([3., 1., 2.])
    """

    examples = ({}, {"order": 3}, {"subsets": ((0,),)})

    def _columns(self, size: int) -> int:
        return size

    def __call__(self, x: Tensor, params: Tensors) -> Features:  # noqa: D102
        self.factors(x.shape[-1])  # before the numbers are made
        if self.subsets is None:
            index = torch.cat([c.T.flatten() for c in _combinations(x.shape[-1], self.order, x.device)])
        else:
            index = torch.tensor([number for subset in self.subsets for number in subset], device=x.device)
        return DenseFeatures(x.index_select(-1, index))


@dataclass(frozen=True)
class CombinatorialNormal(Combinations, name="combinatorial_normal"):
    """Joint normal log-density of every combination: κ(x) = [log N(x_S | μ_S, Σ_S) for all S], D = Σ C(m, i).

    All combinations of 1 to d = order inputs, by size and lexicographic. Mean and covariance of a combination are the parts
    of one mean μ and one covariance Σ = LLᵀ of all inputs, a buffer unless they are learnable. Sums and differences of
    columns are joint and conditional log-probabilities. `kapsi.calibrate` sets μ and Σ by maximum likelihood; 10⁻⁹ of its
    variance is added to that of each input, so that collinear inputs work, and a constant input gets variance 1.

    Before calibration all is standard normal, as in the paper. There is one mean, so values at the same distance on its two
    sides are alike for the single inputs (−2 and 2 before calibration): give the head a `LinearRemainder`, or put it beside
    `NaiveNormal` in `Extended`, where the side counts.

    Args:
        order: d, the largest combination, 1 to 4; above m there are no more.
        subsets: combinations instead of all, as tuples of the numbers of inputs, from 0 on, of any sizes and in any order;
            D is then their number, and the order is not used.
        learnable: the parameters `mean` (μ) and `factor` (L: its strictly lower part, and the logarithms of its diagonal;
            what is above is not used) are trained.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an input that is not there.

    Source: arXiv 2407.04819, "Combinatorial Probabilistic Data Expansion".

    Example:
        >>> import torch
        >>> kappa = CombinatorialNormal()
        >>> kappa(torch.tensor([1.0, 0.0]), {"mean": torch.zeros(2), "factor": torch.zeros(2, 2)}).dense()
        tensor([-1.4189, -0.9189, -2.3379])
    """

    examples = ({}, {"order": 3, "learnable": True}, {"subsets": ((0,),)})

    learnable: bool = False

    def _columns(self, size: int) -> int:
        return 1

    def params(self, in_features: int) -> Params:  # noqa: D102
        return {
            "mean": Param((in_features,), "zeros", trainable=self.learnable),
            "factor": Param((in_features, in_features), "zeros", trainable=self.learnable),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return mean and covariance of the rows."""
        rows = x.double().clamp(-LARGEST_INPUT, LARGEST_INPUT)
        mean, scale = rows.mean(0), deviation(rows)
        constant = scale == 0
        scale = torch.where(constant, 1.0, scale)
        units = torch.where(constant, 0.0, (rows - mean) / scale)
        correlation = units.T @ units / len(rows) + torch.where(constant, 1.0, SMOOTHING).diag()
        lower = scale.unsqueeze(-1) * torch.linalg.cholesky(correlation)
        return {"mean": mean, "factor": lower.tril(-1) + lower.diagonal().log().diag()}

    def __call__(self, x: Tensor, params: Tensors) -> Features:  # noqa: D102
        self.factors(x.shape[-1])  # before the numbers are made
        centered = working_precision(x) - working_precision(params["mean"])
        # In float64: a conditional variance is a small difference. It costs nothing a row.
        factor = params["factor"].double()
        scale = factor.diagonal().exp()
        lower = factor.tril(-1) + scale.diag()
        covariance, least = lower @ lower.T, scale.square()
        if self.subsets is None:
            combinations: Iterable[Tensor] = _combinations(x.shape[-1], self.order, x.device)
            columns = columns_of_basis([_log_density(centered, c, covariance, least) for c in combinations])
            return DenseFeatures(columns.to(x.dtype))
        sizes = sorted({len(subset) for subset in self.subsets})
        order = [[i for i, subset in enumerate(self.subsets) if len(subset) == size] for size in sizes]
        combinations = (torch.tensor([sorted(self.subsets[i]) for i in places], device=x.device).T for places in order)
        columns = columns_of_basis([_log_density(centered, c, covariance, least) for c in combinations])
        places = [i for group in order for i in group]
        back = sorted(range(len(places)), key=places.__getitem__)
        return DenseFeatures(columns.index_select(-1, torch.tensor(back, device=x.device)).to(x.dtype))


def _combinations(m: int, order: int, device: torch.device) -> list[Tensor]:
    """Return all combinations of 1, 2, … order of m inputs, `(size, C(m, size))`, the columns in lexicographic order.

    Those of a size are those of one less, each followed by every later input.
    """
    last = torch.arange(m, device=device)
    made = [last.unsqueeze(0)]
    for size in range(2, min(order, m) + 1):
        total = math.comb(m, size)
        later = m - 1 - last
        parent = torch.repeat_interleave(later, output_size=total)
        begin = later.cumsum(0) - later
        last = last[parent] + 1 + torch.arange(total, device=device) - begin[parent]
        made.append(torch.cat((made[-1][:, parent], last.unsqueeze(0))))
    return made


def _log_density(centered: Tensor, index: Tensor, covariance: Tensor, least: Tensor) -> Tensor:
    """Return the joint normal log-density of combinations of inputs, `(..., combinations)`.

    Inputs are eliminated one after another: what is left of the others is their residual given those before.

    Args:
        centered: x − μ, `(..., m)`.
        index: the inputs of each combination, in ascending order, `(size, combinations)`.
        covariance: Σ, `(m, m)`.
        least: the variance of each input given all inputs before it, `(m,)`: given some of them it is not smaller.
    """
    size = len(index)
    residual = centered.index_select(-1, index.flatten()).unflatten(-1, index.shape)
    joint = covariance[index.unsqueeze(1), index.unsqueeze(0)]
    total = torch.zeros_like(residual[..., 0, :])
    for k in range(size):
        variance = torch.maximum(joint[0, 0], least[index[k]])
        first = residual[..., 0, :]
        total = total + (first * variance.rsqrt().to(first.dtype)).square() + variance.log().to(first.dtype)
        if k + 1 < size:
            slopes = joint[1:, 0] / variance
            residual = residual[..., 1:, :] - first.unsqueeze(-2) * slopes.to(first.dtype)
            joint = joint[1:, 1:] - slopes.unsqueeze(1) * joint[:1, 1:]
    return -0.5 * (total + size * math.log(2 * math.pi))
