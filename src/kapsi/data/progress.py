"""A line on a terminal that says how far long work is."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["terminal_line"]


def terminal_line(what: str) -> Callable[[int, int], None]:
    """Return what is called with the work that is done and with all of it, and says so on a terminal.

    Nothing is written where standard error is no terminal, or is taken by another display. The line goes when all is done.
    """
    stream, shown = sys.__stderr__, -1
    if stream is None or stream is not sys.stderr or not stream.isatty():
        return lambda done, total: None

    def tell(done: int, total: int) -> None:
        nonlocal shown
        share = 100 * done // max(total, 1)
        if share != shown:
            shown = share
            stream.write("\r\x1b[K" if done >= total else f"\r{what}: {share} %")
            stream.flush()

    return tell
