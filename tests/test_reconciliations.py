"""Reconciliations beyond the laws: lengths at many sizes, other grids than κ's own, random signs, precision, what is kept."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import kapsi as kp
from kapsi.notation import short_form
from kapsi.reconciliation import hypernet
from kapsi.reconciliation.base import divisors, listed_divisors
from kapsi.testing import inputs
from kapsi.training.penalties import Penalties

# ------------------------------------------------------------------------------------------------ lengths and grids


@pytest.mark.parametrize(("n", "q", "t"), list(itertools.product((1, 6, 64), (1, 5, 785), (1, 4, 784))))
def test_lengths_are_those_of_the_paper(n, q, t) -> None:
    width = q * t
    for p, columns in itertools.product(divisors(n)[:3], divisors(width)[-3:]):
        s, rest = n // p, width // columns
        for r, terms in ((1, 1), (3, 2)):
            expected = {
                kp.Kronecker(p, columns, terms): terms * (p * columns + s * rest),
                kp.LowRankKronecker(r, p, columns, terms): terms * (p * columns + r * (s + rest)),
                kp.DualLowRankKronecker(r, p, columns, terms): terms * r * (p + columns + s + rest),
                kp.Duplicated(p, columns): n * width // (p * columns),
                kp.LowRank(r): r * (n + width),
                kp.KhatriRao(r): r * (n + q + t),
                kp.RandomAdaption(r): n + r,
                kp.HyperNet(r): r,
                kp.Masked(0.3): round(0.3 * n * width),
                kp.Dense(): n * width,
                kp.ConstantReconciliation(): 0,
            }
            assert {psi: psi.count(n, (q, t)) for psi in expected} == expected


KAPPAS = [
    (kp.Taylor(2), 3),
    (kp.Taylor(3), 2),
    (kp.Extended((kp.Taylor(2), kp.BSpline(), kp.Identity())), 2),
    (kp.Nested((kp.Chebyshev(2), kp.Taylor(2))), 2),
    (kp.Nested((kp.Identity(), kp.Extended((kp.Taylor(2), kp.Taylor(2))))), 2),
]


# After a layer norm one of each kind of features: a product, and several things in a row.
NORMED = (KAPPAS[0], KAPPAS[2])


@pytest.mark.parametrize(
    ("kappa", "m", "after"),
    [
        pytest.param(
            *case,
            after,
            id=f"{short_form(case[0])}-{'layer_norm' if after else 'plain'}",
            marks=pytest.mark.slow if after and case not in NORMED else (),
        )
        for case in KAPPAS
        for after in ((), ("layer_norm",))
    ],
)
def test_every_grid_of_a_kronecker_kind_equals_the_dense_product(kappa, m, after) -> None:
    n, width = 6, kappa.out_features(m)
    kinds = (kp.Kronecker, kp.LowRankKronecker, kp.DualLowRankKronecker)
    psis = [kind(rows=p, columns=q, terms=2) for kind in kinds for p in (1, 6) for q in divisors(width)]
    psis += [kp.Duplicated(2, q, ratio) for q in divisors(width) for ratio in (0.5, 1.0)]
    for psi in psis:
        spec = kp.HeadSpec(kappa, psi, channels=2, after=after)
        head = kp.Head(m, n, spec, seed=0, dtype=torch.float64)
        x = inputs(4, m).requires_grad_()
        dense = kappa(x, head.kappa).dense()
        if after:
            dense = F.layer_norm(dense, (width,))
        leaves = [x, *head.parameters()]
        reference = torch.einsum("bd,cnd->bn", dense, head.weights().dense())
        y = head(x)
        torch.testing.assert_close(y, reference, rtol=1e-9, atol=1e-9)
        ours, theirs = (torch.autograd.grad(value.sin().sum(), leaves) for value in (y, reference))
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_divisors_are_listed_where_they_are_few_and_the_nearest_where_many() -> None:
    assert listed_divisors(10, 4) == "divisors are 1, 2, 5, 10"
    assert listed_divisors(720_720, 25) == "divisors near it are 18, 20, 21, 22, 24, 26, 28, 30, 33, 35, 36, 39"
    for psi in (kp.Kronecker(columns=7), kp.Eye(blocks=True)):
        for m, degree in ((27_000, 2), (5000, 4)):
            with pytest.raises(kp.SpecError, match=r"must divide the \d") as caught:
                kp.Head(m, 7, kp.HeadSpec(kp.Taylor(degree), psi), device="meta")
            assert len(str(caught.value)) < 220


# ------------------------------------------------------------------------------------------------ the hypernet


def signs(seed: int, channel: int, rows: int, width: int) -> torch.Tensor:
    like = torch.zeros((), dtype=torch.float64)
    return hypernet.random_signs(hypernet.mixed_seed(seed, channel), 0, rows, width, like)


@pytest.mark.parametrize("width", [3, 64, 130])
def test_signs_are_fair_and_independent(width) -> None:
    rows = 20_000
    made = signs(0, 0, rows, width)
    assert abs(float(made.mean())) * math.sqrt(rows * width) < 4.5
    columns = (made.T @ made / rows).fill_diagonal_(0)
    assert float(columns.abs().max()) * math.sqrt(rows) < 5.5
    for step in (1, 2, 64):
        assert abs(float((made[step:] * made[:-step]).mean())) * math.sqrt(rows * width) < 4.5


@pytest.mark.parametrize("width", [64, 256])
def test_signs_of_other_seeds_and_channels_are_others_not_the_same_ones_shifted(width) -> None:
    words = signs(0, 0, 500, width).reshape(-1, 64)
    seen = {tuple(word) for word in words.tolist()}
    assert len(seen) == len(words)
    for seed, channel in ((1, 0), (2, 0), (width // 64, 0), (0, 1), (1, 1), (2**31 - 1, 0)):
        others = signs(seed, channel, 500, width).reshape(-1, 64)
        assert not seen & {tuple(word) for word in others.tolist()}, (seed, channel)


@pytest.mark.parametrize("block", [1, 100, 4096])
def test_a_hypernet_does_not_depend_on_the_size_of_its_blocks(block, monkeypatch) -> None:
    spec = kp.HeadSpec(kp.Taylor(2), kp.HyperNet(3, seed=5), channels=2)
    head = kp.Head(5, 4, spec, seed=0, dtype=torch.float64)
    x = inputs(7, 5).requires_grad_()
    leaves = [x, *head.parameters()]
    matrix, y = head.weights().dense(), head(x)
    gradients = torch.autograd.grad(y.sin().sum(), leaves)
    monkeypatch.setattr(hypernet, "BLOCK", block)
    assert torch.equal(head.weights().dense(), matrix)
    torch.testing.assert_close(head(x), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(head(x).sin().sum(), leaves), gradients, rtol=1e-12, atol=1e-12)


def test_a_hypernet_keeps_only_what_it_is_made_of() -> None:
    head = kp.Head(200, 16, kp.HeadSpec(kp.Taylor(2), kp.HyperNet(16)), seed=0)
    x = torch.randn(32, 200, generator=torch.Generator().manual_seed(1)).requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = head(x)
    # [1, x], x, w, and zeros of the size of the outputs.
    assert sum(kept.values()) <= 4 * (32 * (201 + 200 + 16) + 16)
    assert y.shape == (32, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_hypernet_of_16_bits_does_not_lose_digits_over_its_blocks(dtype, monkeypatch) -> None:
    monkeypatch.setattr(hypernet, "BLOCK", 1024)  # 630 blocks
    head = kp.Head(200, 4, kp.HeadSpec(kp.Taylor(2), kp.HyperNet(4)), seed=0).to(dtype)
    x = torch.randn(8, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact, y = copy.deepcopy(head).double()(x.double()).detach(), head(x).detach()
    assert y.dtype == dtype
    assert float((y.double() - exact).abs().max() / exact.abs().max()) < 2 * torch.finfo(dtype).eps


# ------------------------------------------------------------------------------------------------ precision

PSIS = [
    kp.Dense(),
    kp.Masked(),
    kp.LowRank(2),
    kp.KhatriRao(3),
    kp.RandomAdaption(),
    kp.Kronecker(terms=2),
    kp.LowRankKronecker(),
    kp.DualLowRankKronecker(),
    kp.Duplicated(),
    kp.HyperNet(8),
    kp.HyperNet(8, hidden=16),
]


@pytest.mark.parametrize("after", [(), ("layer_norm",)], ids=["plain", "layer_norm"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("psi", PSIS, ids=short_form)
def test_mixed_precision_works_forward_and_backward(psi, channels, after) -> None:
    head = kp.Head(6, 4, kp.HeadSpec(kp.Taylor(2), psi, channels=channels, after=after), seed=0)
    x = inputs(9, 6, dtype=torch.float32).requires_grad_()
    expected = head(x)
    leaves = [x, *head.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        y = head(x)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    ours = torch.autograd.grad(y.float().square().sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm()) < 0.1 * float(b.norm())
    with torch.autocast("cpu", torch.bfloat16):  # the backward pass inside, too
        torch.autograd.grad(head(x).float().square().sum(), leaves)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.6), (torch.float16, 0.1)])
@pytest.mark.parametrize("psi", [kp.Dense(), kp.LowRank(2), kp.Kronecker(), kp.HyperNet(8)], ids=short_form)
def test_a_folded_layer_norm_of_inputs_far_from_zero_keeps_its_scale(psi, dtype, tolerance) -> None:
    # The rows of κ are nearly constant: variances that are differences of mean squares would be rounding.
    head = kp.Head(8, 4, kp.HeadSpec(kp.Taylor(2), psi, after=("layer_norm",)), seed=0).to(dtype)
    x = (1 + 0.05 * torch.randn(16, 8, generator=torch.Generator().manual_seed(1))).to(dtype)
    exact, y = copy.deepcopy(head).double()(x.double()).detach(), head(x).detach()
    assert y.dtype == dtype
    assert float((y.double() - exact).abs().max()) < tolerance * float(exact.abs().max())


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4])
def test_moments_are_those_of_the_formed_expansion(offset) -> None:
    u, v, w = (inputs(5, size, seed=size) * 1e-3 + offset for size in (4, 7, 3))
    product = kp.features.ProductFeatures(u, v)
    for made in (
        product,
        kp.features.ConcatenatedFeatures((product, kp.features.DenseFeatures(w))),
        product.normalized(1e-30),
    ):
        variance, mean = torch.var_mean(made.dense(), -1, correction=0, keepdim=True)
        ours = made.moments()
        torch.testing.assert_close(ours[0], mean, rtol=1e-9, atol=1e-7)
        torch.testing.assert_close(ours[1], variance, rtol=1e-6, atol=0)


def test_moments_of_16_bits_do_not_overflow() -> None:
    values = torch.tensor([[300.0, -300.0, 100.0]], dtype=torch.float16)  # 300² is beyond float16
    wide = values.double()
    for made, dense in (
        (kp.features.DenseFeatures(values), wide),
        (kp.features.ProductFeatures(values, values), kp.features.ProductFeatures(wide, wide).dense()),
    ):
        variance, mean = torch.var_mean(dense, -1, correction=0)
        ours = made.moments()
        assert [each.dtype for each in ours] == [torch.float32, torch.float32]
        torch.testing.assert_close(ours[0].squeeze(-1).double(), mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours[1].squeeze(-1).double(), variance, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ initial scale


@pytest.mark.parametrize("expansion", [kp.Identity(), kp.Chebyshev(3)], ids=short_form)
def test_initial_scale_of_many_inputs_is_that_of_every_seed(expansion) -> None:
    # A seed that draws the same numbers for ψ as for the inputs that ψ is measured with made ψ seem large.
    x = torch.randn(200, 5000, generator=torch.Generator().manual_seed(1000))
    for seed in range(4):
        head = kp.Head(5000, 16, kp.HeadSpec(expansion), seed=seed)
        assert 0.8 < float(head(x).detach().std()) < 1.25, seed


# ------------------------------------------------------------------------------------------------ single ones


def test_khatri_rao_on_taylor_is_a_factorization_machine() -> None:
    # Rendle: Σ_k ⟨v_k, x⟩² = Σ_ij ⟨v_i, v_j⟩ x_i x_j, and a linear part by the column of ones.
    m, rank = 5, 3
    head = kp.Head(m, 2, kp.HeadSpec(kp.Taylor(2), kp.KhatriRao(rank)), seed=0, dtype=torch.float64)
    factors, x = inputs(rank, m, seed=3), inputs(6, m)
    first = torch.cat((torch.full((rank, 1), 0.5, dtype=torch.float64), factors), -1)
    head.assign("reconciliation", left=torch.ones(2, rank), first=first, second=factors)
    pairs = sum((factors[:, i] @ factors[:, j]) * x[:, i] * x[:, j] for i, j in itertools.product(range(m), repeat=2))
    linear = 0.5 * (x @ factors.T).sum(-1)
    torch.testing.assert_close(head(x)[:, 0], pairs + linear)


def test_masks_and_patterns_of_ones_own() -> None:
    head = kp.Head(4, 4, kp.HeadSpec(kp.Identity(), kp.Masked(0.5)), seed=0)
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    mask[0, 2:] = True
    head.assign("reconciliation", mask=mask, entries=torch.arange(1.0, 9.0))
    expected = torch.tensor([[0, 0, 1, 2], [3, 0, 0, 0], [4, 5, 0, 0], [6, 7, 8, 0]], dtype=torch.float32)
    assert torch.equal(head.weights().dense()[0], expected)
    with pytest.raises(kp.SpecError, match="must keep exactly 8 entries"):
        head.assign("reconciliation", mask=torch.ones(4, 4))
    assert torch.equal(head.weights().dense()[0], expected)
    copies = kp.Head(4, 4, kp.HeadSpec(kp.Identity(), kp.Duplicated(2, 2, ratio=0.5)), seed=0)
    copies.assign("reconciliation", pattern=[[0, 1], [1, 0]], block=[[1.0, 2.0], [3.0, 4.0]])
    crossed = torch.tensor([[0, 0, 1, 2], [0, 0, 3, 4], [1, 2, 0, 0], [3, 4, 0, 0]], dtype=torch.float32)
    assert torch.equal(copies.weights().dense()[0], crossed)


@pytest.mark.parametrize("channels", [1, 3])
def test_masks_drawn_in_every_pass_keep_the_mean_and_stop_in_evaluation(channels) -> None:
    torch.manual_seed(0)
    head = kp.Head(20, 100, kp.HeadSpec(kp.Identity(), kp.DropConnect(0.8), channels=channels), seed=0)
    matrix = head.psi["matrix"].detach().view(channels, 100, 20)
    first, second = (head.weights().dense().detach() for _ in range(2))
    for drawn in (first, second):
        kept = drawn != 0
        torch.testing.assert_close(drawn, torch.where(kept, matrix / 0.8, 0))
        torch.testing.assert_close(kept.float().mean((1, 2)), torch.full((channels,), 0.8), rtol=0, atol=0.05)
    assert not torch.equal(first, second)
    if channels > 1:
        assert not torch.equal(first[0] != 0, first[1] != 0)
    x = inputs(5, 20, dtype=torch.float32)
    head.eval()
    torch.testing.assert_close(head(x), x @ matrix.sum(0).T)
    dense = kp.Head(20, 100, kp.HeadSpec(kp.Identity(), channels=channels), seed=0)
    torch.testing.assert_close(dense(x), head(x))  # also of equal initial values


def test_masks_drawn_in_every_pass_are_those_of_each_head() -> None:
    torch.manual_seed(0)
    spec = kp.HeadSpec(kp.Taylor(2), kp.DropConnect())
    layer = kp.Layer(3, 2, kp.LayerSpec((spec,) * 4), seed=0)
    assert layer.groups() == [[0, 1, 2, 3]]
    for head in layer.heads[1:]:
        head.load_state_dict(layer.heads[0].state_dict())
    fused = layer.fused_weights([0, 1, 2, 3]).matrix().detach()
    kept = (fused * 0.5 / layer.heads[0].psi["matrix"]).round()
    assert kept.unique().tolist() == [0, 1, 2, 3, 4]  # of four masks
    torch.testing.assert_close(fused, kept * 2 * layer.heads[0].psi["matrix"])


def test_nothing_global_is_drawn_for_masks_of_initial_values_and_penalties() -> None:
    spec = kp.rpn(
        [3, 4, 1], kp.BSpline(), kp.DropConnect(), remainder=kp.ExpansionRemainder(kp.Chebyshev(2), kp.DropConnect())
    )
    before = torch.get_rng_state()
    model = kp.Model(spec, seed=0)
    values = [
        Penalties(m, kp.TrainConfig(group_l1=0.1, smoothness=0.1)).value()
        for m in (model.train(), copy.deepcopy(model).eval())
    ]
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(values[0], values[1])
    assert model.layers[0].heads[0].psi.training


@pytest.mark.parametrize("psi", [kp.RandomAdaption(32), kp.HyperNet(64), kp.HyperNet(32, hidden=64)], ids=short_form)
def test_frozen_random_weights_are_trained_by_what_is_left(psi) -> None:
    x = inputs(128, 4, dtype=torch.float32)
    y = torch.stack((x[:, 0] * x[:, 1], x[:, 2]), -1)
    model = kp.Model(kp.rpn([4, 2], kp.Taylor(2), psi), seed=0)
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0)
    losses = []
    for _ in range(100):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in model.named_buffers())


def test_a_trained_hypernet_trains_its_layers_and_refuses_a_seed() -> None:
    psi = kp.HyperNet(length=2, hidden=5, trained=True)
    model = kp.Model(kp.rpn([3, 2], reconciliation=psi), seed=0, dtype=torch.float64)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert {name.split(".")[-1] for name in before} == {"vector", "layer", "output"}
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kp.fit(model, (x, x[:, :2]), solver="adamw", epochs=2)
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    with pytest.raises(kp.SpecError, match=r"HyperNet\(trained=True, seed=3\): a trained G is drawn with the model"):
        kp.HyperNet(trained=True, seed=3)
