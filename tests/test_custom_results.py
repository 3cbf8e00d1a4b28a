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
from kapsi.training.solvers import MiniBatch
from kapsi.weights import DenseWeights

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X[:, :1].sin() + 0.3 * X[:, 1:2]
ONES = (X[:, :2] > 0).double()
CLASSES = (X[:, 0] > 0).long()
WEIGHT = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


def model(outputs=1):
    return kp.Model(kp.rpn([3, 4, outputs], bias=True, output="tanh"), seed=0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _registry_as_before():
    before = {role: dict(ROLES[role]) for role in ("loss", "metric", "solver", "reconciliation")}
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


def test_a_mean_of_another_shape_is_refused():
    @dataclass(frozen=True)
    class Odd(kp.Loss, name="odd"):
        rows = mean = staticmethod(squares)

    with pytest.raises(kp.SpecError, match=r"loss: odd\.mean must return a scalar; got shape \(50,\)"):
        kp.fit(model(), (X, Y), loss=Odd(), epochs=1)


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
        kp.SpecError, match=f"metrics: {metric} needs one target of zeros and ones, got 2; leave it out"
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


# ------------------------------------------------------------------------------------------------ values that are not finite


def test_ridge_refuses_an_infinite_loss():
    with pytest.raises(kp.KapsiError, match=r"losses of the rows are not finite.*; scale the inputs$"):
        kp.fit(kp.Model(kp.rpn([3, 1]), dtype=torch.float64), (X, Y * 1e200), solver="ridge")


def test_advice_names_options_of_the_solver_and_the_type_of_the_model():
    for solver, advice in (
        ("lbfgs", "in size; scale the inputs$"),
        ("adamw", "lower learning_rate, set max_grad_norm, or"),
    ):
        with pytest.raises(kp.KapsiError, match=advice):
            kp.fit(model(), (X, Y * 1e200), loss="mse", solver=solver)
    half = kp.Model(kp.rpn([3, 1]), seed=0, dtype=torch.float16)
    with pytest.raises(kp.KapsiError, match=r"the model is in torch\.float16, train in torch\.float32$"):
        kp.fit(half, (X.half(), 3000 * Y.half()), loss="mse", solver="adamw")


def test_a_monitored_metric_without_finite_values_is_named():
    held = (X[:9], torch.zeros(9, dtype=torch.int64))
    with pytest.raises(
        kp.KapsiError,
        match="the metric auc of the validation rows was nan after the 3 epochs, and never finite; monitor",
    ):
        kp.fit(model(2), (X, CLASSES), validation=held, metrics="auc", monitor="auc", epochs=3, solver="adamw")


def test_class_weights_name_the_weight_that_does_not_fit():
    with pytest.raises(kp.SpecError, match=r"TrainConfig\.class_weights\[1\]: expected a finite number, got nan"):
        kp.TrainConfig(class_weights=[1, float("nan")])


# ------------------------------------------------------------------------------------------------ definitions


@pytest.mark.parametrize(
    ("base", "name"),
    [(kp.Metric, "loss"), *((kp.Loss, name) for name in ("auto", "kind", "a b", "a.b", "", "Pinball", 3))],
)
def test_names_that_no_function_can_have(base, name):
    with pytest.raises(
        kp.SpecError, match=r"Odd\(name=.*expected names of lower-case letters, digits and _, not auto or kind"
    ):

        class Odd(base, name=name):
            pass


def test_options_that_hide_a_method_are_refused():
    dataclass(frozen=True)(type("Odd", (kp.Loss,), {"__annotations__": {"rows": int}, "rows": 3}, name="odd"))
    with pytest.raises(kp.SpecError, match="Odd: the option rows hides a method of the role loss; rename the field"):
        kp.TrainConfig(loss="odd")


@pytest.mark.parametrize("field", ["name", "kind"])
def test_options_called_name_or_kind_are_refused(field):
    dataclass(frozen=True)(type("Odd", (kp.Loss,), {"__annotations__": {field: str}, field: "a"}, name="odd"))
    with pytest.raises(kp.SpecError, match="Odd: no option may be called name or kind; rename the field"):
        kp.TrainConfig(loss="odd")


def test_a_class_without_dataclass_is_refused_by_name():
    class Odd(kp.Loss, name="odd"):
        def rows(self, output, target):
            return squares(output, target)

    with pytest.raises(kp.SpecError, match=r"Odd: .*write @dataclass\(frozen=True\) above the class"):
        kp.TrainConfig(loss="odd")


# ------------------------------------------------------------------------------------------------ solvers and ψ


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda self, p: None,
            "odd.optimizer must return a torch optimizer whose steps need no closure; got NoneType",
        ),
        (lambda self, p: torch.optim.SGD, "odd.optimizer must return a torch optimizer .*; got type"),
        (lambda self, p: torch.optim.LBFGS(p), "odd.optimizer must return a torch optimizer .*; got LBFGS"),
        (lambda self: None, "odd.optimizer failed: TypeError"),
    ],
)
def test_optimizers_that_do_not_fit(function, message):
    @dataclass(frozen=True)
    class Odd(MiniBatch, name="odd"):
        optimizer = function

    with pytest.raises(kp.SpecError, match=message):
        kp.fit(model(), (X, Y), solver="odd")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, task: None, "odd.start must return a SolverRun, got NoneType"),
        (lambda self: 0, "odd.start failed: Typ"),
    ],
)
def test_solvers_that_do_not_start(function, message):
    @dataclass(frozen=True)
    class Odd(kp.Solver, name="odd"):
        start = function

    with pytest.raises(kp.SpecError, match=message):
        kp.fit(model(), (X, Y), solver="odd")


@pytest.mark.parametrize(
    ("params", "call", "message"),
    [
        (
            {"a": kp.Param((1, 6))},
            lambda p: p["a"],
            r"Head\(6 → 1\): Odd must return Weights of shape \(1, 6\); got Parameter",
        ),
        (
            {"a": kp.Param((2, 6))},
            lambda p: DenseWeights(p["a"]),
            r"Odd must return Weights of shape \(1, 6\); got \(2, 6\)",
        ),
        ({"a": kp.Param((1, 6))}, lambda p: p["b"], r"Head\(6 → 1\): Odd failed: KeyError: .*no tensor 'b'"),
        ({"a": (1, 6)}, lambda p: p["a"], r"Head\(6 → 1\): Odd\.params: expected Param, or mappings .*, got \(1, 6\)"),
        (None, lambda p: p["a"], r"Odd\.params: expected Param, or mappings of names to Param, got None"),
    ],
)
def test_a_reconciliation_that_does_not_fit(params, call, message):
    @dataclass(frozen=True)
    class Odd(kp.Reconciliation, name="odd"):
        def params(self, out_features, factors):
            return params

        def __call__(self, tensors, out_features, factors):
            return call(tensors)

    with pytest.raises(kp.SpecError, match=message):
        kp.Model(kp.rpn([6, 1], reconciliation=Odd(), expansion="identity"))
