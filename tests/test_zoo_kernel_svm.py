"""Support vector machines as models of kapsi: imported from scikit-learn, trained by the primal, and by the dual."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import svm
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.multiclass import _ovr_decision_function

import kapsi as kp
from kapsi.zoo.kernel_svm import convert, fit_dual, fit_primal, from_sklearn, one_vs_rest, spec, support, vote
from kapsi.zoo.kernel_svm import dual as kernel_svm_dual
from kapsi.zoo.kernel_svm.dual import DualOptions, DualProgress, classification, regression, solve_dual
from kapsi.zoo.kernel_svm.model import MAPS
from kapsi.zoo.kernel_svm.parity import PARITY

FEW = settings(max_examples=15, deadline=None, derandomize=True)
SKLEARN = {"linear": "linear", "polynomial": "poly", "rbf": "rbf", "sigmoid": "sigmoid"}


def blobs(rows: int, width: int, classes: int, seed: int = 0, spread: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Return rows around a middle a class, mixed, every class with rows."""
    random = np.random.default_rng(seed)
    y = random.permutation(np.arange(rows) % classes)
    return random.normal(size=(classes, width))[y] * 1.5 + spread * random.normal(size=(rows, width)), y


def outputs(model: kp.Model, x: np.ndarray) -> torch.Tensor:
    return model(torch.from_numpy(x)).detach()


def close(made: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(made.numpy(), np.reshape(expected, made.shape), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------ specifications


def test_specifications_of_all_kernels_and_maps() -> None:
    assert spec("linear", 3) == kp.rpn([3, 1], bias=True)
    assert spec("linear", 3, 4, decision="classes").widths == (3, 4)
    assert spec("rbf", 3, 4).widths == (3, 6)
    assert spec("rbf", 3, 1).widths == (3, 1)
    made = {
        (kernel, features): spec(kernel, 3, features=features, count=7).layers[0].heads[0].expansion
        for kernel, maps in MAPS.items()
        for features in maps
    }
    assert made["polynomial", "explicit"] == kp.PolynomialMap(3, coef0=0.0)
    assert made["rbf", "centers"] == kp.KernelMap("rbf", 7)
    assert made["sigmoid", "centers"] == kp.KernelMap("sigmoid", 7, coef0=0.0)
    assert made["rbf", "random_fourier"] == kp.RandomFourier(7)
    assert made["polynomial", "nystrom"] == kp.Nystrom(7, "polynomial", coef0=0.0)
    assert made["linear", "nystrom"] == kp.Nystrom(7, "linear")
    given_options = spec("polynomial", 3, gamma=0.5, degree=2, coef0=1.5).layers[0].heads[0].expansion
    assert given_options == kp.PolynomialMap(2, 0.5, 1.5)
    for each in made.values():
        head = kp.HeadSpec(each, bias=True)
        assert kp.Model(kp.ModelSpec((3, 1), kp.LayerSpec(head)), seed=0)(torch.ones(2, 3)).shape == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("laplacian", 3), {}, "expected one of linear, polynomial, rbf, sigmoid"),
        (("rbf", 3), {"features": "explicit"}, "of the rbf kernel: expected one of centers, random_fourier, nystrom"),
        (("sigmoid", 3), {"features": "nystrom"}, "of the sigmoid kernel: expected one of centers"),
        (("rbf", 3, 0), {}, "classes.*got 0"),
        (("rbf", 3, 2.0), {}, "classes.*got 2.0"),
        (("rbf", 3), {"decision": "ovo"}, "expected one of pairs, classes"),
        (("linear", 3), {"gamma": 1.0}, "the linear kernel has no gamma"),
        (("rbf", 3), {"degree": 2}, "the rbf kernel has no degree"),
        (("rbf", 3), {"coef0": 1.0}, "the rbf kernel has no coef0"),
        (("polynomial", 3), {"coef0": -1.0}, "coef0 must be at least 0"),
    ],
)
def test_specifications_that_do_not_fit(arguments, options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        spec(*arguments, **options)


@FEW
@given(
    st.integers(1, 4), st.integers(1, 5), st.sampled_from([0.0, 0.3, 2.0]), st.booleans(), st.sampled_from([None, 0.7])
)
def test_inner_products_of_the_polynomial_map_are_the_kernel(width, degree, coef0, symmetric, gamma) -> None:
    kappa = kp.ExpansionModule(width, kp.PolynomialMap(degree, gamma, coef0, symmetric), dtype=torch.float64)
    x = np.random.default_rng(width).normal(size=(6, width))
    made = outputs(kappa, x)
    expected = pairwise_kernels(x, metric="poly", degree=degree, gamma=gamma or 1 / width, coef0=coef0)
    close(made @ made.T, expected, 1e-11)


def test_the_polynomial_map_is_calibrated_as_kernels_are() -> None:
    x = torch.from_numpy(blobs(50, 4, 2)[0])
    head = kp.calibrate(kp.Head(4, 1, kp.HeadSpec(kp.PolynomialMap()), dtype=torch.float64), x)
    assert float(head.kappa["log_gamma"].exp()) == pytest.approx(1 / (4 * float(x.var(correction=0))))
    head = kp.calibrate(kp.Head(4, 1, kp.HeadSpec(kp.PolynomialMap(gamma=0.3)), dtype=torch.float64), x)
    assert float(head.kappa["log_gamma"].exp()) == pytest.approx(0.3)
    with pytest.raises(kp.SpecError, match="PolynomialMap\\(degree=32\\): 1,000 inputs"):
        kp.PolynomialMap(32).factors(1000)


# ------------------------------------------------------------------------------------------------ values of pairs


@FEW
@given(st.integers(3, 6), st.integers(0, 10**6))
def test_values_of_the_classes_are_those_of_scikit_learn_ties_and_all(classes, seed) -> None:
    # Small whole numbers: many zeros, and votes that are even.
    values = np.random.default_rng(seed).integers(-2, 3, size=(40, classes * (classes - 1) // 2)).astype(float)
    expected = _ovr_decision_function(values < 0, -values, classes)
    made = one_vs_rest(torch.from_numpy(values))
    close(made, expected, 1e-15)
    assert np.array_equal(vote(torch.from_numpy(values), break_ties=True), expected.argmax(1))


@FEW
@given(st.integers(2, 6), st.integers(0, 10**6))
def test_votes_are_those_of_libsvm(classes, seed) -> None:
    values = np.random.default_rng(seed).integers(-1, 2, size=(40, classes * (classes - 1) // 2)).astype(float)
    expected = []
    for row in values:
        if classes == 2:  # the sign is the other way round
            expected.append(0 if -row[0] > 0 else 1)
            continue
        votes = [0] * classes
        for value, (i, j) in zip(row, itertools.combinations(range(classes), 2), strict=True):
            votes[i if value > 0 else j] += 1
        expected.append(votes.index(max(votes)))
    assert vote(torch.from_numpy(values)).tolist() == expected


def test_values_of_no_number_of_classes() -> None:
    for function in (vote, one_vs_rest):
        for columns in (0, 2, 4, 5):
            with pytest.raises(kp.DataError, match="1, 3, 6, 10"):
                function(torch.ones(3, columns))
    with pytest.raises(kp.DataError, match="two classes have one value"):
        one_vs_rest(torch.ones(3, 1))
    assert vote(torch.ones(2, 5, 3)).shape == (2, 5)
    assert one_vs_rest(torch.ones(2, 5, 6, dtype=torch.float32)).dtype == torch.float32


# ------------------------------------------------------------------------------------------------ imported


@FEW
@given(
    st.sampled_from(list(SKLEARN.values())),
    st.integers(2, 5),
    st.integers(1, 5),
    st.sampled_from(["scale", "auto", 0.3]),
    st.sampled_from([0.1, 1.0, 30.0]),
    st.sampled_from([None, "balanced"]),
    st.booleans(),
)
def test_a_classifier_has_the_same_values_and_classes(kernel, classes, width, gamma, cost, weight, nu) -> None:
    x, y = blobs(60, width, classes, seed=width)
    labels = np.array(["c", "a", "e", "b", "d"])[y]  # not in order of their numbers
    options = {"kernel": kernel, "gamma": gamma, "degree": 2, "coef0": 0.2, "class_weight": weight, "tol": 1e-4}
    made = svm.NuSVC(nu=0.3, **options) if nu else svm.SVC(C=cost, **options)
    theirs = made.set_params(decision_function_shape="ovo").fit(x, labels)
    ours = from_sklearn(theirs)
    assert type(ours) is kp.Model
    new = blobs(50, width, classes, seed=99)[0]
    values = outputs(ours, new)
    # NuSVC may have coefficients of 10⁷ that cancel: no order of the sum has more digits than that leaves.
    tolerance = 1e-9 + 1e-14 * float(abs(theirs.dual_coef_).sum())
    close(values, theirs.decision_function(new), tolerance)
    assert np.array_equal(theirs.classes_[vote(values)], theirs.predict(new))
    if classes > 2:
        theirs.set_params(decision_function_shape="ovr", break_ties=True)
        close(one_vs_rest(values), theirs.decision_function(new), tolerance)
        assert np.array_equal(theirs.classes_[vote(values, break_ties=True)], theirs.predict(new))
    if kernel != "linear":
        assert support(ours) == len(theirs.support_)


@pytest.mark.parametrize("coef0", [0.0, 0.5])
@pytest.mark.parametrize("classes", [2, 4])
def test_a_polynomial_kernel_is_imported_as_monomials(classes, coef0) -> None:
    x, y = blobs(80, 3, classes)
    theirs = svm.SVC(kernel="poly", degree=3, coef0=coef0, decision_function_shape="ovo").fit(x, y)
    ours = from_sklearn(theirs, explicit=True)
    assert ours.layers[0].heads[0].spec.expansion == kp.PolynomialMap(3, theirs._gamma, coef0)
    assert ours.layers[0].heads[0].psi["matrix"].shape[1] == (20 if coef0 else 10)
    new = blobs(40, 3, classes, seed=5)[0]
    close(outputs(ours, new), theirs.decision_function(new))
    close(outputs(from_sklearn(theirs), new), theirs.decision_function(new))


@pytest.mark.parametrize("kernel", list(SKLEARN.values()))
@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_of_sparse_inputs(kernel, classes) -> None:
    x, y = blobs(70, 4, classes)
    x = np.where(abs(x) > 1, x, 0)
    theirs = svm.SVC(kernel=kernel, decision_function_shape="ovo").fit(scipy.sparse.csr_matrix(x), y)
    values = outputs(from_sklearn(theirs), x)
    close(values, theirs.decision_function(scipy.sparse.csr_matrix(x)))
    assert np.array_equal(vote(values), theirs.predict(scipy.sparse.csr_matrix(x)))


@pytest.mark.parametrize("kernel", list(SKLEARN.values()))
@pytest.mark.parametrize("kind", [svm.SVR, svm.NuSVR])
def test_a_regression_has_the_same_predictions(kind, kernel) -> None:
    x = blobs(80, 3, 2)[0]
    y = np.sin(x[:, 0]) + x[:, 1]
    theirs = kind(kernel=kernel, degree=2, coef0=0.1).fit(x, y)
    new = blobs(40, 3, 2, seed=5)[0]
    close(outputs(from_sklearn(theirs), new), theirs.predict(new))


def test_a_regression_without_support_vectors_is_a_constant() -> None:
    x = blobs(20, 3, 2)[0]
    theirs = svm.SVR(epsilon=5.0).fit(x, np.linspace(1, 2, 20))
    ours = from_sklearn(theirs)
    close(outputs(ours, x), theirs.predict(x))
    assert support(ours) == 0


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e5])
def test_gamma_beyond_the_range_of_the_option(scale) -> None:
    x, y = blobs(60, 3, 2)
    theirs = svm.SVC(C=3.0).fit(x * scale, y)
    close(outputs(from_sklearn(theirs), x * scale), theirs.decision_function(x * scale))


def test_linear_classifiers_and_regressions() -> None:
    new = blobs(40, 4, 3, seed=5)[0]
    for classes, options in itertools.product(
        (2, 3), ({}, {"multi_class": "crammer_singer"}, {"fit_intercept": False}, {"class_weight": "balanced"})
    ):
        x, y = blobs(80, 4, classes)
        theirs = svm.LinearSVC(random_state=0, max_iter=100_000, **options).fit(x, y)
        ours = from_sklearn(theirs)
        close(outputs(ours, new), theirs.decision_function(new))
        assert np.array_equal(kp.predict(ours, torch.from_numpy(new), "hinge"), theirs.predict(new))
    for options in ({}, {"fit_intercept": False}):
        regressor = svm.LinearSVR(random_state=0, max_iter=100_000, **options).fit(x, x[:, 0] - x[:, 1])
        close(outputs(from_sklearn(regressor), new), regressor.predict(new))


def fitted(**options: object) -> svm.SVC:
    x, y = blobs(30, 3, 2)
    return svm.SVC(**options).fit(x, y)


def with_probability() -> svm.SVC:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*probability.*", FutureWarning)
        return fitted(probability=True)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: "SVC", {}, "expected SVC, NuSVC, SVR, NuSVR, LinearSVC, LinearSVR; got str"),
        (lambda: svm.OneClassSVM().fit(np.ones((3, 2))), {}, "got OneClassSVM"),
        (lambda: make_pipeline(StandardScaler(), svm.SVC()), {}, "got Pipeline; for a pipeline pass the last step"),
        (svm.SVC, {}, "the SVC is not fitted"),
        (svm.LinearSVR, {}, "the LinearSVR is not fitted"),
        (lambda: svm.SVC(kernel="precomputed").fit(np.eye(4), [0, 1, 0, 1]), {}, "the kernel is precomputed"),
        (lambda: fitted(kernel=lambda a, b: a @ b.T), {}, "the kernel is a function"),
        (with_probability, {}, "probability=True"),
        (fitted, {"explicit": True}, "explicit is for the polynomial kernel, this is rbf"),
        (lambda: svm.LinearSVC().fit([[0.0], [1.0]], [0, 1]), {"explicit": True}, "this is linear"),
        (lambda: fitted(kernel="poly", degree=40, gamma=0.01), {}, "degree must be at most 32"),
        (lambda: fitted(kernel="poly", coef0=-0.5), {"explicit": True}, "coef0 must be at least 0"),
        (lambda: fitted(gamma=0.0), {}, "gamma is 0, expected a finite number above 0"),
    ],
)
def test_what_is_not_carried_over(make, options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        from_sklearn(make(), **options)


def test_too_many_support_vectors_to_be_made_dense(monkeypatch) -> None:
    monkeypatch.setattr(convert, "MAX_SUPPORT", 50)
    with pytest.raises(kp.SpecError, match="support vectors of 3 inputs exceed 50 dense values"):
        from_sklearn(fitted())


def test_only_centers_are_support_vectors() -> None:
    with pytest.raises(kp.SpecError, match="expected a model of one KernelMap, got Identity"):
        support(kp.Model(spec("linear", 3)))
    with pytest.raises(kp.SpecError, match="got str"):
        support("model")


@pytest.mark.parametrize("case", PARITY, ids=lambda case: f"{case.model}, {case.data}")
def test_parity(case) -> None:
    made = case.compare(2)
    assert made.deviation <= case.tolerance
    assert made.ours > 0
    assert made.theirs > 0


# ------------------------------------------------------------------------------------------------ the primal


def primal(model: kp.Model, x: np.ndarray, y: np.ndarray, cost: float | np.ndarray, power: int) -> float:
    """Return ‖W‖²/2 + Σ C max(0, 1 − margin)^power."""
    values, weight = outputs(model, x).numpy(), model.layers[0].heads[0].psi["matrix"].detach()
    if values.shape[1] == 1:
        margin = (2 * y - 1) * values[:, 0]
    else:
        own = np.take_along_axis(values, y[:, None], 1)[:, 0]
        others = np.where(np.eye(values.shape[1], dtype=bool)[y], -np.inf, values).max(1)
        margin = own - others
    return float(weight.square().sum()) / 2 + float((cost * np.maximum(0, 1 - margin) ** power).sum())


@pytest.mark.parametrize("cost", [0.03, 1.0, 20.0])
@pytest.mark.parametrize("weight", [None, {0: 3.0, 1: 0.5}])
def test_the_squared_hinge_reaches_the_objective_of_liblinear(cost, weight) -> None:
    x, y = blobs(150, 4, 2)
    ours = fit_primal(x, y, spec("linear", 4), C=cost, class_weight=weight)
    # liblinear holds the bias down, too; with a large scale hardly.
    theirs = svm.LinearSVC(C=cost, class_weight=weight, intercept_scaling=1e3, dual=False, tol=1e-10, max_iter=10**6)
    of_rows = cost * np.array([3.0, 0.5])[y] if weight else cost
    reached, expected = (primal(model, x, y, of_rows, 2) for model in (ours, from_sklearn(theirs.fit(x, y))))
    assert abs(reached - expected) <= 1e-6 * expected
    close(outputs(ours, x), theirs.decision_function(x), 1e-3)


@pytest.mark.parametrize("cost", [0.03, 20.0])
def test_the_plain_hinge_reaches_the_objective_of_libsvm(cost) -> None:
    x, y = blobs(150, 4, 2)
    ours = fit_primal(x, y, spec("linear", 4), C=cost, loss="hinge")
    theirs = from_sklearn(svm.SVC(kernel="linear", C=cost, tol=1e-6).fit(x, y))
    reached, expected = (primal(model, x, y, cost, 1) for model in (ours, theirs))
    assert -1e-6 <= reached / expected - 1 <= 1e-3


def test_the_primal_on_monomials_is_the_polynomial_kernel() -> None:
    x, y = blobs(150, 3, 2)
    model = spec("polynomial", 3, degree=2, coef0=1.0)
    ours = fit_primal(x, y, model, C=0.5, loss="hinge", class_weight="balanced", epochs=1000)
    theirs = svm.SVC(kernel="poly", degree=2, coef0=1.0, C=0.5, class_weight="balanced", tol=1e-6).fit(x, y)
    expected = primal(from_sklearn(theirs, explicit=True), x, y, 0.5 * len(y) / 2 / np.bincount(y)[y], 1)
    assert primal(ours, x, y, 0.5 * len(y) / 2 / np.bincount(y)[y], 1) == pytest.approx(expected, rel=1e-3)


def test_several_classes_have_the_objective_of_crammer_and_singer() -> None:
    x, y = blobs(150, 4, 3)
    ours = fit_primal(x, y, spec("linear", 4, 3, decision="classes"), C=0.2, loss="hinge", epochs=1000)
    theirs = svm.LinearSVC(
        C=0.2, multi_class="crammer_singer", intercept_scaling=100.0, random_state=0, tol=1e-8, max_iter=10**6
    ).fit(x, y)
    expected = primal(from_sklearn(theirs), x, y, 0.2, 1)
    assert -1e-3 <= primal(ours, x, y, 0.2, 1) / expected - 1 <= 1e-3


@pytest.mark.parametrize("features", ["random_fourier", "nystrom"])
def test_approximate_maps_come_near_the_kernel(features) -> None:
    x, y = blobs(200, 3, 2)
    exact = svm.SVC(C=1.0).fit(x, y)
    made = fit_primal(x, y, spec("rbf", 3, features=features, count=150), C=1.0, loss="hinge", epochs=300)
    agreement = ((outputs(made, x)[:, 0] > 0).numpy() == exact.predict(x)).mean()
    assert agreement > 0.9
    narrow = fit_primal(x, y, spec("rbf", 3, features=features, count=2), C=1.0, loss="hinge", epochs=300)
    assert ((outputs(narrow, x)[:, 0] > 0).numpy() == exact.predict(x)).mean() < agreement


def test_rows_that_weigh_twice_are_rows_that_are_there_twice() -> None:
    x, y = blobs(60, 3, 2)
    weight = 1.0 + np.arange(60) % 2
    again = np.repeat(np.arange(60), weight.astype(int))
    for train in (
        lambda *data, **options: fit_primal(*data[:2], spec("linear", 3), **options),
        lambda *data, **options: fit_dual(*data, gamma=0.5, tolerance=1e-8, **options),
    ):
        once, twice = train(x, y, sample_weight=weight), train(x[again], y[again])
        close(outputs(once, x), outputs(twice, x).numpy(), 1e-5)


# ------------------------------------------------------------------------------------------------ the dual


def dual_objective(machine: svm.SVC | svm.SVR, y: np.ndarray | None = None) -> float:
    """Return ½ βᵀKβ − Σ f β of libsvm's coefficients."""
    beta, name = machine.dual_coef_.ravel(), machine.kernel
    options = {"linear": {}, "rbf": {"gamma": machine._gamma}}.get(
        name, {"gamma": machine._gamma, "coef0": machine.coef0}
    )
    options |= {"degree": machine.degree} if name == "poly" else {}
    gram = pairwise_kernels(machine.support_vectors_, metric=name, **options)
    linear = abs(beta).sum() if y is None else y[machine.support_] @ beta - machine.epsilon * abs(beta).sum()
    return float(beta @ gram @ beta / 2 - linear)


@pytest.fixture(params=["one working set", "many, and few rows kept"])
def sizes(request, monkeypatch) -> dict[str, float]:
    if request.param == "one working set":
        return {}
    monkeypatch.setattr(kernel_svm_dual, "WORKING_SET", 32)
    return {"cache": 32 * 8 * 150 / 2**20}


@pytest.mark.parametrize("weight", [None, {0: 10.0, 1: 0.3}, "balanced"])
@pytest.mark.parametrize("cost", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("kernel", ["linear", "polynomial", "rbf"])
def test_the_dual_reaches_the_objective_of_libsvm(kernel, cost, weight, sizes) -> None:
    x, y = blobs(150, 4, 2, spread=1.0)
    y = np.where(np.arange(150) < 40, 1, y)  # more of class 1, some of them where those of class 0 are
    options = {"degree": 2, "coef0": 0.5} if kernel == "polynomial" else {}
    steps: list[DualProgress] = []
    made = {"kernel": kernel, "C": cost, "class_weight": weight, **options, **sizes}
    ours = fit_dual(x, y, tolerance=1e-6, on_step=steps.append, **made)
    theirs = svm.SVC(kernel=SKLEARN[kernel], C=cost, class_weight=weight, tol=1e-6, **options).fit(x, y)
    assert steps[-1].objective == pytest.approx(dual_objective(theirs), rel=1e-6)
    close(outputs(ours, x), theirs.decision_function(x), 1e-3)
    assert steps[-1].violation <= 1e-6
    assert len(steps) > (8 if sizes else 1)
    falls = np.diff([step.objective for step in steps])
    assert (falls <= 1e-9 * abs(steps[-1].objective)).all()
    # At the tolerance that is usual the objective is as near as is promised.
    fit_dual(x, y, on_step=steps.append, **made)
    assert steps[-1].objective == pytest.approx(dual_objective(theirs), rel=1e-4)


@FEW
@given(st.integers(2, 60), st.integers(1, 4), st.sampled_from([0.05, 1.0, 50.0]), st.integers(0, 10**6))
def test_primal_and_dual_meet(rows, width, cost, seed) -> None:
    x, y = blobs(rows, width, 2, seed)
    steps: list[DualProgress] = []
    ours = fit_dual(x, y, C=cost, gamma=0.5, tolerance=1e-8, on_step=steps.append)
    head = ours.layers[0].heads[0]
    beta, centers = head.psi["matrix"].detach().numpy()[0], head.kappa["centers"].numpy()
    norm = beta @ pairwise_kernels(centers, metric="rbf", gamma=0.5) @ beta
    loss = np.maximum(0, 1 - (2 * y - 1) * outputs(ours, x)[:, 0].numpy()).sum()
    assert norm / 2 + cost * loss == pytest.approx(-steps[-1].objective, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kernel", ["linear", "rbf", "polynomial"])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
def test_the_dual_of_a_regression_reaches_the_objective_of_libsvm(kernel, epsilon, sizes) -> None:
    x = blobs(150, 3, 2)[0]
    y = np.sin(x[:, 0]) + 0.5 * x[:, 1]
    weight = 0.5 + np.arange(150) % 3
    options = {"degree": 2, "coef0": 0.5} if kernel == "polynomial" else {}
    steps: list[DualProgress] = []
    made = {"kernel": kernel, "C": 2.0, "epsilon": epsilon, **options, **sizes}
    ours = fit_dual(x, y, sample_weight=weight, tolerance=1e-6, on_step=steps.append, **made)
    theirs = svm.SVR(kernel=SKLEARN[kernel], C=2.0, epsilon=epsilon, tol=1e-7, **options).fit(x, y, weight)
    assert steps[-1].objective == pytest.approx(dual_objective(theirs, y), rel=1e-6)
    close(outputs(ours, x), theirs.predict(x), 1e-4)


def test_the_default_tube_is_a_tenth_and_may_hold_all_rows() -> None:
    x, y = blobs(40, 2, 2)[0], np.linspace(0, 1, 40)
    close(outputs(fit_dual(x, y), x), outputs(fit_dual(x, y, epsilon=0.1), x).numpy(), 0)
    flat = fit_dual(x, y, epsilon=2.0)
    assert support(flat) == 0
    # Between −1 and 2 every constant is as good; the middle is taken.
    close(outputs(flat, x), np.full(40, 0.5))


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_several_classes_pair_by_pair(kernel) -> None:
    x, y = blobs(120, 3, 4)
    weight = {0: 2.0, 3: 0.5}
    ours = fit_dual(x, y, kernel=kernel, C=2.0, class_weight=weight, tolerance=1e-7)
    options = {"kernel": kernel, "C": 2.0, "class_weight": weight, "tol": 1e-7, "decision_function_shape": "ovo"}
    theirs = svm.SVC(**options).fit(x, y)
    close(outputs(ours, x), theirs.decision_function(x), 1e-4)
    assert np.array_equal(vote(outputs(ours, x)), theirs.predict(x))
    if kernel == "rbf":
        assert support(ours) == pytest.approx(len(theirs.support_), abs=2)


def test_a_kernel_that_is_not_positive_ends_where_the_conditions_are_met() -> None:
    x, y = blobs(150, 3, 2)
    steps: list[DualProgress] = []
    ours = fit_dual(x, y, kernel="sigmoid", gamma=1.0, C=10.0, tolerance=1e-5, on_step=steps.append)
    assert steps[-1].violation <= 1e-5
    margin = (2 * y - 1) * outputs(ours, x)[:, 0].numpy()
    head = ours.layers[0].heads[0]
    beta, centers = abs(head.psi["matrix"].detach().numpy()[0]), head.kappa["centers"].numpy()
    place = np.array([np.flatnonzero((x == center).all(1))[0] for center in centers])
    alpha = np.zeros(150)
    alpha[place] = beta
    assert (margin[alpha == 0] > 1 - 1e-4).all()
    assert (margin[alpha == 10.0] < 1 + 1e-4).all()
    free = (alpha > 0) & (alpha < 10.0)
    assert free.any()
    np.testing.assert_allclose(margin[free], 1, atol=1e-4)


@pytest.mark.parametrize("gamma", ["scale", "auto", 0.2])
def test_gamma_is_that_of_scikit_learn(gamma) -> None:
    x, y = blobs(40, 3, 2)
    ours, theirs = fit_dual(x * 3, y, gamma=gamma), svm.SVC(gamma=gamma).fit(x * 3, y)
    assert float(ours.layers[0].heads[0].kappa["log_gamma"].exp()) == pytest.approx(theirs._gamma)
    assert float(fit_dual(np.ones((4, 2)), [0, 1, 0, 1]).layers[0].heads[0].kappa["log_gamma"]) == 0


def test_equal_rows_of_different_classes() -> None:
    x, y = np.repeat([[0.0, 1.0], [2.0, 0.0]], 3, axis=0), np.array([0, 1, 0, 1, 1, 0])
    ours, theirs = fit_dual(x, y, C=3.0, tolerance=1e-8), svm.SVC(C=3.0, tol=1e-8).fit(x, y)
    close(outputs(ours, x), theirs.decision_function(x), 1e-6)


def test_rows_of_the_kernel_are_kept_within_the_bound() -> None:
    x = torch.from_numpy(blobs(100, 3, 2)[0])
    expected = pairwise_kernels(x.numpy(), metric="rbf", gamma=0.5)
    lines = kernel_svm_dual._KernelRows(x, DualOptions(gamma=0.5, cache=8 * 100 * 20 / 2**20))
    assert lines.cached.nbytes == 8 * 100 * 20
    random = np.random.default_rng(0)
    for _ in range(50):
        rows = random.choice(100, size=int(random.integers(1, 40)), replace=False)
        weights = random.normal(size=len(rows))
        np.testing.assert_allclose(lines.product(rows, weights), weights @ expected[rows], atol=1e-13)
        np.testing.assert_allclose(lines.block(rows), expected[np.ix_(rows, rows)], atol=1e-14)
        held = np.flatnonzero(lines.slot >= 0)
        np.testing.assert_allclose(lines.cached[lines.slot[held]], expected[held], atol=1e-14)
        assert len(held) <= 20
        assert np.isin(held, rows).sum() == min(20, len(rows))
    assert kernel_svm_dual._KernelRows(x, DualOptions(gamma=0.5, cache=1e-6)).cached.shape == (4, 100)
    assert kernel_svm_dual._KernelRows(x, DualOptions(gamma=0.5, cache=1e3)).cached.shape == (100, 100)


def test_a_row_that_was_just_used_is_not_made_again(monkeypatch) -> None:
    x = torch.from_numpy(blobs(30, 3, 2)[0])
    made: list[int] = []
    similarity = kernel_svm_dual.similarity
    monkeypatch.setattr(
        kernel_svm_dual, "similarity", lambda kind, some, *rest: made.append(len(some)) or similarity(kind, some, *rest)
    )
    lines = kernel_svm_dual._KernelRows(x, DualOptions(gamma=0.5, cache=8 * 30 * 10 / 2**20))
    for rows in ([0, 1, 2, 3, 4, 5], [4, 5, 6, 7], [0, 8, 9], [10], [0, 8, 9]):
        lines.product(np.array(rows), np.ones(len(rows)))
    # The tenth slot is taken, and what was used longest ago goes: one of the rows 1 to 3.
    assert made == [6, 2, 2, 1]


def test_the_steps_that_are_allowed_are_over() -> None:
    x, y = blobs(200, 3, 2)
    with pytest.warns(
        UserWarning, match="at 5 steps the optimality conditions are violated by .*tolerance is 0.001; allow"
    ):
        model = fit_dual(x, y, C=10.0, iterations=5)
    assert model(torch.from_numpy(x)).shape == (200, 1)
    solved = solve_dual(classification(y == 1, np.full(200, 1.0)), torch.from_numpy(x))
    assert solved.converged
    assert solved.iterations > 5
    assert abs(solved.coefficients.sum()) < 1e-12


def test_a_solution_of_regression_has_its_rows_balanced() -> None:
    x = blobs(60, 3, 2)[0]
    solved = solve_dual(regression(x[:, 0], np.full(60, 2.0), 0.1), torch.from_numpy(x))
    assert abs(solved.coefficients.sum()) < 1e-12
    assert abs(solved.coefficients).max() <= 2.0


X, Y = blobs(20, 3, 2)


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (scipy.sparse.csr_matrix(X), Y, {}, "use x.toarray"),
        (torch.from_numpy(X).to_sparse(), Y, {}, "use x.to_dense"),
        ("rows", Y, {}, "x: expected numbers"),
        (X[0], Y, {}, "shape \\(rows, m\\)"),
        (X[:0], Y[:0], {}, "at least one row"),
        (X * np.nan, Y, {}, "x: expected finite numbers"),
        (X, Y[:-1], {}, "expected y of shape \\(20,\\)"),
        (X, Y[:, None], {}, "expected y of shape \\(20,\\)"),
        (X, ["a"] * 20, {}, "y .class labels or regression targets.: expected numbers"),
        (X, Y + 1, {}, "class labels 0 to n − 1"),
        (X, Y * 2, {}, "got 0, 2"),
        (X, Y * 0, {}, "at least two classes"),
        (X, Y + np.inf, {}, "y .*: expected finite numbers"),
        (X, Y, {"kernel": "poly"}, "expected one of rbf, linear, polynomial, sigmoid"),
        (X, Y, {"C": 0.0}, "fit_dual\\(C\\): expected a finite number above 0, got 0.0"),
        (X, Y, {"C": "1"}, "C.*got '1'"),
        (X, Y, {"gamma": 0.0}, "gamma.*got 0.0"),
        (X, Y, {"gamma": "wide"}, "expected scale, auto or a finite number"),
        (X, Y, {"kernel": "linear", "gamma": 1.0}, "the linear kernel has no gamma"),
        (X, Y, {"degree": 2}, "the rbf kernel has no degree"),
        (X, Y, {"kernel": "polynomial", "degree": 0}, "degree=0"),
        (X, Y, {"kernel": "polynomial", "coef0": np.nan}, "coef0: expected a finite number, got nan"),
        (X, Y, {"epsilon": 0.1}, "epsilon is for regression"),
        (X, Y * 1.0, {"epsilon": -0.1}, "epsilon.*got -0.1"),
        (X, Y * 1.0, {"class_weight": "balanced"}, "class_weight is for class labels"),
        (X, Y, {"class_weight": "even"}, "expected balanced"),
        (X, Y, {"class_weight": [1.0]}, "a number for each of 2 classes"),
        (X, Y, {"class_weight": {2: 1.0}}, "2 classes, 0 to 1"),
        (X, Y, {"class_weight": {0: -1.0}}, "class_weight.*got -1.0"),
        (X, Y, {"class_weight": {0: 0.0}}, "all rows of class 0 have weight 0"),
        (X, Y, {"sample_weight": np.ones(3)}, "sample_weight as 20 numbers"),
        (X, Y, {"sample_weight": -np.ones(20)}, "not negative"),
        (X, Y, {"sample_weight": "heavy"}, "sample_weight: expected numbers"),
        (X, Y * 1.0, {"sample_weight": np.zeros(20)}, "not all zero"),
        (X, Y, {"tolerance": 0.0}, "tolerance=0.0"),
        (X, Y, {"iterations": 0}, "iterations=0"),
        (X, Y, {"cache": 0}, "cache=0"),
    ],
)
def test_data_and_options_of_the_dual_that_do_not_fit(x, y, options, message) -> None:
    with pytest.raises((kp.SpecError, kp.DataError), match=message):
        fit_dual(x, y, **options)


@pytest.mark.parametrize(
    ("y", "model", "options", "message"),
    [
        (Y, spec("linear", 3), {"loss": "mse"}, "expected one of hinge, squared_hinge"),
        (Y, "linear", {}, "expected a ModelSpec"),
        (Y * 1.0, spec("linear", 3), {}, "fit_dual has regression"),
        (Y, spec("linear", 4), {}, "the data need widths \\(3, 1\\)"),
        (np.arange(20) % 3, spec("linear", 3, 4), {}, "use spec\\(…, decision='classes'\\)"),
        (Y, spec("linear", 3), {"C": -1.0}, "C.*got -1.0"),
    ],
)
def test_data_and_options_of_the_primal_that_do_not_fit(y, model, options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        fit_primal(X, y, model, **options)


# ------------------------------------------------------------------------------------------------ as any other model


def test_an_imported_machine_trains_on_and_is_saved(tmp_path) -> None:
    x, y = blobs(800, 3, 2)
    model = from_sklearn(svm.SVC(C=100.0, gamma=2.0).fit(x[:100], y[:100]))
    kp.save(model, tmp_path / "machine.safetensors")
    data = tuple(map(torch.from_numpy, (x, y)))
    assert torch.equal(kp.load(tmp_path / "machine.safetensors")(data[0]), model(data[0]))
    train, stop, judge = (tuple(part[rows] for part in data) for rows in (slice(200), slice(200, 400), slice(400, 800)))

    def loss() -> float:
        return float(torch.relu(1 - (2 * judge[1] - 1) * model(judge[0]).detach()[:, 0]).mean())

    before = loss()
    kp.fit(model, train, loss="hinge", solver="adamw", epochs=50, validation=stop)
    assert loss() < before


def test_weights_made_sparse_are_the_same() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 4)), draw.integers(0, 3, 60)
    estimator = svm.LinearSVC(random_state=0).fit(x, y)
    expected = torch.tensor(estimator.decision_function(x))
    found = from_sklearn(estimator.sparsify())(torch.tensor(x)).detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_derived_classes_are_refused() -> None:
    class Shifted(svm.SVC):
        def decision_function(self, X):
            return super().decision_function(X) + 1

    draw = np.random.default_rng(0)
    estimator = Shifted().fit(draw.normal(size=(20, 2)), draw.integers(0, 2, 20))
    with pytest.raises(kp.SpecError, match="got Shifted; a derived class may compute something else"):
        from_sklearn(estimator)


def test_reversed_and_foreign_arrays() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(40, 3)), draw.integers(0, 2, 40)
    inputs = torch.tensor(x)
    plain = fit_dual(x[::-1].copy(), y[::-1].copy())(inputs)
    assert torch.equal(fit_dual(x[::-1], y[::-1])(inputs), plain)
    assert torch.equal(fit_dual(x[::-1].astype(">f8"), y[::-1].astype(">i8"))(inputs), plain)


def test_kernels_that_are_no_names() -> None:
    with pytest.raises(kp.SpecError, match="expected one of linear, polynomial, rbf, sigmoid"):
        spec(["rbf"], 4)
