"""The kernel head: Gaussian radial bases against centers in the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.expansion import KernelMap
from kapsi.expansion.kernel import cluster_centers, similarity
from kapsi.function import option
from kapsi.modules import Model
from kapsi.process import Affine, Clamp, NormalScores, normal_scores
from kapsi.recipes.base import RecipeData
from kapsi.recipes.linear_in_parameters import LinearInParameters, bound, column_scale, one_layer, sample
from kapsi.recipes.solve import DesignRows, leave_one_out, orthogonal_basis
from kapsi.spec import HeadSpec

__all__ = ["KernelHead"]

MAX_CENTERS = 400
"""Default number of centers, at most."""

SHARPNESS = tuple(2.0**i for i in range(-7, 12, 2))
"""Candidates for γ times the median squared distance of rows, 1/128 to 2,048."""

FIRST = 4
"""Position of the first candidate, 2: with standard normal inputs about γ = 1/m."""

JITTER = 1e-7
"""Added to the diagonal of K(Z, Z): the factorization stays exact for wide kernels, too."""


@dataclass(frozen=True)
class KernelHead(LinearInParameters, name="kernel"):
    """Kernel ridge regression, or kernel logistic regression, with the Gaussian kernel: b + Σ wᵢ exp(−γ‖z − cᵢ‖²).

    The penalty is the norm of the kernel's function space, wᵀK(c, c)w: the Nyström approximation with centers from k-means.
    Inputs are scaled so that a column of categories weighs at most as much as a number, and kept within their training range.

    Args:
        l2: see `LinearInParameters`.
        sharpness: γ times the median squared distance of rows; None: chosen by the leave-one-out error of squares.
        inputs: `standardized`, or `normal_scores` for ranks, which moderate heavy tails.
        centers: number of centers, at most that of the rows; None: half the rows, at most 400.
    """

    complexity: ClassVar[int] = 5

    searched = (("centers", (None, 30, 100, 500)),)

    sharpness: float | None = option(None, minimum=1e-6, maximum=1e6)
    inputs: Literal["standardized", "normal_scores"] = "standardized"
    centers: int | None = option(None, minimum=1, maximum=10_000)

    @classmethod
    def offered(cls) -> tuple[KernelHead, ...]:
        return cls(), cls(inputs="normal_scores")

    def width(self, rows: int, inputs: int) -> int:
        return min(rows, self.centers or min(MAX_CENTERS, max(rows // 2, 100)))

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        per_number = 3e-7 if self.inputs == "standardized" else 1.6e-6
        return 3 * super().seconds(rows, inputs, outputs) + per_number * rows * inputs

    def candidates(self, data: RecipeData) -> tuple[KernelHead, ...]:
        return (self.resolved(data),)

    def narrowed(self, trial: KernelHead) -> KernelHead:
        return replace(self, sharpness=trial.sharpness)

    def resolved(self, data: RecipeData, seed: int = 0) -> KernelHead:
        """Return the recipe with the sharpness chosen: the leave-one-out error of squares is followed downhill."""
        if self.sharpness is not None:
            return self
        problem = _Distances(self, sample(data))
        tried: dict[int, float] = {}

        def error(i: int) -> float:
            if i not in tried:
                tried[i] = problem.error(SHARPNESS[i])
            return tried[i]

        best = FIRST
        while True:
            near = [i for i in (best, best - 1, best + 1) if 0 <= i < len(SHARPNESS)]
            better = min(near, key=error)
            if better == best:
                return replace(self, sharpness=SHARPNESS[best])
            best = better

    def model(self, data: RecipeData, seed: int = 0) -> Model:
        width = self.width(*data.x.shape)
        # More knots than rows repeat the last one.
        knots = max(2, min(NormalScores().knots, len(data.x)))
        step = Clamp() if self.inputs == "standardized" else NormalScores(knots)
        spec = HeadSpec(KernelMap("rbf", centers=width), bias=True, before=(step, Affine()))
        model, head = one_layer(spec, data, seed)
        mean, scale = column_scale(data)
        if isinstance(step, NormalScores):
            head.before[0].load_state_dict(
                dict(zip(("knots", "scores"), normal_scores(data.x, step.knots), strict=True))
            )
            low, high = head.before[0](data.x).aminmax(dim=0)
            width_of_indicator = torch.where(high > low, high - low, 1)
            scale = torch.where(data.numeric, 1, width_of_indicator)
            affine = {"shift": torch.zeros_like(scale), "low": torch.zeros_like(scale), "scale": 1 / scale}
            head.before[1].load_state_dict(affine)
        else:
            # Two categories differ in two indicators: with a distance of one each, a column of them counts as one number.
            bound(head, data, mean, torch.where(data.numeric, scale, 2 * scale))
        inputs = head.before(data.x)
        gamma = (self.sharpness or 1.0) / _median(inputs)
        head.assign("expansion", centers=cluster_centers(inputs, width), log_gamma=[torch.tensor(gamma).log()])
        return model

    def penalty(self, model: Model, data: RecipeData) -> Tensor:
        head = model.check_layers("recipe")[0].check_heads("recipe")[0]
        centers, gamma = head.kappa["centers"], head.kappa["log_gamma"].exp()
        return gram(centers, gamma)


def gram(centers: Tensor, gamma: Tensor) -> Tensor:
    """Return K(c, c), positive definite."""
    matrix = similarity("rbf", centers, centers, gamma, 0, 0.0)
    matrix = (matrix + matrix.T) / 2
    matrix.diagonal().add_(JITTER)
    return matrix


def _median(z: Tensor) -> float:
    """Return the median squared distance of pairs of rows, positive."""
    rows = z[:: -(-len(z) // 500)]
    distances = torch.pdist(rows).square()
    if not len(distances) or not float(distances.max()):
        return 1.0
    median = float(distances.median())
    return median or float(distances.mean())


class _Distances:
    """The kernel's least squares for the choice of the sharpness.

    Args:
        recipe: the recipe.
        data: the rows.
    """

    def __init__(self, recipe: KernelHead, data: RecipeData) -> None:
        head = replace(recipe, sharpness=1.0).model(data).check_layers("recipe")[0].check_heads("recipe")[0]
        self.penalties = recipe.penalties if recipe.l2 is None else (recipe.l2,)
        self.z, self.centers, self.gamma = head.before(data.x), head.kappa["centers"], head.kappa["log_gamma"].exp()
        self.y = F.one_hot(data.y, data.classes).to(data.x.dtype) if data.classes else data.y
        weight = data.x.new_ones(len(data.x)) if data.weight is None else data.weight
        self.share = weight / weight.sum()

    def error(self, sharpness: float) -> float:
        """Return the least leave-one-out error of all penalties."""
        gamma = self.gamma * sharpness
        phi = similarity("rbf", self.z, self.centers, gamma, 0, 0.0)
        basis = orthogonal_basis(lambda: iter([phi]), self.share, gram(self.centers, gamma))
        rows = DesignRows(lambda: iter([phi]), basis, self.share)
        return float(leave_one_out(rows, self.y, self.penalties).min())
