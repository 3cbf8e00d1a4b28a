"""Functions for kapsi: an expansion, a reconciliation, a loss, a metric and a solver, a file each."""

from kapsi_steps.adagrad import Adagrad
from kapsi_steps.coverage import Coverage
from kapsi_steps.outer import Outer
from kapsi_steps.pinball import Pinball
from kapsi_steps.soft_steps import SoftSteps

__all__ = ["Adagrad", "Coverage", "Outer", "Pinball", "SoftSteps"]
