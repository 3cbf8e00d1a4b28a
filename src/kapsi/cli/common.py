"""Shared parts of the commands: notes, tables, reports, progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kapsi.errors import FileError, line_of, printable
from kapsi.files import finite, temporary_folder
from kapsi.text import counted, text_table

if TYPE_CHECKING:
    from kapsi.recipes import LeaderboardRow
    from kapsi.tables import FitReport, MoreScores, Scores
    from kapsi.training.records import Epoch, Step


def say(*lines: str, err: bool = False) -> None:
    """Write lines of text, by default an empty line; every message of the command line passes here.

    Control characters of names, labels and paths are escaped, also their line breaks. A standard error that cannot be written,
    as on a full disk, loses the message, not the work.

    Args:
        lines: text without final line breaks.
        err: write to standard error.
    """
    try:
        typer.echo("\n".join(map(printable, lines)), err=err)
    except OSError:
        if not err:
            raise
        discard(sys.stderr)


def discard(stream: Any) -> None:
    """Redirect an unwritable stream to the null device; otherwise the interpreter fails with code 120 at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_data(text: str) -> None:
    """Write rows of data to standard output; on a terminal without control characters."""
    if sys.stdout is not None and sys.stdout.isatty():
        text = "\n".join(map(printable, text.split("\n")))
    typer.echo(text, nl=False)


def show_json(data: Mapping[str, Any]) -> None:
    """Write one JSON object to standard output; NaN and infinite numbers are null, and text is ASCII with escapes."""
    typer.echo(json.dumps(finite(data), indent=2))


def note(text: str) -> None:
    """Write a note of one line to standard error."""
    say(f"note: {line_of(' '.join(text.split()))}", err=True)


def notes(texts: Iterable[str]) -> None:
    """Write several notes."""
    for text in texts:
        note(text)


def announce_recovery(path: str) -> None:
    """Recover a run folder after an interrupted command, with a note."""
    from kapsi.training.run_folder import recover

    text = recover(path)
    if text:
        note(text)


def new_file(output: str, overwrite: bool, *sources: str) -> None:
    """Check the name of a new file, or of an old one with `overwrite`, but never of a file that one of `sources` needs.

    Args:
        output: name of the file.
        overwrite: whether an old file may be replaced.
        sources: run folders and files that the command reads.

    Raises:
        FileError: the name is empty, a folder, an old file, one of the sources, or a file of a run.
    """
    from kapsi.training.run_folder import peek

    if not output.strip() or os.path.isdir(output):
        raise FileError(f"--output: expected the name of a file, got {output!r}{' (a folder)' * bool(output.strip())}")
    for run in sources:
        if os.path.realpath(output) == os.path.realpath(run):
            raise FileError(f"{output}: is an input of this command; give another --output")
        needed = (peek(Path(run)) or {}).get("files")
        names = [*(needed if isinstance(needed, Mapping) else ()), "run.json"]
        if os.path.realpath(output) in [os.path.realpath(os.path.join(run, name)) for name in names]:
            raise FileError(f"{output}: is a file of the run itself; give another --output")
    if os.path.lexists(output) and not overwrite:
        raise FileError(f"{output}: exists already; give another --output, or --overwrite")


SPOOLED = 2**20
"""Bytes read from standard input at once."""


@contextlib.contextmanager
def readable(table: str) -> Iterator[str]:
    """Yield the path of a table; standard input, `-`, is copied to a temporary file, since its layout is found before it is read.

    The suffix of the copy follows from the first bytes.

    Raises:
        FileError: there is no standard input.
    """
    if table != "-":
        yield table
        return
    source = getattr(sys.stdin, "buffer", None)
    if source is None:
        raise FileError("standard input: there is none; give the name of a table instead of -")
    with temporary_folder() as folder:
        data = source.read(SPOOLED)
        suffixes = {b"PAR1": ".parquet", b"\x1f\x8b": ".csv.gz", b"\x28\xb5\x2f\xfd": ".csv.zst"}
        suffix = next((suffix for mark, suffix in suffixes.items() if data.startswith(mark)), ".csv")
        path = folder / f"standard input{suffix}"
        with open(path, "wb") as file:
            while data:
                file.write(data)
                data = source.read(SPOOLED)
        yield str(path)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Write rows of strings in aligned columns; `right` lists the columns to align to the right."""
    say(*text_table([[printable(cell) for cell in row] for row in rows], right))


def score_rows(
    task: str, scores: dict[str, list[Scores]], metrics: MoreScores | None = None, unit: str = ""
) -> list[tuple[str, ...]]:
    """Return a header and one row per model: name and both scores, mean ± standard deviation over folds.

    Args:
        task: `classification` or `regression`.
        scores: scores of each fold by model.
        metrics: further scores.
        unit: unit of the RMSE, empty for none.
    """
    import numpy as np

    from kapsi.tables.scores import METRICS, summarize

    first, second = METRICS[task]
    names = list((metrics or {}).get("kapsi", {}))
    loss = f"RMSE ({unit})" if unit else "RMSE"
    header = ("", "R²" if first == "r2" else first, loss if second == "rmse" else second, *names)
    rows: list[tuple[str, ...]] = [header]
    for name, values in scores.items():
        cells = list(summarize(values))
        several = len(values) > 1
        for metric in names:
            further = np.array((metrics or {})[name][metric])
            cells.append((float(further.mean()), float(further.std())))
        rows.append((name, *(number(value, spread if several else None) for value, spread in cells)))
    return rows


def number(mean: float, std: float | None, least: float = 1e-3) -> str:
    """Return a score with four decimals, a large one as a whole number, with its standard deviation if there is one.

    Example:
        >>> number(0.75, None), number(38878.2971, 512.5), number(183213.4, None), number(1.2345e-5, None)
        ('0.7500', '38878 ± 512', '183213', '1.234e-05')
    """
    largest = max(abs(mean), std or 0.0)
    shape = ".4f" if largest < 1e4 else ".0f" if largest < 1e9 else ".4g"
    if mean != 0 and abs(mean) < least:
        shape = ".4g"
    return f"{mean:{shape}}" if std is None else f"{mean:{shape}} ± {std:{shape}}"


def leaderboard_rows(task: str, leaderboard: Sequence[LeaderboardRow]) -> list[tuple[str, ...]]:
    """Return a header and one row for each head: score, loss, seconds, weight in the sum, note."""
    header = ("head", "R²" if task == "regression" else "accuracy", "loss", "seconds", "weight", "")
    rows: list[tuple[str, ...]] = [header]
    for head, loss, score, seconds, weight, note in leaderboard:
        known = loss == loss
        numbers = (number(score, None), number(loss, None), f"{seconds:.2f}") if known else ("-", "-", "-")
        rows.append((head, *numbers, f"{weight:.2f}" if weight else "-", note))
    return rows


def machine_line(task: str, scores: list[Scores], rows: str) -> str:
    """Return the last line of the output, for scripts: `accuracy: 0.9927 ± 0.0061 (10 folds)`."""
    from kapsi.tables.scores import METRICS, summarize

    (mean, std), _ = summarize(scores)
    several = len(scores) > 1
    # Four decimals at any size, except for huge negative R².
    score = number(mean, std if several else None, least=0.0)
    return f"{METRICS[task][0]}: {score} ({counted(len(scores), 'fold') if several else rows})"


def run_data(path: str | Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run for JSON: its path and run.json without the list of files, and deviations of folds only."""
    facts = {name: value for name, value in manifest.items() if name not in ("format", "format_version", "files")}
    if not facts.get("folds"):
        facts["scores"] = {
            model: {name: value for name, value in part.items() if not name.endswith(" std")}
            for model, part in facts.get("scores", {}).items()
            if isinstance(part, dict)
        }
    return {"run": str(path), **facts}


def show_complete(path: Path, manifest: dict[str, Any], task: str, json: bool = False) -> None:
    """Write the lines, or the JSON object, of a run that is complete already."""
    from kapsi.tables.scores import METRICS

    note(f"{path}: this run is complete already, nothing is left to resume")
    if json:
        show_json(run_data(path, manifest))
        return
    name, folds = METRICS[task][0], manifest.get("folds")
    scores = manifest["scores"]["kapsi"]
    score = number(scores[name], scores[f"{name} std"] if folds else None, least=0.0)
    say(f"run folder: {path} ({counted(manifest['rows'], 'row')})")
    rows = counted(manifest["scored_rows"], "validation row")
    say(f"{name}: {score} ({f'{folds} folds' if folds else rows})")


def fit_page(path: Path, *, no_report: bool, open_: bool = False) -> Path | None:
    """Write the page of a run at the end of a fit; a failure is a note, since the run is complete.

    Returns:
        The path of the page, None without.
    """
    if no_report:
        return None
    from kapsi.report import write_report

    try:
        page = write_report(path)
    except Exception as error:  # whatever it is, the run is written
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        note(f"the run is complete, but its report could not be written ({reason}); kapsi report {path} tries again")
        return None
    if open_:
        open_page(page)
    return page


def open_page(page: Path) -> None:
    """Open a page in the browser of the user; without a browser a note."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        note(f"no browser was found; open {page} yourself")


def show_report(report: FitReport, json: bool = False, page: Path | None = None) -> None:
    """Write notes, scores and the run folder of a fit, or its JSON object; and the path of its page, if there is one."""
    from kapsi.training.run_folder import peek

    notes(report.notes)
    if json:
        written = {} if page is None else {"report": str(page)}
        show_json({**run_data(report.path, peek(report.path) or {}), "notes": report.notes, **written})
        return
    if report.leaderboard:
        rows = leaderboard_rows(report.task, report.leaderboard)
        say("Heads of the saved model, scores on rows held out of their fits")
        table(rows, right=range(1, 5))
        say()
    rows = score_rows(report.task, report.scores, report.metrics, report.unit)
    table(rows, right=range(1, len(rows[0])))
    say(f"run folder: {report.path} ({counted(report.parameters, 'parameter')}, {counted(report.rows, 'row')})")
    if page is not None:
        say(f"report: {page}")
    say(machine_line(report.task, report.scores["kapsi"], counted(report.scored_rows, "validation row")))


def begin(text: str) -> None:
    """Write a note at the beginning of long work where no progress is shown."""
    if not sys.stderr.isatty():
        note(f"{text}; progress is shown on a terminal only")


DELAY = 0.5
"""Seconds of fitting before the first line: an error before is the only line."""


class FirstLine:
    """A note at the first steps of a fit, once."""

    def __init__(self, text: str) -> None:
        self.text, self.began = text, time.monotonic()

    def on_head(self, name: str) -> None:
        """Write the note, if the fit takes time."""
        if self.text and time.monotonic() - self.began >= DELAY:
            begin(self.text)
            self.text = ""

    def on_step(self, record: Step) -> None:
        """Write the note, if the fit takes time."""
        if self.text and time.monotonic() - self.began >= DELAY:
            begin(self.text)
            self.text = ""


class Bar:
    """Progress of the fits of a table on a terminal: loss, metrics, steps per second and remaining time.

    Args:
        bar: the rich progress display.
        parts: number of parts of the rows, fitted one after the other.
        epochs: epochs of a part that is fitted once; None for a search with several fits per part.
    """

    def __init__(self, bar: Any, parts: int, epochs: int | None) -> None:
        self.bar, self.epochs = bar, epochs
        self.task = bar.add_task("fitting", total=parts, state="")
        self.part, self.name, self.text, self.rate = 0, "fitting", "", ""
        self.steps, self.updated = 0, time.monotonic()

    def on_part(self, name: str) -> None:
        """Begin a part."""
        self.part += 1
        self.name = name

    def on_head(self, name: str) -> None:
        """Show the head that a recipe fits."""
        self.text = name
        self._show(0.0)

    def on_epoch(self, epoch: Epoch) -> None:
        """Show loss and metrics of an epoch."""
        validation = "" if epoch.validation_loss is None else f", validation loss {epoch.validation_loss:.4g}"
        metrics = "".join(f", {key} {value:.4g}" for key, value in epoch.metrics.items())
        self.text = f"epoch {epoch.number}, loss {epoch.loss:.4g}{validation}{metrics}"
        self._show(epoch.number)

    def on_step(self, record: Step) -> None:
        """Count a step; update the display five times per second."""
        self.steps += 1
        seconds = time.monotonic() - self.updated
        if seconds >= 0.2:
            self.rate = f", {self.steps / seconds:,.0f} steps/s"
            self.steps, self.updated = 0, time.monotonic()
            self._show(record.epoch - 1 + (record.step / record.steps if record.steps else 0.0))

    def _show(self, epochs: float) -> None:
        fraction = min(1.0, epochs / self.epochs) if self.epochs else 0.0
        completed = max(0, self.part - 1) + fraction
        state = printable(f"{self.text}{self.rate}").replace("[", "\\[")
        self.bar.update(self.task, completed=completed, description=self.name, state=state)


@contextlib.contextmanager
def progress_bar(
    parts: int, epochs: int | None = None, *, quiet: bool = False, first: str = ""
) -> Iterator[Bar | FirstLine | None]:
    """Provide the callback for a progress bar on standard error; without a terminal for a first line; None if quiet."""
    if quiet or not sys.stderr.isatty():
        yield None if quiet or not first else FirstLine(first)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        yield Bar(bar, parts, epochs)
