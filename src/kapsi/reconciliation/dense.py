"""Reconciliations that are one n × D matrix: full, masked, or constant."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from kapsi.errors import SpecError
from kapsi.function import Param, Params, Tensors, option
from kapsi.reconciliation.base import Reconciliation
from kapsi.weights import ConstantWeights, DenseWeights, Weights

__all__ = ["ConstantReconciliation", "Dense", "Masked"]


@dataclass(frozen=True)
class Dense(Reconciliation, name="dense", aliases=("identity",)):
    """Every entry is a parameter: ψ(w) = W, l = n·D. The paper's identity reconciliation.

    Source: arXiv 2407.04819, "Identity Parameter Reconciliation".

    Example:
        >>> Dense().count(out_features=4, factors=(3, 5))
        60
    """

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:  # noqa: D102
        columns = factors[0] * factors[1]
        return {"matrix": Param((out_features, columns), columns**-0.5)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:  # noqa: D102
        return DenseWeights(params["matrix"])


def _random_mask(shape: tuple[int, ...], generator: Generator | None, *, kept: int) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
    mask.view(-1)[torch.randperm(mask.numel(), generator=generator, device="cpu")[:kept]] = True
    return mask


@dataclass(frozen=True)
class Masked(Reconciliation, name="masked", aliases=("masking",)):
    """A random share of the entries are parameters, the rest zero: ψ(w) = M ⊙ W, l = round(ratio·n·D).

    Only the kept entries have parameters; the mask is a buffer that is saved with the model. A mask of one's own is set with
    `head.assign("reconciliation", mask=…)`; it must keep exactly l entries, which `values` fill row by row.

    Args:
        ratio: share of the entries that is kept, 0 to 1.

    Source: arXiv 2407.04819, "Masking based Parameter Reconciliation".

    Example:
        >>> Masked(0.25).count(out_features=4, factors=(1, 10))
        10
    """

    examples = ({}, {"ratio": 0.3}, {"ratio": 1.0})

    ratio: float = option(0.5, minimum=0.0, maximum=1.0)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:  # noqa: D102
        columns = factors[0] * factors[1]
        kept = round(self.ratio * out_features * columns)
        mask = functools.partial(_random_mask, kept=kept)
        return {
            "values": Param((kept,), (out_features / max(kept, 1)) ** 0.5),
            "mask": Param((out_features, columns), mask, trainable=False, dtype=torch.bool),
        }

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:  # noqa: D102
        mask, values = params["mask"], params["values"]
        return DenseWeights(torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values))

    def validate(self, tensors: Tensors) -> None:  # noqa: D102
        mask, kept = tensors["mask"], tensors["values"].shape[-1]
        found = mask.flatten(-2).sum(-1)
        if bool((found != kept).any()):
            raise SpecError(
                f"Masked(ratio={self.ratio}): the mask must keep exactly {kept:,} entries, got {found.flatten().tolist()}"
            )


@dataclass(frozen=True)
class ConstantReconciliation(Reconciliation, name="constant"):
    """Every entry is the same constant: ψ(w) = c·1, l = 0.

    Args:
        value: c, any finite number; a buffer that is saved with the model.

    Source: arXiv 2407.04819, "Constant Parameter Reconciliation".

    Example:
        >>> ConstantReconciliation(2.0).count(out_features=4, factors=(1, 10))
        0
    """

    examples = ({}, {"value": -0.5})

    value: float = 1.0

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:  # noqa: D102
        return {"value": Param((), (self.value,), trainable=False)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:  # noqa: D102
        return ConstantWeights(params["value"], out_features, factors[0] * factors[1])
