"""Smoothness of splines in damped Gauss–Newton steps: quadratic penalties with constant matrices, and factors from the data.

Shapes: s starts, P trained parameters, h smooth heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kapsi.training.penalties import Penalties

JITTER = 1e-12
"""Addition to the unit diagonal of the scaled matrix; constants of several splines of a head are not determined singly."""

STEPS = 0.03, 3.0
"""Largest decrease and increase of a factor per iteration: without limits, factors of few rows jump between zero and infinity."""

MOST = 100.0
"""Largest factor, relative to that with the same mean curvature of data and penalty; splines are straight lines beyond."""

LEAST_EFFECTIVE = 1e-3
"""Least effective number of parameters of a head, as a part of the penalized ones."""

LEAST_RESIDUAL = 0.05
"""Least degrees of freedom of the residuals, as a part of the targets: with more parameters than targets there are none."""


class _Block(NamedTuple):
    """Position, K and rank of K of a tensor."""

    at: slice
    matrix: Tensor
    rank: int


class Smoothing:
    """The penalties λ_i R_i of the heads of a model with R_i = θᵀK_iθ/2, the squared second differences of the coefficients.

    K is constant for ψ linear in a single trained tensor (dense or masked), and computed once.

    Args:
        penalties: the penalties of a model with `smoothness`.
        start: position of each trained parameter in θ, by `id`.

    Attributes:
        count: h, 0 without a suitable ψ.
    """

    def __init__(self, penalties: Penalties, start: Mapping[int, int]) -> None:
        self._blocks = []
        for parameter in penalties.smooth_parameters():
            matrix, at = penalties.roughness_matrix(parameter), start[id(parameter)]
            rank = int(torch.linalg.matrix_rank(matrix, hermitian=True))
            self._blocks.append(_Block(slice(at, at + len(matrix)), matrix, rank))
        self.count = len(self._blocks)

    def roughness(self, vectors: Tensor) -> Tensor:
        """Return R at parameters `(s, P)`, `(s, h)`."""
        return torch.stack([((part := vectors[:, at]) @ k * part).sum(1) / 2 for at, k, _ in self._blocks], 1)

    def gradient(self, vectors: Tensor, factors: Tensor) -> Tensor:
        """Return the gradient of Σ λR at parameters `(s, P)`, for λ `(s, h)`."""
        gradient = torch.zeros_like(vectors)
        for (at, k, _), factor in zip(self._blocks, factors.T, strict=True):
            gradient[:, at] += factor[:, None] * (vectors[:, at] @ k)
        return gradient

    def add_to(self, matrix: Tensor, factors: Tensor) -> Tensor:
        """Return matrices `(s, P, P)` plus Σ λK, for λ `(s, h)`."""
        matrix = matrix.clone()
        for (at, k, _), factor in zip(self._blocks, factors.T, strict=True):
            matrix[:, at, at] += factor[:, None, None] * k
        return matrix

    def chosen(self, factors: Tensor, loss: Tensor, curvature: Tensor, vectors: Tensor, targets: float) -> Tensor:
        """Return the next factors, a step of the maximization of the evidence.

        λ_i ← γ_i/(N − γ) · L/R_i,   γ_i = rank K_i − λ_i tr(K_i H⁻¹),   γ = tr(A H⁻¹),   H = A + Σ λ_i K_i

        N is the effective number of targets, L the mean squared error, γ the effective number of parameters. λ vanishes with L.

        Args:
            factors: λ, `(s, h)`; zeros before the first choice.
            loss: L, `(s,)`.
            curvature: A, the Gauss–Newton matrix of L, `(s, P, P)`.
            vectors: parameters, `(s, P)`.
            targets: N.

        Source: MacKay, Bayesian interpolation (1992); Foresee and Hagan, Gauss–Newton approximation to Bayesian learning (1997).
        """
        matrix = self.add_to(curvature, factors)
        size = matrix.diagonal(dim1=1, dim2=2).sqrt()
        size = size.masked_fill(size == 0, 1)
        eye = torch.eye(vectors.shape[1], dtype=vectors.dtype, device=vectors.device)
        scaled = matrix / (size.unsqueeze(1) * size.unsqueeze(2))
        lower, failed = torch.linalg.cholesky_ex(scaled + JITTER * eye)
        inverse = torch.cholesky_inverse(lower)
        lost = JITTER * inverse.diagonal(dim1=1, dim2=2).sum(1)
        inverse = inverse / (size.unsqueeze(1) * size.unsqueeze(2))
        traces = [(inverse[:, at, at] * k).sum((1, 2)) for at, k, _ in self._blocks]
        fixed = factors * torch.stack(traces, 1)
        ranks = fixed.new_tensor([rank for _, _, rank in self._blocks])
        effective = torch.maximum(ranks - fixed, LEAST_EFFECTIVE * ranks)
        residual = (targets - (vectors.shape[1] - fixed.sum(1) - lost)).clamp_min(LEAST_RESIDUAL * targets)
        new = effective * (loss / residual).unsqueeze(1) / self.roughness(vectors)
        new = torch.where(factors > 0, new.clamp(STEPS[0] * factors, STEPS[1] * factors), new)
        traces = [
            curvature[:, at, at].diagonal(dim1=1, dim2=2).sum(1) / k.diagonal().sum() for at, k, _ in self._blocks
        ]
        new = torch.minimum(new, MOST * torch.stack(traces, 1))
        return torch.where((failed == 0).unsqueeze(1) & new.isfinite(), new, factors)
