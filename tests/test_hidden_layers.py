"""Layers of a network as an expansion: a network as one head."""

import pytest
import torch
from torch import nn

import kapsi as kp
from kapsi.recipes import mixture
from kapsi.testing.cases import seeded
from kapsi.training.penalties import Penalties

X = torch.randn(30, 4, dtype=torch.float64, generator=seeded(0))
PERCEPTRON = kp.Layers((7, 5), ({"heads": {"bias": True}, "output": "silu"},))


def network(kappa: kp.Expansion = PERCEPTRON, seed: int = 0) -> kp.Model:
    return kp.Model(kp.rpn([4, 3], kappa, bias=True), seed=seed, dtype=torch.float64)


def test_a_perceptron_is_that_of_torch() -> None:
    model = network()
    expected = nn.Sequential(nn.Linear(4, 7), nn.SiLU(), nn.Linear(7, 5), nn.SiLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        names = ["kappa.model.layers.0.heads.0.", "kappa.model.layers.1.heads.0.", ""]
        for name, linear in zip(names, (expected[0], expected[2], expected[4]), strict=True):
            head = model.layers[0].heads[0]
            head.get_parameter(f"{name}psi.matrix").copy_(linear.weight)
            head.get_parameter(f"{name}bias").copy_(linear.bias)
    assert torch.allclose(model(X), expected(X), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "spec",
    [
        kp.rpn([4, 5, 5, 3], kp.BSpline(5), remainder="linear"),
        kp.rpn([4, 6, 2], kp.Taylor(2), kp.LowRank(2), bias=True, output="tanh"),
        kp.ModelSpec((4, 3, 1), (kp.LayerSpec((kp.HeadSpec(), kp.HeadSpec("b_spline"))), kp.LayerSpec(output="exp"))),
    ],
)
def test_a_network_is_one_head(spec, tmp_path) -> None:
    model = kp.calibrate(kp.Model(spec, seed=1, dtype=torch.float64), X).eval()
    head = kp.one_layer(model)
    assert len(head.layers) == 1
    assert torch.equal(head(X), model(X))
    kp.save(head, tmp_path / "head.safetensors")
    assert torch.equal(kp.load(tmp_path / "head.safetensors")(X), model(X))
    assert kp.one_layer(head) is head


def test_networks_and_other_heads_are_summed() -> None:
    parts = [network(seed=0), network(seed=1), kp.Model(kp.rpn([4, 3], "taylor"), seed=2, dtype=torch.float64)]
    parts.append(kp.one_layer(kp.Model(kp.rpn([4, 2, 3], "taylor"), seed=3, dtype=torch.float64)))
    weights = [0.5, 0.25, 2.0, 1.5]
    both = mixture(parts, weights)
    expected = sum(weight * part(X) for part, weight in zip(parts, weights, strict=True))
    assert torch.allclose(both(X), expected, rtol=1e-12, atol=1e-12)
    assert len(both.layers) == 1
    # Trained tensors of κ belong to a head: no other expansion around it is needed to tell equal ones apart.
    assert [head.spec.expansion for head in both.layers[0].heads][:2] == [PERCEPTRON, PERCEPTRON]


def test_all_layers_are_calibrated_and_trained() -> None:
    kappa = kp.Layers((4,), ({"heads": {"expansion": "b_spline"}},))
    model = kp.calibrate(network(kappa), X * 3)
    inner = model.layers[0].heads[0].kappa["model"].layers[0].heads[0]
    assert torch.equal(inner.kappa["range"], torch.stack((X.amin(0) * 3, X.amax(0) * 3)))
    y = torch.sin(X[:, :1] * X[:, 1:2]).expand(-1, 3)
    before = inner.psi["matrix"].clone()
    history = kp.fit(model, (X * 3, y), epochs=30, solver=kp.AdamW(learning_rate=0.02))
    assert not torch.equal(inner.psi["matrix"], before)
    assert history[-1].loss < history[0].loss / 2


def test_tensors_of_hidden_layers_are_set_by_name() -> None:
    head = network().layers[0].heads[0]
    head.assign("expansion", model={"layers.1.heads.0.bias": torch.arange(5.0)})
    assert torch.equal(head.kappa["model"].layers[1].heads[0].bias, torch.arange(5.0, dtype=torch.float64))
    with pytest.raises(kp.SpecError, match=r"layers\.1\.heads\.0\.bias: expected shape"):
        head.assign("expansion", model={"layers.1.heads.0.bias": torch.arange(4.0)})
    with pytest.raises(kp.SpecError, match=r"layers\.9"):
        head.assign("expansion", model={"layers.9": torch.arange(4.0)})


def test_hidden_layers_have_the_penalties_of_layers() -> None:
    spec = kp.rpn([4, 5, 3], kp.Taylor(2), remainder="linear", bias=True)
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    config = kp.TrainConfig(l2=0.3)
    deep, one = Penalties(model, config), Penalties(kp.one_layer(model), config)
    # One head has ψ = I of its own, 0.3/2 · 3.
    assert torch.allclose(one.value(), deep.value() + 0.45)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": ()}, "at least one width"),
        ({"widths": (3, 3, 3), "layers": ({}, {})}, "4 widths need 3 layers"),
        ({"widths": (0,)}, "must be 1 to"),
        ({"widths": (2**33,)}, "at most"),
        ({"widths": (2**15, 2**15)}, "values in its layers, at most"),
        ({"widths": (None,)}, "widths"),
    ],
)
def test_wrong_sizes_are_refused(options, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        network(kp.from_dict({"kind": "layers", **options}, kp.Expansion))


def test_deep_specifications_are_refused_at_once() -> None:
    data: dict = {"kind": "layers", "widths": [2]}
    for _ in range(7):
        data = {
            "kind": "layers",
            "widths": [2],
            "layers": [{"heads": {"expansion": {"kind": "nested", "parts": [data]}}}],
        }
    deepest = kp.from_dict(data, kp.Expansion)
    assert network(deepest)(X).shape == (30, 3)
    for levels in (8, 200):
        for _ in range(levels - 7):
            data = {"kind": "layers", "widths": [2], "layers": [{"heads": {"expansion": data}}]}
        with pytest.raises(kp.SpecError, match=r"at most 8 are allowed|nested too deeply"):
            kp.from_dict(data, kp.Expansion)
