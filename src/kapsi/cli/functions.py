"""`kapsi functions`: the catalogue, or one function of it with its picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kapsi.cli.common import notes
from kapsi.errors import DataError, SpecError, nearest, unknown

if TYPE_CHECKING:
    from kapsi.listing import Entry, Listing


def functions(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROLE] [NAME]",
            help="A role, such as expansion or solver, the name of a function, or both.",
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="OPTION=VALUE", help="Set one option of the function. May be repeated.", show_default=False
        ),
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write its picture to a .svg, .png or .pdf file (needs matplotlib).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the functions that a specification can name; of one show formula, options, sizes, source and a picture."""
    from kapsi.function import ROLES
    from kapsi.listing import functions as listed

    given = list(words or ())
    if len(given) > 2:
        raise SpecError(f"functions: unexpected extra argument {given[2]!r}; give a role, a name, or both")
    if len(given) == 2 and given[0] not in ROLES:
        raise SpecError(f"functions: {unknown('role', given[0], ROLES)}")
    role = given.pop(0) if given and given[0] in ROLES else None
    listing = listed(role)
    if given:
        entries = _named(listing, given[0])
        if len(entries) > 1 and (set_ or picture):
            choices = " or ".join(f"kapsi functions {entry.role} {given[0]}" for entry in entries)
            raise SpecError(f"functions: {given[0]!r} is the name of {len(entries)} functions; write {choices}")
        _show(entries, list(set_ or ()), picture)
        return
    if set_ or picture:
        raise SpecError(
            "functions: --set and --picture are about one function; name it, as in kapsi functions b_spline"
        )
    notes(listing.failures)
    typer.echo(listing.text(_width()))


def _named(listing: Listing, name: str) -> list[Entry]:
    """Return the functions of a name; a misspelled role is as likely as a misspelled name."""
    from kapsi.function import ROLES

    close = [] if listing.knows(name) else nearest(name, ROLES)
    if close and len({entry.role for entry in listing}) > 1:
        raise SpecError(f"no role and no function is called {name!r}; did you mean {close[0]}?")
    return listing.named(name)


def _show(entries: list[Entry], sets: list[str], picture: str | None) -> None:
    import sys

    from kapsi import plots
    from kapsi.cli.canvas import draw
    from kapsi.listing import entry_of

    width = _width()
    for place, found in enumerate(entries):
        entry = entry_of(found.cls, **_settings(found, sets)) if sets else found
        if picture is not None:
            plots.save(entry.function, picture)
        if place:
            typer.echo("\n" + "─" * width + "\n")
        typer.echo(entry.text(width))
        if not plots.drawable(entry.function):
            continue
        try:
            lines = draw(plots.picture(entry.function), width, getattr(sys.stdout, "encoding", None))
        except (SpecError, DataError) as error:  # too wide to draw; the text above is complete
            lines = [f"no picture: {error}"]
        typer.echo("\n".join(["", *lines]))
    if picture is not None:
        typer.echo(f"picture: {picture}")


def _settings(entry: Entry, sets: list[str]) -> dict[str, Any]:
    """Return options as plain data with those of the command line set."""
    from kapsi.spec import parse_yaml, set_option, to_dict

    data = to_dict(entry.function)
    name = data.pop("kind")
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise SpecError(f"--set {text}: expected option=value, such as {_example(name, entry)}")
        set_option(data, path, parse_yaml(value, f"--set {text}"))
    return data


def _example(name: str, entry: Entry) -> str:
    with_default = [f"{option.name}={option.default}" for option in entry.options if option.default is not None]
    return with_default[0] if with_default else f"of a function with options; {name} has none"


def _width() -> int:
    """Return the letters of a line: those of the terminal between 60 and 120, and 100 for a file."""
    import shutil

    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
