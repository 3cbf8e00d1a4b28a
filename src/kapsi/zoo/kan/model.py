"""Specification of Kolmogorov–Arnold networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kapsi.expansion.spline import BSpline
from kapsi.reconciliation.dense import Dense
from kapsi.remainder import LinearRemainder, Remainder, ZeroRemainder
from kapsi.spec import ModelSpec, rpn


def spec(
    widths: Sequence[int | None],
    intervals: int = 5,
    degree: int = 3,
    *,
    low: float = -1.0,
    high: float = 1.0,
    knots: str | tuple[float, ...] = "uniform",
    extrapolation: str = "extended",
    base: str | None = "silu",
    bias: bool = False,
) -> ModelSpec:
    """Return the specification of a Kolmogorov–Arnold network.

    Each layer is κ = B-spline, ψ = dense, π(x) = W σ(x): y_o = Σ_i (Σ_g c_oig B_g(x_i) + w_oi σ(x_i)).

    Args:
        widths: numbers of nodes, from the inputs to the outputs.
        intervals, degree, low, high, knots, extrapolation: options of the splines, see `BSpline`. `extended` is the formula of
            the KAN paper: splines end at their knots; only the base function continues.
        base: σ, the name of an activation; None: no remainder.
        bias: add a bias to each node.

    Source: arXiv 2404.19756; arXiv 2407.04819, "KAN".

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.zoo import kan
        >>> model = kp.Model(kan.spec([2, 5, 1], intervals=3), seed=0)
        >>> sum(parameter.numel() for parameter in model.parameters())     # 15 edges of 6 functions and a base weight
        105
        >>> edges = kp.interpret.edge_functions(model, torch.zeros(4, 2))
        >>> [tuple(layer.values.shape) for layer in edges]
        [(4, 5, 2), (4, 1, 5)]
    """
    options: dict[str, Any] = {"intervals": intervals, "degree": degree, "low": low, "high": high, "knots": knots}
    splines = BSpline(extrapolation=extrapolation, **options)  # type: ignore[arg-type]
    remainder: Remainder = ZeroRemainder() if base is None else LinearRemainder(before=base)  # type: ignore[arg-type]
    return rpn(widths, splines, Dense(), remainder, bias=bias)
