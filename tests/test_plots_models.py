"""Pictures of effects, errors and training: what the axes show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

import kapsi as kp
from kapsi.training.records import Epoch

pytest.importorskip("matplotlib")
ROWS = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
MODEL = kp.Model(kp.rpn([2, 1], expansion=kp.Taylor(2)), seed=0)
RNG = np.random.default_rng(0)
Y, P = RNG.random(80) > 0.6, RNG.random(80).round(1)


def test_an_effect_is_its_curve_with_its_band() -> None:
    shown = kp.interpret.effects(MODEL, ROWS)["x2"]
    axes = kp.plots.effect(shown)
    assert axes.lines[0].get_ydata() == pytest.approx(shown.values[:, 0])
    assert axes.get_xlabel() == "x2"
    assert kp.plots.effect(shown, ax=axes) is axes


def test_categories_are_dots_in_order() -> None:
    one = np.array([[1.0], [-2.0], [0.5]])
    counts = np.array([5, 4, 3])
    shown = kp.interpret.Effect(
        "k", "category", "", ("y",), np.arange(3.0), ("a", "b", "c"), one, one, one, counts, np.empty(0)
    )
    axes = kp.plots.effect(shown)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "c", "a"]
    assert axes.lines[0].get_xdata().tolist() == [-2.0, 0.5, 1.0]


def test_a_pair_effect_is_its_values() -> None:
    (pair,) = kp.interpret.interactions(MODEL, ROWS)
    axes = kp.plots.pair_effect(pair)
    assert np.array_equal(axes.images[0].get_array(), pair.values[..., 0].T)
    assert (axes.get_xlabel(), axes.get_ylabel()) == pair.columns


def test_importances_are_bars_with_the_largest_at_the_top() -> None:
    shown = kp.interpret.importances(MODEL, ROWS)
    bars = kp.plots.importances(shown).patches
    assert [bar.get_width() for bar in bars] == [one.share for one in shown[::-1]]


def test_residuals_are_target_minus_prediction() -> None:
    (dots,) = kp.plots.residuals([1.0, 3.0], [2.0, 2.5]).collections
    assert dots.get_offsets().tolist() == [[2.0, -1.0], [2.5, 0.5]]
    with pytest.raises(kp.DataError, match="equal length, got 2 and 1"):
        kp.plots.residuals([1.0, 3.0], [2.0])


def test_calibration_has_observed_shares() -> None:
    _, curve = kp.plots.calibration([0, 1, 1, 1], [0.05, 0.07, 0.95, 1.0]).lines
    assert curve.get_xdata() == pytest.approx([0.06, 0.975])
    assert curve.get_ydata() == pytest.approx([0.5, 1.0])


def test_a_confusion_matrix_has_numbers_of_rows() -> None:
    axes = kp.plots.confusion_matrix(["a", "a", "b"], ["a", "b", "b"])
    assert [text.get_text() for text in axes.texts] == ["1", "1", "0", "1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]


def test_areas_are_those_of_scikit_learn() -> None:
    assert kp.plots.roc(Y, P).get_title() == f"AUC {roc_auc_score(Y, P):.4f}"
    assert kp.plots.precision_recall(Y, P).get_title() == f"average precision {average_precision_score(Y, P):.4f}"
    with pytest.raises(kp.DataError, match="all rows are of one class"):
        kp.plots.roc([1, 1], [0.5, 0.6])


@pytest.mark.parametrize("labels", [(-1, 1), (False, True), ("ham", "spam"), (1, 2)])
def test_the_larger_label_is_the_positive_class(labels: tuple[object, object]) -> None:
    y = [labels[int(hit)] for hit in Y]
    area = f"AUC {roc_auc_score(Y, P):.4f}"
    assert kp.plots.roc(y, P).get_title() == kp.plots.roc(np.array(y), P).get_title() == area
    assert kp.plots.roc(y, 1 - P, positive=labels[0]).get_title() == area
    shares = kp.plots.calibration(y, P).lines[1].get_ydata()
    assert list(shares) == list(kp.plots.calibration(Y, P).lines[1].get_ydata())


def test_learning_curves_are_losses() -> None:
    names = Epoch._fields
    records = [Epoch(**{**dict.fromkeys(names, 0), "loss": loss, "validation_loss": 2 * loss}) for loss in (1.0, 0.5)]
    training, validation = kp.plots.learning_curves(records).lines
    assert training.get_ydata().tolist() == [1.0, 0.5]
    assert validation.get_ydata().tolist() == [2.0, 1.0]
    with pytest.raises(kp.DataError, match="no epochs"):
        kp.plots.learning_curves([])


def test_a_network_has_edges_as_wide_as_important() -> None:
    model = kp.Model(kp.rpn([2, 3, 1], kp.Chebyshev(3)), seed=0)
    axes = kp.plots.network(model, ROWS, names=["a", "b"])
    shares = torch.cat([edges.flatten() / edges.max() for edges in kp.interpret.attribution(model, ROWS).edges])
    assert [line.get_linewidth() / 4 for line in axes.lines] == pytest.approx(shares.sqrt().tolist())
    assert [text.get_text() for text in axes.texts] == ["a", "b"]
    with pytest.raises(kp.DataError, match="expected 2 names, got 1"):
        kp.plots.network(model, ROWS, names=["a"])
    with pytest.raises(kp.DataError, match="a layer has 50 nodes, at most 40"):
        kp.plots.network(kp.Model(kp.rpn([2, 50, 1], kp.Chebyshev(1))), ROWS)


def test_an_edge_is_its_function_in_the_order_of_the_input() -> None:
    model = kp.Model(kp.rpn([2, 3, 1], kp.Chebyshev(3)), seed=0)
    first, _ = kp.interpret.edge_functions(model, ROWS)
    curve, rows = kp.plots.edge(first, output=2, input=1).lines
    assert curve.get_xdata().tolist() == sorted(ROWS[:, 1].tolist())
    assert curve.get_ydata() == pytest.approx(first.values[ROWS[:, 1].argsort(), 2, 1].numpy())
    assert len(rows.get_xdata()) == 60
    with pytest.raises(kp.DataError, match=r"edge\(output\): expected an integer from 0 to 2, got 3"):
        kp.plots.edge(first, output=3)


def test_columns_of_images_are_images() -> None:
    head = kp.Head(6, 2, kp.HeadSpec(kp.Taylor(2)), seed=0)
    image = torch.arange(6.0)
    axes = kp.plots.expansion_images(head, image, (2, 3), most=7)
    shown = np.asarray(axes.images[0].get_array().filled(-1))
    assert shown.shape == (3 * 2 + 2, 3 * 3 + 2)
    assert shown[:2, :3].tolist() == image.reshape(2, 3).tolist()
    assert shown[6:, :3].tolist() == (5 * image).reshape(2, 3).tolist()  # the last block: times the last pixel
    axes = kp.plots.weight_images(head, (2, 3), output=1, most=2)
    assert axes.get_title() == "ψ(w), output 1: 2 of 7 images"
    row = head.weights().dense()[0, 1].detach().numpy()
    assert np.asarray(axes.images[0].get_array())[:, 4:] == pytest.approx(row[-6:].reshape(2, 3))
    with pytest.raises(kp.DataError, match="has 42 columns, no multiple of 5 × 5 pixels"):
        kp.plots.weight_images(head, (5, 5))
    with pytest.raises(kp.DataError, match=r"weight_images\(output\): expected an integer from 0 to 1, got 2"):
        kp.plots.weight_images(head, (2, 3), output=2)


def test_errors_of_pictures_name_the_value() -> None:
    """Missing values, labels other than 0 and 1, and no probabilities are refused instead of drawn."""
    nan = float("nan")
    with pytest.raises(kp.DataError, match="roc: the values must be finite"):
        kp.plots.roc([0, 1, 1], [0.1, nan, 0.4])
    with pytest.raises(kp.DataError, match="expected y of two labels, got 3: 1, 2, 3, …; name one with positive="):
        kp.plots.precision_recall([1, 2, 3], [0.1, 0.2, 0.4])
    with pytest.raises(kp.DataError, match="expected probabilities from 0 to 1, got -1 to 9"):
        kp.plots.calibration([0, 1], [-1, 9])
    head = kp.Head(4, 2, kp.HeadSpec(kp.Chebyshev(2)), seed=0)
    with pytest.raises(kp.DataError, match=r"κ\(x\) is not finite"):
        kp.plots.expansion_images(head, torch.full((4,), nan), (2, 2))
    with pytest.raises(kp.DataError, match=r"weight_images\(shape\): expected an integer of at least 1, got 0"):
        kp.plots.weight_images(head, (0, 2))


def test_images_of_a_head_in_training_are_without_dropout() -> None:
    head = kp.Head(4, 2, kp.HeadSpec(kp.Identity(), before=("dropout",)), seed=0).train()
    state = torch.get_rng_state()
    image = torch.arange(1.0, 5.0)
    drawn = kp.plots.expansion_images(head, image, (2, 2)).images[0].get_array()
    assert drawn is not None
    np.testing.assert_array_equal(np.asarray(drawn), image.reshape(2, 2))
    assert head.training
    assert torch.equal(state, torch.get_rng_state())


def test_dollar_signs_of_names_are_no_formulas(tmp_path: Path) -> None:
    model = kp.Model(kp.rpn([2, 1], kp.Identity()), seed=0)
    axes = kp.plots.network(model, torch.rand(5, 2), names=["$x^$", "price ($)"])
    axes.figure.savefig(tmp_path / "network.svg")
    assert "$x^$" in (tmp_path / "network.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: kp.plots.roc(Y, P, ax=3), r"plots\(ax\): expected axes of matplotlib.*, got 3"),
        (lambda: kp.plots.function(kp.Taylor(2), ax="x"), r"plots\(ax\): expected axes of matplotlib.*, got 'x'"),
        (lambda: kp.plots.network(kp.Model(kp.rpn([2, 1], "identity")), ROWS, names=5), r"network\(names\).*, got 5"),
        (lambda: kp.plots.confusion_matrix(None, [1]), "confusion_matrix: expected y as a label for each row"),
        (
            lambda: kp.plots.roc([object()] * len(P), P),
            "roc: y: expected numbers, booleans, strings or dates, got <object",
        ),
        (lambda: kp.plots.learning_curves(None), "learning_curves: expected records of epochs.*, got None"),
        (lambda: kp.plots.learning_curves([1]), "learning_curves: expected records of epochs.*, got 1"),
        (lambda: kp.plots.importances(5), "importances: expected importances of columns.*, got 5"),
        (lambda: kp.plots.importances([]), r"importances: expected importances of columns.*, got \[\]"),
        (lambda: kp.plots.effect({}), r"effect: expected an effect of a column.*, got \{\}"),
        (lambda: kp.plots.pair_effect(None), "pair_effect: expected an interaction.*, got None"),
        (lambda: kp.plots.roc(Y, P, positive="x"), r"roc\(positive\): expected one of the labels .*, got 'x'"),
    ],
)
def test_arguments_of_another_kind_are_named(draw: Any, message: str) -> None:
    with pytest.raises(kp.DataError, match=message):
        draw()


def test_a_network_takes_arrays_and_frames() -> None:
    model = kp.Model(kp.rpn([2, 1], kp.Chebyshev(3)), seed=0)
    widths = [line.get_linewidth() for line in kp.plots.network(model, ROWS).lines]
    array = ROWS.numpy()
    for rows in (array, pyarrow.table({"a": array[:, 0], "b": array[:, 1]})):
        assert [line.get_linewidth() for line in kp.plots.network(model, rows).lines] == pytest.approx(widths)
