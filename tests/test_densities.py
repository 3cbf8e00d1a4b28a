"""Naive probabilistic expansions: their fits, what they are on both sides of zero, and naive Bayes made of them."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB

import kapsi as kp
from kapsi.expansion.numerics import log_gamma

KINDS = {
    "normal": kp.NaiveNormal,
    "cauchy": kp.NaiveCauchy,
    "laplace": kp.NaiveLaplace,
    "exponential": kp.NaiveExponential,
    "gamma": kp.NaiveGamma,
    "chi_squared": kp.NaiveChiSquared,
}
POSITIVE = ("exponential", "gamma", "chi_squared")


def fitted(expansion, x, y=None, dtype=torch.float64) -> kp.Head:
    """Return a head calibrated on arrays."""
    x = torch.as_tensor(x, dtype=dtype)
    head = kp.Head(x.shape[1], 1, kp.HeadSpec(expansion), dtype=dtype, seed=0)
    return kp.calibrate(head, x, None if y is None else torch.as_tensor(y))


def parameters(head: kp.Head) -> dict[str, np.ndarray]:
    """Return the parameters of a head's κ, positive ones as they are: `scale` for `log_scale`."""
    stored = {name.split(".")[-1]: tensor for name, tensor in head.kappa.state_dict().items()}
    values = {name: tensor.numpy() for name, tensor in stored.items()}
    return {n.removeprefix("log_"): np.exp(v) if n.startswith("log_") else v for n, v in values.items()}


def blobs(rows: int, classes: int, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    y = np.arange(rows) % classes
    centers, widths = generator.normal(size=(2, classes, features))
    return centers[y] * 2 + np.exp(widths)[y] * generator.normal(size=(rows, features)), y


# ------------------------------------------------------------------------------------------------ naive Bayes


def test_class_sums_of_normal_columns_are_the_likelihood_of_gaussian_naive_bayes() -> None:
    x, y = blobs(300, 3, 5, seed=0)
    x[:, 1] *= 1e3  # the variance floor is of the widest input
    x[:, 4] = x[:, 4].round()
    x[y == 2, 4] = 7.0  # constant in a class
    new, _ = blobs(500, 3, 5, seed=1)
    bayes = GaussianNB().fit(x, y)
    head = fitted(kp.NaiveNormal(3), x, y)
    found = parameters(head)
    np.testing.assert_allclose(found["mean"], bayes.theta_, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found["scale"] ** 2, bayes.var_, rtol=1e-10)
    columns = head.expand(torch.from_numpy(new)).dense().numpy().reshape(500, 3, 5)
    joint = columns.sum(-1) + np.log(bayes.class_prior_)
    np.testing.assert_allclose(joint, bayes.predict_joint_log_proba(new), rtol=1e-9)
    assert (joint.argmax(1) == bayes.predict(new)).all()


def trained_accuracy(expansion, train, test) -> float:
    """Return the accuracy on new rows of a model of one layer, calibrated with labels and trained."""
    (x, y), (new, truth) = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in (train, test)]
    model = kp.Model(kp.rpn([x.shape[1], 2], expansion=expansion, bias=True), seed=0, dtype=torch.float64)
    if expansion.count == 2:
        kp.calibrate(model, x, y)
    kp.fit(model, (x, y), kp.TrainConfig(loss="cross_entropy", l2=1e-4))
    with torch.no_grad():
        return float((model(new).argmax(1) == truth).double().mean())


def test_trained_model_on_two_normal_classes_reaches_gaussian_naive_bayes() -> None:
    def at_two(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(rows) % 2
        return (4.0 * y - 2)[:, None] + np.random.default_rng(seed).normal(size=(rows, 1)), y

    train, test = at_two(200, 0), at_two(2000, 1)
    bayes = GaussianNB().fit(*train).score(*test)
    assert bayes > 0.95
    assert trained_accuracy(kp.NaiveNormal(2), train, test) >= bayes - 0.002
    # One N(0, 1) is the same on both sides of zero: guessing is all that is left.
    assert trained_accuracy(kp.NaiveNormal(1), train, test) < 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_tell_minus_two_from_two(kind) -> None:
    for expansion in (KINDS[kind](), kp.NaiveMixed((kind,))):
        head = kp.Head(1, 1, kp.HeadSpec(expansion), dtype=torch.float64)
        low, high = head.expand(torch.tensor([[-2.0], [2.0]]).double()).dense()
        assert float((low - high).abs().max()) > 1


# ------------------------------------------------------------------------------------------------ fits

GENERATOR = np.random.default_rng(5)
SAMPLES = {
    "normal": GENERATOR.normal(3, 0.2, (200, 3)) * [1, 2, 3],
    "cauchy": GENERATOR.standard_cauchy((201, 3)) * [0.1, 1, 20] + [3, -1, 0],
    "laplace": GENERATOR.laplace(1, 2, (200, 3)) * [1, 5, 30],
    "exponential": GENERATOR.exponential(1, (200, 3)) * [1, 5, 30] + 0.01,
    "gamma": GENERATOR.gamma([0.4, 7, 300], [2, 0.1, 3], (200, 3)) + 0.01,
    "chi_squared": GENERATOR.chisquare([0.5, 3, 60], (200, 3)) + 0.01,
}
# SciPy's own fit of a column, as the arguments of logpdf; the last number is how exact that fit is.
SCIPY = {
    "normal": (scipy.stats.norm, {}, lambda t: (t["mean"], t["scale"]), 1e-6),
    "cauchy": (scipy.stats.cauchy, {}, lambda t: (t["location"], t["scale"]), 1e-3),
    "laplace": (scipy.stats.laplace, {}, lambda t: (t["location"], t["scale"]), 1e-10),
    "exponential": (scipy.stats.expon, {"floc": 0}, lambda t: (0, 1 / t["rate"]), 1e-10),
    "gamma": (scipy.stats.gamma, {"floc": 0}, lambda t: (t["shape"], 0, t["scale"]), 1e-9),
    "chi_squared": (scipy.stats.chi2, {"floc": 0, "fscale": 1}, lambda t: (t["degrees"], 0, 1), 1e-3),
}


def compare(kind: str, values: np.ndarray, found: dict[str, float]) -> None:
    """Compare parameters of one column with SciPy's fit, which may be less likely and not more."""
    distribution, fixed, arguments, exact = SCIPY[kind]
    theirs, ours = distribution.fit(values, **fixed), arguments(found)
    np.testing.assert_allclose(ours, theirs, rtol=exact, atol=exact)
    likelihood, best = (distribution.logpdf(values, *a).sum() for a in (ours, theirs))
    assert likelihood > best - 1e-9 * abs(best)


@pytest.mark.parametrize("kind", KINDS)
def test_one_component_is_the_fit_of_scipy(kind) -> None:
    found = parameters(fitted(KINDS[kind](1), SAMPLES[kind]))
    for j in range(3):
        compare(kind, SAMPLES[kind][:, j], {name: value[0, j] for name, value in found.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_components_without_labels_are_fits_of_rank_groups(kind) -> None:
    x = SAMPLES[kind][:200]
    found = parameters(fitted(KINDS[kind](2), x))
    for j in range(3):
        for component, group in enumerate(np.split(np.sort(x[:, j]), 2)):
            compare(kind, group, {name: value[component, j] for name, value in found.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_components_with_labels_are_class_major(kind) -> None:
    x, y = SAMPLES[kind][:200], np.array([5, 5, -1, 5] * 50)
    found = parameters(fitted(KINDS[kind](4), x, y))
    groups = [group for label in (-1, 5) for group in np.array_split(np.sort(x[y == label], 0), 2)]
    for component, group in enumerate(groups):
        for j in range(3):
            compare(kind, group[:, j], {name: value[component, j] for name, value in found.items()})


@pytest.mark.parametrize("kind", ["laplace", "cauchy"])
def test_a_narrow_input_is_fitted_beside_a_wide_one(kind) -> None:
    x = SAMPLES[kind][:, :2] * [1e-6, 1e6]
    alone, found = (parameters(fitted(KINDS[kind](1), values)) for values in (x[:, :1], x))
    for name, value in alone.items():
        np.testing.assert_allclose(found[name][:, :1], value, rtol=1e-9)
    rows, scale = x[:, 0] * 1e6, found["scale"][0, 0] * 1e6
    if kind == "laplace":
        np.testing.assert_allclose(scale, np.abs(rows - np.median(rows)).mean(), rtol=1e-9)
    else:
        np.testing.assert_allclose(scale, scipy.stats.cauchy.fit(rows)[1], rtol=1e-3)


def same(a: kp.Head, b: kp.Head) -> bool:
    return all(np.array_equal(value, parameters(b)[name]) for name, value in parameters(a).items())


def test_labels_are_whole_numbers_of_any_type_and_other_targets_count_as_none() -> None:
    x, y = blobs(60, 2, 3, seed=2)
    kappa = kp.NaiveNormal(2)
    labeled, plain = fitted(kappa, x, y), fitted(kappa, x)
    assert not same(labeled, plain)
    for form in (y.astype(np.float32), y[:, None], y.astype(bool), y.astype(np.int8), y * 3.0 - 7):
        assert same(fitted(kappa, x, form), labeled)
    for form in (y + 0.5, np.stack((y, 1 - y), 1)):
        assert same(fitted(kappa, x, form), plain)
    assert not same(fitted(kp.NaiveMixed(("gamma",)), x, y), fitted(kp.NaiveMixed(("gamma",)), x))


def test_count_that_does_not_fit_the_classes() -> None:
    x, y = blobs(60, 3, 2, seed=2)
    with pytest.raises(
        kp.SpecError,
        match=r"NaiveGamma\(count=4\): y has the 3 classes 0, 1, 2; count must be a multiple of 3: 3, 6, 9, …; or",
    ):
        fitted(kp.NaiveGamma(4), x, y)
    with pytest.raises(kp.SpecError, match=r"the 60 classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …; count must be"):
        fitted(kp.NaiveGamma(4), x, np.arange(60))


@pytest.mark.parametrize("missing", [np.nan, np.inf])
def test_missing_labels_are_refused(missing) -> None:
    x, y = blobs(60, 3, 2, seed=2)
    y = np.where(np.arange(60) < 2, missing, y)
    with pytest.raises(kp.DataError, match=r"NaiveGamma: 2 of 60 labels in y are not finite; drop these rows, or"):
        fitted(kp.NaiveMixed(("gamma",), 3), x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_poor_data_give_finite_parameters_and_columns(kind, dtype) -> None:
    ramp = np.arange(6.0)[:, None] * [1, 1e-8, 1e8]
    cases = [
        np.zeros((1, 3)),
        np.full((7, 3), 5000.1),
        ramp,
        ramp[:3],
        -ramp,
        ramp * [1, 0, 1],
        np.ones((5, 3)) * ramp[1],
    ]
    cases += [np.concatenate((np.ones((9, 3)), np.zeros((1, 3)))), ramp * (1e22 if dtype == torch.float32 else 1e200)]
    for x in cases:
        for count, y in ((1, None), (4, None), (4, np.arange(len(x)) > 0)):
            head = fitted(KINDS[kind](count), x, y, dtype)
            probe = torch.as_tensor(np.concatenate((x, x * 0 + 1e3, x * 0, x * 0 - 1e3)), dtype=dtype).requires_grad_()
            columns = head.expand(probe).dense()
            (gradient,) = torch.autograd.grad(columns.sum(), probe)
            assert bool(columns.isfinite().all())
            assert bool(gradient.isfinite().all())


def test_deviation_of_constant_groups() -> None:
    x = np.stack((np.full(9, 3.3), np.arange(9.0)), 1)
    least = np.sqrt(1e-9 * x[:, 1].var())
    for kappa in (kp.NaiveNormal(1), kp.NaiveLaplace(1), kp.NaiveCauchy(1)):
        np.testing.assert_allclose(parameters(fitted(kappa, x))["scale"][0, 0], least, rtol=1e-9)
        np.testing.assert_allclose(parameters(fitted(kappa, x[:, :1]))["scale"], 1, rtol=1e-9)
    # Two rows of nine alike in their class: of the spread of their own input.
    near = np.stack((np.r_[np.zeros(2), np.arange(7.0)], 1e6 * np.arange(9.0)), 1)
    found = parameters(fitted(kp.NaiveLaplace(2), near, np.r_[0, 0, np.ones(7)]))
    np.testing.assert_allclose(found["scale"][0, 0], np.sqrt(1e-9 * near[:, 0].var()), rtol=1e-9)
    np.testing.assert_allclose(parameters(fitted(kp.NaiveGamma(1), x[:, :1]))["shape"], 1e4, rtol=1e-4)
    huge = fitted(kp.NaiveChiSquared(1), np.full((3, 1), 1e30))
    np.testing.assert_allclose(parameters(huge)["degrees"], 1e6, rtol=1e-5)


def test_smoothing_is_that_of_gaussian_naive_bayes() -> None:
    x = np.stack((np.arange(12.0), np.tile([0.0, 1.0], 6)), 1)
    labels = np.repeat([0, 1], 6)
    for smoothing in (1e-9, 0.05):
        found = parameters(fitted(kp.NaiveNormal(2, smoothing=smoothing), x, labels))
        theirs = GaussianNB(var_smoothing=smoothing).fit(x, labels)
        np.testing.assert_allclose(found["scale"] ** 2, theirs.var_, rtol=1e-12)


@pytest.mark.parametrize("kind", ["normal", "laplace", "cauchy"])
def test_columns_of_zeros_and_ones_do_not_outweigh_the_others(kind) -> None:
    generator = np.random.default_rng(0)
    x = np.stack((generator.normal(size=200), (generator.random(200) < 0.2).astype(float)), 1)
    labels = generator.integers(0, 2, 200)
    for y in (None, labels):
        kappa = KINDS[kind](4)
        found = parameters(fitted(kappa, x, y))
        if kind != "cauchy":  # which has no maximum where most of a group are equal, and grows as a logarithm only
            assert float(found["scale"][:, 1].min()) == pytest.approx(x[:, 1].std() / 4)  # its share of the input
        head = kp.Head(2, 1, kp.HeadSpec(kappa), dtype=torch.float64)
        kp.calibrate(head, torch.from_numpy(x), None if y is None else torch.from_numpy(y))
        assert float(head.expand(torch.from_numpy(x)).dense().abs().max()) < 200


# ------------------------------------------------------------------------------------------------ beyond the support


@pytest.mark.parametrize("floor", [1e-6, 0.01, 3.0])
@pytest.mark.parametrize("kind", POSITIVE)
def test_below_the_floor_columns_fall_and_are_never_flat(kind, floor) -> None:
    kappa = KINDS[kind](3, floor=floor)
    head = kp.Head(1, 1, kp.HeadSpec(kappa), dtype=torch.float64)
    x = floor * torch.tensor([[-1e9], [-1e3], [-1.0], [0.0], [0.999999], [1.0], [1.000001]], dtype=torch.float64)
    x.requires_grad_()
    columns = head.expand(x).dense()
    at = columns[5]
    for row, times in enumerate((1e9 + 2, 1002, 3, 2)):
        torch.testing.assert_close(columns[row], at - np.log(times), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(columns[4], at, rtol=0, atol=1e-5 * max(1, floor))
    torch.testing.assert_close(columns[6], at, rtol=0, atol=1e-5 * max(1, floor))
    (slope,) = torch.autograd.grad(columns.sum(), x)
    assert bool((slope[:5] > 0).all())
    assert kappa.domain(2) == ((6, floor, float("inf")),)


@pytest.mark.parametrize("kind", POSITIVE)
def test_fits_take_inputs_below_the_floor_as_the_floor(kind) -> None:
    x = SAMPLES[kind]
    low = np.where(x < 1, -x, x)
    found = parameters(fitted(kp.NaiveMixed((kind,), 1, floor=1.0), low))
    for j in range(3):
        compare(kind, np.maximum(x[:, j], 1), {name: value[0, j] for name, value in found.items()})


def test_domain_of_a_mixture_is_that_of_each_part() -> None:
    mixture = kp.NaiveMixed(("gamma", "normal"), count=3, floor=0.1)
    assert mixture.domain(2) == ((6, 0.1, float("inf")), (6, -float("inf"), float("inf")))
    assert mixture.factors(2) == (6, 2)


def test_mixture_is_its_parts_side_by_side() -> None:
    x = torch.from_numpy(SAMPLES["normal"])
    parts = [kind(3) for kind in KINDS.values()]
    mixture = fitted(kp.NaiveMixed(count=3), x)
    separate = torch.cat([fitted(part, x).expand(x).dense() for part in parts], -1)
    torch.testing.assert_close(mixture.expand(x).dense(), separate, rtol=0, atol=0)


@pytest.mark.parametrize("kinds", [(), ("normal", "gamma", "normal")])
def test_kinds_are_named_once(kinds) -> None:
    with pytest.raises(kp.SpecError, match="name at least one distribution, and each once"):
        kp.NaiveMixed(kinds)
    with pytest.raises(kp.SpecError, match=r"kinds\[0\]: expected one of normal, cauchy, laplace, exponential"):
        kp.NaiveMixed(("student",))


@pytest.mark.parametrize("kind", KINDS)
def test_every_trained_value_is_a_distribution(kind) -> None:
    head = kp.Head(2, 1, kp.HeadSpec(KINDS[kind](3, learnable=True)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in head.kappa.parameters():
            tensor.copy_(2 * torch.randn(tensor.shape, generator=generator))
    found, (distribution, _, arguments, _) = parameters(head), SCIPY[kind]
    # The density has the mass of one, by the trapezoidal rule on quantiles far into both tails.
    for component in range(3):
        frozen = distribution(*arguments({name: value[component, 0] for name, value in found.items()}))
        grid = frozen.ppf(np.linspace(0.02, 0.98, 20_001))
        grid = grid[grid > 0.01] if kind in POSITIVE else grid
        if len(grid) < 10_000:
            continue  # nearly all of it lies below the floor
        x = torch.from_numpy(grid)[:, None].expand(-1, 2)
        density = head.expand(x).dense().reshape(-1, 3, 2)[:, component, 0].exp().detach().numpy()
        assert np.trapezoid(density, grid) == pytest.approx(frozen.cdf(grid[-1]) - frozen.cdf(grid[0]), rel=1e-4)


# ------------------------------------------------------------------------------------------------ given parameters

# Options of each density, SciPy's names of parameters that it keeps, and both as one component for all inputs.
GIVEN = {
    "normal-mean": ("normal", {"mean": 2.5}, {"floc": 2.5}),
    "normal-std": ("normal", {"std": 0.7}, {"fscale": 0.7}),
    "laplace-location": ("laplace", {"location": 2.0}, {"floc": 2.0}),
    "laplace-scale": ("laplace", {"scale": 5.0}, {"fscale": 5.0}),
    "cauchy-location": ("cauchy", {"location": 1.0}, {"floc": 1.0}),
    "cauchy-scale": ("cauchy", {"scale": 2.0}, {"fscale": 2.0}),
    "gamma-shape": ("gamma", {"shape": 3.0}, {"fa": 3.0, "floc": 0}),
    "gamma-scale": ("gamma", {"scale": 0.5}, {"fscale": 0.5, "floc": 0}),
    "exponential-rate": ("exponential", {"rate": 0.3}, {"floc": 0, "fscale": 1 / 0.3}),
    "chi_squared-degrees": ("chi_squared", {"degrees": 3.0}, {"f0": 3.0, "floc": 0, "fscale": 1}),
}


@pytest.mark.parametrize("case", GIVEN)
def test_calibration_keeps_given_parameters_and_fits_the_others_to_them(case) -> None:
    kind, options, fixed = GIVEN[case]
    ((name, value),) = options.items()
    distribution, _, arguments, _ = SCIPY[kind]
    found = parameters(fitted(KINDS[kind](1, **options), SAMPLES[kind]))
    np.testing.assert_allclose(found["scale" if name == "std" else name], value, rtol=1e-14)
    for j in range(3):
        values, ours = SAMPLES[kind][:, j], arguments({key: table[0, j] for key, table in found.items()})
        if len(found) == 1:  # nothing is left to be fitted
            continue
        theirs = distribution.fit(values, **fixed)
        likelihood, best = (distribution.logpdf(values, *a).sum() for a in (ours, theirs))
        assert likelihood > best - 1e-9 * abs(best)
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("case", GIVEN)
def test_given_parameters_survive_files_and_are_the_density(case, tmp_path) -> None:
    kind, options, _ = GIVEN[case]
    ((name, value),) = options.items()
    expansion = KINDS[kind](2, **{name: (value, 2 * value)})
    spec = kp.rpn([2, 1], expansion=expansion)
    kp.save_spec(spec, tmp_path / "spec.yaml")
    assert kp.load_spec(tmp_path / "spec.yaml") == spec
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    kp.save(model, tmp_path / "model.safetensors")
    loaded = next(kp.load(tmp_path / "model.safetensors").heads())[1]
    found = parameters(loaded)
    stored = found["scale" if name == "std" else name]
    np.testing.assert_allclose(stored, np.array([[value] * 2, [2 * value] * 2]), rtol=1e-14)
    distribution, _, arguments, _ = SCIPY[kind]
    x = np.array([[0.7, 3.0]])
    expected = np.concatenate([distribution.logpdf(x, *arguments({k: t[s] for k, t in found.items()})) for s in (0, 1)])
    np.testing.assert_allclose(loaded.expand(torch.from_numpy(x)).dense().numpy(), expected.reshape(1, 4), rtol=1e-12)


def test_calibration_keeps_trained_values_of_given_parameters() -> None:
    head = kp.Head(1, 1, kp.HeadSpec(kp.NaiveNormal(1, learnable=True, mean=0.0)), dtype=torch.float64)
    head.assign("expansion", mean=[[2.0]])
    kp.calibrate(head, torch.tensor([[1.0], [4.0]]).double())
    assert head.kappa["mean"].item() == 2
    assert head.kappa["log_scale"].exp().item() ** 2 == pytest.approx((1 + 4) / 2)


def test_invalid_given_parameters_name_what_is_allowed() -> None:
    with pytest.raises(kp.SpecError, match=r"NaiveNormal\(mean=.*\): expected one number, or 3 numbers, one for each"):
        kp.NaiveNormal(3, mean=(0.0, 1.0))
    with pytest.raises(kp.SpecError, match=r"NaiveGamma\(shape=-1.0\): shape must be from 1e-30 to 1e\+30"):
        kp.NaiveGamma(shape=-1)
    with pytest.raises(kp.SpecError, match="smoothing has no effect with a given std"):
        kp.NaiveNormal(std=1, smoothing=0.1)
    with pytest.raises(kp.SpecError, match="mean: expected"):
        kp.NaiveNormal(mean="zero")


# ------------------------------------------------------------------------------------------------ joint densities


def test_joint_normal_of_classes_is_quadratic_discriminant_analysis() -> None:
    x, y = blobs(300, 3, 4, seed=0)
    x = x @ np.random.default_rng(3).normal(size=(4, 4)) * [1, 10, 0.1, 1]  # correlated
    spec = kp.ModelSpec((4, 3), kp.LayerSpec(kp.HeadSpec(kp.JointNormal(3), kp.Eye(), kp.ConstantRemainder())))
    model = kp.calibrate(kp.Model(spec, dtype=torch.float64), torch.from_numpy(x), torch.from_numpy(y))
    priors = np.bincount(y) / len(y)
    model.layers[0].heads[0].assign("remainder", value=torch.from_numpy(np.log(priors)))
    joint = model(torch.from_numpy(x)).numpy()
    expected = np.stack(
        [
            scipy.stats.multivariate_normal.logpdf(x, x[y == c].mean(0), np.cov(x[y == c].T, bias=True))
            for c in range(3)
        ],
        1,
    )
    np.testing.assert_allclose(joint, expected + np.log(priors), rtol=1e-5, atol=1e-5)
    theirs = QuadraticDiscriminantAnalysis(solver="svd").fit(x, y).predict(x)
    assert (joint.argmax(1) == theirs).mean() > 0.99  # divides by one row less


def test_joint_normal_without_labels_separates_clusters() -> None:
    x, y = blobs(400, 2, 3, seed=4)
    x[y == 1] += 50
    found = fitted(kp.JointNormal(2), x).kappa
    means = np.sort(found["mean"].numpy(), 0)
    np.testing.assert_allclose(means, np.sort([x[y == c].mean(0) for c in (0, 1)], 0), rtol=1e-9)


def test_joint_normal_of_poor_data_is_finite() -> None:
    cases = [np.zeros((1, 3)), np.ones((5, 3)) * [1, 2, 3], np.arange(9.0).reshape(3, 3)]
    for x in cases:
        for count in (1, 2):
            head = fitted(kp.JointNormal(count), x)
            assert bool(head.expand(torch.from_numpy(x + 1)).dense().isfinite().all())
    with pytest.raises(kp.SpecError, match=r"JointNormal\(count=2\): y has 3 classes; count must be a multiple of 3"):
        fitted(kp.JointNormal(2), *blobs(60, 3, 2, seed=2))


@pytest.mark.parametrize("exporting", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_logarithm_of_the_gamma_function_as_exported(monkeypatch, exporting, dtype) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: exporting, raising=False)
    z = torch.logspace(-6, 6, 601, dtype=dtype).requires_grad_()
    value = log_gamma(z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    exact = z.detach().double().numpy()
    close = 1e-13 if dtype == torch.float64 else 1e-6
    assert value.dtype == dtype
    np.testing.assert_allclose(value.detach().double(), scipy.special.gammaln(exact), rtol=close, atol=close)
    np.testing.assert_allclose(slope.double(), scipy.special.digamma(exact), rtol=10 * close, atol=10 * close)
