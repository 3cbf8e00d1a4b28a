"""`kapsi functions`: the catalogue, or one function with a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kapsi.cli.common import notes, say, show_json
from kapsi.cli.options import Json, Settings, setting
from kapsi.errors import DataError, SpecError, nearest, unknown

if TYPE_CHECKING:
    from kapsi.listing import Entry, Listing

EXAMPLES = """\
kapsi functions
kapsi functions expansion
kapsi functions b_spline --set intervals=12 --picture spline.svg
"""


def functions(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROLE] [NAME]",
            help="A role, such as expansion or solver, the name of a function, or both.",
            show_default=False,
        ),
    ] = None,
    set_: Settings = None,
    picture: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the picture to a .svg, .png or .pdf file (needs matplotlib).",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the functions for specifications, or show formula, options, sizes, source and picture of one function."""
    from kapsi.function import ROLES
    from kapsi.listing import functions as listed

    names = list(words or ())
    if len(names) > 2:
        raise SpecError(f"functions: unexpected extra argument {names[2]!r}; give a role, a name, or both")
    if len(names) == 2 and names[0] not in ROLES:
        raise SpecError(f"functions: {unknown('role', names[0], ROLES)}")
    role = names.pop(0) if names and names[0] in ROLES else None
    listing = listed(role)
    if names:
        entries = _named(listing, names[0])
        if len(entries) > 1 and (set_ or picture):
            choices = " or ".join(f"kapsi functions {entry.role} {names[0]}" for entry in entries)
            raise SpecError(f"functions: {names[0]!r} is the name of {len(entries)} functions; write {choices}")
        if json:
            show_json({"functions": [_data(entry) for entry in _edited(entries, list(set_ or ()), picture)]})
        else:
            _show(_edited(entries, list(set_ or ()), picture), picture)
        return
    if set_ or picture:
        raise SpecError("functions: --set and --picture need the name of one function, as in kapsi functions b_spline")
    notes(listing.failures)
    if json:
        show_json({"functions": [_data(entry) for entry in listing]})
        return
    say(*listing.text(_width()).splitlines())


def _named(listing: Listing, name: str) -> list[Entry]:
    """Return the functions with a name; suggest a role for a typo, too."""
    from kapsi.function import ROLES

    close = [] if listing.knows(name) else nearest(name, ROLES)
    if close and len({entry.role for entry in listing}) > 1:
        raise SpecError(f"no role and no function is called {name!r}; did you mean {close[0]}?")
    return listing.named(name)


def _edited(entries: list[Entry], sets: list[str], picture: str | None) -> list[Entry]:
    """Return the functions with their options set, and write the picture."""
    from kapsi import plots
    from kapsi.listing import entry_of

    edited = [entry_of(entry.cls, **_settings(entry, sets)) if sets else entry for entry in entries]
    if picture is not None:
        plots.save(edited[0].function, picture)
    return edited


def _data(entry: Entry) -> dict[str, Any]:
    """Return a function as plain data."""
    names = ("name", "kind", "default", "minimum", "maximum", "choices", "meaning")
    options = [{name: getattr(option, name) for name in names} for option in entry.options]
    facts = {name: getattr(entry, name) for name in ("role", "name", "aliases", "summary", "formula", "size")}
    return {**facts, "options": options}


def _show(entries: list[Entry], picture: str | None) -> None:
    import sys

    from kapsi import plots
    from kapsi.cli.canvas import draw

    width = _width()
    for i, entry in enumerate(entries):
        if i:
            say("", "─" * width, "")
        say(*entry.text(width).splitlines())
        if not plots.drawable(entry.function):
            continue
        try:
            lines = draw(plots.picture(entry.function), width, getattr(sys.stdout, "encoding", None))
        except (SpecError, DataError) as error:  # too wide to draw; the description above is complete
            lines = [f"no picture: {error}"]
        say("", *lines)
    if picture is not None:
        say(f"picture: {picture}")


def _settings(entry: Entry, sets: list[str]) -> dict[str, Any]:
    """Return the options of a function as plain data, edited by the command line."""
    from kapsi.spec import set_option, to_dict

    data = to_dict(entry.function)
    name = data.pop("kind")
    for text in sets:
        set_option(data, *setting(text, _example(name, entry)))
    return data


def _example(name: str, entry: Entry) -> str:
    with_default = [f"{option.name}={option.default}" for option in entry.options if option.default is not None]
    return with_default[0] if with_default else f"of a function with options; {name} has none"


def _width() -> int:
    """Return the width of the terminal in characters, from 60 to 120; 100 for a file."""
    import shutil

    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
