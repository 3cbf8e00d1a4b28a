"""A reconciliation with a structure of its own: weights as an outer product, never formed."""

from dataclasses import dataclass

import torch

from kapsi import Param, Reconciliation
from kapsi.weights import ActingWeights


@dataclass(frozen=True)
class OuterWeights(ActingWeights):
    """ψ(w) = a bᵀ, a `(n,)` and b `(D,)`, or with a channel axis."""

    left: torch.Tensor
    right: torch.Tensor

    can_stack = True

    @property
    def channels(self):
        return None if self.left.dim() == 1 else len(self.left)

    @property
    def columns(self):
        return self.right.shape[-1]

    def matrix(self):
        return self.left.unsqueeze(-1) * self.right.unsqueeze(-2)

    def row_sums(self):
        return self.left * self.right.sum(-1, keepdim=True)

    def act(self, features):  # ⟨κ(x), a bᵀ⟩ = ⟨κ(x), b⟩ a, without ψ
        return features.matmul(self.right.unsqueeze(-2)) * self.left

    def describe(self, features):
        return "⟨κ, b⟩ a, ψ not formed"


@dataclass(frozen=True)
class Outer(Reconciliation, name="outer"):
    """The outer product of two vectors: ψ(w) = a bᵀ, l = n + D."""

    multilinear = True  # linear in a for fixed b, and in b for fixed a: ridge alternates between them

    def params(self, out_features, factors):
        columns = factors[0] * factors[1]
        return {"left": Param((out_features,)), "right": Param((columns,), columns**-0.5)}

    def __call__(self, params, out_features, factors):
        return OuterWeights(params["left"], params["right"])
