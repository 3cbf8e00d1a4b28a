"""Fusion of the outputs of several heads: the sum, as in the paper, and alternatives."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.function import Function, Param, Params, Tensors


class Fusion(Function, role="fusion"):
    """A fusion of k heads, `(k, ..., n) → (..., n)`."""

    def params(self, heads: int, out_features: int) -> Params:
        """Return the declared tensors."""
        return {}

    def gain(self, heads: int) -> float:
        """Return the standard deviation of the fused output at initial values, for independent head outputs of
        standard deviation 1.
        """
        return 1.0

    @abstractmethod
    def __call__(self, outputs: Tensor, params: Tensors) -> Tensor:
        """Return the fused output `(..., n)` from the outputs of the heads `(k, ..., n)`."""


@dataclass(frozen=True)
class Sum(Fusion, name="sum", aliases=("summation",)):
    """The sum of the heads, Σ y_h.

    Source: arXiv 2407.04819, "Multi-Head and Multi-Channel Model Architecture".
    """

    def gain(self, heads: int) -> float:
        return heads**0.5

    def __call__(self, outputs: Tensor, params: Tensors) -> Tensor:
        return outputs.sum(0)


@dataclass(frozen=True)
class Mean(Fusion, name="mean", aliases=("average",)):
    """The mean of the heads, Σ y_h / k."""

    def gain(self, heads: int) -> float:
        return heads**-0.5

    def __call__(self, outputs: Tensor, params: Tensors) -> Tensor:
        return outputs.mean(0)


@dataclass(frozen=True)
class WeightedSum(Fusion, name="weighted_sum", aliases=("parameterized_weighted_summation",)):
    """A trainable weighted sum of the heads, Σ a_h y_h, with all a_h = 1 initially."""

    def params(self, heads: int, out_features: int) -> Params:
        return {"weights": Param((heads,), "ones")}

    def gain(self, heads: int) -> float:
        return heads**0.5

    def __call__(self, outputs: Tensor, params: Tensors) -> Tensor:
        return torch.einsum("k...n,k->...n", outputs, params["weights"])


@dataclass(frozen=True)
class Concatenation(Fusion, name="concatenation", aliases=("parameterized_concatenation",)):
    """A linear map of the concatenated heads, W [y₁, y₂, …], W `(n, k·n)`."""

    def params(self, heads: int, out_features: int) -> Params:
        return {"matrix": Param((out_features, heads * out_features), (heads * out_features) ** -0.5)}

    def __call__(self, outputs: Tensor, params: Tensors) -> Tensor:
        return F.linear(outputs.movedim(0, -2).flatten(-2), params["matrix"])
