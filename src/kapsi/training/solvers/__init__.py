"""The ways to lower a loss."""

from kapsi.training.solvers.base import SOLVERS, NotFinite, Report, Solver, State, Task
from kapsi.training.solvers.gradient import LBFGS, SGD, AdamW
from kapsi.training.solvers.levenberg_marquardt import LevenbergMarquardt
from kapsi.training.solvers.ridge import Ridge, reason_not_closed, reason_not_linear

__all__ = [
    "LBFGS",
    "SGD",
    "SOLVERS",
    "AdamW",
    "LevenbergMarquardt",
    "NotFinite",
    "Report",
    "Ridge",
    "Solver",
    "State",
    "Task",
    "reason_not_closed",
    "reason_not_linear",
]
