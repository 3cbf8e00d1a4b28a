"""Seconds of computations with a time limit."""

from __future__ import annotations

import math
import time

__all__ = ["Stopwatch"]


class Stopwatch:
    """Count seconds from now: CPU seconds where these are fewer, so that other programs on the machine change no result.

    Args:
        limit: number of seconds after which `over` returns True.

    Example:
        >>> Stopwatch().over(), Stopwatch(-1.0).over()
        (False, True)
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return min(time.perf_counter() - self._wall, time.process_time() - self._cpu)

    def over(self) -> bool:
        """Return whether the seconds reach the limit."""
        return self.seconds() >= self.limit
