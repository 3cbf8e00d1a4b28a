"""Conformal intervals, sets of classes, costs and recall: coverage on new rows, files of a run, the command line."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kapsi as kp
from kapsi.cli import common, main
from kapsi.data.tabular import Column, TargetScale, write_table
from kapsi.recipes import Conformal, Quantiles, RecipeData
from kapsi.tables.intervals import Decisions, decided, group_names, known_intervals
from kapsi.training.run_folder import _fingerprint


def rows_of(x, y, classes=0):
    x = torch.as_tensor(x, dtype=torch.float64)
    loss = kp.CrossEntropy() if classes else kp.MSE()
    return RecipeData(x, torch.as_tensor(y), loss, classes, torch.ones(x.shape[1], dtype=torch.bool))


# ------------------------------------------------------------------------------------------------ quantiles


@pytest.mark.parametrize("n", [1, 9, 10, 99, 1000])
@pytest.mark.parametrize("level", [0.05, 0.5, 0.8, 0.9, 0.99])
def test_the_quantile_of_a_level_is_the_kth_score(n, level) -> None:
    scores = torch.randperm(n, generator=torch.Generator().manual_seed(0)).double() + 1
    k = int(np.ceil(level * (n + 1) - 1e-9))
    assert Quantiles.of(scores).at(level) == (k if k <= n else np.inf)


def test_many_scores_are_thinned_without_loss_of_coverage() -> None:
    scores = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = Quantiles.of(scores)
    assert len(table.levels) == 1000
    for level in (0.1, 0.5, 0.9, 0.995):
        exact = float(scores.sort().values[int(np.ceil(level * 100_001)) - 1])
        assert exact - 1e-6 <= table.at(level) <= exact + 0.002


def test_a_weight_of_two_is_a_row_twice() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 5.0])
    weight = torch.tensor([2.0, 1.0, 1.0, 2.0])
    twice = Quantiles.of(torch.tensor([3.0, 3.0, 1.0, 2.0, 5.0, 5.0]))
    weighted = Quantiles.of(scores, weight / weight.mean())
    for level in (0.1, 0.3, 0.45, 0.6, 0.7):
        # The new row counts as the mean weight, 1.5, in place of 1.
        assert abs(weighted.at(level) - twice.at(level)) <= 2


# ------------------------------------------------------------------------------------------------ coverage


def noisy(n, seed):
    generator = np.random.default_rng(seed)
    x = generator.uniform(-2, 2, (n, 2))
    spread = 0.1 + np.abs(x[:, 0])
    return x, x[:, 1] + spread * generator.standard_normal(n)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95])
def test_intervals_cover_new_rows_and_follow_the_noise(level) -> None:
    x, y = noisy(1000, 0)
    new, truth = noisy(20_000, 1)
    conformal = Conformal.of(rows_of(x, y[:, None]), torch.as_tensor(x[:, 1:]))
    assert conformal.spread is not None
    new_x = torch.as_tensor(new)
    low, high = conformal.intervals(new_x, new_x[:, 1:], level)[:, 0].T.numpy()
    inside = (low <= truth) & (truth <= high)
    # Standard deviation of the coverage over drawn rows of the fit: √(0.5²/1000) at most.
    assert abs(inside.mean() - level) < 0.04
    quiet = np.abs(new[:, 0]) < 0.5
    assert abs(inside[quiet].mean() - level) < 0.1
    assert abs(inside[~quiet].mean() - level) < 0.1
    assert np.median((high - low)[quiet]) < 0.5 * np.median((high - low)[~quiet])


def test_equal_noise_has_intervals_of_equal_width() -> None:
    generator = np.random.default_rng(0)
    x = generator.uniform(-2, 2, (300, 2))
    y = x[:, 1] + generator.standard_normal(300)
    conformal = Conformal.of(rows_of(x, y[:, None]), torch.as_tensor(x[:, 1:]))
    assert conformal.spread is None


def test_each_of_several_targets_has_its_own_width() -> None:
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (200, 1))
    errors = generator.standard_normal((200, 2)) * [1.0, 10.0]
    conformal = Conformal.of(rows_of(x, errors), torch.zeros(200, 2, dtype=torch.float64))
    bounds = conformal.intervals(torch.zeros(1, 1), torch.zeros(1, 2, dtype=torch.float64), 0.9)
    assert 5 < float(bounds[0, 1, 1] / bounds[0, 0, 1]) < 20


def test_groups_have_their_own_quantiles_and_unknown_groups_those_of_all() -> None:
    y = torch.cat([torch.full((99, 1), 1.0), torch.full((99, 1), 4.0)]).double()
    names = ["a"] * 99 + ["b"] * 99
    conformal = Conformal.of(rows_of(torch.zeros(198, 1), y), torch.zeros(198, 1, dtype=torch.float64), names)
    bounds = conformal.intervals(torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.float64), 0.9, ["a", "b", "c"])
    assert bounds[:, 0, 1].tolist() == [1.0, 4.0, 4.0]


def test_sets_cover_and_hold_the_most_probable_class() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(4000, 4, dtype=torch.float64, generator=generator).softmax(1)
    y = torch.multinomial(p, 1, generator=generator)[:, 0]
    conformal = Conformal.of(rows_of(torch.zeros(2000, 1), y[:2000], 4), p[:2000])
    sets = conformal.sets(p[2000:], 0.8)
    covered = sets.gather(1, y[2000:, None]).double().mean()
    assert abs(float(covered) - 0.8) < 0.04
    assert bool(sets.gather(1, p[2000:].argmax(1, keepdim=True)).all())
    assert bool((sets.sum(1) >= 1).all())


def test_a_threshold_finds_the_share_of_a_class() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(4000, 1, dtype=torch.float64, generator=generator)
    p = torch.cat([1 - p, p], 1)
    y = torch.bernoulli(p[:, 1], generator=generator).long()
    conformal = Conformal.of(rows_of(torch.zeros(2000, 1), y[:2000], 2), p[:2000])
    positive = p[2000:][y[2000:] == 1, 1]
    assert abs(float((positive >= conformal.threshold(1, 0.95)).double().mean()) - 0.95) < 0.03


def test_rows_that_were_never_held_out_do_not_count() -> None:
    y = torch.arange(10.0, dtype=torch.float64)[:, None]
    predicted = torch.where(y < 5, 0.0, torch.nan)
    conformal = Conformal.of(rows_of(y, y), predicted)
    assert conformal.tables[""][0].scores == (0.0, 1.0, 2.0, 3.0, 4.0)
    with pytest.raises(kp.DataError, match="no row was held out"):
        Conformal.of(rows_of(y, y), torch.full_like(y, torch.nan))


@pytest.mark.parametrize("level", [0, 1, -0.1, 1.5, float("nan"), "0.9"])
def test_levels_are_shares(level) -> None:
    conformal = Conformal({"": (Quantiles((0.5,), (1.0,)),)})
    with pytest.raises(kp.SpecError, match="expected a number above 0 and below 1"):
        conformal.intervals(torch.zeros(1, 1), torch.zeros(1, 1), level)


# ------------------------------------------------------------------------------------------------ units of the target


@pytest.mark.parametrize("transform", ["none", "log", "yeo_johnson", "log_link"])
def test_values_of_a_transformed_target_are_restored(transform) -> None:
    y = np.exp(np.random.default_rng(0).normal(size=50))
    scale = TargetScale.fit(y, None, transform)
    scale = replace(scale, factor=1.3) if transform == "log" else scale
    np.testing.assert_allclose(scale.restore(scale.apply(y)), y, rtol=1e-12)
    outputs = np.linspace(-1, 1, 5)
    np.testing.assert_allclose(scale.predicted(scale.invert(outputs)), scale.values(outputs), rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "DELAY", float("inf"))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """A folder with a table and a run on it."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder):
        table("t.csv", 60, 0)
        assert main([*FIT, "--target", "y", "--drop", "label", "--output", "run"]) == 0
    return folder


def table(name, n, seed, noise=1.0):
    generator = np.random.default_rng(seed)
    x = generator.uniform(-2, 2, n)
    group = generator.choice(["a", "b"], n)
    y = 3 * x + noise * generator.standard_normal(n) * np.where(group == "b", 3, 1)
    label = np.where(x + generator.standard_normal(n) > 0, "yes", "no")
    write_table(name, {"x": x.tolist(), "g": group.tolist(), "y": y.tolist(), "label": label.tolist()})
    return y, label, group


FIT = ("fit", "t.csv", "--head", "linear")


def test_predict_adds_intervals_that_cover(kapsi) -> None:
    table("t.csv", 400, 0)
    y, _, group = table("new.csv", 4000, 1)
    assert kapsi(*FIT, "--target", "y", "--drop", "label", "--output", "all")[0] == 0
    assert kapsi(*FIT, "--target", "y", "--drop", "label", "--output", "by", "--interval-by", "g")[0] == 0
    for run, least in (("all", None), ("by", 0.85)):
        assert kapsi("predict", run, "new.csv", "--output", f"{run}.csv", "--interval", 0.9)[0] == 0
        frame = pd.read_csv(f"{run}.csv")
        assert list(frame.columns) == ["prediction", "prediction_lower", "prediction_upper"]
        inside = (frame.prediction_lower <= y) & (y <= frame.prediction_upper)
        assert abs(inside.mean() - 0.9) < 0.03
        assert least is None or min(inside[group == "a"].mean(), inside[group == "b"].mean()) > least
        bounds = kp.load_run(run).predict_interval(pd.read_csv("new.csv"), 0.9)
        np.testing.assert_allclose(bounds, frame[["prediction_lower", "prediction_upper"]], rtol=1e-9)


def test_a_target_that_was_never_negative_has_no_negative_bounds(kapsi) -> None:
    x = np.random.default_rng(0).uniform(0, 1, 100)
    write_table("t.csv", {"x": x.tolist(), "y": (x * np.random.default_rng(1).uniform(0, 1, 100)).tolist()})
    assert kapsi(*FIT, "--target", "y", "--output", "run")[0] == 0
    bounds = kp.load_run("run").predict_interval({"x": [0.0, 1.0]}, 0.95)
    assert bounds.min() == 0.0


def test_several_targets_have_bounds_each(kapsi) -> None:
    table("t.csv", 100, 0)
    frame = pd.read_csv("t.csv").assign(z=lambda d: 10 * d.y)[["x", "y", "z"]]
    frame.to_csv("t.csv", index=False)
    assert kapsi(*FIT, "--target", "y", "--target", "z", "--output", "run")[0] == 0
    assert kapsi("predict", "run", "t.csv", "--output", "p.csv", "--interval", 0.8)[0] == 0
    names = [f"prediction_{name}{end}" for end in ("", "_lower", "_upper") for name in ("y", "z")]
    assert sorted(pd.read_csv("p.csv").columns) == sorted(names)
    run = kp.load_run("run")
    assert run.predict_interval(frame, 0.8).shape == (100, 2, 2)
    for name, other in (("decide", "predict"), ("predict_set", "predict_interval")):
        with pytest.raises(kp.TableError, match=f"^{name}: the run is a regression and has no classes; use {other}$"):
            getattr(run, name)(frame)


def test_a_specification_has_intervals_from_its_validation_rows(kapsi) -> None:
    table("t.csv", 200, 0)
    words = ("--drop", "label", "--set", "layers.0.heads.0.expansion=identity", "--set", "training.l2=0.01")
    assert kapsi("fit", "t.csv", "--target", "y", *words, "--output", "run")[0] == 0
    assert len(kp.load_run("run").model.intervals.conformal.tables[""][0].levels) == 40
    assert kapsi("fit", "t.csv", "--target", "y", *words, "--folds", "2", "--output", "folds")[0] == 0
    assert len(kp.load_run("folds").model.intervals.conformal.tables[""][0].levels) == 200


def test_sets_costs_and_recall_of_classes(kapsi) -> None:
    table("t.csv", 400, 0)
    _, label, _ = table("new.csv", 4000, 1)
    assert kapsi(*FIT, "--target", "label", "--drop", "y", "--output", "run")[0] == 0
    assert kapsi("predict", "run", "new.csv", "--output", "p.csv", "--interval", 0.9)[0] == 0
    frame = pd.read_csv("p.csv")
    covered = [truth in words.split("|") for truth, words in zip(label, frame.prediction_set, strict=True)]
    assert abs(np.mean(covered) - 0.9) < 0.04
    sets = kp.load_run("run").predict_set(pd.read_csv("new.csv"), 0.9)
    assert [words.count("|") + 1 for words in frame.prediction_set] == sets.sum(1).tolist()
    assert kapsi("predict", "run", "new.csv", "--output", "c.csv", "--cost", "yes=4")[0] == 0
    costly = pd.read_csv("c.csv")
    assert (costly.prediction == np.where(4 * costly.probability_yes > costly.probability_no, "yes", "no")).all()
    assert kapsi("predict", "run", "new.csv", "--output", "r.csv", "--recall", "yes=0.95")[0] == 0
    found = pd.read_csv("r.csv").prediction
    assert abs((found[label == "yes"] == "yes").mean() - 0.95) < 0.03
    run, new = kp.load_run("run"), pd.read_csv("new.csv")
    assert run.decide(new, costs={"yes": 4}).tolist() == costly.prediction.tolist()
    assert run.decide(new, recall=("yes", 0.95)).tolist() == found.tolist()
    with pytest.raises(kp.SpecError, match="predict_interval: the run is a classification"):
        run.predict_interval(new)


@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        ("y", ("--recall", "yes=0.9"), "costs and recall are for a classification, and the run is a regression"),
        ("label", ("--recall", "maybe=0.9"), "recall 'maybe': there is no such class; there are no, yes"),
        ("label", ("--recall", "yes"), "--recall yes: expected a label and a number, such as yes=0.95"),
        ("label", ("--recall", "yes=2"), "recall yes=2: expected a share above 0 and below 1"),
        ("label", ("--cost", "yes=0"), "cost yes=0: expected a number above 0"),
        ("label", ("--cost", "yes=2", "--cost", "yes=3"), "--cost yes: has two costs; leave one out"),
        ("label", ("--interval", "90"), "--interval 90: expected a share above 0 and below 1"),
        ("y", ("--interval", "0.9999"), "level 0.9999: so few held-out rows allow at most 0.990"),
    ],
)
def test_requests_that_do_not_fit_are_refused(kapsi, target, words, message) -> None:
    table("t.csv", 100, 0)
    other = {"y": "label", "label": "y"}[target]
    assert kapsi(*FIT, "--target", target, "--drop", other, "--output", "run")[0] == 0
    code, out, err = kapsi("predict", "run", "t.csv", "--output", "p.csv", *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"kapsi: {message}")
    assert not Path("p.csv").exists()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("nowhere", "is no input of the model; give one of 'x', "),
        ("x", "100 groups of 100 rows; give a column of fewer groups"),
        ("day", "has dates; give a column of categories"),
    ],
)
def test_groups_of_intervals_are_a_column_of_few_values(kapsi, column, message) -> None:
    """The column is checked before the fit."""
    table("t.csv", 100, 0)
    lines = Path("t.csv").read_text().splitlines()
    Path("t.csv").write_text(
        "".join(f"{line},{f'2024-01-{i % 28 + 1:02}' if i else 'day'}\n" for i, line in enumerate(lines))
    )
    code, _, err = kapsi(*FIT, "--target", "y", "--drop", "label", "--interval-by", column, "--output", "run")
    assert code == 2
    assert f"intervals by {column!r}: {message}" in err
    assert not Path("run").exists()


def test_groups_of_large_numbers_stay_apart() -> None:
    """Six digits would merge them."""
    assert group_names(Column("integer", np.array([1234567.0, 1234568.0, np.nan]))) == ["1234567", "1234568", ""]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("tables"),
        lambda data: data["tables"].pop(""),
        lambda data: data["tables"].update({"": [[[0.5, 0.4], [1, 2]]]}),
        lambda data: data["tables"].update({"": [[[0.4, 0.5], [2, 1]]]}),
        lambda data: data["tables"].update({"": [[[0.4, 0.5], [1]]]}),
        lambda data: data["tables"].update({"": [[[0.4, 1.0], [1, 2]]]}),
        lambda data: data["tables"].update({"": []}),
        lambda data: data.update({"tables": 3}),
        lambda data: data.update({"by": "nowhere"}),
        lambda data: data.update({"classes": [[["a"], [1]]]}),
    ],
)
def test_damaged_intervals_are_refused(whole_run, kapsi, change) -> None:
    shutil.copytree(whole_run, ".", dirs_exist_ok=True)
    file, manifest = Path("run/intervals.json"), Path("run/run.json")
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    facts = json.loads(manifest.read_text())
    facts["files"][file.name] = _fingerprint(file)
    manifest.write_text(json.dumps(facts))
    code, _, err = kapsi("predict", "run", "t.csv", "--output", "p.csv")
    assert code == 2
    assert err.startswith("kapsi: run: damaged run: intervals.json")
    assert err.count("\n") == 1


def test_a_run_of_0_1_has_no_intervals(kapsi) -> None:
    folder = Path(__file__).parent / "files_of_0_1"
    runs = sorted(path.parent for path in folder.rglob("run.json"))
    assert runs
    assert kp.load_run(runs[0]).model.intervals is None


# ------------------------------------------------------------------------------------------------ estimators


def test_the_regressor_has_intervals_on_request() -> None:
    x, y = noisy(400, 0)
    new, truth = noisy(4000, 1)
    regressor = kp.RPNRegressor(heads=["linear"], intervals=True).fit(x, y)
    bounds = regressor.predict_interval(new, 0.8)
    assert bounds.shape == (4000, 2)
    assert abs(np.mean((bounds[:, 0] <= truth) & (truth <= bounds[:, 1])) - 0.8) < 0.06
    several = kp.RPNRegressor(heads=["linear"], intervals=True).fit(x, np.stack([y, -y], 1))
    assert several.predict_interval(new[:3]).shape == (3, 2, 2)
    with pytest.raises(kp.SpecError, match="set intervals=True, and fit again"):
        kp.RPNRegressor(heads=["linear"]).fit(x, y).predict_interval(new)


def test_the_classifier_has_sets_on_request() -> None:
    x, y = noisy(400, 0)
    classifier = kp.RPNClassifier(heads=["linear"], intervals=True).fit(x, y > 0)
    new, truth = noisy(4000, 1)
    sets = classifier.predict_set(new, 0.9)
    assert abs(sets[np.arange(4000), (truth > 0).astype(int)].mean() - 0.9) < 0.06
    assert bool((sets.sum(1) >= 1).all())
    with pytest.raises(kp.SpecError, match="needs the held-out rows of a recipe"):
        kp.RPNClassifier(spec=kp.Identity(), intervals=True).fit(x, y > 0)


def test_the_classifier_decides_by_costs_and_recall() -> None:
    x, y = noisy(400, 0)
    classifier = kp.RPNClassifier(heads=["linear"], intervals=True).fit(x, y > 0)
    new, truth = noisy(4000, 1)
    positive = classifier.predict_proba(new)[:, 1]
    assert (classifier.decide(new, costs={True: 4}) == (4 * positive > 1 - positive)).all()
    found = classifier.decide(new, recall=(np.True_, 0.95))
    assert abs(found[truth > 0].mean() - 0.95) < 0.03
    for options, message in (
        ({"recall": 0.9}, "recall=0.9: expected a label and a share"),
        ({"costs": [2]}, r"costs=\[2\]: expected costs by label"),
        ({"costs": {True: "2"}}, "label True: expected a number, got '2'"),
        ({"costs": {True: 10**400}}, "label True: expected a number, got 1000"),
        ({"costs": {"yes": 2}}, "cost 'yes': there is no such class; there are false, true"),
        (
            {"costs": {False: 2}, "recall": (True, 0.9)},
            "recall true=0.9: its threshold decides on 'true', where a cost has",
        ),
    ):
        with pytest.raises(kp.SpecError, match=message):
            classifier.decide(new, **options)
    with pytest.raises(kp.SpecError, match="set intervals=True, and fit again"):
        kp.RPNClassifier(heads=["linear"]).fit(x, y > 0).decide(new, recall=(True, 0.9))


def test_costs_beside_a_recall_decide_among_the_other_classes() -> None:
    outputs = np.array([[0.3, 0.35, 0.35], [0.1, 0.4, 0.5], [0.2, 0.6, 0.2]])
    known = SimpleNamespace(conformal=SimpleNamespace(threshold=lambda code, share: 0.45))

    def codes(labels: str, **decisions: Any) -> list[int]:
        return decided(labels.split(), outputs, Decisions(**decisions), lambda: known).tolist()  # type: ignore[arg-type, return-value]

    assert codes("a b c", recall=("c", 0.9)) == [1, 2, 1]
    assert codes("a b c", recall=("c", 0.9), costs=(("a", 2.0),)) == [0, 2, 1]
    with pytest.raises(kp.SpecError, match=r"recall c=0\.9: its threshold decides on 'c', where a cost has no effect"):
        codes("a b c", recall=("c", 0.9), costs=(("c", 2.0),))


def test_classes_that_are_flags_are_named_in_any_case() -> None:
    outputs = np.array([[0.6, 0.4]])
    for label in ("true", "True", "TRUE"):
        assert decided(["false", "true"], outputs, Decisions(costs=((label, 2.0),)), known_intervals).tolist() == [1]
    with pytest.raises(kp.SpecError, match="cost 'Yes': there is no such class; there are no, yes"):
        decided(["no", "yes"], outputs, Decisions(costs=(("Yes", 2.0),)), known_intervals)
