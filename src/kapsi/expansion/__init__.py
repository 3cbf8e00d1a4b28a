"""The catalogue of data expansions κ, one file a family; a family's public names are those of its `__all__`."""

from kapsi.expansion import (
    adapter,
    combinatorial,
    compose,
    density,
    fourier,
    kernel,
    orthogonal,
    radial,
    simple,
    spline,
    taylor,
    trigonometric,
    wavelet,
)
from kapsi.expansion.adapter import *
from kapsi.expansion.base import Expansion
from kapsi.expansion.combinatorial import *
from kapsi.expansion.compose import *
from kapsi.expansion.density import *
from kapsi.expansion.fourier import *
from kapsi.expansion.kernel import *
from kapsi.expansion.orthogonal import *
from kapsi.expansion.radial import *
from kapsi.expansion.simple import *
from kapsi.expansion.spline import *
from kapsi.expansion.taylor import *
from kapsi.expansion.trigonometric import *
from kapsi.expansion.wavelet import *

FAMILIES = (
    adapter,
    combinatorial,
    compose,
    density,
    fourier,
    kernel,
    orthogonal,
    radial,
    simple,
    spline,
    taylor,
    trigonometric,
    wavelet,
)

__all__ = ["Expansion", *(name for family in FAMILIES for name in family.__all__)]
