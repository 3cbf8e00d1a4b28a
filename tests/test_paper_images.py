"""The procedure of images and its classifiers: a synthetic set of tiny images, scikit-learn, and counting by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.naive_bayes import GaussianNB, MultinomialNB
from sklearn.svm import SVC, LinearSVC

import kapsi as kp
from kapsi.data.images import ImageData
from kapsi.errors import SpecError
from kapsi.function import coerce
from kapsi.paper.experiment import Run, load_shipped
from kapsi.paper.procedures import images
from kapsi.paper.procedures.classifier_kinds import FittedClassifier
from kapsi.paper.procedures.classifiers import KINDS, NETWORKS, read
from kapsi.paper.procedures.networks import Network
from kapsi.paper.short_forms import merged
from kapsi.recipes import HeadRecipe
from kapsi.recipes.image_products import ImageProductsHead
from kapsi.training.augmentation import shifted

SHAPE = (1, 6, 6)
ADAMW = {"kind": "adamw", "batch_size": 32, "learning_rate": 0.01}
TRAIN = {"solver": ADAMW, "epochs": 4}
NETWORK = {
    "hidden": [8],
    "head": {"expansion": {"kind": "taylor", "degree": 2}, "reconciliation": {"kind": "khatri_rao", "rank": 4}},
    "output": ["batch_norm", {"kind": "dropout", "p": 0.1}],
}


def pictures(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy images of three classes: a bright bar at the left, in the middle, at the right."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 3, rows)
    x = generator.integers(0, 120, (rows, *SHAPE))
    for i, label in enumerate(y):
        x[i, :, :, 2 * label : 2 * label + 2] += 100
    return x.reshape(rows, -1).astype(np.uint8), y.astype(np.int64)


def image_data() -> ImageData:
    return ImageData(*pictures(300, 0), *pictures(120, 1), (0.3,), (0.25,), SHAPE, ("left", "middle", "right"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ImageData]:
    """Put the synthetic set in place of MNIST; what is in the list is what is loaded."""
    data = [image_data()]
    monkeypatch.setattr(images, "load_images", lambda name, folder=None: data[0])
    return data


def one(seed: int = 0, protocol: str = "validation", **options: object) -> Run:
    return Run("discrete", "mnist", "kapsi", seed, protocol, options, None, "images", 1, "accuracy")


def fit(kind: str, x, y, held_x=None, held_y=None, options=None, seed: int = 0, augment=None) -> FittedClassifier:
    """Fit to rows, of which the last ones are held out."""
    if held_x is None:
        return read(kind, options).fit((x, y), classes=3, seed=seed, augment=augment)
    rows = np.concatenate([x, held_x]), np.concatenate([y, held_y])
    return read(kind, options).fit(rows, [lambda: ((x, y), (held_x, held_y))], classes=3, seed=seed, augment=augment)


def rows_of(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = pictures(rows, seed)
    return (x / 255).astype(np.float32), y


# ------------------------------------------------------------------------------------------------ changes of images


def moved(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """Return an image moved, pixel by pixel; what comes in is as the pixel in the corner."""
    out = np.empty_like(image)
    _, height, width = image.shape
    for i in range(height):
        for j in range(width):
            there = 0 <= i - down < height and 0 <= j - right < width
            out[:, i, j] = image[:, i - down, j - right] if there else image[:, 0, 0]
    return out


def test_images_are_shifted_in_every_way_and_in_no_other() -> None:
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.random((400, 2, 5, 4)))
    torch.manual_seed(0)
    out = shifted(x, 1)
    seen = set()
    for before, after in zip(x.numpy(), out.numpy(), strict=True):
        ways = [(d, r) for d in (-1, 0, 1) for r in (-1, 0, 1) if np.array_equal(moved(before, d, r), after)]
        assert len(ways) == 1
        seen.add(ways[0])
    assert len(seen) == 9


def test_about_half_of_the_images_are_flipped() -> None:
    x = torch.rand(500, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    out = images.flipped(x)
    same = (out == x).flatten(1).all(1)
    mirrored = (out == torch.from_numpy(x.numpy()[..., ::-1].copy())).flatten(1).all(1)
    assert bool((same | mirrored).all())
    assert not bool((same & mirrored).any())
    assert 200 < int(mirrored.sum()) < 300


def test_images_are_mixed_with_others_of_the_batch_by_less_than_half() -> None:
    x = torch.eye(60, dtype=torch.float64).reshape(60, 1, 6, 10)  # whose share is in an image can be read off
    torch.manual_seed(0)
    shares = images.mixed(x, 0.5).reshape(60, 60)
    torch.testing.assert_close(shares.sum(1), torch.ones(60, dtype=torch.float64))
    assert bool((shares.diagonal() >= 0.5).all())
    other = (shares - torch.diag(shares.diagonal())).amax(1)
    torch.testing.assert_close(shares.diagonal() + other, torch.ones(60, dtype=torch.float64))
    assert 0.2 < float(other.mean()) < 0.3
    assert float(other.max()) > 0.45
    assert torch.equal(images.mixed(x, 0.0), x)


# ------------------------------------------------------------------------------------------------ runs


def test_probabilities_of_an_image_and_its_mirror_image_are_put_together(made: list[ImageData]) -> None:
    run = one(network=NETWORK, train=TRAIN, flip_test=True)
    data = made[0]
    mirrored = replace(data, test_x=data.test_x.reshape(-1, *SHAPE)[..., ::-1].reshape(len(data.test_x), -1))
    here = images.run(run)
    made[0] = mirrored
    assert images.run(run).score == here.score  # whichever of the two is given
    # A bar at the left is one at the right in the mirror, so that these two cannot be told apart.
    made[0] = data
    assert images.run(one(network=NETWORK, train=TRAIN)).score > 0.9
    assert here.score < 0.8
    with pytest.raises(SpecError, match="flip_test"):
        images.run(one(classifier="naive_bayes_gaussian", flip_test=True))
    with pytest.raises(SpecError, match="mix"):
        images.run(one(network=NETWORK, train=TRAIN, mix=0.7))


def test_a_run_is_chosen_on_held_out_rows_and_scored_on_the_test_rows(made: list[ImageData]) -> None:
    grid = {"train.solver.learning_rate": [1e-9, 0.02]}
    run = one(network=NETWORK, train=TRAIN, grid=grid, held_out=100)
    outcome = images.run(run)
    assert outcome.extra["chosen"] == {"train.solver.learning_rate": 0.02}
    assert [accuracy for _, accuracy in outcome.extra["candidates"]][1] == outcome.validation
    assert outcome.score > 0.9
    assert outcome.extra["held_out_rows"] == 100
    assert outcome.extra["train_rows"] == 300  # the chosen one is fitted again on all of them
    # 4(8 + 37 + 36) and 4(3 + 9 + 8)
    assert outcome.parameters == 324 + 80
    assert outcome.seconds is not None
    assert outcome.seconds >= outcome.extra["cpu_seconds_of_fit"] - 0.01


def test_the_recipe_of_images_is_that_of_tables(made: list[ImageData]) -> None:
    recipe = {"kind": "image_linear", "l2": 0.01}
    outcome = images.run(one(classifier="recipe", recipe=recipe, inputs="pixels"))
    assert outcome.score > 0.9
    assert outcome.parameters == 3 * 37


def test_test_rows_change_nothing_but_the_score(made: list[ImageData]) -> None:
    run = one(network=NETWORK, train=TRAIN, grid={"train.epochs": [1, 4]}, held_out=100)
    first = images.run(run)
    made[0] = replace(made[0], test_y=(made[0].test_y + 1) % 3)
    second = images.run(run)
    assert second.extra["candidates"] == first.extra["candidates"]
    assert second.extra["loss"] == first.extra["loss"]
    assert first.score + second.score <= 1
    assert first.score != second.score


def test_a_run_is_the_same_twice_and_leaves_global_random_states_alone(made: list[ImageData]) -> None:
    run = one(network=NETWORK, train=TRAIN, flip=True, held_out=50)
    options = copy.deepcopy(dict(run.options))
    torch.manual_seed(5)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = images.run(run)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(6)
    second = images.run(run)
    assert (first.score, first.extra["loss"]) == (second.score, second.extra["loss"])
    assert run.options == options
    assert images.run(one(1, network=NETWORK, train=TRAIN, flip=True)).extra["loss"] != first.extra["loss"]


def test_without_a_choice_all_training_rows_are_fitted(made: list[ImageData]) -> None:
    outcome = images.run(one(classifier="svm_linear", inputs="unit", held_out=100))
    own = LinearSVC(random_state=0).fit(made[0].train_x.astype(np.float32) / np.float32(255), made[0].train_y)
    assert outcome.score == own.score(made[0].test_x.astype(np.float32) / np.float32(255), made[0].test_y)
    assert outcome.validation is None


def test_the_protocol_of_the_paper_takes_the_best_epoch_on_the_test_rows(made: list[ImageData]) -> None:
    outcome = images.run(one(protocol="paper", network=NETWORK, train={**TRAIN, "epochs": 6}, held_out=100))
    assert len(outcome.curves["test"]) == 6
    assert outcome.score == max(outcome.curves["test"])
    assert outcome.extra["best_epoch_on_test"] == outcome.score
    assert outcome.curves["test"][outcome.extra["best_epoch"] - 1] == outcome.score
    assert outcome.extra["last_epoch"] == outcome.curves["test"][-1]
    assert outcome.extra["held_out_rows"] == 0
    # Without looking at the test rows the last one counts.
    assert images.run(one(network=NETWORK, train={**TRAIN, "epochs": 6})).score == outcome.extra["last_epoch"]


def test_rows_are_limited(made: list[ImageData]) -> None:
    outcome = images.run(one(classifier="naive_bayes_gaussian", limit_train=100, limit_test=10))
    assert (outcome.extra["train_rows"], outcome.extra["test_rows"]) == (100, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classifier": "nett"}, "there is no 'nett'"),
        ({"classifier": "netwrk"}, "did you mean network"),
        ({"data": "svhn"}, "expected one of mnist, cifar10"),
        ({"inputs": "raw"}, "expected one of normalized, unit"),
        ({"inputs": "pixels"}, "inputs: the classifier recipe needs pixels, and no other takes them"),
        ({"held_out": 300}, "300 of 300 training rows leave none"),
        ({"held_out": -1}, "at least 0"),
        ({"held_out": True}, "expected an integer, got True"),
        ({"classifier": "svm_rbf", "flip": True}, "svm_rbf has none"),
        ({"flip": 1}, "expected true or false"),
        ({"epochs": 3}, "options of network: there is no 'epochs'"),
        ({"train": {"epoch": 3}}, "did you mean 'epochs'"),
        ({"network": {"hiden": [3]}}, "did you mean 'hidden'"),
        ({"grid": {"train.epochs": [1, 2]}}, "need validation rows"),
        ({"grid": {"train.epochs": 3}, "held_out": 10}, "grid.train.epochs: expected a list"),
        ({"classifier": "svm_linear", "solver": "sgd"}, "expected one of liblinear, libsvm"),
        ({"classifier": "svm_linear", "C": "1"}, "expected a number, got '1'"),
        ({"classifier": "svm_rbf", "gamma": -1.0}, "must be at least 1e-12"),
        ({"classifier": "svm_rbf", "early_stopping": True, "held_out": 9}, "is not trained in epochs"),
        ({"classifier": "naive_bayes_multinomial"}, "set inputs to unit"),
        ({"held_out": 200, "limit_train": 200}, "200 of 200 training rows leave none"),
        ({"model": {"widths": [5, None]}, "classifier": "model"}, "has 5 inputs and the data 784"),
        ({"train": {"loss": "mse"}}, "mse"),
        ({"train": {"starts": 3}}, "restarts is an option of the solver levenberg_marquardt"),
        ({"train": {"class_weights": [1.0, 2.0]}}, "class_weights"),
        ({"classifier": "kan", "centered": True}, "needs sparse inputs"),
        (
            {
                "early_stopping": True,
                "held_out": 9,
                "grid": {"train.epochs": [1]},
                "tune": {"train.solver.max_grad_norm": 1.0},
            },
            "tune: needs a selection with a refit",
        ),
        (
            {"refit": False, "held_out": 9, "grid": {"train.epochs": [1]}, "tune_rows": 9},
            "tune_rows: needs a selection with a refit",
        ),
        ({"classifier": "svm_rbf", "flip_test": True}, "svm_rbf has no probabilities"),
        ({"classifier": "mlp", "activation": "rellu"}, "did you mean 'relu'"),
        ({"classifier": "kan", "degree": 0.5}, "expected an integer"),
        ({"classifier": "model"}, "needs 'model'"),
        ({"grid": [1]}, "grid: expected a mapping of options"),
        ({"grid": {"train.epochs.x": [1]}, "train": {"epochs": 2}, "held_out": 10}, "grid train.epochs.x"),
        (
            {"grid": {"train.solver.max_grad_norm": [1.0]}, "tune": {"train.epochs": 0}, "held_out": 10},
            "epochs must be at least 1",
        ),
        ({"tune_rows": 0}, "tune_rows must be at least 1"),
        ({"refit": "no"}, "expected true or false"),
        ({"network": {"hidden": [3, 4], "layers": 5}}, "5 layers have 4 hidden widths"),
    ],
)
def test_what_does_not_fit_is_one_line(made: list[ImageData], options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as error:
        images.run(one(**options))
    assert message in str(error.value)
    assert str(error.value).startswith("discrete, mnist, kapsi")
    assert "\n" not in str(error.value)
    if options != {"held_out": 300}:  # which only the data tell
        with pytest.raises(SpecError) as before:
            images.read_options(one(**options))
        assert str(before.value) == str(error.value)


# ------------------------------------------------------------------------------------------------ classifiers


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns(kind: str) -> None:
    x, y = rows_of(300, 0)
    test_x, test_y = rows_of(120, 1)
    options: dict[str, object] = {"train": TRAIN} if kind in NETWORKS else {}
    if kind == "network":
        options["network"] = NETWORK
    if kind == "model":
        options["model"] = {"widths": [None, None], "layers": {"heads": {"bias": True}}}
    if kind == "recipe":
        options["recipe"] = "linear"
    made = fit(kind, x, y, options=options)
    assert made.kind == kind
    assert made.predict(test_x).dtype == np.int64
    assert float((made.predict(test_x) == test_y).mean()) > 0.9


@pytest.mark.parametrize(
    ("kind", "own", "options", "count"),
    [
        ("svm_linear", LinearSVC(C=0.1, random_state=3), {"C": 0.1}, 3 * 37),
        ("svm_linear", SVC(C=0.1, kernel="linear"), {"C": 0.1, "solver": "libsvm"}, 3 * 37),
        ("naive_bayes_gaussian", GaussianNB(var_smoothing=0.01), {"var_smoothing": 0.01}, 2 * 3 * 36 + 3),
        ("naive_bayes_multinomial", MultinomialNB(alpha=0.5), {"alpha": 0.5}, 3 * 37),
    ],
)
def test_classical_ones_are_those_of_scikit_learn_dense_and_sparse(kind, own, options, count) -> None:
    x, y = rows_of(200, 0)
    test_x, _ = rows_of(100, 1)
    x[x < 0.3] = 0
    test_x[test_x < 0.3] = 0
    expected = copy.deepcopy(own).fit(x, y).predict(test_x)
    made = fit(kind, x, y, options=options, seed=3)
    assert np.array_equal(made.predict(test_x), expected)
    assert made.parameters == count
    sparse = fit(kind, scipy.sparse.csr_matrix(x), y, options=options, seed=3)
    assert float((sparse.predict(scipy.sparse.csr_matrix(test_x)) == expected).mean()) > 0.97


def test_gaussian_naive_bayes_of_sparse_rows_is_that_of_all_of_them(monkeypatch) -> None:
    from kapsi.paper.procedures import classifier_kinds

    monkeypatch.setattr(classifier_kinds, "DENSE_ROWS", 50)
    x, y = rows_of(210, 0)
    x[100:] *= 3
    x[x < 0.3] = 0
    options = {"var_smoothing": 0.1}
    dense = fit("naive_bayes_gaussian", x, y, options=options)
    sparse = fit("naive_bayes_gaussian", scipy.sparse.csr_matrix(x), y, options=options)
    assert np.array_equal(dense.predict(x), sparse.predict(scipy.sparse.csr_matrix(x)))
    with pytest.raises(SpecError, match="the 30 rows to fit are all of one class"):
        fit("svm_linear", x[:30], np.zeros(30, dtype=np.int64))


def test_support_vectors_are_counted() -> None:
    x, y = rows_of(100, 0)
    own = SVC(C=2.0, gamma=0.5).fit(x, y)
    made = fit("svm_rbf", x, y, options={"C": 2.0, "gamma": 0.5})
    vectors = len(own.support_)
    assert made.details["support_vectors"] == vectors
    # Vectors, one coefficient for each of the other classes, and three intercepts.
    assert made.parameters == vectors * 36 + vectors * 2 + 3


def test_the_best_candidate_is_fitted_again_on_all_rows() -> None:
    x, y = rows_of(150, 0)
    test_x, _ = rows_of(100, 1)
    options = {"grid": {"C": [1e-6, 1.0], "gamma": [1e-6, 0.5]}}
    made = fit("svm_rbf", x[:100], y[:100], x[100:], y[100:], options)
    scores = {
        (cost, gamma): SVC(C=cost, gamma=gamma).fit(x[:100], y[:100]).score(x[100:], y[100:])
        for cost in (1e-6, 1.0)
        for gamma in (1e-6, 0.5)
    }
    assert [accuracy for _, accuracy in made.candidates] == list(scores.values())
    best = max(scores, key=lambda key: scores[key])
    assert (made.chosen["C"], made.chosen["gamma"]) == best == (1.0, 0.5)
    assert made.validation == scores[best]
    own = SVC(C=1.0, gamma=0.5).fit(x, y)
    assert made.details["support_vectors"] == len(own.support_)
    assert np.array_equal(made.predict(test_x), own.predict(test_x))
    kept = fit("svm_rbf", x[:100], y[:100], x[100:], y[100:], {**options, "refit": False})
    assert kept.details["support_vectors"] == len(SVC(C=1.0, gamma=0.5).fit(x[:100], y[:100]).support_)


def test_the_choice_can_be_made_on_fewer_rows_and_with_other_options() -> None:
    x, y = rows_of(150, 0)
    options = {"grid": {"C": [1e-3, 1.0]}, "tune_rows": 40, "tune": {"gamma": 0.1}, "gamma": 0.5}
    made = fit("svm_rbf", x[:100], y[:100], x[100:], y[100:], options)
    expected = [SVC(C=cost, gamma=0.1).fit(x[:40], y[:40]).score(x[100:], y[100:]) for cost in (1e-3, 1.0)]
    assert [accuracy for _, accuracy in made.candidates] == expected
    assert made.details["support_vectors"] == len(SVC(C=1.0, gamma=0.5).fit(x, y).support_)


def test_early_stopping_keeps_the_best_epoch_and_fits_once() -> None:
    x, y = rows_of(150, 0)
    options = {"network": NETWORK, "train": {**TRAIN, "epochs": 30, "patience": 2}, "early_stopping": True}
    made = fit("network", x[:100], y[:100], x[100:], y[100:], options)
    assert made.details["best_epoch"] <= made.details["epochs"] <= made.details["best_epoch"] + 2
    assert made.validation == float((made.predict(x[100:]) == y[100:]).mean())
    assert made.rows == 100
    with pytest.raises(SpecError, match="need validation rows"):
        fit("network", x, y, options=options)


def test_networks_take_sparse_rows() -> None:
    x, y = rows_of(200, 0)
    x[x < 0.3] = 0
    options = {"network": {**NETWORK, "output": []}, "train": TRAIN}
    dense = fit("network", x, y, options=options)
    sparse = fit("network", scipy.sparse.csr_matrix(x), y, options=options)
    assert sparse.details["loss"] == pytest.approx(dense.details["loss"], rel=1e-3)


def test_what_changes_the_inputs_of_batches_sees_each_row_once_an_epoch() -> None:
    x, y = rows_of(70, 0)
    seen: list[torch.Tensor] = []

    def augment(batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch.clone())
        return batch

    fit("network", x, y, options={"network": NETWORK, "train": {**TRAIN, "epochs": 2}}, augment=augment)
    rows = torch.cat(seen)
    # Besides, the engine may look at the first rows to know what they are like.
    assert {tuple(row.tolist()) for row in rows} == {tuple(row) for row in x.tolist()}
    orders = [rows[-140:-70], rows[-70:]]
    assert all(torch.equal(torch.sort(order[:, 0])[0], torch.sort(torch.from_numpy(x[:, 0]))[0]) for order in orders)
    assert not torch.equal(*orders)


@pytest.mark.parametrize(
    ("network", "widths", "heads"),
    [
        (Network((8, 4)), (36, 8, 4, 3), 1),
        (Network((), layers=1), (36, 3), 1),
        (Network((8,), layers=1), (36, 3), 1),
        (Network((8,), layers=4, heads=2), (36, 8, 8, 8, 3), 2),
        (Network((8,), input="tanh"), (36, 36, 8, 3), 1),
    ],
)
def test_networks_in_few_words(network: Network, widths: tuple[int, ...], heads: int) -> None:
    spec = network.spec(36, 3)
    assert spec.widths == widths
    assert len(spec.layers[-1].heads) == heads


def test_first_and_last_heads_and_the_inputs_are_their_own() -> None:
    network = Network(
        (8,),
        layers=3,
        head=kp.HeadSpec("taylor"),
        first=kp.HeadSpec("chebyshev"),
        last=kp.HeadSpec("identity"),
        output="relu",
        input="tanh",
    )
    layers = network.spec(36, 3).layers
    assert [type(layer.heads[0].expansion).__name__ for layer in layers[1:]] == ["Chebyshev", "Taylor", "Identity"]
    assert [bool(layer.output) for layer in layers] == [True, True, True, False]
    x = torch.randn(5, 36, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = kp.Model(network.spec(36, 3), seed=0, dtype=torch.float64)
    assert torch.equal(model.layers[0](x), torch.tanh(x))
    assert not list(model.layers[0].parameters())


# ------------------------------------------------------------------------------------------------ experiments


def parameters(run: Run) -> int:
    """Return the number of trained parameters of a network, made on no device."""
    if run.options["classifier"] == "recipe":
        recipe = coerce(HeadRecipe, run.options["recipe"], "recipe")
        assert isinstance(recipe, ImageProductsHead)
        spec = recipe._spec(784, 10)
    elif run.options["classifier"] == "model":
        spec = kp.from_dict(run.options["model"]).sized(784, 10)
    else:
        network = dict(run.options["network"])
        network.update({name: run.options[name] for name in ("layers", "heads") if name in run.options})
        spec = kp.from_dict(network, Network).spec(784, 10)
    return sum(p.numel() for p in kp.Model(spec, device="meta").parameters())


def runs_of(name: str, method: str, row: str | None = None) -> list[Run]:
    experiment = load_shipped(name)
    return [run for run in experiment.plan(seeds=[0]).runs if run.method == method and row in (None, run.row)]


@pytest.mark.parametrize(
    ("method", "most"), [("kapsi", 1_500_000), ("kapsi_still", 1_500_000), ("kapsi_small", 10_000)]
)
def test_models_of_mnist_are_as_small_as_they_say(method: str, most: int) -> None:
    (run,) = runs_of("discrete", method, "mnist")
    assert 0 < parameters(run) <= most


def test_models_of_each_depth_and_width_are_as_small_as_they_say() -> None:
    runs = runs_of("depth-width", "kapsi")
    assert [run.row for run in runs] == [f"{axis} {i}" for axis in ("layers", "heads") for i in range(1, 11)]
    counts = {run.row: parameters(run) for run in runs}
    assert max(counts.values()) <= 2_000_000
    assert all(counts[f"heads {i}"] == i * counts["heads 1"] for i in range(1, 11))
    assert all(counts[f"layers {i}"] < counts[f"layers {i + 1}"] for i in range(1, 10))
    note = load_shipped("depth-width").notes[0]
    assert f"{counts['layers 4']:,} and {counts['heads 1']:,}" in note


@pytest.mark.parametrize("row", ["layers 1", "layers 10", "heads 3"])
def test_a_run_of_depth_and_width_is_done(made: list[ImageData], row: str) -> None:
    (run,) = runs_of("depth-width", "kapsi", row)
    train = merged(run.options["train"], {"epochs": 8, "solver": {"batch_size": 32}})
    outcome = images.run(replace(run, options={**run.options, "train": train}))
    assert outcome.score > 0.5


@pytest.mark.parametrize(
    "method", ["mlp", "kan", "svm_linear", "svm_rbf", "naive_bayes_gaussian", "naive_bayes_multinomial"]
)
def test_what_mnist_is_compared_with_is_chosen_and_fitted(made: list[ImageData], method: str) -> None:
    (run,) = runs_of("discrete", method, "mnist")
    options = {**run.options, "held_out": 100}
    if "train" in options:
        options |= {
            "train": merged(options["train"], {"epochs": 8, "solver": {"batch_size": 32}}),
            "tune": {"train.epochs": 3},
        }
    outcome = images.run(replace(run, options=options))
    assert len(outcome.extra["candidates"]) >= 4
    assert outcome.score > 0.8


def colored(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images of 4 × 4 pixels and three channels, whose class is the brightest channel: flips do not change it."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 3, rows)
    x = generator.integers(0, 180, (rows, 3, 4, 4))
    x[np.arange(rows), y] += 60
    return x.reshape(rows, -1).astype(np.uint8), y.astype(np.int64)


@pytest.mark.parametrize(
    "method",
    [
        "whitened_mlp",
        "paper_model",
        "svm_rbf",
        "naive_bayes_multinomial",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("mlp", "kan", "svm_linear", "naive_bayes_gaussian")),
    ],
)
def test_what_is_done_with_cifar_learns_colored_images(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    names = ("red", "green", "blue")
    data = ImageData(*colored(500, 0), *colored(200, 1), (0.4,) * 3, (0.25,) * 3, (3, 4, 4), names)
    monkeypatch.setattr(images, "load_images", lambda name, folder=None: data)
    (run,) = runs_of("discrete", method, "cifar10")
    options = copy.deepcopy(dict(run.options))
    options |= {"held_out": 100, "limit_train": 0}
    if "train" in options:
        options["train"] = merged(options["train"], {"epochs": 20, "solver": {"batch_size": 25}})
        if "grid" in options:
            options["tune"] = {"train.epochs": 5}
    if method == "whitened_mlp":
        options["model"]["widths"][1:-1] = [20, 16, 16]
        options["model"]["layers"][0]["heads"][0]["expansion"]["count"] = 20
    outcome = images.run(replace(run, options=options))
    assert outcome.score > 0.75
    assert outcome.extra["test_rows"] == 200


def test_the_model_of_cifar_begins_with_principal_components() -> None:
    (run,) = runs_of("discrete", "whitened_mlp", "cifar10")
    spec = kp.from_dict(run.options["model"]).sized(3072, 10)
    model = kp.Model(spec, device="meta")
    assert not list(model.layers[0].parameters())
    widths = [width for width in spec.widths if width is not None]
    assert widths[1] == spec.layers[0].heads[0].expansion.count
    trained = sum(a * b for a, b in pairwise(widths[1:])) + 10
    assert sum(p.numel() for p in model.parameters()) == trained
