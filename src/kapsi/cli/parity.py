"""`kapsi parity`: the models of the zoo beside those of the libraries that they come from."""

from __future__ import annotations

from typing import Annotated

import typer


def parity(
    only: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only rows whose model, quantity, data or library has this text, in any case.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of data and initial values.", min=0)] = 0,
) -> None:
    """Import models of other libraries, compare what they compute, and exit with 1 where one is out of its tolerance.

    Libraries that are not installed are named; pip install "kapsi\\[parity]" brings them.
    """
    from kapsi.zoo.parity import run, table

    rows = run(seed, only)
    typer.echo(table(rows))
    if not all(row.within for row in rows):
        raise typer.Exit(1)
