"""Model zoo: established models as kapsi models, one module or package each, with a builder, converters and parity cases."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

FAMILIES = sorted(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    """Import a family on first use: `kp.zoo.kan` costs nothing before. `from_sklearn` is that of whole pipelines."""
    if name == "from_sklearn":
        return importlib.import_module("kapsi.zoo.pipeline").from_sklearn
    if name in FAMILIES:
        return importlib.import_module(f"kapsi.zoo.{name}")
    raise AttributeError(f"module 'kapsi.zoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*FAMILIES, "from_sklearn"]
