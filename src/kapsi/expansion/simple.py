"""Expansions with one column per input: identity, threshold, reciprocal, linear map."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.expansion.base import ElementWise, Expansion, RowMap
from kapsi.expansion.numerics import bounded_ratio, working_precision
from kapsi.features import DenseFeatures, Features, features_of
from kapsi.function import Param, Params, Tensors, option
from kapsi.text import counted

__all__ = ["Binarize", "Identity", "LinearExpansion", "Reciprocal"]


@dataclass(frozen=True)
class Identity(ElementWise, name="identity"):
    """The inputs themselves: κ(x) = x, D = m.

    Source: Reconciled Polynomial Network (arXiv 2407.04819), "Identity and Reciprocal Data Expansion".

    Example:
        >>> import torch
        >>> Identity()(torch.tensor([1.0, 2.0]), {}).dense()
        tensor([1., 2.])
    """

    def takes_sparse(self) -> bool:
        return True

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        return list(names)

    def linear_coefficients(self, weights: Tensor) -> Tensor:
        return weights

    def substituted(self, columns: RowMap, in_features: int) -> RowMap:
        return columns

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        return features_of(x)


@dataclass(frozen=True)
class Binarize(ElementWise, name="binarize"):
    """Whether each input is above a threshold: κ(x) = 1 where x > θ, else 0, D = m.

    The gradient is zero, so steps before κ are not trained. Sparse inputs stay sparse for θ ≥ 0.

    Args:
        threshold: θ, any finite number, in units of the inputs.

    Source: the inputs of a Bernoulli distribution in naive Bayes, as `binarize` of scikit-learn's `BernoulliNB`.

    Example:
        >>> import torch
        >>> Binarize(0.5)(torch.tensor([0.0, 0.5, 0.6]), {}).dense()
        tensor([0., 0., 1.])
    """

    examples = ({}, {"threshold": 0.4}, {"threshold": -1.0})

    threshold: float = 0.0

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        return [f"{name} > {self.threshold:g}" for name in names]

    def takes_sparse(self) -> bool:
        return self.threshold >= 0

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        features = features_of(x)
        above = (working_precision(features.values) > self.threshold).to(x.dtype)
        return replace(features, values=torch.where(features.values.isnan(), features.values, above))  # NaN stays NaN


@dataclass(frozen=True)
class Reciprocal(ElementWise, name="reciprocal"):
    """The reciprocal of each input: κ(x) = 1/x, D = m.

    For `|x|` < ε the pole is bridged by 2x/ε² − x³/ε⁴, equal to 1/x at ±ε in value and slope: values stay within 1.1/ε, and
    zero maps to zero.

    Args:
        eps: ε, the smallest `|x|` with an exact reciprocal, 10⁻⁶ to 1,000, in units of the inputs.

    Source: arXiv 2407.04819, "Identity and Reciprocal Data Expansion".

    Example:
        >>> import torch
        >>> Reciprocal(eps=0.5)(torch.tensor([2.0, -0.5, 0.25, 0.0]), {}).dense()
        tensor([ 0.5000, -2.0000,  1.7500,  0.0000])
    """

    examples = ({}, {"eps": 0.5})

    eps: float = option(0.01, minimum=1e-6, maximum=1e3)

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        return [f"1/{name}" for name in names]

    def heavy_tailed(self) -> bool:
        """Return True: without the bridge, the reciprocal of a normal input has infinite variance."""
        return True

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        values = working_precision(x)
        return DenseFeatures(bounded_ratio(torch.ones_like(values), values, self.eps).to(x.dtype))


@dataclass(frozen=True)
class LinearExpansion(Expansion, name="linear"):
    """A given linear map of the inputs: κ(x) = c·x, c·x C_post or c·C_pre xᵀ, D = m.

    The matrix C is a constant: saved with the model, not trained. Give it in the specification, or later with
    `head.assign("expansion", matrix=…)`; until then C is the identity.

    Args:
        scale: c, not zero; 10⁻¹⁵ to 10¹⁵ in size, so that squares of columns stay within float32.
        side: position of the matrix: `none`: no matrix; `post`: x C, a column of κ for each column of C; `pre`: C xᵀ, a
            column of κ for each row of C.
        matrix: C by rows, m lists of m numbers; needs `side` `post` or `pre`.

    Raises:
        SpecError: the matrix is not m×m, for the m inputs of the head.

    Source: arXiv 2407.04819, "Linear Data Expansion".

    Example:
        >>> import torch
        >>> LinearExpansion(2.0)(torch.tensor([1.0, 10.0]), {}).dense()
        tensor([ 2., 20.])
        >>> tensors = {"matrix": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        >>> LinearExpansion(side="post")(torch.tensor([1.0, 10.0]), tensors).dense()
        tensor([31., 42.])
        >>> LinearExpansion(side="pre")(torch.tensor([1.0, 10.0]), tensors).dense()
        tensor([21., 43.])
    """

    examples = ({}, {"scale": -0.5}, {"scale": 2.0, "side": "post"}, {"side": "pre"})

    scale: float = 1.0
    side: Literal["none", "post", "pre"] = "none"
    matrix: tuple[tuple[float, ...], ...] | None = None

    def check(self) -> None:
        if not 1e-15 <= abs(self.scale) <= 1e15:
            raise SpecError(f"LinearExpansion(scale={self.scale}): scale must be 1e-15 to 1e+15 in size, and not zero")
        if self.matrix is not None and self.side == "none":
            raise SpecError("LinearExpansion(matrix=…, side='none'): choose side='post' or side='pre'")
        rows = len(self.matrix or ())
        if self.matrix is not None and (not rows or any(len(row) != rows for row in self.matrix)):
            lengths = ", ".join(str(len(row)) for row in self.matrix[:8])
            raise SpecError(f"LinearExpansion(matrix=…): expected a square matrix, got rows of {lengths or 'nothing'}")

    def factors(self, in_features: int) -> tuple[int, int]:
        self._check_size(in_features)
        return 1, in_features

    def element_wise(self) -> bool:
        return self.side == "none"

    def params(self, in_features: int) -> Params:
        if self.side == "none":
            return {}
        self._check_size(in_features)
        initial = functools.partial(_constant_matrix, self.matrix)
        return {"matrix": Param((in_features, in_features), initial, trainable=False)}

    def _check_size(self, in_features: int) -> None:
        rows = in_features if self.matrix is None else len(self.matrix)
        if rows != in_features:
            raise SpecError(
                f"LinearExpansion(matrix=…): expected a matrix {in_features}×{in_features} for "
                f"{counted(in_features, 'input')}, got {rows}×{rows}"
            )

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        values = working_precision(x) * self.scale
        if self.side != "none":
            matrix = working_precision(params["matrix"])
            values = F.linear(values, matrix if self.side == "pre" else matrix.mT)
        return DenseFeatures(values.to(x.dtype))


def _constant_matrix(
    rows: tuple[tuple[float, ...], ...] | None, shape: tuple[int, ...], generator: Generator | None
) -> Tensor:
    """Return given rows in float64, or the identity."""
    if rows is None:
        return torch.eye(shape[0], device="cpu")
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
