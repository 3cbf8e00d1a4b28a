"""Fit a table: from a file to a run folder with a model, scores and predictions; and load the folder."""

from kapsi.training.tables.configuration import RunConfig, TableConfig, default_spec, read_problem
from kapsi.training.tables.fitting import FitReport, fit_problem, fit_table
from kapsi.training.tables.model import TableModel
from kapsi.training.tables.run_folder import load_run
from kapsi.training.tables.scores import Scores

__all__ = [
    "FitReport",
    "RunConfig",
    "Scores",
    "TableConfig",
    "TableModel",
    "default_spec",
    "fit_problem",
    "fit_table",
    "load_run",
    "read_problem",
]
