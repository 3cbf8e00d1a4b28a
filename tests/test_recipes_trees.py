"""Heads of trees: equality with scikit-learn's boosting and forests, weights, seeds, files, sums, and classes without rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.tree import ExtraTreeRegressor

import kapsi as kp
from kapsi.recipes import BoostedPairsHead, BoostedTreesHead, ForestHead, RecipeData, mixture

KINDS = (BoostedTreesHead(most_trees=12), BoostedPairsHead(most_trees=12), ForestHead(trees=7))
EACH = pytest.mark.parametrize("recipe", KINDS, ids=lambda recipe: recipe.name)


def table(rows: int = 120, classes: int = 0, outputs: int = 1, weighted: bool = False, seed: int = 0) -> RecipeData:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, classes or outputs, generator=generator, dtype=torch.float64)
    signal = torch.stack([x[:, 0] * x[:, i % 4] + x[:, 1] for i in range(classes or outputs)], 1) + 0.3 * noise
    weight = torch.randint(1, 4, (rows,), generator=generator).double() if weighted else None
    return RecipeData(
        x=x,
        y=signal.argmax(1) if classes else signal,
        loss=kp.CrossEntropy() if classes else kp.MSE(),
        classes=classes,
        numeric=torch.ones(4, dtype=torch.bool),
        weight=None if weight is None else weight / weight.mean(),
    )


def predict(model: kp.Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


PLAIN = BoostedTreesHead(
    trees=20, learning_rate=0.2, depth=3, min_leaf=15, l2=0.0, subsample=1.0, max_features=1.0, random_trees=0.0
)
"""Without random parts and damping; splits of few rows would be ties, broken by rounding."""
THEIRS = {"n_estimators": 20, "learning_rate": 0.2, "max_depth": 3, "min_samples_leaf": 15}


def test_boosting_of_numbers_equals_that_of_scikit_learn() -> None:
    data = table(weighted=True)
    reference = GradientBoostingRegressor(**THEIRS).fit(data.x, data.y[:, 0], sample_weight=data.weight)
    new = table(seed=1).x
    ours = predict(PLAIN.fit(data), new)[:, 0]
    np.testing.assert_allclose(ours, reference.predict(new), rtol=1e-9, atol=1e-9)


def test_boosting_of_two_classes_equals_that_of_scikit_learn() -> None:
    weight = torch.rand(120, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    data = replace(table(classes=2), weight=weight / weight.mean())
    reference = GradientBoostingClassifier(**THEIRS).fit(data.x, data.y, sample_weight=data.weight)
    new = table(seed=1).x
    ours = predict(PLAIN.fit(data), new)
    # The prior has a thousandth of a row more of each class.
    np.testing.assert_allclose(ours[:, 1] - ours[:, 0], reference.decision_function(new), rtol=0, atol=2e-3)
    np.testing.assert_allclose(ours.log_softmax(1).exp(), reference.predict_proba(new), rtol=0, atol=1e-3)


def test_a_forest_of_numbers_equals_that_of_scikit_learn() -> None:
    data = table(outputs=2, weighted=True)
    forest = ForestHead(trees=9, min_leaf=15)
    random = np.random.RandomState(5)
    ours, new = predict(forest.fit(data, seed=5), table(seed=1).x), table(seed=1).x
    theirs = []
    for _ in range(9):
        single = ExtraTreeRegressor(max_features=1.0, min_samples_leaf=15, random_state=random)
        theirs.append(single.fit(data.x, data.y, sample_weight=data.weight).predict(new))
    np.testing.assert_allclose(ours, np.mean(theirs, 0), rtol=1e-9, atol=1e-9)


def test_a_forest_of_classes_averages_logarithms_of_smoothed_shares() -> None:
    data = table(classes=3)
    # One leaf of each tree holds all rows: the shares are those of the data, and the values relative to them vanish.
    whole = predict(ForestHead(trees=2, min_leaf=120, scale=1.0, smoothing=1.0).fit(data), data.x)
    shares = torch.bincount(data.y).double() / 120
    torch.testing.assert_close(whole.softmax(1), shares.expand(120, 3), rtol=1e-4, atol=1e-4)
    # Leaves of one row and no other: log((1 + α p) / (1 + α)) − log p for its class, log(1 / (1 + α)) for the others.
    single = predict(ForestHead(trees=3, min_leaf=1, scale=2.0, smoothing=0.5).fit(data), data.x)
    prior = (torch.bincount(data.y).double() + 1e-3) / (120 + 3e-3)
    shares = torch.nn.functional.one_hot(data.y, 3).double()
    pure = prior.log() + 2 * (((shares + 0.5 * prior) / 1.5).log() - prior.log())
    # Pure leaves of several rows are more certain.
    assert bool((single.gather(1, data.y[:, None]) >= pure.gather(1, data.y[:, None]) - 1e-9).all())


@EACH
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_rows_of_weight_two_count_twice(recipe, classes) -> None:
    data = table(rows=60, classes=classes)
    # Exact in binary: a leaf of one class has an impurity of exactly 0.
    weight = torch.tensor([0.5, 1.5], dtype=torch.float64).repeat(30)
    # With several inputs, splits of equal gain would be ties, broken by rounding.
    data = replace(data, x=data.x[:, :1], numeric=data.numeric[:1], weight=weight)
    counts = (data.weight / data.weight.min()).round().long()
    repeated = replace(data.take(torch.arange(60).repeat_interleave(counts)), weight=None)
    pair = []
    for rows in (data, repeated):
        # Leaves of one row each exist in both; with more rows repeated ones would count.
        plain = {"min_leaf": 1, "max_features": 1.0}
        if isinstance(recipe, BoostedTreesHead):
            chosen = replace(recipe, trees=3, depth=2, subsample=1.0, random_trees=0.0, l2=0.0, **plain)
        else:
            # In rows of mean weight.
            chosen = replace(recipe, scale=1.0, smoothing=len(rows.x) / 60, **plain)
        pair.append(predict(chosen.fit(rows, seed=3), data.x))
    # The prior of classes has a thousandth of a row more of each.
    torch.testing.assert_close(*pair, rtol=0, atol=1e-3 if classes else 1e-9)


@EACH
@pytest.mark.parametrize("classes", [0, 3])
def test_a_seed_determines_all_bits(recipe, classes) -> None:
    data = table(classes=classes)
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, again, other = (predict(recipe.fit(data, seed=seed), data.x) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


@EACH
@pytest.mark.parametrize("classes", [0, 2, 4])
def test_held_out_outputs_are_those_of_the_chosen_recipe(recipe, classes) -> None:
    data = table(classes=classes, outputs=2)
    folds = data.folds(3)
    crossed = recipe.cross_fit(data, folds[:2], seed=4)
    for train, test in folds[:2]:
        expected = predict(crossed.recipe.fit(data.take(train), seed=4), data.x[test])
        torch.testing.assert_close(crossed.outputs[test], expected, rtol=1e-9, atol=1e-9)
    assert bool(crossed.outputs[folds[2][1]].isnan().all())
    assert crossed.recipe.fit(data).spec.layers[0].heads[0].expansion.trees == (
        crossed.recipe.trees if isinstance(recipe, BoostedTreesHead) else 7
    )


def test_the_number_of_trees_has_the_least_loss_of_held_out_rows() -> None:
    data = table(classes=3, weighted=True)
    folds = data.folds(3)
    recipe = BoostedTreesHead(most_trees=25, learning_rate=0.3)
    losses = []
    for trees in range(1, 26):
        outputs = replace(recipe, trees=trees).cross_fit(data, folds).outputs
        losses.append(float(data.weight @ data.loss.rows(outputs, data.y)))
    assert recipe.cross_fit(data, folds).recipe.trees == 1 + int(np.argmin(losses)) < 25
    early = replace(recipe, patience=1).cross_fit(data, folds).recipe.trees
    assert all(a > b for a, b in itertools.pairwise(losses[:early]))
    assert losses[early] >= losses[early - 1]


@EACH
def test_a_class_without_rows_has_a_low_logit(recipe) -> None:
    data = table(classes=3)
    rare = torch.tensor([5])
    y = data.y.clone()
    y[y == 1] = 0
    y[rare] = 1
    data = replace(data, y=y)
    others = torch.tensor([i for i in range(120) if i not in (3, 4, 5)])
    crossed = recipe.cross_fit(data, [(others, torch.tensor([3, 4, 5]))])
    found = crossed.outputs[[3, 4, 5]]
    assert bool(found.isfinite().all())
    assert bool((found[:, 1] < found[:, [0, 2]].amax(1) - 3).all())
    assert bool((found.argmax(1) != 1).all())
    assert predict(crossed.recipe.fit(data), data.x).shape == (120, 3)


@EACH
def test_files_and_weighted_sums(recipe, tmp_path) -> None:
    data = table(classes=3)
    first, second = (recipe.fit(data, seed=seed) for seed in (0, 1))
    path = tmp_path / "model.safetensors"
    kp.save(first, path)
    assert torch.equal(predict(kp.load(path), data.x), predict(first, data.x))
    expected = 0.25 * predict(first, data.x) + 0.75 * predict(second, data.x)
    both = mixture([first, second], [0.25, 0.75])
    torch.testing.assert_close(predict(both, data.x), expected, rtol=1e-12, atol=1e-12)
    assert len(both.layers[0].heads) == 2


def test_a_forest_of_2000_rows_is_small(tmp_path) -> None:
    data = table(rows=2000, classes=5)
    path = tmp_path / "forest.safetensors"
    kp.save(replace(ForestHead(), scale=1.0, smoothing=1.0, trees=20).fit(data), path)
    assert path.stat().st_size * ForestHead().trees / 20 < 20e6


def test_losses_with_a_link() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 2, generator=generator, dtype=torch.float64)
    rate = torch.where(x[:, :1] > 0.5, 200.0, 3.0).double()
    data = RecipeData(x, torch.poisson(rate, generator), kp.Poisson(), 0, torch.ones(2, dtype=torch.bool))
    model = BoostedTreesHead(trees=200, subsample=1.0, depth=1, random_trees=0.0).fit(data)
    found = predict(model, x).exp()
    torch.testing.assert_close(found, rate, rtol=0.4, atol=0)
    flat = predict(BoostedTreesHead(trees=1, min_leaf=400).fit(data), x).exp()
    torch.testing.assert_close(flat, data.y.mean().expand(400, 1), rtol=1e-6, atol=0)
    assert "averages targets" in str(ForestHead().reason_against(data))


def test_reasons_against() -> None:
    data = table()
    assert [recipe.reason_against(data) for recipe in KINDS] == [None] * 3
    assert "boosted_trees needs a loss with curvature" in str(
        BoostedTreesHead().reason_against(replace(data, loss=kp.training.losses.base.CallableLoss(abs)))
    )


def test_pairs_are_sums_of_functions_of_two_inputs() -> None:
    """Mixed differences of third order vanish."""
    data = table(rows=300)
    model = BoostedPairsHead(trees=30).fit(data)
    low, high = data.x[:100, :3], data.x[100:200, :3]
    rest, total = data.x[200:, 3:], torch.zeros(100, 1, dtype=torch.float64)
    for corner in range(8):
        bits = torch.tensor([(corner >> i) & 1 for i in range(3)], dtype=torch.bool)
        total += (-1) ** int(bits.sum()) * predict(model, torch.cat((torch.where(bits, high, low), rest), 1))
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-12)
    assert BoostedPairsHead.explainable
    assert not BoostedTreesHead.explainable
    with pytest.raises(kp.SpecError, match="depth"):
        BoostedPairsHead(depth=3)


@EACH
def test_estimates_grow_with_the_rows(recipe) -> None:
    few, many = (recipe.seconds(rows, 10, 2) for rows in (100, 10_000))
    assert 0 < few < many


def test_deep_trees_find_interactions_without_a_first_gain() -> None:
    """A checkerboard: no single split separates its classes at all."""
    x = torch.rand(600, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()
    data = RecipeData(x, y, kp.CrossEntropy(), 2, torch.ones(4, dtype=torch.bool))
    _, deep = BoostedTreesHead.offered()
    outputs = deep.cross_fit(data, data.folds(2)).outputs
    assert float((outputs.argmax(1) == y).double().mean()) > 0.95
    assert BoostedPairsHead.offered() == (BoostedPairsHead(),)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_diagonal_of_the_curvature_of_classes_is_that_of_its_factor(smoothing) -> None:
    loss, outputs = (
        kp.CrossEntropy(label_smoothing=smoothing),
        torch.linspace(-2, 2, 15, dtype=torch.float64).view(5, 3),
    )
    labels = torch.tensor([0, 1, 2, 1, 0])
    gradient, root = loss.curvature(outputs, labels)
    short, diagonal = loss.diagonal_curvature(outputs, labels)
    torch.testing.assert_close(short, gradient)
    torch.testing.assert_close(diagonal, root.square().sum(1))
