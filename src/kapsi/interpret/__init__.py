"""What a fitted model does: effects of columns, importances, contributions of rows, formulas, dependency graphs, pruning.

One file a topic, loaded at first use: `kapsi fit` and `import kapsi` need none of them.
"""

from __future__ import annotations

import importlib
from typing import Any

HOMES: dict[str, str] = {
    "FUNCTIONS": "edge_fits",
    "Attribution": "edges",
    "Contributions": "shapley",
    "DependencyGraph": "graphs",
    "EdgeFormula": "edge_fits",
    "EdgeFormulas": "edge_fits",
    "Edges": "edges",
    "Effect": "effect",
    "FormulaRow": "pareto",
    "FormulaTable": "pareto",
    "Importance": "importance",
    "ModelFormula": "formulas",
    "PairEffect": "importance",
    "Pruned": "pruning",
    "Simplified": "simplification",
    "SimplifiedEdge": "simplification",
    "attribution": "edges",
    "contributions": "shapley",
    "edge_formulas": "edge_fits",
    "edge_functions": "edges",
    "effects": "effect",
    "formula": "formulas",
    "importances": "importance",
    "interactions": "importance",
    "prune": "pruning",
    "search_formula": "search",
    "short_formulas": "pareto",
    "simplify": "simplification",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    """Import the module of a public name at first use."""
    if name in HOMES:
        return getattr(importlib.import_module(f"kapsi.interpret.{HOMES[name]}"), name)
    raise AttributeError(f"module 'kapsi.interpret' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(HOMES)
