"""Remainder functions π: Rᵐ → Rⁿ, what completes the layer beside ⟨κ(x), ψ(w)⟩."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.function import Function, Param, Params, Tensors
from kapsi.process import Activation

__all__ = ["IdentityRemainder", "LinearRemainder", "Remainder", "ZeroRemainder"]


class Remainder(Function, role="remainder"):
    """π: a remainder, `(..., m) → (..., n)`."""

    def params(self, in_features: int, out_features: int) -> Params:
        """Return the tensors that π needs."""
        return {}

    @abstractmethod
    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:
        """Return π(x), `(..., n)`."""


@dataclass(frozen=True)
class ZeroRemainder(Remainder, name="zero"):
    """Nothing: π(x) = 0. A head with it adds nothing at all.

    Source: arXiv 2407.04819, "Constant Remainder".

    Example:
        >>> import torch
        >>> ZeroRemainder()(torch.ones(3), {}, 2)
        tensor([0., 0.])
    """

    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:  # noqa: D102
        return x.new_zeros(*x.shape[:-1], out_features)


@dataclass(frozen=True)
class IdentityRemainder(Remainder, name="identity"):
    """The inputs themselves: π(x) = σ(x); needs m = n.

    Args:
        activation: σ, the name of an activation, none by default.

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

    def params(self, in_features: int, out_features: int) -> Params:  # noqa: D102
        if in_features != out_features:
            raise SpecError(
                f"IdentityRemainder: needs as many outputs as inputs, got {in_features} inputs and {out_features} outputs; "
                "use LinearRemainder"
            )
        return {}

    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:  # noqa: D102
        return x if self.activation is None else self.activation(x)


@dataclass(frozen=True)
class LinearRemainder(Remainder, name="linear"):
    """A linear map: π(x) = τ(W σ(x) + b), W `(n, m)`.

    Args:
        before: σ, the name of an activation before the matrix, none by default; `silu` is the base function of a KAN.
        after: τ, the name of an activation after it, none by default.
        bias: whether there is a b.

    Source: arXiv 2407.04819, "Linear Remainder"; W σ(x) is the base function of Kolmogorov–Arnold networks
        (arXiv 2404.19756).

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

    def params(self, in_features: int, out_features: int) -> Params:  # noqa: D102
        matrix = Param((out_features, in_features), in_features**-0.5)
        return {"matrix": matrix, "bias": Param((out_features,), "zeros")} if self.bias else {"matrix": matrix}

    def __call__(self, x: Tensor, params: Tensors, out_features: int) -> Tensor:  # noqa: D102
        inputs = x if self.before is None else self.before(x)
        y = F.linear(inputs, params["matrix"], params["bias"] if self.bias else None)
        return y if self.after is None else self.after(y)
