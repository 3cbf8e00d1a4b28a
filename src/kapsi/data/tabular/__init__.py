"""Tables from CSV and Parquet files: reading, typing, standardizing, writing, folds."""

from kapsi.data.tabular.preprocess import CategoryColumn, NumberColumn, Preprocessing, TargetScale
from kapsi.data.tabular.read import read_table
from kapsi.data.tabular.split import folds, split
from kapsi.data.tabular.target import TableProblem, make_problem, target_of
from kapsi.data.tabular.types import Column, Label, Table
from kapsi.data.tabular.write import csv_text, write_table

__all__ = [
    "CategoryColumn",
    "Column",
    "Label",
    "NumberColumn",
    "Preprocessing",
    "Table",
    "TableProblem",
    "TargetScale",
    "csv_text",
    "folds",
    "make_problem",
    "read_table",
    "split",
    "target_of",
    "write_table",
]
