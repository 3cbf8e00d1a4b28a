"""`kapsi demo`: fit a model to a bundled table."""

from __future__ import annotations

from typing import Annotated

import typer

from kapsi.cli.common import announce_recovery, fit_page, progress_bar, show_report
from kapsi.cli.options import Json, NoReport, Open, Overwrite
from kapsi.errors import SpecError

EXAMPLES = """\
kapsi demo
kapsi demo --output runs/demo --overwrite
"""

ABOUT = "fitting 1,372 rows, 6 times"


def at_once(output: str | None = None, **_: object) -> str:
    """Return the first note, before the import of torch; empty for a run folder that may be refused."""
    return ABOUT if output is None else ""


def demo(
    output: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The run folder.  \\[default: runs/demo]", show_default=False),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    no_report: NoReport = False,
    open_: Open = False,
) -> None:
    """Fit Banknote Authentication (1,372 banknotes, 4 measurements, genuine or forged) with 5 folds."""
    from kapsi.data.bundled import bundled_file
    from kapsi.recipes import Auto
    from kapsi.tables import RunConfig, TableConfig, fit_table
    from kapsi.training.run_folder import free_path

    if open_ and no_report:
        raise SpecError("--open: needs the report; leave --no-report out")
    first = "" if at_once(output) else ABOUT
    if output is None:
        output = "runs/demo" if overwrite else str(free_path("runs/demo"))
    announce_recovery(output)
    config = RunConfig(TableConfig(target="class", folds=5), recipe=Auto())
    with bundled_file("banknote") as path, progress_bar(6, first=first) as bar:
        report = fit_table(path, config, output, overwrite=overwrite, callbacks=bar or ())
    show_report(report, json, fit_page(report.path, no_report=no_report, open_=open_))
