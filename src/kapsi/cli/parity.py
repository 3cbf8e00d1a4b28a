"""`kapsi parity`: compare converted models of other libraries with the originals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kapsi.cli.common import say, show_json
from kapsi.cli.options import Json

if TYPE_CHECKING:
    from kapsi.zoo.parity import ParityRow

EXAMPLES = """\
kapsi parity
kapsi parity --only "random forest"
"""


def parity(
    only: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Show only rows with this string in model, quantity, data or library; case is ignored.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of data and initial values.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Convert models of other libraries and compare the outputs; exit with 1 if a deviation exceeds the tolerance.

    Cases of missing libraries are counted and do not change the exit code; pip install "kapsi\\[parity]" installs the libraries.
    """
    from kapsi.zoo.parity import run, table

    rows = run(seed, only)
    if json:
        show_json({"cases": list(map(_data, rows))})
    else:
        say(*table(rows).splitlines())
    if not all(row.within or row.missing for row in rows):
        raise typer.Exit(1)


def _data(row: ParityRow) -> dict[str, Any]:
    """Return a case as plain data."""
    facts = {name: getattr(row.case, name) for name in ("model", "quantity", "data", "package", "tolerance")}
    measured = {name: value for name, value in row._asdict().items() if name != "case"}
    return {**facts, **measured, "within": row.within}
