"""Kernels against centers, and random approximations of kernels."""

from __future__ import annotations

__all__: list[str] = []
