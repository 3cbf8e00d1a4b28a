"""Classifier and regressor: labels, groups, options without effect, and messages."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import sklearn
import torch
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate

import kapsi as kp
from kapsi.data.tabular import split
from kapsi.errors import DataError, SpecError
from kapsi.recipes import LinearHead

IRIS, DIABETES = load_iris(return_X_y=True), load_diabetes(return_X_y=True)
ON_ALL_ROWS = {"spec": "identity", "l2": 1e-3, "early_stopping": False}


def classifier(**options) -> kp.RPNClassifier:
    return kp.RPNClassifier(**{**ON_ALL_ROWS, "solver": "ridge", "max_epochs": 20, **options})


def message(estimator, x, y, **data) -> str:
    """Return the message of the error of a fit: one line of plain values."""
    with pytest.raises((ValueError, TypeError)) as error:
        estimator.fit(x, y, **data)
    text = str(error.value)
    assert "\n" not in text
    assert not re.search(r"np\.|--\w", text)
    return text


# ------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        (lambda y: pd.Series(y, dtype="Int64"), "int64"),
        (lambda y: pd.Series(y, dtype="Int8"), "int8"),
        (lambda y: pd.Series(y, dtype="int64[pyarrow]"), "int64"),
        (lambda y: pd.Series(y > 0, dtype="boolean"), "bool"),
        (lambda y: (y > 0).astype(object), "bool"),
        (lambda y: pd.Series(y).astype("category"), "int64"),
        (lambda y: y.astype(np.float32), "float32"),
        (lambda y: pa.chunked_array([y]), "int64"),
        (lambda y: y.tolist(), "int64"),
        (lambda y: pd.Series(np.array(["u", "v", "w"])[y], dtype="string"), "O"),
        (lambda y: np.array(["u", "v", "w"])[y].tolist(), "<U1"),
    ],
)
def test_labels_keep_their_type(labels, dtype):
    x, y = IRIS
    given = labels(y)
    ours = classifier().fit(x, given)
    assert (
        ours.classes_.tolist() == np.unique(given.to_pylist() if hasattr(given, "to_pylist") else list(given)).tolist()
    )
    assert ours.classes_.dtype == np.dtype(dtype)
    assert ours.predict(x).dtype == np.dtype(dtype)
    assert np.mean(ours.predict(x) == np.asarray(given)) > 0.85


def test_labels_of_polars_keep_their_type():
    polars = pytest.importorskip("polars")
    x, y = IRIS
    for given, dtype in (
        (polars.Series(y), "int64"),
        (polars.Series(y > 0), "bool"),
        (polars.Series(np.array(["u", "v", "w"])[y], dtype=polars.Categorical), "O"),
    ):
        ours = classifier().fit(x, given)
        assert ours.classes_.dtype == np.dtype(dtype)
        assert ours.classes_.tolist() == sorted(set(given.to_list()))
    nulls = polars.Series([None, *(y[1:] > 0)])
    assert "y has missing values (NaN or None) in 1 of 150 rows (first: row 1)" in message(classifier(), x, nulls)


def test_odd_labels_have_one_clear_line():
    x, y = IRIS
    for labels in (
        np.array([None, *("ab" * 75)[1:]], dtype=object),
        [None, *("ab" * 75)[1:]],
        pd.Series([None, *y[1:]], dtype="Int64"),
        pd.Series([None, *("ab" * 75)[1:]]),
    ):
        assert "y has missing values (NaN or None) in 1 of 150 rows (first: row 1)" in message(classifier(), x, labels)
    for labels in (np.array([1, "a"] * 75, dtype=object), [1, "a"] * 75):
        assert "y has values of several types, such as 1 (int) and 'a' (str)" in message(classifier(), x, labels)
    assert message(classifier(), x, np.full(150, "a")).endswith(
        "y has the one class 'a'; at least 2 classes are needed"
    )
    assert message(classifier(), x, y >= 0).endswith("y has the one class True; at least 2 classes are needed")
    parts = kp.RPNClassifier(spec="identity").partial_fit(x, y, classes=[0, 1, 2])
    for labels, known in ((np.array(["a", "b", "c"])[y], "[0, 1, 2]"), (y + 1, "[0, 1, 2]")):
        with pytest.raises(DataError, match=re.escape(f"the known classes are {known}")):
            parts.partial_fit(x, labels)
    with pytest.raises(DataError, match=re.escape("classes=[0, 1] are not those of the first call, [0, 1, 2]")):
        parts.partial_fit(x, y, classes=[0, 1])


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"early_stopping": False}, "early_stopping=False has an effect only with spec="),
        ({"spec": "identity", "early_stopping": "no"}, "early_stopping: expected True, False or None, got 'no'"),
        ({"spec": "identity", "warm_start": "yes"}, "warm_start: expected True or False, got 'yes'"),
        (
            {"random_state": True},
            "random_state: expected an integer from 0 to 2**32 − 1, None or a RandomState, got True",
        ),
        ({"heads": []}, "heads=[] names no head"),
        ({**ON_ALL_ROWS, "warm_start": True}, "warm_start=True has no effect with solver='ridge'"),
        ({"spec": "identity", "warm_start": True}, "warm_start=True has no effect with solver='ridge'"),
        ({"spec": "identity", "max_epochs": 0}, "max_epochs: expected an integer from 1 to 1,000,000,000, got 0"),
        ({"spec": "identity", "l2": -1.0}, "l2: expected a finite number from 0 to 1e+30, got -1.0"),
        (
            {"spec": "identity", "validation_fraction": 2},
            "validation_fraction: expected a finite number from 0.05 to 0.5",
        ),
        ({"spec": "identity", "training": {"epoks": 1}}, "did you mean max_epochs of the estimator?"),
        ({"spec": "identity", "training": {"standardise": 1}}, "there is no option 'standardise'"),
        ({"spec": "identity", "training": {"random_state": 1}}, "give random_state=… there"),
        (
            {"spec": "identity", "training": {"patiense": 1}},
            "did you mean 'patience'? choose from loss, solver, metrics",
        ),
        ({"spec": "identity", "training": {"penalty": 1.0}}, "it is called l2 now"),
    ],
)
def test_options_without_effect_and_typos(options, words):
    text = message(kp.RPNRegressor(**options), *DIABETES)
    assert words in text
    assert "epochs, " not in text  # the list names what is accepted


def test_warm_starts_continue_what_was_fitted():
    x, y = DIABETES
    warm = kp.RPNRegressor(spec="identity", solver="lbfgs", max_epochs=3, warm_start=True).fit(x, y)
    chosen = warm._l2
    assert chosen is not None
    warm.fit(x, y)
    assert warm._l2 == chosen
    for _ in range(3):
        warm.fit(x, y)
    # The limit is the solution with the chosen penalty on the rows that are not held out.
    kept, _ = split(y, 0.15, classes=False, seed=0)
    z, target = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    left = np.column_stack([z[kept], np.ones(len(kept))])
    penalty = np.diag([*[chosen * len(kept) / 2] * 10, 0.0])
    exact = np.linalg.solve(left.T @ left + penalty, left.T @ target[kept])
    expected = (np.column_stack([z, np.ones(len(z))]) @ exact) * y.std() + y.mean()
    np.testing.assert_allclose(warm.predict(x), expected, rtol=2e-2)
    with pytest.raises(SpecError, match="spec is not that of the last fit, which warm_start continues"):
        warm.set_params(spec=kp.Taylor(2)).fit(x, y)
    with pytest.raises(SpecError, match="warm_start=True has no effect with solver='ridge'"):
        warm.set_params(spec="identity", solver="ridge").fit(x, y)


def test_a_missing_partial_fit_has_a_reason():
    for options, words in (
        ({}, "partial_fit needs spec=…: a recipe fits all rows at once"),
        (
            {"spec": "identity", "solver": "lbfgs"},
            "the solver lbfgs takes steps on all rows; use solver='adamw' or 'sgd'",
        ),
        ({"spec": "identity", "solver": "adamww"}, "did you mean 'adamw'?"),
    ):
        estimator = kp.RPNRegressor(**options)
        assert not hasattr(estimator, "partial_fit")
        with pytest.raises(AttributeError, match=re.escape(words)):
            estimator.partial_fit(*DIABETES)


# ------------------------------------------------------------------------------------------------ rows


def test_odd_frames_have_one_clear_line():
    x, y = IRIS
    fitted = classifier().fit(pd.DataFrame(x, columns=list("abcd")), y)
    twice = pd.DataFrame(x, columns=list("abca"))
    assert "2 columns of the frame are called 'a'; rename the columns" in message(classifier(), twice, y)
    arrow = pa.table([pa.array(column) for column in x.T], names=list("abca"))
    assert "2 columns of the frame are called 'a'; rename the columns" in message(classifier(), arrow, y)
    with pytest.raises(ValueError, match="2 columns of the frame are called 'a'"):
        fitted.predict(twice)
    empty = pd.DataFrame(x[:0], columns=list("abcd"))
    for rows in (empty, pa.Table.from_pandas(empty)):
        with pytest.raises(DataError, match=re.escape("the frame has 0 sample(s) (shape=(0, 4))")):
            fitted.predict(rows)
    assert "the frame has 0 feature(s)" in message(classifier(), pd.DataFrame(index=range(150)), y)
    assert "got a dictionary; use pd.DataFrame" in message(classifier(), {"a": x[:, 0]}, y)
    for text in (np.array([["a", "b"]] * 150), np.array([["a", 1.0]] * 150, dtype=object)):
        assert "the array has the text 'a', and arrays hold numbers; give a DataFrame" in message(classifier(), text, y)
    for column in ([[1, 2]] * 150, [1j] * 150, [1, "a"] * 75):
        message(classifier(), pd.DataFrame(x, columns=list("abcd")).assign(e=column), y)


def test_durations_are_read_as_seconds():
    x, y = IRIS
    frame = pd.DataFrame({"a": x[:, 0], "time": pd.to_timedelta(x[:, 2], "h")})
    assert classifier().fit(frame, y).score(frame, y) > 0.9


def test_notes_have_no_options_of_the_command_line():
    x, y = IRIS
    frame = pd.DataFrame(x, columns=list("abcd")).assign(
        day=[20240101 + i % 28 for i in range(150)],
        price=[f"{i % 7}.5" for i in range(150)],
        code=[2**60 + i % 7 for i in range(150)],
    )
    notes = classifier().fit(frame, y).notes_
    assert len(notes) == 3
    assert not re.search(r"--\w", " ".join(notes))
    assert "pd.to_datetime makes them dates" in notes[0]


def test_intervals_and_sparse_columns_are_read():
    x, y = IRIS
    frame = pd.DataFrame({"a": x[:, 0], "b": pd.cut(x[:, 2], 4)})
    ours = classifier().fit(frame, y)
    text = classifier().fit(frame.assign(b=frame["b"].astype(str)), y)
    np.testing.assert_array_equal(ours.predict_proba(frame), text.predict_proba(frame.assign(b=frame["b"].astype(str))))
    zeros = np.where(x[:, 3] > 1, x[:, 3], 0.0)
    sparse = frame[["a"]].assign(c=pd.arrays.SparseArray(zeros))
    dense = frame[["a"]].assign(c=zeros)
    np.testing.assert_array_equal(
        classifier().fit(sparse, y).predict_proba(sparse), classifier().fit(dense, y).predict_proba(dense)
    )


@pytest.mark.parametrize("size", [1e308, 1e300, 1e-300, 5e-324])
def test_weights_of_any_size(size):
    x, y = DIABETES
    plain = kp.RPNRegressor(**ON_ALL_ROWS).fit(x, y).predict(x)
    ours = kp.RPNRegressor(**ON_ALL_ROWS).fit(x, y, np.full(len(y), size)).predict(x)
    np.testing.assert_allclose(ours, plain, rtol=1e-9)


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_targets_of_any_size(size):
    x, y = DIABETES
    plain = kp.RPNRegressor(**ON_ALL_ROWS).fit(x, y).predict(x) / y.max()
    ours = kp.RPNRegressor(**ON_ALL_ROWS).fit(x, y / y.max() * size).predict(x) / size
    np.testing.assert_allclose(ours, plain, rtol=1e-9)


# ------------------------------------------------------------------------------------------------ groups


def copies(rows: int = 30, each: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return noise in groups of copies: any model that remembers rows looks good on held-out copies."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(rows, 3)), random.normal(size=rows)
    return np.repeat(x, each, 0), np.repeat(y, each), np.repeat([f"g{i}" for i in range(rows)], each)


def test_small_tables_are_fitted_on_one_thread(monkeypatch):
    seen, real = [], LinearHead.cross_fit

    def recorded(*arguments):
        seen.append(torch.get_num_threads())
        return real(*arguments)

    monkeypatch.setattr(LinearHead, "cross_fit", recorded)
    torch.set_num_threads(2)
    try:
        kp.RPNRegressor(heads=["linear"]).fit(DIABETES[0][:40], DIABETES[1][:40])
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(1)
    assert (set(seen), after) == ({1}, 2)


def test_groups_stay_together_in_recipes():
    x, y, groups = copies()
    options = {"recipe": {"kind": "kernel"}}
    alone = kp.RPNRegressor(**options).fit(x, y)
    together = kp.RPNRegressor(**options).fit(x, y, groups=groups)
    assert alone.leaderboard_[0].score > 0.5
    assert together.leaderboard_[0].score < 0.1
    assert together.score(x, y) < alone.score(x, y)


def test_groups_stay_together_in_the_fit_of_a_model(monkeypatch):
    x, y, groups = copies()
    weight = np.repeat([1.0, 0.0], [75, 15])
    parts = []

    def select(make, data, config, *, splits, fits):
        parts.extend(splits(3))
        raise InterruptedError

    def fit(*_, held, **__):
        parts.append(held)
        raise InterruptedError

    monkeypatch.setattr("kapsi.tables.fitting.fit_selected", select)
    monkeypatch.setattr("kapsi.estimators.base.fit_model", fit)
    for rows in (x, scipy.sparse.csr_matrix(x)):
        with pytest.raises(InterruptedError):
            kp.RPNRegressor(spec="identity", solver="adamw").fit(rows, y, weight, pd.Series(groups))
    assert len(parts) == 4  # three folds, and a share of the sparse rows
    for kept, held in parts:
        assert sorted([*kept, *held]) == list(range(75))
        assert len(held) >= 9
        assert not set(groups[np.asarray(kept)]) & set(groups[np.asarray(held)])


def test_groups_of_a_wrong_kind_are_refused():
    x, y, groups = copies()
    own = kp.RPNRegressor(spec="identity")
    assert "expected groups of shape (90,), a label for each row" in message(own, x, y, groups=groups[:5])
    assert "groups has the one group 'g0'" in message(own, x, y, groups=np.full(90, "g0"))
    assert "groups has missing values" in message(own, x, y, groups=np.where(np.arange(90) == 3, np.nan, 1.0))
    assert "groups has no effect without held-out rows" in message(
        own.set_params(early_stopping=False), x, y, groups=groups
    )


def test_searches_pass_groups_on():
    x, y, groups = copies(20)
    with sklearn.config_context(enable_metadata_routing=True):
        own = kp.RPNRegressor("constant").set_fit_request(groups=True)
        assert own.get_metadata_routing().fit.requests["groups"] is True
        search = GridSearchCV(own, {"random_state": [0, 1]}, cv=GroupKFold(3))
        search.fit(x, y, groups=groups)
        found = cross_validate(own, x, y, cv=GroupKFold(3), params={"groups": groups})
        assert np.isfinite(found["test_score"]).all()
        # Folds of scikit-learn pass the groups of their rows, a single one here.
        with pytest.raises(ValueError, match="groups has the one group"):
            cross_validate(own, x, y, cv=3, params={"groups": np.full(len(y), "a")}, error_score="raise")
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
