"""Mistakes in training options: each is refused with the place and a remedy."""

from __future__ import annotations

import pytest
import torch

import kapsi as kp
from kapsi.cli import main
from kapsi.cli.fit import edited, read_configuration
from kapsi.errors import RunError
from kapsi.function import ROLES
from kapsi.tables import RunConfig, TableConfig, load_run

X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X[:, :1].sin()
CONFIG = RunConfig(TableConfig("y"))


def fit(**options):
    return kp.fit(kp.Model(kp.rpn([2, 1], kp.Taylor(2)), seed=0, dtype=torch.float64), (X, Y), **options)


def plain_loss(output, target):
    return (output - target).abs().mean(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit(solver="ridge", patience=9, validation=0.2), r"patience: has no effect, the solver .* at once"),
        (
            lambda: fit(solver="ridge", monitor="rmse", validation=0.2),
            r"monitor: has no effect, the solver .* at once; leave monitor out",
        ),
        (lambda: fit(solver=kp.AdamW(gradient_accumulation=50)), "gradient_accumulation=50 parts of 40 rows"),
        (lambda: kp.to_dict(kp.TrainConfig(loss=plain_loss)), "plain_loss is a plain callable, .* define a class"),
        (lambda: kp.from_dict(kp.to_dict(kp.TrainConfig())), r"kp\.from_dict\(data, kp\.TrainConfig\)"),
        (lambda: kp.AdamW(lr=1), "AdamW has no option 'lr'; did you mean 'learning_rate'"),
        (lambda: kp.Ridge(l2=1), "Ridge has no option 'l2'; it has tolerance"),
        (
            lambda: kp.SGD(weight_decay=1),
            "SGD has no option 'weight_decay'; it has .*; weight_decay is an option of adamw",
        ),
        (lambda: kp.TrainConfig(learning_rate=0.1), r"TrainConfig has no option .* solver=kp\.AdamW"),
        (lambda: kp.TrainConfig(loss={"delta": 1}), "loss: a loss needs a kind; delta belongs to huber"),
        (lambda: kp.TrainConfig(loss=3), "loss: expected a loss, got 3; give a name, or a mapping with a kind"),
        (lambda: kp.TrainConfig(loss="pinbal"), "choose from .*, or install the package that defines it"),
    ],
)
def test_a_mistake_in_code(call, message):
    with pytest.raises(kp.SpecError, match=message):
        call()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("training.learning_rate", 0.1), r"^training: .*: --set training\.solver\.learning_rate=0\.01$"),
        (("training.momentum", 0.1), r"--set training\.solver\.kind=sgd --set training\.solver\.momentum=0\.9$"),
        (("training.delta", 0.1), r"--set training\.loss\.kind=huber --set training\.loss\.delta=1\.0$"),
        (("training.validation", 0.1), r"it is table\.validation_fraction now$"),
        (("training.loss.delta", 0.5), r"^training\.loss: a loss needs a kind; delta belongs to huber"),
    ],
)
def test_a_mistake_on_the_command_line(edit, message):
    with pytest.raises(kp.SpecError, match=message):
        edited(CONFIG, [edit])


@pytest.mark.parametrize("kind", ["training.solver", "training.solver.kind"])
def test_the_order_of_settings_does_not_matter(kind):
    edits = [("training.solver.momentum", 0.5), (kind, "sgd")]
    assert edited(CONFIG, edits) == edited(CONFIG, edits[::-1])
    assert edited(CONFIG, edits).training.solver == kp.SGD(momentum=0.5)


def test_a_specification_may_have_training_options_alone(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("training: {solver: lbfgs}\n")
    assert read_configuration(str(path)) == (None, kp.TrainConfig(solver="lbfgs"), None)


@pytest.mark.parametrize("name", ["nothing", ""])
def test_an_unknown_function_does_not_list_all(name):
    with pytest.raises(kp.SpecError, match="kapsi functions lists the names") as error:
        kp.functions().named(name)
    assert len(str(error.value)) < 200


def test_a_run_with_a_missing_package_is_not_damaged(tmp_path):
    table, run = tmp_path / "t.csv", tmp_path / "run"
    table.write_text("a,y\n" + "".join(f"{i},{i * i % 7 + 0.5}\n" for i in range(20)))
    arguments = ["fit", str(table), "--target", "y", "--output", str(run), "--set", "training.loss=huber"]
    assert main(arguments) == 0
    known = dict(ROLES["loss"])
    del ROLES["loss"]["huber"]
    try:
        with pytest.raises(RunError, match=r"run: .*no loss is called 'huber'.*install the package") as error:
            load_run(run)
    finally:
        ROLES["loss"].clear()
        ROLES["loss"].update(known)
    assert "damaged" not in str(error.value)
