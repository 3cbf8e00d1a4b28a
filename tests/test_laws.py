"""The laws of `kapsi.testing` over all registered functions, and what only some pairs and whole models promise."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kapsi as kp
from kapsi.function import ALIASES, ROLES, catalogue
from kapsi.notation import short_form
from kapsi.spec import to_dict
from kapsi.testing import (
    LAWS,
    WatchSizes,
    check,
    check_pairs,
    examples_of,
    has_structure,
    inputs,
    instances,
    model_with,
    pair_matters,
)
from kapsi.testing.cases import LAYER_ROLES, features_of

FIRST = {examples_of(cls)[0] for cls in catalogue()}


# Laws that take longest, and that the options of a function hardly touch: further examples are asked on demand.
LONG = {"calibrated", "dtypes", "gradients", "normalized_by_hook", "options_crossed", "parametrized", "pruned"} | {
    "second_derivatives"
}


def extent(*functions: Any, law: str = "") -> Any:
    """Mark what a quick selection leaves out: all examples of a function but its first."""
    if FIRST.issuperset(functions):
        return ()
    return pytest.mark.slow if law in LONG else pytest.mark.thorough


SINGLE = [
    pytest.param(
        law, function, id=f"{law.name}-{function.role}-{short_form(function)}", marks=extent(function, law=law.name)
    )
    for law in LAWS.values()
    if law.over == "function"
    for function in instances()
    if law.applies(function)
]


def kinds(functions: list[Any]) -> list[Any]:
    """Return the first example, and of expansions the first that makes features of another kind."""
    found = {
        type(features_of(function)) if function.role == "expansion" else None: function for function in functions[::-1]
    }
    return [function for function in functions if function in found.values()]


def distinct(expansion: Any) -> bool:
    """Return whether κ(x) is contracted in its own way, or stands for all that are contracted as an array."""
    return has_structure(expansion) or expansion.name == "identity"


def class_cases() -> Iterator[Any]:
    """Yield the laws that take seconds for an example: of a family one example of its first class.

    An expansion that makes an array of its values is compiled like any other, so of those one is. On demand there are also an
    example of each kind of features of all classes, and all examples of the first class of a family.
    """
    seen: set[tuple[str, str]] = set()
    for law, cls in itertools.product(LAWS.values(), catalogue()):
        if law.over != "class" or not law.applies(cls) or cls.role == "process":
            continue
        every = examples_of(cls)
        family = (law.name, cls.__module__)
        first = family not in seen
        seen.add(family)
        name = f"{law.name}-{cls.role}-{cls.name}"
        if first and (law.name == "exports" or cls.role != "expansion" or distinct(every[0])):
            yield pytest.param(law, every[:1], id=name, marks=pytest.mark.thorough)
        further = every if first else kinds(every)
        yield pytest.param(law, further, id=f"{name}-further", marks=pytest.mark.slow)


CLASSES = list(class_cases())

# An expansion that makes an array of its values is contracted like any other: of those each has this many ψ, in turn, so
# that each ψ has several of them. All with all are asked on demand.
TURNS = 2


def pairing(law: Any, expansion: Any, reconciliation: Any, turn: int) -> Any:
    """Mark pairs with a further example, which only the law of the product itself is always asked for; of two, none."""
    if extent(expansion, reconciliation):
        if extent(expansion) and extent(reconciliation):
            return pytest.mark.slow
        return pytest.mark.thorough if law.name == "contraction" else pytest.mark.slow
    if turn >= TURNS and not distinct(expansion):
        return pytest.mark.slow
    return pytest.mark.thorough if law.name == "pair_gradients" else ()


def pairs() -> Iterator[tuple[Any, Any, int]]:
    """Yield κ, ψ, and how far the class of ψ is from the one whose turn it is."""
    kappas, psis = catalogue("expansion"), catalogue("reconciliation")
    for expansion, reconciliation in itertools.product(instances("expansion"), instances("reconciliation")):
        if pair_matters(expansion, reconciliation):
            turn = psis.index(type(reconciliation)) - kappas.index(type(expansion))
            yield expansion, reconciliation, turn % len(psis)


PAIRS = [
    pytest.param(
        law,
        expansion,
        reconciliation,
        id=f"{law.name}-{short_form(expansion)}-{short_form(reconciliation)}",
        marks=pairing(law, expansion, reconciliation, turn),
    )
    for expansion, reconciliation, turn in pairs()
    for law in LAWS.values()
    if law.over == "pair" and (law.name != "sizes" or distinct(expansion))  # the law says nothing of others
]


@pytest.mark.parametrize(("law", "function"), SINGLE)
def test_function(law, function) -> None:
    law(function)


@pytest.mark.parametrize(("law", "examples"), CLASSES)
def test_class(law, examples) -> None:
    law(*examples)


# One model with all of them: they are many, small and alike.
@pytest.mark.parametrize("law", [law for law in LAWS.values() if law.over == "class"], ids=lambda law: law.name)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
def test_processes_at_once(law, every) -> None:
    processes = instances("process")
    law(*(processes if every else processes[::5]))


@pytest.mark.parametrize(("law", "expansion", "reconciliation"), PAIRS)
def test_pair(law, expansion, reconciliation) -> None:
    law(expansion, reconciliation)


# ------------------------------------------------------------------------------------------------ sizes


def largest_made(head: kp.Head, batch: int) -> tuple[int, str]:
    """Return the elements of the largest tensor made in forward and backward, gradients of the parameters left out."""
    x = torch.randn(batch, head.in_features, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with WatchSizes(x, *head.parameters(), *head.buffers()) as watch:
        y = head(x)
        torch.autograd.grad(y.sum(), [x, *head.parameters()])
    return watch.largest, watch.operation


SYMMETRIC = kp.Taylor(2, symmetric=True)
MIXED = kp.Extended((kp.Taylor(2), kp.Identity()))
# Beyond the law `sizes`, which has the examples of the registry:
# κ, ψ, the sizes that must not be made, (batch, m, n). D is 600 for Taylor(2) of 24 inputs, so B·D = 24,000, n·D = 21,600.
WIDE, TALL = (40, 24, 36), (1, 6, 4000)
STRUCTURED = [
    (kp.Taylor(2), kp.DualLowRankKronecker(rank=1, rows=36), "κψ", WIDE),
    (kp.Taylor(2), kp.Eye(blocks=True), "κψ", (40, 24, 40)),
    (kp.Nested((kp.Identity(), kp.Taylor(2))), kp.LowRank(3), "κψ", WIDE),
    (MIXED, kp.Kronecker(rows=12, columns=1, terms=2), "κψ", WIDE),
    (MIXED, kp.Eye(blocks=True), "κψ", (40, 24, 48)),
    *[
        (kappa, psi, "ψ", TALL)
        for kappa in (kp.Chebyshev(4), kp.BSpline(), kp.BSpline(extrapolation="extended"), SYMMETRIC)
        for psi in (
            kp.Kronecker(),
            kp.LowRankKronecker(terms=2),
            kp.DualLowRankKronecker(),
            kp.Duplicated(),
            kp.LowRank(1),
            kp.KhatriRao(1),
            kp.RandomAdaption(1),
            kp.ConstantReconciliation(),
        )
    ],
]


@pytest.mark.parametrize("after", [(), ("layer_norm",)], ids=["plain", "layer_norm"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("expansion", "reconciliation", "unmade", "sizes"),
    [pytest.param(*case, id=f"{short_form(case[0])}-{short_form(case[1])}") for case in STRUCTURED],
)
def test_nothing_of_the_size_of_the_dense_form_is_made(
    expansion, reconciliation, unmade, sizes, channels, after
) -> None:
    batch, m, n = sizes
    head = kp.Head(m, n, kp.HeadSpec(expansion, reconciliation, channels=channels, after=after), seed=0)
    columns = expansion.out_features(m)
    limit = min([batch * columns] * ("κ" in unmade) + [n * columns] * ("ψ" in unmade))
    largest, operation = largest_made(head, batch)
    assert largest < limit, f"{operation} makes {largest:,} elements; B·D = {batch * columns:,}, n·D = {n * columns:,}"


def test_watch_sees_a_formed_expansion() -> None:
    # Without structure κ(x) is made, so a watch that saw nothing would fail here.
    largest, _ = largest_made(kp.Head(24, 2, kp.HeadSpec(SYMMETRIC)), 40)
    assert largest >= 40 * SYMMETRIC.out_features(24)


def test_watch_sees_the_backward_pass() -> None:
    x = torch.ones(30, requires_grad=True)
    y = torch.ones(30).outer(x).sum(0).square()
    with WatchSizes(x) as watch:
        torch.autograd.grad(y.sum(), x)
    assert watch.largest == 900
    with WatchSizes(x) as watch:
        x.detach().expand(1000, 30)
    assert watch.largest == 0  # a view of what was there


@pytest.mark.parametrize(
    "grids", [[(6, 5)], [(5, 6)], [(1, 12)], [(7, 1)], [(4, 3), 6], [5, (3, 5), (2, 2), 12]], ids=str
)
def test_sums_of_blocks_are_those_of_the_columns_however_they_lie(grids) -> None:
    parts = []
    for i, grid in enumerate(grids):
        if isinstance(grid, int):
            parts.append(kp.features.DenseFeatures(inputs(4, grid, seed=i)))
        else:
            parts.append(kp.features.ProductFeatures(*(inputs(4, size, seed=i + size) for size in grid)))
    features = kp.features.ConcatenatedFeatures(tuple(parts)) if len(parts) > 1 else parts[0]
    for width in (size for size in range(1, features.columns + 1) if features.columns % size == 0):
        ones = kp.weights.ConstantWeights(torch.ones(3, dtype=torch.float64), 1, width)
        eye = kp.weights.EyeWeights(torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64), features.columns // width)
        expected = features.dense().unflatten(-1, (-1, width)).sum(-1).unsqueeze(-2) * eye.value.unsqueeze(-1)
        made = kp.contract(features, kp.weights.KroneckerWeights(eye, ones))
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


def test_large_product_layer_stays_small() -> None:
    head = kp.Head(784, 64, kp.HeadSpec(kp.Taylor(2), kp.DualLowRankKronecker(rank=5)), seed=0)
    largest, operation = largest_made(head, 64)
    assert largest <= 10**6, f"{operation} makes {largest:,} elements"


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kappa", [kp.Taylor(2), kp.Identity(), MIXED], ids=short_form)
def test_hypernet_makes_neither_expansion_nor_weights(kappa, channels, monkeypatch) -> None:
    # Blocks of 2,048 entries, so that a small case has many of them, in both directions of the grid.
    monkeypatch.setattr("kapsi.reconciliation.hypernet.BLOCK", 2048)
    head = kp.Head(40, 16, kp.HeadSpec(kappa, kp.HyperNet(4), channels=channels), seed=0, dtype=torch.float64)
    batch, columns = 50, kappa.out_features(40)
    x = torch.randn(batch, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    with WatchSizes(x, *head.parameters()) as watch:
        torch.autograd.grad(head(x).sum(), [x, *head.parameters()])
    # A block, its bits, a block of κ; and what is as large as the inputs or the left factor of κ.
    limit = max(3 * 2048, batch * 42)
    assert watch.largest <= limit, f"{watch.operation} makes {watch.largest:,} elements"
    assert limit < min(batch, 16) * columns or kappa == kp.Identity()
    dense = head.expand(x).dense() @ head.weights().dense().sum(0).T
    torch.testing.assert_close(head(x), dense, rtol=1e-10, atol=1e-10)


def test_hypernet_of_the_largest_layer_of_the_paper_works() -> None:
    head = kp.Head(784, 64, kp.HeadSpec(kp.Taylor(2), kp.HyperNet(2)), seed=0)
    assert head.factors[0] * head.factors[1] == 615_440
    largest, operation = largest_made(head, 4)
    assert largest < 4 * 615_440, f"{operation} makes {largest:,} elements; n·D = {64 * 615_440:,}"


# ------------------------------------------------------------------------------------------------ whole models


def three_layers() -> kp.ModelSpec:
    heads = (
        kp.HeadSpec(kp.Taylor(2), kp.DualLowRankKronecker(), kp.LinearRemainder(before="silu"), channels=2),
        kp.HeadSpec(kp.Taylor(2), kp.LowRank(2), after=("layer_norm",)),
        kp.HeadSpec(kp.Taylor(2), kp.Masked(), bias=True),
    )
    middle = (
        kp.HeadSpec(kp.BSpline(4), kp.Kronecker(), before=("tanh",), channels=3),
        kp.HeadSpec(kp.BSpline(4), kp.Dense(), kp.IdentityRemainder(), before=("tanh",)),
        kp.HeadSpec(kp.Extended((kp.Identity(), kp.Chebyshev(3))), kp.LowRank(1), after=("gelu", "batch_norm")),
    )
    last = (kp.HeadSpec(kp.Nested((kp.Chebyshev(2), kp.Taylor(2))), kp.ConstantReconciliation()), kp.HeadSpec())
    return kp.ModelSpec(
        (3, 6, 6, 2),
        (
            kp.LayerSpec(heads, output=("silu", "instance_norm")),
            kp.LayerSpec(middle, kp.WeightedSum(), output=("dropout",)),
            kp.LayerSpec(last, kp.Concatenation()),
        ),
    )


@pytest.mark.slow
def test_model_of_three_layers_compiles_to_one_graph_and_exports() -> None:
    model = kp.Model(three_layers(), seed=0, dtype=torch.float64).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = inputs(5, 3).requires_grad_()
    leaves = [x, *model.parameters()]
    y = compiled(x)
    torch.testing.assert_close(y, model(x), rtol=0, atol=1e-10)
    ours, theirs = (torch.autograd.grad(out.square().sum(), leaves) for out in (y, model(x)))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-9)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x)
    compiled(inputs(7, 3))
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(inputs(11, 3)), model(inputs(11, 3)), rtol=0, atol=1e-10)
    program = torch.export.export(model, (inputs(4, 3),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(inputs(9, 3)), model(inputs(9, 3)), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_model_of_three_layers_compiles_with_inductor() -> None:
    model = kp.Model(three_layers(), seed=0).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    x = inputs(64, 3, dtype=torch.float32)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


CHILD = """
import json, sys, torch, kapsi as kp
torch.set_num_threads(1)
folder = sys.argv[1]
for case in json.load(open(folder + "/cases.json")):
    model = kp.load(f"{folder}/{case}.safetensors").eval()
    x, y = torch.load(f"{folder}/{case}.pt", weights_only=True)
    if not torch.equal(model(x), y):
        sys.exit(f"case {case} differs: {model}")
print("all equal")
"""


# Each example is loaded again in the same process by the law `saved`.
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "every"])
def test_models_are_bit_equal_in_another_process(tmp_path, every) -> None:
    models = [
        model_with(function)
        for function in instances()
        if function.role in LAYER_ROLES and (every or function in FIRST)
    ]
    models += [kp.Model(three_layers(), seed=3).eval()]
    for i, model in enumerate(models):
        x = inputs(7, model.in_features, dtype=torch.float32 if model is models[-1] else torch.float64)
        kp.save(model, tmp_path / f"{i}.safetensors")
        torch.save((x, model(x).detach()), tmp_path / f"{i}.pt")
    (tmp_path / "cases.json").write_text(json.dumps(list(range(len(models)))))
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all equal\n"


# ------------------------------------------------------------------------------------------------ laws catch what breaks them


@pytest.fixture
def registry() -> Iterator[None]:
    """Forget the functions that a test registers."""
    roles = {role: dict(known) for role, known in ROLES.items()}
    aliases = {role: dict(known) for role, known in ALIASES.items()}
    yield
    for role, known in roles.items():
        ROLES[role].clear()
        ROLES[role].update(known)
        ALIASES[role].clear()
        ALIASES[role].update(aliases[role])


def finished(cls: type[Any], methods: dict[str, Any]) -> type[Any]:
    """Replace methods of a class that was made in a function, and put it where pickle looks for it."""
    for name, method in methods.items():
        setattr(cls, name, method)
    cls.__qualname__ = cls.__name__
    globals()[cls.__name__] = cls
    return cls


def expansion_of(call: Callable[..., Any], **methods: Any) -> type[kp.Expansion]:
    """Register an expansion with 3m columns that is right but for what is given."""
    ROLES["expansion"].pop("outside", None)

    @dataclass(frozen=True)
    class Outside(kp.Expansion, name="outside"):
        scale: float = 2.0

        def factors(self, in_features: int) -> tuple[int, int]:
            return 3, in_features

        def __call__(self, x, params):
            return kp.features.DenseFeatures(call(self, x))

    return finished(Outside, methods)


def good(self, x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x.tanh(), (self.scale * x).tanh(), x / (1 + x.square())), -1)


def test_an_outside_expansion_passes_all_laws(registry) -> None:
    outside = expansion_of(good)
    check(outside)
    check_pairs(outside, laws=["contraction", "pair_gradients", "initial_scale", "folded_layer_norm"])
    assert short_form(outside(3.0)) == "outside(scale=3.0)"
    assert outside() in instances("expansion")


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


BROKEN = {
    "leading_shapes": lambda f, x: good(f, x.reshape(-1, x.shape[-1])),
    "input_unchanged": lambda f, x: good(f, x.detach().mul_(1.5) + 0 * x),
    "row_independence": lambda f, x: good(f, x - x.mean(tuple(range(x.dim() - 1)), keepdim=True)),
    "not_a_number": lambda f, x: good(f, x.nan_to_num()),
    "finite": lambda f, x: torch.cat((x, x.exp(), x.square()), -1),
    "dtypes": lambda f, x: good(f, x).float(),
    "meta_device": lambda f, x: good(f, x + float(x.sum() > 1e9)),
    "gradients": lambda f, x: torch.cat((x, x, Wrong.apply(x)), -1),
    "transforms": lambda f, x: torch.cat((x, x, torch.from_numpy(x.detach().numpy()) + 0 * x), -1),
    "columns": lambda f, x: torch.cat((x, x), -1),
    "compiles": lambda f, x: good(f, x * (1 if bool(x.isfinite().all()) else 2)),
    "exports": lambda f, x: good(f, x) if x.shape[0] != 8 else good(f, -x),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_expansion_fails_its_law(registry, name) -> None:
    with pytest.raises(AssertionError, match=rf"^law '{name}' fails for Outside\(scale=2\.0\): "):
        check(expansion_of(BROKEN[name]), laws=[name])


class Off(kp.features.DenseFeatures):
    """Features whose shortcuts are wrong."""

    def total(self):
        return super().total() + 1

    def matmul(self, matrix):
        return super().matmul(matrix) * 1.001


def test_wrong_shortcuts_of_features_fail(registry) -> None:
    outside = expansion_of(good, __call__=lambda self, x, params: Off(good(self, x)))
    with pytest.raises(AssertionError, match=r"law 'features' fails for .*total of κ"):
        check(outside, laws=["features"])
    with pytest.raises(AssertionError, match=r"law 'contraction' fails for .* × "):
        check_pairs(outside, laws=["contraction"])


class Formed(kp.features.ProductFeatures):
    """A product that is multiplied out."""

    def matmul(self, matrix):
        return kp.features.DenseFeatures(self.dense()).matmul(matrix)


def test_a_product_that_is_formed_fails_the_sizes(registry) -> None:
    @dataclass(frozen=True)
    class Outside(kp.Taylor, name="outside"):
        def __call__(self, x, params):
            made = kp.Taylor.__call__(self, x, params)
            return Formed(made.left, made.right)

    Outside.examples = ({},)
    outside = finished(Outside, {})
    check_pairs(outside, laws=["contraction"])
    LAWS["sizes"](outside(), kp.Kronecker())
    for psi in (kp.LowRank(2), kp.Dense()):
        with pytest.raises(AssertionError, match=r"law 'sizes' fails for .* makes .* elements, B·D is "):
            LAWS["sizes"](outside(), psi)


def test_weights_that_are_formed_fail_the_sizes(registry) -> None:
    forming = reconciliation_of(
        params=lambda self, n, factors: kp.LowRank(2).params(n, factors),
        __call__=lambda self, params, n, factors: kp.weights.DenseWeights(params["left"] @ params["right"]),
    )
    for kappa in (kp.Identity(), kp.Taylor(2)):
        with pytest.raises(AssertionError, match=r"law 'sizes' fails for .* elements, .·D is "):
            LAWS["sizes"](kappa, forming())


def test_an_unscaled_expansion_fails_the_initial_scale(registry, monkeypatch) -> None:
    monkeypatch.setattr(kp.Head, "_output_rms", lambda self, like: 1.0)
    outside = expansion_of(lambda f, x: 100 * good(f, x))
    with pytest.raises(AssertionError, match=r"law 'initial_scale' fails for .*the standard deviation is"):
        check_pairs(outside, laws=["initial_scale"])


def reconciliation_of(**methods: Any) -> type[kp.Reconciliation]:
    ROLES["reconciliation"].pop("outside", None)

    @dataclass(frozen=True)
    class OutsideWeights(kp.Reconciliation, name="outside"):
        def params(self, out_features, factors):
            return {"matrix": kp.Param((out_features, factors[0] * factors[1]), 0.1)}

        def __call__(self, params, out_features, factors):
            return kp.weights.DenseWeights(params["matrix"])

    return finished(OutsideWeights, methods)


class OffWeights(kp.weights.DenseWeights):
    def row_sums(self):
        return self.values.sum(-1) + 1


def test_an_outside_reconciliation_passes_and_broken_ones_fail(registry) -> None:
    check(reconciliation_of(), laws=["count", "weights", "plain_data"])
    check_pairs(reconciliation_of(), laws=["contraction", "initial_scale"])
    with pytest.raises(AssertionError, match=r"law 'count' fails for .*count says 1"):
        check(reconciliation_of(count=lambda self, n, factors: 1), laws=["count"])
    wrong = reconciliation_of(__call__=lambda self, params, n, factors: OffWeights(params["matrix"]))
    with pytest.raises(AssertionError, match=r"law 'weights' fails for .*row_sums"):
        check(wrong, laws=["weights"])
    with pytest.raises(AssertionError, match=r"law 'folded_layer_norm' fails for .*OutsideWeights"):
        check_pairs(wrong, laws=["folded_layer_norm"])


@pytest.mark.slow  # some laws compile
def test_an_outside_reconciliation_passes_all_laws(registry) -> None:
    check(reconciliation_of(), laws=[law.name for law in LAWS.values() if law.over == "function"])


def test_a_function_that_forgets_an_option_fails(registry) -> None:
    outside = expansion_of(good)
    original = to_dict(outside(3.0))
    assert original == {"kind": "outside", "scale": 3.0}
    outside.__eq__ = lambda self, other: self is other  # as without a dataclass
    with pytest.raises(AssertionError, match=r"law 'plain_data' fails"):
        check(outside, laws=["plain_data"])


def test_check_refuses_what_it_cannot_check() -> None:
    with pytest.raises(kp.SpecError, match=r"no law is called 'shape'; choose from .*leading_shapes"):
        check(kp.Identity, laws=["shape"])
    with pytest.raises(kp.SpecError, match="expected an expansion or a reconciliation, got the fusion sum"):
        check_pairs(kp.Sum)
