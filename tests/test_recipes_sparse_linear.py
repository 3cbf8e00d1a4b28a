"""The linear head of few inputs."""

from dataclasses import replace

import pytest
import torch

import kapsi as kp
from kapsi.recipes import LinearHead, RecipeData, SparseLinearHead, sparse_linear
from kapsi.recipes.sparse_linear import ordered_inputs


def wide(classes: int = 0, weighted: bool = False) -> RecipeData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 300, generator=generator, dtype=torch.float64)
    x[:, 7] *= 1e4
    signal = torch.stack([2e-4 * x[:, 7] - x[:, 40], x[:, 40] + x[:, 123]], 1)
    y = signal + 0.1 * torch.randn(90, 2, generator=generator, dtype=torch.float64)
    weight = torch.rand(90, generator=generator, dtype=torch.float64) + 0.5 if weighted else None
    if classes:
        y = (y[:, 0] > 0).long() + (y[:, 1] > 1).long() * (classes - 2)
    loss = kp.CrossEntropy() if classes else kp.MSE()
    return RecipeData(x, y, loss, classes, torch.ones(300, dtype=torch.bool), weight)


@pytest.mark.parametrize(("classes", "relevant", "ratio"), [(0, {7, 40, 123}, 0.3), (2, {7, 40}, 0.7), (3, {7}, 0.9)])
def test_the_relevant_inputs_come_first(classes, relevant, ratio) -> None:
    data = wide(classes, weighted=True)
    assert set(ordered_inputs(data)[: len(relevant)].tolist()) == relevant
    recipe = SparseLinearHead()
    crossed = recipe.cross_fit(data, data.folds(5))
    assert crossed.recipe.inputs <= 20
    model = crossed.recipe.fit(data)
    assert relevant <= set(model.layers[0].heads[0].kappa["selection"].tolist())
    full = LinearHead().cross_fit(data, data.folds(5)).outputs
    sparse_loss, full_loss = (float(data.loss.mean(outputs, data.y)) for outputs in (crossed.outputs, full))
    assert sparse_loss < ratio * full_loss


@pytest.mark.parametrize("classes", [0, 2])
def test_very_many_inputs_are_screened_by_their_correlations(classes, monkeypatch) -> None:
    data = wide(classes)
    every = ordered_inputs(data)[:2]
    monkeypatch.setattr(sparse_linear, "SCREENED", 30)
    order = ordered_inputs(data)
    assert order[:2].tolist() == every.tolist()
    assert len(order) == len(set(order.tolist())) == 200


def test_coefficients_are_those_of_the_linear_head_with_these_inputs() -> None:
    data = wide(weighted=True)
    model = SparseLinearHead(inputs=3, l2=0.1).fit(data)
    chosen = ordered_inputs(data)[:3]
    narrow = replace(data, x=data.x[:, chosen], numeric=data.numeric[chosen])
    expected = LinearHead(l2=0.1).fit(narrow)(narrow.x)
    torch.testing.assert_close(model(data.x), expected)


def test_held_out_outputs_are_those_of_the_fits_of_the_folds() -> None:
    data = wide()
    crossed = SparseLinearHead().cross_fit(data, data.folds(3))
    for train, test in data.folds(3):
        expected = crossed.recipe.fit(data.take(train))(data.x[test])
        torch.testing.assert_close(crossed.outputs[test], expected.detach(), rtol=1e-6, atol=1e-6)


def test_few_inputs_are_a_reason_against_it() -> None:
    data = wide()
    assert SparseLinearHead().reason_against(data) is None
    few = replace(data, x=data.x[:, :5], numeric=data.numeric[:5])
    assert SparseLinearHead().reason_against(few) == "5 inputs; sparse_linear chooses among more than 30"


def test_constant_targets_and_inputs_do_not_matter() -> None:
    data = wide()
    data.x[:, 5] = 1e9
    data.y[:, 0] = 3.0
    model = SparseLinearHead().fit(data)
    torch.testing.assert_close(model(data.x)[:, 0].detach(), data.y[:, 0], atol=1e-6, rtol=1e-6)
    assert 5 not in model.layers[0].heads[0].kappa["selection"].tolist()
