"""The same function on a finer grid."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

import kapsi as kp
from kapsi.function import ROLES
from kapsi.remainder import Remainder

F64 = torch.float64
EVERY_PSI: list[kp.Reconciliation] = [
    kp.Dense(),
    kp.LowRank(2),
    kp.Kronecker(),
    kp.Kronecker(terms=2, rows=1),
    kp.LowRankKronecker(2),
    kp.DualLowRankKronecker(2),
    kp.KhatriRao(2),
]
ON_ANY_KAPPA = EVERY_PSI[:2]
EACH_PSI = pytest.mark.parametrize("psi", EVERY_PSI, ids=repr)


def trained(
    kappa: kp.Expansion, psi: kp.Reconciliation = EVERY_PSI[0], dtype: torch.dtype = F64, **options: Any
) -> kp.Model:
    """Return a calibrated model of two layers with parameters off their initial values, in evaluation mode."""
    model = kp.Model(kp.rpn([3, 4, 2], kappa, psi, **options), seed=0, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=F64).to(dtype))
    # On other points than those compared: at the very end of a range a rounding step decides what the policy `zero` gives.
    return kp.calibrate(model, points(dtype=dtype, seed=2))


def points(rows: int = 200, dtype: torch.dtype = F64, seed: int = 3) -> torch.Tensor:
    x = torch.randn(rows, 3, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return torch.stack((x[:, 0].exp(), x[:, 1] * 3 + 1, x[:, 2]), -1).to(dtype)


def same(model: kp.Model, finer: kp.Model, x: torch.Tensor, tolerance: float = 1e-10) -> None:
    expected = model(x)
    largest = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(finer(x), expected, rtol=0, atol=tolerance * largest)


@EACH_PSI
@pytest.mark.parametrize("policy", ["linear", "clamp", "zero"])
@pytest.mark.parametrize("channels", [1, 3])
def test_uniform_splines_keep_the_function_everywhere(psi, policy, channels) -> None:
    model = trained(kp.BSpline(3, 2, extrapolation=policy), psi, channels=channels, bias=True, remainder="linear")
    finer = kp.refine(model, intervals=12)
    same(model, finer, torch.cat((points(), points() * 3)))
    assert [head.spec.expansion.intervals for _, head in finer.heads()] == [12, 12]
    assert finer.layers[0].heads[0].factors == (14, 3)


def test_extended_uniform_splines_keep_the_function_on_the_range() -> None:
    model = kp.Model(kp.rpn([3, 2], kp.BSpline(3, extrapolation="extended")), seed=0, dtype=F64)
    finer = kp.refine(model, 6)
    x = torch.linspace(-1, 1, 99, dtype=F64).reshape(33, 3)
    same(model, finer, x)
    assert not torch.allclose(finer(x * 1.5), model(x * 1.5))


@pytest.mark.parametrize("psi", ON_ANY_KAPPA, ids=repr)
@pytest.mark.parametrize("knots", [(-1.0, -0.7, 0.1, 1.0), "quantile"], ids=["tuple", "quantile"])
@pytest.mark.parametrize("policy", ["linear", "extended", "clamp", "zero"])
@pytest.mark.parametrize("channels", [1, 2])
def test_other_knots_keep_the_function_everywhere(psi, knots, policy, channels) -> None:
    kappa = kp.BSpline(3 if knots == "quantile" else 5, 3, knots=knots, extrapolation=policy)
    model = trained(kappa, psi, channels=channels)
    finer = kp.refine(model, 9)
    same(model, finer, torch.cat((points(), points() * 3)))
    assert len(finer.layers[0].heads[0].kappa["knots"]) == 16


@EACH_PSI
def test_given_knots_alike_for_all_inputs_keep_every_structure(psi) -> None:
    kappa = kp.BSpline(knots=(-1.0, -0.7, 0.1, 1.0), degree=2)
    model = kp.Model(kp.rpn([3, 4, 2], kappa, psi), seed=0, dtype=F64)
    same(model, kp.refine(model, 6), points())
    kp.calibrate(model, points())  # the same breakpoints, moved and stretched
    same(model, kp.refine(model, 6), points())


@pytest.mark.parametrize("psi", [*ON_ANY_KAPPA, kp.Kronecker(columns=1), kp.KhatriRao(2)], ids=repr)
def test_extended_expansions_are_refined_part_by_part(psi) -> None:
    parts = (kp.Taylor(2), kp.BSpline(2, 1), kp.Extended((kp.BSpline(4, knots="quantile"), kp.Identity())))
    model = trained(kp.Extended(parts), psi)
    finer = kp.refine(model, 8)
    same(model, finer, points())
    inner = finer.layers[0].heads[0].spec.expansion.parts
    assert (inner[0], inner[1].intervals, inner[2].parts[0].intervals) == (kp.Taylor(2), 8, 8)


def test_nested_with_the_spline_last_is_refined() -> None:
    model = trained(kp.Nested((kp.Chebyshev(2), kp.BSpline(3))), kp.LowRank(2))
    same(model, kp.refine(model, 6), points())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-2), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("knots", ["uniform", "quantile"])
def test_types_are_kept(dtype, tolerance, knots) -> None:
    model = trained(kp.BSpline(3, knots=knots), kp.LowRank(2)).to(dtype)
    finer = kp.refine(model, 12)
    assert {tensor.dtype for tensor in finer.state_dict().values()} == {dtype}
    same(model, finer, points(dtype=dtype), tolerance)


def test_a_huge_factor() -> None:
    for knots in ("uniform", "quantile"):
        model = trained(kp.BSpline(1, 3, knots=knots), remainder="linear")
        same(model, kp.refine(model, 1000), points())


def test_steps_and_degrees_above_the_number_of_intervals() -> None:
    for kappa in (
        kp.BSpline(2, 0),
        kp.BSpline(2, 0, knots="quantile"),
        kp.BSpline(1, 5),
        kp.BSpline(2, 7, knots="quantile"),
    ):
        model = kp.Model(kp.rpn([3, 2], kappa), seed=0, dtype=F64)
        same(model, kp.refine(model, 8), points() / 7)


def test_refining_twice_is_refining_once() -> None:
    model = trained(kp.BSpline(2, knots="quantile"))
    twice, once = kp.refine(kp.refine(model, 4), 12), kp.refine(model, 12)
    assert twice.spec == once.spec
    for name, tensor in once.state_dict().items():
        torch.testing.assert_close(twice.state_dict()[name], tensor)


def test_the_model_is_not_changed_and_shares_no_memory() -> None:
    model = trained(kp.BSpline(3), bias=True)
    model.train()
    model.layers[1].eval()
    model.freeze("layers.0", "*.bias")
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    finer = kp.refine(model, 6)
    assert torch.equal(random, torch.get_rng_state())
    assert [module.training for module in (finer, finer.layers[0], finer.layers[1])] == [True, True, False]
    frozen = {name: not parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: not parameter.requires_grad for name, parameter in finer.named_parameters()} == frozen
    assert any(frozen.values())
    with torch.no_grad():
        for tensor in (*finer.parameters(), *finer.buffers()):
            tensor.add_(1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_other_heads_are_copied_bit_for_bit() -> None:
    heads = (kp.HeadSpec(kp.Taylor(2), kp.Masked(0.5), after=("layer_norm",)), kp.HeadSpec(kp.BSpline(3), bias=True))
    layers = (kp.LayerSpec((kp.HeadSpec(kp.Chebyshev(3), kp.LowRank(1)),), output="batch_norm"), kp.LayerSpec(heads))
    model = kp.Model(kp.ModelSpec((3, 4, 2), layers), seed=0, dtype=F64).eval()
    finer = kp.refine(model, 9)
    same(model, finer, points())
    old, new = model.state_dict(), finer.state_dict()
    assert old.keys() == new.keys()
    changed = {name for name in old if old[name].shape != new[name].shape or not torch.equal(old[name], new[name])}
    assert changed == {"layers.1.heads.1.psi.matrix"}


def test_heads_that_share_their_expansion_still_do() -> None:
    heads = (kp.HeadSpec(kp.BSpline(2)), kp.HeadSpec(kp.BSpline(2), kp.LowRank(1)), kp.HeadSpec(kp.BSpline(4)))
    model = kp.Model(kp.ModelSpec((3, 2), (kp.LayerSpec(heads),)), seed=0, dtype=F64)
    kp.calibrate(model, points())
    assert model.layers[0]._owners == [0, 0, 2]
    finer = kp.refine(model, 8)
    assert finer.layers[0]._owners == [0, 0, 0]
    same(model, finer, points())
    model.layers[0].heads[2].assign("expansion", range=[[-9.0] * 3, [9.0] * 3])
    with pytest.raises(
        kp.SpecError, match=r"layers\.0\.heads\.2 and layers\.0\.heads\.0 have equal expansions of b_spline"
    ):
        kp.refine(model, 8)


@pytest.mark.parametrize("knots", ["uniform", "quantile", (-1.0, 0.3, 1.0)])
def test_the_refined_model_is_saved_and_loaded(knots, tmp_path) -> None:
    model = trained(kp.BSpline(2 if isinstance(knots, str) else 5, knots=knots), kp.LowRank(2))
    finer = kp.refine(model, 6)
    assert kp.from_dict(kp.to_dict(finer.spec)) == finer.spec
    kp.save(finer, tmp_path / "m.safetensors")
    loaded = kp.load(tmp_path / "m.safetensors")
    assert loaded.spec == finer.spec
    assert torch.equal(loaded(points()), finer(points()))


def test_one_layer_that_stands_for_all_still_does_if_it_can() -> None:
    spec = kp.ModelSpec((3, 3, 3), (kp.LayerSpec((kp.HeadSpec(kp.BSpline(2)),)),))
    assert len(kp.refine(kp.Model(spec, dtype=F64), 4).spec.layers) == 1


def test_a_refined_model_trains_on_to_a_better_fit() -> None:
    x = torch.linspace(-1, 1, 200, dtype=F64).unsqueeze(-1)
    y = torch.sin(9 * x)

    def fitted(model: kp.Model) -> float:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            error = (model(x) - y).square().mean()
            error.backward()
            return error

        optimizer.step(loss)
        return float(loss().detach())

    model = kp.Model(kp.rpn([1, 1], kp.BSpline(2)), seed=0, dtype=F64)
    coarse = fitted(model)
    finer = kp.refine(model, 16)
    assert float((finer(x) - y).square().mean().detach()) == pytest.approx(coarse, abs=1e-12)
    assert fitted(finer) < coarse / 100


# ------------------------------------------------------------------------------------------------ errors


@dataclass(frozen=True)
class Smooth(Remainder, name="refine_test_smooth"):
    """A remainder with an expansion in it."""

    expansion: kp.Expansion = kp.BSpline()

    def __call__(self, x: torch.Tensor, params: Any, out_features: int) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], out_features)


ROLES["remainder"].pop("refine_test_smooth")


def spec(**options: Any) -> kp.ModelSpec:
    other = kp.HeadSpec(kp.Taylor(2))
    return kp.ModelSpec((3, 2), (kp.LayerSpec((other, kp.HeadSpec(**{"expansion": kp.BSpline(5), **options}))),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expansion": kp.Identity()}, r"refine: no head of the model has a spline"),
        ({"expansion": kp.BSpline(4)}, r"BSpline\(intervals=4\): .* a multiple: 4, 8, 12, 16, … up to 100,000; got 10"),
        ({"reconciliation": kp.Masked()}, r"Masked: cannot be carried over .*possible are Dense, LowRank"),
        ({"reconciliation": kp.ConstantReconciliation()}, r"ConstantReconciliation: cannot be carried over"),
        ({"reconciliation": kp.Kronecker(columns=2)}, r"Kronecker: cannot be carried over .*Kronecker kinds"),
        ({"after": ("layer_norm",)}, r"LayerNorm after κ acts on its columns.*before κ or after the layer"),
        ({"expansion": kp.Nested((kp.BSpline(5), kp.Taylor(2)))}, r"Nested: .*BSpline, part 0, .* only the last part"),
        (
            {"expansion": kp.Extended((kp.BSpline(5), kp.Identity())), "reconciliation": kp.Kronecker(columns=9)},
            r"this κ has no such grid: inputs or parts differ in knots",
        ),
    ],
)
def test_what_cannot_be_refined_says_which_head_and_why(options, message) -> None:
    model = kp.Model(spec(**options), seed=0)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(kp.SpecError, match=message) as caught:
        kp.refine(model, 10)
    if options != {"expansion": kp.Identity()}:
        assert str(caught.value).startswith("refine: layers.0.heads.1: ")
    assert "\n" not in str(caught.value)
    assert model.spec == spec(**options)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_quantile_knots_have_no_grid_for_kronecker_kinds() -> None:
    model = trained(kp.BSpline(2, knots="quantile"), kp.Kronecker())
    with pytest.raises(kp.SpecError, match=r"refine: layers\.0\.heads\.0: Kronecker: .*; this κ has no such grid"):
        kp.refine(model, 4)


def test_a_spline_in_a_remainder_is_refused() -> None:
    ROLES["remainder"]["refine_test_smooth"] = Smooth
    try:
        model = kp.Model(spec(remainder=Smooth()), seed=0)
    finally:
        ROLES["remainder"].pop("refine_test_smooth")
    with pytest.raises(
        kp.SpecError, match=r"refine: layers\.0\.heads\.1: Smooth has a grid, BSpline\(.*is not refined"
    ):
        kp.refine(model, 10)


def test_wrong_arguments() -> None:
    model = kp.Model(spec())
    for wrong in (2.5, "10", True, None):
        with pytest.raises(kp.SpecError, match=r"refine\(intervals\): expected an integer"):
            kp.refine(model, wrong)
    with pytest.raises(kp.SpecError, match="expected a kapsi Model, got Head"):
        kp.refine(model.layers[0].heads[1], 10)
    with pytest.raises(kp.SpecError, match="on the meta device"):
        kp.refine(kp.Model(spec(), device="meta"), 10)


def refined_model() -> tuple[kp.Model, torch.Tensor]:
    model = kp.Model(kp.rpn([2, 3, 1], kp.BSpline(intervals=5)), seed=0, dtype=torch.float64)
    return model, torch.rand(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_hooks_are_kept() -> None:
    model, x = refined_model()
    seen: list[str] = []
    model.layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    model.layers[1].heads[0].register_forward_hook(
        lambda module, args, kwargs, output: seen.append("head"), with_kwargs=True
    )
    expected = model(x)
    fine = kp.refine(model, 10)
    torch.testing.assert_close(fine(x), expected, rtol=0, atol=1e-12)
    assert seen == ["head", "head"]
    fine.layers[0]._forward_hooks.clear()  # the hooks of the two models are separate
    assert torch.equal(model(x), expected)


def replaced(model: kp.Model) -> None:
    model.layers[0].forward = lambda x: x


def pruned(model: kp.Model) -> None:
    prune.l1_unstructured(model.layers[0].heads[0].psi, "matrix", amount=0.5)


def wrapped_head(model: kp.Model) -> None:
    model.layers[1].heads[0] = torch.nn.Sequential(model.layers[1].heads[0])


def wrapped_layer(model: kp.Model) -> None:
    model.layers[1] = torch.nn.Sequential(model.layers[1])


def further_layer(model: kp.Model) -> None:
    model.layers.append(kp.Layer(1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced, r"layers\.0 has a forward method of its own"),
        (pruned, r"layers\.0\.heads\.0\.psi: matrix is computed by a hook or a parametrization; remove it first"),
        (wrapped_head, r"layers\.1\.heads\.0 is a Sequential, expected a Head; put the head back first"),
        (wrapped_layer, r"layers\.1 is a Sequential, expected a Layer; put the layer back first"),
        (further_layer, "the model has 3 layers, and its specification 2"),
        (lambda model: model.register_buffer("extra", torch.ones(1)), "differs from its specification, see extra"),
    ],
)
def test_changed_models_are_refused_in_one_line(change, message) -> None:
    model, _ = refined_model()
    change(model)
    with pytest.raises(kp.SpecError, match=rf"^refine: .*{message}") as caught:
        kp.refine(model, 10)
    assert "\n" not in str(caught.value)
