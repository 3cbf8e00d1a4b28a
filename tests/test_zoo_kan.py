"""Kolmogorov–Arnold networks: the formula, import from pykan, edges, pruning, the grid, formulas."""

from __future__ import annotations

import copy
import importlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import BSpline as ScipySpline
from torch import Tensor, nn

import kapsi as kp
from kapsi.zoo import kan

F64 = torch.float64
drawn = settings(max_examples=15, deadline=None, derandomize=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.rand(rows, columns, generator=generator(seed), dtype=F64) * 2 - 1) * scale


def close(made: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert made.shape == expected.shape
    assert bool(((made - expected).abs() <= tolerance * expected.abs().clamp_min(1)).all())


@torch.no_grad()
def error(model: kp.Model, x: Tensor, y: Tensor) -> float:
    return float((model(x) - y).square().mean())


@pytest.fixture(scope="module")
def pykan() -> Iterator[Any]:
    pytest.importorskip("kan")
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        yield importlib.import_module("kan")
    random.setstate(states[0])
    np.random.set_state(states[1])


def network(pykan: Any, width: list[int], **options: Any) -> Any:
    """Return a model of pykan in float32, its default, with parameters that are far from those of a new one."""
    seed = options.pop("seed", 0)
    model = pykan.KAN(width=list(width), seed=seed, auto_save=False, **options)
    draw = generator(seed)
    with torch.no_grad():
        for layer in model.act_fun:
            layer.coef.add_(torch.randn(layer.coef.shape, generator=draw) * 0.3)
            layer.scale_sp.mul_(torch.rand(layer.scale_sp.shape, generator=draw) + 0.5)
        for name in ("node_scale", "node_bias", "subnode_scale", "subnode_bias"):
            for tensor in getattr(model, name):
                tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.2)
    return model


def same(theirs: Any, x: Tensor, **options: Any) -> kp.Model:
    """Compare a model of pykan, in float64, with what it becomes, also far from the range, and gradients of the inputs."""
    model = kan.from_pykan(theirs, **options)
    assert isinstance(model, kp.Model)
    theirs = theirs.double()  # its trained models cannot be copied; float32 numbers stay what they are
    ours, others = (torch.cat((x, 5 * x)).requires_grad_() for _ in range(2))
    expected = theirs(others)
    close(model(ours), expected)
    (a,) = torch.autograd.grad(model(ours).sum(), ours)
    (b,) = torch.autograd.grad(expected.sum(), others)
    close(a, b)
    return model


# ------------------------------------------------------------------------------------------------ the formula


@drawn
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_a_layer_is_the_sum_of_its_edges(m: int, n: int, intervals: int, degree: int, seed: int) -> None:
    model = kp.Model(kan.spec([m, n], intervals, degree, low=-2.0, high=1.0), seed=seed, dtype=F64)
    x = points(30, m, seed, 4.0)
    coefficients = model.layers[0].heads[0].psi["matrix"].detach().unflatten(1, (-1, m)).numpy()
    base = model.layers[0].heads[0].pi["matrix"].detach().numpy()
    knots = -2.0 + np.arange(-degree, intervals + degree + 1) * (3.0 / intervals)
    expected = np.zeros((30, n))
    for i in range(m):
        column = x[:, i].numpy()
        silu = column / (1 + np.exp(-column))
        for o in range(n):
            spline = ScipySpline(knots, coefficients[o, :, i], degree, extrapolate=False)
            expected[:, o] += base[o, i] * silu
            # SciPy's is for the range; beyond it the functions go on to the last knots.
            wider = ScipySpline(
                np.concatenate(([knots[0]] * degree, knots, [knots[-1]] * degree)),
                np.concatenate(([0.0] * degree, coefficients[o, :, i], [0.0] * degree)),
                degree,
                extrapolate=False,
            )
            inside = (column >= -2) & (column <= 1)
            np.testing.assert_allclose(spline(column[inside]), wider(column[inside]), atol=1e-12)
            expected[:, o] += np.nan_to_num(wider(column))
    close(model(x).detach(), torch.tensor(expected), 1e-10)


def test_options_of_the_specification() -> None:
    assert kan.spec([2, 1], base=None).layers[0].heads[0].remainder == kp.ZeroRemainder()
    assert kan.spec([2, 1], base="tanh").layers[0].heads[0].remainder == kp.LinearRemainder(before="tanh")
    assert kan.spec([2, 1], bias=True).layers[0].heads[0].bias
    expansion = kan.spec([2, 1], 7, 2, low=-3.0, high=4.0, knots="quantile", extrapolation="linear").layers[0].heads[0]
    assert expansion.expansion == kp.BSpline(7, 2, -3.0, 4.0, "linear", "quantile")
    assert kan.spec([2, 1], knots=(0.0, 1.0, 3.0)).layers[0].heads[0].expansion.intervals == 2
    with pytest.raises(kp.SpecError, match="wobble"):
        kan.spec([2, 1], base="wobble")
    with pytest.raises(kp.SpecError, match="intervals"):
        kan.spec([2, 1], intervals=9, knots=(0.0, 1.0, 3.0))


# ------------------------------------------------------------------------------------------------ from pykan


@drawn
@given(data=st.data())
def test_a_model_of_pykan_has_equal_outputs(pykan: Any, data: st.DataObject) -> None:
    width = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    layers = len(width) - 1
    grid = data.draw(st.integers(1, 6) | st.lists(st.integers(1, 6), min_size=layers, max_size=layers))
    k = data.draw(st.integers(1, 4) | st.lists(st.integers(1, 4), min_size=layers, max_size=layers))
    options = {
        "base_fun": data.draw(st.sampled_from(["silu", "identity", "zero"])),
        "grid_range": data.draw(st.sampled_from([[-1, 1], [-0.5, 2]])),
        "sparse_init": data.draw(st.booleans()),
        "symbolic_enabled": data.draw(st.booleans()),
    }
    model = network(pykan, width, grid=grid, k=k, seed=data.draw(st.integers(0, 50)), **options)
    x = points(40, width[0], 3)
    if data.draw(st.booleans()):
        with torch.no_grad():
            model.update_grid_from_samples((x * data.draw(st.sampled_from([0.7, 2.0])) + 0.3).float())
    if data.draw(st.booleans()):
        model.act_fun[0].mask.data[0, 0] = data.draw(st.sampled_from([0.0, 0.5]))
    same(model, x)


def test_pruned_and_refined_models_of_pykan(pykan: Any, tmp_path: Any) -> None:
    x = points(100, 3, 1)
    model = network(pykan, [3, 5, 2], grid=4, ckpt_path=str(tmp_path))
    with torch.no_grad():
        model(x.float())
        model.attribute(plot=False)
        threshold = float(model.node_scores[1].sort().values[2]) + 1e-6
        pruned = model.prune(node_th=threshold, edge_th=0.1)
        assert pruned.width_in[1] == 2
        assert bool((pruned.act_fun[0].mask == 0).any())
        refined = model.refine(9)
        assert refined.act_fun[0].grid.shape[1] == 9 + 1 + 6
        fewer = model.prune_input(active_inputs=[2, 0], log_history=False)
    same(pruned, x)
    same(refined, x)
    with pytest.raises(kp.SpecError, match=r"uses the inputs \[2, 0\].*in_features=.*at least 3"):
        kan.from_pykan(fewer)
    with pytest.raises(kp.SpecError, match="at least 3"):
        kan.from_pykan(fewer, in_features=2)
    assert same(fewer, x, in_features=3).in_features == 3


def test_trained_models_of_pykan(pykan: Any, tmp_path: Any, capsys: Any) -> None:
    x = points(100, 2)
    y = torch.exp(torch.sin(torch.pi * x[:, :1]) + x[:, 1:] ** 2)
    model = pykan.KAN(width=[2, 3, 1], grid=3, seed=0, affine_trainable=True, auto_save=False)
    data = {"train_input": x.float(), "train_label": y.float(), "test_input": x.float(), "test_label": y.float()}
    model.fit(data, steps=4, lamb=0.001, log=10)
    capsys.readouterr()
    imported = same(model, x)
    # It goes on from there.
    before = error(imported, x, y)
    records = kp.fit(imported, (x, y), solver="levenberg_marquardt", epochs=5)
    assert records[-1].loss < before / 10
    path = tmp_path / "kan.safetensors"
    kp.save(imported, path)
    assert torch.equal(kp.load(path)(x), imported(x))


def test_a_constant_input_has_no_spline(pykan: Any) -> None:
    x = points(60, 2)
    x[:, 1] = 0.25
    model = network(pykan, [2, 3, 1], grid=3)
    with torch.no_grad():
        model.update_grid_from_samples(x.float())
    assert float(model.act_fun[0].grid[1].diff().abs().max()) == 0
    imported = kan.from_pykan(model)
    for rows in (x, points(30, 2, 5)):
        close(imported(rows), copy.deepcopy(model).double()(rows))


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (nn.ReLU(inplace=True), "relu"),
        (torch.tanh, "tanh"),
        (nn.functional.gelu, "gelu"),
        (nn.Softplus(), "softplus"),
        (nn.SiLU(), "silu"),
    ],
)
def test_other_base_functions(pykan: Any, base: Any, name: str) -> None:
    if isinstance(base, nn.ReLU):  # pykan itself would change its inputs
        model = network(pykan, [2, 1], grid=3)
        model.act_fun[0].base_fun = base
        imported = kan.from_pykan(model)
    else:
        imported = same(network(pykan, [2, 3, 1], grid=3, base_fun=base), points(20, 2))
    assert imported.layers[0].heads[0].spec.remainder.before.name == name


@pytest.mark.parametrize("base", [lambda x: x * 0.0, nn.LeakyReLU(0.2), nn.GELU("tanh"), nn.Linear(2, 2), torch.erf])
def test_base_functions_that_kapsi_does_not_have_are_refused(pykan: Any, base: Any) -> None:
    model = network(pykan, [2, 1], grid=3, base_fun=base)
    with pytest.raises(kp.SpecError, match=r"act_fun\[0\].base_fun is .*'silu', 'identity', 'zero'.*softsign"):
        kan.from_pykan(model)


def test_what_cannot_be_carried_over_is_refused(pykan: Any) -> None:
    with pytest.raises(kp.SpecError, match=r"width\[1\] has 1 multiplication nodes"):
        kan.from_pykan(pykan.KAN(width=[2, [1, 1], 1], grid=3, auto_save=False))
    for other in (nn.Linear(2, 1), None, "kan", kp.Model(kan.spec([2, 1])), pykan.KANLayer(2, 1)):
        with pytest.raises(kp.SpecError, match=r"expected a pykan 0.2 model.*got "):
            kan.from_pykan(other)
    model = network(pykan, [2, 2, 1], grid=3)
    model.fix_symbolic(1, 1, 0, "sin", fit_params_bool=False, log_history=False)
    with pytest.raises(kp.SpecError, match=r"layer 1 from node 1 to node 0 is symbolic, 'sin'.*unfix_symbolic_all"):
        kan.from_pykan(model)
    model.symbolic_enabled = False  # then it does not count
    same(model, points(20, 2))
    model = network(pykan, [2, 1], grid=4, grid_eps=0.0)
    model.act_fun[0].grid.data[:, 5] = model.act_fun[0].grid.data[:, 4]
    with pytest.raises(kp.SpecError, match="knots of input 0 do not increase strictly"):
        kan.from_pykan(model)
    model = network(pykan, [2, 1], grid=4)
    model.act_fun[0].coef.data[0, 0, 0] = float("nan")
    with pytest.raises(kp.DataError, match=r"act_fun\[0\].coef: expected finite numbers"):
        kan.from_pykan(model)
    for width in (True, 1, 2.0):
        with pytest.raises(kp.SpecError, match="expected an integer"):
            kan.from_pykan(network(pykan, [2, 1], grid=3), in_features=width)
    model = network(pykan, [2, 1], grid=3)
    model.input_id = torch.tensor([1, 1])
    with pytest.raises(kp.SpecError, match="uses an input twice"):
        kan.from_pykan(model, in_features=3)
    model.input_id = torch.tensor([1])
    with pytest.raises(kp.SpecError, match="input_id has 1 inputs, and the first layer 2"):
        kan.from_pykan(model, in_features=3)


def test_symbolic_constants_are_a_bias(pykan: Any) -> None:
    model = network(pykan, [2, 2, 1], grid=3)
    model.fix_symbolic(0, 1, 0, "0", fit_params_bool=False, log_history=False)
    model.symbolic_fun[0].affine.data[0, 1] = torch.tensor([1.0, 0.0, 1.0, 0.75])
    same(model, points(20, 2))


def test_an_imported_model_can_be_refined(pykan: Any) -> None:
    model = network(pykan, [2, 3, 1], grid=3)
    x = points(50, 2)
    with torch.no_grad():
        model.update_grid_from_samples(x.float())
    imported = kan.from_pykan(model)
    rows = torch.cat((x, 5 * x))
    close(kp.refine(imported, intervals=9)(rows), imported(rows))


@pytest.mark.parametrize("case", kan.PARITY, ids=lambda case: case.model)
def test_parity(pykan: Any, case: Any) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for seed in (0, 1):
        found = case.compare(seed)
        assert found.deviation <= case.tolerance
        assert found.ours > 0
        assert found.theirs > found.ours / 2
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2][1])


# ------------------------------------------------------------------------------------------------ training


def test_the_first_example_of_pykan_reaches_the_loss_of_pykan() -> None:
    # 50 steps of pykan 0.2.8 end at 2.0e-3 to 3.0e-3 (five intervals, no penalty, seeds 0 to 2).
    x = points(1000, 2)
    y = torch.exp(torch.sin(torch.pi * x[:, :1]) + x[:, 1:] ** 2)
    model = kp.calibrate(kp.Model(kan.spec([2, 5, 1]), seed=0, dtype=F64), x)
    records = kp.fit(model, (x, y), solver="levenberg_marquardt", epochs=30)
    assert records[-1].loss ** 0.5 < 2e-3


# ------------------------------------------------------------------------------------------------ edges

MODELS = {
    "kan": kan.spec([3, 4, 2]),
    "bias": kan.spec([3, 4, 2], bias=True, base="tanh"),
    "chebyshev": kp.rpn([3, 4, 2], kp.Chebyshev(3), kp.LowRank(2), "constant", before="tanh", bias=True),
    "extended": kp.rpn([3, 4, 2], kp.Extended((kp.BSpline(3), kp.Identity())), channels=2, heads=2, fusion="mean"),
    "identity": kp.rpn([3, 3, 3], kp.Hermite(2), remainder=kp.IdentityRemainder("relu")),
    "linear": kp.rpn([3, 4, 2], kp.BSpline(3), remainder=kp.LinearRemainder(bias=True)),
    "plain identity": kp.rpn([3, 3], kp.BSpline(3), kp.Masked(0.4), remainder="identity"),
}


def randomized(spec: kp.ModelSpec, seed: int = 0) -> kp.Model:
    model = kp.Model(spec, seed=seed, dtype=F64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator(seed), dtype=F64))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_edges_add_up_to_the_layer_and_depend_on_one_input_each(name: str) -> None:
    model, x = randomized(MODELS[name]), points(20, 3)
    edges = kp.interpret.edge_functions(model, x)
    inputs = x
    for layer, found in zip(model.layers, edges, strict=True):
        close(found.inputs, inputs)
        close(found.outputs(), layer(inputs))
        inputs = layer(inputs)
    first = kp.interpret.edge_functions(model, x)[0].values
    x[:, 1] += 0.3
    second = kp.interpret.edge_functions(model, x)[0].values
    assert torch.equal(first[..., [0, 2]], second[..., [0, 2]])
    assert not torch.equal(first[..., 1], second[..., 1])


def test_edges_and_attribution_are_those_of_pykan(pykan: Any) -> None:
    theirs = network(pykan, [3, 4, 2], grid=4).double()
    with torch.no_grad():
        theirs.node_bias[0].zero_()
        theirs.subnode_bias[0].zero_()
        theirs.node_scale[0].fill_(1)
        theirs.subnode_scale[0].fill_(1)
    x = points(200, 3)
    theirs(x)
    theirs.attribute(plot=False)
    model = kan.from_pykan(theirs)
    edges = kp.interpret.edge_functions(model, x)
    close(edges[0].values, theirs.spline_postacts[0])
    scores = kp.interpret.attribution(model, x)
    for ours, other in zip(scores.edges, theirs.edge_scores, strict=True):
        torch.testing.assert_close(ours, other.detach().double(), rtol=2e-3, atol=1e-6)
    for ours, other in zip(scores.nodes, theirs.node_scores, strict=True):
        torch.testing.assert_close(ours, other.detach().double(), rtol=2e-3, atol=1e-6)


def test_models_without_edges_are_refused() -> None:
    x = points(5, 2)
    layer = kp.LayerSpec(kp.HeadSpec(kp.BSpline()), output="batch_norm")
    refused = {
        "Taylor mixes inputs": kp.rpn([2, 1], kp.Taylor(2)),
        "LayerNorm after κ": kp.rpn([2, 1], kp.BSpline(), after="layer_norm"),
        "only activations are possible before κ, got LayerNorm": kp.rpn([2, 1], kp.BSpline(), before="layer_norm"),
        "ExpansionRemainder": kp.rpn([2, 1], kp.BSpline(), remainder=kp.ExpansionRemainder()),
        "activation after the matrix": kp.rpn([2, 1], kp.BSpline(), remainder=kp.LinearRemainder(after="relu")),
        "BatchNorm.* processes its outputs": kp.ModelSpec((2, 1), layer),
        "fuses its heads": kp.rpn([2, 1], kp.BSpline(), heads=2, fusion="weighted_sum"),
    }
    for text, spec in refused.items():
        with pytest.raises(kp.SpecError, match=rf"edge_functions: layers.0.*{text}"):
            kp.interpret.edge_functions(kp.Model(spec, dtype=F64), x)
    model = kp.Model(kan.spec([2, 1]), dtype=F64)
    for wrong in (x[:, :1], x[0], x[:0], "x", x / 0):
        with pytest.raises(kp.DataError, match="edge_functions: "):
            kp.interpret.edge_functions(model, wrong)
    with pytest.raises(kp.SpecError, match="expected a kapsi Model"):
        kp.interpret.edge_functions(nn.Linear(2, 1), x)
    broken = kp.Model(kan.spec([2, 1]), dtype=F64)
    with torch.no_grad():
        broken.layers[0].heads[0].pi["matrix"].fill_(float("nan"))
    with pytest.raises(kp.DataError, match=r"layers.0: .* not finite"):
        kp.interpret.edge_functions(broken, x)
    with pytest.raises(kp.SpecError, match="meta"):
        kp.interpret.edge_functions(kp.Model(kan.spec([2, 1]), device="meta"), x)
    with pytest.raises(kp.SpecError, match="use fewer rows"):
        kp.interpret.edge_functions(kp.Model(kp.rpn([2000, 100], kp.Identity())), torch.zeros(1000, 2000))
    for function in (kp.interpret.attribution, pruned):
        with pytest.raises(kp.DataError, match="at least 2 rows"):
            function(model, x[:1])


# ------------------------------------------------------------------------------------------------ pruning


def pruned(model: kp.Model, x: Tensor, **options: Any) -> kp.Model:
    small: kp.Model = kp.interpret.prune(model, x, **{"edges": 0.03, "nodes": 0.01, **options}).model
    return small


def without(model: kp.Model, layer: int, edges: list[tuple[int, int]], value: float = 0.0) -> None:
    """Make some edges (to, from) of a layer constant: splines add up to one on the range."""
    head = model.layers[layer].heads[0]
    with torch.no_grad():
        for to, source in edges:
            head.psi["matrix"].unflatten(1, (-1, head.in_features))[to, :, source] = value
            head.pi["matrix"][to, source] = 0


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("value", [0.0, 0.7])
def test_pruned_is_equal_where_what_goes_is_constant(fixed: bool, value: float) -> None:
    x = points(60, 3)
    model = randomized(kan.spec([3, 5, 2], extrapolation="linear"))
    kp.calibrate(model, x)
    # Nodes 0 and 3: no edge leaves them; node 4: none leads to it; another edge by itself.
    without(model, 1, [(o, i) for o in range(2) for i in (0, 3)], value)
    without(model, 0, [(4, i) for i in range(3)] + [(1, 2)], value)
    small = pruned(model, x, edges=0, nodes=0, fixed=fixed)
    assert small.spec.widths == (3, 2, 2)
    close(small(x), model(x), 1e-10)
    kinds = [type(head.spec.reconciliation) for _, head in small.heads()]
    assert kinds == ([kp.Masked, kp.Masked, kp.Dense] if fixed else [kp.Dense, kp.Dense])
    # 5 of 6 edges of the first layer and all 4 of the second, of 8 functions and a base weight; biases for what was not zero.
    # What leaves node 4 is a constant that is not.
    biases = 2 + 2 if value else 2
    count = sum(parameter.numel() for parameter in small.parameters())
    assert count == (5 + 4 if fixed else 6 + 4) * 9 + biases


def test_edges_that_went_stay_away_in_training() -> None:
    x = points(200, 2)
    y = torch.sin(3 * x[:, :1]) + x[:, 1:] ** 2
    model = randomized(kan.spec([2, 3, 1]))
    without(model, 0, [(0, 1), (1, 0)])
    for fixed in (True, False):
        small = pruned(model, x, edges=0, nodes=0, fixed=fixed)
        kp.fit(small, (x, y), solver="levenberg_marquardt", epochs=3)
        edges = kp.interpret.edge_functions(small, x)[0].values
        assert (float(edges[:, 0, 1].abs().max()) == 0) == fixed
        assert float(edges[:, 0, 0].std()) > 0
    again = pruned(pruned(model, x, edges=0, nodes=0), x, edges=0, nodes=0)
    close(again(x), model(x), 1e-10)
    assert again.spec == pruned(model, x, edges=0, nodes=0).spec
    refined = kp.refine(pruned(model, x, edges=0, nodes=0, fixed=False), intervals=10)
    grid = points(50, 2, 5, 0.9)
    close(refined.layers[0](grid), model.layers[0](grid), 1e-10)


def test_what_counts_little_goes() -> None:
    x = points(300, 3)
    y = torch.sin(2 * x[:, :1]) * 2 + x[:, 1:2] ** 2  # the third input is nothing
    model = kp.calibrate(kp.Model(kan.spec([3, 4, 1]), seed=1, dtype=F64), x)
    kp.fit(model, (x, y), solver="levenberg_marquardt", epochs=30, group_l1=0.0, l2=1e-5)
    scores = kp.interpret.attribution(model, x)
    threshold = 0.05
    small = pruned(model, x, edges=threshold)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    left = kp.interpret.attribution(small, x)
    assert float(left.nodes[0][2]) <= threshold * 4
    assert len(left.nodes[1]) <= len(scores.nodes[1])
    loss = error(small, x, y)
    assert loss < 0.2 * float(y.var())
    kp.fit(small, (x, y), solver="levenberg_marquardt", epochs=20)
    assert error(small, x, y) < loss / 10


def test_several_heads_masks_and_means_are_pruned() -> None:
    x = points(50, 3)
    head = kp.HeadSpec(
        kp.BSpline(3, extrapolation="extended"), kp.Masked(0.5), kp.LinearRemainder(bias=True), channels=2
    )
    other = kp.HeadSpec(kp.BSpline(5, 2), kp.Dense(), bias=True, before="tanh")
    spec = kp.ModelSpec((3, 4, 2), kp.LayerSpec((head, other), fusion="mean"))
    model = randomized(spec)
    small = pruned(model, x, edges=0, nodes=0)
    close(small(x), model(x), 1e-10)
    scores = kp.interpret.attribution(model, x).edges[0].flatten().sort().values
    fewer = pruned(model, x, edges=float(scores[3]), nodes=0.0)
    kept = kp.interpret.edge_functions(fewer, x)[0].values.abs().amax(0) > 0
    assert 0 < int(kept.sum()) < kept.numel()
    single = kp.Model(kan.spec([3, 4, 2])).train(False)
    assert not pruned(single, x.float(), edges=0, nodes=0).training
    assert pruned(single, x.float(), edges=0, nodes=0)(x.float()).dtype == torch.float32


def test_pruning_that_cannot_be_is_refused() -> None:
    model, x = randomized(kan.spec([2, 3, 1])), points(20, 2)
    with pytest.raises(kp.SpecError, match=r"no edge of layers.0 would be left"):
        pruned(model, x, edges=10.0)
    for bad in (-1.0, float("nan"), "much"):
        with pytest.raises(kp.SpecError, match=r"prune\(edges"):
            pruned(model, x, edges=bad)


# ------------------------------------------------------------------------------------------------ the grid


def cubic(model: kp.Model) -> None:
    """Make every edge a cubic polynomial of its own on the range of the splines, by interpolation."""
    for _, head in model.heads():
        m, q = head.in_features, head.factors[0]
        low, high = (
            head.kappa["range"] if "range" in head.kappa.names() else head.kappa["knots"][[3, 3 + q - 3]]
        ).unbind(0)
        nodes = low + (high - low) * torch.linspace(0, 1, 10 * q, dtype=F64).unsqueeze(1)
        columns = head.expand(nodes).dense().unflatten(-1, (-1, m))
        draw = torch.randn(4, head.out_features, m, generator=generator(3), dtype=F64)
        values = sum(draw[p] * nodes.unsqueeze(1) ** p for p in range(4))
        found = torch.linalg.lstsq(columns.permute(2, 0, 1), values.permute(2, 0, 1)).solution
        head.assign("reconciliation", matrix=found.permute(2, 1, 0).flatten(1))


@pytest.mark.parametrize("knots", ["uniform", "quantile", (-3.0, -2.0, 0.5, 1.0, 2.0, 3.0)])
@pytest.mark.parametrize("policy", ["extended", "linear", "error"])
def test_a_grid_moves_to_the_data_and_what_the_new_one_can_be_is_kept(knots: Any, policy: str) -> None:
    spec = kan.spec([2, 3], low=-3.0, high=3.0, knots=knots, extrapolation=policy)
    model = kp.Model(spec, seed=0, dtype=F64)
    cubic(model)
    x = points(100, 2, 1) * torch.tensor([0.5, 2.0], dtype=F64) + 0.1
    before = model(x)
    made = kan.update_grid(model, x)
    assert made is model
    close(model(x), before, 1e-9)
    head = model.layers[0].heads[0]
    expected = kp.calibrate(kp.Model(spec, seed=0, dtype=F64), x).layers[0].heads[0]
    for name in head.kappa.names():
        assert torch.equal(head.kappa[name], expected.kappa[name])
    # The same grid again: nothing moves, nothing changes.
    weights = head.psi["matrix"].clone()
    kan.update_grid(model, x)
    close(head.psi["matrix"], weights, 1e-9)


def test_a_deep_model_keeps_its_function() -> None:
    x = points(500, 2)
    y = torch.exp(torch.sin(torch.pi * x[:, :1]) + x[:, 1:] ** 2)
    model = kp.calibrate(kp.Model(kan.spec([2, 5, 1], intervals=10), seed=0, dtype=F64), x * 1.5)
    kp.fit(model, (x, y), solver="levenberg_marquardt", epochs=20)
    loss = error(model, x, y)
    kan.update_grid(model, x)
    assert torch.equal(model.layers[0].heads[0].kappa["range"], torch.stack((x.amin(0), x.amax(0))))
    hidden = model.layers[0](x)
    torch.testing.assert_close(
        model.layers[1].heads[0].kappa["range"], torch.stack((hidden.amin(0), hidden.amax(0))).detach()
    )
    moved = error(model, x, y)
    assert moved < max(100 * loss, 1e-3 * float(y.var()))
    calibrated = kp.calibrate(copy.deepcopy(model), 2 * x)  # which does not keep it
    assert error(calibrated, x, y) > 10 * moved


def test_empty_intervals_keep_the_function_too() -> None:
    model = kp.Model(kan.spec([1, 1], intervals=8, low=-3.0, high=3.0), seed=0, dtype=F64)
    cubic(model)
    x = torch.tensor([[-1.0], [-0.99], [0.98], [1.0]], dtype=F64)
    between = torch.linspace(-1, 1, 50, dtype=F64).unsqueeze(1)
    before = model(between)
    close(kan.update_grid(model, x)(between), before, 1e-9)


@pytest.mark.filterwarnings("ignore::kapsi.ScaleWarning")  # new grids are coarser
@pytest.mark.parametrize("psi", [kp.LowRank(2), kp.Dense()])
def test_other_reconciliations_and_heads_move_too(psi: kp.Reconciliation) -> None:
    head = kp.HeadSpec(kp.BSpline(4, extrapolation="extended"), psi, channels=2)
    spec = kp.ModelSpec((2, 3), kp.LayerSpec((head, head, kp.HeadSpec(kp.Chebyshev(2)))))
    model, x = randomized(spec), points(80, 2)
    wide = torch.stack((x.amin(0), x.amax(0)))
    before = [each.weights().dense().clone() for each in model.layers[0].heads]
    model.layers[0].heads[0].assign("expansion", range=wide)
    values = model(x)
    kan.update_grid(model, x)  # the same grid
    close(model(x), values, 1e-9)
    kan.update_grid(model, 3 * x)
    for each, old in zip(model.layers[0].heads, before, strict=True):
        splines = isinstance(each.spec.expansion, kp.BSpline)
        assert torch.equal(each.weights().dense(), old) != splines
    close(model.layers[0].heads[0].kappa["range"], 3 * wide, 1e-12)


@pytest.mark.filterwarnings("ignore::kapsi.ScaleWarning")  # new grids are coarser
def test_masked_edges_stay_masked() -> None:
    x = points(100, 2)
    model = randomized(kan.spec([2, 3, 1]))
    without(model, 0, [(0, 1), (1, 0)])
    small = pruned(model, x, edges=0, nodes=0)
    mask = small.layers[0].heads[0].psi["mask"].clone()
    other = pruned(model, x, edges=0, nodes=0, fixed=False)
    kan.update_grid(small, x)
    assert torch.equal(small.layers[0].heads[0].psi["mask"], mask)
    close(small(x), kan.update_grid(other, x)(x))
    other = kp.Model(kp.rpn([2, 3], kp.BSpline(), kp.Masked(0.5), channels=2), seed=0, dtype=F64)
    with pytest.raises(kp.SpecError, match=r"update_grid: layers.0.heads.0: its mask keeps a part"):
        kan.update_grid(other, x)
    whole = kp.Model(kp.rpn([2, 3], kp.BSpline(), kp.Masked(1.0), channels=2), seed=0, dtype=F64)
    kp.calibrate(whole, x)
    before = whole(x)
    close(kan.update_grid(whole, x)(x), before)


def test_grids_that_cannot_move_are_refused_and_nothing_changes() -> None:
    x = points(50, 2)
    refused = {
        "no head of the model has a spline": kp.rpn([2, 1], kp.Chebyshev(3)),
        "Nested: the function cannot be kept": kp.rpn([2, 1], kp.Nested((kp.BSpline(), kp.Chebyshev(2)))),
        "the spline is a part of b_spline": kp.rpn([2, 1], remainder=kp.ExpansionRemainder(kp.BSpline())),
        "LayerNorm after κ": kp.rpn([2, 1], kp.BSpline(), after="layer_norm"),
        "HyperNet: cannot be carried over": kp.rpn([2, 1], kp.BSpline(), kp.HyperNet()),
    }
    for text, spec in refused.items():
        with pytest.raises(kp.SpecError, match=f"update_grid: .*{text}"):
            kan.update_grid(kp.Model(spec, seed=0, dtype=F64), x)
    layers = (kp.LayerSpec(kp.HeadSpec(kp.BSpline())), kp.LayerSpec(kp.HeadSpec(kp.BSpline(), kp.HyperNet())))
    model = kp.Model(kp.ModelSpec((2, 3, 1), layers), seed=0, dtype=F64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(kp.SpecError, match=r"layers.1"):
        kan.update_grid(model, x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


# ------------------------------------------------------------------------------------------------ formulas

KNOWN = {
    "x": lambda x: 2 * x - 1,
    "x^2": lambda x: 3 * (x - 1.5) ** 2 + 1,
    "x^3": lambda x: -((x - 2) ** 3),
    "x^4": lambda x: (x - 1.7) ** 4,
    "exp": lambda x: 0.3 * torch.exp(-1.7 * x),
    "log": lambda x: 2 * torch.log(3 * x + 1),
    "sqrt": lambda x: torch.sqrt(4 - x),
    "1/x": lambda x: 1 / (x + 0.2),
    "1/x^2": lambda x: 1 / (x - 6) ** 2,
    "1/sqrt": lambda x: (x - 0.4).rsqrt(),
    "sin": lambda x: torch.sin(5 * x + 0.1),
    "cos": lambda x: torch.cos(7 * x),
    "tan": lambda x: torch.tan(0.8 * x - 1.4),
    "tanh": lambda x: torch.tanh(3 * x - 4),
    "arctan": lambda x: torch.atan(6 * x - 8),
    "abs": lambda x: (x - 1.234).abs(),
    "gaussian": lambda x: torch.exp(-((2 * x - 3) ** 2)),
}


def table_of(function: Any, rows: Tensor) -> kp.Model:
    """Return a model of one input that is a function at some rows, exactly: steps between them."""
    ordered = rows.sort(0).values
    ends = torch.cat((ordered[:1] - 1, (ordered[1:] + ordered[:-1]) / 2, ordered[-1:] + 1))
    expansion = kp.BSpline(degree=0, knots=tuple(ends.flatten().tolist()))
    model = kp.Model(kp.rpn([1, 1], expansion), dtype=F64)
    model.layers[0].heads[0].assign("reconciliation", matrix=function(ordered).mT)
    return model


def test_every_function_of_the_list_has_a_case() -> None:
    assert set(KNOWN) == set(kp.interpret.FUNCTIONS)


@pytest.mark.parametrize("name", KNOWN)
def test_a_function_of_the_list_is_found_again(name: str) -> None:
    x = points(300, 1, scale=1.5) + 2
    model = table_of(KNOWN[name], x)
    close(model(x), KNOWN[name](x), 1e-12)
    found = kp.interpret.edge_formulas(model, x)
    edge = found.edges[0][0][0]
    assert edge.function == name
    assert edge.r2 > 1 - 1e-9
    close(found(x), KNOWN[name](x), 1e-6)
    # The text is what a reader can compute with.
    names = {each: getattr(np, each) for each in ("exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "arctan", "abs")}
    text = found.text(digits=15)
    assert text.startswith("y1 = ")
    value = eval(text.removeprefix("y1 = "), names, {"x1": x[:, 0].numpy()})  # noqa: S307
    np.testing.assert_allclose(value, found(x)[:, 0].numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1e4])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_units_do_not_matter(shift: float, scale: float) -> None:
    x = points(200, 1)
    model = table_of(lambda rows: torch.sin(3 * (rows - shift) / scale) * 1e-5 + 7, x * scale + shift)
    edge = kp.interpret.edge_formulas(model, x * scale + shift).edges[0][0][0]
    assert edge.function in ("sin", "cos")
    assert edge.r2 > 1 - 1e-6
    assert edge.a == pytest.approx(3 / scale, rel=1e-3)


@pytest.mark.parametrize("name", ["x^2", "exp", "sin", "tanh", "gaussian", "abs"])
def test_fits_are_no_worse_than_those_of_pykan(pykan: Any, name: str) -> None:
    x = points(200, 1, 4)
    y = torch.sin(2 * x + 0.5) + 0.3 * x**3 + 0.1 * points(200, 1, 5)
    model = table_of(lambda rows: y[x.flatten().argsort()], x)
    ours = kp.interpret.edge_formulas(model, x, [name]).edges[0][0][0]
    function = importlib.import_module("kan.utils").SYMBOLIC_LIB[name][0]
    _, theirs = importlib.import_module("kan.utils").fit_params(x[:, 0], y[:, 0], function, verbose=False)
    assert ours.r2 > float(theirs) - 1e-4
    close(1 - (ours(x[:, 0]) - y[:, 0]).square().mean() / y.var(correction=0), torch.tensor(ours.r2, dtype=F64), 1e-9)


def test_simple_functions_are_preferred_and_the_list_can_be_shorter() -> None:
    x = points(300, 1)
    noise = 1e-3 * points(300, 1, 7)
    model = table_of(lambda rows: 3 * rows + noise, x)
    assert kp.interpret.edge_formulas(model, x).edges[0][0][0].function == "x"
    assert kp.interpret.edge_formulas(model, x, ["sin", "tanh"]).edges[0][0][0].function == "sin"
    wave = table_of(lambda rows: torch.sin(8 * rows), x)
    found = kp.interpret.edge_formulas(wave, x, "x^2")
    assert found.edges[0][0][0].r2 < 0.5
    assert len(found.missing()) == 1
    with pytest.raises(
        kp.SpecError, match=r"1 edges have no formula of R² ≥ 0.99; the worst is in layer 0 from node 0"
    ):
        found.text()
    assert kp.interpret.edge_formulas(wave, x, ["x^2"], least=0.0).text().startswith("y1 = ")


def test_the_formula_of_a_whole_network() -> None:
    x = points(400, 2)
    model = kp.Model(kan.spec([2, 2, 1], intervals=40), seed=0, dtype=F64)
    kp.calibrate(model, x)

    def set_edges(number: int, inputs: Tensor, functions: list[list[Any]]) -> None:
        head = model.layers[number].heads[0]
        head.assign("remainder", matrix=torch.zeros_like(head.pi["matrix"]))
        columns = head.expand(inputs).dense().unflatten(-1, (-1, head.in_features))
        found = [
            [torch.linalg.lstsq(columns[..., i], f(inputs[:, i : i + 1])).solution[:, 0] for i, f in enumerate(row)]
            for row in functions
        ]
        matrix = torch.stack([torch.stack(row, -1) for row in found])
        head.assign("reconciliation", matrix=matrix.flatten(1))

    set_edges(0, x, [[lambda x: torch.sin(3 * x), lambda x: x**2], [lambda x: 0 * x, lambda x: 2 * x]])
    hidden = model.layers[0](x).detach()
    kp.calibrate(model.layers[1], hidden)
    set_edges(1, hidden, [[torch.exp, lambda h: -h + 1]])
    found = kp.interpret.edge_formulas(model, x)
    target = torch.exp(torch.sin(3 * x[:, :1]) + x[:, 1:] ** 2) - 2 * x[:, 1:] + 1
    assert float((found(x) - target).abs().max()) < 5e-3
    assert [[edge.function for edge in node] for layer in found.edges for node in layer] == [
        ["sin", "x^2"],
        ["0", "x"],
        ["exp", "x"],
    ]
    text = found.text(12)
    names = {"exp": np.exp, "sin": np.sin, "cos": np.cos}
    value = eval(text.removeprefix("y1 = "), names, {"x1": x[:, 0].numpy(), "x2": x[:, 1].numpy()})  # noqa: S307
    np.testing.assert_allclose(value, found(x)[:, 0].numpy(), rtol=1e-8, atol=1e-8)
    lines = found.text(12, whole=False).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["h1_1", "h1_2", "y1"]
    values: dict[str, Any] = {"x1": x[:, 0].numpy(), "x2": x[:, 1].numpy()}
    for line in lines:
        name, expression = line.split(" = ")
        values[name] = eval(expression, names, values)  # noqa: S307
    np.testing.assert_allclose(values["y1"], found(x)[:, 0].numpy(), rtol=1e-8, atol=1e-8)


def test_constant_edges_and_biases_are_in_the_formula() -> None:
    x = points(100, 2)
    model = kp.Model(kan.spec([2, 1], bias=True, base=None, extrapolation="linear"), seed=0, dtype=F64)
    head = model.layers[0].heads[0]
    matrix = torch.zeros(1, 8, 2, dtype=F64)
    matrix[0, :, 1] = 0.25
    head.assign("reconciliation", matrix=matrix.flatten(1))
    with torch.no_grad():
        head.bias.fill_(1.5)
    found = kp.interpret.edge_formulas(model, x)
    assert [edge.function for edge in found.edges[0][0]] == ["0", "0"]
    assert found.text() == "y1 = 1.75"
    close(found(x), model(x), 1e-12)
    still = x.clone()
    still[:, 0] = 3.0  # an input that does not vary tells nothing of its edge
    assert kp.interpret.edge_formulas(randomized(kan.spec([2, 1])), still).edges[0][0][0].function == "0"


def test_long_formulas_name_their_hidden_nodes() -> None:
    edge = kp.interpret.EdgeFormula("sin", 1.25, 0.5, 2.5, 0.125, 1.0)
    layers = tuple(tuple((edge,) * 6 for _ in range(6)) for _ in range(5))
    found = kp.interpret.EdgeFormulas(layers, tuple((0.0,) * 6 for _ in layers), 0.99)
    lines = found.text().splitlines()
    assert len(lines) == 30
    assert max(map(len, lines)) < 300
    small = kp.interpret.EdgeFormulas(layers[:2], ((0.0,) * 6,) * 2, 0.99)
    assert len(small.text().splitlines()) == 6


def test_what_formulas_are_not_made_of_is_refused() -> None:
    model, x = randomized(kan.spec([2, 1])), points(30, 2)
    with pytest.raises(kp.SpecError, match=r"got 'sine'; did you mean 'sin'\?"):
        kp.interpret.edge_formulas(model, x, ["sine"])
    with pytest.raises(kp.SpecError, match="at least one of"):
        kp.interpret.edge_formulas(model, x, [])
    for least in (-0.1, 1.5, "all"):
        with pytest.raises(kp.SpecError, match=r"edge_formulas\(least"):
            kp.interpret.edge_formulas(model, x, least=least)
    with pytest.raises(kp.DataError, match="at least 2 rows"):
        kp.interpret.edge_formulas(model, x[:1])
    found = kp.interpret.edge_formulas(model, x, ["x"], least=0)
    for digits in (0, 18, 2.5):
        with pytest.raises(kp.SpecError, match="digits"):
            found.text(digits)
    with pytest.raises(kp.DataError, match=r"shape \(\.\.\., 2\)"):
        found(x[:, :1])


def test_a_grid_update_reports_a_change_of_the_outputs() -> None:
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = kp.Model(kan.spec([3, 4, 1]), seed=0, dtype=torch.float64)
    before = model(x)
    with pytest.warns(kp.ScaleWarning, match=r"add intervals first, as in kp.refine\(model, intervals=10\)"):
        kan.update_grid(model, x)
    change = (model(x) - before).detach()
    assert float(change.square().mean().sqrt()) > 0.01 * float(before.detach().std())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the grid is that of the data
        kan.update_grid(model, x)


# ------------------------------------------------------------------------------------------------ standardized models


def standardized_kan() -> tuple[kp.Model, torch.Tensor]:
    x = 40 * points(80, 2) + 1000
    y = torch.cat((1e3 * x[:, :1] - 2e5, x[:, 1:] * 1e-3), 1)
    model = kp.standardized(kp.rpn([2, 4, 2], kp.BSpline(4), remainder="linear"), x, y, seed=0, dtype=torch.float64)
    return model, x


def test_edges_of_standardized_models_add_up_to_the_outputs() -> None:
    model, x = standardized_kan()
    edges = kp.interpret.edge_functions(model, x)
    assert [tuple(layer.values.shape[1:]) for layer in edges] == [(2, 2), (4, 2), (2, 4)]
    torch.testing.assert_close(edges[-1].outputs(), model(x).detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(edges[0].outputs(), model.layers[0](x))
    inner = kp.interpret.attribution(model, x)
    for shares in inner.nodes[1:]:
        assert bool((shares >= 0).all())
    torch.testing.assert_close(inner.nodes[0], inner.nodes[1], rtol=1e-6, atol=1e-9)


def test_formulas_of_standardized_models_have_the_units_of_the_data() -> None:
    x = 40 * points(80, 1) + 1000
    model = kp.standardized(kp.rpn([1, 1], kp.Identity(), bias=True), x, 3 * x + 5, seed=0, dtype=torch.float64)
    with torch.no_grad():
        model.layers[1].heads[0].psi["matrix"].fill_(1)
        model.layers[1].heads[0].bias.zero_()
    torch.testing.assert_close(model(x).detach(), 3 * x + 5)
    torch.testing.assert_close(kp.interpret.edge_formulas(model, x)(x), 3 * x + 5, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("fixed", [True, False])
def test_standardized_models_are_pruned_between_the_affine_layers(fixed: bool) -> None:
    model, x = standardized_kan()
    with torch.no_grad():
        for tensor in model.layers[2].heads[0].parameters():
            tensor.unflatten(1, (-1, 4))[..., 2:] = 0
    before = copy.deepcopy(model.state_dict())
    small = pruned(model, x, edges=0, nodes=0, fixed=fixed)
    assert small.spec.widths == (2, 2, 2, 2)
    assert small.standardized
    torch.testing.assert_close(small(x), model(x), rtol=1e-11, atol=1e-11)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    again = kp.Model(small.spec, dtype=torch.float64)
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(x), small(x))
