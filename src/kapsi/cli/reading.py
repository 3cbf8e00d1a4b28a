"""Options of reading a table, as `kapsi.data.tabular.Reading` has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import typer

if TYPE_CHECKING:
    from kapsi.data.tabular import Reading

PANEL = "Reading the table"


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False, rich_help_panel=PANEL)


Missing: TypeAlias = Annotated[
    list[str] | None, _option("WORD", "A word for missing values, besides the known ones. May be repeated.")
]
Decimal: TypeAlias = Annotated[Literal[".", ","] | None, _option("MARK", "The decimal mark, . or ,")]
Thousands: TypeAlias = Annotated[
    Literal[",", ".", "'", " ", "_"] | None, _option("MARK", "The thousands separator: , . ' _ or a space.")
]
Separator: TypeAlias = Annotated[
    str | None, _option("MARK", "The character between values, tab, or whitespace.", "--separator")
]
Skip: TypeAlias = Annotated[
    int, typer.Option(metavar="N", help="Lines before the header.", min=0, rich_help_panel=PANEL)
]
Comment: TypeAlias = Annotated[str | None, _option("SIGN", "The beginning of lines to leave out.")]
Encoding: TypeAlias = Annotated[str | None, _option("NAME", "The text encoding, such as latin-1.")]
Header: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line has names; without, columns are called 'column 1', 'column 2', …",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
Numeric: TypeAlias = Annotated[list[str] | None, _option("COLUMN", "A column of numbers. May be repeated.")]
Categorical: TypeAlias = Annotated[list[str] | None, _option("COLUMN", "A column of categories. May be repeated.")]
Text: TypeAlias = Annotated[
    list[str] | None, _option("COLUMN", "A column of text to keep although its values differ. May be repeated.")
]
Date: TypeAlias = Annotated[list[str] | None, _option("COLUMN", "A column of dates or times. May be repeated.")]


def reading_of(options: dict[str, Any]) -> Reading:
    """Return the options of reading among the arguments of a command."""
    from kapsi.data.tabular import Reading
    from kapsi.function import options_of

    given = {field.name: options[field.name] for field in options_of(Reading)}
    given = {
        name: tuple(value or ()) if value is None or isinstance(value, list) else value for name, value in given.items()
    }
    for name in ("decimal", "thousands", "separator", "comment", "encoding", "header"):
        given[name] = given[name] if given[name] != () else None
    if given["separator"] in ("tab", r"\t"):
        given["separator"] = "\t"
    return Reading(**cast(Any, given))
