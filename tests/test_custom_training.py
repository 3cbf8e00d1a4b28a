"""Losses, metrics, solvers and callbacks of users; metrics against scikit-learn; early stopping on any metric."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

import kapsi as kp
from kapsi.function import ROLES
from kapsi.training.solvers import MiniBatch

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X[:, :1].sin() + 0.3 * X[:, 1:2]
CLASSES = torch.bucketize(Y[:, 0], torch.tensor([-0.4, 0.4], dtype=torch.float64))


def model(outputs=1, seed=0):
    return kp.Model(kp.rpn([3, 4, outputs], bias=True, output="tanh"), seed=seed, dtype=torch.float64)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.fixture(autouse=True)
def _registry_as_before():
    before = {role: dict(ROLES[role]) for role in ("loss", "metric", "solver")}
    yield
    for role, known in before.items():
        ROLES[role].clear()
        ROLES[role].update(known)


# ------------------------------------------------------------------------------------------------ losses


def pinball_class():
    @dataclass(frozen=True)
    class Pinball(kp.Loss, name="pinball"):
        """Pinball loss.

        Args:
            level: of the quantile.
        """

        level: float = kp.option(0.5, minimum=0.0, maximum=1.0)

        def rows(self, output, target):
            error = target.reshape(output.shape) - output
            return torch.maximum(self.level * error, (self.level - 1) * error).mean(1)

    return Pinball


@pytest.mark.parametrize("solver", ["adamw", "sgd", "lbfgs"])
def test_a_loss_of_a_user_needs_only_rows(solver):
    pinball = pinball_class()
    fitted = model()
    options = {"epochs": 40, "solver": kp.AdamW(learning_rate=0.05) if solver == "adamw" else solver}
    records = kp.fit(fitted, (X, Y), loss=pinball(0.9), **options)
    assert records[-1].loss < records[0].loss
    share = float((fitted(X) >= Y).double().mean())
    assert solver == "sgd" or share > 0.75  # the upper tenth is above the quantile
    other = model()
    kp.fit(other, (X, Y), loss={"kind": "pinball", "level": 0.9}, **options)
    assert same(fitted, other)
    assert kp.from_dict(kp.to_dict(pinball(0.9)), kp.Loss) == pinball(0.9)
    assert torch.equal(kp.predict(fitted, X, "pinball"), kp.predict(fitted, X))


def test_auto_takes_no_solver_that_needs_a_curvature():
    assert kp.fit(model(), (X, Y), loss=pinball_class()(), epochs=1)[-1].solver == "lbfgs"
    for solver in ("ridge", "levenberg_marquardt"):
        with pytest.raises(kp.SpecError, match="pinball has no curvature"):
            kp.fit(kp.Model(kp.rpn([3, 1]), seed=0, dtype=torch.float64), (X, Y), loss="pinball", solver=solver)


@pytest.mark.parametrize(
    "function",
    [
        lambda output, target: (output - target).square().mean(1),
        lambda output, target: (output - target).square().mean(),
        torch.nn.MSELoss(),
    ],
    ids=["rows", "mean", "module"],
)
def test_a_plain_callable_is_a_loss(function):
    one, other = model(), model()
    found = kp.fit(one, (X, Y), loss=function, solver="lbfgs", epochs=3)
    wanted = kp.fit(other, (X, Y), loss="mse", solver="lbfgs", epochs=3)
    assert [r.loss for r in found] == pytest.approx([r.loss for r in wanted])
    torch.testing.assert_close(one(X), other(X))


def test_a_plain_callable_may_be_of_classes():
    one, other = model(3), model(3)
    kp.fit(one, (X, CLASSES), loss=torch.nn.functional.cross_entropy, solver=kp.AdamW(), epochs=3)
    records = kp.fit(other, (X, CLASSES), loss="cross_entropy", solver=kp.AdamW(), epochs=3)
    assert same(one, other)
    assert records[-1].metrics == {}


def test_a_plain_callable_cannot_be_written_and_checkpoints_say_so(tmp_path):
    config = kp.TrainConfig(loss=lambda output, target: (output - target).abs().mean(1), solver="lbfgs", epochs=2)
    with pytest.raises(kp.SpecError, match="<lambda> is a plain callable"):
        kp.to_dict(config)
    said = []
    checkpoints = kp.Checkpoints(tmp_path, steps=1, say=said.append)
    first = kp.fit(model(), (X, Y), config, checkpoints=checkpoints)
    assert "the loss <lambda> is a plain callable" in said[0]
    checkpoints = kp.Checkpoints(tmp_path, steps=1, resume=True, say=said.append)
    assert kp.fit(model(), (X, Y), config, checkpoints=checkpoints) == first


def power(exponent):
    return lambda output, target: (output - target).abs().pow(exponent).mean(1)


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (
            lambda output, target: (output - target).pow(2).mean(1),
            lambda output, target: (output - target).pow(4).mean(1),
        ),
        (power(2), power(4)),
        (
            functools.partial(torch.nn.functional.huber_loss, delta=1),
            functools.partial(torch.nn.functional.huber_loss, delta=5),
        ),
        (torch.nn.HuberLoss(delta=1), torch.nn.HuberLoss(delta=0.1)),
    ],
    ids=["code", "closure", "partial", "module"],
)
def test_a_resumed_run_has_the_same_callable(tmp_path, function, other):
    def fit(loss):
        checkpoints = kp.Checkpoints(tmp_path, resume=True, say=str)
        return kp.fit(model(), (X, Y), loss=loss, solver="lbfgs", epochs=2, checkpoints=checkpoints)

    assert fit(function) == fit(function)
    with pytest.raises(kp.SpecError, match=r"is of another run: loss\.code"):
        fit(other)


def test_a_loss_of_another_shape_is_refused():
    with pytest.raises(kp.SpecError, match=r"must return one value per row, \(50,\), or their mean; got shape \(30,\)"):
        kp.fit(model(), (X, Y), loss=lambda output, target: (output - target)[:30, 0].square(), solver="lbfgs")


# ------------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_those_of_scikit_learn(weighted):
    weight = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) if weighted else None
    share = None if weight is None else weight.numpy()
    held = (X, Y) if weight is None else (X, Y, weight)
    numbers = model()
    names = ["rmse", "mse", "mae", "mape", "median_absolute_error", "r2", "explained_variance"]
    (record,) = kp.fit(numbers, (X, Y), epochs=1, solver="adamw", validation=held, metrics=names)
    output = kp.predict(numbers, X)
    assert list(record.metrics) == names
    assert record.metrics["mae"] == pytest.approx(reference.mean_absolute_error(Y, output, sample_weight=share))
    for name, theirs in (
        ("rmse", reference.root_mean_squared_error),
        ("mse", reference.mean_squared_error),
        ("mape", reference.mean_absolute_percentage_error),
        ("median_absolute_error", reference.median_absolute_error),
        ("r2", reference.r2_score),
        ("explained_variance", reference.explained_variance_score),
    ):
        assert record.metrics[name] == pytest.approx(theirs(Y, output, sample_weight=share)), name
    for outputs in (2, 3):
        y = CLASSES.clamp_max(outputs - 1)
        held = (X, y) if weight is None else (X, y, weight)
        names = ["accuracy", "log_loss", "f1", "auc", "precision", "recall", "balanced_accuracy", "matthews"]
        fitted = model(outputs)
        (record,) = kp.fit(fitted, (X, y), epochs=1, solver="adamw", validation=held, metrics=names)
        p = kp.predict_proba(fitted, X).numpy()
        found = record.metrics
        assert found["accuracy"] == pytest.approx(reference.accuracy_score(y, p.argmax(1), sample_weight=share))
        assert found["log_loss"] == pytest.approx(reference.log_loss(y, p, sample_weight=share))
        average = "binary" if outputs == 2 else "macro"
        for name in ("f1", "precision", "recall"):
            score = getattr(reference, f"{name}_score")
            expected = score(y, p.argmax(1), average=average, sample_weight=share, zero_division=0)
            assert found[name] == pytest.approx(expected), name
        for name, theirs in (
            ("balanced_accuracy", reference.balanced_accuracy_score),
            ("matthews", reference.matthews_corrcoef),
        ):
            assert found[name] == pytest.approx(theirs(y, p.argmax(1), sample_weight=share)), name
        score = p[:, 1] if outputs == 2 else p
        assert found["auc"] == pytest.approx(reference.roc_auc_score(y, score, multi_class="ovr", sample_weight=share))


def test_metrics_of_zeros_and_ones():
    y = (Y > 0).double()
    fitted, names = model(), ["accuracy", "log_loss", "f1", "auc"]
    (record,) = kp.fit(fitted, (X, y), loss="bernoulli", epochs=1, solver="adamw", validation=(X, y), metrics=names)
    p = kp.predict_proba(fitted, X, "bernoulli").numpy()
    truth = y[:, 0].numpy()
    assert record.metrics["accuracy"] == pytest.approx(reference.accuracy_score(truth, p.argmax(1)))
    assert record.metrics["log_loss"] == pytest.approx(reference.log_loss(truth, p))
    assert record.metrics["f1"] == pytest.approx(reference.f1_score(truth, p.argmax(1)))
    assert record.metrics["auc"] == pytest.approx(reference.roc_auc_score(truth, p[:, 1]))


def score_of(metric, prediction, target, weight=None, loss=None):
    """Return a metric of rows in two parts, or at once if parts do not add up."""
    loss = loss or kp.MSE()
    ends = [0, len(prediction)] if metric.gathered else [0, len(prediction) // 3, len(prediction)]
    parts = [
        metric.sums(prediction[a:b], target[a:b], None if weight is None else weight[a:b], loss)
        for a, b in itertools.pairwise(ends)
    ]
    return metric.value(sum(parts).tolist())


def test_a_weight_counts_a_row_that_many_times():
    generator = torch.Generator().manual_seed(2)
    y, f = torch.randn(2, 31, 2, generator=generator, dtype=torch.float64)
    times = torch.randint(0, 4, (31,), generator=generator)
    for metric in (kp.MedianAbsoluteError(), kp.ExplainedVariance(), kp.MAPE(), kp.MeanSquaredError()):
        repeated = score_of(metric, f.repeat_interleave(times, 0), y.repeat_interleave(times, 0))
        assert score_of(metric, f, y, times.double()) == pytest.approx(repeated), metric.name
    many = np.median((f - y).abs().repeat_interleave(times, 0).numpy(), axis=0).mean()
    assert score_of(kp.MedianAbsoluteError(), f, y, times.double()) == pytest.approx(many)
    labels = torch.randint(0, 3, (31,), generator=generator)
    scores, loss = torch.randn(31, 3, generator=generator, dtype=torch.float64), kp.CrossEntropy()
    for metric in (kp.Matthews(), kp.Precision(), kp.Recall(), kp.BalancedAccuracy(), kp.F1()):
        repeated = score_of(metric, scores.repeat_interleave(times, 0), labels.repeat_interleave(times), None, loss)
        assert score_of(metric, scores, labels, times.double(), loss) == pytest.approx(repeated), metric.name


def test_metrics_of_constant_targets_and_single_classes():
    y = torch.full((5, 1), 3.0, dtype=torch.float64)
    wave = torch.tensor([[0.0], [1.0], [0.0], [2.0], [0.0]])
    assert score_of(kp.ExplainedVariance(), y + 1, y) == reference.explained_variance_score(y, y + 1)
    assert score_of(kp.ExplainedVariance(), y + wave, y) == reference.explained_variance_score(y, y + wave)
    zeros = torch.zeros(4, 1, dtype=torch.float64)
    assert score_of(kp.MAPE(), zeros + 1, zeros) == pytest.approx(
        reference.mean_absolute_percentage_error(zeros, zeros + 1)
    )
    labels, loss = torch.tensor([0, 0, 2, 2]), kp.CrossEntropy()
    scores = torch.eye(3, dtype=torch.float64)[torch.tensor([0, 2, 2, 2])]
    assert score_of(kp.Matthews(), scores, labels, None, loss) == pytest.approx(
        reference.matthews_corrcoef(labels, [0, 2, 2, 2])
    )
    assert score_of(kp.BalancedAccuracy(), scores, labels, None, loss) == pytest.approx(0.75)  # of classes with rows
    assert score_of(kp.Matthews(), scores[1:], labels[1:], None, loss) == 0  # always predicts the same class


def test_requested_metrics_are_of_the_training_rows_without_validation():
    fitted = model()
    (record,) = kp.fit(fitted, (X, Y), epochs=1, solver="adamw", metrics=kp.MAE())
    assert record.metrics == {"mae": pytest.approx(float((fitted(X).detach() - Y).abs().mean()))}


def test_a_plain_callable_and_a_class_are_metrics():
    @dataclass(frozen=True)
    class Within(kp.Metric, name="within"):
        tolerance: float = 0.5
        greater_is_better = True

        def rows(self, prediction, target):
            return ((prediction - target).abs() <= self.tolerance).double().mean(1)

    def largest(prediction, target):
        return (prediction - target).abs().max()

    fitted = model()
    (record,) = kp.fit(
        fitted, (X, Y), epochs=1, solver="adamw", validation=(X, Y), metrics=[{"kind": "within"}, largest]
    )
    error = (fitted(X).detach() - Y).abs()
    assert record.metrics["within"] == pytest.approx(float((error <= 0.5).double().mean()))
    assert record.metrics["largest"] == pytest.approx(float(error.max()))


@pytest.mark.parametrize("monitor", ["accuracy", "log_loss"])
def test_early_stopping_follows_any_metric(monitor):
    held = (X[:30], CLASSES[:30])
    seen = []
    fitted = model(3)
    records = kp.fit(
        fitted,
        (X[30:], CLASSES[30:]),
        solver=kp.AdamW(learning_rate=0.1, batch_size=8),
        epochs=60,
        patience=4,
        validation=held,
        metrics=["accuracy", "log_loss"],
        monitor=monitor,
        callbacks=lambda record: seen.append({k: v.clone() for k, v in fitted.state_dict().items()}),
    )
    values = [record.metrics[monitor] * (-1 if monitor == "accuracy" else 1) for record in records]
    best = int(np.argmin(values))
    assert len(records) == best + 5
    assert records[-1].ended == f"the validation {monitor} was no better for 4 epochs"
    assert [r.best for r in records] == [value < min([np.inf, *values[:i]]) for i, value in enumerate(values)]
    assert all(torch.equal(tensor, seen[best][name]) for name, tensor in fitted.state_dict().items())


def test_metrics_that_do_not_fit_are_refused():
    def fraction(prediction, target):
        return (prediction > target).double().mean()

    for options, message in (
        ({"metrics": "accuracy"}, "metrics: accuracy scores classes, and the loss mse predicts real values"),
        ({"metrics": "rmsee"}, "no metric is called 'rmsee'; did you mean 'rmse'"),
        ({"metrics": ["mae", "mae"]}, "each metric may appear once"),
        ({"monitor": "mae"}, "monitor 'mae' is not a metric of this run; use loss, rmse, r2, or add it"),
        ({"metrics": fraction, "monitor": "fraction"}, "set its attribute greater_is_better to True or False"),
    ):
        with pytest.raises(kp.SpecError, match=message):
            kp.fit(model(), (X, Y), validation=0.2, **options)
    fraction.greater_is_better = True
    assert kp.fit(model(), (X, Y), validation=0.2, metrics=fraction, monitor="fraction", epochs=2)


# ------------------------------------------------------------------------------------------------ solvers


def test_a_solver_with_an_optimizer_of_torch_is_one_method():
    @dataclass(frozen=True)
    class Adagrad(MiniBatch, name="adagrad"):
        decay: float = kp.option(0.0, minimum=0.0)

        def optimizer(self, parameters):
            return torch.optim.Adagrad(parameters, lr=self.learning_rate, lr_decay=self.decay)

    fitted, by_hand = model(), model()
    options = {"kind": "adagrad", "learning_rate": 0.1, "schedule": "constant", "batch_size": None}
    records = kp.fit(fitted, (X, Y), loss="mse", solver=options, epochs=3)
    assert {r.solver for r in records} == {"adagrad"}
    optimizer = torch.optim.Adagrad(by_hand.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (by_hand(X) - Y).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(fitted(X), by_hand(X), rtol=1e-10, atol=1e-12)
    with pytest.raises(kp.SpecError, match="decay is an option of the solver adagrad: solver=Adagrad"):
        kp.fit(model(), (X, Y), decay=0.1)


# ------------------------------------------------------------------------------------------------ callbacks


@dataclass
class Recorder(kp.Callback):
    stop_step: int | None = None
    stop_epoch: int | None = None
    steps: list = field(default_factory=list)
    epochs: list = field(default_factory=list)
    ended: list = field(default_factory=list)

    def on_step(self, record):
        self.steps.append(record)
        return len(self.steps) == self.stop_step

    def on_epoch(self, record):
        self.epochs.append(record)
        return record.number == self.stop_epoch

    def on_end(self, records):
        self.ended.append(records)


def test_callbacks_receive_records():
    recorder, plain = Recorder(), []
    records = kp.fit(
        model(), (X, Y), solver=kp.AdamW(batch_size=20), epochs=2, loss="mse", callbacks=[recorder, plain.append]
    )
    assert recorder.epochs == plain == records
    assert recorder.ended == [records]
    assert [(s.epoch, s.step, s.steps) for s in recorder.steps] == [(e, s, 3) for e in (1, 2) for s in (1, 2, 3)]
    assert np.mean([s.loss for s in recorder.steps[:3]]) == pytest.approx(records[0].loss)
    assert all(a.seconds <= b.seconds for a, b in zip(recorder.steps, recorder.steps[1:], strict=False))


@pytest.mark.parametrize("train", [kp.fit, lambda *args, **options: list(kp.train(*args, **options))])
def test_a_true_value_after_an_epoch_stops_training(train):
    recorder = Recorder(stop_epoch=2)
    fitted, other = model(), model()
    options = {"solver": kp.AdamW(schedule="constant"), "loss": "mse"}
    records = train(fitted, (X, Y), epochs=9, callbacks=recorder, **options)
    assert [r.ended for r in records] == [None, "stopped by a callback"]
    assert recorder.ended == [records]
    train(other, (X, Y), epochs=2, **options)
    assert same(fitted, other)


def test_a_true_value_after_a_step_ends_the_epoch_there():
    recorder = Recorder(stop_step=5)
    records = kp.fit(model(), (X, Y), solver=kp.AdamW(batch_size=20), epochs=9, callbacks=recorder)
    assert [r.number for r in records] == [1, 2]
    assert records[-1].ended == "stopped by a callback during the epoch"
    assert len(recorder.steps) == 5


def test_a_run_stopped_by_a_callback_continues_without_it_or_with_more_epochs(tmp_path):
    said, solver = [], kp.AdamW(schedule="constant")

    def fit(fitted, epochs=9, callbacks=(), resume=True):
        checkpoints = kp.Checkpoints(tmp_path, resume=resume, say=said.append)
        return kp.fit(
            fitted, (X, Y), loss="mse", solver=solver, epochs=epochs, callbacks=callbacks, checkpoints=checkpoints
        )

    first = fit(model(), callbacks=Recorder(stop_epoch=3), resume=False)
    recorder = Recorder(stop_epoch=3)
    assert fit(model(), callbacks=recorder) == first
    assert recorder.epochs == recorder.ended == []
    assert said == ["the run ended in epoch 3: stopped by a callback; to continue, leave callbacks out or raise epochs"]
    recorder = Recorder(stop_epoch=5)
    assert [r.number for r in fit(model(), 10, recorder)] == [1, 2, 3, 4, 5]
    assert [r.number for r in recorder.epochs] == [4, 5]
    fitted, whole = model(), model()
    assert [r.ended for r in fit(fitted)] == [None] * 8 + ["all epochs are over"]
    kp.fit(whole, (X, Y), loss="mse", solver=solver, epochs=9)
    assert same(fitted, whole)


@pytest.mark.parametrize("kind", [kp.JsonLines, kp.CsvLog])
def test_logs_continue_in_a_resumed_run(tmp_path, kind):
    for epochs in (3, 5):
        checkpoints = kp.Checkpoints(tmp_path / "run", resume=True)
        with kind(tmp_path / "log") as log:
            kp.fit(model(), (X, Y), solver="lbfgs", epochs=epochs, callbacks=log, checkpoints=checkpoints)
    numbers = [line.strip('{"number: ').split(",")[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert numbers[-5:] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("callback", [3, "log.csv", kp.CsvLog, [print, None]])
def test_what_is_no_callback_is_refused(callback):
    with pytest.raises(kp.SpecError, match=r"callbacks: expected a callable such as kapsi\.CsvLog"):
        kp.fit(model(), (X, Y), callbacks=callback)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: 1, "<lambda> must accept one argument, the record of on_epoch"),
        (lambda record: np.array([1, 2]), "<lambda> must return a true value to stop training or None, got ndarray"),
        (lambda record: torch.ones(2), "<lambda> must return a true value to stop training or None, got Tensor"),
        (Recorder, r"got the class Recorder; call it: Recorder\(\)"),
    ],
)
def test_a_callback_with_a_wrong_signature_or_result_is_refused(callback, message):
    with pytest.raises(kp.SpecError, match=f"callbacks: .*{message}"):
        kp.fit(model(), (X, Y), solver="lbfgs", epochs=1, callbacks=callback)


def test_callbacks_may_be_none():
    assert kp.fit(model(), (X, Y), solver="lbfgs", epochs=1, callbacks=None)


# ------------------------------------------------------------------------------------------------ configurations


@pytest.mark.parametrize(
    ("data", "solver"),
    [
        ({"kind": "auto"}, "auto"),
        ({"kind": "auto", "learning_rate": 0.01}, kp.AdamW(learning_rate=0.01)),
        ({"learning_rate": 0.01}, kp.AdamW(learning_rate=0.01)),
        ({"kind": "lbfgs"}, kp.LBFGS()),
        ("ridge", kp.Ridge()),
    ],
)
def test_solvers_are_read_from_names_and_mappings(data, solver):
    config = kp.from_dict({"solver": data}, kp.TrainConfig)
    assert config.solver == solver
    assert kp.from_dict(kp.to_dict(config), kp.TrainConfig) == config


@pytest.mark.parametrize("offset", [0.0, 1e6, 1.7e9, 1e12])
def test_shares_of_variance_far_from_zero(offset):
    generator = torch.Generator().manual_seed(3)
    y, error = torch.randn(2, 200, 2, generator=generator, dtype=torch.float64)
    y, share = y * 60 + torch.tensor([offset, 0.0]), torch.rand(200, generator=generator, dtype=torch.float64)
    f = y + 3 * error + 1
    for weight in (None, share):
        w = None if weight is None else weight.numpy()
        for metric, theirs in (
            (kp.R2(), reference.r2_score),
            (kp.ExplainedVariance(), reference.explained_variance_score),
        ):
            wanted = theirs(y.numpy(), f.numpy(), sample_weight=w, multioutput="variance_weighted")
            assert score_of(metric, f, y, weight) == pytest.approx(wanted, rel=1e-9), metric.name
