"""Independent references: what each function says, from NumPy, SciPy and scikit-learn alone.

One file a family; every entry stands under the registered name. A registered function without one fails a test.
"""

from __future__ import annotations

import importlib
import pkgutil

from references.base import Reference, Table

ROLES = {
    "expansion": "EXPANSIONS",
    "reconciliation": "RECONCILIATIONS",
    "remainder": "REMAINDERS",
    "fusion": "FUSIONS",
    "process": "PROCESSES",
}
REFERENCES: dict[str, Table] = {role: {} for role in ROLES}
"""By role and registered name; the files of this package are found by themselves."""

for _module in pkgutil.iter_modules(__path__):
    if _module.name.startswith("_"):
        continue
    _file = importlib.import_module(f"references.{_module.name}")
    for _role, _attribute in ROLES.items():
        for _name, _reference in getattr(_file, _attribute, {}).items():
            if _name in REFERENCES[_role]:
                raise ValueError(f"two references for the {_role} {_name!r}")
            REFERENCES[_role][_name] = _reference

__all__ = ["REFERENCES", "Reference", "Table"]
