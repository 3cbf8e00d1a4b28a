"""`kapsi evaluate`: the scores of a run on a table."""

from __future__ import annotations

from typing import Annotated

import typer

from kapsi.cli.common import announce_recovery, machine_line, notes, score_rows
from kapsi.cli.common import table as show_table


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder that kapsi fit wrote.", show_default=False)],
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="A CSV or Parquet file with the target.", show_default=False)
    ],
) -> None:
    """Score a run on the rows of a table that has the target column."""
    from kapsi.data.tabular import read_table
    from kapsi.training.tables import load_run

    announce_recovery(run)
    model, _ = load_run(run)
    scores, rows, found = model.scores(read_table(table))
    notes(found)
    show_table(score_rows(model.task, {"kapsi": [scores]}), right=(1, 2))
    typer.echo(machine_line(model.task, [scores], f"{rows:,} rows"))
