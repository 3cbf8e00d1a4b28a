"""Types of arguments and options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import typer

from kapsi.errors import SpecError

DATA, MODEL, TRAINING, OUTPUT, CLUSTER = "Data", "Model", "Training", "Output", "Cluster"
"""Groups of options in the help."""


def option(panel: str, metavar: str | None, text: str, *names: str, **details: Any) -> Any:
    """Return an option in a group of the help."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **{"show_default": False, **details})


Run: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="A run folder of kapsi fit.", show_default=False)]
TableFile: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TABLE", help="A CSV or Parquet file with a header, or a folder of images.", show_default=False
    ),
]
Output: TypeAlias = Annotated[str, option(OUTPUT, "FILE", "The CSV or Parquet file to write.")]
Overwrite: TypeAlias = Annotated[bool, option(OUTPUT, None, "Replace an old run.", "--overwrite")]
Open: TypeAlias = Annotated[bool, option(OUTPUT, None, "Open the report in a browser.", "--open")]
NoReport: TypeAlias = Annotated[bool, option(OUTPUT, None, "Write no report.html.", "--no-report")]
Json: TypeAlias = Annotated[bool, option(OUTPUT, None, "Write one JSON object to standard output.", "--json")]
Settings: TypeAlias = Annotated[
    list[str] | None, option(MODEL, "PATH=VALUE", "Set one option. May be repeated.", "--set")
]


PLACE = re.compile(r"[A-Z]\w*(?:\.(\w+)(?:\[(\d+)\])?|\((\w+)=[^()]*\)): (.*)")
"""TableConfig(folds=1): …, Auto.heads[1]: …"""


def as_option(message: str, given: Mapping[str, Any], place: Callable[[str], str] = lambda name: "") -> str:
    """Return a message about the argument of a class with the option of the command line in its place, if there is one.

    Args:
        message: the message of an error.
        given: values of the options by the names of their parameters; None for options left out.
        place: returns the place of an option outside of the command line, ` in FILE`, by the name of the parameter.

    Example:
        >>> as_option("TableConfig(folds=1): folds must be at least 2", {"folds": 1})
        '--folds 1: must be at least 2'
        >>> as_option("Auto.heads[1]: no recipe is called 'x'", {"head": ["linear", "x"]})
        "--head x: no recipe is called 'x'"
    """
    found = PLACE.fullmatch(message)
    if found is None:
        return message
    argument = found[1] or found[3]
    name = argument if argument in given else argument.removesuffix("s")
    value = given.get(name)
    if value is None:
        return message
    if isinstance(value, list | tuple):
        value = value[int(found[2])] if found[2] else ""
    shown = re.sub(r"(://[^/@\s:]*):[^/@\s]*@", r"\1:***@", str(value))  # the password of a database
    option = f"--{name.replace('_', '-')} {shown}".rstrip() + place(name)
    return f"{option}: {found[4].removeprefix(f'{argument} ')}"


def setting(text: str, example: str) -> tuple[str, Any]:
    """Return path and value of a --set option; the value is YAML.

    Args:
        text: the option, `path=value`.
        example: an example for error messages.
    """
    from kapsi.spec import parse_yaml

    path, equals, value = text.partition("=")
    if not equals or not path:
        raise SpecError(f"--set {text}: expected path=value, such as {example}")
    return path, parse_yaml(value, f"--set {text}")
