"""Trigonometric and hyperbolic functions, and their inverses."""

from __future__ import annotations

__all__: list[str] = []
