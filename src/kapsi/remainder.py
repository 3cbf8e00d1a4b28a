"""Remainder functions π: Rᵐ → Rⁿ, the term of a layer added to ⟨κ(x), ψ(w)⟩."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.contraction import contract_sum
from kapsi.errors import SpecError
from kapsi.expansion import Expansion, Taylor
from kapsi.features import features_of
from kapsi.function import Function, Param, Params, Tensors
from kapsi.initial import output_rms, probe
from kapsi.process import Activation
from kapsi.reconciliation import LowRank, Reconciliation
from kapsi.text import counted
from kapsi.weights import DenseWeights

__all__ = [
    "ConstantRemainder",
    "ExpansionRemainder",
    "IdentityRemainder",
    "LinearRemainder",
    "Remainder",
    "ZeroRemainder",
]


class Remainder(Function, role="remainder"):
    """π: a remainder, `(..., m) → (..., n)`."""

    @property
    def multilinear(self) -> bool:
        """Whether π is affine in each trainable tensor, the others fixed, as `ridge` requires.

        False by default; a subclass declares `multilinear = True`.
        """
        return False

    def params(self, in_features: int, out_features: int) -> Params:
        """Return the declared tensors."""
        return {}

    def takes_sparse(self) -> bool:
        """Return whether `torch.sparse_csr` inputs are allowed; `__call__` then checks the layout."""
        return False

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return new values for some of the tensors, as `Expansion.calibrate`."""
        return {}

    def calibrate_hidden(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return new values as `calibrate`, for inputs that move during training, as `Expansion.calibrate_hidden`."""
        return self.calibrate(x, params, y)

    def scale(self, params: nn.Module, in_features: int, out_features: int, gain: float) -> None:
        """Multiply π by a positive gain in place, through freshly drawn trainable tensors."""
        for tensor in params.parameters():
            tensor.mul_(gain)

    @abstractmethod
    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:
        """Return π(x), `(..., n)`."""


@dataclass(frozen=True)
class ZeroRemainder(Remainder, name="zero"):
    """No remainder: π(x) = 0.

    Source: arXiv 2407.04819, "Constant Remainder".

    Example:
        >>> import torch
        >>> ZeroRemainder()(torch.ones(3), {}, 2)
        tensor([0., 0.])
    """

    def takes_sparse(self) -> bool:
        return True

    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:
        return torch.zeros(*x.shape[:-1], out_features, dtype=x.dtype, device=x.device)


@dataclass(frozen=True)
class ConstantRemainder(Remainder, name="constant"):
    """Constant outputs for all inputs: π(x) = c, c `(n,)`.

    The constants are a buffer, saved with the model; set a constant for each output with `head.assign("remainder",
    value=…)`.

    Args:
        value: initial value of all entries of c, any finite number.

    Source: arXiv 2407.04819, "Constant Remainder".

    Example:
        >>> import torch
        >>> ConstantRemainder()(torch.ones(5, 3), {"value": torch.tensor([0.5, 2.0])}, 2)[0]
        tensor([0.5000, 2.0000])
    """

    examples = ({}, {"value": -2.5})

    value: float = 1.0

    def params(self, in_features: int, out_features: int) -> Params:
        return {"value": Param((out_features,), (self.value,), trainable=False)}

    def takes_sparse(self) -> bool:
        return True

    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:
        constant: Tensor = params["value"]
        return constant.expand(*x.shape[:-1], out_features)


@dataclass(frozen=True)
class IdentityRemainder(Remainder, name="identity"):
    """The inputs themselves: π(x) = σ(x); needs m = n.

    Args:
        activation: σ, the name of an activation; None: σ(x) = x.

    Raises:
        SpecError: m ≠ n.

    Source: arXiv 2407.04819, "Identity Remainder".

    Example:
        >>> import torch
        >>> IdentityRemainder("relu")(torch.tensor([-1.0, 2.0]), {}, 2)
        tensor([0., 2.])
    """

    examples = ({}, {"activation": "tanh"})

    activation: Activation | None = None

    def params(self, in_features: int, out_features: int) -> Params:
        if in_features != out_features:
            raise SpecError(
                f"IdentityRemainder: needs as many outputs as inputs, got {counted(in_features, 'input')} and "
                f"{counted(out_features, 'output')}; "
                "use LinearRemainder"
            )
        return {}

    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:
        return x if self.activation is None else self.activation(x)


@dataclass(frozen=True)
class LinearRemainder(Remainder, name="linear"):
    """A linear map: π(x) = τ(W σ(x) + b), W `(n, m)`.

    Args:
        before: σ, the name of an activation before the matrix; None: identity; `silu` is the base function of a KAN.
        after: τ, the name of an activation after the matrix; None: identity.
        bias: include b.

    Source: arXiv 2407.04819, "Linear Remainder"; W σ(x) is the base function of Kolmogorov–Arnold networks (arXiv
        2404.19756).

    Example:
        >>> import torch
        >>> x, w = torch.tensor([-1.0, 2.0]), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
        >>> LinearRemainder(before="relu")(x, {"matrix": w}, 2)
        tensor([ 2., -2.])
        >>> LinearRemainder(after="relu")(x, {"matrix": w}, 2)
        tensor([1., 0.])
    """

    examples = ({}, {"before": "silu"}, {"after": "tanh", "bias": True})

    before: Activation | None = None
    after: Activation | None = None
    bias: bool = False

    @property
    def multilinear(self) -> bool:
        return self.after is None

    def params(self, in_features: int, out_features: int) -> Params:
        matrix = Param((out_features, in_features), in_features**-0.5)
        return {"matrix": matrix, "bias": Param((out_features,), "zeros")} if self.bias else {"matrix": matrix}

    def takes_sparse(self) -> bool:
        return self.before is None

    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:
        inputs = x if self.before is None else self.before(x)
        bias = params["bias"] if self.bias else None
        if x.layout == torch.strided:
            y = F.linear(inputs, params["matrix"], bias)
        else:
            y = contract_sum(features_of(inputs), DenseWeights(params["matrix"]), bias)
        return y if self.after is None else self.after(y)


@dataclass(frozen=True)
class ExpansionRemainder(Remainder, name="expansion", aliases=("complementary_expansion",)):
    """Another head: π(x) = ⟨κ′(x), ψ′(w′)⟩ + π′(x).

    Args:
        expansion: κ′, also calibrated by `kapsi.calibrate`.
        reconciliation: the reconciliation ψ′, with initial values scaled as in a head.
        remainder: π′, zero by default.

    Source: arXiv 2407.04819, "Complementary Expansion based Remainder".

    Example:
        >>> import kapsi as kp, torch
        >>> pi = ExpansionRemainder(kp.Chebyshev(3), kp.Dense())
        >>> kp.Head(2, 4, kp.HeadSpec(kp.Taylor(2), kp.LowRank(1), pi))(torch.ones(2)).shape
        torch.Size([4])
    """

    examples = (
        {},
        {"expansion": "b_spline", "reconciliation": "dense", "remainder": {"kind": "linear", "bias": True}},
        {"expansion": "identity", "reconciliation": "kronecker", "remainder": {"kind": "expansion"}},
    )

    expansion: Expansion = Taylor(2)
    reconciliation: Reconciliation = LowRank(2)
    remainder: Remainder = ZeroRemainder()

    def params(self, in_features: int, out_features: int) -> Params:
        return {
            "expansion": self.expansion.params(in_features),
            "reconciliation": self.reconciliation.params(out_features, self.expansion.factors(in_features)),
            "remainder": self.remainder.params(in_features, out_features),
        }

    def takes_sparse(self) -> bool:
        return self.expansion.takes_sparse() and self.remainder.takes_sparse()

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {
            "expansion": self.expansion.calibrate(x, params["expansion"], y),
            "remainder": self.remainder.calibrate(x, params["remainder"], y),
        }

    def calibrate_hidden(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {
            "expansion": self.expansion.calibrate_hidden(x, params["expansion"], y),
            "remainder": self.remainder.calibrate_hidden(x, params["remainder"], y),
        }

    def validate(self, tensors: Tensors) -> None:
        for name in ("expansion", "reconciliation", "remainder"):
            getattr(self, name).validate(tensors[name])

    def scale(self, params: nn.Module, in_features: int, out_features: int, gain: float) -> None:
        parts: Any = params
        self.remainder.scale(parts["remainder"], in_features, out_features, gain)
        weights: list[Tensor] = list(parts["reconciliation"].parameters())
        if weights:
            heavy = self.expansion.heavy_tailed()
            precision = torch.float64 if heavy else torch.promote_types(weights[0].dtype, torch.float32)
            kappa, psi = (copy.deepcopy(parts[name]).to(precision) for name in ("expansion", "reconciliation"))
            x = probe(self.expansion, in_features, out_features).to(weights[0].device, precision)
            weights_of_psi = self.reconciliation(psi.eval(), out_features, self.expansion.factors(in_features))
            size = output_rms(self.expansion, self.expansion.clamped()(x, kappa), weights_of_psi)
            self.reconciliation.scale(weights, gain / size)

    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:
        factors = self.expansion.factors(x.shape[-1])
        weights = self.reconciliation(params["reconciliation"], out_features, factors)
        y = contract_sum(self.expansion(x, params["expansion"]), weights)
        if isinstance(self.remainder, ZeroRemainder):
            return y
        return y + self.remainder(x, params["remainder"], out_features)
