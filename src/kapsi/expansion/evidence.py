"""Columns scaled by evidence about the classes: log-count ratios from calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kapsi.expansion.base import ElementWise, class_labels
from kapsi.expansion.numerics import working_precision
from kapsi.features import Features, SparseFeatures, features_of
from kapsi.function import Param, Params, Tensors, option

__all__ = ["LogCountScale"]


@dataclass(frozen=True)
class LogCountScale(ElementWise, name="log_count_scale"):
    """Inputs scaled by naive Bayes: κ(x) = s ∘ x, s_i = (b + mean_c `|r_ci|`) / (b + 1), D = m.

    r_ci = log(p_ci / Σⱼ p_cj) − log(q_ci / Σⱼ q_cj) is the log-count ratio of a class: p_ci is a plus the number of rows of
    class c with input i not zero, q_ci a plus the number of all other such rows. Regularization of ψ then shrinks
    discriminative columns least. Inputs scaled by `|r|` are as good as by r, since weights have either sign.

    The scales are a buffer `scale` `(m,)`, one until `kapsi.calibrate` sets them from rows with class labels; without
    labels, with a single class, or with non-integer targets they stay. Sparse inputs stay sparse.

    Args:
        offset: b, 0 to 10⁶. With 0 an uninformative column vanishes; with larger values all scales approach one.
        smoothing: a, 10⁻⁶ to 10⁶ rows.

    Source: Wang and Manning, Baselines and Bigrams: Simple, Good Sentiment and Topic Classification (ACL 2012), NBSVM,
        aclanthology P12-2018, with b and `|r|` in place of r. With two classes both have the same `|r|`.

    Example:
        >>> import torch
        >>> kappa = LogCountScale(offset=0.5)
        >>> x, y = torch.tensor([[1.0, 2.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1, 1])
        >>> kappa.calibrate(x, {"scale": torch.ones(2)}, y)["scale"]       # log 2 and log 3/2, as counts and a are 2, 2 and 1, 3
        tensor([0.7954, 0.6036])
    """

    examples = ({}, {"offset": 0.0}, {"offset": 2.0, "smoothing": 0.1})

    offset: float = option(0.5, minimum=0.0, maximum=1e6)
    smoothing: float = option(1.0, minimum=1e-6, maximum=1e6)

    def takes_sparse(self) -> bool:
        return True

    def params(self, in_features: int) -> Params:
        return {"scale": Param((in_features,), "ones", trainable=False)}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return scales from rows with labels.

        Raises:
            DataError: labels are not finite.
        """
        labels = class_labels("LogCountScale", y, x)
        if labels is None:
            return {}
        classes, codes = labels.unique(return_inverse=True)
        if len(classes) < 2:
            return {}
        counts = _rows_with(x, codes, len(classes))
        inside, outside = counts + self.smoothing, counts.sum(0) - counts + self.smoothing
        ratio = (inside / inside.sum(1, keepdim=True)).log() - (outside / outside.sum(1, keepdim=True)).log()
        scale = (self.offset + ratio.abs().mean(0)) / (self.offset + 1)
        return {"scale": scale.to(params["scale"].dtype)}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        features = features_of(x)
        scale = working_precision(params["scale"])
        values = working_precision(features.values)
        if isinstance(features, SparseFeatures):
            scale = scale[features.indices]
        return replace(features, values=(values * scale).to(x.dtype))


def _rows_with(x: Tensor, codes: Tensor, classes: int) -> Tensor:
    """Return the number of rows of each class with input i not zero, `(classes, m)` in float64."""
    m = x.shape[-1]
    if x.layout == torch.strided:
        member = torch.nn.functional.one_hot(codes, classes).double()
        return member.mT @ (x != 0).double()
    nonzero = x.values() != 0
    row_of = torch.repeat_interleave(torch.arange(x.shape[0], device=x.device), x.crow_indices().diff())
    cells = codes[row_of] * m + x.col_indices()
    return torch.bincount(cells[nonzero], minlength=classes * m).view(classes, m).double()
