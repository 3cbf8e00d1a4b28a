"""`kapsi evaluate`: score a run on a table."""

from __future__ import annotations

from kapsi.cli.common import announce_recovery, machine_line, notes, say, score_rows
from kapsi.cli.common import table as show_table
from kapsi.cli.options import Run, TableFile


def evaluate(run: Run, table: TableFile) -> None:
    """Score a run on the rows of a table with the target column."""
    from kapsi.tables import load_run

    announce_recovery(run)
    model, _ = load_run(run)
    scores, rows, messages = model.scores(model.read(table))
    notes(messages)
    show_table(score_rows(model.task, {"kapsi": [scores]}), right=(1, 2))
    say(machine_line(model.task, [scores], f"{rows:,} rows"))
