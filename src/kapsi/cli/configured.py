"""Commands with options from the command line, the environment or a file; a repeated option of one value is an error."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from kapsi.cli.options import OUTPUT
from kapsi.errors import SpecError, did_you_mean

SECTIONS = ("table", "model", "training", "recipe")
"""Parts of the configuration of a run."""
FILE = "kapsi.config"
"""Key of the file of --config in the context of a command."""


class ConfiguredCommand(TyperCommand):
    """A command that reads options from `--folds 5`, `KAPSI_FIT_FOLDS=5` or `folds: 5` in the file of `--config`, in this order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name, parameter in self.named_options().items():
            if name not in ("help", "config"):
                parameter.envvar, parameter.show_envvar = f"{self.prefix}{name.upper().replace('-', '_')}", False

    @property
    def prefix(self) -> str:
        """Prefix of the environment variables of the command."""
        return f"KAPSI_{str(self.name).upper()}_"

    def named_options(self) -> dict[str, Any]:
        """Return the options by name, without leading dashes."""
        options = (parameter for parameter in self.params if parameter.param_type_name == "option")
        return {option.opts[0].lstrip("-"): option for option in options}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line.

        Raises:
            BadParameter: an option of a single value occurs twice.
            SpecError: an environment variable of this command has no option.
        """
        self._check_repeated(args)
        known = [option.envvar for option in self.named_options().values() if option.envvar]
        for name in os.environ:
            # KAPSI_DATA is the folder of the data sets, and no option has two words that begin with another command.
            if name.startswith(self.prefix) and name not in known:
                hint = did_you_mean(name, known, quoted=False)
                raise SpecError(f"{name}: kapsi {self.name} has no such option; {hint}unset the environment variable")
        result: list[str] = super().parse_args(ctx, args)
        return result

    def _check_repeated(self, args: Iterable[str]) -> None:
        options = {name: parameter for parameter in self.params for name in parameter.opts if name.startswith("-")}
        seen: dict[str, str] = {}
        words = iter(args)
        for word in words:
            if word == "--":
                break
            name, equals, value = word.partition("=")
            option: Any = options.get(name)
            if option is None or option.is_flag or option.count:
                continue
            value = value if equals else next(words, "")
            if not option.multiple and option.name in seen:
                raise typer.BadParameter(
                    f"{name} was given twice, as {seen[option.name]!r} and as {value!r}; give it once"
                )
            seen[option.name] = value


def _read_defaults(context: typer.Context, path: str | None) -> None:
    """Set the defaults of a command to the options of a file."""
    if path is None or context.resilient_parsing:
        return
    from kapsi.spec import read_yaml

    command: Any = context.command
    data = read_yaml(path, "configuration", "target: price")
    if isinstance(data, Mapping) and data and set(data) <= set(SECTIONS) and isinstance(data.get("table"), Mapping):
        data = _options_of_run(data["table"], path)
    if not isinstance(data, Mapping):
        raise SpecError(f"{path}: expected options by name, such as target: price; got {type(data).__name__}")
    arguments = {p.name: p for p in command.params if p.param_type_name == "argument"}
    known = {**arguments, **command.named_options()}
    known.pop("config")
    defaults = {}
    for key, value in data.items():
        parameter = known.get(str(key).replace("_", "-"))
        if parameter is None:
            raise SpecError(
                f"{path}: kapsi {command.name} has no option {str(key)!r}; {did_you_mean(str(key), list(known))}"
                f"there are {', '.join(known)}"
            )
        defaults[parameter.name] = _words(value, parameter, f"{path}: {key}")
    context.default_map, context.meta[FILE] = defaults, path


def _words(value: Any, parameter: Any, place: str) -> Any:
    """Return the value of an option in a file as words of the command line."""
    several = getattr(parameter, "multiple", False) or parameter.nargs == -1
    if isinstance(value, Mapping) and several and "=" in str(parameter.metavar):
        value = [f"{key}={_word(part, f'{place}.{key}')}" for key, part in value.items()]
    if isinstance(value, list | tuple):
        if not several:
            raise SpecError(f"{place}: expected one value, got {len(value)}")
        return tuple(_word(part, place) for part in value)
    if isinstance(value, bool) and getattr(parameter, "is_flag", False):
        return value
    word = _word(value, place)
    return (word,) if several else word


def _word(value: Any, place: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    got = "no value" if value is None else "a mapping" if isinstance(value, Mapping) else type(value).__name__
    raise SpecError(f"{place}: expected text, a number, true or false; got {got}")


def _options_of_run(table: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the options that repeat a run, from its config.yaml."""
    names = {"metrics": "metric"}
    options: dict[str, Any] = {"spec": path}
    for key, value in table.items():
        if key == "reading":
            options.update({name: part for name, part in (value or {}).items() if part not in (None, [], ())})
        elif key.endswith("_fraction"):
            options.setdefault("set", []).append(f"table.{key}={value}")
        elif value not in (None, [], (), False):
            options[names.get(key, key)] = value
    return options


Config: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A YAML file with options of this command by name, or the config.yaml of a run. The command line has precedence.",
        is_eager=True,
        expose_value=False,
        callback=_read_defaults,
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
