"""What the verbs share: notes, aligned tables, progress."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from kapsi.errors import FileError
from kapsi.text import text_table

if TYPE_CHECKING:
    from kapsi.training.records import Epoch, Step
    from kapsi.training.tables import FitReport, Scores

__all__ = [
    "announce_recovery",
    "machine_line",
    "new_file",
    "note",
    "notes",
    "progress_bar",
    "score_rows",
    "show_report",
    "table",
]


def note(text: str) -> None:
    """Write one line for the user to standard error."""
    typer.echo(f"note: {' '.join(text.split())}", err=True)


def notes(texts: Iterable[str]) -> None:
    """Write several notes."""
    for text in texts:
        note(text)


def announce_recovery(path: str) -> None:
    """Put right what an interrupted command left of a run, and say so."""
    from kapsi.training.run_folder import recover

    text = recover(path)
    if text:
        note(text)


def new_file(output: str, overwrite: bool) -> None:
    """Refuse an --output that is no name for a new file, or with `overwrite` for an old one.

    Raises:
        FileError: there is no name, a folder, or an old file.
    """
    if not output.strip():
        raise FileError("--output: expected the name of a file, got nothing")
    if os.path.isdir(output):
        raise FileError(f"{output}: is a folder; give the name of a file as --output")
    if os.path.lexists(output) and not overwrite:
        raise FileError(f"{output}: is there already; give another --output, or --overwrite")


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Write rows of text in aligned columns; `right` are the columns that are aligned to the right."""
    for line in text_table(rows, right):
        typer.echo(line)


def score_rows(task: str, scores: dict[str, list[Scores]]) -> list[tuple[str, str, str]]:
    """Return a header and one row a model: its name and both scores, mean ± standard deviation over folds."""
    from kapsi.training.tables.scores import METRICS, summarize

    first, second = METRICS[task]
    rows = [("", "R²" if first == "r2" else first, second.upper() if second == "rmse" else second)]
    for name, found in scores.items():
        (mean, std), (loss, loss_std) = summarize(found)
        several = len(found) > 1
        rows.append((name, _number(mean, std if several else None), _number(loss, loss_std if several else None)))
    return rows


def _number(mean: float, std: float | None, least: float = 1e-3) -> str:
    shape = ".4f" if max(abs(mean), std or 0.0) < 1e5 and (mean == 0 or abs(mean) >= least) else ".4g"
    return f"{mean:{shape}}" if std is None else f"{mean:{shape}} ± {std:{shape}}"


def machine_line(task: str, found: list[Scores], rows: str) -> str:
    """Return the last line of output, for machines: `accuracy: 0.9927 ± 0.0061 (10 folds)`."""
    from kapsi.training.tables.scores import METRICS, summarize

    (mean, std), _ = summarize(found)
    several = len(found) > 1
    # Four decimals, however small; only an R² of a fit that went all wrong is too long for that.
    number = _number(mean, std if several else None, least=0.0)
    return f"{METRICS[task][0]}: {number} ({f'{len(found)} folds' if several else rows})"


def show_report(report: FitReport) -> None:
    """Write what a fit found."""
    notes(report.notes)
    table(score_rows(report.task, report.scores), right=(1, 2))
    typer.echo(f"run folder: {report.path} ({report.parameters:,} parameters, {report.rows:,} rows)")
    typer.echo(machine_line(report.task, report.scores["kapsi"], f"{report.scored_rows:,} validation rows"))


class Bar:
    """What a fit shows of itself on a terminal: loss, metric, steps a second, time left.

    Args:
        bar: of rich.
        parts: number of parts that are fitted one after the other.
        epochs: of a part, where it is fitted once; None where it is fitted again and again, to choose a penalty.
    """

    def __init__(self, bar: Any, parts: int, epochs: int | None) -> None:
        self.bar, self.parts, self.epochs = bar, parts, epochs
        self.task = bar.add_task("fitting", total=parts, state="")
        self.seen: list[str] = []
        self.name, self.text = "fitting", ""
        self.begun = self.shown = time.monotonic()
        self.steps = 0
        self.rate = 0.0

    def on_part(self, name: str) -> None:
        """Begin a part."""
        self.seen.append(name)
        self.name = name

    def on_epoch(self, epoch: Epoch) -> None:
        """Show the end of an epoch."""
        held = "" if epoch.validation_loss is None else f", held-out loss {epoch.validation_loss:.4g}"
        metrics = "".join(f", {key} {value:.4g}" for key, value in epoch.metrics.items())
        self.text = f"epoch {epoch.number}, loss {epoch.loss:.4g}{held}{metrics}"
        self._show(epoch.number)

    def on_step(self, record: Step) -> None:
        """Count a step, and show now and then how fast they come."""
        self.steps += 1
        now = time.monotonic()
        if now - self.shown >= 0.2:
            self.rate, self.steps, self.shown = self.steps / (now - self.shown), 0, now
            self._show(record.epoch - 1 + (record.step / record.steps if record.steps else 0.0))

    def _show(self, epochs: float) -> None:
        """Show where training is, after so many epochs of the part."""
        share = min(1.0, epochs / self.epochs) if self.epochs else 0.0
        done = max(0, len(self.seen) - 1) + share
        rate = f", {self.rate:,.0f} steps/s" if self.rate else ""
        left = ""
        if done:
            # Parts take about as long as each other; early stopping makes them shorter.
            seconds = int((time.monotonic() - self.begun) * (self.parts - done) / done)
            left = f", about {seconds // 60}:{seconds % 60:02} left"
        self.bar.update(self.task, completed=done, description=self.name, state=f"{self.text}{rate}{left}")


@contextlib.contextmanager
def progress_bar(parts: int, epochs: int | None = None, *, quiet: bool = False) -> Iterator[Bar | None]:
    """Give what shows the progress of a fit on standard error, or None where that is not a terminal or is to be quiet."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Bar(bar, parts, epochs)
