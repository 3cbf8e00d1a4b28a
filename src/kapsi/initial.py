"""How large what ⟨κ(x), ψ(w)⟩ gives is at initial values, measured: what ψ is scaled by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kapsi.contraction import contract_sum
from kapsi.expansion.base import Expansion, clamp_to_domain, rms
from kapsi.features import Features
from kapsi.weights import Weights

__all__ = ["output_spread", "probe"]

PROBE_SEED = 0x6B617073
"""Of the inputs that are measured with: none that a caller is likely to give, since equal seeds draw equal numbers, and
weights that equal the inputs seem larger than they are."""


def probe(expansion: Expansion, in_features: int, out_features: int) -> Tensor:
    """Return standard normal inputs `(rows, m)`, those of a heavy-tailed expansion moved into its domain.

    The same whenever and wherever, float32 on the CPU, and without a draw from the caller's generator.
    """
    # Rows enough for a good estimate, and few where each is wide: at most 2²¹ values of κ and 2²⁷ multiplications.
    columns = math.prod(expansion.factors(in_features))
    enough = max(1024, 8192 // in_features)
    rows = min(enough, 2**21 // max(in_features, columns), 2**27 // (columns * out_features))
    generator = torch.Generator().manual_seed(PROBE_SEED)
    x = torch.randn(max(8, rows), in_features, generator=generator, dtype=torch.float32, device="cpu")
    return clamp_to_domain(expansion, x)


def output_spread(expansion: Expansion, features: Features, weights: Weights) -> float:
    """Return the spread of Σ_c ⟨κ(x), ψ(w_c)⟩; that of κ where it is nothing, and one where that is nothing.

    Measured on the outputs and not on κ alone: a product of a few random factors is seldom as large as its expectation.
    """
    measured = rms(expansion, contract_sum(features, weights))
    # Rows of ψ have a norm of about one. An output far below that is nothing but rounding, as of the sum of a basis
    # that adds up to a constant, after a layer norm.
    # Of a heavy-tailed κ the middle row counts, as the middle half of the outputs does.
    norms = features.square_norm().double().flatten() / features.columns
    expected = float((norms.median() if expansion.heavy_tailed() else norms.mean()).sqrt())
    if not math.isfinite(measured) or measured <= 1e-5 * expected:
        measured = expected
    return measured if math.isfinite(measured) and measured > 0 else 1.0
