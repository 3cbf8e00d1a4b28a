"""A linear head of features of the patches of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from kapsi.expansion import Patches
from kapsi.function import option
from kapsi.modules import Model
from kapsi.recipes.base import CrossFit, Fold, RecipeData
from kapsi.recipes.image_linear import ImageHead, cross_fit_penalties, lbfgs_path, of_images, row_share

__all__ = ["ImagePatchesHead"]

PENALTIES = (10.0, 3.0, 1.0, 0.3)
"""Candidates for l2, strong ones first, in units of one over the square root of the number of rows."""

RIDGE = 0.01
"""Addition to the eigenvalues of the features, relative to their mean, in the coordinates that are penalized."""

CONTRAST = 10.0
"""Standard deviation of patches that are noise, of intensities from 0 to 255."""

COMPARED = 10_000
"""Most training rows of a comparison."""

CHUNK = 1_000
"""Images converted at once."""

SMALL, MANY = 32, 20_000
"""Side of gray images, and number of rows, from which on the network alone does as well, such as for digits."""

LEAST_SIDE = 8
"""Pixels of the shorter side."""


@dataclass(frozen=True)
class ImagePatchesHead(ImageHead, name="image_patches"):
    """A linear function of pooled features of the patches of an image: ψ κ(x) + b, κ the expansion `patches`.

    The filters are set without the targets, by spherical k-means of whitened patches, so a fit is that of a linear model. Minimizes
    the mean loss plus (l2/(2√rows))‖z‖² by L-BFGS, z the coefficients of features with unit covariance.

    Args:
        filters: number of filters, 1 to 4,096; None: 160 for colored images, 64 for gray ones.
        size: side of a patch, in pixels.
        cells: side of the grid that responses are averaged in; None: 2 for colored images, 4 for gray ones.
        l2: the penalty λ, 10⁻¹² to 10¹²; None: chosen by held-out rows.

    Source: Coates, Lee, Ng: An Analysis of Single-Layer Networks in Unsupervised Feature Learning (AISTATS 2011).
    """

    complexity: ClassVar[int] = 4

    filters: int | None = option(None, minimum=1, maximum=4_096)
    size: int = option(6, minimum=2, maximum=32)
    cells: int | None = option(None, minimum=1, maximum=16)
    l2: float | None = option(None, minimum=1e-12, maximum=1e12)

    def reason_against(self, data: RecipeData) -> str | None:
        if data.pixels is None or len(data.shapes) > 1:
            return super().reason_against(data) or "image_patches is for a single column of images"
        if min(data.shapes[0][1:]) < LEAST_SIDE:
            return f"image_patches is for images of at least {LEAST_SIDE} × {LEAST_SIDE} pixels"
        return None

    def competes(self, data: RecipeData) -> bool:
        return not data.shapes or data.shapes[0][0] > 1 or max(data.shapes[0]) > SMALL or len(data.x) <= MANY

    def least_budget(self, data: RecipeData) -> float:
        return 4 * self.fit_cost(data, len(data.x))

    def cost(self, data: RecipeData, rows: int) -> float:
        # Features of some training rows, and of half as many held-out rows as there are training rows.
        return self._seconds(data, min(rows, COMPARED), rows // 2)

    def fit_cost(self, data: RecipeData, rows: int) -> float:
        return self._seconds(data, rows, 0)

    def memory(self, data: RecipeData, rows: int) -> int:
        kappa, (_, height, width) = self.kappa(data), data.shapes[0]
        columns, responses = kappa.out_features(math.prod(data.shapes[0])), height * width * kappa.count
        return 4 * min(rows, CHUNK) * responses + 12 * rows * columns + 24 * columns**2

    def _seconds(self, data: RecipeData, rows: int, held_out: int) -> float:
        kappa, (channels, height, width) = self.kappa(data), data.shapes[0]
        patches = math.prod(max(1, side - self.size + 1) for side in (height, width))
        columns = kappa.out_features(channels * height * width)
        each = patches * kappa.count * (2.5e-11 * channels * self.size**2 + 8e-9)
        return (rows + held_out) * each + rows * columns * (5e-11 * columns + 1e-9 * data.outputs)

    def kappa(self, data: RecipeData) -> Patches:
        """Return κ for the images."""
        channels, height, _ = data.shapes[0]
        cells = self.cells or (2 if channels > 1 else 4)
        filters = self.filters or (160 if channels > 1 else 64)
        return Patches(filters, self.size, cells, contrast=CONTRAST, channels=channels, height=height)

    @torch.no_grad()
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        if self.l2 is None:
            return self.cross_fit(data, data.folds(3)[:1], seed).recipe.fit(data, seed)
        features = _PatchFeatures(self.kappa(data), data)
        *_, theta = features.path([p for p in PENALTIES if p > 1.1 * self.l2] + [self.l2])
        matrix, bias = features.coefficients(theta)
        model, head = of_images(features.kappa, data, bias=True)
        inner = cast(Any, head.kappa["expansion"])
        for name, value in features.tensors.items():
            inner[name].copy_(value)
        head.psi["matrix"].copy_(matrix.T)
        if head.bias is not None:
            head.bias.copy_(bias)
        return model.eval()

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        def held_out_outputs(part: RecipeData, held_out: RecipeData, penalties: Sequence[float]) -> Iterator[Tensor]:
            features = _PatchFeatures(self.kappa(data), part)
            x = features.of(held_out)
            for theta in features.path(penalties):
                matrix, bias = features.coefficients(theta)
                yield (x @ matrix.float()).double() + bias

        return cross_fit_penalties(self, PENALTIES, COMPARED, held_out_outputs, data, folds, seed)


class _PatchFeatures:
    """The features of training rows, in coordinates of unit covariance.

    Args:
        kappa: the expansion.
        data: the rows.
    """

    def __init__(self, kappa: Patches, data: RecipeData) -> None:
        self.kappa, self.data = kappa, data
        empty = {name: torch.empty(param.shape) for name, param in kappa.params(data.images().shape[1]).items()}  # type: ignore[union-attr]
        every = max(1, len(data.x) // 20_000)
        found = kappa.calibrate(data.images()[::every].float(), empty)
        self.tensors = {name: value.float() for name, value in found.items()}
        self.x, self.share = self.of(data), row_share(data)
        weighted = self.share.float()[:, None]
        self.mean = (weighted * self.x).sum(0)
        centered = self.x - self.mean
        covariance = (centered.T @ (weighted * centered)).double()
        ridge = RIDGE * covariance.diagonal().mean().clamp_min(1e-12)
        factor = torch.linalg.cholesky(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))
        self.back = torch.linalg.solve_triangular(
            factor, torch.eye(len(factor), dtype=torch.float64), upper=False
        ).T  # z = (x − mean) back

    def of(self, data: RecipeData) -> Tensor:
        """Return the features of rows, `(rows, D)` float32."""
        parts = data.images().split(CHUNK)
        return torch.cat([self.kappa(part.float(), self.tensors).dense() for part in parts])

    def path(self, penalties: Sequence[float]) -> Iterator[Tensor]:
        """Yield the coefficients of z and the bias for each penalty."""
        z = (self.x - self.mean) @ self.back.float()
        return lbfgs_path(z, self.data, [penalty / math.sqrt(len(z)) for penalty in penalties])

    def coefficients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrix `(D, n)` and bias of the features, float64."""
        matrix = self.back @ theta[:-1].double()
        return matrix, theta[-1].double() - self.mean.double() @ matrix
