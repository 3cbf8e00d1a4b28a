"""Tables of text in aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["align", "text_table"]


def align(rows: Sequence[Sequence[str]], right: Collection[int] = (), least: int = 0) -> list[list[str]]:
    """Return the cells of a table, padded to the width of their column.

    Args:
        rows: cells, equally many in each row.
        right: numbers of the columns to align to the right, from 0.
        least: smallest width of a column, in characters.
    """
    widths = [max(least, *map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def text_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table: aligned cells, two spaces between columns.

    Example:
        >>> text_table([("name", "rows"), ("iris", "150")], right=(1,))
        ['name  rows', 'iris   150']
    """
    return ["  ".join(cells).rstrip() for cells in align(rows, right)]
