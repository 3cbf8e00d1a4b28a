"""Functions of other installed packages: those that name a module in the entry-point group `kapsi.functions`."""

from __future__ import annotations

import functools

__all__ = ["GROUP", "load_installed"]

GROUP = "kapsi.functions"


@functools.cache
def load_installed() -> tuple[str, ...]:
    """Import the modules that installed packages name, once in a process, and return one line for each that fails.

    A name that no imported module registers asks for it, and so does a list of all functions; nothing else does, so that
    a package that is installed costs nothing, and one that is broken stops nobody who does not need it.
    """
    # Its import takes longer than all that is done with it.
    from importlib.metadata import entry_points

    failed = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else entry.value
            reason = " ".join(str(error).split())
            failed.append(f"the functions of package {package!r} cannot be loaded: {type(error).__name__}: {reason}")
    return tuple(failed)
