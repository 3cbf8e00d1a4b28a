"""Functions of other installed packages, registered by the entry-point group `kapsi.functions`."""

from __future__ import annotations

import functools

GROUP = "kapsi.functions"


@functools.cache
def load_installed() -> tuple[str, ...]:
    """Import the modules named by installed packages, once in a process; return a line for each failure.

    Called for unknown names and for lists of all functions only: an installed package costs nothing until needed, and a
    broken package disturbs nobody else.
    """
    # A slow import.
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
