"""`kapsi reproduce`: run the paper's experiments and compare them with the paper's results."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kapsi.cli.common import note, notes, say, table
from kapsi.errors import FileError, KapsiError, SpecError, printable
from kapsi.files import check_place

if TYPE_CHECKING:
    from kapsi.paper.expected import Expected
    from kapsi.paper.experiment import Experiment, Run
    from kapsi.paper.runner import ProgressCallback, RunReport
    from kapsi.paper.tables import ResultTable

EXAMPLES = """\
kapsi reproduce
kapsi reproduce elementary --seeds 3
kapsi reproduce all --quick
"""

BEGIN, END = "<!-- results of kapsi reproduce -->", "<!-- end of results -->"
BEGIN_SHORT = "<!-- short results of kapsi reproduce -->"
# Procedures that need --folder.
_WITH_DATA = ("images", "text", "ablation")


class Format(StrEnum):
    """Format of the tables."""

    TABLE = "table"
    MARKDOWN = "markdown"
    HTML = "html"


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Experiment names, `all`, or your own YAML files. Without one, list the experiments.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the results.  \\[default: results, with --quick a temporary folder]",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder of the data sets.  \\[default: KAPSI_DATA, or the hub]", show_default=False
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS",
            help="A count, a range such as 0-4 or a list such as 100,101.  \\[default: the experiment's]",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of processes.  \\[default: 1, with --quick 2]", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only rows and methods whose name contains this, or row:method; separate several by commas.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat finished runs.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny budget that only checks the experiments.")] = False,
    shown: Annotated[Format, typer.Option("--format", help="Format of the tables.")] = Format.TABLE,
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write the tables to a .md, .html or .txt file.", show_default=False),
    ] = None,
    summary: Annotated[
        bool,
        typer.Option(
            "--summary", help="Run nothing; write pages, pictures and README.md from the results into their folder."
        ),
    ] = False,
    into: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --summary: also write the overview between the marks of a Markdown file.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the paper's experiments (runs already stored are skipped), and compare the results with the paper's."""
    from kapsi.paper.runner import check_jobs
    from kapsi.paper.short_forms import read_seeds

    chosen_seeds = read_seeds(seeds, "--seeds")
    only_running = {
        "--only": only is not None,
        "--report": report is not None,
        "--again": again,
        "--jobs": jobs is not None,
        "--folder": folder is not None,
        "--format": shown is not Format.TABLE,
    }
    if jobs is None:
        jobs = min(2, os.cpu_count() or 1) if quick else 1
    check_jobs(jobs, "--jobs")
    _check_targets(output, into, summary)
    if not names:
        options = {"--summary": summary, "--seeds": seeds is not None, "--quick": quick, **only_running}
        _refuse(options, "needs experiment names; for all: kapsi reproduce all {}")
        _list(output or "results")
        return
    if summary:
        _refuse(
            only_running, "cannot be combined with --summary, which runs nothing and writes whole pages; leave it out"
        )
        _summarize(_experiments(names), output or "results", chosen_seeds, quick, into)
        return
    experiments = _experiments(names)
    if folder is not None and not os.path.isdir(folder):
        raise FileError(f"--folder {folder}: there is no such folder")
    check_report(report, experiments)
    if shown is Format.HTML and len(experiments) > 1:
        raise SpecError("--format html: shows one experiment; --summary writes a page for each")
    with _output(output, quick) as results:
        request = _Request(results, chosen_seeds, quick, only, folder, jobs, again, shown, report)
        failed = _run(experiments, request)
    if failed:
        raise typer.Exit(1)


class _Request(NamedTuple):
    """Options of the command for runs."""

    output: str
    seeds: Sequence[int] | None
    quick: bool
    only: str | None
    folder: str | None
    jobs: int
    again: bool
    shown: Format
    report: str | None


def _refuse(options: Mapping[str, bool], problem: str) -> None:
    """Raise a `SpecError` for the first option set."""
    for name, is_set in options.items():
        if is_set:
            raise SpecError(f"{name} {problem.format(name)}")


def _check_targets(output: str | None, into: str | None, summary: bool) -> None:
    """Check the options that name a file or a folder."""
    for name, value, kind in (("--into", into, "Markdown file"), ("--output", output, "folder")):
        if value is not None and not value.strip():
            raise SpecError(f"{name}: expected the name of a {kind}, got nothing")
    if into is not None and not summary:
        raise SpecError("--into needs --summary, which writes the overview")


def check_report(report: str | None, experiments: Sequence[Experiment]) -> None:
    """Refuse an unwritable report before the first run."""
    if report is None:
        return
    suffix = Path(report).suffix.lower()
    problem = ""
    if suffix not in (".md", ".html", ".txt"):
        problem = "expected a name that ends in .md, .html or .txt"
    elif os.path.isdir(report):
        problem = "is a folder, expected a file"
    elif suffix == ".html" and len(experiments) > 1:
        problem = "an HTML page shows one experiment; --summary writes a page for each"
    if problem:
        raise FileError(f"--report {report}: {problem}")
    check_place(report, f"--report {report[:200]}", "give another path")


@contextlib.contextmanager
def _output(output: str | None, quick: bool) -> Iterator[str]:
    if output is None and quick:
        with tempfile.TemporaryDirectory(prefix="kapsi-reproduce-") as folder:
            yield folder
    else:
        yield output or "results"


def _experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of names, each once; `all` means every experiment of the package."""
    from kapsi.paper.experiment import load, load_shipped, shipped

    experiments: dict[str, Experiment] = {}
    for name in itertools.chain.from_iterable(shipped() if name == "all" else [name] for name in names):
        is_file = name.endswith((".yaml", ".yml"))
        experiment = load(name) if is_file else load_shipped(name)
        known = experiments.setdefault(experiment.name, experiment)
        if is_file and known == experiment and experiment.name in shipped():
            known = load_shipped(experiment.name)
        if known != experiment:
            raise SpecError(
                f"{name}: another experiment is called {experiment.name!r}, and their results would be mixed up; "
                "give the file and its name another name"
            )
    return list(experiments.values())


def _run(experiments: Sequence[Experiment], request: _Request) -> bool:
    """Run experiments, show their tables and the last line; return whether a run failed with its data present."""
    from kapsi.paper.expected import load_expected
    from kapsi.paper.runner import offline, run_experiments

    seeds, quick, only, output = request.seeds, request.quick, request.only, request.output
    expected = {experiment.name: load_expected(experiment) for experiment in experiments}
    plans = [experiment.plan(seeds=seeds, quick=quick, only=only, folder=request.folder) for experiment in experiments]
    # A typo among several parts would go unnoticed.
    unused = [part for part in plans[0].unused if all(part in plan.unused for plan in plans)]
    if unused:
        names = ", ".join(experiment.name for experiment in experiments)
        raise SpecError(
            f"--only {unused[0]}: no row and no method of {names} that is run{' with --quick' if quick else ''} "
            "has this in its name"
        )
    pairs = [(experiment, plan.runs) for experiment, plan in zip(experiments, plans, strict=True)]
    with _progress() as progress, offline(request.folder) if quick else contextlib.nullcontext():
        report = run_experiments(pairs, output, jobs=request.jobs, again=request.again, progress=progress)
    notes(report.notes)
    tables = [
        _table(experiment, expected[experiment.name], output, seeds, quick, runs if only is not None else None)
        for experiment, runs in pairs
    ]
    tables = [result for result in tables if result.named]
    say(*(line for result in tables for line in _shown(result, request.shown).split("\n")))
    _show_failures(report)
    if request.report is not None:
        styles = {".md": Format.MARKDOWN, ".html": Format.HTML, ".txt": Format.TABLE}
        style = styles[Path(request.report).suffix.lower()]
        _write(request.report, "\n".join(_shown(result, style) for result in tables))
    _show_count(tables)
    return any(not failure.missing for failure in report.failures)


def _show_count(tables: Sequence[ResultTable]) -> None:
    say(f"rows: {sum(result.done for result in tables)} of {sum(result.named for result in tables)}")


def _shown(result: ResultTable, style: Format) -> str:
    from kapsi.paper.render import as_html, as_markdown, as_text

    if style is Format.MARKDOWN:
        return as_markdown(result)
    if style is Format.HTML:
        return as_html(result)
    return as_text(result, min(max(shutil.get_terminal_size((120, 24)).columns, 40), 160))


def _table(
    experiment: Experiment,
    expected: Expected,
    output: str,
    seeds: Sequence[int] | None,
    quick: bool,
    runs: Sequence[Run] | None = None,
) -> ResultTable:
    from kapsi.paper.store import ResultStore
    from kapsi.paper.tables import build

    results = ResultStore(output, experiment.name).read()
    rows = None if runs is None else {run.row for run in runs}
    return build(experiment, expected, results, seeds=seeds, quick=quick, only_rows=rows)


def _show_failures(report: RunReport) -> None:
    """Name the runs without a result, grouped by reason."""
    missing: dict[str, dict[str, None]] = {}
    others: dict[tuple[str, str], dict[str, None]] = {}
    for failure in report.failures:
        run = failure.run
        if failure.missing:
            missing.setdefault(failure.message, {})[f"{run.experiment} {run.row}"] = None
        else:
            others.setdefault((run.experiment, failure.message), {})[f"{run.row} {run.method} seed {run.seed}"] = None
    if report.elsewhere:
        names = list(dict.fromkeys(f"{run.experiment} {run.row} {run.method}" for run in report.elsewhere))
        note(f"another process runs {_few(names)}; the same command shows them later")
    for message, rows in missing.items():
        note(f"skipped {_few(list(rows))}: {message}")
    for (experiment, message), runs in others.items():
        note(f"failed: {experiment}: {_few(list(runs))}: {message}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@contextlib.contextmanager
def _progress() -> Iterator[ProgressCallback | None]:
    """Yield a progress bar on standard error, or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reproduce", total=None)

        def update(run: Run | None, done: int, total: int) -> None:
            text = "reproduce" if run is None else f"{run.experiment} · {run.row} · {run.method} · seed {run.seed}"
            bar.update(task, description=printable(text).replace("[", "\\["), completed=done, total=total)

        yield update


def _list(output: str) -> None:
    """List the experiments with their progress."""
    from kapsi.paper.expected import load_expected
    from kapsi.paper.experiment import load_shipped, shipped

    if os.path.exists(output) and not os.path.isdir(output):
        raise FileError(f"{output}: is a file, expected a folder of results; give another --output")
    rows = [("", "", "rows", "methods", "done", "")]
    for name in shipped():
        try:
            experiment = load_shipped(name)
            result = _table(experiment, load_expected(experiment), output, None, False)
        except KapsiError as error:
            note(str(error))
            continue
        done = f"{result.done} of {result.named}"
        rows.append((name, experiment.title, str(result.named), str(len(experiment.methods)), done, experiment.time))
    table(rows, right=(2, 3, 4))
    say("", "kapsi reproduce NAME runs one experiment, kapsi reproduce all runs all; --quick takes a minute")


# ------------------------------------------------------------------------------------------------ pages from results


def _summarize(
    experiments: Sequence[Experiment], output: str, seeds: Sequence[int] | None, quick: bool, into: str | None
) -> None:
    """Write the page and the pictures of each experiment, and README.md about all experiments of the package."""
    from kapsi.paper.expected import load_expected
    from kapsi.paper.experiment import load_shipped, shipped
    from kapsi.paper.overview import overview, readme, short_overview
    from kapsi.spec import read_text

    if not os.path.isdir(output):
        raise FileError(f"{output}: no results folder; run kapsi reproduce first, or give its --output")
    if into is not None:
        _check_into(into, output, experiments)
    tables = {e.name: _table(e, load_expected(e), output, seeds, quick) for e in experiments}
    for name, result in tables.items():
        if result.done:
            _write_page(result, output)
            continue
        say(f"{name}: not run, no page")
        for old in (Path(output) / f"{name}{suffix}" for suffix in (".md", ".html")):
            if old.exists():
                note(f"{old} shows results that no longer exist, or results of other versions; delete it")
    for name in shipped():
        if name not in tables:
            experiment = load_shipped(name)
            tables[name] = _table(experiment, load_expected(experiment), output, seeds, quick)
    ordered = [tables[name] for name in [*shipped(), *(name for name in tables if name not in shipped())]]
    commands = {result.experiment.name: _command(result, quick) for result in ordered}
    _write(str(Path(output) / "README.md"), readme(ordered, commands))
    say(f"{Path(output) / 'README.md'}")
    if into is not None:
        link = _link(into, output)
        short = BEGIN_SHORT in read_text(into, "Markdown file").splitlines()
        text = short_overview(ordered, link) if short else overview(ordered, link, f"{link}README.md")
        _write(into, _between(into, text))
        say(into)
    _show_count(ordered)


def _check_into(into: str, output: str, experiments: Sequence[Experiment]) -> None:
    """Refuse a page written by the summary, and a file without marks, before anything is written."""
    pages = ["README.md", *(f"{e.name}{suffix}" for e in experiments for suffix in (".md", ".html", ".jsonl"))]
    if os.path.realpath(into) in {os.path.realpath(os.path.join(output, page)) for page in pages}:
        raise SpecError(f"--into {into}: is rewritten by --summary; give another Markdown file")
    _between(into, "")


def _write_page(result: ResultTable, output: str) -> None:
    """Write the pages and the pictures of an experiment."""
    from kapsi.paper.pictures import pictures
    from kapsi.paper.render import as_html, as_markdown
    from kapsi.paper.store import ResultStore

    name = result.experiment.name
    store = ResultStore(output, name)
    drawn = pictures(result, store.read())
    notes(store.notes)
    for picture in drawn:
        _write(str(Path(output) / picture.file), picture.svg)
    page = Path(output) / f"{name}.md"
    _write(str(page), as_markdown(result, [(picture.title, picture.file) for picture in drawn]))
    _write(str(page.with_suffix(".html")), as_html(result, [(picture.title, picture.svg) for picture in drawn]))
    say(f"{page}: {result.done} of {result.named} rows")


def _command(result: ResultTable, quick: bool) -> str:
    """Return the command that runs an experiment."""
    from kapsi.paper.experiment import shipped

    experiment = result.experiment
    procedures = {
        method.procedure or line.row.procedure or experiment.procedure
        for line in result.lines
        for method in experiment.methods
    }
    data = " --folder DATA" if procedures & set(_WITH_DATA) else ""
    name = experiment.name if experiment.name in shipped() else f"{experiment.name}.yaml"
    return f"kapsi reproduce {name}{data}{' --quick' if quick else ''}"


def _between(path: str, text: str) -> str:
    """Return a Markdown file with the section between its marks replaced."""
    from kapsi.spec import read_text

    content = read_text(path, "Markdown file")
    # A mark is a line: pages may mention it elsewhere.
    before, begin, rest = content.partition(f"{BEGIN_SHORT if BEGIN_SHORT in content.splitlines() else BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SpecError(
            f"--into {path}: has no lines {BEGIN} (or {BEGIN_SHORT}) and {END}; put them where the overview belongs"
        )
    page = f"{before}{begin}{text}{end}{after}"
    return page.replace("\n", "\r\n") if b"\r\n" in Path(path).read_bytes() else page


def _link(page: str, folder: str) -> str:
    """Return the relative link from a page to a folder."""
    way = Path(os.path.relpath(folder, Path(page).parent)).as_posix()
    return "" if way == "." else f"{way}/"


def _write(path: str, text: str) -> None:
    from kapsi.files import atomic, plain

    with atomic(path) as temporary, plain(path, "write the file"):
        temporary.write_text(text, encoding="utf-8")
