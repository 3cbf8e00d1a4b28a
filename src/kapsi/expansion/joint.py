"""Joint log-densities of all inputs, with a mean and a full covariance for each class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion, class_labels
from kapsi.expansion.density import MAX_INPUT, SMOOTHING, deviation
from kapsi.expansion.kernel import cluster_centers
from kapsi.expansion.numerics import evenly, working_precision
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = ["JointNormal"]


@dataclass(frozen=True)
class JointNormal(Expansion, name="joint_normal"):
    """Joint normal log-densities of all inputs: κ(x) = [log N(x | μ₁, Σ₁), …, log N(x | μ_d, Σ_d)], d = count, D = count.

    Each component has a mean and a full covariance, Σ⁻¹ = WᵀW with lower triangular W, buffers unless learnable. With labels,
    `kapsi.calibrate` fits each class by maximum likelihood, in ascending order of labels, and the head
    `HeadSpec(JointNormal(classes), Eye(), ConstantRemainder())` with log-priors as constants is quadratic discriminant
    analysis. Several components per class, or components without labels, are fitted to the rows nearest to k-means centers.
    A fraction of the variance of each input is added to its fitted variances.

    Before calibration the means are evenly spaced from (−1.5, …, −1.5) to (1.5, …, 1.5) with Σ = I.

    Args:
        count: components, 1 to 100,000; with labels a multiple of the number of classes.
        learnable: train the parameters `mean` (μ, `(count, m)`) and `factor` (W, `(count, m, m)`: strictly lower part, and the
            logarithms of the diagonal; the upper part is ignored).
        smoothing: fraction of the variance of each input in all rows added to its fitted variances, 0 to 1.

    Source: arXiv 2407.04819, "Combinatorial Probabilistic Data Expansion", of all m inputs; Hastie, Tibshirani and Friedman,
        The Elements of Statistical Learning (2009), 4.3.

    Example:
        >>> import torch
        >>> tensors = {"mean": torch.tensor([[0.0, 0.0], [1.0, 0.0]]), "factor": torch.zeros(2, 2, 2)}
        >>> JointNormal()(torch.tensor([1.0, 0.0]), tensors).dense()
        tensor([-2.3379, -1.8379])
    """

    examples = ({}, {"count": 3, "learnable": True, "smoothing": 0.1})

    count: int = option(2, minimum=1, maximum=100_000)
    learnable: bool = False
    smoothing: float = option(SMOOTHING, minimum=0.0, maximum=1.0)

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, self.count

    def params(self, in_features: int) -> Params:
        means = evenly(-1.5, 1.5, self.count)
        return {
            "mean": Param((self.count, in_features), means, trainable=self.learnable),
            "factor": Param((self.count, in_features, in_features), "zeros", trainable=self.learnable),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return maximum likelihood estimates, each component from its group of rows.

        Raises:
            SpecError: `count` is not a multiple of the number of classes in y.
            DataError: y has values that are not finite.
        """
        rows = x.double().clamp(-MAX_INPUT, MAX_INPUT)
        scale = deviation(rows)
        scale = torch.where(scale > 0, scale, 1.0)
        fits = [self._fit(group, scale) for group in self._groups(rows, scale, class_labels("JointNormal", y, rows))]
        return {"mean": torch.stack([mean for mean, _ in fits]), "factor": torch.stack([factor for _, factor in fits])}

    def _groups(self, rows: Tensor, scale: Tensor, labels: Tensor | None) -> Iterator[Tensor]:
        """Yield the rows for each component."""
        classes = [] if labels is None else labels.unique().tolist()
        per_class, rest = divmod(self.count, max(1, len(classes)))
        if rest:
            raise SpecError(
                f"JointNormal(count={self.count}): y has {len(classes)} classes; count must be a multiple of {len(classes)}, "
                "or calibrate without y"
            )
        for part in [rows] if labels is None else [rows[labels == label] for label in classes]:
            if per_class == 1:
                yield part
                continue
            units = part / scale
            nearest = torch.cdist(units, cluster_centers(units, per_class).to(units)).argmin(1)
            for k in range(per_class):
                group = part[nearest == k]
                yield group if len(group) else part

    def _fit(self, rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and the stored W of some rows; `scale` is the standard deviation of each input in all rows."""
        mean = rows.mean(0)
        units = (rows - mean) / scale
        # Scaled to unit variance, so that inputs of any scale are inverted alike; 10⁻¹² keeps a singular matrix positive.
        covariance = units.T @ units / len(rows) + max(self.smoothing, 1e-12) * torch.eye(len(scale)).to(units)
        lower = torch.linalg.cholesky(covariance)
        inverse = torch.linalg.solve_triangular(lower, torch.eye(len(scale)).to(units), upper=False) / scale
        return mean, inverse.tril(-1) + inverse.diagonal().log().diag()

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        factor, mean = working_precision(params["factor"]), working_precision(params["mean"])
        logs = factor.diagonal(dim1=-2, dim2=-1)
        whitening = factor.tril(-1) + torch.diag_embed(logs.exp())
        centered = working_precision(x).unsqueeze(-2) - mean  # (..., count, m)
        units = torch.einsum("cij,...cj->...ci", whitening, centered)
        columns = logs.sum(-1) - 0.5 * (units.square().sum(-1) + x.shape[-1] * math.log(2 * math.pi))
        return DenseFeatures(columns.to(x.dtype))
