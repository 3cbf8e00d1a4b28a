"""Solvers: ways to lower a loss, one file each."""

from kapsi.training.solvers.adamw import AdamW
from kapsi.training.solvers.base import NotFinite, Report, Solver, SolverRun, State, Task
from kapsi.training.solvers.lbfgs import LBFGS
from kapsi.training.solvers.levenberg_marquardt import LevenbergMarquardt
from kapsi.training.solvers.mini_batch import MiniBatch
from kapsi.training.solvers.ridge import Ridge, reason_not_closed, reason_not_linear
from kapsi.training.solvers.sgd import SGD

__all__ = [
    "LBFGS",
    "SGD",
    "AdamW",
    "LevenbergMarquardt",
    "MiniBatch",
    "NotFinite",
    "Report",
    "Ridge",
    "Solver",
    "SolverRun",
    "State",
    "Task",
    "reason_not_closed",
    "reason_not_linear",
]
