"""What `kp.explain` says of a model: sizes, routes, and the memory of a forward pass."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kapsi as kp
from kapsi.expansion import spline_uniform
from kapsi.explain import _Work

SPECS = {
    "dense": kp.rpn([4, 3], kp.Taylor(2)),
    "channels": kp.rpn([4, 6], kp.Taylor(2), kp.Kronecker(), channels=3),
    "low rank": kp.rpn([4, 3], kp.BSpline(), kp.LowRank(2), bias=True),
    "remainder": kp.rpn([4, 3], remainder=kp.LinearRemainder(bias=True)),
    "constant": kp.rpn([4, 3], reconciliation=kp.ConstantReconciliation()),
    "norm": kp.rpn([4, 3], kp.Taylor(2), after="layer_norm"),
    "batch norm": kp.rpn([4, 3], kp.Taylor(2), before="batch_norm"),
    "deep": kp.rpn([4, 5, 6, 2], kp.Chebyshev(3), heads=2, output="tanh"),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_sizes_and_parameters_are_those_of_the_model(spec):
    model = kp.Model(spec, seed=0)
    reports = kp.explain(model)
    assert [report.name for report in reports] == [name for name, _ in model.heads()]
    for report, (_, head) in zip(reports, model.heads(), strict=True):
        x = torch.ones(2, head.in_features)
        assert (report.in_features, report.out_features) == (head.in_features, head.out_features)
        assert report.columns == head.expand(x).dense().shape[-1]
        assert report.parameters == sum(p.numel() for p in head.parameters())
    assert sum(report.parameters for report in reports) == sum(p.numel() for p in model.parameters())


@pytest.fixture(autouse=True)
def no_known_ranges(monkeypatch):
    """Every test computes ranges of splines anew."""
    monkeypatch.setattr(spline_uniform, "_RANGES", {})


class Allocations(TorchDispatchMode):
    """Counts the bytes of new storages of real tensors, by their addresses, while they are all kept alive.

    Copies of ranges of splines are not counted: they serve later passes.
    """

    def __init__(self, known):
        super().__init__()
        self.kept = {tensor.untyped_storage().data_ptr(): tensor for tensor in known}
        self.given = set(self.kept)
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                copied = func is torch.ops.aten.clone.default and args[0].untyped_storage().data_ptr() in self.given
                if tensor.untyped_storage().data_ptr() not in self.kept and not copied:
                    self.bytes += tensor.untyped_storage().nbytes()
                self.kept[tensor.untyped_storage().data_ptr()] = tensor
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["dense", "channels", "low rank", "remainder", "norm"])
def test_bytes_are_those_that_a_forward_pass_allocates(name, dtype):
    model = kp.Model(SPECS[name], seed=0, dtype=dtype).eval()
    x = torch.ones(50, 4, dtype=dtype)
    with torch.no_grad(), Allocations([x, *model.parameters(), *model.buffers()]) as seen:
        model.layers[0].heads[0](x)
    (report,) = kp.explain(model, 50)
    assert report.bytes == seen.bytes > 0
    assert report.largest * x.element_size() <= report.bytes
    assert report.largest >= 50 * 3


def layer_of(*heads, fusion=None, widths=(4, 6)):
    return kp.Model(kp.ModelSpec(widths, (kp.LayerSpec(heads, fusion or kp.Sum()),)), seed=0)


LOW, MIXED = kp.HeadSpec(kp.Taylor(2), kp.LowRank(2), bias=True), kp.Extended((kp.Taylor(2), kp.BSpline()))


@pytest.mark.parametrize(
    ("heads", "groups"),
    [
        ((LOW, kp.HeadSpec(kp.Taylor(2), kp.Kronecker())), 2),  # κ is shared
        ((LOW,) * 3, 1),
        ((kp.HeadSpec(kp.BSpline()), LOW, LOW, kp.HeadSpec(), LOW), 3),
        ((kp.HeadSpec(kp.BSpline(), remainder=kp.LinearRemainder()),) * 2, 1),
        ((kp.HeadSpec(MIXED, kp.DualLowRankKronecker(), channels=3, after=("layer_norm",)),) * 3, 1),
    ],
    ids=["shared", "together", "both", "dense", "mixed"],
)
def test_heads_add_up_to_their_layer(heads, groups):
    model = layer_of(*heads)
    x = torch.ones(50, 4)
    with torch.no_grad(), Allocations([x, *model.parameters(), *model.buffers()]) as seen:
        model(x)
    reports = kp.explain(model, 50)
    fused = (groups - 1) * 50 * 6 * 4  # the sum of what the groups give
    assert sum(report.bytes for report in reports) + fused == seen.bytes
    assert sum(report.largest > 0 for report in reports) == groups


def test_heads_that_are_contracted_together_say_so():
    model = layer_of(kp.HeadSpec(), LOW, LOW, LOW)
    first, *others = kp.explain(model, 50)[1:]
    assert first.route == "3 heads fused: low rank (κ B) Aᵀ, ψ not materialized"
    for report in others:
        assert report.route == "fused with layers.0.heads.1"
        assert (report.bytes, report.largest, report.shape, report.operations) == (0, 0, (), 0)
        assert report.parameters == first.parameters
    model.layers[0].heads[2].register_forward_hook(lambda *_: None)
    apart = kp.explain(model, 50)[1:]
    assert {report.route for report in apart} == {"low rank (κ B) Aᵀ, neither κ nor ψ materialized"}
    assert apart[1].operations == apart[2].operations > 0
    assert apart[0].operations > apart[1].operations  # κ is made by the first


def test_operations_are_those_of_the_formulas():
    def operations(*args, **options):
        (report,) = kp.explain(kp.Model(kp.rpn([4, 3], *args, **options), device="meta"), 10)
        return report.operations

    assert operations() == 2 * 10 * 4 * 3
    assert operations(bias=True) == 2 * 10 * 4 * 3  # of one matrix product, as is usual
    assert operations(kp.Identity(), kp.LowRank(2)) == 2 * 10 * 4 * 2 + 2 * 10 * 2 * 3
    assert operations(before="relu") == 10 * 4 + 2 * 10 * 4 * 3
    # [1, x]: a column of ones and the whole; (A u) (B v) for Khatri–Rao
    made = 10 + 10 * 5
    assert operations(kp.Taylor(2), kp.KhatriRao(2)) == made + 2 * 10 * (5 + 4) * 2 + 10 * 2 + 2 * 10 * 2 * 3


def test_products_that_are_added_in_place_count():
    # 64 rows of 301 columns of the inputs and pairs of 300: a product in some blocks, the others added in place.
    spec = kp.rpn([300, 16], kp.Taylor(2, symmetric=True))
    (report,) = kp.explain(kp.Model(spec, device="meta"), 64)
    (formed,) = kp.explain(kp.Model(spec, device="meta"), 64, route="dense")
    product = 2 * 64 * report.columns * 16
    assert product < report.operations < product + 4 * 64 * report.columns
    assert product < formed.operations


def test_operations_in_place_count_and_allocations_do_not():
    # The splines are made in place: more is done than is made.
    (report,) = kp.explain(kp.Model(kp.rpn([4, 3], kp.BSpline()), device="meta"), 10)
    assert report.bytes // 4 < report.operations - 2 * 10 * report.columns * 3
    work = _Work([])
    with work:
        x = torch.empty(10, 4, device="meta")
        x.view(-1, 4).mul_(2).add_(1)
        x.new_empty(5)
        x[:, :2].t() + 1
    assert work.operations == 40 + 40 + 20
    assert (work.bytes, work.largest, work.shape) == (4 * (40 + 5 + 20), 40, (10, 4))


@pytest.mark.parametrize("expansion", [kp.Taylor(2), kp.Chebyshev(3)], ids=lambda e: e.name)
@pytest.mark.parametrize("after", [(), ("layer_norm",)], ids=["plain", "layer_norm"])
def test_operations_of_a_hypernet_are_those_of_all_blocks(expansion, after, monkeypatch):
    spec = kp.rpn([100, 8], expansion, kp.HyperNet(64), channels=2, after=after)
    found = []
    for block in (2**17, 2**24):  # several blocks, and one
        monkeypatch.setattr("kapsi.reconciliation.hypernet.BLOCK", block)
        (report,) = kp.explain(kp.Model(spec, device="meta"), 50)
        found.append(report.operations)
    assert found[0] == pytest.approx(found[1], rel=0.2)  # the tables of each block come on top
    width = expansion.out_features(100)
    assert found[1] > 2 * 2 * 50 * 8 * width  # κ times a block, for each channel


def test_routes_are_explained():
    model = kp.Model(kp.rpn([50, 3], kp.Taylor(2), kp.LowRank(200), after="layer_norm"), device="meta")
    reports = {route: kp.explain(model, 64, route=route)[0] for route in (None, "dense", "structured")}
    columns = 51 * 50
    assert reports[None].route.endswith("low rank (κ B) Aᵀ, ψ not materialized")
    assert reports[None].shape == (64, 51, 50)
    assert reports["dense"].route == "dense: κ and ψ materialized, one matrix product"
    assert reports["structured"].route.endswith("low rank (κ B) Aᵀ, neither κ nor ψ materialized")
    assert (
        reports["structured"].largest < reports["structured"].columns * 64 * 200
    )  # B × 200 × 50, one factor at a time
    for report in reports.values():
        assert report.largest == math.prod(report.shape)
    assert reports["dense"].operations > 2 * 200 * 3 * columns + 2 * 64 * columns * 3


def test_a_head_that_fits_into_no_memory_is_explained():
    model = kp.Model(kp.rpn([26_965, 2], kp.Taylor(2), kp.LowRank(2)), device="meta")
    (report,) = kp.explain(model, 1)
    assert report.parameters > 2**30
    assert report.operations > 2 * report.parameters


def test_the_route_says_whether_the_weights_are_formed():
    def route(expansion, reconciliation):
        return kp.explain(kp.Model(kp.rpn([64, 32], expansion, reconciliation), device="meta"))[0]

    structured, formed = route(kp.Taylor(2), kp.Kronecker()), route(kp.Taylor(2), kp.Dense())
    assert structured.route == "mixed product (A u) ⊗ (B v), neither κ nor ψ materialized"
    assert "low rank" in route(kp.Taylor(2), kp.LowRank(2)).route
    assert "constant" in route(kp.Taylor(2), kp.ConstantReconciliation()).route
    assert formed.route.startswith("dense")
    assert structured.columns == formed.columns == 64 + 64**2
    assert structured.bytes < formed.bytes / 2
    assert structured.largest < 64 * 32 * 65 == formed.largest


@pytest.mark.parametrize("after", [(), ("layer_norm",)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("rank", "text"), [(4, "neither κ nor ψ materialized"), (200, "ψ not materialized")])
def test_a_rank_too_large_for_the_factors_forms_the_expansion_and_says_so(rank, text, channels, after):
    spec = kp.rpn([50, 3], kp.Taylor(2), kp.LowRank(rank), channels=channels, after=after)
    (report,) = kp.explain(kp.Model(spec, device="meta"), 64)
    assert report.route.endswith(f"low rank (κ B) Aᵀ, {text}")
    assert (report.largest >= 64 * report.columns) == (rank == 200)


def test_khatri_rao_on_a_grid_of_one_row_is_a_low_rank():
    kappa = kp.Extended((kp.Taylor(2), kp.BSpline()))
    (report,) = kp.explain(kp.Model(kp.rpn([50, 3], kappa, kp.KhatriRao(4)), device="meta"))
    first, second = "low rank (κ B) Aᵀ, neither κ nor ψ materialized", "low rank (κ B) Aᵀ, ψ not materialized"
    assert report.route == f"split by columns: {first} + {second}"


def test_a_hypernet_takes_the_memory_of_one_block_and_no_time():
    # 729 million columns: tens of thousands of blocks, of which all are alike.
    (report,) = kp.explain(kp.Model(kp.rpn([27_000, 10], kp.Taylor(2), kp.HyperNet(16)), device="meta"), 8)
    assert report.columns == 27_000 * 27_001
    assert report.bytes < 2**26


def test_memory_grows_with_the_batch():
    model = kp.Model(SPECS["dense"], seed=0)
    bytes_of = [kp.explain(model, batch)[0].bytes for batch in (0, 100, 200, 400)]
    assert bytes_of[3] - bytes_of[2] == 2 * (bytes_of[2] - bytes_of[1]) > 0
    assert bytes_of[0] < bytes_of[1]


def test_nothing_is_computed_or_changed():
    huge = kp.Model(kp.rpn([2000, 2000], kp.Taylor(2), kp.LowRank(2)), device="meta")
    assert kp.explain(huge, 10**6)[0].bytes > 10**9
    model = kp.Model(SPECS["batch norm"], seed=0).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    kp.explain(model)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("batch", [-1, 1.5, True, "64", None])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(kp.SpecError, match="expected an integer of at least 0"):
        kp.explain(kp.Model(SPECS["dense"]), batch)


@pytest.mark.parametrize("batch", [2**61, 2**62, 10**30])
def test_a_batch_beyond_any_machine_is_refused(batch):
    with pytest.raises(kp.SpecError, match="use fewer") as caught:
        kp.explain(kp.Model(SPECS["dense"]), batch)
    assert "\n" not in str(caught.value)
    assert math.log2(batch) > 60


@pytest.mark.parametrize(
    "psi",
    [
        kp.DualLowRankKronecker(5, columns=784),
        kp.LowRankKronecker(2, rows=4, columns=784),
        kp.Kronecker(columns=784, terms=2),
        kp.Duplicated(rows=8, columns=784),
    ],
    ids=lambda psi: psi.name,
)
def test_a_grid_beside_that_of_kappa_gets_a_hint_with_the_ratio_of_operations(psi):
    def report(reconciliation):
        return kp.explain(kp.Model(kp.rpn([784, 64], kp.Taylor(2), reconciliation), device="meta"), 64)[0]

    found, own = report(psi), report(dataclasses.replace(psi, columns=785))
    assert own.hint == ""
    ratio = found.operations / own.operations
    assert ratio > 100
    assert f"columns=785, the grid 785 × 784 of κ, would need {ratio:,.0f} times fewer operations" in found.hint
    assert report(dataclasses.replace(psi, columns=None)).hint == ""


def test_a_grid_that_costs_no_more_gets_no_hint():
    # The columns of a spline are no product: no grid is far cheaper than others.
    for kappa, psi in (
        (kp.BSpline(), kp.Kronecker(columns=4)),
        (kp.Taylor(2), kp.LowRank(2)),
        (kp.Taylor(2), kp.Kronecker()),
    ):
        (report,) = kp.explain(kp.Model(kp.rpn([64, 32], kappa, psi), device="meta"), 64)
        assert report.hint == ""
    model = kp.Model(kp.rpn([784, 64], kp.Taylor(2), kp.Kronecker(columns=784)), device="meta")
    assert kp.explain(model, 64, route="dense")[0].hint == ""
    assert kp.explain(model, 0)[0].hint == ""
