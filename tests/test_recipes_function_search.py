"""The recipe of a search over given networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.data.problems import problem
from kapsi.paper.experiment import Run
from kapsi.paper.procedures.functions import run
from kapsi.recipes import ConstantHead, FunctionSearch, HeadRecipe, RecipeData, mixture
from kapsi.testing.cases import seeded

LINE = {"heads": {"bias": True}}
CUBIC = {
    "name": "cubic",
    "model": {
        "widths": [None, 1, None],
        "layers": [LINE, {"heads": {"expansion": {"kind": "chebyshev", "degree": 3}, "bias": True}}],
    },
    "place": [[-1, 1]],
    "least_squares_init": True,
}
LINEAR = {"name": "linear", "model": {"widths": [None, None], "layers": [LINE]}}


def search(**options) -> FunctionSearch:
    data = {"kind": "function_search", "candidates": [LINEAR, CUBIC], "training": {"epochs": 40}, **options}
    return kp.from_dict(data, HeadRecipe)


def rows(x: torch.Tensor, y: torch.Tensor) -> RecipeData:
    return RecipeData(x, y, kp.MSE(), 0, torch.ones(x.shape[1], dtype=torch.bool))


def square(targets: int = 1) -> RecipeData:
    x = torch.rand(200, 2, dtype=torch.float64, generator=seeded(0)) * 7 + 3
    y = x.sum(1, keepdim=True) ** 2
    return rows(x, torch.cat([(3.0**i) * y for i in range(targets)], 1))


def test_the_recipe_of_the_experiments_is_that_of_any_rows() -> None:
    """A run of an experiment and the recipe on the same rows have the same validation error and predictions."""
    candidates = {"linear": {"model": LINEAR["model"]}, "cubic": {k: CUBIC[k] for k in CUBIC if k != "name"}}
    options = {"candidates": candidates, "rows": 400, "training": {"epochs": 30}}
    found = run(Run("mine", "E.2", "kapsi", 100, options={**options, "noise": 0.1}))
    x, y, x_test, y_test = map(torch.from_numpy, problem("E.2").split(400, 200, seed=100, noise=0.1))
    recipe = search(training={"epochs": 30}, refit={"epochs": 30})
    model = recipe.fit(rows(x, y[:, None]), 100)
    low, high = x.aminmax(dim=0)
    inside = ((x_test >= low) & (x_test <= high)).all(1)
    assert int(inside.sum()) > 150
    error = float((model(x_test).detach()[:, 0] - y_test).square().mean())
    assert error == pytest.approx(found.score, rel=1e-6)
    assert found.score > 1e-3


def test_the_model_is_one_head_in_the_unit_of_the_data(tmp_path) -> None:
    data = square()
    state = torch.get_rng_state()
    model = search().fit(data, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert float((model(data.x).detach() - data.y).abs().max()) < 0.02 * float(data.y.std())
    assert torch.equal(search().fit(data, 1)(data.x), model(data.x).detach())
    low, high = data.x.aminmax(dim=0)
    margin = (high - low) / 10
    assert torch.allclose(model(data.x * 50).detach(), model((data.x * 50).clamp(low - margin, high + margin)).detach())
    constant = ConstantHead().fit(data)
    assert torch.allclose(
        mixture([model, constant], [0.5, 2.0])(data.x), 0.5 * model(data.x).detach() + 2 * constant(data.x)
    )
    kp.save(model, tmp_path / "function.safetensors")
    assert torch.equal(kp.load(tmp_path / "function.safetensors")(data.x), model(data.x).detach())


def test_several_targets_have_a_scale_each() -> None:
    data = square(targets=3)
    model = search().fit(data)
    assert float(((model(data.x).detach() - data.y).abs().amax(0) / data.y.std(0)).max()) < 0.02


def test_rows_without_weight_have_no_influence() -> None:
    data = square()
    weight = torch.ones(200, dtype=torch.float64)
    weight[::4] = 0
    spoiled = data.y.clone()
    spoiled[::4] = -500.0
    recipe = search(candidates=[CUBIC], edge=0.0)
    models = [
        recipe.fit(RecipeData(data.x, y, data.loss, 0, data.numeric, weight / weight.mean())) for y in (data.y, spoiled)
    ]
    outputs = [model(data.x).detach() for model in models]
    scale = float(data.y.std())
    assert torch.allclose(outputs[0], data.y, atol=0.02 * scale)
    assert torch.allclose(outputs[1], data.y, atol=0.02 * scale)


def test_the_estimator_takes_the_recipe_in_code_and_as_plain_data() -> None:
    x, y = square().x.numpy(), square().y[:, 0].numpy()
    recipe = search(candidates=[CUBIC], training={"epochs": 15}, refit=None)
    by_object = kp.RPNRegressor(recipe=recipe).fit(x, y)
    by_data = kp.RPNRegressor(recipe=kp.to_dict(recipe)).fit(x, y)
    assert by_object.score(x, y) > 0.999
    assert np.array_equal(by_object.predict(x), by_data.predict(x))
    assert [row.head for row in by_object.leaderboard_] == ["function_search"]


def test_the_recipe_is_plain_data() -> None:
    recipe = search(successive_halving={"epochs": 3, "keep": 1}, reference_inputs=10, max_drift=2.0)
    assert kp.from_dict(kp.to_dict(recipe), HeadRecipe) == recipe
    assert all(candidate.config.epochs == 40 for candidate in recipe.candidates)
    assert recipe.candidates[0].config.solver == kp.LevenbergMarquardt()
    restarted = search(training={"solver": {"restarts": 3}}).candidates[0]
    assert restarted.config.solver == kp.LevenbergMarquardt(restarts=3)
    assert FunctionSearch().seconds(100, 2, 1) > search().seconds(100, 2, 1) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": []}, "give one candidate at least"),
        ({"candidates": [LINEAR, LINEAR]}, "different names"),
        ({"candidates": [{"name": "a"}]}, "expected one of model, mlp, kan, got none"),
        ({"candidates": [{"name": "a", "mlp": {"width": 3}}]}, "see kapsi.zoo.mlp.spec"),
        ({"candidates": [{**CUBIC, "after": "linear"}]}, "after: expected the name of a candidate before it"),
        ({"candidates": [{**LINEAR, "model": {"widths": [3, 1], "layers": [LINE]}}]}, "has 3 inputs and the data 2"),
        ({"parameters": 6}, "candidates.cubic.model: 7 parameters are more than the 6"),
        ({"max_drift": 2.0}, "max_drift: needs reference_inputs"),
        ({"edge": 0.7, "tails": 0.7}, "shares that are 1 together at most"),
    ],
)
def test_wrong_options_are_named(options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        search(**options).fit(square())


def test_classes_are_refused() -> None:
    data = square()
    classes = RecipeData(data.x, (data.y[:, 0] > 100).long(), kp.CrossEntropy(), 2, data.numeric)
    assert "squared errors, not cross_entropy" in search().reason_against(classes)
    with pytest.raises(kp.SpecError, match="squared errors"):
        search().fit(classes)
