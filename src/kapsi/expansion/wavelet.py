"""Wavelets of each input."""

from __future__ import annotations

__all__: list[str] = []
