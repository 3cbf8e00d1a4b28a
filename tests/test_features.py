"""What features that are not kept promise: values and derivatives of the dense form, in any block size, and no large tensor."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import pytest
import torch
from sklearn.preprocessing import PolynomialFeatures
from torch.autograd import forward_ad

import kapsi as kp
from kapsi import features
from kapsi.testing import WatchSizes


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def set_block(monkeypatch, size: int) -> None:
    for module in ("pairs", "recomputed"):
        monkeypatch.setattr(f"kapsi.features.{module}.BLOCK", size)


@pytest.fixture(params=[1, 30, 2**20])
def block(request, monkeypatch) -> int:
    """Set the numbers of κ(x) that are made at a time."""
    set_block(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("m", [1, 2, 3, 6, 7])
def test_pairs_equal_polynomial_features(m) -> None:
    x = normal(5, m)
    expected = torch.tensor(PolynomialFeatures(2, include_bias=False).fit_transform(x.numpy()))
    weights = [1.0] * m + [1.0 if i == j else math.sqrt(2) for i, j in combinations_with_replacement(range(m), 2)]
    expected *= torch.tensor(weights, dtype=torch.float64)
    made = kp.features.PairFeatures(x)
    assert made.columns == expected.shape[1]
    matrix = normal(3, made.columns, seed=1)
    mean = expected.mean(-1, keepdim=True)
    for ours, theirs in (
        (made.dense(), expected),
        (made.matmul(matrix), expected @ matrix.T),
        (made.total(), expected.sum(-1)),
        (made.square_norm(), expected.square().sum(-1)),
        (made.moments()[0], mean),
        (made.moments()[1], (expected - mean).square().mean(-1, keepdim=True)),
        (made.normalized(0.1).dense(), (expected - mean) / (expected.var(-1, correction=0, keepdim=True) + 0.1).sqrt()),
        (made.materialize().dense(), expected),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (0, 5)], ids=str)
@pytest.mark.parametrize("channels", [(), (2,)], ids=["one", "two"])
@pytest.mark.parametrize("kind", ["pairs", "recomputed"])
def test_products_and_derivatives_equal_those_of_the_dense_form(kind, channels, shape, block) -> None:
    x = normal(*shape).requires_grad_()
    made = (
        kp.features.PairFeatures(x)
        if kind == "pairs"
        else kp.features.RecomputedFeatures(lambda v: torch.cat((v.sin(), v**2), -1), x, (), 10)
    )
    matrix = normal(*channels, 3, made.columns, seed=1).requires_grad_()
    results = []
    for y in (made.matmul(matrix), features.DenseFeatures(made.dense()).matmul(matrix)):
        first = torch.autograd.grad(y.sin().sum(), (x, matrix), retain_graph=True)
        again = torch.autograd.grad(y.sin().sum(), (x, matrix), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in again), (x, matrix))
        results.append((y, *first, *again, *second))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    only_matrix = torch.autograd.grad(made.matmul(matrix).sin().sum(), matrix)[0]
    torch.testing.assert_close(only_matrix, results[0][2])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["pairs", "recomputed"])
def test_products_go_through_the_transforms(kind, block) -> None:
    x, matrix = normal(4, 5), normal(3, 20 if kind == "pairs" else 10, seed=1)

    def product(m: torch.Tensor, v: torch.Tensor, structured: bool = True) -> torch.Tensor:
        made: kp.features.Features
        if kind == "pairs":
            made = kp.features.PairFeatures(v)
        else:
            made = kp.features.RecomputedFeatures(lambda u: torch.cat((u.sin(), u**2), -1), v, (), 10)
        return made.matmul(m) if structured else made.dense() @ m.T

    for transform in (
        lambda f: torch.func.vmap(f, (None, 0))(matrix, x),
        lambda f: torch.func.vmap(f, (0, None))(normal(2, *matrix.shape), x),
        lambda f: torch.func.vmap(f, (0, 0))(normal(4, *matrix.shape), x),
        lambda f: torch.func.vmap(torch.func.grad(lambda m, v: f(m, v).sin().sum(), (0, 1)), (None, 0))(matrix, x),
        lambda f: torch.func.jacrev(f, (0, 1))(matrix, x),
        lambda f: torch.func.jacfwd(f, (0, 1))(matrix, x),
        lambda f: torch.func.hessian(lambda v: f(matrix, v).sin().sum())(x),
    ):
        ours = transform(product)
        theirs = transform(lambda m, v: product(m, v, structured=False))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["pairs", "recomputed"])
def test_products_have_forward_derivatives_in_dual_numbers(kind) -> None:
    x, moved, matrix = normal(4, 5), normal(4, 5, seed=2), normal(3, 20 if kind == "pairs" else 10, seed=1)

    def made(v: torch.Tensor) -> kp.features.Features:
        return (
            kp.features.PairFeatures(v)
            if kind == "pairs"
            else kp.features.RecomputedFeatures(lambda u: torch.cat((u.sin(), u**2), -1), v, (), 10)
        )

    _, expected = torch.func.jvp(lambda v: made(v).dense() @ matrix.T, (x,), (moved,))
    with forward_ad.dual_level():
        y = made(forward_ad.make_dual(x, moved)).matmul(matrix)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, expected)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reduced", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("same", [False, True])
def test_recomputed_products_under_autocast(same, reduced, inside) -> None:
    start, matrix = normal(6, 5).to(reduced if same else torch.float32), normal(3, 10, seed=1).float()
    results = []
    for structured in (True, False):
        x, weights = start.clone().requires_grad_(), matrix.clone().requires_grad_()
        made = kp.features.RecomputedFeatures(lambda u: torch.cat((u.sin(), u**2), -1), x, (), 10)
        with torch.autocast("cpu", reduced):
            y = (made if structured else features.DenseFeatures(made.dense())).matmul(weights)
            if inside:
                y.float().square().sum().backward()
        if not inside:
            y.float().square().sum().backward()
        results.append((y, x.grad, weights.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("after", [(), ("layer_norm",)], ids=["plain", "layer_norm"])
@pytest.mark.parametrize("reconciliation", [kp.Dense(), kp.LowRank(2)], ids=repr)
def test_symmetric_taylor_of_wide_inputs_is_never_whole(reconciliation, after, monkeypatch) -> None:
    set_block(monkeypatch, 2**12)
    spec = kp.HeadSpec(kp.Taylor(2, symmetric=True), reconciliation, channels=2, after=after)
    head = kp.Head(200, 3, spec, seed=0, dtype=torch.float64)
    x = normal(128, 200).requires_grad_()
    with WatchSizes(x, *head.parameters()) as watch:
        y = head(x)
        y.square().sum().backward()
    columns = 200 + 200 * 201 // 2
    assert watch.largest < 128 * columns / 10, watch.operation
    first = [x.grad, *(p.grad for p in head.parameters())]
    x.grad = None
    head.zero_grad()
    dense = kp.contract(features.DenseFeatures(head.expand(x).dense()), head.weights()).sum(-2)
    torch.testing.assert_close(y, dense, rtol=1e-10, atol=1e-10)
    dense.square().sum().backward()
    for ours, theirs in zip(first, [x.grad, *(p.grad for p in head.parameters())], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pairs_under_autocast_are_those_that_are_formed(dtype, inside, monkeypatch) -> None:
    set_block(monkeypatch, 100)
    x, matrix = normal(20, 12).float(), normal(3, 90, seed=1).float() / 9
    results = []
    for kept in (True, False):
        inputs, weights = x.clone().requires_grad_(), matrix.clone().requires_grad_()
        pairs = kp.features.PairFeatures(inputs)
        with torch.autocast("cpu", dtype=dtype):
            y = (pairs.materialize() if kept else pairs).matmul(weights)
            loss = y.float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            first = torch.autograd.grad(loss, (inputs, weights), create_graph=True)
            sum(each.square().sum() for each in first).backward()
        results.append((y, inputs.grad, weights.grad))
    for formed, made in zip(*results, strict=True):
        assert made.dtype == formed.dtype
        assert (made - formed).double().norm() < 0.02 * formed.double().norm()
    assert results[1][0].dtype == dtype


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 6e-3), (torch.float16, 8e-4)], ids=str)
def test_pairs_in_16_bits_are_as_exact_in_many_blocks_as_in_one(dtype, error, monkeypatch) -> None:
    set_block(monkeypatch, 1)
    x, matrix = normal(20, 300).to(dtype), (normal(4, 45450, seed=1) / 213).to(dtype)
    found = []
    for kind in (dtype, torch.float64):
        inputs = x.to(kind, copy=True).requires_grad_()
        y = (
            kp.features.PairFeatures(inputs)
            if kind == dtype
            else kp.features.DenseFeatures(features.with_pairs(inputs))
        ).matmul(matrix.to(kind))
        found.append((y, *torch.autograd.grad(y.sum(), inputs)))
    for ours, exact in zip(*found, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() < error * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moments_of_pairs_are_finite_where_their_sums_are_beyond_16_bits(dtype) -> None:
    x = (5 * normal(4, 300)).to(dtype)
    pairs, exact = kp.features.PairFeatures(x), kp.features.DenseFeatures(features.with_pairs(x.double()))
    for ours, right in zip(pairs.moments(), exact.moments(), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-3)
    small = kp.features.PairFeatures(x / 100)
    right = kp.features.DenseFeatures(features.with_pairs(small.x.double()))
    for ours, theirs in ((small.total(), right.total()), (small.square_norm(), right.square_norm())):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_what_is_used_many_times_is_kept() -> None:
    spec = kp.HeadSpec(kp.Extended((kp.BSpline(checkpoint=True), kp.Taylor(2))))
    layer = kp.Layer(6, 2, kp.LayerSpec((spec, kp.HeadSpec(kp.BSpline(checkpoint=True)))), seed=0, dtype=torch.float64)
    x = normal(9, 6)
    made = layer.fixed_features(x)
    assert not any(isinstance(each, kp.features.RecomputedFeatures) for each in (made[1], *made[0].parts))
    torch.testing.assert_close(layer(x, made), layer(x), rtol=1e-12, atol=1e-12)
    normalized = layer.heads[0].expand(x).normalized(1e-5)
    assert isinstance(normalized.materialize().base.parts[0], kp.features.DenseFeatures)
    torch.testing.assert_close(normalized.materialize().dense(), normalized.dense())


def test_wide_symmetric_taylor_exports_for_any_batch() -> None:
    model = kp.Model(kp.rpn([60, 4], expansion=kp.Taylor(2, symmetric=True)), seed=0).eval()
    batch = torch.export.Dim("batch", min=1, max=100_000)
    program = torch.export.export(model, (torch.ones(3, 60),), dynamic_shapes=({0: batch},)).module()
    x = normal(2000, 60).float()  # of which κ(x) has 3.8 million entries: not kept by the model itself
    assert isinstance(next(model.heads())[1].expand(x), kp.features.PairFeatures)
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 3), (20,)], ids=str)
def test_leaves_equal_the_dense_form(shape, rows) -> None:
    generator = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randint(3 * i, 3 * i + 3, shape, generator=generator) for i in range(4)], -1).int()
    offset = torch.zeros(shape, dtype=torch.float64)
    if offset.numel() > 4:
        offset.view(-1)[1] = torch.nan
    made = kp.features.LeafFeatures(indices, offset, 12)
    dense = features.DenseFeatures(made.dense())
    assert made.columns == 12
    matrix = normal(*rows, 12, seed=1).requires_grad_()
    results = []
    for form in (made, dense):
        y = form.matmul(matrix)
        results.append((y, form.total(), form.square_norm(), *form.moments(), form.normalized(0.1).dense()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
    if offset.isfinite().all():
        torch.autograd.gradcheck(made.matmul, (matrix,), fast_mode=True)
        torch.autograd.gradgradcheck(lambda m: made.matmul(m).sin(), (matrix,), fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_leaves_go_through_the_transforms() -> None:
    indices, offset = torch.tensor([[0, 3], [2, 3], [1, 4]]), torch.zeros(3, dtype=torch.float64)

    def product(m: torch.Tensor, i: torch.Tensor, o: torch.Tensor, structured: bool = True) -> torch.Tensor:
        made = kp.features.LeafFeatures(i, o, 5)
        return made.matmul(m) if structured else made.dense() @ m.T

    for transform in (
        lambda f: torch.func.vmap(f, (None, 0, 0))(normal(2, 5), indices, offset),
        lambda f: torch.func.vmap(f, (0, None, None))(normal(4, 2, 5), indices, offset),
        lambda f: torch.func.vmap(f, (0, 0, 0))(normal(3, 2, 5), indices, offset),
        lambda f: torch.func.vmap(f, (0, 0, 0))(normal(3, 20, 5), indices, offset),
        lambda f: torch.func.jacfwd(f)(normal(2, 5), indices, offset),
        lambda f: torch.func.hessian(lambda m: f(m, indices, offset).sin().sum())(normal(2, 5)),
    ):
        torch.testing.assert_close(transform(product), transform(lambda *a: product(*a, structured=False)))


def test_leaves_of_another_type_than_the_weights_are_refused() -> None:
    made = kp.features.LeafFeatures(torch.tensor([[0, 2]]), torch.zeros(1), 3)
    with pytest.raises(kp.DataError, match=r"inputs are torch.float32 and the weights torch.float64"):
        made.matmul(normal(1, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert made.matmul(torch.ones(1, 3, dtype=torch.bfloat16)).tolist() == [[2.0]]
