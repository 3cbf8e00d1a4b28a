"""What is frozen is not copied."""

from __future__ import annotations

from typing import Any, Self


class Immutable:
    """Base of frozen dataclasses, which need no copies: a deep copy of a model shares its specification."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
