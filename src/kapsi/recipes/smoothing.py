"""Strengths of several penalties at once, by the evidence of the rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PenaltyBlocks", "SecondMoments", "evidence", "free_parameters", "penalty_matrix"]

STABLE = 1e-7
"""Ridge on all coefficients, relative to the mean variance of a column."""

STRONGEST = 1e5
"""Largest strength of a penalty relative to the variances of its columns: the fit has no part left that it penalizes."""

WEAKEST = 1e-9
"""Smallest relative strength."""

START = 0.3
"""Relative strength before the first round."""

LEAP = 1.5
"""Power of the factor of a round: the fixed point is approached from one side, in steps that are too short."""


class PenaltyBlocks(NamedTuple):
    """Penalties Σ_b s_b ‖R_b θ[columns_b]‖² of `b` groups of `k` columns each.

    Attributes:
        columns: columns of each group, `(b, k)`.
        root: R, `(b, r, k)`; rows of zeros do not count.
        factor: number of the strength s of each group, `(b,)`; groups with equal numbers have one in common.
    """

    columns: Tensor
    root: Tensor
    factor: Tensor

    def squares(self) -> Tensor:
        """Return RᵀR, `(b, k, k)`."""
        return self.root.mT @ self.root


class SecondMoments(NamedTuple):
    """Weighted second moments of centered columns and targets.

    Attributes:
        columns: covariance of the columns, `(D, D)`.
        mixed: covariance of columns and targets, `(D, n)`.
        targets: variances of the targets, `(n,)`.
        rows: number of rows.
    """

    columns: Tensor
    mixed: Tensor
    targets: Tensor
    rows: int


def evidence(
    moments: SecondMoments, blocks: Sequence[PenaltyBlocks], rounds: int, start: Tensor | None = None
) -> Tensor:
    """Return the strength of each penalty that makes the targets most likely, with θ integrated out.

    θ minimizes the mean square of the errors plus the penalties. Each penalty is a normal prior of θ; its strength s and the
    variance σ² of the noise are fixed points of

        s = σ² γ / (rows ‖Rθ‖²),   γ = rank R − s tr(A⁻¹RᵀR),   A = covariance + Σ s RᵀR,

    with γ the number of parameters that the penalty leaves free. A penalty of a part without an effect grows without bound,
    which removes the part. Targets share the strengths, as if each was divided by the deviation of its noise.

    Args:
        moments: moments of the rows.
        blocks: the penalties.
        rounds: number of steps towards the fixed point; 0 gives strengths by the variances of the columns alone.
        start: strengths to start from; NaN for those by the variances.

    Returns:
        The strengths, `(factors,)`.

    Source: MacKay, "Bayesian Interpolation", Neural Computation 4 (1992); Wood and Fasiolo, "A generalized Fellner–Schall
        method for smoothing parameter optimization", Biometrics 73 (2017).
    """
    columns, mixed, targets, rows = moments
    count = 1 + max(int(block.factor.max()) for block in blocks)
    variances = columns.diagonal()
    rank, scale = _sums(blocks, count, _ranks), _sums(blocks, count, lambda block: variances[block.columns].sum(1))
    scale = scale / _sums(blocks, count, lambda block: block.squares().diagonal(dim1=1, dim2=2).sum(1)).clamp_min(
        1e-300
    )
    scale = scale.clamp_min(1e-12 * float(variances.mean().clamp_min(1e-288)))
    strength = START * scale if start is None else torch.where(start.isnan(), START * scale, start)
    for _ in range(rounds):
        lower = torch.linalg.cholesky(columns + penalty_matrix(variances, blocks, strength))
        theta = torch.cholesky_solve(mixed, lower)
        inverse = torch.cholesky_inverse(lower)
        free = (inverse * columns).sum()
        error = targets - 2 * (theta * mixed).sum(0) + (theta * (columns @ theta)).sum(0)
        # The mean square of the residuals, for the parameters that remain.
        noise = error.clamp_min(1e-12 * targets).clamp_min(1e-300) * (rows / (rows - free - 1).clamp_min(1))
        units = theta / noise.sqrt()
        used = rank - strength * _sums(blocks, count, functools.partial(_traces, inverse))
        size = _sums(blocks, count, functools.partial(_sizes, units))
        new = targets.shape[0] * used.clamp_min(1e-8) / (rows * size).clamp_min(1e-300)
        strength = strength * (new / strength) ** LEAP
        strength = torch.minimum(torch.maximum(strength, WEAKEST * scale), STRONGEST * scale)
    return strength


def free_parameters(moments: SecondMoments, blocks: Sequence[PenaltyBlocks], strength: Tensor) -> Tensor:
    """Return γ, the number of parameters that each penalty leaves free, `(factors,)`."""
    matrix = moments.columns + penalty_matrix(moments.columns.diagonal(), blocks, strength)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    count = len(strength)
    return _sums(blocks, count, _ranks) - strength * _sums(blocks, count, functools.partial(_traces, inverse))


def penalty_matrix(variances: Tensor, blocks: Sequence[PenaltyBlocks], strength: Tensor) -> Tensor:
    """Return Σ s RᵀR with a small ridge, `(D, D)`, for variances of the columns `(D,)`."""
    matrix = torch.diag((STABLE * variances.mean()).clamp_min(1e-300).expand(len(variances)))
    for block in blocks:
        values = strength[block.factor][:, None, None] * block.squares()
        matrix.index_put_((block.columns[:, :, None], block.columns[:, None, :]), values, accumulate=True)
    return matrix


def _sums(blocks: Sequence[PenaltyBlocks], count: int, value: Callable[[PenaltyBlocks], Tensor]) -> Tensor:
    """Return values of groups summed by the number of their strength, `(count,)`."""
    total = blocks[0].root.new_zeros(count)
    for block in blocks:
        total.index_add_(0, block.factor, value(block))
    return total


def _ranks(block: PenaltyBlocks) -> Tensor:
    return (block.root != 0).any(2).sum(1).to(block.root.dtype)


def _sizes(theta: Tensor, block: PenaltyBlocks) -> Tensor:
    """Return ‖Rθ‖² of each group."""
    return (block.root @ theta[block.columns]).square().sum((1, 2))


def _traces(inverse: Tensor, block: PenaltyBlocks) -> Tensor:
    """Return tr(A⁻¹RᵀR) of each group."""
    part = inverse[block.columns[:, :, None], block.columns[:, None, :]]
    return (part * block.squares()).sum((1, 2))
