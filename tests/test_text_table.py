"""Aligned columns of text."""

from __future__ import annotations

from kapsi.text import text_table


def test_columns_have_the_width_of_their_longest_cell() -> None:
    rows = [("name", "n", "about"), ("ab", "1,000", "x"), ("", "-", "")]
    assert text_table(rows, right=(1,)) == ["name      n  about", "ab    1,000  x", "          -"]
