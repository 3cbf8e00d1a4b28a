"""Fit a table: from a file to a run folder with a model, scores and predictions; and load the folder."""

from kapsi.tables.configuration import *
from kapsi.tables.fitting import *
from kapsi.tables.intervals import *
from kapsi.tables.model import *
from kapsi.tables.planning import *
from kapsi.tables.run_folder import *
from kapsi.tables.scores import *
from kapsi.tables.tuning import *
