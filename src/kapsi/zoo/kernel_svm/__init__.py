"""Support vector machines as one layer: κ is the kernel's feature map, or the kernel at centers; ψ dense with a bias; π = 0.

Outputs are decision values. Two classes have one output, positive for class 1. More classes have n(n − 1)/2, for the pairs (0, 1),
(0, 2), …, (n − 2, n − 1), positive for the first class of the pair; `one_vs_rest` and `vote` convert pair values to class values
and decisions. The output of regression is the prediction.
"""

from __future__ import annotations

from kapsi.zoo.kernel_svm.convert import from_sklearn
from kapsi.zoo.kernel_svm.dual import DualOptions, DualProgress, solve_dual
from kapsi.zoo.kernel_svm.model import one_vs_rest, spec, support, vote
from kapsi.zoo.kernel_svm.parity import PARITY
from kapsi.zoo.kernel_svm.training import fit_dual, fit_primal

__all__ = [
    "PARITY",
    "DualOptions",
    "DualProgress",
    "fit_dual",
    "fit_primal",
    "from_sklearn",
    "one_vs_rest",
    "solve_dual",
    "spec",
    "support",
    "vote",
]
