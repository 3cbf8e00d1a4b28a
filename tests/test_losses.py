"""Losses by name: their values, derivatives, curvature, decisions and probabilities, against torch, scikit-learn and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn import metrics
from torch.nn import functional as F

import kapsi as kp
from kapsi.training.metrics import default_metrics

ROWS = 40
LOSSES = (
    "mse",
    "huber",
    "cross_entropy",
    "hinge",
    "squared_hinge",
    "gaussian",
    "bernoulli",
    "poisson",
    "gamma",
    "tweedie",
    "quantile",
)


def make_loss(name) -> kp.Loss:
    return kp.from_dict(name, kp.Loss)


def metrics_of(kind, *parts):
    """Return the metrics of rows in parts `(output, target, weight)`, at once where parts do not add up."""
    whole = [tuple(None if piece[0] is None else torch.cat(piece) for piece in zip(*parts, strict=True))]
    sums = [
        [metric.sums(*part, kind) for part in (whole if metric.gathered else parts)] for metric in default_metrics(kind)
    ]
    return {
        metric.name: metric.value(sum(each).tolist()) for metric, each in zip(default_metrics(kind), sums, strict=True)
    }


def outputs(n, rows=ROWS, seed=0):
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def classes(n, rows=ROWS):
    return torch.randint(0, n, (rows,), generator=torch.Generator().manual_seed(1))


def targets(name, n):
    kind = make_loss(name)
    if kind.classes:
        return classes(max(2, n))
    if name == "bernoulli":
        return (outputs(n, seed=2) > 0).double()
    values = outputs(kind.targets(n), seed=2)
    return values.exp() if kind.log_link else values


CASES = [
    (name, n)
    for name in LOSSES
    for n in (1, 2, 4)
    if not (name == "cross_entropy" and n == 1) and not (name == "gaussian" and n == 1)
]


def test_squares_and_huber_are_those_of_torch():
    f, y = outputs(3), outputs(3, seed=2)
    assert float(kp.MSE().rows(f, y).mean()) == pytest.approx(float(F.mse_loss(f, y)))
    assert float(kp.MSE().rows(f, y).mean()) == pytest.approx(metrics.mean_squared_error(y, f))
    assert float(kp.Huber(0.7).rows(f, y).mean()) == pytest.approx(float(F.huber_loss(f, y, delta=0.7)))
    one = kp.MSE().rows(f[:, :1], y[:, 0])
    assert one.tolist() == pytest.approx((f[:, 0] - y[:, 0]).square().tolist())


def test_cross_entropy_is_that_of_torch_and_scikit_learn():
    f, y = outputs(4), classes(4)
    found = float(kp.CrossEntropy().rows(f, y).mean())
    assert found == pytest.approx(metrics.log_loss(y, f.softmax(1)))
    smooth = kp.CrossEntropy(0.1).rows(f, y)
    assert float(smooth.mean()) == pytest.approx(float(F.cross_entropy(f, y, label_smoothing=0.1)))
    wanted = F.one_hot(y, 4) * 0.9 + 0.1 / 4
    assert smooth.tolist() == pytest.approx((-(wanted * f.log_softmax(1)).sum(1)).tolist())


def test_hinges_are_those_of_scikit_learn():
    f, y = outputs(1), classes(2)
    assert float(kp.Hinge().rows(f, y).mean()) == pytest.approx(metrics.hinge_loss(y, f[:, 0]))
    squared = np.maximum(0, 1 - (2 * y.numpy() - 1) * f[:, 0].numpy()) ** 2
    assert kp.SquaredHinge().rows(f, y).tolist() == pytest.approx(squared.tolist())
    f, y = outputs(4), classes(4)
    assert float(kp.Hinge().rows(f, y).mean()) == pytest.approx(metrics.hinge_loss(y, f, labels=range(4)))
    by_hand = [
        max(0.0, 1 - float(r[c]) + max(float(v) for i, v in enumerate(r) if i != c)) for r, c in zip(f, y, strict=True)
    ]
    assert kp.SquaredHinge().rows(f, y).tolist() == pytest.approx([value**2 for value in by_hand])


def test_likelihoods_are_those_of_scipy():
    f, y = outputs(4), outputs(2, seed=2)
    log_p = scipy.stats.norm(f[:, :2].numpy(), np.exp(0.5 * f[:, 2:].numpy())).logpdf(y.numpy()).sum(1)
    np.testing.assert_allclose(kp.Gaussian().rows(f, y), -log_p, rtol=1e-12)
    f, y = outputs(3), (outputs(3, seed=2) > 0).long()
    p = 1 / (1 + np.exp(-f.numpy()))
    np.testing.assert_allclose(kp.Bernoulli().rows(f, y), -scipy.stats.bernoulli(p).logpmf(y).sum(1), rtol=1e-12)


def test_a_gaussian_with_a_huge_log_variance_is_finite():
    f = torch.tensor([[0.0, 200.0], [0.0, -200.0], [1e3, 0.0]], requires_grad=True)
    value = kp.Gaussian().rows(f, torch.zeros(3))
    value.sum().backward()
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(f.grad).all())


@pytest.mark.parametrize(("name", "n"), CASES)
def test_targets_with_and_without_an_axis_and_no_rows(name, n):
    kind, f, y = make_loss(name), outputs(n), targets(name, n)
    kind.check_targets(y, n)
    assert kind.rows(f, y).shape == (ROWS,)
    assert kind.rows(f[:0], y[:0]).shape == (0,)
    if not kind.classes and y.shape[1] == 1:
        assert torch.equal(kind.rows(f, y[:, 0]), kind.rows(f, y))
        kind.check_targets(y[:, 0], n)


@pytest.mark.parametrize(("name", "n"), CASES)
def test_curvature_is_a_derivative(name, n):
    kind, f, y = make_loss(name), outputs(n), targets(name, n)
    if not hasattr(kind, "curvature") or name in ("hinge", "squared_hinge"):
        with pytest.raises(
            kp.SpecError,
            match="has no curvature; bernoulli, cross_entropy, gamma, gaussian, huber, mse, poisson, quantile, tweedie have",
        ):
            kind.curvature(f, y)
        return
    gradient, factor = kind.curvature(f, y)
    rows = torch.func.vmap(torch.func.grad(lambda a, b: kind.rows(a[None], b[None])[0]))(f, y)
    torch.testing.assert_close(gradient, rows, rtol=1e-10, atol=1e-12)
    curvature = factor.mT @ factor
    if name in ("mse", "cross_entropy", "bernoulli", "poisson", "gamma", "tweedie"):
        hessian = torch.func.vmap(torch.func.hessian(lambda a, b: kind.rows(a[None], b[None])[0]))(f, y)
        torch.testing.assert_close(curvature, hessian, rtol=1e-9, atol=1e-12)
    else:
        assert bool((torch.linalg.eigvalsh(curvature) > -1e-12).all())


def test_the_curvature_of_a_gaussian_is_its_information():
    f = outputs(2, rows=1)
    y = f[:, :1] + torch.exp(0.5 * f[:, 1:]) * torch.randn(
        200_000, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    gradient, factor = kp.Gaussian().curvature(f.expand(len(y), 2), y)
    torch.testing.assert_close(gradient.mT @ gradient / len(y), factor[0].mT @ factor[0], rtol=0.02, atol=0.02)


def test_huber_curvature_gives_the_step_of_reweighted_squares():
    f, y = outputs(1), torch.zeros(ROWS, 1, dtype=torch.float64)
    gradient, factor = kp.Huber(0.5).curvature(f, y)
    # A constant is fitted: a step of Newton is the mean with weights min(1, δ/|e|).
    weights = np.minimum(1, 0.5 / np.abs(f[:, 0].numpy()))
    step = float(gradient.sum() / factor.square().sum())
    assert step == pytest.approx(float((weights * f[:, 0].numpy()).sum() / weights.sum()))


@pytest.mark.parametrize(
    ("loss", "theirs"),
    [
        (kp.Poisson(), metrics.mean_poisson_deviance),
        (kp.Gamma(), metrics.mean_gamma_deviance),
        (kp.Tweedie(power=1.3), lambda y, mean: metrics.mean_tweedie_deviance(y, mean, power=1.3)),
        (kp.Quantile(level=0.9), lambda y, f: 2 * metrics.mean_pinball_loss(y, np.log(f), alpha=0.9)),
    ],
)
def test_deviances_are_twice_the_loss_of_scikit_learn(loss, theirs):
    f, y = outputs(1), outputs(1, seed=2).exp()
    expected = theirs(y.numpy(), f.exp().numpy())
    assert 2 * float(loss.rows(f, y).mean()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", [kp.Poisson(), kp.Tweedie()])
def test_counts_of_zero_cost_a_finite_amount(loss):
    f = outputs(2).requires_grad_()
    value = loss.rows(f, torch.zeros(ROWS, 2, dtype=torch.float64)).sum()
    value.backward()
    assert math.isfinite(float(value.detach()))
    assert bool(f.grad.isfinite().all())


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        ("poisson", -1.0, "needs targets at least 0, got -1.0"),
        ("tweedie", -1.0, "needs targets at least 0"),
        ("gamma", 0.0, "needs targets above 0, got 0.0"),
    ],
)
def test_targets_that_a_deviance_does_not_know_are_refused(loss, target, message):
    model = kp.Model(kp.rpn([1, 1], bias=True), seed=0)
    with pytest.raises(kp.DataError, match=message):
        kp.fit(model, (torch.rand(4, 1), torch.tensor([[1.0], [2.0], [3.0], [target]])), loss=loss, epochs=1)
    with pytest.raises(kp.SpecError, match="positive targets in their unit"):
        kp.fit(model, (torch.rand(4, 1), torch.rand(4, 1) + 1), loss=loss, epochs=1, standardize=True)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.8])
def test_a_constant_fitted_to_the_quantile_loss_is_the_quantile(level):
    y = outputs(1, rows=501, seed=4)
    model = kp.Model(kp.rpn([1, 1], bias=True), seed=0, dtype=torch.float64)
    kp.fit(
        model,
        (torch.zeros(501, 1, dtype=torch.float64), y),
        loss=kp.Quantile(level=level),
        solver="ridge",
        l2=1e-9,
        epochs=300,
    )
    found = float(model(torch.zeros(1, 1, dtype=torch.float64)).detach())
    assert float((y < found).double().mean()) == pytest.approx(level, abs=0.02)


def test_poisson_regression_is_that_of_scikit_learn():
    from sklearn.linear_model import GammaRegressor, PoissonRegressor, TweedieRegressor

    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 3))
    y = generator.gamma(2.0, np.exp(x @ [0.5, -0.3, 0.1]) / 2)
    for loss, theirs in (
        (kp.Poisson(), PoissonRegressor(alpha=0.1, tol=1e-10, max_iter=1000)),
        (kp.Gamma(), GammaRegressor(alpha=0.1, tol=1e-10, max_iter=1000)),
        (kp.Tweedie(power=1.5), TweedieRegressor(power=1.5, alpha=0.1, link="log", tol=1e-10, max_iter=1000)),
    ):
        model = kp.Model(kp.rpn([3, 1], bias=True), seed=0, dtype=torch.float64)
        kp.fit(model, (x, y), loss=loss, solver=kp.Ridge(tolerance=0.0), l2=0.1, epochs=100)
        theirs.fit(x, y)
        np.testing.assert_allclose(model.layers[0].heads[0].psi.matrix.detach()[0], theirs.coef_, atol=1e-5)
        np.testing.assert_allclose(kp.predict(model, x, loss)[:, 0].detach(), theirs.predict(x), rtol=1e-4)


def test_decisions_and_probabilities():
    model = kp.Model(kp.rpn([2, 3], bias=True), seed=0, dtype=torch.float64)
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = model(x).detach()
    assert torch.equal(kp.predict(model, x), logits)
    assert torch.equal(kp.predict(model, x.numpy(), "hinge"), logits.argmax(1))
    torch.testing.assert_close(kp.predict_proba(model, x), logits.softmax(1))
    torch.testing.assert_close(kp.predict_log_proba(model, x), logits.log_softmax(1))
    torch.testing.assert_close(kp.predict_proba(model, x, "bernoulli"), logits.sigmoid())
    one = kp.Model(kp.rpn([2, 1], bias=True), seed=0, dtype=torch.float64)
    p = one(x).detach().sigmoid()
    torch.testing.assert_close(kp.predict_proba(one, x, "bernoulli"), torch.cat([1 - p, p], 1))
    assert torch.equal(kp.predict(one, x, "bernoulli"), (p[:, 0] > 0.5).long())
    assert kp.predict(model, x[:0]).shape == (0, 3)
    for name in ("mse", "huber", "hinge", "squared_hinge", "gaussian", "poisson", "gamma", "quantile"):
        with pytest.raises(kp.SpecError, match="has no probabilities; bernoulli, cross_entropy have"):
            kp.predict_proba(model, x, name)
    with pytest.raises(kp.SpecError, match="no loss is called 'mean_squared'"):
        kp.predict(model, x, "mean_squared")
    assert torch.equal(kp.predict(model, x.float()), model(x.float().double()))
    with pytest.raises(kp.SpecError, match=r"shape \(rows, m\)"):
        kp.predict(model, x[0])


def test_probabilities_of_extreme_logits_stay_finite():
    loss = kp.Bernoulli()
    log_p = loss.log_probabilities(torch.tensor([[800.0], [-800.0]]))
    assert log_p.tolist() == [[-800.0, 0.0], [0.0, -800.0]]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_metrics_of_parts_add_up(name, n):
    kind, f, y = make_loss(name), outputs(n), targets(name, n)
    weight = torch.rand(ROWS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    whole = metrics_of(kind, (f, y, weight))
    parts = (f[:7], y[:7], weight[:7]), (f[7:], y[7:], weight[7:])
    assert metrics_of(kind, *parts) == pytest.approx(whole)
    if kind.classes:
        assert whole == {"accuracy": pytest.approx(metrics.accuracy_score(y, kind.decide(f), sample_weight=weight))}
    elif name == "bernoulli":
        assert whole["accuracy"] == pytest.approx(np.average(((f > 0) == (y > 0.5)).double().mean(1), weights=weight))
    else:
        rmse = math.sqrt(metrics.mean_squared_error(y, kind.decide(f), sample_weight=weight))
        assert whole["rmse"] == pytest.approx(rmse)
        if y.shape[1] == 1:
            assert whole["r2"] == pytest.approx(metrics.r2_score(y, kind.decide(f), sample_weight=weight))


def test_r2_of_a_constant_target():
    kind = kp.MSE()
    y = torch.full((5,), 0.1, dtype=torch.float64)
    assert metrics_of(kind, (y[:, None], y, None))["r2"] == 1.0
    assert metrics_of(kind, (y[:, None] + 1, y, None))["r2"] == 0.0


@pytest.mark.parametrize(
    ("loss", "outputs", "said"),
    [
        ("gaussian", 3, "predict: gaussian needs 2 outputs for each target"),
        ("cross_entropy", 1, "predict: cross_entropy needs one output per class"),
        (["mse"], 1, "loss: expected a loss, got"),
    ],
)
def test_predictions_of_a_loss_that_the_model_cannot_have_are_refused(loss, outputs, said):
    model = kp.Model(kp.rpn([2, outputs]), seed=0)
    with pytest.raises(kp.SpecError, match=said):
        kp.predict(model, torch.ones(4, 2), loss)


def test_predict_says_in_a_line_what_it_cannot_take():
    x = torch.ones(4, 3)
    for model, said in (
        (lambda x: x, "expected a model, got <function"),
        (torch.nn.Linear(2, 2), r"Linear cannot take inputs of shape \(4, 3\)"),
        (torch.nn.Linear(3, 2, device="meta"), "meta device"),
        (torch.nn.LSTM(3, 2), "it returned tuple"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Flatten(0)), r"it returned shape \(8,\)"),
    ):
        with pytest.raises(kp.SpecError, match=said):
            kp.predict(model, x, "hinge")
    with pytest.raises(kp.KapsiError, match="the inputs are on the meta device"):
        kp.predict(torch.nn.Linear(3, 2), x.to("meta"))


def test_a_plain_callable_may_return_elements_rows_or_a_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 2, generator=generator, dtype=torch.float64)
    y = x.sum(1)  # (rows,): a difference with outputs (rows, 1) must not broadcast
    losses = []
    for loss in (
        "mse",
        lambda prediction, target: (prediction - target) ** 2,
        lambda prediction, target: (prediction - target).square().mean(1),
        lambda prediction, target: (prediction - target).square().mean(),
    ):
        model = kp.Model(kp.rpn([2, 1], kp.Taylor(2)), seed=0, dtype=torch.float64)
        losses.append(kp.fit(model, (x, y), loss=loss, solver="adamw", epochs=3)[-1].loss)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-12)
