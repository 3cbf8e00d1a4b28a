"""Factor potentials of Markov networks: indicators of the joint states of cliques, and products of their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kapsi.expansion.base import Interval
from kapsi.expansion.combinatorial import Combinations, StateCombinations, all_combinations
from kapsi.features import DenseFeatures, Features
from kapsi.function import Tensors

__all__ = ["CombinatorialProduct", "CombinatorialState"]

TAME = 4
"""Inputs of a product up to which a few rows do not outweigh all others."""


@dataclass(frozen=True)
class CombinatorialState(StateCombinations, name="combinatorial_state"):
    """Indicators of the joint states of every combination: κ(x) = [1[x_S = s] for all S and s], D = Σ_S Π_{i ∈ S} kᵢ.

    Inputs are numbers of states, 0 to k − 1. ⟨κ(x), ψ⟩ with a dense ψ is then Σ_S log φ_S(x_S), the logarithm of a product of
    factors that are tables: those of a combination are side by side, its last input runs fastest. An entry of ψ must be finite,
    since zero times −∞ is no number: a factor of zero is a number such as −10,000. There is no gradient with respect to x.

    One function makes combinations and indicators: after `Combinatorial` in `Nested` the inputs are side by side, and where a
    combination begins, and how many states each of its inputs has, would have to be said again.

    Args:
        order: the largest combination, 1 to 4; above m there are no more.
        subsets: combinations instead of all, as tuples of the numbers of inputs, from 0 on, of any sizes and in any order; () is
            a column of ones. The order is then not used.
        states: k, the number of states of each input, 1 to 100,000, or one for all.
        outside: what an input is that is not the number of a state: the `nearest` one; or an `error`, a ValueError where values
            can be looked at, and no number in a compiled or exported model.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an input that is not there.

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

    def _columns(self, size: int) -> int:
        return 1  # at least; the entries of the tables are counted by themselves

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        _, columns = self.factors(x.shape[-1])
        places = self._places(x, self._layout(x.shape[-1], x.device))
        none = torch.where(self._spoiled(x), math.nan, torch.zeros_like(x[..., :1]))
        made = none.expand(*x.shape[:-1], columns)
        return DenseFeatures(made.scatter(-1, places, (none + 1).expand(places.shape)))


@dataclass(frozen=True)
class CombinatorialProduct(Combinations, name="combinatorial_product"):
    """The product of the inputs of every combination: κ(x) = [Π_{i ∈ S} xᵢ for all S], D = Σ C(m, i).

    ⟨κ(x), ψ⟩ is the logarithm of a product of exponential potentials φ_S(x_S) = exp(ψ_S Π_{i ∈ S} xᵢ). With inputs −1 and 1 that
    is an Ising model; with single inputs, their squares and the products of two, (0,), (0, 0), (0, 1), a Gaussian one.

    Args:
        order: d, the largest combination, 1 to 4, of different inputs; above m there are no more.
        subsets: combinations instead of all, as tuples of the numbers of inputs, from 0 on, of any sizes, an input as often as its
            power; () is a column of ones. D is then their number, and the order is not used.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an input that is not there.

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

    def _columns(self, size: int) -> int:
        return 1

    def _largest(self) -> int:
        return self.order if self.subsets is None else max(map(len, self.subsets))

    def heavy_tailed(self) -> bool:
        return self._largest() > TAME

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        end = 1.0 if self.heavy_tailed() else math.inf
        return ((self.out_features(in_features), -end, end),)

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        m = x.shape[-1]
        self.factors(m)  # before the numbers are made
        if self.subsets is None:
            made = all_combinations(m, self.order, x.device)
            return DenseFeatures(torch.cat([_product(x, index) for index in made], -1))
        largest = self._largest()
        rows = [[*subset, *[m] * (largest - len(subset))] for subset in self.subsets]
        index = torch.tensor(rows, dtype=torch.int64, device=x.device).reshape(len(rows), largest).T
        # One where there is no input; it is no number where an input is none, also one of no combination.
        spoiled = x.detach().isnan().any(-1, keepdim=True)
        one = torch.where(spoiled, math.nan, torch.ones_like(x[..., :1]))
        return DenseFeatures(_product(torch.cat((x, one), -1), index) * one)


def _product(x: Tensor, index: Tensor) -> Tensor:
    """Return the products of inputs, `(..., D)`, for their numbers `(size, D)`."""
    made: Tensor | None = None
    for numbers in index:
        chosen = x.index_select(-1, numbers)
        made = chosen if made is None else made * chosen
    return x.new_ones(*x.shape[:-1], index.shape[1]) if made is None else made
