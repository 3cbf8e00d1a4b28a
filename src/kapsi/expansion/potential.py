"""Factor potentials of Markov networks: indicators of the joint states of cliques, and products of their inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kapsi.expansion.base import Interval, product_name
from kapsi.expansion.combinatorial import Combinations, StateCombinations, all_combinations
from kapsi.features import DenseFeatures, Features
from kapsi.function import Tensors

__all__ = ["CombinatorialProduct", "CombinatorialState"]

MAX_LIGHT_TAILED = 4
"""Largest size of a product without dominating rows."""


@dataclass(frozen=True)
class CombinatorialState(StateCombinations, name="combinatorial_state"):
    """Indicators of the joint states of every combination: κ(x) = [1[x_S = s] for all S and s], D = Σ_S Π_{i ∈ S} kᵢ.

    Inputs are state indices, 0 to k − 1. With a dense ψ, ⟨κ(x), ψ⟩ is Σ_S log φ_S(x_S), the logarithm of a product of
    factor tables: the columns of a combination are contiguous, with its last input running fastest. Entries of ψ must be
    finite, since zero times −∞ is NaN: represent a factor of zero by a number such as −10,000. The gradient with respect to
    x is zero.

    `Combinatorial` in `Nested` is not a substitute: its columns do not tell where a combination begins, or how many states an
    input has.

    Args:
        order: size of the largest combination, 1 to 4; combinations of more than m inputs do not exist.
        subsets: combinations to use instead of all, as tuples of input indices from 0, of any sizes and in any order; () is
            a column of ones. Overrides the order.
        states: k, number of states of each input, 1 to 100,000, or one number for all.
        outside: treatment of invalid state indices. `nearest`: the nearest valid state; `error`: a ValueError in eager
            mode, NaN in a compiled or exported model.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an unknown input.

    Source: arXiv 2407.04819, "Representing PMs with RPN"; Koller and Friedman, Probabilistic Graphical Models (2009), 4.4.

    Example:
        >>> import torch
        >>> kappa = CombinatorialState(subsets=((0, 1), (1,)), states=(2, 3))
        >>> kappa(torch.tensor([1.0, 2.0]), {}).dense()
        tensor([0., 0., 0., 0., 0., 1., 0., 0., 1.])
    """

    examples = (
        {},
        {"order": 3, "states": 3},
        {"subsets": ((0,), (), (0,)), "states": 4},
    )

    def factors(self, in_features: int) -> tuple[int, int]:
        super().factors(in_features)
        return 1, self._entries(in_features)

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        """Return the joint states, such as `a=0, b=1`; 1 for the empty combination."""
        count = dict(zip(names, self.sizes(len(names)), strict=True))
        states = [
            [(name, state) for name, state in zip(chosen, way, strict=True)]
            for chosen in self.chosen(names)
            for way in itertools.product(*(range(count[name]) for name in chosen))
        ]
        return [", ".join(f"{name}={state}" for name, state in pairs) or "1" for pairs in states]

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        _, columns = self.factors(x.shape[-1])
        cells = self._cells(x, self._layout(x.shape[-1], x.device))
        zero = torch.where(self._spoiled(x), math.nan, torch.zeros_like(x[..., :1]))
        result = zero.expand(*x.shape[:-1], columns)
        return DenseFeatures(result.scatter(-1, cells, (zero + 1).expand(cells.shape)))


@dataclass(frozen=True)
class CombinatorialProduct(Combinations, name="combinatorial_product"):
    """The product of the inputs of every combination: κ(x) = [Π_{i ∈ S} xᵢ for all S], D = Σ C(m, i).

    ⟨κ(x), ψ⟩ is the logarithm of a product of exponential potentials φ_S(x_S) = exp(ψ_S Π_{i ∈ S} xᵢ): an Ising model for
    inputs −1 and 1; a Gaussian model for single inputs, squares and products of two, (0,), (0, 0), (0, 1).

    Args:
        order: d, size of the largest combination of distinct inputs, 1 to 4; combinations of more than m inputs do not
            exist.
        subsets: combinations to use instead of all, as tuples of input indices from 0, of any sizes, with powers as
            repeated inputs; () is a column of ones. D is then their number. Overrides the order.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an unknown input.

    Source: arXiv 2407.04819, "Representing PMs with RPN"; Koller and Friedman, Probabilistic Graphical Models (2009), 4.4.

    Example:
        >>> import torch
        >>> CombinatorialProduct(2)(torch.tensor([1.0, 2.0, 3.0]), {}).dense()
        tensor([1., 2., 3., 2., 3., 6.])
        >>> CombinatorialProduct(subsets=((), (2, 2), (0, 1)))(torch.tensor([1.0, 2.0, 3.0]), {}).dense()
        tensor([1., 9., 2.])
    """

    examples = ({}, {"order": 3}, {"subsets": ((0,), (), (0, 0))})
    takes_empty = True
    takes_repeated = True

    def _largest(self) -> int:
        return self.order if self.subsets is None else max(map(len, self.subsets))

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        return [product_name(chosen) for chosen in self.chosen(names)]

    def heavy_tailed(self) -> bool:
        return self._largest() > MAX_LIGHT_TAILED

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        end = 1.0 if self.heavy_tailed() else math.inf
        return ((self.out_features(in_features), -end, end),)

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        m = x.shape[-1]
        self.factors(m)  # check the size first
        if self.subsets is None:
            combinations = all_combinations(m, self.order, x.device)
            return DenseFeatures(torch.cat([_product(x, index) for index in combinations], -1))
        largest = self._largest()
        rows = [[*subset, *[m] * (largest - len(subset))] for subset in self.subsets]
        index = torch.tensor(rows, dtype=torch.int64, device=x.device).reshape(len(rows), largest).T
        # Padding of ones, NaN in rows with a NaN, also for inputs outside of all combinations.
        nan_rows = x.detach().isnan().any(-1, keepdim=True)
        one = torch.where(nan_rows, math.nan, torch.ones_like(x[..., :1]))
        return DenseFeatures(_product(torch.cat((x, one), -1), index) * one)


def _product(x: Tensor, index: Tensor) -> Tensor:
    """Return products of inputs, `(..., D)`, for input indices `(size, D)`."""
    product: Tensor | None = None
    for numbers in index:
        chosen = x.index_select(-1, numbers)
        product = chosen if product is None else product * chosen
    return x.new_ones(*x.shape[:-1], index.shape[1]) if product is None else product
