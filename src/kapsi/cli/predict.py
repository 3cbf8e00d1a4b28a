"""`kapsi predict`: write the predictions of a run for the rows of a table."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from kapsi.cli.common import announce_recovery, new_file, notes, say
from kapsi.cli.options import Output, Run, TableFile
from kapsi.errors import FileError

Replace: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


def predict(run: Run, table: TableFile, output: Output, overwrite: Replace = False) -> None:
    """Predict the rows of a table: original labels with probabilities, or real values."""
    import os

    from kapsi.data.tabular import write_table
    from kapsi.training.tables import load_run

    announce_recovery(run)
    model, manifest = load_run(run)
    target = os.path.realpath(output)
    if target == os.path.realpath(table):
        raise FileError(f"{output}: is the table itself; give another --output")
    if target in [os.path.realpath(os.path.join(run, name)) for name in manifest["files"]]:
        raise FileError(f"{output}: is a file of the run itself; give another --output")
    new_file(output, overwrite)
    columns, messages = model.predict(model.read(table))
    write_table(output, columns)
    notes(messages)
    say(f"predictions: {output} ({len(columns['prediction']):,} rows)")
