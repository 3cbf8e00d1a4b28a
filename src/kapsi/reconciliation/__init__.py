"""The catalogue of parameter reconciliations ψ, one file a family; a family's public names are those of its `__all__`."""

from kapsi.reconciliation import dense, hypernet, kronecker, low_rank
from kapsi.reconciliation.base import Reconciliation
from kapsi.reconciliation.dense import *
from kapsi.reconciliation.hypernet import *
from kapsi.reconciliation.kronecker import *
from kapsi.reconciliation.low_rank import *

# Line by line, in the form that type checkers read.
__all__ = ["Reconciliation"]
__all__ += dense.__all__
__all__ += hypernet.__all__
__all__ += kronecker.__all__
__all__ += low_rank.__all__
