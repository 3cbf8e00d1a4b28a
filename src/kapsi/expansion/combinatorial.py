"""Combinations of inputs, and their joint densities."""

from __future__ import annotations

__all__: list[str] = []
