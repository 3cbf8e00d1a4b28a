"""Naive Bayes as κ, ψ and π: equal to scikit-learn's, imported, fitted, weighted and in parts; and trained from there."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse
import scipy.stats
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import BernoulliNB, CategoricalNB, ComplementNB, GaussianNB, MultinomialNB

import kapsi as kp
from kapsi.errors import KapsiError
from kapsi.zoo import naive_bayes as nb

drawn = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
sizes = st.tuples(st.integers(2, 4), st.integers(1, 5), st.integers(8, 40), st.integers(0, 2**16))
"""Classes, inputs, rows, and a seed."""


def labels(classes: int, rows: int, generator: np.random.Generator) -> np.ndarray:
    """Return class labels in a random order, each class at least twice."""
    return generator.permutation(
        np.concatenate((np.arange(classes), np.arange(classes), generator.integers(0, classes, rows - 2 * classes)))
    )


def numbers(size: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs of very different scales, class labels and weights."""
    classes, inputs, rows, seed = size
    generator = np.random.default_rng(seed)
    y = labels(classes, rows, generator)
    x = (
        generator.normal(size=(classes, inputs))[y]
        + generator.normal(size=(rows, inputs)) * np.exp(generator.normal(size=(classes, inputs)))[y]
    )
    return x * 10.0 ** generator.integers(-2, 3, inputs), y, generator.uniform(0.1, 3, rows)


def counts(size: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return counts, many of them zero, class labels and weights."""
    classes, inputs, rows, seed = size
    generator = np.random.default_rng(seed)
    y = labels(classes, rows, generator)
    return (
        generator.poisson(generator.uniform(0, 2, (classes, inputs))[y]).astype(float),
        y,
        generator.uniform(0.1, 3, rows),
    )


def assert_equal(model: kp.Model, estimator, x, dense=None) -> None:
    """Compare joint log-likelihoods, log-probabilities and classes, relative where values are larger than one."""
    dense = x if dense is None else dense
    with torch.no_grad():
        joint = kp.predict(model, x)
    np.testing.assert_allclose(joint, estimator.predict_joint_log_proba(dense), rtol=1e-9, atol=1e-9)
    wanted = estimator.predict_log_proba(dense)
    np.testing.assert_allclose(kp.predict_log_proba(model, x), wanted, rtol=1e-9, atol=1e-9)
    top = np.sort(wanted, 1)
    clear = top[:, -1] - top[:, -2] > 1e-8
    found = estimator.classes_[kp.predict(model, x, "cross_entropy").numpy()]
    assert (found == estimator.predict(dense))[clear].all()


# ------------------------------------------------------------------------------------------------ normal densities


@drawn
@given(sizes, st.floats(1e-12, 0.1), st.booleans(), st.booleans())
def test_gaussian_imported_and_fitted(size, smoothing, weighted, with_priors) -> None:
    x, y, weight = numbers(size)
    weight = weight if weighted else None
    priors = np.arange(1, size[0] + 1) / np.arange(1, size[0] + 1).sum() if with_priors else None
    estimator = GaussianNB(var_smoothing=smoothing, priors=priors).fit(x, y, weight)
    new = np.concatenate((x, x[::-1] * 1.5 + 0.1))
    assert_equal(nb.from_sklearn(estimator), estimator, new)
    assert_equal(nb.fit_gaussian(x, y, sample_weight=weight, smoothing=smoothing, priors=priors), estimator, new)


@drawn
@given(sizes, st.integers(1, 4), st.booleans())
def test_gaussian_in_parts(size, parts, weighted) -> None:
    x, y, weight = numbers(size)
    estimator, statistics = GaussianNB(var_smoothing=1e-3), nb.GaussianStatistics.none(size[1], size[0], smoothing=1e-3)
    for places in np.array_split(np.arange(len(x)), parts):
        w = weight[places] if weighted else None
        estimator.partial_fit(x[places], y[places], classes=np.arange(size[0]), sample_weight=w)
        before = statistics.weight.clone()
        statistics, old = nb.partial_fit(statistics, x[places], y[places], sample_weight=w), statistics
        assert torch.equal(old.weight, before)  # what was there stays as it is
    np.testing.assert_allclose(statistics.variance, estimator.var_, rtol=1e-9)
    np.testing.assert_allclose(statistics.mean, estimator.theta_, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(statistics.weight, estimator.class_count_, rtol=1e-12)
    assert_equal(statistics.model(), estimator, x)


def test_gaussian_of_inputs_that_do_not_vary() -> None:
    x, y, _ = numbers((3, 4, 30, 0))
    x[:, 1] = 5.0  # nowhere
    x[y == 2, 3] = -1.0  # in one class
    estimator = GaussianNB().fit(x, y)
    # Rows of the data: what is far from a class that does not vary has sums of 10⁹, whose differences are rounding.
    for model in (nb.fit_gaussian(x, y), nb.from_sklearn(estimator), nb.fit_naive("normal", x, y)):
        assert_equal(model, estimator, x)


def test_gaussian_in_parts_where_a_class_comes_late_and_the_spread_of_batches_differs() -> None:
    x, y, _ = numbers((3, 3, 60, 1))
    x, y = x[np.argsort(y, kind="stable")], np.sort(y)
    x[30:] *= 100
    x[:, 2] = 1.0
    estimator, statistics = GaussianNB(var_smoothing=0.01), nb.GaussianStatistics.none(3, 3, smoothing=0.01)
    for places in np.array_split(np.arange(60), 4):
        estimator.partial_fit(x[places], y[places], classes=[0, 1, 2])
        statistics = nb.partial_fit(statistics, x[places], y[places])
    np.testing.assert_allclose(statistics.variance, estimator.var_, rtol=1e-9)
    assert_equal(statistics.model(), estimator, x)


def test_classes_of_any_names_are_outputs_in_their_order() -> None:
    x, y, _ = numbers((3, 4, 30, 0))
    names = np.array(["cherry", "apple", "banana"])
    estimator = GaussianNB().fit(x, names[y])
    assert_equal(nb.from_sklearn(estimator), estimator, x)


def test_weights_count_as_rows() -> None:
    x, y, _ = numbers((2, 3, 20, 0))
    # Without smoothing, which is of rows without their weights.
    repeated = nb.fit_gaussian(np.concatenate((x, x[:5], x[:5])), np.concatenate((y, y[:5], y[:5])), smoothing=0.0)
    weighted = nb.fit_gaussian(x, y, sample_weight=[3] * 5 + [1] * 15, smoothing=0.0)
    for mine, theirs in zip(weighted.state_dict().values(), repeated.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------ counts


@drawn
@given(sizes, st.floats(1e-3, 10), st.booleans(), st.sampled_from(["shares", "equal", "given"]))
def test_multinomial_imported_and_fitted(size, alpha, each, prior) -> None:
    x, y, weight = counts(size)
    alpha = alpha * np.arange(1, size[1] + 1) if each else alpha
    given_priors = np.arange(1, size[0] + 1) / np.arange(1, size[0] + 1).sum() if prior == "given" else None
    estimator = MultinomialNB(alpha=alpha, fit_prior=prior == "shares", class_prior=given_priors).fit(x, y, weight)
    options = {"alpha": alpha, "fit_prior": prior == "shares", "priors": given_priors}
    assert_equal(nb.from_sklearn(estimator), estimator, x)
    assert_equal(nb.fit_multinomial(x, y, sample_weight=weight, **options), estimator, x)


@drawn
@given(sizes, st.floats(1e-3, 10), st.booleans(), st.sampled_from([0.0, 1.0, None]))
def test_bernoulli_imported_and_fitted(size, alpha, fit_prior, threshold) -> None:
    x, y, weight = counts(size)
    x = np.minimum(x, 1) if threshold is None else x
    estimator = BernoulliNB(alpha=alpha, binarize=threshold, fit_prior=fit_prior).fit(x, y, weight)
    assert_equal(nb.from_sklearn(estimator), estimator, x)
    model = nb.fit_bernoulli(x, y, sample_weight=weight, alpha=alpha, threshold=threshold, fit_prior=fit_prior)
    assert_equal(model, estimator, x)


def test_bernoulli_of_a_threshold_below_zero() -> None:
    x, y, weight = numbers((3, 4, 40, 0))
    x = x / np.abs(x).max(0)
    estimator = BernoulliNB(binarize=None).fit((x > -0.2).astype(float), y, weight)
    model = nb.fit_bernoulli(x, y, sample_weight=weight, threshold=-0.2)
    assert_equal(model, estimator, x, dense=(x > -0.2).astype(float))
    with pytest.raises(kp.DataError, match="takes no sparse inputs"):
        model(torch.tensor(x).to_sparse_csr())


def test_bernoulli_of_an_input_that_every_row_of_a_class_has() -> None:
    # 1 − p is 10⁻¹⁴, of which 1 − exp(log p) has two digits: the model has them all.
    x, y = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), np.array([0, 0, 1, 1])
    model = nb.fit_bernoulli(x, y, alpha=1e-14)
    outputs = model(torch.tensor([[0.0, 0.0]], dtype=torch.float64)).detach()
    small = np.log(1e-14) - np.log(2 + 2e-14)
    np.testing.assert_allclose(outputs[0], [small + np.log(0.25), np.log(0.25)], rtol=1e-12)


@drawn
@given(sizes, st.integers(1, 4), st.sampled_from(["multinomial", "bernoulli"]))
def test_counts_in_parts(size, parts, kind) -> None:
    x, y, weight = counts(size)
    estimator = MultinomialNB() if kind == "multinomial" else BernoulliNB()
    statistics = nb.CountStatistics.none(size[1], size[0], kind)
    for i, places in enumerate(np.array_split(np.arange(len(x)), parts)):
        estimator.partial_fit(x[places], y[places], classes=np.arange(size[0]), sample_weight=weight[places])
        rows = scipy.sparse.csr_matrix(x[places]) if i % 2 else x[places]
        statistics = nb.partial_fit(statistics, rows, y[places], sample_weight=weight[places])
    assert_equal(statistics.model(), estimator, x)
    whole = {"multinomial": nb.fit_multinomial, "bernoulli": nb.fit_bernoulli}[kind](x, y, sample_weight=weight)
    for mine, theirs in zip(statistics.model().parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@drawn
@given(sizes)
def test_sparse_counts(size) -> None:
    x, y, weight = counts(size)
    matrix = scipy.sparse.csr_matrix(x)
    tensor = torch.tensor(x).to_sparse_csr()
    for fit, estimator in ((nb.fit_multinomial, MultinomialNB()), (nb.fit_bernoulli, BernoulliNB(binarize=1.0))):
        options = {} if fit is nb.fit_multinomial else {"threshold": 1.0}
        estimator.fit(matrix, y, weight)
        for rows in (matrix, tensor):
            model = fit(rows, y, sample_weight=weight, **options)
            assert_equal(model, estimator, rows, dense=x)
            torch.testing.assert_close(model(tensor), model(torch.tensor(x)), rtol=1e-12, atol=1e-12)


def test_sparse_counts_stay_sparse() -> None:
    # Dense they would be a million million entries, more than any machine has room for.
    x = scipy.sparse.random(2**20, 2**20, density=1e-9, format="csr", rng=np.random.default_rng(0))
    y = np.arange(2**20) % 2
    for fit in (nb.fit_multinomial, nb.fit_bernoulli):
        assert kp.predict(fit(x, y), x, batch_size=2**19).shape == (2**20, 2)


@drawn
@given(sizes, st.booleans())
def test_complement(size, norm) -> None:
    x, y, weight = counts(size)
    x[: size[0]] += 1  # a class without any word has none to be normalized
    estimator = ComplementNB(norm=norm and size[1] > 1, alpha=0.3).fit(x, y, weight)
    assert_equal(nb.from_sklearn(estimator), estimator, x)


@drawn
@given(sizes, st.floats(1e-3, 5))
def test_categorical(size, alpha) -> None:
    x, y, weight = counts(size)
    x[:, 0] = np.minimum(x[:, 0], 1)  # other numbers of categories
    estimator = CategoricalNB(alpha=alpha).fit(x, y, weight)
    assert_equal(nb.from_sklearn(estimator), estimator, x)


def test_category_that_was_not_there_says_nothing_of_the_class() -> None:
    x, y = np.array([[0, 0], [1, 2], [1, 1], [0, 2]]), np.array([0, 1, 0, 1])
    estimator = CategoricalNB(alpha=0.5).fit(x, y)
    model = nb.from_sklearn(estimator)
    expected = estimator.feature_log_prob_[1][:, 1] + estimator.class_log_prior_
    for absent in (2.0, 3.0, -1.0):
        found = kp.predict(model, torch.tensor([[absent, 1.0]], dtype=torch.float64))[0]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ all densities


LOGPDF = {
    "normal": lambda x, t: scipy.stats.norm.logpdf(x, t["mean"], np.exp(t["log_scale"])),
    "cauchy": lambda x, t: scipy.stats.cauchy.logpdf(x, t["location"], np.exp(t["log_scale"])),
    "laplace": lambda x, t: scipy.stats.laplace.logpdf(x, t["location"], np.exp(t["log_scale"])),
    "exponential": lambda x, t: scipy.stats.expon.logpdf(x, scale=np.exp(-t["log_rate"])),
    "gamma": lambda x, t: scipy.stats.gamma.logpdf(x, np.exp(t["log_shape"]), scale=np.exp(t["log_scale"])),
    "chi_squared": lambda x, t: scipy.stats.chi2.logpdf(x, np.exp(t["log_degrees"])),
}


@pytest.mark.parametrize("kind", LOGPDF)
@drawn
@given(sizes)
def test_any_density_class_by_class(kind, size) -> None:
    x, y, _ = numbers(size)
    x = x if kind in ("normal", "cauchy", "laplace") else np.abs(x) + 0.1
    model = nb.fit_naive(kind, x, y)
    store = model.layers[0].heads[0].kappa
    parameters = {name: store[name].detach().numpy() for name in store.names()}
    prior = np.log(np.bincount(y) / len(y))
    wanted = np.stack(
        [LOGPDF[kind](x, {n: v[c] for n, v in parameters.items()}).sum(1) + prior[c] for c in range(size[0])], 1
    )
    np.testing.assert_allclose(kp.predict(model, x), wanted, rtol=1e-9, atol=1e-9)
    # Likelier than with the parameters of another class: each setting is that of its own rows.
    assert np.take_along_axis(wanted - prior, y[:, None], 1).mean() >= (wanted - prior).mean()


# ------------------------------------------------------------------------------------------------ trained from there


def split() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = torch.tensor(x[order]), torch.tensor(y[order])
    return (x[:400], y[:400]), (x[400:], y[400:])


def loss(model: kp.Model, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    return float(torch.nn.functional.nll_loss(kp.predict_log_proba(model, data[0]), data[1]))


def test_learned_weights_begin_as_naive_bayes_and_improve_its_loss_on_other_rows() -> None:
    train, test = split()
    bayes = nb.from_sklearn(GaussianNB().fit(*train))
    model = nb.learned(bayes)
    torch.testing.assert_close(model(test[0]), bayes(test[0]), rtol=1e-12, atol=1e-9)
    assert model.layers[0].heads[0].spec.reconciliation == kp.Dense()
    model.freeze("*.kappa")
    kp.fit(model, train, loss="cross_entropy", solver="lbfgs", l2=1e-3, epochs=100, validation=test)
    assert loss(model, test) < 0.6 * loss(bayes, test)


def test_trained_densities_improve_the_loss_too() -> None:
    train, test = split()
    model = nb.fit_gaussian(*train)
    before = loss(model, test)
    kp.fit(model, train, loss="cross_entropy", solver=kp.AdamW(learning_rate=1e-3), epochs=20, seed=0)
    assert loss(model, test) < before


def test_nothing_is_trained_unless_it_is_learnable() -> None:
    x, y, _ = numbers((2, 3, 20, 0))
    fixed = nb.fit_gaussian(x, y, learnable=False)
    assert not list(fixed.parameters())
    assert list(nb.learned(fixed).parameters())
    assert {name.split(".")[-1] for name, _ in nb.fit_gaussian(x, y).named_parameters()} == {"mean", "log_scale"}
    assert_equal(fixed, GaussianNB().fit(x, y), x)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("normal", {"smoothing": 0.1}),
        ("normal", {"dense": True, "learnable": False}),
        ("cauchy", {"bias": True}),
        ("laplace", {}),
        ("exponential", {"floor": 0.5}),
        ("gamma", {}),
        ("chi_squared", {}),
        ("multinomial", {"bias": True}),
        ("bernoulli", {"threshold": 2.5}),
        ("bernoulli", {"threshold": None}),
        ("categorical", {"categories": 4}),
    ],
)
def test_every_kind_is_data(kind, options) -> None:
    made = nb.spec(3, 2, kind, **options)
    assert kp.from_dict(kp.to_dict(made), kp.ModelSpec) == made
    x = torch.tensor([[0.0, 1.0, 3.0]])
    model = kp.Model(made, seed=0)
    assert model(x).shape == (1, 2)
    head = made.layers[0].heads[0]
    assert head.bias == options.get("bias", False)
    assert isinstance(head.remainder, kp.ConstantRemainder)
    for name in ("smoothing", "floor", "learnable"):
        assert getattr(head.expansion, name, None) == options.get(name, getattr(head.expansion, name, None))


# ------------------------------------------------------------------------------------------------ errors


def test_what_is_not_a_fitted_naive_bayes_is_refused() -> None:
    x, y, _ = counts((2, 3, 20, 0))

    class Derived(GaussianNB):
        pass

    cases = [
        (LogisticRegression().fit(x, y), "expected GaussianNB, MultinomialNB, .*got LogisticRegression"),
        (GaussianNB, "expected GaussianNB"),
        (None, "got NoneType"),
        (Derived().fit(x, y), "may compute something else"),
        (GaussianNB(), r"from_sklearn\(GaussianNB\): the GaussianNB is not fitted; call fit"),
        (MultinomialNB(), "not fitted"),
        (GaussianNB(priors=[0.0, 1.0]).fit(x, y), "class .*0.* has a prior of zero"),
        (MultinomialNB().partial_fit(x, np.zeros(20), classes=[0, 1]), "class .*1.* has a prior of zero"),
    ]
    for estimator, message in cases:
        with pytest.raises(KapsiError, match=message):
            nb.from_sklearn(estimator)
    with pytest.raises(KapsiError, match=r"learnable=False is for GaussianNB; use model.freeze"):
        nb.from_sklearn(MultinomialNB().fit(x, y), learnable=False)


def test_probabilities_of_zero_are_refused() -> None:
    x, y = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 2.0]]), np.array([0, 0, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of scikit-learn about its own logarithms
        estimators = [MultinomialNB(alpha=0), BernoulliNB(alpha=0), CategoricalNB(alpha=0), ComplementNB(alpha=0)]
        fitted = [each.fit(x, y) for each in estimators[:3]]
    for each in fitted:
        with pytest.raises(KapsiError, match="probabilities are zero; fit with alpha above 0"):
            nb.from_sklearn(each)
    with pytest.raises(KapsiError, match=r"variance of 0\.0 in class 0.*use var_smoothing above 0"):
        nb.from_sklearn(GaussianNB(var_smoothing=0).fit(x, y))
    with pytest.raises(KapsiError, match=r"input 0 has a smoothed variance of 0\.0 in class 0.*use smoothing above 0"):
        nb.fit_gaussian(x, y, smoothing=0.0)
    with pytest.raises(KapsiError, match=r"has a smoothed variance of 0\.0"):
        nb.fit_gaussian(np.ones((4, 2)), y)


X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 0, 1, 2, 2])


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (X, [0, 2, 0, 2, 2, 2], {}, "class 1 of 3 has no rows"),
        (X, [0, 1, 0, 1, 2, 10**12], {}, "up to class 1,000,000,000,000, and class 3 has no rows"),
        (X, Y, {"classes": 4}, "class 3 of 4 has no rows"),
        (X, Y, {"classes": 2}, "y has class 2, and the classes are 0 to 1"),
        (X, Y, {"classes": 0}, "classes: expected an integer of at least 1, got 0"),
        (X, Y, {"sample_weight": [1, 1, 1, 1, 0, 0]}, "class 2 of 3 has no rows, or only rows without weight"),
        (X, Y, {"sample_weight": [-1, 1, 1, 1, 1, 1]}, "sample_weight must not be negative"),
        (X, Y, {"sample_weight": [1, 1]}, r"expected sample_weight of shape \(6,\), got \(2,\)"),
        (X, Y, {"priors": [0.5, 0.5]}, r"expected priors of shape \(3,\)"),
        (X, Y, {"priors": [0.5, 0.5, 0.5]}, "sum to 1"),
        (X, Y, {"priors": [0.5, 0.5, 0.0]}, "priors must be above 0"),
        (X, Y - 1, {}, "expected y as class labels 0, 1"),
        (X, Y + 0.5, {}, "expected y as class labels"),
        (X, np.array(list("abcabc")), {}, "y: expected numbers"),
        (X, Y[:3], {}, r"expected y of shape \(6,\)"),
        (X, np.where(Y == 0, np.nan, Y), {}, "y: expected finite numbers"),
        (np.where(X == 3, np.inf, X), Y, {}, "the inputs must be finite"),
        (X[:0], Y[:0], {}, "at least one row"),
        (X[0], Y, {}, r"shape \(rows, m\)"),
    ],
)
@pytest.mark.parametrize("fit", [nb.fit_gaussian, nb.fit_multinomial, nb.fit_bernoulli], ids=lambda f: f.__name__)
def test_data_that_does_not_fit_is_refused(fit, x, y, options, message) -> None:
    with pytest.raises(KapsiError, match=message):
        fit(x, y, **options)


def test_other_mistakes_are_refused() -> None:
    sparse = scipy.sparse.csr_matrix(X)
    model = nb.fit_gaussian(X, Y)
    for call, message in [
        (lambda: nb.fit_gaussian(sparse, Y), "fit_gaussian: sparse inputs are not supported"),
        (lambda: nb.fit_naive("cauchy", sparse, Y), "sparse inputs are not supported"),
        (lambda: nb.fit_naive("poisson", X, Y), "expected one of normal, cauchy"),
        (lambda: nb.fit_naive("gamma", X, Y, smoothing=0.1), "there is no option 'smoothing'; options: floor"),
        (lambda: nb.fit_naive("normal", X, [0, 2, 0, 2, 2, 2]), "class 1 of 3 has no rows"),
        (lambda: nb.fit_gaussian(X, Y, smoothing=-1), "expected a finite number from 0 to 1"),
        (lambda: nb.fit_multinomial(-X, Y), "counts must not be negative, the smallest is -11"),
        (lambda: nb.fit_multinomial(X, Y, alpha=0), "alpha must be above 0"),
        (lambda: nb.fit_multinomial(X, Y, alpha=[1.0, 2.0, 3.0]), "2 numbers, one per input"),
        (lambda: nb.fit_bernoulli(X, Y, threshold=None), "inputs must be zeros and ones"),
        (lambda: nb.fit_bernoulli(sparse, Y, threshold=-1.0), "threshold of at least 0"),
        (lambda: nb.partial_fit(model, X, Y), "a model has no row counts"),
        (lambda: nb.partial_fit(nb.GaussianStatistics.none(3, 3), X, Y), "the statistics have 3 inputs, got 2"),
        (lambda: nb.partial_fit(nb.GaussianStatistics.none(2, 2), X, Y), "y has class 2"),
        (lambda: nb.GaussianStatistics.none(2, 2).model(), "class 0 of 2 has no rows"),
        (lambda: nb.GaussianStatistics.none(0, 2), "inputs: expected an integer of at least 1, got 0"),
        (lambda: nb.GaussianStatistics.none(10**6, 10**6), "1,000,000,000,000 parameters; at most"),
        (lambda: nb.GaussianStatistics(torch.ones(2), torch.ones(3, 2), torch.ones(3, 2)), r"got \(2,\), \(3, 2\)"),
        (lambda: nb.CountStatistics("bernoulli", torch.ones(2), torch.ones(2)), r"expected tensors \(classes,\)"),
        (lambda: nb.CountStatistics.none(2, 2, "bernoulli", threshold="high"), "threshold"),
        (lambda: nb.fit_multinomial(X, Y, alpha="much"), "alpha: expected numbers"),
        (lambda: nb.CountStatistics.none(2, 2, "poisson"), "expected one of multinomial, bernoulli"),
        (lambda: nb.spec(2, 2, "gaussian"), "expected one of normal"),
        (lambda: nb.spec(2, 2, "cauchy", smoothing=0.1), "no option 'smoothing'; options: none"),
        (lambda: nb.spec(2, 2, "multinomial", dense=True), "ψ of counts is dense and trainable"),
        (lambda: nb.spec(2, 2, "categorical"), "categories: expected an integer of at least 1, got None"),
        (lambda: nb.spec(2, 2, "normal", smoothing=2.0), "smoothing must be at most 1"),
        (lambda: nb.learned(nb.learned(model)), "one head with Eye"),
        (lambda: nb.learned(nb.fit_multinomial(X, Y)), "trainable already"),
        (lambda: nb.learned(3), "expected a kapsi.Model, got int"),
    ]:
        with pytest.raises(KapsiError, match=message):
            call()
