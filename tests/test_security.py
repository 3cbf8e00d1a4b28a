"""SECURITY.md states what the code does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "SECURITY.md"
LIMITS = re.findall(r"^\| [^|]+ \| ([0-9,]+) \| `([\w.]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("value", "name"), LIMITS)
def test_limits_are_those_of_the_code(value, name) -> None:
    module, _, constant = name.rpartition(".")
    assert f"{getattr(importlib.import_module(module), constant):,}" == value


def test_each_named_file_and_call_exists() -> None:
    import kapsi as kp

    text = PAGE.read_text(encoding="utf-8")
    assert len(LIMITS) >= 6
    for name in set(re.findall(r"`kp\.(\w+)", text)):
        assert hasattr(kp, name), name
    for path in re.findall(r"`((?:tests|examples)/[\w./]*)`", text):
        assert (PAGE.parent / path).exists(), path
