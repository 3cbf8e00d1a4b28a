"""The catalogue of data expansions κ, one file a family; a family's public names are those of its `__all__`."""

from kapsi.expansion import (
    adapter,
    combinatorial,
    compose,
    compression,
    density,
    evidence,
    fourier,
    joint,
    kernel,
    orthogonal,
    pair_splines,
    patches,
    potential,
    radial,
    selected,
    simple,
    spline,
    taylor,
    tree,
    trigonometric,
    wavelet,
)
from kapsi.expansion.adapter import *
from kapsi.expansion.base import Expansion
from kapsi.expansion.combinatorial import *
from kapsi.expansion.compose import *
from kapsi.expansion.compression import *
from kapsi.expansion.density import *
from kapsi.expansion.evidence import *
from kapsi.expansion.fourier import *
from kapsi.expansion.joint import *
from kapsi.expansion.kernel import *
from kapsi.expansion.orthogonal import *
from kapsi.expansion.pair_splines import *
from kapsi.expansion.patches import *
from kapsi.expansion.potential import *
from kapsi.expansion.radial import *
from kapsi.expansion.selected import *
from kapsi.expansion.simple import *
from kapsi.expansion.spline import *
from kapsi.expansion.taylor import *
from kapsi.expansion.tree import *
from kapsi.expansion.trigonometric import *
from kapsi.expansion.wavelet import *

# Line by line, in the form that type checkers read.
__all__ = ["Expansion"]
__all__ += adapter.__all__
__all__ += combinatorial.__all__
__all__ += compose.__all__
__all__ += compression.__all__
__all__ += density.__all__
__all__ += evidence.__all__
__all__ += fourier.__all__
__all__ += joint.__all__
__all__ += kernel.__all__
__all__ += orthogonal.__all__
__all__ += pair_splines.__all__
__all__ += patches.__all__
__all__ += potential.__all__
__all__ += radial.__all__
__all__ += selected.__all__
__all__ += simple.__all__
__all__ += spline.__all__
__all__ += taylor.__all__
__all__ += tree.__all__
__all__ += trigonometric.__all__
__all__ += wavelet.__all__
