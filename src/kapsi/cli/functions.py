"""`kapsi functions`: the catalogue."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from kapsi.cli.common import table

TITLES = {
    "expansion": "expansions (kappa)",
    "reconciliation": "reconciliations (psi)",
    "remainder": "remainders (pi)",
    "fusion": "fusions of heads",
    "process": "processing (before, after, output)",
}


def functions(
    role: Annotated[
        Literal["expansion", "reconciliation", "remainder", "fusion", "process"] | None,
        typer.Argument(
            metavar="[ROLE]", help="expansion, reconciliation, remainder, fusion or process.", show_default=False
        ),
    ] = None,
) -> None:
    """List the functions that a specification can name, with their options."""
    import kapsi  # noqa: F401  (registers them)
    from kapsi.function import ALIASES, catalogue

    for place, (kind, title) in enumerate(TITLES.items()):
        if role not in (None, kind):
            continue
        if role is None and place:
            typer.echo()
        typer.echo(title)
        rows = []
        for function in catalogue(kind):
            others = [alias for alias, name in ALIASES[kind].items() if name == function.name]
            name = f"  {function.name}" + (f" ({', '.join(others)})" if others else "")
            summary = (function.__doc__ or "").strip().splitlines()[0]
            rows.append((name, summary, _options(function)))
        table(rows)


def _options(function: type[Any]) -> str:
    import dataclasses

    from kapsi.function import options_of

    shown = []
    for field in options_of(function):
        low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
        default = "" if field.default is dataclasses.MISSING else f"={field.default}"
        bounds = (
            f" [{'' if low is None else low}..{'' if high is None else high}]" if (low, high) != (None, None) else ""
        )
        choices = f" {field.type[7:]}" if isinstance(field.type, str) and field.type.startswith("Literal") else ""
        shown.append(f"{field.name}{default}{bounds}{choices}")
    return ", ".join(shown)
