"""Recipes behind `kapsi fit`: run folders, interrupts, options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import kapsi as kp
from kapsi.cli import main
from kapsi.data.tabular import write_table
from kapsi.estimators import RPNClassifier, RPNRegressor
from kapsi.recipes import Auto, LinearHead
from kapsi.tables import RunConfig, TableConfig, fit_table, fitting, load_run
from kapsi.training.checkpoint import Checkpoints

AUTO = Auto(heads=("linear",))


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2))
    path = tmp_path / "t.csv"
    y = x @ [1.0, -2.0] + 0.1 * rng.normal(size=90)
    write_table(
        path, {"a": x[:, 0], "b": x[:, 1], "y": y, "c": np.where(y > 0, "yes", "no"), "w": rng.uniform(1, 2, 90)}
    )
    return path


@pytest.mark.parametrize("target", ["y", "c"])
def test_a_run_of_a_recipe_is_read_back(table, tmp_path, target) -> None:
    config = RunConfig(TableConfig(target, drop=tuple({"y", "c"} - {target}), weight="w"), recipe=AUTO)
    report = fit_table(table, config, tmp_path / "run")
    assert [row.head for row in report.leaderboard] == ["sum", "linear", "constant"]
    assert sum(row.weight for row in report.leaderboard[1:]) > 0.2
    run = kp.load_run(tmp_path / "run")
    assert len(run.model.model.layers) == 1
    assert [row["head"] for row in run.manifest["leaderboard"]] == ["sum", "linear", "constant"]
    assert run.predict({"a": [0.0, 1.0], "b": [-1.0, 1.0]}).shape == (2,)
    assert np.mean([score.main for score in report.scores["kapsi"]]) > 0.9


@pytest.mark.parametrize(
    "error", [RuntimeError("linalg.lstsq: singular\nat line 3"), ValueError(""), kp.DataError("no")]
)
def test_a_requested_head_that_fails_is_named_in_one_line(table, tmp_path, monkeypatch, capsys, error) -> None:
    def fail(*_):
        raise error

    monkeypatch.setattr(LinearHead, "cross_fit", fail)
    monkeypatch.chdir(tmp_path)
    assert main(["fit", str(table), "--target", "y", "--head", "linear"]) == 2
    reason = str(error).split("\n")[0] or "ValueError"
    said = f"kapsi: the head linear does not fit these rows: {reason}; leave it out\n"
    assert capsys.readouterr().err.endswith(said)


def test_options_of_training_have_no_effect_with_a_recipe() -> None:
    with pytest.raises(kp.SpecError, match=r"training\.epochs has no effect with a recipe"):
        RunConfig(TableConfig("y"), training=kp.TrainConfig(epochs=3), recipe=AUTO)
    with pytest.raises(kp.SpecError, match="leave model or recipe out"):
        RunConfig(TableConfig("y"), kp.rpn([None, None]), recipe=AUTO)


def test_class_weights_shift_the_probabilities(table, tmp_path) -> None:
    means = []
    for number, weights in enumerate(((1.0, 1.0), (1.0, 9.0))):
        config = RunConfig(TableConfig("c", drop=("y",)), training=kp.TrainConfig(class_weights=weights), recipe=AUTO)
        fit_table(table, config, tmp_path / f"run{number}")
        means.append(kp.load_run(tmp_path / f"run{number}").predict_proba({"a": [0.0], "b": [0.0], "w": [1.0]})[0, 1])
    assert means[1] > means[0]
    config = RunConfig(
        TableConfig("c", drop=("y",)), training=kp.TrainConfig(class_weights=(1.0, 1.0, 1.0)), recipe=AUTO
    )
    with pytest.raises(kp.SpecError, match="3 weights for 2 classes"):
        fit_table(table, config, tmp_path / "run2")


@dataclass(frozen=True)
class CountedLinear(LinearHead, name="counted_linear"):
    """The linear head, counting comparisons; the second one may be interrupted."""

    calls: ClassVar[list[int]] = []
    stop: ClassVar[list[bool]] = [False]

    @classmethod
    def offered(cls) -> tuple[LinearHead, ...]:
        return ()

    def fit(self, data, seed=0):
        if self.stop[0] and len(data.x) > 60:
            raise KeyboardInterrupt
        return super().fit(data, seed)

    def cross_fit(self, data, folds, seed=0):
        self.calls.append(len(folds))
        return super().cross_fit(data, folds, seed)


def test_a_resumed_run_uses_the_comparisons_of_the_interrupted_one(table, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fitting, "MIN_CHECKPOINT_SECONDS", 0.0)
    config = RunConfig(TableConfig("y", drop=("c",)), recipe=Auto(heads=("linear", "counted_linear")))
    CountedLinear.calls.clear()
    CountedLinear.stop[0] = True
    with pytest.raises(KeyboardInterrupt):
        fit_table(table, config, tmp_path / "run", checkpoints=Checkpoints("", None, 0.0))
    assert not (tmp_path / "run").exists()
    first = len(CountedLinear.calls)
    CountedLinear.stop[0] = False
    resumed = fit_table(table, config, tmp_path / "run", checkpoints=Checkpoints("", None, 0.0, resume=True))
    assert first > 0
    assert len(CountedLinear.calls) == first
    fresh = fit_table(table, config, tmp_path / "fresh")
    assert len(CountedLinear.calls) == 2 * first
    assert [row._replace(seconds=0) for row in resumed.leaderboard] == [
        row._replace(seconds=0) for row in fresh.leaderboard
    ]
    assert not (tmp_path / "run.checkpoints").exists()
    assert load_run(tmp_path / "run").manifest["rows"] == 90


def test_the_configuration_of_a_run_fits_the_same_recipe_again(table, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["fit", str(table), "--target", "y", "--drop", "c", "--output"]
    assert main([*command, "one", "--head", "linear", "--prefer", "small", "--seed", "3"]) == 0
    assert main([*command, "two", "--spec", "one/config.yaml"]) == 0
    assert (tmp_path / "one/config.yaml").read_bytes() == (tmp_path / "two/config.yaml").read_bytes()
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    capsys.readouterr()
    assert main([*command, "three", "--spec", "one/config.yaml", "--set", "layers.0.heads.0.bias=true"]) == 2
    assert main([*command, "three", "--prefer", "fast", "--set", "training.epochs=3"]) == 2
    shown = capsys.readouterr().err
    assert "--prefer: is an option of the automatic model, which --set training.epochs replaces" in shown
    for options in (
        ("--devices", "2"),
        ("--log", "csv"),
        ("--strategy", "ddp"),
        ("--checkpoint-steps", "5", "--devices", "1"),
    ):
        assert main([*command, "three", *options]) == 2
        assert f"{options[0]}: needs a single model, and the automatic model" in capsys.readouterr().err
    assert main([*command, "three", "--head", "nothing"]) == 2
    assert "no recipe is called 'nothing'" in capsys.readouterr().err
    assert main(["info", "one/config.yaml"]) == 2
    assert "a recipe chooses the model of a run" in capsys.readouterr().err


@pytest.mark.all_heads
@pytest.mark.parametrize("target", ["y", pytest.param("c", marks=pytest.mark.slow)])
def test_all_heads_compete_for_a_table(table, tmp_path, target) -> None:
    config = RunConfig(TableConfig(target, drop=tuple({"y", "c"} - {target})), recipe=Auto())
    report = fit_table(table, config, tmp_path / "run")
    names = " ".join(row.head for row in report.leaderboard)
    for head in ("linear", "additive", "quadratic", "kernel", "network", "boosted_trees", "extra_trees"):
        assert head in names
    assert not [row.note for row in report.leaderboard if row.note.startswith("failed")]
    run = kp.load_run(tmp_path / "run")
    first = run.model.model.state_dict()
    fit_table(table, config, tmp_path / "again")
    again = kp.load_run(tmp_path / "again").model.model.state_dict()
    assert first.keys() == again.keys()
    assert all(bool((first[name] == again[name]).all()) for name in first)


@pytest.mark.all_heads
@pytest.mark.parametrize("prefer", ["explainable", "small", "fast"])
def test_preferences_limit_the_heads(table, tmp_path, prefer) -> None:
    config = RunConfig(TableConfig("y", drop=("c",)), recipe=Auto(prefer=prefer))
    report = fit_table(table, config, tmp_path / "run")
    names = {row.head.split("(")[0] for row in report.leaderboard}
    assert "linear" in names
    assert not names & {"network", "extra_trees", "boosted_trees"}
    assert ("kernel" in names) == (prefer == "fast")


def count_rows(rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 2))
    return x, rng.poisson(np.exp(0.5 + x[:, 0]))


@pytest.mark.parametrize(
    "options", [{"recipe": "linear"}, {"heads": ("linear",)}, {"spec": kp.Identity(), "max_epochs": 50}]
)
def test_a_loss_of_counts_by_request_is_that_of_the_counts(options) -> None:
    x, y = count_rows()
    model = RPNRegressor(**options, loss="poisson", random_state=0).fit(x, y)
    assert model.score(x, y) > 0.5
    assert model.predict(x).min() >= 0
    assert model.predict(x).mean() == pytest.approx(y.mean(), rel=0.1)


def test_a_loss_of_counts_in_a_run(tmp_path) -> None:
    x, y = count_rows()
    write_table(tmp_path / "n.csv", {"a": x[:, 0], "b": x[:, 1], "y": y})
    loss = kp.TrainConfig(loss="poisson")
    for number, options in enumerate(({"recipe": AUTO}, {"model": kp.rpn([None, None], bias=True)})):
        config = RunConfig(TableConfig("y", task="regression"), training=loss, **options)
        fit_table(tmp_path / "n.csv", config, tmp_path / f"run{number}")
        found = kp.load_run(tmp_path / f"run{number}").predict({"a": x[:, 0], "b": x[:, 1]})
        assert found.min() >= 0
        assert found.mean() == pytest.approx(y.mean(), rel=0.15)


@pytest.mark.parametrize(
    ("estimator", "loss", "negative", "message"),
    [
        (RPNRegressor, "poisson", True, "needs targets at least 0"),
        (RPNRegressor, "cross_entropy", False, "does not fit regression"),
        (RPNRegressor, "hinge", False, "does not fit regression"),
        (RPNRegressor, "bernoulli", False, "does not fit regression"),
        (RPNClassifier, "mse", False, "does not fit classification"),
        (RPNClassifier, "poisson", False, "does not fit classification"),
    ],
)
def test_losses_of_other_targets_are_refused(estimator, loss, negative, message) -> None:
    x, y = count_rows(60)
    y = np.where(y > 1, 1, 0) if estimator is RPNClassifier else y - 5.0 * negative
    with pytest.raises(kp.KapsiError, match=message):
        estimator(recipe="linear", loss=loss).fit(x, y)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_of_classes_are_finite_and_at_least_0(weight) -> None:
    x, y = count_rows(60)
    with pytest.raises(kp.SpecError, match="expected a finite weight of at least 0"):
        RPNClassifier(recipe="linear", class_weight={0: weight, 1: 1.0}).fit(x, np.where(y > 1, 1, 0))
