"""Tables from CSV and Parquet files: reading, typing, standardizing, writing, folds."""

from kapsi.data.tabular.batches import *
from kapsi.data.tabular.encoders import *
from kapsi.data.tabular.frames import *
from kapsi.data.tabular.preprocess import *
from kapsi.data.tabular.read import *
from kapsi.data.tabular.reading import *
from kapsi.data.tabular.split import *
from kapsi.data.tabular.target import *
from kapsi.data.tabular.target_scale import *
from kapsi.data.tabular.types import *
from kapsi.data.tabular.write import *
