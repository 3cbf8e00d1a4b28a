"""Options of reading a table, as `kapsi.data.tabular.Reading` has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, cast

from kapsi.cli.options import option
from kapsi.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from kapsi.data.tabular import Reading
    from kapsi.tables import TableModel

PANEL = "Reading the table"

Command = TypeVar("Command", bound=Callable[..., None])

Missing: TypeAlias = Annotated[
    list[str] | None, option(PANEL, "WORD", "A further word for missing values. May be repeated.")
]
Decimal: TypeAlias = Annotated[Literal[".", ","] | None, option(PANEL, "MARK", "The decimal mark, . or ,")]
Thousands: TypeAlias = Annotated[
    Literal[",", ".", "'", " ", "_"] | None, option(PANEL, "MARK", "The thousands separator: , . ' _ or a space.")
]
Separator: TypeAlias = Annotated[
    str | None, option(PANEL, "MARK", "The character between values, tab, or whitespace.", "--separator")
]
Skip: TypeAlias = Annotated[int | None, option(PANEL, "N", "Lines before the header.", min=0)]
Comment: TypeAlias = Annotated[str | None, option(PANEL, "SIGN", "The beginning of lines to leave out.")]
Encoding: TypeAlias = Annotated[str | None, option(PANEL, "NAME", "The text encoding, such as latin-1.")]
Header: TypeAlias = Annotated[
    bool | None,
    option(
        PANEL,
        None,
        "Whether the first line has names; without, columns are called 'column 1', 'column 2', …",
        "--header/--no-header",
    ),
]
Numeric: TypeAlias = Annotated[list[str] | None, option(PANEL, "COLUMN", "A column of numbers. May be repeated.")]
Categorical: TypeAlias = Annotated[
    list[str] | None, option(PANEL, "COLUMN", "A column of categories. May be repeated.")
]
Text: TypeAlias = Annotated[
    list[str] | None,
    option(PANEL, "COLUMN", "A column of text to read word by word. May be repeated."),
]
Image: TypeAlias = Annotated[
    list[str] | None,
    option(PANEL, "COLUMN", "A column of images: bytes, or paths within the folder of the table. May be repeated."),
]
Date: TypeAlias = Annotated[list[str] | None, option(PANEL, "COLUMN", "A column of dates or times. May be repeated.")]

Unit: TypeAlias = Annotated[
    list[str] | None,
    option(
        PANEL,
        "COLUMN=UNIT",
        "The unit of the numbers of a column without signs: rate=%, price=$; rate=1 for fractions. May be repeated.",
        "--unit",
    ),
]


FORMAT: Mapping[str, Any] = {
    "missing": Missing,
    "decimal": Decimal,
    "thousands": Thousands,
    "separator": Separator,
    "skip": Skip,
    "comment": Comment,
    "encoding": Encoding,
    "header": Header,
    "unit": Unit,
}
"""Options on the format of a file, by name."""

KINDS: Mapping[str, Any] = {
    "numeric": Numeric,
    "categorical": Categorical,
    "text": Text,
    "image": Image,
    "date": Date,
}
"""Options on the kinds of columns, which only a fit decides."""

OPTIONS: Mapping[str, Any] = {**FORMAT, **KINDS}
"""All options of reading."""


def adds(options: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds options to a command, in place of its `**` parameter, which receives them."""

    def added(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        new = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in options.items()
        ]
        command.__signature__ = signature.replace(parameters=[*own, *new])  # type: ignore[attr-defined]
        return command

    return added


def reading_of(options: Mapping[str, Any]) -> Reading:
    """Return the options of reading among the arguments of a command."""
    from kapsi.data.tabular import Reading

    return Reading(**cast(Any, _given(options)))


def with_reading(model: TableModel, path: str | Path, options: Mapping[str, Any]) -> TableModel:
    """Return a model that reads a table with the options of a command, and otherwise as the table of the fit.

    Raises:
        SpecError: options that do not fit each other.
        TableError: options of text files for a Parquet file.
    """
    from kapsi.data.tabular import Reading, check_options

    given = _given(options)
    if not given:
        return model
    check_options(Path(path), given)
    before = model.reading
    if "missing" in given:
        given["missing"] = (*before.missing, *given["missing"])
    if "unit" in given:
        stated = Reading(unit=given["unit"]).units()
        known = [*(column.name for column in model.preprocessing.columns), *model.targets]
        for name in stated.keys() - set(known):
            raise SpecError(
                f"--unit {name}: {did_you_mean(name, known)}expected a column of the model: {', '.join(known[:10])}"
            )
        given["unit"] = tuple(f"{name}={unit}" for name, unit in {**before.units(), **stated}.items())
    if ("decimal" in given) != ("thousands" in given):  # the other mark of the fit may be the same character
        given = {"decimal": None, "thousands": None, **given}
    decimal = given.get("decimal") or (None if given.get("thousands") else model.decimal)
    return replace(model, reading=replace(before, **given), decimal=decimal)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options of reading by name."""
    from kapsi.data.tabular import Reading
    from kapsi.function import options_of

    given = {field.name: options[field.name] for field in options_of(Reading) if field.name in options}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if given.get("separator") in ("tab", r"\t"):
        given["separator"] = "\t"
    return {name: value for name, value in given.items() if value is not None and value != ()}
