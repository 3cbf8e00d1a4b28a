"""Pictures in the terminal: curves in braille dots and arrays in shades, or both in ASCII."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kapsi.plots import Curves, Maps

# Bits of the eight dots of a braille character, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
SHADES, ASCII_SHADES = " ░▒▓█", " .:*#"
ROWS, ACROSS, MAPS = 16, 24, 4
"""Lines of a curve; values in a line of an array; number of arrays."""


def draw(picture: Curves | Maps, width: int, encoding: str | None) -> list[str]:
    """Return the lines of a picture.

    Args:
        picture: result of `kapsi.plots.picture`.
        width: characters per line.
        encoding: encoding of the output; without braille characters, the picture is in ASCII.
    """
    from kapsi.plots import Curves

    try:
        "⣿█─│×κ₁".encode(encoding or "ascii")
        plain = False
    except (UnicodeError, LookupError):
        plain = True
    lines = _curves(picture, width, plain) if isinstance(picture, Curves) else _maps(picture, width, plain)
    return [picture.title, *lines]


def _curves(picture: Curves, width: int, plain: bool) -> list[str]:
    low, high = picture.limits
    ends = (f"{high:.3g}", f"{low:.3g}")
    left = max(map(len, ends)) + 1
    across = max(width - left - 1, 8)
    columns, rows = (across, ROWS) if plain else (2 * across, 4 * ROWS)
    dots = [[False] * columns for _ in range(rows)]
    samples = [round(i * (len(picture.x) - 1) / (columns - 1)) for i in range(columns)]
    for values in picture.values:
        before: int | None = None
        for column, sample in enumerate(samples):
            value = float(values[sample])
            level = (high - value) / (high - low) * (rows - 1)
            # Clip lines at the edge; NaN interrupts a line.
            row = None if math.isnan(level) else round(min(max(level, -1.0), float(rows)))
            if row is not None:
                top = row if before is None else before + (row > before) - (row < before)
                for r in range(min(top, row), max(top, row) + 1):
                    if 0 <= r < rows:
                        dots[r][column] = True
            before = row
    body = [_letters(dots, row, plain) for row in range(ROWS)]
    bar, corner, line, edge = ("|", "+", "-", "[]") if plain else ("│", "└", "─", "[]")
    margin = [ends[0], *[""] * (ROWS - 2), ends[1]]
    lines = [f"{text.rjust(left)}{bar}{row}".rstrip() for text, row in zip(margin, body, strict=True)]
    axis = [line] * across
    first, last = float(picture.x[0]), float(picture.x[-1])
    if picture.marked is not None:
        for end, letter in zip(picture.marked, edge, strict=True):
            axis[round((end - first) / (last - first) * (across - 1))] = letter
    lines.append(" " * left + corner + "".join(axis))
    ticks = (f"{first:.3g}", picture.x_label, f"{last:.3g}")
    lines.append(" " * (left + 1) + ticks[0] + ticks[1].center(across - len(ticks[0]) - len(ticks[2])) + ticks[2])
    if picture.marked is not None:
        lines.append(" " * (left + 1) + "[ ] the domain, {:.3g} to {:.3g}".format(*picture.marked))
    return lines


def _letters(dots: list[list[bool]], row: int, plain: bool) -> str:
    if plain:
        return "".join("*" if dot else " " for dot in dots[row])
    letters = []
    for column in range(0, len(dots[0]), 2):
        bits = sum(DOTS[r][c] for r in range(4) for c in range(2) if dots[4 * row + r][column + c])
        letters.append(chr(0x2800 + bits) if bits else " ")
    return "".join(letters)


def _maps(picture: Maps, width: int, plain: bool) -> list[str]:
    """Draw arrays side by side, two characters per value."""
    lines: list[str] = []
    indices = _spread(len(picture.maps), MAPS)
    blocks = [_block(picture.maps[i], picture.labels[i], plain) for i in indices]
    while blocks:
        count, used = 0, 0
        while count < len(blocks) and (not count or used + len(blocks[count][0]) <= width):
            used += len(blocks[count][0]) + 2
            count += 1
        row, blocks = blocks[:count], blocks[count:]
        height = max(map(len, row))
        filled = [block + [" " * len(block[0])] * (height - len(block)) for block in row]
        lines += ["  ".join(line).rstrip() for line in zip(*filled, strict=True)]
    first, second, minus = ("x1", "x2", "-") if plain else ("x₁", "x₂", "─")
    where = "" if picture.extent is None else f"{first} to the right, {second} upwards; "
    return [*lines, f"{where}darker: farther from zero; {minus}: negative"]


def _block(array: Tensor, label: str, plain: bool) -> list[str]:
    rows, columns = array.shape
    picked = [[array[r, c].item() for c in _spread(columns, ACROSS)] for r in _spread(rows, ACROSS // 2)]
    largest = max(abs(value) for row in picked for value in row) or 1.0
    shades = ASCII_SHADES if plain else SHADES
    minus = "-" if plain else "─"
    lines = []
    for row in picked:
        letters = []
        for value in row:
            shade = shades[min(int(abs(value) / largest * len(shades)), len(shades) - 1)]
            letters.append(shade + (minus if value < 0 and shade != " " else shade))
        lines.append("".join(letters))
    wide = max(len(label), len(lines[0]))
    return [label.ljust(wide), *(line.ljust(wide) for line in lines)]


def _spread(count: int, most: int) -> list[int]:
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
