"""Training on tensors: early stopping, penalties and their choice, randomness, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from torch.nn import functional as F

import kapsi as kp
from kapsi.errors import KapsiError, SpecError
from kapsi.training import engine
from kapsi.training.engine import TrainConfig, choose_penalty, fit, fit_selected, near_zero, predict, row_losses, train

LINEAR = kp.rpn([3, 1], bias=True)
MLP = kp.rpn([3, 8, 1], bias=True, output="tanh")


def model_of(spec=LINEAR, seed=0):
    return kp.Model(spec, seed=seed, dtype=torch.float64)


def numbers(rows=80, noise=0.3, seed=0):
    """A target that is linear, and a little quadratic and noisy."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0, correction=0)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.7 + 0.2 * x[:, 0] * x[:, 1]
    return x, y + noise * torch.randn(rows, generator=generator, dtype=torch.float64)


def labels(rows=90, seed=0):
    x, y = numbers(rows, seed=seed)
    return x, torch.bucketize(y, torch.tensor([-0.5, 1.5], dtype=torch.float64))


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------ losses and prediction


def test_row_losses_are_those_of_torch():
    x, y = labels()
    logits = torch.randn(len(x), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert row_losses(logits, y, "cross_entropy").mean() == pytest.approx(float(F.cross_entropy(logits, y)))
    assert row_losses(logits, logits + 2, "mse").tolist() == pytest.approx([12.0] * len(x))
    assert row_losses(logits[:, :1], logits[:, 0] + 2, "mse").tolist() == pytest.approx([4.0] * len(x))


def test_predict_goes_in_batches_and_in_evaluation_mode():
    model = kp.Model(kp.rpn([3, 2], before="dropout"), seed=0, dtype=torch.float64).train()
    x = numbers(10)[0]
    whole = predict(model, x)
    assert whole.shape == (10, 2)
    assert torch.equal(whole, model.eval()(x))
    assert torch.allclose(predict(model, x, batch=3), whole, rtol=1e-12, atol=0)
    assert not whole.requires_grad


# ------------------------------------------------------------------------------------------------ what is minimized


@pytest.mark.parametrize("penalty", [0.01, 1.0, 30.0])
def test_a_penalized_linear_model_is_ridge_regression(penalty):
    x, y = numbers()
    model = model_of()
    fit(model, (x, y), TrainConfig(penalty=penalty))
    # mean squared error + λ‖w‖²/2 is scikit-learn's objective divided by the rows, with alpha = λ·rows/2.
    reference = Ridge(alpha=penalty * len(x) / 2).fit(x.numpy(), y.numpy())
    head = model.layers[0].heads[0]
    np.testing.assert_allclose(head.psi["matrix"].detach().numpy()[0], reference.coef_, rtol=1e-5, atol=1e-7)
    assert float(head.bias.detach()) == pytest.approx(reference.intercept_, rel=1e-5)


def test_adamw_goes_to_the_same_minimum():
    x, y = numbers()
    model = model_of()
    fit(model, (x, y), TrainConfig(solver="adamw", penalty=1.0, epochs=300, learning_rate=0.05, batch_size=80))
    reference = Ridge(alpha=len(x) / 2).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(predict(model, x).numpy()[:, 0], reference.predict(x.numpy()), atol=1e-3)


def test_a_penalized_linear_classifier_is_logistic_regression():
    x, y = labels()
    model = model_of(kp.rpn([3, 3], bias=True))
    fit(model, (x, y), TrainConfig(penalty=0.1))
    reference = LogisticRegression(C=1 / (0.1 * len(x)), tol=1e-8, max_iter=1000).fit(x.numpy(), y.numpy())
    found = predict(model, x).softmax(-1).numpy()
    np.testing.assert_allclose(found, reference.predict_proba(x.numpy()), atol=1e-4)


def test_the_remainder_is_held_down_a_hundredth_as_much_and_biases_not_at_all():
    x, y = numbers()
    spec = kp.rpn([3, 1], kp.Chebyshev(1), remainder=kp.LinearRemainder(bias=True))
    model = model_of(spec)
    fit(model, (x, y), TrainConfig(penalty=2.0, epochs=2000))
    # The columns appear twice, with weights that are penalized by λ and λ/100.
    scaled = torch.cat([x, x * 10], 1).numpy()
    reference = Ridge(alpha=2.0 * len(x) / 2).fit(scaled, y.numpy())
    np.testing.assert_allclose(predict(model, x).numpy()[:, 0], reference.predict(scaled), atol=1e-5)


def test_near_zero_scales_the_last_layer_alone():
    plain, small = model_of(MLP), near_zero(model_of(MLP))
    x = numbers()[0]
    assert torch.allclose(predict(small, x), predict(plain, x) / 100, rtol=1e-9)
    assert torch.equal(small.layers[0].heads[0].psi["matrix"], plain.layers[0].heads[0].psi["matrix"])
    product = kp.rpn([3, 1], kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder())
    assert torch.allclose(predict(near_zero(model_of(product)), x), predict(model_of(product), x) / 100, rtol=1e-9)


# ------------------------------------------------------------------------------------------------ early stopping


@pytest.mark.parametrize("solver", ["adamw", "lbfgs"])
def test_early_stopping_restores_the_best_epoch(solver):
    x, y = numbers(24, noise=2.0)
    held = numbers(200, noise=2.0, seed=5)
    model = model_of(kp.rpn([3, 1], kp.Taylor(3), bias=True))
    states, seen = [], []

    def watch(epoch):
        states.append(state(model))
        seen.append(epoch)

    config = TrainConfig(solver=solver, penalty=0.0, patience=7, learning_rate=0.05, batch_size=8)
    records = fit(near_zero(model), (x, y), config, validation=held, progress=watch)
    assert records == seen
    assert [r.number for r in records] == list(range(1, len(records) + 1))
    losses = [r.validation_loss for r in records]
    best = int(np.argmin(losses))
    assert len(records) == best + 1 + 7 < config.epochs
    assert [r.best for r in records] == [loss < min([math.inf, *losses[:i]]) for i, loss in enumerate(losses)]
    assert same(state(model), states[best])
    assert not same(state(model), states[-1])
    assert float(row_losses(predict(model, held[0]), held[1], "mse").mean()) == losses[best]
    assert not model.training


def test_without_held_out_rows_the_last_epoch_stays():
    model, states = model_of(), []
    config = TrainConfig(solver="adamw", epochs=4, batch_size=20)
    records = fit(model, numbers(), config, progress=lambda _: states.append(state(model)))
    assert [r.validation_loss for r in records] == [None] * 4
    assert same(state(model), states[-1])
    assert not same(state(model), states[-2])


def test_lbfgs_ends_when_it_has_converged():
    records = fit(model_of(), numbers(), TrainConfig(penalty=0.1))
    assert 2 <= len(records) < 20
    assert records[-1].loss <= records[0].loss


def test_a_loss_that_is_not_finite_is_an_error_and_the_best_weights_stay():
    x, y = (tensor.float() for tensor in numbers(200))
    model, states = kp.Model(kp.rpn([3, 1], kp.Taylor(4)), seed=0), []
    config = TrainConfig(solver="adamw", learning_rate=1e6, penalty=1e6, batch_size=8)
    with pytest.raises(KapsiError, match=r"training stopped in epoch \d+: the loss is (nan|inf); lower learning_rate"):
        fit(model, (x * 1e4, y), config, validation=(x, y), progress=lambda epoch: states.append((epoch, state(model))))
    best = [weights for epoch, weights in states if epoch.best]
    assert same(state(model), best[-1] if best else state(model))
    with pytest.raises(KapsiError, match="training stopped in epoch 1:"):
        fit(model_of(), (x.double() * 1e200, y.double()))


def test_train_yields_the_epochs_one_by_one():
    model = model_of()
    steps = train(model, numbers(), TrainConfig(solver="adamw", epochs=3), numbers(seed=1))
    before = state(model)
    first = next(steps)
    assert first.number == 1
    assert first.best
    after = state(model)
    assert not same(before, after)
    assert [epoch.number for epoch in steps] == [2, 3]


# ------------------------------------------------------------------------------------------------ randomness

DROPOUT = kp.rpn([3, 6, 1], before=("dropout",), bias=True)


@pytest.mark.parametrize("solver", ["adamw", "lbfgs"])
@pytest.mark.parametrize("spec", [MLP, DROPOUT], ids=["mlp", "dropout"])
def test_nothing_global_is_drawn_and_equal_seeds_are_equal(solver, spec):
    torch.manual_seed(11)
    np.random.seed(11)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    config = TrainConfig(solver=solver, epochs=4, batch_size=16, penalty=0.01, seed=3)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(11)
        model = model_of(spec)
        fit(model, numbers(), replace(config, seed=seed), validation=numbers(30, seed=2))
        assert torch.equal(torch.get_rng_state(), before[0])
        found.append(state(model))
        torch.rand(seed)  # what is drawn elsewhere does not matter
    assert np.random.get_state()[1].tolist() == before[1]
    assert same(found[0], found[1])
    # Without dropout the seed is that of the order of rows, and lbfgs takes all of them.
    assert same(found[0], found[2]) == (solver == "lbfgs" and spec is MLP)


def test_dropout_is_different_in_each_step():
    x, y = numbers(16)
    model = model_of(kp.rpn([3, 1], before=("dropout",)))
    gradients = []
    model.layers[0].heads[0].psi["matrix"].register_hook(lambda gradient: gradients.append(gradient.clone()))
    fit(model, (x, y), TrainConfig(solver="adamw", epochs=3, batch_size=8, learning_rate=1e-12))
    zeros = {tuple((gradient == 0).flatten().tolist()) + tuple(gradient.flatten().tolist()) for gradient in gradients}
    assert len(gradients) == len(zeros) == 6


def test_auto_takes_lbfgs_for_small_things_that_are_not_random(monkeypatch):
    assert engine.solver_for(model_of(), engine.SMALL_PRODUCT // 4) == "lbfgs"
    assert engine.solver_for(model_of(), engine.SMALL_PRODUCT // 4 + 1) == "adamw"
    assert engine.solver_for(model_of(DROPOUT), 10) == "adamw"
    assert engine.resolve(model_of(), numbers(), TrainConfig()) == TrainConfig(loss="mse", solver="lbfgs")
    assert engine.resolve(model_of(), numbers(), TrainConfig(solver="adamw")).solver == "adamw"
    monkeypatch.setattr(engine, "SMALL_PRODUCT", 79 * 4)
    assert engine.resolve(model_of(), numbers(80), TrainConfig()).solver == "adamw"


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("option", "a", "b", "others"),
    [
        ("solver", "lbfgs", "adamw", {}),
        ("epochs", 2, 3, {"solver": "adamw"}),
        ("epochs", 4, 5, {"solver": "lbfgs"}),
        ("batch_size", 8, 16, {"solver": "adamw"}),
        ("learning_rate", 0.01, 0.02, {"solver": "adamw"}),
        ("penalty", 0.0, 0.1, {"solver": "adamw"}),
        ("penalty", 0.0, 0.1, {"solver": "lbfgs"}),
        ("patience", 2, 40, {"solver": "adamw", "epochs": 100, "learning_rate": 0.05}),
        ("seed", 0, 1, {"solver": "adamw"}),
    ],
)
def test_each_option_changes_the_result(option, a, b, others):
    found = []
    for value in (a, b):
        model = model_of(kp.rpn([3, 8, 1], kp.Taylor(3), bias=True, output="tanh"))
        config = TrainConfig(**{"epochs": 3, "batch_size": 16, **others, option: value})
        held = numbers(40, noise=2.0, seed=9) if option == "patience" else None
        fit(model, numbers(noise=2.0), config, validation=held)
        found.append(state(model))
    assert not same(*found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "loss: expected one of auto, cross_entropy, mse"),
        ({"solver": "sgd"}, "solver: expected one of auto, lbfgs, adamw"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 1.5}, "epochs: expected an integer"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 10**30}, "batch_size must be at most"),
        ({"learning_rate": 0.0}, "learning_rate must be at least"),
        ({"learning_rate": math.inf}, "learning_rate: expected a finite number"),
        ({"penalty": -1.0}, "penalty must be at least 0"),
        ({"penalty": math.nan}, "penalty: expected a finite number"),
        ({"stopping": 0.01}, r"stopping must be at least 0\.05"),
        ({"stopping": 0.6}, r"stopping must be at most 0\.5"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"validation": 0.95}, r"validation must be at most 0\.9"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**32}, "seed must be at most"),
        ({"seed": True}, "seed: expected an integer"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        TrainConfig(**options)


X, Y = numbers(10)


@pytest.mark.parametrize(
    ("data", "config", "message"),
    [
        ((X[:0], Y[:0]), {}, r"at least one row, got \(0, 3\)"),
        ((X[0], Y[:1]), {}, r"shape \(rows, m\)"),
        ((X, Y[:9]), {}, r"10 rows of inputs and \(9,\) of targets"),
        ((X.to_sparse(), Y), {}, r"expected dense inputs, got torch.sparse_coo; use to_dense\(\)"),
        ((X, Y.to_sparse()), {}, "expected dense targets, got torch.sparse_coo"),
        ((X * math.inf, Y), {}, "must be finite"),
        ((X, Y * math.nan), {}, "must be finite"),
        ((X, Y.long()), {"loss": "mse"}, "mse needs targets of a floating-point type"),
        ((X, Y), {"loss": "cross_entropy"}, "cross_entropy needs class numbers"),
        ((X, Y.long()[:, None]), {}, r"cross_entropy needs class numbers of shape \(rows,\)"),
    ],
)
def test_data_that_do_not_fit_are_refused(data, config, message):
    model = model_of()
    before = state(model)
    with pytest.raises(SpecError, match=message):
        fit(model, data, TrainConfig(**config))
    assert same(state(model), before)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(SpecError, match="no parameters that are trained"):
        fit(kp.Model(kp.rpn([3, 1], reconciliation=kp.ConstantReconciliation())), (X.float(), Y.float()))
    frozen = model_of()
    frozen.freeze("*")
    with pytest.raises(SpecError, match="no parameters that are trained"):
        fit(frozen, (X, Y))


def test_frozen_parameters_stay_and_are_not_held_down():
    x, y = numbers()
    model = model_of(kp.rpn([3, 1], remainder=kp.LinearRemainder(), bias=True))
    model.freeze("*psi*")
    before = state(model)
    fit(model, (x, y), TrainConfig(penalty=1.0))
    frozen = [name for name in before if "psi" in name]
    assert frozen
    assert all(torch.equal(before[name], model.state_dict()[name]) == (name in frozen) for name in before)


# ------------------------------------------------------------------------------------------------ the choice of a penalty


def rows_of(*parts):
    return [(torch.tensor(kept), torch.tensor(held)) for kept, held in parts]


def prescribe(monkeypatch, losses):
    """Let each penalty have prescribed losses on four held-out rows, whatever the model."""
    tried = []

    def fake_fit(model, data, config, *, validation, progress):
        tried.append(config.penalty)
        return [engine.Epoch(1, 1.0, 1.0, True)]

    monkeypatch.setattr(engine, "fit", fake_fit)
    monkeypatch.setattr(
        engine, "row_losses", lambda output, target, loss: torch.tensor(losses[tried[-1]], dtype=torch.float64)
    )
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
    assert [c.penalty for c in choices if c.chosen] == [chosen]
    assert [c.penalty for c in choices] == list(losses)


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
    choices = choose_penalty(lambda rows: near_zero(model_of(spec)), (x, y), splits, TrainConfig(), penalties=penalties)
    held_out, epochs = {}, {}
    models = [near_zero(model_of(spec)) for _ in splits]
    for penalty in penalties:
        parts, counts = [], []
        for model, (kept, held) in zip(models, splits, strict=True):
            config = TrainConfig(penalty=penalty, solver="lbfgs", loss="mse")
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
    assert [c.penalty for c in choices if c.chosen] == [max(near)]
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
            lambda rows, spec=spec: near_zero(model_of(spec)), (x, y), TrainConfig(), splits=thirds(90)
        )
        assert records
        chosen += [c.penalty for c in choices if c.chosen]
        error = float((predict(model, x)[:, 0] - y).square().mean() / y.square().mean())
        assert (error > 0.8) == (y is noise)
    assert chosen[0] == engine.PENALTIES[0]
    assert chosen[1] <= 1e-3


def test_one_layer_goes_on_and_more_layers_begin_anew():
    made = []

    def make(spec):
        made.append(spec)
        return near_zero(model_of(spec))

    splits = thirds(30)(3)
    for spec, count in ((LINEAR, 3), (MLP, 3 + 2 * 3)):
        made.clear()
        config = TrainConfig(epochs=2)
        choose_penalty(lambda rows, spec=spec: make(spec), numbers(30), splits, config, penalties=(1.0, 0.1))
        assert len(made) == count


def test_a_given_penalty_is_not_searched_for():
    x, y = numbers(60)
    model, _, choices = fit_selected(lambda rows: model_of(), (x, y), TrainConfig(penalty=0.5), splits=thirds(60))
    assert choices == []
    reference = Ridge(alpha=0.5 * 60 / 2).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(predict(model, x).numpy()[:, 0], reference.predict(x.numpy()), atol=1e-5)


def test_adamw_keeps_rows_to_stop_on_and_returns_the_best_weights():
    x, y = numbers(60, noise=2.0)
    asked = []

    def splits(count):
        asked.append(count)
        return thirds(60)(1)

    config = TrainConfig(solver="adamw", penalty=0.0, batch_size=8, learning_rate=0.1)
    model, records, choices = fit_selected(lambda rows: model_of(MLP), (x, y), config, splits=splits)
    assert asked == [1]
    assert choices == []
    held = torch.arange(0, 60, 5)
    best = min(r.validation_loss for r in records)
    assert records[-1].validation_loss > best
    assert float(row_losses(predict(model, x[held]), y[held], "mse").mean()) == best


@pytest.mark.parametrize(("rows", "parts"), [(5_000, 3), (5_001, 1)])
def test_large_data_are_not_cross_validated(rows, parts):
    x, y = numbers(rows)
    asked = []

    def splits(count):
        asked.append(count)
        return thirds(rows)(count)

    fit_selected(lambda rows: model_of(), (x, y), TrainConfig(penalty=0.1, epochs=2), splits=splits)
    assert asked == [parts]


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    inside = []
    try:
        torch.set_num_threads(2)
        for limit in (2**20, 10):
            engine.SMALL_ELEMENTS = limit
            config = TrainConfig(penalty=0.1, epochs=1)
            splits = thirds(30)
            fit_selected(
                lambda rows: model_of(),
                numbers(30),
                config,
                splits=splits,
                progress=lambda _: inside.append(torch.get_num_threads()),
            )
            assert torch.get_num_threads() == 2
    finally:
        engine.SMALL_ELEMENTS = 2**20
        torch.set_num_threads(before)
    assert set(inside[: len(inside) // 2]) == {1}
    assert set(inside[len(inside) // 2 :]) == {2}


def test_kept_features_change_nothing(monkeypatch):
    found = []
    for limit in (engine.LARGEST_KEPT, 0):
        monkeypatch.setattr(engine, "LARGEST_KEPT", limit)
        model = model_of(kp.rpn([3, 1], kp.BSpline(), bias=True))
        assert (engine._fixed_features(model, numbers()[0]) is None) == (limit == 0)
        fit(model, numbers(), TrainConfig(penalty=0.01))
        found.append(predict(model, numbers()[0]))
    assert torch.allclose(*found, atol=1e-6)
