"""The estimators pass scikit-learn's own checks."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import kapsi as kp

pytestmark = pytest.mark.filterwarnings("ignore")  # of scikit-learn's checks

WEIGHTS = ("check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data")
HELD_OUT = (
    "held-out rows, or those of a mini-batch, are drawn among the given rows: a repeated row may be on both sides"
)

# One fit on all rows: a weight is the same as repetitions.
ON_ALL_ROWS = [
    kp.RPNClassifier(spec="identity", solver="ridge", l2=1e-3, early_stopping=False),
    kp.RPNRegressor(spec=kp.Taylor(2), l2=1e-3, early_stopping=False),
]
BATCHES = kp.AdamW(learning_rate=0.03, batch_size=32)
HOLD_OUT = [
    kp.RPNRegressor("linear"),
    kp.RPNClassifier(spec=kp.Taylor(2), solver="adamw", max_epochs=40),
]
LONG = [
    kp.RPNClassifier(),
    kp.RPNRegressor(),
    kp.RPNClassifier("linear"),
    kp.RPNClassifier(spec="identity", max_epochs=20),
    kp.RPNRegressor(spec="identity"),
    kp.RPNRegressor(spec="identity", solver=BATCHES, max_epochs=60),
]


def expected(estimator):
    return {} if estimator.early_stopping is False else dict.fromkeys(WEIGHTS, HELD_OUT)


@parametrize_with_checks([*ON_ALL_ROWS, *HOLD_OUT], expected_failed_checks=expected)
def test_checks_of_scikit_learn(estimator, check) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(LONG, expected_failed_checks=expected)
def test_further_checks_of_scikit_learn(estimator, check) -> None:
    check(estimator)
