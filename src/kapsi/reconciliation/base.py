"""The protocol of parameter reconciliations ψ: Rˡ → Rⁿˣᴰ."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from kapsi.errors import SpecError
from kapsi.function import Function, Params, Tensors, flatten
from kapsi.weights import Weights


@dataclass(frozen=True)
class ChangeOfBasis:
    """A finer basis of κ, with the old basis as a linear map of the new one: κ_old(x) = M κ_new(x), so ψ_new = ψ_old M.

    Args:
        factors: grid (q′, t′) of the new κ.
        columns: multiplies rows `(..., D)` by M, to `(..., D′)`.
        grid: multiplies rows `(..., q)` by N, to `(..., q′)`, if M = N ⊗ I acts on the first axis of κ's grid alone;
            otherwise None.
    """

    factors: tuple[int, int]
    columns: Callable[[Tensor], Tensor]
    grid: Callable[[Tensor], Tensor] | None = None


class Reconciliation(Function, role="reconciliation"):
    """ψ: a parameter reconciliation, from l parameters to weights `(channels, n, D)`.

    Declared initial values must give every row of ψ an expected square norm of one; the head then divides by the measured
    RMS of the outputs.
    """

    compact: ClassVar[Mapping[str, Any]] = {}
    """Options of a small instance, suggested if another ψ is too large for a wide κ; empty: never suggested."""

    linear_rows: ClassVar[str] = ""
    """Name of a trained tensor `(…, D)` of which every row is a combination of columns of κ; empty without such a tensor."""

    random: ClassVar[bool] = False
    """Whether ψ draws random numbers in training."""

    @property
    def multilinear(self) -> bool:
        """Whether ψ is linear in each trainable tensor, the others fixed: needed by `ridge` and smoothness penalties.

        False by default; a subclass declares it by `multilinear = True`.
        """
        return False

    @abstractmethod
    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        """Return the declared tensors for n outputs and κ's grid (q, t)."""

    @abstractmethod
    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        """Return ψ(w); with several channels every tensor of `params` has a leading channel axis.

        Each channel depends on its own slice of the tensors alone, because heads of equal form are contracted as channels
        of a single head. `ActingWeights` are exempt.
        """

    def count(self, out_features: int, factors: tuple[int, int]) -> int:
        """Return l, the number of trainable parameters of one channel."""
        return sum(param.numel for _, param in flatten(self.params(out_features, factors)) if param.trainable)

    def on_own_grid(self, factors: tuple[int, int]) -> Reconciliation | None:
        """Return a variant on the grid (q, t) of κ, the cheapest for a product; None if the grid is κ's own or there is none."""
        return None

    def rebase(
        self, tensors: Tensors, out_features: int, factors: tuple[int, int], change: ChangeOfBasis
    ) -> tuple[Reconciliation, dict[str, Any]]:
        """Return a reconciliation and tensors that give the same layer with a finer basis of κ.

        Args:
            tensors: current values, with or without a leading channel axis.
            out_features: number of outputs n.
            factors: current grid (q, t) of κ.
            change: the new basis.

        Raises:
            SpecError: ψ cannot represent ψ_old M.
        """
        raise SpecError(
            f"{type(self).__name__}: cannot be carried over to a finer basis of κ with the function kept; "
            "possible are Dense, LowRank, and Kronecker kinds on κ's natural grid"
        )

    def scale(self, tensors: Sequence[Tensor], factor: float) -> None:
        """Multiply ψ by a positive factor in place, distributed evenly over the trainable tensors."""
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


def need_divisor(where: str, name: str, value: int, number: int, unit: str) -> None:
    """Raise a `SpecError` with the list of divisors unless `value` divides `number`."""
    if number % value:
        allowed = listed_divisors(number, value)
        raise SpecError(f"{where}({name}={value}): {name} must divide the {number:,} {unit}; {allowed}")


def listed_divisors(number: int, value: int) -> str:
    """Return the divisors for a message: all, or the twelve nearest to a value if there are many.

    Example:
        >>> listed_divisors(10, 4)
        'divisors are 1, 2, 5, 10'
    """
    if number >= 10**12:  # a million trials would delay the message by seconds
        return "it has more than 12 digits, so its divisors are not listed"
    choices = divisors(number)
    if len(choices) <= 24:
        return f"divisors are {', '.join(map(str, choices))}"
    near = sorted(sorted(choices, key=lambda divisor: abs(math.log(divisor / value)))[:12])
    return f"divisors near it are {', '.join(map(str, near))}"


def random_mask(shape: tuple[int, ...], generator: Generator | None, *, kept: int) -> Tensor:
    """Return a mask with `kept` random entries set to True."""
    mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
    mask.view(-1)[torch.randperm(mask.numel(), generator=generator, device="cpu")[:kept]] = True
    return mask


def require_kept(where: str, name: str, mask: Tensor, kept: int) -> None:
    """Raise a `SpecError` unless a custom mask, or one mask for each channel, keeps the required number of entries."""
    counts = mask.flatten(-2).sum(-1)
    if bool((counts != kept).any()):
        raise SpecError(f"{where}: the {name} must keep exactly {kept:,} entries, got {counts.flatten().tolist()}")
