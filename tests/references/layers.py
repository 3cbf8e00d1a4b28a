"""Reference of layers as an expansion: the layers one after another, of references of their parts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from references.base import Reference, Table

STEPS = {
    "tanh": np.tanh,
    "sigmoid": lambda y: 1 / (1 + np.exp(-y)),
    "silu": lambda y: y / (1 + np.exp(-y)),
}


def layers(f: Any, x: ndarray, t: Any) -> ndarray:
    from references import REFERENCES  # this file is part of the package

    for i, n in enumerate(f.widths):
        layer = f.layers[i % len(f.layers)]
        total = np.zeros((len(x), n))
        for k, head in enumerate(layer.heads):
            part = t["model"]["layers"][str(i)]["heads"][str(k)]
            kappa = REFERENCES["expansion"][head.expansion.name].values(head.expansion, x, part["kappa"])
            factors = head.expansion.factors(x.shape[1])
            psi = REFERENCES["reconciliation"][head.reconciliation.name].values(
                head.reconciliation, part["psi"], n, factors
            )
            pi = REFERENCES["remainder"][head.remainder.name].values(head.remainder, x, part["pi"], n)
            total += kappa @ psi.T + pi + part.get("bias", 0.0)
        for step in layer.output:
            total = STEPS[step.name](total)
        x = total
    return x


EXPANSIONS: Table = {
    "layers": Reference(
        "numpy: the layers in a loop, of the references of their parts", layers, lambda f, m: f.widths[-1]
    )
}
