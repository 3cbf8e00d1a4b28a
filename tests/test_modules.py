"""Stores, heads, layers and models: the only things with state."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import kapsi as kp
from kapsi.data.problems import problem
from kapsi.function import ROLES
from kapsi.testing import WatchSizes, inputs
from kapsi.zoo import kan

BUSY = kp.HeadSpec(kp.BSpline(3), kp.Masked(), kp.LinearRemainder(bias=True), bias=True, channels=2)


def busy_spec() -> kp.ModelSpec:
    """Return a model in which something of everything is at work."""
    second = kp.HeadSpec(kp.BSpline(3), kp.LowRank(), after=("layer_norm", "gelu"))
    third = kp.HeadSpec(
        kp.Extended((kp.Taylor(2), kp.BSpline(2))),
        kp.DualLowRankKronecker(),
        before=(kp.BatchNorm(affine=True), kp.Dropout(0.2)),
    )
    first = kp.LayerSpec((BUSY, second, third), kp.Concatenation(), ("tanh",))
    return kp.ModelSpec(
        (4, 6, 2), (first, kp.LayerSpec((kp.HeadSpec(kp.Taylor(2), kp.Kronecker()),), output=("batch_norm",)))
    )


def count_calls(monkeypatch: pytest.MonkeyPatch, cls: type[Any]) -> list[Any]:
    """Return a list that grows with each evaluation of a class of expansions."""
    calls: list[Any] = []
    original = cls.__call__

    def counted(self: Any, x: torch.Tensor, params: Any) -> Any:
        calls.append(self)
        return original(self, x, params)

    monkeypatch.setattr(cls, "__call__", counted)
    return calls


# ------------------------------------------------------------------------------------------------ stores


def test_store_gives_tensors_by_name() -> None:
    declared = {"a": kp.Param((2,)), "b": kp.Param((3,), trainable=False), "0": {"c": kp.Param((1,))}}
    store = kp.Store(declared)
    assert isinstance(store["a"], nn.Parameter)
    assert not isinstance(store["b"], nn.Parameter)
    assert store["0"]["c"].shape == (1,)
    assert [name for name, _ in store.named_parameters()] == ["a", "0.c"]
    assert [name for name, _ in store.named_buffers()] == ["b"]
    assert store.names() == ["a", "b", "0.c"]
    assert sorted(store.state_dict()) == ["0.c", "a", "b"]
    assert store.trainable()
    assert not kp.Store({"b": kp.Param((3,), trainable=False)}).trainable()


@pytest.mark.parametrize("name", ["d", "training", "forward", "_declared", "parameters", "reset"])
def test_store_gives_nothing_but_tensors(name) -> None:
    store = kp.Store({"a": kp.Param((2,)), "b": kp.Param((3,))})
    with pytest.raises(KeyError, match=r"there is no tensor .*; choose from a, b"):
        store.__getitem__(name)


# Attributes of every module, methods of the store, and what is not an identifier.
TAKEN = [
    "type",
    "to",
    "float",
    "half",
    "training",
    "forward",
    "parameters",
    "state_dict",
    "dump_patches",
    "T_destination",
]
TAKEN += ["names", "reset", "assign", "trainable", "extra_repr"]
NO_NAMES = ["_x", "__class__", "a.b", "a b", "", "class", "-1", "½", 3, None]


@pytest.mark.parametrize("name", TAKEN + NO_NAMES)
def test_store_refuses_names_that_a_module_uses(name) -> None:
    with pytest.raises(kp.SpecError, match="cannot be the name of a tensor"):
        kp.Store({name: kp.Param((2,))})
    with pytest.raises(kp.SpecError, match="cannot be the name of a tensor"):
        kp.Store({"0": {name: kp.Param((2,))}})


def test_store_is_no_mapping() -> None:
    store = kp.Store({})
    assert bool(store)  # an empty mapping would be false
    for method in ("keys", "values", "items", "get", "__len__", "__iter__", "__contains__", "__setitem__"):
        assert not hasattr(store, method)
    with pytest.raises(TypeError):
        dict(**store)
    with pytest.raises(kp.SpecError, match="is not called"):
        store(torch.ones(3))


def test_store_has_a_channel_axis_where_there_are_channels() -> None:
    assert kp.Store({"a": kp.Param((2, 3))}, channels=4)["a"].shape == (4, 2, 3)
    assert kp.Store({"a": kp.Param((2, 3))})["a"].shape == (2, 3)
    for channels, shape in ((1, (2, 3)), (2, (2, 2, 3))):
        head = kp.Head(3, 2, kp.HeadSpec(channels=channels))
        assert head.psi["matrix"].shape == shape
        assert head.weights().dense().shape == (channels, 2, 3)


def test_types_of_tensors_follow_the_model_but_for_those_with_their_own() -> None:
    head = kp.Head(4, 2, BUSY, dtype=torch.float64)
    assert head.psi["mask"].dtype == torch.bool
    assert {t.dtype for name, t in head.state_dict().items() if "mask" not in name} == {torch.float64}
    half = copy.deepcopy(head).to(torch.bfloat16)
    assert half.psi["mask"].dtype == torch.bool
    assert half.psi["entries"].dtype == half.kappa["range"].dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------ the formula


def test_head_is_its_formula() -> None:
    spec = kp.HeadSpec(
        kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder(), bias=True, channels=3, before=("tanh",), after=("sine",)
    )
    head = kp.Head(3, 4, spec, seed=0, dtype=torch.float64)
    nn.init.normal_(head.bias)
    x = inputs(5, 3) * 2
    kappa = kp.Taylor(2)(x.tanh(), {}).dense().sin()
    torch.testing.assert_close(head.expand(x).dense(), kappa)
    y = torch.einsum("bd,cnd->bn", kappa, head.weights().dense()) + x @ head.pi["matrix"].T + head.bias
    torch.testing.assert_close(head(x), y)
    torch.testing.assert_close(head.remainder(x), x @ head.pi["matrix"].T)
    torch.testing.assert_close(head(x, head.expand(x)), y)


def test_layer_is_the_fusion_of_its_heads_and_then_processed() -> None:
    heads = (kp.HeadSpec(kp.Taylor(2)), kp.HeadSpec(kp.Taylor(2), kp.LowRank()), kp.HeadSpec(bias=True))
    x = inputs(5, 3)
    for fusion, expected in ((kp.Sum(), lambda y: y.sum(0)), (kp.Mean(), lambda y: y.mean(0))):
        layer = kp.Layer(3, 4, kp.LayerSpec(heads, fusion, ("tanh",)), seed=0, dtype=torch.float64)
        outputs = torch.stack([head(x) for head in layer.heads])
        torch.testing.assert_close(layer(x), expected(outputs).tanh())
    weighted = kp.Layer(3, 4, kp.LayerSpec(heads, kp.WeightedSum()), seed=0, dtype=torch.float64)
    with torch.no_grad():
        weighted.fusion["weights"].copy_(torch.tensor([1.0, 2.0, -3.0]))
    a, b, c = (head(x) for head in weighted.heads)
    torch.testing.assert_close(weighted(x), a + 2 * b - 3 * c)


def test_model_is_its_layers_in_sequence() -> None:
    model = kp.Model(busy_spec(), seed=0).eval()
    x = inputs(5, 4, dtype=torch.float32)
    first, second = model.layers
    assert torch.equal(model(x), second(first(x)))
    assert (model.in_features, model.out_features) == (4, 2)
    assert [name for name, _ in model.heads()] == [f"layers.0.heads.{i}" for i in range(3)] + ["layers.1.heads.0"]


def test_an_mlp_is_an_mlp() -> None:
    spec = kp.rpn([5, 7, 6, 3], bias=True, output="relu")
    model = kp.Model(spec, seed=0)
    mlp = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
    linear = [module for module in mlp if isinstance(module, nn.Linear)]
    heads = [head for _, head in model.heads()]
    assert [tuple(head.psi["matrix"].shape) for head in heads] == [tuple(module.weight.shape) for module in linear]
    with torch.no_grad():
        for module, head in zip(linear, heads, strict=True):
            module.bias.normal_()
            head.psi["matrix"].copy_(module.weight)
            head.bias.copy_(module.bias)
    x = torch.randn(11, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), mlp(x))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in mlp.parameters())


def test_defaults_are_a_linear_map() -> None:
    head = kp.Head(3, 2, seed=0)
    assert [name for name, _ in head.named_parameters()] == ["psi.matrix"]
    assert head.spec == kp.HeadSpec(kp.Identity(), kp.Dense(), kp.ZeroRemainder(), False, 1, (), ())
    x = torch.ones(4, 3)
    assert torch.equal(head(x), nn.functional.linear(x, head.psi["matrix"]))
    assert kp.Layer(3, 2).spec == kp.LayerSpec((kp.HeadSpec(),), kp.Sum(), ())


# ------------------------------------------------------------------------------------------------ sharing


def shared_model(**head: Any) -> kp.Model:
    """Return a layer of three heads, the first and the last with equal κ."""
    spec = kp.BSpline(3)
    heads = (
        kp.HeadSpec(spec, kp.Dense(), **head),
        kp.HeadSpec(kp.BSpline(4), kp.LowRank(), **head),
        kp.HeadSpec(spec, kp.LowRank(), bias=True, **head),
    )
    return kp.Model(kp.ModelSpec((3, 4), (kp.LayerSpec(heads),)), seed=0)


def separate(model: kp.Model, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the heads, each evaluated by itself."""
    return torch.stack([head(x) for head in model.layers[0].heads]).sum(0)


COPIES = {
    "itself": lambda model, path: model,
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "pickle": lambda model, path: pickle.loads(pickle.dumps(model)),  # noqa: S301
    "to": lambda model, path: copy.deepcopy(model).to(torch.float64).to(torch.float32),
    "state": lambda model, path: loaded_state(model),
    "file": lambda model, path: saved(model, path),
}


def saved(model: kp.Model, path: Any) -> kp.Model:
    kp.save(model, path)
    return kp.load(path)


def loaded_state(model: kp.Model) -> kp.Model:
    other = kp.Model(model.spec, seed=9)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("way", COPIES)
def test_heads_with_equal_expansions_share_one(way, monkeypatch, tmp_path) -> None:
    model = kp.calibrate(shared_model(), inputs(50, 3, dtype=torch.float32) * 5)
    x = inputs(6, 3, dtype=torch.float32) * 5
    expected = separate(model, x)
    copied = COPIES[way](model, tmp_path / "m.safetensors")
    calls = count_calls(monkeypatch, kp.BSpline)
    y = copied(x)
    assert [kappa.intervals for kappa in calls] == [3, 4]
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    # One set of tensors: what changes for the first head changes for the last.
    first, _, last = copied.layers[0].heads
    assert [name for name in copied.state_dict() if "range" in name] == [
        "layers.0.heads.0.kappa.range",
        "layers.0.heads.1.kappa.range",
    ]
    last.assign("expansion", range=[[-9.0] * 3, [9.0] * 3])
    assert torch.equal(first.expand(x).dense(), last.expand(x).dense())
    assert not torch.allclose(copied(x), y)
    if copied is not model:
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("head", "shared"),
    [
        ({"before": ("tanh",)}, True),
        ({"before": ("layer_norm",), "after": ("batch_norm",)}, True),
        ({"before": ("dropout",)}, False),
        ({"after": ("dropout",)}, False),
        ({"before": (kp.LayerNorm(affine=True),)}, False),
        ({"after": (kp.BatchNorm(affine=True),)}, False),
    ],
    ids=str,
)  # fmt: skip
def test_random_or_trained_processing_is_not_shared(head, shared, monkeypatch) -> None:
    model = shared_model(**head)
    calls = count_calls(monkeypatch, kp.BSpline)
    model(inputs(6, 3, dtype=torch.float32))
    assert len(calls) == (2 if shared else 3)


def test_dropout_of_each_head_is_its_own() -> None:
    head = kp.HeadSpec(before=(kp.Dropout(0.5),))
    layer = kp.Layer(64, 3, kp.LayerSpec((head, head)), seed=0).train()
    with torch.no_grad():
        layer.heads[1].psi["matrix"].copy_(-layer.heads[0].psi["matrix"])
    torch.manual_seed(0)
    assert layer(torch.ones(5, 64)).abs().max() > 0.01  # equal masks would cancel
    assert layer.eval()(torch.ones(5, 64)).abs().max() == 0


def test_different_options_are_not_shared(monkeypatch) -> None:
    heads = (
        kp.HeadSpec(kp.BSpline(3)),
        kp.HeadSpec(kp.BSpline(3, low=-2.0)),
        kp.HeadSpec(kp.BSpline(3), before=("tanh",)),
    )
    layer = kp.Layer(3, 4, kp.LayerSpec(heads), seed=0)
    calls = count_calls(monkeypatch, kp.BSpline)
    layer(torch.ones(2, 3))
    assert len(calls) == 3


def test_a_shared_head_trains_like_one_of_its_own() -> None:
    model = shared_model()
    x = inputs(6, 3, dtype=torch.float32).requires_grad_()
    together = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    apart = torch.autograd.grad(separate(model, x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ randomness


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_seed_decides_and_leaves_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second, third = (kp.Model(busy_spec(), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert same(first, second)
    assert not any(
        torch.equal(p, q) for p, q in zip(first.parameters(), third.parameters(), strict=True) if p.unique().numel() > 2
    )
    generator = torch.Generator().manual_seed(0)
    assert same(kp.Model(busy_spec(), seed=generator), first)
    assert not same(kp.Model(busy_spec(), seed=generator), first)  # the generator has moved on


def test_without_a_seed_torchs_generator_decides() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = kp.Model(busy_spec())
    assert not torch.equal(state, torch.get_rng_state())
    assert not same(kp.Model(busy_spec()), first)
    torch.manual_seed(0)
    assert same(kp.Model(busy_spec()), first)


def test_channels_and_heads_start_differently() -> None:
    layer = kp.Layer(3, 4, kp.LayerSpec((kp.HeadSpec(channels=2), kp.HeadSpec(channels=2))), seed=0)
    matrices = [head.psi["matrix"][c] for head in layer.heads for c in range(2)]
    for i, a in enumerate(matrices):
        assert not any(torch.equal(a, b) for b in matrices[i + 1 :])


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ("0", "expected an integer"),
        (1.5, "expected an integer"),
        (True, "expected an integer"),
        (2**80, "at most 64 bits"),
    ],
)
def test_a_wrong_seed_is_refused(seed, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        kp.Head(3, 2, seed=seed)


def test_initial_values_are_drawn_on_the_cpu_whatever_the_default_device() -> None:
    expected = kp.Model(busy_spec(), seed=0)
    with torch.device("meta"):
        assert same(kp.Model(busy_spec(), seed=0, device="cpu"), expected)


def test_drawing_anew_is_construction_anew() -> None:
    model = kp.Model(busy_spec(), seed=0)
    model.train()(inputs(9, 4, dtype=torch.float32))  # moves the statistics of batch norms
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.reset_parameters(3)
    assert same(model, kp.Model(busy_spec(), seed=3))


def test_a_model_made_on_the_meta_device_is_filled_later() -> None:
    state = torch.get_rng_state()
    blank = kp.Model(busy_spec(), device="meta", dtype=torch.float64)
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn
    assert all(tensor.is_meta for tensor in (*blank.parameters(), *blank.buffers()))
    assert blank(torch.empty(5, 4, dtype=torch.float64, device="meta")).shape == (5, 2)
    blank.to_empty(device="cpu")
    blank.reset_parameters(7)
    assert same(blank, kp.Model(busy_spec(), seed=7, dtype=torch.float64))
    x = inputs(5, 4)
    assert torch.equal(blank.eval()(x), kp.Model(busy_spec(), seed=7, dtype=torch.float64).eval()(x))


def test_initial_values_do_not_depend_on_the_type() -> None:
    single, double = (kp.Model(busy_spec(), seed=0, dtype=dtype) for dtype in (torch.float32, torch.float64))
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_outputs_start_with_unit_deviation_in_half_precision() -> None:
    # The squares of these values are beyond float16.
    for kappa in (kp.Chebyshev(4), kp.Taylor(4)):
        head = kp.Head(4, 8, kp.HeadSpec(kappa), seed=0, dtype=torch.float16)
        exact = copy.deepcopy(head).double()
        x = torch.randn(512, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert 1 / 3 < float(exact(x).detach().std()) < 3


def test_initial_scale_is_measured_on_few_rows_where_each_is_wide() -> None:
    # 1,024 rows of the 308,504 columns would be 1.3 GB.
    head = kp.Head(784, 2, kp.HeadSpec(kp.Taylor(2, symmetric=True)), device="meta")
    head.to_empty(device="cpu")
    with WatchSizes(*head.parameters()) as watch:
        head.reset_parameters(0)
    assert watch.largest < 10**7
    x = torch.randn(16, 784, generator=torch.Generator().manual_seed(1))
    assert 1 / 3 < float(head(x).detach().std()) < 3


# ------------------------------------------------------------------------------------------------ calibration


def test_calibration_makes_nothing_of_the_last_layer() -> None:
    """Its κ of all rows, 24 GB for the pairs of 784 inputs, would be of use to nobody."""
    model = kp.Model(kp.rpn([3, 4, 2], expansion=kp.BSpline()), seed=0)
    called: list[int] = []
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, i=i: called.append(i))
    kp.calibrate(model, torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    assert called == [0]


def test_calibration_sets_ranges_to_those_of_the_data() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 0.1]) + 5
    model = kp.Model(kp.rpn([3, 2], kp.BSpline()), seed=0)
    assert kp.calibrate(model, x) is model
    head = model.layers[0].heads[0]
    assert torch.equal(head.kappa["range"], torch.stack((x.amin(0), x.amax(0))))
    assert head.expand(x).dense().sum(-1).allclose(torch.full((200,), 3.0), atol=1e-5)
    again = kp.calibrate(kp.Model(kp.rpn([3, 2], kp.BSpline()), seed=0), x.reshape(4, 50, 3))
    assert torch.equal(again.layers[0].heads[0].kappa["range"], head.kappa["range"])


def test_calibration_gives_a_constant_input_some_room() -> None:
    x = torch.tensor([[2.0, 1e8, 0.0], [2.0, 1e8, 0.0]])
    head = kp.calibrate(kp.Head(3, 2, kp.HeadSpec(kp.BSpline()), seed=0), x)
    low, high = head.kappa["range"]
    assert bool((low < x[0]).all() & (x[0] < high).all())
    assert torch.isfinite(head(x)).all()
    assert (low[0], high[0]) == (1.5, 2.5)


def test_calibration_of_nested_and_extended_parts() -> None:
    x = inputs(100, 2) * 7
    kappa = kp.Nested((kp.Taylor(2), kp.Extended((kp.BSpline(3), kp.Identity())), kp.BSpline(2)))
    head = kp.Head(2, 1, kp.HeadSpec(kappa), seed=0, dtype=torch.float64)
    kp.calibrate(head, x)
    taylor = kp.Taylor(2)(x, {}).dense()
    torch.testing.assert_close(head.kappa["1"]["0"]["range"], torch.stack((taylor.amin(0), taylor.amax(0))))
    middle = kappa.parts[1](taylor, head.kappa["1"]).dense()  # of the calibrated part
    torch.testing.assert_close(head.kappa["2"]["range"], torch.stack((middle.amin(0), middle.amax(0))))


def test_calibration_goes_layer_by_layer() -> None:
    model = kp.Model(kp.rpn([3, 4, 2], kp.BSpline(), before="layer_norm"), seed=0).train()
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) * 20
    kp.calibrate(model, x)
    assert model.training
    first, second = model.layers
    ends = torch.stack((lambda v: (v.amin(0), v.amax(0)))(nn.functional.layer_norm(x, (3,))))
    torch.testing.assert_close(first.heads[0].kappa["range"], ends)
    hidden = nn.functional.layer_norm(first(x), (4,))  # of the calibrated first layer
    center, half = (hidden.amin(0) + hidden.amax(0)) / 2, (hidden.amax(0) - hidden.amin(0)) / 2
    wide = (3 * half).clamp_min(1)  # at least as wide as [-1, 1], the range before
    torch.testing.assert_close(second.heads[0].kappa["range"], torch.stack((center - wide, center + wide)))


@pytest.mark.parametrize("kappa", [kp.BSpline(), kp.GaussianRBF(), kp.expansion.RickerWavelet()])
def test_hidden_ranges_of_parts_and_remainders_have_the_same_margin(kappa: Any) -> None:
    x = inputs(50, 2) * 3

    def calibrated(spec: kp.HeadSpec) -> dict[str, torch.Tensor]:
        layers = (kp.LayerSpec(kp.HeadSpec(kp.Identity())), kp.LayerSpec(spec))
        model = kp.Model(kp.ModelSpec((2, 3, 1), layers), seed=0, dtype=torch.float64)
        return {
            name: t for name, t in kp.calibrate(model, x).layers[1].heads[0].state_dict().items() if "psi" not in name
        }

    plain = calibrated(kp.HeadSpec(kappa))
    parts = calibrated(kp.HeadSpec(kp.Extended((kappa, kp.Nested((kappa, kp.Identity()))))))
    remainder = calibrated(kp.HeadSpec(kp.Identity(), remainder=kp.ExpansionRemainder(kappa)))
    for name, value in plain.items():
        name = name.removeprefix("kappa.")
        for other in (parts[f"kappa.0.{name}"], parts[f"kappa.1.0.{name}"], remainder[f"pi.expansion.{name}"]):
            assert torch.equal(other, value)


def test_an_expansion_without_a_range_is_calibrated_on_hidden_outputs_as_they_are() -> None:
    x = inputs(50, 2) * 3
    spec = kp.rpn([2, 3, 1], kp.NaiveNormal(2))
    model = kp.calibrate(kp.Model(spec, seed=0, dtype=torch.float64), x)
    second = model.layers[1].heads[0]
    alone = kp.calibrate(kp.Head(3, 1, kp.HeadSpec(kp.NaiveNormal(2)), seed=0, dtype=torch.float64), model.layers[0](x))
    for name, tensor in alone.kappa.named_buffers():
        assert torch.equal(second.kappa.get_buffer(name), tensor)


def test_a_calibrated_deep_model_trains_as_well_as_without_calibration() -> None:
    x, y = (torch.as_tensor(values) for values in problem("C.4").sample(300, seed=0))
    spec = kp.rpn([2, 2, 2, 1], kp.Extended((kp.BSpline(), kp.Taylor(2))), kp.LowRank(1), "zero")
    losses = []
    for seed in range(3):
        model = kp.calibrate(kp.Model(spec, seed=seed, dtype=torch.float64), x)
        losses.append(kp.fit(model, (x, y.unsqueeze(1)), solver="levenberg_marquardt", epochs=50)[-1].loss)
    assert sorted(losses)[1] < 1e-8  # 0.3 with ranges without a margin


def test_calibration_uses_no_dropout_and_moves_no_statistics() -> None:
    model = kp.Model(kp.rpn([3, 4, 2], kp.BSpline(), before=("dropout", "batch_norm")), seed=0).train()
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if "range" not in name}
    kp.calibrate(model, x)
    for name, tensor in state.items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.ones(5, 4), None, r"expected inputs of shape \(rows, 3\), got \(5, 4\)"),
        (torch.ones(0, 3), None, "at least one row"),
        (torch.tensor(1.0), None, "at least one row"),
        (torch.tensor([[1.0, 2.0, float("nan")]]), None, "finite"),
        (torch.tensor([[1.0, 2.0, float("inf")]]), None, "finite"),
        (torch.ones(5, 3), torch.ones(4), "5 rows of x and 4 of y"),
        (torch.ones(5, 3), torch.tensor(1.0), "5 rows of x and 0 of y"),
    ],
)
def test_calibration_refuses_what_it_cannot_use(x, y, message) -> None:
    model = kp.Model(kp.rpn([3, 2], kp.BSpline()), seed=0)
    with pytest.raises(kp.DataError, match=message):
        kp.calibrate(model, x, y)
    assert torch.equal(model.layers[0].heads[0].kappa["range"], torch.tensor([[-1.0] * 3, [1.0] * 3]))


# ------------------------------------------------------------------------------------------------ tensors from the user


def test_assign_sets_tensors_of_each_role() -> None:
    head = kp.Head(2, 3, kp.HeadSpec(kp.BSpline(1, 1), kp.Dense(), kp.LinearRemainder(), channels=2), seed=0)
    head.assign("expansion", range=torch.tensor([[-3.0, 0.0], [3.0, 1.0]]))
    head.assign("reconciliation", matrix=torch.arange(12.0).reshape(3, 4))  # one set for every channel
    head.assign("remainder", matrix=[[1, 2], [3, 4], [5, 6]])
    assert head.kappa["range"].tolist() == [[-3, 0], [3, 1]]
    assert (
        head.psi["matrix"][0].tolist() == head.psi["matrix"][1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    )
    assert head.pi["matrix"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert head.psi["matrix"].requires_grad
    nested = kp.Head(2, 1, kp.HeadSpec(kp.Extended((kp.Identity(), kp.BSpline()))))
    nested.assign("expansion", **{"1": {"range": [[-2, -2], [2, 2]]}})
    assert nested.kappa["1"]["range"].tolist() == [[-2, -2], [2, 2]]


ASSIGN_ERRORS = {
    "role": (("kappa", {}), "expected one of expansion, reconciliation, remainder, got 'kappa'"),
    "name": (("expansion", {"rang": [0.0]}), "there is no tensor 'rang'; did you mean 'range'?"),
    "no tensors": (("remainder", {"matrix": [0.0]}), "there are none"),
    "shape": (("expansion", {"range": torch.ones(2, 3)}), r"expected shape \(2, 2\), got \(2, 3\)"),
    "not numbers": (("expansion", {"range": "wide"}), r"expected numbers of shape \(2, 2\), got str"),
    "not finite": (("expansion", {"range": [[0.0, 0.0], [1.0, float("nan")]]}), "expected finite numbers"),
    "refused": (("expansion", {"range": [[0.0, 0.0], [1.0, 0.0]]}), "each lower end of the range must be below"),
    "not a mask": (("reconciliation", {"mask": torch.full((3, 12), 2)}), "expected true and false, or ones and zeros"),
    "second of two": (
        ("reconciliation", {"entries": torch.zeros(18), "mask": torch.ones(3, 12)}),
        "must keep exactly 18",
    ),
}


@pytest.mark.parametrize("case", ASSIGN_ERRORS)
def test_assign_refuses_and_changes_nothing(case) -> None:
    (role, tensors), message = ASSIGN_ERRORS[case]
    head = kp.Head(2, 3, kp.HeadSpec(kp.BSpline(3), kp.Masked()), seed=0)
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(kp.SpecError, match=message):
        head.assign(role, **tensors)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_assign_to_nested_parts_is_all_or_nothing() -> None:
    head = kp.Head(2, 1, kp.HeadSpec(kp.Extended((kp.BSpline(), kp.BSpline(2)))))
    good, bad = [[-2.0, -2.0], [2.0, 2.0]], [[3.0, 3.0], [2.0, 2.0]]
    for values in (
        {"0": {"range": good}, "1": {"range": bad}},
        {"0": {"range": good}, "1": {"rang": good}},
        {"0": {"range": good}, "1": 3},
    ):
        with pytest.raises(kp.SpecError):
            head.assign("expansion", **values)
        assert head.kappa["0"]["range"].tolist() == [[-1, -1], [1, 1]]


# ------------------------------------------------------------------------------------------------ freezing, summary


def test_freezing_by_pattern(tmp_path) -> None:
    model = kp.Model(busy_spec(), seed=0)
    assert model.freeze("layers.1") == ["layers.1.heads.0.psi.left", "layers.1.heads.0.psi.right"]
    assert model.freeze("*.bias") == [
        "layers.0.heads.0.bias",
        "layers.0.heads.0.pi.bias",
        "layers.0.heads.2.before.0.bias",
    ]
    assert model.freeze("layers.1", "layers.1.heads.*.psi.left") == [
        "layers.1.heads.0.psi.left",
        "layers.1.heads.0.psi.right",
    ]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 5
    loaded = saved(model, tmp_path / "m.safetensors")
    assert [name for name, p in loaded.named_parameters() if not p.requires_grad] == frozen
    model.freeze("layers.1", frozen=False)
    assert all(p.requires_grad for p in model.layers[1].parameters())
    loss = loaded.train()(inputs(9, 4, dtype=torch.float32)).square().sum()
    loss.backward()
    assert [name for name, p in loaded.named_parameters() if p.grad is None] == frozen


def test_freezing_what_is_not_there_says_what_is() -> None:
    model = kp.Model(kp.rpn([3, 2]), seed=0)
    with pytest.raises(
        kp.SpecError,
        match=r"Model\.freeze\('layer'\): no parameter or module has this name; choose from layers\.0\.heads\.0\.psi\.matrix",
    ):
        model.freeze("layers.0", "layer")
    assert all(p.requires_grad for p in model.parameters())  # the first pattern was good, and still nothing is frozen


def test_summary_has_a_line_for_each_head_and_the_totals() -> None:
    model = kp.Model(busy_spec(), seed=0)
    model.freeze("layers.1")
    lines = model.summary().splitlines()
    assert len(lines) == 1 + 4 + 1
    for line, (name, head) in zip(lines[1:], model.heads(), strict=False):
        parameters = sum(p.numel() for p in head.parameters())
        assert line.startswith(name)
        assert f" {parameters} " in line
        assert head.spec.expansion.name in line
        assert head.spec.reconciliation.name in line
    assert "(shared)" not in model.summary()
    shared = shared_model().summary().splitlines()
    assert ["(shared)" in line for line in shared] == [False, False, False, True, False]
    assert "2 × masked" in lines[1]
    assert "extended(parts=[taylor, b_spline(intervals=2)])" in lines[3]
    frozen = sum(p.numel() for p in model.layers[1].parameters())
    assert lines[4].split()[-2:] == [str(frozen), str(frozen)]
    total = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() for b in model.buffers())
    assert lines[-1] == f"{total} parameters, {total - frozen} trained; {buffers} values in buffers"
    assert not any(line != line.rstrip() for line in lines)


def test_repr_shows_functions_and_shapes() -> None:
    shown = repr(kp.Model(busy_spec(), seed=0))
    for part in (
        "widths=[4, 6, 2]",
        "Masked(ratio=0.5)",
        "range (buffer): (2, 4)",
        "mask (buffer): (2, 6, 24)",
        "fusion=Concatenation()",
    ):
        assert part in shown


# ------------------------------------------------------------------------------------------------ training and evaluation


def test_processing_inside_heads_is_switched_trained_and_saved(tmp_path) -> None:
    norm = kp.BatchNorm(affine=True, momentum=0.5)
    spec = kp.rpn([3, 4, 2], before=(norm,), after=("dropout",), output=("batch_norm", "dropout"))
    model = kp.Model(spec, seed=0)
    head = model.layers[0].heads[0]
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + 3
    torch.manual_seed(0)
    a, b = model.train()(x), model(x)
    assert not torch.equal(a, b)  # dropout is on
    assert not torch.allclose(head.before[0].running_mean, torch.zeros(3))
    a, b = model.eval()(x), model(x)
    assert torch.equal(a, b)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.train()(x).square().sum().backward()
    before = head.before[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(head.before[0].weight, before)
    loaded = saved(model, tmp_path / "m.safetensors").eval()
    assert torch.equal(loaded(x), model.eval()(x))
    assert torch.equal(loaded.layers[0].heads[0].before[0].running_var, head.before[0].running_var)
    assert loaded.layers[0].heads[0].before[0].num_batches_tracked == head.before[0].num_batches_tracked > 0


def test_making_a_model_moves_no_statistics() -> None:
    model = kp.Model(kp.rpn([3, 2], "taylor", before="batch_norm", after="batch_norm"), seed=0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            assert not module.running_mean.any()
            assert module.num_batches_tracked == 0
    assert model.training


def test_batch_norm_of_one_row_says_what_to_do() -> None:
    model = kp.Model(kp.rpn([3, 2], before="batch_norm"), seed=0)
    for x in (torch.ones(1, 3), torch.ones(3), torch.ones(1, 1, 3)):
        with pytest.raises(kp.DataError, match=r"at least two rows, got 1; use a larger batch, or model\.eval\(\)"):
            model.train()(x)
        assert model.eval()(x).shape == (*x.shape[:-1], 2)
    assert model.train()(torch.ones(0, 3)).shape == (0, 2)


def test_a_model_learns() -> None:
    x = torch.rand(256, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    target = (x[:, :1] * x[:, 1:]).sin()
    model = kp.Model(kp.rpn([2, 4, 1], kp.Taylor(2), kp.LowRank(3), bias=True), seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.01 * float(target.var())


# ------------------------------------------------------------------------------------------------ what is refused


def test_inputs_that_do_not_fit() -> None:
    model = kp.Model(kp.rpn([3, 2]), seed=0)
    for x, message in (
        (torch.ones(5, 4), r"expected inputs of shape \(\.\.\., 3\), got \(5, 4\)"),
        (torch.ones(0), r"got \(0,\)"),
        (torch.tensor(1.0), r"got \(\)"),
        (torch.ones(5, 3, dtype=torch.int64), r"floating-point type, got torch\.int64; use x\.float\(\)"),
        (torch.ones(5, 3, dtype=torch.bool), r"got torch\.bool"),
        (torch.ones(5, 3, dtype=torch.complex64), r"got torch\.complex64"),
    ):
        with pytest.raises(kp.DataError, match=message):
            model(x)


@pytest.mark.parametrize("width", [0, -1, 1.0, True, None, "3"])
def test_widths_that_are_none(width) -> None:
    with pytest.raises(kp.SpecError, match=r"Head\(in_features=.*\): expected an integer of at least 1"):
        kp.Head(width, 2)
    with pytest.raises(kp.SpecError, match=r"Head\(out_features=.*\): expected an integer of at least 1"):
        kp.Head(2, width)


def test_other_things_than_specifications() -> None:
    with pytest.raises(kp.SpecError, match=r"Head: expected a HeadSpec, got Taylor"):
        kp.Head(3, 2, kp.Taylor())
    with pytest.raises(kp.SpecError, match="Layer: expected a LayerSpec, got HeadSpec"):
        kp.Layer(3, 2, kp.HeadSpec())
    with pytest.raises(kp.SpecError, match=r"Model: expected a ModelSpec, such as kp\.rpn"):
        kp.Model([3, 2])
    with pytest.raises(kp.SpecError, match=r"Model\(dtype=torch\.int32\): expected torch\.float64"):
        kp.Model(kp.rpn([3, 2]), dtype=torch.int32)


def test_parts_that_do_not_fit_are_named() -> None:
    spec = kp.ModelSpec((4, 4, 6), (kp.LayerSpec(), kp.LayerSpec((kp.HeadSpec(), kp.HeadSpec(remainder="identity")))))
    with pytest.raises(
        kp.SpecError,
        match=r"^layers\[1\]\.heads\[1\]: Head\(4 → 6\): IdentityRemainder: needs as many outputs as inputs",
    ):
        kp.Model(spec)


# Refused before anything of the size is made: these would be terabytes.
HUGE = {
    "dense": (10**6, 64, kp.HeadSpec(kp.Taylor(2))),
    "masked": (10**6, 64, kp.HeadSpec(kp.Taylor(2), kp.Masked())),
    "low rank": (10**6, 64, kp.HeadSpec(kp.Taylor(2), kp.LowRank())),
    "kronecker": (10**6, 2**21, kp.HeadSpec(kp.Taylor(2), kp.Kronecker(1, 1))),
    "width": (2**40, 2, kp.HeadSpec()),
    "widths": (2**40, 2**40, kp.HeadSpec()),
    "splines": (2**40, 1, kp.HeadSpec(kp.BSpline(), kp.ConstantReconciliation())),
    "degree": (1000, 2, kp.HeadSpec(kp.Taylor(64), kp.LowRank())),
    "symmetric degree": (1000, 2, kp.HeadSpec(kp.Taylor(64, symmetric=True), kp.LowRank())),
    "channels": (1000, 2000, kp.HeadSpec(channels=2**20)),
    "remainder": (2**40, 2, kp.HeadSpec(reconciliation=kp.ConstantReconciliation(), remainder=kp.LinearRemainder())),
    "nested": (10**6, 2, kp.HeadSpec(kp.Nested((kp.Taylor(2), kp.Taylor(2))), kp.ConstantReconciliation())),
    "processing": (10**6, 2, kp.HeadSpec(kp.Taylor(2), kp.DualLowRankKronecker(), after=("batch_norm",))),
    "processing without tensors": (10**6, 2, kp.HeadSpec(kp.Taylor(2), kp.DualLowRankKronecker(), after=("relu",))),
}


@pytest.mark.parametrize("case", HUGE)
def test_sizes_beyond_any_machine_are_refused_before_allocation(case) -> None:
    m, n, spec = HUGE[case]
    with pytest.raises(kp.SpecError, match=r"at most|would have"):
        kp.Head(m, n, spec)
    with pytest.raises(kp.SpecError, match=r"layers\[0\]\.heads\[0\]"):
        kp.Model(kp.ModelSpec((m, n), (kp.LayerSpec((spec,)),)))


def test_a_wide_expansion_is_not_formed_by_surprise() -> None:
    spec = kp.HeadSpec(kp.Taylor(2), kp.Kronecker(1, 1000), after=("layer_norm",))
    head = kp.Head(10**4, 2, spec, device="meta")
    with pytest.raises(
        kp.SpecError, match=r"needs κ\(x\) materialized, 100,010,000 columns per row; at most 16,777,216 are allowed"
    ):
        head(torch.empty(3, 10**4, device="meta"))


def test_a_layer_norm_after_a_wide_product_stays_folded() -> None:
    spec = kp.HeadSpec(kp.Taylor(2), kp.DualLowRankKronecker(), after=("layer_norm",))
    head = kp.Head(5000, 4, spec, seed=0)  # 25 million columns
    assert head(torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))).isfinite().all()


# ------------------------------------------------------------------------------------------------ slips that would pass unseen


def test_polynomials_of_high_degree_start_alive_on_their_domain() -> None:
    x = torch.rand(512, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for degree in (8, 20):
        head = kp.Head(8, 8, kp.HeadSpec(kp.Chebyshev(degree)), seed=0)
        assert 0.1 < float(head(x).detach().std()) < 10


def test_calibration_in_half_precision_sees_that_columns_vary() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = kp.Model(kp.rpn([2, 1], kp.BSpline(50)), seed=0, dtype=dtype)
        x = torch.tensor([[-1.0, 5.0], [1.0, 7.0]], dtype=dtype)
        kp.calibrate(model, x)
        assert torch.equal(model.layers[0].heads[0].kappa["range"], x)


def test_calibration_of_extreme_columns_stays_finite() -> None:
    model = kp.Model(kp.rpn([3, 1], kp.BSpline()), seed=0)
    x = torch.tensor([[1e-39, 2e38, 1e30], [2e-39, -2e38, 1e30]])
    assert torch.isfinite(kp.calibrate(model, x)(x)).all()


def test_what_cannot_be_calibrated_is_refused_and_left_as_it_was() -> None:
    model = kp.Model(kp.rpn([2, 4, 1], kp.BSpline()), seed=0)
    for wrong in (torch.nn.Sequential(model), torch.nn.Linear(2, 1), 5):
        with pytest.raises(kp.SpecError, match="expected a kapsi Model, Layer or Head"):
            kp.calibrate(wrong, torch.ones(3, 2))
    for wrong in (torch.ones(3, 2, dtype=torch.complex64), [["a", "b"]], "ab", None):
        with pytest.raises(
            kp.DataError, match=r"calibrate: expected (dense real )?numbers as inputs|inputs as dense real"
        ):
            kp.calibrate(model, wrong)
    model.layers[1].heads[0].in_features = 99  # breaks after the first layer was done
    with pytest.raises(kp.DataError, match=r"\(rows, 99\)"):
        kp.calibrate(model, torch.randn(10, 2) * 5)
    assert model.layers[0].heads[0].kappa["range"].tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    model.layers[1].heads[0].in_features = 4
    kp.calibrate(model, torch.randn(10, 2, dtype=torch.float64))  # another type is converted


def test_the_fusion_of_one_head_is_applied() -> None:
    for fusion in ("concatenation", "weighted_sum"):
        layer = kp.Layer(3, 2, kp.LayerSpec(kp.HeadSpec(), fusion=fusion), seed=0)
        x = torch.randn(4, 3)
        layer(x).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.fusion.parameters())


def test_classes_that_forget_something_are_refused_when_they_are_used() -> None:
    def complete(**namespace: object) -> dict[str, object]:
        return {
            "factors": lambda self, m: (1, m),
            "__call__": lambda self, x, p: kp.features.DenseFeatures(x),
            **namespace,
        }

    unnamed = dataclasses.dataclass(frozen=True)(type("Unnamed", (kp.Taylor,), {}))
    with pytest.raises(kp.SpecError, match="a function has a name of its own"):
        unnamed()
    try:
        bare = types.new_class("Bare", (kp.Expansion,), {"name": "bare_test"}, lambda space: space.update(complete()))
        with pytest.raises(kp.SpecError, match="a frozen dataclass"):
            bare()
        thawed = types.new_class(
            "Thawed", (kp.Expansion,), {"name": "thawed_test"}, lambda space: space.update(complete())
        )
        with pytest.raises(kp.SpecError, match="a frozen dataclass"):
            dataclasses.dataclass(thawed)()
        half = types.new_class("Half", (kp.Expansion,), {"name": "half_test"}, lambda space: None)
        with pytest.raises(kp.SpecError, match="__call__, factors"):
            dataclasses.dataclass(frozen=True)(half)()
        for made, said in (
            (lambda x: x, "returned Tensor"),
            (lambda x: kp.features.DenseFeatures(x[..., :2]), "returned 2 columns"),
        ):
            space = complete(__call__=lambda self, x, p, made=made: made(x))
            wrong = types.new_class(
                "Wrong", (kp.Expansion,), {"name": "wrong_test"}, lambda s, space=space: s.update(space)
            )
            wrong = dataclasses.dataclass(frozen=True)(wrong)
            with pytest.raises(kp.SpecError, match=said):
                kp.Head(3, 3, kp.HeadSpec(wrong()))
    finally:
        for name in ("bare_test", "thawed_test", "half_test", "wrong_test"):
            ROLES["expansion"].pop(name, None)
    for name, aliases in (("", ()), (5, ()), ("fine", "text"), ("fine", ("",))):
        with pytest.raises(kp.SpecError, match="expected names of lower-case letters"):
            types.new_class("Odd", (kp.Expansion,), {"name": name, "aliases": aliases})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shape": 3}, "a tuple of integers"),
        ({"shape": (-1,)}, "a tuple of integers"),
        ({"shape": (3.0,)}, "a tuple of integers"),
        ({"shape": (3,), "init": float("nan")}, "finite numbers"),
        ({"shape": (3,), "init": None}, "finite numbers"),
        ({"shape": (2, 2), "init": (1.0, 2.0, 3.0)}, "3 constants"),
        ({"shape": (3,), "init": "random"}, "choose from zeros"),
        ({"shape": (3,), "dtype": torch.bool}, "only floating-point tensors can be trained"),
    ],
)
def test_wrong_declarations(arguments, said) -> None:
    with pytest.raises(kp.SpecError, match=said):
        kp.Param(**arguments)


def test_an_initializer_of_another_shape_is_refused() -> None:
    with pytest.raises(kp.SpecError, match=r"expected a tensor of shape \(3,\), got \(2,\)"):
        kp.Param((3,), lambda shape, generator: torch.zeros(2)).draw(None, None)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_derivatives_of_a_folded_norm_keep_the_type_of_one_row() -> None:
    for after in ("layer_norm", ("layer_norm", "relu")):
        head = kp.Head(6, 3, kp.HeadSpec(kp.Taylor(2), kp.LowRank(2), after=after), seed=0)
        x = torch.randn(6, generator=torch.Generator().manual_seed(0))
        jacobian = torch.func.jacfwd(head)(x)
        assert jacobian.dtype == torch.float32
        torch.testing.assert_close(jacobian, torch.func.jacrev(head)(x), rtol=1e-4, atol=1e-5)
        assert torch.func.hessian(head)(x).dtype == torch.float32


def test_integers_of_numpy_are_integers() -> None:
    head = kp.Head(np.int64(3), np.int64(2), seed=np.int64(0))
    assert torch.equal(head.psi["matrix"], kp.Head(3, 2, seed=0).psi["matrix"])


def test_arrays_and_lists_are_not_inputs() -> None:
    model = kp.Model(kp.rpn([2, 1]), seed=0)
    for wrong in (np.ones((3, 2)), [[1.0, 2.0]], None):
        with pytest.raises(kp.DataError, match=r"expected inputs as a torch\.Tensor"):
            model(wrong)


# ------------------------------------------------------------------------------------------------ beyond any machine


@pytest.mark.parametrize("sizes", [(2**36 + 1, 1), (1, 2**61 - 1)])
@pytest.mark.parametrize("psi", [kp.Dense(), kp.Kronecker(), kp.Duplicated()], ids=lambda f: f.name)
def test_a_width_beyond_any_machine_is_refused_at_once(sizes, psi) -> None:
    with pytest.raises(
        kp.SpecError, match=r"features=\d+\): expected an integer of at least 1, at most 68,719,476,736"
    ):
        kp.Head(*sizes, kp.HeadSpec(kp.Identity(), psi), device="meta")


def test_numbers_beyond_the_type_of_a_tensor_are_refused() -> None:
    head = kp.Head(2, 1, kp.HeadSpec(), seed=0, dtype=torch.float16)
    before = head.psi["matrix"].clone()
    with pytest.raises(kp.SpecError, match=r"matrix: expected numbers within the range of torch\.float16"):
        head.assign("reconciliation", matrix=[[1.0, 1e6]])
    assert torch.equal(head.psi["matrix"], before)
    head.assign("reconciliation", matrix=[[1.0, 65504.0]])


def test_initial_values_that_do_not_fit_into_memory_are_an_error_of_ours(monkeypatch) -> None:
    def full(self, channels, generator, rule):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 1 byte")

    monkeypatch.setattr(kp.Param, "draw", full)
    with pytest.raises(kp.SpecError, match=r"initial values of 'matrix', 3 × 2 elements, does not fit into memory$"):
        kp.Head(2, 3)


def test_heads_and_biases_that_do_not_fit_into_memory_are_an_error_of_ours(monkeypatch) -> None:
    def full(*arguments):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 1 byte")

    monkeypatch.setattr("kapsi.modules.layer.allocate", full)
    with pytest.raises(kp.SpecError, match=r"^heads\[0\]: Head\(2 → 3\) does not fit into memory$"):
        kp.Layer(2, 3)
    monkeypatch.setattr(torch, "empty", full_of(torch.empty, 3))
    with pytest.raises(kp.SpecError, match=r"^Head\(2 → 3\): the bias does not fit into memory$"):
        kp.Head(2, 3, kp.HeadSpec(bias=True))


def full_of(make, size):
    """Return what makes tensors, with no memory for vectors of one size."""

    def made(*shape, **options):
        if shape == (size,):
            raise RuntimeError("CUDA out of memory. Tried to allocate 12 bytes.")
        return make(*shape, **options)

    return made


@pytest.mark.parametrize("route", ["", "Dense", False, 1, ["dense"], np.array(["dense", "structured"])], ids=str)
def test_what_is_no_route_is_refused(route) -> None:
    with pytest.raises(kp.SpecError, match=r"route=.*expected 'dense'"):
        kp.Model(kp.rpn([2, 3]), seed=0)(torch.ones(1, 2), route=route)


def test_the_share_of_a_rank_is_said_where_it_is_large() -> None:
    with pytest.raises(kp.SpecError, match=r"8\.9 GB with AdamW; at most"):
        kp.Head(784, 64, kp.HeadSpec(kp.Taylor(2), kp.LowRank(900)))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (["a"] * 4, r"calibrate: expected numbers as targets, got an array of <U1"),
        (
            torch.ones(4, dtype=torch.complex64),
            r"calibrate: expected targets as dense real numbers, got a tensor that is complex",
        ),
        (torch.ones(3), r"calibrate: 4 rows of x and 3 of y"),
        (torch.tensor(1), r"calibrate: 4 rows of x and 0 of y"),
    ],
)
def test_wrong_labels_are_refused(y, message) -> None:
    head = kp.Head(2, 1, kp.HeadSpec(kp.NaiveNormal(2)), seed=0)
    with pytest.raises(kp.DataError, match=message):
        kp.calibrate(head, torch.randn(4, 2), y)


def test_labels_may_be_a_list_or_an_array() -> None:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    heads = [
        kp.calibrate(kp.Head(2, 1, kp.HeadSpec(kp.NaiveNormal(2)), seed=0), x, y)
        for y in (torch.tensor([0, 1, 0, 1, 0, 1]), [0, 1, 0, 1, 0, 1], np.array([0, 1, 0, 1, 0, 1]))
    ]
    assert torch.equal(heads[0].kappa["mean"], heads[1].kappa["mean"])
    assert torch.equal(heads[0].kappa["mean"], heads[2].kappa["mean"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "kappa",
    [kp.BSpline(), kp.BSpline(knots="quantile"), kp.GaussianRBF(), kp.RickerWavelet()],
    ids=lambda f: f"{f.name}-{getattr(f, 'knots', '')}",
)
def test_a_large_constant_is_calibrated_in_every_type(kappa, dtype) -> None:
    x = torch.full((9, 2), 3e4, dtype=dtype)
    head = kp.calibrate(kp.Head(2, 1, kp.HeadSpec(kappa), seed=0, dtype=dtype), x)
    assert bool(head(x).isfinite().all())


# ------------------------------------------------------------------------------------------------ heads contracted together

KAPPA = kp.Extended((kp.Taylor(2), kp.BSpline(3)))
JOINED = [
    kp.Dense(),
    kp.Masked(),
    kp.LowRank(2),
    kp.KhatriRao(2),
    kp.RandomAdaption(3),
    kp.Kronecker(terms=2),
    kp.DualLowRankKronecker(2),
    kp.Duplicated(ratio=0.5),
]


def alike(psi: kp.Reconciliation, count: int = 3, fusion: kp.Fusion | None = None, kappa: Any = KAPPA, **options: Any):
    """Return a model of one layer: heads that are alike, between two others."""
    head = kp.HeadSpec(kappa, psi, **options)
    twin = dataclasses.replace(head, bias=True, remainder=kp.LinearRemainder())
    heads = (kp.HeadSpec(), *[twin] * (count - 1), kp.HeadSpec(kp.Chebyshev(2), bias=True), head)
    return kp.Model(kp.ModelSpec((4, 6), (kp.LayerSpec(heads, fusion or kp.Sum()),)), seed=0, dtype=torch.float64)


def one_by_one(model: kp.Model) -> kp.Model:
    """Return a copy whose heads have hooks that do nothing, and are therefore called one by one."""
    apart = copy.deepcopy(model)
    for _, head in apart.heads():
        head.register_forward_hook(lambda *_: None)
    return apart


@pytest.mark.parametrize("fusion", [kp.Sum(), kp.Mean(), kp.WeightedSum(), kp.Concatenation()], ids=lambda f: f.name)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("psi", JOINED, ids=lambda f: f.name)
def test_heads_that_are_alike_are_one_product_with_the_same_result(psi, channels, fusion) -> None:
    model = alike(psi, fusion=fusion, channels=channels)
    apart = one_by_one(model)
    together = isinstance(fusion, kp.Sum | kp.Mean) or not isinstance(psi, kp.Dense | kp.Masked)
    assert model.layers[0].groups() == ([[0], [1, 2, 4], [3]] if together else [[0], [1], [2], [3], [4]])
    assert apart.layers[0].groups() == [[0], [1], [2], [3], [4]]
    for lead in ((), (5,), (2, 3), (0,)):
        x = inputs(*lead, 4).requires_grad_()
        y, expected = model(x), apart(x)
        assert y.shape == (*lead, 6)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        ours = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        theirs = torch.autograd.grad(expected.square().sum(), [x, *apart.parameters()])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_heads_together_make_fewer_products(monkeypatch) -> None:
    model = alike(kp.LowRank(2))
    calls = []
    original = kp.contraction.contract_sum
    for module in ("head", "layer"):
        monkeypatch.setattr(
            f"kapsi.modules.{module}.contract_sum", lambda *args, **kw: calls.append(1) or original(*args, **kw)
        )
    model(inputs(5, 4))
    assert len(calls) == 3
    one_by_one(model)(inputs(5, 4))
    assert len(calls) == 3 + 4  # a linear head calls nn.Linear


def test_weights_of_third_parties_are_fused_and_suggested(monkeypatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class ScaledWeights(kp.weights.Weights):
        scale: torch.Tensor
        base: torch.Tensor
        can_stack = True

        @property
        def channels(self) -> int | None:
            return None if self.base.dim() == 2 else self.base.shape[0]

        @property
        def columns(self) -> int:
            return self.base.shape[-1]

        def matrix(self) -> torch.Tensor:
            return self.scale.unsqueeze(-1) * self.base

        def row_sums(self) -> torch.Tensor:
            return self.matrix().sum(-1)

    monkeypatch.setattr("kapsi.function.ROLES", {**ROLES, "reconciliation": dict(ROLES["reconciliation"])})

    @dataclasses.dataclass(frozen=True)
    class Scaled(kp.Reconciliation, name="scaled_by_row"):
        compact: ClassVar[Mapping[str, Any]] = {"rank": 1}
        rank: int = 1

        def params(self, out_features, factors):
            columns = factors[0] * factors[1]
            return {
                "scale": kp.Param((out_features,), 1.0),
                "base": kp.Param((out_features, columns), columns**-0.5, trainable=False),
            }

        def __call__(self, params, out_features, factors):
            return ScaledWeights(params["scale"], params["base"])

    model = alike(Scaled(), channels=3)
    assert any(len(group) > 1 for group in model.layers[0].groups())
    torch.testing.assert_close(model(inputs(5, 4)), one_by_one(model)(inputs(5, 4)), rtol=0, atol=1e-11)
    with pytest.raises(kp.SpecError, match=r"Scaled\(1\) with 2 fit"):
        kp.Head(26_965, 2, kp.HeadSpec(kp.Taylor(2), kp.LowRank(3)))


def test_what_is_joined_is_no_part_of_the_state() -> None:
    model = alike(kp.Kronecker())
    before = list(model.state_dict())
    model(inputs(5, 4))
    assert list(model.state_dict()) == before
    assert [name for name in before if name.startswith("layers.0.heads.2.psi")] == [
        "layers.0.heads.2.psi.left",
        "layers.0.heads.2.psi.right",
    ]
    restored = alike(kp.Kronecker())
    restored.reset_parameters(5)
    restored.load_state_dict(model.state_dict())
    assert torch.equal(restored(inputs(5, 4)), model(inputs(5, 4)))


@pytest.mark.parametrize(
    "register",
    [
        lambda head: head.register_forward_hook(lambda *_: None),
        lambda head: head.register_forward_pre_hook(lambda *_: None),
        lambda head: head.register_full_backward_hook(lambda *_: None),
        lambda head: head.register_full_backward_pre_hook(lambda *_: None),
    ],
    ids=["forward", "forward_pre", "backward", "backward_pre"],
)
def test_a_hook_of_one_head_keeps_all_apart(register) -> None:
    layer = alike(kp.LowRank(2)).layers[0]
    handle = register(layer.heads[2])
    assert layer.groups() == [[0], [1], [2], [3], [4]]
    handle.remove()
    assert layer.groups() == [[0], [1, 2, 4], [3]]


def test_hooks_see_each_head() -> None:
    model = alike(kp.LowRank(2))
    seen = []
    for _, head in model.heads():
        head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    y = model(inputs(5, 4))
    torch.testing.assert_close(torch.stack(seen).sum(0), y, rtol=0, atol=1e-12)
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (alike(kp.LowRank(2), count=2), [[0], [1], [2], [3]]),  # a new axis is not worth it for two of one channel
        (alike(kp.LowRank(2), count=2, channels=2), [[0], [1, 3], [2]]),
        (alike(kp.Dense(), count=2), [[0], [1, 3], [2]]),
        (alike(kp.HyperNet(3)), [[0], [1], [2], [3], [4]]),  # channels have different signs, heads the same
        (
            alike(kp.LowRank(2), kappa=kp.Taylor(1), before=(kp.Dropout(0.5),)),
            [[0], [1], [2], [3], [4]],
        ),  # κ not shared
    ],
    ids=["two", "two of two channels", "two dense", "hypernet", "dropout"],
)
def test_which_heads_are_contracted_together(model, groups) -> None:
    assert model.layers[0].groups() == groups


def test_large_heads_are_contracted_together_as_far_as_it_pays(monkeypatch) -> None:
    monkeypatch.setattr("kapsi.modules.layer.MAX_FUSED", 3 * 6 * 4)
    model = kp.Model(kp.rpn([4, 6], heads=8), seed=0)
    assert model.layers[0].groups() == [[0, 1, 2], [3, 4, 5], [6, 7]]
    torch.testing.assert_close(model(torch.ones(2, 4)), one_by_one(model)(torch.ones(2, 4)))
    monkeypatch.setattr("kapsi.modules.layer.MAX_FUSED", 6 * 4 - 1)
    assert kp.Model(kp.rpn([4, 6], heads=2), seed=0).layers[0].groups() == [[0], [1]]


@pytest.mark.parametrize(
    ("psi", "fusion", "channels"),
    [
        (kp.LowRank(2), kp.Sum(), 1),
        pytest.param(kp.DualLowRankKronecker(2), kp.Sum(), 2, marks=pytest.mark.slow),
        (kp.KhatriRao(2), kp.WeightedSum(), 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_heads_together_compile_export_and_map(psi, fusion, channels) -> None:
    model = alike(psi, fusion=fusion, kappa=kp.Taylor(2), channels=channels).eval()
    x = inputs(5, 4)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(inputs(7, 4)), model(inputs(7, 4)), rtol=0, atol=1e-12)
    models = [model, copy.deepcopy(model)]
    models[1].reset_parameters(1)
    stacked = torch.func.stack_module_state(models)
    mapped = torch.func.vmap(lambda p, b: torch.func.functional_call(model, (p, b), (x,)))(*stacked)
    torch.testing.assert_close(mapped, torch.stack([one(x) for one in models]), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.func.vmap(model)(x), model(x), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------ computed tensors


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Around(Doubled):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(x))


def changed(way: str, widths: tuple[int, ...] = (3, 4, 1)) -> tuple[kp.Model, kp.Head]:
    """Return a model with a pruned, normalized, parametrized or wrapped first head, and the head."""
    model = kp.Model(kp.rpn(list(widths), expansion=kp.Taylor(2)), seed=0, dtype=torch.float64)
    head = model.layers[0].heads[0]
    if way == "pruned":
        torch.nn.utils.prune.l1_unstructured(head.psi, "matrix", amount=0.5)
    elif way == "normalized":
        torch.nn.utils.spectral_norm(head.psi, "matrix")
    elif way == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(head.psi, "matrix", Doubled())
    else:
        model.layers[0].heads[0] = Around(head)
    return model, head


WAYS = ["pruned", "normalized", "parametrized", "wrapped"]


@pytest.mark.parametrize("way", ["pruned", "normalized", "parametrized"])
def test_computed_tensors_have_plain_gradient_steps_and_no_penalty_of_the_grid(way) -> None:
    model, _ = changed(way)
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(20, 3)
    assert kp.fit(model, (x, x.sum(1)), epochs=2)[-1].solver == "adamw"
    with pytest.raises(kp.SpecError, match=r"TrainConfig\(group_l1=0\.1\): .* a hook or a parametrization; remove"):
        kp.fit(model, (x, x.sum(1)), epochs=2, group_l1=0.1)


@pytest.mark.parametrize("solver", ["adamw", "lbfgs", "levenberg_marquardt"])
@pytest.mark.parametrize("way", WAYS)
def test_changed_heads_are_trained(way, solver) -> None:
    model, head = changed(way)
    if (way, solver) == ("normalized", "levenberg_marquardt"):
        solver = "auto"  # refused, as the next test shows
    x = inputs(64, 3)
    y = x[:, :1] * x[:, 1:2]
    with torch.no_grad():
        before = float((model(x) - y).square().mean())
    kp.fit(model, (x, y), solver=solver, epochs=5)
    with torch.no_grad():
        assert float((model.eval()(x) - y).square().mean()) < 0.99 * before
    if way == "pruned":
        mask = head.psi.matrix_mask
        assert bool((head.weights().matrix()[mask == 0] == 0).all())
        assert int((mask == 0).sum()) == mask.numel() // 2


NORMS = {
    "hook": torch.nn.utils.spectral_norm,
    "parametrization": torch.nn.utils.parametrizations.spectral_norm,
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("outputs", [1, 4])  # of a single row, a power iteration ends in one step
def test_norms_with_a_state_are_refused_by_levenberg_marquardt(norm, train, outputs) -> None:
    x = inputs(64, 3)
    y = x[:, :1] * x[:, 1:2]
    model = kp.Model(kp.rpn([3, outputs, 1], kp.Taylor(2)), seed=0, dtype=torch.float64)
    NORMS[norm](model.layers[0].heads[0].psi, "matrix")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        kp.SpecError, match=r"layers\.0\.heads\.0\.psi\..*_[uv] changes in each training pass .* or use solver adamw"
    ):
        kp.fit(model.train(train), (x, y), solver="levenberg_marquardt", epochs=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    layer = NORMS[norm](torch.nn.Linear(3, outputs, dtype=torch.float64), "weight")
    model.layers[0] = layer
    records = kp.fit(model, (x, y), epochs=5)
    assert records[-1].solver == "lbfgs"
    assert float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) < 1.1


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm])
def test_norms_without_a_state_are_trained_by_levenberg_marquardt(norm) -> None:
    torch.manual_seed(0)
    x = inputs(64, 3)
    y = x[:, :1] * x[:, 1:2]
    first = norm(torch.nn.Linear(3, 6))
    model = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    model(x)  # now the weight is a computed tensor, which torch does not copy
    records = kp.fit(model, (x, y), solver="levenberg_marquardt", epochs=20)
    assert records[-1].loss < 0.01 * records[0].loss
    assert float((kp.predict(model, x) - y).square().mean()) == pytest.approx(records[-1].loss)


class OwnForward(kp.Model):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x, *args, **kwargs).tanh()


class OwnLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


def hooked(part: str, kind: str) -> torch.nn.Module:
    model = kp.Model(SPEC_OF_ONE, seed=0, dtype=torch.float64)
    module = {"model": model, "layer": model.layers[0], "head": model.layers[0].heads[0]}[part]
    if kind == "hook":
        module.register_forward_hook(lambda module, inputs, output: output.tanh())
    elif kind == "prehook":
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0].sin(), *inputs[1:]))
    else:
        own = module.forward
        module.forward = lambda *args, **kwargs: own(*args, **kwargs).tanh()
    return model


SPEC_OF_ONE = kp.rpn([3, 1], kp.Taylor(2))
CHANGES = {
    f"{part} {kind}": (part, kind) for part in ("model", "layer", "head") for kind in ("hook", "prehook", "replaced")
}
NOT_PLAIN = {
    **{name: lambda change=change: hooked(*change) for name, change in CHANGES.items()},
    "subclass": lambda: OwnForward(SPEC_OF_ONE, seed=0, dtype=torch.float64),
    "linear subclass": lambda: OwnLinear(3, 1, dtype=torch.float64),
    "parametrized": lambda: torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(3, 1, dtype=torch.float64)),
    "pruned": lambda: torch.nn.utils.prune.l1_unstructured(torch.nn.Linear(3, 1, dtype=torch.float64), "weight", 1),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_models_that_compute_more_than_their_formula_are_not_solved_in_closed_form(name) -> None:
    torch.manual_seed(0)
    x = inputs(64, 3)
    y = x[:, :1] * x[:, 1:2]
    with pytest.raises(kp.SpecError, match=r"ridge: .* (hooks, or a forward method|computed by|replaced method)"):
        kp.fit(NOT_PLAIN[name](), (x, y), solver="ridge", loss="mse")
    model = NOT_PLAIN[name]()
    records = kp.fit(model, (x, y), loss="mse", epochs=5)
    assert records[-1].solver in ("levenberg_marquardt", "lbfgs")
    # The record is that of the model, not of its formula.
    assert float((kp.predict(model, x) - y).square().mean()) == pytest.approx(records[-1].loss, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_what_needs_the_declared_tensors_refuses_changed_heads_in_one_line(way, tmp_path) -> None:
    model, head = changed(way, (3, 1))
    calls = {
        "remove parametrizations, pruning and added modules": lambda: kp.save(model, tmp_path / "model"),
        "ridge: layers.0.heads.0": lambda: kp.fit(model, (inputs(8, 3), inputs(8, 1)), solver="ridge"),
    }
    if way == "wrapped":
        calls["layers.0.heads.0 is a Around, expected a Head"] = lambda: kp.explain(model)
    else:
        calls["matrix is computed by a hook or a parametrization; remove it first"] = lambda: head.reset_parameters(0)
        calls["Head.assign('reconciliation'): matrix is computed"] = lambda: head.assign(
            "reconciliation", matrix=head.weights().matrix()
        )
    for message, call in calls.items():
        with pytest.raises(kp.SpecError) as caught:
            call()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrap", [torch.nn.Sequential, Around, lambda layer: torch.nn.Linear(3, 4).double()])
@pytest.mark.parametrize("solver", ["auto", "adamw", "lbfgs", "levenberg_marquardt"])
def test_models_with_another_module_in_the_place_of_a_layer_are_trained(wrap, solver) -> None:
    torch.manual_seed(0)
    model = kp.Model(kp.rpn([3, 4, 1], kp.BSpline()), seed=0, dtype=torch.float64)
    model.layers[0] = wrap(model.layers[0])
    x = inputs(64, 3)
    y = x[:, :1] * x[:, 1:2]
    before = float((kp.predict(model, x) - y).square().mean())
    kp.fit(model, (x, y), solver=solver, epochs=5)
    assert float((kp.predict(model, x) - y).square().mean()) < 0.9 * before
    torch.testing.assert_close(model(x, route="dense"), model(x))


def test_another_module_in_the_place_of_a_layer_is_named_where_layers_are_needed() -> None:
    model = kp.Model(kp.rpn([3, 4, 1], kp.BSpline()), seed=0, dtype=torch.float64)
    model.layers[1] = Around(model.layers[1])
    x = inputs(8, 3)
    for call in (
        lambda: kp.explain(model),
        lambda: kp.calibrate(model, x),
        lambda: kp.standardized(model, x, x[:, :1]),
        lambda: kp.fit(model, (x, x[:, :1]), standardize=True),
        lambda: kp.modules.scale_last_layer(model),
        lambda: kan.update_grid(model, x),
    ):
        with pytest.raises(kp.SpecError, match=r"layers\.1 is a Around, expected a Layer; put the layer back first"):
            call()
    inner = model.layers[1].inner
    model.reset_parameters(1)
    expected = kp.Model(model.spec, seed=1, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(inner.parameters(), expected.layers[1].parameters(), strict=True))


@pytest.mark.parametrize("kappa", [kp.Identity(), kp.Taylor(2)])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_computed_bias_is_used(kappa, channels) -> None:
    x = inputs(5, 3)
    spec = kp.HeadSpec(kappa, bias=True, channels=channels)
    pruned, parametrized = (kp.Head(3, 4, spec, seed=0, dtype=torch.float64) for _ in range(2))
    products = pruned(x).detach()  # the bias is zero at initial values
    values = torch.tensor([4.0, -3.0, 2.0, -1.0], dtype=torch.float64)
    for head in (pruned, parametrized):
        with torch.no_grad():
            head.bias.copy_(values)
    torch.nn.utils.prune.l1_unstructured(pruned, "bias", amount=2)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "bias", Doubled())
    torch.testing.assert_close(pruned(x), products + torch.tensor([4.0, -3.0, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(parametrized(x), products + 2 * values)


def test_hooks_of_processing_after_kappa_are_called() -> None:
    model = kp.Model(kp.rpn([3, 2], kp.Taylor(2), after=("layer_norm",)), seed=0, dtype=torch.float64)
    norm = model.layers[0].heads[0].after[0]
    x = inputs(5, 3)
    expected = model(x)
    seen = []
    norm.register_forward_hook(lambda *arguments: seen.append(arguments))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
    assert len(seen) == 1


def test_states_with_the_former_name_of_a_tensor_are_loaded(tmp_path) -> None:
    model = kp.Model(kp.rpn([3, 2], reconciliation=kp.Masked()), seed=0)
    name, former = "layers.0.heads.0.psi.entries", "layers.0.heads.0.psi.values"
    state = {former if key == name else key: value + 1 for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(model.state_dict()[name], state[former])
    assert former in state


# ------------------------------------------------------------------------------------------------ routes

ROUTES = ["dense", "structured"]


def routed_spec() -> kp.ModelSpec:
    """Return a model whose heads take different routes, with channels, folded norms, and heads that are alike."""
    wide = kp.HeadSpec(kp.Taylor(2), kp.LowRank(7), channels=2, after=("layer_norm",), bias=True)
    plain = kp.HeadSpec(kp.Taylor(2), kp.Dense(), kp.LinearRemainder())
    mixed = kp.HeadSpec(kp.Extended((kp.Taylor(2), kp.BSpline(3))), kp.DualLowRankKronecker(2), channels=3)
    many = kp.LayerSpec((wide, plain, mixed, mixed, kp.HeadSpec(kp.Taylor(2), kp.HyperNet(3))))
    last = kp.LayerSpec((kp.HeadSpec(kp.Taylor(3), kp.KhatriRao(2)),) * 3, kp.WeightedSum())
    return kp.ModelSpec((4, 6, 2), (many, last))


def test_every_route_of_a_model_has_the_same_result() -> None:
    model = kp.Model(routed_spec(), seed=0, dtype=torch.float64)
    x = inputs(5, 4).requires_grad_()
    leaves = [x, *model.parameters()]
    expected = model(x)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    for route in ROUTES:
        y = model(x, route=route)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), leaves), gradients, rtol=0, atol=1e-10)
        layer = model.layers[0]
        torch.testing.assert_close(layer(x, route=route), layer(x), rtol=0, atol=1e-10)
        features = layer.fixed_features(x)
        torch.testing.assert_close(model(x, features, route=route), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("route", [ROUTES[0], pytest.param(ROUTES[1], marks=pytest.mark.slow)])
def test_a_route_compiles_and_exports(route) -> None:
    model = kp.Model(routed_spec(), seed=0, dtype=torch.float64).eval()
    x = inputs(5, 4)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, route=route), model(x), rtol=0, atol=1e-10)
    program = torch.export.export(
        model,
        (x,),
        {"route": route},
        dynamic_shapes={"x": {0: torch.export.Dim("batch")}, "route": None},
    )
    torch.testing.assert_close(program.module()(inputs(7, 4), route=route), model(inputs(7, 4)), rtol=0, atol=1e-10)


def test_what_a_route_forms() -> None:
    head = kp.Head(12, 20, kp.HeadSpec(kp.Taylor(2), kp.Dense()), seed=0)
    x = torch.ones(50, 12)
    largest = {}
    for route in (None, *ROUTES):
        with WatchSizes(x, *head.parameters()) as watch, torch.no_grad():
            head(x, route=route)
        largest[route] = watch.largest
    formed, apart = 50 * 13 * 12, 50 * 20 * 13
    assert largest == {None: formed, "dense": formed, "structured": apart}
    head = kp.Head(12, 4, kp.HeadSpec(kp.Taylor(2), kp.LowRank(2)), seed=0)
    with WatchSizes(x, *head.parameters()) as watch, torch.no_grad():
        head(x, route="dense")
    assert watch.largest == formed


@pytest.mark.parametrize("route", ["fast", "Dense", 1, True, [], ""])
def test_a_route_that_is_none_is_refused(route) -> None:
    model = kp.Model(kp.rpn([3, 2]), seed=0)
    features, weights = kp.features.DenseFeatures(torch.ones(5, 3)), kp.weights.DenseWeights(torch.ones(2, 3))
    for call in (
        lambda: model(torch.ones(5, 3), route=route),
        lambda: model.layers[0].heads[0](torch.ones(5, 3), route=route),
        lambda: kp.contract(features, weights, route=route),
        lambda: kp.explain(model, route=route),
    ):
        with pytest.raises(kp.SpecError, match=r"route=.*expected 'dense' .*'structured' or None"):
            call()


def test_the_dense_route_forms_nothing_beyond_reason() -> None:
    wide = kp.Head(5000, 2, kp.HeadSpec(kp.Taylor(2), kp.KhatriRao(2)), device="meta")
    with pytest.raises(kp.SpecError, match=r'route="dense" needs κ\(x\) materialized, 25,005,000 columns per row'):
        wide(torch.ones(3, 5000, device="meta"), route="dense")
    tall = kp.Head(1000, 2000, kp.HeadSpec(kp.Taylor(2), kp.LowRank(2)), device="meta")
    with pytest.raises(kp.SpecError, match=r'route="dense" materializes ψ\(w\), 2,002,000,000 entries'):
        tall(torch.ones(3, 1000, device="meta"), route="dense")
