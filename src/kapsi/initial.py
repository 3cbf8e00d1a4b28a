"""The measured size of ⟨κ(x), ψ(w)⟩ at initial values, the divisor of ψ."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kapsi.contraction import contract_sum
from kapsi.expansion.base import Expansion, clamp_to_domain, rms
from kapsi.features import Features
from kapsi.weights import Weights

PROBE_SEED = 0x6B617073
"""Seed of the inputs of the measurement, unlikely to be a caller's: equal seeds draw weights equal to the inputs."""


def probe(expansion: Expansion, in_features: int, out_features: int) -> Tensor:
    """Return standard normal inputs `(rows, m)`, clamped to the domain of a heavy-tailed expansion.

    Always the same numbers, float32 on the CPU; the caller's generator is not used.
    """
    # Fewer rows for a wide κ: at most 2²¹ values of κ and 2²⁷ multiplications.
    columns = math.prod(expansion.factors(in_features))
    wanted = max(1024, 8192 // in_features)
    rows = min(wanted, 2**21 // max(in_features, columns), 2**27 // (columns * out_features))
    generator = torch.Generator().manual_seed(PROBE_SEED)
    x = torch.randn(max(8, rows), in_features, generator=generator, dtype=torch.float32, device="cpu")
    return clamp_to_domain(expansion, x)


def output_rms(expansion: Expansion, features: Features, weights: Weights) -> float:
    """Return the RMS of Σ_c ⟨κ(x), ψ(w_c)⟩; fall back to the RMS of κ if it vanishes, then to 1.

    Outputs are measured: a product of a few random factors is seldom as large as its expectation.
    """
    measured = rms(expansion, contract_sum(features, weights))
    # Rows of ψ have a norm of about one. An output far below is rounding: of a basis with a constant sum, after a layer norm.
    # For heavy-tailed κ use the median row, as `rms` uses the middle half of the outputs.
    norms = features.square_norm().double().flatten() / features.columns
    expected = float((norms.median() if expansion.heavy_tailed() else norms.mean()).sqrt())
    if not math.isfinite(measured) or measured <= 1e-5 * expected:
        measured = expected
    return measured if math.isfinite(measured) and measured > 0 else 1.0
