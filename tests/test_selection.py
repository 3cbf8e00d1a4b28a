"""The choice of a penalty and a number of epochs on rows that are not trained on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

import kapsi as kp
from kapsi.modules import scale_last_layer
from kapsi.training import selection, threads
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit
from kapsi.training.prediction import predict
from kapsi.training.resolve import SMALL_PRODUCT, RowsInfo, resolve
from kapsi.training.selection import Fits, choose_penalty, fit_selected
from test_engine import LINEAR, MLP, model_of, numbers


def test_near_zero_scales_the_last_layer_alone():
    plain, small = model_of(MLP), scale_last_layer(model_of(MLP))
    x = numbers()[0]
    assert torch.allclose(predict(small, x), predict(plain, x) / 100, rtol=1e-9)
    assert torch.equal(small.layers[0].heads[0].psi["matrix"], plain.layers[0].heads[0].psi["matrix"])
    product = kp.rpn([3, 1], kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder())
    assert torch.allclose(
        predict(scale_last_layer(model_of(product)), x), predict(model_of(product), x) / 100, rtol=1e-9
    )


# ------------------------------------------------------------------------------------------------ the choice of a penalty


def rows_of(*parts):
    return [(torch.tensor(kept), torch.tensor(held)) for kept, held in parts]


def prescribe(monkeypatch, losses):
    """Let each penalty have prescribed losses on four held-out rows, whatever the model."""
    tried = []

    def fake_fit(model, data, config, **others):
        tried.append(config.l2)
        return [kp.Epoch(1, 1.0, 1.0, True)]

    def prescribed(self, output, target):
        return torch.tensor(losses[tried[-1]], dtype=torch.float64)

    monkeypatch.setattr(selection, "fit", fake_fit)
    monkeypatch.setattr(kp.MSE, "rows", prescribed)
    return tried


INF = math.inf


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        # Differences 0.1 ± 0.1: the standard error of four rows is 0.1155/2 = 0.058 < 0.1, so 3.0 is surely worse.
        ({3.0: [1.2, 1.0, 1.2, 1.0], 1.0: [1.0, 1.0, 1.0, 1.0]}, 1.0),
        # Differences 0.1 ± 0.3: the standard error is 0.17 > 0.1. Unpaired, or with the deviation of the losses, neither.
        ({3.0: [1.4, 0.8, 1.4, 0.8], 1.0: [1.0, 1.0, 1.0, 1.0]}, 3.0),
        # Paired: the losses themselves vary by far more than their differences.
        ({3.0: [9.1, 1.1, 5.1, 0.1], 1.0: [9.0, 1.0, 5.0, 0.0]}, 1.0),
        # The best is the strongest.
        ({3.0: [1.0, 1.0, 1.0, 1.0], 1.0: [1.5, 1.5, 1.5, 1.5]}, 3.0),
        # The strongest of several that are not surely worse.
        ({9.0: [5.0, 5.0, 5.0, 5.0], 3.0: [1.4, 0.8, 1.4, 0.8], 1.0: [1.4, 0.8, 1.3, 0.8], 0.1: [1.0] * 4}, 3.0),
        # Not finite is worse than any number.
        ({3.0: [INF, 0.0, 0.0, 0.0], 1.0: [1.0, 1.0, 1.0, 1.0]}, 1.0),
        ({3.0: [math.nan] * 4, 1.0: [1.0, 1.0, 1.0, 1.0]}, 1.0),
        ({3.0: [1.0, 1.0, 1.0, 1.0], 1.0: [math.nan, 0.0, 0.0, 0.0]}, 3.0),
        ({3.0: [INF] * 4, 1.0: [INF] * 4}, 3.0),
    ],
)
def test_the_strongest_penalty_within_one_paired_standard_error_is_chosen(monkeypatch, losses, chosen):
    prescribe(monkeypatch, losses)
    splits = rows_of(([0, 1, 2, 3], [4, 5, 6, 7]))
    choices = choose_penalty(lambda rows: model_of(), numbers(8), splits, TrainConfig(), penalties=list(losses))
    assert [c.l2 for c in choices if c.chosen] == [chosen]
    assert [c.l2 for c in choices] == list(losses)


def test_the_search_ends_when_three_in_a_row_are_surely_worse(monkeypatch):
    losses = {
        p: [value] * 4 for p, value in zip((7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), (2, 1, 2, 3, 4, 0, 0), strict=True)
    }
    tried = prescribe(monkeypatch, losses)
    splits = rows_of(([0, 1, 2, 3], [4, 5, 6, 7]))
    choices = choose_penalty(lambda rows: model_of(), numbers(8), splits, TrainConfig(), penalties=list(losses))
    assert tried == [7.0, 6.0, 5.0, 4.0, 3.0]
    assert [c.chosen for c in choices] == [False, True, False, False, False]
    assert [c.loss for c in choices] == [2.0, 1.0, 2.0, 3.0, 4.0]


def thirds(count):
    def splits(parts):
        rows = np.arange(count)
        held = [rows[i::parts] for i in range(parts)] if parts > 1 else [rows[::5]]
        return rows_of(*[(np.setdiff1d(rows, part), part) for part in held])

    return splits


def test_the_choice_agrees_with_a_search_by_hand():
    x, y = numbers(60, noise=1.5)
    spec = kp.rpn([3, 1], kp.Taylor(3, symmetric=True), bias=True)
    splits = thirds(60)(3)
    penalties = (10.0, 1.0, 0.1, 0.01)
    choices = choose_penalty(
        lambda rows: scale_last_layer(model_of(spec)), (x, y), splits, TrainConfig(), penalties=penalties
    )
    held_out, epochs = {}, {}
    models = [scale_last_layer(model_of(spec)) for _ in splits]
    for penalty in penalties:
        parts, counts = [], []
        for model, (kept, held) in zip(models, splits, strict=True):
            config = TrainConfig(l2=penalty, solver="lbfgs", loss="mse")
            records = fit(model, (x[kept], y[kept]), config, validation=(x[held], y[held]))
            parts.append((predict(model, x[held])[:, 0] - y[held]) ** 2)
            counts.append(1 + int(np.argmin([r.validation_loss for r in records])))
        held_out[penalty], epochs[penalty] = torch.cat(parts).numpy(), sorted(counts)[1]
    best = min(penalties, key=lambda p: held_out[p].mean())
    near = [
        p
        for p in penalties
        if (held_out[p] - held_out[best]).mean() <= np.std(held_out[p] - held_out[best], ddof=1) / math.sqrt(60)
    ]
    assert [c.l2 for c in choices if c.chosen] == [max(near)]
    assert [c.loss for c in choices] == pytest.approx([held_out[p].mean() for p in penalties])
    assert [c.epochs for c in choices] == list(epochs.values())


def test_noise_takes_a_strong_penalty_and_a_clean_function_a_weak_one():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(90, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(90, generator=generator, dtype=torch.float64)
    spec = kp.rpn([3, 1], kp.Taylor(2), bias=True)
    chosen = []
    for y in (noise, x[:, 0] * x[:, 1]):
        model, records, choices = fit_selected(
            lambda rows, spec=spec: scale_last_layer(model_of(spec)), (x, y), TrainConfig(), splits=thirds(90)
        )
        assert records
        chosen += [c.l2 for c in choices if c.chosen]
        error = float((predict(model, x)[:, 0] - y).square().mean() / y.square().mean())
        assert (error > 0.8) == (y is noise)
    assert chosen[0] == selection.PENALTIES[0]
    assert chosen[1] <= 1e-3


def test_one_layer_goes_on_and_more_layers_begin_anew():
    made = []

    def make(spec):
        made.append(spec)
        return scale_last_layer(model_of(spec))

    splits = thirds(30)(3)
    for spec, count in ((LINEAR, 3), (MLP, 3 + 2 * 3)):
        made.clear()
        config = TrainConfig(epochs=2)
        choose_penalty(lambda rows, spec=spec: make(spec), numbers(30), splits, config, penalties=(1.0, 0.1))
        assert len(made) == count


def test_a_given_penalty_is_not_searched_for():
    x, y = numbers(60)
    model, _, choices = fit_selected(lambda rows: model_of(), (x, y), TrainConfig(l2=0.5), splits=thirds(60))
    assert choices == []
    reference = Ridge(alpha=0.5 * 60 / 2).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(predict(model, x).numpy()[:, 0], reference.predict(x.numpy()), atol=1e-5)


def test_adamw_keeps_rows_to_stop_on_and_returns_the_best_weights():
    x, y = numbers(60, noise=2.0)
    asked = []

    def splits(count):
        asked.append(count)
        return thirds(60)(1)

    config = TrainConfig(solver=kp.AdamW(batch_size=8, learning_rate=0.1), l2=0.0)
    model, records, choices = fit_selected(lambda rows: model_of(MLP), (x, y), config, splits=splits)
    assert asked == [1]
    assert choices == []
    held = torch.arange(0, 60, 5)
    best = min(r.validation_loss for r in records)
    assert records[-1].validation_loss > best
    assert float((predict(model, x[held])[:, 0] - y[held]).square().mean()) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("rows", "parts"), [(5_000, 3), (5_001, 1)])
def test_large_data_are_not_cross_validated(rows, parts):
    x, y = numbers(rows)
    asked = []

    def splits(count):
        asked.append(count)
        return thirds(rows)(count)

    fit_selected(lambda rows: model_of(), (x, y), TrainConfig(l2=0.1, epochs=2), splits=splits)
    assert asked == [parts]


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    inside = []

    class Threads(kp.Callback):
        def on_step(self, record):
            inside.append(torch.get_num_threads())

    try:
        torch.set_num_threads(2)
        for limit in (2**20, 10):
            threads.SMALL_ELEMENTS = limit
            config = TrainConfig(l2=0.1, epochs=1)
            splits = thirds(30)
            fit_selected(
                lambda rows: model_of(),
                numbers(30),
                config,
                splits=splits,
                fits=Fits(Threads()),
            )
            assert torch.get_num_threads() == 2
    finally:
        threads.SMALL_ELEMENTS = 2**20
        torch.set_num_threads(before)
    assert set(inside[: len(inside) // 2]) == {1}
    assert set(inside[len(inside) // 2 :]) == {2}


def test_what_auto_stands_for_where_a_penalty_is_chosen():
    def chosen(model, rows):
        return resolve(TrainConfig(), model, RowsInfo(rows, classes=False), selecting=True)

    assert chosen(model_of(), SMALL_PRODUCT // 4).solver == kp.LBFGS()
    assert chosen(model_of(), SMALL_PRODUCT // 4 + 1).solver == kp.AdamW()
    assert chosen(model_of(kp.rpn([3, 6, 1], before=("dropout",), bias=True)), 10).solver == kp.AdamW()
    assert chosen(model_of(), 10).loss == kp.MSE()


def test_ridge_chooses_by_leaving_each_row_out():
    x, y = numbers(60, noise=1.5)
    spec = kp.rpn([3, 1], kp.Taylor(3, symmetric=True), bias=True)
    model, records, choices = fit_selected(
        lambda rows: model_of(spec), (x, y), TrainConfig(solver="ridge"), splits=thirds(60)
    )
    assert len(records) == len(choices) == 1
    again = model_of(spec)
    fit(again, (x, y), TrainConfig(solver="ridge", l2=choices[0].l2))
    np.testing.assert_allclose(predict(model, x), predict(again, x), rtol=1e-9)
