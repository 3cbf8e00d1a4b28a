"""Sparse inputs: the same values and gradients as dense ones, nothing of their size made; and tensors kept column by column."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kapsi as kp
from kapsi.features import MAX_ENTRIES, entries_of, side_by_side
from kapsi.modules import MAX_TRAINED
from kapsi.testing import WatchSizes, inputs

EXPANSIONS = (
    kp.Identity(),
    kp.Taylor(1),
    kp.Taylor(2),
    kp.Taylor(3),
    kp.Taylor(2, symmetric=True),
    kp.Taylor(4, symmetric=True),
    kp.Extended((kp.Identity(), kp.Taylor(2))),
    kp.Extended((kp.Taylor(2, symmetric=True), kp.Identity(), kp.Taylor(2))),
    kp.Nested((kp.Identity(), kp.Taylor(2))),
)
RECONCILIATIONS = (
    kp.LowRank(2),
    kp.KhatriRao(3),
    kp.RandomAdaption(3),
    kp.Kronecker(),
    kp.Kronecker(columns=2, terms=2),
    kp.Kronecker(columns=1),
    kp.LowRankKronecker(rank=2),
    kp.LowRankKronecker(rank=1, columns=2, terms=2),
    kp.DualLowRankKronecker(rank=2),
    kp.DualLowRankKronecker(rank=2, columns=2, rows=1, terms=2),
    kp.Dense(),
    kp.Masked(0.5),
    kp.Duplicated(),
    kp.Duplicated(ratio=0.5, rows=1, columns=2),
    kp.ConstantReconciliation(0.3),
    kp.OneReconciliation(),
    kp.ZeroReconciliation(),
    kp.Eye(blocks=True),
)
REMAINDERS = (
    kp.ZeroRemainder(),
    kp.ConstantRemainder(2.0),
    kp.LinearRemainder(bias=True, after="tanh"),
    kp.ExpansionRemainder(kp.Taylor(2), kp.KhatriRao(2), kp.LinearRemainder()),
)
WIDE = 26_965
"""Columns of a matrix of texts; its products of two are 727 million."""


def some_zeros(*shape: int, share: float = 0.5, seed: int = 3) -> Tensor:
    """Return inputs of which a share is zero, and one row, if there are several, is nothing else."""
    there = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > share
    x = inputs(*shape) * there
    x[1:2] = 0
    return x


def text(rows: int, columns: int, each: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a sparse matrix with so many entries in each row, which is never there as a dense one."""
    generator = torch.Generator().manual_seed(4)
    index = torch.stack([torch.randperm(columns, generator=generator)[:each].sort().values for _ in range(rows)])
    values = torch.rand(rows * each, generator=generator, dtype=dtype) + 0.1
    return torch.sparse_csr_tensor(
        torch.arange(0, rows * each + 1, each), index.flatten(), values, (rows, columns), check_invariants=True
    )


def gradients(y: Tensor, module: torch.nn.Module) -> list[Tensor]:
    """Return what the parameters get from a fixed gradient of an output."""
    return list(torch.autograd.grad((y * inputs(*y.shape, seed=9)).sum(), list(module.parameters())))


def is_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


# ------------------------------------------------------------------------------------------------ the same as dense inputs


def combinations() -> list[tuple[kp.Expansion, kp.Reconciliation]]:
    """Return all pairs whose sizes go together for 6 inputs and 4 outputs."""
    found = []
    for expansion in EXPANSIONS:
        for reconciliation in RECONCILIATIONS:
            try:
                reconciliation.params(4, expansion.factors(6))
            except kp.SpecError:
                continue
            found.append((expansion, reconciliation))
    return found


@pytest.mark.parametrize(("expansion", "reconciliation"), combinations(), ids=str)
def test_a_head_gives_what_it_gives_for_dense_inputs(
    expansion: kp.Expansion, reconciliation: kp.Reconciliation
) -> None:
    x = some_zeros(5, 6)
    for channels, after in ((1, ()), (3, ()), (2, ("layer_norm",))):
        spec = kp.HeadSpec(expansion, reconciliation, kp.LinearRemainder(), bias=True, channels=channels, after=after)
        head = kp.Head(6, 4, spec, seed=0, dtype=torch.float64)
        y, expected = head(x.to_sparse_csr()), head(x)
        is_same(y, expected)
        is_same(gradients(y, head), gradients(expected, head))
        is_same(head.expand(x.to_sparse_csr()).dense(), head.expand(x).dense())
        # With the channel axis, and formed on request.
        is_same(
            kp.contract(head.expand(x.to_sparse_csr()), head.weights()), kp.contract(head.expand(x), head.weights())
        )
        for route in ("dense", "structured"):
            is_same(head(x.to_sparse_csr(), route=route), expected)


def test_the_pairs_above_are_all_that_there_should_be() -> None:
    kinds = {type(reconciliation) for _, reconciliation in combinations()}
    assert kinds == {*map(type, RECONCILIATIONS)}
    pairs = list(combinations())
    assert len(pairs) > 0.8 * len(EXPANSIONS) * len(RECONCILIATIONS)
    assert {type(f) for f in kp.catalogue("reconciliation")} == {type}
    others = {f for f in kp.catalogue("reconciliation") if f.__module__.startswith("kapsi.")} - kinds
    assert others == {kp.HyperNet, kp.DropConnect}  # both are tested below


def test_dropped_connections_give_what_they_give_for_dense_inputs() -> None:
    x = some_zeros(5, 6)
    head = kp.Head(6, 4, kp.HeadSpec(kp.Taylor(2), kp.DropConnect(0.5), channels=2), seed=0, dtype=torch.float64)
    is_same(head.eval()(x.to_sparse_csr()), head(x))
    outputs = []
    for rows in (x.to_sparse_csr(), x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            outputs.append(head.train()(rows))
    is_same(*outputs)
    assert not torch.equal(outputs[1], head.eval()(x))


def test_an_eye_gives_the_inputs() -> None:
    x = some_zeros(5, 6)
    head = kp.Head(6, 6, kp.HeadSpec(kp.Identity(), kp.Eye(), channels=2), dtype=torch.float64)
    is_same(head(x.to_sparse_csr()), 2 * x)


@pytest.mark.parametrize("remainder", REMAINDERS, ids=str)
def test_a_remainder_gives_what_it_gives_for_dense_inputs(remainder: kp.Remainder) -> None:
    x = some_zeros(5, 6)
    head = kp.Head(6, 4, kp.HeadSpec(kp.Taylor(2), kp.LowRank(2), remainder), seed=0, dtype=torch.float64)
    is_same(head.remainder(x.to_sparse_csr()), head.remainder(x))
    y, expected = head(x.to_sparse_csr()), head(x)
    is_same(y, expected)
    is_same(gradients(y, head), gradients(expected, head))


@pytest.mark.parametrize("fusion", ["sum", "mean", "weighted_sum", "concatenation"])
def test_heads_that_share_kappa_and_later_layers(fusion: str) -> None:
    x = some_zeros(7, 6)
    heads = (
        kp.HeadSpec(kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder(), bias=True),
        kp.HeadSpec(kp.Taylor(2), kp.LowRank(2)),
        kp.HeadSpec(kp.Taylor(2), kp.Kronecker(), channels=2),
        kp.HeadSpec(kp.Identity(), kp.Dense(), channels=2),
        kp.HeadSpec(kp.Identity(), kp.Dense(), channels=2),
    )
    later = kp.LayerSpec(kp.HeadSpec(kp.Chebyshev(3), kp.Dense()))
    model = kp.Model(
        kp.ModelSpec((6, 8, 3), (kp.LayerSpec(heads, fusion, ("tanh",)), later)), seed=0, dtype=torch.float64
    )
    y, expected = model(x.to_sparse_csr()), model(x)
    is_same(y, expected)
    is_same(gradients(y, model), gradients(expected, model))
    layer = model.layers[0]
    is_same(layer(x.to_sparse_csr(), layer.fixed_features(x.to_sparse_csr())), layer(x))


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_symmetric_columns_for_unordered_entries(degree: int) -> None:
    """Entries of a row may stand in any order."""
    columns, values = torch.tensor([3, 0, 4]), torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    x = torch.zeros(1, 5, dtype=torch.float64).index_put((torch.zeros(3, dtype=torch.long), columns), values)
    unordered = torch.sparse_csr_tensor(torch.tensor([0, 3]), columns, values, (1, 5), check_invariants=False)
    expansion = kp.Taylor(degree, symmetric=True)
    is_same(expansion(unordered, {}).dense(), expansion(x, {}).dense())


def test_positions_of_symmetric_columns_are_exact_where_they_are_many() -> None:
    """The last monomials of 2,000 inputs and degree 4 have positions up to 6.7e11."""
    expansion = kp.Taylor(4, symmetric=True)
    x = torch.zeros(1, 2_000, dtype=torch.float64)
    x[0, [0, 1_998, 1_999]] = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    made = entries_of(expansion(x.to_sparse_csr(), {}))
    found = dict(zip(made.indices.tolist(), made.values.tolist(), strict=True))
    last = expansion.out_features(2_000) - 1
    assert len(found) == 3 + 6 + 10 + 15
    assert found[last] == pytest.approx(5.0**4)
    assert found[last - 1] == pytest.approx(2 * 5.0**3 * 3)  # √4 · x₁₉₉₈ x₁₉₉₉³
    assert found[0] == 2.0
    assert found[1_999] == 5.0


def test_features_have_the_same_sums_norms_and_moments() -> None:
    x = some_zeros(5, 6)
    for expansion in EXPANSIONS:
        sparse, dense = expansion(x.to_sparse_csr(), _Empty()), expansion(x, _Empty())
        assert sparse.sparse
        assert not dense.sparse
        assert sparse.columns == dense.columns
        for name in ("total", "square_norm", "moments", "dense"):
            is_same(getattr(sparse, name)(), getattr(dense, name)())
        matrix = inputs(2, 3, dense.columns)
        is_same(sparse.matmul(matrix), dense.matmul(matrix))
        is_same(sparse.matmul(matrix[0]), dense.matmul(matrix[0]))
        is_same(sparse.normalized(1e-3).dense(), dense.normalized(1e-3).dense())


class _Empty:
    """No tensors, by any name."""

    def __getitem__(self, name: str) -> Any:
        return self


def test_a_layer_norm_far_from_zero_keeps_its_digits() -> None:
    """As a difference of the mean square and the square of the mean the variance would lose them all."""
    x = 1e6 + torch.randn(3, 5_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, variance = kp.features.SparseFeatures.of(x.float().to_sparse_csr()).moments()
    torch.testing.assert_close(
        variance.double(), x.float().double().var(-1, keepdim=True, correction=0), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(mean.double(), x.mean(-1, keepdim=True), rtol=1e-7, atol=0)


def test_weights_on_a_grid_of_their_own() -> None:
    """Entry by entry, where weights by themselves lie on a grid that κ has not."""
    x = some_zeros(5, 6)
    for several in ((), (2,)):
        khatri_rao = kp.weights.KhatriRaoWeights(inputs(*several, 4, 3), inputs(*several, 3, 2), inputs(*several, 3, 3))
        eyes = kp.weights.KroneckerWeights(
            kp.weights.EyeWeights(inputs(*several), 2),
            kp.weights.LowRankWeights(inputs(*several, 2, 1), inputs(*several, 1, 3)),
        )
        for weights in (khatri_rao, eyes):
            sparse = kp.contract(kp.features.SparseFeatures.of(x.to_sparse_csr()), weights)
            is_same(sparse, kp.contract(kp.features.DenseFeatures(x), weights))


def test_features_beside_each_other() -> None:
    x, z = some_zeros(5, 6), some_zeros(5, 3, seed=8)
    both = [kp.features.SparseFeatures.of(part.to_sparse_csr()) for part in (x, z, x)]
    is_same(side_by_side(both).dense(), torch.cat((x, z, x), -1))
    product = kp.features.SparseProductFeatures(both[0], both[1])
    is_same(
        entries_of(kp.features.ConcatenatedFeatures((product, both[2]))).dense(), torch.cat((product.dense(), x), -1)
    )


# ------------------------------------------------------------------------------------------------ rows, types, derivatives


@pytest.mark.parametrize("expansion", EXPANSIONS, ids=str)
def test_no_rows_and_rows_without_entries(expansion: kp.Expansion) -> None:
    head = kp.Head(6, 4, kp.HeadSpec(expansion, kp.LowRank(2), kp.LinearRemainder(), bias=True), seed=0)
    with torch.no_grad():
        head.bias.copy_(torch.arange(4.0))
    none = head(torch.zeros(0, 6).to_sparse_csr())
    assert none.shape == (0, 4)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(none.sum(), list(head.parameters())))
    nothing = head(torch.zeros(3, 6).to_sparse_csr())
    assert torch.equal(nothing, torch.arange(4.0).expand(3, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    x = some_zeros(5, 6).to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05)
    for reconciliation in (kp.LowRank(2), kp.KhatriRao(2), kp.DualLowRankKronecker(rank=2), kp.Dense()):
        head = kp.Head(6, 4, kp.HeadSpec(kp.Taylor(2), reconciliation, after="layer_norm"), seed=0, dtype=dtype)
        y, expected = head(x.to_sparse_csr()), head(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
        found, wanted = (torch.autograd.grad(z.float().square().sum(), list(head.parameters())) for z in (y, expected))
        assert all(g.dtype == dtype for g in found)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=4 * tolerance)


def test_sums_over_many_rows_keep_their_digits_in_16_bits() -> None:
    """One by one, in bfloat16, a thousand ones would add up to 256; here ten at a time."""
    head = kp.Head(3, 3_000, kp.HeadSpec(kp.Identity(), kp.Dense()), dtype=torch.bfloat16)
    x = torch.ones(1000, 3, dtype=torch.bfloat16).to_sparse_csr()
    head(x).sum().backward()
    assert torch.equal(head.psi["matrix"].grad, torch.full((3_000, 3), 1000.0, dtype=torch.bfloat16))
    ones = torch.ones(1, 1000, dtype=torch.bfloat16).to_sparse_csr()
    assert float(kp.features.SparseFeatures.of(ones).matmul(ones.to_dense())) == 1000
    assert float(kp.features.SparseFeatures.of(ones).total()) == 1000


def test_other_types_of_indices() -> None:
    x = some_zeros(5, 6).to_sparse_csr()
    short = torch.sparse_csr_tensor(
        x.crow_indices().int(), x.col_indices().int(), x.values(), x.shape, check_invariants=True
    )
    head = kp.Head(6, 4, kp.HeadSpec(kp.Taylor(2), kp.LowRank(2)), seed=0, dtype=torch.float64)
    assert torch.equal(head(short), head(x))


def test_autocast() -> None:
    head = kp.Head(6, 4, kp.HeadSpec(kp.Taylor(2), kp.KhatriRao(2), kp.LinearRemainder()), seed=0)
    x = some_zeros(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            y = head(x.to(dtype).to_sparse_csr())
            torch.testing.assert_close(y.float(), head(x.to(dtype)).float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "reconciliation",
    [kp.LowRank(1), kp.KhatriRao(2), kp.Kronecker(columns=2), kp.DualLowRankKronecker(rank=1), kp.Dense()],
    ids=str,
)
def test_second_derivatives(reconciliation: kp.Reconciliation) -> None:
    x = some_zeros(3, 4).to_sparse_csr()
    spec = kp.HeadSpec(kp.Taylor(2), reconciliation, kp.LinearRemainder(), after="layer_norm", channels=2)
    head = kp.Head(4, 2, spec, seed=0, dtype=torch.float64)
    names, values = zip(*head.named_parameters(), strict=True)

    def call(*tensors: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(head, dict(zip(names, tensors, strict=True)), (x,))
        return made

    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning"
)  # of torch's forward derivatives about themselves
def test_derivatives_of_functions() -> None:
    """The map over several models; and forward derivatives, for which torch wants κ(x) read from the tensor before."""
    x = some_zeros(3, 4)
    sparse = x.to_sparse_csr()
    features = {0: kp.Taylor(2)(sparse, {})}
    models = [
        kp.Model(kp.rpn([4, 2], kp.Taylor(2), kp.LowRank(2)), seed=seed, dtype=torch.float64) for seed in range(3)
    ]
    parameters, buffers = torch.func.stack_module_state(models)

    def one(p: Any, b: Any, known: Any = None) -> Any:
        return torch.func.functional_call(models[0], (p, b), (sparse, known))

    is_same(torch.func.vmap(one)(parameters, buffers), torch.stack([model(x) for model in models]))
    first = {name: tensor[0] for name, tensor in parameters.items()}
    moved, slope = torch.func.jvp(lambda p: one(p, {}, features), (first,), (first,))
    is_same(moved, models[0](x))
    is_same(slope, 2 * moved)  # of a product of two factors
    by_rows = torch.func.jacrev(lambda p: one(p, {}, features))(first)
    is_same(by_rows, torch.func.jacfwd(lambda p: one(p, {}, features))(first))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of a graph in several pieces
@pytest.mark.slow
def test_a_compiled_model_takes_them() -> None:
    """Not as one graph: how many products of entries there are is a matter of values."""
    torch._dynamo.reset()
    x = some_zeros(4, 6).to_sparse_csr()
    for expansion in (kp.Taylor(2), kp.Taylor(2, symmetric=True), kp.Identity()):
        model = kp.Model(kp.rpn([6, 3, 2], expansion, kp.LowRank(2)), seed=0, dtype=torch.float64)
        y = torch.compile(model, backend="aot_eager")(x)
        is_same(y, model(x))
        is_same(gradients(y, model), gradients(model(x), model))


def test_training_goes_down() -> None:
    x, target = text(40, 300, 7), torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    model = kp.Model(kp.rpn([300, 1], kp.Taylor(2), kp.KhatriRao(8)), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


# ------------------------------------------------------------------------------------------------ what is not made


def watched(head: torch.nn.Module, x: Tensor, *more: Tensor) -> tuple[WatchSizes, WatchSizes]:
    """Return what a forward pass makes, and what a step of training does."""
    with WatchSizes(*head.parameters(), *head.buffers(), *more) as forward:
        head(x)
    with WatchSizes(*head.parameters(), *head.buffers(), *more) as step:
        head(x).square().sum().backward()
    return forward, step


@pytest.mark.parametrize(
    ("expansion", "reconciliation", "channels"),
    [
        (kp.Identity(), kp.LowRank(3), 1),
        (kp.Identity(), kp.LowRank(3), 2),
        (kp.Identity(), kp.KhatriRao(3), 2),
        (kp.Identity(), kp.RandomAdaption(3), 2),
        (kp.Identity(), kp.Kronecker(), 2),
        (kp.Identity(), kp.Kronecker(columns=5, terms=2), 1),
        (kp.Identity(), kp.DualLowRankKronecker(rank=3), 1),
        (kp.Identity(), kp.Dense(), 2),
        (kp.Identity(), kp.Duplicated(), 1),
        (kp.Identity(), kp.Eye(blocks=True), 1),
        (kp.Taylor(2), kp.KhatriRao(3), 2),
        (kp.Taylor(2), kp.Kronecker(), 2),
        (kp.Taylor(2), kp.LowRankKronecker(rank=3), 1),
        (kp.Taylor(2), kp.DualLowRankKronecker(rank=3), 2),
        (kp.Taylor(2), kp.Duplicated(), 1),
        (kp.Taylor(2), kp.OneReconciliation(), 1),
        (kp.Taylor(3, symmetric=True), kp.ConstantReconciliation(), 1),
        (kp.Extended((kp.Identity(), kp.Identity())), kp.KhatriRao(3), 1),
    ],
    ids=str,
)
def test_nothing_of_the_size_of_the_inputs_is_made(
    expansion: kp.Expansion, reconciliation: kp.Reconciliation, channels: int
) -> None:
    """Of 50 rows and 8,000 columns; of the backward pass the gradients of the parameters are as large as those."""
    rows, m, n = 50, 8_000, 40
    x = text(rows, m, 6)
    spec = kp.HeadSpec(expansion, reconciliation, kp.LinearRemainder(), after="layer_norm", channels=channels)
    head = kp.Head(m, n, spec, seed=0)
    forward, step = watched(head, x, x.values(), x.crow_indices(), x.col_indices())
    most = rows * 300 * 3  # pairs and triples of entries
    assert forward.largest <= most < rows * m / 8, forward.operation
    # The gradient of the matrix of the remainder, n × m, is the largest; B × m and n × D are no smaller.
    gradients = [p.numel() for p in head.parameters()]
    assert step.largest in (max(gradients), max(gradients) + n), step.operation
    formed = watched(head, x.to_dense())[0] if isinstance(expansion, kp.Identity) else None
    assert formed is None or channels * forward.largest < m * n


def test_of_products_only_those_of_entries_are_made() -> None:
    """Low rank on all products: 40 × 3 × (entries + entries²) numbers forward, the gradient of ψ backward, no κ(x)."""
    rows, m = 40, 500
    x = text(rows, m, 6)
    for expansion in (kp.Taylor(2), kp.Taylor(2, symmetric=True)):
        head = kp.Head(m, 3, kp.HeadSpec(expansion, kp.LowRank(2)), seed=0)
        forward, step = watched(head, x)
        columns = expansion.out_features(m)
        assert forward.largest <= rows * (6 + 1) * 6, forward.operation
        assert step.largest == 2 * columns < rows * columns, step.operation
        assert watched(head, x.to_dense())[0].largest > rows * m


def test_several_heads_copy_no_weights() -> None:
    rows, m = 50, 8_000
    x = text(rows, m, 6)
    spec = kp.LayerSpec(4 * (kp.HeadSpec(kp.Identity(), kp.LowRank(3)),))
    layer = kp.Layer(m, 40, spec, seed=0)
    assert layer.groups() == [[0, 1, 2, 3]]  # as dense inputs have it
    forward, step = watched(layer, x)
    assert forward.largest <= rows * 40
    assert step.largest == 3 * m


def test_products_of_all_words_train() -> None:
    """727 million columns: three million parameters, and nothing larger than those."""
    x = text(64, WIDE, 140)
    for reconciliation in (kp.KhatriRao(64), kp.DualLowRankKronecker(rank=5)):
        head = kp.Head(WIDE, 2, kp.HeadSpec(kp.Taylor(2), reconciliation), seed=0)
        assert sum(p.numel() for p in head.parameters()) < 4e6
        forward, step = watched(head, x)
        assert forward.largest < 64 * WIDE / 100, forward.operation
        assert step.largest == max(p.numel() for p in head.parameters()), step.operation
        assert bool(torch.isfinite(head(x)).all())
    with WatchSizes() as watch:
        kp.Head(WIDE, 2, kp.HeadSpec(kp.Taylor(2), kp.KhatriRao(64)), seed=0)
    assert watch.largest <= 64 * (WIDE + 1), watch.operation


# ------------------------------------------------------------------------------------------------ sizes that are refused


def test_a_psi_too_large_to_train_is_refused_before_it_is_made() -> None:
    spec = kp.HeadSpec(kp.Taylor(2), kp.LowRank(3))
    with WatchSizes() as watch, pytest.raises(kp.SpecError) as error:
        kp.Head(WIDE, 2, spec)
    assert watch.largest < 10
    # 26,966 × 26,965 columns and 2 outputs, of rank 3; 16 bytes each in training
    for part in (
        "2,181,414,576",
        "34.9 GB",
        "11.6 GB a rank with AdamW",
        "536,870,912",
        "KhatriRao(64) with 3,451,712",
        "DualLow",
    ):
        assert part in str(error.value), part
    with pytest.raises(kp.SpecError, match=r"69.8 GB with AdamW .23.3 GB a rank"):
        kp.Head(WIDE, 2, spec, dtype=torch.float64)
    with pytest.raises(kp.SpecError, match=r"^heads\[0\]: Head\(26965 → 2\): LowRank.*11\.6 GB a rank"):
        kp.Layer(WIDE, 2, kp.LayerSpec(spec))
    with pytest.raises(kp.SpecError, match=r"^layers\[0\]\.heads\[0\]: Head\(26965 → 2\): Dense.*23\.3 GB with AdamW;"):
        kp.Model(kp.rpn([WIDE, 2], kp.Taylor(2)))
    with pytest.raises(kp.SpecError, match=r"18 trainable parameters and 11,634,211,072 fixed values, 46.5 GB"):
        kp.Head(WIDE, 2, kp.HeadSpec(kp.Taylor(2), kp.RandomAdaption(16)))
    with pytest.raises(kp.SpecError, match=r"ExpansionRemainder.* 1,454,276,384 trainable .* a smaller expansion$"):
        kp.Head(WIDE, 2, kp.HeadSpec(kp.Identity(), kp.LowRank(2), kp.ExpansionRemainder()))
    with pytest.raises(
        kp.SpecError, match=r"KhatriRao\(rank=10000\) has 1,617,990,000 .*KhatriRao\(64\) with 10,355,136"
    ):
        kp.Head(WIDE, 2, kp.HeadSpec(kp.Taylor(2), kp.KhatriRao(10_000), channels=3))


def test_sizes_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TRAINED == 2**29
    monkeypatch.setattr("kapsi.modules.head.MAX_TRAINED", 60)
    kp.Head(5, 12, kp.HeadSpec(kp.Identity(), kp.Dense()))
    with pytest.raises(kp.SpecError, match="120 trainable parameters"):
        kp.Head(5, 12, kp.HeadSpec(kp.Identity(), kp.Dense(), channels=2))
    with pytest.raises(kp.SpecError, match="65 trainable parameters"):
        kp.Layer(5, 13, kp.LayerSpec(kp.HeadSpec(kp.Identity(), kp.Dense())))


def test_on_the_meta_device_it_can_be_made() -> None:
    model = kp.Model(kp.rpn([WIDE, 2], kp.Taylor(2), kp.LowRank(2)), device="meta")
    assert kp.explain(model)[0].parameters == 1_454_276_384
    with torch.device("meta"):
        kp.Head(WIDE, 2, kp.HeadSpec(kp.Taylor(2), kp.LowRank(2)))


def test_too_many_products_of_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = text(4, 50, 10)
    assert MAX_ENTRIES == 2**28
    for reconciliation in (kp.LowRank(2), kp.KhatriRao(2)):
        head = kp.Head(50, 2, kp.HeadSpec(kp.Taylor(2), reconciliation), seed=0)
        expected = head(x)
        monkeypatch.setattr("kapsi.features.sparse.MAX_ENTRIES", 4 * 11 * 10)
        assert torch.equal(head(x), expected)
        monkeypatch.setattr("kapsi.features.sparse.MAX_ENTRIES", 4 * 11 * 10 - 1)
        if isinstance(reconciliation, kp.KhatriRao):
            assert torch.equal(head(x), expected)
        else:
            with pytest.raises(kp.DataError, match=r"would have 440 entries; at most 439.*khatri_rao"):
                head(x)
        monkeypatch.undo()


def test_a_grid_that_makes_too_much_names_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    head = kp.Head(50, 4, kp.HeadSpec(kp.Taylor(2), kp.Kronecker(columns=10)), seed=0)
    head(text(4, 50, 10))
    monkeypatch.setattr("kapsi.contraction.MAX_MATERIALIZED_WEIGHTS", 1_000)
    with pytest.raises(kp.SpecError, match=r"grid 10 × 255 would have 1,760 .* leave `columns` out.* here 51 × 50"):
        head(text(4, 50, 10))


# ------------------------------------------------------------------------------------------------ what is refused


def csr(*shape: int) -> Tensor:
    return torch.ones(*shape).to_sparse_csr()


TAYLOR = kp.HeadSpec(kp.Taylor(2), kp.LowRank(2))
REFUSED: dict[str, tuple[kp.HeadSpec, Tensor, list[str]]] = {
    "COO": (TAYLOR, torch.ones(2, 4).to_sparse(), ["torch.sparse_coo", "x.to_sparse_csr()", "x.to_dense()"]),
    "CSC": (TAYLOR, torch.ones(2, 4).to_sparse_csc(), ["torch.sparse_csc", "x.to_sparse_csr()"]),
    "blocks": (TAYLOR, torch.ones(2, 4).to_sparse_bsr((1, 2)), ["torch.sparse_bsr", "x.to_dense()"]),
    "batches": (TAYLOR, csr(3, 2, 4), ["(rows, 4)", "(3, 2, 4)", "x.to_dense()"]),
    "columns": (TAYLOR, csr(2, 5), ["(..., 4)", "(2, 5)"]),
    "integers": (TAYLOR, torch.ones(2, 4, dtype=torch.int64).to_sparse_csr(), ["torch.int64", "x.float()"]),
    "gradient": (TAYLOR, csr(2, 4).requires_grad_(), ["no gradient", "x.detach()", "x.to_dense()"]),
    "type": (TAYLOR, csr(2, 4).double(), ["torch.float64", "torch.float32", "x.to(torch.float32)"]),
    "expansion": (kp.HeadSpec(kp.BSpline(3)), csr(2, 4), ["BSpline", "Identity and Taylor", "x.to_dense()"]),
    "one part": (kp.HeadSpec(kp.Extended((kp.Identity(), kp.Fourier()))), csr(2, 4), ["Fourier", "x.to_dense()"]),
    "nested": (kp.HeadSpec(kp.Nested((kp.Taylor(2), kp.Identity()))), csr(2, 4), ["Nested", "x.to_dense()"]),
    "before": (kp.HeadSpec(kp.Taylor(2), before="tanh"), csr(2, 4), ["Tanh", "`before`", "x.to_dense()"]),
    "after": (kp.HeadSpec(kp.Taylor(2), after="tanh"), csr(2, 4), ["Tanh", "`after`", "layer norm", "x.to_dense()"]),
    "after the norm": (kp.HeadSpec(after=("layer_norm", "relu")), csr(2, 4), ["ReLU", "`after`", "x.to_dense()"]),
    "norm with affine": (kp.HeadSpec(after=kp.LayerNorm(True)), csr(2, 4), ["LayerNorm(affine=True", "`after`"]),
    "identity remainder": (
        kp.HeadSpec(kp.Identity(), kp.Dense(), kp.IdentityRemainder()),
        csr(2, 4),
        ["IdentityRemainder", "LinearRemainder", "x.to_dense()"],
    ),
    "remainder with before": (
        kp.HeadSpec(kp.Identity(), kp.Dense(), kp.LinearRemainder("silu")),
        csr(2, 4),
        ["SiLU", "without `before`", "x.to_dense()"],
    ),
    "remainder with an expansion": (
        kp.HeadSpec(kp.Identity(), kp.Dense(), kp.ExpansionRemainder(kp.Chebyshev(2))),
        csr(2, 4),
        ["Chebyshev", "ExpansionRemainder with an expansion for sparse inputs"],
    ),
    "hypernet": (kp.HeadSpec(kp.Taylor(2), kp.HyperNet(4)), csr(2, 4), ["hypernet", "low_rank", "khatri_rao", "dense"]),
}


@pytest.mark.parametrize(("spec", "x", "parts"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(spec: kp.HeadSpec, x: Tensor, parts: list[str]) -> None:
    head = kp.Head(4, 4, spec, seed=0)
    model = kp.Model(kp.ModelSpec((4, 4), kp.LayerSpec((kp.HeadSpec(kp.Identity()), spec))), seed=0)
    for module in (head, model):
        with pytest.raises(kp.DataError) as error:
            module(x)
        for part in parts:
            assert part in str(error.value)


def test_it_is_refused_before_anything_is_computed() -> None:
    """Also where another head of the layer is the one that does not take it, and where κ(x) is there already."""
    first, second = kp.HeadSpec(kp.Identity()), kp.HeadSpec(kp.Identity(), remainder=kp.IdentityRemainder())
    layer = kp.Layer(4, 4, kp.LayerSpec((first, second)), seed=0)
    x = csr(2, 4)
    with WatchSizes() as watch, pytest.raises(kp.DataError, match="IdentityRemainder"):
        layer(x)
    assert watch.largest == 0
    head = kp.Head(4, 4, second, seed=0)
    with pytest.raises(kp.DataError, match="IdentityRemainder"):
        head(x, kp.features.DenseFeatures(x.to_dense()))


def test_a_module_of_columns_takes_dense_inputs() -> None:
    module = kp.ExpansionModule(4, kp.Taylor(2))
    with pytest.raises(kp.DataError, match=r"ExpansionModule: expected dense inputs.*x\.to_dense\(\)"):
        module(csr(2, 4))
    with pytest.raises(kp.DataError, match=r"expected dense inputs"):
        kp.calibrate(module, csr(2, 4))


def test_features_have_no_gradient() -> None:
    x = csr(2, 4)
    with pytest.raises(kp.DataError, match="no gradient"):
        kp.features.SparseFeatures(x.crow_indices(), x.col_indices(), x.values().requires_grad_(), 4)
    with pytest.raises(kp.SpecError, match="expected sparse features"):
        entries_of(kp.features.DenseFeatures(torch.ones(2, 3)))


def test_sparse_batches_cannot_be_mapped_over() -> None:
    x = csr(2, 4)
    matrix = torch.ones(3, 4)

    def call(values: Tensor) -> Tensor:
        return kp.features.SparseFeatures(x.crow_indices(), x.col_indices(), values, 4).matmul(matrix)

    with pytest.raises(kp.SpecError, match="map over the parameters"):
        torch.func.vmap(call)(torch.ones(5, 8))


def test_calibration() -> None:
    """It changes nothing in these expansions, and goes on to the layers that it does change."""
    x = some_zeros(20, 6)
    first = kp.LayerSpec(
        kp.HeadSpec(kp.Extended((kp.Taylor(2), kp.Identity())), kp.LowRank(2), kp.ExpansionRemainder())
    )
    spec = kp.ModelSpec((6, 4, 2), (first, kp.LayerSpec(kp.HeadSpec(kp.BSpline(3)))))
    one, other = (kp.Model(spec, seed=0, dtype=torch.float64) for _ in range(2))
    kp.calibrate(one, x.float().to_sparse_csr())
    kp.calibrate(other, x.float())
    is_same(one.state_dict(), other.state_dict())
    spline = kp.Model(kp.rpn([6, 2], kp.BSpline(3)), seed=0)
    with pytest.raises(kp.DataError, match=r"BSpline.* no sparse inputs.*x\.to_dense\(\)"):
        kp.calibrate(spline, x.float().to_sparse_csr())
    with pytest.raises(kp.DataError, match="must be finite"):
        kp.calibrate(one, (x / 0).nan_to_num(1.0, torch.inf, torch.inf).to_sparse_csr())
    with pytest.raises(kp.DataError, match=r"torch.sparse_coo"):
        kp.calibrate(one, x.to_sparse())


@pytest.mark.parametrize(
    ("expansion", "reconciliation", "words"),
    [
        (kp.Identity(), kp.Dense(), "sparse: columns of ψ gathered, neither κ nor x materialized"),
        (kp.Identity(), kp.LowRank(), "low rank (κ B) Aᵀ; sparse: columns of ψ gathered, neither κ nor x materialized"),
        (kp.Taylor(2), kp.LowRank(), "low rank (κ B) Aᵀ; sparse: products of entries multiplied out, columns"),
        (kp.Taylor(2), kp.KhatriRao(), "product of factors (C u)(B v); sparse: columns of ψ gathered"),
        (kp.Taylor(2), kp.Kronecker(), "mixed product (A u) ⊗ (B v); sparse: columns of ψ gathered"),
        (
            kp.Taylor(2),
            kp.Kronecker(columns=2),
            "(A e) ⊗ (B e) for each entry of sparse κ, neither κ nor ψ materialized",
        ),
        (kp.Extended((kp.Taylor(2), kp.Identity())), kp.LowRank(), "split by columns: low rank"),
    ],
    ids=str,
)
def test_routes_in_words(expansion: kp.Expansion, reconciliation: kp.Reconciliation, words: str) -> None:
    from kapsi.contraction import describe

    head = kp.Head(6, 4, kp.HeadSpec(expansion, reconciliation), seed=0)
    text_of = describe(head.expand(csr(2, 6)), head.weights().merged())
    assert text_of.startswith(words)
    assert describe(head.expand(csr(2, 6).to_dense()), head.weights().merged()) != text_of


# ------------------------------------------------------------------------------------------------ tensors kept by columns


def test_wide_factors_are_kept_column_by_column() -> None:
    head = kp.Head(5, 3, kp.HeadSpec(kp.Taylor(2), kp.LowRank(2)), seed=0)
    assert head.psi["right"].shape == (2, 30)
    assert head.psi.right.shape == (30, 2)
    assert head.psi.right.is_contiguous()
    assert head.psi["right"].data_ptr() == head.psi.right.data_ptr()
    assert head.state_dict()["psi.right"].shape == (30, 2)
    assert "right: (2, 30)" in repr(head.psi)
    several = kp.Head(5, 3, kp.HeadSpec(kp.Taylor(2), kp.KhatriRao(2), channels=4), seed=0)
    assert several.psi["first"].shape == (4, 2, 6)
    assert several.psi.first.shape == (6, 4, 2)
    # The factor of all channels is one without a copy, either way round.
    merged = several.weights().merged()
    assert isinstance(merged, kp.weights.KhatriRaoWeights)
    assert merged.first.data_ptr() == several.psi.first.data_ptr()
    assert merged.first.mT.is_contiguous()
    assert {
        name
        for name, tensor in kp.Head(5, 3, kp.HeadSpec(kp.Taylor(2), kp.RandomAdaption(2))).psi.named_buffers()
        if tensor.shape[0] == 30
    } == {"right"}


def test_it_is_drawn_and_assigned_as_it_is_declared() -> None:
    plain, kept = ({"a": kp.Param((2, 3), 1.0, transposed=flag)} for flag in (False, True))
    for channels in (None, 4):
        stores = [kp.Store(params, channels) for params in (plain, kept)]
        for store in stores:
            store.reset(torch.Generator().manual_seed(0))
        assert torch.equal(stores[0]["a"], stores[1]["a"])
        stores[1].assign({"a": [[1, 2, 3], [4, 5, 6]]})
        assert torch.equal(stores[1]["a"].flatten(0, -2)[-2:], torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
        with pytest.raises(kp.SpecError, match=r"expected shape .*2, 3\), got \(3, 2\)"):
            stores[1].assign({"a": torch.ones(3, 2)})
    three = kp.Store({"a": kp.Param((2, 3, 5), transposed=True)})
    assert three.get_parameter("a").shape == (5, 2, 3)
    assert three["a"].shape == (2, 3, 5)
    for shape in ((), (3,)):
        with pytest.raises(kp.SpecError, match="at least two axes"):
            kp.Param(shape, transposed=True)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("reconciliation", [kp.LowRank(2), kp.KhatriRao(2), kp.RandomAdaption(2)], ids=str)
def test_it_is_saved_copied_and_assigned(reconciliation: kp.Reconciliation, channels: int, tmp_path: Path) -> None:
    spec = kp.HeadSpec(kp.Taylor(2), reconciliation, channels=channels)
    model = kp.Model(kp.ModelSpec((5, 3), kp.LayerSpec(spec)), seed=0)
    x = some_zeros(4, 5).float()
    kp.save(model, tmp_path / "m.safetensors")
    blank = kp.Model(model.spec, device="meta")
    blank.load_state_dict(model.state_dict(), assign=True)
    other = kp.Model(model.spec, seed=1)
    other.load_state_dict(model.state_dict())
    by_hand = kp.Model(model.spec, seed=2)
    source = model.layers[0].heads[0].psi
    by_hand.layers[0].heads[0].assign("reconciliation", **{name: source[name].detach() for name in source.names()})
    copies = (
        kp.load(tmp_path / "m.safetensors"),
        pickle.loads(pickle.dumps(model)),  # noqa: S301
        copy.deepcopy(model),
        blank,
        other,
    )
    for same in (*copies, by_hand):
        assert torch.equal(same(x), model(x))
        assert torch.equal(same(x.to_sparse_csr()), model(x.to_sparse_csr()))


def test_it_is_carried_over_to_a_finer_grid() -> None:
    x = inputs(20, 3) / 3
    for reconciliation in (kp.LowRank(2), kp.KhatriRao(2), kp.RandomAdaption(2)):
        head = kp.HeadSpec(kp.BSpline(3), reconciliation, channels=2)
        model = kp.Model(kp.ModelSpec((3, 2), kp.LayerSpec(head)), seed=0, dtype=torch.float64)
        finer = kp.refine(model, 6)
        is_same(finer(x), model(x))
        assert all(tensor.is_contiguous() for tensor in finer.state_dict().values())
