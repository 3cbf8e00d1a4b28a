"""Losses that are a mean or a sum over the targets of a row, with weights and missing targets."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kapsi.errors import SpecError, refuse
from kapsi.training.losses.base import Loss, columns_of


@dataclass(frozen=True, kw_only=True)
class TargetwiseLoss(Loss):
    """Base of losses that are a mean or a sum over the targets of a row; a subclass must define `elements` and `slopes`.

    Args:
        output_weights: weight of each target column, divided by the mean of all; None for equal weights.
        ignore_missing: whether NaN targets are ignored; the loss is then the mean over the observed targets.
    """

    output_weights: tuple[float, ...] | None = None
    ignore_missing: bool = False
    summed: ClassVar[bool] = False
    """Whether values are summed over the targets, not averaged."""

    def check(self) -> None:
        weights = self.output_weights
        if weights is not None and not (weights and min(weights) >= 0 and max(weights) > 0):
            refuse(f"{type(self).__name__}(output_weights=…)", "a weight of at least 0 per target, not all 0", weights)

    @abstractmethod
    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the value of each target `(rows, k)`."""

    @abstractmethod
    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return `curvature` for equal weights and observed targets; S is diagonal."""

    @property
    def plain(self) -> bool:
        """Whether all targets have the same weight."""
        return self.output_weights is None and not self.ignore_missing

    @property
    def skips_missing(self) -> bool:
        return self.ignore_missing

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        target, weights = self.entries(columns_of(target), output)
        values = self.elements(output, target)
        values = values if weights is None else values * weights
        return values.sum(1) if self.summed else values.mean(1)

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        target, weights = self.entries(columns_of(target), output)
        gradient, root = self.slopes(output, target)
        if weights is None:
            return gradient, root
        weights = weights.repeat(1, self.outputs_per_target)
        return gradient * weights, root * weights.sqrt().unsqueeze(1)

    def observed(self, target: Tensor) -> Tensor | None:
        if not self.ignore_missing:
            return None
        known = (~columns_of(target).isnan()).double()
        weights = self._weights(known)
        return known.mean(1) if weights is None else (known * weights).mean(1)

    def entries(self, target: Tensor, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return targets without NaN, and the weight of each, `(rows, k)` or `(1, k)`; None for equal weights."""
        if self.plain:
            return target, None
        weights = self._weights(output)
        if not self.ignore_missing:
            return target, weights
        missing = target.isnan()
        known = (~missing).to(output.dtype)
        return target.masked_fill(missing, 0), known if weights is None else known * weights

    def _weights(self, like: Tensor) -> Tensor | None:
        """Return weights of the targets with mean one, `(1, k)`, in the type of a tensor."""
        if self.output_weights is None:
            return None
        mean = sum(self.output_weights) / len(self.output_weights)
        return like.new_tensor([[weight / mean for weight in self.output_weights]])

    def targets(self, outputs: int, where: str = "fit") -> int:
        columns = super().targets(outputs, where)
        if self.output_weights is not None and len(self.output_weights) != columns:
            raise SpecError(
                f"{where}: {self.name} has {len(self.output_weights)} output_weights for {columns} targets; give one for each"
            )
        return columns

    def check_targets(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        missing = self.ignore_missing and target.is_floating_point()
        super().check_targets(target.masked_fill(target.isnan(), 0) if missing else target, outputs, where)
