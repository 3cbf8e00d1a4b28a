"""Results of losses, metrics and solvers of users that do not fit: refused before the first step, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from sklearn import metrics as reference
from torch.nn import functional as F

import kapsi as kp
from kapsi.function import ROLES

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X[:, :1].sin() + 0.3 * X[:, 1:2]
ONES = (X[:, :2] > 0).double()
CLASSES = (X[:, 0] > 0).long()
WEIGHT = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


def model(outputs=1):
    return kp.Model(kp.rpn([3, 4, outputs], bias=True, output="tanh"), seed=0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _registry_as_before():
    before = {role: dict(ROLES[role]) for role in ("loss", "metric", "solver")}
    yield
    for role, known in before.items():
        ROLES[role].clear()
        ROLES[role].update(known)


def squares(output, target):
    return (output - target.reshape(output.shape)).square().mean(1)


RESULTS = {
    "rows[:3]": (lambda o, t: squares(o, t)[:3], r"one value per row, \(50,\); got shape \(3,\)"),
    "(rows, 1)": (lambda o, t: squares(o, t)[:, None], r"one value per row, \(50,\); got shape \(50, 1\)"),
    "scalar": (lambda o, t: squares(o, t).mean(), r"one value per row, \(50,\); got shape \(\)"),
    "float": (lambda o, t: 1.0, r"one value per row, \(50,\); got float"),
    "None": (lambda o, t: None, r"one value per row, \(50,\); got NoneType"),
    "numpy": (lambda o, t: squares(o, t).detach().numpy(), r"one value per row, \(50,\); got ndarray"),
}
NOT_TRAINED = {
    "integer": (lambda o, t: squares(o, t).long(), r"a tensor of a floating-point type; got torch\.int64"),
    "complex": (lambda o, t: squares(o, t) + 0j, r"a tensor of a floating-point type; got torch\.complex128"),
    "detached": (
        lambda o, t: squares(o, t).detach(),
        "a tensor differentiable in the outputs; got one without a gradient",
    ),
}
CALLS = {
    "signature": (lambda o: o[:, 0], "failed: TypeError"),
    "failure": (lambda o, t: 1 / 0, "failed: ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("solver", ["adamw", "lbfgs"])
@pytest.mark.parametrize(
    ("function", "message"), (RESULTS | NOT_TRAINED | CALLS).values(), ids=[*RESULTS, *NOT_TRAINED, *CALLS]
)
def test_results_of_a_loss_that_do_not_fit(function, message, solver):
    @dataclass(frozen=True)
    class Odd(kp.Loss, name="odd"):
        rows = staticmethod(function)

    end = message if message.startswith("failed") else f"must return {message}"
    with pytest.raises(kp.SpecError, match=rf"loss: odd\.rows {end}"):
        kp.fit(model(), (X, Y), loss=Odd(), solver=solver, epochs=1)


@pytest.mark.parametrize(("function", "message"), (RESULTS | CALLS).values(), ids=[*RESULTS, *CALLS])
def test_results_of_a_metric_that_do_not_fit(function, message):
    @dataclass(frozen=True)
    class Odd(kp.Metric, name="odd"):
        rows = staticmethod(function)

    steps = []
    end = message if message.startswith("failed") else f"must return {message}"
    with pytest.raises(kp.SpecError, match=rf"metrics: odd\.rows {end}"):
        kp.fit(model(), (X, Y), metrics="odd", epochs=1, callbacks=steps.append)
    assert not steps


@pytest.mark.parametrize("function", [lambda: 0, len, lambda o, t: None, lambda o, t: o[:4], lambda o, t: "a"])
def test_plain_callables_that_do_not_fit(function):
    with pytest.raises(
        kp.SpecError, match=r"loss: .* (failed: TypeError|must return one value per row, \(50,\), or their)"
    ):
        kp.fit(model(), (X, Y), loss=function, epochs=1)
    with pytest.raises(kp.SpecError, match=r"metrics: .* (failed: |must return one value per row)"):
        kp.fit(model(), (X, Y), metrics=function, epochs=1)


def test_weights_have_no_effect_on_a_mean():
    for data in ((X, CLASSES, WEIGHT), (X, CLASSES)):
        weights = None if len(data) == 3 else (1.0, 9.0)
        options = {"solver": "adamw", "epochs": 1, "class_weights": weights}
        with pytest.raises(
            kp.SpecError, match=r"loss: cross_entropy must return one value per row.*no effect on a mean"
        ):
            kp.fit(model(2), data, loss=F.cross_entropy, **options)
        by_name, by_call = model(2), model(2)
        kp.fit(by_name, data, loss="cross_entropy", **options)
        kp.fit(by_call, data, loss=partial(F.cross_entropy, reduction="none"), **options)
        torch.testing.assert_close(by_name(X), by_call(X))
    with pytest.raises(kp.SpecError, match=r"metrics: mean must return one value per row.*no effect on a mean"):
        kp.fit(
            model(), (X, Y), validation=(X, Y, WEIGHT), metrics=_named("mean", lambda p, t: (p - t).mean()), epochs=1
        )


def _named(name, function):
    function.__name__ = name
    return function


# ------------------------------------------------------------------------------------------------ metrics of zeros and ones


def test_log_loss_of_several_and_of_soft_targets():
    (several,) = kp.fit(model(2), (X, ONES), loss="bernoulli", metrics="log_loss", epochs=1, solver="lbfgs")
    assert several.metrics["log_loss"] == pytest.approx(several.loss / 2)
    soft = 0.2 + 0.6 * ONES[:, :1]
    (record,) = kp.fit(model(), (X, soft), loss="bernoulli", metrics="log_loss", epochs=1, solver="lbfgs")
    assert record.metrics["log_loss"] == pytest.approx(record.loss)
    hard = model()
    (record,) = kp.fit(hard, (X, ONES[:, :1]), loss="bernoulli", metrics="log_loss", epochs=1, solver="lbfgs")
    assert record.metrics["log_loss"] == pytest.approx(
        reference.log_loss(ONES[:, 0], kp.predict_proba(hard, X, "bernoulli").numpy())
    )


@pytest.mark.parametrize("metric", ["f1", "auc"])
def test_f1_and_auc_are_of_one_target_of_zeros_and_ones(metric):
    with pytest.raises(
        kp.SpecError, match=f"metrics: {metric} takes one target of zeros and ones, got 2; leave it out"
    ):
        kp.fit(model(2), (X, ONES), loss="bernoulli", metrics=metric, epochs=1)
    with pytest.raises(kp.DataError, match=f"metrics: {metric} needs targets 0 or 1, not between"):
        kp.fit(model(), (X, 0.2 + 0.6 * ONES[:, :1]), loss="bernoulli", metrics=metric, epochs=1)


@pytest.mark.parametrize("metric", ["log_loss", "auc"])
def test_metrics_of_probabilities_need_probabilities(metric):
    with pytest.raises(
        kp.SpecError,
        match=f"metrics: {metric} needs the probabilities of bernoulli, cross_entropy, the loss is hinge; leave it out",
    ):
        kp.fit(model(3), (X, CLASSES), loss="hinge", metrics=metric, epochs=1)
