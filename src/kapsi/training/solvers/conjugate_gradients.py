"""Damped linear equations by conjugate gradients, from products with the matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CONJUGATE_STEPS = 200
"""Largest number of conjugate-gradient iterations; truncated solutions are good steps, too."""


def conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return v with (A + μ I) v ≈ target, and A v; stops at a residual small enough for a step.

    Args:
        product: v ↦ A v.
        target: right-hand side, `(P,)`.
        damping: μ.
    """
    step, image = torch.zeros_like(target), torch.zeros_like(target)
    residual, direction = target, target.clone()
    square = first = residual @ residual
    for _ in range(min(CONJUGATE_STEPS, len(target))):
        change = product(direction)
        curvature = direction @ change + damping * (direction @ direction)
        if not bool(curvature > 0):  # flat, or concave by a penalty
            break
        length = square / curvature
        step, image = step + length * direction, image + length * change
        residual = residual - length * (change + damping * direction)
        before, square = square, residual @ residual
        if bool(square <= 1e-8 * first):
            break
        direction = residual + (square / before) * direction
    return step, image
