"""HTML by functions: every text is escaped in one place, so that names of columns, labels and files stay text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Markup", "data_table", "joined", "tag"]

VOID = ("br", "circle", "col", "hr", "line", "meta", "path", "polygon", "rect")
"""Elements without a closing tag, in HTML or in SVG."""


class Markup(str):
    """Text that is HTML already; other strings are escaped."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """Return a value as HTML: markup unchanged, any other text escaped, control characters as U+FFFD."""
    if isinstance(value, Markup):
        return value
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
    return Markup(html.escape(text))


def joined(parts: Iterable[object]) -> Markup:
    """Return parts one after the other."""
    return Markup("".join(map(escaped, parts)))


def tag(name: str, /, *children: object, **attributes: Any) -> Markup:
    """Return an element; attributes with the value None are left out, `class_` is `class`, and `_` is `-`.

    Example:
        >>> tag("td", "a < b", class_="number", data_value=1.5)
        '<td class="number" data-value="1.5">a &lt; b</td>'
    """
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    if name in VOID and not children:
        return Markup(f"<{name}{''.join(words)}/>")
    return Markup(f"<{name}{''.join(words)}>{joined(children)}</{name}>")


def data_table(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[int] = (),
    caption: str = "",
    **attributes: Any,
) -> Markup:
    """Return a table with a header; the first cell of a row is its header.

    Args:
        header: titles of the columns.
        rows: cells.
        right: indices of the columns to align to the right.
        caption: title of the table, read by screen readers; empty for none.
        attributes: further attributes of the table.
    """
    aligned = set(right)

    def cell(kind: str, i: int, value: object, **more: Any) -> Markup:
        return tag(kind, value, class_="n" if i in aligned else None, **more)

    head = [cell("th", i, title, scope="col") for i, title in enumerate(header)]
    body = [
        tag("tr", *(cell("td" if i else "th", i, v, scope=None if i else "row") for i, v in enumerate(row)))
        for row in rows
    ]
    title = [tag("caption", caption)] if caption else []
    return tag("table", *title, tag("thead", tag("tr", *head)), tag("tbody", *body), **attributes)
