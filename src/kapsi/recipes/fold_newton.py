"""Newton steps for the training rows of all folds at once, in batched tensors: small problems take most of their time in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kapsi.recipes.solve import MAX_STEPS, SHORTEST, contrasts
from kapsi.training.losses import CrossEntropy
from kapsi.training.losses.base import Loss

__all__ = ["fold_newton_path", "is_small"]

MOST_UNKNOWNS = 150
"""Coefficients of a fold, at most: the factorization of larger matrices takes more time than Python."""

MOST_PRODUCTS = 5e7
"""Multiplications of the Hessian matrices of all folds, at most."""


def is_small(folds: int, rows: int, width: int, outputs: int) -> bool:
    """Return whether all folds at once take less time than one after the other."""
    return width * outputs <= MOST_UNKNOWNS and folds * rows * width**2 * outputs**2 <= MOST_PRODUCTS


def fold_newton_path(
    z: Tensor, shares: Tensor, y: Tensor, loss: Loss, outputs: int, penalties: Sequence[float], tolerance: float
) -> Iterator[Tensor]:
    """Yield the coefficients of each fold `(folds, r + 1, n)` for each penalty in turn, as `newton_path` does for one fold.

    Args:
        z: coordinates of all rows, with a last column of ones, `(rows, r + 1)`.
        shares: weights of the training rows of each fold with sum 1, 0 for other rows, `(folds, rows)`.
        y, loss, outputs, penalties: see `newton_path`.
        tolerance: relative decrease of the penalized loss that ends the steps.
    """
    mix = contrasts(outputs, z) if loss.shift_invariant else torch.eye(outputs, dtype=z.dtype)
    here = z.new_zeros(len(shares), z.shape[1], len(mix))
    before = here
    for i, penalty in enumerate(penalties):
        problem = _Folds(z, shares, y, loss, mix, penalty)
        start = here
        if i > 1:  # see `newton_path`
            ahead = 2 * here - before
            start = torch.where((problem.value(ahead) < problem.value(here))[:, None, None], ahead, here)
        before, here = here, problem.minimum(start, tolerance)
        yield here @ mix


class _Folds:
    """The penalized loss of the training rows of each fold; arguments as those of `fold_newton_path`."""

    def __init__(self, z: Tensor, shares: Tensor, y: Tensor, loss: Loss, mix: Tensor, penalty: float) -> None:
        self.z, self.shares, self.loss, self.mix = z, shares, loss, mix
        self.y = y.repeat(len(shares), *[1] * (y.dim() - 1))
        self.penalty = z.new_full((z.shape[1], 1), penalty)
        self.penalty[-1] = 0

    def outputs(self, theta: Tensor) -> Tensor:
        """Return the outputs of all rows of all folds, `(folds · rows, n)`."""
        return (self.z @ theta @ self.mix).flatten(0, 1)

    def value(self, theta: Tensor) -> Tensor:
        """Return the penalized loss of each fold, `(folds,)`."""
        losses = self.loss.rows(self.outputs(theta), self.y).view(self.shares.shape)
        data = torch.where(self.shares > 0, self.shares * losses, 0).sum(1)
        return data + 0.5 * (self.penalty * theta.square()).sum((1, 2))

    def step(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient and Newton step of each fold, like `theta`."""
        slopes, blocks = self._curvature(self.outputs(theta))
        folds, width, k = theta.shape
        gradient = self.z.T @ (slopes * self.shares[:, :, None]) + self.penalty * theta
        matrix = theta.new_zeros(folds, k, width, k, width)
        weighted = blocks * self.shares[:, :, None, None]
        for i in range(k):
            for j in range(i + 1):
                part = (self.z * weighted[:, :, i, j, None]).mT @ self.z
                matrix[:, i, :, j], matrix[:, j, :, i] = part, part.mT
        matrix = matrix.view(folds, k * width, k * width)
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        diagonal += self.penalty[:, 0].repeat(k)
        # Saturated rows leave no curvature along the constant.
        diagonal += 1e-14 * diagonal.amax(1, keepdim=True) + 1e-300
        lower, failed = torch.linalg.cholesky_ex(matrix)
        flat = gradient.mT.reshape(folds, -1, 1)
        step = torch.cholesky_solve(flat, lower)
        if failed.any():
            step = torch.where((failed > 0)[:, None, None], flat / diagonal[:, :, None], step)
        return gradient, step.view(folds, k, width).mT

    def _curvature(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return slopes of the loss in the scores, `(folds, rows, k)`, and their Hessian, `(folds, rows, k, k)`."""
        if isinstance(self.loss, CrossEntropy) and not self.loss.label_smoothing:  # without `(rows, n, n)`
            p = outputs.softmax(1)
            slopes = p.scatter_add(1, self.y.long()[:, None], p.new_full((len(p), 1), -1.0)) @ self.mix.T
            means = p @ self.mix.T
            blocks = (p[:, None, :] * self.mix) @ self.mix.T - means[:, :, None] * means[:, None, :]
        else:
            gradient, root = self.loss.curvature(outputs, self.y)
            slopes, root = gradient @ self.mix.T, root @ self.mix.T
            blocks = root.mT @ root
        shape = self.shares.shape
        return slopes.view(*shape, -1), blocks.view(*shape, *blocks.shape[1:])

    def minimum(self, theta: Tensor, tolerance: float) -> Tensor:
        """Return the coefficients with the least penalized loss, by damped Newton steps; no step raises it."""
        value, active = self.value(theta), torch.ones(len(theta), dtype=torch.bool)
        for _ in range(MAX_STEPS):
            gradient, step = self.step(theta)
            decrease = (gradient * step).sum((1, 2))
            active &= decrease > 0
            size = active.to(theta.dtype)
            while True:
                trial = theta - size[:, None, None] * step
                new = self.value(trial)
                long = active & ~(new <= value - 1e-4 * size * decrease) & (size >= SHORTEST)
                if not long.any():
                    break
                size = torch.where(long, size / 2, size)
            active &= new < value
            theta = torch.where(active[:, None, None], trial, theta)
            value = torch.where(active, new, value)
            active &= decrease > 2 * tolerance * value.abs()
            if not active.any():
                break
        return theta
