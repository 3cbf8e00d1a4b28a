"""Plain data of kapsi 0.1: files, names and messages."""

from __future__ import annotations

from pathlib import Path

import pytest

import kapsi as kp
from kapsi.cli.fit import read_configuration
from kapsi.migrate import is_run_of_0_1, migrate_model, migrate_run, migrate_training
from kapsi.spec import from_dict, parse_yaml

FILES = Path(__file__).parent / "files_of_0_1"


@pytest.mark.parametrize("run", ["regression", "classification", "kan"])
def test_the_configuration_of_a_run_of_0_1_is_a_specification(run) -> None:
    data = parse_yaml((FILES / run / "config.yaml").read_text("utf-8"), "config.yaml")
    assert is_run_of_0_1(data)
    assert not is_run_of_0_1(migrate_run(data))
    model, training, _ = read_configuration(str(FILES / run / "config.yaml"))
    assert model is not None
    assert training.epochs == data["training"]["epochs"]
    assert training.solver.name == data["training"]["solver"]


def test_options_of_0_1_go_to_their_owners() -> None:
    data = parse_yaml((FILES / "regression" / "config.yaml").read_text("utf-8"), "config.yaml")
    training = from_dict(migrate_training(data["training"]), kp.TrainConfig)
    assert training.loss == kp.Huber(delta=0.7)
    assert training.solver == kp.AdamW(
        learning_rate=0.01, batch_size=16, gradient_accumulation=2, max_grad_norm=1.0, ema_decay=0.9
    )
    assert (training.l2, training.group_l1) == (0.001, 0.0)
    table = migrate_run(data)["table"]
    assert (table["validation_fraction"], table["early_stopping_fraction"]) == (0.3, 0.2)


def test_every_renamed_option_exists() -> None:
    from kapsi.migrate import RENAMED_OPTIONS

    expansions = {cls.name: cls for cls in kp.catalogue("expansion")}
    for kind, renamed in RENAMED_OPTIONS.items():
        for old, new in renamed.items():
            assert new in expansions[kind].__dataclass_fields__
            with pytest.raises(kp.SpecError, match=f"no option '{old}'; it is called {new} now"):
                from_dict({"kind": kind, old: 1}, kp.Expansion)


@pytest.mark.parametrize("data", [None, 3, "b_spline", [1], {"kind": 3}, {1: 2}, {"kind": ["b_spline"]}])
def test_other_data_are_left_alone(data) -> None:
    assert migrate_model(data) == data
    assert not is_run_of_0_1(data)
