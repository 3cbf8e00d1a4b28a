"""Support vector machines as one layer: κ is the kernel's feature map, or the kernel against centers; ψ dense with a bias; π zero.

Outputs are decision values. Two classes have one, positive for class 1. More classes have n(n − 1)/2, for the pairs (0, 1),
(0, 2), …, (n − 2, n − 1), positive for the first of the pair; `one_vs_rest` and `vote` make values and decisions for the classes
of them. Regression has one, the prediction.
"""

from __future__ import annotations

from kapsi.zoo.kernel_svm.machine import fit_dual, fit_primal, from_sklearn, one_vs_rest, spec, support, vote
from kapsi.zoo.kernel_svm.parity import PARITY

__all__ = [
    "PARITY",
    "fit_dual",
    "fit_primal",
    "from_sklearn",
    "one_vs_rest",
    "spec",
    "support",
    "vote",
]
