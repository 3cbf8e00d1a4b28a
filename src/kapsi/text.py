"""Text for users: tables in aligned columns, counts with their nouns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

ALIKE, NAMED = 5, 3
"""Most notes that are alike; names in the note on the others."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "validation row"), counted(2000, "row"), counted(0, "class")
        ('1 validation row', '2,000 rows', '0 classes')
    """
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def condensed(notes: Iterable[str]) -> list[str]:
    """Return notes; of more than five that differ by quoted names and numbers only, five, and a note that counts the others.

    Example:
        >>> condensed([*(f"column 'x{i}' has {i} gaps" for i in range(40)), "one row is empty"])[4:]
        ["column 'x4' has 4 gaps", "35 more notes like this, on 'x5', 'x6', 'x7', …", 'one row is empty']
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for note in notes:
        alike[re.sub(r"(['\"]).*?\1|[\d.,]+", "#", note)].append(note)
    shown: list[str] = []
    for several in alike.values():
        shown += several if len(several) <= ALIKE + 1 else several[:ALIKE]
        if len(several) > ALIKE + 1:
            names = [found[0] for note in several[ALIKE:] if (found := re.search(r"(['\"]).*?\1", note))]
            on = f", on {', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''}" if names else ""
            shown.append(f"{len(several) - ALIKE:,} more notes like this{on}")
    return shown


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
