"""`kapsi reproduce`: the paper's experiments, run, resumed and compared with the paper's numbers."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kapsi.cli.common import note, notes, table
from kapsi.errors import FileError, KapsiError, SpecError
from kapsi.files import check_place

if TYPE_CHECKING:
    from kapsi.paper.experiment import Experiment, Run
    from kapsi.paper.runner import Progress, RunReport
    from kapsi.paper.tables import ResultTable

BEGIN, END = "<!-- results of kapsi reproduce -->", "<!-- end of results -->"
# Without data these give nothing; the command in the summary says where they are.
_WITH_DATA = ("images", "text", "ablation")


class Format(StrEnum):
    """How tables are shown."""

    TABLE = "table"
    MARKDOWN = "markdown"
    HTML = "html"


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Experiments: names, all, or YAML files of your own. Without one, what there is.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where results are kept.  [default: results, with --quick a temporary folder]",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where data sets are.  [default: KAPSI_DATA, or else the hub]", show_default=False
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS",
            help="A count, a range such as 0-4 or a list such as 100,101.  [default: the experiment's]",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of processes.  [default: 1, with --quick 2]", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only rows and methods with this in their name, or row:method; several with commas.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Compute also what is done.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny budget, to see that everything runs.")] = False,
    shown: Annotated[Format, typer.Option("--format", help="How tables are shown.")] = Format.TABLE,
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the tables to a .md, .html or .txt file, too.", show_default=False),
    ] = None,
    summary: Annotated[
        bool,
        typer.Option(
            "--summary", help="Run nothing: write pages, pictures and README.md from the results into their folder."
        ),
    ] = False,
    into: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --summary: a Markdown file between whose marks the summary goes, too.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the paper's experiments; what is done is skipped, and tables show the paper's numbers beside."""
    from kapsi.paper.runner import check_jobs
    from kapsi.paper.short_forms import read_seeds

    chosen_seeds = read_seeds(seeds, "--seeds")
    running = {
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
    if into is not None and not into.strip():
        raise SpecError("--into: expected the name of a Markdown file, got nothing")
    if into is not None and not summary:
        raise SpecError("--into: goes with --summary, which writes what is put there")
    if output is not None and not output.strip():
        raise SpecError("--output: expected the name of a folder, got nothing")
    if not names:
        given = {"--summary": summary, "--seeds": seeds is not None, "--quick": quick, **running}
        for name in (name for name, is_given in given.items() if is_given):
            raise SpecError(f"{name}: of which experiments? write kapsi reproduce all {name}")
        if os.path.exists(output or "results") and not os.path.isdir(output or "results"):
            raise FileError(f"{output or 'results'}: is a file, expected a folder of results; give another --output")
        _list(output or "results")
        return
    for name in (name for name, is_given in running.items() if summary and is_given):
        raise SpecError(f"{name}: does not go with --summary, which runs nothing and writes whole pages; leave it out")
    experiments = _experiments(names)
    if summary:
        _summarize(experiments, output or "results", chosen_seeds, quick, into)
        return
    if folder is not None and not os.path.isdir(folder):
        raise FileError(f"--folder {folder}: there is no such folder")
    check_report(report, experiments)
    if shown is Format.HTML and len(experiments) > 1:
        raise SpecError("--format html: shows one experiment; --summary writes a page for each")
    with _output(output, quick) as results:
        failed = _run(experiments, results, chosen_seeds, quick, only, folder, jobs, again, shown, report)
    if failed:
        raise typer.Exit(1)


def check_report(report: str | None, experiments: Sequence[Experiment]) -> None:
    """Refuse a report that could not be written in the end, before anything is run."""
    if report is None:
        return
    suffix = Path(report).suffix.lower()
    if suffix not in (".md", ".html", ".txt"):
        raise FileError(f"--report {report}: expected a name that ends in .md, .html or .txt")
    if os.path.isdir(report):
        raise FileError(f"--report {report}: is a folder, expected a file")
    check_place(report, f"--report {report[:200]}", "give another path")
    if suffix == ".html" and len(experiments) > 1:
        raise SpecError(f"--report {report}: an HTML page is about one experiment; --summary writes a page for each")


@contextlib.contextmanager
def _output(given: str | None, quick: bool) -> Iterator[str]:
    if given is None and quick:
        with tempfile.TemporaryDirectory(prefix="kapsi-reproduce-") as folder:
            yield folder
    else:
        yield given or "results"


def _experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of names, `all` being every one that comes with kapsi, each once."""
    from kapsi.paper.experiment import load, load_shipped, shipped

    found: dict[str, Experiment] = {}
    for name in names:
        each = shipped() if name == "all" else [name]
        for one in each:
            own = one.endswith((".yaml", ".yml"))
            experiment = load(one) if own else load_shipped(one)
            if own and experiment.name in shipped() and experiment != load_shipped(experiment.name):
                raise SpecError(
                    f"{one}: an experiment that comes with kapsi is called {experiment.name!r}, and its results would be mixed up "
                    "with these; give the file and its name another name"
                )
            known = found.setdefault(experiment.name, experiment)
            if known != experiment:
                raise SpecError(f"{one}: another experiment is called {experiment.name!r}, too; give them one by one")
    return list(found.values())


def _run(
    experiments: Sequence[Experiment],
    output: str,
    seeds: Sequence[int] | None,
    quick: bool,
    only: str | None,
    folder: str | None,
    jobs: int,
    again: bool,
    shown: Format,
    report: str | None,
) -> bool:
    """Run experiments, show their tables and the last line; return whether a run failed that should not have."""
    from kapsi.paper.expected import load_expected
    from kapsi.paper.runner import offline, run_experiments

    expected = {experiment.name: load_expected(experiment) for experiment in experiments}
    made = [experiment.plan(seeds=seeds, quick=quick, only=only, folder=folder) for experiment in experiments]
    # What is misspelled among other parts would be left out without a word.
    unused = [part for part in made[0].unused if all(part in plan.unused for plan in made)]
    if unused:
        raise SpecError(
            f"--only {unused[0]}: no row and no method of {', '.join(e.name for e in experiments)} that is run"
            f"{' with --quick' if quick else ''} has this in its name"
        )
    plans = [(experiment, plan.runs) for experiment, plan in zip(experiments, made, strict=True)]
    with _progress() as progress, offline(folder) if quick else contextlib.nullcontext():
        done = run_experiments(plans, output, jobs=jobs, again=again, progress=progress)
    notes(done.notes)
    tables = [
        _table(experiment, expected[experiment.name], output, seeds, quick, runs if only is not None else None)
        for experiment, runs in plans
    ]
    tables = [found for found in tables if found.named]
    texts = [_shown(found, shown) for found in tables]
    typer.echo("\n".join(texts))
    _say(done)
    if report is not None:
        suffix = Path(report).suffix.lower()
        style = {".md": Format.MARKDOWN, ".html": Format.HTML, ".txt": Format.TABLE}[suffix]
        _write(report, "\n".join(_shown(found, style) for found in tables))
    typer.echo(f"rows: {sum(found.done for found in tables)} of {sum(found.named for found in tables)}")
    return any(not failure.missing for failure in done.failures)


def _shown(found: ResultTable, style: Format) -> str:
    from kapsi.paper.render import as_html, as_markdown, as_text

    if style is Format.MARKDOWN:
        return as_markdown(found)
    if style is Format.HTML:
        return as_html(found)
    return as_text(found, min(max(shutil.get_terminal_size((120, 24)).columns, 40), 160))


def _table(
    experiment: Experiment,
    expected: Any,
    output: str,
    seeds: Sequence[int] | None,
    quick: bool,
    runs: Sequence[Run] | None = None,
) -> ResultTable:
    from kapsi.paper.store import ResultStore
    from kapsi.paper.tables import build

    rows = None if runs is None else {run.row for run in runs}
    return build(
        experiment, expected, ResultStore(output, experiment.name).read(), seeds=seeds, quick=quick, only_rows=rows
    )


def _say(done: RunReport) -> None:
    """Name the runs that gave nothing, those with the same reason together."""
    missing: dict[str, dict[str, None]] = {}
    others: dict[tuple[str, str], dict[str, None]] = {}
    for failure in done.failures:
        run = failure.run
        if failure.missing:
            missing.setdefault(failure.message, {})[f"{run.experiment} {run.row}"] = None
        else:
            others.setdefault((run.experiment, failure.message), {})[f"{run.row} {run.method} seed {run.seed}"] = None
    if done.elsewhere:
        at = list(dict.fromkeys(f"{run.experiment} {run.row} {run.method}" for run in done.elsewhere))
        note(f"another process is at {_few(at)}; the same command shows them when they are done")
    for message, places in missing.items():
        note(f"skipped {_few(list(places))}: {message}")
    for (experiment, message), places in others.items():
        note(f"failed: {experiment}: {_few(list(places))}: {message}")


def _few(places: Sequence[str]) -> str:
    return ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """Give what shows the progress on standard error, or None where that is not a terminal."""
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

        def told(run: Run | None, done: int, total: int) -> None:
            text = "reproduce" if run is None else f"{run.experiment} · {run.row} · {run.method} · seed {run.seed}"
            bar.update(task, description=text.replace("[", "\\["), completed=done, total=total)

        yield told


def _list(output: str) -> None:
    """Show the experiments that there are, and what of them is done."""
    from kapsi.paper.expected import load_expected
    from kapsi.paper.experiment import load_shipped, shipped

    rows = [("", "", "rows", "methods", "done", "")]
    for name in shipped():
        try:
            experiment = load_shipped(name)
            found = _table(experiment, load_expected(experiment), output, None, False)
        except KapsiError as error:
            note(str(error))
            continue
        done = f"{found.done} of {found.named}"
        rows.append((name, experiment.title, str(found.named), str(len(experiment.methods)), done, experiment.time))
    table(rows, right=(2, 3, 4))
    typer.echo("\nkapsi reproduce NAME runs one, kapsi reproduce all every one; --quick takes a minute")


# ------------------------------------------------------------------------------------------------ pages from results


def _summarize(
    experiments: Sequence[Experiment], output: str, seeds: Sequence[int] | None, quick: bool, into: str | None
) -> None:
    """Write the page and the pictures of each experiment, and README.md over all that come with kapsi."""
    from kapsi.paper.expected import load_expected
    from kapsi.paper.experiment import load_shipped, shipped
    from kapsi.paper.pictures import pictures
    from kapsi.paper.render import as_html, as_markdown, overview, readme
    from kapsi.paper.store import ResultStore

    if not os.path.isdir(output):
        raise FileError(f"{output}: there is no folder of results; run kapsi reproduce first, or give its --output")
    if into is not None:
        pages = [
            "README.md",
            *(f"{each.name}{suffix}" for each in experiments for suffix in (".md", ".html", ".jsonl")),
        ]
        for page in pages:
            if os.path.realpath(into) == os.path.realpath(os.path.join(output, page)):
                raise SpecError(f"--into {into}: is written anew by --summary; give another Markdown file")
        _between(into, "")  # whether it can be done, before anything is written
    tables: dict[str, ResultTable] = {}
    for experiment in experiments:
        expected = load_expected(experiment)
        found = _table(experiment, expected, output, seeds, quick)
        tables[experiment.name] = found
        if not found.done:
            typer.echo(f"{experiment.name}: not run, no page")
            for old in (Path(output) / f"{experiment.name}{suffix}" for suffix in (".md", ".html")):
                if old.exists():
                    note(f"{old} is of results that are not there, or of other settings; delete it")
            continue
        store = ResultStore(output, experiment.name)
        drawn = pictures(found, store.read())
        notes(store.notes)
        for picture in drawn:
            _write(str(Path(output) / picture.file), picture.svg)
        named = [(picture.title, picture.file) for picture in drawn]
        _write(str(Path(output) / f"{experiment.name}.md"), as_markdown(found, named))
        _write(
            str(Path(output) / f"{experiment.name}.html"),
            as_html(found, [(picture.title, picture.svg) for picture in drawn]),
        )
        typer.echo(f"{Path(output) / experiment.name}.md: {found.done} of {found.named} rows")
    ordered: list[ResultTable] = []
    for name in [*shipped(), *(name for name in tables if name not in shipped())]:
        if name not in tables:
            experiment = load_shipped(name)
            tables[name] = _table(experiment, load_expected(experiment), output, seeds, quick)
        ordered.append(tables[name])
    commands = {found.experiment.name: _command(found, quick) for found in ordered}
    _write(str(Path(output) / "README.md"), readme(ordered, commands))
    typer.echo(f"{Path(output) / 'README.md'}")
    if into is not None:
        _write(into, _between(into, overview(ordered, _link(into, output))))
        typer.echo(into)
    typer.echo(f"rows: {sum(found.done for found in ordered)} of {sum(found.named for found in ordered)}")


def _command(found: ResultTable, quick: bool) -> str:
    experiment = found.experiment
    used = {
        method.procedure or line.row.procedure or experiment.procedure
        for line in found.lines
        for method in experiment.methods
    }
    data = " --folder DATA" if used & set(_WITH_DATA) else ""
    from kapsi.paper.experiment import shipped

    name = experiment.name if experiment.name in shipped() else f"{experiment.name}.yaml"
    return f"kapsi reproduce {name}{data}{' --quick' if quick else ''}"


def _between(path: str, text: str) -> str:
    """Return a Markdown file with what is between the marks replaced."""
    from kapsi.spec import read_text

    content = read_text(path, "Markdown file")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SpecError(f"--into {path}: has no lines {BEGIN} and {END}; put them where the summary belongs")
    made = f"{before}{begin}\n{text}{end}{after}"
    return made.replace("\n", "\r\n") if b"\r\n" in Path(path).read_bytes() else made


def _link(page: str, folder: str) -> str:
    """Return the way from a page to a folder, as links have it."""
    way = Path(os.path.relpath(folder, Path(page).parent)).as_posix()
    return "" if way == "." else f"{way}/"


def _write(path: str, text: str) -> None:
    from kapsi.files import atomic, plain

    with atomic(path) as beside, plain(path, "write the file"):
        beside.write_text(text, encoding="utf-8")
