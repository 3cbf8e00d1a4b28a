"""The page of results: every table and method, mean ranks, and counts of wins and losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tabular.data import NAMES, WIDE
from tabular.methods import BASELINES, KAPSI, METHODS, PREPARATION
from tabular.records import OVER, PROBABILITY, Key, Record, complete

BEHIND = 0.02
"""Difference to the best score that counts as a loss."""


class Cell(NamedTuple):
    """Results of a method on a table.

    Attributes:
        scores: score of each seed, pooled over its folds; empty if the method failed.
        losses: loss of each seed; empty without probabilities or if the method failed.
        fit: CPU seconds of each fit.
        predict: CPU seconds of a prediction of 1,000 rows, of each fold.
        failure: reason of a failure.
    """

    scores: tuple[float, ...]
    losses: tuple[float, ...]
    fit: tuple[float, ...]
    predict: tuple[float, ...]
    failure: str

    @property
    def score(self) -> float:
        """Mean over the seeds; NaN after a failure. Six digits of the records make five here."""
        return round(statistics.fmean(self.scores), 5) if self.scores else math.nan

    @property
    def loss(self) -> float:
        """Mean over the seeds; NaN after a failure or without probabilities."""
        return statistics.fmean(self.losses) if self.losses else math.nan


def cell_of(seeds: Sequence[Sequence[Record]]) -> Cell:
    """Return the cell of the records of all folds of some seeds; one failure is a failure of all."""
    everything = [record for seed in seeds for record in seed]
    failure = next((record.failure for record in everything if record.failure), "")
    if failure:
        return Cell((), (), (), (), failure)
    scores, losses = zip(*(pooled(records) for records in seeds), strict=True)
    return Cell(
        scores,
        () if any(math.isnan(loss) for loss in losses) else losses,
        tuple(record.fit or 0.0 for record in everything),
        tuple((record.predict or 0.0) * 1000 / record.rows for record in everything),
        "",
    )


def pooled(records: Sequence[Record]) -> tuple[float, float]:
    """Return score and loss of all rows of a cross-validation: accuracy and log loss, or R² and RMSE."""
    weights = np.array([record.rows for record in records], dtype=np.float64)
    weights /= weights.sum()
    losses = np.array([math.nan if record.loss is None else record.loss for record in records])
    spread = records[0].spread
    if spread is None:
        return float(weights @ np.array([record.score for record in records], dtype=np.float64)), float(
            weights @ losses
        )
    squares = float(weights @ losses**2)
    return 1 - squares / spread**2, squares**0.5


@dataclass
class Comparison:
    """Cells of tables and methods.

    Args:
        cells: by table and method; only tables with all methods of `ranked`.
        ranked: the methods that are ranked.
        seeds: seeds of each table.
    """

    cells: dict[str, dict[str, Cell]]
    ranked: tuple[str, ...]
    seeds: dict[str, tuple[int, ...]]

    @classmethod
    def of(
        cls, records: Mapping[Key, Record], tables: Sequence[str], ranked: Sequence[str], seeds: Sequence[int]
    ) -> Comparison:
        """Return the comparison on the seeds that all ranked methods have, table by table."""
        cells: dict[str, dict[str, Cell]] = {}
        used = {}
        for table in tables:
            found = {(s, m): complete(records, table, s, m) for s in seeds for m in ranked}
            whole = tuple(s for s in seeds if all(found[s, m] is not None for m in ranked))
            if whole:
                used[table] = whole
                cells[table] = {m: cell_of([found[s, m] or [] for s in whole]) for m in ranked}
        return cls(cells, tuple(ranked), used)

    def ranks(self, kind: str) -> dict[str, list[float]]:
        """Return the ranks of each method on the tables, from 1; equal values share a rank and failures come last.

        Args:
            kind: `score` or `loss`. A method without losses on some table has no ranks of losses, and others none of it.
        """
        methods = list(self.ranked)
        if kind == "loss":
            methods = [m for m in methods if all(cells[m].losses or cells[m].failure for cells in self.cells.values())]
        ranks: dict[str, list[float]] = {method: [] for method in methods}
        for cells in self.cells.values():
            sign = -1 if kind == "score" else 1
            values = [sign * getattr(cells[m], kind) for m in methods]
            values = [math.inf if math.isnan(value) else round(value, 6) for value in values]
            for method, value in zip(methods, values, strict=True):
                below, equal = sum(other < value for other in values), values.count(value)
                ranks[method].append(below + (equal + 1) / 2)
        return ranks

    def best(self, table: str) -> float:
        """Return the best score on a table."""
        return max(cell.score for cell in self.cells[table].values() if cell.scores)

    def behind(self, method: str) -> list[str]:
        """Return the tables where a method is more than 0.02 below the best or failed."""
        return [
            table
            for table, cells in self.cells.items()
            if not cells[method].scores or cells[method].score < self.best(table) - BEHIND
        ]


def ranking(comparison: Comparison, main: str) -> list[str]:
    """Return the table of mean ranks as lines; `main` is the method that the others are compared with."""
    lines = [
        "| method | mean rank, score | mean rank, loss | best score | more than 0.02 below the best | "
        f"{main} better · worse (score) | fit, CPU s, median | predict 1,000 rows, CPU s, median | failures |",
        "|---|" + "---|" * 8,
    ]
    by_score, by_loss = comparison.ranks("score"), comparison.ranks("loss")
    tables = comparison.cells
    for method in sorted(comparison.ranked, key=lambda m: statistics.fmean(by_score[m])):
        cells = [cells[method] for cells in tables.values()]
        pairs = [(row[main].score, row[method].score) for row in tables.values()] if main in comparison.ranked else []
        wins = sum(a > b or math.isnan(b) for a, b in pairs)
        losses = sum(a < b or math.isnan(a) for a, b in pairs)
        fits = [statistics.median(cell.fit) for cell in cells if cell.fit]
        predictions = [statistics.median(cell.predict) for cell in cells if cell.predict]
        row = [
            method if method in BASELINES else f"**{method}**",
            f"{statistics.fmean(by_score[method]):.2f}",
            f"{statistics.fmean(by_loss[method]):.2f}" if method in by_loss else "–",
            str(sum(cells[method].score >= comparison.best(table) for table, cells in tables.items())),
            str(len(comparison.behind(method))),
            "" if method == main or not pairs else f"{wins} · {losses}",
            f"{statistics.median(fits):.3g}" if fits else "–",
            f"{statistics.median(predictions):.2g}" if predictions else "–",
            str(sum(bool(cell.failure) for cell in cells)),
        ]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def values(comparison: Comparison, kind: str, main: str) -> list[str]:
    """Return the table of scores or losses as lines, means ± standard deviations over seeds; the best is bold."""
    methods = comparison.ranked
    head = ["table", *methods] + ([f"{main} − best other"] if main in methods else [])
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---|" * (len(head) - 1)]
    for table, cells in comparison.cells.items():
        sign = 1 if kind == "score" else -1
        means = {m: sign * getattr(cells[m], kind) for m in methods}
        known = [value for value in means.values() if not math.isnan(value)]
        best = max(known, default=math.nan)
        row = [table]
        for m in methods:
            text = _shown(cells[m], cells[m].scores if kind == "score" else cells[m].losses)
            row.append(f"**{text}**" if means[m] == best else text)
        if main in methods:
            others = [value for m, value in means.items() if m != main and not math.isnan(value)]
            gap = sign * (means[main] - max(others, default=math.nan))
            row.append("–" if math.isnan(gap) else f"{gap:+.3g}" if kind == "loss" else f"{gap:+.3f}")
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _shown(cell: Cell, numbers: Sequence[float]) -> str:
    if cell.failure:
        return "over the limit" if OVER in cell.failure else "failed"
    if not numbers:
        return "–"
    mean = statistics.fmean(numbers)
    places = 3 if abs(mean) < 10 else max(0, 3 - math.floor(math.log10(abs(mean))))
    spread = f" ± {statistics.stdev(numbers):.{places}f}" if len(numbers) > 1 else ""
    return f"{mean:,.{places}f}{spread}"


def method_sets(records: Mapping[Key, Record], tables: Sequence[str], seeds: Sequence[int]) -> list[list[str]]:
    """Return the sets of other packages' methods to compare: those with all tables, and those with a third of them.

    The second set is on fewer tables; it is left out if it has no further method.
    """
    counts = {
        method: sum(any(complete(records, table, seed, method) for seed in seeds) for table in tables)
        for method in BASELINES
    }
    least = (len(tables), math.ceil(len(tables) / 3))
    sets = [[method for method, count in counts.items() if count >= bound] for bound in least]
    return [chosen for number, chosen in enumerate(sets) if chosen and chosen not in sets[:number]]


def section(title: str, records: Mapping[Key, Record], tables: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return the section of a group of tables."""
    present = {key[3] for key in records if key[0] in tables}
    variants = [m for m in (*KAPSI, *sorted(present - set(METHODS))) if m in present] or [""]
    sets = method_sets(records, tables, seeds)
    absent = [method for method in BASELINES if all(method not in chosen for chosen in sets)]
    lines = [f"## {title}"]
    if absent:
        lines += ["", f"Measured on less than a third of the tables yet, and not compared: {', '.join(absent)}."]
    for main in variants:
        for baselines in sets:
            ranked = [*baselines, *([main] if main else [])]
            comparison = Comparison.of(records, tables, ranked, seeds)
            if comparison.cells:
                lines += ["", *comparison_lines(comparison, main, baselines[0], tables)]
    return lines


def comparison_lines(comparison: Comparison, main: str, other: str, tables: Sequence[str]) -> list[str]:
    """Return ranks, scores, losses and failures of one comparison."""
    counts = sorted({len(used) for used in comparison.seeds.values()})
    missing = [table for table in tables if table not in comparison.cells]
    text = f"{len(comparison.cells)} tables, {len(comparison.ranked)} methods, {' to '.join(map(str, counts))} seed(s)."
    text += f" Not complete yet: {', '.join(missing)}." if missing else ""
    title = f"{main or 'Methods of other packages'} on {len(comparison.cells)} tables"
    lines = [f"### {title}", "", text, "", *ranking(comparison, main or other)]
    if main:
        behind = [f"{t} ({comparison.cells[t][main].score - comparison.best(t):+.3f})" for t in comparison.behind(main)]
        lines += ["", f"{main} is more than {BEHIND} below the best on: {', '.join(behind) or 'no table'}."]
    lines += ["", "Accuracy or R²:", "", *values(comparison, "score", main)]
    lines += ["", "Log loss or RMSE:", "", *values(comparison, "loss", main)]
    failures = [
        f"- {table}, {method}: {cell.failure}"
        for table, cells in comparison.cells.items()
        for method, cell in cells.items()
        if cell.failure
    ]
    return [*lines, *(["", "Failures:", "", *failures] if failures else [])]


def page(records: Mapping[Key, Record], seeds: Sequence[int], conditions: str, limit: int, note: str = "") -> str:
    """Return the page as Markdown; the note stands below the conditions."""
    present = [method for method in METHODS if any(key[3] == method for key in records)]
    intro = [
        "# Models of tables",
        "",
        f"{conditions} 5 shuffled folds (stratified by class), the same for all methods; a seed sets the folds and the "
        "random numbers of the methods. All methods run at the defaults of their packages with one thread. Score: "
        "accuracy or R² of all held-out rows of a seed. Loss: log loss (probabilities of at least "
        f"{PROBABILITY:g}) or RMSE. Ranks start at 1, equal values share a rank, and a failed method is last; every kapsi "
        "preset is ranked among the other packages without the other presets. Times are CPU seconds of a process; fits of "
        f"more than {limit} CPU seconds are stopped (“over the limit”). `python benchmarks/tables.py` continues where it "
        "stopped; `--page` writes this page.",
        "",
        *([note, ""] if note else []),
        *(f"- {method}: {PREPARATION[method]}." for method in present if method in PREPARATION),
        "",
    ]
    parts = [
        *intro,
        *section(f"{len(NAMES)} tables", records, NAMES, seeds),
        "",
        *section(f"{len(WIDE)} wide tables from formulas", records, list(WIDE), seeds),
    ]
    return "\n".join(parts) + "\n"
