"""The catalogue of data expansions κ, one file a family."""

from kapsi.expansion.base import Expansion
from kapsi.expansion.compose import Extended, Nested
from kapsi.expansion.orthogonal import Chebyshev
from kapsi.expansion.simple import Identity
from kapsi.expansion.spline import BSpline
from kapsi.expansion.taylor import Taylor

__all__ = ["BSpline", "Chebyshev", "Expansion", "Extended", "Identity", "Nested", "Taylor"]
