"""Kolmogorov–Arnold networks: B-splines of each input, a dense ψ, and W·SiLU(x) as remainder.

A layer is y_o = Σ_i φ_oi(x_i) with φ_oi(x) = Σ_g c_oig B_g(x) + w_oi SiLU(x): an edge for each pair of input and output.
"""

from __future__ import annotations

from kapsi.zoo.kan.convert import from_pykan
from kapsi.zoo.kan.edges import Attribution, Edges, attribution, edge_functions
from kapsi.zoo.kan.grid import update_grid
from kapsi.zoo.kan.model import spec
from kapsi.zoo.kan.parity import PARITY
from kapsi.zoo.kan.pruning import prune
from kapsi.zoo.kan.symbolic import FUNCTIONS, EdgeFormula, Formulas, formulas

__all__ = [
    "FUNCTIONS",
    "PARITY",
    "Attribution",
    "EdgeFormula",
    "Edges",
    "Formulas",
    "attribution",
    "edge_functions",
    "formulas",
    "from_pykan",
    "prune",
    "spec",
    "update_grid",
]
