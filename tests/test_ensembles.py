"""Training of many small networks at once."""

import math

import pytest
import torch
from torch import nn

import kapsi as kp
from kapsi.testing.cases import seeded
from kapsi.training.ensembles import Ensemble, Schedule

X = torch.randn(40, 3, dtype=torch.float64, generator=seeded(0))
Y = torch.sin(2 * X[:, :1]) * X[:, 1:2]
SPECS = {
    "perceptron": kp.rpn([3, 5, 4, 1], bias=True, output="silu"),
    "products": kp.rpn([3, 4, 1], kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder(), bias=True, output="tanh"),
    "splines": kp.rpn([3, 4, 1], kp.BSpline(4), remainder=kp.LinearRemainder(before="silu")),
}


def models(name: str, count: int = 3) -> list[kp.Model]:
    return [kp.Model(SPECS[name], seed=seed, dtype=torch.float64) for seed in range(count)]


@pytest.mark.parametrize("name", SPECS)
def test_outputs_are_those_of_each_network(name) -> None:
    parts = models(name)
    x = torch.stack((X, -X, X / 2))
    expected = torch.stack([model(rows) for model, rows in zip(parts, x, strict=True)])
    assert torch.allclose(Ensemble(parts).outputs(x), expected, rtol=1e-12, atol=1e-12)


def test_training_equals_adamw_of_torch() -> None:
    rows = [torch.arange(40), torch.arange(20)]
    decay, schedule = [0.0, 0.4], Schedule(epochs=30, batch=40, learning_rate=0.02)
    ensemble = Ensemble(models("perceptron", 2))
    ensemble.train(X, Y, rows, kp.MSE(), schedule, decay=decay)
    # The second network sees its rows twice while the first one sees its rows once.
    counts = [torch.ones(40), torch.cat((torch.full((20,), 2.0), torch.zeros(20)))]
    for number, (start, penalty) in enumerate(zip(models("perceptron", 2), decay, strict=True)):
        net = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 4), nn.SiLU(), nn.Linear(4, 1)).double()
        with torch.no_grad():
            for linear, layer in zip((net[0], net[2], net[4]), start.layers, strict=True):
                linear.weight.copy_(layer.heads[0].psi.matrix)
                linear.bias.copy_(layer.heads[0].bias)
        reference(net, counts[number], penalty, schedule)
        assert torch.allclose(ensemble.member(number)(X), net(X), rtol=1e-9, atol=1e-9)


def reference(net: nn.Module, count: torch.Tensor, penalty: float, schedule: Schedule) -> None:
    matrices = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": penalty}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(schedule.epochs):
        share = (step + 0.5) / schedule.epochs
        rate = share / 0.1 if share < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (share - 0.1) / 0.9)
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * rate
        optimizer.zero_grad()
        (count * (net(X) - Y)[:, 0].square()).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", SPECS)
def test_decay_of_weights_is_that_of_each_network(name) -> None:
    """With a huge decay of one network the weights of this network alone vanish, its bias fits the mean."""
    ensemble, rows = Ensemble(models(name)), [torch.arange(40)] * 3
    ensemble.train(X, Y + 0.5, rows, kp.MSE(), Schedule(40, 40, 0.05), decay=[0.0, 100.0, 0.0], seed=3)
    norms = []
    for i in range(3):
        matrices = [p.detach().flatten() for n, p in ensemble.member(i).named_parameters() if "bias" not in n]
        norms.append(torch.cat(matrices).norm())
    assert norms[1] < 0.3 < min(norms[0], norms[2])


def test_a_network_does_not_depend_on_the_others() -> None:
    schedule, rows = Schedule(5, 10, 0.03), [torch.arange(30), torch.arange(5, 40)]
    one, two = Ensemble(models("splines", 2)), Ensemble(models("splines", 2))
    y = Y.clone()
    y[30:] += 100  # rows of the second network alone
    one.train(X, Y, rows, kp.MSE(), schedule, seed=1)
    two.train(X, y, rows, kp.MSE(), schedule, seed=1)
    assert torch.equal(one.member(0)(X), two.member(0)(X))
    assert not torch.allclose(one.member(1)(X), two.member(1)(X))


def test_rows_of_weight_0_have_no_influence() -> None:
    weight = torch.ones(40, dtype=torch.float64)
    weight[::4] = 0
    y = Y.clone()
    y[::4] = 1e3
    ends = []
    for targets in (Y, y):
        ensemble = Ensemble(models("perceptron", 1))
        ensemble.train(X, targets, [torch.arange(40)], kp.MSE(), Schedule(5, 10, 0.03), weight=weight / weight.mean())
        ends.append(ensemble.member(0)(X))
    assert torch.equal(*ends)


def test_weights_of_classes_are_those_of_repeated_rows() -> None:
    labels = (Y[:, 0] > 0).long()
    spec = kp.rpn([3, 4, 2], bias=True, output="tanh")
    rows, weight = torch.arange(40), torch.ones(40, dtype=torch.float64)
    weight[labels == 1] = 2.0
    repeated = torch.cat((rows, rows[labels == 1]))
    ends = []
    for index, weights in ((rows, weight / weight.mean()), (repeated, None)):
        ensemble = Ensemble([kp.Model(spec, seed=0, dtype=torch.float64)])
        ensemble.train(X, labels, [index], kp.CrossEntropy(), Schedule(20, 100, 0.03), weight=weights)
        ends.append(ensemble.member(0)(X))
    assert torch.allclose(*ends, rtol=1e-9, atol=1e-9)


def test_networks_of_several_specifications_are_refused() -> None:
    with pytest.raises(kp.SpecError, match="one specification"):
        Ensemble([*models("splines", 1), *models("products", 1)])


def test_a_network_that_diverged_is_known() -> None:
    ensemble = Ensemble(models("products", 2))
    ensemble.tensors["layers.0.heads.0.bias"][1, 0] = torch.nan
    assert ensemble.finite().tolist() == [True, False]
