"""`kapsi predict`: the predictions of a run for the rows of a table."""

from __future__ import annotations

from typing import Annotated

import typer

from kapsi.cli.common import announce_recovery, notes
from kapsi.errors import TableError


def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder that kapsi fit wrote.", show_default=False)],
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A CSV or Parquet file.", show_default=False)],
    output: Annotated[str, typer.Option(metavar="FILE", help="The CSV or Parquet file to write.", show_default=False)],
) -> None:
    """Predict the rows of a table: labels as they were in the data, with probabilities; or numbers."""
    import os

    from kapsi.data.tabular import read_table, write_table
    from kapsi.training.tables import load_run

    announce_recovery(run)
    model, manifest = load_run(run)
    target = os.path.realpath(output)
    if target == os.path.realpath(table):
        raise TableError(f"{output}: is the table itself; give another --output")
    if target in [os.path.realpath(os.path.join(run, name)) for name in manifest["files"]]:
        raise TableError(f"{output}: is a file of the run itself; give another --output")
    columns, found = model.predict(read_table(table))
    write_table(output, columns)
    notes(found)
    typer.echo(f"predictions: {output} ({len(columns['prediction']):,} rows)")
