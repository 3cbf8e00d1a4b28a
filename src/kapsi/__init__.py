"""kapsi: deep function learning with Reconciled Polynomial Networks, y = ⟨κ(x), ψ(w)⟩ + π(x)."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

FUNCTIONS = ("calibrate", "explain", "refine")
"""Public functions in modules of the same name."""

if TYPE_CHECKING:
    # Type checkers follow no stars through a second module.
    from kapsi.expansion import Expansion as Expansion
    from kapsi.expansion.adapter import *
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
    from kapsi.public import *
    from kapsi.public import __all__ as __all__
    from kapsi.reconciliation import Reconciliation as Reconciliation
    from kapsi.reconciliation.dense import *
    from kapsi.reconciliation.hypernet import *
    from kapsi.reconciliation.kronecker import *
    from kapsi.reconciliation.low_rank import *
    from kapsi.remainder import *
    from kapsi.training.losses import *
else:

    def __getattr__(name: str) -> Any:
        """Load the public names, and torch, at first use: `kapsi --help` needs neither."""
        public = importlib.import_module("kapsi.public")
        known = vars(public)  # while the public names are being loaded, not all of them; a submodule is none
        if name not in known and name not in known.get("ESTIMATORS", ()):
            raise AttributeError(f"module 'kapsi' has no attribute {name!r}")
        globals()[name] = getattr(public, name)
        return globals()[name]


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the import of the module `kapsi.calibrate` does not hide the function."""
        if not (name in FUNCTIONS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("kapsi.public").__all__})
