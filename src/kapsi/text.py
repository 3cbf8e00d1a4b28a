"""Text for users: tables in aligned columns, counts with their nouns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "validation row"), counted(2000, "row"), counted(0, "class")
        ('1 validation row', '2,000 rows', '0 classes')
    """
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def text_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table: aligned cells, two spaces between columns.

    Args:
        rows: cells, equally many in each row.
        right: indices of the columns to align to the right, from 0.

    Example:
        >>> text_table([("name", "rows"), ("iris", "150")], right=(1,))
        ['name  rows', 'iris   150']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (
        [f"{cell:{'>' if i in right else '<'}{width}}" for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in aligned]
