"""`kapsi evaluate`: score a run on a table."""

from __future__ import annotations

from typing import Any

from kapsi.cli import reading
from kapsi.cli.common import announce_recovery, machine_line, notes, readable, say, score_rows, show_json
from kapsi.cli.common import table as show_table
from kapsi.cli.options import Json, Run, TableFile
from kapsi.text import counted

EXAMPLES = """\
kapsi evaluate runs/table test.csv
kapsi evaluate runs/table test.parquet --json
"""


@reading.adds(reading.FORMAT)
def evaluate(
    run: Run,
    table: TableFile,
    json: Json = False,
    **of_reading: Any,
) -> None:
    """Score a run on the rows of a table (- for standard input) with the target column.

    The table is read with the options of the fit; options of reading given here replace them, and --missing adds words.
    """
    from kapsi.tables import load_run
    from kapsi.tables.scores import METRICS

    announce_recovery(run)
    loaded = load_run(run)
    with readable(table) as path:
        model = reading.with_reading(loaded.model, path, of_reading)
        scores, rows, messages = model.scores(model.read(path))
    notes(messages)
    if json:
        first, second = METRICS[model.task]
        values = {first: scores.main, second: scores.loss}
        facts = {"run": run, "table": table, "task": model.task, "unit": model.unit, "rows": rows}
        show_json({**facts, "scores": values, "notes": messages})
        return
    show_table(score_rows(model.task, {"kapsi": [scores]}, unit=model.unit), right=(1, 2))
    say(machine_line(model.task, [scores], counted(rows, "row")))
