"""Model zoo: established models as kapsi models, one module or package each, with a builder, converters and parity cases."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

FAMILIES = sorted(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> ModuleType:
    """Import a family on first use: `kp.zoo.kan` costs nothing before."""
    if name in FAMILIES:
        return importlib.import_module(f"kapsi.zoo.{name}")
    raise AttributeError(f"module 'kapsi.zoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return FAMILIES
