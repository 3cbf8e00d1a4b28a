"""Types of arguments and options that several commands share."""

from __future__ import annotations

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
    str, typer.Argument(metavar="TABLE", help="A CSV or Parquet file with a header.", show_default=False)
]
Output: TypeAlias = Annotated[str, option(OUTPUT, "FILE", "The CSV or Parquet file to write.")]
Overwrite: TypeAlias = Annotated[bool, option(OUTPUT, None, "Replace an old run.", "--overwrite")]
Json: TypeAlias = Annotated[bool, option(OUTPUT, None, "Write one JSON object to standard output.", "--json")]
Settings: TypeAlias = Annotated[
    list[str] | None, option(MODEL, "PATH=VALUE", "Set one option. May be repeated.", "--set")
]


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
