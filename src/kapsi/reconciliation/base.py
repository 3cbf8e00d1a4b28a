"""The protocol of parameter reconciliations ψ: Rˡ → Rⁿˣᴰ."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from kapsi.errors import SpecError
from kapsi.function import Function, Params, Tensors, flatten
from kapsi.weights import Weights

__all__ = ["Reconciliation", "divisor_near_root", "divisors", "need_divisor"]


class Reconciliation(Function, role="reconciliation"):
    """ψ: a parameter reconciliation, from l parameters to weights `(channels, n, D)`.

    The initial values that a reconciliation declares give every row of ψ an expected square norm of one; the head then
    divides by the measured spread of its outputs. Weights must be a product of the trainable tensors (linear in each).
    """

    @abstractmethod
    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        """Return the tensors that ψ needs for n outputs and κ's grid (q, t)."""

    @abstractmethod
    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        """Return ψ(w); each of `params` has a leading channel axis, or none where there is one channel."""

    def count(self, out_features: int, factors: tuple[int, int]) -> int:
        """Return l, the number of trainable parameters of one channel."""
        return sum(param.numel for _, param in flatten(self.params(out_features, factors)) if param.trainable)

    def scale(self, tensors: Sequence[Tensor], factor: float) -> None:
        """Multiply ψ by a positive factor, in place, spread evenly over its trainable tensors."""
        for tensor in tensors:
            tensor.mul_(factor ** (1 / len(tensors)))


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive integer in ascending order.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def divisor_near_root(number: int) -> int:
    """Return the largest divisor that is at most the square root."""
    return max(i for i in divisors(number) if i * i <= number)


def need_divisor(where: str, name: str, value: int, number: int, what: str) -> None:
    """Raise a `SpecError` that lists the divisors if `value` does not divide `number`."""
    if number % value:
        allowed = ", ".join(map(str, divisors(number))) if number < 10**12 else "those of the number"
        raise SpecError(f"{where}({name}={value}): {name} must divide the {number:,} {what}; divisors are {allowed}")
