"""Fit a table: from a file to a run folder with a model, scores and predictions; and load the folder."""

from kapsi.training.tables.configuration import *
from kapsi.training.tables.fitting import *
from kapsi.training.tables.model import *
from kapsi.training.tables.run_folder import *
from kapsi.training.tables.scores import *
