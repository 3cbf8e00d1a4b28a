"""Training on tensors: early stopping, penalties and their choice, randomness, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import kapsi as kp
from kapsi.errors import KapsiError, SpecError
from kapsi.modules import scale_last_layer
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit, train
from kapsi.training.prediction import predict
from kapsi.training.solvers import lbfgs
from training_options import nested

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


def test_predict_goes_in_batches_and_in_evaluation_mode():
    model = kp.Model(kp.rpn([3, 2], before="dropout"), seed=0, dtype=torch.float64).train()
    x = numbers(10)[0]
    whole = predict(model, x)
    assert whole.shape == (10, 2)
    assert torch.equal(whole, model.eval()(x))
    assert torch.allclose(predict(model, x, batch_size=3), whole, rtol=1e-12, atol=0)
    assert not whole.requires_grad


# ------------------------------------------------------------------------------------------------ what is minimized


@pytest.mark.parametrize("penalty", [0.01, 1.0, 30.0])
def test_a_penalized_linear_model_is_ridge_regression(penalty):
    x, y = numbers()
    model = model_of()
    fit(model, (x, y), TrainConfig(solver="lbfgs", l2=penalty))
    # mean squared error + λ‖w‖²/2 is scikit-learn's objective divided by the rows, with alpha = λ·rows/2.
    reference = Ridge(alpha=penalty * len(x) / 2).fit(x.numpy(), y.numpy())
    head = model.layers[0].heads[0]
    np.testing.assert_allclose(head.psi["matrix"].detach().numpy()[0], reference.coef_, rtol=1e-5, atol=1e-7)
    assert float(head.bias.detach()) == pytest.approx(reference.intercept_, rel=1e-5)


def test_adamw_goes_to_the_same_minimum():
    x, y = numbers()
    model = model_of()
    fit(model, (x, y), TrainConfig(solver=kp.AdamW(learning_rate=0.05, batch_size=80), l2=1.0, epochs=300))
    reference = Ridge(alpha=len(x) / 2).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(predict(model, x).numpy()[:, 0], reference.predict(x.numpy()), atol=1e-3)


def test_a_penalized_linear_classifier_is_logistic_regression():
    x, y = labels()
    model = model_of(kp.rpn([3, 3], bias=True))
    fit(model, (x, y), TrainConfig(l2=0.1))
    reference = LogisticRegression(C=1 / (0.1 * len(x)), tol=1e-8, max_iter=1000).fit(x.numpy(), y.numpy())
    found = predict(model, x).softmax(-1).numpy()
    np.testing.assert_allclose(found, reference.predict_proba(x.numpy()), atol=1e-4)


def test_the_remainder_is_held_down_a_hundredth_as_much_and_biases_not_at_all():
    x, y = numbers()
    spec = kp.rpn([3, 1], kp.Chebyshev(1), remainder=kp.LinearRemainder(bias=True))
    model = model_of(spec)
    fit(model, (x, y), TrainConfig(solver="lbfgs", l2=2.0, epochs=2000))
    # The columns appear twice, with weights that are penalized by λ and λ/100.
    scaled = torch.cat([x, x * 10], 1).numpy()
    reference = Ridge(alpha=2.0 * len(x) / 2).fit(scaled, y.numpy())
    np.testing.assert_allclose(predict(model, x).numpy()[:, 0], reference.predict(scaled), atol=1e-5)


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

    config = TrainConfig(**nested(solver=solver, l2=0.0, patience=7, learning_rate=0.05, batch_size=8))
    records = fit(scale_last_layer(model), (x, y), config, validation=held, callbacks=watch)
    assert records == seen
    assert [r.number for r in records] == list(range(1, len(records) + 1))
    losses = [r.validation_loss for r in records]
    best = int(np.argmin(losses))
    assert len(records) == best + 1 + 7 < config.epochs
    assert [r.best for r in records] == [loss < min([math.inf, *losses[:i]]) for i, loss in enumerate(losses)]
    assert same(state(model), states[best])
    assert not same(state(model), states[-1])
    assert float((predict(model, held[0])[:, 0] - held[1]).square().mean()) == pytest.approx(losses[best], rel=1e-12)
    assert not model.training


def test_without_held_out_rows_the_last_epoch_stays():
    model, states = model_of(), []
    config = TrainConfig(solver=kp.AdamW(batch_size=20), epochs=4)
    records = fit(model, numbers(), config, callbacks=lambda _: states.append(state(model)))
    assert [r.validation_loss for r in records] == [None] * 4
    assert same(state(model), states[-1])
    assert not same(state(model), states[-2])


def test_lbfgs_ends_when_it_has_converged():
    records = fit(model_of(), numbers(), TrainConfig(solver="lbfgs", l2=0.1))
    assert 2 <= len(records) < 20
    assert records[-1].loss <= records[0].loss


@pytest.mark.filterwarnings("ignore::kapsi.ScaleWarning")
def test_a_loss_that_is_not_finite_is_an_error_and_the_best_weights_stay():
    x, y = (tensor.float() for tensor in numbers(200))
    model, states = kp.Model(kp.rpn([3, 1], kp.Taylor(4)), seed=0), []
    config = TrainConfig(solver=kp.AdamW(learning_rate=1e6, batch_size=8), l2=1e6)
    with pytest.raises(KapsiError, match=r"training stopped in epoch \d+: step \d+: .*not finite.*lower learning_rate"):
        fit(
            model, (x * 1e4, y), config, validation=(x, y), callbacks=lambda epoch: states.append((epoch, state(model)))
        )
    best = [weights for epoch, weights in states if epoch.best]
    assert same(state(model), best[-1] if best else state(model))
    with pytest.raises(KapsiError, match="training stopped in epoch 1:"):
        fit(model_of(), (x.double() * 1e200, y.double()), solver="lbfgs")


def test_train_yields_the_epochs_one_by_one():
    model = model_of()
    steps = train(model, numbers(), TrainConfig(solver="adamw", epochs=3), validation=numbers(seed=1))
    before = state(model)
    first = next(steps)
    assert first.number == 1
    assert first.best
    after = state(model)
    assert not same(before, after)
    assert [epoch.number for epoch in steps] == [2, 3]


# ------------------------------------------------------------------------------------------------ randomness

DROPOUT = kp.rpn([3, 6, 1], before=("dropout",), bias=True)
DROP_CONNECT = kp.rpn([3, 6, 1], reconciliation=kp.DropConnect(0.8), bias=True)


@pytest.mark.parametrize("solver", ["adamw", "lbfgs"])
@pytest.mark.parametrize("spec", [MLP, DROPOUT, DROP_CONNECT], ids=["mlp", "dropout", "drop_connect"])
def test_nothing_global_is_drawn_and_equal_seeds_are_equal(solver, spec):
    torch.manual_seed(11)
    np.random.seed(11)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    config = TrainConfig(**nested(solver=solver, epochs=4, batch_size=16, l2=0.01, seed=3))
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
    fit(model, (x, y), TrainConfig(solver=kp.AdamW(batch_size=8, learning_rate=1e-12), epochs=3))
    zeros = {tuple((gradient == 0).flatten().tolist()) + tuple(gradient.flatten().tolist()) for gradient in gradients}
    assert len(gradients) == len(zeros) == 6


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("option", "a", "b", "others"),
    [
        ("solver", "lbfgs", "adamw", {}),
        ("solver", "sgd", "adamw", {}),
        ("epochs", 2, 3, {"solver": "adamw"}),
        ("epochs", 4, 5, {"solver": "lbfgs"}),
        ("batch_size", 8, 16, {"solver": "adamw"}),
        ("batch_size", 8, None, {"solver": "adamw"}),
        ("learning_rate", 0.01, 0.02, {"solver": "adamw"}),
        ("schedule", "cosine", "constant", {"solver": "adamw"}),
        ("schedule", "cosine", "one_cycle", {"solver": "adamw"}),
        ("schedule", "constant", "exponential", {"solver": "adamw"}),
        ("gamma", 0.5, 0.9, {"solver": "adamw", "schedule": "exponential"}),
        ("momentum", 0.5, 0.9, {"solver": "sgd"}),
        ("max_grad_norm", None, 0.1, {"solver": "sgd"}),
        ("ema_decay", None, 0.9, {"solver": "adamw"}),
        ("ema_decay", 0.5, 0.9, {"solver": "adamw", "epochs": 6}),
        ("loss", "mse", "huber", {"solver": "adamw"}),
        ("delta", 1.0, 0.1, {"solver": "adamw", "loss": "huber"}),
        ("l2", 0.0, 0.1, {"solver": "adamw"}),
        ("l2", 0.0, 0.1, {"solver": "lbfgs"}),
        ("l1", 0.0, 0.1, {"solver": "adamw"}),
        ("tolerance", 1e-9, 0.5, {"solver": "lbfgs", "epochs": 30}),
        ("patience", 2, 40, {"solver": "adamw", "learning_rate": 0.05, "epochs": 100}),
        ("seed", 0, 1, {"solver": "adamw"}),
    ],
)
def test_each_option_changes_the_result(option, a, b, others):
    found = []
    for value in (a, b):
        model = model_of(kp.rpn([3, 8, 1], kp.Taylor(3), bias=True, output="tanh"))
        config = TrainConfig(**nested(**{"epochs": 3, "batch_size": 16, **others, option: value}))
        held = numbers(40, noise=2.0, seed=9) if option == "patience" else None
        fit(model, numbers(noise=2.0), config, validation=held)
        found.append(state(model))
    assert not same(*found)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_is_nearly_the_same(precision):
    x, y = (tensor.float() for tensor in numbers())
    found = []
    for kind in ("full", precision):
        model = kp.Model(MLP, seed=0)
        fit(model, (x, y), solver=kp.AdamW(batch_size=16, precision=kind), epochs=60, l2=0.01)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        found.append(predict(model, x))
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.1, atol=0.1)
    with pytest.raises(SpecError, match=f"precision {precision} is for models in float32"):
        fit(model_of(), numbers(), solver=kp.AdamW(precision=precision))


def test_parts_of_a_batch_are_the_batch():
    found = []
    for accumulate in (1, 3, 16):
        model = model_of(MLP)
        fit(model, numbers(), TrainConfig(solver=kp.SGD(batch_size=16, gradient_accumulation=accumulate), epochs=3))
        found.append(predict(model, numbers()[0]))
    for other in found[1:]:
        assert torch.allclose(found[0], other, rtol=1e-12)


def test_the_learning_rate_follows_its_schedule():
    x, y = numbers(80)
    for schedule, wanted in (
        ("constant", lambda step: 0.1),
        ("cosine", lambda step: 0.1 * 0.5 * (1 + math.cos(math.pi * step / 50))),
        ("exponential", lambda step: 0.1 * 0.5 ** (step // 5)),
    ):
        options = {"batch_size": 16, "learning_rate": 0.1, "schedule": schedule, "max_grad_norm": 1e-6}
        config = TrainConfig(
            solver=kp.SGD(**options, **({"gamma": 0.5} if schedule == "exponential" else {})), epochs=10
        )
        records = fit(model_of(), (x, y), config)
        assert [r.learning_rate for r in records] == pytest.approx([wanted(5 * i + 4) for i in range(10)])
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50, cycle_momentum=False)
    rates = []
    for step in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < 49:
            reference.step()
    config = TrainConfig(
        solver=kp.SGD(batch_size=16, learning_rate=0.1, schedule="one_cycle", max_grad_norm=1e-6), epochs=10
    )
    records = fit(model_of(), (x, y), config)
    assert [r.learning_rate for r in records] == pytest.approx(rates[4::5])


def test_a_step_of_clipped_descent_by_hand():
    x, y = numbers(30)
    model, reference = model_of(MLP), model_of(MLP)
    fit(model, (x, y), solver=kp.SGD(momentum=0.0, batch_size=None, learning_rate=0.5, max_grad_norm=0.01), epochs=1)
    (reference(x)[:, 0] - y).square().mean().backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    assert norm > 0.01
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.5 * 0.01 / norm * q.grad, rtol=1e-9, atol=1e-12)


def test_averaged_weights_are_judged_and_kept():
    x, y = numbers(80)
    held = numbers(40, seed=3)
    raw, averaged = [], []
    for averaging, found in ((None, raw), (0.8, averaged)):
        model = model_of(MLP)
        config = TrainConfig(solver=kp.AdamW(batch_size=None, ema_decay=averaging, learning_rate=0.05), epochs=5)
        for epoch in train(model, (x, y), config, validation=held):
            found.append((state(model), epoch.validation_loss))
            assert epoch.validation_loss == pytest.approx(
                float((predict(model, held[0])[:, 0] - held[1]).square().mean())
            )
    mean = state(model_of(MLP))
    for step, ((weights, _), (kept, _)) in enumerate(zip(raw, averaged, strict=True), 1):
        decay = min(0.8, step / (9 + step))
        mean = {name: decay * mean[name] + (1 - decay) * weights[name] for name in mean}
        for name in mean:
            torch.testing.assert_close(kept[name], mean[name], rtol=1e-12, atol=1e-14)


def test_a_weight_of_two_is_a_row_twice():
    x, y = numbers(30)
    weight = torch.ones(30, dtype=torch.float64)
    weight[:7] = 2
    twice = torch.cat([x, x[:7]]), torch.cat([y, y[:7]])
    for solver in ("lbfgs", "ridge", "levenberg_marquardt"):
        a, b = model_of(), model_of()
        config = TrainConfig(solver=solver, l2=0.1)
        fit(a, (x, y, weight * 3), config)  # only shares count
        fit(b, twice, config)
        torch.testing.assert_close(predict(a, x), predict(b, x), rtol=1e-5, atol=1e-6)


def test_class_weights_are_weights_of_rows():
    x, y = labels()
    counts = torch.bincount(y)
    balanced, given, weighted = (model_of(kp.rpn([3, 3], bias=True)) for _ in range(3))
    config = TrainConfig(solver="lbfgs", l2=0.1)
    fit(balanced, (x, y), config, class_weights="balanced")
    fit(given, (x, y), config, class_weights=(1 / counts).tolist())
    fit(weighted, (x, y, (1 / counts)[y].double()), config)
    reference = LogisticRegression(C=1 / (0.1 * len(x)), tol=1e-9, class_weight="balanced").fit(x.numpy(), y.numpy())
    for model in (balanced, given, weighted):
        found = kp.predict_proba(model, x).numpy()
        np.testing.assert_allclose(found, reference.predict_proba(x.numpy()), atol=1e-4)


def test_a_compiled_model_trains_as_it_is():
    found = []
    for compiled in (False, True):
        torch._dynamo.config.suppress_errors = False
        model = model_of(MLP)
        fit(model, numbers(32), solver=kp.AdamW(batch_size=32, compile=compiled), epochs=2)
        found.append(predict(model, numbers()[0]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"solver": {"kind": "lbfgs", "max_grad_norm": 1.0}},
            "LBFGS has no option 'max_grad_norm'; it has tolerance, compile",
        ),
        ({"solver": {"kind": "ridge", "ema_decay": 0.9}}, "Ridge has no option 'ema_decay'"),
        ({"solver": {"kind": "ridge", "compile": True}}, "Ridge has no option 'compile'"),
        ({"solver": {"kind": "adamw", "restarts": 2}}, "AdamW has no option 'restarts'"),
        (
            {"label_smoothing": 0.1},
            r"is an option of the loss cross_entropy: loss=kp.CrossEntropy\(label_smoothing=0.0\)",
        ),
        ({"learning_rate": 0.1}, r"of the solvers adamw and sgd: solver=kp.AdamW\(learning_rate=0.01\)"),
        ({"starts": 8}, r"restarts is an option of the solver levenberg_marquardt: solver=kp.LevenbergMarquardt"),
        ({"penalty": 0.1}, "there is no option 'penalty'; it is called l2 now"),
        ({"stopping": 0.1}, "it is early_stopping_fraction of a TableConfig"),
        ({"patience": 7}, "patience has no effect without validation rows|patience is for kapsi.fit"),
        ({"monitor": "rmse"}, "monitor has no effect without validation rows"),
        ({"solver": {"gamma": 0.5}}, "gamma=0.5.*: is for schedule exponential"),
        ({"epoch": 3}, "there is no option 'epoch'; did you mean 'epochs'"),
        ({"class_weights": "balanced"}, "class"),
        ({"loss": "gaussian"}, "gaussian needs 2 outputs for each target"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        fit(model_of(), numbers(20), **options)
    with pytest.raises(SpecError, match=message):
        train(model_of(), numbers(20), **options)


# ------------------------------------------------------------------------------------------------ the choice of a solver


@pytest.mark.parametrize(
    ("spec", "rows", "options", "solver", "reason"),
    [
        (LINEAR, 80, {}, "ridge", "linear in its parameters"),
        (MLP, 80, {}, "levenberg_marquardt", "80 rows and 41 parameters are few"),
        (kp.rpn([3, 40, 40, 1], output="tanh"), 2000, {}, "lbfgs", "2,000 rows and 1,760 parameters are few"),
        (kp.rpn([3, 8, 1], before=("dropout",)), 80, {}, "adamw", "dropout"),
        (kp.rpn([3, 8, 1], reconciliation=kp.DropConnect()), 80, {}, "adamw", "dropout"),
        (MLP, 80, {"solver": {"max_grad_norm": 1.0}}, "adamw", "requested"),
        (MLP, 80, {"l1": 1.0}, "adamw", "not smooth"),
        (MLP, 80, {"loss": "huber"}, "lbfgs", "few"),
        (kp.rpn([3, 300, 300, 1], output="tanh"), 2000, {}, "adamw", "many"),
    ],
)
def test_auto_picks_by_size_and_loss_and_says_why(spec, rows, options, solver, reason):
    record = next(train(model_of(spec), numbers(rows), epochs=1, **options))
    assert record.solver == solver
    assert reason in record.reason
    requested = next(train(model_of(spec), numbers(rows), epochs=1, **{"solver": solver, **options}))
    assert requested.reason == "requested"


def test_auto_takes_a_solver_that_has_sparse_inputs():
    x, y = numbers()
    model = model_of(kp.rpn([3, 2, 1], kp.Taylor(2), kp.LowRank(1), output="tanh"))
    assert next(train(model, (x.relu().to_sparse_csr(), y))).solver == "lbfgs"


def test_auto_takes_a_quasi_newton_method_for_classes():
    assert next(train(model_of(kp.rpn([3, 4, 3], output="tanh")), labels())).solver == "lbfgs"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinges"}, "no loss is called 'hinges'; did you mean 'hinge'"),
        ({"solver": "adam"}, "no solver is called 'adam'; did you mean 'adamw'.* choose from adamw, lbfgs, levenberg"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 1.5}, "epochs: expected an integer"),
        ({"solver": {"batch_size": 0}}, "batch_size must be at least 1"),
        ({"solver": {"batch_size": 10**30}}, "batch_size must be at most"),
        ({"solver": {"learning_rate": 0.0}}, "learning_rate must be at least"),
        ({"solver": {"learning_rate": math.inf}}, "learning_rate: expected a finite number"),
        ({"l2": -1.0}, "l2 must be at least 0"),
        ({"l2": 1e308}, "l2 must be at most"),
        ({"l2": math.nan}, "l2: expected a finite number"),
        ({"patience": 0}, "patience must be at least 1"),
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
        ((X, Y * math.nan), {}, r"or ignore NaN targets by loss=kp\.MSE\(ignore_missing=True\)"),
        ((X, Y), {"loss": "cross_entropy"}, "cross_entropy needs integer class labels"),
        ((X, Y.long()[:, None]), {}, r"the model has 1; for one output use loss bernoulli \(targets 0 and 1\) or mse"),
    ],
)
def test_data_that_do_not_fit_are_refused(data, config, message):
    model = model_of()
    before = state(model)
    with pytest.raises(KapsiError, match=message):
        fit(model, data, TrainConfig(**config))
    assert same(state(model), before)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(SpecError, match="no trained parameters"):
        fit(kp.Model(kp.rpn([3, 1], reconciliation=kp.ConstantReconciliation())), (X.float(), Y.float()))
    frozen = model_of()
    frozen.freeze("*")
    with pytest.raises(SpecError, match="no trained parameters"):
        fit(frozen, (X, Y))


def test_frozen_parameters_stay_and_are_not_held_down():
    x, y = numbers()
    model = model_of(kp.rpn([3, 1], remainder=kp.LinearRemainder(), bias=True))
    model.freeze("*psi*")
    before = state(model)
    fit(model, (x, y), TrainConfig(solver="lbfgs", l2=1.0))
    frozen = [name for name in before if "psi" in name]
    assert frozen
    assert all(torch.equal(before[name], model.state_dict()[name]) == (name in frozen) for name in before)


def test_kept_features_change_nothing(monkeypatch):
    found = []
    for limit in (lbfgs.MAX_KEPT, 0):
        monkeypatch.setattr(lbfgs, "MAX_KEPT", limit)
        model = model_of(kp.rpn([3, 1], kp.BSpline(), bias=True))
        assert (lbfgs.fixed_features(model, numbers()[0]) is None) == (limit == 0)
        fit(model, numbers(), TrainConfig(solver="lbfgs", l2=0.01, epochs=10))
        found.append(predict(model, numbers()[0]))
    assert torch.allclose(*found, atol=1e-6)
