"""Predictions of forests and boosted trees beside scikit-learn's, in one process with equal threads.

The trees are scikit-learn's, fitted to 4,000 rows of 10 inputs, and imported by `kapsi.zoo.trees`.

Run: python benchmarks/trees.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import threadpoolctl
import torch
from measure import Report, Seconds, Table, Target, interleaved, number, options, progress
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingClassifier, HistGradientBoostingRegressor

from kapsi.zoo import trees

INPUTS = 10
ROWS = (1, 100, 20_000)
BOUND = 3.0
"""Times of scikit-learn that a prediction may take."""


def fitted(rows: int, trees_each: int) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Return estimators with their method of raw predictions, by name."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, INPUTS))
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * generator.normal(size=rows)
    classes = np.digitize(y, [-1.0, 0.0, 1.0])
    boosted = HistGradientBoostingRegressor(max_iter=trees_each, early_stopping=False).fit(x, y)
    several = HistGradientBoostingClassifier(max_iter=trees_each, early_stopping=False).fit(x, classes)
    extra = ExtraTreesRegressor(trees_each, min_samples_leaf=2, random_state=0).fit(x, y)
    return {
        "boosted trees": (boosted, boosted.predict),
        "boosted trees, 4 classes": (several, several.decision_function),
        "extra trees": (extra, extra.predict),
    }


def timed(call: Callable[[], Any]) -> Callable[[], Seconds]:
    """Return a call that times itself."""

    def run() -> Seconds:
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        return Seconds(taken, taken)

    return run


def main() -> None:
    chosen = options(__doc__ or "", rounds=21)
    threadpoolctl.threadpool_limits(chosen.threads)
    report = Report("trees", chosen)
    table = Table(
        "A prediction in ms, 100 trees for each output; kapsi / scikit-learn in times.",
        ["trees", "splits", "rows", "kapsi", "scikit-learn", "times"],
    )
    generator = np.random.default_rng(1)
    for name, (estimator, predict) in fitted(*(500, 10) if chosen.quick else (4_000, 100)).items():
        model = trees.from_sklearn(estimator)
        splits = len(model.layers[0].heads[0].kappa["feature"])  # type: ignore[union-attr, index]
        for rows in ROWS[: 2 if chosen.quick else 3]:
            progress(f"trees: {name}, {rows} rows")
            x = generator.normal(size=(rows, INPUTS))
            with torch.no_grad():
                theirs = np.asarray(predict(x))
                np.testing.assert_allclose(model(torch.from_numpy(x)).numpy().reshape(theirs.shape), theirs, atol=1e-9)
                ways = {"kapsi": timed(partial(model, torch.from_numpy(x))), "theirs": timed(partial(predict, x))}
                times = interleaved(ways, chosen.rounds, seconds=20)
            ratio = times.ratio("kapsi", "theirs")
            row = {way: times.milliseconds(way) for way in ways}
            report.figures.append({"trees": name, "splits": splits, "rows": rows, **row, "times": ratio})
            cells = (number(value) for value in (*row.values(), ratio))
            table.rows.append([name, f"{splits:,}", f"{rows:,}", *cells])
            report.targets.append(Target(f"{name}, {rows:,} rows, against scikit-learn", BOUND, ratio, most=True))
    report.tables.append(table)
    report.finish()


if __name__ == "__main__":
    main()
