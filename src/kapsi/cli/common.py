"""What the verbs share: notes, aligned tables, progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kapsi.training.engine import Epoch
    from kapsi.training.tables import FitReport, Progress, Scores

__all__ = ["announce_recovery", "machine_line", "note", "notes", "progress_bar", "score_rows", "show_report", "table"]


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


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Write rows of text in aligned columns; `right` are the columns that are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())


def score_rows(task: str, scores: dict[str, list[Scores]]) -> list[tuple[str, str, str]]:
    """Return a header and one row a model: its name and both scores, mean ± standard deviation over folds."""
    from kapsi.training.tables import METRICS, summarize

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
    from kapsi.training.tables import METRICS, summarize

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


@contextlib.contextmanager
def progress_bar(parts: int) -> Iterator[Progress | None]:
    """Give a function that shows the progress of a fit on standard error, or None where that is not a terminal."""
    if not sys.stderr.isatty():
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
        task = bar.add_task("fitting", total=parts, state="")
        seen: list[str] = []

        def show(name: str, epoch: Epoch) -> None:
            if name not in seen:
                seen.append(name)
            held = "" if epoch.validation_loss is None else f", held-out loss {epoch.validation_loss:.4g}"
            state = f"epoch {epoch.number}, loss {epoch.loss:.4g}{held}"
            bar.update(task, completed=len(seen) - 1, description=name, state=state)

        yield show
