"""The benchmark of intervals: coverage, calibration error, and the page."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

pd = pytest.importorskip("pandas")


@pytest.fixture
def intervals(benchmark_module):
    return benchmark_module("intervals")


def test_the_calibration_error_is_that_of_the_bins(intervals) -> None:
    probabilities = np.array([[0.8, 0.2], [0.8, 0.2], [0.35, 0.65], [0.35, 0.65]])
    # Bin of 0.8: accuracy 0.5, distance 0.3; bin of 0.65: accuracy 1, distance 0.35.
    assert intervals.calibration_error(probabilities, np.array([0, 1, 1, 1])) == pytest.approx(0.325)


def test_a_constant_target_is_covered(intervals) -> None:
    data = intervals.data.TableData("small", pd.DataFrame({"a": np.arange(60.0)}), np.ones(60), 0)
    data.y[::2] = 3.0
    record = intervals.measure(data, 0)
    assert (record["rows"], record["held_out"]) == (60, 30)
    assert record["covered"][0] <= record["covered"][1] <= 1
    assert record["size"][0] > 0


def test_the_page_has_means_and_standard_errors(intervals) -> None:
    first = {"table": "t", "split": 0, "rows": 1200, "held_out": 600, "covered": [0.78, 0.9], "size": [1.0, 1.5]}
    second = {**first, "split": 1, "covered": [0.82, 0.92]}
    labels = {**first, "table": "c", "accuracy": 0.7, "calibration": 0.04, "size": [1.0, 1.25]}
    text = intervals.page([first, second, labels])
    assert "| t | 1,200 | 2 | 0.800 ± 0.020 | 0.910 ± 0.010 | 1.50 | 0.016, 0.012 |" in text
    assert "| c | 1,200 | 1 | 0.780 | 0.900 | 1.25 | 0.023, 0.017 |" in text
    assert "| c | 0.700 | 0.040 |" in text


def test_missing_figures_are_left_out_of_a_mean(intervals) -> None:
    record = {"table": "c", "split": 0, "rows": 1200, "held_out": 600, "covered": [0.78, 0.9], "size": [1.0, 1.25]}
    text = intervals.page([record, {**record, "split": 1, "accuracy": 0.7, "calibration": 0.04}])
    assert "| c | 0.700 (1 of 2 splits) | 0.040 (1 of 2 splits) |" in text
    assert "| c | 0.700 (1 of 2 splits) | – |" in intervals.page([record, {**record, "accuracy": 0.7}])


def test_deviations_are_compared_with_those_by_chance(intervals) -> None:
    record = {"table": "t", "split": 0, "rows": 30, "held_out": 20, "covered": [0.4, 0.91], "size": [1.0, 1.5]}
    counts = stats.betabinom(20, 9, 2)  # the 9th of 10 scores sets the quantile for 0.8
    assert intervals.chance([record], 0) == pytest.approx(counts.std() / 20)
    assert intervals.chance([record] * 4, 0) == pytest.approx(counts.std() / 40)
    labels = {**record, "accuracy": 0.79, "calibration": 0.04}
    text = intervals.deviations(["t"], {"t": [labels]})
    assert text.startswith("1 of 1 coverages are within 0.02")
    assert text.endswith("and 0 of them exceed 2.5.")
    assert "t at 0.8" in intervals.deviations(["t"], {"t": [record]})
