"""Progress of long work, as a line on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable


def terminal_line(work: str) -> Callable[[int, int], None]:
    """Return a function (done, total) that writes the percentage to standard error; the line is cleared at the end.

    Nothing is written if standard error is not a terminal, or is redirected to another display.
    """
    stream, shown = sys.__stderr__, -1
    if stream is None or stream is not sys.stderr or not stream.isatty():
        return lambda done, total: None

    def report(done: int, total: int) -> None:
        nonlocal shown
        share = 100 * done // max(total, 1)
        if share != shown:
            shown = share
            stream.write("\r\x1b[K" if done >= total else f"\r{work}: {share} %")
            stream.flush()

    return report
