"""Expanded inputs κ(x) as small immutable structures."""

from kapsi.features.base import *
from kapsi.features.leaves import *
from kapsi.features.pairs import *
from kapsi.features.products import *
from kapsi.features.recomputed import *
from kapsi.features.sparse import *
