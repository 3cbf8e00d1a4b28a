"""Kolmogorov–Arnold networks: B-splines of each input, a dense ψ, and W·SiLU(x) as remainder.

A layer is y_o = Σ_i φ_oi(x_i) with φ_oi(x) = Σ_g c_oig B_g(x) + w_oi SiLU(x): an edge for each pair of input and output. Edges,
their formulas and pruning are in `kapsi.interpret`, for networks of any univariate functions.
"""

from __future__ import annotations

from kapsi.zoo.kan.convert import from_pykan
from kapsi.zoo.kan.grid import update_grid
from kapsi.zoo.kan.model import spec
from kapsi.zoo.kan.parity import PARITY

__all__ = ["PARITY", "from_pykan", "spec", "update_grid"]
