"""Small tables: the rule of the choice, what a fold may look at, and runs of every kind on the bundled tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.naive_bayes import GaussianNB

import kapsi as kp
from kapsi.data.bundled import bundled
from kapsi.data.tabular import make_problem
from kapsi.paper.experiment import Run, load_shipped
from kapsi.paper.procedures import tabular

LINEAR = {
    "widths": [None, None],
    "layers": [{"heads": [{"reconciliation": "zero", "remainder": "linear", "bias": True}]}],
}


def iris() -> tuple[np.ndarray, np.ndarray]:
    table, target = bundled("iris")
    y = make_problem(table, target, task="classification").y
    return np.stack([column.numbers for name, column in table.columns.items() if name != target], 1), np.asarray(y)


def run(row: str = "iris", seed: int = 0, protocol: str = "validation", **options: Any) -> Run:
    return Run("tabular", row, "m", seed, protocol, options, procedure="tabular", metric="accuracy")


def linear(*penalties: float, **training: Any) -> dict[str, Any]:
    return {"name": "linear", "model": LINEAR, "penalties": list(penalties), "training": training}


def test_naive_bayes_is_that_of_scikit_learn_in_every_fold() -> None:
    x, y = iris()
    wanted = []
    for test in tabular.stratified_folds(y, 10, 4):
        kept = np.setdiff1d(np.arange(len(y)), test)
        wanted.append(float((GaussianNB().fit(x[kept], y[kept]).predict(x[test]) == y[test]).mean()))
    made = tabular.run(run(seed=4, classifier="naive_bayes_gaussian"))
    assert made.extra["folds"] == pytest.approx(wanted)
    assert made.score == pytest.approx(np.mean(wanted))


def test_the_rows_of_a_fold_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other classes in the rows of the first fold its candidates and its model are the same."""
    x, y = iris()
    (first, *_) = tabular.stratified_folds(y, 5, 0)
    options = {"folds": 5, "inner": 3, "limit_folds": 1, "candidates": [linear(1.0, 0.01)], "training": {"epochs": 5}}
    made = tabular.run(run(**options))
    kept = np.setdiff1d(np.arange(len(y)), first)
    models = tabular.read_options(run(**options))[1]
    shifted = [
        tabular._models(tabular._Fold(x[kept], y[kept], x[first], (y[first] + i) % 3, 3, 0, 3, "here"), models)
        for i in range(3)
    ]
    assert {fold.chosen for fold in shifted} == {made.extra["chosen"][0]}
    assert {fold.validation for fold in shifted} == {made.validation}
    # Equal predictions: each is right for one of the three shifts.
    assert shifted[0].score == made.score
    assert sum(fold.score for fold in shifted) == pytest.approx(1.0)


def test_runs_repeat_and_follow_the_seed() -> None:
    options = {"folds": 5, "inner": 3, "candidates": [linear(1.0, 0.01)], "training": {"epochs": 4}}
    first, again, other = (tabular.run(run(seed=seed, **options)) for seed in (0, 0, 1))
    assert first.extra == again.extra
    assert first.extra["folds"] != other.extra["folds"]
    assert first.score > 0.9
    assert first.score == pytest.approx(np.mean(first.extra["folds"]))
    assert first.extra["deviation_of_folds"] == pytest.approx(np.std(first.extra["folds"]))


def test_a_number_of_a_class_is_rounded() -> None:
    """The paper's way on tables: a regression on the number of the class; its figure is that of the best epoch on the fold."""
    candidate = linear(0.0, loss="mse", solver={"kind": "adamw", "learning_rate": 0.05, "batch_size": 32}, epochs=60)
    last = tabular.run(run(folds=5, limit_folds=2, candidates=[candidate]))
    best = tabular.run(run(folds=5, limit_folds=2, candidates=[candidate], protocol="paper"))
    assert last.parameters == best.parameters == 5
    assert last.score > 0.85
    assert best.score >= last.score
    assert best.extra["best_epoch_on_test"] == best.score
    assert all(1 <= epoch <= 60 for epoch in best.extra["best_epoch"])
    assert best.validation is None


@pytest.mark.parametrize("method", [method.name for method in load_shipped("tabular").methods])
def test_shipped_methods(method: str) -> None:
    experiment = load_shipped("tabular")
    planned = experiment.run(experiment.row("iris"), experiment.method(method), 0)
    options = {**planned.options, "folds": 5, "limit_folds": 1, "inner": 2}
    for name in ("bins", "penalties"):
        if name in options:
            options[name] = options[name][:2]
    if "grid" in options:
        options["grid"] = {path: values[:2] for path, values in options["grid"].items()}
    if "candidates" in options:
        options["training"] = {"epochs": 2}
    made = tabular.run(replace(planned, options=options))
    assert made.score > (0.6 if "multinomial" in method else 0.85)
    assert made.validation is not None
    assert made.parameters is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "wine"}, "iris, pima, banknote"),
        ({"classifier": "bayesian_netwrk"}, "did you mean bayesian_network"),
        ({"inner": 1}, "at least 2"),
        ({"candidates": []}, "expected at least one"),
        ({"candidates": [{"modle": LINEAR}]}, "did you mean 'model'"),
        ({"candidates": [3]}, r"candidates\[0\]: expected a mapping"),
        ({"limit_folds": 0, "candidates": [linear(1.0)]}, "limit_folds"),
        ({"classifier": "markov_network", "bins": [1]}, "2 or more"),
        ({"classifier": "svm_rbf", "protocol": "paper"}, "selects epochs"),
        ({"candidates": [linear(1.0)], "rule": {"by": "loss"}}, "log_loss, accuracy"),
        ({"candidates": [linear(1.0)], "rule": "best"}, "rule"),
        ({"candidates": [linear(1.0)], "grid": {}}, "'grid'"),
        ({"classifier": "markov_network", "bin": [3]}, "'bin'"),
        ({"candidates": [linear(1.0, 0.1)], "protocol": "paper"}, "one candidate"),
        ({"candidates": [linear(1.0), {**linear(1.0, loss="mse"), "name": "number"}]}, "give all the same loss"),
        (
            {"candidates": [{**linear(1.0), "model": {**LINEAR, "widths": [5, None]}}]},
            "candidates.linear.model: .*data 4",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    protocol = options.pop("protocol", "validation")
    with pytest.raises(kp.SpecError, match=message) as error:
        tabular.run(run(protocol=protocol, **{"folds": 5, "limit_folds": 1, **options}))
    assert "\n" not in str(error.value)
    with pytest.raises(kp.SpecError) as before:
        tabular.read_options(run(protocol=protocol, **{"folds": 5, "limit_folds": 1, **options}))
    assert str(before.value) == str(error.value)


def test_the_folds_of_the_stored_results() -> None:
    y = np.array([0, 1, 2, 0, 1, 2, 0, 1, 0, 0, 2])
    parts = tabular.stratified_folds(y, 3, seed=5)
    assert [part.tolist() for part in parts] == [[1, 2, 3, 9], [4, 5, 6, 8], [0, 7, 10]]
