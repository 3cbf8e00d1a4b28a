"""Multilayer perceptrons of torch and scikit-learn as models of kapsi: outputs, gradients, training, and what is refused."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor
from torch import nn

import kapsi as kp
from kapsi.errors import DataError
from kapsi.zoo import mlp

drawn = settings(max_examples=15, deadline=None, derandomize=True)
ACTIVATIONS = [each() for each in mlp.ACTIVATIONS]
NORMS = [None, nn.LayerNorm, nn.BatchNorm1d, nn.Dropout, nn.Identity]


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same_outputs_and_gradients(ours: kp.Model, theirs: nn.Module, x: torch.Tensor) -> None:
    outputs, expected = ours(x), theirs(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    for y in (outputs, expected):
        y.sin().sum().backward()
    mine = mlp._ordered(ours)
    assert len(mine) == len(list(ours.parameters()))
    for a, b in zip(mine, theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


@drawn
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.data(),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_torch_imported(widths, data, training, seed) -> None:
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for i, (m, n) in enumerate(pairwise(widths)):
        modules.append(nn.Linear(m, n, bias=data.draw(st.booleans())))
        norm = data.draw(st.sampled_from(NORMS))
        if norm in (nn.LayerNorm, nn.BatchNorm1d):
            modules.append(norm(n))
            nn.init.normal_(modules[-1].weight)
            nn.init.normal_(modules[-1].bias)
        elif norm is not None:
            modules.append(norm())
        if i < len(widths) - 2 or data.draw(st.booleans()):
            modules.append(data.draw(st.sampled_from(ACTIVATIONS)))
    theirs = nn.Sequential(*modules).double().train()
    x = rows(12, widths[0])
    with torch.no_grad():
        theirs(x)  # running statistics are not what they were at first
    theirs.train(training)
    ours = mlp.from_torch(theirs)
    assert ours.training == training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        y = ours(x)
        torch.manual_seed(1)
        torch.testing.assert_close(y, theirs(x), rtol=1e-12, atol=1e-12)  # with the same values dropped
    theirs.eval()
    assert_same_outputs_and_gradients(ours.eval(), theirs, x)


def test_sequences_within_sequences_and_what_stands_before_the_first_linear_map() -> None:
    theirs = nn.Sequential(
        nn.Sequential(nn.LayerNorm(4, bias=False), nn.Tanh()),
        nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.SELU(), nn.Dropout(0.2))),
        nn.Linear(5, 2),
        nn.Sigmoid(),
        nn.BatchNorm1d(2, eps=1e-3, momentum=0.3, affine=False),
    ).double()
    nn.init.normal_(theirs[0][0].weight)
    x = rows(9, 4)
    theirs(x)
    ours = mlp.from_torch(theirs.eval())
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    assert [name for name, p in ours.named_parameters() if not p.requires_grad] == ["layers.0.heads.0.before.0.bias"]
    assert ours.spec.layers[1].output[1] == kp.BatchNorm(momentum=0.3, epsilon=1e-3)
    # Running statistics go on alike.
    theirs.train()(x)
    ours.train()
    with torch.random.fork_rng(devices=[]):
        ours.layers[1](theirs.eval()[1](theirs[0](x)))
    assert int(ours.layers[1].output[1].num_batches_tracked) == 2


def test_one_linear_map_and_frozen_parameters() -> None:
    theirs = nn.Linear(3, 2)
    theirs.weight.requires_grad_(False)
    ours = mlp.from_torch(theirs)
    x = rows(4, 3)
    torch.testing.assert_close(ours(x), theirs.double()(x), rtol=1e-12, atol=1e-12)
    assert [name for name, p in ours.named_parameters() if p.requires_grad] == ["layers.0.heads.0.bias"]


def test_trained_alike() -> None:
    """The same steps of the same optimizer lead to the same weights."""
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    ours = mlp.from_torch(theirs)
    x, y = rows(30, 3), rows(30, 1, 1)
    for model in (ours, theirs):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    for a, b in zip(mlp._ordered(ours), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def hooked() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    made[1].register_forward_hook(lambda module, arguments, output: 2 * output)
    return made


def infinite() -> nn.Module:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, torch.inf)
    return made


LINEAR = nn.Linear(2, 2)
REFUSED = {
    "expected a torch.nn.Sequential or Linear, got Tanh": lambda: nn.Tanh(),
    "got dict": dict,
    "expected at least one torch.nn.Linear": lambda: nn.Sequential(nn.ReLU()),
    r"negative_slope=0\.2; the activation 'leaky_relu' has negative_slope=0\.01": lambda: nn.Sequential(
        nn.Linear(2, 2), nn.LeakyReLU(0.2)
    ),
    "approximate=tanh": lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU("tanh")),
    "alpha=2": lambda: nn.Sequential(nn.Linear(2, 2), nn.ELU(2.0)),
    "beta=2": lambda: nn.Sequential(nn.Linear(2, 2), nn.Softplus(2.0)),
    r"1 \(Softmax\): has no counterpart; leave it out": lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)),
    r"0 \(Flatten\): has no counterpart; leave it out and flatten": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(2, 2)
    ),
    r"1\.0 \(Conv1d\): has no counterpart": lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv1d(2, 2, 1))),
    r"0 \(Scaled\): has no counterpart": lambda: nn.Sequential(Scaled(2, 2)),
    r"1 \(Residual\): has no counterpart": lambda: nn.Sequential(nn.Linear(2, 2), Residual(nn.Linear(2, 2))),
    "expects 4 features, the module before has 3": lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 1)),
    "LayerNorm.*: expects 4 features, the module before has 3": lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(4)),
    "normalizes over 2 axes": lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm((2, 3))),
    "track_running_stats=True": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False)),
    "momentum=None": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None)),
    "shares a parameter with 0": lambda: nn.Sequential(LINEAR, nn.Tanh(), LINEAR),
    "has hooks": hooked,
    "meta device": lambda: nn.Linear(2, 2, device="meta"),
    "expected real numbers, got torch.complex64": lambda: nn.Linear(2, 2, dtype=torch.complex64),
    r"0 \(LazyLinear\): has hooks": lambda: nn.Sequential(nn.LazyLinear(2)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        mlp.from_torch(REFUSED[message]())


def test_weights_that_are_not_finite() -> None:
    with pytest.raises(DataError, match="weight of linear map 0: expected finite numbers"):
        mlp.from_torch(infinite())


def test_parametrized_is_refused() -> None:
    theirs = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(kp.SpecError, match="ParametrizedLinear"):
        mlp.from_torch(theirs)


# ------------------------------------------------------------------------------------------------ scikit-learn


def fitted(estimator, x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=ConvergenceWarning)
        return estimator.fit(x, y)


@drawn
@given(
    st.integers(1, 5),
    st.integers(2, 4),
    st.lists(st.integers(1, 7), max_size=3),
    st.sampled_from(["identity", "logistic", "tanh", "relu"]),
    st.integers(0, 2**16),
)
def test_classifier(inputs, classes, hidden, activation, seed) -> None:
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(30, inputs)), np.arange(30) % classes
    estimator = fitted(MLPClassifier(hidden, activation, max_iter=5, random_state=0), x, np.array(list("dbca"))[y])
    model = mlp.from_sklearn(estimator)
    assert model.out_features == (1 if classes == 2 else classes)
    assert sum(p.numel() for p in model.parameters()) == sum(w.size for w in estimator.coefs_ + estimator.intercepts_)
    new = generator.normal(size=(40, inputs)) * 3
    wanted = estimator.predict_proba(new)
    if classes == 2:
        np.testing.assert_allclose(kp.predict_proba(model, new, "bernoulli"), wanted, rtol=0, atol=1e-12)
        numbers = kp.predict(model, new, "bernoulli").reshape(-1).long()
    else:
        np.testing.assert_allclose(kp.predict_proba(model, new, "cross_entropy"), wanted, rtol=0, atol=1e-12)
        numbers = kp.predict(model, new, "cross_entropy")
    assert (estimator.classes_[numbers.numpy()] == estimator.predict(new)).all()


@drawn
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.integers(1, 7), max_size=3),
    st.sampled_from(["identity", "logistic", "tanh", "relu"]),
    st.integers(0, 2**16),
)
def test_regressor(inputs, outputs, hidden, activation, seed) -> None:
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(30, inputs)), generator.normal(size=(30, outputs)).squeeze()
    estimator = fitted(MLPRegressor(hidden_layer_sizes=hidden, activation=activation, max_iter=5, random_state=0), x, y)
    new = generator.normal(size=(40, inputs)) * 3
    found = kp.predict(mlp.from_sklearn(estimator), new)
    np.testing.assert_allclose(found, estimator.predict(new).reshape(40, outputs), rtol=1e-12, atol=1e-12)


def test_several_labels() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 3)), generator.integers(0, 2, (40, 4))
    estimator = fitted(MLPClassifier((5,), max_iter=20, random_state=0), x, y)
    found = kp.predict_proba(mlp.from_sklearn(estimator), x, "bernoulli")
    np.testing.assert_allclose(found, estimator.predict_proba(x), rtol=0, atol=1e-12)


def test_an_imported_classifier_trains_on() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 2))
    y = (x.prod(1) > 0).astype(int)
    estimator = fitted(MLPClassifier((8,), "tanh", max_iter=2, random_state=0), x, y)
    model = mlp.from_sklearn(estimator)
    records = kp.fit(model, (x, y.astype(float)), loss="bernoulli", solver="lbfgs", epochs=40, seed=0)
    assert records[-1].loss < 0.5 * estimator.loss_


def test_refused_estimators() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6) + 1
    with pytest.raises(kp.SpecError, match="not fitted"):
        mlp.from_sklearn(MLPClassifier())
    with pytest.raises(kp.SpecError, match="expected MLPClassifier, MLPRegressor; got ndarray"):
        mlp.from_sklearn(x)
    poisson = fitted(MLPRegressor(hidden_layer_sizes=(2,), loss="poisson", max_iter=2), x, y)
    with pytest.raises(kp.SpecError, match="outputs go through exp"):
        mlp.from_sklearn(poisson)


def test_spec() -> None:
    model = kp.Model(mlp.spec([3, 5, 5, 2], ["tanh", kp.LayerNorm()], bias=False, dropout=0.1), seed=0)
    assert model.spec.layers[0].output == model.spec.layers[1].output
    assert [step.name for step in model.spec.layers[0].output] == ["tanh", "layer_norm", "dropout"]
    assert model.spec.layers[2].output == ()
    assert sum(p.numel() for p in model.parameters()) == 15 + 25 + 10
    assert mlp.spec([3, 5, 2]) == kp.rpn([3, 5, 2], bias=True, output="relu").__class__(
        (3, 5, 2),
        (kp.LayerSpec(kp.HeadSpec(bias=True), output="relu"), kp.LayerSpec(kp.HeadSpec(bias=True))),
    )
    with pytest.raises(kp.SpecError, match="at least two"):
        mlp.spec([3])


def test_a_forward_of_its_own_is_refused() -> None:
    linear = nn.Linear(3, 2)
    linear.forward = torch.zeros_like
    with pytest.raises(kp.SpecError, match=r"0 \(Linear\): overrides forward"):
        mlp.from_torch(nn.Sequential(linear))


def test_widths_and_activations_that_are_none() -> None:
    with pytest.raises(kp.SpecError, match=r"widths=None\): expected numbers of features"):
        mlp.spec(None)
    for wrong in (None, 3):
        with pytest.raises(kp.SpecError, match="expected a name, a function or a sequence of both"):
            mlp.spec([3, 2], wrong)
