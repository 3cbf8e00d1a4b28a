"""Expansions for compression: principal components, and distances to centers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from kapsi.expansion.base import Expansion
from kapsi.expansion.kernel import cluster_centers, square_distances
from kapsi.expansion.numerics import working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = ["CenterDistances", "PrincipalComponents"]


@dataclass(frozen=True)
class PrincipalComponents(Expansion, name="principal_components", aliases=("pca",)):
    """Principal components: κ(x) = V (x − μ), D = min(count, m).

    The buffers are `mean` μ `(m,)` and `components` V `(D, m)`. Before `kapsi.calibrate` they are zero and the first D
    inputs; afterwards the rows of V are unit vectors in the directions of largest variance, in descending order, each with
    a positive largest entry. Whitened, they are divided by the standard deviation along them; directions without variance
    become zero.

    Args:
        count: maximum number of components, 1 to 1,000,000; None: all.
        whiten: calibrate to components of unit variance.
        learnable: train μ and V.

    Source: Jolliffe, Principal Component Analysis (2002), chapter 1; a data compression of arXiv 2407.04819.

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(2, 1, kp.HeadSpec(PrincipalComponents(1)), dtype=torch.float64)
        >>> x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]], dtype=torch.float64)
        >>> [round(value, 9) + 0 for value in kp.calibrate(head, x).expand(x).dense()[:, 0].tolist()]
        [-5.0, 0.0, 5.0]
    """

    examples = ({}, {"count": 2}, {"count": 3, "whiten": True, "learnable": True})

    count: int | None = option(None, minimum=1, maximum=1_000_000)
    whiten: bool = False
    learnable: bool = False

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, in_features if self.count is None else min(self.count, in_features)

    def params(self, in_features: int) -> Params:
        return {
            "mean": Param((in_features,), "zeros", trainable=self.learnable),
            "components": Param((self.out_features(in_features), in_features), _first_inputs, trainable=self.learnable),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return the mean and the principal components of the data."""
        values = x.cpu().double()
        rows, m = values.shape
        mean = values.mean(0)
        # SVD of the small triangular factor, padded with rows of zeros to obtain directions for all components.
        triangle = torch.linalg.qr(values - mean, mode="r").R
        padding = max(0, self.out_features(m) - len(triangle))
        _, singular_values, directions = torch.linalg.svd(F.pad(triangle, (0, 0, 0, padding)), full_matrices=False)
        largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
        directions = directions * torch.where(largest < 0, -1.0, 1.0)
        if self.whiten:
            deviation = singular_values / max(1, rows - 1) ** 0.5
            rounding = torch.finfo(values.dtype).eps * max(rows, m) * float(values.abs().amax().clamp_min(1e-300))
            negligible = deviation <= rounding
            directions = (
                torch.where(negligible, 0.0, 1 / torch.where(negligible, 1.0, deviation)).unsqueeze(1) * directions
            )
        return {"mean": mean, "components": directions[: self.out_features(m)]}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        inputs = working_precision(x) - working_precision(params["mean"])
        return DenseFeatures(F.linear(inputs, working_precision(params["components"])).to(x.dtype))


def _first_inputs(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    return torch.eye(*shape, device="cpu")


@dataclass(frozen=True)
class CenterDistances(Expansion, name="center_distances"):
    """Distances to centers: κ(x) = [‖x − c₁‖, …, ‖x − c_G‖], D = G.

    The centers are a buffer `centers` `(G, m)`, initially standard normal. `kapsi.calibrate` places them in the data
    (k-means). At a center, where the distance has no derivative, the gradient is zero.

    Args:
        centers: G, 1 to 100,000.
        squared: use squared distances.
        learnable: train the centers.

    Source: Lloyd, Least Squares Quantization in PCM (1982), doi 10.1109/TIT.1982.1056489; Coates and Ng, Learning Feature
        Representations with K-Means (2012), for distances as features.

    Example:
        >>> import torch
        >>> CenterDistances(2)(torch.tensor([3.0, 4.0]), {"centers": torch.tensor([[0.0, 0.0], [3.0, 1.0]])}).dense()
        tensor([5., 3.])
    """

    examples = ({}, {"centers": 3, "learnable": True}, {"centers": 4, "squared": True, "learnable": True})

    centers: int = option(8, minimum=1, maximum=100_000)
    squared: bool = False
    learnable: bool = False

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, self.centers

    def params(self, in_features: int) -> Params:
        return {"centers": Param((self.centers, in_features), "normal", trainable=self.learnable)}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return centers from k-means."""
        return {"centers": cluster_centers(x, self.centers)}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        square = square_distances(working_precision(x), working_precision(params["centers"]))
        if self.squared:
            return DenseFeatures(square.to(x.dtype))
        # The root has an infinite slope at zero; 10⁻³⁰ is far below the rounding of any distance.
        apart = square > 1e-30
        distance = torch.where(apart, torch.where(apart, square, 1.0).sqrt(), 0 * square)
        return DenseFeatures(distance.to(x.dtype))
