"""The network head."""

import pytest
import torch
from sklearn.datasets import load_digits, make_friedman1

import kapsi as kp
from kapsi.recipes import ConstantHead, LinearHead, NetworkHead, RecipeData, mixture
from kapsi.recipes.base import held_out_scores
from kapsi.testing.cases import seeded
from kapsi.training.ensembles import Ensemble

SMALL = NetworkHead(widths=(8,), decay=0.1, networks=2, epochs=10)


def table(rows: int = 80, classes: int = 0, seed: int = 0) -> RecipeData:
    x = torch.randn(rows, 3, dtype=torch.float64, generator=seeded(seed))
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:]
    labels = torch.bucketize(y[:, 0], torch.tensor([-0.5, 0.5], dtype=torch.float64))
    loss = kp.CrossEntropy() if classes else kp.MSE()
    return RecipeData(x, labels if classes else y, loss, classes, torch.ones(3, dtype=torch.bool))


def friedman(rows: int = 600) -> RecipeData:
    x, y = (torch.from_numpy(array) for array in make_friedman1(rows, noise=1.0, random_state=0))
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    return RecipeData(x, y[:, None], kp.MSE(), 0, torch.ones(10, dtype=torch.bool))


def test_friedmans_function_is_found() -> None:
    """Boosted trees of CatBoost reach 0.926, bags of scikit-learn's networks 0.924."""
    data = friedman()
    crossed = NetworkHead().cross_fit(data, data.folds(5))
    assert held_out_scores(crossed.outputs, data)[1] > 0.94


@pytest.mark.slow
def test_digits_are_read() -> None:
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-9)
    data = RecipeData(x, y, kp.CrossEntropy(), 10, torch.ones(64, dtype=torch.bool))
    crossed = NetworkHead().cross_fit(data, data.folds(5))
    assert held_out_scores(crossed.outputs, data)[1] >= 0.975


@pytest.mark.parametrize("classes", [0, 3])
def test_a_fit_is_repeated_saved_and_summed(classes, tmp_path) -> None:
    data, state = table(classes=classes), torch.get_rng_state()
    model, again = SMALL.fit(data, 1), SMALL.fit(data, 1)
    assert torch.equal(model(data.x), again(data.x))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(model(data.x), SMALL.fit(data, 2)(data.x))
    assert model(data.x).dtype == torch.float64
    assert [len(model.layers), len(model.layers[0].heads)] == [1, 2]
    kp.save(model, tmp_path / "network.safetensors")
    assert torch.equal(kp.load(tmp_path / "network.safetensors")(data.x), model(data.x))
    linear = LinearHead().fit(data)
    both = mixture([model, linear], [0.5, 2.0])
    assert torch.allclose(both(data.x), 0.5 * model(data.x) + 2 * linear(data.x))


def test_predictions_do_not_run_away() -> None:
    data = table()
    model = SMALL.fit(data)
    low, high = data.x.aminmax(dim=0)
    far = data.x * 50
    assert torch.equal(model(far), model(far.clamp(low, high)))


@pytest.mark.parametrize("classes", [0, 3])
def test_held_out_targets_have_no_influence(classes) -> None:
    data = table(classes=classes)
    folds = data.folds(4)
    test = folds[0][1]
    y = data.y.clone()
    y[test] = 2 - y[test] if classes else 1e3
    changed = RecipeData(data.x, y, data.loss, classes, data.numeric)
    one, two = (SMALL.cross_fit(rows, folds).outputs for rows in (data, changed))
    assert torch.equal(one[test], two[test])
    assert not torch.allclose(one[folds[1][1]], two[folds[1][1]])
    assert bool(one.isfinite().all())


def test_the_decay_is_chosen_by_held_out_rows() -> None:
    data = table(120)
    noise = torch.randn(data.y.shape, dtype=torch.float64, generator=seeded(5))
    head = NetworkHead(widths=(16,), epochs=30)
    chosen = [
        head.cross_fit(RecipeData(data.x, y, data.loss, 0, data.numeric), data.folds(3)).recipe.decay
        for y in (noise, data.y)
    ]
    assert chosen == [3.0, 0.03]


def test_rows_of_no_fold_have_no_outputs() -> None:
    data = table()
    crossed = SMALL.cross_fit(data, data.folds(4)[1:])
    assert torch.equal(crossed.outputs.isnan().all(1).nonzero()[:, 0], data.folds(4)[0][1])


def test_networks_that_diverge_are_left_out(monkeypatch) -> None:
    data = table()
    both = SMALL.fit(data)
    monkeypatch.setattr(Ensemble, "finite", lambda self: torch.tensor([False, True]))
    one = SMALL.fit(data)
    assert len(one.layers[0].heads) == 1
    second = mixture([kp.Model(one.spec, dtype=torch.float64)], [1.0])
    names = {name: name.replace("heads.0", "heads.1", 1) for name in second.state_dict()}
    second.load_state_dict({name: both.state_dict()[names[name]] for name in names})
    for tensor in (second.layers[0].heads[0].psi["matrix"], second.layers[0].heads[0].bias):
        tensor.data.mul_(2)  # a half of the mean of two
    assert torch.allclose(one(data.x), second(data.x))
    monkeypatch.setattr(Ensemble, "finite", lambda self: torch.zeros(len(self.models), dtype=torch.bool))
    assert torch.equal(SMALL.fit(data)(data.x), ConstantHead().fit(data)(data.x))
    assert bool(SMALL.cross_fit(data, data.folds(4)).outputs.isfinite().all())


def test_further_layers_are_a_specification() -> None:
    layers = ({"heads": {"expansion": "taylor", "reconciliation": {"kind": "low_rank", "rank": 2}}, "output": "tanh"},)
    head = kp.from_dict({"kind": "network", "widths": [4], "layers": layers, "decay": 0.1, "epochs": 5}, NetworkHead)
    assert head.fit(table())(table().x).shape == (80, 1)
