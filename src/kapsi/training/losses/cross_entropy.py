"""The cross entropy of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from kapsi.function import option
from kapsi.training.losses.base import Loss

__all__ = ["CrossEntropy"]


@dataclass(frozen=True)
class CrossEntropy(Loss, name="cross_entropy"):
    """Cross entropy: −log p(class), p = softmax of the outputs.

    With smoothing s the target distribution has (1 − s) on the class and s/n on every class.

    Args:
        label_smoothing: s, from 0 to below 1.

    Example:
        >>> import torch
        >>> CrossEntropy().rows(torch.zeros(1, 4), torch.tensor([2]))  # log 4
        tensor([1.3863])
    """

    label_smoothing: float = option(0.0, minimum=0.0, maximum=0.999)
    classes: ClassVar[bool] = True
    shift_invariant: ClassVar[bool] = True
    unbounded: ClassVar[bool] = True

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.long(), reduction="none", label_smoothing=self.label_smoothing)

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.long(), label_smoothing=self.label_smoothing)

    def log_probabilities(self, output: Tensor) -> Tensor:
        return output.log_softmax(1)

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        p = output.softmax(1)
        root = p.sqrt()
        # diag(p) − ppᵀ = (diag(√p) − √p pᵀ)ᵀ(diag(√p) − √p pᵀ)
        return self._gradient(p, target), root.diag_embed() - root[:, :, None] * p[:, None, :]

    def diagonal_curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        p = output.softmax(1)
        return self._gradient(p, target), p - p.square()

    def _gradient(self, p: Tensor, target: Tensor) -> Tensor:
        """Return p minus the target distribution."""
        s, index = self.label_smoothing, target.long()[:, None]
        return (p - s / p.shape[1] if s else p).scatter_add(1, index, p.new_full((1, 1), s - 1).expand_as(index))
