"""Laws of pairs of an expansion and a reconciliation."""

# The first line of a law's docstring is the law: a statement, not a command.
# ruff: noqa: D401

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.contraction import Route, contract, contract_sum
from kapsi.errors import SpecError
from kapsi.expansion import Expansion
from kapsi.expansion.base import clamp_to_domain, rms
from kapsi.features import DenseFeatures, RecomputedFeatures
from kapsi.function import flatten
from kapsi.modules import Head
from kapsi.process import InstanceNorm, LayerNorm, Process
from kapsi.reconciliation import Reconciliation
from kapsi.spec import HeadSpec
from kapsi.testing.cases import (
    assert_close,
    features_of,
    fits,
    functional,
    gradients_of,
    inputs,
    require,
    seeded,
)
from kapsi.testing.registry import law
from kapsi.testing.sizes import WatchSizes
from kapsi.weights import ActingWeights


def _pair_heads(
    expansion: Expansion, reconciliation: Reconciliation, after: tuple[Process, ...] = ()
) -> Iterator[Head]:
    count = 0
    for n in (4, 6):
        for channels in (1, 3):
            spec = HeadSpec(expansion, reconciliation, channels=channels, after=after)
            try:
                yield Head(3, n, spec, seed=n + channels, dtype=torch.float64).eval()
            except SpecError:
                continue  # sizes that do not divide 4 or 6 outputs
            count += 1
    require(count > 0, "neither 4 nor 6 outputs are possible with 3 inputs")


def _contracts(head: Head, dense: Tensor, x: Tensor, tolerance: float, routes: Sequence[Route] = ()) -> None:
    leaves = [x, *head.parameters()]
    features, weights = head.expand(x), head.weights()
    expected = torch.einsum("...d,cnd->...cn", dense, weights.dense())
    products = {
        "contract": (contract(features, weights), False),
        "contract_sum": (contract_sum(features, weights), True),
        "the head": (head(x), True),
        **{f"contract, route {r}": (contract(features, weights, route=r), False) for r in routes},
        **{f"the head, route {r}": (head(x, route=r), True) for r in routes},
    }
    references = (expected, expected.sum(-2))
    gradients = [gradients_of(reference, leaves, retain_graph=True) for reference in references]
    for label, (product, summed) in products.items():
        reference, theirs = references[summed], gradients[summed]
        case = f"{label}, {head.out_features} outputs, {head.spec.channels} channels, inputs {tuple(x.shape)}"
        assert_close(product, reference, case, tolerance)
        for ours, other in zip(gradients_of(product, leaves, retain_graph=True), theirs, strict=True):
            assert_close(ours, other, f"gradient of {case}", tolerance)


@law("pair", "expansion", "reconciliation")
def contraction(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """The contraction equals the product of the dense forms in value and gradient, on every route."""
    routes: dict[tuple[int, ...], tuple[Route, ...]] = {(5,): ("dense", "structured"), (2, 3): ()}
    for head in _pair_heads(expansion, reconciliation):
        for lead, chosen in routes.items():
            x = inputs(*lead, 3).requires_grad_()
            _contracts(head, expansion(x, head.kappa).dense(), x, 1e-10, chosen)


@law("pair", "expansion", "reconciliation")
def folded_layer_norm(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """A layer norm folded into the contraction equals the layer norm of the dense κ(x)."""
    for head in _pair_heads(expansion, reconciliation, (LayerNorm(),)):
        x = inputs(5, 3).requires_grad_()
        dense = expansion(x, head.kappa).dense()
        # Folded, the variance is a difference of two means and loses digits for nearly constant κ.
        _contracts(head, F.layer_norm(dense, dense.shape[-1:], eps=1e-5), x, 1e-8)


@law("pair", "expansion", "reconciliation")
def pair_gradients(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """First and second derivatives of a head agree with finite differences along random directions."""
    n = next(n for n in (4, 6) if fits(reconciliation, n, expansion.factors(3)))
    for channels in (1, 2):
        spec = HeadSpec(expansion, reconciliation, channels=channels, bias=True)
        call, values = functional(Head(3, n, spec, seed=0, dtype=torch.float64).eval())
        arguments = (inputs(2, 3).requires_grad_(), *values)
        torch.autograd.gradcheck(call, arguments, fast_mode=True, atol=1e-4)
        torch.autograd.gradgradcheck(call, arguments, fast_mode=True, atol=1e-4)


@law("pair", "expansion", "reconciliation")
def sizes(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """With structure in κ or ψ, no tensor reaches the size of κ(x), B·D, or ψ(w), n·D, forward or backward.

    A ψ with n·D parameters is only checked against B·D: gradients are as large as the parameters.
    """
    features = features_of(expansion)
    if isinstance(features, DenseFeatures) and expansion.name != "identity":
        return  # contracted like the identity
    if expansion.out_features(64) == expansion.out_features(128):
        return  # columns that do not grow with the inputs
    # Recomputed features are materialized as a whole in each pass.
    structured = not isinstance(features, DenseFeatures | RecomputedFeatures)
    # Enough columns for the widest factor of κ to exceed the ranks and channels of all examples of ψ.
    wanted, batch, target = (4000, 128, 120) if structured else (300, 1, 400)
    m = next(m for m in itertools.count(1) if expansion.out_features(m) >= wanted)
    width, factors = expansion.out_features(m), expansion.factors(m)
    # Numbers of outputs accepted by ψ; the nearest to the target is used.
    fitting = [n for n in range(2, 2 * target) if fits(reconciliation, n, factors)]
    if not fitting:
        return  # an eye: the outputs are the columns of κ
    n = min(fitting, key=lambda n: abs(n - target))
    limits = {"B·D": batch * width} if structured else {}
    if any(param.numel >= n * width for _, param in flatten(reconciliation.params(n, factors))):
        # All entries of ψ exist, as parameters or under a mask. A product κ is contracted factor by factor only with fewer
        # outputs than columns of either factor; with more, κ itself is the smallest array.
        n = 4
    else:
        limits["n·D"] = n * width
    if not limits:
        return
    for channels, after in itertools.product((1, 3), ((), (LayerNorm(),))):
        head = Head(m, n, HeadSpec(expansion, reconciliation, channels=channels, after=after), seed=0).eval()
        if isinstance(head.weights(), ActingWeights):
            return  # works in blocks larger than the whole of a small case
        x = inputs(batch, m, dtype=torch.float32).requires_grad_()
        with WatchSizes(x, *head.parameters(), *head.buffers()) as watch:
            gradients_of(head(x), [x, *head.parameters()])
        for label, size in limits.items():
            violation = f"{watch.operation} makes {watch.largest:,} elements, {label} is {size:,}"
            require(watch.largest < size, f"{channels} channels, after={after}, {m} → {n}, {batch} rows: {violation}")


@law("pair", "expansion", "reconciliation")
def initial_scale(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """Outputs have a standard deviation of ⅓ to 3 for standard normal inputs at initial values.

    With 8 inputs and outputs the median over seeds counts; with one input and output all seeds are pooled, since a single
    function of one input may be nearly constant. For heavy-tailed expansions inputs are clamped to the domain, and the
    middle half of the outputs counts.
    """
    if not any(param.trainable for _, param in flatten(reconciliation.params(4, (1, 4)))):
        return
    for channels in (1, 3):
        head = Head(8, 8, HeadSpec(expansion, reconciliation, channels=channels), seed=0).eval()
        deviations = []
        for seed in range(7):
            head.reset_parameters(seed)
            with torch.no_grad():
                x = clamp_to_domain(expansion, torch.randn(1024, 8, generator=seeded(1000 + seed)))
                y = head(x)
                deviations.append(rms(expansion, y - y.mean()))
        middle = sorted(deviations)[len(deviations) // 2]
        require(1 / 3 <= middle <= 3, f"8 → 8, {channels} channels: the standard deviation is {middle:.3g}")
    if any(isinstance(step, LayerNorm | InstanceNorm) for step in expansion.inner_processes()):
        return  # refused for one feature
    head = Head(1, 1, HeadSpec(expansion, reconciliation), seed=0).eval()
    if not any(parameter.numel() for parameter in head.psi.parameters()):
        return  # a fraction of a single entry may be zero
    outputs = []
    for seed in range(15):
        head.reset_parameters(seed)
        with torch.no_grad():
            x = clamp_to_domain(expansion, torch.randn(1024, 1, generator=seeded(2000 + seed)))
            outputs.append(head(x))
    pooled = rms(expansion, torch.cat(outputs))
    require(1 / 3 <= pooled <= 3, f"1 → 1: the standard deviation is {pooled:.3g}")
