"""What an independent reference is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numpy import ndarray


class Reference(NamedTuple):
    """The same function from elsewhere.

    `source` names where the values come from. The arguments of `values`, all float64 arrays:

    - expansion: (options, x of shape (rows, m), tensors by name) -> (rows, D)
    - reconciliation: (options, tensors of one channel, n, (q, t)) -> (n, D)
    - remainder: (options, x, tensors, n) -> (rows, n)
    - fusion: (options, outputs (heads, rows, n), tensors) -> (rows, n)
    - process: (options, x) -> (rows, n)

    `size` is the paper's formula: D of (options, m) for an expansion, l of (options, n, q, t) for a reconciliation.
    """

    source: str
    values: Callable[..., ndarray]
    size: Callable[..., int] | None = None


Table = dict[str, Reference]
