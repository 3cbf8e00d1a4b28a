"""Reports of runs as self-contained HTML pages, and comparisons of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kapsi.files import atomic, plain
from kapsi.report.facts import facts_of
from kapsi.report.page import comparison_page, run_page
from kapsi.training.run_folder import REPORT, open_run

__all__ = ["comparison_html", "report_html", "write_comparison", "write_report"]


def report_html(path: str | Path, seed: int = 0) -> str:
    """Return the page of a run folder.

    Args:
        path: the run folder.
        seed: seed of samples of rows.

    Raises:
        RunError: the folder is no run, or damaged.
    """
    return run_page(facts_of(path, seed))


def comparison_html(paths: Sequence[str | Path], seed: int = 0) -> str:
    """Return the page of a comparison of runs.

    Args:
        paths: run folders.
        seed: seed of samples of rows.

    Raises:
        RunError: a folder is no run, or damaged.
    """
    for path in paths:  # all are checked before the first one is read, which may take long
        open_run(path)
    return comparison_page([facts_of(path, seed) for path in paths])


def write_report(path: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of a run, by default as `report.html` in its folder; return the path of the page.

    Args:
        path: the run folder.
        output: the file; None for `report.html` in the run folder.

    Raises:
        RunError: the folder is no run, or damaged.
        FileError: the file cannot be written.
    """
    return _written(report_html(path), Path(path) / REPORT if output is None else Path(output))


def write_comparison(paths: Sequence[str | Path], output: str | Path) -> Path:
    """Write the page of a comparison of runs; return the path.

    Raises:
        RunError: a folder is no run, or damaged.
        FileError: the file cannot be written.
    """
    return _written(comparison_html(paths), Path(output))


def _written(text: str, target: Path) -> Path:
    with plain(target, "write the report"), atomic(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return target
