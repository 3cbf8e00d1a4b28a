"""Laws that every registered function obeys, for third-party functions as well as for kapsi's own tests.

A registered function is tested through its `examples`, so a new class needs no new test::

    kapsi.testing.check(MyExpansion)         # every law on every example
    kapsi.testing.check_pairs(MyExpansion)   # against every registered reconciliation

A violated law raises an AssertionError with the name of the law and the case.
"""

from kapsi.testing import conventions, functions, pairs, roles
from kapsi.testing.cases import examples_of, inputs, instances, layer_with, model_with
from kapsi.testing.registry import LAWS, Law, check, check_pairs, has_structure, law, pair_matters
from kapsi.testing.sizes import WatchSizes

__all__ = [
    "LAWS",
    "Law",
    "WatchSizes",
    "check",
    "check_pairs",
    "examples_of",
    "has_structure",
    "inputs",
    "instances",
    "law",
    "layer_with",
    "model_with",
    "pair_matters",
]
