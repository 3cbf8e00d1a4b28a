"""The catalogue of data expansions κ, one file a family; a family's public names are those of its `__all__`."""

from kapsi.expansion import compose, orthogonal, simple, spline, taylor
from kapsi.expansion.base import Expansion
from kapsi.expansion.compose import *
from kapsi.expansion.orthogonal import *
from kapsi.expansion.simple import *
from kapsi.expansion.spline import *
from kapsi.expansion.taylor import *

__all__ = ["Expansion", *(name for family in (compose, orthogonal, simple, spline, taylor) for name in family.__all__)]
