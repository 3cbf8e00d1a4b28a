"""Weights made by a frozen random network, block by block, never all at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kapsi.derivatives import OwnDerivatives
from kapsi.errors import SpecError
from kapsi.features import Features, ProductFeatures, add, formed
from kapsi.function import Param, Params, Tensors, option
from kapsi.reconciliation.base import Reconciliation
from kapsi.weights import ActingWeights, Weights

__all__ = ["HyperNet"]

BLOCK = 2**19
"""Entries of the output matrix that are there at a time: 2 MiB in float32, which stay in the cache."""

# The constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers.
GOLDEN, FIRST, SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(word: Tensor, places: int) -> Tensor:
    """Return 64-bit words shifted to the right, zeros coming in: torch's own shift repeats the sign."""
    return (word >> places) & ((1 << (64 - places)) - 1)


def random_signs(seed: int, start: int, count: int, width: int, like: Tensor) -> Tensor:
    """Return rows `start` to `start + count` of the random matrix of a seed: `(count, width)` of −1 and 1.

    Row d consists of the bits of words d·W + 1, d·W + 2, … of the generator splitmix64 in its counter form, W = ⌈width/64⌉
    of them, the lowest bit of each first; 0 stands for −1. Any rows can be made at any time, on any device, alike.
    """
    words = -(-width // 64)
    index = torch.arange(start * words + 1, (start + count) * words + 1, device=like.device)
    word = index * GOLDEN + seed
    word = (word ^ _shifted(word, 30)) * FIRST
    word = (word ^ _shifted(word, 27)) * SECOND
    word = word ^ _shifted(word, 31)
    # Byte by byte through a table, many times as fast as bit by bit.
    places = torch.arange(8, device=like.device)
    table = ((torch.arange(256, device=like.device).unsqueeze(-1) >> places) & 1).to(like.dtype) * 2 - 1
    octets = (word.unsqueeze(-1) >> (8 * places)) & 255
    return table.index_select(0, octets.flatten()).reshape(count, words * 64)[:, :width]


def mixed_seed(seed: int, channel: int) -> int:
    """Return where a channel of a seed begins, signed 64 bits: an output of splitmix64 itself.

    Places a step of the generator apart would give the same bits, shifted by a word.
    """
    word = (seed * GOLDEN + channel * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64
    word = ((word ^ (word >> 30)) * FIRST) % 2**64
    word = ((word ^ (word >> 27)) * SECOND) % 2**64
    word ^= word >> 31
    return word - 2**64 if word >= 2**63 else word


@dataclass(frozen=True)
class _Plan:
    """The random array G `(q, t, n, k)` of ±1, in blocks of its first axis; `start` is its first column among all of a seed."""

    seed: int
    start: int
    q: int
    t: int
    n: int
    k: int

    @property
    def sides(self) -> tuple[int, int]:
        """Return how many rows of q and of t a block has, but for the last ones."""
        across = min(self.t, max(1, BLOCK // (self.n * self.k)))
        return min(self.q, max(1, BLOCK // (self.t * self.n * self.k))) if across == self.t else 1, across

    def blocks(self, like: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (slice of q, slice of t, that part of G as `(rows of q × rows of t, n, k)`), in order."""
        down, across = self.sides
        for first in range(0, self.q, down):
            rows = min(down, self.q - first)
            for second in range(0, self.t, across):
                columns = min(across, self.t - second)
                made = random_signs(
                    self.seed, self.start + first * self.t + second, rows * columns, self.n * self.k, like
                )
                block = made.reshape(rows * columns, self.n, self.k)
                yield slice(first, first + rows), slice(second, second + columns), block


# All derivatives of y_i = Σ u_q v_t h_k G_qtik are sums of the form S(u, v, h, g) = Σ u_q v_t h_k g_i G_qtik with one of the
# four left out. u, v and g have rows; h has none. Each is made in one pass over the blocks of G, which are never kept.
U, V, H, G = range(4)


def _contracted(plan: _Plan, out: int, u: Tensor, v: Tensor, h: Tensor, g: Tensor) -> Tensor:
    """Return the derivative of S by the argument `out`, whose own value is not looked at: rows `(b, …)`, or `(k,)` for h."""
    if torch.amp.is_autocast_available(u.device.type) and torch.is_autocast_enabled(u.device.type):
        with torch.autocast(u.device.type, enabled=False):
            return _contracted(plan, out, u, v, h, g)
    kind = u.dtype
    # Sums over many blocks: 16 bits have too few digits for them.
    u, v, h, g = (values.to(torch.promote_types(kind, torch.float32)) for values in (u, v, h, g))
    parts: dict[int, Tensor] = {}  # by the place in u or v where they begin; those of the same place add up
    # On the meta device one block stands for all: sizes are followed, and all are made in the memory of one.
    for rows, columns, block in itertools.islice(plan.blocks(u), 1 if u.is_meta else None):
        left, right = u[:, rows], v[:, columns]
        if out in (G, H):
            kappa = (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(1)
        if out == H:
            place, made = 0, (kappa.T @ g).flatten() @ block.flatten(0, 1)
        else:
            weights = (block.flatten(0, 1) @ h).unflatten(0, block.shape[:2])
            if out == G:
                place, made = 0, kappa @ weights
            else:
                grid = (g @ weights.T).unflatten(-1, (left.shape[1], right.shape[1]))
                if out == U:
                    place, made = rows.start, (grid @ right.unsqueeze(-1)).squeeze(-1)
                else:
                    place, made = columns.start, (left.unsqueeze(-2) @ grid).squeeze(-2)
        parts[place] = parts[place] + made if place in parts else made
    if u.is_meta:
        return u.new_empty({U: u.shape, V: v.shape, H: h.shape, G: (u.shape[0], plan.n)}[out], dtype=kind)
    return torch.cat(list(parts.values()), -1).to(kind)


class _Contraction(OwnDerivatives):
    """`_contracted`, whose derivatives are contractions again; G is made anew in each, and only its arguments are kept."""

    @staticmethod
    def forward(plan: _Plan, out: int, u: Tensor, v: Tensor, h: Tensor, g: Tensor) -> Tensor:
        return _contracted(plan, out, u, v, h, g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan, ctx.out, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # S is linear in each argument: the derivative by one, with the gradient in the place of what was left out.
        values = list(ctx.saved_tensors)
        values[ctx.out] = gradient
        wanted = ctx.needs_input_grad[2:]
        made = [
            _Contraction.apply(ctx.plan, place, *values) if wanted[place] and place != ctx.out else None
            for place in range(4)
        ]
        return (None, None, *made)

    @staticmethod
    def jvp_rule(ctx: Any, values: Sequence[Tensor], *tangents: Any) -> Tensor:
        terms = []
        for place, tangent in enumerate(tangents[2:]):
            if place != ctx.out and tangent is not None:
                changed = [*values[:place], tangent, *values[place + 1 :]]
                terms.append(_Contraction.apply(ctx.plan, ctx.out, *changed))
        return add(terms)


@dataclass(frozen=True)
class GeneratedWeights(ActingWeights):
    """ψ(w)_id = Σ_k h_k G_dik with G of ±1 from a seed: `hidden` h `(k,)` or `(channels, k)`, `rows` n, `width` D.

    `start` is the first column among all of the seed.
    """

    hidden: Tensor
    rows: int
    width: int
    seed: int
    start: int = 0

    @property
    def channels(self) -> int | None:
        return None if self.hidden.dim() == 1 else self.hidden.shape[0]

    @property
    def columns(self) -> int:
        return self.width

    @property
    def outputs(self) -> int:
        return self.rows

    def _of_channels(self, one: Any) -> Tensor:
        if self.channels is None:
            made: Tensor = one(self.hidden, mixed_seed(self.seed, 0))
            return made
        return torch.stack([one(h, mixed_seed(self.seed, c)) for c, h in enumerate(self.hidden.unbind(0))])

    def matrix(self) -> Tensor:
        def one(hidden: Tensor, seed: int) -> Tensor:
            plan = _Plan(seed, self.start, self.columns, 1, self.rows, hidden.shape[0])
            return torch.cat([block @ hidden for _, _, block in plan.blocks(hidden)]).T

        return self._of_channels(one)

    def row_sums(self) -> Tensor:
        ones = self.hidden.new_ones(self.columns)
        return self.contract(ones, self.hidden.new_ones(1))

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ψ(w) (u ⊗ v), `(..., n)` or `(..., channels, n)`, for u `(..., q)` and v `(..., t)`."""
        lead, q, t = left.shape[:-1], left.shape[-1], right.shape[-1]
        kind = torch.promote_types(torch.promote_types(left.dtype, right.dtype), self.hidden.dtype)
        u, v = left.reshape(-1, q).to(kind), right.reshape(-1, t).to(kind)

        def one(hidden: Tensor, seed: int) -> Tensor:
            plan, hidden = _Plan(seed, self.start, q, t, self.rows, hidden.shape[0]), hidden.to(kind)
            nothing = u.new_zeros(u.shape[0], self.rows)
            # The compiler traces no function with a forward derivative; it decides by itself what is made again.
            plain = torch.compiler.is_compiling()
            made: Tensor = (_contracted if plain else _Contraction.apply)(plan, G, u, v, hidden, nothing)
            return made.reshape(*lead, self.rows)

        if self.channels is None:
            return one(self.hidden, mixed_seed(self.seed, 0))
        each = [one(h, mixed_seed(self.seed, c)) for c, h in enumerate(self.hidden.unbind(0))]
        return torch.stack(each, -2)

    def split(self, sizes: Sequence[int]) -> list[Weights]:
        starts = itertools.accumulate(sizes, initial=self.start)
        return [replace(self, width=size, start=start) for size, start in zip(sizes, starts, strict=False)]

    def act(self, features: Features) -> Tensor:
        if isinstance(features, ProductFeatures):
            return self.contract(features.left, features.right)
        values = formed(features, "a hypernet")
        return self.contract(values, torch.ones_like(values[..., :1]))

    def passes(self, features: Features) -> float:
        q, t = features.grid if isinstance(features, ProductFeatures) else (self.columns, 1)
        down, across = _Plan(self.seed, 0, q, t, self.rows, self.hidden.shape[-1]).sides
        return (q / down) * (t / across)

    def describe(self, features: Features) -> str:
        parts = "neither κ nor ψ" if isinstance(features, ProductFeatures) else "ψ not"
        return f"ψ made block by block from a seed, {parts} formed"


@dataclass(frozen=True)
class HyperNet(Reconciliation, name="hypernet"):
    """Weights made by a frozen random network: ψ(w) = reshape(G h(w)), w `(length,)`, G `(n·D, k)` of ±1 from a seed; l = length.

    h is the identity (k = length), or a frozen random layer with ReLU, h(w) = max(0, F w) with k = hidden. G is never stored
    and never there as a whole: its blocks are made when they are needed, in the forward and again in the backward pass,
    so that n × D is not limited by memory. The time is that of making n·D·k signs. F is a buffer that is saved with the model.

    Args:
        length: l, the number of parameters, 1 to 2²⁰.
        hidden: units of the frozen hidden layer, none by default.
        seed: of G, 0 to 2³¹ − 1; heads of equal size and seed have the same G, channels of one head have different ones.

    Source: arXiv 2407.04819, "HyperNets based Parameter Reconciliation"; Ha et al., HyperNetworks (arXiv 1609.09106).

    Example:
        >>> HyperNet(length=8).count(out_features=64, factors=(785, 784))
        8
    """

    examples = ({"length": 4}, {"length": 3, "hidden": 16, "seed": 5})

    length: int = option(16, minimum=1, maximum=2**20)
    hidden: int | None = option(None, minimum=1, maximum=2**20)
    seed: int = option(0, minimum=0, maximum=2**31 - 1)

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        units = self.hidden or self.length
        if out_features * units > BLOCK * 64:
            raise SpecError(
                f"HyperNet: {out_features:,} outputs × {units:,} units make a block of {out_features * units:,} numbers; "
                f"at most {BLOCK * 64:,} are allowed; take fewer units"
            )
        # Rows of ψ have an expected square norm of one.
        vector = Param((self.length,), (factors[0] * factors[1] * units) ** -0.5)
        if self.hidden is None:
            return {"vector": vector}
        return {
            "vector": vector,
            "layer": Param((self.hidden, self.length), (2 / self.length) ** 0.5 * self.length**0.5, trainable=False),
        }

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        hidden = params["vector"]
        if self.hidden is not None:
            hidden = torch.relu(params["layer"] @ hidden.unsqueeze(-1)).squeeze(-1)
        return GeneratedWeights(hidden, out_features, factors[0] * factors[1], self.seed)
