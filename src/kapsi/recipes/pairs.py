"""The head of pairs: a smooth function of each input, and of each pair of inputs that matters."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.expansion import Expansion, Extended, PairSplines
from kapsi.expansion.spline_knots import with_outer_knots
from kapsi.function import option
from kapsi.modules import Model
from kapsi.recipes.additive import (
    MAX_INPUTS,
    AdditiveLayout,
    breakpoints,
    curvature,
    layout_model,
    quantiles,
    second_moments,
    shares,
)
from kapsi.recipes.base import RecipeData
from kapsi.recipes.linear_in_parameters import LinearInParameters, columns_of
from kapsi.recipes.smoothing import PenaltyBlocks, SecondMoments, evidence, free_parameters, penalty_matrix

__all__ = ["PairsHead"]

BINS = 6
"""Bins of an input, for the choice of pairs."""

RANKED = 60
"""Most inputs with pairs: those with the largest effects of their own."""

RANKED_ROWS = 20_000
"""Rows that pairs are ranked on."""

CLEAR = 3.0
"""Standard deviations by which a pair must exceed the gain of pure noise."""

ALONE = 0.3
"""Weight of differences along one input, next to mixed ones: effects of one input belong to its own function."""

OF_PAIRS = 3
"""Most rounds of `evidence` with pairs."""

AGAIN = 1
"""Rounds of `evidence` after pairs were left out."""

USED = 0.3
"""Fewest parameters that the penalty leaves to a pair; other pairs are left out."""


@dataclass(frozen=True)
class PairsHead(LinearInParameters, name="pairs"):
    """A sum of smooth functions of inputs and of pairs of inputs: Σ_i f_i(x_i) + Σ_(i,j) f_ij(x_i, x_j) + b.

    Pairs are ranked by the gain of two-dimensional bins on the residuals of the additive fit, beyond that of pure noise; the
    first ones get products of splines of degree 1 with nodes at quantiles. The strength of the penalty of each pair is
    estimated with those of the inputs by `evidence`; a pair that it removes is left out. Pairs of a number and an
    indicator, or of two indicators, count too.

    Args:
        l2: common factor of the penalties; see `LinearInParameters`.
        pairs: most pairs, 1 to 1,000; None: by the number of rows.
        nodes: nodes of each input of a pair, 2 to 100; None: by the number of rows.
        rounds: rounds of `evidence`, 0 to 100.
    """

    complexity: ClassVar[int] = 3
    explainable: ClassVar[bool] = True
    blind: ClassVar[bool] = False
    normalized: ClassVar[bool] = False
    penalties: ClassVar[tuple[float, ...]] = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1)

    searched = (("pairs", (None, 3, 10, 30)),)

    pairs: int | None = option(None, minimum=1, maximum=1_000)
    nodes: int | None = option(None, minimum=2, maximum=100)
    rounds: int = option(6, minimum=0, maximum=100)

    def reason_against(self, data: RecipeData) -> str | None:
        inputs = data.x.shape[1]
        if inputs < 2:
            return "there is one input"
        if int(data.numeric.sum()) > MAX_INPUTS:
            return f"there are more than {MAX_INPUTS} numeric inputs"
        return super().reason_against(data)

    def width(self, rows: int, inputs: int) -> int:
        return inputs * (self._intervals(rows, inputs) + 3) + self._most(rows, inputs) * self._nodes(rows) ** 2

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        ranking = 2e-10 * min(rows, RANKED_ROWS) * (BINS * min(inputs, RANKED)) ** 2 * outputs
        return super().seconds(rows, inputs, outputs) + 2e-10 * self.rounds * self.width(rows, inputs) ** 3 + ranking

    def _intervals(self, rows: int, inputs: int) -> int:
        """Return the largest number of intervals of an input by itself."""
        return max(3, min(rows // 10, 12, 200 // max(1, inputs) - 3))

    def _nodes(self, rows: int) -> int:
        return self.nodes or (4 if rows < 250 else 5 if rows < 400 else 6)

    def _most(self, rows: int, inputs: int) -> int:
        """Return the largest number of pairs."""
        every = max(1, inputs * (inputs - 1) // 2)
        return min(every, self.pairs or (12 if rows < 5_000 else 20))

    def additive(self, data: RecipeData) -> AdditiveLayout:
        """Return the expansion of the inputs by themselves."""
        return AdditiveLayout.of(data, self._intervals(len(data.x), int(data.numeric.sum())), 3)

    def model(self, data: RecipeData, seed: int = 0) -> Model:
        return self.design(data, seed)[0]

    def design(self, data: RecipeData, seed: int = 0) -> tuple[Model, Tensor]:
        alone = self.additive(data)
        singles = blocks = alone.blocks(data)
        model = layout_model(alone.expansion(), alone.tensors(), data, seed)
        moments = second_moments(model, data)
        strength = evidence(moments, blocks, self.rounds)
        rest, effects = residuals(model, moments, penalty_matrix(moments.columns.diagonal(), blocks, strength), data)
        chosen = significant_pairs(*rest, strongest_inputs(rest[0], effects))[: self._most(*data.x.shape)]
        first = len(strength)
        if chosen:
            groups = PairGroup.of(data, chosen, self._nodes(len(data.x)))
            model = _with_pairs(alone, groups, data, seed)
            moments = second_moments(model, data)
            strength = F.pad(strength, (0, len(chosen)), value=torch.nan)
            blocks = singles + _pair_blocks(groups, alone.columns, first)
            strength = evidence(moments, blocks, min(self.rounds, OF_PAIRS), strength)
            clear = free_parameters(moments, blocks, strength) > USED
            if not bool(clear[-len(chosen) :].all()):
                groups, columns, kept = _clear(alone, groups, clear)
                model = _with_pairs(alone, groups, data, seed)
                moments = moments._replace(columns=moments.columns[columns][:, columns], mixed=moments.mixed[columns])
                blocks = singles + _pair_blocks(groups, alone.columns, first)
                strength = evidence(moments, blocks, min(self.rounds, AGAIN), strength[kept])
        return model, penalty_matrix(moments.columns.diagonal(), blocks, strength) * curvature(data)


class PairGroup(NamedTuple):
    """Pairs with equal numbers of nodes.

    Attributes:
        pairs: inputs of each pair, `(2, count)`.
        first, second: knots of the first and second input of each pair, `(knots, count)`.
    """

    pairs: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, data: RecipeData, pairs: list[tuple[int, int]], nodes: int) -> list[PairGroup]:
        """Return the pairs in groups, the input with fewer nodes first."""
        points = {i: node_positions(data, i, nodes) for pair in pairs for i in pair}
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for pair in pairs:
            i, j = sorted(pair, key=lambda i: (len(points[i]), i))
            groups.setdefault((len(points[i]), len(points[j])), []).append((i, j))
        return [
            cls(
                torch.tensor(members).T.contiguous(),
                *(with_outer_knots(torch.stack([points[pair[k]] for pair in members], 1), 1) for k in (0, 1)),
            )
            for _, members in sorted(groups.items())
        ]

    def expansion(self) -> PairSplines:
        """Return the expansion of the pairs."""
        return PairSplines(self.pairs.shape[1], (len(self.first) - 3, len(self.second) - 3), 1)


def node_positions(data: RecipeData, i: int, nodes: int) -> Tensor:
    """Return the nodes of an input: its values if there are few, otherwise quantiles of the rows."""
    values, group = data.x[:, i].unique(return_inverse=True)
    if len(values) <= nodes:
        return values if len(values) > 1 else torch.cat([values, values + 1])
    total = data.x.new_zeros(len(values)).index_add_(0, group, shares(data))
    return values[quantiles(total, nodes - 1)]


def _with_pairs(alone: AdditiveLayout, groups: list[PairGroup], data: RecipeData, seed: int) -> Model:
    """Return the model of an additive layout and pairs."""
    parts = (*alone.expansions(), *(group.expansion() for group in groups))
    tensors = [*alone.tensors_of_parts(), *(group._asdict() for group in groups)]
    kappa: Expansion = Extended(parts) if len(parts) > 1 else parts[0]
    named = {str(i): values for i, values in enumerate(tensors)} if len(parts) > 1 else tensors[0]
    return layout_model(kappa, named, data, seed)


def _clear(alone: AdditiveLayout, groups: list[PairGroup], clear: Tensor) -> tuple[list[PairGroup], Tensor, Tensor]:
    """Return the groups without pairs that have no free parameters, the columns that remain, and the strengths.

    Args:
        alone: the inputs by themselves, whose columns come first.
        groups: the pairs.
        clear: whether the parameters of each strength are kept, those of pairs last.
    """
    pairs = clear[len(clear) - sum(group.pairs.shape[1] for group in groups) :]
    kept: list[PairGroup] = []
    columns = [torch.ones(alone.columns, dtype=torch.bool)]
    for group, part in zip(groups, pairs.split([group.pairs.shape[1] for group in groups]), strict=True):
        columns.append(part.repeat_interleave((len(group.first) - 2) * (len(group.second) - 2)))
        if bool(part.any()):
            kept.append(PairGroup(group.pairs[:, part], group.first[:, part], group.second[:, part]))
    strengths = torch.cat([torch.ones_like(clear[: len(clear) - len(pairs)]), pairs])
    return kept, torch.cat(columns).nonzero()[:, 0], strengths.nonzero()[:, 0]


def _pair_blocks(groups: list[PairGroup], offset: int, number: int) -> list[PenaltyBlocks]:
    """Return the penalties of the groups of pairs, for the number of the first column and of the first strength."""
    blocks: list[PenaltyBlocks] = []
    for group in groups:
        count, sizes = group.pairs.shape[1], (len(group.first) - 2, len(group.second) - 2)
        width = sizes[0] * sizes[1]
        columns = offset + torch.arange(count * width).reshape(count, width)
        blocks.append(PenaltyBlocks(columns, _surface_root(*sizes).expand(count, -1, -1), number + torch.arange(count)))
        offset, number = offset + count * width, number + count
    return blocks


@functools.cache
def _surface_root(first: int, second: int) -> Tensor:
    """Return R with ‖Rc‖² the squares of mixed differences of neighboring nodes, and those in one direction with less weight.

    It has one row less than columns: a constant is free.
    """
    rows, columns = (torch.eye(size, dtype=torch.float64) for size in (first, second))
    down, across = rows.diff(dim=0), columns.diff(dim=0)
    slopes = [ALONE * torch.kron(down, columns), ALONE * torch.kron(rows, across)]
    both = torch.cat([*slopes, torch.kron(down, across)])
    values, vectors = torch.linalg.eigh(both.T @ both)
    return values[1:].sqrt()[:, None] * vectors.T[1:]


# ------------------------------------------------------------------------------------------------ the choice of pairs


def residuals(
    model: Model, moments: SecondMoments, penalty: Tensor, data: RecipeData
) -> tuple[tuple[RecipeData, Tensor], Tensor]:
    """Return some rows with the residuals of a penalized least-squares fit, scaled to a variance of 1, and with its values."""
    theta = torch.cholesky_solve(moments.mixed, torch.linalg.cholesky(moments.columns + penalty))
    data = data.take(torch.arange(0, len(data.x), -(-len(data.x) // RANKED_ROWS)))
    y = F.one_hot(data.y, data.classes).to(data.x.dtype) if data.classes else data.y
    share = shares(data)[:, None]
    fitted = torch.cat([phi @ theta for phi in columns_of(model, data.x)()])
    if data.classes:
        # Probabilities: values beyond 0 and 1 would look like interactions.
        fitted = (fitted + (share * (y - fitted)).sum(0)).clamp(0, 1)
        fitted = fitted / fitted.sum(1, keepdim=True).clamp_min(1e-9)
    rest = y - fitted
    rest = rest - (share * rest).sum(0)
    return (data, rest / (share * rest.square()).sum(0).clamp_min(1e-300).sqrt()), fitted


def strongest_inputs(data: RecipeData, fitted: Tensor) -> Tensor:
    """Return the inputs with the largest effects in an additive fit, at most `RANKED`, ascending."""
    inputs = data.x.shape[1]
    if inputs <= RANKED:
        return torch.arange(inputs)
    share = shares(data)[:, None]
    explained = fitted.new_zeros(inputs)
    for i in range(inputs):
        code = bin_codes(data, i)
        weight = fitted.new_zeros(int(code.max()) + 1).index_add_(0, code, share[:, 0])
        sums = fitted.new_zeros(len(weight), fitted.shape[1]).index_add_(
            0, code, share * (fitted - (share * fitted).sum(0))
        )
        explained[i] = (sums.square() / weight.clamp_min(1e-300)[:, None]).sum()
    return explained.topk(RANKED).indices.sort().values


def significant_pairs(data: RecipeData, rest: Tensor, inputs: Tensor) -> list[tuple[int, int]]:
    """Return pairs of inputs that explain residuals of unit variance, the most significant first.

    Inputs are divided into bins of about equal weight. The gain of a pair is the decrease of the squared error by the means
    of its cells, beyond the means of the bins of either input; with pure noise it is a χ² variable with as many degrees of
    freedom as there are further cells.
    """
    codes = [bin_codes(data, i) for i in inputs.tolist()]
    sizes = torch.tensor([int(code.max()) + 1 for code in codes])
    starts = F.pad(sizes.cumsum(0), (1, 0))[:-1]
    owner = torch.arange(len(codes)).repeat_interleave(sizes)
    cells = rest.new_zeros(len(rest), int(sizes.sum()))
    cells.scatter_(1, torch.stack(codes, 1) + starts, 1.0)
    weight = shares(data)[:, None] * len(rest)
    counts = cells.T @ (weight * cells)
    gain = torch.zeros_like(counts)
    alone = rest.new_zeros(len(counts))
    bins = counts.diagonal().clamp_min(1e-9)
    for residual in rest.T:
        sums = cells.T @ ((weight[:, 0] * residual)[:, None] * cells)
        gain += torch.where(counts > 1e-9, sums.square() / counts.clamp_min(1e-9), 0)
        alone += sums.diagonal().square() / bins
    group = F.one_hot(owner, len(codes)).to(rest.dtype)
    single = group.T @ alone
    filled = group.T @ (counts > 1e-9).to(rest.dtype) @ group
    freedom = (filled - sizes[:, None] - sizes + 1) * rest.shape[1]
    excess = group.T @ gain @ group - single[:, None] - single - freedom
    score = torch.where(freedom > 0, excess / (2 * freedom).clamp_min(1).sqrt(), -torch.inf)
    i, j = torch.triu_indices(len(codes), len(codes), 1)
    order = score[i, j].argsort(descending=True, stable=True)
    order = order[score[i, j][order] > CLEAR]
    return [(int(inputs[i[k]]), int(inputs[j[k]])) for k in order.tolist()]


def bin_codes(data: RecipeData, i: int) -> Tensor:
    """Return the bin of an input in each row, from 0."""
    x = data.x[:, i].contiguous()
    points = breakpoints(x, data.weight, BINS, 0)[0]
    if points is None:
        return (x > x.min()).long()
    return torch.bucketize(x, points[1:-1].contiguous(), right=True)
