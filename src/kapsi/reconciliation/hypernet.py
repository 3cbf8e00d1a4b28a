"""Weights made by a frozen network."""

from __future__ import annotations

__all__: list[str] = []
