"""The catalogue of parameter reconciliations ψ, one file a family."""

from kapsi.reconciliation.base import Reconciliation
from kapsi.reconciliation.dense import ConstantReconciliation, Dense, Masked
from kapsi.reconciliation.kronecker import DualLowRankKronecker, Kronecker
from kapsi.reconciliation.low_rank import LowRank

__all__ = [
    "ConstantReconciliation",
    "Dense",
    "DualLowRankKronecker",
    "Kronecker",
    "LowRank",
    "Masked",
    "Reconciliation",
]
