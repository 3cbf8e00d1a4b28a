"""Modules of torch as expansions, expansions as modules of torch, and expansions as remainders."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import kapsi as kp
from kapsi.testing import inputs


class Waves(nn.Module):
    """sin(W x + phase), with a buffer that is saved and one frozen parameter."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.inner = nn.Linear(m, 5)
        self.inner.bias.requires_grad_(False)
        self.register_buffer("phase", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) + self.phase).sin()


class Loose(nn.Module):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.scale = torch.ones(m)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Named(nn.Module):
    """Names that a store refuses."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self._net = nn.Linear(m, 2)
        self.own__net = nn.Linear(m, 2)
        self.reset = nn.Parameter(torch.randn(m))
        for name in ("type", "float"):
            self._parameters[name] = nn.Parameter(torch.randn(m))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outer = self._parameters
        return torch.cat((self._net(x), self.own__net(x), x * self.reset, x * outer["type"], x * outer["float"]), -1)


class Coupled(nn.Module):
    """A buffer that depends on a parameter as it was drawn: together they are the identity."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(m, m))
        self.register_buffer("inverse", torch.linalg.inv(self.weight.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ self.inverse


kp.register_module("test_waves", Waves)


def head_with(name: str = "test_waves", m: int = 3, **options) -> kp.Head:
    return kp.Head(m, 2, kp.HeadSpec(kp.ModuleExpansion(name, **options)), seed=0, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ a module as κ


def test_a_module_gives_the_columns_that_it_gives_by_itself() -> None:
    head = head_with()
    module = Waves(3).double()
    module.load_state_dict({name.removeprefix("kappa."): t for name, t in head.kappa.state_dict().items()})
    x = inputs(2, 7, 3)
    torch.testing.assert_close(head.expand(x).dense(), module(x))
    assert head.factors == (1, 5)


def test_its_tensors_are_those_of_the_head_and_frozen_ones_stay_so() -> None:
    head = head_with()
    assert sorted(name for name, _ in head.kappa.named_parameters()) == ["inner.weight"]
    assert sorted(name for name, _ in head.kappa.named_buffers()) == ["inner.bias", "phase"]
    head(inputs(4, 3)).sum().backward()
    assert head.kappa["inner"]["weight"].grad.abs().sum() > 0
    fixed = head_with(learnable=False)
    assert not list(fixed.kappa.parameters())
    assert list(fixed.kappa.state_dict()) != []
    assert torch.equal(fixed(inputs(4, 3)), head(inputs(4, 3)))


def test_initial_values_are_those_of_torch_for_a_seed_and_leave_its_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = head_with(), head_with()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first.kappa["inner"]["weight"], second.kappa["inner"]["weight"])
    weight = first.kappa["inner"]["weight"].detach()
    assert float(weight.abs().max()) <= 3**-0.5 + 1e-6  # what nn.Linear draws
    torch.manual_seed(3)
    unseeded = kp.Head(3, 2, kp.HeadSpec(kp.ModuleExpansion("test_waves")))
    torch.manual_seed(3)
    assert torch.equal(unseeded.kappa["inner"]["weight"], Waves(3).inner.weight)


def test_a_specification_with_a_module_is_data(tmp_path) -> None:
    model = kp.Model(kp.rpn([3, 2], expansion=kp.ModuleExpansion("test_waves")), seed=0)
    assert kp.to_dict(model.spec)["layers"][0]["heads"][0]["expansion"] == {
        "kind": "module",
        "module": "test_waves",
        "learnable": True,
    }
    kp.save(model, tmp_path / "m.safetensors")
    x = inputs(5, 3, dtype=torch.float32)
    assert torch.equal(kp.load(tmp_path / "m.safetensors")(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))  # noqa: S301
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_names_that_a_head_cannot_have_get_a_prefix(tmp_path) -> None:
    kp.register_module("test_named", Named)
    model = kp.Model(kp.rpn([3, 2], expansion=kp.ModuleExpansion("test_named")), seed=0)
    kappa = model.layers[0].heads[0].kappa
    module = Named(3)
    state = kappa.state_dict()
    assert sorted(state) == sorted(f"own_{name}" for name in module.state_dict())
    module.load_state_dict({name.removeprefix("own_"): tensor for name, tensor in state.items()})
    x = inputs(5, 3, dtype=torch.float32)
    torch.testing.assert_close(model.layers[0].heads[0].expand(x).dense(), module(x))
    kp.save(model, tmp_path / "m.safetensors")
    assert torch.equal(kp.load(tmp_path / "m.safetensors")(x), model(x))


@pytest.mark.parametrize("seed", [0, None])
def test_tensors_that_depend_on_others_are_drawn_together(seed) -> None:
    kp.register_module("test_coupled", Coupled)
    head = kp.Head(3, 2, kp.HeadSpec(kp.ModuleExpansion("test_coupled")), seed=seed)
    x = inputs(5, 3, dtype=torch.float32)
    for again in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):  # noqa: S301
        torch.testing.assert_close(again.expand(x).dense(), x, rtol=0, atol=1e-4)
        again.reset_parameters(3)
        torch.testing.assert_close(again.expand(x).dense(), x, rtol=0, atol=1e-4)


def test_a_trained_module_is_copied() -> None:
    trained = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.BatchNorm1d(4), nn.Dropout()).double()
    trained(inputs(50, 3) * 3 + 1)  # statistics of its own
    kp.register_module("test_trained", lambda m: trained)
    head = head_with("test_trained", learnable=False)
    assert trained.training
    assert trained[0].weight.device.type == "cpu"
    assert head.kappa["0"]["weight"].data_ptr() != trained[0].weight.data_ptr()
    x = inputs(2, 5, 3)
    expected = copy.deepcopy(trained).eval()(x.flatten(0, 1)).unflatten(0, (2, 5))
    for mode in (True, False):  # evaluation mode always
        torch.testing.assert_close(head.train(mode).expand(x).dense(), expected)
    assert head.expand(x[0, 0]).dense().shape == (4,)
    assert head.expand(x[:0]).dense().shape == (0, 5, 4)


def test_a_module_of_other_sizes_for_other_inputs() -> None:
    kp.register_module("test_wide", lambda m: nn.Linear(m, 2 * m, bias=False))
    assert [kp.ModuleExpansion("test_wide").out_features(m) for m in (1, 4)] == [2, 8]
    kp.register_module("test_wide", lambda m: nn.Linear(m, 3 * m, bias=False))  # the newer one counts
    assert kp.ModuleExpansion("test_wide").out_features(4) == 12


def test_nested_and_extended_with_a_module() -> None:
    spec = kp.HeadSpec(kp.Extended((kp.Nested((kp.ModuleExpansion("test_waves"), kp.Taylor(2))), kp.Identity())))
    head = kp.Head(3, 2, spec, seed=0)
    assert head.factors[1] == 5 + 25 + 3
    assert head(inputs(4, 3, dtype=torch.float32)).shape == (4, 2)


@pytest.mark.parametrize(
    ("name", "factory", "message"),
    [
        (
            "test_bad",
            lambda m: 3,
            r"ModuleExpansion\('test_bad'\): its factory must return a torch.nn.Module, returned int",
        ),
        ("test_bad", lambda m: nn.Linear(m + 1, 2), r"ModuleExpansion\('test_bad'\): fails on 3 inputs: "),
        ("test_bad", lambda m: nn.Flatten(0), r"must work row by row, \(rows, 3\) to \(rows, D\)"),
        ("test_bad", lambda m: nn.LSTM(m, 4, batch_first=True), r"ModuleExpansion\('test_bad'\): must work row by row"),
        (
            "test_bad",
            lambda m: nn.Softmax(0),
            r"outputs of a row depend on other rows, on randomness, or on earlier calls",
        ),
        ("test_bad", lambda m: nn.ReLU(inplace=True), r"changes its inputs in place; set inplace=False"),
        ("test_bad", lambda m: nn.LazyLinear(4), r"weight has no size yet; use modules that are not lazy"),
        ("test_bad", lambda m: nn.ConstantPad1d((0, -m), 0.0), r"has no outputs for 3 inputs"),
        ("test_bad", lambda m: {}["key"], r"its factory fails on 3 inputs: 'key'"),
        (
            "test_bad",
            Loose,
            r"Tensor on device meta.*; all its tensors must be parameters or buffers \(register_buffer\)",
        ),
    ],
)
def test_a_module_that_does_not_fit_is_refused(name, factory, message) -> None:
    kp.register_module(name, factory)
    with pytest.raises(kp.SpecError, match=message):
        head_with(name)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(
        kp.SpecError, match=r"there is no registered module .*; did you mean 'test_waves'\?.*silu_layer"
    ):
        head_with("test_wave")
    with pytest.raises(kp.SpecError, match=r"register_module\(''\): expected a name"):
        kp.register_module("", Waves)
    with pytest.raises(kp.SpecError, match=r"register_module\('x'\): expected a function"):
        kp.register_module("x", None)


# ------------------------------------------------------------------------------------------------ κ as a module


def test_an_expansion_in_a_sequential_trains_and_is_saved() -> None:
    kappa = kp.ExpansionModule(3, kp.GaussianRBF(learnable=True), seed=0)
    model = nn.Sequential(nn.Tanh(), kappa, nn.Linear(kappa.out_features, 1))
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kappa(x), kappa.expansion(x, kappa.kappa).dense())
    model(x).square().mean().backward()
    assert kappa.kappa["centers"].grad.abs().sum() > 0
    other = nn.Sequential(nn.Tanh(), kp.ExpansionModule(3, kp.GaussianRBF(learnable=True)), nn.Linear(15, 1))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert repr(kappa).startswith("ExpansionModule(\n  3 → 15, GaussianRBF(")


def test_an_expansion_module_is_calibrated() -> None:
    kappa = kp.ExpansionModule(2, kp.BSpline(), dtype=torch.float64)
    x = inputs(50, 2) * 20 + 7
    assert kp.calibrate(kappa, x) is kappa
    assert torch.equal(kappa.kappa["range"], torch.stack((x.amin(0), x.amax(0))))


def test_wrong_uses_of_an_expansion_module_are_refused() -> None:
    kappa = kp.ExpansionModule(3, kp.Taylor(2))
    with pytest.raises(kp.DataError, match=r"ExpansionModule: expected inputs of shape \(\.\.\., 3\), got \(5, 4\)"):
        kappa(torch.ones(5, 4))
    with pytest.raises(
        kp.DataError, match=r"ExpansionModule: expected inputs of a floating-point type, got torch.int64"
    ):
        kappa(torch.ones(5, 3, dtype=torch.int64))
    with pytest.raises(
        kp.SpecError, match=r"ExpansionModule\(5000\) needs κ\(x\) materialized, 25,005,000 columns per row"
    ):
        kp.ExpansionModule(5000, kp.Taylor(2))
    with pytest.raises(kp.SpecError, match=r"expected an expansion, got the reconciliation Dense"):
        kp.ExpansionModule(3, kp.Dense())
    with pytest.raises(kp.SpecError, match=r"in_features"):
        kp.ExpansionModule(0, kp.Taylor(2))


# ------------------------------------------------------------------------------------------------ κ as π


def test_an_expansion_remainder_equals_a_second_head() -> None:
    pi = kp.ExpansionRemainder(kp.Chebyshev(3), kp.LowRank(2), kp.LinearRemainder(bias=True))
    one = kp.Head(4, 3, kp.HeadSpec(kp.Taylor(2), kp.Dense(), pi), seed=0, dtype=torch.float64)
    two = kp.Head(4, 3, kp.HeadSpec(kp.Chebyshev(3), kp.LowRank(2), kp.LinearRemainder(bias=True)), dtype=torch.float64)
    two.psi.load_state_dict(one.pi["reconciliation"].state_dict())
    two.pi.load_state_dict(one.pi["remainder"].state_dict())
    x = inputs(9, 4)
    torch.testing.assert_close(one.remainder(x), two(x))
    torch.testing.assert_close(one(x), one.expand(x).dense() @ one.psi["matrix"].T + two(x))


def test_an_expansion_remainder_is_scaled_calibrated_and_stays_structured() -> None:
    pi = kp.ExpansionRemainder(kp.BSpline(), kp.DualLowRankKronecker(), kp.ExpansionRemainder(kp.GaussianRBF()))
    model = kp.Model(kp.ModelSpec((3, 6), (kp.LayerSpec((kp.HeadSpec(remainder=pi),)),)), seed=0, dtype=torch.float64)
    head = model.layers[0].heads[0]
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 9 - 4
    kp.calibrate(model, x)
    torch.testing.assert_close(head.pi["expansion"]["range"], torch.stack((x.amin(0), x.amax(0))))
    assert float(head.pi["remainder"]["expansion"]["centers"].min()) < -10
    wide = kp.Head(200, 40, kp.HeadSpec(remainder=kp.ExpansionRemainder(kp.Taylor(2), kp.Kronecker())), seed=0)
    rows = torch.randn(8, 200)
    with kp.testing.WatchSizes(rows, *wide.parameters()) as watch:
        wide(rows)
    assert watch.largest < 8 * wide.spec.remainder.expansion.out_features(200) / 10


def test_a_wrong_part_of_a_remainder_is_refused() -> None:
    with pytest.raises(kp.SpecError, match=r"ExpansionRemainder.expansion: expected an expansion"):
        kp.ExpansionRemainder(kp.Dense())
    with pytest.raises(kp.SpecError, match=r"Kronecker\(rows=5\): rows must divide the 4 outputs"):
        kp.Head(3, 4, kp.HeadSpec(remainder=kp.ExpansionRemainder(reconciliation=kp.Kronecker(rows=5))))


def test_a_constant_remainder_holds_a_constant_for_each_output() -> None:
    head = kp.Head(3, 2, kp.HeadSpec(reconciliation=kp.ZeroReconciliation(), remainder=kp.ConstantRemainder(4.0)))
    assert torch.equal(head(torch.ones(5, 3)), torch.full((5, 2), 4.0))
    assert not list(head.parameters())
    head.assign("remainder", value=[1.0, -2.0])
    assert torch.equal(head(torch.ones(3)), torch.tensor([1.0, -2.0]))
