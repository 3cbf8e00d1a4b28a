"""Types of arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import typer

from kapsi.errors import SpecError

Run: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="A run folder of kapsi fit.", show_default=False)]
TableFile: TypeAlias = Annotated[
    str, typer.Argument(metavar="TABLE", help="A CSV or Parquet file with a header.", show_default=False)
]
Output: TypeAlias = Annotated[
    str, typer.Option(metavar="FILE", help="The CSV or Parquet file to write.", show_default=False)
]
Overwrite: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Replace an old run.")]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Set one option. May be repeated.", show_default=False),
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
