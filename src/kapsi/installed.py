"""Modules that register functions: kapsi's own, and those of other installed packages, the entry points `kapsi.functions`."""

from __future__ import annotations

import functools
import importlib
import os
import sys

GROUP = "kapsi.functions"
CONSENT = "KAPSI_PLUGINS"
"""Environment variable with the packages whose functions a file may name, separated by commas, or `all`."""


def load_own() -> None:
    """Import the whole catalogue of kapsi, for a program that began with a single module."""
    importlib.import_module("kapsi.public")


def load_installed(*, all_of_them: bool = False) -> tuple[str, ...]:
    """Import the modules of installed packages with the user's consent; return a line for each package left out or failing.

    Consent is the environment variable `KAPSI_PLUGINS`, or an import in Python. A name in a file of unknown origin imports
    nothing else, and a broken package disturbs nobody else.

    Args:
        all_of_them: import all packages, for a list of all functions.
    """
    load_own()
    return _load("all" if all_of_them else os.environ.get(CONSENT, ""))


@functools.cache
def _load(consent: str) -> tuple[str, ...]:
    # A slow import.
    from importlib.metadata import entry_points

    allowed = {word.strip() for word in consent.split(",")}
    lines = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        package = entry.dist.name if entry.dist is not None else entry.value
        if not allowed & {package, "all"}:
            if entry.module not in sys.modules:
                advice = f"set the environment variable {CONSENT}={package}, or import {entry.module} in Python"
                lines.append(f"the functions of package {package!r} are not imported without consent: {advice}")
            continue
        try:
            entry.load()
        except Exception as error:
            reason = " ".join(str(error).split())
            lines.append(f"the functions of package {package!r} cannot be loaded: {type(error).__name__}: {reason}")
    return tuple(lines)
