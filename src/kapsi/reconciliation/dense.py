"""Reconciliations with a single n × D matrix: full, masked, or constant."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kapsi.derivatives import differentiated_forward
from kapsi.errors import SpecError
from kapsi.function import Param, Params, Submodule, Tensors, option
from kapsi.reconciliation.base import ChangeOfBasis, Reconciliation, listed_divisors, random_mask, require_kept
from kapsi.text import counted
from kapsi.weights import ConstantWeights, DenseWeights, EyeWeights, KroneckerWeights, Weights

__all__ = ["ConstantReconciliation", "Dense", "DropConnect", "Eye", "Masked", "OneReconciliation", "ZeroReconciliation"]


@dataclass(frozen=True)
class Dense(Reconciliation, name="dense", aliases=("identity",)):
    """Every entry is a parameter: ψ(w) = W, l = n·D. The paper's identity reconciliation.

    Source: arXiv 2407.04819, "Identity Parameter Reconciliation".

    Example:
        >>> Dense().count(out_features=4, factors=(3, 5))
        60
    """

    multilinear = True
    linear_rows = "matrix"

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        columns = factors[0] * factors[1]
        return {"matrix": Param((out_features, columns), columns**-0.5)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        return DenseWeights(params["matrix"])

    def rebase(
        self, tensors: Tensors, out_features: int, factors: tuple[int, int], change: ChangeOfBasis
    ) -> tuple[Reconciliation, dict[str, Any]]:
        return self, {"matrix": change.columns(tensors["matrix"])}


@dataclass(frozen=True)
class Masked(Reconciliation, name="masked", aliases=("masking",)):
    """Trained values at random positions, zeros elsewhere: ψ(w) = M ⊙ W, l = round(ratio·n·D).

    Only kept entries have parameters; the mask is a buffer, saved with the model. Set a custom mask with
    `head.assign("reconciliation", mask=…)`: exactly l entries, filled by `entries` row by row. `DropConnect` draws masks anew.

    Args:
        ratio: fraction of entries kept, 0 to 1.

    Source: arXiv 2407.04819, "Masking based Parameter Reconciliation".

    Example:
        >>> Masked(0.25).count(out_features=4, factors=(1, 10))
        10
    """

    examples = ({}, {"ratio": 0.3}, {"ratio": 1.0})
    multilinear = True

    ratio: float = option(0.5, minimum=0.0, maximum=1.0)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        columns = factors[0] * factors[1]
        kept = round(self.ratio * out_features * columns)
        mask = functools.partial(random_mask, kept=kept)
        return {
            "entries": Param((kept,), (out_features / max(kept, 1)) ** 0.5),
            "mask": Param((out_features, columns), mask, trainable=False, dtype=torch.bool),
        }

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        mask, values = params["mask"], params["entries"]
        transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        if (transformed or differentiated_forward()) and values.numel():
            # Torch lacks the forward derivative of the gradient of a masked scatter, and the vmap rule.
            index = (mask.flatten().cumsum(0) - 1).clamp_min(0).reshape(mask.shape)
            return DenseWeights(torch.where(mask, values.flatten()[index], 0))
        return DenseWeights(torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values))

    def validate(self, tensors: Tensors) -> None:
        require_kept(f"Masked(ratio={self.ratio})", "mask", tensors["mask"], tensors["entries"].shape[-1])


@dataclass(frozen=True)
class _Mask(Submodule):
    """The draw of a mask: in training entries are zero with probability p and otherwise divided by 1 − p."""

    p: float

    def build(self, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        return nn.Dropout(self.p)


@dataclass(frozen=True)
class DropConnect(Reconciliation, name="drop_connect", aliases=("redrawn_masking",)):
    """A mask drawn anew in every training pass: ψ(w) = M ⊙ W / ratio, in evaluation ψ(w) = W, l = n·D.

    Each entry of M is 1 with probability `ratio`, otherwise 0, one mask for all rows of a pass. The factor 1/ratio keeps the
    mean: the expected ψ of training is that of evaluation. As dropout, it draws from torch's default generator, which
    `kp.fit` seeds for every step, so resumed runs are equal. `Masked` has one mask for good and fewer parameters.

    Args:
        ratio: probability of keeping an entry, above 0, at most 1; with 1 equal to `Dense`.

    Source: arXiv 2407.04819, "Masking based Parameter Reconciliation"; masks by pass: Wan et al., Regularization of Neural
        Networks using DropConnect (2013).

    Example:
        >>> import kapsi as kp, torch
        >>> head = kp.Head(3, 4, kp.HeadSpec(kp.Identity(), DropConnect(0.25)), seed=0)
        >>> ratios = head.weights().dense() / head.psi["matrix"]
        >>> sorted(set(ratios.flatten().abs().tolist()))
        [0.0, 4.0]
        >>> torch.equal(head.eval().weights().dense()[0], head.psi["matrix"])
        True
    """

    examples = ({}, {"ratio": 0.9})
    linear_rows = "matrix"
    random = True

    ratio: float = option(0.5, minimum=1e-6, maximum=1.0)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        columns = factors[0] * factors[1]
        return {"matrix": Param((out_features, columns), columns**-0.5), "mask": _Mask(1 - self.ratio)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        return DenseWeights(params["mask"](params["matrix"]))

    def rebase(
        self, tensors: Tensors, out_features: int, factors: tuple[int, int], change: ChangeOfBasis
    ) -> tuple[Reconciliation, dict[str, Any]]:
        return self, {"matrix": change.columns(tensors["matrix"])}


@dataclass(frozen=True)
class _Filled(Reconciliation):
    """ψ(w) = c·1: a constant, stored as a buffer for type and device."""

    multilinear = True

    def _constant(self) -> float:
        raise NotImplementedError

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        return {"value": Param((), (self._constant(),), trainable=False)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        return ConstantWeights(params["value"], out_features, factors[0] * factors[1])


@dataclass(frozen=True)
class ConstantReconciliation(_Filled, name="constant", aliases=("constant_c",)):
    """Every entry is the same constant: ψ(w) = c·1, l = 0.

    Args:
        value: c, any finite number; a buffer, saved with the model.

    Source: arXiv 2407.04819, "Constant Parameter Reconciliation".

    Example:
        >>> ConstantReconciliation(2.0).count(out_features=4, factors=(1, 10))
        0
    """

    examples = ({}, {"value": -0.5})

    value: float = 1.0

    def _constant(self) -> float:
        return self.value


@dataclass(frozen=True)
class ZeroReconciliation(_Filled, name="zero"):
    """Every entry is zero: ψ(w) = 0, l = 0; a head reduces to its remainder and bias.

    Source: arXiv 2407.04819, "Constant Parameter Reconciliation" (zero reconciliation).

    Example:
        >>> ZeroReconciliation().count(out_features=4, factors=(1, 10))
        0
    """

    def _constant(self) -> float:
        return 0.0


@dataclass(frozen=True)
class OneReconciliation(_Filled, name="one"):
    """Every entry equals 1: ψ(w) = 1, l = 0; every output is the sum of κ's columns.

    Source: arXiv 2407.04819, "Constant Parameter Reconciliation" (one reconciliation).

    Example:
        >>> OneReconciliation().count(out_features=4, factors=(1, 10))
        0
    """

    def _constant(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Eye(Reconciliation, name="eye", aliases=("constant_eye",)):
    """Columns of κ passed on: ψ(w) = I with n = D, or in blocks I ⊗ 1ᵀ, each output the sum of D/n columns; l = 0.

    Args:
        blocks: sum the i-th block of D/n columns into output i, instead of passing column i on; n must divide D.

    Raises:
        SpecError: n ≠ D, or n does not divide D; the message gives the sizes allowed.

    Source: arXiv 2407.04819, "Constant Parameter Reconciliation" (constant eye reconciliation); blocks sum the
        log-densities of a class in naive Bayes.

    Example:
        >>> import kapsi as kp, torch
        >>> kp.Head(3, 3, kp.HeadSpec(kp.Identity(), Eye()))(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
    """

    examples = ({"blocks": True}, {})
    multilinear = True

    blocks: bool = False

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        columns = factors[0] * factors[1]
        if self.blocks and columns % out_features:
            raise SpecError(
                f"Eye(blocks=True): the number of outputs must divide the {counted(columns, 'column')} of κ, got {out_features:,}; "
                f"{listed_divisors(columns, out_features)}"
            )
        if not self.blocks and columns != out_features:
            raise SpecError(
                f"Eye: needs as many outputs as κ has columns, got {counted(out_features, 'output')} and "
                f"{counted(columns, 'column')}; "
                "Eye(blocks=True) adds up blocks of columns"
            )
        return {"value": Param((), (1.0,), trainable=False)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        value, width = params["value"], factors[0] * factors[1] // out_features
        eye = EyeWeights(value, out_features)
        return KroneckerWeights(eye, ConstantWeights(torch.ones_like(value), 1, width)) if self.blocks else eye
