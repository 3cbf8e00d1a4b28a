"""`kapsi tune`: try configurations of a model on inner folds, and fit the best one as a run."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from kapsi.cli import reading
from kapsi.cli.common import begin, fit_page, note, notes, number, readable, run_data, say, show_json, show_report
from kapsi.cli.common import table as show_table
from kapsi.cli.fit import (
    ClassWeight,
    Configuration,
    Drop,
    Group,
    HeadNames,
    Metric,
    RunFolder,
    Seed,
    Strict,
    Target,
    Task,
    Time,
    Validation,
    Weight,
    prepare,
    targets_of,
)
from kapsi.cli.options import MODEL, OUTPUT, TRAINING, Json, NoReport, Open, Overwrite, TableFile, option
from kapsi.errors import SpecError
from kapsi.files import check_place
from kapsi.text import counted

if TYPE_CHECKING:
    from kapsi.tables import TrialRow, TuneReport

EXAMPLES = """\
kapsi tune table.csv --target price --trials 50
kapsi tune table.csv --target class --timeout 600 --storage study.log
kapsi tune table.csv --target class --storage sqlite:///study.db --only-trials
"""

Trials: TypeAlias = Annotated[int, option(TRAINING, "N", "Trials of the study, of all processes.", show_default=True)]
Timeout: TypeAlias = Annotated[float | None, option(TRAINING, "S", "Seconds after which no trial begins.")]
InnerFolds: TypeAlias = Annotated[
    int, option(TRAINING, "K", "Folds of the training rows that score a trial.", show_default=True)
]
Storage: TypeAlias = Annotated[
    str | None,
    option(
        OUTPUT,
        "FILE|URL",
        "Where trials are kept, a file or a database, sqlite:///study.db.  \\[default: a file beside the run, deleted at the end]",
    ),
]
OnlyTrials: TypeAlias = Annotated[
    bool, option(OUTPUT, None, "Run trials of a study that another process ends; write no run.", "--only-trials")
]
Budget: TypeAlias = Annotated[
    float | None, option(MODEL, "S", "Estimated seconds for a sum of heads on each fold.", min=0.1)
]


@reading.adds(reading.OPTIONS)
def tune(
    table: TableFile,
    target: Target = None,
    trials: Trials = 50,
    timeout: Timeout = None,
    storage: Storage = None,
    inner_folds: InnerFolds = 3,
    only_trials: OnlyTrials = False,
    task: Task = "auto",
    output: RunFolder = None,
    head: HeadNames = None,
    budget: Budget = None,
    seed: Seed = None,
    drop: Drop = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
    weight: Weight = None,
    group: Group = None,
    time: Time = None,
    validation: Validation = None,
    metric: Metric = None,
    class_weight: ClassWeight = None,
    json: Json = False,
    no_report: NoReport = False,
    open_: Open = False,
    **of_reading: Any,
) -> None:
    """Try heads, functions, widths, penalties and solvers on inner folds, and fit the best as a run."""
    options = {**locals(), **of_reading}
    if open_ and (no_report or only_trials):
        raise SpecError(f"--open: needs the report; leave {'--no-report' if no_report else '--only-trials'} out")
    if only_trials and storage is None:
        raise SpecError("--only-trials: needs --storage, where another process finds the trials")
    from kapsi.recipes import Auto
    from kapsi.tables import TableConfig, TuneConfig, tune_problem

    roles: Any = {
        "weight": weight,
        "group": group,
        "time": time,
        "validation": validation,
        "metrics": tuple(metric or ()),
    }
    how = reading.reading_of(of_reading)
    config = TableConfig(targets_of(target, table, how), task, None, strict, tuple(drop or ()), reading=how, **roles)
    study = TuneConfig(trials, timeout, inner_folds, storage)
    with readable(table) as path:
        problem, whole = prepare(
            path,
            config,
            Configuration(recipe=Auto(budget=budget, heads=cast(Any, tuple(head or ())))),
            [],
            seed,
            class_weight,
        )
    place = Path(storage or f"{output or Path('runs') / Path(problem.name).stem}.trials.log")
    if storage is None:
        study = TuneConfig(trials, timeout, inner_folds, str(place))
        check_place(place, repr(str(output or place.parent)), "give another --output")
    finished: list[int] = []
    with _resumable(place, storage is None, finished):
        report = tune_problem(
            problem,
            whole,
            study,
            output,
            overwrite=overwrite,
            refit=not only_trials,
            on_begin=lambda: begin(f"{counted(trials, 'trial')} on {counted(len(problem.y), 'row')} of {problem.name}"),
            on_trial=lambda row, count: _show_trial(row, count, finished),
        )
    page = None if report.report is None else fit_page(report.report.path, no_report=no_report, open_=open_)
    _show(report, problem.task, json, page)


@contextlib.contextmanager
def _resumable(place: Path, own: bool, finished: list[int]) -> Any:
    """Remove the file of the trials at the end; after an interrupt, say how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        if finished:
            kept = place if own else "the storage"
            note(f"interrupted: {counted(len(finished), 'trial')} kept in {kept}; the same command resumes")
        elif own:
            _remove(place)
        raise
    except BaseException:
        if own and not finished:
            _remove(place)
        raise
    if own:
        _remove(place)


def _remove(place: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(place)
    with contextlib.suppress(OSError):
        os.rmdir(place.parent)  # of the default run, if it is empty


def _show_trial(row: TrialRow | None, count: int, finished: list[int]) -> None:
    finished.append(count)
    if sys.stderr.isatty():
        result = "given up" if row is None else f"{row.model}: loss {row.loss:.4g}"
        say(f"trial {count}: {result}", err=True)


def _show(report: TuneReport, task: str, json: bool, page: Path | None) -> None:
    """Write the Pareto front and the run with its page, as tables or as one JSON object."""
    from kapsi.tables.scores import METRICS, SHOWN
    from kapsi.training.run_folder import peek

    if json:
        fit = report.report
        run = {} if fit is None else {**run_data(fit.path, peek(fit.path) or {}), "notes": fit.notes}
        run |= {} if page is None else {"report": str(page)}
        show_json({**run, "trials": report.counts, "front": [row._asdict() for row in report.front]})
        if fit is not None:
            notes(fit.notes)
        return
    first, second = (SHOWN[name] for name in METRICS[task])
    counts = ", ".join(f"{count} {state}" for state, count in report.counts.items())
    say(f"Trials on inner folds of the training rows ({counts}) that no other surpasses in loss, size and time")
    rows = [("trial", second, first, "parameters", "seconds", "model")]
    rows += [
        (str(r.number), number(r.loss, None), number(r.score, None), f"{r.parameters:,}", f"{r.seconds:.2f}", r.model)
        for r in report.front
    ]
    show_table(rows, right=range(5))
    if report.report is not None:
        say()
        show_report(report.report, page=page)
