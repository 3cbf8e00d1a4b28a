"""The number of threads for a size of problem."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SMALL_ELEMENTS = 2**20
"""Elements of κ(x) up to which a solver on all rows runs on one thread."""


@contextlib.contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """Use one thread for small arrays: a second thread costs more than it saves, especially on a busy machine.

    Results are then also the same on machines with another number of cores.
    """
    before = torch.get_num_threads()
    if elements <= SMALL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
