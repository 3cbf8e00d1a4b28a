"""Modules of torch as expansions."""

from __future__ import annotations

__all__: list[str] = []
