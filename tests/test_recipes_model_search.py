"""The recipe of a search over given models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression, Ridge

import kapsi as kp
from kapsi.recipes import HeadRecipe, ModelSearch, RecipeData, SelectionRule
from kapsi.recipes.model_search import StandardizedFit
from kapsi.testing.cases import seeded

LINEAR = {
    "name": "linear",
    "model": {
        "widths": [None, None],
        "layers": [{"heads": [{"reconciliation": "zero", "remainder": "linear", "bias": True}]}],
    },
    "penalties": [2.0],
}
QUADRATIC = {
    "name": "quadratic",
    "model": {"widths": [None, None], "layers": {"heads": {"expansion": "taylor", "bias": True}}},
    "penalties": [0.1, 1e-3],
}
X, Y = load_iris(return_X_y=True)


def iris() -> RecipeData:
    x, y = torch.from_numpy(X), torch.from_numpy(Y).long()
    return RecipeData(x, y, kp.CrossEntropy(), 3, torch.ones(4, dtype=torch.bool))


def product() -> RecipeData:
    x = torch.randn(150, 2, dtype=torch.float64, generator=seeded(0)) * 3 + 5
    y = x[:, :1] * x[:, 1:]
    return RecipeData(x, (y - y.mean()) / y.std(), kp.MSE(), 0, torch.ones(2, dtype=torch.bool))


def search(*models: dict, **options) -> ModelSearch:
    given = {"kind": "model_search", "candidates": list(models), "training": {"epochs": 10}, **options}
    return kp.from_dict(given, HeadRecipe)


def test_the_first_that_is_not_surely_worse() -> None:
    """Squared errors of rows: outputs √e have the losses e."""
    generator = np.random.default_rng(0)
    best = generator.random(400)
    near = (best + generator.normal(0.001, 0.1, 400)).clip(0)  # worse by about 0.2 standard errors
    far = best + 0.1
    data = RecipeData(torch.zeros(400, 1), torch.zeros(400, 1, dtype=torch.float64), kp.MSE(), 0, torch.ones(1).bool())

    def chosen(*losses: np.ndarray, rule: str = "one_standard_error") -> int:
        return SelectionRule(rule=rule).index([torch.from_numpy(loss).sqrt()[:, None] for loss in losses], data)

    assert chosen(far, near, best) == 1
    assert chosen(far, best, near) == 1
    assert chosen(best, best) == 0
    assert chosen(near, far, best, rule="best") == int(np.argmin([near.mean(), far.mean(), best.mean()]))


def test_classes_are_counted_by_accuracy_on_request() -> None:
    y = torch.tensor([0, 1, 0, 1])
    data = RecipeData(torch.zeros(4, 1), y, kp.CrossEntropy(), 2, torch.ones(1).bool())
    right = torch.tensor([[0.1, 0.0], [0.0, 0.1], [0.1, 0.0], [0.0, 0.1]], dtype=torch.float64)
    sure = torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0], [0.1, 0.0]], dtype=torch.float64)
    assert SelectionRule("accuracy", "best").index([sure, right], data) == 1
    assert SelectionRule("log_loss", "best").index([sure, right], data) == 0


def test_a_linear_model_is_logistic_regression() -> None:
    recipe = search(LINEAR, training={"solver": {"kind": "lbfgs", "tolerance": 1e-13}, "epochs": 100})
    model = recipe.fit(iris())
    scaled = (X - X.mean(0)) / X.std(0)
    # π has a hundredth of the penalty, and the loss is a mean.
    theirs = LogisticRegression(C=100 / (2.0 * len(Y)), tol=1e-12, max_iter=10_000).fit(scaled, Y)
    logs = model(torch.from_numpy(X)).detach().log_softmax(1)
    np.testing.assert_allclose(logs, theirs.predict_log_proba(scaled), atol=1e-5)


def test_a_linear_model_of_numbers_is_ridge_regression() -> None:
    data = product()
    recipe = search(LINEAR, training={"solver": {"kind": "lbfgs", "tolerance": 1e-13}, "epochs": 100})
    x = data.x.numpy()
    scaled = (x - x.mean(0)) / x.std(0)
    # kapsi: mean square + (λ/200)‖w‖²; scikit-learn: sum of squares + α‖w‖².
    theirs = Ridge(alpha=2.0 / 200 * len(x)).fit(scaled, data.y.numpy()[:, 0])
    np.testing.assert_allclose(recipe.fit(data)(data.x).detach()[:, 0], theirs.predict(scaled), atol=1e-5)


def test_a_product_needs_the_quadratic_model() -> None:
    data = product()
    recipe = search(LINEAR, QUADRATIC, folds=3)
    crossed = recipe.cross_fit(data, data.folds(3), 1)
    assert [(c.name, c.config.l2) for c in crossed.recipe.candidates] == [("quadratic", 1e-3)]
    assert float((crossed.outputs - data.y).square().mean()) < 0.01
    state = torch.get_rng_state()
    model = recipe.fit(data, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(model.layers) == 1
    direct = StandardizedFit(crossed.recipe.candidates[0], data, 1).trained()
    assert torch.allclose(model(data.x), direct.outputs(data.x), atol=1e-9)
    low, high = data.x.aminmax(dim=0)
    assert torch.allclose(model(data.x * 50), model((data.x * 50).clamp(low, high)))


def test_held_out_targets_have_no_influence() -> None:
    data = product()
    folds = data.folds(2)
    y = data.y.clone()
    y[folds[0][1]] = 5.0
    changed = RecipeData(data.x, y, data.loss, 0, data.numeric)
    one, two = (search(QUADRATIC | {"penalties": [0.1]}).cross_fit(rows, folds).outputs for rows in (data, changed))
    assert torch.equal(one[folds[0][1]], two[folds[0][1]])
    assert not torch.allclose(one[folds[1][1]], two[folds[1][1]])


def test_weights_are_repeated_rows() -> None:
    """Without a penalty least squares does not depend on the scale of the inputs."""
    data, weight = product(), torch.ones(150, dtype=torch.float64)
    weight[:50] = 3
    repeated = data.take(torch.cat([torch.arange(150), *[torch.arange(50)] * 2]))
    weighted = RecipeData(data.x, data.y, data.loss, 0, data.numeric, weight / weight.mean())
    recipe = search({**LINEAR, "penalties": [0.0]}, training={"solver": {"kind": "lbfgs", "tolerance": 1e-13}})
    ours, theirs, plain = (recipe.fit(rows)(data.x).detach() for rows in (weighted, repeated, data))
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert not torch.allclose(plain, theirs, atol=0.01)


def test_the_recipe_is_plain_data_and_an_option_of_estimators() -> None:
    recipe = search(LINEAR, QUADRATIC, rule={"by": "accuracy"}, folds=3)
    assert kp.from_dict(kp.to_dict(recipe), HeadRecipe) == recipe
    model = kp.RPNClassifier(recipe=recipe).fit(X, Y)
    assert model.score(X, Y) > 0.95
    assert [row.head for row in model.leaderboard_] == ["model_search"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": []}, "expected at least one"),
        ({"candidates": [LINEAR, LINEAR]}, "with different names"),
        ({"candidates": [{**LINEAR, "penalties": [-1.0]}]}, "penalties: expected numbers of at least 0"),
        (
            {"candidates": [{**LINEAR, "model": {"widths": [3, None]}}]},
            "candidates.linear.model: .*3 inputs and the data 4",
        ),
        ({"folds": 1}, "folds must be at least 2"),
    ],
)
def test_wrong_options_are_named(options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        search(LINEAR, **options).fit(iris())
