"""The grid of the MNIST ablation, and the procedure that trains one layer of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import kapsi as kp
from kapsi.data.images import ImageData
from kapsi.errors import KapsiError, SpecError
from kapsi.paper.experiment import Run, load_shipped
from kapsi.paper.procedures import ablation

PAPER = 21
"""Expansions of the paper."""


def made(rows: int, seed: int) -> tuple[Any, Any]:
    """Return images of 4 × 4 pixels, the class the brightest of four rows of pixels."""
    random = np.random.default_rng(seed)
    x = random.integers(0, 160, (rows, 16)).astype(np.uint8)
    y = random.integers(0, 4, rows)
    for row, place in enumerate(y):
        x[row, 4 * place : 4 * place + 4] += 90
    return x, y.astype(np.int64)


@pytest.fixture(autouse=True)
def _images(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = made(400, 0), made(200, 1)
    data = ImageData(*train, *test, mean=(0.4,), std=(0.25,), shape=(1, 4, 4), classes=("a", "b", "c", "d"))
    monkeypatch.setattr(ablation, "load_images", lambda name, folder: data)


TRAIN = {"epochs": 20, "solver": {"batch_size": 50, "learning_rate": 0.03, "schedule": "one_cycle"}}


def outcome(threads: int = 1, **options: Any) -> Any:
    return ablation.run(
        Run(
            "mnist-ablation",
            "row",
            "kapsi",
            0,
            options={"train": TRAIN, **options},
            procedure="ablation",
            metric="accuracy",
        )
    )


def test_identity_with_a_full_matrix_is_a_linear_classifier() -> None:
    got = outcome(expansion="identity", reconciliation="dense", remainder="zero")
    (x, y), (test_x, test_y) = made(400, 0), made(200, 1)
    reference = LogisticRegression(fit_intercept=False, max_iter=1000).fit((x / 255 - 0.4) / 0.25, y)
    score = reference.score((test_x / 255 - 0.4) / 0.25, test_y)
    assert score > 0.85
    assert abs(got.score - score) < 0.05
    assert got.parameters == 4 * 16
    assert got.extra["columns"] == 16
    assert (got.extra["train_rows"], got.extra["test_rows"]) == (400, 200)
    assert "failure" not in got.extra


def test_rows_are_the_first_ones_and_a_seed_repeats() -> None:
    options = {
        "expansion": "taylor",
        "reconciliation": "low_rank",
        "remainder": "linear",
        "train_rows": 100,
        "test_rows": 40,
    }
    one, two = outcome(**options), outcome(**options)
    assert (one.score, one.extra["loss"]) == (two.score, two.extra["loss"])
    assert (one.extra["train_rows"], one.extra["test_rows"]) == (100, 40)
    assert one.score * 40 == pytest.approx(round(one.score * 40))
    assert one.parameters == 2 * (4 + 16 + 256) + 4 * 16


def test_axes_go_into_the_head() -> None:
    got = outcome(expansion="chebyshev", reconciliation="hypernet", remainder="zero", head={"after": ["layer_norm"]})
    head = got.extra["head"]
    assert (head["expansion"]["kind"], head["reconciliation"]["kind"], head["remainder"]["kind"]) == (
        "chebyshev",
        "hypernet",
        "zero",
    )
    assert [process["kind"] for process in head["after"]] == ["layer_norm"]


def test_expansions_are_calibrated_on_the_training_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def watched(model: kp.Model, *given: Any) -> kp.Model:
        seen.append(given)
        return kp.calibrate(model, *given)

    monkeypatch.setattr(ablation, "calibrate", watched)
    outcome(expansion="naive_normal", train_rows=30)
    ((x,),) = seen  # once, and without labels
    assert torch.allclose(x.double(), torch.from_numpy((made(400, 0)[0][:30] / 255 - 0.4) / 0.25), atol=1e-5)


def test_what_diverges_has_a_score_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(model: kp.Model, *given: Any) -> None:
        with torch.no_grad():
            model.layers[0].heads[0].psi["matrix"][1] = math.inf
        raise KapsiError("epoch 1, step 3: the loss is not finite")

    monkeypatch.setattr(ablation, "fit", diverging)
    got = outcome(expansion="identity", reconciliation="dense", remainder="zero")
    assert got.extra["failure"] == "epoch 1, step 3: the loss is not finite"
    assert got.score == 0
    assert "loss" not in got.extra


def test_wrong_options_are_errors() -> None:
    with pytest.raises(SpecError, match="a, row, kapsi"):
        ablation.run(
            Run("a", "row", "kapsi", 0, options={"expansion": "tailor"}, procedure="ablation", metric="accuracy")
        )
    with pytest.raises(SpecError, match="head"):
        ablation.run(Run("a", "row", "kapsi", 0, options={"head": 3}, procedure="ablation", metric="accuracy"))
    with pytest.raises(SpecError, match="rows_train"):
        ablation.run(Run("a", "row", "kapsi", 0, options={"rows_train": 3}, procedure="ablation", metric="accuracy"))
    for options, message in (
        ({"expansion": "taylor", "head": {"expansion": "fourier"}}, "head.expansion: is the same option as expansion"),
        ({"train": {"solver": "sgd"}}, "train.solver: is adamw for all layers"),
        ({"train": {"starts": 3}}, "restarts is an option of the solver levenberg_marquardt"),
        ({"train": {"class_weights": [1.0, 2.0]}}, "class_weights"),
    ):
        with pytest.raises(SpecError, match=message):
            ablation.read_options(Run("a", "row", "kapsi", 0, options=options, procedure="ablation", metric="accuracy"))
    for changed in ({"metric": "mse"}, {"protocol": "paper", "metric": "accuracy"}):
        with pytest.raises(SpecError, match=r"a, row, kapsi: the (procedure|protocol)"):
            ablation.read_options(Run("a", "row", "kapsi", 0, procedure="ablation", **changed))


def test_digits_have_an_image_and_the_weights_of_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (40, 784)).astype(np.uint8), np.arange(40) % 3
    data = ImageData(
        x, y, x[::-1].copy(), y[::-1].copy(), mean=(0.1307,), std=(0.3081,), shape=(1, 28, 28), classes=("0", "1", "2")
    )
    monkeypatch.setattr(ablation, "load_images", lambda name, folder: data)
    trained: list[kp.Model] = []

    def kept(model: kp.Model, *given: Any) -> Any:
        trained.append(model)
        return kp.fit(model, *given)

    monkeypatch.setattr(ablation, "fit", kept)
    head = {"expansion": {"kind": "taylor", "degree": 2}}
    digits = outcome(head=head, digits=True, train={"epochs": 1}).extra["digits"]
    psi = trained[0].layers[0].heads[0].weights().dense().detach().double().reshape(3, -1).numpy()
    assert [digit["class"] for digit in digits] == [0, 1, 2]
    for number, digit in enumerate(digits):
        first = np.flatnonzero(data.test_y == number)[0]
        assert np.array_equal(ablation.unpacked(digit["image"], 784), data.test_x[first])
        # A square of the grid: the products of the pixel (2, 5) with the pixels in rows 4 to 7 and columns 8 to 11.
        products = psi[number, 784:].reshape(28, 28, 28, 28)
        means = products.reshape(28, 28, 7, 4, 7, 4).mean((3, 5))
        for shown, values in (
            (ablation.unpacked(digit["pixels"], 784).reshape(28, 28), psi[number, :784].reshape(28, 28)),
            (ablation.unpacked(digit["products"], 196**2).reshape(28, 7, 28, 7)[2, 1, 5, 2], means[2, 5, 1, 2]),
        ):
            largest = np.abs(psi[number, :784]).max() if np.ndim(shown) else np.abs(means).max()
            step = largest / ablation.GRAYS
            assert np.abs((shown.astype(float) - ablation.GRAYS) * step - values).max() <= step / 2 + 1e-6
    assert (
        "digits"
        not in ablation.run(
            Run("a", "r", "kapsi", 1, options={"head": head, "digits": True}, procedure="ablation", metric="accuracy")
        ).extra
    )
    with pytest.raises(SpecError, match="digits: pictures taylor of degree 2"):
        outcome(head={"expansion": "fourier"}, digits=True)
    with pytest.raises(ValueError, match="expected 5 bytes"):
        ablation.unpacked(digits[0]["image"], 5)
    with pytest.raises(ValueError, match="not compressed"):
        ablation.unpacked("AAAA", 5)


def test_grids_of_processing_are_built() -> None:
    for run in load_shipped("mnist-processing").plan().runs:
        head, (expansion, before, after) = ablation.read_options(run).head, run.row.split(" · ")
        assert head.expansion.name == expansion
        assert [step.name for step in head.before] == [before] * (before != "none")
        assert [step.name for step in head.after] == [after] * (after != "none")


# ------------------------------------------------------------------------------------------------ the grid


def test_the_grid_has_everything_of_the_paper() -> None:
    experiment = load_shipped("mnist-ablation")
    axes: dict[str, set[Any]] = {}
    for row in experiment.rows:
        for axis, value in row.axes.items():
            axes.setdefault(axis, set()).add(value)
    registry = {role: {entry.name for entry in kp.catalogue() if entry.role == role} for role in axes}
    for axis, values in axes.items():
        assert values <= registry[axis], axis
    assert {row.axes["remainder"] for row in experiment.rows} == registry["remainder"]
    assert {row.axes["reconciliation"] for row in experiment.rows} >= registry["reconciliation"] - {
        "one",
        "zero",
        "drop_connect",
    }
    full = {row.axes["expansion"] for row in experiment.rows if row.axes["reconciliation"] == "masked"}
    assert len(full) == PAPER


def test_every_run_of_the_grid_can_be_built() -> None:
    experiment = load_shipped("mnist-ablation")
    runs = experiment.plan().runs
    assert len(runs) > 600
    for run in runs:
        head = ablation.read_options(run).head
        assert [process.name for process in head.after] == ["layer_norm"]
        kp.Model(kp.ModelSpec((784, 10), (kp.LayerSpec((head,)),)), device="meta")


def test_what_is_left_out_would_be_the_same_or_cannot_be() -> None:
    """The reasons of the exclusions: a constant does not change probabilities, and the others are refused."""
    x = torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def probabilities(**head: Any) -> Tensor:
        spec = kp.HeadSpec("chebyshev", after="layer_norm", **head)
        model = kp.Model(kp.ModelSpec((5, 3), (kp.LayerSpec((spec,)),)), seed=0, dtype=torch.float64)
        return model(x).softmax(1)

    same = torch.testing.assert_close
    same(
        probabilities(reconciliation="dense", remainder="constant"),
        probabilities(reconciliation="dense", remainder="zero"),
    )
    same(probabilities(reconciliation="constant", remainder="zero"), torch.full((20, 3), 1 / 3, dtype=torch.float64))
    refused: tuple[Callable[[], Any], ...] = (
        lambda: probabilities(remainder="identity"),
        lambda: probabilities(reconciliation="eye"),
    )
    for build in refused:
        with pytest.raises(SpecError):
            build()
