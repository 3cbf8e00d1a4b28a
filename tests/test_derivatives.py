"""Functions with derivatives of their own, in every order of the transforms of torch, against plain operations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import hessian, jacfwd, jacrev, vmap

import kapsi as kp
from kapsi.derivatives import OwnDerivatives
from kapsi.features import RecomputedFeatures
from kapsi.process import LayerNorm
from kapsi.reconciliation.hypernet import GeneratedWeights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

ORDERS = [(outer, inner) for outer in ("fwd", "rev") for inner in ("fwd", "rev")]
MODES: dict[str, Callable[..., Any]] = {"fwd": jacfwd, "rev": jacrev}


class Scaled(OwnDerivatives):
    """xᵖ w, with no rule for vmap but the common one."""

    @staticmethod
    def forward(power: int, x: Tensor, w: Tensor) -> Tensor:
        return x**power * w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.power, *kept = inputs
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        grad_w = x**ctx.power * gradient if ctx.needs_input_grad[2] else None
        return None, ctx.power * x ** (ctx.power - 1) * w * gradient, grad_w

    @staticmethod
    def jvp_rule(ctx: Any, values: Any, *tangents: Any) -> Tensor:
        x, w = values
        _, grad_x, grad_w = tangents
        return ctx.power * x ** (ctx.power - 1) * w * grad_x + x**ctx.power * grad_w


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(x: Tensor) -> Tensor:
    first = Scaled.apply(2, x, x.sin())
    return Scaled.apply(3, first, x.cos()).sum()


def plain(x: Tensor) -> Tensor:
    return ((x**2 * x.sin()) ** 3 * x.cos()).sum()


def is_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mapped", [None, "outside", "between", "inside"])
@pytest.mark.parametrize(("outer", "inner"), ORDERS)
def test_derivatives_nest_in_every_order(outer, inner, mapped) -> None:
    first, second = MODES[outer], MODES[inner]

    def nested(of: Callable[[Tensor], Tensor]) -> Tensor:
        if mapped is None:
            return first(second(of))(normal(3))
        if mapped == "outside":
            return vmap(first(second(of)))(normal(4, 3))
        if mapped == "between":
            return first(vmap(second(of)))(normal(4, 3))
        return first(second(vmap(of)))(normal(4, 3))

    is_same(nested(own), nested(plain))


@pytest.mark.parametrize("order", list(itertools.product("fr", repeat=3)), ids="".join)
def test_three_derivatives_nest_in_every_order(order) -> None:
    def nested(of: Callable[[Tensor], Tensor]) -> Tensor:
        made: Any = functools.reduce(lambda inner, kind: {"f": jacfwd, "r": jacrev}[kind](inner), order, of)
        return made(normal(2))

    is_same(nested(own), nested(plain))


@pytest.mark.parametrize("places", [(0, None), (None, 1), (1, 0)])
def test_maps_in_maps(places) -> None:
    x, w = (normal(2, 2, 2, seed=i) if place is not None else normal(2, 2, seed=i) for i, place in enumerate(places))

    def nested(of: Callable[..., Tensor]) -> list[Tensor]:
        def total(a: Tensor, b: Tensor) -> Tensor:
            return vmap(vmap(of, (0, None)), places)(a, b).sin().sum()

        return [vmap(vmap(of, (0, None)), places)(x, w), jacrev(total, 1)(x, w), *hessian(total, (0, 1))(x, w)[1]]

    is_same(nested(lambda x, w: Scaled.apply(2, x, w)), nested(lambda x, w: x**2 * w))


def test_dual_numbers_through_a_map() -> None:
    x = normal(4, 3)
    expected = torch.func.jvp(vmap(plain), (x,), (x.cos(),))[1]
    with forward_ad.dual_level():
        made = vmap(own)(forward_ad.make_dual(x, x.cos()))
        is_same(forward_ad.unpack_dual(made).tangent, expected)


def pairs(x: Tensor, matrix: Tensor) -> Tensor:
    return kp.features.PairFeatures(x).matmul(matrix)


def spline(x: Tensor, matrix: Tensor, policy: str = "linear") -> Tensor:
    ends = {"range": torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, x.shape[-1])}
    return kp.BSpline(4, extrapolation=policy)(x, ends).dense() @ matrix.mT


def recomputed(x: Tensor, matrix: Tensor) -> Tensor:
    ends = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, x.shape[-1])
    return RecomputedFeatures(kp.BSpline(4)._columns, x, (ends,), 21).matmul(matrix)


def legendre(x: Tensor, matrix: Tensor) -> Tensor:
    return kp.Legendre(7)(x / 4, {}).dense() @ matrix.mT


SPARSE = kp.features.SparseFeatures.of(
    torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.float64).to_sparse_csr()
)


def sparse(x: Tensor, matrix: Tensor) -> Tensor:
    return SPARSE.matmul(matrix[:, :3] * x.square().sum())


def generated(x: Tensor, matrix: Tensor) -> Tensor:
    return GeneratedWeights(matrix[0], 4, 9, 1).contract(x, x.sin())


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("product", [pairs, spline, recomputed, legendre, sparse, generated])
def test_products_nest_in_every_order(product, mapped) -> None:
    columns = {pairs: 9, spline: 21, recomputed: 21, legendre: 21, sparse: 9, generated: 9}[product]
    x, matrix = normal(2, 3, seed=1) * 0.7, normal(2, columns, seed=2)
    step_x, step_matrix = normal(2, 2, 3, seed=3) * 0.1, normal(2, 2, columns, seed=4)

    def along(t: Tensor) -> Tensor:
        def one(by_x: Tensor, by_matrix: Tensor) -> Tensor:
            return product(x + t * by_x, matrix + t.sin() * by_matrix).sin().sum()

        if mapped:
            return vmap(one)(step_x, step_matrix)
        return torch.stack([one(*each) for each in zip(step_x, step_matrix, strict=True)])

    h, t = 1e-4, torch.tensor(0.1, dtype=torch.float64)
    difference = (along(t + h) - 2 * along(t) + along(t - h)) / h**2
    made = [MODES[outer](MODES[inner](along))(t) for outer, inner in ORDERS]
    torch.testing.assert_close(made[0], difference, rtol=1e-5, atol=1e-5)
    for other in made[1:]:
        is_same(other, made[0])


@pytest.mark.parametrize("policy", ["linear", "clamp", "zero", "extended"])
def test_splines_at_the_upper_end_have_a_second_derivative_without_gradients_too(policy) -> None:
    weights = normal(1, 7)
    one = torch.ones(1, dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        return spline(x, weights, policy).sum()

    expected = jacrev(jacrev(value))(one)
    assert policy == "extended" or expected.abs() > 0.1
    with torch.no_grad():
        is_same(jacfwd(jacfwd(value))(one), expected)


def test_mapped_products_keep_no_more_than_their_arguments() -> None:
    """κ(x) made anew under vmap is kept no more than without: what the graph saves is x, the matrices and the ends."""
    x, matrix = normal(3, 50, 3).requires_grad_(), normal(3, 2, 21, seed=1).requires_grad_()
    sizes: list[int] = []

    def saved(value: Tensor) -> Tensor:
        sizes.append(value.numel())
        return value

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda value: value):
        vmap(recomputed)(x, matrix)
    assert max(sizes) <= x.numel()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("outer", "inner"), ORDERS)
def test_layer_norms_nest_in_every_order(outer, inner, affine) -> None:
    norm = LayerNorm(affine=affine).module(4, None, torch.float64)
    for i, value in enumerate(norm.parameters()):
        torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(i))
    x, step = normal(2, 4), normal(2, 4, seed=1)

    def along(t: Tensor) -> Tensor:
        return norm(x + t * step).sin().sum()

    h, t = 1e-4, torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(along(t), torch.func.vmap(along)(t.reshape(1))[0])
        difference = (along(t + h) - 2 * along(t) + along(t - h)) / h**2
    torch.testing.assert_close(MODES[outer](MODES[inner](along))(t), difference, rtol=1e-5, atol=1e-5)


def test_a_masked_head_of_several_channels_has_right_derivatives_in_every_order() -> None:
    head = kp.Head(3, 2, kp.HeadSpec(kp.Taylor(2), kp.Masked(0.4), channels=3), seed=0, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = head.psi["entries"].detach()

    def loss(values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(head, {"psi.entries": values}, (x,)).square().sum()

    # What is not within a transformation scatters.
    reference = torch.autograd.functional.jacobian(loss, values)
    torch.testing.assert_close(torch.func.grad(loss)(values), reference)
    torch.testing.assert_close(torch.func.jacfwd(loss)(values), reference)
    torch.testing.assert_close(
        torch.func.vmap(loss)(torch.stack([values, 2 * values])), torch.stack([loss(values), loss(2 * values)])
    )
