"""Trials of functions: rows that validate, fits that agree, how far one may move."""

from __future__ import annotations

import math

import pytest
import torch

import kapsi as kp
from kapsi.paper.experiment import Run
from kapsi.paper.procedures.functions import draw, read_options, run
from kapsi.recipes import trials

SPLINES = {"widths": [None, 2, 1], "layers": {"heads": {"expansion": "b_spline", "remainder": "linear"}}}


def run_of(**options) -> Run:
    given = {"candidates": {"one": {"model": SPLINES}}, "training": {"epochs": 8}, "rows": 200, "edge": 0.2, **options}
    return Run("choice", "I.6.2", "kapsi", 100, options=given)


def search_of(**options) -> trials.TrialSearch:
    run = run_of(**options)
    checked = read_options(run)
    return trials.TrialSearch(checked.search, draw(checked, run.seed)[0], run.seed)


def test_rows_with_extreme_targets_validate() -> None:
    rows = search_of().training
    fitted, held = trials.hold_out(rows.x, rows.y, count=20, edge=4, tails=10, seed=1)
    assert sorted([*fitted.tolist(), *held.tolist()]) == list(range(100))
    y = rows.y[:, 0]
    extreme = [int(y.argmax()), int(y.argmin()), *y.argsort()[1:4].tolist(), *y.argsort()[-4:-1].tolist()]
    assert set(extreme) <= set(held.tolist())
    assert len(held) == 20


@pytest.mark.parametrize(
    ("targets", "mean", "deviation"), [("standard", 1.0, 2.0), ("scaled", 0.0, 5 / 3), ("raw", 0, 1)]
)
def test_targets_are_moved(targets, mean, deviation) -> None:
    y = torch.tensor([-1.0, 1.0, 3.0], dtype=torch.float64)
    for found, expected in zip(trials.target_scale(y[:, None].expand(3, 2), targets), (mean, deviation), strict=True):
        assert found.tolist() == pytest.approx([expected, expected])


def test_an_isolated_fit_on_reference_inputs_counts_as_worse() -> None:
    search = search_of(reference_inputs=500)
    fits = []
    for i, (shift, error) in enumerate([(0.0, 0.2), (0.001, 0.3), (50.0, 0.1)]):
        model = kp.Model(kp.rpn([2, 1], bias=True), seed=0, dtype=torch.float64)
        with torch.no_grad():
            model.layers[0].heads[0].bias += shift
        fits.append(trials.Trial(search.options.candidates[0], i, i, model, error))
    search.compare(fits)
    deviation = float(search.scales["standard"][1])
    assert fits[0].distance == fits[1].distance == pytest.approx((0.001 * deviation) ** 2)
    assert fits[2].distance == pytest.approx((49.999 * deviation) ** 2)
    assert search.best(fits) is fits[0]
    assert min(fits, key=lambda each: each.error) is fits[2]


def refitted(error: float, **options):
    """Return the search, a trial, the trial after the refit, and whether the refit was accepted."""
    search = search_of(reference_inputs=300, refit={"epochs": 5}, **options)
    (one,) = search.trials(search.training.x, [])
    one.error = error
    return search, one, *search.refit_best(one, [one])


@pytest.mark.parametrize(("error", "kept"), [(1e9, True), (0.0, False)])
def test_a_refit_that_drifts_is_rejected(error, kept) -> None:
    _, one, after, went = refitted(error)
    assert went is kept
    assert (after is one) is not kept
    before, values = one.model.state_dict(), after.model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in values.items()) is not kept
    assert after.epochs == (5 if kept else 0)


def test_max_drift_limits_the_change_by_a_refit() -> None:
    assert not refitted(1e-5, max_drift=1.0)[3]
    assert refitted(1e-5, max_drift=1e6)[3]


def test_drift_is_relative_to_the_validation_error() -> None:
    search, one, *_ = refitted(1.0)
    refit = (search.rows_for(one.candidate), search.options.refit, search.reference)
    apart, _ = one.refit(*refit)
    assert 0 < apart < math.inf
    one.error = apart / 2
    assert one.refit(*refit)[0] == pytest.approx(2.0)
    assert search.refit_best(one, [one])[1]
    one.error = apart / 20
    assert not search.refit_best(one, [one])[1]


def test_a_run_with_all_of_it_scores_and_says_so() -> None:
    exponential = {
        "model": {"widths": [None, 2, 1], "layers": [{"heads": {"expansion": "b_spline"}}] * 2},
        "targets": "scaled",
        "rounds": 2,
    }
    exponential["model"]["layers"][1] = {**exponential["model"]["layers"][1], "output": "exp"}
    candidates = {"one": {"model": SPLINES}, "exponential": exponential}
    options = {
        "candidates": candidates,
        "tails": 0.2,
        "reference_inputs": 200,
        "trials": 2,
        "successive_halving": {"epochs": 4, "keep": 3},
    }
    first, again = (run(run_of(**options)) for _ in range(2))
    assert first.score == again.score
    assert math.isfinite(first.score)
    assert first.extra["candidate"] in candidates
    assert isinstance(first.extra["refitted"], bool)
    # Far below the variance of the function, 0.004.
    assert first.score < 1e-3
