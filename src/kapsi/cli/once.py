"""A command that refuses a repeated option of a single value; the last one would win without a word."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class Once(TyperCommand):
    """A command with checks of its words before they are parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line.

        Raises:
            BadParameter: an option of a single value occurs twice.
        """
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
        result: list[str] = super().parse_args(ctx, args)
        return result
