"""Penalties: their values, gradients and second derivatives against NumPy; what they are on; what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import kapsi as kp
from kapsi.errors import SpecError
from kapsi.function import catalogue
from kapsi.modules import ExpansionModule
from kapsi.training.config import TrainConfig
from kapsi.training.penalties import MAX_ELEMENTS, MAX_MATRIX, Penalties

SPLINE = kp.BSpline(4, 2)


def model_of(expansion=SPLINE, reconciliation=None, widths=(3, 2), dtype=torch.float64, **head):
    """Return a model with a bias whose parameters are all away from zero."""
    reconciliation = kp.Dense() if reconciliation is None else reconciliation
    spec = kp.ModelSpec(widths, (kp.LayerSpec((kp.HeadSpec(expansion, reconciliation, bias=True, **head),)),))
    model = kp.Model(spec, seed=0, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=dtype, generator=torch.Generator().manual_seed(p.numel())))
    return model


def head_of(model, layer=0, head=0):
    return model.layers[layer].heads[head]


def squares_of_differences(psi, inputs):
    """Return Σ (c_{g+2} − 2c_{g+1} + c_g)² of coefficients (n, functions·inputs), one curve at a time."""
    total = 0.0
    for row in psi:
        for i in range(inputs):
            total += np.square(np.diff(row[i::inputs], 2)).sum()
    return total


def gradients_of(model, value):
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(trained, torch.autograd.grad(value, trained, allow_unused=True), strict=True)
    ]


# ------------------------------------------------------------------------------------------------ L2 and L1


def weight_by_name(name, p):
    """The rule, by the names of parameters."""
    if ".psi." in name or ".kappa." in name:
        return 1.0
    return 0.01 if ".pi." in name and p.dim() > 1 else 0.0


def rich_model():
    heads = (
        kp.HeadSpec(kp.NaiveNormal(2, learnable=True), kp.LowRank(2), kp.LinearRemainder(bias=True), bias=True),
        kp.HeadSpec(kp.Taylor(2), kp.Masked(0.5), kp.ExpansionRemainder(kp.Chebyshev(3), kp.Dense()), channels=2),
        kp.HeadSpec(kp.Identity(), before=(kp.BatchNorm(affine=True),), after=(kp.LayerNorm(affine=True),)),
    )
    layer = kp.LayerSpec(heads, fusion=kp.Concatenation(), output=("tanh",))
    return kp.Model(kp.ModelSpec((3, 2, 2), (layer, layer)), seed=0, dtype=torch.float64)


@pytest.mark.parametrize(("option", "power"), [("l2", 2), ("l1", 1)])
def test_parameters_count_by_what_they_are_of(option, power) -> None:
    model = rich_model()
    head_of(model, 1, 0).psi["left"].requires_grad_(False)
    expected = 0.0
    for name, p in model.named_parameters():
        if p.requires_grad:
            powers = p.detach().abs().numpy() ** power
            expected += 0.3 * weight_by_name(name, p) * powers.sum() / power
    penalties = Penalties(model, TrainConfig(**{option: 0.3}))
    assert penalties.any
    assert float(penalties.value().detach()) == pytest.approx(expected, rel=1e-12)
    listed = {id(p): weight for p, weight in penalties.quadratic}
    assert listed == {
        id(p): weight_by_name(name, p)
        for name, p in model.named_parameters()
        if p.requires_grad and weight_by_name(name, p)
    }
    assert penalties.only_quadratic is (option == "l2")


def test_other_modules_have_a_penalty_on_all_but_vectors() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Conv1d(1, 2, 3), shared, nn.LayerNorm(4), shared, nn.Linear(4, 1)).double()
    model[4].weight.requires_grad_(False)
    penalties = Penalties(model, TrainConfig(l2=0.2, l1=0.1))
    held = [model[0].weight, shared.weight]
    assert [(id(p), weight) for p, weight in penalties.quadratic] == [(id(p), 1.0) for p in held]
    expected = sum(0.1 * np.square(p.detach().numpy()).sum() + 0.1 * np.abs(p.detach().numpy()).sum() for p in held)
    assert float(penalties.value().detach()) == pytest.approx(expected)


def test_a_module_around_heads_is_held_down_beside_them() -> None:
    model = nn.Sequential(nn.Linear(5, 3), kp.Head(3, 2, kp.HeadSpec(bias=True, remainder=kp.LinearRemainder())))
    listed = {id(p): weight for p, weight in Penalties(model, TrainConfig()).quadratic}
    assert listed == {
        id(model[0].weight): 1.0,
        id(model[1].psi["matrix"]): 1.0,
        id(model[1].pi["matrix"]): 0.01,
    }


def test_expansion_modules_have_a_penalty_on_what_they_train() -> None:
    module = ExpansionModule(2, kp.GaussianRBF(3, learnable=True))
    assert len(Penalties(module, TrainConfig()).quadratic) == 2


def test_no_penalty_is_nothing() -> None:
    model = model_of()
    penalties = Penalties(model, TrainConfig())
    assert not penalties.any
    assert penalties.strength == 0
    assert penalties.only_quadratic
    assert penalties.rest_value() is None
    assert float(penalties.value().detach()) == 0
    assert penalties.value().dtype == torch.float64
    penalties.apply_gradient()
    assert all(p.grad is None for p in model.parameters())
    assert not penalties.matrix().any()
    assert len(penalties.quadratic) == 1


def test_a_penalty_on_nothing_is_none() -> None:
    model = model_of()
    head_of(model).psi["matrix"].requires_grad_(False)
    assert not Penalties(model, TrainConfig(l2=1.0, l1=1.0)).any


@pytest.mark.parametrize("before", ["none", "some", "all"])
def test_the_gradient_that_is_applied_is_that_of_the_value(before) -> None:
    model = rich_model()
    penalties = Penalties(model, TrainConfig(l2=0.7, l1=0.1))
    rest = penalties.rest_value()
    wanted = gradients_of(model, penalties.value() - rest)
    trained = list(model.parameters())
    for i, p in enumerate(trained):
        p.grad = torch.full_like(p, 2.0) if before == "all" or (before == "some" and i % 2) else None
    had = [0.0 if p.grad is None else 2.0 for p in trained]
    penalties.apply_gradient()
    held = {id(p) for p, _ in penalties.quadratic}
    for p, gradient, start in zip(trained, wanted, had, strict=True):
        if id(p) in held:
            torch.testing.assert_close(p.grad, gradient + start, rtol=1e-12, atol=0)
        else:
            assert p.grad is None if start == 0 else bool((p.grad == 2).all())


# ------------------------------------------------------------------------------------------------ smoothness


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "reconciliation",
    [
        kp.Dense(),
        kp.Masked(0.7),
        kp.LowRank(2),
        kp.Kronecker(),
        kp.KhatriRao(2),
        kp.Duplicated(columns=1),
        kp.HyperNet(4),
    ],
    ids=lambda r: r.name,
)
def test_smoothness_is_of_second_differences_along_the_grid(reconciliation, channels) -> None:
    model = model_of(SPLINE, reconciliation, channels=channels)
    penalties = Penalties(model, TrainConfig(smoothness=0.3))
    psi = head_of(model).weights().dense().sum(0).detach().numpy()
    expected = 0.3 * squares_of_differences(psi, 3)
    assert expected > 0.1
    assert float(penalties.value().detach()) == pytest.approx(expected, rel=1e-11)
    # Differentiable: a small step against the gradient lowers it by the square of the gradient.
    gradients = gradients_of(model, penalties.value())
    step = 1e-7
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p -= step * gradient
    lower = expected - step * sum(float(g.square().sum()) for g in gradients)
    assert float(penalties.value().detach()) - lower == pytest.approx(0, abs=1e-3 * (expected - lower))


def test_straight_lines_are_smooth() -> None:
    model = model_of(kp.BSpline(6, 3), widths=(2, 3))
    line = torch.arange(9.0, dtype=torch.float64)[:, None] * torch.tensor([2.0, -1.0]) + torch.tensor([1.0, 5.0])
    head_of(model).assign("reconciliation", matrix=line.flatten().expand(3, -1))
    assert float(Penalties(model, TrainConfig(smoothness=1.0)).value().detach()) < 1e-20


@pytest.mark.parametrize("reconciliation", [kp.Dense(), kp.LowRank(2)], ids=lambda r: r.name)
def test_splines_are_found_where_they_are(reconciliation) -> None:
    inner = kp.Nested((kp.Chebyshev(2), kp.BSpline(3, 1)))  # 6 inputs, 4 functions
    kappa = kp.Extended((kp.Identity(), SPLINE, kp.Taylor(2), kp.Extended((inner, kp.BSpline(1, 1), kp.Fourier(2.0)))))
    remainder = kp.ExpansionRemainder(kp.BSpline(5, 0), kp.Dense(), kp.ExpansionRemainder(SPLINE, kp.LowRank(1)))
    model = model_of(kappa, reconciliation, remainder=remainder)
    head = head_of(model)
    psi = head.weights().dense()[0].detach().numpy()
    expected = squares_of_differences(psi[:, 3:21], 3)  # after the identity, 6 functions of 3 inputs
    expected += squares_of_differences(psi[:, 33:57], 6)  # after 12 Taylor columns
    expected += squares_of_differences(head.pi["reconciliation"]["matrix"].detach().numpy(), 3)
    third = head.pi["remainder"]["reconciliation"]
    expected += squares_of_differences((third["left"] @ third["right"]).detach().numpy(), 3)
    assert float(Penalties(model, TrainConfig(smoothness=1.0)).value().detach()) == pytest.approx(expected, rel=1e-11)


def test_low_rank_is_smoothed_without_being_formed() -> None:
    model = model_of(kp.BSpline(2_000, 3), kp.LowRank(1), widths=(20, 1_000), dtype=torch.float32)
    assert MAX_ELEMENTS < 1_000 * 2_003 * 20
    penalties = Penalties(model, TrainConfig(smoothness=1.0))
    largest = 0

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                largest = max(largest, made.numel())
            return made

    with Largest():
        value = penalties.value()
    left, right = (head_of(model).psi[name].detach().double().numpy() for name in ("left", "right"))
    expected = np.square(left).sum() * squares_of_differences(right, 20)
    assert float(value.detach()) == pytest.approx(expected, rel=1e-4)
    assert 0 < largest <= 2_003 * 20


@pytest.mark.parametrize("expansion", [kp.Taylor(2), kp.Nested((SPLINE, kp.Identity())), kp.BSpline(1, 1)])
def test_smoothness_without_a_spline_is_refused(expansion) -> None:
    with pytest.raises(SpecError, match=r"TrainConfig\(smoothness=0.5\): the model has no trained ψ on a BSpline"):
        Penalties(model_of(expansion), TrainConfig(smoothness=0.5))
    with pytest.raises(SpecError, match="no trained ψ on a BSpline"):
        Penalties(nn.Linear(2, 1), TrainConfig(smoothness=0.5))


def test_a_spline_that_is_frozen_is_left_alone() -> None:
    spec = kp.LayerSpec((kp.HeadSpec(SPLINE), kp.HeadSpec(SPLINE)))
    model = kp.Model(kp.ModelSpec((3, 2), (spec,)), seed=0, dtype=torch.float64)
    head_of(model, 0, 0).psi["matrix"].requires_grad_(False)
    expected = squares_of_differences(head_of(model, 0, 1).psi["matrix"].detach().numpy(), 3)
    assert float(Penalties(model, TrainConfig(smoothness=1.0)).value().detach()) == pytest.approx(expected)
    head_of(model, 0, 1).psi["matrix"].requires_grad_(False)
    with pytest.raises(SpecError, match="no trained ψ"):
        Penalties(model, TrainConfig(smoothness=0.5))


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (TrainConfig(smoothness=0.5), (kp.Kronecker(), kp.DualLowRankKronecker(1))),
        (TrainConfig(group_l1=0.5), (kp.Kronecker(), kp.LowRank(1))),
    ],
)
def test_what_would_have_to_be_formed_is_refused_where_it_is_large(config, kinds) -> None:
    for kind in kinds:
        model = model_of(kp.BSpline(1_997, 3), kind, widths=(20, 1_000), dtype=torch.float32)
        with pytest.raises(SpecError, match=r"layers\.0\.heads\.0: .* 40,000,000 entries .*at most 16,777,216"):
            Penalties(model, config)


# ------------------------------------------------------------------------------------------------ group sparsity


def norms_of_edges(psi, inputs):
    """Return Σ over inputs and outputs of the norm of weights (channels, n, functions·inputs), by loops."""
    total = 0.0
    for j, i in itertools.product(range(psi.shape[1]), range(inputs)):
        total += sum(psi[c, j, d] ** 2 for c in range(len(psi)) for d in range(i, psi.shape[2], inputs)) ** 0.5
    return total


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("reconciliation", [kp.Dense(), kp.Masked(0.4), kp.LowRank(2)], ids=lambda r: r.name)
@pytest.mark.parametrize(
    "expansion",
    [
        kp.Identity(),
        SPLINE,
        kp.Extended((kp.Chebyshev(2), kp.Fourier(2.0), kp.Taylor(1))),
        kp.Nested((kp.Chebyshev(2), kp.BSpline(3, 1))),
    ],
    ids=lambda k: k.name,
)
def test_groups_are_the_weights_between_an_input_and_an_output(expansion, reconciliation, channels) -> None:
    remainder = kp.ExpansionRemainder(kp.Legendre(2), kp.Dense())
    model = model_of(expansion, reconciliation, channels=channels, remainder=remainder, before=("tanh",))
    head = head_of(model)
    expected = norms_of_edges(head.weights().dense().detach().numpy(), 3)
    expected += norms_of_edges(head.pi["reconciliation"]["matrix"].detach().numpy()[None], 3)
    penalties = Penalties(model, TrainConfig(group_l1=0.1))
    assert float(penalties.value().detach()) == pytest.approx(0.1 * expected, rel=1e-12)
    assert not penalties.only_quadratic
    assert penalties.any


@pytest.mark.parametrize("reconciliation", [kp.Dense(), kp.Masked(0.4), kp.LowRank(2)], ids=lambda r: r.name)
def test_the_norm_of_nothing_has_no_gradient(reconciliation) -> None:
    model = model_of(SPLINE, reconciliation)
    penalties = Penalties(model, TrainConfig(group_l1=1.0))
    with torch.no_grad():
        for p in head_of(model).psi.parameters():
            p.zero_()
    for gradient in gradients_of(model, penalties.value()):
        assert not gradient.any()  # NaN would count as something


@pytest.mark.parametrize("expansion", [kp.Taylor(2), kp.Combinatorial(), kp.Extended((SPLINE, kp.RandomFourier(4)))])
def test_expansions_without_edges_are_refused(expansion) -> None:
    with pytest.raises(SpecError, match=r"group_l1=0.5\): layers\.0\.heads\.0: .*several inputs.*element-wise κ"):
        Penalties(model_of(expansion), TrainConfig(group_l1=0.5))
    model = model_of(remainder=kp.ExpansionRemainder(expansion, kp.Dense()))
    with pytest.raises(SpecError, match=r"layers\.0\.heads\.0\.pi: "):
        Penalties(model, TrainConfig(group_l1=0.5))


def test_processing_that_mixes_inputs_has_no_edges() -> None:
    for steps in ({"before": ("layer_norm",)}, {"after": ("layer_norm",)}, {"after": ("instance_norm",)}):
        with pytest.raises(SpecError, match="mixes inputs"):
            Penalties(model_of(**steps), TrainConfig(group_l1=0.5))
    assert Penalties(model_of(before=("batch_norm", "dropout", "silu")), TrainConfig(group_l1=0.5)).any


def test_a_module_without_heads_has_no_edges() -> None:
    with pytest.raises(SpecError, match="no trained ψ of a kapsi head"):
        Penalties(nn.Linear(2, 1), TrainConfig(group_l1=0.5))


SAMPLES = [
    cls(**options)
    for cls in catalogue("expansion")
    if cls.__module__.startswith("kapsi.") and cls.name != "module"  # of which the module says what it is
    for options in cls.examples
]


@pytest.mark.parametrize("expansion", SAMPLES, ids=str)
def test_an_element_wise_expansion_is_one(expansion) -> None:
    m = 3
    head = kp.Head(m, 1, kp.HeadSpec(expansion), seed=1, dtype=torch.float64)
    if expansion.name == "linear" and expansion.side != "none":
        head.assign("expansion", matrix=torch.arange(9.0).reshape(3, 3) + 1)
    generator = torch.Generator().manual_seed(0)
    low, high = kp.expansion.base.common_domain(expansion, m)
    low, high = max(low, -1.0), min(high, 1.0)
    low, high = (low, high) if low < high else (1.2, 1.4)
    x = low + (high - low) * torch.rand(20, m, dtype=torch.float64, generator=generator)
    # Rows do not depend on each other, so that the gradient of their sum has that of each.
    entries = torch.autograd.functional.jacobian(lambda x: head.expand(x).dense().sum(0), x)
    jacobian = entries.abs().sum(1)
    elsewhere = jacobian.clone()
    elsewhere[torch.arange(len(jacobian)), torch.arange(len(jacobian)) % m] = 0
    mixes = bool(elsewhere.any()) or len(jacobian) % m > 0
    if expansion.element_wise():
        assert not mixes
    elif bool(jacobian.any()) and expansion.name not in ("principal_components", "compose", "selected_inputs"):
        assert mixes  # without components of its own a compression is the identity, as is a selection of all inputs


# ------------------------------------------------------------------------------------------------ second derivatives


def quadratic_model():
    heads = (
        kp.HeadSpec(kp.Extended((SPLINE, kp.Identity())), kp.Dense(), kp.LinearRemainder(bias=True), bias=True),
        kp.HeadSpec(SPLINE, kp.Masked(0.6), channels=2),
        kp.HeadSpec(kp.Taylor(2), kp.LowRank(1), kp.ExpansionRemainder(SPLINE, kp.Dense()), channels=2),
    )
    model = kp.Model(kp.ModelSpec((2, 2), (kp.LayerSpec(heads),)), seed=0, dtype=torch.float64)
    next(model.parameters())[0].data += 1
    head_of(model, 0, 2).psi["left"].requires_grad_(False)
    return model


def hessian_of(model, penalties):
    """Return the Hessian by differentiating twice, row by row."""
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(penalties.value(), trained, create_graph=True, allow_unused=True)
    rows = []
    for p, gradient in zip(trained, gradients, strict=True):
        flat = [] if gradient is None else gradient.flatten()
        if gradient is None:
            rows += [torch.zeros(sum(q.numel() for q in trained), dtype=torch.float64)] * p.numel()
        for element in flat:
            row = torch.autograd.grad(element, trained, retain_graph=True, allow_unused=True)
            parts = [torch.zeros_like(q) if r is None else r for q, r in zip(trained, row, strict=True)]
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "config", [TrainConfig(l2=0.3), TrainConfig(smoothness=0.2), TrainConfig(l2=0.3, smoothness=0.2)]
)
def test_the_matrix_is_the_hessian(config) -> None:
    model = quadratic_model()
    penalties = Penalties(model, config)
    assert penalties.only_quadratic
    expected = hessian_of(model, penalties)
    assert expected.any()
    torch.testing.assert_close(penalties.matrix(), expected, rtol=1e-12, atol=1e-13)
    trained = penalties.parameters
    vector = [
        torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(trained)
    ]
    product = torch.cat([v.flatten() for v in penalties.hessian_vector(vector)])
    torch.testing.assert_close(product, expected @ torch.cat([v.flatten() for v in vector]), rtol=1e-12, atol=1e-13)
    # Nothing is constant or linear, so that the matrix says everything.
    flat = torch.cat([p.detach().flatten() for p in trained])
    assert float(penalties.value().detach()) == pytest.approx(float(flat @ expected @ flat) / 2, rel=1e-12)
    gradient = torch.cat([g.flatten() for g in penalties.hessian_vector(trained)])
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in gradients_of(model, penalties.value())]))
    assert not gradient.requires_grad


def test_a_block_is_the_hessian_in_one_tensor_with_the_others_fixed() -> None:
    model = model_of(SPLINE, kp.LowRank(2), channels=2, remainder=kp.LinearRemainder())
    penalties = Penalties(model, TrainConfig(l2=0.3, smoothness=0.2))
    assert not penalties.only_quadratic
    expected = hessian_of(model, penalties)
    start = 0
    for p in penalties.parameters:
        end = start + p.numel()
        torch.testing.assert_close(penalties.block(p), expected[start:end, start:end], rtol=1e-10, atol=1e-12)
        start = end
    for method in (penalties.matrix, lambda: penalties.hessian_vector(penalties.parameters)):
        with pytest.raises(SpecError, match="not quadratic"):
            method()


def test_no_matrix_where_there_is_none() -> None:
    model = model_of()
    for config in (TrainConfig(l1=0.1), TrainConfig(group_l1=0.1)):
        penalties = Penalties(model, config)
        assert not penalties.only_quadratic
        for method in (penalties.matrix, lambda p=penalties: p.block(p.parameters[0])):
            with pytest.raises(SpecError, match="not quadratic"):
                method()
    generated = Penalties(model_of(SPLINE, kp.HyperNet(4)), TrainConfig(smoothness=1.0))
    assert not generated.only_quadratic
    with pytest.raises(SpecError, match="not linear in each"):
        generated.block(generated.quadratic[0][0])
    wide = Penalties(nn.Linear(MAX_MATRIX, 1), TrainConfig(l2=1.0))
    with pytest.raises(SpecError, match="5,001 parameters; at most 5,000"):
        wide.matrix()


# ------------------------------------------------------------------------------------------------ parts of tensors


@pytest.fixture
def mesh():
    """A mesh of one process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_tensors_that_are_shared_among_processes(mesh) -> None:
    from torch.distributed.fsdp import fully_shard

    heads = (
        kp.HeadSpec(SPLINE, kp.LowRank(2), kp.LinearRemainder(), bias=True),
        kp.HeadSpec(SPLINE, kp.Dense(), channels=2),
    )
    spec = kp.ModelSpec((3, 2), (kp.LayerSpec(heads),))
    config = TrainConfig(l2=0.3, l1=0.2, smoothness=0.1, group_l1=0.4)
    plain, shared = (kp.Model(spec, seed=0, dtype=torch.float64) for _ in range(2))
    for layer in shared.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(shared, mesh=mesh)
    gradients = []
    for model in (plain, shared):
        penalties = Penalties(model, config)
        rest = penalties.rest_value()
        rest.backward()
        penalties.apply_gradient()
        gradients.append((float(penalties.value().detach()), [p.grad for p in model.parameters()]))
    assert gradients[0][0] == gradients[1][0]
    for wanted, gradient in zip(gradients[0][1], gradients[1][1], strict=True):
        if wanted is None:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient.full_tensor(), wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"smoothness": 0.1}, r"TrainConfig\(smoothness=0\.1\): layers\.0\.heads\.0: matrix is computed"),
        ({"group_l1": 0.2}, r"TrainConfig\(group_l1=0\.2\): layers\.0\.heads\.0: matrix is computed"),
        ({"smoothness": 0.1, "group_l1": 0.2}, r"TrainConfig\(smoothness=0\.1, group_l1=0\.2\): layers\.0\.heads\.0"),
    ],
)
def test_errors_name_the_penalty_that_is_set(options, named) -> None:
    model = kp.Model(kp.rpn([2, 1], kp.BSpline()), seed=0)
    torch.nn.utils.prune.l1_unstructured(model.layers[0].heads[0].psi, "matrix", amount=0.5)
    with pytest.raises(kp.SpecError, match=named):
        Penalties(model, kp.TrainConfig(**options))


@pytest.mark.parametrize(
    ("options", "psi", "message"),
    [
        ({"l1": 0.1}, kp.Dense(), r"matrix: l1=0\.1 is not quadratic; .* or l2"),
        ({"l1": 0.1, "group_l1": 0.2}, kp.Dense(), r"matrix: l1=0\.1, group_l1=0\.2 is not quadratic"),
        (
            {"smoothness": 0.3},
            kp.LowRank(1),
            r"matrix: smoothness=0\.3 of a ψ with several trained tensors .* dense or masked ψ",
        ),
    ],
)
def test_penalties_that_are_not_quadratic_are_named(options, psi, message) -> None:
    model = kp.Model(kp.rpn([2, 2], kp.BSpline(), psi), seed=0)
    with pytest.raises(kp.SpecError, match=message):
        Penalties(model, kp.TrainConfig(**options)).matrix()
