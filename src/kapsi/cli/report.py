"""`kapsi report`: write the HTML page of a run, or a page that compares runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kapsi.cli.common import announce_recovery, new_file, open_page, say, show_json
from kapsi.cli.options import OUTPUT, Json, Open, option
from kapsi.errors import SpecError

EXAMPLES = """\
kapsi report runs/table
kapsi report runs/table --open
kapsi report runs/first runs/second --output comparison.html
"""

Runs: TypeAlias = Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders of kapsi fit.")]
Page: TypeAlias = Annotated[
    str | None,
    option(
        OUTPUT, "FILE", "The HTML file to write.  \\[default: report.html in RUN; comparison.html for several runs]"
    ),
]
Replace: TypeAlias = Annotated[bool, option(OUTPUT, None, "Replace an existing file.", "--overwrite")]


def report(
    runs: Runs, output: Page = None, overwrite: Replace = False, open_: Open = False, json: Json = False
) -> None:
    """Write a page about a run: scores, effects of the columns, errors, configuration; or a page that compares runs."""
    from kapsi.report import write_comparison, write_report

    if len(set(runs)) < len(runs):
        raise SpecError("report: a run is given twice; leave one out")
    if len(runs) > 1 and output is None:
        output = "comparison.html"
    if output is not None:
        new_file(output, overwrite, *runs)
    for run in runs:
        announce_recovery(run)
    page = write_report(runs[0], output) if len(runs) == 1 else write_comparison(runs, str(output))
    if json:
        show_json({"runs": runs, "report": str(page)})
    else:
        say(f"report: {page}")
    if open_:
        open_page(Path(page))
